//! Ops whose buffers may have more than one role, with the elements of the residual stream and of logits. The files
//! beside this one try them with activations.

use crate::case::{Cases, implementations, label};
use crate::compare::Tolerance;
use crate::data::Rng;
use crate::io::{Check, Io};
use crate::naive;
use ferrum_kernels::{Activation, Backend, GemmShape, MatShape, NormShape, RowShape};
use ferrum_types::{Element, FloatElement, SrcDtype};

/// What a buffer is for.
trait Role: 'static {
    /// Its element on a backend.
    type Of<B: Backend>: FloatElement;
    const NAME: &'static str;
}

struct Stream;

impl Role for Stream {
    type Of<B: Backend> = B::Residual;
    const NAME: &'static str = "the residual stream";
}

struct OfLogits;

impl Role for OfLogits {
    type Of<B: Backend> = B::Logit;
    const NAME: &'static str = "logits";
}

/// Rows of one role, rows of activations, and parameters.
struct Data {
    shape: RowShape,
    x: Vec<f32>,
    acts: Vec<f32>,
    gains: Vec<f32>,
    /// `[dim, dim]`.
    matrix: Vec<f32>,
    rows: Vec<i32>,
}

const EPS: f32 = 1e-6;
const FACTOR: f32 = 0.7;

impl Data {
    fn make(rng: &mut Rng, rows: usize, dim: usize) -> Self {
        Self {
            shape: RowShape { rows, dim },
            x: rng.acts(rows * dim, 2.0),
            acts: rng.acts(rows * dim, 2.0),
            gains: rng.norm_weights(dim),
            matrix: rng.floats(dim * dim, 1.0),
            rows: (0..rows as i32).rev().collect(),
        }
    }

    fn size(&self) -> usize {
        self.x.len()
    }

    fn norm(&self) -> NormShape {
        let RowShape { rows, dim } = self.shape;
        NormShape {
            rows,
            dim,
            eps: EPS,
        }
    }

    /// Row by row.
    fn rows_of(&self, f: impl Fn(&[f64]) -> Vec<f64>) -> Vec<Vec<f64>> {
        let x = naive::wide(&self.x);
        vec![x.chunks(self.shape.dim).flat_map(f).collect()]
    }

    /// `f(x, act, gain of the column)` of each element.
    fn each(&self, f: impl Fn(f64, f64, f64) -> f64) -> Vec<Vec<f64>> {
        let gain = |i: usize| f64::from(self.gains[i % self.shape.dim]);
        let pairs = self.x.iter().zip(&self.acts).enumerate();
        vec![
            pairs
                .map(|(i, (&x, &y))| f(x.into(), y.into(), gain(i)))
                .collect(),
        ]
    }
}

fn gemm<B: Backend, R: Role>(io: &mut Io<'_, B>, data: &Data) -> Check {
    let RowShape { rows, dim } = data.shape;
    let bytes = data.matrix.iter().copied().flat_map(f32::to_le_bytes);
    let bytes: Vec<u8> = bytes.collect();
    let shape = MatShape {
        rows: dim,
        cols: dim,
    };
    let weight = io.device.from_weight_bytes(&bytes, SrcDtype::F32, shape)?;
    let x = io.input("x", &data.acts)?;
    let mut out = io.output_of::<R::Of<B>>("out", data.size())?;
    let (n, k) = (dim, dim);
    B::gemm(&mut io.ctx, &x, &weight, &mut out, GemmShape { rows, n, k })?;
    io.take("out", &out, data.size())
}

fn gather_rows<B: Backend, R: Role>(io: &mut Io<'_, B>, data: &Data) -> Check {
    let src: Vec<R::Of<B>> = data.x.iter().map(|&x| FloatElement::from_f32(x)).collect();
    let src = io.exact(&src)?;
    let rows = io.indices("rows", &data.rows)?;
    let mut out = io.output_of::<R::Of<B>>("out", data.size())?;
    B::gather_rows(&mut io.ctx, &src, &rows, &mut out, data.shape)?;
    io.take("out", &out, data.size())
}

fn rms_norm<B: Backend, R: Role>(io: &mut Io<'_, B>, data: &Data) -> Check {
    let x = io.input_of::<R::Of<B>>("x", &data.x)?;
    let weight = io.floats("weight", &data.gains)?;
    let mut out = io.output("out", data.size())?;
    B::rms_norm(&mut io.ctx, &x, &weight, &mut out, data.norm())?;
    io.take("out", &out, data.size())
}

fn layer_norm<B: Backend, R: Role>(io: &mut Io<'_, B>, data: &Data) -> Check {
    let x = io.input_of::<R::Of<B>>("x", &data.x)?;
    let weight = io.floats("weight", &data.gains)?;
    let mut out = io.output("out", data.size())?;
    B::layer_norm(&mut io.ctx, &x, &weight, None, &mut out, data.norm())?;
    io.take("out", &out, data.size())
}

fn activate<B: Backend, R: Role>(io: &mut Io<'_, B>, data: &Data) -> Check {
    let x = io.input_of::<R::Of<B>>("x", &data.x)?;
    let mut out = io.output_of::<R::Of<B>>("out", data.size())?;
    B::activate(
        &mut io.ctx,
        Activation::Tanh,
        &x,
        None,
        &mut out,
        data.size(),
    )?;
    io.take("out", &out, data.size())
}

/// An op that changes rows of the role.
macro_rules! inplace {
    ($($op:ident: |$io:ident, $x:ident, $data:ident| $call:expr;)*) => {$(
        fn $op<B: Backend, R: Role>($io: &mut Io<'_, B>, $data: &Data) -> Check {
            let mut $x = $io.inout_of::<R::Of<B>>("x", &$data.x)?;
            $call?;
            $io.take("x", &$x, $data.size())
        }
    )*};
}
inplace! {
    add_bias: |io, x, data| {
        let bias = io.floats("bias", &data.gains)?;
        B::add_bias(&mut io.ctx, &mut x, &bias, data.shape)
    };
    add_inplace: |io, x, data| {
        let y = io.input("y", &data.acts)?;
        B::add_inplace(&mut io.ctx, &mut x, &y, data.size())
    };
    scaled_add_inplace: |io, x, data| {
        let y = io.input_of::<R::Of<B>>("y", &data.acts)?;
        B::scaled_add_inplace(&mut io.ctx, &mut x, &y, FACTOR, data.size())
    };
    scale_inplace: |io, x, data| B::scale_inplace(&mut io.ctx, &mut x, FACTOR, data.size());
    softcap: |io, x, data| B::softcap(&mut io.ctx, &mut x, FACTOR, data.size());
}

fn gemm_formula(data: &Data) -> Vec<Vec<f64>> {
    let dim = data.shape.dim;
    let product = |row: &[f32], column: &[f32]| {
        let pairs = row.iter().zip(column);
        pairs.map(|(&a, &b)| f64::from(a) * f64::from(b)).sum()
    };
    let rows = data.acts.chunks(dim);
    let row = |x| {
        data.matrix
            .chunks(dim)
            .map(move |column| product(x, column))
    };
    vec![rows.flat_map(row).collect()]
}

fn gather_formula(data: &Data) -> Vec<Vec<f64>> {
    let rows = data.x.chunks(data.shape.dim).rev();
    vec![rows.flat_map(naive::wide).collect()]
}

fn rms_norm_formula(data: &Data) -> Vec<Vec<f64>> {
    data.rows_of(|row| naive::rms_norm(row, &data.gains, EPS))
}

fn layer_norm_formula(data: &Data) -> Vec<Vec<f64>> {
    let rows = data.x.chunks(data.shape.dim);
    let norm = |row| naive::layer_norm(row, &data.gains, None, EPS);
    vec![rows.flat_map(norm).collect()]
}

fn of_role<B: Backend, R: Role>(cases: &mut Cases<B>) {
    let dtype = R::Of::<B>::DTYPE.name();
    for (rows, dim) in [(1, 64), (5, 33)] {
        let make = move |rng: &mut Rng| Data::make(rng, rows, dim);
        let case = |op, tolerance| {
            let name = format!("[{rows}, {dim}] of {}", R::NAME);
            label(op, dtype, tolerance, name)
        };
        let sum = |op| case(op, Tolerance::ARITHMETIC);
        let function = |op| case(op, Tolerance::ELEMENTWISE);
        let product = case("gemm", Tolerance::F32_SUMS);
        cases.add(product, make, implementations!(gemm, R, gemm_formula));
        let copy = case("gather_rows", Tolerance::EXACT);
        cases.add(copy, make, implementations!(gather_rows, R, gather_formula));
        let norm = |op| case(op, Tolerance::NORM);
        let implementations = implementations!(rms_norm, R, rms_norm_formula);
        cases.add(norm("rms_norm"), make, implementations);
        let implementations = implementations!(layer_norm, R, layer_norm_formula);
        cases.add(norm("layer_norm"), make, implementations);
        let tanh = |data: &Data| data.each(|x, _, _| x.tanh());
        cases.add(
            function("activate"),
            make,
            implementations!(activate, R, tanh),
        );
        let bias = |data: &Data| data.each(|x, _, gain| x + gain);
        cases.add(sum("add_bias"), make, implementations!(add_bias, R, bias));
        let add = |data: &Data| data.each(|x, y, _| x + y);
        cases.add(
            sum("add_inplace"),
            make,
            implementations!(add_inplace, R, add),
        );
        let scaled = |data: &Data| data.each(|x, y, _| x + f64::from(FACTOR) * y);
        let implementations = implementations!(scaled_add_inplace, R, scaled);
        cases.add(sum("scaled_add_inplace"), make, implementations);
        let scale = |data: &Data| data.each(|x, _, _| x * f64::from(FACTOR));
        cases.add(
            sum("scale_inplace"),
            make,
            implementations!(scale_inplace, R, scale),
        );
        let cap = |data: &Data| data.each(|x, _, _| naive::softcap(x, FACTOR.into()));
        cases.add(function("softcap"), make, implementations!(softcap, R, cap));
    }
}

pub(super) fn cases<B: Backend>(cases: &mut Cases<B>) {
    of_role::<B, Stream>(cases);
    of_role::<B, OfLogits>(cases);
}
