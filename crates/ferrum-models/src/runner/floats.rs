//! Reads floats of a device as f32.

use ferrum_kernels::{HostBuffer, LlmBackend, PendingRead};
use ferrum_types::{Element, FloatElement, Result};

/// The first `len` elements of a buffer, which is made anew where it has fewer.
pub(super) fn room<'a, B: LlmBackend, T: Element>(
    device: &B,
    buffer: &'a mut HostBuffer<T>,
    len: usize,
) -> Result<&'a mut [T]> {
    if buffer.len() < len {
        *buffer = device.host_buffer(len)?;
    }
    Ok(&mut buffer[..len])
}

/// Reads as many floats of a buffer as `out` has, from an offset on.
pub(super) fn read_floats<B: LlmBackend, T: FloatElement>(
    ctx: &mut B::Context,
    (from, first): (&B::Buffer<T>, usize),
    staging: &mut HostBuffer<T>,
    out: &mut [f32],
) -> Result<()> {
    if out.is_empty() {
        return Ok(());
    }
    let staging = room(B::device(ctx), staging, out.len())?;
    B::read(ctx, from, first, staging)?;
    widen(staging, out);
    Ok(())
}

/// [`read_floats`] that goes on while the device computes, if there is anything to read.
pub(super) fn begin_floats<B: LlmBackend, T: FloatElement>(
    ctx: &mut B::Context,
    (from, first): (&B::Buffer<T>, usize),
    len: usize,
) -> Result<Option<PendingRead<T>>> {
    match len {
        0 => Ok(None),
        len => B::begin_read(ctx, from, first, len).map(Some),
    }
}

pub(super) fn finish_floats<B: LlmBackend, T: FloatElement>(
    device: &B,
    read: Option<PendingRead<T>>,
    staging: &mut HostBuffer<T>,
    out: &mut [f32],
) -> Result<()> {
    let Some(read) = read else {
        return Ok(());
    };
    let staging = room(device, staging, out.len())?;
    read.finish(staging)?;
    widen(staging, out);
    Ok(())
}

fn widen<T: FloatElement>(from: &[T], to: &mut [f32]) {
    for (to, x) in to.iter_mut().zip(from) {
        *to = x.to_f32();
    }
}
