//! What an encoder is, read from a Hugging Face folder.

use super::gguf;
use crate::families::hint_of_supported;
use crate::named::WeightDtype;
use crate::pooling::Pooling;
use crate::spec::Activation;
use ferrum_formats::{HfConfig, HfFolder, ModelSource, TensorSource};
use ferrum_types::{Error, Result};

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

/// Encoders whose checkpoints have the same names.
#[derive(Debug)]
struct EncoderFamily {
    name: &'static str,
    architectures: &'static [&'static str],
    /// What names begin with in checkpoints that have a head.
    prefix: &'static str,
    /// Positions count from behind the id of padding.
    positions_behind_padding: bool,
    /// The map before the classifier, whose result goes through tanh.
    pooler: &'static str,
    /// Whether `pooler` lies under the prefix.
    pooler_in_body: bool,
    /// The map to the logits.
    classifier: &'static str,
    /// What `transformers` takes for keys that a config leaves out.
    segments: usize,
    norm_eps: f64,
    padding: usize,
}

static FAMILIES: [EncoderFamily; 2] = [
    EncoderFamily {
        name: "bert",
        architectures: &[
            "BertModel",
            "BertForMaskedLM",
            "BertForSequenceClassification",
        ],
        prefix: "bert.",
        positions_behind_padding: false,
        pooler: "pooler.dense",
        pooler_in_body: true,
        classifier: "classifier",
        segments: 2,
        norm_eps: 1e-12,
        padding: 0,
    },
    EncoderFamily {
        name: "roberta",
        architectures: &[
            "RobertaModel",
            "RobertaForMaskedLM",
            "RobertaForSequenceClassification",
            "XLMRobertaModel",
            "XLMRobertaForMaskedLM",
            "XLMRobertaForSequenceClassification",
            "CamembertModel",
        ],
        prefix: "roberta.",
        positions_behind_padding: true,
        pooler: "classifier.dense",
        pooler_in_body: false,
        classifier: "classifier.out_proj",
        segments: 2,
        norm_eps: 1e-12,
        padding: 1,
    },
];

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

static HF_PARTS: PartNames = PartNames {
    tables: [
        "embeddings.word_embeddings",
        "embeddings.position_embeddings",
        "embeddings.token_type_embeddings",
    ],
    norm: "embeddings.LayerNorm",
    layer: "encoder.layer.",
    qkv: [
        "attention.self.query",
        "attention.self.key",
        "attention.self.value",
    ],
    maps: [
        "attention.output.dense",
        "intermediate.dense",
        "output.dense",
    ],
    norms: ["attention.output.LayerNorm", "output.LayerNorm"],
};

impl EncoderNames {
    /// Logits that the classifier gives; 0 where there is none.
    pub(super) fn labels(&self, tensors: &dyn TensorSource) -> usize {
        let weight = |name: &str| tensors.get(&format!("{name}.weight"));
        let classifier = weight(&self.pooler).and(weight(self.classifier));
        classifier.map_or(0, |weight| weight.shape.first().copied().unwrap_or(0))
    }
}

fn family_of(config: &HfConfig) -> Option<&'static EncoderFamily> {
    let named = config.architectures().ok()?;
    let mut families = FAMILIES.iter();
    families.find(|family| {
        let mut known = family.architectures.iter();
        known.any(|architecture| named.contains(architecture))
    })
}

/// Whether a model is an encoder that [`read_encoder`] reads.
pub fn is_encoder(source: &ModelSource) -> bool {
    match source {
        ModelSource::Hf(folder) => family_of(&folder.config).is_some(),
        ModelSource::Gguf(gguf) => gguf
            .architecture()
            .is_ok_and(|name| name == gguf::ARCHITECTURE),
    }
}

/// Reads an encoder's config.
///
/// # Errors
/// [`Error::Model`] for an architecture that is none of the encoders known, or a bad field.
pub fn read_encoder(source: ModelSource) -> Result<EncoderModel> {
    let folder = match &source {
        ModelSource::Hf(folder) => folder,
        ModelSource::Gguf(gguf) => {
            let (spec, names) = gguf::read(gguf)?;
            return Ok(EncoderModel {
                spec,
                pooling: Pooling::of_model(&source, Pooling::Mean)?,
                max_seq_length: None,
                dtype: WeightDtype::default(),
                names,
                source,
            });
        }
    };
    let Some(family) = family_of(&folder.config) else {
        let found = folder.config.architectures()?.join(", ");
        let known: Vec<_> = FAMILIES
            .iter()
            .flat_map(|family| family.architectures)
            .copied()
            .collect();
        return Err(Error::Model(format!(
            "{}: field \"architectures\": \"{found}\" is no encoder that is supported\n{}",
            folder.config.path().display(),
            hint_of_supported(&found, &known)
        )));
    };
    crate::checkpoint::check_scheme(folder)?;
    let embedding = "embeddings.word_embeddings.weight";
    let has = |name: &str| folder.tensors.get(name).is_some();
    let prefix = match has(embedding) {
        true => "",
        false => family.prefix,
    };
    let names = EncoderNames {
        prefix,
        pooler: match family.pooler_in_body {
            true => format!("{prefix}{}", family.pooler),
            false => family.pooler.to_owned(),
        },
        classifier: family.classifier,
        parts: &HF_PARTS,
    };
    let spec = spec(family, folder, &names)?;
    Ok(EncoderModel {
        spec,
        pooling: Pooling::of_model(&source, Pooling::Mean)?,
        max_seq_length: max_seq_length(folder)?,
        dtype: WeightDtype::default(),
        names,
        source,
    })
}

fn spec(
    family: &'static EncoderFamily,
    folder: &HfFolder,
    names: &EncoderNames,
) -> Result<EncoderSpec> {
    let config = &folder.config;
    let embedding = config.str("position_embedding_type")?.unwrap_or("absolute");
    if embedding != "absolute" {
        let expected = "absolute, the only kind of positions that is supported";
        return Err(config
            .field_error("position_embedding_type", expected)
            .into());
    }
    let padding = config.usize("pad_token_id")?.unwrap_or(family.padding);
    let first_position = match family.positions_behind_padding {
        true => padding.saturating_add(1),
        false => 0,
    };
    let spec = EncoderSpec {
        family: family.name,
        vocab_size: config.require_usize("vocab_size")?,
        hidden_size: config.require_usize("hidden_size")?,
        layers: config.require_usize("num_hidden_layers")?,
        heads: config.require_usize("num_attention_heads")?,
        intermediate: config.require_usize("intermediate_size")?,
        activation: activation(config)?,
        norm_eps: config.f64("layer_norm_eps")?.unwrap_or(family.norm_eps) as f32,
        positions: config.require_usize("max_position_embeddings")?,
        first_position,
        segments: config.usize("type_vocab_size")?.unwrap_or(family.segments),
        labels: names.labels(&folder.tensors),
    };
    validate(&spec)
        .map_err(|reason| Error::Model(format!("{}: {reason}", config.path().display())))?;
    Ok(spec)
}

/// Most layers that a config may claim.
const MAX_LAYERS: usize = 10_000;

pub(super) fn validate(spec: &EncoderSpec) -> std::result::Result<(), String> {
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

fn activation(config: &HfConfig) -> Result<Activation> {
    match config.str("hidden_act")?.unwrap_or("gelu") {
        "gelu" => Ok(Activation::Gelu),
        "gelu_new" | "gelu_pytorch_tanh" | "gelu_fast" => Ok(Activation::GeluTanh),
        "silu" | "swish" => Ok(Activation::Silu),
        _ => Err(config
            .field_error("hidden_act", "silu or a form of gelu")
            .into()),
    }
}

/// Where sentence-transformers cuts texts off.
fn max_seq_length(folder: &HfFolder) -> Result<Option<usize>> {
    let path = folder.dir.join("sentence_bert_config.json");
    match path.is_file() {
        true => Ok(HfConfig::open(path)?.usize("max_seq_length")?),
        false => Ok(None),
    }
}
