//! Prompt-lookup decoding: drafts the tokens that followed the longest earlier match of the sequence's suffix. It needs
//! no draft model and helps where the output quotes its context: code, summaries, structured data.
//!
//! A draft never changes the output. The sampler chooses each token from the same logits as without it; a draft only
//! decides for how many tokens one step gives logits. (Saxena, "Prompt lookup decoding", 2023.)

use super::speculation::DraftLength;
use crate::suffix::suffix_matches;
use ferrum_types::TokenId;

/// Fewest matching tokens for a draft.
const MIN_MATCH: usize = 2;

/// Drafts of the next tokens of one sequence.
#[derive(Clone, Debug)]
pub(super) struct PromptLookup {
    length: DraftLength,
    matches: Vec<usize>,
}

impl PromptLookup {
    /// At most `most` tokens at a time.
    pub(super) fn new(most: usize) -> Self {
        Self {
            length: DraftLength::new(most),
            matches: Vec::new(),
        }
    }

    /// Drafts what comes after `tokens`, which may be nothing: the tokens that followed the longest earlier match of their
    /// suffix, the latest of equal matches.
    pub(super) fn draft<'t>(&mut self, tokens: &'t [TokenId], room: usize) -> &'t [TokenId] {
        let wanted = self.length.next().min(room);
        if wanted == 0 {
            return &[];
        }
        suffix_matches(tokens, &mut self.matches);
        let earlier = self.matches.iter().enumerate().skip(1);
        let longest = earlier.max_by_key(|&(back, &matched)| (matched, usize::MAX - back));
        match longest {
            Some((back, &matched)) if matched >= MIN_MATCH => {
                &tokens[tokens.len() - back..][..back.min(wanted)]
            }
            _ => &[],
        }
    }

    /// Records the outcome of the last draft.
    pub(super) fn record(&mut self, drafted: usize, accepted: usize) {
        self.length.record(drafted, accepted);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_draft_is_what_followed_the_longest_match() {
        let cases: &[(&[TokenId], &[TokenId])] = &[
            (&[], &[]),
            (&[1, 2, 3], &[]),
            (&[2, 9, 9, 1, 2], &[]),
            (&[1, 2, 7, 8, 1, 2], &[7, 8, 1, 2]),
            (&[0, 1, 2, 7, 5, 1, 2, 8, 0, 1, 2], &[7, 5, 1, 2]),
            (&[1, 2, 7, 1, 2, 8, 1, 2], &[8, 1, 2]),
            (&[5, 5, 5], &[5]),
        ];
        for (tokens, expected) in cases {
            let found = PromptLookup::new(8).draft(tokens, 99);
            assert_eq!(found, *expected, "{tokens:?}");
        }
        assert_eq!(PromptLookup::new(8).draft(&[1, 2, 7, 8, 1, 2], 1), [7]);
    }
}
