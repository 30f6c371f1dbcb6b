//! Ops on single elements: activations, sums, products. Each is one lane function; vectors and the
//! shorter end of a row go through the same one.

use super::exec::Exec;
use super::isa::Kernel;
use super::math;
use super::memory::SharedMut;
use super::simd::{LANES, Simd};
use ferrum_types::{Activation, GeluKind, RowShape};

/// A function of one lane of `x` and one of `y`.
pub(crate) trait LaneOp: Copy + Sync {
    /// Element operations that it is worth.
    const COST: usize;

    /// All lanes.
    fn apply<S: Simd>(self, s: S, x: S::V, y: S::V) -> S::V;
}

macro_rules! lane_op {
    ($(#[$doc:meta])* $name:ident $({ $($field:ident),* })?, $cost:literal,
     |$self:ident, $s:ident, $x:ident, $y:ident| $body:expr) => {
        $(#[$doc])*
        #[derive(Clone, Copy)]
        pub(crate) struct $name $({ $(pub(crate) $field: f32),* })?;
        lane_op!(@impl $name, $cost, |$self, $s, $x, $y| $body);
    };
    (@impl $name:ident, $cost:literal, |$self:ident, $s:ident, $x:ident, $y:ident| $body:expr) => {
        impl LaneOp for $name {
            const COST: usize = $cost;

            #[inline(always)]
            fn apply<S: Simd>($self, $s: S, $x: S::V, $y: S::V) -> S::V {
                $body
            }
        }
    };
}
lane_op!(/// `gelu(x)`, exact.
    Gelu, 8, |self, s, x, _y| math::gelu(s, x));
lane_op!(/// `gelu(x)`, tanh form.
    GeluTanh, 6, |self, s, x, _y| math::gelu_tanh(s, x));
lane_op!(/// `silu(x)`.
    Silu, 6, |self, s, x, _y| math::silu(s, x));
lane_op!(/// `sigmoid(x)`.
    Sigmoid, 6, |self, s, x, _y| math::sigmoid(s, x));
lane_op!(/// `x`.
    Identity, 1, |self, _s, x, _y| x);
lane_op!(/// `x + y`.
    Add, 1, |self, s, x, y| s.add(x, y));

/// `f(x) · y`.
#[derive(Clone, Copy)]
pub(crate) struct Times<F>(pub(crate) F);

impl<F: LaneOp> LaneOp for Times<F> {
    const COST: usize = F::COST;

    #[inline(always)]
    fn apply<S: Simd>(self, s: S, x: S::V, y: S::V) -> S::V {
        s.mul(self.0.apply(s, x, y), y)
    }
}

/// `x + scale · y`.
#[derive(Clone, Copy)]
pub(crate) struct ScaledAdd(pub(crate) f32);
lane_op!(@impl ScaledAdd, 1, |self, s, x, y| s.fma(s.splat(self.0), y, x));

/// `x · scale`.
#[derive(Clone, Copy)]
pub(crate) struct Scale(pub(crate) f32);
lane_op!(@impl Scale, 1, |self, s, x, _y| s.mul(x, s.splat(self.0)));

/// `cap · tanh(x / cap)`.
#[derive(Clone, Copy)]
pub(crate) struct Softcap(pub(crate) f32);
lane_op!(@impl Softcap, 8, |self, s, x, _y| math::softcap(s, x, self.0));

/// One range of lanes. `out` may be the memory of `x` or `y`, element on element.
struct Lanes<O> {
    op: O,
    x: *const f32,
    y: *const f32,
    out: *mut f32,
    len: usize,
}

impl<O: LaneOp> Kernel for Lanes<O> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let whole = self.len / LANES * LANES;
        let mut i = 0;
        while i < whole {
            // SAFETY: the constructor of `Lanes` requires `len` elements behind each pointer.
            unsafe {
                let v = self
                    .op
                    .apply(s, s.load(self.x.add(i)), s.load(self.y.add(i)));
                s.store(self.out.add(i), v);
            }
            i += LANES;
        }
        let rest = self.len - whole;
        if rest > 0 {
            // SAFETY: as above; the two inputs are copied to registers before the output is borrowed.
            unsafe {
                let x = s.load_part(std::slice::from_raw_parts(self.x.add(i), rest), 0.0);
                let y = s.load_part(std::slice::from_raw_parts(self.y.add(i), rest), 0.0);
                let out = std::slice::from_raw_parts_mut(self.out.add(i), rest);
                s.store_part(out, self.op.apply(s, x, y));
            }
        }
    }
}

/// Rows of pointers for [`Lanes`], shared by tasks that take different elements.
#[derive(Clone, Copy)]
struct Pointers {
    x: *const f32,
    y: *const f32,
    out: *mut f32,
}
// SAFETY: used only by `spread_lanes`, whose tasks touch disjoint elements of `out`.
unsafe impl Sync for Pointers {}
// SAFETY: as above.
unsafe impl Send for Pointers {}

/// `out = op(x, y)` for `len` elements.
///
/// # Safety
/// Each pointer is valid for `len` elements and no other thread uses `out`; `out` may be `x` or `y`.
unsafe fn spread_lanes(exec: &Exec, op: impl LaneOp, pointers: Pointers, len: usize) {
    fn of<O: LaneOp>(_: O) -> usize {
        O::COST
    }
    // Units of a few lines: a task's range then begins on a cache line of its own.
    const UNIT: usize = 4 * LANES;
    exec.parallel_for(len.div_ceil(UNIT), UNIT * of(op), |units, _| {
        let pointers = &pointers;
        let start = units.start * UNIT;
        exec.level.run(Lanes {
            op,
            x: pointers.x.wrapping_add(start),
            y: pointers.y.wrapping_add(start),
            out: pointers.out.wrapping_add(start),
            len: (units.end * UNIT).min(len) - start,
        });
    });
}

/// `out = f(x)`, or `out = f(x) · y`, for `len` elements.
///
/// # Panics
/// When a slice is shorter.
pub fn activate(
    exec: &Exec,
    activation: Activation,
    (x, y): (&[f32], Option<&[f32]>),
    out: &mut [f32],
    len: usize,
) {
    let times = y.is_some();
    let pointers = Pointers {
        x: x[..len].as_ptr(),
        y: y.unwrap_or(x)[..len].as_ptr(),
        out: out[..len].as_mut_ptr(),
    };
    // SAFETY: all have `len` elements (sliced so) and `out` is borrowed exclusively.
    unsafe {
        match activation {
            Activation::Identity => spread_function(exec, Identity, times, pointers, len),
            Activation::Gelu(GeluKind::Exact) => spread_function(exec, Gelu, times, pointers, len),
            Activation::Gelu(GeluKind::Tanh) => {
                spread_function(exec, GeluTanh, times, pointers, len)
            }
            Activation::Silu => spread_function(exec, Silu, times, pointers, len),
            Activation::Sigmoid => spread_function(exec, Sigmoid, times, pointers, len),
            // A cap of one.
            Activation::Tanh => spread_function(exec, Softcap(1.0), times, pointers, len),
        }
    }
}

/// `out = f(x)`, or `out = f(x) · y` with `times`.
///
/// # Safety
/// That of [`spread_lanes`].
unsafe fn spread_function(
    exec: &Exec,
    f: impl LaneOp,
    times: bool,
    pointers: Pointers,
    len: usize,
) {
    // SAFETY: the caller's contract.
    unsafe {
        if times {
            spread_lanes(exec, Times(f), pointers, len);
        } else {
            spread_lanes(exec, f, pointers, len);
        }
    }
}

/// `x = op(x)`.
fn map_inplace(exec: &Exec, x: &mut [f32], op: impl LaneOp) {
    let (out, len) = (x.as_mut_ptr(), x.len());
    let x = out.cast_const();
    // SAFETY: `x` has `len` elements and is borrowed exclusively.
    unsafe { spread_lanes(exec, op, Pointers { x, y: x, out }, len) };
}

/// `x = op(x, y)`.
fn zip_inplace(exec: &Exec, x: &mut [f32], y: &[f32], op: impl LaneOp) {
    let (out, len) = (x.as_mut_ptr(), x.len());
    let (x, y) = (out.cast_const(), y[..len].as_ptr());
    // SAFETY: both have `len` elements (sliced so) and `x` is borrowed exclusively.
    unsafe { spread_lanes(exec, op, Pointers { x, y, out }, len) };
}

/// `x += y`.
///
/// # Panics
/// When `y` is shorter.
pub fn add_inplace(exec: &Exec, x: &mut [f32], y: &[f32]) {
    zip_inplace(exec, x, y, Add);
}

/// `x += scale · y`.
///
/// # Panics
/// When `y` is shorter.
pub fn scaled_add_inplace(exec: &Exec, x: &mut [f32], y: &[f32], scale: f32) {
    zip_inplace(exec, x, y, ScaledAdd(scale));
}

/// `x = x · scale`.
pub fn scale_inplace(exec: &Exec, x: &mut [f32], scale: f32) {
    map_inplace(exec, x, Scale(scale));
}

/// `x = cap · tanh(x / cap)`.
pub fn softcap(exec: &Exec, x: &mut [f32], cap: f32) {
    map_inplace(exec, x, Softcap(cap));
}

/// Rows `[gate | up]` → `out[rows, dim] = op(gate, up)`.
fn gated(exec: &Exec, gate_up: &[f32], out: &mut [f32], shape: RowShape, op: impl LaneOp) {
    let dim = shape.dim;
    let out = &mut out[..shape.rows * dim];
    if out.is_empty() {
        return;
    }
    by_segments(exec, out, dim, 6, |row, at, out| {
        let (gate, up) = gate_up[row * 2 * dim..][..2 * dim].split_at(dim);
        exec.level.run(Lanes {
            op,
            x: gate[at..][..out.len()].as_ptr(),
            y: up[at..][..out.len()].as_ptr(),
            out: out.as_mut_ptr(),
            len: out.len(),
        });
    });
}

/// `x[r, :] += bias`.
///
/// # Panics
/// When a slice is shorter than the shape says.
pub fn add_bias(exec: &Exec, x: &mut [f32], bias: &[f32], shape: RowShape) {
    let (dim, bias) = (shape.dim, &bias[..shape.dim]);
    let x = &mut x[..shape.rows * dim];
    if x.is_empty() {
        return;
    }
    by_segments(exec, x, dim, 1, |_, at, x| {
        exec.level.run(Lanes {
            op: Add,
            x: x.as_ptr(),
            y: bias[at..][..x.len()].as_ptr(),
            out: x.as_mut_ptr(),
            len: x.len(),
        });
    });
}

/// Calls `f(row, column, segment)` for segments that cover `out`, rows of `dim` elements. A single
/// long row is spread over threads as well as many short ones.
fn by_segments(
    exec: &Exec,
    out: &mut [f32],
    dim: usize,
    cost: usize,
    f: impl Fn(usize, usize, &mut [f32]) + Sync,
) {
    const SEGMENT: usize = 1024;
    let per_row = dim.div_ceil(SEGMENT);
    let rows = out.len() / dim;
    let out = SharedMut::new(out);
    exec.parallel_for(rows * per_row, SEGMENT.min(dim) * cost, |units, _| {
        for unit in units {
            let (row, at) = (unit / per_row, unit % per_row * SEGMENT);
            let len = SEGMENT.min(dim - at);
            // SAFETY: segments do not overlap and each belongs to one task.
            f(row, at, unsafe { out.part(row * dim + at, len) });
        }
    });
}

/// Rows `[gate | up]` → `out[rows, dim] = silu(gate) · up`.
///
/// # Panics
/// When a slice is shorter than the shape says.
pub fn silu_gated(exec: &Exec, gate_up: &[f32], out: &mut [f32], shape: RowShape) {
    gated(exec, gate_up, out, shape, Times(Silu));
}

/// Rows `[gate | up]` → `out[rows, dim] = gelu(gate) · up`.
///
/// # Panics
/// When a slice is shorter than the shape says.
pub fn gelu_gated(exec: &Exec, gate_up: &[f32], out: &mut [f32], kind: GeluKind, shape: RowShape) {
    match kind {
        GeluKind::Exact => gated(exec, gate_up, out, shape, Times(Gelu)),
        GeluKind::Tanh => gated(exec, gate_up, out, shape, Times(GeluTanh)),
    }
}
