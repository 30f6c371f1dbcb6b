//! Linear attention with a short convolution before it.

use super::{LayerStates, Scratch, StepState};
use crate::inventory::Projection;
use crate::linear::Linear;
use crate::spec::{AttentionSpec, DecoderSpec, LinearAttentionSpec};
use ferrum_kernels::{
    Act, Activation, Backend, CausalConvShape, CopyColumnsShape, LinearAttention,
    LinearAttentionRule, LlmBackend, NormShape,
};
use ferrum_types::Result;

/// Weights of linear attention.
pub(crate) struct LinearAttentionWeights<B: Backend> {
    /// With the gated delta rule to `[queries | keys | values | z | β | step]`, with a state space to
    /// `[z | values | keys | queries | step]`.
    pub(crate) input: Box<dyn Linear<B>>,
    /// `[row_dim, kernel]`.
    pub(crate) kernel: B::Buffer<f32>,
    pub(crate) conv_bias: Option<B::Buffer<f32>>,
    /// `[3, value_heads]`: decay, bias of the step, and skip.
    pub(crate) params: B::Buffer<f32>,
    /// Of each group of elements that has weights of its own.
    pub(crate) norms: Vec<B::Buffer<f32>>,
    pub(crate) out: Box<dyn Linear<B>>,
}

/// Activations that only gated layers have. Rows are tokens.
pub(crate) struct GateScratch<B: Backend> {
    /// `[tokens, values]`: what outputs are multiplied with, before its function.
    pub(crate) output: Act<B>,
    /// `[tokens, gate_dim]`: the gates of a state.
    pub(crate) state: Act<B>,
}

/// Elements per token of [`GateScratch`]; `None` for a decoder without gated layers.
pub(crate) fn gate_widths(spec: &DecoderSpec) -> Option<[usize; 2]> {
    let widths = spec
        .layers
        .iter()
        .filter_map(|layer| match &layer.attention {
            AttentionSpec::Gqa(gqa) if gqa.gate => Some([gqa.heads * gqa.value_dim, 0]),
            AttentionSpec::Linear(linear) => Some([linear.values(), linear.shape(0).gate_dim()]),
            AttentionSpec::Gqa(_) | AttentionSpec::Mla(_) | AttentionSpec::ShortConv(_) => None,
        });
    widths.reduce(|a, b| [a[0].max(b[0]), a[1].max(b[1])])
}

impl<B: Backend> GateScratch<B> {
    pub(super) fn alloc(
        device: &B,
        [output, state]: [usize; 2],
        max_tokens: usize,
    ) -> Result<Self> {
        Ok(Self {
            output: device.alloc(max_tokens * output)?,
            state: device.alloc(max_tokens * state)?,
        })
    }
}

/// `normed` → `delta` through linear attention. A sequence's state has the convolution's last inputs, then the heads'.
pub(super) fn linear_attention_forward<B: LlmBackend>(
    ctx: &mut B::Context,
    index: usize,
    (spec, weights): (&LinearAttentionSpec, &LinearAttentionWeights<B>),
    LayerStates { states, shape }: &mut LayerStates<B>,
    step: &StepState<'_, B>,
    scratch: &mut Scratch<B>,
) -> Result<()> {
    let rows = step.batch.shape.tokens;
    let Scratch {
        normed,
        delta,
        qkv: wide,
        q: row,
        attn,
        gates,
        lora,
        profiler,
        ..
    } = scratch;
    let gates = gates.as_mut().ok_or_else(|| super::other_kind(index))?;
    // [tokens, hidden] → [tokens, projected]
    profiler.measure(ctx, "linear_in", |ctx| {
        weights.input.forward(ctx, normed, wide, rows)?;
        step.adapters
            .add(ctx, (index, Projection::LinearIn), normed, wide, lora)
    })?;
    let shape = spec.shape(shape.slots);
    let row_dim = shape.row_dim();
    profiler.measure(ctx, "linear_conv", |ctx| {
        split::<B>(ctx, spec, wide, (row, gates), rows)?;
        let conv = CausalConvShape {
            channels: row_dim,
            kernel: spec.kernel,
            states: shape.states,
            offset: 0,
        };
        let kernel = (&weights.kernel, weights.conv_bias.as_ref());
        B::causal_conv1d(ctx, row, kernel, states, step.batch, wide, conv)?;
        B::silu(ctx, wide, row, rows * row_dim)
    })?;
    // [tokens, row_dim] → [tokens, values]
    profiler.measure(ctx, "linear_attention", |ctx| {
        let inputs = LinearAttention {
            x: row,
            gates: &gates.state,
            params: &weights.params,
        };
        B::linear_attention(ctx, inputs, states, step.batch, attn, shape)
    })?;
    let len = rows * spec.values();
    let (silu, eps) = (Activation::Silu, step.spec.norm_eps);
    profiler.measure(ctx, "linear_norm", |ctx| match spec.rule {
        LinearAttentionRule::GatedDelta => {
            let rest = [wide, &mut gates.state];
            norm::<B>(ctx, (spec, weights, eps), attn, (row, rest), rows)?;
            B::activate(ctx, silu, &gates.output, Some(row), attn, len)
        }
        LinearAttentionRule::StateSpace => {
            B::activate(ctx, silu, &gates.output, Some(attn), row, len)?;
            let rest = [wide, &mut gates.output];
            norm::<B>(ctx, (spec, weights, eps), row, (attn, rest), rows)
        }
    })?;
    // [tokens, values] → [tokens, hidden]
    profiler.measure(ctx, "linear_out", |ctx| {
        weights.out.forward(ctx, attn, delta, rows)?;
        step.adapters
            .add(ctx, (index, Projection::LinearOut), attn, delta, lora)
    })
}

/// Columns of what the input is projected to: what the convolution reads, the output gate, and the gates of the state.
fn split<B: Backend>(
    ctx: &mut B::Context,
    spec: &LinearAttentionSpec,
    projected: &Act<B>,
    (row, gates): (&mut Act<B>, &mut GateScratch<B>),
    rows: usize,
) -> Result<()> {
    let shape = spec.shape(0);
    let (row_dim, values) = (shape.row_dim(), shape.value_width());
    let [of_row, of_output] = match spec.rule {
        LinearAttentionRule::GatedDelta => [0, row_dim],
        LinearAttentionRule::StateSpace => [values, 0],
    };
    let columns = |src_first, len| CopyColumnsShape {
        rows,
        len,
        src_first,
        src_width: spec.projected(),
        dst_first: 0,
        dst_width: len,
    };
    B::copy_columns(ctx, projected, row, columns(of_row, row_dim))?;
    B::copy_columns(
        ctx,
        projected,
        &mut gates.output,
        columns(of_output, values),
    )?;
    let of_state = columns(row_dim + values, shape.gate_dim());
    B::copy_columns(ctx, projected, &mut gates.state, of_state)
}

/// Norms heads, or groups of them. `rest` is used up where groups have weights of their own.
fn norm<B: Backend>(
    ctx: &mut B::Context,
    (spec, weights, eps): (&LinearAttentionSpec, &LinearAttentionWeights<B>, f32),
    x: &Act<B>,
    (out, rest): (&mut Act<B>, [&mut Act<B>; 2]),
    tokens: usize,
) -> Result<()> {
    let (rows, width) = (spec.norm_rows(), spec.values());
    let dim = width / rows;
    let shape = |rows| NormShape { rows, dim, eps };
    if let [weight] = &weights.norms[..] {
        return B::rms_norm(ctx, x, weight, out, shape(tokens * rows));
    }
    let [taken, normed] = rest;
    for (group, weight) in weights.norms.iter().enumerate() {
        let columns = |src_first, src_width, dst_first, dst_width| CopyColumnsShape {
            rows: tokens,
            len: dim,
            src_first,
            src_width,
            dst_first,
            dst_width,
        };
        let first = group * dim;
        B::copy_columns(ctx, x, taken, columns(first, width, 0, dim))?;
        B::rms_norm(ctx, taken, weight, normed, shape(tokens))?;
        B::copy_columns(ctx, normed, out, columns(0, dim, first, width))?;
    }
    Ok(())
}
