//! Weights of quantised checkpoints: group schemes stay integers ([`super::quant::affine`]), FP8 stays
//! bytes ([`super::fp8`]), and what does not fit the panels is dequantised to f32.

use super::exec::Exec;
use super::fp8;
use super::gemm::{self, pack::CpuWeight};
use super::panels::PanelSource;
use super::quant::affine::{self, GroupQuantWeight, fits};
use super::quant::pack::{self, is_packed};
use super::quant::{self, CpuQuantWeight, Part};
use ferrum_quant::fp8_layer::Fp8Tensors;
use ferrum_quant::weights::{GgufRows, QuantWeights};
use ferrum_types::{Error, Result, SrcDtype, WeightPart};

const LOAD: &str = "load_layers";

/// A part that is packed into panels.
pub(super) enum PackSource<'a> {
    Layer(GroupQuantWeight<'a>),
    Blocks(GgufRows<'a>),
    Float8(Fp8Tensors<'a>),
    /// Dequantised: values and rows.
    Values(Vec<f32>, usize),
}

impl<'a> PackSource<'a> {
    pub(super) fn new(weights: &QuantWeights<'a>, cols: usize) -> Result<Self> {
        match weights {
            QuantWeights::Gguf(part) => return Ok(PackSource::Blocks(*part)),
            QuantWeights::Fp8(layer) if fp8::fits(layer) => return Ok(PackSource::Float8(*layer)),
            _ => {}
        }
        let affine = match is_native_layer(weights) {
            true => weights.affine(LOAD)?,
            false => None,
        };
        let dequantized = || {
            Ok(PackSource::Values(
                weights.dequantize(LOAD, cols)?,
                weights.rows(),
            ))
        };
        let Some((affine, codes)) = affine else {
            return dequantized();
        };
        if affine.in_features != cols {
            let found = affine.in_features;
            let reason = format!("a layer has {found} input features, expected {cols}");
            return Err(Error::invalid(LOAD, reason));
        }
        GroupQuantWeight::new(affine, codes)
            .map_or_else(dequantized, |layer| Ok(PackSource::Layer(layer)))
    }

    /// Whether both become one matrix.
    fn is_like(&self, other: &Self) -> bool {
        match (self, other) {
            (PackSource::Layer(a), PackSource::Layer(b)) => a.is_like(b),
            (PackSource::Blocks(_), PackSource::Blocks(_))
            | (PackSource::Float8(_), PackSource::Float8(_))
            | (PackSource::Values(..), PackSource::Values(..)) => true,
            _ => false,
        }
    }
}

/// Whether a layer stays as it is, and is not dequantised to f32.
pub fn is_native_layer(weights: &QuantWeights<'_>) -> bool {
    let (bits, group_of_input) = match weights {
        QuantWeights::Gptq(layer) => (layer.bits, layer.groups_of_inputs()),
        QuantWeights::Awq(layer) => {
            let whole = layer.group_size.is_multiple_of(quant::format::UNIT);
            return whole && layer.validate().is_ok();
        }
        // Scales are kept in f16, which holds those of bf16 and not those of f32.
        QuantWeights::PackQuantized(layer) if layer.scale_dtype == SrcDtype::F32 => return false,
        QuantWeights::PackQuantized(layer) => (layer.bits, layer.groups_of_inputs()),
        QuantWeights::Fp8(layer) => return fp8::fits(layer) && layer.validate().is_ok(),
        QuantWeights::Gguf(part) => {
            return weights.as_dense().is_some() || is_packed(part.ty);
        }
    };
    group_of_input.is_ok_and(|group_of_input| fits(bits, &group_of_input))
}

/// Whether an expert stays as it is: floats that are stored as blocks do not.
pub fn is_native_expert(weights: &QuantWeights<'_>) -> bool {
    match weights {
        QuantWeights::Gguf(part) => is_packed(part.ty),
        layer => is_native_layer(layer),
    }
}

/// Layers of any scheme, one below the other.
///
/// # Errors
/// `InvalidArgument` or `Shape` for layers that do not fit together or are not whole;
/// [`OutOfMemory`](Error::OutOfMemory).
pub fn load(exec: &Exec, parts: &[QuantWeights<'_>], cols: usize) -> Result<CpuQuantWeight> {
    let taken = parts
        .iter()
        .map(|part| PackSource::new(part, cols))
        .collect::<Result<Vec<_>>>()?;
    let mut loaded = Vec::new();
    for run in taken.chunk_by(PackSource::is_like) {
        match run[0] {
            PackSource::Layer(_) => {
                let layers: Vec<_> = run.iter().filter_map(PackSource::layer).collect();
                loaded.push(Part::Packed(GroupQuantWeight::pack(exec, &layers, cols)?));
            }
            PackSource::Blocks(_) => {
                let blocks: Vec<_> = run.iter().filter_map(PackSource::blocks).collect();
                loaded.extend(quant::load_parts(exec, &blocks, cols)?);
            }
            PackSource::Float8(_) => {
                let layers: Vec<_> = run.iter().filter_map(PackSource::float8).collect();
                loaded.push(Part::Dense(fp8::pack(exec, &layers, cols)?));
            }
            PackSource::Values(..) => {
                let values: Vec<_> = run.iter().filter_map(PackSource::values).collect();
                loaded.push(Part::Dense(CpuWeight::pack(exec, &values, cols)?));
            }
        }
    }
    CpuQuantWeight::of_parts(LOAD, loaded, cols)
}

/// Calls `f` with the panels of a weight, before they are made.
pub(super) fn with_panels<T>(
    exec: &Exec,
    weights: &QuantWeights<'_>,
    cols: usize,
    f: impl FnOnce(&dyn PanelSource) -> Result<T>,
) -> Result<T> {
    let taken = PackSource::new(weights, cols)?;
    if let PackSource::Layer(layer) = &taken {
        return f(&*affine::Packing::new(exec, &[layer], cols)?.panels()?);
    }
    if let PackSource::Float8(layer) = taken {
        return f(&fp8::Packing::new(&[layer], cols)?);
    }
    let blocks = taken.blocks();
    if let Some(part) = blocks.filter(|part| is_packed(part.ty)) {
        return f(&*pack::Packing::new(exec, &[part], cols, 1)?.panels()?);
    }
    let part = weights.as_dense().or(taken.values());
    let part = part.ok_or_else(|| Error::invalid(LOAD, "it is dequantised first"))?;
    f(&gemm::pack::Packing::new(exec, &[part], cols, 1)?)
}

impl<'a> PackSource<'a> {
    fn layer(&self) -> Option<&GroupQuantWeight<'a>> {
        match self {
            PackSource::Layer(layer) => Some(layer),
            _ => None,
        }
    }

    fn blocks(&self) -> Option<GgufRows<'a>> {
        match self {
            PackSource::Blocks(part) => Some(*part),
            _ => None,
        }
    }

    fn float8(&self) -> Option<Fp8Tensors<'a>> {
        match self {
            PackSource::Float8(layer) => Some(*layer),
            _ => None,
        }
    }

    fn values(&self) -> Option<WeightPart<'_>> {
        match self {
            PackSource::Values(values, rows) => Some(WeightPart::new(
                bytemuck::cast_slice(values),
                SrcDtype::F32,
                *rows,
            )),
            _ => None,
        }
    }
}
