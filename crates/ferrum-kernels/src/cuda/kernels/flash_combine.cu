// Joins what the parts of a row's keys gave, in their order.
#include "flash.cuh"

#define TOGETHER 8

// A warp for each head of each slot.
KERNEL __launch_bounds__(128)
    flash_combine(uint16_t* out, float* partial, const float* sinks, const int* query_starts, int heads, int group,
                  int value_dim, int64_t out_token, int64_t out_head, int splits, int min_rows, int max_rows, int slots,
                  int seq_slots, int seqs) {
    wait_for_previous();
    int64_t row = thread_number() / 32, rows = int64_t(slots) * heads;
    if (row >= rows) return;
    int lane = threadIdx.x % 32, token = int(row / heads), head = int(row % heads);
    if (query_starts) {
        int s = seq_slots ? token / seq_slots : sequence_of(query_starts, seqs, token);
        int first = query_starts[s], end = query_starts[s + 1], all = (end - first) * group;
        if (seq_slots) token += first - s * seq_slots;
        if (token < first || token >= end || all < min_rows || all > max_rows) return;
    }
    const float* stats = stats_of(partial, splits, rows, value_dim, 0);
    for (int d = lane * 4; d < value_dim; d += 128) {
        Stats total = {LOWEST, 0};
        float sum[4] = {0, 0, 0, 0};
        // Several parts are asked for at once; joining them is the same sum for all that join parts.
        for (int first = 0; first < splits; first += TOGETHER) {
            Stats parts[TOGETHER];
            uint4 x[TOGETHER];
#pragma unroll
            for (int i = 0; i < TOGETHER; i++) {
                parts[i] = {LOWEST, 0};
                if (first + i >= splits) continue;
                uint2 both = load8(stats + ((first + i) * rows + row) * 2);
                parts[i] = {__uint_as_float(both.x), __uint_as_float(both.y)};
            }
#pragma unroll
            for (int i = 0; i < TOGETHER; i++)
                if (parts[i].total != 0) x[i] = load16(partial + ((first + i) * rows + row) * value_dim + d);
#pragma unroll
            for (int i = 0; i < TOGETHER; i++) {
                if (parts[i].total == 0) continue;
                float2 factors = join(total, parts[i]);
                sum[0] = joined(sum[0], __uint_as_float(x[i].x), factors);
                sum[1] = joined(sum[1], __uint_as_float(x[i].y), factors);
                sum[2] = joined(sum[2], __uint_as_float(x[i].z), factors);
                sum[3] = joined(sum[3], __uint_as_float(x[i].w), factors);
            }
        }
        float factor = last_factor(total, sinks, head);
        store8(out + token * out_token + head * out_head + d,
               make_uint2(Act::pack2(sum[0] * factor, sum[1] * factor), Act::pack2(sum[2] * factor, sum[3] * factor)));
    }
}
