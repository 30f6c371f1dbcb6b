//! Encoders in Hugging Face folders.

use super::config::{EncoderNames, EncoderSpec, PartNames, validate};
use crate::families::hint_of_supported;
use crate::spec::Activation;
use ferrum_formats::{HfConfig, HfFolder, TensorSource};
use ferrum_types::{Error, Result};

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

/// Whether a folder has the config of an encoder.
pub(super) fn is_encoder(folder: &HfFolder) -> bool {
    family_of(&folder.config).is_some()
}

fn family_of(config: &HfConfig) -> Option<&'static EncoderFamily> {
    let named = config.architectures().ok()?;
    let mut families = FAMILIES.iter();
    families.find(|family| {
        let mut known = family.architectures.iter();
        known.any(|architecture| named.contains(architecture))
    })
}

/// The spec of a folder, and the names of its tensors.
pub(super) fn read(folder: &HfFolder) -> Result<(EncoderSpec, EncoderNames)> {
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
    Ok((spec, names))
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
pub(super) fn max_seq_length(folder: &HfFolder) -> Result<Option<usize>> {
    let path = folder.dir.join("sentence_bert_config.json");
    match path.is_file() {
        true => Ok(HfConfig::open(path)?.usize("max_seq_length")?),
        false => Ok(None),
    }
}
