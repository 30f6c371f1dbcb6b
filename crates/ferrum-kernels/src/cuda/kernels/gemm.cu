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

// One row alone, and one column.
template <class E>
__device__ __forceinline__ void product_of_row(float* out, const float* x, const typename E::Stored* w, int k, int lane) {
    float sum = 0;
    for (int at = lane * 8; at < k; at += 256) {
        float a[8], b[8];
        E::read8(w + at, a);
        x8(x, at, k, k % 4 == 0 && at + 8 <= k, b);
#pragma unroll
        for (int i = 0; i < 8; i++) sum = fmaf(a[i], b[i], sum);
    }
    sum = warp_sum(sum);
    if (lane == 0) *out = sum;
}

// ---- experts ---------------------------------------------------------------------------------------------------------

// A warp makes a column of a pair, with the sums in the order of `product`. Pairs come in the order of their experts, so that
// neighbours read the same weights. `share` pairs have one row of x.
template <class E>
__device__ __forceinline__ void pair_product(float* out, const float* x, const typename E::Stored* stack,
                                             const int* expert_ids, const int* ids, int pairs, int k, int64_t stride,
                                             int n, int experts, int share) {
    int blocks = (n + 3) / 4;
    int column = int(blockIdx.x) % blocks * 4 + int(threadIdx.x) / 32, lane = threadIdx.x % 32;
    int pair = ids[int(blockIdx.x) / blocks];
    if (column >= n || pair < 0 || pair >= pairs) return;
    int expert = expert_ids[pair];
    if (expert < 0 || expert >= experts) return;
    product_of_row<E>(out + int64_t(pair) * n + column, x + int64_t(pair / share) * k,
                      stack + (int64_t(expert) * n + column) * stride, k, lane);
}
#define MOE_GEMM(NAME, E)                                                                                               \
    KERNEL __launch_bounds__(128) NAME(float* out, const float* x, const E::Stored* stack, const int* expert_ids,       \
                                       const int* ids, int pairs, int k, int64_t stride, int n, int experts,            \
                                       int share) {                                                                     \
        pair_product<E>(out, x, stack, expert_ids, ids, pairs, k, stride, n, experts, share);                           \
    }
MOE_GEMM(moe_gemm_f32, F32)
MOE_GEMM(moe_gemm_f16, F16)
MOE_GEMM(moe_gemm_bf16, BF16)
