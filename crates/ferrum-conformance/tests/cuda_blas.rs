//! Products of many rows on CUDA by cuBLASLt, which the stand-in of `tools/cuda-emulator` has, too. A program of its own,
//! because the library counts the products of the process.

mod support;

use ferrum_conformance::{CudaSuite, Filter, run_cuda};
use ferrum_cuda_emulator::gemm_calls;
use ferrum_kernels::cuda::{CudaBackend, CudaOptions};
use ferrum_test_support::skip;
use half::{bf16, f16};
use support::expect_all_passed;

#[test]
fn many_rows_are_multiplied_by_the_library_unless_bits_are_to_be_equal() {
    if let Err(reason) = ferrum_cuda_emulator::load() {
        skip(reason);
        return;
    }
    // Dense weights, and quantised ones, which are unpacked for more rows.
    for shapes in ["[150, 200] × [264, 200]", "[257, 2 blocks]"] {
        assert_eq!(products::<bf16>(true, shapes), 0, "{shapes}");
        assert!(products::<bf16>(false, shapes) > 0, "{shapes}");
        assert!(products::<f16>(false, shapes) > 0, "{shapes}");
    }
}

/// How many products the library made for cases of such names, which have enough rows.
fn products<A: CudaSuite>(batch_invariant: bool, shapes: &str) -> u64 {
    let before = gemm_calls();
    let options = CudaOptions { batch_invariant };
    let device = CudaBackend::<A>::open_with(0, options).expect("the emulator opens");
    expect_all_passed(&run_cuda(&device, &Filter::new(shapes)));
    gemm_calls() - before
}
