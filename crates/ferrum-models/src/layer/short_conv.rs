//! A gated short convolution in attention's place.

use super::{LayerStates, Scratch, StepState};
use crate::inventory::Projection;
use crate::linear::Linear;
use crate::spec::ShortConvSpec;
use ferrum_kernels::{Backend, CausalConvShape, LlmBackend, QkvShape};
use ferrum_types::Result;

/// Weights of a gated short convolution.
pub(crate) struct ShortConvWeights<B: Backend> {
    /// To `[b | c | x]`.
    pub(crate) input: Box<dyn Linear<B>>,
    /// `[channels, kernel]`.
    pub(crate) kernel: B::Buffer<f32>,
    pub(crate) bias: Option<B::Buffer<f32>>,
    pub(crate) out: Box<dyn Linear<B>>,
}

impl ShortConvSpec {
    /// The projection to `[b | c | x]` of so many tokens, as parts of equal width.
    pub(super) fn parts(&self, tokens: usize) -> QkvShape {
        QkvShape {
            tokens,
            heads: 1,
            kv_heads: 1,
            head_dim: self.channels,
            value_dim: self.channels,
        }
    }
}

/// `normed` → `delta` through a gated short convolution, whose last inputs are the state of each sequence.
pub(super) fn short_conv_forward<B: LlmBackend>(
    ctx: &mut B::Context,
    index: usize,
    (conv, weights): (&ShortConvSpec, &ShortConvWeights<B>),
    LayerStates { states, shape }: &mut LayerStates<B>,
    step: &StepState<'_, B>,
    scratch: &mut Scratch<B>,
) -> Result<()> {
    let rows = step.batch.shape.tokens;
    let Scratch {
        normed,
        delta,
        qkv,
        q,
        attn,
        lora,
        profiler,
        ..
    } = scratch;
    // [tokens, hidden] → [tokens, b | c | x]
    profiler.measure(ctx, "conv_in", |ctx| {
        weights.input.forward(ctx, normed, qkv, rows)?;
        step.adapters
            .add(ctx, (index, Projection::ConvIn), normed, qkv, lora)
    })?;
    let len = rows * conv.channels;
    let shape = CausalConvShape {
        channels: conv.channels,
        kernel: conv.kernel,
        states: *shape,
        offset: 0,
    };
    profiler.measure(ctx, "short_conv", |ctx| {
        B::split_qkv(ctx, qkv, q, attn, normed, conv.parts(rows))?;
        B::mul(ctx, q, normed, delta, len)?;
        let kernel = (&weights.kernel, weights.bias.as_ref());
        B::causal_conv1d(ctx, delta, kernel, states, step.batch, q, shape)?;
        B::mul(ctx, attn, q, normed, len)
    })?;
    // [tokens, channels] → [tokens, hidden]
    profiler.measure(ctx, "conv_out", |ctx| {
        weights.out.forward(ctx, normed, delta, rows)?;
        step.adapters
            .add(ctx, (index, Projection::ConvOut), normed, delta, lora)
    })
}
