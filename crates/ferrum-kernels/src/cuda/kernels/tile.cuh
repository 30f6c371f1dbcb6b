// Products on tensor cores: out[rows, n] = x[rows, k] · weight[n, k]ᵀ, tile by tile.
//
// A block of four warps makes a tile of ROWS × COLUMNS sums, DEPTH elements of k at a time. Rows of x come to shared memory
// through a ring of STAGES asynchronous copies. A weight of 16 bits takes the same way; any other is copied as it is, each
// thread the bytes of one group of 32 numbers, and the thread that copied them unpacks them to `Act` in shared memory while
// the products of the step before run. So a weight is unpacked once for a block, and one core of `ldmatrix` and `mma.sync`
// serves all types.
//
// A sum takes its products in the order of k, sixteen at a time, whatever the size of the tile: with as many splits of k, a row
// has the same bits in tiles of all sizes (for weights of f32, of all those with one DEPTH). Rows, columns and elements behind the edges are zeros in shared memory.
//
// With `ids`, rows are pairs of tokens and experts in the order of their experts (`sort_pairs`), the weight is a stack, and
// a tile has pairs of one expert. The grid is the most tiles that the counts can need; a block finds its own.
#pragma once
#include "packed.cuh"

template <int ROWS_, int COLUMNS_, int DEPTH_, int WARP_ROWS_, int WARP_COLUMNS_, int STAGES_, int BLOCKS_>
struct TileShape {
    static const int ROWS = ROWS_, COLUMNS = COLUMNS_, DEPTH = DEPTH_, STAGES = STAGES_;
    static const int WARP_ROWS = WARP_ROWS_, WARP_COLUMNS = WARP_COLUMNS_;
    // Threads, and blocks that share a processor, as far as shared memory goes.
    static const int THREADS = 128, BLOCKS = BLOCKS_;
    // Pieces of 16 bytes in a row of a tile, and of groups in a column.
    static const int PIECES = DEPTH / 8, GROUPS = DEPTH / 32;
    static const int X_BYTES = ROWS * DEPTH * 2, W_BYTES = COLUMNS * DEPTH * 2;
    // Whether four warps make a product together, in which each has a quarter of the rows.
    static const bool GROUP = WARP_ROWS == 16 && WARP_COLUMNS == COLUMNS;
    static_assert(ROWS / WARP_ROWS * (COLUMNS / WARP_COLUMNS) == 4, "four warps");
    static_assert(ROWS * PIECES % THREADS == 0, "threads copy as many pieces each");
};

// Bytes of a group on its way: two planes of codes, scales of sixteen, scales.
static const int RAW_LOW = 0, RAW_HIGH = 16 * 128, RAW_SUB = 32 * 128, RAW_SCALE = 36 * 128, RAW_BYTES = 44 * 128;

// Where piece `piece` of row `row` lies: the eight rows that `ldmatrix` reads at once, and those that a quarter of a warp
// stores at once, are in different banks.
template <int PIECES>
__device__ __forceinline__ int tile_offset(int row, int piece) {
    int flip = PIECES == 8 ? row & 7 : row >> 1 & 3;
    return (row * PIECES + (piece ^ flip)) * 16;
}

// ---- weights ---------------------------------------------------------------------------------------------------------

// bf16 or f16 in rows with a stride of a multiple of eight elements. TWICE: x has twice as many, and the second half meets
// the same weight.
template <bool TWICE>
struct HalfRows {
    static const bool UNPACKS = false, SCALED = false;
    __device__ __forceinline__ int repeats() const { return 0; }
    const uint16_t* at;
    int64_t stride;

    // Begins to copy step `step` of columns [first, first + count).
    template <class S>
    __device__ __forceinline__ void copy(uint8_t* to, int64_t first, int count, int step) const {
#pragma unroll
        for (int j = 0; j < S::COLUMNS * S::PIECES / S::THREADS; j++) {
            int i = int(threadIdx.x) + j * S::THREADS, column = i / S::PIECES, piece = i % S::PIECES;
            int k = step * S::DEPTH + piece * 8;
            if (TWICE && k >= stride) k -= int(stride);
            bool there = column < count && k < stride;
            const uint16_t* from = at + (there ? (first + column) * stride + k : 0);
            cp_async16_or_zeros(to + tile_offset<S::PIECES>(column, piece), from, there);
        }
    }
    template <class S>
    __device__ __forceinline__ void unpack(uint8_t*, const uint8_t*, int64_t, int, int) const {}
};

// 32 numbers of 16 bits: four pieces.
__device__ __forceinline__ void store_group(uint8_t* to, int pieces, int column, int group, const uint32_t (&words)[16]) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int piece = group * 4 + i;
        int offset = pieces == 8 ? tile_offset<8>(column, piece) : tile_offset<4>(column, piece);
        store16(to + offset, make_uint4(words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]));
    }
}

// A code c as a float: its byte at the right place of a fraction is 128 + c, or for signed bytes, with the sign turned,
// 2^15 + 128 + c. So one multiplication and addition makes the number, without a conversion of integers. What the addition
// of so large a bias rounds is below 2^-16 of a step between codes, for signed bytes 2^-9: less than 16 bits do.
template <bool SIGNED>
__device__ __forceinline__ float biased_code(int codes, int byte) {
    uint32_t bits = SIGNED ? __byte_perm(uint32_t(codes) ^ 0x80808080u, 0x47000000u, 0x7404 | byte << 4)
                           : __byte_perm(uint32_t(codes), 0x43000000u, 0x7044 | byte << 8);
    return __uint_as_float(bits);
}
// TABLE is that of the format; the values of MXFP4 are taken with 12 added, so that they have no sign.
template <int BITS, int TABLE>
__device__ __forceinline__ void unpack_group(const PlaneBytes& bytes, const Weight& w, const float (&factor)[2],
                                             const float (&rest)[2], uint32_t (&words)[16]) {
    const bool SIGNED = BITS == 8 || TABLE == 1;
    int q[8];
    codes_of<BITS>(bytes, TABLE == 1 ? 1 : 0, q);
    if (TABLE == 2) {
#pragma unroll
        for (int i = 0; i < 8; i++)
            q[i] = look_up(uint32_t(q[i]), make_uint4(0x0f0e0d0cu, 0x18141210u, 0x090a0b0cu, 0x00040608u));
    }
    const float bias = SIGNED ? 32768.0f + 128.0f : TABLE == 2 ? 140.0f : 128.0f;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        float f = factor[i / 4], r = fmaf(-f, bias + float(w.zero), rest[i / 4]), x[4];
#pragma unroll
        for (int j = 0; j < 4; j++) x[j] = fmaf(biased_code<SIGNED>(q[i], byte_of(j)), f, r);
        words[2 * i] = Act::pack2(x[0], x[1]);
        words[2 * i + 1] = Act::pack2(x[2], x[3]);
    }
}

// Quantised rows, or with 32 `bits` rows of f32. The number of bits is the same for the whole grid: one kernel for
// all formats costs a branch for each group, and saves the compilation of six.
//
// A number of f32 is two of `Act`, the nearest and what that leaves: each step comes twice, once for each. Routers and other
// small matrices are f32, and what they decide should not hang on the rounding of their weights.
struct PackedRows {
    static const bool UNPACKS = true, SCALED = false;
    // As a shift of the number of steps.
    __device__ __forceinline__ int repeats() const { return bits == 32; }
    Weight w;
    int bits, groups;
    int64_t stride;  // of rows of f32

    template <class S>
    __device__ __forceinline__ void copy(uint8_t* to, int64_t first, int count, int step) const {
        int t = threadIdx.x, column = t / S::GROUPS, g = step * S::GROUPS + t % S::GROUPS;
        if (bits == 32 || column >= count || g >= groups) return;
        GroupPlace at(w, first + column, groups, g);
        uint8_t *low = to + RAW_LOW + 16 * t, *high = to + RAW_HIGH + 16 * t;
        if (bits < 4) cp_async8(low, at.tile + group_offset<4>(at.row, at.g));
        else cp_async16(low, at.tile + group_offset<8>(at.row, at.g));
        const uint8_t *upper = at.tile + high_of_tile(bits), *scales = at.tile + scales_of_tile(bits);
        if (bits == 8) cp_async16(high, upper + group_offset<8>(at.row, at.g));
        if (bits == 6) cp_async8(high, upper + group_offset<4>(at.row, at.g));
        if (bits == 3 || bits == 5) cp_async4(high, upper + group_offset<2>(at.row, at.g));
        int group = at.row * TILE_GROUPS + at.g;
        // Of two bytes each, those of two groups.
        if (w.nested) cp_async4(to + RAW_SUB + 4 * t, scales + (sub_bytes(bits) == 2 ? 2 * (group & ~1) : 4 * group));
        if (w.nested) cp_async8(to + RAW_SCALE + 8 * t, scales + nested_pair(bits, at.row));
        else if (w.min_groups) cp_async8(to + RAW_SCALE + 8 * t, scales + 8 * (w.min_groups == 4 ? group / 4 : group));
        else cp_async4(to + RAW_SCALE + 8 * t, scales + 4 * group);
    }

    // What this thread has copied of the step, to its place in the tile.
    template <class S>
    __device__ __forceinline__ void unpack(uint8_t* to, const uint8_t* from, int64_t first, int count, int step) const {
        int t = threadIdx.x, column = t / S::GROUPS, g = (step >> repeats()) * S::GROUPS + t % S::GROUPS;
        uint32_t words[16] = {};
        if (column >= count || g >= groups) {
        } else if (bits == 32) {
            floats(reinterpret_cast<const float*>(w.tiles) + (first + column) * stride, g * 32, step & 1, words);
        } else {
            numbers(from, t, g, words);
        }
        store_group(to, S::PIECES, column, t % S::GROUPS, words);
    }

    __device__ __forceinline__ void floats(const float* row, int k, bool rest, uint32_t (&words)[16]) const {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (k + 8 * i >= stride) break;
            float x[8];
            F32::read8(row + k + 8 * i, x);
            if (rest) {
#pragma unroll
                for (int j = 0; j < 8; j++) x[j] = Act::rest(x[j]);
            }
#pragma unroll
            for (int j = 0; j < 4; j++) words[4 * i + j] = Act::pack2(x[2 * j], x[2 * j + 1]);
        }
    }

    // Those of group g of a row. Where two groups' scales came in one word, the parity of g says which are its own.
    __device__ __forceinline__ void numbers(const uint8_t* from, int t, int g, uint32_t (&words)[16]) const {
        PlaneBytes bytes;
        if (bits < 4) {
            uint2 low = load8(from + RAW_LOW + 16 * t);
            bytes.low.x = low.x, bytes.low.y = low.y;
        } else {
            bytes.low = load16(from + RAW_LOW + 16 * t);
        }
        const uint8_t* upper = from + RAW_HIGH + 16 * t;
        if (bits == 3 || bits == 5) bytes.high.x = *reinterpret_cast<const uint32_t*>(upper);
        if (bits == 6) {
            uint2 high = load8(upper);
            bytes.high.x = high.x, bytes.high.y = high.y;
        }
        if (bits == 8) bytes.high = load16(upper);
        const float* d = reinterpret_cast<const float*>(from + RAW_SCALE) + 2 * t;
        float factor[2], rest[2];
        if (w.nested) {
            uint32_t sub = reinterpret_cast<const uint32_t*>(from + RAW_SUB)[t];
            if (sub_bytes(bits) == 2) sub = (g & 1 ? sub >> 16 : sub & 0xffff) * 0x10001u;
#pragma unroll
            for (int half = 0; half < 2; half++) {
                factor[half] = d[0] * float(int8_t(sub >> 16 * half));
                rest[half] = -d[1] * float(sub >> 16 * half + 8 & 255);
            }
        } else {
            factor[0] = factor[1] = d[0];
            rest[0] = rest[1] = w.min_groups ? d[1] : 0.0f;
        }
        switch (bits) {
            case 2: return unpack_group<2, 0>(bytes, w, factor, rest, words);
            case 3: return unpack_group<3, 0>(bytes, w, factor, rest, words);
            case 4:
                if (w.table == 1) return unpack_group<4, 1>(bytes, w, factor, rest, words);
                if (w.table == 2) return unpack_group<4, 2>(bytes, w, factor, rest, words);
                return unpack_group<4, 0>(bytes, w, factor, rest, words);
            case 5: return unpack_group<5, 0>(bytes, w, factor, rest, words);
            case 6: return unpack_group<6, 0>(bytes, w, factor, rest, words);
            default: return unpack_group<8, 0>(bytes, w, factor, rest, words);
        }
    }
};

// ---- where a tile is -------------------------------------------------------------------------------------------------

// Rows [first, first + count) of x, or of the pairs by expert; from column `column` on.
struct Place {
    int expert, first, count, column;
};

// A block's tile of those of all rows and columns. Neighbours share columns: eight tiles of rows at a time read a part of
// the weight while it is in the cache.
__device__ __forceinline__ void tile_number(int number, int row_tiles, int column_tiles, int& row_tile, int& column_tile) {
    int many = 8 * column_tiles, first = number / many * 8, high = min(row_tiles - first, 8);
    row_tile = first + number % many % high;
    column_tile = number % many / high;
}

// The expert and the pairs of a tile of pairs; false where there are fewer. All threads of a block.
template <class S>
__device__ bool expert_tile(int tile, const int* offsets, int experts, Place& place) {
    __shared__ int found[3], totals[S::THREADS / 32];
    int t = threadIdx.x, lane = t % 32, each = (experts + S::THREADS - 1) / S::THREADS;
    int begin = min(t * each, experts), end = min(begin + each, experts), tiles = 0;
    for (int e = begin; e < end; e++) tiles += (offsets[e + 1] - offsets[e] + S::ROWS - 1) / S::ROWS;
    int before = tiles;
#pragma unroll
    for (int by = 1; by < 32; by *= 2) {
        int other = __shfl_up_sync(ALL_LANES, before, by);
        if (lane >= by) before += other;
    }
    if (lane == 31) totals[t / 32] = before;
    if (t == 0) found[0] = -1;
    __syncthreads();
    before -= tiles;
    for (int w = 0; w < t / 32; w++) before += totals[w];
    for (int e = begin; e < end; e++) {
        int count = offsets[e + 1] - offsets[e], here = (count + S::ROWS - 1) / S::ROWS;
        if (tile >= before && tile < before + here) {
            int skipped = (tile - before) * S::ROWS;
            found[0] = e, found[1] = offsets[e] + skipped, found[2] = min(count - skipped, S::ROWS);
        }
        before += here;
    }
    __syncthreads();
    if (found[0] < 0) return false;
    place.expert = found[0], place.first = found[1], place.count = found[2];
    return true;
}

// ---- what a tile reads and writes --------------------------------------------------------------------------------------

struct TileInput {
    const uint16_t* x;
    int stride;        // elements from one row to the next: a multiple of eight, with zeros behind k
    const int* ids;    // null: rows as they are
    int share;         // pairs with one row of x
};

// What a sum becomes on its way out: out = f(scale of its row · sum + bias of its expert), where f multiplies with the
// activation of `gate`, the same element of an earlier product.
struct TileOutput {
    void* out;
    int is_f32;
    int64_t first, n;
    const float* row_scales;
    const float* bias;
    const float* gate;
    Gating gated;

    __device__ __forceinline__ float value(float sum, float scale, int expert, int64_t row, int column) const {
        sum *= scale;
        if (bias) sum += bias[expert * n + column];
        return gate ? gated(gate[row * n + column], sum) : sum;
    }
    __device__ __forceinline__ void write(int64_t at, float x) const {
        if (is_f32) static_cast<float*>(out)[at] = x;
        else Act::write(static_cast<Act::Stored*>(out) + at, x);
    }
    // Eight columns of a row from `column` on, of which `count` are there.
    __device__ __forceinline__ void eight(const float* sums, float scale, int expert, int64_t row, int column,
                                          int count) const {
        int64_t at = row * n + first + column;
        if (count < 8 || at % 8 || bias || gate) {
#pragma unroll 1
            for (int i = 0; i < min(count, 8); i++) write(at + i, value(sums[i], scale, expert, row, column + i));
            return;
        }
        float x[8];
        F32::read8(sums, x);
#pragma unroll
        for (int i = 0; i < 8; i++) x[i] *= scale;
        if (is_f32) {
            F32::write8(static_cast<float*>(out) + at, x);
        } else {
            Act::write8(static_cast<Act::Stored*>(out) + at, x);
        }
    }
};

// ---- products --------------------------------------------------------------------------------------------------------

// What is multiplied: elements of 16 bits, or pairs of codes of FP8, whose fragments have the same bytes.
enum Products { OF_BF16, OF_F16, OF_E4M3 };
// With weights that are unpacked on their way.
constexpr Products OF_ACT = ACT_IS_F16 ? OF_F16 : OF_BF16;
// Whether rows of x have scales: those of bf16 that have become f16 (`arrange_rows_f16`).
template <Products OF>
constexpr bool SCALES_ROWS = OF == OF_F16 && !ACT_IS_F16;

// The sums of a warp over one step.
template <class S, Products OF>
__device__ __forceinline__ void multiply(const uint8_t* x, const uint8_t* w, int warp_row, int warp_column,
                                         float (&sums)[S::WARP_ROWS / 16][S::WARP_COLUMNS / 8][4]) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < S::DEPTH / 16; k++) {
        uint32_t b[S::WARP_COLUMNS / 16][4];
#pragma unroll
        for (int j = 0; j < S::WARP_COLUMNS / 16; j++) {
            int column = warp_column + j * 16 + lane % 8 + lane / 16 * 8;
            ldmatrix_x4(b[j], w + tile_offset<S::PIECES>(column, 2 * k + lane / 8 % 2));
        }
#pragma unroll
        for (int i = 0; i < S::WARP_ROWS / 16; i++) {
            uint32_t a[4];
            ldmatrix_x4(a, x + tile_offset<S::PIECES>(warp_row + i * 16 + lane % 16, 2 * k + lane / 16));
#pragma unroll
            for (int j = 0; j < S::WARP_COLUMNS / 8; j++) {
                uint32_t b0 = b[j / 2][j % 2 * 2], b1 = b[j / 2][j % 2 * 2 + 1];
                if constexpr (OF == OF_F16) mma_f16(sums[i][j], a, b0, b1);
                else if constexpr (OF == OF_E4M3) mma_e4m3(sums[i][j], a, b0, b1);
                else mma_bf16(sums[i][j], a, b0, b1);
            }
        }
    }
}

// The same by all four warps, whose sums begin as zeros.
template <class S>
__device__ __forceinline__ void multiply_group(const uint8_t* x, const uint8_t* w, float (&sums)[1][S::WARP_COLUMNS / 8][4]) {
    float(&flat)[64] = *reinterpret_cast<float(*)[64]>(&sums);
    wgmma_hold(flat);
    wgmma_begin();
#pragma unroll
    for (int k = 0; k < 4; k++) wgmma_e4m3(flat, x, w, k, k > 0);
    wgmma_end();
    wgmma_hold(flat);
}

// Pieces of a tile of x that a thread copies.
template <class S>
struct XPieces {
    static const int COUNT = S::ROWS * S::PIECES / S::THREADS;
    const uint16_t* row[COUNT];  // null behind the last row

    __device__ __forceinline__ XPieces(const TileInput& in, const Place& place) {
#pragma unroll
        for (int j = 0; j < COUNT; j++) {
            int r = (int(threadIdx.x) + j * S::THREADS) / S::PIECES;
            row[j] = 0;
            if (r >= place.count) continue;
            int64_t from = in.ids ? in.ids[place.first + r] / in.share : place.first + r;
            row[j] = in.x + from * in.stride;
        }
    }
    __device__ __forceinline__ void copy(uint8_t* to, const TileInput& in, int step) const {
#pragma unroll
        for (int j = 0; j < COUNT; j++) {
            int i = int(threadIdx.x) + j * S::THREADS, piece = i % S::PIECES, k = step * S::DEPTH + piece * 8;
            bool there = row[j] && k < in.stride;
            const uint16_t* from = there ? row[j] + k : in.x;
            cp_async16_or_zeros(to + tile_offset<S::PIECES>(i / S::PIECES, piece), from, there);
        }
    }
};

// Scales that hold for one step: those of each row of x and of each column's weight. A step has sums of its own then.
template <class S, class W, bool SCALED = W::SCALED>
struct StepScales {
    __device__ __forceinline__ StepScales(const TileInput&, const TileOutput&, const W&, const Place&, int64_t, int, int,
                                          int) {}
    template <class Sums>
    __device__ __forceinline__ void add(const Sums&, int, Sums&) const {}
};
template <class S, class W>
struct StepScales<S, W, true> {
    const float* x;
    const W& weight;
    int64_t first;                // the weight's row of the thread's first column
    int count;                    // columns from there on
    int rows[S::WARP_ROWS / 8];   // where the scales of the thread's rows are

    __device__ __forceinline__ StepScales(const TileInput& in, const TileOutput& to, const W& weight, const Place& place,
                                          int64_t first, int count, int warp_row, int warp_column)
        : x(to.row_scales), weight(weight) {
        int lane = threadIdx.x % 32, column = warp_column + lane % 4 * 2;
        this->first = first + column, this->count = count - column;
        int steps = (in.stride + S::DEPTH - 1) / S::DEPTH;
#pragma unroll
        for (int i = 0; i < S::WARP_ROWS / 8; i++) {
            // Rows behind the last have sums of zeros.
            int r = min(warp_row + i * 8 + lane / 4, place.count - 1) + place.first;
            rows[i] = (in.ids ? in.ids[r] / in.share : r) * steps;
        }
    }
    template <class Sums>
    __device__ __forceinline__ void add(const Sums& of_step, int step, Sums& sums) const {
        float of_row[S::WARP_ROWS / 8];
#pragma unroll
        for (int i = 0; i < S::WARP_ROWS / 8; i++) of_row[i] = x[rows[i] + step];
#pragma unroll
        for (int j = 0; j < S::WARP_COLUMNS / 4; j++) {
            int column = j / 2 * 8 + j % 2;
            float scale = column < count ? weight.scale(first + column, step) : 0.0f;
#pragma unroll
            for (int i = 0; i < S::WARP_ROWS / 8; i++) {
                int at = i % 2 * 2 + j % 2;
                sums[i / 2][j / 2][at] = fmaf(of_step[i / 2][j / 2][at], of_row[i] * scale, sums[i / 2][j / 2][at]);
            }
        }
    }
};

// Sixteen rows of a warp at a time go through shared memory that nobody else uses by then, so that lanes write runs of
// columns, and what becomes of a sum is not there for each of the thread's registers.
template <class S, Products OF>
__device__ __forceinline__ void write_tile(uint8_t* memory, const TileInput& in, const TileOutput& to, const Place& place,
                                           int columns, int warp_row, int warp_column,
                                           const float (&sums)[S::WARP_ROWS / 16][S::WARP_COLUMNS / 8][4]) {
    const int stride = S::WARP_COLUMNS + 8, runs = S::WARP_COLUMNS / 8;
    int lane = threadIdx.x % 32;
    float* strip = reinterpret_cast<float*>(memory) + int(threadIdx.x) / 32 * (16 * stride);
#pragma unroll
    for (int i = 0; i < S::WARP_ROWS / 16; i++) {
#pragma unroll
        for (int j = 0; j < S::WARP_COLUMNS / 8; j++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float* at = strip + (lane / 4 + half * 8) * stride + j * 8 + lane % 4 * 2;
                store8(at, make_uint2(__float_as_uint(sums[i][j][half * 2]), __float_as_uint(sums[i][j][half * 2 + 1])));
            }
        }
        __syncwarp();
#pragma unroll 1
        for (int run = lane; run < 16 * runs; run += 32) {
            int r = warp_row + i * 16 + run / runs, column = place.column + warp_column + run % runs * 8;
            if (r >= place.count || column >= columns) continue;
            int64_t row = in.ids ? in.ids[place.first + r] : place.first + r;
            float scale = SCALES_ROWS<OF> ? to.row_scales[row / in.share] : 1.0f;
            to.eight(strip + run / runs * stride + run % runs * 8, scale, place.expert, row, column, columns - column);
        }
        __syncwarp();
    }
}

// Eight rows of 128 bytes, as products of four warps want their matrices aligned.
struct alignas(1024) TileRow8 {
    uint8_t bytes[1024];
};

// Steps [begin, end) of a tile.
template <class S, Products OF, class W>
__device__ __forceinline__ void tile_product(const TileInput& in, const W& weight, const TileOutput& to,
                                             const Place& place, int columns, int begin, int end) {
    uint8_t* x_ring;
    if constexpr (S::GROUP) {
        extern __shared__ TileRow8 tile_rows[];
        x_ring = reinterpret_cast<uint8_t*>(tile_rows);
    } else {
        extern __shared__ uint4 tile_memory[];
        x_ring = reinterpret_cast<uint8_t*>(tile_memory);
    }
    uint8_t* w_ring = x_ring + S::STAGES * S::X_BYTES;
    static_assert(!W::UNPACKS || S::COLUMNS * S::GROUPS == S::THREADS, "a thread unpacks a group");
    const int w_bytes = W::UNPACKS ? RAW_BYTES : S::W_BYTES;
    uint8_t* unpacked = w_ring + S::STAGES * RAW_BYTES;
    int64_t first = int64_t(place.expert) * columns + place.column;
    int count = columns - place.column;
    int warp = threadIdx.x / 32;
    const int across = S::COLUMNS / S::WARP_COLUMNS;
    int warp_row = warp / across * S::WARP_ROWS, warp_column = warp % across * S::WARP_COLUMNS;
    XPieces<S> pieces(in, place);
    StepScales<S, W> scaled(in, to, weight, place, first, count, warp_row, warp_column);
    float sums[S::WARP_ROWS / 16][S::WARP_COLUMNS / 8][4] = {};

    auto copy = [&](int step) {
        if (step < end) {
            int slot = (step - begin) % S::STAGES;
            pieces.copy(x_ring + slot * S::X_BYTES, in, step >> weight.repeats());
            weight.template copy<S>(w_ring + slot * w_bytes, first, count, step);
        }
        cp_async_commit();
    };
    auto unpack = [&](int step) {
        if (!W::UNPACKS || step >= end) return;
        weight.template unpack<S>(unpacked + (step - begin) % 2 * S::W_BYTES, w_ring + (step - begin) % S::STAGES * RAW_BYTES,
                                  first, count, step);
    };
#pragma unroll 1
    for (int step = begin; step < begin + S::STAGES - 1; step++) copy(step);
    // One step more than there are: the first only waits and unpacks.
#pragma unroll 1
    for (int step = begin - 1; step < end; step++) {
        if (step >= begin) copy(step + S::STAGES - 1);
        cp_async_wait<S::STAGES - 2>();
        if constexpr (S::GROUP) wgmma_publish();
        // A thread unpacks what it has copied itself, so its own wait is enough.
        unpack(step + 1);
        if (step >= begin) {
            int slot = (step - begin) % S::STAGES;
            const uint8_t* w = W::UNPACKS ? unpacked + (step - begin) % 2 * S::W_BYTES : w_ring + slot * S::W_BYTES;
            const uint8_t* x = x_ring + slot * S::X_BYTES;
            if constexpr (W::SCALED) {
                float of_step[S::WARP_ROWS / 16][S::WARP_COLUMNS / 8][4] = {};
                if constexpr (S::GROUP) multiply_group<S>(x, w, of_step);
                else multiply<S, OF>(x, w, warp_row, warp_column, of_step);
                scaled.add(of_step, step, sums);
            } else {
                multiply<S, OF>(x, w, warp_row, warp_column, sums);
            }
        }
        __syncthreads();
    }
    write_tile<S, OF>(x_ring, in, to, place, columns, warp_row, warp_column, sums);
}

// A block of the grid: its tile, and its part of k where that is split. A part writes sums of its own, [splits, rows, n].
template <class S, Products OF, class W>
__device__ __forceinline__ void tile_block(TileInput in, const W& weight, TileOutput to, int rows, int row_tiles,
                                           int columns, int splits, const int* offsets, int experts) {
    wait_for_previous();
    int part = int(blockIdx.x) % splits, row_tile;
    Place place;
    tile_number(int(blockIdx.x) / splits, row_tiles, (columns + S::COLUMNS - 1) / S::COLUMNS, row_tile, place.column);
    place.column *= S::COLUMNS;
    place.expert = 0, place.first = row_tile * S::ROWS, place.count = min(rows - place.first, S::ROWS);
    if (in.ids && !expert_tile<S>(row_tile, offsets, experts, place)) return;
    int steps = (in.stride + S::DEPTH - 1) / S::DEPTH << weight.repeats();
    // Parts begin at the same element whatever the depth of a tile.
    int each = ((in.stride + 63) / 64 + splits - 1) / splits * (64 / S::DEPTH) << weight.repeats();
    if (splits > 1) to.first += part * (int64_t(rows) * to.n);
    tile_product<S, OF>(in, weight, to, place, columns, min(part * each, steps), min((part + 1) * each, steps));
}

// Sizes of tiles by their rows; `tile.rs` has the same.
typedef TileShape<16, 64, 64, 16, 16, 4, 4> Tile16;
typedef TileShape<32, 64, 64, 16, 32, 4, 4> Tile32;
typedef TileShape<64, 64, 64, 32, 32, 4, 3> Tile64;
typedef TileShape<128, 128, 32, 64, 64, 3, 2> Tile128;

#define TILE_PARAMS                                                                                                     \
    const uint16_t *x, int x_stride, int rows, int row_tiles, int columns, int splits, void *out, int is_f32,           \
        int64_t first, int64_t n, const float *row_scales, const int *ids, const int *offsets, int experts, int share,  \
        const float *bias, const float *gate, int activation, float alpha, float limit
#define TILE_BLOCK(SHAPE, OF, WEIGHT_ROWS)                                                                              \
    TileInput in = {x, x_stride, ids, share};                                                                           \
    TileOutput to = {out, is_f32, first, n, row_scales, bias, gate, {activation, alpha, limit}};                        \
    tile_block<SHAPE, OF>(in, WEIGHT_ROWS, to, rows, row_tiles, columns, splits, offsets, experts);
