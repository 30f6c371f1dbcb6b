//! The part of a layer that looks at each token alone.

use super::norm::Norm;
use super::{Scratch, StepState};
use crate::experts::Experts;
use crate::inventory::Projection;
use crate::linear::{Linear, LogitLinear};
use crate::spec::MlpSpec;
use ferrum_kernels::{Activation, Backend, RowShape};
use ferrum_types::{Error, Result};

/// Weights of the part that looks at each token alone, of the kind that the layer's spec says.
pub(crate) enum FeedForwardWeights<B: Backend> {
    Mlp(MlpWeights<B>),
    Moe(MoeWeights<B>),
}

/// Weights of a feed-forward of linear maps.
pub(crate) struct MlpWeights<B: Backend> {
    /// gate and up as one projection; without a gate, up alone.
    pub(crate) gate_up: Box<dyn Linear<B>>,
    pub(crate) down: Box<dyn Linear<B>>,
}

/// Weights of a mixture of experts.
pub(crate) struct MoeWeights<B: Backend> {
    /// Gives a logit for each expert.
    pub(crate) router: Box<dyn LogitLinear<B>>,
    pub(crate) experts: Box<dyn Experts<B>>,
    pub(crate) shared: Option<SharedExpertWeights<B>>,
    pub(crate) norms: Option<ExpertNorms<B>>,
}

/// Norms of experts that stand beside a shared one, each in a branch of its own.
pub(crate) struct ExpertNorms<B: Backend> {
    pub(crate) router: Norm<B>,
    pub(crate) experts: Norm<B>,
    pub(crate) post_experts: Norm<B>,
    pub(crate) post_shared: Norm<B>,
}

/// Weights of the expert of all tokens. Of a rank, `down` gives a part of a sum that is made with the other experts'.
pub(crate) struct SharedExpertWeights<B: Backend> {
    pub(crate) mlp: MlpWeights<B>,
    pub(crate) activation: Activation,
    /// Gives the logit by whose sigmoid its output is multiplied.
    pub(crate) gate: Option<Box<dyn LogitLinear<B>>>,
}

impl<B: Backend> SharedExpertWeights<B> {
    /// `normed` → `delta`, or to the output in the experts' scratch where it has a gate, beside the gate's logits.
    fn forward(&self, ctx: &mut B::Context, rows: usize, scratch: &mut Scratch<B>) -> Result<()> {
        let Scratch {
            normed,
            delta,
            gate_up,
            gated,
            moe,
            profiler,
            ..
        } = scratch;
        let shared = moe.as_mut().and_then(|moe| moe.shared.as_mut());
        profiler.measure(ctx, "shared_expert", |ctx| {
            let out = match (&self.gate, shared) {
                (Some(gate), Some(shared)) => {
                    // [tokens, hidden] → [tokens, 1]
                    gate.logits(ctx, normed, &mut shared.logits, rows)?;
                    &mut shared.output
                }
                _ => delta,
            };
            // [tokens, hidden] → [tokens, gate | up] → [tokens, intermediate] → [tokens, hidden]
            let inner = (gate_up, &mut *gated);
            let maps = &self.mlp.gate_up;
            maps.forward_gated(ctx, normed, self.activation, inner, rows)?;
            self.mlp.down.forward(ctx, gated, out, rows)
        })
    }
}

/// `normed` → `delta` through experts, and through the shared one if there is one. In branches, what `normed` has is for the
/// shared one alone, and the others read the stream.
pub(super) fn moe_forward<B: Backend>(
    ctx: &mut B::Context,
    weights: &MoeWeights<B>,
    step: &StepState<'_, B>,
    scratch: &mut Scratch<B>,
) -> Result<()> {
    let (spec, rows) = (step.spec, step.batch.shape.tokens);
    if let Some(shared) = &weights.shared {
        shared.forward(ctx, rows, scratch)?;
    }
    let Scratch {
        residual,
        normed,
        delta,
        moe,
        profiler,
        ..
    } = scratch;
    let Some(moe) = moe else {
        let reason = "the scratch of a model without experts".to_owned();
        return Err(Error::invalid("layer", reason));
    };
    if let Some(norms) = &weights.norms {
        profiler.measure(ctx, "router", |ctx| {
            norms
                .post_shared
                .norm(ctx, spec, delta, &mut moe.branch, rows)?;
            norms.router.norm(ctx, spec, residual, normed, rows)?;
            weights.router.logits(ctx, normed, &mut moe.logits, rows)
        })?;
        profiler.measure(ctx, "experts", |ctx| {
            norms.experts.norm(ctx, spec, residual, normed, rows)?;
            weights.experts.forward(ctx, normed, moe, delta, rows)?;
            norms.post_experts.norm(ctx, spec, delta, normed, rows)?;
            B::add_inplace(ctx, normed, &moe.branch, rows * spec.hidden_size)
        })?;
        scratch.exchange();
        return Ok(());
    }
    // [tokens, hidden] → [tokens, experts]
    profiler.measure(ctx, "router", |ctx| {
        weights.router.logits(ctx, normed, &mut moe.logits, rows)
    })?;
    profiler.measure(ctx, "experts", |ctx| {
        weights.experts.forward(ctx, normed, moe, delta, rows)
    })
}

/// `normed` → `delta` through a feed-forward of linear maps.
pub(super) fn mlp_forward<B: Backend>(
    ctx: &mut B::Context,
    index: usize,
    (mlp, gated, weights): (&MlpSpec, bool, &MlpWeights<B>),
    step: &StepState<'_, B>,
    scratch: &mut Scratch<B>,
) -> Result<()> {
    let rows = step.batch.shape.tokens;
    let shape = RowShape {
        rows,
        dim: mlp.intermediate,
    };
    let Scratch {
        normed,
        gate_up,
        gated: inner,
        delta,
        lora,
        profiler,
        ..
    } = scratch;
    // [tokens, hidden] → [tokens, gate | up] → [tokens, intermediate] → [tokens, hidden]
    let function = mlp.activation.function();
    let place = (index, Projection::GateUp);
    profiler.measure(ctx, "gate_up", |ctx| {
        if gated && !step.adapters.adds_to(place) {
            let to = (&mut *gate_up, &mut *inner);
            return (weights.gate_up).forward_gated(ctx, normed, function, to, rows);
        }
        weights.gate_up.forward(ctx, normed, gate_up, rows)?;
        step.adapters.add(ctx, place, normed, gate_up, lora)?;
        match gated {
            false => B::activate(ctx, function, gate_up, None, inner, rows * shape.dim),
            true => B::activate_split(ctx, function, gate_up, inner, shape),
        }
    })?;
    profiler.measure(ctx, "down", |ctx| {
        weights.down.forward(ctx, inner, delta, rows)?;
        step.adapters
            .add(ctx, (index, Projection::Down), inner, delta, lora)
    })
}
