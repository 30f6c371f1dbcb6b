//! Products in tiles of AMX: weights of f32 and of bf16, any number of rows.
//!
//! `tdpbf16ps` multiplies bf16 and sums in f32. A number of f32 is split in two of bf16, its rounding and the rounding of
//! what that leaves, so that 2^-17 of it is lost at most, and a product is three: `high · low`, `high · high` and `low · high`,
//! in this order for each block of 32 inputs. Rows are split when they are packed, weights when they are loaded.
//! With weights of bf16, rows are rounded to that, and a product is one.
//!
//! A row has the same bits whatever is beside it, as everywhere: a row alone, which would waste most of a tile, is multiplied by
//! vectors with the same sums ([`row`]). They are not those of other levels: an instruction on tiles sums even and odd
//! inputs of its block apart, takes subnormal numbers as zeros and gives such for subnormal sums.
//!
//! A split number must be finite: of an infinite one, `high · low` would be NaN. Weights with others are not loaded as such,
//! and rows with others are multiplied as at other levels, with the sums of both halves of each weight.

pub(crate) mod pack;
mod row;
mod tile;

use super::columns::{AddColumns, Columns, PartSums, add_partials};
use super::pack::{CpuWeight, Elements, SplitF32};
use super::tile::PANEL;
use super::{GROUP, PARTIAL_ROWS, direct};
use crate::exec::{Exec, Scratch};
use crate::isa::Level;
use crate::memory::SharedMut;
use crate::simd::amx::{self, Tiles};
use std::ops::Range;
use tile::{BF16_BLOCK, CHUNK_BLOCKS, TILE};
pub(crate) use tile::{Block, INPUTS, Operands, SPLIT_BLOCK, row_block};

use ferrum_types::{Result, SumSplit};

/// Rows of a task: with the inputs of a chunk of blocks, 768 KiB of split rows, which the panels of a group read one
/// after the other.
const TASK_TILES: usize = 32;
/// Bytes of panels that all tasks read before they go on to others, where each has few rows.
const PANEL_BYTES: usize = 4 << 20;
/// Fewest tiles of rows of a task.
const LEAST_TILES: usize = 4;

/// How a weight's inputs lie in blocks: each part of its sums begins with a block of its own.
#[derive(Clone, Copy)]
struct Blocks {
    sums: SumSplit,
    /// Inputs of a step.
    inputs: usize,
    steps: usize,
}

impl Blocks {
    fn of(weight: &CpuWeight, sums: SumSplit) -> Self {
        let inputs = match weight.elements {
            Elements::Bf16Tiles => 2,
            _ => 1,
        };
        Self {
            sums,
            inputs,
            steps: weight.steps(),
        }
    }

    /// Inputs of a part, and the number of its first block.
    fn part(&self, part: usize) -> (Range<usize>, usize) {
        let inputs = |part| {
            let steps = self.sums.part(part, self.steps);
            steps.start * self.inputs..steps.end * self.inputs
        };
        let before = (0..part).map(|part| inputs(part).len().div_ceil(INPUTS));
        (inputs(part), before.sum())
    }

    /// Number of blocks.
    fn count(&self) -> usize {
        let (last, before) = self.part(self.sums.parts() - 1);
        before + last.len().div_ceil(INPUTS)
    }

    /// Floats of a tile of rows.
    fn tile_len<const SPLIT: bool>(&self) -> usize {
        self.count() * row_block(SPLIT) / 4
    }

    /// Packs at most 16 rows, so many and what gives each. Gives a bit for each row that has numbers which cannot be split.
    fn pack_tile<'x, const SPLIT: bool>(
        &self,
        (count, row): (usize, impl Fn(usize) -> &'x [f32]),
        out: &mut [f32],
    ) -> u32 {
        let mut out = bytemuck::cast_slice_mut(out);
        let mut excepted = 0;
        for part in 0..self.sums.parts() {
            let (inputs, _) = self.part(part);
            let size = inputs.len().div_ceil(INPUTS) * row_block(SPLIT);
            let (some, others) = out.split_at_mut(size);
            excepted |= pack::rows::<SPLIT>((count, &row), inputs, some);
            out = others;
        }
        excepted
    }
}

/// [`super::columns_of`] for weights in tiles.
pub(super) fn product(
    exec: &Exec,
    scratch: &mut Scratch,
    x: &[f32],
    weight: &CpuWeight,
    out: Columns<'_>,
) -> Result<()> {
    match weight.elements {
        Elements::Bf16Tiles => Product::<false>::new(exec, x, weight, out).run(scratch),
        _ => Product::<true>::new(exec, x, weight, out).run(scratch),
    }
}

/// Floats of a tile of 16 rows for [`some_panels`].
pub(crate) fn tile_len(weight: &CpuWeight, sums: SumSplit) -> usize {
    Blocks::of(weight, sums).tile_len::<false>()
}

/// Packs rows, so many and what gives each, in tiles for [`some_panels`].
pub(crate) fn pack_tiles<'x>(
    weight: &CpuWeight,
    sums: SumSplit,
    (rows, row): (usize, impl Fn(usize) -> &'x [f32]),
    out: &mut [f32],
) {
    let blocks = Blocks::of(weight, sums);
    let tiles = out.chunks_exact_mut(blocks.tile_len::<false>().max(1));
    for (first, tile) in (0..rows).step_by(amx::TILE_ROWS).zip(tiles) {
        let count = (rows - first).min(amx::TILE_ROWS);
        blocks.pack_tile::<false>((count, |r| row(first + r)), tile);
    }
}

/// [`super::some_panels`] for weights of bf16 in tiles.
pub(crate) fn some_panels(
    exec: &Exec,
    (packed, rows): (&[f32], usize),
    weight: &CpuWeight,
    (panels, sums): (Range<usize>, PartSums),
    out: Columns<'_>,
) {
    let (sums, stride) = sums.apart();
    let product = Product::<false> {
        exec,
        x: &[],
        weight,
        out,
        rows,
        blocks: Blocks::of(weight, sums),
    };
    // SAFETY: weights are in tiles only where there are tiles, and nothing that is called here configures others.
    let configured = unsafe { Tiles::configure() };
    for part in 0..sums.parts() {
        let rows = (packed, 0..product.tiles());
        let columns = (&mut [][..], panels.clone());
        product.part(&configured, rows, columns, part, out.behind(part * stride));
    }
}

/// Multiplies 32 rows with a panel so often, on this thread; gives the operations of one product.
///
/// # Panics
/// When the level has no tiles.
pub(crate) fn repeat_products<const SPLIT: bool>(level: Level, rounds: usize) -> usize {
    assert!(level.has_tiles());
    const BLOCKS: usize = 4;
    #[repr(align(64))]
    struct Lines([u8; BLOCKS * SPLIT_BLOCK]);
    let (rows, columns) = (
        Lines([0; BLOCKS * SPLIT_BLOCK]),
        Lines([0; BLOCKS * SPLIT_BLOCK]),
    );
    let mut sums = [[0.0f32; PANEL]; 2 * amx::TILE_ROWS];
    let [first, second] =
        [0, 1].map(|t| &rows.0[t * BLOCKS * row_block(SPLIT)..][..BLOCKS * row_block(SPLIT)]);
    let operands = Operands::<SPLIT> {
        rows: [first, second],
        columns: &columns.0[..BLOCKS * SPLIT_BLOCK / if SPLIT { 1 } else { 2 }],
        inputs: BLOCKS * INPUTS,
    };
    let place = Block {
        ptr: sums.as_mut_ptr().cast(),
        stride: PANEL,
        rows: sums.len(),
        cols: PANEL,
    };
    // SAFETY: the level has tiles (asserted), and nothing that is called here configures others.
    let configured = unsafe { Tiles::configure() };
    for _ in 0..rounds {
        // SAFETY: the array has 32 rows of 32 columns.
        unsafe { operands.multiply(&configured, place, true) };
    }
    2 * sums.len() * PANEL * operands.inputs
}

/// Some rows times a weight, both split or of bf16.
struct Product<'a, const SPLIT: bool> {
    exec: &'a Exec,
    x: &'a [f32],
    weight: &'a CpuWeight,
    out: Columns<'a>,
    rows: usize,
    blocks: Blocks,
}

/// How rows and panels are cut into tasks.
struct Plan {
    tiles: usize,
    row_parts: usize,
    panels: usize,
    group: usize,
}

impl Plan {
    /// Few rows and `group` panels, which are many, to a task: what it reads of rows stays in the second-level cache while panels,
    /// which all tasks read, pass by. `None` where that makes too few tasks.
    fn by_rows(threads: usize, tiles: usize, panels: usize, group: usize) -> Option<Self> {
        // Few parts are as many for each thread, so that none waits for the last ones.
        let row_parts = match tiles / LEAST_TILES {
            few if few < 8 * threads => few / threads * threads,
            many => many,
        };
        (row_parts >= 2 * threads).then_some(Self {
            tiles,
            row_parts,
            group,
            panels,
        })
    }

    fn new(threads: usize, tiles: usize, panels: usize) -> Self {
        let wanted = if threads == 1 { 1 } else { 4 * threads };
        let mut row_parts = tiles.div_ceil(TASK_TILES);
        let mut group = GROUP.min(panels.div_ceil(threads)).max(1);
        let tasks = |row_parts: usize, group| row_parts * panels.div_ceil(group);
        while tasks(row_parts, group) < wanted && tiles / (row_parts + 1) >= LEAST_TILES {
            row_parts += 1;
        }
        while tasks(row_parts, group) < wanted && group > 1 {
            group -= 1;
        }
        Self {
            tiles,
            row_parts,
            panels,
            group,
        }
    }

    fn tasks(&self) -> usize {
        self.row_parts * self.panels.div_ceil(self.group)
    }

    /// Tiles of rows, and panels, of a task.
    fn task(&self, task: usize) -> (Range<usize>, Range<usize>) {
        let (group, part) = (task / self.row_parts, task % self.row_parts);
        // Pairs of tiles stay together.
        let cut = |part: usize| (self.tiles * part / self.row_parts).next_multiple_of(2);
        let first = group * self.group;
        (
            cut(part).min(self.tiles)..cut(part + 1).min(self.tiles),
            first..(first + self.group).min(self.panels),
        )
    }
}

impl<'a, const SPLIT: bool> Product<'a, SPLIT> {
    /// Bytes of a block of a tile of rows.
    const ROW_BLOCK: usize = row_block(SPLIT);
    /// Bytes of a block of a panel.
    const COLUMN_BLOCK: usize = if SPLIT { SPLIT_BLOCK } else { BF16_BLOCK };
    /// Floats of a chunk of a panel.
    const CHUNK_FLOATS: usize = CHUNK_BLOCKS * Self::COLUMN_BLOCK / 4;

    fn new(exec: &'a Exec, x: &'a [f32], weight: &'a CpuWeight, out: Columns<'a>) -> Self {
        Self {
            exec,
            x,
            weight,
            out,
            rows: x.len() / weight.shape.cols,
            blocks: Blocks::of(weight, weight.sums),
        }
    }

    fn tiles(&self) -> usize {
        self.rows.div_ceil(amx::TILE_ROWS)
    }

    fn run(&self, scratch: &mut Scratch) -> Result<()> {
        let (tiles, threads) = (self.tiles(), self.exec.pool.threads());
        let packed_len = tiles * self.blocks.tile_len::<SPLIT>();
        let partial_len = self.partial_len();
        let exceptions_len = tiles * amx::TILE_ROWS;
        let own_len = match self.has_shifted_part() {
            true => Self::CHUNK_FLOATS,
            false => 0,
        };
        let lens = [
            packed_len,
            threads * own_len,
            threads * 2 * partial_len,
            exceptions_len,
        ];
        let mut rest = scratch.floats(lens.iter().sum())?;
        let [packed, own, partials, exceptions] = lens.map(|len| {
            let (some, others) = std::mem::take(&mut rest).split_at_mut(len);
            rest = others;
            some
        });
        self.pack_rows(packed, exceptions);
        let packed = &*packed;
        let (own, partials) = (SharedMut::new(own), SharedMut::new(partials));
        let panels = self.weight.panels();
        if panels == 0 {
            return Ok(());
        }
        // Buffers for the sums of a part have the columns of a group.
        let by_rows = match SPLIT && partial_len == 0 {
            true => {
                let group = (PANEL_BYTES / self.weight.panel_bytes()).clamp(1, panels);
                Plan::by_rows(threads, tiles, panels, group)
            }
            false => None,
        };
        let plan = by_rows.unwrap_or_else(|| Plan::new(threads, tiles, panels));
        self.exec.pool.run(plan.tasks(), &|task, thread| {
            let (tiles, panels) = plan.task(task);
            // SAFETY: no two running tasks share a thread number.
            let own = unsafe { own.part(thread * own_len, own_len) };
            // SAFETY: as above, and both halves are apart.
            let partials = [0, 1].map(|half| unsafe {
                SharedMut::new(partials.part((2 * thread + half) * partial_len, partial_len))
            });
            self.task((packed, tiles), (own, panels), partials);
        });
        if SPLIT {
            self.repeat(exceptions);
        }
        Ok(())
    }

    /// Floats of a buffer for the sums of a part.
    fn partial_len(&self) -> usize {
        match self.blocks.sums.parts() {
            1 => 0,
            _ => PARTIAL_ROWS.min(self.tiles() * amx::TILE_ROWS) * GROUP * PANEL,
        }
    }

    fn pack_rows(&self, packed: &mut [f32], exceptions: &mut [f32]) {
        let (len, cols) = (self.blocks.tile_len::<SPLIT>(), self.weight.shape.cols);
        let (packed, exceptions) = (SharedMut::new(packed), SharedMut::new(exceptions));
        let cost = amx::TILE_ROWS * cols / 4;
        self.exec.parallel_for(self.tiles(), cost, |tiles, _| {
            for t in tiles {
                let first = t * amx::TILE_ROWS;
                let rows = &self.x[first * cols..];
                let rows = &rows[..rows.len().min(amx::TILE_ROWS * cols)];
                // SAFETY: each tile is packed by one task.
                let (out, exceptions) = unsafe {
                    (
                        packed.part(t * len, len),
                        exceptions.part(first, amx::TILE_ROWS),
                    )
                };
                let row = |r: usize| &rows[r * cols..][..cols];
                let rows = (rows.len() / cols, row);
                let excepted = self.blocks.pack_tile::<SPLIT>(rows, out);
                for (r, exception) in exceptions.iter_mut().enumerate() {
                    *exception = f32::from(u8::from(excepted >> r & 1 != 0));
                }
            }
        });
    }

    /// The bytes of a panel.
    fn panel(&self, panel: usize) -> &'a [u8] {
        let stride = self.weight.panel_bytes();
        &self.weight.bytes()[panel * stride..][..stride]
    }

    /// Whether a part of the sums begins inside a block of split panels.
    fn has_shifted_part(&self) -> bool {
        let starts = |part| self.blocks.part(part).0.start;
        SPLIT && (0..self.blocks.sums.parts()).any(|part| !starts(part).is_multiple_of(INPUTS))
    }

    /// Inputs `chunk` of panel `p`, in whole blocks where they are split: what follows in the last one is multiplied by zeros. A
    /// part of sums that begins inside a block is laid to blocks of its own, in `own`.
    fn columns<'c>(&self, p: usize, chunk: Range<usize>, own: &'c mut [f32]) -> &'c [u8]
    where
        'a: 'c,
    {
        if SPLIT && !chunk.start.is_multiple_of(INPUTS) {
            let own = bytemuck::cast_slice_mut(own);
            let own = &mut own[..chunk.len().div_ceil(INPUTS) * SPLIT_BLOCK];
            pack::realigned(self.panel(p), chunk, own);
            return own;
        }
        let place = |input: usize| input * (Self::COLUMN_BLOCK / INPUTS);
        let end = match SPLIT {
            true => chunk.end.next_multiple_of(INPUTS),
            false => chunk.end,
        };
        &self.panel(p)[place(chunk.start)..place(end)]
    }

    /// Some tiles of rows times some panels, on this thread.
    fn task(
        &self,
        (packed, tiles): (&[f32], Range<usize>),
        (own, panels): (&mut [f32], Range<usize>),
        partials: [SharedMut<'_, f32>; 2],
    ) {
        // SAFETY: weights are in tiles only where there are tiles, and nothing that is called here configures others.
        let configured = unsafe { Tiles::configure() };
        let sums = self.blocks.sums;
        if sums.parts() == 1 {
            self.part(&configured, (packed, tiles), (own, panels), 0, self.out);
            return;
        }
        let columns = panels.start * PANEL..(panels.end * PANEL).min(self.weight.shape.rows);
        for first in tiles.clone().step_by(PARTIAL_ROWS / amx::TILE_ROWS) {
            let tiles = first..(first + PARTIAL_ROWS / amx::TILE_ROWS).min(tiles.end);
            let rows = tiles.start * amx::TILE_ROWS..(tiles.end * amx::TILE_ROWS).min(self.rows);
            let origin = (rows.start, columns.start);
            let [left, right] = partials.map(|place| Columns::from(place, GROUP * PANEL, origin));
            for part in 0..sums.parts() {
                let to = PartSums::Tree(sums).place(part, self.out, [left, right]);
                let some = !sums.part(part, self.blocks.steps).is_empty();
                let rows_of_part = (packed, tiles.clone());
                let some_panels = (&mut *own, panels.clone());
                self.part(&configured, rows_of_part, some_panels, part, to);
                let add = |from, to| {
                    let (rows, columns) = (rows.clone(), columns.clone());
                    // SAFETY: partial sums are memory of this task, and apart; in the result, it has its panels and tiles for itself.
                    let added = unsafe { AddColumns::new((from, to), rows, columns) };
                    self.exec.level.run(added);
                };
                add_partials(part, some, [left, right], self.out, add);
            }
        }
    }

    /// The sums of a part.
    fn part(
        &self,
        configured: &Tiles,
        (packed, tiles): (&[f32], Range<usize>),
        (own, panels): (&mut [f32], Range<usize>),
        part: usize,
        out: Columns<'_>,
    ) {
        let (inputs, first_block) = self.blocks.part(part);
        let packed: &[u8] = bytemuck::cast_slice(packed);
        let row_bytes = self.blocks.count() * Self::ROW_BLOCK;
        let mut multiply = |chunk: Range<usize>, p: usize| {
            let block = first_block + (chunk.start - inputs.start) / INPUTS;
            let add = chunk.start > inputs.start;
            let columns = self.columns(p, chunk.clone(), own);
            let cols = PANEL.min(self.weight.shape.rows - p * PANEL);
            for t in tiles.clone().step_by(2) {
                let rows = t * amx::TILE_ROWS..((t + 2) * amx::TILE_ROWS).min(self.rows);
                let two = t + 1 < tiles.end;
                let count = chunk.len().div_ceil(INPUTS) * Self::ROW_BLOCK;
                let rows_of = |t| &packed[t * row_bytes + block * Self::ROW_BLOCK..][..count];
                let operands = Operands::<SPLIT> {
                    rows: [rows_of(t), if two { rows_of(t + 1) } else { &[] }],
                    columns,
                    inputs: chunk.len(),
                };
                let rows = if two {
                    rows
                } else {
                    rows.start..rows.end.min((t + 1) * amx::TILE_ROWS)
                };
                let place = Block {
                    ptr: out.rows(rows.clone(), p * PANEL, cols),
                    stride: out.stride,
                    rows: rows.len(),
                    cols,
                };
                // SAFETY: the block lies in `out` (checked by `rows`), where a task has its rows and columns for itself.
                unsafe { operands.multiply(configured, place, add) };
            }
        };
        let mut first = panels.start;
        if !SPLIT && self.rows == 1 {
            let whole = inputs.start..inputs.end - inputs.len() % INPUTS;
            let row = &packed[first_block * Self::ROW_BLOCK..][..whole.len() * TILE / INPUTS];
            while !row.is_empty() && self.has_four_panels(first..panels.end) {
                let bytes = self.weight.panel_bytes();
                let columns = &self.weight.bytes()[first * bytes..][..row::PANELS * bytes];
                let columns = &columns[inputs.start * PANEL * 2..];
                let sums = out.rows(0..1, first * PANEL, row::PANELS * PANEL);
                // SAFETY: where there are tiles, there is AVX-512. The sums lie in `out` (checked by `rows`), where a task has its
                // columns for itself.
                unsafe { row::four_panels(row, columns, bytes, sums) };
                if whole.end < inputs.end {
                    let panels = first..first + row::PANELS;
                    panels.for_each(|p| multiply(whole.end..inputs.end, p));
                }
                first += row::PANELS;
            }
        }
        for start in inputs.clone().step_by(CHUNK_BLOCKS * INPUTS) {
            let chunk = start..(start + CHUNK_BLOCKS * INPUTS).min(inputs.end);
            (first..panels.end).for_each(|p| multiply(chunk.clone(), p));
        }
    }

    /// Whether these panels begin with four whole ones.
    fn has_four_panels(&self, panels: Range<usize>) -> bool {
        panels.len() >= row::PANELS
            && (panels.start + row::PANELS) * PANEL <= self.weight.shape.rows
    }

    /// Products of the rows with numbers that cannot be split, as at other levels.
    fn repeat(&self, exceptions: &[f32]) {
        let cols = self.weight.shape.cols;
        for (row, x) in self.x.chunks_exact(cols).enumerate() {
            if exceptions[row] != 0.0 {
                let out = self.out.behind(row * self.out.stride);
                direct::<SplitF32>(self.exec, x, self.weight, out, (1, 1));
            }
        }
    }
}
