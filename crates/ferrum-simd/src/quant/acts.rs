//! Activations in signed bytes: each row's 32 numbers share a scale.
//!
//! A unit of a row is quantised by itself (`amax / 127`, rounded to nearest even), so a row's bytes
//! depend on that row alone. Beside the codes lie their sums, with which kernels take zero points and
//! minimums into account.

use super::format::{STEPS, UNIT};
use crate::exec::Exec;
use crate::isa::Kernel;
use crate::math::MAGIC;
use crate::memory::SharedMut;
use crate::simd::{LANES, Simd};

/// Words (of 32 bits) of a unit of a row.
pub(crate) const WORDS: usize = STEPS + 4;

/// Which word of a unit holds what; in a tile of `rows` rows word `w` of row `r` is at `w·rows + r`.
pub(crate) mod word {
    use super::STEPS;
    /// f32: the scale.
    pub(crate) const SCALE: usize = STEPS;
    /// Two i16: the negated sum of the first sixteen codes, and of the others.
    pub(crate) const NEGATED_SUMS: usize = STEPS + 1;
    /// i32: the negated sum of all codes.
    pub(crate) const NEGATED_SUM: usize = STEPS + 2;
    /// f32: the sum of all codes times the scale.
    pub(crate) const SCALED_SUM: usize = STEPS + 3;
}

const _: () = assert!(word::SCALED_SUM + 1 == WORDS);

/// Quantises rows of `x` (`[rows, k]`), in the `order` of a matrix, into tiles of `tile_rows`:
/// `[tiles][units][WORDS][rows]`.
pub(crate) fn pack(
    exec: &Exec,
    (x, k, order): (&[f32], usize, Option<&[u32]>),
    tile_rows: usize,
    out: SharedMut<'_, i32>,
) {
    let rows = x.len().checked_div(k).unwrap_or(0);
    let row_words = k / UNIT * WORDS;
    exec.parallel_for(rows.div_ceil(tile_rows), 4 * tile_rows * k, |tiles, _| {
        for t in tiles {
            let first = t * tile_rows;
            let count = tile_rows.min(rows - first);
            // SAFETY: each tile is packed by one task, and tiles do not overlap.
            let out = unsafe { out.part(first * row_words, count * row_words) };
            pack_tile(exec, count, |row| &x[(first + row) * k..][..k], order, out);
        }
    });
}

/// Quantises a tile of `count` rows, with their numbers in this order.
pub(crate) fn pack_tile<'a>(
    exec: &Exec,
    count: usize,
    of: impl Fn(usize) -> &'a [f32],
    order: Option<&[u32]>,
    out: &mut [i32],
) {
    for row in 0..count {
        let x = of(row);
        exec.level.run(Row {
            x,
            order,
            row,
            count,
            out,
        });
    }
}

struct Row<'a> {
    x: &'a [f32],
    order: Option<&'a [u32]>,
    row: usize,
    count: usize,
    out: &'a mut [i32],
}

impl Kernel for Row<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self {
            x,
            order,
            row,
            count,
            out,
        } = self;
        assert!(row < count, "a row of the tile");
        let order = order.map(|order| order.as_chunks::<UNIT>().0);
        let units = x.as_chunks::<UNIT>().0;
        for (u, out) in out.chunks_exact_mut(WORDS * count).enumerate() {
            let mut ordered = [0.0; UNIT];
            let unit = match order {
                Some(order) => {
                    for (to, &input) in ordered.iter_mut().zip(&order[u]) {
                        *to = x[input as usize];
                    }
                    &ordered
                }
                None => &units[u],
            };
            // SAFETY: a unit has two vectors.
            let (low, high) = unsafe { (s.load(unit.as_ptr()), s.load(unit.as_ptr().add(LANES))) };
            let amax = s.largest(s.max(s.abs(low), s.abs(high)));
            let scale = amax / 127.0;
            let inverse = if amax > 0.0 { 127.0 / amax } else { 0.0 };
            let (first, first_sum) = codes(s, low, inverse);
            let (second, second_sum) = codes(s, high, inverse);
            let sum = first_sum + second_sum;
            let mut put = |word: usize, value: i32| {
                // SAFETY: words are below WORDS and the row is below `count` (asserted), and a unit has WORDS for each of `count` rows.
                unsafe { *out.get_unchecked_mut(word * count + row) = value };
            };
            for t in 0..STEPS / 2 {
                put(t, first[t]);
                put(STEPS / 2 + t, second[t]);
            }
            put(word::SCALE, scale.to_bits() as i32);
            // At most 16 · 127 each.
            put(
                word::NEGATED_SUMS,
                (-first_sum & 0xffff) | (-second_sum << 16),
            );
            put(word::NEGATED_SUM, -sum);
            put(word::SCALED_SUM, (scale * sum as f32).to_bits() as i32);
        }
    }
}

/// `x · inverse` rounded to nearest even, as four steps of bytes, and their sum.
#[inline(always)]
fn codes<S: Simd>(s: S, x: S::V, inverse: f32) -> ([i32; LANES / 4], i32) {
    // Adding 1.5·2^23 rounds to an integer and leaves it in the low bits.
    s.bytes_of_magic(s.fma(x, s.splat(inverse), s.splat(MAGIC)))
}
