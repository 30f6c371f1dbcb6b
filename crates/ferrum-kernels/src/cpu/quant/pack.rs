//! ggml blocks into panels, once, at load.

use super::affine::GroupForm;
use super::format::{
    Bits, Bytes, Codes, Exponents, Halfs, Scales, Super, Table, UNIT, block_bytes,
};
use crate::backend::{MatShape, QuantPart};
use crate::cpu::buffer::{CpuBuffer, SharedBytes, SharedMut};
use crate::cpu::check::elements;
use crate::cpu::exec::Exec;
use crate::cpu::gemm::tile::PANEL;
use crate::cpu::isa::ByteKernel;
use crate::cpu::simd::ByteProducts;
use ferrum_quant::integers::{CodeValues, Integers, code_values, integers};
use ferrum_types::{Error, GgufQuantType, Result};

/// A matrix `[n, k]` of one form, in panels.
#[derive(Debug)]
pub(crate) struct Packed {
    pub(crate) shape: MatShape,
    pub(crate) form: Form,
    /// What the level flips in signed bytes.
    pub(crate) flip: u8,
    /// The input features of its columns, where they are not in their own order.
    pub(crate) order: Option<Vec<u32>>,
    pub(crate) data: SharedBytes,
}

/// What a matrix was packed from, and so its formats.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    /// ggml blocks.
    Blocks(GgufQuantType),
    /// Groups with a scale and a zero point.
    Groups(GroupForm),
}

impl Form {
    /// Runs `work` with the formats of this form; `None` for a type that is not packed.
    pub(crate) fn with<W: OnFormat>(self, flip: u8, work: W) -> Option<W::Output> {
        match self {
            Form::Blocks(ty) => with_format(ty, flip, work),
            Form::Groups(form) => form.with(work),
        }
    }

    /// What its codes stand for.
    fn values(self) -> Option<CodeValues> {
        match self {
            Form::Blocks(ty) => code_values(ty),
            Form::Groups(form) => Some(form.values()),
        }
    }
}

/// What the level flips in signed bytes.
pub(crate) struct Flip;

impl ByteKernel for Flip {
    type Output = u8;

    #[inline(always)]
    fn run<S: ByteProducts>(self, _: S) -> u8 {
        S::WIDE_FLIP
    }
}

/// Work that is written once for every pair of formats.
pub(crate) trait OnFormat {
    /// What [`run`](Self::run) returns.
    type Output;

    /// Does the work.
    fn run<C: Codes, F: Scales>(self, codes: C, scales: F) -> Self::Output;
}

/// Whether weights of this type are packed here, and not expanded.
pub(crate) fn is_packed(ty: GgufQuantType) -> bool {
    code_values(ty).is_some()
}

/// Runs `work` with the formats of `ty`; `None` for a type that is not packed.
pub(crate) fn with_format<W: OnFormat>(ty: GgufQuantType, flip: u8, work: W) -> Option<W::Output> {
    use GgufQuantType as T;
    let halfs = Halfs::<false>;
    if let CodeValues::Table(table) = code_values(ty)? {
        let table = Table(table.map(|x| x as u8 ^ flip));
        return Some(match ty {
            T::MXFP4 => work.run(table, Exponents),
            T::IQ4_XS => work.run(table, Super::<1, false>),
            _ => work.run(table, halfs),
        });
    }
    Some(match ty {
        T::Q2_K => work.run(Bits::<2, 0>, Super::<2, true>),
        T::Q3_K => work.run(Bits::<3, 4>, Super::<2, false>),
        T::Q4_0 => work.run(Bits::<4, 8>, halfs),
        T::Q4_1 => work.run(Bits::<4, 0>, Halfs::<true>),
        T::Q4_K => work.run(Bits::<4, 0>, Super::<1, true>),
        T::Q5_0 => work.run(Bits::<5, 16>, halfs),
        T::Q5_1 => work.run(Bits::<5, 0>, Halfs::<true>),
        T::Q5_K => work.run(Bits::<5, 0>, Super::<1, true>),
        T::Q6_K => work.run(Bits::<6, 32>, Super::<2, false>),
        T::Q8_0 => work.run(Bytes, halfs),
        _ => return None,
    })
}

impl Packed {
    /// Packs parts of one type that [`is_packed`], whose rows have `cols` numbers.
    pub(crate) fn new(exec: &Exec, parts: &[QuantPart<'_>], cols: usize) -> Result<Self> {
        let packed = Self::stack(exec, parts, cols, 1)?.pop();
        packed.ok_or_else(|| Error::invalid("load_quant", "there is no matrix"))
    }

    /// Packs the rows of `parts`, which are of one type that [`is_packed`], as `count` matrices of
    /// equally many rows. Each has panels of its own.
    pub(crate) fn stack(
        exec: &Exec,
        parts: &[QuantPart<'_>],
        cols: usize,
        count: usize,
    ) -> Result<Vec<Self>> {
        let op = "load_quant";
        let Some(first) = parts.first() else {
            return Err(Error::invalid(op, "there is no part"));
        };
        let ty = first.ty;
        let row_bytes = ty.bytes_for(cols).ok_or_else(|| {
            let block = ty.block_len();
            let reason =
                format!("rows have {cols} elements, expected a multiple of {block} for {ty}");
            Error::invalid(op, reason)
        })?;
        let mut rows = 0usize;
        for part in parts {
            let expected = elements(op, &[part.rows, row_bytes])?;
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
        if count == 0 || !rows.is_multiple_of(count) {
            let reason = format!("{rows} rows, expected a multiple of {count} matrices");
            return Err(Error::invalid(op, reason));
        }
        let flip = exec.level.run_bytes(Flip);
        let rows = rows / count;
        let shape = MatShape { rows, cols };
        let source = Source {
            parts,
            ty,
            row_bytes,
        };
        let packing = Packing {
            exec,
            source,
            shape,
            count,
            flip,
        };
        let data = with_format(ty, flip, packing);
        let data = data.ok_or_else(|| Error::invalid(op, format!("{ty} is not packed")))??;
        let form = Form::Blocks(ty);
        let matrix = |data| Self {
            shape,
            form,
            flip,
            order: None,
            data,
        };
        Ok(SharedBytes::split(data, count).map(matrix).collect())
    }

    /// Number of panels.
    pub(crate) fn panels(&self) -> usize {
        self.shape.rows.div_ceil(PANEL)
    }

    /// All panels.
    pub(crate) fn bytes(&self) -> &[u8] {
        self.data.as_slice()
    }

    /// Runs `work` with the formats of this matrix.
    pub(crate) fn with<W: OnFormat>(&self, work: W) -> Result<W::Output> {
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
pub(crate) fn panel_bytes<C: Codes, F: Scales>(cols: usize) -> usize {
    cols / (UNIT * F::UNITS) * block_bytes::<C, F>()
}

/// Rows of blocks.
struct Source<'a> {
    parts: &'a [QuantPart<'a>],
    ty: GgufQuantType,
    row_bytes: usize,
}

impl Source<'_> {
    /// The bytes of row `row`.
    fn row(&self, mut row: usize) -> Option<&[u8]> {
        for part in self.parts {
            if row < part.rows {
                return part
                    .bytes
                    .get(row * self.row_bytes..)?
                    .get(..self.row_bytes);
            }
            row -= part.rows;
        }
        None
    }
}

struct Packing<'a> {
    exec: &'a Exec,
    source: Source<'a>,
    /// Of each matrix.
    shape: MatShape,
    count: usize,
    flip: u8,
}

impl OnFormat for Packing<'_> {
    type Output = Result<CpuBuffer<u8>>;

    fn run<C: Codes, F: Scales>(self, _: C, _: F) -> Self::Output {
        let MatShape { rows, cols } = self.shape;
        let each = rows.div_ceil(PANEL);
        let panels = elements("load_quant", &[each, self.count])?;
        let panel = panel_bytes::<C, F>(cols);
        let mut data = CpuBuffer::lasting(elements("load_quant", &[panels, panel])?)?;
        let out = SharedMut::new(data.as_mut_slice());
        self.exec.spread(panels, cols * PANEL, |panels, _| {
            let mut block = Integers::ZERO;
            for p in panels {
                // SAFETY: each panel is packed by one task.
                let out = unsafe { out.part(p * panel, panel) };
                let (matrix, first) = (p / each, p % each * PANEL);
                let mut sources = [&[][..]; PANEL];
                for (j, source) in sources[..PANEL.min(rows - first)].iter_mut().enumerate() {
                    *source = self
                        .source
                        .row(matrix * rows + first + j)
                        .unwrap_or_default();
                }
                pack_panel::<C, F>(self.source.ty, &sources, self.flip, &mut block, out);
            }
        });
        Ok(data)
    }
}

/// Stores rows of blocks as the features of a panel. A block of all of them is written before the next,
/// so that it stays in the first-level cache meanwhile.
fn pack_panel<C: Codes, F: Scales>(
    ty: GgufQuantType,
    rows: &[&[u8]; PANEL],
    flip: u8,
    block: &mut Integers,
    panel: &mut [u8],
) {
    let len = ty.block_bytes();
    for (number, out) in panel.chunks_exact_mut(block_bytes::<C, F>()).enumerate() {
        for (j, row) in rows.iter().enumerate() {
            // Features past the last have no rows.
            let Some(bytes) = row.get(number * len..(number + 1) * len) else {
                continue;
            };
            // A whole block of a type that is packed: there is nothing to fail.
            let _ = integers(ty, bytes, block);
            put_block::<C, F>(block, j, flip, out);
        }
    }
}

/// Stores a block of feature `j`.
pub(super) fn put_block<C: Codes, F: Scales>(block: &Integers, j: usize, flip: u8, out: &mut [u8]) {
    let (head, units) = out.split_at_mut(F::HEAD);
    F::put_head(head, j, block);
    for (u, unit) in units.chunks_exact_mut(F::BESIDE + C::BYTES).enumerate() {
        let (beside, codes) = unit.split_at_mut(F::BESIDE);
        F::put_beside(beside, j, block, u);
        if let Some(of_unit) = block.codes[u * UNIT..].first_chunk() {
            C::put(codes, j, of_unit, flip);
        }
    }
}

struct ReadRow<'a> {
    weight: &'a Packed,
    row: usize,
    out: &'a mut [f32],
}

impl OnFormat for ReadRow<'_> {
    type Output = ();

    fn run<C: Codes, F: Scales>(self, _: C, _: F) {
        let Self { weight, row, out } = self;
        let panel = panel_bytes::<C, F>(weight.shape.cols);
        let panel = &weight.bytes()[row / PANEL * panel..][..panel];
        let (j, flip) = (row % PANEL, weight.flip);
        let Some(values) = weight.form.values() else {
            return;
        };
        let blocks = panel.chunks_exact(block_bytes::<C, F>());
        for (block, out) in blocks.zip(out.chunks_exact_mut(UNIT * F::UNITS)) {
            let (head, units) = block.split_at(F::HEAD);
            let units = units.chunks_exact(F::BESIDE + C::BYTES);
            for (unit, out) in units.zip(out.chunks_exact_mut(UNIT)) {
                let (beside, codes) = unit.split_at(F::BESIDE);
                for (k, out) in out.iter_mut().enumerate() {
                    let (scale, minimum) = F::get(head, beside, j, k);
                    let code = values.value(C::get(codes, j, k, flip));
                    *out = scale * code as f32 - minimum;
                }
            }
        }
    }
}
