//! The search for scales: one for all block types.
//!
//! A block of every type is `d · scale · level − dmin · minimum`, with a small integer scale and
//! minimum for each sub-block, and a level for each number. Given the levels, the best scale is a
//! weighted least-squares fit; given the scales, the best level is the nearest. So the search tries
//! scales around the one that fits the extreme value, each fitted to the levels that it leads to;
//! then it rounds scales and minimums to their integers and improves `d` and `dmin` in turn with
//! them. What is kept is always the smallest weighted squared error against the numbers that will
//! be decoded, with `d` and `dmin` rounded to what the file can hold.
//!
//! Sixteen sub-blocks are searched side by side, each in a lane: one block of the K types with sub-blocks of
//! 16 numbers, two with 32, sixteen of the simple types. All of it is inlined into one function for each
//! instruction set (see `encode_blocks`).

use super::lanes::{LANES, Lanes};
use super::levels::Levels;

/// What the integer scales of sub-blocks can be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Scales {
    /// One for the block, which is `d` itself.
    One,
    /// From the first to the second; the first is 0, or as far below 0 as the type goes.
    Steps(i32, i32),
}

/// What the integer minimums can be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Minimums {
    /// The type has none.
    None,
    /// One for the block, which is `dmin` itself, of any sign.
    One,
    /// From 0 to this, with a `dmin` that is not negative.
    Steps(i32),
}

/// The type of a block's scale `d`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BlockScaleType {
    /// Any f16.
    F16,
    /// A power of two.
    Power,
}

/// How scales of a type are stored.
#[derive(Clone, Copy, Debug)]
pub(super) struct ScaleFormat {
    /// Numbers that share a scale.
    pub(super) sub: usize,
    pub(super) scales: Scales,
    pub(super) minimums: Minimums,
    pub(super) scale_type: BlockScaleType,
}

/// How much is tried.
#[derive(Clone, Copy, Debug)]
pub(super) struct Effort {
    /// Scales tried on each side of the one that fits the extreme value.
    pub(super) tries: i32,
    /// How far apart they are, in gaps between levels.
    pub(super) step: f32,
    /// Times that a scale is fitted again to the levels that it leads to; most stop earlier.
    pub(super) refits: usize,
    /// Integers tried on each side of the one nearest to a sub-block's scale and minimum.
    pub(super) reach: i32,
    /// Rounds of improving `d` and `dmin`; most blocks stop earlier.
    pub(super) rounds: usize,
}

/// Sixteen sub-blocks.
pub(super) struct SubBlocks<V, const SUB: usize> {
    /// Number `i` of each, and the weight of its error. Pairs, as a loop over two lists calls functions of the
    /// standard library that are not inlined across the parts that a crate is compiled in.
    pub(super) weighted_values: [(V, V); SUB],
    /// Lanes of a block.
    pub(super) per_block: usize,
}

/// What the search finds for each sub-block; the units are those of its block.
#[derive(Clone, Copy)]
pub(super) struct Fit<V> {
    pub(super) d: V,
    pub(super) dmin: V,
    pub(super) scales: V,
    pub(super) minimums: V,
    /// Of the block.
    error: V,
}

impl<V: Lanes> Fit<V> {
    /// Nothing found: all zero.
    #[inline(always)]
    fn none() -> Self {
        let zero = V::splat(0.0);
        Fit {
            d: zero,
            dmin: zero,
            scales: zero,
            minimums: zero,
            error: zero,
        }
    }

    /// In each lane the one with the smaller error.
    #[inline(always)]
    fn or_better(&self, other: &Self) -> Self {
        let better = other.error.less(self.error);
        Fit {
            d: V::select(better, other.d, self.d),
            dmin: V::select(better, other.dmin, self.dmin),
            scales: V::select(better, other.scales, self.scales),
            minimums: V::select(better, other.minimums, self.minimums),
            error: V::select(better, other.error, self.error),
        }
    }

    /// The levels of number `x` of each sub-block.
    #[inline(always)]
    pub(super) fn level<L: Levels>(&self, levels: L, x: V) -> V {
        let inverse = inverse(self.d * self.scales);
        levels.nearest((x + self.dmin * self.minimums) * inverse)
    }
}

/// The largest finite f16.
const F16_MAX: f32 = 65504.0;

/// Finds block scales, scales and minimums for sixteen sub-blocks.
#[inline(always)]
pub(super) fn fit_blocks<V: Lanes, L: Levels, const SUB: usize>(
    grid: &ScaleFormat,
    effort: &Effort,
    levels: L,
    subs: &SubBlocks<V, SUB>,
) -> Fit<V> {
    let zero = V::splat(0.0);
    let ideal = match (grid.scale_type, grid.minimums) {
        // There are few powers of two that may be best, and `assign` tries them all.
        (BlockScaleType::Power, _) => (extremes(subs) / V::splat(levels.high()), zero),
        (BlockScaleType::F16, Minimums::None) => (fit_scale(effort, levels, subs), zero),
        (BlockScaleType::F16, minimums) => {
            fit_affine(effort, levels, subs, minimums == Minimums::One)
        }
    };
    let (mut d, mut dmin) = first_block_scales(grid, subs.per_block, ideal);
    let mut best = Fit::none();
    for round in 0..effort.rounds {
        let mut improved = false;
        dmin = to_f16(dmin);
        for nearby in 0..scale_candidates(grid.scale_type) {
            let d = match grid.scale_type {
                BlockScaleType::F16 => to_f16(d),
                BlockScaleType::Power => to_power(d, nearby),
            };
            let fit = assign(grid, effort, levels, subs, ideal, (d, dmin));
            let first = round == 0 && nearby == 0;
            improved |= first || V::any(fit.error.less(best.error));
            best = if first { fit } else { best.or_better(&fit) };
        }
        if !improved || round + 1 == effort.rounds || grid.scale_type == BlockScaleType::Power {
            break;
        }
        (d, dmin) = refit_block_scales(grid, levels, subs, &best);
    }
    best
}

/// Replaces the lanes of each block by what `f` makes of them, from the first to the last.
#[inline(always)]
pub(super) fn fold_blocks<V: Lanes>(lanes: V, per_block: usize, f: impl Fn(f32, f32) -> f32) -> V {
    if per_block == 1 {
        return lanes;
    }
    let mut lanes = lanes.store();
    let mut first = 0;
    while first < LANES {
        let block = &mut lanes[first..first + per_block];
        let mut value = block[0];
        for &lane in &block[1..] {
            value = f(value, lane);
        }
        for lane in block {
            *lane = value;
        }
        first += per_block;
    }
    V::load(&lanes)
}

/// Of two numbers the one of larger magnitude, with its sign.
#[inline(always)]
fn extreme(a: f32, b: f32) -> f32 {
    if b.abs() > a.abs() { b } else { a }
}

/// Of each sub-block the number of largest magnitude.
#[inline(always)]
fn extremes<V: Lanes, const SUB: usize>(subs: &SubBlocks<V, SUB>) -> V {
    let mut extreme = V::splat(0.0);
    for &(x, _) in &subs.weighted_values {
        extreme = V::select(extreme.abs().less(x.abs()), x, extreme);
    }
    extreme
}

/// The scale `s` for which `s · level` comes nearest to each sub-block.
#[inline(always)]
fn fit_scale<V: Lanes, L: Levels, const SUB: usize>(
    effort: &Effort,
    levels: L,
    subs: &SubBlocks<V, SUB>,
) -> V {
    let zero = V::splat(0.0);
    // Of a sub-block of zeros this is infinite, which leads to no gain and so to the scale 0.
    let per = V::splat(1.0) / extremes(subs);
    let mut best = (zero, zero);
    for end in [levels.low(), levels.high()] {
        for i in -effort.tries..=effort.tries {
            let at = V::splat(end + effort.step * i as f32 * levels.gap());
            let found = try_scale(levels, subs, at * per);
            let better = best.0.less(found.0);
            best.0 = V::select(better, found.0, best.0);
            best.1 = V::select(better, found.1, best.1);
        }
    }
    // The fitted scale leads to levels of its own, which may fit better still.
    for _ in 0..effort.refits {
        let found = try_scale(levels, subs, V::splat(1.0) / best.1);
        let better = best.0.less(found.0);
        if !V::any(better) {
            break;
        }
        best.0 = V::select(better, found.0, best.0);
        best.1 = V::select(better, found.1, best.1);
    }
    best.1
}

/// The levels at one scale; then the gain and the scale that fit them. The error is Σwx² less the gain.
#[inline(always)]
fn try_scale<V: Lanes, L: Levels, const SUB: usize>(
    levels: L,
    subs: &SubBlocks<V, SUB>,
    inverse: V,
) -> (V, V) {
    let zero = V::splat(0.0);
    let (mut xl, mut ll) = (zero, zero);
    for &(x, w) in &subs.weighted_values {
        let level = levels.nearest(x * inverse);
        let wl = w * level;
        xl = xl + wl * x;
        ll = ll + wl * level;
    }
    let scale = xl / ll;
    let some = zero.less(ll);
    (
        V::select(some, xl * scale, zero),
        V::select(some, scale, zero),
    )
}

/// The scale and minimum for which `scale · level − minimum` comes nearest to each sub-block; `any_sign`
/// says whether the minimum may be negative. Levels begin at 0.
#[inline(always)]
fn fit_affine<V: Lanes, L: Levels, const SUB: usize>(
    effort: &Effort,
    levels: L,
    subs: &SubBlocks<V, SUB>,
    any_sign: bool,
) -> (V, V) {
    let (zero, one, top) = (V::splat(0.0), V::splat(1.0), V::splat(levels.high()));
    let (mut low, mut high) = (V::splat(f32::INFINITY), V::splat(f32::NEG_INFINITY));
    let mut moments = [zero; 3];
    for &(x, w) in &subs.weighted_values {
        (low, high) = (x.min(low), x.max(high));
        let wx = w * x;
        moments[0] = moments[0] + w;
        moments[1] = moments[1] + wx;
        moments[2] = moments[2] + wx * x;
    }
    if !any_sign {
        low = low.min(zero);
    }
    let span = high - low;
    let per = one / span;
    let mut best = AffineFit {
        error: V::splat(f32::INFINITY),
        scale: span / top,
        low,
    };
    for i in -effort.tries..=effort.tries {
        let at = V::splat(levels.high() + effort.step * i as f32);
        let found = try_affine(levels, subs, &moments, any_sign, (at * per, low));
        best.take(&found);
    }
    for _ in 0..effort.refits {
        let from = (one / best.scale, best.low);
        let found = try_affine(levels, subs, &moments, any_sign, from);
        if !best.take(&found) {
            break;
        }
    }
    // One number throughout is a minimum and nothing else.
    let spread = zero.less(span);
    let scale = V::select(spread, best.scale, zero);
    (scale, zero - V::select(spread, best.low, low))
}

/// A scale and an offset, and the error that they leave.
struct AffineFit<V> {
    error: V,
    scale: V,
    low: V,
}

impl<V: Lanes> AffineFit<V> {
    /// Keeps `found` in the lanes where its error is smaller; whether there are any.
    #[inline(always)]
    fn take(&mut self, found: &Self) -> bool {
        let better = found.error.less(self.error);
        self.error = V::select(better, found.error, self.error);
        self.scale = V::select(better, found.scale, self.scale);
        self.low = V::select(better, found.low, self.low);
        V::any(better)
    }
}

/// The levels at one scale and offset; then error, scale and offset that fit them. `moments` are Σw,
/// Σwx and Σwx².
#[inline(always)]
fn try_affine<V: Lanes, L: Levels, const SUB: usize>(
    levels: L,
    subs: &SubBlocks<V, SUB>,
    moments: &[V; 3],
    any_sign: bool,
    (inverse, low): (V, V),
) -> AffineFit<V> {
    let zero = V::splat(0.0);
    let &[sw, sx, sxx] = moments;
    let (mut sl, mut sll, mut sxl) = (zero, zero, zero);
    for &(x, w) in &subs.weighted_values {
        let level = levels.nearest((x - low) * inverse);
        let wl = w * level;
        sl = sl + wl;
        sll = sll + wl * level;
        sxl = sxl + wl * x;
    }
    let det = sw * sll - sl * sl;
    let per = V::splat(1.0) / det;
    let mut scale = (sw * sxl - sx * sl) * per;
    let mut low = (sx * sll - sl * sxl) * per;
    if !any_sign {
        let above = zero.less(low);
        scale = V::select(above, sxl / sll, scale);
        low = V::select(above, zero, low);
    }
    let two = V::splat(2.0);
    let error = sxx - two * (scale * sxl + low * sx)
        + scale * (scale * sll + two * low * sl)
        + low * low * sw;
    AffineFit {
        error: V::select(zero.less(det), error, V::splat(f32::INFINITY)),
        scale,
        low,
    }
}

/// `d` and `dmin` under which the extreme scale and the largest minimum of a block take the last step.
#[inline(always)]
fn first_block_scales<V: Lanes>(
    grid: &ScaleFormat,
    lanes: usize,
    (scales, minimums): (V, V),
) -> (V, V) {
    let last = match grid.scales {
        Scales::One => 1,
        Scales::Steps(0, high) => high,
        Scales::Steps(low, _) => low,
    };
    let d = fold_blocks(scales, lanes, extreme) / V::splat(last as f32);
    let last = match grid.minimums {
        Minimums::None | Minimums::One => 1,
        Minimums::Steps(high) => high,
    };
    let dmin = fold_blocks(minimums, lanes, extreme) / V::splat(last as f32);
    (d, dmin)
}

/// The nearest f16, or the largest. Of two equally near any, as what is stored is one of them in any case.
#[inline(always)]
fn to_f16<V: Lanes>(d: V) -> V {
    let most = V::splat(F16_MAX);
    let d = d.max(V::splat(-F16_MAX)).min(most);
    // Taking off what was added in excess leaves the upper 11 of 24 bits, rounded (Veltkamp).
    let excess = d * V::splat(8193.0);
    let normal = excess - (excess - d);
    // Below 2⁻¹⁴ the steps are 2⁻²⁴, as of f32 between a half and one.
    let bias = V::splat(0.75);
    let subnormal = (d + bias) - bias;
    let small = d.abs().less(V::splat(1.0 / 16384.0));
    V::select(small, subnormal, normal)
}

/// How many values near a number are tried for `d`.
fn scale_candidates(scale_type: BlockScaleType) -> u32 {
    match scale_type {
        BlockScaleType::F16 => 1,
        BlockScaleType::Power => 3,
    }
}

/// Half an E8M0 number: the first power of two above `d`, the last below, or half of that.
#[inline(always)]
fn to_power<V: Lanes>(d: V, nearby: u32) -> V {
    let mut lanes = d.store();
    for lane in &mut lanes {
        // The mantissa falls away.
        *lane = f32::from_bits(lane.to_bits() & 0x7f80_0000);
    }
    let times = [2.0, 1.0, 0.5][nearby as usize % 3];
    let low = V::splat(f32::MIN_POSITIVE);
    let high = V::splat(f32::from_bits((126 + 127) << 23));
    (V::load(&lanes) * V::splat(times)).max(low).min(high)
}

/// The integers nearest to `values / unit`, moved by `by`, within the limits.
#[inline(always)]
fn steps_near<V: Lanes>(values: V, inverse_unit: V, by: i32, low: i32, high: i32) -> V {
    let (low, high) = (V::splat(low as f32), V::splat(high as f32));
    let middle = (values * inverse_unit).max(low).min(high).round();
    (middle + V::splat(by as f32)).max(low).min(high)
}

/// `1 / d`, with 0 for 0.
#[inline(always)]
pub(super) fn inverse<V: Lanes>(d: V) -> V {
    let zero = V::splat(0.0);
    V::select(zero.less(d.abs()), V::splat(1.0) / d, zero)
}

/// Rounds the ideal scales and minimums of all sub-blocks to steps of these units.
#[inline(always)]
fn assign<V: Lanes, L: Levels, const SUB: usize>(
    grid: &ScaleFormat,
    effort: &Effort,
    levels: L,
    subs: &SubBlocks<V, SUB>,
    ideal: (V, V),
    (d, dmin): (V, V),
) -> Fit<V> {
    let one = V::splat(1.0);
    let scale_reach = match grid.scales {
        Scales::One => 0,
        Scales::Steps(..) => effort.reach,
    };
    let minimum_reach = match grid.minimums {
        Minimums::None | Minimums::One => 0,
        Minimums::Steps(_) => effort.reach,
    };
    let (per_d, per_dmin) = (inverse(d), inverse(dmin));
    let zero = V::splat(0.0);
    let mut best = (V::splat(f32::INFINITY), zero, zero);
    for by in -scale_reach..=scale_reach {
        let scale = match grid.scales {
            Scales::One => one,
            Scales::Steps(low, high) => steps_near(ideal.0, per_d, by, low, high),
        };
        for by in -minimum_reach..=minimum_reach {
            let minimum = match grid.minimums {
                Minimums::None => zero,
                Minimums::One => one,
                Minimums::Steps(high) => steps_near(ideal.1, per_dmin, by, 0, high),
            };
            let error = error_of(levels, subs, d * scale, dmin * minimum);
            let better = error.less(best.0);
            best.0 = V::select(better, error, best.0);
            best.1 = V::select(better, scale, best.1);
            best.2 = V::select(better, minimum, best.2);
        }
    }
    Fit {
        d,
        dmin,
        scales: best.1,
        minimums: best.2,
        error: fold_blocks(best.0, subs.per_block, |a, b| a + b),
    }
}

/// The weighted squared error of each sub-block under a scale and a minimum.
#[inline(always)]
fn error_of<V: Lanes, L: Levels, const SUB: usize>(
    levels: L,
    subs: &SubBlocks<V, SUB>,
    scale: V,
    minimum: V,
) -> V {
    let inverse = inverse(scale);
    let mut error = V::splat(0.0);
    for &(x, w) in &subs.weighted_values {
        let x = x + minimum;
        let miss = x - scale * levels.nearest(x * inverse);
        error = error + w * miss * miss;
    }
    error
}

/// The units of each block that fit best with the scales, minimums and levels as they are.
#[inline(always)]
fn refit_block_scales<V: Lanes, L: Levels, const SUB: usize>(
    grid: &ScaleFormat,
    levels: L,
    subs: &SubBlocks<V, SUB>,
    fit: &Fit<V>,
) -> (V, V) {
    let zero = V::splat(0.0);
    let mut moments = [zero; 5];
    for &(x, w) in &subs.weighted_values {
        let level = fit.level(levels, x);
        let wl = w * level;
        moments[0] = moments[0] + wl * level;
        moments[1] = moments[1] + wl;
        moments[2] = moments[2] + w;
        moments[3] = moments[3] + wl * x;
        moments[4] = moments[4] + w * x;
    }
    let [ll, l, one, xl, lx] = moments;
    let (s, m) = (fit.scales, fit.minimums);
    let any_sign = grid.minimums == Minimums::One;
    let sums = Moments {
        aa: (s * s * ll).store(),
        ab: (s * m * l).store(),
        bb: (m * m * one).store(),
        xa: (s * xl).store(),
        xb: (m * lx).store(),
    };
    let (mut d, mut dmin) = (fit.d.store(), fit.dmin.store());
    let mut first = 0;
    while first < LANES {
        let lanes = first..first + subs.per_block;
        let found = sums.units(lanes.clone(), any_sign, (d[first], dmin[first]));
        for lane in lanes {
            (d[lane], dmin[lane]) = found;
        }
        first += subs.per_block;
    }
    (V::load(&d), V::load(&dmin))
}

/// Products of what `d` and `dmin` are multiplied with, of each sub-block: `a` is scale times level, `b` the
/// minimum.
struct Moments {
    aa: [f32; LANES],
    ab: [f32; LANES],
    bb: [f32; LANES],
    xa: [f32; LANES],
    xb: [f32; LANES],
}

impl Moments {
    /// The best units of the block that has these lanes; `now` where that is unknown.
    fn units(&self, lanes: std::ops::Range<usize>, any_sign: bool, now: (f32, f32)) -> (f32, f32) {
        let (mut aa, mut ab, mut bb, mut xa, mut xb) = (0.0, 0.0, 0.0, 0.0, 0.0);
        for lane in lanes {
            aa += f64::from(self.aa[lane]);
            ab += f64::from(self.ab[lane]);
            bb += f64::from(self.bb[lane]);
            xa += f64::from(self.xa[lane]);
            xb += f64::from(self.xb[lane]);
        }
        let det = aa * bb - ab * ab;
        let (d, dmin) = ((xa * bb - xb * ab) / det, (xa * ab - xb * aa) / det);
        let fits = det > 0.0 && (dmin >= 0.0 || any_sign);
        match fits {
            true => (d as f32, dmin as f32),
            false if aa > 0.0 => ((xa / aa) as f32, 0.0),
            false => now,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::lanes::Portable;
    use super::*;
    use crate::block::F16Le;

    #[test]
    fn units_are_numbers_that_the_file_can_hold() {
        let mut state = 7u64;
        for _ in 0..200_000 {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            // From subnormal numbers of f16 to beyond the largest.
            let d = f32::from_bits((state >> 33) as u32 % 0x1800_0000 + 0x3000_0000);
            for d in [d, -d] {
                let [found, ..] = to_f16(Portable::splat(d)).store();
                assert_eq!(F16Le::from_f32(found).to_f32(), found, "{d}");
                let nearest = F16Le::from_f32(d.clamp(-F16_MAX, F16_MAX)).to_f32();
                let miss = (found - d.clamp(-F16_MAX, F16_MAX)).abs();
                assert!(miss <= (nearest - d).abs(), "{d}: {found}, not {nearest}");
            }
        }
    }
}
