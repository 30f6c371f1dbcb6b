//! The metrics page for Prometheus, under the names that vLLM gave them, so that its dashboards work.
//!
//! A server owns one [`Registry`]. Counters of HTTP answers and of spans are registered in it, and a [`ModelCollector`]
//! reads engines and the counters of their requests at each scrape. Names of counters stand here without
//! `_total`, which the encoder appends.

use crate::models::{ModelSnapshot, Models};
use crate::observability::metrics::{HttpCounts, Metrics, REASONS};
use crate::observability::otlp::ExportCounts;
use ferrum_engine::engine::STEP_SIZE_BUCKETS;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{
    DescriptorEncoder, EncodeCounterValue, EncodeMetric, MetricEncoder, NoLabelSet, prometheus_text,
};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{SystemTime, UNIX_EPOCH};

pub(crate) use prometheus_text::CONTENT_TYPE;

/// The metrics of a server.
pub(crate) fn registry(
    models: Arc<Models>,
    http: &HttpCounts,
    spans: Option<&ExportCounts>,
) -> Registry {
    let mut registry = Registry::default();
    // The registry ends the help text of what is registered with a full stop.
    let help = "HTTP answers by route, method and status";
    registry.register("http_requests", help, http.clone());
    if let Some(counts) = spans {
        let (exported, dropped) = (counts.exported.clone(), counts.dropped.clone());
        let help = "Spans that a collector took";
        registry.register("ferrum:spans_exported", help, exported);
        registry.register("ferrum:spans_dropped", "Spans that were lost", dropped);
    }
    registry.register_collector(Box::new(ModelCollector(models)));
    registry
}

/// All metrics in Prometheus' text format, version 0.0.4.
pub(crate) fn render(registry: &Registry) -> Result<String, fmt::Error> {
    let mut page = String::new();
    prometheus_text::encode(&mut page, registry)?;
    Ok(page)
}

/// Reads snapshots of all models at each scrape.
struct ModelCollector(Arc<Models>);

impl fmt::Debug for ModelCollector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ModelCollector").finish_non_exhaustive()
    }
}

impl Collector for ModelCollector {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        encode_models(&self.0.snapshots(), encoder)
    }
}

impl ModelSnapshot<'_> {
    fn label(&self) -> [(&'static str, &str); 1] {
        [("model_name", self.model)]
    }
}

fn encode_models(models: &[ModelSnapshot<'_>], mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
    use MetricType::{Counter, Gauge, Histogram};
    let encoder = &mut encoder;
    for (name, help, value) in GAUGES {
        encode_each(
            encoder,
            (name, help, Gauge),
            models,
            |snapshot, mut metric| metric.encode_gauge(&value(snapshot)),
        )?;
    }
    for (name, help, value) in COUNTERS {
        encode_each(
            encoder,
            (name, help, Counter),
            models,
            |snapshot, metric| encode_counter(metric, &value(snapshot)),
        )?;
    }
    for (name, help, value) in COUNTERS_OF_SECONDS {
        encode_each(
            encoder,
            (name, help, Counter),
            models,
            |snapshot, metric| encode_counter(metric, &value(snapshot)),
        )?;
    }
    for (name, help, histogram) in HISTOGRAMS {
        encode_each(
            encoder,
            (name, help, Histogram),
            models,
            |snapshot, metric| histogram(snapshot.metrics).encode(metric),
        )?;
    }
    encode_cache(encoder, models)?;
    encode_steps(encoder, models)?;
    encode_answers(encoder, models)?;
    encode_adapters(encoder, models)
}

/// Encodes a family of metrics: its name, meaning and kind, and a metric of each model.
fn encode_each(
    encoder: &mut DescriptorEncoder<'_>,
    (name, help, kind): (&'static str, &'static str, MetricType),
    models: &[ModelSnapshot<'_>],
    encode: impl Fn(&ModelSnapshot<'_>, MetricEncoder<'_>) -> fmt::Result,
) -> fmt::Result {
    let mut family = encoder.encode_descriptor(name, help, None, kind)?;
    for snapshot in models {
        encode(snapshot, family.encode_family(&snapshot.label())?)?;
    }
    Ok(())
}

fn encode_counter(mut metric: MetricEncoder<'_>, value: &impl EncodeCounterValue) -> fmt::Result {
    metric.encode_counter::<NoLabelSet, _, u64>(value, None)
}

/// Name, meaning and value.
type MetricDef<V> = (&'static str, &'static str, fn(&ModelSnapshot<'_>) -> V);

const GAUGES: &[MetricDef<u64>] = &[
    (
        "ferrum:model_loaded",
        "1 while the model is loaded, else 0.",
        |f| u64::from(f.loaded),
    ),
    (
        "vllm:num_requests_running",
        "Sequences that are in steps.",
        |f| f.stats.running as u64,
    ),
    (
        "vllm:num_requests_waiting",
        "Sequences that wait for a step.",
        |f| (f.stats.waiting + f.stats.preempted) as u64,
    ),
    (
        "ferrum:kv_offload_ram_bytes",
        "Bytes of KV blocks in RAM.",
        |f| f.stats.offload.ram_bytes,
    ),
    (
        "ferrum:kv_offload_disk_bytes",
        "Bytes of KV blocks on disk.",
        |f| f.stats.offload.disk_bytes,
    ),
];

const COUNTERS: &[MetricDef<u64>] = &[
    (
        "ferrum:model_loads",
        "Times that the model was loaded, or was to be.",
        |f| f.loads,
    ),
    (
        "ferrum:model_load_failures",
        "Times that it could not be.",
        |f| f.failed_loads,
    ),
    ("vllm:prompt_tokens", "Prompt tokens.", |f| {
        f.stats.prompt_tokens
    }),
    ("vllm:generation_tokens", "Generated tokens.", |f| {
        f.stats.generated_tokens
    }),
    (
        "vllm:prefix_cache_queries",
        "Prompt tokens that were looked for in the prefix cache.",
        |f| f.stats.prompt_tokens,
    ),
    (
        "vllm:prefix_cache_hits",
        "Prompt tokens that were found in the prefix cache.",
        |f| f.stats.cached_tokens,
    ),
    (
        "vllm:num_preemptions",
        "Times that a sequence lost its place in the KV cache.",
        |f| f.stats.preemptions,
    ),
    (
        "vllm:spec_decode_num_drafts",
        "Drafts that were checked.",
        |f| f.stats.drafts.drafts,
    ),
    (
        "vllm:spec_decode_num_draft_tokens",
        "Tokens that were drafted and checked.",
        |f| f.stats.draft_tokens,
    ),
    (
        "vllm:spec_decode_num_accepted_tokens",
        "Drafted tokens that were right.",
        |f| f.stats.accepted_tokens,
    ),
    (
        "ferrum:kv_offload_ram_hit_tokens",
        "Prompt tokens whose keys and values came back from RAM.",
        |f| f.stats.offload.ram_hit_tokens,
    ),
    (
        "ferrum:kv_offload_disk_hit_tokens",
        "Prompt tokens whose keys and values came back from disk.",
        |f| f.stats.offload.disk_hit_tokens,
    ),
    (
        "ferrum:kv_offload_ram_evictions",
        "KV blocks that left RAM because it was full.",
        |f| f.stats.offload.ram_evictions,
    ),
    (
        "ferrum:kv_offload_disk_evictions",
        "KV blocks that left the disk because its folder was full.",
        |f| f.stats.offload.disk_evictions,
    ),
    (
        "ferrum:kv_offload_dropped_blocks",
        "KV blocks of all models that were not written because the disk could not follow.",
        |f| f.stats.offload.dropped,
    ),
    (
        "ferrum:kv_offload_damaged_files",
        "Files of KV blocks that were damaged, and were removed.",
        |f| f.stats.offload.damaged,
    ),
    ("ferrum:steps", "Steps of the engine.", |f| f.stats.steps),
    (
        "ferrum:nan_failures",
        "Requests that failed because the model computed NaN for them.",
        |f| f.stats.nan_failures,
    ),
];

const COUNTERS_OF_SECONDS: &[MetricDef<f64>] = &[
    ("ferrum:step_seconds", "Time of the engine's steps.", |f| {
        f.stats.step_time.as_secs_f64()
    }),
    (
        "ferrum:model_seconds",
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
        |m| &m.time_to_first_token,
    ),
    (
        "vllm:inter_token_latency_seconds",
        "Time between two tokens of an answer, when they were handed to the client.",
        |m| &m.inter_token_latency,
    ),
    (
        "vllm:e2e_request_latency_seconds",
        "Time of a whole answer.",
        |m| &m.e2e_latency,
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

// Metrics with labels of their own.

fn encode_cache(encoder: &mut DescriptorEncoder<'_>, models: &[ModelSnapshot<'_>]) -> fmt::Result {
    let name = "vllm:kv_cache_usage_perc";
    let help = "Share of the KV cache in use; 1 is all.";
    encode_each(
        encoder,
        (name, help, MetricType::Gauge),
        models,
        |snapshot, mut metric| {
            let stats = &snapshot.stats;
            metric.encode_gauge(&(stats.kv_blocks_used as f64 / stats.kv_blocks.max(1) as f64))
        },
    )?;
    let (name, help) = ("vllm:cache_config", "The KV cache of a loaded model.");
    encode_each(
        encoder,
        (name, help, MetricType::Info),
        models,
        |snapshot, mut metric| {
            let stats = &snapshot.stats;
            if !snapshot.loaded {
                return Ok(());
            }
            // Blocks that hold as many tokens, whatever the windows of layers save.
            let blocks = stats.kv_tokens / stats.kv_block_size.max(1);
            let sizes = [
                ("block_size", stats.kv_block_size),
                ("num_gpu_blocks", blocks),
            ];
            // As Python writes it.
            let shared = if stats.prefix_cache { "True" } else { "False" };
            metric.encode_info(&(sizes, [("enable_prefix_caching", shared)]))
        },
    )
}

fn encode_steps(encoder: &mut DescriptorEncoder<'_>, models: &[ModelSnapshot<'_>]) -> fmt::Result {
    let (name, help) = (
        "vllm:iteration_tokens_total",
        "Tokens that a step computed.",
    );
    encode_each(
        encoder,
        (name, help, MetricType::Histogram),
        models,
        |snapshot, mut metric| {
            let bounds = STEP_SIZE_BUCKETS.iter().map(|&bound| bound as f64);
            let counts = snapshot.stats.step_sizes.0;
            let buckets: Vec<_> = bounds.chain([f64::INFINITY]).zip(counts).collect();
            let (sum, count) = (snapshot.stats.computed_tokens as f64, counts.iter().sum());
            metric.encode_histogram::<NoLabelSet>(sum, count, &buckets, None)
        },
    )?;
    let name = "vllm:spec_decode_num_accepted_tokens_per_pos";
    let help = "Drafted tokens that were right, by their place in the draft.";
    let mut family = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
    for snapshot in models {
        let drafts = &snapshot.stats.drafts;
        let counts = drafts.accepted_at.iter().take(drafts.longest);
        for (position, count) in counts.enumerate() {
            let labels = (snapshot.label(), [("position", position)]);
            encode_counter(family.encode_family(&labels)?, count)?;
        }
    }
    Ok(())
}

fn encode_answers(
    encoder: &mut DescriptorEncoder<'_>,
    models: &[ModelSnapshot<'_>],
) -> fmt::Result {
    let name = "vllm:num_requests_waiting_by_reason";
    let help = "Sequences that wait for a step, by reason.";
    let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
    for snapshot in models {
        let waiting = snapshot.stats.waiting + snapshot.stats.preempted;
        // Nothing is put off here: a constraint that is not ready delays its row, not its admission.
        for (reason, count) in [("capacity", waiting), ("deferred", 0)] {
            let labels = (snapshot.label(), [("reason", reason)]);
            family.encode_family(&labels)?.encode_gauge(&count)?;
        }
    }
    let (name, help) = ("vllm:request_success", "Answers that ended, by reason.");
    let mut family = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
    for snapshot in models {
        for (reason, count) in REASONS.iter().zip(&snapshot.metrics.finished) {
            let labels = (snapshot.label(), [("finished_reason", *reason)]);
            let count = count.load(Ordering::Relaxed);
            encode_counter(family.encode_family(&labels)?, &count)?;
        }
    }
    Ok(())
}

fn encode_adapters(
    encoder: &mut DescriptorEncoder<'_>,
    models: &[ModelSnapshot<'_>],
) -> fmt::Result {
    let name = "vllm:lora_requests_info";
    let help = "When this was read (Unix time), with the adapters that have requests.";
    let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let now = now.unwrap_or_default().as_secs_f64();
    for snapshot in models {
        if let Some(most) = snapshot.max_adapters {
            let [waiting, running] = snapshot.metrics.adapters();
            let running = ("running_lora_adapters", running);
            let names = [running, ("waiting_lora_adapters", waiting)];
            let labels = (snapshot.label(), ([("max_lora", most)], names));
            family.encode_family(&labels)?.encode_gauge(&now)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrum_engine::FinishReason;
    use ferrum_engine::engine::EngineStats;
    use std::time::Duration;

    #[test]
    fn buckets_count_up_and_names_are_escaped() {
        #[derive(Debug)]
        struct Two(Metrics);

        impl Collector for Two {
            fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
                let snapshot = |model| ModelSnapshot {
                    model,
                    loaded: true,
                    loads: 2,
                    failed_loads: 1,
                    max_adapters: None,
                    stats: EngineStats::default(),
                    metrics: &self.0,
                };
                encode_models(&[snapshot("a\"b"), snapshot("c")], encoder)
            }
        }

        let metrics = Metrics::new();
        for millis in [1, 30, 900_000_000] {
            metrics.time_to_first_token(Duration::from_millis(millis));
        }
        metrics.finished(FinishReason::Length, Duration::from_secs(1));
        let mut registry = Registry::default();
        registry.register_collector(Box::new(Two(metrics)));
        let page = render(&registry).unwrap();
        let label = "model_name=\"a\\\"b\"";
        for line in [
            format!("vllm:time_to_first_token_seconds_bucket{{{label},le=\"0.001\"}} 1"),
            format!("vllm:time_to_first_token_seconds_bucket{{{label},le=\"0.04\"}} 2"),
            format!("vllm:time_to_first_token_seconds_bucket{{{label},le=\"+Inf\"}} 3"),
            format!("vllm:time_to_first_token_seconds_count{{{label}}} 3"),
            format!("vllm:request_success_total{{{label},finished_reason=\"length\"}} 1"),
            "ferrum:model_loads_total{model_name=\"c\"} 2".into(),
            "vllm:cache_config_info{model_name=\"c\",block_size=\"0\",num_gpu_blocks=\"0\",\
             enable_prefix_caching=\"False\"} 1"
                .into(),
            "# TYPE vllm:prompt_tokens_total counter".into(),
            "# HELP vllm:prompt_tokens_total Prompt tokens.".into(),
            "# TYPE vllm:iteration_tokens_total histogram".into(),
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
