//! Collectives: the identity of a context that is alone, and groups of two to four ranks, each a thread with a
//! context of its own, on one device or on several.

use crate::case::{Cases, act_name};
use crate::compare::{Tolerance, compare};
use crate::io::{CaseError, Check, wrong};
use crate::runtime::{acts, expect_values};
use ferrum_kernels::{
    BackendCollective, BatchInvariance, GroupHandle, LocalGroup, NormShape, ParallelNorm, ReduceOp,
};
use ferrum_types::{Element, Error, FloatElement, Result, SumSplit};
use half::{bf16, f16};

// ---- one rank --------------------------------------------------------------------------------

/// A new context, which is alone.
fn alone<B: BackendCollective>(device: &B) -> Check<B::Context> {
    let ctx = device.new_context()?;
    let found = (B::world_size(&ctx), B::rank(&ctx));
    expect_values("(world_size, rank)", &found, &(1, 0))?;
    Ok(ctx)
}

fn all_reduce<B: BackendCollective>(device: &B) -> Check {
    let mut ctx = alone(device)?;
    let data = acts::<B>(&[1.0, -2.0, 3.5, 0.0, 9.0]);
    let mut buffer = device.from_slice(&data)?;
    for op in [ReduceOp::Sum, ReduceOp::Max, ReduceOp::Min] {
        for len in [0, 4, 5] {
            B::all_reduce(&mut ctx, &mut buffer, len, op)?;
            expect_values(
                "all_reduce of one rank",
                &B::to_vec(&mut ctx, &buffer)?,
                &data,
            )?;
        }
        if !matches!(
            B::all_reduce(&mut ctx, &mut buffer, 6, op),
            Err(Error::Shape { .. })
        ) {
            return wrong("all_reduce of 6 in a buffer of 5 gave no shape error");
        }
    }
    Ok(())
}

fn all_gather<B: BackendCollective>(device: &B) -> Check {
    let mut ctx = alone(device)?;
    let src = device.from_slice(&acts::<B>(&[1.0, -2.0, 3.5]))?;
    let mut dst = device.from_slice(&acts::<B>(&[7.0; 4]))?;
    B::all_gather(&mut ctx, &src, &mut dst, 3)?;
    let expected = acts::<B>(&[1.0, -2.0, 3.5, 7.0]);
    expect_values(
        "all_gather of one rank",
        &B::to_vec(&mut ctx, &dst)?,
        &expected,
    )?;
    match B::all_gather(&mut ctx, &src, &mut dst, 4) {
        Err(Error::Shape { .. }) => Ok(()),
        other => wrong(format!("all_gather of 4 from a buffer of 3 gave {other:?}")),
    }
}

fn broadcast<B: BackendCollective>(device: &B) -> Check {
    let mut ctx = alone(device)?;
    let data = acts::<B>(&[1.0, -2.0, 3.5]);
    let mut buffer = device.from_slice(&data)?;
    B::broadcast(&mut ctx, &mut buffer, 3, 0)?;
    expect_values(
        "broadcast of one rank",
        &B::to_vec(&mut ctx, &buffer)?,
        &data,
    )?;
    match B::broadcast(&mut ctx, &mut buffer, 4, 0) {
        Err(Error::Shape { .. }) => {}
        other => return wrong(format!("broadcast of 4 in a buffer of 3 gave {other:?}")),
    }
    match B::broadcast(&mut ctx, &mut buffer, 3, 1) {
        Err(Error::InvalidArgument { .. }) => Ok(()),
        other => wrong(format!(
            "broadcast from a rank that is not there gave {other:?}"
        )),
    }
}

// ---- groups ----------------------------------------------------------------------------------

/// Calls `f` in each of `size` ranks with its number and its device, and gives what they give, by rank. The ranks take the devices in
/// turns.
fn in_group<B: BackendCollective, T: Send>(
    devices: &[B],
    size: usize,
    f: impl Fn(usize, &B, &mut B::Context) -> Result<T> + Sync,
) -> Check<Vec<T>> {
    let run = |end: GroupHandle| -> Result<T> {
        let rank = end.rank();
        let device = &devices[rank % devices.len()];
        let mut ctx = device.new_context()?;
        B::join(&mut ctx, end)?;
        f(rank, device, &mut ctx)
    };
    let results: Vec<Option<Result<T>>> = std::thread::scope(|scope| {
        let ends = LocalGroup::ranks(size).into_iter();
        let threads: Vec<_> = ends.map(|end| scope.spawn(|| run(end))).collect();
        threads.into_iter().map(|t| t.join().ok()).collect()
    });
    let all = results.into_iter().map(|result| match result {
        Some(result) => result.map_err(CaseError::Error),
        None => wrong("a rank panicked"),
    });
    all.collect()
}

/// Reduces `values[rank]` in each rank, and expects `expected` in all of them.
fn reduced<B: BackendCollective, T: Element>(
    devices: &[B],
    op: ReduceOp,
    values: &[Vec<T>],
    expected: &[T],
) -> Check {
    let len = expected.len();
    let found = in_group(devices, values.len(), |rank, device, ctx| {
        // One element more than is reduced, which stays.
        let kept = [values[rank].as_slice(), &[T::zeroed()]].concat();
        let mut buffer = device.from_slice(&kept)?;
        B::all_reduce(ctx, &mut buffer, len, op)?;
        B::to_vec(ctx, &buffer)
    })?;
    let expected = [expected, &[T::zeroed()]].concat();
    for (rank, found) in found.iter().enumerate() {
        expect_values(
            &format!("{op:?} of {} on rank {rank}", T::DTYPE),
            found,
            &expected,
        )?;
    }
    Ok(())
}

/// Elements of rank `rank`, more than are combined at once. All sums are exact in 16 bits.
fn sample(rank: usize) -> impl Iterator<Item = i8> {
    (0..5000usize).map(move |i| ((i * 7 + rank * 13) % 41) as i8 - 20)
}

/// All operations over elements made of integers.
fn reduce_elements<B: BackendCollective, T: Element>(
    devices: &[B],
    size: usize,
    make: fn(i8) -> T,
) -> Check {
    let values: Vec<Vec<T>> = (0..size)
        .map(|rank| sample(rank).map(make).collect())
        .collect();
    for (op, combine) in [
        (ReduceOp::Sum, (|a, b| a + b) as fn(i8, i8) -> i8),
        (ReduceOp::Max, |a, b| a.max(b)),
        (ReduceOp::Min, |a, b| a.min(b)),
    ] {
        let mut expected: Vec<i8> = sample(0).collect();
        for rank in 1..size {
            let all = expected.iter_mut().zip(sample(rank));
            all.for_each(|(sum, x)| *sum = combine(*sum, x));
        }
        let expected: Vec<T> = expected.into_iter().map(make).collect();
        reduced(devices, op, &values, &expected)?;
    }
    Ok(())
}

fn group_reduce<B: BackendCollective>(devices: &[B], size: usize) -> Check {
    reduce_elements::<B, f32>(devices, size, f32::from)?;
    reduce_elements::<B, f16>(devices, size, |x| f16::from_f32(x.into()))?;
    reduce_elements::<B, bf16>(devices, size, |x| bf16::from_f32(x.into()))?;
    reduce_elements::<B, i32>(devices, size, i32::from)
}

/// Sums of 16-bit elements are made in f32, and all sums as balanced trees, unless devices that exchange by themselves
/// promise no order.
fn order_of_sums<B: BackendCollective>(devices: &[B]) -> Check {
    if devices.len() > 1 && devices[0].batch_invariance() != BatchInvariance::BitExact {
        return Ok(());
    }
    // 2048 + 1 is no f16: in f16, the first sum would lose the 1.
    let halves = [2048.0, 1.0, 1.0].map(|x| vec![f16::from_f32(x)]);
    reduced(devices, ReduceOp::Sum, &halves, &[f16::from_f32(2050.0)])?;
    // (2²⁴ + 1) − 2²⁴ is 0 in this order, and 1 in others.
    let order = [16_777_216.0f32, 1.0, -16_777_216.0].map(|x| vec![x]);
    reduced(devices, ReduceOp::Sum, &order, &[0.0])?;
    // (2²⁴ + 1) + (1 − 2²⁴) is 1, and 0 where one rank is added after the other.
    let tree = [16_777_216.0f32, 1.0, 1.0, -16_777_216.0].map(|x| vec![x]);
    reduced(devices, ReduceOp::Sum, &tree, &[1.0])
}

fn group_gather<B: BackendCollective>(devices: &[B], size: usize) -> Check {
    let (rows, len) = (3, 5);
    // Rank r has r + 1 columns; element = 100 · rank + 10 · row + column.
    let dims: Vec<usize> = (1..=size).collect();
    let value = |rank, row, col| (100 * rank + 10 * row + col) as f32;
    let found = in_group(devices, size, |rank, device, ctx| {
        let own: Vec<f32> = (0..rows)
            .flat_map(|row| (0..=rank).map(move |col| value(rank, row, col)))
            .collect();
        let width: usize = dims.iter().sum();
        let (src, mut dst) = (
            device.from_slice(&acts::<B>(&own))?,
            device.alloc(rows * width)?,
        );
        B::all_gather_rows(ctx, &src, &mut dst, rows, &dims)?;
        let mut flat = device.alloc::<i32>(size * len)?;
        let src = device.from_slice(&[rank as i32; 6])?;
        B::all_gather(ctx, &src, &mut flat, len)?;
        Ok((B::to_vec(ctx, &dst)?, B::to_vec(ctx, &flat)?))
    })?;
    let row =
        |row| (0..size).flat_map(move |rank| (0..=rank).map(move |col| value(rank, row, col)));
    let expected = acts::<B>(&(0..rows).flat_map(row).collect::<Vec<f32>>());
    let flat: Vec<i32> = (0..size).flat_map(|rank| [rank as i32; 5]).collect();
    for (rank, (gathered, ids)) in found.iter().enumerate() {
        expect_values(&format!("the rows on rank {rank}"), gathered, &expected)?;
        expect_values(&format!("the elements on rank {rank}"), ids, &flat)?;
    }
    // A width too few is noticed before anything is exchanged.
    let refused = in_group(devices, size, |_, device, ctx| {
        let (src, mut dst) = (device.alloc::<B::Act>(size)?, device.alloc::<B::Act>(size)?);
        Ok(B::all_gather_rows(ctx, &src, &mut dst, 1, &dims[1..]).err())
    })?;
    match refused
        .iter()
        .all(|e| matches!(e, Some(Error::InvalidArgument { .. })))
    {
        true => Ok(()),
        false => wrong(format!("a width too few gave {refused:?}")),
    }
}

fn group_broadcast<B: BackendCollective>(devices: &[B], size: usize) -> Check {
    for root in 0..size {
        let found = in_group(devices, size, |rank, device, ctx| {
            let mut buffer = device.from_slice(&acts::<B>(&[rank as f32 + 1.0; 4]))?;
            B::broadcast(ctx, &mut buffer, 3, root)?;
            B::to_vec(ctx, &buffer)
        })?;
        for (rank, found) in found.iter().enumerate() {
            let mut expected = [root as f32 + 1.0; 4];
            expected[3] = rank as f32 + 1.0;
            let what = format!("the broadcast of {root} on rank {rank}");
            expect_values(&what, found, &acts::<B>(&expected))?;
        }
    }
    Ok(())
}

/// Rows that ranks share: rank r has r + 1 groups of columns, and another rank has those of the last rank, too.
fn group_norm<B: BackendCollective>(devices: &[B], size: usize) -> Check {
    let (rows, group, eps) = (3, 5, 1e-5);
    let starts: Vec<usize> = (0..=size).map(|r| group * r * (r + 1) / 2).collect();
    let dim = starts[size];
    // Rows of other magnitudes.
    let x: Vec<f32> = (0..rows * dim)
        .map(|i| ((i * 37 % 101) as f32 / 50.0 - 1.0) * 10f32.powi((i / dim) as i32 - 1))
        .collect();
    let x: Vec<f32> = acts::<B>(&x).iter().map(|x| x.to_f32()).collect();
    let weight: Vec<f32> = (0..dim).map(|i| 0.5 + (i % 7) as f32 / 4.0).collect();
    let found = in_group(devices, size + 1, |rank, device, ctx| {
        let range = match rank == size {
            true => starts[size - 1]..starts[size],
            false => starts[rank]..starts[rank + 1],
        };
        let own: Vec<f32> = x
            .chunks_exact(dim)
            .flat_map(|row| &row[range.clone()])
            .copied()
            .collect();
        let (own, weight) = (
            device.from_slice(&acts::<B>(&own))?,
            device.from_slice(&weight[range.clone()])?,
        );
        let mut out = device.alloc(rows * range.len())?;
        let part = NormShape {
            rows,
            dim: range.len(),
            eps,
        };
        let shape = ParallelNorm {
            part,
            dim,
            counts: rank < size,
            sums: SumSplit::WHOLE,
        };
        B::rms_norm_parallel(ctx, &own, &weight, &mut out, shape)?;
        Ok((range, B::to_vec(ctx, &out)?))
    })?;
    let tolerance = Tolerance::NORM.for_element(B::Act::DTYPE);
    for (rank, (range, found)) in found.iter().enumerate() {
        for (row, found) in found.chunks_exact(range.len()).enumerate() {
            let whole = &x[row * dim..][..dim];
            let squares: f64 = whole.iter().map(|&x| f64::from(x).powi(2)).sum();
            let factor = 1.0 / (squares / dim as f64 + f64::from(eps)).sqrt();
            let normed = |i: usize| f64::from(whole[i]) * factor * f64::from(weight[i]);
            let expected: Vec<f64> = range.clone().map(normed).collect();
            let found: Vec<f64> = found.iter().map(|x| f64::from(x.to_f32())).collect();
            let what = format!("row {row} on rank {rank}");
            compare(&what, &found, &expected, tolerance).map_err(CaseError::Wrong)?;
        }
    }
    Ok(())
}

/// A context that is alone norms whole rows, and is refused parts of them.
fn norm_of_one<B: BackendCollective>(device: &B) -> Check {
    let mut ctx = alone(device)?;
    let x = device.from_slice(&acts::<B>(&[1.0, -2.0, 3.5, 0.25, 9.0, 0.0]))?;
    let weight = device.from_slice(&[1.0, 0.5, 2.0])?;
    let (mut out, mut expected) = (device.alloc::<B::Act>(6)?, device.alloc::<B::Act>(6)?);
    let part = NormShape {
        rows: 2,
        dim: 3,
        eps: 1e-6,
    };
    let shape = |dim| ParallelNorm {
        part,
        dim,
        counts: true,
        sums: SumSplit::WHOLE,
    };
    B::rms_norm_parallel(&mut ctx, &x, &weight, &mut out, shape(3))?;
    B::rms_norm(&mut ctx, &x, &weight, &mut expected, part)?;
    let expected = B::to_vec(&mut ctx, &expected)?;
    expect_values(
        "rms_norm_parallel of one rank",
        &B::to_vec(&mut ctx, &out)?,
        &expected,
    )?;
    for dim in [2, 4] {
        match B::rms_norm_parallel(&mut ctx, &x, &weight, &mut out, shape(dim)) {
            Err(Error::InvalidArgument { .. }) => {}
            other => return wrong(format!("3 of {dim} columns without a group gave {other:?}")),
        }
    }
    Ok(())
}

/// A rank that leaves after one collective, in the second of which the others are.
fn leaving<B: BackendCollective>(devices: &[B], size: usize) -> Check {
    let found = in_group(devices, size, |rank, device, ctx| {
        let mut buffer = device.from_slice(&acts::<B>(&[1.0; 4]))?;
        B::all_reduce(ctx, &mut buffer, 4, ReduceOp::Sum)?;
        if rank == 0 {
            return Ok(None);
        }
        // A device that exchanges by itself reports it to the thread that waits for it.
        let first = B::all_reduce(ctx, &mut buffer, 4, ReduceOp::Sum);
        let first = first.and_then(|()| B::sync(ctx)).err();
        let later = B::broadcast(ctx, &mut buffer, 4, rank).err();
        Ok(first.zip(later))
    })?;
    for errors in &found[1..] {
        let named = |error: &Error| {
            let text = error.to_string();
            matches!(error, Error::Device { .. }) && text.contains(&format!("rank 0 of {size}"))
        };
        match errors {
            Some((first, later)) if named(first) && named(later) => {}
            other => return wrong(format!("without rank 0, the others got {other:?}")),
        }
    }
    Ok(())
}

/// Ranks that make different collectives, which a device that exchanges by itself does not have to notice.
fn disagreeing<B: BackendCollective>(devices: &[B]) -> Check {
    if devices.len() > 1 {
        return Ok(());
    }
    let found = in_group(devices, 2, |rank, device, ctx| {
        let mut buffer = device.from_slice(&acts::<B>(&[1.0; 4]))?;
        Ok(B::all_reduce(ctx, &mut buffer, 3 + rank, ReduceOp::Sum).err())
    })?;
    match found
        .iter()
        .all(|e| matches!(e, Some(Error::Device { .. })))
    {
        true => Ok(()),
        false => wrong(format!("sums of 3 and of 4 elements gave {found:?}")),
    }
}

/// A context is a rank of one group.
fn joining_twice<B: BackendCollective>(devices: &[B]) -> Check {
    let found = in_group(devices, 2, |rank, _, ctx| {
        let other = LocalGroup::ranks(1).remove(0);
        let sizes = (B::world_size(ctx), B::rank(ctx) == rank);
        Ok((sizes, B::join(ctx, other).err()))
    })?;
    for found in &found {
        if !matches!(found, ((2, true), Some(Error::InvalidArgument { .. }))) {
            return wrong(format!("joining a second group gave {found:?}"));
        }
    }
    Ok(())
}

fn ids_from<B: BackendCollective>(device: &B) -> Check {
    let mut ctx = device.new_context()?;
    let ids: Vec<i32> = (0..3000).collect();
    let ids = device.from_slice(&ids)?;
    let mut out = device.from_slice(&[7; 3000])?;
    B::ids_from(&mut ctx, &ids, &mut out, 10, 2999)?;
    let mut expected: Vec<i32> = (-10..2990).collect();
    expected[2999] = 7;
    expect_values("ids less the first", &B::to_vec(&mut ctx, &out)?, &expected)?;
    match B::ids_from(&mut ctx, &ids, &mut out, 10, 3001) {
        Err(Error::Shape { .. }) => Ok(()),
        other => wrong(format!("3001 of 3000 ids gave {other:?}")),
    }
}

/// Adds a case of groups on the device and the others.
fn group_case<B: BackendCollective>(
    cases: &mut Cases<B>,
    label: (&'static str, &'static str, &str),
    others: &[B],
    run: impl Fn(&[B]) -> Check + 'static,
) {
    let others = others.to_vec();
    cases.check(label, move |device: &B| {
        let mut devices = vec![device.clone()];
        devices.extend_from_slice(&others);
        run(&devices)
    });
}

/// Every case of [`BackendCollective`], with groups on the device and `others`.
pub(crate) fn cases<B: BackendCollective>(others: &[B]) -> Cases<B> {
    let act = act_name::<B>();
    let mut cases = Cases::new();
    cases.check(("all_reduce", act, "one rank"), all_reduce::<B>);
    cases.check(("all_gather", act, "one rank"), all_gather::<B>);
    cases.check(("broadcast", act, "one rank"), broadcast::<B>);
    cases.check(("rms_norm_parallel", act, "one rank"), norm_of_one::<B>);
    cases.check(("ids_from", "i32", "part of a vocabulary"), ids_from::<B>);
    let mut add = |op, dtype, name: &str, run: fn(&[B]) -> Check| {
        group_case(&mut cases, (op, dtype, name), others, run);
    };
    add("all_reduce", "-", "2 ranks", |d| group_reduce(d, 2));
    add("all_reduce", "-", "3 ranks", |d| group_reduce(d, 3));
    add("all_reduce", "-", "4 ranks", |d| group_reduce(d, 4));
    add("all_reduce", "-", "order of sums", order_of_sums);
    add("all_reduce", act, "2 ranks, one leaves", |d| leaving(d, 2));
    add("all_reduce", act, "3 ranks, one leaves", |d| leaving(d, 3));
    add("all_reduce", act, "ranks that disagree", disagreeing);
    add("all_gather", act, "2 ranks", |d| group_gather(d, 2));
    add("all_gather", act, "3 ranks", |d| group_gather(d, 3));
    add("all_gather", act, "4 ranks", |d| group_gather(d, 4));
    add("broadcast", act, "2 ranks", |d| group_broadcast(d, 2));
    add("broadcast", act, "3 ranks", |d| group_broadcast(d, 3));
    let op = "rms_norm_parallel";
    add(op, act, "3 ranks, two of which hold the same", |d| {
        group_norm(d, 2)
    });
    add(op, act, "4 ranks, two of which hold the same", |d| {
        group_norm(d, 3)
    });
    add("join", "-", "a second group", joining_twice);
    cases
}
