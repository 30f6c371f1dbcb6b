//! The log-mel spectrogram that Whisper reads (Radford et al., "Robust Speech Recognition via Large-Scale Weak
//! Supervision", 2022), as `WhisperFeatureExtractor` computes it.

use rayon::iter::{IndexedParallelIterator, ParallelIterator};
use rayon::slice::ParallelSliceMut;
use realfft::{RealFftPlanner, RealToComplex};
use std::sync::Arc;

/// Samples per second.
pub const RATE: u32 = 16_000;

/// Samples from a frame to the next: a hundred frames a second.
pub const HOP: usize = 160;

/// Samples of a frame.
const WINDOW: usize = 400;

/// Frequencies of a frame.
const BINS: usize = WINDOW / 2 + 1;

/// Frames of a task.
const TASK_FRAMES: usize = 100;

/// A log-mel spectrogram, `[mels, frames]`.
#[derive(Clone, Debug, PartialEq)]
pub struct LogMelSpectrogram {
    /// Row after row, a row for each mel filter.
    pub values: Vec<f32>,
    /// Frames of a row.
    pub frames: usize,
}

/// Computes log-mel spectrograms with a number of mel filters.
pub struct LogMelExtractor {
    /// For each filter its first frequency, and the weights from there on.
    filters: Vec<(usize, Vec<f64>)>,
    window: Vec<f64>,
    fft: Arc<dyn RealToComplex<f64>>,
}

impl LogMelExtractor {
    /// With `mels` filters.
    pub fn new(mels: usize) -> Self {
        let turn = |i: usize| 2.0 * std::f64::consts::PI * i as f64 / WINDOW as f64;
        Self {
            filters: filters(mels),
            window: (0..WINDOW).map(|i| 0.5 - 0.5 * turn(i).cos()).collect(),
            fft: RealFftPlanner::new().plan_fft_forward(WINDOW),
        }
    }

    /// The spectrogram of samples at [`RATE`]: a frame for each whole [`HOP`]. Computed on `rayon`'s threads.
    pub fn compute(&self, samples: &[f32]) -> LogMelSpectrogram {
        let (mels, frames) = (self.filters.len(), samples.len() / HOP);
        // Frame after frame, so that each task writes a contiguous part.
        let mut energies = vec![0f32; mels * frames];
        energies
            .par_chunks_mut((mels * TASK_FRAMES).max(1))
            .enumerate()
            .for_each(|(task, energies)| self.frames(samples, task * TASK_FRAMES, energies));
        let loudest = energies.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let mut values = vec![0f32; mels * frames];
        for (row, values) in values.chunks_exact_mut(frames.max(1)).enumerate() {
            for (value, energy) in values
                .iter_mut()
                .zip(energies.iter().skip(row).step_by(mels))
            {
                *value = (energy.max(loudest - 8.0) + 4.0) / 4.0;
            }
        }
        LogMelSpectrogram { values, frames }
    }

    /// Logarithms of the energies behind each filter, `[frames, mels]`, from frame `first` on.
    fn frames(&self, samples: &[f32], first: usize, energies: &mut [f32]) {
        let (mut windowed, mut at_end) = ([0.0; WINDOW], [0.0; WINDOW]);
        let mut spectrum = self.fft.make_output_vec();
        let mut scratch = self.fft.make_scratch_vec();
        let mut power = [0.0; BINS];
        for (i, energies) in energies.chunks_exact_mut(self.filters.len()).enumerate() {
            // A frame stands around its beginning; beyond the ends the sound is mirrored.
            let begin = ((first + i) * HOP) as i64 - (WINDOW / 2) as i64;
            let inside = usize::try_from(begin).ok();
            let inside = inside.and_then(|begin| samples.get(begin..begin + WINDOW));
            let frame = inside.unwrap_or_else(|| {
                for (i, sample) in (begin..).zip(&mut at_end) {
                    *sample = samples[mirrored(i, samples.len())];
                }
                &at_end
            });
            for (out, (sample, weight)) in windowed.iter_mut().zip(frame.iter().zip(&self.window)) {
                *out = f64::from(*sample) * weight;
            }
            let done = self
                .fft
                .process_with_scratch(&mut windowed, &mut spectrum, &mut scratch);
            debug_assert!(done.is_ok(), "the lengths are those of the plan");
            for (power, x) in power.iter_mut().zip(&spectrum) {
                *power = x.norm_sqr();
            }
            for (out, (begin, weights)) in energies.iter_mut().zip(&self.filters) {
                let energy = weights.iter().zip(&power[*begin..]);
                let energy: f64 = energy.map(|(weight, power)| weight * power).sum();
                *out = energy.max(1e-10).log10() as f32;
            }
        }
    }
}

/// The index inside of `0..len` that reflection without the end itself makes of `index`.
fn mirrored(index: i64, len: usize) -> usize {
    let last = len as i64 - 1;
    if last <= 0 {
        return 0;
    }
    let folded = index.rem_euclid(2 * last);
    folded.min(2 * last - folded) as usize
}

/// Slaney's mel scale: linear up to 1000 Hz, logarithmic above.
fn mel_of(hertz: f64) -> f64 {
    match hertz < 1000.0 {
        true => hertz * 3.0 / 200.0,
        false => 15.0 + (hertz / 1000.0).ln() * 27.0 / 6.4f64.ln(),
    }
}

fn hertz_of(mel: f64) -> f64 {
    match mel < 15.0 {
        true => mel * 200.0 / 3.0,
        false => 1000.0 * ((mel - 15.0) * 6.4f64.ln() / 27.0).exp(),
    }
}

/// Triangles of equal area between points that are evenly spaced on the mel scale.
fn filters(mels: usize) -> Vec<(usize, Vec<f64>)> {
    let top = f64::from(RATE) / 2.0;
    let step = mel_of(top) / (mels + 1) as f64;
    let point = |i: usize| hertz_of(step * i as f64);
    let bin = |k: usize| top * k as f64 / (BINS - 1) as f64;
    let filter = |i: usize| {
        let (low, middle, high) = (point(i), point(i + 1), point(i + 2));
        let weight = |k: usize| {
            let (up, down) = (
                (bin(k) - low) / (middle - low),
                (high - bin(k)) / (high - middle),
            );
            up.min(down).max(0.0) * 2.0 / (high - low)
        };
        let first = (0..BINS).find(|&k| weight(k) > 0.0).unwrap_or(0);
        let weights = (first..BINS).map(weight).take_while(|w| *w > 0.0);
        (first, weights.collect())
    };
    (0..mels).map(filter).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_length_has_its_frames() {
        let mel = LogMelExtractor::new(80);
        for len in [0, 1, 159, 160, 161, 400, 1_000] {
            let found = mel.compute(&vec![0.25; len]);
            assert_eq!(found.frames, len / HOP);
            assert_eq!(found.values.len(), 80 * found.frames);
            assert!(found.values.iter().all(|x| x.is_finite()), "{len}");
        }
    }

    #[test]
    fn what_is_beyond_the_ends_is_mirrored() {
        let found: Vec<_> = (-3..8).map(|i| mirrored(i, 4)).collect();
        assert_eq!(found, [3, 2, 1, 0, 1, 2, 3, 2, 1, 0, 1]);
        assert_eq!([mirrored(-5, 1), mirrored(9, 2)], [0, 1]);
    }
}
