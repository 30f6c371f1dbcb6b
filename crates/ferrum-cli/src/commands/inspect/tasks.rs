//! Models that compute whole tasks: text encoders, Whisper, CLIP and SigLIP. They have no KV cache that grows, so there is no
//! plan of their memory.

use super::{describe_tensors, format_name, kind_name, numbers, tensors_json};
use crate::failure::Outcome;
use crate::ui::{show, show_json};
use ferrum_formats::ModelSource;
use ferrum_models::clip::{ClipKind, ClipSpec, read_clip};
use ferrum_models::encoder::{EncoderModel, Positions, read_encoder};
use ferrum_models::whisper::{WhisperSpec, read_whisper};
use ferrum_models::{ModelKind, Pooling, PreNormSpec};
use serde_json::{Value, json};
use std::fmt::Write;

/// What is known of a model besides its tensors.
struct Description {
    architecture: String,
    /// Names and values, as text.
    lines: Vec<(&'static str, String)>,
    /// The same as JSON.
    spec: Value,
}

/// Shows such a model, or gives back one of another kind.
pub(super) fn inspect(source: ModelSource, json: bool) -> Outcome<Option<ModelSource>> {
    let (kind, description, source) = match ModelKind::of(&source) {
        Some(kind @ ModelKind::Encoder) => {
            let model = read_encoder(source)?;
            (kind, encoder(&model), model.source)
        }
        Some(kind @ ModelKind::Speech) => {
            let model = read_whisper(source)?;
            (kind, speech(&model.spec), model.source)
        }
        Some(kind @ ModelKind::Clip) => {
            let model = read_clip(source)?;
            (kind, clip(&model.spec), model.source)
        }
        _ => return Ok(Some(source)),
    };
    let tensors = source.tensors();
    let file = tensors.path_hint().display();
    if json {
        show_json(&json!({
            "file": file.to_string(),
            "format": format_name(&source),
            "architecture": description.architecture,
            "kind": kind_name(kind),
            "parameters": numbers(tensors),
            "spec": description.spec,
            "tensors": tensors_json(tensors),
        }))?;
        return Ok(None);
    }
    let mut text = format!("file          {file} ({})\n", format_name(&source));
    let (architecture, name) = (description.architecture, kind.name());
    let _ = writeln!(
        text,
        "architecture  {architecture}, {name}: {}",
        kind.command()
    );
    let _ = writeln!(text, "parameters    {}", numbers(tensors));
    for (name, value) in description.lines {
        let _ = writeln!(text, "{name:13} {value}");
    }
    text += &describe_tensors(tensors);
    show(&text)?;
    Ok(None)
}

/// A stack of equal layers.
fn stack(layers: usize, heads: usize, head_dim: usize, feed_forward: &str) -> String {
    format!("{layers} × {heads} heads of {head_dim}, {feed_forward}")
}

fn pre_norm(spec: &PreNormSpec) -> String {
    let mlp = format!("MLP of {}", spec.intermediate);
    stack(spec.layers, spec.heads, spec.head_dim(), &mlp)
}

fn pre_norm_json(spec: &PreNormSpec) -> Value {
    json!({
        "hidden_size": spec.hidden,
        "layers": spec.layers,
        "heads": spec.heads,
        "intermediate": spec.intermediate,
        "causal": spec.causal,
    })
}

fn encoder(model: &EncoderModel) -> Description {
    let spec = &model.spec;
    let gated = if spec.gated { "gated MLP" } else { "MLP" };
    let mlp = format!("{gated} of {} ({})", spec.intermediate, spec.activation);
    let head_dim = spec.hidden_size / spec.heads;
    let pooling = model.pooling.map(|pooling| match pooling {
        Pooling::Last => "last",
        Pooling::Mean => "mean",
        Pooling::Cls => "cls",
    });
    let positions = match spec.positions {
        Positions::Learned { .. } => "learned",
        Positions::Rotary { .. } => "rotary",
    };
    let context = match model.max_seq_length {
        Some(most) => most.min(spec.max_tokens()),
        None => spec.max_tokens(),
    };
    let mut lines = vec![
        ("hidden size", spec.hidden_size.to_string()),
        ("vocabulary", spec.vocab_size.to_string()),
        ("context", context.to_string()),
        ("layers", stack(spec.layers, spec.heads, head_dim, &mlp)),
        ("positions", positions.to_owned()),
        (
            "pooling",
            pooling
                .unwrap_or("unknown: name it with --pooling")
                .to_owned(),
        ),
    ];
    let local = spec.local.as_ref();
    let windows = local.map(|local| local.layers.iter().filter(|is_local| **is_local).count());
    if let (Some(local), Some(windows)) = (local, windows) {
        let text = format!(
            "{windows} layers see tokens less than {} away",
            local.window
        );
        lines.push(("windows", text));
    }
    if spec.labels > 0 {
        lines.push(("labels", spec.labels.to_string()));
    }
    Description {
        architecture: spec.family.to_owned(),
        lines,
        spec: json!({
            "hidden_size": spec.hidden_size,
            "vocab_size": spec.vocab_size,
            "context_length": context,
            "layers": spec.layers,
            "heads": spec.heads,
            "intermediate": spec.intermediate,
            "activation": spec.activation.to_string(),
            "gated": spec.gated,
            "norm_eps": spec.norm_eps,
            "positions": positions,
            "windowed_layers": windows,
            "window": local.map(|local| local.window),
            "pooling": pooling,
            "labels": spec.labels,
        }),
    }
}

fn speech(spec: &WhisperSpec) -> Description {
    Description {
        architecture: "whisper".to_owned(),
        lines: vec![
            ("hidden size", spec.encoder.hidden.to_string()),
            ("vocabulary", spec.vocab_size.to_string()),
            ("context", spec.tokens.to_string()),
            (
                "window",
                format!("{} states of {} mel bins", spec.positions, spec.mels),
            ),
            ("encoder", pre_norm(&spec.encoder)),
            ("decoder", pre_norm(&spec.decoder)),
        ],
        spec: json!({
            "vocab_size": spec.vocab_size,
            "context_length": spec.tokens,
            "mel_bins": spec.mels,
            "window_states": spec.positions,
            "encoder": pre_norm_json(&spec.encoder),
            "decoder": pre_norm_json(&spec.decoder),
        }),
    }
}

fn clip(spec: &ClipSpec) -> Description {
    let (image, text) = (&spec.image, &spec.text);
    let architecture = match spec.kind {
        ClipKind::Clip => "clip",
        ClipKind::Siglip => "siglip",
    };
    Description {
        architecture: architecture.to_owned(),
        lines: vec![
            ("dimensions", spec.dimensions.to_string()),
            (
                "images",
                format!(
                    "{0} x {0} pixels in patches of {1} x {1}",
                    image.side, image.patch
                ),
            ),
            ("image layers", pre_norm(&image.stack)),
            ("vocabulary", text.vocab_size.to_string()),
            ("context", text.positions.to_string()),
            ("text layers", pre_norm(&text.stack)),
        ],
        spec: json!({
            "dimensions": spec.dimensions,
            "image_size": image.side,
            "patch_size": image.patch,
            "image_encoder": pre_norm_json(&image.stack),
            "vocab_size": text.vocab_size,
            "context_length": text.positions,
            "text_encoder": pre_norm_json(&text.stack),
        }),
    }
}
