//! The suite on the CUDA backend, under the stand-in driver of `tools/cuda-emulator`: the same host code and the same
//! kernels as on a card, with all elements that activations can have.

mod support;

use ferrum_conformance::{CudaSuite, Filter, run_cuda};
use ferrum_kernels::cuda::{CudaAct, CudaBackend, CudaOptions};
use ferrum_kernels::{Backend, BackendGraph, BatchInvariance, GraphRun};
use ferrum_test_support::skip;
use ferrum_types::Result;
use half::{bf16, f16};
use std::sync::{Mutex, PoisonError};
use support::expect_all_passed;

/// Opens the emulator's device as one of a compute capability; none without a compiler.
fn opened_as<A: CudaAct>(options: CudaOptions, capability: (i32, i32)) -> Option<CudaBackend<A>> {
    // What a test sets is for itself.
    static OPENING: Mutex<()> = Mutex::new(());
    if let Err(reason) = ferrum_cuda_emulator::load() {
        skip(reason);
        return None;
    }
    let _opening = OPENING.lock().unwrap_or_else(PoisonError::into_inner);
    ferrum_cuda_emulator::set_capability(capability);
    Some(CudaBackend::open_with(0, options).expect("the emulator opens"))
}

fn opened<A: CudaAct>(options: CudaOptions) -> Option<CudaBackend<A>> {
    opened_as(options, (9, 0))
}

fn conforms<A: CudaSuite>(device: &CudaBackend<A>, filter: &Filter) {
    let report = run_cuda(device, filter);
    println!("{device:?} {:?}\n{}", device.info(), report.table());
    expect_all_passed(&report);
}

/// Part `part` of `parts` of all cases with activations of `A`: as a whole test they would leave threads without work at the end.
fn part<A: CudaSuite>(part: u64, parts: u64) {
    if let Some(device) = opened::<A>(CudaOptions::default()) {
        conforms(&device, &Filter::all().part(part, parts));
    }
}

/// Half of the cases: the host's part is the same for all elements, and models run with 16 bits.
#[test]
fn f32_activations_of_a_half() {
    part::<f32>(0, 2);
}

#[test]
fn bf16_activations_first_half() {
    part::<bf16>(0, 2);
}

#[test]
fn bf16_activations_second_half() {
    part::<bf16>(1, 2);
}

/// Most kernels for f16 are those for bf16 with other conversions, so a third of the cases has to do; products with weights of bf16
/// are others.
#[test]
fn f16_activations_of_a_third() {
    part::<f16>(0, 3);
    if let Some(device) = opened::<f16>(CudaOptions::default()) {
        conforms(&device, &Filter::new("gemm bf16"));
    }
}

/// The kernels that others have for products of FP8, and a device that has none.
#[test]
fn fp8_of_other_capabilities() {
    for capability in [(8, 0), (8, 9)] {
        if let Some(device) = opened_as::<bf16>(CudaOptions::default(), capability) {
            assert_eq!(device.capability(), capability);
            conforms(&device, &Filter::new("gemm_gptq fp8"));
        }
    }
    if let Some(device) = opened_as::<f16>(CudaOptions::default(), (8, 9)) {
        conforms(&device, &Filter::new("gemm_gptq fp8"));
    }
}

/// Rows have equal bits in products of all sizes, through tiles of 16 to 64 rows.
#[test]
fn batch_invariant() {
    let options = CudaOptions {
        batch_invariant: true,
    };
    if let Some(device) = opened::<bf16>(options) {
        assert_eq!(device.batch_invariance(), BatchInvariance::BitExact);
        conforms(&device, &Filter::new("alone and together"));
    }
    if let Some(device) = opened::<f16>(options) {
        assert_eq!(device.batch_invariance(), BatchInvariance::BitExact);
        conforms(&device, &Filter::new("alone and together"));
    }
}

/// One model captures its steps while another, on the same device, frees what its queued work still uses.
#[test]
fn captures_beside_frees() {
    const ROUNDS: usize = 1000;
    const LEN: usize = 64;
    let (Some(one), Some(other)) = (
        opened::<f32>(CudaOptions::default()),
        opened::<f32>(CudaOptions::default()),
    ) else {
        return;
    };
    let captures = || -> Result<Vec<f32>> {
        let mut ctx = one.new_context()?;
        let mut y = one.from_slice(&[0.0f32; LEN])?;
        let x = one.from_slice(&[1.0f32; LEN])?;
        for key in 0..ROUNDS as u64 {
            let run = CudaBackend::run_graph(&mut ctx, key, &mut |ctx| {
                // Memory that a body drops is freed behind it.
                drop(one.alloc::<f32>(LEN)?);
                (0..20).try_for_each(|_| CudaBackend::add_inplace(ctx, &mut y, &x, LEN))
            })?;
            assert_eq!(run, GraphRun::Captured);
            CudaBackend::reset_graph(&mut ctx, key)?;
        }
        CudaBackend::to_vec(&mut ctx, &y)
    };
    let frees = || -> Result<Vec<f32>> {
        let mut ctx = other.new_context()?;
        let mut sum = other.from_slice(&[0.0f32; LEN])?;
        for _ in 0..ROUNDS {
            let x = other.from_slice(&[1.0f32; LEN])?;
            CudaBackend::add_inplace(&mut ctx, &mut sum, &x, LEN)?;
        }
        CudaBackend::to_vec(&mut ctx, &sum)
    };
    let (captured, summed) = std::thread::scope(|scope| {
        let captured = scope.spawn(captures);
        let summed = frees();
        (captured.join().expect("no panic"), summed)
    });
    assert_eq!(summed, Ok(vec![ROUNDS as f32; LEN]));
    assert_eq!(captured, Ok(vec![20.0 * ROUNDS as f32; LEN]));
}
