//! Prompt lookup: what came after the end of the text when it was there before is a good guess at what
//! comes now. It costs no model, and pays where answers quote: code, summaries, structured data.
//!
//! A guess never changes an answer. The sampler chooses each token from the logits that it would have had
//! anyway; a guess only decides for how many tokens one step gives logits. (Saxena, "Prompt lookup
//! decoding", 2023.)

use crate::suffix::suffix_matches;
use ferrum_types::TokenId;

/// Shortest repeated passage that a guess is based on.
const LEAST_MATCH: usize = 2;

/// Guesses at the next tokens of one sequence.
#[derive(Clone, Debug)]
pub(super) struct PromptLookup {
    most: usize,
    /// How many tokens to guess: more while guesses are right.
    length: usize,
    matches: Vec<usize>,
}

impl PromptLookup {
    /// At most `most` tokens at a time.
    pub(super) fn new(most: usize) -> Self {
        Self {
            most,
            length: most.min(4),
            matches: Vec::new(),
        }
    }

    /// A guess at what comes after `tokens`, maybe nothing: what followed the longest earlier passage
    /// that ends like them, the latest of equals.
    pub(super) fn guess<'t>(&mut self, tokens: &'t [TokenId], room: usize) -> &'t [TokenId] {
        let wanted = self.length.min(room);
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

    /// How the last guess turned out: of `tried` tokens, `right` were right.
    pub(super) fn learn(&mut self, tried: usize, right: usize) {
        if tried == 0 {
            return;
        }
        self.length = match right == tried {
            true => self.length * 2,
            false => right + 1,
        };
        self.length = self.length.min(self.most);
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
            let found = PromptLookup::new(8).guess(tokens, 99);
            assert_eq!(found, *expected, "{tokens:?}");
        }
        assert_eq!(PromptLookup::new(8).guess(&[1, 2, 7, 8, 1, 2], 1), [7]);
    }

    #[test]
    fn guesses_grow_while_they_are_right() {
        let mut lookup = PromptLookup::new(10);
        for (tried, right, length) in [(0, 0, 4), (4, 4, 8), (8, 8, 10), (10, 3, 4), (4, 0, 1)] {
            lookup.learn(tried, right);
            assert_eq!(lookup.length, length);
        }
    }
}
