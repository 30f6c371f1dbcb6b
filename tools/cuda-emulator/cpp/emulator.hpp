// What the parts of the stand-in driver share.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace emulator {

struct Dim {
    unsigned x, y, z;
    size_t count() const { return size_t(x) * y * z; }
};

// ---- memory (memory.cpp) ---------------------------------------------------------------------------------------

// The memory of each device lies in one range of addresses with as large a shadow, of a byte for each byte.
enum Shadow : uint8_t { NO_MEMORY = 0, UNWRITTEN = 1, WRITTEN = 2 };

constexpr int MOST_DEVICES = 16;
// Everything below is about the memory of the device that was chosen last, which the driver's lock guards.
void use_device(int device);
int used_device();

// 0 when the device has not so much left.
uintptr_t device_alloc(size_t bytes);
// The same in two parts: an address, and memory at it.
uintptr_t device_reserve(size_t bytes);
void device_begin(uintptr_t at);
// Bytes of an allocation, 0 where there is none.
size_t device_size(uintptr_t at);
// Whether `at` is the start of an allocation, which is gone then.
bool device_free(uintptr_t at);
size_t device_used();
size_t device_total();
// A sentence on what is wrong with a range of device memory; empty when it is all right.
std::string check_range(uintptr_t at, size_t bytes, bool reads);
// Which piece of work writes device memory from here on. 0: writes leave what is known of writers as it is.
void set_writer(uint32_t work);
// Who was the last to write words of four bytes: calls `found` with each that `set_writer` has named, until it gives `true`.
bool any_writer(uintptr_t at, size_t bytes, const std::function<bool(uint32_t)>& found);
void mark_written(uintptr_t at, size_t bytes);
void copy_shadow(uintptr_t to, uintptr_t from, size_t bytes);

void* host_alloc(size_t bytes);
bool host_free(void* at);
size_t pinned_bytes();
// Whether all of it is memory that `host_alloc` gave.
bool is_pinned(const void* at, size_t bytes);

constexpr size_t DEVICE_RANGE = size_t(1) << 40;
// Bytes that share the number of who wrote them last.
constexpr size_t WRITER_WORD = 4;
// What an access looks at: where the chosen device's memory, its shadow and its words' last writers begin, and the writer.
struct DeviceView {
    uintptr_t base = 0;
    uint8_t* shadow = nullptr;
    uint32_t* writers = nullptr;
    uint32_t writer = 0;
};
extern DeviceView device_view;
inline bool in_device_range(uintptr_t at) { return at - device_view.base < DEVICE_RANGE; }
// Notes who wrote this range.
inline void stamp(uintptr_t at, size_t bytes) {
    if (!device_view.writer || !bytes) return;
    uintptr_t offset = at - device_view.base;
    for (size_t i = offset / WRITER_WORD; i <= (offset + bytes - 1) / WRITER_WORD; i++)
        device_view.writers[i] = device_view.writer;
}
// Whether an access of a kernel to device memory, in its range, is all right.
inline bool device_access(uintptr_t at, size_t bytes, bool write) {
    uint8_t* shadow = device_view.shadow + (at - device_view.base);
    uint8_t least = write ? UNWRITTEN : WRITTEN;
    // Most accesses are of a few bytes that have been written before.
    constexpr uint64_t ALL = 0x0101010101010101u * WRITTEN;
    uint64_t of_all = 0;
    if (bytes <= 8) {
        std::memcpy(&of_all, shadow, bytes);
        if (of_all == (bytes == 8 ? ALL : ALL & ((uint64_t(1) << 8 * bytes) - 1))) {
            if (write) stamp(at, bytes);
            return true;
        }
    }
    for (size_t i = 0; i < bytes; i++)
        if (shadow[i] < least) return false;
    if (write) {
        std::memset(shadow, WRITTEN, bytes);
        stamp(at, bytes);
    }
    return true;
}
std::string describe(uintptr_t at, size_t bytes, bool write);

// ---- kernels (execute.cpp) ---------------------------------------------------------------------------------------

// A module as it is mapped once.
struct Image {
    void* handle = nullptr;
    uintptr_t shared_begin = 0, shared_end = 0;
    // What is mapped of it: constants may be read there.
    uintptr_t begin = 0, end = 0;
};

// One for each worker: shared variables are static ones, and blocks that run at the same time have their own.
struct Module {
    std::vector<Image> images;
};

constexpr unsigned MOST_WORKERS = 8;
// How many blocks of a kernel may run at the same time.
unsigned workers();
// Calls `work` with the number of each worker, at the same time; number 0 is the caller. All who have begun are waited for, and
// whoever is late is not called, so the work is to be such that any of them may do all of it.
void run_by_all(const std::function<void(unsigned)>& work);

struct Counters {
    uint64_t launches = 0, threads = 0, reads = 0, writes = 0, barriers = 0, warp_ops = 0, matrix_ops = 0, microseconds = 0;
    void add(const Counters& other) {
        launches += other.launches;
        threads += other.threads;
        reads += other.reads;
        writes += other.writes;
        barriers += other.barriers;
        warp_ops += other.warp_ops;
        matrix_ops += other.matrix_ops;
        microseconds += other.microseconds;
    }
};

struct Function {
    std::shared_ptr<Module> module;
    std::string name;
    // In each image of the module.
    std::vector<void (*)(void**)> calls;
    std::vector<unsigned> sizes;
    // Of a block, by the launch bounds of the kernel.
    unsigned max_threads;
    size_t max_dynamic_shared = 48 << 10;
    Counters counters;
};

// Arguments as they were when the kernel was launched.
struct Launch {
    Function* function;
    Dim grid, block;
    size_t shared;
    std::vector<std::vector<unsigned char>> arguments;
    // Whether a card may start it while the kernel before it runs.
    bool early = false;
};

// Work of a stream that may still run when a kernel starts that is started early, and its number for `set_writer`.
struct Unfinished {
    uint32_t work;
    std::string name;
};

// Runs a kernel to its end. Gives a sentence where it did what no kernel may, else nothing. `unfinished`, in the order of the
// numbers and with the kernel itself as the last, is what it may not read of before it has waited for the one before it.
std::string execute(const Launch& launch, const std::vector<Unfinished>& unfinished);

// The words of the driver's last error.
std::string last_error();

// Adds work of this name to a stream of the driver, for libraries beside it. Gives a sentence where something is wrong. 0, or
// an error. It does not begin before `ready` says so, which is asked again and again once all work before it has run.
int enqueue_work(void* stream, const char* name, std::function<std::string()> work, std::function<bool()> ready = nullptr);

// The device whose context is current on this thread; -1 without one.
int current_device();

inline float of_bf16(uint16_t bits) {
    uint32_t all = uint32_t(bits) << 16;
    float x;
    std::memcpy(&x, &all, 4);
    return x;
}
inline uint16_t to_bf16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return uint16_t(bits >> 16 | 0x40);
    return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline float of_f16(uint16_t bits) {
    uint32_t sign = uint32_t(bits & 0x8000) << 16, rest = bits & 0x7fff;
    float x = float(rest & 0x3ff);
    uint32_t exponent = rest >> 10, all;
    if (exponent == 0) {
        x *= 1.0f / (1 << 24);
        std::memcpy(&all, &x, 4);
    } else {
        all = exponent == 31 ? 0x7f800000 | (rest & 0x3ff) << 13 : (rest << 13) + (112u << 23);
    }
    all |= sign;
    std::memcpy(&x, &all, 4);
    return x;
}
inline uint16_t to_f16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    uint16_t sign = uint16_t(bits >> 16 & 0x8000);
    bits &= 0x7fffffff;
    if (bits > 0x7f800000) return sign | 0x7e00;
    if (bits >= 0x477ff000) return sign | 0x7c00;
    if (bits < 113u << 23) {
        float small, half = 0.5f;
        std::memcpy(&small, &bits, 4);
        small += half;
        std::memcpy(&bits, &small, 4);
        return uint16_t(sign | (bits - (126u << 23)));
    }
    return uint16_t(sign | ((bits - (112u << 23) + 0xfff + (bits >> 13 & 1)) >> 13));
}

// ---- the seed (seed.cpp) -------------------------------------------------------------------------------------------

// Pseudo-random numbers of the seed in CUDA_EMULATOR_SEED.
uint32_t draw(uint32_t below);
// Begins with the first number again. Gives the seed.
uint32_t restart_draws();
// A message with the seed, by which the error can be seen once more.
std::string with_seed(const std::string& message);

// Writes the counters of all functions to the file in CUDA_EMULATOR_COUNTERS, where there is one.
void write_counters(const std::map<std::string, Counters>& all);

}  // namespace emulator
