//! [`Linear`]: the only thing a model sees of a weight, and [`Embedding`], the same for a table.
//!
//! In a group, a rank's maps are those of Megatron-LM (Shoeybi et al., 2019). A column-parallel map holds some of the
//! output features, and is a [`MatrixLinear`] like any other; [`RowParallelLinear`] holds the input features that
//! come of them and sums over ranks, and a [`GatheredLinear`](crate::input_gather::GatheredLinear) gathers these instead. [`VocabParallelEmbedding`] and [`VocabParallelLinear`] hold rows of the
//! vocabulary. The forward path sees none of that.

use crate::inventory::RankShard;
use crate::rank_index::RankIndex;
use crate::weights::WeightForm;
use ferrum_kernels::{
    Act, Activation, Backend, BackendCollective, BackendGraph, DeviceBuffer, GemmShape, Logits,
    MatShape, ReduceOp, Residual, RowShape,
};
use ferrum_types::{Error, FloatElement, Result};
use std::sync::{Arc, Mutex, PoisonError};

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

    /// `out[rows, out_features / 2] = activation(gate) · up`, where [`forward`](Self::forward) gives rows `[gate | up]`, for which `room`
    /// is there.
    fn forward_gated(
        &self,
        ctx: &mut B::Context,
        x: &Act<B>,
        activation: Activation,
        (room, out): (&mut Act<B>, &mut Act<B>),
        rows: usize,
    ) -> Result<()> {
        self.forward(ctx, x, room, rows)?;
        let dim = self.out_features() / 2;
        B::activate_split(ctx, activation, room, out, RowShape { rows, dim })
    }
}

/// A linear map whose results are compared and not computed on: an output projection, a router.
pub trait LogitLinear<B: Backend>: Send + Sync {
    /// `out[rows, out_features] = x[rows, in_features] · Wᵀ (+ bias)`.
    fn logits(
        &self,
        ctx: &mut B::Context,
        x: &Act<B>,
        out: &mut Logits<B>,
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
        out: &mut Residual<B>,
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
        self.apply(ctx, x, out, rows)
    }

    fn forward_gated(
        &self,
        ctx: &mut B::Context,
        x: &Act<B>,
        activation: Activation,
        (room, out): (&mut Act<B>, &mut Act<B>),
        rows: usize,
    ) -> Result<()> {
        let (n, k) = (self.shape.rows, self.shape.cols);
        match &self.bias {
            None => {
                let shape = GemmShape { rows, n, k };
                W::gemm_gated(ctx, x, &self.weight, activation, (room, out), shape)
            }
            Some(_) => {
                self.apply(ctx, x, room, rows)?;
                let halves = RowShape { rows, dim: n / 2 };
                B::activate_split(ctx, activation, room, out, halves)
            }
        }
    }
}

impl<B: Backend, W: WeightForm<B>> LogitLinear<B> for MatrixLinear<B, W> {
    fn logits(
        &self,
        ctx: &mut B::Context,
        x: &Act<B>,
        out: &mut Logits<B>,
        rows: usize,
    ) -> Result<()> {
        self.apply(ctx, x, out, rows)
    }
}

impl<B: Backend, W: WeightForm<B>> MatrixLinear<B, W> {
    fn apply<T: FloatElement>(
        &self,
        ctx: &mut B::Context,
        x: &Act<B>,
        out: &mut B::Buffer<T>,
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
        out: &mut Residual<B>,
        shape: RowShape,
    ) -> Result<()> {
        W::lookup(ctx, &self.weight, ids, out, shape)
    }
}

/// A map of which this rank holds some input features: the sum over ranks of their products, with the bias added
/// once, after the sum.
pub(crate) struct RowParallelLinear<B: Backend, W: WeightForm<B>> {
    /// `[out_features, inputs of this rank]`.
    pub(crate) part: MatrixLinear<B, W>,
    /// `[out_features]`, on every rank.
    pub(crate) bias: Option<B::Buffer<f32>>,
    pub(crate) place: RankIndex,
}

impl<B: BackendCollective, W: WeightForm<B>> Linear<B> for RowParallelLinear<B, W> {
    fn out_features(&self) -> usize {
        self.part.shape.rows
    }

    fn in_features(&self) -> usize {
        self.part.shape.cols
    }

    fn forward(
        &self,
        ctx: &mut B::Context,
        x: &Act<B>,
        out: &mut Act<B>,
        rows: usize,
    ) -> Result<()> {
        self.place.check::<B>(ctx)?;
        self.part.forward(ctx, x, out, rows)?;
        let dim = self.out_features();
        B::all_reduce(ctx, out, rows * dim, ReduceOp::Sum)?;
        match &self.bias {
            Some(bias) => B::add_bias(ctx, out, bias, RowShape { rows, dim }),
            None => Ok(()),
        }
    }
}

/// Memory that grows to the largest need and stays. The threads of a group never share one.
pub(crate) struct GrowableBuffer<T>(Mutex<Vec<T>>);

impl<T: DeviceBuffer> GrowableBuffer<T> {
    pub(crate) fn new() -> Self {
        Self(Mutex::new(Vec::new()))
    }

    /// Calls `f` with a buffer for `rows` rows of `dim` elements, which `device` makes.
    pub(crate) fn with<B: BackendGraph, R>(
        &self,
        device: &B,
        (rows, dim): (usize, usize),
        alloc: impl FnOnce(&B, usize) -> Result<T>,
        f: impl FnOnce(&mut T) -> Result<R>,
    ) -> Result<R> {
        let mut held = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if held.last().is_none_or(|last| last.len() < rows * dim) {
            // Captured work may still use the earlier ones, whose sizes doubling bounds.
            let rows = match device.captures() {
                true => rows.next_power_of_two(),
                false => {
                    held.clear();
                    rows
                }
            };
            held.push(alloc(device, rows * dim)?);
        }
        match held.last_mut() {
            Some(buffer) => f(buffer),
            None => Err(Error::invalid("linear", "no buffer was made")),
        }
    }
}

/// An embedding table of which this rank holds the rows of some tokens. The others come as zeros, and the sum over
/// ranks is the whole.
pub(crate) struct VocabParallelEmbedding<B: Backend, W: WeightForm<B>> {
    /// `[tokens of this rank, hidden]`.
    table: MatrixLinear<B, W>,
    /// The first of them.
    first: usize,
    ids: GrowableBuffer<B::Buffer<i32>>,
    place: RankIndex,
}

impl<B: Backend, W: WeightForm<B>> VocabParallelEmbedding<B, W> {
    pub(crate) fn new(table: MatrixLinear<B, W>, cut: &RankShard) -> Self {
        Self {
            table,
            first: cut.tokens().start,
            ids: GrowableBuffer::new(),
            place: RankIndex::of(cut),
        }
    }
}

impl<B: BackendCollective + BackendGraph, W: WeightForm<B>> Embedding<B>
    for VocabParallelEmbedding<B, W>
{
    fn lookup(
        &self,
        ctx: &mut B::Context,
        ids: &B::Buffer<i32>,
        out: &mut Residual<B>,
        shape: RowShape,
    ) -> Result<()> {
        self.place.check::<B>(ctx)?;
        let device = B::device(ctx).clone();
        self.ids.with(&device, (shape.rows, 1), B::alloc, |own| {
            B::ids_from(ctx, ids, own, self.first, shape.rows)?;
            self.table.lookup(ctx, own, out, shape)
        })?;
        B::all_reduce(ctx, out, shape.rows * shape.dim, ReduceOp::Sum)
    }
}

/// An output projection of which this rank holds the rows of some tokens: the logits of all ranks side by side.
pub(crate) struct VocabParallelLinear<B: Backend, W: WeightForm<B>> {
    /// `[tokens of this rank, hidden]`.
    part: MatrixLinear<B, W>,
    /// Tokens of each rank.
    counts: Vec<usize>,
    logits: GrowableBuffer<Logits<B>>,
    place: RankIndex,
}

impl<B: Backend, W: WeightForm<B>> VocabParallelLinear<B, W> {
    pub(crate) fn new(part: MatrixLinear<B, W>, cut: &RankShard) -> Self {
        Self {
            part,
            counts: cut.token_counts(),
            logits: GrowableBuffer::new(),
            place: RankIndex::of(cut),
        }
    }
}

impl<B: BackendCollective + BackendGraph, W: WeightForm<B>> LogitLinear<B>
    for VocabParallelLinear<B, W>
{
    fn logits(
        &self,
        ctx: &mut B::Context,
        x: &Act<B>,
        out: &mut Logits<B>,
        rows: usize,
    ) -> Result<()> {
        self.place.check::<B>(ctx)?;
        let device = B::device(ctx).clone();
        let size = (rows, self.part.shape.rows);
        self.logits.with(&device, size, B::alloc, |part| {
            self.part.logits(ctx, x, part, rows)?;
            B::all_gather_rows(ctx, part, out, rows, &self.counts)
        })
    }
}
