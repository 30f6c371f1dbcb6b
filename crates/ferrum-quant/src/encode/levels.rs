//! The numbers that codes stand for, as a search sees them: a nearest one for any float.

use crate::fp4::E2M1_DOUBLED;
use crate::iq::IQ4_VALUES;
use std::sync::LazyLock;

/// As many numbers as are worked on side by side.
pub(super) type Eight = [f32; 8];

/// Eight numbers, each from its place.
#[inline(always)]
pub(super) fn eight(of: impl FnMut(usize) -> f32) -> Eight {
    std::array::from_fn(of)
}

/// Adding 1.5 · 2²³ rounds to an integer, which the low bits of the mantissa then hold; taking it off
/// again leaves the integer. Unlike `round`, this vectorises.
const MAGIC: f32 = 12_582_912.0;

/// Numbers brought to a range. One instruction for each end, which `clamp` with its care for NaN is not.
#[inline(always)]
fn within(y: &Eight, low: f32, high: f32) -> Eight {
    let y = y.map(|y| if y > low { y } else { low });
    y.map(|y| if y < high { y } else { high })
}

/// The levels of a type, from lowest to highest.
pub(super) trait Levels: Copy {
    /// The lowest.
    fn low(&self) -> f32;

    /// The highest.
    fn high(&self) -> f32;

    /// Distance between the outermost two, the unit in which scales are tried.
    fn gap(&self) -> f32;

    /// The level nearest to each of `y`.
    fn nearest(&self, y: &Eight) -> Eight;

    /// The code of a level.
    fn code(&self, level: f32) -> u8;
}

/// Every integer from one to another; the lowest has the code 0.
#[derive(Clone, Copy, Debug)]
pub(super) struct Range {
    low: f32,
    high: f32,
}

impl Range {
    /// The levels of `bits`-bit codes less `zero`.
    pub(super) fn new(bits: u32, zero: i32) -> Self {
        let low = -zero as f32;
        let high = low + ((1u32 << bits) - 1) as f32;
        Range { low, high }
    }
}

impl Levels for Range {
    fn low(&self) -> f32 {
        self.low
    }

    fn high(&self) -> f32 {
        self.high
    }

    fn gap(&self) -> f32 {
        1.0
    }

    #[inline(always)]
    fn nearest(&self, y: &Eight) -> Eight {
        // Adding and taking off 1.5 · 2²³ rounds to an integer, and unlike `round` it vectorises.
        const MAGIC: f32 = 12_582_912.0;
        // One instruction each, which `clamp` with its care for NaN is not.
        let low = eight(|i| if y[i] > self.low { y[i] } else { self.low });
        let within = eight(|i| {
            if low[i] < self.high {
                low[i]
            } else {
                self.high
            }
        });
        eight(|i| (within[i] + MAGIC) - MAGIC)
    }

    fn code(&self, level: f32) -> u8 {
        (level - self.low) as u8
    }
}

/// Sixteen levels at any distance, none beyond ±127.
#[derive(Debug)]
pub(super) struct Table {
    levels: [f32; 16],
    codes: [u8; 16],
    /// The level nearest to the numbers from `n / 2` to `(n + 1) / 2`, at the low bits of `n`. Levels
    /// are integers, so what lies half way between two of them is such a border.
    nearest: [f32; HALVES],
}

/// Twice the numbers that a byte can hold.
const HALVES: usize = 512;

/// The levels of IQ4_NL and IQ4_XS.
pub(super) static IQ4: LazyLock<Table> = LazyLock::new(|| Table::new(&IQ4_VALUES));

/// The levels of MXFP4.
pub(super) static E2M1: LazyLock<Table> = LazyLock::new(|| Table::new(&E2M1_DOUBLED));

impl Table {
    /// From the level of each code, in any order. Of equal levels the lowest code is used.
    fn new(values: &[i8; 16]) -> Self {
        let mut order: [u8; 16] = std::array::from_fn(|i| i as u8);
        order.sort_by_key(|&code| (values[usize::from(code)], code));
        let levels = order.map(|code| f32::from(values[usize::from(code)]));
        let codes = std::array::from_fn(|i| {
            let first = levels.iter().position(|&level| level == levels[i]);
            order[first.unwrap_or(i)]
        });
        let half = HALVES as i32 / 2;
        let mut nearest = [0.0; HALVES];
        for n in -half..half {
            let middle = (n as f32 + 0.5) / 2.0;
            let by = |a: &&f32, b: &&f32| (**a - middle).abs().total_cmp(&(**b - middle).abs());
            let found = levels.iter().min_by(by).copied().unwrap_or(0.0);
            nearest[n as usize % HALVES] = found;
        }
        Table {
            levels,
            codes,
            nearest,
        }
    }
}

impl Levels for &Table {
    fn low(&self) -> f32 {
        self.levels[0]
    }

    fn high(&self) -> f32 {
        self.levels[15]
    }

    fn gap(&self) -> f32 {
        self.levels[15] - self.levels[14]
    }

    #[inline(always)]
    fn nearest(&self, y: &Eight) -> Eight {
        let y = within(y, self.low(), self.high());
        // The mantissa's low bits are the integer below `2y`; see `MAGIC`.
        let places = y.map(|y| ((2.0 * y - 0.5) + MAGIC).to_bits() as usize);
        places.map(|place| self.nearest[place % HALVES])
    }

    fn code(&self, level: f32) -> u8 {
        let at = self.levels.iter().position(|&other| other == level);
        at.map_or(0, |at| self.codes[at])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    fn check(levels: impl Levels, value: impl Fn(u8) -> f32) {
        for i in -2600..2600 {
            let y = i as f32 * 0.05;
            let [found, ..] = levels.nearest(&[y; 8]);
            let best = (0..16).map(|code| (value(code) - y).abs());
            let best = best.fold(f32::INFINITY, f32::min);
            assert!((found - y).abs() <= best + 1e-5, "{y}: {found}");
            assert_eq!(value(levels.code(found)), found, "{y}");
        }
    }

    #[test]
    fn the_nearest_level_is_the_nearest_code() {
        check(&*IQ4, |c| f32::from(IQ4_VALUES[usize::from(c)]));
        check(&*E2M1, |c| f32::from(E2M1_DOUBLED[usize::from(c)]));
        check(Range::new(4, 8), |c| f32::from(c) - 8.0);
        // There is a −0 among the codes, which is not written.
        assert_eq!((&*E2M1).code(0.0), 0);
    }
}
