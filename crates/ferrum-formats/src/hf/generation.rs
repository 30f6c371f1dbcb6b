//! `generation_config.json`: how the model's authors want it sampled, and where it stops.

use super::HfConfig;
use crate::Result;
use ferrum_types::TokenId;

/// Defaults for sampling. What the file does not say stays `None` or empty.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GenerationConfig {
    /// First token of a sequence.
    pub bos_token_id: Option<TokenId>,
    /// Tokens that end a sequence (the file holds one id or a list).
    pub eos_token_ids: Vec<TokenId>,
    /// Token that fills shorter rows of a batch.
    pub pad_token_id: Option<TokenId>,
    /// Whether to sample at all; greedy when false.
    pub do_sample: Option<bool>,
    /// Divides the logits.
    pub temperature: Option<f64>,
    /// Keep this many most probable tokens; 0 keeps all.
    pub top_k: Option<usize>,
    /// Keep the smallest set with this much probability.
    pub top_p: Option<f64>,
    /// Drop tokens below this share of the most probable one.
    pub min_p: Option<f64>,
    /// Locally typical sampling mass.
    pub typical_p: Option<f64>,
    /// Divides (or multiplies, when negative) the logits of tokens already present.
    pub repetition_penalty: Option<f64>,
    /// Forbid repeating n-grams of this length; 0 allows all.
    pub no_repeat_ngram_size: Option<usize>,
    /// Prompt and answer together.
    pub max_length: Option<usize>,
    /// Answer only.
    pub max_new_tokens: Option<usize>,
}

impl GenerationConfig {
    /// Reads the fields out of a parsed `generation_config.json`.
    ///
    /// # Errors
    /// [`FormatError::Field`](crate::FormatError::Field) for a value of the wrong type.
    pub fn from_json(json: &HfConfig) -> Result<Self> {
        Ok(GenerationConfig {
            bos_token_id: json.token_ids("bos_token_id")?.first().copied(),
            eos_token_ids: json.token_ids("eos_token_id")?,
            pad_token_id: pad_id(json)?,
            do_sample: json.bool("do_sample")?,
            temperature: json.f64("temperature")?,
            top_k: json.usize("top_k")?,
            top_p: json.f64("top_p")?,
            min_p: json.f64("min_p")?,
            typical_p: json.f64("typical_p")?,
            repetition_penalty: json.f64("repetition_penalty")?,
            no_repeat_ngram_size: json.usize("no_repeat_ngram_size")?,
            max_length: json.usize("max_length")?,
            max_new_tokens: json.usize("max_new_tokens")?,
        })
    }

    /// The same, with token ids that are absent taken from `config.json` (of a multimodal model:
    /// from its text section where the top has none).
    ///
    /// # Errors
    /// [`FormatError::Field`](crate::FormatError::Field) for ids of the wrong type there.
    pub fn completed_from(mut self, config: &HfConfig) -> Result<Self> {
        for source in [config, &config.text_config()?] {
            if self.bos_token_id.is_none() {
                self.bos_token_id = source.token_ids("bos_token_id")?.first().copied();
            }
            if self.eos_token_ids.is_empty() {
                self.eos_token_ids = source.token_ids("eos_token_id")?;
            }
            if self.pad_token_id.is_none() {
                self.pad_token_id = pad_id(source)?;
            }
        }
        Ok(self)
    }
}

/// Old configs write -1 for "no padding token".
fn pad_id(config: &HfConfig) -> Result<Option<TokenId>> {
    match config.value("pad_token_id").and_then(|v| v.as_i64()) {
        Some(-1) => Ok(None),
        _ => Ok(config.token_ids("pad_token_id")?.first().copied()),
    }
}
