//! Figures for Prometheus, under the names that vLLM gave them, so that its dashboards work.
//!
//! Written out by hand: the text format is a few lines, and what a metrics crate would add is a global
//! registry.

use crate::otlp::Fate;
use ferrum_engine::FinishReason;
use ferrum_engine::engine::EngineStats;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// Upper bounds in seconds, as vLLM has them.
const FIRST_TOKEN: &[f64] = &[
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
];
const NEXT_TOKEN: &[f64] = &[
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5,
    5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
];
const WHOLE: &[f64] = &[
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
];

const REASONS: [&str; 4] = ["stop", "length", "abort", "timeout"];

/// Counts of durations below bounds.
#[derive(Debug)]
struct Histogram {
    bounds: &'static [f64],
    /// One for each bound, and one for what is above them all.
    counts: Vec<AtomicU64>,
    micros: AtomicU64,
}

impl Histogram {
    fn new(bounds: &'static [f64]) -> Self {
        Self {
            bounds,
            counts: (0..=bounds.len()).map(|_| AtomicU64::new(0)).collect(),
            micros: AtomicU64::new(0),
        }
    }

    fn observe(&self, time: Duration) {
        let seconds = time.as_secs_f64();
        let at = self.bounds.partition_point(|&bound| bound < seconds);
        self.counts[at].fetch_add(1, Ordering::Relaxed);
        let micros = u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        self.micros.fetch_add(micros, Ordering::Relaxed);
    }
}

/// What a server counts beside its engine.
#[derive(Debug)]
pub(crate) struct Metrics {
    first_token: Histogram,
    next_token: Histogram,
    whole: Histogram,
    queued: Histogram,
    prefilled: Histogram,
    decoded: Histogram,
    finished: [AtomicU64; REASONS.len()],
    /// Answers by route, method and status. Routes are patterns, so there are few.
    http: Mutex<BTreeMap<(String, String, u16), u64>>,
}

impl Metrics {
    pub(crate) fn new() -> Self {
        Self {
            first_token: Histogram::new(FIRST_TOKEN),
            next_token: Histogram::new(NEXT_TOKEN),
            whole: Histogram::new(WHOLE),
            queued: Histogram::new(WHOLE),
            prefilled: Histogram::new(WHOLE),
            decoded: Histogram::new(WHOLE),
            finished: std::array::from_fn(|_| AtomicU64::new(0)),
            http: Mutex::default(),
        }
    }

    pub(crate) fn first_token(&self, since: Duration) {
        self.first_token.observe(since);
    }

    pub(crate) fn next_token(&self, since: Duration) {
        self.next_token.observe(since);
    }

    /// How long a prompt waited for its first step.
    pub(crate) fn queued(&self, time: Duration) {
        self.queued.observe(time);
    }

    /// How long it took from there to its first token.
    pub(crate) fn prefilled(&self, time: Duration) {
        self.prefilled.observe(time);
    }

    /// How long an answer took from its first token on.
    pub(crate) fn decoded(&self, time: Duration) {
        self.decoded.observe(time);
    }

    /// An answer has ended.
    pub(crate) fn finished(&self, reason: FinishReason, took: Duration) {
        let at = match reason {
            FinishReason::Stop => 0,
            FinishReason::Length => 1,
            FinishReason::Cancelled => 2,
            FinishReason::Deadline => 3,
        };
        self.finished[at].fetch_add(1, Ordering::Relaxed);
        self.whole.observe(took);
    }

    pub(crate) fn answered(&self, route: &str, method: &str, status: u16) {
        let key = (route.to_owned(), method.to_owned(), status);
        let http = self.http.lock();
        *http
            .unwrap_or_else(PoisonError::into_inner)
            .entry(key)
            .or_insert(0) += 1;
    }

    /// Everything, in Prometheus' text format.
    pub(crate) fn render(&self, stats: &EngineStats, model: &str, spans: Option<&Fate>) -> String {
        let mut page = Page {
            text: String::new(),
            label: format!("model_name=\"{}\"", escape(model)),
        };
        page.engine(stats);
        page.histogram(
            "vllm:time_to_first_token_seconds",
            "Time to the first token of an answer, its time in the queue included.",
            &self.first_token,
        );
        page.histogram(
            "vllm:inter_token_latency_seconds",
            "Time between two tokens of an answer, when they were handed to the client.",
            &self.next_token,
        );
        page.histogram(
            "vllm:e2e_request_latency_seconds",
            "Time of a whole answer.",
            &self.whole,
        );
        for (name, help, histogram) in [
            (
                "vllm:request_queue_time_seconds",
                "Time that prompts waited for their first step.",
                &self.queued,
            ),
            (
                "vllm:request_prefill_time_seconds",
                "Time from a prompt's first step to its first token.",
                &self.prefilled,
            ),
            (
                "vllm:request_decode_time_seconds",
                "Time from an answer's first token to its end.",
                &self.decoded,
            ),
        ] {
            page.histogram(name, help, histogram);
        }
        let name = "vllm:request_success_total";
        page.head(name, "counter", "Answers that ended, by reason.");
        for (reason, count) in REASONS.iter().zip(&self.finished) {
            let count = count.load(Ordering::Relaxed);
            page.line(name, &format!("finished_reason=\"{reason}\""), count as f64);
        }
        if let Some(fate) = spans {
            for (name, help, count) in [
                (
                    "ferrum:spans_exported_total",
                    "Spans that a collector took.",
                    &fate.exported,
                ),
                (
                    "ferrum:spans_dropped_total",
                    "Spans that were lost.",
                    &fate.dropped,
                ),
            ] {
                let count = count.load(Ordering::Relaxed);
                page.single(name, "counter", help, count as f64);
            }
        }
        let name = "http_requests_total";
        page.head(name, "counter", "HTTP answers by route, method and status.");
        let http = self.http.lock().unwrap_or_else(PoisonError::into_inner);
        for ((route, method, status), count) in http.iter() {
            let (route, method) = (escape(route), escape(method));
            let labels = format!("handler=\"{route}\",method=\"{method}\",status=\"{status}\"");
            page.line(name, &labels, *count as f64);
        }
        page.text
    }
}

/// A page in the making.
struct Page {
    text: String,
    label: String,
}

impl Page {
    fn head(&mut self, name: &str, kind: &str, help: &str) {
        // Writing to a string does not fail.
        let _ = writeln!(self.text, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }

    fn line(&mut self, name: &str, labels: &str, value: f64) {
        let comma = if labels.is_empty() { "" } else { "," };
        let _ = writeln!(self.text, "{name}{{{}{comma}{labels}}} {value}", self.label);
    }

    fn single(&mut self, name: &str, kind: &str, help: &str, value: f64) {
        self.head(name, kind, help);
        self.line(name, "", value);
    }

    fn engine(&mut self, stats: &EngineStats) {
        let used = stats.kv_blocks_used as f64 / stats.kv_blocks.max(1) as f64;
        let gauges = [
            (
                "vllm:num_requests_running",
                "Sequences that are in steps.",
                stats.running as f64,
            ),
            (
                "vllm:num_requests_waiting",
                "Sequences that wait for a step.",
                (stats.waiting + stats.preempted) as f64,
            ),
            (
                "vllm:kv_cache_usage_perc",
                "Share of the KV cache in use; 1 is all.",
                used,
            ),
        ];
        for (name, help, value) in gauges {
            self.single(name, "gauge", help, value);
        }
        let counters = [
            (
                "vllm:prompt_tokens_total",
                "Prompt tokens.",
                stats.prompt_tokens,
            ),
            (
                "vllm:generation_tokens_total",
                "Generated tokens.",
                stats.generated_tokens,
            ),
            (
                "vllm:prefix_cache_queries_total",
                "Prompt tokens that were looked for in the prefix cache.",
                stats.prompt_tokens,
            ),
            (
                "vllm:prefix_cache_hits_total",
                "Prompt tokens that were found in the prefix cache.",
                stats.cached_tokens,
            ),
            (
                "vllm:num_preemptions_total",
                "Times that a sequence lost its place in the KV cache.",
                stats.preemptions,
            ),
            (
                "vllm:spec_decode_num_draft_tokens_total",
                "Tokens that were guessed and checked.",
                stats.draft_tokens,
            ),
            (
                "vllm:spec_decode_num_accepted_tokens_total",
                "Guessed tokens that were right.",
                stats.accepted_tokens,
            ),
            ("ferrum:steps_total", "Steps of the engine.", stats.steps),
        ];
        for (name, help, value) in counters {
            self.single(name, "counter", help, value as f64);
        }
        let times = [
            (
                "ferrum:step_seconds_total",
                "Time of the engine's steps.",
                stats.step_time,
            ),
            (
                "ferrum:model_seconds_total",
                "Time of steps that the model took; the rest is overhead.",
                stats.model_time,
            ),
        ];
        for (name, help, value) in times {
            self.single(name, "counter", help, value.as_secs_f64());
        }
    }

    fn histogram(&mut self, name: &str, help: &str, histogram: &Histogram) {
        self.head(name, "histogram", help);
        let bucket = format!("{name}_bucket");
        let mut below = 0;
        let bounds = histogram.bounds.iter().map(|bound| bound.to_string());
        for (bound, count) in bounds.chain(["+Inf".into()]).zip(&histogram.counts) {
            below += count.load(Ordering::Relaxed);
            self.line(&bucket, &format!("le=\"{bound}\""), below as f64);
        }
        let sum = histogram.micros.load(Ordering::Relaxed) as f64 / 1e6;
        self.line(&format!("{name}_sum"), "", sum);
        self.line(&format!("{name}_count"), "", below as f64);
    }
}

/// A label's value.
fn escape(text: &str) -> String {
    text.replace('\\', "\\\\")
        .replace('"', "\\\"")
        .replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_count_up_and_names_are_escaped() {
        let metrics = Metrics::new();
        for millis in [1, 30, 900_000_000] {
            metrics.first_token(Duration::from_millis(millis));
        }
        metrics.finished(FinishReason::Length, Duration::from_secs(1));
        metrics.answered("/v1/models", "GET", 200);
        let page = metrics.render(&EngineStats::default(), "a\"b", None);
        let label = "model_name=\"a\\\"b\"";
        for line in [
            format!("vllm:time_to_first_token_seconds_bucket{{{label},le=\"0.001\"}} 1"),
            format!("vllm:time_to_first_token_seconds_bucket{{{label},le=\"0.04\"}} 2"),
            format!("vllm:time_to_first_token_seconds_bucket{{{label},le=\"+Inf\"}} 3"),
            format!("vllm:time_to_first_token_seconds_count{{{label}}} 3"),
            format!("vllm:request_success_total{{{label},finished_reason=\"length\"}} 1"),
        ] {
            assert!(page.lines().any(|found| found == line), "{line}\n{page}");
        }
    }
}
