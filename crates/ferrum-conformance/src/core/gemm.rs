//! Dense matrices: products, look-ups, the largest of a row.

use crate::case::{Cases, act_name, both, implementations, label};
use crate::compare::Tolerance;
use crate::data::{Dense, Rng};
use crate::io::{Check, Io, Refusals, wrong};
use crate::naive;
use ferrum_kernels::{Activation, Backend, GeluKind, GemmShape, MatShape, RowShape, WeightPart};
use ferrum_types::{Error, SrcDtype};

/// Dense weight types; also the dtypes under which these ops are reported.
const DTYPES: [SrcDtype; 3] = [SrcDtype::F32, SrcDtype::F16, SrcDtype::BF16];

const SHAPES: &[(usize, usize, usize)] = &[
    (0, 7, 31),
    (1, 1, 1),
    (1, 7, 31),
    (1, 33, 65),
    (1, 257, 100),
    (1, 130, 1025),
    (2, 31, 7),
    (3, 65, 33),
    (4, 16, 96),
    (5, 100, 257),
    (7, 257, 100),
    (8, 64, 64),
    (17, 33, 128),
    (33, 65, 31),
    (65, 48, 96),
    (100, 130, 67),
    (64, 512, 256),
    (130, 260, 515),
    (150, 264, 200),
    (16, 70, 1040),
    (3, 9, 2060),
    (1, 7, 4100),
    (1, 1000, 2049),
];

struct Gemm {
    shape: GemmShape,
    x: Vec<f32>,
    /// Rows of the weight, in parts that may differ in type.
    parts: Vec<Dense>,
}

impl Gemm {
    fn weights(&self) -> Vec<f32> {
        self.parts
            .iter()
            .flat_map(|part| part.values.clone())
            .collect()
    }
}

fn load<B: Backend>(io: &Io<'_, B>, parts: &[Dense], cols: usize) -> Check<B::Weight> {
    let parts: Vec<WeightPart<'_>> = parts
        .iter()
        .map(|part| WeightPart::new(part.bytes(), part.dtype, part.values.len() / cols))
        .collect();
    match &parts[..] {
        [one] => {
            let shape = MatShape {
                rows: one.rows,
                cols,
            };
            Ok(io.device.from_weight_bytes(one.bytes, one.dtype, shape)?)
        }
        _ => Ok(io.device.from_weight_parts(&parts, cols)?),
    }
}

/// [`load`] from files in which other elements lie between the rows.
fn load_strided<B: Backend>(io: &Io<'_, B>, parts: &[Dense], cols: usize) -> Check<B::Weight> {
    let files: Vec<_> = parts.iter().map(|part| part.spread(cols, 7)).collect();
    let parts = parts.iter().zip(&files);
    let parts = parts.map(|(part, (bytes, stride))| WeightPart {
        row_stride: Some(*stride),
        ..WeightPart::new(bytes.get(), part.dtype, part.values.len() / cols)
    });
    let parts: Vec<_> = parts.collect();
    Ok(io.device.from_weight_parts(&parts, cols)?)
}

fn gemm<B: Backend>(io: &mut Io<'_, B>, data: &Gemm) -> Check {
    let weight = load(io, &data.parts, data.shape.k)?;
    product(io, data, &weight)
}

fn gemm_strided<B: Backend>(io: &mut Io<'_, B>, data: &Gemm) -> Check {
    let weight = load_strided(io, &data.parts, data.shape.k)?;
    product(io, data, &weight)
}

fn product<B: Backend>(io: &mut Io<'_, B>, data: &Gemm, weight: &B::Weight) -> Check {
    let size = data.shape.rows * data.shape.n;
    let x = io.input("x", &data.x)?;
    let mut out = io.output("out", size)?;
    B::gemm(&mut io.ctx, &x, weight, &mut out, data.shape)?;
    io.take("out", &out, size)
}

fn gemm_formula(data: &Gemm) -> Vec<Vec<f64>> {
    let GemmShape { rows, n, k } = data.shape;
    vec![naive::gemm(&data.x, &data.weights(), rows, n, k)]
}

/// The rows of [`gemm`] one by one, then in twos.
fn gemm_by_rows<B: Backend>(io: &mut Io<'_, B>, data: &Gemm) -> Check {
    let GemmShape { rows, k, .. } = data.shape;
    for (start, len) in [(0, 1), (1, 1), (2, 2), (4, 3), (7, rows - 7)] {
        let part = Gemm {
            shape: GemmShape {
                rows: len,
                ..data.shape
            },
            x: data.x[start * k..][..len * k].to_vec(),
            parts: data.parts.clone(),
        };
        gemm(io, &part)?;
    }
    Ok(())
}

/// A matrix of `[n, k]` in `dtype`, and `rows` of activations.
fn matrix(
    rng: &mut Rng,
    (rows, n, k): (usize, usize, usize),
    dtype: SrcDtype,
    (x_scale, w_scale): (f32, f32),
) -> Gemm {
    Gemm {
        shape: GemmShape { rows, n, k },
        x: rng.acts(rows * k, x_scale),
        parts: vec![Dense::new(dtype, &rng.floats(n * k, w_scale))],
    }
}

fn gemm_cases<B: Backend>(cases: &mut Cases<B>) {
    for dtype in DTYPES {
        let name = dtype.dtype().name();
        let tolerance = weight_tolerance(dtype);
        let case = |text: String| label("gemm", name, tolerance, text);
        for &(rows, n, k) in SHAPES {
            let make = move |rng: &mut Rng| matrix(rng, (rows, n, k), dtype, (1.0, 0.1));
            let case = case(format!("[{rows}, {k}] × [{n}, {k}]"));
            cases.add(case, make, implementations!(gemm, gemm_formula));
        }
        for (text, x_scale, w_scale) in [
            ("large values", 1e4, 1e2),
            ("tiny values", 1e-6, 1e-5),
            ("zeros in x", 0.0, 1.0),
            ("zeros in the weight", 1.0, 0.0),
        ] {
            let scales = (x_scale, w_scale);
            let make = move |rng: &mut Rng| matrix(rng, (3, 33, 66), dtype, scales);
            cases.add(
                case(text.into()),
                make,
                implementations!(gemm, gemm_formula),
            );
        }
        for (text, sizes) in [
            ("rows alone and together", (40, 50, 134)),
            ("340 long rows alone and together", (340, 50, 655)),
        ] {
            let make = move |rng: &mut Rng| matrix(rng, sizes, dtype, (1.0, 0.1));
            cases.same(("gemm", name, text), make, gemm::<B>, gemm_by_rows::<B>);
        }
        let make = move |rng: &mut Rng| matrix(rng, (3, 45, 131), dtype, (1.0, 0.1));
        let text = "a weight with others' elements between its rows";
        cases.same(("gemm", name, text), make, gemm::<B>, gemm_strided::<B>);
        let make = move |rng: &mut Rng| matrix(rng, (3, 7, 34), dtype, (1.0, 0.1));
        cases.rejects_short_buffers(("gemm", name), make, both!(gemm));
    }
    let make = |rng: &mut Rng| {
        let (rows, k) = (3, 65);
        let parts = [(33, SrcDtype::F16), (1, SrcDtype::F32), (7, SrcDtype::BF16)];
        let n = parts.iter().map(|part| part.0).sum();
        Gemm {
            shape: GemmShape { rows, n, k },
            x: rng.acts(rows * k, 1.0),
            parts: parts
                .map(|(n, dtype)| Dense::new(dtype, &rng.floats(n * k, 0.1)))
                .to_vec(),
        }
    };
    let case = label(
        "gemm",
        "f16",
        Tolerance::HALF_STORAGE,
        "parts of f16, f32 and bf16",
    );
    cases.add(case, make, implementations!(gemm, gemm_formula));
}

/// Rows, gates and inputs of products with gate and up.
const GATED: [(usize, usize, usize); 10] = [
    (1, 16, 4104),
    (3, 48, 1032),
    (0, 16, 64),
    (1, 33, 100),
    (1, 257, 1025),
    (2, 32, 64),
    (4, 17, 2060),
    (8, 96, 512),
    (9, 40, 256),
    (70, 32, 128),
];

/// What gates are activated by.
pub(crate) const GATES: [Activation; 3] = [
    Activation::Silu,
    Activation::Gelu(GeluKind::Tanh),
    Activation::Gelu(GeluKind::Exact),
];

struct GatedGemm {
    of: Gemm,
    activation: Activation,
}

fn gemm_gated<B: Backend>(io: &mut Io<'_, B>, data: &GatedGemm) -> Check {
    let Gemm { shape, x, parts } = &data.of;
    let weight = load(io, parts, shape.k)?;
    let (size, x) = (shape.rows * shape.n, io.input("x", x)?);
    let mut room = io.device.alloc(size)?;
    let mut out = io.output("out", size / 2)?;
    let to = (&mut room, &mut out);
    B::gemm_gated(&mut io.ctx, &x, &weight, data.activation, to, *shape)?;
    io.take("out", &out, size / 2)
}

fn gated_formula(data: &GatedGemm) -> Vec<Vec<f64>> {
    let sums = gemm_formula(&data.of);
    vec![naive::gated(data.activation, &sums[0], data.of.shape.n)]
}

fn gated_cases<B: Backend>(cases: &mut Cases<B>) {
    for dtype in DTYPES {
        let name = dtype.dtype().name();
        let all = GATED
            .into_iter()
            .flat_map(|dims| GATES.map(|gate| (dims, gate)));
        for ((rows, half, k), activation) in all {
            let make = move |rng: &mut Rng| GatedGemm {
                of: matrix(rng, (rows, 2 * half, k), dtype, (1.0, 0.1)),
                activation,
            };
            let text = format!("{activation:?}, [{rows}, {k}] × [2 · {half}, {k}]");
            let case = label(
                "gemm_gated",
                name,
                weight_tolerance(dtype).of_product(),
                text,
            );
            cases.add(case, make, implementations!(gemm_gated, gated_formula));
        }
        let few = move |rng: &mut Rng| GatedGemm {
            of: matrix(rng, (3, 32, 34), dtype, (1.0, 0.1)),
            activation: Activation::Silu,
        };
        cases.rejects_short_buffers(("gemm_gated", name), few, both!(gemm_gated));
    }
}

fn weight_tolerance(dtype: SrcDtype) -> Tolerance {
    match dtype {
        SrcDtype::F32 => Tolerance::F32_SUMS,
        SrcDtype::F16 | SrcDtype::BF16 => Tolerance::HALF_STORAGE,
    }
}

/// Bytes of the wrong length are refused at load, whichever part they are in.
fn wrong_weight_bytes<B: Backend>(device: &B, refused: &mut Refusals) -> Check {
    for dtype in DTYPES {
        for len in [
            0,
            dtype.size() * 15 - 1,
            dtype.size() * 15 + 1,
            dtype.size() * 16,
        ] {
            let bytes = vec![0; len];
            let result = device.from_weight_bytes(&bytes, dtype, MatShape { rows: 3, cols: 5 });
            if !matches!(result, Err(Error::Shape { .. })) {
                return wrong(format!(
                    "{len} bytes as [3, 5] of {dtype} gave no shape error"
                ));
            }
            refused.expect(&format!("{len} bytes as [3, 5] of {dtype}"), result)?;
        }
        let row = dtype.size() * 5;
        for (len, stride) in [
            (3 * row, row - 1),
            (2 * (row + 1) + row - 1, row + 1),
            (3 * (row + 1), row + 1),
            (3 * row, usize::MAX),
        ] {
            let bytes = vec![0; len];
            let part = WeightPart {
                row_stride: Some(stride),
                ..WeightPart::new(&bytes, dtype, 3)
            };
            let what = format!("{len} bytes as [3, 5] of {dtype}, {stride} from row to row");
            refused.expect(&what, device.from_weight_parts(&[part], 5))?;
        }
    }
    Ok(())
}

struct Lookup {
    table: Dense,
    ids: Vec<i32>,
    dim: usize,
}

impl Lookup {
    fn shape(&self) -> RowShape {
        RowShape {
            rows: self.ids.len(),
            dim: self.dim,
        }
    }
}

fn embedding_lookup<B: Backend>(io: &mut Io<'_, B>, data: &Lookup) -> Check {
    let rows = data.table.values.len() / data.dim;
    let part = WeightPart::new(data.table.bytes(), data.table.dtype, rows);
    let table = io.device.from_table_parts(&[part], data.dim)?;
    let size = data.ids.len() * data.dim;
    let ids = io.indices("ids", &data.ids)?;
    let mut out = io.output_of::<B::Residual>("out", size)?;
    B::embedding_lookup(&mut io.ctx, &table, &ids, &mut out, data.shape())?;
    io.take("out", &out, size)
}

fn gather_rows<B: Backend>(io: &mut Io<'_, B>, data: &Lookup) -> Check {
    // The rows of `src` end where it ends, so it is exactly as long as they are.
    let src = io.exact(&acts::<B>(&data.table.values))?;
    let size = data.ids.len() * data.dim;
    let rows = io.indices("rows", &data.ids)?;
    let mut out = io.output("out", size)?;
    B::gather_rows(&mut io.ctx, &src, &rows, &mut out, data.shape())?;
    io.take("out", &out, size)
}

fn acts<B: Backend>(values: &[f32]) -> Vec<B::Act> {
    use ferrum_types::FloatElement;
    values.iter().map(|&x| B::Act::from_f32(x)).collect()
}

fn lookup_formula(data: &Lookup) -> Vec<Vec<f64>> {
    let row = |&id: &i32| {
        let start = usize::try_from(id).ok().map(|id| id * data.dim);
        let row = start.and_then(|start| data.table.values.get(start..start + data.dim));
        row.map_or(vec![0.0; data.dim], naive::wide)
    };
    vec![data.ids.iter().flat_map(row).collect()]
}

/// Rows of the table, the first and the last among them, and ids that are in no table.
fn some_rows(rng: &mut Rng, dtype: SrcDtype, table_rows: usize, dim: usize, ids: usize) -> Lookup {
    let values = rng.acts(table_rows * dim, 1.0);
    let mut ids = rng.indices(ids, table_rows);
    let special = [
        table_rows as i32 - 1,
        0,
        -1,
        table_rows as i32,
        i32::MAX,
        i32::MIN,
    ];
    for (id, special) in ids.iter_mut().skip(1).zip(special) {
        *id = special;
    }
    Lookup {
        table: Dense::new(dtype, &values),
        ids,
        dim,
    }
}

fn lookup_cases<B: Backend>(cases: &mut Cases<B>) {
    let act = act_name::<B>();
    let shapes = [
        (1, 1, 1),
        (5, 7, 0),
        (10, 31, 1),
        (100, 65, 9),
        (33, 257, 40),
    ];
    for dtype in DTYPES {
        let name = dtype.dtype().name();
        for (table_rows, dim, ids) in shapes {
            let make = move |rng: &mut Rng| some_rows(rng, dtype, table_rows, dim, ids);
            let text = format!("{ids} of [{table_rows}, {dim}]");
            let case = label("embedding_lookup", name, Tolerance::EXACT, text);
            cases.add(
                case,
                make,
                implementations!(embedding_lookup, lookup_formula),
            );
        }
        let make = move |rng: &mut Rng| some_rows(rng, dtype, 10, 7, 9);
        cases.rejects_short_buffers(("embedding_lookup", name), make, both!(embedding_lookup));
    }
    for (table_rows, dim, ids) in shapes {
        let make = move |rng: &mut Rng| some_rows(rng, SrcDtype::F32, table_rows, dim, ids);
        let text = format!("{ids} of [{table_rows}, {dim}]");
        let case = label("gather_rows", act, Tolerance::EXACT, text);
        cases.add(case, make, implementations!(gather_rows, lookup_formula));
    }
    let make = |rng: &mut Rng| some_rows(rng, SrcDtype::F32, 10, 7, 9);
    cases.rejects_short_buffers(("gather_rows", act), make, both!(gather_rows));
}

struct Rows {
    shape: RowShape,
    x: Vec<f32>,
}

fn argmax_rows<B: Backend>(io: &mut Io<'_, B>, data: &Rows) -> Check {
    let x = io.input_of::<B::Logit>("x", &data.x)?;
    let mut out = io.index_output("out", data.shape.rows)?;
    B::argmax_rows(&mut io.ctx, &x, &mut out, data.shape)?;
    io.take_indices("out", &out, data.shape.rows)
}

/// The lowest index that no element beats.
fn argmax_formula(data: &Rows) -> Vec<Vec<f64>> {
    let best = |row: &[f32]| {
        let beaten = |i: usize| row[i].is_nan() || row.iter().any(|&other| other > row[i]);
        (0..row.len()).find(|&i| !beaten(i)).unwrap_or(0) as f64
    };
    vec![data.x.chunks(data.shape.dim).map(best).collect()]
}

fn argmax_cases<B: Backend>(cases: &mut Cases<B>) {
    let act = act_name::<B>();
    for (rows, dim) in [
        (0, 5),
        (1, 1),
        (1, 7),
        (3, 31),
        (2, 65),
        (5, 257),
        (2, 5003),
    ] {
        let make = move |rng: &mut Rng| Rows {
            shape: RowShape { rows, dim },
            x: rng.acts(rows * dim, 10.0),
        };
        let case = label(
            "argmax_rows",
            act,
            Tolerance::EXACT,
            format!("[{rows}, {dim}]"),
        );
        cases.add(case, make, implementations!(argmax_rows, argmax_formula));
    }
    // Few distinct values, so that every row has many equal largest ones.
    let make = |rng: &mut Rng| Rows {
        shape: RowShape { rows: 20, dim: 300 },
        x: (0..20 * 300).map(|_| rng.below(3) as f32 - 5.0).collect(),
    };
    let case = label("argmax_rows", act, Tolerance::EXACT, "the lowest of equals");
    cases.add(case, make, implementations!(argmax_rows, argmax_formula));
    let make = |rng: &mut Rng| {
        let dim = 70;
        let mut x = rng.acts(6 * dim, 1.0);
        x[..dim].fill(f32::NAN);
        // NaN at the front, at the largest, everywhere but at one; only negative infinities.
        x[dim..dim + 30].fill(f32::NAN);
        x[2 * dim + 64] = f32::NAN;
        x[3 * dim..4 * dim].fill(f32::NAN);
        x[3 * dim + 41] = -1e4;
        x[4 * dim..5 * dim].fill(f32::NEG_INFINITY);
        x[5 * dim + 33] = f32::INFINITY;
        Rows {
            shape: RowShape { rows: 6, dim },
            x,
        }
    };
    let case = label("argmax_rows", act, Tolerance::EXACT, "NaN and infinities");
    cases.add(case, make, implementations!(argmax_rows, argmax_formula));
    let make = |rng: &mut Rng| Rows {
        shape: RowShape { rows: 3, dim: 7 },
        x: rng.acts(3 * 7, 1.0),
    };
    cases.rejects_short_buffers(("argmax_rows", act), make, both!(argmax_rows));
}

pub(super) fn cases<B: Backend>(cases: &mut Cases<B>) {
    gemm_cases(cases);
    gated_cases(cases);
    let case = ("from_weight_bytes", "-", "bytes of the wrong length");
    cases.refuses(case, both!(wrong_weight_bytes));
    lookup_cases(cases);
    argmax_cases(cases);
}
