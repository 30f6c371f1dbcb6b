// Products on tensor cores with FP8 weights, which are unpacked to the activations' type on their way.
#include "float8.cuh"
#ifdef ACT_16  // there is nothing here for activations of f32
#include "tile.cuh"

struct Float8Rows {
    static const bool UNPACKS = true, SCALED = false;
    Float8 w;
    __device__ __forceinline__ int repeats() const { return 0; }

    // A thread copies the 32 codes of a group, as two pieces, and their scale.
    template <class S>
    __device__ __forceinline__ void copy(uint8_t* to, int64_t first, int count, int step) const {
        int t = threadIdx.x, column = t / S::GROUPS, k = step * S::DEPTH + t % S::GROUPS * 32;
        if (column >= count || k >= w.stride) return;
        const uint8_t* from = w.codes + (first + column) * w.stride + k;
        cp_async16(to + RAW_LOW + 16 * t, from);
        cp_async16_or_zeros(to + RAW_HIGH + 16 * t, k + 16 < w.stride ? from + 16 : from, k + 16 < w.stride);
        cp_async4(to + RAW_SCALE + 8 * t, w.scale_at(first + column, k));
    }
    template <class S>
    __device__ __forceinline__ void unpack(uint8_t* to, const uint8_t* from, int64_t, int count, int step) const {
        int t = threadIdx.x, column = t / S::GROUPS, k = step * S::DEPTH + t % S::GROUPS * 32;
        uint32_t words[16] = {};
        if (column < count && k < w.stride) {
            float scale = reinterpret_cast<const float*>(from + RAW_SCALE)[2 * t] * OF_CODES;
#pragma unroll
            for (int half = 0; half < 2; half++) {
                uint4 codes = load16(from + (half ? RAW_HIGH : RAW_LOW) + 16 * t);
                uint32_t fours[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    float x[4];
                    four_codes(fours[i], x);
                    words[half * 8 + 2 * i] = Act::pack2(x[0] * scale, x[1] * scale);
                    words[half * 8 + 2 * i + 1] = Act::pack2(x[2] * scale, x[3] * scale);
                }
            }
        }
        store_group(to, S::PIECES, column, t % S::GROUPS, words);
    }
};

#define TILE_FLOAT8(NAME, SHAPE)                                                                                        \
    KERNEL __launch_bounds__(128, SHAPE::BLOCKS) NAME(TILE_PARAMS, FLOAT8_PARAMS) {                                     \
        Float8Rows float8 = {FLOAT8};                                                                                   \
        TILE_BLOCK(SHAPE, OF_ACT, float8)                                                                              \
    }
TILE_FLOAT8(tile_float8_16, Tile16)
TILE_FLOAT8(tile_float8_32, Tile32)
TILE_FLOAT8(tile_float8_64, Tile64)
TILE_FLOAT8(tile_float8_128, Tile128)
#endif
