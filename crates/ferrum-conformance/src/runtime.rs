//! What surrounds the ops: host memory, graphs, timers.

use crate::case::{Cases, act_name};
use crate::io::{CaseError, Check, wrong};
use ferrum_kernels::{
    Act, AttnConfig, Backend, BackendGraph, BackendKvDtype, BackendTimer, BatchShape, DeviceBatch,
    GraphRun, KvF32, KvLayer, PagedKvShape,
};
use ferrum_types::{Element, Error, FloatElement, Result};

pub(crate) fn acts<B: Backend>(values: &[f32]) -> Vec<B::Act> {
    values.iter().map(|&x| B::Act::from_f32(x)).collect()
}

pub(crate) fn expect_values<T: PartialEq + std::fmt::Debug>(
    what: &str,
    found: &T,
    expected: &T,
) -> Check {
    if found == expected {
        return Ok(());
    }
    wrong(format!("{what} is {found:?}, expected {expected:?}"))
}

// ---- host memory -----------------------------------------------------------------------------

/// Elements that go up from a device's host memory and come back into it.
fn through_host_buffers<B: Backend, T: Element>(device: &B, value: fn(usize) -> T) -> Check {
    let mut ctx = device.new_context()?;
    for len in [0, 1, 5, 4099] {
        let (mut from, mut to) = (device.host_buffer::<T>(len)?, device.host_buffer::<T>(len)?);
        expect_values("new host memory", &from.to_vec(), &vec![T::zeroed(); len])?;
        expect_values(
            "its address modulo the element",
            &(from.as_ptr().align_offset(align_of::<T>())),
            &0,
        )?;
        let mut buffer = device.alloc::<T>(len + 3)?;
        let mut expected = vec![T::zeroed(); len + 3];
        for round in 0..3 {
            for (i, element) in from.iter_mut().enumerate() {
                *element = value(7 * round + i);
            }
            expected[round..round + len].copy_from_slice(&from);
            B::write(&mut ctx, &mut buffer, round, &from)?;
            // It may be filled anew at once.
            from.fill(value(1));
            B::read(&mut ctx, &buffer, round, &mut to)?;
            expect_values("what came back", &&to[..], &&expected[round..round + len])?;
        }
        // It goes before what was copied from it is looked at.
        drop(from);
        expect_values("the buffer", &B::to_vec(&mut ctx, &buffer)?, &expected)?;
    }
    Ok(())
}

fn host_memory<B: Backend>(device: &B) -> Check {
    through_host_buffers::<B, B::Act>(device, |i| B::Act::from_f32((i % 101) as f32 - 50.0))?;
    through_host_buffers::<B, f32>(device, |i| i as f32 / 8.0)?;
    through_host_buffers::<B, i32>(device, |i| i as i32 - 1000)?;
    through_host_buffers::<B, i8>(device, |i| (i % 120) as i8)
}

/// Every case of [`Backend::host_buffer`].
pub(crate) fn host_cases<B: Backend>() -> Cases<B> {
    let mut cases = Cases::new();
    cases.check(
        ("host_buffer", act_name::<B>(), "up and down"),
        host_memory::<B>,
    );
    cases
}

// ---- graphs ----------------------------------------------------------------------------------

/// A body of `ops` ops on two buffers, and how often it was called.
struct Doubling<B: Backend> {
    x: Act<B>,
    y: Act<B>,
    ops: usize,
    calls: usize,
}

impl<B: BackendGraph> Doubling<B> {
    fn new(device: &B, ops: usize) -> Result<Self> {
        Ok(Doubling {
            x: device.alloc(5)?,
            y: device.alloc(5)?,
            ops,
            calls: 0,
        })
    }

    /// Writes `x`, runs the body under `key`, and checks its result and how it says it was run.
    fn run(&mut self, ctx: &mut B::Context, key: u64, x: f32) -> Check<GraphRun> {
        B::write(ctx, &mut self.x, 0, &acts::<B>(&[x; 5]))?;
        B::write(ctx, &mut self.y, 0, &acts::<B>(&[1.0; 5]))?;
        let calls = self.calls;
        let run = B::run_graph(ctx, key, &mut |ctx| {
            self.calls += 1;
            (0..self.ops).try_for_each(|_| B::add_inplace(ctx, &mut self.y, &self.x, 5))
        })?;
        let found = B::to_vec(ctx, &self.y)?;
        // Every op rounds what it writes.
        let add = |y: f32, _| B::Act::from_f32(y + B::Act::from_f32(x).to_f32()).to_f32();
        let expected = acts::<B>(&[(0..self.ops).fold(1.0, add); 5]);
        expect_values("the result of the graph", &found, &expected)?;
        let ran = self.calls - calls;
        let fits = match run {
            GraphRun::Replayed => ran == 0,
            GraphRun::Captured | GraphRun::Immediate => ran > 0,
        };
        if !fits {
            return wrong(format!(
                "the run says {run:?}, the body was called {ran} times"
            ));
        }
        Ok(run)
    }
}

/// What was captured is replayed with the contents that buffers have by then; a reset forgets it.
fn replays<B: BackendGraph>(device: &B) -> Check {
    let mut ctx = device.new_context()?;
    let mut body = Doubling::new(device, 3)?;
    let first = body.run(&mut ctx, 7, 2.0)?;
    if first == GraphRun::Replayed {
        return wrong("the first run of a key was a replay");
    }
    let again = match first {
        GraphRun::Captured => GraphRun::Replayed,
        other => other,
    };
    expect_values("the second run", &body.run(&mut ctx, 7, 4.0)?, &again)?;
    expect_values("the third run", &body.run(&mut ctx, 7, -1.0)?, &again)?;
    B::reset_graph(&mut ctx, 7)?;
    expect_values(
        "a run after the reset",
        &body.run(&mut ctx, 7, 5.0)?,
        &first,
    )?;
    expect_values("the run after that", &body.run(&mut ctx, 7, 6.0)?, &again)?;
    B::reset_all_graphs(&mut ctx)?;
    expect_values(
        "a run after all were reset",
        &body.run(&mut ctx, 7, 7.0)?,
        &first,
    )?;
    Ok(B::reset_graph(&mut ctx, 12345)?)
}

/// Keys do not mix.
fn several_keys<B: BackendGraph>(device: &B) -> Check {
    let mut ctx = device.new_context()?;
    let mut bodies = [1, 2, 5].map(|ops| Doubling::new(device, ops));
    for round in 0..3 {
        for (key, body) in bodies.iter_mut().enumerate() {
            let body = body
                .as_mut()
                .map_err(|error| CaseError::Error(error.clone()))?;
            body.run(&mut ctx, key as u64 * 1000, round as f32 + key as f32)?;
        }
    }
    Ok(())
}

/// There is no limit on the number of ops.
fn long_body<B: BackendGraph>(device: &B) -> Check {
    let mut ctx = device.new_context()?;
    let mut body = Doubling::new(device, 1000)?;
    (0..3).try_for_each(|i| body.run(&mut ctx, 1, i as f32).map(|_| ()))
}

/// A body that fails leaves nothing under its key, and its error comes back.
fn failing_body<B: BackendGraph>(device: &B) -> Check {
    let mut ctx = device.new_context()?;
    let y: Act<B> = device.alloc(5)?;
    let mut x: Act<B> = device.alloc(5)?;
    for _ in 0..2 {
        match B::run_graph(&mut ctx, 3, &mut |ctx| B::add_inplace(ctx, &mut x, &y, 6)) {
            Err(Error::Shape { .. }) => {}
            Err(error) => return Err(CaseError::Error(error)),
            Ok(run) => return wrong(format!("a body that fails gave {run:?}")),
        }
    }
    let mut body = Doubling::new(device, 2)?;
    match body.run(&mut ctx, 3, 1.5)? {
        GraphRun::Replayed => wrong("a body that failed was replayed"),
        GraphRun::Captured | GraphRun::Immediate => Ok(()),
    }
}

/// Sizes of the decode loop: two sequences in blocks of four, with as many as their keys need.
const POOL: PagedKvShape = PagedKvShape {
    blocks: 0,
    block_size: 4,
    kv_heads: 2,
    head_dim: 16,
    value_dim: 16,
    values_in_keys: false,
};
const CONFIG: AttnConfig = AttnConfig {
    heads: 4,
    kv_heads: 2,
    head_dim: 16,
    value_dim: 16,
    scale: 0.25,
    causal: true,
    sliding_window: None,
    chunked: false,
    softcap: None,
};
const STEPS: usize = 9;

/// Keys that both sequences may have beyond those before the loop.
const MORE: usize = 20;

/// Two sequences of up to `max_keys` keys in blocks of random order.
fn decode_batch<B: Backend>(device: &B, max_keys: usize) -> Check<DeviceBatch<B>> {
    let stride = max_keys.div_ceil(POOL.block_size);
    let blocks = crate::data::Rng::new("decode blocks", |x| x).permutation(2 * stride);
    let blocks: Vec<i32> = blocks.into_iter().map(|block| block as i32).collect();
    Ok(DeviceBatch {
        shape: BatchShape {
            tokens: 2,
            seqs: 2,
            table_stride: stride,
            max_query_len: 1,
            // Announced once for all steps, as a graph needs it.
            max_kv_len: max_keys,
        },
        tokens: device.from_slice(&[1, 2])?,
        rope_rows: device.from_slice(&[0, 0])?,
        query_starts: device.from_slice(&[0, 1, 2])?,
        kv_lens: device.from_slice(&[0, 0])?,
        state_slots: device.alloc(0)?,
        block_tables: vec![device.from_slice(&blocks)?],
    })
}

/// Gives each of the two sequences `keys` keys.
fn append_before<B: BackendKvDtype<KvF32>>(
    ctx: &mut B::Context,
    device: &B,
    kv: &mut KvLayer<B, KvF32>,
    keys: usize,
) -> Check {
    let mut batch = decode_batch(device, keys + MORE)?;
    let len = keys as i32;
    batch.shape.tokens = 2 * keys;
    batch.shape.max_query_len = keys;
    batch.query_starts = device.from_slice(&[0, len, 2 * len])?;
    batch.kv_lens = device.from_slice(&[len, len])?;
    let mut rng = crate::data::Rng::new("keys before", |x| x);
    let size = 2 * keys * POOL.kv_heads * POOL.head_dim;
    let k: Act<B> = device.from_slice(&acts::<B>(&rng.floats(size, 1.0)))?;
    let v: Act<B> = device.from_slice(&acts::<B>(&rng.floats(size, 1.0)))?;
    B::kv_append(ctx, kv, &k, &v, &batch)?;
    Ok(B::sync(ctx)?)
}

/// Decodes [`STEPS`] tokens of two sequences over one set of buffers: with a graph, or without and with a new context for each
/// step, so that what one step leaves behind in a context is seen, too. `before` keys are there at the
/// beginning, of which the second sequence goes on from the first few.
fn decode<B: BackendGraph + BackendKvDtype<KvF32>>(
    device: &B,
    before: usize,
    graph: bool,
) -> Check<Vec<Vec<B::Act>>> {
    let mut ctx = device.new_context()?;
    let mut batch = decode_batch(device, before + MORE)?;
    let mut kv: KvLayer<B, KvF32> = device.alloc_kv_layer(PagedKvShape {
        blocks: 2 * batch.shape.table_stride,
        ..POOL
    })?;
    if before > 0 {
        append_before(&mut ctx, device, &mut kv, before)?;
    }
    let (q_len, kv_len) = (2 * 4 * 16, 2 * 2 * 16);
    let mut q: Act<B> = device.alloc(q_len)?;
    let mut k: Act<B> = device.alloc(kv_len)?;
    let mut v: Act<B> = device.alloc(kv_len)?;
    let mut out: Act<B> = device.alloc(q_len)?;
    let mut rng = crate::data::Rng::new("decode", |x| x);
    let mut results = Vec::new();
    for step in 0..STEPS {
        if !graph {
            ctx = device.new_context()?;
        }
        let lens = [(before + step) as i32 + 1, step as i32 + 1];
        B::write(&mut ctx, &mut batch.kv_lens, 0, &lens)?;
        B::write(&mut ctx, &mut q, 0, &acts::<B>(&rng.floats(q_len, 1.0)))?;
        B::write(&mut ctx, &mut k, 0, &acts::<B>(&rng.floats(kv_len, 1.0)))?;
        B::write(&mut ctx, &mut v, 0, &acts::<B>(&rng.floats(kv_len, 1.0)))?;
        let mut body = |ctx: &mut B::Context| {
            B::kv_append(ctx, &mut kv, &k, &v, &batch)?;
            B::paged_attention::<KvF32>(ctx, &q, &kv, None, &batch, &mut out, &CONFIG)
        };
        if graph {
            B::run_graph(&mut ctx, 99, &mut body)?;
        } else {
            body(&mut ctx)?;
        }
        results.push(B::to_vec(&mut ctx, &out)?);
    }
    Ok(results)
}

fn same_in_a_graph<B>(device: &B, before: usize) -> Check
where
    B: BackendGraph + BackendKvDtype<KvF32>,
{
    let plain = decode(device, before, false)?;
    let graph = decode(device, before, true)?;
    match plain.iter().zip(&graph).position(|(a, b)| a != b) {
        Some(step) => wrong(format!("step {step} of a decode loop differs in a graph")),
        None => Ok(()),
    }
}

fn decode_loop<B: BackendGraph + BackendKvDtype<KvF32>>(device: &B) -> Check {
    same_in_a_graph(device, 0)
}

/// Keys enough for a device to share among its processors, in a sequence that gets more of them and in a short one.
fn long_decode_loop<B: BackendGraph + BackendKvDtype<KvF32>>(device: &B) -> Check {
    same_in_a_graph(device, 500)
}

/// Every case of [`BackendGraph`].
pub(crate) fn graph_cases<B: BackendGraph + BackendKvDtype<KvF32>>() -> Cases<B> {
    let (op, act) = ("run_graph", act_name::<B>());
    let mut cases = Cases::new();
    cases.check((op, act, "replay and reset"), replays::<B>);
    cases.check((op, act, "several keys"), several_keys::<B>);
    cases.check((op, act, "1000 ops"), long_body::<B>);
    cases.check((op, act, "a body that fails"), failing_body::<B>);
    cases.check((op, act, "a decode loop"), decode_loop::<B>);
    cases.check(
        (op, act, "a decode loop of 500 keys"),
        long_decode_loop::<B>,
    );
    cases
}

// ---- timers ----------------------------------------------------------------------------------

fn spans<B: Backend>(device: &B) -> Check {
    let mut ctx = device.new_context()?;
    let mut timer = B::Timer::new(device)?;
    let x = device.from_slice(&acts::<B>(&[1.0; 1000]))?;
    let mut out: Act<B> = device.alloc(1000)?;
    timer.begin(&mut ctx, "outer")?;
    B::silu(&mut ctx, &x, &mut out, 1000)?;
    timer.begin(&mut ctx, "inner")?;
    B::silu(&mut ctx, &x, &mut out, 1000)?;
    timer.end(&mut ctx)?;
    timer.end(&mut ctx)?;
    timer.begin(&mut ctx, "next")?;
    timer.end(&mut ctx)?;
    let spans = timer.take_spans(&mut ctx)?;
    let names: Vec<_> = spans.iter().map(|span| span.name).collect();
    expect_values("the spans", &names, &vec!["outer", "inner", "next"])?;
    let end = |i: usize| spans[i].start_ns.saturating_add(spans[i].duration_ns);
    if spans[1].start_ns < spans[0].start_ns || end(1) > end(0) {
        return wrong(format!(
            "a span does not lie inside the one around it: {spans:?}"
        ));
    }
    if spans[2].start_ns < end(0) {
        return wrong(format!(
            "a span begins before the one that was closed first: {spans:?}"
        ));
    }
    expect_values("spans taken twice", &timer.take_spans(&mut ctx)?.len(), &0)
}

fn open_spans<B: Backend>(device: &B) -> Check {
    let mut ctx = device.new_context()?;
    let mut timer = B::Timer::new(device)?;
    let nothing_open = |result: Result<()>| match result {
        Err(Error::InvalidArgument { .. }) => Ok(()),
        other => wrong(format!("ending a span that is not open gave {other:?}")),
    };
    nothing_open(timer.end(&mut ctx))?;
    timer.begin(&mut ctx, "one")?;
    timer.end(&mut ctx)?;
    nothing_open(timer.end(&mut ctx))?;
    expect_values(
        "the number of spans",
        &timer.take_spans(&mut ctx)?.len(),
        &1,
    )
}

/// Every case of [`BackendTimer`].
pub(crate) fn timer_cases<B: Backend>() -> Cases<B> {
    let mut cases = Cases::new();
    cases.check(("timer", "-", "nested spans"), spans::<B>);
    cases.check(("timer", "-", "spans that are not open"), open_spans::<B>);
    cases
}
