// Products of few rows with FP8 weights, and of any number of rows of f32: weights stay codes until they are in registers.
//
// A warp makes a column for up to ROWS rows. Its lanes stride over k sixteen codes at a time, whose products are added up
// before they are scaled, and the sums of lanes are added in one order: how many rows share a warp changes no bit of any.
#include "float8.cuh"

// EARLY: the caller has not waited for the kernel before, whose results are not read before the first pieces of the weight are
// on their way.
template <int ROWS, bool EARLY>
__device__ __forceinline__ void lane_sums(const Act::Stored* x, const Float8& w, int64_t weight_row, int k, int64_t rows,
                                          float (&sums)[ROWS]) {
    // Pieces that are asked for before the first is used.
    const int AHEAD = ROWS > 4 ? 2 : 4, STEP = 32 * 16;
    const uint8_t* from = w.codes + weight_row * w.stride;
    const int begin = int(threadIdx.x) % 32 * 16;
    if (EARLY && begin >= k) wait_for_previous();
    for (int first = begin; first < k; first += STEP * AHEAD) {
        uint4 ahead[AHEAD];
        float scales[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            int at = first + i * STEP;
            if (at >= k) break;
            ahead[i] = load16_once(from + at);
            scales[i] = *w.scale_at(weight_row, at) * OF_CODES;
        }
        if (EARLY && first == begin) wait_for_previous();
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            int at = first + i * STEP;
            if (at >= k) break;
            float a[16];
            uint32_t words[4] = {ahead[i].x, ahead[i].y, ahead[i].z, ahead[i].w};
#pragma unroll
            for (int j = 0; j < 4; j++) four_codes(words[j], a + 4 * j);
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                if (r >= rows) break;
                float b[8], sum = 0;
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    int of_half = at + half * 8;
                    x8<Act>(x + r * int64_t(k), of_half, k, is_wide(of_half, k), b);
#pragma unroll
                    for (int j = 0; j < 8; j++) sum = fmaf(a[half * 8 + j], b[j], sum);
                }
                sums[r] = fmaf(scales[i], sum, sums[r]);
            }
        }
    }
}

template <class OUT, int ROWS>
__device__ __forceinline__ void product(typename OUT::Stored* out, const Act::Stored* x, const Float8& w, int rows, int k,
                                        int columns, int64_t first, int64_t n) {
    int blocks = (columns + 3) / 4;
    int column = int(blockIdx.x) % blocks * 4 + int(threadIdx.x) / 32, lane = threadIdx.x % 32;
    int64_t row = int64_t(int(blockIdx.x) / blocks) * ROWS;
    if (column >= columns) return wait_for_previous();
    float sums[ROWS] = {};
    lane_sums<ROWS, true>(x + row * k, w, column, k, rows - row, sums);
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        if (row + r >= rows) break;
        float sum = warp_sum(sums[r]);
        if (lane == r) OUT::write(out + (row + r) * n + first + column, sum);
    }
}

#define FLOAT8_GEMM(NAME, OUT, ROWS)                                                                                    \
    KERNEL __launch_bounds__(128, 3) NAME(OUT::Stored* out, const Act::Stored* x, FLOAT8_PARAMS, int rows, int k,          \
                                       int columns, int64_t first, int64_t n) {                                         \
        product<OUT, ROWS>(out, x, FLOAT8, rows, k, columns, first, n);                                                 \
    }
FLOAT8_GEMM(float8_gemm_1_act, Act, 1)
FLOAT8_GEMM(float8_gemm_1_f32, F32, 1)
FLOAT8_GEMM(float8_gemm_4_act, Act, 4)
FLOAT8_GEMM(float8_gemm_4_f32, F32, 4)
// More than four rows of 16 bits are products of tiles.
#ifndef ACT_16
FLOAT8_GEMM(float8_gemm_8_act, Act, 8)
FLOAT8_GEMM(float8_gemm_8_f32, F32, 8)
#endif

// As `pair_product` in gemm.cu. The rows of all experts are one matrix.
KERNEL __launch_bounds__(128, 3) float8_moe(Act::Stored* out, const Act::Stored* x, FLOAT8_PARAMS, const int* expert_ids,
                                         const int* ids, int pairs, int k, int n, int experts, int share) {
    wait_for_previous();
    int blocks = (n + 3) / 4;
    int column = int(blockIdx.x) % blocks * 4 + int(threadIdx.x) / 32, lane = threadIdx.x % 32;
    int pair = ids[int(blockIdx.x) / blocks];
    if (column >= n || pair < 0 || pair >= pairs) return;
    int expert = expert_ids[pair];
    if (expert < 0 || expert >= experts) return;
    float sums[1] = {};
    lane_sums<1, false>(x + int64_t(pair / share) * k, FLOAT8, int64_t(expert) * n + column, k, 1, sums);
    float sum = warp_sum(sums[0]);
    if (lane == 0) Act::write(out + int64_t(pair) * n + column, sum);
}
