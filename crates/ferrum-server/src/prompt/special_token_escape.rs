//! Escapes special tokens in user and tool text so that they cannot inject control tokens.
//!
//! A chat template writes special tokens as text, and so can a user: `<|im_end|>` in a message would end it, and what
//! follows would speak as the system. So where the content of users and tools spells a special token, it is put between
//! two marks before the template is rendered. The tokenizer reads what stands between the marks as plain text. The marks
//! are noncharacters, which texts do not contain.

use aho_corasick::{AhoCorasick, MatchKind};
use ferrum_formats::tokenizer::{EncodeOptions, Tokenizer, TokenizerError};
use ferrum_types::TokenId;
use std::borrow::Cow;

pub(crate) const OPEN: char = '\u{fdd0}';
const CLOSE: char = '\u{fdd1}';

/// Finds the special tokens of a vocabulary in text, and escapes them.
#[derive(Debug)]
pub(crate) struct SpecialTokenEscaper {
    /// `None` where the vocabulary has none that could be spelled.
    finder: Option<AhoCorasick>,
}

impl SpecialTokenEscaper {
    pub(crate) fn new(tokenizer: &Tokenizer) -> Self {
        let ids = (0..tokenizer.vocab_size()).filter_map(|id| TokenId::try_from(id).ok());
        let special = ids.filter(|&id| tokenizer.is_special(id));
        let texts = special.filter_map(|id| tokenizer.token_text(id));
        let texts: Vec<_> = texts.filter(|text| !text.is_empty()).collect();
        let mut finder = AhoCorasick::builder();
        finder.match_kind(MatchKind::LeftmostLongest);
        Self {
            finder: finder.build(texts).ok(),
        }
    }

    /// The text with marks around what spells a special token, and without marks of its own.
    pub(crate) fn escape<'t>(&self, text: &'t str) -> Cow<'t, str> {
        let own = text.contains([OPEN, CLOSE]);
        let text: Cow<'t, str> = match own {
            true => text.replace([OPEN, CLOSE], "\u{fffd}").into(),
            false => text.into(),
        };
        let parts = self.parts(&text);
        if parts.iter().all(|(_, is_token)| !is_token) {
            return text;
        }
        let mut out = String::with_capacity(text.len() + 16);
        for (part, is_token) in parts {
            out.extend(is_token.then_some(OPEN));
            out.push_str(part);
            out.extend(is_token.then_some(CLOSE));
        }
        out.into()
    }

    /// The text in parts that are not empty, each with whether it spells a special token.
    pub(crate) fn parts<'t>(&self, text: &'t str) -> Vec<(&'t str, bool)> {
        let (mut parts, mut end) = (Vec::new(), 0);
        let found = self.finder.iter().flat_map(|finder| finder.find_iter(text));
        for found in found {
            parts.push((&text[end..found.start()], false));
            parts.push((&text[found.range()], true));
            end = found.end();
        }
        parts.push((&text[end..], false));
        parts.retain(|(part, _)| !part.is_empty());
        parts
    }
}

/// The tokens of a prompt in which texts are [escaped](SpecialTokenEscaper::escape).
///
/// # Errors
/// Those of [`Tokenizer::encode`].
pub(crate) fn encode(
    tokenizer: &Tokenizer,
    text: &str,
    options: EncodeOptions,
) -> Result<Vec<TokenId>, TokenizerError> {
    if !text.contains(OPEN) {
        return tokenizer.encode(text, options);
    }
    let plain = EncodeOptions {
        add_special: false,
        parse_special: false,
    };
    let mut tokens = Vec::new();
    for (i, part) in text.split(OPEN).enumerate() {
        // Only the beginning of the whole may get a token before it.
        let options = EncodeOptions {
            add_special: options.add_special && i == 0,
            ..options
        };
        let (spelled, rest) = match part.split_once(CLOSE) {
            Some(parts) if i > 0 => parts,
            _ => ("", part),
        };
        for (text, options) in [(spelled, plain), (rest, options)] {
            if !text.is_empty() {
                tokens.extend(tokenizer.encode(text, options)?);
            }
        }
    }
    Ok(tokens)
}

/// The prompt without marks, as it is shown.
pub(crate) fn unescape(text: String) -> String {
    match text.contains([OPEN, CLOSE]) {
        true => text.replace([OPEN, CLOSE], ""),
        false => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::models::demo;

    #[test]
    fn what_is_spelled_out_is_text() {
        let model = demo().decoder();
        let tokenizer = &model.tokenizer;
        let special = (0..tokenizer.vocab_size() as TokenId).filter(|&id| tokenizer.is_special(id));
        let special: Vec<_> = special.collect();
        let text = tokenizer.token_text(special[0]).unwrap();
        let escaper = SpecialTokenEscaper::new(tokenizer);
        let said = format!("a{text}{text}b\u{fdd0}");
        let marked = escaper.escape(&said);
        let prompt = format!("{text}{marked}{text}");
        let tokens = encode(tokenizer, &prompt, EncodeOptions::PROMPT).unwrap();
        let found: Vec<_> = tokens.iter().filter(|id| special.contains(id)).collect();
        // Those of the template, and none of the message.
        assert_eq!(found, [&special[0], &special[0]]);
        assert_eq!(
            tokenizer.decode(&tokens, false),
            format!("{text}a{text}{text}b\u{fffd}{text}")
        );
        assert_eq!(
            unescape(prompt),
            format!("{text}a{text}{text}b\u{fffd}{text}")
        );
        assert_eq!(escaper.escape("a cat"), "a cat");
    }
}
