//! Encoders in GGUF files, as llama.cpp's converter writes BERT, RoBERTa and the encoders of Nomic.

use super::config::{EncoderNames, EncoderSpec, Positions, validate};
use super::names;
use crate::families::hint_of_supported;
use crate::spec::{Activation, RopeScaling, RopeSpec};
use ferrum_formats::{Gguf, TensorSource};
use ferrum_kernels::RopeStyle;
use ferrum_types::{Error, Result};

/// What the converter calls BERT and RoBERTa.
const BERT: &str = "bert";
/// And the encoders of Nomic.
const NOMIC_BERT: &str = "nomic-bert";
/// Values of `general.architecture` in files of encoders.
pub(super) const ARCHITECTURES: [&str; 2] = [BERT, NOMIC_BERT];

/// Whether a file is an encoder's.
pub(super) fn is_encoder(gguf: &Gguf) -> bool {
    let found = gguf.architecture();
    found.is_ok_and(|name| ARCHITECTURES.contains(&name))
}

/// The spec of a file, and the names of its tensors.
pub(super) fn read(gguf: &Gguf) -> Result<(EncoderSpec, EncoderNames)> {
    let fail = |reason: String| Error::Model(format!("{}: {reason}", gguf.path().display()));
    let found = gguf.architecture()?;
    let rotary = match found {
        BERT => false,
        NOMIC_BERT => true,
        _ => {
            return Err(fail(format!(
                "general.architecture: \"{found}\" is no encoder that is supported\n{}",
                hint_of_supported(found, &ARCHITECTURES)
            )));
        }
    };
    let names = EncoderNames {
        prefix: "",
        pooler: "cls".into(),
        classifier: "cls.output",
        parts: match rotary {
            false => &names::GGUF_BERT,
            true => &names::GGUF_NOMIC_BERT,
        },
    };
    let key = |key: &str| format!("{found}.{key}");
    let size = |name: &str| -> Result<usize> { Ok(gguf.require_u32(&key(name))? as usize) };
    // Rows of a table, which no key says.
    let rows = |table: &str| -> Result<usize> {
        let table = gguf.require(&format!("{table}.weight"))?;
        Ok(table.shape.first().copied().unwrap_or(0))
    };
    let optional_rows = |table: &str| match gguf.get(&format!("{table}.weight")) {
        Some(_) => rows(table),
        None => Ok(0),
    };
    let [words, positions, segments] = names.parts.tables;
    let (hidden_size, heads) = (size("embedding_length")?, size("attention.head_count")?);
    let eps = gguf.f32(&key("attention.layer_norm_epsilon"))?;
    if gguf
        .get(&format!("{}0.ffn_gate_inp.weight", names.parts.layer))
        .is_some()
    {
        return Err(fail(
            "feed-forwards with experts are not supported in encoders".into(),
        ));
    }
    let head_dim = hidden_size.checked_div(heads).unwrap_or(0);
    if let Some(kind) = gguf
        .str(&key("rope.scaling.type"))?
        .filter(|&kind| kind != "none")
    {
        let key = key("rope.scaling.type");
        return Err(fail(format!("{key}: found \"{kind}\", expected none")));
    }
    if let Some(turned) = gguf.u32(&key("rope.dimension_count"))?
        && turned as usize != head_dim
    {
        let key = key("rope.dimension_count");
        return Err(fail(format!(
            "{key}: found {turned}, expected the {head_dim} of a head"
        )));
    }
    let spec = EncoderSpec {
        // RoBERTa comes with another kind of vocabulary.
        family: match (rotary, gguf.str("tokenizer.ggml.model")?) {
            (true, _) => "nomic_bert",
            (false, Some("bert") | None) => "bert",
            (false, Some(_)) => "roberta",
        },
        vocab_size: rows(words)?,
        hidden_size,
        layers: size("block_count")?,
        heads,
        intermediate: size("feed_forward_length")?,
        // No key says it; llama.cpp, too, takes it for granted.
        activation: match rotary {
            false => Activation::Gelu,
            true => Activation::Silu,
        },
        gated: rotary,
        norm_eps: eps.unwrap_or(1e-12),
        pre_norm: false,
        local: None,
        positions: match rotary {
            // The converter leaves RoBERTa's first rows out.
            false => Positions::Learned {
                rows: rows(positions)?,
                first: 0,
            },
            true => Positions::Rotary {
                rope: RopeSpec {
                    rot_dim: head_dim,
                    theta: gguf.f32(&key("rope.freq_base"))?.unwrap_or(10_000.0),
                    style: RopeStyle::HalfSplit,
                    scaling: RopeScaling::None,
                },
                context: size("context_length")?,
            },
        },
        // DistilBERT, which has this architecture as well, has none.
        segments: optional_rows(segments)?,
        labels: names.labels(gguf),
    };
    validate(&spec).map_err(fail)?;
    Ok((spec, names))
}
