// Rows by index, and the largest element of a row.
#include "common.cuh"

template <class T>
__device__ __forceinline__ void gather(T* out, const T* src, const int* rows, int64_t total, int64_t dim,
                                       int64_t src_rows) {
    wait_for_previous();
    int64_t i = thread_number();
    if (i >= total) return;
    int64_t row = rows[i / dim];
    out[i] = row >= 0 && row < src_rows ? src[row * dim + i % dim] : T(0);
}
KERNEL gather_rows_1(uint8_t* out, const uint8_t* src, const int* rows, int64_t total, int64_t dim, int64_t src_rows) {
    gather(out, src, rows, total, dim, src_rows);
}
KERNEL gather_rows_2(uint16_t* out, const uint16_t* src, const int* rows, int64_t total, int64_t dim,
                     int64_t src_rows) {
    gather(out, src, rows, total, dim, src_rows);
}
KERNEL gather_rows_4(uint32_t* out, const uint32_t* src, const int* rows, int64_t total, int64_t dim,
                     int64_t src_rows) {
    gather(out, src, rows, total, dim, src_rows);
}

// dst[row, dst_first..][..len] = src[row, src_first..][..len], a thread an element.
template <class T>
__device__ __forceinline__ void copy_part(T* dst, const T* src, int64_t total, int64_t len, int64_t src_first,
                                          int64_t src_width, int64_t dst_first, int64_t dst_width) {
    wait_for_previous();
    int64_t i = thread_number();
    if (i >= total) return;
    int64_t row = i / len, column = i % len;
    dst[row * dst_width + dst_first + column] = src[row * src_width + src_first + column];
}
#define COPY_COLUMNS(NAME, T)                                                                                           \
    KERNEL NAME(T* dst, const T* src, int64_t total, int64_t len, int64_t src_first, int64_t src_width,                 \
                int64_t dst_first, int64_t dst_width) {                                                                 \
        copy_part(dst, src, total, len, src_first, src_width, dst_first, dst_width);                                    \
    }
COPY_COLUMNS(copy_columns_1, uint8_t)
COPY_COLUMNS(copy_columns_2, uint16_t)
COPY_COLUMNS(copy_columns_4, uint32_t)

// Rows of a table that lies in slabs: this one has `slab_rows` from `first_row` on. One of the slabs also writes the
// zeros of ids that no slab has.
template <class E>
__device__ __forceinline__ void embed(float* out, const typename E::Stored* table, const int* ids, int64_t total,
                                      int64_t dim, int64_t stride, int first_row, int slab_rows, int all_rows,
                                      int writes_zeros) {
    wait_for_previous();
    int64_t i = thread_number();
    if (i >= total) return;
    int id = ids[i / dim];
    if (id >= first_row && id - first_row < slab_rows) out[i] = E::read(table + (id - first_row) * stride + i % dim);
    else if (writes_zeros && (id < 0 || id >= all_rows)) out[i] = 0;
}
#define EMBEDDING(NAME, E)                                                                                              \
    KERNEL NAME(float* out, const E::Stored* table, const int* ids, int64_t total, int64_t dim, int64_t stride,         \
                int first_row, int slab_rows, int all_rows, int writes_zeros) {                                         \
        embed<E>(out, table, ids, total, dim, stride, first_row, slab_rows, all_rows, writes_zeros);                    \
    }
EMBEDDING(embedding_f32, F32)
EMBEDDING(embedding_f16, F16)
EMBEDDING(embedding_bf16, BF16)

// A block for each row. NaN never wins, and a row of them gives 0.
KERNEL __launch_bounds__(256) argmax(int* out, const float* x, int dim) {
    __shared__ uint32_t keys[8];
    __shared__ int indices[8];
    wait_for_previous();
    const float* row = x + int64_t(blockIdx.x) * dim;
    uint32_t best = 0;
    int index = 0;
    for (int i = threadIdx.x; i < dim; i += blockDim.x) {
        uint32_t key = key_of(__float_as_uint(row[i]));
        if (key > best) best = key, index = i;
    }
#pragma unroll
    for (int flip = 16; flip > 0; flip /= 2) {
        uint32_t key = __shfl_xor_sync(ALL_LANES, best, flip);
        int other = __shfl_xor_sync(ALL_LANES, index, flip);
        if (key > best || (key == best && other < index)) best = key, index = other;
    }
    if (threadIdx.x % 32 == 0) keys[threadIdx.x / 32] = best, indices[threadIdx.x / 32] = index;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int w = 1; w < 8; w++)
            if (keys[w] > best || (keys[w] == best && indices[w] < index)) best = keys[w], index = indices[w];
        out[blockIdx.x] = best == 0 ? 0 : index;
    }
}
