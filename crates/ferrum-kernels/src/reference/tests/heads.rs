//! Splitting, head norms, rotations, layouts and the contiguous cache.

use super::*;

/// Three rows of tables for `rot_dim = 4`: angle 0, a quarter turn with a half turn, and factors that
/// are no rotation at all (as scaled tables have).
fn tables() -> (RefBuffer<f32>, RefBuffer<f32>) {
    (
        buf(&[1.0, 1.0, 0.0, -1.0, 2.0, 3.0]),
        buf(&[0.0, 0.0, 1.0, 0.0, 0.5, 0.25]),
    )
}

#[test]
fn rotation_pairs_by_style_and_leaves_the_rest() {
    let ctx = &mut ctx();
    let (cos, sin) = tables();
    use RopeStyle::{HalfSplit, Interleaved};
    // (style, row, expected) for the head 1 2 3 4 5 with rot_dim 4.
    let cases = [
        (HalfSplit, 0, [1.0, 2.0, 3.0, 4.0, 5.0]),
        // Pairs (1,3) and (2,4): a quarter turn, a half turn.
        (HalfSplit, 1, [-3.0, -2.0, 1.0, -4.0, 5.0]),
        (HalfSplit, 2, [0.5, 5.0, 6.5, 12.5, 5.0]),
        // Pairs (1,2) and (3,4).
        (Interleaved, 1, [-2.0, 1.0, -3.0, -4.0, 5.0]),
        (Interleaved, 2, [1.0, 4.5, 8.0, 12.75, 5.0]),
    ];
    for (style, row, expected) in cases {
        let rows = ints(&[row]);
        let rope = Rope {
            cos: &cos,
            sin: &sin,
            rows: &rows,
            rot_dim: 4,
            style,
        };
        let mut x = buf(&[1.0, 2.0, 3.0, 4.0, 5.0]);
        let shape = HeadsShape {
            tokens: 1,
            heads: 1,
            head_dim: 5,
        };
        R::qk_norm_rope(ctx, &mut x, HeadLayout::TokenMajor, None, Some(rope), shape).unwrap();
        assert_close(&format!("{style:?} row {row}"), &x, &expected);
    }
}

#[test]
fn norm_comes_before_rotation() {
    let ctx = &mut ctx();
    let (cos, sin) = (buf(&[0.0]), buf(&[1.0]));
    let rows = ints(&[0]);
    let rope = Rope {
        cos: &cos,
        sin: &sin,
        rows: &rows,
        rot_dim: 2,
        style: RopeStyle::HalfSplit,
    };
    let weight = buf(&[2.0, 10.0, 1.0]);
    let norm = QkNorm {
        weight: &weight,
        eps: 3.0,
    };
    // Mean square 6, plus 3: divide by 3.
    let mut x = buf(&[3.0, 0.0, 3.0]);
    let shape = HeadsShape {
        tokens: 1,
        heads: 1,
        head_dim: 3,
    };
    R::qk_norm_rope(
        ctx,
        &mut x,
        HeadLayout::HeadMajor,
        Some(norm),
        Some(rope),
        shape,
    )
    .unwrap();
    // Normed: 2 0 1; the first two turned by a quarter.
    assert_close("norm, then rope", &x, &[0.0, 2.0, 1.0]);
}

#[test]
fn layouts_give_the_same_heads() {
    let ctx = &mut ctx();
    let shape = HeadsShape {
        tokens: 3,
        heads: 2,
        head_dim: 4,
    };
    let (cos, sin) = (noise_buf(1, 10), noise_buf(2, 10));
    let rows = ints(&[4, 0, 2]);
    let rope = Rope {
        cos: &cos,
        sin: &sin,
        rows: &rows,
        rot_dim: 4,
        style: RopeStyle::Interleaved,
    };
    let mut by_token = noise_buf(3, shape.len());
    let mut by_head = poisoned(shape.len());
    R::transpose_token_to_head(ctx, &by_token, &mut by_head, shape).unwrap();
    R::qk_norm_rope(
        ctx,
        &mut by_token,
        HeadLayout::TokenMajor,
        None,
        Some(rope),
        shape,
    )
    .unwrap();
    R::qk_norm_rope(
        ctx,
        &mut by_head,
        HeadLayout::HeadMajor,
        None,
        Some(rope),
        shape,
    )
    .unwrap();
    let mut back = poisoned(shape.len());
    R::transpose_head_to_token(ctx, &by_head, &mut back, shape).unwrap();
    assert_eq!(back, by_token);
}

#[test]
fn transposes_move_whole_heads() {
    let ctx = &mut ctx();
    // 2 tokens × 3 heads × 1.
    let shape = HeadsShape {
        tokens: 2,
        heads: 3,
        head_dim: 1,
    };
    let by_token = buf(&[0.0, 1.0, 2.0, 10.0, 11.0, 12.0]);
    let mut by_head = poisoned(6);
    R::transpose_token_to_head(ctx, &by_token, &mut by_head, shape).unwrap();
    assert_eq!(by_head, buf(&[0.0, 10.0, 1.0, 11.0, 2.0, 12.0]));
    assert_short(
        "dst",
        R::transpose_head_to_token(ctx, &by_head, &mut poisoned(5), shape),
    );
}

#[test]
fn wrong_rotations_are_refused() {
    let ctx = &mut ctx();
    let (cos, sin) = tables();
    let shape = HeadsShape {
        tokens: 1,
        heads: 1,
        head_dim: 4,
    };
    let mut try_rope = |rot_dim, row: &[i32]| {
        let rows = ints(row);
        let style = RopeStyle::HalfSplit;
        let rope = Rope {
            cos: &cos,
            sin: &sin,
            rows: &rows,
            rot_dim,
            style,
        };
        let mut x = buf(&[1.0; 4]);
        R::qk_norm_rope(ctx, &mut x, HeadLayout::TokenMajor, None, Some(rope), shape)
    };
    try_rope(4, &[2]).unwrap();
    try_rope(0, &[2]).unwrap();
    assert_invalid("odd", try_rope(3, &[0]));
    assert_invalid("more than the head", try_rope(6, &[0]));
    assert_invalid("row past the table", try_rope(4, &[3]));
    assert_invalid("negative row", try_rope(4, &[-1]));
    assert_short("rows", try_rope(4, &[]));
    let norm = QkNorm {
        weight: &buf(&[1.0; 3]),
        eps: 0.0,
    };
    let mut x = buf(&[1.0; 4]);
    let result = R::qk_norm_rope(ctx, &mut x, HeadLayout::TokenMajor, Some(norm), None, shape);
    assert_short("norm weight", result);
}

#[test]
fn split_cuts_rows_into_q_k_v() {
    let ctx = &mut ctx();
    // Two tokens; 2 heads, 1 kv head, 2 elements.
    let row = |t: f32| [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0].map(|x| x + t);
    let qkv = buf(&[row(0.0), row(10.0)].concat());
    let shape = QkvShape {
        tokens: 2,
        heads: 2,
        kv_heads: 1,
        head_dim: 2,
        value_dim: 2,
    };
    let (mut q, mut k, mut v) = (poisoned(8), poisoned(4), poisoned(4));
    R::split_qkv(ctx, &qkv, &mut q, &mut k, &mut v, shape).unwrap();
    assert_eq!(q, buf(&[1.0, 2.0, 3.0, 4.0, 11.0, 12.0, 13.0, 14.0]));
    assert_eq!(k, buf(&[5.0, 6.0, 15.0, 16.0]));
    assert_eq!(v, buf(&[7.0, 8.0, 17.0, 18.0]));
    assert_short(
        "q",
        R::split_qkv(ctx, &qkv, &mut poisoned(7), &mut k, &mut v, shape),
    );
    let wider = QkvShape {
        head_dim: 3,
        ..shape
    };
    assert_short(
        "qkv",
        R::split_qkv(ctx, &qkv, &mut q, &mut k, &mut v, wider),
    );
}

/// The fused forms equal the single ops one after the other.
#[test]
fn fused_split_is_split_norm_rope_transpose() {
    let ctx = &mut ctx();
    let shape = QkvShape {
        tokens: 3,
        heads: 4,
        kv_heads: 2,
        head_dim: 6,
        value_dim: 6,
    };
    let qkv = noise_buf(1, 3 * shape.row_dim());
    let (cos, sin) = (noise_buf(2, 8), noise_buf(3, 8));
    let rows = ints(&[1, 3, 0]);
    let (q_weight, k_weight) = (noise_buf(4, 6), noise_buf(5, 6));
    let transform = QkvTransform::<R> {
        q_norm: Some(QkNorm {
            weight: &q_weight,
            eps: 1e-6,
        }),
        k_norm: Some(QkNorm {
            weight: &k_weight,
            eps: 1e-5,
        }),
        rope: Some(Rope {
            cos: &cos,
            sin: &sin,
            rows: &rows,
            rot_dim: 4,
            style: RopeStyle::HalfSplit,
        }),
    };

    let (q_len, kv_len) = (shape.q().len(), shape.k().len());
    let (mut q, mut k, mut v) = (poisoned(q_len), poisoned(kv_len), poisoned(kv_len));
    R::split_qkv(ctx, &qkv, &mut q, &mut k, &mut v, shape).unwrap();
    let layout = HeadLayout::TokenMajor;
    R::qk_norm_rope(
        ctx,
        &mut q,
        layout,
        transform.q_norm,
        transform.rope,
        shape.q(),
    )
    .unwrap();
    R::qk_norm_rope(
        ctx,
        &mut k,
        layout,
        transform.k_norm,
        transform.rope,
        shape.k(),
    )
    .unwrap();
    let (mut qt, mut kt, mut vt) = (poisoned(q_len), poisoned(kv_len), poisoned(kv_len));
    R::transpose_token_to_head(ctx, &q, &mut qt, shape.q()).unwrap();
    R::transpose_token_to_head(ctx, &k, &mut kt, shape.k()).unwrap();
    R::transpose_token_to_head(ctx, &v, &mut vt, shape.k()).unwrap();

    let (mut fq, mut fk, mut fv) = (poisoned(q_len), poisoned(kv_len), poisoned(kv_len));
    R::split_qkv_norm_rope(ctx, &qkv, &mut fq, &mut fk, &mut fv, transform, shape).unwrap();
    assert_eq!((&fq, &fk, &fv), (&qt, &kt, &vt));

    let span = CacheSpan {
        capacity: 5,
        offset: 2,
    };
    let cache = || buf(&[-9.0; 2 * 5 * 6]);
    let (mut k_cache, mut v_cache) = (cache(), cache());
    R::kv_cache_append_head_major(ctx, &kt, &vt, (&mut k_cache, &mut v_cache), span, shape.k())
        .unwrap();
    let (mut fk_cache, mut fv_cache) = (cache(), cache());
    let caches = (&mut fk_cache, &mut fv_cache);
    R::split_qkv_norm_rope_into_cache(ctx, &qkv, &mut fq, caches, span, transform, shape).unwrap();
    assert_eq!((&fq, &fk_cache, &fv_cache), (&qt, &k_cache, &v_cache));
}

#[test]
fn appends_at_the_offset_of_each_head() {
    let ctx = &mut ctx();
    let shape = HeadsShape {
        tokens: 1,
        heads: 2,
        head_dim: 2,
    };
    let (k, v) = (buf(&[1.0, 2.0, 3.0, 4.0]), buf(&[5.0, 6.0, 7.0, 8.0]));
    let (mut k_cache, mut v_cache) = (buf(&[0.0; 12]), buf(&[0.0; 12]));
    let mut append = |capacity, offset| {
        let caches = (&mut k_cache, &mut v_cache);
        R::kv_cache_append_head_major(ctx, &k, &v, caches, CacheSpan { capacity, offset }, shape)
    };
    append(3, 1).unwrap();
    assert_invalid("full", append(3, 3));
    assert_invalid("overflow", append(3, usize::MAX));
    assert_short("cache", append(4, 0));
    assert_eq!(
        k_cache,
        buf(&[0.0, 0.0, 1.0, 2.0, 0.0, 0.0, 0.0, 0.0, 3.0, 4.0, 0.0, 0.0])
    );
    assert_eq!(
        v_cache,
        buf(&[0.0, 0.0, 5.0, 6.0, 0.0, 0.0, 0.0, 0.0, 7.0, 8.0, 0.0, 0.0])
    );
}
