//! ggml blocks into panels, once, at load.

use super::blocks::{Blocks, HalfBlock, OnBlocks, with_blocks};
pub use super::format::FormatVisitor;
use super::format::{CodeLayout, ScaleLayout, UNIT, block_bytes};
use super::groups::GroupFormat;
use crate::exec::Exec;
use crate::gemm::tile::PANEL;
use crate::isa::{ByteKernel, Kernel, Level};
use crate::memory::SharedBytes;
use crate::panels::{LaneRows, PanelSource, first_lanes};
use crate::simd::{ByteProducts, LANES, Simd};
use ferrum_quant::unpack::{CodeValues, code_values};
use ferrum_quant::weights::{GgufRows, check_quant_rows};
use ferrum_types::{Error, GgufQuantType, MatShape, Result, SumSplit};
use std::marker::PhantomData;

const OP: &str = "load_quant";

/// A matrix `[n, k]` of one form, in panels.
#[derive(Debug)]
pub struct PackedMatrix {
    pub(crate) shape: MatShape,
    pub(crate) form: PackedFormat,
    /// The bits of signed bytes that the level flips, so that they are multiplied as unsigned ones.
    pub(crate) flip: u8,
    /// The input features of its columns, where they are not in their own order.
    pub(crate) order: Option<Vec<u32>>,
    /// How sums are cut, in units.
    pub(crate) sums: SumSplit,
    pub(crate) data: SharedBytes,
}

/// What a matrix was packed from, and so its formats.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PackedFormat {
    /// ggml blocks.
    Blocks(GgufQuantType),
    /// Groups with a scale and a zero point.
    Groups(GroupFormat),
}

impl PackedFormat {
    /// Runs `work` with the formats of this form; `None` for a type that is not packed.
    pub(crate) fn with<W: FormatVisitor>(self, flip: u8, work: W) -> Option<W::Output> {
        match self {
            PackedFormat::Blocks(ty) => with_format(ty, flip, work),
            PackedFormat::Groups(form) => form.with(work),
        }
    }

    /// What its codes stand for.
    fn values(self) -> Option<CodeValues> {
        match self {
            PackedFormat::Blocks(ty) => code_values(ty),
            PackedFormat::Groups(form) => Some(form.values()),
        }
    }
}

/// The bits of signed bytes that the level flips, so that they are multiplied as unsigned ones.
pub struct SignFlip;

impl ByteKernel for SignFlip {
    type Output = u8;

    #[inline(always)]
    fn run<S: ByteProducts>(self, _: S) -> u8 {
        S::WIDE_FLIP
    }
}

/// Whether weights of this type are packed here, and not dequantised.
pub fn is_packed(ty: GgufQuantType) -> bool {
    code_values(ty).is_some()
}

/// Runs `work` with the formats of `ty`; `None` for a type that is not packed.
pub(crate) fn with_format<W: FormatVisitor>(
    ty: GgufQuantType,
    flip: u8,
    work: W,
) -> Option<W::Output> {
    let table = match code_values(ty)? {
        CodeValues::Table(table) => table.map(|x| x as u8 ^ flip),
        _ => [0; 16],
    };
    with_blocks(ty, Formats { table, work })
}

/// [`FormatVisitor`] for the formats of blocks.
struct Formats<W> {
    table: [u8; 16],
    work: W,
}

impl<W: FormatVisitor> OnBlocks for Formats<W> {
    type Output = W::Output;

    fn run<B: Blocks>(self) -> W::Output {
        self.work
            .run(B::CodeLayout::of(self.table), B::ScaleLayout::default())
    }
}

impl PackedMatrix {
    /// Packs parts of one type that [`is_packed`], whose rows have `cols` numbers.
    ///
    /// # Errors
    /// Of parts that are not whole; [`OutOfMemory`](Error::OutOfMemory).
    pub fn new(exec: &Exec, parts: &[GgufRows<'_>], cols: usize) -> Result<Self> {
        let packed = Self::stack(exec, parts, cols, 1)?.pop();
        packed.ok_or_else(|| Error::invalid("load_quant", "there is no matrix"))
    }

    /// Packs the rows of `parts`, which are of one type that [`is_packed`], as `count` matrices of
    /// equally many rows. Each has panels of its own.
    pub(crate) fn stack(
        exec: &Exec,
        parts: &[GgufRows<'_>],
        cols: usize,
        count: usize,
    ) -> Result<Vec<Self>> {
        let packing = Packing::new(exec, parts, cols, count)?;
        let (ty, shape, flip) = (packing.ty, packing.shape, packing.flip);
        let data = packing.panels()?.packed(OP, exec)?;
        let form = PackedFormat::Blocks(ty);
        let matrix = |data| Self {
            shape,
            form,
            flip,
            order: None,
            sums: SumSplit::WHOLE,
            data,
        };
        Ok(SharedBytes::split(data, count).map(matrix).collect())
    }

    /// The sizes.
    #[inline]
    pub fn shape(&self) -> MatShape {
        self.shape
    }

    /// Cuts the sums over inputs, but not inside a unit or a block, and not of inputs in an order of their own: ranks have no such parts.
    pub(crate) fn split_sums(&mut self, split: SumSplit) {
        self.sums = match self.order {
            None => {
                let block = match self.form {
                    PackedFormat::Blocks(ty) => ty.block_len().max(UNIT),
                    PackedFormat::Groups(_) => UNIT,
                };
                let blocks = split.in_terms_of(block, self.shape.cols);
                blocks.in_finer_terms(block / UNIT)
            }
            Some(_) => SumSplit::WHOLE,
        };
    }

    /// Number of panels.
    pub(crate) fn panels(&self) -> usize {
        self.shape.rows.div_ceil(PANEL)
    }

    /// All panels.
    pub fn bytes(&self) -> &[u8] {
        self.data.as_slice()
    }

    /// Runs `work` with the formats of this matrix.
    pub fn with<W: FormatVisitor>(&self, work: W) -> Result<W::Output> {
        let found = self.form.with(self.flip, work);
        found.ok_or_else(|| Error::invalid("gemm_quant", format!("{:?} is not packed", self.form)))
    }

    /// Row `row` as f32.
    pub(crate) fn read_row(&self, row: usize, out: &mut [f32]) -> Result<()> {
        let weight = self;
        let Some(order) = &self.order else {
            return self.with(ReadRow { weight, row, out });
        };
        let mut ordered = vec![0.0; order.len()];
        self.with(ReadRow {
            weight,
            row,
            out: &mut ordered,
        })?;
        for (&input, x) in order.iter().zip(ordered) {
            out[input as usize] = x;
        }
        Ok(())
    }
}

/// Bytes of a panel with rows of `cols` numbers.
pub fn panel_bytes<C: CodeLayout, F: ScaleLayout>(cols: usize) -> usize {
    cols / (UNIT * F::UNITS) * block_bytes::<C, F>()
}

/// Rows of blocks that are packed.
#[derive(Clone, Copy)]
pub(crate) struct Packing<'a> {
    parts: &'a [GgufRows<'a>],
    ty: GgufQuantType,
    row_bytes: usize,
    /// Of each matrix.
    shape: MatShape,
    count: usize,
    flip: u8,
}

impl<'a> Packing<'a> {
    /// Holds `parts`, which are of one type, against the size of `count` matrices.
    pub(crate) fn new(
        exec: &Exec,
        parts: &'a [GgufRows<'a>],
        cols: usize,
        count: usize,
    ) -> Result<Self> {
        let Some(first) = parts.first() else {
            return Err(Error::invalid(OP, "there is no part"));
        };
        let ty = first.ty;
        let mut row_bytes = 0;
        let mut rows = 0usize;
        for part in parts {
            row_bytes = check_quant_rows(OP, part, cols)?;
            rows = rows
                .checked_add(part.rows)
                .ok_or_else(|| Error::invalid(OP, "the rows of all parts overflow"))?;
        }
        if count == 0 || !rows.is_multiple_of(count) {
            let reason = format!("{rows} rows, expected a multiple of {count} matrices");
            return Err(Error::invalid(OP, reason));
        }
        let rows = rows / count;
        Ok(Self {
            parts,
            ty,
            row_bytes,
            shape: MatShape { rows, cols },
            count,
            flip: exec.level.run_bytes(SignFlip),
        })
    }

    /// The panels of a type that [`is_packed`].
    pub(crate) fn panels(self) -> Result<Box<dyn PanelSource + 'a>> {
        let panels = with_blocks(self.ty, self);
        panels.ok_or_else(|| Error::invalid(OP, format!("{} is not packed", self.ty)))
    }
}

impl<'a> OnBlocks for Packing<'a> {
    type Output = Box<dyn PanelSource + 'a>;

    fn run<B: Blocks>(self) -> Self::Output {
        Box::new(Source::<B> {
            packing: self,
            no_blocks: vec![0; self.row_bytes],
            blocks: PhantomData,
        })
    }
}

/// Rows of blocks of one type.
struct Source<'a, B> {
    packing: Packing<'a>,
    /// A row for features past the last.
    no_blocks: Vec<u8>,
    blocks: PhantomData<B>,
}

impl<B: Blocks> Source<'_, B> {
    /// The bytes of row `row`.
    fn row(&self, mut row: usize) -> Option<&[u8]> {
        let len = self.packing.row_bytes;
        for part in self.packing.parts {
            if row < part.rows {
                return Some(part.row(row, len));
            }
            row -= part.rows;
        }
        None
    }
}

impl<B: Blocks> PanelSource for Source<'_, B> {
    fn count(&self) -> usize {
        let Packing { shape, count, .. } = self.packing;
        shape.rows.div_ceil(PANEL).saturating_mul(count)
    }

    fn bytes(&self) -> usize {
        panel_bytes::<B::CodeLayout, B::ScaleLayout>(self.packing.shape.cols)
    }

    fn elements_per_panel(&self) -> usize {
        self.packing.shape.cols * PANEL
    }

    fn pack(&self, level: Level, number: usize, panel: &mut [u8]) {
        let rows = self.packing.shape.rows;
        let each = rows.div_ceil(PANEL);
        let (matrix, first) = (number / each, number % each * PANEL);
        let count = PANEL.min(rows - first);
        let mut sources = [&self.no_blocks[..]; PANEL];
        for (j, source) in sources[..count].iter_mut().enumerate() {
            *source = self.row(matrix * rows + first + j).unwrap_or(source);
        }
        level.run(PackPanel::<B> {
            rows: LaneRows::halves(&sources),
            count,
            flip: self.packing.flip,
            panel,
            blocks: PhantomData,
        });
    }
}

/// Stores rows of blocks as the features of a panel. A block of all of them is written before the next,
/// so that it stays in the first-level cache meanwhile.
struct PackPanel<'a, B> {
    rows: [LaneRows<'a>; 2],
    /// Features that there are.
    count: usize,
    flip: u8,
    panel: &'a mut [u8],
    blocks: PhantomData<B>,
}

impl<B: Blocks> Kernel for PackPanel<'_, B> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let len = B::TYPE.block_bytes();
        let bytes = block_bytes::<B::CodeLayout, B::ScaleLayout>();
        let present = |half: usize| first_lanes(s, self.count.saturating_sub(half * LANES));
        let present = [present(0), present(1)];
        let flip = s.splat_i(i32::from_le_bytes([self.flip; 4]));
        for (number, block) in self.panel.chunks_exact_mut(bytes).enumerate() {
            #[expect(
                clippy::needless_range_loop,
                reason = "iterators are not always inlined into code of another level"
            )]
            for half in 0..2 {
                let out = HalfBlock {
                    s,
                    block,
                    half,
                    present: present[half],
                    flip: s.and_i(flip, present[half]),
                    formats: PhantomData,
                };
                B::put(&self.rows[half], number * len, out);
            }
        }
    }
}

struct ReadRow<'a> {
    weight: &'a PackedMatrix,
    row: usize,
    out: &'a mut [f32],
}

impl FormatVisitor for ReadRow<'_> {
    type Output = ();

    fn run<C: CodeLayout, F: ScaleLayout>(self, _: C, _: F) {
        let Self { weight, row, out } = self;
        let panel = panel_bytes::<C, F>(weight.shape.cols);
        let panel = &weight.bytes()[row / PANEL * panel..][..panel];
        let (j, flip) = (row % PANEL, weight.flip);
        let Some(values) = weight.form.values() else {
            return;
        };
        let blocks = panel.chunks_exact(block_bytes::<C, F>());
        for (block, out) in blocks.zip(out.chunks_exact_mut(UNIT * F::UNITS)) {
            let (head, units) = block.split_at(F::BLOCK_HEADER_BYTES);
            let units = units.chunks_exact(F::UNIT_SCALE_BYTES + C::BYTES);
            for (unit, out) in units.zip(out.chunks_exact_mut(UNIT)) {
                let (beside, codes) = unit.split_at(F::UNIT_SCALE_BYTES);
                for (k, out) in out.iter_mut().enumerate() {
                    let (scale, minimum) = F::get(head, beside, j, k);
                    let code = values.value(C::get(codes, j, k, flip));
                    *out = scale * code as f32 - minimum;
                }
            }
        }
    }
}
