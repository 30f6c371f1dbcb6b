//! The search for scales: what it writes, and that it is worth its time.

use ferrum_quant::unpack::{CodeValues, SUB, code_values};
use ferrum_quant::{QuantError, Search, can_encode, dequantize, encode_row, quantize};
use ferrum_types::GgufQuantType as T;
use proptest::prelude::*;

const ROW: usize = 512;

/// Rows as weights are: nearly normal, with rare large ones.
fn rows(count: usize) -> Vec<Vec<f32>> {
    let mut state = 5u64;
    let mut unit = || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (state >> 40) as f32 / (1u64 << 24) as f32
    };
    let mut number = || {
        let sum: f32 = (0..6).map(|_| unit()).sum::<f32>() - 3.0;
        let large = if unit() < 0.01 { 4.0 } else { 1.0 };
        0.03 * sum * large
    };
    (0..count)
        .map(|_| (0..ROW).map(|_| number()).collect())
        .collect()
}

fn encode(ty: T, row: &[f32], importance: Option<&[f32]>, search: Search) -> Vec<f32> {
    let mut bytes = vec![0; ty.bytes_for(row.len()).expect("whole blocks")];
    encode_row(ty, row, importance, search, &mut bytes).unwrap_or_else(|e| panic!("{e}"));
    let mut back = vec![f32::NAN; row.len()];
    dequantize(ty, &bytes, &mut back).unwrap_or_else(|e| panic!("{e}"));
    back
}

fn error(row: &[f32], back: &[f32], weight: impl Fn(usize) -> f32) -> f64 {
    let terms = row.iter().zip(back).enumerate();
    terms
        .map(|(i, (x, y))| f64::from(weight(i)) * f64::from(x - y).powi(2))
        .sum()
}

/// Root mean square error in units of the numbers' own, and what each type must stay below.
const BOUNDS: &[(T, f64)] = &[
    (T::F16, 3e-4),
    (T::BF16, 2.5e-3),
    (T::Q8_0, 0.008),
    (T::Q6_K, 0.025),
    (T::Q5_K, 0.045),
    (T::Q5_1, 0.05),
    (T::Q5_0, 0.06),
    (T::Q4_K, 0.09),
    (T::IQ4_NL, 0.095),
    (T::IQ4_XS, 0.1),
    (T::Q4_1, 0.1),
    (T::Q4_0, 0.12),
    (T::MXFP4, 0.14),
    (T::Q3_K, 0.19),
    (T::Q2_K, 0.32),
];

#[test]
fn errors_stay_within_bounds() {
    let rows = rows(40);
    let mut found = Vec::new();
    for &(ty, bound) in BOUNDS {
        let (mut miss, mut all) = (0.0, 0.0);
        for row in &rows {
            miss += error(row, &encode(ty, row, None, Search::Fast), |_| 1.0);
            all += error(row, &vec![0.0; ROW], |_| 1.0);
        }
        let relative = (miss / all).sqrt();
        found.push(format!("{ty}: {relative:.4} of {bound}"));
        assert!(relative < bound, "{found:#?}");
    }
    println!("{found:#?}");
}

/// Scales from the extreme values, rounded to nearest: what a type gives without a search.
fn simple(ty: T, row: &[f32]) -> Vec<f32> {
    let (sub, signed, steps, minimums) = match ty {
        T::Q2_K => (16, false, 15.0, true),
        T::Q3_K => (16, true, 32.0, false),
        T::Q4_K | T::Q5_K => (32, false, 63.0, true),
        T::Q6_K => (16, true, 128.0, false),
        T::IQ4_XS => (32, true, 32.0, false),
        T::IQ4_NL => (32, true, 0.0, false),
        _ => {
            let mut bytes = vec![0; ty.bytes_for(row.len()).expect("whole blocks")];
            quantize(ty, row, &mut bytes).unwrap_or_else(|e| panic!("{e}"));
            let mut back = vec![0.0; row.len()];
            dequantize(ty, &bytes, &mut back).unwrap_or_else(|e| panic!("{e}"));
            return back;
        }
    };
    let values = code_values(ty).expect("codes");
    let levels: Vec<f32> = match values {
        CodeValues::Unsigned { bits, .. } => (0..1u16 << bits)
            .map(|c| values.value(c as u8) as f32)
            .collect(),
        _ => (0..16).map(|c| values.value(c) as f32).collect(),
    };
    let nearest = |y: f32| {
        let by = |a: &&f32, b: &&f32| (**a - y).abs().total_cmp(&(**b - y).abs());
        levels.iter().min_by(by).copied().unwrap_or(0.0)
    };
    let mut back = Vec::new();
    for block in row.chunks(if steps > 0.0 { 256 } else { 32 }) {
        let fits: Vec<(f32, f32)> = block
            .chunks(sub)
            .map(|x| {
                let low = x.iter().copied().fold(0.0f32, f32::min);
                let high = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                if !signed {
                    return ((high - low) / levels[levels.len() - 1], -low);
                }
                let extreme = if high > -low { high } else { low };
                (extreme / levels[0], 0.0)
            })
            .collect();
        let most = |of: fn(&(f32, f32)) -> f32| {
            fits.iter()
                .map(of)
                .fold(0.0f32, |m, v| if v.abs() > m.abs() { v } else { m })
        };
        let (d, dmin) = (most(|f| f.0) / steps, most(|f| f.1) / steps);
        for (x, (scale, low)) in block.chunks(sub).zip(&fits) {
            let (scale, low) = match steps > 0.0 {
                true => (
                    (scale / d).round() * d,
                    if minimums {
                        (low / dmin).round() * dmin
                    } else {
                        0.0
                    },
                ),
                false => (*scale, *low),
            };
            back.extend(x.iter().map(|x| scale * nearest((x + low) / scale) - low));
        }
    }
    assert_eq!(SUB, 16);
    back
}

#[test]
fn the_search_beats_rounding_to_nearest() {
    let rows = rows(20);
    for ty in T::all()
        .filter(|&ty| can_encode(ty) && ty.is_quantized() && ROW.is_multiple_of(ty.block_len()))
    {
        if matches!(ty, T::Q8_K | T::TQ1_0 | T::TQ2_0) {
            continue;
        }
        let theirs: f64 = rows
            .iter()
            .map(|row| error(row, &simple(ty, row), |_| 1.0))
            .sum();
        for search in Search::ALL {
            let ours: f64 = rows
                .iter()
                .map(|row| error(row, &encode(ty, row, None, search), |_| 1.0))
                .sum();
            println!("{ty}, {search}: {:.4}", ours / theirs);
            assert!(ours <= theirs, "{ty}, {search}: {ours} and {theirs}");
        }
    }
}

/// Types that the search encodes.
const SEARCHED: &[T] = &[
    T::Q4_0,
    T::Q4_1,
    T::Q5_0,
    T::Q5_1,
    T::MXFP4,
    T::IQ4_NL,
    T::IQ4_XS,
    T::Q2_K,
    T::Q3_K,
    T::Q4_K,
    T::Q5_K,
    T::Q6_K,
];

/// Longer search leaves smaller errors, or the same; not by much, or the fast one would be a poor default.
#[test]
fn a_thorough_search_is_no_worse_than_a_fast_one() {
    let rows = rows(40);
    let importance: Vec<f32> = (0..ROW).map(|i| 0.1 + (i % 13) as f32).collect();
    for &ty in SEARCHED {
        for importance in [None, Some(&*importance)] {
            let weight = |i: usize| importance.map_or(1.0, |all| all[i]);
            let [fast, thorough] = Search::ALL.map(|search| {
                let miss = rows.iter();
                miss.map(|row| error(row, &encode(ty, row, importance, search), weight))
                    .sum::<f64>()
            });
            println!("{ty}: {:.4}", thorough / fast);
            // What is searched for weighs large numbers more than this sum does.
            assert!(thorough <= 1.002 * fast, "{ty}: {thorough} and {fast}");
            assert!(fast <= 1.05 * thorough, "{ty}: {fast} and {thorough}");
        }
    }
}

/// With importance, the error by importance falls.
#[test]
fn important_columns_come_out_better() {
    let importance: Vec<f32> = (0..ROW)
        .map(|i| {
            if i % 7 == 0 {
                20.0
            } else {
                0.05 + (i % 3) as f32 * 0.1
            }
        })
        .collect();
    for &ty in SEARCHED {
        let (mut with, mut without) = (0.0, 0.0);
        for row in &rows(10) {
            with += error(
                row,
                &encode(ty, row, Some(&importance), Search::Fast),
                |i| importance[i],
            );
            without += error(row, &encode(ty, row, None, Search::Fast), |i| importance[i]);
        }
        println!("{ty}: {:.4}", with / without);
        assert!(with < without, "{ty}: {with} and {without}");
    }
}

#[test]
fn lengths_are_checked() {
    let row = [0.5; 256];
    let mut out = [0; 144];
    assert_eq!(
        encode_row(T::Q4_K, &row, None, Search::Fast, &mut out),
        Ok(())
    );
    assert!(encode_row(T::Q4_K, &row[1..], None, Search::Fast, &mut out).is_err());
    assert!(encode_row(T::Q4_K, &row, None, Search::Fast, &mut out[1..]).is_err());
    assert!(matches!(
        encode_row(T::Q4_K, &row, Some(&row[1..]), Search::Fast, &mut out),
        Err(QuantError::Length {
            what: "importance",
            ..
        })
    ));
    assert_eq!(
        encode_row(T::IQ1_S, &row, None, Search::Fast, &mut out),
        Err(QuantError::NoEncoder { ty: T::IQ1_S })
    );
}

#[test]
fn zeros_and_constants_survive() {
    for ty in T::all().filter(|&ty| can_encode(ty)) {
        for value in [0.0f32, 0.5, -0.5] {
            let row = vec![value; 256];
            for search in Search::ALL {
                let back = encode(ty, &row, None, search);
                let bound = if value == 0.0 { 0.0 } else { 0.07 };
                let miss = back.iter().map(|b| (b - value).abs()).fold(0.0, f32::max);
                assert!(miss <= bound, "{ty}: {value} became {:?}", &back[..2]);
            }
        }
    }
}

proptest! {
    #[test]
    fn any_floats_encode_without_panic(
        ty in prop::sample::select(T::all().filter(|&ty| can_encode(ty)).collect::<Vec<_>>()),
        bits in prop::collection::vec(any::<u32>(), 256),
        importance in prop::option::of(prop::collection::vec(any::<u32>(), 256)),
        search in prop::sample::select(Search::ALL.to_vec()),
    ) {
        let row: Vec<f32> = bits.into_iter().map(f32::from_bits).collect();
        let importance: Option<Vec<f32>> = importance.map(|b| b.into_iter().map(f32::from_bits).collect());
        let mut out = vec![0; ty.bytes_for(256).unwrap_or(0)];
        prop_assert_eq!(encode_row(ty, &row, importance.as_deref(), search, &mut out), Ok(()));
    }
}
