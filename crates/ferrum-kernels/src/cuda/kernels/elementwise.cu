// Ops on single elements: a thread has one, or eight of a gated row.
#include "common.cuh"

#define UNARY(NAME, E)                                                                                                  \
    KERNEL NAME(E::Stored* out, const E::Stored* x, int kind, int64_t total) {                                          \
        wait_for_previous();                                                                                            \
        int64_t i = thread_number();                                                                                    \
        if (i < total) E::write(out + i, activation(kind, E::read(x + i)));                                             \
    }
UNARY(unary_act, Act)
UNARY(unary_f32, F32)

#define UNARY_MUL(NAME, E)                                                                                              \
    KERNEL NAME(E::Stored* out, const E::Stored* x, const E::Stored* y, int kind, int64_t total) {                      \
        wait_for_previous();                                                                                            \
        int64_t i = thread_number();                                                                                    \
        if (i < total) E::write(out + i, activation(kind, E::read(x + i)) * E::read(y + i));                            \
    }
UNARY_MUL(unary_mul_act, Act)
UNARY_MUL(unary_mul_f32, F32)

// Rows of `gate_up` are [gate (dim) | up (dim)]. A thread makes eight elements of a row, which has `blocks` blocks.
KERNEL __launch_bounds__(128) gated(Act::Stored* out, const Act::Stored* gate_up, int kind, int blocks, int dim) {
    wait_for_previous();
    int64_t row = int(blockIdx.x) / blocks;
    int at = (int(blockIdx.x) % blocks * int(blockDim.x) + int(threadIdx.x)) * 8;
    if (at >= dim) return;
    bool wide = dim % 8 == 0;
    const Act::Stored* from = gate_up + row * 2 * dim;
    float gate[8], up[8];
    x8<Act>(from, at, dim, wide, gate);
    x8<Act>(from + dim, at, dim, wide, up);
#pragma unroll
    for (int j = 0; j < 8; j++) up[j] *= activation(kind, gate[j]);
    write_x8<Act>(out + row * dim, at, dim, wide, up);
}

#define ADD_BIAS(NAME, E)                                                                                               \
    KERNEL NAME(E::Stored* x, const float* bias, int64_t total, int64_t dim) {                                          \
        wait_for_previous();                                                                                            \
        int64_t i = thread_number();                                                                                    \
        if (i < total) E::write(x + i, E::read(x + i) + bias[i % dim]);                                                 \
    }
ADD_BIAS(add_bias_act, Act)
ADD_BIAS(add_bias_f32, F32)

#define SCALED_ADD(NAME, X, Y)                                                                                          \
    KERNEL NAME(X::Stored* x, const Y::Stored* y, float scale, int64_t total) {                                         \
        wait_for_previous();                                                                                            \
        int64_t i = thread_number();                                                                                    \
        if (i < total) X::write(x + i, X::read(x + i) + scale * Y::read(y + i));                                        \
    }
SCALED_ADD(scaled_add_act_act, Act, Act)
SCALED_ADD(scaled_add_act_f32, Act, F32)
SCALED_ADD(scaled_add_f32_act, F32, Act)
SCALED_ADD(scaled_add_f32_f32, F32, F32)

#define SCALE(NAME, E)                                                                                                  \
    KERNEL NAME(E::Stored* x, float scale, int64_t total) {                                                             \
        wait_for_previous();                                                                                            \
        int64_t i = thread_number();                                                                                    \
        if (i < total) E::write(x + i, E::read(x + i) * scale);                                                         \
    }
SCALE(scale_act, Act)
SCALE(scale_f32, F32)

#define SOFTCAP(NAME, E)                                                                                                \
    KERNEL NAME(E::Stored* x, float cap, int64_t total) {                                                               \
        wait_for_previous();                                                                                            \
        int64_t i = thread_number();                                                                                    \
        if (i < total) E::write(x + i, cap * tanhf(E::read(x + i) / cap));                                              \
    }
SOFTCAP(softcap_act, Act)
SOFTCAP(softcap_f32, F32)
