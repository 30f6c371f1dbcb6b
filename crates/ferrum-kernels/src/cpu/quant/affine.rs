//! Layers of group schemes (GPTQ, AWQ, pack-quantized) into panels, once, at load.
//!
//! `scale · (code − zero)` is kept as `scale · (code − middle) − scale · (zero − middle)`: the middle of
//! the codes is an integer that kernels take off for nothing, and the rest is the minimum of a group,
//! which layers whose zero points are all the middle do without. Input features of a group follow one
//! another; a layer in activation order says in which order activations have to be packed.

use super::format::{Bits, Bytes, Codes, Group, Halfs, Scales, UNIT, block_bytes};
use super::pack::{Flip, Form, OnFormat, Packed, panel_bytes, put_block};
use crate::backend::MatShape;
use crate::cpu::buffer::{CpuBuffer, SharedMut};
use crate::cpu::check::elements;
use crate::cpu::exec::Exec;
use crate::cpu::gemm::tile::PANEL;
use ferrum_quant::affine::{Affine, group_lengths, group_order};
use ferrum_quant::integers::{CodeValues, Integers};
use ferrum_types::{Error, Result};

/// Units of a block whose group is at least as long.
const LONG: usize = 4;

/// Formats of a packed layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GroupForm {
    /// Bits of a code: 2, 3, 4 or 8.
    pub(crate) bits: u32,
    /// Whether [`LONG`] units share a scale, or each has its own.
    pub(crate) long: bool,
    /// Whether zero points are kept, or all are the middle.
    pub(crate) zeros: bool,
}

impl GroupForm {
    /// The middle of the codes.
    fn middle(self) -> u8 {
        1 << (self.bits - 1)
    }

    /// What codes stand for, less the middle.
    pub(super) fn values(self) -> CodeValues {
        match self.bits {
            8 => CodeValues::Signed,
            bits => CodeValues::Unsigned {
                bits,
                zero: self.middle().into(),
            },
        }
    }

    /// Runs `work` with these formats; `None` for bits that are not packed.
    pub(super) fn with<W: OnFormat>(self, work: W) -> Option<W::Output> {
        Some(match (self.bits, self.long, self.zeros) {
            // Rare enough not to have kernels without zero points.
            (2, false, _) => work.run(Bits::<2, 2>, Group::<1, true>),
            (2, true, _) => work.run(Bits::<2, 2>, Group::<LONG, true>),
            (3, false, _) => work.run(Bits::<3, 4>, Group::<1, true>),
            (3, true, _) => work.run(Bits::<3, 4>, Group::<LONG, true>),
            (4, false, false) => work.run(Bits::<4, 8>, Halfs::<false>),
            (4, false, true) => work.run(Bits::<4, 8>, Group::<1, true>),
            (4, true, false) => work.run(Bits::<4, 8>, Group::<LONG, false>),
            (4, true, true) => work.run(Bits::<4, 8>, Group::<LONG, true>),
            (8, false, false) => work.run(Bytes, Halfs::<false>),
            (8, false, true) => work.run(Bytes, Group::<1, true>),
            (8, true, false) => work.run(Bytes, Group::<LONG, false>),
            (8, true, true) => work.run(Bytes, Group::<LONG, true>),
            _ => return None,
        })
    }
}

/// Whether layers of such groups are packed: units must not lie in two groups.
pub(crate) fn fits(bits: u32, of_inputs: &[usize]) -> bool {
    let whole = |&length: &usize| length.is_multiple_of(UNIT);
    matches!(bits, 2 | 3 | 4 | 8) && group_lengths(of_inputs).iter().all(whole)
}

/// A layer that can be packed.
pub(crate) struct Layer {
    affine: Affine,
    form: GroupForm,
    /// Input features in the order in which they are multiplied, where that is another than their own.
    order: Option<Vec<u32>>,
}

impl Layer {
    /// Looks at a layer; `Err` gives back one that [`fits`] not, or whose scales f16 cannot hold.
    pub(crate) fn new(affine: Affine) -> Result<Self, Affine> {
        // f32 scales of a file lose bits in f16; bf16 ones only below 2^-17, and there less than 2^-25.
        let held = |&scale: &f32| {
            let there = half::f16::from_f32(scale).to_f32();
            (there - scale).abs() <= f32::EPSILON / 4.0
        };
        if !fits(affine.bits, &affine.of_inputs) || !affine.scales.iter().all(held) {
            return Err(affine);
        }
        let long = |&length: &usize| length.is_multiple_of(LONG * UNIT);
        let middle = 1 << (affine.bits - 1);
        let form = GroupForm {
            bits: affine.bits,
            long: group_lengths(&affine.of_inputs).iter().all(long),
            zeros: affine.zeros.iter().any(|&zero| zero != middle),
        };
        let order = group_order(&affine.of_inputs);
        Ok(Self {
            affine,
            form,
            order,
        })
    }

    /// Whether both can be packed as one matrix.
    pub(crate) fn is_like(&self, other: &Self) -> bool {
        self.form == other.form && self.order == other.order
    }

    /// Packs layers that are alike, one below the other.
    pub(crate) fn pack(exec: &Exec, layers: &[&Self], cols: usize) -> Result<Packed> {
        let op = "load_layers";
        let Some(first) = layers.first() else {
            return Err(Error::invalid(op, "there is no layer"));
        };
        let rows = layers.iter().map(|layer| layer.affine.out_features);
        let rows = rows.fold(0usize, usize::saturating_add);
        let (form, shape) = (first.form, MatShape { rows, cols });
        let flip = exec.level.run_bytes(Flip);
        let packing = Packing {
            exec,
            layers,
            shape,
            flip,
        };
        let data = form.with(packing);
        let data = data.ok_or_else(|| Error::invalid(op, format!("{form:?} is not packed")))??;
        Ok(Packed {
            shape,
            form: Form::Groups(form),
            flip,
            order: first.order.clone(),
            data: data.into(),
        })
    }

    /// Takes block number `number` of `len` codes of a row apart.
    fn block(&self, row: usize, number: usize, len: usize, out: &mut Integers) {
        let Affine {
            in_features,
            out_features,
            ..
        } = self.affine;
        let codes = &self.affine.codes[row * in_features..][..in_features];
        let flip = if self.form.bits == 8 { 0x80 } else { 0 };
        let start = number * len;
        let input = |i: usize| match &self.order {
            Some(order) => order[start + i] as usize,
            None => start + i,
        };
        for (i, out) in out.codes[..len].iter_mut().enumerate() {
            *out = codes[input(i)] ^ flip;
        }
        let at = self.affine.of_inputs[input(0)] * out_features + row;
        out.d = self.affine.scales[at];
        out.minimums[0] = self.affine.zeros[at].wrapping_sub(self.form.middle());
    }
}

struct Packing<'a> {
    exec: &'a Exec,
    layers: &'a [&'a Layer],
    shape: MatShape,
    flip: u8,
}

impl Packing<'_> {
    /// The layer in which a row lies, and which of its rows that is.
    fn row(&self, mut row: usize) -> Option<(&Layer, usize)> {
        for layer in self.layers {
            if row < layer.affine.out_features {
                return Some((layer, row));
            }
            row -= layer.affine.out_features;
        }
        None
    }
}

impl OnFormat for Packing<'_> {
    type Output = Result<CpuBuffer<u8>>;

    fn run<C: Codes, F: Scales>(self, _: C, _: F) -> Self::Output {
        let MatShape { rows, cols } = self.shape;
        let panels = rows.div_ceil(PANEL);
        let panel = panel_bytes::<C, F>(cols);
        let mut data = CpuBuffer::lasting(elements("load_layers", &[panels, panel])?)?;
        let out = SharedMut::new(data.as_mut_slice());
        self.exec.spread(panels, cols * PANEL, |panels, _| {
            let mut block = Integers::ZERO;
            for p in panels {
                // SAFETY: each panel is packed by one task.
                let out = unsafe { out.part(p * panel, panel) };
                for j in 0..PANEL {
                    let Some((layer, row)) = self.row(p * PANEL + j) else {
                        continue;
                    };
                    let blocks = out.chunks_exact_mut(block_bytes::<C, F>());
                    for (number, out) in blocks.enumerate() {
                        layer.block(row, number, F::UNITS * UNIT, &mut block);
                        put_block::<C, F>(&block, j, self.flip, out);
                    }
                }
            }
        });
        Ok(data)
    }
}
