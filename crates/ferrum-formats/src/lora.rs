//! LoRA adapters as PEFT saves them: a folder with `adapter_config.json` and `adapter_model.safetensors`.
//!
//! An adapter adds `scale · up · (down · x)` to the output of some linear maps (Hu et al., 2021). What
//! an adapter may hold beyond that (DoRA, trained biases, embeddings, whole modules, experts) is refused
//! by name rather than left out: a part of an adapter is another model.

use crate::error::Shown;
use crate::hf::HfConfig;
use crate::safetensors::Safetensors;
use crate::tensor::{TensorSource, TensorView};
use crate::{FormatError, Result};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Largest rank of a pair of matrices; published adapters have 4 to 256.
pub const MAX_LORA_RANK: usize = 1024;

const CONFIG: &str = "adapter_config.json";
const WEIGHTS: &str = "adapter_model.safetensors";

/// An open adapter.
#[derive(Debug)]
pub struct LoraFolder {
    config: HfConfig,
    tensors: Safetensors,
    pairs: Vec<PairNames>,
}

/// The pair of matrices that an adapter adds to one linear map.
#[derive(Clone, Copy, Debug)]
pub struct LoraPair<'a> {
    /// The map, as the base model's Hugging Face checkpoint calls it
    /// (`model.layers.0.self_attn.q_proj`).
    pub module: &'a str,
    /// `[rank, in_features]`.
    pub down: TensorView<'a>,
    /// `[out_features, rank]`.
    pub up: TensorView<'a>,
    /// What the product counts by.
    pub scale: f32,
}

#[derive(Debug)]
struct PairNames {
    module: String,
    down: String,
    up: String,
    scale: f32,
}

impl LoraFolder {
    /// Opens an adapter's folder, and holds the shapes of its pairs against each other. Whether they fit
    /// a model is for whoever has one to say.
    ///
    /// # Errors
    /// [`FormatError`] names the file and the field or tensor that is missing, wrong, or of a kind of
    /// adapter that is not supported.
    pub fn open(dir: impl AsRef<Path>) -> Result<Self> {
        let dir = dir.as_ref();
        let config = dir.join(CONFIG);
        if !config.exists() {
            let reason = format!("holds no {CONFIG}, so it is no LoRA adapter");
            let hint = "give a folder that PEFT's save_pretrained wrote";
            return Err(FormatError::source(dir, reason, hint));
        }
        let config = HfConfig::open(config)?;
        let scaling = Scaling::read(&config)?;
        let tensors = weights(dir)?;
        let pairs = pairs(&tensors, &scaling)?;
        Ok(Self {
            config,
            tensors,
            pairs,
        })
    }

    /// The file with the weights, for messages.
    pub fn path(&self) -> &Path {
        self.tensors.path_hint()
    }

    /// The model that it was trained on, as its author called it.
    pub fn base_model(&self) -> Option<&str> {
        self.config.str("base_model_name_or_path").ok().flatten()
    }

    /// The tensors, for whoever converts them.
    pub fn tensors(&self) -> &dyn TensorSource {
        &self.tensors
    }

    /// All pairs, by module.
    pub fn pairs(&self) -> impl Iterator<Item = LoraPair<'_>> {
        self.pairs.iter().filter_map(|names| {
            Some(LoraPair {
                module: &names.module,
                // Both were there when it was opened.
                down: self.tensors.get(&names.down)?,
                up: self.tensors.get(&names.up)?,
                scale: names.scale,
            })
        })
    }
}

fn weights(dir: &Path) -> Result<Safetensors> {
    let file: PathBuf = dir.join(WEIGHTS);
    if file.exists() {
        return Safetensors::open(file);
    }
    let pickle = dir.join("adapter_model.bin");
    match pickle.exists() {
        true => Err(crate::source::pickle_error(&pickle)),
        false => {
            let reason = format!("holds no {WEIGHTS}");
            let hint = "the download is incomplete, fetch the missing file";
            Err(FormatError::source(dir, reason, hint))
        }
    }
}

/// How much a pair counts.
struct Scaling {
    alpha: f64,
    /// Alpha of modules whose name is, or ends with a dot and, the key.
    patterns: BTreeMap<String, f64>,
    /// Divide by the root of the rank (Kalajdzievski, 2023) rather than by the rank.
    by_root: bool,
}

impl Scaling {
    fn read(config: &HfConfig) -> Result<Self> {
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
                patterns.insert(key.to_owned(), section.require_f64(key)?);
            }
        }
        Ok(Self {
            // PEFT's default.
            alpha: config.f64("lora_alpha")?.unwrap_or(8.0),
            patterns,
            by_root: config.bool("use_rslora")?.unwrap_or(false),
        })
    }

    fn of(&self, module: &str, rank: usize) -> f32 {
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

/// Which half of a pair a tensor is, and of which module.
fn half(name: &str) -> Option<(&str, bool)> {
    let stem = name.strip_suffix(".weight")?;
    let module = stem
        .strip_suffix(".lora_A")
        .map(|module| (module, true))
        .or_else(|| stem.strip_suffix(".lora_B").map(|module| (module, false)))?;
    Some((
        module
            .0
            .strip_prefix("base_model.model.")
            .unwrap_or(module.0),
        module.1,
    ))
}

fn pairs(tensors: &Safetensors, scaling: &Scaling) -> Result<Vec<PairNames>> {
    let path = tensors.path_hint();
    let mut halves: BTreeMap<&str, [Option<&str>; 2]> = BTreeMap::new();
    for info in tensors.infos() {
        let Some((module, is_down)) = half(&info.name) else {
            let expected = "pairs lora_A.weight and lora_B.weight of linear maps only";
            return Err(FormatError::tensor(path, &info.name, "it", expected));
        };
        halves.entry(module).or_default()[usize::from(!is_down)] = Some(&info.name);
    }
    let missing = |module: &str, part: &str| FormatError::MissingTensor {
        path: path.into(),
        tensor: Shown(&format!("{module}.{part}.weight")).to_string(),
        hint: "the other half of the pair is there".into(),
    };
    let mut pairs = Vec::with_capacity(halves.len());
    for (module, [down, up]) in halves {
        let down = down.ok_or_else(|| missing(module, "lora_A"))?;
        let up = up.ok_or_else(|| missing(module, "lora_B"))?;
        let rank = rank(tensors, down, up)?;
        pairs.push(PairNames {
            module: module.to_owned(),
            down: down.to_owned(),
            up: up.to_owned(),
            scale: scaling.of(module, rank),
        });
    }
    if pairs.is_empty() {
        return Err(FormatError::source(path, "holds no pair of matrices", ""));
    }
    Ok(pairs)
}

/// Holds the two shapes against each other.
fn rank(tensors: &Safetensors, down: &str, up: &str) -> Result<usize> {
    let path = tensors.path_hint();
    let (a, b) = (tensors.require(down)?, tensors.require(up)?);
    let shape = |view: &TensorView<'_>| format!("shape {:?}", view.shape);
    match (a.shape, b.shape) {
        (&[rank, _], &[_, other]) if rank == other && (1..=MAX_LORA_RANK).contains(&rank) => {
            Ok(rank)
        }
        (&[rank, _], _) if (1..=MAX_LORA_RANK).contains(&rank) => {
            let expected = format!("[out features, {rank}] as its other half has");
            Err(FormatError::tensor(path, up, shape(&b), expected))
        }
        _ => {
            let expected = format!("[rank, in features] with a rank of 1 to {MAX_LORA_RANK}");
            Err(FormatError::tensor(path, down, shape(&a), expected))
        }
    }
}
