//! `ferrum bench`: speed, beside what this machine could do.

mod cache;
#[cfg(feature = "cuda")]
mod gpu;
mod profile;
mod report;
mod serve;

use crate::args::{BenchArgs, BenchCommand, CacheArgs};
use crate::failure::{Failure, Outcome};
use crate::load_model::{self, Loaded};
use crate::process;
use crate::ui::{show, show_json};
use crate::weight_cache;
use ferrum_engine::{BackendDispatch, Placement, Session, StepRunner};
use ferrum_kernels::cpu::peak;
use ferrum_models::{KvLayout, LogitRows, Readback, RunnerConfig, SeqStep, StepBatch, StepOutput};
use ferrum_types::{BlockId, StateSlot, TokenId};
use profile::Profile;
use report::{Batched, DevicePeaks, Report, median};
use std::time::Instant;

/// Steps of several sequences that are not counted.
const WARM_UP: usize = 3;

/// One run of one sequence.
struct Sample {
    first_token_s: f64,
    decode_s: f64,
}

pub(crate) fn bench(args: &BenchArgs) -> Outcome {
    if let Some(BenchCommand::Serve(args)) = &args.command {
        return serve::serve(args);
    }
    let started = Instant::now();
    let model = load_model::model(args.model.path(), &args.hub)?;
    load_model::check_causal(&model)?;
    let (prompt_len, gen_len) = (args.prompt as usize, args.gen_tokens as usize);
    let needed = prompt_len + gen_len;
    if needed > model.spec.context_length {
        return Err(Failure::new(format!(
            "{prompt_len} + {gen_len} tokens do not fit the model's context of {}",
            model.spec.context_length
        )));
    }
    let most = args.batch.iter().copied().max().map_or(1, usize::from);
    let sizes = |placement: &Placement| RunnerConfig {
        profile: args.profile.is_some(),
        ..for_sequences(placement.single(needed), most)
    };
    let cache = CacheArgs {
        kv_dtype: args.kv_dtype,
        context: None,
    };
    let kv = load_model::kv_dtype(&model, &cache);
    // What is measured is what `run` would do, which needs a tokenizer before its first token.
    let tokenizer = load_model::tokenizer_of(&model);
    let device = (&args.device, &args.weights);
    let (loaded, placement) = load_model::load(&model, device, kv, sizes)?;
    let load_s = started.elapsed().as_secs_f64();
    let Loaded {
        mut session, kept, ..
    } = loaded;
    let weights_from = kept.as_ref().map_or("packed", weight_cache::word);
    // Writing them would be measured, too.
    kept.into_iter().for_each(weight_cache::finish);
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
        limits.extend(processor_limits(&placement)?);
    }
    limits.extend(gpu_limits(&placement)?);
    drop(tokenizer);
    let profile = args.profile.as_deref();
    let profile = profile.map(|path| Profile::measure(&mut session, &prompt, gen_len, path));
    let profile = profile.transpose()?;
    let mut runner = session.into_runner();
    let mut batched = Vec::new();
    for &seqs in &args.batch {
        let seqs = usize::from(seqs);
        let mut decode = Vec::new();
        for _ in 0..args.repeat {
            decode.push(together(&mut *runner, seqs, &prompt, gen_len)?);
        }
        let decode_s = median(decode.into_iter());
        batched.push(Batched { seqs, decode_s });
    }
    let report = Report {
        model: &model,
        placement: &placement,
        prompt_len,
        gen_len,
        kv: kv.to_string(),
        kv_per_token: placement
            .memory_plan(&model, &RunnerConfig::single(needed), kv)
            .kv_per_token,
        load_s,
        weights_from,
        first_token_s: median(samples.iter().map(|s| s.first_token_s)),
        decode_s: median(samples.iter().map(|s| s.decode_s)),
        batched,
        profile,
        limits: DevicePeaks::medians(&limits),
        peak_rss,
    };
    if args.json {
        show_json(&report.json())
    } else {
        show(&report.text())
    }
}

/// Room for `seqs` sequences instead of one, each with one block table.
fn for_sequences(one: RunnerConfig, seqs: usize) -> RunnerConfig {
    let block_size = match one.layout {
        KvLayout::Paged { block_size } | KvLayout::Grouped { block_size } => block_size,
        KvLayout::Contiguous => 1,
    };
    RunnerConfig {
        layout: KvLayout::Paged { block_size },
        max_seqs: seqs,
        max_tokens: one.max_tokens.max(seqs),
        max_logit_rows: seqs,
        kv_tokens: seqs * one.kv_tokens.next_multiple_of(block_size),
        ..one
    }
}

/// Gives the cache another first token, so that nothing of it is reused for the prompt.
fn forget(session: &mut Session, prompt: &[TokenId]) -> Outcome {
    session.prefill(&[prompt[0] ^ 1], Readback::GREEDY)?;
    Ok(())
}

fn once(session: &mut Session, prompt: &[TokenId], gen_len: usize) -> Outcome<Sample> {
    forget(session, prompt)?;
    let start = Instant::now();
    session.prefill(prompt, Readback::GREEDY)?;
    let mut next = session.token().unwrap_or(0);
    let first_token_s = start.elapsed().as_secs_f64();
    let start = Instant::now();
    for _ in 0..gen_len {
        session.decode(next, Readback::GREEDY)?;
        next = session.token().unwrap_or(0);
    }
    Ok(Sample {
        first_token_s,
        decode_s: start.elapsed().as_secs_f64(),
    })
}

/// Seconds in which `seqs` sequences, each after the prompt, decode `gen_len` tokens together.
fn together(
    runner: &mut dyn StepRunner,
    seqs: usize,
    prompt: &[TokenId],
    gen_len: usize,
) -> Outcome<f64> {
    let per_seq = (prompt.len() + gen_len).div_ceil(runner.pool().block_size);
    let blocks: Vec<_> = (0..(per_seq * seqs) as u32).map(BlockId).collect();
    let blocks_of = |seq: usize| &blocks[seq * per_seq..][..per_seq];
    let (mut batch, mut output) = (StepBatch::default(), StepOutput::default());
    let chunk = runner.config().max_tokens;
    let has_states = runner.state_slots().is_some();
    let add_state = |batch: &mut StepBatch, seq: usize| {
        if has_states {
            batch.add_state(StateSlot(seq as u32));
        }
    };
    for seq in 0..seqs {
        let mut start = 0;
        for tokens in prompt.chunks(chunk) {
            batch.clear();
            batch.push(SeqStep {
                tokens,
                start,
                prompt_len: prompt.len(),
                blocks: blocks_of(seq),
                hidden: false,
                logits: LogitRows::None,
                adapter: None,
            })?;
            add_state(&mut batch, seq);
            runner.run(&batch, &[], &mut output)?;
            start += tokens.len();
        }
    }
    // Each sequence goes its own way.
    let mut next = random_tokens(seqs, runner.spec().vocab_size);
    let wanted = vec![Readback::GREEDY; seqs];
    let mut started = Instant::now();
    // The first token is computed again and again before the time counts: a device that captures steps does so then.
    let warm_up = std::iter::repeat_n(0, WARM_UP);
    for (step, i) in warm_up.chain(0..gen_len).enumerate() {
        if step == WARM_UP {
            started = Instant::now();
        }
        batch.clear();
        for (seq, token) in next.iter().enumerate() {
            batch.push(SeqStep {
                tokens: std::slice::from_ref(token),
                start: prompt.len() + i,
                prompt_len: prompt.len(),
                blocks: blocks_of(seq),
                hidden: false,
                logits: LogitRows::Last,
                adapter: None,
            })?;
            add_state(&mut batch, seq);
        }
        runner.run(&batch, &wanted, &mut output)?;
        for (row, token) in output.tokens() {
            next[row] = token.unwrap_or(0);
        }
    }
    Ok(started.elapsed().as_secs_f64())
}

/// What the processor can do at best, by the threads that compute, where it has all layers. It shares its machine with others,
/// so this is measured beside each run.
fn processor_limits(placement: &Placement) -> Outcome<Option<DevicePeaks>> {
    let (true, BackendDispatch::Cpu(device)) = (placement.is_whole(), placement.last_device())
    else {
        return Ok(None);
    };
    Ok(Some(DevicePeaks {
        bandwidth: peak::read_bandwidth(device)?,
        is_copy: false,
        fma_flops: Some(peak::fma_peak(device)),
        int8_ops: Some(peak::byte_peak(device)),
        half_flops: peak::bf16_peak(device),
        is_f16: false,
        cache: cache::last_level(),
    }))
}

/// The same of a GPU by CUDA, once.
#[cfg(feature = "cuda")]
fn gpu_limits(placement: &Placement) -> Outcome<Option<DevicePeaks>> {
    let device = placement.last_device();
    if !placement.is_whole() || device.info().software {
        return Ok(None);
    }
    Ok(match device {
        BackendDispatch::Cuda(device) => gpu::limits(device)?,
        BackendDispatch::CudaF16(device) => gpu::limits(device)?,
        _ => None,
    })
}

/// There is none.
#[cfg(not(feature = "cuda"))]
fn gpu_limits(_: &Placement) -> Outcome<Option<DevicePeaks>> {
    Ok(None)
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
