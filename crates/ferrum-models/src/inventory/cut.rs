//! How a tensor is cut for ranks that compute one model together.
//!
//! The cut is that of Megatron-LM: a product that widens keeps some of its outputs, the product after it
//! takes the inputs that come of those, and the sum over ranks is the whole. Rows of the vocabulary and
//! whole experts are dealt out. What all ranks need is replicated.

use super::{DecoderTensor, TensorId, TensorPart, TensorRole};
use std::ops::Range;

/// Along what a tensor is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CutAxis {
    /// Not at all: every rank holds it. A bias that is added to a sum over ranks is added once.
    Replicated,
    /// Output features: rows of a matrix, elements of a bias.
    Rows,
    /// Input features: columns of a matrix, whose products are summed over ranks.
    Columns,
    /// Tokens: rows of a table.
    Vocabulary,
    /// Whole experts: matrices of a stack.
    Experts,
}

impl TensorId {
    /// Along what it is cut.
    pub fn cut(self) -> CutAxis {
        match (self.role, self.part) {
            (TensorRole::TokenEmbedding | TensorRole::Output, _) => CutAxis::Vocabulary,
            (TensorRole::Query | TensorRole::Key | TensorRole::Value, _) => CutAxis::Rows,
            (TensorRole::Gate | TensorRole::Up, _) => CutAxis::Rows,
            (TensorRole::AttentionOutput | TensorRole::Down, TensorPart::Weight) => {
                CutAxis::Columns
            }
            (TensorRole::AttentionOutput | TensorRole::Down, TensorPart::Bias) => {
                CutAxis::Replicated
            }
            (TensorRole::ExpertGate | TensorRole::ExpertUp | TensorRole::ExpertDown, _) => {
                CutAxis::Experts
            }
            (
                TensorRole::RopeDivisors
                | TensorRole::AttentionNorm
                | TensorRole::QueryNorm
                | TensorRole::KeyNorm
                | TensorRole::FeedForwardNorm
                // Small, and every rank has to know where each token goes.
                | TensorRole::Router
                | TensorRole::FinalNorm,
                _,
            ) => CutAxis::Replicated,
        }
    }
}

/// What a rank holds of a tensor: all of it but for one dimension.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSlice {
    /// The dimension that is cut, counted from the outermost.
    pub dim: usize,
    /// What of it is held.
    pub range: Range<usize>,
}

impl DecoderTensor {
    /// Along what it is cut.
    pub fn cut(&self) -> CutAxis {
        self.id.cut()
    }

    /// What rank `rank` of `ranks` holds. Rows of the vocabulary may be fewer on the last ranks, all else
    /// is cut into equal parts. Formats of blocks also ask that columns are cut between blocks, which is
    /// for whoever knows the format to see to.
    ///
    /// # Errors
    /// Which tensor has how many of what that do not divide by `ranks`.
    pub fn slice(&self, rank: usize, ranks: usize) -> Result<TensorSlice, String> {
        if rank >= ranks {
            return Err(format!("rank {rank} of {ranks} does not exist"));
        }
        let dims = self.shape.dims();
        let cut = self.cut();
        let dim = match cut {
            CutAxis::Columns => dims.len() - 1,
            CutAxis::Replicated | CutAxis::Rows | CutAxis::Vocabulary | CutAxis::Experts => 0,
        };
        let size = dims[dim];
        let range = match cut {
            CutAxis::Replicated => 0..size,
            CutAxis::Vocabulary => {
                let each = size.div_ceil(ranks);
                (rank * each).min(size)..((rank + 1) * each).min(size)
            }
            CutAxis::Rows | CutAxis::Columns | CutAxis::Experts => {
                let units = size / self.unit.max(1);
                if !units.is_multiple_of(ranks) {
                    let what = match cut {
                        CutAxis::Experts => "experts",
                        _ if self.unit > 1 => "heads",
                        CutAxis::Columns => "columns",
                        _ => "rows",
                    };
                    return Err(format!(
                        "{}: found {units} {what}, expected a multiple of {ranks} for as many ranks",
                        self.id
                    ));
                }
                let each = size / ranks;
                rank * each..(rank + 1) * each
            }
        };
        Ok(TensorSlice { dim, range })
    }
}
