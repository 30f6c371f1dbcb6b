//! [`Linear`]: the only thing a model sees of a weight, and [`Embedding`], the same for a table.

use crate::weights::WeightForm;
use ferrum_kernels::{Act, Backend, GemmShape, MatShape, RowShape};
use ferrum_types::Result;
use std::sync::Arc;

/// A linear map `[in_features] → [out_features]`, whatever its weight is made of.
pub trait Linear<B: Backend>: Send + Sync {
    /// Elements of an output row.
    fn out_features(&self) -> usize;

    /// Elements of an input row.
    fn in_features(&self) -> usize;

    /// `out[rows, out_features] = x[rows, in_features] · Wᵀ (+ bias)`.
    fn forward(
        &self,
        ctx: &mut B::Context,
        x: &Act<B>,
        out: &mut Act<B>,
        rows: usize,
    ) -> Result<()>;
}

/// Rows that are looked up by id.
pub trait Embedding<B: Backend>: Send + Sync {
    /// `out[i, :]` = row `ids[i]`, as [`Backend::embedding_lookup`].
    fn lookup(
        &self,
        ctx: &mut B::Context,
        ids: &B::Buffer<i32>,
        out: &mut Act<B>,
        shape: RowShape,
    ) -> Result<()>;
}

/// A matrix in some form, possibly shared (tied embeddings), with an optional bias.
pub struct MatrixLinear<B: Backend, W: WeightForm<B>> {
    /// `[out_features, in_features]`.
    pub weight: Arc<W::Matrix>,
    /// `[out_features]`.
    pub bias: Option<B::Buffer<f32>>,
    /// `rows` = out_features, `cols` = in_features.
    pub shape: MatShape,
}

impl<B: Backend, W: WeightForm<B>> Linear<B> for MatrixLinear<B, W> {
    fn out_features(&self) -> usize {
        self.shape.rows
    }

    fn in_features(&self) -> usize {
        self.shape.cols
    }

    fn forward(
        &self,
        ctx: &mut B::Context,
        x: &Act<B>,
        out: &mut Act<B>,
        rows: usize,
    ) -> Result<()> {
        let (n, k) = (self.shape.rows, self.shape.cols);
        W::gemm(ctx, x, &self.weight, out, GemmShape { rows, n, k })?;
        match &self.bias {
            Some(bias) => B::add_bias(ctx, out, bias, RowShape { rows, dim: n }),
            None => Ok(()),
        }
    }
}

impl<B: Backend, W: WeightForm<B>> Embedding<B> for MatrixLinear<B, W> {
    fn lookup(
        &self,
        ctx: &mut B::Context,
        ids: &B::Buffer<i32>,
        out: &mut Act<B>,
        shape: RowShape,
    ) -> Result<()> {
        W::lookup(ctx, &self.weight, ids, out, shape)
    }
}
