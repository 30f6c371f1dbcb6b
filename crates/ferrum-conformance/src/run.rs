//! The parts of the suite, and which of them each backend of the workspace is put through.

use crate::case::{Case, Cases, Filter};
use crate::io::Fault;
use crate::report::{Outcome, Report};
use crate::{
    collective, core, gguf, layers, linear_attention, marlin, moe, paged, runtime, sample, state,
};
use ferrum_kernels::cpu::CpuBackend;
#[cfg(feature = "cuda")]
use ferrum_kernels::cuda::{CudaAct, CudaBackend};
#[cfg(feature = "gpu")]
use ferrum_kernels::gpu::GpuBackend;
use ferrum_kernels::reference::{Precision, Reference, ReferenceBackend, Uniform};
use ferrum_kernels::{
    Backend, BackendCollective, BackendGraph, BackendInt8KvOps, BackendKvDtype,
    BackendMarlinExperts, BackendMoeFused, BackendQuantExperts, BackendQuantGguf,
    BackendQuantMarlin, BackendSample, BackendState, KvBf16, KvDtypeKind, KvF32, KvFp8, KvFp16,
    KvInt8,
};
#[cfg(feature = "cuda")]
use half::{bf16, f16};

/// Runs the cases of [`Backend`] itself.
pub fn run_core<B: Backend>(device: &B, filter: &Filter, report: &mut Report) {
    core::cases::<B>().run(device, filter, report);
}

/// Runs the cases of a paged cache of `K`.
pub fn run_paged<B, K>(device: &B, filter: &Filter, report: &mut Report)
where
    B: BackendKvDtype<K>,
    K: KvDtypeKind,
    ReferenceBackend: BackendKvDtype<K>,
{
    paged::cases::<B, K>().run(device, filter, report);
}

/// Runs the cases of the INT8 cache under its own names.
pub fn run_int8_kv<B: BackendInt8KvOps>(device: &B, filter: &Filter, report: &mut Report) {
    paged::int8_cases::<B>().run(device, filter, report);
}

/// Runs the cases of recurrent states.
pub fn run_state<B: BackendState>(device: &B, filter: &Filter, report: &mut Report) {
    state::cases::<B>().run(device, filter, report);
    linear_attention::cases::<B>().run(device, filter, report);
}

/// Runs the cases of GGUF weights.
pub fn run_gguf<B: BackendQuantGguf>(device: &B, filter: &Filter, report: &mut Report) {
    gguf::cases::<B>().run(device, filter, report);
}

/// Runs the cases of GPTQ and AWQ weights and of other layers of quantised checkpoints.
pub fn run_marlin<B: BackendQuantMarlin>(device: &B, filter: &Filter, report: &mut Report) {
    marlin::cases::<B>().run(device, filter, report);
    layers::cases::<B>().run(device, filter, report);
}

/// Runs the cases of mixtures of experts over dense stacks.
pub fn run_moe<B: BackendMoeFused>(device: &B, filter: &Filter, report: &mut Report) {
    moe::cases::<B>().run(device, filter, report);
}

/// Runs the cases of mixtures of experts over GGUF stacks.
pub fn run_moe_gguf<B>(device: &B, filter: &Filter, report: &mut Report)
where
    B: BackendQuantExperts,
{
    moe::gguf_cases::<B>().run(device, filter, report);
}

/// Runs the cases of mixtures of experts over GPTQ and AWQ stacks.
pub fn run_moe_marlin<B>(device: &B, filter: &Filter, report: &mut Report)
where
    B: BackendMarlinExperts,
{
    moe::marlin_cases::<B>().run(device, filter, report);
}

/// Runs the cases of captured steps.
pub fn run_graph<B>(device: &B, filter: &Filter, report: &mut Report)
where
    B: BackendGraph + BackendKvDtype<KvF32>,
{
    runtime::graph_cases::<B>().run(device, filter, report);
}

/// Runs the cases of sampling.
pub fn run_sample<B: BackendSample>(device: &B, filter: &Filter, report: &mut Report) {
    sample::cases::<B>().run(device, filter, report);
}

/// Runs the cases of collectives: of a rank that is alone, and of groups of ranks.
pub fn run_collective<B: BackendCollective>(device: &B, filter: &Filter, report: &mut Report) {
    collective::cases::<B>(&[]).run(device, filter, report);
}

/// [`run_collective`], with the ranks of a group on several devices.
///
/// # Panics
/// Without devices.
pub fn run_collective_on<B: BackendCollective>(
    devices: &[B],
    filter: &Filter,
    report: &mut Report,
) {
    collective::cases::<B>(&devices[1..]).run(&devices[0], filter, report);
}

/// Runs the cases of host memory and of timers.
pub fn run_timer<B: Backend>(device: &B, filter: &Filter, report: &mut Report) {
    runtime::host_cases::<B>().run(device, filter, report);
    runtime::timer_cases::<B>().run(device, filter, report);
}

/// Every case, as a backend that can do everything is asked them.
fn all_cases<B>() -> Vec<Case<B>>
where
    B: BackendKvDtype<KvF32>
        + BackendKvDtype<KvFp16>
        + BackendKvDtype<KvBf16>
        + BackendKvDtype<KvFp8>
        + BackendInt8KvOps
        + BackendState
        + BackendQuantExperts
        + BackendMarlinExperts
        + BackendGraph
        + BackendSample
        + BackendCollective,
{
    let lists = [
        core::cases::<B>(),
        paged::cases::<B, KvF32>(),
        paged::cases::<B, KvFp16>(),
        paged::cases::<B, KvBf16>(),
        paged::cases::<B, KvFp8>(),
        paged::cases::<B, KvInt8>(),
        paged::int8_cases::<B>(),
        state::cases::<B>(),
        linear_attention::cases::<B>(),
        gguf::cases::<B>(),
        marlin::cases::<B>(),
        layers::cases::<B>(),
        moe::cases::<B>(),
        moe::gguf_cases::<B>(),
        moe::marlin_cases::<B>(),
        runtime::graph_cases::<B>(),
        sample::cases::<B>(),
        collective::cases::<B>(&[]),
        runtime::host_cases::<B>(),
        runtime::timer_cases::<B>(),
    ];
    lists.into_iter().flat_map(|cases| cases.list).collect()
}

/// Every case, as the reference backend is asked them.
pub fn cases() -> Vec<Case<ReferenceBackend>> {
    all_cases()
}

/// The ops that there are cases of, in the order in which they run.
pub fn ops() -> Vec<&'static str> {
    let mut ops = Vec::new();
    for case in cases() {
        if !ops.contains(&case.op) {
            ops.push(case.op);
        }
    }
    ops
}

/// The whole suite on the reference backend, compared with the formulas of the suite.
pub fn run_reference(filter: &Filter) -> Report {
    run_precision::<Uniform<f32>>(filter)
}

/// [`run_reference`] with other elements.
pub fn run_precision<P: Precision>(filter: &Filter) -> Report {
    let mut report = Report::new(ReferenceBackend::NAME);
    let cases = Cases {
        list: all_cases::<Reference<P>>(),
    };
    cases.run(&Reference::new(), filter, &mut report);
    report
}

/// The whole suite on the CPU backend.
pub fn run_cpu(device: &CpuBackend, filter: &Filter) -> Report {
    let mut report = Report::new(CpuBackend::NAME);
    run_core(device, filter, &mut report);
    run_paged::<_, KvF32>(device, filter, &mut report);
    run_paged::<_, KvFp16>(device, filter, &mut report);
    run_paged::<_, KvBf16>(device, filter, &mut report);
    run_paged::<_, KvFp8>(device, filter, &mut report);
    run_paged::<_, KvInt8>(device, filter, &mut report);
    run_int8_kv(device, filter, &mut report);
    run_state(device, filter, &mut report);
    run_gguf(device, filter, &mut report);
    run_marlin(device, filter, &mut report);
    run_moe(device, filter, &mut report);
    run_moe_gguf(device, filter, &mut report);
    run_moe_marlin(device, filter, &mut report);
    run_graph(device, filter, &mut report);
    run_sample(device, filter, &mut report);
    run_collective(device, filter, &mut report);
    run_timer(device, filter, &mut report);
    report
}

/// The whole suite on the CUDA backend with activations of `A`.
#[cfg(feature = "cuda")]
pub fn run_cuda<A: CudaSuite>(device: &CudaBackend<A>, filter: &Filter) -> Report {
    A::run(device, filter)
}

/// Activations for which the suite is compiled: in this crate once, not in each program that runs it.
#[cfg(feature = "cuda")]
pub trait CudaSuite: CudaAct {
    /// See [`run_cuda`].
    #[doc(hidden)]
    fn run(device: &CudaBackend<Self>, filter: &Filter) -> Report;
}

/// Implements [`CudaSuite`] for elements of activations.
#[cfg(feature = "cuda")]
macro_rules! cuda_suites {
    ($($act:ty)*) => {
        $(impl CudaSuite for $act {
            fn run(device: &CudaBackend<Self>, filter: &Filter) -> Report {
                cuda_suite(device, filter)
            }
        })*
    };
}
#[cfg(feature = "cuda")]
cuda_suites!(bf16 f16);
#[cfg(feature = "cuda-f32")]
cuda_suites!(f32);

#[cfg(feature = "cuda")]
fn cuda_suite<A: CudaAct>(device: &CudaBackend<A>, filter: &Filter) -> Report {
    let mut report = Report::new(CudaBackend::<A>::NAME);
    run_core(device, filter, &mut report);
    run_paged::<_, KvF32>(device, filter, &mut report);
    run_paged::<_, KvFp16>(device, filter, &mut report);
    run_paged::<_, KvBf16>(device, filter, &mut report);
    run_paged::<_, KvFp8>(device, filter, &mut report);
    run_paged::<_, KvInt8>(device, filter, &mut report);
    run_int8_kv(device, filter, &mut report);
    run_state(device, filter, &mut report);
    run_gguf(device, filter, &mut report);
    run_marlin(device, filter, &mut report);
    run_moe(device, filter, &mut report);
    run_moe_gguf(device, filter, &mut report);
    run_moe_marlin(device, filter, &mut report);
    run_graph(device, filter, &mut report);
    run_sample(device, filter, &mut report);
    run_collective(device, filter, &mut report);
    run_timer(device, filter, &mut report);
    report
}

/// The whole suite on the wgpu backend.
#[cfg(feature = "gpu")]
pub fn run_gpu(device: &GpuBackend, filter: &Filter) -> Report {
    let name = device.info().backend;
    let mut report = Report::new(name);
    run_core(device, filter, &mut report);
    run_paged::<_, KvF32>(device, filter, &mut report);
    run_paged::<_, KvFp16>(device, filter, &mut report);
    run_paged::<_, KvBf16>(device, filter, &mut report);
    run_state(device, filter, &mut report);
    let mut lacks = |cases| lacks(name, cases, filter, &mut report);
    lacks(paged::cases::<_, KvFp8>());
    lacks(paged::cases::<_, KvInt8>());
    lacks(paged::int8_cases());
    lacks(gguf::cases());
    lacks(marlin::cases());
    lacks(layers::cases());
    lacks(moe::cases());
    lacks(moe::gguf_cases());
    lacks(moe::marlin_cases());
    run_graph(device, filter, &mut report);
    run_sample(device, filter, &mut report);
    run_collective(device, filter, &mut report);
    run_timer(device, filter, &mut report);
    report
}

/// The whole suite on a device that is not there: every case is skipped, with the reason.
pub fn run_absent(backend: &str, reason: &str, filter: &Filter) -> Report {
    let mut report = Report::new(backend);
    let cases = Cases {
        list: all_cases::<ReferenceBackend>(),
    };
    cases.skip(reason, filter, &mut report);
    report
}

/// Reports cases of a capability that a backend lacks; the reference backend says which they are.
#[cfg(feature = "gpu")]
fn lacks(name: &str, cases: Cases<ReferenceBackend>, filter: &Filter, report: &mut Report) {
    cases.skip(&format!("not implemented by {name}"), filter, report);
}

/// Proves that the suite is able to fail: spoils the first result of every case that compares
/// numbers in three ways (one element wrong, one unwritten, one too many) and returns a line for each
/// case that did not notice.
pub fn self_check(filter: &Filter) -> Vec<String> {
    let mut unnoticed = Vec::new();
    let cases = all_cases::<ReferenceBackend>();
    for case in cases
        .iter()
        .filter(|case| case.compares && filter.matches(case))
    {
        for fault in Fault::ALL {
            let outcome = case.run_with(&ReferenceBackend::new(), fault);
            if !matches!(outcome, Outcome::Failed(_)) {
                let Case {
                    op, dtype, name, ..
                } = case;
                unnoticed.push(format!("{op} {dtype} {name}: {fault:?} gave {outcome:?}"));
            }
        }
    }
    unnoticed
}
