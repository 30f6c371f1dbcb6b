//! That the emulator computes what a card would, and finds what no kernel may do.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod support;

use cudarc::driver::sys;
use std::process::Command;
use std::ptr::null_mut;
use support::{Device, SEED, float, ok, words};

#[test]
fn blocks_warps_and_shared_memory_compute() {
    let Some(device) = Device::open() else { return };
    let numbers: Vec<f32> = (0..256).map(|i| i as f32).collect();
    let (x, out) = (device.upload(&numbers), device.alloc(4096));
    assert_eq!(
        device.run("add", 3, 100, 0, &mut [out, x, float(0.5), 256]),
        ""
    );
    let expected: Vec<f32> = numbers.iter().map(|x| x + 0.5).collect();
    assert_eq!(device.download(out, 256), expected);
    assert_eq!(device.run("block_sum", 1, 128, 0, &mut [out, x, 256]), "");
    assert_eq!(device.download(out, 1), [255.0 * 128.0]);
    assert_eq!(device.run("async_copy", 1, 32, 512, &mut [out, x, 1]), "");
    assert_eq!(device.download(out, 2), [124.0, 120.0]);
    assert_eq!(device.run("warp_turns", 1, 64, 0, &mut [out, x, 1]), "");
    assert_eq!(device.download(out, 2), [18.0, 30.0]);
}

#[test]
fn fragments_lie_as_the_manual_says() {
    let Some(device) = Device::open() else { return };
    let number = |i: usize, seed: usize| ((i * 7 + seed) % 13) as f32 - 6.0;
    let a: Vec<f32> = (0..256).map(|i| number(i, 1)).collect();
    let b: Vec<f32> = (0..128).map(|i| number(i, 5)).collect();
    // Small integers are bf16 numbers with 16 zeros behind.
    let bf16 = |all: &[f32]| -> Vec<u16> {
        let upper = all.iter().map(|x| (x.to_bits() >> 16) as u16);
        upper.collect()
    };
    let (da, db, out) = (
        device.upload(&bf16(&a)),
        device.upload(&bf16(&b)),
        device.alloc(512),
    );
    assert_eq!(device.run("product", 1, 32, 0, &mut [out, da, db]), "");
    let expected: Vec<f32> = (0..128)
        .map(|i| (0..16).map(|k| a[i / 8 * 16 + k] * b[k * 8 + i % 8]).sum())
        .collect();
    assert_eq!(device.download(out, 128), expected);
}

#[test]
fn what_no_kernel_may_do_is_an_error() {
    let errors = [
        ("add", 257, "out of bounds"),
        ("add", 256, ""),
        ("unwritten_memory", 0, "that nothing has written"),
        ("missing_barrier", 0, "shared memory that"),
        ("warp_turns", 0, "a write of shared memory that another"),
        ("unwritten_shared", 0, "that nothing has written"),
        ("behind_shared", 0, "behind the end of shared memory"),
        ("write_race", 0, "two threads write the same shared memory"),
        ("unaligned", 0, "no multiple of 16"),
        ("split_barrier", 0, "wait for ever"),
        ("barriers_of_two_lines", 0, "meet at different barriers"),
        ("barrier_of_any_line", 0, ""),
        ("barrier_of_one_warp", 0, "another number of threads"),
        ("lost_lane", 0, "a lane that takes no part"),
        ("mixed_collectives", 0, "meet at different collectives"),
        ("foreign_mask", 0, "not in the mask of its own collective"),
        ("collective_of_the_gone", 0, "a thread that is not there"),
        ("async_copy", 0, "nothing has written"),
        ("forgotten_copy", 0, "copies that it did not wait for"),
        ("unaligned_copy", 0, "copy that is not aligned"),
    ];
    for (kernel, argument, expected) in errors {
        let Some(device) = Device::open() else { return };
        let (x, out) = (device.upload(&[1f32; 256]), device.alloc(4096));
        let fresh = device.alloc(1024);
        let mut args = match kernel {
            "add" => vec![out, x, 0, argument],
            "unwritten_memory" => vec![out, fresh],
            _ => vec![out, x, 0],
        };
        let found = device.run(
            kernel,
            1,
            if kernel == "add" { 288 } else { 64 },
            1024,
            &mut args,
        );
        match expected {
            "" => assert_eq!(found, ""),
            _ => assert!(
                [expected, kernel, SEED].map(|part| found.contains(part)) == [true; 3],
                "{kernel}: {found:?}"
            ),
        }
    }
}

/// The order of warps is the same when a test is run once more. It is printed for [`seeds_choose_the_order_of_warps`].
#[test]
fn each_test_draws_from_the_beginning() {
    let turns = || {
        let device = Device::open()?;
        let (out, turn) = (device.alloc(32), device.upload(&[0f32]));
        assert_eq!(device.run("warp_order", 1, 256, 0, &mut [out, turn]), "");
        Some(device.download(out, 8))
    };
    let found = turns();
    println!("order {found:?}");
    assert_eq!(turns(), found);
}

#[test]
fn seeds_choose_the_order_of_warps() {
    if Device::open().is_none() {
        return;
    }
    // What the lines of the output that begin so have behind it.
    let printed = |seed: Option<&str>, begin: &str| {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "each_test_draws_from_the_beginning"]);
        command.arg("--nocapture").env_remove(SEED);
        let output = command
            .envs(seed.map(|seed| (SEED, seed)))
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{text}");
        let line = text.lines().find_map(|line| line.strip_prefix(begin));
        line.unwrap_or_else(|| panic!("{text}")).to_owned()
    };
    assert_eq!(printed(Some("2"), "order "), printed(Some("2"), "order "));
    assert_ne!(printed(Some("2"), "order "), printed(Some("3"), "order "));
    let drawn = || printed(None, "CUDA_EMULATOR_SEED=");
    assert_ne!(drawn(), drawn());
}

#[test]
fn freed_memory_is_gone() {
    let Some(device) = Device::open() else { return };
    let (x, out) = (device.upload(&[1f32; 64]), device.alloc(256));
    // SAFETY: the use behind it is what the test is about; addresses of the emulator stay mapped.
    ok(unsafe { sys::cuMemFree_v2(x) });
    let found = device.run("add", 1, 64, 0, &mut [out, x, 0, 64]);
    assert!(found.contains("that was freed"), "{found}");
}

#[test]
fn captured_work_runs_when_it_is_replayed() {
    let Some(device) = Device::open() else { return };
    let x = device.upload(&[1f32; 4]);
    let exec = device.capture(|| {
        assert_ne!(device.finish(), "");
        let mut args = [x, x, float(2.0), 4];
        device.launch("add", [1, 4, 0], false, &mut args);
    });
    assert_eq!(device.download(x, 4), [1.0; 4]);
    // SAFETY: the stream is held.
    unsafe {
        ok(sys::cuGraphLaunch(exec, device.stream));
        ok(sys::cuGraphLaunch(exec, device.stream));
    }
    assert_eq!(device.download(x, 4), [5.0; 4]);
}

/// What a test of early starts does one after the other, with buffers of 64 floats by number.
#[derive(Clone, Copy, Debug)]
enum Step {
    /// `add` writes the first from the second, and is not started early.
    Add(usize, usize),
    /// `early` writes the first from the second behind its wait; it reads the third before, as the kind says.
    Early(usize, usize, usize, How),
    /// The host copies to a buffer, fills it, or has the device copy the second to the first.
    Upload(usize),
    Fill(usize),
    Copy(usize, usize),
    /// The host waits for all, or for what was before an event behind which there is one more `add` to the first from the second.
    Wait,
    WaitBefore(usize, usize),
}

/// The parameter of the kernel `early`.
#[derive(Clone, Copy, Debug)]
enum How {
    Read = 0,
    AsyncCopy = 1,
    Atomic = 2,
    Write = 3,
    NoWait = 4,
}

fn run_step(device: &Device, buffers: &[u64], step: Step) {
    let host = [2f32; 64];
    // SAFETY: buffers have as many bytes, and pageable memory is copied before the call returns.
    unsafe {
        match step {
            Step::Add(to, from) => {
                let mut args = [buffers[to], buffers[from], float(1.0), 64];
                device.launch("add", [1, 64, 0], false, &mut args);
            }
            Step::Early(to, from, before, how) => {
                let mut args = [buffers[to], buffers[from], buffers[before], how as u64];
                device.launch("early", [2, 32, 512], true, &mut args);
            }
            Step::Upload(to) => {
                let (to, from) = (buffers[to], host.as_ptr().cast());
                sys::cuMemcpyHtoDAsync_v2(to, from, 256, device.stream);
            }
            Step::Fill(to) => {
                sys::cuMemsetD8Async(buffers[to], 0, 256, device.stream);
            }
            Step::Copy(to, from) => {
                sys::cuMemcpyDtoDAsync_v2(buffers[to], buffers[from], 256, device.stream);
            }
            Step::Wait => {
                sys::cuStreamSynchronize(device.stream);
            }
            Step::WaitBefore(to, from) => {
                let mut event = null_mut();
                ok(sys::cuEventCreate(&mut event, 0));
                sys::cuEventRecord(event, device.stream);
                run_step(device, buffers, Step::Add(to, from));
                sys::cuEventSynchronize(event);
            }
        }
    }
}

/// A kernel that is started early may only read, before it waits, what no work writes that may still run: of the kernels
/// from the last one on that was not started early. The same kernels are right or wrong when they are captured.
#[test]
fn early_kernels_read_only_what_has_been_written() {
    use How::{AsyncCopy, Atomic, NoWait, Read, Write};
    use Step::{Add, Copy, Early, Fill, Upload, Wait, WaitBefore};
    let add = "a read of what add has written";
    let cases: [(&[Step], &str); 19] = [
        (&[Add(1, 0), Early(2, 1, 0, Read)], ""),
        (&[Add(1, 0), Early(2, 1, 0, AsyncCopy)], ""),
        (&[Add(1, 0), Early(2, 0, 1, Read)], add),
        (&[Add(1, 0), Early(2, 0, 1, AsyncCopy)], add),
        // Kernels between are no help where all of them may be started early.
        (
            &[
                Add(1, 0),
                Early(2, 0, 0, Read),
                Early(3, 0, 0, Read),
                Early(2, 0, 1, Read),
            ],
            add,
        ),
        (
            &[
                Add(1, 0),
                Early(2, 0, 0, Read),
                Early(3, 0, 0, Read),
                Early(1, 0, 2, Read),
            ],
            "a read of what early has written",
        ),
        // One is that is not, and a copy from the host.
        (&[Add(1, 0), Add(2, 0), Early(3, 0, 1, Read)], ""),
        (&[Add(1, 0), Add(2, 0), Early(3, 0, 2, Read)], add),
        (&[Add(1, 0), Upload(2), Early(3, 0, 1, Read)], ""),
        (&[Add(1, 0), Upload(1), Early(3, 0, 1, Read)], ""),
        (&[Upload(1), Add(1, 0), Early(3, 0, 1, Read)], add),
        (
            &[Add(1, 0), Fill(1), Early(3, 0, 1, Read)],
            "a read of what a fill has written",
        ),
        (
            &[Copy(1, 0), Early(3, 0, 1, Read)],
            "a read of what a copy on the device has written",
        ),
        (&[Add(1, 0), Fill(2), Early(3, 0, 1, Read)], ""),
        // Another block may be ahead.
        (
            &[Early(0, 1, 0, Read)],
            "a read of what another thread has written",
        ),
        (&[Early(2, 0, 1, Atomic)], "a write before the thread"),
        (&[Early(2, 0, 1, Write)], "a write before the thread"),
        (&[Early(2, 0, 1, NoWait)], "ends without waiting"),
        // What the host has waited for has ended.
        (&[Add(1, 0), Wait, Early(2, 0, 1, Read)], ""),
    ];
    for captured in [false, true] {
        for (steps, expected) in cases {
            let Some(device) = Device::open() else { return };
            ferrum_cuda_emulator::run_blocks_together(false);
            let buffers = [(); 4].map(|()| device.upload(&[1f32; 64]));
            assert_eq!(device.finish(), "");
            let work = || {
                for &step in steps {
                    run_step(&device, &buffers, step);
                }
            };
            if captured {
                // Neither waits nor copies from pageable memory are captured.
                if steps.iter().any(|step| matches!(step, Wait | Upload(_))) {
                    continue;
                }
                let exec = device.capture(work);
                assert_eq!(device.finish(), "");
                // SAFETY: the stream is held.
                unsafe { sys::cuGraphLaunch(exec, device.stream) };
            } else {
                work();
            }
            let found = device.finish();
            let right = match expected {
                "" => found.is_empty(),
                _ => found.contains(expected) && found.contains(") of early"),
            };
            assert!(right, "captured {captured}, {steps:?}: {found:?}");
        }
    }
    // What is behind an event has not ended when the host has waited for the event.
    for (read, expected) in [(1, ""), (2, add)] {
        let Some(device) = Device::open() else { return };
        let buffers = [(); 4].map(|()| device.upload(&[1f32; 64]));
        for step in [Add(1, 0), WaitBefore(2, 0), Early(3, 0, read, Read)] {
            run_step(&device, &buffers, step);
        }
        let found = device.finish();
        assert_eq!(found.contains(add), !expected.is_empty(), "{found}");
    }
    // The first kernel of a captured step is behind all that was before its replay, also behind the last replay.
    let Some(device) = Device::open() else { return };
    let buffers = [(); 4].map(|()| device.upload(&[1f32; 64]));
    let exec = device.capture(|| {
        run_step(&device, &buffers, Early(2, 0, 1, Read));
        run_step(&device, &buffers, Early(1, 0, 3, Read));
    });
    run_step(&device, &buffers, Add(1, 0));
    // SAFETY: the stream is held.
    unsafe {
        sys::cuGraphLaunch(exec, device.stream);
        sys::cuGraphLaunch(exec, device.stream);
    }
    assert_eq!(device.finish(), "");
}

/// Blocks that run at the same time have shared memory of their own and one order of atomics; a fault of one is told, and nothing
/// of it is left.
#[test]
fn blocks_run_beside_each_other() {
    const BLOCKS: u32 = 64;
    const NUMBERS: f32 = (32 * (BLOCKS - 1) * BLOCKS / 2) as f32;
    let Some(device) = Device::open() else { return };
    let add_numbers = || {
        for _ in 0..20 {
            let sum = device.upload(&[0f32]);
            let found = device.run("add_numbers", BLOCKS, 32, 0, &mut [sum]);
            assert_eq!(found, "");
            assert_eq!(device.download(sum, 1), [NUMBERS]);
        }
    };
    add_numbers();
    // The last block has nothing to read.
    let (count, y) = (32 * BLOCKS as usize, 1f32.to_bits());
    for _ in 0..20 {
        let (out, x) = (
            device.alloc(4 * count),
            device.upload(&vec![1f32; count - 32]),
        );
        let args = &mut [out, x, u64::from(y), count as u64];
        let found = device.run("add", BLOCKS, 32, 0, args);
        assert!(
            found.contains("out of bounds in block (63, 0, 0)"),
            "{found}"
        );
        ferrum_cuda_emulator::clear_error();
    }
    add_numbers();
}

/// What a product of four warps works with is not used before the wait for it: A's registers may be read, its sums not even that.
/// What it is to read in shared memory was made visible to it before, and registers were fenced.
#[test]
fn asynchronous_products_have_their_fences_and_waits() {
    let (right, sums) = (
        32.0 * (2.0 * 17.0 + 33.0),
        "sums of an asynchronous product are written",
    );
    let (registers, shared) = ("registers of A of an asynchronous", "has not published it");
    let cases = [
        ("", right, ""),
        (registers, 0.0, "thread (70, 0, 0)"),
        (sums, 0.0, "thread (70, 0, 0)"),
        (sums, 0.0, "thread (70, 0, 0)"),
        ("", f32::NAN, ""),
        (shared, 0.0, ""),
        ("that no fence of its registers precedes", 0.0, ""),
    ];
    for (how, (expected, number, thread)) in (0..).zip(cases) {
        let Some(device) = Device::open() else { return };
        let (one, out) = (device.upload(&[1f32]), device.alloc(512));
        let found = device.run("group_products", 1, 128, 2048, &mut [out, one, how]);
        if !expected.is_empty() {
            assert!(found.contains(expected), "{how}: {found:?}");
            assert!(found.contains(thread), "{how}: {found:?}");
            continue;
        }
        assert_eq!(found, "");
        let got = device.download(out, 128);
        let same = |&x: &f32| x == number || x.is_nan() && number.is_nan();
        assert!(got.iter().all(same), "{how}: {got:?}");
    }
}

/// A descriptor names what it names: another distance of eight rows gives other sums.
#[test]
fn descriptors_of_products_are_decoded() {
    for (stride, sum) in [(1024, 120.0), (0, 56.0)] {
        let Some(device) = Device::open() else { return };
        let out = device.alloc(512);
        let found = device.run("described_product", 1, 128, 2048, &mut [out, stride, 0]);
        assert_eq!((&*found, device.download(out, 128)), ("", vec![sum; 128]));
    }
}

#[test]
fn descriptors_name_what_is_there() {
    for (stride, base, expected) in [
        (2048, 0, "behind the end of shared memory"),
        (1024, 1, "a base offset of a matrix"),
    ] {
        let Some(device) = Device::open() else { return };
        let mut args = [device.alloc(512), stride, base];
        let found = device.run("described_product", 1, 128, 2048, &mut args);
        assert!(found.contains(expected), "{stride} {base}: {found:?}");
    }
}

/// What a process writes when it ends: of `mma` a product of 16 × 8 × 16, of `wgmma` two of 64 × 64 × 16, two operations each.
#[test]
fn kernels_are_counted() {
    if Device::open().is_none() {
        return;
    }
    let name = format!("counters-{}", std::process::id());
    let counters = std::env::temp_dir().join(name);
    let mut command = Command::new(std::env::current_exe().unwrap());
    let tests = [
        "fragments_lie_as_the_manual_says",
        "descriptors_of_products_are_decoded",
    ];
    command.args(tests).arg("--exact");
    let output = command
        .env("CUDA_EMULATOR_COUNTERS", &counters)
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    let text = std::fs::read_to_string(&counters).unwrap();
    std::fs::remove_file(&counters).unwrap();
    // The last number is of the clock.
    let lines = text
        .lines()
        .map(|line| line.rsplit_once(" emulated_us ").unwrap().0);
    let expected = [
        "described_product launches 2 threads 256 read 0 written 1024 barriers 2 warp_ops 8 matrix_ops 262144",
        "product launches 1 threads 32 read 768 written 512 barriers 0 warp_ops 4 matrix_ops 4096",
    ];
    assert_eq!(lines.collect::<Vec<_>>(), expected);
}

/// Memory of a pool is there once its stream has come to it, on other streams too, and goes back in that order. A pool that
/// is destroyed while some of it is in use is an error.
#[test]
fn a_pool_gives_memory_in_the_order_of_a_stream() {
    let Some(device) = Device::open() else { return };
    let x = device.upload(&[1f32; 64]);
    let (mut pool, mut others) = (null_mut(), null_mut());
    let (mut at, mut early) = (0, 0);
    let free = || {
        let (mut free, mut total) = (0, 0);
        // SAFETY: both outlive the call.
        ok(unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) });
        free
    };
    let before = free();
    // SAFETY: all outlive the calls; the uses that are wrong are what the test is about.
    unsafe {
        let props = std::mem::zeroed();
        ok(sys::cuMemPoolCreate(&mut pool, &props));
        ok(sys::cuStreamCreate(&mut others, 1));
        ok(sys::cuMemAllocFromPoolAsync(&mut at, 256, pool, others));
        ok(sys::cuStreamSynchronize(others));
        assert_eq!(before - free(), 256);
        let found = device.run("add", 1, 64, 0, &mut [at, x, 0, 64]);
        assert_eq!(found, "");
        ok(sys::cuMemFreeAsync(at, others));
        ok(sys::cuStreamSynchronize(others));
        assert_eq!(free(), before);
        ok(sys::cuMemAllocFromPoolAsync(&mut early, 256, pool, others));
        let destroyed = sys::cuMemPoolDestroy(pool);
        assert!(words(destroyed).contains("256 bytes are in use"));
    }
    ferrum_cuda_emulator::clear_error();
}
