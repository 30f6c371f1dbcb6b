// What all kernels share: elements in memory, sums over warps and blocks, the order of floats.
#pragma once
#include "intrinsics.cuh"

// Every thread of a kernel calls `wait_for_previous` before it reads or writes what another kernel may still be writing or
// reading, and before it ends.
#define KERNEL extern "C" __global__ void
#define ALL_LANES 0xffffffffu

// The number of this thread among all of the grid.
__device__ __forceinline__ int64_t thread_number() { return int64_t(blockIdx.x) * blockDim.x + threadIdx.x; }

// ---- elements: a type for each, which reads and writes element i -----------------------------------------------------

struct F32 {
    typedef float Stored;
    static __device__ __forceinline__ float read(const Stored* at) { return *at; }
    static __device__ __forceinline__ Stored round(float x) { return x; }
    static __device__ __forceinline__ void write(Stored* at, float x) { *at = round(x); }
    // Eight elements at an address that is a multiple of 16 bytes.
    static __device__ __forceinline__ void read8(const Stored* at, float (&out)[8]) {
        uint4 a = load16(at), b = load16(at + 4);
        out[0] = __uint_as_float(a.x), out[1] = __uint_as_float(a.y);
        out[2] = __uint_as_float(a.z), out[3] = __uint_as_float(a.w);
        out[4] = __uint_as_float(b.x), out[5] = __uint_as_float(b.y);
        out[6] = __uint_as_float(b.z), out[7] = __uint_as_float(b.w);
    }
    static __device__ __forceinline__ void write8(Stored* at, const float (&x)[8]) {
        store16(at, make_uint4(__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]), __float_as_uint(x[3])));
        store16(at + 4, make_uint4(__float_as_uint(x[4]), __float_as_uint(x[5]), __float_as_uint(x[6]), __float_as_uint(x[7])));
    }
};
struct F16 {
    typedef uint16_t Stored;
    static __device__ __forceinline__ float read(const Stored* at) { return f16_to_f32(*at); }
    static __device__ __forceinline__ Stored round(float x) { return f32_to_f16(x); }
    static __device__ __forceinline__ void write(Stored* at, float x) { *at = round(x); }
    static __device__ __forceinline__ void read8(const Stored* at, float (&out)[8]) {
        uint4 a = load16(at);
        uint32_t words[4] = {a.x, a.y, a.z, a.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            out[2 * i] = f16_to_f32(uint16_t(words[i]));
            out[2 * i + 1] = f16_to_f32(uint16_t(words[i] >> 16));
        }
    }
    static __device__ __forceinline__ void write8(Stored* at, const float (&x)[8]) {
        store16(at, make_uint4(pack2(x[0], x[1]), pack2(x[2], x[3]), pack2(x[4], x[5]), pack2(x[6], x[7])));
    }
    // Two elements as a word, `low` in its lower half.
    static __device__ __forceinline__ uint32_t pack2(float low, float high) { return f32_to_f16x2(low, high); }
    // What x has beside the nearest element: nothing where that is infinite.
    static __device__ __forceinline__ float rest(float x) {
        float nearest = f16_to_f32(f32_to_f16(x));
        return fabsf(nearest) <= 65504.0f ? x - nearest : 0.0f;
    }
};
struct BF16 {
    typedef uint16_t Stored;
    static __device__ __forceinline__ float read(const Stored* at) { return bf16_to_f32(*at); }
    static __device__ __forceinline__ Stored round(float x) { return f32_to_bf16(x); }
    static __device__ __forceinline__ void write(Stored* at, float x) { *at = round(x); }
    static __device__ __forceinline__ void read8(const Stored* at, float (&out)[8]) {
        uint4 a = load16(at);
        uint32_t words[4] = {a.x, a.y, a.z, a.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            out[2 * i] = __uint_as_float(words[i] << 16);
            out[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
        }
    }
    static __device__ __forceinline__ void write8(Stored* at, const float (&x)[8]) {
        store16(at, make_uint4(pack2(x[0], x[1]), pack2(x[2], x[3]), pack2(x[4], x[5]), pack2(x[6], x[7])));
    }
    static __device__ __forceinline__ uint32_t pack2(float low, float high) { return f32_to_bf16x2(low, high); }
    static __device__ __forceinline__ float rest(float x) { return x - bf16_to_f32(f32_to_bf16(x)); }
};
// Activations. The residual stream and logits are f32 whatever these are, so a kernel whose buffers may be either has two
// names: one for activations (`_act`) and one for f32.
#if defined(ACT_BF16)
typedef BF16 Act;
#elif defined(ACT_F16)
typedef F16 Act;
#else
typedef F32 Act;
#endif
// Those of 16 bits go through tensor cores, and some files have kernels for nothing else. Those of f16 become infinite
// from 65520 on.
#if defined(ACT_BF16) || defined(ACT_F16)
#define ACT_16
#endif
#ifdef ACT_F16
constexpr bool ACT_IS_F16 = true;
#else
constexpr bool ACT_IS_F16 = false;
#endif
// FP8 E4M3: the nearest code, ties to even, saturating at ±448; NaN stays NaN.
struct Fp8 {
    typedef uint8_t Stored;
    static __device__ __forceinline__ float read(const Stored* at) {
        uint32_t code = *at, magnitude = code & 0x7f;
        float x = magnitude == 0x7f ? __uint_as_float(0x7fc00000u)
                  : magnitude < 8   ? float(magnitude) * (1.0f / 512.0f)
                                    : __uint_as_float((magnitude << 20) + (120u << 23));
        return code & 0x80 ? -x : x;
    }
    static __device__ __forceinline__ Stored round(float x) {
        uint32_t all = __float_as_uint(x), sign = all >> 24 & 0x80, bits = all & 0x7fffffff;
        if (bits > 0x7f800000) return uint8_t(sign | 0x7f);
        bits = min(bits, 0x43e00000u);
        // Below 2^-6 codes are multiples of 2^-9: a sum with 2^23 of them rounds to one.
        if (bits < 121u << 23) {
            float step = __uint_as_float(141u << 23);
            return uint8_t(sign | (__float_as_uint(__fadd_rn(__uint_as_float(bits), step)) - __float_as_uint(step)));
        }
        uint32_t rounded = bits + 0x7ffff + (bits >> 20 & 1);
        return uint8_t(sign | ((rounded >> 20) - (120u << 3)));
    }
};
// Codes whose vector has a scale.
struct Int8 {
    typedef int8_t Stored;
    static __device__ __forceinline__ float read(const Stored* at) { return float(*at); }
};

// Eight elements of a weight on their way, so that several loads are under way before the first is used.
template <class E>
struct Eight {
    uint4 bits;
    __device__ __forceinline__ void load(const uint16_t* at) { bits = load16_once(at); }
    __device__ __forceinline__ void zero() { bits = make_uint4(0, 0, 0, 0); }
    __device__ __forceinline__ void get(float (&out)[8]) const {
        uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
        for (int i = 0; i < 8; i++) {
            uint16_t element = uint16_t(words[i / 2] >> 16 * (i % 2));
            out[i] = E::read(&element);
        }
    }
};
template <>
struct Eight<F32> {
    uint4 low, high;
    __device__ __forceinline__ void load(const float* at) { low = load16_once(at), high = load16_once(at + 4); }
    __device__ __forceinline__ void zero() { low = high = make_uint4(0, 0, 0, 0); }
    __device__ __forceinline__ void get(float (&out)[8]) const {
        uint32_t words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
        for (int i = 0; i < 8; i++) out[i] = __uint_as_float(words[i]);
    }
};

// Eight elements of a row of `k` from `at` on, zeros behind it; `wide` where they are whole runs of 16 bytes.
template <class E>
__device__ __forceinline__ void x8(const typename E::Stored* x, int at, int k, bool wide, float (&out)[8]) {
    if (wide) return E::read8(x + at, out);
#pragma unroll
    for (int i = 0; i < 8; i++) out[i] = at + i < k ? E::read(x + at + i) : 0.0f;
}
template <class E>
__device__ __forceinline__ void write_x8(typename E::Stored* x, int at, int k, bool wide, const float (&from)[8]) {
    if (wide) return E::write8(x + at, from);
#pragma unroll
    for (int i = 0; i < 8; i++)
        if (at + i < k) E::write(x + at + i, from[i]);
}
// Whether eight elements from `at` on are there, in rows that begin at multiples of 16 bytes.
__device__ __forceinline__ bool is_wide(int at, int k) {
    return k % int(16 / sizeof(Act::Stored)) == 0 && at + 8 <= k;
}

// ---- sums ----------------------------------------------------------------------------------------------------------------

// The sum over a warp, in one order, in all its lanes.
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int flip = 16; flip > 0; flip /= 2) x += __shfl_xor_sync(ALL_LANES, x, flip);
    return x;
}
__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int flip = 16; flip > 0; flip /= 2) x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, flip));
    return x;
}

// The sum over a block of whole warps, in one order, in all its threads. `scratch` has 32 elements; behind this it may
// be used again.
__device__ __forceinline__ float block_sum(float x, float* scratch) {
    x = warp_sum(x);
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
    __syncthreads();
    float sum = 0;
    for (int w = 0; w < int(blockDim.x) / 32; w++) sum += scratch[w];
    __syncthreads();
    return sum;
}
__device__ __forceinline__ float block_max(float x, float* scratch) {
    x = warp_max(x);
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
    __syncthreads();
    float most = scratch[0];
    for (int w = 1; w < int(blockDim.x) / 32; w++) most = fmaxf(most, scratch[w]);
    __syncthreads();
    return most;
}

// A float's bits as an unsigned key of the same order; NaN is the key 0, and the two zeros are equal.
__device__ __forceinline__ uint32_t key_of(uint32_t bits) {
    uint32_t magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return 0;
    return bits > 0x80000000u ? 0x80000000u - magnitude : 0x80000000u + magnitude;
}

// ---- activation functions; the numbers are those of `elementwise::number` on the host ------------------------------------

__device__ __forceinline__ float silu(float x) { return x / (1.0f + expf(-x)); }
__device__ __forceinline__ float activation(int kind, float x) {
    switch (kind) {
        case 0: return 0.5f * x * erfcf(-x * 0.70710678118654752f);
        case 1: return 0.5f * x * (1.0f + tanhf(0.7978845608028654f * (x + 0.044715f * x * x * x)));
        case 2: return silu(x);
        case 3: return tanhf(x);
        case 5: return 1.0f / (1.0f + expf(-x));
        default: return x;
    }
}

// What gate and up of an expert make together. 1: SiLU, 2: GELU (tanh), 3: the bounded form of GPT-OSS. NaN stays NaN.
struct Gating {
    int kind;
    float alpha, limit;

    __device__ __forceinline__ float operator()(float g, float u) const {
        if (kind == 1) return silu(g) * u;
        if (kind == 2) return activation(1, g) * u;
        g = g > limit ? limit : g, u = u > limit ? limit : u < -limit ? -limit : u;
        return g / (1.0f + expf(-alpha * g)) * (u + 1.0f);
    }
};

// ---- attention ----------------------------------------------------------------------------------------------------------------

// Keys from `start` to before `end`.
struct Range {
    int start, end;
};
// The keys that the query at key index `index` sees of `keys`: a window of the last ones, or with `chunked` those of its own
// chunk of as many; the largest window is none.
__device__ __forceinline__ Range visible_keys(int index, int keys, int causal, int window, int chunked) {
    int start = max(index - window + 1, 0);
    int64_t end = int64_t(index) + window;
    if (chunked) {
        start = window > 0 ? index - index % window : index + 1;
        end = int64_t(start) + window;
    }
    if (window == 0x7fffffff) end = keys;
    if (causal) end = int64_t(index) + 1;
    if (end > keys) end = keys;
    return {start, int(end)};
}

// ---- ragged batches -----------------------------------------------------------------------------------------------------------

// The sequence of a token: the last that begins at it or before. Empty ones begin where the next does, so the last is
// the one that has the token.
__device__ __forceinline__ int sequence_of(const int* query_starts, int seqs, int token) {
    int low = 0, high = seqs;
    while (low + 1 < high) {
        int middle = (low + high) / 2;
        if (query_starts[middle] <= token) low = middle;
        else high = middle;
    }
    return low;
}
