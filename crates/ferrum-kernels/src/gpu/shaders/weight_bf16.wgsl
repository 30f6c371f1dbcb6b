// A weight of bf16, two to a word: four elements are one load. bf16 is the upper half of an f32.

@group(1) @binding(0) var<storage, read> weight: array<vec2<u32>>;

fn weight4(i: u32) -> vec4<f32> {
    let w = weight[i];
    return bitcast<vec4<f32>>(vec4<u32>(w.x << 16u, w.x & 0xffff0000u, w.y << 16u, w.y & 0xffff0000u));
}
