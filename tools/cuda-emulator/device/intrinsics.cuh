// The stand-in's form of ferrum-kernels' `intrinsics.cuh`, which it replaces: the same functions, without PTX.
// Fragments have the layouts that the PTX manual gives for `ldmatrix` and `mma.sync`.
#pragma once

namespace emulator {

EMULATOR_PLAIN inline float float_of_bf16(uint16_t bits) { return __uint_as_float(unsigned(bits) << 16); }

EMULATOR_PLAIN inline float float_of_f16(uint16_t bits) {
    unsigned sign = unsigned(bits & 0x8000) << 16, exponent = bits >> 10 & 31, fraction = bits & 1023;
    if (exponent == 31) return __uint_as_float(sign | 0x7f800000 | fraction << 13);
    if (exponent == 0) {
        float x = float(fraction) * 0x1p-24f;
        return sign ? -x : x;
    }
    return __uint_as_float(sign | (exponent + 112) << 23 | fraction << 13);
}

EMULATOR_PLAIN inline uint16_t bf16_of_float(float x) {
    unsigned bits = __float_as_uint(x);
    if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fff;
    return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

EMULATOR_PLAIN inline uint16_t f16_of_float(float x) {
    unsigned bits = __float_as_uint(x), sign = bits >> 16 & 0x8000;
    bits &= 0x7fffffff;
    if (bits > 0x7f800000) return 0x7fff;
    if (bits >= 0x477ff000) return uint16_t(sign | 0x7c00);
    if (bits < 0x38800000) return uint16_t(sign | unsigned(std::nearbyint(__uint_as_float(bits) * 0x1p24f)));
    bits += 0xfff + (bits >> 13 & 1);
    return uint16_t(sign | (bits - 0x38000000) >> 13);
}

EMULATOR_PLAIN inline float float_of_e4m3(uint8_t code) {
    unsigned exponent = code >> 3 & 15, fraction = code & 7;
    float x = exponent == 0                     ? float(fraction) * 0x1p-9f
              : exponent == 15 && fraction == 7 ? NAN
                                                : __uint_as_float((exponent + 120) << 23 | fraction << 20);
    return code & 0x80 ? -x : x;
}

struct Matrices {
    const void* row;
    uint32_t* out;
};
// Four 8 × 8 matrices of 16-bit elements; lanes 8i to 8i + 7 name the rows of matrix i.
EMULATOR_PLAIN inline void ldmatrix_op(void* const* lanes, unsigned mask, bool transposed) {
    if (mask != 0xffffffffu) return emulator_fault("ldmatrix needs all lanes of its warp");
    uint16_t elements[4][8][8];
    for (int i = 0; i < 32; i++) {
        const void* row = static_cast<Matrices*>(lanes[i])->row;
        std::memcpy(elements[i / 8][i % 8], row, 16);
    }
    for (int lane = 0; lane < 32; lane++)
        for (int i = 0; i < 4; i++) {
            int row = lane / 4, col = lane % 4 * 2;
            unsigned low = transposed ? elements[i][col][row] : elements[i][row][col];
            unsigned high = transposed ? elements[i][col + 1][row] : elements[i][row][col + 1];
            static_cast<Matrices*>(lanes[lane])->out[i] = low | high << 16;
        }
}
EMULATOR_PLAIN inline void ldmatrix_plain(void* const* lanes, unsigned mask) { ldmatrix_op(lanes, mask, false); }
EMULATOR_PLAIN inline void ldmatrix_transposed(void* const* lanes, unsigned mask) { ldmatrix_op(lanes, mask, true); }

EMULATOR_PLAIN inline void ldmatrix_two(void* const* lanes, unsigned mask) {
    if (mask != 0xffffffffu) return emulator_fault("ldmatrix needs all lanes of its warp");
    uint16_t elements[2][8][8];
    for (int i = 0; i < 16; i++) std::memcpy(elements[i / 8][i % 8], static_cast<Matrices*>(lanes[i])->row, 16);
    for (int lane = 0; lane < 32; lane++)
        for (int i = 0; i < 2; i++) {
            unsigned low = elements[i][lane / 4][lane % 4 * 2], high = elements[i][lane / 4][lane % 4 * 2 + 1];
            static_cast<Matrices*>(lanes[lane])->out[i] = low | high << 16;
        }
}

struct Product {
    float* c;
    const uint32_t* a;
    uint32_t b[2];
};
typedef double Row8 __attribute__((vector_size(64)));
// C[16, 8] += A[16, K] · B[K, 8]: f32 sums of products of elements, which lie in order in the words of fragments.
template <class Element, float (*VALUE)(Element)>
EMULATOR_PLAIN void mma_op(void* const* lanes, unsigned mask) {
    if (mask != 0xffffffffu) return emulator_fault("mma.sync needs all lanes of its warp");
    const int EACH = 4 / sizeof(Element), K = 8 * EACH;
    emulator_count_product(16, 8, K);
    double a[16][K];
    Row8 b[K], sums[16];
    for (int lane = 0; lane < 32; lane++) {
        const Product* p = static_cast<Product*>(lanes[lane]);
        int group = lane / 4, first = lane % 4 * EACH;
        for (int i = 0; i < 4; i++)
            for (int j = 0; j < EACH; j++)
                a[group + i % 2 * 8][first + i / 2 * (K / 2) + j] = VALUE(Element(p->a[i] >> 8 * sizeof(Element) * j));
        for (int i = 0; i < 2; i++)
            for (int j = 0; j < EACH; j++)
                b[first + i * (K / 2) + j][group] = VALUE(Element(p->b[i] >> 8 * sizeof(Element) * j));
    }
    for (int lane = 0; lane < 32; lane++)
        for (int i = 0; i < 4; i++)
            sums[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2] = static_cast<Product*>(lanes[lane])->c[i];
    for (int row = 0; row < 16; row++)
        for (int k = 0; k < K; k++) sums[row] += a[row][k] * b[k];
    for (int lane = 0; lane < 32; lane++)
        for (int i = 0; i < 4; i++)
            static_cast<Product*>(lanes[lane])->c[i] = float(sums[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2]);
}

// A product of four warps of 16-bit elements: its sums, its matrices by descriptors (A may be in registers), columns.
struct HalfGroupProduct {
    static const unsigned char KIND = 1;
    float* c;
    uint64_t a, b;
    // What was in A's registers when the product began, and where they are.
    uint32_t a_values[4];
    const uint32_t* a_registers;
    int columns;
    bool half, adds;
    // Whether the elements of a column of Bᵀ lie beside each other, not those of a row.
    bool columns_together;
};

// Where the element at `row` (of A or of Bᵀ) and `k` is in shared memory, by the descriptor's own fields: a start, the distances
// of larger steps (leading, stride), and which address bits are exchanged. All as in the PTX manual's layouts of matrices, and
// their formulas in CUTLASS (`mma_traits_sm90_gmma.hpp`).
EMULATOR_PLAIN inline const uint8_t* described(uint64_t descriptor, int row, int k, bool rows_together) {
    uint64_t start = (descriptor & 0x3fff) << 4, leading = (descriptor >> 16 & 0x3fff) << 4;
    uint64_t stride = (descriptor >> 32 & 0x3fff) << 4, at;
    // None, 128, 64 and 32 bytes.
    const int bytes_of[4] = {16, 128, 64, 32};
    int mode = int(descriptor >> 62), bytes = bytes_of[mode], elements = bytes / 2;
    if (descriptor >> 49 & 7) emulator_fault("a base offset of a matrix of wgmma, which the emulator does not have");
    if (!rows_together) {
        // Rows of `bytes`, eight of them behind each other; without an exchange a row is cut in pieces of eight elements.
        at = row / 8 * stride + row % 8 * bytes + (mode ? k * 2 : k / 8 * leading + k % 8 * 2);
    } else {
        uint64_t next_rows = mode ? leading : stride, next_k = mode ? stride : leading;
        at = row / elements * next_rows + row % elements * 2 + k / 8 * next_k + k % 8 * bytes;
    }
    at += start;
    at ^= (at >> 7 & (bytes / 16 - 1)) << 4;
    return static_cast<const uint8_t*>(emulator_dynamic_shared()) + at;
}
EMULATOR_PLAIN inline double described_value(uint64_t descriptor, int row, int k, bool rows_together, bool half) {
    uint16_t bits;
    std::memcpy(&bits, described(descriptor, row, k, rows_together), 2);
    return half ? float_of_f16(bits) : float_of_bf16(bits);
}
// The part of a warp: its 16 rows of A with all columns.
EMULATOR_PLAIN inline void half_group_op(void* const* lanes, unsigned mask) {
    if (mask != 0xffffffffu) return emulator_fault("wgmma needs all lanes of its warps");
    const HalfGroupProduct* p = static_cast<HalfGroupProduct*>(lanes[0]);
    emulator_count_product(16, unsigned(p->columns), 16);
    int warp = int(threadIdx.x % 128 / 32);
    double a[16][16];
    for (int lane = 0; lane < 32; lane++) {
        const HalfGroupProduct* own = static_cast<HalfGroupProduct*>(lanes[lane]);
        if (own->b != p->b || own->a != p->a)
            return emulator_fault("threads of a warp have other descriptors for a wgmma");
        for (int i = 0; i < 8; i++) {
            int row = lane / 4 + i / 2 % 2 * 8, k = lane % 4 * 2 + i / 4 * 8 + i % 2;
            uint16_t bits = uint16_t(own->a_values[i / 2] >> 16 * (i % 2));
            a[row][k] = !p->a_registers ? described_value(p->a, warp * 16 + row, k, false, p->half)
                        : p->half       ? float_of_f16(bits)
                                        : float_of_bf16(bits);
        }
    }
    for (int eight = 0; eight < p->columns / 8; eight++) {
        Row8 b[16], sums[16];
        for (int k = 0; k < 16; k++)
            for (int col = 0; col < 8; col++)
                b[k][col] = described_value(p->b, eight * 8 + col, k, p->columns_together, p->half);
        for (int lane = 0; lane < 32; lane++)
            for (int i = 0; i < 4; i++)
                sums[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2] =
                    p->adds ? static_cast<HalfGroupProduct*>(lanes[lane])->c[eight * 4 + i] : 0.0f;
        for (int row = 0; row < 16; row++)
            for (int k = 0; k < 16; k++) sums[row] += a[row][k] * b[k];
        for (int lane = 0; lane < 32; lane++)
            for (int i = 0; i < 4; i++)
                static_cast<HalfGroupProduct*>(lanes[lane])->c[eight * 4 + i] =
                    float(sums[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2]);
    }
}

struct GroupProduct {
    static const unsigned char KIND = 2;
    float* c;
    const uint8_t *a, *b;
    int k;
    bool adds;
};
// Element `at` of a row of 128 bytes.
EMULATOR_PLAIN inline float swizzled_e4m3(const uint8_t* matrix, int row, int at) {
    return float_of_e4m3(matrix[row * 128 + ((at / 16) ^ (row & 7)) * 16 + at % 16]);
}
// The part of a warp: its 16 rows of A with all 128 of B. Pieces of rows lie where the swizzle of 128 bytes puts them.
EMULATOR_PLAIN inline void wgmma_op(void* const* lanes, unsigned mask) {
    if (mask != 0xffffffffu) return emulator_fault("wgmma needs all lanes of its warps");
    const GroupProduct* p = static_cast<GroupProduct*>(lanes[0]);
    emulator_count_product(16, 128, 32);
    int warp = int(threadIdx.x % 128 / 32);
    double a[16][32];
    for (int row = 0; row < 16; row++)
        for (int i = 0; i < 32; i++) a[row][i] = swizzled_e4m3(p->a, warp * 16 + row, p->k * 32 + i);
    for (int eight = 0; eight < 16; eight++) {
        Row8 b[32], sums[16];
        for (int i = 0; i < 32; i++)
            for (int col = 0; col < 8; col++) b[i][col] = swizzled_e4m3(p->b, eight * 8 + col, p->k * 32 + i);
        for (int lane = 0; lane < 32; lane++)
            for (int i = 0; i < 4; i++)
                sums[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2] =
                    p->adds ? static_cast<GroupProduct*>(lanes[lane])->c[eight * 4 + i] : 0.0f;
        for (int row = 0; row < 16; row++)
            for (int k = 0; k < 32; k++) sums[row] += a[row][k] * b[k];
        for (int lane = 0; lane < 32; lane++)
            for (int i = 0; i < 4; i++)
                static_cast<GroupProduct*>(lanes[lane])->c[eight * 4 + i] =
                    float(sums[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2]);
    }
}

}  // namespace emulator

static inline float bf16_to_f32(uint16_t bits) { return emulator::float_of_bf16(bits); }
static inline uint16_t f32_to_bf16(float x) { return emulator::bf16_of_float(x); }
static inline float f16_to_f32(uint16_t bits) { return emulator::float_of_f16(bits); }
static inline uint16_t f32_to_f16(float x) { return emulator::f16_of_float(x); }
static inline uint32_t f32_to_bf16x2(float low, float high) { return f32_to_bf16(low) | uint32_t(f32_to_bf16(high)) << 16; }
static inline uint32_t f32_to_f16x2(float low, float high) { return f32_to_f16(low) | uint32_t(f32_to_f16(high)) << 16; }
EMULATOR_PLAIN static inline float exp2_approx(float x) {
    float y = std::exp2(x);
    return y < 1.17549435e-38f ? 0.0f : y;
}

EMULATOR_PLAIN static inline uint4 load16(const void* at) {
    emulator_access(at, 16, 16, 0);
    uint4 out;
    std::memcpy(&out, at, 16);
    return out;
}
EMULATOR_PLAIN static inline uint2 load8(const void* at) {
    emulator_access(at, 8, 8, 0);
    uint2 out;
    std::memcpy(&out, at, 8);
    return out;
}
static inline uint4 load16_once(const void* at) { return load16(at); }
EMULATOR_PLAIN static inline void store16(void* at, uint4 x) {
    emulator_access(at, 16, 16, 1);
    std::memcpy(at, &x, 16);
}
EMULATOR_PLAIN static inline void store8(void* at, uint2 x) {
    emulator_access(at, 8, 8, 1);
    std::memcpy(at, &x, 8);
}

EMULATOR_PLAIN static inline void ldmatrix_x4(uint32_t (&out)[4], const void* row) {
    emulator_access(row, 16, 16, 0);
    emulator::Matrices arg = {row, out};
    emulator_warp(0xffffffffu, emulator::ldmatrix_plain, &arg);
}
EMULATOR_PLAIN static inline void ldmatrix_x4_trans(uint32_t (&out)[4], const void* row) {
    emulator_access(row, 16, 16, 0);
    emulator::Matrices arg = {row, out};
    emulator_warp(0xffffffffu, emulator::ldmatrix_transposed, &arg);
}
// Lanes from 16 on name rows, too, which are not read.
EMULATOR_PLAIN static inline void ldmatrix_x2(uint32_t (&out)[2], const void* row) {
    if (emulator::lane() < 16) emulator_access(row, 16, 16, 0);
    emulator::Matrices arg = {row, out};
    emulator_warp(0xffffffffu, emulator::ldmatrix_two, &arg);
}
EMULATOR_PLAIN static inline void mma_bf16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    emulator::Product arg = {c, a, {b0, b1}};
    emulator_warp(0xffffffffu, emulator::mma_op<uint16_t, emulator::float_of_bf16>, &arg);
}
EMULATOR_PLAIN static inline void mma_f16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    emulator::Product arg = {c, a, {b0, b1}};
    emulator_warp(0xffffffffu, emulator::mma_op<uint16_t, emulator::float_of_f16>, &arg);
}
EMULATOR_PLAIN static inline void mma_e4m3(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    emulator::Product arg = {c, a, {b0, b1}};
    emulator_warp(0xffffffffu, emulator::mma_op<uint8_t, emulator::float_of_e4m3>, &arg);
}
static inline void prefetch(const void*) {}
template <int THREADS>
static inline void block_barrier() {
    emulator_block_barrier(nullptr, 0, THREADS);
}
extern "C" void emulator_wait_for_previous();
static inline void wait_for_previous() { emulator_wait_for_previous(); }
static inline void wgmma_publish() { emulator_publish(); }
static inline void wgmma_begin() { emulator_product_fence(); }
static inline void wgmma_commit() { emulator_product_commit(); }
// Products are made when somebody waits for them, which is as late as they may be.
template <class Product>
EMULATOR_PLAIN static inline void wgmma_later(const Product& product, int sums) {
    static_assert(sizeof(Product) < EMULATOR_PRODUCT, "it is kept in as many bytes with its kind");
    unsigned char what[EMULATOR_PRODUCT] = {};
    std::memcpy(what, &product, sizeof product);
    what[EMULATOR_PRODUCT - 1] = Product::KIND;
    emulator_product(what, product.c, unsigned(sums));
}
template <class Product>
EMULATOR_PLAIN static inline bool wgmma_next(int groups, Product& product) {
    unsigned char what[EMULATOR_PRODUCT];
    if (!emulator_product_take(unsigned(groups), what)) return false;
    if (what[EMULATOR_PRODUCT - 1] != Product::KIND)
        emulator_fault("the emulator has products of FP8 for `wgmma_end`, and those of 16-bit elements for `wgmma_wait`");
    std::memcpy(&product, what, sizeof product);
    return true;
}

EMULATOR_PLAIN static inline void wgmma_e4m3(float (&c)[64], const void* a, const void* b, int k, bool adds) {
    if ((reinterpret_cast<uintptr_t>(a) | reinterpret_cast<uintptr_t>(b)) % 1024)
        emulator_fault("a matrix of wgmma is not aligned to 1024 bytes");
    wgmma_later(emulator::GroupProduct{c, static_cast<const uint8_t*>(a), static_cast<const uint8_t*>(b), k, adds}, 64);
}
EMULATOR_PLAIN static inline void wgmma_end() {
    wgmma_commit();
    emulator::GroupProduct product;
    while (wgmma_next(0, product)) {
        // The four warps read what is in shared memory together.
        int thread = int(threadIdx.x % 128);
        for (int piece = 2 * product.k; piece < 2 * product.k + 2; piece++) {
            int row = thread / 2;
            emulator_product_access(product.a + row * 128 + (piece ^ (row & 7)) * 16, 16);
            emulator_product_access(product.b + thread * 128 + (piece ^ (thread & 7)) * 16, 16);
        }
        emulator_warp(0xffffffffu, emulator::wgmma_op, &product);
    }
}
static inline uint32_t shared_address(const void* at) {
    return uint32_t(static_cast<const uint8_t*>(at) - static_cast<const uint8_t*>(emulator_dynamic_shared()));
}
template <bool HALF>
EMULATOR_PLAIN static inline void wgmma_rows(float (&c)[64], uint64_t a, uint64_t b, bool adds) {
    wgmma_later(emulator::HalfGroupProduct{c, a, b, {}, nullptr, 128, HALF, adds, false}, 64);
}
template <bool HALF, int SUMS>
EMULATOR_PLAIN static inline void wgmma_columns(float (&c)[SUMS], const uint32_t* a, uint64_t b) {
    wgmma_later(emulator::HalfGroupProduct{c, 0, b, {a[0], a[1], a[2], a[3]}, a, SUMS * 2, HALF, true, true}, SUMS);
}
template <int GROUPS>
EMULATOR_PLAIN static inline void wgmma_wait() {
    emulator::HalfGroupProduct product;
    while (wgmma_next(GROUPS, product)) {
        // A card reads registers until then. Where what they were in has ended, they may have become others, there too.
        if (product.a_registers && std::memcmp(product.a_registers, product.a_values, sizeof product.a_values))
            emulator_fault("registers of A of an asynchronous product are written before the thread has waited for it");
        // The four warps read what is in shared memory together: pieces of 16 bytes, each by one thread.
        int thread = int(threadIdx.x % 128);
        if (!product.a_registers) emulator_product_access(emulator::described(product.a, thread / 2, thread % 2 * 8, false), 16);
        for (int i = thread; i < product.columns * 2; i += 128) {
            const uint8_t* at = product.columns_together
                                    ? emulator::described(product.b, i / 16 * 8, i % 16, true)
                                    : emulator::described(product.b, i / 2, i % 2 * 8, false);
            emulator_product_access(at, 16);
        }
        emulator_warp(0xffffffffu, emulator::half_group_op, &product);
    }
}
template <class T, int COUNT>
static inline void wgmma_hold(T (&)[COUNT]) {}

static inline void cp_async16(void* dst, const void* src) { emulator_cp_async(dst, src, 16); }
// Zeros are there at once, which is as early as they may be; copies are as late as they may be.
static inline void cp_async16_or_zeros(void* dst, const void* src, bool there) {
    if (there) emulator_cp_async(dst, src, 16);
    else store16(dst, make_uint4(0, 0, 0, 0));
}
static inline void cp_async8(void* dst, const void* src) { emulator_cp_async(dst, src, 8); }
static inline void cp_async4(void* dst, const void* src) { emulator_cp_async(dst, src, 4); }
static inline void cp_async_commit() { emulator_cp_async_commit(); }
template <int GROUPS>
static inline void cp_async_wait() {
    emulator_cp_async_wait(GROUPS);
}
