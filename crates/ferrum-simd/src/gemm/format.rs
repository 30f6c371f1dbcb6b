//! How the elements of dense panels are stored.

use super::lane::{Bf16PairLane, F32Lane, Lane};
use super::tile::PANEL;
use crate::panels::SPLIT_INPUTS;
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
/// Where the high half of a number lies in a panel of split numbers, in elements of 16 bits; its low half lies [`SPLIT_LOW`] behind it.
pub(crate) fn split_place(input: usize, feature: usize) -> usize {
    let block = input / SPLIT_INPUTS * 2 * SPLIT_LOW;
    let tile = feature / LANES * SPLIT_LOW / 2;
    block + tile + input % SPLIT_INPUTS / 2 * PANEL + feature % LANES * 2 + input % 2
}

/// The high halves of a block, which come first: two tiles of sixteen features.
pub(crate) const SPLIT_LOW: usize = SPLIT_INPUTS * PANEL;

/// Panels in [blocks of split numbers](crate::gemm::Elements::F32Tiles), whose halves are added.
#[derive(Clone, Copy)]
pub(crate) struct SplitF32;

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

impl Format for SplitF32 {
    type Lane = F32Lane;

    #[inline(always)]
    unsafe fn step<S: Simd>(s: S, panel: *const u8, k: usize) -> [S::V; 2] {
        let (block, pair, which) = (k / SPLIT_INPUTS, k % SPLIT_INPUTS / 2, k % 2);
        // A block is four tiles of sixteen pairs of inputs for sixteen features each: high halves, then low ones.
        let tile = |tile: usize| {
            let pairs = (block * 4 + tile) * SPLIT_INPUTS / 2 + pair;
            // SAFETY: a step has its pairs in each tile of its block, and a panel is whole blocks.
            unsafe { s.load_bf16_pairs(panel.cast::<u32>().add(pairs * LANES))[which] }
        };
        [s.add(tile(0), tile(2)), s.add(tile(1), tile(3))]
    }
}
