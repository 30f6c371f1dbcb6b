//! Convolutions over time and over image patches.

use crate::case::{Cases, act_name, label, probe};
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

const SHAPES_1D: &[(&str, Conv1dShape)] = &[
    ("3 taps", PLAIN),
    (
        "1 tap",
        Conv1dShape {
            kernel: 1,
            padding: 0,
            ..PLAIN
        },
    ),
    ("stride 2", Conv1dShape { stride: 2, ..PLAIN }),
    (
        "stride 5 over 7 taps",
        Conv1dShape {
            stride: 5,
            kernel: 7,
            padding: 3,
            ..PLAIN
        },
    ),
    (
        "no padding",
        Conv1dShape {
            padding: 0,
            ..PLAIN
        },
    ),
    (
        "wide padding",
        Conv1dShape {
            padding: 9,
            ..PLAIN
        },
    ),
    ("one step", Conv1dShape { len: 1, ..PLAIN }),
    (
        "as many taps as steps",
        Conv1dShape {
            len: 3,
            padding: 0,
            ..PLAIN
        },
    ),
    (
        "more taps than steps",
        Conv1dShape {
            len: 2,
            padding: 0,
            ..PLAIN
        },
    ),
    (
        "no steps",
        Conv1dShape {
            len: 0,
            padding: 0,
            ..PLAIN
        },
    ),
    (
        "groups",
        Conv1dShape {
            c_in: 6,
            c_out: 4,
            groups: 2,
            ..PLAIN
        },
    ),
    (
        "each channel alone",
        Conv1dShape {
            c_in: 7,
            c_out: 7,
            groups: 7,
            ..PLAIN
        },
    ),
    (
        "two filters for each channel",
        Conv1dShape {
            c_in: 3,
            c_out: 6,
            groups: 3,
            ..PLAIN
        },
    ),
    (
        "80 channels to 65",
        Conv1dShape {
            c_in: 80,
            c_out: 65,
            len: 50,
            ..PLAIN
        },
    ),
];

const IMAGE: PatchShape = PatchShape {
    channels: 3,
    height: 8,
    width: 12,
    patch: 4,
    out: 7,
};

const SHAPES_2D: &[(&str, PatchShape)] = &[
    ("8 × 12 by 4", IMAGE),
    (
        "one patch",
        PatchShape {
            height: 4,
            width: 4,
            ..IMAGE
        },
    ),
    ("patches of one pixel", PatchShape { patch: 1, ..IMAGE }),
    (
        "one channel",
        PatchShape {
            channels: 1,
            ..IMAGE
        },
    ),
    (
        "patches of 7 to 33",
        PatchShape {
            height: 21,
            width: 14,
            patch: 7,
            out: 33,
            ..IMAGE
        },
    ),
    (
        "patches of 14 to 65",
        PatchShape {
            height: 28,
            width: 28,
            patch: 14,
            out: 65,
            ..IMAGE
        },
    ),
    ("no image", PatchShape { height: 0, ..IMAGE }),
];

pub(super) fn cases<B: Backend>(cases: &mut Cases<B>) {
    let act = act_name::<B>();
    for bias in [false, true] {
        let suffix = if bias { ", with bias" } else { "" };
        for &(name, shape) in SHAPES_1D {
            let case = label(
                "conv1d",
                act,
                Tolerance::F32_SUMS,
                format!("{name}{suffix}"),
            );
            let make = move |rng: &mut Rng| make_1d(rng, shape, bias);
            cases.add(case, make, probe!(conv1d, conv1d_formula));
        }
        for &(name, shape) in SHAPES_2D {
            let case = label(
                "conv2d_patch",
                act,
                Tolerance::F32_SUMS,
                format!("{name}{suffix}"),
            );
            let make = move |rng: &mut Rng| make_2d(rng, shape, bias);
            cases.add(case, make, probe!(conv2d_patch, conv2d_formula));
        }
    }
    cases.short(
        ("conv1d", act),
        |rng| make_1d(rng, PLAIN, true),
        conv1d::<B>,
    );
    cases.short(
        ("conv2d_patch", act),
        |rng| make_2d(rng, IMAGE, true),
        conv2d_patch::<B>,
    );
}
