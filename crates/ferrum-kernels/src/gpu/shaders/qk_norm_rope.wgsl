// Norm, then rotation of every head, in place: a workgroup for each token and head.

struct Params {
    tokens: u32,
    heads: u32,
    head_dim: u32,
    rot_dim: u32,
    interleaved: u32,
    last_row: u32,
    token_stride: u32,
    head_stride: u32,
    has_norm: u32,
    eps: f32,
}

@group(0) @binding(0) var<uniform> p: Params;
@group(1) @binding(0) var<storage, read_write> x: array<f32>;
@group(1) @binding(1) var<storage, read> weight: array<f32>;
@group(1) @binding(2) var<storage, read> cosines: array<f32>;
@group(1) @binding(3) var<storage, read> sines: array<f32>;
@group(1) @binding(4) var<storage, read> rows: array<i32>;

@compute @workgroup_size(LANES)
fn main(at: Place) {
    let group = group_of(at);
    let token = group / p.heads;
    if token >= p.tokens {
        return;
    }
    let base = token * p.token_stride + group % p.heads * p.head_stride;
    for (var d = at.lane; d < p.head_dim; d += LANES) {
        head[d] = x[base + d];
    }
    if p.has_norm != 0u {
        let scale = head_scale(at.lane, p.head_dim, p.eps);
        for (var d = at.lane; d < p.head_dim; d += LANES) {
            head[d] = head[d] * scale * weight[d];
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
        x[base + d] = head[d];
    }
}
