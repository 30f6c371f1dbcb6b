// Memory of the device and pinned memory of the host.
//
// Addresses are never used twice, and allocations lie apart, so that an access behind the end of one or after its
// end meets a shadow that says so.
#include <sys/mman.h>

#include <cstdlib>
#include <cstring>

#include "emulator.hpp"

namespace emulator {
namespace {

constexpr size_t RANGE = DEVICE_RANGE;
constexpr size_t GAP = 512;
constexpr size_t WORD = WRITER_WORD;

struct Arena {
    uintptr_t base = 0, next = 0;
    uint8_t* shadow = nullptr;
    // For each word the work that wrote it last.
    uint32_t* writers = nullptr;
    std::map<uintptr_t, size_t> live, freed;
    size_t used = 0;
    size_t total = size_t(8) << 30;

    Arena() {
        base = reserve();
        shadow = reinterpret_cast<uint8_t*>(reserve());
        static_assert(sizeof *writers == WORD, "writers take a range of the same size");
        writers = reinterpret_cast<uint32_t*>(reserve());
        next = base + GAP;
        if (const char* limit = std::getenv("CUDA_EMULATOR_MEMORY")) total = std::strtoull(limit, nullptr, 10);
    }
    static uintptr_t reserve() {
        void* at = mmap(nullptr, RANGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (at == MAP_FAILED) std::abort();
        return reinterpret_cast<uintptr_t>(at);
    }
    uint8_t* shadow_of(uintptr_t at) { return shadow + (at - base); }
    uint32_t* writer_of(uintptr_t at) { return writers + (at - base) / WORD; }
};

std::unique_ptr<Arena> arenas[MOST_DEVICES];
int used = 0;
Arena* active = nullptr;

Arena& arena() {
    if (!active) use_device(0);
    return *active;
}

std::map<uintptr_t, size_t>& pinned() {
    static std::map<uintptr_t, size_t> all;
    return all;
}

// Whole pages of a range go back to the system.
void drop_pages(uintptr_t at, size_t bytes) {
    uintptr_t first = (at + 4095) & ~uintptr_t(4095), last = (at + bytes) & ~uintptr_t(4095);
    if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
}

}  // namespace

DeviceView device_view;

void use_device(int device) {
    if (!arenas[device]) arenas[device] = std::make_unique<Arena>();
    used = device;
    active = arenas[device].get();
    device_view.base = active->base;
    device_view.shadow = active->shadow;
    device_view.writers = active->writers;
}

int used_device() { return used; }

uintptr_t device_reserve(size_t bytes) {
    Arena& a = arena();
    if (bytes > a.total - a.used || a.next + bytes + GAP > a.base + RANGE) return 0;
    uintptr_t at = a.next;
    a.next = (at + bytes + GAP + 255) & ~uintptr_t(255);
    a.live[at] = bytes;
    a.used += bytes;
    return at;
}

void device_begin(uintptr_t at) {
    size_t bytes = device_size(at);
    // What a kernel reads without having been written is a number that nobody takes for a result.
    std::memset(reinterpret_cast<void*>(at), 0xfb, bytes);
    std::memset(arena().shadow_of(at), UNWRITTEN, bytes);
}

uintptr_t device_alloc(size_t bytes) {
    uintptr_t at = device_reserve(bytes);
    if (at) device_begin(at);
    return at;
}

size_t device_size(uintptr_t at) {
    auto found = arena().live.find(at);
    return found == arena().live.end() ? 0 : found->second;
}

bool device_free(uintptr_t at) {
    Arena& a = arena();
    auto found = a.live.find(at);
    if (found == a.live.end()) return false;
    size_t bytes = found->second;
    std::memset(a.shadow_of(at), NO_MEMORY, bytes);
    drop_pages(at, bytes);
    drop_pages(reinterpret_cast<uintptr_t>(a.shadow_of(at)), bytes);
    drop_pages(reinterpret_cast<uintptr_t>(a.writer_of(at)), bytes);
    a.used -= bytes;
    a.freed[at] = bytes;
    a.live.erase(found);
    return true;
}

size_t device_used() { return arena().used; }
size_t device_total() { return arena().total; }

void set_writer(uint32_t work) { device_view.writer = work; }

bool any_writer(uintptr_t at, size_t bytes, const std::function<bool(uint32_t)>& found) {
    Arena& a = arena();
    if (!bytes || at - a.base >= RANGE) return false;
    for (uint32_t *writer = a.writer_of(at), *last = a.writer_of(at + bytes - 1); writer <= last; writer++)
        if (*writer && found(*writer)) return true;
    return false;
}

std::string describe(uintptr_t at, size_t bytes, bool write) {
    Arena& a = arena();
    std::string text = (write ? "a write of " : "a read of ") + std::to_string(bytes) + " bytes ";
    for (auto* all : {&a.live, &a.freed}) {
        auto after = all->upper_bound(at);
        if (after == all->begin()) continue;
        auto [start, size] = *std::prev(after);
        if (at >= start + size + GAP) continue;
        text += "at offset " + std::to_string(at - start) + " of an allocation of " + std::to_string(size) + " bytes";
        if (all == &a.freed) return text + " that was freed";
        if (at + bytes > start + size) return text + ": out of bounds";
        if (*a.shadow_of(at) == NO_MEMORY) return text + " of a pool, to which its stream has not come";
        return text + " that nothing has written";
    }
    for (int device = 0; device < MOST_DEVICES; device++)
        if (arenas[device] && arenas[device].get() != &a && at - arenas[device]->base < RANGE)
            return text + "of device " + std::to_string(device) + " by device " + std::to_string(used);
    return text + "outside of all allocations";
}

std::string check_range(uintptr_t at, size_t bytes, bool reads) {
    if (bytes == 0) return {};
    Arena& a = arena();
    if (at - a.base >= RANGE) return describe(at, bytes, !reads);
    const uint8_t* shadow = a.shadow_of(at);
    for (size_t i = 0; i < bytes; i++)
        if (shadow[i] == NO_MEMORY || (reads && shadow[i] == UNWRITTEN)) return describe(at + i, bytes - i, !reads);
    return {};
}

void mark_written(uintptr_t at, size_t bytes) {
    if (bytes) std::memset(arena().shadow_of(at), WRITTEN, bytes);
    stamp(at, bytes);
}

void copy_shadow(uintptr_t to, uintptr_t from, size_t bytes) {
    if (bytes) std::memmove(arena().shadow_of(to), arena().shadow_of(from), bytes);
    stamp(to, bytes);
}

void* host_alloc(size_t bytes) {
    void* at = std::aligned_alloc(4096, (bytes + 4095) & ~size_t(4095));
    if (at) {
        std::memset(at, 0xfb, bytes);
        pinned()[reinterpret_cast<uintptr_t>(at)] = bytes;
    }
    return at;
}

bool host_free(void* at) {
    if (!pinned().erase(reinterpret_cast<uintptr_t>(at))) return false;
    std::free(at);
    return true;
}

size_t pinned_bytes() {
    size_t sum = 0;
    for (auto& [at, bytes] : pinned()) sum += bytes;
    return sum;
}

bool is_pinned(const void* at, size_t bytes) {
    auto address = reinterpret_cast<uintptr_t>(at);
    auto after = pinned().upper_bound(address);
    if (after == pinned().begin()) return false;
    auto [start, size] = *std::prev(after);
    return address + bytes <= start + size;
}

}  // namespace emulator
