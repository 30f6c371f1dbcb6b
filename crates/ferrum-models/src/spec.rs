//! [`DecoderSpec`]: everything the forward path needs to know of a decoder, as plain data.
//!
//! A layer is two choices, attention and feed-forward, each behind a norm: `x += part(norm(x))`. A new
//! family fits by a new value, or by a new variant with its tensors in `inventory/` and its branch in
//! `layer.rs`; nothing else changes.

use ferrum_kernels::RopeStyle;
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
    /// Epsilon of all RMS norms.
    pub norm_eps: f32,
    /// Rotary embedding shared by all layers.
    pub rope: RopeSpec,
    /// Whether the output projection is the embedding table.
    pub tie_embeddings: bool,
}

/// One decoder layer.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerSpec {
    /// The mixing of tokens.
    pub attention: AttentionSpec,
    /// The part that looks at each token alone.
    pub feed_forward: FeedForwardSpec,
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
    /// A gated short convolution over time, without attention (LFM2).
    ShortConv(ShortConvSpec),
}

/// `out(c · conv(b · x))` of a projection to `[b | c | x]`, where `conv` is a causal convolution of each channel by
/// itself, over the last `kernel` tokens. There are as many channels as elements of the residual stream.
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
    /// Keys that a query sees, itself included; `None`: all before it.
    pub sliding_window: Option<usize>,
    /// Whether q and k heads are RMS-normed before rotation.
    pub qk_norm: bool,
    /// Whether q, k and v projections have biases.
    pub qkv_bias: bool,
    /// Whether the output projection has a bias.
    pub out_bias: bool,
    /// The earlier layer over whose keys and values this one attends; then it has no projections of its own for them.
    pub shared_kv: Option<usize>,
}

/// The part of a layer that looks at each token alone.
#[derive(Clone, Debug, PartialEq)]
pub enum FeedForwardSpec {
    /// `down(act(gate(x)) · up(x))`.
    GatedMlp(GatedMlpSpec),
    /// Mixture of experts: the weighted sum of some gated feed-forwards with SiLU, chosen for each
    /// token.
    Moe(MoeSpec),
}

/// A mixture of experts.
#[derive(Clone, Debug, PartialEq)]
pub struct MoeSpec {
    /// Experts.
    pub experts: usize,
    /// Experts chosen for each token.
    pub top_k: usize,
    /// Elements between the projections of one expert.
    pub intermediate: usize,
    /// How a router's logits become a choice and weights.
    pub routing: ExpertRouting,
}

/// How a router's logits become a choice of experts and their weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpertRouting {
    /// Softmax over all experts, of which the largest are taken.
    Softmax {
        /// Whether the weights of the chosen are divided by their sum.
        renormalize: bool,
    },
}

/// A gated feed-forward.
#[derive(Clone, Debug, PartialEq)]
pub struct GatedMlpSpec {
    /// Elements between the projections.
    pub intermediate: usize,
    /// Function on the gate.
    pub activation: Activation,
    /// Whether the three projections have biases.
    pub bias: bool,
}

/// Function on a gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// `x · sigmoid(x)`.
    Silu,
    /// GELU, exact.
    Gelu,
    /// GELU, tanh form.
    GeluTanh,
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
    Divisors(Vec<f32>),
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
            RopeScaling::Divisors(_) => f.write_str("by a divisor for each frequency"),
        }
    }
}

impl RopeScaling {
    /// Whether a token's angles depend on the length of its sequence.
    pub fn depends_on_length(&self) -> bool {
        matches!(self, RopeScaling::Dynamic { .. })
    }
}

impl LayerSpec {
    /// What the layer keeps of the tokens that it has seen.
    pub fn cache(&self) -> CacheSpec {
        let gqa = match &self.attention {
            AttentionSpec::Gqa(gqa) => gqa,
            AttentionSpec::ShortConv(conv) => {
                return CacheSpec::Recurrent {
                    conv: conv.kernel.saturating_sub(1) * conv.channels,
                    state: 0,
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
            window: gqa.sliding_window,
        }
    }
}

impl DecoderSpec {
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
        if !(self.norm_eps.is_finite() && self.norm_eps >= 0.0) {
            return Err(format!(
                "norm epsilon: found {}, expected a finite number of at least 0",
                self.norm_eps
            ));
        }
        if !(self.rope.theta.is_finite() && self.rope.theta > 0.0) {
            return Err(format!(
                "rope theta: found {}, expected > 0",
                self.rope.theta
            ));
        }
        if let RopeScaling::Divisors(divisors) = &self.rope.scaling
            && (divisors.len() != self.rope.rot_dim / 2 || divisors.contains(&0.0))
        {
            return Err(format!(
                "rope_freqs.weight: found {} factors, expected {} non-zero ones",
                divisors.len(),
                self.rope.rot_dim / 2
            ));
        }
        Ok(())
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
            AttentionSpec::ShortConv(conv) => {
                let (found, expected) = (conv.channels, self.hidden_size);
                if found != expected || !(1..=1 << 8).contains(&conv.kernel) {
                    return Err(format!(
                        "a convolution of {found} channels over {} tokens: expected {expected} over 1 to 256",
                        conv.kernel
                    ));
                }
                return layer.feed_forward.validate();
            }
        };
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
        if !self.rope.rot_dim.is_multiple_of(2)
            || self.rope.rot_dim == 0
            || self.rope.rot_dim > gqa.head_dim
        {
            return Err(format!(
                "{} rotated elements of a head of {}: expected an even number up to it",
                self.rope.rot_dim, gqa.head_dim
            ));
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
            FeedForwardSpec::GatedMlp(mlp) => (1, mlp.intermediate),
            FeedForwardSpec::Moe(moe) => {
                if !(1..=1 << 16).contains(&moe.experts) {
                    let found = moe.experts;
                    return Err(format!("{found} experts: expected 1 to 65536"));
                }
                if !(1..=moe.experts).contains(&moe.top_k) {
                    let (found, most) = (moe.top_k, moe.experts);
                    return Err(format!(
                        "{found} experts for each token: expected 1 to {most}"
                    ));
                }
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
