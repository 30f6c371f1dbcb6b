//! Norms, element-wise ops, heads, look-ups.

use super::*;

/// A named op on a seed, written once for all backends.
macro_rules! op {
    ($name:ident($($field:ident: $ty:ty),*), |$device:ident, $ctx:ident, $random:ident| $body:expr) => {
        struct $name { $($field: $ty),* }
        impl Op for $name {
            fn run<B: AnyBackend>(&self, $device: &B) -> Vec<f32> {
                let Self { $($field),* } = self;
                let mut $ctx = $device.new_context().unwrap();
                let mut $random = Random::new(17);
                $body
            }
        }
    };
}

const SHAPES: [(usize, usize); 8] = [
    (0, 7),
    (1, 1),
    (1, 15),
    (3, 16),
    (2, 63),
    (5, 129),
    (70, 300),
    (2, 9000),
];

op!(Norms(rows: usize, dim: usize, scale: f32), |device, ctx, random| {
    let (rows, dim) = (*rows, *dim);
    let mut data = random.vec(rows * dim);
    data.iter_mut().for_each(|x| *x = *x * scale + scale / 3.0);
    let x = act(device, &data);
    let mut residual: Residual<B> = of_role(device, &random.vec(rows * dim));
    let weight = device.from_slice(&random.vec(dim)).unwrap();
    let bias = device.from_slice(&random.vec(dim)).unwrap();
    let shape = NormShape { rows, dim, eps: 1e-6 };
    let mut result = Vec::new();
    let mut out = poison(device, rows * dim);
    B::rms_norm(&mut ctx, &x, &weight, &mut out, shape).unwrap();
    result.extend(host::<B, _>(&mut ctx, &out));
    B::layer_norm(&mut ctx, &x, &weight, None, &mut out, shape).unwrap();
    result.extend(host::<B, _>(&mut ctx, &out));
    B::layer_norm(&mut ctx, &x, &weight, Some(&bias), &mut out, shape).unwrap();
    result.extend(host::<B, _>(&mut ctx, &out));
    if *scale < 1e10 {
        B::fused_add_rms_norm(&mut ctx, &mut residual, &x, &weight, &mut out, shape).unwrap();
        result.extend(host::<B, _>(&mut ctx, &out));
        result.extend(host::<B, _>(&mut ctx, &residual));
    }
    result
});

#[test]
fn norms() {
    for (rows, dim) in SHAPES {
        for scale in [1.0, 1e-3, 100.0, 1e25] {
            // One element of a layer norm is its own mean: the reference leaves a rounding error.
            if dim > 1 {
                check(
                    &format!("{rows} × {dim} × {scale}"),
                    &Norms { rows, dim, scale },
                    1e-10,
                );
            }
        }
    }
}

op!(Elementwise(rows: usize, dim: usize, scale: f32), |device, ctx, random| {
    let (rows, dim) = (*rows, *dim);
    let len = rows * dim;
    let mut data = random.vec(2 * len);
    data.iter_mut().for_each(|x| *x *= scale);
    let x = act(device, &data);
    let y = act(device, &random.vec(len));
    let mut result = Vec::new();
    let mut out = poison(device, len);
    let shape = RowShape { rows, dim };
    let mut keep = |ctx: &mut B::Context, out: &Act<B>| result.extend(host::<B, _>(ctx, out));
    B::gelu(&mut ctx, &x, &mut out, len).unwrap();
    keep(&mut ctx, &out);
    B::gelu_tanh(&mut ctx, &x, &mut out, len).unwrap();
    keep(&mut ctx, &out);
    B::silu(&mut ctx, &x, &mut out, len).unwrap();
    keep(&mut ctx, &out);
    B::fused_silu_mul_split(&mut ctx, &x, &mut out, shape).unwrap();
    keep(&mut ctx, &out);
    for kind in [GeluKind::Exact, GeluKind::Tanh] {
        B::fused_gelu_mul_split(&mut ctx, &x, &mut out, kind, shape).unwrap();
        keep(&mut ctx, &out);
    }
    B::mul(&mut ctx, &x, &y, &mut out, len).unwrap();
    keep(&mut ctx, &out);
    B::softcap(&mut ctx, &mut out, 3.0, len).unwrap();
    keep(&mut ctx, &out);
    B::scale_inplace(&mut ctx, &mut out, 1.7, len).unwrap();
    keep(&mut ctx, &out);
    B::add_inplace(&mut ctx, &mut out, &y, len).unwrap();
    keep(&mut ctx, &out);
    B::scaled_add_inplace(&mut ctx, &mut out, &y, -0.3, len).unwrap();
    keep(&mut ctx, &out);
    let bias = device.from_slice(&random.vec(dim)).unwrap();
    B::add_bias(&mut ctx, &mut out, &bias, shape).unwrap();
    keep(&mut ctx, &out);
    result
});

#[test]
fn elementwise_ops() {
    for (rows, dim) in SHAPES {
        for scale in [1.0, 0.01, 6.0, 300.0] {
            check(
                &format!("{rows} × {dim} × {scale}"),
                &Elementwise { rows, dim, scale },
                1e-11,
            );
        }
    }
}

op!(Unary(x: Vec<f32>), |device, ctx, random| {
    let _ = &mut random;
    let x = act(device, x);
    let len = x.len();
    let mut out = poison(device, len);
    let mut result = Vec::new();
    B::gelu(&mut ctx, &x, &mut out, len).unwrap();
    result.extend(host::<B, _>(&mut ctx, &out));
    B::gelu_tanh(&mut ctx, &x, &mut out, len).unwrap();
    result.extend(host::<B, _>(&mut ctx, &out));
    B::silu(&mut ctx, &x, &mut out, len).unwrap();
    result.extend(host::<B, _>(&mut ctx, &out));
    let mut x = x;
    B::softcap(&mut ctx, &mut x, 2.0, len).unwrap();
    result.extend(host::<B, _>(&mut ctx, &x));
    result
});

#[test]
fn functions_are_accurate_element_by_element() {
    let x: Vec<f32> = (-4000..4000).map(|i| i as f32 / 400.0).collect();
    let op = Unary { x };
    let expected = op.run(&ReferenceBackend::new());
    let found = check("functions", &op, 1e-12);
    for (i, (a, b)) in found.iter().zip(&expected).enumerate() {
        let close = (a - b).abs() <= 2e-6 * b.abs() + 1e-12;
        assert!(
            close,
            "function {} of {}: {a} instead of {b}",
            i / 8000,
            op.x[i % 8000]
        );
    }
}

#[test]
fn extreme_inputs_of_functions() {
    let x = vec![
        f32::NAN,
        1e30,
        -1e30,
        88.0,
        -88.0,
        89.5,
        -104.0,
        1e-30,
        -1e-40,
        0.0,
        -0.0,
        20.0,
        -20.0,
        1e19,
        3e38,
        -3e38,
    ];
    let op = Unary { x };
    let expected = op.run(&ReferenceBackend::new());
    for device in devices() {
        let found = op.run(&device);
        for (i, (a, b)) in found.iter().zip(&expected).enumerate() {
            let close = (a - b).abs() <= 1e-5 * b.abs() + 1e-30;
            let same = (a.is_nan() && b.is_nan()) || a == b || close;
            let (f, x) = (i / 16, op.x[i % 16]);
            assert!(same, "{device:?}: function {f} of {x}: {a} instead of {b}");
        }
    }
}

#[test]
fn argmax_takes_the_first_and_never_nan() {
    let nan = f32::NAN;
    let inf = f32::INFINITY;
    let cases: [(Vec<f32>, i32); 8] = [
        (vec![3.0], 0),
        (vec![1.0, 2.0, 2.0], 1),
        (vec![nan, nan], 0),
        (vec![nan, -inf, nan], 1),
        (vec![nan, 1.0, inf, inf], 2),
        (vec![-0.0, 0.0], 0),
        ((0..1000).map(|i| (i * 7919 % 1000) as f32).collect(), 321),
        (
            (0..200).map(|i| if i < 150 { nan } else { -5.0 }).collect(),
            150,
        ),
    ];
    for device in devices() {
        let mut ctx = device.new_context().unwrap();
        for (row, expected) in &cases {
            let x = act(&device, row);
            let mut out = device.from_slice(&[-1i32]).unwrap();
            let shape = RowShape {
                rows: 1,
                dim: row.len(),
            };
            CpuBackend::argmax_rows(&mut ctx, &x, &mut out, shape).unwrap();
            let found = CpuBackend::to_vec(&mut ctx, &out).unwrap();
            let largest = row[*expected as usize];
            assert_eq!(
                found,
                [*expected],
                "{device:?}: {largest} in {} elements",
                row.len()
            );
        }
    }
}

op!(Gather(rows: usize, dim: usize), |device, ctx, random| {
    let (rows, dim) = (*rows, *dim);
    let src = act(device, &random.vec(11 * dim));
    let ids: Vec<i32> = (0..rows).map(|_| random.below(15) as i32 - 2).collect();
    let ids = device.from_slice(&ids).unwrap();
    let mut out = poison(device, rows * dim);
    B::gather_rows(&mut ctx, &src, &ids, &mut out, RowShape { rows, dim }).unwrap();
    host::<B, _>(&mut ctx, &out)
});

#[test]
fn gathered_rows_are_exact() {
    for (rows, dim) in SHAPES {
        check(&format!("{rows} × {dim}"), &Gather { rows, dim }, 0.0);
    }
}

op!(Heads(shape: QkvShape, rot_dim: usize, style: RopeStyle, norm: bool), |device, ctx, random| {
    let (shape, rot_dim, style) = (*shape, *rot_dim, *style);
    let QkvShape { tokens, kv_heads, head_dim, .. } = shape;
    let qkv = act(device, &random.vec(tokens * shape.row_dim()));
    let table = 40;
    let cos = device.from_slice(&random.vec(table * rot_dim / 2)).unwrap();
    let sin = device.from_slice(&random.vec(table * rot_dim / 2)).unwrap();
    let rows: Vec<i32> = (0..tokens).map(|_| random.below(table) as i32).collect();
    let rows = device.from_slice(&rows).unwrap();
    let q_weight = device.from_slice(&random.vec(head_dim)).unwrap();
    let k_weight = device.from_slice(&random.vec(head_dim)).unwrap();
    let rope = Rope { cos: &cos, sin: &sin, rows: &rows, rot_dim, style };
    let transform = QkvTransform {
        q_norm: norm.then_some(QkNorm { weight: &q_weight, eps: 1e-5 }),
        k_norm: norm.then_some(QkNorm { weight: &k_weight, eps: 1e-5 }),
        rope: (rot_dim > 0).then_some(rope),
    };
    let (q_len, kv_len) = (tokens * shape.q_dim(), tokens * shape.k_dim());
    let mut q = poison(device, q_len);
    let mut k = poison(device, kv_len);
    let mut v = poison(device, kv_len);
    let mut result = Vec::new();
    B::split_qkv(&mut ctx, &qkv, &mut q, &mut k, &mut v, shape).unwrap();
    for x in [&q, &k, &v] {
        result.extend(host::<B, _>(&mut ctx, x));
    }
    let layout = HeadLayout::TokenMajor;
    let norm = transform.q_norm;
    B::qk_norm_rope(&mut ctx, &mut q, layout, norm, transform.rope, shape.q()).unwrap();
    result.extend(host::<B, _>(&mut ctx, &q));
    B::split_qkv_norm_rope(&mut ctx, &qkv, &mut q, &mut k, &mut v, transform, shape).unwrap();
    for x in [&q, &k, &v] {
        result.extend(host::<B, _>(&mut ctx, x));
    }
    let mut flat = poison(device, q_len);
    B::transpose_head_to_token(&mut ctx, &q, &mut flat, shape.q()).unwrap();
    result.extend(host::<B, _>(&mut ctx, &flat));
    B::transpose_token_to_head(&mut ctx, &flat, &mut q, shape.q()).unwrap();
    let layout = HeadLayout::HeadMajor;
    B::qk_norm_rope(&mut ctx, &mut q, layout, None, transform.rope, shape.q()).unwrap();
    result.extend(host::<B, _>(&mut ctx, &q));
    let span = CacheSpan { capacity: 2 * tokens + 3, offset: 2 };
    let cache_len = kv_heads * span.capacity * head_dim;
    let mut k_cache = act(device, &random.vec(cache_len));
    let mut v_cache = act(device, &random.vec(cache_len));
    let caches = (&mut k_cache, &mut v_cache);
    B::split_qkv_norm_rope_into_cache(&mut ctx, &qkv, &mut q, caches, span, transform, shape).unwrap();
    let span = CacheSpan { offset: tokens + 3, ..span };
    let caches = (&mut k_cache, &mut v_cache);
    B::kv_cache_append_head_major(&mut ctx, &k, &v, caches, span, shape.k()).unwrap();
    for x in [&q, &k_cache, &v_cache] {
        result.extend(host::<B, _>(&mut ctx, x));
    }
    result
});

#[test]
fn heads_of_every_kind() {
    let shapes = [
        (1, 1, 1, 2),
        (3, 4, 2, 10),
        (5, 6, 3, 64),
        (33, 8, 2, 80),
        (1, 3, 3, 17),
    ];
    for (tokens, heads, kv_heads, head_dim) in shapes {
        let shape = QkvShape {
            tokens,
            heads,
            kv_heads,
            head_dim,
            value_dim: head_dim,
        };
        let even = head_dim / 2 * 2;
        for (rot_dim, style, norm) in [
            (0, RopeStyle::HalfSplit, true),
            (even, RopeStyle::HalfSplit, true),
            (even, RopeStyle::Interleaved, false),
            (even / 4 * 2, RopeStyle::HalfSplit, false),
            (even / 4 * 2, RopeStyle::Interleaved, true),
        ] {
            let op = Heads {
                shape,
                rot_dim,
                style,
                norm,
            };
            check(&format!("{shape:?} {rot_dim} {style:?} {norm}"), &op, 1e-11);
        }
    }
}

#[test]
fn wrong_indices_are_errors_and_change_nothing() {
    let device = CpuBackend::open(0).unwrap();
    let mut ctx = device.new_context().unwrap();
    let shape = HeadsShape {
        tokens: 2,
        heads: 1,
        head_dim: 4,
    };
    let cos = device.from_slice(&[0.5f32; 6]).unwrap();
    let mut x = act(&device, &[1.0; 8]);
    for (rows, rot_dim, good) in [
        ([0, 2], 4, true),
        ([0, 3], 4, false),
        ([-1, 0], 4, false),
        ([0, 0], 3, false),
        ([0, 0], 6, false),
    ] {
        let rows = device.from_slice(&rows).unwrap();
        let rope = Rope {
            cos: &cos,
            sin: &cos,
            rows: &rows,
            rot_dim,
            style: RopeStyle::HalfSplit,
        };
        let before = x.as_slice().to_vec();
        let layout = HeadLayout::TokenMajor;
        let done = CpuBackend::qk_norm_rope(&mut ctx, &mut x, layout, None, Some(rope), shape);
        assert_eq!(done.is_ok(), good, "{done:?}");
        assert_eq!(x.as_slice() == before, !good);
    }
}
