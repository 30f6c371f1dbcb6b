// Writes k and v of a batch's tokens to the pool, a lane for each pair of elements of the wider of both.

struct Params {
    total: u32,
    pairs: u32, // of the wider vector
    key_dim: u32,
    value_dim: u32, // 0: not stored
    k_offset: u32,
    k_token: u32,
    k_head: u32,
    v_offset: u32,
    v_token: u32,
    v_head: u32,
    padding: vec2<u32>, // to 12 words
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
    let i = n % p.pairs;
    let kv_head = n / p.pairs % p.paged.kv_heads;
    let token = n / p.pairs / p.paged.kv_heads;

    let s = sequence_of(p.paged.seqs, token);
    let j = key_index(s, token);
    // Tokens behind the last sequence fill up a batch and have no place.
    if j < 0 || j >= kv_lens[s] {
        return;
    }
    let block = block_tables[s * p.paged.table_stride + u32(j) / p.paged.block_size];
    if bitcast<u32>(block) >= p.paged.blocks {
        return;
    }
    let place = vector_of(p.paged, s, u32(j), kv_head);
    if i < p.paged.key_pairs {
        let at = p.k_offset + token * p.k_token + kv_head * p.k_head + 2u * i;
        var pair = vec2<f32>(k[at], 0.0);
        if 2u * i + 1u < p.key_dim {
            pair.y = k[at + 1u];
        }
        keys[place * p.paged.key_pairs + i] = pack(pair);
    }
    if i < p.paged.value_pairs {
        let at = p.v_offset + token * p.v_token + kv_head * p.v_head + 2u * i;
        var pair = vec2<f32>(v[at], 0.0);
        if 2u * i + 1u < p.value_dim {
            pair.y = v[at + 1u];
        }
        values[place * p.paged.value_pairs + i] = pack(pair);
    }
}
