//! Products in tiles of AMX beside the same sums in plain Rust, bit for bit.

use super::{Random, Run, bits};
use ferrum_simd::exec::Scratch;
use ferrum_simd::gemm::{self, CpuWeight};
use ferrum_simd::isa::{Isa, Level};
use ferrum_test_support::skip;
use ferrum_types::{GemmShape, SrcDtype, SumSplit, WeightPart};
use half::bf16;

/// Inputs of an instruction.
const BLOCK: usize = 32;

/// `sum` and the products of a block: those of even and of odd inputs are summed apart.
fn add_block(sum: f32, x: &[f32], w: &[f32]) -> f32 {
    let mut sums = [0.0f32; 2];
    for (i, (x, w)) in x.iter().zip(w).enumerate() {
        sums[i % 2] = x.mul_add(*w, sums[i % 2]);
    }
    sum + (sums[0] + sums[1])
}

fn rounded(x: &[f32]) -> Vec<f32> {
    x.iter().map(|x| bf16::from_f32(*x).to_f32()).collect()
}

/// The bytes of a weight.
fn bytes_of(dtype: SrcDtype, w: &[f32]) -> Vec<u8> {
    match dtype {
        SrcDtype::BF16 => w
            .iter()
            .flat_map(|x| bf16::from_f32(*x).to_le_bytes())
            .collect(),
        _ => w.iter().flat_map(|x| x.to_le_bytes()).collect(),
    }
}

/// High and low halves of numbers.
fn split(x: &[f32]) -> [Vec<f32>; 2] {
    let high = rounded(x);
    let low: Vec<f32> = x.iter().zip(&high).map(|(x, high)| x - high).collect();
    let low = rounded(&low);
    [high, low]
}

/// The product of a row and a feature in one part of its sums.
fn product(dtype: SrcDtype, x: &[f32], w: &[f32]) -> f32 {
    let mut sum = 0.0;
    for (x, w) in x.chunks(BLOCK).zip(w.chunks(BLOCK)) {
        if dtype == SrcDtype::BF16 {
            sum = add_block(sum, &rounded(x), w);
            continue;
        }
        let ([x_high, x_low], [w_high, w_low]) = (split(x), split(w));
        sum = add_block(sum, &x_high, &w_low);
        sum = add_block(sum, &x_high, &w_high);
        sum = add_block(sum, &x_low, &w_high);
    }
    sum
}

#[test]
fn products_in_tiles_are_summed_as_documented() {
    let mut random = Random::new(11);
    for (isa, dtype) in [
        (Isa::AmxF32, SrcDtype::F32),
        (Isa::AmxF32, SrcDtype::BF16),
        (Isa::Amx, SrcDtype::BF16),
    ] {
        let Ok(level) = Level::new(isa) else {
            skip(format_args!("this machine has no {isa}"));
            continue;
        };
        for (rows, n, k) in [
            (1, 1, 2),
            (1, 40, 386),
            (1, 173, 418),
            (2, 32, 96),
            (4, 65, 418),
            (5, 33, 70),
            (16, 64, 384),
            (33, 70, 130),
            (40, 32, 800),
            (67, 100, 96),
            (150, 31, 34),
            (390, 100, 96),
        ] {
            let x: Vec<f32> = (0..rows * k).map(|_| random.unit()).collect();
            let mut w: Vec<f32> = (0..n * k).map(|_| random.unit()).collect();
            if dtype == SrcDtype::BF16 {
                w = rounded(&w);
            }
            let bytes = bytes_of(dtype, &w);
            let cut: usize = k / 4 * 2;
            // Pairs of bf16 are not cut.
            let odd = match dtype {
                SrcDtype::BF16 => 0,
                _ => (k / 3) | 1,
            };
            for cut in [0, cut, odd, cut.next_multiple_of(BLOCK)] {
                let split = SumSplit::at(&[cut]).unwrap_or(SumSplit::WHOLE);
                let whole = cut == 0 || cut >= k;
                let mut expected = Vec::new();
                for x in x.chunks_exact(k) {
                    expected.extend(w.chunks_exact(k).map(|w| match whole {
                        true => product(dtype, x, w),
                        false => {
                            let first = product(dtype, &x[..cut], &w[..cut]);
                            first + product(dtype, &x[cut..], &w[cut..])
                        }
                    }));
                }
                for threads in [1, 3] {
                    let Run { exec } = Run::new(level, threads);
                    let part = WeightPart::new(&bytes, dtype, n);
                    let mut weight = CpuWeight::pack(&exec, &[part], k).unwrap();
                    weight.split_sums(split);
                    let mut out = vec![f32::NAN; rows * n];
                    let shape = GemmShape { rows, n, k };
                    let mut scratch = Scratch::new().unwrap();
                    gemm::gemm(&exec, &mut scratch, &x, &weight, &mut out, shape).unwrap();
                    let same = bits(&out) == bits(&expected);
                    assert!(
                        same,
                        "{isa} {dtype} {shape:?}, cut at {cut}, {threads} threads"
                    );
                }
            }
        }
    }
}

/// A row has the bits that it has among so many that all are multiplied in tiles, also where numbers, products or sums are
/// subnormal, infinite or no numbers.
#[test]
fn a_row_alone_has_the_bits_of_tiles() {
    let mut random = Random::new(12);
    // Exponents around those at which products, sums or low halves become subnormal, and around those that overflow.
    let mut number = |(least, most): (i32, i32)| {
        let exponent = least + (random.unit().abs() * (most - least) as f32) as i32;
        random.unit() * 2f32.powi(exponent)
    };
    for (isa, dtype) in [(Isa::AmxF32, SrcDtype::F32), (Isa::Amx, SrcDtype::BF16)] {
        let Ok(level) = Level::new(isa) else {
            skip(format_args!("this machine has no {isa}"));
            continue;
        };
        let (rows, n, k) = (21, 173, 230);
        for (of_x, of_w) in [
            ((-1, 1), (-1, 1)),
            ((-70, -58), (-70, -58)),
            ((100, 120), (-140, -120)),
            ((-140, -120), (100, 120)),
            ((-75, 60), (-75, 60)),
            ((55, 66), (55, 66)),
        ] {
            let mut x: Vec<f32> = (0..rows * k).map(|_| number(of_x)).collect();
            let w: Vec<f32> = (0..n * k).map(|_| number(of_w)).collect();
            if of_x.1 == 66 {
                x[3] = f32::INFINITY;
                x[k + 5] = f32::NAN;
            }
            let bytes = bytes_of(dtype, &w);
            // One thread takes panels four at a time.
            let Run { exec } = Run::new(level, 1);
            let part = WeightPart::new(&bytes, dtype, n);
            let weight = CpuWeight::pack(&exec, &[part], k).unwrap();
            let mut scratch = Scratch::new().unwrap();
            let mut product = |x: &[f32]| {
                let rows = x.len() / k;
                let mut out = vec![f32::NAN; rows * n];
                let shape = GemmShape { rows, n, k };
                gemm::gemm(&exec, &mut scratch, x, &weight, &mut out, shape).unwrap();
                out
            };
            let together = product(&x);
            let magnitudes = || together.iter().map(|x| x.abs());
            assert!(magnitudes().any(|x| x > 0.0), "{isa} {of_x:?}");
            for few in [1, 3] {
                let apart: Vec<f32> = x.chunks(few * k).flat_map(&mut product).collect();
                let (apart, together) = (bits(&apart), bits(&together));
                let at = apart.iter().zip(&together).position(|(a, b)| a != b);
                assert_eq!(at, None, "{isa} {dtype} {of_x:?} {of_w:?}, {few} rows");
            }
        }
    }
}
