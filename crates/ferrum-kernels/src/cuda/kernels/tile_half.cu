// Products on tensor cores with weights of 16 bits, and what belongs to all products of tiles.
#include "common.cuh"
#ifdef ACT_16  // there is nothing here for activations of f32
#include "tile.cuh"

#define TILE_HALF(NAME, SHAPE, OF, TWICE)                                                                               \
    KERNEL __launch_bounds__(128, SHAPE::BLOCKS) NAME(TILE_PARAMS, const uint16_t* weight, int64_t stride) {            \
        HalfRows<TWICE> half = {weight, stride};                                                                        \
        TILE_BLOCK(SHAPE, OF, half)                                                                                     \
    }
// Rows of f16 are two of bf16 (`arrange_rows_bf16`), and meet the weight twice.
TILE_HALF(tile_bf16_16, Tile16, OF_BF16, ACT_IS_F16)
TILE_HALF(tile_bf16_32, Tile32, OF_BF16, ACT_IS_F16)
TILE_HALF(tile_bf16_64, Tile64, OF_BF16, ACT_IS_F16)
TILE_HALF(tile_bf16_128, Tile128, OF_BF16, ACT_IS_F16)
TILE_HALF(tile_f16_16, Tile16, OF_F16, false)
TILE_HALF(tile_f16_32, Tile32, OF_F16, false)
TILE_HALF(tile_f16_64, Tile64, OF_F16, false)
TILE_HALF(tile_f16_128, Tile128, OF_F16, false)

// Rows of x as tiles read them: in another order of their elements (`order`, or null), and with zeros behind k up to a
// multiple of eight elements. A block for each row. With `expert_ids`, rows are pairs of which `share` have a row of x, and
// `order` has one for each expert.
KERNEL __launch_bounds__(256) arrange_rows(uint16_t* out, const uint16_t* x, const int* order, const int* expert_ids,
                                           int experts, int share, int k, int stride) {
    wait_for_previous();
    int64_t row = blockIdx.x;
    bool used = true;
    if (expert_ids) {
        int expert = expert_ids[row];
        // The row of a pair without an expert is zeros: it is read for sums that nobody takes.
        used = expert >= 0 && expert < experts;
        order += used ? int64_t(expert) * k : 0;
    }
    const uint16_t* from = x + row / share * k;
    for (int i = threadIdx.x; i < stride; i += blockDim.x)
        out[row * stride + i] = used && i < k ? from[order ? order[i] : i] : 0;
}

#ifdef ACT_F16
// The same as bf16, two for each: the nearest, then from `stride` on what that leaves. Together they have all bits of f16.
KERNEL __launch_bounds__(256) arrange_rows_bf16(uint16_t* out, const uint16_t* x, int k, int stride) {
    wait_for_previous();
    int64_t row = blockIdx.x;
    uint16_t* to = out + row * 2 * stride;
    for (int i = threadIdx.x; i < stride; i += blockDim.x) {
        float value = i < k ? f16_to_f32(x[row * k + i]) : 0.0f;
        to[i] = BF16::round(value);
        // An infinity is the nearest one, and leaves nothing.
        to[stride + i] = BF16::round(fabsf(value) <= 65504.0f ? BF16::rest(value) : 0.0f);
    }
}
#else
// The same as f16, whose eleven bits hold the eight of a bf16: each row times a power of two by which its largest element
// is below 2^15. `scales` is what sums are to be multiplied with. Only what is 2^29 times smaller loses bits.
KERNEL __launch_bounds__(256) arrange_rows_f16(uint16_t* out, float* scales, const uint16_t* x, int k, int stride) {
    __shared__ float scratch[32];
    wait_for_previous();
    int64_t row = blockIdx.x;
    float most = 0;
    for (int i = threadIdx.x; i < k; i += blockDim.x) most = fmaxf(most, fabsf(bf16_to_f32(x[row * k + i])));
    most = block_max(most, scratch);
    int exponent = int(__float_as_uint(most) >> 23);
    // Rows of zeros, and of what is no number, stay as they are.
    int up = exponent == 0 || exponent == 255 ? 127 : min(max(268 - exponent, 1), 253);
    float factor = __uint_as_float(uint32_t(up) << 23);
    if (threadIdx.x == 0) scales[row] = __uint_as_float(uint32_t(254 - up) << 23);
    for (int i = threadIdx.x; i < stride; i += blockDim.x)
        out[row * stride + i] = i < k ? f32_to_f16(bf16_to_f32(x[row * k + i]) * factor) : 0;
}
#endif

// Sums of the parts of k, in their order; `width` columns from `first` on of rows of n.
KERNEL add_parts(void* out, int is_f32, const float* parts, int64_t total, int width, int64_t first, int64_t n, int splits) {
    wait_for_previous();
    int64_t i = thread_number();
    if (i >= total) return;
    float sum = parts[i];
    for (int part = 1; part < splits; part++) sum += parts[part * total + i];
    int64_t at = i / width * n + first + i % width;
    if (is_f32) static_cast<float*>(out)[at] = sum;
    else Act::write(static_cast<Act::Stored*>(out) + at, sum);
}
#endif
