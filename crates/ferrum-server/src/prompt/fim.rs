//! Prompts that fill in the middle: what stands before and after a gap, in the order and between the tokens that a
//! model was trained with.
//!
//! What users send is text, also where it spells such a token. What does not fit the context is cut off where it is
//! furthest from the gap, as llama.cpp does: other files from their start, the text before the gap from its start, the
//! text after it from its end.

use crate::error::ApiError;
use crate::models::model::Model;
use crate::request::Extra;
use ferrum_formats::tokenizer::{EncodeOptions, FimTokens, TokenizerKind};
use ferrum_types::TokenId;

type Result<T> = std::result::Result<T, ApiError>;

/// What stands around a gap, as tokens.
#[derive(Debug, Default)]
pub(crate) struct FimParts {
    pub(crate) prefix: Vec<TokenId>,
    pub(crate) suffix: Vec<TokenId>,
    /// Other files; see [`repository`].
    pub(crate) extra: Vec<TokenId>,
}

/// The tokens of a model that can do it; `param` is what asks for it.
///
/// # Errors
/// 400 where the vocabulary has no such tokens.
pub(crate) fn tokens<'m>(model: &'m Model, param: &str) -> Result<&'m FimTokens> {
    model.fim().ok_or_else(|| {
        let reason = "this model cannot fill in the middle: its vocabulary has no tokens for that";
        ApiError::unsupported(param, reason)
    })
}

/// The tokens of the text before a gap.
pub(crate) fn prefix(model: &Model, param: &str, text: &str) -> Result<Vec<TokenId>> {
    let mut tokens = Vec::new();
    for part in split_fim_tokens(model, text) {
        tokens.extend(match tokens.is_empty() {
            true => model.encode(param, part, EncodeOptions::PLAIN)?,
            false => continued(model, param, part)?,
        });
    }
    Ok(tokens)
}

/// The tokens of the text after a gap, which begins in the middle of a text.
pub(crate) fn suffix(model: &Model, param: &str, text: &str) -> Result<Vec<TokenId>> {
    let mut tokens = Vec::new();
    for part in split_fim_tokens(model, text) {
        tokens.extend(continued(model, param, part)?);
    }
    Ok(tokens)
}

/// The text in parts, such that no part spells a token that fills in the middle: some files have those tokens as
/// words, which plain text would become.
fn split_fim_tokens<'t>(model: &Model, text: &'t str) -> Vec<&'t str> {
    let ids = model.fim().into_iter().flat_map(|fim| &fim.ends);
    let mut cuts = Vec::new();
    for &id in ids {
        let Some(spelled) = model.served.tokenizer.token_text(id) else {
            continue;
        };
        let Some(first) = spelled
            .chars()
            .next()
            .filter(|_| spelled.chars().count() > 1)
        else {
            continue;
        };
        let found = text.match_indices(&spelled);
        cuts.extend(found.map(|(at, _)| at + first.len_utf8()));
    }
    cuts.sort_unstable();
    cuts.dedup();
    let mut parts = Vec::new();
    let mut start = 0;
    for end in cuts.into_iter().chain([text.len()]) {
        if start < end {
            parts.push(&text[start..end]);
        }
        start = end;
    }
    parts
}

/// A character that merges with nothing, so that its tokens are the same whatever follows.
const ANCHOR: &str = "☺";

/// The tokens of a text that goes on from another: SentencePiece would put a space at its beginning.
fn continued(model: &Model, param: &str, text: &str) -> Result<Vec<TokenId>> {
    let plain = |text: &str| model.encode(param, text, EncodeOptions::PLAIN);
    match model.served.tokenizer.kind() {
        TokenizerKind::ByteLevelBpe | TokenizerKind::WordPiece | TokenizerKind::WordLevel => {
            return plain(text);
        }
        _ => {}
    }
    let anchor = plain(ANCHOR)?;
    let whole = plain(&format!("{ANCHOR}{text}"))?;
    match whole.strip_prefix(&anchor[..]) {
        Some(rest) => Ok(rest.to_vec()),
        None => plain(text),
    }
}

/// The tokens of other files: with the tokens for repositories and files where the vocabulary has them, in the
/// layout of llama.cpp, else one text after the other.
pub(crate) fn repository(
    model: &Model,
    fim: &FimTokens,
    files: &[Extra],
    param: &str,
) -> Result<Vec<TokenId>> {
    let mut tokens = Vec::new();
    if files.is_empty() {
        return Ok(tokens);
    }
    if let Some(repo) = fim.repo {
        tokens.push(repo);
        tokens.extend(prefix(model, param, "myproject\n")?);
    }
    for (i, file) in files.iter().enumerate() {
        let param = format!("{param}[{i}].text");
        let text = file.text.as_deref().unwrap_or_default();
        let end = match text.ends_with('\n') {
            true => "",
            false => "\n",
        };
        let name = file.filename.as_deref().unwrap_or("tmp");
        let text = match fim.file {
            Some(file) => {
                tokens.push(file);
                format!("{name}\n{text}{end}")
            }
            None => format!("{text}{end}"),
        };
        tokens.extend(prefix(model, &param, &text)?);
    }
    if let Some(file) = fim.file {
        // Requests do not name the file with the gap.
        tokens.push(file);
        tokens.extend(prefix(model, param, "filename\n")?);
    }
    Ok(tokens)
}

/// The prompt for an answer of up to `max_tokens`, within the model's context.
pub(crate) fn prompt(
    model: &Model,
    fim: &FimTokens,
    parts: &FimParts,
    max_tokens: usize,
) -> Result<Vec<TokenId>> {
    let begin = first_token(model)?;
    let marks = 2 + usize::from(fim.middle.is_some()) + usize::from(begin.is_some());
    let context = model.served.context;
    // Without a limit of the answer, the prompt gets most of the context.
    let answer = max_tokens.min(context / 4).max(1);
    let room = context.saturating_sub(marks + answer);
    let kept = Kept::of(parts, room);
    let before = &parts.prefix[parts.prefix.len() - kept.prefix..];
    let after = &parts.suffix[..kept.suffix];
    let extra = &parts.extra[parts.extra.len() - kept.extra..];
    let (prefix, suffix) = ((fim.prefix, before), (fim.suffix, after));
    let parts = match fim.suffix_first {
        true => [suffix, prefix],
        false => [prefix, suffix],
    };
    let mut tokens = Vec::with_capacity(marks + kept.prefix + kept.suffix + kept.extra);
    tokens.extend(begin);
    tokens.extend_from_slice(extra);
    for (mark, part) in parts {
        tokens.push(mark);
        tokens.extend_from_slice(part);
    }
    tokens.extend(fim.middle);
    Ok(tokens)
}

/// The token that the model expects before any text.
fn first_token(model: &Model) -> Result<Option<TokenId>> {
    let first = model.encode("prompt", "a", EncodeOptions::TEXT)?;
    let bos = model.served.tokenizer.bos();
    Ok(bos.filter(|bos| first.first() == Some(bos)))
}

/// How many tokens of each part stay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Kept {
    prefix: usize,
    suffix: usize,
    extra: usize,
}

impl Kept {
    /// Of too long a text three quarters are from before the gap, as far as there is so much; other files have what
    /// is left.
    fn of(parts: &FimParts, room: usize) -> Self {
        let (prefix, suffix) = (parts.prefix.len(), parts.suffix.len());
        let suffix = suffix.min((room / 4).max(room.saturating_sub(prefix)));
        let prefix = prefix.min(room - suffix);
        Self {
            prefix,
            suffix,
            extra: parts.extra.len().min(room - suffix - prefix),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::models::demo;
    use ferrum_formats::tokenizer::{GgufVocab, Tokenizer};
    use std::sync::Arc;

    /// Code Llama's vocabulary puts a space before any text; a suffix goes on from one.
    #[test]
    fn a_suffix_gets_no_space_of_its_own() {
        let mut tokens: Vec<String> = ["<unk>", "<s>", "</s>"].map(String::from).into();
        let mut types = vec![2, 3, 3];
        tokens.extend((0..=255u8).map(|byte| format!("<0x{byte:02X}>")));
        types.extend([6; 256]);
        let words = ["▁", "a", "▁a", "b", "▁<PRE>", "▁<SUF>", "▁<MID>"];
        tokens.extend(words.map(String::from));
        types.extend([1, 1, 1, 1, 3, 3, 3]);
        let vocab = GgufVocab {
            model: "llama".into(),
            scores: Some((0..tokens.len()).map(|id| -(id as f32)).collect()),
            tokens,
            token_types: Some(types),
            bos: Some(1),
            eos: Some(2),
            unk: Some(0),
            add_bos: Some(true),
            add_space_prefix: Some(true),
            ..GgufVocab::default()
        };
        let mut served = demo().decoder();
        served.tokenizer = Arc::new(Tokenizer::from_gguf_vocab(&vocab).unwrap());
        let model = Model::new(served);
        let id = |text: &str| model.served.tokenizer.token_id(text).unwrap();
        let parts = FimParts {
            prefix: prefix(&model, "prompt", "ab").unwrap(),
            suffix: suffix(&model, "suffix", "a b").unwrap(),
            extra: Vec::new(),
        };
        let marks = tokens_of(&model);
        let found = prompt(&model, marks, &parts, 8).unwrap();
        let names = [
            "<s>", "▁<PRE>", "▁a", "b", "▁<SUF>", "a", "▁", "b", "▁<MID>",
        ];
        assert_eq!(found, names.map(id));
    }

    fn tokens_of(model: &Model) -> &FimTokens {
        tokens(model, "suffix").unwrap()
    }

    #[test]
    fn what_is_nearest_to_the_gap_stays() {
        let cases = [
            // Prefix, suffix, extra, room, and what stays of them.
            ([10, 10, 10], 100, [10, 10, 10]),
            ([10, 10, 10], 25, [10, 10, 5]),
            ([100, 100, 10], 40, [30, 10, 0]),
            ([100, 4, 10], 40, [36, 4, 0]),
            ([4, 100, 10], 40, [4, 36, 0]),
            ([0, 100, 10], 40, [0, 40, 0]),
            ([5, 5, 5], 0, [0, 0, 0]),
        ];
        for ([prefix, suffix, extra], room, expected) in cases {
            let parts = FimParts {
                prefix: vec![0; prefix],
                suffix: vec![0; suffix],
                extra: vec![0; extra],
            };
            let kept = Kept::of(&parts, room);
            assert_eq!([kept.prefix, kept.suffix, kept.extra], expected);
        }
    }
}
