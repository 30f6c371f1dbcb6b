//! Order of recorded work, submissions, memory in a steady state, errors of the device, time.

use super::{compare, gpu, noise, open_with};
use crate::backend::*;
use crate::gpu::core::lock;
use crate::gpu::{GpuApi, GpuBackend, GpuConfig};
use ferrum_types::{Error, SrcDtype};

type B = GpuBackend;

#[test]
fn a_write_is_not_seen_by_earlier_work() {
    let Some(device) = gpu() else { return };
    let mut ctx = device.new_context().expect("context");
    let mut x = device.from_slice(&[1.0f32; 8]).expect("x");
    let mut before = device.alloc(8).expect("before");
    let mut after = device.alloc(8).expect("after");
    let ones = device.from_slice(&[1.0f32; 8]).expect("ones");
    B::mul(&mut ctx, &x, &ones, &mut before, 8).expect("mul");
    B::write(&mut ctx, &mut x, 2, &[5.0, 6.0]).expect("write");
    B::mul(&mut ctx, &x, &ones, &mut after, 8).expect("mul");
    B::write(&mut ctx, &mut x, 0, &[9.0; 8]).expect("write");
    assert_eq!(B::to_vec(&mut ctx, &before).expect("read"), [1.0; 8]);
    let after = B::to_vec(&mut ctx, &after).expect("read");
    assert_eq!(after, [1.0, 1.0, 5.0, 6.0, 1.0, 1.0, 1.0, 1.0]);
    assert_eq!(B::to_vec(&mut ctx, &x).expect("read"), [9.0; 8]);
}

#[test]
fn large_writes_keep_the_order_too() {
    let Some(device) = gpu() else { return };
    let mut ctx = device.new_context().expect("context");
    let len = 3 << 20;
    let mut x = device.from_slice(&vec![1.0f32; len]).expect("x");
    let mut before = device.alloc(len).expect("before");
    B::copy_slice(&mut ctx, &x, 0, &mut before, 0, len).expect("copy");
    B::write(&mut ctx, &mut x, 0, &vec![2.0; len]).expect("write");
    B::scale_inplace(&mut ctx, &mut x, 2.0, len).expect("scale");
    assert!(
        B::to_vec(&mut ctx, &before)
            .expect("read")
            .iter()
            .all(|&v| v == 1.0)
    );
    assert!(
        B::to_vec(&mut ctx, &x)
            .expect("read")
            .iter()
            .all(|&v| v == 4.0)
    );
}

#[test]
fn elements_smaller_than_a_word() {
    for (from, to, len) in [
        (0, 0, 0),
        (0, 0, 4),
        (1, 0, 3),
        (3, 2, 9),
        (5, 7, 1),
        (2, 6, 8),
        (7, 1, 9),
    ] {
        compare!(format!("bytes {from} {to} {len}"), 0.0, |dev, ctx| {
            let data: Vec<u8> = (1..17).collect();
            let src = dev.from_slice(&data)?;
            let mut dst = dev.from_slice(&[100u8; 19])?;
            B::copy_slice(ctx, &src, from, &mut dst, to, len)?;
            let mut written = dev.from_slice(&[50u8; 19])?;
            B::write(ctx, &mut written, to, &data[from..from + len])?;
            let mut part = vec![0u8; len];
            B::read(ctx, &dst, to, &mut part)?;
            let mut all = B::to_vec(ctx, &dst)?;
            all.extend(B::to_vec(ctx, &written)?);
            all.extend(part);
            Ok(all.into_iter().map(f32::from).collect())
        });
    }
}

#[test]
fn nothing_is_no_work() {
    compare!("nothing", 0.0, |dev, ctx| {
        let mut empty = dev.alloc::<f32>(0)?;
        assert!(empty.is_empty());
        B::write(ctx, &mut empty, 0, &[])?;
        B::scale_inplace(ctx, &mut empty, 2.0, 0)?;
        let shape = NormShape {
            rows: 0,
            dim: 0,
            eps: 0.0,
        };
        let weight = dev.alloc::<f32>(0)?;
        let x = dev.alloc::<f32>(0)?;
        B::rms_norm(ctx, &x, &weight, &mut empty, shape)?;
        B::qk_norm_rope(
            ctx,
            &mut empty,
            HeadLayout::TokenMajor,
            None,
            None,
            HeadsShape {
                tokens: 0,
                heads: 3,
                head_dim: 4,
            },
        )?;
        B::sync(ctx)?;
        B::to_vec(ctx, &empty)
    });
}

#[test]
fn a_steady_step_is_one_submission_and_no_allocation() {
    // A device of its own: memory comes back when somebody polls, and here that is this context.
    let Some(device) = open_with(GpuConfig::default()) else {
        return;
    };
    let mut ctx = device.new_context().expect("context");
    let dim = 64;
    let bytes: Vec<u8> = noise(1, dim * dim)
        .iter()
        .flat_map(|x| x.to_le_bytes())
        .collect();
    let shape = MatShape {
        rows: dim,
        cols: dim,
    };
    let w = device
        .from_weight_bytes(&bytes, SrcDtype::F32, shape)
        .expect("weight");
    let mut ids = device.alloc::<i32>(1).expect("ids");
    let mut x = device.alloc(dim).expect("x");
    let mut y = device.alloc(dim).expect("y");
    let mut best = device.alloc::<i32>(1).expect("best");
    let row = RowShape { rows: 1, dim };
    let gemm = GemmShape {
        rows: 1,
        n: dim,
        k: dim,
    };
    let mut allocations = 0;
    for step in 0..20 {
        let before = ctx.submissions();
        B::write(&mut ctx, &mut ids, 0, &[step]).expect("write");
        B::embedding_lookup(&mut ctx, &w, &ids, &mut x, row).expect("lookup");
        for _ in 0..600 {
            B::gemm(&mut ctx, &x, &w, &mut y, gemm).expect("gemm");
            B::copy_slice(&mut ctx, &y, 0, &mut x, 0, dim).expect("copy");
        }
        B::argmax_rows(&mut ctx, &y, &mut best, row).expect("argmax");
        let mut token = [0];
        B::read(&mut ctx, &best, 0, &mut token).expect("read");
        assert_eq!(ctx.submissions(), before + 1, "step {step}");
        if step == 2 {
            allocations = ctx.allocations();
        }
    }
    assert_eq!(ctx.allocations(), allocations);
}

#[test]
fn dropped_buffers_leave_the_cache() {
    let Some(device) = open_with(GpuConfig::default()) else {
        return;
    };
    let mut ctx = device.new_context().expect("context");
    let y = device.from_slice(&[1.0f32; 4]).expect("y");
    for _ in 0..10 {
        let mut x = device.from_slice(&[1.0f32; 4]).expect("x");
        B::add_inplace(&mut ctx, &mut x, &y, 4).expect("add");
        drop(x);
        // Dropped before its work was submitted: the work still runs.
        B::sync(&mut ctx).expect("sync");
    }
    assert_eq!(lock(&device.shared.pipelines).cached_groups(), 0);
    // The device lives as long as what is on it.
    drop(device);
    drop(y);
}

#[test]
fn a_context_runs_what_it_has_when_dropped() {
    let Some(device) = gpu() else { return };
    let mut x = device.from_slice(&[1.0f32; 4]).expect("x");
    let mut first = device.new_context().expect("context");
    B::scale_inplace(&mut first, &mut x, 3.0, 4).expect("scale");
    drop(first);
    let mut second = device.new_context().expect("context");
    assert_eq!(B::to_vec(&mut second, &x).expect("read"), [3.0; 4]);
}

#[test]
fn short_buffers_are_shape_errors() {
    let Some(device) = gpu() else { return };
    let mut ctx = device.new_context().expect("context");
    let shape = RowShape { rows: 2, dim: 3 };
    let x = device.alloc::<f32>(5).expect("x");
    let mut out = device.alloc::<i32>(2).expect("out");
    let found = B::argmax_rows(&mut ctx, &x, &mut out, shape);
    let expected = Error::Shape {
        op: "argmax_rows",
        what: "x",
        found: 5,
        expected: 6,
    };
    assert_eq!(found, Err(expected));
    let mut bytes = [0f32; 6];
    assert!(matches!(
        B::read(&mut ctx, &x, 0, &mut bytes),
        Err(Error::Shape { .. })
    ));
    assert!(matches!(
        B::read(&mut ctx, &x, usize::MAX, &mut bytes),
        Err(Error::InvalidArgument { .. })
    ));
    let too_many = RowShape {
        rows: usize::MAX,
        dim: 3,
    };
    assert!(matches!(
        B::argmax_rows(&mut ctx, &x, &mut out, too_many),
        Err(Error::InvalidArgument { .. })
    ));
}

#[test]
fn a_lost_device_is_an_error() {
    let Some(device) = open_with(GpuConfig::default()) else {
        return;
    };
    let mut ctx = device.new_context().expect("context");
    let mut x = device.from_slice(&[1.0f32; 4]).expect("x");
    B::scale_inplace(&mut ctx, &mut x, 2.0, 4).expect("scale");
    B::sync(&mut ctx).expect("sync");
    device.shared.device.destroy();
    // Recording may or may not notice; waiting and reading do.
    let _ = B::write(&mut ctx, &mut x, 0, &[2.0]);
    let _ = B::scale_inplace(&mut ctx, &mut x, 2.0, 4);
    for _ in 0..2 {
        let error = B::read(&mut ctx, &x, 0, &mut [0.0; 4]).expect_err("the device is gone");
        assert!(
            matches!(
                error,
                Error::Device {
                    backend: "vulkan" | "metal",
                    ..
                }
            ),
            "{error}"
        );
        let error = B::sync(&mut ctx).expect_err("the device is gone");
        assert!(matches!(error, Error::Device { .. }), "{error}");
    }
    assert!(device.from_slice(&[0u8; 100]).is_err() || B::sync(&mut ctx).is_err());
}

#[test]
fn validation_errors_come_out_at_the_next_sync() {
    let Some(device) = open_with(GpuConfig::default()) else {
        return;
    };
    let mut ctx = device.new_context().expect("context");
    let x = device.from_slice(&[1.0f32; 4]).expect("x");
    // Overlapping on purpose, which the typed API never is.
    ctx.copy_words((&x.raw, 4), (&x.raw, 0), 4);
    let error = B::sync(&mut ctx).expect_err("one buffer twice");
    assert!(matches!(error, Error::Device { .. }), "{error}");
    let text = error.to_string();
    assert!(
        text.contains("Source and destination") && !text.contains('\n'),
        "{text}"
    );
    B::sync(&mut ctx).expect("said once");
}

#[test]
fn devices_and_handles() {
    let Some(device) = gpu() else { return };
    let info = device.info();
    assert_eq!(B::devices().first(), Some(&info));
    let api = match info.backend {
        "vulkan" => GpuApi::Vulkan,
        _ => GpuApi::Metal,
    };
    assert_eq!(GpuBackend::devices_of(api).len(), B::devices().len());
    let second = GpuBackend::open_kind(api, 0).expect("the same device once more");
    let mut ctx = second.new_context().expect("context");
    assert_eq!(B::device(&ctx).info(), info);
    let x = second.from_slice(&[1i32, 2, 3]).expect("x");
    drop(second);
    assert_eq!(B::to_vec(&mut ctx, &x).expect("read"), [1, 2, 3]);
}

#[test]
fn spans_nest() {
    let Some(device) = gpu() else { return };
    let mut ctx = device.new_context().expect("context");
    let mut timer = crate::gpu::GpuTimer::new(device).expect("timer");
    let mut x = device.alloc::<f32>(1 << 16).expect("x");
    for _ in 0..2 {
        timer.begin(&mut ctx, "outer").expect("begin");
        timer.begin(&mut ctx, "inner").expect("begin");
        B::scale_inplace(&mut ctx, &mut x, 2.0, 1 << 16).expect("scale");
        timer.end(&mut ctx).expect("end");
        B::scale_inplace(&mut ctx, &mut x, 2.0, 1 << 16).expect("scale");
        timer.end(&mut ctx).expect("end");
        timer.begin(&mut ctx, "later").expect("begin");
        let spans = timer.take_spans(&mut ctx).expect("spans");
        let names: Vec<_> = spans.iter().map(|s| s.name).collect();
        assert_eq!(names, ["outer", "inner"]);
        let end = |s: &Span| s.start_ns + s.duration_ns;
        // Rounding each time to a nanosecond may move a border by one.
        assert!(spans[0].start_ns <= spans[1].start_ns + 1 && end(&spans[1]) <= end(&spans[0]) + 2);
        timer.end(&mut ctx).expect("end");
        let spans = timer.take_spans(&mut ctx).expect("spans");
        assert_eq!(spans.len(), 1);
        assert!(spans[0].start_ns > 0);
    }
    let error = timer.end(&mut ctx).expect_err("none is open");
    assert!(matches!(error, Error::InvalidArgument { .. }));
}
