//! Ops that treat every element alike.

use crate::case::{Cases, act_name, both, implementations, label};
use crate::compare::Tolerance;
use crate::data::Rng;
use crate::io::{Check, Io};
use crate::naive;
use ferrum_kernels::{Activation, Backend, GeluKind, RowShape};

/// Two operands, a number, and a bias for rows.
struct Operands {
    x: Vec<f32>,
    y: Vec<f32>,
    factor: f32,
    bias: Vec<f32>,
    gelu: GeluKind,
    activation: Activation,
}

impl Operands {
    /// Rows as long as the bias.
    fn shape(&self) -> RowShape {
        let dim = self.bias.len();
        RowShape {
            rows: self.x.len() / dim,
            dim,
        }
    }

    fn map(&self, f: impl Fn(f64) -> f64) -> Vec<Vec<f64>> {
        vec![naive::wide(&self.x).into_iter().map(f).collect()]
    }

    fn zip(&self, f: impl Fn(f64, f64) -> f64) -> Vec<Vec<f64>> {
        let pairs = naive::wide(&self.x).into_iter().zip(naive::wide(&self.y));
        vec![pairs.map(|(x, y)| f(x, y)).collect()]
    }

    /// `f(gate, up)` over rows `[x | y]` as they are in [`Operands::gate_up`].
    fn gated(&self, f: impl Fn(f64) -> f64) -> Vec<Vec<f64>> {
        self.zip(|gate, up| f(gate) * up)
    }

    /// Rows of x and y side by side.
    fn gate_up(&self) -> Vec<f32> {
        let dim = self.bias.len();
        let rows = self.x.chunks(dim).zip(self.y.chunks(dim));
        rows.flat_map(|(x, y)| [x, y].concat()).collect()
    }
}

/// Ops from `x` to `out`.
macro_rules! maps {
    ($($op:ident),*) => {$(
        fn $op<B: Backend>(io: &mut Io<'_, B>, data: &Operands) -> Check {
            let len = data.x.len();
            let x = io.input("x", &data.x)?;
            let mut out = io.output("out", len)?;
            B::$op(&mut io.ctx, &x, &mut out, len)?;
            io.take("out", &out, len)
        }
    )*};
}
maps!(gelu, gelu_tanh, silu);

/// Every activation, with what it is called.
const ACTIVATIONS: [(Activation, &str); 6] = [
    (Activation::Identity, "identity"),
    (Activation::Gelu(GeluKind::Exact), "exact gelu"),
    (Activation::Gelu(GeluKind::Tanh), "tanh gelu"),
    (Activation::Silu, "silu"),
    (Activation::Tanh, "tanh"),
    (Activation::Sigmoid, "sigmoid"),
];

fn activation(activation: Activation, x: f64) -> f64 {
    match activation {
        Activation::Identity => x,
        Activation::Gelu(kind) => naive::gelu(kind, x),
        Activation::Silu => naive::silu(x),
        Activation::Tanh => x.tanh(),
        Activation::Sigmoid => 1.0 / (1.0 + (-x).exp()),
    }
}

fn activate<B: Backend>(io: &mut Io<'_, B>, data: &Operands) -> Check {
    let len = data.x.len();
    let x = io.input("x", &data.x)?;
    let mut out = io.output("out", len)?;
    B::activate(&mut io.ctx, data.activation, &x, None, &mut out, len)?;
    io.take("out", &out, len)
}

fn activate_times<B: Backend>(io: &mut Io<'_, B>, data: &Operands) -> Check {
    let len = data.x.len();
    let (x, y) = (io.input("x", &data.x)?, io.input("y", &data.y)?);
    let mut out = io.output("out", len)?;
    B::activate(&mut io.ctx, data.activation, &x, Some(&y), &mut out, len)?;
    io.take("out", &out, len)
}

fn fused_silu_mul_split<B: Backend>(io: &mut Io<'_, B>, data: &Operands) -> Check {
    let gate_up = io.input("gate_up", &data.gate_up())?;
    let mut out = io.output("out", data.x.len())?;
    B::fused_silu_mul_split(&mut io.ctx, &gate_up, &mut out, data.shape())?;
    io.take("out", &out, data.x.len())
}

fn fused_gelu_mul_split<B: Backend>(io: &mut Io<'_, B>, data: &Operands) -> Check {
    let gate_up = io.input("gate_up", &data.gate_up())?;
    let mut out = io.output("out", data.x.len())?;
    B::fused_gelu_mul_split(&mut io.ctx, &gate_up, &mut out, data.gelu, data.shape())?;
    io.take("out", &out, data.x.len())
}

fn add_bias<B: Backend>(io: &mut Io<'_, B>, data: &Operands) -> Check {
    let mut x = io.inout("x", &data.x)?;
    let bias = io.floats("bias", &data.bias)?;
    B::add_bias(&mut io.ctx, &mut x, &bias, data.shape())?;
    io.take("x", &x, data.x.len())
}

fn add_bias_formula(data: &Operands) -> Vec<Vec<f64>> {
    let rows = data.x.chunks(data.bias.len());
    let sum = |(&x, &bias): (&f32, &f32)| f64::from(x) + f64::from(bias);
    vec![
        rows.flat_map(|row| row.iter().zip(&data.bias).map(sum))
            .collect(),
    ]
}

fn add_inplace<B: Backend>(io: &mut Io<'_, B>, data: &Operands) -> Check {
    let len = data.x.len();
    let mut x = io.inout("x", &data.x)?;
    let y = io.input("y", &data.y)?;
    B::add_inplace(&mut io.ctx, &mut x, &y, len)?;
    io.take("x", &x, len)
}

fn scaled_add_inplace<B: Backend>(io: &mut Io<'_, B>, data: &Operands) -> Check {
    let len = data.x.len();
    let mut x = io.inout("x", &data.x)?;
    let y = io.input("y", &data.y)?;
    B::scaled_add_inplace(&mut io.ctx, &mut x, &y, data.factor, len)?;
    io.take("x", &x, len)
}

fn scale_inplace<B: Backend>(io: &mut Io<'_, B>, data: &Operands) -> Check {
    let len = data.x.len();
    let mut x = io.inout("x", &data.x)?;
    B::scale_inplace(&mut io.ctx, &mut x, data.factor, len)?;
    io.take("x", &x, len)
}

fn mul<B: Backend>(io: &mut Io<'_, B>, data: &Operands) -> Check {
    let len = data.x.len();
    let x = io.input("x", &data.x)?;
    let y = io.input("y", &data.y)?;
    let mut out = io.output("out", len)?;
    B::mul(&mut io.ctx, &x, &y, &mut out, len)?;
    io.take("out", &out, len)
}

fn softcap<B: Backend>(io: &mut Io<'_, B>, data: &Operands) -> Check {
    let len = data.x.len();
    let mut x = io.inout("x", &data.x)?;
    B::softcap(&mut io.ctx, &mut x, data.factor, len)?;
    io.take("x", &x, len)
}

fn operands(rng: &mut Rng, (rows, dim): (usize, usize), scale: f32) -> Operands {
    Operands {
        x: rng.acts(rows * dim, scale),
        y: rng.acts(rows * dim, scale),
        factor: 3.7,
        bias: rng.floats(dim, scale),
        gelu: GeluKind::Exact,
        activation: Activation::Identity,
    }
}

const SHAPES: &[(usize, usize)] = &[
    (0, 7),
    (1, 1),
    (1, 7),
    (1, 31),
    (3, 33),
    (2, 65),
    (7, 100),
    (1, 257),
    (5, 1031),
];

pub(super) fn cases<B: Backend>(cases: &mut Cases<B>) {
    for &(rows, dim) in SHAPES {
        all_ops(cases, &format!("[{rows}, {dim}]"), (rows, dim), 2.0);
    }
    for (text, scale) in [
        ("large values", 1e4),
        ("tiny values", 1e-12),
        ("zeros", 0.0),
    ] {
        all_ops(cases, text, (3, 131), scale);
    }
    short(cases);
}

/// Every op on values of one shape and size.
fn all_ops<B: Backend>(cases: &mut Cases<B>, text: &str, dims: (usize, usize), scale: f32) {
    let act = act_name::<B>();
    let make = move |rng: &mut Rng| operands(rng, dims, scale);
    let function = |op| label(op, act, Tolerance::ELEMENTWISE, text);
    let sum = |op| label(op, act, Tolerance::ARITHMETIC, text);

    for (kind, name) in ACTIVATIONS {
        let make = move |rng: &mut Rng| Operands {
            activation: kind,
            ..operands(rng, dims, scale)
        };
        let mut case = function("activate");
        case.name = format!("{text}, {name}");
        let alone = |data: &Operands| data.map(|x| activation(data.activation, x));
        cases.add(case, make, implementations!(activate, alone));
        let mut case = function("activate");
        case.name = format!("{text}, {name} times y");
        let times = |data: &Operands| data.gated(|x| activation(data.activation, x));
        cases.add(case, make, implementations!(activate_times, times));
    }
    let exact = |data: &Operands| data.map(|x| naive::gelu(GeluKind::Exact, x));
    let tanh = |data: &Operands| data.map(|x| naive::gelu(GeluKind::Tanh, x));
    cases.add(function("gelu"), make, implementations!(gelu, exact));
    cases.add(
        function("gelu_tanh"),
        make,
        implementations!(gelu_tanh, tanh),
    );
    cases.add(
        function("silu"),
        make,
        implementations!(silu, |data| data.map(naive::silu)),
    );
    let implementations = implementations!(fused_silu_mul_split, |data| data.gated(naive::silu));
    cases.add(function("fused_silu_mul_split"), make, implementations);
    for (gelu, suffix) in [(GeluKind::Exact, ", exact"), (GeluKind::Tanh, ", tanh")] {
        let mut case = function("fused_gelu_mul_split");
        case.name.push_str(suffix);
        let make = move |rng: &mut Rng| Operands {
            gelu,
            ..operands(rng, dims, scale)
        };
        let formula = |data: &Operands| data.gated(|x| naive::gelu(data.gelu, x));
        cases.add(case, make, implementations!(fused_gelu_mul_split, formula));
    }
    let capped = |data: &Operands| data.map(|x| naive::softcap(x, data.factor.into()));
    cases.add(function("softcap"), make, implementations!(softcap, capped));

    cases.add(
        sum("add_bias"),
        make,
        implementations!(add_bias, add_bias_formula),
    );
    cases.add(
        sum("add_inplace"),
        make,
        implementations!(add_inplace, |data| data.zip(|x, y| x + y)),
    );
    let scaled_sum = |data: &Operands| data.zip(|x, y| x + f64::from(data.factor) * y);
    cases.add(
        sum("scaled_add_inplace"),
        make,
        implementations!(scaled_add_inplace, scaled_sum),
    );
    let scaled = |data: &Operands| data.map(|x| x * f64::from(data.factor));
    cases.add(
        sum("scale_inplace"),
        make,
        implementations!(scale_inplace, scaled),
    );
    cases.add(
        sum("mul"),
        make,
        implementations!(mul, |data| data.zip(|x, y| x * y)),
    );
}

fn short<B: Backend>(cases: &mut Cases<B>) {
    let act = act_name::<B>();
    let make = |rng: &mut Rng| operands(rng, (3, 7), 1.0);
    let mut add = |op, runs| cases.rejects_short_buffers((op, act), make, runs);
    add("activate", both!(activate_times));
    add("gelu", both!(gelu));
    add("gelu_tanh", both!(gelu_tanh));
    add("silu", both!(silu));
    add("fused_silu_mul_split", both!(fused_silu_mul_split));
    add("fused_gelu_mul_split", both!(fused_gelu_mul_split));
    add("softcap", both!(softcap));
    add("add_bias", both!(add_bias));
    add("add_inplace", both!(add_inplace));
    add("scaled_add_inplace", both!(scaled_add_inplace));
    add("scale_inplace", both!(scale_inplace));
    add("mul", both!(mul));
}
