// Ops on single elements: a thread, an element.
#include "common.cuh"

KERNEL unary(float* out, const float* x, int kind, int64_t total) {
    int64_t i = thread_number();
    if (i < total) out[i] = activation(kind, x[i]);
}

KERNEL unary_mul(float* out, const float* x, const float* y, int kind, int64_t total) {
    int64_t i = thread_number();
    if (i < total) out[i] = activation(kind, x[i]) * y[i];
}

// Rows of `gate_up` are [gate (dim) | up (dim)].
KERNEL gated(float* out, const float* gate_up, int kind, int64_t total, int64_t dim) {
    int64_t i = thread_number();
    if (i >= total) return;
    int64_t at = i / dim * 2 * dim + i % dim;
    out[i] = activation(kind, gate_up[at]) * gate_up[at + dim];
}

KERNEL add_bias(float* x, const float* bias, int64_t total, int64_t dim) {
    int64_t i = thread_number();
    if (i < total) x[i] += bias[i % dim];
}

KERNEL scaled_add(float* x, const float* y, float scale, int64_t total) {
    int64_t i = thread_number();
    if (i < total) x[i] += scale * y[i];
}

KERNEL scale(float* x, float scale, int64_t total) {
    int64_t i = thread_number();
    if (i < total) x[i] *= scale;
}

KERNEL softcap(float* x, float cap, int64_t total) {
    int64_t i = thread_number();
    if (i < total) x[i] = cap * tanhf(x[i] / cap);
}
