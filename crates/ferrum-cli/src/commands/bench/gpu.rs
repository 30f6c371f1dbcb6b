//! What a GPU can do at best, by the ops that models run on: a large copy, and a large product of matrices.

use super::report::DevicePeaks;
use ferrum_kernels::{Backend, GemmShape, MatShape};
use ferrum_types::{Dtype, Element, Error, FloatElement, Result};
use std::time::Instant;

/// Elements of the copy: more than any cache holds.
const COPIED: usize = 1 << 28;
/// Rows and columns of both factors.
const SIDE: usize = 8192;
/// Measurements, and how often the work is recorded in each.
const MEASUREMENTS: usize = 5;
const REPEATS: usize = 8;

/// Both; `None` where the model leaves no room to measure them.
pub(super) fn limits<B: Backend>(device: &B) -> Result<Option<DevicePeaks>> {
    let measured = copy_bandwidth(device).and_then(|bandwidth| {
        Ok(DevicePeaks {
            bandwidth,
            is_copy: true,
            half_flops: Some(matrix_peak(device)?),
            is_f16: B::Act::DTYPE == Dtype::F16,
            ..DevicePeaks::default()
        })
    });
    match measured {
        Err(Error::OutOfMemory { .. }) => Ok(None),
        measured => measured.map(Some),
    }
}

/// Bytes a second, read and written, of a copy on the device.
fn copy_bandwidth<B: Backend>(device: &B) -> Result<f64> {
    let from = device.alloc::<f32>(COPIED)?;
    let mut to = device.alloc::<f32>(COPIED)?;
    let mut ctx = device.new_context()?;
    let seconds = fastest::<B>(&mut ctx, |ctx| {
        B::copy_slice(ctx, &from, 0, &mut to, 0, COPIED)
    })?;
    Ok((2 * COPIED * size_of::<f32>()) as f64 / seconds)
}

/// Operations a second (a multiply-add counts two) of a product of the device's activations with weights of their element.
fn matrix_peak<B: Backend>(device: &B) -> Result<f64> {
    let values = random(SIDE * SIDE);
    let x: Vec<_> = values.into_iter().map(B::Act::from_f32).collect();
    let shape = MatShape {
        rows: SIDE,
        cols: SIDE,
    };
    let weight = device.from_weight_bytes(bytemuck::cast_slice(&x), B::DEQUANTIZED_DTYPE, shape)?;
    let x = device.from_slice(&x)?;
    let mut out = device.alloc::<B::Act>(SIDE * SIDE)?;
    let mut ctx = device.new_context()?;
    let shape = GemmShape {
        rows: SIDE,
        n: SIDE,
        k: SIDE,
    };
    let seconds = fastest::<B>(&mut ctx, |ctx| B::gemm(ctx, &x, &weight, &mut out, shape))?;
    Ok(2.0 * (SIDE as f64).powi(3) / seconds)
}

/// Seconds of `work` in the quickest of some runs, each long enough that starting it does not count. The device takes what is
/// recorded one after the other.
fn fastest<B: Backend>(
    ctx: &mut B::Context,
    mut work: impl FnMut(&mut B::Context) -> Result<()>,
) -> Result<f64> {
    work(ctx)?;
    B::sync(ctx)?;
    let mut best = f64::INFINITY;
    for _ in 0..MEASUREMENTS {
        let started = Instant::now();
        for _ in 0..REPEATS {
            work(ctx)?;
        }
        B::sync(ctx)?;
        best = best.min(started.elapsed().as_secs_f64() / REPEATS as f64);
    }
    Ok(best)
}

/// Numbers around zero, reproducible: zeros would be multiplied faster than a model's weights.
fn random(len: usize) -> Vec<f32> {
    let mut state = 0x2545_f491_4f6c_dd1du64;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1u32 << 23) as f32 - 1.0
    };
    (0..len).map(|_| next()).collect()
}
