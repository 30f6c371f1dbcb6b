//! SentencePiece byte-pair encoding by token scores, with byte fallback (`llama`).

use super::symbols::{self, Symbol};
use super::vocab::Vocab;
use ferrum_types::TokenId;

/// Appends the tokens of `text`, in which spaces are still spaces.
pub(super) fn encode(vocab: &Vocab, longest: usize, text: &str, out: &mut Vec<TokenId>) {
    let text = text.replace(' ', "▁");
    let mut symbols: Vec<Symbol> = Vec::with_capacity(text.len());
    for (at, c) in text.char_indices() {
        symbols::push(&mut symbols, at, c.len_utf8(), 0);
    }
    symbols::merge(&mut symbols, |left, right| {
        let (start, len) = (left.start as usize, (left.len + right.len) as usize);
        if len > longest {
            return None;
        }
        let id = vocab.plain_id(&text[start..start + len])?;
        Some((symbols::by_score(vocab.scores[id as usize]), id))
    });
    for symbol in symbols::left_over(&symbols) {
        let start = symbol.start as usize;
        let piece = &text[start..start + symbol.len as usize];
        match vocab.plain_id(piece) {
            Some(id) => out.push(id),
            None => out.extend(piece.bytes().filter_map(|byte| vocab.byte_id(byte))),
        }
    }
}
