//! Products with weights that stay quantised, of every format, bit for bit at every level.

use super::*;
use ferrum_quant::gptq;
use ferrum_simd::gemm::Elements;
use ferrum_simd::moe::Matrices;
use ferrum_types::{GgufQuantType, SrcDtype};
use half::f16;

/// Rows of the largest product: more tiles than any level multiplies without decoding units first.
const ROWS: usize = 19;
/// Numbers of a row: more than the units that are decoded at once, in whole blocks of every type.
pub(super) const INPUTS: usize = 768;

/// A weight as its file has it.
enum Stored {
    Blocks(GgufQuantType, Vec<u8>),
    Groups {
        bits: u32,
        group_size: usize,
        qweight: Vec<u8>,
        qzeros: Vec<u8>,
        scales: Vec<u8>,
    },
    Float8 {
        block: [usize; 2],
        codes: Vec<u8>,
        scales: Vec<u8>,
    },
}

/// A weight and the rows it is multiplied with.
pub(super) struct Case {
    pub(super) name: String,
    /// Features: several panels, which one row takes side by side, and more.
    n: usize,
    stored: Stored,
    x: Vec<f32>,
}

fn scales(random: &mut Random, count: usize) -> Vec<u8> {
    let scale = |_| f16::from_f32(0.01 * (random.unit() + 1.5)).to_le_bytes();
    (0..count).flat_map(scale).collect()
}

impl Case {
    fn new(name: String, n: usize, stored: Stored) -> Self {
        let mut x = Random::new(77).vec(ROWS * INPUTS);
        // Codes of 127 and -127 alone, whose sums are the largest, and none.
        x[..INPUTS].fill(1.0);
        x[INPUTS..2 * INPUTS].fill(-0.5);
        x[2 * INPUTS..3 * INPUTS].fill(0.0);
        Self { name, n, stored, x }
    }

    /// Random bytes, except for blocks that would hold what is hardly a number: codes and scales occur
    /// that no quantiser would choose together.
    pub(super) fn blocks(ty: GgufQuantType) -> Self {
        let (mut random, n) = (Random::new(ty as u64 + 1), 101);
        let (len, mut values) = (ty.block_bytes(), vec![0.0; ty.block_len()]);
        let mut bytes = Vec::new();
        while bytes.len() < n * INPUTS / ty.block_len() * len {
            let block: Vec<u8> = (0..len).map(|_| random.next() as u8).collect();
            ferrum_quant::dequantize(ty, &block, &mut values).unwrap();
            if values.iter().all(|x| x.abs() < 1e9) {
                bytes.extend(block);
            }
        }
        Self::new(ty.to_string(), n, Stored::Blocks(ty, bytes))
    }

    /// Codes of `bits` in groups; zero points that are all in the middle need no minimums.
    pub(super) fn groups(bits: u32, group_size: usize, middle: bool) -> Self {
        let (mut random, n, groups) = (Random::new(bits.into()), 128, INPUTS / group_size);
        let mut code = |_| random.below(1 << bits) as u8;
        let codes: Vec<u8> = (0..n * INPUTS).map(&mut code).collect();
        let mut zeros: Vec<u8> = (0..n * groups).map(&mut code).collect();
        if middle {
            zeros.fill(1 << (bits - 1));
        }
        let stored = Stored::Groups {
            bits,
            group_size,
            qweight: gptq::pack_codes(bits, &codes, INPUTS, n).unwrap(),
            qzeros: gptq::pack_zeros(bits, GptqZeroPoints::AsIs, &zeros, n).unwrap(),
            scales: scales(&mut random, n * groups),
        };
        let name = format!("{bits} bits, groups of {group_size}, middle {middle}");
        Self::new(name, n, stored)
    }

    pub(super) fn float8(block: [usize; 2]) -> Self {
        let (mut random, n) = (Random::new(8), 101);
        // Every code but those of NaN.
        let code = |_| (random.next() as u8 & 0x80) | random.below(0x7f) as u8;
        let codes = (0..n * INPUTS).map(code).collect();
        let count = n.div_ceil(block[0]) * INPUTS.div_ceil(block[1]);
        let stored = Stored::Float8 {
            block,
            codes,
            scales: scales(&mut random, count),
        };
        Self::new(format!("FP8 in blocks of {block:?}"), n, stored)
    }

    pub(super) fn weights(&self) -> QuantWeights<'_> {
        match &self.stored {
            Stored::Blocks(ty, bytes) => QuantWeights::Gguf(GgufRows::new(bytes, *ty, self.n)),
            Stored::Groups {
                bits,
                group_size,
                qweight,
                qzeros,
                scales,
            } => QuantWeights::Gptq(GptqWeights {
                bits: *bits,
                group_size: *group_size,
                zero_points: GptqZeroPoints::AsIs,
                in_features: INPUTS,
                out_features: self.n,
                qweight,
                qzeros,
                scales,
                g_idx: None,
            }),
            Stored::Float8 {
                block,
                codes,
                scales,
            } => QuantWeights::Fp8(Fp8Weights {
                in_features: INPUTS,
                out_features: self.n,
                block: *block,
                codes,
                scales,
                scale_dtype: SrcDtype::F16,
            }),
        }
    }

    /// The product of rows `first..first + rows`.
    pub(super) fn product<B: BackendQuantMarlin>(
        &self,
        device: &B,
        weight: &B::GptqWeight,
        (first, rows): (usize, usize),
    ) -> Vec<f32> {
        let mut ctx = device.new_context().unwrap();
        let x = act(device, &self.x[first * INPUTS..][..rows * INPUTS]);
        let mut out = poison(device, rows * self.n);
        let shape = GemmShape {
            rows,
            n: self.n,
            k: INPUTS,
        };
        B::gemm_gptq(&mut ctx, &x, weight, &mut out, shape).unwrap();
        host::<B, _>(&mut ctx, &out)
    }

    /// Close to the reference, all rows and some, at every level.
    fn check(&self) {
        let load = |device: &CpuBackend| device.load_layers_fused(&[self.weights()], INPUTS);
        let reference = ReferenceBackend::new();
        let weight = reference.load_layers_fused(&[self.weights()], INPUTS);
        let expected = self.product(&reference, &weight.unwrap(), (0, ROWS));
        let mut base: Option<Vec<f32>> = None;
        for device in devices() {
            let weight = load(&device).unwrap();
            let all = self.product(&device, &weight, (0, ROWS));
            let error = nmse(&all, &expected);
            assert!(error < 1e-3, "{}, {device:?}: {error:e}", self.name);
            let base = base.get_or_insert(all);
            for (first, rows) in [
                (0, ROWS),
                (0, 1),
                (18, 1),
                (4, 2),
                (1, 3),
                (7, 5),
                (2, 8),
                (3, 16),
            ] {
                let found = self.product(&device, &weight, (first, rows));
                let same = bits(&found) == bits(&base[first * self.n..][..rows * self.n]);
                assert!(same, "{}, {device:?}: rows {first}+{rows}", self.name);
            }
        }
    }
}

#[test]
fn blocks_of_every_type() {
    for ty in GgufQuantType::all().filter(|ty| CpuBackend::is_native(*ty)) {
        Case::blocks(ty).check();
    }
}

#[test]
fn groups_of_every_width() {
    for bits in [2, 3, 4, 8] {
        for group_size in [32, 128] {
            for middle in [false, true] {
                let case = Case::groups(bits, group_size, middle);
                assert!(CpuBackend::is_native_layer(&case.weights()));
                case.check();
            }
        }
    }
}

#[test]
fn float8_in_blocks_of_every_kind() {
    for block in [[128, 128], [1, INPUTS], [101, INPUTS]] {
        let case = Case::float8(block);
        assert!(CpuBackend::is_native_layer(&case.weights()));
        case.check();
    }
}

#[test]
fn float8_that_is_no_number_spoils_its_feature_alone() {
    let mut case = Case::float8([1, INPUTS]);
    if let Stored::Float8 { codes, .. } = &mut case.stored {
        codes[3 * INPUTS + 130] = 0x7f;
        codes[40 * INPUTS + 5] = 0xff;
    }
    for device in devices() {
        let weight = device.load_layers_fused(&[case.weights()], INPUTS).unwrap();
        for rows in [1, ROWS] {
            let found = case.product(&device, &weight, (0, rows));
            for (at, x) in found.iter().enumerate() {
                let spoiled = [3, 40].contains(&(at % case.n));
                assert_eq!(
                    x.is_nan(),
                    spoiled,
                    "{device:?}: {at} of {rows} rows is {x}"
                );
            }
        }
    }
}

#[test]
fn float8_with_scales_past_all_numbers_is_refused() {
    let device = CpuBackend::open(0).unwrap();
    let load = |scale: f32| {
        let layer = Fp8Weights {
            in_features: 2,
            out_features: 1,
            block: [1, 2],
            codes: &[0x38, 0x40],
            scales: &scale.to_le_bytes(),
            scale_dtype: SrcDtype::F32,
        };
        let loaded = device.load_layers_fused(&[QuantWeights::Fp8(layer)], 2);
        loaded.map(|_| ()).map_err(|error| error.to_string())
    };
    assert_eq!(load(1.3e36), Ok(()));
    let error = load(1.4e36).unwrap_err();
    assert!(error.contains("a scale is 14"), "{error}");
}

#[test]
fn experts_of_float8_stay_bytes() {
    let device = CpuBackend::open(0).unwrap();
    let (float8, groups) = (Case::float8([128, 128]), Case::groups(4, 32, false));
    let forms = |experts: &[QuantWeights<'_>]| {
        let stack = device.load_layer_experts(experts, INPUTS).unwrap();
        match stack.matrices() {
            Matrices::Dense(matrices) => matrices
                .iter()
                .map(|m| Some(m.elements()))
                .collect::<Vec<_>>(),
            Matrices::Packed(matrices) => vec![None; matrices.len()],
        }
    };
    let (bytes, integers) = (float8.weights(), groups.weights());
    assert_eq!(forms(&[bytes, bytes]), [Some(Elements::E4m3); 2]);
    assert_eq!(forms(&[integers, integers]), [None; 2]);
    // A stack has one form, so both become f32.
    let mut wide = float8;
    wide.n = groups.n;
    if let Stored::Float8 { codes, .. } = &mut wide.stored {
        codes.resize(groups.n * INPUTS, 0x38);
    }
    let found = forms(&[wide.weights(), integers]);
    assert_eq!(found, [Some(Elements::F32); 2]);
}
