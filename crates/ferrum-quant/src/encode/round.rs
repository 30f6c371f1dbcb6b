//! Rounding to nearest, for the types of 32 numbers with one scale: bit for bit as the `gguf` package does.
//!
//! Sixteen blocks are rounded side by side, each in a lane, as in the search.

use super::lanes::{InstructionSet, LANES, Lanes, SimdKernel};
use super::search::inverse;
use super::{codes_of, pack, runs};
use crate::unpack::UnpackedBlock;
use ferrum_types::GgufQuantType as T;

/// Numbers of a block.
const LEN: usize = 32;

/// Where the numbers of a block go.
#[derive(Clone, Copy, Debug)]
enum Rounding {
    /// The number of largest magnitude takes the lowest code, which stands for minus this.
    Symmetric(f32),
    /// The lowest number takes the code 0, the highest this one.
    Affine(f32),
    /// The codes are numbers from −127 to 127.
    Signed,
}

fn rounding(ty: T) -> Option<Rounding> {
    match ty {
        T::Q4_0 => Some(Rounding::Symmetric(8.0)),
        T::Q5_0 => Some(Rounding::Symmetric(16.0)),
        T::Q4_1 => Some(Rounding::Affine(15.0)),
        T::Q5_1 => Some(Rounding::Affine(31.0)),
        T::Q8_0 => Some(Rounding::Signed),
        _ => None,
    }
}

/// Encodes whole blocks; the lengths are checked.
pub(super) fn round(ty: T, values: &[f32], out: &mut [u8]) {
    round_with(InstructionSet::best(), ty, values, out);
}

fn round_with(set: InstructionSet, ty: T, values: &[f32], out: &mut [u8]) {
    if let Some(rounding) = rounding(ty) {
        set.run(Blocks {
            ty,
            rounding,
            values,
            out,
        });
    }
}

struct Blocks<'a> {
    ty: T,
    rounding: Rounding,
    values: &'a [f32],
    out: &'a mut [u8],
}

impl SimdKernel for Blocks<'_> {
    #[inline(always)]
    fn run<V: Lanes>(self) {
        let bytes = self.ty.block_bytes();
        let mut parts = UnpackedBlock::ZERO;
        let mut out = self.out.chunks_mut(LANES * bytes);
        for values in self.values.chunks(LANES * LEN) {
            let runs = runs::<LEN>(values);
            let mut x = [V::splat(0.0); LEN];
            for (i, x) in x.iter_mut().enumerate() {
                *x = V::column(&runs, i);
            }
            let (d, dmin) = self.rounding.round(&mut x);
            let codes = codes_of(&x);
            let (d, dmin) = (d.store(), dmin.store());
            let Some(out) = out.next() else { break };
            for (block, out) in out.chunks_exact_mut(bytes).enumerate() {
                (parts.d, parts.dmin) = (d[block], dmin[block]);
                if let Some(first) = parts.codes.first_chunk_mut() {
                    *first = codes[block];
                }
                pack::pack(self.ty, &parts, out);
            }
        }
    }
}

impl Rounding {
    /// Replaces the numbers of each lane's block by their codes; `d` and `dmin` of the blocks.
    #[inline(always)]
    fn round<V: Lanes>(self, x: &mut [V; LEN]) -> (V, V) {
        let zero = V::splat(0.0);
        match self {
            Rounding::Symmetric(half) => {
                let mut extreme = zero;
                for &x in &*x {
                    extreme = V::select(extreme.abs().less(x.abs()), x, extreme);
                }
                let d = extreme / V::splat(-half);
                let per = inverse(d);
                let (bias, top) = (V::splat(half + 0.5), V::splat(2.0 * half - 1.0));
                for x in x {
                    *x = (*x * per + bias).max(zero).min(top).floor();
                }
                (d, zero)
            }
            Rounding::Affine(top) => {
                let (mut low, mut high) = (V::splat(f32::INFINITY), V::splat(f32::NEG_INFINITY));
                for &x in &*x {
                    (low, high) = (x.min(low), x.max(high));
                }
                let top = V::splat(top);
                let d = (high - low) / top;
                let per = inverse(d);
                for x in x {
                    *x = ((*x - low) * per + V::splat(0.5))
                        .max(zero)
                        .min(top)
                        .floor();
                }
                (d, low * V::splat(-1.0))
            }
            Rounding::Signed => {
                let mut largest = zero;
                for &x in &*x {
                    largest = x.abs().max(largest);
                }
                let d = largest / V::splat(127.0);
                let per = inverse(d);
                // Halves go away from zero. The number just below a half keeps 0.49999997 from becoming 1.
                let half = V::splat(0.499_999_97);
                let top = V::splat(127.0);
                for x in x {
                    let scaled = *x * per;
                    let magnitude = (scaled.abs() + half).min(top).floor();
                    *x = V::select(scaled.less(zero), zero - magnitude, magnitude);
                }
                (d, zero)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_instruction_set_changes_no_byte() {
        let mut state = 5u64;
        let mut number = || {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            f32::from_bits(((state >> 33) as u32 & 0x8fff_ffff) + 0x3000_0000)
        };
        // Not a whole number of vectors' blocks.
        let row: Vec<f32> = (0..512 * 3 + 96).map(|_| number()).collect();
        for ty in T::all().filter(|&ty| rounding(ty).is_some()) {
            let found: Vec<_> = InstructionSet::all()
                .into_iter()
                .map(|set| {
                    let mut bytes = vec![0; ty.bytes_for(row.len()).unwrap_or(0)];
                    round_with(set, ty, &row, &mut bytes);
                    (set, bytes)
                })
                .collect();
            for (set, bytes) in &found {
                assert!(*bytes == found[0].1, "{ty}: {set:?}");
            }
        }
    }
}
