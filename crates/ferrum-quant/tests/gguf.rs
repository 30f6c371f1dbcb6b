//! Every GGUF type against the `gguf` Python package, by the fixtures that
//! `tools/fixtures/make_quant.py` writes; and what must hold for any bytes at all.

mod common;

use common::Fixture;
use ferrum_quant::{QuantError, Rows, can_quantize, dequantize, dot_reference, quantize};
use ferrum_types::GgufQuantType;
use proptest::prelude::*;

fn decode(ty: GgufQuantType, bytes: &[u8]) -> Vec<f32> {
    let mut out = vec![f32::NAN; bytes.len() / ty.block_bytes() * ty.block_len()];
    dequantize(ty, bytes, &mut out).unwrap_or_else(|e| panic!("{e}"));
    out
}

fn encode(ty: GgufQuantType, values: &[f32]) -> Vec<u8> {
    let mut out = vec![0; ty.bytes_for(values.len()).expect("whole blocks")];
    quantize(ty, values, &mut out).unwrap_or_else(|e| panic!("{e}"));
    out
}

/// All types compute in f32 in the order of the reference, so the comparison is of bits; only the
/// payload of a NaN is free.
#[test]
fn decodes_every_type_as_the_gguf_package_does() {
    let fixture = Fixture::load("gguf");
    let mut failures = Vec::new();
    for ty in GgufQuantType::all() {
        let found = decode(ty, fixture.bytes(&format!("{ty}.bytes")));
        let expected: Vec<f32> = fixture.typed(&format!("{ty}.values"));
        assert_eq!(found.len(), expected.len(), "{ty}");
        let wrong = found
            .iter()
            .zip(&expected)
            .position(|(f, e)| f.to_bits() != e.to_bits() && !(f.is_nan() && e.is_nan()));
        if let Some(i) = wrong {
            failures.push(format!("{ty}[{i}]: {} ≠ {}", found[i], expected[i]));
        }
    }
    assert!(failures.is_empty(), "{failures:#?}");
}

#[test]
fn encodes_as_the_gguf_package_does() {
    let fixture = Fixture::load("gguf");
    let mut failures = Vec::new();
    // All encoders but the copy (F32) and the one that the package lacks (Q8_K).
    let not_here = [GgufQuantType::F32, GgufQuantType::Q8_K];
    for ty in GgufQuantType::all().filter(|ty| can_quantize(*ty) && !not_here.contains(ty)) {
        let source: Vec<f32> = fixture.typed(&format!("{ty}.source"));
        let found = encode(ty, &source);
        let expected = fixture.bytes(&format!("{ty}.encoded"));
        let blocks = found
            .chunks(ty.block_bytes())
            .zip(expected.chunks(ty.block_bytes()));
        for (i, (found, expected)) in blocks.enumerate() {
            if found != expected {
                failures.push(format!("{ty} block {i}: {found:02x?} ≠ {expected:02x?}"));
            }
        }
    }
    assert!(failures.is_empty(), "{failures:#?}");
}

#[test]
fn lengths_are_checked() {
    for ty in GgufQuantType::all() {
        let (block_bytes, block_len) = (ty.block_bytes(), ty.block_len());
        let bytes = vec![0; 2 * block_bytes];
        let mut out = vec![0.0; 2 * block_len];
        assert_eq!(dequantize(ty, &bytes, &mut out), Ok(()));
        assert_eq!(dequantize(ty, &[], &mut []), Ok(()));
        assert_eq!(
            dequantize(ty, &bytes, &mut out[1..]),
            Err(QuantError::Length {
                ty,
                what: "output",
                found: 2 * block_len - 1,
                expected: 2 * block_len
            })
        );
        if block_bytes > 1 {
            assert_eq!(
                dequantize(ty, &bytes[1..], &mut out),
                Err(QuantError::PartialBlock {
                    ty,
                    found: 2 * block_bytes - 1,
                    block_bytes
                })
            );
        }
        if can_quantize(ty) {
            assert!(quantize(ty, &out, &mut vec![0; 2 * block_bytes + 1]).is_err());
            assert!(quantize(ty, &out[1..], &mut []).is_err(), "{ty}");
        } else {
            assert_eq!(
                quantize(ty, &out, &mut vec![0; 2 * block_bytes]),
                Err(QuantError::NoEncoder { ty })
            );
        }
    }
}

#[test]
fn rows_are_the_tensor_row_by_row() {
    let fixture = Fixture::load("gguf");
    for ty in GgufQuantType::all() {
        let bytes = fixture.bytes(&format!("{ty}.bytes"));
        let whole = decode(ty, bytes);
        let row_len = whole.len() / 4;
        let rows = Rows::new(ty, bytes, row_len).unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(
            (rows.len(), rows.row_len(), rows.is_empty()),
            (4, row_len, false)
        );
        let same = |a: &[f32], b: &[f32]| {
            a.iter()
                .map(|x| x.to_bits())
                .eq(b.iter().map(|x| x.to_bits()))
        };
        let mut seen = 0;
        rows.try_for_each::<QuantError>(|i, row| {
            assert!(same(row, &whole[i * row_len..][..row_len]), "{ty} row {i}");
            seen += 1;
            Ok(())
        })
        .unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(seen, 4);
        let mut row = vec![0.0; row_len];
        assert_eq!(rows.decode(2, &mut row), Ok(()));
        assert!(same(&row, &whole[2 * row_len..][..row_len]), "{ty}");
        for past in [4, usize::MAX] {
            assert_eq!(
                rows.decode(past, &mut row),
                Err(QuantError::NoSuchRow {
                    ty,
                    row: past,
                    rows: 4
                })
            );
        }
        assert!(Rows::new(ty, bytes, 0).is_err());
        assert!(Rows::new(ty, bytes, row_len * 3).is_err());
        assert!(Rows::new(ty, bytes, usize::MAX).is_err());
        if ty.block_len() > 1 {
            assert!(Rows::new(ty, bytes, row_len - 1).is_err());
        }
    }
}

#[test]
fn dot_reference_is_the_f64_sum_of_products() {
    let fixture = Fixture::load("gguf");
    for ty in GgufQuantType::all() {
        // The first two blocks hold ordinary numbers for every block type.
        let bytes = &fixture.bytes(&format!("{ty}.bytes"))[..2 * ty.block_bytes()];
        let weights = decode(ty, bytes);
        let x: Vec<f32> = (0..weights.len()).map(|i| (i as f32 * 0.7).sin()).collect();
        let expected: f64 = weights
            .iter()
            .zip(&x)
            .map(|(&w, &x)| f64::from(w) * f64::from(x))
            .sum();
        let found = dot_reference(ty, bytes, &x).unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(found.to_bits(), expected.to_bits(), "{ty}");
        assert!(dot_reference(ty, bytes, &x[1..]).is_err());
    }
}

/// Largest error of an encoded block, in units of its largest magnitude.
fn error_bound(ty: GgufQuantType) -> Option<f32> {
    use GgufQuantType as T;
    Some(match ty {
        T::F32 => 0.0,
        T::F16 => 4.9e-4,
        T::BF16 => 4e-3,
        // Half a step, or a whole one where the range is one code short on one side; plus the
        // rounding of the f16 scale times the largest code.
        T::Q4_0 => 1.0 / 8.0 + 5e-4,
        T::Q4_1 => 1.0 / 15.0 + 2e-3,
        T::Q5_0 => 1.0 / 16.0 + 5e-4,
        T::Q5_1 => 1.0 / 31.0 + 2e-3,
        T::Q8_0 => 0.5 / 127.0 + 5e-4,
        T::Q8_K => 0.5 / 127.0 + 1e-6,
        T::TQ1_0 | T::TQ2_0 => 0.5 + 5e-4,
        // Above 6 · 2^e the scale is one power short: 8 becomes 6.
        T::MXFP4 => 0.25,
        _ => return None,
    })
}

#[test]
fn every_encoder_has_an_error_bound() {
    for ty in GgufQuantType::all() {
        assert_eq!(can_quantize(ty), error_bound(ty).is_some(), "{ty}");
    }
}

fn any_type() -> impl Strategy<Value = GgufQuantType> {
    prop::sample::select(GgufQuantType::all().collect::<Vec<_>>())
}

fn encodable_type() -> impl Strategy<Value = GgufQuantType> {
    prop::sample::select(
        GgufQuantType::all()
            .filter(|&ty| can_quantize(ty))
            .collect::<Vec<_>>(),
    )
}

proptest! {
    /// The range keeps f16 scales normal; below it their own steps add to the error.
    #[test]
    fn round_trips_stay_within_the_bound(
        ty in encodable_type(),
        exponent in -2i32..6,
        values in prop::collection::vec(-1.0f32..1.0, 512),
    ) {
        let values: Vec<f32> = values.iter().map(|v| v * 4f32.powi(exponent)).collect();
        let back = decode(ty, &encode(ty, &values));
        let bound = error_bound(ty).unwrap_or(0.0);
        let blocks = values.chunks(ty.block_len()).zip(back.chunks(ty.block_len()));
        for (values, back) in blocks {
            let largest = values.iter().fold(0.0f32, |m, v| m.max(v.abs()));
            for (v, b) in values.iter().zip(back) {
                // Half the distance of two f16 subnormals comes on top.
                prop_assert!((v - b).abs() <= bound * largest + 3e-8, "{ty}: {v} became {b} of {largest}");
            }
        }
    }

    /// Decoded numbers are fixed points: encoding them again changes nothing that can be seen.
    #[test]
    fn eight_bits_are_idempotent(values in prop::collection::vec(-1.0f32..1.0, 64)) {
        let ty = GgufQuantType::Q8_0;
        let once = decode(ty, &encode(ty, &values));
        let twice = decode(ty, &encode(ty, &once));
        for (a, b) in once.iter().zip(&twice) {
            prop_assert!((a - b).abs() <= 1e-3 * a.abs().max(1e-3), "{a} became {b}");
        }
    }

    #[test]
    fn any_bytes_decode_without_panic(
        ty in any_type(),
        bytes in prop::collection::vec(any::<u8>(), 0..700),
        row_len in 0usize..600,
    ) {
        let whole = bytes.len().is_multiple_of(ty.block_bytes());
        let mut out = vec![0.0; bytes.len() / ty.block_bytes() * ty.block_len()];
        prop_assert_eq!(dequantize(ty, &bytes, &mut out).is_ok(), whole);
        prop_assert_eq!(dot_reference(ty, &bytes, &out).is_ok(), whole);
        let blocks = &bytes[..bytes.len() / ty.block_bytes() * ty.block_bytes()];
        prop_assert_eq!(dequantize(ty, blocks, &mut out), Ok(()));
        if let Ok(rows) = Rows::new(ty, &bytes, row_len) {
            let mut row = vec![0.0; row_len];
            for i in 0..rows.len() {
                prop_assert_eq!(rows.decode(i, &mut row), Ok(()));
            }
        }
    }

    #[test]
    fn any_floats_encode_without_panic(
        ty in encodable_type(),
        bits in prop::collection::vec(any::<u32>(), 0..600),
    ) {
        let values: Vec<f32> = bits.into_iter().map(f32::from_bits).collect();
        let mut out = vec![0; values.len() / ty.block_len() * ty.block_bytes()];
        let whole = values.len().is_multiple_of(ty.block_len());
        prop_assert_eq!(quantize(ty, &values, &mut out).is_ok(), whole);
    }
}
