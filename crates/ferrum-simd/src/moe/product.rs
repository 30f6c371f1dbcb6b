//! Each pair's row times the matrices of its expert.
//!
//! The rows of an expert are brought side by side, packed as its kernel wants them, and multiplied by
//! the product kernels of `gemm` and `quant`: one row straight from the packed weights, many in tiles.
//! The work of all experts is one list of (expert, some panels) that threads take from one by one: a
//! decode step reads each chosen expert once and joins the threads once, however many experts a token
//! has, and an expert with many rows delays no other one.

use super::{CpuExperts, Matrices};
use crate::exec::{Exec, Scratch};
use crate::gemm::lane::{Bf16PairLane, F32Lane, Lane};
use crate::gemm::pack::{Elements, pack_tile};
use crate::gemm::tile::PANEL;
use crate::gemm::{self, Columns, GemmMode};
use crate::isa::Kernel;
use crate::math::{self, for_vectors, load_at, store_at};
use crate::memory::SharedMut;
use crate::quant::acts::{self, WORDS};
use crate::quant::format::UNIT;
use crate::quant::{self, Product, SomePanels};
use crate::simd::Simd;
use ferrum_types::check::{SortedPairs, elements};
use ferrum_types::{ExpertActivation, ExpertInput, ExpertShape, MoeShape, Result};
use std::ops::Range;

/// Most panels of a task: a block of them as f32 stays in the second-level cache.
const MAX_PANELS: usize = 8;
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

/// Where the input of a pair is.
#[derive(Clone, Copy)]
struct Input<'a> {
    x: &'a [f32],
    kind: ExpertInput,
    /// Pairs sorted by expert.
    ids: &'a [i32],
    top_k: usize,
    k: usize,
    /// All pairs have the same row, no expert has two of them and none wants its inputs in an order of
    /// its own, so the row is packed once.
    shared: bool,
}

impl<'a> Input<'a> {
    /// The row of the pair at a place of the sorted order.
    #[inline(always)]
    fn row(&self, place: usize) -> &'a [f32] {
        let pair = self.ids[place] as usize;
        let row = match self.kind {
            ExpertInput::PerToken => pair / self.top_k,
            ExpertInput::PerPair => pair,
        };
        &self.x[row * self.k..][..self.k]
    }

    /// Rows that are packed.
    fn packed_rows(&self) -> usize {
        if self.shared { 1 } else { self.ids.len() }
    }

    /// Where the packed rows from `place` on begin, in rows.
    fn packed_at(&self, place: usize) -> usize {
        if self.shared { 0 } else { place }
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
    (x, kind): (&[f32], ExpertInput),
    (maps, finish): ([ExpertLinear<'_>; STACKS], F),
    routing: SortedPairs<'_>,
    out: &mut [f32],
    shape: MoeShape,
) -> Result<()> {
    let ExpertShape { experts, n, k } = shape.experts;
    let stacks = maps.map(|maps| maps.matrices);
    assert!(
        stacks.iter().all(|stack| stack.shape == shape.experts),
        "the stacks"
    );
    let pairs = routing.expert_ids.len();
    let ids = &routing.sorted_pairs[..pairs];
    scratch.items.clear();
    // Groups, and tiles of two kinds, are at most as many as pairs: so a later step with other groups
    // allocates nothing.
    scratch.items.reserve(3 * pairs);
    routing.groups(op, |expert, start, count| {
        scratch.items.push([expert, start, count]);
    })?;
    let out = &mut out[..pairs * n];
    if pairs == 0 {
        return Ok(());
    }
    let groups = scratch.items.len();
    let ordered = stacks.iter().any(|stack| stack.is_ordered());
    let input = Input {
        x,
        kind,
        ids,
        top_k: shape.top_k,
        k,
        shared: kind == ExpertInput::PerToken && shape.tokens == 1 && groups == pairs && !ordered,
    };
    let sizes = ScratchSizes::of(op, exec, &input, &stacks)?;
    let items = &mut scratch.items;
    let mut tiles = [0..0, 0..0];
    if sizes.floats + sizes.bf16_pairs > 0 {
        let rows = |rows| GemmMode::of(exec, rows).tile_rows;
        tiles[0] = list_tiles(items, groups, &input, rows);
    }
    if sizes.bytes > 0 {
        let rows = |rows| quant::tile_rows(exec, rows);
        tiles[1] = list_tiles(items, groups, &input, rows);
    }
    // Stacks in orders of their own have packed rows of their own.
    let acts_of = |stack: usize| if ordered { stack } else { 0 };
    let bytes = sizes.bytes * (acts_of(STACKS - 1) + 1);
    let stage = elements(op, &[STACKS, pairs, n])?;
    let threads = exec.pool.threads();
    let packed = sizes.floats + sizes.bf16_pairs + bytes;
    let (words, items) = scratch.floats_and_items(packed + stage + threads * sizes.buffer)?;
    let (floats, rest) = words.split_at_mut(sizes.floats);
    let (bf16_pairs, rest) = rest.split_at_mut(sizes.bf16_pairs);
    let (bytes, rest) = rest.split_at_mut(bytes);
    let (stage, buffers) = rest.split_at_mut(stage);
    let acts: &mut [i32] = bytemuck::cast_slice_mut(bytes);
    let groups = &items[..groups];
    let [dense, quantised] = tiles.map(|tiles| &items[tiles]);
    pack_lanes::<F32Lane>(exec, &input, dense, floats);
    pack_lanes::<Bf16PairLane>(exec, &input, dense, bf16_pairs);
    if sizes.bytes > 0 {
        for (acts, stack) in acts.chunks_exact_mut(sizes.bytes).zip(stacks) {
            pack_acts(exec, &input, quantised, &stack.matrices, acts);
        }
    }
    let acts: &[i32] = acts;
    let mut stages = stage.chunks_exact_mut(pairs * n);
    Work::<STACKS, F> {
        exec,
        input,
        stacks,
        groups,
        floats,
        bf16_pairs,
        acts: std::array::from_fn(|stack| &acts[acts_of(stack) * sizes.bytes..][..sizes.bytes]),
        // There are as many stages as stacks.
        stages: std::array::from_fn(|_| SharedMut::new(stages.next().unwrap_or_default())),
        buffers: SharedMut::new(buffers),
        buffer: sizes.buffer,
        out: SharedMut::new(out),
        n,
        biases: maps.map(|maps| maps.bias.map(|bias| &bias[..experts * n])),
        finish,
    }
    .run();
    Ok(())
}

/// Floats (or words of 32 bits) that a product needs for a moment.
struct ScratchSizes {
    /// Rows packed for dense matrices.
    floats: usize,
    /// Rows packed for dot products of bf16.
    bf16_pairs: usize,
    /// Rows packed for quantised ones, in one order.
    bytes: usize,
    /// Of each thread, to decode dense weights.
    buffer: usize,
}

impl ScratchSizes {
    fn of(
        op: &'static str,
        exec: &Exec,
        input: &Input<'_>,
        stacks: &[&CpuExperts],
    ) -> Result<Self> {
        let mut sizes = Self {
            floats: 0,
            bf16_pairs: 0,
            bytes: 0,
            buffer: 0,
        };
        let rows = input.packed_rows();
        for stack in stacks {
            let buffer = match &stack.matrices {
                Matrices::Dense(matrices) => {
                    let direct = GemmMode::of(exec, input.ids.len()).direct;
                    // All matrices of a stack are alike.
                    matrices.first().map_or(Ok(0), |matrix| {
                        let lanes = elements(op, &[rows, matrix.steps()])?;
                        match matrix.elements {
                            Elements::Bf16Pairs => sizes.bf16_pairs = lanes,
                            _ => sizes.floats = lanes,
                        }
                        let block = gemm::block_len(matrix.elements);
                        Ok(if direct { 0 } else { block })
                    })?
                }
                Matrices::Packed(_) => {
                    sizes.bytes = elements(op, &[rows, input.k / UNIT, WORDS])?;
                    0
                }
            };
            sizes.buffer = sizes.buffer.max(buffer);
        }
        Ok(sizes)
    }
}

/// Appends the tiles of all groups, `[place of the first row, rows, expert]`, to `items`, which begin
/// with `groups` groups; gives where they are.
fn list_tiles(
    items: &mut Vec<[usize; 3]>,
    groups: usize,
    input: &Input<'_>,
    tile_rows: impl Fn(usize) -> usize,
) -> Range<usize> {
    let first = items.len();
    for group in 0..if input.shared { 1 } else { groups } {
        let [expert, start, rows] = items[group];
        let start = input.packed_at(start);
        let each = tile_rows(rows);
        let tiles = (0..rows).step_by(each);
        items.extend(tiles.map(|row| [start + row, each.min(rows - row), expert]));
    }
    first..items.len()
}

/// What a tile costs to pack.
fn cost(input: &Input<'_>, tiles: &[[usize; 3]]) -> usize {
    4 * input.k * input.packed_rows() / tiles.len().max(1)
}

/// Packs all tiles for dense products, unless `packed` is empty.
fn pack_lanes<L: Lane>(exec: &Exec, input: &Input<'_>, tiles: &[[usize; 3]], packed: &mut [f32]) {
    if packed.is_empty() {
        return;
    }
    let (packed, steps) = (SharedMut::new(packed), input.k / L::INPUTS);
    exec.parallel_for(tiles.len(), cost(input, tiles), |range, _| {
        for &[place, rows, _] in &tiles[range] {
            // SAFETY: each tile is packed by one task, and tiles do not overlap.
            let out = unsafe { packed.part(place * steps, rows * steps) };
            pack_tile::<L>(rows, |row| input.row(place + row), out);
        }
    });
}

/// Packs all tiles for quantised products, each in the order of its expert's inputs.
fn pack_acts(
    exec: &Exec,
    input: &Input<'_>,
    tiles: &[[usize; 3]],
    matrices: &Matrices,
    acts: &mut [i32],
) {
    let (acts, words) = (SharedMut::new(acts), input.k / UNIT * WORDS);
    exec.parallel_for(tiles.len(), cost(input, tiles), |range, _| {
        for &[place, rows, expert] in &tiles[range] {
            // SAFETY: as above.
            let out = unsafe { acts.part(place * words, rows * words) };
            let order = matrices.order(expert);
            acts::pack_tile(exec, rows, |row| input.row(place + row), order, out);
        }
    });
}

/// The products of all groups, from packed rows.
struct Work<'a, const STACKS: usize, F> {
    exec: &'a Exec,
    input: Input<'a>,
    stacks: [&'a CpuExperts; STACKS],
    /// `[expert, first place, rows]`.
    groups: &'a [[usize; 3]],
    floats: &'a [f32],
    bf16_pairs: &'a [f32],
    /// Of each stack.
    acts: [&'a [i32]; STACKS],
    /// `[places, n]` of each stack.
    stages: [SharedMut<'a, f32>; STACKS],
    /// `buffer` floats for each thread.
    buffers: SharedMut<'a, f32>,
    buffer: usize,
    /// `[pairs, n]`.
    out: SharedMut<'a, f32>,
    n: usize,
    /// `[experts, n]` of each stack.
    biases: [Option<&'a [f32]>; STACKS],
    finish: F,
}

impl<const STACKS: usize, F: Epilogue<STACKS>> Work<'_, STACKS, F> {
    fn run(&self) {
        let Self { exec, input, .. } = self;
        let panels = self.n.div_ceil(PANEL);
        let wanted = exec.pool.threads() * TASKS_PER_THREAD;
        let each = (self.groups.len() * panels / wanted).clamp(1, MAX_PANELS);
        let parts = panels.div_ceil(each);
        let cost = input.ids.len() * STACKS * panels * (input.k * PANEL / 16);
        exec.parallel_for_dynamic(self.groups.len() * parts, cost, |task, thread| {
            let first = task % parts * each;
            let panels = first..(first + each).min(panels);
            self.some(self.groups[task / parts], panels, thread);
        });
    }

    /// Some panels of one expert's matrices times its rows.
    fn some(&self, group: [usize; 3], panels: Range<usize>, thread: usize) {
        let [expert, start, rows] = group;
        // SAFETY: no two running tasks share a thread number.
        let buffer = unsafe { self.buffers.part(thread * self.buffer, self.buffer) };
        for (index, (stack, stage)) in self.stacks.iter().zip(self.stages).enumerate() {
            let columns = Columns {
                out: stage,
                stride: self.n,
                first: start * self.n,
            };
            self.product(
                (stack, self.acts[index]),
                (expert, start, rows),
                panels.clone(),
                buffer,
                columns,
            );
        }
        let columns = panels.start * PANEL..(panels.end * PANEL).min(self.n);
        let first = expert * self.n;
        let held = first + columns.start..first + columns.end;
        self.exec.level.run(Finished {
            ids: &self.input.ids[start..][..rows],
            start,
            n: self.n,
            stages: self.stages,
            biases: self.biases.map(|bias| bias.map(|bias| &bias[held.clone()])),
            columns,
            out: self.out,
            finish: self.finish,
        });
    }

    /// Products of one stack, into columns of the group's rows.
    fn product(
        &self,
        (stack, acts): (&CpuExperts, &[i32]),
        (expert, start, rows): (usize, usize, usize),
        panels: Range<usize>,
        buffer: &mut [f32],
        columns: Columns<'_>,
    ) {
        let (exec, k) = (self.exec, self.input.k);
        let place = self.input.packed_at(start);
        match &stack.matrices {
            Matrices::Dense(matrices) => {
                let weight = &matrices[expert];
                let steps = weight.steps();
                let packed = match weight.elements {
                    Elements::Bf16Pairs => self.bf16_pairs,
                    _ => self.floats,
                };
                let packed = &packed[place * steps..][..rows * steps];
                let block = gemm::block_len(weight.elements).min(buffer.len());
                let block = &mut buffer[..block];
                gemm::some_panels(exec, (packed, rows), weight, panels, block, columns);
            }
            Matrices::Packed(matrices) => {
                let weight = &matrices[expert];
                let words = k / UNIT * WORDS;
                let product = Product {
                    exec,
                    acts: &acts[place * words..][..rows * words],
                    rows,
                    tile_rows: quant::tile_rows(exec, rows),
                    weight,
                    columns,
                };
                // A `Packed` is of a type that is packed (its constructor says so), and that is all
                // that could be wrong.
                let _ = weight.with(SomePanels { product, panels });
            }
        }
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
