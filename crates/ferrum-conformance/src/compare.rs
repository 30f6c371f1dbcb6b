//! When two results count as the same.
//!
//! The measure is NMSE = Σ(a-b)² / Σb², with the expectation as b. Every tolerance of the suite is
//! one of these:
//!
//! | class | NMSE | for |
//! |---|---|---|
//! | [`EXACT`](Tolerance::EXACT) | 0 | copies, look-ups, integers: every element equal |
//! | [`ARITHMETIC`](Tolerance::ARITHMETIC) | 1e-13 | sums and products of a few f32 |
//! | [`ELEMENTWISE`](Tolerance::ELEMENTWISE) | 1e-10 | f32 functions with exp, tanh or erf |
//! | [`NORM`](Tolerance::NORM) | 1e-11 | f32 norms, with or without rotation |
//! | [`CANCELLING`](Tolerance::CANCELLING) | 1e-7 | f32 norms of rows whose mean is far larger than their deviation |
//! | [`F32_SUMS`](Tolerance::F32_SUMS) | 1e-10 | products of f32 matrices, convolutions; numbers of f32 split in two of bf16 are up to 2.4e-11 off |
//! | [`F32_ATTENTION`](Tolerance::F32_ATTENTION) | 1e-8 | attention over f32 keys and values |
//! | [`HALF_STORAGE`](Tolerance::HALF_STORAGE) | 1e-5 | 16-bit weights; 16-bit and FP8 caches |
//! | [`TWICE_ROUNDED`](Tolerance::TWICE_ROUNDED) | 1e-3 | FP8 caches behind 16-bit activations: one element in about 16 is a step of 2⁻⁴ to 2⁻³ away; many rows with FP8 weights, whose kernels may round activations to FP8 |
//! | [`QUANTIZED`](Tolerance::QUANTIZED) | 5e-4 | block-quantised weights, whose kernels may round activations to 8 bits; the INT8 cache |
//!
//! The contract's own limits are 1e-7 for f32 element-wise ops and norms and 5e-4 for products and
//! attention of reduced precision; the classes are stricter wherever every backend does better. A result of 16 bits was rounded, so there a class is
//! never stricter than that rounding ([`Tolerance::for_element`]), which for the smallest numbers of f16 is a step of theirs.

use ferrum_kernels::BatchInvariance;
use ferrum_types::Dtype;
use half::f16;

/// What passes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Tolerance {
    /// The largest NMSE.
    nmse: f64,
    /// What each element may differ by without counting: a step between its smallest numbers, which have fewer bits.
    step: f64,
    /// How much more than one rounding to the result's type is allowed.
    roundings: f64,
}

impl Tolerance {
    pub(crate) const EXACT: Self = Self::relative(0.0);
    pub(crate) const ARITHMETIC: Self = Self::relative(1e-13);
    pub(crate) const ELEMENTWISE: Self = Self::relative(1e-10);
    pub(crate) const NORM: Self = Self::relative(1e-11);
    pub(crate) const CANCELLING: Self = Self::relative(1e-7);
    pub(crate) const F32_SUMS: Self = Self::relative(1e-10);
    pub(crate) const F32_ATTENTION: Self = Self::relative(1e-8);
    pub(crate) const HALF_STORAGE: Self = Self::relative(1e-5);
    pub(crate) const QUANTIZED: Self = Self::relative(5e-4);
    pub(crate) const TWICE_ROUNDED: Self = Self::relative(1e-3);

    const fn relative(nmse: f64) -> Self {
        Self {
            nmse,
            step: 0.0,
            roundings: 1.0,
        }
    }

    /// The tolerance for products of two such results, whose errors add up and of which an activation may make one larger. Each may have
    /// been rounded before.
    pub(crate) fn of_product(self) -> Self {
        Self {
            nmse: 4.0 * self.nmse,
            roundings: 4.0 * self.roundings,
            ..self
        }
    }

    /// The tolerance for results of this type.
    pub(crate) fn for_element(self, element: Dtype) -> Self {
        let (rounding, step) = match element {
            // 2⁻²⁴.
            Dtype::F16 => (1e-6, f64::from(f16::MIN_POSITIVE_SUBNORMAL.to_f32())),
            Dtype::BF16 => (5e-5, 0.0),
            _ => (0.0, 0.0),
        };
        if self == Self::EXACT {
            self
        } else {
            Self {
                nmse: self.nmse.max(rounding * self.roundings),
                step,
                ..self
            }
        }
    }
}

/// NMSE of `found`, or a sentence on what is wrong with it.
///
/// A NaN must meet a NaN and an infinity the same infinity; an expectation of zeros must be met
/// exactly.
pub(crate) fn compare(
    what: &str,
    found: &[f64],
    expected: &[f64],
    tolerance: Tolerance,
) -> Result<f64, String> {
    if found.len() != expected.len() {
        let (found, expected) = (found.len(), expected.len());
        return Err(format!("{what} has {found} elements, expected {expected}"));
    }
    let mut error = 0.0;
    let mut power = 0.0;
    let mut differs = false;
    let mut worst = (0.0, 0);
    for (i, (&a, &b)) in found.iter().zip(expected).enumerate() {
        if same(a, b) {
            power += if b.is_finite() { b * b } else { 0.0 };
            continue;
        }
        if !a.is_finite() || !b.is_finite() || tolerance == Tolerance::EXACT {
            return Err(format!("{what}[{i}] is {a:e}, expected {b:e}"));
        }
        differs = true;
        let difference = ((a - b).abs() - tolerance.step).max(0.0);
        let square = difference * difference;
        if square > worst.0 {
            worst = (square, i);
        }
        error += square;
        power += b * b;
    }
    // Without power there is nothing to be relative to: any error is too much.
    let nmse = match (differs, power) {
        (false, _) => 0.0,
        (true, 0.0) => f64::INFINITY,
        (true, power) => error / power,
    };
    if nmse <= tolerance.nmse {
        return Ok(nmse);
    }
    let (i, limit) = (worst.1, tolerance.nmse);
    let (a, b) = (found[i], expected[i]);
    Err(format!(
        "nmse of {what} is {nmse:.2e}, expected at most {limit:.0e}; worst is {what}[{i}] = {a:e}, expected {b:e}"
    ))
}

/// `Ok` when every bit is the same, so that also -0 and 0 differ; all NaN are the same.
pub(crate) fn compare_bits(what: &str, a: &[f64], b: &[f64]) -> Result<(), String> {
    if a.len() != b.len() {
        return Err(format!("{what} has {} and {} elements", a.len(), b.len()));
    }
    let same = |(a, b): (&f64, &f64)| a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan());
    match a.iter().zip(b).position(|pair| !same(pair)) {
        Some(i) => Err(format!(
            "{what}[{i}] is {:e} and {:e}, expected equal bits",
            a[i], b[i]
        )),
        None => Ok(()),
    }
}

/// Holds two results of the same rows against what a backend declares of them; the NMSE of `a`.
pub(crate) fn compare_rows(order: BatchInvariance, a: &[f64], b: &[f64]) -> Result<f64, String> {
    match order {
        BatchInvariance::BitExact => compare_bits("out", a, b).map(|()| 0.0),
        BatchInvariance::WithinNmse(nmse) => compare("out", a, b, Tolerance::relative(nmse)),
    }
}

fn same(a: f64, b: f64) -> bool {
    a == b || (a.is_nan() && b.is_nan())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_of_difference_is_told_apart() {
        let (nan, inf) = (f64::NAN, f64::INFINITY);
        let close = Tolerance::ELEMENTWISE;
        struct Case {
            found: &'static [f64],
            expected: &'static [f64],
            tolerance: Tolerance,
            passes: bool,
        }
        let case = |found, expected, tolerance, passes| Case {
            found,
            expected,
            tolerance,
            passes,
        };
        let cases = [
            case(&[], &[], Tolerance::EXACT, true),
            case(&[1.0, 2.0], &[1.0, 2.0], Tolerance::EXACT, true),
            case(&[1.0, 2.0], &[1.0, 2.0000000001], Tolerance::EXACT, false),
            case(&[1.0, 2.0], &[1.0, 2.0000001], close, true),
            case(&[1.0, 2.0], &[1.0, 2.001], close, false),
            case(&[1.0], &[1.0, 2.0], close, false),
            case(&[1e-30], &[0.0], close, false),
            case(&[0.0], &[0.0], close, true),
            case(&[0.0], &[1e-30], close, false),
        ];
        for (i, case) in cases.iter().enumerate() {
            let result = compare("out", case.found, case.expected, case.tolerance);
            assert_eq!(result.is_ok(), case.passes, "case {i}: {result:?}");
        }
        for (found, expected, passes) in [
            (nan, nan, true),
            (nan, 1.0, false),
            (1.0, nan, false),
            (inf, inf, true),
            (inf, -inf, false),
            (1e30, inf, false),
        ] {
            let result = compare("out", &[found, 1.0], &[expected, 1.0], close);
            assert_eq!(result.is_ok(), passes, "{found} for {expected}: {result:?}");
        }
    }

    #[test]
    fn bits_see_the_sign_of_zero() {
        assert!(compare_bits("out", &[0.0, f64::NAN], &[0.0, f64::NAN]).is_ok());
        assert!(compare_bits("out", &[0.0], &[-0.0]).is_err());
        assert!(compare_bits("out", &[0.0], &[0.0, 1.0]).is_err());
    }

    #[test]
    fn rows_are_held_to_what_a_backend_declares() {
        let (row, near, far) = ([1.0, 2.0], [1.0, 2.001], [1.0, 2.1]);
        for (order, other, passes) in [
            (BatchInvariance::BitExact, row, true),
            (BatchInvariance::BitExact, near, false),
            (BatchInvariance::WithinNmse(1e-6), row, true),
            (BatchInvariance::WithinNmse(1e-6), near, true),
            (BatchInvariance::WithinNmse(1e-6), far, false),
            (BatchInvariance::WithinNmse(0.0), near, false),
        ] {
            let result = compare_rows(order, &row, &other);
            assert_eq!(result.is_ok(), passes, "{order:?} {other:?}: {result:?}");
        }
    }

    #[test]
    fn sixteen_bit_activations_loosen_all_but_equality() {
        let loose = Tolerance::NORM.for_element(Dtype::BF16);
        assert_eq!(loose, Tolerance::relative(5e-5));
        assert_eq!(Tolerance::EXACT.for_element(Dtype::BF16), Tolerance::EXACT);
        let of_f16 = Tolerance::QUANTIZED.for_element(Dtype::F16);
        assert_eq!(of_f16.nmse, Tolerance::QUANTIZED.nmse);
        // Among the smallest numbers, one step is what rounding may do; zeros are still zeros.
        let step = f64::from(f16::MIN_POSITIVE_SUBNORMAL.to_f32());
        for (found, expected, passes) in [
            (9.0 * step, 8.0 * step, true),
            (10.0 * step, 8.0 * step, false),
            (step, 0.0, false),
        ] {
            let result = compare("out", &[found], &[expected], of_f16);
            assert_eq!(result.is_ok(), passes, "{found} for {expected}: {result:?}");
        }
    }
}
