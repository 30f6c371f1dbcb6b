//! What models leave of a CUDA device's memory, under the stand-in driver of `tools/cuda-emulator`.
//!
//! A program of its own: other tests would take of the same memory meanwhile.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

#[path = "support/mod.rs"]
mod support;

use ferrum_cuda_emulator::pinned_bytes;
use ferrum_kernels::cuda::CudaBackend;
use ferrum_kernels::{Backend, KvFp16, RowSampling};
use ferrum_models::{
    GraphCounts, KvLayout, LogitRows, ModelRunner, Moe, Native, Readback, SeqStep, StepBatch,
    StepOutput,
};
use ferrum_test_support::skip;
use ferrum_types::TokenId;
use half::bf16;
use support::{blocks, expected, fixtures, open, runner_in};

/// Models in turns: dense weights, and blocks that are packed for the kernels.
const MODELS: [&str; 2] = ["qwen3", "llama-quantized/model-q4_0.gguf"];

/// Steps of one token each: the first is captured, and the second is its replay.
const DECODED: usize = 2;

/// A prompt of a few tokens, and tokens that the device draws.
fn generate(runner: &mut ModelRunner<CudaBackend<bf16>, KvFp16>, prompt: &[TokenId]) {
    let table = blocks(runner.pool().blocks, 1);
    let (mut batch, mut output) = (StepBatch::default(), StepOutput::default());
    let (mut next, mut start) = (prompt.to_vec(), 0);
    for _ in 0..=DECODED {
        batch.clear();
        let step = SeqStep {
            tokens: &next,
            start,
            prompt_len: prompt.len(),
            blocks: &table,
            hidden: false,
            logits: LogitRows::Last,
            adapter: None,
        };
        batch.push(step).unwrap();
        let row = RowSampling {
            temperature: 0.8,
            top_k: 20,
            top_p: 0.9,
            uniform: 0.4,
            ..RowSampling::default()
        };
        batch.sampling.push(row, [], None);
        runner
            .run(&batch, &[Readback::SAMPLED], &mut output)
            .unwrap();
        let (_, token) = output.tokens().next().unwrap();
        start += next.len();
        next = vec![token.unwrap()];
    }
}

/// Models that are loaded, generate and are dropped again and again take no memory with them: the device has as much free as before.
#[test]
fn a_hundred_models_leave_nothing_behind() {
    if let Err(reason) = ferrum_cuda_emulator::load() {
        skip(reason);
        return;
    }
    let device = CudaBackend::<bf16>::open(0).unwrap();
    let tokens = expected(&fixtures().join("qwen3/expected.safetensors")).tokens;
    let free = || device.info().memory.unwrap().free;
    let (mut before, mut pinned) = (None, None);
    for cycle in 0..100 {
        let model = open(&fixtures().join(MODELS[cycle % MODELS.len()]));
        let layout = KvLayout::Paged { block_size: 8 };
        let mut runner = runner_in::<_, KvFp16, Moe<Native>>(&device, &model, layout);
        assert!(before.is_none_or(|before| free() < before), "cycle {cycle}");
        // Steps make scratch memory and graphs, too: an odd number, so that both models take them.
        if cycle % 5 == 0 {
            generate(&mut runner, &tokens[..4]);
            let GraphCounts {
                captured, replayed, ..
            } = runner.graph_counts();
            assert!(captured > 0 && replayed > 0, "cycle {cycle}: no graphs");
        }
        drop(runner);
        assert_eq!(free(), *before.get_or_insert_with(free), "cycle {cycle}");
        // The device keeps what both models and their steps have copied through.
        if cycle >= 10 {
            let most = *pinned.get_or_insert_with(pinned_bytes);
            assert_eq!(pinned_bytes(), most, "cycle {cycle}: pinned memory");
        }
    }
}
