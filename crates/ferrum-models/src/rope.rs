//! Sines and cosines of the rotary embedding, with every scaling folded in.
//!
//! Frequencies and angles are computed in f32 in the order in which `transformers` does it, since at
//! position 10⁵ another rounding of a frequency is already a visible angle.

use crate::spec::{RopeScaling, RopeSpec};
use ferrum_kernels::Backend;
use ferrum_types::Result;

/// Tables on a device: `[rows, rot_dim/2]` each.
pub struct RopeTables<B: Backend> {
    /// Cosines.
    pub cos: B::Buffer<f32>,
    /// Sines.
    pub sin: B::Buffer<f32>,
}

impl<B: Backend> RopeTables<B> {
    /// Tables for positions `0..positions`.
    pub fn for_positions(device: &B, spec: &RopeSpec, positions: usize) -> Result<Self> {
        let half = spec.rot_dim / 2;
        let frequencies = frequencies(spec, 0);
        let (mut cos, mut sin) = (vec![0f32; positions * half], vec![0f32; positions * half]);
        for p in 0..positions {
            let row = p * half..(p + 1) * half;
            fill_row(
                spec,
                &frequencies,
                p as u32,
                &mut cos[row.clone()],
                &mut sin[row],
            );
        }
        Ok(Self {
            cos: device.from_slice(&cos)?,
            sin: device.from_slice(&sin)?,
        })
    }

    /// Room for `rows` rows that are written before each step.
    pub fn for_rows(device: &B, spec: &RopeSpec, rows: usize) -> Result<Self> {
        let len = rows * (spec.rot_dim / 2);
        Ok(Self {
            cos: device.alloc(len)?,
            sin: device.alloc(len)?,
        })
    }
}

/// Sine and cosine of one position.
pub(crate) fn fill_row(
    spec: &RopeSpec,
    frequencies: &[f32],
    position: u32,
    cos: &mut [f32],
    sin: &mut [f32],
) {
    let magnitude = match spec.scaling {
        RopeScaling::Yarn {
            attention_factor, ..
        }
        | RopeScaling::LongRope {
            attention_factor, ..
        } => attention_factor,
        RopeScaling::Temperature { floor, scale } => {
            ((position as f32 + 1.0) / floor).floor().ln_1p() * scale + 1.0
        }
        _ => 1.0,
    };
    for ((c, s), &f) in cos.iter_mut().zip(sin).zip(frequencies) {
        let angle = f64::from(position as f32 * f);
        *c = angle.cos() as f32 * magnitude;
        *s = angle.sin() as f32 * magnitude;
    }
}

/// The angular frequencies, `[rot_dim/2]`, for a sequence of `length` tokens (only scalings that
/// [depend on it](RopeScaling::depends_on_length) look at the length).
pub(crate) fn frequencies(spec: &RopeSpec, length: usize) -> Vec<f32> {
    let dim = spec.rot_dim;
    let plain = |base: f64| -> Vec<f32> {
        (0..dim / 2)
            .map(|i| 1.0 / base.powf(f64::from(2.0 * i as f32 / dim as f32)) as f32)
            .collect()
    };
    let base = f64::from(spec.theta);
    match &spec.scaling {
        RopeScaling::None => plain(base),
        RopeScaling::Linear { factor } => plain(base).iter().map(|f| f / factor).collect(),
        RopeScaling::Dynamic {
            factor,
            max_position,
        } => {
            let (factor, max) = (f64::from(*factor), *max_position as f64);
            let length = (length as f64).max(max);
            let stretch = factor * length / max - (factor - 1.0);
            // A head of two elements has one frequency, 1, whatever the base.
            let power = if dim > 2 {
                dim as f64 / (dim as f64 - 2.0)
            } else {
                0.0
            };
            plain(base * stretch.powf(power))
        }
        RopeScaling::Yarn { .. } => yarn(spec, &plain(base)),
        RopeScaling::Llama3 {
            factor,
            low_freq_factor,
            high_freq_factor,
            original_max_position,
        } => {
            let original = *original_max_position as f32;
            let scale = |f: f32| {
                let wavelength = 2.0 * std::f32::consts::PI / f;
                if wavelength < original / high_freq_factor {
                    f
                } else if wavelength > original / low_freq_factor {
                    f / factor
                } else {
                    let smooth = (original / wavelength - low_freq_factor)
                        / (high_freq_factor - low_freq_factor);
                    (1.0 - smooth) * f / factor + smooth * f
                }
            };
            plain(base).into_iter().map(scale).collect()
        }
        RopeScaling::Factors(divisors) => divided(&plain(base), divisors),
        RopeScaling::Temperature { .. } => vec![0.0; dim / 2],
        RopeScaling::LongRope {
            short,
            long,
            original_max_position,
            ..
        } => {
            let divisors = match length > *original_max_position {
                true => long,
                false => short,
            };
            divided(&plain(base), divisors)
        }
    }
}

fn divided(frequencies: &[f32], divisors: &[f32]) -> Vec<f32> {
    let pairs = frequencies.iter().zip(divisors);
    pairs.map(|(f, d)| f / d).collect()
}

fn yarn(spec: &RopeSpec, plain: &[f32]) -> Vec<f32> {
    let RopeScaling::Yarn {
        factor,
        beta_fast,
        beta_slow,
        original_max_position,
        truncate,
        ..
    } = spec.scaling
    else {
        return plain.to_vec();
    };
    let dim = spec.rot_dim as f64;
    let correction = |turns: f32| {
        let span = original_max_position as f64 / (f64::from(turns) * 2.0 * std::f64::consts::PI);
        dim * span.ln() / (2.0 * f64::from(spec.theta).ln())
    };
    let (mut low, mut high) = (correction(beta_fast), correction(beta_slow));
    if truncate {
        (low, high) = (low.floor(), high.ceil());
    }
    (low, high) = (low.max(0.0), high.min(dim - 1.0));
    if low == high {
        high += 0.001;
    }
    let blend = |(i, &f): (usize, &f32)| {
        let ramp = ((i as f32 - low as f32) / (high - low) as f32).clamp(0.0, 1.0);
        let keep = 1.0 - ramp;
        // 1 / (factor · base^x), as the original computes it, not f / factor.
        let interpolated = 1.0 / (factor * (1.0 / f));
        interpolated * (1.0 - keep) + f * keep
    };
    plain.iter().enumerate().map(blend).collect()
}

/// The source row of row `row`, when the halves of each of `heads` heads become pairs.
pub(crate) fn paired_row(row: usize, rows: usize, heads: usize) -> usize {
    let dim = rows.checked_div(heads).unwrap_or(0);
    if dim < 2 {
        return row;
    }
    let (head, at) = (row / dim, row % dim);
    head * dim + at % 2 * (dim / 2) + at / 2
}

/// The source row of row `row`, when the pairs of each of `heads` heads become halves.
pub(crate) fn halved_row(row: usize, rows: usize, heads: usize) -> usize {
    let dim = rows.checked_div(heads).unwrap_or(0);
    if dim < 2 {
        return row;
    }
    let (head, at) = (row / dim, row % dim);
    head * dim + at % (dim / 2) * 2 + at / (dim / 2)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_become_pairs() {
        let rows: Vec<_> = (0..12).map(|row| paired_row(row, 12, 2)).collect();
        assert_eq!(rows, [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]);
        assert_eq!(paired_row(5, 12, 0), 5);
        let back = |row| halved_row(paired_row(row, 12, 2), 12, 2);
        assert!((0..12).all(|row| back(row) == row));
        assert_eq!(halved_row(5, 12, 0), 5);
    }
    use ferrum_kernels::RopeStyle;

    fn spec(scaling: RopeScaling) -> RopeSpec {
        RopeSpec {
            rot_dim: 8,
            theta: 10000.0,
            style: RopeStyle::HalfSplit,
            scaling,
        }
    }

    #[test]
    fn plain_frequencies_are_powers_of_the_base() {
        let f = frequencies(&spec(RopeScaling::None), 0);
        for (found, expected) in f.iter().zip([1.0, 0.1, 0.01, 0.001]) {
            assert!((found - expected).abs() < 1e-7, "{f:?}");
        }
    }

    #[test]
    fn dynamic_scaling_starts_past_the_trained_length() {
        let dynamic = spec(RopeScaling::Dynamic {
            factor: 2.0,
            max_position: 16,
        });
        assert_eq!(
            frequencies(&dynamic, 16),
            frequencies(&spec(RopeScaling::None), 0)
        );
        assert_ne!(frequencies(&dynamic, 17), frequencies(&dynamic, 16));
    }

    #[test]
    fn llama3_keeps_high_and_divides_low_frequencies() {
        let f = frequencies(
            &spec(RopeScaling::Llama3 {
                factor: 8.0,
                low_freq_factor: 1.0,
                high_freq_factor: 4.0,
                original_max_position: 64,
            }),
            0,
        );
        assert_eq!(f[0], 1.0);
        assert!((f[3] - 0.001 / 8.0).abs() < 1e-9);
    }

    #[test]
    fn yarn_blends_between_both_ends() {
        let f = frequencies(
            &spec(RopeScaling::Yarn {
                factor: 4.0,
                attention_factor: 1.0,
                beta_fast: 32.0,
                beta_slow: 1.0,
                original_max_position: 4096,
                truncate: true,
            }),
            0,
        );
        assert_eq!(f[0], 1.0);
        assert!((f[3] - 0.001 / 4.0).abs() < 1e-6, "{f:?}");
        assert!(f[2] < 0.01 && f[2] > 0.01 / 4.0, "{f:?}");
    }
}
