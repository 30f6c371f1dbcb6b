//! What a lane of rows and a lane of columns hold: one number, or two that are multiplied at once.

use crate::isa::{Kernel, Level};
use crate::simd::Simd;
use half::bf16;

/// How lanes make products.
pub(crate) trait Lane: Copy + Send + Sync + 'static {
    /// Inputs that a lane holds.
    const INPUTS: usize;

    /// `sum` and the products of the lanes of `x` and `column`.
    fn add<S: Simd>(s: S, x: S::V, column: S::V, sum: S::V) -> S::V;

    /// A lane of a row, from its [`INPUTS`](Self::INPUTS) inputs.
    fn of(inputs: &[f32]) -> f32;

    /// Runs `kernel` at a level whose [`Simd`] has the products.
    fn run<K: Kernel>(level: Level, kernel: K) -> K::Output;
}

/// One f32.
#[derive(Clone, Copy)]
pub(crate) struct F32Lane;

impl Lane for F32Lane {
    const INPUTS: usize = 1;

    #[inline(always)]
    fn add<S: Simd>(s: S, x: S::V, column: S::V, sum: S::V) -> S::V {
        s.fma(x, column, sum)
    }

    #[inline(always)]
    fn of(inputs: &[f32]) -> f32 {
        inputs[0]
    }

    #[inline]
    fn run<K: Kernel>(level: Level, kernel: K) -> K::Output {
        level.run(kernel)
    }
}

/// Two bf16, the first in the low half: rows are rounded to that, columns are weights of that.
#[derive(Clone, Copy)]
pub(crate) struct Bf16PairLane;

impl Lane for Bf16PairLane {
    const INPUTS: usize = 2;

    #[inline(always)]
    fn add<S: Simd>(s: S, x: S::V, column: S::V, sum: S::V) -> S::V {
        s.dot_bf16(x, column, sum)
    }

    #[inline(always)]
    fn of(inputs: &[f32]) -> f32 {
        let half = |i: usize| u32::from(bf16::from_f32(inputs[i]).to_bits());
        f32::from_bits(half(0) | half(1) << 16)
    }

    #[inline]
    fn run<K: Kernel>(level: Level, kernel: K) -> K::Output {
        level.run_bf16(kernel)
    }
}
