//! `ferrum bench`: speed, beside what this machine could do.

use crate::args::{BenchArgs, CacheArgs};
use crate::failure::{Failure, Outcome};
use crate::open;
use crate::process;
use crate::ui::{human_bytes, show, show_json};
use ferrum_engine::{BackendDispatch, Session};
use ferrum_kernels::cpu::peak;
use ferrum_models::{Model, RunnerConfig};
use ferrum_types::TokenId;
use serde_json::{Value, json};
use std::time::Instant;

/// One run.
struct Sample {
    first_token_s: f64,
    decode_s: f64,
}

pub(crate) fn bench(args: &BenchArgs) -> Outcome {
    let started = Instant::now();
    let model = open::model(args.model.as_deref())?;
    let (prompt_len, gen_len) = (args.prompt as usize, args.gen_tokens as usize);
    let needed = prompt_len + gen_len;
    if needed > model.spec.context_length {
        return Err(Failure::new(format!(
            "{prompt_len} + {gen_len} tokens do not fit the model's context of {}",
            model.spec.context_length
        )));
    }
    let config = RunnerConfig::single(needed);
    let cache = CacheArgs {
        kv_dtype: args.kv_dtype,
        context: None,
    };
    let kv = open::kv_dtype(&model, &cache);
    // What is measured is what `run` would do, which needs a tokenizer before its first token.
    let tokenizer = open::tokenizer_of(&model);
    let (mut session, dispatch) = open::load(&model, &args.device, config, kv)?;
    let load_s = started.elapsed().as_secs_f64();
    let prompt = random_tokens(prompt_len, model.spec.vocab_size);
    // The first run warms caches and pages, and is not counted.
    once(&mut session, &prompt, gen_len.min(4))?;
    let mut samples = Vec::new();
    let mut limits = Vec::new();
    let mut peak_rss = None;
    for _ in 0..args.repeat {
        samples.push(once(&mut session, &prompt, gen_len)?);
        // Before the limits are measured, which takes memory of its own.
        peak_rss = peak_rss.or_else(|| process::memory().map(|memory| memory.peak));
        limits.extend(Limits::measure(&dispatch)?);
    }
    drop(tokenizer);
    let report = Report {
        model: &model,
        dispatch: &dispatch,
        prompt_len,
        gen_len,
        kv: kv.to_string(),
        kv_per_token: open::plan(&model, needed, kv).kv_per_token,
        load_s,
        first_token_s: median(samples.iter().map(|s| s.first_token_s)),
        decode_s: median(samples.iter().map(|s| s.decode_s)),
        limits: (!limits.is_empty()).then(|| Limits {
            read_bandwidth: median(limits.iter().map(|l| l.read_bandwidth)),
            fma_flops: median(limits.iter().map(|l| l.fma_flops)),
        }),
        peak_rss,
    };
    if args.json {
        show_json(&report.json())
    } else {
        show(&report.text())
    }
}

fn once(session: &mut Session, prompt: &[TokenId], gen_len: usize) -> Outcome<Sample> {
    // A different first token, so that nothing of the cache is reused.
    session.prefill(&[prompt[0] ^ 1])?;
    let start = Instant::now();
    session.prefill(prompt)?;
    let mut next = session.argmax()?;
    let first_token_s = start.elapsed().as_secs_f64();
    let start = Instant::now();
    for _ in 0..gen_len {
        session.decode(next)?;
        next = session.argmax()?;
    }
    Ok(Sample {
        first_token_s,
        decode_s: start.elapsed().as_secs_f64(),
    })
}

/// What the machine can do at best, by the same threads and in the same run.
struct Limits {
    read_bandwidth: f64,
    fma_flops: f64,
}

impl Limits {
    fn measure(dispatch: &BackendDispatch) -> Outcome<Option<Self>> {
        let BackendDispatch::Cpu(device) = dispatch else {
            return Ok(None);
        };
        Ok(Some(Self {
            read_bandwidth: peak::read_bandwidth(device)?,
            fma_flops: peak::fma_peak(device),
        }))
    }
}

struct Report<'a> {
    model: &'a Model,
    dispatch: &'a BackendDispatch,
    prompt_len: usize,
    gen_len: usize,
    kv: String,
    kv_per_token: u64,
    load_s: f64,
    first_token_s: f64,
    decode_s: f64,
    limits: Option<Limits>,
    peak_rss: Option<u64>,
}

impl Report<'_> {
    fn prefill_rate(&self) -> f64 {
        self.prompt_len as f64 / self.first_token_s
    }

    fn decode_rate(&self) -> f64 {
        self.gen_len as f64 / self.decode_s
    }

    /// Bytes that a decode step reads: the weights, and half-way through the answer the keys and
    /// values of all tokens before it.
    fn bytes_per_token(&self) -> u64 {
        let context = self.prompt_len + self.gen_len / 2;
        self.model.decode_bytes() + self.kv_per_token * context as u64
    }

    /// Multiplications and additions of one prompt token in matrix products.
    fn flops_per_token(&self) -> f64 {
        2.0 * self.model.layer_parameters() as f64
    }

    /// Shares of the machine's limits: (decode of bandwidth, prefill of FMA peak).
    fn shares(&self) -> Option<(f64, f64)> {
        let limits = self.limits.as_ref()?;
        let read = self.decode_rate() * self.bytes_per_token() as f64;
        let computed = self.prefill_rate() * self.flops_per_token();
        Some((read / limits.read_bandwidth, computed / limits.fma_flops))
    }

    fn json(&self) -> Value {
        let info = self.dispatch.info();
        let shares = self.shares();
        json!({
            "backend": info.backend,
            "device": info.name,
            "detail": info.detail,
            "model": self.model.tensors().path_hint().display().to_string(),
            "kv_dtype": self.kv,
            "prompt_tokens": self.prompt_len,
            "generated_tokens": self.gen_len,
            "load_s": self.load_s,
            "first_token_s": self.first_token_s,
            "prefill_tokens_per_s": self.prefill_rate(),
            "decode_tokens_per_s": self.decode_rate(),
            "decode_bytes_per_token": self.bytes_per_token(),
            "read_bandwidth_bytes_per_s": self.limits.as_ref().map(|l| l.read_bandwidth),
            "fma_peak_flops": self.limits.as_ref().map(|l| l.fma_flops),
            "decode_bandwidth_share": shares.map(|s| s.0),
            "prefill_fma_share": shares.map(|s| s.1),
            "peak_rss_bytes": self.peak_rss,
        })
    }

    fn text(&self) -> String {
        let info = self.dispatch.info();
        let mut text = format!("{}: {} ({})\n", info.backend, info.name, info.detail);
        text += &format!("load          {:>10.3} s\n", self.load_s);
        text += &format!("first token   {:>10.3} s\n", self.first_token_s);
        let (prefill, decode) = (self.prefill_rate(), self.decode_rate());
        text += &format!("prefill {:<5} {prefill:>10.1} tokens/s", self.prompt_len);
        if let (Some(limits), Some((_, share))) = (&self.limits, self.shares()) {
            let peak = limits.fma_flops / 1e9;
            text += &format!(", {:.0} % of {peak:.0} GFLOP/s (f32 FMA)", 100.0 * share);
        }
        text += &format!("\ndecode {:<6} {decode:>10.1} tokens/s", self.gen_len);
        if let (Some(limits), Some((share, _))) = (&self.limits, self.shares()) {
            let peak = limits.read_bandwidth / 1e9;
            text += &format!(", {:.0} % of {peak:.1} GB/s (read)", 100.0 * share);
        }
        if let Some(bytes) = self.peak_rss {
            text += &format!("\npeak memory   {:>10}", human_bytes(bytes));
        }
        text + "\n"
    }
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    let n = values.len();
    if n == 0 {
        f64::NAN
    } else {
        (values[(n - 1) / 2] + values[n / 2]) / 2.0
    }
}

/// Reproducible ids: a multiplicative generator's high bits.
fn random_tokens(n: usize, vocab: usize) -> Vec<TokenId> {
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let mut next = || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        ((state >> 33) as usize % vocab.max(2)) as TokenId & !1
    };
    (0..n).map(|_| next()).collect()
}
