//! Packed forms: weights in panels of columns, activations in tiles of rows.
//!
//! A panel holds 32 output features interleaved along `k`, so that a step of `k` is one or two cache
//! lines with one feature for each lane. bf16 features `j` and `j + 16` share a 32-bit lane, low and
//! high: a shift and a mask make two f32 vectors of one load. The last panel is filled with zeros.

use super::tile::{Columns, MAX_ROWS, PANEL};
use crate::backend::{MatShape, WeightPart};
use crate::cpu::buffer::{CpuBuffer, SharedBytes, SharedMut};
use crate::cpu::check::elements;
use crate::cpu::exec::Exec;
use crate::cpu::simd::{LANES, Simd};
use ferrum_types::{Error, Result, SrcDtype};
use half::{bf16, f16};
use std::marker::PhantomData;

/// A dense matrix `[n, k]` in panels, in the precision of its file.
#[derive(Debug)]
pub struct CpuWeight {
    pub(crate) shape: MatShape,
    pub(crate) dtype: SrcDtype,
    data: SharedBytes,
}

/// How a panel's elements are stored.
pub(crate) trait Format: Copy + Send + Sync + 'static {
    /// Bytes of one element.
    const BYTES: usize;

    /// The 32 features of step `k` of a panel.
    ///
    /// # Safety
    /// `panel` is valid for reads of `k + 1` steps.
    unsafe fn step<S: Simd>(s: S, panel: *const u8, k: usize) -> [S::V; 2];
}

/// f32 panels.
#[derive(Clone, Copy)]
pub(crate) struct F32;
/// f16 panels.
#[derive(Clone, Copy)]
pub(crate) struct F16;
/// bf16 panels.
#[derive(Clone, Copy)]
pub(crate) struct Bf16;

impl Format for F32 {
    const BYTES: usize = 4;

    #[inline(always)]
    unsafe fn step<S: Simd>(s: S, panel: *const u8, k: usize) -> [S::V; 2] {
        // SAFETY: a step is 32 elements.
        unsafe {
            let p = panel.cast::<f32>().add(k * PANEL);
            [s.load(p), s.load(p.add(LANES))]
        }
    }
}

impl Format for F16 {
    const BYTES: usize = 2;

    #[inline(always)]
    unsafe fn step<S: Simd>(s: S, panel: *const u8, k: usize) -> [S::V; 2] {
        // SAFETY: a step is 32 elements.
        unsafe {
            let p = panel.cast::<u16>().add(k * PANEL);
            [s.load_f16(p), s.load_f16(p.add(LANES))]
        }
    }
}

impl Format for Bf16 {
    const BYTES: usize = 2;

    #[inline(always)]
    unsafe fn step<S: Simd>(s: S, panel: *const u8, k: usize) -> [S::V; 2] {
        // SAFETY: a step is 16 pairs.
        unsafe { s.load_bf16_pairs(panel.cast::<u32>().add(k * LANES)) }
    }
}

/// Calls a generic function with the [`Format`] of a dtype.
macro_rules! with_format {
    ($dtype:expr, $f:ident => $body:expr) => {
        match $dtype {
            SrcDtype::F32 => {
                type $f = $crate::cpu::gemm::pack::F32;
                $body
            }
            SrcDtype::F16 => {
                type $f = $crate::cpu::gemm::pack::F16;
                $body
            }
            SrcDtype::BF16 => {
                type $f = $crate::cpu::gemm::pack::Bf16;
                $body
            }
        }
    };
}
pub(crate) use with_format;

/// Consecutive panels as the columns of a tile, two vectors for each.
#[derive(Clone, Copy)]
pub(crate) struct Panels<F> {
    pub(crate) ptr: *const u8,
    /// Bytes from one panel to the next.
    pub(crate) stride: usize,
    pub(crate) format: PhantomData<F>,
}

impl<F: Format> Columns for Panels<F> {
    #[inline(always)]
    unsafe fn at<S: Simd, const NV: usize>(self, s: S, k: usize) -> [S::V; NV] {
        let mut out = [s.zero(); NV];
        for p in 0..NV / 2 {
            // SAFETY: the caller says that NV/2 panels have step `k`.
            let [low, high] = unsafe { F::step(s, self.ptr.add(p * self.stride), k) };
            out[2 * p] = low;
            out[2 * p + 1] = high;
        }
        out
    }
}

/// Where feature `j` of a panel lies in a step.
#[inline(always)]
fn slot(dtype: SrcDtype, j: usize) -> usize {
    match dtype {
        SrcDtype::BF16 => 2 * (j % LANES) + j / LANES,
        SrcDtype::F32 | SrcDtype::F16 => j,
    }
}

impl CpuWeight {
    /// Packs the rows of `parts`. Parts of different types become f32, which holds all exactly.
    pub(crate) fn pack(exec: &Exec, parts: &[WeightPart<'_>], cols: usize) -> Result<Self> {
        let packed = Self::stack(exec, parts, cols, 1)?.pop();
        packed.ok_or_else(|| Error::invalid("from_weight_parts", "there is no matrix"))
    }

    /// [`pack`](Self::pack) into `count` matrices of equally many rows, each of equally many parts.
    /// Each has panels of its own.
    pub(crate) fn stack(
        exec: &Exec,
        parts: &[WeightPart<'_>],
        cols: usize,
        count: usize,
    ) -> Result<Vec<Self>> {
        let op = "from_weight_parts";
        let mut rows = 0usize;
        for part in parts {
            let expected = elements(op, &[part.rows, cols, part.dtype.size()])?;
            if part.bytes.len() != expected {
                return Err(Error::Shape {
                    op,
                    what: "weight (in bytes)",
                    found: part.bytes.len(),
                    expected,
                });
            }
            rows = rows
                .checked_add(part.rows)
                .ok_or_else(|| Error::invalid(op, "the rows of all parts overflow"))?;
        }
        let each_parts = parts.len().checked_div(count).unwrap_or(0);
        let parts_of = |matrix: usize| &parts[matrix * each_parts..][..each_parts];
        let rows_of = |matrix| parts_of(matrix).iter().map(|part| part.rows).sum::<usize>();
        let even = count > 0 && rows.is_multiple_of(count) && each_parts * count == parts.len();
        if !even || (0..count).any(|matrix| rows_of(matrix) != rows / count) {
            let reason = format!("{rows} rows cannot be cut into {count} matrices");
            return Err(Error::invalid(op, reason));
        }
        let rows = rows / count;
        let first = parts.first().map_or(SrcDtype::F32, |part| part.dtype);
        let uniform = parts.iter().all(|part| part.dtype == first);
        let dtype = if uniform { first } else { SrcDtype::F32 };
        let shape = MatShape { rows, cols };
        let panel = elements(op, &[cols, PANEL, dtype.size()])?;
        let each = rows.div_ceil(PANEL);
        let panels = elements(op, &[each, count])?;
        let mut data = CpuBuffer::lasting(elements(op, &[panels, panel])?)?;
        let out = SharedMut::new(data.as_mut_slice());
        exec.spread(panels, cols * PANEL, |panels, _| {
            for p in panels {
                // SAFETY: each panel is packed by one task.
                let out = unsafe { out.part(p * panel, panel) };
                pack_panel(parts_of(p / each), cols, dtype, p % each * PANEL, out);
            }
        });
        let matrix = |data| Self { shape, dtype, data };
        Ok(SharedBytes::split(data, count).map(matrix).collect())
    }

    /// Bytes of a panel.
    pub(crate) fn panel_bytes(&self) -> usize {
        self.shape.cols * PANEL * self.dtype.size()
    }

    /// Number of panels.
    pub(crate) fn panels(&self) -> usize {
        self.shape.rows.div_ceil(PANEL)
    }

    /// All panels.
    pub(crate) fn bytes(&self) -> &[u8] {
        self.data.as_slice()
    }

    /// Row `row` as f32.
    pub(crate) fn read_row(&self, row: usize, out: &mut [f32]) {
        let panel = &self.data.as_slice()[row / PANEL * self.panel_bytes()..];
        let size = self.dtype.size();
        let at = slot(self.dtype, row % PANEL) * size;
        let steps = panel.chunks_exact(PANEL * size);
        for (out, step) in out.iter_mut().zip(steps) {
            *out = decode(self.dtype, &step[at..at + size]);
        }
    }
}

#[inline(always)]
fn decode(dtype: SrcDtype, bytes: &[u8]) -> f32 {
    match (dtype, bytes) {
        (SrcDtype::F32, &[a, b, c, d]) => f32::from_le_bytes([a, b, c, d]),
        (SrcDtype::F16, &[a, b]) => f16::from_le_bytes([a, b]).to_f32(),
        (SrcDtype::BF16, &[a, b]) => bf16::from_le_bytes([a, b]).to_f32(),
        _ => 0.0,
    }
}

/// Packs the 32 rows from `row` on (fewer at the end) into one panel.
fn pack_panel(parts: &[WeightPart<'_>], cols: usize, dtype: SrcDtype, row: usize, out: &mut [u8]) {
    let mut rows = [(&[][..], dtype); PANEL];
    let mut first = 0;
    for part in parts {
        let size = part.dtype.size();
        for r in row.max(first)..(row + PANEL).min(first + part.rows) {
            let bytes = &part.bytes[(r - first) * cols * size..][..cols * size];
            rows[r - row] = (bytes, part.dtype);
        }
        first += part.rows;
    }
    if dtype.size() == 2 {
        pack_steps::<2>(&rows, |j| slot(dtype, j), out);
    } else if rows.iter().all(|(_, from)| *from == dtype) {
        pack_steps::<4>(&rows, |j| j, out);
    } else {
        let steps = out.as_chunks_mut::<{ PANEL * 4 }>().0;
        for (j, (bytes, from)) in rows.into_iter().enumerate() {
            for (step, x) in steps.iter_mut().zip(bytes.chunks_exact(from.size())) {
                step[4 * j..4 * j + 4].copy_from_slice(&decode(from, x).to_le_bytes());
            }
        }
    }
}

/// Transposes rows of elements of `SIZE` bytes into steps; feature `j` goes to `slot(j)`. Rows that do
/// not exist are empty and leave zeros.
fn pack_steps<const SIZE: usize>(
    rows: &[(&[u8], SrcDtype); PANEL],
    slot: impl Fn(usize) -> usize,
    out: &mut [u8],
) {
    // A square of this size stays in the first-level cache while it is turned.
    const STEPS: usize = 32;
    let (out, _) = out.as_chunks_mut::<SIZE>();
    for (b, out) in out.chunks_mut(STEPS * PANEL).enumerate() {
        let steps = out.len() / PANEL;
        let mut square = [[[0; SIZE]; STEPS]; PANEL];
        for (square, (row, _)) in square.iter_mut().zip(rows) {
            if let Some(row) = row.as_chunks::<SIZE>().0.get(b * STEPS..b * STEPS + steps) {
                square[..steps].copy_from_slice(row);
            }
        }
        for (k, out) in out.as_chunks_mut::<PANEL>().0.iter_mut().enumerate() {
            for (j, row) in square.iter().enumerate() {
                out[slot(j)] = row[k];
            }
        }
    }
}

/// Packs rows of `x` (`[rows, k]`) into tiles: each is `[k][rows of the tile]`, one after the other.
pub(crate) fn pack_rows(
    exec: &Exec,
    x: &[f32],
    k: usize,
    tile_rows: usize,
    out: SharedMut<'_, f32>,
) {
    let rows = x.len().checked_div(k).unwrap_or(0);
    debug_assert!(tile_rows <= MAX_ROWS);
    exec.spread(rows.div_ceil(tile_rows), tile_rows * k, |tiles, _| {
        for t in tiles {
            let first = t * tile_rows;
            let count = tile_rows.min(rows - first);
            // SAFETY: each tile is packed by one task, and tiles do not overlap.
            let out = unsafe { out.part(first * k, count * k) };
            pack_tile(count, |i| &x[(first + i) * k..][..k], out);
        }
    });
}

/// Packs a tile of `count` rows.
pub(crate) fn pack_tile<'a>(count: usize, of: impl Fn(usize) -> &'a [f32], out: &mut [f32]) {
    // Blocks of steps keep the lines that are being filled in the first-level cache.
    const STEPS: usize = 64;
    for (b, block) in out.chunks_mut(STEPS * count).enumerate() {
        for i in 0..count {
            let source = &of(i)[b * STEPS..][..block.len() / count];
            for (to, from) in block[i..].iter_mut().step_by(count).zip(source) {
                *to = *from;
            }
        }
    }
}
