//! Where parts of a layer meet the residual stream: what is pending is added, and norms stand before and behind parts.

use super::{Scratch, StepState};
use crate::spec::{DecoderSpec, NormKind};
use ferrum_kernels::{Act, Backend, NormShape, Residual};
use ferrum_types::{FloatElement, Result};

/// Weights of a norm of the kind that the spec says.
pub(crate) struct Norm<B: Backend> {
    pub(crate) weight: B::Buffer<f32>,
    pub(crate) bias: Option<B::Buffer<f32>>,
}

impl<B: Backend> Norm<B> {
    /// The stream, once `delta` is added, normed in `out`.
    pub(crate) fn add_and_norm(
        &self,
        ctx: &mut B::Context,
        spec: &DecoderSpec,
        (residual, delta): (&mut Residual<B>, &Act<B>),
        out: &mut Act<B>,
        rows: usize,
    ) -> Result<()> {
        if spec.norm == NormKind::Rms && spec.scales.residual == 1.0 {
            let shape = shape(spec, rows);
            return B::fused_add_rms_norm(ctx, residual, delta, &self.weight, out, shape);
        }
        add::<B>(ctx, spec, residual, delta, rows)?;
        self.norm(ctx, spec, residual, out, rows)
    }

    /// Rows of the width of the stream, normed in `out`.
    pub(super) fn norm<T: FloatElement>(
        &self,
        ctx: &mut B::Context,
        spec: &DecoderSpec,
        x: &B::Buffer<T>,
        out: &mut Act<B>,
        rows: usize,
    ) -> Result<()> {
        let shape = shape(spec, rows);
        match spec.norm {
            NormKind::Rms => B::rms_norm(ctx, x, &self.weight, out, shape),
            NormKind::Layer { .. } => {
                B::layer_norm(ctx, x, &self.weight, self.bias.as_ref(), out, shape)
            }
        }
    }
}

fn shape(spec: &DecoderSpec, rows: usize) -> NormShape {
    NormShape {
        rows,
        dim: spec.hidden_size,
        eps: spec.norm_eps,
    }
}

/// Adds what a part gave to the stream.
pub(super) fn add<B: Backend>(
    ctx: &mut B::Context,
    spec: &DecoderSpec,
    residual: &mut Residual<B>,
    delta: &Act<B>,
    rows: usize,
) -> Result<()> {
    let (scale, len) = (spec.scales.residual, rows * spec.hidden_size);
    match scale == 1.0 {
        true => B::add_inplace(ctx, residual, delta, len),
        false => B::scaled_add_inplace(ctx, residual, delta, scale, len),
    }
}

/// Gives the next part its input in `normed`: the stream, with what is pending, behind the norm if there is one.
pub(super) fn next_input<B: Backend>(
    ctx: &mut B::Context,
    label: &'static str,
    (norm, pending): (Option<&Norm<B>>, bool),
    step: &StepState<'_, B>,
    scratch: &mut Scratch<B>,
) -> Result<()> {
    let (spec, rows) = (step.spec, step.batch.shape.tokens);
    let Scratch {
        residual,
        normed,
        delta,
        zeros,
        profiler,
        ..
    } = scratch;
    profiler.measure(ctx, label, |ctx| match (norm, pending) {
        (Some(norm), true) => norm.add_and_norm(ctx, spec, (residual, delta), normed, rows),
        (Some(norm), false) => norm.norm(ctx, spec, residual, normed, rows),
        (None, pending) => {
            if pending {
                add::<B>(ctx, spec, residual, delta, rows)?;
            }
            // The stream may be of another type than what parts read.
            let len = rows * spec.hidden_size;
            B::copy_slice(ctx, zeros, 0, normed, 0, len)?;
            B::add_inplace(ctx, normed, residual, len)
        }
    })
}

/// The input of a feed-forward beside attention: the same stream as attention's, behind a norm of its own if there is
/// one. What attention gave is added.
pub(super) fn parallel_input<B: Backend>(
    ctx: &mut B::Context,
    norm: Option<&Norm<B>>,
    step: &StepState<'_, B>,
    scratch: &mut Scratch<B>,
) -> Result<()> {
    let (spec, rows) = (step.spec, step.batch.shape.tokens);
    let Scratch {
        residual,
        normed,
        delta,
        profiler,
        ..
    } = scratch;
    profiler.measure(ctx, "ffn_norm", |ctx| {
        if let Some(norm) = norm {
            norm.norm(ctx, spec, residual, normed, rows)?;
        }
        add::<B>(ctx, spec, residual, delta, rows)
    })
}

/// The norm behind a part, if there is one: what is pending in `delta` is normed.
pub(super) fn norm_output<B: Backend>(
    ctx: &mut B::Context,
    label: &'static str,
    norm: Option<&Norm<B>>,
    step: &StepState<'_, B>,
    scratch: &mut Scratch<B>,
) -> Result<()> {
    let Some(norm) = norm else {
        return Ok(());
    };
    let (spec, rows) = (step.spec, step.batch.shape.tokens);
    let Scratch {
        normed,
        delta,
        profiler,
        ..
    } = scratch;
    profiler.measure(ctx, label, |ctx| norm.norm(ctx, spec, delta, normed, rows))?;
    scratch.exchange();
    Ok(())
}

/// Multiplies the stream behind a layer, of which a part is pending.
pub(super) fn scale_output<B: Backend>(
    ctx: &mut B::Context,
    scale: Option<f32>,
    step: &StepState<'_, B>,
    scratch: &mut Scratch<B>,
) -> Result<()> {
    let Some(scale) = scale else {
        return Ok(());
    };
    let len = step.batch.shape.tokens * step.spec.hidden_size;
    let Scratch {
        residual,
        delta,
        profiler,
        ..
    } = scratch;
    profiler.measure(ctx, "output_scale", |ctx| {
        B::scale_inplace(ctx, residual, scale, len)?;
        B::scale_inplace(ctx, delta, scale, len)
    })
}
