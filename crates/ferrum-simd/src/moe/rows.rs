//! The rows of all pairs, packed for products with the matrices of their experts.
//!
//! The rows of an expert are brought side by side, packed as its kernel wants them, and multiplied by
//! the product kernels of `gemm` and `quant`: one row straight from the packed weights, many in tiles.

use super::{CpuExperts, Matrices};
use crate::exec::{Exec, Scratch};
use crate::gemm::lane::{Bf16PairLane, F32Lane, Lane};
use crate::gemm::pack::{Elements, pack_tile};
use crate::gemm::tile::PANEL;
use crate::gemm::{self, Columns, GemmMode, PartSums};
#[cfg(target_arch = "x86_64")]
use crate::gemm::{CpuWeight, amx};
use crate::memory::SharedMut;
use crate::quant::acts::{self, WORDS};
use crate::quant::format::UNIT;
use crate::quant::{self, Product, SomePanels};
#[cfg(target_arch = "x86_64")]
use crate::simd::amx::TILE_ROWS;
#[cfg(target_arch = "x86_64")]
use ferrum_types::SumSplit;
use ferrum_types::check::{SortedPairs, elements};
use ferrum_types::{ExpertInput, MoeShape, Result};
use std::ops::Range;

/// Where the input of a pair is.
#[derive(Clone, Copy)]
pub(super) struct Input<'a> {
    x: &'a [f32],
    kind: ExpertInput,
    /// Pairs sorted by expert.
    pub(super) ids: &'a [i32],
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

/// Packed rows of all pairs, and which experts have which.
pub(super) struct PackedRows<'a> {
    pub(super) exec: &'a Exec,
    pub(super) input: Input<'a>,
    /// `[expert, first place, rows]`.
    pub(super) groups: &'a [[usize; 3]],
    floats: &'a [f32],
    bf16_pairs: &'a [f32],
    /// Tiles of AMX, and the floats of one.
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
    tiles: (&'a [f32], usize),
    /// Of all stacks.
    acts: &'a [i32],
    /// Words from those of a stack to those of the next one.
    acts_of_stack: usize,
    /// Floats that a thread needs to decode weights.
    pub(super) buffer: usize,
}

/// Packed rows, memory for all, and memory for each thread.
type Packed<'a> = (PackedRows<'a>, &'a mut [f32], &'a mut [f32]);

impl<'a> PackedRows<'a> {
    /// Packs the rows of all pairs for products with stacks of `shape`; `None` where there are none. `cut` says whether products have
    /// a sum for each part of a matrix's inputs ([`PartSums::Apart`]), or one. Beside the rows, gives so many floats for all and,
    /// behind what it needs to decode weights, for each thread.
    ///
    /// # Errors
    /// `InvalidArgument` when the pairs are not sorted, [`OutOfMemory`](ferrum_types::Error::OutOfMemory).
    pub(super) fn new(
        (exec, scratch): (&'a Exec, &'a mut Scratch),
        op: &'static str,
        (x, kind): (&'a [f32], ExpertInput),
        stacks: &[&CpuExperts],
        routing: SortedPairs<'a>,
        (for_all, for_each): (usize, usize),
        (shape, cut): (MoeShape, bool),
    ) -> Result<Option<Packed<'a>>> {
        let fit = |stack: &&CpuExperts| stack.shape == shape.experts;
        assert!(stacks.iter().all(fit), "the stacks");
        let pairs = routing.expert_ids.len();
        let ids = &routing.sorted_pairs[..pairs];
        scratch.items.clear();
        // Groups, and tiles of two kinds, are at most as many as pairs: so a later step with other groups
        // allocates nothing.
        scratch.items.reserve(3 * pairs);
        routing.groups(op, |expert, start, count| {
            scratch.items.push([expert, start, count]);
        })?;
        if pairs == 0 {
            return Ok(None);
        }
        let groups = scratch.items.len();
        let ordered = stacks.iter().any(|stack| stack.is_ordered());
        let alone = kind == ExpertInput::PerToken && shape.tokens == 1 && groups == pairs;
        let input = Input {
            x,
            kind,
            ids,
            top_k: shape.top_k,
            k: shape.experts.k,
            shared: alone && !ordered,
        };
        let sizes = ScratchSizes::of(op, exec, (&input, groups), stacks, cut)?;
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
        let acts_of_stack = if ordered { sizes.bytes } else { 0 };
        let bytes = sizes.bytes + acts_of_stack * stacks.len().saturating_sub(1);
        let threads = exec.pool.threads() * (for_each + sizes.buffer);
        let packed = sizes.tiles + sizes.floats + sizes.bf16_pairs + bytes;
        let (words, items) = scratch.floats_and_items(packed + for_all + threads)?;
        // First, so that tiles begin with a line of the cache.
        let (in_tiles, rest) = words.split_at_mut(sizes.tiles);
        let (floats, rest) = rest.split_at_mut(sizes.floats);
        let (bf16_pairs, rest) = rest.split_at_mut(sizes.bf16_pairs);
        let (bytes, rest) = rest.split_at_mut(bytes);
        let (for_all, for_each) = rest.split_at_mut(for_all);
        let acts: &mut [i32] = bytemuck::cast_slice_mut(bytes);
        let [dense, quantised] = tiles.map(|tiles| &items[tiles]);
        pack_lanes::<F32Lane>(exec, &input, dense, floats);
        pack_lanes::<Bf16PairLane>(exec, &input, dense, bf16_pairs);
        if sizes.bytes > 0 {
            for (acts, stack) in acts.chunks_exact_mut(sizes.bytes).zip(stacks) {
                pack_acts(exec, &input, quantised, &stack.matrices, acts);
            }
        }
        let groups = &items[..groups];
        #[cfg(target_arch = "x86_64")]
        if let Some(matrices) = stacks.iter().find_map(|stack| matrices_in_tiles(stack)) {
            pack_tiles(
                exec,
                (&input, groups),
                (matrices, cut),
                sizes.tile,
                in_tiles,
            );
        }
        let rows = Self {
            exec,
            input,
            groups,
            floats,
            bf16_pairs,
            tiles: (in_tiles, sizes.tile),
            acts,
            acts_of_stack,
            buffer: sizes.buffer,
        };
        Ok(Some((rows, for_all, for_each)))
    }

    /// What products of all rows with matrices of `n` outputs cost.
    pub(super) fn cost(&self, n: usize) -> usize {
        self.input.ids.len() * n.div_ceil(PANEL) * (self.input.k * PANEL / 16)
    }

    /// Products of stack number `index` with the rows of a group, into these columns.
    pub(super) fn product(
        &self,
        (index, stack, sums): (usize, &CpuExperts, PartSums),
        [expert, start, rows]: [usize; 3],
        panels: Range<usize>,
        buffer: &mut [f32],
        columns: Columns<'_>,
    ) {
        let (exec, k) = (self.exec, self.input.k);
        let acts = &self.acts[index * self.acts_of_stack..];
        let place = self.input.packed_at(start);
        match &stack.matrices {
            #[cfg(target_arch = "x86_64")]
            Matrices::Dense(matrices) if matrices[expert].elements.are_tiles() => {
                let (tiles, len) = self.tiles;
                let group = self.groups.partition_point(|group| group[1] < start);
                let first = first_tile(&self.input, (group, start));
                let packed = (&tiles[first * len..], rows);
                amx::some_panels(exec, packed, &matrices[expert], (panels, sums), columns);
            }
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
                gemm::some_panels(exec, (packed, rows), weight, (panels, sums), block, columns);
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
                    sums,
                    columns,
                };
                // A `Packed` is of a type that is packed (its constructor says so), and that is all
                // that could be wrong.
                let _ = weight.with(SomePanels { product, panels });
            }
        }
    }
}

/// Floats (or words of 32 bits) that a product needs for a moment.
struct ScratchSizes {
    /// Rows packed for dense matrices.
    floats: usize,
    /// Rows packed for dot products of bf16.
    bf16_pairs: usize,
    /// Rows packed in tiles.
    tiles: usize,
    /// One of these tiles.
    tile: usize,
    /// Rows packed for quantised ones, in one order.
    bytes: usize,
    /// Of each thread, to decode dense weights.
    buffer: usize,
}

impl ScratchSizes {
    fn of(
        op: &'static str,
        exec: &Exec,
        (input, groups): (&Input<'_>, usize),
        stacks: &[&CpuExperts],
        cut: bool,
    ) -> Result<Self> {
        let mut sizes = Self {
            floats: 0,
            bf16_pairs: 0,
            tiles: 0,
            tile: 0,
            bytes: 0,
            buffer: 0,
        };
        #[cfg(not(target_arch = "x86_64"))]
        let _ = (groups, cut);
        let rows = input.packed_rows();
        for stack in stacks {
            let buffer = match &stack.matrices {
                #[cfg(target_arch = "x86_64")]
                Matrices::Dense(_) if let Some([first, ..]) = matrices_in_tiles(stack) => {
                    sizes.tile = amx::tile_len(first, sums_of(first, cut));
                    let tiles = first_tile(input, (groups, input.ids.len())).max(1);
                    sizes.tiles = elements(op, &[tiles, sizes.tile])?;
                    0
                }
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

/// The matrices of a stack, if their products are made in tiles: all of a stack are alike.
#[cfg(target_arch = "x86_64")]
fn matrices_in_tiles(stack: &CpuExperts) -> Option<&[CpuWeight]> {
    match &stack.matrices {
        Matrices::Dense(all) if all.first()?.elements.are_tiles() => Some(all),
        _ => None,
    }
}

/// How sums of products with a matrix are cut.
#[cfg(target_arch = "x86_64")]
fn sums_of(matrix: &CpuWeight, cut: bool) -> SumSplit {
    if cut { matrix.sums } else { SumSplit::WHOLE }
}

/// Which tile of rows is the first of a group, whose first place is `start`: each of the groups before it, `group` in number, has at
/// most one tile that is not full.
#[cfg(target_arch = "x86_64")]
fn first_tile(input: &Input<'_>, (group, start): (usize, usize)) -> usize {
    match input.shared {
        true => 0,
        false => start / TILE_ROWS + group,
    }
}

/// Packs the rows of all groups in tiles of `tile` floats.
#[cfg(target_arch = "x86_64")]
fn pack_tiles(
    exec: &Exec,
    (input, groups): (&Input<'_>, &[[usize; 3]]),
    (matrices, cut): (&[CpuWeight], bool),
    tile: usize,
    packed: &mut [f32],
) {
    let groups = if input.shared { &groups[..1] } else { groups };
    let packed = SharedMut::new(packed);
    let total = groups.len() * cost(input, groups);
    exec.parallel_for_dynamic(groups.len(), total, |group, _| {
        let [expert, start, rows] = groups[group];
        let (matrix, len) = (&matrices[expert], rows.div_ceil(TILE_ROWS) * tile);
        // SAFETY: each group is packed by one task, and their tiles do not overlap.
        let out = unsafe { packed.part(first_tile(input, (group, start)) * tile, len) };
        let row = |row| input.row(start + row);
        amx::pack_tiles(matrix, sums_of(matrix, cut), (rows, row), out);
    });
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
            pack_tile::<L>(exec, rows, |row| input.row(place + row), out);
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
