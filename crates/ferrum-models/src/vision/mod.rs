//! Image towers of decoders: pixel values to the embeddings that stand in a prompt in the place of tokens ("Gemma 3
//! Technical Report", 2025).
//!
//! The tower is that of SigLIP without its attention head (see [`clip`](crate::clip)). Its states are averaged over squares
//! of patches, normed, and mapped to the width of the decoder. What makes pixel values of a file, and where embeddings stand
//! in a prompt, is not known here.

mod config;
mod forward;
mod load;

pub use config::{ImageTokens, VisionModel, VisionSpec, has_vision, read_vision};
pub use forward::{ImageEncoder, VisionRunner};
pub use load::{VisionWeights, load_vision};
