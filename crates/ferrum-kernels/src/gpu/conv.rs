//! Convolutions: one lane makes one output and sums channels, then taps, in order.

use super::buffer::GpuBuffer;
use super::context::{GpuContext, LANES, P};
use super::pipeline::Kernel;
use super::shape::{product, require};
use crate::backend::{Conv1dShape, DeviceBuffer, PatchShape};
use ferrum_types::{Error, Result};

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
    require(OP, s.kernel > 0 && s.stride > 0 && s.groups > 0, || {
        format!(
            "kernel {}, stride {} and groups {}, expected at least 1 each",
            s.kernel, s.stride, s.groups
        )
    })?;
    let divides = s.c_in.is_multiple_of(s.groups) && s.c_out.is_multiple_of(s.groups);
    require(OP, divides, || {
        format!(
            "{} input and {} output channels do not divide into {} groups",
            s.c_in, s.c_out, s.groups
        )
    })?;
    // The shader's positions are 32 bits wide.
    require(OP, s.len.max(s.padding) < (u32::MAX / 4) as usize, || {
        format!("length {} with padding {} overflows", s.len, s.padding)
    })?;
    let of_group = s.c_in / s.groups;
    let total = product(OP, &[s.c_out, s.out_len()])?;
    Error::check_len(OP, "x", x.len(), product(OP, &[s.c_in, s.len])?)?;
    Error::check_len(
        OP,
        "weight",
        weight.len(),
        product(OP, &[s.c_out, of_group, s.kernel])?,
    )?;
    if let Some(bias) = bias {
        Error::check_len(OP, "bias", bias.len(), s.c_out)?;
    }
    Error::check_len(OP, "out", out.len(), total)?;
    ctx.run(
        OP,
        (&CONV1D, &[]),
        [x.into(), weight.into(), bias.into(), out.into()],
        &[
            P::U(total),
            P::U(s.out_len()),
            P::U(s.len),
            P::U(of_group),
            P::U(s.c_out / s.groups),
            P::U(s.kernel),
            P::U(s.stride),
            P::U(s.padding),
            P::U(usize::from(bias.is_some())),
        ],
        total.div_ceil(LANES),
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
    let whole = |n: usize| s.patch > 0 && n.is_multiple_of(s.patch);
    require(OP, whole(s.height) && whole(s.width), || {
        format!(
            "{} × {} pixels do not divide into patches of {} × {}",
            s.height, s.width, s.patch, s.patch
        )
    })?;
    let patches = product(OP, &[s.height / s.patch, s.width / s.patch])?;
    let total = product(OP, &[patches, s.out])?;
    let of_patch = product(OP, &[s.channels, s.patch, s.patch])?;
    Error::check_len(
        OP,
        "image",
        image.len(),
        product(OP, &[s.channels, s.height, s.width])?,
    )?;
    Error::check_len(OP, "weight", weight.len(), product(OP, &[s.out, of_patch])?)?;
    if let Some(bias) = bias {
        Error::check_len(OP, "bias", bias.len(), s.out)?;
    }
    Error::check_len(OP, "rows", rows.len(), total)?;
    ctx.run(
        OP,
        (&CONV2D_PATCH, &[]),
        [image.into(), weight.into(), bias.into(), rows.into()],
        &[
            P::U(total),
            P::U(s.out),
            P::U(s.channels),
            P::U(s.height),
            P::U(s.width),
            P::U(s.patch),
            P::U(usize::from(bias.is_some())),
        ],
        total.div_ceil(LANES),
    )
}
