//! Collectives of CUDA ranks with a device each, by NCCL, under the stand-ins of `tools/cuda-emulator`. A program of its own, because
//! the number of devices is one of the process, and so is the count of collectives.

mod support;

use ferrum_conformance::{Filter, Report, run_collective_on};
use ferrum_cuda_emulator::{clear_error, load_devices, lose_rank, nccl_collectives};
use ferrum_kernels::cuda::{CudaAct, CudaBackend, CudaOptions};
use ferrum_kernels::{
    Backend, BackendCollective, BackendGraph, GraphRun, GroupHandle, LocalGroup, ReduceOp,
};
use ferrum_test_support::skip;
use ferrum_types::Result;
use half::{bf16, f16};
use std::sync::{Mutex, PoisonError};
use support::expect_all_passed;

/// One test at a time: they count the collectives of the process.
static ONE: Mutex<()> = Mutex::new(());

/// Devices of the emulator; none without a compiler.
fn opened<A: CudaAct>(count: usize, options: CudaOptions) -> Option<Vec<CudaBackend<A>>> {
    if let Err(reason) = load_devices(4) {
        skip(reason);
        return None;
    }
    let open = |ordinal| CudaBackend::open_with(ordinal, options).expect("the emulator opens");
    Some((0..count).map(open).collect())
}

/// Runs the cases of collectives. Gives how many reductions and gathers NCCL has made.
fn conforms<A: CudaAct>(devices: &[CudaBackend<A>]) -> (u64, u64) {
    let (before, mut report) = (nccl_collectives(), Report::new("cuda"));
    run_collective_on(devices, &Filter::all(), &mut report);
    println!("{}", report.table());
    expect_all_passed(&report);
    let after = nccl_collectives();
    (after.0 - before.0, after.1 - before.1)
}

#[test]
fn ranks_with_a_device_each_exchange_by_nccl() {
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(devices) = opened::<bf16>(4, CudaOptions::default()) else {
        return;
    };
    let (reductions, gathers) = conforms(&devices);
    assert!(reductions > 0 && gathers > 0, "{reductions} {gathers}");
    let Some(devices) = opened::<f16>(4, CudaOptions::default()) else {
        return;
    };
    let (reductions, gathers) = conforms(&devices);
    assert!(reductions > 0 && gathers > 0, "{reductions} {gathers}");
}

/// Sums of floats are gathered and made as trees; maxima and sums of integers are NCCL's.
#[test]
fn devices_that_promise_equal_bits_sum_as_a_tree() {
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(devices) = opened::<f32>(4, CudaOptions::default()) else {
        return;
    };
    assert!(conforms(&devices).1 > 0);
    let options = CudaOptions {
        batch_invariant: true,
    };
    let Some(devices) = opened::<bf16>(4, options) else {
        return;
    };
    assert!(conforms(&devices).1 > 0);
    let Some(devices) = opened::<f16>(4, options) else {
        return;
    };
    assert!(conforms(&devices).1 > 0);
}

/// NCCL refuses ranks that share a device, so their bytes go through host memory.
#[test]
fn ranks_that_share_a_device_go_through_host_memory() {
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(devices) = opened::<f32>(1, CudaOptions::default()) {
        assert_eq!(conforms(&devices), (0, 0));
    }
}

/// Runs `f` in two ranks with a device each.
fn in_two<T: Send>(
    f: impl Fn(usize, &CudaBackend<f32>, &mut <CudaBackend<f32> as Backend>::Context) -> Result<T>
    + Sync,
) -> Option<Vec<Result<T>>> {
    let devices = opened::<f32>(2, CudaOptions::default())?;
    let run = |rank: usize, end| {
        let mut ctx = devices[rank].new_context()?;
        CudaBackend::join(&mut ctx, end)?;
        f(rank, &devices[rank], &mut ctx)
    };
    Some(std::thread::scope(|scope| {
        let ends = LocalGroup::ranks(2).into_iter().enumerate();
        let threads: Vec<_> = ends
            .map(|(rank, end)| scope.spawn(move || run(rank, end)))
            .collect();
        let joined = threads.into_iter().map(|thread| thread.join());
        joined.map(|result| result.expect("no panic")).collect()
    }))
}

/// A captured collective runs again at each replay, with what is in the buffer then.
#[test]
fn collectives_are_captured_and_replayed() {
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    let found = in_two(|rank, device, ctx| {
        let mut buffer = device.from_slice(&[rank as f32 + 1.0; 5])?;
        assert!(!CudaBackend::records_collectives(ctx), "not connected yet");
        CudaBackend::all_reduce(ctx, &mut buffer, 5, ReduceOp::Sum)?;
        assert!(CudaBackend::records_collectives(ctx));
        let mut runs = Vec::new();
        for _ in 0..3 {
            runs.push(CudaBackend::run_graph(ctx, 7, &mut |ctx| {
                CudaBackend::all_reduce(ctx, &mut buffer, 4, ReduceOp::Sum)
            })?);
        }
        let expected = [GraphRun::Captured, GraphRun::Replayed, GraphRun::Replayed];
        assert_eq!(runs, expected);
        CudaBackend::to_vec(ctx, &buffer)
    });
    for found in found.into_iter().flatten() {
        assert_eq!(found, Ok(vec![24.0, 24.0, 24.0, 24.0, 3.0]));
    }
}

/// Rank 0 waits for a collective that rank 1 never comes to, because of what `end` does to its group instead. Gives what rank 0
/// is told.
fn told_without_rank_1(end: impl Fn(&GroupHandle) + Sync) -> Option<String> {
    let found = in_two(|rank, device, ctx| {
        let mut buffer = device.from_slice(&[1.0f32; 4])?;
        CudaBackend::all_reduce(ctx, &mut buffer, 4, ReduceOp::Sum)?;
        CudaBackend::sync(ctx)?;
        if rank == 1 {
            let group = CudaBackend::group(ctx).cloned().expect("a group");
            end(&group);
            while group.failure().is_none() {
                std::thread::yield_now();
            }
            return Ok(Vec::new());
        }
        CudaBackend::all_reduce(ctx, &mut buffer, 4, ReduceOp::Sum)?;
        CudaBackend::to_vec(ctx, &buffer)
    })?;
    let told = found[0].as_ref().expect_err("an error");
    Some(told.to_string())
}

#[test]
fn a_rank_that_fails_ends_what_others_wait_for() {
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    let expected = "rank 1 of 2 ended the group: no more paper";
    let told = told_without_rank_1(|group| group.abort("no more paper"));
    assert!(
        told.as_ref().is_none_or(|told| told.contains(expected)),
        "{told:?}"
    );
}

/// What NCCL finds by itself, a broken link, ends the group with its words.
#[test]
fn a_lost_link_ends_the_group() {
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    let told = told_without_rank_1(|_| lose_rank(true));
    lose_rank(false);
    let expected = "a rank was lost";
    assert!(
        told.as_ref().is_none_or(|told| told.contains(expected)),
        "{told:?}"
    );
}

/// NCCL itself would hang, or mix up bytes; the stand-in tells, and after that its driver takes no work, on either rank. So each
/// rank hears of it from its device, or from the other one, which ended the group for that.
#[test]
fn the_stand_in_notices_ranks_that_disagree() {
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    let found = in_two(|rank, device, ctx| {
        let mut buffer = device.from_slice(&[1.0f32; 4])?;
        CudaBackend::all_reduce(ctx, &mut buffer, 3 + rank, ReduceOp::Sum)?;
        CudaBackend::sync(ctx)
    });
    clear_error();
    for found in found.into_iter().flatten() {
        let text = found.expect_err("an error").to_string();
        assert!(text.contains("calls allgather"), "{text}");
    }
}
