// Products with dense matrices whose rows have a stride of a multiple of eight elements.
//
// A warp makes one column for up to ROWS rows. Its lanes stride over k in steps of eight elements, and their sums are
// added in one order: how many rows share a warp changes no bit of any of them.
#include "common.cuh"

template <class E, class OUT, int ROWS>
__device__ __forceinline__ void product(typename OUT::Stored* out, const Act::Stored* x, const typename E::Stored* weight,
                                        int rows, int k, int64_t stride, int columns, int64_t first, int64_t n) {
    wait_for_previous();
    int blocks = (columns + 3) / 4;
    int column = int(blockIdx.x) % blocks * 4 + int(threadIdx.x) / 32, lane = threadIdx.x % 32;
    int64_t row = int64_t(int(blockIdx.x) / blocks) * ROWS;
    if (column >= columns) return;
    const typename E::Stored* w = weight + column * stride;
    float sums[ROWS] = {};
    for (int at = lane * 8; at < k; at += 256) {
        bool wide = is_wide(at, k);
        float a[8], b[8];
        E::read8(w + at, a);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            if (row + r >= rows) break;
            x8<Act>(x + (row + r) * k, at, k, wide, b);
#pragma unroll
            for (int i = 0; i < 8; i++) sums[r] = fmaf(a[i], b[i], sums[r]);
        }
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        if (row + r >= rows) break;
        float sum = warp_sum(sums[r]);
        if (lane == r) OUT::write(out + (row + r) * n + first + column, sum);
    }
}

#define GEMM(NAME, E, OUT, ROWS)                                                                                        \
    KERNEL __launch_bounds__(128) NAME(OUT::Stored* out, const Act::Stored* x, const E::Stored* weight, int rows,       \
                                       int k, int64_t stride, int columns, int64_t first, int64_t n) {                  \
        product<E, OUT, ROWS>(out, x, weight, rows, k, stride, columns, first, n);                                      \
    }
// Activations of 16 bits have gemv.cu and tiles.
#ifndef ACT_16
GEMM(gemm_f32_1_act, F32, Act, 1)
GEMM(gemm_f32_1_f32, F32, F32, 1)
GEMM(gemm_f32_4_act, F32, Act, 4)
GEMM(gemm_f32_4_f32, F32, F32, 4)
GEMM(gemm_f32_8_act, F32, Act, 8)
GEMM(gemm_f32_8_f32, F32, F32, 8)
GEMM(gemm_f16_1_act, F16, Act, 1)
GEMM(gemm_f16_1_f32, F16, F32, 1)
GEMM(gemm_f16_4_act, F16, Act, 4)
GEMM(gemm_f16_4_f32, F16, F32, 4)
GEMM(gemm_f16_8_act, F16, Act, 8)
GEMM(gemm_f16_8_f32, F16, F32, 8)
GEMM(gemm_bf16_1_act, BF16, Act, 1)
GEMM(gemm_bf16_1_f32, BF16, F32, 1)
GEMM(gemm_bf16_4_act, BF16, Act, 4)
GEMM(gemm_bf16_4_f32, BF16, F32, 4)
GEMM(gemm_bf16_8_act, BF16, Act, 8)
GEMM(gemm_bf16_8_f32, BF16, F32, 8)
#endif

// One row alone, and one column.
template <class E>
__device__ __forceinline__ void product_of_row(Act::Stored* out, const Act::Stored* x, const typename E::Stored* w, int k,
                                               int lane) {
    const int AHEAD = 4;
    float sum = 0;
    for (int first = lane * 8; first < k; first += 256 * AHEAD) {
        Eight<E> ahead[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; i++)
            if (first + 256 * i < k) ahead[i].load(w + first + 256 * i);
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            int at = first + 256 * i;
            if (at >= k) break;
            float a[8], b[8];
            ahead[i].get(a);
            x8<Act>(x, at, k, is_wide(at, k), b);
#pragma unroll
            for (int j = 0; j < 8; j++) sum = fmaf(a[j], b[j], sum);
        }
    }
    sum = warp_sum(sum);
    if (lane == 0) Act::write(out, sum);
}

// ---- experts ---------------------------------------------------------------------------------------------------------

// A warp makes a column of a pair, with the sums in the order of `product`. Pairs come in the order of their experts, so that
// neighbours read the same weights. `share` pairs have one row of x.
template <class E>
__device__ __forceinline__ void pair_product(Act::Stored* out, const Act::Stored* x, const typename E::Stored* stack,
                                             const int* expert_ids, const int* ids, int pairs, int k, int64_t stride,
                                             int n, int experts, int share) {
    wait_for_previous();
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
    KERNEL __launch_bounds__(128) NAME(Act::Stored* out, const Act::Stored* x, const E::Stored* stack,                  \
                                       const int* expert_ids,                                                           \
                                       const int* ids, int pairs, int k, int64_t stride, int n, int experts,            \
                                       int share) {                                                                     \
        pair_product<E>(out, x, stack, expert_ids, ids, pairs, k, stride, n, experts, share);                           \
    }
MOE_GEMM(moe_gemm_f32, F32)
MOE_GEMM(moe_gemm_f16, F16)
MOE_GEMM(moe_gemm_bf16, BF16)
