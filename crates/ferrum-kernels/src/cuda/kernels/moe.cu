// Mixtures of experts: routing, pairs by expert, weighted sums. The products are in gemm.cu and quant.cu.
#include "common.cuh"

// A NaN ranks with minus infinity, and -0 with 0.
__device__ __forceinline__ uint32_t rank_of(float value) {
    return max(key_of(__float_as_uint(value + 0.0f)), 0x00800000u);
}

// A row of logits and what experts are ranked by.
struct Scores {
    const float* row;
    const float* bias;
    int experts;
    int sigmoid;    // of each expert by itself, instead of its probability
    int by_logit;   // ranked by logits
    float best, all;

    __device__ float score(int e) const {
        return sigmoid ? 1.0f / (1.0f + expf(-row[e])) : expf(row[e] - best) / all;
    }
    __device__ float value(int e) const { return by_logit ? row[e] : score(e) + (bias ? bias[e] : 0.0f); }
};

// Groups of experts, at most.
#define MAX_GROUPS 64

// The groups that a token takes, a bit for each: those with the best expert, or the best sum of two. A warp, with room for a
// number for each.
__device__ uint64_t best_groups(const Scores& scores, int groups, int top, int best_two, float* ranks) {
    const float least = __uint_as_float(0xff800000u);
    int size = scores.experts / groups;
    for (int g = threadIdx.x % 32; g < groups; g += 32) {
        float first = least, second = least;
        for (int e = g * size; e < (g + 1) * size; e++) {
            float value = fmaxf(scores.value(e), least);
            if (value > first) second = first, first = value;
            else if (value > second) second = value;
        }
        ranks[g] = best_two && size > 1 ? first + second : first;
    }
    __syncwarp();
    uint64_t taken = 0;
    for (int i = 0; i < top; i++) {
        uint32_t best = 0;
        int group = 0;
        for (int g = 0; g < groups; g++) {
            uint32_t key = rank_of(ranks[g]);
            if (!(taken >> g & 1) && key > best) best = key, group = g;
        }
        taken |= uint64_t(1) << group;
    }
    return taken;
}

// Experts of a token whose ranks a lane keeps in registers.
#define KEPT_RANKS 8

#define ROUTE_PARAMS                                                                                                    \
    int *expert_ids, float *weights, const float *logits, const float *bias, int experts, int top_k, int renormalise,   \
        float scale, int sigmoid, int by_logit, int groups, int top_groups, int best_two

// The experts of a token, by a warp. They are taken best first, of equals the lowest: the next is the best of those that come
// after the last one in this order. Those of groups that are not taken rank with minus infinity.
__device__ __forceinline__ void route_token(int token, float* ranks, ROUTE_PARAMS) {
    int lane = threadIdx.x % 32;
    const float* row = logits + int64_t(token) * experts;
    int* ids = expert_ids + int64_t(token) * top_k;
    float* out = weights + int64_t(token) * top_k;
    // Of probabilities, the sum is that over the chosen from the start: their shares of all may round to 0.
    bool among_chosen = renormalise && !sigmoid;
    float best_logit = __uint_as_float(0xff800000u), all = 0;
    if (!sigmoid && !(by_logit && among_chosen)) {
        for (int e = lane; e < experts; e += 32) best_logit = fmaxf(best_logit, row[e]);
        best_logit = warp_max(best_logit);
        for (int e = lane; e < experts; e += 32) all += expf(row[e] - best_logit);
        all = warp_sum(all);
    }
    Scores scores = {row, bias, experts, sigmoid, by_logit, best_logit, all};
    uint64_t taken = groups ? best_groups(scores, groups, top_groups, best_two, ranks) : 0;
    int size = groups ? experts / groups : experts;
    auto rank = [&](int e) {
        bool is_taken = !groups || (taken >> (e / size) & 1);
        return is_taken ? rank_of(scores.value(e)) : 0x00800000u;
    };
    uint32_t kept[KEPT_RANKS];
#pragma unroll
    for (int i = 0; i < KEPT_RANKS; i++) kept[i] = i * 32 + lane < experts ? rank(i * 32 + lane) : 0;
    uint32_t last_key = 0xffffffffu;
    int last = -1;
    for (int i = 0; i < top_k; i++) {
        uint32_t best = 0;
        int index = 0x7fffffff;
        auto consider = [&](int e, uint32_t key) {
            bool after = key < last_key || (key == last_key && e > last);
            if (after && key > best) best = key, index = e;
        };
#pragma unroll
        for (int j = 0; j < KEPT_RANKS; j++) consider(j * 32 + lane, kept[j]);
        for (int e = KEPT_RANKS * 32 + lane; e < experts; e += 32) consider(e, rank(e));
        uint32_t most = __reduce_max_sync(ALL_LANES, best);
        last = int(__reduce_min_sync(ALL_LANES, best == most ? uint32_t(index) : 0x7fffffffu)), last_key = most;
        if (lane == 0) ids[i] = last;
    }
    __syncwarp();
    float most = __uint_as_float(0xff800000u), chosen = 0;
    for (int i = lane; among_chosen && i < top_k; i += 32) most = fmaxf(most, row[ids[i]]);
    most = warp_max(most);
    for (int i = lane; i < top_k; i += 32) {
        out[i] = among_chosen ? expf(row[ids[i]] - most) : scores.score(ids[i]);
        chosen += out[i];
    }
    chosen = warp_sum(chosen);
    float factor = renormalise ? (sigmoid ? chosen + 1e-20f : chosen) : 1.0f;
    for (int i = lane; i < top_k; i += 32) out[i] = out[i] / factor * scale;
}
#define ROUTE_TOKEN(TOKEN, RANKS)                                                                                       \
    route_token(TOKEN, RANKS, expert_ids, weights, logits, bias, experts, top_k, renormalise, scale, sigmoid, by_logit, \
                groups, top_groups, best_two)

// A warp for each token.
KERNEL __launch_bounds__(32) route(ROUTE_PARAMS) {
    __shared__ float ranks[MAX_GROUPS];
    wait_for_previous();
    ROUTE_TOKEN(blockIdx.x, ranks);
}

// Tokens and pairs of `route_pairs`, at most; `moe.rs` has the same.
#define ROUTED_TOKENS 8
#define ROUTED_PAIRS 256

// `route` and `sort_pairs` of a few tokens, by one block: a warp for each token, then a thread for each expert.
KERNEL __launch_bounds__(32 * ROUTED_TOKENS) route_pairs(ROUTE_PARAMS, int* ids, int* tpe, int* offsets, int tokens) {
    __shared__ float ranks[ROUTED_TOKENS][MAX_GROUPS];
    __shared__ int chosen[ROUTED_PAIRS];
    wait_for_previous();
    int warp = threadIdx.x / 32, pairs = tokens * top_k;
    if (warp < tokens) ROUTE_TOKEN(warp, ranks[warp]);
    __syncthreads();
    for (int p = threadIdx.x; p < pairs; p += blockDim.x) chosen[p] = expert_ids[p];
    __syncthreads();
    for (int expert = threadIdx.x; expert < experts; expert += blockDim.x) {
        int lower = 0, own = 0;
        for (int p = 0; p < pairs; p++) lower += chosen[p] < expert, own += chosen[p] == expert;
        tpe[expert] = own;
        offsets[expert] = lower;
        if (expert == experts - 1) offsets[experts] = pairs;
        for (int p = 0; own > 0 && p < pairs; p++)
            if (chosen[p] == expert) ids[lower++] = p;
    }
}

// Pairs by expert, in their own order within one. A warp for each expert, which reads all pairs twice: it counts those of
// lower experts and its own, then writes its own behind the former. So no warp waits for another.
KERNEL __launch_bounds__(128) sort_pairs(int* ids, int* tpe, int* offsets, const int* expert_ids, int pairs, int experts) {
    wait_for_previous();
    int expert = int(thread_number() / 32), lane = threadIdx.x % 32;
    if (expert >= experts) return;
    int lower = 0, own = 0;
#pragma unroll 4
    for (int p = lane; p < pairs; p += 32) {
        int of = expert_ids[p];
        lower += of >= 0 && of < expert;
        own += of == expert;
    }
#pragma unroll
    for (int flip = 16; flip > 0; flip /= 2) {
        lower += __shfl_xor_sync(ALL_LANES, lower, flip);
        own += __shfl_xor_sync(ALL_LANES, own, flip);
    }
    if (lane == 0) {
        tpe[expert] = own;
        offsets[expert] = lower;
        if (expert == experts - 1) offsets[experts] = lower + own;
    }
    if (own == 0) return;
#pragma unroll 4
    for (int first = 0; first < pairs; first += 32) {
        int p = first + lane;
        bool mine = p < pairs && expert_ids[p] == expert;
        unsigned all = __ballot_sync(ALL_LANES, mine);
        if (mine) ids[lower + __popc(all & ((1u << lane) - 1))] = p;
        lower += __popc(all);
    }
}

// What a pair's products with gate and up become, in place of `up`: silu(gate) · up, or with a limit the bounded form of
// GPT-OSS.
KERNEL activate_pairs(Act::Stored* up, const Act::Stored* gate, int64_t total, float alpha, float limit) {
    wait_for_previous();
    int64_t i = thread_number();
    if (i >= total) return;
    float g = Act::read(gate + i), u = Act::read(up + i);
    Gating gated = {limit == 0.0f ? 1 : 3, alpha, limit};
    Act::write(up + i, gated(g, u));
}

// out[pair, d] += bias[expert of the pair, d].
KERNEL add_pair_bias(Act::Stored* out, const float* bias, const int* expert_ids, int64_t total, int64_t dim, int experts) {
    wait_for_previous();
    int64_t i = thread_number();
    if (i >= total) return;
    int expert = expert_ids[i / dim];
    if (expert < 0 || expert >= experts) return;
    Act::write(out + i, Act::read(out + i) + bias[int64_t(expert) * dim + i % dim]);
}

// weights[pair] *= factors[expert of the pair].
KERNEL scale_weights(float* weights, const float* factors, const int* expert_ids, int64_t total, int experts) {
    wait_for_previous();
    int64_t i = thread_number();
    if (i >= total) return;
    int expert = expert_ids[i];
    if (expert >= 0 && expert < experts) weights[i] *= factors[expert];
}

// out[token, d] (+)= Σ weights[pair] · x[pair, d] over the token's pairs, in their order.
template <class OUT>
__device__ __forceinline__ void sum_pairs(typename OUT::Stored* out, const Act::Stored* x, const float* weights,
                                          int64_t total, int64_t dim, int top_k, int adds) {
    wait_for_previous();
    int64_t i = thread_number();
    if (i >= total) return;
    int64_t first = i / dim * top_k, d = i % dim;
    float sum = 0;
    for (int j = 0; j < top_k; j++) sum = fmaf(weights[first + j], Act::read(x + (first + j) * dim + d), sum);
    OUT::write(out + i, adds ? OUT::read(out + i) + sum : sum);
}
#define WEIGHTED_SUM(NAME, OUT)                                                                                         \
    KERNEL NAME(OUT::Stored* out, const Act::Stored* x, const float* weights, int64_t total, int64_t dim, int top_k,    \
                int adds) {                                                                                             \
        sum_pairs<OUT>(out, x, weights, total, dim, top_k, adds);                                                       \
    }
WEIGHTED_SUM(weighted_sum_act, Act)
WEIGHTED_SUM(weighted_sum_f32, F32)
