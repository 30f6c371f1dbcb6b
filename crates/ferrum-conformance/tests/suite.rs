//! The suite on every backend of this machine, and the proof that it is able to fail.

use ferrum_conformance::minimal::Minimal;
use ferrum_conformance::{
    Filter, Report, cases, run_absent, run_collective, run_core, run_cpu, run_gpu, run_graph,
    run_paged, run_precision, run_reference, run_sample, run_timer, self_check,
};
use ferrum_kernels::cpu::{CpuBackend, CpuConfig, Isa};
use ferrum_kernels::gpu::GpuBackend;
use ferrum_kernels::{Backend, KvF32, KvInt8, LlmBackend};
use ferrum_test_support::skip;
use ferrum_types::Error;

fn expect_no_failures(report: &Report) {
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
fn reference() {
    let report = run_reference(&Filter::all());
    println!("{}", report.table());
    expect_no_failures(&report);
}

/// Activations of 16 bits, with the residual stream and logits in f32.
mod precision {
    use super::*;
    use ferrum_kernels::reference::{Mixed, Precision};
    use half::{bf16, f16};

    fn conforms<P: Precision>() {
        let report = run_precision::<P>(&Filter::all());
        println!("{}", report.table());
        expect_no_failures(&report);
    }

    macro_rules! precisions {
        ($($test:ident: $precision:ty,)*) => {$(
            #[test]
            fn $test() {
                conforms::<$precision>();
            }
        )*};
    }
    precisions! {
        bf16_activations: Mixed<bf16>,
        f16_activations: Mixed<f16>,
    }
}

/// The suite on [`Minimal`].
fn run_minimal(filter: &Filter) -> Report {
    fn whole(_: &impl LlmBackend) {}
    let device = Minimal::default();
    whole(&device);
    let mut report = Report::new(Minimal::NAME);
    run_core(&device, filter, &mut report);
    run_paged::<_, KvF32>(&device, filter, &mut report);
    run_paged::<_, KvInt8>(&device, filter, &mut report);
    run_graph(&device, filter, &mut report);
    run_sample(&device, filter, &mut report);
    run_collective(&device, filter, &mut report);
    run_timer(&device, filter, &mut report);
    report
}

/// The required functions, and the provided ones on top of them.
#[test]
fn minimal() {
    let report = run_minimal(&Filter::all());
    println!("{}", report.table());
    expect_no_failures(&report);
}

/// Every level that this CPU has, each by itself: an emulator takes long for one.
mod cpu {
    use super::*;

    /// The suite at one level, with threads at the best.
    fn conforms(isa: Isa) {
        if !isa.is_available() {
            skip(format_args!("this machine has no {isa}"));
            return;
        }
        let threads = Some(if isa == Isa::best() { 3 } else { 1 });
        let config = CpuConfig {
            isa: Some(isa),
            threads,
        };
        let device = CpuBackend::with_config(config).expect("the CPU opens");
        let report = run_cpu(&device, &Filter::all());
        let table = report.table();
        println!("{} with {threads:?} threads\n{table}", isa.name());
        expect_no_failures(&report);
    }

    macro_rules! levels {
        ($($test:ident: $isa:ident,)*) => {
            $(#[test]
            fn $test() {
                conforms(Isa::$isa);
            })*

            #[test]
            fn every_level_has_a_test() {
                assert_eq!(Isa::ALL.len(), [$(Isa::$isa),*].len());
            }
        };
    }
    levels! {
        scalar: Scalar,
        sse2: Sse2,
        avx2: Avx2,
        avx_vnni: AvxVnni,
        avx512: Avx512,
        avx512_bf16: Avx512Bf16,
        amx: Amx,
        amx_f32: AmxF32,
        neon: Neon,
        neon_dotprod: NeonDot,
    }
}

#[test]
fn gpu() {
    let device = match GpuBackend::open(0) {
        Ok(device) => device,
        Err(Error::NoDevice { reason, .. }) => {
            skip(format_args!("no Vulkan device ({reason})"));
            return;
        }
        Err(error) => panic!("opening the gpu: {error}"),
    };
    let report = run_gpu(&device, &Filter::all());
    println!("{:?}\n{}", device.info(), report.table());
    expect_no_failures(&report);
}

#[test]
fn an_absent_device_skips_everything() {
    let filter = Filter::new("gemm_quant Q8_0");
    let (absent, reference) = (
        run_absent("gpu", "no device", &filter),
        run_reference(&filter),
    );
    let (absent, reference) = (absent.counts(), reference.counts());
    assert_eq!((absent.passed, absent.failed), (0, 0));
    assert_eq!(absent.skipped, reference.passed);
    assert!(absent.skipped > 10);
}

/// A case has a name of its own, so that it can be run alone.
#[test]
fn names_are_unique() {
    let mut names = std::collections::BTreeSet::new();
    for case in cases() {
        let name = format!("{} {} {}", case.op, case.dtype, case.name);
        assert!(names.insert(name.clone()), "two cases are called {name}");
    }
}

#[test]
fn parts_make_all_cases() {
    let parts = [0, 1].map(|part| Filter::all().part(part, 2));
    let mut counts = [0; 2];
    for case in cases() {
        let wanted: Vec<_> = (0..2).filter(|&part| parts[part].matches(&case)).collect();
        let [only] = wanted[..] else {
            panic!("{} {} is in {wanted:?}", case.op, case.name);
        };
        counts[only] += 1;
    }
    assert!(counts.iter().all(|&count| count > 300), "{counts:?}");
}

/// Every case that compares numbers fails when one of them is wrong, missing or one too many.
#[test]
fn every_case_notices_a_wrong_result() {
    let unnoticed = self_check(&Filter::all());
    assert!(unnoticed.is_empty(), "{}", unnoticed.join("\n"));
    let cases = cases();
    let comparing = cases.iter().filter(|case| case.compares).count();
    assert!(
        comparing * 10 > cases.len() * 8,
        "{comparing} of {} compare",
        cases.len()
    );
}
