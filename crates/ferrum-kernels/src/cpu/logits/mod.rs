//! What samplers ask of a row of logits that is on the host, with the vector code of the device's ops:
//! a vocabulary is long, and every sequence reads all of it for every token.
//!
//! All levels give the same bits, so the best one serves whatever level the device was told to use.

mod candidates;
mod logprobs;

pub use candidates::Candidates;
pub use logprobs::logprobs;

use super::isa::{Kernel, Level};
use super::math;
use super::simd::{LANES, Simd};
use crate::backend::NoToken;
use ferrum_types::TokenId;
use std::sync::LazyLock;

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

static LEVEL: LazyLock<Level> = LazyLock::new(Level::best);

/// The greatest number of `x`; `-inf` where there is none. NaN is passed over.
pub fn max(x: &[f32]) -> f32 {
    LEVEL.run(Max(x))
}

/// Writes `exp((x - top) / temperature)` of each logit to `weights`, and gives the sum. `top` is the
/// greatest logit and has weight 1, also when it is infinite; NaN and `-inf` have weight 0.
///
/// # Panics
/// When the lengths differ.
pub fn weigh(logits: &[f32], top: f32, temperature: f32, weights: &mut [f32]) -> f32 {
    assert_eq!(logits.len(), weights.len(), "a weight for each logit");
    LEVEL.run(Weigh {
        logits,
        top,
        temperature,
        weights,
    })
}

struct Max<'a>(&'a [f32]);

impl Kernel for Max<'_> {
    type Output = f32;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> f32 {
        const LOWEST: f32 = f32::NEG_INFINITY;
        let mut best = [s.splat(LOWEST); 4];
        let mut blocks = self.0.chunks_exact(4 * LANES);
        for block in &mut blocks {
            for (i, best) in best.iter_mut().enumerate() {
                // A number that is greater than NaN there is not: `max` then keeps what it had.
                *best = s.max(math::load_at(s, block, i * LANES), *best);
            }
        }
        for rest in blocks.remainder().chunks(LANES) {
            best[0] = s.max(s.load_part(rest, LOWEST), best[0]);
        }
        let lanes = s.to_array(s.max(s.max(best[0], best[1]), s.max(best[2], best[3])));
        lanes.into_iter().fold(LOWEST, f32::max)
    }
}

struct Weigh<'a> {
    logits: &'a [f32],
    top: f32,
    temperature: f32,
    weights: &'a mut [f32],
}

impl Kernel for Weigh<'_> {
    type Output = f32;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> f32 {
        let Self {
            logits, weights, ..
        } = self;
        let (top, temperature) = (s.splat(self.top), s.splat(self.temperature));
        let lowest = s.splat(f32::NEG_INFINITY);
        let mut sum = s.zero();
        math::for_vectors(
            logits.len(),
            #[inline(always)]
            |at, n| {
                let x = match n {
                    LANES => math::load_at(s, logits, at),
                    _ => s.load_part(&logits[at..], f32::NEG_INFINITY),
                };
                let weight = math::exp(s, s.div(s.sub(x, top), temperature));
                // What is not below the top is the top, or no number.
                let certain = s.select_lt(lowest, x, s.splat(1.0), s.zero());
                let weight = s.select_lt(x, top, weight, certain);
                sum = s.add(sum, weight);
                math::store_at(s, weights, at, weight);
            },
        );
        s.sum(sum)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::Isa;

    fn row(len: usize) -> Vec<f32> {
        (0..len)
            .map(|i| ((i * 7919) % 1009) as f32 / 50.0 - 9.0)
            .collect()
    }

    #[test]
    fn all_levels_give_the_bits_of_plain_rust() {
        for len in [0, 1, 15, 16, 17, 63, 64, 65, 200, 1000] {
            let x = row(len);
            let top = max(&x);
            assert_eq!(top, x.iter().copied().fold(f32::NEG_INFINITY, f32::max));
            let bits = |level: Level, temperature| {
                let mut weights = vec![0.0; len];
                let sum = level.run(Weigh {
                    logits: &x,
                    top,
                    temperature,
                    weights: &mut weights,
                });
                (sum.to_bits(), weights)
            };
            for temperature in [1e-30, 0.3, 1.0, 1.7, 100.0] {
                let (_, weights) = bits(Level::best(), temperature);
                for (x, weight) in x.iter().zip(&weights) {
                    let power = f64::from(x - top) / f64::from(temperature);
                    // What rounding does to the power, and what it does to the result.
                    let error = (1.0 - power) * 2e-7 * power.exp();
                    assert!((f64::from(*weight) - power.exp()).abs() < error + 1e-37);
                }
                for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
                    let level = Level::new(isa).unwrap();
                    let found = bits(level, temperature);
                    assert_eq!(found, bits(Level::best(), temperature), "{}", isa.name());
                }
            }
        }
    }

    #[test]
    fn what_is_no_number_has_no_weight() {
        let (nan, inf) = (f32::NAN, f32::INFINITY);
        let cases: [(&[f32], f32, &[f32]); 5] = [
            (&[nan, 2.0, -inf, 2.0], 2.0, &[0.0, 1.0, 0.0, 1.0]),
            (&[1.0, inf, nan], inf, &[0.0, 1.0, 0.0]),
            (&[-inf, -inf], -inf, &[0.0, 0.0]),
            (&[nan, -nan], -inf, &[0.0, 0.0]),
            (&[-3e38, 3e38], 3e38, &[0.0, 1.0]),
        ];
        for (x, top, expected) in cases {
            assert_eq!(max(x), top, "{x:?}");
            let mut weights = vec![9.0; x.len()];
            assert_eq!(weigh(x, top, 0.7, &mut weights), expected.iter().sum());
            assert_eq!(weights, expected, "{x:?}");
        }
    }
}
