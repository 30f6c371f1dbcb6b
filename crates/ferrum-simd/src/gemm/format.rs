//! How the elements of dense panels are stored.

use super::lane::{Bf16PairLane, F32Lane, Lane};
use super::tile::PANEL;
use crate::simd::{LANES, Simd};
use std::marker::PhantomData;

/// How a panel's elements are stored.
pub(crate) trait Format: Copy + Send + Sync + 'static {
    /// What a lane of a step holds.
    type Lane: Lane;

    /// The 32 features of step `k` of a panel.
    ///
    /// # Safety
    /// `panel` is valid for reads of `k + 1` steps.
    unsafe fn step<S: Simd>(s: S, panel: *const u8, k: usize) -> [S::V; 2];
}

/// Panels of lanes.
#[derive(Clone, Copy)]
pub(crate) struct Lanes<L>(PhantomData<L>);
/// f32 panels.
pub(crate) type F32 = Lanes<F32Lane>;
/// bf16 panels for dot products.
pub(crate) type Bf16Pairs = Lanes<Bf16PairLane>;
/// f16 panels.
#[derive(Clone, Copy)]
pub(crate) struct F16;
/// bf16 panels.
#[derive(Clone, Copy)]
pub(crate) struct Bf16;

impl<L: Lane> Format for Lanes<L> {
    type Lane = L;

    #[inline(always)]
    unsafe fn step<S: Simd>(s: S, panel: *const u8, k: usize) -> [S::V; 2] {
        // SAFETY: a step is 32 elements.
        unsafe {
            let p = panel.cast::<f32>().add(k * PANEL);
            [s.load(p), s.load(p.add(LANES))]
        }
    }
}

impl Format for F16 {
    type Lane = F32Lane;

    #[inline(always)]
    unsafe fn step<S: Simd>(s: S, panel: *const u8, k: usize) -> [S::V; 2] {
        // SAFETY: a step is 32 elements.
        unsafe {
            let p = panel.cast::<u16>().add(k * PANEL);
            [s.load_f16(p), s.load_f16(p.add(LANES))]
        }
    }
}

impl Format for Bf16 {
    type Lane = F32Lane;

    #[inline(always)]
    unsafe fn step<S: Simd>(s: S, panel: *const u8, k: usize) -> [S::V; 2] {
        // SAFETY: a step is 16 pairs.
        unsafe { s.load_bf16_pairs(panel.cast::<u32>().add(k * LANES)) }
    }
}
