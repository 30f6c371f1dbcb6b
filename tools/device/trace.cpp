// Writes when each kernel of a program began and ended, by CUPTI, to the file that FERRUM_TRACE names: lines of `begin,end,grid,name`, in
// nanoseconds. The driver loads it into a program whose environment names it in CUDA_INJECTION64_PATH; `trace.py` reads the lines.
//
//     g++ -shared -fPIC -I"$CUDA/include" -I"$CUDA/extras/CUPTI/include" -o trace.so trace.cpp -L"$CUDA/extras/CUPTI/lib64" -lcupti
#include <cuda.h>
#include <cupti.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <mutex>

namespace {
FILE* out;
std::mutex writing;

void CUPTIAPI give_buffer(uint8_t** buffer, size_t* size, size_t* records) {
    *size = 8 << 20, *records = 0;
    *buffer = static_cast<uint8_t*>(std::aligned_alloc(8, *size));
}

void CUPTIAPI take_buffer(CUcontext, uint32_t, uint8_t* buffer, size_t, size_t valid) {
    std::lock_guard<std::mutex> guard(writing);
    CUpti_Activity* record = nullptr;
    while (cuptiActivityGetNextRecord(buffer, valid, &record) == CUPTI_SUCCESS) {
        if (record->kind != CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL) continue;
        auto* kernel = reinterpret_cast<CUpti_ActivityKernel10*>(record);
        std::fprintf(out, "%llu,%llu,%d,%s\n", static_cast<unsigned long long>(kernel->start),
                     static_cast<unsigned long long>(kernel->end), kernel->gridX, kernel->name);
    }
    std::free(buffer);
}

void finish() {
    cuptiActivityFlushAll(1);
    std::fclose(out);
}
}  // namespace

extern "C" int InitializeInjection() {
    const char* path = std::getenv("FERRUM_TRACE");
    out = path ? std::fopen(path, "w") : nullptr;
    if (!out) return 0;
    cuptiActivityRegisterCallbacks(give_buffer, take_buffer);
    cuptiActivityEnable(CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL);
    std::atexit(finish);
    return 1;
}
