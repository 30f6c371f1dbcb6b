//! What samplers ask of a row of logits.

use ferrum_simd::isa::{Isa, Level};
use ferrum_simd::logits::{max, softmax_weights, softmax_weights_at};
use ferrum_test_support::available;

fn row(len: usize) -> Vec<f32> {
    (0..len)
        .map(|i| ((i * 7919) % 1009) as f32 / 50.0 - 9.0)
        .collect()
}

#[test]
fn all_levels_give_the_bits_of_plain_rust() {
    for len in [0, 1, 15, 16, 17, 63, 64, 65, 200, 1000] {
        let x = row(len);
        let top = max(&x);
        assert_eq!(top, x.iter().copied().fold(f32::NEG_INFINITY, f32::max));
        let bits = |level: Level, temperature| {
            let mut weights = vec![0.0; len];
            let sum = softmax_weights_at(level, &x, top, temperature, &mut weights);
            (sum.to_bits(), weights)
        };
        for temperature in [1e-30, 0.3, 1.0, 1.7, 100.0] {
            let (_, weights) = bits(Level::best(), temperature);
            for (x, weight) in x.iter().zip(&weights) {
                let power = f64::from(x - top) / f64::from(temperature);
                // What rounding does to the power, and what it does to the result.
                let error = (1.0 - power) * 2e-7 * power.exp();
                assert!((f64::from(*weight) - power.exp()).abs() < error + 1e-37);
            }
            for isa in available(Isa::ALL, Isa::is_available) {
                let level = Level::new(isa).unwrap();
                let found = bits(level, temperature);
                assert_eq!(found, bits(Level::best(), temperature), "{}", isa.name());
            }
        }
    }
}

#[test]
fn what_is_no_number_has_no_weight() {
    let (nan, inf) = (f32::NAN, f32::INFINITY);
    let cases: [(&[f32], f32, &[f32]); 5] = [
        (&[nan, 2.0, -inf, 2.0], 2.0, &[0.0, 1.0, 0.0, 1.0]),
        (&[1.0, inf, nan], inf, &[0.0, 1.0, 0.0]),
        (&[-inf, -inf], -inf, &[0.0, 0.0]),
        (&[nan, -nan], -inf, &[0.0, 0.0]),
        (&[-3e38, 3e38], 3e38, &[0.0, 1.0]),
    ];
    for (x, top, expected) in cases {
        assert_eq!(max(x), top, "{x:?}");
        let mut weights = vec![9.0; x.len()];
        assert_eq!(
            softmax_weights(x, top, 0.7, &mut weights),
            expected.iter().sum()
        );
        assert_eq!(weights, expected, "{x:?}");
    }
}
