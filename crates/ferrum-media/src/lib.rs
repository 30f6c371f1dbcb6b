//! Decodes audio and images into model inputs.
//!
//! Files are hostile: their sizes, rates and lengths are checked before memory is taken for them, and a decoder that panics
//! is an error like any other. This crate knows nothing of models; the numbers that it gives are those of the
//! feature extractors and image processors of `transformers`.

pub mod audio;
pub mod image;
