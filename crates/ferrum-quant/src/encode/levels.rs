//! The numbers that codes stand for, as a search sees them: a nearest one for any float.

use super::lanes::{Lanes, ROUNDING_BIAS, TABLE};
use crate::fp4::E2M1_DOUBLED;
use crate::iq::IQ4_VALUES;
use std::sync::LazyLock;

/// The levels of a type, from lowest to highest.
pub(super) trait Levels: Copy {
    /// The lowest.
    fn low(&self) -> f32;

    /// The highest.
    fn high(&self) -> f32;

    /// Distance between the outermost two, the unit in which scales are tried.
    fn gap(&self) -> f32;

    /// The level nearest to each of `y`; the lowest for NaN.
    fn nearest<V: Lanes>(&self, y: V) -> V;

    /// The codes of levels.
    fn codes<V: Lanes>(&self, levels: V) -> V;
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
    fn nearest<V: Lanes>(&self, y: V) -> V {
        y.max(V::splat(self.low)).min(V::splat(self.high)).round()
    }

    #[inline(always)]
    fn codes<V: Lanes>(&self, levels: V) -> V {
        levels - V::splat(self.low)
    }
}

/// Sixteen levels at any distance, none beyond ±127.
#[derive(Debug)]
pub(super) struct Table {
    low: f32,
    high: f32,
    gap: f32,
    /// The code of each level, at the low bits of the level.
    codes: [f32; TABLE],
    /// The level nearest to the numbers from `n / 2` to `(n + 1) / 2`, at the low bits of `n`. Levels
    /// are integers, so what lies half way between two of them is such a border.
    nearest: [f32; TABLE],
}

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
        let mut codes = [0.0; TABLE];
        for &code in order.iter().rev() {
            codes[values[usize::from(code)] as usize % TABLE] = f32::from(code);
        }
        let half = TABLE as i32 / 2;
        let mut nearest = [0.0; TABLE];
        for n in -half..half {
            let middle = (n as f32 + 0.5) / 2.0;
            let by = |a: &&f32, b: &&f32| (**a - middle).abs().total_cmp(&(**b - middle).abs());
            let found = levels.iter().min_by(by).copied().unwrap_or(0.0);
            nearest[n as usize % TABLE] = found;
        }
        Table {
            low: levels[0],
            high: levels[15],
            gap: levels[15] - levels[14],
            codes,
            nearest,
        }
    }
}

impl Levels for &Table {
    fn low(&self) -> f32 {
        self.low
    }

    fn high(&self) -> f32 {
        self.high
    }

    fn gap(&self) -> f32 {
        self.gap
    }

    #[inline(always)]
    fn nearest<V: Lanes>(&self, y: V) -> V {
        let y = y.max(V::splat(self.low)).min(V::splat(self.high));
        // The mantissa's low bits are the integer below `2y`; see `ROUNDING_BIAS`.
        let places = (y + y - V::splat(0.5)) + V::splat(ROUNDING_BIAS);
        places.lookup(&self.nearest)
    }

    #[inline(always)]
    fn codes<V: Lanes>(&self, levels: V) -> V {
        (levels + V::splat(ROUNDING_BIAS)).lookup(&self.codes)
    }
}

#[cfg(test)]
mod tests {
    use super::super::lanes::Portable;
    use super::*;

    fn check(levels: impl Levels, value: impl Fn(u8) -> f32) {
        for i in -2600..2600 {
            let y = i as f32 * 0.05;
            let found = levels.nearest(Portable::splat(y));
            let [code, ..] = levels.codes(found).store();
            let [found, ..] = found.store();
            let best = (0..16).map(|code| (value(code) - y).abs());
            let best = best.fold(f32::INFINITY, f32::min);
            assert!((found - y).abs() <= best + 1e-5, "{y}: {found}");
            assert_eq!(value(code as u8), found, "{y}");
        }
    }

    #[test]
    fn the_nearest_level_is_the_nearest_code() {
        check(&*IQ4, |c| f32::from(IQ4_VALUES[usize::from(c)]));
        check(&*E2M1, |c| f32::from(E2M1_DOUBLED[usize::from(c)]));
        check(Range::new(4, 8), |c| f32::from(c) - 8.0);
        // There is a −0 among the codes, which is not written.
        let [zero, ..] = (&*E2M1).codes(Portable::splat(0.0)).store();
        assert_eq!(zero, 0.0);
    }
}
