//! [`DecoderSpec`]: everything the forward path needs to know of a decoder, as plain data.
//!
//! A layer is three choices: attention, feed-forward, and where norms stand. A new family fits by a new value, or by
//! a new variant with its tensors in `inventory/` and its branch in `layer/`; nothing else changes.

mod linear_attention;
mod mla;
mod moe;

pub use linear_attention::LinearAttentionSpec;
pub use mla::MlaSpec;
pub use moe::{ExpertRouting, MoeSpec, SharedExpertSpec};

use ferrum_kernels::{GeluKind, RopeStyle};
use std::fmt;

/// A decoder-only transformer.
#[derive(Clone, Debug, PartialEq)]
pub struct DecoderSpec {
    /// Family name (`llama`, `qwen3`, …).
    pub family: &'static str,
    /// Rows of the embedding table and of the output projection.
    pub vocab_size: usize,
    /// Elements of the residual stream.
    pub hidden_size: usize,
    /// Longest sequence that the model was made for.
    pub context_length: usize,
    /// Layers in order; they may differ.
    pub layers: Vec<LayerSpec>,
    /// What the norms of the residual stream are. Those of queries and keys are RMS norms.
    pub norm: NormKind,
    /// Epsilon of all norms.
    pub norm_eps: f32,
    /// Rotary embeddings, which layers name by their place here.
    pub ropes: Vec<RopeSpec>,
    /// Rows of a learned table of positions, which are added to the embeddings.
    pub learned_positions: Option<usize>,
    /// Embeddings that layers have of their own.
    pub per_layer: Option<PerLayerSpec>,
    /// Factors outside of layers, and on what layers add.
    pub scales: Scales,
    /// Whether the output projection is the embedding table.
    pub tie_embeddings: bool,
    /// Whether the output projection has a bias.
    pub output_bias: bool,
}

/// Embeddings of tokens that each layer has for itself, gated by the stream behind its feed-forward (Gemma 4).
#[derive(Clone, Debug, PartialEq)]
pub struct PerLayerSpec {
    /// Rows of the table.
    pub vocab_size: usize,
    /// Layers that it has a part for: all of the decoder.
    pub layers: usize,
    /// Elements of a part.
    pub dim: usize,
    /// Function on the gate.
    pub activation: Activation,
}

/// Factors outside of layers, and on what layers add to the residual stream.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scales {
    /// On embeddings.
    pub embedding: f32,
    /// On what attention and feed-forward add.
    pub residual: f32,
    /// On logits.
    pub logits: f32,
    /// Bound of logits behind that factor: `cap · tanh(logit / cap)`.
    pub logit_softcap: Option<f32>,
}

impl Scales {
    /// No factor.
    pub const NONE: Self = Self {
        embedding: 1.0,
        residual: 1.0,
        logits: 1.0,
        logit_softcap: None,
    };
}

/// What a norm is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormKind {
    /// `x / √(mean(x²) + eps) · weight`.
    Rms,
    /// `(x - mean) / √(var + eps) · weight (+ bias)`.
    Layer {
        /// Whether it has a bias.
        bias: bool,
    },
}

/// One decoder layer.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerSpec {
    /// The mixing of tokens.
    pub attention: AttentionSpec,
    /// The part that looks at each token alone.
    pub feed_forward: FeedForwardSpec,
    /// Where norms stand.
    pub form: LayerForm,
    /// Whether the stream behind the layer is multiplied with a number of its own (Gemma 4).
    pub output_scale: bool,
}

/// Where the norms of a layer stand, and whether its parts follow each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LayerForm {
    /// `x += attention(norm(x))`, then `x += feed_forward(norm(x))`.
    PreNorm,
    /// `x += norm(attention(x))`, then `x += norm(feed_forward(x))`.
    PostNorm,
    /// `x += norm(attention(norm(x)))`, then `x += norm(feed_forward(norm(x)))`.
    Sandwich,
    /// `x += attention(norm(x)) + feed_forward(norm(x))`.
    Parallel {
        /// Whether both norms are the same.
        shared_norm: bool,
    },
}

/// What a layer keeps of the tokens that it has seen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CacheSpec {
    /// Keys and values of each token, by heads.
    Heads {
        /// Key and value heads.
        kv_heads: usize,
        /// Elements of a key head.
        key_dim: usize,
        /// Elements of a value head.
        value_dim: usize,
        /// Tokens that are needed, the newest included; `None`: all.
        window: Option<usize>,
    },
    /// One compressed row of each token for all heads (multi-head latent attention).
    Latent {
        /// Elements of the compressed part.
        rank: usize,
        /// Elements of the shared rotated part.
        rope_dim: usize,
    },
    /// A state of fixed size for each sequence, whatever its length (delta networks, Mamba).
    Recurrent {
        /// Elements of the convolution's last inputs.
        conv: usize,
        /// Elements of the recurrent state.
        state: usize,
    },
    /// The cache of an earlier layer, which this one reads and does not write.
    SharedWith(usize),
    /// Nothing.
    None,
}

/// How a layer mixes tokens.
#[derive(Clone, Debug, PartialEq)]
pub enum AttentionSpec {
    /// Grouped-query attention; multi-head and multi-query are its borders.
    Gqa(GqaSpec),
    /// Multi-head latent attention (DeepSeek).
    Mla(MlaSpec),
    /// A gated short convolution over time, without attention (LFM2).
    ShortConv(ShortConvSpec),
    /// Linear attention over a state that decays (gated delta networks, Mamba-2).
    Linear(LinearAttentionSpec),
}

/// `out(c · conv(b · x))` of a projection to `[b | c | x]`, where `conv` is a causal convolution of each channel by
/// itself, over the last `kernel` tokens. There are at most as many channels as elements of the residual
/// stream.
#[derive(Clone, Debug, PartialEq)]
pub struct ShortConvSpec {
    /// Channels.
    pub channels: usize,
    /// Tokens that a sum reaches over, its own included.
    pub kernel: usize,
    /// Whether the projections and the convolution have biases.
    pub bias: bool,
}

/// Grouped-query attention.
#[derive(Clone, Debug, PartialEq)]
pub struct GqaSpec {
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; divides `heads`.
    pub kv_heads: usize,
    /// Elements of a query or key head.
    pub head_dim: usize,
    /// Elements of a value head.
    pub value_dim: usize,
    /// Factor on `q·k`.
    pub scale: f32,
    /// Whether a query sees no key behind it. With bidirectional attention a sequence is computed in one step.
    pub causal: bool,
    /// Keys that a query sees, itself included, on each side that it sees; `None`: all.
    pub sliding_window: Option<usize>,
    /// Whether these windows lie side by side, so that a query sees keys of its own alone.
    pub chunked: bool,
    /// The rotation of queries and keys, of [`DecoderSpec::ropes`]; `None`: they are not rotated.
    pub rope: Option<usize>,
    /// What queries are multiplied with by their positions, of [`DecoderSpec::ropes`]: one of
    /// [temperatures](RopeScaling::Temperature).
    pub query_scale: Option<usize>,
    /// Bound of scores: `cap · tanh(score / cap)`.
    pub softcap: Option<f32>,
    /// Whether each head has a score more that takes a share of attention and gives nothing (GPT-OSS).
    pub sinks: bool,
    /// What is normed of queries and keys before rotation.
    pub qk_norm: QkNormSpec,
    /// Whether q, k and v projections have biases.
    pub qkv_bias: bool,
    /// Whether the output projection has a bias.
    pub out_bias: bool,
    /// Whether attention's output is multiplied with the sigmoid of a projection of the layer's input (Qwen3-Next).
    pub gate: bool,
    /// The earlier layer over whose keys and values this one attends; then it has no projections of its own for them.
    pub shared_kv: Option<usize>,
    /// Whether values are the projection of keys, before their norm and rotation; then they have none of their own.
    pub keys_are_values: bool,
    /// Whether each value head is RMS-normed, without weights.
    pub value_norm: bool,
}

impl GqaSpec {
    /// Outputs of the joined projection of queries, keys and values, of which it may lack some.
    pub(crate) fn projected_dim(&self) -> usize {
        let shape = self.qkv_shape(0);
        match (self.shared_kv, self.keys_are_values) {
            (Some(_), _) => shape.q_dim(),
            (None, true) => shape.q_dim() + shape.k_dim(),
            (None, false) => shape.row_dim(),
        }
    }

    /// Whether queries and keys have layer norms.
    pub(crate) fn has_layer_norms(&self) -> bool {
        matches!(self.qk_norm, QkNormSpec::LayerHeads | QkNormSpec::LayerEach)
    }

    /// Whether queries, keys and values are parted before they are normed, rotated and kept, instead of all in one op.
    pub(crate) fn parts_heads(&self) -> bool {
        self.shared_kv.is_none()
            && (self.keys_are_values
                || self.value_norm
                || self.query_scale.is_some()
                || self.has_layer_norms()
                || self.qk_norm == QkNormSpec::Projection)
    }
}

/// What is normed of queries and keys: RMS-normed, if nothing else is said.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QkNormSpec {
    /// Nothing.
    None,
    /// Each head by itself, with the same weights for all.
    Heads,
    /// Each head by itself, without weights.
    Unweighted,
    /// All heads of a token together.
    Projection,
    /// Each head by itself, by a layer norm with the same weights and biases for all (Phi).
    LayerHeads,
    /// Each head by itself, by a layer norm with weights of its own and no biases (Command-R+).
    LayerEach,
}

/// The part of a layer that looks at each token alone.
#[derive(Clone, Debug, PartialEq)]
pub enum FeedForwardSpec {
    /// `down(act(gate(x)) · up(x))`.
    GatedMlp(MlpSpec),
    /// `down(act(up(x)))`.
    Mlp(MlpSpec),
    /// A mixture of experts.
    Moe(MoeSpec),
}

/// A feed-forward of linear maps.
#[derive(Clone, Debug, PartialEq)]
pub struct MlpSpec {
    /// Elements between the projections.
    pub intermediate: usize,
    /// Function on the gate, or between the projections where there is none.
    pub activation: Activation,
    /// Whether the projections have biases.
    pub bias: bool,
}

/// Function in a feed-forward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// `x · sigmoid(x)`.
    Silu,
    /// GELU, exact.
    Gelu,
    /// GELU, tanh form.
    GeluTanh,
}

impl Activation {
    /// The same as an argument of [`Backend::activate`](ferrum_kernels::Backend::activate).
    pub(crate) fn function(self) -> ferrum_kernels::Activation {
        match self {
            Activation::Silu => ferrum_kernels::Activation::Silu,
            Activation::Gelu => ferrum_kernels::Activation::Gelu(GeluKind::Exact),
            Activation::GeluTanh => ferrum_kernels::Activation::Gelu(GeluKind::Tanh),
        }
    }
}

impl fmt::Display for Activation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Activation::Silu => "silu",
            Activation::Gelu => "gelu",
            Activation::GeluTanh => "gelu (tanh)",
        })
    }
}

/// Rotary position embedding of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeSpec {
    /// Rotated elements of a head.
    pub rot_dim: usize,
    /// Base of the frequencies.
    pub theta: f32,
    /// How elements pair up.
    pub style: RopeStyle,
    /// How frequencies are stretched for long contexts.
    pub scaling: RopeScaling,
}

/// RoPE scaling. Sources: the `transformers` implementations of the same names.
#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    /// None.
    None,
    /// All frequencies divided by `factor`.
    Linear {
        /// Stretch.
        factor: f32,
    },
    /// NTK-aware base, from the length of the sequence once it passes `max_position`.
    Dynamic {
        /// Stretch.
        factor: f32,
        /// Length up to which nothing changes.
        max_position: usize,
    },
    /// YaRN (Peng et al., 2023).
    Yarn {
        /// Stretch.
        factor: f32,
        /// Factor on sines and cosines.
        attention_factor: f32,
        /// Turns above which a frequency is kept.
        beta_fast: f32,
        /// Turns below which a frequency is divided by `factor`.
        beta_slow: f32,
        /// Context of pre-training.
        original_max_position: usize,
        /// Whether the ramp's ends are rounded outwards to whole dimensions.
        truncate: bool,
    },
    /// Llama 3.1's piecewise scaling.
    Llama3 {
        /// Stretch of low frequencies.
        factor: f32,
        /// Turns below which a frequency counts as low.
        low_freq_factor: f32,
        /// Turns above which a frequency counts as high.
        high_freq_factor: f32,
        /// Context of pre-training.
        original_max_position: usize,
    },
    /// Each frequency divided by its own number (`rope_freqs.weight` of GGUF files), `[rot_dim/2]`.
    Factors(Vec<f32>),
    /// LongRoPE (Ding et al., 2024): a divisor for each frequency, `[rot_dim/2]`, from the length of the sequence.
    LongRope {
        /// Divisors up to `original_max_position`.
        short: Vec<f32>,
        /// Divisors beyond it.
        long: Vec<f32>,
        /// Factor on sines and cosines.
        attention_factor: f32,
        /// Context of pre-training.
        original_max_position: usize,
    },
    /// No rotation: a factor of `1 + scale · ln(1 + ⌊(position + 1) / floor⌋)` (Llama 4).
    Temperature {
        /// Tokens that the factor is the same for.
        floor: f32,
        /// Growth of the factor.
        scale: f32,
    },
}

impl fmt::Display for RopeScaling {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RopeScaling::None => f.write_str("none"),
            RopeScaling::Linear { factor } => write!(f, "linear, factor {factor}"),
            RopeScaling::Dynamic {
                factor,
                max_position,
            } => write!(f, "dynamic, factor {factor} beyond {max_position}"),
            RopeScaling::Yarn {
                factor,
                attention_factor,
                original_max_position,
                ..
            } => write!(
                f,
                "yarn, factor {factor} from {original_max_position}, attention factor {attention_factor}"
            ),
            RopeScaling::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_max_position,
            } => write!(
                f,
                "llama3, factor {factor} from {original_max_position}, low {low_freq_factor}, high {high_freq_factor}"
            ),
            RopeScaling::Factors(_) => f.write_str("by a divisor for each frequency"),
            RopeScaling::Temperature { floor, scale } => {
                write!(f, "a factor on queries, {scale} for each {floor} tokens")
            }
            RopeScaling::LongRope {
                attention_factor,
                original_max_position,
                ..
            } => write!(
                f,
                "longrope, from {original_max_position}, attention factor {attention_factor}"
            ),
        }
    }
}

impl RopeScaling {
    /// Whether a token's angles depend on the length of its sequence.
    pub fn depends_on_length(&self) -> bool {
        matches!(
            self,
            RopeScaling::Dynamic { .. } | RopeScaling::LongRope { .. }
        )
    }

    /// The divisors of frequencies that it has, by name.
    fn divisors(&self) -> Vec<(&'static str, &[f32])> {
        match self {
            RopeScaling::Factors(all) => vec![("rope_freqs.weight", all)],
            RopeScaling::LongRope { short, long, .. } => {
                vec![("short_factor", short), ("long_factor", long)]
            }
            _ => Vec::new(),
        }
    }
}

impl RopeSpec {
    fn validate(&self) -> Result<(), String> {
        if !(self.theta.is_finite() && self.theta > 0.0) {
            return Err(format!("rope theta: found {}, expected > 0", self.theta));
        }
        for (name, divisors) in self.scaling.divisors() {
            let (found, expected) = (divisors.len(), self.rot_dim / 2);
            if found != expected || divisors.contains(&0.0) {
                return Err(format!(
                    "{name}: found {found} factors, expected {expected} non-zero ones"
                ));
            }
        }
        Ok(())
    }
}

impl LayerSpec {
    /// What the layer keeps of the tokens that it has seen.
    pub fn cache(&self) -> CacheSpec {
        let gqa = match &self.attention {
            AttentionSpec::Gqa(gqa) => gqa,
            AttentionSpec::Mla(mla) => {
                return CacheSpec::Latent {
                    rank: mla.rank,
                    rope_dim: mla.rope_dim,
                };
            }
            AttentionSpec::ShortConv(conv) => {
                return CacheSpec::Recurrent {
                    conv: conv.kernel.saturating_sub(1) * conv.channels,
                    state: 0,
                };
            }
            AttentionSpec::Linear(linear) => {
                return CacheSpec::Recurrent {
                    conv: linear.conv_state(),
                    state: linear.shape(0).state_len(),
                };
            }
        };
        if let Some(owner) = gqa.shared_kv {
            return CacheSpec::SharedWith(owner);
        }
        CacheSpec::Heads {
            kv_heads: gqa.kv_heads,
            key_dim: gqa.head_dim,
            value_dim: gqa.value_dim,
            // Of a sequence that is computed in one step, all keys are needed.
            window: gqa.sliding_window.filter(|_| gqa.causal),
        }
    }
}

impl DecoderSpec {
    /// Whether a token's angles depend on the length of its sequence in some layer.
    pub fn depends_on_length(&self) -> bool {
        self.ropes.iter().any(|r| r.scaling.depends_on_length())
    }

    /// Whether attention is causal in all layers. With bidirectional attention a sequence is computed in one step, for its states alone: nothing can be
    /// generated.
    pub fn is_causal(&self) -> bool {
        self.layers.iter().all(|layer| match &layer.attention {
            AttentionSpec::Gqa(gqa) => gqa.causal,
            AttentionSpec::Mla(_) | AttentionSpec::ShortConv(_) | AttentionSpec::Linear(_) => true,
        })
    }

    /// How elements of rotated heads pair up, which is the same in all layers.
    pub fn rope_style(&self) -> RopeStyle {
        self.ropes
            .first()
            .map_or(RopeStyle::HalfSplit, |rope| rope.style)
    }

    /// The experts of the first layer that has some.
    pub fn experts(&self) -> Option<&MoeSpec> {
        self.layers
            .iter()
            .find_map(|layer| match &layer.feed_forward {
                FeedForwardSpec::Moe(moe) => Some(moe),
                FeedForwardSpec::GatedMlp(_) | FeedForwardSpec::Mlp(_) => None,
            })
    }

    /// The cache that a layer uses: its own, or that of the layer which it shares one with.
    pub fn own_cache(&self, layer: usize) -> CacheSpec {
        match self.layers.get(layer).map(LayerSpec::cache) {
            Some(CacheSpec::SharedWith(earlier)) if earlier < layer => self.own_cache(earlier),
            Some(cache) => cache,
            None => CacheSpec::None,
        }
    }

    /// Checks that the numbers fit together; `Err` says which do not.
    pub fn validate(&self) -> Result<(), String> {
        let positive = [
            ("vocab_size", self.vocab_size),
            ("hidden_size", self.hidden_size),
            ("context length", self.context_length),
            ("number of layers", self.layers.len()),
        ];
        for (name, value) in positive {
            // 2³⁰ keeps every product of two sizes inside 64 bits.
            if value == 0 || value > 1 << 30 {
                return Err(format!("{name}: found {value}, expected 1 to 2^30"));
            }
        }
        for (i, layer) in self.layers.iter().enumerate() {
            self.validate_layer(layer)
                .and_then(|()| self.validate_shared(i))
                .map_err(|reason| format!("layer {i}: {reason}"))?;
        }
        let latent = self
            .layers
            .iter()
            .filter_map(|layer| match &layer.attention {
                AttentionSpec::Mla(mla) => Some(mla.heads),
                AttentionSpec::Gqa(_) | AttentionSpec::ShortConv(_) | AttentionSpec::Linear(_) => {
                    None
                }
            });
        let mut latent = latent.peekable();
        let first = latent.peek().copied();
        if latent.any(|heads| Some(heads) != first) {
            return Err(
                "layers of latent attention with different numbers of heads are not supported"
                    .into(),
            );
        }
        if !(self.norm_eps.is_finite() && self.norm_eps >= 0.0) {
            return Err(format!(
                "norm epsilon: found {}, expected a finite number of at least 0",
                self.norm_eps
            ));
        }
        if let Some(PerLayerSpec {
            vocab_size,
            layers,
            dim,
            ..
        }) = self.per_layer
        {
            let most = 1 << 30;
            if !(1..=most).contains(&vocab_size) || !(1..=most / layers.max(1)).contains(&dim) {
                return Err(format!(
                    "embeddings of {vocab_size} tokens with {dim} elements for each layer are out of range"
                ));
            }
        }
        if self.learned_positions.is_some() && self.depends_on_length() {
            return Err("learned positions beside frequencies by length are not supported".into());
        }
        let Scales {
            embedding,
            residual,
            logits,
            logit_softcap,
        } = self.scales;
        let factors = [embedding, residual, logits, logit_softcap.unwrap_or(1.0)];
        if let Some(found) = factors.iter().find(|x| !x.is_finite() || **x == 0.0) {
            return Err(format!(
                "a factor of {found}: expected a finite number that is not 0"
            ));
        }
        self.ropes.iter().try_for_each(RopeSpec::validate)
    }

    /// Keys and values that a layer shares are there before it, and are those that it would have.
    fn validate_shared(&self, index: usize) -> Result<(), String> {
        let CacheSpec::SharedWith(owner) = self.layers[index].cache() else {
            return Ok(());
        };
        let AttentionSpec::Gqa(gqa) = &self.layers[index].attention else {
            return Ok(());
        };
        let earlier = self.layers[..index].get(owner).map(LayerSpec::cache);
        let Some(CacheSpec::Heads {
            kv_heads,
            key_dim,
            value_dim,
            window,
        }) = earlier
        else {
            return Err(format!(
                "it shares the keys and values of layer {owner}: expected an earlier layer that has its own"
            ));
        };
        let found = [gqa.kv_heads, gqa.head_dim, gqa.value_dim];
        if found != [kv_heads, key_dim, value_dim] {
            return Err(format!(
                "{} kv heads with keys of {} and values of {}: layer {owner}, whose it shares, has {kv_heads} of \
                 {key_dim} and {value_dim}",
                found[0], found[1], found[2]
            ));
        }
        // What is behind the window of the layer that keeps them may be gone.
        let widest = |window: Option<usize>| window.unwrap_or(usize::MAX);
        if widest(gqa.sliding_window) > widest(window) {
            return Err(format!(
                "its window reaches further than that of layer {owner}, whose keys and values it shares"
            ));
        }
        Ok(())
    }

    fn validate_layer(&self, layer: &LayerSpec) -> Result<(), String> {
        let gqa = match &layer.attention {
            AttentionSpec::Gqa(gqa) => gqa,
            AttentionSpec::Mla(mla) => {
                mla.validate(&self.ropes)?;
                return layer.feed_forward.validate();
            }
            AttentionSpec::Linear(linear) => {
                linear.validate()?;
                if matches!(layer.form, LayerForm::Parallel { .. }) {
                    return Err("linear attention beside a feed-forward is not supported".into());
                }
                return layer.feed_forward.validate();
            }
            AttentionSpec::ShortConv(conv) => {
                let (channels, most) = (conv.channels, self.hidden_size);
                if !(1..=most).contains(&channels) || !(1..=1 << 8).contains(&conv.kernel) {
                    return Err(format!(
                        "a convolution of {channels} channels over {} tokens: expected 1 to {most} over 1 to 256",
                        conv.kernel
                    ));
                }
                if layer.form == (LayerForm::Parallel { shared_norm: true }) {
                    return Err("a convolution beside a feed-forward is not supported".into());
                }
                return layer.feed_forward.validate();
            }
        };
        let over_all = gqa.qk_norm == QkNormSpec::Projection;
        if gqa.shared_kv.is_some() && (over_all || gqa.has_layer_norms()) {
            return Err("such a norm of query heads without keys is not supported".into());
        }
        if (over_all || gqa.has_layer_norms()) && (gqa.keys_are_values || gqa.value_norm) {
            return Err("such a norm of heads beside one of values is not supported".into());
        }
        if gqa.keys_are_values && gqa.value_dim != gqa.head_dim {
            return Err(format!(
                "values of {} elements that are keys of {}",
                gqa.value_dim, gqa.head_dim
            ));
        }
        if gqa.heads == 0 || gqa.kv_heads == 0 || !gqa.heads.is_multiple_of(gqa.kv_heads) {
            return Err(format!(
                "{} query heads and {} kv heads: the first must be a multiple of the second",
                gqa.heads, gqa.kv_heads
            ));
        }
        let in_range = |dim: usize| (1..=1 << 14).contains(&dim);
        if gqa.heads > 1 << 15 || !in_range(gqa.head_dim) || !in_range(gqa.value_dim) {
            return Err(format!(
                "{} heads with keys of {} and values of {} elements are out of range",
                gqa.heads, gqa.head_dim, gqa.value_dim
            ));
        }
        if let Some(index) = gqa.rope {
            let Some(RopeSpec { rot_dim, .. }) = self.ropes.get(index) else {
                return Err(format!("it has no rotary embedding {index}"));
            };
            if !rot_dim.is_multiple_of(2) || *rot_dim == 0 || *rot_dim > gqa.head_dim {
                return Err(format!(
                    "{rot_dim} rotated elements of a head of {}: expected an even number up to it",
                    gqa.head_dim
                ));
            }
        }
        if let Some(index) = gqa.query_scale {
            let found = self.ropes.get(index).map(|rope| rope.rot_dim);
            if found != Some(gqa.head_dim) || gqa.shared_kv.is_some() {
                return Err("a factor on queries: expected one of whole heads".into());
            }
        }
        let positive = |x: f32| x.is_finite() && x > 0.0;
        if !positive(gqa.scale) || !gqa.softcap.is_none_or(positive) {
            return Err("the factor or the bound of scores: expected positive numbers".into());
        }
        if gqa.sliding_window == Some(0) {
            return Err("sliding window of 0: expected at least 1".into());
        }
        layer.feed_forward.validate()
    }
}

impl FeedForwardSpec {
    fn validate(&self) -> Result<(), String> {
        let (experts, intermediate) = match self {
            FeedForwardSpec::GatedMlp(mlp) | FeedForwardSpec::Mlp(mlp) => (1, mlp.intermediate),
            FeedForwardSpec::Moe(moe) => {
                moe.validate()?;
                (moe.experts, moe.intermediate)
            }
        };
        // The same bound for all experts together.
        if intermediate == 0 || intermediate > (1 << 30) / experts {
            return Err(format!(
                "feed-forward size {intermediate} (of {experts}) is out of range"
            ));
        }
        Ok(())
    }
}
