//! The paged cache equals the contiguous one, whatever the blocks; element types round as they say.

use super::*;
use crate::reference::KvCodec;
use ferrum_types::BlockId;

/// One sequence of a step: queries, keys after the step, blocks.
struct Seq {
    queries: usize,
    kv_len: usize,
    blocks: Vec<i32>,
}

fn batch(seqs: &[Seq]) -> DeviceBatch<R> {
    let tokens = seqs.iter().map(|seq| seq.queries).sum();
    let stride = seqs.iter().map(|seq| seq.blocks.len()).max().unwrap_or(0);
    let mut starts = vec![0];
    let mut tables = Vec::new();
    for (s, seq) in seqs.iter().enumerate() {
        starts.push(starts[s] + seq.queries as i32);
        tables.extend(&seq.blocks);
        // Entries that are not in use may hold anything.
        tables.resize((s + 1) * stride, -1);
    }
    DeviceBatch {
        shape: BatchShape {
            tokens,
            seqs: seqs.len(),
            table_stride: stride,
            max_query_len: seqs.iter().map(|seq| seq.queries).max().unwrap_or(0),
            max_kv_len: seqs.iter().map(|seq| seq.kv_len).max().unwrap_or(0),
        },
        tokens: ints(&vec![0; tokens]),
        rope_rows: ints(&vec![0; tokens]),
        query_starts: ints(&starts),
        state_slots: ints(&vec![0; seqs.len()]),
        kv_lens: ints(&seqs.iter().map(|seq| seq.kv_len as i32).collect::<Vec<_>>()),
        block_tables: vec![ints(&tables)],
    }
}

const CONFIG: AttnConfig = AttnConfig {
    heads: 4,
    kv_heads: 2,
    head_dim: 3,
    value_dim: 3,
    scale: 0.6,
    causal: true,
    sliding_window: None,
    chunked: false,
    softcap: Some(5.0),
};
const Q_DIM: usize = 12;
const KV_DIM: usize = 6;

fn pool<K: KvCodec>(blocks: usize, block_size: usize) -> KvLayer<R, K> {
    let AttnConfig {
        kv_heads, head_dim, ..
    } = CONFIG;
    R::new()
        .alloc_kv_layer(PagedKvShape {
            blocks,
            block_size,
            kv_heads,
            head_dim,
            value_dim: head_dim,
            values_in_keys: false,
        })
        .unwrap()
}

/// Whole-sequence attention through the contiguous ops; `[tokens, heads, head_dim]`.
fn contiguous(
    q: &[f32],
    k: &[f32],
    v: &[f32],
    sinks: &RefBuffer<f32>,
    config: &AttnConfig,
) -> Vec<f32> {
    let ctx = &mut ctx();
    let tokens = k.len() / KV_DIM;
    let AttnConfig {
        heads,
        kv_heads,
        head_dim,
        ..
    } = *config;
    let mut to_heads = |data: &[f32], heads| {
        let mut out = poisoned(data.len());
        let shape = HeadsShape {
            tokens,
            heads,
            head_dim,
        };
        R::transpose_token_to_head(ctx, &buf(data), &mut out, shape).unwrap();
        out
    };
    let (q, k, v) = (
        to_heads(q, heads),
        to_heads(k, kv_heads),
        to_heads(v, kv_heads),
    );
    let mut out = poisoned(q.0.len());
    let shape = FlashShape {
        q_len: tokens,
        kv_len: tokens,
        kv_seq_stride: tokens,
        pos_offset: 0,
    };
    R::flash_attention(ctx, &q, (&k, &v), Some(sinks), &mut out, shape, config).unwrap();
    let mut by_token = poisoned(out.0.len());
    R::transpose_head_to_token(
        ctx,
        &out,
        &mut by_token,
        HeadsShape {
            tokens,
            heads,
            head_dim,
        },
    )
    .unwrap();
    by_token.0
}

/// Two sequences, cut into chunks of different sizes over several steps, in blocks of every size.
#[test]
fn paged_equals_contiguous_bit_for_bit() {
    let lens = [7, 4];
    let data: Vec<[Vec<f32>; 3]> = (0..2)
        .map(|s| {
            [(0, Q_DIM), (1, KV_DIM), (2, KV_DIM)]
                .map(|(i, dim)| noise(10 * s + i, lens[s as usize] * dim))
        })
        .collect();
    let sinks = buf(&[0.3, -0.2, 0.0, 1.0]);
    // Queries of each sequence in each step; a sequence without queries stays in the batch.
    let plans: [&[[usize; 2]]; 4] = [
        &[[7, 4]],
        &[[3, 0], [1, 4], [3, 0]],
        &[[0, 1], [5, 1], [1, 1], [1, 1]],
        &[[7, 0], [0, 4]],
    ];
    for window in [None, Some(3)] {
        let config = AttnConfig {
            sliding_window: window,
            ..CONFIG
        };
        for block_size in [1, 2, 3, 5, 16] {
            for (p, plan) in plans.iter().enumerate() {
                let what = format!("window {window:?}, blocks of {block_size}, plan {p}");
                let found = run_plan(&data, plan, block_size, &sinks, &config);
                for (s, [q, k, v]) in data.iter().enumerate() {
                    assert_eq!(
                        found[s],
                        contiguous(q, k, v, &sinks, &config),
                        "{what}, sequence {s}"
                    );
                }
            }
        }
    }
}

fn run_plan(
    data: &[[Vec<f32>; 3]],
    plan: &[[usize; 2]],
    block_size: usize,
    sinks: &RefBuffer<f32>,
    config: &AttnConfig,
) -> Vec<Vec<f32>> {
    let ctx = &mut ctx();
    let mut kv = pool::<KvF32>(14, block_size);
    let mut done = [0; 2];
    let mut found = vec![Vec::new(); 2];
    for queries in plan {
        // Blocks of the two sequences interleave, the first downwards.
        let seqs: Vec<Seq> = (0..2)
            .map(|s| {
                let kv_len: usize = done[s] + queries[s];
                let count = kv_len.div_ceil(block_size) as i32;
                let blocks = (0..count)
                    .map(|i| if s == 0 { 12 - 2 * i } else { 2 * i + 1 })
                    .collect();
                Seq {
                    queries: queries[s],
                    kv_len,
                    blocks,
                }
            })
            .collect();
        let step = |i: usize, dim: usize| {
            let rows =
                (0..2).flat_map(|s| data[s][i][done[s] * dim..][..queries[s] * dim].to_vec());
            buf(&rows.collect::<Vec<_>>())
        };
        let (q, k, v) = (step(0, Q_DIM), step(1, KV_DIM), step(2, KV_DIM));
        let batch = batch(&seqs);
        R::kv_append(ctx, &mut kv, &k, &v, &batch).unwrap();
        let mut out = poisoned(q.0.len());
        R::paged_attention(ctx, &q, &kv, Some(sinks), &batch, &mut out, config).unwrap();
        let (first, second) = out.0.split_at(queries[0] * Q_DIM);
        found[0].extend_from_slice(first);
        found[1].extend_from_slice(second);
        done = [0, 1].map(|s| done[s] + queries[s]);
    }
    found
}

#[test]
fn fused_append_is_split_then_append() {
    let ctx = &mut ctx();
    let AttnConfig {
        heads,
        kv_heads,
        head_dim,
        ..
    } = CONFIG;
    let shape = QkvShape {
        tokens: 3,
        heads,
        kv_heads,
        head_dim,
        value_dim: head_dim,
    };
    let qkv = noise_buf(1, 3 * shape.row_dim());
    let (cos, sin, rows) = (noise_buf(2, 9), noise_buf(3, 9), ints(&[8, 2, 0]));
    let rope = Rope {
        cos: &cos,
        sin: &sin,
        rows: &rows,
        rot_dim: 2,
        style: RopeStyle::Interleaved,
    };
    let transform = QkvTransform::<R> {
        q_norm: None,
        k_norm: None,
        rope: Some(rope),
    };
    let batch = batch(&[
        Seq {
            queries: 2,
            kv_len: 3,
            blocks: vec![4, 0],
        },
        Seq {
            queries: 0,
            kv_len: 0,
            blocks: vec![],
        },
        Seq {
            queries: 1,
            kv_len: 1,
            blocks: vec![2],
        },
    ]);

    let (mut q, mut k, mut v) = (
        poisoned(3 * Q_DIM),
        poisoned(3 * KV_DIM),
        poisoned(3 * KV_DIM),
    );
    R::split_qkv(ctx, &qkv, &mut q, &mut k, &mut v, shape).unwrap();
    R::qk_norm_rope(
        ctx,
        &mut q,
        HeadLayout::TokenMajor,
        None,
        Some(rope),
        shape.q(),
    )
    .unwrap();
    R::qk_norm_rope(
        ctx,
        &mut k,
        HeadLayout::TokenMajor,
        None,
        Some(rope),
        shape.k(),
    )
    .unwrap();
    let mut apart = pool::<KvF32>(5, 2);
    R::kv_append(ctx, &mut apart, &k, &v, &batch).unwrap();

    let mut fused = pool::<KvF32>(5, 2);
    let mut fused_q = poisoned(3 * Q_DIM);
    let input = PagedQkv {
        qkv: &qkv,
        transform,
        shape,
    };
    R::split_qkv_norm_rope_into_paged_cache(ctx, input, &mut fused_q, &mut fused, &batch).unwrap();
    assert_eq!((fused_q, &fused.k, &fused.v), (q, &apart.k, &apart.v));

    let other = PagedQkv {
        shape: QkvShape { tokens: 2, ..shape },
        qkv: &qkv,
        transform,
    };
    assert_invalid(
        "tokens",
        R::kv_append_qkv(ctx, other, &mut poisoned(36), &mut fused, &batch),
    );
}

/// Appends one token with the given key head and reads the key back as values through attention.
fn round_trip<K: KvCodec>(values: [f32; 3]) -> Vec<f32> {
    let ctx = &mut ctx();
    let shape = PagedKvShape {
        blocks: 1,
        block_size: 1,
        kv_heads: 1,
        head_dim: 3,
        value_dim: 3,
        values_in_keys: false,
    };
    let mut kv: KvLayer<R, K> = R::new().alloc_kv_layer(shape).unwrap();
    let batch = batch(&[Seq {
        queries: 1,
        kv_len: 1,
        blocks: vec![0],
    }]);
    R::kv_append(ctx, &mut kv, &buf(&[0.0; 3]), &buf(&values), &batch).unwrap();
    let config = AttnConfig {
        heads: 1,
        kv_heads: 1,
        softcap: None,
        ..CONFIG
    };
    let mut out = poisoned(3);
    R::kv_attention(ctx, &buf(&[0.0; 3]), &kv, None, &batch, &mut out, &config).unwrap();
    out.0
}

#[test]
fn elements_round_as_their_type_says() {
    let third = 1.0 / 3.0;
    assert_eq!(
        round_trip::<KvF32>([third, 1e30, -2.5]),
        [third, 1e30, -2.5]
    );
    assert_eq!(
        round_trip::<KvFp16>([third, 65504.0, -2.5]),
        [0.333_251_95, 65504.0, -2.5]
    );
    assert_eq!(
        round_trip::<KvBf16>([third, 257.0, -2.5]),
        [0.333_984_38, 256.0, -2.5]
    );
    // E4M3: 3 mantissa bits, ties to even, saturating at 448.
    assert_eq!(round_trip::<KvFp8>([17.0, 1e9, -2.5]), [16.0, 448.0, -2.5]);
    // INT8: steps of 254/127 = 2, ties to even.
    assert_eq!(round_trip::<KvInt8>([3.0, 254.0, -4.9]), [4.0, 254.0, -4.0]);
    assert_eq!(round_trip::<KvInt8>([0.0; 3]), [0.0; 3]);
}

#[test]
fn int8_has_a_scale_for_each_token_and_kv_head() {
    let ctx = &mut ctx();
    let mut kv = pool::<KvInt8>(2, 2);
    let batch = batch(&[Seq {
        queries: 2,
        kv_len: 2,
        blocks: vec![1],
    }]);
    // Amplitudes 127, 254 (token 0) and 1270, 0 (token 1).
    let k = buf(&[
        127.0, 1.0, 0.0, 254.0, 2.0, 0.0, 1270.0, 20.0, 0.0, 0.0, 0.0, 0.0,
    ]);
    R::int8_kv_append_paged(ctx, &mut kv, &k, &k, &batch).unwrap();
    // [block, kv_head, slot]
    assert_eq!(kv.scales.k, [0.0, 0.0, 0.0, 0.0, 1.0, 10.0, 2.0, 0.0]);
    assert_eq!(kv.k.0[12..], [127, 1, 0, 127, 2, 0, 127, 1, 0, 0, 0, 0]);

    let mut out = poisoned(2 * Q_DIM);
    let q = buf(&[0.0; 2 * Q_DIM]);
    R::int8_paged_attention(ctx, &q, &kv, &batch, &mut out, &CONFIG).unwrap();
    assert_eq!(out.0[..3], [127.0, 1.0, 0.0]);
    assert_eq!(out.0[Q_DIM..][..3], [698.5, 10.5, 0.0]);
}

#[test]
fn copies_whole_blocks_in_order() {
    let ctx = &mut ctx();
    let mut kv = pool::<KvInt8>(4, 1);
    let batch = batch(&[Seq {
        queries: 2,
        kv_len: 2,
        blocks: vec![0, 1],
    }]);
    let k = noise_buf(1, 2 * KV_DIM);
    R::kv_append(ctx, &mut kv, &k, &k, &batch).unwrap();
    let pair = |from, to| (BlockId(from), BlockId(to));
    // 1 → 2, then 0 → 1, then 1 (now 0) → 3.
    R::kv_copy_blocks(ctx, &mut kv, &[pair(1, 2), pair(0, 1), pair(1, 3)]).unwrap();
    let block = |i: usize| (&kv.k.0[i * KV_DIM..][..KV_DIM], &kv.scales.v[2 * i..][..2]);
    assert_eq!(block(1), block(0));
    assert_eq!(block(3), block(0));
    assert_ne!(block(2), block(0));
    assert_invalid("from", R::kv_copy_blocks(ctx, &mut kv, &[pair(4, 0)]));
    assert_invalid("to", R::kv_copy_blocks(ctx, &mut kv, &[pair(0, u32::MAX)]));
}

#[test]
fn wrong_batches_are_refused_before_anything_is_written() {
    let good = || {
        batch(&[
            Seq {
                queries: 2,
                kv_len: 3,
                blocks: vec![1, 2],
            },
            Seq {
                queries: 1,
                kv_len: 1,
                blocks: vec![0],
            },
        ])
    };
    let ints_at = |data: &mut RefBuffer<i32>, i: usize, value| data.0[i] = value;
    type Break = Box<dyn Fn(&mut DeviceBatch<R>)>;
    let cases: Vec<(&str, Break)> = vec![
        (
            "block past the pool",
            Box::new(move |b| ints_at(&mut b.block_tables[0], 1, 3)),
        ),
        (
            "negative block",
            Box::new(move |b| ints_at(&mut b.block_tables[0], 0, -1)),
        ),
        (
            "table too short",
            Box::new(move |b| ints_at(&mut b.kv_lens, 0, 5)),
        ),
        (
            "fewer keys than queries",
            Box::new(move |b| ints_at(&mut b.kv_lens, 0, 1)),
        ),
        (
            "negative length",
            Box::new(move |b| ints_at(&mut b.kv_lens, 1, -1)),
        ),
        (
            "starts decrease",
            Box::new(move |b| ints_at(&mut b.query_starts, 1, 4)),
        ),
        (
            "starts past the tokens",
            Box::new(move |b| ints_at(&mut b.query_starts, 2, 4)),
        ),
        (
            "first start",
            Box::new(move |b| ints_at(&mut b.query_starts, 0, 1)),
        ),
        (
            "announced queries",
            Box::new(move |b| b.shape.max_query_len = 1),
        ),
        ("announced keys", Box::new(move |b| b.shape.max_kv_len = 2)),
    ];
    let ctx = &mut ctx();
    let (k, q) = (noise_buf(1, 3 * KV_DIM), noise_buf(2, 3 * Q_DIM));
    let mut kv = pool::<KvF32>(3, 2);
    for (what, damage) in cases {
        let mut bad = good();
        damage(&mut bad);
        assert_invalid(what, R::kv_append(ctx, &mut kv, &k, &k, &bad));
        assert_eq!(kv.k, buf(&[0.0; 6 * KV_DIM]), "{what}: the pool changed");
        let mut out = poisoned(3 * Q_DIM);
        assert_invalid(
            what,
            R::kv_attention(ctx, &q, &kv, None, &bad, &mut out, &CONFIG),
        );
    }
    R::kv_append(ctx, &mut kv, &k, &k, &good()).unwrap();
    assert_short(
        "k",
        R::kv_append(ctx, &mut kv, &buf(&[0.0; 17]), &k, &good()),
    );
    let other = AttnConfig {
        kv_heads: 4,
        ..CONFIG
    };
    let mut out = poisoned(3 * Q_DIM);
    assert_invalid(
        "kv heads",
        R::kv_attention(ctx, &q, &kv, None, &good(), &mut out, &other),
    );
    let empty = PagedKvShape {
        block_size: 0,
        ..kv.shape
    };
    assert_invalid(
        "block size",
        BackendKvDtype::<KvF32>::alloc_kv_layer(&R::new(), empty),
    );
}

/// Blocks behind a sliding window may be gone from the table.
#[test]
fn blocks_behind_the_window_are_not_read() {
    let ctx = &mut ctx();
    let mut kv = pool::<KvF32>(3, 2);
    let step = |blocks| {
        batch(&[Seq {
            queries: 1,
            kv_len: 5,
            blocks,
        }])
    };
    let k = noise_buf(1, KV_DIM);
    R::kv_append(ctx, &mut kv, &k, &k, &step(vec![-1, 0, 1])).unwrap();
    let config = AttnConfig {
        sliding_window: Some(3),
        ..CONFIG
    };
    let (q, mut out) = (noise_buf(2, Q_DIM), poisoned(Q_DIM));
    R::kv_attention(ctx, &q, &kv, None, &step(vec![-1, 0, 1]), &mut out, &config).unwrap();
    let wider = AttnConfig {
        sliding_window: Some(4),
        ..CONFIG
    };
    let result = R::kv_attention(ctx, &q, &kv, None, &step(vec![-1, 0, 1]), &mut out, &wider);
    assert_invalid("needed", result);
}
