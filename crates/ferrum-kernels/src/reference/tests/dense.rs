//! Dense matrices, row look-ups, norms.

use super::*;
use crate::reference::RefWeight;

fn weight(rows: usize, cols: usize, values: &[f32]) -> RefWeight {
    let shape = MatShape { rows, cols };
    RefWeight {
        values: values.to_vec(),
        shape,
    }
}

#[test]
fn gemm_multiplies_by_the_transpose() {
    let ctx = &mut ctx();
    let w = weight(3, 2, &[1.0, 2.0, 3.0, 4.0, -1.0, 0.5]);
    let x = buf(&[1.0, 1.0, 2.0, -1.0, 99.0]);
    let mut out = poisoned(7);
    let shape = GemmShape {
        rows: 2,
        n: 3,
        k: 2,
    };
    R::gemm(ctx, &x, &w, &mut out, shape).unwrap();
    assert_eq!(out.0[..6], [3.0, 7.0, -0.5, 0.0, 2.0, -2.5]);
    assert!(out.0[6].is_nan(), "wrote past the end");

    let no_rows = GemmShape { rows: 0, ..shape };
    R::gemm(ctx, &buf(&[]), &w, &mut buf(&[]), no_rows).unwrap();
    assert_invalid(
        "transposed",
        R::gemm(
            ctx,
            &x,
            &w,
            &mut out,
            GemmShape {
                rows: 2,
                n: 2,
                k: 3,
            },
        ),
    );
    assert_short("x", R::gemm(ctx, &buf(&[0.0; 3]), &w, &mut out, shape));
    assert_short("out", R::gemm(ctx, &x, &w, &mut poisoned(5), shape));
}

#[test]
fn gemm_sums_in_more_than_f32() {
    // In f32 the ones vanish beside 2^24.
    let big = 2f32.powi(24);
    let w = weight(1, 4, &[1.0; 4]);
    let mut out = poisoned(1);
    let shape = GemmShape {
        rows: 1,
        n: 1,
        k: 4,
    };
    R::gemm(
        &mut ctx(),
        &buf(&[big, 1.0, 1.0, -big]),
        &w,
        &mut out,
        shape,
    )
    .unwrap();
    assert_eq!(out, buf(&[2.0]));
}

#[test]
fn rows_outside_the_source_are_zeros() {
    let ctx = &mut ctx();
    let data = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
    let ids = ints(&[2, -1, 0, 3]);
    let expected = [5.0, 6.0, 0.0, 0.0, 1.0, 2.0, 0.0, 0.0];
    let shape = RowShape { rows: 4, dim: 2 };
    let mut out = poisoned(8);
    R::embedding_lookup(ctx, &weight(3, 2, &data), &ids, &mut out, shape).unwrap();
    assert_eq!(out, buf(&expected));
    let mut out = poisoned(8);
    R::gather_rows(ctx, &buf(&data), &ids, &mut out, shape).unwrap();
    assert_eq!(out, buf(&expected));

    assert_short(
        "ids",
        R::gather_rows(ctx, &buf(&data), &ints(&[0]), &mut out, shape),
    );
    let wide = RowShape { rows: 1, dim: 3 };
    let table = weight(3, 2, &data);
    assert_invalid(
        "dim",
        R::embedding_lookup(ctx, &table, &ids, &mut out, wide),
    );
}

#[test]
fn argmax_takes_the_lowest_of_equals_and_never_a_nan() {
    let ctx = &mut ctx();
    let (nan, inf) = (f32::NAN, f32::INFINITY);
    for (row, expected) in [
        ([1.0, 3.0, 3.0], 1),
        ([nan, -inf, -5.0], 2),
        ([nan, -inf, nan], 1),
        ([nan, nan, nan], 0),
        ([-inf, -inf, -inf], 0),
        ([2.0, nan, 1.0], 0),
        ([0.0, inf, inf], 1),
    ] {
        let mut out = ints(&[-1]);
        R::argmax_rows(ctx, &buf(&row), &mut out, RowShape { rows: 1, dim: 3 }).unwrap();
        assert_eq!(out, ints(&[expected]), "{row:?}");
    }
    let empty = RowShape { rows: 1, dim: 0 };
    assert_invalid(
        "empty rows",
        R::argmax_rows(ctx, &buf(&[]), &mut ints(&[0]), empty),
    );
}

#[test]
fn rms_norm_divides_by_the_root_of_the_mean_square() {
    let ctx = &mut ctx();
    // Mean squares 12.5 and 4, plus eps 12 → roots 4.949747 and 4.
    let shape = NormShape {
        rows: 2,
        dim: 2,
        eps: 12.0,
    };
    let (x, w) = (buf(&[3.0, 4.0, 2.0, -2.0]), buf(&[1.0, 2.0]));
    let mut out = poisoned(4);
    R::rms_norm(ctx, &x, &w, &mut out, shape).unwrap();
    let root = 24.5f32.sqrt();
    let expected = [3.0 / root, 8.0 / root, 0.5, -1.0];
    assert_close("rms_norm", &out, &expected);

    let mut residual = buf(&[1.0, 1.0, 1.0, -3.0]);
    let mut fused = poisoned(4);
    let x = buf(&[2.0, 3.0, 1.0, 1.0]);
    R::fused_add_rms_norm(ctx, &mut residual, &x, &w, &mut fused, shape).unwrap();
    assert_eq!(residual, buf(&[3.0, 4.0, 2.0, -2.0]));
    assert_eq!(fused, out);

    let before = residual.clone();
    let short = &mut poisoned(3);
    assert_short(
        "out",
        R::fused_add_rms_norm(ctx, &mut residual, &x, &w, short, shape),
    );
    assert_eq!(residual, before, "an error changed the residual");
    assert_short(
        "weight",
        R::rms_norm(ctx, &x, &buf(&[1.0]), &mut out, shape),
    );
}

#[test]
fn layer_norm_centres_and_scales() {
    let ctx = &mut ctx();
    // Mean 3, variance 4.
    let x = buf(&[1.0, 5.0, 1.0, 5.0]);
    let w = buf(&[1.0, 1.0, 2.0, 2.0]);
    let shape = NormShape {
        rows: 1,
        dim: 4,
        eps: 0.0,
    };
    let mut out = poisoned(4);
    R::layer_norm(ctx, &x, &w, None, &mut out, shape).unwrap();
    assert_eq!(out, buf(&[-1.0, 1.0, -2.0, 2.0]));
    let bias = buf(&[0.5, 0.0, 0.0, -1.0]);
    R::layer_norm(ctx, &x, &w, Some(&bias), &mut out, shape).unwrap();
    assert_eq!(out, buf(&[-0.5, 1.0, -2.0, 1.0]));
    assert_short(
        "bias",
        R::layer_norm(ctx, &x, &w, Some(&buf(&[0.0])), &mut out, shape),
    );
}
