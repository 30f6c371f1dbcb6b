// out = x / sqrt(mean(x * x) + eps) * weight, a workgroup for each row.

struct Params {
    rows: u32,
    dim: u32,
    eps: f32,
}

@group(0) @binding(0) var<uniform> p: Params;
@group(1) @binding(0) var<storage, read> x: array<f32>;
@group(1) @binding(1) var<storage, read> weight: array<f32>;
@group(1) @binding(2) var<storage, read_write> out: array<f32>;

@compute @workgroup_size(LANES)
fn main(at: Place) {
    let row = group_of(at);
    if row >= p.rows {
        return;
    }
    let base = row * p.dim;
    var squares = 0.0;
    for (var d = at.lane; d < p.dim; d += LANES) {
        squares = fma(x[base + d], x[base + d], squares);
    }
    let mean = lane_sum(at.lane, squares) / f32(p.dim);
    let scale = 1.0 / sqrt(mean + p.eps);
    for (var d = at.lane; d < p.dim; d += LANES) {
        out[base + d] = x[base + d] * scale * weight[d];
    }
}
