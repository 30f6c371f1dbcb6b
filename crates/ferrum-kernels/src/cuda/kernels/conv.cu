// Convolutions: a thread makes an output and sums channels, then taps, in order.
#include "common.cuh"

// out[c, t] = bias[c] + Σ x[i, t · stride + tap - padding] · weight[c, i, tap]. `bias` may be null.
KERNEL conv1d(Act::Stored* out, const Act::Stored* x, const float* weight, const float* bias, int64_t total,
              int64_t out_len, int64_t len, int64_t in_of_group, int64_t out_of_group, int64_t kernel, int64_t stride, int64_t padding) {
    wait_for_previous();
    int64_t o = thread_number();
    if (o >= total) return;
    int64_t c = o / out_len, start = o % out_len * stride - padding, first = c / out_of_group * in_of_group;
    float sum = 0;
    for (int64_t i = 0; i < in_of_group; i++)
        for (int64_t tap = 0; tap < kernel; tap++) {
            int64_t t = start + tap;
            if (t >= 0 && t < len)
                sum = fmaf(Act::read(x + (first + i) * len + t), weight[(c * in_of_group + i) * kernel + tap], sum);
        }
    Act::write(out + o, bias ? sum + bias[c] : sum);
}

// [channels, height, width] → [patches, out]; the weight is [out, channels, patch, patch].
KERNEL conv2d_patch(Act::Stored* rows, const Act::Stored* image, const float* weight, const float* bias, int64_t total,
                    int64_t out, int64_t channels, int64_t height, int64_t width, int64_t patch) {
    wait_for_previous();
    int64_t i = thread_number();
    if (i >= total) return;
    int64_t p = i / out, o = i % out, across = width / patch;
    float sum = 0;
    for (int64_t c = 0; c < channels; c++)
        for (int64_t y = 0; y < patch; y++)
            for (int64_t x = 0; x < patch; x++) {
                int64_t pixel = (c * height + p / across * patch + y) * width + p % across * patch + x;
                sum = fmaf(Act::read(image + pixel), weight[((o * channels + c) * patch + y) * patch + x], sum);
            }
    Act::write(rows + i, bias ? sum + bias[o] : sum);
}

// out[t, c] = bias[c] + Σ weight[c, tap] · u[t - (kernel - 1) + tap, c], where u are a sequence's inputs; those before
// this step are in its state, oldest first.
KERNEL causal_conv1d(Act::Stored* out, const Act::Stored* x, const float* weight, const float* bias,
                     const float* states, const int* query_starts, const int* slots, int64_t total, int64_t channels, int kernel, int seqs,
                     int all_slots, int64_t elements, int64_t offset) {
    wait_for_previous();
    int64_t o = thread_number();
    if (o >= total) return;
    int64_t token = o / channels, c = o % channels;
    int s = sequence_of(query_starts, seqs, int(token)), slot = slots[s];
    int64_t start = query_starts[s];
    // A slot that is not there has no state, and a token before its sequence no input.
    if (slot < 0 || slot >= all_slots || token < start || token >= query_starts[s + 1]) return;
    const float* state = states + slot * elements + offset;
    int kept = kernel - 1;
    float sum = bias ? bias[c] : 0.0f;
    for (int tap = 0; tap < kernel; tap++) {
        int64_t row = token - start + tap;
        float u = row < kept ? state[row * channels + c] : Act::read(x + (start + row - kept) * channels + c);
        sum = fmaf(weight[c * kernel + tap], u, sum);
    }
    Act::write(out + o, sum);
}

// The last kernel - 1 inputs of each sequence to its state. A thread has a channel of a sequence; each row comes from one
// behind it, or from this step.
KERNEL causal_conv1d_state(float* states, const Act::Stored* x, const int* query_starts, const int* slots, int64_t total,
                           int64_t channels, int kept, int tokens, int all_slots, int64_t elements, int64_t offset) {
    wait_for_previous();
    int64_t o = thread_number();
    if (o >= total) return;
    int64_t s = o / channels, c = o % channels, start = query_starts[s], end = query_starts[s + 1];
    int slot = slots[s];
    if (slot < 0 || slot >= all_slots || end <= start || end > tokens) return;
    float* state = states + slot * elements + offset + c;
    for (int r = 0; r < kept; r++) {
        int64_t row = end - start + r;
        state[r * channels] = row < kept ? state[row * channels] : Act::read(x + (start + row - kept) * channels + c);
    }
}
