//! Convolutions: over time (Whisper) and over image patches (vision towers).

use crate::backend::{Conv1dShape, PatchShape, check};
use ferrum_simd::conv;
use ferrum_simd::exec::{Exec, Scratch};
use ferrum_simd::memory::CpuBuffer;
use ferrum_types::Result;

type Buf = CpuBuffer<f32>;

/// `[c_in, len]` → `[c_out, out_len]`.
pub(crate) fn conv1d(
    exec: &Exec,
    scratch: &mut Scratch,
    x: &Buf,
    (weight, bias): (&Buf, Option<&Buf>),
    out: &mut Buf,
    shape: Conv1dShape,
) -> Result<()> {
    check::conv1d(x, weight, bias, out, shape)?;
    let weight = (weight.as_slice(), bias.map(CpuBuffer::as_slice));
    let (x, out) = (x.as_slice(), out.as_mut_slice());
    conv::conv1d(exec, scratch, x, weight, out, shape)
}

/// `[channels, height, width]` → one row of `out` elements for each patch.
pub(crate) fn conv2d_patch(
    exec: &Exec,
    scratch: &mut Scratch,
    image: &Buf,
    (weight, bias): (&Buf, Option<&Buf>),
    rows: &mut Buf,
    shape: PatchShape,
) -> Result<()> {
    check::conv2d_patch(image, weight, bias, rows, shape)?;
    let weight = (weight.as_slice(), bias.map(CpuBuffer::as_slice));
    let (image, rows) = (image.as_slice(), rows.as_mut_slice());
    conv::conv2d_patch(exec, scratch, image, weight, rows, shape)
}
