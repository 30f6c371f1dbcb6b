// Joins what the parts of a row's keys gave, in their order, where that is too much for the last block of a tile (`flash.rs`).
#include "flash_rows.cuh"

// A warp for each head of each slot.
KERNEL __launch_bounds__(128)
    flash_combine(uint16_t* out, float* partial, const float* sinks, const int* query_starts, int heads, int group,
                  int value_dim, int64_t out_token, int64_t out_head, int splits, int min_rows, int max_rows, int slots,
                  int seq_slots, int seqs) {
    wait_for_previous();
    int64_t row = thread_number() / 32, rows = int64_t(slots) * heads;
    if (row >= rows) return;
    int token = int(row / heads), head = int(row % heads);
    if (query_starts) {
        int s = seq_slots ? token / seq_slots : sequence_of(query_starts, seqs, token);
        int first = query_starts[s], end = query_starts[s + 1], all = (end - first) * group;
        if (seq_slots) token += first - s * seq_slots;
        if (token < first || token >= end || all < min_rows || all > max_rows) return;
    }
    join_row<false>(out + token * out_token + head * out_head, partial, splits, splits, rows, row, value_dim, sinks, head);
}
