//! Text encoders: BERT and its kin, which give vectors of whole texts (embeddings) or scores of pairs (rerankers).
//!
//! Every token sees every other of its text, so nothing is generated and nothing is kept: a batch of texts goes
//! through all layers at once. Texts are packed one behind the other without padding, over the same ragged
//! attention as decoders. The keys and values of a layer lie in one paged pool, which all layers use in turn.

mod config;
mod forward;
mod gguf;
mod hf;
mod load;
mod names;
mod read;

pub use config::{EncoderModel, EncoderSpec, LocalAttention, Positions};
pub use forward::{EncoderLimits, EncoderRunner, TextEncoder, TextInput};
pub use load::load_encoder;
pub(crate) use read::architectures;
pub use read::{is_encoder, read_encoder};
