//! What both towers compute with.

use crate::linear::Linear;
use crate::named::LayerNorm;
use crate::pre_norm::{PreNormLayer, PreNormScratch, PreNormSpec, batch, upload};
use ferrum_kernels::{Act, DeviceBatch, KvF32, KvLayer, LlmBackend, Residual, RowShape};
use ferrum_types::{FloatElement, Result};

/// Buffers for so many tokens in so many sequences.
pub(crate) struct Tower<B: LlmBackend> {
    /// `[tokens, hidden]`.
    pub(crate) x: Residual<B>,
    pub(crate) scratch: PreNormScratch<B>,
    pub(crate) kv: KvLayer<B, KvF32>,
    pub(crate) batch: DeviceBatch<B>,
    /// `[tokens]`: each token's place in its sequence.
    pub(crate) positions: B::Buffer<i32>,
    /// `[seqs]`: the row of each sequence that is read.
    chosen: B::Buffer<i32>,
    /// `[seqs, hidden]`.
    pub(crate) pooled: Act<B>,
    /// `[seqs, dimensions]`.
    vectors: Act<B>,
    dimensions: usize,
}

impl<B: LlmBackend> Tower<B> {
    /// For sequences of at most `longest` tokens, which become vectors of `dimensions` elements.
    pub(crate) fn new(
        device: &B,
        spec: &PreNormSpec,
        (tokens, seqs, longest): (usize, usize, usize),
        dimensions: usize,
    ) -> Result<Self> {
        Ok(Self {
            x: device.alloc(tokens.saturating_mul(spec.hidden))?,
            scratch: PreNormScratch::new(device, spec, tokens)?,
            kv: spec.pool(device, tokens, seqs)?,
            batch: batch(device, tokens, seqs, longest)?,
            positions: device.alloc(tokens)?,
            chosen: device.alloc(seqs)?,
            pooled: device.alloc(seqs.saturating_mul(spec.hidden))?,
            vectors: device.alloc(seqs.saturating_mul(dimensions))?,
            dimensions,
        })
    }

    /// Uploads that sequences have these lengths.
    pub(crate) fn upload(&mut self, ctx: &mut B::Context, lens: &[usize]) -> Result<()> {
        let seqs: Vec<_> = lens.iter().map(|&len| (len, len)).collect();
        let positions: Vec<i32> = lens.iter().flat_map(|&len| 0..len as i32).collect();
        B::write(ctx, &mut self.positions, 0, &positions)?;
        upload::<B>(ctx, &mut self.batch, &seqs)
    }

    /// All layers, and the norm behind them; `scratch.normed` has the states then.
    pub(crate) fn run(
        &mut self,
        ctx: &mut B::Context,
        (spec, layers): (&PreNormSpec, &[PreNormLayer<B>]),
        norm: &LayerNorm<B>,
    ) -> Result<()> {
        let (kv, batch) = (&mut self.kv, &self.batch);
        self.scratch
            .layers(ctx, (spec, layers), &mut self.x, kv, batch)?;
        let rows = batch.shape.tokens;
        self.scratch.norm(ctx, &self.x, norm, spec.norm(rows))
    }

    /// Gathers rows of the states to `pooled`.
    pub(crate) fn pool(&mut self, ctx: &mut B::Context, rows: &[i32], dim: usize) -> Result<()> {
        B::write(ctx, &mut self.chosen, 0, rows)?;
        let shape = RowShape {
            rows: rows.len(),
            dim,
        };
        let (states, chosen) = (&self.scratch.normed, &self.chosen);
        B::gather_rows(ctx, states, chosen, &mut self.pooled, shape)
    }

    /// The vectors that a map makes of the first rows of `pooled`.
    pub(crate) fn project(
        &mut self,
        ctx: &mut B::Context,
        map: &dyn Linear<B>,
        rows: usize,
    ) -> Result<Vec<Vec<f32>>> {
        map.forward(ctx, &self.pooled, &mut self.vectors, rows)?;
        read_rows::<B, _>(ctx, &self.vectors, rows, self.dimensions)
    }
}

/// The first rows of a buffer.
pub(crate) fn read_rows<B: LlmBackend, T: FloatElement>(
    ctx: &mut B::Context,
    buffer: &B::Buffer<T>,
    rows: usize,
    dim: usize,
) -> Result<Vec<Vec<f32>>> {
    let mut values = vec![T::from_f32(0.0); rows * dim];
    B::read(ctx, buffer, 0, &mut values)?;
    let rows = values.chunks_exact(dim);
    let numbers = rows.map(|row| row.iter().map(|value| value.to_f32()).collect());
    Ok(numbers.collect())
}
