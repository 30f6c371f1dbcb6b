//! Dense products, row look-ups and the largest element of a row.
//!
//! For few rows the packed weight goes straight to registers (it is read from memory once, at the speed
//! of memory). Many rows are multiplied in blocks: eight panels become f32 (if it is not what products
//! take already) in a buffer, and each is multiplied with a chunk of tiles of rows at a time.

#[cfg(target_arch = "x86_64")]
pub(crate) mod amx;
mod columns;
pub(crate) mod e4m3;
mod format;
pub(crate) mod lane;
pub mod pack;
pub(crate) mod tile;
mod tiles;

use super::memory::SharedMut;
pub(crate) use columns::{AddColumns, Columns, PartSums, add_partials};
pub use pack::{CpuWeight, Elements};
pub use tile::PANEL;

use super::exec::{Exec, Scratch};
use super::isa::Kernel;
use super::math;
use super::simd::{LANES, Simd};
use ferrum_types::{GemmShape, Result, RowShape, SumSplit};
use lane::Lane;
use pack::{Format, Panels, pack_rows, with_format};
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ops::Range;
use tile::{ARows, UNROLL, with_rows};
use tiles::Tiles;

/// Steps of `k` that a block covers at most: 48 KiB of a panel, which the tiles of a chunk read one after the other.
const STEPS: usize = 384;
/// Panels of a block, 384 KiB as f32. The rows of a chunk are read once for each of them.
const GROUP: usize = 8;
/// Tiles of rows up to which panels are decoded in registers for each tile.
const DIRECT_TILES: usize = 4;
/// Rows whose packed form is held at once.
const ROWS_AT_ONCE: usize = 1024;
/// Rows whose sums are held at once beside the result, where sums are cut: 256 KiB for a block's columns.
const PARTIAL_ROWS: usize = 256;

/// What the level's tile looks like.
struct TileSize;

impl Kernel for TileSize {
    /// Rows of a tile: of f32 columns, and of columns that are decoded in registers.
    type Output = (usize, usize);

    #[inline(always)]
    fn run<S: Simd>(self, _: S) -> (usize, usize) {
        (S::TILE_ROWS, S::DIRECT_ROWS)
    }
}

/// `out[rows, n] = x[rows, k] · weight[n, k]ᵀ`.
///
/// # Errors
/// [`OutOfMemory`](ferrum_types::Error::OutOfMemory) for scratch memory.
///
/// # Panics
/// When a slice is shorter than the shape says, or the weight is of another one.
pub fn gemm(
    exec: &Exec,
    scratch: &mut Scratch,
    x: &[f32],
    weight: &CpuWeight,
    out: &mut [f32],
    shape: GemmShape,
) -> Result<()> {
    let GemmShape { rows, n, k } = shape;
    assert_eq!((weight.shape.rows, weight.shape.cols), (n, k), "the weight");
    let (x, out) = (&x[..rows * k], &mut out[..rows * n]);
    if rows == 0 || n == 0 {
        return Ok(());
    }
    if k == 0 {
        out.fill(0.0);
        return Ok(());
    }
    for (x, out) in x
        .chunks(ROWS_AT_ONCE * k)
        .zip(out.chunks_mut(ROWS_AT_ONCE * n))
    {
        let columns = Columns::new(SharedMut::new(out), n, 0);
        columns_of(exec, scratch, x, weight, columns)?;
    }
    Ok(())
}

/// [`gemm`] into some columns of a wider result, for a few rows at once.
pub(crate) fn columns_of(
    exec: &Exec,
    scratch: &mut Scratch,
    x: &[f32],
    weight: &CpuWeight,
    columns: Columns<'_>,
) -> Result<()> {
    #[cfg(target_arch = "x86_64")]
    if weight.elements.are_tiles() {
        return amx::product(exec, scratch, x, weight, columns);
    }
    with_format!(weight.elements, F => product::<F>(exec, scratch, x, weight, columns))
}

fn product<F: Format>(
    exec: &Exec,
    scratch: &mut Scratch,
    x: &[f32],
    weight: &CpuWeight,
    out: Columns<'_>,
) -> Result<()> {
    let k = weight.shape.cols;
    let rows = x.len() / k;
    let GemmMode {
        tile_rows,
        direct: direct_form,
    } = GemmMode::of(exec, rows);
    let panels = weight.panels();
    if panels == 0 {
        return Ok(());
    }
    if rows == 1 && F::Lane::INPUTS == 1 {
        direct::<F>(exec, x, weight, out, (rows, tile_rows));
        return Ok(());
    }
    let (block, partial) = match direct_form {
        true => (0, 0),
        false => (
            block_len(weight.elements),
            partial_len(weight.sums, rows, tile_rows),
        ),
    };
    let threads = exec.pool.threads();
    let lanes = rows * weight.steps();
    let floats = scratch.floats(lanes + threads * (block + 2 * partial))?;
    let (packed, buffers) = floats.split_at_mut(lanes);
    pack_rows::<F::Lane>(exec, x, k, tile_rows, SharedMut::new(packed));
    if direct_form {
        direct::<F>(exec, packed, weight, out, (rows, tile_rows));
        return Ok(());
    }
    let (blocks, partials) = buffers.split_at_mut(threads * block);
    let (blocks, partials) = (SharedMut::new(blocks), SharedMut::new(partials));
    let plan = Plan::new(threads, panels, rows.div_ceil(tile_rows));
    exec.pool.run(plan.tasks(), &|task, thread| {
        let (tiles, panels) = plan.task(task);
        // SAFETY: no two running tasks share a thread number.
        let block = unsafe { blocks.part(thread * block, block) };
        let group = Group::<F> {
            exec,
            packed,
            rows,
            tile_rows,
            weight,
            panels,
            format: PhantomData,
        };
        if weight.sums.parts() == 1 {
            return group.sums(tiles, 0..weight.steps(), block, out);
        }
        // SAFETY: as above, and both halves are apart.
        let partials = [0, 1].map(|half| unsafe {
            let place = partials.part((2 * thread + half) * partial, partial);
            SharedMut::new(place)
        });
        group.tree(tiles, block, partials, out);
    });
    Ok(())
}

/// Floats of a buffer for sums of parts of some rows, whose tiles have `tile_rows`.
fn partial_len(sums: SumSplit, rows: usize, tile_rows: usize) -> usize {
    match sums.parts() {
        1 => 0,
        _ => partial_tiles(tile_rows).saturating_mul(tile_rows).min(rows) * GROUP * PANEL,
    }
}

/// Tiles whose sums of parts are held at once.
fn partial_tiles(tile_rows: usize) -> usize {
    (PARTIAL_ROWS / tile_rows).max(1)
}

/// How some rows are multiplied.
#[derive(Clone, Copy)]
pub(crate) struct GemmMode {
    /// Rows of a tile.
    pub(crate) tile_rows: usize,
    /// Whether panels are decoded in registers for each tile.
    pub(crate) direct: bool,
}

impl GemmMode {
    /// The form of `rows` rows.
    pub(crate) fn of(exec: &Exec, rows: usize) -> Self {
        let (tile_rows, direct_rows) = exec.level.run(TileSize);
        let direct = rows <= DIRECT_TILES * direct_rows;
        let most = if direct { direct_rows } else { tile_rows };
        // Tiles of about the same size: a small one at the end would use few registers.
        let tile_rows = rows.div_ceil(rows.div_ceil(most));
        Self { tile_rows, direct }
    }
}

/// Floats of the buffer in which a thread decodes blocks of such weights.
pub(crate) fn block_len(elements: Elements) -> usize {
    if elements.are_lanes() {
        0
    } else {
        GROUP * STEPS * PANEL
    }
}

/// At most [`GROUP`] panels times rows, on this thread.
struct Group<'a, F> {
    exec: &'a Exec,
    packed: &'a [f32],
    rows: usize,
    tile_rows: usize,
    weight: &'a CpuWeight,
    panels: Range<usize>,
    format: PhantomData<F>,
}

impl<F: Format> Group<'_, F> {
    /// Sums over some steps, of some tiles of rows.
    fn sums(&self, tiles: Range<usize>, steps: Range<usize>, block: &mut [f32], out: Columns<'_>) {
        // Blocks of about the same size, since each one reads and writes all sums, and of whole groups of steps.
        let blocks = steps.len().div_ceil(STEPS).max(1);
        let block_steps = steps.len().div_ceil(blocks).next_multiple_of(UNROLL).max(1);
        for first in steps.clone().step_by(block_steps) {
            let part = first..(first + block_steps).min(steps.end);
            if !block.is_empty() {
                self.exec.level.run(Decode::<F> {
                    weight: self.weight,
                    panels: self.panels.clone(),
                    steps: part.clone(),
                    block,
                    format: PhantomData,
                });
            }
            let tiles = Tiles {
                packed: self.packed,
                rows: self.rows,
                tile_rows: self.tile_rows,
                tiles: tiles.clone(),
                weight: self.weight,
                panels: self.panels.clone(),
                steps: part,
                add: first > steps.start,
                block,
                out,
                lane: PhantomData::<F::Lane>,
            };
            F::Lane::run(self.exec.level, tiles);
        }
    }

    /// Sums over all steps, cut as the weight says, of some tiles of rows. Sums of parts are held in `partials`.
    fn tree(
        &self,
        tiles: Range<usize>,
        block: &mut [f32],
        partials: [SharedMut<'_, f32>; 2],
        out: Columns<'_>,
    ) {
        let sums = self.weight.sums;
        let columns =
            self.panels.start * PANEL..(self.panels.end * PANEL).min(self.weight.shape.rows);
        let at_once = partial_tiles(self.tile_rows);
        for first in tiles.clone().step_by(at_once) {
            let tiles = first..(first + at_once).min(tiles.end);
            let rows = tiles.start * self.tile_rows..(tiles.end * self.tile_rows).min(self.rows);
            let origin = (rows.start, columns.start);
            let [left, right] = partials.map(|place| Columns::from(place, GROUP * PANEL, origin));
            for part in 0..sums.parts() {
                let to = PartSums::Tree(sums).place(part, out, [left, right]);
                let steps = sums.part(part, self.weight.steps());
                let some = !steps.is_empty();
                self.sums(tiles.clone(), steps, block, to);
                let add = |from, to| {
                    let (rows, columns) = (rows.clone(), columns.clone());
                    // SAFETY: partial sums are memory of this task, and apart; in the result, it has its panels and tiles for itself.
                    let added = unsafe { AddColumns::new((from, to), rows, columns) };
                    self.exec.level.run(added);
                };
                add_partials(part, some, [left, right], out, add);
            }
        }
    }
}

/// Some panels of `weight` times rows that are packed already, all on this thread: sums of parts are held apart, or there is
/// one. `block` has [`block_len`] floats, or none for the direct form.
pub(crate) fn some_panels(
    exec: &Exec,
    (packed, rows): (&[f32], usize),
    weight: &CpuWeight,
    (panels, sums): (Range<usize>, PartSums),
    block: &mut [f32],
    out: Columns<'_>,
) {
    let GemmMode { tile_rows, direct } = GemmMode::of(exec, rows);
    with_format!(weight.elements, F => if direct {
        let direct = Direct::<F> {
            packed,
            rows,
            tile_rows,
            weight,
            panels,
            sums,
            out,
            format: PhantomData,
        };
        <F as Format>::Lane::run(exec.level, direct);
    } else {
        for first in panels.clone().step_by(GROUP) {
            let group = Group::<F> {
                exec,
                packed,
                rows,
                tile_rows,
                weight,
                panels: first..(first + GROUP).min(panels.end),
                format: PhantomData,
            };
            let tiles = 0..rows.div_ceil(tile_rows);
            let (split, stride) = sums.apart();
            for part in 0..split.parts() {
                let steps = split.part(part, weight.steps());
                // Of an empty part, nothing is written.
                group.sums(tiles.clone(), steps, block, out.behind(part * stride));
            }
        }
    });
}

/// How a product of many rows is cut into tasks.
struct Plan {
    panels: usize,
    group: usize,
    tiles: usize,
    row_parts: usize,
}

impl Plan {
    /// Wide groups of panels reuse the packed rows best; they get narrower, and rows are split, only
    /// while threads would be idle otherwise.
    fn new(threads: usize, panels: usize, tiles: usize) -> Self {
        let wanted = if threads == 1 { 1 } else { 4 * threads };
        let group = (panels / wanted).clamp(1, GROUP);
        let row_parts = (wanted / panels.div_ceil(group)).clamp(1, tiles);
        Self {
            panels,
            group,
            tiles,
            row_parts,
        }
    }

    fn tasks(&self) -> usize {
        self.panels.div_ceil(self.group) * self.row_parts
    }

    /// Tiles of rows, and panels, of a task.
    fn task(&self, task: usize) -> (Range<usize>, Range<usize>) {
        let (column, part) = (task / self.row_parts, task % self.row_parts);
        let tiles = self.tiles * part / self.row_parts..self.tiles * (part + 1) / self.row_parts;
        let first = column * self.group;
        (tiles, first..(first + self.group).min(self.panels))
    }
}

/// Few rows: each panel is decoded in registers for each tile of rows.
fn direct<F: Format>(
    exec: &Exec,
    packed: &[f32],
    weight: &CpuWeight,
    out: Columns<'_>,
    (rows, tile_rows): (usize, usize),
) {
    let cost = weight.shape.cols * PANEL * rows.div_ceil(4) / 4;
    exec.parallel_for(weight.panels(), cost, |panels, _| {
        let direct = Direct::<F> {
            packed,
            rows,
            tile_rows,
            weight,
            panels,
            sums: PartSums::Tree(weight.sums),
            out,
            format: PhantomData,
        };
        F::Lane::run(exec.level, direct);
    });
}

/// Panels times a few tiles of rows, decoded in registers.
struct Direct<'a, F> {
    packed: &'a [f32],
    rows: usize,
    tile_rows: usize,
    weight: &'a CpuWeight,
    panels: Range<usize>,
    sums: PartSums,
    out: Columns<'a>,
    format: PhantomData<F>,
}

impl<F: Format> Kernel for Direct<'_, F> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        if self.rows > self.tile_rows {
            // The first tile brings a panel into the cache for the others.
            for panel in self.panels.clone() {
                for row in (0..self.rows).step_by(self.tile_rows) {
                    let count = self.tile_rows.min(self.rows - row);
                    with_rows!(S, count, MR => self.block::<S, MR, 2>(s, row, panel));
                }
            }
            return;
        }
        with_rows!(S, self.rows, MR => {
            // As many panels side by side as the registers allow: more chains of additions in
            // flight, and more streams from memory, which its prefetchers follow by themselves.
            if S::TILE_VECS == 2 && MR <= 2 {
                self.pass::<S, MR, 8>(s);
            } else if MR == 1 {
                self.pass::<S, MR, 6>(s);
            } else if S::TILE_VECS == 2 && MR <= 6 {
                self.pass::<S, MR, 4>(s);
            } else {
                self.pass::<S, MR, 2>(s);
            }
        });
    }
}

impl<F: Format> Direct<'_, F> {
    #[inline(always)]
    fn pass<S: Simd, const MR: usize, const NV: usize>(&self, s: S) {
        let mut panel = self.panels.start;
        while panel + NV / 2 <= self.panels.end {
            self.block::<S, MR, NV>(s, 0, panel);
            panel += NV / 2;
        }
        while panel < self.panels.end {
            self.block::<S, MR, 2>(s, 0, panel);
            panel += 1;
        }
    }

    /// The tile that begins at `row` times `NV/2` panels from `panel` on.
    #[inline(always)]
    fn block<S: Simd, const MR: usize, const NV: usize>(&self, s: S, row: usize, panel: usize) {
        let (n, steps) = (self.weight.shape.rows, self.weight.steps());
        let stride = self.weight.panel_bytes();
        let packed = &self.packed[row * steps..][..MR * steps];
        let bytes = &self.weight.bytes()[panel * stride..][..NV / 2 * stride];
        let rows = ARows {
            ptr: packed.as_ptr(),
            row: 1,
            step: MR,
        };
        let columns = Panels::<F> {
            ptr: bytes.as_ptr(),
            stride,
            format: PhantomData,
        };
        let first = panel * PANEL;
        let cols = (NV * LANES).min(n - first);
        let mut partials = MaybeUninit::uninit();
        let partials = match self.sums {
            PartSums::Tree(split) if split.parts() > 1 => {
                let partials = partials.write([[[[0.0; LANES]; NV]; MR]; 2]);
                let partials = partials.each_mut().map(|one| one.as_flattened_mut());
                partials.map(|one| SharedMut::new(one.as_flattened_mut()))
            }
            _ => [SharedMut::new(&mut []), SharedMut::new(&mut [])],
        };
        let place = |place| Columns::from(place, NV * LANES, (row, first));
        let [left, right] = partials.map(place);
        let split = self.sums.split();
        for part in 0..split.parts() {
            let steps = split.part(part, steps);
            assert!(
                steps.end <= self.weight.steps(),
                "a cut behind the last step"
            );
            let to = self.sums.place(part, self.out, [left, right]);
            let some = !steps.is_empty();
            if some {
                let mut acc = [[s.zero(); NV]; MR];
                // SAFETY: `packed` has MR values for each step of the weight and `bytes` is NV/2 panels of as many
                // (both sliced so); these steps are some of them (asserted).
                unsafe { tile::multiply::<S, _, MR, NV, 1>(s, rows, columns, steps, &mut acc) };
                for (i, acc) in acc.iter().enumerate() {
                    // SAFETY: a panel belongs to one task, so no other thread has these columns.
                    let out = unsafe { to.part(row + i, first, cols) };
                    for (v, acc) in acc.iter().enumerate() {
                        if v * LANES < cols {
                            math::store_at(s, out, v * LANES, *acc);
                        }
                    }
                }
            }
            if let PartSums::Tree(_) = self.sums {
                let (rows, columns) = (row..row + MR, first..first + cols);
                add_partials(
                    part,
                    some,
                    [left, right],
                    self.out,
                    #[inline(always)]
                    |from, to| {
                        let (rows, columns) = (rows.clone(), columns.clone());
                        // SAFETY: partial sums are memory of this call, and apart; in the result, a panel belongs to one task.
                        unsafe { AddColumns::new((from, to), rows, columns) }.run(s);
                    },
                );
            }
        }
    }
}

/// Writes some steps of some panels to a block as f32. (For panels of lanes there is no block.)
struct Decode<'a, F> {
    weight: &'a CpuWeight,
    panels: Range<usize>,
    steps: Range<usize>,
    /// `[panels][STEPS][32]`.
    block: &'a mut [f32],
    format: PhantomData<F>,
}

impl<F: Format> Kernel for Decode<'_, F> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let stride = self.weight.panel_bytes();
        assert!(self.steps.end <= self.weight.steps());
        for (i, p) in self.panels.enumerate() {
            let panel = &self.weight.bytes()[p * stride..][..stride];
            let out = &mut self.block[i * STEPS * PANEL..][..self.steps.len() * PANEL];
            for (k, out) in out.as_chunks_mut::<PANEL>().0.iter_mut().enumerate() {
                // SAFETY: the panel has these steps (asserted), `out` has 32 elements.
                unsafe {
                    let [low, high] = F::step(s, panel.as_ptr(), self.steps.start + k);
                    s.store(out.as_mut_ptr(), low);
                    s.store(out.as_mut_ptr().add(LANES), high);
                }
            }
        }
    }
}

/// `out[i, :] = table[ids[i], :]`, zeros for an id outside the table.
///
/// # Panics
/// When a slice is shorter than the shape says.
pub fn embedding_lookup(
    exec: &Exec,
    table: &CpuWeight,
    ids: &[i32],
    out: &mut [f32],
    shape: RowShape,
) {
    rows_by_id(exec, ids, out, shape, |id, out| {
        let inside = id < table.shape.rows;
        if inside {
            table.read_row(id, out);
        }
        inside
    });
}

/// `out[i, :] = src[rows[i], :]`, zeros for an index outside `src`.
///
/// # Panics
/// When a slice is shorter than the shape says.
pub fn gather_rows(exec: &Exec, src: &[f32], rows: &[i32], out: &mut [f32], shape: RowShape) {
    let count = src.len().checked_div(shape.dim).unwrap_or(0);
    rows_by_id(exec, rows, out, shape, |row, out| {
        if row < count {
            out.copy_from_slice(&src[row * shape.dim..][..shape.dim]);
        }
        row < count
    });
}

/// Fills each row of `out` by `read(id, row)`, or with zeros where that says `false`.
pub(crate) fn rows_by_id(
    exec: &Exec,
    ids: &[i32],
    out: &mut [f32],
    RowShape { rows, dim }: RowShape,
    read: impl Fn(usize, &mut [f32]) -> bool + Sync,
) {
    let ids = &ids[..rows];
    let out = SharedMut::new(&mut out[..rows * dim]);
    exec.parallel_for(rows, 4 * dim, |range, _| {
        for i in range {
            // SAFETY: each row belongs to one task.
            let out = unsafe { out.part(i * dim, dim) };
            let found = usize::try_from(ids[i]).is_ok_and(|id| read(id, out));
            if !found {
                out.fill(0.0);
            }
        }
    });
}

/// Index of the largest element of each row; the lowest of equals, never a NaN.
///
/// # Panics
/// When a slice is shorter than the shape says.
pub fn argmax_rows(exec: &Exec, x: &[f32], out: &mut [i32], shape: RowShape) {
    let RowShape { rows, dim } = shape;
    let out = SharedMut::new(&mut out[..rows]);
    exec.parallel_for(rows, dim / 4, |range, _| {
        for r in range {
            // SAFETY: each row belongs to one task.
            let out = unsafe { out.part(r, 1) };
            out[0] = exec.level.run(Argmax(&x[r * dim..][..dim])) as i32;
        }
    });
}

/// Index of the largest element.
struct Argmax<'a>(&'a [f32]);

impl Kernel for Argmax<'_> {
    type Output = usize;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> usize {
        let mut largest = [s.splat(f32::NEG_INFINITY); 4];
        let (vectors, rest) = self.0.as_chunks::<{ 4 * LANES }>();
        for x in vectors {
            for (i, largest) in largest.iter_mut().enumerate() {
                // SAFETY: the chunk has four vectors.
                let v = unsafe { s.load(x.as_ptr().add(i * LANES)) };
                *largest = s.max(v, *largest);
            }
        }
        for x in rest.chunks(LANES) {
            largest[0] = s.max(s.load_part(x, f32::NEG_INFINITY), largest[0]);
        }
        let [a, b, c, d] = largest;
        let value = s.largest(s.max(s.max(a, b), s.max(c, d)));
        self.0.iter().position(|x| *x == value).unwrap_or(0)
    }
}
