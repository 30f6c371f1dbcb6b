//! Quantised weights as the kernels take them: planes of codes and scales, made of any format once, at load.
//!
//! What the planes are says `kernels/quant.cu`. A [`Source`] is a part of a projection whose numbers are integers with
//! scales; parts of one [`Format`] (and one order of inputs) become one [`PackedSlab`].

use super::context::CudaContext;
use super::memory::Memory;
use super::role::CudaAct;
use crate::backend::{GgufRows, QuantWeights, check};
use ferrum_quant::affine::{GroupParams, PackedCodes, group_order};
use ferrum_quant::unpack::{CodeValues, SUB, UnpackedBlock, code_values, unpack_block};
use ferrum_types::{Error, GgufQuantType, Result};

/// Numbers of a group, and of what nested scales belong to.
pub(super) const GROUP: usize = 32;
const SUPER: usize = 256;

/// Numbers that are packed before they go to the device.
const STAGED: usize = 4 << 20;

/// How codes and scales of a slab lie, and what codes stand for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Format {
    /// Bits of a code: 2, 3, 4, 5, 6 or 8.
    pub(super) bits: u32,
    /// Taken off each code.
    pub(super) zero: usize,
    /// 1: those of IQ4, 2: those of MXFP4.
    pub(super) table: usize,
    /// Scales of sixteen numbers below one of 256.
    pub(super) nested: bool,
    /// Whether flat scales have something to add beside them.
    pub(super) has_min: bool,
}

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
            has_min: matches!(ty, GgufQuantType::Q4_1 | GgufQuantType::Q5_1),
        })
    }

    /// Bytes of a group's lower bits, upper bits, and scales of sixteen.
    fn group_bytes(self) -> [usize; 3] {
        let low = if self.bits < 4 { 8 } else { 16 };
        let high = match self.bits {
            3 | 5 => 4,
            6 => 8,
            8 => 16,
            _ => 0,
        };
        [low, high, if self.nested { 4 } else { 0 }]
    }

    /// f32 of scales in a row.
    fn row_scales(self, groups: usize) -> usize {
        match (self.nested, self.has_min) {
            (true, _) => 2 * groups.div_ceil(SUPER / GROUP),
            (false, true) => 2 * groups,
            (false, false) => groups,
        }
    }

    /// Bytes of a row in each of the four planes.
    fn row_bytes(self, groups: usize) -> [usize; 4] {
        let [low, high, subs] = self.group_bytes().map(|bytes| bytes * groups);
        [low, high, subs, 4 * self.row_scales(groups)]
    }
}

/// A part of a projection as integers.
pub(super) enum Source<'a> {
    Blocks(GgufRows<'a>, Format),
    Layer {
        layer: GroupParams,
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
        Ok(Some(Self::Layer {
            layer,
            codes,
            order,
        }))
    }

    pub(super) fn format(&self) -> Format {
        match self {
            Self::Blocks(_, format) => *format,
            Self::Layer { layer, .. } => Format {
                bits: layer.bits,
                zero: 0,
                table: 0,
                nested: false,
                has_min: true,
            },
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

    /// Whether both can be one slab.
    pub(super) fn is_like(&self, other: &Self) -> bool {
        self.format() == other.format() && self.order() == other.order()
    }

    /// Writes a row to its place in the planes.
    fn fill(
        &self,
        op: &'static str,
        row: usize,
        cols: usize,
        planes: [&mut [u8]; 4],
    ) -> Result<()> {
        let [low, high, subs, scales] = planes;
        let mut to = Planes {
            format: self.format(),
            low,
            high,
            subs,
            scales,
        };
        match self {
            Self::Blocks(part, _) => fill_blocks(op, part, row, cols, &mut to),
            Self::Layer {
                layer,
                codes,
                order,
            } => {
                fill_layer(layer, codes, order.as_deref(), row, &mut to);
                Ok(())
            }
        }
    }
}

/// A row that is packed.
struct Planes<'a> {
    format: Format,
    low: &'a mut [u8],
    high: &'a mut [u8],
    subs: &'a mut [u8],
    scales: &'a mut [u8],
}

impl Planes<'_> {
    fn scale(&mut self, index: usize, value: f32) {
        self.scales[4 * index..][..4].copy_from_slice(&value.to_le_bytes());
    }

    /// The codes of group `group`, four to a word.
    fn codes(&mut self, group: usize, codes: &[u8; GROUP]) {
        let [low, high, _] = self.format.group_bytes();
        let bits = self.format.bits;
        let (mut lower, mut upper) = ([0u32; 4], [0u32; 4]);
        for (i, four) in codes.as_chunks::<4>().0.iter().enumerate() {
            let four = u32::from_le_bytes(*four);
            match bits {
                2 | 3 => lower[i / 4] |= (four & 0x0303_0303) << (2 * (i % 4)),
                _ => lower[i / 2] |= (four & 0x0f0f_0f0f) << (4 * (i % 2)),
            }
            match bits {
                3 => upper[0] |= ((four >> 2) & 0x0101_0101) << i,
                5 => upper[0] |= ((four >> 4) & 0x0101_0101) << i,
                6 => upper[i / 4] |= ((four >> 4) & 0x0303_0303) << (2 * (i % 4)),
                8 => upper[i / 2] |= ((four >> 4) & 0x0f0f_0f0f) << (4 * (i % 2)),
                _ => {}
            }
        }
        let bytes = |words: [u32; 4]| -> [u8; 16] { bytemuck::cast(words.map(u32::to_le_bytes)) };
        self.low[group * low..][..low].copy_from_slice(&bytes(lower)[..low]);
        self.high[group * high..][..high].copy_from_slice(&bytes(upper)[..high]);
    }
}

fn fill_blocks(
    op: &'static str,
    part: &GgufRows<'_>,
    row: usize,
    cols: usize,
    to: &mut Planes<'_>,
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
                to.subs[4 * group..][..4].copy_from_slice(&[sub(0), sub(1)].concat());
            }
        }
        match (to.format.nested, to.format.has_min) {
            (true, _) => {
                to.scale(2 * number, block.d);
                to.scale(2 * number + 1, block.dmin);
            }
            (false, true) => {
                to.scale(2 * number, block.d);
                to.scale(2 * number + 1, -block.dmin);
            }
            (false, false) => to.scale(number, block.d),
        }
    }
    Ok(())
}

fn fill_layer(
    layer: &GroupParams,
    codes: &PackedCodes<'_>,
    order: Option<&[u32]>,
    row: usize,
    to: &mut Planes<'_>,
) {
    // Codes of eight bits are signed bytes to the kernels.
    let (flip, middle) = if layer.bits == 8 {
        (0x80, 128.0)
    } else {
        (0, 0.0)
    };
    for group in 0..layer.in_features.div_ceil(GROUP) {
        let input = |i: usize| order.map_or(i, |order| order[i] as usize);
        let mut of_group = [0; GROUP];
        let first = group * GROUP;
        for (i, code) in (first..layer.in_features).zip(&mut of_group) {
            *code = codes.code(layer, row, input(i)) ^ flip;
        }
        to.codes(group, &of_group);
        let at = layer.group_of_input[input(first)] * layer.out_features + row;
        let (scale, zero) = (layer.scales[at], f32::from(layer.zeros[at]));
        to.scale(2 * group, scale);
        to.scale(2 * group + 1, scale * (middle - zero));
    }
}

/// Consecutive rows of one format.
pub(super) struct PackedSlab {
    pub(super) format: Format,
    pub(super) first_row: usize,
    pub(super) rows: usize,
    /// Which input comes at which place, where that is another order.
    pub(super) order: Option<Memory>,
    memory: Memory,
    /// Where each plane begins.
    starts: [u64; 4],
}

impl PackedSlab {
    /// Lower bits, upper bits, scales of sixteen (null where there are none), scales.
    pub(super) fn planes(&self) -> [u64; 4] {
        let [low, high, subs, scales] = self.starts.map(|start| self.memory.at + start);
        [low, high, if self.format.nested { subs } else { 0 }, scales]
    }

    /// Packs sources that are like each other.
    pub(super) fn load<A: CudaAct>(
        ctx: &mut CudaContext<A>,
        op: &'static str,
        sources: &[Source<'_>],
        (first_row, cols): (usize, usize),
    ) -> Result<Self> {
        let format = sources[0].format();
        let rows: usize = sources.iter().map(Source::rows).sum();
        let row_bytes = format.row_bytes(cols.div_ceil(GROUP));
        let (mut starts, mut end) = ([0u64; 4], 0);
        for (start, bytes) in starts.iter_mut().zip(row_bytes) {
            *start = end as u64;
            let plane = check::elements(op, &[rows, bytes])?;
            end = (end + plane).next_multiple_of(256);
        }
        let memory = Memory::new(&ctx.shared().driver, end)?;
        let order = sources[0].order().map(|order| {
            let order_memory = Memory::new(&ctx.shared().driver, 4 * order.len())?;
            ctx.upload(op, order_memory.at, bytemuck::cast_slice(order))?;
            Ok::<_, Error>(order_memory)
        });
        let slab = Self {
            format,
            first_row,
            rows,
            order: order.transpose()?,
            memory,
            starts,
        };
        let all: Vec<(&Source<'_>, usize)> = sources
            .iter()
            .flat_map(|source| (0..source.rows()).map(move |row| (source, row)))
            .collect();
        let at_once = (STAGED / cols.max(1)).max(1);
        for (number, some) in all.chunks(at_once).enumerate() {
            let mut to = [(slab.memory.at, 0); 4];
            for (((at, bytes), start), of_row) in to.iter_mut().zip(slab.starts).zip(row_bytes) {
                *at += start + (number * at_once * of_row) as u64;
                *bytes = some.len() * of_row;
            }
            ctx.upload_with(op, &to, |staged| pack(op, some, cols, row_bytes, staged))?;
        }
        Ok(slab)
    }
}

/// Writes the planes of some rows one after the other, by all threads; each of their bytes is written.
fn pack(
    op: &'static str,
    rows: &[(&Source<'_>, usize)],
    cols: usize,
    row_bytes: [usize; 4],
    planes: &mut [u8],
) -> Result<()> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let share = rows.len().div_ceil(threads).max(1);
    let mut rest = planes;
    let mut planes = row_bytes.map(|bytes| split(&mut rest, bytes * rows.len()));
    std::thread::scope(|scope| {
        let mut jobs = Vec::new();
        for some in rows.chunks(share) {
            let mut mine: [&mut [u8]; 4] = Default::default();
            for ((mine, plane), bytes) in mine.iter_mut().zip(&mut planes).zip(row_bytes) {
                *mine = split(plane, bytes * some.len());
            }
            jobs.push(scope.spawn(move || {
                for (source, row) in some {
                    let mut bytes = row_bytes.into_iter();
                    let of_row = mine
                        .each_mut()
                        .map(|plane| split(plane, bytes.next().unwrap_or_default()));
                    source.fill(op, *row, cols, of_row)?;
                }
                Ok(())
            }));
        }
        let panicked = |_| Error::invalid(op, "a thread that packs weights panicked");
        jobs.into_iter()
            .try_for_each(|job| job.join().map_err(panicked)?)
    })
}

/// Takes the first `len` bytes off a slice.
fn split<'a>(rest: &mut &'a mut [u8], len: usize) -> &'a mut [u8] {
    let (first, behind) = std::mem::take(rest).split_at_mut(len);
    *rest = behind;
    first
}
