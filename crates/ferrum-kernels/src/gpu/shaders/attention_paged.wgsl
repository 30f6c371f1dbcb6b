// Keys and values in the blocks of a paged pool. Where keys hold the values, both are the same memory.

struct Params {
    call: Call,
    paged: Paged,
}

@group(0) @binding(0) var<uniform> p: Params;
@group(1) @binding(1) var<storage, read> keys: array<Packed>;
@group(1) @binding(2) var<storage, read> values: array<Packed>;

var<workgroup> sequence: u32;

// Only one lane calls this, and all the others read `sequence` after a barrier.
fn locate(token: u32) -> Query {
    let s = sequence_of(p.paged.seqs, token);
    sequence = s;
    // No more keys than the table has entries for, whatever the buffer says.
    let most = i32(p.paged.table_stride * p.paged.block_size);
    return Query(key_index(s, token), min(kv_lens[s], most));
}

fn find_key(j: u32, kv_head: u32) -> u32 {
    return vector_of(p.paged, sequence, j, kv_head);
}

fn key_pair(place: u32, i: u32) -> vec2<f32> {
    return unpack(keys[place * p.paged.key_pairs + i]);
}

fn value_pair(place: u32, i: u32) -> vec2<f32> {
    return unpack(values[place * p.paged.value_pairs + i]);
}

@compute @workgroup_size(LANES)
fn main(at: Place) {
    let group = group_of(at);
    if group < p.call.tokens * p.call.heads {
        attend(p.call, at.lane, group);
    }
}
