//! How tokens are chosen, as plain data.

use super::Dry;
use ferrum_formats::tokenizer::{EncodeOptions, Tokenizer, TokenizerError};
use ferrum_kernels::RowSampling;
use ferrum_types::{Error, Result, TokenId};
use std::sync::Arc;

/// Most entries of a logit bias.
pub const MAX_LOGIT_BIAS: usize = 1024;
/// Most sequences of tokens that may not be completed.
pub const MAX_BAD_WORDS: usize = 1024;
/// Most tokens of one of them.
pub const MAX_BAD_WORD_TOKENS: usize = 64;

/// How tokens are chosen. The default is plain greedy.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    /// 0: greedy; otherwise logits are divided by it.
    pub temperature: f32,
    /// Only the most likely `top_k` tokens; 0: all. This filter and those below look at the probabilities
    /// after temperature; the order is in the [module](super).
    pub top_k: usize,
    /// Only the most likely tokens that together reach this probability; 1: all.
    pub top_p: f32,
    /// Only tokens at least this probable relative to the most likely one; 0: all.
    pub min_p: f32,
    /// Only the tokens whose surprise is nearest to the expected one, until they together pass this
    /// probability (Meister et al., 2022); 1: all.
    pub typical_p: f32,
    /// Divides positive and multiplies negative logits of tokens among the last `repeat_last_n`, prompt
    /// included; 1: none.
    pub repeat_penalty: f32,
    /// How many tokens the repetition penalty looks back at; `usize::MAX`: all, as `transformers` and vLLM
    /// have it. llama.cpp's option of that name makes it fewer.
    pub repeat_last_n: usize,
    /// Taken from the logit of each token of the answer, once; 0: none.
    pub presence_penalty: f32,
    /// Taken from the logit of each token of the answer, as often as it is there; 0: none.
    pub frequency_penalty: f32,
    /// Penalty on going on with a repeated passage.
    pub dry: Dry,
    /// Leaving out the most likely tokens at random.
    pub xtc: Xtc,
    /// Control of surprise in place of top-k to XTC.
    pub mirostat: Option<Mirostat>,
    /// Added to logits; `-inf` forbids a token.
    pub logit_bias: Vec<(TokenId, f32)>,
    /// Sequences of tokens that the answer may not have: the last token of one is forbidden where those before it
    /// stand at the end of the answer. At most [`MAX_BAD_WORDS`] of at most [`MAX_BAD_WORD_TOKENS`];
    /// [`bad_word_tokens`](Self::bad_word_tokens) makes them of text.
    pub bad_words: Vec<Vec<TokenId>>,
    /// Only these tokens may be chosen, at least one; `None`: all. An answer can end by itself only if a
    /// token that ends it is among them.
    pub allowed_tokens: Option<Arc<[TokenId]>>,
    /// Start of the random sequence.
    pub seed: u64,
}

/// XTC, "exclude top choices": with a probability, of all tokens at least as probable as a threshold
/// only the least probable one stays.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Xtc {
    /// How often; 0: never.
    pub probability: f32,
    /// From which probability on a token is a top choice; above 0.5 there are never two.
    pub threshold: f32,
}

impl Default for Xtc {
    fn default() -> Self {
        Self {
            probability: 0.0,
            threshold: 0.1,
        }
    }
}

impl Xtc {
    pub(super) fn can_act(&self) -> bool {
        self.probability > 0.0 && self.threshold <= 0.5
    }
}

/// Mirostat v2.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Mirostat {
    /// Surprise to aim for, in bits.
    pub tau: f32,
    /// How fast it corrects itself.
    pub eta: f32,
}

impl Default for Mirostat {
    fn default() -> Self {
        Self { tau: 5.0, eta: 0.1 }
    }
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            typical_p: 1.0,
            repeat_penalty: 1.0,
            repeat_last_n: usize::MAX,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            dry: Dry::default(),
            xtc: Xtc::default(),
            mirostat: None,
            logit_bias: Vec::new(),
            bad_words: Vec::new(),
            allowed_tokens: None,
            seed: 0,
        }
    }
}

/// Everything that is above 0, and everything that is at least 0.
const ABOVE_ZERO: (f32, f32) = (f32::MIN_POSITIVE, f32::MAX);
const NOT_NEGATIVE: (f32, f32) = (0.0, f32::MAX);
const SHARE: (f32, f32) = (0.0, 1.0);
const ANY: (f32, f32) = (f32::MIN, f32::MAX);

impl SamplingParams {
    /// Checks ranges and sizes.
    ///
    /// # Errors
    /// `InvalidArgument` names the setting.
    pub fn validate(&self) -> Result<()> {
        let mirostat = self.mirostat.unwrap_or_default();
        let checks = [
            ("temperature", self.temperature, NOT_NEGATIVE),
            ("top-p", self.top_p, SHARE),
            ("min-p", self.min_p, SHARE),
            ("typical-p", self.typical_p, SHARE),
            ("repeat-penalty", self.repeat_penalty, ABOVE_ZERO),
            ("presence-penalty", self.presence_penalty, ANY),
            ("frequency-penalty", self.frequency_penalty, ANY),
            ("dry-multiplier", self.dry.multiplier, NOT_NEGATIVE),
            ("dry-base", self.dry.base, (1.0, f32::MAX)),
            ("xtc-probability", self.xtc.probability, SHARE),
            ("xtc-threshold", self.xtc.threshold, SHARE),
            ("mirostat-tau", mirostat.tau, NOT_NEGATIVE),
            ("mirostat-eta", mirostat.eta, NOT_NEGATIVE),
        ];
        for (name, value, range) in checks {
            check(name, value, range)?;
        }
        let entries = self.logit_bias.len();
        if entries > MAX_LOGIT_BIAS {
            let reason = format!("logit-bias: found {entries} entries, expected {MAX_LOGIT_BIAS}");
            return Err(Error::invalid("sampling", reason + " at most"));
        }
        let biases = self.logit_bias.iter().map(|&(_, bias)| bias);
        // Minus infinity is a ban.
        for bias in biases.filter(|&bias| bias != f32::NEG_INFINITY) {
            check("logit-bias", bias, ANY)?;
        }
        self.validate_lists()
    }

    fn validate_lists(&self) -> Result<()> {
        let words = self.bad_words.len();
        if words > MAX_BAD_WORDS {
            let reason = format!("bad-words: found {words}, expected {MAX_BAD_WORDS} at most");
            return Err(Error::invalid("sampling", reason));
        }
        let lengths = self.bad_words.iter().map(Vec::len);
        if let Some(found) = lengths
            .into_iter()
            .find(|n| !(1..=MAX_BAD_WORD_TOKENS).contains(n))
        {
            let reason = format!(
                "bad-words: found a sequence of {found} tokens, expected 1 to {MAX_BAD_WORD_TOKENS}"
            );
            return Err(Error::invalid("sampling", reason));
        }
        if self.allowed_tokens.as_ref().is_some_and(|t| t.is_empty()) {
            let reason = "allowed-tokens: found none, expected at least 1";
            return Err(Error::invalid("sampling", reason));
        }
        Ok(())
    }

    /// The sequences of tokens that `texts` usually are, for [`bad_words`](Self::bad_words): of each text
    /// at the beginning of an answer and of the same as the next word. As in vLLM, other ways to
    /// write a text with tokens are not found. Texts without a token are left out.
    ///
    /// # Errors
    /// Those of [`Tokenizer::encode`].
    pub fn bad_word_tokens(
        tokenizer: &Tokenizer,
        texts: &[&str],
    ) -> std::result::Result<Vec<Vec<TokenId>>, TokenizerError> {
        let mut words = Vec::with_capacity(2 * texts.len());
        for text in texts {
            let text = text.trim_start();
            for written in [text.to_owned(), format!(" {text}")] {
                let tokens = tokenizer.encode(&written, EncodeOptions::PLAIN)?;
                // A space that is a token of its own is not a part of the word.
                let is_word = !tokens.is_empty() && !text.is_empty();
                if is_word && !words.contains(&tokens) {
                    words.push(tokens);
                }
            }
        }
        Ok(words)
    }

    /// Whether a device that [samples](ferrum_kernels::BackendSample) can do all of it.
    pub(super) fn is_for_devices(&self) -> bool {
        !self.has_host_filters()
            && self.dry.multiplier == 0.0
            && self.bad_words.is_empty()
            && self.allowed_tokens.is_none()
    }

    /// Whether tokens are left out in ways that only the host knows.
    pub(super) fn has_host_filters(&self) -> bool {
        self.typical_p < 1.0 || self.xtc.can_act() || self.mirostat.is_some()
    }

    /// What devices know of it; the number that is drawn is to be added.
    pub(super) fn row(&self) -> RowSampling {
        RowSampling {
            temperature: self.temperature,
            // More than there are tokens is all of them.
            top_k: u32::try_from(self.top_k).unwrap_or(0),
            top_p: self.top_p,
            min_p: self.min_p,
            repeat_penalty: self.repeat_penalty,
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            ..RowSampling::default()
        }
    }

    /// Whether the choice is the plain most likely token, which a device can pick by itself.
    pub(super) fn is_plain_greedy(&self) -> bool {
        self.temperature == 0.0
            && self.repeat_penalty == 1.0
            && self.presence_penalty == 0.0
            && self.frequency_penalty == 0.0
            && self.dry.multiplier == 0.0
            && self.logit_bias.is_empty()
            && self.bad_words.is_empty()
            && self.allowed_tokens.is_none()
    }
}

fn check(name: &str, value: f32, range: (f32, f32)) -> Result<()> {
    let (low, high) = range;
    if value >= low && value <= high {
        return Ok(());
    }
    let expected = match range {
        NOT_NEGATIVE => "a number of at least 0".into(),
        ABOVE_ZERO => "a number above 0".into(),
        ANY => "a number".into(),
        (low, f32::MAX) => format!("a number of at least {low}"),
        _ => format!("{low} to {high}"),
    };
    let reason = format!("{name}: found {value}, expected {expected}");
    Err(Error::invalid("sampling", reason))
}
