//! Panels beside what they are made of, number by number, at every level.

use super::{Random, Run, bits, rounding_runs, runs};
use ferrum_quant::affine::{GroupParams, PackedCodes};
use ferrum_quant::fp8_layer::Fp8Tensors;
use ferrum_quant::unpack::{SUB, UnpackedBlock, code_values, unpack_block};
use ferrum_quant::weights::GgufRows;
use ferrum_quant::{awq, gptq};
use ferrum_simd::fp8;
use ferrum_simd::gemm::{CpuWeight, Elements, PANEL};
use ferrum_simd::isa::{Isa, Level};
use ferrum_simd::quant::affine::GroupQuantWeight;
use ferrum_simd::quant::format::{CodeLayout, ScaleLayout, UNIT, block_bytes};
use ferrum_simd::quant::pack::{FormatVisitor, PackedMatrix, SignFlip, panel_bytes};
use ferrum_test_support::skip;
use ferrum_types::{GgufQuantType, MatShape, SrcDtype, WeightPart};
use half::f16;

/// Rows: whole panels, and panels that end anywhere.
const ROWS: [usize; 5] = [1, 15, 40, 64, 81];

/// Code, scale and minimum of number `k` of a feature.
type Number<'a> = &'a dyn Fn(usize, usize) -> (u8, f32, f32);

/// Every number of every feature of some panels, those past the last too: these are zeros.
struct Compare<'a> {
    what: String,
    weight: &'a PackedMatrix,
    flip: u8,
    expected: Number<'a>,
}

impl FormatVisitor for Compare<'_> {
    type Output = ();

    fn run<C: CodeLayout, F: ScaleLayout>(self, _: C, _: F) {
        let Self { what, weight, .. } = self;
        let MatShape { rows, cols } = weight.shape();
        let panel = panel_bytes::<C, F>(cols);
        assert_eq!(weight.bytes().len(), rows.div_ceil(PANEL) * panel);
        for row in 0..rows.next_multiple_of(PANEL) {
            let (panel, j) = (&weight.bytes()[row / PANEL * panel..][..panel], row % PANEL);
            for k in 0..cols {
                let of_block = F::UNITS * UNIT;
                let block = &panel[k / of_block * block_bytes::<C, F>()..];
                let (head, units) = block.split_at(F::BLOCK_HEADER_BYTES);
                let unit = &units[k % of_block / UNIT * (F::UNIT_SCALE_BYTES + C::BYTES)..];
                let (beside, codes) = unit.split_at(F::UNIT_SCALE_BYTES);
                let (scale, minimum) = F::get(head, beside, j, k % UNIT);
                // What does not exist is zero before anything is flipped.
                let flip = if row < rows { self.flip } else { 0 };
                let code = C::get(codes, j, k % UNIT, flip);
                let found = (code, bits(&[scale, minimum]));
                let (code, scale, minimum) = match row < rows {
                    true => (self.expected)(row, k),
                    false => (0, 0.0, 0.0),
                };
                let expected = (code, bits(&[scale, minimum]));
                assert_eq!(found, expected, "{what}: row {row} of {rows}, number {k}");
            }
        }
    }
}

fn compare(what: String, run: &Run, weight: &PackedMatrix, expected: Number<'_>) {
    let flip = run.exec.level.run_bytes(SignFlip);
    let what = format!("{what}, {run}");
    let work = Compare {
        what,
        weight,
        flip,
        expected,
    };
    weight.with(work).unwrap();
}

#[test]
fn panels_hold_the_integers_of_blocks() {
    const COLS: usize = 512;
    for ty in GgufQuantType::all().filter(|ty| code_values(*ty).is_some()) {
        let (mut random, len) = (Random::new(ty as u64), ty.block_bytes());
        for rows in ROWS {
            let count = rows * COLS / ty.block_len();
            let bytes: Vec<u8> = (0..count * len).map(|_| random.next() as u8).collect();
            let blocks: Vec<UnpackedBlock> = bytes
                .chunks_exact(len)
                .map(|block| {
                    let mut out = UnpackedBlock::ZERO;
                    unpack_block(ty, block, &mut out).unwrap();
                    out
                })
                .collect();
            let expected = |row: usize, k: usize| {
                let at = row * COLS + k;
                let (block, i) = (&blocks[at / ty.block_len()], at % ty.block_len());
                let scale = block.d * f32::from(block.scales[i / SUB]);
                let minimum = block.dmin * f32::from(block.minimums[i / SUB]);
                let subnormal = ty == GgufQuantType::MXFP4 && scale < f32::MIN_POSITIVE;
                let scale = if subnormal { 0.0 } else { scale };
                (block.codes[i], scale, minimum)
            };
            // Parts of one row, and all others.
            let (first, others) = bytes.split_at(bytes.len() / rows);
            let part = |bytes, rows| GgufRows::new(bytes, ty, rows);
            let parts = [part(first, 1), part(others, rows - 1)];
            for run in runs() {
                let weight = PackedMatrix::new(&run.exec, &parts, COLS).unwrap();
                compare(ty.to_string(), &run, &weight, &expected);
            }
        }
    }
}

/// A layer of a group scheme with random codes, scales and zero points.
fn affine(
    random: &mut Random,
    bits: u32,
    rows: usize,
    cols: usize,
    group_of_input: &[usize],
) -> GroupParams {
    let groups = group_of_input.iter().max().unwrap() + 1;
    let scale = |_| f16::from_f32(random.unit()).to_f32();
    let scales = (0..groups * rows).map(scale).collect();
    let zeros = (0..groups * rows).map(|_| random.below(1 << bits) as u8);
    GroupParams {
        bits,
        in_features: cols,
        out_features: rows,
        scales,
        zeros: zeros.collect(),
        group_of_input: group_of_input.to_vec(),
    }
}

/// Packs layers of some codes one below the other and compares.
fn compare_layers(what: &str, layers: Vec<(GroupParams, PackedCodes<'_>)>) {
    let cols = layers[0].0.in_features;
    let layers: Vec<_> = layers
        .into_iter()
        .map(|(affine, codes)| GroupQuantWeight::new(affine, codes).unwrap())
        .collect();
    let expected = |mut row: usize, k: usize| {
        let mut of_row = layers.iter();
        let layer = loop {
            let layer = of_row.next().unwrap();
            if row < layer.affine().out_features {
                break layer;
            }
            row -= layer.affine().out_features;
        };
        let (affine, codes) = (layer.affine(), layer.codes());
        let input = layer.order().map_or(k, |order| order[k] as usize);
        let at = affine.group_of_input[input] * affine.out_features + row;
        let middle = 1u8 << (affine.bits - 1);
        let flip = if affine.bits == 8 { 0x80 } else { 0 };
        let zero = affine.zeros[at].wrapping_sub(middle) as i8;
        let scale = affine.scales[at];
        (
            codes.code(affine, row, input) ^ flip,
            scale,
            scale * f32::from(zero),
        )
    };
    for run in runs() {
        let layers: Vec<_> = layers.iter().collect();
        let weight = GroupQuantWeight::pack(&run.exec, &layers, cols).unwrap();
        compare(what.into(), &run, &weight, &expected);
    }
}

#[test]
fn panels_hold_the_codes_of_layers() {
    const COLS: usize = 256;
    let mut random = Random::new(9);
    let runs = |size: usize| (0..COLS).map(|i| i / size).collect::<Vec<_>>();
    // Inputs of each group everywhere.
    let mixed = |groups: usize| (0..COLS).map(|i| i * 7 % groups).collect::<Vec<_>>();
    for group_of_input in [runs(32), runs(128), mixed(8), mixed(2)] {
        for bits in [2u32, 3, 4, 8] {
            // Of several layers the second begins in the middle of a half.
            for rows in [vec![32], vec![72], vec![40, 24, 64]] {
                let mut columns = Vec::new();
                for &n in &rows {
                    let code = |_| random.below(1 << bits) as u8;
                    let codes: Vec<u8> = (0..n * COLS).map(code).collect();
                    columns.push(match n.is_multiple_of(if bits == 3 { 32 } else { 8 }) {
                        true => gptq::pack_codes(bits, &codes, COLS, n).unwrap(),
                        // The codes of three bits need 32 outputs in files, not here.
                        false => random_words(&mut random, n * COLS * bits as usize / 8),
                    });
                }
                let mut layers = |form: fn(&[[u8; 4]]) -> PackedCodes<'_>| {
                    let mut found = Vec::new();
                    for (&n, words) in rows.iter().zip(&columns) {
                        let affine = affine(&mut random, bits, n, COLS, &group_of_input);
                        found.push((affine, form(words.as_chunks().0)));
                    }
                    found
                };
                let what = format!(
                    "{bits} bits, {rows:?} rows, groups {:?}",
                    &group_of_input[..4]
                );
                compare_layers(&what, layers(|words| PackedCodes::Columns(words)));
                if matches!(bits, 4 | 8) {
                    // The same words read in another way.
                    compare_layers(&what, layers(|words| PackedCodes::Rows(words)));
                }
                if bits == 4 {
                    compare_layers(&what, layers(|words| PackedCodes::Interleaved(words)));
                }
            }
        }
    }
}

fn random_words(random: &mut Random, bytes: usize) -> Vec<u8> {
    (0..bytes).map(|_| random.next() as u8).collect()
}

#[test]
fn codes_as_they_lie_are_those_of_their_files() {
    let (rows, cols) = (32, 64);
    let mut random = Random::new(4);
    let group_of_input = vec![0; cols];
    for bits in [2, 3, 4, 8] {
        let code = |_| random.below(1 << bits) as u8;
        let codes: Vec<u8> = (0..rows * cols).map(code).collect();
        let affine = affine(&mut random, bits, rows, cols, &group_of_input);
        let all = |packed: PackedCodes<'_>| {
            let places = (0..rows * cols).map(|at| (at / cols, at % cols));
            places
                .map(|(o, i)| packed.code(&affine, o, i))
                .collect::<Vec<_>>()
        };
        let words = gptq::pack_codes(bits, &codes, cols, rows).unwrap();
        assert_eq!(all(PackedCodes::Columns(words.as_chunks().0)), codes);
        if bits == 4 {
            let words = awq::pack_codes(&codes, cols, rows).unwrap();
            assert_eq!(all(PackedCodes::Interleaved(words.as_chunks().0)), codes);
            let words: Vec<u8> = codes.chunks(2).map(|two| two[0] | two[1] << 4).collect();
            assert_eq!(all(PackedCodes::Rows(words.as_chunks().0)), codes);
        }
    }
}

/// What each row of a weight of floats reads, with those past the last.
fn rows_of(weight: &CpuWeight, expected: &dyn Fn(usize, usize) -> f32, what: &str) {
    let MatShape { rows, cols } = weight.shape();
    let mut found = vec![0.0; cols];
    for row in 0..rows.next_multiple_of(PANEL) {
        weight.read_row(row, &mut found);
        let number = |k| if row < rows { expected(row, k) } else { 0.0 };
        let expected: Vec<f32> = (0..cols).map(number).collect();
        assert_eq!(bits(&found), bits(&expected), "{what}: row {row} of {rows}");
    }
}

#[test]
fn panels_hold_floats_of_every_type() {
    let all: Vec<_> = runs().into_iter().chain(rounding_runs()).collect();
    let mut random = Random::new(5);
    for (rows, cols) in [(1, 1), (33, 7), (40, 36), (64, 128), (17, 514)] {
        for dtype in [SrcDtype::F32, SrcDtype::F16, SrcDtype::BF16] {
            let size = dtype.size();
            let bytes = random_words(&mut random, rows * cols * size);
            let number = |row: usize, k: usize| {
                let x = &bytes[(row * cols + k) * size..][..size];
                match dtype {
                    SrcDtype::F32 => f32::from_le_bytes([x[0], x[1], x[2], x[3]]),
                    SrcDtype::F16 => f16::from_le_bytes([x[0], x[1]]).to_f32(),
                    SrcDtype::BF16 => half::bf16::from_le_bytes([x[0], x[1]]).to_f32(),
                }
            };
            let part = WeightPart::new(&bytes, dtype, rows);
            // Beside a row of another type, all become f32.
            let zeros = vec![0; 4 * cols];
            let other = WeightPart::new(&zeros, SrcDtype::F32, 1);
            for run in &all {
                let what = format!("{dtype:?} [{rows}, {cols}], {run}");
                let weight = CpuWeight::pack_table(&run.exec, &[part], cols).unwrap();
                rows_of(&weight, &number, &what);
                let weight = CpuWeight::pack_table(&run.exec, &[part, other], cols).unwrap();
                let or_zero = |row, k| if row < rows { number(row, k) } else { 0.0 };
                rows_of(&weight, &or_zero, &what);
            }
        }
    }
}

/// Of numbers that are split, the halves keep all but 2^-17.
#[test]
fn split_panels_hold_halves() {
    let Ok(level) = Level::new(Isa::AmxF32) else {
        skip(format_args!("this machine has no {}", Isa::AmxF32));
        return;
    };
    let run = Run::new(level, 2);
    let mut random = Random::new(7);
    for (rows, cols) in [(1, 1), (33, 31), (40, 32), (64, 33), (17, 514)] {
        let w: Vec<f32> = (0..rows * cols).map(|_| random.unit()).collect();
        let bytes: Vec<u8> = w.iter().flat_map(|x| x.to_le_bytes()).collect();
        let part = WeightPart::new(&bytes, SrcDtype::F32, rows);
        let weight = CpuWeight::pack(&run.exec, &[part], cols).unwrap();
        assert_eq!(weight.elements(), Elements::F32Tiles);
        let table = CpuWeight::pack_table(&run.exec, &[part], cols).unwrap();
        assert_eq!(table.elements(), Elements::F32);
        let mut found = vec![f32::NAN; cols];
        for (row, w) in w.chunks_exact(cols).enumerate() {
            weight.read_row(row, &mut found);
            for (found, w) in found.iter().zip(w) {
                let limit = w.abs() / f32::from(1u16 << 15) / 4.0;
                assert!((found - w).abs() <= limit, "[{rows}, {cols}], row {row}");
            }
        }
        // An infinite number makes all of the matrix one of f32, which keeps its bits.
        let infinite = f32::INFINITY.to_le_bytes();
        let bytes = [&bytes[..bytes.len() - 4], &infinite].concat();
        let part = WeightPart::new(&bytes, SrcDtype::F32, rows);
        let weight = CpuWeight::pack(&run.exec, &[part], cols).unwrap();
        assert_eq!(weight.elements(), Elements::F32);
        weight.read_row(rows - 1, &mut found);
        assert_eq!(found[cols - 1], f32::INFINITY);
    }
    let bytes = vec![0u8; 64 * 32 * 2];
    let part = WeightPart::new(&bytes, SrcDtype::BF16, 64);
    let table = CpuWeight::pack_table(&run.exec, &[part], 32).unwrap();
    assert_eq!(table.elements(), Elements::Bf16Tiles);
}

#[test]
fn panels_hold_float8() {
    let mut random = Random::new(6);
    for (rows, cols, block) in [(1, 16, [1, 16]), (33, 130, [1, 130]), (64, 384, [32, 128])] {
        let codes = random_words(&mut random, rows * cols);
        let count = rows.div_ceil(block[0]) * cols.div_ceil(block[1]);
        let scales: Vec<f32> = random.vec(count);
        let scale_bytes: Vec<u8> = scales.iter().flat_map(|x| x.to_le_bytes()).collect();
        let layer = Fp8Tensors {
            in_features: cols,
            out_features: rows,
            block,
            codes: &codes,
            scales: &scale_bytes,
            scale_dtype: SrcDtype::F32,
        };
        let number = |row: usize, k: usize| {
            // A code that is no number spoils the 128 that share its scale.
            let segment = &codes[row * cols..][k / 128 * 128..cols.min(k / 128 * 128 + 128)];
            if segment.iter().any(|code| code & 0x7f == 0x7f) {
                return f32::NAN;
            }
            let at = row / block[0] * cols.div_ceil(block[1]) + k / block[1];
            scales[at] * ferrum_quant::fp8_codec::e4m3_to_f32(codes[row * cols + k])
        };
        for run in runs() {
            let weight = fp8::pack(&run.exec, &[layer], cols).unwrap();
            rows_of(&weight, &number, &format!("FP8 [{rows}, {cols}], {run}"));
        }
    }
}
