//! The suite on the CUDA backend, under the stand-in driver of `tools/cuda-emulator`: the same host code and the same
//! kernels as on a card.

use ferrum_conformance::{Filter, run_cuda};
use ferrum_kernels::Backend;
use ferrum_kernels::cuda::CudaBackend;

#[test]
fn conforms() {
    if let Err(reason) = ferrum_cuda_emulator::load() {
        println!("skipped: {reason}");
        return;
    }
    let device = CudaBackend::open(0).expect("the emulator opens");
    let report = run_cuda(&device, &Filter::all());
    println!("{:?}\n{}", device.info(), report.table());
    let failures = report.failures();
    assert!(
        failures.is_empty(),
        "{} failures:\n{}",
        failures.len(),
        failures.join("\n")
    );
    assert!(report.counts().passed > 0, "nothing ran");
}
