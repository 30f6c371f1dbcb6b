//! Mixture of experts: routing, products of each pair with its expert's matrices, weighted sums.
//!
//! * `routing`: which experts, and the pairs sorted by expert.
//! * `rows`: the rows of each expert, packed for the kernels of `gemm` and `quant`.
//! * `product`: products of pairs, all experts in one region of the pool.
//! * `down`: products that are summed for each token at once.
//! * `sums`: what the experts of a token gave, added in the order of its pairs.
//!
//! A pair's products are those of its row alone, whichever pairs share its expert: the same bits as if
//! the token had come by itself.

mod down;
mod product;
mod routing;
mod rows;
mod sums;

pub use down::down;
pub use product::{ExpertLinear, gate_up, gemm};
pub use routing::route;
pub use sums::{Pairs, weighted_sum, weighted_sum_norm};

use super::exec::Exec;
use super::fp8;
use super::gemm::pack::CpuWeight;
use super::marlin::{PackSource, is_native_expert};
use super::quant::affine::GroupQuantWeight;
use super::quant::dequantize_stack;
use super::quant::pack::{PackedMatrix, is_packed};
use ferrum_quant::weights::{GgufRows, QuantWeights};
use ferrum_types::check::elements;
use ferrum_types::{Error, ExpertShape, GgufQuantType, MatShape, Result, SrcDtype, WeightPart};

/// A stack of expert matrices of one shape, each in panels of its own.
#[derive(Debug)]
pub struct CpuExperts {
    pub(super) shape: ExpertShape,
    pub(super) matrices: Matrices,
}

/// The matrices of a stack, one for each expert.
#[derive(Debug)]
pub enum Matrices {
    /// Floats, or FP8.
    Dense(Vec<CpuWeight>),
    /// Integers.
    Packed(Vec<PackedMatrix>),
}

impl Matrices {
    /// The order of an expert's inputs, where it is not their own.
    fn order(&self, expert: usize) -> Option<&[u32]> {
        match self {
            Matrices::Dense(_) => None,
            Matrices::Packed(matrices) => matrices[expert].order.as_deref(),
        }
    }
}

impl CpuExperts {
    /// Whether an expert wants its inputs in another order than their own.
    fn is_ordered(&self) -> bool {
        (0..self.shape.experts).any(|expert| self.matrices.order(expert).is_some())
    }
}

impl CpuExperts {
    /// The matrices, all of [`shape`](Self::shape).
    pub fn matrices(&self) -> &Matrices {
        &self.matrices
    }

    /// The sizes.
    #[inline]
    pub fn shape(&self) -> ExpertShape {
        self.shape
    }

    /// Matrices that all have the stack's shape.
    fn of_matrices(shape: ExpertShape, matrices: Matrices) -> Result<Self> {
        let each = MatShape {
            rows: shape.n,
            cols: shape.k,
        };
        let (count, fit) = match &matrices {
            Matrices::Dense(all) => (all.len(), all.iter().all(|m| m.shape == each)),
            Matrices::Packed(all) => (all.len(), all.iter().all(|m| m.shape == each)),
        };
        if count != shape.experts || !fit {
            let reason = format!("{count} matrices make no stack of {shape:?}");
            return Err(Error::invalid("load_experts", reason));
        }
        Ok(Self { shape, matrices })
    }

    /// A stack of floats, a part for each expert.
    ///
    /// # Errors
    /// Of parts that do not make such a stack; [`OutOfMemory`](ferrum_types::Error::OutOfMemory).
    pub fn dense(exec: &Exec, parts: &[WeightPart<'_>], shape: ExpertShape) -> Result<Self> {
        let matrices = CpuWeight::experts(exec, parts, shape.k, parts.len())?;
        Self::of_matrices(shape, Matrices::Dense(matrices))
    }

    /// A stack of ggml blocks, one expert after the other.
    ///
    /// # Errors
    /// As [`dense`](Self::dense).
    pub fn blocks(
        exec: &Exec,
        bytes: &[u8],
        ty: GgufQuantType,
        shape: ExpertShape,
    ) -> Result<Self> {
        let ExpertShape { experts, n, k } = shape;
        let part = |bytes, rows| GgufRows::new(bytes, ty, rows);
        let matrices = if is_packed(ty) {
            let whole = part(bytes, elements("load_quant_experts", &[experts, n])?);
            Matrices::Packed(PackedMatrix::stack(exec, &[whole], k, experts)?)
        } else {
            // Bytes of another length than the stack's make parts that are refused.
            let each = bytes.chunks((bytes.len() / experts).max(1));
            let parts: Vec<_> = each.map(|bytes| part(bytes, n)).collect();
            Matrices::Dense(dequantize_stack(exec, &parts, k, experts)?)
        };
        Self::of_matrices(shape, matrices)
    }

    /// A stack of layers of a quantised checkpoint, one for each expert; in f32 where one does not stay as it is.
    ///
    /// # Errors
    /// As [`dense`](Self::dense).
    pub fn layers(exec: &Exec, experts: &[QuantWeights<'_>], shape: ExpertShape) -> Result<Self> {
        if let Some(matrices) = native_experts(exec, experts, shape.k)? {
            return Self::of_matrices(shape, matrices);
        }
        let values = experts
            .iter()
            .map(|expert| expert.dequantize("load_layer_experts", shape.k));
        let values = values.collect::<Result<Vec<_>>>()?;
        let parts = values
            .iter()
            .map(|values| WeightPart::new(bytemuck::cast_slice(values), SrcDtype::F32, shape.n));
        let parts: Vec<_> = parts.collect();
        Self::dense(exec, &parts, shape)
    }
}

/// Experts that all stay as they are; `None` when one does not, or when integers and FP8 are mixed.
fn native_experts(
    exec: &Exec,
    experts: &[QuantWeights<'_>],
    cols: usize,
) -> Result<Option<Matrices>> {
    let is_float8 = |weights: &QuantWeights<'_>| matches!(weights, QuantWeights::Fp8(_));
    let float8s = experts.iter().filter(|weights| is_float8(weights)).count();
    let mixed = float8s > 0 && float8s < experts.len();
    if mixed || !experts.iter().all(is_native_expert) {
        return Ok(None);
    }
    let (mut packed, mut float8) = (Vec::new(), Vec::new());
    for expert in experts {
        match PackSource::new(expert, cols)? {
            PackSource::Layer(layer) => packed.push(GroupQuantWeight::pack(exec, &[&layer], cols)?),
            PackSource::Blocks(part) => packed.push(PackedMatrix::new(exec, &[part], cols)?),
            PackSource::Float8(layer) => float8.push(fp8::pack(exec, &[layer], cols)?),
            PackSource::Values(..) => return Ok(None),
        }
    }
    Ok(Some(match float8s {
        0 => Matrices::Packed(packed),
        _ => Matrices::Dense(float8),
    }))
}
