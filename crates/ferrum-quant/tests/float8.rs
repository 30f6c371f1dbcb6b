//! 8-bit floats against torch's types.

mod common;

use common::Fixture;
use ferrum_quant::fp8_codec::{e4m3_from_f32, e4m3_to_f32, e5m2_from_f32, e5m2_to_f32};

#[test]
fn conversions_equal_torch() {
    type Case = (&'static str, fn(u8) -> f32, fn(f32) -> u8);
    let cases: [Case; 2] = [
        ("e4m3", e4m3_to_f32, e4m3_from_f32),
        ("e5m2", e5m2_to_f32, e5m2_from_f32),
    ];
    let fixture = Fixture::load("float8");
    for (name, decode, encode) in cases {
        let values: Vec<f32> = fixture.typed(&format!("{name}.values"));
        for (code, expected) in (0..=u8::MAX).zip(values) {
            let found = decode(code);
            assert!(
                found.to_bits() == expected.to_bits() || (found.is_nan() && expected.is_nan()),
                "{name} {code:#04x}: {found} ≠ {expected}"
            );
        }
        let source: Vec<f32> = fixture.typed(&format!("{name}.source"));
        for (x, &expected) in source
            .into_iter()
            .zip(fixture.bytes(&format!("{name}.encoded")))
        {
            assert_eq!(encode(x), expected, "{name}: {x}");
        }
    }
}
