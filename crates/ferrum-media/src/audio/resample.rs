//! Another number of samples per second, by band-limited interpolation (Smith, "Digital Audio Resampling").
//!
//! An output sample is the sum of the input around it, weighted by a sinc under a Kaiser window that leaves out what the
//! lower of both rates cannot hold. The window is a table between whose entries is interpolated, so any two rates go.

use std::f64::consts::PI;

/// Zero crossings on each side.
const CROSSINGS: usize = 24;

/// Entries of the table between two of them.
const STEPS: usize = 512;

/// How fast the Kaiser window falls: -90 dB beside the band.
const BETA: f64 = 9.0;

/// Where the band ends, as a share of what the lower rate can hold.
const ROLLOFF: f64 = 0.945;

/// Samples at `to` per second, of samples at `from` per second.
pub fn resample(samples: Vec<f32>, from: u32, to: u32) -> Vec<f32> {
    if from == to || from == 0 || to == 0 {
        return samples;
    }
    let table = table();
    let (from, to) = (u64::from(from), u64::from(to));
    let len = (samples.len() as u64 * to).div_ceil(from);
    // Zero crossings for each sample of the input.
    let scale = ROLLOFF * (to as f64 / from as f64).min(1.0);
    let reach = CROSSINGS as f64 / scale;
    let at = |index: u64| {
        // Whole and rest of the position in the input: exact, however long it is.
        let (whole, rest) = (index * from / to, index * from % to);
        let rest = rest as f64 / to as f64;
        interpolated(&samples, &table, (whole, rest), (scale, reach))
    };
    (0..len).map(at).collect()
}

/// The input at `whole + rest`.
fn interpolated(
    samples: &[f32],
    table: &[f32],
    (whole, rest): (u64, f64),
    (scale, reach): (f64, f64),
) -> f32 {
    let center = whole as i64;
    let first = (center - reach as i64).max(0);
    let last = (center + 1 + reach as i64).min(samples.len() as i64 - 1);
    let mut sum = 0f64;
    for index in first..=last {
        let away = ((index - center) as f64 - rest).abs() * scale * STEPS as f64;
        let entry = away as usize;
        if let (Some(&a), Some(&b)) = (table.get(entry), table.get(entry + 1)) {
            let weight = f64::from(a) + (f64::from(b) - f64::from(a)) * (away - entry as f64);
            sum += weight * f64::from(samples[index as usize]);
        }
    }
    (sum * scale) as f32
}

/// One side of the windowed sinc.
fn table() -> Vec<f32> {
    let entry = |i: usize| {
        let x = i as f64 / STEPS as f64;
        let sinc = match i {
            0 => 1.0,
            _ => (PI * x).sin() / (PI * x),
        };
        let edge = x / CROSSINGS as f64;
        let window = bessel(BETA * (1.0 - edge * edge).max(0.0).sqrt()) / bessel(BETA);
        (sinc * window) as f32
    };
    (0..=CROSSINGS * STEPS).map(entry).collect()
}

/// The modified Bessel function of the first kind and order 0.
fn bessel(x: f64) -> f64 {
    let (mut sum, mut term) = (1.0, 1.0);
    for k in 1..64 {
        term *= (x / 2.0 / f64::from(k)).powi(2);
        sum += term;
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tone(rate: u32, hertz: f64, seconds: f64) -> Vec<f32> {
        let count = (f64::from(rate) * seconds) as usize;
        let at = |i: usize| (2.0 * PI * hertz * i as f64 / f64::from(rate)).sin() as f32;
        (0..count).map(at).collect()
    }

    #[test]
    fn tones_inside_the_band_stay_and_those_beyond_it_go() {
        for rate in [8_000, 11_025, 22_050, 44_100, 48_000, 96_000, 16_001] {
            for hertz in [50.0, 440.0, 3_000.0] {
                let found = resample(tone(rate, hertz, 0.5), rate, 16_000);
                let expected = tone(16_000, hertz, 0.6);
                // The ends see what is not there.
                for i in 200..found.len() - 200 {
                    let off = (found[i] - expected[i]).abs();
                    assert!(off < 5e-4, "{rate} {hertz} {i}: {off}");
                }
            }
        }
        let gone = resample(tone(48_000, 9_000.0, 0.5), 48_000, 16_000);
        let loudest = gone[200..7_800]
            .iter()
            .fold(0f32, |most, x| most.max(x.abs()));
        assert!(loudest < 1e-3, "{loudest}");
    }

    #[test]
    fn odd_lengths_and_rates_are_no_harm() {
        assert_eq!(resample(vec![0.5; 7], 16_000, 16_000), vec![0.5; 7]);
        assert!(resample(Vec::new(), 48_000, 16_000).is_empty());
        assert_eq!(resample(vec![1.0], 768_000, 16_000).len(), 1);
        assert_eq!(resample(vec![1.0], 1_000, 16_000).len(), 16);
    }
}
