//! Convolutions: over time (Whisper) and over image patches (vision towers).

use super::buffer::{RefBuffer, elements, require};
use super::gemm::dot;
use crate::backend::{Conv1dShape, PatchShape};
use ferrum_types::Result;

/// `[c_in, len]` → `[c_out, out_len]`.
pub(super) fn conv1d(
    x: &RefBuffer<f32>,
    weight: &RefBuffer<f32>,
    bias: Option<&RefBuffer<f32>>,
    out: &mut RefBuffer<f32>,
    shape: Conv1dShape,
) -> Result<()> {
    let op = "conv1d";
    let Conv1dShape {
        c_in,
        c_out,
        len,
        kernel,
        stride,
        padding,
        groups,
    } = shape;
    require(op, kernel > 0 && stride > 0 && groups > 0, || {
        format!("kernel {kernel}, stride {stride} and groups {groups}, expected at least 1 each")
    })?;
    require(
        op,
        c_in.is_multiple_of(groups) && c_out.is_multiple_of(groups),
        || format!("{c_in} input and {c_out} output channels do not divide into {groups} groups"),
    )?;
    require(
        op,
        padding <= isize::MAX as usize / 4 && len <= isize::MAX as usize / 4,
        || format!("length {len} with padding {padding} overflows"),
    )?;
    let out_len = shape.out_len();
    let (group_in, group_out) = (c_in / groups, c_out / groups);
    let x = x.first(op, "x", elements(op, &[c_in, len])?)?;
    let weight = weight.first(op, "weight", elements(op, &[c_out, group_in, kernel])?)?;
    let bias = bias.map(|bias| bias.first(op, "bias", c_out)).transpose()?;
    let out = out.first_mut(op, "out", elements(op, &[c_out, out_len])?)?;

    for o in 0..c_out {
        let first_channel = o / group_out * group_in;
        for t in 0..out_len {
            let mut sum = bias.map_or(0.0, |bias| f64::from(bias[o]));
            for c in 0..group_in {
                for tap in 0..kernel {
                    // Position in the padded input; the padding itself adds nothing.
                    let padded = t * stride + tap;
                    if padded >= padding && padded - padding < len {
                        let x = x[(first_channel + c) * len + padded - padding];
                        let w = weight[(o * group_in + c) * kernel + tap];
                        sum += f64::from(x) * f64::from(w);
                    }
                }
            }
            out[o * out_len + t] = sum as f32;
        }
    }
    Ok(())
}

/// `[channels, height, width]` → one row of `out` elements for each patch.
pub(super) fn conv2d_patch(
    image: &RefBuffer<f32>,
    weight: &RefBuffer<f32>,
    bias: Option<&RefBuffer<f32>>,
    rows: &mut RefBuffer<f32>,
    shape: PatchShape,
) -> Result<()> {
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
    let (down, across) = (height / patch, width / patch);
    let patch_len = elements(op, &[channels, patch, patch])?;
    let image = image.first(op, "image", elements(op, &[channels, height, width])?)?;
    let weight = weight.first(op, "weight", elements(op, &[out, patch_len])?)?;
    let bias = bias.map(|bias| bias.first(op, "bias", out)).transpose()?;
    let rows = rows.first_mut(op, "rows", elements(op, &[down, across, out])?)?;

    let mut pixels = Vec::with_capacity(patch_len);
    for p in 0..down * across {
        // Pixels in the order of the weight: [channels, patch, patch].
        pixels.clear();
        for line in 0..channels * patch {
            let (c, y) = (line / patch, line % patch);
            let start = (c * height + p / across * patch + y) * width + p % across * patch;
            pixels.extend_from_slice(&image[start..][..patch]);
        }
        for o in 0..out {
            let bias = bias.map_or(0.0, |bias| f64::from(bias[o]));
            rows[p * out + o] = (dot(&pixels, &weight[o * patch_len..]) + bias) as f32;
        }
    }
    Ok(())
}
