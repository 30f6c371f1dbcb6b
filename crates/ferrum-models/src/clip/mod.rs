//! CLIP and SigLIP: pictures and texts to vectors of one space, in which those that belong together point the same way
//! (Radford et al., "Learning Transferable Visual Models From Natural Language Supervision", 2021; Zhai et al., "Sigmoid
//! Loss for Language Image Pre-Training", 2023).
//!
//! Two towers of the layers (`pre_norm.rs`) that Whisper's encoder is made of. What makes pixel values of a file and tokens
//! of a text is not known here.

mod config;
mod forward;
mod load;
mod tower;

pub(crate) use config::siglip_image;
pub(crate) use forward::unfold;
pub(crate) use load::{layers, map, stem};
pub(crate) use tower::{Tower, read_rows};

pub use config::{ClipKind, ClipModel, ClipSpec, ImageSpec, TextSpec, is_clip, read_clip};
pub use forward::{ClipRunner, ImageTextModel};
pub use load::{ClipWeights, load_clip};
