//! Weights that stay in their ggml blocks' integers.
//!
//! Blocks are repacked once at load ([`pack`]) into panels of 32 features ([`format`]); activations
//! become bytes with a scale for each 32 of a row ([`acts`]); products of bytes are summed in integers
//! ([`tile`]). One row reads packed panels straight from memory; more rows share panels whose codes were
//! brought into bytes in a buffer that fits the first-level cache. Types without a packed form of their
//! own are expanded to f32.

pub(crate) mod acts;
pub(crate) mod format;
pub(crate) mod pack;
pub(crate) mod tile;

use super::CpuBackend;
use super::buffer::{CpuBuffer, SharedMut};
use super::check::{elements, require};
use super::core::CpuContext;
use super::exec::{Exec, Scratch};
use super::gemm::pack::CpuWeight;
use super::gemm::tile::PANEL;
use super::gemm::{self, Columns};
use super::isa::Kernel;
use super::math;
use super::simd::{LANES, Simd};
use crate::backend::*;
use acts::WORDS;
use ferrum_types::{Error, GgufQuantType, Result, SrcDtype};
use format::{Bytes, Codes, Floats, STEPS, Scales, StoredCodes, StoredScales, UNIT, block_bytes};
use pack::{OnFormat, Packed, is_packed, panel_bytes};
use std::marker::PhantomData;
use std::ops::Range;

/// Units of a panel that are decoded at once: with their scales they stay in the first-level cache.
const UNITS_AT_ONCE: usize = 16;
/// Panels that one row takes side by side, as streams from memory.
const STREAMS: usize = 3;
/// Rows whose bytes are held at once.
const ROWS_AT_ONCE: usize = 1024;

/// A matrix of ggml blocks, possibly of several types one below the other.
#[derive(Debug)]
pub struct CpuQuantWeight {
    shape: MatShape,
    parts: Vec<Part>,
}

/// Consecutive rows of one form.
#[derive(Debug)]
enum Part {
    Packed(Packed),
    Dense(CpuWeight),
}

impl Part {
    fn rows(&self) -> usize {
        match self {
            Part::Packed(packed) => packed.shape.rows,
            Part::Dense(dense) => dense.shape.rows,
        }
    }
}

impl CpuQuantWeight {
    pub(crate) fn load(exec: &Exec, parts: &[QuantPart<'_>], cols: usize) -> Result<Self> {
        let op = "load_quant";
        let mut packed = Vec::new();
        let same = |a: &QuantPart<'_>, b: &QuantPart<'_>| a.ty == b.ty;
        for group in parts.chunk_by(same) {
            let ty = group[0].ty;
            packed.push(if is_packed(ty) {
                Part::Packed(Packed::new(exec, group, cols)?)
            } else {
                Part::Dense(expand(exec, group, cols)?)
            });
        }
        let rows = packed
            .iter()
            .try_fold(0usize, |sum, part| sum.checked_add(part.rows()))
            .ok_or_else(|| Error::invalid(op, "the rows of all parts overflow"))?;
        Ok(Self {
            shape: MatShape { rows, cols },
            parts: packed,
        })
    }

    fn read_row(&self, mut row: usize, out: &mut [f32]) -> bool {
        for part in &self.parts {
            if row < part.rows() {
                return match part {
                    Part::Packed(packed) => packed.read_row(row, out).is_ok(),
                    Part::Dense(dense) => {
                        dense.read_row(row, out);
                        true
                    }
                };
            }
            row -= part.rows();
        }
        false
    }
}

/// Parts of a type that is not packed: floats as they are, the others in f32.
fn expand(exec: &Exec, parts: &[QuantPart<'_>], cols: usize) -> Result<CpuWeight> {
    let op = "load_quant";
    let plain = match parts[0].ty {
        GgufQuantType::F32 => Some(SrcDtype::F32),
        GgufQuantType::F16 => Some(SrcDtype::F16),
        GgufQuantType::BF16 => Some(SrcDtype::BF16),
        _ => None,
    };
    if let Some(dtype) = plain {
        let parts: Vec<_> = parts
            .iter()
            .map(|&QuantPart { bytes, rows, .. }| WeightPart { bytes, dtype, rows })
            .collect();
        return CpuWeight::pack(exec, &parts, cols);
    }
    let mut values = Vec::new();
    let mut rows = 0;
    for part in parts {
        let needed = part
            .ty
            .bytes_for(cols)
            .and_then(|row| row.checked_mul(part.rows));
        if needed != Some(part.bytes.len()) {
            let (found, expected) = (part.bytes.len(), needed.unwrap_or(0));
            return Err(Error::Shape {
                op,
                what: "weight (in bytes)",
                found,
                expected,
            });
        }
        let start = values.len();
        values.resize(start + elements(op, &[part.rows, cols])?, 0f32);
        ferrum_quant::dequantize(part.ty, part.bytes, &mut values[start..])
            .map_err(|e| Error::invalid(op, e.to_string()))?;
        rows += part.rows;
    }
    let part = WeightPart {
        bytes: bytemuck::cast_slice(&values),
        dtype: SrcDtype::F32,
        rows,
    };
    CpuWeight::pack(exec, &[part], cols)
}

/// `out[rows, n] = x[rows, k] · weight[n, k]ᵀ`.
fn gemm_quant(
    exec: &Exec,
    scratch: &mut Scratch,
    x: &CpuBuffer<f32>,
    weight: &CpuQuantWeight,
    out: &mut CpuBuffer<f32>,
    shape: GemmShape,
) -> Result<()> {
    let op = "gemm_quant";
    let GemmShape { rows, n, k } = shape;
    let MatShape { rows: wn, cols: wk } = weight.shape;
    require(op, (wn, wk) == (n, k), || {
        format!("the weight is [{wn}, {wk}], expected [{n}, {k}]")
    })?;
    let x = x.first(op, "x", elements(op, &[rows, k])?)?;
    let out = out.first_mut(op, "out", elements(op, &[rows, n])?)?;
    if rows == 0 || n == 0 || k == 0 {
        out.fill(0.0);
        return Ok(());
    }
    for (x, out) in x
        .chunks(ROWS_AT_ONCE * k)
        .zip(out.chunks_mut(ROWS_AT_ONCE * n))
    {
        let mut first = 0;
        for part in &weight.parts {
            let columns = Columns {
                out: SharedMut::new(out),
                stride: n,
                first,
            };
            match part {
                Part::Packed(packed) => product(exec, scratch, x, packed, columns)?,
                Part::Dense(dense) => gemm::columns_of(exec, scratch, x, dense, columns)?,
            }
            first += part.rows();
        }
    }
    Ok(())
}

/// Rows of a tile at this level.
struct ByteRows;

impl Kernel for ByteRows {
    type Output = usize;

    #[inline(always)]
    fn run<S: Simd>(self, _: S) -> usize {
        S::BYTE_ROWS
    }
}

fn product(
    exec: &Exec,
    scratch: &mut Scratch,
    x: &[f32],
    weight: &Packed,
    columns: Columns<'_>,
) -> Result<()> {
    let k = weight.shape.cols;
    let rows = x.len() / k;
    let most = exec.level.run(ByteRows);
    // Tiles of about the same size.
    let tile_rows = rows.div_ceil(rows.div_ceil(most));
    let words = rows * (k / UNIT) * WORDS;
    let threads = exec.pool.threads();
    let decoded = if rows == 1 { 0 } else { DECODED_BYTES / 4 };
    let floats = scratch.floats(words + threads * decoded)?;
    let (acts, buffers) = floats.split_at_mut(words);
    let acts: &mut [i32] = bytemuck::cast_slice_mut(acts);
    acts::pack(exec, x, k, tile_rows, SharedMut::new(acts));
    weight.with(Product {
        exec,
        acts,
        rows,
        tile_rows,
        weight,
        columns,
        buffers: SharedMut::new(buffers),
    })
}

/// Bytes of the largest decoded part of a panel: codes, and two scales and two minimums in f32.
const DECODED_BYTES: usize = UNITS_AT_ONCE * block_bytes::<Bytes, Floats<2, true>>();

struct Product<'a> {
    exec: &'a Exec,
    acts: &'a [i32],
    rows: usize,
    tile_rows: usize,
    weight: &'a Packed,
    columns: Columns<'a>,
    /// [`DECODED_BYTES`] for each thread.
    buffers: SharedMut<'a, f32>,
}

impl OnFormat for Product<'_> {
    type Output = ();

    fn run<C: StoredCodes, F: StoredScales>(self, codes: C, zero: i32, _: F) {
        let (weight, exec) = (self.weight, self.exec);
        let MatShape { cols: k, .. } = weight.shape;
        if self.rows == 1 {
            exec.spread(weight.panels(), k * PANEL / 16, |panels, _| {
                exec.level.run(OneRow::<C, F> {
                    codes: (codes, zero),
                    acts: self.acts,
                    weight,
                    panels,
                    columns: self.columns,
                    scales: PhantomData,
                });
            });
            return;
        }
        let tiles = self.rows.div_ceil(self.tile_rows);
        let threads = exec.pool.threads();
        // Rows are split only while there are too few panels to keep all threads busy.
        let parts = (4 * threads).div_ceil(weight.panels()).clamp(1, tiles);
        let units = k / UNIT;
        exec.pool.run(weight.panels() * parts, &|task, thread| {
            let (panel, part) = (task / parts, task % parts);
            let size = DECODED_BYTES / 4;
            // SAFETY: no two running tasks share a thread number.
            let buffer = unsafe { self.buffers.part(thread * size, size) };
            let buffer: &mut [u8] = bytemuck::cast_slice_mut(buffer);
            for first in (0..units).step_by(UNITS_AT_ONCE) {
                let taken = first..(first + UNITS_AT_ONCE).min(units);
                let unit_bytes = block_bytes::<C::Decoded, F::Decoded>();
                let decoded = &mut buffer[..taken.len() * unit_bytes];
                exec.level.run(Decode::<C, F> {
                    codes,
                    weight,
                    panel,
                    units: taken.clone(),
                    out: decoded,
                    scales: PhantomData,
                });
                exec.level.run(Tiles::<C::Decoded, F::Decoded> {
                    product: &self,
                    zero,
                    weights: decoded,
                    panel,
                    units: taken,
                    tiles: tiles * part / parts..tiles * (part + 1) / parts,
                    formats: PhantomData,
                });
            }
        });
    }
}

/// Parts of a block: head, what lies beside unit `u`, and its codes.
///
/// # Safety
/// `block` is valid for reads of a block of these formats, and it has unit `u`.
#[inline(always)]
unsafe fn parts_of<C: Codes, F: Scales>(
    block: *const u8,
    u: usize,
) -> (*const u8, *const u8, *const u8) {
    // SAFETY: the caller's contract.
    unsafe {
        let beside = block.add(F::HEAD + u * (F::BESIDE + C::BYTES));
        (block, beside, beside.add(F::BESIDE))
    }
}

/// Some panels times one row, straight from packed weights.
struct OneRow<'a, C, F> {
    codes: (C, i32),
    acts: &'a [i32],
    weight: &'a Packed,
    panels: Range<usize>,
    columns: Columns<'a>,
    scales: PhantomData<F>,
}

impl<C: StoredCodes, F: StoredScales> Kernel for OneRow<'_, C, F> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let mut panel = self.panels.start;
        while panel + STREAMS <= self.panels.end {
            self.side_by_side::<S, STREAMS>(s, panel);
            panel += STREAMS;
        }
        while panel < self.panels.end {
            self.side_by_side::<S, 1>(s, panel);
            panel += 1;
        }
    }
}

impl<C: StoredCodes, F: StoredScales> OneRow<'_, C, F> {
    #[inline(always)]
    fn side_by_side<S: Simd, const N: usize>(&self, s: S, first: usize) {
        let MatShape { rows: n, cols: k } = self.weight.shape;
        let stride = panel_bytes::<C, F>(k);
        let bytes = &self.weight.bytes()[first * stride..][..N * stride];
        let acts = &self.acts[..k / UNIT * WORDS];
        let mut sums = [[[s.zero(); 1]; 2]; N];
        for block in 0..k / (UNIT * F::UNITS) {
            for u in 0..F::UNITS {
                for (p, sums) in sums.iter_mut().enumerate() {
                    let at = p * stride + block * block_bytes::<C, F>();
                    // SAFETY: a panel has that many blocks, each with these units; the activations
                    // have a unit for each (both sliced so).
                    unsafe {
                        let parts = parts_of::<C, F>(bytes.as_ptr().add(at), u);
                        let acts = acts.as_ptr().add((block * F::UNITS + u) * WORDS);
                        for (half, sums) in sums.iter_mut().enumerate() {
                            tile::unit::<S, C, F, 1>(s, self.codes, parts, half, acts, sums);
                        }
                    }
                }
            }
        }
        for (p, halves) in sums.iter().enumerate() {
            for (half, [sum]) in halves.iter().enumerate() {
                let column = (first + p) * PANEL + half * LANES;
                if column < n {
                    let len = LANES.min(n - column);
                    // SAFETY: a panel belongs to one task, so nobody else has these columns.
                    let out = unsafe { self.columns.part(0, column, len) };
                    math::store_at(s, out, 0, *sum);
                }
            }
        }
    }
}

/// Brings some units of a panel into bytes and f32.
struct Decode<'a, C, F> {
    codes: C,
    weight: &'a Packed,
    panel: usize,
    units: Range<usize>,
    out: &'a mut [u8],
    scales: PhantomData<F>,
}

impl<C: StoredCodes, F: StoredScales> Kernel for Decode<'_, C, F> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let stride = panel_bytes::<C, F>(self.weight.shape.cols);
        let bytes = &self.weight.bytes()[self.panel * stride..][..stride];
        let size = block_bytes::<C::Decoded, F::Decoded>();
        for (u, out) in self.units.zip(self.out.chunks_exact_mut(size)) {
            let block = &bytes[u / F::UNITS * block_bytes::<C, F>()..][..block_bytes::<C, F>()];
            // SAFETY: the block is one of these formats (sliced so) and has this unit; `out` has the
            // size of the decoded one.
            unsafe {
                let parts = parts_of::<C, F>(block.as_ptr(), u % F::UNITS);
                decode::<S, C, F>(s, self.codes, parts, out);
            }
        }
    }
}

/// Brings a unit into bytes and f32.
///
/// # Safety
/// `parts` are valid for reads of their formats' sizes.
#[inline(always)]
unsafe fn decode<S: Simd, C: StoredCodes, F: StoredScales>(
    s: S,
    codes: C,
    (head, beside, unit): (*const u8, *const u8, *const u8),
    out: &mut [u8],
) {
    let (floats, bytes) = out.split_at_mut(F::Decoded::BESIDE);
    for half in 0..2 {
        for sub in 0..F::SUBS {
            let at = sub * PANEL + half * LANES;
            // SAFETY: the caller's contract; `floats` has room for all scales and then all minimums.
            unsafe {
                let p = floats.as_mut_ptr().cast::<f32>().add(at);
                s.store(p, F::scale(s, head, beside, half, sub));
                if F::MINIMUMS {
                    let minimum = F::minimum(s, head, beside, half, sub);
                    s.store(p.add(F::SUBS * PANEL), minimum);
                }
            }
        }
        for t in 0..STEPS {
            let place = (half * STEPS + t) * 4 * LANES;
            assert!(place + 4 * LANES <= bytes.len());
            // SAFETY: the caller's contract, and the check above.
            unsafe { s.store_i(bytes.as_mut_ptr().add(place), codes.step(s, unit, half, t)) };
        }
    }
}

/// Decoded units of one panel times some tiles of rows.
struct Tiles<'a, D, G> {
    product: &'a Product<'a>,
    zero: i32,
    weights: &'a [u8],
    panel: usize,
    /// Which units of the panel these are.
    units: Range<usize>,
    tiles: Range<usize>,
    formats: PhantomData<(D, G)>,
}

impl<D: Codes + Default, G: Scales> Kernel for Tiles<'_, D, G> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let tile_rows = self.product.tile_rows;
        for t in self.tiles.clone() {
            let row = t * tile_rows;
            match tile_rows.min(self.product.rows - row) {
                1 => self.tile::<S, 1>(s, row),
                2 => self.tile::<S, 2>(s, row),
                3 if const { S::BYTE_ROWS >= 3 } => self.tile::<S, 3>(s, row),
                4 if const { S::BYTE_ROWS >= 4 } => self.tile::<S, 4>(s, row),
                5 if const { S::BYTE_ROWS >= 5 } => self.tile::<S, 5>(s, row),
                6 if const { S::BYTE_ROWS >= 6 } => self.tile::<S, 6>(s, row),
                more => unreachable!("{more} rows in a tile"),
            }
        }
    }
}

impl<D: Codes + Default, G: Scales> Tiles<'_, D, G> {
    /// The tile of `MR` rows that begins at `row`.
    #[inline(always)]
    fn tile<S: Simd, const MR: usize>(&self, s: S, row: usize) {
        let MatShape { rows: n, cols: k } = self.product.weight.shape;
        let at = (row * (k / UNIT) + self.units.start * MR) * WORDS;
        let acts = &self.product.acts[at..][..self.units.len() * MR * WORDS];
        for half in 0..2 {
            let column = self.panel * PANEL + half * LANES;
            if column >= n {
                break;
            }
            let len = LANES.min(n - column);
            // SAFETY: a task has its rows and columns of the result for itself.
            let out = |r: usize| unsafe { self.product.columns.part(row + r, column, len) };
            let mut sums = [s.zero(); MR];
            if self.units.start > 0 {
                for (r, sum) in sums.iter_mut().enumerate() {
                    *sum = s.load_part(out(r), 0.0);
                }
            }
            let units = self.weights.chunks_exact(block_bytes::<D, G>());
            for (unit, acts) in units.zip(acts.chunks_exact(MR * WORDS)) {
                // SAFETY: the unit was decoded to these formats; `acts` is a unit of MR rows.
                unsafe {
                    let parts = parts_of::<D, G>(unit.as_ptr(), 0);
                    let codes = (D::default(), self.zero);
                    tile::unit::<S, D, G, MR>(s, codes, parts, half, acts.as_ptr(), &mut sums);
                }
            }
            for (r, sum) in sums.iter().enumerate() {
                math::store_at(s, out(r), 0, *sum);
            }
        }
    }
}

impl BackendQuantGguf for CpuBackend {
    type GgufWeight = CpuQuantWeight;

    fn is_native(ty: GgufQuantType) -> bool {
        is_packed(ty)
    }

    fn load_quant_fused(&self, parts: &[QuantPart<'_>], cols: usize) -> Result<CpuQuantWeight> {
        CpuQuantWeight::load(self.exec(), parts, cols)
    }

    fn gemm_quant(
        ctx: &mut CpuContext,
        x: &CpuBuffer<f32>,
        weight: &CpuQuantWeight,
        out: &mut CpuBuffer<f32>,
        shape: GemmShape,
    ) -> Result<()> {
        let (exec, scratch) = ctx.parts();
        gemm_quant(exec, scratch, x, weight, out, shape)
    }

    fn embedding_lookup_quant(
        ctx: &mut CpuContext,
        table: &CpuQuantWeight,
        ids: &CpuBuffer<i32>,
        out: &mut CpuBuffer<f32>,
        shape: RowShape,
    ) -> Result<()> {
        let op = "embedding_lookup_quant";
        require(op, table.shape.cols == shape.dim, || {
            let cols = table.shape.cols;
            format!(
                "rows of the table have {cols} elements, expected {}",
                shape.dim
            )
        })?;
        let (exec, _) = ctx.parts();
        gemm::rows_by_id(exec, op, ids, out, shape, |id, out| table.read_row(id, out))
    }
}
