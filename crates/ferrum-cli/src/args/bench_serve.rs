//! Arguments of `ferrum bench serve`.

use super::whole;
use clap::{Args, ValueEnum};
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

/// Longest prompt or answer that is asked for.
const MAX_TOKENS: u32 = 1 << 20;

/// How many tokens: the same each time, or by chance.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Lengths {
    Fixed(u32),
    /// Both ends included.
    Uniform(u32, u32),
    Normal {
        mean: f64,
        deviation: f64,
    },
}

impl Lengths {
    /// A length, of two numbers that are uniform between 0 and 1.
    pub(crate) fn draw(self, u: f64, v: f64) -> u32 {
        match self {
            Lengths::Fixed(n) => n,
            Lengths::Uniform(low, high) => low + (u * f64::from(high - low + 1)) as u32,
            Lengths::Normal { mean, deviation } => {
                // Box and Muller's transform.
                let normal = (-2.0 * (1.0 - u).ln()).sqrt() * (std::f64::consts::TAU * v).cos();
                (mean + deviation * normal)
                    .round()
                    .clamp(1.0, f64::from(MAX_TOKENS)) as u32
            }
        }
    }
}

impl FromStr for Lengths {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let expected = format!("expected N, A..B or MEAN,STD of 1 to {MAX_TOKENS} tokens");
        let number = |text: &str| {
            let n = text.trim().parse::<u32>().ok();
            n.filter(|n| (1..=MAX_TOKENS).contains(n))
                .ok_or_else(|| expected.clone())
        };
        if let Some((low, high)) = text.split_once("..") {
            let (low, high) = (number(low)?, number(high)?);
            return match low <= high {
                true => Ok(Lengths::Uniform(low, high)),
                false => Err(expected),
            };
        }
        let Some((mean, deviation)) = text.split_once(',') else {
            return number(text).map(Lengths::Fixed);
        };
        let number = |text: &str, range: std::ops::RangeInclusive<f64>| {
            let x = text.trim().parse::<f64>().ok();
            x.filter(|x| range.contains(x))
                .ok_or_else(|| expected.clone())
        };
        let most = f64::from(MAX_TOKENS);
        Ok(Lengths::Normal {
            mean: number(mean, 1.0..=most)?,
            deviation: number(deviation, 0.0..=most)?,
        })
    }
}

impl fmt::Display for Lengths {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Lengths::Fixed(n) => write!(f, "{n}"),
            Lengths::Uniform(low, high) => write!(f, "{low}..{high}"),
            Lengths::Normal { mean, deviation } => write!(f, "{mean},{deviation}"),
        }
    }
}

/// Which of OpenAI's routes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum StreamRoute {
    Chat,
    Completions,
}

impl StreamRoute {
    pub(crate) fn path(self) -> &'static str {
        match self {
            StreamRoute::Chat => "chat/completions",
            StreamRoute::Completions => "completions",
        }
    }
}

/// A seed, which requests that are to be the same again need.
fn seed(text: &str) -> Result<u64, String> {
    text.trim()
        .parse()
        .map_err(|_| format!("found \"{text}\", expected a whole number, 0 or more"))
}

/// A positive, finite number.
fn rate(text: &str) -> Result<f64, String> {
    let rate = text.trim().parse::<f64>().ok();
    rate.filter(|rate| rate.is_finite() && (1e-3..=1e5).contains(rate))
        .ok_or_else(|| format!("found \"{text}\", expected requests per second such as 2.5"))
}

const EXAMPLES: &str = "\
Prompts are random words, so no prefix cache helps; how many make how many tokens is found with two
requests before the measurement. Lengths are N (always), A..B (uniform) or MEAN,STD (normal).

Examples:
  ferrum bench serve --requests 64 --concurrency 16
  ferrum bench serve --url http://127.0.0.1:8000 --rate 4 --prompt-tokens 200..2000 --output-tokens 150,50";

#[derive(Debug, Args)]
#[command(after_long_help = EXAMPLES)]
pub(crate) struct BenchServeArgs {
    /// Address of the server; /v1 is added
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:8000")]
    pub(crate) url: String,

    /// File with the server's key
    #[arg(long, value_name = "FILE")]
    pub(crate) api_key_file: Option<PathBuf>,

    /// Model to ask for [default: the first that the server has]
    #[arg(long, short, value_name = "NAME")]
    pub(crate) model: Option<String>,

    /// Route: chat or completions
    #[arg(long, value_name = "ROUTE", value_enum, default_value_t = StreamRoute::Chat)]
    pub(crate) endpoint: StreamRoute,

    /// Requests to send
    #[arg(long, short = 'n', value_name = "N", default_value_t = 64,
          value_parser = whole::<u32>(1..=100_000))]
    pub(crate) requests: u32,

    /// Requests that are open at once [default: 16]
    #[arg(long, short, value_name = "N", conflicts_with = "rate",
          value_parser = whole::<u16>(1..=4096))]
    pub(crate) concurrency: Option<u16>,

    /// Requests per second, at random times (a Poisson process), however many are open
    #[arg(long, value_name = "X", value_parser = rate)]
    pub(crate) rate: Option<f64>,

    /// Tokens of a prompt
    #[arg(long, value_name = "DIST", default_value_t = Lengths::Fixed(128))]
    pub(crate) prompt_tokens: Lengths,

    /// Tokens of an answer
    #[arg(long, value_name = "DIST", default_value_t = Lengths::Fixed(64))]
    pub(crate) output_tokens: Lengths,

    /// Same seed, same requests at the same times
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = seed)]
    pub(crate) seed: u64,

    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_are_read_and_shown() {
        for (text, expected) in [
            ("128", Lengths::Fixed(128)),
            ("1..1048576", Lengths::Uniform(1, 1 << 20)),
            (
                "150,50.5",
                Lengths::Normal {
                    mean: 150.0,
                    deviation: 50.5,
                },
            ),
        ] {
            let lengths: Lengths = text.parse().unwrap();
            assert_eq!((lengths, lengths.to_string()), (expected, text.to_owned()));
        }
        for text in [
            "", "0", "-1", "x", "5..4", "0..4", "1..", "1048577", "0,1", "5,-1", "5,nan", "inf,1",
            "1,2,3",
        ] {
            assert!(text.parse::<Lengths>().is_err(), "{text:?}");
        }
    }

    #[test]
    fn lengths_are_drawn_as_they_say() {
        let grid = || {
            (0..100)
                .flat_map(|i| (0..100).map(move |j| (f64::from(i) / 100.0, f64::from(j) / 100.0)))
        };
        let draw = |lengths: Lengths| grid().map(|(u, v)| lengths.draw(u, v)).collect::<Vec<_>>();
        assert!(draw(Lengths::Fixed(7)).iter().all(|&n| n == 7));
        let uniform = draw(Lengths::Uniform(3, 6));
        assert_eq!(
            (uniform.iter().min(), uniform.iter().max()),
            (Some(&3), Some(&6))
        );
        assert_eq!(uniform.iter().filter(|&&n| n == 3).count(), 2500);
        let normal = Lengths::Normal {
            mean: 100.0,
            deviation: 10.0,
        };
        let normal: Vec<_> = draw(normal).into_iter().map(f64::from).collect();
        let mean = normal.iter().sum::<f64>() / 1e4;
        let variance = normal.iter().map(|x| (x - mean) * (x - mean)).sum::<f64>() / 1e4;
        assert!(
            (mean - 100.0).abs() < 1.0 && (variance.sqrt() - 10.0).abs() < 1.0,
            "{mean} {variance}"
        );
        let low = Lengths::Normal {
            mean: 1.0,
            deviation: 1e6,
        };
        assert!(draw(low).iter().all(|n| (1..=MAX_TOKENS).contains(n)));
    }
}
