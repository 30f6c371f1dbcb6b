//! Repetitions in a sequence: what its end has in common with what was there before.

use ferrum_types::TokenId;

/// `matches[back]`: tokens that the end of `window` and the end of `window` without its last `back`
/// tokens have in common. The Z algorithm on the reversed window: linear time.
pub(crate) fn suffix_matches(window: &[TokenId], matches: &mut Vec<usize>) {
    let len = window.len();
    let at = |i: usize| window[len - 1 - i];
    matches.clear();
    matches.resize(len, 0);
    // The range `left..right` equals the start.
    let (mut left, mut right) = (0, 0);
    for back in 1..len {
        let mut matched = if back < right {
            matches[back - left].min(right - back)
        } else {
            0
        };
        while back + matched < len && at(matched) == at(back + matched) {
            matched += 1;
        }
        if back + matched > right {
            (left, right) = (back, back + matched);
        }
        matches[back] = matched;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn matches_are_those_of_plain_comparison(window in prop::collection::vec(0u32..3, 0..40)) {
            let mut found = Vec::new();
            suffix_matches(&window, &mut found);
            for back in 1..window.len() {
                let shorter = window[..window.len() - back].iter().rev();
                let expected = window.iter().rev().zip(shorter).take_while(|(a, b)| a == b).count();
                prop_assert_eq!(found[back], expected);
            }
        }
    }
}
