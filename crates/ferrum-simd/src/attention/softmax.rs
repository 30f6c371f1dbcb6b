//! What is done with one tile of keys: fetching it, and the running softmax of a tile of rows.

use super::{KEYS, KeyTile, KeyValues, Values};
use crate::gemm::tile::{ARows, OutputTile, PANEL, panel, with_rows};
use crate::isa::Kernel;
use crate::math;
use crate::simd::{LANES, Simd};
use ferrum_types::AttnConfig;
use std::ops::Range;

/// Rows of the level's register tile.
pub(super) struct TileRows;

impl Kernel for TileRows {
    type Output = usize;

    #[inline(always)]
    fn run<S: Simd>(self, _: S) -> usize {
        S::TILE_ROWS
    }
}

/// Brings keys and values of a tile into f32.
pub(super) struct Fetch<'v, 'k, K> {
    pub(super) source: &'v K,
    pub(super) at: (usize, usize),
    pub(super) keys: Range<usize>,
    pub(super) key_buffer: &'k mut [f32],
    pub(super) value_buffer: &'v mut [f32],
    pub(super) stride: usize,
}

impl<'v, K: KeyValues> Kernel for Fetch<'v, '_, K> {
    type Output = Values<'v>;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> Values<'v> {
        self.source
            .keys(s, self.at, self.keys.clone(), self.key_buffer);
        self.source
            .values(s, self.at, self.keys, self.value_buffer, self.stride)
    }
}

/// One row's result.
pub(super) struct Finish<'a> {
    pub(super) sums: &'a [f32],
    pub(super) acc: &'a [f32],
    pub(super) out: &'a mut [f32],
}

impl Kernel for Finish<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let sum = s.sum(math::load_at(s, self.sums, 0));
        // Only a query that sees no key has none.
        let factor = s.splat(if sum == 0.0 { 0.0 } else { 1.0 / sum });
        let Self { acc, out, .. } = self;
        math::for_vectors(
            acc.len(),
            #[inline(always)]
            |at, _| math::store_at(s, out, at, s.mul(math::load_at(s, acc, at), factor)),
        );
    }
}

/// One tile of keys for the rows of one register tile, and their running softmax.
pub(super) struct RowTile<'a, D> {
    pub(super) config: AttnConfig,
    pub(super) dim: usize,
    /// `[dim][rows]`.
    pub(super) q: &'a [f32],
    /// Its keys and values.
    pub(super) keys: D,
    /// Row `i` sees the keys `seen[i].0..seen[i].1` of the tile.
    pub(super) seen: &'a [(usize, usize)],
    pub(super) acc: &'a mut [f32],
    pub(super) largest: &'a mut [f32],
    pub(super) sums: &'a mut [f32],
    pub(super) stride: usize,
}

impl<D: KeyTile> Kernel for RowTile<'_, D> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        if self.seen.iter().any(|(start, end)| start < end) {
            with_rows!(S, self.seen.len(), MR => self.rows::<S, MR>(s));
        }
    }
}

impl<D: KeyTile> RowTile<'_, D> {
    #[inline(always)]
    fn rows<S: Simd, const MR: usize>(self, s: S) {
        let (dim, stride) = (self.dim, self.stride);
        assert!(self.q.len() >= dim * MR);
        let mut scores = [[[0.0f32; LANES]; KEYS / LANES]; MR];
        let q = ARows {
            ptr: self.q.as_ptr(),
            row: 1,
            step: MR,
        };
        let block = OutputTile {
            ptr: scores.as_mut_ptr().cast(),
            stride: KEYS,
            cols: KEYS,
        };
        // SAFETY: q has MR values for each of `dim` steps (asserted), and the tile a panel of keys;
        // `scores` is a block of MR rows of a panel.
        unsafe { panel::<S, _, MR>(s, q, self.keys.keys(), dim, block, false) };

        let mut whole = true;
        for (i, seen) in self.seen.iter().enumerate() {
            whole &= *seen == (0, KEYS);
            if seen.0 < seen.1 {
                let acc = &mut self.acc[i * stride..][..stride];
                let sums = &mut self.sums[i * LANES..][..LANES];
                let largest = &mut self.largest[i];
                let state = (sums, acc);
                let weights =
                    online_softmax_update(s, self.config, &scores[i], *seen, largest, state);
                let weights = weights.unwrap_or([s.zero(); KEYS / LANES]);
                for (to, weights) in scores[i].iter_mut().zip(weights) {
                    math::store_at(s, to, 0, weights);
                }
            }
        }
        assert!(self.acc.len() >= MR * stride);
        let acc = self.acc.as_mut_ptr();
        if whole {
            // SAFETY: `acc` has MR rows of `stride` (asserted), and the tile all values.
            unsafe { accumulate_values::<S, D, MR>(s, &scores, self.keys, (0, KEYS), acc, stride) };
            return;
        }
        for (i, seen) in self.seen.iter().enumerate() {
            if seen.0 < seen.1 {
                let row = [scores[i]];
                let acc = acc.wrapping_add(i * stride);
                // SAFETY: as above, for row `i` and the keys that it sees, which exist.
                unsafe { accumulate_values::<S, D, 1>(s, &row, self.keys, *seen, acc, stride) };
            }
        }
    }
}

/// Turns one row's scores into weights, and moves its state to the new maximum. Weights of keys that are not seen are 0; none
/// are given where no weight can have a value.
#[inline(always)]
pub(super) fn online_softmax_update<S: Simd, const N: usize>(
    s: S,
    config: AttnConfig,
    scores: &[[f32; LANES]; N],
    seen: (usize, usize),
    largest: &mut f32,
    (sums, acc): (&mut [f32], &mut [f32]),
) -> Option<[S::V; N]> {
    /// Indices of the keys of a vector.
    const INDEX: [f32; LANES] = {
        let mut index = [0.0; LANES];
        let mut i = 0;
        while i < LANES {
            index[i] = i as f32;
            i += 1;
        }
        index
    };
    let hidden = s.splat(f32::NEG_INFINITY);
    let mut v = [s.zero(); N];
    let mut top = s.splat(*largest);
    for (i, (v, scores)) in v.iter_mut().zip(scores).enumerate() {
        *v = s.mul(math::load_at(s, scores, 0), s.splat(config.scale));
        if let Some(cap) = config.softcap {
            *v = math::softcap(s, *v, cap);
        }
        if seen != (0, N * LANES) {
            let index = s.add(s.lanes(INDEX), s.splat((i * LANES) as f32));
            *v = s.select_lt(index, s.splat(seen.1 as f32), *v, hidden);
            *v = s.select_lt(index, s.splat(seen.0 as f32), hidden, *v);
        }
        // NaN scores do not take part in the maximum; they reach the result through their weights.
        top = s.max(*v, top);
    }
    let top = s.largest(top);
    if top == f32::NEG_INFINITY {
        // Every visible score is minus infinity, which has no weight, or NaN, which spoils the row.
        let spoiled = v.iter().any(|v| s.to_array(*v).iter().any(|x| x.is_nan()));
        if spoiled {
            sums.fill(f32::NAN);
        }
        return None;
    }
    let centre = s.splat(top);
    // Zeros of keys before those that are seen change no sum.
    let mut added = s.zero();
    for v in &mut v {
        *v = math::exp(s, s.sub(*v, centre));
        added = s.add(added, *v);
    }
    let mut sum = math::load_at(s, sums, 0);
    if top != *largest {
        let shrink = math::exp(s, s.sub(s.splat(*largest), centre));
        sum = s.mul(sum, shrink);
        for acc in acc.as_chunks_mut::<LANES>().0 {
            let scaled = s.mul(math::load_at(s, acc, 0), shrink);
            math::store_at(s, acc, 0, scaled);
        }
        *largest = top;
    }
    math::store_at(s, sums, 0, s.add(sum, added));
    Some(v)
}

/// `acc += weights · values` for the keys `seen`, in key order.
///
/// # Safety
/// `acc` has MR rows of `stride` elements, whole panels; `tile` has values `seen` with as many.
#[inline(always)]
unsafe fn accumulate_values<S: Simd, D: KeyTile, const MR: usize>(
    s: S,
    weights: &[[[f32; LANES]; KEYS / LANES]; MR],
    tile: D,
    seen: (usize, usize),
    acc: *mut f32,
    stride: usize,
) {
    let rows = ARows {
        ptr: weights.as_ptr().cast::<f32>().wrapping_add(seen.0),
        row: KEYS,
        step: 1,
    };
    for at in (0..stride).step_by(PANEL) {
        let columns = tile.values(seen.0, at);
        let block = OutputTile {
            ptr: acc.wrapping_add(at),
            stride,
            cols: PANEL,
        };
        // SAFETY: the caller's contract; `seen` lies inside the tile.
        unsafe { panel::<S, _, MR>(s, rows, columns, seen.1 - seen.0, block, true) };
    }
}
