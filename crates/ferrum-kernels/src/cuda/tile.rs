//! Products of rows of 16 bits: which kernel makes them, and in how many blocks.
//!
//! A few rows are bound by the bytes of the weight, and a kernel that streams it wins (`gemv.cu`; for quantised weights
//! `quant_gemv.cu`). From [`gemv::MAX_ROWS`] rows on ([`quant_gemv::MAX_ROWS`]), tensor cores make tiles of 16 to 128 rows (`tile.cuh`). All tiles
//! add up k in one order, so they give a row the same bits; a device that promises that takes nothing else, and cuts k by the weight and its number of processors alone. Many rows with a
//! dense weight of their own element go to NVIDIA's library, where it is there (`blas.rs`), and so do yet more with a quantised
//! one, which becomes of that element for it, some of its rows at a time.
//!
//! All of this is for activations of bf16 and f16; those of f32 go through `gemm.cu` and `quant.cu`, which round nothing.

use super::blas;
use super::buffer::CudaBuffer;
use super::compiler::KernelFile;
use super::context::{Arg, CudaContext};
use super::float8::{self, CodeTiles, Float8Slab};
use super::gemv;
use super::pack::{GROUP, PackedSlab, TILE_GROUPS, TILE_ROWS};
use super::quant_gemv;
use super::quant_kernels::{self, WEIGHT_ARGS, weight_args};
use super::quant_weight::QuantSlab;
use super::role::{CudaAct, of_role};
use super::tile_operands::{Arranged, Pairs, TileOut, TileRows};
use super::weight::{Slab, row_stride};
use crate::backend::check::elements;
use crate::backend::{Activation, GeluKind};
use ferrum_types::{Dtype, Error, FloatElement, Result, SrcDtype};
use std::sync::Arc;

/// Rows from which a quantised weight becomes 16 bits for NVIDIA's library. By an H200's figures, writing and reading that takes as
/// long as what tiles lose at about 150 rows; where both take as long has not been measured.
const UNPACKED_ROWS: usize = 256;

/// Threads of a block that unpacks a tile: `UNPACK_WARPS` of `quant.cu`.
const UNPACK_THREADS: u32 = 32 * 4;

/// Most bytes of a weight that are unpacked at once.
const UNPACKED_BYTES: usize = 96 << 20;

/// Most bytes of a device that products by NVIDIA's library take beside their operands.
pub(super) const WORKSPACE: usize = UNPACKED_BYTES + blas::WORKSPACE;

/// The squared difference, as a part of their square, that a row's results may have alone and among others, at most.
pub(super) const ROW_TOLERANCE: f64 = 5e-4;

/// The sizes of a tile: rows, columns, elements of k in a step, and steps in flight.
type Sizes = (usize, usize, usize, usize);
/// Those of `tile.cuh`.
const TILES: [Sizes; 4] = [
    (16, 64, 64, 4),
    (32, 64, 64, 4),
    (64, 64, 64, 4),
    (128, 128, 32, 3),
];
/// Those of `tile_e4m3.cu`; an element is a pair of codes.
const CODE_TILE: Sizes = (128, 64, 64, 3);
const CODE_TILE_OF_GROUP: Sizes = (64, 128, 64, 3);
const THREADS: u32 = 128;
/// Bytes of the ring of packed groups in one step, for each thread.
const RAW_BYTES: usize = 44;
/// The most parts of k.
const MAX_PARTS: usize = 8;

/// The weight of a product.
#[derive(Clone, Copy)]
pub(super) enum TileWeight<'a> {
    /// Rows of floats with the stride of [`row_stride`].
    Dense {
        at: u64,
        dtype: SrcDtype,
    },
    Packed(&'a PackedSlab),
    Float8(&'a Float8Slab),
}

impl<'a> From<&'a Slab> for TileWeight<'a> {
    fn from(slab: &'a Slab) -> Self {
        Self::Dense {
            at: slab.memory.at,
            dtype: slab.dtype,
        }
    }
}

impl<'a> From<&'a QuantSlab> for TileWeight<'a> {
    fn from(slab: &'a QuantSlab) -> Self {
        match slab {
            QuantSlab::Dense(slab) => slab.into(),
            QuantSlab::Packed(slab) => Self::Packed(slab),
            QuantSlab::Float8(slab) => Self::Float8(slab),
        }
    }
}

impl TileWeight<'_> {
    /// The tile by its index in [`TILES`], or what takes its place where both sides of a product of `rows` rows are FP8.
    fn tile<A: CudaAct>(self, ctx: &CudaContext<A>, tile: usize, rows: usize) -> Tile {
        let codes = match self {
            Self::Float8(slab) => slab.of_codes(ctx, rows),
            Self::Dense { .. } | Self::Packed(_) => None,
        };
        let sizes = match codes {
            Some(CodeTiles::Group) => CODE_TILE_OF_GROUP,
            Some(CodeTiles::Warp) if tile == 3 => CODE_TILE,
            Some(CodeTiles::Warp) => TILES[2],
            None => TILES[tile],
        };
        let (file, name) = match (self, codes) {
            (_, Some(CodeTiles::Group)) => (KernelFile::TileE4m3, "tile_e4m3_group"),
            (_, Some(CodeTiles::Warp)) if tile == 3 => (KernelFile::TileE4m3, "tile_e4m3_128"),
            (_, Some(CodeTiles::Warp)) => (KernelFile::TileE4m3, "tile_e4m3_64"),
            _ => {
                let (file, names) = kernels(self);
                (file, names[tile])
            }
        };
        Tile {
            kernel: (file, name),
            sizes,
        }
    }

    fn is_f32(self) -> bool {
        matches!(
            self,
            Self::Dense {
                dtype: SrcDtype::F32,
                ..
            }
        )
    }
}

impl TileRows {
    pub(super) fn of<A: CudaAct>(x: &CudaBuffer<A>, rows: usize, k: usize) -> Self {
        let at = x.at(0);
        Self { at, rows, k }
    }
}

impl TileOut {
    /// Columns `[first, first + columns)` of a buffer for activations, or of f32.
    pub(super) fn of<A: CudaAct, T: FloatElement>(
        op: &'static str,
        out: &mut CudaBuffer<T>,
        (first, columns, n): (usize, usize, usize),
    ) -> Result<Self> {
        of_role::<A, T>(op, ["", ""])?;
        Ok(Self {
            at: out.at(0),
            is_f32: T::DTYPE == Dtype::F32,
            columns,
            first,
            n,
        })
    }
}

/// Rows that are pairs of tokens and experts, by expert.
#[derive(Clone, Copy)]
pub(super) struct TilePairs {
    pub(super) of: Pairs,
    /// Where the pairs of each expert begin.
    pub(super) offsets: Arg,
}

/// Epilogue of a sum before it is written.
#[derive(Clone, Copy)]
pub(super) struct Epilogue {
    /// `[experts, n]`, or null.
    pub(super) bias: Arg,
    /// f32 `[pairs, n]` whose activation is a factor, or null.
    pub(super) gate: Arg,
    /// Which activation: 1 is SiLU, 2 GELU by tanh, 3 the bounded one with `alpha` and `limit`.
    pub(super) activation: usize,
    pub(super) alpha: f32,
    pub(super) limit: f32,
}

impl Epilogue {
    pub(super) const NONE: Self = Self {
        bias: Arg::At(0),
        gate: Arg::At(0),
        activation: 0,
        alpha: 0.0,
        limit: 0.0,
    };
}

/// A kernel and its sizes.
#[derive(Clone, Copy)]
struct Tile {
    kernel: (KernelFile, &'static str),
    sizes: Sizes,
}

/// How a product is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Plan {
    /// Index into [`TILES`].
    tile: usize,
    /// Parts of k, which become one sum afterwards.
    parts: usize,
}

/// Tiles of so many rows and columns.
fn count((rows, columns): (usize, usize), tile: usize) -> usize {
    let (tile_rows, tile_columns, ..) = TILES[tile];
    rows.div_ceil(tile_rows) * columns.div_ceil(tile_columns)
}

/// The plan for rows of one product. Wide tiles read the weight less often; narrow ones, and parts of k, keep all
/// processors busy. Where a row's bits are not to depend on what is beside it, the parts are those of 16 rows for any number.
fn plan(
    (rows, columns, k): (usize, usize, usize),
    is_f32: bool,
    processors: usize,
    invariant: bool,
) -> Plan {
    let count = |tile| count((rows, columns), tile);
    let tile = match rows {
        0..=16 => 0,
        17..=32 => 1,
        33..=64 => 2,
        // Tiles of f32 have one depth, and with it one order of sums.
        _ if 4 * count(3) >= 3 * processors && !is_f32 => 3,
        // A router has so few columns that only narrow tiles are as many as processors, and its k cannot be parted.
        _ if k < 32 * rows => (0..=2)
            .rev()
            .find(|&tile| count(tile) >= processors)
            .unwrap_or(0),
        _ => 2,
    };
    let parts = match invariant {
        true => parts_of_k((TILES[0].0, columns, k), 0, processors),
        false => parts_of_k((rows, columns, k), tile, processors),
    };
    Plan { tile, parts }
}

/// Parts of k with which a processor has as many blocks as it is to have. Each part has four steps at least, and the sums of
/// parts are few bytes beside those of the weight.
fn parts_of_k((rows, columns, k): (usize, usize, usize), tile: usize, processors: usize) -> usize {
    let blocks = [4, 4, 2, 1][tile] * processors;
    let most = (k.div_ceil(TILES[tile].2) / 4)
        .min(k / (16 * rows.max(1)))
        .min(MAX_PARTS);
    (blocks / count((rows, columns), tile).max(1)).clamp(1, most.max(1))
}

/// The tile for pairs of experts, by how many an expert has if all have as many.
fn tile_of_pairs(pairs: usize, experts: usize) -> usize {
    match pairs / experts.max(1) {
        0..=16 => 0,
        17..=32 => 1,
        33..=128 => 2,
        _ => 3,
    }
}

/// Whether products of this backend's activations are made here at all.
pub(super) fn is_for<A: CudaAct>() -> bool {
    A::DTYPE != Dtype::F32
}

/// Whether rows of a product with a weight of FP8 are enough for tiles.
pub(super) fn takes_float8<A: CudaAct>(ctx: &CudaContext<A>, rows: usize) -> bool {
    is_for::<A>() && (rows > gemv::MAX_ROWS || ctx.backend.batch_invariant())
}

/// Whether pairs are so many that tiles read fewer bytes than a kernel that streams a matrix for each pair.
pub(super) fn takes_pairs<A: CudaAct>(ctx: &CudaContext<A>, pairs: usize, experts: usize) -> bool {
    is_for::<A>() && (pairs >= experts.max(gemv::MAX_ROWS + 1) || ctx.backend.batch_invariant())
}

/// A product of the rows of x with one slab.
pub(super) fn product<A: CudaAct>(
    ctx: &mut CudaContext<A>,
    op: &'static str,
    x: TileRows,
    weight: TileWeight<'_>,
    out: TileOut,
) -> Result<()> {
    let invariant = ctx.backend.batch_invariant();
    if x.rows <= gemv::MAX_ROWS
        && !invariant
        && let TileWeight::Dense { at, dtype } = weight
    {
        return gemv::product(ctx, op, x, (at, dtype), out, None);
    }
    if let TileWeight::Dense { at, dtype } = weight
        && dtype == A::WEIGHT
        && blas::takes(x, out)
        && multiplied(ctx, op, x, at, out)?
    {
        return Ok(());
    }
    if let TileWeight::Packed(slab) = weight
        && x.rows <= quant_gemv::MAX_ROWS
        && !invariant
    {
        return quant_gemv::product(ctx, op, x, slab, out);
    }
    if let TileWeight::Packed(slab) = weight
        && x.rows >= UNPACKED_ROWS
        && blas::takes(x, out)
        && unpacked(ctx, op, x, slab, out)?
    {
        return Ok(());
    }
    let processors = ctx.shared().multiprocessors;
    let Plan { tile, parts } = plan(
        (x.rows, out.columns, x.k),
        weight.is_f32(),
        processors,
        invariant,
    );
    // Tiles of codes have 64 rows at least.
    let tile = weight.tile(ctx, tile, x.rows);
    if parts == 1 {
        let row_tiles = x.rows.div_ceil(tile.sizes.0);
        let to = (out, Epilogue::NONE);
        return tiles(ctx, op, (tile, row_tiles, 1), (x, None), weight, to);
    }
    let row_bytes = elements(op, &[parts, out.columns, size_of::<f32>()])?;
    // So many that their sums stay in the second cache, beside the weight.
    let at_once = ctx.shared().second_cache / 2 / row_bytes.max(1) / tile.sizes.0;
    let at_once = at_once.max(1) * tile.sizes.0;
    for first in (0..x.rows).step_by(at_once) {
        let x = TileRows {
            at: x.at + elements(op, &[first, x.k, A::DTYPE.size()])? as u64,
            rows: at_once.min(x.rows - first),
            ..x
        };
        let out = TileOut {
            first: out.first + elements(op, &[first, out.n])?,
            ..out
        };
        in_parts(ctx, op, (tile, parts), x, weight, out)?;
    }
    Ok(())
}

/// A product with gate and up, `columns` of each, which become one number by the activation, where one kernel makes it: of few rows
/// with integers, or with floats of 16 bits. False, and nothing is done, elsewhere.
pub(super) fn gated<A: CudaAct>(
    ctx: &mut CudaContext<A>,
    op: &'static str,
    x: TileRows,
    weight: TileWeight<'_>,
    activation: Activation,
    (out, columns): (u64, usize),
) -> Result<bool> {
    let kind = match activation {
        Activation::Silu => 1,
        Activation::Gelu(GeluKind::Tanh) => 2,
        _ => return Ok(false),
    };
    if !is_for::<A>() || ctx.backend.batch_invariant() || x.rows == 0 || x.k == 0 {
        return Ok(false);
    }
    match weight {
        TileWeight::Packed(slab) if x.rows <= quant_gemv::MAX_ROWS => {
            quant_gemv::gated(ctx, op, x, slab, (kind, out, columns))
        }
        TileWeight::Dense { at, dtype } if x.rows <= gemv::MAX_ROWS && dtype != SrcDtype::F32 => {
            let out = TileOut {
                at: out,
                is_f32: false,
                columns,
                first: 0,
                n: columns,
            };
            gemv::product(ctx, op, x, (at, dtype), out, Some(kind))?;
            Ok(true)
        }
        _ => Ok(false),
    }
}

/// A product whose k is cut into parts, and the sum of these.
fn in_parts<A: CudaAct>(
    ctx: &mut CudaContext<A>,
    op: &'static str,
    (tile, parts): (Tile, usize),
    x: TileRows,
    weight: TileWeight<'_>,
    out: TileOut,
) -> Result<()> {
    let row_tiles = x.rows.div_ceil(tile.sizes.0);
    let total = elements(op, &[x.rows, out.columns])?;
    let sums = TileOut {
        at: ctx.second_scratch(elements(op, &[parts, total, size_of::<f32>()])?)?,
        is_f32: true,
        first: 0,
        n: out.columns,
        ..out
    };
    let to = (sums, Epilogue::NONE);
    tiles(ctx, op, (tile, row_tiles, parts), (x, None), weight, to)?;
    let args = [
        Arg::At(out.at),
        out.is_f32.into(),
        Arg::At(sums.at),
        Arg::Long(total),
        Arg::Int(out.columns),
        Arg::Long(out.first),
        Arg::Long(out.n),
        Arg::Int(parts),
    ];
    ctx.launch_elementwise(op, (KernelFile::TileHalf, "add_parts"), total, args)
}

/// A product by NVIDIA's library; false, and nothing is done, where it makes none.
fn multiplied<A: CudaAct>(
    ctx: &mut CudaContext<A>,
    op: &'static str,
    x: TileRows,
    weight: u64,
    out: TileOut,
) -> Result<bool> {
    let shared = Arc::clone(ctx.shared());
    let Some(blas) = shared.blas() else {
        return Ok(false);
    };
    let Some(workspace) = room_beside(ctx, blas::WORKSPACE)? else {
        return Ok(false);
    };
    blas.product(op, ctx.stream(), x, weight, out, workspace)
}

/// Memory for the library; none where the device has no room for it, as tiles need hardly any.
fn room_beside<A: CudaAct>(ctx: &mut CudaContext<A>, bytes: usize) -> Result<Option<u64>> {
    match ctx.second_scratch(bytes) {
        Err(Error::OutOfMemory { .. }) => Ok(None),
        at => at.map(Some),
    }
}

/// The same with a quantised weight.
fn unpacked<A: CudaAct>(
    ctx: &mut CudaContext<A>,
    op: &'static str,
    x: TileRows,
    slab: &PackedSlab,
    out: TileOut,
) -> Result<bool> {
    let shared = Arc::clone(ctx.shared());
    let Some(blas) = shared.blas() else {
        return Ok(false);
    };
    let rows = arranged(ctx, op, (x, None), TileWeight::Packed(slab))?;
    let x = TileRows { at: rows.at, ..x };
    let row_bytes = elements(op, &[x.k, 2])?;
    let most = (UNPACKED_BYTES / row_bytes / blas::ALIGNED_START).max(1) * blas::ALIGNED_START;
    let most = most.min(out.columns);
    let bytes = elements(op, &[most, row_bytes])?.saturating_add(blas::WORKSPACE);
    let Some(workspace) = room_beside(ctx, bytes)? else {
        return Ok(false);
    };
    let weight = workspace + blas::WORKSPACE as u64;
    let groups = slab.groups;
    let kernel = (
        KernelFile::Quant,
        quant_kernels::kernels(slab.format).unpack,
    );
    for first in (0..out.columns).step_by(most) {
        let columns = most.min(out.columns - first);
        let tiles = elements(op, &[columns.div_ceil(TILE_ROWS), groups / TILE_GROUPS])?;
        let mut args = [Arg::At(weight); 11];
        args[1..7].copy_from_slice(&weight_args(slab));
        args[7..].copy_from_slice(&[
            Arg::Long(first),
            Arg::Int(columns),
            Arg::Int(groups),
            Arg::Int(x.k),
        ]);
        ctx.launch(op, kernel, (tiles, UNPACK_THREADS, 0), args)?;
        let out = TileOut {
            first: out.first + first,
            columns,
            ..out
        };
        if !blas.product(op, ctx.stream(), x, weight, out, workspace)? {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Products of pairs with the matrices of their experts, `out.columns` rows of the weight for each.
pub(super) fn pairs<A: CudaAct>(
    ctx: &mut CudaContext<A>,
    op: &'static str,
    (x, pairs): (TileRows, TilePairs),
    weight: TileWeight<'_>,
    (out, epilogue): (TileOut, Epilogue),
) -> Result<()> {
    let Pairs {
        pairs: count,
        experts,
        ..
    } = pairs.of;
    let mut tile = tile_of_pairs(count, experts);
    if weight.is_f32() {
        tile = tile.min(2);
    }
    let tile = weight.tile(ctx, tile, count / experts.max(1));
    // Each expert that has pairs has at most one tile that is not full.
    let most = count / tile.sizes.0 + experts.min(count);
    tiles(
        ctx,
        op,
        (tile, most, 1),
        (x, Some(pairs)),
        weight,
        (out, epilogue),
    )
}

/// The kernels of a kind of weight by tile.
fn kernels(weight: TileWeight<'_>) -> (KernelFile, [&'static str; 4]) {
    let bf16 = [
        "tile_bf16_16",
        "tile_bf16_32",
        "tile_bf16_64",
        "tile_bf16_128",
    ];
    let f16 = ["tile_f16_16", "tile_f16_32", "tile_f16_64", "tile_f16_128"];
    let packed = [
        "tile_packed_16",
        "tile_packed_32",
        "tile_packed_64",
        "tile_packed_128",
    ];
    let float8 = [
        "tile_float8_16",
        "tile_float8_32",
        "tile_float8_64",
        "tile_float8_128",
    ];
    match weight {
        TileWeight::Float8(_) => (KernelFile::TileFloat8, float8),
        TileWeight::Dense {
            dtype: SrcDtype::BF16,
            ..
        } => (KernelFile::TileHalf, bf16),
        TileWeight::Dense {
            dtype: SrcDtype::F16,
            ..
        } => (KernelFile::TileHalf, f16),
        TileWeight::Dense { .. } | TileWeight::Packed(_) => (KernelFile::TilePacked, packed),
    }
}

/// Launches tiles: which, tiles of rows, parts of k.
fn tiles<A: CudaAct>(
    ctx: &mut CudaContext<A>,
    op: &'static str,
    (tile, row_tiles, parts): (Tile, usize, usize),
    (x, pairs): (TileRows, Option<TilePairs>),
    weight: TileWeight<'_>,
    (out, epilogue): (TileOut, Epilogue),
) -> Result<()> {
    let Tile { kernel, sizes } = tile;
    let (tile_rows, tile_columns, depth, stages) = sizes;
    let stride = row_stride(x.k);
    let of = pairs.as_ref().map(|pairs| &pairs.of);
    let x_rows = match kernel.0 {
        KernelFile::TileE4m3 => float8::quantise(ctx, op, (x, of))?,
        _ => arranged(ctx, op, (x, of), weight)?,
    };
    let blocks = elements(op, &[row_tiles, out.columns.div_ceil(tile_columns), parts])?;
    let x_bytes = tile_rows * depth * 2;
    let w_bytes = tile_columns * depth * 2;
    let shared = match kernel.0 {
        KernelFile::TileHalf | KernelFile::TileE4m3 => stages * (x_bytes + w_bytes),
        _ => stages * (x_bytes + RAW_BYTES * THREADS as usize) + 2 * w_bytes,
    };
    let grid = (blocks, THREADS, shared);
    let (ids, offsets, rows, experts) = match pairs {
        Some(TilePairs { of, offsets }) => (of.ids, offsets, of.pairs, of.experts),
        None => (Arg::At(0), Arg::At(0), x.rows, 0),
    };
    let common = [
        Arg::At(x_rows.at),
        Arg::Int(x_rows.stride),
        Arg::Int(rows),
        Arg::Int(row_tiles),
        Arg::Int(out.columns),
        Arg::Int(parts),
        Arg::At(out.at),
        out.is_f32.into(),
        Arg::Long(out.first),
        Arg::Long(out.n),
        x_rows.row_scales,
        ids,
        offsets,
        Arg::Int(experts),
        Arg::Int(x_rows.pairs_per_row),
        epilogue.bias,
        epilogue.gate,
        Arg::Int(epilogue.activation),
        Arg::Float(epilogue.alpha),
        Arg::Float(epilogue.limit),
    ];
    let (args_of_weight, (bits, groups)) = match weight {
        TileWeight::Dense { at, .. } if kernel.0 == KernelFile::TileHalf => {
            let args = with_weight::<22>(&common, &[Arg::At(at), Arg::Long(stride)]);
            return ctx.launch(op, kernel, grid, args);
        }
        TileWeight::Float8(slab) => {
            let args = with_weight::<25>(&common, &slab.args());
            return ctx.launch(op, kernel, grid, args);
        }
        TileWeight::Packed(slab) => (weight_args(slab), (slab.format.bits as usize, slab.groups)),
        // Rows of f32 are where the kernel looks for tiles.
        TileWeight::Dense { at, .. } => {
            let mut rows = [Arg::Int(0); WEIGHT_ARGS];
            rows[0] = Arg::At(at);
            (rows, (32, x.k.div_ceil(GROUP)))
        }
    };
    let mut args = with_weight::<29>(&common, &args_of_weight);
    args[26..].copy_from_slice(&[Arg::Int(bits), Arg::Int(groups), Arg::Long(stride)]);
    ctx.launch(op, kernel, grid, args)
}

/// The parameters of all tiles, then those of a weight.
fn with_weight<const N: usize>(common: &[Arg], weight: &[Arg]) -> [Arg; N] {
    let mut args = [Arg::At(0); N];
    args[..common.len()].copy_from_slice(common);
    args[common.len()..][..weight.len()].copy_from_slice(weight);
    args
}

/// The rows of x as tiles read them, their stride and the scales of rows that have some: the rows themselves, unless their
/// stride has to change, their elements come in another order, or the weight is of the other 16-bit element.
///
/// Both factors of a product are of one element, so the activations become what the weight is, which loses nothing. Rows of
/// bf16 become f16, each times a power of two; rows of f16 become two of bf16. The weight as the activations are would lose
/// three bits, or what is out of range.
pub(super) fn arranged<A: CudaAct>(
    ctx: &mut CudaContext<A>,
    op: &'static str,
    (x, pairs): (TileRows, Option<&Pairs>),
    weight: TileWeight<'_>,
) -> Result<Arranged> {
    let stride = row_stride(x.k);
    let pairs_per_row = pairs.map_or(1, |of| of.pairs_per_row);
    let bytes = elements(op, &[x.rows, stride, 2])?;
    let sizes = [Arg::Int(x.k), Arg::Int(stride)];
    let grid = (x.rows, 256, 0);
    let other = match weight {
        TileWeight::Dense { dtype, .. } if dtype != A::WEIGHT => Some(dtype),
        _ => None,
    };
    match other {
        Some(SrcDtype::BF16) => {
            let at = ctx.scratch(bytes.saturating_mul(2))?;
            let args = [Arg::At(at), Arg::At(x.at), sizes[0], sizes[1]];
            let kernel = (KernelFile::TileHalf, "arrange_rows_bf16");
            ctx.launch(op, kernel, grid, args)?;
            return Ok(Arranged {
                at,
                stride: 2 * stride,
                row_scales: Arg::At(0),
                pairs_per_row,
            });
        }
        Some(SrcDtype::F16) => {
            let bytes = bytes.next_multiple_of(16);
            let at = ctx.scratch(bytes.saturating_add(elements(op, &[x.rows, 4])?))?;
            let scales = Arg::At(at + bytes as u64);
            let args = [Arg::At(at), scales, Arg::At(x.at), sizes[0], sizes[1]];
            let kernel = (KernelFile::TileHalf, "arrange_rows_f16");
            ctx.launch(op, kernel, grid, args)?;
            return Ok(Arranged {
                at,
                stride,
                row_scales: scales,
                pairs_per_row,
            });
        }
        Some(SrcDtype::F32) | None => {}
    }
    let slab = match weight {
        TileWeight::Packed(slab) => Some(slab),
        TileWeight::Dense { .. } | TileWeight::Float8(_) => None,
    };
    quant_kernels::reordered(ctx, op, (x, pairs), slab)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_choose_tiles_and_parts_of_k() {
        let h100 = 132;
        let cases = [
            // Decoding of a batch: narrow tiles, and parts of k until all processors have blocks.
            ((16, 4096, 4096), false, Plan { tile: 0, parts: 8 }),
            ((16, 151_936, 4096), false, Plan { tile: 0, parts: 1 }),
            ((17, 4096, 4096), false, Plan { tile: 1, parts: 8 }),
            ((64, 4096, 4096), false, Plan { tile: 2, parts: 4 }),
            // Prefill: wide ones as soon as they fill the device.
            ((128, 4096, 4096), false, Plan { tile: 2, parts: 2 }),
            ((512, 4096, 4096), false, Plan { tile: 3, parts: 1 }),
            ((512, 4096, 4096), true, Plan { tile: 2, parts: 1 }),
            // A router.
            ((2048, 128, 2048), true, Plan { tile: 0, parts: 1 }),
            // Too little of k to cut.
            ((8, 64, 96), false, Plan { tile: 0, parts: 1 }),
        ];
        for (sizes, is_f32, expected) in cases {
            let found = plan(sizes, is_f32, h100, false);
            assert_eq!(found, expected, "{sizes:?}, f32 {is_f32}");
        }
    }

    /// Where a row's bits are not to depend on what is beside it, neither do parts.
    #[test]
    fn parts_of_invariant_products_are_those_of_the_weight() {
        let cases = [((4096, 4096), 8), ((28672, 4096), 1), ((6144, 4096), 5)];
        for ((columns, k), parts) in cases {
            for rows in [1, 16, 17, 33, 65, 300, 2048] {
                let found = plan((rows, columns, k), false, 132, true);
                assert_eq!(found.parts, parts, "{rows} × {columns} × {k}");
            }
        }
    }
}
