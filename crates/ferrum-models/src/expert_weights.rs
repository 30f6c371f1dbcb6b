//! Forms of weights in which a backend with expert kernels keeps stacks of experts.
//!
//! [`WeightForm`] says for any backend how experts would be loaded; the forms of `weights.rs` load none. [`Moe`] adds
//! stacks to them, of which `experts.rs` computes.

use crate::experts::{
    ExpertSource, ExpertStacks, ExpertSums, Experts, PerHeadLinear, StackedExperts, StackedHeads,
};
use crate::spec::MoeSpec;
use crate::weights::{
    Dequantized, MatrixUse, Native, Prepared, WeightForm, experts_are_floats, float_part,
};
use ferrum_kernels::{
    Act, Activation, BackendMoeFused, ExpertShape, GemmShape, LlmBackend, MoeLlmBackend,
    QuantWeights, Residual, RowShape, WeightPart,
};
use ferrum_types::{FloatElement, Result, SumSplit};
use std::marker::PhantomData;

/// A form of weights in which stacks of experts are loaded too.
pub trait ExpertWeightForm<B: BackendMoeFused> {
    /// As [`WeightForm::keeps_experts`].
    fn keeps_stack(source: &ExpertSource<'_>) -> bool;

    /// Loads one stack.
    ///
    /// # Errors
    /// As [`WeightForm::load`].
    fn load_stack(device: &B, source: &ExpertSource<'_>, shape: ExpertShape) -> Result<B::Experts>;
}

impl<B: BackendMoeFused> ExpertWeightForm<B> for Dequantized {
    fn keeps_stack(source: &ExpertSource<'_>) -> bool {
        experts_are_floats(source)
    }

    fn load_stack(device: &B, source: &ExpertSource<'_>, shape: ExpertShape) -> Result<B::Experts> {
        load_dequantized(device, source, shape)
    }
}

/// A stack of floats as they are in the file, all else dequantised.
fn load_dequantized<B: BackendMoeFused>(
    device: &B,
    source: &ExpertSource<'_>,
    shape: ExpertShape,
) -> Result<B::Experts> {
    let all = match source {
        ExpertSource::Stack(part) => {
            let stack = Prepared::floats::<B>(&QuantWeights::Gguf(*part), shape.k)?;
            let WeightPart { bytes, dtype, .. } = float_part(&stack.weights())?;
            return device.load_experts(bytes, dtype, shape);
        }
        ExpertSource::Each(all) => all,
        ExpertSource::Reordered(stack) => {
            let own = stack.gather()?;
            return load_dequantized(device, &ExpertSource::Stack(own.part()), shape);
        }
    };
    let floats = all.iter().map(|one| Prepared::floats::<B>(one, shape.k));
    let floats = floats.collect::<Result<Vec<_>>>()?;
    let parts = floats.iter().map(|one| float_part(&one.weights()));
    let parts = parts.collect::<Result<Vec<_>>>()?;
    device.load_expert_parts(&parts, shape.k)
}

impl<B: MoeLlmBackend> ExpertWeightForm<B> for Native {
    fn keeps_stack(source: &ExpertSource<'_>) -> bool {
        if experts_are_floats(source) {
            return true;
        }
        match source {
            ExpertSource::Stack(part) => B::is_native(part.ty),
            ExpertSource::Each(all) => all.iter().all(B::is_native_expert),
            ExpertSource::Reordered(stack) => B::is_native(stack.ty()),
        }
    }

    fn load_stack(device: &B, source: &ExpertSource<'_>, shape: ExpertShape) -> Result<B::Experts> {
        match source {
            _ if !<Self as ExpertWeightForm<B>>::keeps_stack(source) => {
                load_dequantized(device, source, shape)
            }
            ExpertSource::Stack(part) => device.load_quant_experts(part.bytes, part.ty, shape),
            ExpertSource::Each(_) if experts_are_floats(source) => {
                load_dequantized(device, source, shape)
            }
            ExpertSource::Each(all) => device.load_layer_experts(all, shape.k),
            ExpertSource::Reordered(stack) => {
                let own = stack.gather()?;
                let stack = ExpertSource::Stack(own.part());
                <Self as ExpertWeightForm<B>>::load_stack(device, &stack, shape)
            }
        }
    }
}

/// The form `W`, and stacks of experts in it: for backends with expert kernels.
#[derive(Clone, Copy, Debug)]
pub struct Moe<W>(PhantomData<W>);

impl<B, W> WeightForm<B> for Moe<W>
where
    B: LlmBackend + BackendMoeFused,
    W: WeightForm<B> + ExpertWeightForm<B>,
{
    type Matrix = W::Matrix;
    type Stack = B::Experts;

    const EXPERTS: bool = true;

    fn keeps(weights: &QuantWeights<'_>) -> bool {
        W::keeps(weights)
    }

    fn keeps_experts(source: &ExpertSource<'_>) -> bool {
        <W as ExpertWeightForm<B>>::keeps_stack(source)
    }

    fn load(
        device: &B,
        parts: &[QuantWeights<'_>],
        cols: usize,
        for_use: MatrixUse,
    ) -> Result<W::Matrix> {
        W::load(device, parts, cols, for_use)
    }

    fn split_sums(matrix: &mut W::Matrix, split: SumSplit) {
        W::split_sums(matrix, split);
    }

    fn gemm<T: FloatElement>(
        ctx: &mut B::Context,
        x: &Act<B>,
        matrix: &W::Matrix,
        out: &mut B::Buffer<T>,
        shape: GemmShape,
    ) -> Result<()> {
        W::gemm(ctx, x, matrix, out, shape)
    }

    fn gemm_gated(
        ctx: &mut B::Context,
        x: &Act<B>,
        matrix: &W::Matrix,
        activation: Activation,
        to: (&mut Act<B>, &mut Act<B>),
        shape: GemmShape,
    ) -> Result<()> {
        W::gemm_gated(ctx, x, matrix, activation, to, shape)
    }

    fn lookup(
        ctx: &mut B::Context,
        table: &W::Matrix,
        ids: &B::Buffer<i32>,
        out: &mut Residual<B>,
        shape: RowShape,
    ) -> Result<()> {
        W::lookup(ctx, table, ids, out, shape)
    }

    fn load_stack(device: &B, source: &ExpertSource<'_>, shape: ExpertShape) -> Result<B::Experts> {
        <W as ExpertWeightForm<B>>::load_stack(device, source, shape)
    }

    fn split_stack_sums(stack: &mut B::Experts, split: SumSplit) {
        B::split_expert_sums(stack, split);
    }

    fn experts(
        stacks: ExpertStacks<B, B::Experts>,
        spec: &MoeSpec,
        sums: ExpertSums<B>,
    ) -> Box<dyn Experts<B>> {
        Box::new(StackedExperts {
            stacks,
            spec: spec.clone(),
            sums,
        })
    }

    fn per_head_linear(stack: B::Experts, shape: ExpertShape) -> Box<dyn PerHeadLinear<B>> {
        Box::new(StackedHeads { stack, shape })
    }
}
