// A pair of cache elements in f16, in one word. `pack2x16float` may round as the device likes, so
// rounding to nearest even is spelled out.

alias Packed = u32;

fn to_f16(value: f32) -> u32 {
    let bits = bitcast<u32>(value);
    let sign = bits >> 16u & 0x8000u;
    let magnitude = bits & 0x7fffffffu;
    if magnitude > 0x7f800000u {
        return sign | 0x7e00u;
    }
    if magnitude >= 0x477ff000u {
        // 65520 and more round to infinity.
        return sign | 0x7c00u;
    }
    if magnitude >= 0x38800000u {
        // Normal: the exponent's bias changes, 13 bits of the fraction go.
        let even = magnitude >> 13u & 1u;
        return sign | (magnitude - 0x38000000u + 0xfffu + even) >> 13u;
    }
    if magnitude < 0x33000000u {
        return sign;
    }
    // Subnormal: the fraction with its leading one in units of 2^-24.
    let fraction = magnitude & 0x7fffffu | 0x800000u;
    let shift = 126u - (magnitude >> 23u);
    let half = 1u << (shift - 1u);
    let even = fraction >> shift & 1u;
    return sign | (fraction + half - 1u + even) >> shift;
}

fn pack(pair: vec2<f32>) -> Packed {
    return to_f16(pair.x) | to_f16(pair.y) << 16u;
}

fn unpack(pair: Packed) -> vec2<f32> {
    return unpack2x16float(pair);
}
