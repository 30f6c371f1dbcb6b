// What the files of the driver API share: streams with their work, and what the driver knows.
#pragma once
#include <algorithm>
#include <cstdlib>
#include <deque>
#include <set>

#include "emulator.hpp"

typedef int CUresult;
typedef unsigned long long CUdeviceptr;
typedef int CUdevice;

namespace emulator {

enum : CUresult {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    INVALID_DEVICE = 101,
    INVALID_IMAGE = 200,
    INVALID_CONTEXT = 201,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    NOT_READY = 600,
    LAUNCH_OUT_OF_RESOURCES = 701,
    LAUNCH_FAILED = 719,
    CAPTURE_UNSUPPORTED = 900,
    CAPTURE_INVALIDATED = 901,
    CAPTURED_EVENT = 907,
};

struct Event;
struct Stream;

// What has ended when work of a stream begins. From it follows what a kernel that is started early (programmatic dependent
// launch) may read before it waits for the one before it.
//
// Kernel N of a stream may be started early once each block of kernel N - 1 has let it (`launch_dependents`) or has ended.
// Ferrum's kernels let the next one start right before they wait themselves. So N - 1, if it was started early, may still wait for
// N - 2, that one for N - 3, and so on to the last one that was not started early; call it F. When F began, all before it had
// ended and what they had written was there. So in N's early part all that was written before F may be read; writes of F to
// N - 1 may come before, behind or during a read, as may those of N itself, of which other threads may be ahead. Behind N's wait
// all of it is there: N waits for the end of N - 1, which each of its threads comes to behind its own wait for N - 2, and so on.
// A kernel that never lets the next one start does so by ending, but what it wrote need not be visible then: no exception.
//
// Work runs here in the order of the stream, so if any of F to N wrote a word, one of them was the last to write it: memory
// keeps the last writer of each word, and a stream those of its work that may not have ended.
//
// Only a kernel right behind a kernel is started early. Behind a copy from or to the host it begins when that has ended, and
// that began when all before it had. Copies on the device and fills are taken for kernels, which the driver may make them of,
// and libraries' kernels for ones that may be started early. Events are no work: they do not keep a kernel from being started
// early. The first work of captured work begins when all before the replay has ended: a graph has no edge to what is before it.
enum class Order {
    // No work of the device.
    NONE,
    // All before it has ended when it begins, and it has ended when the next one begins.
    ALONE,
    // All before it has ended when it begins.
    AFTER_ALL,
    // What its stream does not know to have ended may still run when it begins.
    EARLY,
};

struct Op {
    std::function<std::string()> run;
    Order order = Order::NONE;
    std::string name = {};
    // An event that has to have come before.
    Event* event = nullptr;
    uint64_t version = 0;
    // Whether it may begin.
    std::function<bool()> ready = nullptr;
    // What `Stream::known` was when it was put into the queue.
    uint32_t known = 0;
};

struct Event {
    uint64_t recorded = 0, done = 0;
    // The last work that began before it.
    uint32_t work = 0;
    Stream* stream = nullptr;
    // Whether it was recorded in a captured step: nobody knows when that has run.
    bool captured = false;
};

struct Graph {
    std::vector<Op> ops;
};

struct Stream {
    int device;
    std::deque<Op> queue;
    bool capturing = false;
    Graph captured;
    // Its work that may not have ended, up to what runs.
    std::vector<Unfinished> unfinished;
    // The host knows that all of its work up to this number has ended.
    uint32_t known = 0;
};

// What a pool has of the device: what is in use, and what it keeps beside that.
struct Pool {
    int device;
    size_t used = 0, reserved = 0, threshold = 0;
    void took(size_t bytes) { reserved = std::max(reserved, used += bytes); }
    void gave(size_t bytes) {
        used -= bytes;
        reserved = std::max(used, std::min(reserved, threshold));
    }
};

struct Driver {
    std::recursive_mutex mutex;
    std::set<Pool*> pools;
    // Allocations of pools.
    std::map<CUdeviceptr, Pool*> pooled;
    std::set<Stream*> streams;
    std::map<std::string, Counters> counters;
    std::set<Function*> functions;
    CUresult sticky = SUCCESS;
    std::string message;
    int capability = 90;
    // Shared memory that a block may ask for.
    int block_shared = 227 << 10;
    uint64_t replays = 0, host_syncs = 0;
    // How much work of the device has begun: each has its number.
    uint32_t work = 0;
    // The stream whose work runs.
    Stream* running = nullptr;
    // A context is the address of its place here: how often it was retained.
    unsigned contexts[MOST_DEVICES] = {};
    int devices = 1;

    Driver() {
        if (const char* count = std::getenv("CUDA_EMULATOR_DEVICES")) set_devices(std::atoi(count));
    }
    void set_devices(int count) { devices = std::min(std::max(count, 1), MOST_DEVICES); }

    ~Driver() {
        for (Function* f : functions) add(*f);
        write_counters(counters);
    }
    void add(const Function& f) { counters[f.name].add(f.counters); }
};

Driver& driver();

struct Locked {
    std::lock_guard<std::recursive_mutex> guard{driver().mutex};
};

// The context of this thread.
extern thread_local unsigned* current_context;

#define NEEDS_CONTEXT                                                                           \
    Locked lock;                                                                                \
    if (!current_context) return fail(INVALID_CONTEXT, "no context is current on this thread"); \
    use_device(current_device())

// Counts a call that blocks the host until work of the device has ended, or for which CUDA's documentation allows that ("API
// synchronization behavior" in the manuals of the driver, "Implicit Synchronization" and "Lazy Loading" in the programming guide):
// waits for a context, a stream or an event, whether or not its work had ended; copies from and to pageable memory; allocations
// and frees of device memory outside of pools and of pinned memory; loading and unloading modules. Calls that were refused are
// none, nor are queries of events, allocations of pools, and destroying events, streams or pools, which return at once.
inline void count_host_sync() { driver().host_syncs++; }

// Notes what is wrong with a call. Gives the code.
CUresult fail(CUresult code, const std::string& message);
// What a card would answer to every later call.
CUresult broken(const std::string& message);

// ---- streams (streams.cpp) ----------------------------------------------------------------------------------------

// Puts work into the queue of a stream, or into what is captured of it.
CUresult enqueue(Stream* stream, Op op);
// Waits for all work of a stream, and of the device.
CUresult finish(Stream* stream);
CUresult run_all();
// Whether a stream of the device is captured.
bool any_capture();

}  // namespace emulator
