// Products of up to eight rows of 16 bits with quantised matrices, on tensor cores: what decoding with quantised weights is made
// of, and bound by the bytes of the weight.
//
// A block makes 16 rows of the weight at a time (a row of tiles), or where k is short several such rows. Warps share the tiles of a
// row, of 256 numbers of k each, which come to shared memory through a ring of asynchronous copies of each warp; the ring goes on
// into the warp's next row of tiles, so that enough bytes are always on their way. `quant_gemv.rs` says how many stages it has.
//
// A code c becomes the 16-bit number BIAS + c by one instruction for two, and a product
// of such numbers is exact: scales, minimums and what the bias adds (BIAS times the sum of the activations, a product with ones)
// are applied to the f32 sums of each 32 or 16 numbers. Activations stay as they are.
//
// Codes of a table have no such form: a byte, which is two of them, is looked up in shared memory, where each lane has the
// numbers of all bytes in a bank of its own.
//
// A row's sums have one order, whichever rows are beside it.
#pragma once
#include "packed.cuh"

constexpr int WARPS = 8, MAX_STAGES = 3;
// Blocks that have room in a multiprocessor: devices of less shared memory have one.
#if __CUDA_ARCH__ == 800 || __CUDA_ARCH__ == 900
#define GEMV_BOUNDS __launch_bounds__(32 * WARPS, 2)
#else
#define GEMV_BOUNDS __launch_bounds__(32 * WARPS, 1)
#endif
// Bytes of a tile's scales, at most.
constexpr int SCALE_BYTES = TILE_ROWS * 64;
// Factors of a group or half, for each row; the pad keeps stores of a warp in different banks.
constexpr int FACTOR_STRIDE = TILE_ROWS + 2;

constexpr uint32_t ONES = ACT_IS_F16 ? 0x3c003c00u : 0x3f803f80u;
// BIAS and, in steps of 16, UPPER_BIAS, as two numbers of 16 bits whose fractions have room for four (six) bits of a code.
constexpr uint32_t BIAS_BITS = ACT_IS_F16 ? 0x64006400u : 0x43004300u, UPPER_BITS = ACT_IS_F16 ? 0x74007400u : 0x45004500u;
constexpr float BIAS = ACT_IS_F16 ? 1024.0f : 128.0f, UPPER_BIAS = 16.0f * BIAS;

__device__ __forceinline__ void mma_act(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    if (ACT_IS_F16) mma_f16(c, a, b[0], b[1]);
    else mma_bf16(c, a, b[0], b[1]);
}

// The numbers that the two codes of a byte stand for, as a word of 16-bit elements, for each byte and lane.
constexpr int LOOKUP_BYTES = 256 * 32 * 4;

// Writes them: a thread for each byte, whose words are a line of 128 B.
__device__ __forceinline__ void make_lookup(uint4* lookup, int table) {
    uint4 values = table_of(table);
    for (int byte = threadIdx.x; byte < 256; byte += blockDim.x) {
        int both = look_up((byte & 15) | (byte >> 4) << 8, values);
        uint32_t word = Act::pack2(float(int8_t(both)), float(int8_t(both >> 8)));
        // In other lines' order each, so that the stores of lanes beside each other go to different banks.
#pragma unroll
        for (int i = 0; i < 8; i++) lookup[byte * 8 + (i + byte) % 8] = make_uint4(word, word, word, word);
    }
}
// What the byte at bit `at` of a word stands for.
__device__ __forceinline__ uint32_t looked_up(const uint8_t* lookup, uint32_t codes, int at) {
    uint32_t line = (at >= 8 ? codes >> (at - 7) : codes << 7) & 255 << 7;
    return *reinterpret_cast<const uint32_t*>(lookup + (line | threadIdx.x % 32 * 4));
}

// 16 rows of a matrix, of which those from `begin` to before `end` are wanted, and what belongs to them: rows of x, or pairs, from
// `first` on, and which the first of the 16 is in an output, or of an expert.
struct RowTile {
    int64_t number;
    int begin, end;
    int first, rows;
    int64_t out;
    int expert;
};

// A lane's eight codes of a group and a row: those of 4t to 4t + 3 in the lower halves of the bytes, of 16 + 4t on in the upper ones.
struct LaneCodes {
    uint32_t low, high;
};

// In both halves of a word: four bits of a code, and those that the upper plane adds to them.
struct Masks {
    uint32_t four, high;
};

template <int BITS, bool TABLE>
struct PackedTile {
    // Codes of eight bits are two numbers, of which the second counts sixteen times.
    static constexpr bool WIDE = BITS == 8;
    // The first bytes of shared memory, for all warps.
    static constexpr int OF_BLOCK = TABLE ? LOOKUP_BYTES : 0;
    // Whether each half of a group has a scale of its own.
    static constexpr int HALVES = BITS == 2 || BITS == 3 || BITS == 6 ? 2 : 1;
    static constexpr int HIGH = high_of_tile(BITS), SCALES = scales_of_tile(BITS);
    static constexpr int FACTORS = TILE_GROUPS * HALVES * FACTOR_STRIDE;

    // A tile comes as it is.
    static __device__ __forceinline__ void copy(uint8_t* to, const uint8_t* tile, int tile_bytes) {
        int at = threadIdx.x % 32 * 16;
#pragma unroll
        for (int i = 0; i < SCALES; i += 512) cp_async16(to + i + at, tile + i + at);
#pragma unroll
        for (int i = SCALES; i < SCALES + SCALE_BYTES; i += 512)
            if (i + at < tile_bytes) cp_async16(to + i + at, tile + i + at);
    }

    // ---- scales ---------------------------------------------------------------------------------------------------

    // What sums of each group or half are multiplied with, and what the sum of the activations is: a lane makes those of four
    // groups of a row.
    static __device__ __forceinline__ void make_factors(float2* factors, const uint8_t* tile, const Weight& w) {
        const uint8_t* from = tile + SCALES;
        int lane = threadIdx.x % 32, row = lane / 2, half = lane % 2;
        const float bias = TABLE ? 0.0f : (WIDE ? BIAS + UPPER_BIAS + 128.0f : BIAS) + float(w.zero);
        float factor[4 * HALVES], rest[4 * HALVES];
        if (w.nested) {
            uint2 both = load8(from + nested_pair(BITS, row));
            float d = __uint_as_float(both.x), minimum = __uint_as_float(both.y);
            uint32_t subs[2 * HALVES];
            if constexpr (HALVES == 2) {
                uint4 words = load16(from + 16 * lane);
                subs[0] = words.x, subs[1] = words.y, subs[2] = words.z, subs[3] = words.w;
            } else {
                uint2 words = load8(from + 8 * lane);
                subs[0] = words.x, subs[1] = words.y;
            }
#pragma unroll
            for (int i = 0; i < 4 * HALVES; i++) {
                uint32_t sub = subs[i / 2] >> 16 * (i % 2);
                factor[i] = d * float(int8_t(sub));
                rest[i] = -minimum * float(sub >> 8 & 255);
            }
        } else {
            float flat[8];
            if (w.min_groups == 1) {
                F32::read8(reinterpret_cast<const float*>(from + 32 * lane), flat);
            } else {
                bool shared = w.min_groups == 4;
                uint4 words = make_uint4(0, 0, 0, 0);
                uint2 one = make_uint2(0, 0);
                if (shared) one = load8(from + 8 * lane);
                else words = load16(from + 16 * lane);
                uint32_t of_groups[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    flat[2 * i] = __uint_as_float(shared ? one.x : of_groups[i]);
                    flat[2 * i + 1] = __uint_as_float(one.y);
                }
            }
#pragma unroll
            for (int i = 0; i < 4 * HALVES; i++) factor[i] = flat[i / HALVES * 2], rest[i] = flat[i / HALVES * 2 + 1];
        }
#pragma unroll
        for (int i = 0; i < 4 * HALVES; i++) {
            float2 both = make_float2(factor[i], fmaf(-bias, factor[i], rest[i]));
            factors[(half * 4 * HALVES + i) * FACTOR_STRIDE + row] = both;
        }
    }

    // ---- codes ----------------------------------------------------------------------------------------------------

    template <int PIECES>
    static __device__ __forceinline__ uint32_t word(const uint8_t* plane, int row, int g, int at) {
        return *reinterpret_cast<const uint32_t*>(plane + group_offset<PIECES>(row, g) + at);
    }

    // From the four bits of the lower plane that `ldmatrix` has read, where it has as many.
    static __device__ __forceinline__ LaneCodes codes(uint32_t low, const uint8_t* from, int row, int g) {
        int t = threadIdx.x % 4;
        if constexpr (BITS < 4) {
            uint32_t two = word<4>(from, row, g, t / 2 * 4) >> 4 * (t % 2);
            low = (two & 0x03030303u) | (two & 0x0c0c0c0cu) << 2;
            if (BITS == 3) {
                uint32_t one = word<2>(from + HIGH, row, g, 0) >> 2 * t;
                low |= (one & 0x01010101u) << 2 | (one & 0x02020202u) << 5;
            }
            return {low, 0};
        } else if constexpr (BITS == 8) {
            return {low, word<8>(from + HIGH, row, g, t * 4) ^ 0x88888888u};
        } else if constexpr (BITS == 6) {
            return {low, word<4>(from + HIGH, row, g, t / 2 * 4) >> 4 * (t % 2)};
        } else if constexpr (BITS == 5) {
            return {low, word<2>(from + HIGH, row, g, 0) >> 2 * t};
        } else {
            return {low, 0};
        }
    }

    // Two codes of half `half`, each with the bias: the first two of four, or the others.
    static __device__ __forceinline__ uint32_t pair(const LaneCodes& codes, const Masks& masks, int half, int second) {
        uint32_t bits = (codes.low >> 4 * half + 8 * second & masks.four) | BIAS_BITS;
        if (BITS == 6) bits |= (half ? codes.high << 2 >> 8 * second : second ? codes.high >> 4 : codes.high << 4) & masks.high;
        if (BITS == 5) bits |= (second ? codes.high >> 4 + half : codes.high << 4 - half) & masks.high;
        return bits;
    }
    static __device__ __forceinline__ uint32_t upper_pair(const LaneCodes& codes, const Masks& masks, int half, int second) {
        return (codes.high >> 4 * half + 8 * second & masks.four) | UPPER_BITS;
    }

    // ---- products -------------------------------------------------------------------------------------------------

    // Adds the products of a group. A lane has those of rows lane / 4 and 8 more with two rows of x; of one row of x it makes no more
    // than that. `a` and `b` are the lane's codes of the two rows, `x` its elements of both halves.
    template <bool MANY>
    static __device__ __forceinline__ void add_group(float (&sums)[4], const LaneCodes& a, const LaneCodes& b,
                                                     const uint2 (&x)[2], const float2* factors, const Masks& masks) {
        const uint32_t ones[4] = {ONES, ONES, ONES, ONES};
        int row = threadIdx.x % 32 / 4;
        float products[4] = {0, 0, 0, 0}, totals[4] = {0, 0, 0, 0};
#pragma unroll
        for (int half = 0; half < 2; half++) {
            uint32_t of_x[2] = {x[half].x, x[half].y};
            uint32_t of_w[4] = {pair(a, masks, half, 0), pair(b, masks, half, 0), pair(a, masks, half, 1), pair(b, masks, half, 1)};
            mma_act(products, of_w, of_x);
            if constexpr (WIDE) {
                uint32_t upper[4] = {upper_pair(a, masks, half, 0), upper_pair(b, masks, half, 0), upper_pair(a, masks, half, 1),
                                     upper_pair(b, masks, half, 1)};
                mma_act(products, upper, of_x);
            }
            mma_act(totals, ones, of_x);
            if (HALVES == 1 && half == 0) continue;
            const float2* of_half = factors + (HALVES == 2 ? half : 0) * FACTOR_STRIDE;
            float2 first = of_half[row], second = of_half[row + 8];
            sums[0] = fmaf(first.x, products[0], fmaf(first.y, totals[0], sums[0]));
            sums[2] = fmaf(second.x, products[2], fmaf(second.y, totals[0], sums[2]));
            if (MANY) {
                sums[1] = fmaf(first.x, products[1], fmaf(first.y, totals[1], sums[1]));
                sums[3] = fmaf(second.x, products[3], fmaf(second.y, totals[1], sums[3]));
            }
#pragma unroll
            for (int i = 0; i < 4; i++) products[i] = totals[i] = 0;
        }
    }

    // The same where codes are looked up: the two of a byte are 16 numbers apart, and so are those of x beside each other.
    template <bool MANY>
    static __device__ __forceinline__ void add_looked_up(float (&sums)[4], uint32_t a, uint32_t b, const uint2 (&x)[2],
                                                         const float2* factors, const uint8_t* lookup) {
        int row = threadIdx.x % 32 / 4;
        float products[4] = {0, 0, 0, 0};
#pragma unroll
        for (int second = 0; second < 2; second++) {
            uint32_t first = second ? x[0].y : x[0].x, behind = second ? x[1].y : x[1].x;
            uint32_t of_x[2] = {__byte_perm(first, behind, 0x5410), __byte_perm(first, behind, 0x7632)};
            uint32_t of_w[4] = {looked_up(lookup, a, 8 * second), looked_up(lookup, b, 8 * second),
                                looked_up(lookup, a, 8 * second + 16), looked_up(lookup, b, 8 * second + 16)};
            mma_act(products, of_w, of_x);
        }
        float first = factors[row].x, other = factors[row + 8].x;
#pragma unroll
        for (int i = 0; i < (MANY ? 4 : 3); i += MANY ? 1 : 2) sums[i] = fmaf(i < 2 ? first : other, products[i], sums[i]);
    }

    // Adds a tile, whose elements of x begin at `x` for this lane; unless it is WHOLE, `left` of them are there.
    template <bool MANY, bool WHOLE>
    static __device__ __forceinline__ void add(float (&sums)[4], const uint8_t* from, const float2* factors, const uint16_t* x,
                                               int left, const Weight& w, const uint8_t* lookup) {
        int lane = threadIdx.x % 32, row = lane / 4;
        // The compiler, which knows no constants here, keeps each in one register instead of making it anew for each use.
        uint32_t nothing = uint32_t(w.zero) & 0x80000000u;
        Masks masks = {0x000f000fu | nothing, (BITS == 6 ? 0x00300030u : 0x00100010u) | nothing};
        // As far as registers go; the last tile of a row is seldom a part.
        constexpr int UNROLL = !WHOLE ? 1 : WIDE || BITS < 4 || BITS == 5 && MANY ? 2 : TILE_GROUPS / 2;
#pragma unroll UNROLL
        for (int two = 0; two < TILE_GROUPS; two += 2) {
            uint32_t low[4] = {0, 0, 0, 0};
            if constexpr (BITS >= 4) ldmatrix_x4(low, from + piece_offset<8>(lane % 16, two + lane / 16));
#pragma unroll
            for (int i = 0; i < 2; i++) {
                int g = two + i;
                uint2 of_x[2] = {make_uint2(0, 0), make_uint2(0, 0)};
                if (WHOLE || g * 32 < left) of_x[0] = load8(x + g * 32);
                if (WHOLE || g * 32 + 16 < left) of_x[1] = load8(x + g * 32 + 16);
                const float2* of_group = factors + g * HALVES * FACTOR_STRIDE;
                if constexpr (TABLE) {
                    add_looked_up<MANY>(sums, low[2 * i], low[2 * i + 1], of_x, of_group, lookup);
                } else {
                    LaneCodes of_row = codes(low[2 * i], from, row, g), other = codes(low[2 * i + 1], from, row + 8, g);
                    add_group<MANY>(sums, of_row, other, of_x, of_group, masks);
                }
            }
        }
    }
};

// What x is: rows with a stride that is a multiple of eight elements, zeros behind k.
struct GemvInput {
    const uint16_t* x;
    int stride;
};

// The block's rows of tiles, of `count`, with a ring of two or three stages. EARLY: where they are does not depend on what runs
// before. Each is one of as many matrices as `RowTiles::MATRICES`, whose sums are written together. `along` warps share a row of
// tiles, so a block makes WARPS / along of them at once: at most as many as its threads write sums of.
template <class S, bool MANY, bool EARLY, class RowTiles>
__device__ __forceinline__ void gemv_row_tiles(const RowTiles& row_tiles, int count, const Weight& w, int groups, int stages, int along,
                                               const GemvInput& in) {
    extern __shared__ uint4 memory[];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, k_tiles = groups / TILE_GROUPS;
    int part = warp % along, at_once = WARPS / along;
    const int of_ring = stages * w.tile_bytes, bytes = of_ring + S::FACTORS * int(sizeof(float2));
    uint8_t *lookup = reinterpret_cast<uint8_t*>(memory), *ring = lookup + S::OF_BLOCK + warp * bytes;
    float2* factors = reinterpret_cast<float2*>(ring + of_ring);
    float* shared = reinterpret_cast<float*>(lookup + S::OF_BLOCK + WARPS * bytes);
    const int of_warp = TILE_ROWS * (MANY ? 8 : 1);

    // What is looked up is made while something is waited for: the first tiles, or the kernel before if the caller has not.
    if (S::OF_BLOCK > 0 && !EARLY) make_lookup(memory, w.table);
    if (!EARLY) wait_for_previous();
    int asked = blockIdx.x * at_once + warp / along, asked_matrix = 0, asked_tile = k_tiles, into = 0;
    const uint8_t* next = nullptr;
    auto begin = [&] {
        if (part >= k_tiles || asked >= count) return;
        const uint8_t* tiles = asked_matrix ? row_tiles.second_tiles() : w.tiles;
        next = tiles + (row_tiles(asked).number * k_tiles + part) * w.tile_bytes, asked_tile = part;
    };
    begin();
    auto ask = [&] {
        if (asked_tile < k_tiles) {
            S::copy(ring + into, next, w.tile_bytes);
            into += w.tile_bytes, next += along * w.tile_bytes, asked_tile += along;
            if (into == of_ring) into = 0;
            if (asked_tile >= k_tiles) {
                if (++asked_matrix == RowTiles::MATRICES) asked_matrix = 0, asked += gridDim.x * at_once;
                begin();
            }
        }
        cp_async_commit();
    };
    for (int i = 0; i < stages - 1; i++) ask();
    if (S::OF_BLOCK > 0 && EARLY) make_lookup(memory, w.table);
    if (S::OF_BLOCK > 0) __syncthreads();
    if (EARLY) wait_for_previous();

    int slot = 0, turn = 0;
    // The sum that this thread writes.
    int row = threadIdx.x % TILE_ROWS, row_of_x = MANY ? threadIdx.x / TILE_ROWS % 8 : 0, beside = threadIdx.x / of_warp;
    for (int first = blockIdx.x * at_once; first < count; first += gridDim.x * at_once) {
        int number = first + warp / along;
        bool works = number < count, sums_here = beside < at_once && first + beside < count;
        RowTile of_sum = {0, 0, 0, 0, 0, 0, 0};
        if (sums_here) of_sum = row_tiles(first + beside);
        bool writes = row_of_x < of_sum.rows;
        // Lanes of rows that are not there make sums that nobody takes.
        int64_t x_row = 0;
        if (at_once == 1 && sums_here) x_row = row_tiles.x_row(of_sum, lane / 4);
        else if (works) x_row = row_tiles.x_row(row_tiles(number), lane / 4);
        const uint16_t* x = in.x + x_row * in.stride + lane % 4 * 4;
        float of_matrices[RowTiles::MATRICES] = {};
#pragma unroll 1
        for (int matrix = 0; matrix < RowTiles::MATRICES; matrix++, turn ^= 1) {
            float sums[4] = {0, 0, 0, 0};
#pragma unroll 1
            for (int k_tile = works ? part : k_tiles; k_tile < k_tiles; k_tile += along) {
                if (stages == MAX_STAGES) cp_async_wait<MAX_STAGES - 2>();
                else cp_async_wait<0>();
                __syncwarp();
                ask();
                const uint8_t* from = ring + slot;
                S::make_factors(factors, from, w);
                __syncwarp();
                const int elements = TILE_GROUPS * 32, left = in.stride - k_tile * elements - lane % 4 * 4;
                const uint16_t* of_tile = x + k_tile * elements;
                if (left >= elements - 16) S::template add<MANY, true>(sums, from, factors, of_tile, left, w, lookup);
                else S::template add<MANY, false>(sums, from, factors, of_tile, left, w, lookup);
                slot += w.tile_bytes;
                if (slot == of_ring) slot = 0;
            }
            // Sums of the warps, in their order. Two places in turn: one barrier is enough.
            float* of_block = shared + turn * (WARPS * of_warp);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int of_x = lane % 4 * 2 + i % 2;
                if (MANY || of_x == 0) of_block[warp * of_warp + of_x * TILE_ROWS + lane / 4 + i / 2 * 8] = sums[i];
            }
            __syncthreads();
            if (!writes) continue;
            float sum = 0;
            for (int i = 0; i < along; i++) sum += of_block[(beside * along + i) * of_warp + threadIdx.x % of_warp];
            of_matrices[matrix == 0 ? 0 : RowTiles::MATRICES - 1] = sum;
        }
        if (writes && row >= of_sum.begin && row < of_sum.end) row_tiles.write(of_sum, row_of_x, row, of_matrices);
    }
}
