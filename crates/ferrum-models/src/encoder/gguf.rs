//! Encoders in GGUF files, as llama.cpp's converter writes BERT and RoBERTa.

use super::config::{EncoderNames, EncoderSpec, PartNames, validate};
use crate::spec::Activation;
use ferrum_formats::{Gguf, TensorSource};
use ferrum_types::{Error, Result};

/// What the converter calls BERT and RoBERTa.
const ARCHITECTURE: &str = "bert";

static PARTS: PartNames = PartNames {
    tables: ["token_embd", "position_embd", "token_types"],
    norm: "token_embd_norm",
    layer: "blk.",
    qkv: ["attn_q", "attn_k", "attn_v"],
    maps: ["attn_output", "ffn_up", "ffn_down"],
    norms: ["attn_output_norm", "layer_output_norm"],
};

/// Whether a file is an encoder's.
pub(super) fn is_encoder(gguf: &Gguf) -> bool {
    gguf.architecture().is_ok_and(|name| name == ARCHITECTURE)
}

/// The spec of a file, and the names of its tensors.
pub(super) fn read(gguf: &Gguf) -> Result<(EncoderSpec, EncoderNames)> {
    let fail = |reason: String| Error::Model(format!("{}: {reason}", gguf.path().display()));
    let found = gguf.architecture()?;
    if found != ARCHITECTURE {
        return Err(fail(format!(
            "general.architecture: \"{found}\" is no encoder that is supported\nhint: supported is {ARCHITECTURE}"
        )));
    }
    let names = EncoderNames {
        prefix: "",
        pooler: "cls".into(),
        classifier: "cls.output",
        parts: &PARTS,
    };
    let size = |key: &str| -> Result<usize> {
        Ok(gguf.require_u32(&format!("{ARCHITECTURE}.{key}"))? as usize)
    };
    // Rows of a table, which no key says.
    let rows = |table: &str| -> Result<usize> {
        let table = gguf.require(&format!("{table}.weight"))?;
        Ok(table.shape.first().copied().unwrap_or(0))
    };
    let [words, positions, segments] = PARTS.tables;
    let eps = gguf.f32(&format!("{ARCHITECTURE}.attention.layer_norm_epsilon"))?;
    let spec = EncoderSpec {
        // RoBERTa comes with another kind of vocabulary.
        family: match gguf.str("tokenizer.ggml.model")? {
            Some("bert") | None => "bert",
            Some(_) => "roberta",
        },
        vocab_size: rows(words)?,
        hidden_size: size("embedding_length")?,
        layers: size("block_count")?,
        heads: size("attention.head_count")?,
        intermediate: size("feed_forward_length")?,
        // No key says it; llama.cpp, too, takes it for granted.
        activation: Activation::Gelu,
        norm_eps: eps.unwrap_or(1e-12),
        positions: rows(positions)?,
        // The converter leaves RoBERTa's first rows out.
        first_position: 0,
        segments: rows(segments)?,
        labels: names.labels(gguf),
    };
    validate(&spec).map_err(fail)?;
    Ok((spec, names))
}
