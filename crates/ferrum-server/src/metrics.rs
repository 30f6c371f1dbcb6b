//! Figures for Prometheus, under the names that vLLM gave them, so that its dashboards work.
//!
//! Written out by hand: the text format is a few lines, and what a metrics crate would add is a global
//! registry.

use crate::otlp::Fate;
use ferrum_engine::FinishReason;
use ferrum_engine::engine::{EngineStats, Progress, STEP_TOKENS};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

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

/// Upper bounds in tokens: vLLM's go on to the context of its model; these are the same for all models.
const TOKENS: &[f64] = &[
    1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5,
    5e5, 1e6,
];
const CHOICES: &[f64] = &[1.0, 2.0, 5.0, 10.0, 20.0];
const PREEMPTIONS: &[f64] = &[1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0];

const REASONS: [&str; 4] = ["stop", "length", "abort", "timeout"];

/// Counts of values below bounds.
#[derive(Debug)]
struct Histogram {
    bounds: &'static [f64],
    /// One for each bound, and one for what is above them all.
    counts: Vec<AtomicU64>,
    /// In millionths.
    sum: AtomicU64,
}

impl Histogram {
    fn new(bounds: &'static [f64]) -> Self {
        Self {
            bounds,
            counts: (0..=bounds.len()).map(|_| AtomicU64::new(0)).collect(),
            sum: AtomicU64::new(0),
        }
    }

    fn observe(&self, time: Duration) {
        let micros = u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        self.add(time.as_secs_f64(), micros);
    }

    fn count(&self, number: usize) {
        let number = number as u64;
        self.add(number as f64, number.saturating_mul(1_000_000));
    }

    fn add(&self, value: f64, millionths: u64) {
        let at = self.bounds.partition_point(|&bound| bound < value);
        self.counts[at].fetch_add(1, Ordering::Relaxed);
        self.sum.fetch_add(millionths, Ordering::Relaxed);
    }
}

/// A request for an adapter, for as long as it is answered.
#[derive(Debug)]
pub(crate) struct AdapterUse {
    name: String,
    prompts: Vec<Arc<Progress>>,
}

/// A prompt whose answers have ended.
#[derive(Clone, Copy, Debug)]
pub(crate) struct EndedPrompt {
    pub(crate) tokens: usize,
    pub(crate) preemptions: u32,
    /// From its first step on, if it came to that.
    pub(crate) computed: Option<Duration>,
    /// Unless it was for an embedding.
    pub(crate) answers: Option<EndedAnswers>,
}

/// What was asked for, and what came of it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct EndedAnswers {
    pub(crate) n: usize,
    pub(crate) max_tokens: usize,
    /// Tokens of the longest.
    pub(crate) longest: usize,
}

/// What is counted of a model's requests beside its engine, for as long as the server runs.
#[derive(Debug)]
pub(crate) struct Metrics {
    first_token: Histogram,
    next_token: Histogram,
    whole: Histogram,
    queued: Histogram,
    prefilled: Histogram,
    decoded: Histogram,
    computed: Histogram,
    prompt_tokens: Histogram,
    generated_tokens: Histogram,
    longest_tokens: Histogram,
    max_tokens: Histogram,
    choices: Histogram,
    preemptions: Histogram,
    finished: [AtomicU64; REASONS.len()],
    /// Those that have ended are taken out when another comes.
    adapters: Mutex<Vec<Weak<AdapterUse>>>,
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
            computed: Histogram::new(WHOLE),
            prompt_tokens: Histogram::new(TOKENS),
            generated_tokens: Histogram::new(TOKENS),
            longest_tokens: Histogram::new(TOKENS),
            max_tokens: Histogram::new(TOKENS),
            choices: Histogram::new(CHOICES),
            preemptions: Histogram::new(PREEMPTIONS),
            finished: std::array::from_fn(|_| AtomicU64::new(0)),
            adapters: Mutex::default(),
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

    /// The answers to a prompt have ended, or will not come.
    pub(crate) fn prompt_ended(&self, prompt: EndedPrompt) {
        self.prompt_tokens.count(prompt.tokens);
        self.preemptions.count(prompt.preemptions as usize);
        if let Some(time) = prompt.computed {
            self.computed.observe(time);
        }
        if let Some(answers) = prompt.answers {
            self.choices.count(answers.n);
            self.max_tokens.count(answers.max_tokens);
            self.longest_tokens.count(answers.longest);
        }
    }

    /// An answer has so many tokens and gets no more.
    pub(crate) fn generated(&self, tokens: usize) {
        self.generated_tokens.count(tokens);
    }

    /// Prompts for an adapter, which are told of for as long as the caller keeps what this gives.
    pub(crate) fn use_adapter(&self, name: &str, prompts: Vec<Arc<Progress>>) -> Arc<AdapterUse> {
        let name = name.to_owned();
        let new = Arc::new(AdapterUse { name, prompts });
        let adapters = self.adapters.lock();
        let mut adapters = adapters.unwrap_or_else(PoisonError::into_inner);
        adapters.retain(|other| other.strong_count() > 0);
        adapters.push(Arc::downgrade(&new));
        new
    }

    /// Names of adapters with prompts that wait, and of those with prompts that are computed.
    fn adapters(&self) -> [String; 2] {
        let adapters = self.adapters.lock();
        let adapters = adapters.unwrap_or_else(PoisonError::into_inner);
        let adapters: Vec<_> = adapters.iter().filter_map(Weak::upgrade).collect();
        let names = |runs: bool| {
            let with = adapters.iter().filter(|one| {
                let mut prompts = one.prompts.iter();
                prompts.any(|prompt| prompt.queued().is_some() == runs)
            });
            let names: BTreeSet<_> = with.map(|one| one.name.as_str()).collect();
            names.into_iter().collect::<Vec<_>>().join(",")
        };
        [names(false), names(true)]
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
}

/// Answers by route, method and status. Routes are patterns, so there are few.
#[derive(Debug, Default)]
pub(crate) struct HttpCounts(Mutex<BTreeMap<(String, String, u16), u64>>);

impl HttpCounts {
    pub(crate) fn answered(&self, route: &str, method: &str, status: u16) {
        let key = (route.to_owned(), method.to_owned(), status);
        let http = self.0.lock();
        *http
            .unwrap_or_else(PoisonError::into_inner)
            .entry(key)
            .or_insert(0) += 1;
    }
}

/// Figures of a model. One that is not loaded runs nothing, and has counted what it has.
pub(crate) struct Figures<'a> {
    pub(crate) model: &'a str,
    pub(crate) loaded: bool,
    /// Loads that have ended, and those of them that came to nothing.
    pub(crate) loads: u64,
    pub(crate) failed_loads: u64,
    /// Most adapters at a time; `None` where there can be none.
    pub(crate) max_adapters: Option<usize>,
    pub(crate) stats: EngineStats,
    pub(crate) metrics: &'a Metrics,
}

/// Everything, in Prometheus' text format.
pub(crate) fn render(models: &[Figures<'_>], http: &HttpCounts, spans: Option<&Fate>) -> String {
    let mut page = Page::default();
    let labels = models
        .iter()
        .map(|figures| format!("model_name=\"{}\"", escape(figures.model)));
    let models: Vec<_> = labels.zip(models).collect();
    for (name, kind, help, value) in ENGINE {
        page.head(name, kind, help);
        for (label, figures) in &models {
            page.line(name, label, value(figures));
        }
    }
    for (name, help, histogram) in HISTOGRAMS {
        page.head(name, "histogram", help);
        for (label, figures) in &models {
            page.histogram(name, label, histogram(figures.metrics));
        }
    }
    page.engine_tables(&models);
    let name = "vllm:request_success_total";
    page.head(name, "counter", "Answers that ended, by reason.");
    for (label, figures) in &models {
        for (reason, count) in REASONS.iter().zip(&figures.metrics.finished) {
            let count = count.load(Ordering::Relaxed);
            let labels = format!("{label},finished_reason=\"{reason}\"");
            page.line(name, &labels, count as f64);
        }
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
            page.head(name, "counter", help);
            page.line(name, "", count.load(Ordering::Relaxed) as f64);
        }
    }
    let name = "http_requests_total";
    page.head(name, "counter", "HTTP answers by route, method and status.");
    let http = http.0.lock().unwrap_or_else(PoisonError::into_inner);
    for ((route, method, status), count) in http.iter() {
        let (route, method) = (escape(route), escape(method));
        let labels = format!("handler=\"{route}\",method=\"{method}\",status=\"{status}\"");
        page.line(name, &labels, *count as f64);
    }
    page.text
}

type Figure = (
    &'static str,
    &'static str,
    &'static str,
    fn(&Figures<'_>) -> f64,
);

/// Figures of engines and loads: name, kind, meaning and value.
const ENGINE: &[Figure] = &[
    (
        "ferrum:model_loaded",
        "gauge",
        "1 while the model is loaded, else 0.",
        |f| f64::from(u8::from(f.loaded)),
    ),
    (
        "ferrum:model_loads_total",
        "counter",
        "Times that the model was loaded, or was to be.",
        |f| f.loads as f64,
    ),
    (
        "ferrum:model_load_failures_total",
        "counter",
        "Times that it could not be.",
        |f| f.failed_loads as f64,
    ),
    (
        "vllm:num_requests_running",
        "gauge",
        "Sequences that are in steps.",
        |f| f.stats.running as f64,
    ),
    (
        "vllm:num_requests_waiting",
        "gauge",
        "Sequences that wait for a step.",
        |f| (f.stats.waiting + f.stats.preempted) as f64,
    ),
    (
        "vllm:kv_cache_usage_perc",
        "gauge",
        "Share of the KV cache in use; 1 is all.",
        |f| f.stats.kv_blocks_used as f64 / f.stats.kv_blocks.max(1) as f64,
    ),
    (
        "vllm:prompt_tokens_total",
        "counter",
        "Prompt tokens.",
        |f| f.stats.prompt_tokens as f64,
    ),
    (
        "vllm:generation_tokens_total",
        "counter",
        "Generated tokens.",
        |f| f.stats.generated_tokens as f64,
    ),
    (
        "vllm:prefix_cache_queries_total",
        "counter",
        "Prompt tokens that were looked for in the prefix cache.",
        |f| f.stats.prompt_tokens as f64,
    ),
    (
        "vllm:prefix_cache_hits_total",
        "counter",
        "Prompt tokens that were found in the prefix cache.",
        |f| f.stats.cached_tokens as f64,
    ),
    (
        "vllm:num_preemptions_total",
        "counter",
        "Times that a sequence lost its place in the KV cache.",
        |f| f.stats.preemptions as f64,
    ),
    (
        "vllm:spec_decode_num_drafts_total",
        "counter",
        "Drafts that were checked.",
        |f| f.stats.drafts.drafts as f64,
    ),
    (
        "vllm:spec_decode_num_draft_tokens_total",
        "counter",
        "Tokens that were guessed and checked.",
        |f| f.stats.draft_tokens as f64,
    ),
    (
        "vllm:spec_decode_num_accepted_tokens_total",
        "counter",
        "Guessed tokens that were right.",
        |f| f.stats.accepted_tokens as f64,
    ),
    (
        "ferrum:kv_offload_ram_hit_tokens_total",
        "counter",
        "Prompt tokens whose keys and values came back from RAM.",
        |f| f.stats.offload.ram_hit_tokens as f64,
    ),
    (
        "ferrum:kv_offload_disk_hit_tokens_total",
        "counter",
        "Prompt tokens whose keys and values came back from disk.",
        |f| f.stats.offload.disk_hit_tokens as f64,
    ),
    (
        "ferrum:kv_offload_ram_bytes",
        "gauge",
        "Bytes of KV blocks in RAM.",
        |f| f.stats.offload.ram_bytes as f64,
    ),
    (
        "ferrum:kv_offload_disk_bytes",
        "gauge",
        "Bytes of KV blocks on disk.",
        |f| f.stats.offload.disk_bytes as f64,
    ),
    (
        "ferrum:kv_offload_ram_evictions_total",
        "counter",
        "KV blocks that left RAM because it was full.",
        |f| f.stats.offload.ram_evictions as f64,
    ),
    (
        "ferrum:kv_offload_disk_evictions_total",
        "counter",
        "KV blocks that left the disk because its folder was full.",
        |f| f.stats.offload.disk_evictions as f64,
    ),
    (
        "ferrum:kv_offload_dropped_blocks_total",
        "counter",
        "KV blocks of all models that were not written because the disk could not follow.",
        |f| f.stats.offload.dropped as f64,
    ),
    (
        "ferrum:kv_offload_damaged_files_total",
        "counter",
        "Files of KV blocks that were damaged, and were removed.",
        |f| f.stats.offload.damaged as f64,
    ),
    (
        "ferrum:steps_total",
        "counter",
        "Steps of the engine.",
        |f| f.stats.steps as f64,
    ),
    (
        "ferrum:nan_failures_total",
        "counter",
        "Requests that failed because the model computed NaN for them.",
        |f| f.stats.nan_failures as f64,
    ),
    (
        "ferrum:step_seconds_total",
        "counter",
        "Time of the engine's steps.",
        |f| f.stats.step_time.as_secs_f64(),
    ),
    (
        "ferrum:model_seconds_total",
        "counter",
        "Time of steps that the model took; the rest is overhead.",
        |f| f.stats.model_time.as_secs_f64(),
    ),
];

type Distribution = (&'static str, &'static str, fn(&Metrics) -> &Histogram);

/// Durations and sizes: name, meaning and counts.
const HISTOGRAMS: &[Distribution] = &[
    (
        "vllm:time_to_first_token_seconds",
        "Time to the first token of an answer, its time in the queue included.",
        |m| &m.first_token,
    ),
    (
        "vllm:inter_token_latency_seconds",
        "Time between two tokens of an answer, when they were handed to the client.",
        |m| &m.next_token,
    ),
    (
        "vllm:e2e_request_latency_seconds",
        "Time of a whole answer.",
        |m| &m.whole,
    ),
    (
        "vllm:request_queue_time_seconds",
        "Time that prompts waited for their first step.",
        |m| &m.queued,
    ),
    (
        "vllm:request_prefill_time_seconds",
        "Time from a prompt's first step to its first token.",
        |m| &m.prefilled,
    ),
    (
        "vllm:request_decode_time_seconds",
        "Time from an answer's first token to its end.",
        |m| &m.decoded,
    ),
    (
        "vllm:request_inference_time_seconds",
        "Time from a prompt's first step to the end of its answers.",
        |m| &m.computed,
    ),
    ("vllm:request_prompt_tokens", "Tokens of prompts.", |m| {
        &m.prompt_tokens
    }),
    (
        "vllm:request_generation_tokens",
        "Generated tokens of answers.",
        |m| &m.generated_tokens,
    ),
    (
        "vllm:request_max_num_generation_tokens",
        "Generated tokens of the longest answer to a prompt.",
        |m| &m.longest_tokens,
    ),
    (
        "vllm:request_params_max_tokens",
        "Most tokens that were asked for, or that hold where none are.",
        |m| &m.max_tokens,
    ),
    (
        "vllm:request_params_n",
        "Answers that were asked for to a prompt.",
        |m| &m.choices,
    ),
    (
        "vllm:request_num_preemptions",
        "Times that a prompt's sequences lost their places in the KV cache.",
        |m| &m.preemptions,
    ),
];

/// A page in the making.
#[derive(Default)]
struct Page {
    text: String,
}

impl Page {
    fn head(&mut self, name: &str, kind: &str, help: &str) {
        // Writing to a string does not fail.
        let _ = writeln!(self.text, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }

    fn line(&mut self, name: &str, labels: &str, value: f64) {
        let _ = match labels {
            "" => writeln!(self.text, "{name} {value}"),
            labels => writeln!(self.text, "{name}{{{labels}}} {value}"),
        };
    }

    fn histogram(&mut self, name: &str, label: &str, histogram: &Histogram) {
        let counts = histogram.counts.iter();
        let counts = counts.map(|count| count.load(Ordering::Relaxed));
        let sum = histogram.sum.load(Ordering::Relaxed) as f64 / 1e6;
        self.distribution(name, label, histogram.bounds.iter(), counts, sum);
    }

    fn distribution(
        &mut self,
        name: &str,
        label: &str,
        bounds: impl Iterator<Item = impl ToString>,
        counts: impl Iterator<Item = u64>,
        sum: f64,
    ) {
        let bucket = format!("{name}_bucket");
        let mut below = 0;
        let bounds = bounds.map(|bound| bound.to_string());
        for (bound, count) in bounds.chain(["+Inf".into()]).zip(counts) {
            below += count;
            let labels = format!("{label},le=\"{bound}\"");
            self.line(&bucket, &labels, below as f64);
        }
        self.line(&format!("{name}_sum"), label, sum);
        self.line(&format!("{name}_count"), label, below as f64);
    }

    /// Figures of engines with labels of their own.
    fn engine_tables(&mut self, models: &[(String, &Figures<'_>)]) {
        let name = "vllm:num_requests_waiting_by_reason";
        self.head(name, "gauge", "Sequences that wait for a step, by reason.");
        for (label, figures) in models {
            let waiting = figures.stats.waiting + figures.stats.preempted;
            // Nothing is put off here: a constraint that is not ready delays its row, not its admission.
            for (reason, count) in [("capacity", waiting), ("deferred", 0)] {
                self.line(name, &format!("{label},reason=\"{reason}\""), count as f64);
            }
        }
        let name = "vllm:iteration_tokens_total";
        self.head(name, "histogram", "Tokens that a step computed.");
        for (label, figures) in models {
            let stats = &figures.stats;
            let counts = stats.step_sizes.0.into_iter();
            let sum = stats.computed_tokens as f64;
            self.distribution(name, label, STEP_TOKENS.iter(), counts, sum);
        }
        let name = "vllm:spec_decode_num_accepted_tokens_per_pos_total";
        let help = "Guessed tokens that were right, by their place in the draft.";
        self.head(name, "counter", help);
        for (label, figures) in models {
            let drafts = &figures.stats.drafts;
            let counts = drafts.accepted_at.iter().take(drafts.longest);
            for (position, &count) in counts.enumerate() {
                let labels = format!("{label},position=\"{position}\"");
                self.line(name, &labels, count as f64);
            }
        }
        let name = "vllm:cache_config_info";
        self.head(name, "gauge", "The KV cache of a loaded model.");
        for (label, figures) in models.iter().filter(|(_, figures)| figures.loaded) {
            let stats = &figures.stats;
            // Blocks that hold as many tokens, whatever the windows of layers save.
            let blocks = stats.kv_tokens / stats.kv_block_size.max(1);
            // As Python writes it.
            let shared = if stats.prefix_cache { "True" } else { "False" };
            let labels = format!(
                "{label},block_size=\"{}\",num_gpu_blocks=\"{}\",enable_prefix_caching=\"{shared}\"",
                stats.kv_block_size, blocks,
            );
            self.line(name, &labels, 1.0);
        }
        let name = "vllm:lora_requests_info";
        let help = "When this was read (Unix time), with the adapters that have requests.";
        self.head(name, "gauge", help);
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let now = now.unwrap_or_default().as_secs_f64();
        for (label, figures) in models {
            if let Some(most) = figures.max_adapters {
                let [waiting, running] = figures.metrics.adapters().map(|names| escape(&names));
                let labels = format!(
                    "{label},max_lora=\"{most}\",running_lora_adapters=\"{running}\",\
                     waiting_lora_adapters=\"{waiting}\""
                );
                self.line(name, &labels, now);
            }
        }
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
        let http = HttpCounts::default();
        http.answered("/v1/models", "GET", 200);
        let figures = |model| Figures {
            model,
            loaded: true,
            loads: 2,
            failed_loads: 1,
            max_adapters: None,
            stats: EngineStats::default(),
            metrics: &metrics,
        };
        let page = render(&[figures("a\"b"), figures("c")], &http, None);
        let label = "model_name=\"a\\\"b\"";
        for line in [
            format!("vllm:time_to_first_token_seconds_bucket{{{label},le=\"0.001\"}} 1"),
            format!("vllm:time_to_first_token_seconds_bucket{{{label},le=\"0.04\"}} 2"),
            format!("vllm:time_to_first_token_seconds_bucket{{{label},le=\"+Inf\"}} 3"),
            format!("vllm:time_to_first_token_seconds_count{{{label}}} 3"),
            format!("vllm:request_success_total{{{label},finished_reason=\"length\"}} 1"),
            "ferrum:model_loads_total{model_name=\"c\"} 2".into(),
            "http_requests_total{handler=\"/v1/models\",method=\"GET\",status=\"200\"} 1".into(),
        ] {
            assert!(page.lines().any(|found| found == line), "{line}\n{page}");
        }
        // All of a name stand together, under one head.
        let heads = page.lines().filter(|line| line.starts_with("# TYPE"));
        let heads: Vec<_> = heads.collect();
        let names: std::collections::BTreeSet<_> = heads.iter().collect();
        assert_eq!(heads.len(), names.len(), "{page}");
    }
}
