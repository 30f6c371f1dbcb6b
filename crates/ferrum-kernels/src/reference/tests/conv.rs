//! Convolutions by hand.

use super::*;

const SHAPE: Conv1dShape = Conv1dShape {
    c_in: 1,
    c_out: 1,
    len: 4,
    kernel: 3,
    stride: 1,
    padding: 0,
    groups: 1,
};

fn conv1d(
    x: &[f32],
    weight: &[f32],
    bias: Option<&[f32]>,
    out_len: usize,
    shape: Conv1dShape,
) -> ferrum_types::Result<RefBuffer<f32>> {
    let mut out = poisoned(out_len);
    let bias = bias.map(buf);
    R::conv1d(
        &mut ctx(),
        &buf(x),
        &buf(weight),
        bias.as_ref(),
        &mut out,
        shape,
    )?;
    Ok(out)
}

#[test]
fn conv1d_pads_strides_and_groups() {
    let x = [1.0, 2.0, 3.0, 4.0];
    let taps = [1.0, 10.0, 100.0];
    struct Case {
        stride: usize,
        padding: usize,
        expected: &'static [f32],
    }
    for case in [
        Case {
            stride: 1,
            padding: 0,
            expected: &[321.0, 432.0],
        },
        Case {
            stride: 1,
            padding: 1,
            expected: &[210.0, 321.0, 432.0, 43.0],
        },
        Case {
            stride: 2,
            padding: 1,
            expected: &[210.0, 432.0],
        },
        Case {
            stride: 3,
            padding: 0,
            expected: &[321.0],
        },
        Case {
            stride: 5,
            padding: 3,
            expected: &[0.0, 43.0],
        },
    ] {
        let shape = Conv1dShape {
            stride: case.stride,
            padding: case.padding,
            ..SHAPE
        };
        assert_eq!(shape.out_len(), case.expected.len());
        let out = conv1d(&x, &taps, None, case.expected.len(), shape).unwrap();
        assert_close(&format!("{shape:?}"), &out, case.expected);
    }

    // Two channels summed; two channels apart.
    let two = [1.0, 2.0, 3.0, 10.0, 20.0, 30.0];
    let shape = Conv1dShape {
        c_in: 2,
        c_out: 2,
        len: 3,
        kernel: 1,
        ..SHAPE
    };
    let bias = [0.5, -0.5];
    let out = conv1d(&two, &[1.0, 2.0, 3.0, 4.0], Some(&bias), 6, shape).unwrap();
    assert_close("dense", &out, &[21.5, 42.5, 63.5, 42.5, 85.5, 128.5]);
    let apart = Conv1dShape { groups: 2, ..shape };
    let out = conv1d(&two, &[2.0, 3.0], Some(&bias), 6, apart).unwrap();
    assert_close("groups", &out, &[2.5, 4.5, 6.5, 29.5, 59.5, 89.5]);
}

#[test]
fn conv1d_refuses_what_does_not_fit() {
    let x = [0.0; 4];
    let attempt = |shape| conv1d(&x, &[0.0; 3], None, 2, shape);
    attempt(SHAPE).unwrap();
    assert_eq!(Conv1dShape { kernel: 5, ..SHAPE }.out_len(), 0);
    conv1d(&x, &[0.0; 5], None, 0, Conv1dShape { kernel: 5, ..SHAPE }).unwrap();
    assert_invalid("kernel", attempt(Conv1dShape { kernel: 0, ..SHAPE }));
    assert_invalid("stride", attempt(Conv1dShape { stride: 0, ..SHAPE }));
    assert_invalid("groups", attempt(Conv1dShape { groups: 0, ..SHAPE }));
    assert_invalid("groups", attempt(Conv1dShape { groups: 2, ..SHAPE }));
    assert_invalid(
        "padding",
        attempt(Conv1dShape {
            padding: usize::MAX,
            ..SHAPE
        }),
    );
    assert_short("x", attempt(Conv1dShape { len: 5, ..SHAPE }));
    assert_short("weight", attempt(Conv1dShape { kernel: 4, ..SHAPE }));
    assert_short("out", conv1d(&x, &[0.0; 3], None, 1, SHAPE));
}

#[test]
fn patches_are_rows_in_reading_order() {
    // 2 channels of 2 × 4; patches of 2 × 2. The weights pick one pixel, and sum a channel.
    let image: Vec<f32> = (0..16).map(|i| i as f32).collect();
    let mut weight = [0.0; 16];
    weight[2] = 1.0;
    weight[12..].fill(1.0);
    let shape = PatchShape {
        channels: 2,
        height: 2,
        width: 4,
        patch: 2,
        out: 2,
    };
    let mut rows = poisoned(4);
    let bias = buf(&[100.0, 0.0]);
    R::conv2d_patch(
        &mut ctx(),
        &buf(&image),
        &buf(&weight),
        Some(&bias),
        &mut rows,
        shape,
    )
    .unwrap();
    // Pixel (0, 1, 0) is 4 and 6; channel 1 has 8 9 12 13 and 10 11 14 15.
    assert_close("patches", &rows, &[104.0, 42.0, 106.0, 50.0]);

    // Two patches down, one across: the second begins at line 2.
    let tall = PatchShape {
        channels: 1,
        height: 4,
        width: 2,
        patch: 2,
        out: 1,
    };
    let mut rows = poisoned(2);
    R::conv2d_patch(
        &mut ctx(),
        &buf(&image),
        &buf(&weight[..4]),
        None,
        &mut rows,
        tall,
    )
    .unwrap();
    assert_close("tall", &rows, &[2.0, 6.0]);

    let mut attempt = |shape| {
        R::conv2d_patch(
            &mut ctx(),
            &buf(&image),
            &buf(&weight),
            None,
            &mut rows,
            shape,
        )
    };
    assert_invalid("patch", attempt(PatchShape { patch: 0, ..tall }));
    assert_invalid("width", attempt(PatchShape { width: 3, ..tall }));
    assert_short("image", attempt(PatchShape { height: 10, ..tall }));
}
