// NVRTC, as far as Ferrum calls it: compiles CUDA C++ for the host.
//
// The text stays as it is but for two things that no macro can do: an array of dynamic shared memory becomes a
// pointer, and for each kernel an entry is added that takes its arguments as a launch has them. A "cubin" is the
// shared object behind a few bytes that say so.
#include <dlfcn.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <regex>
#include <sstream>
#include <string>
#include <vector>

namespace {

struct Program {
    std::string source, name, log, cubin;
    std::vector<std::pair<std::string, std::string>> headers;
};

std::string read_file(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    std::stringstream text;
    text << file.rdbuf();
    return text.str();
}

void write_file(const std::string& path, const std::string& text) {
    std::ofstream(path, std::ios::binary) << text;
}

bool exists(const std::string& path) { return access(path.c_str(), R_OK) == 0; }

// What macros cannot do, on the text that the preprocessor has left.
std::string translate(const std::string& text) {
    static const std::regex dynamic(R"(extern\s+__emulator_shared__\s+([A-Za-z_0-9 ]+?)\s+([A-Za-z_0-9]+)\s*\[\s*\]\s*;)");
    // The first bound is that of threads; it is none of calls.
    static const std::regex kernel(R"(__emulator_global__\s+void\s+(?:__emulator_bounds__\s*\(([^(),]*)[^()]*\)\s*)?([A-Za-z_0-9]+)\s*\()");
    static const std::regex shared("__emulator_shared__"), global("__emulator_global__"), bounds(R"(__emulator_bounds__\s*\([^()]*\))");
    std::string entries;
    for (std::sregex_iterator at(text.begin(), text.end(), kernel), end; at != end; ++at) {
        std::string name = (*at)[2], threads = (*at)[1].matched ? std::string((*at)[1]) : "1024";
        entries += "\nextern \"C\" __attribute__((no_sanitize(\"thread\"))) void emulator_kernel_" + name +
                   "(void** params) { emulator::call(" + name + ", params); }\n" +
                   "extern \"C\" __attribute__((no_sanitize(\"thread\"))) unsigned emulator_sizes_" + name +
                   "(const unsigned** out) { return emulator::sizes(" + name + ", out); }\n" +
                   "extern \"C\" __attribute__((no_sanitize(\"thread\"))) unsigned emulator_threads_" + name +
                   "() { return " + threads + "; }\n";
    }
    std::string out = std::regex_replace(text, dynamic, "$1* $2 = static_cast<$1*>(emulator_dynamic_shared());");
    out = std::regex_replace(out, shared, "static __attribute__((section(\"cuda_shared\"), aligned(16)))");
    out = std::regex_replace(out, bounds, "");
    return std::regex_replace(out, global, "") + entries;
}

// Where the shared variables of a module lie; the linker knows their section.
const char SECTION[] = R"(
__shared__ __attribute__((used)) char emulator_some_shared[16] = {};
extern "C" char __start_cuda_shared[] __attribute__((visibility("hidden")));
extern "C" EMULATOR_PLAIN char* emulator_shared_begin() { return (void)emulator_some_shared, __start_cuda_shared; }
)";

std::string own_path() {
    Dl_info info;
    return dladdr(reinterpret_cast<void*>(&own_path), &info) && info.dli_fname ? info.dli_fname : "";
}

bool run(Program& program, const std::string& command, const std::string& log) {
    bool ok = std::system((command + " > '" + log + "' 2>&1").c_str()) == 0;
    program.log = read_file(log);
    return ok;
}

bool failed(Program& program, const std::string& path) {
    program.log = path + ": " + std::strerror(errno);
    return false;
}

// Makes the shared object of a program in a folder of its own.
bool build(Program& program, const std::string& source, const std::string& flags, const std::string& home,
           const std::string& folder) {
    for (auto& [name, text] : program.headers) {
        std::string own = home + "/device/" + name;
        write_file(folder + "/" + name, exists(own) ? read_file(own) : text);
    }
    std::string base = folder + "/kernel", log = folder + "/log";
    write_file(base + ".cpp", source);
    std::string includes = " -I '" + folder + "' -I '" + home + "/device'" + flags;
    if (!run(program, "c++ -std=c++17 -E" + includes + " '" + base + ".cpp' -o '" + base + ".i'", log)) return false;
    write_file(base + ".ii", translate(read_file(base + ".i")));
    return run(program, "c++ -std=c++17 -O1 -g0 -march=native -ffp-contract=off -fno-strict-aliasing -fPIC -fno-gnu-unique -w "
                        "-fsanitize=thread --param tsan-instrument-func-entry-exit=0 -c '" + base + ".ii' -o '" + base + ".o'", log) &&
           run(program, "c++ -shared -Wl,-Bsymbolic -nostartfiles '" + base + ".o' '" + home + "/libcuda.so' -o '" + base + ".so'", log);
}

// What was compiled is kept: its name is the hash of all that it depends on.
bool compile(Program& program, const std::string& flags) {
    std::string library = own_path();
    std::string home = library.substr(0, library.rfind('/'));
    std::string source = std::string("#include \"emulator.h\"\n") + SECTION + "#line 1 \"" + program.name + "\"\n" + program.source;
    std::string all = source + flags + read_file(home + "/device/emulator.h") + read_file(home + "/device/intrinsics.cuh");
    for (auto& [name, text] : program.headers) all += name + text;
    char hash[32];
    std::snprintf(hash, sizeof hash, "%016zx", std::hash<std::string>()(all));
    std::string modules = home + "/modules", object = modules + "/" + hash + ".so";
    mkdir(modules.c_str(), 0777);
    if (!exists(object)) {
        // Others, threads of this process too, may be compiling the same.
        std::string folder = modules + "/" + hash + ".XXXXXX";
        if (!mkdtemp(folder.data())) return failed(program, folder);
        if (!build(program, source, flags, home, folder)) return false;
        if (std::rename((folder + "/kernel.so").c_str(), object.c_str())) return failed(program, object);
        if (std::system(("rm -rf '" + folder + "'").c_str())) return failed(program, folder);
    }
    std::string bytes = read_file(object);
    uint64_t size = bytes.size();
    program.cubin = std::string("CUDAEMU1") + std::string(reinterpret_cast<char*>(&size), 8) + bytes;
    return true;
}

}  // namespace

extern "C" {

// The minor number stands for this library and the device headers: whoever keeps what was compiled, keeps it for these.
int nvrtcVersion(int* major, int* minor) {
    std::string library = own_path(), home = library.substr(0, library.rfind('/'));
    std::string headers = read_file(home + "/device/emulator.h") + read_file(home + "/device/intrinsics.cuh") + read_file(library);
    *major = 13;
    *minor = int(1000 + std::hash<std::string>()(headers) % 1000000);
    return 0;
}
const char* nvrtcGetErrorString(int code) {
    switch (code) {
        case 0: return "NVRTC_SUCCESS";
        case 5: return "NVRTC_ERROR_INVALID_OPTION";
        case 6: return "NVRTC_ERROR_COMPILATION";
        default: return "NVRTC error";
    }
}
int nvrtcCreateProgram(Program** out, const char* source, const char* name, int headers, const char* const* texts,
                       const char* const* names) {
    *out = new Program{source, name ? name : "default_program", "", "", {}};
    for (int i = 0; i < headers; i++) (*out)->headers.emplace_back(names[i], texts[i]);
    return 0;
}
int nvrtcDestroyProgram(Program** program) {
    delete *program;
    *program = nullptr;
    return 0;
}
int nvrtcCompileProgram(Program* program, int count, const char* const* options) {
    std::string flags;
    for (int i = 0; i < count; i++) {
        std::string option = options[i];
        if (option.rfind("-D", 0) == 0) {
            flags += " '" + option + "'";
        } else if (option.rfind("--gpu-architecture=sm_", 0) && option.rfind("--std=c++17", 0) &&
                   option.rfind("--use_fast_math", 0) && option.rfind("-default-device", 0)) {
            program->log = "unknown option " + option;
            return 5;
        }
    }
    return compile(*program, flags) ? 0 : 6;
}
int nvrtcGetCUBINSize(Program* program, size_t* size) {
    *size = program->cubin.size();
    return 0;
}
int nvrtcGetCUBIN(Program* program, char* out) {
    std::memcpy(out, program->cubin.data(), program->cubin.size());
    return 0;
}
int nvrtcGetProgramLogSize(Program* program, size_t* size) {
    *size = program->log.size() + 1;
    return 0;
}
int nvrtcGetProgramLog(Program* program, char* out) {
    std::memcpy(out, program->log.c_str(), program->log.size() + 1);
    return 0;
}
}
