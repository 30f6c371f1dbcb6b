// The driver API, as far as Ferrum calls it.
//
// Work of a stream is put in a queue and runs as late as it may: when somebody waits for it. So whoever reads too
// early, or gives a buffer back too early, finds out every time. At a draw of the seed some of it runs earlier.
#include <dlfcn.h>
#include <link.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <set>

#include "emulator.hpp"

using namespace emulator;

typedef int CUresult;
typedef unsigned long long CUdeviceptr;
typedef int CUdevice;

namespace {

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

// What only functions here say to each other: the next work of a stream waits for another device.
constexpr CUresult BLOCKED = -1;

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
    uint64_t replays = 0;
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

Driver& driver() {
    static Driver one;
    return one;
}

// What broke the device stays the message of all later errors: they follow from it.
CUresult fail(CUresult code, const std::string& message) {
    Driver& d = driver();
    if (d.sticky == SUCCESS) d.message = with_seed(message);
    return code;
}

// What a card would answer to every later call.
CUresult broken(const std::string& message) {
    Driver& d = driver();
    if (d.sticky == SUCCESS) {
        d.sticky = LAUNCH_FAILED;
        d.message = with_seed(message);
        std::fprintf(stderr, "cuda-emulator: %s\n", d.message.c_str());
    }
    return d.sticky;
}

// Work of a stream is about its own device.
struct OnDevice {
    int before = used_device();
    explicit OnDevice(int device) { use_device(device); }
    ~OnDevice() { use_device(before); }
};

// Keeps what has ended when this work of a stream begins, which it does now.
void start_work(Stream* stream, const Op& op) {
    driver().running = stream;
    if (op.order == Order::NONE) return;
    auto& all = stream->unfinished;
    auto ended = [&](const Unfinished& one) { return op.order != Order::EARLY || one.work <= op.known; };
    all.erase(all.begin(), std::find_if_not(all.begin(), all.end(), ended));
    uint32_t work = ++driver().work;
    if (op.order != Order::ALONE) all.push_back({work, op.name});
    // A copy leaves writers as they are: all that its stream has had have ended.
    set_writer(op.order == Order::ALONE ? 0 : work);
}

// The host has waited for the work of a stream up to this number. An event may outlive its stream.
void learn(Stream* stream, uint32_t work) {
    if (driver().streams.count(stream)) stream->known = std::max(stream->known, work);
}

CUresult run_one(Stream* stream) {
    Driver& d = driver();
    if (d.sticky != SUCCESS) return d.sticky;
    {
        const Op& next = stream->queue.front();
        while (next.event && next.event->done < next.version) {
            Stream* other = next.event->stream;
            if (!other || other->queue.empty()) return broken("a stream waits for an event that nobody records");
            if (CUresult code = run_one(other)) return code;
        }
    }
    OnDevice on(stream->device);
    if (stream->queue.front().ready && !stream->queue.front().ready()) return BLOCKED;
    Op op = std::move(stream->queue.front());
    stream->queue.pop_front();
    start_work(stream, op);
    if (!op.run) return SUCCESS;
    std::string problem = op.run();
    return problem.empty() ? SUCCESS : broken(problem);
}

CUresult run_until(Stream* stream, size_t left) {
    while (stream->queue.size() > left)
        if (CUresult code = run_one(stream)) return code;
    return driver().sticky;
}

// Lets other threads go on, which work for other devices. What the driver has is not the same behind it.
void yield_lock() {
    int device = used_device();
    driver().mutex.unlock();
    usleep(50);
    driver().mutex.lock();
    use_device(device);
}

// Waits for all work of a stream.
CUresult finish(Stream* stream) {
    for (;;) {
        CUresult code = run_until(stream, 0);
        if (code == SUCCESS) learn(stream, driver().work);
        if (code != BLOCKED) return code;
        yield_lock();
    }
}

// Waits for all work of the device.
CUresult run_all() {
    for (bool blocked = true; blocked;) {
        blocked = false;
        for (Stream* stream : driver().streams) {
            if (stream->device != used_device()) continue;
            CUresult code = run_until(stream, 0);
            if (code == BLOCKED) blocked = true;
            else if (code) return code;
        }
        if (blocked) yield_lock();
    }
    return driver().sticky;
}

CUresult enqueue(Stream* stream, Op op) {
    Driver& d = driver();
    if (d.sticky != SUCCESS) return d.sticky;
    if (!d.streams.count(stream)) return fail(INVALID_HANDLE, "no such stream");
    if (stream->device != used_device()) return fail(INVALID_CONTEXT, "the stream is one of another device");
    if (stream->capturing) {
        stream->captured.ops.push_back(std::move(op));
        return SUCCESS;
    }
    op.known = stream->known;
    stream->queue.push_back(std::move(op));
    CUresult code = SUCCESS;
    if (draw(16) == 0) code = run_until(stream, draw(uint32_t(stream->queue.size())));
    return code == BLOCKED ? SUCCESS : code;
}

bool any_capture() {
    for (Stream* stream : driver().streams)
        if (stream->capturing && stream->device == used_device()) return true;
    return false;
}

struct Locked {
    std::lock_guard<std::recursive_mutex> guard{driver().mutex};
};

CUresult launch(const Launch& what) {
    std::string problem = execute(what, driver().running->unfinished);
    return problem.empty() ? SUCCESS : broken(problem);
}

int on_module(struct dl_phdr_info* info, size_t, void* data) {
    auto* image = static_cast<Image*>(data);
    auto* map = static_cast<link_map*>(image->handle);
    if (info->dlpi_addr != map->l_addr || image->begin) return 0;
    uintptr_t begin = UINTPTR_MAX, end = 0;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        if (info->dlpi_phdr[i].p_type != PT_LOAD) continue;
        uintptr_t at = info->dlpi_addr + info->dlpi_phdr[i].p_vaddr;
        begin = std::min(begin, at);
        end = std::max(end, at + info->dlpi_phdr[i].p_memsz);
    }
    image->begin = begin;
    image->end = end;
    return 0;
}

// Maps a module once more, into `image`. Gives a sentence where that fails.
std::string map_module(const char* bytes, size_t size, Image& image) {
    // A file of its own: the loader takes one of a path that it knows for the same library.
    const char* folder = std::getenv("TMPDIR");
    std::string path = std::string(folder ? folder : "/tmp") + "/cuda-module-XXXXXX";
    int file = mkstemp(path.data());
    size_t written = 0;
    while (file >= 0 && written < size) {
        ssize_t n = write(file, bytes + written, size - written);
        if (n <= 0) break;
        written += size_t(n);
    }
    if (file >= 0) close(file);
    if (written == size) image.handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    unlink(path.c_str());
    if (written < size) return "no room for the module";
    if (!image.handle) return dlerror();
    auto* begin = reinterpret_cast<char* (*)()>(dlsym(image.handle, "emulator_shared_begin"));
    if (!begin) return "the module says nothing of its shared memory";
    image.shared_begin = reinterpret_cast<uintptr_t>(begin());
    dl_iterate_phdr(on_module, &image);
    // Behind that section lie those of templates, which have none of their own.
    image.shared_end = image.end;
    return {};
}

struct ModuleHandle {
    std::shared_ptr<Module> module;
    std::map<std::string, Function*> functions;
};

const char MAGIC[8] = {'C', 'U', 'D', 'A', 'E', 'M', 'U', '1'};

}  // namespace

thread_local unsigned* current_context = nullptr;

int emulator::current_device() { return current_context ? int(current_context - driver().contexts) : -1; }

std::string emulator::last_error() {
    Locked lock;
    return driver().message;
}

int emulator::enqueue_work(void* stream, const char* name, std::function<std::string()> work,
                           std::function<bool()> ready) {
    Locked lock;
    if (current_device() < 0) return fail(INVALID_CONTEXT, "no context is current on this thread");
    use_device(current_device());
    Op op = {std::move(work), Order::EARLY, name};
    op.ready = std::move(ready);
    return enqueue(static_cast<Stream*>(stream), std::move(op));
}

extern "C" {

CUresult cuInit(unsigned) { return SUCCESS; }
CUresult cuDriverGetVersion(int* version) {
    *version = 13000;
    return SUCCESS;
}
CUresult cuDeviceGetCount(int* count) {
    Locked lock;
    *count = driver().devices;
    return SUCCESS;
}
CUresult cuDeviceGet(CUdevice* device, int ordinal) {
    Locked lock;
    if (ordinal < 0 || ordinal >= driver().devices) return fail(INVALID_DEVICE, "there is no such device");
    *device = ordinal;
    return SUCCESS;
}
// All processes of a machine see the same devices.
CUresult cuDeviceGetUuid_v2(char* uuid, CUdevice device) {
    std::snprintf(uuid, 16, "emulator %d", device);
    return SUCCESS;
}
CUresult cuDeviceGetName(char* name, int len, CUdevice) {
    std::snprintf(name, size_t(len), "CUDA emulator on the CPU");
    return SUCCESS;
}
CUresult cuDeviceGetAttribute(int* value, int attribute, CUdevice) {
    const int capability = driver().capability;
    switch (attribute) {
        case 1: *value = 1024; break;        // threads of a block
        case 2: case 3: *value = 1024; break;
        case 4: *value = 64; break;
        case 5: *value = 2147483647; break;  // blocks of a grid
        case 6: case 7: *value = 65535; break;
        case 8: *value = 48 << 10; break;    // shared memory of a block
        case 10: *value = 32; break;         // threads of a warp
        case 16: *value = 4; break;          // multiprocessors
        case 75: *value = capability / 10; break;
        case 76: *value = capability % 10; break;
        case 115: *value = 1; break;         // memory pools
        case 81: *value = driver().block_shared + (1 << 10); break;  // of all blocks of a multiprocessor
        case 97: *value = driver().block_shared; break;              // shared memory of a block that asks for it
        default: return fail(INVALID_VALUE, "the emulator has no such attribute");
    }
    return SUCCESS;
}
CUresult cuDeviceTotalMem_v2(size_t* bytes, CUdevice) {
    *bytes = device_total();
    return SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(unsigned** context, CUdevice device) {
    Locked lock;
    *context = &driver().contexts[device];
    ++**context;
    return SUCCESS;
}
CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
    Locked lock;
    unsigned& retained = driver().contexts[device];
    if (retained == 0) return fail(INVALID_CONTEXT, "the context was released more often than retained");
    retained--;
    return SUCCESS;
}
CUresult cuCtxSetCurrent(unsigned* context) {
    current_context = context;
    return SUCCESS;
}
#define NEEDS_CONTEXT                                                                           \
    Locked lock;                                                                                \
    if (!current_context) return fail(INVALID_CONTEXT, "no context is current on this thread"); \
    use_device(current_device())

CUresult cuGetErrorString(CUresult code, const char** text) {
    Locked lock;
    static thread_local std::string last;
    last = driver().message.empty() ? "error " + std::to_string(code) : driver().message;
    *text = last.c_str();
    return SUCCESS;
}

// For tests: how often captured work was replayed.
uint64_t emulator_replays() {
    Locked lock;
    return driver().replays;
}
// For tests: begins the draws of the seed again, which it gives.
uint64_t emulator_restart_draws() {
    Locked lock;
    return restart_draws();
}
// For tests of kernels that some devices have: the compute capability of all devices from here on, times ten.
void emulator_set_capability(int capability) { driver().capability = capability; }
// The shared memory that a block may ask for, before devices are opened.
void emulator_set_block_shared(int bytes) { driver().block_shared = bytes; }
// For tests of one process: how many devices there are.
void emulator_set_devices(int count) {
    Locked lock;
    driver().set_devices(count);
}
// For tests that make errors.
void emulator_reset() {
    Locked lock;
    for (Stream* stream : driver().streams) {
        stream->queue.clear();
        stream->unfinished.clear();
        stream->capturing = false;
    }
    driver().sticky = SUCCESS;
    driver().message.clear();
}

// ---- memory ------------------------------------------------------------------------------------------------------------

CUresult cuMemGetInfo_v2(size_t* free, size_t* total) {
    NEEDS_CONTEXT;
    *total = device_total();
    *free = device_total() - device_used();
    for (Pool* pool : driver().pools)
        if (pool->device == used_device()) *free -= std::min(*free, pool->reserved - pool->used);
    return SUCCESS;
}
CUresult cuMemAlloc_v2(CUdeviceptr* at, size_t bytes) {
    NEEDS_CONTEXT;
    if (bytes == 0) return fail(INVALID_VALUE, "an allocation of no bytes");
    if (driver().sticky) return driver().sticky;
    *at = device_alloc(bytes);
    return *at ? SUCCESS : fail(OUT_OF_MEMORY, "out of memory");
}
CUresult cuMemFree_v2(CUdeviceptr at) {
    NEEDS_CONTEXT;
    // It waits for all that runs, and may not be called while something is captured.
    if (any_capture()) return fail(CAPTURE_UNSUPPORTED, "memory is freed while a stream is captured");
    run_all();
    return device_free(at) ? SUCCESS : fail(INVALID_VALUE, "no such allocation");
}

// ---- pools: memory in the order of a stream ------------------------------------------------------------------------------

CUresult cuMemPoolCreate(Pool** pool, const void*) {
    NEEDS_CONTEXT;
    *pool = new Pool{used_device()};
    driver().pools.insert(*pool);
    return SUCCESS;
}
CUresult cuMemPoolDestroy(Pool* pool) {
    NEEDS_CONTEXT;
    run_all();
    if (!driver().pools.count(pool)) return fail(INVALID_HANDLE, "no such pool");
    if (pool->used) return broken("a pool is destroyed of which " + std::to_string(pool->used) + " bytes are in use");
    driver().pools.erase(pool);
    delete pool;
    return SUCCESS;
}
CUresult cuMemPoolSetAttribute(Pool* pool, int attribute, void* value) {
    NEEDS_CONTEXT;
    if (attribute != 4) return fail(INVALID_VALUE, "the emulator sets the release threshold of pools alone");
    std::memcpy(&pool->threshold, value, 8);
    return SUCCESS;
}
CUresult cuMemPoolGetAttribute(Pool* pool, int attribute, void* value) {
    NEEDS_CONTEXT;
    uint64_t found = 0;
    switch (attribute) {
        case 4: found = pool->threshold; break;
        case 5: found = pool->reserved; break;
        case 7: found = pool->used; break;
        default: return fail(INVALID_VALUE, "the emulator's pools have no such attribute");
    }
    std::memcpy(value, &found, 8);
    return SUCCESS;
}
// The address is known at once; there is memory at it when the stream gets there.
CUresult cuMemAllocFromPoolAsync(CUdeviceptr* at, size_t bytes, Pool* pool, Stream* stream) {
    NEEDS_CONTEXT;
    if (bytes == 0) return fail(INVALID_VALUE, "an allocation of no bytes");
    if (!driver().pools.count(pool)) return fail(INVALID_HANDLE, "no such pool");
    if (driver().streams.count(stream) && stream->capturing)
        return fail(CAPTURE_UNSUPPORTED, "the emulator captures no allocations");
    if (driver().sticky) return driver().sticky;
    // What other pools keep is given back for it.
    uintptr_t got = device_reserve(bytes);
    if (!got) return fail(OUT_OF_MEMORY, "out of memory");
    *at = got;
    driver().pooled[got] = pool;
    pool->took(bytes);
    return enqueue(stream, {[=] {
        device_begin(got);
        return std::string();
    }});
}
CUresult cuMemFreeAsync(CUdeviceptr at, Stream* stream) {
    NEEDS_CONTEXT;
    auto found = driver().pooled.find(at);
    if (found == driver().pooled.end()) return fail(INVALID_VALUE, "no such allocation of a pool");
    if (driver().streams.count(stream) && stream->capturing)
        return fail(CAPTURE_UNSUPPORTED, "the emulator captures no allocations");
    Pool* pool = found->second;
    driver().pooled.erase(found);
    return enqueue(stream, {[=] {
        pool->gave(device_size(at));
        device_free(at);
        return std::string();
    }});
}
CUresult cuCtxSynchronize() {
    NEEDS_CONTEXT;
    if (any_capture()) return fail(CAPTURE_UNSUPPORTED, "the host waits for a context of which a stream is captured");
    CUresult code = run_all();
    for (Stream* stream : driver().streams)
        if (code == SUCCESS && stream->device == used_device()) learn(stream, driver().work);
    return code;
}
CUresult cuMemHostAlloc(void** at, size_t bytes, unsigned) {
    NEEDS_CONTEXT;
    *at = host_alloc(bytes);
    return *at ? SUCCESS : fail(OUT_OF_MEMORY, "out of memory of the host");
}
CUresult cuMemFreeHost(void* at) {
    NEEDS_CONTEXT;
    run_all();
    return host_free(at) ? SUCCESS : fail(INVALID_VALUE, "no such memory of the host");
}
CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void* from, size_t bytes, Stream* stream) {
    NEEDS_CONTEXT;
    auto copy = [to, bytes](const void* source) {
        std::string problem = check_range(to, bytes, false);
        if (!problem.empty()) return "a copy to the device: " + problem;
        std::memcpy(reinterpret_cast<void*>(to), source, bytes);
        mark_written(to, bytes);
        return std::string();
    };
    if (is_pinned(from, bytes)) return enqueue(stream, {[=] { return copy(from); }, Order::ALONE});
    if (driver().streams.count(stream) && stream->capturing)
        return fail(CAPTURE_UNSUPPORTED, "a copy from pageable memory is captured");
    auto staged = std::make_shared<std::vector<char>>(static_cast<const char*>(from),
                                                      static_cast<const char*>(from) + bytes);
    return enqueue(stream, {[=] { return copy(staged->data()); }, Order::ALONE});
}
CUresult cuMemcpyDtoHAsync_v2(void* to, CUdeviceptr from, size_t bytes, Stream* stream) {
    NEEDS_CONTEXT;
    // Bytes that nothing has written may be read back: whoever does that sees what they are.
    Op op = {[=] {
        std::string problem = check_range(from, bytes, false);
        if (!problem.empty()) return "a copy from the device: " + problem;
        std::memcpy(to, reinterpret_cast<const void*>(from), bytes);
        return std::string();
    }, Order::ALONE};
    bool pinned = is_pinned(to, bytes);
    if (!pinned && driver().streams.count(stream) && stream->capturing)
        return fail(CAPTURE_UNSUPPORTED, "a copy to pageable memory is captured");
    CUresult code = enqueue(stream, std::move(op));
    return code || pinned ? code : finish(stream);
}
CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes, Stream* stream) {
    NEEDS_CONTEXT;
    return enqueue(stream, {[=] {
        std::string problem = check_range(from, bytes, false);
        if (problem.empty()) problem = check_range(to, bytes, false);
        if (!problem.empty()) return "a copy on the device: " + problem;
        if (to < from + bytes && from < to + bytes && to != from)
            return std::string("a copy on the device between ranges that overlap");
        std::memmove(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes);
        copy_shadow(to, from, bytes);
        return std::string();
    }, Order::AFTER_ALL, "a copy on the device"});
}
CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t bytes, Stream* stream) {
    NEEDS_CONTEXT;
    return enqueue(stream, {[=] {
        std::string problem = check_range(to, bytes, false);
        if (!problem.empty()) return "a fill: " + problem;
        std::memset(reinterpret_cast<void*>(to), value, bytes);
        mark_written(to, bytes);
        return std::string();
    }, Order::AFTER_ALL, "a fill"});
}

// ---- streams and events ----------------------------------------------------------------------------------------------------

CUresult cuStreamCreate(Stream** stream, unsigned) {
    NEEDS_CONTEXT;
    *stream = new Stream{};
    (*stream)->device = used_device();
    driver().streams.insert(*stream);
    return SUCCESS;
}
CUresult cuStreamDestroy_v2(Stream* stream) {
    NEEDS_CONTEXT;
    if (!driver().streams.count(stream)) return fail(INVALID_HANDLE, "no such stream");
    finish(stream);
    driver().streams.erase(stream);
    delete stream;
    return SUCCESS;
}
CUresult cuStreamSynchronize(Stream* stream) {
    NEEDS_CONTEXT;
    if (!driver().streams.count(stream)) return fail(INVALID_HANDLE, "no such stream");
    if (stream->capturing) return fail(CAPTURE_UNSUPPORTED, "the host waits for a stream that is captured");
    return finish(stream);
}
CUresult cuEventCreate(Event** event, unsigned) {
    NEEDS_CONTEXT;
    *event = new Event;
    return SUCCESS;
}
CUresult cuEventDestroy_v2(Event* event) {
    NEEDS_CONTEXT;
    run_all();
    delete event;
    return SUCCESS;
}
CUresult cuEventRecord(Event* event, Stream* stream) {
    NEEDS_CONTEXT;
    uint64_t version = ++event->recorded;
    event->stream = stream;
    event->captured = driver().streams.count(stream) && stream->capturing;
    return enqueue(stream, {[=] {
        event->done = version;
        event->work = driver().work;
        return std::string();
    }});
}
CUresult cuStreamWaitEvent(Stream* stream, Event* event, unsigned) {
    NEEDS_CONTEXT;
    Op op = {nullptr};
    op.event = event;
    op.version = event->recorded;
    return enqueue(stream, std::move(op));
}
CUresult cuEventSynchronize(Event* event) {
    NEEDS_CONTEXT;
    if (event->captured) return fail(CAPTURED_EVENT, "the host waits for an event of a captured step");
    while (event->done < event->recorded) {
        if (!event->stream || event->stream->queue.empty()) break;
        CUresult code = run_one(event->stream);
        if (code == BLOCKED) yield_lock();
        else if (code) return code;
    }
    if (event->done == event->recorded) learn(event->stream, event->work);
    return driver().sticky;
}
CUresult cuEventQuery(Event* event) {
    NEEDS_CONTEXT;
    if (driver().sticky) return driver().sticky;
    if (event->captured) return fail(CAPTURED_EVENT, "the host asks for an event of a captured step");
    if (event->done < event->recorded && event->stream && !event->stream->queue.empty()) run_one(event->stream);
    if (event->done < event->recorded) return NOT_READY;
    learn(event->stream, event->work);
    return driver().sticky;
}

// ---- modules and launches ----------------------------------------------------------------------------------------------------

CUresult cuModuleLoadData(ModuleHandle** out, const void* image) {
    NEEDS_CONTEXT;
    const char* bytes = static_cast<const char*>(image);
    if (std::memcmp(bytes, MAGIC, 8)) return fail(INVALID_IMAGE, "the image is none of the emulator's");
    uint64_t size;
    std::memcpy(&size, bytes + 8, 8);
    auto module = std::make_shared<Module>();
    module->images.resize(workers());
    for (Image& image : module->images) {
        std::string problem = map_module(bytes + 16, size, image);
        if (!problem.empty()) return fail(INVALID_IMAGE, problem);
    }
    *out = new ModuleHandle{module, {}};
    return SUCCESS;
}
CUresult cuModuleUnload(ModuleHandle* handle) {
    NEEDS_CONTEXT;
    run_all();
    for (auto& [name, function] : handle->functions) {
        driver().add(*function);
        driver().functions.erase(function);
        delete function;
    }
    for (Image& image : handle->module->images) dlclose(image.handle);
    delete handle;
    return SUCCESS;
}
CUresult cuModuleGetFunction(Function** out, ModuleHandle* handle, const char* name) {
    NEEDS_CONTEXT;
    Function*& found = handle->functions[name];
    if (!found) {
        std::string call = std::string("emulator_kernel_") + name, sizes = std::string("emulator_sizes_") + name;
        auto& images = handle->module->images;
        std::vector<void (*)(void**)> entries;
        for (Image& image : images) entries.push_back(reinterpret_cast<void (*)(void**)>(dlsym(image.handle, call.c_str())));
        auto* of_sizes = reinterpret_cast<unsigned (*)(const unsigned**)>(dlsym(images[0].handle, sizes.c_str()));
        if (!entries[0] || !of_sizes) {
            handle->functions.erase(name);
            return fail(NOT_FOUND, std::string("the module has no kernel ") + name);
        }
        const unsigned* all;
        unsigned count = of_sizes(&all);
        found = new Function{handle->module, name, std::move(entries), {all, all + count}, 48 << 10, {}};
        driver().functions.insert(found);
    }
    *out = found;
    return SUCCESS;
}
// A block has 227 KiB for a kernel's own shared variables and for what a launch asks for. Whose the variables of a module are is
// not known: each of its kernels is taken to have all.
static int own_shared(const Function& function) {
    const Image& image = function.module->images[0];
    return int(image.shared_end - image.shared_begin);
}
CUresult cuFuncGetAttribute(int* out, int attribute, Function* function) {
    NEEDS_CONTEXT;
    if (attribute != 1) return fail(INVALID_VALUE, "the emulator knows no attribute of functions but their shared memory");
    *out = own_shared(*function);
    return SUCCESS;
}
CUresult cuFuncSetAttribute(Function* function, int attribute, int value) {
    NEEDS_CONTEXT;
    // Dynamic shared memory; a preference of how it is carved is taken without effect.
    if (attribute == 8) {
        if (value > driver().block_shared - own_shared(*function))
            return fail(INVALID_VALUE, function->name + ": more shared memory than a block may have");
        function->max_dynamic_shared = size_t(value);
    }
    return SUCCESS;
}
struct LaunchConfig {
    unsigned gx, gy, gz, bx, by, bz, shared;
    Stream* stream;
    const unsigned char* attributes;
    unsigned count;
};
CUresult cuLaunchKernelEx(const LaunchConfig* config, Function* function, void** params, void** extra) {
    NEEDS_CONTEXT;
    Launch what = {function, {config->gx, config->gy, config->gz}, {config->bx, config->by, config->bz}, config->shared, {}};
    // An attribute is its number, four bytes of nothing, and 64 of the value.
    for (unsigned i = 0; i < config->count; i++) {
        unsigned id, value;
        std::memcpy(&id, config->attributes + i * 72, 4);
        std::memcpy(&value, config->attributes + i * 72 + 8, 4);
        if (id != 6) return fail(INVALID_VALUE, "the emulator knows no attribute of launches but starting them early");
        what.early = value != 0;
    }
    size_t threads = what.block.count();
    bool grid = what.grid.count() && config->gx <= INT32_MAX && config->gy <= 65535 && config->gz <= 65535;
    if (extra || !grid || !threads || threads > 1024 || config->bz > 64)
        return fail(INVALID_VALUE, function->name + ": a grid or block that no card takes");
    if (config->shared > function->max_dynamic_shared)
        return fail(LAUNCH_OUT_OF_RESOURCES, function->name + ": more dynamic shared memory than was asked for");
    for (size_t i = 0; i < function->sizes.size(); i++) {
        auto* bytes = static_cast<unsigned char*>(params[i]);
        what.arguments.emplace_back(bytes, bytes + function->sizes[i]);
    }
    return enqueue(config->stream, {[what] {
        CUresult code = launch(what);
        return code ? driver().message : std::string();
    }, what.early ? Order::EARLY : Order::AFTER_ALL, function->name});
}
CUresult cuLaunchKernel(Function* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                        unsigned shared, Stream* stream, void** params, void** extra) {
    LaunchConfig config = {gx, gy, gz, bx, by, bz, shared, stream, nullptr, 0};
    return cuLaunchKernelEx(&config, function, params, extra);
}

// ---- graphs --------------------------------------------------------------------------------------------------------------------

CUresult cuStreamBeginCapture_v2(Stream* stream, int) {
    NEEDS_CONTEXT;
    if (!driver().streams.count(stream) || stream->capturing) return fail(INVALID_HANDLE, "no stream to be captured");
    stream->capturing = true;
    stream->captured = Graph();
    return SUCCESS;
}
CUresult cuStreamEndCapture(Stream* stream, Graph** graph) {
    NEEDS_CONTEXT;
    if (!stream->capturing) return fail(INVALID_VALUE, "the stream is not captured");
    stream->capturing = false;
    *graph = new Graph(std::move(stream->captured));
    return SUCCESS;
}
CUresult cuGraphInstantiateWithFlags(Graph** exec, Graph* graph, unsigned long long) {
    NEEDS_CONTEXT;
    *exec = new Graph(*graph);
    return SUCCESS;
}
CUresult cuGraphLaunch(Graph* exec, Stream* stream) {
    NEEDS_CONTEXT;
    // It begins when all before it has ended.
    if (CUresult code = enqueue(stream, {nullptr, Order::ALONE})) return code;
    for (const Op& op : exec->ops)
        if (CUresult code = enqueue(stream, op)) return code;
    driver().replays++;
    return SUCCESS;
}
CUresult cuGraphExecDestroy(Graph* exec) {
    NEEDS_CONTEXT;
    run_all();
    delete exec;
    return SUCCESS;
}
CUresult cuGraphDestroy(Graph* graph) {
    NEEDS_CONTEXT;
    delete graph;
    return SUCCESS;
}
}
