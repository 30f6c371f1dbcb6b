// A pair of cache elements in bf16, the upper half of an f32, in one word; rounded to nearest even.

alias Packed = u32;

fn to_bf16(value: f32) -> u32 {
    let bits = bitcast<u32>(value);
    if (bits & 0x7fffffffu) > 0x7f800000u {
        // Rounding could turn a NaN into an infinity.
        return bits >> 16u | 0x40u;
    }
    return (bits + 0x7fffu + (bits >> 16u & 1u)) >> 16u;
}

fn pack(pair: vec2<f32>) -> Packed {
    return to_bf16(pair.x) | to_bf16(pair.y) << 16u;
}

fn unpack(pair: Packed) -> vec2<f32> {
    return bitcast<vec2<f32>>(vec2<u32>(pair << 16u, pair & 0xffff0000u));
}
