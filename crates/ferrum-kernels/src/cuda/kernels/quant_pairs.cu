// Products of pairs of tokens and experts with the quantised matrices of the experts, for a few tokens.
#include "common.cuh"
#ifdef ACT_16  // activations of f32 have the products of integers in quant.cu
#include "quant_pairs.cuh"

// Each pair by itself, with a row of x and the matrix of its expert.
struct Pairs {
    const int *expert_ids, *ids;
    int pairs, n, experts, share, each;

    __device__ __forceinline__ RowTile row_tile(int number) const {
        int of = number / each, pair = ids[of];
        int expert = pair >= 0 && pair < pairs ? expert_ids[pair] : -1;
        if (expert < 0 || expert >= experts) return {0, 0, 0, 0, 0, 0, 0};
        return tile_of_expert(expert, n, number - of * each, pair, 1);
    }
    __device__ __forceinline__ int pair(const RowTile& row_tile, int) const { return row_tile.first; }
};
#define QUANT_PAIRS(NAME, BITS, TABLE)                                                                                  \
    KERNEL GEMV_BOUNDS quant_pairs_##NAME(PAIR_PARAMS) {                                                                \
        Weight w = WEIGHT;                                                                                              \
        GemvInput in = {x, stride};                                                                                     \
        PairTiles<Pairs> row_tiles = {out, {expert_ids, ids, pairs, n, experts, share, each}, biases};                  \
        gemv_row_tiles<PackedTile<BITS, TABLE>, false, false>(row_tiles, pairs * each, w, groups, stages, along, in);   \
    }                                                                                                                   \
    KERNEL GEMV_BOUNDS                                                                                                  \
        quant_gated_##NAME(PAIR_PARAMS, const uint8_t* up_tiles, const float* up_biases, int activation, float alpha,   \
                           float limit) {                                                                               \
        Weight w = WEIGHT;                                                                                              \
        GemvInput in = {x, stride};                                                                                     \
        GatedTiles<Pairs> row_tiles = {out,      {expert_ids, ids, pairs, n, experts, share, each}, biases,             \
                                       up_tiles, up_biases,                                         {activation, alpha, limit}}; \
        gemv_row_tiles<PackedTile<BITS, TABLE>, false, false>(row_tiles, pairs * each, w, groups, stages, along, in);   \
    }
QUANT_PAIRS(2, 2, false)
QUANT_PAIRS(3, 3, false)
QUANT_PAIRS(4, 4, false)
QUANT_PAIRS(table, 4, true)
QUANT_PAIRS(5, 5, false)
QUANT_PAIRS(6, 6, false)
QUANT_PAIRS(8, 8, false)
#endif
