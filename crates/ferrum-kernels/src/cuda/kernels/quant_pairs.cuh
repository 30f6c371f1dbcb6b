// What becomes of the sums of pairs of tokens and experts. `OF` says which rows of tiles there are: of each pair
// (quant_pairs.cu), or of up to eight pairs of an expert (quant_groups.cu). The rows of all experts are one matrix, so an expert
// may begin and end within a row of tiles.
#pragma once
#include "quant_gemv.cuh"

// Row of tiles `number` of an expert of `n` rows, for `rows` pairs from `first` on.
__device__ __forceinline__ RowTile tile_of_expert(int expert, int n, int number, int first, int rows) {
    int64_t begin = int64_t(expert) * n, row_tile = begin / TILE_ROWS + number;
    int before = int(row_tile * TILE_ROWS - begin);
    // An expert that begins with a tile has one less than others.
    if (before >= n) return {0, 0, 0, 0, 0, 0, 0};
    return {row_tile, max(-before, 0), min(n - before, TILE_ROWS), first, rows, before, expert};
}

// What the kernels are told: `ids` has pairs by expert, whose own begin at `offsets`; `groups_at` is where groups of pairs lie in
// shared memory. There are `each` rows of tiles for a pair or group, at most.
#define PAIR_PARAMS                                                                                                     \
    Act::Stored *out, const uint16_t *x, int stride, WEIGHT_PARAMS, const int *expert_ids, const int *offsets,          \
        const int *ids, int pairs, int groups_at, int groups, int n, int experts, int share, int each, int stages,      \
        int along, const float *biases

template <class OF>
struct PairTiles {
    static constexpr int MATRICES = 1;
    Act::Stored* out;
    OF of;
    const float* biases;

    __device__ __forceinline__ const uint8_t* second_tiles() const { return nullptr; }
    __device__ __forceinline__ RowTile operator()(int number) const { return of.row_tile(number); }
    __device__ __forceinline__ int64_t x_row(const RowTile& row_tile, int row) const { return of.pair(row_tile, row) / of.share; }
    __device__ __forceinline__ void write(const RowTile& row_tile, int row_of_x, int row, const float (&sums)[1]) const {
        int64_t at = row_tile.out + row, bias = int64_t(row_tile.expert) * of.n + at;
        Act::write(out + int64_t(of.pair(row_tile, row_of_x)) * of.n + at, sums[0] + (biases ? biases[bias] : 0.0f));
    }
};
// Gate and up, which become one number.
template <class OF>
struct GatedTiles {
    static constexpr int MATRICES = 2;
    Act::Stored* out;
    OF of;
    const float* biases;
    const uint8_t* up_tiles;
    const float* up_biases;
    Gating gated;

    __device__ __forceinline__ const uint8_t* second_tiles() const { return up_tiles; }
    __device__ __forceinline__ RowTile operator()(int number) const { return of.row_tile(number); }
    __device__ __forceinline__ int64_t x_row(const RowTile& row_tile, int row) const { return of.pair(row_tile, row) / of.share; }
    __device__ __forceinline__ void write(const RowTile& row_tile, int row_of_x, int row, const float (&sums)[2]) const {
        int64_t at = row_tile.out + row, bias = int64_t(row_tile.expert) * of.n + at;
        float gate = sums[0] + (biases ? biases[bias] : 0.0f), up = sums[1] + (up_biases ? up_biases[bias] : 0.0f);
        Act::write(out + int64_t(of.pair(row_tile, row_of_x)) * of.n + at, gated(gate, up));
    }
};
