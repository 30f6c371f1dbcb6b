//! Rows of a matrix into panels of features, once, at load.
//!
//! A panel has two halves of sixteen features, a lane for each. So sixteen rows are transposed first, four
//! bytes of each at a time ([`LaneRows`]), and all that is left to do with codes and scales is the same in
//! every lane.

use super::exec::Exec;
use super::isa::Level;
use super::memory::{CpuBuffer, SharedMut};
use super::simd::{LANES, Simd};
use ferrum_types::{Result, check::elements};
use std::marker::PhantomData;

/// Columns of a panel of `B`.
pub const PANEL: usize = 2 * LANES;

/// Inputs of a block of split numbers: those of an instruction on tiles.
pub(crate) const SPLIT_INPUTS: usize = 32;

/// Bytes of a vector.
pub(crate) const VECTOR_BYTES: usize = 4 * LANES;
/// Bytes that are read of each row at once.
pub(crate) const ROW_CHUNK_BYTES: usize = 16;

/// A matrix that can be packed.
pub(crate) trait PanelSource: Sync {
    /// Number of panels.
    fn count(&self) -> usize;

    /// Bytes of each.
    fn bytes(&self) -> usize;

    /// Elements of each.
    fn elements_per_panel(&self) -> usize;

    /// Panels that are better packed side by side, because a line of memory has something for each.
    fn panels_per_task(&self) -> usize {
        1
    }

    /// Fills panels from number `first` on, all of whose bytes are zero.
    fn pack(&self, level: Level, first: usize, panels: &mut [u8]);

    /// Fills all panels with the device's threads; all bytes of `out` are zero.
    fn pack_all(&self, exec: &Exec, out: &mut [u8]) {
        let (bytes, count) = (self.bytes(), self.count());
        // No fewer than there are threads.
        let most = count.div_ceil(2 * exec.pool.threads());
        let some = self.panels_per_task().clamp(1, most.max(1));
        let out = SharedMut::new(out);
        exec.parallel_for(
            count.div_ceil(some),
            some * self.elements_per_panel(),
            |tasks, _| {
                for first in tasks.map(|task| task * some) {
                    let count = some.min(count - first);
                    // SAFETY: each panel is packed by one task.
                    let panels = unsafe { out.part(first * bytes, count * bytes) };
                    self.pack(exec.level, first, panels);
                }
            },
        );
    }

    /// All panels in memory of their own.
    fn packed(&self, op: &'static str, exec: &Exec) -> Result<CpuBuffer<u8>> {
        let mut data = CpuBuffer::zeroed_for_weights(elements(op, &[self.count(), self.bytes()])?)?;
        self.pack_all(exec, data.as_mut_slice());
        Ok(data)
    }
}

/// Sixteen rows of bytes, one for each lane of a vector.
pub(crate) struct LaneRows<'a> {
    rows: [*const u8; LANES],
    /// Bytes that each row has, at least.
    len: usize,
    bytes: PhantomData<&'a [u8]>,
}

impl<'a> LaneRows<'a> {
    /// Rows of equal length.
    #[inline(always)]
    pub(crate) fn new(rows: &[&'a [u8]; LANES]) -> Self {
        let (mut starts, mut len) = ([rows[0].as_ptr(); LANES], rows[0].len());
        for (i, start) in starts.iter_mut().enumerate() {
            *start = rows[i].as_ptr();
            len = len.min(rows[i].len());
        }
        Self {
            rows: starts,
            len,
            bytes: PhantomData,
        }
    }

    /// Rows of an array.
    #[inline(always)]
    pub(crate) fn of<const LEN: usize>(rows: &'a [[u8; LEN]; LANES]) -> Self {
        let mut slices = [&rows[0][..]; LANES];
        for (i, slice) in slices.iter_mut().enumerate() {
            *slice = &rows[i];
        }
        Self::new(&slices)
    }

    /// Both halves of a panel.
    pub(crate) fn halves(rows: &[&'a [u8]; PANEL]) -> [Self; 2] {
        let (mut low, mut high) = ([&[][..]; LANES], [&[][..]; LANES]);
        low.copy_from_slice(&rows[..LANES]);
        high.copy_from_slice(&rows[LANES..]);
        [Self::new(&low), Self::new(&high)]
    }

    /// Bytes `at..at + 16` of each row, four to a lane.
    ///
    /// # Panics
    /// When rows are shorter.
    #[inline(always)]
    pub(crate) fn words<S: Simd>(&self, s: S, at: usize) -> [S::I; 4] {
        assert!(self.has(at), "rows are too short");
        // SAFETY: each row has `at + 16` bytes.
        unsafe { s.load_rows(&self.rows, at) }
    }

    /// Bytes `at..at + 32` of each row.
    ///
    /// # Panics
    /// When rows are shorter.
    #[inline(always)]
    pub(crate) fn eight_words<S: Simd>(&self, s: S, at: usize) -> [S::I; 8] {
        let [a, b, c, d] = self.words(s, at);
        let [e, f, g, h] = self.words(s, at + ROW_CHUNK_BYTES);
        [a, b, c, d, e, f, g, h]
    }

    /// [`words`](Self::words) of rows that may end before, in zeros.
    #[inline(always)]
    pub(crate) fn words_or_zeros<S: Simd>(&self, s: S, at: usize) -> [S::I; 4] {
        if self.has(at) {
            return self.words(s, at);
        }
        let mut rest = [[0; ROW_CHUNK_BYTES]; LANES];
        for (i, rest) in rest.iter_mut().enumerate() {
            for k in at..self.len {
                // SAFETY: `k` is below the length of the row.
                rest[k - at] = unsafe { *self.rows[i].add(k) };
            }
        }
        LaneRows::of(&rest).words(s, 0)
    }

    #[inline(always)]
    fn has(&self, at: usize) -> bool {
        self.len >= ROW_CHUNK_BYTES && at <= self.len - ROW_CHUNK_BYTES
    }
}

/// What sixteen bytes of each row of a panel become.
pub(crate) trait Transposed<S: Simd> {
    /// Stores the words of both halves, which fill `out`.
    fn put(&mut self, s: S, low: [S::I; 4], high: [S::I; 4], out: &mut [u8]);
}

/// Fills `out`, which has a byte for each of the rows, from byte `first` of these on.
#[inline(always)]
pub(crate) fn transpose<S: Simd>(
    s: S,
    rows: &[LaneRows<'_>; 2],
    first: usize,
    out: &mut [u8],
    to: &mut impl Transposed<S>,
) {
    for (i, out) in out.chunks_mut(ROW_CHUNK_BYTES * PANEL).enumerate() {
        let at = first + i * ROW_CHUNK_BYTES;
        let low = rows[0].words_or_zeros(s, at);
        let high = rows[1].words_or_zeros(s, at);
        if out.len() == ROW_CHUNK_BYTES * PANEL {
            to.put(s, low, high, out);
        } else {
            let mut whole = [0; ROW_CHUNK_BYTES * PANEL];
            to.put(s, low, high, &mut whole);
            out.copy_from_slice(&whole[..out.len()]);
        }
    }
}

/// Stores a vector from byte `at` on.
#[inline(always)]
pub(crate) fn put_vector<S: Simd>(s: S, out: &mut [u8], at: usize, v: S::I) {
    let out = &mut out[at..at + VECTOR_BYTES];
    // SAFETY: so many bytes are there.
    unsafe { s.store_i(out.as_mut_ptr(), v) }
}

/// Stores the low half of each lane from byte `at` on.
#[inline(always)]
pub(crate) fn put_low_halves<S: Simd>(s: S, out: &mut [u8], at: usize, v: S::I) {
    let out = &mut out[at..at + 2 * LANES];
    // SAFETY: so many bytes are there.
    unsafe { s.store_low_halves(out.as_mut_ptr().cast(), v) }
}

/// Stores the low byte of each lane from byte `at` on.
#[inline(always)]
pub(crate) fn put_low_bytes<S: Simd>(s: S, out: &mut [u8], at: usize, v: S::I) {
    let out = &mut out[at..at + LANES];
    // SAFETY: so many bytes are there.
    unsafe { s.store_low_bytes(out.as_mut_ptr(), v) }
}

/// Extracts bits of each lane: `v` shifted right by `shift`, then masked.
#[inline(always)]
pub(crate) fn extract_bits<S: Simd>(s: S, v: S::I, shift: usize, mask: i32) -> S::I {
    s.and_i(s.shr_i(v, shift), s.splat_i(mask))
}

/// All bits of the first `count` lanes.
#[inline(always)]
pub(crate) fn first_lanes<S: Simd>(s: S, count: usize) -> S::I {
    let mut mask = [0u8; VECTOR_BYTES];
    for byte in &mut mask[..4 * count.min(LANES)] {
        *byte = 0xff;
    }
    // SAFETY: the mask is a vector.
    unsafe { s.load_i(mask.as_ptr()) }
}
