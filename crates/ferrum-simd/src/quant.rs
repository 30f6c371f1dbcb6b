//! Weights that stay integers: ggml blocks, and the layers of [`super::marlin`].
//!
//! Blocks are repacked once at load ([`pack`]) into panels of 32 features ([`mod@format`]); activations
//! become bytes with a scale for each 32 of a row (`acts`); products of bytes are summed in integers
//! (`tile`). A few rows take the codes straight from the panel; many share units of it that were
//! decoded into the first-level cache (`task`). Types without a packed form of their own are
//! dequantised to f32.

pub(crate) mod acts;
pub mod affine;
mod blocks;
mod codes;
pub mod format;
pub(crate) mod groups;
pub mod pack;
pub(crate) mod task;
pub(crate) mod tile;

use super::exec::{Exec, Scratch};
use super::gemm::pack::CpuWeight;
use super::gemm::tile::PANEL;
use super::gemm::{Columns, PartSums, columns_of, rows_by_id};
use super::isa::ByteKernel;
use super::memory::SharedMut;
use super::simd::ByteProducts;
use acts::WORDS;
use ferrum_quant::weights::GgufRows;
use ferrum_types::{Error, GemmShape, MatShape, Result, RowShape, SrcDtype, SumSplit, WeightPart};
use format::{CodeLayout, ScaleLayout, UNIT};
pub use pack::is_packed;
use pack::{FormatVisitor, PackedMatrix};
use std::marker::PhantomData;
use std::ops::Range;
use task::Task;

/// Rows whose bytes are held at once.
const ROWS_AT_ONCE: usize = 1024;

/// A quantised matrix, possibly of several forms one below the other.
#[derive(Debug)]
pub struct CpuQuantWeight {
    pub(super) shape: MatShape,
    pub(super) parts: Vec<Part>,
}

/// Consecutive rows of one form.
#[derive(Debug)]
pub(super) enum Part {
    Packed(PackedMatrix),
    Dense(CpuWeight),
}

impl Part {
    pub(super) fn rows(&self) -> usize {
        match self {
            Part::Packed(packed) => packed.shape.rows,
            Part::Dense(dense) => dense.shape.rows,
        }
    }
}

impl CpuQuantWeight {
    /// The sizes.
    #[inline]
    pub fn shape(&self) -> MatShape {
        self.shape
    }

    /// Rows of ggml blocks, one part below the other.
    ///
    /// # Errors
    /// Of parts that are not whole; [`OutOfMemory`](Error::OutOfMemory).
    pub fn blocks(exec: &Exec, parts: &[GgufRows<'_>], cols: usize) -> Result<Self> {
        Self::of_parts("load_quant", load_parts(exec, parts, cols)?, cols)
    }

    /// Cuts the sums over inputs where each part's panels allow it.
    pub fn split_sums(&mut self, split: SumSplit) {
        for part in &mut self.parts {
            match part {
                Part::Packed(packed) => packed.split_sums(split),
                Part::Dense(dense) => dense.split_sums(split),
            }
        }
    }

    /// A matrix of parts that were loaded.
    pub(super) fn of_parts(op: &'static str, parts: Vec<Part>, cols: usize) -> Result<Self> {
        let rows = parts
            .iter()
            .try_fold(0usize, |sum, part| sum.checked_add(part.rows()))
            .ok_or_else(|| Error::invalid(op, "the rows of all parts overflow"))?;
        Ok(Self {
            shape: MatShape { rows, cols },
            parts,
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

/// Loads parts, those of one type that follow one another as one.
pub(super) fn load_parts(exec: &Exec, parts: &[GgufRows<'_>], cols: usize) -> Result<Vec<Part>> {
    let same = |a: &GgufRows<'_>, b: &GgufRows<'_>| a.ty == b.ty;
    let load = |group: &[GgufRows<'_>]| {
        Ok(if is_packed(group[0].ty) {
            Part::Packed(PackedMatrix::new(exec, group, cols)?)
        } else {
            Part::Dense(dequantize(exec, group, cols)?)
        })
    };
    parts.chunk_by(same).map(load).collect()
}

/// Parts of a type that is not packed: floats as they are, the others in f32.
fn dequantize(exec: &Exec, parts: &[GgufRows<'_>], cols: usize) -> Result<CpuWeight> {
    // Rows of such a matrix may be looked up.
    with_floats(parts, cols, |parts| {
        CpuWeight::pack_table(exec, parts, cols)
    })
}

/// [`dequantize`] into `count` matrices of equally many rows, each of equally many parts.
pub(crate) fn dequantize_stack(
    exec: &Exec,
    parts: &[GgufRows<'_>],
    cols: usize,
    count: usize,
) -> Result<Vec<CpuWeight>> {
    with_floats(parts, cols, |parts| {
        CpuWeight::experts(exec, parts, cols, count)
    })
}

/// Calls `pack` with the parts as floats, which they are, or in f32.
fn with_floats<T>(
    parts: &[GgufRows<'_>],
    cols: usize,
    pack: impl FnOnce(&[WeightPart<'_>]) -> Result<T>,
) -> Result<T> {
    let floats: Option<Vec<_>> = parts.iter().map(GgufRows::as_dense).collect();
    if let Some(floats) = floats {
        return pack(&floats);
    }
    let mut values = Vec::new();
    for part in parts {
        values.extend(part.dequantize("load_quant", cols)?);
    }
    let mut rest = &values[..];
    let part = |part: &GgufRows<'_>| {
        let (values, others) = rest.split_at(part.rows * cols);
        rest = others;
        WeightPart::new(bytemuck::cast_slice(values), SrcDtype::F32, part.rows)
    };
    let parts: Vec<_> = parts.iter().map(part).collect();
    pack(&parts)
}

/// `out[rows, n] = x[rows, k] · weight[n, k]ᵀ`.
///
/// # Errors
/// [`OutOfMemory`](Error::OutOfMemory) for scratch memory.
///
/// # Panics
/// When a slice is shorter than the shape says, or the weight is of another one.
pub fn gemm(
    exec: &Exec,
    scratch: &mut Scratch,
    x: &[f32],
    weight: &CpuQuantWeight,
    out: &mut [f32],
    shape: GemmShape,
) -> Result<()> {
    let GemmShape { rows, n, k } = shape;
    assert_eq!((weight.shape.rows, weight.shape.cols), (n, k), "the weight");
    let (x, out) = (&x[..rows * k], &mut out[..rows * n]);
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
            let columns = Columns::new(SharedMut::new(out), n, first);
            match part {
                Part::Packed(packed) => product(exec, scratch, x, packed, columns)?,
                Part::Dense(dense) => columns_of(exec, scratch, x, dense, columns)?,
            }
            first += part.rows();
        }
    }
    Ok(())
}

/// Rows of a tile at this level.
struct ByteRows;

impl ByteKernel for ByteRows {
    type Output = usize;

    #[inline(always)]
    fn run<S: ByteProducts>(self, _: S) -> usize {
        S::BYTE_ROWS
    }
}

/// Rows of each tile of `rows` rows: of about the same size.
pub(crate) fn tile_rows(exec: &Exec, rows: usize) -> usize {
    let most = exec.level.run_bytes(ByteRows);
    rows.div_ceil(rows.div_ceil(most))
}

fn product(
    exec: &Exec,
    scratch: &mut Scratch,
    x: &[f32],
    weight: &PackedMatrix,
    columns: Columns<'_>,
) -> Result<()> {
    let k = weight.shape.cols;
    let rows = x.len() / k;
    let tile_rows = tile_rows(exec, rows);
    let words = rows * (k / UNIT) * WORDS;
    let acts: &mut [i32] = bytemuck::cast_slice_mut(scratch.floats(words)?);
    let order = weight.order.as_deref();
    acts::pack(exec, (x, k, order), tile_rows, SharedMut::new(acts));
    weight.with(Product {
        exec,
        acts,
        rows,
        tile_rows,
        weight,
        sums: PartSums::Tree(weight.sums),
        columns,
    })
}

/// A matrix times rows that are packed already.
#[derive(Clone, Copy)]
pub(crate) struct Product<'a> {
    pub(crate) exec: &'a Exec,
    pub(crate) acts: &'a [i32],
    pub(crate) rows: usize,
    pub(crate) tile_rows: usize,
    pub(crate) weight: &'a PackedMatrix,
    pub(crate) sums: PartSums,
    pub(crate) columns: Columns<'a>,
}

impl FormatVisitor for Product<'_> {
    type Output = ();

    fn run<C: CodeLayout, F: ScaleLayout>(self, codes: C, _: F) {
        let panels = self.weight.panels();
        let tiles = self.rows.div_ceil(self.tile_rows);
        // Rows are split only while there are too few panels to keep all threads busy.
        let parts = (4 * self.exec.pool.threads())
            .div_ceil(panels)
            .clamp(1, tiles);
        let cost = self.rows * self.weight.shape.cols * PANEL / 16 / parts;
        let run = |panels: Range<usize>, tiles: Range<usize>| {
            self.exec.level.run_bytes(Task::<C, F> {
                product: self,
                codes,
                panels,
                tiles,
                scales: PhantomData,
            });
        };
        self.exec.parallel_for(panels * parts, cost, |units, _| {
            if parts == 1 {
                return run(units, 0..tiles);
            }
            for unit in units {
                let (panel, part) = (unit / parts, unit % parts);
                let tiles = tiles * part / parts..tiles * (part + 1) / parts;
                run(panel..panel + 1, tiles);
            }
        });
    }
}

/// Some panels of a [`Product`], all on this thread.
pub(crate) struct SomePanels<'a> {
    pub(crate) product: Product<'a>,
    pub(crate) panels: Range<usize>,
}

impl FormatVisitor for SomePanels<'_> {
    type Output = ();

    fn run<C: CodeLayout, F: ScaleLayout>(self, codes: C, _: F) {
        let Self { product, panels } = self;
        product.exec.level.run_bytes(Task::<C, F> {
            product,
            codes,
            panels,
            tiles: 0..product.rows.div_ceil(product.tile_rows),
            scales: PhantomData,
        });
    }
}

/// `out[i, :] = table[ids[i], :]`, zeros for an id outside the table.
///
/// # Panics
/// When a slice is shorter than the shape says.
pub fn embedding_lookup(
    exec: &Exec,
    table: &CpuQuantWeight,
    ids: &[i32],
    out: &mut [f32],
    shape: RowShape,
) {
    rows_by_id(exec, ids, out, shape, |id, out| table.read_row(id, out));
}
