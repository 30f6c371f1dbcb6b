// A pair of cache elements in f32.

alias Packed = vec2<f32>;

fn pack(pair: vec2<f32>) -> Packed {
    return pair;
}

fn unpack(pair: Packed) -> vec2<f32> {
    return pair;
}
