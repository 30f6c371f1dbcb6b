// Products on tensor cores with weights that are unpacked to the activations' type on their way: all quantised formats, and f32.
#include "common.cuh"
#ifdef ACT_16  // there is nothing here for activations of f32
#include "tile.cuh"

#define TILE_PACKED(NAME, SHAPE)                                                                                        \
    KERNEL __launch_bounds__(128, SHAPE::BLOCKS)                                                                        \
        NAME(TILE_PARAMS, WEIGHT_PARAMS, int bits, int groups, int64_t stride) {                                        \
        PackedRows packed = {WEIGHT, bits, groups, stride};                                                             \
        TILE_BLOCK(SHAPE, OF_ACT, packed)                                                                              \
    }
TILE_PACKED(tile_packed_16, Tile16)
TILE_PACKED(tile_packed_32, Tile32)
TILE_PACKED(tile_packed_64, Tile64)
TILE_PACKED(tile_packed_128, Tile128)
#endif
