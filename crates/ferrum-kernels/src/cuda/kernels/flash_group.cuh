// Attention of many rows on compute capability 9.0: products of four warps (`wgmma`), for keys and values of one width.
//
// A block makes 128 rows, as `flash.cuh` packs them, with two groups of four warps. Scores of 128 keys are a product of queries
// and keys in shared memory; weights stay in registers, which is where the product with values takes them from. While a group
// makes weights of one tile of keys, its sums of values of the tile before are still on their way (as in FlashAttention-3, Shah et
// al., 2024, algorithm 2, without the warps that only copy: copies of two tiles are a few instructions for each thread).
//
// Matrices. Rows of 64 elements are 128 bytes, whose pieces of 16 bytes are exchanged by the row's lowest three bits; wider
// vectors are as many such matrices, one behind the other. The same layout does for keys, of which the product sums along the
// row, and for values, of which it sums along the column.
#pragma once
#include "flash.cuh"

// Eight rows of a matrix, as products of four warps want them aligned.
struct alignas(1024) FlashRow8 {
    uint8_t bytes[1024];
};

// A matrix in shared memory, for a product. Rows of eight are 1024 bytes from the next eight. Where columns are beside each
// other, the next 64 of them begin `leading` bytes behind.
__device__ __forceinline__ uint64_t group_matrix(const void* at, int leading) {
    const uint64_t swizzle_128 = uint64_t(1) << 62, eight_rows = uint64_t(1024 >> 4) << 32;
    return swizzle_128 | eight_rows | uint64_t(leading >> 4) << 16 | (shared_address(at) & 0x3ffff) >> 4;
}
// One that begins so many bytes behind.
__device__ __forceinline__ uint64_t group_matrix_at(uint64_t matrix, int bytes) { return matrix + (bytes >> 4); }

// Where a row's piece of 16 bytes lies, with so many rows in each matrix.
template <int ROWS>
__device__ __forceinline__ int group_offset(int row, int piece) {
    return piece / 8 * (ROWS * 128) + row * 128 + (piece % 8 ^ row % 8) * 16;
}

// Queries as rows of matrices, by the rules of `load_queries`. All that a thread has is on its way before the first is used.
template <bool HALF, int WIDTH, int M, int THREADS>
__device__ __forceinline__ void load_group_queries(const Flash& c, const Work& w, uint8_t* tile, float* factors) {
    constexpr int PIECES = WIDTH / 8, AT_ONCE = THREADS / PIECES, COUNT = M / AT_ONCE;
    int first = int(threadIdx.x) / PIECES, piece = int(threadIdx.x) % PIECES;
    uint4 x[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        int row = w.row + first + i * AT_ONCE;
        x[i] = make_uint4(0, 0, 0, 0);
        if (row >= w.rows) continue;
        int query = row / c.group, head = w.kv_head * c.group + row - query * c.group;
        x[i] = load16(c.q + (w.token + query) * c.q_token + head * c.q_head + piece * 8);
    }
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        int r = first + i * AT_ONCE;
        float factor = 1;
        if (DIVIDES<HALF>) {
            uint32_t words[4] = {x[i].x, x[i].y, x[i].z, x[i].w}, most = 0;
#pragma unroll
            for (int j = 0; j < 4; j++) most = max(most, max(words[j] & 0x7fffu, words[j] >> 16 & 0x7fffu));
#pragma unroll
            for (int flip = PIECES / 2; flip > 0; flip /= 2) most = max(most, __shfl_xor_sync(ALL_LANES, most, flip));
            int exponent = min(max(int(most >> 7), 27), 227);
            factor = __uint_as_float(uint32_t(254 - exponent) << 23);
            if (piece == 0) factors[r] = __uint_as_float(uint32_t(exponent) << 23);
        }
        convert_queries<HALF>(x[i], factor);
        store16(tile + group_offset<M>(r, piece), x[i]);
    }
}

// How scores become weights: what a thread knows of its two rows.
struct Rows {
    Range sees[2];
    // What scores are multiplied with on their way into the exponential function.
    float factor[2], top[2], total[2];
    // Keys that all rows of the warp see.
    int all_from, all_to;
    // Whether that is all that happens to scores: no cap, nor a scale so small that keys which a row does not see had a weight.
    bool plain;

    __device__ __forceinline__ Rows(const Flash& c, const Work& w, int first, int row) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int mine = row + half * 8;
            sees[half] = mine < w.rows ? visible(c, w.first + mine / c.group, w.keys) : Range{0, 0};
            top[half] = LOWEST;
            total[half] = 0;
        }
        // Rows that are not there may see anything.
        int last = min(first + 15, w.rows - 1);
        all_from = visible(c, w.first + last / c.group, w.keys).start;
        all_to = visible(c, w.first + min(first, last) / c.group, w.keys).end;
        plain = c.softcap <= 0 && c.scale > 1e-3f;
    }

    // Scores of the keys from `key` on become weights, under a maximum that may have risen. What there was is to be multiplied
    // with `kept`.
    template <int KN>
    __device__ __forceinline__ void weigh(float (&score)[KN][4], const Flash& c, int key, float (&kept)[2]) {
        float multiplier[2] = {factor[0], factor[1]};
        if (!plain) {
#pragma unroll
            for (int t = 0; t < KN; t++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    float x = score[t][i] * factor[i / 2];
                    if (c.softcap > 0) {
                        float e = exp2_approx(x * (2 * LOG2E / c.softcap));
                        x = c.softcap * LOG2E * (1.0f - __fdividef(2.0f, e + 1.0f));
                    }
                    score[t][i] = x;
                }
            multiplier[0] = multiplier[1] = 1;
        }
        if (key < all_from || key + KN * 8 > all_to) {
            int first = key + int(threadIdx.x) % 4 * 2;
#pragma unroll
            for (int t = 0; t < KN; t++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    int j = first + t * 8 + i % 2;
                    if (j < sees[i / 2].start || j >= sees[i / 2].end) score[t][i] = LOWEST;
                }
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float most = LOWEST;
#pragma unroll
            for (int t = 0; t < KN; t++) most = fmaxf(most, fmaxf(score[t][half * 2], score[t][half * 2 + 1]));
            most = fmaxf(most, __shfl_xor_sync(ALL_LANES, most, 1));
            most = fmaxf(most, __shfl_xor_sync(ALL_LANES, most, 2));
            float now = fmaxf(top[half], most == LOWEST ? LOWEST : most * multiplier[half]);
            kept[half] = exp2_approx(top[half] - now);
            top[half] = now;
            // Of a row that has not seen a key yet, nothing is left.
            float from = now == LOWEST ? 0.0f : now, sum = 0;
#pragma unroll
            for (int t = 0; t < KN; t++)
#pragma unroll
                for (int i = half * 2; i < half * 2 + 2; i++) {
                    score[t][i] = exp2_approx(fmaf(score[t][i], multiplier[half], -from));
                    sum += score[t][i];
                }
            total[half] = fmaf(total[half], kept[half], sum);
        }
    }
};

// Copies of tiles of N vectors: where they lie, and the matrices they go to.
template <int WIDTH, int N, int THREADS>
struct GroupCopies {
    static const int TILE = N * WIDTH * 2, RING = 4;
    uint8_t *keys, *values;
    // Of the tiles on their way, as 32 bits: so many vectors of 128 bytes are more than any device's memory.
    int* vectors;
    // Keys that some row of the block sees. Instead of others, the nearest of them is copied: its weight is zero.
    int first_key, end_key;

    // Of this thread's key in a tile; nothing is read where the tile is not there.
    __device__ __forceinline__ int find(const Flash& c, const Work& w, int tile, int end) const {
        int j = min(max(tile * N + int(threadIdx.x), first_key), end_key - 1);
        if (threadIdx.x >= N || tile >= end) return 0;
        int64_t vector = vector_of(c, w, j);
        return vector < 0 ? 0 : int(vector);
    }
    __device__ __forceinline__ void keep(int tile, int vector) const {
        if (threadIdx.x < N) vectors[tile % RING * N + threadIdx.x] = vector;
    }
    __device__ __forceinline__ void copy(uint8_t* tiles, const void* from, int tile) const {
        constexpr int PIECES = WIDTH / 8, AT_ONCE = THREADS / PIECES;
        static_assert(AT_ONCE % 8 == 0, "a thread's pieces are exchanged alike");
        int row = int(threadIdx.x) / PIECES, piece = int(threadIdx.x) % PIECES;
        uint8_t* to = tiles + tile % 2 * TILE + group_offset<N>(row, piece);
        const uint8_t* at = static_cast<const uint8_t*>(from) + piece * 16;
        const int* vector = vectors + tile % RING * N + row;
        int mine[N / AT_ONCE];
#pragma unroll
        for (int i = 0; i < N / AT_ONCE; i++) mine[i] = vector[i * AT_ONCE];
#pragma unroll
        for (int i = 0; i < N / AT_ONCE; i++)
            cp_async16(to + i * AT_ONCE * 128, at + int64_t(mine[i]) * (WIDTH * 2));
    }
};

template <class E, int WIDTH>
__device__ __forceinline__ void flash_group(const Flash& c) {
    constexpr bool HALF = Load<E>::HALF;
    constexpr int M = 128, N = 128, THREADS = 256, KN = N / 8, PAIRS = WIDTH / 16;
    typedef GroupCopies<WIDTH, N, THREADS> Copies;
    extern __shared__ FlashRow8 flash_rows[];

    wait_for_previous();
    Work w;
    if (!find_work<M>(c, w)) return;
    // In the order of `shared_bytes` in `flash.rs`.
    uint8_t* queries = reinterpret_cast<uint8_t*>(flash_rows);
    Copies copies;
    copies.keys = queries + M * WIDTH * 2;
    copies.values = copies.keys + 2 * Copies::TILE;
    copies.vectors = reinterpret_cast<int*>(copies.values + 2 * Copies::TILE);
    float* factors = reinterpret_cast<float*>(copies.vectors + Copies::RING * N);

    // The same in all lanes, also for the compiler.
    int warp = __shfl_sync(ALL_LANES, int(threadIdx.x) / 32, 0), group = warp / 4, lane = threadIdx.x % 32;
    Rows rows(c, w, w.row + warp * 16, w.row + warp * 16 + lane / 4);
    int last_row = min(w.row + M, w.rows) - 1;
    copies.first_key = visible(c, w.first + w.row / c.group, w.keys).start;
    copies.end_key = visible(c, w.first + last_row / c.group, w.keys).end;
    int begin = copies.first_key / N, end = begin;
    if (copies.first_key < copies.end_key) end = (copies.end_key + N - 1) / N;
    take_split<N, 2>(c, w, begin, end);
    // A group without rows, or whose rows see no key of the last tiles, only takes part in copies there.
    int own_end = begin, group_row = w.row + group * (M / 2);
    if (group_row < w.rows) {
        int sees = visible(c, w.first + min(group_row + M / 2 - 1, last_row) / c.group, w.keys).end;
        own_end = max(min((sees + N - 1) / N, end), begin);
    }

    load_group_queries<HALF, WIDTH, M, THREADS>(c, w, queries, factors);
    copies.keep(begin, copies.find(c, w, begin, end));
    copies.keep(begin + 1, copies.find(c, w, begin + 1, end));
    __syncthreads();
#pragma unroll
    for (int half = 0; half < 2; half++) {
        rows.factor[half] = c.scale * (c.softcap > 0 ? 1.0f : LOG2E);
        if (DIVIDES<HALF>) rows.factor[half] *= factors[warp * 16 + half * 8 + lane / 4];
    }
    if (begin < end) {
        copies.copy(copies.keys, c.k, begin);
        cp_async_commit();
        copies.copy(copies.values, c.v, begin);
        if (begin + 1 < end) copies.copy(copies.keys, c.k, begin + 1);
    }
    cp_async_commit();
    copies.keep(begin + 2, copies.find(c, w, begin + 2, end));

    uint64_t query_matrix = group_matrix(queries + group * (M / 2) * 128, 16);
    uint64_t key_matrix = group_matrix(copies.keys, 16), value_matrix = group_matrix(copies.values, N * 128);
    Sums<PAIRS> sums;
    sums.clear();
    float score[KN][4], kept[2];
    uint32_t weights[KN * 2];
    float(&scores)[KN * 4] = *reinterpret_cast<float(*)[KN * 4]>(&score);
    float(&added)[PAIRS * 8] = *reinterpret_cast<float(*)[PAIRS * 8]>(&sums.value);

    auto begin_scores = [&](int tile) {
        uint64_t keys = group_matrix_at(key_matrix, tile % 2 * Copies::TILE);
#pragma unroll
        for (int k = 0; k < WIDTH / 16; k++)
            wgmma_rows<HALF>(scores, group_matrix_at(query_matrix, k / 4 * (M * 128) + k % 4 * 32),
                             group_matrix_at(keys, k / 4 * (N * 128) + k % 4 * 32), k > 0);
        wgmma_commit();
    };
    auto begin_values = [&](int tile) {
        uint64_t values = group_matrix_at(value_matrix, tile % 2 * Copies::TILE);
#pragma unroll
        for (int k = 0; k < N / 16; k++) wgmma_columns<HALF>(added, weights + k * 4, group_matrix_at(values, k * 16 * 128));
        wgmma_commit();
    };
    auto pack_weights = [&]() {
#pragma unroll
        for (int i = 0; i < KN * 2; i++) weights[i] = packed<HALF>(score[i / 2][i % 2 * 2], score[i / 2][i % 2 * 2 + 1]);
        wgmma_hold(weights);
    };
    // All that was begun of copies is there behind this, for all. A group that has no more products waits at another line than the other.
    auto arrive = [&]() {
        cp_async_wait<0>();
        wgmma_publish();
        block_barrier<THREADS>();
    };
    // Begins what the next step takes, over what the last one has read.
    auto copy_next = [&](int tile) {
        int vector = copies.find(c, w, tile + 3, end);
        if (tile + 1 < end) copies.copy(copies.values, c.v, tile + 1);
        if (tile + 2 < end) copies.copy(copies.keys, c.k, tile + 2);
        cp_async_commit();
        copies.keep(tile + 3, vector);
    };

    cp_async_wait<1>();
    wgmma_publish();
    __syncthreads();
    if (begin < own_end) {
        wgmma_hold(scores);
        wgmma_begin();
        begin_scores(begin);
        wgmma_wait<0>();
        wgmma_hold(scores);
        rows.weigh(score, c, begin * N, kept);
        pack_weights();
        // In each step, scores of the next tile, and sums of this one's values.
#pragma unroll 1
        for (int tile = begin; tile < own_end - 1; tile++) {
            arrive();
            wgmma_hold(scores);
            wgmma_hold(added);
            wgmma_begin();
            begin_scores(tile + 1);
            begin_values(tile);
            copy_next(tile);
            wgmma_wait<1>();
            wgmma_hold(scores);
            rows.weigh(score, c, (tile + 1) * N, kept);
            // Never so, which the assembler does not know: it would wait before it makes weights.
            if (rows.total[0] + rows.total[1] < 0) wgmma_publish();
            wgmma_wait<0>();
            wgmma_hold(added);
            wgmma_hold(weights);
            // Most tiles raise no maximum.
            if (__any_sync(ALL_LANES, kept[0] != 1 || kept[1] != 1)) {
#pragma unroll
                for (int i = 0; i < PAIRS * 8; i++) added[i] *= kept[i / 2 % 2];
            }
            pack_weights();
        }
        arrive();
        wgmma_hold(added);
        wgmma_begin();
        begin_values(own_end - 1);
        copy_next(own_end - 1);
        wgmma_wait<0>();
        wgmma_hold(added);
        wgmma_hold(weights);
    }
    for (int tile = own_end; tile < end; tile++) {
        arrive();
        copy_next(tile);
    }
    cp_async_wait<0>();

#pragma unroll
    for (int half = 0; half < 2; half++) {
        float total = rows.total[half];
        total += __shfl_xor_sync(ALL_LANES, total, 1);
        total += __shfl_xor_sync(ALL_LANES, total, 2);
        sums.total[half * 2] = total;
        sums.top[half] = rows.top[half];
    }
    write_rows<PAIRS, 1>(c, w, sums, c.splits == 1, false, warp, 0);
}

#define FLASH_GROUP_KERNEL(NAME, E, WIDTH)                                                                                 \
    KERNEL __launch_bounds__(256, 1) NAME(FLASH_PARAMS) {                                                                  \
        Flash c = FLASH;                                                                                                   \
        flash_group<E, WIDTH>(c);                                                                                          \
    }
// Nothing where the instructions are not. The first number of a name is the rows of a tile, the second the elements of vectors.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ == 900
#define FLASH_GROUP_KERNELS(NAME, E)                                                                                       \
    FLASH_GROUP_KERNEL(flash_group_##NAME##_128x128, E, 128)                                                               \
    FLASH_GROUP_KERNEL(flash_group_##NAME##_128x64, E, 64)
#else
#define FLASH_GROUP_KERNELS(NAME, E)
#endif
