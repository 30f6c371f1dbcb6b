// Norms: a block for each row. Its threads stride over the row, and their sums are added in one order, so that a row's
// bits depend on the row alone.
#include "common.cuh"

// Runs of eight elements that a thread keeps of a row in registers.
#define NORM_RUNS 4

// out = x / √(mean(x²) + eps) · weight, and with `add` before that: x += add. A row that fits stays in registers; a thread reads
// what it has itself written of one that does not.
template <class X, bool ADDS>
__device__ __forceinline__ void rms_row(typename X::Stored* x, const Act::Stored* add, const float* weight, Act::Stored* out,
                                        int dim, float eps, float* scratch) {
    bool wide = dim % 8 == 0;
    int runs = (dim + 7) / 8;
    float squares = 0;
    float kept[NORM_RUNS][8];
    // The weight is there whatever runs before, and comes from memory: a step's other weights have passed through the caches since.
    for (int run = threadIdx.x; run < runs; run += blockDim.x) prefetch(weight + run * 8);
    wait_for_previous();
    auto take = [&](int at, float(&values)[8]) {
        x8<X>(x, at, dim, wide, values);
        if (ADDS) {
            float more[8];
            x8<Act>(add, at, dim, wide, more);
#pragma unroll
            for (int j = 0; j < 8; j++) values[j] += more[j];
            write_x8<X>(x, at, dim, wide, values);
        }
#pragma unroll
        for (int j = 0; j < 8; j++) squares = fmaf(values[j], values[j], squares);
    };
#pragma unroll
    for (int i = 0; i < NORM_RUNS; i++) {
        int at = (i * int(blockDim.x) + int(threadIdx.x)) * 8;
        if (at < dim) take(at, kept[i]);
    }
    for (int run = NORM_RUNS * int(blockDim.x) + int(threadIdx.x); run < runs; run += blockDim.x) {
        float values[8];
        take(run * 8, values);
    }
    float factor = 1.0f / sqrtf(block_sum(squares, scratch) / float(dim) + eps);
    auto write = [&](int at, const float(&values)[8]) {
        float scales[8], result[8];
        x8<F32>(weight, at, dim, wide, scales);
#pragma unroll
        for (int j = 0; j < 8; j++) result[j] = values[j] * factor * scales[j];
        write_x8<Act>(out, at, dim, wide, result);
    };
#pragma unroll
    for (int i = 0; i < NORM_RUNS; i++) {
        int at = (i * int(blockDim.x) + int(threadIdx.x)) * 8;
        if (at < dim) write(at, kept[i]);
    }
    for (int run = NORM_RUNS * int(blockDim.x) + int(threadIdx.x); run < runs; run += blockDim.x) {
        float values[8];
        x8<X>(x, run * 8, dim, wide, values);
        write(run * 8, values);
    }
}

#define RMS_NORM(NAME, X)                                                                                               \
    KERNEL __launch_bounds__(512)                                                                                       \
        NAME(Act::Stored* out, X::Stored* x, const float* weight, int dim, float eps) {                                 \
        __shared__ float scratch[32];                                                                                   \
        int64_t row = int64_t(blockIdx.x) * dim;                                                                        \
        rms_row<X, false>(x + row, nullptr, weight, out + row, dim, eps, scratch);                                      \
    }
RMS_NORM(rms_norm_act, Act)
RMS_NORM(rms_norm_f32, F32)

// residual += x; out = rms_norm(residual).
KERNEL __launch_bounds__(512) add_rms_norm(Act::Stored* out, float* residual, const Act::Stored* x, const float* weight,
                                           int dim, float eps) {
    __shared__ float scratch[32];
    int64_t row = int64_t(blockIdx.x) * dim;
    rms_row<F32, true>(residual + row, x + row, weight, out + row, dim, eps, scratch);
}

// `bias` may be null.
template <class X>
__device__ __forceinline__ void layer_row(const typename X::Stored* x, const float* weight, const float* bias,
                                          Act::Stored* out, int64_t dim, float eps, float* scratch) {
    wait_for_previous();
    float sum = 0;
    for (int64_t i = threadIdx.x; i < dim; i += blockDim.x) sum += X::read(x + i);
    float mean = block_sum(sum, scratch) / float(dim);
    float squares = 0, rest = 0;
    for (int64_t i = threadIdx.x; i < dim; i += blockDim.x) {
        float d = X::read(x + i) - mean;
        squares = fmaf(d, d, squares);
        rest += d;
    }
    // What the mean was rounded by comes out of the deviations.
    float off = block_sum(rest, scratch) / float(dim);
    float variance = block_sum(squares, scratch) / float(dim) - off * off;
    float factor = 1.0f / sqrtf(variance + eps);
    for (int64_t i = threadIdx.x; i < dim; i += blockDim.x) {
        float y = ((X::read(x + i) - mean) - off) * factor * weight[i];
        Act::write(out + i, bias ? y + bias[i] : y);
    }
}

#define LAYER_NORM(NAME, X)                                                                                             \
    KERNEL __launch_bounds__(256) NAME(Act::Stored* out, const X::Stored* x, const float* weight, const float* bias,    \
                                       int64_t dim, float eps) {                                                        \
        __shared__ float scratch[32];                                                                                   \
        int64_t row = int64_t(blockIdx.x) * dim;                                                                        \
        layer_row<X>(x + row, weight, bias, out + row, dim, eps, scratch);                                              \
    }
LAYER_NORM(layer_norm_act, Act)
LAYER_NORM(layer_norm_f32, F32)
