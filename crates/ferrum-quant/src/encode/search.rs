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
//! All of it is inlined into one function for each instruction set (see `encode_blocks`). Sums have a
//! fixed order and no fused steps, so the set changes no bit.

use super::levels::{Eight, Levels, eight};
use crate::block::F16Le;

/// Most numbers in a block.
pub(super) const MAX_BLOCK: usize = 256;
/// Most sub-blocks in a block.
pub(super) const MAX_SUBS: usize = 16;

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

/// What `d` can be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unit {
    /// Any f16.
    F16,
    /// A power of two.
    Power,
}

/// How scales of a type are stored.
#[derive(Clone, Copy, Debug)]
pub(super) struct Grid {
    /// Numbers that share a scale.
    pub(super) sub: usize,
    pub(super) scales: Scales,
    pub(super) minimums: Minimums,
    pub(super) unit: Unit,
}

/// A block as the search leaves it.
#[derive(Clone, Debug)]
pub(super) struct Fit {
    pub(super) d: f32,
    pub(super) dmin: f32,
    pub(super) scales: [i32; MAX_SUBS],
    pub(super) minimums: [i32; MAX_SUBS],
    pub(super) levels: [f32; MAX_BLOCK],
    pub(super) error: f64,
}

/// Scales tried on each side of the one that fits the extreme value.
const TRIES: i32 = 7;
/// How far apart they are, in gaps between levels.
const STEP: f32 = 0.13;
/// Rounds of improving `d`; most blocks stop earlier.
const ROUNDS: usize = 4;
/// The largest finite f16.
const F16_MAX: f32 = 65504.0;

/// Finds `d`, `dmin`, scales, minimums and levels for the numbers `x` with weights `w`.
#[inline(always)]
pub(super) fn fit_block<L: Levels>(grid: &Grid, levels: L, x: &[f32], w: &[f32]) -> Fit {
    let mut ideal = [(0.0, 0.0); MAX_SUBS];
    for (ideal, (x, w)) in ideal.iter_mut().zip(subs(grid, x, w)) {
        *ideal = match grid.minimums {
            Minimums::None => (fit_scale(levels, x, w), 0.0),
            minimums => fit_affine(levels, x, w, minimums == Minimums::One),
        };
    }
    let count = x.len() / grid.sub;
    let (d, dmin) = first_units(grid, &ideal[..count]);
    let mut best: Option<Fit> = None;
    let mut next = (d, dmin);
    for _ in 0..ROUNDS {
        let mut improved = false;
        for d in nearby(grid.unit, next.0) {
            let fit = assign(grid, levels, x, w, &ideal, (d, to_f16(next.1)));
            if best.as_ref().is_none_or(|best| fit.error < best.error) {
                improved = true;
                best = Some(fit);
            }
        }
        match &best {
            Some(best) if improved && best.error > 0.0 => next = refit_units(grid, best, x, w),
            _ => break,
        }
    }
    // There is a round, and a round always leaves a fit unless all errors are NaN.
    best.unwrap_or(Fit {
        d: 0.0,
        dmin: 0.0,
        scales: [0; MAX_SUBS],
        minimums: [0; MAX_SUBS],
        levels: [levels.nearest(&[0.0; 8])[0]; MAX_BLOCK],
        error: f64::NAN,
    })
}

fn subs<'a>(
    grid: &Grid,
    x: &'a [f32],
    w: &'a [f32],
) -> impl Iterator<Item = (&'a [f32], &'a [f32])> {
    x.chunks_exact(grid.sub).zip(w.chunks_exact(grid.sub))
}

/// Sums of several products over a sub-block, in a fixed order that vectorises. The terms come from
/// eight numbers and weights at a time; every sub-block is a multiple of that.
#[inline(always)]
fn sums<const K: usize>(
    x: &[f32],
    w: &[f32],
    terms: impl Fn(&Eight, &Eight) -> [Eight; K],
) -> [f32; K] {
    let mut lanes = [[0.0f32; 8]; K];
    for (x, w) in x.as_chunks().0.iter().zip(w.as_chunks().0) {
        for (sums, terms) in lanes.iter_mut().zip(terms(x, w)) {
            *sums = eight(|i| sums[i] + terms[i]);
        }
    }
    lanes.map(|lanes| lanes.iter().sum())
}

/// The scale `s` for which `s · level` comes nearest to `x`.
#[inline(always)]
fn fit_scale<L: Levels>(levels: L, x: &[f32], w: &[f32]) -> f32 {
    let extreme = x.iter().fold(
        0.0f32,
        |most, &v| if v.abs() > most.abs() { v } else { most },
    );
    if extreme == 0.0 {
        return 0.0;
    }
    let mut best = (0.0, 0.0);
    for end in [levels.low(), levels.high()] {
        for i in -TRIES..=TRIES {
            let inverse = (end + STEP * i as f32 * levels.gap()) / extreme;
            let found = try_scale(levels, x, w, inverse);
            best = if found.0 > best.0 { found } else { best };
        }
    }
    // The fitted scale leads to levels of its own, which may fit better still.
    while best.1 != 0.0 {
        let found = try_scale(levels, x, w, 1.0 / best.1);
        if found.0 <= best.0 || found.0.is_nan() {
            break;
        }
        best = found;
    }
    best.1
}

/// The levels at one scale; then the gain and the scale that fit them. The error is Σwx² less the gain.
#[inline(always)]
fn try_scale<L: Levels>(levels: L, x: &[f32], w: &[f32], inverse: f32) -> (f32, f32) {
    let [xl, ll] = sums(x, w, |x, w| {
        let level = levels.nearest(&eight(|i| x[i] * inverse));
        let wl = eight(|i| w[i] * level[i]);
        [eight(|i| wl[i] * x[i]), eight(|i| wl[i] * level[i])]
    });
    match ll > 0.0 {
        true => (xl * xl / ll, xl / ll),
        false => (0.0, 0.0),
    }
}

/// The scale and minimum for which `scale · level − minimum` comes nearest to `x`; `any_sign` says
/// whether the minimum may be negative. Levels begin at 0.
#[inline(always)]
fn fit_affine<L: Levels>(levels: L, x: &[f32], w: &[f32], any_sign: bool) -> (f32, f32) {
    let (mut low, mut high) = (f32::INFINITY, f32::NEG_INFINITY);
    for &v in x {
        low = if v < low { v } else { low };
        high = if v > high { v } else { high };
    }
    if low > 0.0 && !any_sign {
        low = 0.0;
    }
    if high.partial_cmp(&low) != Some(std::cmp::Ordering::Greater) {
        return (0.0, -low);
    }
    let moments = sums(x, w, |x, w| {
        let wx = eight(|i| w[i] * x[i]);
        [*w, wx, eight(|i| wx[i] * x[i])]
    });
    let attempt = |inverse, low| try_affine(levels, x, w, &moments, any_sign, (inverse, low));
    let first = (high - low) / levels.high();
    let mut best = (f32::INFINITY, first, low);
    for i in -TRIES..=TRIES {
        let found = attempt((levels.high() + STEP * i as f32) / (high - low), low);
        best = if found.0 < best.0 { found } else { best };
    }
    while best.1 > 0.0 {
        let found = attempt(1.0 / best.1, best.2);
        if found.0 >= best.0 || found.0.is_nan() {
            break;
        }
        best = found;
    }
    (best.1, -best.2)
}

/// The levels at one scale and offset; then error, scale and offset that fit them. `moments` are Σw,
/// Σwx and Σwx².
#[inline(always)]
fn try_affine<L: Levels>(
    levels: L,
    x: &[f32],
    w: &[f32],
    moments: &[f32; 3],
    any_sign: bool,
    (inverse, low): (f32, f32),
) -> (f32, f32, f32) {
    let &[sw, sx, sxx] = moments;
    let [sl, sll, sxl] = sums(x, w, |x, w| {
        let level = levels.nearest(&eight(|i| (x[i] - low) * inverse));
        let wl = eight(|i| w[i] * level[i]);
        [wl, eight(|i| wl[i] * level[i]), eight(|i| wl[i] * x[i])]
    });
    let det = sw * sll - sl * sl;
    if det <= 0.0 || det.is_nan() {
        return (f32::INFINITY, 0.0, 0.0);
    }
    let (mut scale, mut low) = ((sw * sxl - sx * sl) / det, (sx * sll - sl * sxl) / det);
    if low > 0.0 && !any_sign {
        (scale, low) = (sxl / sll, 0.0);
    }
    let error = sxx - 2.0 * (scale * sxl + low * sx)
        + scale * (scale * sll + 2.0 * low * sl)
        + low * low * sw;
    (error, scale, low)
}

/// `d` and `dmin` under which the extreme scale and the largest minimum take the last step.
fn first_units(grid: &Grid, ideal: &[(f32, f32)]) -> (f32, f32) {
    let extreme = |of: fn(&(f32, f32)) -> f32| {
        let all = ideal.iter().map(of);
        all.fold(
            0.0f32,
            |most, v| if v.abs() > most.abs() { v } else { most },
        )
    };
    let d = match grid.scales {
        Scales::One => extreme(|fit| fit.0),
        Scales::Steps(0, high) => extreme(|fit| fit.0) / high as f32,
        Scales::Steps(low, _) => extreme(|fit| fit.0) / low as f32,
    };
    let dmin = match grid.minimums {
        Minimums::None => 0.0,
        Minimums::One => extreme(|fit| fit.1),
        Minimums::Steps(high) => extreme(|fit| fit.1) / high as f32,
    };
    (d, dmin)
}

fn to_f16(d: f32) -> f32 {
    F16Le::from_f32(d.clamp(-F16_MAX, F16_MAX)).to_f32()
}

/// The values near `d` that the file can hold.
fn nearby(unit: Unit, d: f32) -> impl Iterator<Item = f32> {
    let (one, other) = match unit {
        Unit::F16 => (to_f16(d), None),
        Unit::Power => {
            // Half an E8M0 number; the mantissa falls away.
            let low = f32::from_bits(d.abs().to_bits() & 0x7f80_0000);
            let low = low.clamp(f32::MIN_POSITIVE, 2f32.powi(125));
            (low, Some(2.0 * low))
        }
    };
    std::iter::once(one).chain(other)
}

/// Rounds the ideal scales and minimums of all sub-blocks to steps of these units.
#[inline(always)]
fn assign<L: Levels>(
    grid: &Grid,
    levels: L,
    x: &[f32],
    w: &[f32],
    ideal: &[(f32, f32); MAX_SUBS],
    (d, dmin): (f32, f32),
) -> Fit {
    let mut fit = Fit {
        d,
        dmin,
        scales: [0; MAX_SUBS],
        minimums: [0; MAX_SUBS],
        levels: [0.0; MAX_BLOCK],
        error: 0.0,
    };
    for (i, (x, w)) in subs(grid, x, w).enumerate() {
        let scales = match grid.scales {
            Scales::One => 1..=1,
            Scales::Steps(low, high) => steps_near(ideal[i].0, d, low, high),
        };
        let minimums = match grid.minimums {
            Minimums::None => 0..=0,
            Minimums::One => 1..=1,
            Minimums::Steps(high) => steps_near(ideal[i].1, dmin, 0, high),
        };
        let mut best = (f32::INFINITY, 0, 0);
        for scale in scales {
            for minimum in minimums.clone() {
                let error = error_of(levels, x, w, d * scale as f32, dmin * minimum as f32);
                if error < best.0 {
                    best = (error, scale, minimum);
                }
            }
        }
        let (scale, minimum) = (d * best.1 as f32, dmin * best.2 as f32);
        (fit.scales[i], fit.minimums[i]) = (best.1, best.2);
        fit.error += f64::from(best.0);
        let inverse = inverse(scale);
        let (out, _) = fit.levels[i * grid.sub..].as_chunks_mut();
        for (level, x) in out.iter_mut().zip(x.as_chunks::<8>().0) {
            *level = levels.nearest(&eight(|i| (x[i] + minimum) * inverse));
        }
    }
    fit
}

/// The integer nearest to `value / unit` and its neighbours, within the limits.
fn steps_near(value: f32, unit: f32, low: i32, high: i32) -> std::ops::RangeInclusive<i32> {
    let middle = ((value * inverse(unit)).round() as i32).clamp(low, high);
    (middle - 1).max(low)..=(middle + 1).min(high)
}

fn inverse(d: f32) -> f32 {
    if d == 0.0 { 0.0 } else { 1.0 / d }
}

/// The weighted squared error of a sub-block under a scale and a minimum.
#[inline(always)]
fn error_of<L: Levels>(levels: L, x: &[f32], w: &[f32], scale: f32, minimum: f32) -> f32 {
    let inverse = inverse(scale);
    let [error] = sums(x, w, |x, w| {
        let x = eight(|i| x[i] + minimum);
        let level = levels.nearest(&eight(|i| x[i] * inverse));
        let miss = eight(|i| x[i] - scale * level[i]);
        [eight(|i| w[i] * miss[i] * miss[i])]
    });
    error
}

/// The units that fit best with the scales, minimums and levels as they are.
#[inline(always)]
fn refit_units(grid: &Grid, fit: &Fit, x: &[f32], w: &[f32]) -> (f32, f32) {
    let (mut aa, mut ab, mut bb, mut xa, mut xb) = (0f64, 0f64, 0f64, 0f64, 0f64);
    let subs = subs(grid, x, w).zip(fit.levels.chunks_exact(grid.sub));
    for (i, ((x, w), levels)) in subs.enumerate() {
        let (mut ll, mut l, mut one, mut xl, mut lx) = (0f32, 0f32, 0f32, 0f32, 0f32);
        for ((&x, &w), &level) in x.iter().zip(w).zip(levels) {
            ll += w * level * level;
            l += w * level;
            one += w;
            xl += w * x * level;
            lx += w * x;
        }
        let (s, m) = (f64::from(fit.scales[i]), f64::from(fit.minimums[i]));
        aa += s * s * f64::from(ll);
        ab += s * m * f64::from(l);
        bb += m * m * f64::from(one);
        xa += s * f64::from(xl);
        xb += m * f64::from(lx);
    }
    let det = aa * bb - ab * ab;
    let (d, dmin) = ((xa * bb - xb * ab) / det, (xa * ab - xb * aa) / det);
    let fits = det > 0.0 && (dmin >= 0.0 || grid.minimums == Minimums::One);
    match fits {
        true => (d as f32, dmin as f32),
        false if aa > 0.0 => ((xa / aa) as f32, 0.0),
        false => (fit.d, fit.dmin),
    }
}
