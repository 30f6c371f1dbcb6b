// Convolutions: a thread makes an output and sums channels, then taps, in order. Linear attention, whose layers have some.
#include "common.cuh"

// out[c, t] = bias[c] + Σ x[i, t · stride + tap - padding] · weight[c, i, tap]. `bias` may be null.
KERNEL conv1d(Act::Stored* out, const Act::Stored* x, const float* weight, const float* bias, int64_t total,
              int64_t out_len, int64_t len, int64_t in_of_group, int64_t out_of_group, int64_t kernel, int64_t stride, int64_t padding) {
    int64_t o = thread_number();
    if (o >= total) return;
    int64_t c = o / out_len, start = o % out_len * stride - padding, first = c / out_of_group * in_of_group;
    float sum = 0;
    for (int64_t i = 0; i < in_of_group; i++)
        for (int64_t tap = 0; tap < kernel; tap++) {
            int64_t t = start + tap;
            if (t >= 0 && t < len)
                sum = fmaf(Act::read(x + (first + i) * len + t), weight[(c * in_of_group + i) * kernel + tap], sum);
        }
    Act::write(out + o, bias ? sum + bias[c] : sum);
}

// [channels, height, width] → [patches, out]; the weight is [out, channels, patch, patch].
KERNEL conv2d_patch(Act::Stored* rows, const Act::Stored* image, const float* weight, const float* bias, int64_t total,
                    int64_t out, int64_t channels, int64_t height, int64_t width, int64_t patch) {
    int64_t i = thread_number();
    if (i >= total) return;
    int64_t p = i / out, o = i % out, across = width / patch;
    float sum = 0;
    for (int64_t c = 0; c < channels; c++)
        for (int64_t y = 0; y < patch; y++)
            for (int64_t x = 0; x < patch; x++) {
                int64_t pixel = (c * height + p / across * patch + y) * width + p % across * patch + x;
                sum = fmaf(Act::read(image + pixel), weight[((o * channels + c) * patch + y) * patch + x], sum);
            }
    Act::write(rows + i, bias ? sum + bias[o] : sum);
}

// out[t, c] = bias[c] + Σ weight[c, tap] · u[t - (kernel - 1) + tap, c], where u are a sequence's inputs; those before
// this step are in its state, oldest first.
KERNEL causal_conv1d(Act::Stored* out, const Act::Stored* x, const float* weight, const float* bias,
                     const float* states, const int* query_starts, const int* slots, int64_t total, int64_t channels, int kernel, int seqs,
                     int all_slots, int64_t elements, int64_t offset) {
    int64_t o = thread_number();
    if (o >= total) return;
    int64_t token = o / channels, c = o % channels;
    int s = sequence_of(query_starts, seqs, int(token)), slot = slots[s];
    int64_t start = query_starts[s];
    // A slot that is not there has no state, and a token before its sequence no input.
    if (slot < 0 || slot >= all_slots || token < start || token >= query_starts[s + 1]) return;
    const float* state = states + slot * elements + offset;
    int kept = kernel - 1;
    float sum = bias ? bias[c] : 0.0f;
    for (int tap = 0; tap < kernel; tap++) {
        int64_t row = token - start + tap;
        float u = row < kept ? state[row * channels + c] : Act::read(x + (start + row - kept) * channels + c);
        sum = fmaf(weight[c * kernel + tap], u, sum);
    }
    Act::write(out + o, sum);
}

// The last kernel - 1 inputs of each sequence to its state. A thread has a channel of a sequence; each row comes from one
// behind it, or from this step.
KERNEL causal_conv1d_state(float* states, const Act::Stored* x, const int* query_starts, const int* slots, int64_t total,
                           int64_t channels, int kept, int tokens, int all_slots, int64_t elements, int64_t offset) {
    int64_t o = thread_number();
    if (o >= total) return;
    int64_t s = o / channels, c = o % channels, start = query_starts[s], end = query_starts[s + 1];
    int slot = slots[s];
    if (slot < 0 || slot >= all_slots || end <= start || end > tokens) return;
    float* state = states + slot * elements + offset + c;
    for (int r = 0; r < kept; r++) {
        int64_t row = end - start + r;
        state[r * channels] = row < kept ? state[row * channels] : Act::read(x + (start + row - kept) * channels + c);
    }
}

__device__ __forceinline__ float softplus(float x) { return fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x))); }

// Linear attention over states that decay. A block has a head's state of a sequence, a thread columns of it, and goes
// through the tokens: decay, an update by key and value, and what the state says of the query. `rows` is shared memory
// for a query and a key. `params` are the decay, the bias of the step and the skip of each head.
KERNEL linear_attention(Act::Stored* out, const Act::Stored* x, const Act::Stored* gates, const float* params,
                        float* states, const int* query_starts, const int* slots, int key_heads, int value_heads, int key_dim,
                        int value_dim, int tokens, int all_slots, int64_t elements, int64_t offset, int is_delta,
                        int is_interleaved) {
    extern __shared__ float rows[];
    float *query = rows, *key = rows + key_dim;
    int s = blockIdx.x / value_heads, head = blockIdx.x % value_heads, slot = slots[s];
    int start = query_starts[s], end = query_starts[s + 1];
    // The same for all threads of the block.
    if (slot < 0 || slot >= all_slots || start < 0 || end > tokens) return;
    int64_t keys = int64_t(key_heads) * key_dim, values = int64_t(value_heads) * value_dim;
    int64_t of_key = int64_t(is_interleaved ? head % key_heads : head / (value_heads / key_heads)) * key_dim;
    float* state = states + slot * elements + offset + int64_t(head) * key_dim * value_dim;
    for (int t = start; t < end; t++) {
        const Act::Stored* row = x + t * (2 * keys + values);
        const Act::Stored* from_query = row + of_key + (is_delta ? 0 : values + keys);
        const Act::Stored* from_key = row + of_key + (is_delta ? keys : values);
        const Act::Stored* value = row + int64_t(head) * value_dim + (is_delta ? 2 * keys : 0);
        float of_query = 1, of_keys = 1, step, share;
        if (is_delta) {
            const Act::Stored* gate = gates + int64_t(t) * 2 * value_heads + head;
            step = softplus(Act::read(gate + value_heads) + params[value_heads + head]);
            share = 1.0f / (1.0f + expf(-Act::read(gate)));
            float queries = 0, of_row = 0;
            for (int i = 0; i < key_dim; i++) {
                float q = Act::read(from_query + i), k = Act::read(from_key + i);
                queries = fmaf(q, q, queries);
                of_row = fmaf(k, k, of_row);
            }
            of_query = 1.0f / (sqrtf(queries + 1e-6f) * sqrtf(float(key_dim)));
            of_keys = 1.0f / sqrtf(of_row + 1e-6f);
        } else {
            step = softplus(Act::read(gates + int64_t(t) * value_heads + head) + params[value_heads + head]);
            share = step;
        }
        __syncthreads();
        for (int i = threadIdx.x; i < key_dim; i += blockDim.x) {
            query[i] = Act::read(from_query + i) * of_query;
            key[i] = Act::read(from_key + i) * of_keys;
        }
        __syncthreads();
        float decay = expf(params[head] * step), skip = params[2 * value_heads + head];
        for (int c = threadIdx.x; c < value_dim; c += blockDim.x) {
            float v = Act::read(value + c), said = 0;
            if (is_delta)
                for (int i = 0; i < key_dim; i++) said = fmaf(key[i], decay * state[int64_t(i) * value_dim + c], said);
            float update = share * (v - said), sum = skip * v;
            for (int i = 0; i < key_dim; i++) {
                float* place = state + int64_t(i) * value_dim + c;
                float next = fmaf(key[i], update, decay * *place);
                *place = next;
                sum = fmaf(query[i], next, sum);
            }
            Act::write(out + t * values + int64_t(head) * value_dim + c, sum);
        }
    }
}
