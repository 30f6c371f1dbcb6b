//! Contiguous attention: with zero queries all visible keys weigh the same, so outputs are means.

use super::*;

const PLAIN: AttnConfig = AttnConfig {
    heads: 1,
    kv_heads: 1,
    head_dim: 1,
    value_dim: 1,
    scale: 1.0,
    causal: true,
    sliding_window: None,
    chunked: false,
    softcap: None,
};

fn flash(
    q: &[f32],
    kv: (&[f32], &[f32]),
    sinks: Option<&[f32]>,
    shape: FlashShape,
    config: &AttnConfig,
) -> ferrum_types::Result<RefBuffer<f32>> {
    let mut out = poisoned(q.len());
    let sinks = sinks.map(buf);
    let (k, v) = (buf(kv.0), buf(kv.1));
    R::flash_attention(
        &mut ctx(),
        &buf(q),
        (&k, &v),
        sinks.as_ref(),
        &mut out,
        shape,
        config,
    )?;
    Ok(out)
}

/// `q_len` queries over `kv_len` keys, of which the first query is at `pos_offset`.
fn sizes(q_len: usize, kv_len: usize, pos_offset: usize) -> FlashShape {
    FlashShape {
        q_len,
        kv_len,
        kv_seq_stride: kv_len,
        pos_offset,
    }
}

#[test]
fn visible_keys() {
    let v = [1.0, 2.0, 4.0, 8.0, 16.0];
    struct Case {
        what: &'static str,
        causal: bool,
        window: Option<usize>,
        shape: FlashShape,
        expected: &'static [f32],
    }
    let case = |what, causal, window, shape, expected| Case {
        what,
        causal,
        window,
        shape,
        expected,
    };
    for case in [
        case(
            "causal from the start",
            true,
            None,
            sizes(3, 5, 0),
            &[1.0, 1.5, 7.0 / 3.0],
        ),
        case(
            "causal chunk",
            true,
            None,
            sizes(2, 5, 3),
            &[15.0 / 4.0, 31.0 / 5.0],
        ),
        case("not causal", false, None, sizes(2, 5, 0), &[6.2, 6.2]),
        case(
            "fewer keys than positions",
            true,
            None,
            sizes(2, 2, 3),
            &[1.5, 1.5],
        ),
        case(
            "window of one",
            true,
            Some(1),
            sizes(3, 5, 2),
            &[4.0, 8.0, 16.0],
        ),
        case(
            "window of two at the start",
            true,
            Some(2),
            sizes(3, 5, 0),
            &[1.0, 1.5, 3.0],
        ),
        case(
            "window as long as the context",
            true,
            Some(5),
            sizes(1, 5, 4),
            &[6.2],
        ),
        case(
            "window longer than the context",
            true,
            Some(usize::MAX),
            sizes(1, 5, 4),
            &[6.2],
        ),
        case(
            "window, not causal",
            false,
            Some(2),
            sizes(2, 5, 2),
            &[14.0 / 3.0, 28.0 / 3.0],
        ),
        case(
            "window past the keys",
            true,
            Some(2),
            sizes(1, 5, 6),
            &[0.0],
        ),
        case("no key", true, None, sizes(2, 0, 0), &[0.0, 0.0]),
        case("no query", true, None, sizes(0, 5, 5), &[]),
    ] {
        let config = AttnConfig {
            causal: case.causal,
            sliding_window: case.window,
            ..PLAIN
        };
        let q = vec![0.0; case.shape.q_len];
        let out = flash(&q, (&[0.5; 5], &v), None, case.shape, &config).unwrap();
        assert_close(case.what, &out, case.expected);
    }
}

#[test]
fn scores_scale_then_cap() {
    // Scores 0 and ln 3 weigh 1:3, so that values 0 and 4 give 3.
    let ln3 = 3f32.ln();
    let shape = sizes(1, 2, 1);
    let kv = (&[0.0, 1.0][..], &[0.0, 4.0][..]);
    let out = flash(&[ln3], kv, None, shape, &PLAIN).unwrap();
    assert_close("plain", &out, &[3.0]);
    let half = AttnConfig {
        scale: 0.5,
        ..PLAIN
    };
    let out = flash(&[2.0 * ln3], kv, None, shape, &half).unwrap();
    assert_close("scaled", &out, &[3.0]);
    // A huge score caps at ln 3.
    let capped = AttnConfig {
        softcap: Some(ln3),
        ..PLAIN
    };
    let out = flash(&[1e6], kv, None, shape, &capped).unwrap();
    assert_close("capped", &out, &[3.0]);
    // Scale comes first: 0.5 · 2 atanh(1/2) caps to half of 2 ln 3, which is ln 3.
    let both = AttnConfig {
        scale: 0.5,
        softcap: Some(2.0 * ln3),
        ..PLAIN
    };
    let score = 2.0 * 2.0 * ln3 * 0.5f32.atanh();
    let out = flash(&[score], kv, None, shape, &both).unwrap();
    assert_close("scaled, then capped", &out, &[3.0]);
    // Large scores do not overflow.
    let out = flash(&[1e30], kv, None, shape, &PLAIN).unwrap();
    assert_close("large", &out, &[4.0]);
}

#[test]
fn a_sink_takes_weight_and_adds_no_value() {
    let config = AttnConfig { heads: 2, ..PLAIN };
    // Two keys of score 0; sinks of weight 2 and of weight 0.
    let sinks = [2f32.ln(), f32::NEG_INFINITY];
    let shape = sizes(1, 2, 1);
    let out = flash(
        &[0.0, 0.0],
        (&[1.0, 1.0], &[4.0, 8.0]),
        Some(&sinks),
        shape,
        &config,
    )
    .unwrap();
    assert_close("sinks", &out, &[3.0, 6.0]);
    // A sink far above all scores leaves nothing; without keys there is nothing either.
    let out = flash(
        &[0.0, 0.0],
        (&[1.0, 1.0], &[4.0, 8.0]),
        Some(&[900.0; 2]),
        shape,
        &config,
    );
    assert_close("large", &out.unwrap(), &[0.0, 0.0]);
    let out = flash(
        &[0.0, 0.0],
        (&[], &[]),
        Some(&sinks),
        sizes(1, 0, 0),
        &config,
    )
    .unwrap();
    assert_close("no key", &out, &[0.0, 0.0]);
    assert_short(
        "sinks",
        flash(
            &[0.0, 0.0],
            (&[1.0, 1.0], &[4.0, 8.0]),
            Some(&[0.0]),
            shape,
            &config,
        ),
    );
}

#[test]
fn consecutive_heads_share_a_kv_head() {
    let config = AttnConfig {
        heads: 6,
        kv_heads: 2,
        head_dim: 2,
        value_dim: 2,
        ..PLAIN
    };
    // kv head h has the one value (h, 10 h); its second slot is not valid yet.
    let v = [1.0, 10.0, -7.0, -7.0, 2.0, 20.0, -7.0, -7.0];
    let shape = FlashShape {
        q_len: 1,
        kv_len: 1,
        kv_seq_stride: 2,
        pos_offset: 0,
    };
    let out = flash(&[0.3; 12], (&[0.1; 8], &v), None, shape, &config).unwrap();
    assert_close(
        "gqa",
        &out,
        &[[1.0, 10.0].repeat(3), [2.0, 20.0].repeat(3)].concat(),
    );
}

#[test]
fn wrong_arguments_are_refused() {
    let try_config = |config: &AttnConfig| {
        flash(
            &[0.0; 6],
            (&[0.0; 6], &[0.0; 6]),
            None,
            sizes(1, 1, 0),
            config,
        )
    };
    try_config(&PLAIN).unwrap();
    assert_invalid(
        "heads",
        try_config(&AttnConfig {
            heads: 3,
            kv_heads: 2,
            ..PLAIN
        }),
    );
    assert_invalid(
        "no kv heads",
        try_config(&AttnConfig {
            kv_heads: 0,
            ..PLAIN
        }),
    );
    assert_invalid(
        "cap",
        try_config(&AttnConfig {
            softcap: Some(0.0),
            ..PLAIN
        }),
    );
    assert_short(
        "k",
        try_config(&AttnConfig {
            head_dim: 7,
            ..PLAIN
        }),
    );
    let stride = FlashShape {
        kv_seq_stride: 1,
        ..sizes(1, 2, 1)
    };
    assert_invalid(
        "stride",
        flash(&[0.0], (&[0.0; 2], &[0.0; 2]), None, stride, &PLAIN),
    );
}

/// With one head, MLA is attention whose values are the first elements of the keys.
#[test]
fn mla_is_attention_over_shared_rows() {
    let (rank, rope_dim, heads, q_len, kv_len) = (3, 2, 2, 2, 4);
    let dim = rank + rope_dim;
    let q = noise(1, q_len * heads * dim);
    let latent = noise(2, kv_len * dim);
    let shape = MlaShape {
        q_len,
        kv_len,
        heads,
        rank,
        rope_dim,
        pos_offset: 2,
        scale: 0.7,
        causal: true,
    };
    let mut out = poisoned(q_len * heads * rank);
    R::mla_attention(&mut ctx(), &buf(&q), &buf(&latent), &mut out, shape).unwrap();

    let config = AttnConfig {
        heads,
        head_dim: dim,
        value_dim: dim,
        scale: 0.7,
        ..PLAIN
    };
    let heads_shape = HeadsShape {
        tokens: q_len,
        heads,
        head_dim: dim,
    };
    let mut by_head = poisoned(q.len());
    R::transpose_token_to_head(&mut ctx(), &buf(&q), &mut by_head, heads_shape).unwrap();
    let full = flash(
        &by_head.0,
        (&latent, &latent),
        None,
        sizes(q_len, kv_len, 2),
        &config,
    )
    .unwrap();
    let mut by_token = poisoned(q.len());
    R::transpose_head_to_token(&mut ctx(), &full, &mut by_token, heads_shape).unwrap();
    let expected: Vec<f32> = by_token
        .0
        .chunks_exact(dim)
        .flat_map(|head| head[..rank].to_vec())
        .collect();
    assert_eq!(out.0, expected);

    let longer = MlaShape { kv_len: 5, ..shape };
    let result = R::mla_attention(&mut ctx(), &buf(&q), &buf(&latent), &mut out, longer);
    assert_short("latent", result);
}

/// A row's result does not change with the rows beside it or with how the prompt is cut.
#[test]
fn chunks_give_the_same_bits_as_the_whole() {
    let config = AttnConfig {
        heads: 2,
        head_dim: 4,
        value_dim: 4,
        scale: 0.5,
        sliding_window: Some(3),
        ..PLAIN
    };
    let (tokens, dim) = (5, 4);
    let q = noise(1, 2 * tokens * dim);
    let (k, v) = (noise(2, tokens * dim), noise(3, tokens * dim));
    let whole = flash(&q, (&k, &v), None, sizes(tokens, tokens, 0), &config).unwrap();
    for t in 0..tokens {
        let row = |x: &[f32], head: usize| x[(head * tokens + t) * dim..][..dim].to_vec();
        let one = [row(&q, 0), row(&q, 1)].concat();
        // Keys after the token are there already and must not matter.
        let out = flash(&one, (&k, &v), None, sizes(1, tokens, t), &config).unwrap();
        assert_eq!(
            out.0,
            [row(&whole.0, 0), row(&whole.0, 1)].concat(),
            "token {t}"
        );
    }
}
