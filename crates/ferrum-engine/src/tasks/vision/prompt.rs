//! [`ImagePrompt`]: the tokens of images in a prompt, as the processor of Gemma 3 writes them.
//!
//! A chat template writes the token that begins an image in its place. Before the text becomes tokens, that one is replaced by
//! itself, a token for each embedding, and the token that ends an image, between blank lines.

use crate::image_embeddings::{ImageEmbeddings, PromptImage};
use ferrum_formats::tokenizer::{EncodeOptions, Tokenizer};
use ferrum_models::vision::{ImageTokens, VisionSpec};
use ferrum_types::{Error, Result, TokenId};

/// How images are written into prompts.
#[derive(Clone, Debug)]
pub struct ImagePrompt {
    tokens: ImageTokens,
    /// Of an image.
    count: usize,
    /// What a chat template writes.
    placeholder: String,
    /// What it is replaced by.
    expanded: String,
}

impl ImagePrompt {
    /// For a tower, with the tokenizer of its decoder.
    ///
    /// # Errors
    /// `Model` when the tokenizer lacks one of the tokens.
    pub fn new(spec: &VisionSpec, tokenizer: &Tokenizer) -> Result<Self> {
        let ImageTokens { begin, soft, end } = spec.tokens;
        let fail = |token: TokenId| {
            let reason = format!("token {token}, of images, is not one that the tokenizer finds");
            Error::Model(reason)
        };
        let text = |token: TokenId| {
            let text = tokenizer.token_text(token).filter(|text| !text.is_empty());
            text.ok_or_else(|| fail(token))
        };
        let (placeholder, soft_text, end_text) = (text(begin)?, text(soft)?, text(end)?);
        let count = spec.image_tokens();
        let prompt = Self {
            tokens: spec.tokens,
            count,
            expanded: format!("\n\n{placeholder}{}{end_text}\n\n", soft_text.repeat(count)),
            placeholder,
        };
        let tokens = tokenizer.encode(&prompt.expanded, EncodeOptions::PROMPT);
        let tokens = tokens.map_err(|e| Error::Model(e.to_string()))?;
        let mut wanted = [begin, soft, end].into_iter();
        match wanted.find(|token| !tokens.contains(token)) {
            Some(token) => Err(fail(token)),
            None => prompt.starts(&tokens, 1).map(|_| prompt),
        }
    }

    /// Embeddings of an image.
    pub fn image_tokens(&self) -> usize {
        self.count
    }

    /// A rendered prompt with the tokens of its images. A placeholder after `mark` is none: the text of a message contains it.
    ///
    /// # Errors
    /// `InvalidArgument` when it has not as many places for images as there are images.
    pub fn expand(&self, text: &str, mark: Option<char>, images: usize) -> Result<String> {
        let (mut out, mut found) = (String::with_capacity(text.len()), 0);
        let mut end = 0;
        for (at, place) in text.match_indices(&self.placeholder) {
            out.push_str(&text[end..at]);
            end = at + place.len();
            let spelled = mark.is_some_and(|mark| out.ends_with(mark));
            out.push_str(if spelled { place } else { &self.expanded });
            found += usize::from(!spelled);
        }
        out.push_str(&text[end..]);
        if found != images {
            let reason = format!(
                "the prompt has {found} times \"{}\", which stands for an image, and {images} images",
                self.placeholder
            );
            return Err(Error::invalid("images", reason));
        }
        Ok(out)
    }

    /// Where `images` images begin among the tokens of an [expanded](Self::expand) prompt.
    ///
    /// # Errors
    /// `InvalidArgument` when the prompt has tokens of embeddings elsewhere.
    pub fn starts(&self, tokens: &[TokenId], images: usize) -> Result<Vec<usize>> {
        let ImageTokens { begin, soft, .. } = self.tokens;
        let pairs = tokens.windows(2).zip(1..);
        let starts = pairs.filter(|(pair, _)| **pair == [begin, soft]);
        let starts: Vec<usize> = starts.map(|(_, start)| start).collect();
        let all = tokens.iter().filter(|&&token| token == soft).count();
        let is_image = |&start: &usize| {
            let image = tokens.get(start..start + self.count);
            image.is_some_and(|image| image.iter().all(|&token| token == soft))
        };
        let whole = starts.iter().all(is_image) && all == starts.len() * self.count;
        if starts.len() != images || !whole {
            let reason = format!(
                "the prompt has {all} tokens of images, expected {} for each of {images} images, and none elsewhere",
                self.count
            );
            return Err(Error::invalid("images", reason));
        }
        Ok(starts)
    }

    /// The images of an [expanded](Self::expand) prompt in their places.
    ///
    /// # Errors
    /// Those of [`starts`](Self::starts).
    pub fn place(
        &self,
        tokens: &[TokenId],
        images: Vec<ImageEmbeddings>,
    ) -> Result<Vec<PromptImage>> {
        let starts = self.starts(tokens, images.len())?;
        let placed = starts.into_iter().zip(images);
        Ok(placed
            .map(|(start, image)| PromptImage { start, image })
            .collect())
    }
}
