// residual += x; out = rms_norm(residual): the same sums as add and rms_norm one after the other.

struct Params {
    rows: u32,
    dim: u32,
    eps: f32,
}

@group(0) @binding(0) var<uniform> p: Params;
@group(1) @binding(0) var<storage, read_write> residual: array<f32>;
@group(1) @binding(1) var<storage, read> x: array<f32>;
@group(1) @binding(2) var<storage, read> weight: array<f32>;
@group(1) @binding(3) var<storage, read_write> out: array<f32>;

@compute @workgroup_size(LANES)
fn main(at: Place) {
    let row = group_of(at);
    if row >= p.rows {
        return;
    }
    let base = row * p.dim;
    var squares = 0.0;
    for (var d = at.lane; d < p.dim; d += LANES) {
        let sum = residual[base + d] + x[base + d];
        residual[base + d] = sum;
        squares = fma(sum, sum, squares);
    }
    let mean = lane_sum(at.lane, squares) / f32(p.dim);
    let scale = 1.0 / sqrt(mean + p.eps);
    // Each lane reads what it wrote itself.
    for (var d = at.lane; d < p.dim; d += LANES) {
        out[base + d] = residual[base + d] * scale * weight[d];
    }
}
