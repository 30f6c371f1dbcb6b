// x = x * scale.

struct Params {
    len: u32,
    scale: f32,
}

@group(0) @binding(0) var<uniform> p: Params;
@group(1) @binding(0) var<storage, read_write> x: array<f32>;

@compute @workgroup_size(256)
fn main(at: Place) {
    let i = element_of(at);
    if i < p.len {
        x[i] = x[i] * p.scale;
    }
}
