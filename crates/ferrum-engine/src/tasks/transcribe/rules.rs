//! Which token may come next: Whisper's rules for timestamps, and what is never written.

use super::special::SpeechTokens;
use ferrum_types::TokenId;

/// The rules of one text.
pub(super) struct Rules<'a> {
    pub(super) tokens: &'a SpeechTokens,
    /// Whether the text has timestamps.
    pub(super) timestamps: bool,
}

const NEVER: f32 = f32::NEG_INFINITY;

fn forbid(logits: &mut [f32], from: usize, to: usize) {
    let to = to.min(logits.len());
    logits[from.min(to)..to].fill(NEVER);
}

impl Rules<'_> {
    /// Forbids what may not follow the tokens of the text so far.
    pub(super) fn apply(&self, text: &[TokenId], logits: &mut [f32]) {
        let first = if text.is_empty() {
            &*self.tokens.suppressed_first
        } else {
            &[]
        };
        for &token in self.tokens.suppressed.iter().chain(first) {
            let at = token as usize;
            forbid(logits, at, at + 1);
        }
        if self.timestamps {
            self.apply_timestamps(text, logits);
        }
    }

    fn apply_timestamps(&self, text: &[TokenId], logits: &mut [f32]) {
        let (eot, none) = (self.tokens.eot as usize, self.tokens.no_timestamps as usize);
        let (begin, end) = (none + 1, logits.len());
        forbid(logits, none, begin);
        // They come in pairs, except before the end.
        let is_time = |token: Option<&TokenId>| token.is_some_and(|&token| token as usize >= begin);
        let last_is = is_time(text.last());
        let before = text.len().checked_sub(2).map(|at| &text[at]);
        let before_is = text.len() < 2 || is_time(before);
        match (last_is, before_is) {
            (true, true) => forbid(logits, begin, end),
            (true, false) => forbid(logits, 0, eot),
            (false, _) => {}
        }
        // They do not go back, and not one of them comes a third time.
        if let Some(&last) = text.iter().rev().find(|token| is_time(Some(token))) {
            let again = last_is && !before_is;
            let next = last as usize + usize::from(!again);
            forbid(logits, begin, next);
        }
        if text.is_empty() {
            forbid(logits, 0, begin);
            if let Some(most) = self.tokens.max_initial {
                forbid(logits, begin.saturating_add(most).saturating_add(1), end);
            }
        }
        // If some time is likelier than any word, it is a time.
        let begin = begin.min(end);
        let word = logits[..begin].iter().copied().fold(NEVER, f32::max);
        let times = &logits[begin..];
        let most = times.iter().copied().fold(NEVER, f32::max);
        if most > NEVER {
            let sum: f64 = times.iter().map(|x| f64::from(x - most).exp()).sum();
            if f64::from(most) + sum.ln() > f64::from(word) {
                forbid(logits, 0, begin);
            }
        }
    }
}

/// The token with the highest logit, the first of equals; `None` where there is no number.
pub(super) fn likeliest(logits: &[f32]) -> Option<TokenId> {
    let mut best: Option<(usize, f32)> = None;
    for (i, &logit) in logits.iter().enumerate().filter(|(_, x)| !x.is_nan()) {
        if best.is_none_or(|(_, most)| logit > most) {
            best = Some((i, logit));
        }
    }
    best.map(|(i, _)| i as TokenId)
}
