// The driver API, as far as Ferrum calls it: devices, contexts, errors, modules and launches.
#include "driver.hpp"

#include <dlfcn.h>
#include <link.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>

using namespace emulator;

Driver& emulator::driver() {
    static Driver one;
    return one;
}

// What broke the device stays the message of all later errors: they follow from it.
CUresult emulator::fail(CUresult code, const std::string& message) {
    Driver& d = driver();
    if (d.sticky == SUCCESS) d.message = with_seed(message);
    return code;
}

CUresult emulator::broken(const std::string& message) {
    Driver& d = driver();
    if (d.sticky == SUCCESS) {
        d.sticky = LAUNCH_FAILED;
        d.message = with_seed(message);
        std::fprintf(stderr, "cuda-emulator: %s\n", d.message.c_str());
    }
    return d.sticky;
}

thread_local unsigned* emulator::current_context = nullptr;

int emulator::current_device() { return current_context ? int(current_context - driver().contexts) : -1; }

std::string emulator::last_error() {
    Locked lock;
    return driver().message;
}

namespace {

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
        case 38: *value = 256 << 10; break;  // second cache
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
// For tests: how often the host was blocked by a call.
uint64_t emulator_host_syncs() {
    Locked lock;
    return driver().host_syncs;
}
// For tests: begins the draws of the seed again, which it gives.
uint64_t emulator_restart_draws() {
    Locked lock;
    return restart_draws();
}
// For tests: bytes of pinned memory that there are.
uint64_t emulator_pinned() {
    Locked lock;
    return pinned_bytes();
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

// ---- modules and launches ----------------------------------------------------------------------------------------------------

CUresult cuModuleLoadData(ModuleHandle** out, const void* image) {
    NEEDS_CONTEXT;
    const char* bytes = static_cast<const char*>(image);
    if (std::memcmp(bytes, MAGIC, 8)) return fail(INVALID_IMAGE, "the image is none of the emulator's");
    uint64_t size;
    std::memcpy(&size, bytes + 8, 8);
    count_host_sync();
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
    count_host_sync();
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
        std::string threads = std::string("emulator_threads_") + name;
        auto* max_threads = reinterpret_cast<unsigned (*)()>(dlsym(images[0].handle, threads.c_str()));
        if (!entries[0] || !of_sizes || !max_threads) {
            handle->functions.erase(name);
            return fail(NOT_FOUND, std::string("the module has no kernel ") + name);
        }
        const unsigned* all;
        unsigned count = of_sizes(&all);
        found = new Function{handle->module, name, std::move(entries), {all, all + count}, max_threads(), 48 << 10, {}};
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
    if (threads > function->max_threads)
        return fail(INVALID_VALUE, function->name + ": more threads in a block than its launch bounds allow");
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
}
