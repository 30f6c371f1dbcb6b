// A weight of f32: four elements are one load.

@group(1) @binding(0) var<storage, read> weight: array<vec4<f32>>;

fn weight4(i: u32) -> vec4<f32> {
    return weight[i];
}
