//! Convolutions.

use super::{elements, len, require};
use crate::backend::{Conv1dShape, DeviceBuffer, PatchShape};
use ferrum_types::Result;

/// Elements of a convolution's buffers.
#[derive(Clone, Copy, Debug)]
pub struct ConvLen {
    /// The input.
    pub input: usize,
    /// The weight.
    pub weight: usize,
    /// The output.
    pub out: usize,
}

/// [`Backend::conv1d`](crate::Backend::conv1d).
pub fn conv1d<W: DeviceBuffer>(
    x: &impl DeviceBuffer,
    weight: &W,
    bias: Option<&W>,
    out: &impl DeviceBuffer,
    shape: Conv1dShape,
) -> Result<ConvLen> {
    let op = "conv1d";
    let Conv1dShape {
        c_in,
        c_out,
        len: length,
        kernel,
        stride,
        padding,
        groups,
    } = shape;
    require(op, kernel > 0 && stride > 0 && groups > 0, || {
        format!("kernel {kernel}, stride {stride} and groups {groups}, expected at least 1 each")
    })?;
    let divides = c_in.is_multiple_of(groups) && c_out.is_multiple_of(groups);
    require(op, divides, || {
        format!("{c_in} input and {c_out} output channels do not divide into {groups} groups")
    })?;
    // A padded length that is a size, whatever a kernel adds to its positions.
    let most = isize::MAX as usize / 4;
    require(op, padding <= most && length <= most, || {
        format!("length {length} with padding {padding} overflows")
    })?;
    let lens = ConvLen {
        input: elements(op, &[c_in, length])?,
        weight: elements(op, &[c_out, c_in / groups, kernel])?,
        out: elements(op, &[c_out, shape.out_len()])?,
    };
    len(op, "x", x, lens.input)?;
    len(op, "weight", weight, lens.weight)?;
    if let Some(bias) = bias {
        len(op, "bias", bias, c_out)?;
    }
    len(op, "out", out, lens.out)?;
    Ok(lens)
}

/// [`Backend::conv2d_patch`](crate::Backend::conv2d_patch).
pub fn conv2d_patch<W: DeviceBuffer>(
    image: &impl DeviceBuffer,
    weight: &W,
    bias: Option<&W>,
    rows: &impl DeviceBuffer,
    shape: PatchShape,
) -> Result<ConvLen> {
    let op = "conv2d_patch";
    let PatchShape {
        channels,
        height,
        width,
        patch,
        out,
    } = shape;
    let divides = patch > 0 && height.is_multiple_of(patch) && width.is_multiple_of(patch);
    require(op, divides, || {
        format!("{height} × {width} pixels do not divide into patches of {patch} × {patch}")
    })?;
    let lens = ConvLen {
        input: elements(op, &[channels, height, width])?,
        weight: elements(op, &[out, channels, patch, patch])?,
        out: elements(op, &[height / patch, width / patch, out])?,
    };
    len(op, "image", image, lens.input)?;
    len(op, "weight", weight, lens.weight)?;
    if let Some(bias) = bias {
        len(op, "bias", bias, out)?;
    }
    len(op, "rows", rows, lens.out)?;
    Ok(lens)
}
