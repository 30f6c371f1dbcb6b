//! What an encoder is, and how its tensors are called, whatever kind of file it comes from.

use crate::dense::DenseLayers;
use crate::embedding_prompts::EmbeddingPrompts;
use crate::named::{Bias, WeightDtype};
use crate::pooling::Pooling;
use crate::spec::{Activation, RopeSpec};
use ferrum_formats::{ModelSource, TensorSource};

/// A BERT-like encoder: bidirectional attention, and a LayerNorm behind each part, over the sum of it and its input
/// (Devlin et al., "BERT", 2019). Newer ones rotate queries and keys instead of adding positions, and gate their
/// feed-forwards (Nussbaum et al., "Nomic Embed", 2024; Zhang et al., "mGTE", 2024), or norm before each part and have
/// windows in some layers (Warner et al., "ModernBERT", 2024).
#[derive(Clone, Debug, PartialEq)]
pub struct EncoderSpec {
    /// Family name (`bert`, `roberta`, …).
    pub family: &'static str,
    /// Rows of the embedding table.
    pub vocab_size: usize,
    /// Elements of a token's vector.
    pub hidden_size: usize,
    /// Layers, alike but for the [windows](Self::local) of some.
    pub layers: usize,
    /// Attention heads.
    pub heads: usize,
    /// Elements between the maps of a feed-forward.
    pub intermediate: usize,
    /// Function between them.
    pub activation: Activation,
    /// Whether its result is multiplied with a map of its own, as in `silu(gate) · up`.
    pub gated: bool,
    /// Epsilon of all norms.
    pub norm_eps: f32,
    /// Whether norms stand before parts instead of behind them, with one behind all layers. The first layer's attention has
    /// none: the embeddings are normed already.
    pub pre_norm: bool,
    /// How tokens know where they are.
    pub positions: Positions,
    /// Layers in which a token sees those near it alone.
    pub local: Option<LocalAttention>,
    /// Rows of the table of segments; 0: there is none.
    pub segments: usize,
    /// Logits that a pair of texts gets; 0: it has no classifier.
    pub labels: usize,
}

/// How tokens of an encoder know where they are.
#[derive(Clone, Debug, PartialEq)]
pub enum Positions {
    /// A vector of each position is added to that of the word.
    Learned {
        /// Rows of their table.
        rows: usize,
        /// Row of the first token's position: RoBERTa leaves those out that its padding had.
        first: usize,
    },
    /// Queries and keys are rotated.
    Rotary {
        /// By which angles.
        rope: RopeSpec,
        /// Tokens of the longest text.
        context: usize,
    },
}

/// Attention to near tokens.
#[derive(Clone, Debug, PartialEq)]
pub struct LocalAttention {
    /// A token sees those that are less than this away, to both sides.
    pub window: usize,
    /// By which angles queries and keys are rotated there.
    pub rope: RopeSpec,
    /// Which layers have it: one value for each.
    pub layers: Vec<bool>,
}

impl EncoderSpec {
    /// Tokens of the longest text.
    pub fn max_tokens(&self) -> usize {
        match &self.positions {
            Positions::Learned { rows, first } => rows - first,
            Positions::Rotary { context, .. } => *context,
        }
    }

    /// Elements of a head.
    pub fn head_dim(&self) -> usize {
        self.hidden_size / self.heads
    }
}

/// An encoder's folder that has been understood.
pub struct EncoderModel {
    /// The opened folder.
    pub source: ModelSource,
    /// What the forward path needs to know of it.
    pub spec: EncoderSpec,
    /// How its folder says that it pools, by the mean where that says nothing; `None` for ways that are not known.
    pub pooling: Option<Pooling>,
    /// What is applied to a pooled vector.
    pub dense: DenseLayers,
    /// What it may be given before texts that become vectors.
    pub prompts: EmbeddingPrompts,
    /// Tokens that sentence-transformers cuts texts off at, where it says so.
    pub max_seq_length: Option<usize>,
    /// In what type its matrices are kept on a device.
    pub dtype: WeightDtype,
    pub(super) names: EncoderNames,
}

/// Names of tensors, less `.weight` and `.bias`.
#[derive(Debug)]
pub(super) struct EncoderNames {
    /// What those of `parts` begin with.
    pub(super) prefix: &'static str,
    /// The map before the classifier.
    pub(super) pooler: String,
    /// The map to the logits.
    pub(super) classifier: &'static str,
    pub(super) parts: &'static PartNames,
}

/// Names of what all encoders have.
#[derive(Debug)]
pub(super) struct PartNames {
    /// Tables of words, positions and segments. Those that a model has none of are not looked for.
    pub(super) tables: [&'static str; 3],
    /// The norm behind them.
    pub(super) norm: &'static str,
    /// What stands before the number of a layer.
    pub(super) layer: &'static str,
    /// In a layer: the maps of queries, keys and values, or one of all three.
    pub(super) qkv: &'static [&'static str],
    /// In a layer: the map behind attention.
    pub(super) out: &'static str,
    /// In a layer: the maps into the feed-forward.
    pub(super) up: UpNames,
    /// In a layer: the map out of it.
    pub(super) down: &'static str,
    /// In a layer: the norms of attention and of the feed-forward.
    pub(super) norms: [&'static str; 2],
    /// The norm behind all layers, where those of parts stand before them.
    pub(super) final_norm: Option<&'static str>,
    /// Whether maps have biases.
    pub(super) bias: Bias,
}

/// Names of the maps into a feed-forward.
#[derive(Clone, Copy, Debug)]
pub(super) enum UpNames {
    /// One map.
    Plain(&'static str),
    /// The one that the function is applied to, and the one that its result is multiplied with.
    Gated(&'static str, &'static str),
    /// Both in one matrix.
    GateUp(&'static str),
    /// Both in one matrix, the second of these first.
    UpGate(&'static str),
}

impl EncoderNames {
    /// Logits that the classifier gives; 0 where there is none.
    pub(super) fn labels(&self, tensors: &dyn TensorSource) -> usize {
        let weight = |name: &str| tensors.get(&format!("{name}.weight"));
        let classifier = weight(&self.pooler).and(weight(self.classifier));
        classifier.map_or(0, |weight| weight.shape.first().copied().unwrap_or(0))
    }
}

/// Most layers that a config may claim.
pub(super) const MAX_LAYERS: usize = 10_000;

/// Most tokens that a text may have where no table of positions ends it.
const MAX_CONTEXT: usize = 1 << 17;

/// Checks the sizes of a spec. The error names the field as the config of BERT does.
pub(super) fn validate(spec: &EncoderSpec) -> Result<(), String> {
    let sizes = [
        ("vocab_size", spec.vocab_size),
        ("hidden_size", spec.hidden_size),
        ("num_attention_heads", spec.heads),
        ("intermediate_size", spec.intermediate),
        (
            "max_position_embeddings",
            match &spec.positions {
                Positions::Learned { rows, .. } => *rows,
                Positions::Rotary { context, .. } => *context,
            },
        ),
        // 0: there is no table.
        ("type_vocab_size", spec.segments.max(1)),
    ];
    for (name, value) in sizes {
        // 2³⁰ keeps every product of two sizes inside 64 bits.
        if value == 0 || value > 1 << 30 {
            return Err(format!("{name}: found {value}, expected 1 to 2^30"));
        }
    }
    if spec.layers == 0 || spec.layers > MAX_LAYERS {
        let found = spec.layers;
        return Err(format!(
            "num_hidden_layers: found {found}, expected 1 to {MAX_LAYERS}"
        ));
    }
    if !spec.hidden_size.is_multiple_of(spec.heads) {
        return Err(format!(
            "hidden_size: found {}, expected a multiple of the {} heads",
            spec.hidden_size, spec.heads
        ));
    }
    if let Some(local) = &spec.local
        && local.layers.len() != spec.layers
    {
        return Err(format!(
            "layer_types: found {} types, expected one for each of the {} layers",
            local.layers.len(),
            spec.layers
        ));
    }
    match spec.positions {
        Positions::Learned { rows, first } if first >= rows => {
            return Err(format!(
                "max_position_embeddings: found {rows}, expected more than the {first} that padding takes"
            ));
        }
        Positions::Rotary { context, .. } if context > MAX_CONTEXT => {
            return Err(format!(
                "max_position_embeddings: found {context}, expected at most {MAX_CONTEXT}"
            ));
        }
        Positions::Rotary { .. } if !spec.head_dim().is_multiple_of(2) => {
            return Err(format!(
                "hidden_size: found {}, expected heads of an even number, as they are rotated",
                spec.hidden_size
            ));
        }
        _ => {}
    }
    if !(spec.norm_eps.is_finite() && spec.norm_eps >= 0.0) {
        let found = spec.norm_eps;
        return Err(format!(
            "layer_norm_eps: found {found}, expected a finite number of at least 0"
        ));
    }
    Ok(())
}
