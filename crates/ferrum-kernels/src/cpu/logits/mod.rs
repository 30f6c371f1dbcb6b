//! What samplers ask of a row of logits that is on the host, with the vector code of the device's ops:
//! a vocabulary is long, and every sequence reads all of it for every token.
//!
//! All levels give the same bits, so the best one is used whatever level the device was given.

mod candidates;
mod logprobs;

pub use candidates::Candidates;
pub use logprobs::logprobs;

pub use ferrum_simd::logits::{max, softmax_weights};

use crate::backend::NoToken;
use ferrum_types::TokenId;

/// The most likely token, the lowest id of equals; 0 where nothing is a number.
pub fn greedy(logits: &[f32]) -> TokenId {
    let best = max(logits);
    let at = logits.iter().position(|&x| x == best);
    at.unwrap_or(0) as TokenId
}

/// Whether `token`, which was chosen of `logits`, can be: without candidates the lowest id is what is left of all
/// choosing.
///
/// # Errors
/// Why there is none.
pub fn possible(logits: &[f32], token: TokenId) -> Result<TokenId, NoToken> {
    let chosen = logits.get(token as usize);
    if chosen.is_some_and(|&x| x > f32::NEG_INFINITY) {
        return Ok(token);
    }
    match logits.iter().any(|x| x.is_nan()) {
        true => Err(NoToken::NotANumber),
        false => Err(NoToken::Forbidden),
    }
}
