//! One row times panels, with the bits of a product in tiles and without the fifteen rows that it would waste.
//!
//! `tdpbf16ps` sums the products of even and of odd inputs of its 32 apart, each with fused multiply-adds from zero on, then
//! adds both sums, and what comes of that to what was there; subnormal numbers count as zeros, and subnormal results become zeros
//! (Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2, "TDPBF16PS"). Vector instructions do the same when
//! MXCSR says so of subnormal numbers. That is why this is assembly: the compiler's own code may not run with another MXCSR.
//!
//! Panels of bf16 are taken four at a time: more streams from memory, which its prefetchers follow by themselves.

use super::tile::{BF16_BLOCK, Pointers, TILE};
use core::arch::asm;

/// Panels of [`four_panels`].
pub(super) const PANELS: usize = 4;

/// MXCSR while a row is multiplied: no exception traps, rounding to nearest even, subnormal operands and results are zeros.
static FLUSH: u32 = 0x1f80 | 1 << 15 | 1 << 6;

/// Inputs `2 i` and `2 i + 1` of a row, at `a`, times those of the columns of some panels, at `b` and what a panel adds to it: `stride`
/// bytes further for each `i`, the second sixteen columns of a panel `second` bytes behind the first. A panel names its registers:
/// sums of both halves, and those of products with even and with odd inputs.
macro_rules! step {
    ($a:literal, $b:literal, $second:literal, $stride:literal, $i:literal,
     [$(($at:literal, $s0:literal, $s1:literal, $e0:literal, $e1:literal, $o0:literal, $o1:literal)),*]) => {
        concat!(
            "vpbroadcastd zmm24, dword ptr [{a} + ", $a, " + 4*", $i, "]\n",
            "vpslld zmm25, zmm24, 16\n",
            "vpandd zmm24, zmm24, zmm26\n",
            $(
                "vpslld zmm27, zmmword ptr [{b} + ", $at, $b, " + ", $stride, "*", $i, "], 16\n",
                "vpandd zmm28, zmm26, zmmword ptr [{b} + ", $at, $b, " + ", $stride, "*", $i, "]\n",
                "vfmadd231ps ", $e0, ", zmm25, zmm27\n",
                "vfmadd231ps ", $o0, ", zmm24, zmm28\n",
                "vpslld zmm29, zmmword ptr [{b} + ", $at, $b, " + ", $second, " + ", $stride, "*", $i, "], 16\n",
                "vpandd zmm30, zmm26, zmmword ptr [{b} + ", $at, $b, " + ", $second, " + ", $stride, "*", $i, "]\n",
                "vfmadd231ps ", $e1, ", zmm25, zmm29\n",
                "vfmadd231ps ", $o1, ", zmm24, zmm30\n",
            )*
        )
    };
}

/// What one instruction on tiles does for each tile of columns.
macro_rules! block {
    ($a:literal, $b:literal, $second:literal, $stride:literal, $panels:tt) => {
        concat!(
            block!(@clear $panels),
            step!($a, $b, $second, $stride, 0, $panels),
            step!($a, $b, $second, $stride, 1, $panels),
            step!($a, $b, $second, $stride, 2, $panels),
            step!($a, $b, $second, $stride, 3, $panels),
            step!($a, $b, $second, $stride, 4, $panels),
            step!($a, $b, $second, $stride, 5, $panels),
            step!($a, $b, $second, $stride, 6, $panels),
            step!($a, $b, $second, $stride, 7, $panels),
            step!($a, $b, $second, $stride, 8, $panels),
            step!($a, $b, $second, $stride, 9, $panels),
            step!($a, $b, $second, $stride, 10, $panels),
            step!($a, $b, $second, $stride, 11, $panels),
            step!($a, $b, $second, $stride, 12, $panels),
            step!($a, $b, $second, $stride, 13, $panels),
            step!($a, $b, $second, $stride, 14, $panels),
            step!($a, $b, $second, $stride, 15, $panels),
            block!(@sum $panels),
        )
    };
    (@clear [$(($at:literal, $s0:literal, $s1:literal, $($sum:literal),*)),*]) => {
        concat!($($("vpxord ", $sum, ", ", $sum, ", ", $sum, "\n",)*)*)
    };
    (@sum [$(($at:literal, $s0:literal, $s1:literal, $e0:literal, $e1:literal, $o0:literal, $o1:literal)),*]) => {
        concat!($(
            "vaddps ", $e0, ", ", $e0, ", ", $o0, "\n",
            "vaddps ", $e1, ", ", $e1, ", ", $o1, "\n",
            "vaddps ", $s0, ", ", $s0, ", ", $e0, "\n",
            "vaddps ", $s1, ", ", $s1, ", ", $e1, "\n",
        )*)
    };
}

/// A loop over blocks, each of which is some `block!`s, of rows and columns that take so many bytes in it.
macro_rules! products {
    ($pointers:expr, $stride:expr, $row_bytes:literal, $column_bytes:literal,
     { $($block:expr,)* }, { $(($at:literal, $sum:literal))* }) => {{
        let Pointers { rows, columns, blocks, sums, add, .. } = $pointers;
        let stride: usize = $stride;
        let mut before = 0u32;
        asm!(
            "stmxcsr dword ptr [{before}]",
            "ldmxcsr dword ptr [{flush}]",
            "mov {high:e}, 0xffff0000",
            "vpbroadcastd zmm26, {high:e}",
            $(concat!("vpxord ", $sum, ", ", $sum, ", ", $sum),)*
            "test {add}, {add}",
            "jz 2f",
            $(concat!("vmovups ", $sum, ", zmmword ptr [{sums} + ", $at, "]"),)*
            "2:",
            $($block,)*
            concat!("add {a}, ", $row_bytes),
            concat!("add {b}, ", $column_bytes),
            "dec {blocks}",
            "jnz 2b",
            $(concat!("vmovups zmmword ptr [{sums} + ", $at, "], ", $sum),)*
            "vzeroupper",
            "ldmxcsr dword ptr [{before}]",
            "/* {next} {third} */",
            before = in(reg) &raw mut before,
            flush = in(reg) &raw const FLUSH,
            high = out(reg) _,
            add = in(reg) usize::from(add),
            sums = in(reg) sums,
            next = in(reg) stride,
            third = in(reg) 3 * stride,
            a = inout(reg) rows[0] => _,
            b = inout(reg) columns => _,
            blocks = inout(reg) blocks => _,
            out("zmm0") _, out("zmm1") _, out("zmm2") _, out("zmm3") _, out("zmm4") _, out("zmm5") _, out("zmm6") _,
            out("zmm7") _, out("zmm8") _, out("zmm9") _, out("zmm10") _, out("zmm11") _, out("zmm12") _, out("zmm13") _,
            out("zmm14") _, out("zmm15") _, out("zmm16") _, out("zmm17") _, out("zmm18") _, out("zmm19") _, out("zmm20") _,
            out("zmm21") _, out("zmm22") _, out("zmm23") _, out("zmm24") _, out("zmm25") _, out("zmm26") _, out("zmm27") _,
            out("zmm28") _, out("zmm29") _, out("zmm30") _,
            options(nostack),
        );
    }};
}

/// One panel, and its registers.
macro_rules! one {
    ($a:literal, $b:literal, $second:literal, $stride:literal) => {
        block!(
            $a,
            $b,
            $second,
            $stride,
            [("", "zmm0", "zmm1", "zmm8", "zmm9", "zmm16", "zmm17")]
        )
    };
}

/// Four panels.
#[rustfmt::skip]
macro_rules! four {
    ($a:literal, $b:literal, $second:literal, $stride:literal) => {
        block!($a, $b, $second, $stride, [
            ("", "zmm0", "zmm1", "zmm8", "zmm9", "zmm16", "zmm17"),
            ("{next} + ", "zmm2", "zmm3", "zmm10", "zmm11", "zmm18", "zmm19"),
            ("2*{next} + ", "zmm4", "zmm5", "zmm12", "zmm13", "zmm20", "zmm21"),
            ("{third} + ", "zmm6", "zmm7", "zmm14", "zmm15", "zmm22", "zmm23")
        ])
    };
}

/// The loop over blocks for one row, to which `rows[0]` points in the first block of its tile, and one panel.
///
/// # Safety
/// The processor has AVX-512. The row and the columns are valid for reads of that many blocks, 32 sums for writes (and for reads
/// with `add`), and no other thread uses these.
#[inline(always)]
pub(super) unsafe fn row_products<const SPLIT: bool>(pointers: Pointers) {
    const { assert!(TILE == 1024) };
    match SPLIT {
        // SAFETY: the caller's contract: of each block, 64 bytes of the row's high half are read, as many of its low half,
        // and the four tiles of columns. MXCSR is what it was at the end.
        true => unsafe {
            products!(pointers, 0, "2048", "4096", {
                one!("0", "2048", "1024", "64"),
                one!("0", "0", "1024", "64"),
                one!("1024", "0", "1024", "64"),
            }, { ("0", "zmm0") ("64", "zmm1") });
        },
        // SAFETY: as above, of one half, and of two tiles side by side.
        false => unsafe {
            products!(pointers, 0, "1024", "2048", { one!("0", "0", "64", "128"), }, { ("0", "zmm0") ("64", "zmm1") });
        },
    }
}

/// Whole blocks of one row, of bf16 and at least one, times four panels, which begin `stride` bytes apart: their 128 sums.
///
/// # Safety
/// The processor has AVX-512. 128 floats from `sums` on are valid for writes, and no other thread uses them.
pub(super) unsafe fn four_panels(row: &[u8], columns: &[u8], stride: usize, sums: *mut f32) {
    let blocks = row.len() / TILE;
    assert!(blocks > 0);
    assert!(columns.len() >= (PANELS - 1) * stride + blocks * BF16_BLOCK);
    let pointers = Pointers {
        rows: [row.as_ptr(); 2],
        columns: columns.as_ptr(),
        blocks,
        sums,
        sums_stride: 0,
        add: false,
    };
    // SAFETY: as in `row_products`; all four panels have so many blocks (asserted).
    unsafe {
        products!(pointers, stride, "1024", "2048", { four!("0", "0", "64", "128"), }, {
            ("0", "zmm0") ("64", "zmm1") ("128", "zmm2") ("192", "zmm3")
            ("256", "zmm4") ("320", "zmm5") ("384", "zmm6") ("448", "zmm7")
        });
    }
}
