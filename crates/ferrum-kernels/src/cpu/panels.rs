//! Rows of a matrix into panels of features, once, at load.
//!
//! A panel has two halves of sixteen features, a lane for each. So sixteen rows are transposed first, four
//! bytes of each at a time ([`LaneRows`]), and all that is left to do with codes and scales is the same in
//! every lane.

use super::buffer::{CpuBuffer, SharedMut};
use super::check::elements;
use super::exec::Exec;
use super::gemm::tile::PANEL;
use super::isa::Level;
use super::simd::{LANES, Simd};
use ferrum_types::Result;
use std::marker::PhantomData;

/// Bytes of a vector.
pub(crate) const VECTOR: usize = 4 * LANES;
/// Bytes that are taken of each row at once.
pub(crate) const TAKEN: usize = 16;

/// A matrix that can be packed.
pub(crate) trait PanelSource: Sync {
    /// Number of panels.
    fn count(&self) -> usize;

    /// Bytes of each.
    fn bytes(&self) -> usize;

    /// Numbers in each.
    fn numbers(&self) -> usize;

    /// Fills panel number `number`, all of whose bytes are zero.
    fn pack(&self, level: Level, number: usize, panel: &mut [u8]);

    /// Fills all panels with the device's threads; all bytes of `out` are zero.
    fn pack_all(&self, exec: &Exec, out: &mut [u8]) {
        let bytes = self.bytes();
        let out = SharedMut::new(out);
        exec.spread(self.count(), self.numbers(), |panels, _| {
            for number in panels {
                // SAFETY: each panel is packed by one task.
                let panel = unsafe { out.part(number * bytes, bytes) };
                self.pack(exec.level, number, panel);
            }
        });
    }

    /// All panels in memory of their own.
    fn packed(&self, op: &'static str, exec: &Exec) -> Result<CpuBuffer<u8>> {
        let mut data = CpuBuffer::lasting(elements(op, &[self.count(), self.bytes()])?)?;
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
    pub(crate) fn new(rows: &[&'a [u8]; LANES]) -> Self {
        Self {
            rows: rows.map(<[u8]>::as_ptr),
            len: rows.iter().map(|row| row.len()).min().unwrap_or(0),
            bytes: PhantomData,
        }
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
        let [e, f, g, h] = self.words(s, at + TAKEN);
        [a, b, c, d, e, f, g, h]
    }

    /// [`words`](Self::words) of rows that may end before, in zeros.
    #[inline(always)]
    pub(crate) fn words_or_zeros<S: Simd>(&self, s: S, at: usize) -> [S::I; 4] {
        if self.has(at) {
            return self.words(s, at);
        }
        let mut rest = [[0; TAKEN]; LANES];
        for (rest, row) in rest.iter_mut().zip(self.rows) {
            for i in at..self.len {
                // SAFETY: `i` is below the length of the row, and less than 16 above `at`.
                rest[i - at] = unsafe { *row.add(i) };
            }
        }
        let mut rows = [rest[0].as_ptr(); LANES];
        for (row, rest) in rows.iter_mut().zip(&rest) {
            *row = rest.as_ptr();
        }
        // SAFETY: each row has sixteen bytes.
        unsafe { s.load_rows(&rows, 0) }
    }

    #[inline(always)]
    fn has(&self, at: usize) -> bool {
        self.len >= TAKEN && at <= self.len - TAKEN
    }
}

/// Calls `put` with sixteen bytes of each row of a panel, from byte `first` on, and the place of what they
/// become, which are as many.
#[inline(always)]
pub(crate) fn transpose<S: Simd>(
    s: S,
    rows: &[LaneRows<'_>; 2],
    first: usize,
    panel: &mut [u8],
    mut put: impl FnMut(S, [S::I; 4], [S::I; 4], &mut [u8]),
) {
    for (i, out) in panel.chunks_mut(TAKEN * PANEL).enumerate() {
        let at = first + i * TAKEN;
        let low = rows[0].words_or_zeros(s, at);
        let high = rows[1].words_or_zeros(s, at);
        if out.len() == TAKEN * PANEL {
            put(s, low, high, out);
        } else {
            let mut whole = [0; TAKEN * PANEL];
            put(s, low, high, &mut whole);
            out.copy_from_slice(&whole[..out.len()]);
        }
    }
}

/// Stores a vector from byte `at` on.
#[inline(always)]
pub(crate) fn put_vector<S: Simd>(s: S, out: &mut [u8], at: usize, v: S::I) {
    let out = &mut out[at..at + VECTOR];
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

/// Some bits of each lane: `v` moved down by `shift`, then masked.
#[inline(always)]
pub(crate) fn field<S: Simd>(s: S, v: S::I, shift: usize, mask: i32) -> S::I {
    s.and_i(s.shr_i(v, shift), s.splat_i(mask))
}

/// All bits of the first `count` lanes.
#[inline(always)]
pub(crate) fn first_lanes<S: Simd>(s: S, count: usize) -> S::I {
    let mut mask = [0u8; VECTOR];
    for byte in &mut mask[..4 * count.min(LANES)] {
        *byte = 0xff;
    }
    // SAFETY: the mask is a vector.
    unsafe { s.load_i(mask.as_ptr()) }
}
