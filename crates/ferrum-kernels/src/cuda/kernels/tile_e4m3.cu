// Products of FP8 with FP8 on tensor cores: compute capability 8.9, 9.0 and 12.
//
// Activations become codes, too, with a scale for each 128 numbers of a row. A step of a tile is as many numbers: its sums
// are scaled before they are added to those of the steps before, so that neither range nor precision of the products
// suffers from the length of k.
#include "float8.cuh"
#ifdef ACT_16  // there is nothing here for activations of f32
#include "tile.cuh"

// Rows of x as codes with a stride of a multiple of 16 and zeros behind k, and their scales. A warp for each 128 numbers.
KERNEL quantise_e4m3(uint8_t* codes, float* scales, const Act::Stored* x, int64_t all, int blocks, int k, int stride) {
    wait_for_previous();
    int64_t number = thread_number() / 32;
    if (number >= all) return;
    int64_t row = number / blocks;
    int at = int(number % blocks) * 128 + int(threadIdx.x) % 32 * 4;
    float values[4], most = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        values[i] = at + i < k ? Act::read(x + row * k + at + i) : 0.0f;
        most = fmaxf(most, fabsf(values[i]));
    }
    float scale = warp_max(most) / 448.0f;
    uint32_t word = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) word |= uint32_t(Fp8::round(scale > 0.0f ? values[i] / scale : values[i])) << 8 * i;
    if (at < stride) *reinterpret_cast<uint32_t*>(codes + row * stride + at) = word;
    if (threadIdx.x % 32 == 0) scales[number] = scale;
}

// Codes as pairs, which are copied as elements of 16 bits are.
struct Float8Pairs : HalfRows<false> {
    static const bool SCALED = true;
    Float8 w;
    __device__ __forceinline__ Float8Pairs(const Float8& w)
        : HalfRows<false>{reinterpret_cast<const uint16_t*>(w.codes), w.stride / 2}, w(w) {}
    __device__ __forceinline__ float scale(int64_t row, int step) const { return *w.scale_at(row, step * 128); }
};

#define TILE_E4M3(NAME, SHAPE)                                                                                          \
    KERNEL __launch_bounds__(128, SHAPE::BLOCKS) NAME(TILE_PARAMS, FLOAT8_PARAMS) {                                     \
        Float8Pairs float8(FLOAT8);                                                                                     \
        TILE_BLOCK(SHAPE, OF_E4M3, float8)                                                                              \
    }
// Each device has its own instruction: products of four warps on 9.0, elsewhere those of one. Those of one on 9.0 are
// conversions to f16, and slower than what is there for 16 bits.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ == 900
typedef TileShape<64, 128, 64, 16, 128, 3, 2> TileE4m3Group;
TILE_E4M3(tile_e4m3_group, TileE4m3Group)
#endif
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1200
// As Tile128, with a step of 128 codes.
typedef TileShape<128, 64, 64, 64, 32, 3, 2> TileE4m3;
TILE_E4M3(tile_e4m3_64, Tile64)
TILE_E4M3(tile_e4m3_128, TileE4m3)
#endif
#endif
