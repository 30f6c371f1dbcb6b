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
        let mut scores = [[0.0f32; KEYS]; MR];
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
                online_softmax_update(
                    s,
                    self.config,
                    &mut scores[i],
                    *seen,
                    &mut self.largest[i],
                    (sums, acc),
                );
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

/// The running softmax of rows whose scores there are: these become weights, zeros for keys that are not seen.
#[cfg(target_arch = "x86_64")]
pub(super) struct SoftmaxRows<'a> {
    pub(super) config: AttnConfig,
    pub(super) scores: &'a mut [[f32; KEYS]],
    /// As in [`RowTile`].
    pub(super) seen: &'a [(usize, usize)],
    pub(super) acc: &'a mut [f32],
    pub(super) largest: &'a mut [f32],
    pub(super) sums: &'a mut [f32],
    pub(super) stride: usize,
}

#[cfg(target_arch = "x86_64")]
impl Kernel for SoftmaxRows<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for (i, (scores, seen)) in self.scores.iter_mut().zip(self.seen).enumerate() {
            if seen.0 >= seen.1 {
                scores.fill(0.0);
                continue;
            }
            let acc = &mut self.acc[i * self.stride..][..self.stride];
            let sums = &mut self.sums[i * LANES..][..LANES];
            let state = (sums, acc);
            online_softmax_update(s, self.config, scores, *seen, &mut self.largest[i], state);
        }
    }
}

/// Turns one row's scores into weights and moves its state to the new maximum.
#[inline(always)]
fn online_softmax_update<S: Simd>(
    s: S,
    config: AttnConfig,
    scores: &mut [f32; KEYS],
    seen: (usize, usize),
    largest: &mut f32,
    (sums, acc): (&mut [f32], &mut [f32]),
) {
    /// Indices of the keys of a tile.
    const INDEX: [f32; KEYS] = {
        let mut index = [0.0; KEYS];
        let mut i = 0;
        while i < KEYS {
            index[i] = i as f32;
            i += 1;
        }
        index
    };
    let hidden = s.splat(f32::NEG_INFINITY);
    let mut v = [s.zero(); 2];
    for (half, v) in v.iter_mut().enumerate() {
        // SAFETY: both arrays have two vectors.
        let (score, index) = unsafe {
            let at = half * LANES;
            (
                s.load(scores.as_ptr().add(at)),
                s.load(INDEX.as_ptr().add(at)),
            )
        };
        *v = s.mul(score, s.splat(config.scale));
        if let Some(cap) = config.softcap {
            *v = math::softcap(s, *v, cap);
        }
        if seen != (0, KEYS) {
            *v = s.select_lt(index, s.splat(seen.1 as f32), *v, hidden);
            *v = s.select_lt(index, s.splat(seen.0 as f32), hidden, *v);
        }
    }
    // NaN scores do not take part in the maximum; they reach the result through their weights.
    let top = s.max(v[0], s.max(v[1], s.splat(*largest)));
    let top = s.largest(top);
    if top == f32::NEG_INFINITY {
        // Every visible score is minus infinity, which has no weight, or NaN, which spoils the row.
        let spoiled = v.iter().any(|v| s.to_array(*v).iter().any(|x| x.is_nan()));
        scores.fill(0.0);
        if spoiled {
            sums.fill(f32::NAN);
        }
        return;
    }
    let centre = s.splat(top);
    let weights = [
        math::exp(s, s.sub(v[0], centre)),
        math::exp(s, s.sub(v[1], centre)),
    ];
    // SAFETY: `scores` has two vectors, `sums` one.
    unsafe {
        s.store(scores.as_mut_ptr(), weights[0]);
        s.store(scores.as_mut_ptr().add(LANES), weights[1]);
        let mut sum = s.load(sums[..LANES].as_ptr());
        if top != *largest {
            let shrink = math::exp(s, s.sub(s.splat(*largest), centre));
            sum = s.mul(sum, shrink);
            for acc in acc.as_chunks_mut::<LANES>().0 {
                s.store(acc.as_mut_ptr(), s.mul(s.load(acc.as_ptr()), shrink));
            }
            *largest = top;
        }
        sum = s.add(sum, s.add(weights[0], weights[1]));
        s.store(sums[..LANES].as_mut_ptr(), sum);
    }
}

/// `acc += weights · values` for the keys `seen`, in key order.
///
/// # Safety
/// `acc` has MR rows of `stride` elements, whole panels; `tile` has values `seen` with as many.
#[inline(always)]
unsafe fn accumulate_values<S: Simd, D: KeyTile, const MR: usize>(
    s: S,
    weights: &[[f32; KEYS]; MR],
    tile: D,
    seen: (usize, usize),
    acc: *mut f32,
    stride: usize,
) {
    let rows = ARows {
        ptr: weights[0][seen.0..].as_ptr(),
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
