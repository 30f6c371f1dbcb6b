//! Attention on CUDA where bits are not to depend on the batch, under the stand-in driver of `tools/cuda-emulator`: `same`
//! cases ask for equal bits then. `cuda.rs` has the whole suite without that option.

use ferrum_conformance::{CudaSuite, Filter, run_cuda};
use ferrum_kernels::cuda::{CudaBackend, CudaOptions};
use ferrum_kernels::{Backend, BatchInvariance};
use half::{bf16, f16};

#[test]
fn batch_invariant_attention_conforms_with_bf16() {
    conforms::<bf16>();
}

#[test]
fn batch_invariant_attention_conforms_with_f16() {
    conforms::<f16>();
}

fn conforms<A: CudaSuite>() {
    if let Err(reason) = ferrum_cuda_emulator::load() {
        println!("skipped: {reason}");
        return;
    }
    let options = CudaOptions {
        batch_invariant: true,
    };
    let device = CudaBackend::<A>::open_with(0, options).expect("the emulator opens");
    assert_eq!(device.batch_invariance(), BatchInvariance::BitExact);
    let report = run_cuda(&device, &Filter::new("paged_attention"));
    let failures = report.failures();
    assert!(failures.is_empty(), "{}", failures.join("\n"));
    assert!(report.counts().passed > 0, "nothing ran");
}
