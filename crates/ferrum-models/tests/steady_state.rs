//! A steady decode step allocates nothing, on any thread.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod support;

use ferrum_kernels::cpu::{CpuBackend, CpuConfig};
use ferrum_kernels::{KvF32, KvFp16};
use ferrum_kernels::{LogitAdjustment, RowSampling};
use ferrum_models::{
    Dequantized, KvLayout, LogitRows, Moe, Native, Readback, RowOutput, SeqStep, StepBatch,
    StepOutput,
};
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};
use support::{blocks, fixtures, open, runner_in};

struct Counting;

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call goes to the system allocator unchanged; counting touches no memory of its own.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promises about `layout` are passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: `ptr` came from `System` through `alloc` with this layout.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// One test, so that no other test allocates while it counts.
#[test]
fn a_steady_decode_step_allocates_nothing() {
    let device = CpuBackend::with_config(CpuConfig {
        threads: Some(2),
        ..Default::default()
    })
    .unwrap();
    let names = [
        "llama3-tied",
        "qwen3",
        "mistral-window",
        "qwen2",
        "qwen3-moe",
        "gemma2",
        "olmo2",
        "granite",
        "command-r",
        "gpt2",
        "qwen2-moe",
        "deepseek3",
        "gpt-oss",
    ];
    for name in names {
        let model = open(&fixtures().join(name));
        let layout = KvLayout::Paged { block_size: 16 };
        let float = runner_in::<_, KvF32, Moe<Dequantized>>(&device, &model, layout);
        check(name, float);
        let half = runner_in::<_, KvFp16, Moe<Dequantized>>(&device, &model, layout);
        check(name, half);
    }
    for name in [
        "llama-quantized",
        "qwen3-moe-quantized",
        "deepseek2-quantized",
    ] {
        let model = open(&fixtures().join(name).join("model-q4_0.gguf"));
        let layout = KvLayout::Paged { block_size: 16 };
        let native = runner_in::<_, KvFp16, Moe<Native>>(&device, &model, layout);
        check(&format!("{name} in Q4_0"), native);
    }
    let model = open(&fixtures().join("llama-gptq4-order"));
    let layout = KvLayout::Paged { block_size: 16 };
    let native = runner_in::<_, KvFp16, Moe<Native>>(&device, &model, layout);
    check("gptq4-order", native);
}

fn check<K>(name: &str, mut runner: ferrum_models::ModelRunner<CpuBackend, K>)
where
    K: ferrum_kernels::KvDtypeKind,
    CpuBackend: ferrum_kernels::BackendKvDtype<K>,
{
    let table = blocks(runner.pool().blocks, 0);
    let mut batch = StepBatch::default();
    let mut output = StepOutput::default();
    let mut best = 5;
    let mut step = |start: usize, best: &mut u32| {
        batch.clear();
        let tokens = &[*best];
        let (prompt_len, logit_rows) = (1, LogitRows::Last);
        let seq = SeqStep {
            tokens,
            start,
            prompt_len,
            blocks: &table,
            hidden: false,
            logits: logit_rows,
            adapter: None,
        };
        batch.push(seq).unwrap();
        let wanted = match start % 3 {
            0 => Readback::Logits,
            1 => Readback::SAMPLED,
            _ => Readback::GREEDY,
        };
        if wanted == Readback::SAMPLED {
            let row = RowSampling {
                temperature: 0.7,
                top_k: 50,
                top_p: 0.9,
                min_p: 0.02,
                uniform: 0.4,
                ..RowSampling::default()
            };
            let change = LogitAdjustment::none(3);
            batch.sampling.push(row, [change.with_occurrence()], None);
        }
        runner.run(&batch, &[wanted], &mut output).unwrap();
        if let RowOutput::Token(token, _) = output.row(0) {
            *best = token;
        }
    };
    // Scratch grows to its size in the first steps.
    for start in 0..20 {
        step(start, &mut best);
    }
    // The harness's own thread may allocate once in a while; a step that allocates does so each time.
    let rounds = (20..60).step_by(8).map(|first| {
        let before = ALLOCATIONS.load(Ordering::Relaxed);
        for start in first..first + 8 {
            step(start, &mut best);
        }
        ALLOCATIONS.load(Ordering::Relaxed) - before
    });
    assert_eq!(
        rounds.min(),
        Some(0),
        "{name}: allocations in 8 decode steps"
    );
}
