//! Products of up to eight rows of 16 bits with quantised weights, and of pairs with quantised experts: the kernels of
//! `kernels/quant_gemv.cuh`, which stream the weight through shared memory.

use super::compiler::KernelFile;
use super::context::{Arg, CudaContext};
use super::pack::{Format, PackedSlab, TILE_GROUPS, TILE_ROWS};
use super::quant_kernels::{kernels, reordered, weight_args};
use super::quant_weight::QuantSlab;
use super::role::CudaAct;
use super::tile;
use super::tile_operands::{Pairs, TileOut, TileRows};
use crate::backend::MoeShape;
use crate::backend::check::elements;
use ferrum_types::Result;

/// Rows that a product may have.
pub(super) const MAX_ROWS: usize = 8;

// The sizes of `quant_gemv.cuh`.
const WARPS: usize = 8;
const MAX_STAGES: usize = 3;
const MIN_STAGES: usize = 2;
const LOOKUP_BYTES: usize = 256 * 32 * 4;

/// Blocks that share a processor, at most. They leave room for a block of the kernel behind, which asks for its weights before this
/// one has ended.
const BLOCKS: usize = 2;

/// Shared memory of a block whose rings have so many stages, for one row of x or for more.
fn shared_bytes(format: Format, rows: usize, stages: usize) -> usize {
    let halves = if matches!(format.bits, 2 | 3 | 6) {
        2
    } else {
        1
    };
    let factors = TILE_GROUPS * halves * (TILE_ROWS + 2) * 8;
    let sums = 2 * TILE_ROWS * if rows > 1 { MAX_ROWS } else { 1 } * 4;
    let lookup = if format.table > 0 { LOOKUP_BYTES } else { 0 };
    lookup + WARPS * (stages * format.tile_bytes() + factors + sums)
}

/// Warps that share a row of `k_tiles` tiles, of which a block makes several at once where k is short. Each of the block's threads writes a
/// sum at most.
fn warps_along(k_tiles: usize, rows: usize) -> usize {
    let least = if rows > 1 { WARPS / 2 } else { 1 };
    k_tiles.next_power_of_two().clamp(least, WARPS)
}

/// The room of a format's kernel.
struct Room {
    /// Of a block.
    shared: usize,
    stages: usize,
    /// Blocks that run at once.
    blocks: usize,
}

impl Room {
    /// That for one row of x, or for more, with as many bytes of shared memory `beside` what tiles take. More blocks on a processor are
    /// better than more stages.
    fn of<A: CudaAct>(ctx: &CudaContext<A>, format: Format, rows: usize, beside: usize) -> Self {
        let shared = |stages| shared_bytes(format, rows, stages) + beside;
        // Each block takes 1 KiB more for itself.
        let processor = ctx.shared().processor_shared;
        let fit = |stages| processor / (shared(stages) + (1 << 10));
        let stages = match fit(MAX_STAGES) >= BLOCKS {
            true => MAX_STAGES,
            false => MIN_STAGES,
        };
        Self {
            shared: shared(stages),
            stages,
            blocks: fit(stages).clamp(1, BLOCKS) * ctx.shared().multiprocessors,
        }
    }

    /// Blocks, threads and shared memory where there is work for so many blocks.
    fn grid(&self, blocks: usize) -> (usize, u32, usize) {
        (blocks.min(self.blocks), 32 * WARPS as u32, self.shared)
    }
}

/// A launch of a format's kernel.
struct Launch {
    /// Blocks, threads and shared memory.
    grid: (usize, u32, usize),
    stages: usize,
    /// Warps that share a row of tiles.
    along: usize,
}

impl Launch {
    /// That of so many rows of tiles for one row of x, or for more, with what is `beside` in the [`Room`].
    fn of<A: CudaAct>(
        ctx: &CudaContext<A>,
        format: Format,
        (row_tiles, k_tiles, rows): (usize, usize, usize),
        beside: usize,
    ) -> Self {
        let room = Room::of(ctx, format, rows, beside);
        // A block makes several rows of tiles only where all blocks have some.
        let mut along = warps_along(k_tiles, rows);
        while along < WARPS && row_tiles * along < room.blocks * WARPS {
            along *= 2;
        }
        Self {
            grid: room.grid(row_tiles.div_ceil(WARPS / along)),
            stages: room.stages,
            along,
        }
    }
}

/// The rows of x with a slab.
pub(super) fn product<A: CudaAct>(
    ctx: &mut CudaContext<A>,
    op: &'static str,
    x: TileRows,
    slab: &PackedSlab,
    out: TileOut,
) -> Result<()> {
    if x.rows == 0 {
        return Ok(());
    }
    let tiles = (out.columns.div_ceil(TILE_ROWS), slab.groups / TILE_GROUPS);
    let launch = Launch::of(ctx, slab.format, (tiles.0, tiles.1, x.rows), 0);
    let mut args = [Arg::At(0); 17];
    args[..2].copy_from_slice(&[Arg::At(out.at), out.is_f32.into()]);
    let rows = reordered(ctx, op, (x, None), Some(slab))?;
    args[2..4].copy_from_slice(&[Arg::At(rows.at), Arg::Int(rows.stride)]);
    args[4..10].copy_from_slice(&weight_args(slab));
    args[10..].copy_from_slice(&[
        Arg::Int(x.rows),
        Arg::Int(slab.groups),
        Arg::Int(out.columns),
        Arg::Long(out.first),
        Arg::Long(out.n),
        Arg::Int(launch.stages),
        Arg::Int(launch.along),
    ]);
    let gemv = kernels(slab.format).gemv;
    let kernel = if x.rows > 1 { gemv.eight } else { gemv.one };
    ctx.launch(op, (KernelFile::QuantGemv, kernel), launch.grid, args)
}

/// The same with gate and up, `columns` of each, whose activation is `kind`, as [`Epilogue`](super::tile::Epilogue) has it. False, and
/// nothing is done, where up begins within a row of tiles.
pub(super) fn gated<A: CudaAct>(
    ctx: &mut CudaContext<A>,
    op: &'static str,
    x: TileRows,
    slab: &PackedSlab,
    (kind, out, columns): (usize, u64, usize),
) -> Result<bool> {
    if !columns.is_multiple_of(TILE_ROWS) {
        return Ok(false);
    }
    let tiles = (columns / TILE_ROWS, slab.groups / TILE_GROUPS);
    let launch = Launch::of(ctx, slab.format, (tiles.0, tiles.1, x.rows), 0);
    let of_gate = elements(op, &[tiles.0, tiles.1, slab.format.tile_bytes()])?;
    let mut args = [Arg::At(out); 16];
    let rows = reordered(ctx, op, (x, None), Some(slab))?;
    args[1..3].copy_from_slice(&[Arg::At(rows.at), Arg::Int(rows.stride)]);
    args[3..9].copy_from_slice(&weight_args(slab));
    args[9..].copy_from_slice(&[
        Arg::Int(x.rows),
        Arg::Int(slab.groups),
        Arg::Int(columns),
        Arg::At(slab.at() + of_gate as u64),
        Arg::Int(kind),
        Arg::Int(launch.stages),
        Arg::Int(launch.along),
    ]);
    let [one, eight] = kernels(slab.format).gemv.dense_gated;
    let kernel = if x.rows > 1 { eight } else { one };
    ctx.launch(op, (KernelFile::QuantGemvGated, kernel), launch.grid, args)?;
    Ok(true)
}

/// Pairs of tokens and experts.
#[derive(Clone, Copy)]
pub(super) struct GemvPairs {
    pub(super) of: Pairs,
    /// Where the pairs of each expert begin, if up to [`MAX_ROWS`] of them are one product: a group. Else each is one.
    pub(super) offsets: Option<Arg>,
    /// Rows of an expert's matrix, which are the columns of the output.
    pub(super) n: usize,
}

/// `PAIR_PARAMS` of `kernels/quant_pairs.cuh`.
const PAIR_ARGS: usize = 22;

/// Bytes of a group in shared memory.
const GROUP_BYTES: usize = 8;

/// Groups of so many pairs, at most: each expert that has pairs has at most one that is not full.
fn most_groups(pairs: usize, experts: usize) -> usize {
    pairs / MAX_ROWS + experts.min(pairs)
}

/// Whether the pairs of so many tokens are products by groups: where some experts are likely to have several, and not so many that tiles
/// unpack a weight for fewer instructions.
pub(super) fn takes_groups<A: CudaAct>(
    ctx: &CudaContext<A>,
    slab: &QuantSlab,
    tokens: usize,
    (pairs, experts): (usize, usize),
) -> bool {
    let QuantSlab::Packed(slab) = slab else {
        return false;
    };
    let several = tokens > 1 && 2 * pairs >= experts && pairs <= MAX_ROWS * experts;
    let groups = most_groups(pairs, experts) * GROUP_BYTES;
    let shared = shared_bytes(slab.format, MAX_ROWS, MIN_STAGES) + groups;
    let fits = shared <= ctx.shared().max_shared;
    tile::is_for::<A>() && several && fits && !ctx.backend.batch_invariant()
}

impl GemvPairs {
    /// Products, and rows of x of each.
    fn products(&self) -> (usize, usize) {
        match self.offsets {
            Some(_) => (most_groups(self.of.pairs, self.of.experts), MAX_ROWS),
            None => (self.of.pairs, 1),
        }
    }

    /// Rows of tiles of a product, at most: an expert may begin and end within one.
    fn row_tiles(&self) -> usize {
        match self.n.is_multiple_of(TILE_ROWS) {
            true => self.n / TILE_ROWS,
            false => (self.n + 2 * (TILE_ROWS - 1)) / TILE_ROWS,
        }
    }

    /// The launch, and the parameters that all kernels of pairs have.
    fn launch<A: CudaAct>(
        &self,
        ctx: &mut CudaContext<A>,
        op: &'static str,
        x: TileRows,
        (slab, bias): (&PackedSlab, Arg),
        out: u64,
    ) -> Result<(Launch, [Arg; PAIR_ARGS])> {
        let (products, rows_of_x) = self.products();
        let row_tiles = elements(op, &[products, self.row_tiles()])?;
        let (k_tiles, format) = (slab.groups / TILE_GROUPS, slab.format);
        let beside = self.offsets.map_or(0, |_| products * GROUP_BYTES);
        let launch = Launch::of(ctx, format, (row_tiles, k_tiles, rows_of_x), beside);
        // Groups lie behind all else in shared memory.
        let groups_at = shared_bytes(format, rows_of_x, launch.stages);
        let mut args = [Arg::At(out); PAIR_ARGS];
        let rows = reordered(ctx, op, (x, Some(&self.of)), Some(slab))?;
        args[1..3].copy_from_slice(&[Arg::At(rows.at), Arg::Int(rows.stride)]);
        args[3..9].copy_from_slice(&weight_args(slab));
        args[9..].copy_from_slice(&[
            self.of.expert_ids,
            self.offsets.unwrap_or(Arg::At(0)),
            self.of.ids,
            Arg::Int(self.of.pairs),
            Arg::Int(groups_at),
            Arg::Int(slab.groups),
            Arg::Int(self.n),
            Arg::Int(self.of.experts),
            Arg::Int(rows.pairs_per_row),
            Arg::Int(self.row_tiles()),
            Arg::Int(launch.stages),
            Arg::Int(launch.along),
            bias,
        ]);
        Ok((launch, args))
    }
}

/// Pairs with the matrices of their experts, and the bias of each that is not null.
pub(super) fn pairs<A: CudaAct>(
    ctx: &mut CudaContext<A>,
    op: &'static str,
    x: TileRows,
    of: GemvPairs,
    (slab, bias): (&PackedSlab, Arg),
    out: u64,
) -> Result<()> {
    let (launch, args) = of.launch(ctx, op, x, (slab, bias), out)?;
    let gemv = kernels(slab.format).gemv;
    let kernel = match of.offsets {
        Some(_) => (KernelFile::QuantGroups, gemv.groups),
        None => (KernelFile::QuantPairs, gemv.pairs),
    };
    ctx.launch(op, kernel, launch.grid, args)
}

/// Whether [`gated_pairs`] takes these two: matrices of one format that read x in one order.
pub(super) fn takes_gated(gate: &PackedSlab, up: &PackedSlab) -> bool {
    gate.order == up.order && gate.format == up.format && gate.groups == up.groups
}

/// The same with two matrices, gate and up, whose sums become one number by `activation`: its kind, as
/// [`Epilogue`](super::tile::Epilogue) has it, alpha and limit.
pub(super) fn gated_pairs<A: CudaAct>(
    ctx: &mut CudaContext<A>,
    op: &'static str,
    x: TileRows,
    of: GemvPairs,
    [gate, up]: [(&PackedSlab, Arg); 2],
    (activation, out): ((usize, f32, f32), u64),
) -> Result<()> {
    let (launch, common) = of.launch(ctx, op, x, gate, out)?;
    let mut args = [Arg::At(0); PAIR_ARGS + 5];
    args[..PAIR_ARGS].copy_from_slice(&common);
    let (kind, alpha, limit) = activation;
    args[PAIR_ARGS..].copy_from_slice(&[
        Arg::At(up.0.at()),
        up.1,
        Arg::Int(kind),
        Arg::Float(alpha),
        Arg::Float(limit),
    ]);
    let gemv = kernels(gate.0.format).gemv;
    let kernel = match of.offsets {
        Some(_) => (KernelFile::QuantGroups, gemv.gated_groups),
        None => (KernelFile::QuantPairs, gemv.gated),
    };
    ctx.launch(op, kernel, launch.grid, args)
}

/// Whether [`weighted_sums`] takes so many tokens: few of them, each of whose experts has whole rows of tiles.
pub(super) fn takes_weighted_sums<A: CudaAct>(
    ctx: &CudaContext<A>,
    slab: &QuantSlab,
    shape: MoeShape,
) -> bool {
    let (pairs, experts) = (shape.tokens * shape.top_k, shape.experts.experts);
    let whole = shape.experts.n.is_multiple_of(TILE_ROWS);
    let tiled = tile::takes_pairs(ctx, pairs, experts);
    tile::is_for::<A>()
        && whole
        && !tiled
        && !takes_groups(ctx, slab, shape.tokens, (pairs, experts))
}

/// The weighted sums of a token's pairs, each a row of x with the matrix of its expert and its bias, or null: to `out`, or added to
/// what is there.
pub(super) fn weighted_sums<A: CudaAct>(
    ctx: &mut CudaContext<A>,
    op: &'static str,
    (x, of, weights): (TileRows, Pairs, Arg),
    (slab, bias): (&PackedSlab, Arg),
    (out, adds): (u64, bool),
    shape: MoeShape,
) -> Result<()> {
    let row_tiles = elements(op, &[shape.tokens, shape.experts.n / TILE_ROWS])?;
    let room = Room::of(ctx, slab.format, 1, 0);
    let mut args = [Arg::At(out); 19];
    let rows = reordered(ctx, op, (x, Some(&of)), Some(slab))?;
    args[1..3].copy_from_slice(&[Arg::At(rows.at), Arg::Int(rows.stride)]);
    args[3..9].copy_from_slice(&weight_args(slab));
    args[9..].copy_from_slice(&[
        of.expert_ids,
        weights,
        bias,
        Arg::Int(shape.tokens),
        Arg::Int(shape.top_k),
        Arg::Int(slab.groups),
        Arg::Int(shape.experts.n),
        Arg::Int(of.experts),
        adds.into(),
        Arg::Int(room.stages),
    ]);
    let kernel = (KernelFile::QuantDown, kernels(slab.format).gemv.down);
    ctx.launch(op, kernel, room.grid(row_tiles), args)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrum_types::GgufQuantType;

    /// Each format with its tile's bytes: 128 groups' codes, then scales.
    #[test]
    fn tiles_and_blocks_have_their_sizes() {
        let cases = [
            (GgufQuantType::Q2_K, 1024 + 16 * (8 * 4 + 8)),
            (GgufQuantType::Q3_K, 1024 + 512 + 16 * (8 * 4 + 8)),
            (GgufQuantType::Q4_0, 2048 + 128 * 4),
            (GgufQuantType::Q4_1, 2048 + 128 * 8),
            (GgufQuantType::Q4_K, 2048 + 16 * (8 * 2 + 8)),
            (GgufQuantType::IQ4_XS, 2048 + 16 * (8 * 2 + 8)),
            (GgufQuantType::MXFP4, 2048 + 128 * 4),
            (GgufQuantType::Q5_1, 2048 + 512 + 128 * 8),
            (GgufQuantType::Q5_K, 2048 + 512 + 16 * (8 * 2 + 8)),
            (GgufQuantType::Q6_K, 2048 + 1024 + 16 * (8 * 4 + 8)),
            (GgufQuantType::Q8_0, 4096 + 128 * 4),
        ];
        let mut formats: Vec<_> = cases
            .iter()
            .map(|&(ty, bytes)| {
                let format = Format::of_blocks(ty).expect("it is made of integers");
                assert_eq!(format.tile_bytes(), bytes, "{ty:?}");
                format
            })
            .collect();
        for bits in [2, 3, 4, 8] {
            formats.extend([1, 4].map(|min_groups| Format {
                bits,
                zero: 0,
                table: 0,
                nested: false,
                min_groups,
            }));
        }
        // What a block may ask for where it has 99 KiB, of which 1 KiB is kept for a kernel's own variables.
        let least = 98 << 10;
        for format in formats {
            for rows in [1, MAX_ROWS] {
                let bytes = shared_bytes(format, rows, MIN_STAGES);
                assert!(bytes <= least, "{format:?}, {rows} rows: {bytes}");
            }
        }
    }
}
