//! From codes, scales and minimums to a block's bytes: the inverse of [`unpack_block`](crate::unpack).

use crate::block::F16Le;
use crate::fp4::BlockMxfp4;
use crate::iq::{BlockIq4Nl, BlockIq4Xs};
use crate::k_quants::{BlockQ2K, BlockQ3K, BlockQ4K, BlockQ5K, BlockQ6K};
use crate::legacy::{BlockQ4_0, BlockQ4_1, BlockQ5_0, BlockQ5_1, BlockQ8_0, pack_fifth_bits};
use crate::unpack::UnpackedBlock;
use bytemuck::bytes_of;
use ferrum_types::GgufQuantType as T;

/// Writes `parts` as one block of `ty` into `out`, which has the size of a block.
pub(super) fn pack(ty: T, parts: &UnpackedBlock, out: &mut [u8]) {
    let d = F16Le::from_f32(parts.d);
    let dmin = F16Le::from_f32(parts.dmin);
    let m = F16Le::from_f32(-parts.dmin);
    let qs = gather::<4, 16, _>(parts, 0);
    let qh = parts.codes.first_chunk().map_or([0; 4], pack_fifth_bits);
    match ty {
        T::Q4_0 => out.copy_from_slice(bytes_of(&BlockQ4_0 { d, qs })),
        T::Q4_1 => out.copy_from_slice(bytes_of(&BlockQ4_1 { d, m, qs })),
        T::Q5_0 => out.copy_from_slice(bytes_of(&BlockQ5_0 { d, qh, qs })),
        T::Q5_1 => out.copy_from_slice(bytes_of(&BlockQ5_1 { d, m, qh, qs })),
        T::Q8_0 => {
            let codes: [u8; 32] = parts.codes.first_chunk().copied().unwrap_or([0; 32]);
            let qs = bytemuck::cast(codes);
            out.copy_from_slice(bytes_of(&BlockQ8_0 { d, qs }));
        }
        T::IQ4_NL => out.copy_from_slice(bytes_of(&BlockIq4Nl { d, qs })),
        T::MXFP4 => {
            let e = e8m0_of_half(parts.d);
            out.copy_from_slice(bytes_of(&BlockMxfp4 { e, qs }));
        }
        T::IQ4_XS => out.copy_from_slice(bytes_of(&iq4_xs(parts, d))),
        T::Q2_K => out.copy_from_slice(bytes_of(&BlockQ2K {
            scales: std::array::from_fn(|i| parts.scales[i] as u8 | (parts.minimums[i] << 4)),
            qs: gather::<2, 32, _>(parts, 0),
            d,
            dmin,
        })),
        T::Q3_K => out.copy_from_slice(bytes_of(&BlockQ3K {
            hmask: gather::<1, 32, _>(parts, 2),
            qs: gather::<2, 32, _>(parts, 0),
            scales: q3_k_scales(&parts.scales),
            d,
        })),
        T::Q4_K => out.copy_from_slice(bytes_of(&BlockQ4K {
            d,
            dmin,
            scales: k_scales(parts),
            qs: gather::<4, 32, _>(parts, 0),
        })),
        T::Q5_K => out.copy_from_slice(bytes_of(&BlockQ5K {
            d,
            dmin,
            scales: k_scales(parts),
            qh: gather::<1, 32, _>(parts, 4),
            qs: gather::<4, 32, _>(parts, 0),
        })),
        T::Q6_K => out.copy_from_slice(bytes_of(&BlockQ6K {
            ql: gather::<4, 64, _>(parts, 0),
            qh: gather::<2, 32, _>(parts, 4),
            scales: parts.scales,
            d,
        })),
        // No other type is rounded or has a grid, so nothing else comes here.
        _ => {}
    }
}

/// `BITS` bits of each code, from bit `from` on, as all types lay them: `8 / BITS` codes that lie `RUN` apart
/// share a byte, the first in its lowest bits, and `RUN` such bytes follow one another.
fn gather<const BITS: usize, const RUN: usize, const N: usize>(
    parts: &UnpackedBlock,
    from: u32,
) -> [u8; N] {
    let mut out = [0; N];
    let (codes, _) = parts.codes.as_chunks::<RUN>();
    for (run, out) in out.as_chunks_mut::<RUN>().0.iter_mut().enumerate() {
        for i in 0..8 / BITS {
            let codes = &codes[run * (8 / BITS) + i];
            for (at, byte) in out.iter_mut().enumerate() {
                *byte |= ((codes[at] >> from) & ((1 << BITS) - 1)) << (BITS * i);
            }
        }
    }
    out
}

/// The E8M0 code whose half is `d`, a power of two; 0 for 0.
fn e8m0_of_half(d: f32) -> u8 {
    match d.to_bits() >> 23 {
        0 => u8::from(d.to_bits() >= 0x0040_0000),
        exponent => (exponent + 1).min(254) as u8,
    }
}

fn iq4_xs(parts: &UnpackedBlock, d: F16Le) -> BlockIq4Xs {
    let (mut high, mut scales_l) = (0u16, [0; 4]);
    for i in 0..8 {
        let scale = (i16::from(parts.scales[2 * i]) + 32) as u8;
        high |= u16::from(scale >> 4) << (2 * i);
        scales_l[i / 2] |= (scale & 15) << (4 * (i % 2));
    }
    BlockIq4Xs {
        d,
        scales_h: high.to_le_bytes(),
        scales_l,
        qs: gather::<4, 16, _>(parts, 0),
    }
}

/// See [`BlockQ3K::sub_scales`].
fn q3_k_scales(scales: &[i8; 16]) -> [u8; 12] {
    let mut out = [0; 12];
    for (i, scale) in scales.iter().enumerate() {
        let scale = (i16::from(*scale) + 32) as u8;
        out[i % 8] |= (scale & 15) << (4 * (i / 8));
        out[8 + i % 4] |= (scale >> 4) << (2 * (i / 4));
    }
    out
}

/// See [`scales_and_minimums`](crate::k_quants::scales_and_minimums).
fn k_scales(parts: &UnpackedBlock) -> [u8; 12] {
    let mut out = [0; 12];
    for i in 0..4 {
        let of = |j: usize| (parts.scales[2 * j] as u8, parts.minimums[2 * j]);
        let ((s0, m0), (s4, m4)) = (of(i), of(i + 4));
        out[i] = s0 | ((s4 >> 4) << 6);
        out[4 + i] = m0 | ((m4 >> 4) << 6);
        out[8 + i] = (s4 & 15) | ((m4 & 15) << 4);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::encode::{Minimums, Scales, grid};
    use crate::unpack::{CodeValues, code_values, unpack_block};

    #[test]
    fn what_is_packed_is_taken_apart_again() {
        let mut state = 11u64;
        let mut below = |n: i32| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            ((state >> 33) % n as u64) as i32
        };
        let mut seen = 0;
        for ty in T::all() {
            let (Some(kind), Some(values)) = (grid(ty), code_values(ty)) else {
                continue;
            };
            seen += 1;
            let bits = match values {
                CodeValues::Unsigned { bits, .. } => bits,
                _ => 4,
            };
            for _ in 0..20 {
                let mut parts = UnpackedBlock::ZERO;
                (parts.d, parts.dmin) = (0.125, 0.0);
                for code in &mut parts.codes[..ty.block_len()] {
                    *code = below(1 << bits) as u8;
                }
                for sub in 0..256 / kind.grid.sub {
                    let here = sub * kind.grid.sub / 16..(sub + 1) * kind.grid.sub / 16;
                    let scale = match kind.grid.scales {
                        Scales::One => 1,
                        Scales::Steps(low, high) => low + below(high - low + 1),
                    };
                    let minimum = match kind.grid.minimums {
                        Minimums::None => 0,
                        Minimums::One => 1,
                        Minimums::Steps(high) => below(high + 1),
                    };
                    parts.scales[here.clone()].fill(scale as i8);
                    parts.minimums[here].fill(minimum as u8);
                }
                if kind.grid.minimums != Minimums::None {
                    parts.dmin = 0.5;
                }
                let mut bytes = vec![0; ty.block_bytes()];
                pack(ty, &parts, &mut bytes);
                let mut found = UnpackedBlock::ZERO;
                assert!(unpack_block(ty, &bytes, &mut found).unwrap());
                assert_eq!(found, parts, "{ty}");
            }
        }
        assert_eq!(seen, 12);
    }

    #[test]
    fn powers_of_two_keep_their_exponent() {
        for e in 0..=254 {
            assert_eq!(e8m0_of_half(crate::fp4::e8m0_half(e)), e);
        }
    }
}
