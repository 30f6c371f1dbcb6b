//! Many rows times some panels: the order in which tiles and panels meet.
//!
//! A panel is multiplied with a chunk of tiles before the next one is, so that of the two operands it is the smaller, a
//! tile's rows, that changes with every register tile (Goto and van de Geijn, "Anatomy of High-Performance Matrix
//! Multiplication").

use super::STEPS;
use super::columns::Columns;
use super::lane::Lane;
use super::pack::CpuWeight;
use super::tile::{self, ARows, LaneColumns, OutputTile, PANEL, Prefetching, with_rows};
use crate::isa::Kernel;
use crate::simd::{LINE, Simd};
use std::marker::PhantomData;
use std::ops::Range;

/// Rows of a chunk: for the steps of a block, 144 KiB of packed rows, which are read once for each panel.
const CHUNK_ROWS: usize = 96;

/// Some tiles of rows times some panels, for some steps of `k`.
pub(super) struct Tiles<'a, L> {
    pub(super) packed: &'a [f32],
    pub(super) rows: usize,
    pub(super) tile_rows: usize,
    pub(super) tiles: Range<usize>,
    pub(super) weight: &'a CpuWeight,
    pub(super) panels: Range<usize>,
    pub(super) steps: Range<usize>,
    /// Whether they are added to what is there.
    pub(super) add: bool,
    /// The panels as f32, or empty where they are lanes themselves.
    pub(super) block: &'a [f32],
    pub(super) out: Columns<'a>,
    pub(super) lane: PhantomData<L>,
}

impl<L: Lane> Kernel for Tiles<'_, L> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let steps = self.weight.steps();
        let at_once = (CHUNK_ROWS / self.tile_rows).max(1);
        for first in self.tiles.clone().step_by(at_once) {
            let chunk = first..(first + at_once).min(self.tiles.end);
            for (i, p) in self.panels.clone().enumerate() {
                if i == 0 {
                    self.prefetch_out(s, first, p);
                }
                for t in chunk.clone() {
                    if t + 1 < chunk.end {
                        self.prefetch_out(s, t + 1, p);
                    } else if p + 1 < self.panels.end {
                        self.prefetch_out(s, first, p + 1);
                    }
                    let rows = self.rows_of(t);
                    let a = &self.packed[rows.start * steps + self.steps.start * rows.len()..];
                    with_rows!(S, rows.len(), MR => {
                        self.tile::<S, MR>(s, &a[..self.steps.len() * MR], (i, p), t);
                    });
                }
            }
        }
    }
}

impl<L: Lane> Tiles<'_, L> {
    /// The rows of tile `t`.
    #[inline(always)]
    fn rows_of(&self, t: usize) -> Range<usize> {
        let row = t * self.tile_rows;
        row..(row + self.tile_rows).min(self.rows)
    }

    /// Columns of panel `p`.
    #[inline(always)]
    fn panel_cols(&self, p: usize) -> usize {
        PANEL.min(self.weight.shape.rows - p * PANEL)
    }

    /// The lanes of panel `p`, number `i` of this task.
    #[inline(always)]
    fn values(&self, i: usize, p: usize) -> *const f32 {
        let len = self.steps.len() * PANEL;
        if self.block.is_empty() {
            let stride = self.weight.panel_bytes();
            let panel = &self.weight.bytes()[p * stride..][..stride];
            panel[self.steps.start * PANEL * 4..][..len * 4]
                .as_ptr()
                .cast()
        } else {
            self.block[i * STEPS * PANEL..][..len].as_ptr()
        }
    }

    /// What tile `t` asks for while it reads panel `p`: its share of the panel's next steps, or, at
    /// the end, of the first ones of the next task's panel.
    #[inline(always)]
    fn next(&self, t: usize, p: usize) -> (*const u8, usize) {
        let stride = self.weight.panel_bytes();
        let step = stride / self.weight.steps();
        let at = if self.steps.end == self.weight.steps() {
            (p + self.panels.len()) * stride
        } else {
            p * stride + self.steps.end * step
        };
        let (index, count) = (t - self.tiles.start, self.tiles.len());
        let share = at + index * self.steps.len() * step / count;
        let next = self.weight.bytes().as_ptr().wrapping_add(share);
        (next, step * 256 / count)
    }

    /// Prefetches the cache lines to which tile `t` adds, or writes, its sums of panel `p`.
    #[inline(always)]
    fn prefetch_out<S: Simd>(&self, s: S, t: usize, p: usize) {
        let (rows, cols) = (self.rows_of(t), self.panel_cols(p));
        let start = self.out.rows(rows.clone(), p * PANEL, cols);
        for r in 0..rows.len() {
            for at in (0..cols).step_by(LINE / size_of::<f32>()) {
                s.prefetch(start.wrapping_add(r * self.out.stride + at).cast());
            }
        }
    }

    /// Tile `t` of rows times panel `p`, number `i` of this task.
    #[inline(always)]
    fn tile<S: Simd, const MR: usize>(&self, s: S, a: &[f32], (i, p): (usize, usize), t: usize) {
        let steps = self.steps.len();
        assert_eq!(a.len(), MR * steps);
        let rows = ARows {
            ptr: a.as_ptr(),
            row: 1,
            step: MR,
        };
        let (next, prefetch_step) = self.next(t, p);
        let columns = Prefetching {
            columns: LaneColumns::<L>::new(self.values(i, p), PANEL),
            next,
            prefetch_step,
        };
        let cols = self.panel_cols(p);
        let block = OutputTile {
            // From the first to the last element of the block.
            ptr: self.out.rows(self.rows_of(t), p * PANEL, cols),
            stride: self.out.stride,
            cols,
        };
        // SAFETY: tile `t` has MR rows (the caller's choice of MR), `a` MR values for each step (asserted), `values` gives `steps` steps of 32
        // columns, and the block lies in `out`, where a task has its rows and columns for itself.
        unsafe { tile::panel::<S, _, MR>(s, rows, columns, steps, block, self.add) };
    }
}
