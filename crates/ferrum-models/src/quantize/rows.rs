//! Converts the rows of one tensor from one type to another.

use super::PlannedTensor;
use super::item::Columns;
use crate::rope::paired_row;
use ferrum_quant::{Search, dequantize, encode_row};
use ferrum_types::GgufQuantType;
use std::ops::Range;

/// How rows and their numbers lie in the source.
#[derive(Clone, Copy, Default)]
pub(super) struct Order<'a> {
    /// Heads whose rows go from halves to pairs; 0: they keep their order.
    pub(super) pairs: usize,
    /// Where the rows are columns of the source.
    pub(super) columns: Option<Columns>,
    /// Which row of the one part each row is.
    pub(super) rows: Option<&'a [usize]>,
    /// Which number of its row each number is.
    pub(super) cols: Option<&'a [usize]>,
}

/// The rows of a tensor.
pub(super) struct Rows<'a> {
    /// The bytes of as many rows each.
    parts: Vec<&'a [u8]>,
    from: GgufQuantType,
    to: GgufQuantType,
    count: usize,
    cols: usize,
    /// Bytes of a row in the source and in the new file.
    in_bytes: usize,
    out_bytes: usize,
    order: Order<'a>,
    importance: Option<&'a [f32]>,
}

impl<'a> Rows<'a> {
    /// From the bytes of the source's tensors, and the rows of each where the parts begin. `None`: they
    /// have no such rows, which readers have excluded.
    pub(super) fn new(
        tensor: &PlannedTensor,
        views: &[(&'a [u8], usize)],
        order: Order<'a>,
        importance: Option<&'a [f32]>,
    ) -> Option<Self> {
        // A vector is a column of numbers where rows are reordered, else one row.
        let cols = match (tensor.shape.as_slice(), order.pairs) {
            ([_], 1..) => 1,
            (shape, _) => shape.last().copied().unwrap_or(1),
        };
        let count = tensor.elements().checked_div(cols)?;
        let from = tensor.from?;
        let in_bytes = from.bytes_for(cols)?;
        let each = count.checked_div(views.len())?;
        // Some of the rows of a part may be those of another tensor.
        let each = match order.rows {
            None => each,
            Some(rows) if rows.len() == count && views.len() == 1 => rows.iter().max()? + 1,
            Some(_) => return None,
        };
        if order
            .cols
            .is_some_and(|all| all.len() != cols || all.iter().any(|&c| c >= cols))
        {
            return None;
        }
        // A row of the source, and how many of them a part is.
        let (row_bytes, rows) = match order.columns {
            None => (in_bytes, each),
            Some(c) => {
                let last = each.saturating_sub(1).checked_mul(c.step)?;
                let inside = c.first.checked_add(last)? < c.width;
                (from.bytes_for(c.width).filter(|_| inside)?, cols)
            }
        };
        let part_bytes = rows.checked_mul(row_bytes)?;
        let part = |&(bytes, first): &(&'a [u8], usize)| {
            let bytes = bytes.get(first.checked_mul(row_bytes)?..)?;
            bytes.get(..part_bytes)
        };
        let parts = views.iter().map(part).collect::<Option<Vec<_>>>()?;
        let is_whole = order.rows.is_some() || each.checked_mul(parts.len())? == count;
        is_whole.then_some(Rows {
            parts,
            from,
            to: tensor.ty,
            count,
            cols,
            in_bytes,
            out_bytes: tensor.ty.bytes_for(cols)?,
            order,
            importance,
        })
    }

    /// Bytes of a row in the source.
    pub(super) fn in_bytes(&self) -> usize {
        self.in_bytes
    }

    /// All rows, in runs of about so many numbers.
    pub(super) fn runs(&self, numbers: usize) -> impl Iterator<Item = Range<usize>> + use<> {
        let (count, run) = (self.count, (numbers / self.cols.max(1)).max(1));
        let first = (0..count).step_by(run);
        first.map(move |first| first..count.min(first + run))
    }

    /// The bytes of these rows in the new file, or what is wrong with the tensor.
    pub(super) fn encode(&self, rows: Range<usize>, search: Search) -> Result<Vec<u8>, String> {
        let mut bytes = vec![0; rows.len() * self.out_bytes];
        let mut values = vec![0.0; self.cols];
        for (row, out) in rows.zip(bytes.chunks_exact_mut(self.out_bytes)) {
            let (from, each) = match self.order.rows {
                Some(rows) => (rows[row], usize::MAX),
                None => {
                    let from = paired_row(row, self.count, self.order.pairs);
                    (from, self.count / self.parts.len())
                }
            };
            let failed = |e: ferrum_quant::QuantError| format!("cannot be converted: {e}");
            let part = self.parts[from / each];
            if let Some(columns) = self.order.columns {
                let place = columns.first + from % each * columns.step;
                let column = self.column(part, place, columns.width);
                dequantize(self.from, &column, &mut values).map_err(failed)?;
            } else {
                let bytes = &part[from % each * self.in_bytes..][..self.in_bytes];
                dequantize(self.from, bytes, &mut values).map_err(failed)?;
            }
            if let Some(cols) = self.order.cols {
                let turned = cols.iter().map(|&col| values[col]);
                values = turned.collect();
            }
            self.check(row, &values)?;
            let importance = self.importance.map(|all| {
                let experts = all.len() / self.cols;
                let expert = row / (self.count / experts).max(1);
                &all[expert * self.cols..][..self.cols]
            });
            encode_row(self.to, &values, importance, search, out).map_err(failed)?;
        }
        Ok(bytes)
    }

    /// The numbers of a column of a part whose rows are `width` long.
    fn column(&self, part: &[u8], column: usize, width: usize) -> Vec<u8> {
        let size = self.in_bytes / self.cols.max(1);
        let numbers = part.chunks_exact((width * size).max(1));
        let numbers = numbers.flat_map(|row| &row[column * size..][..size]);
        numbers.copied().collect()
    }

    /// Refuses numbers that the new type would turn into others without a word.
    fn check(&self, row: usize, values: &[f32]) -> Result<(), String> {
        const F16_MAX: f32 = 65504.0;
        // Scales of blocks are numbers of f16, less those of MXFP4.
        let narrow = self.to == GgufQuantType::F16 || self.to.is_quantized();
        let most = match narrow && self.to != GgufQuantType::MXFP4 {
            true => F16_MAX,
            false => f32::MAX,
        };
        // All of them are looked at, as a loop that may end early does not vectorise. NaN is no number below.
        if values.iter().fold(true, |fine, v| fine & (v.abs() <= most)) {
            return Ok(());
        }
        match values.iter().position(|v| v.is_nan() || v.abs() > most) {
            None => Ok(()),
            Some(col) => {
                let found = values[col];
                let hint = match found.is_finite() {
                    true => "take bf16 or f32",
                    false => "the checkpoint is damaged, fetch it again",
                };
                Err(format!(
                    "holds {found} in row {row}, column {col}, expected finite numbers up to {most:e}\
                     \nhint: {hint}"
                ))
            }
        }
    }
}
