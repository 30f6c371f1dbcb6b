//! Quantised matrices on the device: which parts become integers, which FP8 and which floats, and loading them.
//!
//! `tile.rs` and `quant.rs` make products with the slabs; nothing here depends on a product.

use super::CudaBackend;
use super::compiler::KernelFile;
use super::context::CudaContext;
use super::float8::{self, Float8Slab};
use super::pack::{Format, GROUP, Orders, PackedSlab, Source};
use super::role::CudaAct;
use super::tile;
use super::weight::{self, Slab};
use crate::backend::{Fp8Weights, MatShape, QuantWeights, WeightPart};
use ferrum_quant::affine::group_lengths;
use ferrum_types::{Result, SrcDtype};

/// A matrix `[rows, cols]` whose slabs are integers, or floats where a part is none.
pub struct CudaQuantWeight {
    pub(super) slabs: Vec<QuantSlab>,
    pub(super) rows: usize,
    cols: usize,
}

/// Consecutive rows of a matrix in one form.
pub(super) enum QuantSlab {
    Packed(PackedSlab),
    Float8(Float8Slab),
    Dense(Slab),
}

/// A part that is kept as it is quantised, until others that become one slab with it are there.
enum Native<'a> {
    Packed(Source<'a>),
    Float8(Fp8Weights<'a>),
}

impl<'a> Native<'a> {
    /// Of a part that has kernels.
    fn of(op: &'static str, part: &QuantWeights<'a>, cols: usize) -> Result<Option<Self>> {
        Ok(match part {
            _ if !is_native_layer(part) => None,
            QuantWeights::Fp8(layer) => Some(Self::Float8(*layer)),
            _ => Source::of(op, part, cols)?.map(Self::Packed),
        })
    }

    /// The files of the kernels that take it.
    fn files<A: CudaAct>(&self, device: &CudaBackend<A>) -> &'static [KernelFile] {
        use KernelFile as File;
        let with_tiles = tile::is_for::<A>();
        match self {
            Self::Packed(_) if with_tiles => &[
                File::Quant,
                File::QuantGemv,
                File::QuantGemvGated,
                File::TilePacked,
            ],
            Self::Packed(_) => &[File::Quant],
            Self::Float8(_) if !with_tiles => &[File::Float8],
            Self::Float8(_) if float8::code_tiles(&device.shared).is_none() => {
                &[File::Float8, File::TileFloat8]
            }
            Self::Float8(_) => &[File::Float8, File::TileFloat8, File::TileE4m3],
        }
    }

    /// Whether both can be one slab with such orders of inputs.
    fn is_like(&self, other: &Self, orders: Orders) -> bool {
        match (self, other) {
            (Self::Packed(a), Self::Packed(b)) => a.is_like(b, orders),
            (Self::Float8(a), Self::Float8(b)) => float8::are_alike(a, b),
            _ => false,
        }
    }
}

impl CudaQuantWeight {
    pub(super) fn shape(&self) -> MatShape {
        MatShape {
            rows: self.rows,
            cols: self.cols,
        }
    }

    /// Loads parts, one after the other, in a context of its own.
    pub(super) fn load<A: CudaAct>(
        device: &CudaBackend<A>,
        op: &'static str,
        parts: &[QuantWeights<'_>],
        cols: usize,
        orders: Orders,
    ) -> Result<Self> {
        let mut ctx = CudaContext::new(device.clone())?;
        let mut loaded = Self {
            slabs: Vec::new(),
            rows: 0,
            cols,
        };
        let mut waiting: Vec<Native<'_>> = Vec::new();
        for part in parts {
            let native = Native::of(op, part, cols)?;
            if let Some(native) = &native {
                device.shared.prepare(native.files(device));
            }
            let joins = match (&native, waiting.first()) {
                (Some(native), Some(first)) => first.is_like(native, orders),
                (_, first) => first.is_none(),
            };
            if !joins {
                loaded.add_native(&mut ctx, op, std::mem::take(&mut waiting), orders)?;
            }
            match native {
                Some(native) => waiting.push(native),
                None => loaded.add_dense(device, op, part)?,
            }
        }
        loaded.add_native(&mut ctx, op, waiting, orders)?;
        ctx.finish(op)?;
        Ok(loaded)
    }

    /// Appends parts that are like each other as one slab.
    fn add_native<A: CudaAct>(
        &mut self,
        ctx: &mut CudaContext<A>,
        op: &'static str,
        parts: Vec<Native<'_>>,
        orders: Orders,
    ) -> Result<()> {
        let (mut sources, mut layers) = (Vec::new(), Vec::new());
        for part in parts {
            match part {
                Native::Packed(source) => sources.push(source),
                Native::Float8(layer) => layers.push(layer),
            }
        }
        let place = (self.rows, self.cols);
        let packed: usize = sources.iter().map(Source::rows).sum();
        if packed > 0 && self.cols > 0 {
            let slab = PackedSlab::load(ctx, op, &sources, place, orders)?;
            self.slabs.push(QuantSlab::Packed(slab));
        }
        self.rows += packed;
        if layers.is_empty() {
            return Ok(());
        }
        let Some(slab) = Float8Slab::load(ctx, op, &layers, place)? else {
            let mut layers = layers.into_iter().map(QuantWeights::Fp8);
            return layers.try_for_each(|layer| self.add_dense(&ctx.backend, op, &layer));
        };
        self.rows += slab.rows;
        self.slabs.push(QuantSlab::Float8(slab));
        Ok(())
    }

    /// Floats as they are, and all else dequantised to f32.
    fn add_dense<A: CudaAct>(
        &mut self,
        device: &CudaBackend<A>,
        op: &'static str,
        part: &QuantWeights<'_>,
    ) -> Result<()> {
        let ctx = CudaContext::new(device.clone())?;
        let dense = match part.as_dense() {
            Some(floats) => weight::load(ctx, op, &[floats], self.cols)?,
            None => {
                let values = part.dequantize(op, self.cols)?;
                let bytes = bytemuck::cast_slice(&values);
                let part = WeightPart::new(bytes, SrcDtype::F32, part.rows());
                weight::load(ctx, op, &[part], self.cols)?
            }
        };
        for slab in dense.slabs {
            let first_row = self.rows + slab.first_row;
            self.slabs
                .push(QuantSlab::Dense(Slab { first_row, ..slab }));
        }
        self.rows += dense.rows;
        Ok(())
    }
}

/// Blocks that are integers, group schemes whose groups are whole runs of 32 numbers, and FP8 whose blocks are so.
pub(super) fn is_native_layer(weights: &QuantWeights<'_>) -> bool {
    let (bits, group_of_input) = match weights {
        QuantWeights::Gguf(part) => return Format::of_blocks(part.ty).is_some(),
        QuantWeights::Fp8(layer) => return float8::is_native(layer) && layer.validate().is_ok(),
        QuantWeights::Awq(layer) => {
            return layer.group_size.is_multiple_of(GROUP) && layer.validate().is_ok();
        }
        QuantWeights::Gptq(layer) => (layer.bits, layer.groups_of_inputs()),
        QuantWeights::PackQuantized(layer) => (layer.bits, layer.groups_of_inputs()),
    };
    let whole = |group_of_input: Vec<usize>| {
        let lengths = group_lengths(&group_of_input);
        lengths.iter().all(|length| length.is_multiple_of(GROUP))
    };
    matches!(bits, 2 | 3 | 4 | 8) && group_of_input.is_ok_and(whole)
}
