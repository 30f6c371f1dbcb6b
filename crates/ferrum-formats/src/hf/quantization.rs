//! `quantization_config`: which scheme packed the weights, and with which parameters.
//!
//! Only parsed here; whether a scheme can be read is decided where layers are taken from their tensors.

use super::HfConfig;
use crate::{FormatError, Result};
use std::fmt;

/// The scheme of a quantised Hugging Face checkpoint.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum QuantizationConfig {
    /// GPTQ: `qweight`, `qzeros`, `scales`, `g_idx`.
    Gptq(GptqConfig),
    /// AWQ: `qweight`, `qzeros`, `scales` in AWQ's order.
    Awq(AwqConfig),
    /// `compressed-tensors` of llm-compressor.
    CompressedTensors(CompressedTensorsConfig),
    /// FP8 weights with scales.
    Fp8(Fp8Config),
    /// Any other `quant_method`, by name.
    Other(String),
}

/// Parameters of GPTQ.
#[derive(Clone, Debug, PartialEq)]
pub struct GptqConfig {
    /// Bits of a weight: 2, 3, 4 or 8.
    pub bits: u8,
    /// Inputs that share a scale; `None` for one group over all inputs (-1 in the file).
    pub group_size: Option<usize>,
    /// Whether inputs were reordered by activation, so that `g_idx` is no staircase.
    pub desc_act: bool,
    /// Whether zero points are the middle of the range.
    pub sym: bool,
    /// Layout of the file: `gptq` (zero points stored minus one) or `gptq_v2`.
    pub checkpoint_format: String,
    /// Whether `lm_head` is quantised too.
    pub lm_head: bool,
    /// Names of the modules that differ (`dynamic` of GPTQModel); empty when all are alike.
    pub overrides: Vec<String>,
}

/// Parameters of AWQ.
#[derive(Clone, Debug, PartialEq)]
pub struct AwqConfig {
    /// Bits of a weight, 4 in practice.
    pub bits: u8,
    /// Inputs that share a scale; `None` for one group over all inputs (-1 in the file).
    pub group_size: Option<usize>,
    /// Whether zero points are stored.
    pub zero_point: bool,
    /// Layout, lower-case: `gemm`, `gemv`, `gemv_fast`, `marlin`, ….
    pub version: String,
    /// Modules left as they were.
    pub modules_to_not_convert: Vec<String>,
}

/// Parameters of FP8 checkpoints.
#[derive(Clone, Debug, PartialEq)]
pub struct Fp8Config {
    /// `dynamic` or `static`.
    pub activation_scheme: String,
    /// Rows and columns that share a scale; `None` for one scale per tensor.
    pub weight_block_size: Option<[usize; 2]>,
    /// Modules left as they were.
    pub modules_to_not_convert: Vec<String>,
}

/// Parameters of `compressed-tensors`.
#[derive(Clone, Debug, PartialEq)]
pub struct CompressedTensorsConfig {
    /// Layout of the file (`pack-quantized`, `float-quantized`, `int-quantized`, …).
    pub format: String,
    /// Groups of modules that are quantised alike.
    pub groups: Vec<CompressedGroup>,
    /// Modules left as they were.
    pub ignore: Vec<String>,
    /// Whether the checkpoint asks for a quantised KV cache.
    pub has_kv_cache_scheme: bool,
}

/// One `config_groups` entry of `compressed-tensors`.
#[derive(Clone, Debug, PartialEq)]
pub struct CompressedGroup {
    /// Name of the group.
    pub name: String,
    /// Module classes or names it applies to.
    pub targets: Vec<String>,
    /// Layout of this group where it differs from the whole.
    pub format: Option<String>,
    /// How weights are quantised.
    pub weights: Option<CompressedArgs>,
    /// How inputs are quantised.
    pub input_activations: Option<CompressedArgs>,
}

/// How one kind of tensor is quantised in `compressed-tensors`.
#[derive(Clone, Debug, PartialEq)]
pub struct CompressedArgs {
    /// Bits of an element.
    pub num_bits: u8,
    /// `int` or `float`.
    pub kind: String,
    /// `tensor`, `channel`, `group`, `block`, `token`; `None` when the file leaves it open.
    pub strategy: Option<String>,
    /// Elements that share a scale; `None` where the strategy has no groups.
    pub group_size: Option<usize>,
    /// Rows and columns that share a scale; `None` where the strategy has no blocks.
    pub block: Option<[usize; 2]>,
    /// Whether zero points are the middle of the range.
    pub symmetric: bool,
    /// Whether scales are computed at run time.
    pub dynamic: bool,
    /// Reordering of inputs (`group`, `weight`), if any.
    pub actorder: Option<String>,
}

impl QuantizationConfig {
    /// What `config.json` says: `quantization_config`, or `compression_config` of older files.
    ///
    /// # Errors
    /// [`FormatError`] when the section lacks a field or a field has the wrong type.
    pub fn of_model(config: &HfConfig) -> Result<Option<Self>> {
        for key in ["quantization_config", "compression_config"] {
            if let Some(section) = config.section(key)? {
                return Self::from_json(&section).map(Some);
            }
        }
        // A multimodal model may keep it with its text decoder.
        match config.section("text_config")? {
            Some(text) => Self::of_model(&text),
            None => Ok(None),
        }
    }

    /// Reads a `quantization_config` section, or a whole `quantize_config.json` (AutoGPTQ) or
    /// `quant_config.json` (AutoAWQ), which do not name their method.
    ///
    /// # Errors
    /// [`FormatError`] when a field is missing or has the wrong type.
    pub fn from_json(json: &HfConfig) -> Result<Self> {
        let method = match json.str("quant_method")? {
            Some(method) => method.to_ascii_lowercase(),
            None if json.has("w_bit") => "awq".to_owned(),
            None if json.has("desc_act") => "gptq".to_owned(),
            None if json.has("config_groups") => "compressed-tensors".to_owned(),
            None => json.require_str("quant_method")?.to_owned(),
        };
        Ok(match method.as_str() {
            "gptq" => Self::Gptq(gptq(json)?),
            "awq" => Self::Awq(awq(json)?),
            "fp8" => Self::Fp8(fp8(json)?),
            "compressed-tensors" => Self::CompressedTensors(compressed(json)?),
            _ => Self::Other(method),
        })
    }

    /// The method's name, as `quant_method` writes it.
    pub fn method(&self) -> &str {
        match self {
            Self::Gptq(_) => "gptq",
            Self::Awq(_) => "awq",
            Self::CompressedTensors(_) => "compressed-tensors",
            Self::Fp8(_) => "fp8",
            Self::Other(name) => name,
        }
    }
}

impl fmt::Display for QuantizationConfig {
    /// Scheme and parameters in a line for people.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let groups = |size: Option<usize>| match size {
            Some(size) => format!("groups of {size}"),
            None => "one group".to_owned(),
        };
        let text = match self {
            Self::Gptq(c) => {
                let mut text = format!("GPTQ, {} bits, {}", c.bits, groups(c.group_size));
                for (holds, what) in [
                    (c.sym, ", symmetric"),
                    (c.desc_act, ", in activation order"),
                    (c.checkpoint_format == "gptq_v2", ", version 2"),
                    (!c.overrides.is_empty(), ", some modules differ"),
                ] {
                    text += if holds { what } else { "" };
                }
                text
            }
            Self::Awq(c) => {
                let (bits, version) = (c.bits, &c.version);
                format!("AWQ, {bits} bits, {}, {version}", groups(c.group_size))
            }
            Self::Fp8(c) => match c.weight_block_size {
                Some([rows, cols]) => format!("FP8, a scale for each {rows} × {cols}"),
                None => "FP8".to_owned(),
            },
            Self::CompressedTensors(c) => {
                let mut text = format!("compressed-tensors, {}", c.format);
                for args in c.groups.iter().filter_map(|group| group.weights.as_ref()) {
                    text += &format!(", {} bits", args.num_bits);
                    text += &match (args.group_size, args.strategy.as_deref()) {
                        (Some(size), _) => format!(", groups of {size}"),
                        (None, Some(strategy)) => format!(", a scale for each {strategy}"),
                        (None, None) => String::new(),
                    };
                }
                text
            }
            Self::Other(name) => name.clone(),
        };
        f.pad(&text)
    }
}

fn gptq(json: &HfConfig) -> Result<GptqConfig> {
    let format = match json.str("checkpoint_format")? {
        Some(format) => Some(format),
        None => json.str("format")?,
    };
    Ok(GptqConfig {
        bits: bits(json, "bits")?,
        group_size: group_size(json, "group_size")?,
        desc_act: json.bool("desc_act")?.unwrap_or(false),
        sym: json.bool("sym")?.unwrap_or(true),
        checkpoint_format: format.unwrap_or("gptq").to_ascii_lowercase(),
        lm_head: json.bool("lm_head")?.unwrap_or(false),
        overrides: match json.section("dynamic")? {
            Some(section) => section.keys().map(str::to_owned).collect(),
            None => Vec::new(),
        },
    })
}

fn awq(json: &HfConfig) -> Result<AwqConfig> {
    let old = json.has("w_bit");
    let version = match json.str("version")? {
        Some(version) => Some(version),
        None => json.str("format")?,
    };
    Ok(AwqConfig {
        bits: bits(json, if old { "w_bit" } else { "bits" })?,
        group_size: group_size(json, if old { "q_group_size" } else { "group_size" })?,
        zero_point: json.bool("zero_point")?.unwrap_or(true),
        version: version.unwrap_or("gemm").to_ascii_lowercase(),
        modules_to_not_convert: names(json, "modules_to_not_convert")?,
    })
}

fn fp8(json: &HfConfig) -> Result<Fp8Config> {
    let mut kept = names(json, "modules_to_not_convert")?;
    if kept.is_empty() {
        kept = names(json, "ignored_layers")?;
    }
    let scheme = json.str("activation_scheme")?.unwrap_or("dynamic");
    Ok(Fp8Config {
        activation_scheme: scheme.to_owned(),
        weight_block_size: block(json, "weight_block_size")?,
        modules_to_not_convert: kept,
    })
}

fn block(json: &HfConfig, key: &str) -> Result<Option<[usize; 2]>> {
    match json.usizes(key)?.as_deref() {
        None => Ok(None),
        Some(&[rows, cols]) if rows > 0 && cols > 0 => Ok(Some([rows, cols])),
        Some(_) => Err(json.field_error(key, "two positive integers")),
    }
}

fn compressed(json: &HfConfig) -> Result<CompressedTensorsConfig> {
    let Some(sections) = json.section("config_groups")? else {
        let expected = "an object of groups";
        return Err(FormatError::missing_field(
            json.path(),
            "config_groups",
            expected,
        ));
    };
    let mut groups = Vec::new();
    for name in sections.keys() {
        let Some(group) = sections.section(name)? else {
            continue;
        };
        let args = |key| {
            group
                .section(key)?
                .as_ref()
                .map(compressed_args)
                .transpose()
        };
        groups.push(CompressedGroup {
            name: name.to_owned(),
            targets: names(&group, "targets")?,
            format: group.str("format")?.map(str::to_owned),
            weights: args("weights")?,
            input_activations: args("input_activations")?,
        });
    }
    Ok(CompressedTensorsConfig {
        format: json.str("format")?.unwrap_or("dense").to_owned(),
        groups,
        ignore: names(json, "ignore")?,
        has_kv_cache_scheme: json.has("kv_cache_scheme"),
    })
}

fn compressed_args(json: &HfConfig) -> Result<CompressedArgs> {
    // `dynamic` may be the word "local", `actorder` the word or a truth value.
    let dynamic = match json.value("dynamic").and_then(|v| v.as_str()) {
        Some(_) => true,
        None => json.bool("dynamic")?.unwrap_or(false),
    };
    let actorder = match json.value("actorder").and_then(|v| v.as_bool()) {
        Some(on) => on.then(|| "group".to_owned()),
        None => json.str("actorder")?.map(str::to_owned),
    };
    Ok(CompressedArgs {
        num_bits: bits(json, "num_bits")?,
        kind: json.str("type")?.unwrap_or("int").to_owned(),
        strategy: json.str("strategy")?.map(str::to_owned),
        group_size: match json.has("group_size") {
            true => group_size(json, "group_size")?,
            false => None,
        },
        block: block(json, "block_structure")?,
        symmetric: json.bool("symmetric")?.unwrap_or(true),
        dynamic,
        actorder,
    })
}

fn bits(json: &HfConfig, key: &str) -> Result<u8> {
    match json.require_usize(key)? {
        n @ 1..=16 => Ok(n as u8),
        _ => Err(json.field_error(key, "an integer from 1 to 16")),
    }
}

/// -1 (and 0, which some tools write) stands for one group over everything; 128 is the default of
/// both GPTQ and AWQ.
fn group_size(json: &HfConfig, key: &str) -> Result<Option<usize>> {
    match json.value(key).and_then(|v| v.as_i64()) {
        Some(-1 | 0) => Ok(None),
        _ => Ok(Some(json.usize(key)?.unwrap_or(128))),
    }
}

fn names(json: &HfConfig, key: &str) -> Result<Vec<String>> {
    let list = json.strs(key)?.unwrap_or_default();
    Ok(list.into_iter().map(str::to_owned).collect())
}
