// The weighted sums of what a token's experts make of its pairs, with quantised matrices and for a few tokens:
// out[token, :] (+)= Σ weight · (x of the pair · matrix of its expert + bias).
//
// Each is one product whose k is that of all the token's pairs, one after the other, so that short rows of tiles keep all warps
// of a block busy and a block's sums meet once. How a warp's tiles come is as in quant_gemv.cuh.
#include "common.cuh"
#ifdef ACT_16  // activations of f32 have the products of integers in quant.cu
#include "quant_gemv.cuh"

// What is summed. Experts have whole rows of tiles.
struct PairSums {
    Act::Stored* out;
    const int* expert_ids;
    const float *weights, *biases;
    int tokens, top_k, n, experts, adds;

    // An expert that is not there counts as the first, with a weight of zero.
    __device__ __forceinline__ int expert(int pair) const {
        int of = expert_ids[pair];
        return of >= 0 && of < experts ? of : 0;
    }
    __device__ __forceinline__ float weight(int pair) const {
        int of = expert_ids[pair];
        return of >= 0 && of < experts ? weights[pair] : 0.0f;
    }
    __device__ __forceinline__ void write(int token, int column, float sum) const {
        for (int i = 0; biases && i < top_k; i++) {
            int pair = token * top_k + i;
            sum = fmaf(weight(pair), biases[int64_t(expert(pair)) * n + column], sum);
        }
        Act::Stored* at = out + int64_t(token) * n + column;
        Act::write(at, adds ? Act::read(at) + sum : sum);
    }
};

template <class S>
__device__ __forceinline__ void sums_of_pairs(const PairSums& of, const Weight& w, int groups, int stages, const GemvInput& in) {
    extern __shared__ uint4 memory[];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, k_tiles = groups / TILE_GROUPS;
    int row_tiles = of.n / TILE_ROWS, of_token = of.top_k * k_tiles, count = of.tokens * row_tiles;
    const int of_ring = stages * w.tile_bytes, bytes = of_ring + S::FACTORS * int(sizeof(float2));
    uint8_t *lookup = reinterpret_cast<uint8_t*>(memory), *ring = lookup + S::OF_BLOCK + warp * bytes;
    float2* factors = reinterpret_cast<float2*>(ring + of_ring);
    float* shared = reinterpret_cast<float*>(lookup + S::OF_BLOCK + WARPS * bytes);

    if (S::OF_BLOCK > 0) {
        make_lookup(memory, w.table);
        __syncthreads();
    }
    wait_for_previous();
    int asked = warp < of_token ? blockIdx.x : count, asked_tile = warp, into = 0;
    auto ask = [&] {
        if (asked < count) {
            int token = asked / row_tiles, pair = asked_tile / k_tiles;
            int64_t row_tile = int64_t(of.expert(token * of.top_k + pair)) * row_tiles + (asked - token * row_tiles);
            S::copy(ring + into, w.tiles + (row_tile * k_tiles + (asked_tile - pair * k_tiles)) * w.tile_bytes, w.tile_bytes);
            into += w.tile_bytes, asked_tile += WARPS;
            if (into == of_ring) into = 0;
            if (asked_tile >= of_token) asked_tile = warp, asked += gridDim.x;
        }
        cp_async_commit();
    };
    for (int i = 0; i < stages - 1; i++) ask();

    int slot = 0, turn = 0;
    for (int number = blockIdx.x; number < count; number += gridDim.x, turn ^= 1) {
        int token = number / row_tiles;
        float all[2] = {0, 0};
#pragma unroll 1
        for (int tile = warp; tile < of_token; tile += WARPS) {
            if (stages == MAX_STAGES) cp_async_wait<MAX_STAGES - 2>();
            else cp_async_wait<0>();
            __syncwarp();
            ask();
            const uint8_t* from = ring + slot;
            S::make_factors(factors, from, w);
            __syncwarp();
            int pair = tile / k_tiles, k = (tile - pair * k_tiles) * (TILE_GROUPS * 32);
            pair += token * of.top_k;
            const int left = in.stride - k - lane % 4 * 4;
            const uint16_t* x = in.x + int64_t(pair) * in.stride + lane % 4 * 4 + k;
            float sums[4] = {0, 0, 0, 0};
            if (left >= TILE_GROUPS * 32 - 16) S::template add<false, true>(sums, from, factors, x, left, w, lookup);
            else S::template add<false, false>(sums, from, factors, x, left, w, lookup);
            float weight = of.weight(pair);
            all[0] = fmaf(weight, sums[0], all[0]), all[1] = fmaf(weight, sums[2], all[1]);
            slot += w.tile_bytes;
            if (slot == of_ring) slot = 0;
        }
        // Sums of the warps, in their order. Two places in turn: one barrier is enough.
        float* of_block = shared + turn * (WARPS * TILE_ROWS);
        if (lane % 4 == 0) of_block[warp * TILE_ROWS + lane / 4] = all[0], of_block[warp * TILE_ROWS + lane / 4 + 8] = all[1];
        __syncthreads();
        if (threadIdx.x >= TILE_ROWS) continue;
        float sum = 0;
        for (int i = 0; i < WARPS; i++) sum += of_block[i * TILE_ROWS + threadIdx.x];
        of.write(token, (number - token * row_tiles) * TILE_ROWS + threadIdx.x, sum);
    }
}

#define QUANT_DOWN(NAME, BITS, TABLE)                                                                                   \
    KERNEL GEMV_BOUNDS                                                                                                  \
        quant_down_##NAME(Act::Stored* out, const uint16_t* x, int stride, WEIGHT_PARAMS, const int* expert_ids,        \
                          const float* weights, const float* biases, int tokens, int top_k, int groups, int n,          \
                          int experts, int adds, int stages) {                                                          \
        Weight w = WEIGHT;                                                                                              \
        GemvInput in = {x, stride};                                                                                     \
        PairSums of = {out, expert_ids, weights, biases, tokens, top_k, n, experts, adds};                              \
        sums_of_pairs<PackedTile<BITS, TABLE>>(of, w, groups, stages, in);                                              \
    }
QUANT_DOWN(2, 2, false)
QUANT_DOWN(3, 3, false)
QUANT_DOWN(4, 4, false)
QUANT_DOWN(table, 4, true)
QUANT_DOWN(5, 5, false)
QUANT_DOWN(6, 6, false)
QUANT_DOWN(8, 8, false)
#endif
