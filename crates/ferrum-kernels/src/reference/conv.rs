//! Convolutions: over time (Whisper) and over image patches (vision towers).

use super::buffer::RefBuffer;
use super::gemm::dot;
use super::precision::{narrow, wide};
use crate::backend::{Conv1dShape, PatchShape, check};
use ferrum_types::{FloatElement, Result};

/// `[c_in, len]` → `[c_out, out_len]`.
pub(super) fn conv1d<A: FloatElement>(
    x: &RefBuffer<A>,
    weight: &RefBuffer<f32>,
    bias: Option<&RefBuffer<f32>>,
    out: &mut RefBuffer<A>,
    shape: Conv1dShape,
) -> Result<()> {
    check::conv1d(x, weight, bias, out, shape)?;
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
    for o in 0..c_out {
        let first_channel = o / group_out * group_in;
        for t in 0..out_len {
            let mut sum = bias.map_or(0.0, |bias| f64::from(bias.0[o]));
            for c in 0..group_in {
                for tap in 0..kernel {
                    // Position in the padded input; the padding itself adds nothing.
                    let padded = t * stride + tap;
                    if padded >= padding && padded - padding < len {
                        let x = x.0[(first_channel + c) * len + padded - padding];
                        let w = weight.0[(o * group_in + c) * kernel + tap];
                        sum += wide(x) * wide(w);
                    }
                }
            }
            out.0[o * out_len + t] = narrow(sum);
        }
    }
    Ok(())
}

/// `[channels, height, width]` → one row of `out` elements for each patch.
pub(super) fn conv2d_patch<A: FloatElement>(
    image: &RefBuffer<A>,
    weight: &RefBuffer<f32>,
    bias: Option<&RefBuffer<f32>>,
    rows: &mut RefBuffer<A>,
    shape: PatchShape,
) -> Result<()> {
    check::conv2d_patch(image, weight, bias, rows, shape)?;
    let PatchShape {
        channels,
        height,
        width,
        patch,
        out,
    } = shape;
    let (down, across) = (height / patch, width / patch);
    let patch_len = channels * patch * patch;
    let mut pixels = Vec::with_capacity(patch_len);
    for p in 0..down * across {
        // Pixels in the order of the weight: [channels, patch, patch].
        pixels.clear();
        for line in 0..channels * patch {
            let (c, y) = (line / patch, line % patch);
            let start = (c * height + p / across * patch + y) * width + p % across * patch;
            pixels.extend_from_slice(&image.0[start..][..patch]);
        }
        for o in 0..out {
            let bias = bias.map_or(0.0, |bias| f64::from(bias.0[o]));
            rows.0[p * out + o] = narrow(dot(&pixels, &weight.0[o * patch_len..]) + bias);
        }
    }
    Ok(())
}
