//! FP8 weights: E4M3 codes as a checkpoint has them, a byte for each number.
//!
//! A few rows of 16 bits, and all rows of f32, are multiplied by a kernel that streams codes and converts them in registers,
//! without rounding (`kernels/float8.cu`). From [`gemv::MAX_ROWS`](super::gemv::MAX_ROWS) rows on, tiles convert them to 16 bits for tensor
//! cores. Devices with tensor cores for FP8 make prompts of more than [`MANY`] rows with them: activations become codes, with
//! a scale for each 128 numbers, as fine-grained checkpoints are made for. That rounds activations more than anything else
//! here, so [`CudaOptions::batch_invariant`](super::CudaOptions) has tiles of 16 bits instead.
//!
//! This module loads the codes and says which products take which; `quant.rs` and `tile.rs` make them.

use super::compiler::KernelFile;
use super::context::{Arg, CudaContext};
use super::core::Shared;
use super::memory::Memory;
use super::role::CudaAct;
use super::tile_operands::{Arranged, Pairs, TileRows};
use super::weight::upload_rows;
use crate::backend::Fp8Weights;
use crate::backend::check::elements;
use ferrum_types::{Error, Result};
use std::sync::atomic::{AtomicBool, Ordering};

/// Rows up to which products do not use tensor cores for FP8: a decoding batch is bound by the weight's bytes, and keeps the
/// precision of its activations.
pub(super) const MANY: usize = 64;

/// The squared difference, as a part of their square, that results may have with activations as FP8: codes are up to 2^-4
/// away, evenly, which is 6.5e-4 in the mean, and sums of products keep that.
pub(super) const ROUNDING: f64 = 1e-3;

/// Numbers that share a scale of activations, and a step of tiles.
const BLOCK: usize = 128;

/// Scales above this could make a number infinite while it is converted.
const LARGEST_SCALE: f32 = 1e30;

/// Rows `[rows, k]` of codes, with a scale for each 2^`shift` numbers of a row.
pub(super) struct Float8Slab {
    codes: Memory,
    scales: Memory,
    /// Bytes from one row to the next.
    stride: usize,
    shift: u32,
    scales_of_row: usize,
    pub(super) first_row: usize,
    pub(super) rows: usize,
}

/// As an exponent of two, how many numbers of a row share a scale; none where kernels take no such blocks.
fn shift(layer: &Fp8Weights<'_>) -> Option<u32> {
    let of_scale = layer.block[1];
    if of_scale >= layer.in_features {
        return Some(31);
    }
    let fits = of_scale.is_power_of_two() && of_scale >= 32;
    fits.then(|| of_scale.trailing_zeros())
}

/// Whether kernels take the blocks of this layer.
pub(super) fn is_native(layer: &Fp8Weights<'_>) -> bool {
    shift(layer).is_some()
}

/// Whether two layers can be one slab.
pub(super) fn are_alike(a: &Fp8Weights<'_>, b: &Fp8Weights<'_>) -> bool {
    shift(a) == shift(b)
}

impl Float8Slab {
    /// Layers that are alike, one after the other; none where there is something that kernels do not expect: a code that is
    /// NaN, a scale that is not a moderate number.
    pub(super) fn load<A: CudaAct>(
        ctx: &mut CudaContext<A>,
        op: &'static str,
        layers: &[Fp8Weights<'_>],
        (first_row, cols): (usize, usize),
    ) -> Result<Option<Self>> {
        let mut scales = Vec::new();
        for layer in layers {
            if layer.in_features != cols {
                let found = layer.in_features;
                let reason = format!("a layer has {found} input features, expected {cols}");
                return Err(Error::invalid(op, reason));
            }
            let of_blocks = layer
                .scales()
                .map_err(|e| Error::invalid(op, e.to_string()))?;
            for row in 0..layer.out_features {
                let of_row = layer.scales_of_row();
                let first = row / layer.block[0] * of_row;
                scales.extend_from_slice(&of_blocks[first..first + of_row]);
            }
        }
        let (Some(shift), rows) = (
            layers.first().and_then(shift),
            layers.iter().map(|layer| layer.out_features).sum(),
        ) else {
            return Ok(None);
        };
        if !scales.iter().all(|scale| scale.abs() <= LARGEST_SCALE) {
            return Ok(None);
        }
        let stride = cols.next_multiple_of(16);
        let driver = &ctx.shared().driver;
        let slab = Self {
            codes: Memory::new(driver, elements(op, &[rows, stride])?)?,
            scales: Memory::new(driver, elements(op, &[scales.len(), 4])?)?,
            stride,
            shift,
            scales_of_row: scales.len() / rows.max(1),
            first_row,
            rows,
        };
        ctx.upload(op, slab.scales.at, bytemuck::cast_slice(&scales))?;
        let has_nan = AtomicBool::new(false);
        let mut at = slab.codes.at;
        for layer in layers {
            let row = |row: usize| {
                let codes = &layer.codes[row * cols..][..cols];
                if codes.iter().any(|code| code & 0x7f == 0x7f) {
                    has_nan.store(true, Ordering::Relaxed);
                }
                codes
            };
            upload_rows(ctx, op, (layer.out_features, stride), row, at)?;
            at += (layer.out_features * stride) as u64;
        }
        Ok((!has_nan.into_inner()).then_some(slab))
    }

    /// The parameters that all kernels have of a weight.
    pub(super) fn args(&self) -> [Arg; 5] {
        [
            Arg::At(self.codes.at),
            Arg::At(self.scales.at),
            Arg::Long(self.stride),
            Arg::Int(self.shift as usize),
            Arg::Int(self.scales_of_row),
        ]
    }

    /// The kernels that make a product of this many rows with FP8 on both sides, if they do: those of tiles of 64 and of more
    /// rows, which may be the same.
    pub(super) fn of_codes<A: CudaAct>(
        &self,
        ctx: &CudaContext<A>,
        rows: usize,
    ) -> Option<CodeTiles> {
        if rows <= MANY || ctx.backend.batch_invariant() || (1 << self.shift) < BLOCK {
            return None;
        }
        code_tiles(ctx.shared())
    }
}

/// Tiles of products of FP8.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CodeTiles {
    /// Instructions of one warp.
    Warp,
    /// Instructions of four warps.
    Group,
}

/// Those of a device. 10.0 has others again, and converts those of one warp to f16, as 9.0 does.
pub(super) fn code_tiles(shared: &Shared) -> Option<CodeTiles> {
    match shared.capability {
        // The instructions are of PTX 8.4, which came with CUDA 12.4.
        (8, 9) if shared.nvrtc() < (12, 4) => None,
        (8, 9) | (12.., _) => Some(CodeTiles::Warp),
        (9, 0) => Some(CodeTiles::Group),
        _ => None,
    }
}

/// Rows of activations as codes: where they are, their stride in pairs, and where their scales are.
pub(super) fn quantise<A: CudaAct>(
    ctx: &mut CudaContext<A>,
    op: &'static str,
    (x, pairs): (TileRows, Option<&Pairs>),
) -> Result<Arranged> {
    let (stride, blocks) = (x.k.next_multiple_of(16), x.k.div_ceil(BLOCK));
    let (codes, all) = (
        elements(op, &[x.rows, stride])?,
        elements(op, &[x.rows, blocks])?,
    );
    let at = ctx.scratch(codes.saturating_add(elements(op, &[all, 4])?))?;
    let scales = Arg::At(at + codes as u64);
    let args = [
        Arg::At(at),
        scales,
        Arg::At(x.at),
        Arg::Long(all),
        Arg::Int(blocks),
        Arg::Int(x.k),
        Arg::Int(stride),
    ];
    let grid = (all.div_ceil(4), 128, 0);
    ctx.launch(op, (KernelFile::TileE4m3, "quantise_e4m3"), grid, args)?;
    Ok(Arranged {
        at,
        stride: stride / 2,
        row_scales: scales,
        pairs_per_row: pairs.map_or(1, |of| of.pairs_per_row),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrum_types::SrcDtype;

    #[test]
    fn blocks_of_powers_of_two_and_whole_rows_are_native() {
        let layer = |block, in_features| Fp8Weights {
            in_features,
            out_features: 1,
            block,
            codes: &[],
            scales: &[],
            scale_dtype: SrcDtype::F32,
        };
        let cases = [
            ([128, 128], 512, Some(7)),
            ([1, 32], 512, Some(5)),
            ([1, 512], 512, Some(31)),
            ([1, usize::MAX], 40, Some(31)),
            ([1, 16], 512, None),
            ([16, 40], 512, None),
            ([16, 0], 512, None),
        ];
        for (block, in_features, expected) in cases {
            let found = shift(&layer(block, in_features));
            assert_eq!(found, expected, "{block:?} of {in_features}");
        }
    }
}
