// What ranks do with what they have gathered of each other: sums as balanced trees, and norms of rows that they share.
#include "common.cuh"

// Sums of complete trees that wait for their right neighbour: enough for 1024 ranks, the most of a group.
constexpr int MAX_TREES = 11;

// The sum of value(0) to value(ranks - 1), with the order of a balanced tree: neighbours first, then pairs.
template <typename Value> __device__ float tree_sum(int ranks, Value value) {
    float trees[MAX_TREES];
    int held = 0;
    for (int rank = 0; rank < ranks; rank++) {
        float sum = value(rank);
        for (int count = rank + 1; count % 2 == 0; count /= 2) sum = trees[--held] + sum;
        trees[held++] = sum;
    }
    float sum = trees[--held];
    while (held > 0) sum = trees[--held] + sum;
    return sum;
}

// out[i] = the sum of parts[rank][i], rounded once.
#define RANK_SUM(NAME, E)                                                                                               \
    KERNEL NAME(E::Stored* out, const E::Stored* parts, int ranks, int64_t total, int64_t stride) {                     \
        wait_for_previous();                                                                                            \
        int64_t i = thread_number();                                                                                    \
        if (i >= total) return;                                                                                         \
        E::write(out + i, tree_sum(ranks, [=](int rank) { return E::read(parts + rank * stride + i); }));               \
    }
RANK_SUM(rank_sum_f32, F32)
RANK_SUM(rank_sum_f16, F16)
RANK_SUM(rank_sum_bf16, BF16)

// squares[row] = the sum of squares of a row's columns on this rank, or 0 where another rank counts them.
KERNEL __launch_bounds__(256) row_squares(float* squares, const Act::Stored* x, int64_t dim, int counts) {
    __shared__ float scratch[32];
    wait_for_previous();
    const Act::Stored* row = x + int64_t(blockIdx.x) * dim;
    float sum = 0;
    if (counts) {
        for (int64_t i = threadIdx.x; i < dim; i += blockDim.x) {
            float value = Act::read(row + i);
            sum = fmaf(value, value, sum);
        }
    }
    sum = block_sum(sum, scratch);
    if (threadIdx.x == 0) squares[blockIdx.x] = sum;
}

// out = x / sqrt(mean of squares + eps) · weight, of rows with `whole` columns of which this rank has `dim`. The squares
// are those of all ranks, [ranks, rows].
KERNEL __launch_bounds__(256) rms_norm_part(Act::Stored* out, const Act::Stored* x, const float* weight,
                                            const float* squares, int ranks, int64_t dim, int64_t whole, float eps) {
    wait_for_previous();
    int64_t row = blockIdx.x;
    float sum = tree_sum(ranks, [=](int rank) { return squares[rank * int64_t(gridDim.x) + row]; });
    float factor = 1.0f / sqrtf(sum / float(whole) + eps);
    for (int64_t i = row * dim + threadIdx.x; i < (row + 1) * dim; i += blockDim.x)
        Act::write(out + i, Act::read(x + i) * factor * weight[i - row * dim]);
}

// Token ids as rows of a part of the vocabulary. Ids are 32-bit words, which wrap.
KERNEL ids_from(uint32_t* out, const uint32_t* ids, int first, int64_t total) {
    wait_for_previous();
    int64_t i = thread_number();
    if (i < total) out[i] = ids[i] - uint32_t(first);
}
