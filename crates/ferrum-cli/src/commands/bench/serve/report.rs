//! What the requests took, as numbers for people and for programs.

use super::target::{RequestFailure, RequestTiming, Target};
use crate::args::BenchServeArgs;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fmt::Write as _;

/// Figures of a run.
pub(super) struct Report {
    url: String,
    model: String,
    pace: Pace,
    asked: u32,
    seconds: f64,
    samples: Vec<RequestTiming>,
    /// How often, and the first message, of each kind of trouble.
    troubles: BTreeMap<String, (usize, String)>,
}

enum Pace {
    Rate(f64),
    Concurrency(u16),
}

impl Report {
    pub(super) fn new(
        args: &BenchServeArgs,
        target: &Target,
        seconds: f64,
        results: Vec<Result<RequestTiming, RequestFailure>>,
    ) -> Self {
        let mut samples = Vec::new();
        let mut troubles = BTreeMap::new();
        for result in results {
            match result {
                Ok(sample) => samples.push(sample),
                Err(trouble) => {
                    troubles
                        .entry(trouble.kind)
                        .or_insert((0, trouble.message))
                        .0 += 1;
                }
            }
        }
        let concurrency = args.concurrency.unwrap_or(super::CONCURRENCY);
        Self {
            url: target.url(),
            model: target.model.clone(),
            pace: args.rate.map_or(Pace::Concurrency(concurrency), Pace::Rate),
            asked: args.requests,
            seconds,
            samples,
            troubles,
        }
    }

    pub(super) fn completed(&self) -> usize {
        self.samples.len()
    }

    fn prompt_tokens(&self) -> u64 {
        self.samples
            .iter()
            .filter_map(|sample| sample.prompt_tokens)
            .sum()
    }

    fn output_tokens(&self) -> u64 {
        self.samples.iter().map(|sample| sample.output_tokens).sum()
    }

    fn per_second(&self, n: f64) -> f64 {
        n / self.seconds.max(1e-9)
    }

    /// The times, in milliseconds: name for programs, name for people, figures.
    fn times(&self) -> [(&'static str, &'static str, Spread); 4] {
        let samples = || self.samples.iter();
        // The first token has a time of its own.
        let later = |sample: &RequestTiming| sample.output_tokens.saturating_sub(1);
        let per_token = samples().filter(|sample| later(sample) > 0);
        let per_token =
            per_token.map(|sample| (sample.total_s - sample.ttft_s) / later(sample) as f64);
        [
            (
                "ttft_ms",
                "time to first token",
                Spread::of(samples().map(|s| s.ttft_s)),
            ),
            (
                "itl_ms",
                "between pieces",
                Spread::of(samples().flat_map(|s| s.itl_s.iter().copied())),
            ),
            ("tpot_ms", "per later token", Spread::of(per_token)),
            (
                "e2e_ms",
                "whole answer",
                Spread::of(samples().map(|s| s.total_s)),
            ),
        ]
    }

    pub(super) fn text(&self) -> String {
        let mut text = String::new();
        let pace = match self.pace {
            Pace::Rate(rate) => format!("{rate} a second"),
            Pace::Concurrency(n) => format!("{n} at once"),
        };
        let n = self.completed();
        let mean = |tokens: u64| tokens as f64 / n.max(1) as f64;
        let (prompt, output) = (self.prompt_tokens(), self.output_tokens());
        let _ = writeln!(text, "{} ({}), {pace}", self.url, self.model);
        let _ = writeln!(
            text,
            "answered         {n} of {} in {:.2} s, {:.2} requests/s",
            self.asked,
            self.seconds,
            self.per_second(n as f64)
        );
        let _ = writeln!(
            text,
            "tokens           {:.1} each prompt, {:.1} each answer",
            mean(prompt),
            mean(output)
        );
        let _ = writeln!(
            text,
            "throughput       {:.1} tokens/s answered, {:.1} tokens/s with prompts",
            self.per_second(output as f64),
            self.per_second((prompt + output) as f64)
        );
        let _ = writeln!(
            text,
            "\n{:<20}{:>10}{:>10}{:>10}{:>10}{:>10}{:>10}",
            "ms", "mean", "p50", "p90", "p95", "p99", "max"
        );
        for (_, name, spread) in self.times() {
            let _ = write!(text, "{name:<20}");
            for value in spread.values() {
                let _ = write!(text, "{value:>10.2}");
            }
            text.push('\n');
        }
        for (kind, (count, message)) in &self.troubles {
            let _ = writeln!(text, "\n{count} × {kind}, first: {message}");
        }
        text
    }

    pub(super) fn json(&self) -> Value {
        let (prompt, output) = (self.prompt_tokens(), self.output_tokens());
        let troubles: Vec<_> = self
            .troubles
            .iter()
            .map(|(kind, (count, message))| json!({"kind": kind, "count": count, "message": message}))
            .collect();
        let mut value = json!({
            "url": self.url,
            "model": self.model,
            "requests": self.asked,
            "completed": self.completed(),
            "errors": troubles,
            "duration_s": self.seconds,
            "prompt_tokens": prompt,
            "output_tokens": output,
            "requests_per_s": self.per_second(self.completed() as f64),
            "output_tokens_per_s": self.per_second(output as f64),
            "total_tokens_per_s": self.per_second((prompt + output) as f64),
        });
        match self.pace {
            Pace::Rate(rate) => value["rate"] = json!(rate),
            Pace::Concurrency(n) => value["concurrency"] = json!(n),
        }
        for (name, _, spread) in self.times() {
            let pairs = NAMES.iter().zip(spread.values());
            // A number that is none, of no samples, is null.
            value[name] = pairs
                .map(|(name, value)| ((*name).to_owned(), json!(value)))
                .collect();
        }
        value
    }
}

const NAMES: [&str; 6] = ["mean", "p50", "p90", "p95", "p99", "max"];

/// How times spread, in milliseconds.
#[derive(Debug, PartialEq)]
struct Spread {
    mean: f64,
    p50: f64,
    p90: f64,
    p95: f64,
    p99: f64,
    max: f64,
}

impl Spread {
    fn of(seconds: impl Iterator<Item = f64>) -> Self {
        let mut values: Vec<_> = seconds.map(|s| s * 1e3).collect();
        values.sort_by(f64::total_cmp);
        let at = |share: f64| percentile(&values, share);
        Self {
            mean: values.iter().sum::<f64>() / values.len() as f64,
            p50: at(0.50),
            p90: at(0.90),
            p95: at(0.95),
            p99: at(0.99),
            max: at(1.0),
        }
    }

    fn values(&self) -> [f64; 6] {
        [self.mean, self.p50, self.p90, self.p95, self.p99, self.max]
    }
}

/// Between the two nearest values, as numpy has it; not a number when there are none.
fn percentile(sorted: &[f64], share: f64) -> f64 {
    let Some(last) = sorted.len().checked_sub(1) else {
        return f64::NAN;
    };
    let place = share * last as f64;
    let (low, high) = (place.floor() as usize, place.ceil() as usize);
    sorted[low] + (sorted[high] - sorted[low]) * (place - low as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_those_of_numpy() {
        let spread = Spread::of((1..=10).rev().map(f64::from));
        assert_eq!(
            (spread.mean, spread.p50, spread.max),
            (5500.0, 5500.0, 10_000.0)
        );
        assert!((spread.p90 - 9100.0).abs() < 1e-9 && (spread.p99 - 9910.0).abs() < 1e-9);
        assert_eq!(percentile(&[4.0], 0.99), 4.0);
        assert!(Spread::of(std::iter::empty()).mean.is_nan());
    }
}
