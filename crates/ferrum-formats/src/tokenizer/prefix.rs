//! Finding the tokens that a text begins with.

use super::vocab::Vocab;
use ferrum_types::TokenId;

/// Token texts in order, walked byte by byte: a trie without nodes.
#[derive(Debug)]
pub(super) struct PrefixIndex {
    sorted: Vec<TokenId>,
}

impl PrefixIndex {
    pub(super) fn new(vocab: &Vocab, held: impl Fn(TokenId) -> bool) -> Self {
        let mut sorted: Vec<TokenId> = (0..vocab.len() as TokenId)
            .filter(|&id| held(id) && vocab.id(&vocab.texts[id as usize]) == Some(id))
            .collect();
        sorted.sort_by(|&a, &b| vocab.texts[a as usize].cmp(&vocab.texts[b as usize]));
        PrefixIndex { sorted }
    }

    /// Calls `found` with the length and id of every token that `text` begins with, short to long.
    pub(super) fn prefixes(
        &self,
        vocab: &Vocab,
        text: &[u8],
        mut found: impl FnMut(usize, TokenId),
    ) {
        let token = |index: usize| vocab.texts[self.sorted[index] as usize].as_bytes();
        let (mut low, mut high) = (0, self.sorted.len());
        for (depth, &byte) in text.iter().enumerate() {
            let range = &self.sorted[low..high];
            // Tokens in the range share `depth` bytes; one that ends there comes first.
            let at = |id: &TokenId| vocab.texts[*id as usize].as_bytes().get(depth).copied();
            let first = range.partition_point(|id| at(id).is_none_or(|b| b < byte));
            let count = range[first..].partition_point(|id| at(id) == Some(byte));
            (low, high) = (low + first, low + first + count);
            if low == high {
                return;
            }
            if token(low).len() == depth + 1 {
                found(depth + 1, self.sorted[low]);
            }
        }
    }
}
