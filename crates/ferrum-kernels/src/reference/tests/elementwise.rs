//! Activations against values computed to 17 digits elsewhere, sums and products by hand.

#![expect(
    clippy::excessive_precision,
    reason = "values are written as they were computed"
)]

use super::*;

#[test]
fn activations_have_their_known_values() {
    let ctx = &mut ctx();
    // x, gelu, gelu_tanh, silu: Python, math.erf and math.tanh.
    let table = [
        (-6.0, -5.919526e-9, -8.439649e-11, -0.014835739),
        (-3.0, -0.0040496940, -0.0036373920, -0.14227761),
        (-1.0, -0.15865525, -0.15880801, -0.26894142),
        (0.0, 0.0, 0.0, 0.0),
        (0.5, 0.34573123, 0.34571401, 0.31122967),
        (1.0, 0.84134475, 0.84119199, 0.73105858),
        (4.0, 3.9998733, 3.9999298, 3.9280552),
        (100.0, 100.0, 100.0, 100.0),
    ];
    let x = buf(&table.map(|row| row.0));
    type Op = fn(
        &mut RefContext<Uniform<f32>>,
        &RefBuffer<f32>,
        &mut RefBuffer<f32>,
        usize,
    ) -> ferrum_types::Result<()>;
    let ops: [(&str, Op, [f32; 8]); 3] = [
        ("gelu", R::gelu, table.map(|row| row.1)),
        ("gelu_tanh", R::gelu_tanh, table.map(|row| row.2)),
        ("silu", R::silu, table.map(|row| row.3)),
    ];
    for (name, op, expected) in ops {
        let mut out = poisoned(8);
        op(ctx, &x, &mut out, 8).unwrap();
        assert_close(name, &out, &expected);
        assert_short(name, op(ctx, &x, &mut out, 9));
    }
}

#[test]
fn exact_gelu_keeps_its_tail() {
    // 0.5 · erfc(6 / √2) · -6, which a difference 1 + erf would round to a few digits.
    let mut out = poisoned(1);
    R::gelu(&mut ctx(), &buf(&[-6.0]), &mut out, 1).unwrap();
    let expected = -5.9195258e-9;
    assert!((out.0[0] / expected - 1.0).abs() < 1e-6, "{}", out.0[0]);
}

#[test]
fn gated_halves_are_gate_then_up() {
    let ctx = &mut ctx();
    let gate_up = buf(&[1.0, -1.0, 10.0, 20.0, 0.5, 0.0, 2.0, 3.0]);
    let shape = RowShape { rows: 2, dim: 2 };
    let mut out = poisoned(4);
    R::fused_silu_mul_split(ctx, &gate_up, &mut out, shape).unwrap();
    assert_close("silu", &out, &[7.3105858, -5.3788284, 0.62245934, 0.0]);
    R::fused_gelu_mul_split(ctx, &gate_up, &mut out, GeluKind::Exact, shape).unwrap();
    assert_close("gelu", &out, &[8.4134475, -3.173105, 0.69146246, 0.0]);
    R::fused_gelu_mul_split(ctx, &gate_up, &mut out, GeluKind::Tanh, shape).unwrap();
    assert_close("gelu_tanh", &out, &[8.4119199, -3.1761602, 0.69142802, 0.0]);
    let more = RowShape { rows: 3, dim: 2 };
    assert_short(
        "rows",
        R::fused_silu_mul_split(ctx, &gate_up, &mut out, more),
    );
}

#[test]
fn sums_and_products() {
    let ctx = &mut ctx();
    let y = buf(&[10.0, 20.0, 30.0, 40.0]);
    let start = || buf(&[1.0, 2.0, 3.0, 4.0]);

    let mut x = start();
    R::add_inplace(ctx, &mut x, &y, 3).unwrap();
    assert_eq!(x, buf(&[11.0, 22.0, 33.0, 4.0]));
    let mut x = start();
    R::scaled_add_inplace(ctx, &mut x, &y, -0.5, 4).unwrap();
    assert_eq!(x, buf(&[-4.0, -8.0, -12.0, -16.0]));
    let mut x = start();
    R::scale_inplace(ctx, &mut x, 3.0, 2).unwrap();
    assert_eq!(x, buf(&[3.0, 6.0, 3.0, 4.0]));
    let mut out = poisoned(4);
    R::mul(ctx, &start(), &y, &mut out, 4).unwrap();
    assert_eq!(out, buf(&[10.0, 40.0, 90.0, 160.0]));
    let mut x = start();
    R::add_bias(ctx, &mut x, &y, RowShape { rows: 2, dim: 2 }).unwrap();
    assert_eq!(x, buf(&[11.0, 22.0, 13.0, 24.0]));
    assert_short("add", R::add_inplace(ctx, &mut x, &y, 5));
    assert_short("mul", R::mul(ctx, &x, &y, &mut poisoned(3), 4));
    assert_short(
        "bias",
        R::add_bias(ctx, &mut x, &buf(&[0.0]), RowShape { rows: 2, dim: 2 }),
    );
}

#[test]
fn softcap_saturates_at_the_cap() {
    let ctx = &mut ctx();
    let mut x = buf(&[0.0, 2.0, -1000.0, f32::INFINITY]);
    R::softcap(ctx, &mut x, 2.0, 4).unwrap();
    assert_close("softcap", &x, &[0.0, 1.5231884, -2.0, 2.0]);
    for cap in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        assert_invalid("cap", R::softcap(ctx, &mut x, cap, 4));
    }
}
