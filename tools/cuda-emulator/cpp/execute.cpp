// Runs kernels: the threads of a block as fibers, blocks beside each other as the machine has processors.
//
// A fiber runs until it waits for others: for its block at a barrier, or for its warp at a shuffle or a product of
// matrices. Which warp goes first is drawn from the seed, so a result that depends on an order that nothing
// guarantees differs from run to run; accesses to shared memory that no barrier orders are errors at once.
#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "emulator.hpp"
#include "fiber.hpp"

extern "C" {
typedef void (*EmulatorWarpOp)(void* const* lanes, unsigned mask);
void emulator_fiber_main();
}

namespace emulator {
namespace {

constexpr size_t DYNAMIC = 256 << 10;
constexpr uint16_t MANY = 0xffff;
// Several lanes of a warp, whose number is in the lower bits.
constexpr uint16_t WARP = 0x8000;

// Draws, fast, in which order a block's warps run.
struct Random {
    uint64_t state = 0;
    uint32_t below(uint32_t end) {
        // SplitMix64.
        uint64_t x = state += 0x9e3779b97f4a7c15u;
        x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
        x = (x ^ x >> 27) * 0x94d049bb133111ebu;
        return uint32_t((x >> 32) * end >> 32);
    }
};

// Bytes of an asynchronous product: `EMULATOR_PRODUCT` of `device/emulator.h`.
constexpr size_t PRODUCT = 64;

enum class State { NEW, READY, AT_BARRIER, AT_WARP, DONE };

struct AsyncCopy {
    uintptr_t to, from;
    unsigned bytes;
};

// A product that was begun.
struct AsyncProduct {
    std::array<unsigned char, PRODUCT> what;
    float* sums;
};

// Sums of products that were begun, at most those of 128 columns, and how many products will add to them.
struct AsyncSums {
    float* at;
    unsigned count, products = 0;
    bool hidden = false;
    float before[64];
};

// In place of sums that nobody may use: a signalling NaN, which no arithmetic gives, not even with this as its operand.
constexpr uint32_t HIDDEN = 0xffa5e5e5;

struct Lane {
    State state = State::NEW;
    void* sp = nullptr;
    char* stack = nullptr;
    Dim thread{};
    // At a collective of its warp.
    unsigned mask = 0;
    EmulatorWarpOp op = nullptr;
    void* arg = nullptr;
    // Copies that were begun; groups end where they were committed.
    std::vector<AsyncCopy> copies;
    std::vector<size_t> groups;
    // Whether it has waited for the kernel before this one.
    bool waited = false;
    // Asynchronous products that were begun, how many of them each group has, and how many none has yet.
    std::vector<AsyncProduct> products;
    std::vector<AsyncSums> sums;
    std::vector<size_t> product_groups;
    size_t open_products = 0;
    // Whether registers were fenced since the last wait for all products.
    bool fenced = false;
    // How often it has made its writes visible to asynchronous products.
    uint32_t published = 0;
};

// Who touched a byte, or all bytes of a word, of shared memory last, and when.
struct Touch {
    uint32_t block = 0;
    uint32_t write_epoch = 0, read_epoch = 0;
    uint32_t write_warp_epoch = 0, read_warp_epoch = 0;
    // How often the writer had published before.
    uint32_t published = 0;
    uint16_t writer = 0, reader = 0;
    bool written = false, read = false;
    // Of a word: whether its bytes have their own.
    bool split = false;
};

constexpr size_t WORD = 4;
// Most accesses are of whole words, of which there is one to look at then, not four.
struct Touches {
    std::vector<Touch> words, bytes;
    void resize(size_t count) {
        words.assign((count + WORD - 1) / WORD, Touch());
        bytes.resize(words.size() * WORD);
    }
};

// Where threads come to a barrier of their block: a line, or a barrier without one, at which they may come from several.
struct Barrier {
    const char* file = nullptr;
    unsigned line = 0;
    bool operator==(const Barrier& other) const {
        return line == other.line && (file == other.file || (file && other.file && !std::strcmp(file, other.file)));
    }
    std::string text() const {
        return file ? std::string(file) + ", line " + std::to_string(line) : "a barrier that is no `__syncthreads`";
    }
};

// What runs one block at a time, on a thread of the host.
struct Engine {
    const Launch* launch = nullptr;
    const Image* image = nullptr;
    void (*call)(void**) = nullptr;
    const std::vector<Unfinished>* unfinished = nullptr;
    std::vector<Lane> lanes;
    std::vector<uint32_t> warp_epochs;
    // For each warp a thread that its last collective was found to lack.
    std::vector<size_t> missing;
    std::vector<char*> stacks;
    std::vector<void*> pointers;
    void* scheduler = nullptr;
    size_t current = 0;
    // Of the current thread, for each access of which it is looked at.
    bool waited = false;
    Dim block{};
    uint32_t block_number = 0, epoch = 0;
    size_t alive = 0, waiting = 0;
    // Of the threads that wait.
    Barrier barrier;
    std::string fault;
    char* dynamic = nullptr;
    Touches static_touch, dynamic_touch;
    Counters counters;
    Random random;
    // Where the current thread's stack begins.
    uintptr_t stack = 0;

    Lane& lane() { return lanes[current]; }
};

// That of this thread of the host; none where no kernel runs.
__attribute__((tls_model("initial-exec"))) thread_local Engine* own_engine = nullptr;
Engine& engine() { return *own_engine; }

char* take_stack(Engine& e) {
    if (!e.stacks.empty()) {
        char* stack = e.stacks.back();
        e.stacks.pop_back();
        return stack;
    }
    return new_stack();
}

void start(Engine& e, Lane& lane) {
    lane.stack = take_stack(e);
    lane.sp = begin_fiber(lane.stack, emulator_fiber_main);
}

void leave(Engine& e, State state) {
    Lane& lane = e.lane();
    lane.state = state;
    emulator_switch(&lane.sp, e.scheduler);
}

void resume(Engine& e, size_t index) {
    Lane& lane = e.lanes[index];
    e.current = index;
    e.waited = lane.waited;
    if (lane.state == State::NEW) start(e, lane);
    e.stack = reinterpret_cast<uintptr_t>(lane.stack);
    lane.state = State::READY;
    emulator_switch(&e.scheduler, lane.sp);
    if (lane.state == State::DONE) {
        e.stacks.push_back(lane.stack);
        lane.stack = nullptr;
        e.alive--;
    }
}

std::string place(const Engine& e) {
    const Lane& lane = e.lanes[e.current];
    char text[160];
    std::snprintf(text, sizeof text, " in block (%u, %u, %u), thread (%u, %u, %u) of ", e.block.x, e.block.y, e.block.z,
                  lane.thread.x, lane.thread.y, lane.thread.z);
    return text + e.launch->function->name;
}

// Ends the launch: no fiber of it runs again.
void fault(Engine& e, const std::string& reason) {
    if (e.fault.empty()) e.fault = reason + place(e);
    leave(e, State::DONE);
}

void release_barrier(Engine& e) {
    for (Lane& lane : e.lanes)
        if (lane.state == State::AT_BARRIER) lane.state = State::READY;
    e.waiting = 0;
    e.epoch++;
    e.counters.barriers++;
}

void run_block(Engine& e) {
    size_t count = e.lanes.size();
    std::vector<size_t> warps((count + 31) / 32);
    for (size_t i = 0; i < warps.size(); i++) warps[i] = i;
    while (e.alive > 0 && e.fault.empty()) {
        for (size_t i = warps.size(); i > 1; i--) std::swap(warps[i - 1], warps[e.random.below(uint32_t(i))]);
        bool ran = false;
        for (size_t warp : warps) {
            size_t first = warp * 32, end = std::min(first + 32, count);
            for (size_t i = first; i < end && e.fault.empty(); i++)
                if (e.lanes[i].state == State::NEW || e.lanes[i].state == State::READY) {
                    resume(e, i);
                    ran = true;
                }
        }
        if (e.alive > 0 && e.waiting == e.alive) {
            release_barrier(e);
            ran = true;
        }
        if (!ran && e.fault.empty()) {
            size_t stuck = 0;
            while (e.lanes[stuck].state == State::DONE) stuck++;
            e.current = stuck;
            bool barrier = e.lanes[stuck].state == State::AT_BARRIER;
            e.fault = std::string("threads wait for ever: some are at ") +
                      (barrier ? "a barrier of the block" : "a collective of their warp") + ", others never come" +
                      place(e);
        }
    }
}

// ---- shared memory ---------------------------------------------------------------------------------------------------

// Whether what `other` did in its epochs comes before what this lane does now.
bool ordered(const Engine& e, uint32_t epoch, uint32_t warp_epoch, uint16_t other) {
    if (other == e.current || epoch < e.epoch) return true;
    if (other == MANY) return false;
    size_t warp = other & WARP ? other & ~WARP : other / 32;
    return warp == e.current / 32 && warp_epoch < e.warp_epochs[e.current / 32];
}

const char* touch(Engine& e, Touch& t, bool write) {
    if (t.block != e.block_number) {
        t = Touch();
        t.block = e.block_number;
    }
    auto me = uint16_t(e.current);
    uint32_t warp_epoch = e.warp_epochs[e.current / 32];
    if (t.written && !ordered(e, t.write_epoch, t.write_warp_epoch, t.writer))
        return write ? "two threads write the same shared memory with no barrier between them"
                     : "a read of shared memory that another thread writes with no barrier between them";
    if (write) {
        if (t.read && !ordered(e, t.read_epoch, t.read_warp_epoch, t.reader))
            return "a write of shared memory that another thread reads with no barrier between them";
        t.written = true;
        t.read = false;
        t.writer = me;
        t.published = e.lane().published;
        t.write_epoch = e.epoch;
        t.write_warp_epoch = warp_epoch;
        return nullptr;
    }
    if (!t.written) return "a read of shared memory that nothing has written";
    bool alone = !t.read || t.read_epoch < e.epoch || t.reader == me;
    uint16_t warp = me / 32;
    bool same_warp = t.read && t.reader != MANY && (t.reader & WARP ? t.reader & ~WARP : t.reader / 32) == warp;
    bool before = same_warp && t.read_warp_epoch < warp_epoch;
    t.reader = alone || before ? me : same_warp ? WARP | warp : MANY;
    t.read = true;
    t.read_epoch = e.epoch;
    t.read_warp_epoch = warp_epoch;
    return nullptr;
}

// The bytes from `first` to `end` of the word of number `index`.
const char* touch_word(Engine& e, Touches& touches, size_t index, size_t first, size_t end, bool write, bool product) {
    Touch& word = touches.words[index];
    if (word.block != e.block_number) {
        word = Touch();
        word.block = e.block_number;
    }
    auto one = [&](Touch& t) {
        const char* problem = touch(e, t, write);
        if (product && !problem && e.lanes[t.writer].published == t.published)
            problem = "an asynchronous product reads shared memory whose writer has not published it";
        return problem;
    };
    bool whole = first == 0 && end == WORD;
    if (whole && !word.split) return one(word);
    Touch* bytes = &touches.bytes[index * WORD];
    if (!word.split) {
        std::fill(bytes, bytes + WORD, word);
        word.split = true;
    }
    for (size_t i = first; i < end; i++)
        if (const char* problem = one(bytes[i])) return problem;
    if (whole && write) {
        word = bytes[0];
        word.split = false;
    }
    return nullptr;
}

// With `product`, that of an asynchronous product.
bool shared_access(Engine& e, uintptr_t at, size_t bytes, bool write, const char** problem, bool product = false) {
    const Image& image = *e.image;
    auto dynamic = reinterpret_cast<uintptr_t>(e.dynamic);
    Touches* touches;
    size_t offset, size;
    if (at - dynamic < DYNAMIC) {
        touches = &e.dynamic_touch;
        offset = at - dynamic;
        size = e.launch->shared;
    } else if (at - image.shared_begin < image.shared_end - image.shared_begin) {
        touches = &e.static_touch;
        offset = at - image.shared_begin;
        size = image.shared_end - image.shared_begin;
    } else {
        return false;
    }
    if (offset + bytes > size) {
        *problem = "an access behind the end of shared memory";
        return true;
    }
    for (size_t end = offset + bytes; offset < end && !*problem;) {
        size_t index = offset / WORD, next = std::min(end, (index + 1) * WORD);
        *problem = touch_word(e, *touches, index, offset % WORD, next - index * WORD, write, product);
        offset = next;
    }
    return true;
}

// A read of device memory by a thread that has not waited for the kernel before this one.
void early_read(Engine& e, uintptr_t at, size_t bytes) {
    const Unfinished* writer = nullptr;
    any_writer(at, bytes, [&](uint32_t work) {
        auto before = [](const Unfinished& one, uint32_t work) { return one.work < work; };
        auto found = std::lower_bound(e.unfinished->begin(), e.unfinished->end(), work, before);
        if (found == e.unfinished->end() || found->work != work) return false;
        writer = &*found;
        return true;
    });
    if (!writer) return;
    bool own = writer == &e.unfinished->back();
    fault(e, "a read of what " + (own ? "another thread" : writer->name) +
                 " has written, which may still run, before the thread has waited for the kernel before this one");
}

const char* const EARLY_WRITE = "a write before the thread has waited for the kernel before this one";

[[gnu::noinline]] void refuse_alignment(Engine& e, size_t bytes, size_t align) {
    char text[96];
    std::snprintf(text, sizeof text, "an access of %zu bytes at an address that is no multiple of %zu", bytes, align);
    fault(e, text);
}

inline void access(uintptr_t at, size_t bytes, size_t align, bool write) {
    if (!own_engine) return;
    Engine& e = *own_engine;
    if (align > 1 && at % align) return refuse_alignment(e, bytes, align);
    if (in_device_range(at)) {
        if (!device_access(at, bytes, write)) return fault(e, describe(at, bytes, write));
        if (!e.waited) write ? fault(e, EARLY_WRITE) : early_read(e, at, bytes);
        (write ? e.counters.writes : e.counters.reads) += bytes;
        return;
    }
    if (at - e.stack < STACK_BYTES) return;
    const char* problem = nullptr;
    if (shared_access(e, at, bytes, write, &problem)) {
        if (problem) fault(e, problem);
        return;
    }
    if (!write && at - e.image->begin < e.image->end - e.image->begin) return;
    fault(e, describe(at, bytes, write));
}

// ---- collectives of a warp -------------------------------------------------------------------------------------------

void no_op(void* const*, unsigned) {}

void hide(AsyncSums& sums) {
    std::memcpy(sums.before, sums.at, sums.count * sizeof *sums.at);
    for (unsigned i = 0; i < sums.count; i++) std::memcpy(sums.at + i, &HIDDEN, sizeof HIDDEN);
    sums.hidden = true;
}

// An error where the thread has written sums since they were hidden.
void check_hidden(Engine& e, const AsyncSums& sums) {
    for (unsigned i = 0; i < sums.count; i++)
        if (std::memcmp(sums.at + i, &HIDDEN, sizeof HIDDEN))
            fault(e, "sums of an asynchronous product are written before the thread has waited for it");
}

AsyncSums* sums_at(Lane& lane, const float* at) {
    for (AsyncSums& sums : lane.sums)
        if (sums.at == at) return &sums;
    return nullptr;
}

void finish_copies(Engine& e, Lane& lane, size_t count) {
    for (size_t i = 0; i < count; i++) {
        AsyncCopy c = lane.copies[i];
        access(c.from, c.bytes, c.bytes, false);
        access(c.to, c.bytes, c.bytes, true);
        std::memcpy(reinterpret_cast<void*>(c.to), reinterpret_cast<void*>(c.from), c.bytes);
    }
    lane.copies.erase(lane.copies.begin(), lane.copies.begin() + std::ptrdiff_t(count));
    (void)e;
}

}  // namespace

namespace {

// What a launch is for all that run blocks of it.
struct Job {
    const Launch& launch;
    const std::vector<Unfinished>& unfinished;
    size_t blocks;
    // Blocks may run in any order; every other launch goes backwards.
    bool backwards;
    uint64_t seed;
    // The next block that nobody has taken.
    std::atomic<size_t> next{0};
    std::mutex mutex = {};
    std::string fault = {};
};

void begin_block(Engine& e, const Job& job, size_t b) {
    const Launch& launch = job.launch;
    size_t threads = launch.block.count();
    e.block = {unsigned(b % launch.grid.x), unsigned(b / launch.grid.x % launch.grid.y),
               unsigned(b / launch.grid.x / launch.grid.y)};
    e.block_number++;
    e.random = {job.seed + b};
    e.epoch = 1;
    e.alive = threads;
    e.waiting = 0;
    e.lanes.resize(threads);
    e.warp_epochs.assign((threads + 31) / 32, 1);
    e.missing.assign((threads + 31) / 32, 0);
    for (size_t i = 0; i < threads; i++) {
        Lane& lane = e.lanes[i];
        lane.state = State::NEW;
        lane.thread = {unsigned(i % launch.block.x), unsigned(i / launch.block.x % launch.block.y),
                       unsigned(i / launch.block.x / launch.block.y)};
        lane.copies.clear();
        lane.groups.clear();
        lane.waited = !launch.early;
        lane.products.clear();
        lane.sums.clear();
        lane.product_groups.clear();
        lane.open_products = 0;
        lane.fenced = false;
    }
}

// Runs blocks of a launch until there are no more.
void run_blocks(Job& job, unsigned worker) {
    static Engine engines[MOST_WORKERS];
    Engine& e = engines[worker];
    if (!e.dynamic) {
        e.dynamic = static_cast<char*>(std::aligned_alloc(4096, DYNAMIC));
        e.dynamic_touch.resize(DYNAMIC);
    }
    e.launch = &job.launch;
    e.image = &job.launch.function->module->images[worker];
    e.call = job.launch.function->calls[worker];
    e.static_touch.resize(e.image->shared_end - e.image->shared_begin);
    e.unfinished = &job.unfinished;
    e.counters = {};
    e.fault.clear();
    e.pointers.clear();
    for (auto& argument : job.launch.arguments) e.pointers.push_back(const_cast<unsigned char*>(argument.data()));
    own_engine = &e;
    for (size_t n; e.fault.empty() && (n = job.next++) < job.blocks;) {
        begin_block(e, job, job.backwards ? job.blocks - 1 - n : n);
        run_block(e);
    }
    own_engine = nullptr;
    for (Lane& lane : e.lanes) {
        if (lane.stack && lane.state != State::DONE) e.stacks.push_back(lane.stack);
        lane.stack = nullptr;
    }
    std::lock_guard<std::mutex> guard(job.mutex);
    if (job.fault.empty()) job.fault = e.fault;
    if (!e.fault.empty()) job.next = job.blocks;
    job.launch.function->counters.add(e.counters);
}

}  // namespace

static unsigned most_at_once = MOST_WORKERS;

std::string execute(const Launch& launch, const std::vector<Unfinished>& unfinished) {
    Counters& counters = launch.function->counters;
    Job job = {launch, unfinished, launch.grid.count(), draw(2) == 1, draw(UINT32_MAX)};
    counters.launches++;
    counters.threads += launch.block.count() * job.blocks;
    auto begin = std::chrono::steady_clock::now();
    // What one block does before another is found for certain only where they run in turn, so some launches do.
    bool together = std::min(workers(), most_at_once) > 1 && job.blocks > 1 && draw(8) > 0;
    if (together) run_by_all([&](unsigned worker) { run_blocks(job, worker); });
    else run_blocks(job, 0);
    counters.microseconds += uint64_t((std::chrono::steady_clock::now() - begin) / std::chrono::microseconds(1));
    return job.fault;
}

void write_counters(const std::map<std::string, Counters>& all) {
    const char* path = std::getenv("CUDA_EMULATOR_COUNTERS");
    FILE* file = path ? std::fopen(path, "a") : nullptr;
    if (!file) return;
    for (auto& [name, c] : all)
        if (c.launches)
            std::fprintf(file, "%s launches %llu threads %llu read %llu written %llu barriers %llu warp_ops %llu "
                         "matrix_ops %llu emulated_us %llu\n",
                         name.c_str(), (unsigned long long)c.launches, (unsigned long long)c.threads,
                         (unsigned long long)c.reads, (unsigned long long)c.writes, (unsigned long long)c.barriers,
                         (unsigned long long)c.warp_ops, (unsigned long long)c.matrix_ops,
                         (unsigned long long)c.microseconds);
    std::fclose(file);
}

}  // namespace emulator

using namespace emulator;

extern "C" {

void emulator_fiber_main() {
    Engine& e = engine();
    e.call(e.pointers.data());
    if (!e.lane().copies.empty()) fault(e, "a thread ends with asynchronous copies that it did not wait for");
    if (!e.waited) fault(e, "a thread of a kernel that may be started early ends without waiting for the one before it");
    if (!e.lane().products.empty()) fault(e, "a thread ends with asynchronous products that it did not wait for");
    leave(e, State::DONE);
}
void emulator_wait_for_previous() {
    Engine& e = engine();
    e.waited = e.lane().waited = true;
}

struct EmulatorUint3 {
    unsigned x, y, z;
};
EmulatorUint3 emulator_thread_idx() {
    Dim d = engine().lane().thread;
    return {d.x, d.y, d.z};
}
EmulatorUint3 emulator_block_idx() {
    Dim d = engine().block;
    return {d.x, d.y, d.z};
}
EmulatorUint3 emulator_block_dim() {
    Dim d = engine().launch->block;
    return {d.x, d.y, d.z};
}
EmulatorUint3 emulator_grid_dim() {
    Dim d = engine().launch->grid;
    return {d.x, d.y, d.z};
}
void* emulator_dynamic_shared() { return engine().dynamic; }
void emulator_fault(const char* reason) { fault(engine(), reason); }

void emulator_block_barrier(const char* file, unsigned line, unsigned threads) {
    Engine& e = engine();
    Barrier here{file, line};
    if (threads && threads != e.lanes.size()) return fault(e, "a barrier of another number of threads than the block has");
    if (e.waiting++ == 0) e.barrier = here;
    if (!(e.barrier == here))
        return fault(e, "threads of a block meet at different barriers: " + e.barrier.text() + ", and " + here.text());
    leave(e, State::AT_BARRIER);
}

void emulator_warp(unsigned mask, EmulatorWarpOp op, void* arg) {
    Engine& e = engine();
    size_t warp = e.current / 32, lane_index = e.current % 32;
    if (!(mask >> lane_index & 1)) return fault(e, "a thread is not in the mask of its own collective");
    Lane& me = e.lane();
    me.mask = mask;
    me.op = op;
    me.arg = arg;
    me.state = State::AT_WARP;
    // Lanes run in their order, so the last that is missing comes last, and until then it is all that has to be looked at.
    size_t& missing = e.missing[warp];
    if (mask >> missing & 1 && warp * 32 + missing < e.lanes.size()) {
        State state = e.lanes[warp * 32 + missing].state;
        if (state == State::NEW || state == State::READY || state == State::AT_BARRIER) return leave(e, State::AT_WARP);
    }
    void* args[32] = {};
    for (size_t i = 32; i-- > 0;) {
        if (!(mask >> i & 1)) continue;
        size_t index = warp * 32 + i;
        if (index >= e.lanes.size() || e.lanes[index].state == State::DONE)
            return fault(e, "a collective names a thread that is not there");
        const Lane& other = e.lanes[index];
        if (other.state != State::AT_WARP) {
            missing = i;
            return leave(e, State::AT_WARP);
        }
        if (other.mask != mask || other.op != op)
            return fault(e, "threads of a warp meet at different collectives");
        args[i] = other.arg;
    }
    e.counters.warp_ops++;
    op(args, mask);
    for (size_t i = 0; i < 32; i++)
        if (mask >> i & 1) e.lanes[warp * 32 + i].state = State::READY;
}

void emulator_count_product(unsigned rows, unsigned columns, unsigned k) {
    engine().counters.matrix_ops += 2ull * rows * columns * k;
}

void emulator_warp_barrier(unsigned mask) {
    emulator_warp(mask, no_op, nullptr);
    Engine& e = engine();
    // The first that goes on opens the warp's next epoch; all others of the mask are behind the barrier, too.
    Lane& me = e.lane();
    size_t warp = e.current / 32;
    if (me.op) {
        for (size_t i = 0; i < 32; i++)
            if (mask >> i & 1) e.lanes[warp * 32 + i].op = nullptr;
        e.warp_epochs[warp]++;
    }
}

void emulator_access(const void* at, unsigned bytes, unsigned align, int write) {
    access(reinterpret_cast<uintptr_t>(at), bytes, align, write != 0);
}

void emulator_atomic(const void* at, unsigned bytes) {
    // Atomics order themselves; only bounds and initialisation are looked at.
    Engine& e = engine();
    auto address = reinterpret_cast<uintptr_t>(at);
    if (in_device_range(address)) {
        access(address, bytes, bytes, false);
        if (!e.waited) return fault(e, EARLY_WRITE);
        device_access(address, bytes, true);
    }
}
// Blocks run in turn where it is 1.
void emulator_set_workers(int most) { most_at_once = unsigned(most); }

// Atomics of blocks that run at the same time, one after the other.
static std::atomic_flag atomics = ATOMIC_FLAG_INIT;
void emulator_atomic_begin() {
    while (atomics.test_and_set(std::memory_order_acquire)) std::this_thread::yield();
}
void emulator_atomic_end() { atomics.clear(std::memory_order_release); }

void emulator_cp_async(void* dst, const void* src, unsigned bytes) {
    Engine& e = engine();
    auto to = reinterpret_cast<uintptr_t>(dst), from = reinterpret_cast<uintptr_t>(src);
    if (to % bytes || from % bytes) return fault(e, "an asynchronous copy that is not aligned");
    // It is made at its wait here, but a card may read from now on.
    if (!e.waited) early_read(e, from, bytes);
    e.lane().copies.push_back({to, from, bytes});
}

void emulator_cp_async_commit() {
    Lane& lane = engine().lane();
    lane.groups.push_back(lane.copies.size());
}

void emulator_cp_async_wait(unsigned groups) {
    Engine& e = engine();
    Lane& lane = e.lane();
    if (lane.groups.size() <= groups) return;
    size_t done = lane.groups.size() - groups, count = lane.groups[done - 1];
    lane.groups.erase(lane.groups.begin(), lane.groups.begin() + std::ptrdiff_t(done));
    for (size_t& end : lane.groups) end -= count;
    finish_copies(e, lane, count);
}

void emulator_publish() { engine().lane().published++; }

void emulator_product_access(const void* at, unsigned bytes) {
    Engine& e = engine();
    const char* problem = nullptr;
    if (!shared_access(e, reinterpret_cast<uintptr_t>(at), bytes, false, &problem, true))
        problem = "an asynchronous product reads what is not shared memory";
    if (problem) fault(e, problem);
}

void emulator_product_fence() { engine().lane().fenced = true; }

void emulator_product(const void* what, float* at, unsigned count) {
    Engine& e = engine();
    Lane& lane = e.lane();
    if (!lane.fenced) return fault(e, "an asynchronous product that no fence of its registers precedes");
    lane.products.push_back({{}, at});
    std::memcpy(lane.products.back().what.data(), what, PRODUCT);
    AsyncSums* sums = sums_at(lane, at);
    if (sums) {
        check_hidden(e, *sums);
    } else {
        lane.sums.push_back({});
        sums = &lane.sums.back();
        sums->at = at;
        sums->count = count;
        hide(*sums);
    }
    sums->products++;
    lane.open_products++;
}

void emulator_product_commit() {
    Lane& lane = engine().lane();
    lane.product_groups.push_back(lane.open_products);
    lane.open_products = 0;
}

bool emulator_product_take(unsigned groups, void* what) {
    Engine& e = engine();
    Lane& lane = e.lane();
    auto& all = lane.product_groups;
    while (all.size() > groups && all.front() == 0) all.erase(all.begin());
    if (all.size() <= groups) {
        lane.fenced = !lane.products.empty();
        auto ready = [](const AsyncSums& sums) { return sums.products == 0; };
        lane.sums.erase(std::remove_if(lane.sums.begin(), lane.sums.end(), ready), lane.sums.end());
        for (AsyncSums& sums : lane.sums)
            if (!sums.hidden) hide(sums);
        return false;
    }
    all.front()--;
    const AsyncProduct& product = lane.products.front();
    AsyncSums& sums = *sums_at(lane, product.sums);
    if (sums.hidden) {
        check_hidden(e, sums);
        std::memcpy(sums.at, sums.before, sums.count * sizeof *sums.at);
        sums.hidden = false;
    }
    sums.products--;
    std::memcpy(what, product.what.data(), PRODUCT);
    lane.products.erase(lane.products.begin());
    return true;
}

// What the host compiler calls for each access that others could see.
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
#define ACCESS(BYTES)                                                                                        \
    void __tsan_read##BYTES(void* at) { access(reinterpret_cast<uintptr_t>(at), BYTES, BYTES, false); }      \
    void __tsan_write##BYTES(void* at) { access(reinterpret_cast<uintptr_t>(at), BYTES, BYTES, true); }      \
    void __tsan_unaligned_read##BYTES(void* at) { access(reinterpret_cast<uintptr_t>(at), BYTES, 1, false); } \
    void __tsan_unaligned_write##BYTES(void* at) { access(reinterpret_cast<uintptr_t>(at), BYTES, 1, true); }
ACCESS(1)
ACCESS(2)
ACCESS(4)
ACCESS(8)
ACCESS(16)
void __tsan_read_range(void* at, size_t bytes) { access(reinterpret_cast<uintptr_t>(at), bytes, 1, false); }
void __tsan_write_range(void* at, size_t bytes) { access(reinterpret_cast<uintptr_t>(at), bytes, 1, true); }
}
