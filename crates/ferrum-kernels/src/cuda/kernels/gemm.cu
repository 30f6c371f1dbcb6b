// Products with dense matrices whose rows have a stride of a multiple of eight elements.
//
// A warp makes one column for up to ROWS rows. Its lanes stride over k in steps of eight elements, and their sums are
// added in one order: how many rows share a warp changes no bit of any of them.
#include "common.cuh"

// Eight elements of x from `at` on, zeros behind `k`.
__device__ __forceinline__ void x8(const float* x, int at, int k, bool wide, float (&out)[8]) {
    if (wide) return F32::read8(x + at, out);
#pragma unroll
    for (int i = 0; i < 8; i++) out[i] = at + i < k ? x[at + i] : 0.0f;
}

template <class E, int ROWS>
__device__ __forceinline__ void product(float* out, const float* x, const typename E::Stored* weight, int rows, int k,
                                        int64_t stride, int columns, int64_t first, int64_t n) {
    int blocks = (columns + 3) / 4;
    int column = int(blockIdx.x) % blocks * 4 + int(threadIdx.x) / 32, lane = threadIdx.x % 32;
    int64_t row = int64_t(int(blockIdx.x) / blocks) * ROWS;
    if (column >= columns) return;
    const typename E::Stored* w = weight + column * stride;
    float sums[ROWS] = {};
    for (int at = lane * 8; at < k; at += 256) {
        bool wide = k % 4 == 0 && at + 8 <= k;
        float a[8], b[8];
        E::read8(w + at, a);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            if (row + r >= rows) break;
            x8(x + (row + r) * k, at, k, wide, b);
#pragma unroll
            for (int i = 0; i < 8; i++) sums[r] = fmaf(a[i], b[i], sums[r]);
        }
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        if (row + r >= rows) break;
        float sum = warp_sum(sums[r]);
        if (lane == r) out[(row + r) * n + first + column] = sum;
    }
}

#define GEMM(NAME, E, ROWS)                                                                                             \
    KERNEL __launch_bounds__(128) NAME(float* out, const float* x, const E::Stored* weight, int rows, int k,            \
                                       int64_t stride, int columns, int64_t first, int64_t n) {                         \
        product<E, ROWS>(out, x, weight, rows, k, stride, columns, first, n);                                           \
    }
GEMM(gemm_f32_1, F32, 1)
GEMM(gemm_f32_4, F32, 4)
GEMM(gemm_f32_8, F32, 8)
GEMM(gemm_f16_1, F16, 1)
GEMM(gemm_f16_4, F16, 4)
GEMM(gemm_f16_8, F16, 8)
GEMM(gemm_bf16_1, BF16, 1)
GEMM(gemm_bf16_4, BF16, 4)
GEMM(gemm_bf16_8, BF16, 8)
