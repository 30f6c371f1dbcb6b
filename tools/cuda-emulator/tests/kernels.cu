// Kernels that are right, and kernels that each do one thing which no kernel may.
#include "intrinsics.cuh"

extern "C" __global__ void add(float* out, const float* x, float y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = x[i] + y;
}

// The sum of a block, through its warps and shared memory.
extern "C" __global__ void block_sum(float* out, const float* x, int n) {
    __shared__ float sums[32];
    float sum = 0;
    for (int i = threadIdx.x; i < n; i += blockDim.x) sum += x[i];
    for (int flip = 16; flip > 0; flip /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, flip);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int w = 1; w < blockDim.x / 32; w++) sum += sums[w];
        *out = sum;
    }
}

// Adds each block's number, through shared memory, once for each of its 32 threads.
extern "C" __global__ void add_numbers(float* sum) {
    __shared__ float own[32];
    own[threadIdx.x] = blockIdx.x;
    __syncthreads();
    atomicAdd(sum, own[31 - threadIdx.x]);
}

// The turns in which the warps of a block come.
extern "C" __global__ void warp_order(float* out, float* turn) {
    if (threadIdx.x % 32 == 0) out[threadIdx.x / 32] = atomicAdd(turn, 1.0f);
}

extern "C" __global__ void missing_barrier(float* out, const float* x) {
    extern __shared__ float tile[];
    tile[threadIdx.x] = x[threadIdx.x];
    out[threadIdx.x] = tile[blockDim.x - 1 - threadIdx.x];
}

// Several lanes read what each writes, again and again; barriers of the warp order it, if they are there.
extern "C" __global__ void warp_turns(float* out, const float* x, int ordered) {
    __shared__ float tile[64];
    int lane = threadIdx.x % 32;
    float *mine = tile + threadIdx.x / 32 * 32, sum = 0;
    for (int t = 0; t < 3; t++) {
        mine[lane] = x[threadIdx.x] * t;
        __syncwarp();
        for (int i = 0; i < 4; i++) sum += mine[(lane + i) % 32];
        if (ordered) __syncwarp();
    }
    out[threadIdx.x] = sum;
}

extern "C" __global__ void unwritten_shared(float* out) {
    __shared__ float tile[64];
    if (threadIdx.x < 8) tile[threadIdx.x] = 1;
    __syncthreads();
    out[threadIdx.x] = tile[threadIdx.x];
}

extern "C" __global__ void unaligned(float* out, const float* x) {
    uint4 v = load16(x + 1);
    out[threadIdx.x] = __uint_as_float(v.x);
}

extern "C" __global__ void split_barrier(float* out) {
    if (threadIdx.x < 32) __syncthreads();
    else __shfl_sync(0xffffffffu, 1.0f, int(out[0]) * 0);
    if (threadIdx.x == 40) __shfl_sync(1u << 8 | 1u << 9, 1.0f, 8);
}

// Each warp comes to a barrier at a line of its own.
extern "C" __global__ void barriers_of_two_lines(float* out) {
    if (threadIdx.x < 32) {
        __syncthreads();
    } else {
        __syncthreads();
    }
}
extern "C" __global__ void barrier_of_any_line(float* out) {
    if (threadIdx.x < 32) {
        block_barrier<64>();
    } else {
        block_barrier<64>();
    }
}
extern "C" __global__ void barrier_of_one_warp(float* out) {
    block_barrier<32>();
}

// out[16, 8] = a[16, 16] · b[16, 8] of bf16, through ldmatrix and mma.sync.
extern "C" __global__ void product(float* out, const unsigned short* a, const unsigned short* b) {
    __shared__ unsigned short sa[16 * 16], sb[16 * 16];
    int lane = threadIdx.x;
    for (int i = lane; i < 256; i += 32) sa[i] = a[i];
    for (int i = lane; i < 256; i += 32) sb[i] = i % 16 < 8 ? b[i / 16 * 8 + i % 16] : 0;
    __syncwarp();
    uint32_t fa[4], fb[4];
    ldmatrix_x4(fa, sa + (lane % 16) * 16 + lane / 16 * 8);
    ldmatrix_x4_trans(fb, sb + (lane % 16) * 16 + lane / 16 * 8);
    float c[4] = {};
    mma_bf16(c, fa, fb[0], fb[1]);
    for (int i = 0; i < 4; i++) out[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = c[i];
}

extern "C" __global__ void async_copy(float* out, const float* x, int wait) {
    extern __shared__ float tile[];
    cp_async16(tile + threadIdx.x * 4, x + threadIdx.x * 4);
    cp_async_commit();
    if (wait) cp_async_wait<0>();
    __syncthreads();
    out[threadIdx.x] = tile[(blockDim.x - 1 - threadIdx.x) * 4];
    if (!wait) cp_async_wait<0>();
}

extern "C" __global__ void unwritten_memory(float* out, const float* x) { out[threadIdx.x] = x[threadIdx.x]; }

extern "C" __global__ void behind_shared(float* out) {
    extern __shared__ float tile[];
    tile[256 + threadIdx.x] = 1;
    out[threadIdx.x] = 1;
}

extern "C" __global__ void write_race(float* out) {
    __shared__ float one[1];
    one[0] = threadIdx.x;
    __syncthreads();
    out[threadIdx.x] = one[0];
}

extern "C" __global__ void lost_lane(float* out) {
    int lane = threadIdx.x % 32;
    if (lane < 16) out[threadIdx.x] = __shfl_sync(0xffffu, 1.0f, 20);
}

extern "C" __global__ void mixed_collectives(float* out) {
    out[threadIdx.x] = threadIdx.x % 2 ? __shfl_sync(0xffffffffu, 1.0f, 3) : float(__ballot_sync(0xffffffffu, 1));
}

extern "C" __global__ void foreign_mask(float* out) { out[threadIdx.x] = __shfl_sync(1u, 1.0f, 0); }

extern "C" __global__ void collective_of_the_gone(float* out) {
    if (threadIdx.x % 32 == 9) return;
    out[threadIdx.x] = __shfl_sync(0xffffffffu, 1.0f, 0);
}

extern "C" __global__ void forgotten_copy(float* out, const float* x) {
    extern __shared__ float tile[];
    cp_async4(tile + threadIdx.x, x + threadIdx.x);
    cp_async_commit();
}

extern "C" __global__ void unaligned_copy(float* out, const float* x) {
    extern __shared__ float tile[];
    cp_async16(tile, x + 1);
}

// Reads `before`, which it adds, before it waits for the kernel before it, and `x` behind that. It may do wrong before it waits.
extern "C" __global__ void early(float* out, const float* x, float* before, int how) {
    extern __shared__ float tile[];
    enum { READ, ASYNC_COPY, ATOMIC, WRITE, NO_WAIT };
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    // Of another block.
    before += (blockIdx.x + 1) % gridDim.x * blockDim.x + threadIdx.x;
    if (how == NO_WAIT && i == 40) return;
    if (how == ATOMIC) atomicAdd(before, 1.0f);
    if (how == WRITE) *before = 1;
    float y = 0;
    if (how == ASYNC_COPY) {
        cp_async4(tile + threadIdx.x, before);
        cp_async_commit();
    } else {
        y = *before;
    }
    wait_for_previous();
    if (how == ASYNC_COPY) {
        cp_async_wait<0>();
        y = tile[threadIdx.x];
    }
    out[i] = x[i] + y;
}

// Two products of four warps: each has a sum of 16 ones in every place. A thread may use what one of them still needs.
extern "C" __global__ void group_products(float* out, const float* one, int how) {
    extern __shared__ float tile[];
    enum { RIGHT, WRITE_A, WRITE_SUMS, WRITE_SUMS_BETWEEN, READ_SUMS, NOT_PUBLISHED, NOT_FENCED };
    const uint32_t ones = 0x3f803f80;
    store16(tile + threadIdx.x * 4, make_uint4(ones, ones, ones, ones));
    if (how != NOT_PUBLISHED) wgmma_publish();
    __syncthreads();
    uint64_t b = uint64_t(1) << 62 | uint64_t(1024 >> 4) << 32 | uint64_t(1) << 16 | shared_address(tile) >> 4;
    uint32_t first_a[4], second_a[4];
    float first[32], second[32], sum = 0;
    for (int i = 0; i < 4; i++) first_a[i] = second_a[i] = ones;
    for (int i = 0; i < 32; i++) first[i] = second[i] = 1;
    bool wrong = threadIdx.x == 70;
    if (how != NOT_FENCED) wgmma_begin();
    wgmma_columns<false>(first, first_a, b);
    wgmma_commit();
    wgmma_columns<false>(second, second_a, b);
    if (how == WRITE_SUMS_BETWEEN && wrong) second[3] *= *one;
    wgmma_columns<false>(second, second_a, b);
    wgmma_commit();
    wgmma_wait<1>();
    // The first is there.
    for (int i = 0; i < 4; i++) first_a[i] = 0;
    for (int i = 0; i < 32; i++) first[i] *= 2;
    if (how == WRITE_A && wrong) second_a[2] = 0;
    if (how == WRITE_SUMS && wrong) second[31] *= *one;
    if (how == READ_SUMS) sum += second[7];
    wgmma_wait<0>();
    for (int i = 0; i < 32; i++) sum += first[i] + second[i];
    out[threadIdx.x] = sum + first_a[0];
}

// Sums of 16 numbers each, the first of which is 0 and the last 15: rows of 128 bytes, by this distance of eight of them and this
// base offset.
extern "C" __global__ void described_product(float* out, int stride, int base) {
    extern __shared__ unsigned short rows[];
    for (int i = threadIdx.x; i < 16 * 64; i += blockDim.x) rows[i] = f32_to_bf16(float(i / 64));
    wgmma_publish();
    __syncthreads();
    uint64_t b = uint64_t(1) << 62 | uint64_t(base) << 49 | uint64_t(stride >> 4) << 32 | uint64_t(1) << 16 | shared_address(rows) >> 4;
    const uint32_t ones = 0x3f803f80, a[4] = {ones, ones, ones, ones};
    float sums[32] = {};
    wgmma_begin();
    wgmma_columns<false>(sums, a, b);
    wgmma_commit();
    wgmma_wait<0>();
    out[threadIdx.x] = sums[31];
}

// Blocks have no more threads than that.
constexpr int BOUND = 32;
extern "C" __global__ void __launch_bounds__(2 * BOUND, 4) bounded(float* out, const float* x) { out[threadIdx.x] = x[threadIdx.x]; }
