// Norms: a block for each row. Its threads stride over the row, and their sums are added in one order, so that a row's
// bits depend on the row alone.
#include "common.cuh"

template <class X>
__device__ __forceinline__ void rms_row(const typename X::Stored* x, const float* weight, Act::Stored* out, int64_t dim,
                                        float eps, float* scratch) {
    float squares = 0;
    for (int64_t i = threadIdx.x; i < dim; i += blockDim.x) {
        float value = X::read(x + i);
        squares = fmaf(value, value, squares);
    }
    float factor = 1.0f / sqrtf(block_sum(squares, scratch) / float(dim) + eps);
    for (int64_t i = threadIdx.x; i < dim; i += blockDim.x) Act::write(out + i, X::read(x + i) * factor * weight[i]);
}

#define RMS_NORM(NAME, X)                                                                                               \
    KERNEL __launch_bounds__(256)                                                                                       \
        NAME(Act::Stored* out, const X::Stored* x, const float* weight, int64_t dim, float eps) {                       \
        __shared__ float scratch[32];                                                                                   \
        int64_t row = int64_t(blockIdx.x) * dim;                                                                        \
        rms_row<X>(x + row, weight, out + row, dim, eps, scratch);                                                      \
    }
RMS_NORM(rms_norm_act, Act)
RMS_NORM(rms_norm_f32, F32)

// residual += x; out = rms_norm(residual). A thread reads again what it has written itself.
KERNEL __launch_bounds__(256) add_rms_norm(Act::Stored* out, float* residual, const Act::Stored* x, const float* weight,
                                           int64_t dim, float eps) {
    __shared__ float scratch[32];
    int64_t row = int64_t(blockIdx.x) * dim;
    for (int64_t i = threadIdx.x; i < dim; i += blockDim.x) residual[row + i] += Act::read(x + row + i);
    rms_row<F32>(residual + row, weight, out + row, dim, eps, scratch);
}

// `bias` may be null.
template <class X>
__device__ __forceinline__ void layer_row(const typename X::Stored* x, const float* weight, const float* bias,
                                          Act::Stored* out, int64_t dim, float eps, float* scratch) {
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
