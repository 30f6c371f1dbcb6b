// Keys and values in f32, each with a stride from one token to the next. Latent attention is this
// with one kv head, and values that are the beginning of their keys.

struct Params {
    call: Call,
    kv_len: u32,
    pos_offset: u32,
    head_tokens: u32, // from one kv head to the next
    key_stride: u32,
    value_stride: u32,
}

@group(0) @binding(0) var<uniform> p: Params;
@group(1) @binding(1) var<storage, read> keys: array<f32>;
@group(1) @binding(2) var<storage, read> values: array<f32>;

fn locate(token: u32) -> Query {
    return Query(i32(p.pos_offset + token), i32(p.kv_len));
}

fn find_key(j: u32, kv_head: u32) -> u32 {
    return kv_head * p.head_tokens + j;
}

fn key_pair(place: u32, i: u32) -> vec2<f32> {
    let k = place * p.key_stride + 2u * i;
    // The neighbour of an odd last element belongs to another key, and may be no number.
    if 2u * i + 1u < p.call.key_dim {
        return vec2<f32>(keys[k], keys[k + 1u]);
    }
    return vec2<f32>(keys[k], 0.0);
}

fn value_pair(place: u32, i: u32) -> vec2<f32> {
    let v = place * p.value_stride + 2u * i;
    if 2u * i + 1u < p.call.value_dim {
        return vec2<f32>(values[v], values[v + 1u]);
    }
    return vec2<f32>(values[v], 0.0);
}

@compute @workgroup_size(LANES)
fn main(at: Place) {
    let group = group_of(at);
    if group < p.call.tokens * p.call.heads {
        attend(p.call, at.lane, group);
    }
}
