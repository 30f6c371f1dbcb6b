//! Pixel values through the tower and its projection.

use super::config::VisionSpec;
use super::load::VisionWeights;
use crate::clip::{Tower, read_rows, unfold};
use ferrum_kernels::{Act, LlmBackend, NormShape, Residual, RowShape};
use ferrum_types::{Error, Result};

/// An object-safe view on a [`VisionRunner`].
pub trait ImageEncoder: Send {
    /// Name of the backend.
    fn backend(&self) -> &'static str;

    /// What is being run.
    fn spec(&self) -> &VisionSpec;

    /// The embeddings of an image of `[3, side, side]` numbers, `[image tokens, hidden]`. They stand in the residual stream
    /// of the decoder as they are: its factor on embeddings of tokens is not theirs.
    ///
    /// # Errors
    /// `InvalidArgument` for another number of values; what the device says.
    fn encode(&mut self, pixels: &[f32]) -> Result<Vec<f32>>;
}

/// An image tower on a device. Images are computed one by one: a real one has thousands of patches.
pub struct VisionRunner<B: LlmBackend> {
    spec: VisionSpec,
    weights: VisionWeights<B>,
    ctx: B::Context,
    tower: Tower<B>,
    /// `[patches, 3 · patch²]`.
    patches: Act<B>,
    /// `[image tokens, tower's hidden]`.
    zeros: Residual<B>,
    /// `[pooled², image tokens]`: the patches of each embedding's square, by their place in it.
    squares: Vec<B::Buffer<i32>>,
    /// `[image tokens, hidden]`.
    embeddings: Act<B>,
}

impl<B: LlmBackend> VisionRunner<B> {
    /// Allocates for one image at a time.
    ///
    /// # Errors
    /// What the device says.
    pub fn new(device: &B, spec: VisionSpec, weights: VisionWeights<B>) -> Result<Self> {
        let (image, out) = (&spec.image, spec.image_tokens());
        let (grid, width) = (image.grid(), image.stack.hidden);
        let patches = grid * grid;
        let squares = squares(&spec).into_iter();
        Ok(Self {
            ctx: device.new_context()?,
            tower: Tower::new(device, &image.stack, (patches, 1, patches), 0)?,
            patches: device.alloc(patches * 3 * image.patch * image.patch)?,
            zeros: device.alloc(out * width)?,
            squares: squares
                .map(|rows| device.from_slice(&rows))
                .collect::<Result<_>>()?,
            embeddings: device.alloc(out * spec.hidden)?,
            spec,
            weights,
        })
    }

    /// The means of squares of states, in `tower.x`.
    fn pool(&mut self) -> Result<()> {
        let (ctx, tower) = (&mut self.ctx, &mut self.tower);
        let (rows, dim) = (self.spec.image_tokens(), self.spec.image.stack.hidden);
        let len = rows * dim;
        B::copy_slice(ctx, &self.zeros, 0, &mut tower.x, 0, len)?;
        let part = 1.0 / self.squares.len() as f32;
        let scratch = &mut tower.scratch;
        for square in &self.squares {
            // [patches, dim] → [image tokens, dim]
            let (states, out) = (&scratch.normed, &mut scratch.delta);
            B::gather_rows(ctx, states, square, out, RowShape { rows, dim })?;
            B::scaled_add_inplace(ctx, &mut tower.x, &scratch.delta, part, len)?;
        }
        Ok(())
    }
}

/// For each place in a square of patches, the patch there of every square.
fn squares(spec: &VisionSpec) -> Vec<Vec<i32>> {
    let (grid, side, pooled) = (spec.image.grid(), spec.side_tokens, spec.pooled());
    let pairs = |end: usize| (0..end).flat_map(move |y| (0..end).map(move |x| (y, x)));
    let place = |(dy, dx)| {
        let squares = pairs(side);
        let patch = squares.map(|(y, x)| (y * pooled + dy) * grid + x * pooled + dx);
        patch.map(|patch| patch as i32).collect()
    };
    pairs(pooled).map(place).collect()
}

impl<B: LlmBackend> ImageEncoder for VisionRunner<B> {
    fn backend(&self) -> &'static str {
        B::NAME
    }

    fn spec(&self) -> &VisionSpec {
        &self.spec
    }

    fn encode(&mut self, pixels: &[f32]) -> Result<Vec<f32>> {
        let image = &self.spec.image;
        let expected = image.values();
        if pixels.len() != expected {
            let reason = format!("found {} values, an image has {expected}", pixels.len());
            return Err(Error::invalid("vision", reason));
        }
        let (ctx, weights, tower) = (&mut self.ctx, &self.weights, &mut self.tower);
        let (patches, dim) = (image.grid() * image.grid(), image.stack.hidden);
        tower.upload(ctx, &[patches])?;
        let mut values = Vec::with_capacity(patches * 3 * image.patch * image.patch);
        unfold(image, false, pixels, &mut values);
        B::write(ctx, &mut self.patches, 0, &values)?;
        let shape = RowShape { rows: patches, dim };
        let places = &weights.positions;
        places.lookup(ctx, &tower.positions, &mut tower.x, shape)?;
        // [patches, 3 · patch²] → [patches, dim]
        let stem = &mut tower.scratch.delta;
        weights.stem.forward(ctx, &self.patches, stem, patches)?;
        B::add_inplace(ctx, &mut tower.x, stem, patches * dim)?;
        let layers = (&image.stack, &weights.layers[..]);
        tower.run(ctx, layers, &weights.norm)?;
        self.pool()?;
        let (ctx, weights, tower) = (&mut self.ctx, &self.weights, &mut self.tower);
        let rows = self.spec.image_tokens();
        let eps = self.spec.norm_eps;
        let (normed, norm) = (&mut tower.scratch.normed, &weights.projection_norm);
        B::rms_norm(ctx, &tower.x, norm, normed, NormShape { rows, dim, eps })?;
        // [image tokens, dim] → [image tokens, hidden]
        let out = &mut self.embeddings;
        weights.projection.forward(ctx, normed, out, rows)?;
        let rows = read_rows::<B, _>(ctx, out, rows, self.spec.hidden)?;
        Ok(rows.concat())
    }
}
