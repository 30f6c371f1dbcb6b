// What CUDA C++ has no plain words for: conversions, wide loads, and the instructions of tensor cores.
//
// All PTX of the kernels is in this file. The stand-in driver of the tests (tools/cuda-emulator) replaces it by
// functions of the same names.
#pragma once

// NVRTC has no <stdint.h>.
#ifdef __CUDACC_RTC__
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;
#else
#include <stdint.h>
#endif

__device__ __forceinline__ float bf16_to_f32(uint16_t bits) { return __uint_as_float(uint32_t(bits) << 16); }
__device__ __forceinline__ uint16_t f32_to_bf16(float x) {
    uint16_t bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}
__device__ __forceinline__ float f16_to_f32(uint16_t bits) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
}
__device__ __forceinline__ uint16_t f32_to_f16(float x) {
    uint16_t bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}
// Two at once: `low` becomes the lower half of the word.
__device__ __forceinline__ uint32_t f32_to_bf16x2(float low, float high) {
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
__device__ __forceinline__ uint32_t f32_to_f16x2(float low, float high) {
    uint32_t pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
// 2^x within 2 units in the last place, denormals as zero.
__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Loads and stores of 8 and 16 bytes, at addresses that are multiples of as many.
__device__ __forceinline__ uint4 load16(const void* at) { return *reinterpret_cast<const uint4*>(at); }
__device__ __forceinline__ uint2 load8(const void* at) { return *reinterpret_cast<const uint2*>(at); }
__device__ __forceinline__ void store16(void* at, uint4 x) { *reinterpret_cast<uint4*>(at) = x; }
__device__ __forceinline__ void store8(void* at, uint2 x) { *reinterpret_cast<uint2*>(at) = x; }
// 16 bytes that are read once: they take no place in the first cache.
__device__ __forceinline__ uint4 load16_once(const void* at) {
    uint4 x;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "l"(at));
    return x;
}

// Asks for the 32 bytes at an address, which come to the second cache.
__device__ __forceinline__ void prefetch(const void* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }

// Programmatic dependent launch: a kernel may be started while the one before it in its stream still runs: it waits for that one's results here, and lets the
// one behind it start. Devices before 9.0 start a kernel when the one before has ended.
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;\n\tgriddepcontrol.wait;" ::: "memory");
#endif
}

// A barrier of a block whose warps may come to it at different lines. `__syncthreads` promises no more than one line.
template <int THREADS>
__device__ __forceinline__ void block_barrier() {
    asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory");
}

__device__ __forceinline__ uint32_t shared_address(const void* at) {
    return uint32_t(__cvta_generic_to_shared(at));
}
// Four 8 × 8 matrices of 16-bit elements from shared memory; lanes 8i to 8i + 7 name the rows of matrix i.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&out)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(shared_address(row)));
}
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&out)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(shared_address(row)));
}
// Two of them; lanes 0 to 7 and 8 to 15 name the rows.
__device__ __forceinline__ void ldmatrix_x2(uint32_t (&out)[2], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(out[0]), "=r"(out[1])
                 : "r"(shared_address(row)));
}
// C[16, 8] += A[16, 16] · B[16, 8].
__device__ __forceinline__ void mma_bf16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma_f16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// C[16, 8] += A[16, 32] · B[32, 8] of FP8 E4M3: from compute capability 8.9 on.
__device__ __forceinline__ void mma_e4m3(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// ---- products of four warps: compute capability 9.0 alone ----------------------------------------------------------------
//
// Matrices in shared memory are rows of 128 bytes whose eight pieces of 16 are exchanged as `tile_offset<8>` does, from a multiple
// of 1024 bytes on.

// Makes what this thread has written to shared memory visible to products of four warps behind the next barrier.
__device__ __forceinline__ void wgmma_publish() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Before the first product on sums that other instructions have written.
__device__ __forceinline__ void wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// Sums may be read behind this.
__device__ __forceinline__ void wgmma_end() {
    asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;" ::: "memory");
}
// From the 16-byte piece `piece` of its rows on. Rows of eight are 1024 bytes from the next eight.
__device__ __forceinline__ uint64_t wgmma_matrix(const void* matrix, int piece) {
    const uint64_t swizzle_128 = uint64_t(1) << 62, eight_rows = uint64_t(1024 >> 4) << 32;
    return swizzle_128 | eight_rows | uint64_t(1) << 16 | (shared_address(matrix) + piece * 16 & 0x3ffff) >> 4;
}
// The sums of a product as operands of `asm`, and their names there.
#define WGMMA_SUMS_32 \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                                          \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
#define WGMMA_SUMS_64 \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                                          \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "                                 \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "                                 \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
#define WGMMA_SUMS_OF_8(C, I)                                                                                              \
    "+f"(C[I]), "+f"(C[I + 1]), "+f"(C[I + 2]), "+f"(C[I + 3]), "+f"(C[I + 4]), "+f"(C[I + 5]), "+f"(C[I + 6]), "+f"(C[I + 7])
#define WGMMA_SUMS_OF_32(C, I)                                                                                             \
    WGMMA_SUMS_OF_8(C, I), WGMMA_SUMS_OF_8(C, I + 8), WGMMA_SUMS_OF_8(C, I + 16), WGMMA_SUMS_OF_8(C, I + 24)

// C[64, 128] = A[64, 32] · B[128, 32]ᵀ of FP8 E4M3, where both begin at step `k` of 32 bytes, plus C if `adds`. Warp w has rows
// 16 w to 16 w + 15, and of them each lane what it has of products of one warp.
__device__ __forceinline__ void wgmma_e4m3(float (&c)[64], const void* a, const void* b, int k, bool adds) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 " WGMMA_SUMS_64 "%64, %65, p, 1, 1;\n}\n"
                 : WGMMA_SUMS_OF_32(c, 0), WGMMA_SUMS_OF_32(c, 32)
                 : "l"(wgmma_matrix(a, 2 * k)), "l"(wgmma_matrix(b, 2 * k)), "r"(int(adds)));
}

// Products of f16 or bf16 name their matrices in shared memory by descriptors, as the PTX manual has them.
//
// C[64, 128] = A[64, 16] · B[128, 16]ᵀ, plus C if `adds`. In both matrices, elements of a row lie beside each other.
template <bool HALF>
__device__ __forceinline__ void wgmma_rows(float (&c)[64], uint64_t a, uint64_t b, bool adds) {
#define WGMMA_ROWS(TYPE)                                                                                                   \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"                                                              \
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " " WGMMA_SUMS_64                            \
                 "%64, %65, p, 1, 1, 0, 0;\n}\n"                                                                           \
                 : WGMMA_SUMS_OF_32(c, 0), WGMMA_SUMS_OF_32(c, 32)                                                         \
                 : "l"(a), "l"(b), "r"(int(adds)))
    if constexpr (HALF) WGMMA_ROWS("f16");
    else WGMMA_ROWS("bf16");
}
// C[64, 128] += A[64, 16] · B[16, 128], or 64 columns of both. A is in registers, where each lane has of its warp's 16 rows what
// it has in products of one warp. Elements of a column of Bᵀ lie beside each other.
template <bool HALF>
__device__ __forceinline__ void wgmma_columns(float (&c)[64], const uint32_t* a, uint64_t b) {
#define WGMMA_COLUMNS_128(TYPE)                                                                                            \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\n"                                                                \
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " " WGMMA_SUMS_64                            \
                 "{%64, %65, %66, %67}, %68, p, 1, 1, 1;\n}\n"                                                             \
                 : WGMMA_SUMS_OF_32(c, 0), WGMMA_SUMS_OF_32(c, 32)                                                         \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
    if constexpr (HALF) WGMMA_COLUMNS_128("f16");
    else WGMMA_COLUMNS_128("bf16");
}
template <bool HALF>
__device__ __forceinline__ void wgmma_columns(float (&c)[32], const uint32_t* a, uint64_t b) {
#define WGMMA_COLUMNS_64(TYPE)                                                                                             \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\n"                                                                \
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " " WGMMA_SUMS_32                             \
                 "{%32, %33, %34, %35}, %36, p, 1, 1, 1;\n}\n"                                                             \
                 : WGMMA_SUMS_OF_32(c, 0)                                                                                  \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
    if constexpr (HALF) WGMMA_COLUMNS_64("f16");
    else WGMMA_COLUMNS_64("bf16");
}
// Ends a group of products, of which the last `GROUPS` may still run behind `wgmma_wait`.
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int GROUPS>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(GROUPS) : "memory");
}
// The compiler, which takes products for finished where they begin, moves no use of these registers over this.
template <int COUNT>
__device__ __forceinline__ void wgmma_hold(float (&c)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) asm volatile("" : "+f"(c[i])::"memory");
}
template <int COUNT>
__device__ __forceinline__ void wgmma_hold(uint32_t (&a)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) asm volatile("" : "+r"(a[i])::"memory");
}

__device__ __forceinline__ void cp_async16(void* dst, const void* src) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(dst)), "l"(src) : "memory");
}
// Zeros where there is nothing at `src`, which is not read then.
__device__ __forceinline__ void cp_async16_or_zeros(void* dst, const void* src, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(dst)), "l"(src), "r"(there ? 16 : 0)
                 : "memory");
}
__device__ __forceinline__ void cp_async8(void* dst, const void* src) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(shared_address(dst)), "l"(src) : "memory");
}
__device__ __forceinline__ void cp_async4(void* dst, const void* src) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(dst)), "l"(src) : "memory");
}
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int GROUPS>
__device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(GROUPS) : "memory");
}
