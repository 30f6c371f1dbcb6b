//! Normalisation of rows.

use super::exec::Exec;
use super::isa::Kernel;
use super::math::{self, for_vectors, load_at, store_at};
use super::memory::SharedMut;
use super::simd::Simd;
use ferrum_types::{NormShape, SumSplit};

/// `Σ x²`.
#[inline(always)]
fn sum_squares<S: Simd>(s: S, x: &[f32]) -> f64 {
    let sum = f64::from(math::sum_squares(s, x));
    if sum.is_infinite() {
        // Squares of elements beyond 1.8e19 are no f32.
        return x.iter().map(|x| f64::from(*x) * f64::from(*x)).sum();
    }
    sum
}

/// `1 / √(sum / len + eps)`.
#[inline(always)]
fn factor(sum: f64, len: usize, eps: f32) -> f32 {
    (1.0 / (sum / len as f64 + f64::from(eps)).sqrt()) as f32
}

/// `1 / √(mean(x²) + eps)`.
#[inline(always)]
pub(crate) fn rms_factor<S: Simd>(s: S, x: &[f32], eps: f32) -> f32 {
    factor(sum_squares(s, x), x.len(), eps)
}

/// Norms one row: `out = x · factor · weight`.
#[inline(always)]
fn scale<S: Simd>(s: S, x: &[f32], factor: f32, weight: &[f32], out: &mut [f32]) {
    let factor = s.splat(factor);
    for_vectors(
        x.len(),
        #[inline(always)]
        |at, _| {
            let v = s.mul(load_at(s, x, at), factor);
            store_at(s, out, at, s.mul(v, load_at(s, weight, at)));
        },
    );
}

/// RMS norm of some rows.
pub(crate) struct Rms<'a> {
    pub(crate) x: &'a [f32],
    pub(crate) weight: &'a [f32],
    pub(crate) out: &'a mut [f32],
    pub(crate) eps: f32,
}

impl Kernel for Rms<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let dim = self.weight.len();
        for (x, out) in self.x.chunks_exact(dim).zip(self.out.chunks_exact_mut(dim)) {
            scale(s, x, rms_factor(s, x, self.eps), self.weight, out);
        }
    }
}

/// `residual += x`, then RMS norm of some rows.
struct AddRms<'a> {
    residual: &'a mut [f32],
    x: &'a [f32],
    weight: &'a [f32],
    out: &'a mut [f32],
    eps: f32,
}

impl Kernel for AddRms<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let dim = self.weight.len();
        let rows = self
            .residual
            .chunks_exact_mut(dim)
            .zip(self.x.chunks_exact(dim));
        for ((residual, x), out) in rows.zip(self.out.chunks_exact_mut(dim)) {
            for_vectors(
                dim,
                #[inline(always)]
                |at, _| {
                    let sum = s.add(load_at(s, residual, at), load_at(s, x, at));
                    store_at(s, residual, at, sum);
                },
            );
            scale(
                s,
                residual,
                rms_factor(s, residual, self.eps),
                self.weight,
                out,
            );
        }
    }
}

/// Layer norm of some rows.
struct Layer<'a> {
    x: &'a [f32],
    weight: &'a [f32],
    bias: Option<&'a [f32]>,
    out: &'a mut [f32],
    eps: f32,
}

impl Kernel for Layer<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let dim = self.weight.len();
        for (x, out) in self.x.chunks_exact(dim).zip(self.out.chunks_exact_mut(dim)) {
            let (mean, factor) = moments(s, x, self.eps);
            for_vectors(
                dim,
                #[inline(always)]
                |at, _| {
                    let centred = s.sub(load_at(s, x, at), s.splat(mean));
                    let normed = s.mul(centred, s.splat(factor));
                    let weight = load_at(s, self.weight, at);
                    let v = match self.bias {
                        Some(bias) => s.fma(normed, weight, load_at(s, bias, at)),
                        None => s.mul(normed, weight),
                    };
                    store_at(s, out, at, v);
                },
            );
        }
    }
}

/// Mean, and `1 / √(var + eps)`.
#[inline(always)]
fn moments<S: Simd>(s: S, x: &[f32], eps: f32) -> (f32, f32) {
    let count = x.len() as f64;
    let mut mean = f64::from(math::sum(s, x)) / count;
    let mut sum = f64::from(math::sum_square_deviations(s, x, mean as f32));
    if !sum.is_finite() {
        // As in `rms_factor`.
        mean = x.iter().map(|x| f64::from(*x)).sum::<f64>() / count;
        sum = x.iter().map(|x| (f64::from(*x) - mean).powi(2)).sum();
    }
    let factor = 1.0 / (sum / count + f64::from(eps)).sqrt();
    (mean as f32, factor as f32)
}

/// `out = x / √(mean(x²) + eps) · weight`.
///
/// # Panics
/// When a slice is shorter than the shape says.
pub fn rms_norm(exec: &Exec, x: &[f32], weight: &[f32], out: &mut [f32], shape: NormShape) {
    let NormShape { rows, dim, eps } = shape;
    let size = rows * dim;
    let weight = &weight[..dim];
    let out = SharedMut::new(&mut out[..size]);
    if size == 0 {
        return;
    }
    exec.parallel_for(rows, dim, |r, _| {
        let (start, len) = (r.start * dim, r.len() * dim);
        exec.level.run(Rms {
            x: &x[start..][..len],
            weight,
            // SAFETY: each row belongs to one task.
            out: unsafe { out.part(start, len) },
            eps,
        });
    });
}

/// The sum of squares of each row of `dim` columns, cut as `split` says.
///
/// # Panics
/// When `x` is shorter than the rows.
pub fn squares(exec: &Exec, x: &[f32], dim: usize, split: SumSplit, out: &mut [f64]) {
    let x = &x[..out.len() * dim];
    if dim == 0 {
        return out.fill(0.0);
    }
    let out = SharedMut::new(out);
    exec.parallel_for(x.len() / dim, dim, |rows, _| {
        exec.level.run(Squares {
            x: &x[rows.start * dim..rows.end * dim],
            dim,
            split,
            // SAFETY: each row belongs to one task.
            out: unsafe { out.part(rows.start, rows.len()) },
        });
    });
}

/// The sums of squares of some rows.
struct Squares<'a> {
    x: &'a [f32],
    dim: usize,
    split: SumSplit,
    out: &'a mut [f64],
}

impl Kernel for Squares<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self { split, dim, .. } = self;
        for (x, out) in self.x.chunks_exact(dim).zip(self.out) {
            let (mut total, mut pair) = (0.0, 0.0);
            for part in 0..split.parts() {
                let sum = sum_squares(s, &x[split.part(part, dim)]);
                SumSplit::add_part(part, Some(sum), (&mut pair, &mut total), |a, b| a + b);
            }
            *out = total;
        }
    }
}

/// `out = x / √(sum / columns + eps) · weight`, of rows whose sums of squares over so many columns are known.
///
/// # Panics
/// When a slice is shorter than the shape says.
pub fn rms_norm_of_squares(
    exec: &Exec,
    x: &[f32],
    weight: &[f32],
    out: &mut [f32],
    (squares, columns): (&[f64], usize),
    shape: NormShape,
) {
    let NormShape { rows, dim, eps } = shape;
    let size = rows * dim;
    let (x, weight, squares) = (&x[..size], &weight[..dim], &squares[..rows]);
    let out = SharedMut::new(&mut out[..size]);
    if size == 0 {
        return;
    }
    exec.parallel_for(rows, dim, |r, _| {
        let (start, len) = (r.start * dim, r.len() * dim);
        exec.level.run(Scaled {
            x: &x[start..][..len],
            weight,
            squares: &squares[r],
            columns,
            // SAFETY: each row belongs to one task.
            out: unsafe { out.part(start, len) },
            eps,
        });
    });
}

/// Norms some rows whose sums of squares are known.
struct Scaled<'a> {
    x: &'a [f32],
    weight: &'a [f32],
    squares: &'a [f64],
    columns: usize,
    out: &'a mut [f32],
    eps: f32,
}

impl Kernel for Scaled<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let dim = self.weight.len();
        let rows = self.x.chunks_exact(dim).zip(self.out.chunks_exact_mut(dim));
        for ((x, out), sum) in rows.zip(self.squares) {
            scale(s, x, factor(*sum, self.columns, self.eps), self.weight, out);
        }
    }
}

/// `residual += x; out = rms_norm(residual)`.
///
/// # Panics
/// When a slice is shorter than the shape says.
pub fn fused_add_rms_norm(
    exec: &Exec,
    residual: &mut [f32],
    x: &[f32],
    weight: &[f32],
    out: &mut [f32],
    shape: NormShape,
) {
    let NormShape { rows, dim, eps } = shape;
    let size = rows * dim;
    let weight = &weight[..dim];
    let residual = SharedMut::new(&mut residual[..size]);
    let out = SharedMut::new(&mut out[..size]);
    if size == 0 {
        return;
    }
    exec.parallel_for(rows, 2 * dim, |r, _| {
        let (start, len) = (r.start * dim, r.len() * dim);
        exec.level.run(AddRms {
            // SAFETY: each row belongs to one task.
            residual: unsafe { residual.part(start, len) },
            x: &x[start..][..len],
            weight,
            // SAFETY: as above.
            out: unsafe { out.part(start, len) },
            eps,
        });
    });
}

/// `out = (x - mean) / √(var + eps) · weight + bias`.
///
/// # Panics
/// When a slice is shorter than the shape says.
pub fn layer_norm(
    exec: &Exec,
    x: &[f32],
    weight: &[f32],
    bias: Option<&[f32]>,
    out: &mut [f32],
    shape: NormShape,
) {
    let NormShape { rows, dim, eps } = shape;
    let size = rows * dim;
    let weight = &weight[..dim];
    let bias = bias.map(|bias| &bias[..dim]);
    let out = SharedMut::new(&mut out[..size]);
    if size == 0 {
        return;
    }
    exec.parallel_for(rows, 2 * dim, |r, _| {
        let (start, len) = (r.start * dim, r.len() * dim);
        exec.level.run(Layer {
            x: &x[start..][..len],
            weight,
            bias,
            // SAFETY: each row belongs to one task.
            out: unsafe { out.part(start, len) },
            eps,
        });
    });
}
