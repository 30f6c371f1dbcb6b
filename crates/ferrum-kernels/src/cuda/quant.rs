//! Products with quantised weights: ggml blocks, and layers of quantised checkpoints.
//!
//! Activations become codes of 8 bits with a scale for each 32 numbers, each row by itself; products are sums of integers,
//! and the f32 sums over groups have one order. So a row has the same bits alone and among many. More than a few rows of
//! bf16 are multiplied by tiles instead, for which the weight becomes bf16 as it is loaded, and many by NVIDIA's library (`tile.rs`).

use super::CudaBackend;
use super::buffer::CudaBuffer;
use super::compiler::KernelFile;
use super::context::{Arg, CudaContext};
use super::float8::{self, Float8Slab};
use super::gemm::{self, COLUMNS, row_tile};
use super::pack::{Format, GROUP, PackedSlab, Source};
use super::role::{CudaAct, of_role};
use super::tile::{self, TileWeight};
use super::tile_operands::{TileOut, TileRows};
use super::weight::{self, Slab};
use crate::backend::check::{self, elements};
use crate::backend::*;
use ferrum_quant::affine::group_lengths;
use ferrum_types::{Error, FloatElement, GgufQuantType, Result, SrcDtype};

/// A matrix `[rows, cols]` whose slabs are integers, or floats where a part is none.
pub struct CudaQuantWeight {
    pub(super) slabs: Vec<QuantSlab>,
    rows: usize,
    cols: usize,
}

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

    fn is_like(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Packed(a), Self::Packed(b)) => a.is_like(b),
            (Self::Float8(a), Self::Float8(b)) => float8::are_alike(a, b),
            _ => false,
        }
    }
}

impl CudaQuantWeight {
    fn shape(&self) -> MatShape {
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
            let joins = match (&native, waiting.first()) {
                (Some(native), Some(first)) => first.is_like(native),
                (_, first) => first.is_none(),
            };
            if !joins {
                loaded.add_native(&mut ctx, op, std::mem::take(&mut waiting))?;
            }
            match native {
                Some(native) => waiting.push(native),
                None => loaded.add_dense(device, op, part)?,
            }
        }
        loaded.add_native(&mut ctx, op, waiting)?;
        ctx.finish(op)?;
        Ok(loaded)
    }

    /// Appends parts that are like each other as one slab.
    fn add_native<A: CudaAct>(
        &mut self,
        ctx: &mut CudaContext<A>,
        op: &'static str,
        parts: Vec<Native<'_>>,
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
            let slab = PackedSlab::load(ctx, op, &sources, place)?;
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

    /// Floats as they are, and all else expanded to f32.
    fn add_dense<A: CudaAct>(
        &mut self,
        device: &CudaBackend<A>,
        op: &'static str,
        part: &QuantWeights<'_>,
    ) -> Result<()> {
        let ctx = CudaContext::new(device.clone())?;
        let dense = match part.floats() {
            Some(floats) => weight::load(ctx, op, &[floats], self.cols)?,
            None => {
                let values = part.expand(op, self.cols)?;
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

/// Rows of activations as codes: where codes, scales and sums are.
#[derive(Clone, Copy)]
struct Codes([Arg; 3]);

/// Makes codes of `x`, in scratch memory.
fn quantise<A: CudaAct>(
    ctx: &mut CudaContext<A>,
    op: &'static str,
    x: &CudaBuffer<A>,
    order: Arg,
    (rows, k): (usize, usize),
) -> Result<Codes> {
    let groups = k.div_ceil(32);
    let all = elements(op, &[rows, groups])?;
    // Codes, then a scale and two sums for each group.
    let at = ctx.scratch(elements(op, &[all, 32 + 4 + 8])?)?;
    let codes = Codes([0, 32, 36].map(|bytes| Arg::At(at + (all * bytes) as u64)));
    let [q, scales, sums] = codes.0;
    let (groups, k) = (Arg::Int(groups), Arg::Int(k));
    let args = [q, scales, sums, x.into(), order, Arg::Long(all), groups, k];
    let grid = (all.div_ceil(4), 128, 0);
    ctx.launch(op, (KernelFile::Quant, "quantise_rows"), grid, args)?;
    Ok(codes)
}

/// The kernels of a number of bits.
pub(super) struct Kernels {
    /// Products of one, four and eight rows; of each those that write activations and f32.
    products: [[&'static str; 2]; 3],
    /// Rows of a table.
    embedding: &'static str,
    pub(super) experts: &'static str,
    /// Rows of the weight as bf16.
    pub(super) unpack: &'static str,
}

pub(super) fn kernels(bits: u32) -> Kernels {
    macro_rules! of {
        ($bits:literal) => {
            Kernels {
                products: [of!($bits, "_1"), of!($bits, "_4"), of!($bits, "_8")],
                embedding: concat!("quant_embedding_", $bits),
                experts: concat!("quant_moe_", $bits),
                unpack: concat!("unpack_", $bits),
            }
        };
        ($bits:literal, $rows:literal) => {
            [
                concat!("quant_gemm_", $bits, $rows, "_act"),
                concat!("quant_gemm_", $bits, $rows, "_f32"),
            ]
        };
    }
    match bits {
        2 => of!(2),
        3 => of!(3),
        4 => of!(4),
        5 => of!(5),
        6 => of!(6),
        // Formats have no other numbers of bits.
        _ => of!(8),
    }
}

/// The parameters that all kernels have of a weight.
pub(super) fn weight_args(slab: &PackedSlab) -> [Arg; 7] {
    let Format {
        zero,
        table,
        has_min,
        ..
    } = slab.format;
    let [low, high, subs, d] = slab.planes().map(Arg::At);
    [
        low,
        high,
        subs,
        d,
        Arg::Int(zero),
        has_min.into(),
        Arg::Int(table),
    ]
}

/// Blocks that a multiprocessor has at once, of kernels that make codes themselves.
const ROW_BLOCKS: usize = 4;

/// Bytes of the codes, sums and scales of a row of `k`.
pub(super) fn row_bytes(k: usize) -> usize {
    let groups = k.div_ceil(32);
    32 * groups + groups.div_ceil(2) * 16 + 4 * groups
}

/// Blocks for `columns` columns of each of `rows` rows, so that the device has no more than it runs at once.
pub(super) fn row_blocks<A: CudaAct>(ctx: &CudaContext<A>, columns: usize, rows: usize) -> usize {
    let room = ROW_BLOCKS * ctx.shared().multiprocessors;
    columns.div_ceil(COLUMNS).min((room / rows.max(1)).max(1))
}

/// `out[rows, n] = x[rows, k] · weight[n, k]ᵀ`.
fn product<A: CudaAct, T: FloatElement>(
    ctx: &mut CudaContext<A>,
    op: &'static str,
    x: &CudaBuffer<A>,
    weight: &CudaQuantWeight,
    out: &mut CudaBuffer<T>,
    shape: GemmShape,
) -> Result<()> {
    let lens = check::gemm(op, x, weight.shape(), out, shape)?;
    let GemmShape { rows, n, k } = shape;
    if k == 0 {
        return ctx.stream().zero(op, out.at(0), lens.out * size_of::<T>());
    }
    // Activations in the order of the file, for as many slabs as take them so.
    let mut plain: Option<Codes> = None;
    for slab in &weight.slabs {
        let slab = match slab {
            QuantSlab::Dense(slab) => {
                gemm::slab_product(ctx, op, x, slab, out, shape)?;
                continue;
            }
            QuantSlab::Float8(slab) => {
                float8::product(ctx, op, x, slab, out, shape)?;
                continue;
            }
            QuantSlab::Packed(slab) => slab,
        };
        if tile::takes_rows(ctx, rows) {
            let out = TileOut::of::<A, T>(op, out, (slab.first_row, slab.rows, n))?;
            let weight = TileWeight::Packed(slab);
            tile::product(ctx, op, TileRows::of(x, rows, k), weight, out)?;
            continue;
        }
        let codes = match (&slab.order, plain) {
            (None, Some(codes)) => codes,
            (None, None) => *plain.insert(quantise(ctx, op, x, Arg::At(0), (rows, k))?),
            (Some(order), _) => {
                plain = None;
                quantise(ctx, op, x, Arg::At(order.at), (rows, k))?
            }
        };
        let (kernel, tile) = row_tile(rows);
        let blocks = elements(op, &[slab.rows.div_ceil(COLUMNS), rows.div_ceil(tile)])?;
        let mut args = [Arg::At(0); 16];
        args[0] = (&mut *out).into();
        args[1..4].copy_from_slice(&codes.0);
        args[4..11].copy_from_slice(&weight_args(slab));
        args[11..].copy_from_slice(&[
            Arg::Int(rows),
            Arg::Int(k.div_ceil(32)),
            Arg::Int(slab.rows),
            Arg::Long(slab.first_row),
            Arg::Long(n),
        ]);
        let kernel = kernels(slab.format.bits).products[kernel];
        let kernel = (KernelFile::Quant, of_role::<A, T>(op, kernel)?);
        ctx.launch(op, kernel, (blocks, 32 * COLUMNS as u32, 0), args)?;
    }
    Ok(())
}

impl<A: CudaAct> BackendQuantGguf for CudaBackend<A> {
    type GgufWeight = CudaQuantWeight;

    fn is_native(ty: GgufQuantType) -> bool {
        Format::of_blocks(ty).is_some()
    }

    fn load_quant_fused(&self, parts: &[GgufRows<'_>], cols: usize) -> Result<CudaQuantWeight> {
        let parts: Vec<_> = parts.iter().copied().map(QuantWeights::Gguf).collect();
        CudaQuantWeight::load(self, "load_quant", &parts, cols)
    }

    fn gemm_quant<T: FloatElement>(
        ctx: &mut CudaContext<A>,
        x: &CudaBuffer<A>,
        weight: &CudaQuantWeight,
        out: &mut CudaBuffer<T>,
        shape: GemmShape,
    ) -> Result<()> {
        product(ctx, "gemm_quant", x, weight, out, shape)
    }

    fn embedding_lookup_quant(
        ctx: &mut CudaContext<A>,
        table: &CudaQuantWeight,
        ids: &CudaBuffer<i32>,
        out: &mut CudaBuffer<f32>,
        shape: RowShape,
    ) -> Result<()> {
        const OP: &str = "embedding_lookup_quant";
        let total = check::embedding_lookup(OP, table.shape(), ids, out, shape)?;
        if table.slabs.is_empty() {
            return ctx.stream().zero(OP, out.at(0), total * 4);
        }
        for (i, slab) in table.slabs.iter().enumerate() {
            let slab = match slab {
                QuantSlab::Dense(slab) => {
                    let slab = (slab, table.rows, i == 0);
                    gemm::slab_rows(ctx, OP, slab, ids, out, (shape, total))?;
                    continue;
                }
                QuantSlab::Packed(slab) => slab,
                // Parts of GGUF files become none.
                QuantSlab::Float8(_) => return Err(Error::invalid(OP, "the table is FP8")),
            };
            let groups = shape.dim.div_ceil(32);
            let each = elements(OP, &[shape.rows, groups])?;
            let mut args = [Arg::At(0); 16];
            args[..2].copy_from_slice(&[(&mut *out).into(), ids.into()]);
            args[2..9].copy_from_slice(&weight_args(slab));
            args[9..].copy_from_slice(&[
                Arg::Long(each),
                Arg::Int(groups),
                Arg::Long(shape.dim),
                Arg::Int(slab.first_row),
                Arg::Int(slab.rows),
                Arg::Int(table.rows),
                (i == 0).into(),
            ]);
            let kernel = (KernelFile::Quant, kernels(slab.format.bits).embedding);
            ctx.launch_elementwise(OP, kernel, each, args)?;
        }
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

impl<A: CudaAct> BackendQuantMarlin for CudaBackend<A> {
    type GptqWeight = CudaQuantWeight;

    fn is_native_layer(weights: &QuantWeights<'_>) -> bool {
        is_native_layer(weights)
    }

    fn load_layers_fused(
        &self,
        parts: &[QuantWeights<'_>],
        cols: usize,
    ) -> Result<CudaQuantWeight> {
        CudaQuantWeight::load(self, "load_layers", parts, cols)
    }

    fn gemm_gptq<T: FloatElement>(
        ctx: &mut CudaContext<A>,
        x: &CudaBuffer<A>,
        weight: &CudaQuantWeight,
        out: &mut CudaBuffer<T>,
        shape: GemmShape,
    ) -> Result<()> {
        product(ctx, "gemm_gptq", x, weight, out, shape)
    }
}
