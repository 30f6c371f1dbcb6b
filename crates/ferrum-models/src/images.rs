//! Images in a step: rows whose embeddings are given instead of looked up, and which see all of their image.
//!
//! A token of an image sees the tokens of the image that follow it, too ("Gemma 3 Technical Report", 2025), so all that is
//! left of an image is computed in one step. The keys of the step are in the cache before attention reads it; hence the rows
//! of images are attended once more, as sequences of their own that end with their image and have no mask. Other rows are as
//! in any step, and a step without images has nothing to do with all this.

pub use crate::batch::ImageRows;
use crate::batch::StepBatch;
use crate::cache::CacheGroup;
use crate::kv_layer::AnyKvLayer;
use crate::spec::{AttentionSpec, DecoderSpec};
use ferrum_kernels::{Act, AttnConfig, Backend, BatchShape, DeviceBatch, Residual};
use ferrum_types::{Error, FloatElement, Result};
use std::ops::Range;
use std::sync::Arc;

/// An image in a prompt.
#[derive(Clone, Debug, PartialEq)]
pub struct ImageSpan {
    /// Position of its first token.
    pub start: usize,
    /// How many tokens it has.
    pub tokens: usize,
    /// `[tokens, hidden]`: what stands in the residual stream in the place of their embeddings.
    pub embeddings: Arc<[f32]>,
}

impl ImageSpan {
    /// Positions of its tokens.
    pub fn positions(&self) -> Range<usize> {
        self.start..self.start.saturating_add(self.tokens)
    }
}

/// Where the end of an image that is cut by `start..end` is, if it is: a step ends before it, or with it.
pub fn image_cut_by(images: &[ImageSpan], end: usize) -> Option<Range<usize>> {
    let mut positions = images.iter().map(ImageSpan::positions);
    positions.find(|image| image.start < end && end < image.end)
}

impl StepBatch {
    /// Says that the sequence which was added last has an image. What of it is in the step gets its embeddings.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when the step ends inside the image.
    pub fn add_image(&mut self, image: &ImageSpan) -> Result<()> {
        let Some(seq) = self.seqs().checked_sub(1) else {
            return Err(Error::invalid("step batch", "an image of no sequence"));
        };
        let (rows, end) = (self.rows(seq), self.kv_lens[seq] as usize);
        let (start, positions) = (end - rows.len(), image.positions());
        let (first, last) = (positions.start.max(start), positions.end);
        if first >= last || first >= end {
            return Ok(());
        }
        if last > end {
            let reason = format!("a step ends at token {end}, inside an image that ends at {last}");
            return Err(Error::invalid("step batch", reason));
        }
        self.images.push(ImageRows {
            seq,
            rows: rows.start + first - start..rows.start + last - start,
            keys: last,
            embeddings: Arc::clone(&image.embeddings),
            skipped: first - positions.start,
        });
        Ok(())
    }

    /// Holds the images of a step against the decoder that is to see them.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a decoder that cannot, and for embeddings of another size.
    pub(crate) fn check_images(&self, spec: &DecoderSpec) -> Result<()> {
        let fail = |reason: String| Err(Error::invalid("step", reason));
        if self.images.is_empty() {
            return Ok(());
        }
        let sees = spec.layers.iter().all(|layer| match &layer.attention {
            AttentionSpec::Gqa(gqa) => gqa.value_dim <= gqa.head_dim && !gqa.chunked,
            _ => false,
        });
        if !sees || spec.per_layer.is_some() {
            return fail("the layers of this model cannot see images".into());
        }
        let windows = spec
            .layers
            .iter()
            .filter_map(|layer| match &layer.attention {
                AttentionSpec::Gqa(gqa) => gqa.sliding_window,
                _ => None,
            });
        let window = windows.min();
        for image in &self.images {
            let len = (image.skipped + image.rows.len()) * spec.hidden_size;
            if image.embeddings.len() != len {
                let found = image.embeddings.len();
                return fail(format!(
                    "an image has embeddings of {found} numbers, expected {len}"
                ));
            }
            let tokens = image.skipped + image.rows.len();
            if let Some(window) = window.filter(|&window| window < tokens) {
                return fail(format!(
                    "an image has {tokens} tokens, a layer sees {window}"
                ));
            }
        }
        Ok(())
    }
}

/// The images of a step on a device, in buffers that are made when the first image comes.
pub(crate) struct StepImages<B: Backend> {
    /// `[rows, hidden]`: of all images, one behind the other.
    embeddings: Residual<B>,
    /// Elements of it.
    room: usize,
    /// A sequence for each image, over the keys up to its end.
    batch: DeviceBatch<B>,
    /// Most sequences in it.
    seqs: usize,
    /// Rows of the step.
    rows: Vec<Range<usize>>,
}

impl<B: Backend> StepImages<B> {
    /// Room for the images of a step, in the place of `old`, if that is too small.
    fn with_room(
        device: &B,
        old: Option<Self>,
        (elements, seqs): (usize, usize),
        (groups, stride): (usize, usize),
    ) -> Result<Self> {
        if let Some(old) = old.filter(|old| old.room >= elements && old.seqs >= seqs) {
            return Ok(old);
        }
        let (room, seqs) = (elements.next_power_of_two(), seqs.next_power_of_two());
        let tables = (0..groups).map(|_| device.alloc(seqs * stride));
        Ok(Self {
            embeddings: device.alloc(room)?,
            room,
            batch: DeviceBatch {
                shape: BatchShape::default(),
                tokens: device.alloc(0)?,
                rope_rows: device.alloc(0)?,
                query_starts: device.alloc(seqs + 1)?,
                kv_lens: device.alloc(seqs)?,
                state_slots: device.alloc(0)?,
                block_tables: tables.collect::<Result<_>>()?,
            },
            seqs,
            rows: Vec::new(),
        })
    }

    /// Uploads the images of a step.
    pub(crate) fn upload(
        ctx: &mut B::Context,
        old: Option<Self>,
        batch: &StepBatch,
        (groups, stride): (&[CacheGroup], usize),
    ) -> Result<Self> {
        let images = &batch.images;
        let given = images.iter().map(|image| {
            let tokens = (image.skipped + image.rows.len()).max(1);
            &image.embeddings[image.skipped * (image.embeddings.len() / tokens)..]
        });
        let values: Vec<_> = given.flatten().map(|&x| B::Residual::from_f32(x)).collect();
        let sizes = (values.len(), images.len());
        let device = B::device(ctx).clone();
        let mut own = Self::with_room(&device, old, sizes, (groups.len(), stride))?;
        B::write(ctx, &mut own.embeddings, 0, &values)?;
        let mut starts = vec![0];
        for image in images {
            starts.push(starts.last().unwrap_or(&0) + image.rows.len() as i32);
        }
        let lens: Vec<_> = images.iter().map(|image| image.keys as i32).collect();
        for (group, table) in own.batch.block_tables.iter_mut().enumerate() {
            let mut entries = Vec::with_capacity(images.len() * stride);
            for (index, image) in images.iter().enumerate() {
                let blocks = image.keys.div_ceil(groups[group].block_size);
                let blocks = &batch.table(group, image.seq)[..blocks];
                entries.extend(blocks.iter().map(|block| block.0.cast_signed()));
                entries.resize((index + 1) * stride, -1);
            }
            B::write(ctx, table, 0, &entries)?;
        }
        let longest = images.iter().map(|image| image.keys).max().unwrap_or(0);
        own.batch.shape = BatchShape {
            tokens: images.iter().map(|image| image.rows.len()).sum(),
            seqs: images.len(),
            table_stride: stride,
            max_query_len: images.iter().map(|i| i.rows.len()).max().unwrap_or(0),
            max_kv_len: longest.next_power_of_two(),
        };
        B::write(ctx, &mut own.batch.query_starts, 0, &starts)?;
        B::write(ctx, &mut own.batch.kv_lens, 0, &lens)?;
        own.rows.clear();
        own.rows
            .extend(images.iter().map(|image| image.rows.clone()));
        Ok(own)
    }

    /// Puts the embeddings into the residual stream.
    pub(crate) fn place(
        &self,
        ctx: &mut B::Context,
        residual: &mut Residual<B>,
        dim: usize,
    ) -> Result<()> {
        let mut from = 0;
        for Range { start, end } in self.rows.iter().cloned() {
            let len = (end - start) * dim;
            B::copy_slice(ctx, &self.embeddings, from, residual, start * dim, len)?;
            from += len;
        }
        Ok(())
    }

    /// Attends the rows of images without a mask, in the place of what they got with one. `q` and `spare` are used up.
    pub(crate) fn attend(
        &self,
        ctx: &mut B::Context,
        (q, spare): (&mut Act<B>, &mut Act<B>),
        (kv, sinks): (&dyn AnyKvLayer<B>, Option<&B::Buffer<f32>>),
        out: &mut Act<B>,
        causal: &AttnConfig,
    ) -> Result<()> {
        let config = AttnConfig {
            causal: false,
            ..*causal
        };
        let (q_dim, out_dim) = (
            config.heads * config.head_dim,
            config.heads * config.value_dim,
        );
        let mut at = 0;
        for Range { start, end } in self.rows.iter().cloned() {
            let len = end - start;
            B::copy_slice(ctx, q, start * q_dim, spare, at * q_dim, len * q_dim)?;
            at += len;
        }
        // [rows of images, heads, head_dim] → [rows of images, heads, value_dim]
        kv.attention(ctx, spare, sinks, &self.batch, q, &config)?;
        at = 0;
        for Range { start, end } in self.rows.iter().cloned() {
            let len = end - start;
            B::copy_slice(ctx, q, at * out_dim, out, start * out_dim, len * out_dim)?;
            at += len;
        }
        Ok(())
    }
}
