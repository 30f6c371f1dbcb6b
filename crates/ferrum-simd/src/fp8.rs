//! FP8 weights: one byte for each number, decoded where it is used.
//!
//! A panel is 32 features, as of all dense weights ([`super::gemm`] multiplies them); each 128 steps of
//! `k` begin with the features' scales in f32. A decoded number is the code's value times the scale,
//! rounded once, so products have the bits of the same weights in f32. What decoding a code leaves to do,
//! scales have done at load: they are `ABOVE` times as large, and NaN where one of their codes is.

use super::exec::Exec;
use super::gemm::e4m3::{ABOVE, SCALES, SEGMENT, panel_bytes};
use super::gemm::pack::{CpuWeight, Elements};
use super::gemm::tile::PANEL;
use super::isa::{Kernel, Level};
use super::panels::{LaneRows, PanelSource, Transposed, put_low_bytes, transpose};
use super::simd::{LANES, Simd};
use ferrum_quant::fp8_layer::Fp8Tensors;
use ferrum_types::{Error, MatShape, Result, check::elements};

const OP: &str = "load_layers";

/// Whether scales are the same all along a segment.
pub fn fits(layer: &Fp8Tensors<'_>) -> bool {
    layer.block[1].is_multiple_of(SEGMENT) || layer.block[1] >= layer.in_features
}

/// Packs layers that [`fits`] holds for, one below the other.
///
/// # Errors
/// Of layers that do not fit together or are not whole; [`OutOfMemory`](Error::OutOfMemory).
pub fn pack(exec: &Exec, layers: &[Fp8Tensors<'_>], cols: usize) -> Result<CpuWeight> {
    let packing = Packing::new(layers, cols)?;
    let data = packing.packed(OP, exec)?;
    Ok(CpuWeight::of_panels(packing.shape, Elements::E4m3, data))
}

/// Layers that are packed, one below the other.
pub(super) struct Packing<'a> {
    layers: &'a [Fp8Tensors<'a>],
    /// Those of each layer.
    scales: Vec<Vec<f32>>,
    shape: MatShape,
    /// A row for features past the last.
    no_codes: Vec<u8>,
}

impl<'a> Packing<'a> {
    /// Layers of `cols` inputs that [`fits`] holds for.
    pub(super) fn new(layers: &'a [Fp8Tensors<'a>], cols: usize) -> Result<Self> {
        let mut scales = Vec::with_capacity(layers.len());
        let mut rows = 0usize;
        for layer in layers {
            let wrong = |reason| Error::invalid(OP, reason);
            if layer.in_features != cols || !fits(layer) {
                let (found, block) = (layer.in_features, layer.block);
                let reason =
                    format!("a layer of {found} inputs, blocks {block:?}, expected {cols}");
                return Err(wrong(reason));
            }
            let found = layer.scales().map_err(|e| wrong(e.to_string()))?;
            let large = |scale: &&f32| scale.is_finite() && !(*scale * ABOVE).is_finite();
            if let Some(scale) = found.iter().find(large) {
                let most = f32::MAX / ABOVE;
                return Err(wrong(format!(
                    "a scale is {scale}, expected at most {most}"
                )));
            }
            scales.push(found);
            rows = rows.saturating_add(layer.out_features);
        }
        // Codes and, for each segment, scales: less than this.
        elements(OP, &[cols, PANEL, 8])?;
        Ok(Self {
            layers,
            scales,
            shape: MatShape { rows, cols },
            no_codes: vec![0; cols],
        })
    }

    /// Codes and scales of row `row`, and how many inputs share a scale.
    fn row(&self, mut row: usize) -> Option<(&[u8], &[f32], usize)> {
        for (layer, scales) in self.layers.iter().zip(&self.scales) {
            if row < layer.out_features {
                let cols = layer.in_features;
                let codes = &layer.codes[row * cols..][..cols];
                let scales = &scales[row / layer.block[0] * layer.scales_of_row()..];
                return Some((codes, scales, layer.block[1]));
            }
            row -= layer.out_features;
        }
        None
    }
}

impl PanelSource for Packing<'_> {
    fn count(&self) -> usize {
        self.shape.rows.div_ceil(PANEL)
    }

    fn bytes(&self) -> usize {
        panel_bytes(self.shape.cols)
    }

    fn elements_per_panel(&self) -> usize {
        self.shape.cols * PANEL
    }

    fn pack(&self, level: Level, number: usize, panel: &mut [u8]) {
        let mut codes = [&self.no_codes[..]; PANEL];
        let mut scales = [(&[0.0][..], usize::MAX); PANEL];
        for j in 0..PANEL {
            if let Some((row, of_row, block)) = self.row(number * PANEL + j) {
                (codes[j], scales[j]) = (row, (of_row, block));
            }
        }
        let rows = LaneRows::halves(&codes);
        for (number, segment) in panel.chunks_mut(SCALES + SEGMENT * PANEL).enumerate() {
            let (head, steps) = segment.split_at_mut(SCALES);
            let first = number * SEGMENT;
            let spoiled = level.run(PackSegment {
                rows: &rows,
                first,
                steps,
            });
            let heads = head.as_chunks_mut::<4>().0.iter_mut();
            for ((head, (scales, block)), spoiled) in heads.zip(scales).zip(spoiled) {
                let scale = match spoiled {
                    true => f32::NAN,
                    false => scales[first / block] * ABOVE,
                };
                *head = scale.to_le_bytes();
            }
        }
    }
}

/// Transposes the codes of a segment; says of which features one is NaN.
struct PackSegment<'a> {
    rows: &'a [LaneRows<'a>; 2],
    first: usize,
    steps: &'a mut [u8],
}

impl Kernel for PackSegment<'_> {
    type Output = [bool; PANEL];

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> [bool; PANEL] {
        let mut spoiled = Spoiled([s.splat_i(0); 2]);
        transpose(s, self.rows, self.first, self.steps, &mut spoiled);
        let mut lanes = [[0i32; LANES]; 2];
        for (half, lanes) in lanes.iter_mut().enumerate() {
            // SAFETY: sixteen words of four bytes each.
            unsafe { s.store_i(lanes.as_mut_ptr().cast(), spoiled.0[half]) };
        }
        let mut out = [false; PANEL];
        for (j, out) in out.iter_mut().enumerate() {
            *out = lanes[j / LANES][j % LANES] & 0x8080_8080_u32 as i32 != 0;
        }
        out
    }
}

/// Codes as they are stored; the top bit of a byte of a lane is set when one was NaN.
struct Spoiled<I>([I; 2]);

impl<S: Simd> Transposed<S> for Spoiled<S::I> {
    #[inline(always)]
    fn put(&mut self, s: S, low: [S::I; 4], high: [S::I; 4], out: &mut [u8]) {
        let (magnitude, one) = (s.splat_i(0x7f7f_7f7f), s.splat_i(0x0101_0101));
        for w in 0..4 {
            for half in 0..2 {
                let word = if half == 0 { low[w] } else { high[w] };
                // One more than the largest magnitude, which is NaN's.
                let above = s.add_i(s.and_i(word, magnitude), one);
                self.0[half] = s.or_i(self.0[half], above);
                for byte in 0..4 {
                    let at = (4 * w + byte) * PANEL + half * LANES;
                    put_low_bytes(s, out, at, s.shr_i(word, 8 * byte));
                }
            }
        }
    }
}
