//! [`Scratch`]: the activations of a step.

use super::StepState;
use super::linear_attention::{GateScratch, gate_widths};
use super::mla::{MlaScratch, MlaWidths};
use super::norm::add;
use super::per_layer::PerLayerScratch;
use super::widths::scratch_widths;
use crate::experts::{MoeScratch, MoeWidths};
use crate::lora::LoraScratch;
use crate::profile::Profiler;
use crate::spec::{AttentionSpec, DecoderSpec, QkNormSpec};
use ferrum_kernels::{Act, Backend, Residual};
use ferrum_types::Result;

/// Activations of a step, reused by all layers. Rows are tokens.
pub(crate) struct Scratch<B: Backend> {
    /// `[tokens, hidden]`: the residual stream.
    pub(crate) residual: Residual<B>,
    /// `[tokens, hidden]`: input of a part.
    pub(crate) normed: Act<B>,
    /// `[tokens, hidden]`: output of a part, not yet in the residual.
    pub(crate) delta: Act<B>,
    /// `[tokens, q_dim + k_dim + v_dim]`.
    pub(crate) qkv: Act<B>,
    /// `[tokens, q_dim]`.
    pub(crate) q: Act<B>,
    /// `[tokens, heads · value_dim]`: attention's output.
    pub(crate) attn: Act<B>,
    /// `[tokens, 2·intermediate]`.
    pub(crate) gate_up: Act<B>,
    /// `[tokens, intermediate]`.
    pub(crate) gated: Act<B>,
    /// `[tokens, q_dim]`, `[tokens, k_dim]` and `[tokens, v_dim]`: for layers whose heads are parted first.
    pub(crate) heads: [Act<B>; 3],
    /// `[tokens, hidden]`: for layers without a norm before their parts.
    pub(crate) zeros: Act<B>,
    /// `[tokens, hidden]`: for learned positions.
    pub(crate) positions: Residual<B>,
    /// `[tokens]` zeros, where weights of all heads are repeated for each token.
    pub(crate) first_rows: B::Buffer<i32>,
    /// Whether `normed` and `delta` have changed places.
    exchanged: bool,
    /// For layers with gates, if there are any.
    pub(crate) gates: Option<GateScratch<B>>,
    /// For layers with latent attention, if there are any.
    pub(crate) mla: Option<MlaScratch<B>>,
    /// For layers with embeddings of their own, if they have some.
    pub(crate) per_layer: Option<PerLayerScratch<B>>,
    /// For layers with experts, if there are any.
    pub(crate) moe: Option<MoeScratch<B>>,
    /// For adapters, once there has been one.
    pub(crate) lora: Option<LoraScratch<B>>,
    pub(crate) profiler: Profiler<B>,
}

impl<B: Backend> Scratch<B> {
    pub(crate) fn alloc(
        device: &B,
        spec: &DecoderSpec,
        max_tokens: usize,
        profile: bool,
    ) -> Result<Self> {
        let [
            residual,
            normed,
            delta,
            qkv,
            q,
            attn,
            gate_up,
            gated,
            others @ ..,
        ] = scratch_widths(spec);
        let [queries, keys, values, zeros, positions] = others;
        let alloc = |width: usize| device.alloc::<B::Act>(max_tokens * width);
        let repeats = spec.layers.iter().any(|layer| match &layer.attention {
            AttentionSpec::Gqa(gqa) => gqa.qk_norm == QkNormSpec::LayerEach,
            _ => false,
        });
        let repeated = usize::from(repeats) * max_tokens;
        Ok(Self {
            residual: device.alloc(max_tokens * residual)?,
            normed: alloc(normed)?,
            delta: alloc(delta)?,
            qkv: alloc(qkv)?,
            q: alloc(q)?,
            attn: alloc(attn)?,
            gate_up: alloc(gate_up)?,
            gated: alloc(gated)?,
            heads: [alloc(queries)?, alloc(keys)?, alloc(values)?],
            zeros: alloc(zeros)?,
            positions: device.alloc(max_tokens * positions)?,
            first_rows: device.alloc(repeated)?,
            exchanged: false,
            gates: gate_widths(spec)
                .map(|widths| GateScratch::alloc(device, widths, max_tokens))
                .transpose()?,
            mla: MlaWidths::of(spec)
                .map(|widths| MlaScratch::alloc(device, widths, max_tokens))
                .transpose()?,
            per_layer: match &spec.per_layer {
                Some(per_layer) => Some(PerLayerScratch::alloc(device, per_layer, max_tokens)?),
                None => None,
            },
            moe: MoeWidths::of(spec)
                .map(|widths| MoeScratch::alloc(device, widths, max_tokens))
                .transpose()?,
            lora: None,
            profiler: Profiler::new(device, profile)?,
        })
    }
}

impl<B: Backend> Scratch<B> {
    /// Makes what is in `normed` what is pending.
    pub(super) fn exchange(&mut self) {
        std::mem::swap(&mut self.normed, &mut self.delta);
        self.exchanged = !self.exchanged;
    }

    /// Every step begins with the same buffers in the same places, as captured ones name them: a step that failed may
    /// have left them exchanged.
    pub(crate) fn begin_step(&mut self) {
        if self.exchanged {
            self.exchange();
        }
    }

    /// Adds what the last layer left pending, so that `residual` is the stream behind it.
    pub(crate) fn add_pending(
        &mut self,
        ctx: &mut B::Context,
        step: &StepState<'_, B>,
    ) -> Result<()> {
        let (spec, rows) = (step.spec, step.batch.shape.tokens);
        let Self {
            residual,
            delta,
            profiler,
            ..
        } = self;
        profiler.measure(ctx, "residual", |ctx| {
            add::<B>(ctx, spec, residual, delta, rows)
        })
    }
}
