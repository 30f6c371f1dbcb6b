// Attention of one query of one head by a block, over the keys that it sees, in tiles of as many keys as the block has
// threads, with a running maximum and sum. Tiles begin at multiples of their size of the key's index, so a query's sums
// have one order however it is batched, chunked or paged.
#include "common.cuh"

// What the kernels of all caches are told, in the order of `Call` on the host.
#define CALL_PARAMS                                                                                                     \
    Act::Stored *out, const Act::Stored *q, const float *sinks, int heads, int group, int key_dim, int value_dim, int64_t q_token,  \
        int64_t q_head, int64_t out_token, int64_t out_head, float scale, float softcap, int causal, int window,  \
        int chunked
#define CALL {out, q, sinks, heads, group, key_dim, value_dim, q_token, q_head, out_token, out_head, scale, softcap, causal, window, chunked}

struct Call {
    Act::Stored* out;
    const Act::Stored* q;
    const float* sinks;
    int heads, group, key_dim, value_dim;
    int64_t q_token, q_head, out_token, out_head;
    float scale, softcap;
    int causal, window, chunked;
};

#define TILE 128
#define LOWEST -3.0e38f

// `cache.key(j)` and `cache.value(j)` are where key and value j of this head begin, `cache.key_scale(j)` and
// `cache.value_scale(j)` what they are multiplied with.
template <class E, class Cache>
__device__ __forceinline__ void attend(const Call& c, const Cache& cache, int64_t token, int head, int index, int keys,
                                       float* shared) {
    __shared__ float scratch[32];
    float* query = shared;
    float* sums = query + c.key_dim;
    float* weights = sums + c.value_dim;
    const Act::Stored* from = c.q + token * c.q_token + head * c.q_head;
    for (int d = threadIdx.x; d < c.key_dim; d += TILE) query[d] = Act::read(from + d);
    for (int d = threadIdx.x; d < c.value_dim; d += TILE) sums[d] = 0;
    __syncthreads();
    Range sees = visible_keys(index, keys, c.causal, c.window, c.chunked);
    int start = sees.start, end = sees.end;
    float highest = LOWEST, total = 0;
    for (int tile = start / TILE * TILE; tile < end; tile += TILE) {
        int first = max(start - tile, 0), last = min(end - tile, TILE), mine = threadIdx.x;
        bool seen = mine >= first && mine < last;
        float score = LOWEST;
        if (seen) {
            const typename E::Stored* key = cache.key(tile + mine);
            float dot = 0;
            for (int d = 0; d < c.key_dim; d++) dot = fmaf(query[d], E::read(key + d), dot);
            score = dot * cache.key_scale(tile + mine) * c.scale;
            if (c.softcap > 0) score = c.softcap * tanhf(score / c.softcap);
        }
        float top = fmaxf(highest, block_max(score, scratch));
        float weight = seen ? expf(score - top) : 0.0f;
        float before = highest == LOWEST ? 0.0f : expf(highest - top);
        total = total * before + block_sum(weight, scratch);
        highest = top;
        weights[mine] = seen ? weight * cache.value_scale(tile + mine) : 0.0f;
        __syncthreads();
        for (int d = threadIdx.x; d < c.value_dim; d += TILE) {
            float sum = sums[d] * before;
            for (int j = first; j < last; j++) sum = fmaf(weights[j], E::read(cache.value(tile + j) + d), sum);
            sums[d] = sum;
        }
        __syncthreads();
    }
    float factor = 0;
    if (start < end) {
        factor = 1.0f / total;
        if (c.sinks) {
            float sink = c.sinks[head], top = fmaxf(highest, sink), kept = expf(highest - top);
            factor = kept / (total * kept + expf(sink - top));
        }
    }
    Act::Stored* to = c.out + token * c.out_token + head * c.out_head;
    for (int d = threadIdx.x; d < c.value_dim; d += TILE) Act::write(to + d, start < end ? sums[d] * factor : 0.0f);
}

// Keys of a head lie one after the other.
struct Contiguous {
    const Act::Stored *k, *v;
    int64_t key_stride, value_stride;
    __device__ __forceinline__ const Act::Stored* key(int j) const { return k + j * key_stride; }
    __device__ __forceinline__ const Act::Stored* value(int j) const { return v + j * value_stride; }
    __device__ __forceinline__ float key_scale(int) const { return 1.0f; }
    __device__ __forceinline__ float value_scale(int) const { return 1.0f; }
};

KERNEL __launch_bounds__(TILE, 8)
    attention_contiguous(CALL_PARAMS, const Act::Stored* k, const Act::Stored* v, int64_t head_tokens, int64_t key_stride,
                         int64_t value_stride, int keys, int first_index) {
    extern __shared__ float shared[];
    wait_for_previous();
    Call c = CALL;
    int64_t token = blockIdx.x / heads;
    int head = blockIdx.x % heads;
    int64_t kv = head / group * head_tokens;
    Contiguous cache = {k + kv * key_stride, v + kv * value_stride, key_stride, value_stride};
    attend<Act>(c, cache, token, head, first_index + int(token), keys, shared);
}

// A pool is [blocks, kv_heads, block_size, dim]; scales are null where elements have none.
template <class E>
struct Paged {
    const typename E::Stored *k, *v;
    const float *k_scales, *v_scales;
    const int* table;
    int block_size, kv_heads, kv_head, key_dim, value_width;
    __device__ __forceinline__ int64_t vector(int j) const {
        return (int64_t(table[j / block_size]) * kv_heads + kv_head) * block_size + j % block_size;
    }
    __device__ __forceinline__ const typename E::Stored* key(int j) const { return k + vector(j) * key_dim; }
    __device__ __forceinline__ const typename E::Stored* value(int j) const { return v + vector(j) * value_width; }
    __device__ __forceinline__ float key_scale(int j) const { return k_scales ? k_scales[vector(j)] : 1.0f; }
    __device__ __forceinline__ float value_scale(int j) const { return v_scales ? v_scales[vector(j)] : 1.0f; }
};

#define PAGED(NAME, E)                                                                                                  \
    KERNEL __launch_bounds__(TILE, 8)                                                                                      \
        NAME(CALL_PARAMS, const E::Stored* k, const E::Stored* v, const float* k_scales, const float* v_scales,         \
             const int* query_starts, const int* kv_lens, const int* tables, int seqs, int table_stride,                \
             int block_size, int kv_heads, int value_width) {                                                           \
        extern __shared__ float shared[];                                                                               \
        wait_for_previous();                                                                                            \
        Call c = CALL;                                                                                                  \
        int token = blockIdx.x / heads, head = blockIdx.x % heads;                                                      \
        int s = sequence_of(query_starts, seqs, token);                                                                 \
        /* Tokens behind the last sequence fill up a batch: nobody reads them. */                                       \
        bool inside = token >= query_starts[s] && token < query_starts[s + 1];                                          \
        int keys = inside ? kv_lens[s] : 0;                                                                             \
        int index = inside ? keys - query_starts[s + 1] + token : 0;                                                    \
        Paged<E> cache = {k, v, k_scales, v_scales, tables + int64_t(s) * table_stride, block_size, kv_heads,           \
                          head / group, key_dim, value_width};                                                          \
        attend<E>(c, cache, token, head, index, keys, shared);                                                          \
    }
PAGED(attention_f32, F32)
PAGED(attention_f16, F16)
PAGED(attention_bf16, BF16)
PAGED(attention_fp8, Fp8)
PAGED(attention_int8, Int8)
