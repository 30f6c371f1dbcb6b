//! Layers of group schemes (GPTQ, AWQ, pack-quantized) into panels, once, at load.
//!
//! `scale · (code − zero)` is kept as `scale · (code − middle) − scale · (zero − middle)`: the middle of
//! the codes is an integer that kernels take off for nothing, and the rest is the minimum of a group,
//! which layers whose zero points are all the middle do without. Input features of a group follow one
//! another; a layer in activation order says in which order activations have to be packed.

use super::blocks::HalfBlock;
use super::codes::{LaneCodes, Row, first_of_run, gathered};
use super::format::{CodeLayout, ScaleLayout, UNIT, block_bytes};
pub use super::groups::GroupQuantWeight;
use super::groups::{GroupFormat, LONG_GROUP_UNITS};
use super::pack::{FormatVisitor, PackedFormat, PackedMatrix, SignFlip, panel_bytes};
use crate::exec::Exec;
use crate::gemm::tile::PANEL;
use crate::isa::{Kernel, Level};
use crate::panels::{PanelSource, first_lanes};
use crate::simd::{LANES, Simd};
use ferrum_quant::affine::{GroupParams, PackedCodes, group_lengths, group_order};
use ferrum_types::{Error, MatShape, Result, SumSplit};
use std::marker::PhantomData;

const OP: &str = "load_layers";

/// Whether layers of such groups are packed: units must not lie in two groups.
pub(crate) fn fits(bits: u32, group_of_input: &[usize]) -> bool {
    let whole = |&length: &usize| length.is_multiple_of(UNIT);
    matches!(bits, 2 | 3 | 4 | 8) && group_lengths(group_of_input).iter().all(whole)
}

impl<'a> GroupQuantWeight<'a> {
    /// Looks at a layer; `None` for one that `fits` not, or whose scales f16 cannot hold.
    pub fn new(affine: GroupParams, codes: PackedCodes<'a>) -> Option<Self> {
        // f32 scales of a file lose bits in f16; bf16 ones only below 2^-17, and there less than 2^-25.
        let held = |&scale: &f32| {
            let there = half::f16::from_f32(scale).to_f32();
            (there - scale).abs() <= f32::EPSILON / 4.0
        };
        if !fits(affine.bits, &affine.group_of_input) || !affine.scales.iter().all(held) {
            return None;
        }
        let long = |&length: &usize| length.is_multiple_of(LONG_GROUP_UNITS * UNIT);
        let middle = 1 << (affine.bits - 1);
        let form = GroupFormat {
            bits: affine.bits,
            long: group_lengths(&affine.group_of_input).iter().all(long),
            zeros: affine.zeros.iter().any(|&zero| zero != middle),
        };
        let order = group_order(&affine.group_of_input);
        Some(Self {
            affine,
            codes,
            form,
            order,
        })
    }

    /// Whether both can be packed as one matrix.
    pub(crate) fn is_like(&self, other: &Self) -> bool {
        self.form == other.form && self.order == other.order
    }

    /// Packs layers that are alike, one below the other.
    pub fn pack(
        exec: &Exec,
        layers: &[&GroupQuantWeight<'_>],
        cols: usize,
    ) -> Result<PackedMatrix> {
        let packing = Packing::new(exec, layers, cols)?;
        let (first, shape, flip) = (packing.first, packing.shape, packing.flip);
        let data = packing.panels()?.packed(OP, exec)?;
        Ok(PackedMatrix {
            shape,
            form: PackedFormat::Groups(first.form),
            flip,
            order: first.order.clone(),
            sums: SumSplit::WHOLE,
            data: data.into(),
        })
    }
}

/// Layers that are packed, one below the other.
#[derive(Clone, Copy)]
pub(crate) struct Packing<'a> {
    layers: &'a [&'a GroupQuantWeight<'a>],
    first: &'a GroupQuantWeight<'a>,
    shape: MatShape,
    /// What the level flips in signed bytes.
    flip: u8,
}

impl<'a> Packing<'a> {
    /// Layers that are alike.
    pub(crate) fn new(
        exec: &Exec,
        layers: &'a [&'a GroupQuantWeight<'a>],
        cols: usize,
    ) -> Result<Self> {
        let Some(first) = layers.first() else {
            return Err(Error::invalid(OP, "there is no layer"));
        };
        let rows = layers.iter().map(|layer| layer.affine.out_features);
        let rows = rows.fold(0usize, usize::saturating_add);
        Ok(Self {
            layers,
            first,
            shape: MatShape { rows, cols },
            flip: exec.level.run_bytes(SignFlip),
        })
    }

    /// The panels of bits that are packed.
    pub(crate) fn panels(self) -> Result<Box<dyn PanelSource + 'a>> {
        let form = self.first.form;
        let panels = form.with(self);
        panels.ok_or_else(|| Error::invalid(OP, format!("{form:?} is not packed")))
    }
}

impl<'a> FormatVisitor for Packing<'a> {
    type Output = Box<dyn PanelSource + 'a>;

    fn run<C: CodeLayout, F: ScaleLayout>(self, _: C, _: F) -> Self::Output {
        Box::new(Source::<C, F> {
            no_codes: vec![0; self.shape.cols],
            packing: self,
            formats: PhantomData,
        })
    }
}

/// Layers of one form.
struct Source<'a, C, F> {
    packing: Packing<'a>,
    /// Codes for features past the last, of at most eight bits.
    no_codes: Vec<u8>,
    formats: PhantomData<(C, F)>,
}

impl<C: CodeLayout, F: ScaleLayout> Source<'_, C, F> {
    /// The layer in which a row lies, and which of its rows that is.
    fn row(&self, mut row: usize) -> Row<'_> {
        for layer in self.packing.layers {
            if row < layer.affine.out_features {
                return Some((layer, row));
            }
            row -= layer.affine.out_features;
        }
        None
    }
}

impl<C: CodeLayout, F: ScaleLayout> PanelSource for Source<'_, C, F> {
    fn count(&self) -> usize {
        self.packing.shape.rows.div_ceil(PANEL)
    }

    fn bytes(&self) -> usize {
        panel_bytes::<C, F>(self.packing.shape.cols)
    }

    fn elements_per_panel(&self) -> usize {
        self.packing.shape.cols * PANEL
    }

    fn panels_per_task(&self) -> usize {
        match self.packing.first.codes {
            PackedCodes::Rows(_) => 1,
            // All of their words are copied at once.
            PackedCodes::Columns(_) if self.packing.first.order.is_some() => 4,
            PackedCodes::Columns(_) | PackedCodes::Interleaved(_) => 16,
        }
    }

    fn pack(&self, level: Level, first: usize, panels: &mut [u8]) {
        let count = panels.len() / self.bytes().max(1);
        let rows: Vec<_> = (0..count * PANEL)
            .map(|j| self.row(first * PANEL + j))
            .collect();
        let mut codes: Vec<_> = rows
            .chunks_exact(LANES)
            .map(|rows| LaneCodes::new(rows, &self.no_codes))
            .collect();
        let runs: Vec<_> = rows.chunks_exact(LANES).map(first_of_run).collect();
        let GroupParams {
            bits, in_features, ..
        } = self.packing.first.affine;
        let lists = match self.packing.first.order {
            Some(_) => gathered(&codes, in_features * bits as usize / 32),
            None => Vec::new(),
        };
        for (codes, list) in codes.iter_mut().zip(&lists) {
            if let LaneCodes::Columns(..) = codes {
                *codes = LaneCodes::Columns(list, LANES);
            }
        }
        level.run(PackPanels::<C, F> {
            first: self.packing.first,
            rows: &rows,
            codes: &codes,
            runs: &runs,
            // Codes of eight bits become signed bytes.
            flip: self.packing.flip ^ if C::WIDE { 0x80 } else { 0 },
            panels,
            formats: PhantomData,
        });
    }
}

/// Stores rows of layers as the features of panels. A block of all panels is written before the next, so that
/// what they share of a line is in a cache.
struct PackPanels<'a, C, F> {
    first: &'a GroupQuantWeight<'a>,
    rows: &'a [Row<'a>],
    /// Those of sixteen rows each.
    codes: &'a [LaneCodes<'a>],
    /// [`first_of_run`] of them.
    runs: &'a [Row<'a>],
    flip: u8,
    panels: &'a mut [u8],
    formats: PhantomData<(C, F)>,
}

impl<C: CodeLayout, F: ScaleLayout> Kernel for PackPanels<'_, C, F> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let order = self.first.order.as_deref();
        let bytes = block_bytes::<C, F>();
        let panel = 2 * self.panels.len() / self.codes.len();
        for block in 0..panel / bytes {
            let first = block * F::UNITS * UNIT;
            let input = order.map_or(first, |order| order[first] as usize);
            let group = self.first.affine.group_of_input[input];
            for half in 0..self.codes.len() {
                let at = half / 2 * panel + block * bytes;
                self.half_block(s, (half, first, group), at);
            }
        }
    }
}

impl<C: CodeLayout, F: ScaleLayout> PackPanels<'_, C, F> {
    /// Bits of a code.
    const BITS: usize = C::BYTES / (UNIT * PANEL / 8);

    /// Stores sixteen rows of the inputs from `first` on, which are of one group, in the block at byte `at`.
    #[inline(always)]
    fn half_block<S: Simd>(
        &mut self,
        s: S,
        (half, first, group): (usize, usize, usize),
        at: usize,
    ) {
        let order = self.first.order.as_deref();
        let rows = &self.rows[half * LANES..][..LANES];
        let count = match self.runs[half] {
            Some(_) => LANES,
            None => rows.iter().filter(|row| row.is_some()).count(),
        };
        let present = first_lanes(s, count);
        let flip = s.splat_i(i32::from_le_bytes([self.flip; 4]));
        let mut out = HalfBlock::<S, C, F> {
            s,
            block: &mut self.panels[at..][..block_bytes::<C, F>()],
            half: half % 2,
            present,
            flip: s.and_i(flip, present),
            formats: PhantomData,
        };
        let (codes, numbers) = (&self.codes[half], F::UNITS * UNIT);
        if order.is_none() {
            codes.prefetch(s, Self::BITS, half, (first + numbers, numbers));
        }
        let [scales, minimums] = scales_and_minimums(s, rows, self.runs[half], group);
        out.head(scales, minimums);
        for u in 0..F::UNITS {
            let first = first + u * UNIT;
            let flip = out.flip;
            let vectors = match const { Self::BITS } {
                2 => codes.vectors::<S, C, 2>(s, order, first, flip),
                3 => codes.vectors::<S, C, 3>(s, order, first, flip),
                4 => codes.vectors::<S, C, 4>(s, order, first, flip),
                _ => codes.vectors::<S, C, 8>(s, order, first, flip),
            };
            out.vectors(u, &vectors, s.splat_i(0), s.splat_i(0));
        }
    }
}

/// The f16 scale that a group has in each of sixteen rows, and its zero point less the middle. `run` is the first
/// row where they are a run of one layer.
#[inline(always)]
fn scales_and_minimums<S: Simd>(s: S, rows: &[Row<'_>], run: Row<'_>, group: usize) -> [S::I; 2] {
    let (mut scales, mut minimums) = ([0.0; LANES], [0; LANES]);
    if let Some((GroupQuantWeight { affine, form, .. }, row)) = run {
        let at = group * affine.out_features + row;
        scales.copy_from_slice(&affine.scales[at..][..LANES]);
        let (zeros, middle) = (&affine.zeros[at..][..LANES], form.symmetric_zero());
        for (i, minimum) in minimums.iter_mut().enumerate() {
            *minimum = i32::from(zeros[i].wrapping_sub(middle));
        }
    } else {
        for (i, row) in rows.iter().enumerate() {
            if let Some((GroupQuantWeight { affine, form, .. }, row)) = row {
                let at = group * affine.out_features + row;
                scales[i] = affine.scales[at];
                minimums[i] = i32::from(affine.zeros[at].wrapping_sub(form.symmetric_zero()));
            }
        }
    }
    let mut halves = [0u16; LANES];
    // SAFETY: sixteen elements.
    unsafe { s.store_f16(halves.as_mut_ptr(), s.lanes(scales)) };
    let mut lanes = [0; LANES];
    for (i, lane) in lanes.iter_mut().enumerate() {
        *lane = i32::from(halves[i]);
    }
    // SAFETY: sixteen words of four bytes each.
    unsafe {
        [
            s.load_i(lanes.as_ptr().cast()),
            s.load_i(minimums.as_ptr().cast()),
        ]
    }
}
