//! Two tiles of rows times a panel: the inner loop of products in tiles. A row alone is multiplied [without them](super::row).

use super::super::tile::PANEL;
use super::row::row_products;
use crate::panels::SPLIT_INPUTS;
use crate::simd::amx::{ROW_BYTES, TILE_ROWS, Tiles};
use core::arch::asm;

/// Inputs of a block: those of an instruction.
pub(crate) const INPUTS: usize = SPLIT_INPUTS;
/// Bytes of a tile.
pub(super) const TILE: usize = TILE_ROWS * ROW_BYTES;
/// Bytes of a block of a split panel: the high halves of both its tiles, then the low ones.
pub(crate) const SPLIT_BLOCK: usize = 4 * TILE;
/// Bytes of a block of a panel of bf16, whose tiles lie side by side.
pub(super) const BF16_BLOCK: usize = 2 * TILE;
/// Blocks of a chunk: 48 KiB of a split panel.
pub(super) const CHUNK_BLOCKS: usize = 12;

/// Bytes of a block of a tile of rows: high halves, then low ones, or bf16.
pub(crate) const fn row_block(split: bool) -> usize {
    if split { 2 * TILE } else { TILE }
}

/// Up to 32 rows of up to 32 columns of the result.
#[derive(Clone, Copy)]
pub(crate) struct Block {
    pub(crate) ptr: *mut f32,
    /// Elements of a row.
    pub(crate) stride: usize,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
}

/// One or two tiles of rows, and a panel.
#[derive(Clone, Copy)]
pub(crate) struct Operands<'a, const SPLIT: bool> {
    /// Blocks of each tile of rows; the second is empty where there is one.
    pub(crate) rows: [&'a [u8]; 2],
    /// Split blocks of the panel, or steps of bf16.
    pub(crate) columns: &'a [u8],
    /// Number of inputs.
    pub(crate) inputs: usize,
}

/// What the loops take. Strides are in bytes.
#[derive(Clone, Copy)]
pub(super) struct Pointers {
    /// Blocks of both tiles of rows.
    pub(super) rows: [*const u8; 2],
    pub(super) columns: *const u8,
    /// Number of blocks, at least one.
    pub(super) blocks: usize,
    pub(super) sums: *mut f32,
    pub(super) sums_stride: usize,
    /// Whether there are sums already.
    pub(super) add: bool,
}

/// A loop over blocks. Tiles 0 and 1 are sums of the first tile of rows with both tiles of columns, 2 and 3 of the second.
macro_rules! products {
    ($pointers:expr, { $($load:literal,)* }, { $($step:literal,)* }, { $($store:literal,)* }) => {{
        let Pointers { rows, columns, blocks, sums, sums_stride, add } = $pointers;
        asm!(
            "tilezero tmm0",
            "tilezero tmm1",
            "tilezero tmm2",
            "tilezero tmm3",
            "test {add}, {add}",
            "jz 2f",
            $($load,)*
            "2:",
            $($step,)*
            "dec {blocks}",
            "jnz 2b",
            $($store,)*
            "/* {a1} {c1} {lines} {line} */",
            add = in(reg) usize::from(add),
            c = in(reg) sums,
            c1 = in(reg) sums.wrapping_byte_add(TILE_ROWS * sums_stride),
            cs = in(reg) sums_stride,
            blocks = inout(reg) blocks => _,
            a0 = inout(reg) rows[0] => _,
            a1 = inout(reg) rows[1] => _,
            b = inout(reg) columns => _,
            line = in(reg) ROW_BYTES,
            lines = in(reg) 2 * ROW_BYTES,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        )
    }};
}

/// The loop over blocks for split or bf16 operands, with one tile of rows or two.
///
/// # Safety
/// Tiles are configured. Rows and columns are valid for reads of that many blocks; the sums of 16 (or, with two, 32) rows
/// and 32 columns for writes, and no other thread uses them.
#[inline(always)]
unsafe fn products<const SPLIT: bool>(pointers: Pointers, two: bool) {
    match (SPLIT, two) {
        // SAFETY: the caller's contract: all loads and stores are of whole tiles inside of what it names.
        (true, true) => unsafe {
            products!(pointers, {
                "tileloadd tmm0, [{c} + {cs}*1]",
                "tileloadd tmm1, [{c} + {cs}*1 + 64]",
                "tileloadd tmm2, [{c1} + {cs}*1]",
                "tileloadd tmm3, [{c1} + {cs}*1 + 64]",
            }, {
                "tileloadd tmm4, [{a0} + {line}*1]",
                "tileloadd tmm6, [{b} + {line}*1 + 2048]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tileloadd tmm7, [{b} + {line}*1 + 3072]",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tileloadd tmm5, [{a1} + {line}*1]",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tileloadd tmm6, [{b} + {line}*1]",
                "tdpbf16ps tmm3, tmm5, tmm7",
                "tileloadd tmm7, [{b} + {line}*1 + 1024]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tileloadd tmm4, [{a0} + {line}*1 + 1024]",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tdpbf16ps tmm3, tmm5, tmm7",
                "tileloadd tmm5, [{a1} + {line}*1 + 1024]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tdpbf16ps tmm3, tmm5, tmm7",
                "add {a0}, 2048",
                "add {a1}, 2048",
                "add {b}, 4096",
            }, {
                "tilestored [{c} + {cs}*1], tmm0",
                "tilestored [{c} + {cs}*1 + 64], tmm1",
                "tilestored [{c1} + {cs}*1], tmm2",
                "tilestored [{c1} + {cs}*1 + 64], tmm3",
            });
        },
        // SAFETY: as above.
        (true, false) => unsafe {
            products!(pointers, {
                "tileloadd tmm0, [{c} + {cs}*1]",
                "tileloadd tmm1, [{c} + {cs}*1 + 64]",
            }, {
                "tileloadd tmm4, [{a0} + {line}*1]",
                "tileloadd tmm6, [{b} + {line}*1 + 2048]",
                "tileloadd tmm7, [{b} + {line}*1 + 3072]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tileloadd tmm6, [{b} + {line}*1]",
                "tileloadd tmm7, [{b} + {line}*1 + 1024]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tileloadd tmm4, [{a0} + {line}*1 + 1024]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "add {a0}, 2048",
                "add {b}, 4096",
            }, {
                "tilestored [{c} + {cs}*1], tmm0",
                "tilestored [{c} + {cs}*1 + 64], tmm1",
            });
        },
        // SAFETY: as above.
        (false, true) => unsafe {
            products!(pointers, {
                "tileloadd tmm0, [{c} + {cs}*1]",
                "tileloadd tmm1, [{c} + {cs}*1 + 64]",
                "tileloadd tmm2, [{c1} + {cs}*1]",
                "tileloadd tmm3, [{c1} + {cs}*1 + 64]",
            }, {
                "tileloadd tmm4, [{a0} + {line}*1]",
                "tileloadd tmm6, [{b} + {lines}*1]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tileloadd tmm7, [{b} + {lines}*1 + 64]",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tileloadd tmm5, [{a1} + {line}*1]",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tdpbf16ps tmm3, tmm5, tmm7",
                "add {a0}, 1024",
                "add {a1}, 1024",
                "add {b}, 2048",
            }, {
                "tilestored [{c} + {cs}*1], tmm0",
                "tilestored [{c} + {cs}*1 + 64], tmm1",
                "tilestored [{c1} + {cs}*1], tmm2",
                "tilestored [{c1} + {cs}*1 + 64], tmm3",
            });
        },
        // SAFETY: as above.
        (false, false) => unsafe {
            products!(pointers, {
                "tileloadd tmm0, [{c} + {cs}*1]",
                "tileloadd tmm1, [{c} + {cs}*1 + 64]",
            }, {
                "tileloadd tmm4, [{a0} + {line}*1]",
                "tileloadd tmm6, [{b} + {lines}*1]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tileloadd tmm7, [{b} + {lines}*1 + 64]",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "add {a0}, 1024",
                "add {b}, 2048",
            }, {
                "tilestored [{c} + {cs}*1], tmm0",
                "tilestored [{c} + {cs}*1 + 64], tmm1",
            });
        },
    }
}

/// Sums of 32 rows and 32 columns, of which the result has fewer.
#[repr(align(64))]
struct Sums([[f32; PANEL]; 2 * TILE_ROWS]);

/// The last steps of a panel of bf16, filled up with zeros.
#[repr(align(64))]
struct LastBlock([u8; BF16_BLOCK]);

impl<const SPLIT: bool> Operands<'_, SPLIT> {
    /// The block's rows times the panel, to which what is there is added with `add`.
    ///
    /// # Safety
    /// The block is valid for reads and writes, and no other thread uses it.
    #[inline(always)]
    pub(crate) unsafe fn multiply(self, configured: &Tiles, place: Block, add: bool) {
        let tile_rows = TILE_ROWS * (1 + usize::from(!self.rows[1].is_empty()));
        assert!(place.rows <= tile_rows && place.cols <= PANEL);
        if place.cols == PANEL && (place.rows == tile_rows || place.rows == 1) {
            // SAFETY: all columns, and all rows of the tiles or the only one, lie in the block, which the caller says is valid.
            unsafe { self.whole(configured, place, add) };
            return;
        }
        let mut sums = Sums([[0.0; PANEL]; 2 * TILE_ROWS]);
        let row = |r: usize| place.ptr.wrapping_add(r * place.stride);
        if add {
            for (r, sums) in sums.0.iter_mut().enumerate().take(place.rows) {
                // SAFETY: the caller says that the row's columns are valid; the array has as many.
                unsafe { std::ptr::copy_nonoverlapping(row(r), sums.as_mut_ptr(), place.cols) };
            }
        }
        let whole = Block {
            ptr: sums.0.as_mut_ptr().cast(),
            stride: PANEL,
            rows: place.rows,
            cols: PANEL,
        };
        // SAFETY: the array has 32 rows of 32 columns.
        unsafe { self.whole(configured, whole, add) };
        for (r, sums) in sums.0.iter().enumerate().take(place.rows) {
            // SAFETY: as above.
            unsafe { std::ptr::copy_nonoverlapping(sums.as_ptr(), row(r), place.cols) };
        }
    }

    /// The same with all columns of a panel, and all rows of the tiles unless there is one.
    ///
    /// # Safety
    /// 16 rows, or 32 where there are two tiles, or the only one, are valid for reads and writes, and no other thread uses them.
    #[inline(always)]
    unsafe fn whole(self, _: &Tiles, place: Block, add: bool) {
        let two = !self.rows[1].is_empty();
        let run = |pointers| match place.rows {
            // SAFETY: where there are tiles, there is AVX-512; the slices are as long as asserted below, and the caller says so
            // of the sums.
            1 => unsafe { row_products::<SPLIT>(pointers) },
            // SAFETY: as above, and tiles are configured.
            _ => unsafe { products::<SPLIT>(pointers, two) },
        };
        let blocks = self.inputs.div_ceil(INPUTS);
        let rows_len = blocks * row_block(SPLIT);
        assert!(blocks > 0 && self.rows[0].len() == rows_len);
        assert!(!two || self.rows[1].len() == rows_len);
        let pointers = Pointers {
            // Not by `map`, which goes through memory, and there waits for the tiles that are still being stored.
            rows: [self.rows[0].as_ptr(), self.rows[1].as_ptr()],
            columns: self.columns.as_ptr(),
            blocks,
            sums: place.ptr,
            sums_stride: place.stride * size_of::<f32>(),
            add,
        };
        if SPLIT {
            assert_eq!(self.columns.len(), blocks * SPLIT_BLOCK);
            run(pointers);
            return;
        }
        assert_eq!(self.columns.len(), self.inputs * PANEL * 2);
        let full = self.inputs / INPUTS;
        if full > 0 {
            let pointers = Pointers {
                blocks: full,
                ..pointers
            };
            // The blocks that the panel has whole.
            run(pointers);
        }
        if full < blocks {
            let mut last = LastBlock([0; BF16_BLOCK]);
            let rest = &self.columns[full * BF16_BLOCK..];
            last.0[..rest.len()].copy_from_slice(rest);
            let pointers = Pointers {
                rows: [
                    pointers.rows[0].wrapping_add(full * TILE),
                    pointers.rows[1].wrapping_add(full * TILE),
                ],
                columns: last.0.as_ptr(),
                blocks: 1,
                add: add || full > 0,
                ..pointers
            };
            // The last block of the rows; the array is a block of a panel.
            run(pointers);
        }
    }
}
