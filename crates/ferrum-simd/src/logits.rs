//! What samplers ask of a row of logits that is on the host, with the vector code of the device's ops: a vocabulary is
//! long, and every sequence reads all of it for every token.
//!
//! All levels give the same bits, so the best one is used whatever level the device was given.

use super::isa::{Kernel, Level};
use super::math;
use super::simd::{LANES, Simd};
use std::sync::LazyLock;

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
pub fn softmax_weights(logits: &[f32], top: f32, temperature: f32, weights: &mut [f32]) -> f32 {
    softmax_weights_at(*LEVEL, logits, top, temperature, weights)
}

/// [`softmax_weights`] with the code of a level.
///
/// # Panics
/// When the lengths differ.
pub fn softmax_weights_at(
    level: Level,
    logits: &[f32],
    top: f32,
    temperature: f32,
    weights: &mut [f32],
) -> f32 {
    assert_eq!(logits.len(), weights.len(), "a weight for each logit");
    level.run(Weigh {
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
