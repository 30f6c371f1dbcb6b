// FP8 weights as `float8.rs` lays them out: rows of E4M3 codes with a stride of a multiple of 16 and zeros behind k, and for
// each row a scale in f32 for each 2^shift numbers. No code is NaN.
#pragma once
#include "common.cuh"

struct Float8 {
    const uint8_t* codes;
    const float* scales;
    int64_t stride;
    int shift, scale_stride;

    // Of the numbers of a row from `k` on.
    __device__ __forceinline__ const float* scale_at(int64_t row, int k) const {
        return scales + row * scale_stride + (k >> shift);
    }
};

#define FLOAT8_PARAMS const uint8_t *codes, const float *scales, int64_t stride, int shift, int scale_stride
#define FLOAT8 {codes, scales, stride, shift, scale_stride}

// Four codes as floats, divided by 2^8. With its bits at the places of f16's, a code stands for that: the exponents of f16
// begin 8 lower, and numbers that are subnormal in one are so in the other.
__device__ __forceinline__ void four_codes(uint32_t codes, float* x) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        uint32_t upper = __byte_perm(codes, 0, i ? 0x3424 : 0x1404);
        uint32_t halves = (upper & 0x80008000u) | (upper >> 1 & 0x3f803f80u);
        x[2 * i] = f16_to_f32(uint16_t(halves));
        x[2 * i + 1] = f16_to_f32(uint16_t(halves >> 16));
    }
}
static const float OF_CODES = 256.0f;
