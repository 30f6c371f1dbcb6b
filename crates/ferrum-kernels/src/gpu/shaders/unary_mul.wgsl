// out = activation(x) * y.

struct Params {
    len: u32,
}

@group(0) @binding(0) var<uniform> p: Params;
@group(1) @binding(0) var<storage, read> x: array<f32>;
@group(1) @binding(1) var<storage, read> y: array<f32>;
@group(1) @binding(2) var<storage, read_write> out: array<f32>;

@compute @workgroup_size(256)
fn main(at: Place) {
    let i = element_of(at);
    if i < p.len {
        out[i] = activation(KIND, x[i]) * y[i];
    }
}
