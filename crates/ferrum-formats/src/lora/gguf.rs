//! The adapters of llama.cpp: one GGUF file, its tensors named after those of the base model's file.

use super::Half;
use crate::gguf::Gguf;
use crate::{FormatError, Result};

/// What all pairs of a file are scaled by, over their rank; 0: they are not.
pub(super) fn alpha(file: &Gguf) -> Result<f32> {
    for (key, expected) in [("general.type", "adapter"), ("adapter.type", "lora")] {
        let found = file.require_str(key)?;
        if found != expected {
            let expected = format!("\"{expected}\", as a LoRA adapter has");
            return Err(FormatError::field(
                file.path(),
                key,
                quoted(found),
                expected,
            ));
        }
    }
    let key = "adapter.alora.invocation_tokens";
    if file.has(key) {
        let expected = "an adapter that is always active";
        return Err(FormatError::field(file.path(), key, "it", expected));
    }
    let key = "adapter.lora.alpha";
    let alpha = file.require_f32(key)?;
    match alpha.is_finite() {
        true => Ok(alpha),
        false => Err(FormatError::field(
            file.path(),
            key,
            alpha.to_string(),
            "a finite number",
        )),
    }
}

fn quoted(text: &str) -> String {
    format!("string \"{}\"", text.escape_debug())
}

/// What a pair counts by.
pub(super) fn scale(alpha: f32, rank: usize) -> f32 {
    match alpha {
        0.0 => 1.0,
        _ => alpha / rank as f32,
    }
}

/// Which half of a pair a tensor is, and of which module: `MODULE.weight.lora_a`.
pub(super) fn half(name: &str) -> Option<(&str, Half)> {
    let (tensor, half) = [(".lora_a", Half::Down), (".lora_b", Half::Up)]
        .into_iter()
        .find_map(|(end, half)| Some((name.strip_suffix(end)?, half)))?;
    Some((tensor.strip_suffix(".weight")?, half))
}
