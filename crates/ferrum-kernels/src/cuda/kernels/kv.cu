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

// A vector to its place, whose element d is `at(d)`, by one warp; codes of 8 bits have a scale = max |x| / 127.
template <class E>
struct Put {
    template <class From>
    static __device__ __forceinline__ void vector(typename E::Stored* to, float*, int dim, int lane, From at) {
        for (int d = lane; d < dim; d += 32) to[d] = E::round(at(d));
    }
};
template <>
struct Put<Int8> {
    template <class From>
    static __device__ __forceinline__ void vector(int8_t* to, float* scale_to, int dim, int lane, From at) {
        float most = 0;
        for (int d = lane; d < dim; d += 32) most = fmaxf(most, fabsf(at(d)));
        float scale = warp_max(most) / 127.0f;
        for (int d = lane; d < dim; d += 32) {
            // Dividing: 1 / scale is infinite for a subnormal scale.
            float q = scale > 0.0f ? at(d) / scale : 0.0f;
            to[d] = q != q ? 0 : int8_t(__float2int_rn(fminf(fmaxf(q, -127.0f), 127.0f)));
        }
        if (lane == 0) *scale_to = scale;
    }
};

// A warp for each vector; `value_dim` is 0 where keys hold the values.
template <class E>
__device__ __forceinline__ void append(typename E::Stored* keys, typename E::Stored* values, float* k_scales, float* v_scales,
                                       int tokens, SOURCE_PARAMS, PLACE_PARAMS) {
    wait_for_previous();
    int64_t vector = thread_number() / 32;
    int lane = threadIdx.x % 32, token = int(vector / kv_heads), kv_head = int(vector % kv_heads);
    if (token >= tokens) return;
    int64_t place = place_of(token, kv_head, query_starts, kv_lens, tables, seqs, table_stride, block_size, kv_heads, blocks);
    if (place < 0) return;
    k += k_offset + token * k_token + kv_head * k_head;
    v += v_offset + token * v_token + kv_head * v_head;
    Put<E>::vector(keys + place * key_dim, k_scales + place, key_dim, lane, [&](int d) { return Act::read(k + d); });
    if (value_dim > 0)
        Put<E>::vector(values + place * value_dim, v_scales + place, value_dim, lane, [&](int d) { return Act::read(v + d); });
}
#define APPEND(NAME, E)                                                                                                 \
    KERNEL NAME(E::Stored* keys, E::Stored* values, float* k_scales, float* v_scales, int tokens, SOURCE_PARAMS,        \
                PLACE_PARAMS) {                                                                                         \
        append<E>(keys, values, k_scales, v_scales, tokens, k, v, key_dim, value_dim, k_offset, k_token, k_head,        \
                  v_offset, v_token, v_head, query_starts, kv_lens, tables, seqs, table_stride, block_size, kv_heads,   \
                  blocks);                                                                                              \
    }
APPEND(append_f32, F32)
APPEND(append_f16, F16)
APPEND(append_bf16, BF16)
APPEND(append_fp8, Fp8)
APPEND(append_int8, Int8)

// ---- the rows of a fused projection ------------------------------------------------------------------------------------------

// Most elements of a head here.
#define WIDEST 256
// How heads are normed and rotated: `weight` is null without norm, `rows` without rotation. Row numbers beyond the tables
// count as their last.
#define TRANSFORM_PARAMS                                                                                                \
    const float *q_weight, const float *k_weight, float q_eps, float k_eps, const float *cos, const float *sin,         \
        const int *rows, int rot_dim, int interleaved, int last_row

// A warp for each head of each row [q_heads | kv_heads | kv_heads of values]: queries go to `q`, token-major, keys and values
// to the pool. What is normed and rotated is rounded as an activation on its way.
template <class E>
__device__ __forceinline__ void append_qkv(Act::Stored* q, typename E::Stored* keys, typename E::Stored* values, float* k_scales,
                                           float* v_scales, const Act::Stored* qkv, int tokens, int q_heads, int key_dim,
                                           int value_dim, TRANSFORM_PARAMS, PLACE_PARAMS) {
    __shared__ float shared[4][WIDEST];
    wait_for_previous();
    int heads = q_heads + 2 * kv_heads, vector = int(blockIdx.x) * 4 + int(threadIdx.x) / 32, lane = threadIdx.x % 32;
    int token = vector / heads, head = vector % heads;
    if (token >= tokens) return;
    int64_t q_row = int64_t(q_heads) * key_dim;
    const Act::Stored* row = qkv + token * (q_row + int64_t(kv_heads) * (key_dim + value_dim));
    bool is_query = head < q_heads, is_value = head >= q_heads + kv_heads;
    int64_t place = 0;
    if (!is_query) {
        int kv_head = is_value ? head - q_heads - kv_heads : head - q_heads;
        place = place_of(token, kv_head, query_starts, kv_lens, tables, seqs, table_stride, block_size, kv_heads, blocks);
        if (place < 0) return;
        if (is_value) {
            const Act::Stored* from = row + q_row + int64_t(kv_heads) * key_dim + int64_t(kv_head) * value_dim;
            Put<E>::vector(values + place * value_dim, v_scales + place, value_dim, lane, [&](int d) { return Act::read(from + d); });
            return;
        }
    }
    float* x = shared[threadIdx.x / 32];
    const Act::Stored* from = row + int64_t(head) * key_dim;
    float squares = 0;
    for (int d = lane; d < key_dim; d += 32) {
        x[d] = Act::read(from + d);
        squares = fmaf(x[d], x[d], squares);
    }
    const float* weight = is_query ? q_weight : k_weight;
    if (weight) {
        float factor = 1.0f / sqrtf(warp_sum(squares) / float(key_dim) + (is_query ? q_eps : k_eps));
        for (int d = lane; d < key_dim; d += 32) x[d] = x[d] * factor * weight[d];
    }
    __syncwarp();
    int half = rows ? rot_dim / 2 : 0;
    int64_t table = rows ? int64_t(min(max(rows[token], 0), last_row)) * half : 0;
    for (int i = lane; i < half; i += 32) {
        int first = interleaved ? 2 * i : i, second = interleaved ? 2 * i + 1 : i + half;
        float a = x[first], b = x[second], c = cos[table + i], s = sin[table + i];
        x[first] = a * c - b * s;
        x[second] = b * c + a * s;
    }
    __syncwarp();
    auto rounded = [&](int d) {
        Act::Stored stored;
        Act::write(&stored, x[d]);
        return Act::read(&stored);
    };
    if (is_query) {
        Act::Stored* to = q + token * q_row + int64_t(head) * key_dim;
        for (int d = lane; d < key_dim; d += 32) Act::write(to + d, x[d]);
    } else {
        Put<E>::vector(keys + place * key_dim, k_scales + place, key_dim, lane, rounded);
    }
}
#define APPEND_QKV(NAME, E)                                                                                             \
    KERNEL __launch_bounds__(128)                                                                                       \
        NAME(Act::Stored* q, E::Stored* keys, E::Stored* values, float* k_scales, float* v_scales,                      \
             const Act::Stored* qkv, int tokens, int q_heads, int key_dim, int value_dim, TRANSFORM_PARAMS,             \
             PLACE_PARAMS) {                                                                                            \
        append_qkv<E>(q, keys, values, k_scales, v_scales, qkv, tokens, q_heads, key_dim, value_dim, q_weight,          \
                      k_weight, q_eps, k_eps, cos, sin, rows, rot_dim, interleaved, last_row, query_starts, kv_lens,    \
                      tables, seqs, table_stride, block_size, kv_heads, blocks);                                        \
    }
APPEND_QKV(append_qkv_f32, F32)
APPEND_QKV(append_qkv_f16, F16)
APPEND_QKV(append_qkv_bf16, BF16)
APPEND_QKV(append_qkv_fp8, Fp8)
APPEND_QKV(append_qkv_int8, Int8)
