// Where a paged pool keeps the keys of a ragged batch.

struct Paged {
    seqs: u32,
    table_stride: u32,
    block_size: u32,
    kv_heads: u32,
    key_pairs: u32,
    value_pairs: u32,
    blocks: u32,
}

@group(1) @binding(BATCH) var<storage, read> query_starts: array<i32>;
@group(1) @binding(BATCH + 1) var<storage, read> kv_lens: array<i32>;
@group(1) @binding(BATCH + 2) var<storage, read> block_tables: array<i32>;

// The key index of a token of a sequence.
fn key_index(s: u32, token: u32) -> i32 {
    return kv_lens[s] - query_starts[s + 1u] + i32(token);
}

// The vector of a head of key j; outside the pool for an id that is no block.
fn vector_of(c: Paged, s: u32, j: u32, kv_head: u32) -> u32 {
    let block = bitcast<u32>(block_tables[s * c.table_stride + j / c.block_size]);
    return (block * c.kv_heads + kv_head) * c.block_size + j % c.block_size;
}
