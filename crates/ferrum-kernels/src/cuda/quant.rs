//! Products with quantised weights: ggml blocks, and layers of quantised checkpoints, FP8 (`float8.rs`) among them.
//! `quant_weight.rs` loads them.
//!
//! Activations of 16 bits are multiplied as they are (`tile.rs`). Those of f32 become codes of 8 bits with a scale for each 32 numbers, each row by
//! itself; products are sums of integers, and the f32 sums over groups have one order. So a row has the same bits alone and among many.

use super::CudaBackend;
use super::buffer::CudaBuffer;
use super::compiler::KernelFile;
use super::context::{Arg, CudaContext};
use super::float8::Float8Slab;
use super::gemm::{self, COLUMNS, row_tile};
use super::pack::{Format, Orders};
use super::quant_kernels::{kernels, weight_args};
use super::quant_weight::{CudaQuantWeight, QuantSlab, is_native_layer};
use super::role::{CudaAct, of_role};
use super::tile::{self, TileWeight};
use super::tile_operands::{TileOut, TileRows};
use crate::backend::check::{self, elements};
use crate::backend::*;
use ferrum_types::{Error, FloatElement, GgufQuantType, Result};

/// Rows of activations as codes: where codes, scales and sums are.
#[derive(Clone, Copy)]
struct Codes([Arg; 3]);

/// Makes codes of `x`, in scratch memory.
fn quantise<A: CudaAct>(
    ctx: &mut CudaContext<A>,
    op: &'static str,
    x: &CudaBuffer<A>,
    order: Arg,
    (rows, k, groups): (usize, usize, usize),
) -> Result<Codes> {
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

/// Blocks that a multiprocessor has at once, of kernels that make codes themselves.
const ROW_BLOCKS: usize = 4;

/// Bytes of the codes, sums and scales of a row.
pub(super) fn row_bytes(groups: usize) -> usize {
    32 * groups + groups.div_ceil(2) * 16 + 4 * groups
}

/// Blocks for `columns` columns of each of `rows` rows, so that the device has no more than it runs at once.
pub(super) fn row_blocks<A: CudaAct>(ctx: &CudaContext<A>, columns: usize, rows: usize) -> usize {
    let room = ROW_BLOCKS * ctx.shared().multiprocessors;
    columns.div_ceil(COLUMNS).min((room / rows.max(1)).max(1))
}

/// The columns of one slab of FP8, in an output whose rows have those of all.
fn float8_product<A: CudaAct, T: FloatElement>(
    ctx: &mut CudaContext<A>,
    op: &'static str,
    x: &CudaBuffer<A>,
    slab: &Float8Slab,
    out: &mut CudaBuffer<T>,
    GemmShape { rows, n, k }: GemmShape,
) -> Result<()> {
    if tile::takes_float8(ctx, rows) {
        let out = TileOut::of::<A, T>(op, out, (slab.first_row, slab.rows, n))?;
        let weight = TileWeight::Float8(slab);
        return tile::product(ctx, op, TileRows::of(x, rows, k), weight, out);
    }
    const KERNELS: [[&str; 2]; 3] = [
        ["float8_gemm_1_act", "float8_gemm_1_f32"],
        ["float8_gemm_4_act", "float8_gemm_4_f32"],
        ["float8_gemm_8_act", "float8_gemm_8_f32"],
    ];
    let (kernel, tile) = row_tile(rows);
    let blocks = elements(op, &[slab.rows.div_ceil(COLUMNS), rows.div_ceil(tile)])?;
    let mut args = [Arg::At(0); 12];
    args[..2].copy_from_slice(&[out.into(), x.into()]);
    args[2..7].copy_from_slice(&slab.args());
    args[7..].copy_from_slice(&[
        Arg::Int(rows),
        Arg::Int(k),
        Arg::Int(slab.rows),
        Arg::Long(slab.first_row),
        Arg::Long(n),
    ]);
    let kernel = (KernelFile::Float8, of_role::<A, T>(op, KERNELS[kernel])?);
    ctx.launch(op, kernel, (blocks, 32 * COLUMNS as u32, 0), args)
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
                float8_product(ctx, op, x, slab, out, shape)?;
                continue;
            }
            QuantSlab::Packed(slab) => slab,
        };
        if tile::is_for::<A>() {
            let out = TileOut::of::<A, T>(op, out, (slab.first_row, slab.rows, n))?;
            let weight = TileWeight::Packed(slab);
            tile::product(ctx, op, TileRows::of(x, rows, k), weight, out)?;
            continue;
        }
        let codes = match (&slab.order, plain) {
            (None, Some(codes)) => codes,
            (None, None) => {
                *plain.insert(quantise(ctx, op, x, Arg::At(0), (rows, k, slab.groups))?)
            }
            (Some(order), _) => {
                plain = None;
                quantise(ctx, op, x, Arg::At(order.at()), (rows, k, slab.groups))?
            }
        };
        let (kernel, tile) = row_tile(rows);
        let blocks = elements(op, &[slab.rows.div_ceil(COLUMNS), rows.div_ceil(tile)])?;
        let mut args = [Arg::At(0); 15];
        args[0] = Arg::At(TileOut::of::<A, T>(op, out, (slab.first_row, slab.rows, n))?.at);
        args[1..4].copy_from_slice(&codes.0);
        args[4..10].copy_from_slice(&weight_args(slab));
        args[10..].copy_from_slice(&[
            Arg::Int(rows),
            Arg::Int(slab.groups),
            Arg::Int(slab.rows),
            Arg::Long(slab.first_row),
            Arg::Long(n),
        ]);
        let kernel = (KernelFile::Quant, kernels(slab.format).products[kernel]);
        ctx.launch(op, kernel, (blocks, 32 * COLUMNS as u32, 0), args)?;
    }
    Ok(())
}

/// `out[rows, n / 2] = activation(gate) · up`, by one kernel where there is one.
fn gated<A: CudaAct>(
    ctx: &mut CudaContext<A>,
    op: &'static str,
    x: &CudaBuffer<A>,
    (weight, activation): (&CudaQuantWeight, Activation),
    (room, out): (&mut CudaBuffer<A>, &mut CudaBuffer<A>),
    shape: GemmShape,
) -> Result<()> {
    let halves = check::gemm_gated(op, x, (&*room, &*out), shape)?;
    check::gemm("gemm_quant", x, weight.shape(), room, shape)?;
    let rows = TileRows::of(x, shape.rows, shape.k);
    let to = (out.at(0), halves.dim);
    if let [slab] = &weight.slabs[..]
        && tile::gated(ctx, op, rows, slab.into(), activation, to)?
    {
        return Ok(());
    }
    product(ctx, op, x, weight, room, shape)?;
    CudaBackend::<A>::activate_split(ctx, activation, room, out, halves)
}

impl<A: CudaAct> BackendQuantGguf for CudaBackend<A> {
    type GgufWeight = CudaQuantWeight;

    fn is_native(ty: GgufQuantType) -> bool {
        Format::of_blocks(ty).is_some()
    }

    fn load_quant_fused(&self, parts: &[GgufRows<'_>], cols: usize) -> Result<CudaQuantWeight> {
        let parts: Vec<_> = parts.iter().copied().map(QuantWeights::Gguf).collect();
        CudaQuantWeight::load(self, "load_quant", &parts, cols, Orders::One)
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

    fn gemm_quant_gated(
        ctx: &mut CudaContext<A>,
        x: &CudaBuffer<A>,
        weight: &CudaQuantWeight,
        activation: Activation,
        to: (&mut CudaBuffer<A>, &mut CudaBuffer<A>),
        shape: GemmShape,
    ) -> Result<()> {
        let weight = (weight, activation);
        gated(ctx, "gemm_quant_gated", x, weight, to, shape)
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
            let groups = slab.groups;
            let each = elements(OP, &[shape.rows, groups])?;
            let mut args = [Arg::At(0); 15];
            args[..2].copy_from_slice(&[(&mut *out).into(), ids.into()]);
            args[2..8].copy_from_slice(&weight_args(slab));
            args[8..].copy_from_slice(&[
                Arg::Long(each),
                Arg::Int(groups),
                Arg::Long(shape.dim),
                Arg::Int(slab.first_row),
                Arg::Int(slab.rows),
                Arg::Int(table.rows),
                (i == 0).into(),
            ]);
            let kernel = (KernelFile::Quant, kernels(slab.format).embedding);
            ctx.launch_elementwise(OP, kernel, each, args)?;
        }
        Ok(())
    }
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
        CudaQuantWeight::load(self, "load_layers", parts, cols, Orders::One)
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

    fn gemm_gptq_gated(
        ctx: &mut CudaContext<A>,
        x: &CudaBuffer<A>,
        weight: &CudaQuantWeight,
        activation: Activation,
        to: (&mut CudaBuffer<A>, &mut CudaBuffer<A>),
        shape: GemmShape,
    ) -> Result<()> {
        let weight = (weight, activation);
        gated(ctx, "gemm_gptq_gated", x, weight, to, shape)
    }
}
