//! Audio files to samples at the rate of a model, and samples to a log-mel spectrogram.

mod decode;
mod mel;
mod resample;

pub use decode::{Audio, AudioError, AudioLimits, decode};
pub use mel::{HOP, LogMelExtractor, LogMelSpectrogram, RATE};
pub use resample::resample;
