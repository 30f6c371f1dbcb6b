//! The embeddings of an image, and its position in a prompt.

use ferrum_models::ImageSpan;
use ferrum_types::TokenId;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// First key of images in the prefix cache, above all tokens.
pub const FIRST_CACHE_KEY: TokenId = 1 << 31;

static MADE: AtomicU32 = AtomicU32::new(0);

/// The embeddings of an image. Equal ones that were made one by one count as different images.
#[derive(Clone, PartialEq)]
pub struct ImageEmbeddings {
    key: TokenId,
    tokens: usize,
    /// `[tokens, hidden]`.
    values: Arc<[f32]>,
}

impl ImageEmbeddings {
    /// Of `tokens` tokens.
    pub fn new(tokens: usize, values: Vec<f32>) -> Self {
        // After 2³¹ images keys come again; by then those of the first are in no cache.
        let number = MADE.fetch_add(1, Ordering::Relaxed);
        Self {
            key: FIRST_CACHE_KEY | number,
            tokens,
            values: values.into(),
        }
    }

    /// The key of its tokens in the prefix cache. No other image of this process has it.
    pub(crate) fn cache_key(&self) -> TokenId {
        self.key
    }

    /// Number of its tokens.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// `[tokens, hidden]`.
    pub fn values(&self) -> &[f32] {
        &self.values
    }
}

impl fmt::Debug for ImageEmbeddings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("ImageEmbeddings");
        shown.field("tokens", &self.tokens).finish_non_exhaustive()
    }
}

/// An image, and where it is in a prompt.
#[derive(Clone, Debug, PartialEq)]
pub struct PromptImage {
    /// Position of its first token.
    pub start: usize,
    /// The image.
    pub image: ImageEmbeddings,
}

impl PromptImage {
    pub(crate) fn span(&self) -> ImageSpan {
        ImageSpan {
            start: self.start,
            tokens: self.image.tokens,
            embeddings: Arc::clone(&self.image.values),
        }
    }
}
