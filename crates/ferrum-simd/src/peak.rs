//! What this machine can do at best, measured with the device's own threads: the yardsticks beside
//! which `ferrum bench` puts its figures.

use super::exec::Exec;
#[cfg(target_arch = "x86_64")]
use super::gemm::amx;
use super::gemm::lane::{Bf16PairLane, F32Lane, Lane};
use super::isa::{ByteKernel, Kernel};
use super::marlin::with_panels;
use super::memory::{CpuBuffer, SharedMut};
use super::simd::{ByteProducts, LANES, Simd};
use ferrum_quant::weights::QuantWeights;
use ferrum_types::Result;
use std::hint::black_box;
use std::marker::PhantomData;
use std::time::{Duration, Instant};

/// How long a measurement goes on.
const TIME: Duration = Duration::from_millis(300);
/// Larger than the caches that a process usually gets to itself.
const BYTES: usize = 256 << 20;
/// Rounds of one timed run of arithmetic; well below a millisecond.
const ROUNDS: usize = 50_000;
/// Independent sums: enough to hide the latency of an addition, few enough to stay in registers.
const WIDE_SUMS: usize = 12;
/// Rounds of products in tiles, each of a thousand cycles or less.
#[cfg(target_arch = "x86_64")]
const TILE_ROUNDS: usize = 500;
/// Rounds of arithmetic on bytes, of as many products as sums of 16 bits can hold.
const BYTE_ROUNDS: usize = 6_400;
const PRODUCTS: usize = 8;
/// The same where a vector takes several registers.
const NARROW_SUMS: usize = 6;

/// Bytes per second that the device's threads read from memory together, in a typical pass.
///
/// # Errors
/// [`OutOfMemory`](ferrum_types::Error::OutOfMemory) when there is no room for 256 MiB.
pub fn read_bandwidth(exec: &Exec) -> Result<f64> {
    let mut data = CpuBuffer::<f32>::zeroed(BYTES / 4)?;
    // Untouched pages would all be the same page of zeros.
    data.as_mut_slice().fill(1.0);
    let data = data.as_slice();
    let parts = exec.pool.threads() * 8;
    let unit = STREAMS * VECTORS * LANES;
    let part = data.len() / parts / unit * unit;
    let seconds = median_seconds(TIME, || {
        exec.pool.run(parts, &|i, _| {
            black_box(exec.level.run(Sum(&data[i * part..][..part])));
        });
    });
    Ok((parts * part * 4) as f64 / seconds)
}

/// Seconds in which the device's threads pack a weight, beside those of copying half as many bytes as packing
/// reads and writes, measured in turns.
#[derive(Clone, Copy, Debug)]
pub struct PackingTimes {
    /// Bytes that are written.
    pub bytes: usize,
    /// Into memory that was written before: packing, copying.
    pub warm: [f64; 2],
    /// Into memory as the system gives it.
    pub cold: [f64; 2],
}

/// How fast a weight that takes `read` bytes is packed: medians.
///
/// # Errors
/// As [`load`](crate::marlin::load).
pub fn packing(exec: &Exec, weights: &QuantWeights<'_>, cols: usize) -> Result<PackingTimes> {
    with_panels(exec, weights, cols, |panels| {
        let mut packed = panels.packed("packing", exec)?;
        let written = packed.as_slice().len();
        let bytes = (weights.stored_bytes() + written) / 2;
        let mut from = CpuBuffer::<u8>::zeroed(bytes)?;
        from.as_mut_slice().fill(1);
        let from = from.as_slice();
        let mut copied = CpuBuffer::<u8>::zeroed_for_weights(bytes)?;
        let mut times = [const { Vec::new() }; 4];
        let begin = Instant::now();
        while begin.elapsed() < 4 * TIME || times[0].len() < 3 {
            let mut run = |number: usize, run: &mut dyn FnMut() -> Result<()>| {
                let start = Instant::now();
                let done = run();
                times[number].push(start.elapsed().as_secs_f64());
                done
            };
            run(0, &mut || {
                panels.pack_all(exec, packed.as_mut_slice());
                Ok(())
            })?;
            run(1, &mut || {
                copy(exec, from, copied.as_mut_slice());
                Ok(())
            })?;
            run(2, &mut || panels.packed("packing", exec).map(drop))?;
            run(3, &mut || {
                copy(
                    exec,
                    from,
                    CpuBuffer::<u8>::zeroed_for_weights(bytes)?.as_mut_slice(),
                );
                Ok(())
            })?;
        }
        let [packed, copied, packed_fresh, copied_fresh] = times.map(median);
        Ok(PackingTimes {
            bytes: written,
            warm: [packed, copied],
            cold: [packed_fresh, copied_fresh],
        })
    })
}

fn copy(exec: &Exec, from: &[u8], to: &mut [u8]) {
    let (parts, bytes) = (exec.pool.threads() * 4, from.len());
    let to = SharedMut::new(to);
    exec.pool.run(parts, &|i, _| {
        let (start, end) = (bytes * i / parts, bytes * (i + 1) / parts);
        // SAFETY: parts follow one another, each for one task.
        unsafe { to.part(start, end - start) }.copy_from_slice(&from[start..end]);
    });
}

/// f32 operations (a multiply-add counts two) per second of all the device's threads, in a
/// typical run. Where products of f32 are made in tiles of split numbers, of such.
pub fn fma_peak(exec: &Exec) -> f64 {
    let split = exec.level.splits_f32();
    let tiles = split.then(|| tile_peak::<true>(exec)).flatten();
    tiles.unwrap_or_else(|| lane_peak::<F32Lane>(exec))
}

/// bf16 operations (a multiply-add counts two) per second of all the device's threads, in a typical
/// run, where products with weights of bf16 are made of such.
pub fn bf16_peak(exec: &Exec) -> Option<f64> {
    let has_bf16 = exec.level.has_bf16();
    has_bf16.then(|| tile_peak::<false>(exec).unwrap_or_else(|| lane_peak::<Bf16PairLane>(exec)))
}

/// Operations of products in tiles, of operands in the first-level cache, if the level has tiles.
fn tile_peak<const SPLIT: bool>(exec: &Exec) -> Option<f64> {
    #[cfg(target_arch = "x86_64")]
    if exec.level.has_tiles() {
        let tasks = exec.pool.threads() * 4;
        let operations = amx::repeat_products::<SPLIT>(exec.level, 0);
        let seconds = median_seconds(TIME, || {
            exec.pool.run(tasks, &|_, _| {
                black_box(amx::repeat_products::<SPLIT>(
                    exec.level,
                    black_box(TILE_ROUNDS),
                ));
            });
        });
        return Some((tasks * TILE_ROUNDS * operations) as f64 / seconds);
    }
    let _ = exec;
    None
}

fn lane_peak<L: Lane>(exec: &Exec) -> f64 {
    let tasks = exec.pool.threads() * 4;
    let chains = || L::run(exec.level, Chains(black_box(1.0), PhantomData::<L>));
    let sums = chains().1;
    let seconds = median_seconds(TIME, || {
        exec.pool.run(tasks, &|_, _| {
            black_box(chains());
        });
    });
    (tasks * ROUNDS * sums * LANES * L::INPUTS * 2) as f64 / seconds
}

/// Operations on bytes (a multiply-add into wider integers counts two) per second of all the
/// device's threads, in a typical run: the limit of products with quantised weights.
pub fn byte_peak(exec: &Exec) -> f64 {
    let tasks = exec.pool.threads() * 4;
    let sums = exec.level.run_bytes(ByteChains(black_box(1))).1;
    let seconds = median_seconds(TIME, || {
        exec.pool.run(tasks, &|_, _| {
            black_box(exec.level.run_bytes(ByteChains(black_box(1))));
        });
    });
    (tasks * BYTE_ROUNDS * sums * 4 * LANES * 2) as f64 / seconds
}

/// The median of runs that are repeated for `time`, in seconds. The best would be the speed of a lucky
/// moment, which no work of seconds can hold.
pub fn median_seconds(time: Duration, mut run: impl FnMut()) -> f64 {
    let begin = Instant::now();
    let mut times = Vec::new();
    while times.is_empty() || begin.elapsed() < time {
        let start = Instant::now();
        run();
        times.push(start.elapsed().as_secs_f64());
    }
    median(times)
}

/// The median of times, of which there are some.
fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// Reads and adds up, along several streams: one alone is held back by the latency of memory.
struct Sum<'a>(&'a [f32]);

/// Streams of one thread, and vectors that are taken of one before the next: of the combinations
/// tried (Zen 3), the fastest.
const STREAMS: usize = 3;
const VECTORS: usize = 2;
/// Elements that are asked for ahead, as kernels do.
const AHEAD: usize = 256;

impl Kernel for Sum<'_> {
    type Output = f32;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> f32 {
        const STEP: usize = VECTORS * LANES;
        let part = self.0.len() / STREAMS / STEP * STEP;
        let mut sums = [s.zero(); STREAMS * VECTORS];
        for at in (0..part).step_by(STEP) {
            for (i, sum) in sums.iter_mut().enumerate() {
                let at = i / VECTORS * part + at + i % VECTORS * LANES;
                s.prefetch(self.0.as_ptr().wrapping_add(at + AHEAD).cast());
                // SAFETY: `at` is below `part` by a step, and all parts lie in the slice.
                *sum = s.add(*sum, unsafe { s.load(self.0.as_ptr().add(at)) });
            }
        }
        s.sum(
            sums.into_iter()
                .fold(s.zero(), |total, sum| s.add(total, sum)),
        )
    }
}

/// Multiply-adds on registers; gives their sum, and how many chains there were.
struct Chains<L>(f32, PhantomData<L>);

impl<L: Lane> Kernel for Chains<L> {
    type Output = (f32, usize);

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> (f32, usize) {
        if S::TILE_VECS == 2 {
            (self.chains::<S, WIDE_SUMS>(s), WIDE_SUMS)
        } else {
            (self.chains::<S, NARROW_SUMS>(s), NARROW_SUMS)
        }
    }
}

impl<L: Lane> Chains<L> {
    #[inline(always)]
    fn chains<S: Simd, const SUMS: usize>(self, s: S) -> f32 {
        let (a, b) = (s.splat(self.0), s.splat(1e-9));
        let mut sums = [s.splat(self.0); SUMS];
        for _ in 0..ROUNDS {
            for sum in &mut sums {
                *sum = L::add(s, a, b, *sum);
            }
        }
        s.sum(
            sums.into_iter()
                .fold(s.zero(), |total, sum| s.add(total, sum)),
        )
    }
}

/// Products of bytes on registers; gives their sum, and how many products a round has.
struct ByteChains(i32);

impl ByteKernel for ByteChains {
    type Output = (f32, usize);

    #[inline(always)]
    fn run<S: ByteProducts>(self, s: S) -> (f32, usize) {
        if S::TILE_VECS == 2 {
            (self.chains::<S, WIDE_SUMS>(s), WIDE_SUMS * PRODUCTS)
        } else {
            (self.chains::<S, 3>(s), 3 * PRODUCTS)
        }
    }
}

impl ByteChains {
    #[inline(always)]
    fn chains<S: ByteProducts, const SUMS: usize>(self, s: S) -> f32 {
        let weights = [[1u8; 4 * LANES]; PRODUCTS];
        let rows: [i32; SUMS] = std::array::from_fn(|i| self.0 + i as i32);
        let mut totals = [s.splat_i(0); SUMS];
        for _ in 0..BYTE_ROUNDS {
            // Unknown to the compiler, or it would multiply once for all rounds.
            let weights = black_box(&weights);
            let mut products = [s.no_products(); SUMS];
            for w in weights {
                // SAFETY: a row of weights is a whole vector.
                let w = unsafe { s.load_i(w.as_ptr()) };
                for (products, row) in products.iter_mut().zip(rows) {
                    *products = s.narrow(*products, w, row);
                }
            }
            for (total, products) in totals.iter_mut().zip(products) {
                *total = s.collect(products, *total);
            }
        }
        let sum = totals
            .into_iter()
            .fold(s.splat_i(0), |sum, total| s.add_i(sum, total));
        s.sum(s.to_f32(sum))
    }
}
