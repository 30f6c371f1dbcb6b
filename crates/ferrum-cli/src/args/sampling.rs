//! Arguments that say how tokens are chosen.

use super::{count, number, whole};
use clap::Args;
use ferrum_engine::{Dry, DryBreakers, Mirostat, SamplingParams, Xtc};
use ferrum_formats::tokenizer::Tokenizer;
use std::fmt;
use std::str::FromStr;

/// How tokens are chosen. What is not given comes from the model's own recommendation.
#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct SamplingArgs {
    /// Randomness; 0 always takes the most likely token [default: the model's, else 0.7]
    #[arg(long, value_name = "X", value_parser = number)]
    pub(crate) temperature: Option<f32>,

    /// Choose among the N most likely tokens; 0: all [default: the model's, else 40]
    #[arg(long, value_name = "N", value_parser = count)]
    pub(crate) top_k: Option<usize>,

    /// Choose among tokens that together have this probability [default: the model's, else 0.95]
    #[arg(long, value_name = "P", value_parser = number)]
    pub(crate) top_p: Option<f32>,

    /// Choose among tokens at least this probable beside the best [default: the model's, else 0.05]
    #[arg(long, value_name = "P", value_parser = number)]
    pub(crate) min_p: Option<f32>,

    /// Make recent tokens less likely; 1: no [default: the model's, else 1]
    #[arg(long, value_name = "X", value_parser = number)]
    pub(crate) repeat_penalty: Option<f32>,

    /// Tokens that --repeat-penalty looks back at; -1: all [default: the model's, else -1]
    #[arg(long, value_name = "N", hide_short_help = true, value_parser = whole(-1..=i32::MAX))]
    pub(crate) repeat_last_n: Option<i32>,

    /// Same seed, same text; -1: another one each time [default: -1]
    #[arg(long, value_name = "N")]
    pub(crate) seed: Option<Seed>,
}

/// Where the randomness of a text starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Seed {
    Fixed(u64),
    /// Another one each time, as other programs write it: -1.
    Fresh,
}

impl Seed {
    pub(crate) fn fixed(self) -> Option<u64> {
        match self {
            Seed::Fixed(seed) => Some(seed),
            Seed::Fresh => None,
        }
    }
}

impl fmt::Display for Seed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Seed::Fixed(seed) => seed.fmt(f),
            Seed::Fresh => f.write_str("-1"),
        }
    }
}

impl FromStr for Seed {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.trim() {
            "-1" => Ok(Seed::Fresh),
            text => text.parse().map(Seed::Fixed).map_err(|_| {
                format!("found \"{text}\", expected a whole number from 0 to 2^64 - 1, or -1 for another seed each time")
            }),
        }
    }
}

/// The samplers that no model recommends. They are off where nothing is given, and act in the order that
/// docs/serving.md has.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Further samplers")]
pub(crate) struct SamplerArgs {
    /// Taken once from the logit of each token of the answer
    #[arg(long, value_name = "X", default_value_t = 0.0, hide_short_help = true, value_parser = number)]
    presence_penalty: f32,

    /// Taken from the logit of each token of the answer, as often as it is there
    #[arg(long, value_name = "X", default_value_t = 0.0, hide_short_help = true, value_parser = number)]
    frequency_penalty: f32,

    /// Choose among the tokens nearest to the expected surprise that together have this probability
    #[arg(long, value_name = "P", default_value_t = 1.0, hide_short_help = true, value_parser = number)]
    typical_p: f32,

    /// DRY: penalty on going on with a passage that is already there; 0: none, 0.8 is usual
    #[arg(long, value_name = "X", default_value_t = 0.0, hide_short_help = true, value_parser = number)]
    dry_multiplier: f32,

    /// DRY: factor on it for each token that the passage is longer
    #[arg(long, value_name = "X", default_value_t = Dry::default().base, hide_short_help = true, value_parser = number)]
    dry_base: f32,

    /// DRY: length in tokens from which on a passage counts
    #[arg(long, value_name = "N", default_value_t = Dry::default().allowed_length,
          hide_short_help = true, value_parser = count)]
    dry_allowed_length: usize,

    /// DRY: tokens to look back at; -1: all
    #[arg(long, value_name = "N", default_value_t = -1, hide_short_help = true, value_parser = whole(-1..=i32::MAX))]
    dry_penalty_last_n: i32,

    /// DRY: text over which no passage reaches; can be given several times [default: line end : " *]
    #[arg(long, value_name = "TEXT", hide_short_help = true)]
    dry_sequence_breaker: Vec<String>,

    /// XTC: how often the most likely tokens are left out
    #[arg(long, value_name = "P", default_value_t = Xtc::default().probability,
          hide_short_help = true, value_parser = number)]
    xtc_probability: f32,

    /// XTC: probability that makes a token one of those
    #[arg(long, value_name = "P", default_value_t = Xtc::default().threshold,
          hide_short_help = true, value_parser = number)]
    xtc_threshold: f32,

    /// Hold the surprise of the text constant by mirostat 2.0, in place of all other ways to choose among
    /// tokens
    #[arg(long, hide_short_help = true)]
    mirostat: bool,

    /// Mirostat: surprise to aim for, in bits
    #[arg(long, value_name = "X", default_value_t = Mirostat::default().tau, requires = "mirostat",
          hide_short_help = true, value_parser = number)]
    mirostat_tau: f32,

    /// Mirostat: how fast it corrects itself
    #[arg(long, value_name = "X", default_value_t = Mirostat::default().eta, requires = "mirostat",
          hide_short_help = true, value_parser = number)]
    mirostat_eta: f32,

    /// Added to the logit of a token, such as 42=-1.5, or 42=-inf to forbid it; can be given several times
    #[arg(long, value_name = "ID=BIAS", value_parser = biased_token, hide_short_help = true,
          allow_hyphen_values = true)]
    logit_bias: Vec<(u32, f32)>,
}

/// A number of tokens to look back at, of which -1 is all.
pub(crate) fn look_back(n: i32) -> usize {
    usize::try_from(n).unwrap_or(usize::MAX)
}

impl SamplerArgs {
    /// `params` with these samplers.
    pub(crate) fn complete(&self, params: SamplingParams, tokenizer: &Tokenizer) -> SamplingParams {
        let mirostat = Mirostat {
            tau: self.mirostat_tau,
            eta: self.mirostat_eta,
        };
        SamplingParams {
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            typical_p: self.typical_p,
            dry: Dry {
                multiplier: self.dry_multiplier,
                base: self.dry_base,
                allowed_length: self.dry_allowed_length,
                last_n: look_back(self.dry_penalty_last_n),
                breakers: self.breakers(tokenizer),
            },
            xtc: Xtc {
                probability: self.xtc_probability,
                threshold: self.xtc_threshold,
            },
            mirostat: self.mirostat.then_some(mirostat),
            logit_bias: self.logit_bias.clone(),
            ..params
        }
    }

    fn breakers(&self, tokenizer: &Tokenizer) -> DryBreakers {
        if self.dry_multiplier <= 0.0 {
            return DryBreakers::default();
        }
        let given: Vec<_> = self
            .dry_sequence_breaker
            .iter()
            .map(String::as_str)
            .collect();
        match given.is_empty() {
            true => DryBreakers::find(tokenizer, &Dry::DEFAULT_BREAKERS),
            false => DryBreakers::find(tokenizer, &given),
        }
    }
}

/// A token with what is added to its logit.
fn biased_token(text: &str) -> Result<(u32, f32), String> {
    let wrong = || format!("found \"{text}\", expected ID=BIAS, such as 42=-1.5");
    let (token, bias) = text.split_once('=').ok_or_else(wrong)?;
    let token = super::token_id(token)?;
    let bias = bias.trim().parse().map_err(|_| wrong())?;
    Ok((token, bias))
}

#[cfg(test)]
mod tests {
    use super::Seed;

    #[test]
    fn a_seed_is_a_number_or_a_fresh_one() {
        for (text, expected) in [
            ("0", Some(Seed::Fixed(0))),
            ("18446744073709551615", Some(Seed::Fixed(u64::MAX))),
            ("-1", Some(Seed::Fresh)),
            ("-2", None),
            ("1.5", None),
            ("", None),
            ("18446744073709551616", None),
        ] {
            assert_eq!(text.parse().ok(), expected, "{text}");
        }
    }
}
