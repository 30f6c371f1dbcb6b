// Linear attention over states that decay: Mamba-2 (Dao and Gu, 2024) and the gated delta rule (Yang et al., 2024), token by
// token. A head's state is [key_dim, value_dim], and its columns do not need each other, so each warp goes through a
// sequence's tokens with some of them. One order of sums for decodes, chunks and prompts.
#include "common.cuh"

#define LINEAR_PARAMS                                                                                                      \
    Act::Stored *out, const Act::Stored *x, const Act::Stored *gates, const float *params, float *states,                  \
        const int *query_starts, const int *slots, int key_heads, int value_heads, int key_dim, int value_dim, int tokens, \
        int all_slots, int64_t elements, int64_t offset, int is_delta, int is_interleaved
#define LINEAR                                                                                                             \
    {out, x, gates, params, states, query_starts, slots, key_heads, value_heads, key_dim, value_dim, tokens, all_slots,    \
     elements, offset, is_delta, is_interleaved}

struct Linear {
    Act::Stored* out;
    const Act::Stored *x, *gates;
    // The decay, the bias of the step and the skip of each head.
    const float* params;
    float* states;
    const int *query_starts, *slots;
    int key_heads, value_heads, key_dim, value_dim, tokens, all_slots;
    int64_t elements, offset;
    int is_delta, is_interleaved;
};

__device__ __forceinline__ float softplus(float x) { return fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x))); }

// A head of a sequence: its tokens, its state, and where its part of a token's row begins.
struct LinearHead {
    int start, end, head;
    float* state;
    int64_t row, query, key, value;

    // False where there is nothing to do.
    __device__ __forceinline__ bool find(const Linear& c, int s, int h) {
        int slot = c.slots[s];
        start = c.query_starts[s], end = c.query_starts[s + 1], head = h;
        int64_t keys = int64_t(c.key_heads) * c.key_dim, values = int64_t(c.value_heads) * c.value_dim;
        int64_t of_key = int64_t(c.is_interleaved ? h % c.key_heads : h / (c.value_heads / c.key_heads)) * c.key_dim;
        row = 2 * keys + values;
        query = of_key + (c.is_delta ? 0 : values + keys);
        key = of_key + (c.is_delta ? keys : values);
        value = int64_t(h) * c.value_dim + (c.is_delta ? 2 * keys : 0);
        state = c.states + slot * c.elements + c.offset + int64_t(h) * c.key_dim * c.value_dim;
        return slot >= 0 && slot < c.all_slots && start >= 0 && start < end && end <= c.tokens;
    }
};

// What a head's gates say of a token: how much of the state stays, and how much of an update comes to it.
struct Gate {
    float decay, share;
    __device__ __forceinline__ Gate(const Linear& c, int head, int token) {
        const Act::Stored* gate = c.gates + int64_t(token) * (c.is_delta ? 2 : 1) * c.value_heads + head;
        float raw = Act::read(gate + (c.is_delta ? c.value_heads : 0));
        float step = softplus(raw + c.params[c.value_heads + head]);
        decay = expf(c.params[head] * step);
        share = c.is_delta ? 1.0f / (1.0f + expf(-Act::read(gate))) : step;
    }
};

// What queries and keys of the delta rule are multiplied with, by the squares of their lengths.
__device__ __forceinline__ float query_factor(float squares, int key_dim) {
    return 1.0f / (sqrtf(squares + 1e-6f) * sqrtf(float(key_dim)));
}
__device__ __forceinline__ float key_factor(float squares) { return 1.0f / sqrtf(squares + 1e-6f); }

// A token's query and key as a warp has them, element `lane + 32 · j` in a lane, and a value in each lane.
template <int EACH>
struct LinearRow {
    float query[EACH], key[EACH], value;

    __device__ __forceinline__ void load(const Linear& c, const LinearHead& h, int token, int column) {
        const Act::Stored* from = c.x + token * h.row;
#pragma unroll
        for (int j = 0; j < EACH; j++) {
            int i = threadIdx.x % 32 + 32 * j;
            bool there = i < c.key_dim;
            query[j] = there ? Act::read(from + h.query + i) : 0.0f;
            key[j] = there ? Act::read(from + h.key + i) : 0.0f;
        }
        value = column < c.value_dim ? Act::read(from + h.value + column) : 0.0f;
    }
};

__device__ __forceinline__ void read4(const float* at, float (&to)[4]) {
    uint4 bits = load16(at);
    to[0] = __uint_as_float(bits.x), to[1] = __uint_as_float(bits.y);
    to[2] = __uint_as_float(bits.z), to[3] = __uint_as_float(bits.w);
}
// The sum over the PARTS lanes of a column, in all of them.
template <int PARTS>
__device__ __forceinline__ float column_sum(float x) {
#pragma unroll
    for (int flip = 1; flip < PARTS; flip *= 2) x += __shfl_xor_sync(ALL_LANES, x, flip);
    return x;
}

#define LINEAR_WARPS 4

// The state stays in registers from the first token to the last. PARTS lanes of a warp have a column of it; a lane has four
// rows of every 4 · PARTS, up to ROWS. Queries and keys lie in memory of the warp's own, so nobody waits at a barrier,
// and those of the next token are on their way meanwhile.
template <int ROWS, int PARTS>
__device__ __forceinline__ void linear_in_registers(const Linear& c) {
    constexpr int EACH = ROWS * PARTS / 32, COLUMNS = 32 / PARTS;
    __shared__ uint4 rows[LINEAR_WARPS][2][ROWS * PARTS / 4];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, part = lane % PARTS;
    int groups = (c.value_dim + LINEAR_WARPS * COLUMNS - 1) / (LINEAR_WARPS * COLUMNS);
    int block = blockIdx.x / groups;
    int column = (blockIdx.x % groups * LINEAR_WARPS + warp) * COLUMNS + lane / PARTS;
    LinearHead h;
    if (!h.find(c, block / c.value_heads, block % c.value_heads)) return;
    bool there = column < c.value_dim;
    float* query = reinterpret_cast<float*>(rows[warp][0]);
    float* key = reinterpret_cast<float*>(rows[warp][1]);
    // The row of element e of a lane.
    auto place = [&](int e) { return (e / 4 * PARTS + part) * 4 + e % 4; };
    float state[ROWS];
#pragma unroll
    for (int e = 0; e < ROWS; e++)
        state[e] = there && place(e) < c.key_dim ? h.state[int64_t(place(e)) * c.value_dim + column] : 0.0f;
    float skip = c.params[2 * c.value_heads + h.head];
    Act::Stored* to = c.out + int64_t(h.head) * c.value_dim + column;

    LinearRow<EACH> now;
    now.load(c, h, h.start, column);
    for (int t = h.start; t < h.end; t++) {
        LinearRow<EACH> next;
        next.load(c, h, min(t + 1, h.end - 1), column);
        Gate gate(c, h.head, t);
        float queries = 0, keys = 0, query_key = 0;
#pragma unroll
        for (int j = 0; j < EACH; j++) {
            queries = fmaf(now.query[j], now.query[j], queries);
            keys = fmaf(now.key[j], now.key[j], keys);
            query_key = fmaf(now.query[j], now.key[j], query_key);
        }
        query_key = warp_sum(query_key);
        float of_query = 1, of_key = 1;
        if (c.is_delta) of_query = query_factor(warp_sum(queries), c.key_dim), of_key = key_factor(warp_sum(keys));
#pragma unroll
        for (int j = 0; j < EACH; j++) {
            query[lane + 32 * j] = now.query[j] * of_query;
            key[lane + 32 * j] = now.key[j] * of_key;
        }
        __syncwarp();
        // Products of the decayed state with key and query. The update adds `query_key` times itself to the latter, so both
        // are made in one pass.
        float old = 0, sum = 0;
#pragma unroll
        for (int e = 0; e < ROWS; e += 4) {
            float k[4], q[4];
            read4(key + place(e), k);
            read4(query + place(e), q);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                state[e + i] *= gate.decay;
                old = fmaf(k[i], state[e + i], old);
                sum = fmaf(q[i], state[e + i], sum);
            }
        }
        old = c.is_delta ? column_sum<PARTS>(old) : 0.0f;
        sum = column_sum<PARTS>(sum);
        float update = gate.share * (now.value - old);
#pragma unroll
        for (int e = 0; e < ROWS; e += 4) {
            float k[4];
            read4(key + place(e), k);
#pragma unroll
            for (int i = 0; i < 4; i++) state[e + i] = fmaf(k[i], update, state[e + i]);
        }
        sum = fmaf(query_key * of_query * of_key, update, fmaf(skip, now.value, sum));
        if (there && part == 0) Act::write(to + t * int64_t(c.value_heads) * c.value_dim, sum);
        __syncwarp();
        now = next;
    }
#pragma unroll
    for (int e = 0; e < ROWS; e++)
        if (there && place(e) < c.key_dim) h.state[int64_t(place(e)) * c.value_dim + column] = state[e];
}

// Keys of up to as many elements as the name says; `conv.rs` has the same.
#define LINEAR_KERNEL(NAME, ROWS, PARTS)                                                                                   \
    KERNEL __launch_bounds__(LINEAR_WARPS * 32) NAME(LINEAR_PARAMS) {                                                      \
        wait_for_previous();                                                                                               \
        Linear c = LINEAR;                                                                                                 \
        linear_in_registers<ROWS, PARTS>(c);                                                                               \
    }
LINEAR_KERNEL(linear_attention_32, 8, 4)
LINEAR_KERNEL(linear_attention_64, 16, 4)
LINEAR_KERNEL(linear_attention_128, 32, 4)
LINEAR_KERNEL(linear_attention_256, 32, 8)

// Keys of any length: the state stays in memory. A block has a head of a sequence, a thread columns of it. Shared memory has a
// query and a key.
KERNEL linear_attention_any(LINEAR_PARAMS) {
    wait_for_previous();
    Linear c = LINEAR;
    extern __shared__ float rows[];
    float *query = rows, *key = rows + c.key_dim;
    LinearHead h;
    // The same for all threads of the block.
    if (!h.find(c, blockIdx.x / c.value_heads, blockIdx.x % c.value_heads)) return;
    float skip = c.params[2 * c.value_heads + h.head];
    for (int t = h.start; t < h.end; t++) {
        const Act::Stored* row = c.x + t * h.row;
        Gate gate(c, h.head, t);
        float of_query = 1, of_key = 1;
        if (c.is_delta) {
            float queries = 0, keys = 0;
            for (int i = 0; i < c.key_dim; i++) {
                float q = Act::read(row + h.query + i), k = Act::read(row + h.key + i);
                queries = fmaf(q, q, queries);
                keys = fmaf(k, k, keys);
            }
            of_query = query_factor(queries, c.key_dim), of_key = key_factor(keys);
        }
        __syncthreads();
        for (int i = threadIdx.x; i < c.key_dim; i += blockDim.x) {
            query[i] = Act::read(row + h.query + i) * of_query;
            key[i] = Act::read(row + h.key + i) * of_key;
        }
        __syncthreads();
        for (int column = threadIdx.x; column < c.value_dim; column += blockDim.x) {
            float v = Act::read(row + h.value + column), old = 0;
            if (c.is_delta)
                for (int i = 0; i < c.key_dim; i++)
                    old = fmaf(key[i], gate.decay * h.state[int64_t(i) * c.value_dim + column], old);
            float update = gate.share * (v - old), sum = skip * v;
            for (int i = 0; i < c.key_dim; i++) {
                float* place = h.state + int64_t(i) * c.value_dim + column;
                float next = fmaf(key[i], update, gate.decay * *place);
                *place = next;
                sum = fmaf(query[i], next, sum);
            }
            Act::write(c.out + t * int64_t(c.value_heads) * c.value_dim + int64_t(h.head) * c.value_dim + column, sum);
        }
    }
}
