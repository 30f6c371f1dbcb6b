//! The suite on the CUDA backend, under the stand-in driver of `tools/cuda-emulator`: the same host code and the same
//! kernels as on a card, with both elements that activations can have.

use ferrum_conformance::{Filter, run_cuda};
use ferrum_kernels::cuda::{CudaAct, CudaBackend, CudaOptions};
use ferrum_kernels::{Backend, RowOrder};
use half::bf16;

/// Opens the device of the emulator; none without a compiler.
fn opened<A: CudaAct>(options: CudaOptions) -> Option<CudaBackend<A>> {
    if let Err(reason) = ferrum_cuda_emulator::load() {
        println!("skipped: {reason}");
        return None;
    }
    Some(CudaBackend::open_with(0, options).expect("the emulator opens"))
}

fn conforms<A: CudaAct>(device: &CudaBackend<A>, filter: &Filter) {
    let report = run_cuda(device, filter);
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
    if let Some(device) = opened::<f32>(CudaOptions::default()) {
        conforms(&device, &Filter::all());
    }
}

#[test]
fn bf16_activations() {
    if let Some(device) = opened::<bf16>(CudaOptions::default()) {
        conforms(&device, &Filter::all());
    }
}

/// Rows have equal bits in products of all sizes, through tiles of 16 to 64 rows.
#[test]
fn batch_invariant() {
    let options = CudaOptions {
        batch_invariant: true,
    };
    if let Some(device) = opened::<bf16>(options) {
        assert_eq!(device.row_order(), RowOrder::BitEqual);
        conforms(&device, &Filter::new("alone and together"));
    }
}
