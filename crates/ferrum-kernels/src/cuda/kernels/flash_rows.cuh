// What all kernels of attention on tensor cores share: what they are told, which rows and keys a block has, and joining what parts of
// the keys gave.
#pragma once
#include "common.cuh"

#define LOWEST -3.0e38f
#define LOG2E 1.4426950408889634f

// What all kernels of attention are told, in the order of `flash.rs`.
#define FLASH_PARAMS                                                                                                       \
    uint16_t *out, const uint16_t *q, const float *sinks, float *partial, const void *k, const void *v,                    \
        const float *k_scales, const float *v_scales, const int *query_starts, const int *kv_lens, const int *tables,      \
        int seqs, int table_stride, int block_size, int kv_heads, int group, int key_dim, int value_dim, int tokens,       \
        int kv_len, int first_index, int64_t head_keys, int64_t q_token, int64_t q_head, int64_t out_token,                \
        int64_t out_head, float scale, float softcap, int causal, int window, int chunked, int splits, int part,           \
        int row_tiles, int min_rows, int max_rows, int slots, int seq_slots, int *counters
#define FLASH                                                                                                              \
    {out, q, sinks, partial, k, v, k_scales, v_scales, query_starts, kv_lens, tables, seqs, table_stride, block_size,      \
     kv_heads, group, key_dim, value_dim, tokens, kv_len, first_index, head_keys, q_token, q_head, out_token, out_head,    \
     scale, softcap, causal, window, chunked, splits, part, row_tiles, min_rows, max_rows, slots, seq_slots, counters}

struct Flash {
    uint16_t* out;
    const uint16_t* q;
    const float* sinks;
    float* partial;
    const void *k, *v;
    const float *k_scales, *v_scales;
    // Null where keys are contiguous: then there is one sequence of `tokens` queries and `kv_len` keys.
    const int *query_starts, *kv_lens, *tables;
    int seqs, table_stride, block_size, kv_heads, group, key_dim, value_dim, tokens, kv_len, first_index;
    // Keys from one kv head to the next, where they are contiguous.
    int64_t head_keys, q_token, q_head, out_token, out_head;
    float scale, softcap;
    int causal, window, chunked;
    // Blocks that share the keys of a row; keys of a fixed part, 0 for parts of equal length.
    int splits, part;
    // Tiles for each sequence; 0: as many as its rows take.
    int row_tiles;
    // Sequences with fewer or more rows are another launch's.
    int min_rows, max_rows;
    // Tokens whose parts are kept; each sequence has `seq_slots` of them, 0 where slots are the batch's tokens.
    int slots, seq_slots;
    // A counter for each tile and kv head, zero before and after a launch: the last block of a tile joins its parts. Null where
    // `flash_combine` does.
    int* counters;
};

// ---- joining what parts of the keys gave -------------------------------------------------------------------------------------

struct Stats {
    float top, total;
};
// Joins a part to what earlier ones gave, and gives what the sums of both are multiplied with. Products are rounded by
// themselves, so that all that join parts get the same bits.
__device__ __forceinline__ float2 join(Stats& all, Stats part) {
    float top = fmaxf(all.top, part.top), kept = exp2_approx(all.top - top), added = exp2_approx(part.top - top);
    all.total = fmaf(all.total, kept, __fmul_rn(part.total, added));
    all.top = top;
    return make_float2(kept, added);
}
__device__ __forceinline__ float joined(float sum, float part, float2 factors) {
    return fmaf(sum, factors.x, __fmul_rn(part, factors.y));
}
// What the sum of values is multiplied with in the end. Without a visible key the result is zeros.
__device__ __forceinline__ float last_factor(Stats all, const float* sinks, int head) {
    if (all.total == 0) return 0;
    if (!sinks) return 1.0f / all.total;
    float sink = sinks[head] * LOG2E, top = fmaxf(all.top, sink), kept = exp2_approx(all.top - top);
    return kept / fmaf(all.total, kept, exp2_approx(sink - top));
}

__device__ __forceinline__ float* stats_of(float* partial, int splits, int64_t rows, int value_dim, int64_t part) {
    return partial + splits * rows * value_dim + part * 2;
}
// The result of a row of `rows` by the first `parts` of `splits` parts of its keys, in their order: the work of a warp. ALL: also
// parts without keys have sums, which are asked for before it is known whether they count.
template <bool ALL>
__device__ __forceinline__ void join_row(uint16_t* out, float* partial, int splits, int parts, int64_t rows, int64_t row,
                                         int value_dim, const float* sinks, int head) {
    // Parts that are asked for at once.
    constexpr int TOGETHER = 8;
    for (int d = threadIdx.x % 32 * 4; d < value_dim; d += 128) {
        const float *stats = stats_of(partial, splits, rows, value_dim, row), *sums = partial + row * value_dim + d;
        Stats total = {LOWEST, 0};
        float sum[4] = {0, 0, 0, 0};
        for (int first = 0; first < parts; first += TOGETHER) {
            Stats part[TOGETHER];
            uint4 x[TOGETHER];
#pragma unroll
            for (int i = 0; i < TOGETHER; i++, stats += rows * 2) {
                part[i] = {LOWEST, 0};
                if (first + i >= parts) continue;
                uint2 both = load8(stats);
                part[i] = {__uint_as_float(both.x), __uint_as_float(both.y)};
            }
#pragma unroll
            for (int i = 0; i < TOGETHER; i++, sums += rows * value_dim)
                if (ALL ? first + i < parts : part[i].total != 0) x[i] = load16(sums);
#pragma unroll
            for (int i = 0; i < TOGETHER; i++) {
                if (part[i].total == 0) continue;
                float2 factors = join(total, part[i]);
                sum[0] = joined(sum[0], __uint_as_float(x[i].x), factors);
                sum[1] = joined(sum[1], __uint_as_float(x[i].y), factors);
                sum[2] = joined(sum[2], __uint_as_float(x[i].z), factors);
                sum[3] = joined(sum[3], __uint_as_float(x[i].w), factors);
            }
        }
        float factor = last_factor(total, sinks, head);
        store8(out + d,
               make_uint2(Act::pack2(sum[0] * factor, sum[1] * factor), Act::pack2(sum[2] * factor, sum[3] * factor)));
    }
}

// ---- which rows and keys a block has -------------------------------------------------------------------------------------------

__device__ __forceinline__ Range visible(const Flash& c, int index, int keys) {
    return visible_keys(index, keys, c.causal, c.window, c.chunked);
}

// A tile of rows of one sequence and kv head.
struct Work {
    int token, rows, first, keys, kv_head, split, row;
    const int* table;
    // The slot of the sequence's first token.
    int slot;
};

// The tile of this block; false for none. Without `row_tiles`, the tiles of sequence s begin at
// floor(query_starts[s] · group / M) + s: that is room enough for all of the sequences before, whatever their lengths, and a
// block finds its tile by halving.
template <int M>
__device__ __forceinline__ bool find_work(const Flash& c, Work& w) {
    int block = blockIdx.x, tiles = int(gridDim.x) / (c.splits * c.kv_heads);
    w.split = block % c.splits;
    block /= c.splits;
    // The last tiles of a causal sequence see the most keys: they come first.
    int tile = tiles - 1 - block % tiles, s = 0;
    w.kv_head = block / tiles;
    w.token = 0, w.keys = c.kv_len, w.first = c.first_index, w.table = nullptr;
    int queries = c.tokens;
    if (c.query_starts) {
        if (c.row_tiles) {
            s = tile / c.row_tiles;
            tile %= c.row_tiles;
        } else {
            int high = c.seqs;
            while (s + 1 < high) {
                int middle = (s + high) / 2;
                if (int(int64_t(c.query_starts[middle]) * c.group / M) + middle <= tile) s = middle;
                else high = middle;
            }
            tile -= int(int64_t(c.query_starts[s]) * c.group / M) + s;
        }
        w.token = c.query_starts[s];
        queries = c.query_starts[s + 1] - w.token;
        w.keys = c.kv_lens[s];
        w.first = w.keys - queries;
        w.table = c.tables + int64_t(s) * c.table_stride;
    }
    w.rows = queries * c.group;
    w.row = tile * M;
    w.slot = c.seq_slots ? s * c.seq_slots : w.token;
    return w.row < w.rows && w.rows >= c.min_rows && w.rows <= c.max_rows;
}

// Where key `j` and its value lie, in vectors.
__device__ __forceinline__ int64_t vector_of(const Flash& c, const Work& w, int j) {
    if (!w.table) return w.kv_head * c.head_keys + j;
    int block = w.table[j / c.block_size];
    return block < 0 ? -1 : (int64_t(block) * c.kv_heads + w.kv_head) * c.block_size + j % c.block_size;
}
