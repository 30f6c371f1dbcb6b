//! Each pair's row times the matrices of its expert.
//!
//! The work of all experts is one list of (expert, some panels) that threads take from one by one: a
//! decode step reads each chosen expert once and joins the threads once, however many experts a token
//! has, and an expert with many rows delays no other one.

use super::CpuExperts;
use super::rows::PackedRows;
use crate::exec::{Exec, Scratch};
use crate::gemm::tile::PANEL;
use crate::gemm::{Columns, PartSums};
use crate::isa::Kernel;
use crate::math::{self, for_vectors, load_at, store_at};
use crate::memory::SharedMut;
use crate::simd::Simd;
use ferrum_types::check::{SortedPairs, elements};
use ferrum_types::{ExpertActivation, ExpertInput, ExpertShape, MoeShape, Result};
use std::ops::Range;

/// Most panels of a task: a block of them as f32 stays in the second-level cache.
pub(super) const MAX_PANELS: usize = 8;
/// Tasks for each thread, when there are enough panels.
const TASKS_PER_THREAD: usize = 4;

/// One linear map of all experts.
#[derive(Clone, Copy)]
pub struct ExpertLinear<'a> {
    /// The matrices.
    pub matrices: &'a CpuExperts,
    /// `[experts, n]`.
    pub bias: Option<&'a [f32]>,
}

/// Epilogue of a pair's products with `STACKS` matrices, biases added.
trait Epilogue<const STACKS: usize>: Copy + Send + Sync + 'static {
    /// All lanes.
    fn lanes<S: Simd>(self, s: S, products: [S::V; STACKS]) -> S::V;
}

/// The product itself.
#[derive(Clone, Copy)]
struct Identity;

impl Epilogue<1> for Identity {
    #[inline(always)]
    fn lanes<S: Simd>(self, _: S, [product]: [S::V; 1]) -> S::V {
        product
    }
}

/// `silu(gate) · up`.
#[derive(Clone, Copy)]
struct SwiGlu;

impl Epilogue<2> for SwiGlu {
    #[inline(always)]
    fn lanes<S: Simd>(self, s: S, [gate, up]: [S::V; 2]) -> S::V {
        s.mul(math::silu(s, gate), up)
    }
}

/// `gelu(gate) · up`, in the tanh form.
#[derive(Clone, Copy)]
struct GeluGated;

impl Epilogue<2> for GeluGated {
    #[inline(always)]
    fn lanes<S: Simd>(self, s: S, [gate, up]: [S::V; 2]) -> S::V {
        s.mul(math::gelu_tanh(s, gate), up)
    }
}

/// `g · sigmoid(alpha · g) · (u + 1)` of the bounded `gate` and `up`.
#[derive(Clone, Copy)]
struct Clamped {
    alpha: f32,
    limit: f32,
}

impl Epilogue<2> for Clamped {
    #[inline(always)]
    fn lanes<S: Simd>(self, s: S, [gate, up]: [S::V; 2]) -> S::V {
        let (most, least) = (s.splat(self.limit), s.splat(-self.limit));
        // The order of arguments keeps NaN.
        let gate = s.min(most, gate);
        let up = s.max(least, s.min(most, up));
        let e = math::exp(s, s.mul(gate, s.splat(-self.alpha)));
        let swish = s.div(gate, s.add(s.splat(1.0), e));
        s.mul(swish, s.add(up, s.splat(1.0)))
    }
}

/// `out[pair, n]`: each pair's row times the matrix of its expert, with its bias.
///
/// # Errors
/// `InvalidArgument` when the pairs are not sorted, [`OutOfMemory`](ferrum_types::Error::OutOfMemory) for scratch
/// memory.
///
/// # Panics
/// When a slice is shorter than the shape says, or the stack is of another one.
pub fn gemm(
    run: (&Exec, &mut Scratch),
    x: (&[f32], ExpertInput),
    experts: ExpertLinear<'_>,
    routing: SortedPairs<'_>,
    out: &mut [f32],
    shape: MoeShape,
) -> Result<()> {
    per_pair(
        run,
        "moe_gemm",
        x,
        ([experts], Identity),
        routing,
        out,
        shape,
    )
}

/// `out[pair, n]`: what the activation makes of gate and up, the products of each token's row with two matrices of each of
/// its experts.
///
/// # Errors
/// As [`gemm`](fn@gemm).
///
/// # Panics
/// As [`gemm`](fn@gemm).
pub fn gate_up(
    run: (&Exec, &mut Scratch),
    x: &[f32],
    (stacks, activation): ([ExpertLinear<'_>; 2], ExpertActivation),
    routing: SortedPairs<'_>,
    out: &mut [f32],
    shape: MoeShape,
) -> Result<()> {
    let (op, x) = ("moe_gate_up", (x, ExpertInput::PerToken));
    match activation {
        ExpertActivation::Silu => per_pair(run, op, x, (stacks, SwiGlu), routing, out, shape),
        ExpertActivation::GeluTanh => {
            per_pair(run, op, x, (stacks, GeluGated), routing, out, shape)
        }
        ExpertActivation::ClampedSwiglu { alpha, limit } => {
            let clamped = Clamped { alpha, limit };
            per_pair(run, op, x, (stacks, clamped), routing, out, shape)
        }
    }
}

/// `out[pair, n]` from the products of the pair's row with its expert's matrix in each stack.
fn per_pair<const STACKS: usize, F: Epilogue<STACKS>>(
    (exec, scratch): (&Exec, &mut Scratch),
    op: &'static str,
    x: (&[f32], ExpertInput),
    (maps, finish): ([ExpertLinear<'_>; STACKS], F),
    routing: SortedPairs<'_>,
    out: &mut [f32],
    shape: MoeShape,
) -> Result<()> {
    let ExpertShape { experts, n, .. } = shape.experts;
    let stacks = maps.map(|maps| maps.matrices);
    let pairs = routing.expert_ids.len();
    let stage = elements(op, &[STACKS, pairs, n])?;
    let out = &mut out[..pairs * n];
    let packed = PackedRows::new(
        (exec, scratch),
        op,
        x,
        &stacks,
        routing,
        (stage, 0),
        (shape, false),
    )?;
    let Some((rows, stage, buffers)) = packed else {
        return Ok(());
    };
    let mut stages = stage.chunks_exact_mut(pairs * n);
    Work::<STACKS, F> {
        stacks,
        // There are as many stages as stacks.
        stages: std::array::from_fn(|_| SharedMut::new(stages.next().unwrap_or_default())),
        buffers: SharedMut::new(buffers),
        out: SharedMut::new(out),
        n,
        biases: maps.map(|maps| maps.bias.map(|bias| &bias[..experts * n])),
        finish,
        rows,
    }
    .run();
    Ok(())
}

/// The products of all groups, from packed rows.
struct Work<'a, const STACKS: usize, F> {
    rows: PackedRows<'a>,
    stacks: [&'a CpuExperts; STACKS],
    /// `[places, n]` of each stack.
    stages: [SharedMut<'a, f32>; STACKS],
    /// Floats of each thread to decode weights in.
    buffers: SharedMut<'a, f32>,
    /// `[pairs, n]`.
    out: SharedMut<'a, f32>,
    n: usize,
    /// `[experts, n]` of each stack.
    biases: [Option<&'a [f32]>; STACKS],
    finish: F,
}

impl<const STACKS: usize, F: Epilogue<STACKS>> Work<'_, STACKS, F> {
    fn run(&self) {
        let PackedRows { exec, groups, .. } = self.rows;
        let panels = self.n.div_ceil(PANEL);
        let wanted = exec.pool.threads() * TASKS_PER_THREAD;
        let each = (groups.len() * panels / wanted).clamp(1, MAX_PANELS);
        let parts = panels.div_ceil(each);
        let cost = self.rows.cost(self.n) * STACKS;
        exec.parallel_for_dynamic(groups.len() * parts, cost, |task, thread| {
            let first = task % parts * each;
            let panels = first..(first + each).min(panels);
            self.some(groups[task / parts], panels, thread);
        });
    }

    /// Some panels of one expert's matrices times its rows.
    fn some(&self, group: [usize; 3], panels: Range<usize>, thread: usize) {
        let [expert, start, rows] = group;
        // SAFETY: no two running tasks share a thread number.
        let buffer = unsafe {
            self.buffers
                .part(thread * self.rows.buffer, self.rows.buffer)
        };
        for (index, (stack, stage)) in self.stacks.iter().zip(self.stages).enumerate() {
            let columns = Columns::new(stage, self.n, start * self.n);
            let product = (index, *stack, PartSums::WHOLE);
            self.rows
                .product(product, group, panels.clone(), buffer, columns);
        }
        let columns = panels.start * PANEL..(panels.end * PANEL).min(self.n);
        let first = expert * self.n;
        let held = first + columns.start..first + columns.end;
        self.rows.exec.level.run(Finished {
            ids: &self.rows.input.ids[start..][..rows],
            start,
            n: self.n,
            stages: self.stages,
            biases: self.biases.map(|bias| bias.map(|bias| &bias[held.clone()])),
            columns,
            out: self.out,
            finish: self.finish,
        });
    }
}

/// From the stages of some rows to their pairs' outputs.
struct Finished<'a, const STACKS: usize, F> {
    /// Pairs of the rows.
    ids: &'a [i32],
    /// Place of the first row.
    start: usize,
    columns: Range<usize>,
    n: usize,
    stages: [SharedMut<'a, f32>; STACKS],
    /// Those of the columns, of each stack.
    biases: [Option<&'a [f32]>; STACKS],
    out: SharedMut<'a, f32>,
    finish: F,
}

impl<const STACKS: usize, F: Epilogue<STACKS>> Kernel for Finished<'_, STACKS, F> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (first, len) = (self.columns.start, self.columns.len());
        for (row, pair) in self.ids.iter().enumerate() {
            // SAFETY: a task has its rows and columns of the stages for itself, and the products that
            // wrote them are done. A pair stands in `ids` once, so these are also the only columns of
            // its output row that any task writes here.
            let out = unsafe { self.out.part(*pair as usize * self.n + first, len) };
            let place = (self.start + row) * self.n + first;
            for_vectors(
                len,
                #[inline(always)]
                |at, _| {
                    let mut products = [s.zero(); STACKS];
                    for (stack, product) in products.iter_mut().enumerate() {
                        // SAFETY: as above.
                        let stage = unsafe { self.stages[stack].part(place, len) };
                        *product = load_at(s, stage, at);
                        if let Some(bias) = self.biases[stack] {
                            *product = s.add(*product, load_at(s, bias, at));
                        }
                    }
                    store_at(s, out, at, self.finish.lanes(s, products));
                },
            );
        }
    }
}
