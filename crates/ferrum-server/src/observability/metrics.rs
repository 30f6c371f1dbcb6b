//! Counters and histograms of HTTP answers and of the requests of a model.

use ferrum_engine::FinishReason;
use ferrum_engine::engine::Progress;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

/// Upper bounds in seconds, as vLLM has them.
const TTFT_BUCKETS: &[f64] = &[
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
];
const ITL_BUCKETS: &[f64] = &[
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5,
    5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
];
const REQUEST_BUCKETS: &[f64] = &[
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

/// Reasons for which answers end, in the order of the counts of [`Metrics`].
pub(super) const REASONS: [&str; 4] = ["stop", "length", "abort", "timeout"];

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

/// Requested and generated answers of a prompt.
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
    pub(super) time_to_first_token: Histogram,
    pub(super) inter_token_latency: Histogram,
    pub(super) e2e_latency: Histogram,
    pub(super) queued: Histogram,
    pub(super) prefilled: Histogram,
    pub(super) decoded: Histogram,
    pub(super) computed: Histogram,
    pub(super) prompt_tokens: Histogram,
    pub(super) generated_tokens: Histogram,
    pub(super) longest_tokens: Histogram,
    pub(super) max_tokens: Histogram,
    pub(super) choices: Histogram,
    pub(super) preemptions: Histogram,
    pub(super) finished: [AtomicU64; REASONS.len()],
    /// Those that have ended are taken out when another comes.
    adapters: Mutex<Vec<Weak<AdapterUse>>>,
}

impl Metrics {
    pub(crate) fn new() -> Self {
        Self {
            time_to_first_token: Histogram::new(TTFT_BUCKETS.iter().copied()),
            inter_token_latency: Histogram::new(ITL_BUCKETS.iter().copied()),
            e2e_latency: Histogram::new(REQUEST_BUCKETS.iter().copied()),
            queued: Histogram::new(REQUEST_BUCKETS.iter().copied()),
            prefilled: Histogram::new(REQUEST_BUCKETS.iter().copied()),
            decoded: Histogram::new(REQUEST_BUCKETS.iter().copied()),
            computed: Histogram::new(REQUEST_BUCKETS.iter().copied()),
            prompt_tokens: Histogram::new(TOKENS.iter().copied()),
            generated_tokens: Histogram::new(TOKENS.iter().copied()),
            longest_tokens: Histogram::new(TOKENS.iter().copied()),
            max_tokens: Histogram::new(TOKENS.iter().copied()),
            choices: Histogram::new(CHOICES.iter().copied()),
            preemptions: Histogram::new(PREEMPTIONS.iter().copied()),
            finished: std::array::from_fn(|_| AtomicU64::new(0)),
            adapters: Mutex::default(),
        }
    }

    pub(crate) fn time_to_first_token(&self, since: Duration) {
        self.time_to_first_token.observe(since.as_secs_f64());
    }

    pub(crate) fn inter_token_latency(&self, since: Duration) {
        self.inter_token_latency.observe(since.as_secs_f64());
    }

    /// How long a prompt waited for its first step.
    pub(crate) fn queued(&self, time: Duration) {
        self.queued.observe(time.as_secs_f64());
    }

    /// How long it took from there to its first token.
    pub(crate) fn prefilled(&self, time: Duration) {
        self.prefilled.observe(time.as_secs_f64());
    }

    /// How long an answer took from its first token on.
    pub(crate) fn decoded(&self, time: Duration) {
        self.decoded.observe(time.as_secs_f64());
    }

    /// The answers to a prompt have ended, or will not come.
    pub(crate) fn prompt_ended(&self, prompt: EndedPrompt) {
        self.prompt_tokens.observe(prompt.tokens as f64);
        self.preemptions.observe(f64::from(prompt.preemptions));
        if let Some(time) = prompt.computed {
            self.computed.observe(time.as_secs_f64());
        }
        if let Some(answers) = prompt.answers {
            self.choices.observe(answers.n as f64);
            self.max_tokens.observe(answers.max_tokens as f64);
            self.longest_tokens.observe(answers.longest as f64);
        }
    }

    /// An answer has so many tokens and gets no more.
    pub(crate) fn generated(&self, tokens: usize) {
        self.generated_tokens.observe(tokens as f64);
    }

    /// Counts prompts for an adapter for as long as the caller keeps the returned value.
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
    pub(super) fn adapters(&self) -> [String; 2] {
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
        self.e2e_latency.observe(took.as_secs_f64());
    }
}

/// Labels of HTTP answers. Routes are patterns, so there are few.
#[derive(Clone, Debug, EncodeLabelSet, PartialEq, Eq, Hash)]
pub(crate) struct HttpLabels {
    pub(crate) handler: String,
    pub(crate) method: String,
    pub(crate) status: u16,
}

/// HTTP answers by route, method and status.
pub(crate) type HttpCounts = Family<HttpLabels, Counter>;
