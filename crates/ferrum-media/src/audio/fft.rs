//! A Fourier transform of real numbers, of any length that is even: Cooley and Tukey's with the prime factors of the length.

use std::f64::consts::PI;

/// A complex number: real and imaginary part.
type Complex = [f64; 2];

/// A transform of one length.
pub(super) struct RealFft {
    /// Half the length.
    half: usize,
    /// `exp(-2πi k / half)`.
    twiddles: Vec<Complex>,
    /// `exp(-2πi k / length)`, up to half of it.
    untangle: Vec<Complex>,
    packed: Vec<Complex>,
    spectrum: Vec<Complex>,
}

fn root(k: usize, n: usize) -> Complex {
    let angle = -2.0 * PI * k as f64 / n as f64;
    [angle.cos(), angle.sin()]
}

fn times(a: Complex, b: Complex) -> Complex {
    [a[0] * b[0] - a[1] * b[1], a[0] * b[1] + a[1] * b[0]]
}

impl RealFft {
    /// For `len` numbers, which is even.
    pub(super) fn new(len: usize) -> Self {
        let half = len / 2;
        Self {
            half,
            twiddles: (0..half).map(|k| root(k, half)).collect(),
            untangle: (0..=half).map(|k| root(k, len)).collect(),
            packed: vec![[0.0; 2]; half],
            spectrum: vec![[0.0; 2]; half],
        }
    }

    /// The squared magnitudes of the first `len / 2 + 1` frequencies of `len` numbers.
    pub(super) fn power(&mut self, input: &[f64], power: &mut [f64]) {
        // Two numbers are one complex one; what that mixes up is told apart by symmetry.
        for (packed, pair) in self.packed.iter_mut().zip(input.chunks_exact(2)) {
            *packed = [pair[0], pair[1]];
        }
        transform(&self.packed, 1, &mut self.spectrum, &self.twiddles);
        for (k, power) in power.iter_mut().enumerate().take(self.half + 1) {
            let a = self.spectrum[k % self.half];
            let b = self.spectrum[(self.half - k) % self.half];
            let even = [(a[0] + b[0]) / 2.0, (a[1] - b[1]) / 2.0];
            let odd = [(a[1] + b[1]) / 2.0, (b[0] - a[0]) / 2.0];
            let odd = times(odd, self.untangle[k]);
            *power = (even[0] + odd[0]).powi(2) + (even[1] + odd[1]).powi(2);
        }
    }
}

/// The transform of every `stride`th number of `input`.
fn transform(input: &[Complex], stride: usize, out: &mut [Complex], twiddles: &[Complex]) {
    let len = out.len();
    if len == 1 {
        out[0] = input[0];
        return;
    }
    let factor = (2..=len).find(|p| len.is_multiple_of(*p)).unwrap_or(len);
    let part = len / factor;
    for (r, out) in out.chunks_exact_mut(part).enumerate() {
        transform(&input[r * stride..], stride * factor, out, twiddles);
    }
    let mut column = vec![[0.0; 2]; factor];
    for k in 0..part {
        for (r, value) in column.iter_mut().enumerate() {
            *value = times(out[r * part + k], twiddles[r * k * stride % twiddles.len()]);
        }
        for q in 0..factor {
            let mut sum = column[0];
            for (r, value) in column.iter().enumerate().skip(1) {
                let turned = times(*value, twiddles[r * q * part * stride % twiddles.len()]);
                sum = [sum[0] + turned[0], sum[1] + turned[1]];
            }
            out[q * part + k] = sum;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn powers_are_those_of_the_definition() {
        for len in [2, 6, 10, 16, 30, 98, 400] {
            let input: Vec<f64> = (0..len)
                .map(|i| ((i * i * 7 + 3) % 31) as f64 - 15.0)
                .collect();
            let mut power = vec![0.0; len / 2 + 1];
            RealFft::new(len).power(&input, &mut power);
            for (k, found) in power.iter().enumerate() {
                let mut sum = [0.0; 2];
                for (n, x) in input.iter().enumerate() {
                    let turn = root(k * n % len, len);
                    sum = [sum[0] + x * turn[0], sum[1] + x * turn[1]];
                }
                let expected = sum[0] * sum[0] + sum[1] * sum[1];
                let off = (found - expected).abs();
                assert!(
                    off < 1e-8 * (1.0 + expected),
                    "{len} {k}: {found} {expected}"
                );
            }
        }
    }
}
