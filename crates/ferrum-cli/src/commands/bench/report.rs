//! What `ferrum bench` prints: each figure, and what share of the machine's limit it is.

use super::profile::Profile;
use crate::ui::human_bytes;
use ferrum_engine::{PlacedStage, Placement};
use ferrum_formats::{TensorDtype, TensorInfo};
use ferrum_models::Model;
use ferrum_types::Dtype;
use serde_json::{Value, json};
use std::fmt::Write;

/// Measured peaks of the device; `None` where it does no such work.
#[derive(Default)]
pub(super) struct DevicePeaks {
    pub(super) bandwidth: f64,
    /// Whether the bandwidth is that of a copy, reads and writes together.
    pub(super) is_copy: bool,
    pub(super) fma_flops: Option<f64>,
    /// Operations on 8-bit integers in a second.
    pub(super) int8_ops: Option<f64>,
    /// Where products with weights of 16 bits are of 16 bits.
    pub(super) half_flops: Option<f64>,
    /// Whether these are of f16. Otherwise they are of bf16.
    pub(super) is_f16: bool,
    /// Bytes of the last-level cache, where the system tells.
    pub(super) cache: Option<u64>,
}

impl DevicePeaks {
    /// The element of products of 16 bits.
    fn half_name(&self) -> &'static str {
        if self.is_f16 { "f16" } else { "bf16" }
    }

    /// The medians of several measurements; `None` of none.
    pub(super) fn medians(all: &[Self]) -> Option<Self> {
        let first = all.first()?;
        let of =
            |get: fn(&Self) -> Option<f64>| get(first).map(|_| median(all.iter().filter_map(get)));
        Some(Self {
            bandwidth: median(all.iter().map(|l| l.bandwidth)),
            is_copy: first.is_copy,
            fma_flops: of(|l| l.fma_flops),
            int8_ops: of(|l| l.int8_ops),
            half_flops: of(|l| l.half_flops),
            is_f16: first.is_f16,
            cache: first.cache,
        })
    }
}

/// Sequences that decoded together.
pub(super) struct Batched {
    pub(super) seqs: usize,
    pub(super) decode_s: f64,
}

pub(super) struct Report<'a> {
    pub(super) model: &'a Model,
    pub(super) placement: &'a Placement,
    pub(super) prompt_len: usize,
    pub(super) gen_len: usize,
    pub(super) kv: String,
    pub(super) kv_per_token: u64,
    pub(super) load_s: f64,
    /// `cache` or `packed`.
    pub(super) weights_from: &'static str,
    pub(super) first_token_s: f64,
    pub(super) decode_s: f64,
    pub(super) batched: Vec<Batched>,
    pub(super) profile: Option<Profile>,
    pub(super) limits: Option<DevicePeaks>,
    pub(super) peak_rss: Option<u64>,
}

/// The arithmetic that prompt speed is compared with.
#[derive(Clone, Copy)]
struct Arithmetic {
    name: &'static str,
    unit: &'static str,
    peak: f64,
}

impl Report<'_> {
    fn prefill_rate(&self) -> f64 {
        self.prompt_len as f64 / self.first_token_s
    }

    fn decode_rate(&self) -> f64 {
        self.gen_len as f64 / self.decode_s
    }

    /// Tokens per second of all sequences of a batch.
    fn batch_rate(&self, batch: &Batched) -> f64 {
        (batch.seqs * self.gen_len) as f64 / batch.decode_s
    }

    /// Bytes that a decode step of `seqs` sequences reads: the weights once, and half-way through the
    /// answers the keys and values of all tokens before them.
    fn bytes_per_step(&self, seqs: usize) -> u64 {
        let context = self.prompt_len + self.gen_len / 2;
        let weights = self.placement.decode_bytes(self.model);
        weights + self.kv_per_token * (context * seqs) as u64
    }

    /// Multiplications and additions of one prompt token in matrix products.
    fn flops_per_token(&self) -> f64 {
        2.0 * self.model.layer_parameters() as f64
    }

    /// The last-level cache, if it holds what a step of `seqs` sequences reads: such a step reads hardly
    /// anything from memory.
    fn holding_cache(&self, seqs: usize) -> Option<u64> {
        let cache = self.limits.as_ref()?.cache?;
        (self.bytes_per_step(seqs) <= cache).then_some(cache)
    }

    /// Share of the memory's bandwidth that `steps` in a second of `seqs` sequences read; `None` where a
    /// cache holds all that they read.
    fn bandwidth_share(&self, seqs: usize, steps: f64) -> Option<f64> {
        let limits = self.limits.as_ref()?;
        if self.holding_cache(seqs).is_some() {
            return None;
        }
        Some(steps * self.bytes_per_step(seqs) as f64 / limits.bandwidth)
    }

    /// Bytes where weights stay in blocks and the device multiplies bytes, bf16 or f16 where they and the device are of that,
    /// else f32.
    fn arithmetic(&self) -> Option<Arithmetic> {
        let limits = self.limits.as_ref()?;
        let blocks = self.model.keeps_blocks() && self.model.has_integers();
        let bytes = limits.int8_ops.filter(|_| blocks);
        // What makes no f32 is a GPU. Its products are of 16 bits, but for FP8 weights, of which prompts may be products of FP8.
        let is_gpu = limits.fma_flops.is_none();
        let is_fp8 = |info: &TensorInfo| info.dtype == TensorDtype::Plain(Dtype::F8E4M3);
        if is_gpu && self.model.tensors().infos().any(is_fp8) {
            return None;
        }
        let is_half = is_gpu || self.model.is_bf16();
        let half = limits.half_flops.filter(|_| is_half);
        let (name, unit, peak) = match (bytes, half) {
            (Some(bytes), _) => ("bytes", "GOP/s", bytes),
            (None, Some(half)) => (limits.half_name(), "GFLOP/s", half),
            (None, None) => ("f32 FMA", "GFLOP/s", limits.fma_flops?),
        };
        Some(Arithmetic { name, unit, peak })
    }

    fn prefill_share(&self) -> Option<f64> {
        let peak = self.arithmetic()?.peak;
        Some(self.prefill_rate() * self.flops_per_token() / peak)
    }

    /// Which device has which layers, where there are several stages.
    fn layers(&self) -> Option<String> {
        (!self.placement.is_whole()).then(|| self.placement.to_string())
    }

    pub(super) fn json(&self) -> Value {
        let info = self.placement.last_device().info();
        let limits = self.limits.as_ref();
        let batched = self.batched.iter().map(|batch| {
            let rate = self.batch_rate(batch);
            json!({
                "sequences": batch.seqs,
                "decode_tokens_per_s": rate,
                "decode_bandwidth_share":
                    self.bandwidth_share(batch.seqs, rate / batch.seqs as f64),
            })
        });
        json!({
            "backend": info.backend,
            "device": info.name,
            "detail": info.detail,
            "layers": self.layers(),
            "model": self.model.tensors().path_hint().display().to_string(),
            "kv_dtype": self.kv,
            "prompt_tokens": self.prompt_len,
            "generated_tokens": self.gen_len,
            "load_s": self.load_s,
            "weights_from": self.weights_from,
            "first_token_s": self.first_token_s,
            "prefill_tokens_per_s": self.prefill_rate(),
            "decode_tokens_per_s": self.decode_rate(),
            "decode_bytes_per_token": self.bytes_per_step(1),
            "batched": batched.collect::<Vec<_>>(),
            "read_bandwidth_bytes_per_s": limits.filter(|l| !l.is_copy).map(|l| l.bandwidth),
            "copy_bandwidth_bytes_per_s": limits.filter(|l| l.is_copy).map(|l| l.bandwidth),
            "last_level_cache_bytes": limits.and_then(|l| l.cache),
            "fma_peak_flops": limits.and_then(|l| l.fma_flops),
            "byte_peak_ops": limits.and_then(|l| l.int8_ops),
            "bf16_peak_flops": limits.filter(|l| !l.is_f16).and_then(|l| l.half_flops),
            "f16_peak_flops": limits.filter(|l| l.is_f16).and_then(|l| l.half_flops),
            "decode_bandwidth_share": self.bandwidth_share(1, self.decode_rate()),
            "prefill_arithmetic": self.arithmetic().map(|a| a.name),
            "prefill_arithmetic_share": self.prefill_share(),
            "peak_rss_bytes": self.peak_rss,
            "profile": self.profile.as_ref().map(Profile::json),
        })
    }

    pub(super) fn text(&self) -> String {
        let mut text = String::new();
        for PlacedStage { device, stage } in self.placement.stages() {
            let info = device.info();
            let layers = match stage.is_whole() {
                true => String::new(),
                false => format!(", layers {stage}"),
            };
            let _ = writeln!(
                text,
                "{}: {} ({}){layers}",
                info.backend, info.name, info.detail
            );
        }
        // Writing to a string does not fail.
        let from = match self.weights_from {
            "cache" => "weights from the cache",
            _ => "weights packed",
        };
        let _ = writeln!(text, "load          {:>10.3} s   {from}", self.load_s);
        let _ = writeln!(text, "first token   {:>10.3} s", self.first_token_s);
        let (prefill, decode) = (self.prefill_rate(), self.decode_rate());
        let _ = write!(
            text,
            "prefill {:<5} {prefill:>10.1} tokens/s",
            self.prompt_len
        );
        if let (Some(a), Some(share)) = (self.arithmetic(), self.prefill_share()) {
            let (share, peak) = (100.0 * share, a.peak / 1e9);
            let _ = write!(text, ", {share:.0} % of {peak:.0} {} ({})", a.unit, a.name);
        }
        let _ = write!(text, "\ndecode {:<6} {decode:>10.1} tokens/s", self.gen_len);
        text += &self.of_bandwidth(1, decode);
        for batch in &self.batched {
            let rate = self.batch_rate(batch);
            let _ = write!(text, "\n  {:>3} at once {rate:>10.1} tokens/s", batch.seqs);
            text += &self.of_bandwidth(batch.seqs, rate / batch.seqs as f64);
        }
        if let Some(bytes) = self.peak_rss {
            let _ = write!(text, "\npeak memory   {:>10}", human_bytes(bytes));
        }
        text += "\n";
        if let Some(profile) = &self.profile {
            text += &profile.text();
        }
        text
    }

    fn of_bandwidth(&self, seqs: usize, steps: f64) -> String {
        if let Some(cache) = self.holding_cache(seqs) {
            let (read, cache) = (human_bytes(self.bytes_per_step(seqs)), human_bytes(cache));
            return format!(
                ", {read} a step from the cache of {cache}: no share of memory bandwidth"
            );
        }
        match (&self.limits, self.bandwidth_share(seqs, steps)) {
            (Some(limits), Some(share)) => {
                let (share, peak) = (100.0 * share, limits.bandwidth / 1e9);
                let how = if limits.is_copy { "copy" } else { "read" };
                format!(", {share:.0} % of {peak:.1} GB/s ({how})")
            }
            _ => String::new(),
        }
    }
}

pub(super) fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    let n = values.len();
    if n == 0 {
        f64::NAN
    } else {
        (values[(n - 1) / 2] + values[n / 2]) / 2.0
    }
}
