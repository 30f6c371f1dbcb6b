//! A product with a quantised weight equals the dense product with its decoded form.

use super::*;
use ferrum_quant::{awq, gptq};
use ferrum_types::{GgufQuantType, SrcDtype};

fn dense(values: &[f32], rows: usize, cols: usize) -> crate::reference::RefWeight {
    let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
    R::new()
        .from_weight_bytes(&bytes, SrcDtype::F32, MatShape { rows, cols })
        .unwrap()
}

#[test]
fn gguf_rows_decode_and_multiply() {
    let ctx = &mut ctx();
    let (n, k) = (3, 256);
    let x = noise_buf(1, 2 * k);
    let shape = GemmShape { rows: 2, n, k };
    for ty in GgufQuantType::all() {
        let bytes = blocks(ty, n * k, 7);
        let mut values = vec![0.0; n * k];
        ferrum_quant::dequantize(ty, &bytes, &mut values).unwrap();
        let weight = R::new()
            .load_quant(&bytes, ty, MatShape { rows: n, cols: k })
            .unwrap();
        let (mut found, mut expected) = (poisoned(2 * n), poisoned(2 * n));
        R::gemm_quant(ctx, &x, &weight, &mut found, shape).unwrap();
        R::gemm(ctx, &x, &dense(&values, n, k), &mut expected, shape).unwrap();
        assert_eq!(found, expected, "{ty}");

        let mut rows = poisoned(2 * k);
        let lookup = RowShape { rows: 2, dim: k };
        R::embedding_lookup_quant(ctx, &weight, &ints(&[2, 3]), &mut rows, lookup).unwrap();
        assert_eq!(rows.0, [&values[2 * k..], &vec![0.0; k]].concat(), "{ty}");
    }
}

#[test]
fn parts_of_different_types_make_one_projection() {
    let (q8, q4) = (GgufQuantType::Q8_0, GgufQuantType::Q4_0);
    let (a, b) = (blocks(q8, 2 * 32, 1), blocks(q4, 3 * 32, 2));
    let parts = [GgufRows::new(&a, q8, 2), GgufRows::new(&b, q4, 3)];
    let fused = R::new().load_quant_fused(&parts, 32).unwrap();
    let first = R::new()
        .load_quant(&a, q8, MatShape { rows: 2, cols: 32 })
        .unwrap();
    let second = R::new()
        .load_quant(&b, q4, MatShape { rows: 3, cols: 32 })
        .unwrap();
    assert_eq!(fused.values, [first.values, second.values].concat());
    assert_eq!(fused.shape, MatShape { rows: 5, cols: 32 });

    let shape = |rows, cols| MatShape { rows, cols };
    assert_short("a row more", R::new().load_quant(&a, q8, shape(3, 32)));
    assert_short(
        "a byte less",
        R::new().load_quant(&a[1..], q8, shape(2, 32)),
    );
    // 64 elements are whole blocks, but rows of 16 would share them.
    assert_invalid("partial block", R::new().load_quant(&a, q8, shape(4, 16)));
}

/// f16 scales of 0.5 and 0.25 by turns, and zero points.
fn group_params(groups: usize, n: usize) -> (Vec<u8>, Vec<u8>) {
    let scale = |i: usize| half::f16::from_f32(if i.is_multiple_of(2) { 0.5 } else { 0.25 });
    let scales = (0..groups * n)
        .flat_map(|i| scale(i).to_le_bytes())
        .collect();
    let zeros = (0..groups * n).map(|i| (i % 4) as u8).collect();
    (scales, zeros)
}

#[test]
fn gptq_layers_scale_codes_less_zero_points() {
    let (k, n, group_size, bits) = (32, 32, 16, 4);
    let codes: Vec<u8> = (0..n * k).map(|i| (i * 7 % 16) as u8).collect();
    let (scales, zeros) = group_params(2, n);
    let qweight = gptq::pack_codes(bits, &codes, k, n).unwrap();
    let qzeros = gptq::pack_zeros(bits, GptqZeroPoints::AsIs, &zeros, n).unwrap();
    // Odd features belong to the other group than even ones.
    let g_idx: Vec<u8> = (0..k as i32).flat_map(|i| (i % 2).to_le_bytes()).collect();
    let layer = GptqWeights {
        bits,
        group_size,
        zero_points: GptqZeroPoints::AsIs,
        in_features: k,
        out_features: n,
        qweight: &qweight,
        qzeros: &qzeros,
        scales: &scales,
        g_idx: Some(&g_idx),
    };
    for layer in [
        layer,
        GptqWeights {
            g_idx: None,
            ..layer
        },
    ] {
        let weight = R::new().load_gptq(&layer).unwrap();
        for (at, &value) in weight.values.iter().enumerate() {
            let (o, i) = (at / k, at % k);
            let group = if layer.g_idx.is_some() {
                i % 2
            } else {
                i / group_size
            };
            let param = group * n + o;
            let scale = if param.is_multiple_of(2) { 0.5 } else { 0.25 };
            let expected = scale * (f32::from(codes[at]) - f32::from(zeros[param]));
            assert_eq!(value, expected, "weight[{o}, {i}]");
        }

        let x = noise_buf(1, k);
        let shape = GemmShape { rows: 1, n, k };
        let (mut found, mut expected) = (poisoned(n), poisoned(n));
        R::gemm_gptq(&mut ctx(), &x, &weight, &mut found, shape).unwrap();
        R::gemm(
            &mut ctx(),
            &x,
            &dense(&weight.values, n, k),
            &mut expected,
            shape,
        )
        .unwrap();
        assert_eq!(found, expected);
    }
    assert_invalid(
        "bits",
        R::new().load_gptq(&GptqWeights { bits: 5, ..layer }),
    );
    assert_invalid(
        "sizes",
        R::new().load_gptq(&GptqWeights {
            qweight: &qweight[4..],
            ..layer
        }),
    );
    assert_invalid("no experts", R::new().load_gptq_experts(&[]));
    let stack = R::new().load_gptq_experts(&[
        layer,
        GptqWeights {
            g_idx: None,
            ..layer
        },
    ]);
    assert_eq!(stack.unwrap().shape(), ExpertShape { experts: 2, n, k });
}

#[test]
fn awq_layers_decode_as_their_format_says() {
    let (k, n, group_size) = (8, 8, 4);
    let codes: Vec<u8> = (0..n * k).map(|i| (i * 5 % 16) as u8).collect();
    let (scales, zeros) = group_params(2, n);
    // A word holds eight columns, in the order of its nibbles.
    let pack = |at: &dyn Fn(usize) -> u8| -> [u8; 4] {
        let nibbles = awq::NIBBLE_COLUMNS.iter().enumerate();
        let word = nibbles.fold(0u32, |word, (i, &column)| {
            word | (u32::from(at(column)) << (4 * i))
        });
        word.to_le_bytes()
    };
    let qweight: Vec<u8> = (0..k).flat_map(|i| pack(&|o| codes[o * k + i])).collect();
    let qzeros: Vec<u8> = (0..2).flat_map(|g| pack(&|o| zeros[g * n + o])).collect();
    let layer = AwqWeights {
        group_size,
        in_features: k,
        out_features: n,
        qweight: &qweight,
        qzeros: &qzeros,
        scales: &scales,
    };
    let weight = R::new().load_awq(&layer).unwrap();
    for (at, &value) in weight.values.iter().enumerate() {
        let (o, i) = (at / k, at % k);
        let param = i / group_size * n + o;
        let scale = if param.is_multiple_of(2) { 0.5 } else { 0.25 };
        let expected = scale * (f32::from(codes[at]) - f32::from(zeros[param]));
        assert_eq!(value, expected, "weight[{o}, {i}]");
    }
    assert_invalid(
        "group size",
        R::new().load_awq(&AwqWeights {
            group_size: 3,
            ..layer
        }),
    );
    let stack = R::new().load_awq_experts(&[layer, layer, layer]).unwrap();
    assert_eq!(stack.shape(), ExpertShape { experts: 3, n, k });
}
