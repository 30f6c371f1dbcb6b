// Norms: a block for each row. Its threads stride over the row, and their sums are added in one order, so that a row's
// bits depend on the row alone.
#include "common.cuh"

__device__ __forceinline__ void rms_row(const float* x, const float* weight, float* out, int64_t dim, float eps,
                                        float* scratch) {
    float squares = 0;
    for (int64_t i = threadIdx.x; i < dim; i += blockDim.x) squares = fmaf(x[i], x[i], squares);
    float factor = 1.0f / sqrtf(block_sum(squares, scratch) / float(dim) + eps);
    for (int64_t i = threadIdx.x; i < dim; i += blockDim.x) out[i] = x[i] * factor * weight[i];
}

KERNEL __launch_bounds__(256) rms_norm(float* out, const float* x, const float* weight, int64_t dim, float eps) {
    __shared__ float scratch[32];
    int64_t row = int64_t(blockIdx.x) * dim;
    rms_row(x + row, weight, out + row, dim, eps, scratch);
}

// residual += x; out = rms_norm(residual). A thread reads again what it has written itself.
KERNEL __launch_bounds__(256)
    add_rms_norm(float* out, float* residual, const float* x, const float* weight, int64_t dim, float eps) {
    __shared__ float scratch[32];
    int64_t row = int64_t(blockIdx.x) * dim;
    for (int64_t i = threadIdx.x; i < dim; i += blockDim.x) residual[row + i] += x[row + i];
    rms_row(residual + row, weight, out + row, dim, eps, scratch);
}

// `bias` may be null.
KERNEL __launch_bounds__(256)
    layer_norm(float* out, const float* x, const float* weight, const float* bias, int64_t dim, float eps) {
    __shared__ float scratch[32];
    int64_t row = int64_t(blockIdx.x) * dim;
    float sum = 0;
    for (int64_t i = threadIdx.x; i < dim; i += blockDim.x) sum += x[row + i];
    float mean = block_sum(sum, scratch) / float(dim);
    float squares = 0, rest = 0;
    for (int64_t i = threadIdx.x; i < dim; i += blockDim.x) {
        float d = x[row + i] - mean;
        squares = fmaf(d, d, squares);
        rest += d;
    }
    // What the mean was rounded by comes out of the deviations.
    float off = block_sum(rest, scratch) / float(dim);
    float variance = block_sum(squares, scratch) / float(dim) - off * off;
    float factor = 1.0f / sqrtf(variance + eps);
    for (int64_t i = threadIdx.x; i < dim; i += blockDim.x) {
        float y = ((x[row + i] - mean) - off) * factor * weight[i];
        out[row + i] = bias ? y + bias[i] : y;
    }
}
