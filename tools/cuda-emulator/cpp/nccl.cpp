// NCCL, as far as Ferrum calls it: communicators that do not block, sums, and gathers, of ranks that are threads or processes.
//
// Ranks meet in a folder, whose path is the unique id. In the order of its stream, each one writes what it gives to a
// collective into a file there, and goes on when those of all ranks are there. What differs between ranks is an error, where
// the library would hang or mix bytes up. Sums begin at another rank for each part of a buffer, as in a ring, and 16-bit
// elements are rounded at each step, so whoever counts on another order finds out.
#include <dirent.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "emulator.hpp"

using namespace emulator;

namespace {

enum Result { SUCCESS = 0, UNHANDLED_CUDA = 1, SYSTEM = 2, INVALID_ARGUMENT = 4, INVALID_USAGE = 5, REMOTE = 6, IN_PROGRESS = 7 };
enum Type { INT8 = 0, UINT8 = 1, INT32 = 2, UINT32 = 3, FLOAT16 = 6, FLOAT32 = 7, BFLOAT16 = 9 };
enum Reduction { SUM = 0, MAX = 2, MIN = 3 };

struct Id {
    char folder[128];
};
struct Config {
    size_t size;
    unsigned magic, version;
    int blocking;
};

// A collective, as all ranks have to call it.
struct Call {
    char name[16];
    int type, detail;
    uint64_t count;

    std::string text() const {
        return std::string(name) + " of " + std::to_string(count) + " elements of type " + std::to_string(type) + " (" +
               std::to_string(detail) + ")";
    }
};

struct Comm {
    int rank, size, device;
    std::string folder;
    std::atomic<bool> aborted{false}, connected{false}, finalizing{false};
    // Collectives that this rank has run, and whether it has given its part of the next one.
    uint64_t sequence = 0;
    bool posted = false;
    std::vector<std::string> parts;
    std::string problem;
    // What was wrong, for `ncclGetLastError`.
    std::string last;

    std::string file(const std::string& what, int of) const { return folder + "/" + what + "." + std::to_string(of); }
    // Whether all ranks have put a file of this name there.
    bool all(const std::string& what) const {
        for (int r = 0; r < size; r++)
            if (access(file(what, r).c_str(), F_OK)) return false;
        return true;
    }
    // Nobody sees half of a file.
    void put(const std::string& what, const void* head, size_t head_bytes, const void* data, size_t bytes) const {
        std::string path = file(what, rank), beside = path + "~";
        FILE* out = std::fopen(beside.c_str(), "wb");
        if (!out) return;
        std::fwrite(head, 1, head_bytes, out);
        if (bytes) std::fwrite(data, 1, bytes, out);
        std::fclose(out);
        std::rename(beside.c_str(), path.c_str());
    }
    // The last rank to go takes the folder with it.
    void leave() const {
        DIR* all = opendir(folder.c_str());
        if (!all) return;
        std::string own = "." + std::to_string(rank);
        while (dirent* entry = readdir(all)) {
            std::string name = entry->d_name;
            bool ours = name.size() > own.size() && name.compare(name.size() - own.size(), own.size(), own) == 0;
            if (ours) unlink((folder + "/" + name).c_str());
        }
        closedir(all);
        rmdir(folder.c_str());
    }
};

std::mutex mutex;
std::map<void*, std::shared_ptr<Comm>> comms;
std::atomic<uint64_t> reductions{0}, gathers{0};
// Whether all communicators are to report that a rank was lost.
std::atomic<bool> broken{false};
thread_local std::string last_problem;

std::shared_ptr<Comm> found(void* handle) {
    std::lock_guard<std::mutex> lock(mutex);
    auto at = comms.find(handle);
    return at == comms.end() ? nullptr : at->second;
}

int fail(int code, const std::string& problem) {
    last_problem = with_seed(problem);
    return code;
}

std::string read_file(const std::string& path) {
    std::string bytes;
    FILE* in = std::fopen(path.c_str(), "rb");
    if (!in) return bytes;
    char buffer[1 << 16];
    while (size_t n = std::fread(buffer, 1, sizeof buffer, in)) bytes.append(buffer, n);
    std::fclose(in);
    return bytes;
}

size_t size_of(int type) {
    switch (type) {
        case INT8: case UINT8: return 1;
        case FLOAT16: case BFLOAT16: return 2;
        case INT32: case UINT32: case FLOAT32: return 4;
        default: return 0;
    }
}

// ---- elements --------------------------------------------------------------------------------------------------------

template <class T>
struct Plain {
    typedef T Stored;
    static T get(T x) { return x; }
    static T put(T x) { return x; }
};
struct Bf16 {
    typedef uint16_t Stored;
    static float get(uint16_t bits) { return of_bf16(bits); }
    static uint16_t put(float x) { return to_bf16(x); }
};
struct Half {
    typedef uint16_t Stored;
    static float get(uint16_t bits) { return of_f16(bits); }
    static uint16_t put(float x) { return to_f16(x); }
};

template <class E>
void reduce(const std::vector<std::string>& parts, size_t head, uint64_t count, int op, unsigned char* out) {
    typedef typename E::Stored Stored;
    size_t ranks = parts.size();
    for (uint64_t i = 0; i < count; i++) {
        auto of = [&](size_t rank) {
            Stored x;
            std::memcpy(&x, parts[rank].data() + head + i * sizeof x, sizeof x);
            return x;
        };
        size_t first = (i * ranks / count + 1) % ranks;
        Stored sum = of(first);
        for (size_t n = 1; n < ranks; n++) {
            auto a = E::get(sum), b = E::get(of((first + n) % ranks));
            // Only floats differ from themselves.
            if (op == SUM) sum = E::put(a + b);
            else if (a != a || (b == b && (op == MAX ? b > a : b < a))) sum = E::put(b);
        }
        std::memcpy(out + i * sizeof sum, &sum, sizeof sum);
    }
}

void reduce_any(const std::vector<std::string>& parts, size_t head, const Call& call, unsigned char* out) {
    switch (call.type) {
        case INT8: return reduce<Plain<int8_t>>(parts, head, call.count, call.detail, out);
        case UINT8: return reduce<Plain<uint8_t>>(parts, head, call.count, call.detail, out);
        case INT32: return reduce<Plain<int32_t>>(parts, head, call.count, call.detail, out);
        case UINT32: return reduce<Plain<uint32_t>>(parts, head, call.count, call.detail, out);
        case FLOAT16: return reduce<Half>(parts, head, call.count, call.detail, out);
        case BFLOAT16: return reduce<Bf16>(parts, head, call.count, call.detail, out);
        default: return reduce<Plain<float>>(parts, head, call.count, call.detail, out);
    }
}

// ---- collectives -----------------------------------------------------------------------------------------------------

// Gives this rank's part, once; true when it has all parts.
bool exchanged(Comm& c, const Call& call, uintptr_t from, size_t bytes) {
    if (c.aborted || !c.problem.empty()) return true;
    std::string name = "part-" + std::to_string(c.sequence);
    if (!c.posted) {
        c.problem = check_range(from, bytes, true);
        if (!c.problem.empty()) return true;
        c.put(name, &call, sizeof call, reinterpret_cast<const void*>(from), bytes);
        c.posted = true;
    }
    if (!c.all(name)) return false;
    c.parts.clear();
    for (int r = 0; r < c.size; r++) {
        c.parts.push_back(read_file(c.file(name, r)));
        // A rank that was aborted meanwhile is waited for, as one that never came.
        if (c.parts[r].size() < sizeof call) return false;
    }
    return true;
}

std::string combine(Comm& c, const Call& call, uintptr_t to) {
    size_t bytes = call.count * size_of(call.type), head = sizeof call;
    bool gather = !std::strcmp(call.name, "allgather");
    size_t results = gather ? bytes * c.size : bytes;
    if (c.aborted) {
        // It leaves any bytes there, which work that is in the stream already may read: the host learns of the end later.
        if (check_range(to, results, false).empty()) mark_written(to, results);
        return {};
    }
    auto wrong = [&](const std::string& what) { return "a collective of NCCL on rank " + std::to_string(c.rank) + ": " + what; };
    if (!c.problem.empty()) return wrong(c.problem);
    std::vector<std::string> parts = std::move(c.parts);
    for (int r = 0; r < c.size; r++) {
        Call other;
        std::memcpy(&other, parts[r].data(), sizeof other);
        if (std::memcmp(&other, &call, sizeof call))
            return wrong("it calls " + call.text() + ", but rank " + std::to_string(r) + " calls " + other.text());
    }
    // All have run the last one.
    if (c.sequence > 0) unlink(c.file("part-" + std::to_string(c.sequence - 1), c.rank).c_str());
    c.sequence++;
    c.posted = false;
    std::string problem = check_range(to, results, false);
    if (!problem.empty()) return wrong(problem);
    auto* out = reinterpret_cast<unsigned char*>(to);
    if (gather) {
        for (int r = 0; r < c.size; r++) std::memcpy(out + r * bytes, parts[r].data() + head, bytes);
        mark_written(to, results);
        gathers++;
    } else {
        if (!std::strcmp(call.name, "broadcast")) std::memcpy(out, parts[call.detail].data() + head, bytes);
        else reduce_any(parts, head, call, out), reductions++;
        mark_written(to, bytes);
    }
    return {};
}

int begin(const char* name, uintptr_t from, uintptr_t to, size_t count, int type, int detail, void* handle, void* stream) {
    auto comm = found(handle);
    if (!comm) return fail(INVALID_ARGUMENT, "no such communicator");
    if (comm->aborted || comm->finalizing) return fail(INVALID_USAGE, "the communicator was finalized or aborted");
    if (!comm->connected) return fail(INVALID_USAGE, "the communicator is not connected yet");
    if (current_device() != comm->device) return fail(INVALID_USAGE, "the device of the communicator is not the current one");
    if (!size_of(type)) return fail(INVALID_ARGUMENT, "no such type of elements");
    Call call = {};
    std::strncpy(call.name, name, sizeof call.name - 1);
    call.type = type, call.detail = detail, call.count = count;
    bool gives = std::strcmp(name, "broadcast") || detail == comm->rank;
    size_t bytes = gives ? count * size_of(type) : 0;
    auto ready = [=] { return exchanged(*comm, call, from, bytes); };
    auto run = [=] { return combine(*comm, call, to); };
    if (enqueue_work(stream, "a collective of NCCL", run, ready)) return fail(UNHANDLED_CUDA, last_error());
    // The library connects to other ranks when it first needs to.
    return draw(4) == 0 ? IN_PROGRESS : SUCCESS;
}

}  // namespace

extern "C" {

// For tests: how many sums, and how many gathers, this process has taken part in.
uint64_t emulator_reductions() { return reductions; }
uint64_t emulator_gathers() { return gathers; }
// For tests: from here on, communicators say that a rank was lost; or no more.
void emulator_lose_rank(int lost) { broken = lost != 0; }

int ncclGetVersion(int* version) {
    *version = 22703;
    return SUCCESS;
}
const char* ncclGetErrorString(int code) {
    switch (code) {
        case SUCCESS: return "no error";
        case UNHANDLED_CUDA: return "unhandled cuda error";
        case SYSTEM: return "unhandled system error";
        case INVALID_ARGUMENT: return "invalid argument";
        case INVALID_USAGE: return "invalid usage";
        case REMOTE: return "remote process exited or there was a network error";
        case IN_PROGRESS: return "NCCL operation in progress";
        default: return "unknown result code";
    }
}
const char* ncclGetLastError(void* handle) {
    auto comm = found(handle);
    static thread_local std::string text;
    text = comm && !comm->last.empty() ? comm->last : last_problem;
    return text.c_str();
}
int ncclGetUniqueId(Id* id) {
    const char* shared = access("/dev/shm", W_OK) ? std::getenv("TMPDIR") : "/dev/shm";
    std::string path = std::string(shared ? shared : "/tmp") + "/nccl-stand-in-XXXXXX";
    if (path.size() >= sizeof id->folder || !mkdtemp(path.data())) return fail(SYSTEM, "no folder for ranks to meet in");
    std::memset(id, 0, sizeof *id);
    std::memcpy(id->folder, path.data(), path.size());
    return SUCCESS;
}
int ncclCommInitRankConfig(void** handle, int size, Id id, int rank, Config* config) {
    if (config->magic != 0xcafebeef || config->size < sizeof(Config)) return fail(INVALID_ARGUMENT, "no configuration");
    if (config->blocking != 0) return fail(INVALID_USAGE, "the emulator's communicators do not block");
    if (rank < 0 || rank >= size) return fail(INVALID_ARGUMENT, "no such rank");
    if (current_device() < 0) return fail(UNHANDLED_CUDA, "no context is current on this thread");
    auto comm = std::make_shared<Comm>();
    comm->rank = rank, comm->size = size, comm->device = current_device();
    comm->folder = std::string(id.folder, strnlen(id.folder, sizeof id.folder));
    int about[2] = {size, comm->device};
    comm->put("rank", about, sizeof about, nullptr, 0);
    if (access(comm->file("rank", rank).c_str(), F_OK)) return fail(SYSTEM, "the unique id is none, or its ranks are gone");
    std::lock_guard<std::mutex> lock(mutex);
    *handle = comm.get();
    comms[comm.get()] = comm;
    return IN_PROGRESS;
}
int ncclCommGetAsyncError(void* handle, int* result) {
    auto comm = found(handle);
    if (!comm) return fail(INVALID_ARGUMENT, "no such communicator");
    *result = SUCCESS;
    if (broken) {
        comm->last = "a rank was lost";
        *result = REMOTE;
    } else if (comm->finalizing) {
        // Whoever has left has done so, too.
        for (int r = 0; r < comm->size; r++)
            if (access(comm->file("final", r).c_str(), F_OK) && !access(comm->file("rank", r).c_str(), F_OK))
                *result = IN_PROGRESS;
    } else if (!comm->connected) {
        if (!comm->all("rank")) {
            *result = IN_PROGRESS;
            return SUCCESS;
        }
        std::map<int, int> devices;
        for (int r = 0; r < comm->size; r++) {
            int about[2] = {};
            std::string bytes = read_file(comm->file("rank", r));
            std::memcpy(about, bytes.data(), std::min(bytes.size(), sizeof about));
            if (about[0] != comm->size) comm->last = "ranks that were told of groups of other sizes";
            if (devices.count(about[1]))
                comm->last = "Duplicate GPU detected: rank " + std::to_string(r) + " and rank " +
                             std::to_string(devices[about[1]]) + " both on device " + std::to_string(about[1]);
            devices[about[1]] = r;
        }
        if (comm->last.empty()) comm->connected = true;
        else *result = INVALID_USAGE;
    }
    return SUCCESS;
}
int ncclCommFinalize(void* handle) {
    auto comm = found(handle);
    if (!comm) return fail(INVALID_ARGUMENT, "no such communicator");
    if (comm->finalizing.exchange(true)) return fail(INVALID_ARGUMENT, "the communicator was finalized before");
    comm->put("final", "", 0, nullptr, 0);
    return IN_PROGRESS;
}
int ncclCommAbort(void* handle) {
    auto comm = found(handle);
    if (!comm) return fail(INVALID_ARGUMENT, "no such communicator");
    comm->aborted = true;
    // Others may still look at the folder; what they miss tells them nothing but to wait.
    comm->leave();
    std::lock_guard<std::mutex> lock(mutex);
    comms.erase(handle);
    return SUCCESS;
}
int ncclCommDestroy(void* handle) {
    auto comm = found(handle);
    if (!comm) return fail(INVALID_ARGUMENT, "no such communicator");
    return ncclCommAbort(handle);
}
int ncclAllReduce(uintptr_t from, uintptr_t to, size_t count, int type, int op, void* comm, void* stream) {
    if (op != SUM && op != MAX && op != MIN) return fail(INVALID_ARGUMENT, "the emulator has no such reduction");
    return begin("allreduce", from, to, count, type, op, comm, stream);
}
int ncclAllGather(uintptr_t from, uintptr_t to, size_t count, int type, void* comm, void* stream) {
    return begin("allgather", from, to, count, type, 0, comm, stream);
}
int ncclBroadcast(uintptr_t from, uintptr_t to, size_t count, int type, int root, void* comm, void* stream) {
    return begin("broadcast", from, to, count, type, root, comm, stream);
}

}  // extern "C"
