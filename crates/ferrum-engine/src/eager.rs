//! A small eager tensor API for experiments: host tensors in, host tensors out, computed on the device that the dispatch
//! has opened. Each call moves its data, so it is not fast; the forward path does not use it.

use crate::BackendDispatch;
use crate::device::with_device;
use ferrum_kernels::{
    Act, AttnConfig, Backend, FlashShape, GemmShape, HeadLayout, HeadsShape, MatShape, NormShape,
    Rope, RopeStyle, RowShape,
};
use ferrum_types::{Error, FloatElement, Result, SrcDtype};

/// A row-major f32 tensor on the host.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    data: Vec<f32>,
    shape: Vec<usize>,
}

impl Tensor {
    /// A tensor of `shape` over `data`.
    ///
    /// # Errors
    /// `Shape` when their sizes disagree.
    pub fn new(data: Vec<f32>, shape: &[usize]) -> Result<Self> {
        let expected = shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d));
        if expected != Some(data.len()) {
            let expected = expected.unwrap_or(usize::MAX);
            return Err(Error::Shape {
                op: "tensor",
                what: "data",
                found: data.len(),
                expected,
            });
        }
        Ok(Self {
            data,
            shape: shape.to_vec(),
        })
    }

    /// Elements in row-major order.
    pub fn data(&self) -> &[f32] {
        &self.data
    }

    /// Sizes, outermost first.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// The sizes as an array of exactly `N`.
    fn dims<const N: usize>(&self, op: &'static str, what: &str) -> Result<[usize; N]> {
        self.shape.as_slice().try_into().map_err(|_| {
            Error::invalid(
                op,
                format!("{what} has shape {:?}, expected {N} dimensions", self.shape),
            )
        })
    }

    /// (rows, last dimension), all other dimensions being rows.
    fn rows(&self, op: &'static str) -> Result<RowShape> {
        match self.shape.split_last() {
            Some((&dim, rest)) => Ok(RowShape {
                rows: rest.iter().product(),
                dim,
            }),
            None => Err(Error::invalid(op, "a scalar has no rows")),
        }
    }
}

/// Rotary embedding for [`BackendDispatch::apply_rope_partial`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RopeSettings {
    /// Rotated elements of a head: even, at most the head's.
    pub rot_dim: usize,
    /// Base of the frequencies.
    pub theta: f32,
    /// How elements pair up.
    pub style: RopeStyle,
}

/// Attention for [`BackendDispatch::gqa_attention`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionSettings {
    /// Factor on `q·k`; `None`: `1/√head_dim`.
    pub scale: Option<f32>,
    /// Whether query `i` of `s` sees only the first `t - s + i + 1` of `t` keys.
    pub causal: bool,
    /// Keys that a query sees, itself included.
    pub sliding_window: Option<usize>,
}

impl BackendDispatch {
    /// `[batch, seq, k] · [n, k]ᵀ → [batch, seq, n]`.
    pub fn linear_3d(&self, x: &Tensor, weight: &Tensor) -> Result<Tensor> {
        let [batch, seq, k] = x.dims("linear_3d", "x")?;
        let [n, weight_k] = weight.dims("linear_3d", "weight")?;
        if weight_k != k {
            let reason = format!("x has {k} features and weight takes {weight_k}");
            return Err(Error::invalid("linear_3d", reason));
        }
        let shape = GemmShape {
            rows: batch * seq,
            n,
            k,
        };
        let data = with_device!(self, d: B => gemm::<B>(d, &x.data, &weight.data, shape)?);
        Tensor::new(data, &[batch, seq, n])
    }

    /// [`linear_3d`](Self::linear_3d) plus `bias`, `[n]`.
    pub fn linear_3d_bias(&self, x: &Tensor, weight: &Tensor, bias: &Tensor) -> Result<Tensor> {
        let out = self.linear_3d(x, weight)?;
        let shape = out.rows("linear_3d_bias")?;
        check_len("linear_3d_bias", "bias", bias, shape.dim)?;
        let data = with_device!(self, d: B => run::<B>(d, &out.data, |ctx, x| {
            let bias = d.from_slice(&bias.data)?;
            B::add_bias(ctx, x, &bias, shape)
        })?);
        Tensor::new(data, &out.shape)
    }

    /// RMS norm over the last dimension with `weight`, `[dim]`.
    pub fn rms_norm(&self, x: &Tensor, weight: &Tensor, eps: f32) -> Result<Tensor> {
        let RowShape { rows, dim } = x.rows("rms_norm")?;
        check_len("rms_norm", "weight", weight, dim)?;
        let shape = NormShape { rows, dim, eps };
        let data = with_device!(self, d: B => map::<B>(d, &x.data, |ctx, x, out| {
            let weight = d.from_slice(&weight.data)?;
            B::rms_norm(ctx, x, &weight, out, shape)
        })?);
        Tensor::new(data, &x.shape)
    }

    /// Layer norm over the last dimension with `weight` and `bias`, `[dim]`.
    pub fn layer_norm(
        &self,
        x: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
        eps: f32,
    ) -> Result<Tensor> {
        let RowShape { rows, dim } = x.rows("layer_norm")?;
        check_len("layer_norm", "weight", weight, dim)?;
        if let Some(bias) = bias {
            check_len("layer_norm", "bias", bias, dim)?;
        }
        let shape = NormShape { rows, dim, eps };
        let data = with_device!(self, d: B => map::<B>(d, &x.data, |ctx, x, out| {
            let weight = d.from_slice(&weight.data)?;
            let bias = bias.map(|bias| d.from_slice(&bias.data)).transpose()?;
            B::layer_norm(ctx, x, &weight, bias.as_ref(), out, shape)
        })?);
        Tensor::new(data, &x.shape)
    }

    /// `x · sigmoid(x)`.
    pub fn silu(&self, x: &Tensor) -> Result<Tensor> {
        let len = x.data.len();
        let data = with_device!(self, d: B => map::<B>(d, &x.data, |ctx, x, out| B::silu(ctx, x, out, len))?);
        Tensor::new(data, &x.shape)
    }

    /// GELU, exact form.
    pub fn gelu(&self, x: &Tensor) -> Result<Tensor> {
        let len = x.data.len();
        let data = with_device!(self, d: B => map::<B>(d, &x.data, |ctx, x, out| B::gelu(ctx, x, out, len))?);
        Tensor::new(data, &x.shape)
    }

    /// `x + y`, of equal shapes.
    pub fn add(&self, x: &Tensor, y: &Tensor) -> Result<Tensor> {
        same_shape("add", x, y)?;
        let len = x.data.len();
        let data = with_device!(self, d: B => run::<B>(d, &x.data, |ctx, x| {
            let y = upload::<B>(d, &y.data)?;
            B::add_inplace(ctx, x, &y, len)
        })?);
        Tensor::new(data, &x.shape)
    }

    /// `x · y` element by element, of equal shapes.
    pub fn mul(&self, x: &Tensor, y: &Tensor) -> Result<Tensor> {
        same_shape("mul", x, y)?;
        let len = x.data.len();
        let data = with_device!(self, d: B => map::<B>(d, &x.data, |ctx, x, out| {
            let y = upload::<B>(d, &y.data)?;
            B::mul(ctx, x, &y, out, len)
        })?);
        Tensor::new(data, &x.shape)
    }

    /// Rotates whole heads, half-split: `x` is `[batch, seq, heads, head_dim]`, `positions` has one
    /// entry for each of `batch · seq` tokens.
    pub fn apply_rope_positions(
        &self,
        x: &Tensor,
        positions: &[u32],
        theta: f32,
    ) -> Result<Tensor> {
        let [_, _, _, rot_dim] = x.dims("apply_rope_positions", "x")?;
        let settings = RopeSettings {
            rot_dim,
            theta,
            style: RopeStyle::HalfSplit,
        };
        self.apply_rope_partial(x, positions, &settings)
    }

    /// Rotates the first `rot_dim` elements of each head; otherwise as
    /// [`apply_rope_positions`](Self::apply_rope_positions).
    pub fn apply_rope_partial(
        &self,
        x: &Tensor,
        positions: &[u32],
        settings: &RopeSettings,
    ) -> Result<Tensor> {
        const OP: &str = "apply_rope_partial";
        let [batch, seq, heads, head_dim] = x.dims(OP, "x")?;
        let tokens = batch * seq;
        if positions.len() != tokens {
            let (found, expected) = (positions.len(), tokens);
            return Err(Error::Shape {
                op: OP,
                what: "positions",
                found,
                expected,
            });
        }
        let RopeSettings {
            rot_dim,
            theta,
            style,
        } = *settings;
        if !rot_dim.is_multiple_of(2) || rot_dim > head_dim {
            let reason =
                format!("rot_dim: found {rot_dim}, expected an even number up to {head_dim}");
            return Err(Error::invalid(OP, reason));
        }
        // One table row for each token.
        let angle = |p: u32, i: usize| {
            f64::from(p) / f64::from(theta).powf(2.0 * i as f64 / rot_dim as f64)
        };
        let angles = || {
            positions
                .iter()
                .flat_map(|&p| (0..rot_dim / 2).map(move |i| angle(p, i)))
        };
        let cos: Vec<f32> = angles().map(|a| a.cos() as f32).collect();
        let sin: Vec<f32> = angles().map(|a| a.sin() as f32).collect();
        let rows: Vec<i32> = (0..tokens as i32).collect();
        let shape = HeadsShape {
            tokens,
            heads,
            head_dim,
        };
        let data = with_device!(self, d: B => run::<B>(d, &x.data, |ctx, x| {
            let (cos, sin, rows) = (d.from_slice(&cos)?, d.from_slice(&sin)?, d.from_slice(&rows)?);
            let rope = Rope { cos: &cos, sin: &sin, rows: &rows, rot_dim, style };
            B::qk_norm_rope(ctx, x, HeadLayout::TokenMajor, None, Some(rope), shape)
        })?);
        Tensor::new(data, &x.shape)
    }

    /// Grouped-query attention: `q` `[batch, s, heads, dim]`, `k` and `v` `[batch, t, kv_heads, dim]`
    /// → `[batch, s, heads, dim]`.
    pub fn gqa_attention(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        settings: &AttentionSettings,
    ) -> Result<Tensor> {
        const OP: &str = "gqa_attention";
        let [batch, q_len, heads, head_dim] = q.dims(OP, "q")?;
        let [kv_batch, kv_len, kv_heads, kv_dim] = k.dims(OP, "k")?;
        same_shape(OP, k, v)?;
        let causal_fits = !settings.causal || q_len <= kv_len;
        if (kv_batch, kv_dim) != (batch, head_dim) || !causal_fits {
            let reason = format!(
                "q of shape {:?} does not fit k of shape {:?}",
                q.shape, k.shape
            );
            return Err(Error::invalid(OP, reason));
        }
        let config = AttnConfig {
            heads,
            kv_heads,
            head_dim,
            value_dim: head_dim,
            scale: settings.scale.unwrap_or(1.0 / (head_dim as f32).sqrt()),
            causal: settings.causal,
            sliding_window: settings.sliding_window,
            chunked: false,
            softcap: None,
        };
        let pos_offset = kv_len.saturating_sub(q_len);
        let shape = FlashShape {
            q_len,
            kv_len,
            kv_seq_stride: kv_len,
            pos_offset,
        };
        let mut out = Vec::with_capacity(q.data.len());
        let (q_size, kv_size) = (q_len * heads * head_dim, kv_len * kv_heads * head_dim);
        for b in 0..batch {
            let q = &q.data[b * q_size..(b + 1) * q_size];
            let kv = b * kv_size..(b + 1) * kv_size;
            let (k, v) = (&k.data[kv.clone()], &v.data[kv]);
            out.extend(with_device!(self, d: B => attention::<B>(d, (q, k, v), shape, &config)?));
        }
        Tensor::new(out, &q.shape)
    }

    /// Logits of every row: `[batch, seq, hidden] · [vocab, hidden]ᵀ → [batch, seq, vocab]`.
    pub fn all_row_logits(&self, hidden: &Tensor, lm_head: &Tensor) -> Result<Tensor> {
        self.linear_3d(hidden, lm_head)
    }

    /// Logits of the last row of each sequence: `[batch, vocab]`.
    pub fn last_row_logits(&self, hidden: &Tensor, lm_head: &Tensor) -> Result<Tensor> {
        let [batch, seq, dim] = hidden.dims("last_row_logits", "hidden")?;
        if seq == 0 {
            return Err(Error::invalid(
                "last_row_logits",
                "the sequences have no rows",
            ));
        }
        let rows = hidden
            .data
            .chunks(seq * dim)
            .flat_map(|seq| &seq[seq.len() - dim..])
            .copied();
        let last = Tensor::new(rows.collect(), &[batch, 1, dim])?;
        let logits = self.linear_3d(&last, lm_head)?;
        let vocab = logits.rows("last_row_logits")?.dim;
        Tensor::new(logits.data, &[batch, vocab])
    }
}

fn check_len(op: &'static str, what: &'static str, tensor: &Tensor, expected: usize) -> Result<()> {
    let found = tensor.data.len();
    if found == expected {
        Ok(())
    } else {
        Err(Error::Shape {
            op,
            what,
            found,
            expected,
        })
    }
}

fn same_shape(op: &'static str, x: &Tensor, y: &Tensor) -> Result<()> {
    if x.shape == y.shape {
        return Ok(());
    }
    Err(Error::invalid(
        op,
        format!("shapes {:?} and {:?} differ", x.shape, y.shape),
    ))
}

fn upload<B: Backend>(device: &B, data: &[f32]) -> Result<Act<B>> {
    let data: Vec<B::Act> = data.iter().map(|&x| B::Act::from_f32(x)).collect();
    device.from_slice(&data)
}

fn download<B: Backend>(ctx: &mut B::Context, buffer: &Act<B>) -> Result<Vec<f32>> {
    Ok(B::to_vec(ctx, buffer)?
        .into_iter()
        .map(FloatElement::to_f32)
        .collect())
}

/// An op that changes its input.
fn run<B: Backend>(
    device: &B,
    x: &[f32],
    op: impl FnOnce(&mut B::Context, &mut Act<B>) -> Result<()>,
) -> Result<Vec<f32>> {
    let mut ctx = device.new_context()?;
    let mut x = upload(device, x)?;
    op(&mut ctx, &mut x)?;
    download::<B>(&mut ctx, &x)
}

/// An op from one buffer to another of the same size.
fn map<B: Backend>(
    device: &B,
    x: &[f32],
    op: impl FnOnce(&mut B::Context, &Act<B>, &mut Act<B>) -> Result<()>,
) -> Result<Vec<f32>> {
    let mut out = device.alloc(x.len())?;
    let mut ctx = device.new_context()?;
    let x = upload(device, x)?;
    op(&mut ctx, &x, &mut out)?;
    download::<B>(&mut ctx, &out)
}

fn gemm<B: Backend>(device: &B, x: &[f32], weight: &[f32], shape: GemmShape) -> Result<Vec<f32>> {
    let mut ctx = device.new_context()?;
    let bytes = bytemuck::cast_slice(weight);
    let size = MatShape {
        rows: shape.n,
        cols: shape.k,
    };
    let weight = device.from_weight_bytes(bytes, SrcDtype::F32, size)?;
    let x = upload(device, x)?;
    let mut out = device.alloc(shape.rows * shape.n)?;
    B::gemm(&mut ctx, &x, &weight, &mut out, shape)?;
    download::<B>(&mut ctx, &out)
}

/// One sequence of token-major q, k and v.
fn attention<B: Backend>(
    device: &B,
    (q, k, v): (&[f32], &[f32], &[f32]),
    shape: FlashShape,
    config: &AttnConfig,
) -> Result<Vec<f32>> {
    let mut ctx = device.new_context()?;
    let (heads, kv_heads, head_dim) = (config.heads, config.kv_heads, config.head_dim);
    let q_shape = HeadsShape {
        tokens: shape.q_len,
        heads,
        head_dim,
    };
    let kv_shape = HeadsShape {
        tokens: shape.kv_len,
        heads: kv_heads,
        head_dim,
    };
    let mut head_major = |x: &[f32], shape: HeadsShape| -> Result<Act<B>> {
        let mut out = device.alloc(x.len())?;
        B::transpose_token_to_head(&mut ctx, &upload(device, x)?, &mut out, shape)?;
        Ok(out)
    };
    let (q, k, v) = (
        head_major(q, q_shape)?,
        head_major(k, kv_shape)?,
        head_major(v, kv_shape)?,
    );
    let mut out = device.alloc(q_shape.len())?;
    B::flash_attention(&mut ctx, &q, (&k, &v), None, &mut out, shape, config)?;
    let mut token_major = device.alloc(q_shape.len())?;
    B::transpose_head_to_token(&mut ctx, &out, &mut token_major, q_shape)?;
    download::<B>(&mut ctx, &token_major)
}
