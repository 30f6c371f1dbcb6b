// cuBLASLt, as far as Ferrum calls it: products of bf16 or f16 matrices that are stored by columns, the first one turned.
//
// Kernels are chosen for descriptions, as there; one that was chosen for others is an error here. Ranges, alignment and the
// workspace are checked when the product runs, in the order of its stream.
#include <atomic>
#include <cstring>

#include "emulator.hpp"

using namespace emulator;

namespace {

enum Status { SUCCESS = 0, INVALID_VALUE = 7, EXECUTION_FAILED = 13, NOT_SUPPORTED = 15 };
enum Type { F32 = 0, F16 = 2, BF16 = 14 };

struct Product {
    int compute, scale, turned = 0;
};
struct Layout {
    int type;
    uint64_t height, width;
    int64_t stride;
};
struct Limits {
    uint64_t workspace = 0;
};
// What `cublasLtMatmulAlgo_t` has in it: the sizes that it was chosen for.
struct Kernel {
    uint64_t magic, columns, rows, k, stride, type, workspace, factors;
};
constexpr uint64_t MAGIC = 0x424c41534c543031;
// Bytes that the kernels here say they need, so that somebody has to have them.
constexpr size_t WORKSPACE = 1 << 20;

struct Heuristic {
    Kernel kernel;
    size_t workspace;
    int state;
    float waves;
    int reserved[4];
};

std::atomic<uint64_t> products{0};

Kernel chosen(const Layout& a, const Layout& b, const Layout& d) {
    return {MAGIC, a.width, b.width, a.height, uint64_t(d.stride), uint64_t(d.type), WORKSPACE, uint64_t(a.type)};
}

size_t bytes_of(const Layout& l) {
    size_t size = l.type == F32 ? 4 : 2;
    return ((l.width - 1) * size_t(l.stride) + l.height) * size;
}

// d[j][i] = sum over k of a[i][k] · b[j][k], where a matrix's first index is that of its columns.
std::string multiply(const Kernel& k, uintptr_t a, Layout of_a, uintptr_t b, Layout of_b, uintptr_t d, Layout of_d,
                     uintptr_t workspace) {
    std::string problem = check_range(a, bytes_of(of_a), true);
    if (problem.empty()) problem = check_range(b, bytes_of(of_b), true);
    if (problem.empty()) problem = check_range(workspace, k.workspace, false);
    size_t size = of_d.type == F32 ? 4 : 2;
    for (uint64_t j = 0; problem.empty() && j < of_d.width; j++)
        problem = check_range(d + j * of_d.stride * size, of_d.height * size, false);
    if (!problem.empty()) return "a product of cuBLASLt: " + problem;
    bool half = of_a.type == F16;
    auto value = [half](uint16_t bits) { return half ? of_f16(bits) : of_bf16(bits); };
    for (uint64_t j = 0; j < of_d.width; j++) {
        auto* row = reinterpret_cast<const uint16_t*>(b) + j * of_b.stride;
        uintptr_t to = d + j * of_d.stride * size;
        for (uint64_t i = 0; i < of_d.height; i++) {
            auto* column = reinterpret_cast<const uint16_t*>(a) + i * of_a.stride;
            float sum = 0;
            for (uint64_t n = 0; n < of_a.height; n++) sum += value(row[n]) * value(column[n]);
            uint16_t rounded = half ? to_f16(sum) : to_bf16(sum);
            std::memcpy(reinterpret_cast<void*>(to + i * size), size == 4 ? static_cast<void*>(&sum) : &rounded, size);
        }
        mark_written(to, of_d.height * size);
    }
    products++;
    // What is in it afterwards is anything.
    std::memset(reinterpret_cast<void*>(workspace), 0xa5, k.workspace);
    mark_written(workspace, k.workspace);
    return {};
}

}  // namespace

extern "C" {

// For tests: how many products ran.
uint64_t emulator_products() { return products; }

int cublasLtCreate(void** handle) {
    *handle = new int(0);
    return SUCCESS;
}
int cublasLtDestroy(int* handle) {
    delete handle;
    return SUCCESS;
}
int cublasLtMatmulDescCreate(Product** product, int compute, int scale) {
    *product = new Product{compute, scale};
    return SUCCESS;
}
int cublasLtMatmulDescDestroy(Product* product) {
    delete product;
    return SUCCESS;
}
int cublasLtMatmulDescSetAttribute(Product* product, int attribute, const void* value, size_t bytes) {
    if (attribute != 3 || bytes != 4) return INVALID_VALUE;
    std::memcpy(&product->turned, value, 4);
    return SUCCESS;
}
int cublasLtMatrixLayoutCreate(Layout** layout, int type, uint64_t height, uint64_t width, int64_t stride) {
    if (height == 0 || width == 0 || stride < int64_t(height)) return INVALID_VALUE;
    *layout = new Layout{type, height, width, stride};
    return SUCCESS;
}
int cublasLtMatrixLayoutDestroy(Layout* layout) {
    delete layout;
    return SUCCESS;
}
int cublasLtMatmulPreferenceCreate(Limits** limits) {
    *limits = new Limits;
    return SUCCESS;
}
int cublasLtMatmulPreferenceDestroy(Limits* limits) {
    delete limits;
    return SUCCESS;
}
int cublasLtMatmulPreferenceSetAttribute(Limits* limits, int attribute, const void* value, size_t bytes) {
    if (attribute != 1 || bytes != 8) return INVALID_VALUE;
    std::memcpy(&limits->workspace, value, 8);
    return SUCCESS;
}
int cublasLtMatmulAlgoGetHeuristic(void*, Product* product, Layout* a, Layout* b, Layout* c, Layout* d, Limits* limits,
                                   int asked, Heuristic* found, int* count) {
    *count = 0;
    bool fits = a->height == b->height && d->height == a->width && d->width == b->width && c->stride == d->stride;
    if (!fits || asked < 1) return INVALID_VALUE;
    bool known = product->compute == 68 && product->scale == F32 && product->turned == 1 && a->type == b->type &&
                 (a->type == BF16 || a->type == F16) && (d->type == a->type || d->type == F32);
    bool aligned = a->stride % 8 == 0 && b->stride % 8 == 0 && d->stride % 8 == 0;
    if (!known || !aligned || limits->workspace < WORKSPACE) return NOT_SUPPORTED;
    *found = {chosen(*a, *b, *d), WORKSPACE, SUCCESS, 1, {}};
    *count = 1;
    return SUCCESS;
}
int cublasLtMatmul(void*, Product* product, const float* alpha, uintptr_t a, Layout* of_a, uintptr_t b, Layout* of_b,
                   const float* beta, uintptr_t, Layout*, uintptr_t d, Layout* of_d, const Kernel* kernel,
                   uintptr_t workspace, size_t workspace_bytes, void* stream) {
    Kernel expected = chosen(*of_a, *of_b, *of_d), given = *kernel;
    if (std::memcmp(&expected, &given, sizeof given) || product->turned != 1) return INVALID_VALUE;
    if (*alpha != 1 || *beta != 0 || workspace_bytes < given.workspace) return INVALID_VALUE;
    // What kernels are chosen for unless somebody says otherwise.
    if ((a | b | d | workspace) % 256) return INVALID_VALUE;
    Layout la = *of_a, lb = *of_b, ld = *of_d;
    auto run = [=] { return multiply(given, a, la, b, lb, d, ld, workspace); };
    return enqueue_work(stream, "a product of cuBLASLt", run) == 0 ? SUCCESS : EXECUTION_FAILED;
}

}  // extern "C"
