// Writes keys and values of a batch's tokens to a paged pool, [blocks, kv_heads, block_size, dim].
#include "common.cuh"

#define SOURCE_PARAMS                                                                                                   \
    const Act::Stored *k, const Act::Stored *v, int key_dim, int value_dim, int64_t k_offset, int64_t k_token, int64_t k_head,      \
        int64_t v_offset, int64_t v_token, int64_t v_head
#define PLACE_PARAMS                                                                                                    \
    const int *query_starts, const int *kv_lens, const int *tables, int seqs, int table_stride, int block_size,         \
        int kv_heads, int blocks

// The vector of a token's head in the pool; -1 for a token or block that has none.
__device__ __forceinline__ int64_t place_of(int token, int kv_head, PLACE_PARAMS) {
    int s = sequence_of(query_starts, seqs, token);
    if (token < query_starts[s] || token >= query_starts[s + 1]) return -1;
    int j = kv_lens[s] - query_starts[s + 1] + token;
    if (j < 0 || j / block_size >= table_stride) return -1;
    int block = tables[int64_t(s) * table_stride + j / block_size];
    if (block < 0 || block >= blocks) return -1;
    return (int64_t(block) * kv_heads + kv_head) * block_size + j % block_size;
}

// A warp for each vector; `value_dim` is 0 where keys hold the values.
template <class E>
__device__ __forceinline__ void append(typename E::Stored* keys, typename E::Stored* values, int tokens, SOURCE_PARAMS,
                                       PLACE_PARAMS) {
    int64_t vector = thread_number() / 32;
    int lane = threadIdx.x % 32, token = int(vector / kv_heads), kv_head = int(vector % kv_heads);
    if (token >= tokens) return;
    int64_t place = place_of(token, kv_head, query_starts, kv_lens, tables, seqs, table_stride, block_size, kv_heads, blocks);
    if (place < 0) return;
    for (int d = lane; d < key_dim; d += 32)
        keys[place * key_dim + d] = E::round(Act::read(k + k_offset + token * k_token + kv_head * k_head + d));
    for (int d = lane; d < value_dim; d += 32)
        values[place * value_dim + d] = E::round(Act::read(v + v_offset + token * v_token + kv_head * v_head + d));
}
#define APPEND(NAME, E)                                                                                                 \
    KERNEL NAME(E::Stored* keys, E::Stored* values, float* k_scales, float* v_scales, int tokens, SOURCE_PARAMS,        \
                PLACE_PARAMS) {                                                                                         \
        append<E>(keys, values, tokens, k, v, key_dim, value_dim, k_offset, k_token, k_head, v_offset, v_token, v_head, \
                  query_starts, kv_lens, tables, seqs, table_stride, block_size, kv_heads, blocks);                     \
    }
APPEND(append_f32, F32)
APPEND(append_f16, F16)
APPEND(append_bf16, BF16)
APPEND(append_fp8, Fp8)

// One vector as codes of 8 bits: scale = max |x| / 127, code = round(x / scale).
__device__ __forceinline__ void quantise(const Act::Stored* from, int8_t* to, float* scale_to, int dim, int lane) {
    float most = 0;
    for (int d = lane; d < dim; d += 32) most = fmaxf(most, fabsf(Act::read(from + d)));
    float scale = warp_max(most) / 127.0f;
    for (int d = lane; d < dim; d += 32) {
        // Dividing: 1 / scale is infinite for a subnormal scale.
        float q = scale > 0.0f ? Act::read(from + d) / scale : 0.0f;
        to[d] = q != q ? 0 : int8_t(__float2int_rn(fminf(fmaxf(q, -127.0f), 127.0f)));
    }
    if (lane == 0) *scale_to = scale;
}

KERNEL append_int8(int8_t* keys, int8_t* values, float* k_scales, float* v_scales, int tokens, SOURCE_PARAMS,
                   PLACE_PARAMS) {
    int64_t vector = thread_number() / 32;
    int lane = threadIdx.x % 32, token = int(vector / kv_heads), kv_head = int(vector % kv_heads);
    if (token >= tokens) return;
    int64_t place = place_of(token, kv_head, query_starts, kv_lens, tables, seqs, table_stride, block_size, kv_heads, blocks);
    if (place < 0) return;
    quantise(k + k_offset + token * k_token + kv_head * k_head, keys + place * key_dim, k_scales + place, key_dim, lane);
    if (value_dim > 0)
        quantise(v + v_offset + token * v_token + kv_head * v_head, values + place * value_dim, v_scales + place,
                 value_dim, lane);
}
