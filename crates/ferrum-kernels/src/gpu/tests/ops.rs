//! Core ops against the reference.

use super::{compare, noise};
use crate::backend::*;
use ferrum_types::SrcDtype;
use half::{bf16, f16};

/// The limit for ops whose sums are short; f32 rounding is about 1e-14.
const TIGHT: f64 = 1e-12;

fn weight_bytes(values: &[f32], dtype: SrcDtype) -> Vec<u8> {
    let each = values.iter();
    match dtype {
        SrcDtype::F32 => each.flat_map(|x| x.to_le_bytes()).collect(),
        SrcDtype::F16 => each.flat_map(|x| f16::from_f32(*x).to_le_bytes()).collect(),
        SrcDtype::BF16 => each
            .flat_map(|x| bf16::from_f32(*x).to_le_bytes())
            .collect(),
    }
}

const DTYPES: [SrcDtype; 3] = [SrcDtype::F32, SrcDtype::F16, SrcDtype::BF16];

#[test]
fn gemm() {
    for dtype in DTYPES {
        for (rows, n, k) in [
            (1, 1, 1),
            (1, 7, 3),
            (1, 64, 128),
            (2, 5, 131),
            (3, 130, 33),
            (4, 4, 4),
            (5, 9, 257),
            (17, 31, 70),
            (0, 4, 4),
            (3, 5, 0),
        ] {
            let what = format!("gemm {dtype} {rows}x{n}x{k}");
            compare!(what, TIGHT, |dev, ctx| {
                let w = weight_bytes(&noise(1, n * k), dtype);
                let w = dev.from_weight_bytes(&w, dtype, MatShape { rows: n, cols: k })?;
                let x = dev.from_slice(&noise(2, rows * k))?;
                let mut out = dev.from_slice(&vec![f32::NAN; rows * n])?;
                B::gemm(ctx, &x, &w, &mut out, GemmShape { rows, n, k })?;
                B::to_vec(ctx, &out)
            });
        }
    }
}

#[test]
fn gemm_of_parts_with_different_dtypes() {
    let (rows, k) = (3, 37);
    let parts = [
        (SrcDtype::F16, 5),
        (SrcDtype::F16, 2),
        (SrcDtype::F32, 1),
        (SrcDtype::BF16, 6),
    ];
    let n = 14;
    compare!("gemm of parts", TIGHT, |dev, ctx| {
        let bytes: Vec<_> = (0..)
            .zip(parts)
            .map(|(i, (dtype, rows))| weight_bytes(&noise(i, rows * k), dtype))
            .collect();
        let parts: Vec<_> = parts
            .iter()
            .zip(&bytes)
            .map(|(&(dtype, rows), bytes)| WeightPart::new(bytes, dtype, rows))
            .collect();
        let w = dev.from_weight_parts(&parts, k)?;
        let x = dev.from_slice(&noise(20, rows * k))?;
        let mut out = dev.alloc(rows * n)?;
        B::gemm(ctx, &x, &w, &mut out, GemmShape { rows, n, k })?;
        B::to_vec(ctx, &out)
    });
}

#[test]
fn subnormal_f16_weights_keep_their_value() {
    compare!("subnormal weights", TIGHT, |dev, ctx| {
        let bytes: Vec<u8> = [1u16, 0x03ff, 0x8001, 0x0200]
            .iter()
            .flat_map(|h| h.to_le_bytes())
            .collect();
        let w = dev.from_weight_bytes(&bytes, SrcDtype::F16, MatShape { rows: 4, cols: 1 })?;
        let x = dev.from_slice(&[1.0f32])?;
        let mut out = dev.alloc(4)?;
        B::gemm(
            ctx,
            &x,
            &w,
            &mut out,
            GemmShape {
                rows: 1,
                n: 4,
                k: 1,
            },
        )?;
        B::to_vec(ctx, &out)
    });
}

#[test]
fn embedding_and_gather() {
    let ids = [2, -1, 0, 12, 13, i32::MAX, i32::MIN, 2];
    for dtype in DTYPES {
        for dim in [1, 6, 64, 129] {
            let what = format!("embedding {dtype} {dim}");
            compare!(what, 0.0, |dev, ctx| {
                let table = weight_bytes(&noise(3, 13 * dim), dtype);
                let table = dev.from_weight_bytes(
                    &table,
                    dtype,
                    MatShape {
                        rows: 13,
                        cols: dim,
                    },
                )?;
                let ids_on = dev.from_slice(&ids)?;
                let shape = RowShape {
                    rows: ids.len(),
                    dim,
                };
                let mut out = dev.from_slice(&vec![f32::NAN; ids.len() * dim])?;
                B::embedding_lookup(ctx, &table, &ids_on, &mut out, shape)?;
                let src = dev.from_slice(&noise(4, 13 * dim))?;
                let mut rows = dev.from_slice(&vec![f32::NAN; ids.len() * dim])?;
                B::gather_rows(ctx, &src, &ids_on, &mut rows, shape)?;
                let mut all = B::to_vec(ctx, &out)?;
                all.extend(B::to_vec(ctx, &rows)?);
                Ok(all)
            });
        }
    }
}

#[test]
fn argmax() {
    let (nan, inf) = (f32::NAN, f32::INFINITY);
    let rows: [&[f32]; 9] = [
        &[1.0, 3.0, 3.0, 2.0],
        &[nan, nan, nan, nan],
        &[nan, -5.0, nan, -4.0],
        &[-inf, -inf, -inf, -inf],
        &[nan, -inf, nan, -inf],
        &[-0.0, 0.0, -1.0, 0.0],
        &[0.0, -0.0, -1.0, 0.0],
        &[1e-40, -1e-40, 2e-40, 0.0],
        &[inf, inf, 1.0, nan],
    ];
    compare!("argmax of special rows", 0.0, |dev, ctx| {
        let x = dev.from_slice(&rows.concat())?;
        let mut out = dev.alloc::<i32>(rows.len())?;
        B::argmax_rows(
            ctx,
            &x,
            &mut out,
            RowShape {
                rows: rows.len(),
                dim: 4,
            },
        )?;
        Ok(B::to_vec(ctx, &out)?.iter().map(|&i| i as f32).collect())
    });
    for dim in [1, 63, 64, 65, 1000] {
        compare!(format!("argmax {dim}"), 0.0, |dev, ctx| {
            // Coarse steps, so that equals are frequent.
            let values: Vec<f32> = noise(5, 7 * dim)
                .iter()
                .map(|x| (x * 4.0).round())
                .collect();
            let x = dev.from_slice(&values)?;
            let mut out = dev.alloc::<i32>(7)?;
            B::argmax_rows(ctx, &x, &mut out, RowShape { rows: 7, dim })?;
            Ok(B::to_vec(ctx, &out)?.iter().map(|&i| i as f32).collect())
        });
    }
}

#[test]
fn norms() {
    for (rows, dim) in [(1, 1), (3, 7), (2, 64), (5, 1000)] {
        let shape = NormShape {
            rows,
            dim,
            eps: 1e-5,
        };
        compare!(format!("norms {rows}x{dim}"), TIGHT, |dev, ctx| {
            let x = dev.from_slice(&noise(6, rows * dim))?;
            let weight = dev.from_slice(&noise(7, dim))?;
            let bias = dev.from_slice(&noise(8, dim))?;
            let mut residual = dev.from_slice(&noise(9, rows * dim))?;
            let mut out = dev.from_slice(&vec![f32::NAN; rows * dim])?;
            let mut all = Vec::new();
            B::rms_norm(ctx, &x, &weight, &mut out, shape)?;
            all.extend(B::to_vec(ctx, &out)?);
            B::fused_add_rms_norm(ctx, &mut residual, &x, &weight, &mut out, shape)?;
            all.extend(B::to_vec(ctx, &out)?);
            all.extend(B::to_vec(ctx, &residual)?);
            B::layer_norm(ctx, &x, &weight, Some(&bias), &mut out, shape)?;
            all.extend(B::to_vec(ctx, &out)?);
            B::layer_norm(ctx, &x, &weight, None, &mut out, shape)?;
            all.extend(B::to_vec(ctx, &out)?);
            Ok(all)
        });
    }
}

#[test]
fn activations() {
    for len in [1, 255, 256, 257, 3000] {
        compare!(format!("activations {len}"), TIGHT, |dev, ctx| {
            let values: Vec<f32> = noise(10, len).iter().map(|x| x * 12.0).collect();
            let x = dev.from_slice(&values)?;
            let mut out = dev.alloc(len)?;
            let mut all = Vec::new();
            B::gelu(ctx, &x, &mut out, len)?;
            all.extend(B::to_vec(ctx, &out)?);
            B::gelu_tanh(ctx, &x, &mut out, len)?;
            all.extend(B::to_vec(ctx, &out)?);
            B::silu(ctx, &x, &mut out, len)?;
            all.extend(B::to_vec(ctx, &out)?);
            Ok(all)
        });
    }
    // Where an exponential would overflow, and where a difference would cancel.
    let values = [
        -1e30f32, -1000.0, -90.0, -1e-3, 1e-6, 0.0, 1e-3, 90.0, 1000.0, 1e30,
    ];
    for (i, value) in values.into_iter().enumerate() {
        compare!(format!("activation of {value}"), 1e-9, |dev, ctx| {
            let x = dev.from_slice(&[value])?;
            let mut out = dev.alloc(1)?;
            match i % 3 {
                0 => B::gelu(ctx, &x, &mut out, 1)?,
                1 => B::gelu_tanh(ctx, &x, &mut out, 1)?,
                _ => B::silu(ctx, &x, &mut out, 1)?,
            }
            let mut capped = dev.from_slice(&[value])?;
            B::softcap(ctx, &mut capped, 30.0, 1)?;
            let mut all = B::to_vec(ctx, &capped)?;
            // Beside a one, as a result may be as small as it likes.
            all.extend([1.0, B::to_vec(ctx, &out)?[0] / value.abs().max(1.0)]);
            Ok(all)
        });
    }
}

#[test]
fn elementwise() {
    for (rows, dim) in [(1, 1), (3, 85), (7, 256)] {
        let (len, shape) = (rows * dim, RowShape { rows, dim });
        compare!(format!("elementwise {rows}x{dim}"), TIGHT, |dev, ctx| {
            let mut x = dev.from_slice(&noise(11, len))?;
            let y = dev.from_slice(&noise(12, len))?;
            let bias = dev.from_slice(&noise(13, dim))?;
            let gate_up = dev.from_slice(&noise(14, 2 * len))?;
            let mut out = dev.alloc(len)?;
            let mut all = Vec::new();
            B::add_bias(ctx, &mut x, &bias, shape)?;
            B::add_inplace(ctx, &mut x, &y, len)?;
            B::scaled_add_inplace(ctx, &mut x, &y, -0.37, len)?;
            B::scale_inplace(ctx, &mut x, 1.7, len)?;
            all.extend(B::to_vec(ctx, &x)?);
            B::mul(ctx, &x, &y, &mut out, len)?;
            all.extend(B::to_vec(ctx, &out)?);
            B::softcap(ctx, &mut x, 0.8, len)?;
            all.extend(B::to_vec(ctx, &x)?);
            B::fused_silu_mul_split(ctx, &gate_up, &mut out, shape)?;
            all.extend(B::to_vec(ctx, &out)?);
            for kind in [GeluKind::Exact, GeluKind::Tanh] {
                B::fused_gelu_mul_split(ctx, &gate_up, &mut out, kind, shape)?;
                all.extend(B::to_vec(ctx, &out)?);
            }
            Ok(all)
        });
    }
}

/// Sizes for ops on heads: `(tokens, heads, kv_heads, head_dim, rot_dim)`.
const HEADS: [(usize, usize, usize, usize, usize); 5] = [
    (1, 1, 1, 2, 2),
    (3, 4, 2, 7, 4),
    (5, 6, 3, 64, 64),
    (2, 3, 1, 130, 66),
    (4, 2, 2, 33, 0),
];

#[test]
fn rotation_and_head_norm() {
    for (tokens, heads, _, head_dim, rot_dim) in HEADS {
        let shape = HeadsShape {
            tokens,
            heads,
            head_dim,
        };
        for layout in [HeadLayout::TokenMajor, HeadLayout::HeadMajor] {
            for style in [RopeStyle::HalfSplit, RopeStyle::Interleaved] {
                for parts in 0..4 {
                    let what = format!("{shape:?} {rot_dim} {layout:?} {style:?} {parts}");
                    compare!(what, TIGHT, |dev, ctx| {
                        let cos = dev.from_slice(&noise(15, 9 * rot_dim / 2))?;
                        let sin = dev.from_slice(&noise(16, 9 * rot_dim / 2))?;
                        let rows: Vec<i32> = (0..tokens as i32).map(|t| (t * 5 + 3) % 9).collect();
                        let rows = dev.from_slice(&rows)?;
                        let weight = dev.from_slice(&noise(17, head_dim))?;
                        let rope = Rope {
                            cos: &cos,
                            sin: &sin,
                            rows: &rows,
                            rot_dim,
                            style,
                        };
                        let norm = QkNorm {
                            weight: &weight,
                            eps: 1e-6,
                        };
                        let norm = (parts & 1 != 0).then_some(norm);
                        let rope = (parts & 2 != 0).then_some(rope);
                        let mut x = dev.from_slice(&noise(18, shape.len()))?;
                        B::qk_norm_rope(ctx, &mut x, layout, norm, rope, shape)?;
                        B::to_vec(ctx, &x)
                    });
                }
            }
        }
    }
}

#[test]
fn split_and_caches() {
    for (tokens, heads, kv_heads, head_dim, rot_dim) in HEADS {
        let shape = QkvShape {
            tokens,
            heads,
            kv_heads,
            head_dim,
            value_dim: head_dim,
        };
        let (q_len, kv_len) = (shape.q().len(), shape.k().len());
        let span = CacheSpan {
            capacity: tokens + 5,
            offset: 3,
        };
        let cache_len = kv_heads * span.capacity * head_dim;
        compare!(format!("split {shape:?}"), TIGHT, |dev, ctx| {
            let qkv = dev.from_slice(&noise(19, tokens * shape.row_dim()))?;
            let cos = dev.from_slice(&noise(20, 9 * rot_dim / 2))?;
            let sin = dev.from_slice(&noise(21, 9 * rot_dim / 2))?;
            let rows: Vec<i32> = (0..tokens as i32).collect();
            let rows = dev.from_slice(&rows)?;
            let (qw, kw) = (
                dev.from_slice(&noise(22, head_dim))?,
                dev.from_slice(&noise(23, head_dim))?,
            );
            let style = RopeStyle::HalfSplit;
            let transform = QkvTransform {
                q_norm: Some(QkNorm {
                    weight: &qw,
                    eps: 1e-6,
                }),
                k_norm: Some(QkNorm {
                    weight: &kw,
                    eps: 1e-3,
                }),
                rope: Some(Rope {
                    cos: &cos,
                    sin: &sin,
                    rows: &rows,
                    rot_dim,
                    style,
                }),
            };
            let (mut q, mut k) = (dev.alloc(q_len)?, dev.alloc(kv_len)?);
            let mut v = dev.alloc(kv_len)?;
            let mut k_cache = dev.from_slice(&noise(24, cache_len))?;
            let mut v_cache = dev.from_slice(&noise(25, cache_len))?;
            let mut all = Vec::new();
            B::split_qkv(ctx, &qkv, &mut q, &mut k, &mut v, shape)?;
            for part in [&q, &k, &v] {
                all.extend(B::to_vec(ctx, part)?);
            }
            B::split_qkv_norm_rope(ctx, &qkv, &mut q, &mut k, &mut v, transform, shape)?;
            for part in [&q, &k, &v] {
                all.extend(B::to_vec(ctx, part)?);
            }
            let caches = (&mut k_cache, &mut v_cache);
            let one_later = CacheSpan { offset: 4, ..span };
            B::kv_cache_append_head_major(ctx, &k, &v, caches, one_later, shape.k())?;
            all.extend(B::to_vec(ctx, &k_cache)?);
            all.extend(B::to_vec(ctx, &v_cache)?);
            let caches = (&mut k_cache, &mut v_cache);
            let plain = QkvTransform {
                q_norm: None,
                ..transform
            };
            B::split_qkv_norm_rope_into_cache(ctx, &qkv, &mut q, caches, span, plain, shape)?;
            for part in [&q, &k_cache, &v_cache] {
                all.extend(B::to_vec(ctx, part)?);
            }
            let mut transposed = dev.alloc(q_len)?;
            B::transpose_head_to_token(ctx, &q, &mut transposed, shape.q())?;
            all.extend(B::to_vec(ctx, &transposed)?);
            B::transpose_token_to_head(ctx, &transposed, &mut q, shape.q())?;
            all.extend(B::to_vec(ctx, &q)?);
            Ok(all)
        });
    }
}

#[test]
fn flash_attention() {
    let base = AttnConfig {
        heads: 4,
        kv_heads: 2,
        head_dim: 16,
        value_dim: 16,
        scale: 0.25,
        causal: true,
        sliding_window: None,
        chunked: false,
        softcap: None,
    };
    let configs = [
        base,
        AttnConfig {
            causal: false,
            ..base
        },
        AttnConfig {
            sliding_window: Some(5),
            ..base
        },
        AttnConfig {
            sliding_window: Some(70),
            causal: false,
            ..base
        },
        AttnConfig {
            sliding_window: Some(0),
            ..base
        },
        AttnConfig {
            sliding_window: Some(usize::MAX),
            softcap: Some(0.5),
            ..base
        },
        AttnConfig {
            head_dim: 7,
            value_dim: 7,
            kv_heads: 1,
            scale: 2.0,
            ..base
        },
        AttnConfig {
            head_dim: 130,
            value_dim: 130,
            kv_heads: 4,
            scale: 0.1,
            ..base
        },
    ];
    for config in configs {
        // `(q_len, kv_len, pos_offset)`
        for (q_len, kv_len, pos_offset) in [
            (1, 1, 0),
            (5, 5, 0),
            (1, 200, 199),
            (3, 131, 100),
            (2, 0, 0),
            (67, 67, 0),
            (2, 3, 90),
        ] {
            let AttnConfig {
                heads,
                kv_heads,
                head_dim,
                ..
            } = config;
            let kv_seq_stride = kv_len + 3;
            let shape = FlashShape {
                q_len,
                kv_len,
                kv_seq_stride,
                pos_offset,
            };
            for with_sinks in [false, true] {
                let what = format!("{config:?} {shape:?} {with_sinks}");
                compare!(what, TIGHT, |dev, ctx| {
                    let q = dev.from_slice(&noise(30, heads * q_len * head_dim))?;
                    let k = dev.from_slice(&noise(31, kv_heads * kv_seq_stride * head_dim))?;
                    let v = dev.from_slice(&noise(32, kv_heads * kv_seq_stride * head_dim))?;
                    let sinks = dev.from_slice(&noise(33, heads))?;
                    let sinks = with_sinks.then_some(&sinks);
                    let mut out = dev.from_slice(&vec![f32::NAN; heads * q_len * head_dim])?;
                    B::flash_attention(ctx, &q, (&k, &v), sinks, &mut out, shape, &config)?;
                    B::to_vec(ctx, &out)
                });
            }
        }
    }
}

#[test]
fn scores_far_apart() {
    let config = AttnConfig {
        heads: 1,
        kv_heads: 1,
        head_dim: 2,
        value_dim: 2,
        scale: 1000.0,
        causal: true,
        sliding_window: None,
        chunked: false,
        softcap: None,
    };
    let shape = FlashShape {
        q_len: 1,
        kv_len: 150,
        kv_seq_stride: 150,
        pos_offset: 149,
    };
    compare!("scores far apart", 1e-9, |dev, ctx| {
        let q = dev.from_slice(&[1.0f32, -1.0])?;
        let k = dev.from_slice(&noise(34, 300))?;
        let v = dev.from_slice(&noise(35, 300))?;
        let sinks = dev.from_slice(&[1e4f32])?;
        let mut all = Vec::new();
        let mut out = dev.alloc(2)?;
        for sinks in [None, Some(&sinks)] {
            B::flash_attention(ctx, &q, (&k, &v), sinks, &mut out, shape, &config)?;
            all.extend(B::to_vec(ctx, &out)?);
        }
        Ok(all)
    });
}

#[test]
fn mla_attention() {
    for (q_len, kv_len, pos_offset, heads, rank, rope_dim) in [
        (1, 1, 0, 1, 2, 2),
        (3, 80, 77, 4, 33, 6),
        (2, 65, 10, 2, 128, 64),
        (1, 0, 0, 2, 4, 2),
    ] {
        for causal in [true, false] {
            let scale = 0.3;
            let shape = MlaShape {
                q_len,
                kv_len,
                heads,
                rank,
                rope_dim,
                pos_offset,
                scale,
                causal,
            };
            compare!(format!("{shape:?}"), TIGHT, |dev, ctx| {
                let q = dev.from_slice(&noise(36, q_len * heads * (rank + rope_dim)))?;
                let latent = dev.from_slice(&noise(37, kv_len * (rank + rope_dim)))?;
                let mut out = dev.from_slice(&vec![f32::NAN; q_len * heads * rank])?;
                B::mla_attention(ctx, &q, &latent, &mut out, shape)?;
                B::to_vec(ctx, &out)
            });
        }
    }
}

#[test]
fn convolutions() {
    let conv = |c_in, c_out, len, kernel, stride, padding, groups| Conv1dShape {
        c_in,
        c_out,
        len,
        kernel,
        stride,
        padding,
        groups,
    };
    for shape in [
        conv(1, 1, 1, 1, 1, 0, 1),
        conv(3, 5, 20, 3, 1, 1, 1),
        conv(4, 6, 21, 3, 2, 1, 2),
        conv(4, 4, 9, 4, 1, 3, 4),
        conv(2, 2, 2, 5, 1, 0, 1),
    ] {
        compare!(format!("{shape:?}"), TIGHT, |dev, ctx| {
            let x = dev.from_slice(&noise(40, shape.c_in * shape.len))?;
            let weights = shape.c_out * shape.c_in / shape.groups * shape.kernel;
            let w = dev.from_slice(&noise(41, weights))?;
            let bias = dev.from_slice(&noise(42, shape.c_out))?;
            let mut all = Vec::new();
            let mut out = dev.alloc(shape.c_out * shape.out_len())?;
            for bias in [None, Some(&bias)] {
                B::conv1d(ctx, &x, &w, bias, &mut out, shape)?;
                all.extend(B::to_vec(ctx, &out)?);
            }
            Ok(all)
        });
    }
    for (channels, height, width, patch, out_dim) in [(1, 2, 2, 2, 1), (3, 6, 9, 3, 7)] {
        let shape = PatchShape {
            channels,
            height,
            width,
            patch,
            out: out_dim,
        };
        compare!(format!("{shape:?}"), TIGHT, |dev, ctx| {
            let image = dev.from_slice(&noise(43, channels * height * width))?;
            let w = dev.from_slice(&noise(44, out_dim * channels * patch * patch))?;
            let bias = dev.from_slice(&noise(45, out_dim))?;
            let mut rows = dev.alloc(height / patch * (width / patch) * out_dim)?;
            B::conv2d_patch(ctx, &image, &w, Some(&bias), &mut rows, shape)?;
            B::to_vec(ctx, &rows)
        });
    }
}
