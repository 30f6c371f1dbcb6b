//! Tensors of the new file: what they are called, and which numbers of the source they are made of.
//!
//! The modules that list the tensors of a source make items, and the writer reads their numbers.

use ferrum_formats::{TensorDtype, TensorInfo};
use ferrum_types::{Dtype, GgufQuantType};

/// A tensor of the new file.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Item {
    /// GGUF name.
    pub(super) name: String,
    /// Outermost dimension first.
    pub(super) shape: Vec<usize>,
    pub(super) from: From,
}

/// Where its numbers come from.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum From {
    /// Rows of tensors of the source.
    Rows {
        /// As many rows of each, one after the other: experts become a stack.
        parts: Vec<Part>,
        /// The type of all, if that is a type of numbers that can be quantised.
        ty: Option<GgufQuantType>,
        /// Heads whose rows go from halves to pairs; 0: rows keep their order.
        pairs: usize,
        /// Where the rows are columns of the source, whose numbers are floats.
        columns: Option<Columns>,
        /// Which row of the one part each row is; `None`: they keep their order.
        rows: Option<Vec<usize>>,
        /// Which number of its row each number is; `None`: they keep their order.
        cols: Option<Vec<usize>>,
    },
    /// Computed, or of a file beside the model's. In f32.
    Values(Vec<f32>),
}

/// Columns of parts that become rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Columns {
    /// Numbers of a row of the source.
    pub(super) width: usize,
    /// The first column.
    pub(super) first: usize,
    /// From a column to the next.
    pub(super) step: usize,
}

/// Rows of a tensor of the source.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Part {
    /// Name of the tensor.
    pub(super) name: String,
    /// The first row. Where columns become rows, one of the source.
    pub(super) first: usize,
}

impl Part {
    /// All rows of a tensor.
    pub(super) fn whole(name: &str) -> Self {
        Part {
            name: name.to_owned(),
            first: 0,
        }
    }
}

impl Item {
    /// A tensor of the source, whose rows go from halves to pairs in so many heads.
    pub(super) fn of_tensor(name: String, info: &TensorInfo, pairs: usize) -> Self {
        Self {
            name,
            shape: info.shape.clone(),
            from: From::Rows {
                parts: vec![Part::whole(&info.name)],
                ty: number_type(info.dtype),
                pairs,
                columns: None,
                rows: None,
                cols: None,
            },
        }
    }

    /// The same matrix with rows for columns.
    pub(super) fn transposed(mut self) -> Self {
        let width = self.shape.last().copied().unwrap_or(1);
        self.shape.reverse();
        if let From::Rows { columns, .. } = &mut self.from {
            *columns = Some(Columns {
                width,
                first: 0,
                step: 1,
            });
        }
        self
    }

    /// A vector that is computed.
    pub(super) fn of_values(name: String, values: Vec<f32>) -> Self {
        Self {
            name,
            shape: vec![values.len()],
            from: From::Values(values),
        }
    }

    /// The tensors that its rows come from.
    pub(super) fn sources(&self) -> impl Iterator<Item = &str> {
        let parts = match &self.from {
            From::Rows { parts, .. } => parts.as_slice(),
            From::Values(_) => &[],
        };
        parts.iter().map(|part| &*part.name)
    }
}

/// The type of numbers that can be quantised, if the tensor has such.
pub(super) fn number_type(dtype: TensorDtype) -> Option<GgufQuantType> {
    match dtype {
        TensorDtype::Plain(Dtype::F32) => Some(GgufQuantType::F32),
        TensorDtype::Plain(Dtype::F16) => Some(GgufQuantType::F16),
        TensorDtype::Plain(Dtype::BF16) => Some(GgufQuantType::BF16),
        TensorDtype::Plain(Dtype::F64) => Some(GgufQuantType::F64),
        TensorDtype::Quant(ty) => Some(ty),
        _ => None,
    }
}
