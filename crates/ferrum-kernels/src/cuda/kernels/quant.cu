// Products with quantised matrices: integer dot products of codes with activations of 8 bits.
//
// A group is 32 numbers of a row. Its codes lie in planes: the lower bits (2 or 4), then the upper ones (0, 1, 2 or 4),
// each so that a shift and a mask give four codes in the bytes of a word. Scales are of one of two forms:
//   flat:   value = d.x · (code - zero) + d.y, with d for each group (d.y only where `has_min`);
//   nested: value = d.x · scale · (code - zero) - d.y · minimum, with d for each 256 numbers and a signed byte of
//           scale and a byte of minimum for each 16.
// Sums of codes are exact, and those of floats have one order: a row's bits depend on the row alone.
#include "common.cuh"

struct Weight {
    const uint8_t *low, *high;
    const uint32_t* subs;  // null: flat
    const float* d;
    int zero, has_min, table;
};

// Codes of IQ4 and of MXFP4 stand for these, sixteen signed bytes each.
__device__ __forceinline__ uint4 table_of(int table) {
    return table == 1 ? make_uint4(0xbfad9881u, 0xf6eaddcfu, 0x26190d01u, 0x71594535u)
                      : make_uint4(0x03020100u, 0x0c080604u, 0xfdfeff00u, 0xf4f8fafcu);
}
// Four codes of four bits, each as its signed byte of a table.
__device__ __forceinline__ int look_up(uint32_t codes, uint4 table) {
    uint32_t at = (codes & 7) | (codes >> 4 & 0x70) | (codes >> 8 & 0x700) | (codes >> 12 & 0x7000);
    uint32_t upper = (codes >> 3 & 0x01010101u) * 255;
    return int((__byte_perm(table.x, table.y, at) & ~upper) | (__byte_perm(table.z, table.w, at) & upper));
}

// The codes of a group, four to a word.
template <int BITS>
__device__ __forceinline__ void codes_of(const Weight& w, int64_t group, int (&q)[8]) {
    if (BITS < 4) {
        uint2 low = load8(w.low + group * 8);
#pragma unroll
        for (int i = 0; i < 8; i++) q[i] = (i < 4 ? low.x : low.y) >> 2 * (i % 4) & 0x03030303u;
    } else {
        uint4 low = load16_once(w.low + group * 16);
        uint32_t words[4] = {low.x, low.y, low.z, low.w};
#pragma unroll
        for (int i = 0; i < 8; i++) q[i] = words[i / 2] >> 4 * (i % 2) & 0x0f0f0f0fu;
    }
    if (BITS == 3 || BITS == 5) {
        uint32_t high = reinterpret_cast<const uint32_t*>(w.high)[group];
#pragma unroll
        for (int i = 0; i < 8; i++) q[i] |= (high >> i & 0x01010101u) << (BITS - 1);
    }
    if (BITS == 6) {
        uint2 high = load8(w.high + group * 8);
#pragma unroll
        for (int i = 0; i < 8; i++) q[i] |= ((i < 4 ? high.x : high.y) >> 2 * (i % 4) & 0x03030303u) << 4;
    }
    if (BITS == 8) {
        uint4 high = load16_once(w.high + group * 16);
        uint32_t words[4] = {high.x, high.y, high.z, high.w};
#pragma unroll
        for (int i = 0; i < 8; i++) q[i] |= (words[i / 2] >> 4 * (i % 2) & 0x0f0f0f0fu) << 4;
    }
    if (BITS == 4 && w.table) {
        uint4 table = table_of(w.table);
#pragma unroll
        for (int i = 0; i < 8; i++) q[i] = look_up(uint32_t(q[i]), table);
    }
}

// What a group's 16 numbers `half` are multiplied with, and what is added to each: value = factor · (code - zero) + rest.
__device__ __forceinline__ void scale_of(const Weight& w, int64_t group, int64_t row, int groups, int half, float& factor,
                                         float& rest) {
    if (!w.subs) {
        factor = w.has_min ? w.d[2 * group] : w.d[group];
        rest = w.has_min ? w.d[2 * group + 1] : 0.0f;
        return;
    }
    int64_t super = row * ((groups + 7) / 8) + (group - row * groups) / 8;
    uint32_t sub = w.subs[group] >> 16 * half;
    factor = w.d[2 * super] * float(int8_t(sub));
    rest = -w.d[2 * super + 1] * float(sub >> 8 & 255);
}

// ---- activations -------------------------------------------------------------------------------------------------------

// Rows of x as codes of 8 bits with a scale for each 32, and the sums of codes of each 16. `order` (or null) says which
// element of x comes at which place; behind `k` there are zeros. A warp for each group of each row.
KERNEL quantise_rows(int8_t* codes, float* scales, int* sums, const Act::Stored* x, const int* order, int64_t all, int groups,
                     int k) {
    int64_t number = thread_number() / 32;
    int lane = threadIdx.x % 32;
    if (number >= all) return;
    int64_t row = number / groups;
    int at = int(number % groups) * 32 + lane;
    float value = at < k ? Act::read(x + row * k + (order ? order[at] : at)) : 0.0f;
    float scale = warp_max(fabsf(value)) / 127.0f;
    float q = scale > 0.0f ? value / scale : 0.0f;
    int code = q != q ? 0 : __float2int_rn(fminf(fmaxf(q, -127.0f), 127.0f));
    codes[number * 32 + lane] = int8_t(code);
    int sum = code;
#pragma unroll
    for (int flip = 8; flip > 0; flip /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, flip);
    if (lane % 16 == 0) sums[number * 2 + lane / 16] = sum;
    // What is no finite number has no code: its row becomes NaN.
    unsigned bad = __ballot_sync(ALL_LANES, value - value != 0.0f);
    if (lane == 0) scales[number] = bad ? __uint_as_float(0x7fc00000u) : scale;
}

// ---- products ----------------------------------------------------------------------------------------------------------

// `sum` and what group `from` of the activations gives with a group of codes.
__device__ __forceinline__ float add_group(const int8_t* x, const float* x_scales, const int* x_sums, int64_t from,
                                           const int (&q)[8], const float (&factor)[2], const float (&rest)[2], int zero,
                                           float sum) {
    uint4 a = load16(x + from * 32), b = load16(x + from * 32 + 16);
    int s0 = x_sums[from * 2], s1 = x_sums[from * 2 + 1];
    int d0 = __dp4a(q[0], int(a.x), __dp4a(q[1], int(a.y), __dp4a(q[2], int(a.z), __dp4a(q[3], int(a.w), 0))));
    int d1 = __dp4a(q[4], int(b.x), __dp4a(q[5], int(b.y), __dp4a(q[6], int(b.z), __dp4a(q[7], int(b.w), 0))));
    float both = factor[0] * float(d0 - zero * s0) + rest[0] * float(s0);
    both += factor[1] * float(d1 - zero * s1) + rest[1] * float(s1);
    return fmaf(x_scales[from], both, sum);
}

// The same of group `g` of a row of the weight and one of the activations.
template <int BITS>
__device__ __forceinline__ float group_sum(const int8_t* x, const float* x_scales, const int* x_sums, const Weight& w,
                                           int64_t row, int groups, int g, int64_t x_row, float sum) {
    int q[8];
    float factor[2], rest[2];
    codes_of<BITS>(w, row * groups + g, q);
    scale_of(w, row * groups + g, row, groups, 0, factor[0], rest[0]);
    scale_of(w, row * groups + g, row, groups, 1, factor[1], rest[1]);
    return add_group(x, x_scales, x_sums, x_row * groups + g, q, factor, rest, w.zero, sum);
}

// A warp makes a column for up to ROWS rows; its lanes stride over groups.
template <int BITS, class OUT, int ROWS>
__device__ __forceinline__ void product(typename OUT::Stored* out, const int8_t* x, const float* x_scales,
                                        const int* x_sums, Weight w, int rows, int groups, int columns, int64_t first,
                                        int64_t n) {
    int blocks = (columns + 3) / 4;
    int column = int(blockIdx.x) % blocks * 4 + int(threadIdx.x) / 32, lane = threadIdx.x % 32;
    int64_t row = int64_t(int(blockIdx.x) / blocks) * ROWS;
    if (column >= columns) return;
    float sums[ROWS] = {};
    for (int g = lane; g < groups; g += 32) {
        int64_t group = int64_t(column) * groups + g;
        int q[8];
        codes_of<BITS>(w, group, q);
        float factor[2], rest[2];
        scale_of(w, group, column, groups, 0, factor[0], rest[0]);
        scale_of(w, group, column, groups, 1, factor[1], rest[1]);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            if (row + r >= rows) break;
            sums[r] = add_group(x, x_scales, x_sums, (row + r) * groups + g, q, factor, rest, w.zero, sums[r]);
        }
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        if (row + r >= rows) break;
        float sum = warp_sum(sums[r]);
        if (lane == r) OUT::write(out + (row + r) * n + first + column, sum);
    }
}

#define WEIGHT_PARAMS                                                                                                   \
    const uint8_t *low, const uint8_t *high, const uint32_t *subs, const float *d, int zero, int has_min, int table
#define WEIGHT {low, high, subs, d, zero, has_min, table}
#define QUANT_GEMM(NAME, BITS, OUT, ROWS)                                                                                \
    KERNEL __launch_bounds__(128, 3) NAME(OUT::Stored* out, const int8_t* x, const float* x_scales, const int* x_sums,  \
                                          WEIGHT_PARAMS, int rows, int groups, int columns, int64_t first, int64_t n) { \
        Weight w = WEIGHT;                                                                                              \
        product<BITS, OUT, ROWS>(out, x, x_scales, x_sums, w, rows, groups, columns, first, n);                         \
    }
#define QUANT_GEMM_BITS(BITS)                                                                                           \
    QUANT_GEMM(quant_gemm_##BITS##_1_act, BITS, Act, 1)                                                                 \
    QUANT_GEMM(quant_gemm_##BITS##_1_f32, BITS, F32, 1)                                                                 \
    QUANT_GEMM(quant_gemm_##BITS##_4_act, BITS, Act, 4)                                                                 \
    QUANT_GEMM(quant_gemm_##BITS##_4_f32, BITS, F32, 4)                                                                 \
    QUANT_GEMM(quant_gemm_##BITS##_8_act, BITS, Act, 8)                                                                 \
    QUANT_GEMM(quant_gemm_##BITS##_8_f32, BITS, F32, 8)
QUANT_GEMM_BITS(2)
QUANT_GEMM_BITS(3)
QUANT_GEMM_BITS(4)
QUANT_GEMM_BITS(5)
QUANT_GEMM_BITS(6)
QUANT_GEMM_BITS(8)

// ---- experts ---------------------------------------------------------------------------------------------------------

// As `pair_product` in gemm.cu. The rows of all experts are one matrix.
template <int BITS>
__device__ __forceinline__ void pair_product(Act::Stored* out, const int8_t* x, const float* x_scales, const int* x_sums,
                                             Weight w, const int* expert_ids, const int* ids, int pairs, int groups, int n,
                                             int experts, int share) {
    int blocks = (n + 3) / 4;
    int column = int(blockIdx.x) % blocks * 4 + int(threadIdx.x) / 32, lane = threadIdx.x % 32;
    int pair = ids[int(blockIdx.x) / blocks];
    if (column >= n || pair < 0 || pair >= pairs) return;
    int expert = expert_ids[pair];
    if (expert < 0 || expert >= experts) return;
    int64_t row = int64_t(expert) * n + column;
    float sum = 0;
    for (int g = lane; g < groups; g += 32) sum = group_sum<BITS>(x, x_scales, x_sums, w, row, groups, g, pair / share, sum);
    sum = warp_sum(sum);
    if (lane == 0) Act::write(out + int64_t(pair) * n + column, sum);
}
#define QUANT_MOE(NAME, BITS)                                                                                           \
    KERNEL __launch_bounds__(128, 3) NAME(Act::Stored* out, const int8_t* x, const float* x_scales, const int* x_sums,     \
                                       WEIGHT_PARAMS, const int* expert_ids, const int* ids, int pairs, int groups,     \
                                       int n, int experts, int share) {                                                 \
        Weight w = WEIGHT;                                                                                              \
        pair_product<BITS>(out, x, x_scales, x_sums, w, expert_ids, ids, pairs, groups, n, experts, share);             \
    }
QUANT_MOE(quant_moe_2, 2)
QUANT_MOE(quant_moe_3, 3)
QUANT_MOE(quant_moe_4, 4)
QUANT_MOE(quant_moe_5, 5)
QUANT_MOE(quant_moe_6, 6)
QUANT_MOE(quant_moe_8, 8)

// ---- rows of a table -----------------------------------------------------------------------------------------------------

// As `embed` in rows.cu; a thread for each group of each row.
template <int BITS>
__device__ __forceinline__ void embed(float* out, const int* ids, Weight w, int64_t total, int groups, int64_t dim,
                                      int first_row, int slab_rows, int all_rows, int writes_zeros) {
    int64_t i = thread_number();
    if (i >= total) return;
    int id = ids[i / groups], g = int(i % groups);
    bool here = id >= first_row && id - first_row < slab_rows;
    if (!here && !(writes_zeros && (id < 0 || id >= all_rows))) return;
    float* to = out + i / groups * dim + g * 32;
    int64_t row = here ? id - first_row : 0, group = row * groups + g;
    int q[8];
    codes_of<BITS>(w, group, q);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float factor, rest;
        scale_of(w, group, row, groups, half, factor, rest);
#pragma unroll
        for (int j = 0; j < 16; j++) {
            int code = int8_t(q[half * 4 + j / 4] >> 8 * (j % 4));
            if (g * 32 + half * 16 + j < dim) to[half * 16 + j] = here ? factor * float(code - w.zero) + rest : 0.0f;
        }
    }
}
#define QUANT_EMBEDDING(NAME, BITS)                                                                                     \
    KERNEL NAME(float* out, const int* ids, WEIGHT_PARAMS, int64_t total, int groups, int64_t dim, int first_row,       \
                int slab_rows, int all_rows, int writes_zeros) {                                                        \
        Weight w = WEIGHT;                                                                                              \
        embed<BITS>(out, ids, w, total, groups, dim, first_row, slab_rows, all_rows, writes_zeros);                     \
    }
QUANT_EMBEDDING(quant_embedding_2, 2)
QUANT_EMBEDDING(quant_embedding_3, 3)
QUANT_EMBEDDING(quant_embedding_4, 4)
QUANT_EMBEDDING(quant_embedding_5, 5)
QUANT_EMBEDDING(quant_embedding_6, 6)
QUANT_EMBEDDING(quant_embedding_8, 8)
