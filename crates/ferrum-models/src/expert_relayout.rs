//! Stacks of matrices that files hold in another order, or together with others: they are put together while they are
//! loaded.

use crate::inventory::StackLayout;
use ferrum_kernels::{ExpertShape, GgufRows, QuantWeights};
use ferrum_types::{Error, GgufQuantType, Result};
use std::borrow::Cow;

/// Numbers of a block of MXFP4, and bytes of them in a checkpoint, which has the scales in a tensor of their own.
const BLOCK: usize = 32;

/// A stack in a tensor of a file that holds it in another order.
pub struct ReorderedExperts<'a> {
    source: Source<'a>,
    layout: StackLayout,
    shape: ExpertShape,
}

/// The tensors that hold a stack.
enum Source<'a> {
    /// A matrix of all matrices, with rows of `width` numbers, `height` for each.
    Rows(QuantWeights<'a>),
    /// Blocks of MXFP4 and their scales. There is a row for each output, however the layout is.
    Mxfp4 { blocks: &'a [u8], scales: &'a [u8] },
}

/// A stack of its own.
pub(crate) struct OwnedExperts {
    bytes: Vec<u8>,
    ty: GgufQuantType,
    rows: usize,
}

impl OwnedExperts {
    pub(crate) fn part(&self) -> GgufRows<'_> {
        GgufRows::new(&self.bytes, self.ty, self.rows)
    }
}

impl<'a> ReorderedExperts<'a> {
    /// A stack in the rows of a matrix, or in its columns.
    pub(crate) fn of_rows(rows: QuantWeights<'a>, layout: StackLayout, shape: ExpertShape) -> Self {
        Self {
            source: Source::Rows(rows),
            layout,
            shape,
        }
    }

    /// A stack in blocks of MXFP4, `[experts, outputs, inputs / 32, 16]`, and their scales, `[experts, outputs,
    /// inputs / 32]`. A byte of a block holds two neighbours, the first in its low half.
    ///
    /// # Errors
    /// `Shape` when the sizes disagree; `InvalidArgument` for inputs that are no whole blocks.
    pub(crate) fn of_mxfp4(
        (blocks, scales): (&'a [u8], &'a [u8]),
        layout: StackLayout,
        shape: ExpertShape,
    ) -> Result<Self> {
        let op = "load_experts";
        if !shape.k.is_multiple_of(BLOCK) {
            let reason = format!("{} inputs are no whole blocks of {BLOCK}", shape.k);
            return Err(Error::invalid(op, reason));
        }
        let count = shape.experts * layout.width * (shape.k / BLOCK);
        for (what, found, expected) in [
            ("blocks", blocks.len(), count * BLOCK / 2),
            ("scales", scales.len(), count),
        ] {
            Error::check_len(op, what, found, expected)?;
        }
        Ok(Self {
            source: Source::Mxfp4 { blocks, scales },
            layout,
            shape,
        })
    }

    /// The type of the stack once it is put together.
    pub(crate) fn ty(&self) -> GgufQuantType {
        match &self.source {
            Source::Mxfp4 { .. } => GgufQuantType::MXFP4,
            Source::Rows(QuantWeights::Gguf(part))
                if !part.ty.is_quantized() || !self.layout.transposed =>
            {
                part.ty
            }
            Source::Rows(_) => GgufQuantType::F32,
        }
    }

    /// A stack of this type without its bytes, for questions of its format.
    pub(crate) fn format(&self) -> QuantWeights<'_> {
        let rows = self.shape.experts * self.shape.n;
        QuantWeights::Gguf(GgufRows::new(&[], self.ty(), rows))
    }

    /// Bytes of the stack once it is put together.
    pub(crate) fn bytes(&self) -> u64 {
        let ExpertShape { experts, n, k } = self.shape;
        let row = self.ty().bytes_for(k).unwrap_or(4 * k);
        (experts as u64) * (n as u64) * row as u64
    }

    /// Puts the stack together.
    ///
    /// # Errors
    /// What is wrong with a weight that has to be dequantised.
    pub(crate) fn gather(&self) -> Result<OwnedExperts> {
        let ExpertShape { experts, n, .. } = self.shape;
        let bytes = match &self.source {
            Source::Mxfp4 { blocks, scales } => self.mxfp4(blocks, scales),
            Source::Rows(weights) => self.rows(weights)?,
        };
        Ok(OwnedExperts {
            bytes,
            ty: self.ty(),
            rows: experts * n,
        })
    }

    /// The places of all rows among the columns, or rows, that each matrix of the file has `all` of.
    fn places(&self, all: usize) -> impl Iterator<Item = (usize, usize)> {
        let StackLayout { first, step, .. } = self.layout;
        let n = self.shape.n;
        (0..self.shape.experts)
            .flat_map(move |expert| (0..n).map(move |i| (expert, expert * all + first + i * step)))
    }

    fn rows(&self, weights: &QuantWeights<'_>) -> Result<Vec<u8>> {
        let StackLayout {
            height,
            width,
            first,
            transposed,
            ..
        } = self.layout;
        let ty = self.ty();
        let bytes = match weights {
            QuantWeights::Gguf(part) if part.ty == ty => Cow::Borrowed(part.bytes),
            _ => {
                let values = weights.dequantize("load_experts", width)?;
                Cow::Owned(bytemuck::cast_slice(&values).to_vec())
            }
        };
        let mut out = Vec::with_capacity(self.bytes() as usize);
        if !transposed {
            let row_bytes = ty.bytes_for(width).unwrap_or(0);
            for (_, row) in self.places(height) {
                out.extend_from_slice(&bytes[row * row_bytes..][..row_bytes]);
            }
            return Ok(out);
        }
        let size = ty.block_bytes();
        for (expert, place) in self.places(0) {
            debug_assert!(place >= first);
            for input in 0..self.shape.k {
                let at = (expert * height + input) * width + place;
                out.extend_from_slice(&bytes[at * size..][..size]);
            }
        }
        Ok(out)
    }

    fn mxfp4(&self, blocks: &[u8], scales: &[u8]) -> Vec<u8> {
        let in_row = self.shape.k / BLOCK;
        let half = BLOCK / 2;
        let mut out = Vec::with_capacity(self.bytes() as usize);
        for (_, row) in self.places(self.layout.width) {
            for block in row * in_row..(row + 1) * in_row {
                let codes = &blocks[block * half..][..half];
                let code = |i: usize| codes[i / 2] >> (4 * (i % 2)) & 15;
                out.push(scales[block]);
                // A byte has a number of the first half, and below it in the second half its partner.
                out.extend((0..half).map(|i| code(i) | code(half + i) << 4));
            }
        }
        out
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test may panic")]
mod tests {
    use super::*;

    fn values(stack: &ReorderedExperts<'_>) -> Vec<f32> {
        let own = stack.gather().unwrap();
        assert_eq!(own.bytes.len() as u64, stack.bytes());
        QuantWeights::Gguf(own.part())
            .dequantize("test", stack.shape.k)
            .unwrap()
    }

    fn floats(numbers: &[f32]) -> Vec<u8> {
        bytemuck::cast_slice(numbers).to_vec()
    }

    #[test]
    fn rows_and_columns_are_found() {
        let numbers: Vec<f32> = (0..24u8).map(f32::from).collect();
        let bytes = floats(&numbers);
        let shape = |n, k| ExpertShape { experts: 2, n, k };
        let layout = |height, width, first, step, transposed| StackLayout {
            height,
            width,
            first,
            step,
            transposed,
        };
        // Two matrices of 4 rows of 3: the odd rows; two of 3 rows of 4: the even columns; the first 2 rows, turned.
        for (shape, layout, expected) in [
            (
                shape(2, 3),
                layout(4, 3, 1, 2, false),
                [3, 4, 5, 9, 10, 11, 15, 16, 17, 21, 22, 23].to_vec(),
            ),
            (
                shape(2, 3),
                layout(3, 4, 0, 2, true),
                [0, 4, 8, 2, 6, 10, 12, 16, 20, 14, 18, 22].to_vec(),
            ),
            (
                shape(3, 2),
                layout(4, 3, 0, 1, true),
                [0, 3, 1, 4, 2, 5, 12, 15, 13, 16, 14, 17].to_vec(),
            ),
        ] {
            let part = GgufRows::new(&bytes, GgufQuantType::F32, 24 / layout.width);
            let stack = ReorderedExperts::of_rows(QuantWeights::Gguf(part), layout, shape);
            let expected: Vec<f32> = expected.into_iter().map(|x: u8| f32::from(x)).collect();
            assert_eq!(values(&stack), expected, "{layout:?}");
        }
    }

    #[test]
    fn blocks_of_mxfp4_become_those_of_ggml() {
        // One expert of two outputs beside two others, codes 0 to 15 in turn; scales of 1/2, 1, 2 and 4.
        let codes = |i: usize| (i % 16) as u8;
        let blocks: Vec<u8> = (0..4 * 16)
            .map(|i| codes(2 * i) | codes(2 * i + 1) << 4)
            .collect();
        let scales = [126, 127, 128, 129];
        let layout = StackLayout {
            height: 32,
            width: 4,
            first: 1,
            step: 2,
            transposed: true,
        };
        let shape = ExpertShape {
            experts: 1,
            n: 2,
            k: 32,
        };
        let stack = ReorderedExperts::of_mxfp4((&blocks, &scales), layout, shape).unwrap();
        let levels = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
        let both: Vec<f32> = levels.into_iter().chain(levels.map(|x: f32| -x)).collect();
        let row = |scale: f32| both.iter().chain(&both).map(move |x| x * scale);
        let expected: Vec<f32> = row(1.0).chain(row(4.0)).collect();
        assert_eq!(values(&stack), expected);
        let short = ReorderedExperts::of_mxfp4((&blocks[1..], &scales), layout, shape);
        assert!(short.is_err());
        let odd = ExpertShape { k: 33, ..shape };
        assert!(ReorderedExperts::of_mxfp4((&blocks, &scales), layout, odd).is_err());
    }
}
