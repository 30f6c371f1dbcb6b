//! What models leave of a CUDA device's memory, under the stand-in driver of `tools/cuda-emulator`.
//!
//! A program of its own: other tests would take of the same memory meanwhile.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

#[path = "support/mod.rs"]
mod support;

use ferrum_kernels::cuda::CudaBackend;
use ferrum_kernels::{Backend, KvFp16};
use ferrum_models::{KvLayout, Moe, Native};
use half::bf16;
use support::{expected, fixtures, logits_in_chunks, open, runner_in};

/// A model that is loaded and dropped again and again takes no memory with it: the device has as much free as before.
#[test]
fn a_hundred_models_leave_nothing_behind() {
    if let Err(reason) = ferrum_cuda_emulator::load() {
        println!("skipped: {reason}");
        return;
    }
    let device = CudaBackend::<bf16>::open(0).unwrap();
    let path = fixtures().join("qwen3");
    let tokens = expected(&path.join("expected.safetensors")).tokens;
    let free = || device.info().memory.unwrap().free;
    let mut before = None;
    for cycle in 0..100 {
        let model = open(&path);
        let layout = KvLayout::Paged { block_size: 8 };
        let mut runner = runner_in::<_, KvFp16, Moe<Native>>(&device, &model, layout);
        assert!(before.is_none_or(|before| free() < before), "cycle {cycle}");
        // Steps make scratch memory, too.
        if cycle % 25 == 0 {
            logits_in_chunks(&mut runner, &tokens[..4], &[usize::MAX]);
        }
        drop(runner);
        assert_eq!(free(), *before.get_or_insert_with(free), "cycle {cycle}");
    }
}
