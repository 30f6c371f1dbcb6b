//! Norms of rows.

use crate::case::{Cases, act_name, both, implementations, label};
use crate::compare::Tolerance;
use crate::data::Rng;
use crate::io::{Check, Io};
use crate::naive;
use ferrum_kernels::{Backend, NormShape};

struct Norm {
    shape: NormShape,
    x: Vec<f32>,
    residual: Vec<f32>,
    weight: Vec<f32>,
    bias: Option<Vec<f32>>,
}

impl Norm {
    fn size(&self) -> usize {
        self.shape.rows * self.shape.dim
    }
}

fn rms_norm<B: Backend>(io: &mut Io<'_, B>, data: &Norm) -> Check {
    let x = io.input("x", &data.x)?;
    let weight = io.floats("weight", &data.weight)?;
    let mut out = io.output("out", data.size())?;
    B::rms_norm(&mut io.ctx, &x, &weight, &mut out, data.shape)?;
    io.take("out", &out, data.size())
}

fn rms_norm_formula(data: &Norm) -> Vec<Vec<f64>> {
    vec![rms_norm_rows(data, &naive::wide(&data.x))]
}

fn rms_norm_rows(data: &Norm, x: &[f64]) -> Vec<f64> {
    let NormShape { dim, eps, .. } = data.shape;
    x.chunks(dim)
        .flat_map(|row| naive::rms_norm(row, &data.weight, eps))
        .collect()
}

fn fused_add_rms_norm<B: Backend>(io: &mut Io<'_, B>, data: &Norm) -> Check {
    let mut residual = io.inout_of::<B::Residual>("residual", &data.residual)?;
    let x = io.input("x", &data.x)?;
    let weight = io.floats("weight", &data.weight)?;
    let mut out = io.output("out", data.size())?;
    B::fused_add_rms_norm(
        &mut io.ctx,
        &mut residual,
        &x,
        &weight,
        &mut out,
        data.shape,
    )?;
    io.take("out", &out, data.size())?;
    io.take("residual", &residual, data.size())
}

fn fused_add_rms_norm_formula(data: &Norm) -> Vec<Vec<f64>> {
    let pairs = data.residual.iter().zip(&data.x);
    let sums: Vec<f64> = pairs.map(|(&r, &x)| f64::from(r) + f64::from(x)).collect();
    vec![rms_norm_rows(data, &sums), sums]
}

fn layer_norm<B: Backend>(io: &mut Io<'_, B>, data: &Norm) -> Check {
    let x = io.input("x", &data.x)?;
    let weight = io.floats("weight", &data.weight)?;
    let bias = io.optional_floats("bias", data.bias.as_deref())?;
    let mut out = io.output("out", data.size())?;
    B::layer_norm(
        &mut io.ctx,
        &x,
        &weight,
        bias.as_ref(),
        &mut out,
        data.shape,
    )?;
    io.take("out", &out, data.size())
}

fn layer_norm_formula(data: &Norm) -> Vec<Vec<f64>> {
    let NormShape { dim, eps, .. } = data.shape;
    let bias = data.bias.as_deref();
    let norm = |row| naive::layer_norm(row, &data.weight, bias, eps);
    vec![data.x.chunks(dim).flat_map(norm).collect()]
}

/// Each row as a call of its own.
fn by_rows<B: Backend>(
    io: &mut Io<'_, B>,
    data: &Norm,
    op: fn(&mut Io<'_, B>, &Norm) -> Check,
) -> Check {
    let NormShape { rows, dim, eps } = data.shape;
    for row in 0..rows {
        let at = row * dim..(row + 1) * dim;
        let row = Norm {
            shape: NormShape { rows: 1, dim, eps },
            x: data.x[at.clone()].to_vec(),
            residual: data.residual[at].to_vec(),
            weight: data.weight.clone(),
            bias: data.bias.clone(),
        };
        op(io, &row)?;
    }
    Ok(())
}

fn rms_norm_by_rows<B: Backend>(io: &mut Io<'_, B>, data: &Norm) -> Check {
    by_rows(io, data, rms_norm)
}

fn layer_norm_by_rows<B: Backend>(io: &mut Io<'_, B>, data: &Norm) -> Check {
    by_rows(io, data, layer_norm)
}

fn make(rng: &mut Rng, (rows, dim): (usize, usize), scale: f32, bias: bool) -> Norm {
    let size = rows * dim;
    Norm {
        shape: NormShape {
            rows,
            dim,
            eps: 1e-6,
        },
        x: rng.acts(size, scale),
        residual: rng.acts(size, scale),
        weight: rng.norm_weights(dim),
        bias: bias.then(|| rng.floats(dim, 0.5)),
    }
}

const SHAPES: &[(usize, usize)] = &[
    (0, 31),
    (1, 1),
    (1, 7),
    (3, 31),
    (2, 33),
    (33, 65),
    (5, 100),
    (1, 1024),
    // More than a block has registers for, in a whole number of wide reads and not.
    (2, 16_392),
    (2, 16_389),
    (4, 2817),
];

pub(super) fn cases<B: Backend>(cases: &mut Cases<B>) {
    let act = act_name::<B>();
    let mut add = |text: String, dims: (usize, usize), scale: f32| {
        let case = |op| label(op, act, Tolerance::NORM, text.clone());
        let plain = move |rng: &mut Rng| make(rng, dims, scale, false);
        cases.add(
            case("rms_norm"),
            plain,
            implementations!(rms_norm, rms_norm_formula),
        );
        let implementations = implementations!(fused_add_rms_norm, fused_add_rms_norm_formula);
        cases.add(case("fused_add_rms_norm"), plain, implementations);
        // A row of one element has no variance: only its sign of rounding would be compared.
        if dims.1 > 1 {
            cases.add(
                case("layer_norm"),
                plain,
                implementations!(layer_norm, layer_norm_formula),
            );
            let biased = move |rng: &mut Rng| make(rng, dims, scale, true);
            let mut case = case("layer_norm");
            case.name.push_str(", with bias");
            cases.add(
                case,
                biased,
                implementations!(layer_norm, layer_norm_formula),
            );
        }
    };
    for &(rows, dim) in SHAPES {
        add(format!("[{rows}, {dim}]"), (rows, dim), 2.0);
    }
    for (text, scale) in [("large values", 1e4), ("tiny values", 1e-5), ("zeros", 0.0)] {
        add(text.into(), (3, 129), scale);
    }

    // A mean far from 0, where E[x²] - E[x]² would lose every digit.
    let offset = |rng: &mut Rng| {
        let mut data = make(rng, (3, 200), 1.0, true);
        data.x
            .iter_mut()
            .for_each(|x| *x = rng.act((*x * 4.0).round() + 4096.0));
        data
    };
    let case = label(
        "layer_norm",
        act,
        Tolerance::CANCELLING,
        "a mean far from 0",
    );
    cases.add(
        case,
        offset,
        implementations!(layer_norm, layer_norm_formula),
    );

    let some = |rng: &mut Rng| make(rng, (9, 257), 2.0, true);
    let text = "rows alone and together";
    cases.same(
        ("rms_norm", act, text),
        some,
        rms_norm::<B>,
        rms_norm_by_rows::<B>,
    );
    cases.same(
        ("layer_norm", act, text),
        some,
        layer_norm::<B>,
        layer_norm_by_rows::<B>,
    );
    let few = |rng: &mut Rng| make(rng, (3, 7), 2.0, true);
    cases.rejects_short_buffers(("rms_norm", act), few, both!(rms_norm));
    cases.rejects_short_buffers(("fused_add_rms_norm", act), few, both!(fused_add_rms_norm));
    cases.rejects_short_buffers(("layer_norm", act), few, both!(layer_norm));
}
