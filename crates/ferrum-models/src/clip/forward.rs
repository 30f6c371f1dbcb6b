//! Pictures through their tower, and texts through theirs.

use super::config::{ClipKind, ClipSpec, ImageSpec};
use super::load::{ClipWeights, ImageHead, ProbeHead};
use super::tower::{Tower, read_rows};
use crate::pre_norm::{batch, upload};
use ferrum_kernels::{Act, BackendKvDtype, DeviceBatch, KvF32, LlmBackend, Residual, RowShape};
use ferrum_types::{Error, FloatElement, Result, TokenId};

/// An object-safe view on a [`ClipRunner`].
pub trait ImageTextModel: Send {
    /// Name of the backend.
    fn backend(&self) -> &'static str;

    /// What is being run.
    fn spec(&self) -> &ClipSpec;

    /// A vector for each text, as its tower gives it: not normalised.
    ///
    /// SigLIP has learned from texts that padding made `positions` tokens long, and reads the last one: shorter ones
    /// are taken, and mean something else.
    ///
    /// # Errors
    /// `InvalidArgument` for a text without tokens, or a token that is not in the vocabulary;
    /// [`Error::ContextOverflow`] for one that is too long; what the device says.
    fn embed_texts(&mut self, texts: &[Vec<TokenId>]) -> Result<Vec<Vec<f32>>>;

    /// A vector for each picture of `[3, side, side]` numbers, as its tower gives it: not normalised.
    ///
    /// # Errors
    /// `InvalidArgument` for another number of values; what the device says.
    fn embed_images(&mut self, images: &[Vec<f32>]) -> Result<Vec<Vec<f32>>>;

    /// The logit of a picture and a text with these vectors.
    fn logit(&self, image: &[f32], text: &[f32]) -> f32;
}

/// Tokens of pictures or texts that are computed together, at least those of the longest one.
const TOKENS_TOGETHER: usize = 1024;

/// Most texts that are computed together: each has a block of the pool of keys and values at least.
const TEXTS_TOGETHER: usize = 128;

/// What the tower of pictures has besides.
struct Images<B: LlmBackend> {
    tower: Tower<B>,
    /// Pictures that are computed together.
    most: usize,
    /// `[tokens, 3 · patch²]`.
    patches: Act<B>,
    /// `[tokens, hidden]`, from which residuals begin.
    zeros: Residual<B>,
    /// One query for each picture, over all of its tokens.
    probes: DeviceBatch<B>,
}

/// What the tower of texts has besides.
struct Texts<B: LlmBackend> {
    tower: Tower<B>,
    /// Tokens that are computed together.
    most: usize,
    /// `[tokens, hidden]`.
    embedded: Residual<B>,
}

/// A CLIP or SigLIP model on a device, with all that batches need there.
pub struct ClipRunner<B: LlmBackend> {
    spec: ClipSpec,
    weights: ClipWeights<B>,
    ctx: B::Context,
    images: Images<B>,
    texts: Texts<B>,
}

impl<B: LlmBackend> ClipRunner<B> {
    /// Allocates for some pictures and some texts at a time.
    ///
    /// # Errors
    /// What the device says.
    pub fn new(device: &B, spec: ClipSpec, weights: ClipWeights<B>) -> Result<Self> {
        let (image, text) = (&spec.image.stack, &spec.text.stack);
        let own = spec.image_tokens();
        let most = (TOKENS_TOGETHER / own).max(1);
        let tokens = most * own;
        let images = Images {
            tower: Tower::new(device, image, (tokens, most, own), spec.dimensions)?,
            most,
            patches: device.alloc(tokens * 3 * spec.image.patch * spec.image.patch)?,
            zeros: device.alloc(tokens * image.hidden)?,
            probes: batch(device, most, most, own)?,
        };
        let longest = spec.text.positions;
        let most = TOKENS_TOGETHER.max(longest);
        let texts = Texts {
            tower: Tower::new(
                device,
                text,
                (most, TEXTS_TOGETHER, longest),
                spec.dimensions,
            )?,
            most,
            embedded: device.alloc(most * text.hidden)?,
        };
        Ok(Self {
            ctx: device.new_context()?,
            spec,
            weights,
            images,
            texts,
        })
    }

    /// Refuses texts that cannot be computed, before any is.
    fn check(&self, texts: &[Vec<TokenId>]) -> Result<()> {
        let (capacity, vocab) = (self.spec.text.positions, self.spec.text.vocab_size);
        for text in texts {
            let requested = text.len();
            if requested == 0 {
                return Err(Error::invalid("clip", "a text has no token"));
            }
            if requested > capacity {
                return Err(Error::ContextOverflow {
                    requested,
                    capacity,
                });
            }
            if let Some(token) = text.iter().find(|&&token| token as usize >= vocab) {
                let reason = format!("token {token} of a vocabulary of {vocab}");
                return Err(Error::invalid("clip", reason));
            }
        }
        Ok(())
    }

    /// Texts that fit.
    fn text_batch(&mut self, texts: &[Vec<TokenId>]) -> Result<Vec<Vec<f32>>> {
        let (ctx, weights, spec) = (&mut self.ctx, &self.weights, &self.spec.text);
        let Texts {
            tower, embedded, ..
        } = &mut self.texts;
        let lens: Vec<_> = texts.iter().map(Vec::len).collect();
        tower.upload(ctx, &lens)?;
        let ids: Vec<i32> = texts.iter().flatten().map(|&id| id as i32).collect();
        B::write(ctx, &mut tower.batch.tokens, 0, &ids)?;
        let (rows, dim) = (ids.len(), spec.stack.hidden);
        let shape = RowShape { rows, dim };
        let words = &weights.words;
        words.lookup(ctx, &tower.batch.tokens, &mut tower.x, shape)?;
        let places = &weights.text_positions;
        places.lookup(ctx, &tower.positions, embedded, shape)?;
        B::add_inplace(ctx, &mut tower.x, embedded, rows * dim)?;
        let layers = (&spec.stack, &weights.text[..]);
        tower.run(ctx, layers, &weights.text_norm)?;
        let mut begin = 0;
        let ends: Vec<i32> = texts
            .iter()
            .map(|text| {
                let end = begin + text_end(&self.spec, text);
                begin += text.len();
                end as i32
            })
            .collect();
        tower.pool(ctx, &ends, dim)?;
        tower.project(ctx, &*weights.text_head, texts.len())
    }

    /// Pictures that fit.
    fn image_batch(&mut self, images: &[Vec<f32>]) -> Result<Vec<Vec<f32>>> {
        let (ctx, weights, spec) = (&mut self.ctx, &self.weights, &self.spec);
        let (stack, own) = (&spec.image.stack, spec.image_tokens());
        let Images {
            tower,
            patches,
            zeros,
            probes,
            ..
        } = &mut self.images;
        let (count, dim) = (images.len(), stack.hidden);
        let rows = count * own;
        tower.upload(ctx, &vec![own; count])?;
        let mut values = Vec::with_capacity(rows * 3 * spec.image.patch * spec.image.patch);
        for image in images {
            unfold(&spec.image, spec.kind == ClipKind::Clip, image, &mut values);
        }
        B::write(ctx, patches, 0, &values)?;
        let places = &weights.image_positions;
        places.lookup(ctx, &tower.positions, &mut tower.x, RowShape { rows, dim })?;
        let stem = &mut tower.scratch.delta;
        weights.stem.forward(ctx, patches, stem, rows)?;
        B::add_inplace(ctx, &mut tower.x, stem, rows * dim)?;
        if let ImageHead::Class { first_norm, .. } = &weights.image_head {
            let shape = stack.norm(rows);
            tower.scratch.norm(ctx, &tower.x, first_norm, shape)?;
            B::copy_slice(ctx, zeros, 0, &mut tower.x, 0, rows * dim)?;
            B::add_inplace(ctx, &mut tower.x, &tower.scratch.normed, rows * dim)?;
        }
        let layers = (stack, &weights.image[..]);
        tower.run(ctx, layers, &weights.image_norm)?;
        match &weights.image_head {
            ImageHead::Class { projection, .. } => {
                let first: Vec<i32> = (0..count).map(|i| (i * own) as i32).collect();
                tower.pool(ctx, &first, dim)?;
                tower.project(ctx, &**projection, count)
            }
            ImageHead::Probe(head) => {
                upload::<B>(ctx, probes, &vec![(1, own); count])?;
                probe(ctx, (spec, head), tower, probes, zeros)
            }
        }
    }
}

/// Attention of one learned query over the states of each picture, and a feed-forward behind it.
fn probe<B: LlmBackend>(
    ctx: &mut B::Context,
    (spec, head): (&ClipSpec, &ProbeHead<B>),
    tower: &mut Tower<B>,
    probes: &DeviceBatch<B>,
    zeros: &Residual<B>,
) -> Result<Vec<Vec<f32>>> {
    let (stack, count) = (&spec.image.stack, probes.shape.seqs);
    let rows = tower.batch.shape.tokens;
    let s = &mut tower.scratch;
    head.k.forward(ctx, &s.normed, &mut s.q, rows)?;
    head.v.forward(ctx, &s.normed, &mut s.attn, rows)?;
    <B as BackendKvDtype<KvF32>>::kv_append(ctx, &mut tower.kv, &s.q, &s.attn, &tower.batch)?;
    // The query is the same for all.
    let query: Vec<B::Act> = head.query.iter().map(|&x| B::Act::from_f32(x)).collect();
    B::write(ctx, &mut tower.pooled, 0, &query.repeat(count))?;
    let (q, kv, config) = (&tower.pooled, &tower.kv, stack.attention());
    B::paged_attention::<KvF32>(ctx, q, kv, None, probes, &mut s.attn, &config)?;
    head.out.forward(ctx, &s.attn, &mut s.delta, count)?;
    let len = count * stack.hidden;
    B::copy_slice(ctx, zeros, 0, &mut tower.x, 0, len)?;
    B::add_inplace(ctx, &mut tower.x, &s.delta, len)?;
    s.feed_forward(ctx, (stack, &head.mlp), &mut tower.x, count)?;
    read_rows::<B, _>(ctx, &tower.x, count, stack.hidden)
}

/// Where the state is that stands for a text.
fn text_end(spec: &ClipSpec, text: &[TokenId]) -> usize {
    let last = text.len().saturating_sub(1);
    match (spec.kind, spec.text.end) {
        (ClipKind::Siglip, _) => last,
        (ClipKind::Clip, Some(end)) => text.iter().position(|&token| token == end).unwrap_or(0),
        (ClipKind::Clip, None) => {
            let largest = text.iter().max();
            let found = text.iter().position(|token| Some(token) == largest);
            found.unwrap_or(last)
        }
    }
}

/// Appends the patches of a picture, `[patches, 3 · patch · patch]`, behind a row of zeros where there is a class token.
pub(crate) fn unfold<T: FloatElement>(
    spec: &ImageSpec,
    has_class: bool,
    image: &[f32],
    rows: &mut Vec<T>,
) {
    let (side, patch, grid) = (spec.side, spec.patch, spec.grid());
    if has_class {
        rows.resize(rows.len() + 3 * patch * patch, T::from_f32(0.0));
    }
    for (down, right) in (0..grid).flat_map(|y| (0..grid).map(move |x| (y, x))) {
        for channel in image.chunks_exact(side * side) {
            for line in channel.chunks_exact(side).skip(down * patch).take(patch) {
                let values = &line[right * patch..][..patch];
                rows.extend(values.iter().map(|&value| T::from_f32(value)));
            }
        }
    }
}

impl<B: LlmBackend> ImageTextModel for ClipRunner<B> {
    fn backend(&self) -> &'static str {
        B::NAME
    }

    fn spec(&self) -> &ClipSpec {
        &self.spec
    }

    fn embed_texts(&mut self, texts: &[Vec<TokenId>]) -> Result<Vec<Vec<f32>>> {
        self.check(texts)?;
        let (mut vectors, mut rest) = (Vec::with_capacity(texts.len()), texts);
        while !rest.is_empty() {
            let mut tokens = 0;
            let fits = rest.iter().take_while(|text| {
                tokens += text.len();
                tokens <= self.texts.most
            });
            let (now, behind) = rest.split_at(fits.take(TEXTS_TOGETHER).count());
            vectors.extend(self.text_batch(now)?);
            rest = behind;
        }
        Ok(vectors)
    }

    fn embed_images(&mut self, images: &[Vec<f32>]) -> Result<Vec<Vec<f32>>> {
        let expected = self.spec.image.values();
        if let Some(image) = images.iter().find(|image| image.len() != expected) {
            let reason = format!("found {} values, an image has {expected}", image.len());
            return Err(Error::invalid("clip", reason));
        }
        let mut vectors = Vec::with_capacity(images.len());
        for images in images.chunks(self.images.most) {
            vectors.extend(self.image_batch(images)?);
        }
        Ok(vectors)
    }

    fn logit(&self, image: &[f32], text: &[f32]) -> f32 {
        let dot = |a: &[f32], b: &[f32]| {
            let products = a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b));
            products.sum::<f64>()
        };
        let lengths = (dot(image, image) * dot(text, text)).sqrt();
        let cosine = if lengths > 0.0 {
            dot(image, text) / lengths
        } else {
            0.0
        };
        let scale = f64::from(self.weights.logit_scale).exp();
        (cosine * scale + f64::from(self.weights.logit_bias)) as f32
    }
}
