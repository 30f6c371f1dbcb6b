//! Convolutions: over time (Whisper) and over image patches (vision towers).
//!
//! Both are products of the weight (`[channels out, taps]`) with a panel of 32 outputs whose columns
//! are the inputs under the taps, written out once for each panel.

use super::exec::{Exec, Scratch};
use super::gemm::tile::{ARows, F32Columns, OutputTile, PANEL, panel, with_rows};
use super::isa::Kernel;
use super::memory::SharedMut;
use super::simd::Simd;
use ferrum_types::{Conv1dShape, PatchShape, Result};

/// Weights times one panel.
struct WeightsTimesPanel<'a> {
    /// `[m, taps]`.
    weight: &'a [f32],
    taps: usize,
    /// `[taps][32]`.
    columns: &'a [f32],
    /// `[m][32]`.
    out: &'a mut [f32],
}

impl Kernel for WeightsTimesPanel<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        assert!(self.columns.len() >= self.taps * PANEL);
        let rows = self.out.len() / PANEL;
        for first in (0..rows).step_by(S::TILE_ROWS) {
            let count = S::TILE_ROWS.min(rows - first);
            let weight = &self.weight[first * self.taps..][..count * self.taps];
            let out = &mut self.out[first * PANEL..][..count * PANEL];
            let a = ARows {
                ptr: weight.as_ptr(),
                row: self.taps,
                step: 1,
            };
            let columns = F32Columns::new(self.columns.as_ptr(), PANEL);
            let block = OutputTile {
                ptr: out.as_mut_ptr(),
                stride: PANEL,
                cols: PANEL,
            };
            with_rows!(S, count, MR => {
                // SAFETY: `weight` has MR rows of `taps`, `columns` as many steps of a panel
                // (asserted), `out` MR rows of a panel.
                unsafe { panel::<S, _, MR>(s, a, columns, self.taps, block, false) }
            });
        }
    }
}

/// `[c_in, len]` → `[c_out, out_len]`.
///
/// # Errors
/// [`OutOfMemory`](ferrum_types::Error::OutOfMemory) for scratch memory.
///
/// # Panics
/// When a slice is shorter than the shape says.
pub fn conv1d(
    exec: &Exec,
    scratch: &mut Scratch,
    x: &[f32],
    (weight, bias): (&[f32], Option<&[f32]>),
    out: &mut [f32],
    shape: Conv1dShape,
) -> Result<()> {
    let Conv1dShape {
        c_in,
        c_out,
        len,
        kernel,
        stride,
        padding,
        groups,
    } = shape;
    let out_len = shape.out_len();
    let (group_in, group_out) = (c_in / groups, c_out / groups);
    let taps = group_in * kernel;
    let out = &mut out[..c_out * out_len];
    if out.is_empty() {
        return Ok(());
    }

    let size = (taps + group_out) * PANEL;
    let buffers = SharedMut::new(scratch.floats(exec.pool.threads() * size)?);
    let out = SharedMut::new(out);
    let panels = out_len.div_ceil(PANEL);
    exec.parallel_for(panels * groups, taps * group_out, |units, thread| {
        // SAFETY: no two running tasks share a thread number.
        let buffer = unsafe { buffers.part(thread * size, size) };
        let (columns, sums) = buffer.split_at_mut(taps * PANEL);
        for unit in units {
            let (group, first) = (unit / panels, unit % panels * PANEL);
            let count = PANEL.min(out_len - first);
            for (tap, columns) in columns.chunks_exact_mut(PANEL).enumerate() {
                let x = &x[(group * group_in + tap / kernel) * len..][..len];
                columns.fill(0.0);
                for (t, column) in columns[..count].iter_mut().enumerate() {
                    // Position in the padded input; the padding itself is zero.
                    let padded = (first + t) * stride + tap % kernel;
                    if let Some(x) = padded.checked_sub(padding).and_then(|at| x.get(at)) {
                        *column = *x;
                    }
                }
            }
            let o = group * group_out;
            exec.level.run(WeightsTimesPanel {
                weight: &weight[o * taps..][..group_out * taps],
                taps,
                columns,
                out: sums,
            });
            for (i, sums) in sums.chunks_exact(PANEL).enumerate() {
                let bias = bias.map_or(0.0, |bias| bias[o + i]);
                // SAFETY: each panel of each group belongs to one task.
                let out = unsafe { out.part((o + i) * out_len + first, count) };
                for (out, sum) in out.iter_mut().zip(sums) {
                    *out = sum + bias;
                }
            }
        }
    });
    Ok(())
}

/// `[channels, height, width]` → one row of `out` elements for each patch.
///
/// # Errors
/// [`OutOfMemory`](ferrum_types::Error::OutOfMemory) for scratch memory.
///
/// # Panics
/// When a slice is shorter than the shape says.
pub fn conv2d_patch(
    exec: &Exec,
    scratch: &mut Scratch,
    image: &[f32],
    (weight, bias): (&[f32], Option<&[f32]>),
    rows: &mut [f32],
    shape: PatchShape,
) -> Result<()> {
    let PatchShape {
        channels,
        height,
        width,
        patch,
        out,
    } = shape;
    let (down, across) = (height / patch, width / patch);
    let taps = channels * patch * patch;
    let weight = &weight[..out * taps];
    let rows = &mut rows[..down * across * out];
    if rows.is_empty() {
        return Ok(());
    }

    let size = (taps + out) * PANEL;
    let buffers = SharedMut::new(scratch.floats(exec.pool.threads() * size)?);
    let rows = SharedMut::new(rows);
    let patches = down * across;
    exec.parallel_for(patches.div_ceil(PANEL), taps * out, |panels, thread| {
        // SAFETY: no two running tasks share a thread number.
        let buffer = unsafe { buffers.part(thread * size, size) };
        let (columns, sums) = buffer.split_at_mut(taps * PANEL);
        for first in panels.map(|panel| panel * PANEL) {
            let count = PANEL.min(patches - first);
            for (tap, columns) in columns.chunks_exact_mut(PANEL).enumerate() {
                // Pixels in the order of the weight: [channels, patch, patch].
                let (c, y, x) = (tap / patch / patch, tap / patch % patch, tap % patch);
                for (i, column) in columns[..count].iter_mut().enumerate() {
                    let p = first + i;
                    let line = c * height + p / across * patch + y;
                    *column = image[line * width + p % across * patch + x];
                }
                columns[count..].fill(0.0);
            }
            exec.level.run(WeightsTimesPanel {
                weight,
                taps,
                columns,
                out: sums,
            });
            for i in 0..count {
                // SAFETY: each row of a patch belongs to one task.
                let row = unsafe { rows.part((first + i) * out, out) };
                for (o, row) in row.iter_mut().enumerate() {
                    *row = sums[o * PANEL + i] + bias.map_or(0.0, |bias| bias[o]);
                }
            }
        }
    });
    Ok(())
}
