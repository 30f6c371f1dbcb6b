//! What an encoder is, and how its tensors are called, whatever kind of file it comes from.

use crate::named::WeightDtype;
use crate::pooling::Pooling;
use crate::spec::Activation;
use ferrum_formats::{ModelSource, TensorSource};

/// A BERT-like encoder: learned positions, bidirectional attention, and a LayerNorm behind each part, over the sum of
/// it and its input (Devlin et al., "BERT", 2019).
#[derive(Clone, Debug, PartialEq)]
pub struct EncoderSpec {
    /// Family name (`bert`, `roberta`).
    pub family: &'static str,
    /// Rows of the embedding table.
    pub vocab_size: usize,
    /// Elements of a token's vector.
    pub hidden_size: usize,
    /// Layers, all alike.
    pub layers: usize,
    /// Attention heads.
    pub heads: usize,
    /// Elements between the maps of a feed-forward.
    pub intermediate: usize,
    /// Function between them.
    pub activation: Activation,
    /// Epsilon of all norms.
    pub norm_eps: f32,
    /// Rows of the table of positions.
    pub positions: usize,
    /// Row of the first token's position: RoBERTa leaves those out that its padding had.
    pub first_position: usize,
    /// Rows of the table of segments.
    pub segments: usize,
    /// Logits that a pair of texts gets; 0: it has no classifier.
    pub labels: usize,
}

impl EncoderSpec {
    /// Tokens of the longest text.
    pub fn max_tokens(&self) -> usize {
        self.positions - self.first_position
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
    /// Tables of words, positions and segments.
    pub(super) tables: [&'static str; 3],
    /// The norm behind them.
    pub(super) norm: &'static str,
    /// What stands before the number of a layer.
    pub(super) layer: &'static str,
    /// In a layer: the maps of queries, keys and values.
    pub(super) qkv: [&'static str; 3],
    /// In a layer: the map behind attention, and both of the feed-forward.
    pub(super) maps: [&'static str; 3],
    /// In a layer: the norms behind attention and behind the feed-forward.
    pub(super) norms: [&'static str; 2],
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
const MAX_LAYERS: usize = 10_000;

/// Checks the sizes of a spec. The error names the field.
pub(super) fn validate(spec: &EncoderSpec) -> Result<(), String> {
    let sizes = [
        ("vocab_size", spec.vocab_size),
        ("hidden_size", spec.hidden_size),
        ("num_attention_heads", spec.heads),
        ("intermediate_size", spec.intermediate),
        ("max_position_embeddings", spec.positions),
        ("type_vocab_size", spec.segments),
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
    if spec.first_position >= spec.positions {
        return Err(format!(
            "max_position_embeddings: found {}, expected more than the {} that padding takes",
            spec.positions, spec.first_position
        ));
    }
    if !(spec.norm_eps.is_finite() && spec.norm_eps >= 0.0) {
        let found = spec.norm_eps;
        return Err(format!(
            "layer_norm_eps: found {found}, expected a finite number of at least 0"
        ));
    }
    Ok(())
}
