// A weight of f16, two to a word: four elements are one load. Needs no 16-bit types of the device.

@group(1) @binding(0) var<storage, read> weight: array<vec2<u32>>;

fn weight4(i: u32) -> vec4<f32> {
    let w = weight[i];
    return vec4<f32>(unpack2x16float(w.x), unpack2x16float(w.y));
}
