//! Products, look-ups, convolutions.

use super::*;
use ferrum_types::{Error, FloatElement, SrcDtype};
use half::{bf16, f16};

const DTYPES: [SrcDtype; 3] = [SrcDtype::F32, SrcDtype::F16, SrcDtype::BF16];

/// Little-endian bytes of `x`, rounded to `dtype`.
fn encode(x: &[f32], dtype: SrcDtype) -> Vec<u8> {
    let bytes = |x: &f32| match dtype {
        SrcDtype::F32 => x.to_le_bytes().to_vec(),
        SrcDtype::F16 => f16::from_f32(*x).to_le_bytes().to_vec(),
        SrcDtype::BF16 => bf16::from_f32(*x).to_le_bytes().to_vec(),
    };
    x.iter().flat_map(bytes).collect()
}

#[derive(Clone)]
struct Gemm {
    shape: GemmShape,
    x: Vec<f32>,
    /// Type and rows of each part.
    parts: Vec<(SrcDtype, usize)>,
    w: Vec<f32>,
}

impl Gemm {
    fn new(seed: u64, shape: GemmShape, parts: &[(SrcDtype, usize)]) -> Self {
        let mut random = Random::new(seed);
        Self {
            shape,
            x: random.vec(shape.rows * shape.k),
            parts: parts.to_vec(),
            w: random.vec(shape.n * shape.k),
        }
    }

    fn weight<B: Backend>(&self, device: &B) -> B::Weight {
        let mut row = 0;
        let mut bytes = Vec::new();
        for (dtype, rows) in &self.parts {
            let values = &self.w[row * self.shape.k..][..rows * self.shape.k];
            // One byte before: files promise no alignment.
            let mut part = vec![0];
            part.extend(encode(values, *dtype));
            bytes.push(part);
            row += rows;
        }
        let parts: Vec<_> = self
            .parts
            .iter()
            .zip(&bytes)
            .map(|((dtype, rows), bytes)| WeightPart::new(&bytes[1..], *dtype, *rows))
            .collect();
        device.from_weight_parts(&parts, self.shape.k).unwrap()
    }

    /// The product of rows `first..first + rows`.
    fn product<B: Backend>(&self, device: &B, first: usize, rows: usize) -> Vec<f32> {
        let GemmShape { n, k, .. } = self.shape;
        let mut ctx = device.new_context().unwrap();
        let x = act(device, &self.x[first * k..][..rows * k]);
        let mut out = poison(device, rows * n);
        let shape = GemmShape { rows, n, k };
        B::gemm(&mut ctx, &x, &self.weight(device), &mut out, shape).unwrap();
        host::<B, _>(&mut ctx, &out)
    }
}

impl Op for Gemm {
    fn run<B: AnyBackend>(&self, device: &B) -> Vec<f32> {
        self.product(device, 0, self.shape.rows)
    }

    fn has_bf16(&self) -> bool {
        let bf16 = self.parts.iter().all(|(dtype, _)| *dtype == SrcDtype::BF16);
        // An odd number of inputs makes no pairs.
        bf16 && self.shape.k.is_multiple_of(2)
    }

    fn split_error(&self) -> Option<f64> {
        // Parts of different types become f32.
        let of = |dtype| self.parts.iter().all(|(part, _)| *part == dtype);
        (!of(SrcDtype::F16) && !of(SrcDtype::BF16)).then_some(SPLIT_NUMBERS)
    }
}

#[test]
fn products_of_every_size_and_type() {
    let shapes = [
        (0, 5, 7),
        (1, 1, 1),
        (1, 0, 9),
        (2, 5, 0),
        (1, 33, 65),
        (2, 64, 31),
        (3, 31, 257),
        (4, 95, 100),
        (5, 300, 300),
        (6, 17, 20),
        (7, 129, 64),
        (12, 70, 90),
        (13, 33, 513),
        (29, 200, 260),
        (1, 1000, 700),
        // Several chunks of tiles, the last tile smaller, and several blocks of steps; with rows and with panels for each thread.
        (203, 77, 1000),
        (203, 301, 770),
    ];
    for (i, (rows, n, k)) in shapes.into_iter().enumerate() {
        let shape = GemmShape { rows, n, k };
        for dtype in DTYPES {
            let op = Gemm::new(i as u64, shape, &[(dtype, n)]);
            check(&format!("{shape:?} {dtype}"), &op, 1e-12);
        }
    }
}

#[test]
fn rows_that_are_rounded_to_bf16() {
    let to_bf16 = |x: &f32| FloatElement::to_f32(bf16::from_f32(*x));
    for (rows, n, k) in [
        (1, 33, 64),
        (2, 70, 2),
        (7, 129, 600),
        (40, 300, 258),
        (203, 77, 1600),
        (3, 40, 7),
    ] {
        let shape = GemmShape { rows, n, k };
        let mut op = Gemm::new(k as u64, shape, &[(SrcDtype::BF16, n)]);
        let exact = op.run(&ReferenceBackend::new());
        let devices = rounding_devices();
        let first = op.run(&devices[0]);
        for (i, device) in devices.iter().enumerate() {
            let found = op.run(device);
            let error = nmse(&found, &exact);
            let seen = (error > 1e-8) == op.has_bf16();
            assert!(error <= BF16_ROWS && seen, "{shape:?}: {error:e}");
            for row in [0, rows / 2, rows - 1] {
                let alone = op.product(device, row, 1);
                let same = bits(&alone) == bits(&found[row * n..][..n]);
                assert!(same, "{shape:?}: row {row} of {device:?}");
            }
            // An instruction may do it otherwise.
            let same = i > 1 || bits(&found) == bits(&first);
            assert!(same, "{shape:?}: {device:?}");
        }
        // Of rows that are bf16 already, nothing is lost.
        op.x = op.x.iter().map(to_bf16).collect();
        let exact = op.run(&ReferenceBackend::new());
        for device in &devices {
            let error = nmse(&op.run(device), &exact);
            assert!(error <= 1e-12, "{shape:?}: {error:e}");
        }
    }
}

#[test]
fn rows_of_weights_for_dot_products_are_read_back() {
    let device = rounding_devices().remove(0);
    let mut random = Random::new(4);
    let w = random.vec(70 * 6);
    let bytes = encode(&w, SrcDtype::BF16);
    let mat = MatShape { rows: 70, cols: 6 };
    let table = device
        .from_weight_bytes(&bytes, SrcDtype::BF16, mat)
        .unwrap();
    let ids = device.from_slice(&(0..70).collect::<Vec<i32>>()).unwrap();
    let mut ctx = device.new_context().unwrap();
    let mut out = poison(&device, 70 * 6);
    let shape = RowShape { rows: 70, dim: 6 };
    CpuBackend::embedding_lookup(&mut ctx, &table, &ids, &mut out, shape).unwrap();
    let expected: Vec<f32> = w
        .iter()
        .map(|x| FloatElement::to_f32(bf16::from_f32(*x)))
        .collect();
    assert_eq!(host::<CpuBackend, _>(&mut ctx, &out), expected);
}

#[test]
fn fused_parts_of_one_type_or_several() {
    let shape = GemmShape {
        rows: 3,
        n: 100,
        k: 37,
    };
    for dtypes in [
        [SrcDtype::BF16; 3],
        [SrcDtype::F16, SrcDtype::BF16, SrcDtype::F32],
        [SrcDtype::F16, SrcDtype::F16, SrcDtype::BF16],
    ] {
        let parts: Vec<_> = dtypes.into_iter().zip([50, 33, 17]).collect();
        let op = Gemm::new(5, shape, &parts);
        check(&format!("{dtypes:?}"), &op, 1e-12);
    }
}

#[test]
fn a_row_does_not_depend_on_the_others() {
    let shape = GemmShape {
        rows: 203,
        n: 77,
        k: 1000,
    };
    let ranges = [
        (0, 1),
        (39, 1),
        (202, 1),
        (7, 2),
        (5, 3),
        (198, 5),
        (11, 12),
        (90, 13),
        (1, 38),
        (1, 202),
    ];
    for dtype in DTYPES {
        let op = Gemm::new(3, shape, &[(dtype, shape.n)]);
        for device in devices().into_iter().chain(rounding_devices()) {
            let all = op.product(&device, 0, shape.rows);
            for (first, rows) in ranges {
                let part = op.product(&device, first, rows);
                let same = bits(&part) == bits(&all[first * shape.n..][..rows * shape.n]);
                assert!(same, "{dtype} {device:?}: rows {first}+{rows}");
            }
        }
    }
}

#[test]
fn special_weights_stay_what_they_are() {
    let special = [
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::NAN,
        -0.0,
        6e-8,
        -6e-5,
        65504.0,
        1e-40,
    ];
    for dtype in DTYPES {
        let w: Vec<f32> = special.iter().cycle().take(40 * 8).copied().collect();
        let bytes = encode(&w, dtype);
        let read = |device: &dyn Fn(&[u8], SrcDtype) -> Vec<f32>| device(&bytes, dtype);
        let ids: Vec<i32> = (-1..41).collect();
        let shape = RowShape { rows: 42, dim: 8 };
        fn look_up<B: Backend>(
            device: &B,
            bytes: &[u8],
            dtype: SrcDtype,
            ids: &[i32],
            shape: RowShape,
        ) -> Vec<f32> {
            let mut ctx = device.new_context().unwrap();
            let mat = MatShape { rows: 40, cols: 8 };
            let part = WeightPart::new(bytes, dtype, mat.rows);
            let table = device.from_table_parts(&[part], mat.cols).unwrap();
            let ids = device.from_slice(ids).unwrap();
            let mut out: Residual<B> = of_role(device, &vec![f32::NAN; shape.rows * shape.dim]);
            B::embedding_lookup(&mut ctx, &table, &ids, &mut out, shape).unwrap();
            host::<B, _>(&mut ctx, &out)
        }
        let expected = read(&|b, d| look_up(&ReferenceBackend::new(), b, d, &ids, shape));
        for device in devices() {
            let found = read(&|b, d| look_up(&device, b, d, &ids, shape));
            assert_eq!(bits(&found), bits(&expected), "{dtype} {device:?}");
            // The same weight in a product: rows of the identity read its columns, unless a lane
            // holds no number.
            // Dot products of bf16 may take subnormal numbers as zeros.
            let flushed = rounds(&device) && dtype == SrcDtype::BF16;
            let taken = |x: f32| x.is_finite() && !(flushed && x.is_subnormal());
            let finite: Vec<f32> = w.iter().map(|x| if taken(*x) { *x } else { 2.0 }).collect();
            let mut ctx = device.new_context().unwrap();
            let mat = MatShape { rows: 40, cols: 8 };
            let weight = device
                .from_weight_bytes(&encode(&finite, dtype), dtype, mat)
                .unwrap();
            let identity: Vec<f32> = (0..64).map(|i| f32::from(i % 9 == 0)).collect();
            let x = act(&device, &identity);
            let mut out = poison(&device, 8 * 40);
            let shape = GemmShape {
                rows: 8,
                n: 40,
                k: 8,
            };
            CpuBackend::gemm(&mut ctx, &x, &weight, &mut out, shape).unwrap();
            for (i, y) in host::<CpuBackend, _>(&mut ctx, &out)
                .into_iter()
                .enumerate()
            {
                let (k, n) = (i / 40, i % 40);
                let expected = match dtype {
                    SrcDtype::F32 => finite[n * 8 + k],
                    SrcDtype::F16 => f16::from_f32(finite[n * 8 + k]).to_f32(),
                    SrcDtype::BF16 => FloatElement::to_f32(bf16::from_f32(finite[n * 8 + k])),
                };
                let split = device.exec().level.splits_f32() && dtype == SrcDtype::F32;
                let near = (y - expected).abs() <= expected.abs() / f32::from(1u16 << 15) + 1e-37;
                let right = if split { near } else { y == expected };
                assert!(
                    right,
                    "{dtype} {device:?} {k} {n}: {y}, expected {expected}"
                );
            }
        }
    }
}

/// Numbers that cannot be split, beside some that can: each row is what the reference says.
#[test]
fn rows_of_extreme_numbers() {
    let extreme = [
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::NAN,
        f32::MAX,
        f32::MIN,
        3.39e38,
        1e30,
        -1e30,
        1e-30,
        1e-40,
        0.0,
    ];
    let shape = GemmShape {
        rows: 2 * extreme.len() + 40,
        n: 45,
        k: 70,
    };
    let plain = Gemm::new(8, shape, &[(SrcDtype::F32, shape.n)]);
    let mut special_rows = plain.clone();
    for (i, x) in extreme.into_iter().enumerate() {
        // Alone, beside its negative.
        special_rows.x[2 * i * shape.k + 7 * i % shape.k] = x;
        special_rows.x[(2 * i + 1) * shape.k + 3] = x;
        special_rows.x[(2 * i + 1) * shape.k + 60] = -x;
    }
    let mut special_weights = plain.clone();
    for (i, x) in extreme.into_iter().enumerate() {
        special_weights.w[4 * i * shape.k + 11 * i % shape.k] = x;
    }
    // Some without infinities, so that products are split.
    let mut large_weights = plain.clone();
    for (i, x) in [1e30, -3e37, 1e-30, 1e-40].into_iter().enumerate() {
        large_weights.w[4 * i * shape.k + 11 * i % shape.k] = x;
    }
    for (what, op) in [
        ("rows", special_rows),
        ("weights", special_weights),
        ("large weights", large_weights),
    ] {
        let expected = op.run(&ReferenceBackend::new());
        for device in devices() {
            let found = op.run(&device);
            for (i, (found, expected)) in found.iter().zip(&expected).enumerate() {
                let (row, column) = (i / shape.n, i % shape.n);
                let size = |k: usize| {
                    f64::from(op.x[row * shape.k + k]) * f64::from(op.w[column * shape.k + k])
                };
                let limit = (0..shape.k).map(|k| size(k).abs()).sum::<f64>() * 4e-5 + 1e-37;
                let error = (f64::from(*found) - f64::from(*expected)).abs();
                let same = found == expected || found.is_nan() && expected.is_nan();
                assert!(
                    same || error <= limit,
                    "{what}: {device:?}, row {row}, column {column}: {found}, expected {expected}"
                );
            }
        }
    }
}

#[test]
fn wrong_sizes_are_errors() {
    let device = CpuBackend::open(0).unwrap();
    let mut ctx = device.new_context().unwrap();
    let mat = MatShape { rows: 4, cols: 3 };
    let bytes = [0u8; 48];
    assert!(matches!(
        device.from_weight_bytes(&bytes[1..], SrcDtype::F32, mat),
        Err(Error::Shape { .. })
    ));
    let huge = MatShape {
        rows: usize::MAX,
        cols: usize::MAX,
    };
    assert!(
        device
            .from_weight_bytes(&bytes, SrcDtype::F32, huge)
            .is_err()
    );
    let weight = device
        .from_weight_bytes(&bytes, SrcDtype::F32, mat)
        .unwrap();
    let x = act(&device, &[0.0; 6]);
    let mut out = poison(&device, 8);
    let mut gemm =
        |rows, n, k| CpuBackend::gemm(&mut ctx, &x, &weight, &mut out, GemmShape { rows, n, k });
    assert!(gemm(2, 4, 3).is_ok());
    assert!(matches!(gemm(3, 4, 3), Err(Error::Shape { .. })));
    assert!(matches!(
        gemm(usize::MAX, 4, 3),
        Err(Error::InvalidArgument { .. })
    ));
    assert!(matches!(gemm(2, 3, 4), Err(Error::InvalidArgument { .. })));
}

struct Conv1d(Conv1dShape, u64);

impl Op for Conv1d {
    fn run<B: AnyBackend>(&self, device: &B) -> Vec<f32> {
        let Self(shape, seed) = *self;
        let mut random = Random::new(seed);
        let mut ctx = device.new_context().unwrap();
        let x = act(device, &random.vec(shape.c_in * shape.len));
        let taps = shape.c_in / shape.groups * shape.kernel;
        let weight = device.from_slice(&random.vec(shape.c_out * taps)).unwrap();
        let bias = device.from_slice(&random.vec(shape.c_out)).unwrap();
        let bias = (seed % 2 == 0).then_some(&bias);
        let mut out = poison(device, shape.c_out * shape.out_len());
        B::conv1d(&mut ctx, &x, &weight, bias, &mut out, shape).unwrap();
        host::<B, _>(&mut ctx, &out)
    }
}

#[test]
fn convolutions_over_time() {
    let shapes = [
        (1, 1, 5, 1, 1, 0, 1),
        (3, 5, 40, 3, 1, 1, 1),
        (6, 4, 33, 3, 2, 1, 2),
        (4, 4, 70, 4, 3, 5, 4),
        (2, 30, 2, 5, 1, 0, 1),
        (20, 13, 100, 3, 2, 1, 1),
        (30, 50, 200, 3, 1, 1, 1),
    ];
    for (i, s) in shapes.into_iter().enumerate() {
        let (c_in, c_out, len, kernel, stride, padding, groups) = s;
        let shape = Conv1dShape {
            c_in,
            c_out,
            len,
            kernel,
            stride,
            padding,
            groups,
        };
        check(&format!("{shape:?}"), &Conv1d(shape, i as u64), 1e-12);
    }
}

struct Patches(PatchShape);

impl Op for Patches {
    fn run<B: AnyBackend>(&self, device: &B) -> Vec<f32> {
        let shape = self.0;
        let mut random = Random::new(9);
        let mut ctx = device.new_context().unwrap();
        let image = act(
            device,
            &random.vec(shape.channels * shape.height * shape.width),
        );
        let taps = shape.channels * shape.patch * shape.patch;
        let weight = device.from_slice(&random.vec(shape.out * taps)).unwrap();
        let bias = device.from_slice(&random.vec(shape.out)).unwrap();
        let patches = shape.height / shape.patch * (shape.width / shape.patch);
        let mut rows = poison(device, patches * shape.out);
        B::conv2d_patch(&mut ctx, &image, &weight, Some(&bias), &mut rows, shape).unwrap();
        host::<B, _>(&mut ctx, &rows)
    }
}

#[test]
fn image_patches() {
    for (channels, height, width, patch, out) in
        [(1, 2, 2, 2, 1), (3, 28, 42, 14, 20), (2, 30, 35, 5, 7)]
    {
        let shape = PatchShape {
            channels,
            height,
            width,
            patch,
            out,
        };
        check(&format!("{shape:?}"), &Patches(shape), 1e-12);
    }
}
