// Products of one row, and of up to eight, of 16 bits with quantised matrices.
#include "common.cuh"
#ifdef ACT_16  // activations of f32 have the products of integers in quant.cu
#include "quant_gemv.cuh"

struct DenseTiles {
    static constexpr int MATRICES = 1;
    void* out;
    int is_f32, rows, columns;
    int64_t first, n;

    __device__ __forceinline__ const uint8_t* second_tiles() const { return nullptr; }
    __device__ __forceinline__ RowTile operator()(int number) const {
        return {number, 0, min(columns - number * TILE_ROWS, TILE_ROWS), 0, rows, first + int64_t(number) * TILE_ROWS, 0};
    }
    __device__ __forceinline__ int64_t x_row(const RowTile&, int row) const { return min(row, rows - 1); }
    __device__ __forceinline__ void write(const RowTile& row_tile, int row_of_x, int row, const float (&sums)[1]) const {
        int64_t at = row_of_x * n + row_tile.out + row;
        if (is_f32) static_cast<float*>(out)[at] = sums[0];
        else Act::write(static_cast<Act::Stored*>(out) + at, sums[0]);
    }
};
#define QUANT_GEMV(NAME, BITS, TABLE, MANY)                                                                             \
    KERNEL GEMV_BOUNDS                                                                             \
        NAME(void* out, int is_f32, const uint16_t* x, int stride, WEIGHT_PARAMS, int rows, int groups, int columns,    \
             int64_t first, int64_t n, int stages, int along) {                                                                                \
        Weight w = WEIGHT;                                                                                              \
        GemvInput in = {x, stride};                                                                                     \
        DenseTiles row_tiles = {out, is_f32, rows, columns, first, n};                                                          \
        gemv_row_tiles<PackedTile<BITS, TABLE>, MANY, true>(row_tiles, (columns + TILE_ROWS - 1) / TILE_ROWS, w, groups, stages, along, in);     \
    }
#define QUANT_GEMV_BITS(NAME, BITS, TABLE)                                                                              \
    QUANT_GEMV(quant_gemv_##NAME##_1, BITS, TABLE, false)                                                               \
    QUANT_GEMV(quant_gemv_##NAME##_8, BITS, TABLE, true)
QUANT_GEMV_BITS(2, 2, false)
QUANT_GEMV_BITS(3, 3, false)
QUANT_GEMV_BITS(4, 4, false)
QUANT_GEMV_BITS(table, 4, true)
QUANT_GEMV_BITS(5, 5, false)
QUANT_GEMV_BITS(6, 6, false)
QUANT_GEMV_BITS(8, 8, false)
#endif
