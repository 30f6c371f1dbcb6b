//! The suite on the CUDA backend, under the stand-in driver of `tools/cuda-emulator`: the same host code and the same
//! kernels as on a card, with both elements that activations can have.

use ferrum_conformance::{Filter, run_cuda};
use ferrum_kernels::Backend;
use ferrum_kernels::cuda::{CudaAct, CudaBackend};
use half::bf16;

fn conforms<A: CudaAct>() {
    if let Err(reason) = ferrum_cuda_emulator::load() {
        println!("skipped: {reason}");
        return;
    }
    let device = CudaBackend::<A>::open(0).expect("the emulator opens");
    let report = run_cuda(&device, &Filter::all());
    println!("{device:?} {:?}\n{}", device.info(), report.table());
    let failures = report.failures();
    assert!(
        failures.is_empty(),
        "{} failures:\n{}",
        failures.len(),
        failures.join("\n")
    );
    assert!(report.counts().passed > 0, "nothing ran");
}

#[test]
fn f32_activations() {
    conforms::<f32>();
}

#[test]
fn bf16_activations() {
    conforms::<bf16>();
}
