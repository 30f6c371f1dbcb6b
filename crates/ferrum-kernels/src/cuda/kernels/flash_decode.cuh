// Attention of few rows where there are fewer blocks than the device has room for, over caches of 16 bits. Such a step waits for a
// block's chain of loads, products and barriers, not for bytes: so warps share no tile and do not wait for one another. A warp
// makes eight rows over 16 keys at a time, which go from memory to the registers that products take them from; warps meet once, when
// they join what each has.
//
// Lanes load 16 bytes of a vector, and the elements of a product are numbered so that these are what the lane needs. Of scores (rows
// of queries, columns of keys; the upper eight rows are zeros), number 32j + 16h + 2c + i of a product's k is element 32j + 8c + 4h +
// i of keys and queries alike (c = lane % 4), and as many from 8 on. Sums of values are made transposed (rows of values, columns of
// queries), so that weights are where the scores were: row 8m + g of tile (h, w) is element 64h + 8g + 2w + m (g = lane / 4).
//
// The order of sums is another than that of `flash.cuh`, and totals are of weights before they are rounded.
#pragma once
#include "flash.cuh"

constexpr int DECODE_ROWS = 8, DECODE_WARPS = 4, WARP_KEYS = 16;
// Keys of a block's turn, of which a split has a multiple.
constexpr int TURN_KEYS = DECODE_WARPS * WARP_KEYS;

__device__ __forceinline__ uint32_t word_of(const uint4& x, int i) { return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w; }

// The number of a vector that is not there. Memory has room for fewer.
constexpr uint32_t NO_VECTOR = 0xffffffffu;

// Sixteen bytes of a vector; zeros of one that is not there.
template <int DIM>
__device__ __forceinline__ uint4 vector_part(const uint16_t* vectors, uint32_t vector, int at) {
    return vector != NO_VECTOR ? load16(vectors + uint64_t(vector) * DIM + at) : make_uint4(0, 0, 0, 0);
}

// Keys of a warp, by eights: lane / 4 is the key.
template <int DIM>
struct KeyParts {
    uint4 part[WARP_KEYS / 8][DIM / 32];

    // `vector` is that of the key whose number is the lane's.
    __device__ __forceinline__ void load(const uint16_t* keys, uint32_t vector) {
        int lane = threadIdx.x % 32;
#pragma unroll
        for (int n = 0; n < WARP_KEYS / 8; n++) {
            uint32_t from = __shfl_sync(ALL_LANES, vector, n * 8 + lane / 4);
#pragma unroll
            for (int j = 0; j < DIM / 32; j++) part[n][j] = vector_part<DIM>(keys, from, j * 32 + lane % 4 * 8);
        }
    }
};

// Their values: of each sixteen, those of keys 2c, 2c + 1, 2c + 8 and 2c + 9, c = lane % 4.
template <int DIM>
struct ValueParts {
    uint4 part[WARP_KEYS / 16][4][DIM / 64];

    __device__ __forceinline__ void load(const uint16_t* values, uint32_t vector) {
        int lane = threadIdx.x % 32;
#pragma unroll
        for (int s = 0; s < WARP_KEYS / 16; s++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                uint32_t from = __shfl_sync(ALL_LANES, vector, s * 16 + i / 2 * 8 + lane % 4 * 2 + i % 2);
#pragma unroll
                for (int h = 0; h < DIM / 64; h++) part[s][i][h] = vector_part<DIM>(values, from, h * 64 + lane / 4 * 8);
            }
    }
};

// The row of queries of this lane, lane / 4, as products take it, and what its scores are multiplied with.
template <bool HALF, int DIM>
struct QueryParts {
    uint4 part[DIM / 32];
    float factor;

    __device__ __forceinline__ void load(const Flash& c, const Work& w, int row) {
        int head = w.kv_head * c.group + row % c.group;
        const uint16_t* from = c.q + (w.token + row / c.group) * c.q_token + head * c.q_head + threadIdx.x % 4 * 8;
        factor = c.scale * (c.softcap > 0 ? 1.0f : LOG2E);
#pragma unroll
        for (int j = 0; j < DIM / 32; j++) part[j] = row < w.rows ? load16(from + j * 32) : make_uint4(0, 0, 0, 0);
        float divided = 1;
        if (DIVIDES<HALF>) {
            uint32_t most = 0;
#pragma unroll
            for (int i = 0; i < DIM / 8; i++) {
                uint32_t both = word_of(part[i / 4], i % 4);
                most = max(most, max(both & 0x7fffu, both >> 16 & 0x7fffu));
            }
            most = max(most, __shfl_xor_sync(ALL_LANES, most, 1));
            most = max(most, __shfl_xor_sync(ALL_LANES, most, 2));
            int exponent = exponent_within(most);
            divided = __uint_as_float(uint32_t(254 - exponent) << 23);
            factor *= __uint_as_float(uint32_t(exponent) << 23);
        }
#pragma unroll
        for (int j = 0; j < DIM / 32; j++) convert_queries<HALF>(part[j], divided);
    }
};

// What a warp has of its rows: the largest score and the total of lane / 4, the latter in parts among four lanes, and sums of values
// of rows 2c and 2c + 1.
template <bool HALF, int DIM>
struct WarpSums {
    float value[DIM / 16][4];
    float top, total;

    __device__ __forceinline__ void clear() {
        top = LOWEST, total = 0;
#pragma unroll
        for (int t = 0; t < DIM / 16; t++)
#pragma unroll
            for (int i = 0; i < 4; i++) value[t][i] = 0;
    }
    // Weights of scores, under a maximum that may have risen, as operands of products with their values.
    __device__ __forceinline__ void weigh(const float (&score)[WARP_KEYS / 8][4], uint32_t (&weights)[WARP_KEYS / 8]) {
        float now = top;
#pragma unroll
        for (int n = 0; n < WARP_KEYS / 8; n++) now = fmaxf(now, fmaxf(score[n][0], score[n][1]));
        now = fmaxf(now, __shfl_xor_sync(ALL_LANES, now, 1));
        now = fmaxf(now, __shfl_xor_sync(ALL_LANES, now, 2));
        float kept = exp2_approx(top - now);
        top = now, total *= kept;
        // Of a row that has not seen a key yet, nothing is left.
        float from = now == LOWEST ? 0.0f : now;
#pragma unroll
        for (int n = 0; n < WARP_KEYS / 8; n++) {
            float low = exp2_approx(score[n][0] - from), high = exp2_approx(score[n][1] - from);
            total += low + high;
            weights[n] = packed<HALF>(low, high);
        }
        int first = threadIdx.x % 4 * 8;
        float of_row[2] = {__shfl_sync(ALL_LANES, kept, first), __shfl_sync(ALL_LANES, kept, first + 4)};
#pragma unroll
        for (int t = 0; t < DIM / 16; t++)
#pragma unroll
            for (int i = 0; i < 4; i++) value[t][i] *= of_row[i % 2];
    }
    __device__ __forceinline__ void add(const ValueParts<DIM>& values, const uint32_t (&weights)[WARP_KEYS / 8]) {
#pragma unroll
        for (int s = 0; s < WARP_KEYS / 16; s++)
#pragma unroll
            for (int t = 0; t < DIM / 16; t++) {
                uint32_t word[4], a[4];
#pragma unroll
                for (int i = 0; i < 4; i++) word[i] = word_of(values.part[s][i][t / 4], t % 4);
                a[0] = __byte_perm(word[0], word[1], 0x5410), a[1] = __byte_perm(word[0], word[1], 0x7632);
                a[2] = __byte_perm(word[2], word[3], 0x5410), a[3] = __byte_perm(word[2], word[3], 0x7632);
                product<HALF>(value[t], a, weights[2 * s], weights[2 * s + 1]);
            }
    }
};

// Scores of eight rows with the keys of a warp: of row lane / 4 with keys 8n + 2c and 8n + 2c + 1.
template <bool HALF, int DIM>
__device__ __forceinline__ void warp_scores(float (&score)[WARP_KEYS / 8][4], const QueryParts<HALF, DIM>& q, const KeyParts<DIM>& keys) {
#pragma unroll
    for (int n = 0; n < WARP_KEYS / 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) score[n][i] = 0;
#pragma unroll
    for (int j = 0; j < DIM / 32; j++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            uint32_t a[4] = {word_of(q.part[j], 2 * h), 0, word_of(q.part[j], 2 * h + 1), 0};
#pragma unroll
            for (int n = 0; n < WARP_KEYS / 8; n++)
                product<HALF>(score[n], a, word_of(keys.part[n][j], 2 * h), word_of(keys.part[n][j], 2 * h + 1));
        }
}

// What warps have of each row, one after the other: sums of values, then the largest score and the total.
template <int DIM>
struct alignas(16) BlockSums {
    float value[DECODE_WARPS][DECODE_ROWS][DIM + 4];
    Stats stats[DECODE_WARPS][DECODE_ROWS];
    int flag;

    template <bool HALF>
    __device__ __forceinline__ void put(WarpSums<HALF, DIM>& sums, int rows) {
        int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        sums.total += __shfl_xor_sync(ALL_LANES, sums.total, 1);
        sums.total += __shfl_xor_sync(ALL_LANES, sums.total, 2);
        if (lane % 4 == 0) stats[warp][lane / 4] = {sums.top, sums.total};
#pragma unroll
        for (int i = 0; i < 2; i++) {
            int row = lane % 4 * 2 + i;
            if (row >= rows) continue;
#pragma unroll
            for (int t = 0; t < DIM / 16; t += 2) {
                float* to = value[warp][row] + t / 4 * 64 + lane / 4 * 8 + t % 4 * 2;
                store16(to, make_uint4(__float_as_uint(sums.value[t][i]), __float_as_uint(sums.value[t][i + 2]),
                                       __float_as_uint(sums.value[t + 1][i]), __float_as_uint(sums.value[t + 1][i + 2])));
            }
        }
    }
    // Four elements of a row, from `at` on, by all warps in their order.
    __device__ __forceinline__ Stats join_warps(float (&sum)[4], int row, int at) const {
        Stats all = {LOWEST, 0};
#pragma unroll
        for (int i = 0; i < 4; i++) sum[i] = 0;
#pragma unroll
        for (int warp = 0; warp < DECODE_WARPS; warp++) {
            Stats part = stats[warp][row];
            if (part.total == 0) continue;
            float2 factors = join(all, part);
            uint4 x = load16(value[warp][row] + at);
            sum[0] = joined(sum[0], __uint_as_float(x.x), factors), sum[1] = joined(sum[1], __uint_as_float(x.y), factors);
            sum[2] = joined(sum[2], __uint_as_float(x.z), factors), sum[3] = joined(sum[3], __uint_as_float(x.w), factors);
        }
        return all;
    }
};

// Writes the block's rows: their results where no other block has keys of theirs, else its part.
template <int DIM>
__device__ __forceinline__ void write_joined(const Flash& c, const Work& w, const BlockSums<DIM>& sums, int rows, bool alone, bool all_parts) {
    for (int row = threadIdx.x / 32; row < rows; row += DECODE_WARPS) {
        int at = threadIdx.x % 32 * 4;
        if (at >= DIM) continue;
        Place place(c, w, w.row + row);
        float sum[4];
        Stats all = sums.join_warps(sum, row, at);
        if (alone) {
            float factor = last_factor(all, c.sinks, place.head);
            store8(c.out + place.token * c.out_token + place.head * c.out_head + at,
                   make_uint2(Act::pack2(sum[0] * factor, sum[1] * factor), Act::pack2(sum[2] * factor, sum[3] * factor)));
            continue;
        }
        if (at == 0) {
            float* to = stats_of(c.partial, c.splits, int64_t(c.slots) * c.kv_heads * c.group, DIM, place.part);
            store8(to, make_uint2(__float_as_uint(all.top), __float_as_uint(all.total)));
        }
        if (all.total == 0 && !all_parts) continue;
        store16(c.partial + place.part * DIM + at, make_uint4(__float_as_uint(sum[0]), __float_as_uint(sum[1]),
                                                              __float_as_uint(sum[2]), __float_as_uint(sum[3])));
    }
}

template <class E, int DIM>
__device__ __forceinline__ void flash_decode(const Flash& c) {
    constexpr bool HALF = Load<E>::HALF;
    __shared__ BlockSums<DIM> of_block;
    wait_for_previous();
    Work w;
    if (!find_work<DECODE_ROWS>(c, w)) return;
    int lane = threadIdx.x % 32, row = w.row + lane / 4, rows = min(DECODE_ROWS, w.rows - w.row);
    Range sees = row < w.rows ? visible(c, w.first + row / c.group, w.keys) : Range{0, 0};
    // The first and last row see the first and last key of all.
    int first_key = visible(c, w.first + w.row / c.group, w.keys).start;
    int end_key = visible(c, w.first + (w.row + rows - 1) / c.group, w.keys).end;
    int begin = first_key / TURN_KEYS, end = max((end_key + TURN_KEYS - 1) / TURN_KEYS, begin);
    int parts = take_split<TURN_KEYS, 1>(c, w, begin, end);
    bool joins = c.counters;
    // Where blocks of this kernel join, those behind the last key have nothing to do.
    if (joins && w.split >= parts) return;

    const uint16_t *all_keys = static_cast<const uint16_t*>(c.k), *all_values = static_cast<const uint16_t*>(c.v);
    // Of the keys from `from` on, the lane's.
    auto find = [&](int from) {
        int j = from + lane;
        return j >= first_key && j < end_key ? uint32_t(vector_of(c, w, j)) : NO_VECTOR;
    };
    int at = begin * TURN_KEYS + int(threadIdx.x) / 32 * WARP_KEYS, last = min(end * TURN_KEYS, end_key);
    WarpSums<HALF, DIM> sums;
    sums.clear();
    KeyParts<DIM> keys;
    ValueParts<DIM> values;
    QueryParts<HALF, DIM> queries;
    if (at < last) {
        uint32_t vector = find(at);
        keys.load(all_keys, vector);
        values.load(all_values, vector);
        queries.load(c, w, row);
    }
    // What comes next is on its way as soon as there are registers for it.
    for (; at < last; at += TURN_KEYS) {
        int next = at + TURN_KEYS;
        uint32_t vector = next < last ? find(next) : NO_VECTOR;
        float score[WARP_KEYS / 8][4];
        warp_scores<HALF, DIM>(score, queries, keys);
        if (next < last) keys.load(all_keys, vector);
#pragma unroll
        for (int i = 0; i < WARP_KEYS / 4; i++) {
            int j = at + i / 2 * 8 + lane % 4 * 2 + i % 2;
            float x = finish_score(score[i / 2][i % 2], c, queries.factor);
            score[i / 2][i % 2] = j >= sees.start && j < sees.end ? x : LOWEST;
        }
        uint32_t weights[WARP_KEYS / 8];
        sums.weigh(score, weights);
        sums.add(values, weights);
        if (next < last) values.load(all_values, vector);
    }
    of_block.put(sums, rows);
    __syncthreads();
    write_joined<DIM>(c, w, of_block, rows, (joins ? parts : c.splits) == 1, joins);
    if (joins && parts > 1 && is_last_part(c, parts, &of_block.flag)) join_rows<DECODE_ROWS, DECODE_WARPS>(c, w, parts);
}

#define DECODE_KERNEL(NAME, E, DIM)                                                                                        \
    KERNEL __launch_bounds__(DECODE_WARPS * 32, 3) flash_decode_##NAME##_##DIM(FLASH_PARAMS) {                             \
        Flash c = FLASH;                                                                                                   \
        flash_decode<E, DIM>(c);                                                                                           \
    }
