//! Convolutions over time and over image patches.

use crate::case::{Cases, act_name, both, implementations, label};
use crate::compare::Tolerance;
use crate::data::Rng;
use crate::io::{Check, Io};
use ferrum_kernels::{Backend, Conv1dShape, PatchShape};

struct Conv<S> {
    shape: S,
    x: Vec<f32>,
    weight: Vec<f32>,
    bias: Option<Vec<f32>>,
}

fn conv1d<B: Backend>(io: &mut Io<'_, B>, data: &Conv<Conv1dShape>) -> Check {
    let size = data.shape.c_out * data.shape.out_len();
    let x = io.input("x", &data.x)?;
    let weight = io.floats("weight", &data.weight)?;
    let bias = io.optional_floats("bias", data.bias.as_deref())?;
    let mut out = io.output("out", size)?;
    B::conv1d(
        &mut io.ctx,
        &x,
        &weight,
        bias.as_ref(),
        &mut out,
        data.shape,
    )?;
    io.take("out", &out, size)
}

/// Over an input with its zeros written out.
fn conv1d_formula(data: &Conv<Conv1dShape>) -> Vec<Vec<f64>> {
    let Conv1dShape {
        c_in,
        c_out,
        len,
        kernel,
        stride,
        padding,
        groups,
    } = data.shape;
    let padded: Vec<Vec<f64>> = (0..c_in)
        .map(|c| {
            let mut row = vec![0.0; padding];
            row.extend(data.x[c * len..][..len].iter().map(|&x| f64::from(x)));
            row.extend(vec![0.0; padding]);
            row
        })
        .collect();
    let mut out = Vec::new();
    for o in 0..c_out {
        let group = o * groups / c_out;
        let mut t = 0;
        while t + kernel <= len + 2 * padding {
            let mut sum = data.bias.as_ref().map_or(0.0, |bias| f64::from(bias[o]));
            for c in 0..c_in / groups {
                for tap in 0..kernel {
                    let weight = data.weight[(o * (c_in / groups) + c) * kernel + tap];
                    sum += f64::from(weight) * padded[group * (c_in / groups) + c][t + tap];
                }
            }
            out.push(sum);
            t += stride;
        }
    }
    vec![out]
}

fn conv2d_patch<B: Backend>(io: &mut Io<'_, B>, data: &Conv<PatchShape>) -> Check {
    let PatchShape {
        height,
        width,
        patch,
        out,
        ..
    } = data.shape;
    let size = (height / patch) * (width / patch) * out;
    let image = io.input("image", &data.x)?;
    let weight = io.floats("weight", &data.weight)?;
    let bias = io.optional_floats("bias", data.bias.as_deref())?;
    let mut rows = io.output("rows", size)?;
    B::conv2d_patch(
        &mut io.ctx,
        &image,
        &weight,
        bias.as_ref(),
        &mut rows,
        data.shape,
    )?;
    io.take("rows", &rows, size)
}

fn conv2d_formula(data: &Conv<PatchShape>) -> Vec<Vec<f64>> {
    let PatchShape {
        channels,
        height,
        width,
        patch,
        out,
    } = data.shape;
    let (down, across) = (height / patch, width / patch);
    let mut rows = vec![0.0; down * across * out];
    for (at, row) in rows.iter_mut().enumerate() {
        let (o, py, px) = (at % out, at / out / across, at / out % across);
        *row = data.bias.as_ref().map_or(0.0, |bias| f64::from(bias[o]));
        for c in 0..channels {
            for y in 0..patch {
                for x in 0..patch {
                    let pixel = data.x[(c * height + py * patch + y) * width + px * patch + x];
                    let weight = data.weight[((o * channels + c) * patch + y) * patch + x];
                    *row += f64::from(pixel) * f64::from(weight);
                }
            }
        }
    }
    vec![rows]
}

fn make_1d(rng: &mut Rng, shape: Conv1dShape, bias: bool) -> Conv<Conv1dShape> {
    let Conv1dShape {
        c_in,
        c_out,
        len,
        kernel,
        groups,
        ..
    } = shape;
    Conv {
        shape,
        x: rng.acts(c_in * len, 1.0),
        weight: rng.floats(c_out * (c_in / groups) * kernel, 0.3),
        bias: bias.then(|| rng.floats(c_out, 1.0)),
    }
}

fn make_2d(rng: &mut Rng, shape: PatchShape, bias: bool) -> Conv<PatchShape> {
    let PatchShape {
        channels,
        height,
        width,
        patch,
        out,
    } = shape;
    Conv {
        shape,
        x: rng.acts(channels * height * width, 1.0),
        weight: rng.floats(out * channels * patch * patch, 0.3),
        bias: bias.then(|| rng.floats(out, 1.0)),
    }
}

const PLAIN: Conv1dShape = Conv1dShape {
    c_in: 3,
    c_out: 5,
    len: 31,
    kernel: 3,
    stride: 1,
    padding: 1,
    groups: 1,
};

/// What makes a case of a shape.
type Change<S> = fn(&mut S);

const SHAPES_1D: &[(&str, Change<Conv1dShape>)] = &[
    ("3 taps", |_| {}),
    ("1 tap", |s| (s.kernel, s.padding) = (1, 0)),
    ("stride 2", |s| s.stride = 2),
    ("stride 5 over 7 taps", |s| {
        (s.stride, s.kernel, s.padding) = (5, 7, 3)
    }),
    ("no padding", |s| s.padding = 0),
    ("wide padding", |s| s.padding = 9),
    ("one step", |s| s.len = 1),
    ("as many taps as steps", |s| (s.len, s.padding) = (3, 0)),
    ("more taps than steps", |s| (s.len, s.padding) = (2, 0)),
    ("no steps", |s| (s.len, s.padding) = (0, 0)),
    ("groups", |s| (s.c_in, s.c_out, s.groups) = (6, 4, 2)),
    ("each channel alone", |s| {
        (s.c_in, s.c_out, s.groups) = (7, 7, 7)
    }),
    ("two filters for each channel", |s| {
        (s.c_in, s.c_out, s.groups) = (3, 6, 3)
    }),
    ("80 channels to 65", |s| {
        (s.c_in, s.c_out, s.len) = (80, 65, 50)
    }),
];

const IMAGE: PatchShape = PatchShape {
    channels: 3,
    height: 8,
    width: 12,
    patch: 4,
    out: 7,
};

const SHAPES_2D: &[(&str, Change<PatchShape>)] = &[
    ("8 × 12 by 4", |_| {}),
    ("one patch", |s| (s.height, s.width) = (4, 4)),
    ("patches of one pixel", |s| s.patch = 1),
    ("one channel", |s| s.channels = 1),
    ("patches of 7 to 33", |s| {
        (s.height, s.width, s.patch, s.out) = (21, 14, 7, 33)
    }),
    ("patches of 14 to 65", |s| {
        (s.height, s.width, s.patch, s.out) = (28, 28, 14, 65)
    }),
    ("no image", |s| s.height = 0),
];

pub(super) fn cases<B: Backend>(cases: &mut Cases<B>) {
    let act = act_name::<B>();
    for bias in [false, true] {
        let suffix = if bias { ", with bias" } else { "" };
        for &(name, change) in SHAPES_1D {
            let mut shape = PLAIN;
            change(&mut shape);
            let case = label(
                "conv1d",
                act,
                Tolerance::F32_SUMS,
                format!("{name}{suffix}"),
            );
            let make = move |rng: &mut Rng| make_1d(rng, shape, bias);
            cases.add(case, make, implementations!(conv1d, conv1d_formula));
        }
        for &(name, change) in SHAPES_2D {
            let mut shape = IMAGE;
            change(&mut shape);
            let case = label(
                "conv2d_patch",
                act,
                Tolerance::F32_SUMS,
                format!("{name}{suffix}"),
            );
            let make = move |rng: &mut Rng| make_2d(rng, shape, bias);
            cases.add(case, make, implementations!(conv2d_patch, conv2d_formula));
        }
    }
    cases.rejects_short_buffers(
        ("conv1d", act),
        |rng| make_1d(rng, PLAIN, true),
        both!(conv1d),
    );
    cases.rejects_short_buffers(
        ("conv2d_patch", act),
        |rng| make_2d(rng, IMAGE, true),
        both!(conv2d_patch),
    );
}
