//! What `ferrum-simd` computes, at every level of this machine. One program, so that the kernels are linked once and
//! compiled for no test.
//!
//! Ops are held against the reference backend where that is: in `ferrum-kernels`, `src/cpu/tests`.

#![allow(clippy::unwrap_used)]

mod logits;
mod memory;
mod pack;
#[cfg(all(target_os = "linux", target_pointer_width = "64"))]
mod pages;
mod pool;
mod tiles;
mod topology;
mod vectors;

use ferrum_simd::exec::Exec;
use ferrum_simd::isa::{Isa, Level};
use ferrum_simd::threads::Pool;
use ferrum_test_support::available;
use std::fmt;
use std::sync::Arc;

/// Random numbers with a seed (xorshift64*), so that a failure can be repeated.
struct Random(u64);

impl Random {
    fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// Between -1 and 1.
    fn unit(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() >> 33) as usize % n
    }

    fn vec(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.unit()).collect()
    }
}

fn bits(x: &[f32]) -> Vec<u32> {
    // Which NaN is not part of a result.
    let canonical = |x: &f32| if x.is_nan() { f32::NAN } else { *x };
    x.iter().map(canonical).map(f32::to_bits).collect()
}

/// Threads and a level.
struct Run {
    exec: Exec,
}

impl Run {
    fn new(level: Level, threads: usize) -> Self {
        Self {
            exec: Exec {
                pool: Arc::new(Pool::new(threads).unwrap()),
                level,
                store: None,
            },
        }
    }
}

impl fmt::Display for Run {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Exec { pool, level, .. } = &self.exec;
        write!(f, "{} on {} threads", level.isa(), pool.threads())
    }
}

/// Every level of this machine, on one thread and several.
fn runs() -> Vec<Run> {
    let levels = available(Isa::ALL, Isa::is_available);
    let levels = levels.into_iter().map(|isa| Level::new(isa).unwrap());
    levels
        .flat_map(|level| [1, 3].map(|threads| Run::new(level, threads)))
        .collect()
}

/// Levels with dot products of bf16: in plain Rust, and by instructions of this machine if it has any.
fn rounding_runs() -> Vec<Run> {
    let plain = [1, 3].map(|threads| Run::new(Level::base_bf16(), threads));
    let rounds = runs().into_iter().filter(|run| run.exec.level.has_bf16());
    plain.into_iter().chain(rounds).collect()
}
