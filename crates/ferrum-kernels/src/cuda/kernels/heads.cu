// Heads: norm and rotation on their way from one layout to another. A layout is where element 0 of head h of token t
// lies: offset + t · token + h · head.
#include "common.cuh"

KERNEL copy_heads(Act::Stored* dst, const Act::Stored* src, int64_t total, int heads, int head_dim, int64_t src_offset,
                  int64_t src_token, int64_t src_head, int64_t dst_offset, int64_t dst_token, int64_t dst_head) {
    wait_for_previous();
    int64_t i = thread_number();
    if (i >= total) return;
    int64_t d = i % head_dim, head = i / head_dim % heads, token = i / head_dim / heads;
    dst[dst_offset + token * dst_token + head * dst_head + d] = src[src_offset + token * src_token + head * src_head + d];
}

// A block for each head of each token. `src` and `dst` may be the same. `weight` is null without norm, `rows` without
// rotation. Row numbers beyond the tables count as their last.
KERNEL __launch_bounds__(128)
    transform_heads(Act::Stored* dst, const Act::Stored* src, int heads, int head_dim, int64_t src_offset, int64_t src_token,
                    int64_t src_head, int64_t dst_offset, int64_t dst_token, int64_t dst_head, const float* weight,
                    float eps, const float* cos, const float* sin, const int* rows, int rot_dim, int interleaved,
                    int last_row) {
    extern __shared__ float values[];
    __shared__ float scratch[32];
    wait_for_previous();
    int64_t token = blockIdx.x / heads, head = blockIdx.x % heads;
    const Act::Stored* from = src + src_offset + token * src_token + head * src_head;
    Act::Stored* to = dst + dst_offset + token * dst_token + head * dst_head;
    float squares = 0;
    for (int d = threadIdx.x; d < head_dim; d += blockDim.x) {
        float x = Act::read(from + d);
        values[d] = x;
        squares = fmaf(x, x, squares);
    }
    if (weight) {
        float factor = 1.0f / sqrtf(block_sum(squares, scratch) / float(head_dim) + eps);
        for (int d = threadIdx.x; d < head_dim; d += blockDim.x) values[d] = values[d] * factor * weight[d];
    }
    __syncthreads();
    int half = rows ? rot_dim / 2 : 0;
    if (half > 0) {
        int64_t table = int64_t(min(max(rows[token], 0), last_row)) * half;
        for (int i = threadIdx.x; i < half; i += blockDim.x) {
            int first = interleaved ? 2 * i : i, second = interleaved ? 2 * i + 1 : i + half;
            float a = values[first], b = values[second], c = cos[table + i], s = sin[table + i];
            Act::write(to + first, a * c - b * s);
            Act::write(to + second, b * c + a * s);
        }
    }
    for (int d = 2 * half + threadIdx.x; d < head_dim; d += blockDim.x) Act::write(to + d, values[d]);
}
