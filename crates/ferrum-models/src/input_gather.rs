//! The exchanges around a product over inputs of all ranks, of which each makes some outputs.

use crate::inventory::{GatheredProduct, RankShard};
use crate::linear::{GrowableBuffer, Linear, MatrixLinear};
use crate::rank_index::RankIndex;
use crate::weights::WeightForm;
use ferrum_kernels::{Act, Backend, BackendCollective, BackendGraph, RowShape};
use ferrum_types::Result;
use std::sync::Arc;

/// Memory for one such product at a time, which all of a rank share.
pub(crate) struct GatherScratch<B: Backend> {
    /// Elements of a token at most.
    widths: [usize; 2],
    /// Inputs of all ranks.
    inputs: GrowableBuffer<Act<B>>,
    /// Outputs of this rank.
    outputs: GrowableBuffer<Act<B>>,
}

impl<B: Backend> GatherScratch<B> {
    pub(crate) fn new(cut: &RankShard) -> Self {
        Self {
            widths: cut.gathered_widths(),
            inputs: GrowableBuffer::new(),
            outputs: GrowableBuffer::new(),
        }
    }
}

/// What a rank does around its part of a [`GatheredProduct`].
pub struct InputGather<B: Backend> {
    product: GatheredProduct,
    place: RankIndex,
    scratch: Arc<GatherScratch<B>>,
}

impl<B: Backend> InputGather<B> {
    pub(crate) fn new(
        product: &GatheredProduct,
        cut: &RankShard,
        scratch: &Arc<GatherScratch<B>>,
    ) -> Self {
        Self {
            product: product.clone(),
            place: RankIndex::of(cut),
            scratch: Arc::clone(scratch),
        }
    }

    /// Inputs of all ranks.
    pub(crate) fn in_features(&self) -> usize {
        self.product.inputs.iter().sum()
    }

    /// Outputs of all ranks.
    pub(crate) fn out_features(&self) -> usize {
        self.product.outputs.iter().sum()
    }

    /// Outputs of this rank.
    pub(crate) fn own_outputs(&self) -> usize {
        self.place.of_rank(&self.product.outputs)
    }
}

impl<B: BackendCollective + BackendGraph> InputGather<B> {
    /// `x`, `[in_rows, inputs of this rank]`, from all ranks; then `part`, which makes `[tokens, outputs of this rank]` of it; then these
    /// from all ranks: `out`, `[tokens, out_features]`.
    pub(crate) fn forward(
        &self,
        ctx: &mut B::Context,
        (x, in_rows): (&Act<B>, usize),
        (out, tokens): (&mut Act<B>, usize),
        part: impl FnOnce(&mut B::Context, &Act<B>, &mut Act<B>) -> Result<()>,
    ) -> Result<()> {
        self.place.check::<B>(ctx)?;
        let device = B::device(ctx).clone();
        let [wide, narrow] = self.scratch.widths.map(|width| (tokens, width));
        self.scratch.inputs.with(&device, wide, B::alloc, |all| {
            B::all_gather_rows(ctx, x, all, in_rows, &self.product.inputs)?;
            self.scratch.outputs.with(&device, narrow, B::alloc, |own| {
                part(ctx, all, own)?;
                B::all_gather_rows(ctx, own, out, tokens, &self.product.outputs)
            })
        })
    }
}

/// A map over inputs of all ranks, with the bias added to the outputs of all ranks.
pub(crate) struct GatheredLinear<B: Backend, W: WeightForm<B>> {
    /// `[outputs of this rank, inputs of all ranks]`.
    pub(crate) part: MatrixLinear<B, W>,
    /// `[out_features]`, on every rank.
    pub(crate) bias: Option<B::Buffer<f32>>,
    pub(crate) gather: InputGather<B>,
}

impl<B: BackendCollective + BackendGraph, W: WeightForm<B>> Linear<B> for GatheredLinear<B, W> {
    fn out_features(&self) -> usize {
        self.gather.out_features()
    }

    fn in_features(&self) -> usize {
        self.gather.place.of_rank(&self.gather.product.inputs)
    }

    fn forward(
        &self,
        ctx: &mut B::Context,
        x: &Act<B>,
        out: &mut Act<B>,
        rows: usize,
    ) -> Result<()> {
        self.gather
            .forward(ctx, (x, rows), (&mut *out, rows), |ctx, all, own| {
                self.part.forward(ctx, all, own, rows)
            })?;
        let dim = self.out_features();
        match &self.bias {
            Some(bias) => B::add_bias(ctx, out, bias, RowShape { rows, dim }),
            None => Ok(()),
        }
    }
}
