// Mixtures of experts: routing, pairs by expert, weighted sums. The products are in gemm.cu and quant.cu.
#include "common.cuh"

// A NaN ranks with minus infinity.
__device__ __forceinline__ uint32_t rank_of(float logit) {
    return max(key_of(__float_as_uint(logit)), 0x00800000u);
}

// A warp for each token. Experts are taken best first, of equals the lowest: the next is the best of those that come after
// the last one in this order.
KERNEL __launch_bounds__(32) route(int* expert_ids, float* weights, const float* logits, int experts, int top_k,
                                   int renormalise, float scale) {
    int lane = threadIdx.x;
    const float* row = logits + int64_t(blockIdx.x) * experts;
    int* ids = expert_ids + int64_t(blockIdx.x) * top_k;
    float* out = weights + int64_t(blockIdx.x) * top_k;
    uint32_t last_key = 0xffffffffu;
    int last = -1;
    float largest = 0, chosen = 0;
    for (int i = 0; i < top_k; i++) {
        uint32_t best = 0;
        int index = 0x7fffffff;
        for (int e = lane; e < experts; e += 32) {
            uint32_t key = rank_of(row[e]);
            bool after = key < last_key || (key == last_key && e > last);
            if (after && key > best) best = key, index = e;
        }
#pragma unroll
        for (int flip = 16; flip > 0; flip /= 2) {
            uint32_t key = __shfl_xor_sync(ALL_LANES, best, flip);
            int other = __shfl_xor_sync(ALL_LANES, index, flip);
            if (key > best || (key == best && other < index)) best = key, index = other;
        }
        last_key = best, last = index;
        float logit = row[index];
        if (i == 0) largest = best == 0x00800000u ? __uint_as_float(0xff800000u) : logit;
        float weight = expf(logit - largest);
        chosen += weight;
        if (lane == 0) ids[i] = index, out[i] = weight;
    }
    float all = 0;
    for (int e = lane; e < experts; e += 32) all += expf(row[e] - largest);
    all = warp_sum(all);
    float factor = renormalise ? chosen : all;
    if (lane == 0)
        for (int i = 0; i < top_k; i++) out[i] = out[i] / factor * scale;
}

// Pairs by expert, in their own order within one; a thread for each expert of a single block.
KERNEL __launch_bounds__(256) sort_pairs(int* ids, int* tpe, int* offsets, const int* expert_ids, int pairs, int experts) {
    for (int e = threadIdx.x; e < experts; e += blockDim.x) {
        int count = 0;
        for (int p = 0; p < pairs; p++) count += expert_ids[p] == e;
        tpe[e] = count;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        int next = 0;
        for (int e = 0; e < experts; e++) {
            offsets[e] = next;
            next += tpe[e];
        }
        offsets[experts] = next;
    }
    __syncthreads();
    for (int e = threadIdx.x; e < experts; e += blockDim.x) {
        int next = offsets[e];
        for (int p = 0; p < pairs; p++)
            if (expert_ids[p] == e) ids[next++] = p;
    }
}

// gate = silu(gate) · up, in place of `up`.
KERNEL silu_mul(float* up, const float* gate, int64_t total) {
    int64_t i = thread_number();
    if (i < total) up[i] = silu(gate[i]) * up[i];
}

// out[token, d] (+)= Σ weights[pair] · x[pair, d] over the token's pairs, in their order.
KERNEL weighted_sum(float* out, const float* x, const float* weights, int64_t total, int64_t dim, int top_k, int adds) {
    int64_t i = thread_number();
    if (i >= total) return;
    int64_t first = i / dim * top_k, d = i % dim;
    float sum = 0;
    for (int j = 0; j < top_k; j++) sum = fmaf(weights[first + j], x[(first + j) * dim + d], sum);
    out[i] = adds ? out[i] + sum : sum;
}
