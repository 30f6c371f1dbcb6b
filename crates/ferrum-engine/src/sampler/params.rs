//! How tokens are chosen, as plain data.

use super::Dry;
use ferrum_types::{Error, Result, TokenId};

/// Most entries of a logit bias.
pub const MAX_LOGIT_BIAS: usize = 1024;

/// How tokens are chosen. The default is plain greedy.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    /// 0: greedy; otherwise logits are divided by it.
    pub temperature: f32,
    /// Only the most likely `top_k` tokens; 0: all.
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
    /// How many tokens the repetition penalty looks back at; `usize::MAX`: all.
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
            repeat_last_n: 64,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            dry: Dry::default(),
            xtc: Xtc::default(),
            mirostat: None,
            logit_bias: Vec::new(),
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
        Ok(())
    }

    /// Whether every token stays in question, so that only temperature and chance decide.
    pub(super) fn cuts_nothing(&self) -> bool {
        self.top_k == 0
            && self.typical_p >= 1.0
            && self.top_p >= 1.0
            && self.min_p <= 0.0
            && !self.xtc.can_act()
            && self.mirostat.is_none()
    }

    /// Whether the choice is the plain most likely token, which a device can pick by itself.
    pub fn is_plain_greedy(&self) -> bool {
        self.temperature == 0.0
            && self.repeat_penalty == 1.0
            && self.presence_penalty == 0.0
            && self.frequency_penalty == 0.0
            && self.dry.multiplier == 0.0
            && self.logit_bias.is_empty()
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
