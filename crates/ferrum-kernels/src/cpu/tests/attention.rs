//! Attention: contiguous, paged and latent.

use super::*;
use ferrum_test_support::{available, skip};
use ferrum_types::BlockId;

#[derive(Clone, Copy)]
struct Flash {
    config: AttnConfig,
    shape: FlashShape,
    sinks: bool,
    /// Factor on queries: large ones make a sharp softmax.
    sharp: f32,
}

const PLAIN: AttnConfig = AttnConfig {
    heads: 4,
    kv_heads: 2,
    head_dim: 32,
    value_dim: 32,
    scale: 0.2,
    causal: true,
    sliding_window: None,
    chunked: false,
    softcap: None,
};

/// `[heads, tokens, head_dim]` of random numbers.
fn tensor(seed: u64, len: usize, scale: f32) -> Vec<f32> {
    let mut x = Random::new(seed).vec(len);
    x.iter_mut().for_each(|x| *x *= scale);
    x
}

impl Op for Flash {
    fn run<B: AnyBackend>(&self, device: &B) -> Vec<f32> {
        let AttnConfig {
            heads,
            kv_heads,
            head_dim,
            ..
        } = self.config;
        let mut ctx = device.new_context().unwrap();
        let q_len = heads * self.shape.q_len * head_dim;
        let kv_len = kv_heads * self.shape.kv_seq_stride * head_dim;
        let q = act(device, &tensor(1, q_len, self.sharp));
        let k = act(device, &tensor(2, kv_len, 1.0));
        let v = act(device, &tensor(3, kv_len, 1.0));
        let sinks = device.from_slice(&tensor(4, heads, 2.0)).unwrap();
        let sinks = self.sinks.then_some(&sinks);
        let mut out = poison(device, q_len);
        let kv = (&k, &v);
        B::flash_attention(&mut ctx, &q, kv, sinks, &mut out, self.shape, &self.config).unwrap();
        host::<B, _>(&mut ctx, &out)
    }

    fn split_error(&self) -> Option<f64> {
        // Of two products, and errors of scores are factors of weights.
        Some(4.0 * SPLIT_NUMBERS * f64::from(self.sharp * self.sharp))
    }
}

#[test]
fn contiguous_attention() {
    let window = |n| AttnConfig {
        sliding_window: Some(n),
        ..PLAIN
    };
    let sizes = |heads, kv_heads, head_dim| AttnConfig {
        heads,
        kv_heads,
        head_dim,
        value_dim: head_dim,
        ..PLAIN
    };
    let configs = [
        PLAIN,
        AttnConfig {
            causal: false,
            ..PLAIN
        },
        window(1),
        window(5),
        window(70),
        AttnConfig {
            softcap: Some(1.5),
            ..PLAIN
        },
        sizes(1, 1, 1),
        sizes(3, 3, 40),
        sizes(14, 2, 64),
        sizes(5, 1, 80),
    ];
    let shapes = [
        // q_len, kv_len, stride, offset
        (1, 1, 1, 0),
        (0, 3, 3, 3),
        (1, 40, 50, 39),
        (1, 200, 200, 199),
        (7, 7, 9, 0),
        (70, 70, 70, 0),
        (33, 100, 101, 67),
        (50, 300, 301, 250),
        (3, 0, 4, 0),
        (4, 3, 4, 0),
        (5, 20, 20, 40),
    ];
    for config in configs {
        for (q_len, kv_len, kv_seq_stride, pos_offset) in shapes {
            for (sinks, sharp) in [(false, 1.0), (true, 20.0)] {
                let shape = FlashShape {
                    q_len,
                    kv_len,
                    kv_seq_stride,
                    pos_offset,
                };
                let op = Flash {
                    config,
                    shape,
                    sinks,
                    sharp,
                };
                check(&format!("{config:?} {shape:?} {sinks}"), &op, 1e-10);
            }
        }
    }
}

#[test]
fn future_keys_do_not_matter_whatever_they_are() {
    for device in devices() {
        let mut ctx = device.new_context().unwrap();
        let (tokens, dim) = (170, PLAIN.head_dim);
        let q = act(&device, &tensor(1, PLAIN.heads * tokens * dim, 1.0));
        let mut results = Vec::new();
        for last in [1.0, f32::NAN, f32::INFINITY] {
            let mut k = tensor(2, 2 * tokens * dim, 1.0);
            let mut v = tensor(3, 2 * tokens * dim, 1.0);
            for head in 0..2 {
                let at = (head * tokens + tokens - 1) * dim;
                k[at..at + dim].fill(last);
                v[at..at + dim].fill(last);
            }
            let mut out = poison(&device, PLAIN.heads * tokens * dim);
            let shape = FlashShape {
                q_len: tokens,
                kv_len: tokens,
                kv_seq_stride: tokens,
                pos_offset: 0,
            };
            let kv = (&act(&device, &k), &act(&device, &v));
            CpuBackend::flash_attention(&mut ctx, &q, kv, None, &mut out, shape, &PLAIN).unwrap();
            let out = host::<CpuBackend, _>(&mut ctx, &out);
            let earlier: Vec<f32> = (0..PLAIN.heads)
                .flat_map(|h| out[h * tokens * dim..][..(tokens - 1) * dim].to_vec())
                .collect();
            assert!(earlier.iter().all(|x| x.is_finite()));
            results.push(earlier);
        }
        assert!(
            results.iter().all(|r| bits(r) == bits(&results[0])),
            "{device:?}"
        );
    }
}

struct Mla(MlaShape);

impl Op for Mla {
    fn run<B: AnyBackend>(&self, device: &B) -> Vec<f32> {
        let shape = self.0;
        let dim = shape.rank + shape.rope_dim;
        let mut ctx = device.new_context().unwrap();
        let q = act(device, &tensor(1, shape.q_len * shape.heads * dim, 1.0));
        let latent = act(device, &tensor(2, shape.kv_len * dim, 1.0));
        let mut out = poison(device, shape.q_len * shape.heads * shape.rank);
        B::mla_attention(&mut ctx, &q, &latent, &mut out, shape).unwrap();
        host::<B, _>(&mut ctx, &out)
    }

    fn split_error(&self) -> Option<f64> {
        Some(SPLIT_NUMBERS)
    }
}

#[test]
fn latent_attention() {
    for (q_len, kv_len, heads, rank, rope_dim) in [
        (1, 1, 1, 1, 1),
        (1, 90, 16, 64, 16),
        (5, 37, 3, 20, 6),
        (2, 300, 16, 40, 8),
        (9, 9, 40, 32, 0),
    ] {
        for causal in [true, false] {
            let shape = MlaShape {
                q_len,
                kv_len,
                heads,
                rank,
                rope_dim,
                pos_offset: kv_len - q_len,
                scale: 0.15,
                causal,
            };
            check(&format!("{shape:?}"), &Mla(shape), 1e-10);
        }
    }
}

/// Sequences in a paged cache, written in steps, and attention after the last.
#[derive(Clone)]
struct Paged {
    config: AttnConfig,
    block_size: usize,
    /// Tokens of each sequence in each step.
    steps: Vec<Vec<usize>>,
    sinks: bool,
    /// Through `kv_append_qkv` instead of `kv_append`.
    fused: bool,
}

impl Paged {
    fn seqs(&self) -> usize {
        self.steps[0].len()
    }

    fn len(&self, s: usize) -> usize {
        self.steps.iter().map(|step| step[s]).sum()
    }

    /// Row of q, k and v of token `t` of sequence `s`: the same in whichever step it comes.
    fn row(&self, s: usize, t: usize, shape: QkvShape) -> Vec<f32> {
        tensor((1000 * s + t + 7) as u64, shape.row_dim(), 1.0)
    }

    /// The outputs of all tokens, sequence by sequence.
    fn outputs<B: BackendKvDtype<K>, K: KvDtypeKind>(&self, device: &B) -> Vec<f32> {
        let AttnConfig {
            heads,
            kv_heads,
            head_dim,
            ..
        } = self.config;
        let longest = (0..self.seqs()).map(|s| self.len(s)).max().unwrap();
        let stride = longest.div_ceil(self.block_size) + 1;
        let blocks = stride * self.seqs() + 2;
        let pool = PagedKvShape {
            blocks,
            block_size: self.block_size,
            kv_heads,
            head_dim,
            value_dim: head_dim,
            values_in_keys: false,
        };
        let mut ctx = device.new_context().unwrap();
        let mut kv: KvLayer<B, K> = device.alloc_kv_layer(pool).unwrap();
        // Blocks in no particular order.
        let table: Vec<i32> = (0..self.seqs() * stride)
            .map(|i| (i * 7 % (self.seqs() * stride).max(1)) as i32)
            .collect();
        let mut seen = std::collections::HashSet::new();
        let table: Vec<i32> = if table.iter().all(|b| seen.insert(*b)) {
            table
        } else {
            (0..table.len() as i32).rev().collect()
        };
        let sinks = device.from_slice(&tensor(4, heads, 2.0)).unwrap();
        let mut outs = vec![Vec::new(); self.seqs()];
        let mut done = vec![0; self.seqs()];
        for step in &self.steps {
            let tokens: usize = step.iter().sum();
            let shape = QkvShape {
                tokens,
                heads,
                kv_heads,
                head_dim,
                value_dim: head_dim,
            };
            let mut starts = vec![0];
            let (mut kv_lens, mut rows) = (Vec::new(), Vec::new());
            for (s, n) in step.iter().enumerate() {
                for t in done[s]..done[s] + n {
                    rows.extend(self.row(s, t, shape));
                }
                done[s] += n;
                starts.push(starts[s] + *n as i32);
                kv_lens.push(done[s] as i32);
            }
            let i32s = |x: &[i32]| device.from_slice(x).unwrap();
            let batch = DeviceBatch::<B> {
                shape: BatchShape {
                    tokens,
                    seqs: step.len(),
                    table_stride: stride,
                    max_query_len: *step.iter().max().unwrap(),
                    max_kv_len: longest,
                },
                tokens: i32s(&vec![0; tokens]),
                rope_rows: i32s(&vec![0; tokens]),
                query_starts: i32s(&starts),
                kv_lens: i32s(&kv_lens),
                state_slots: i32s(&vec![0; step.len()]),
                block_tables: vec![i32s(&table)],
            };
            let qkv = act(device, &rows);
            let mut q = poison(device, tokens * shape.q_dim());
            if self.fused {
                let transform = QkvTransform {
                    q_norm: None,
                    k_norm: None,
                    rope: None,
                };
                let input = PagedQkv {
                    qkv: &qkv,
                    transform,
                    shape,
                };
                B::kv_append_qkv(&mut ctx, input, &mut q, &mut kv, &batch).unwrap();
            } else {
                let mut k = poison(device, tokens * shape.k_dim());
                let mut v = poison(device, tokens * shape.k_dim());
                B::split_qkv(&mut ctx, &qkv, &mut q, &mut k, &mut v, shape).unwrap();
                B::kv_append(&mut ctx, &mut kv, &k, &v, &batch).unwrap();
            }
            let mut out = poison(device, tokens * shape.q_dim());
            let sinks = self.sinks.then_some(&sinks);
            B::kv_attention(&mut ctx, &q, &kv, sinks, &batch, &mut out, &self.config).unwrap();
            let out = host::<B, _>(&mut ctx, &out);
            for (s, out_s) in outs.iter_mut().enumerate() {
                let range =
                    starts[s] as usize * shape.q_dim()..starts[s + 1] as usize * shape.q_dim();
                out_s.extend_from_slice(&out[range]);
            }
        }
        outs.concat()
    }
}

impl Op for Paged {
    fn run<B: AnyBackend>(&self, device: &B) -> Vec<f32> {
        let mut out = self.outputs::<B, KvF32>(device);
        out.extend(self.outputs::<B, KvFp16>(device));
        out.extend(self.outputs::<B, KvBf16>(device));
        out.extend(self.outputs::<B, KvFp8>(device));
        out.extend(self.outputs::<B, KvInt8>(device));
        out
    }

    fn split_error(&self) -> Option<f64> {
        Some(SPLIT_NUMBERS)
    }
}

#[test]
fn paged_attention() {
    let configs = [
        PLAIN,
        AttnConfig {
            sliding_window: Some(20),
            head_dim: 24,
            value_dim: 24,
            ..PLAIN
        },
        AttnConfig {
            heads: 7,
            kv_heads: 1,
            head_dim: 64,
            value_dim: 64,
            softcap: Some(2.0),
            ..PLAIN
        },
        AttnConfig {
            causal: false,
            ..PLAIN
        },
    ];
    for config in configs {
        for block_size in [1, 5, 16, 24, 64] {
            let op = Paged {
                config,
                block_size,
                steps: vec![vec![5, 0, 40], vec![1, 3, 1], vec![1, 1, 30]],
                sinks: block_size == 16,
                fused: block_size != 24,
            };
            check(&format!("{config:?} in blocks of {block_size}"), &op, 1e-10);
        }
    }
}

#[test]
fn chunks_blocks_and_neighbours_change_no_bit() {
    for isa in available([Isa::best(), Isa::AmxF32], Isa::is_available) {
        let config = CpuConfig {
            isa: Some(isa),
            ..CpuConfig::default()
        };
        let device = CpuBackend::with_config(config).unwrap();
        for sliding_window in [None, Some(145)] {
            let config = AttnConfig {
                sliding_window,
                ..PLAIN
            };
            rows_alone_and_together(&device, config);
        }
    }
}

fn rows_alone_and_together(device: &CpuBackend, config: AttnConfig) {
    const TOKENS: usize = 300;
    let paged = |block_size, steps: &[&[usize]]| {
        let op = Paged {
            config,
            block_size,
            steps: steps.iter().map(|step| step.to_vec()).collect(),
            sinks: false,
            fused: true,
        };
        let first = op.len(0) * config.heads * config.head_dim;
        let out = op.outputs::<CpuBackend, KvF32>(device);
        bits(&out[..first])
    };
    let whole = paged(TOKENS, &[&[TOKENS]]);
    for block_size in [1, 3, 16, 32, 40] {
        let cases: [&[&[usize]]; 4] = [
            &[&[TOKENS]],
            &[&[133], &[1], &[140], &[26]],
            &[&[299, 10], &[1, 1]],
            &[&[150, 0, 70], &[150, 90, 1]],
        ];
        for steps in cases {
            assert!(
                paged(block_size, steps) == whole,
                "{device:?} {config:?} {block_size} {steps:?}"
            );
        }
    }
    // The contiguous op over the same numbers.
    let shape = QkvShape {
        tokens: TOKENS,
        heads: config.heads,
        kv_heads: config.kv_heads,
        head_dim: config.head_dim,
        value_dim: config.head_dim,
    };
    let op = Paged {
        config,
        block_size: 1,
        steps: vec![vec![TOKENS]],
        sinks: false,
        fused: false,
    };
    let rows: Vec<f32> = (0..TOKENS).flat_map(|t| op.row(0, t, shape)).collect();
    let mut ctx = device.new_context().unwrap();
    let qkv = act(device, &rows);
    let mut q = poison(device, TOKENS * shape.q_dim());
    let mut k = poison(device, TOKENS * shape.k_dim());
    let mut v = poison(device, TOKENS * shape.k_dim());
    let none = QkvTransform {
        q_norm: None,
        k_norm: None,
        rope: None,
    };
    CpuBackend::split_qkv_norm_rope(&mut ctx, &qkv, &mut q, &mut k, &mut v, none, shape).unwrap();
    let mut out = poison(device, TOKENS * shape.q_dim());
    let flash = FlashShape {
        q_len: TOKENS,
        kv_len: TOKENS,
        kv_seq_stride: TOKENS,
        pos_offset: 0,
    };
    CpuBackend::flash_attention(&mut ctx, &q, (&k, &v), None, &mut out, flash, &config).unwrap();
    let mut tokens = poison(device, TOKENS * shape.q_dim());
    CpuBackend::transpose_head_to_token(&mut ctx, &out, &mut tokens, shape.q()).unwrap();
    assert!(bits(&host::<CpuBackend, _>(&mut ctx, &tokens)) == whole);
}

/// What cannot be split in two of bf16 has another path at the level that does so.
#[test]
fn rows_with_numbers_that_cannot_be_split_depend_on_themselves() {
    const TOKENS: usize = 300;
    if !Isa::AmxF32.is_available() {
        skip(format_args!("this machine has no {}", Isa::AmxF32));
        return;
    }
    let config = CpuConfig {
        isa: Some(Isa::AmxF32),
        ..CpuConfig::default()
    };
    let device = CpuBackend::with_config(config).unwrap();
    let mut ctx = device.new_context().unwrap();
    for (sliding_window, head_dim, value_scale) in
        [(None, 24, 1.0), (Some(145), 40, 1.0), (Some(70), 8, 1e-33)]
    {
        let config = AttnConfig {
            heads: 1,
            kv_heads: 1,
            head_dim,
            value_dim: head_dim,
            sliding_window,
            ..PLAIN
        };
        let mut q = tensor(1, TOKENS * head_dim, 1.0);
        let mut k = tensor(2, TOKENS * head_dim, 1.0);
        let mut v = tensor(3, TOKENS * head_dim, value_scale);
        // Rows, and values that are no splittable numbers; scores with the third one stay finite, as all keys have a zero there.
        for (row, x) in [
            (40, f32::INFINITY),
            (70, f32::NAN),
            (131, 3.4e38),
            (132, 3.4e38),
        ] {
            q[row * head_dim] = x;
        }
        k.chunks_exact_mut(head_dim).for_each(|key| key[0] = 0.0);
        k[60 * head_dim + 1] = 3.4e38;
        k[200 * head_dim + 1] = f32::NEG_INFINITY;
        v[90 * head_dim + head_dim - 1] = f32::INFINITY;
        // A step of keys whose weights make sums subnormal, where values are tiny.
        let sinks = act(&device, &[80.0 * f32::from(u8::from(value_scale < 1.0))]);
        let kv = (&act(&device, &k), &act(&device, &v));
        let mut rows = |first: usize, len: usize| {
            let shape = FlashShape {
                q_len: len,
                kv_len: first + len,
                kv_seq_stride: TOKENS,
                pos_offset: first,
            };
            let q = act(&device, &q[first * head_dim..][..len * head_dim]);
            let mut out = poison(&device, len * head_dim);
            let sinks = (value_scale < 1.0).then_some(&sinks);
            CpuBackend::flash_attention(&mut ctx, &q, kv, sinks, &mut out, shape, &config).unwrap();
            let out = host::<CpuBackend, _>(&mut ctx, &out);
            // Any NaN is as good as another.
            let bits = out
                .into_iter()
                .map(|x| if x.is_nan() { u32::MAX } else { x.to_bits() });
            bits.collect::<Vec<_>>()
        };
        let whole = rows(0, TOKENS);
        for len in [1, 16, 17, 31, 32, 33, 100] {
            for first in (0..TOKENS).step_by(len) {
                let len = len.min(TOKENS - first);
                let expected = &whole[first * head_dim..][..len * head_dim];
                assert!(
                    rows(first, len) == expected,
                    "{sliding_window:?} {len} rows from {first}"
                );
            }
        }
    }
}

#[test]
fn tiles_taken_as_they_lie_give_the_bits_of_copies() {
    fn outputs<K: KvDtypeKind>(block_size: usize, isa: Isa) -> Vec<u32>
    where
        CpuBackend: BackendKvDtype<K>,
    {
        let config = CpuConfig {
            isa: Some(isa),
            ..CpuConfig::default()
        };
        let op = Paged {
            config: AttnConfig {
                head_dim: 64,
                value_dim: 64,
                ..PLAIN
            },
            block_size,
            // The last ones see whole tiles, and are few.
            steps: vec![vec![96], vec![1], vec![2]],
            sinks: true,
            fused: false,
        };
        bits(&op.outputs::<CpuBackend, K>(&CpuBackend::with_config(config).unwrap()))
    }
    for isa in available(Isa::ALL, Isa::is_available) {
        // No chunk of a block of 12 is a whole one.
        for size in [16, 32, 48] {
            assert!(outputs::<KvF32>(12, isa) == outputs::<KvF32>(size, isa));
            assert!(outputs::<KvFp16>(12, isa) == outputs::<KvFp16>(size, isa));
            assert!(outputs::<KvBf16>(12, isa) == outputs::<KvBf16>(size, isa));
            assert!(outputs::<KvFp8>(12, isa) == outputs::<KvFp8>(size, isa));
            assert!(outputs::<KvInt8>(12, isa) == outputs::<KvInt8>(size, isa));
        }
    }
}

#[test]
fn wrong_batches_are_errors() {
    let device = CpuBackend::open(0).unwrap();
    let mut ctx = device.new_context().unwrap();
    let pool = PagedKvShape {
        blocks: 2,
        block_size: 4,
        kv_heads: 2,
        head_dim: 32,
        value_dim: 32,
        values_in_keys: false,
    };
    let mut kv: KvLayer<CpuBackend, KvF32> = device.alloc_kv_layer(pool).unwrap();
    let x = act(&device, &tensor(1, 3 * 4 * 32, 1.0));
    // (query_starts, kv_len, table)
    let cases = [
        ([0, 3], 3, [1, 0], true),
        ([0, 3], 8, [1, 0], true),
        ([1, 3], 3, [1, 0], false),
        ([0, 2], 3, [1, 0], false),
        ([0, -3], 3, [1, 0], false),
        ([0, 3], 2, [1, 0], false),
        ([0, 3], -1, [1, 0], false),
        ([0, 3], 9, [1, 0], false),
        ([0, 3], 3, [2, 0], false),
        ([0, 3], 8, [1, -1], false),
    ];
    for (starts, kv_len, table, good) in cases {
        let i32s = |x: &[i32]| device.from_slice(x).unwrap();
        let batch = DeviceBatch::<CpuBackend> {
            shape: BatchShape {
                tokens: 3,
                seqs: 1,
                table_stride: 2,
                max_query_len: 3,
                max_kv_len: 100,
            },
            tokens: i32s(&[0; 3]),
            rope_rows: i32s(&[0; 3]),
            query_starts: i32s(&starts),
            kv_lens: i32s(&[kv_len]),
            state_slots: i32s(&[0]),
            block_tables: vec![i32s(&table)],
        };
        let done = CpuBackend::kv_append(&mut ctx, &mut kv, &x, &x, &batch);
        assert_eq!(
            done.is_ok(),
            good,
            "{starts:?} {kv_len} {table:?}: {done:?}"
        );
        let mut out = poison(&device, 3 * 4 * 32);
        let done = CpuBackend::kv_attention(&mut ctx, &x, &kv, None, &batch, &mut out, &PLAIN);
        assert_eq!(
            done.is_ok(),
            good,
            "{starts:?} {kv_len} {table:?}: {done:?}"
        );
    }
    let copy = |kv: &mut _, ctx: &mut _, from, to| {
        CpuBackend::kv_copy_blocks(ctx, kv, &[(BlockId(from), BlockId(to))])
    };
    assert!(copy(&mut kv, &mut ctx, 0, 2).is_err());
    assert!(copy(&mut kv, &mut ctx, 1, 0).is_ok());
    let half = kv.k.len() / 2;
    let (first, second) = kv.k.as_slice().split_at(half);
    assert!(first == second && first.iter().any(|x| *x != 0.0));
    let zero = PagedKvShape { blocks: 0, ..pool };
    assert!(BackendKvDtype::<KvFp16>::alloc_kv_layer(&device, zero).is_err());
}
