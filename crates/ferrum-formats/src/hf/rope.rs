//! Rotary position parameters, in every spelling that configs have had.
//!
//! Until transformers 5 a config held `rope_theta` and an optional `rope_scaling` with `type` or
//! `rope_type`; since then `rope_parameters` holds all of it, either flat or once per layer type.
//! Gemma 3 had a second base, `rope_local_base_freq`, for its sliding layers. The rules by which
//! absent values follow from others are those of transformers' `modeling_rope_utils`.

use super::HfConfig;
use crate::Result;
use std::collections::BTreeMap;

/// Rotary position parameters of one kind of layer.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeConfig {
    /// Base of the frequencies.
    pub theta: f64,
    /// How frequencies are changed for long contexts.
    pub kind: RopeKind,
    /// Share of each head that is rotated, above 0 and at most 1.
    pub partial_rotary_factor: f64,
    /// How a multimodal model splits the frequencies over time, height and width. For text all
    /// three positions are equal, so it changes nothing there.
    pub mrope_section: Option<Vec<usize>>,
}

/// How rotary frequencies are changed for contexts longer than the model was trained on.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum RopeKind {
    /// Not at all.
    Default,
    /// All divided by a factor.
    Linear {
        /// The divisor.
        factor: f64,
    },
    /// NTK-aware: the base grows with the length of the sequence.
    Dynamic {
        /// Growth of the context.
        factor: f64,
        /// Length up to which nothing changes.
        original_max_position: usize,
    },
    /// YaRN: a ramp between unchanged and divided frequencies.
    Yarn {
        /// The divisor of slow frequencies.
        factor: f64,
        /// Turns above which a frequency stays unchanged.
        beta_fast: f64,
        /// Turns below which a frequency is divided.
        beta_slow: f64,
        /// Factor on cosine and sine; derived from `factor` and the scales when `None`.
        attention_factor: Option<f64>,
        /// Scale in the numerator of the derived attention factor.
        mscale: Option<f64>,
        /// Scale in its denominator (and in DeepSeek's softmax scale).
        mscale_all_dim: Option<f64>,
        /// Length the model was trained on.
        original_max_position: usize,
        /// Whether the ends of the ramp are rounded to whole dimensions.
        truncate: bool,
    },
    /// Llama 3: three bands of wavelengths.
    Llama3 {
        /// The divisor of slow frequencies.
        factor: f64,
        /// Wavelengths above the original length divided by this are slow.
        low_freq_factor: f64,
        /// Wavelengths below the original length divided by this are unchanged.
        high_freq_factor: f64,
        /// Length the model was trained on.
        original_max_position: usize,
    },
    /// LongRoPE (Phi): a divisor for each frequency, one list for short and one for long sequences.
    LongRope {
        /// Divisors up to the original length.
        short_factor: Vec<f64>,
        /// Divisors beyond it.
        long_factor: Vec<f64>,
        /// Growth of the context, from which the attention factor is derived.
        factor: f64,
        /// Factor on cosine and sine; derived when `None`.
        attention_factor: Option<f64>,
        /// Length the model was trained on.
        original_max_position: usize,
    },
    /// Gemma 4: the rotated share takes the frequencies of the whole head.
    Proportional {
        /// The divisor of all frequencies.
        factor: f64,
    },
}

/// Rotary parameters of a whole model.
#[derive(Clone, Debug, PartialEq)]
pub enum RopeConfigs {
    /// The same in every layer.
    All(RopeConfig),
    /// By layer type (`full_attention`, `sliding_attention`); a type that is not listed does not
    /// rotate.
    ByLayerType(BTreeMap<String, RopeConfig>),
}

impl RopeConfigs {
    /// The parameters of layers of this type; `None` when such layers do not rotate.
    pub fn for_layer_type(&self, layer_type: &str) -> Option<&RopeConfig> {
        match self {
            RopeConfigs::All(rope) => Some(rope),
            RopeConfigs::ByLayerType(map) => map.get(layer_type),
        }
    }
}

impl HfConfig {
    /// The rotary parameters of this (text) config. `default_theta` is the family's base where
    /// the file gives none; 10000 for most.
    ///
    /// # Errors
    /// [`FormatError`](crate::FormatError) for an unknown kind, a missing parameter, or a value of
    /// the wrong type or sign.
    pub fn rope(&self, default_theta: f64) -> Result<RopeConfigs> {
        // Where a file has both, transformers takes the older one, unless it is empty.
        for key in ["rope_scaling", "rope_parameters"] {
            let Some(section) = self.section(key)? else {
                continue;
            };
            if section.keys().next().is_none() {
                continue;
            }
            let is_object = |name: &&str| section.value(name).is_some_and(|v| v.is_object());
            let types: Vec<&str> = section.keys().filter(is_object).collect();
            if types.is_empty() {
                return self.flat_rope(&section, default_theta);
            }
            let mut map = BTreeMap::new();
            for name in types {
                if let Some(parameters) = section.section(name)? {
                    map.insert(name.to_owned(), self.one_rope(&parameters, default_theta)?);
                }
            }
            return Ok(RopeConfigs::ByLayerType(map));
        }
        self.flat_rope(&self.without_fields(), default_theta)
    }

    /// One set of parameters, and Gemma 3's second base where there is one.
    fn flat_rope(&self, parameters: &HfConfig, default_theta: f64) -> Result<RopeConfigs> {
        let rope = self.one_rope(parameters, default_theta)?;
        let Some(theta) = positive(self, "rope_local_base_freq")? else {
            return Ok(RopeConfigs::All(rope));
        };
        let local = RopeConfig {
            theta,
            kind: RopeKind::Default,
            ..rope.clone()
        };
        Ok(RopeConfigs::ByLayerType(BTreeMap::from([
            ("full_attention".to_owned(), rope),
            ("sliding_attention".to_owned(), local),
        ])))
    }

    fn one_rope(&self, parameters: &HfConfig, default_theta: f64) -> Result<RopeConfig> {
        let mut theta = positive(parameters, "rope_theta")?;
        for key in ["rope_theta", "rotary_emb_base"] {
            theta = theta.map_or_else(|| positive(self, key), |x| Ok(Some(x)))?;
        }
        let mut partial = (parameters, "partial_rotary_factor");
        for other in ["partial_rotary_factor", "rotary_pct"] {
            if !partial.0.has(partial.1) {
                partial = (self, other);
            }
        }
        let share = positive(partial.0, partial.1)?.unwrap_or(1.0);
        if share > 1.0 {
            return Err(partial
                .0
                .field_error(partial.1, "a number above 0 and at most 1"));
        }
        Ok(RopeConfig {
            theta: theta.unwrap_or(default_theta),
            kind: self.rope_kind(parameters)?,
            partial_rotary_factor: share,
            mrope_section: parameters.usizes("mrope_section")?,
        })
    }

    fn rope_kind(&self, parameters: &HfConfig) -> Result<RopeKind> {
        let key = match parameters.has("rope_type") {
            true => "rope_type",
            false => "type",
        };
        let factor = || require_positive(parameters, "factor");
        Ok(match parameters.str(key)?.unwrap_or("default") {
            "default" | "mrope" => RopeKind::Default,
            "linear" => RopeKind::Linear { factor: factor()? },
            "dynamic" => RopeKind::Dynamic {
                factor: factor()?,
                original_max_position: self.require_usize("max_position_embeddings")?,
            },
            // Early Phi-3 files called LongRoPE "su", or "yarn" with LongRoPE's lists.
            "longrope" | "su" => self.longrope(parameters)?,
            "yarn" if parameters.has("long_factor") => self.longrope(parameters)?,
            "yarn" => self.yarn(parameters)?,
            "llama3" => RopeKind::Llama3 {
                factor: factor()?,
                low_freq_factor: require_positive(parameters, "low_freq_factor")?,
                high_freq_factor: require_positive(parameters, "high_freq_factor")?,
                original_max_position: self.original_max_position(parameters)?,
            },
            "proportional" => RopeKind::Proportional {
                factor: positive(parameters, "factor")?.unwrap_or(1.0),
            },
            _ => {
                let expected = "default, linear, dynamic, yarn, llama3, longrope or proportional";
                return Err(parameters.field_error(key, expected));
            }
        })
    }

    fn yarn(&self, parameters: &HfConfig) -> Result<RopeKind> {
        let original_max_position = self.original_max_position(parameters)?;
        Ok(RopeKind::Yarn {
            factor: self.growth(parameters, original_max_position)?,
            // A 0 means "not set", as Python's `or` has it.
            beta_fast: parameters
                .f64("beta_fast")?
                .filter(|&x| x != 0.0)
                .unwrap_or(32.0),
            beta_slow: parameters
                .f64("beta_slow")?
                .filter(|&x| x != 0.0)
                .unwrap_or(1.0),
            attention_factor: positive(parameters, "attention_factor")?,
            mscale: parameters.f64("mscale")?,
            mscale_all_dim: parameters.f64("mscale_all_dim")?,
            original_max_position,
            truncate: parameters.bool("truncate")?.unwrap_or(true),
        })
    }

    fn longrope(&self, parameters: &HfConfig) -> Result<RopeKind> {
        let list = |key: &'static str| match parameters.f64s(key)? {
            Some(list) if !list.is_empty() && list.iter().all(|&x| x > 0.0) => Ok(list),
            _ => Err(parameters.field_error(key, "a list of positive numbers")),
        };
        let original_max_position = self.original_max_position(parameters)?;
        Ok(RopeKind::LongRope {
            short_factor: list("short_factor")?,
            long_factor: list("long_factor")?,
            factor: self.growth(parameters, original_max_position)?,
            attention_factor: positive(parameters, "attention_factor")?,
            original_max_position,
        })
    }

    /// `factor`, else how much longer the context is than the one trained on.
    fn growth(&self, parameters: &HfConfig, original: usize) -> Result<f64> {
        match positive(parameters, "factor")? {
            Some(factor) => Ok(factor),
            None => Ok(self.require_usize("max_position_embeddings")? as f64 / original as f64),
        }
    }

    /// Phi keeps the trained length beside the rope parameters, and there it wins; without either
    /// the model was trained on its whole context.
    fn original_max_position(&self, parameters: &HfConfig) -> Result<usize> {
        const KEY: &str = "original_max_position_embeddings";
        if self.has(KEY) {
            self.require_usize(KEY)
        } else if parameters.has(KEY) {
            parameters.require_usize(KEY)
        } else {
            self.require_usize("max_position_embeddings")
        }
    }
}

fn positive(json: &HfConfig, key: &str) -> Result<Option<f64>> {
    match json.f64(key)? {
        Some(x) if x.is_nan() || x <= 0.0 => Err(json.field_error(key, "a positive number")),
        other => Ok(other),
    }
}

fn require_positive(json: &HfConfig, key: &str) -> Result<f64> {
    match positive(json, key)? {
        Some(x) => Ok(x),
        None => json.require_f64(key),
    }
}
