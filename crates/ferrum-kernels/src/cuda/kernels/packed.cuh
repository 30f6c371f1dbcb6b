// Quantised weights as `pack.rs` lays them out.
//
// A group is 32 numbers of a row. Eight groups of 16 rows are a tile, whose bytes lie beside each other: the tiles of 16 rows (a
// row of tiles) follow one another, zeros behind the last row and the last number. So whoever streams a row of tiles reads memory in the order of
// its addresses. In a tile come the planes of codes, row by row: the lower bits (2 or 4), then the upper ones (0, 1, 2 or 4), each so
// that a shift and a mask give four codes in the bytes of a word: those of four numbers (`byte_of`), and from the next bits on those of
// the numbers 16 behind them. Then come scales, of one of two forms:
//   flat:   value = d.x · (code - zero) + d.y, with d for each group, or for each `min_groups` of them (d.y only where there are some);
//   nested: value = d.x · scale · (code - zero) - d.y · minimum: a signed byte of scale and a byte of minimum for each 16 numbers, or
//           with codes of 4 and 5 bits for each 32; then d for each row.
// The pieces of 16 bytes of a plane's row are exchanged by the row's number, so that products which read a tile in shared memory
// find those of eight rows in different banks.
#pragma once
#include "common.cuh"

constexpr int TILE_ROWS = 16, TILE_GROUPS = 8;

struct Weight {
    const uint8_t* tiles;
    int tile_bytes;
    int nested;
    int zero;
    int min_groups;  // 0: a scale for each group and no minimum; else groups that share both, 1 or 4
    int table;
};

#define WEIGHT_PARAMS const uint8_t *tiles, int tile_bytes, int nested, int zero, int min_groups, int table
#define WEIGHT {tiles, tile_bytes, nested, zero, min_groups, table}

// Which byte of a word has the code of number i of four: those of two neighbours are half a word apart, where a mask makes them two
// numbers of 16 bits.
__host__ __device__ constexpr int byte_of(int i) { return i % 2 * 2 + i / 2; }

// Pieces of 16 bytes of a row of a tile in the two planes: two bytes of each group for each piece.
__host__ __device__ constexpr int low_pieces(int bits) { return bits < 4 ? 4 : 8; }
__host__ __device__ constexpr int high_pieces(int bits) {
    return bits == 8 ? 8 : bits == 6 ? 4 : bits == 3 || bits == 5 ? 2 : 0;
}
// Where the upper plane and the scales of a tile begin.
__host__ __device__ constexpr int high_of_tile(int bits) { return TILE_ROWS * 16 * low_pieces(bits); }
__host__ __device__ constexpr int scales_of_tile(int bits) { return high_of_tile(bits) + TILE_ROWS * 16 * high_pieces(bits); }
// Bytes of a group's nested scales.
__host__ __device__ constexpr int sub_bytes(int bits) { return bits == 4 || bits == 5 ? 2 : 4; }
// Where a row's pair of floats lies behind nested scales.
__host__ __device__ constexpr int nested_pair(int bits, int row) { return TILE_ROWS * TILE_GROUPS * sub_bytes(bits) + 8 * row; }

// Where the 16-byte piece `piece` of a row lies.
template <int PIECES>
__device__ __forceinline__ int piece_offset(int row, int piece) {
    int flip = PIECES == 8 ? row & 7 : PIECES == 4 ? row >> 1 & 3 : row >> 2 & 1;
    return (row * PIECES + (piece ^ flip)) * 16;
}
// Where group `g` of a row lies in a plane.
template <int PIECES>
__device__ __forceinline__ int group_offset(int row, int g) {
    return piece_offset<PIECES>(row, g * PIECES / 8) + g % (8 / PIECES) * (2 * PIECES);
}

// A group of a matrix whose rows have `groups`: its tile, and where it is there.
struct GroupPlace {
    const uint8_t* tile;
    int row, g;
    __device__ __forceinline__ GroupPlace(const Weight& w, int64_t row, int groups, int g)
        : tile(w.tiles + (row / TILE_ROWS * (groups / TILE_GROUPS) + g / TILE_GROUPS) * w.tile_bytes), row(int(row % TILE_ROWS)), g(g % TILE_GROUPS) {}
};

// Codes of IQ4 and of MXFP4 stand for these, sixteen signed bytes each.
__device__ __forceinline__ uint4 table_of(int table) {
    return table == 1 ? make_uint4(0xbfad9881u, 0xf6eaddcfu, 0x26190d01u, 0x71594535u)
                      : make_uint4(0x03020100u, 0x0c080604u, 0xfdfeff00u, 0xf4f8fafcu);
}
// Four codes of four bits, each as its signed byte of a table.
__device__ __forceinline__ int look_up(uint32_t codes, uint4 table) {
    uint32_t at = (codes & 7) | (codes >> 4 & 0x70) | (codes >> 8 & 0x700) | (codes >> 12 & 0x7000);
    uint32_t upper = (codes >> 3 & 0x01010101u) * 255;
    return int((__byte_perm(table.x, table.y, at) & ~upper) | (__byte_perm(table.z, table.w, at) & upper));
}

// The bytes of a group in the planes of codes; what a format does not have is not set.
struct PlaneBytes {
    uint4 low, high;
};

template <int BITS>
__device__ __forceinline__ PlaneBytes load_group(const GroupPlace& at) {
    PlaneBytes bytes;
    if (BITS < 4) {
        uint2 low = load8(at.tile + group_offset<4>(at.row, at.g));
        bytes.low.x = low.x, bytes.low.y = low.y;
    } else {
        bytes.low = load16_once(at.tile + group_offset<8>(at.row, at.g));
    }
    const uint8_t* upper = at.tile + high_of_tile(BITS);
    if (BITS == 3 || BITS == 5) bytes.high.x = *reinterpret_cast<const uint32_t*>(upper + group_offset<2>(at.row, at.g));
    if (BITS == 6) {
        uint2 high = load8(upper + group_offset<4>(at.row, at.g));
        bytes.high.x = high.x, bytes.high.y = high.y;
    }
    if (BITS == 8) bytes.high = load16_once(upper + group_offset<8>(at.row, at.g));
    return bytes;
}

// The codes of a group, four to a word (`byte_of`), each a signed byte.
template <int BITS>
__device__ __forceinline__ void codes_of(const PlaneBytes& bytes, int table, int (&q)[8]) {
    uint32_t low[4] = {bytes.low.x, bytes.low.y, bytes.low.z, bytes.low.w};
    uint32_t high[4] = {bytes.high.x, bytes.high.y, bytes.high.z, bytes.high.w};
#pragma unroll
    for (int i = 0; i < 8; i++) {
        int four = i % 4, behind = i / 4;
        q[i] = BITS < 4 ? low[four / 2] >> 4 * (four % 2) + 2 * behind & 0x03030303u : low[four] >> 4 * behind & 0x0f0f0f0fu;
        if (BITS == 3 || BITS == 5) q[i] |= (high[0] >> 2 * four + behind & 0x01010101u) << (BITS - 1);
        if (BITS == 6) q[i] |= (high[four / 2] >> 4 * (four % 2) + 2 * behind & 0x03030303u) << 4;
        if (BITS == 8) q[i] |= (high[four] >> 4 * behind & 0x0f0f0f0fu) << 4;
    }
    if (BITS == 4 && table) {
        uint4 values = table_of(table);
#pragma unroll
        for (int i = 0; i < 8; i++) q[i] = look_up(uint32_t(q[i]), values);
    }
}

// Scales and minimums of a group's halves, four bytes.
template <int BITS>
__device__ __forceinline__ uint32_t subs_of(const GroupPlace& at) {
    const uint8_t* subs = at.tile + scales_of_tile(BITS) + (at.row * TILE_GROUPS + at.g) * sub_bytes(BITS);
    if (sub_bytes(BITS) == 2) return *reinterpret_cast<const uint16_t*>(subs) * 0x10001u;
    return *reinterpret_cast<const uint32_t*>(subs);
}
// The pair of floats of a group; the second is nothing where there is no minimum.
template <int BITS>
__device__ __forceinline__ float2 scales_of(const Weight& w, const GroupPlace& at) {
    const uint8_t* scales = at.tile + scales_of_tile(BITS);
    int group = at.row * TILE_GROUPS + at.g;
    if (!w.nested && !w.min_groups) return make_float2(reinterpret_cast<const float*>(scales)[group], 0.0f);
    uint2 both = load8(scales + (w.nested ? nested_pair(BITS, at.row) : 8 * (w.min_groups == 4 ? group / 4 : group)));
    return make_float2(__uint_as_float(both.x), __uint_as_float(both.y));
}

// What a group's 16 numbers `half` are multiplied with, and what is added to each: value = factor · (code - zero) + rest.
template <int BITS>
__device__ __forceinline__ void scale_of(const Weight& w, const GroupPlace& at, int half, float& factor, float& rest) {
    float2 both = scales_of<BITS>(w, at);
    factor = both.x, rest = both.y;
    if (!w.nested) return;
    uint32_t sub = subs_of<BITS>(at) >> 16 * half;
    factor *= float(int8_t(sub));
    rest *= -float(sub >> 8 & 255);
}
