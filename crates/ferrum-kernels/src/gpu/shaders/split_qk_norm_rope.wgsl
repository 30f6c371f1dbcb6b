// q and k of rows [q | k | v]: norm, rotation, and to their places. A workgroup for each token and
// head of either; k's heads follow q's in a row, so one stride finds both.

struct Params {
    tokens: u32,
    heads: u32,
    head_dim: u32,
    rot_dim: u32,
    interleaved: u32,
    last_row: u32,
    kv_heads: u32,
    row_dim: u32,
    q_offset: u32,
    q_token: u32,
    q_head: u32,
    k_offset: u32,
    k_token: u32,
    k_head: u32,
    q_norm: u32,
    q_eps: f32,
    k_norm: u32,
    k_eps: f32,
}

@group(0) @binding(0) var<uniform> p: Params;
@group(1) @binding(0) var<storage, read> qkv: array<f32>;
@group(1) @binding(1) var<storage, read_write> q: array<f32>;
@group(1) @binding(2) var<storage, read_write> k: array<f32>;
@group(1) @binding(3) var<storage, read> q_weight: array<f32>;
@group(1) @binding(4) var<storage, read> k_weight: array<f32>;
@group(1) @binding(5) var<storage, read> cosines: array<f32>;
@group(1) @binding(6) var<storage, read> sines: array<f32>;
@group(1) @binding(7) var<storage, read> rows: array<i32>;

@compute @workgroup_size(LANES)
fn main(at: Place) {
    let group = group_of(at);
    let slots = p.heads + p.kv_heads;
    let token = group / slots;
    let slot = group % slots;
    if token >= p.tokens {
        return;
    }
    let is_q = slot < p.heads;
    let base = token * p.row_dim + slot * p.head_dim;
    for (var d = at.lane; d < p.head_dim; d += LANES) {
        head[d] = qkv[base + d];
    }
    if select(p.k_norm, p.q_norm, is_q) != 0u {
        let scale = head_scale(at.lane, p.head_dim, select(p.k_eps, p.q_eps, is_q));
        for (var d = at.lane; d < p.head_dim; d += LANES) {
            var weight = 0.0;
            if is_q {
                weight = q_weight[d];
            } else {
                weight = k_weight[d];
            }
            head[d] = head[d] * scale * weight;
        }
    }
    workgroupBarrier();
    let half = p.rot_dim / 2u;
    for (var i = at.lane; i < half; i += LANES) {
        let entry = table_row(rows[token], p.last_row) * half + i;
        rotate_pair(i, half, p.interleaved != 0u, cosines[entry], sines[entry]);
    }
    workgroupBarrier();
    for (var d = at.lane; d < p.head_dim; d += LANES) {
        if is_q {
            q[p.q_offset + token * p.q_token + slot * p.q_head + d] = head[d];
        } else {
            k[p.k_offset + token * p.k_token + (slot - p.heads) * p.k_head + d] = head[d];
        }
    }
}
