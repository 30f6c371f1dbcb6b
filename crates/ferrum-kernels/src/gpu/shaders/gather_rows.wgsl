// out[i, :] = src[rows[i], :]; zeros for an index outside.

struct Params {
    total: u32,
    dim: u32,
    src_rows: u32,
}

@group(0) @binding(0) var<uniform> p: Params;
@group(1) @binding(0) var<storage, read> src: array<f32>;
@group(1) @binding(1) var<storage, read> rows: array<i32>;
@group(1) @binding(2) var<storage, read_write> out: array<f32>;

@compute @workgroup_size(256)
fn main(at: Place) {
    let i = element_of(at);
    if i >= p.total {
        return;
    }
    let row = bitcast<u32>(rows[i / p.dim]);
    var value = 0.0;
    if row < p.src_rows {
        value = src[row * p.dim + i % p.dim];
    }
    out[i] = value;
}
