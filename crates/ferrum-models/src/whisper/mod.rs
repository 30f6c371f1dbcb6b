//! Whisper: speech to text (Radford et al., "Robust Speech Recognition via Large-Scale Weak Supervision", 2022).
//!
//! An encoder reads a window of sound as a log-mel spectrogram. A decoder writes tokens and attends over itself and over
//! the encoder's states, whose keys and values are computed once for a window. What is made of windows and tokens
//! is not known here.

mod config;
mod forward;
mod load;

pub use config::{WhisperModel, WhisperSpec, is_whisper, read_whisper};
pub use forward::{SpeechModel, WhisperRunner, WhisperWeights};
pub use load::load_whisper;
