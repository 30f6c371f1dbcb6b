// Quantised weights as `pack.rs` lays them out.
//
// A group is 32 numbers of a row. Its codes lie in planes: the lower bits (2 or 4), then the upper ones (0, 1, 2 or 4),
// each so that a shift and a mask give four codes in the bytes of a word. Scales are of one of two forms:
//   flat:   value = d.x · (code - zero) + d.y, with d for each group (d.y only where `has_min`);
//   nested: value = d.x · scale · (code - zero) - d.y · minimum, with d for each 256 numbers and a signed byte of
//           scale and a byte of minimum for each 16.
#pragma once
#include "common.cuh"

struct Weight {
    const uint8_t *low, *high;
    const uint32_t* subs;  // null: flat
    const float* d;
    int zero, has_min, table;
};

#define WEIGHT_PARAMS                                                                                                   \
    const uint8_t *low, const uint8_t *high, const uint32_t *subs, const float *d, int zero, int has_min, int table
#define WEIGHT {low, high, subs, d, zero, has_min, table}

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
__device__ __forceinline__ PlaneBytes load_group(const Weight& w, int64_t group) {
    PlaneBytes bytes;
    if (BITS < 4) {
        uint2 low = load8(w.low + group * 8);
        bytes.low.x = low.x, bytes.low.y = low.y;
    } else {
        bytes.low = load16_once(w.low + group * 16);
    }
    if (BITS == 3 || BITS == 5) bytes.high.x = reinterpret_cast<const uint32_t*>(w.high)[group];
    if (BITS == 6) {
        uint2 high = load8(w.high + group * 8);
        bytes.high.x = high.x, bytes.high.y = high.y;
    }
    if (BITS == 8) bytes.high = load16_once(w.high + group * 16);
    return bytes;
}

// The codes of a group, four to a word, each a signed byte.
template <int BITS>
__device__ __forceinline__ void codes_of(const PlaneBytes& bytes, int table, int (&q)[8]) {
    uint32_t low[4] = {bytes.low.x, bytes.low.y, bytes.low.z, bytes.low.w};
#pragma unroll
    for (int i = 0; i < 8; i++)
        q[i] = BITS < 4 ? low[i / 4] >> 2 * (i % 4) & 0x03030303u : low[i / 2] >> 4 * (i % 2) & 0x0f0f0f0fu;
    uint32_t high[4] = {bytes.high.x, bytes.high.y, bytes.high.z, bytes.high.w};
#pragma unroll
    for (int i = 0; i < 8; i++) {
        if (BITS == 3 || BITS == 5) q[i] |= (high[0] >> i & 0x01010101u) << (BITS - 1);
        if (BITS == 6) q[i] |= (high[i / 4] >> 2 * (i % 4) & 0x03030303u) << 4;
        if (BITS == 8) q[i] |= (high[i / 2] >> 4 * (i % 2) & 0x0f0f0f0fu) << 4;
    }
    if (BITS == 4 && table) {
        uint4 values = table_of(table);
#pragma unroll
        for (int i = 0; i < 8; i++) q[i] = look_up(uint32_t(q[i]), values);
    }
}
template <int BITS>
__device__ __forceinline__ void codes_of(const Weight& w, int64_t group, int (&q)[8]) {
    codes_of<BITS>(load_group<BITS>(w, group), w.table, q);
}

// What a group's 16 numbers `half` are multiplied with, and what is added to each: value = factor · (code - zero) + rest.
__device__ __forceinline__ void scale_of(const Weight& w, int64_t group, int64_t row, int groups, int half, float& factor,
                                         float& rest) {
    if (!w.subs) {
        factor = w.has_min ? w.d[2 * group] : w.d[group];
        rest = w.has_min ? w.d[2 * group + 1] : 0.0f;
        return;
    }
    int64_t super = row * ((groups + 7) / 8) + (group - row * groups) / 8;
    uint32_t sub = w.subs[group] >> 16 * half;
    factor = w.d[2 * super] * float(int8_t(sub));
    rest = -w.d[2 * super + 1] * float(sub >> 8 & 255);
}
