//! FP8 weights: one byte for each number, decoded where it is used.
//!
//! A panel is 32 features, as of dense weights; each 128 steps of `k` begin with the features' scales in
//! f32. A decoded number is the code's value times the scale, rounded once, so products have the bits
//! of the same weights in f32.

use super::buffer::{CpuBuffer, SharedMut};
use super::check::elements;
use super::exec::{Exec, Scratch};
use super::gemm::pack::{Format, Panels, pack_rows};
use super::gemm::tile::{self, Block, F32Columns, PANEL, Rows, with_rows};
use super::gemm::{Columns, DIRECT_TILES, TileSize};
use super::isa::Kernel;
use super::math;
use super::simd::{LANES, Simd};
use crate::backend::{Fp8Weights, MatShape};
use ferrum_quant::float8::e4m3_to_f32;
use ferrum_types::{Error, Result};
use std::marker::PhantomData;
use std::ops::Range;

/// Steps that share the scales of their features.
const SEGMENT: usize = 128;
/// Bytes of the scales of a segment.
const SCALES: usize = 4 * PANEL;
/// Panels that one row takes side by side.
const STREAMS: usize = 3;

/// A matrix `[n, k]` of E4M3 in panels.
#[derive(Debug)]
pub(super) struct Float8 {
    pub(super) shape: MatShape,
    data: CpuBuffer<u8>,
}

/// Segments of codes, each after its scales.
#[derive(Clone, Copy)]
struct E4m3;

/// Where in a panel the scales of step `k` and its codes lie.
#[inline(always)]
fn place(k: usize) -> (usize, usize) {
    let segment = k / SEGMENT * (SCALES + SEGMENT * PANEL);
    (segment, segment + SCALES + k % SEGMENT * PANEL)
}

impl Format for E4m3 {
    const BYTES: usize = 1;

    #[inline(always)]
    unsafe fn step<S: Simd>(s: S, panel: *const u8, k: usize) -> [S::V; 2] {
        let (scales, codes) = place(k);
        // SAFETY: a segment has 32 scales, a step of it 32 codes.
        unsafe {
            let half = |i: usize| {
                let scale = s.load(panel.add(scales).cast::<f32>().add(i * LANES));
                s.mul(scale, s.load_e4m3(panel.add(codes + i * LANES)))
            };
            [half(0), half(1)]
        }
    }
}

impl Float8 {
    /// Whether scales are the same all along a segment.
    pub(super) fn fits(layer: &Fp8Weights<'_>) -> bool {
        layer.block[1].is_multiple_of(SEGMENT) || layer.block[1] >= layer.in_features
    }

    /// Packs layers that [`fits`](Self::fits) holds for, one below the other.
    pub(super) fn pack(exec: &Exec, layers: &[Fp8Weights<'_>], cols: usize) -> Result<Self> {
        let op = "load_layers";
        let mut scales = Vec::with_capacity(layers.len());
        let mut rows = 0usize;
        for layer in layers {
            let wrong = |reason| Error::invalid(op, reason);
            if layer.in_features != cols || !Self::fits(layer) {
                let (found, block) = (layer.in_features, layer.block);
                let reason =
                    format!("a layer of {found} inputs, blocks {block:?}, expected {cols}");
                return Err(wrong(reason));
            }
            scales.push(layer.scales().map_err(|e| wrong(e.to_string()))?);
            rows = rows.saturating_add(layer.out_features);
        }
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
        Ok(Self { shape, data })
    }

    /// Row `row` as f32.
    pub(super) fn read_row(&self, row: usize, out: &mut [f32]) {
        let (panel, j) = (self.panel(row / PANEL), row % PANEL);
        for (k, out) in out.iter_mut().enumerate().take(self.shape.cols) {
            let (scales, codes) = place(k);
            let scale = &panel[scales + 4 * j..][..4];
            let scale = f32::from_le_bytes([scale[0], scale[1], scale[2], scale[3]]);
            *out = scale * e4m3_to_f32(panel[codes + j]);
        }
    }

    fn panels(&self) -> usize {
        self.shape.rows.div_ceil(PANEL)
    }

    /// The bytes of a panel.
    fn panel(&self, p: usize) -> &[u8] {
        let size = panel_bytes(self.shape.cols);
        &self.data.as_slice()[p * size..][..size]
    }
}

/// Bytes of a panel with rows of `cols` numbers.
fn panel_bytes(cols: usize) -> usize {
    cols.div_ceil(SEGMENT) * SCALES + cols * PANEL
}

/// Stores row `row` of a layer as feature `j` of a panel.
fn pack_row(layer: &Fp8Weights<'_>, scales: &[f32], row: usize, j: usize, panel: &mut [u8]) {
    let cols = layer.in_features;
    let scales = &scales[row / layer.block[0] * layer.scales_of_row()..];
    for (k, &code) in layer.codes[row * cols..][..cols].iter().enumerate() {
        let (scale, at) = place(k);
        if k % SEGMENT == 0 {
            let value = scales[k / layer.block[1]].to_le_bytes();
            panel[scale + 4 * j..][..4].copy_from_slice(&value);
        }
        panel[at + j] = code;
    }
}

/// `x[rows, k] · weight[n, k]ᵀ` into some columns of a result, for a few rows at once.
pub(super) fn columns_of(
    exec: &Exec,
    scratch: &mut Scratch,
    x: &[f32],
    weight: &Float8,
    out: Columns<'_>,
) -> Result<()> {
    let k = weight.shape.cols;
    let rows = x.len() / k;
    let (tile_rows, direct_rows) = exec.level.run(TileSize);
    let direct = rows <= DIRECT_TILES * direct_rows;
    let most = if direct { direct_rows } else { tile_rows };
    let tile_rows = rows.div_ceil(rows.div_ceil(most));
    let threads = exec.pool.threads();
    let decoded = if direct { 0 } else { k * PANEL };
    let floats = scratch.floats(x.len() + threads * decoded)?;
    let (packed, buffers) = floats.split_at_mut(x.len());
    pack_rows(exec, x, k, tile_rows, SharedMut::new(packed));
    let product = Product {
        packed,
        rows,
        tile_rows,
        weight,
        out,
    };
    if direct {
        let cost = k * PANEL * rows.div_ceil(4) / 4;
        exec.spread(weight.panels(), cost, |panels, _| {
            exec.level.run(Direct { product, panels });
        });
        return Ok(());
    }
    let buffers = SharedMut::new(buffers);
    exec.pool.run(weight.panels(), &|panel, thread| {
        // SAFETY: no two running tasks share a thread number.
        let buffer = unsafe { buffers.part(thread * decoded, decoded) };
        exec.level.run(Decoded {
            product,
            panel,
            buffer,
        });
    });
    Ok(())
}

#[derive(Clone, Copy)]
struct Product<'a> {
    /// Tiles of rows, `[k][rows of the tile]`.
    packed: &'a [f32],
    rows: usize,
    tile_rows: usize,
    weight: &'a Float8,
    out: Columns<'a>,
}

impl Product<'_> {
    /// First row, number of rows, and the packed rows of each tile.
    fn tiles(&self) -> impl Iterator<Item = (usize, usize, &[f32])> {
        let k = self.weight.shape.cols;
        (0..self.rows).step_by(self.tile_rows).map(move |row| {
            let count = self.tile_rows.min(self.rows - row);
            (row, count, &self.packed[row * k..][..count * k])
        })
    }
}

/// Few rows: panels are decoded in registers for each tile.
struct Direct<'a> {
    product: Product<'a>,
    panels: Range<usize>,
}

impl Kernel for Direct<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let mut panel = self.panels.start;
        if self.product.rows == 1 {
            while panel + STREAMS <= self.panels.end {
                self.block::<S, 1, { 2 * STREAMS }>(s, 0, self.product.packed, panel);
                panel += STREAMS;
            }
        }
        for panel in panel..self.panels.end {
            for (row, count, packed) in self.product.tiles() {
                with_rows!(S, count, MR => self.block::<S, MR, 2>(s, row, packed, panel));
            }
        }
    }
}

impl Direct<'_> {
    /// A tile of rows times `NV/2` panels from `panel` on.
    #[inline(always)]
    fn block<S: Simd, const MR: usize, const NV: usize>(
        &self,
        s: S,
        row: usize,
        packed: &[f32],
        panel: usize,
    ) {
        let MatShape { rows: n, cols: k } = self.product.weight.shape;
        let stride = panel_bytes(k);
        let bytes = &self.product.weight.data.as_slice()[panel * stride..][..NV / 2 * stride];
        assert_eq!(packed.len(), MR * k);
        let rows = Rows {
            ptr: packed.as_ptr(),
            row: 1,
            step: MR,
        };
        let columns = Panels::<E4m3> {
            ptr: bytes.as_ptr(),
            stride,
            format: PhantomData,
        };
        let first = panel * PANEL;
        let cols = (NV * LANES).min(n - first);
        let mut acc = [[s.zero(); NV]; MR];
        // SAFETY: `packed` has MR values for each of the k steps (asserted), and `bytes` is NV/2 panels
        // of k steps (sliced so).
        unsafe { tile::multiply(s, rows, columns, k, &mut acc) };
        for (i, acc) in acc.iter().enumerate() {
            // SAFETY: a panel belongs to one task, so nobody else has these columns.
            let out = unsafe { self.product.out.part(row + i, first, cols) };
            for (v, acc) in acc.iter().enumerate() {
                if v * LANES < cols {
                    math::store_at(s, out, v * LANES, *acc);
                }
            }
        }
    }
}

/// Many rows: a panel becomes f32 once, and every tile passes over it.
struct Decoded<'a> {
    product: Product<'a>,
    panel: usize,
    /// `[k][32]`.
    buffer: &'a mut [f32],
}

impl Kernel for Decoded<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self {
            product,
            panel: p,
            buffer,
        } = self;
        let MatShape { rows: n, cols: k } = product.weight.shape;
        let panel = product.weight.panel(p);
        let steps = buffer.as_chunks_mut::<PANEL>().0;
        assert_eq!(steps.len(), k);
        for (k, out) in steps.iter_mut().enumerate() {
            // SAFETY: the panel has these steps, `out` has 32 elements.
            unsafe {
                let [low, high] = E4m3::step(s, panel.as_ptr(), k);
                s.store(out.as_mut_ptr(), low);
                s.store(out.as_mut_ptr().add(LANES), high);
            }
        }
        let columns = F32Columns {
            ptr: buffer.as_ptr(),
            stride: PANEL,
        };
        let cols = PANEL.min(n - p * PANEL);
        for (row, count, packed) in product.tiles() {
            let block = Block {
                ptr: product.out.rows(row..row + count, p * PANEL, cols),
                stride: product.out.stride,
                cols,
            };
            with_rows!(S, count, MR => {
                let rows = Rows {
                    ptr: packed.as_ptr(),
                    row: 1,
                    step: MR,
                };
                // SAFETY: `packed` has MR values for each step, the buffer k steps of 32 columns
                // (asserted), and the block lies in `out`, where a task has its columns for itself.
                unsafe { tile::panel::<S, _, MR>(s, rows, columns, k, block, false) }
            });
        }
    }
}
