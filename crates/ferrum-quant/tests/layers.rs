//! GPTQ and AWQ layers against those that AutoGPTQ and AutoAWQ packed and multiplied out
//! (`tools/fixtures/make_quant.py`), and round trips through the packers of this crate.

mod common;

use common::Fixture;
use ferrum_quant::QuantError;
use ferrum_quant::awq::{self, AwqTensors};
use ferrum_quant::gptq::{self, GptqTensors, ZeroPoints};
use proptest::prelude::*;

const GPTQ: [&str; 10] = [
    "gptq2",
    "gptq2_desc_act",
    "gptq3",
    "gptq3_desc_act",
    "gptq4",
    "gptq4_desc_act",
    "gptq8",
    "gptq8_desc_act",
    "gptq4_one_group",
    "gptq4_part_group",
];
const AWQ: [&str; 2] = ["awq", "awq_one_group"];

fn gptq_layer<'a>(fixture: &'a Fixture, name: &str) -> GptqTensors<'a> {
    let meta: Vec<i32> = fixture.typed(&format!("{name}.meta"));
    let &[bits, group_size, k, n] = meta.as_slice() else {
        panic!("{name}.meta has {} elements", meta.len());
    };
    GptqTensors {
        bits: bits as u32,
        group_size: group_size as usize,
        zero_points: ZeroPoints::MinusOne,
        in_features: k as usize,
        out_features: n as usize,
        qweight: fixture.bytes(&format!("{name}.qweight")),
        qzeros: fixture.bytes(&format!("{name}.qzeros")),
        scales: fixture.bytes(&format!("{name}.scales")),
        g_idx: Some(fixture.bytes(&format!("{name}.g_idx"))),
    }
}

fn awq_layer<'a>(fixture: &'a Fixture, name: &str) -> AwqTensors<'a> {
    let meta: Vec<i32> = fixture.typed(&format!("{name}.meta"));
    let &[4, group_size, k, n] = meta.as_slice() else {
        panic!("{name}.meta is {meta:?}");
    };
    AwqTensors {
        group_size: group_size as usize,
        in_features: k as usize,
        out_features: n as usize,
        qweight: fixture.bytes(&format!("{name}.qweight")),
        qzeros: fixture.bytes(&format!("{name}.qzeros")),
        scales: fixture.bytes(&format!("{name}.scales")),
    }
}

fn gptq_weights(layer: &GptqTensors<'_>) -> Vec<f32> {
    let mut out = vec![f32::NAN; layer.in_features * layer.out_features];
    layer.dequantize(&mut out).unwrap_or_else(|e| panic!("{e}"));
    out
}

#[test]
fn gptq_layers_decode_as_autogptq_does() {
    let fixture = Fixture::load("layers");
    for name in GPTQ {
        let layer = gptq_layer(&fixture, name);
        let found = gptq_weights(&layer);
        let expected: Vec<f32> = fixture.typed(&format!("{name}.weight"));
        assert_eq!(found, expected, "{name}");
        let groups: Vec<i32> = fixture.typed(&format!("{name}.g_idx"));
        let groups: Vec<usize> = groups.into_iter().map(|group| group as usize).collect();
        assert_eq!(layer.groups_of_inputs(), Ok(groups), "{name}");
        // Without activation order the indices say nothing new.
        if !name.ends_with("desc_act") {
            let plain = GptqTensors {
                g_idx: None,
                ..layer
            };
            assert_eq!(gptq_weights(&plain), expected, "{name} without g_idx");
        }
    }
}

#[test]
fn awq_layers_decode_as_autoawq_does() {
    let fixture = Fixture::load("layers");
    for name in AWQ {
        let layer = awq_layer(&fixture, name);
        let mut found = vec![f32::NAN; layer.in_features * layer.out_features];
        assert_eq!(layer.dequantize(&mut found), Ok(()));
        assert_eq!(
            found,
            fixture.typed::<f32>(&format!("{name}.weight")),
            "{name}"
        );
    }
}

#[test]
fn packing_gives_the_bytes_back() {
    let fixture = Fixture::load("layers");
    for name in GPTQ {
        let layer = gptq_layer(&fixture, name);
        let (bits, k, n) = (layer.bits, layer.in_features, layer.out_features);
        let mut codes = vec![0; k * n];
        let mut zeros = vec![0; layer.groups() * n];
        assert_eq!(layer.codes(&mut codes), Ok(()));
        assert_eq!(layer.zeros(&mut zeros), Ok(()));
        let qweight = gptq::pack_codes(bits, &codes, k, n);
        assert_eq!(qweight.as_deref(), Ok(layer.qweight), "{name}");
        let qzeros = gptq::pack_zeros(bits, ZeroPoints::MinusOne, &zeros, n);
        assert_eq!(qzeros.as_deref(), Ok(layer.qzeros), "{name}");
    }
    for name in AWQ {
        let layer = awq_layer(&fixture, name);
        let (k, n) = (layer.in_features, layer.out_features);
        let mut codes = vec![0; k * n];
        assert_eq!(layer.codes(&mut codes), Ok(()));
        assert_eq!(
            awq::pack_codes(&codes, k, n).as_deref(),
            Ok(layer.qweight),
            "{name}"
        );
    }
}

#[test]
fn wrong_layers_are_refused() {
    let fixture = Fixture::load("layers");
    let good = gptq_layer(&fixture, "gptq4_desc_act");
    assert_eq!(good.validate(), Ok(()));
    let past_the_end = [3i32.to_le_bytes().as_slice(), &[0; 95 * 4]].concat();
    let negative = [(-1i32).to_le_bytes().as_slice(), &[0; 95 * 4]].concat();
    let cases: [(&str, GptqTensors<'_>); 11] = [
        ("bits", GptqTensors { bits: 5, ..good }),
        (
            "group_size",
            GptqTensors {
                group_size: 0,
                ..good
            },
        ),
        (
            "in_features",
            GptqTensors {
                in_features: 95,
                ..good
            },
        ),
        (
            "in_features",
            GptqTensors {
                in_features: 0,
                ..good
            },
        ),
        (
            "out_features",
            GptqTensors {
                out_features: 60,
                ..good
            },
        ),
        (
            "overflow",
            GptqTensors {
                in_features: 1 << 40,
                out_features: 1 << 40,
                ..good
            },
        ),
        (
            "qweight",
            GptqTensors {
                qweight: &good.qweight[1..],
                ..good
            },
        ),
        (
            "qzeros",
            GptqTensors {
                qzeros: &[],
                ..good
            },
        ),
        (
            "scales",
            GptqTensors {
                group_size: 16,
                qzeros: &[0; 6 * 8 * 4],
                ..good
            },
        ),
        (
            "g_idx[0] is 3",
            GptqTensors {
                g_idx: Some(&past_the_end),
                ..good
            },
        ),
        (
            "g_idx[0] is -1",
            GptqTensors {
                g_idx: Some(&negative),
                ..good
            },
        ),
    ];
    for (what, layer) in cases {
        let message = layer.validate().map_err(|e| e.to_string());
        assert!(
            message.as_ref().is_err_and(|m| m.contains(what)),
            "{what}: {message:?}"
        );
    }
    assert!(matches!(
        good.dequantize(&mut [0.0]),
        Err(QuantError::LayerLength {
            argument: "output",
            ..
        })
    ));

    let good = awq_layer(&fixture, "awq");
    assert_eq!(good.validate(), Ok(()));
    let cases: [(&str, AwqTensors<'_>); 7] = [
        (
            "group_size",
            AwqTensors {
                group_size: 0,
                ..good
            },
        ),
        (
            "group_size",
            AwqTensors {
                group_size: 64,
                ..good
            },
        ),
        (
            "out_features",
            AwqTensors {
                out_features: 60,
                ..good
            },
        ),
        (
            "overflow",
            AwqTensors {
                in_features: 1 << 63,
                group_size: 1 << 63,
                ..good
            },
        ),
        (
            "qweight",
            AwqTensors {
                qweight: &good.qweight[4..],
                ..good
            },
        ),
        (
            "qzeros",
            AwqTensors {
                qzeros: &[],
                ..good
            },
        ),
        (
            "scales",
            AwqTensors {
                scales: &good.scales[1..],
                ..good
            },
        ),
    ];
    for (what, layer) in cases {
        let message = layer.validate().map_err(|e| e.to_string());
        assert!(
            message.as_ref().is_err_and(|m| m.contains(what)),
            "{what}: {message:?}"
        );
    }
}

/// A zero point of 0 wraps in version 1 and borrows from its neighbour; both must come back.
#[test]
fn version_one_zero_points_survive_the_borrow() {
    let qzeros = gptq::pack_zeros(4, ZeroPoints::MinusOne, &[0, 5, 0, 0, 8, 15, 1, 0], 8);
    assert_eq!(
        qzeros,
        Ok((0x01f8_0050_u32.wrapping_sub(0x1111_1111))
            .to_le_bytes()
            .to_vec())
    );
}

/// bits, groups of 32 codes along in and out, group size, codes, zeros.
fn any_layer() -> impl Strategy<Value = (u32, usize, usize, usize, Vec<u8>, Vec<u8>)> {
    (
        prop::sample::select(vec![2u32, 3, 4, 8]),
        1usize..4,
        1usize..3,
        1usize..100,
    )
        .prop_flat_map(|(bits, k, n, group_size)| {
            let (k, n) = (32 * k, 32 * n);
            let code = || 0..=((1u16 << bits) - 1) as u8;
            let codes = prop::collection::vec(code(), k * n);
            let zeros = prop::collection::vec(code(), k.div_ceil(group_size) * n);
            (Just(bits), Just(k), Just(n), Just(group_size), codes, zeros)
        })
}

proptest! {
    #[test]
    fn gptq_round_trips(
        (bits, k, n, group_size, codes, zeros) in any_layer(),
        v1 in any::<bool>(),
    ) {
        let zero_points = if v1 { ZeroPoints::MinusOne } else { ZeroPoints::AsIs };
        let qweight = gptq::pack_codes(bits, &codes, k, n);
        let qzeros = gptq::pack_zeros(bits, zero_points, &zeros, n);
        let (Ok(qweight), Ok(qzeros)) = (qweight, qzeros) else {
            return Err(TestCaseError::fail("not packed"));
        };
        let scales = vec![0x3c; 2 * zeros.len()]; // 0x3c3c is 1 + 60/1024
        let layer = GptqTensors {
            bits,
            group_size,
            zero_points,
            in_features: k,
            out_features: n,
            qweight: &qweight,
            qzeros: &qzeros,
            scales: &scales,
            g_idx: None,
        };
        let (mut codes_back, mut zeros_back) = (vec![0; codes.len()], vec![0; zeros.len()]);
        prop_assert_eq!(layer.codes(&mut codes_back), Ok(()));
        prop_assert_eq!(layer.zeros(&mut zeros_back), Ok(()));
        prop_assert_eq!(&codes_back, &codes);
        prop_assert_eq!(&zeros_back, &zeros);
        let weights = gptq_weights(&layer);
        for (at, &weight) in weights.iter().enumerate() {
            let (column, i) = (at / k, at % k);
            let zero = zeros[i / group_size * n + column];
            let expected = (1.0 + 60.0 / 1024.0) * (f32::from(codes[at]) - f32::from(zero));
            prop_assert_eq!(weight, expected);
        }
    }

    #[test]
    fn awq_round_trips(
        (k, n, codes) in (1usize..40, 1usize..5).prop_flat_map(|(k, n)| {
            (Just(k), Just(8 * n), prop::collection::vec(0u8..16, 8 * k * n))
        }),
    ) {
        let Ok(qweight) = awq::pack_codes(&codes, k, n) else {
            return Err(TestCaseError::fail("not packed"));
        };
        let layer = AwqTensors {
            group_size: k,
            in_features: k,
            out_features: n,
            qweight: &qweight,
            qzeros: &vec![0; n / 2],
            scales: &[0x00, 0x3c].repeat(n), // 1
        };
        let mut back = vec![0; codes.len()];
        prop_assert_eq!(layer.codes(&mut back), Ok(()));
        prop_assert_eq!(&back, &codes);
        let mut weights = vec![0.0; codes.len()];
        prop_assert_eq!(layer.dequantize(&mut weights), Ok(()));
        prop_assert!(weights.iter().zip(&codes).all(|(&w, &c)| w == f32::from(c)));
    }

    #[test]
    fn any_tensors_are_decoded_or_refused(
        bits in 0u32..10,
        sizes in (0usize..70, 0usize..70, 0usize..70),
        bytes in prop::collection::vec(any::<u8>(), 0..3000),
        cuts in (0usize..3000, 0usize..3000, 0usize..3000),
        indices in any::<bool>(),
    ) {
        let cut = |at: usize| &bytes[..at.min(bytes.len())];
        let (k, n, group_size) = sizes;
        let mut out = vec![0.0; k * n];
        let layer = GptqTensors {
            bits,
            group_size,
            zero_points: ZeroPoints::MinusOne,
            in_features: k,
            out_features: n,
            qweight: cut(cuts.0),
            qzeros: cut(cuts.1),
            scales: cut(cuts.2),
            g_idx: indices.then(|| cut(4 * k)),
        };
        prop_assert_eq!(layer.dequantize(&mut out), layer.validate());
        let layer = AwqTensors {
            group_size,
            in_features: k,
            out_features: n,
            qweight: cut(cuts.0),
            qzeros: cut(cuts.1),
            scales: cut(cuts.2),
        };
        prop_assert_eq!(layer.dequantize(&mut out), layer.validate());
    }
}
