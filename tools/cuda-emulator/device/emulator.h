// What CUDA C++ means on the host: included before every kernel source by the stand-in's NVRTC.
//
// A thread of a block is a fiber, so its variables are ordinary ones. `__shared__` variables are static and
// lie in a section of their own: blocks that run at the same time have copies of the module. Every access to
// memory that others could see is instrumented by the host compiler (-fsanitize=thread), whose calls the
// stand-in driver answers: that is how it checks bounds, initialisation and races.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

// The stand-in's NVRTC finds kernels, what bounds their blocks and shared variables by these words, and replaces them.
#define __global__ __emulator_global__
#define __shared__ __emulator_shared__
#define __device__
#define __host__
#define __constant__ static const
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...) __emulator_bounds__(__VA_ARGS__)
#define __grid_constant__
#define __restrict__ __restrict
#define __align__(n) alignas(n)
#define EMULATOR_PLAIN __attribute__((no_sanitize("thread"), noinline))

struct uint3 {
    unsigned x, y, z;
};
typedef uint3 dim3;
struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(8) int2 {
    int x, y;
};
struct alignas(16) int4 {
    int x, y, z, w;
};
struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

// The stand-in driver's side.
extern "C" {
typedef void (*EmulatorWarpOp)(void* const* lanes, unsigned mask);
uint3 emulator_thread_idx();
uint3 emulator_block_idx();
uint3 emulator_block_dim();
uint3 emulator_grid_dim();
void* emulator_dynamic_shared();
// A barrier of all `threads` of a block (of all there are, with 0). Where `file` is one, all must come to it at that line.
void emulator_block_barrier(const char* file, unsigned line, unsigned threads);
void emulator_warp(unsigned mask, EmulatorWarpOp op, void* arg);
void emulator_warp_barrier(unsigned mask);
// Counts a product of a warp, of `rows` by `columns` sums of `k` products.
void emulator_count_product(unsigned rows, unsigned columns, unsigned k);
// Checks an access as the instrumentation would, and its alignment: errors name it.
void emulator_access(const void* at, unsigned bytes, unsigned align, int write);
void emulator_atomic(const void* at, unsigned bytes);
void emulator_atomic_begin();
void emulator_atomic_end();
void emulator_cp_async(void* dst, const void* src, unsigned bytes);
void emulator_cp_async_commit();
void emulator_cp_async_wait(unsigned groups);
// Makes what this thread has written visible to asynchronous products, and an access of one.
void emulator_publish();
void emulator_product_access(const void* at, unsigned bytes);
// Asynchronous products of this thread: what they are, in as many bytes as `EMULATOR_PRODUCT`, until a wait takes the oldest
// of those before the last `groups` groups; false when there is none. Until then nobody may use their sums, so there are other
// numbers in their place.
#define EMULATOR_PRODUCT 64
void emulator_product_fence();
void emulator_product(const void* what, float* sums, unsigned count);
void emulator_product_commit();
bool emulator_product_take(unsigned groups, void* what);
void emulator_fault(const char* reason);
}

#define threadIdx (emulator_thread_idx())
#define blockIdx (emulator_block_idx())
#define blockDim (emulator_block_dim())
#define gridDim (emulator_grid_dim())
static const int warpSize = 32;

static inline void __syncthreads(const char* file = __builtin_FILE(), unsigned line = __builtin_LINE()) {
    emulator_block_barrier(file, line, 0);
}
static inline void __syncwarp(unsigned mask = 0xffffffffu) { emulator_warp_barrier(mask); }
EMULATOR_PLAIN static inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
static inline void __threadfence_block() {}

namespace emulator {

// ---- launches ----------------------------------------------------------------------------------------------

template <class... A>
struct Params {
    static const unsigned count = sizeof...(A);
    static constexpr unsigned sizes[sizeof...(A) + 1] = {sizeof(A)..., 0};
};
template <unsigned... I>
struct Indices {};
template <unsigned N, unsigned... I>
struct MakeIndices : MakeIndices<N - 1, N - 1, I...> {};
template <unsigned... I>
struct MakeIndices<0, I...> {
    typedef Indices<I...> type;
};
template <class... A, unsigned... I>
EMULATOR_PLAIN void call_with(void (*kernel)(A...), void** params, Indices<I...>) {
    (void)params;
    kernel(*static_cast<A*>(params[I])...);
}
template <class... A>
EMULATOR_PLAIN void call(void (*kernel)(A...), void** params) {
    call_with(kernel, params, typename MakeIndices<sizeof...(A)>::type());
}
template <class... A>
EMULATOR_PLAIN unsigned sizes(void (*)(A...), const unsigned** out) {
    *out = Params<A...>::sizes;
    return Params<A...>::count;
}

// ---- shuffles and votes --------------------------------------------------------------------------------------

template <class T>
struct Shuffle {
    T in;
    unsigned source;
    T out;
};
template <class T>
EMULATOR_PLAIN void shuffle_op(void* const* lanes, unsigned mask) {
    for (unsigned lane = 0; lane < 32; lane++) {
        if (!(mask >> lane & 1)) continue;
        Shuffle<T>* mine = static_cast<Shuffle<T>*>(lanes[lane]);
        if (!(mask >> mine->source & 1)) return emulator_fault("a shuffle reads a lane that takes no part in it");
        mine->out = static_cast<Shuffle<T>*>(lanes[mine->source])->in;
    }
}
template <class T>
EMULATOR_PLAIN T shuffle(unsigned mask, T value, unsigned source) {
    Shuffle<T> arg = {value, source, value};
    emulator_warp(mask, shuffle_op<T>, &arg);
    return arg.out;
}
struct Vote {
    int in;
    unsigned out;
};
EMULATOR_PLAIN inline void vote_op(void* const* lanes, unsigned mask) {
    unsigned votes = 0;
    for (unsigned lane = 0; lane < 32; lane++)
        if (mask >> lane & 1 && static_cast<Vote*>(lanes[lane])->in) votes |= 1u << lane;
    for (unsigned lane = 0; lane < 32; lane++)
        if (mask >> lane & 1) static_cast<Vote*>(lanes[lane])->out = votes;
}
EMULATOR_PLAIN inline unsigned vote(unsigned mask, int value) {
    Vote arg = {value, 0};
    emulator_warp(mask, vote_op, &arg);
    return arg.out;
}
EMULATOR_PLAIN inline unsigned lane() {
    uint3 t = threadIdx, d = blockDim;
    return (t.x + d.x * (t.y + d.y * t.z)) % 32;
}

}  // namespace emulator

template <class T>
static inline T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
    unsigned lane = emulator::lane();
    return emulator::shuffle(mask, value, (lane & ~(width - 1)) + (unsigned(source) & (width - 1)));
}
template <class T>
static inline T __shfl_xor_sync(unsigned mask, T value, int flip, int width = 32) {
    unsigned lane = emulator::lane(), source = lane ^ unsigned(flip);
    return emulator::shuffle(mask, value, source / width <= lane / width ? source : lane);
}
template <class T>
static inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
    unsigned lane = emulator::lane(), source = lane + delta;
    return emulator::shuffle(mask, value, source / width == lane / width ? source : lane);
}
template <class T>
static inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
    unsigned lane = emulator::lane();
    return emulator::shuffle(mask, value, lane % width >= delta ? lane - delta : lane);
}
// Of all lanes: the mask names each.
static inline unsigned __reduce_max_sync(unsigned mask, unsigned value) {
    for (int flip = 16; flip > 0; flip /= 2) {
        unsigned other = __shfl_xor_sync(mask, value, flip);
        value = other > value ? other : value;
    }
    return value;
}
static inline unsigned __reduce_min_sync(unsigned mask, unsigned value) { return ~__reduce_max_sync(mask, ~value); }
static inline unsigned __ballot_sync(unsigned mask, int value) { return emulator::vote(mask, value); }
static inline int __any_sync(unsigned mask, int value) { return emulator::vote(mask, value) != 0; }
static inline int __all_sync(unsigned mask, int value) { return emulator::vote(mask, value) == mask; }

// ---- atomics: blocks may run at the same time ------------------------------------------------------------------------

namespace emulator {
template <class T, class F>
EMULATOR_PLAIN T update(T* at, F f) {
    emulator_atomic(at, sizeof(T));
    emulator_atomic_begin();
    T old = *at;
    *at = f(old);
    emulator_atomic_end();
    return old;
}
}  // namespace emulator
template <class T>
static inline T atomicAdd(T* at, T x) {
    return emulator::update(at, [x](T old) { return old + x; });
}
template <class T>
static inline T atomicMax(T* at, T x) {
    return emulator::update(at, [x](T old) { return old > x ? old : x; });
}
template <class T>
static inline T atomicMin(T* at, T x) {
    return emulator::update(at, [x](T old) { return old < x ? old : x; });
}
template <class T>
static inline T atomicExch(T* at, T x) {
    return emulator::update(at, [x](T) { return x; });
}
template <class T>
static inline T atomicCAS(T* at, T expected, T x) {
    return emulator::update(at, [expected, x](T old) { return old == expected ? x : old; });
}

// ---- arithmetic ----------------------------------------------------------------------------------------------

static inline int min(int a, int b) { return a < b ? a : b; }
static inline int max(int a, int b) { return a > b ? a : b; }
static inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
static inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
static inline long long min(long long a, long long b) { return a < b ? a : b; }
static inline long long max(long long a, long long b) { return a > b ? a : b; }
static inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
// The host's C library has functions of these names; those of extremes would be calls in the innermost loops.
namespace emulator {
static inline float float_max(float a, float b) { return a > b || b != b ? a : b; }
static inline float float_min(float a, float b) { return a < b || b != b ? a : b; }
}  // namespace emulator
#define fmaxf(a, b) emulator::float_max(a, b)
#define fminf(a, b) emulator::float_min(a, b)
#define __expf(x) std::exp(float(x))
#define __logf(x) std::log(float(x))
static inline float __fdividef(float a, float b) { return a / b; }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline int __float2int_rn(float x) { return int(std::nearbyint(x)); }
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __ffs(int x) { return __builtin_ffs(x); }
static inline int __clz(int x) { return x ? __builtin_clz(unsigned(x)) : 32; }
static inline unsigned __float_as_uint(float x) {
    unsigned bits;
    std::memcpy(&bits, &x, 4);
    return bits;
}
static inline float __uint_as_float(unsigned bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}
static inline int __float_as_int(float x) { return int(__float_as_uint(x)); }
static inline float __int_as_float(int bits) { return __uint_as_float(unsigned(bits)); }
static inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    uint64_t both = uint64_t(b) << 32 | a;
    unsigned out = 0;
    for (int i = 0; i < 4; i++) {
        unsigned byte = unsigned(both >> 8 * (selector >> 4 * i & 7)) & 255;
        // The fourth bit of a selector spreads the byte's sign.
        out |= (selector >> 4 * i & 8 ? (byte & 128 ? 255u : 0u) : byte) << 8 * i;
    }
    return out;
}
static inline int __dp4a(int a, int b, int c) {
    for (int i = 0; i < 4; i++) c += int(int8_t(a >> 8 * i)) * int(int8_t(b >> 8 * i));
    return c;
}
static inline unsigned __vsubss4(unsigned a, unsigned b) {
    unsigned out = 0;
    for (int i = 0; i < 4; i++) {
        int d = int(int8_t(a >> 8 * i)) - int(int8_t(b >> 8 * i));
        d = d > 127 ? 127 : d < -128 ? -128 : d;
        out |= unsigned(uint8_t(d)) << 8 * i;
    }
    return out;
}
template <class T>
static inline T __ldg(const T* at) {
    return *at;
}
