//! The adapters of PEFT: `adapter_config.json` and `adapter_model.safetensors` in a folder.

use super::{Half, MAX_LORA_RANK};
use crate::hf::HfConfig;
use crate::safetensors::Safetensors;
use crate::{FormatError, Result};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

const CONFIG: &str = "adapter_config.json";
const WEIGHTS: &str = "adapter_model.safetensors";

/// Opens the two files of a folder.
pub(super) fn open(dir: &Path) -> Result<(HfConfig, Scaling, Safetensors)> {
    let config = dir.join(CONFIG);
    if !config.exists() {
        let reason = format!("holds no {CONFIG}, so it is no LoRA adapter");
        let hint = "give a folder that PEFT's save_pretrained wrote, or a GGUF file";
        return Err(FormatError::source(dir, reason, hint));
    }
    let config = HfConfig::open(config)?;
    let scaling = Scaling::read(&config)?;
    Ok((config, scaling, weights(dir)?))
}

fn weights(dir: &Path) -> Result<Safetensors> {
    let file: PathBuf = dir.join(WEIGHTS);
    if file.exists() {
        return Safetensors::open(file);
    }
    let pickle = dir.join("adapter_model.bin");
    match pickle.exists() {
        true => Err(crate::files::pickle_error(&pickle)),
        false => {
            let reason = format!("holds no {WEIGHTS}");
            let hint = "the download is incomplete, fetch the missing file";
            Err(FormatError::source(dir, reason, hint))
        }
    }
}

/// What alpha has to be, for messages.
const ALPHA: &str = "a number within f32";

/// Whether a pair can count by it: what is beyond f32 would make every sum infinite.
fn fits(alpha: f64) -> bool {
    (alpha as f32).is_finite()
}

/// How much a pair counts.
pub(super) struct Scaling {
    alpha: f64,
    /// Alpha of modules whose name is, or ends with a dot and, the key.
    patterns: BTreeMap<String, f64>,
    /// Divide by the root of the rank (Kalajdzievski, 2023) rather than by the rank.
    by_root: bool,
}

impl Scaling {
    pub(super) fn read(config: &HfConfig) -> Result<Self> {
        match config.require_str("peft_type")? {
            "LORA" => {}
            _ => return Err(config.field_error("peft_type", "\"LORA\"")),
        }
        refuse_other_kinds(config)?;
        let rank = config.require_usize("r")?;
        if rank > MAX_LORA_RANK {
            return Err(config.field_error("r", format!("at most {MAX_LORA_RANK}")));
        }
        let mut patterns = BTreeMap::new();
        if let Some(section) = config.section("alpha_pattern")? {
            for key in section.keys() {
                if !key
                    .chars()
                    .all(|c| c.is_ascii_alphanumeric() || "._".contains(c))
                {
                    let expected = "names of modules; regular expressions are not supported";
                    return Err(config.field_error("alpha_pattern", expected));
                }
                let alpha = section.require_f64(key)?;
                if !fits(alpha) {
                    return Err(section.field_error(key, ALPHA));
                }
                patterns.insert(key.to_owned(), alpha);
            }
        }
        // PEFT's default.
        let alpha = config.f64("lora_alpha")?.unwrap_or(8.0);
        if !fits(alpha) {
            return Err(config.field_error("lora_alpha", ALPHA));
        }
        Ok(Self {
            alpha,
            patterns,
            by_root: config.bool("use_rslora")?.unwrap_or(false),
        })
    }

    pub(super) fn of(&self, module: &str, rank: usize) -> f32 {
        let matches = |key: &str| {
            module
                .strip_suffix(key)
                .is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
        };
        let special = self.patterns.iter().find(|(key, _)| matches(key));
        let alpha = special.map_or(self.alpha, |(_, &alpha)| alpha);
        let rank = rank as f64;
        let divisor = if self.by_root { rank.sqrt() } else { rank };
        (alpha / divisor) as f32
    }
}

/// Fields that make an adapter more than pairs of matrices.
fn refuse_other_kinds(config: &HfConfig) -> Result<()> {
    for key in ["use_dora", "fan_in_fan_out", "lora_bias", "use_qalora"] {
        if config.bool(key)?.unwrap_or(false) {
            return Err(config.field_error(key, "false; others are not supported"));
        }
    }
    if config.str("bias")?.is_some_and(|bias| bias != "none") {
        return Err(config.field_error("bias", "\"none\"; others are not supported"));
    }
    let empty = |value: &Value| match value {
        Value::Array(list) => list.is_empty(),
        Value::Object(map) => map.is_empty(),
        other => *other == Value::Bool(false),
    };
    for key in [
        "modules_to_save",
        "layer_replication",
        "target_parameters",
        "trainable_token_indices",
        "arrow_config",
        "kasa_config",
        "monteclora_config",
        "use_bdlora",
        "alora_invocation_tokens",
    ] {
        if config.value(key).is_some_and(|value| !empty(value)) {
            return Err(config.field_error(key, "nothing; it is not supported"));
        }
    }
    // These initialisations take a part out of the base model's weights.
    if let Some(Value::String(method)) = config.value("init_lora_weights") {
        let method = method.to_ascii_lowercase();
        if ["pissa", "olora", "corda", "loftq"]
            .iter()
            .any(|m| method.starts_with(m))
        {
            let expected = "an adapter to the unchanged base model";
            return Err(config
                .field_error("init_lora_weights", expected)
                .with_hint("save it with path_initial_model_for_weight_conversion"));
        }
    }
    Ok(())
}

/// Which half of a pair a tensor is, and of which module: `MODULE.lora_A.weight`, with the name of the adapter
/// before `.weight` where a state was written as it is in memory.
pub(super) fn half(name: &str) -> Option<(&str, Half)> {
    let stem = name.strip_suffix(".weight")?;
    let (module, half) = [(".lora_A", Half::Down), (".lora_B", Half::Up)]
        .into_iter()
        .find_map(|(marker, half)| {
            let (module, adapter) = stem.rsplit_once(marker)?;
            let named = |name: &str| !name.is_empty() && !name.contains('.');
            let fits = adapter.is_empty() || adapter.strip_prefix('.').is_some_and(named);
            fits.then_some((module, half))
        })?;
    let module = module.strip_prefix("base_model.model.").unwrap_or(module);
    Some((module, half))
}
