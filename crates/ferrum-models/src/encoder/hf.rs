//! Encoders in Hugging Face folders.

use super::config::{
    EncoderNames, EncoderSpec, LocalAttention, MAX_LAYERS, PartNames, Positions, UpNames, validate,
};
use super::names;
use crate::families::hint_of_supported;
use crate::spec::{Activation, RopeScaling, RopeSpec};
use ferrum_formats::{HfConfig, HfFolder, RopeConfigs, RopeKind, TensorSource};
use ferrum_kernels::RopeStyle;
use ferrum_types::{Error, Result};
use std::ops::Range;

/// Encoders whose configs and checkpoints are alike.
#[derive(Debug)]
struct EncoderFamily {
    name: &'static str,
    architectures: &'static [&'static str],
    /// Which of [`keys`] its configs have.
    keys: Range<usize>,
    /// What names begin with in checkpoints that have a head.
    prefixes: &'static [&'static str],
    /// Names of tensors: those of `transformers`, and those that its authors published, if they are others.
    spellings: [&'static PartNames; 2],
    positions: PositionKind,
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
    activation: Activation,
}

/// How the tokens of a family know where they are.
#[derive(Clone, Copy, Debug, PartialEq)]
enum PositionKind {
    Learned,
    /// Counted from behind the id of padding.
    LearnedBehindPadding,
    /// Rotated, with this base where the config says none.
    Rotary(f64),
    /// Rotated with one base in layers that see all tokens and with another in those with a window.
    RotaryByLayer {
        global: f64,
        local: f64,
    },
}

static FAMILIES: [EncoderFamily; 6] = [
    EncoderFamily {
        name: "bert",
        architectures: &[
            "BertModel",
            "BertForMaskedLM",
            "BertForSequenceClassification",
        ],
        prefixes: &["bert."],
        spellings: [&names::BERT; 2],
        positions: PositionKind::Learned,
        ..DEFAULTS
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
        prefixes: &["roberta."],
        spellings: [&names::BERT; 2],
        positions: PositionKind::LearnedBehindPadding,
        pooler: "classifier.dense",
        pooler_in_body: false,
        classifier: "classifier.out_proj",
        padding: 1,
        ..DEFAULTS
    },
    EncoderFamily {
        name: "distilbert",
        architectures: &["DistilBertModel", "DistilBertForMaskedLM"],
        keys: 2..3,
        prefixes: &["distilbert."],
        spellings: [&names::DISTILBERT; 2],
        positions: PositionKind::Learned,
        segments: 0,
        ..DEFAULTS
    },
    EncoderFamily {
        name: "nomic_bert",
        architectures: &[
            "NomicBertModel",
            "NomicBertForMaskedLM",
            "NomicBertForSequenceClassification",
        ],
        keys: 0..2,
        prefixes: &["nomic_bert.", "bert."],
        spellings: [&names::ROTARY, &names::NOMIC_BERT_PUBLISHED],
        positions: PositionKind::Rotary(1000.0),
        activation: Activation::Silu,
        ..DEFAULTS
    },
    EncoderFamily {
        name: "gte",
        architectures: &[
            "GteModel",
            "GteForMaskedLM",
            "GteForSequenceClassification",
            "NewModel",
            "NewForMaskedLM",
            "NewForSequenceClassification",
        ],
        prefixes: &["gte.", "new."],
        spellings: [&names::ROTARY, &names::GTE_PUBLISHED],
        positions: PositionKind::Rotary(160_000.0),
        segments: 1,
        padding: 1,
        ..DEFAULTS
    },
    EncoderFamily {
        name: "modernbert",
        architectures: &["ModernBertModel", "ModernBertForMaskedLM"],
        keys: 3..4,
        prefixes: &["model."],
        spellings: [&names::MODERN_BERT; 2],
        positions: PositionKind::RotaryByLayer {
            global: 160_000.0,
            local: 10_000.0,
        },
        segments: 0,
        norm_eps: 1e-5,
        ..DEFAULTS
    },
];

/// What most have in common.
const DEFAULTS: EncoderFamily = EncoderFamily {
    name: "",
    architectures: &[],
    keys: 0..1,
    prefixes: &[],
    spellings: [&names::BERT; 2],
    positions: PositionKind::Learned,
    pooler: "pooler.dense",
    pooler_in_body: true,
    classifier: "classifier",
    segments: 2,
    norm_eps: 1e-12,
    padding: 0,
    activation: Activation::Gelu,
};

/// Keys of the same meaning: those of BERT, of GPT-2, of DistilBERT and of ModernBERT. Configs of Nomic have the second, or both
/// of the first two.
mod keys {
    pub(super) const HIDDEN: [&str; 4] = ["hidden_size", "n_embd", "dim", "hidden_size"];
    pub(super) const LAYERS: [&str; 4] = [
        "num_hidden_layers",
        "n_layer",
        "n_layers",
        "num_hidden_layers",
    ];
    pub(super) const HEADS: [&str; 4] = [
        "num_attention_heads",
        "n_head",
        "n_heads",
        "num_attention_heads",
    ];
    pub(super) const INTERMEDIATE: [&str; 4] = [
        "intermediate_size",
        "n_inner",
        "hidden_dim",
        "intermediate_size",
    ];
    pub(super) const ACTIVATION: [&str; 4] = [
        "hidden_act",
        "activation_function",
        "activation",
        "hidden_activation",
    ];
    pub(super) const NORM_EPS: [&str; 4] = [
        "layer_norm_eps",
        "layer_norm_epsilon",
        "layer_norm_eps",
        "norm_eps",
    ];
}

/// What a config says under several keys of the same meaning, which must agree where it has more than one of them.
fn stated<T: PartialEq>(
    config: &HfConfig,
    keys: &[&'static str],
    read: impl Fn(&str) -> Result<T>,
) -> Result<Option<T>> {
    let mut found = None;
    for key in keys.iter().copied().filter(|key| config.has(key)) {
        let value = read(key)?;
        match &found {
            Some((first, before)) if *before != value => {
                let expected = format!("what {first} says");
                return Err(config.field_error(key, expected).into());
            }
            _ => found = Some((key, value)),
        }
    }
    Ok(found.map(|(_, value)| value))
}

/// A size that must be there.
fn size(config: &HfConfig, keys: &[&'static str]) -> Result<usize> {
    let found = stated(config, keys, |key| Ok(config.require_usize(key)?))?;
    match found {
        Some(size) => Ok(size),
        None => Ok(config.require_usize(keys[0])?),
    }
}

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

/// Values of `architectures` in the configs of encoders.
pub(super) fn architectures() -> Vec<&'static str> {
    let families = FAMILIES.iter();
    families
        .flat_map(|family| family.architectures)
        .copied()
        .collect()
}

/// The spec of a folder, and the names of its tensors.
pub(super) fn read(folder: &HfFolder) -> Result<(EncoderSpec, EncoderNames)> {
    let Some(family) = family_of(&folder.config) else {
        let found = folder.config.architectures()?.join(", ");
        return Err(Error::Model(format!(
            "{}: field \"architectures\": \"{found}\" is no encoder that is supported\n{}",
            folder.config.path().display(),
            hint_of_supported(&found, &architectures())
        )));
    };
    crate::checkpoint::check_scheme(folder)?;
    let names = names_of(family, folder);
    let spec = spec(family, folder, &names)?;
    Ok((spec, names))
}

/// The names that a checkpoint has its tensors under.
fn names_of(family: &EncoderFamily, folder: &HfFolder) -> EncoderNames {
    let has = |name: &str| folder.tensors.get(&format!("{name}.weight")).is_some();
    let mut prefixes = family.prefixes.iter().copied();
    let [usual, published] = family.spellings;
    let [words, ..] = usual.tables;
    let prefix = match has(words) {
        true => "",
        false => prefixes
            .find(|prefix| has(&format!("{prefix}{words}")))
            .unwrap_or_default(),
    };
    let of_layers = |parts: &PartNames| format!("{prefix}{}0.{}", parts.layer, parts.out);
    let parts = match has(&of_layers(published)) {
        true => published,
        false => usual,
    };
    EncoderNames {
        prefix,
        pooler: match family.pooler_in_body {
            true => format!("{prefix}{}", family.pooler),
            false => family.pooler.to_owned(),
        },
        classifier: family.classifier,
        parts,
    }
}

fn spec(
    family: &'static EncoderFamily,
    folder: &HfFolder,
    names: &EncoderNames,
) -> Result<EncoderSpec> {
    let config = &folder.config;
    check_variant(config, family)?;
    let of_family = |keys: &'static [&'static str; 4]| &keys[family.keys.clone()];
    let size = |keys| size(config, of_family(keys));
    let (hidden_size, heads) = (size(&keys::HIDDEN)?, size(&keys::HEADS)?);
    let norm_eps = of_family(&keys::NORM_EPS);
    let norm_eps = stated(config, norm_eps, |key| Ok(config.require_f64(key)?))?;
    let activation = of_family(&keys::ACTIVATION);
    let activation = stated(config, activation, |key| self::activation(config, key))?;
    let (positions, local) = positions(family, folder, hidden_size / heads)?;
    let spec = EncoderSpec {
        family: family.name,
        vocab_size: config.require_usize("vocab_size")?,
        hidden_size,
        layers: size(&keys::LAYERS)?,
        heads,
        intermediate: size(&keys::INTERMEDIATE)?,
        activation: activation.unwrap_or(family.activation),
        gated: !matches!(names.parts.up, UpNames::Plain(_)),
        norm_eps: norm_eps.unwrap_or(family.norm_eps) as f32,
        pre_norm: names.parts.final_norm.is_some(),
        positions,
        local,
        segments: match family.segments {
            0 => 0,
            segments => config.usize("type_vocab_size")?.unwrap_or(segments),
        },
        labels: names.labels(&folder.tensors),
    };
    validate(&spec)
        .map_err(|reason| Error::Model(format!("{}: {reason}", config.path().display())))?;
    Ok(spec)
}

/// Where tokens are, for heads of `head_dim` elements, and which layers see those near a token alone.
fn positions(
    family: &EncoderFamily,
    folder: &HfFolder,
    head_dim: usize,
) -> Result<(Positions, Option<LocalAttention>)> {
    let config = &folder.config;
    let (rope, local) = match family.positions {
        PositionKind::Rotary(theta) => (rope(config, head_dim, theta)?, None),
        PositionKind::RotaryByLayer { global, local } => {
            let of = |layers, key, base| rope_of_layers(config, head_dim, (layers, key, base));
            let local = of("sliding_attention", "local_rope_theta", local)?;
            let global = of("full_attention", "global_rope_theta", global)?;
            (global, Some(local_attention(config, local)?))
        }
        PositionKind::Learned => {
            let rows = config.require_usize("max_position_embeddings")?;
            return Ok((Positions::Learned { rows, first: 0 }, None));
        }
        PositionKind::LearnedBehindPadding => {
            let rows = config.require_usize("max_position_embeddings")?;
            let padding = config.usize("pad_token_id")?.unwrap_or(family.padding);
            let first = padding.saturating_add(1);
            return Ok((Positions::Learned { rows, first }, None));
        }
    };
    // There is no table to end them, so the longest text that any file speaks of counts: Nomic's config says what it was
    // trained with, too.
    let mut context = None;
    for key in ["max_position_embeddings", "n_positions"] {
        context = context.max(config.usize(key)?);
    }
    let context = match context {
        Some(context) => context.max(sentence_length(folder)?.unwrap_or(0)),
        None => config.require_usize("max_position_embeddings")?,
    };
    Ok((Positions::Rotary { rope, context }, local))
}

/// The rotation in layers of this type, or, in configs from before they had types, by the base under this key.
fn rope_of_layers(
    config: &HfConfig,
    dim: usize,
    (layers, key, base): (&str, &str, f64),
) -> Result<RopeSpec> {
    let refuse = |key: &str, expected: &str| Err(config.field_error(key, expected).into());
    // Which base counts where a config has one of these as well, or null, is not said anywhere.
    for other in ["rope_theta", "rotary_emb_base", "rope_scaling"] {
        if config.has(other) {
            return refuse(other, "angles for each type of layers");
        }
    }
    if config.keys().any(|name| name == key) && !config.has(key) {
        return refuse(key, "a number");
    }
    let (theta, key) = match config.rope(base)? {
        RopeConfigs::All(_) if config.has("rope_parameters") => {
            return refuse("rope_parameters", "angles for each type of layers");
        }
        RopeConfigs::All(_) => (config.f64(key)?.unwrap_or(base), key),
        RopeConfigs::ByLayerType(types) => match types.get(layers) {
            None => (base, "rope_parameters"),
            Some(rope) if rope.kind == RopeKind::Default && rope.partial_rotary_factor == 1.0 => {
                (rope.theta, "rope_parameters")
            }
            Some(_) => return refuse("rope_parameters", "the angles of default in all layers"),
        },
    };
    if !(theta.is_finite() && theta >= 1.0) {
        return refuse(key, "a base of at least 1");
    }
    Ok(RopeSpec {
        rot_dim: dim,
        theta: theta as f32,
        style: RopeStyle::HalfSplit,
        scaling: RopeScaling::None,
    })
}

/// Which layers have a window, and how large it is.
fn local_attention(config: &HfConfig, rope: RopeSpec) -> Result<LocalAttention> {
    let count = config.require_usize("num_hidden_layers")?;
    let layers = match config.strs("layer_types")? {
        Some(types) => {
            let known = ["full_attention", "sliding_attention"];
            if types.iter().any(|kind| !known.contains(kind)) {
                let expected = "full_attention and sliding_attention";
                return Err(config.field_error("layer_types", expected).into());
            }
            types.iter().map(|kind| *kind == known[1]).collect()
        }
        None => {
            const EVERY: &str = "global_attn_every_n_layers";
            let every = match config.has(EVERY) {
                true => config.require_usize(EVERY)?,
                false => 3,
            };
            // `validate` refuses more.
            let layers = 0..count.min(MAX_LAYERS);
            layers.map(|layer| layer % every != 0).collect()
        }
    };
    // The first wins, as in `transformers`.
    let one_side = match config.usize("sliding_window")? {
        Some(one_side) => one_side,
        None => config.usize("local_attention")?.unwrap_or(128) / 2,
    };
    Ok(LocalAttention {
        window: one_side.saturating_add(1),
        rope,
        layers,
    })
}

/// Refuses what a config asks for and the forward path has not.
fn check_variant(config: &HfConfig, family: &EncoderFamily) -> Result<()> {
    let refuse = |key: &str, expected: &str| Err(config.field_error(key, expected).into());
    // Configs of ModernBERT have the key, and no model heeds it.
    let by_layer = matches!(family.positions, PositionKind::RotaryByLayer { .. });
    if let Some(kind) = config.str("position_embedding_type")?.filter(|_| !by_layer) {
        let (expected, reason) = match family.positions {
            PositionKind::Rotary(_) => ("rope", "rope, as these models have it"),
            _ => (
                "absolute",
                "absolute, the only kind of positions that is supported",
            ),
        };
        if kind != expected {
            return refuse("position_embedding_type", reason);
        }
    }
    for key in [
        "prenorm",
        "parallel_block",
        "use_rms_norm",
        "norm_mlp",
        "causal",
        "rotary_emb_interleaved",
        "logn_attention_scale",
        "logn_attention_clip1",
    ] {
        if config.bool(key)? == Some(true) {
            return refuse(key, "false");
        }
    }
    if config
        .f64("rotary_emb_fraction")?
        .is_some_and(|share| share != 1.0)
    {
        return refuse("rotary_emb_fraction", "1, rotation of whole heads");
    }
    if config
        .usize("num_experts")?
        .is_some_and(|experts| experts > 0)
    {
        return refuse("num_experts", "0, feed-forwards without experts");
    }
    if config.has("rotary_scaling_factor") {
        return refuse(
            "rotary_scaling_factor",
            "null, angles that do not depend on the length",
        );
    }
    match config.str("layer_norm_type")? {
        None | Some("layer_norm") => Ok(()),
        Some(_) => refuse("layer_norm_type", "layer_norm"),
    }
}

/// The rotation of heads of `dim` elements.
fn rope(config: &HfConfig, dim: usize, theta: f64) -> Result<RopeSpec> {
    let plain = |theta: f64, scaling| RopeSpec {
        rot_dim: dim,
        theta: theta as f32,
        style: RopeStyle::HalfSplit,
        scaling,
    };
    // As the authors of GTE have it (https://kexue.fm/archives/9706): a larger base, and all frequencies a little lower.
    if let Some(scaling) = config.section("rope_scaling")?
        && [scaling.str("type")?, scaling.str("rope_type")?].contains(&Some("ntk"))
    {
        if scaling.has("mixed_b") {
            return Err(scaling.field_error("mixed_b", "none").into());
        }
        let factor = scaling.require_f64("factor")?;
        let theta = config.require_f64("rope_theta")?;
        if !(factor >= 1.0 && theta >= 1.0) {
            let expected = "1 at least, as well as rope_theta";
            return Err(scaling.field_error("factor", expected).into());
        }
        let lower = factor.powf(2.0 / dim.max(2) as f64) as f32;
        return Ok(plain(theta * factor, RopeScaling::Linear { factor: lower }));
    }
    let key = match config.has("rope_scaling") {
        true => "rope_scaling",
        false => "rope_parameters",
    };
    let RopeConfigs::All(rope) = config.rope(theta)? else {
        let expected = "one rotary embedding for all layers";
        return Err(config.field_error(key, expected).into());
    };
    if rope.partial_rotary_factor != 1.0 {
        let expected = "a partial_rotary_factor of 1: rotation of whole heads";
        return Err(config.field_error(key, expected).into());
    }
    match rope.kind {
        RopeKind::Default => Ok(plain(rope.theta, RopeScaling::None)),
        RopeKind::Linear { factor } => {
            let factor = factor as f32;
            Ok(plain(rope.theta, RopeScaling::Linear { factor }))
        }
        _ => {
            let expected = "the angles of default, linear or ntk";
            Err(config.field_error(key, expected).into())
        }
    }
}

fn activation(config: &HfConfig, key: &str) -> Result<Activation> {
    match config.require_str(key)? {
        "gelu" | "geglu" => Ok(Activation::Gelu),
        "gelu_new" | "gelu_pytorch_tanh" | "gelu_fast" => Ok(Activation::GeluTanh),
        "silu" | "swish" | "swiglu" => Ok(Activation::Silu),
        _ => Err(config.field_error(key, "silu or a form of gelu").into()),
    }
}

/// Where texts are cut off: as sentence-transformers has it, at `max_seq_length` or else where the tokenizer ends them.
pub(super) fn max_seq_length(folder: &HfFolder) -> Result<Option<usize>> {
    if let Some(most) = sentence_length(folder)? {
        return Ok(Some(most));
    }
    let path = folder.dir.join("tokenizer_config.json");
    if !path.is_file() {
        return Ok(None);
    }
    // 10^30 where there is no end.
    let most = HfConfig::open(path)?.f64("model_max_length")?;
    Ok(most
        .filter(|most| (1.0..=1e9).contains(most))
        .map(|most| most as usize))
}

/// `max_seq_length` of sentence-transformers, in the file of any of its names.
fn sentence_length(folder: &HfFolder) -> Result<Option<usize>> {
    let names = [
        "bert",
        "roberta",
        "distilbert",
        "camembert",
        "albert",
        "xlm-roberta",
        "xlnet",
    ];
    for name in names {
        let path = folder.dir.join(format!("sentence_{name}_config.json"));
        if path.is_file() {
            return Ok(HfConfig::open(path)?.usize("max_seq_length")?);
        }
    }
    Ok(None)
}
