// Attention on tensor cores: one kernel body for prefill, chunks and decode, over paged and contiguous caches.
//
// A block makes a tile of rows over the keys of one kv head. Rows are the queries of one sequence with the heads that share
// the kv head packed beside each other (row = token · group + head), so keys and values are read once for all of them. Keys
// come in tiles of N, for which scores (Q·Kᵀ) and sums of values (P·V) are products of 16-bit tiles with f32 sums, with a
// running maximum as in FlashAttention-2 (Dao, 2023, algorithm 1).
//
// Order of sums. Tiles begin at multiples of N of the key's index, a product's order of sums does not depend on where its
// row lies in a tile, the total of a row is a product with ones, and a tile that a row does not see leaves its bits as
// they are. So a row's bits depend on N and on where its keys are parted, on nothing else: not on the other rows, nor on
// how warps share a tile. `part` (fixed parts, joined in order, whether one block makes them or several do) makes them
// independent of the batch.
#pragma once
#include "flash_rows.cuh"

// ---- tiles of keys and values ------------------------------------------------------------------------------------------------

// FP8 E4M3 without branches: the bits as an f32 that is 2^120 too small.
__device__ __forceinline__ float fp8_value(uint32_t code) {
    float x = __uint_as_float((code & 0x80) << 24 | (code & 0x7f) << 20) * __uint_as_float((120u + 127u) << 23);
    return (code & 0x7f) == 0x7f ? __uint_as_float(0x7fc00000u) : x;
}

// How elements of a cache become those of a tile: f16 and bf16 are copied as they are. Others come as raw bytes, in units of
// `UNIT` elements, which the thread that copied them makes what activations are. HALF: a tile of f16; all else is bf16.
template <class E>
struct Load;
template <>
struct Load<BF16> {
    static const bool DIRECT = true, HALF = false, SCALED = false;
    static const int UNIT = 8, RAW = 16;
};
template <>
struct Load<F16> {
    static const bool DIRECT = true, HALF = true, SCALED = false;
    static const int UNIT = 8, RAW = 16;
};
template <>
struct Load<F32> {
    static const bool DIRECT = false, HALF = ACT_IS_F16, SCALED = false;
    static const int UNIT = 8, RAW = 32;
    static __device__ __forceinline__ void convert(const char* raw, float, uint16_t* to) {
        float x[8];
        F32::read8(reinterpret_cast<const float*>(raw), x);
        Act::write8(to, x);
    }
};
// Sixteen codes of a byte.
template <class VALUE>
__device__ __forceinline__ void convert_bytes(const char* raw, uint16_t* to, VALUE value) {
    uint4 all = load16(raw);
    uint32_t words[4] = {all.x, all.y, all.z, all.w}, out[8];
#pragma unroll
    for (int i = 0; i < 8; i++) {
        uint32_t pair = words[i / 2] >> i % 2 * 16;
        out[i] = Act::pack2(value(pair & 0xff), value(pair >> 8 & 0xff));
    }
    store16(to, make_uint4(out[0], out[1], out[2], out[3]));
    store16(to + 8, make_uint4(out[4], out[5], out[6], out[7]));
}
template <>
struct Load<Fp8> {
    static const bool DIRECT = false, HALF = ACT_IS_F16, SCALED = false;
    static const int UNIT = 16, RAW = 16;
    static __device__ __forceinline__ void convert(const char* raw, float, uint16_t* to) {
        convert_bytes(raw, to, [](uint32_t code) { return fp8_value(code); });
    }
};
template <>
struct Load<Int8> {
    static const bool DIRECT = false, HALF = ACT_IS_F16, SCALED = true;
    static const int UNIT = 16, RAW = 16;
    static __device__ __forceinline__ void convert(const char* raw, float scale, uint16_t* to) {
        convert_bytes(raw, to, [scale](uint32_t code) { return float(int8_t(code)) * scale; });
    }
};

// Keys or values on their way into a tile of N vectors. A row of a tile has a multiple of 16 elements, zeros behind the
// vector's own, and 16 bytes more: then the rows of a matrix of `ldmatrix` lie in different banks, whatever the width.
template <class E, int N, int THREADS>
struct Source {
    typedef Load<E> L;
    const typename E::Stored* from;
    int width;

    __device__ __forceinline__ Source(const void* at, int width)
        : from(static_cast<const typename E::Stored*>(at)), width(width) {}

    // Calls `with(number of this thread's unit, row, column)` for each unit of this thread.
    template <class WITH>
    __device__ __forceinline__ void each(WITH with) const {
        // Dividing once for each tile is cheaper than registers that live as long as the block.
        int units = (width + 15) / 16 * 16 / L::UNIT, r = int(threadIdx.x) / units, c = int(threadIdx.x) % units;
        int step_row = THREADS / units, step_column = THREADS % units;
        for (int i = threadIdx.x; r < N; i += THREADS) {
            with(i, r, c);
            r += step_row;
            c += step_column;
            if (c >= units) c -= units, r++;
        }
    }
    // Begins to copy; `vectors` says where they lie, negative for none.
    __device__ __forceinline__ void begin(uint16_t* tile, char* raw, int stride, const int64_t* vectors) const {
        each([&](int i, int r, int c) {
            int64_t vector = vectors[r];
            bool there = vector >= 0 && c * L::UNIT < width;
            if (L::DIRECT) {
                uint16_t* to = tile + r * stride + c * 8;
                if (there) cp_async16(to, from + vector * width + c * 8);
                else store16(to, make_uint4(0, 0, 0, 0));
            } else if (there) {
#pragma unroll
                for (int part = 0; part < L::RAW / 16; part++)
                    cp_async16(raw + i * L::RAW + part * 16,
                               from + vector * width + c * L::UNIT + part * 16 / int(sizeof(*from)));
            }
        });
        cp_async_commit();
    }
    // Makes the tile of what has arrived.
    template <class LOAD = L>
    __device__ __forceinline__ void finish(uint16_t* tile, const char* raw, int stride, const int64_t* vectors,
                                           const float* scales) const {
        cp_async_wait<0>();
        if constexpr (!LOAD::DIRECT) {
            each([&](int i, int r, int c) {
                uint16_t* to = tile + r * stride + c * L::UNIT;
                if (vectors[r] >= 0 && c * L::UNIT < width) {
                    LOAD::convert(raw + i * L::RAW, LOAD::SCALED ? scales[r] : 1.0f, to);
                } else {
#pragma unroll
                    for (int part = 0; part < L::UNIT; part += 8) store16(to + part, make_uint4(0, 0, 0, 0));
                }
            });
        }
    }
};

// ---- the kernel ----------------------------------------------------------------------------------------------------------------------

template <bool HALF>
__device__ __forceinline__ void product(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    if (HALF) mma_f16(c, a, b0, b1);
    else mma_bf16(c, a, b0, b1);
}
template <bool HALF>
__device__ __forceinline__ uint32_t packed(float low, float high) {
    return HALF ? f32_to_f16x2(low, high) : f32_to_bf16x2(low, high);
}

// Whether a tile has queries divided by a power of two of the row: those of bf16 as f16, so that none is infinite there.
template <bool HALF>
constexpr bool DIVIDES = HALF && !ACT_IS_F16;
// The exponent of the largest element of a row of bf16, within what has an inverse.
__device__ __forceinline__ int exponent_within(uint32_t most) { return min(max(int(most >> 7), 27), 227); }
// Queries as a tile has them: those of f16 as bf16 are rounded, as the keys of such a cache were.
template <bool HALF>
__device__ __forceinline__ void convert_queries(uint4& x, float factor) {
    if constexpr (HALF != ACT_IS_F16) {
        uint32_t* words[4] = {&x.x, &x.y, &x.z, &x.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint16_t low = uint16_t(*words[i]), high = uint16_t(*words[i] >> 16);
            *words[i] = packed<HALF>(Act::read(&low) * factor, Act::read(&high) * factor);
        }
    }
}
// Queries as rows of a tile.
template <bool HALF, int M, int WARPS>
__device__ __forceinline__ void load_queries(const Flash& c, const Work& w, uint16_t* tile, int stride, float* factors) {
    int lane = threadIdx.x % 32, width = (c.key_dim + 15) / 16 * 16;
    for (int r = threadIdx.x / 32; r < M; r += WARPS) {
        int row = w.row + r;
        bool there = row < w.rows;
        int head = w.kv_head * c.group + row % c.group;
        const uint16_t* from = c.q + (w.token + row / c.group) * c.q_token + head * c.q_head;
        float factor = 1;
        if (DIVIDES<HALF>) {
            uint32_t most = 0;
            for (int d = lane; there && d < c.key_dim; d += 32) most = max(most, uint32_t(from[d]) & 0x7fffu);
            for (int flip = 16; flip > 0; flip /= 2) most = max(most, __shfl_xor_sync(ALL_LANES, most, flip));
            int exponent = exponent_within(most);
            factor = __uint_as_float(uint32_t(254 - exponent) << 23);
            if (lane == 0) factors[r] = __uint_as_float(uint32_t(exponent) << 23);
        }
        for (int d = lane * 8; d < width; d += 256) {
            uint4 x = make_uint4(0, 0, 0, 0);
            if (there && d < c.key_dim) {
                x = load16(from + d);
                convert_queries<HALF>(x, factor);
            }
            store16(tile + r * stride + d, x);
        }
    }
}

// Scores of 16 rows with KN · 8 keys.
template <bool HALF, int KN>
__device__ __forceinline__ void scores_of(float (&score)[KN][4], const uint16_t* queries, const uint16_t* keys, int stride,
                                          int width) {
    int lane = threadIdx.x % 32;
    queries += lane % 16 * stride + lane / 16 * 8;
    keys += KN == 1 ? lane % 8 * stride + lane / 8 % 2 * 8 : (lane % 8 + lane / 16 * 8) * stride + lane / 8 % 2 * 8;
#pragma unroll
    for (int t = 0; t < KN; t++)
#pragma unroll
        for (int i = 0; i < 4; i++) score[t][i] = 0;
#pragma unroll 2
    for (int k = 0; k < width; k += 16) {
        uint32_t a[4];
        ldmatrix_x4(a, queries + k);
        if constexpr (KN == 1) {
            uint32_t b[2];
            ldmatrix_x2(b, keys + k);
            product<HALF>(score[0], a, b[0], b[1]);
        } else {
#pragma unroll
            for (int t = 0; t < KN; t += 2) {
                uint32_t b[4];
                ldmatrix_x4(b, keys + t * 8 * stride + k);
                product<HALF>(score[t], a, b[0], b[1]);
                product<HALF>(score[t + 1], a, b[2], b[3]);
            }
        }
    }
}

// A row's state in the threads of its quad.
template <int PAIRS>
struct Sums {
    // Values: two tiles of eight columns for each pair, elements as products have them.
    float value[PAIRS * 2][4];
    float total[4];
    // Of rows lane / 4 and lane / 4 + 8.
    float top[2];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < 4; i++) total[i] = 0;
#pragma unroll
        for (int t = 0; t < PAIRS * 2; t++)
#pragma unroll
            for (int i = 0; i < 4; i++) value[t][i] = 0;
        top[0] = top[1] = LOWEST;
    }
    __device__ __forceinline__ Stats stats(int half) const { return {top[half], total[half * 2]}; }
    __device__ __forceinline__ void raise(int half, float now) {
        float kept = exp2_approx(top[half] - now);
        top[half] = now;
        total[half * 2] *= kept;
        total[half * 2 + 1] *= kept;
#pragma unroll
        for (int t = 0; t < PAIRS * 2; t++) {
            value[t][half * 2] *= kept;
            value[t][half * 2 + 1] *= kept;
        }
    }
};

// Where a block puts its rows. In memory for parts, the sums of all splits come first, then their statistics.
struct Place {
    // `row` is the number of a row within a part.
    int64_t token, row, part;
    int head;
    bool there;
    __device__ __forceinline__ Place(const Flash& c, const Work& w, int index) {
        int query = index / c.group, within = index % c.group;
        token = w.token + query;
        head = w.kv_head * c.group + within;
        // The split again, which is cheaper than to keep it.
        int64_t split = blockIdx.x % c.splits;
        row = int64_t(w.slot + query) * c.kv_heads * c.group + head;
        part = split * c.slots * c.kv_heads * c.group + row;
        there = index < w.rows;
    }
};

// Calls `with(column, two elements)` for each pair of elements that this thread has of a row.
template <int PAIRS, int WC, class WITH>
__device__ __forceinline__ void each_pair(Sums<PAIRS>& sums, int value_dim, int wc, int half, WITH with) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int t = 0; t < PAIRS * 2; t++) {
        int column = (wc + t / 2 * WC) * 16 + t % 2 * 8 + lane % 4 * 2;
        if (column < value_dim) with(column, sums.value[t][half * 2], sums.value[t][half * 2 + 1]);
    }
}

// The statistics of a row, which the first thread of its quad keeps in memory.
__device__ __forceinline__ Stats kept_stats(const float* before, int half) {
    int lane = threadIdx.x % 32, first = lane / 4 * 4;
    Stats mine = {LOWEST, 0};
    const float* row = before + (half * 8 + lane / 4) * 2;
    if (lane == first) mine = {row[0], row[1]};
    return {__shfl_sync(ALL_LANES, mine.top, first), __shfl_sync(ALL_LANES, mine.total, first)};
}

// Joins a part to those before, and begins the next one. Between parts, the sums of values are in memory, and the statistics
// of the warp's rows in `before`.
template <int PAIRS, int WC>
__device__ __forceinline__ void keep_part(const Flash& c, const Work& w, Sums<PAIRS>& sums, float* before, bool first, int wm,
                                          int wc) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        Place place(c, w, w.row + wm * 16 + half * 8 + int(threadIdx.x % 32) / 4);
        Stats part = sums.stats(half);
        Stats all = {LOWEST, 0};
        if (!first) all = kept_stats(before, half);
        float2 factors = join(all, part);
        float* row = before + (half * 8 + threadIdx.x % 32 / 4) * 2;
        if (threadIdx.x % 4 == 0) row[0] = all.top, row[1] = all.total;
        if (!place.there || (part.total == 0 && !first)) continue;
        float* to = c.partial + place.part * c.value_dim;
        each_pair<PAIRS, WC>(sums, c.value_dim, wc, half, [&](int column, float& low, float& high) {
            float* at = to + column;
            at[0] = first ? low : joined(at[0], low, factors);
            at[1] = first ? high : joined(at[1], high, factors);
        });
    }
    sums.clear();
}
// Takes what was kept, joined with the last part.
template <int PAIRS, int WC>
__device__ __forceinline__ void take_parts(const Flash& c, const Work& w, Sums<PAIRS>& sums, const float* before, int wm,
                                           int wc) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        Place place(c, w, w.row + wm * 16 + half * 8 + int(threadIdx.x % 32) / 4);
        Stats all = kept_stats(before, half);
        if (!place.there) continue;
        bool some = sums.total[half * 2] != 0;
        float2 factors = make_float2(1, 0);
        if (some) factors = join(all, sums.stats(half));
        const float* from = c.partial + place.part * c.value_dim;
        each_pair<PAIRS, WC>(sums, c.value_dim, wc, half, [&](int column, float& low, float& high) {
            low = some ? joined(from[column], low, factors) : from[column];
            high = some ? joined(from[column + 1], high, factors) : from[column + 1];
        });
        sums.top[half] = all.top;
        sums.total[half * 2] = all.total;
    }
}
// The result of rows whose keys no other block has, or a part for those that join parts; `all`: with sums also of rows that see
// none of its keys.
template <int PAIRS, int WC>
__device__ __forceinline__ void write_rows(const Flash& c, const Work& w, Sums<PAIRS>& sums, bool alone, bool all, int wm,
                                           int wc) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int lane = threadIdx.x % 32;
        Place place(c, w, w.row + wm * 16 + half * 8 + lane / 4);
        if (!place.there) continue;
        Stats stats = sums.stats(half);
        if (!alone) {
            int64_t rows = int64_t(c.slots) * c.kv_heads * c.group;
            float* to = stats_of(c.partial, c.splits, rows, c.value_dim, place.part);
            if (lane % 4 == 0 && wc == 0) to[0] = stats.top, to[1] = stats.total;
            if (stats.total == 0 && !all) continue;
            float* values = c.partial + place.part * c.value_dim;
            each_pair<PAIRS, WC>(sums, c.value_dim, wc, half, [&](int column, float& low, float& high) {
                store8(values + column, make_uint2(__float_as_uint(low), __float_as_uint(high)));
            });
        } else {
            float factor = last_factor(stats, c.sinks, place.head);
            uint16_t* to = c.out + place.token * c.out_token + place.head * c.out_head;
            each_pair<PAIRS, WC>(sums, c.value_dim, wc, half, [&](int column, float& low, float& high) {
                *reinterpret_cast<uint32_t*>(to + column) = Act::pack2(low * factor, high * factor);
            });
        }
    }
}

// Whether this block is the last to write its part of `parts` of a tile. True for one block of the tile, which sees all parts
// then and has set the counter to zero for the next launch. `flag` is a word of shared memory that nobody uses any more behind
// the next barrier.
__device__ __forceinline__ bool is_last_part(const Flash& c, int parts, int* flag) {
    // What this thread has written is there for other blocks before its block is counted.
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        int* counter = c.counters + blockIdx.x / c.splits;
        bool last = atomicAdd(counter, 1) == parts - 1;
        if (last) *counter = 0;
        // Behind this, the block reads what others had written before they were counted.
        __threadfence();
        *flag = last;
    }
    __syncthreads();
    return *flag;
}
// The result of a tile whose parts are written.
template <int M, int WARPS>
__device__ __forceinline__ void join_rows(const Flash& c, const Work& w, int parts) {
    int end = min(w.row + M, w.rows);
    for (int row = w.row + int(threadIdx.x) / 32; row < end; row += WARPS) {
        Place place(c, w, row);
        uint16_t* out = c.out + place.token * c.out_token + place.head * c.out_head;
        int64_t rows = int64_t(c.slots) * c.kv_heads * c.group;
        join_row<true>(out, c.partial, c.splits, parts, rows, place.row, c.value_dim, c.sinks, place.head);
    }
}

// A score as it goes into the softmax: in powers of two. `factor` has no logarithm in it where scores are capped.
__device__ __forceinline__ float finish_score(float score, const Flash& c, float factor) {
    float x = score * factor;
    if (c.softcap > 0) {
        // cap · tanh(x / cap), by the exponential function.
        float e = exp2_approx(x * (2 * LOG2E / c.softcap));
        x = c.softcap * LOG2E * (1.0f - 2.0f / (e + 1.0f));
    }
    return x;
}
// Scores as they go into the softmax, LOWEST for keys that the row does not see.
template <int KN>
__device__ __forceinline__ void finish_scores(float (&score)[KN][4], const Flash& c, const float (&factor)[2],
                                              const Range (&sees)[2], int key, bool all_seen) {
#pragma unroll
    for (int t = 0; t < KN; t++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int j = key + t * 8 + i % 2;
            float x = finish_score(score[t][i], c, factor[i / 2]);
            score[t][i] = all_seen || (j >= sees[i / 2].start && j < sees[i / 2].end) ? x : LOWEST;
        }
}

// Of the tiles from `begin` to before `end`, those of this block's split. Returns how many of the first splits have all tiles, at
// least one.
template <int N, int LEAST>
__device__ __forceinline__ int take_split(const Flash& c, const Work& w, int& begin, int& end) {
    if (c.splits == 1) return 1;
    // LEAST tiles, or joining them costs more than they do.
    int first = c.part ? 0 : begin, each = c.part ? c.part / N : max((end - begin + c.splits - 1) / c.splits, LEAST);
    int parts = min(max((end - first + each - 1) / each, 1), c.splits);
    begin = max(begin, first + w.split * each);
    end = min(end, first + (w.split + 1) * each);
    return parts;
}

// The largest score of each of a thread's rows with a warp's keys; where warps share them, `tops` has it for the others.
template <int M, int KN, bool SHARED>
__device__ __forceinline__ void find_tops(float (&top)[2], const float (&score)[KN][4], float* tops, int wm, int wc) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; half++) {
#pragma unroll
        for (int t = 0; t < KN; t++) top[half] = fmaxf(top[half], fmaxf(score[t][half * 2], score[t][half * 2 + 1]));
        top[half] = fmaxf(top[half], __shfl_xor_sync(ALL_LANES, top[half], 1));
        top[half] = fmaxf(top[half], __shfl_xor_sync(ALL_LANES, top[half], 2));
        if (SHARED && lane % 4 == 0) tops[wc * M + wm * 16 + half * 8 + lane / 4] = top[half];
    }
}

// Scores become weights, under a maximum that may have risen; where warps share keys, `weights` has them for the others.
template <bool HALF, int KN, bool SHARED, int PAIRS>
__device__ __forceinline__ void weigh(float (&score)[KN][4], Sums<PAIRS>& sums, const float (&top)[2], uint16_t* weights,
                                      int stride) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        sums.raise(half, fmaxf(sums.top[half], top[half]));
        // Of a row that has not seen a key yet, nothing is left.
        float from = sums.top[half] == LOWEST ? 0.0f : sums.top[half];
#pragma unroll
        for (int t = 0; t < KN; t++)
#pragma unroll
            for (int i = half * 2; i < half * 2 + 2; i++) score[t][i] = exp2_approx(score[t][i] - from);
    }
    if (SHARED) {
        int lane = threadIdx.x % 32;
#pragma unroll
        for (int t = 0; t < KN; t++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                uint16_t* to = weights + (half * 8 + lane / 4) * stride + t * 8 + lane % 4 * 2;
                *reinterpret_cast<uint32_t*>(to) = packed<HALF>(score[t][half * 2], score[t][half * 2 + 1]);
            }
    }
}

// Adds N weighted values, and the weights. The weights are the thread's own, or where warps share keys those at `weights`.
template <bool HALF, int N, int KN, bool SHARED, int WC, int PAIRS>
__device__ __forceinline__ void add_values(Sums<PAIRS>& sums, const float (&score)[KN][4], const uint16_t* weights,
                                           int weight_stride, const uint16_t* values, int value_stride, int pairs) {
    constexpr uint32_t ONES = HALF ? 0x3c003c00u : 0x3f803f80u;
    int lane = threadIdx.x % 32;
    weights += lane % 16 * weight_stride + lane / 16 * 8;
    values += lane % 16 * value_stride + lane / 16 * 8;
#pragma unroll
    for (int k = 0; k < N; k += 16) {
        uint32_t a[4];
        if constexpr (SHARED) {
            ldmatrix_x4(a, weights + k);
        } else {
#pragma unroll
            for (int i = 0; i < 4; i++)
                a[i] = packed<HALF>(score[k / 8 + i / 2][i % 2 * 2], score[k / 8 + i / 2][i % 2 * 2 + 1]);
        }
        product<HALF>(sums.total, a, ONES, ONES);
#pragma unroll
        for (int p = 0; p < PAIRS; p++) {
            if (p >= pairs) continue;
            uint32_t b[4];
            ldmatrix_x4_trans(b, values + k * value_stride + p * WC * 16);
            product<HALF>(sums.value[p * 2], a, b[0], b[1]);
            product<HALF>(sums.value[p * 2 + 1], a, b[2], b[3]);
        }
    }
}

// WM warps along the rows of a tile, 16 each, times WC that share the keys of the scores and the columns of values: pair p of
// eight columns is of warp p % WC. PAIRS of them for each warp, so values have up to WC · PAIRS · 16 elements. LATENT: values
// are the first elements of keys, read once for both.
template <class E, int WM, int WC, int PAIRS, int N, bool LATENT>
__device__ __forceinline__ void flash(const Flash& c) {
    typedef Load<E> L;
    constexpr int M = WM * 16, THREADS = WM * WC * 32, KN = N / WC / 8;
    // Tiles of many rows leave joining to `flash_combine`, which has more than one block for them.
    constexpr bool HALF = L::HALF, SHARED = WC > 1, FEW = WM == 1;
    extern __shared__ uint4 shared[];

    wait_for_previous();
    Work w;
    if (!find_work<M>(c, w)) return;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, wm = warp / WC, wc = warp % WC;
    int key_width = (c.key_dim + 15) / 16 * 16, value_width = (c.value_dim + 15) / 16 * 16;
    int key_stride = key_width + 8, value_stride = LATENT ? key_stride : value_width + 8, weight_stride = N + 8;
    // In the order of `shared_bytes` in `flash.rs`: vectors of two tiles, their scales (of keys, then of values), factors of
    // queries, maxima of warps, statistics of parts, and the tiles.
    int64_t* vectors = reinterpret_cast<int64_t*>(shared);
    float* scales = reinterpret_cast<float*>(vectors + 2 * N);
    float* factors = scales + (L::SCALED ? 4 * N : 0);
    float* tops = factors + (DIVIDES<HALF> ? M : 0);
    float* before = tops + (SHARED ? WC * M : 0);
    uint16_t* queries = reinterpret_cast<uint16_t*>(before + WM * WC * 32);
    uint16_t* keys = queries + M * key_stride;
    uint16_t* values = keys + (LATENT && !L::DIRECT ? 0 : N * key_stride);
    uint16_t* weights = values + N * value_stride;
    char* raw = reinterpret_cast<char*>(weights + (SHARED ? M * weight_stride : 0));

    // Rows of this thread, and what they see; the block's first and last row see the first and last key of all.
    Range sees[2];
    float factor[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int row = w.row + wm * 16 + half * 8 + lane / 4;
        sees[half] = row < w.rows ? visible(c, w.first + row / c.group, w.keys) : Range{0, 0};
    }
    int last_row = min(w.row + M, w.rows) - 1;
    Range first_sees = visible(c, w.first + w.row / c.group, w.keys), last_sees = visible(c, w.first + last_row / c.group, w.keys);
    int first_key = first_sees.start, end_key = last_sees.end;
    // Keys that all rows see.
    int all_from = last_sees.start, all_to = w.row + M <= w.rows ? first_sees.end : 0;
    int begin = first_key / N, end = max((end_key + N - 1) / N, begin);
    // A warp without rows, or whose rows see no key of a tile or those behind it, only takes part in copies.
    int warp_end = 0;
    if (w.row + wm * 16 < w.rows)
        warp_end = visible(c, w.first + min(w.row + wm * 16 + 15, w.rows - 1) / c.group, w.keys).end;
    int parts = take_split<N, 2>(c, w, begin, end);
    bool joins = FEW && c.counters;
    // Where blocks of this kernel join, those behind the last key have nothing to do.
    if (joins && w.split >= parts) return;

    Source<E, N, THREADS> key_source(c.k, c.key_dim), value_source(c.v, c.value_dim);
    auto find = [&](int tile) {
        int slot = tile % 2;
        for (int n = threadIdx.x; n < N; n += THREADS) {
            int j = tile * N + n;
            int64_t vector = j >= first_key && j < end_key ? vector_of(c, w, j) : -1;
            vectors[slot * N + n] = vector;
            if (L::SCALED) {
                scales[slot * N + n] = vector >= 0 ? c.k_scales[vector] : 0.0f;
                if (!LATENT) scales[(2 + slot) * N + n] = vector >= 0 ? c.v_scales[vector] : 0.0f;
            }
        }
    };

    // Pairs of eight columns that there are for this warp.
    int pairs = (value_width / 16 - wc + WC - 1) / WC;
    Sums<PAIRS> sums;
    sums.clear();
    bool kept = false;
    int part_tiles = c.part && c.splits == 1 ? c.part / N : 0;

    auto take_queries = [&] {
        load_queries<HALF, M, WM * WC>(c, w, queries, key_stride, factors);
        __syncthreads();
#pragma unroll
        for (int half = 0; half < 2; half++) {
            factor[half] = c.scale * (c.softcap > 0 ? 1.0f : LOG2E);
            if (DIVIDES<HALF>) factor[half] *= factors[wm * 16 + half * 8 + lane / 4];
        }
    };
    if (begin < end) find(begin);
    // A block of few rows has few tiles, so the time to the first counts: its copies begin before queries are loaded, which come
    // from the second cache. Blocks of more rows have no registers for that.
    if (FEW) __syncthreads();
    else take_queries();
    if (begin < end) key_source.begin(keys, raw, key_stride, vectors + begin % 2 * N);
    if (FEW) take_queries();

    for (int tile = begin; tile < end; tile++) {
        int slot = tile % 2;
        uint16_t* key_tile = LATENT && L::DIRECT && (tile - begin) % 2 ? values : keys;
        const uint16_t* value_tile = LATENT ? key_tile : values;
        // All have read what the tile is made over, and where the values of the last one lie.
        if (LATENT && !L::DIRECT) __syncthreads();
        key_source.finish(key_tile, raw, key_stride, vectors + slot * N, scales + slot * N);
        if (LATENT && tile + 1 < end) find(tile + 1);
        __syncthreads();
        if (!LATENT) {
            value_source.begin(values, raw, value_stride, vectors + slot * N);
            if (tile + 1 < end) find(tile + 1);
        } else if (tile + 1 < end) {
            uint16_t* next = L::DIRECT && key_tile == keys ? values : keys;
            key_source.begin(next, raw, key_stride, vectors + (1 - slot) * N);
        }

        float score[KN][4];
        bool works = tile * N < warp_end;
        if (works) {
            scores_of<HALF, KN>(score, queries + wm * 16 * key_stride, key_tile + wc * KN * 8 * key_stride, key_stride, key_width);
            bool all_seen = tile * N >= all_from && (tile + 1) * N <= all_to;
            finish_scores<KN>(score, c, factor, sees, tile * N + wc * KN * 8 + lane % 4 * 2, all_seen);
        }
        float top[2] = {LOWEST, LOWEST};
        if (works) find_tops<M, KN, SHARED>(top, score, tops, wm, wc);
        if (SHARED) {
            __syncthreads();
            if (works) {
#pragma unroll
                for (int half = 0; half < 2; half++)
#pragma unroll
                    for (int other = 0; other < WC; other++)
                        top[half] = fmaxf(top[half], tops[other * M + wm * 16 + half * 8 + lane / 4]);
            }
        }
        if (works) weigh<HALF, KN, SHARED>(score, sums, top, weights + wm * 16 * weight_stride + wc * KN * 8, weight_stride);
        if (!LATENT) value_source.finish(values, raw, value_stride, vectors + slot * N, scales + (2 + slot) * N);
        if (!LATENT || SHARED) __syncthreads();
        if (!LATENT && tile + 1 < end) key_source.begin(keys, raw, key_stride, vectors + (1 - slot) * N);
        if (works) add_values<HALF, N, KN, SHARED, WC>(sums, score, weights + wm * 16 * weight_stride, weight_stride, value_tile + wc * 16, value_stride, pairs);
        if (part_tiles && tile + 1 < end && (tile + 1) % part_tiles == 0) {
            keep_part<PAIRS, WC>(c, w, sums, before + warp * 32, !kept, wm, wc);
            kept = true;
        }
    }
    if (kept) take_parts<PAIRS, WC>(c, w, sums, before + warp * 32, wm, wc);
    write_rows<PAIRS, WC>(c, w, sums, (joins ? parts : c.splits) == 1, joins, wm, wc);
    if (joins && parts > 1 && is_last_part(c, parts, reinterpret_cast<int*>(shared))) join_rows<M, WM * WC>(c, w, parts);
}

// ---- kernels -------------------------------------------------------------------------------------------------------------------------

#define FLASH_KERNEL(NAME, E, WM, WC, PAIRS, N, LATENT, BLOCKS)                                                            \
    KERNEL __launch_bounds__(WM * WC * 32, BLOCKS) NAME(FLASH_PARAMS) {                                                    \
        Flash c = FLASH;                                                                                                   \
        flash<E, WM, WC, PAIRS, N, LATENT>(c);                                                                             \
    }
// Kernels for values of up to 128 elements, for those of up to 256, and for up to 512 and latent rows: a file for each, because
// what a program does not need is not compiled. The first number of a name is the rows of a tile, the second the most elements of a
// value; `flash_tiles.rs` has the same.
#define FLASH_KERNELS(NAME, E)                                                                                             \
    FLASH_KERNEL(flash_##NAME##_64x128, E, 4, 1, 8, 64, false, 3)                                                   \
    FLASH_KERNEL(flash_##NAME##_16x128, E, 1, 4, 2, 64, false, 4)
#define FLASH_WIDE_KERNELS(NAME, E)                                                                                        \
    FLASH_KERNEL(flash_##NAME##_64x256, E, 4, 2, 8, 32, false, 1)                                                   \
    FLASH_KERNEL(flash_##NAME##_16x256, E, 1, 4, 4, 32, false, 4)
#define FLASH_512_KERNELS(NAME, E)                                                                                         \
    FLASH_KERNEL(flash_##NAME##_32x512, E, 2, 4, 8, 32, false, 1)                                                   \
    FLASH_KERNEL(flash_##NAME##_16x512, E, 1, 4, 8, 32, false, 2)                                                   \
    FLASH_KERNEL(latent_##NAME##_16x512, E, 1, 4, 8, 32, true, 2)
// For elements that a tile holds as they are: converting others beside so many sums takes more registers than there are, and
// has no room for two tiles on their way. Devices of compute capability 12 have less shared memory than its tiles take.
#if !(__CUDA_ARCH__ >= 1200)
#define LATENT_KERNEL(NAME, E) FLASH_KERNEL(latent_##NAME##_64x512, E, 4, 2, 16, 32, true, 1)
#else
#define LATENT_KERNEL(NAME, E)
#endif
