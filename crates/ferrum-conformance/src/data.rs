//! Inputs: the same numbers on every machine, from a small generator seeded by the case's name.

use ferrum_types::SrcDtype;
use half::{bf16, f16};

/// A splitmix64 generator (Steele, Lea, Flood: "Fast splittable pseudorandom number generators").
#[derive(Clone)]
pub(crate) struct Rng {
    state: u64,
    /// Rounds to the backend's activations, so that all backends are given the same numbers.
    round: fn(f32) -> f32,
}

impl Rng {
    /// A generator for the case of this name (seeded by the FNV-1a hash of it).
    pub(crate) fn new(name: &str, round: fn(f32) -> f32) -> Self {
        let hash = |hash: u64, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
        let state = name.bytes().fold(0xcbf2_9ce4_8422_2325, hash);
        Rng { state, round }
    }

    /// 64 random bits.
    pub(crate) fn bits(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// An index below `end`, which is not 0.
    pub(crate) fn below(&mut self, end: usize) -> usize {
        (self.bits() % end as u64) as usize
    }

    /// A number in [0, 1).
    pub(crate) fn unit(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1u64 << 24) as f32
    }

    /// A number of mean 0 and deviation 1, at most 3.5 from 0: the sum of four uniform ones.
    fn bell(&mut self) -> f32 {
        let sum: f32 = (0..4).map(|_| self.unit() - 0.5).sum();
        sum * 3f32.sqrt()
    }

    /// `len` f32 of mean 0 and the deviation `scale`.
    pub(crate) fn floats(&mut self, len: usize, scale: f32) -> Vec<f32> {
        (0..len).map(|_| self.bell() * scale).collect()
    }

    /// [`floats`](Self::floats) that activations of the backend can hold.
    pub(crate) fn acts(&mut self, len: usize, scale: f32) -> Vec<f32> {
        let values = self.floats(len, scale);
        values.into_iter().map(self.round).collect()
    }

    /// `x` as activations of the backend hold it.
    pub(crate) fn act(&self, x: f32) -> f32 {
        (self.round)(x)
    }

    /// Values around 1, as norm weights are.
    pub(crate) fn norm_weights(&mut self, len: usize) -> Vec<f32> {
        let values = self.floats(len, 0.3);
        values.into_iter().map(|x| 1.0 + x).collect()
    }

    /// `len` indices below `end`.
    pub(crate) fn indices(&mut self, len: usize, end: usize) -> Vec<i32> {
        (0..len).map(|_| self.below(end) as i32).collect()
    }

    /// `len` random bytes.
    pub(crate) fn bytes(&mut self, len: usize) -> Vec<u8> {
        (0..len).map(|_| self.bits() as u8).collect()
    }

    /// The numbers 0 to below `len` in random order.
    pub(crate) fn permutation(&mut self, len: usize) -> Vec<usize> {
        let mut order: Vec<usize> = (0..len).collect();
        for i in (1..len).rev() {
            order.swap(i, self.below(i + 1));
        }
        order
    }
}

/// Bytes as they lie in a file: at an odd address, for files promise no alignment.
#[derive(Clone)]
pub(crate) struct FileBytes(Vec<u8>);

impl FileBytes {
    pub(crate) fn new(bytes: impl IntoIterator<Item = u8>) -> Self {
        // One byte of no meaning comes before the others.
        FileBytes(std::iter::once(0xAA).chain(bytes).collect())
    }

    pub(crate) fn get(&self) -> &[u8] {
        &self.0[1..]
    }

    /// The same rows of `row_bytes` bytes with `between` bytes of others from one to the next, and the stride of such
    /// rows.
    pub(crate) fn spread(&self, row_bytes: usize, between: usize) -> (FileBytes, usize) {
        let rows = self.get().chunks_exact(row_bytes.max(1));
        let others = vec![0x55; between];
        let rows = rows.map(|row| row.to_vec()).collect::<Vec<_>>();
        (FileBytes::new(rows.join(&others[..])), row_bytes + between)
    }
}

/// A dense matrix as it lies in a file, and what its numbers are.
#[derive(Clone)]
pub(crate) struct Dense {
    pub(crate) dtype: SrcDtype,
    /// After rounding to `dtype`.
    pub(crate) values: Vec<f32>,
    bytes: FileBytes,
}

impl Dense {
    pub(crate) fn new(dtype: SrcDtype, values: &[f32]) -> Self {
        let mut bytes = Vec::with_capacity(values.len() * dtype.size());
        let mut rounded = Vec::with_capacity(values.len());
        for &value in values {
            match dtype {
                SrcDtype::F32 => {
                    bytes.extend(value.to_le_bytes());
                    rounded.push(value);
                }
                SrcDtype::F16 => {
                    let half = f16::from_f32(value);
                    bytes.extend(half.to_le_bytes());
                    rounded.push(half.to_f32());
                }
                SrcDtype::BF16 => {
                    let half = bf16::from_f32(value);
                    bytes.extend(half.to_le_bytes());
                    rounded.push(half.to_f32());
                }
            }
        }
        Dense {
            dtype,
            values: rounded,
            bytes: FileBytes::new(bytes),
        }
    }

    /// The elements as bytes.
    pub(crate) fn bytes(&self) -> &[u8] {
        self.bytes.get()
    }

    /// [`FileBytes::spread`] of rows of `cols` elements.
    pub(crate) fn spread(&self, cols: usize, between: usize) -> (FileBytes, usize) {
        self.bytes.spread(cols * self.dtype.size(), between)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_follow_from_the_name() {
        let numbers = |name| Rng::new(name, |x| x).floats(1000, 2.0);
        assert_eq!(numbers("a"), numbers("a"));
        assert_ne!(numbers("a"), numbers("b"));
        let squares: f32 = numbers("a").iter().map(|x| x * x).sum();
        assert!((3.0..5.0).contains(&(squares / 1000.0)), "{squares}");
    }

    #[test]
    fn a_permutation_has_every_number_once() {
        let mut order = Rng::new("order", |x| x).permutation(100);
        assert!(order.windows(2).any(|pair| pair[0] > pair[1]));
        order.sort_unstable();
        assert!(order.into_iter().eq(0..100));
    }

    #[test]
    fn dense_values_are_those_of_the_bytes() {
        let dense = Dense::new(SrcDtype::BF16, &[1.0, -0.333]);
        assert_eq!(dense.bytes(), [0x80, 0x3F, 0xAA, 0xBE]);
        assert_eq!(dense.values[1], f32::from_bits(0xBEAA_0000));
    }
}
