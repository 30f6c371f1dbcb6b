//! Prompt lookup: what came after the end of the text when it was there before is a good draft of what
//! comes now. It costs no model, and pays where answers quote: code, summaries, structured data.
//!
//! A draft never changes an answer. The sampler chooses each token from the logits that it would have had
//! anyway; a draft only decides for how many tokens one step gives logits. (Saxena, "Prompt lookup
//! decoding", 2023.)

use super::speculation::DraftLength;
use crate::suffix::suffix_matches;
use ferrum_types::TokenId;

/// Shortest repeated passage that a draft is based on.
const LEAST_MATCH: usize = 2;

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

    /// A draft of what comes after `tokens`, maybe nothing: what followed the longest earlier passage
    /// that ends like them, the latest of equals.
    pub(super) fn draft<'t>(&mut self, tokens: &'t [TokenId], room: usize) -> &'t [TokenId] {
        let wanted = self.length.next().min(room);
        if wanted == 0 {
            return &[];
        }
        suffix_matches(tokens, &mut self.matches);
        let earlier = self.matches.iter().enumerate().skip(1);
        let longest = earlier.max_by_key(|&(back, &matched)| (matched, usize::MAX - back));
        match longest {
            Some((back, &matched)) if matched >= LEAST_MATCH => {
                &tokens[tokens.len() - back..][..back.min(wanted)]
            }
            _ => &[],
        }
    }

    /// How the last draft turned out: of `tried` tokens, `right` were right.
    pub(super) fn learn(&mut self, tried: usize, right: usize) {
        self.length.learn(tried, right);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guess_is_what_came_after_the_longest_passage() {
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
