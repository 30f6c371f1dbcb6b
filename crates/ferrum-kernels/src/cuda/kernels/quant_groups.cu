// The same as quant_pairs.cu for more tokens: up to eight pairs of an expert are products with one reading of its matrix.
#include "common.cuh"
#ifdef ACT_16  // activations of f32 have the products of integers in quant.cu
#include "quant_pairs.cuh"

// Most pairs of a group: the rows of x of a product.
constexpr int GROUP_PAIRS = 8;

// Pairs of an expert: those from `first` on of all by expert, GROUP_PAIRS or what is left.
struct PairGroup {
    int expert, first;
};

// Writes the groups of all experts, whose pairs begin at `offsets`. Returns how many there are, to all threads of the block.
__device__ int make_groups(PairGroup* to, const int* offsets, int experts) {
    __shared__ int of_warps[WARPS];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, all = 0;
    for (int begin = 0; begin < experts; begin += 32 * WARPS) {
        int expert = begin + int(threadIdx.x), first = expert < experts ? offsets[expert] : 0;
        int pairs = expert < experts ? offsets[expert + 1] - first : 0, own = (pairs + GROUP_PAIRS - 1) / GROUP_PAIRS, sum = own;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            int other = __shfl_up_sync(ALL_LANES, sum, step);
            if (lane >= step) sum += other;
        }
        if (lane == 31) of_warps[warp] = sum;
        __syncthreads();
        int at = all + sum - own;
        for (int i = 0; i < WARPS; i++) {
            if (i < warp) at += of_warps[i];
            all += of_warps[i];
        }
        for (int i = 0; i < own; i++) to[at + i] = {expert, first + i * GROUP_PAIRS};
        __syncthreads();
    }
    return all;
}

struct Groups {
    const PairGroup* made;
    const int *offsets, *ids;
    int n, share, each;

    __device__ __forceinline__ RowTile row_tile(int number) const {
        int of = number / each;
        PairGroup group = made[of];
        int rows = min(offsets[group.expert + 1] - group.first, GROUP_PAIRS);
        return tile_of_expert(group.expert, n, number - of * each, group.first, rows);
    }
    // Rows that are not there are the last one again.
    __device__ __forceinline__ int pair(const RowTile& row_tile, int row) const {
        return ids[row_tile.first + max(min(row, row_tile.rows - 1), 0)];
    }
};
#define MAKE_GROUPS                                                                                                     \
    extern __shared__ uint4 memory[];                                                                                   \
    PairGroup* made = reinterpret_cast<PairGroup*>(reinterpret_cast<uint8_t*>(memory) + groups_at);                     \
    wait_for_previous();                                                                                                \
    int count = make_groups(made, offsets, experts) * each;                                                             \
    Groups of = {made, offsets, ids, n, share, each};                                                                   \
    GemvInput in = {x, stride};                                                                                         \
    Weight w = WEIGHT;
#define QUANT_GROUPS(NAME, BITS, TABLE)                                                                                 \
    KERNEL GEMV_BOUNDS quant_groups_##NAME(PAIR_PARAMS) {                                                              \
        MAKE_GROUPS                                                                                                     \
        PairTiles<Groups> row_tiles = {out, of, biases};                                                                \
        gemv_row_tiles<PackedTile<BITS, TABLE>, true, false>(row_tiles, count, w, groups, stages, along, in);           \
    }                                                                                                                   \
    KERNEL GEMV_BOUNDS                                                                                                  \
        quant_gated_groups_##NAME(PAIR_PARAMS, const uint8_t* up_tiles, const float* up_biases, int activation,        \
                                  float alpha, float limit) {                                                           \
        MAKE_GROUPS                                                                                                     \
        GatedTiles<Groups> row_tiles = {out, of, biases, up_tiles, up_biases, {activation, alpha, limit}};              \
        gemv_row_tiles<PackedTile<BITS, TABLE>, true, false>(row_tiles, count, w, groups, stages, along, in);           \
    }
QUANT_GROUPS(2, 2, false)
QUANT_GROUPS(3, 3, false)
QUANT_GROUPS(4, 4, false)
QUANT_GROUPS(table, 4, true)
QUANT_GROUPS(5, 5, false)
QUANT_GROUPS(6, 6, false)
QUANT_GROUPS(8, 8, false)
#endif
