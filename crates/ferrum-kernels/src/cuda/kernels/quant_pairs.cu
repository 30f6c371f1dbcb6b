// Products of pairs of tokens and experts with the quantised matrices of the experts, for a few tokens.
#include "common.cuh"
#ifdef ACT_16  // activations of f32 have the products of integers in quant.cu
#include "quant_gemv.cuh"

// Pairs of tokens and experts, each with a row of x and the matrix of its expert; the rows of all experts are one matrix, so an
// expert may begin and end within a row of tiles. `ids` has pairs by expert.
struct Pairs {
    const int *expert_ids, *ids;
    // `each` rows of tiles for a pair, at most.
    int pairs, n, experts, share, each;

    __device__ __forceinline__ RowTile row_tile(int number) const {
        int of = number / each, pair = ids[of];
        int expert = pair >= 0 && pair < pairs ? expert_ids[pair] : -1;
        if (expert < 0 || expert >= experts) return {0, 0, 0, 0, 0, 0};
        int64_t first = int64_t(expert) * n, row_tile = first / TILE_ROWS + number - of * each;
        int before = int(row_tile * TILE_ROWS - first);
        // Behind the last expert there is none.
        if (before >= n) return {0, 0, 0, 0, 0, 0};
        return {row_tile, max(-before, 0), min(n - before, TILE_ROWS), pair / share, int64_t(pair) * n + before, expert};
    }
    // The bias of the expert's row that goes to `at` of the output.
    __device__ __forceinline__ float bias(const float* biases, const RowTile& row_tile, int64_t at) const {
        return biases ? biases[int64_t(row_tile.expert) * n + at % n] : 0.0f;
    }
};
struct PairTiles {
    static constexpr int MATRICES = 1;
    Act::Stored* out;
    Pairs of;
    const float* biases;

    __device__ __forceinline__ const uint8_t* second_tiles() const { return nullptr; }
    __device__ __forceinline__ RowTile operator()(int number) const { return of.row_tile(number); }
    __device__ __forceinline__ void write(const RowTile& row_tile, int, int row, const float (&sums)[1]) const {
        int64_t at = row_tile.out + row;
        Act::write(out + at, sums[0] + of.bias(biases, row_tile, at));
    }
};
// Gate and up, which become one number.
struct GatedTiles {
    static constexpr int MATRICES = 2;
    Act::Stored* out;
    Pairs of;
    const float* biases;
    const uint8_t* up_tiles;
    const float* up_biases;
    Gating gated;

    __device__ __forceinline__ const uint8_t* second_tiles() const { return up_tiles; }
    __device__ __forceinline__ RowTile operator()(int number) const { return of.row_tile(number); }
    __device__ __forceinline__ void write(const RowTile& row_tile, int, int row, const float (&sums)[2]) const {
        int64_t at = row_tile.out + row;
        Act::write(out + at, gated(sums[0] + of.bias(biases, row_tile, at), sums[1] + of.bias(up_biases, row_tile, at)));
    }
};
#define PAIR_PARAMS                                                                                                     \
    Act::Stored *out, const uint16_t *x, int stride, WEIGHT_PARAMS, const int *expert_ids, const int *ids, int pairs,   \
        int groups, int n, int experts, int share, int each, int stages, int along, const float *biases
#define QUANT_PAIRS(NAME, BITS, TABLE)                                                                                  \
    KERNEL GEMV_BOUNDS quant_pairs_##NAME(PAIR_PARAMS) {                                           \
        Weight w = WEIGHT;                                                                                              \
        GemvInput in = {x, stride, 1};                                                                                  \
        PairTiles row_tiles = {out, {expert_ids, ids, pairs, n, experts, share, each}, biases};                           \
        gemv_row_tiles<PackedTile<BITS, TABLE>, false, false>(row_tiles, pairs * each, w, groups, stages, along, in);                   \
    }                                                                                                                   \
    KERNEL GEMV_BOUNDS                                                                             \
        quant_gated_##NAME(PAIR_PARAMS, const uint8_t* up_tiles, const float* up_biases, int activation, float alpha,   \
                           float limit) {                                                                               \
        Weight w = WEIGHT;                                                                                              \
        GemvInput in = {x, stride, 1};                                                                                  \
        GatedTiles row_tiles = {out,      {expert_ids, ids, pairs, n, experts, share, each}, biases,                      \
                              up_tiles, up_biases,                                         {activation, alpha, limit}}; \
        gemv_row_tiles<PackedTile<BITS, TABLE>, false, false>(row_tiles, pairs * each, w, groups, stages, along, in);                   \
    }
QUANT_PAIRS(2, 2, false)
QUANT_PAIRS(3, 3, false)
QUANT_PAIRS(4, 4, false)
QUANT_PAIRS(table, 4, true)
QUANT_PAIRS(5, 5, false)
QUANT_PAIRS(6, 6, false)
QUANT_PAIRS(8, 8, false)
#endif
