//! Quantised weights as the kernels take them: tiles of codes and scales, made of any format once, at load.
//!
//! What a tile is says `kernels/packed.cuh`. A [`Source`] is a part of a projection whose numbers are integers with
//! scales; parts of one [`Format`] (and one order of inputs) become one [`PackedSlab`].

use super::context::{CudaContext, PIECE};
use super::memory::Memory;
use super::role::CudaAct;
use crate::backend::{GgufRows, QuantWeights, check};
use ferrum_quant::affine::{GroupParams, PackedCodes, group_order};
use ferrum_quant::unpack::{CodeValues, SUB, UnpackedBlock, code_values, unpack_block};
use ferrum_types::{Error, GgufQuantType, Result};
use twox_hash::XxHash3_128;

/// Numbers of a group, and of what nested scales belong to.
pub(super) const GROUP: usize = 32;
const SUPER: usize = 256;

/// How codes and scales of a slab lie, and what codes stand for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Format {
    /// Bits of a code: 2, 3, 4, 5, 6 or 8.
    pub(super) bits: u32,
    /// Taken off each code.
    pub(super) zero: usize,
    /// 1: those of IQ4, 2: those of MXFP4.
    pub(super) table: usize,
    /// Scales of 16 or 32 numbers below one of 256.
    pub(super) nested: bool,
    /// Groups that share a flat scale with something to add beside it, 1 or 4; 0 where scales have nothing beside them.
    pub(super) min_groups: usize,
}

/// Rows and groups of a tile, whose bytes lie beside each other.
pub(super) const TILE_ROWS: usize = 16;
pub(super) const TILE_GROUPS: usize = 8;

/// Groups that share a flat scale and its minimum where a layer's scales are of as many numbers.
const SHARED: usize = 4;

impl Format {
    /// Of a type of blocks; none where it is not made of integers.
    pub(super) fn of_blocks(ty: GgufQuantType) -> Option<Self> {
        let (bits, zero, table) = match code_values(ty)? {
            CodeValues::Unsigned { bits, zero } => (bits, usize::try_from(zero).ok()?, 0),
            CodeValues::Signed => (8, 0, 0),
            CodeValues::Table(_) if ty == GgufQuantType::MXFP4 => (4, 0, 2),
            CodeValues::Table(_) => (4, 0, 1),
        };
        Some(Self {
            bits,
            zero,
            table,
            nested: ty.block_len() == SUPER,
            min_groups: usize::from(matches!(ty, GgufQuantType::Q4_1 | GgufQuantType::Q5_1)),
        })
    }

    /// Whether a group has one nested scale, not one for each half.
    fn shares_sub(self) -> bool {
        matches!(self.bits, 4 | 5)
    }

    /// Pieces of 16 bytes of a tile's row in the planes of lower and of upper bits. Each is two bytes of a group.
    fn pieces(self) -> [usize; 2] {
        let low = if self.bits < 4 { 4 } else { 8 };
        let high = match self.bits {
            3 | 5 => 2,
            6 => 4,
            8 => 8,
            _ => 0,
        };
        [low, high]
    }

    /// Bytes of the codes of a tile.
    pub(super) fn code_bytes(self) -> usize {
        let [low, high] = self.pieces();
        TILE_ROWS * 16 * (low + high)
    }

    /// Bytes of a group's nested scales.
    fn sub_bytes(self) -> usize {
        match (self.nested, self.shares_sub()) {
            (false, _) => 0,
            (true, true) => 2,
            (true, false) => 4,
        }
    }

    /// Bytes of a tile.
    pub(super) fn tile_bytes(self) -> usize {
        let scales = match (self.nested, self.min_groups) {
            (true, _) => TILE_GROUPS * self.sub_bytes() + 8,
            (false, 0) => TILE_GROUPS * 4,
            (false, shared) => TILE_GROUPS / shared * 8,
        };
        self.code_bytes() + TILE_ROWS * scales
    }
}

/// A part of a projection as integers.
pub(super) enum Source<'a> {
    Blocks(GgufRows<'a>, Format),
    Layer {
        layer: GroupParams,
        format: Format,
        codes: PackedCodes<'a>,
        /// The input features in the order of their groups, where that is another.
        order: Option<Vec<u32>>,
    },
}

impl<'a> Source<'a> {
    /// Of weights that are native; none for a scheme without integers.
    pub(super) fn of(
        op: &'static str,
        weights: &QuantWeights<'a>,
        cols: usize,
    ) -> Result<Option<Self>> {
        if let QuantWeights::Gguf(part) = weights {
            check::check_quant_rows(op, part, cols)?;
            return Ok(Format::of_blocks(part.ty).map(|format| Self::Blocks(*part, format)));
        }
        let Some((layer, codes)) = weights.affine(op)? else {
            return Ok(None);
        };
        if layer.in_features != cols {
            let found = layer.in_features;
            let reason = format!("a layer has {found} input features, expected {cols}");
            return Err(Error::invalid(op, reason));
        }
        let order = group_order(&layer.group_of_input);
        let format = Format {
            bits: layer.bits,
            zero: 0,
            table: 0,
            nested: false,
            min_groups: match fours_share(&layer, order.as_deref()) {
                true => SHARED,
                false => 1,
            },
        };
        Ok(Some(Self::Layer {
            layer,
            format,
            codes,
            order,
        }))
    }

    pub(super) fn format(&self) -> Format {
        match self {
            Self::Blocks(_, format) | Self::Layer { format, .. } => *format,
        }
    }

    fn order(&self) -> Option<&[u32]> {
        match self {
            Self::Blocks(..) => None,
            Self::Layer { order, .. } => order.as_deref(),
        }
    }

    pub(super) fn rows(&self) -> usize {
        match self {
            Self::Blocks(part, _) => part.rows,
            Self::Layer { layer, .. } => layer.out_features,
        }
    }

    /// Whether both can be one slab with such orders of inputs.
    pub(super) fn is_like(&self, other: &Self, orders: Orders) -> bool {
        let in_order = orders == Orders::OfEach || self.order() == other.order();
        self.format() == other.format() && in_order
    }

    /// Writes row `row` to the row of tiles that it is row `at` of.
    fn fill(
        &self,
        op: &'static str,
        row: usize,
        cols: usize,
        to: (&mut [u8], usize),
    ) -> Result<()> {
        let mut to = PackedRow {
            format: self.format(),
            row_tile: to.0,
            row: to.1,
        };
        match self {
            Self::Blocks(part, _) => fill_blocks(op, part, row, cols, &mut to),
            Self::Layer {
                layer,
                codes,
                order,
                ..
            } => {
                fill_layer(layer, codes, order.as_deref(), row, &mut to);
                Ok(())
            }
        }
    }
}

/// A row of a matrix in its row of tiles.
struct PackedRow<'a> {
    format: Format,
    row_tile: &'a mut [u8],
    row: usize,
}

impl PackedRow<'_> {
    /// The scales of the tile that a group is in.
    fn scales(&mut self, group: usize) -> &mut [u8] {
        let tile = self.format.tile_bytes();
        let tile = &mut self.row_tile[group / TILE_GROUPS * tile..][..tile];
        &mut tile[self.format.code_bytes()..]
    }

    /// The scale of a group, or of those that share it, and the minimum that its format has.
    fn scale(&mut self, group: usize, scale: f32, minimum: f32) {
        let Format {
            nested, min_groups, ..
        } = self.format;
        let (row, at) = (self.row, group % TILE_GROUPS);
        let pair: [u8; 8] = bytemuck::cast([scale.to_le_bytes(), minimum.to_le_bytes()]);
        let subs = TILE_ROWS * TILE_GROUPS * self.format.sub_bytes();
        let scales = self.scales(group);
        match (nested, min_groups) {
            (true, _) => scales[subs + 8 * row..][..8].copy_from_slice(&pair),
            (false, 0) => scales[4 * (row * TILE_GROUPS + at)..][..4].copy_from_slice(&pair[..4]),
            (false, shared) => {
                let at = (row * TILE_GROUPS + at) / shared;
                scales[8 * at..][..8].copy_from_slice(&pair);
            }
        }
    }

    /// The nested scales and minimums of a group's halves.
    fn subs(&mut self, group: usize, halves: [[u8; 2]; 2]) {
        let bytes: [u8; 4] = bytemuck::cast(halves);
        let len = self.format.sub_bytes();
        let at = len * (self.row * TILE_GROUPS + group % TILE_GROUPS);
        self.scales(group)[at..][..len].copy_from_slice(&bytes[..len]);
    }

    /// The codes of a group, four to a word.
    fn codes(&mut self, group: usize, codes: &[u8; GROUP]) {
        let (lower, upper) = words_of(self.format.bits, codes);
        let tile = group / TILE_GROUPS * self.format.tile_bytes();
        let [low, high] = self.format.pieces();
        for (start, pieces, words) in [(0, low, lower), (TILE_ROWS * 16 * low, high, upper)] {
            let mut bytes = [0; 16];
            for (to, word) in bytes.as_chunks_mut::<4>().0.iter_mut().zip(words) {
                *to = word.to_le_bytes();
            }
            let at = tile + start + place_in_plane(pieces, self.row, group % TILE_GROUPS);
            let to = &mut self.row_tile[at..][..2 * pieces];
            // A store of a known size, not a call.
            match pieces {
                8 => to.copy_from_slice(&bytes),
                4 => to.copy_from_slice(&bytes[..8]),
                2 => to.copy_from_slice(&bytes[..4]),
                _ => {}
            }
        }
    }
}

/// The words of a group in the planes of lower and of upper bits, for codes of so many bits.
///
/// Loops, since closures on arrays (`map`) stay calls where a crate is compiled in several units: packing took twice as long with them.
#[inline]
fn words_of(bits: u32, codes: &[u8; GROUP]) -> ([u32; 4], [u32; 4]) {
    // As `byte_of` in `kernels/packed.cuh` has them: the two bytes in the middle of a word are exchanged.
    let mut words = [0; GROUP / 4];
    for (to, four) in words.iter_mut().zip(codes.as_chunks::<4>().0) {
        let word = u32::from_le_bytes(*four);
        *to = word & 0xff00_00ff | (word & 0xff00) << 8 | word >> 8 & 0xff00;
    }
    let four_bits = |shift| joined(&words, shift, 0x0f0f_0f0f, 4);
    let two_bits = |shift| {
        let [a, b, c, d] = joined(&words, shift, 0x0303_0303, 2);
        [a | b << 4, c | d << 4, 0, 0]
    };
    let one_bit = |shift| {
        let [a, b, c, d] = joined(&words, shift, 0x0101_0101, 1);
        [a | b << 2 | c << 4 | d << 6, 0, 0, 0]
    };
    match bits {
        2 => (two_bits(0), [0; 4]),
        3 => (two_bits(0), one_bit(2)),
        5 => (four_bits(0), one_bit(4)),
        6 => (four_bits(0), two_bits(4)),
        8 => (four_bits(0), four_bits(4)),
        _ => (four_bits(0), [0; 4]),
    }
}

/// Bits of the words of four numbers, and those of the four that come 16 later behind them.
#[inline]
fn joined(words: &[u32; GROUP / 4], shift: u32, mask: u32, behind: u32) -> [u32; 4] {
    let mut joined = [0; 4];
    for (i, to) in joined.iter_mut().enumerate() {
        *to = words[i] >> shift & mask | (words[4 + i] >> shift & mask) << behind;
    }
    joined
}

/// Where group `group` of a tile's row lies in a plane: `group_offset` of `kernels/packed.cuh`.
fn place_in_plane(pieces: usize, row: usize, group: usize) -> usize {
    let flip = match pieces {
        8 => row % 8,
        4 => row / 2 % 4,
        2 => row / 4 % 2,
        _ => return 0,
    };
    let of_a_piece = 8 / pieces;
    (row * pieces + ((group / of_a_piece) ^ flip)) * 16 + group % of_a_piece * 2 * pieces
}

fn fill_blocks(
    op: &'static str,
    part: &GgufRows<'_>,
    row: usize,
    cols: usize,
    to: &mut PackedRow<'_>,
) -> Result<()> {
    let len = part.ty.block_len();
    let bytes = part.row(row, cols / len * part.ty.block_bytes());
    let mut block = UnpackedBlock::ZERO;
    for (number, bytes) in bytes.chunks_exact(part.ty.block_bytes()).enumerate() {
        let taken = unpack_block(part.ty, bytes, &mut block);
        taken.map_err(|e| Error::invalid(op, e.to_string()))?;
        for (i, codes) in block.codes[..len].as_chunks::<GROUP>().0.iter().enumerate() {
            let group = number * (len / GROUP) + i;
            to.codes(group, codes);
            if to.format.nested {
                let sub = |half: usize| {
                    let at = i * (GROUP / SUB) + half;
                    [block.scales[at].cast_unsigned(), block.minimums[at]]
                };
                to.subs(group, [sub(0), sub(1)]);
            }
        }
        // What nested minimums are taken off with is added where they are flat.
        let minimum = if to.format.nested {
            block.dmin
        } else {
            -block.dmin
        };
        to.scale(number * (len / GROUP), block.d, minimum);
    }
    Ok(())
}

/// Whether each four groups of inputs, in this order, have one scale.
fn fours_share(layer: &GroupParams, order: Option<&[u32]>) -> bool {
    let group = |i: usize| layer.group_of_input[order.map_or(i, |order| order[i] as usize)];
    (0..layer.in_features).all(|i| group(i) == group(i - i % (SHARED * GROUP)))
}

fn fill_layer(
    layer: &GroupParams,
    codes: &PackedCodes<'_>,
    order: Option<&[u32]>,
    row: usize,
    to: &mut PackedRow<'_>,
) {
    // Codes of eight bits are signed bytes to the kernels.
    let (flip, middle) = if layer.bits == 8 {
        (0x80, 128.0)
    } else {
        (0, 0.0)
    };
    for group in 0..layer.in_features.div_ceil(GROUP) {
        let input = |i: usize| order.map_or(i, |order| order[i] as usize);
        let first = group * GROUP;
        let end = layer.in_features.min(first + GROUP);
        let mut of_group = [0; GROUP];
        match order {
            None if end - first == GROUP => of_group = codes.run_of_32(layer, row, first),
            _ => {
                for (i, code) in (first..end).zip(&mut of_group) {
                    *code = codes.code(layer, row, input(i));
                }
            }
        }
        for code in &mut of_group[..end - first] {
            *code ^= flip;
        }
        to.codes(group, &of_group);
        let at = layer.group_of_input[input(first)] * layer.out_features + row;
        let (scale, zero) = (layer.scales[at], f32::from(layer.zeros[at]));
        to.scale(group, scale, scale * (middle - zero));
    }
}

/// How many orders of inputs the parts of a slab have.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Orders {
    /// One, so that a product reads its rows of activations once.
    One,
    /// Each part its own: those of experts, of which a row of activations meets some.
    OfEach,
}

/// Which input comes at which place of a slab's rows, `[k]`, or `[parts, k]` where each part has an order.
pub(super) struct Order {
    memory: Memory,
    /// Of the numbers, so that two slabs can be compared.
    hash: u128,
}

impl Order {
    /// Where the numbers are.
    pub(super) fn at(&self) -> u64 {
        self.memory.at
    }

    /// That of sources that are like each other; none where they take the inputs as they come.
    fn load<A: CudaAct>(
        ctx: &mut CudaContext<A>,
        op: &'static str,
        sources: &[Source<'_>],
        (cols, orders): (usize, Orders),
    ) -> Result<Option<Self>> {
        if sources.iter().all(|source| source.order().is_none()) {
            return Ok(None);
        }
        let (parts, plain) = match orders {
            Orders::One => (&sources[..1], Vec::new()),
            Orders::OfEach => (sources, (0..).take(cols).collect::<Vec<u32>>()),
        };
        let each = parts.iter().map(|part| part.order().unwrap_or(&plain));
        let numbers = each.collect::<Vec<_>>().concat();
        let bytes = bytemuck::cast_slice(&numbers);
        let memory = Memory::new(&ctx.shared().driver, bytes.len())?;
        ctx.upload(op, memory.at, bytes)?;
        let hash = XxHash3_128::oneshot(bytes);
        Ok(Some(Self { memory, hash }))
    }
}

impl PartialEq for Order {
    fn eq(&self, other: &Self) -> bool {
        self.hash == other.hash
    }
}

/// Consecutive rows of one format.
pub(super) struct PackedSlab {
    pub(super) format: Format,
    pub(super) first_row: usize,
    pub(super) rows: usize,
    /// Groups of a row, those behind its numbers included.
    pub(super) groups: usize,
    /// The order of inputs, where that is another than that of the file.
    pub(super) order: Option<Order>,
    memory: Memory,
}

impl PackedSlab {
    /// Where its tiles are.
    pub(super) fn at(&self) -> u64 {
        self.memory.at
    }

    /// Packs sources that are like each other.
    pub(super) fn load<A: CudaAct>(
        ctx: &mut CudaContext<A>,
        op: &'static str,
        sources: &[Source<'_>],
        (first_row, cols): (usize, usize),
        orders: Orders,
    ) -> Result<Self> {
        let format = sources[0].format();
        let rows: usize = sources.iter().map(Source::rows).sum();
        let k_tiles = cols.div_ceil(GROUP * TILE_GROUPS);
        let row_tile_bytes = check::elements(op, &[k_tiles, format.tile_bytes()])?;
        let bytes = check::elements(op, &[rows.div_ceil(TILE_ROWS), row_tile_bytes])?;
        let memory = Memory::new(&ctx.shared().driver, bytes)?;
        let order = Order::load(ctx, op, sources, (cols, orders))?;
        let slab = Self {
            format,
            first_row,
            rows,
            groups: k_tiles * TILE_GROUPS,
            order,
            memory,
        };
        let all: Vec<(&Source<'_>, usize)> = sources
            .iter()
            .flat_map(|source| (0..source.rows()).map(move |row| (source, row)))
            .collect();
        let at_once = (PIECE / row_tile_bytes.max(1)).max(1) * TILE_ROWS;
        let pieces: Vec<_> = all.chunks(at_once).collect();
        let place = |piece: usize| {
            let first = piece * (at_once / TILE_ROWS) * row_tile_bytes;
            let bytes = pieces[piece].len().div_ceil(TILE_ROWS) * row_tile_bytes;
            (slab.memory.at + first as u64, bytes)
        };
        ctx.upload_pieces(op, pieces.len(), place, |piece, staged| {
            pack(op, pieces[piece], cols, row_tile_bytes, staged)
        })?;
        Ok(slab)
    }
}

/// Writes the tiles of some rows; each of their bytes is written.
fn pack(
    op: &'static str,
    rows: &[(&Source<'_>, usize)],
    cols: usize,
    row_tile_bytes: usize,
    row_tiles: &mut [u8],
) -> Result<()> {
    for (rows, row_tile) in rows
        .chunks(TILE_ROWS)
        .zip(row_tiles.chunks_mut(row_tile_bytes))
    {
        // Zeros behind the last row and the last number.
        if rows.len() < TILE_ROWS || !cols.is_multiple_of(GROUP * TILE_GROUPS) {
            row_tile.fill(0);
        }
        for (at, (source, row)) in rows.iter().enumerate() {
            source.fill(op, *row, cols, (row_tile, at))?;
        }
    }
    Ok(())
}
