//! Attention on CUDA where bits are not to depend on the batch, under the stand-in driver of `tools/cuda-emulator`: `same`
//! cases ask for equal bits then. `cuda.rs` has the whole suite without that option.

mod support;

use ferrum_conformance::{CudaSuite, Filter, run_cuda};
use ferrum_kernels::cuda::{CudaBackend, CudaOptions};
use ferrum_kernels::{Backend, BatchInvariance};
use ferrum_test_support::skip;
use half::{bf16, f16};
use support::expect_all_passed;

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
        skip(reason);
        return;
    }
    let options = CudaOptions {
        batch_invariant: true,
    };
    let device = CudaBackend::<A>::open_with(0, options).expect("the emulator opens");
    assert_eq!(device.batch_invariance(), BatchInvariance::BitExact);
    expect_all_passed(&run_cuda(&device, &Filter::new("paged_attention")));
}
