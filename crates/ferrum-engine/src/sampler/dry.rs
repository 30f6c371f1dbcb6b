//! DRY ("don't repeat yourself"): the longer a passage that is being repeated, the less likely the
//! token that would go on with it.

use super::breakers::{BreakScan, DryBreakers};
use crate::suffix::suffix_matches;
use ferrum_types::TokenId;
use std::collections::HashMap;

/// Settings of DRY. Source: the proposal of p-e-w (text-generation-webui, pull request 5677).
#[derive(Clone, Debug, PartialEq)]
pub struct Dry {
    /// Penalty of a repeated passage of `allowed_length` tokens; 0: none.
    pub multiplier: f32,
    /// Factor on the penalty for each token more; at least 1.
    pub base: f32,
    /// Shortest repeated passage that is penalised.
    pub allowed_length: usize,
    /// How many tokens it looks back at; `usize::MAX`: all.
    pub last_n: usize,
    /// Texts over which no passage reaches; see [`DryBreakers::find`].
    pub breakers: DryBreakers,
}

impl Default for Dry {
    fn default() -> Self {
        Self {
            multiplier: 0.0,
            base: 1.75,
            allowed_length: 2,
            last_n: usize::MAX,
            breakers: DryBreakers::default(),
        }
    }
}

impl Dry {
    /// Texts that usually break passages.
    pub const DEFAULT_BREAKERS: [&'static str; 4] = ["\n", ":", "\"", "*"];
}

/// Greatest exponent of e that is still a number.
const LOG_MAX: f32 = 88.0;

/// What a step needs, kept to spare allocations.
#[derive(Clone, Debug, Default)]
pub(super) struct DryScratch {
    breaks: BreakScan,
    /// See [`suffix_matches`].
    matches: Vec<usize>,
    /// Longest repeated passage that each token would go on with.
    longest: HashMap<TokenId, usize>,
}

impl DryScratch {
    pub(super) fn apply(&mut self, dry: &Dry, logits: &mut [f32], tokens: &[TokenId]) {
        if dry.multiplier == 0.0 {
            return;
        }
        let window = &tokens[tokens.len().saturating_sub(dry.last_n)..];
        let unbroken = self.breaks.unbroken(&dry.breakers, tokens);
        let unbroken = unbroken.min(window.len());
        let least = dry.allowed_length.max(1);
        if unbroken < least {
            return;
        }
        suffix_matches(window, &mut self.matches);
        self.longest.clear();
        // After the first `len - back` tokens stood what now may come again.
        for (back, &matched) in self.matches.iter().enumerate().skip(1) {
            let length = matched.min(unbroken);
            if length >= least {
                let longest = self.longest.entry(window[window.len() - back]).or_insert(0);
                *longest = length.max(*longest);
            }
        }
        let most = match dry.base.ln() {
            log if log > 0.0 => LOG_MAX / log,
            _ => f32::MAX,
        };
        for (&token, &length) in &self.longest {
            if let Some(x) = logits.get_mut(token as usize) {
                let exponent = ((length - least) as f32).min(most);
                *x -= dry.multiplier * dry.base.powf(exponent);
            }
        }
    }
}
