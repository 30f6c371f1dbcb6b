//! Values of another width than keys, latent rows, and recurrent states.

use super::*;

/// One sequence of `tokens` tokens, all of them new, in one block and in a state slot.
fn step(tokens: usize, slot: i32) -> DeviceBatch<R> {
    let all = vec![0; tokens];
    DeviceBatch {
        shape: BatchShape {
            tokens,
            seqs: 1,
            table_stride: 1,
            max_query_len: tokens,
            max_kv_len: tokens,
        },
        tokens: ints(&all),
        rope_rows: ints(&all),
        query_starts: ints(&[0, tokens as i32]),
        kv_lens: ints(&[tokens as i32]),
        state_slots: ints(&[slot]),
        block_tables: vec![ints(&[0])],
    }
}

const POOL: PagedKvShape = PagedKvShape {
    blocks: 1,
    block_size: 4,
    kv_heads: 1,
    head_dim: 1,
    value_dim: 3,
    values_in_keys: false,
};

const CONFIG: AttnConfig = AttnConfig {
    heads: 1,
    kv_heads: 1,
    head_dim: 1,
    value_dim: 3,
    scale: 1.0,
    causal: true,
    sliding_window: None,
    chunked: false,
    softcap: None,
};

/// A query of zeros weighs all keys alike: its result is the mean of the values.
#[test]
fn values_have_their_own_width() {
    let ctx = &mut ctx();
    let mut kv: KvLayer<R, KvF32> = R::new().alloc_kv_layer(POOL).unwrap();
    let (k, v) = (buf(&[5.0, -7.0]), buf(&[1.0, 2.0, 3.0, 3.0, 0.0, 7.0]));
    let batch = step(2, 0);
    R::kv_append(ctx, &mut kv, &k, &v, &batch).unwrap();
    let (q, mut out) = (buf(&[0.0, 0.0]), poisoned(6));
    R::kv_attention(ctx, &q, &kv, None, &batch, &mut out, &CONFIG).unwrap();
    assert_close("out", &out, &[1.0, 2.0, 3.0, 2.0, 1.0, 5.0]);

    let parts = POOL.block_bytes::<KvInt8>().unwrap();
    let places = [
        parts.keys,
        parts.values,
        parts.key_scales,
        parts.value_scales,
    ];
    assert_eq!(places, [0..4, 4..16, 16..32, 32..48]);
    assert_eq!(POOL.bytes::<KvFp16>(), Some(4 * 2 * 4));
    let narrow = AttnConfig {
        value_dim: 2,
        ..CONFIG
    };
    let done = R::kv_attention(ctx, &q, &kv, None, &batch, &mut out, &narrow);
    assert_invalid("values of two elements", done);
    assert_short(
        "values of two elements",
        R::kv_append(ctx, &mut kv, &k, &buf(&[0.0; 4]), &batch),
    );
}

/// The value of a latent row is its beginning, and is stored once.
#[test]
fn latent_rows_are_keys_and_values() {
    let ctx = &mut ctx();
    let pool = PagedKvShape::latent(1, 4, (2, 1));
    let mut kv: KvLayer<R, KvF32> = R::new().alloc_kv_layer(pool).unwrap();
    assert_eq!((kv.k.0.len(), kv.v.0.len()), (12, 0));
    let parts = pool.block_bytes::<KvInt8>().unwrap();
    let places = [
        parts.keys,
        parts.values,
        parts.key_scales,
        parts.value_scales,
    ];
    assert_eq!(places, [0..12, 12..12, 12..28, 28..28]);
    let batch = step(2, 0);
    let rows = buf(&[1.0, 2.0, 100.0, 5.0, -4.0, 100.0]);
    R::append_latent_paged(ctx, &mut kv, &rows, &batch).unwrap();
    // Two heads of each token, whose queries weigh all rows alike.
    let q = buf(&[0.0; 12]);
    let mut out = poisoned(8);
    R::paged_mla_attention(ctx, &q, &kv, &batch, &mut out, (2, 1.0)).unwrap();
    assert_close("out", &out, &[1.0, 2.0, 1.0, 2.0, 3.0, -1.0, 3.0, -1.0]);

    let mut other: KvLayer<R, KvF32> = R::new().alloc_kv_layer(POOL).unwrap();
    assert_invalid(
        "rows for a pool of heads",
        R::append_latent_paged(ctx, &mut other, &rows, &batch),
    );
    assert_invalid(
        "attention over a pool of heads",
        R::paged_mla_attention(ctx, &q, &other, &batch, &mut out, (2, 1.0)),
    );
    let wide = PagedKvShape {
        value_dim: 4,
        ..pool
    };
    let done: ferrum_types::Result<KvLayer<R, KvF32>> = R::new().alloc_kv_layer(wide);
    assert_invalid("values that are wider than keys", done);
}

const CONV: CausalConvShape = CausalConvShape {
    channels: 2,
    kernel: 3,
    states: StateShape {
        slots: 2,
        elements: 5,
    },
    offset: 1,
};

#[test]
fn a_convolution_begins_with_its_state_and_leaves_one() {
    let ctx = &mut ctx();
    // The taps of the first channel add up the last three inputs, the second one looks two back.
    let weight = buf(&[1.0, 1.0, 1.0, 10.0, 0.0, 0.0]);
    let bias = buf(&[0.0, 0.5]);
    let mut states = buf(&[9.0, 8.0, 7.0, 6.0, 5.0, -1.0, 1.0, 2.0, 3.0, 4.0]);
    let x = buf(&[10.0, 20.0]);
    let mut out = poisoned(2);
    let weights = (&weight, Some(&bias));
    R::causal_conv1d(ctx, &x, weights, &mut states, &step(1, 1), &mut out, CONV).unwrap();
    assert_close("out", &out, &[1.0 + 3.0 + 10.0, 20.5]);
    let left = [9.0, 8.0, 7.0, 6.0, 5.0, -1.0, 3.0, 4.0, 10.0, 20.0];
    assert_close("states", &states, &left);
    // More tokens than the state has inputs.
    let x = buf(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    let mut out = poisoned(6);
    let weights = (&weight, None);
    R::causal_conv1d(ctx, &x, weights, &mut states, &step(3, 1), &mut out, CONV).unwrap();
    assert_close("out", &out, &[14.0, 40.0, 14.0, 200.0, 9.0, 20.0]);
    let left = [9.0, 8.0, 7.0, 6.0, 5.0, -1.0, 3.0, 4.0, 5.0, 6.0];
    assert_close("states", &states, &left);
    for slot in [-1, 2] {
        let batch = step(3, slot);
        let done = R::causal_conv1d(ctx, &x, weights, &mut states, &batch, &mut out, CONV);
        assert_invalid("a slot that is not there", done);
    }
}

#[test]
fn states_are_copied_in_order() {
    let ctx = &mut ctx();
    let shape = StateShape {
        slots: 3,
        elements: 2,
    };
    let mut states = buf(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    R::copy_states(ctx, &mut states, &[(0, 1), (1, 2)], shape).unwrap();
    assert_close("states", &states, &[1.0, 2.0, 1.0, 2.0, 1.0, 2.0]);
    let done = R::copy_states(ctx, &mut states, &[(0, 1), (3, 0)], shape);
    assert_invalid("a slot that is not there", done);
}
