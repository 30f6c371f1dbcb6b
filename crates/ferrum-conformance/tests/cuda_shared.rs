//! Quantised weights on CUDA devices whose blocks have 99 KiB of shared memory (compute capability 8.6, 8.9 and 12), into which rings of
//! fewer stages fit. A program of its own, because the stand-in driver has one size for all devices of the process.

mod support;

use ferrum_conformance::{Filter, run_cuda};
use ferrum_kernels::cuda::{CudaBackend, CudaOptions};
use ferrum_test_support::skip;
use half::bf16;
use support::expect_all_passed;

#[test]
fn quantised_weights_with_99_kib_of_shared_memory() {
    if let Err(reason) = ferrum_cuda_emulator::load() {
        skip(reason);
        return;
    }
    ferrum_cuda_emulator::set_capability((8, 9));
    ferrum_cuda_emulator::set_block_shared(99 << 10);
    let device =
        CudaBackend::<bf16>::open_with(0, CudaOptions::default()).expect("the emulator opens");
    for filter in ["gemm_quant", "gemm_gptq", "moe_gate_up", "moe_gemm"] {
        expect_all_passed(&run_cuda(&device, &Filter::new(filter)));
    }
}
