//! RoPE settings of configs and GGUF metadata.

use super::hf_defaults::HfDefaults;
use super::names::GGUF_NAMES;
use crate::inventory::{TensorId, TensorRole};
use crate::spec::{RopeScaling, RopeSpec};
use ferrum_formats::{Gguf, HfConfig, RopeConfig, RopeConfigs, RopeKind, TensorSource};
use ferrum_kernels::RopeStyle;
use ferrum_types::{Error, Result};

/// The divisor of frequencies that turn nothing, as GGUF files have it.
const UNTURNED: f32 = 1e30;

/// Reads either spelling of `config.json`: the rotary embedding of all layers, or where layers have different ones,
/// that of layers which see all tokens and that of layers with a window.
pub(super) fn from_hf(
    config: &HfConfig,
    head_dim: usize,
    defaults: &HfDefaults,
) -> Result<Vec<RopeSpec>> {
    match config.rope(defaults.theta)? {
        RopeConfigs::All(rope) => Ok(vec![one_from_hf(config, head_dim, &rope, defaults)?]),
        RopeConfigs::ByLayerType(types) => {
            let known = ["full_attention", "sliding_attention"];
            let ropes: Vec<_> = known.iter().filter_map(|&name| types.get(name)).collect();
            if ropes.len() != types.len() {
                let expected = "parameters for full_attention and sliding_attention alone";
                return Err(config.field_error("rope_parameters", expected).into());
            }
            let ropes = ropes.into_iter();
            ropes
                .map(|rope| one_from_hf(config, head_dim, rope, defaults))
                .collect()
        }
    }
}

pub(super) fn one_from_hf(
    config: &HfConfig,
    head_dim: usize,
    rope: &RopeConfig,
    defaults: &HfDefaults,
) -> Result<RopeSpec> {
    let rot_dim = match defaults.rotary_share {
        None => head_dim,
        Some(default) => {
            let share = match states_share(config)? {
                true => rope.partial_rotary_factor,
                false => default,
            };
            (head_dim as f64 * share) as usize
        }
    };
    let scaling = match &rope.kind {
        RopeKind::Default => RopeScaling::None,
        RopeKind::Linear { factor } => RopeScaling::Linear {
            factor: *factor as f32,
        },
        RopeKind::Dynamic {
            factor,
            original_max_position,
        } => RopeScaling::Dynamic {
            factor: *factor as f32,
            max_position: *original_max_position,
        },
        RopeKind::Yarn { .. } => yarn_from_hf(&rope.kind),
        RopeKind::Llama3 {
            factor,
            low_freq_factor,
            high_freq_factor,
            original_max_position,
        } => RopeScaling::Llama3 {
            factor: *factor as f32,
            low_freq_factor: *low_freq_factor as f32,
            high_freq_factor: *high_freq_factor as f32,
            original_max_position: *original_max_position,
        },
        RopeKind::LongRope {
            short_factor,
            long_factor,
            factor,
            attention_factor,
            original_max_position,
        } => {
            let magnitude = longrope_magnitude(*factor, *original_max_position);
            let narrow = |all: &[f64]| all.iter().map(|&x| x as f32).collect();
            RopeScaling::LongRope {
                short: narrow(short_factor),
                long: narrow(long_factor),
                attention_factor: attention_factor.unwrap_or(magnitude) as f32,
                original_max_position: *original_max_position,
            }
        }
        RopeKind::Proportional { factor } => {
            // The first pairs have the frequencies of whole heads, the others are not turned.
            let turned = (rope.partial_rotary_factor * (head_dim / 2) as f64) as usize;
            let divisor = |pair| match pair < turned {
                true => *factor as f32,
                false => UNTURNED,
            };
            RopeScaling::Factors((0..head_dim / 2).map(divisor).collect())
        }
        _ => return Err(unsupported(config, "an unknown one")),
    };
    // As in transformers, these families rotate whole heads whatever the file says; with a scaling,
    // its models cannot run either.
    let whole = defaults.rotary_share.is_none();
    let proportional = matches!(rope.kind, RopeKind::Proportional { .. });
    let ignored = whole && !proportional && rope.partial_rotary_factor != 1.0;
    if ignored && scaling != RopeScaling::None {
        let expected = "1 together with this RoPE scaling in this architecture";
        return Err(config.field_error("partial_rotary_factor", expected).into());
    }
    Ok(RopeSpec {
        rot_dim,
        theta: rope.theta as f32,
        style: RopeStyle::HalfSplit,
        scaling,
    })
}

/// Whether the file says what share of heads is rotated.
fn states_share(config: &HfConfig) -> Result<bool> {
    let key = "partial_rotary_factor";
    for section in ["rope_scaling", "rope_parameters"] {
        if config.section(section)?.is_some_and(|s| s.has(key)) {
            return Ok(true);
        }
    }
    Ok(config.has(key) || config.has("rotary_pct"))
}

fn yarn_from_hf(kind: &RopeKind) -> RopeScaling {
    let RopeKind::Yarn {
        factor,
        beta_fast,
        beta_slow,
        attention_factor,
        mscale,
        mscale_all_dim,
        original_max_position,
        truncate,
    } = *kind
    else {
        return RopeScaling::None;
    };
    let attention_factor = attention_factor.unwrap_or_else(|| match (mscale, mscale_all_dim) {
        (Some(one), Some(all)) if one != 0.0 && all != 0.0 => {
            yarn_magnitude(factor, one) / yarn_magnitude(factor, all)
        }
        _ => yarn_magnitude(factor, 1.0),
    });
    RopeScaling::Yarn {
        factor: factor as f32,
        attention_factor: attention_factor as f32,
        beta_fast: beta_fast as f32,
        beta_slow: beta_slow as f32,
        original_max_position,
        truncate,
    }
}

/// What DeepSeek multiplies scores with beside the size of heads: the square of YaRN's factor with `mscale_all_dim`.
pub(super) fn yarn_score_factor(config: &HfConfig, defaults: &HfDefaults) -> Result<f64> {
    let RopeConfigs::All(rope) = config.rope(defaults.theta)? else {
        return Ok(1.0);
    };
    Ok(match rope.kind {
        RopeKind::Yarn {
            factor,
            mscale_all_dim: Some(all),
            ..
        } if all != 0.0 => yarn_magnitude(factor, all).powi(2),
        _ => 1.0,
    })
}

/// LongRoPE's factor on sines and cosines, of the growth of the context.
fn longrope_magnitude(factor: f64, original: usize) -> f64 {
    match factor <= 1.0 || original < 2 {
        true => 1.0,
        false => (1.0 + factor.ln() / (original as f64).ln()).sqrt(),
    }
}

/// Reads `rope.*` metadata and `rope_freqs.weight`.
pub(super) fn from_gguf(
    gguf: &Gguf,
    head_dim: usize,
    context: usize,
    style: RopeStyle,
) -> Result<RopeSpec> {
    let arch = gguf.architecture()?;
    let key = |name: &str| format!("{arch}.rope.{name}");
    let number = |name: &str| gguf.f32(&key(name));
    let rot_dim = gguf
        .u32(&key("dimension_count"))?
        .map_or(head_dim, |n| n as usize);
    let theta = number("freq_base")?.unwrap_or(10_000.0);
    let kind = gguf.str(&key("scaling.type"))?.map(str::to_owned);
    let factor = match number("scaling.factor")? {
        Some(factor) => factor,
        // The key that older converters wrote.
        None => number("scale_linear")?.unwrap_or(1.0),
    };
    if !(factor.is_finite() && factor > 0.0) {
        let name = key("scaling.factor");
        return Err(bad(
            gguf,
            &name,
            &format!("found {factor}, expected a positive number"),
        ));
    }
    let scaling = match kind.as_deref() {
        None | Some("linear") if factor != 1.0 => RopeScaling::Linear { factor },
        None | Some("none" | "linear") => RopeScaling::None,
        Some("yarn") => {
            let original = gguf.u32(&key("scaling.original_context_length"))?;
            // `yarn_attn_factor` is the whole factor, `attn_factor` multiplies the default one.
            let default = yarn_magnitude(f64::from(factor), 1.0) as f32;
            let attention_factor = match number("scaling.yarn_attn_factor")? {
                Some(whole) => whole,
                None => number("scaling.attn_factor")?.unwrap_or(1.0) * default,
            };
            RopeScaling::Yarn {
                factor,
                attention_factor,
                beta_fast: number("scaling.yarn_beta_fast")?.unwrap_or(32.0),
                beta_slow: number("scaling.yarn_beta_slow")?.unwrap_or(1.0),
                original_max_position: original.map_or(context, |n| n as usize),
                truncate: true,
            }
        }
        Some("longrope") => RopeScaling::None,
        Some(other) => {
            let reason = format!("found \"{other}\", expected none, linear, yarn or longrope");
            return Err(bad(gguf, &key("scaling.type"), &reason));
        }
    };
    let divisors = GGUF_NAMES.name(TensorId::global(TensorRole::RopeFactors));
    let divisors = divisors.as_deref().unwrap_or_default();
    let scaling = match gguf.get(divisors) {
        Some(view) if scaling == RopeScaling::None => {
            RopeScaling::Factors(crate::stored::to_f32(gguf, &view)?)
        }
        Some(_) => {
            let reason = "found together with another scaling, expected only one of them";
            return Err(bad(gguf, divisors, reason));
        }
        None => scaling,
    };
    let scaling = match longrope_from_gguf(gguf, context)? {
        Some(longrope) => longrope,
        None => scaling,
    };
    Ok(RopeSpec {
        rot_dim,
        theta,
        style,
        scaling,
    })
}

/// The two lists of divisors, if the file has them.
fn longrope_from_gguf(gguf: &Gguf, context: usize) -> Result<Option<RopeScaling>> {
    let list = |role| -> Result<Option<Vec<f32>>> {
        let name = GGUF_NAMES.name(TensorId::global(role)).unwrap_or_default();
        let view = gguf.get(&name);
        view.map(|view| crate::stored::to_f32(gguf, &view))
            .transpose()
    };
    let long = list(TensorRole::RopeLongFactors)?;
    let (Some(long), Some(short)) = (long, list(TensorRole::RopeShortFactors)?) else {
        return Ok(None);
    };
    let key = |name: &str| Ok::<_, Error>(format!("{}.rope.scaling.{name}", gguf.architecture()?));
    let original = gguf.u32(&key("original_context_length")?)?;
    let original = original.map_or(context, |n| n as usize);
    let magnitude = longrope_magnitude(context as f64 / original.max(1) as f64, original);
    let stated = gguf.f32(&key("attn_factor")?)?;
    Ok(Some(RopeScaling::LongRope {
        short,
        long,
        attention_factor: stated.unwrap_or(magnitude as f32),
        original_max_position: original,
    }))
}

fn unsupported(config: &HfConfig, kind: &str) -> Error {
    Error::Model(format!(
        "{}: RoPE type {kind}: expected default, linear, dynamic, yarn, llama3, longrope or proportional for this architecture",
        config.path().display()
    ))
}

/// YaRN's factor on sines and cosines (equation 22 of the paper, with DeepSeek's `mscale`).
fn yarn_magnitude(factor: f64, mscale: f64) -> f64 {
    if factor <= 1.0 {
        1.0
    } else {
        0.1 * mscale * factor.ln() + 1.0
    }
}

fn bad(gguf: &Gguf, field: &str, reason: &str) -> Error {
    Error::Model(format!(
        "{}: field \"{field}\": {reason}",
        gguf.path().display()
    ))
}
