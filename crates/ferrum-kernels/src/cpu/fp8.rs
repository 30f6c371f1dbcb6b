//! FP8 weights: one byte for each number, decoded where it is used.
//!
//! A panel is 32 features, as of all dense weights ([`super::gemm`] multiplies them); each 128 steps of
//! `k` begin with the features' scales in f32. A decoded number is the code's value times the scale,
//! rounded once, so products have the bits of the same weights in f32. What decoding a code leaves to do,
//! scales have done at load: they are [`ABOVE`] times as large, and NaN where one of their codes is.

use super::buffer::{CpuBuffer, SharedMut};
use super::check::elements;
use super::exec::Exec;
use super::gemm::lane::Single;
use super::gemm::pack::{CpuWeight, Elements, Format};
use super::gemm::tile::PANEL;
use super::simd::{LANES, Simd};
use crate::backend::{Fp8Weights, MatShape};
use ferrum_quant::float8::e4m3_to_f32;
use ferrum_types::{Error, Result};

/// Steps that share the scales of their features.
const SEGMENT: usize = 128;
/// What scales are too large by: levels decode codes to as much less.
const ABOVE: f32 = 256.0;
/// Bytes of the scales of a segment.
const SCALES: usize = 4 * PANEL;

/// Segments of codes, each after its scales.
#[derive(Clone, Copy)]
pub(super) struct E4m3;

/// Where in a panel the scales of step `k` and its codes lie.
#[inline(always)]
fn place(k: usize) -> (usize, usize) {
    let segment = k / SEGMENT * (SCALES + SEGMENT * PANEL);
    (segment, segment + SCALES + k % SEGMENT * PANEL)
}

impl Format for E4m3 {
    type Lane = Single;

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

/// Whether scales are the same all along a segment.
pub(super) fn fits(layer: &Fp8Weights<'_>) -> bool {
    layer.block[1].is_multiple_of(SEGMENT) || layer.block[1] >= layer.in_features
}

/// Packs layers that [`fits`] holds for, one below the other.
pub(super) fn pack(exec: &Exec, layers: &[Fp8Weights<'_>], cols: usize) -> Result<CpuWeight> {
    let op = "load_layers";
    let mut scales = Vec::with_capacity(layers.len());
    let mut rows = 0usize;
    for layer in layers {
        let wrong = |reason| Error::invalid(op, reason);
        if layer.in_features != cols || !fits(layer) {
            let (found, block) = (layer.in_features, layer.block);
            let reason = format!("a layer of {found} inputs, blocks {block:?}, expected {cols}");
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
    elements(op, &[cols, PANEL, 8])?;
    let (panels, panel) = (rows.div_ceil(PANEL), panel_bytes(cols));
    let mut data = CpuBuffer::lasting(elements(op, &[panels, panel])?)?;
    let out = SharedMut::new(data.as_mut_slice());
    exec.spread(panels, cols * PANEL, |panels, _| {
        for p in panels {
            // SAFETY: each panel is packed by one task.
            let out = unsafe { out.part(p * panel, panel) };
            let mut first = 0;
            for (layer, scales) in layers.iter().zip(&scales) {
                let end = first + layer.out_features;
                for row in (p * PANEL).max(first)..((p + 1) * PANEL).min(end) {
                    pack_row(layer, scales, row - first, row % PANEL, out);
                }
                first = end;
            }
        }
    });
    let shape = MatShape { rows, cols };
    Ok(CpuWeight::of_panels(shape, Elements::E4m3, data))
}

/// Feature `j` of a panel as f32.
pub(super) fn read_row(panel: &[u8], j: usize, out: &mut [f32]) {
    for (k, out) in out.iter_mut().enumerate() {
        let (scales, codes) = place(k);
        let scale = &panel[scales + 4 * j..][..4];
        let scale = f32::from_le_bytes([scale[0], scale[1], scale[2], scale[3]]);
        *out = scale * (e4m3_to_f32(panel[codes + j]) / ABOVE);
    }
}

/// Bytes of a panel with rows of `cols` numbers.
pub(super) fn panel_bytes(cols: usize) -> usize {
    cols.div_ceil(SEGMENT) * SCALES + cols * PANEL
}

/// Stores row `row` of a layer as feature `j` of a panel.
fn pack_row(layer: &Fp8Weights<'_>, scales: &[f32], row: usize, j: usize, panel: &mut [u8]) {
    let cols = layer.in_features;
    let scales = &scales[row / layer.block[0] * layer.scales_of_row()..];
    let codes = &layer.codes[row * cols..][..cols];
    for (segment, codes) in codes.chunks(SEGMENT).enumerate() {
        let first = segment * SEGMENT;
        let (at, steps) = place(first);
        let scale = match codes.iter().any(|code| code & 0x7f == 0x7f) {
            true => f32::NAN,
            false => scales[first / layer.block[1]] * ABOVE,
        };
        panel[at + 4 * j..][..4].copy_from_slice(&scale.to_le_bytes());
        let steps = &mut panel[steps..][..codes.len() * PANEL];
        for (step, code) in steps.as_chunks_mut::<PANEL>().0.iter_mut().zip(codes) {
            step[j] = *code;
        }
    }
}
