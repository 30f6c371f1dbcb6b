//! One batch of texts through all layers of an encoder.

use super::config::{EncoderSpec, Positions};
use crate::linear::{Embedding, Linear};
use crate::named::LayerNorm;
use crate::pooling::Pooling;
use crate::rope::RopeTables;
use ferrum_kernels::{
    Act, Activation, AttnConfig, BackendKvDtype, BatchShape, DeviceBatch, KvF32, KvLayer,
    LlmBackend, NormShape, PagedKvShape, PagedQkv, QkvShape, QkvTransform, Residual, Rope,
    RowShape,
};
use ferrum_types::{Error, FloatElement, Result, TokenId};

/// Tokens of a block of the pool.
const BLOCK_SIZE: usize = 32;

/// A text as tokens, with those that its tokenizer adds.
#[derive(Clone, Copy, Debug)]
pub struct TextInput<'t> {
    /// Its tokens, at least one.
    pub tokens: &'t [TokenId],
    /// The first token of a pair's second text, for models that tell them apart; else the number of tokens.
    pub second: usize,
}

impl<'t> TextInput<'t> {
    /// One text.
    pub fn of(tokens: &'t [TokenId]) -> Self {
        Self {
            tokens,
            second: tokens.len(),
        }
    }
}

/// Sizes that a runner is allocated for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EncoderLimits {
    /// Tokens of all texts that are computed together, at least those of the longest.
    pub max_tokens: usize,
    /// Texts that are computed together.
    pub max_texts: usize,
}

impl EncoderLimits {
    /// Enough for the rows of a product to keep a processor busy.
    pub fn of(spec: &EncoderSpec) -> Self {
        Self {
            max_tokens: spec.max_tokens().max(2048),
            max_texts: 256,
        }
    }
}

/// An object-safe view on an [`EncoderRunner`].
pub trait TextEncoder: Send {
    /// Name of the backend.
    fn backend(&self) -> &'static str;

    /// What is being run.
    fn spec(&self) -> &EncoderSpec;

    /// A vector of `hidden_size` numbers for each text, as the layers give it: not normalised.
    ///
    /// # Errors
    /// `InvalidArgument` for a text without tokens, or a token that is not in the vocabulary;
    /// [`Error::ContextOverflow`] for one that is too long; what the device says.
    fn embed(&mut self, texts: &[TextInput<'_>], pooling: Pooling) -> Result<Vec<Vec<f32>>>;

    /// The logits of each text, `labels` numbers.
    ///
    /// # Errors
    /// Those of [`embed`](Self::embed); `InvalidArgument` for a model without a classifier.
    fn classify(&mut self, texts: &[TextInput<'_>]) -> Result<Vec<Vec<f32>>>;
}

/// Weights of one layer.
pub(super) struct EncoderLayerWeights<B: LlmBackend> {
    /// q, k and v as one projection.
    pub(super) qkv: Box<dyn Linear<B>>,
    pub(super) out: Box<dyn Linear<B>>,
    /// Behind attention, or before it; the first layer of those with norms before has none.
    pub(super) attention_norm: Option<LayerNorm<B>>,
    /// With a gate, that first: both as one projection.
    pub(super) up: Box<dyn Linear<B>>,
    pub(super) down: Box<dyn Linear<B>>,
    /// Behind the feed-forward, or before it.
    pub(super) output_norm: LayerNorm<B>,
}

/// What makes logits of the first token's vector.
pub(super) struct ClassifierWeights<B: LlmBackend> {
    pub(super) pooler: Box<dyn Linear<B>>,
    pub(super) classifier: Box<dyn Linear<B>>,
}

/// Weights of an encoder on a device.
pub struct EncoderWeights<B: LlmBackend> {
    pub(super) words: Box<dyn Embedding<B>>,
    /// Where positions are learned.
    pub(super) positions: Option<Box<dyn Embedding<B>>>,
    /// Where there are segments.
    pub(super) segments: Option<Box<dyn Embedding<B>>>,
    pub(super) norm: LayerNorm<B>,
    pub(super) layers: Vec<EncoderLayerWeights<B>>,
    /// Behind all layers, where each has its norms before its parts.
    pub(super) final_norm: Option<LayerNorm<B>>,
    pub(super) classifier: Option<ClassifierWeights<B>>,
}

/// Activations of a batch. Rows are tokens.
struct Scratch<B: LlmBackend> {
    /// `[tokens, hidden]`: sums of embeddings; with norms before parts also what parts are added to.
    sum: Residual<B>,
    /// `[tokens, hidden]` with norms before parts, else nothing: zeros.
    zeros: Residual<B>,
    /// `[tokens, hidden]`: one kind of embeddings.
    embedded: Residual<B>,
    /// `[tokens, hidden]`: what a part reads, and with norms behind parts what is added to.
    x: Act<B>,
    /// `[tokens, hidden]`: a part's result.
    delta: Act<B>,
    /// `[tokens, hidden]`: the next `x`.
    normed: Act<B>,
    /// `[tokens, 3 · hidden]`.
    qkv: Act<B>,
    /// `[tokens, hidden]`.
    q: Act<B>,
    /// `[tokens, hidden]`.
    attn: Act<B>,
    /// `[tokens, intermediate]`, or `[tokens, gate | up]`.
    inner: Act<B>,
    /// `[tokens, intermediate]`.
    activated: Act<B>,
    /// `[texts, labels]`.
    logits: Act<B>,
    /// `[texts]`: the row of each text that is read alone.
    chosen: B::Buffer<i32>,
    /// `[tokens]`.
    positions: B::Buffer<i32>,
    /// `[tokens]`.
    segments: B::Buffer<i32>,
}

/// An encoder on a device, with all that batches need there.
pub struct EncoderRunner<B: LlmBackend> {
    spec: EncoderSpec,
    limits: EncoderLimits,
    weights: EncoderWeights<B>,
    ctx: B::Context,
    batch: DeviceBatch<B>,
    /// Of the layer that is computed.
    kv: KvLayer<B, KvF32>,
    /// Where queries and keys are rotated: for layers that see all tokens, and for those with a window.
    ropes: Vec<RopeTables<B>>,
    scratch: Scratch<B>,
}

impl<B: LlmBackend> EncoderRunner<B> {
    /// Allocates everything that batches of these sizes need.
    ///
    /// # Errors
    /// `InvalidArgument` for limits that are zero or less than the longest text; what the device says.
    pub fn new(
        device: &B,
        spec: EncoderSpec,
        weights: EncoderWeights<B>,
        limits: EncoderLimits,
    ) -> Result<Self> {
        let EncoderLimits {
            max_tokens,
            max_texts,
        } = limits;
        if max_tokens < spec.max_tokens() || max_texts == 0 {
            let reason = format!(
                "found room for {max_tokens} tokens and {max_texts} texts, expected {} and 1 at least",
                spec.max_tokens()
            );
            return Err(Error::invalid("encoder", reason));
        }
        let hidden = spec.hidden_size;
        let act = |width: usize| device.alloc::<B::Act>(max_tokens.saturating_mul(width));
        let residual = || device.alloc(max_tokens.saturating_mul(hidden));
        let stride = spec.max_tokens().div_ceil(BLOCK_SIZE);
        let batch = DeviceBatch {
            shape: BatchShape {
                table_stride: stride,
                ..BatchShape::default()
            },
            tokens: device.alloc(max_tokens)?,
            rope_rows: device.alloc(max_tokens)?,
            query_starts: device.alloc(max_texts + 1)?,
            kv_lens: device.alloc(max_texts)?,
            state_slots: device.alloc(0)?,
            block_tables: vec![device.alloc(max_texts * stride)?],
        };
        let kv = <B as BackendKvDtype<KvF32>>::alloc_kv_layer(
            device,
            PagedKvShape {
                // A text ends in a block of its own.
                blocks: max_tokens.div_ceil(BLOCK_SIZE) + max_texts,
                block_size: BLOCK_SIZE,
                kv_heads: spec.heads,
                head_dim: spec.head_dim(),
                value_dim: spec.head_dim(),
                values_in_keys: false,
            },
        )?;
        let scratch = Scratch {
            sum: residual()?,
            zeros: device.alloc(if spec.pre_norm {
                max_tokens.saturating_mul(hidden)
            } else {
                0
            })?,
            embedded: residual()?,
            x: act(hidden)?,
            delta: act(hidden)?,
            normed: act(hidden)?,
            qkv: act(3 * hidden)?,
            q: act(hidden)?,
            attn: act(hidden)?,
            inner: act(spec.intermediate << u32::from(spec.gated))?,
            activated: act(spec.intermediate)?,
            logits: device.alloc(max_texts * spec.labels)?,
            chosen: device.alloc(max_texts)?,
            positions: device.alloc(max_tokens)?,
            segments: device.alloc(max_tokens)?,
        };
        let mut ropes = Vec::new();
        if let Positions::Rotary { rope, context } = &spec.positions {
            ropes.push(RopeTables::for_positions(device, rope, *context)?);
            if let Some(local) = &spec.local {
                ropes.push(RopeTables::for_positions(device, &local.rope, *context)?);
            }
        }
        Ok(Self {
            ctx: device.new_context()?,
            spec,
            limits,
            weights,
            batch,
            kv,
            ropes,
            scratch,
        })
    }

    /// Refuses texts that cannot be computed, before any is.
    fn check(&self, texts: &[TextInput<'_>]) -> Result<()> {
        let (capacity, vocab) = (self.spec.max_tokens(), self.spec.vocab_size);
        for text in texts {
            let requested = text.tokens.len();
            if requested == 0 {
                return Err(Error::invalid("encoder", "a text has no token"));
            }
            if requested > capacity {
                return Err(Error::ContextOverflow {
                    requested,
                    capacity,
                });
            }
            if let Some(token) = text.tokens.iter().find(|&&token| token as usize >= vocab) {
                let reason = format!("token {token} of a vocabulary of {vocab}");
                return Err(Error::invalid("encoder", reason));
            }
        }
        Ok(())
    }

    /// How many of the next texts are computed together.
    fn fitting(&self, texts: &[TextInput<'_>]) -> usize {
        let mut tokens = 0;
        let fits = texts.iter().take_while(|text| {
            tokens += text.tokens.len();
            tokens <= self.limits.max_tokens
        });
        fits.take(self.limits.max_texts).count()
    }

    /// Uploads texts that fit.
    fn upload(&mut self, texts: &[TextInput<'_>]) -> Result<()> {
        let (mut tokens, mut positions, mut segments) = (Vec::new(), Vec::new(), Vec::new());
        let (mut starts, mut lens, mut tables) = (vec![0], Vec::new(), Vec::new());
        let first = match self.spec.positions {
            Positions::Learned { first, .. } => first,
            Positions::Rotary { .. } => 0,
        };
        let segment_count = self.spec.segments;
        let stride = self.batch.shape.table_stride;
        let (mut longest, mut block) = (0, 0);
        for text in texts {
            let len = text.tokens.len();
            tokens.extend(text.tokens.iter().map(|&token| token as i32));
            positions.extend((first..first + len).map(|position| position as i32));
            let segment = |i: usize| i32::from(segment_count > 1 && i >= text.second);
            segments.extend((0..len).map(segment));
            starts.push(tokens.len() as i32);
            lens.push(len as i32);
            let blocks = len.div_ceil(BLOCK_SIZE);
            tables.extend((block..block + blocks).map(|block| block as i32));
            tables.resize(lens.len() * stride, -1);
            (longest, block) = (longest.max(len), block + blocks);
        }
        self.batch.shape = BatchShape {
            tokens: tokens.len(),
            seqs: texts.len(),
            table_stride: stride,
            max_query_len: longest,
            max_kv_len: longest,
        };
        let (ctx, batch, scratch) = (&mut self.ctx, &mut self.batch, &mut self.scratch);
        B::write(ctx, &mut batch.tokens, 0, &tokens)?;
        B::write(ctx, &mut batch.query_starts, 0, &starts)?;
        B::write(ctx, &mut batch.kv_lens, 0, &lens)?;
        B::write(ctx, &mut batch.block_tables[0], 0, &tables)?;
        let to = match self.spec.positions {
            Positions::Learned { .. } => &mut scratch.positions,
            Positions::Rotary { .. } => &mut batch.rope_rows,
        };
        B::write(ctx, to, 0, &positions)?;
        B::write(ctx, &mut scratch.segments, 0, &segments)
    }

    /// Records a batch that was uploaded; `scratch.x` has the vectors of its tokens then.
    fn forward(&mut self) -> Result<()> {
        let norm = NormShape {
            rows: self.batch.shape.tokens,
            dim: self.spec.hidden_size,
            eps: self.spec.norm_eps,
        };
        self.look_up(norm)?;
        for index in 0..self.weights.layers.len() {
            self.attention(index, norm)?;
            self.feed_forward(index, norm)?;
        }
        if let Some(LayerNorm { weight, bias }) = &self.weights.final_norm {
            let (ctx, s) = (&mut self.ctx, &mut self.scratch);
            B::layer_norm(ctx, &s.sum, weight, Some(bias), &mut s.x, norm)?;
        }
        Ok(())
    }

    /// The tokens' embeddings, normed, to `scratch.x`, and with norms before parts to `scratch.sum` as well.
    fn look_up(&mut self, norm: NormShape) -> Result<()> {
        let Self {
            spec,
            weights,
            ctx,
            batch,
            scratch: s,
            ..
        } = self;
        let NormShape { rows, dim, .. } = norm;
        let shape = RowShape { rows, dim };
        weights
            .words
            .lookup(ctx, &batch.tokens, &mut s.sum, shape)?;
        let others = [
            (&weights.positions, &s.positions),
            (&weights.segments, &s.segments),
        ];
        for (table, ids) in others {
            let Some(table) = table else {
                continue;
            };
            table.lookup(ctx, ids, &mut s.embedded, shape)?;
            B::add_inplace(ctx, &mut s.sum, &s.embedded, rows * dim)?;
        }
        let LayerNorm { weight, bias } = &weights.norm;
        B::layer_norm(ctx, &s.sum, weight, Some(bias), &mut s.x, norm)?;
        if spec.pre_norm {
            B::copy_slice(ctx, &s.zeros, 0, &mut s.sum, 0, rows * dim)?;
            B::add_inplace(ctx, &mut s.sum, &s.x, rows * dim)?;
        }
        Ok(())
    }

    /// Attention of a layer, and what comes between it and the feed-forward.
    fn attention(&mut self, index: usize, norm: NormShape) -> Result<()> {
        let Self {
            spec,
            weights,
            ctx,
            batch,
            kv,
            ropes,
            scratch: s,
            ..
        } = self;
        let layer = &weights.layers[index];
        let (rows, heads, head_dim) = (norm.rows, spec.heads, spec.head_dim());
        let local = spec.local.as_ref().filter(|local| local.layers[index]);
        let rope = match (&spec.positions, local) {
            (_, Some(local)) => ropes.get(1).map(|tables| (tables, &local.rope)),
            (Positions::Rotary { rope, .. }, None) => ropes.first().map(|tables| (tables, rope)),
            (Positions::Learned { .. }, None) => None,
        };
        let rope = rope.map(|(tables, spec)| Rope {
            cos: &tables.cos,
            sin: &tables.sin,
            rows: &batch.rope_rows,
            rot_dim: spec.rot_dim,
            style: spec.style,
        });
        let config = AttnConfig {
            heads,
            kv_heads: heads,
            head_dim,
            value_dim: head_dim,
            scale: 1.0 / (head_dim as f32).sqrt(),
            causal: false,
            sliding_window: local.map(|local| local.window),
            chunked: false,
            softcap: None,
        };
        // The first layer reads what was normed already.
        if let (Some(LayerNorm { weight, bias }), true) = (&layer.attention_norm, spec.pre_norm) {
            B::layer_norm(ctx, &s.sum, weight, Some(bias), &mut s.x, norm)?;
        }
        // [tokens, hidden] → [tokens, q | k | v]
        layer.qkv.forward(ctx, &s.x, &mut s.qkv, rows)?;
        let input = PagedQkv {
            qkv: &s.qkv,
            transform: QkvTransform {
                q_norm: None,
                k_norm: None,
                rope,
            },
            shape: QkvShape {
                tokens: rows,
                heads,
                kv_heads: heads,
                head_dim,
                value_dim: head_dim,
            },
        };
        B::split_qkv_norm_rope_into_paged_cache::<KvF32>(ctx, input, &mut s.q, kv, batch)?;
        B::paged_attention::<KvF32>(ctx, &s.q, kv, None, batch, &mut s.attn, &config)?;
        layer.out.forward(ctx, &s.attn, &mut s.delta, rows)?;
        match (spec.pre_norm, &layer.attention_norm) {
            (false, Some(after)) => s.add_and_norm(ctx, after, norm),
            _ => s.add_to_sum(ctx, &layer.output_norm, norm),
        }
    }

    /// The feed-forward of a layer. It reads `scratch.x`.
    fn feed_forward(&mut self, index: usize, norm: NormShape) -> Result<()> {
        let Self {
            spec,
            weights,
            ctx,
            scratch: s,
            ..
        } = self;
        let layer = &weights.layers[index];
        let rows = norm.rows;
        // [tokens, hidden] → [tokens, intermediate] → [tokens, hidden]
        layer.up.forward(ctx, &s.x, &mut s.inner, rows)?;
        let (function, dim) = (spec.activation.function(), spec.intermediate);
        let inner = RowShape { rows, dim };
        match spec.gated {
            true => B::activate_split(ctx, function, &s.inner, &mut s.activated, inner)?,
            false => {
                B::activate(ctx, function, &s.inner, None, &mut s.activated, rows * dim)?;
            }
        }
        layer.down.forward(ctx, &s.activated, &mut s.delta, rows)?;
        match spec.pre_norm {
            false => s.add_and_norm(ctx, &layer.output_norm, norm),
            true => B::add_inplace(ctx, &mut s.sum, &s.delta, rows * norm.dim),
        }
    }

    /// Gathers the first or the last row of each text to `scratch.delta`.
    fn gather_ends(&mut self, texts: &[TextInput<'_>], last: bool) -> Result<()> {
        let mut next = 0;
        let row = |text: &TextInput<'_>| {
            let first = next;
            next += text.tokens.len() as i32;
            if last { next - 1 } else { first }
        };
        let rows: Vec<i32> = texts.iter().map(row).collect();
        let (ctx, scratch) = (&mut self.ctx, &mut self.scratch);
        B::write(ctx, &mut scratch.chosen, 0, &rows)?;
        let shape = RowShape {
            rows: rows.len(),
            dim: self.spec.hidden_size,
        };
        let (x, chosen) = (&scratch.x, &scratch.chosen);
        B::gather_rows(ctx, x, chosen, &mut scratch.delta, shape)
    }
}

impl<B: LlmBackend> Scratch<B> {
    /// `sum += delta`, `x = norm(sum)`.
    fn add_to_sum(
        &mut self,
        ctx: &mut B::Context,
        norm: &LayerNorm<B>,
        shape: NormShape,
    ) -> Result<()> {
        B::add_inplace(ctx, &mut self.sum, &self.delta, shape.rows * shape.dim)?;
        let LayerNorm { weight, bias } = norm;
        B::layer_norm(ctx, &self.sum, weight, Some(bias), &mut self.x, shape)
    }

    /// `x = norm(x + delta)`.
    fn add_and_norm(
        &mut self,
        ctx: &mut B::Context,
        norm: &LayerNorm<B>,
        shape: NormShape,
    ) -> Result<()> {
        B::add_inplace(ctx, &mut self.x, &self.delta, shape.rows * shape.dim)?;
        let LayerNorm { weight, bias } = norm;
        B::layer_norm(ctx, &self.x, weight, Some(bias), &mut self.normed, shape)?;
        std::mem::swap(&mut self.x, &mut self.normed);
        Ok(())
    }
}

/// The first rows of a buffer of activations, as numbers.
fn read_rows<B: LlmBackend>(ctx: &mut B::Context, buffer: &Act<B>, len: usize) -> Result<Vec<f32>> {
    let mut rows = vec![B::Act::from_f32(0.0); len];
    B::read(ctx, buffer, 0, &mut rows)?;
    Ok(rows.into_iter().map(FloatElement::to_f32).collect())
}

fn mean(rows: &[f32], dim: usize) -> Vec<f32> {
    let mut sums = vec![0f64; dim];
    for row in rows.chunks_exact(dim) {
        for (sum, x) in sums.iter_mut().zip(row) {
            *sum += f64::from(*x);
        }
    }
    let count = (rows.len() / dim) as f64;
    sums.into_iter().map(|sum| (sum / count) as f32).collect()
}

impl<B: LlmBackend> TextEncoder for EncoderRunner<B> {
    fn backend(&self) -> &'static str {
        B::NAME
    }

    fn spec(&self) -> &EncoderSpec {
        &self.spec
    }

    fn embed(&mut self, texts: &[TextInput<'_>], pooling: Pooling) -> Result<Vec<Vec<f32>>> {
        self.check(texts)?;
        let (mut out, mut rest) = (Vec::with_capacity(texts.len()), texts);
        let dim = self.spec.hidden_size;
        while !rest.is_empty() {
            let (batch, behind) = rest.split_at(self.fitting(rest));
            rest = behind;
            self.upload(batch)?;
            self.forward()?;
            match pooling {
                Pooling::Cls | Pooling::Last => {
                    self.gather_ends(batch, pooling == Pooling::Last)?;
                    let len = batch.len() * dim;
                    let rows = read_rows::<B>(&mut self.ctx, &self.scratch.delta, len)?;
                    out.extend(rows.chunks_exact(dim).map(<[f32]>::to_vec));
                }
                Pooling::Mean => {
                    let len = self.batch.shape.tokens * dim;
                    let rows = read_rows::<B>(&mut self.ctx, &self.scratch.x, len)?;
                    let mut rows = &rows[..];
                    for text in batch {
                        let (own, behind) = rows.split_at(text.tokens.len() * dim);
                        out.push(mean(own, dim));
                        rows = behind;
                    }
                }
            }
        }
        Ok(out)
    }

    fn classify(&mut self, texts: &[TextInput<'_>]) -> Result<Vec<Vec<f32>>> {
        self.check(texts)?;
        if self.weights.classifier.is_none() {
            let reason = "the model has no classifier, so it cannot score";
            return Err(Error::invalid("encoder", reason));
        }
        let (mut out, mut rest) = (Vec::with_capacity(texts.len()), texts);
        let labels = self.spec.labels;
        while !rest.is_empty() {
            let (batch, behind) = rest.split_at(self.fitting(rest));
            rest = behind;
            self.upload(batch)?;
            self.forward()?;
            self.gather_ends(batch, false)?;
            let (rows, len) = (batch.len(), batch.len() * self.spec.hidden_size);
            let (ctx, s) = (&mut self.ctx, &mut self.scratch);
            if let Some(head) = &self.weights.classifier {
                head.pooler.forward(ctx, &s.delta, &mut s.normed, rows)?;
                B::activate(ctx, Activation::Tanh, &s.normed, None, &mut s.delta, len)?;
                head.classifier
                    .forward(ctx, &s.delta, &mut s.logits, rows)?;
            }
            let logits = read_rows::<B>(ctx, &s.logits, rows * labels)?;
            out.extend(logits.chunks_exact(labels).map(<[f32]>::to_vec));
        }
        Ok(out)
    }
}
