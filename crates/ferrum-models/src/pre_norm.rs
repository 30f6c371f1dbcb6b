//! Transformer layers that norm before each part and add behind it, over texts or pictures or sounds that are there as a
//! whole: what Whisper's encoder and the towers of CLIP and SigLIP have in common.
//!
//! Keys and values of a layer lie in one paged pool, which all layers use in turn, as with
//! [text encoders](crate::encoder).

use crate::linear::Linear;
use crate::named::{Bias, LayerNorm, NamedLoader};
use crate::spec::Activation;
use crate::weights::WeightForm;
use ferrum_kernels::{
    Act, AttnConfig, BackendKvDtype, BatchShape, DeviceBatch, KvF32, KvLayer, LlmBackend,
    NormShape, PagedKvShape, PagedQkv, QkvShape, QkvTransform, Residual,
};
use ferrum_types::Result;

/// Tokens of a block of a pool.
pub(crate) const BLOCK_SIZE: usize = 32;

/// The function `f(scale · x) / scale` of an activation `f`.
///
/// With SiLU and 1.702 it is CLIP's quick GELU, `x · sigmoid(1.702 x)`. It costs nothing: the norm before the first
/// projection and that projection's bias carry the factor, and the output of the second is divided by it as it is added.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PreNormActivation {
    /// `f`.
    pub function: Activation,
    /// 1 for `f` itself.
    pub scale: f32,
}

impl PreNormActivation {
    /// The approximation of GELU by a sigmoid (Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016).
    pub const QUICK_GELU: Self = Self {
        function: Activation::Silu,
        scale: 1.702,
    };
}

impl From<Activation> for PreNormActivation {
    fn from(function: Activation) -> Self {
        Self {
            function,
            scale: 1.0,
        }
    }
}

/// What such layers are.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PreNormSpec {
    /// Elements of a token's vector.
    pub hidden: usize,
    /// Layers, all alike.
    pub layers: usize,
    /// Attention heads.
    pub heads: usize,
    /// Elements between the projections of a feed-forward.
    pub intermediate: usize,
    /// Function between them.
    pub activation: PreNormActivation,
    /// Epsilon of all norms.
    pub norm_eps: f32,
    /// Whether a token sees only those before it.
    pub causal: bool,
}

/// Most layers that a config may claim.
const MAX_LAYERS: usize = 10_000;

impl PreNormSpec {
    /// Elements of a head.
    pub fn head_dim(&self) -> usize {
        self.hidden / self.heads
    }

    /// Refuses sizes that cannot be; `what` is the part of the model that they are of.
    pub(crate) fn validate(&self, what: &str) -> std::result::Result<(), String> {
        let sizes = [
            ("hidden size", self.hidden),
            ("attention heads", self.heads),
            ("feed-forward size", self.intermediate),
        ];
        for (name, value) in sizes {
            // 2²⁴ keeps every product of two sizes inside 64 bits.
            if value == 0 || value > 1 << 24 {
                return Err(format!(
                    "{name} of the {what}: found {value}, expected 1 to 2^24"
                ));
            }
        }
        if self.layers == 0 || self.layers > MAX_LAYERS {
            let found = self.layers;
            return Err(format!(
                "layers of the {what}: found {found}, expected 1 to {MAX_LAYERS}"
            ));
        }
        match self.hidden.is_multiple_of(self.heads) {
            true => Ok(()),
            false => Err(format!(
                "hidden size of the {what}: found {}, expected a multiple of the {} heads",
                self.hidden, self.heads
            )),
        }
    }

    pub(crate) fn attention(&self) -> AttnConfig {
        AttnConfig {
            heads: self.heads,
            kv_heads: self.heads,
            head_dim: self.head_dim(),
            value_dim: self.head_dim(),
            scale: 1.0 / (self.head_dim() as f32).sqrt(),
            causal: self.causal,
            sliding_window: None,
            chunked: false,
            softcap: None,
        }
    }

    pub(crate) fn qkv(&self, tokens: usize) -> QkvShape {
        QkvShape {
            tokens,
            heads: self.heads,
            kv_heads: self.heads,
            head_dim: self.head_dim(),
            value_dim: self.head_dim(),
        }
    }

    pub(crate) fn norm(&self, rows: usize) -> NormShape {
        NormShape {
            rows,
            dim: self.hidden,
            eps: self.norm_eps,
        }
    }

    /// An empty pool of one layer for `tokens`, in sequences of which each may end inside a block.
    pub(crate) fn pool<B: LlmBackend>(
        &self,
        device: &B,
        tokens: usize,
        seqs: usize,
    ) -> Result<KvLayer<B, KvF32>> {
        <B as BackendKvDtype<KvF32>>::alloc_kv_layer(
            device,
            PagedKvShape {
                blocks: tokens.div_ceil(BLOCK_SIZE) + seqs,
                block_size: BLOCK_SIZE,
                kv_heads: self.heads,
                head_dim: self.head_dim(),
                value_dim: self.head_dim(),
                values_in_keys: false,
            },
        )
    }
}

/// Names of the parts of a layer, behind that of the layer.
pub(crate) struct PreNormNames {
    pub(crate) attention_norm: &'static str,
    /// The projection of queries, keys and values.
    pub(crate) qkv: [&'static str; 3],
    pub(crate) out: &'static str,
    /// Norm and projections of the feed-forward.
    pub(crate) mlp: [&'static str; 3],
}

/// Weights of a feed-forward with the norm before it.
pub(crate) struct PreNormMlp<B: LlmBackend> {
    norm: LayerNorm<B>,
    up: Box<dyn Linear<B>>,
    down: Box<dyn Linear<B>>,
}

impl<B: LlmBackend> PreNormMlp<B> {
    /// The feed-forward of these names: norm, first and second projection.
    pub(crate) fn load<W: WeightForm<B>>(
        loader: &mut NamedLoader<'_, '_, B, W>,
        spec: &PreNormSpec,
        [norm, up, down]: [String; 3],
    ) -> Result<Self> {
        let (hidden, inner, scale) = (spec.hidden, spec.intermediate, spec.activation.scale);
        Ok(Self {
            norm: loader.norm_times(&norm, hidden, scale)?,
            up: Box::new(loader.load_linear(&[up], [inner, hidden], Bias::Times(scale))?),
            down: Box::new(loader.load_linear(&[down], [hidden, inner], Bias::Times(scale))?),
        })
    }
}

/// Weights of one layer.
pub(crate) struct PreNormLayer<B: LlmBackend> {
    pub(crate) attention_norm: LayerNorm<B>,
    /// q, k and v as one projection.
    pub(crate) qkv: Box<dyn Linear<B>>,
    pub(crate) out: Box<dyn Linear<B>>,
    pub(crate) mlp: PreNormMlp<B>,
}

impl<B: LlmBackend> PreNormLayer<B> {
    /// The layer whose names begin with `prefix`.
    pub(crate) fn load<W: WeightForm<B>>(
        loader: &mut NamedLoader<'_, '_, B, W>,
        spec: &PreNormSpec,
        names: &PreNormNames,
        prefix: &str,
    ) -> Result<Self> {
        let hidden = spec.hidden;
        let name = |part: &str| format!("{prefix}.{part}");
        let qkv = names.qkv.map(name);
        Ok(Self {
            attention_norm: loader.norm(&name(names.attention_norm), hidden)?,
            qkv: Box::new(loader.load_linear(&qkv, [hidden, hidden], Bias::Some)?),
            out: Box::new(loader.load_linear(&[name(names.out)], [hidden, hidden], Bias::Each)?),
            mlp: PreNormMlp::load(loader, spec, names.mlp.map(name))?,
        })
    }
}

/// Activations of layers. Rows are tokens.
pub(crate) struct PreNormScratch<B: LlmBackend> {
    /// `[tokens, hidden]`.
    pub(crate) normed: Act<B>,
    /// `[tokens, 3 · hidden]`.
    pub(crate) qkv: Act<B>,
    /// `[tokens, hidden]`.
    pub(crate) q: Act<B>,
    /// `[tokens, hidden]`.
    pub(crate) attn: Act<B>,
    /// `[tokens, hidden]`: what a part adds.
    pub(crate) delta: Act<B>,
    /// `[tokens, intermediate]`.
    pub(crate) inner: Act<B>,
    /// `[tokens, intermediate]`.
    pub(crate) activated: Act<B>,
}

impl<B: LlmBackend> PreNormScratch<B> {
    pub(crate) fn new(device: &B, spec: &PreNormSpec, tokens: usize) -> Result<Self> {
        let act = |width: usize| device.alloc::<B::Act>(tokens.saturating_mul(width));
        Ok(Self {
            normed: act(spec.hidden)?,
            qkv: act(3 * spec.hidden)?,
            q: act(spec.hidden)?,
            attn: act(spec.hidden)?,
            delta: act(spec.hidden)?,
            inner: act(spec.intermediate)?,
            activated: act(spec.intermediate)?,
        })
    }

    /// `normed = norm(x)`.
    pub(crate) fn norm(
        &mut self,
        ctx: &mut B::Context,
        x: &Residual<B>,
        norm: &LayerNorm<B>,
        shape: NormShape,
    ) -> Result<()> {
        let LayerNorm { weight, bias } = norm;
        B::layer_norm(ctx, x, weight, Some(bias), &mut self.normed, shape)
    }

    /// `x += attention(norm(x))`, with the keys and values of this step's tokens written to `kv`.
    pub(crate) fn attend(
        &mut self,
        ctx: &mut B::Context,
        (spec, layer): (&PreNormSpec, &PreNormLayer<B>),
        x: &mut Residual<B>,
        kv: &mut KvLayer<B, KvF32>,
        batch: &DeviceBatch<B>,
    ) -> Result<()> {
        let rows = batch.shape.tokens;
        self.norm(ctx, x, &layer.attention_norm, spec.norm(rows))?;
        // [tokens, hidden] → [tokens, q | k | v]
        layer.qkv.forward(ctx, &self.normed, &mut self.qkv, rows)?;
        let input = PagedQkv {
            qkv: &self.qkv,
            transform: QkvTransform::none(),
            shape: spec.qkv(rows),
        };
        B::split_qkv_norm_rope_into_paged_cache::<KvF32>(ctx, input, &mut self.q, kv, batch)?;
        let config = spec.attention();
        B::paged_attention::<KvF32>(ctx, &self.q, kv, None, batch, &mut self.attn, &config)?;
        layer.out.forward(ctx, &self.attn, &mut self.delta, rows)?;
        B::add_inplace(ctx, x, &self.delta, rows * spec.hidden)
    }

    /// `x += feed_forward(norm(x))`.
    pub(crate) fn feed_forward(
        &mut self,
        ctx: &mut B::Context,
        (spec, mlp): (&PreNormSpec, &PreNormMlp<B>),
        x: &mut Residual<B>,
        rows: usize,
    ) -> Result<()> {
        let PreNormActivation { function, scale } = spec.activation;
        self.norm(ctx, x, &mlp.norm, spec.norm(rows))?;
        // [tokens, hidden] → [tokens, intermediate] → [tokens, hidden]
        mlp.up.forward(ctx, &self.normed, &mut self.inner, rows)?;
        let (function, len) = (function.function(), rows * spec.intermediate);
        B::activate(ctx, function, &self.inner, None, &mut self.activated, len)?;
        mlp.down
            .forward(ctx, &self.activated, &mut self.delta, rows)?;
        let len = rows * spec.hidden;
        match scale == 1.0 {
            true => B::add_inplace(ctx, x, &self.delta, len),
            false => B::scaled_add_inplace(ctx, x, &self.delta, 1.0 / scale, len),
        }
    }

    /// All layers on `x`.
    pub(crate) fn layers(
        &mut self,
        ctx: &mut B::Context,
        (spec, layers): (&PreNormSpec, &[PreNormLayer<B>]),
        x: &mut Residual<B>,
        kv: &mut KvLayer<B, KvF32>,
        batch: &DeviceBatch<B>,
    ) -> Result<()> {
        for layer in layers {
            self.attend(ctx, (spec, layer), x, kv, batch)?;
            self.feed_forward(ctx, (spec, &layer.mlp), x, batch.shape.tokens)?;
        }
        Ok(())
    }
}

/// Buffers of a batch of at most `tokens` tokens in `seqs` sequences, each of at most `longest` tokens.
pub(crate) fn batch<B: LlmBackend>(
    device: &B,
    tokens: usize,
    seqs: usize,
    longest: usize,
) -> Result<DeviceBatch<B>> {
    let stride = longest.div_ceil(BLOCK_SIZE);
    Ok(DeviceBatch {
        shape: BatchShape {
            table_stride: stride,
            ..BatchShape::default()
        },
        tokens: device.alloc(tokens)?,
        rope_rows: device.alloc(tokens)?,
        query_starts: device.alloc(seqs + 1)?,
        kv_lens: device.alloc(seqs)?,
        state_slots: device.alloc(0)?,
        block_tables: vec![device.alloc(seqs * stride)?],
    })
}

/// Uploads that each sequence has so many new tokens over so many keys. Sequences have their blocks one behind the other,
/// as many as `keys` take.
pub(crate) fn upload<B: LlmBackend>(
    ctx: &mut B::Context,
    batch: &mut DeviceBatch<B>,
    seqs: &[(usize, usize)],
) -> Result<()> {
    let stride = batch.shape.table_stride;
    let (mut starts, mut lens, mut tables) = (vec![0i32], Vec::new(), Vec::new());
    let (mut tokens, mut block) = (0, 0);
    for &(queries, keys) in seqs {
        tokens += queries;
        starts.push(tokens as i32);
        lens.push(keys as i32);
        let blocks = keys.div_ceil(BLOCK_SIZE);
        tables.extend((block..block + blocks).map(|block| block as i32));
        tables.resize(lens.len() * stride, -1);
        block += blocks;
    }
    batch.shape = BatchShape {
        tokens,
        seqs: seqs.len(),
        table_stride: stride,
        max_query_len: seqs.iter().map(|seq| seq.0).max().unwrap_or(0),
        max_kv_len: seqs.iter().map(|seq| seq.1).max().unwrap_or(0),
    };
    B::write(ctx, &mut batch.query_starts, 0, &starts)?;
    B::write(ctx, &mut batch.kv_lens, 0, &lens)?;
    B::write(ctx, &mut batch.block_tables[0], 0, &tables)
}
