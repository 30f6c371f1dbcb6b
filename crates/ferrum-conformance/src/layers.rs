//! Layers of `pack-quantized` and FP8 checkpoints, and projections fused of layers of several schemes.
//!
//! As in [`crate::marlin`], the suite packs what it made up, and multiplies with what that means.

use crate::case::{Cases, both, implementations, label};
use crate::compare::Tolerance;
use crate::data::{FileBytes, Rng};
use crate::io::{Check, Io, wrong};
use crate::marlin::{Kind, Layer};
use crate::naive;
use ferrum_kernels::{
    BackendQuantMarlin, Fp8Weights, GemmShape, GgufRows, PackQuantizedWeights, PackedZeros,
    QuantWeights,
};
use ferrum_quant::fp8_codec::e4m3_to_f32;
use ferrum_types::{GgufQuantType, SrcDtype};
use half::{bf16, f16};

/// What one part of a projection is.
#[derive(Clone, Copy)]
pub(crate) enum Scheme {
    Packed(PackedScheme),
    /// With a flag for one code that is NaN.
    Fp8 {
        block: [usize; 2],
        scales: SrcDtype,
        has_nan: bool,
    },
    Gptq(Kind),
    Floats,
}

/// Parameters of `pack-quantized`.
#[derive(Clone, Copy)]
pub(crate) struct PackedScheme {
    bits: u32,
    zeros: Zeros,
    group_size: usize,
    act_order: bool,
    scales: SrcDtype,
}

/// How zero points are written.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Zeros {
    None,
    Words,
    Bytes,
}

/// A part in its file.
enum Stored {
    Packed {
        scheme: PackedScheme,
        codes: FileBytes,
        scales: FileBytes,
        zeros: FileBytes,
        g_idx: Option<FileBytes>,
    },
    Fp8 {
        block: [usize; 2],
        codes: FileBytes,
        scales: FileBytes,
        dtype: SrcDtype,
    },
    Gptq(Layer),
    Floats(FileBytes),
}

pub(crate) struct Part {
    n: usize,
    k: usize,
    stored: Stored,
    /// `[n, k]`.
    pub(crate) values: Vec<f32>,
}

/// Scales that their type holds, and their bytes.
fn scales(rng: &mut Rng, count: usize, size: f32, dtype: SrcDtype) -> (Vec<f32>, FileBytes) {
    let value = |x: f32| match dtype {
        SrcDtype::F32 => x,
        SrcDtype::F16 => f16::from_f32(x).to_f32(),
        SrcDtype::BF16 => bf16::from_f32(x).to_f32(),
    };
    let values: Vec<f32> = (0..count)
        .map(|_| value((0.5 + rng.unit()) * size))
        .collect();
    let bytes = values.iter().flat_map(|&x| match dtype {
        SrcDtype::F32 => x.to_le_bytes().to_vec(),
        SrcDtype::F16 => f16::from_f32(x).to_le_bytes().to_vec(),
        SrcDtype::BF16 => bf16::from_f32(x).to_le_bytes().to_vec(),
    });
    let bytes = FileBytes::new(bytes.collect::<Vec<_>>());
    (values, bytes)
}

/// Numbers of `bits` bits into words, the lowest bits first; a last word may be part full.
fn pack(numbers: &[u32], bits: u32) -> Vec<u32> {
    let word = |numbers: &[u32]| {
        let shifts = (0..).step_by(bits as usize);
        numbers
            .iter()
            .zip(shifts)
            .fold(0, |word, (number, shift)| word | number << shift)
    };
    numbers.chunks(32 / bits as usize).map(word).collect()
}

fn bytes(words: impl IntoIterator<Item = u32>) -> FileBytes {
    FileBytes::new(words.into_iter().flat_map(u32::to_le_bytes))
}

fn packed(rng: &mut Rng, scheme: PackedScheme, n: usize, k: usize) -> (Stored, Vec<f32>) {
    let PackedScheme {
        bits,
        zeros: form,
        group_size,
        act_order,
        scales: dtype,
    } = scheme;
    let (groups, levels) = (k.div_ceil(group_size), 1usize << bits);
    let mut group_of: Vec<usize> = (0..k).map(|i| i / group_size).collect();
    if act_order {
        let order = rng.permutation(k);
        group_of = order.into_iter().map(|i| group_of[i]).collect();
    }
    let codes: Vec<u32> = (0..n * k).map(|_| rng.below(levels) as u32).collect();
    let middle = levels as u32 / 2;
    // [out, groups]
    let mut zeros = vec![middle; n * groups];
    if form != Zeros::None {
        zeros.fill_with(|| rng.below(levels) as u32);
    }
    let (scales, scale_bytes) = scales(rng, n * groups, 0.3 / levels as f32, dtype);
    let mut values = Vec::with_capacity(n * k);
    for o in 0..n {
        for i in 0..k {
            let at = o * groups + group_of[i];
            let steps = codes[o * k + i] as i32 - zeros[at] as i32;
            values.push(steps as f32 * scales[at]);
        }
    }
    let zero_bytes = match form {
        Zeros::None => FileBytes::new([]),
        Zeros::Bytes => FileBytes::new(zeros.iter().map(|zero| zero.wrapping_sub(middle) as u8)),
        Zeros::Words => {
            let column = |g: usize| -> Vec<u32> { (0..n).map(|o| zeros[o * groups + g]).collect() };
            let columns: Vec<_> = (0..groups).map(|g| pack(&column(g), bits)).collect();
            let words = n.div_ceil(32 / bits as usize);
            bytes((0..words).flat_map(|w| columns.iter().map(move |column| column[w])))
        }
    };
    let stored = Stored::Packed {
        scheme,
        codes: bytes(codes.chunks(k).flat_map(|row| pack(row, bits))),
        scales: scale_bytes,
        zeros: zero_bytes,
        g_idx: act_order.then(|| bytes(group_of.iter().map(|&group| group as u32))),
    };
    (stored, values)
}

impl Part {
    pub(crate) fn new(rng: &mut Rng, scheme: Scheme, n: usize, k: usize) -> Self {
        let (stored, values) = match scheme {
            Scheme::Packed(scheme) => packed(rng, scheme, n, k),
            Scheme::Fp8 {
                block,
                scales: dtype,
                has_nan,
            } => {
                // Every code but those of NaN.
                let code = |rng: &mut Rng| (rng.below(127) + 128 * rng.below(2)) as u8;
                let mut codes: Vec<u8> = (0..n * k).map(|_| code(rng)).collect();
                if has_nan {
                    codes[n / 2 * k + k / 3] = 0xff;
                }
                let across = k.div_ceil(block[1]);
                let (scales, scale_bytes) = scales(rng, n.div_ceil(block[0]) * across, 2e-3, dtype);
                let value = |at: usize| {
                    let scale = scales[at / k / block[0] * across + at % k / block[1]];
                    scale * e4m3_to_f32(codes[at])
                };
                let values = (0..n * k).map(value).collect();
                let stored = Stored::Fp8 {
                    block,
                    codes: FileBytes::new(codes.iter().copied()),
                    scales: scale_bytes,
                    dtype,
                };
                (stored, values)
            }
            Scheme::Gptq(kind) => {
                let layer = Layer::new(rng, kind, n, k, 32);
                let values = layer.values.clone();
                (Stored::Gptq(layer), values)
            }
            Scheme::Floats => {
                let values = rng.acts(n * k, 0.1);
                let stored = FileBytes::new(values.iter().flat_map(|x| x.to_le_bytes()));
                (Stored::Floats(stored), values)
            }
        };
        Part {
            n,
            k,
            stored,
            values,
        }
    }

    /// Another GPTQ layer of the same inputs, as [`Layer::beside`]; none of another scheme.
    pub(crate) fn beside(&self, rng: &mut Rng) -> Option<Self> {
        let Stored::Gptq(layer) = &self.stored else {
            return None;
        };
        let layer = layer.beside(rng);
        Some(Part {
            values: layer.values.clone(),
            stored: Stored::Gptq(layer),
            ..*self
        })
    }

    pub(crate) fn weights(&self) -> QuantWeights<'_> {
        match &self.stored {
            Stored::Packed {
                scheme,
                codes,
                scales,
                zeros,
                g_idx,
            } => QuantWeights::PackQuantized(PackQuantizedWeights {
                bits: scheme.bits,
                group_size: scheme.group_size,
                in_features: self.k,
                out_features: self.n,
                codes: codes.get(),
                scales: scales.get(),
                scale_dtype: scheme.scales,
                zeros: match scheme.zeros {
                    Zeros::None => PackedZeros::None,
                    Zeros::Words => PackedZeros::Words(zeros.get()),
                    Zeros::Bytes => PackedZeros::Bytes(zeros.get()),
                },
                g_idx: g_idx.as_ref().map(FileBytes::get),
            }),
            Stored::Fp8 {
                block,
                codes,
                scales,
                dtype,
            } => QuantWeights::Fp8(Fp8Weights {
                in_features: self.k,
                out_features: self.n,
                block: *block,
                codes: codes.get(),
                scales: scales.get(),
                scale_dtype: *dtype,
            }),
            Stored::Gptq(layer) => match layer.gptq() {
                Some(layer) => QuantWeights::Gptq(layer),
                None => QuantWeights::Awq(layer.awq()),
            },
            Stored::Floats(codes) => {
                QuantWeights::Gguf(GgufRows::new(codes.get(), GgufQuantType::F32, self.n))
            }
        }
    }
}

/// A projection and its input.
struct Fused {
    parts: Vec<Part>,
    rows: usize,
    k: usize,
    x: Vec<f32>,
}

impl Fused {
    fn n(&self) -> usize {
        self.parts.iter().map(|part| part.n).sum()
    }

    fn make(rng: &mut Rng, parts: &[(Scheme, usize)], rows: usize, k: usize) -> Self {
        Fused {
            parts: parts
                .iter()
                .map(|&(scheme, n)| Part::new(rng, scheme, n, k))
                .collect(),
            rows,
            k,
            x: rng.acts(rows * k, 1.0),
        }
    }
}

fn load<B: BackendQuantMarlin>(io: &Io<'_, B>, data: &Fused) -> Check<B::GptqWeight> {
    let parts: Vec<_> = data.parts.iter().map(Part::weights).collect();
    Ok(io.device.load_layers_fused(&parts, data.k)?)
}

fn gemm<B: BackendQuantMarlin>(io: &mut Io<'_, B>, data: &Fused) -> Check {
    spans(io, data, &[(0, data.rows)])
}

fn by_rows<B: BackendQuantMarlin>(io: &mut Io<'_, B>, data: &Fused) -> Check {
    spans(io, data, &[(0, 1), (1, 2), (3, 4), (7, data.rows - 7)])
}

/// The product of some `(first, count)` of the rows.
fn spans<B: BackendQuantMarlin>(
    io: &mut Io<'_, B>,
    data: &Fused,
    spans: &[(usize, usize)],
) -> Check {
    let weight = load(io, data)?;
    let (n, k) = (data.n(), data.k);
    for &(start, rows) in spans {
        let x = io.input("x", &data.x[start * k..][..rows * k])?;
        let mut out = io.output("out", rows * n)?;
        let shape = GemmShape { rows, n, k };
        B::gemm_gptq(&mut io.ctx, &x, &weight, &mut out, shape)?;
        io.take("out", &out, rows * n)?;
    }
    Ok(())
}

fn formula(data: &Fused) -> Vec<Vec<f64>> {
    let values: Vec<f32> = data.parts.iter().flat_map(|p| p.values.clone()).collect();
    vec![naive::gemm(&data.x, &values, data.rows, data.n(), data.k)]
}

/// Tensors of the wrong length, and parts of different widths.
fn wrong_layers<B: BackendQuantMarlin>(device: &B) -> Check {
    let mut rng = Rng::new("wrong layers", |x| x);
    let packed = Part::new(&mut rng, GROUPS, 32, 64);
    let float8 = Part::new(&mut rng, FLOAT8, 32, 64);
    let mut bad = Vec::new();
    if let QuantWeights::PackQuantized(good) = packed.weights() {
        bad.extend([
            PackQuantizedWeights {
                codes: &good.codes[4..],
                ..good
            },
            PackQuantizedWeights {
                scales: &good.scales[2..],
                ..good
            },
            PackQuantizedWeights { bits: 5, ..good },
            PackQuantizedWeights {
                group_size: 0,
                ..good
            },
            PackQuantizedWeights {
                g_idx: Some(&good.codes[..8]),
                ..good
            },
            PackQuantizedWeights {
                zeros: PackedZeros::Bytes(good.scales),
                ..good
            },
        ]);
    }
    let mut bad: Vec<_> = bad.into_iter().map(QuantWeights::PackQuantized).collect();
    if let QuantWeights::Fp8(good) = float8.weights() {
        let wrong = [
            Fp8Weights {
                codes: &good.codes[1..],
                ..good
            },
            Fp8Weights {
                scales: &good.scales[1..],
                ..good
            },
            Fp8Weights {
                block: [0, 64],
                ..good
            },
            Fp8Weights {
                block: [1, 0],
                ..good
            },
        ];
        bad.extend(wrong.map(QuantWeights::Fp8));
    }
    for (i, bad) in bad.into_iter().enumerate() {
        if device.load_layers_fused(&[bad], 64).is_ok() {
            return wrong(format!("wrong layers (number {i}) gave no error"));
        }
    }
    for good in [packed.weights(), float8.weights()] {
        if device.load_layers_fused(&[good], 32).is_ok() {
            return wrong("rows of another length gave no error");
        }
    }
    Ok(())
}

pub(crate) const GROUPS: Scheme = Scheme::Packed(PackedScheme {
    bits: 4,
    zeros: Zeros::Words,
    group_size: 32,
    act_order: false,
    scales: SrcDtype::BF16,
});
pub(crate) const FLOAT8: Scheme = Scheme::Fp8 {
    block: [1, usize::MAX],
    scales: SrcDtype::F32,
    has_nan: false,
};

/// Name in the report, name of the case, and scheme.
fn schemes() -> Vec<(&'static str, String, Scheme)> {
    let mut all = Vec::new();
    for (bits, dtype) in [(4, "packed4"), (8, "packed8")] {
        for (zeros, text) in [
            (Zeros::None, "symmetric"),
            (Zeros::Words, "zero points in words"),
            (Zeros::Bytes, "zero points in bytes"),
        ] {
            for (group_size, act_order, scales) in [
                (32, false, SrcDtype::BF16),
                (128, false, SrcDtype::F16),
                (64, true, SrcDtype::F16),
                (24, false, SrcDtype::F32),
            ] {
                let order = if act_order {
                    ", in activation order"
                } else {
                    ""
                };
                let name = format!("{text}, groups of {group_size}{order}, scales {scales}");
                let scheme = Scheme::Packed(PackedScheme {
                    bits,
                    zeros,
                    group_size,
                    act_order,
                    scales,
                });
                all.push((dtype, name, scheme));
            }
        }
    }
    for (block, scales) in [
        ([usize::MAX, usize::MAX], SrcDtype::F32),
        ([1, usize::MAX], SrcDtype::BF16),
        ([128, 128], SrcDtype::F32),
        ([16, 40], SrcDtype::F16),
    ] {
        let size = |n: usize| match n {
            usize::MAX => "all".to_owned(),
            n => n.to_string(),
        };
        let name = format!(
            "a {scales} scale for {} × {}",
            size(block[0]),
            size(block[1])
        );
        let scheme = |has_nan| Scheme::Fp8 {
            block,
            scales,
            has_nan,
        };
        all.push(("fp8", name.clone(), scheme(false)));
        if block[1] == 128 {
            all.push(("fp8", format!("{name}, a NaN"), scheme(true)));
        }
    }
    all
}

/// `(rows, n, k)`.
const SHAPES: &[(usize, usize, usize)] = &[
    (0, 32, 64),
    (1, 33, 32),
    (1, 100, 256),
    (3, 40, 384),
    (40, 70, 320),
];

/// Every case of these layers.
pub(crate) fn cases<B: BackendQuantMarlin>() -> Cases<B> {
    let (mut cases, op) = (Cases::new(), "gemm_gptq");
    for (dtype, text, scheme) in schemes() {
        for &(rows, n, k) in SHAPES {
            let name = format!("{text}, [{rows}, {k}] × [{n}, {k}]");
            let make = move |rng: &mut Rng| Fused::make(rng, &[(scheme, n)], rows, k);
            let case = label(op, dtype, Tolerance::QUANTIZED, name);
            cases.add(case, make, implementations!(gemm, formula));
        }
        let name = format!("{text}, rows alone and together");
        let many = move |rng: &mut Rng| Fused::make(rng, &[(scheme, 96)], 40, 256);
        cases.same((op, dtype, &name), many, gemm::<B>, by_rows::<B>);
        if let Scheme::Fp8 { .. } = scheme {
            // Enough rows that activations may become FP8, in tiles of 64 and of 128 rows.
            for (rows, n, k) in [(70, 70, 392), (300, 200, 264)] {
                let name = format!("{text}, [{rows}, {k}] × [{n}, {k}]");
                let make = move |rng: &mut Rng| Fused::make(rng, &[(scheme, n)], rows, k);
                let case = label(op, dtype, Tolerance::TWICE_ROUNDED, name);
                cases.add(case, make, implementations!(gemm, formula));
            }
            for (rows, n, k) in [(70, 40, 256), (340, 50, 768)] {
                let name = format!("{text}, {rows} rows alone and together");
                let many = move |rng: &mut Rng| Fused::make(rng, &[(scheme, n)], rows, k);
                cases.same((op, dtype, &name), many, gemm::<B>, by_rows::<B>);
            }
        }
    }
    let fused = [
        (GROUPS, 40),
        (FLOAT8, 33),
        (FLOAT8, 7),
        (Scheme::Floats, 5),
        (Scheme::Gptq(Kind::gptq(4)), 64),
        (Scheme::Gptq(Kind::gptq(4)), 32),
        (Scheme::Gptq(Kind::Awq), 32),
    ];
    for rows in [1, 2, 40] {
        let name = format!("{rows} rows times parts of several schemes");
        let make = move |rng: &mut Rng| Fused::make(rng, &fused, rows, 128);
        let case = label(op, "mixed", Tolerance::QUANTIZED, name);
        cases.add(case, make, implementations!(gemm, formula));
    }
    for (dtype, scheme) in [("packed4", GROUPS), ("fp8", FLOAT8)] {
        let few = move |rng: &mut Rng| Fused::make(rng, &[(scheme, 32)], 3, 64);
        cases.rejects_short_buffers((op, dtype), few, both!(gemm));
    }
    cases.check(
        ("load_layers_fused", "-", "tensors of the wrong size"),
        wrong_layers::<B>,
    );
    cases
}
