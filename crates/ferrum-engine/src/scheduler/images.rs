//! Images of a sequence: where steps may end, and their keys in the prefix cache.
//!
//! All images have the same tokens, so the prefix cache uses a key of each image instead of those: prefixes are equal only
//! if their images are. A token of an image attends to later tokens of the image, so a step has all that is left of an
//! image, or nothing of it.

use crate::image_embeddings::PromptImage;
use ferrum_models::ImageSpan;
use ferrum_types::TokenId;

/// See the [module](self).
#[derive(Debug)]
pub(super) struct SequenceImages {
    pub(super) spans: Vec<ImageSpan>,
    /// The tokens of the sequence, with the keys of images instead of their tokens.
    keys: Vec<TokenId>,
}

impl SequenceImages {
    /// The images of a prompt; `None` if it has none.
    pub(super) fn of(prompt: &[TokenId], images: &[PromptImage]) -> Option<Box<Self>> {
        if images.is_empty() {
            return None;
        }
        let (mut keys, mut spans) = (prompt.to_vec(), Vec::with_capacity(images.len()));
        for image in images {
            let span = image.span();
            if let Some(tokens) = keys.get_mut(span.positions()) {
                tokens.fill(image.image.cache_key());
            }
            spans.push(span);
        }
        Some(Box::new(Self { spans, keys }))
    }

    /// Appends a token of the sequence.
    pub(super) fn push(&mut self, token: TokenId) {
        self.keys.push(token);
    }
}

/// The keys of a sequence's tokens in the prefix cache.
pub(super) fn keys<'a>(
    images: &'a Option<Box<SequenceImages>>,
    tokens: &'a [TokenId],
) -> &'a [TokenId] {
    images.as_ref().map_or(tokens, |images| &images.keys)
}
