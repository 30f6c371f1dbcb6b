//! A window through the encoder, and tokens through the decoder.

use super::config::WhisperSpec;
use crate::linear::{Embedding, Linear, LogitLinear};
use crate::named::LayerNorm;
use crate::pre_norm::{PreNormLayer, PreNormScratch, batch, upload};
use ferrum_kernels::{
    Act, BackendKvDtype, DeviceBatch, GemmShape, KvF32, KvLayer, LlmBackend, Logits, MatShape,
    Residual, RowShape,
};
use ferrum_types::{Error, FloatElement, Result, TokenId};

/// An object-safe view on a [`WhisperRunner`].
pub trait SpeechModel: Send {
    /// Name of the backend.
    fn backend(&self) -> &'static str;

    /// What is being run.
    fn spec(&self) -> &WhisperSpec;

    /// Reads a window: `mel` is `[mels, frames]`. Texts are about it from then on.
    ///
    /// # Errors
    /// `InvalidArgument` for another number of values; what the device says.
    fn encode(&mut self, mel: &[f32]) -> Result<()>;

    /// The encoder's states of the window, `[positions, hidden]`.
    ///
    /// # Errors
    /// What the device says.
    fn states(&mut self) -> Result<Vec<f32>>;

    /// Reads tokens of a text of which `position` were read already, and gives the logits of the next one.
    ///
    /// # Errors
    /// `InvalidArgument` without a token or for one that is not in the vocabulary;
    /// [`Error::ContextOverflow`] for more than a text may have; what the device says.
    fn decode(&mut self, tokens: &[TokenId], position: usize) -> Result<Vec<f32>>;
}

/// A convolution as a product.
pub(super) struct Conv<B: LlmBackend> {
    pub(super) weight: B::Weight,
    pub(super) bias: B::Buffer<f32>,
    /// `rows` = channels that come of it, `cols` = inputs of each.
    pub(super) shape: MatShape,
}

/// Attention of the decoder over the encoder's states.
pub(super) struct CrossLayer<B: LlmBackend> {
    pub(super) norm: LayerNorm<B>,
    pub(super) q: Box<dyn Linear<B>>,
    pub(super) k: Box<dyn Linear<B>>,
    pub(super) v: Box<dyn Linear<B>>,
    pub(super) out: Box<dyn Linear<B>>,
}

/// Weights of a Whisper model on a device.
pub struct WhisperWeights<B: LlmBackend> {
    pub(super) conv1: Conv<B>,
    pub(super) conv2: Conv<B>,
    pub(super) encoder_positions: Box<dyn Embedding<B>>,
    pub(super) encoder: Vec<PreNormLayer<B>>,
    pub(super) encoder_norm: LayerNorm<B>,
    pub(super) words: Box<dyn Embedding<B>>,
    /// The same table as output projection.
    pub(super) head: Box<dyn LogitLinear<B>>,
    pub(super) decoder_positions: Box<dyn Embedding<B>>,
    pub(super) decoder: Vec<(PreNormLayer<B>, CrossLayer<B>)>,
    pub(super) decoder_norm: LayerNorm<B>,
}

/// What the encoder computes with.
struct Encoding<B: LlmBackend> {
    /// `[frames, 3 · mels]`: each frame with its neighbours.
    neighbours: Act<B>,
    /// `[frames, hidden]`.
    stem: Act<B>,
    /// `[frames, hidden]`, and a row of zeros.
    padded: Act<B>,
    /// `[3 · positions]`: rows of `padded`.
    taps: B::Buffer<i32>,
    /// `[positions, 3 · hidden]`.
    gathered: Act<B>,
    /// `[positions]`: 0, 1, 2, …
    positions: B::Buffer<i32>,
    x: Residual<B>,
    scratch: PreNormScratch<B>,
    kv: KvLayer<B, KvF32>,
    batch: DeviceBatch<B>,
}

/// What the decoder computes with.
struct Decoding<B: LlmBackend> {
    x: Residual<B>,
    embedded: Residual<B>,
    positions: B::Buffer<i32>,
    scratch: PreNormScratch<B>,
    /// For each layer the keys and values of the text.
    own: Vec<KvLayer<B, KvF32>>,
    /// For each layer those of the encoder's states.
    cross: Vec<KvLayer<B, KvF32>>,
    batch: DeviceBatch<B>,
    cross_batch: DeviceBatch<B>,
    last: Act<B>,
    logits: Logits<B>,
}

/// A Whisper model on a device, with all that a window needs there.
pub struct WhisperRunner<B: LlmBackend> {
    spec: WhisperSpec,
    weights: WhisperWeights<B>,
    ctx: B::Context,
    /// That of the [device for encoders](ferrum_kernels::Backend::for_encoders), if it is another one.
    encoder_ctx: Option<B::Context>,
    encoding: Encoding<B>,
    decoding: Decoding<B>,
}

impl<B: LlmBackend> WhisperRunner<B> {
    /// Allocates for one window at a time.
    ///
    /// # Errors
    /// What the device says.
    pub fn new(device: &B, spec: WhisperSpec, weights: WhisperWeights<B>) -> Result<Self> {
        let mut ctx = device.new_context()?;
        let encoder = device.for_encoders();
        let encoder_ctx = encoder.map(|device| device.new_context()).transpose()?;
        let encoding = Encoding::new(device, &mut ctx, &spec)?;
        let decoding = Decoding::new(device, &spec)?;
        Ok(Self {
            ctx,
            encoder_ctx,
            spec,
            weights,
            encoding,
            decoding,
        })
    }
}

impl<B: LlmBackend> Encoding<B> {
    fn new(device: &B, ctx: &mut B::Context, spec: &WhisperSpec) -> Result<Self> {
        let (frames, states, stack) = (spec.frames(), spec.positions, &spec.encoder);
        let hidden = stack.hidden;
        let mut padded = device.alloc::<B::Act>((frames + 1) * hidden)?;
        let zeros = vec![B::Act::from_f32(0.0); hidden];
        B::write(ctx, &mut padded, frames * hidden, &zeros)?;
        // State t has the frames 2t - 1, 2t and 2t + 1; before the first one are zeros.
        let tap = |t: usize| [(2 * t).checked_sub(1).unwrap_or(frames), 2 * t, 2 * t + 1];
        let taps: Vec<i32> = (0..states).flat_map(tap).map(|row| row as i32).collect();
        let positions: Vec<i32> = (0..states as i32).collect();
        let mut batch = batch(device, states, 1, states)?;
        upload::<B>(ctx, &mut batch, &[(states, states)])?;
        Ok(Self {
            neighbours: device.alloc(frames * 3 * spec.mels)?,
            stem: device.alloc(frames * hidden)?,
            padded,
            taps: device.from_slice(&taps)?,
            gathered: device.alloc(states * 3 * hidden)?,
            positions: device.from_slice(&positions)?,
            x: device.alloc(states * hidden)?,
            scratch: PreNormScratch::new(device, stack, states)?,
            kv: stack.pool(device, states, 1)?,
            batch,
        })
    }

    /// Each frame with those before and after it, channel by channel.
    fn upload(&mut self, ctx: &mut B::Context, mel: &[f32], frames: usize) -> Result<()> {
        let mels = mel.len() / frames;
        let mut rows = vec![B::Act::from_f32(0.0); frames * 3 * mels];
        for (channel, values) in mel.chunks_exact(frames).enumerate() {
            for (frame, &value) in values.iter().enumerate() {
                let value = B::Act::from_f32(value);
                // It is the last tap of the frame before it, and the first of the one behind it.
                for tap in 0..3 {
                    let row = (frame + 1).checked_sub(tap).filter(|&row| row < frames);
                    if let Some(row) = row {
                        rows[(row * mels + channel) * 3 + tap] = value;
                    }
                }
            }
        }
        B::write(ctx, &mut self.neighbours, 0, &rows)
    }

    fn run(
        &mut self,
        ctx: &mut B::Context,
        spec: &WhisperSpec,
        weights: &WhisperWeights<B>,
    ) -> Result<()> {
        let (frames, states, stack) = (spec.frames(), spec.positions, &spec.encoder);
        let hidden = stack.hidden;
        let gelu = stack.activation.function.function();
        // [frames, mels · 3] → [frames, hidden]
        let Conv { shape, .. } = weights.conv1;
        product(
            ctx,
            &weights.conv1,
            (&self.neighbours, &mut self.stem),
            frames,
            shape,
        )?;
        B::activate(
            ctx,
            gelu,
            &self.stem,
            None,
            &mut self.padded,
            frames * hidden,
        )?;
        // [frames, hidden] → [positions, 3 · hidden] → [positions, hidden]
        let rows = RowShape {
            rows: 3 * states,
            dim: hidden,
        };
        B::gather_rows(ctx, &self.padded, &self.taps, &mut self.gathered, rows)?;
        let Conv { shape, .. } = weights.conv2;
        product(
            ctx,
            &weights.conv2,
            (&self.gathered, &mut self.stem),
            states,
            shape,
        )?;
        let out = &mut self.scratch.delta;
        B::activate(ctx, gelu, &self.stem, None, out, states * hidden)?;
        let rows = RowShape {
            rows: states,
            dim: hidden,
        };
        let positions = &weights.encoder_positions;
        positions.lookup(ctx, &self.positions, &mut self.x, rows)?;
        B::add_inplace(ctx, &mut self.x, &self.scratch.delta, states * hidden)?;
        let (kv, batch) = (&mut self.kv, &self.batch);
        self.scratch
            .layers(ctx, (stack, &weights.encoder), &mut self.x, kv, batch)?;
        let norm = &weights.encoder_norm;
        self.scratch.norm(ctx, &self.x, norm, stack.norm(states))
    }
}

/// A convolution over rows of neighbours.
fn product<B: LlmBackend>(
    ctx: &mut B::Context,
    conv: &Conv<B>,
    (x, out): (&Act<B>, &mut Act<B>),
    rows: usize,
    MatShape { rows: n, cols: k }: MatShape,
) -> Result<()> {
    B::gemm(ctx, x, &conv.weight, out, GemmShape { rows, n, k })?;
    B::add_bias(ctx, out, &conv.bias, RowShape { rows, dim: n })
}

impl<B: LlmBackend> Decoding<B> {
    fn new(device: &B, spec: &WhisperSpec) -> Result<Self> {
        let (tokens, stack) = (spec.tokens, &spec.decoder);
        let pools = |len| -> Result<Vec<_>> {
            let layers = 0..stack.layers;
            layers.map(|_| stack.pool(device, len, 1)).collect()
        };
        Ok(Self {
            x: device.alloc(tokens * stack.hidden)?,
            embedded: device.alloc(tokens * stack.hidden)?,
            positions: device.alloc(tokens)?,
            scratch: PreNormScratch::new(device, stack, tokens)?,
            own: pools(tokens)?,
            cross: pools(spec.positions)?,
            batch: batch(device, tokens, 1, tokens)?,
            cross_batch: batch(device, tokens, 1, spec.positions)?,
            last: device.alloc(stack.hidden)?,
            logits: device.alloc(spec.vocab_size)?,
        })
    }

    /// Computes the keys and values of the encoder's states.
    fn read_states(
        &mut self,
        ctx: &mut B::Context,
        weights: &WhisperWeights<B>,
        encoding: &mut Encoding<B>,
    ) -> Result<()> {
        let rows = encoding.batch.shape.tokens;
        let scratch = &mut encoding.scratch;
        for ((_, layer), kv) in weights.decoder.iter().zip(&mut self.cross) {
            layer
                .k
                .forward(ctx, &scratch.normed, &mut scratch.q, rows)?;
            layer
                .v
                .forward(ctx, &scratch.normed, &mut scratch.attn, rows)?;
            let (k, v) = (&scratch.q, &scratch.attn);
            <B as BackendKvDtype<KvF32>>::kv_append(ctx, kv, k, v, &encoding.batch)?;
        }
        Ok(())
    }

    fn upload(
        &mut self,
        ctx: &mut B::Context,
        tokens: &[TokenId],
        position: usize,
        states: usize,
    ) -> Result<()> {
        let ids: Vec<i32> = tokens.iter().map(|&token| token as i32).collect();
        let behind = position + tokens.len();
        let positions: Vec<i32> = (position..behind).map(|i| i as i32).collect();
        B::write(ctx, &mut self.batch.tokens, 0, &ids)?;
        B::write(ctx, &mut self.positions, 0, &positions)?;
        upload::<B>(ctx, &mut self.batch, &[(tokens.len(), behind)])?;
        upload::<B>(ctx, &mut self.cross_batch, &[(tokens.len(), states)])
    }

    fn run(
        &mut self,
        ctx: &mut B::Context,
        spec: &WhisperSpec,
        weights: &WhisperWeights<B>,
    ) -> Result<()> {
        let stack = &spec.decoder;
        let (rows, dim) = (self.batch.shape.tokens, stack.hidden);
        let shape = RowShape { rows, dim };
        let (ids, positions) = (&self.batch.tokens, &self.positions);
        weights.words.lookup(ctx, ids, &mut self.x, shape)?;
        let places = &weights.decoder_positions;
        places.lookup(ctx, positions, &mut self.embedded, shape)?;
        B::add_inplace(ctx, &mut self.x, &self.embedded, rows * dim)?;
        for (i, (layer, cross)) in weights.decoder.iter().enumerate() {
            let (kv, batch) = (&mut self.own[i], &self.batch);
            self.scratch
                .attend(ctx, (stack, layer), &mut self.x, kv, batch)?;
            self.look(ctx, spec, cross, i)?;
            self.scratch
                .feed_forward(ctx, (stack, &layer.mlp), &mut self.x, rows)?;
        }
        let norm = &weights.decoder_norm;
        self.scratch.norm(ctx, &self.x, norm, stack.norm(rows))?;
        let normed = &self.scratch.normed;
        B::copy_slice(ctx, normed, (rows - 1) * dim, &mut self.last, 0, dim)?;
        weights.head.logits(ctx, &self.last, &mut self.logits, 1)
    }

    /// `x += attention(norm(x))` over the encoder's states.
    fn look(
        &mut self,
        ctx: &mut B::Context,
        spec: &WhisperSpec,
        layer: &CrossLayer<B>,
        index: usize,
    ) -> Result<()> {
        let stack = &spec.decoder;
        let (rows, s) = (self.batch.shape.tokens, &mut self.scratch);
        s.norm(ctx, &self.x, &layer.norm, stack.norm(rows))?;
        layer.q.forward(ctx, &s.normed, &mut s.q, rows)?;
        let mut config = stack.attention();
        config.causal = false;
        let (kv, batch) = (&self.cross[index], &self.cross_batch);
        B::paged_attention::<KvF32>(ctx, &s.q, kv, None, batch, &mut s.attn, &config)?;
        layer.out.forward(ctx, &s.attn, &mut s.delta, rows)?;
        B::add_inplace(ctx, &mut self.x, &s.delta, rows * stack.hidden)
    }
}

impl<B: LlmBackend> SpeechModel for WhisperRunner<B> {
    fn backend(&self) -> &'static str {
        B::NAME
    }

    fn spec(&self) -> &WhisperSpec {
        &self.spec
    }

    fn encode(&mut self, mel: &[f32]) -> Result<()> {
        let spec = &self.spec;
        let expected = spec.mels * spec.frames();
        if mel.len() != expected {
            let reason = format!("found {} values, a window has {expected}", mel.len());
            return Err(Error::invalid("whisper", reason));
        }
        if self.encoder_ctx.is_some() {
            // Work of two contexts has no order.
            B::sync(&mut self.ctx)?;
        }
        let ctx = self.encoder_ctx.as_mut().unwrap_or(&mut self.ctx);
        self.encoding.upload(ctx, mel, spec.frames())?;
        self.encoding.run(ctx, spec, &self.weights)?;
        self.decoding
            .read_states(ctx, &self.weights, &mut self.encoding)?;
        self.encoder_ctx.as_mut().map_or(Ok(()), B::sync)
    }

    fn states(&mut self) -> Result<Vec<f32>> {
        let len = self.spec.positions * self.spec.encoder.hidden;
        let mut states = vec![B::Act::from_f32(0.0); len];
        let normed = &self.encoding.scratch.normed;
        B::read(&mut self.ctx, normed, 0, &mut states)?;
        Ok(states.into_iter().map(FloatElement::to_f32).collect())
    }

    fn decode(&mut self, tokens: &[TokenId], position: usize) -> Result<Vec<f32>> {
        let spec = &self.spec;
        let requested = position.saturating_add(tokens.len());
        if requested > spec.tokens {
            return Err(Error::ContextOverflow {
                requested,
                capacity: spec.tokens,
            });
        }
        let unknown = |&&token: &&TokenId| token as usize >= spec.vocab_size;
        if tokens.is_empty() || tokens.iter().any(|token| unknown(&token)) {
            let reason = format!(
                "{tokens:?}: expected tokens of a vocabulary of {}",
                spec.vocab_size
            );
            return Err(Error::invalid("whisper", reason));
        }
        let (ctx, decoding) = (&mut self.ctx, &mut self.decoding);
        decoding.upload(ctx, tokens, position, spec.positions)?;
        decoding.run(ctx, spec, &self.weights)?;
        let mut logits = vec![<B::Logit as FloatElement>::from_f32(0.0); spec.vocab_size];
        B::read(ctx, &decoding.logits, 0, &mut logits)?;
        Ok(logits.into_iter().map(FloatElement::to_f32).collect())
    }
}
