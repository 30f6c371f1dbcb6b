// Writes k and v of a batch's tokens to the pool, a lane for each pair of elements.

struct Params {
    total: u32,
    head_dim: u32,
    k_offset: u32,
    k_token: u32,
    k_head: u32,
    v_offset: u32,
    v_token: u32,
    v_head: u32,
    paged: Paged,
}

@group(0) @binding(0) var<uniform> p: Params;
@group(1) @binding(0) var<storage, read> k: array<f32>;
@group(1) @binding(1) var<storage, read> v: array<f32>;
@group(1) @binding(2) var<storage, read_write> keys: array<Packed>;
@group(1) @binding(3) var<storage, read_write> values: array<Packed>;

@compute @workgroup_size(256)
fn main(at: Place) {
    let n = element_of(at);
    if n >= p.total {
        return;
    }
    let i = n % p.paged.pairs;
    let kv_head = n / p.paged.pairs % p.paged.kv_heads;
    let token = n / p.paged.pairs / p.paged.kv_heads;

    let s = sequence_of(p.paged, token);
    let j = key_index(s, token);
    // Tokens behind the last sequence fill up a batch and have no place.
    if j < 0 || j >= kv_lens[s] {
        return;
    }
    let block = block_tables[s * p.paged.table_stride + u32(j) / p.paged.block_size];
    if bitcast<u32>(block) >= p.paged.blocks {
        return;
    }
    let place = place_of(p.paged, s, u32(j), kv_head) + i;
    let from_k = p.k_offset + token * p.k_token + kv_head * p.k_head + 2u * i;
    let from_v = p.v_offset + token * p.v_token + kv_head * p.v_head + 2u * i;
    var pair_k = vec2<f32>(k[from_k], 0.0);
    var pair_v = vec2<f32>(v[from_v], 0.0);
    if 2u * i + 1u < p.head_dim {
        pair_k.y = k[from_k + 1u];
        pair_v.y = v[from_v + 1u];
    }
    keys[place] = pack(pair_k);
    values[place] = pack(pair_v);
}
