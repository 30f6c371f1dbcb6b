//! Models on two CUDA ranks with a device each, which exchange by NCCL, under the stand-ins of `tools/cuda-emulator`.
//!
//! A program of its own, because the number of devices is one of the process.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

#[path = "support/mod.rs"]
mod support;

use ferrum_cuda_emulator::{graph_replays, load_devices, nccl_collectives};
use ferrum_kernels::cuda::{CudaAct, CudaBackend, CudaF32};
use ferrum_kernels::{Backend, KvF32, LlmBackend, LocalGroup};
use ferrum_models::{
    Dequantized, Moe, Native, Readback, RunnerGroup, StepOutput, WeightForm, follow, rank_runner,
};
use ferrum_test_support::skip;
use ferrum_types::TokenId;
use half::bf16;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use support::group::{LAYOUT, greedy, group, logits, step};
use support::{
    compare, config, expected, fixtures, logits_in_chunks, max_difference, open, runner_in,
};

/// One test at a time: they count what the process has done.
static ONE: Mutex<()> = Mutex::new(());

/// What another order of sums may change, as a part of the spread of the logits.
const TOLERANCE: f32 = 1e-5;

/// Two devices; none, said aloud, where the emulator cannot be built.
fn devices<A: CudaAct>() -> Option<[CudaBackend<A>; 2]> {
    if let Err(reason) = load_devices(2) {
        skip(reason);
        return None;
    }
    Some([0, 1].map(|ordinal| CudaBackend::open(ordinal).unwrap()))
}

fn spread(logits: &[f32]) -> f32 {
    let most = logits.iter().copied().fold(f32::MIN, f32::max);
    most - logits.iter().copied().fold(f32::MAX, f32::min)
}

/// A model of the fixtures, and the tokens that it is tried with.
fn case(name: &str) -> (PathBuf, Vec<TokenId>) {
    let path = fixtures().join(name);
    let folder = match path.is_dir() {
        true => path.clone(),
        false => path.parent().unwrap().to_owned(),
    };
    let tokens = expected(&folder.join("expected.safetensors")).tokens;
    (path, tokens)
}

/// Logits on one device, and on two ranks: of a prompt in two chunks, and of its first tokens one at a time, which are steps that
/// are captured and replayed.
fn compared<A: CudaAct, W: WeightForm<CudaBackend<A>>>(
    devices: &[CudaBackend<A>; 2],
    name: &str,
) -> [(Vec<f32>, Vec<f32>); 2]
where
    CudaBackend<A>: LlmBackend,
{
    const DECODED: usize = 8;
    let (path, tokens) = case(name);
    let model = open(&path);
    let mut alone = runner_in::<_, KvF32, W>(&devices[0], &model, LAYOUT);
    let whole = logits_in_chunks(&mut alone, &tokens, &[usize::MAX]);
    let mut ranks = group::<_, W>(devices, &model);
    let before = (nccl_collectives(), graph_replays());
    let found = logits(&mut ranks, (&tokens, None), tokens.len().div_ceil(2));
    let decoded = logits(&mut ranks, (&tokens[..DECODED], None), 1);
    let after = (nccl_collectives(), graph_replays());
    assert!(after.0.1 > before.0.1, "{name}: no gather by NCCL");
    // Layers with states may go through the host.
    let captures = ranks.state_slots().is_none();
    assert!(!captures || after.1 > before.1, "{name}: no replay");
    let first = whole[..decoded.len()].to_vec();
    [(whole, found), (first, decoded)]
}

#[test]
fn ranks_give_the_logits_of_one() {
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(devices) = devices::<f32>() else {
        return;
    };
    // Dense; one KV head that both ranks hold; norms of whole rows; experts; quantised ones.
    for name in [
        "llama3-tied",
        "falcon",
        "olmo2",
        "mixtral",
        "qwen3-moe",
        "lfm2",
        "llama-quantized/model-q8_0.gguf",
        "llama-gptq4",
    ] {
        for (whole, found) in compared::<_, Moe<Dequantized>>(&devices, name) {
            let difference = max_difference(&found, &whole) / spread(&whole);
            println!("{name}: {difference:.1e} of the spread");
            assert!(difference <= TOLERANCE, "{name}: {difference}");
        }
    }
}

#[test]
fn ranks_choose_the_tokens_of_one() {
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(devices) = devices::<f32>() else {
        return;
    };
    for name in ["llama3-tied", "falcon", "mixtral"] {
        let dir = fixtures().join(name);
        let expected = expected(&dir.join("expected.safetensors"));
        let mut ranks = group::<_, Moe<Dequantized>>(&devices, &open(&dir));
        let found = greedy(&mut ranks, &expected.tokens[..8], 16);
        assert_eq!(found, expected.greedy[..16], "{name}");
    }
}

/// As models run: activations of bf16, whose sums over ranks NCCL makes.
#[test]
fn bf16_ranks_stay_near_one() {
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(devices) = devices::<bf16>() else {
        return;
    };
    let before = nccl_collectives();
    for name in [
        "llama3-tied",
        "qwen3",
        "llama-quantized/model-q4_0.gguf",
        "llama-awq",
        // With inputs that ranks gather.
        "llama-gptq4-order",
        "qwen3-moe-quantized/model-q8_0.gguf",
    ] {
        let vocab = open(&case(name).0).spec.vocab_size;
        for (whole, found) in compared::<_, Moe<Native>>(&devices, name) {
            let (kl, same) = compare(&whole, &found, vocab);
            println!("{name}: KL {kl:.1e}, {same:.2} the same");
            assert!(kl < 1e-2 && same >= 0.8, "{name}: KL {kl:.1e}, {same:.2}");
        }
    }
    assert!(nccl_collectives().0 > before.0, "no sum by NCCL");
}

/// The leader is told of it from the step that it is in, or from the next one.
#[test]
fn a_rank_that_fails_ends_the_steps_of_all() {
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(devices) = devices::<f32>() else {
        return;
    };
    let model = open(&fixtures().join("llama3-tied"));
    let runner = |rank: usize| {
        let part = (&model, rank, 2);
        rank_runner::<CudaF32, KvF32, Dequantized>(
            &devices[rank],
            part,
            config(LAYOUT),
            &mut |_, _| (),
        )
    };
    let (first, second) = (runner(0).unwrap(), runner(1).unwrap());
    let mut ends = LocalGroup::ranks(2).into_iter();
    let (end, other) = (ends.next().unwrap(), ends.next().unwrap());
    let failing = Arc::clone(&other);
    let follower = std::thread::spawn(move || follow(second, &other).unwrap_err().to_string());
    let mut leader = RunnerGroup::lead(model.spec.clone(), first, end).unwrap();
    let pool = leader.pool().blocks;
    let mut run = || {
        let mut output = StepOutput::default();
        leader.run(&step(&[1], 0, 1, pool), &[Readback::Logits], &mut output)
    };
    run().unwrap();
    let failed = std::thread::spawn(move || failing.abort("no more paper"));
    let error = (0..1000).find_map(|_| run().err()).unwrap().to_string();
    let told = "rank 1 of 2 ended the group: no more paper";
    assert!(error.contains(told), "{error}");
    failed.join().unwrap();
    drop(leader);
    let text = follower.join().unwrap();
    assert!(text.contains("no more paper"), "{text}");
}
