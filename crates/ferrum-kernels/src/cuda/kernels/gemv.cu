// Products of few rows of 16 bits with dense matrices: what decoding is made of, and bound by the bytes of the weight.
//
// A warp makes COLUMNS columns for ROWS rows. It asks for several pieces of the weight before it uses the first, so that
// enough bytes are on their way, and columns share what is read of x. Where there are few columns, two or four warps share
// them, each with its part of every stretch of k; their sums are added in one order. Rows of x and of the weight have one
// stride, a multiple of eight, with zeros behind k. Gate and up of a feed-forward are two columns that become one number.
#include "common.cuh"
#ifdef ACT_16  // there is nothing here for activations of f32

// AHEAD pieces of each column are asked for at once. `parts` warps share a column. GATED: the weight has twice as many columns,
// and a warp makes one of the first half and its own of the second.
template <class E, int ROWS, int COLUMNS, int AHEAD, bool GATED>
__device__ __forceinline__ void product(void* out, int is_f32, const uint16_t* x, const typename E::Stored* weight, int rows,
                                        int stride, int columns, int64_t first, int64_t n, int parts, const Gating& gated) {
    static_assert(!GATED || COLUMNS == 2, "gate and up");
    const int RESULTS = GATED ? 1 : COLUMNS;
    __shared__ float shared[4][ROWS * COLUMNS];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, part = warp % parts;
    int column = (int(blockIdx.x) * (4 / parts) + warp / parts) * RESULTS;
    const int step = 256 * AHEAD;
    float sums[ROWS][COLUMNS] = {};
    if (part * step >= stride) wait_for_previous();
    for (int from = part * step; from < stride; from += parts * step) {
        Eight<E> w[AHEAD][COLUMNS];
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            int at = from + i * 256 + lane * 8;
#pragma unroll
            for (int c = 0; c < COLUMNS; c++) {
                bool there = at < stride && column + (GATED ? 0 : c) < columns;
                if (there) w[i][c].load(weight + int64_t(column + c * (GATED ? columns : 1)) * stride + at);
                else w[i][c].zero();
            }
        }
        // The weight is there whatever runs before; x is not.
        if (from == part * step) wait_for_previous();
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            int at = from + i * 256 + lane * 8;
            float b[ROWS][8];
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                if (r < rows && at < stride) {
                    Act::read8(x + int64_t(r) * stride + at, b[r]);
                } else {
#pragma unroll
                    for (int j = 0; j < 8; j++) b[r][j] = 0;
                }
            }
#pragma unroll
            for (int c = 0; c < COLUMNS; c++) {
                float a[8];
                w[i][c].get(a);
#pragma unroll
                for (int r = 0; r < ROWS; r++) {
#pragma unroll
                    for (int j = 0; j < 8; j++) sums[r][c] = fmaf(a[j], b[r][j], sums[r][c]);
                }
            }
        }
    }
#pragma unroll
    for (int i = 0; i < ROWS * COLUMNS; i++) {
        float sum = warp_sum(sums[i / COLUMNS][i % COLUMNS]);
        if (lane == 0) shared[warp][i] = sum;
    }
    __syncthreads();
    if (part || lane >= ROWS * RESULTS) return;
    int row = lane / RESULTS;
    column += lane % RESULTS;
    if (row >= rows || column >= columns) return;
    auto whole = [&](int of) {
        float sum = shared[warp][of];
        for (int i = 1; i < parts; i++) sum += shared[warp + i][of];
        return sum;
    };
    float sum = GATED ? gated(whole(2 * lane), whole(2 * lane + 1)) : whole(lane);
    int64_t at = row * n + first + column;
    if (is_f32) static_cast<float*>(out)[at] = sum;
    else Act::write(static_cast<Act::Stored*>(out) + at, sum);
}

#define GEMV(NAME, E, ROWS, COLUMNS, AHEAD)                                                                             \
    KERNEL __launch_bounds__(128, 5) NAME(void* out, int is_f32, const uint16_t* x, const E::Stored* weight, int rows,  \
                                       int stride, int columns, int64_t first, int64_t n, int parts) {                  \
        product<E, ROWS, COLUMNS, AHEAD, false>(out, is_f32, x, weight, rows, stride, columns, first, n, parts, {});    \
    }
GEMV(gemv_f32_1, F32, 1, 1, 2)
GEMV(gemv_f32_2, F32, 2, 2, 1)
GEMV(gemv_f32_4, F32, 4, 2, 1)
GEMV(gemv_f16_1, F16, 1, 1, 4)
GEMV(gemv_f16_2, F16, 2, 2, 2)
GEMV(gemv_f16_4, F16, 4, 2, 2)
GEMV(gemv_bf16_1, BF16, 1, 1, 4)
GEMV(gemv_bf16_2, BF16, 2, 2, 2)
GEMV(gemv_bf16_4, BF16, 4, 2, 2)

#define GATED_GEMV(NAME, E, ROWS)                                                                                       \
    KERNEL __launch_bounds__(128, 5) NAME(Act::Stored* out, const uint16_t* x, const E::Stored* weight, int rows,       \
                                          int stride, int columns, int parts, int activation) {                         \
        product<E, ROWS, 2, 2, true>(out, false, x, weight, rows, stride, columns, 0, columns, parts, {activation, 0, 0}); \
    }
GATED_GEMV(gemv_gated_f16_1, F16, 1)
GATED_GEMV(gemv_gated_f16_2, F16, 2)
GATED_GEMV(gemv_gated_f16_4, F16, 4)
GATED_GEMV(gemv_gated_bf16_1, BF16, 1)
GATED_GEMV(gemv_gated_bf16_2, BF16, 2)
GATED_GEMV(gemv_gated_bf16_4, BF16, 4)
#endif
