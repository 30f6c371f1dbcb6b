//! Panels of FP8: segments of codes after their scales.

use super::format::Format;
use super::lane::F32Lane;
use super::tile::PANEL;
use crate::simd::{LANES, Simd};
use ferrum_quant::fp8_codec::e4m3_to_f32;

/// Steps that share the scales of their features.
pub(crate) const SEGMENT: usize = 128;
/// What scales are too large by: levels decode codes to as much less.
pub(crate) const ABOVE: f32 = 256.0;
/// Bytes of the scales of a segment.
pub(crate) const SCALES: usize = 4 * PANEL;

/// Segments of codes, each after its scales.
#[derive(Clone, Copy)]
pub(crate) struct E4m3;

/// Where in a panel the scales of step `k` and its codes lie.
#[inline(always)]
pub(crate) fn place(k: usize) -> (usize, usize) {
    let segment = k / SEGMENT * (SCALES + SEGMENT * PANEL);
    (segment, segment + SCALES + k % SEGMENT * PANEL)
}

impl Format for E4m3 {
    type Lane = F32Lane;

    #[inline(always)]
    unsafe fn step<S: Simd>(s: S, panel: *const u8, k: usize) -> [S::V; 2] {
        let (scales, codes) = place(k);
        let mut features = [s.zero(); 2];
        for (i, features) in features.iter_mut().enumerate() {
            // SAFETY: a segment has 32 scales, a step of it 32 codes.
            unsafe {
                let scale = s.load(panel.add(scales).cast::<f32>().add(i * LANES));
                *features = s.mul(scale, s.load_small_e4m3(panel.add(codes + i * LANES)));
            }
        }
        features
    }
}

/// Feature `j` of a panel as f32.
pub(crate) fn read_row(panel: &[u8], j: usize, out: &mut [f32]) {
    for (k, out) in out.iter_mut().enumerate() {
        let (scales, codes) = place(k);
        let scale = &panel[scales + 4 * j..][..4];
        let scale = f32::from_le_bytes([scale[0], scale[1], scale[2], scale[3]]);
        *out = scale * (e4m3_to_f32(panel[codes + j]) / ABOVE);
    }
}

/// Bytes of a panel with rows of `cols` numbers.
pub(crate) fn panel_bytes(cols: usize) -> usize {
    cols.div_ceil(SEGMENT) * SCALES + cols * PANEL
}
