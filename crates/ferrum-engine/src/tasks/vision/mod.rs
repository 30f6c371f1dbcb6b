//! Images in prompts: from a file to the embeddings that a decoder reads in the place of tokens.
//!
//! [`ImagePrompt`] puts the tokens of images into a prompt. A [`VisionTower`] computes embeddings of decoded images; it is
//! a model of whole tasks, so a [`TaskEngine`](crate::TaskEngine) runs it beside the engine of its decoder. What was computed
//! lately is kept, as a conversation sends its images again with each turn.

mod cache;
mod prompt;
mod tower;

pub use crate::image_embeddings::{FIRST_CACHE_KEY, ImageEmbeddings, PromptImage};
pub use prompt::ImagePrompt;
pub use tower::{ImagePreprocessor, ImageTask, VisionTower};
