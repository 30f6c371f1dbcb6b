//! Convolutions: one lane makes one output and sums channels, then taps, in order.

use super::buffer::GpuBuffer;
use super::context::{GpuContext, LANES, P};
use super::pipeline::Kernel;
use crate::backend::{Conv1dShape, PatchShape, check};
use ferrum_types::Result;

pub(super) static CONV1D: Kernel = Kernel {
    name: "conv1d",
    wgsl: &[
        include_str!("shaders/grid.wgsl"),
        include_str!("shaders/conv1d.wgsl"),
    ],
    access: "rrrw",
    constants: &[],
};
pub(super) static CONV2D_PATCH: Kernel = Kernel {
    name: "conv2d_patch",
    wgsl: &[
        include_str!("shaders/grid.wgsl"),
        include_str!("shaders/conv2d_patch.wgsl"),
    ],
    access: "rrrw",
    constants: &[],
};

/// `[c_in, len]` → `[c_out, out_len]`.
pub(super) fn conv1d(
    ctx: &mut GpuContext,
    x: &GpuBuffer<f32>,
    weight: &GpuBuffer<f32>,
    bias: Option<&GpuBuffer<f32>>,
    out: &mut GpuBuffer<f32>,
    shape: Conv1dShape,
) -> Result<()> {
    const OP: &str = "conv1d";
    let s = shape;
    let lens = check::conv1d(x, weight, bias, out, shape)?;
    // The shader's positions are 32 bits wide.
    check::require(OP, s.len.max(s.padding) < (u32::MAX / 4) as usize, || {
        format!("length {} with padding {} overflows", s.len, s.padding)
    })?;
    ctx.run(
        OP,
        (&CONV1D, &[]),
        [x.into(), weight.into(), bias.into(), out.into()],
        &[
            P::U(lens.out),
            P::U(s.out_len()),
            P::U(s.len),
            P::U(s.c_in / s.groups),
            P::U(s.c_out / s.groups),
            P::U(s.kernel),
            P::U(s.stride),
            P::U(s.padding),
            P::U(usize::from(bias.is_some())),
        ],
        lens.out.div_ceil(LANES),
    )
}

/// `[channels, height, width]` → `[patches, out]`.
pub(super) fn conv2d_patch(
    ctx: &mut GpuContext,
    image: &GpuBuffer<f32>,
    weight: &GpuBuffer<f32>,
    bias: Option<&GpuBuffer<f32>>,
    rows: &mut GpuBuffer<f32>,
    shape: PatchShape,
) -> Result<()> {
    const OP: &str = "conv2d_patch";
    let s = shape;
    let lens = check::conv2d_patch(image, weight, bias, rows, shape)?;
    ctx.run(
        OP,
        (&CONV2D_PATCH, &[]),
        [image.into(), weight.into(), bias.into(), rows.into()],
        &[
            P::U(lens.out),
            P::U(s.out),
            P::U(s.channels),
            P::U(s.height),
            P::U(s.width),
            P::U(s.patch),
            P::U(usize::from(bias.is_some())),
        ],
        lens.out.div_ceil(LANES),
    )
}
