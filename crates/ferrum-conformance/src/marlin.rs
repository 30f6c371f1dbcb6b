//! GPTQ and AWQ layers.
//!
//! The expectation never unpacks anything: the suite makes up codes, zero points and scales, packs
//! them itself, and multiplies with `(code - zero) · scale`.

use crate::case::{Cases, both, implementations, label};
use crate::compare::Tolerance;
use crate::data::{FileBytes, Rng};
use crate::io::{Check, Io, wrong};
use crate::naive;
use ferrum_kernels::{
    Activation, AwqWeights, BackendQuantMarlin, GemmShape, GptqWeights, GptqZeroPoints,
};
use half::f16;

/// A quantised layer before it is packed.
pub(crate) struct Layer {
    n: usize,
    k: usize,
    kind: Kind,
    group_size: usize,
    qweight: FileBytes,
    qzeros: FileBytes,
    scales: FileBytes,
    g_idx: Option<FileBytes>,
    /// `[k]`.
    group_of: Vec<usize>,
    /// `[n, k]`: what all of it means.
    pub(crate) values: Vec<f32>,
}

/// Which scheme, with what is particular to it.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Kind {
    Gptq {
        bits: u32,
        zero_points: GptqZeroPoints,
        act_order: bool,
    },
    Awq,
}

impl Kind {
    pub(crate) const fn gptq(bits: u32) -> Self {
        Kind::Gptq {
            bits,
            zero_points: GptqZeroPoints::MinusOne,
            act_order: false,
        }
    }

    fn is_ordered(self) -> bool {
        matches!(
            self,
            Kind::Gptq {
                act_order: true,
                ..
            }
        )
    }

    fn bits(self) -> u32 {
        match self {
            Kind::Gptq { bits, .. } => bits,
            Kind::Awq => 4,
        }
    }

    /// Name in the report.
    pub(crate) fn dtype(self) -> &'static str {
        match self {
            Kind::Gptq { bits: 2, .. } => "gptq2",
            Kind::Gptq { bits: 3, .. } => "gptq3",
            Kind::Gptq { bits: 4, .. } => "gptq4",
            Kind::Gptq { .. } => "gptq8",
            Kind::Awq => "awq4",
        }
    }
}

/// Packs numbers of `bits` bits one after the other, the lowest bit first, into 32-bit words.
fn pack(numbers: impl Iterator<Item = u32>, bits: u32) -> Vec<u32> {
    let mut words = Vec::new();
    let (mut buffer, mut filled) = (0u64, 0);
    for number in numbers {
        buffer |= u64::from(number) << filled;
        filled += bits;
        if filled >= 32 {
            words.push(buffer as u32);
            buffer >>= 32;
            filled -= 32;
        }
    }
    words
}

/// Columns of a word of AWQ, the lowest nibble first.
const AWQ_COLUMNS: [usize; 8] = [0, 2, 4, 6, 1, 3, 5, 7];

fn pack_awq_row(row: &[u32]) -> Vec<u32> {
    let ordered = row
        .chunks(8)
        .flat_map(|word| AWQ_COLUMNS.map(|column| word[column]));
    pack(ordered, 4)
}

fn words(words: impl IntoIterator<Item = u32>) -> FileBytes {
    FileBytes::new(words.into_iter().flat_map(u32::to_le_bytes))
}

impl Layer {
    pub(crate) fn new(rng: &mut Rng, kind: Kind, n: usize, k: usize, group_size: usize) -> Self {
        let mut group_of: Vec<usize> = (0..k).map(|i| i / group_size).collect();
        if kind.is_ordered() {
            group_of = rng
                .permutation(k)
                .into_iter()
                .map(|i| group_of[i])
                .collect();
        }
        Self::of_groups(rng, kind, (n, k), (group_size, group_of))
    }

    /// Another layer of the same inputs, which are in the same groups: gate and up are two.
    pub(crate) fn beside(&self, rng: &mut Rng) -> Self {
        let groups = (self.group_size, self.group_of.clone());
        Self::of_groups(rng, self.kind, (self.n, self.k), groups)
    }

    fn of_groups(
        rng: &mut Rng,
        kind: Kind,
        (n, k): (usize, usize),
        (group_size, group_of): (usize, Vec<usize>),
    ) -> Self {
        let groups = k.div_ceil(group_size);
        let levels = 1usize << kind.bits();
        let codes: Vec<u32> = (0..n * k).map(|_| rng.below(levels) as u32).collect();
        // A stored zero point of -1 is a matter of its own, so none of these is 0.
        let zeros: Vec<u32> = (0..groups * n)
            .map(|_| 1 + rng.below(levels - 1) as u32)
            .collect();
        let scales: Vec<f16> = (0..groups * n)
            .map(|_| f16::from_f32((0.5 + rng.unit()) * 0.3 / levels as f32))
            .collect();

        let mut values = Vec::with_capacity(n * k);
        for o in 0..n {
            for i in 0..k {
                let at = group_of[i] * n + o;
                let steps = codes[o * k + i] as i32 - zeros[at] as i32;
                values.push(steps as f32 * scales[at].to_f32());
            }
        }
        let (qweight, qzeros) = match kind {
            Kind::Gptq { .. } => (
                pack_gptq_codes(&codes, kind.bits(), n, k),
                pack_zeros(&zeros, kind, n),
            ),
            Kind::Awq => {
                let column = |i: usize| (0..n).map(|o| codes[o * k + i]).collect::<Vec<_>>();
                let qweight = (0..k).flat_map(|i| pack_awq_row(&column(i)));
                let qzeros = zeros.chunks(n).flat_map(pack_awq_row);
                (words(qweight), words(qzeros))
            }
        };
        let g_idx = kind
            .is_ordered()
            .then(|| words(group_of.iter().map(|&group| group as u32)));
        let scales = FileBytes::new(scales.into_iter().flat_map(f16::to_le_bytes));
        Layer {
            n,
            k,
            kind,
            group_size,
            qweight,
            qzeros,
            scales,
            g_idx,
            group_of,
            values,
        }
    }

    pub(crate) fn gptq(&self) -> Option<GptqWeights<'_>> {
        let Kind::Gptq {
            bits, zero_points, ..
        } = self.kind
        else {
            return None;
        };
        Some(GptqWeights {
            bits,
            group_size: self.group_size,
            zero_points,
            in_features: self.k,
            out_features: self.n,
            qweight: self.qweight.get(),
            qzeros: self.qzeros.get(),
            scales: self.scales.get(),
            g_idx: self.g_idx.as_ref().map(FileBytes::get),
        })
    }

    pub(crate) fn awq(&self) -> AwqWeights<'_> {
        AwqWeights {
            group_size: self.group_size,
            in_features: self.k,
            out_features: self.n,
            qweight: self.qweight.get(),
            qzeros: self.qzeros.get(),
            scales: self.scales.get(),
        }
    }
}

/// Codes `[n, k]` → words `[k·bits/32, n]`: each column is a stream of bits.
fn pack_gptq_codes(codes: &[u32], bits: u32, n: usize, k: usize) -> FileBytes {
    let columns: Vec<Vec<u32>> = codes
        .chunks(k)
        .map(|row| pack(row.iter().copied(), bits))
        .collect();
    let rows = k * bits as usize / 32;
    words(
        (0..rows)
            .flat_map(|row| (0..n).map(move |o| (row, o)))
            .map(|(row, o)| columns[o][row]),
    )
}

/// Zero points `[groups, n]` → words `[groups, n·bits/32]`: each row is a stream of bits.
fn pack_zeros(zeros: &[u32], kind: Kind, n: usize) -> FileBytes {
    let less = match kind {
        Kind::Gptq {
            zero_points: GptqZeroPoints::MinusOne,
            ..
        } => 1,
        _ => 0,
    };
    let row = |row: &[u32]| pack(row.iter().map(|zero| zero - less), kind.bits());
    words(zeros.chunks(n).flat_map(row))
}

struct Gptq {
    layer: Layer,
    rows: usize,
    x: Vec<f32>,
}

impl Gptq {
    fn shape(&self) -> GemmShape {
        GemmShape {
            rows: self.rows,
            n: self.layer.n,
            k: self.layer.k,
        }
    }
}

fn load<B: BackendQuantMarlin>(io: &Io<'_, B>, layer: &Layer) -> Check<B::GptqWeight> {
    Ok(match layer.gptq() {
        Some(weights) => io.device.load_gptq(&weights)?,
        None => io.device.load_awq(&layer.awq())?,
    })
}

fn gemm_gptq<B: BackendQuantMarlin>(io: &mut Io<'_, B>, data: &Gptq) -> Check {
    let weight = load(io, &data.layer)?;
    let (shape, size) = (data.shape(), data.rows * data.layer.n);
    let x = io.input("x", &data.x)?;
    let mut out = io.output("out", size)?;
    B::gemm_gptq(&mut io.ctx, &x, &weight, &mut out, shape)?;
    io.take("out", &out, size)
}

fn formula(data: &Gptq) -> Vec<Vec<f64>> {
    let GemmShape { rows, n, k } = data.shape();
    vec![naive::gemm(&data.x, &data.layer.values, rows, n, k)]
}

fn by_rows<B: BackendQuantMarlin>(io: &mut Io<'_, B>, data: &Gptq) -> Check {
    let GemmShape { rows, n, k } = data.shape();
    let weight = load(io, &data.layer)?;
    for (start, len) in [(0, 1), (1, 1), (2, 2), (4, 3), (7, rows - 7)] {
        let x = io.input("x", &data.x[start * k..][..len * k])?;
        let mut out = io.output("out", len * n)?;
        B::gemm_gptq(
            &mut io.ctx,
            &x,
            &weight,
            &mut out,
            GemmShape { rows: len, n, k },
        )?;
        io.take("out", &out, len * n)?;
    }
    Ok(())
}

fn make(
    rng: &mut Rng,
    kind: Kind,
    (rows, n, k, group_size): (usize, usize, usize, usize),
    scale: f32,
) -> Gptq {
    Gptq {
        layer: Layer::new(rng, kind, n, k, group_size),
        rows,
        x: rng.acts(rows * k, scale),
    }
}

/// `(rows, n, k, group_size)`.
const SHAPES: &[(usize, usize, usize, usize)] = &[
    (0, 32, 64, 32),
    (1, 32, 32, 32),
    (1, 96, 256, 128),
    (2, 64, 96, 32),
    (5, 160, 128, 64),
    (17, 32, 320, 64),
    (33, 64, 192, 192),
    (70, 256, 512, 128),
    (257, 64, 96, 32),
    (1, 512, 1024, 128),
];

/// Tensors of the wrong length.
fn wrong_bytes<B: BackendQuantMarlin>(device: &B) -> Check {
    let mut rng = Rng::new("wrong bytes", |x| x);
    let gptq = Layer::new(&mut rng, Kind::gptq(4), 32, 64, 32);
    let awq = Layer::new(&mut rng, Kind::Awq, 32, 64, 32);
    let short = |bytes: &'static [u8]| bytes;
    let empty = short(&[]);
    if let Some(good) = gptq.gptq() {
        let bad = [
            GptqWeights {
                qweight: &good.qweight[4..],
                ..good
            },
            GptqWeights {
                qzeros: &good.qzeros[1..],
                ..good
            },
            GptqWeights {
                scales: empty,
                ..good
            },
            GptqWeights {
                g_idx: Some(&good.qweight[..4]),
                ..good
            },
            GptqWeights { bits: 5, ..good },
            GptqWeights {
                group_size: 0,
                ..good
            },
        ];
        for (i, bad) in bad.iter().enumerate() {
            if device.load_gptq(bad).is_ok() {
                return wrong(format!("wrong gptq tensors (number {i}) gave no error"));
            }
        }
    }
    let good = awq.awq();
    let bad = [
        AwqWeights {
            qweight: &good.qweight[4..],
            ..good
        },
        AwqWeights {
            qzeros: &good.qzeros[1..],
            ..good
        },
        AwqWeights {
            scales: empty,
            ..good
        },
        AwqWeights {
            group_size: 0,
            ..good
        },
        AwqWeights {
            out_features: 31,
            ..good
        },
    ];
    for (i, bad) in bad.iter().enumerate() {
        if device.load_awq(bad).is_ok() {
            return wrong(format!("wrong awq tensors (number {i}) gave no error"));
        }
    }
    Ok(())
}

/// Every case of [`BackendQuantMarlin`].
pub(crate) fn cases<B: BackendQuantMarlin>() -> Cases<B> {
    let mut cases = Cases::new();
    for bits in [2, 3, 4, 8] {
        for zero_points in [GptqZeroPoints::MinusOne, GptqZeroPoints::AsIs] {
            for act_order in [false, true] {
                let order = if act_order {
                    ", in activation order"
                } else {
                    ""
                };
                let kind = Kind::Gptq {
                    bits,
                    zero_points,
                    act_order,
                };
                let text = match zero_points {
                    GptqZeroPoints::MinusOne => format!("v1{order}"),
                    GptqZeroPoints::AsIs => format!("v2{order}"),
                };
                kind_cases(&mut cases, kind, &text);
            }
        }
    }
    kind_cases(&mut cases, Kind::Awq, "gemm layout");
    for kind in [2, 3, 4, 8].map(Kind::gptq).into_iter().chain([Kind::Awq]) {
        let few = move |rng: &mut Rng| make(rng, kind, (3, 32, 64, 32), 1.0);
        cases.rejects_short_buffers(("gemm_gptq", kind.dtype()), few, both!(gemm_gptq));
    }
    cases.check(
        ("load_gptq", "-", "tensors of the wrong size"),
        wrong_bytes::<B>,
    );
    cases
}

fn gemm_gptq_gated<B: BackendQuantMarlin>(io: &mut Io<'_, B>, data: &Gptq) -> Check {
    let weight = load(io, &data.layer)?;
    let shape = data.shape();
    let (size, x) = (shape.rows * shape.n, io.input("x", &data.x)?);
    let mut room = io.device.alloc(size)?;
    let mut out = io.output("out", size / 2)?;
    let to = (&mut room, &mut out);
    B::gemm_gptq_gated(&mut io.ctx, &x, &weight, Activation::Silu, to, shape)?;
    io.take("out", &out, size / 2)
}

fn gated_formula(data: &Gptq) -> Vec<Vec<f64>> {
    let sums = formula(data);
    vec![naive::gated(Activation::Silu, &sums[0], data.shape().n)]
}

fn kind_cases<B: BackendQuantMarlin>(cases: &mut Cases<B>, kind: Kind, text: &str) {
    for dims in [(1, 32, 128, 32), (3, 96, 256, 128), (9, 64, 96, 32)] {
        let (rows, n, k, group) = dims;
        let name = format!("{text}, [{rows}, {k}] × [{n}, {k}], groups of {group}");
        let tolerance = Tolerance::QUANTIZED.of_product();
        let case = label("gemm_gptq_gated", kind.dtype(), tolerance, name);
        let make = move |rng: &mut Rng| make(rng, kind, dims, 1.0);
        cases.add(case, make, implementations!(gemm_gptq_gated, gated_formula));
    }
    let op = "gemm_gptq";
    let case = |name: String| label(op, kind.dtype(), Tolerance::QUANTIZED, name);
    for &dims in SHAPES {
        let (rows, n, k, group) = dims;
        let name = format!("{text}, [{rows}, {k}] × [{n}, {k}], groups of {group}");
        let make = move |rng: &mut Rng| make(rng, kind, dims, 1.0);
        cases.add(case(name), make, implementations!(gemm_gptq, formula));
    }
    for (name, scale) in [("large values", 1e4), ("tiny values", 1e-6), ("zeros", 0.0)] {
        let make = move |rng: &mut Rng| make(rng, kind, (3, 32, 96, 32), scale);
        cases.add(
            case(format!("{text}, {name}")),
            make,
            implementations!(gemm_gptq, formula),
        );
    }
    let many = move |rng: &mut Rng| make(rng, kind, (40, 32, 128, 32), 1.0);
    let name = format!("{text}, rows alone and together");
    cases.same(
        (op, kind.dtype(), &name),
        many,
        gemm_gptq::<B>,
        by_rows::<B>,
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packing_is_that_of_the_formats() {
        // 32 codes of 3 bits fill three words, and some codes lie in two.
        let words = pack((0..32).map(|i| i % 8), 3);
        assert_eq!(words.len(), 3);
        assert_eq!(words[0] & 0x3f, 0b001_000);
        assert_eq!((words[0] >> 30) | (words[1] & 1) << 2, 10 % 8);
        assert_eq!(pack_awq_row(&[0, 1, 2, 3, 4, 5, 6, 7]), [0x7531_6420]);
    }
}
