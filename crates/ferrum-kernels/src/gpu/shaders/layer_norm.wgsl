// out = (x - mean) / sqrt(var + eps) * weight + bias, a workgroup for each row. The variance is
// that of the centred values: a mean far from zero costs no precision.

struct Params {
    rows: u32,
    dim: u32,
    eps: f32,
    has_bias: u32,
}

@group(0) @binding(0) var<uniform> p: Params;
@group(1) @binding(0) var<storage, read> x: array<f32>;
@group(1) @binding(1) var<storage, read> weight: array<f32>;
@group(1) @binding(2) var<storage, read> bias: array<f32>;
@group(1) @binding(3) var<storage, read_write> out: array<f32>;

@compute @workgroup_size(LANES)
fn main(at: Place) {
    let row = group_of(at);
    if row >= p.rows {
        return;
    }
    let base = row * p.dim;
    var sum = 0.0;
    for (var d = at.lane; d < p.dim; d += LANES) {
        sum += x[base + d];
    }
    let mean = lane_sum(at.lane, sum) / f32(p.dim);
    var squares = 0.0;
    for (var d = at.lane; d < p.dim; d += LANES) {
        let centred = x[base + d] - mean;
        squares = fma(centred, centred, squares);
    }
    let variance = lane_sum(at.lane, squares) / f32(p.dim);
    let scale = 1.0 / sqrt(variance + p.eps);
    for (var d = at.lane; d < p.dim; d += LANES) {
        var value = (x[base + d] - mean) * scale * weight[d];
        if p.has_bias != 0u {
            value += bias[d];
        }
        out[base + d] = value;
    }
}
