// Gate and up of a feed-forward with a quantised matrix, of one row and of up to eight: a sum of gate and one of up become one
// number, so that neither goes to memory.
#include "common.cuh"
#ifdef ACT_16  // activations of f32 have the products of integers in quant.cu
#include "quant_gemv.cuh"

// The rows of up are the second half of the matrix.
struct GatedRows {
    static constexpr int MATRICES = 2;
    Act::Stored* out;
    int rows, columns;
    const uint8_t* up_tiles;
    Gating gated;

    __device__ __forceinline__ const uint8_t* second_tiles() const { return up_tiles; }
    __device__ __forceinline__ RowTile operator()(int number) const {
        return {number, 0, TILE_ROWS, 0, rows, int64_t(number) * TILE_ROWS, 0};
    }
    __device__ __forceinline__ int64_t x_row(const RowTile&, int row) const { return min(row, rows - 1); }
    __device__ __forceinline__ void write(const RowTile& row_tile, int row_of_x, int row, const float (&sums)[2]) const {
        Act::write(out + int64_t(row_of_x) * columns + row_tile.out + row, gated(sums[0], sums[1]));
    }
};
#define QUANT_GATED(NAME, BITS, TABLE, MANY)                                                                            \
    KERNEL GEMV_BOUNDS                                                                                                  \
        NAME(Act::Stored* out, const uint16_t* x, int stride, WEIGHT_PARAMS, int rows, int groups, int columns,         \
             const uint8_t* up_tiles, int activation, int stages, int along) {                                          \
        Weight w = WEIGHT;                                                                                              \
        GemvInput in = {x, stride};                                                                                     \
        GatedRows row_tiles = {out, rows, columns, up_tiles, {activation, 0, 0}};                                       \
        gemv_row_tiles<PackedTile<BITS, TABLE>, MANY, true>(row_tiles, columns / TILE_ROWS, w, groups, stages, along, in); \
    }
#define QUANT_GATED_BITS(NAME, BITS, TABLE)                                                                             \
    QUANT_GATED(quant_gemv_gated_##NAME##_1, BITS, TABLE, false)                                                        \
    QUANT_GATED(quant_gemv_gated_##NAME##_8, BITS, TABLE, true)
QUANT_GATED_BITS(2, 2, false)
QUANT_GATED_BITS(3, 3, false)
QUANT_GATED_BITS(4, 4, false)
QUANT_GATED_BITS(table, 4, true)
QUANT_GATED_BITS(5, 5, false)
QUANT_GATED_BITS(6, 6, false)
QUANT_GATED_BITS(8, 8, false)
#endif
