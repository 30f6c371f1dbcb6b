// Quantised matrices: rows of tables, rows that become numbers of 16 bits, and products with activations of f32, which are integer
// dot products of codes with activations of 8 bits (those of 16 bits are in quant_gemv.cu and tile_packed.cu).
//
// `packed.cuh` says how codes and scales lie. Sums of codes are exact, and those of floats have one order: a row's bits
// depend on the row alone.
#include "packed.cuh"

#ifndef ACT_16

// ---- activations -------------------------------------------------------------------------------------------------------

__device__ __forceinline__ int code_of(float value, float scale) {
    float q = scale > 0.0f ? value / scale : 0.0f;
    return q != q ? 0 : __float2int_rn(fminf(fmaxf(q, -127.0f), 127.0f));
}

// Rows of x as codes of 8 bits in the order of a weight's, with a scale for each 32, and the sums of codes of each 16. `order` (or null) says which
// element of x comes at which place; behind `k` there are zeros. A warp for each group of each row.
KERNEL quantise_rows(int8_t* codes, float* scales, int* sums, const Act::Stored* x, const int* order, int64_t all, int groups,
                     int k) {
    wait_for_previous();
    int64_t number = thread_number() / 32;
    int lane = threadIdx.x % 32;
    if (number >= all) return;
    int64_t row = number / groups;
    int at = int(number % groups) * 32 + lane;
    float value = at < k ? Act::read(x + row * k + (order ? order[at] : at)) : 0.0f;
    float scale = warp_max(fabsf(value)) / 127.0f;
    int code = code_of(value, scale);
    codes[number * 32 + lane / 4 * 4 + byte_of(lane % 4)] = int8_t(code);
    int sum = code;
#pragma unroll
    for (int flip = 8; flip > 0; flip /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, flip);
    if (lane % 16 == 0) sums[number * 2 + lane / 16] = sum;
    // What is no finite number has no code: its row becomes NaN.
    unsigned bad = __ballot_sync(ALL_LANES, value - value != 0.0f);
    if (lane == 0) scales[number] = bad ? __uint_as_float(0x7fc00000u) : scale;
}

// ---- products ----------------------------------------------------------------------------------------------------------

// `sum` and what 32 codes of the activations, `a` and `b` with sums `s0` and `s1`, give with a group of codes.
__device__ __forceinline__ float add_group(uint4 a, uint4 b, int s0, int s1, float scale, const int (&q)[8],
                                           const float (&factor)[2], const float (&rest)[2], int zero, float sum) {
    int d0 = __dp4a(q[0], int(a.x), __dp4a(q[1], int(a.y), __dp4a(q[2], int(a.z), __dp4a(q[3], int(a.w), 0))));
    int d1 = __dp4a(q[4], int(b.x), __dp4a(q[5], int(b.y), __dp4a(q[6], int(b.z), __dp4a(q[7], int(b.w), 0))));
    float both = factor[0] * float(d0 - zero * s0) + rest[0] * float(s0);
    both += factor[1] * float(d1 - zero * s1) + rest[1] * float(s1);
    return fmaf(scale, both, sum);
}

// A group of a weight on its way: codes, and what makes its two factors.
template <int BITS>
struct Group {
    PlaneBytes bytes;
    uint32_t sub;
    float d, rest;

    __device__ __forceinline__ void load(const Weight& w, int64_t row, int groups, int g) {
        GroupPlace at(w, row, groups, g);
        bytes = load_group<BITS>(at);
        sub = w.nested ? subs_of<BITS>(at) : 0;
        float2 both = scales_of<BITS>(w, at);
        d = both.x, rest = both.y;
    }
    __device__ __forceinline__ void scales(const Weight& w, float (&factors)[2], float (&rests)[2]) const {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            factors[half] = w.nested ? d * float(int8_t(sub >> 16 * half)) : d;
            rests[half] = w.nested ? -rest * float(sub >> 16 * half + 8 & 255) : rest;
        }
    }
};

// A lane's part of a row of the weight with ROWS rows of the activations, of which `rows` are there. It asks for AHEAD groups
// before it uses the first, so that enough bytes are on their way; the order of its sums is that of the groups.
template <int BITS, int ROWS>
__device__ __forceinline__ void lane_sums(const int8_t* x, const float* x_scales, const int* x_sums, const Weight& w,
                                          int64_t weight_row, int groups, int64_t x_row, int64_t rows,
                                          float (&sums)[ROWS]) {
    const int AHEAD = BITS == 8 || ROWS > 4 ? 2 : 4;
    for (int first = threadIdx.x % 32; first < groups; first += 32 * AHEAD) {
        Group<BITS> ahead[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; i++)
            if (first + 32 * i < groups) ahead[i].load(w, weight_row, groups, first + 32 * i);
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            int g = first + 32 * i, q[8];
            if (g >= groups) break;
            float factor[2], rest[2];
            codes_of<BITS>(ahead[i].bytes, w.table, q);
            ahead[i].scales(w, factor, rest);
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                if (r >= rows) break;
                int64_t from = (x_row + r) * groups + g;
                uint4 a = load16(x + from * 32), b = load16(x + from * 32 + 16);
                sums[r] = add_group(a, b, x_sums[from * 2], x_sums[from * 2 + 1], x_scales[from], q, factor, rest, w.zero, sums[r]);
            }
        }
    }
}

// A warp makes a column for up to ROWS rows; its lanes stride over groups.
template <int BITS, int ROWS>
__device__ __forceinline__ void product(float* out, const int8_t* x, const float* x_scales, const int* x_sums, Weight w,
                                        int rows, int groups, int columns, int64_t first, int64_t n) {
    wait_for_previous();
    int blocks = (columns + 3) / 4;
    int column = int(blockIdx.x) % blocks * 4 + int(threadIdx.x) / 32, lane = threadIdx.x % 32;
    int64_t row = int64_t(int(blockIdx.x) / blocks) * ROWS;
    if (column >= columns) return;
    float sums[ROWS] = {};
    lane_sums<BITS, ROWS>(x, x_scales, x_sums, w, column, groups, row, rows - row, sums);
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        if (row + r >= rows) break;
        float sum = warp_sum(sums[r]);
        if (lane == r) out[(row + r) * n + first + column] = sum;
    }
}

#define QUANT_GEMM(NAME, BITS, ROWS)                                                                                     \
    KERNEL __launch_bounds__(128, 3) NAME(float* out, const int8_t* x, const float* x_scales, const int* x_sums,        \
                                          WEIGHT_PARAMS, int rows, int groups, int columns, int64_t first, int64_t n) { \
        Weight w = WEIGHT;                                                                                              \
        product<BITS, ROWS>(out, x, x_scales, x_sums, w, rows, groups, columns, first, n);                              \
    }
#define QUANT_GEMM_BITS(BITS)                                                                                           \
    QUANT_GEMM(quant_gemm_##BITS##_1, BITS, 1)                                                                          \
    QUANT_GEMM(quant_gemm_##BITS##_4, BITS, 4)                                                                          \
    QUANT_GEMM(quant_gemm_##BITS##_8, BITS, 8)
QUANT_GEMM_BITS(2)
QUANT_GEMM_BITS(3)
QUANT_GEMM_BITS(4)
QUANT_GEMM_BITS(5)
QUANT_GEMM_BITS(6)
QUANT_GEMM_BITS(8)

// ---- experts ---------------------------------------------------------------------------------------------------------

// A row of x as codes in shared memory, as `quantise_rows` makes them.
struct RowCodes {
    // The first and the last 16 codes of each group.
    uint4 *first, *last;
    float* scales;
    int2* sums;

    __device__ __forceinline__ RowCodes(uint4* shared, int groups)
        : first(shared), last(shared + groups), scales(reinterpret_cast<float*>(shared + 2 * groups + (groups + 1) / 2)),
          sums(reinterpret_cast<int2*>(shared + 2 * groups)) {}

    // A thread for each group, whose elements come in the order at `order` unless that is null.
    __device__ __forceinline__ void make(const Act::Stored* x, const int* order, int groups, int k) {
        for (int g = threadIdx.x; g < groups; g += blockDim.x) {
            float values[32];
#pragma unroll
            for (int i = 0; i < 32; i += 8) {
                int at = g * 32 + i;
                float some[8];
                if (order) {
#pragma unroll
                    for (int j = 0; j < 8; j++) some[j] = at + j < k ? Act::read(x + order[at + j]) : 0.0f;
                } else {
                    x8<Act>(x, at, k, is_wide(at, k), some);
                }
#pragma unroll
                for (int j = 0; j < 8; j++) values[i + j] = some[j];
            }
            float most = 0;
            bool bad = false;
#pragma unroll
            for (int i = 0; i < 32; i++) most = fmaxf(most, fabsf(values[i])), bad |= values[i] - values[i] != 0.0f;
            float scale = most / 127.0f;
            uint32_t words[8];
            int sum[2] = {0, 0};
#pragma unroll
            for (int i = 0; i < 32; i++) {
                int code = code_of(values[i], scale);
                sum[i / 16] += code;
                uint32_t byte = uint32_t(code & 255) << 8 * byte_of(i % 4);
                words[i / 4] = i % 4 ? words[i / 4] | byte : byte;
            }
            first[g] = make_uint4(words[0], words[1], words[2], words[3]);
            last[g] = make_uint4(words[4], words[5], words[6], words[7]);
            sums[g] = {sum[0], sum[1]};
            scales[g] = bad ? __uint_as_float(0x7fc00000u) : scale;
        }
    }
};

// Columns of one row: an expert has so few that a launch which makes codes first takes as long as the product. Those of a warp
// are `step` apart, from `column` on, rows of the weight from `weight_row` on. Groups go around a ring of AHEAD, so that as many
// are always on their way. The sums are those of `lane_sums`.
template <int BITS>
__device__ __forceinline__ void row_product(Act::Stored* out, const Act::Stored* x, const int* order, const Weight& w,
                                            int64_t weight_row, int k, int groups, int columns, int column, int step) {
    extern __shared__ uint4 shared[];
    const int AHEAD = BITS <= 4 ? 6 : 4;
    int lane = threadIdx.x % 32, chunks = max((groups + 31) / 32, 1);
    int asked_column = column, asked = 0;
    Group<BITS> ring[AHEAD];
    auto ask = [&](Group<BITS>& group) {
        if (asked_column >= columns) return;
        int g = asked * 32 + lane;
        if (g < groups) group.load(w, weight_row + asked_column, groups, g);
        if (++asked == chunks) asked = 0, asked_column += step;
    };
#pragma unroll
    for (int i = 0; i < AHEAD; i++) ask(ring[i]);
    RowCodes codes(shared, groups);
    codes.make(x, order, groups, k);
    __syncthreads();
    float sum = 0;
    int chunk = 0;
    while (column < columns) {
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            if (column >= columns) break;
            int g = chunk * 32 + lane, q[8];
            if (g < groups) {
                float factor[2], rest[2];
                codes_of<BITS>(ring[i].bytes, w.table, q);
                ring[i].scales(w, factor, rest);
                int2 both = codes.sums[g];
                sum = add_group(codes.first[g], codes.last[g], both.x, both.y, codes.scales[g], q, factor, rest, w.zero, sum);
            }
            ask(ring[i]);
            if (++chunk == chunks) {
                sum = warp_sum(sum);
                if (lane == 0) Act::write(out + column, sum);
                sum = 0, chunk = 0, column += step;
            }
        }
    }
}

// As `pair_product` in gemm.cu: `blocks` blocks for each pair. The rows of all experts are one matrix; `order`, or null, is
// `[experts, k]`.
#define QUANT_MOE(NAME, BITS)                                                                                           \
    KERNEL __launch_bounds__(128, 4)                                                                                    \
        NAME(Act::Stored* out, const Act::Stored* x, WEIGHT_PARAMS, const int* order, const int* expert_ids,            \
             const int* ids, int pairs, int k, int groups, int n, int experts, int share, int blocks) {                 \
        Weight w = WEIGHT;                                                                                              \
        wait_for_previous();                                                                                            \
        int pair = ids[int(blockIdx.x) / blocks];                                                                       \
        if (pair < 0 || pair >= pairs) return;                                                                          \
        int expert = expert_ids[pair];                                                                                  \
        if (expert < 0 || expert >= experts) return;                                                                    \
        int warp = int(blockIdx.x) % blocks * 4 + int(threadIdx.x) / 32;                                                \
        row_product<BITS>(out + int64_t(pair) * n, x + int64_t(pair / share) * k,                                       \
                          order ? order + int64_t(expert) * k : nullptr, w, int64_t(expert) * n, k, groups, n, warp,    \
                          blocks * 4);                                                                                  \
    }
QUANT_MOE(quant_moe_2, 2)
QUANT_MOE(quant_moe_3, 3)
QUANT_MOE(quant_moe_4, 4)
QUANT_MOE(quant_moe_5, 5)
QUANT_MOE(quant_moe_6, 6)
QUANT_MOE(quant_moe_8, 8)
#endif

// ---- rows of a table -----------------------------------------------------------------------------------------------------

// As `embed` in rows.cu; a thread for each group of each row.
template <int BITS>
__device__ __forceinline__ void embed(float* out, const int* ids, Weight w, int64_t total, int groups, int64_t dim,
                                      int first_row, int slab_rows, int all_rows, int writes_zeros) {
    wait_for_previous();
    int64_t i = thread_number();
    if (i >= total) return;
    int id = ids[i / groups], g = int(i % groups);
    bool here = id >= first_row && id - first_row < slab_rows;
    if (!here && !(writes_zeros && (id < 0 || id >= all_rows))) return;
    float* to = out + i / groups * dim + g * 32;
    GroupPlace place(w, here ? id - first_row : 0, groups, g);
    int q[8];
    codes_of<BITS>(load_group<BITS>(place), w.table, q);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float factor, rest;
        scale_of<BITS>(w, place, half, factor, rest);
#pragma unroll
        for (int j = 0; j < 16; j++) {
            int code = int8_t(q[half * 4 + j / 4] >> 8 * byte_of(j % 4));
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

// ---- weights as Act ------------------------------------------------------------------------------------------------------

// Rows of the weight from `first` on, a multiple of a tile's rows, as activations are, for products of many rows. A block has a
// tile of which each warp makes rows, so that it writes 512 B beside each other; four lanes have a group, eight numbers each.
#ifdef ACT_16
// The bytes of a group of which `codes_of` makes the eight numbers from 8 · `part` on, as its first two words.
template <int BITS>
__device__ __forceinline__ PlaneBytes load_eight(const GroupPlace& at, int part) {
    int odd = part % 2, behind = part / 2;
    const uint8_t *low = at.tile + group_offset<low_pieces(BITS)>(at.row, at.g), *high = at.tile + high_of_tile(BITS);
    auto two_bits = [&](const uint8_t* plane) {
        return make_uint4(reinterpret_cast<const uint32_t*>(plane)[odd] >> 2 * behind, 0, 0, 0);
    };
    auto four_bits = [&](const uint8_t* plane) {
        uint2 words = load8(plane + 8 * odd);
        return make_uint4(words.x >> 4 * behind, words.y >> 4 * behind, 0, 0);
    };
    PlaneBytes bytes = {BITS < 4 ? two_bits(low) : four_bits(low), make_uint4(0, 0, 0, 0)};
    if (BITS == 3 || BITS == 5)
        bytes.high.x = *reinterpret_cast<const uint32_t*>(high + group_offset<2>(at.row, at.g)) >> 4 * odd + behind;
    if (BITS == 6) bytes.high = two_bits(high + group_offset<4>(at.row, at.g));
    if (BITS == 8) bytes.high = four_bits(high + group_offset<8>(at.row, at.g));
    return bytes;
}
constexpr int UNPACK_WARPS = 4;
template <int BITS>
__device__ __forceinline__ void unpack(uint16_t* out, Weight w, int64_t first, int rows, int groups, int k) {
    wait_for_previous();
    int k_tiles = groups / TILE_GROUPS, row_tile = int(blockIdx.x) / k_tiles, k_tile = int(blockIdx.x) - row_tile * k_tiles;
    int lane = threadIdx.x % 32, part = lane % 4, row = row_tile * TILE_ROWS + int(threadIdx.x) / 32;
    int g = k_tile * TILE_GROUPS + lane / 4, at = g * 32 + part * 8;
    if (at >= k) return;
    GroupPlace place(w, first + row, groups, g);
    // A byte as the fraction of 2^23, which is a float by a permutation of bytes; signed ones are 128 more.
    bool is_signed = BITS == 8 || w.table;
    const uint32_t flip = is_signed ? 0x80808080u : 0u;
    const float bias = 8388608.0f + (is_signed ? 128.0f : 0.0f) + float(w.zero);
    out += int64_t(row) * k + at;
    // A tile has all of its rows, if only as zeros.
#pragma unroll
    for (int i = 0; i < TILE_ROWS / UNPACK_WARPS; i++, place.row += UNPACK_WARPS, out += UNPACK_WARPS * k) {
        int q[8];
        codes_of<BITS>(load_eight<BITS>(place, part), w.table, q);
        float factor, rest, values[8];
        scale_of<BITS>(w, place, part / 2, factor, rest);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            float code = __uint_as_float(__byte_perm(uint32_t(q[j / 4]) ^ flip, 0x4b000000u, 0x7440 | byte_of(j % 4))) - bias;
            values[j] = factor * code + rest;
        }
        if (row + i * UNPACK_WARPS < rows) Act::write8(out, values);
    }
}
#define UNPACK(BITS)                                                                                                    \
    KERNEL __launch_bounds__(32 * UNPACK_WARPS)                                                                         \
        unpack_##BITS(uint16_t* out, WEIGHT_PARAMS, int64_t first, int rows, int groups, int k) {                       \
        Weight w = WEIGHT;                                                                                              \
        unpack<BITS>(out, w, first, rows, groups, k);                                                                   \
    }
UNPACK(2)
UNPACK(3)
UNPACK(4)
UNPACK(5)
UNPACK(6)
UNPACK(8)
#endif
