//! The register tile: the one inner loop of every matrix product here.
//!
//! `MR` rows of `A` times `NV` vectors of columns of `B`. Each output is one lane and one chain of
//! fused multiply-adds in ascending `k`, whatever the tile's size; that is why one row and many rows,
//! every level and every split of the work give the same bits. (Dot products of bf16 are such chains of
//! their own, at the levels that have them.)

use super::lane::{F32Lane, Lane};
use crate::simd::{LANES, LINE, Simd};
use crate::unrolled::unrolled;
use std::marker::PhantomData;
use std::ops::Range;

/// Most rows of a tile at any level.
pub(crate) const MAX_ROWS: usize = 12;
/// Steps of a full tile that are written out; blocks have a multiple of them.
pub(crate) const UNROLL: usize = 4;
pub use crate::panels::PANEL;

/// Runs `$body` with the constant `$mr` equal to `$rows` (1 to the most that level `$s` uses; nothing
/// for 0). Rows that the level never uses make no code.
macro_rules! with_rows {
    ($s:ty, $rows:expr, $mr:ident => $body:expr) => {
        with_rows!(@ $s, $rows, $mr, $body, 1 2 3 4 5 6 7 8 9 10 11 12)
    };
    (@ $s:ty, $rows:expr, $mr:ident, $body:expr, $($n:literal)*) => {
        match $rows {
            0 => {}
            $($n if const { $n <= <$s as Simd>::TILE_ROWS || $n <= <$s as Simd>::DIRECT_ROWS } => {
                const $mr: usize = $n;
                if const { $n <= <$s as Simd>::TILE_ROWS || $n <= <$s as Simd>::DIRECT_ROWS } {
                    $body
                }
            })*
            more => unreachable!("{more} rows in a tile"),
        }
    };
}
pub(crate) use with_rows;

/// Rows of `A`: element `(i, k)` is at `ptr + i·row + k·step`.
#[derive(Clone, Copy)]
pub(crate) struct ARows {
    pub(crate) ptr: *const f32,
    pub(crate) row: usize,
    pub(crate) step: usize,
}

/// Columns of `B`, vector by vector.
pub(crate) trait Columns: Copy {
    /// What a lane holds.
    type Lane: Lane;

    /// `NV` vectors of row `k`.
    ///
    /// # Safety
    /// Row `k` with that many columns exists.
    unsafe fn at<S: Simd, const NV: usize>(self, s: S, k: usize) -> [S::V; NV];

    /// The same with its first rows left out, up to `k` of them, and how many are left of these: row `left + j` of the
    /// result is row `k + j` of these, for all `j`.
    #[inline(always)]
    fn skip(self, k: usize) -> (Self, usize) {
        (self, k)
    }

    /// Prefetches what is wanted in the cache by the time that rows `k..k + N` have been read.
    #[inline(always)]
    fn prefetch<S: Simd, const N: usize>(self, _: S, _k: usize) {}
}

/// Row-major lanes: row `k` begins at `ptr + k·stride`.
#[derive(Clone, Copy)]
pub(crate) struct LaneColumns<L> {
    pub(crate) ptr: *const f32,
    pub(crate) stride: usize,
    pub(crate) lane: PhantomData<L>,
}

/// Row-major f32.
pub(crate) type F32Columns = LaneColumns<F32Lane>;

impl<L: Lane> LaneColumns<L> {
    /// Rows of `stride` lanes.
    #[inline(always)]
    pub(crate) fn new(ptr: *const f32, stride: usize) -> Self {
        Self {
            ptr,
            stride,
            lane: PhantomData,
        }
    }
}

impl<L: Lane> Columns for LaneColumns<L> {
    type Lane = L;

    #[inline(always)]
    unsafe fn at<S: Simd, const NV: usize>(self, s: S, k: usize) -> [S::V; NV] {
        let mut out = [s.zero(); NV];
        for (v, out) in out.iter_mut().enumerate() {
            // SAFETY: the caller says that the row has NV vectors.
            *out = unsafe { s.load(self.ptr.add(k * self.stride + v * LANES)) };
        }
        out
    }

    #[inline(always)]
    fn skip(self, k: usize) -> (Self, usize) {
        let ptr = self.ptr.wrapping_add(k * self.stride);
        (Self { ptr, ..self }, 0)
    }
}

/// Columns that can be taken one vector at a time.
pub(crate) trait SplitColumns: Columns {
    /// The same without the first vector.
    fn right(self) -> Self;
}

impl<L: Lane> SplitColumns for LaneColumns<L> {
    #[inline(always)]
    fn right(self) -> Self {
        Self {
            ptr: self.ptr.wrapping_add(LANES),
            ..self
        }
    }
}

/// Columns that prefetch the memory that is read next while they are read themselves.
#[derive(Clone, Copy)]
pub(crate) struct Prefetching<C> {
    pub(crate) columns: C,
    pub(crate) next: *const u8,
    /// How far the prefetch in `next` advances for each row, in 1/256 bytes.
    pub(crate) prefetch_step: usize,
}

impl<C: Columns> Columns for Prefetching<C> {
    type Lane = C::Lane;

    #[inline(always)]
    unsafe fn at<S: Simd, const NV: usize>(self, s: S, k: usize) -> [S::V; NV] {
        // SAFETY: the caller's contract.
        unsafe { self.columns.at::<S, NV>(s, k) }
    }

    #[inline(always)]
    fn skip(self, k: usize) -> (Self, usize) {
        let (columns, left) = self.columns.skip(k);
        (Self { columns, ..self }, left)
    }

    #[inline(always)]
    fn prefetch<S: Simd, const N: usize>(self, s: S, k: usize) {
        let start = self.next.wrapping_add(k * self.prefetch_step / 256);
        s.prefetch(start);
        for line in 1..(N * self.prefetch_step).div_ceil(256 * LINE) {
            s.prefetch(start.wrapping_add(line * LINE));
        }
    }
}

impl<C: SplitColumns> SplitColumns for Prefetching<C> {
    #[inline(always)]
    fn right(self) -> Self {
        Self {
            columns: self.columns.right(),
            ..self
        }
    }
}

/// `acc += A · B` over some rows of `B`, of which `N` at a time are written out.
///
/// # Safety
/// `a` has `MR` rows and `b` `NV` vectors, each with these steps.
#[inline(always)]
pub(crate) unsafe fn multiply<
    S: Simd,
    C: Columns,
    const MR: usize,
    const NV: usize,
    const N: usize,
>(
    s: S,
    a: ARows,
    b: C,
    mut steps: Range<usize>,
    acc: &mut [[S::V; NV]; MR],
) {
    let mut sums = *acc;
    if N > 1 {
        while steps.len() >= N {
            let step = steps.start;
            b.prefetch::<S, N>(s, step);
            let ptr = a.ptr.wrapping_add(step * a.step);
            let (a, (b, first)) = (ARows { ptr, ..a }, b.skip(step));
            unrolled!(u < N => {
                // SAFETY: `step + u` is one of the steps; `a` begins at `step`, and row `first + u` of what `skip` left
                // of `b` is row `step + u`.
                unsafe { add_step(s, (a, u), (b, first + u), &mut sums) };
            });
            steps.start += N;
        }
    }
    for step in steps {
        b.prefetch::<S, 1>(s, step);
        // SAFETY: `step` is one of the steps.
        unsafe { add_step(s, (a, step), (b, step), &mut sums) };
    }
    *acc = sums;
}

/// `sums +=` column `k` of `A` · row `row` of `B`.
///
/// # Safety
/// `a` has `MR` rows with column `k`, and `b` `NV` vectors of row `row`.
#[inline(always)]
unsafe fn add_step<S: Simd, C: Columns, const MR: usize, const NV: usize>(
    s: S,
    (a, k): (ARows, usize),
    (b, row): (C, usize),
    sums: &mut [[S::V; NV]; MR],
) {
    // SAFETY: the caller's contract.
    let columns = unsafe { b.at::<S, NV>(s, row) };
    unrolled!(i < MR => {
        // SAFETY: `i < MR`, and the caller's contract for the column.
        let x = s.splat(unsafe { *a.ptr.add(i * a.row + k * a.step) });
        unrolled!(v < NV => {
            sums[i][v] = C::Lane::add(s, x, columns[v], sums[i][v]);
        });
    });
}

/// A tile of `C`: element `(i, j)` is at `ptr + i·stride + j`; columns from `cols` on do not exist.
#[derive(Clone, Copy)]
pub(crate) struct OutputTile {
    pub(crate) ptr: *mut f32,
    pub(crate) stride: usize,
    pub(crate) cols: usize,
}

impl OutputTile {
    /// The tile `cols` columns further right.
    ///
    /// # Safety
    /// The result is only used for columns that exist.
    #[inline(always)]
    pub(crate) unsafe fn right(self, cols: usize) -> Self {
        Self {
            ptr: self.ptr.wrapping_add(cols),
            stride: self.stride,
            cols: self.cols.saturating_sub(cols),
        }
    }

    /// Its first `NV` vectors; columns that do not exist are 0.
    ///
    /// # Safety
    /// `MR` rows of `cols` columns are valid for reads, and no other thread writes them.
    #[inline(always)]
    pub(crate) unsafe fn load<S: Simd, const MR: usize, const NV: usize>(
        self,
        s: S,
    ) -> [[S::V; NV]; MR] {
        let mut acc = [[s.zero(); NV]; MR];
        for (i, acc) in acc.iter_mut().enumerate() {
            for (v, acc) in acc.iter_mut().enumerate() {
                let p = self.ptr.wrapping_add(i * self.stride + v * LANES);
                let cols = self.cols.saturating_sub(v * LANES);
                *acc = if cols >= LANES {
                    // SAFETY: sixteen columns exist here.
                    unsafe { s.load(p) }
                } else if cols > 0 {
                    // SAFETY: `cols` columns exist here.
                    s.load_part(unsafe { std::slice::from_raw_parts(p, cols) }, 0.0)
                } else {
                    s.zero()
                };
            }
        }
        acc
    }

    /// Writes its first `NV` vectors, leaving out columns that do not exist.
    ///
    /// # Safety
    /// `MR` rows of `cols` columns are valid for writes, and no other thread uses them.
    #[inline(always)]
    pub(crate) unsafe fn store<S: Simd, const MR: usize, const NV: usize>(
        self,
        s: S,
        acc: &[[S::V; NV]; MR],
    ) {
        for (i, acc) in acc.iter().enumerate() {
            for (v, acc) in acc.iter().enumerate() {
                let p = self.ptr.wrapping_add(i * self.stride + v * LANES);
                let cols = self.cols.saturating_sub(v * LANES);
                if cols >= LANES {
                    // SAFETY: sixteen columns exist here.
                    unsafe { s.store(p, *acc) };
                } else if cols > 0 {
                    // SAFETY: `cols` columns exist here.
                    s.store_part(unsafe { std::slice::from_raw_parts_mut(p, cols) }, *acc);
                }
            }
        }
    }
}

/// `C = A · B`, or `C += A · B` when `add`, for up to `PANEL` columns, with the tile of this level.
///
/// # Safety
/// Those of [`multiply`] and [`OutputTile`], for `MR` rows; `B` has `PANEL` columns.
#[inline(always)]
pub(crate) unsafe fn panel<S: Simd, C: SplitColumns, const MR: usize>(
    s: S,
    a: ARows,
    b: C,
    k: usize,
    c: OutputTile,
    add: bool,
) {
    // With a row or two, half a panel is too few chains to hide the latency of an addition.
    if S::TILE_VECS == 2 || MR <= 2 {
        // SAFETY: the caller's contract, for all of the panel.
        unsafe { tile::<S, C, MR, 2>(s, a, b, k, c, add) }
    } else {
        // SAFETY: the caller's contract, for the left half and then the right half of the panel.
        unsafe {
            tile::<S, C, MR, 1>(s, a, b, k, c, add);
            tile::<S, C, MR, 1>(s, a, b.right(), k, c.right(LANES), add);
        }
    }
}

/// # Safety
/// As [`panel`], for `NV` vectors of columns.
#[inline(always)]
unsafe fn tile<S: Simd, C: Columns, const MR: usize, const NV: usize>(
    s: S,
    a: ARows,
    b: C,
    k: usize,
    c: OutputTile,
    add: bool,
) {
    // SAFETY: the caller's contract.
    unsafe {
        let mut acc = if add {
            c.load::<S, MR, NV>(s)
        } else {
            [[s.zero(); NV]; MR]
        };
        // Written out, steps have no addresses and branches of their own, which take slots of multiply-adds where another
        // thread shares the core. Products of more than 121 rows have at most one tile that is not full.
        if const { MR == S::TILE_ROWS } {
            multiply::<S, C, MR, NV, UNROLL>(s, a, b, 0..k, &mut acc);
        } else {
            multiply::<S, C, MR, NV, 1>(s, a, b, 0..k, &mut acc);
        }
        c.store(s, &acc);
    }
}
