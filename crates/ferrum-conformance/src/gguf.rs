//! ggml block formats: products and look-ups for every type, and projections of several types.
//!
//! Blocks are random bytes with scales of a sensible size, so that every code and every sub-scale of
//! a format occurs, not only those that a quantiser would choose. What the bytes mean is asked of
//! `ferrum-quant`, which is tested against the `gguf` Python package.

use crate::case::{Cases, both, implementations, label};
use crate::compare::Tolerance;
use crate::core::GATES;
use crate::data::{FileBytes, Rng};
use crate::io::{CaseError, Check, Io, wrong};
use crate::naive;
use ferrum_kernels::{Activation, BackendQuantGguf, GemmShape, GgufRows, MatShape, RowShape};
use ferrum_quant::dequantize;
use ferrum_types::{Error, GgufQuantType as T};
use half::f16;

/// The types that weights come in: everything but plain integers and doubles.
pub(crate) fn types() -> impl Iterator<Item = T> {
    T::all().filter(|ty| ty.is_quantized() || matches!(ty, T::F32 | T::F16 | T::BF16))
}

/// Where the f16 scales (and minimums) of a block lie.
fn scale_offsets(ty: T) -> &'static [usize] {
    match ty {
        T::Q4_1 | T::Q5_1 | T::Q8_1 | T::Q4_K | T::Q5_K => &[0, 2],
        T::Q2_K => &[80, 82],
        T::Q3_K => &[108],
        T::Q6_K => &[208],
        T::TQ1_0 => &[52],
        T::TQ2_0 => &[64],
        // These have scales of other kinds.
        T::IQ1_M | T::Q8_K | T::MXFP4 | T::NVFP4 | T::F32 | T::F16 | T::BF16 => &[],
        _ => &[0],
    }
}

/// Writes scales of about `scale`; `factor` gives each its own number around 1.
fn set_scales(ty: T, block: &mut [u8], scale: f32, mut factor: impl FnMut() -> f32) {
    let mut half = || f16::from_f32(scale * factor());
    for &offset in scale_offsets(ty) {
        block[offset..offset + 2].copy_from_slice(&half().to_le_bytes());
    }
    match ty {
        T::IQ1_M => {
            // The upper nibbles of four words are the digits of one f16, the lowest first.
            let bits = half().to_bits();
            for (digit, word) in block[48..56].chunks_mut(2).enumerate() {
                word[1] = (word[1] & 0x0f) | (((bits >> (4 * digit)) & 0x0f) << 4) as u8;
            }
        }
        T::Q8_K => block[..4].copy_from_slice(&half().to_f32().to_le_bytes()),
        _ => {}
    }
}

/// A block of random codes whose values are about 0.1.
fn block(rng: &mut Rng, ty: T, scale: f32) -> Vec<u8> {
    let mut block = rng.bytes(ty.block_bytes());
    match ty {
        // 2^-10 to 2^-3, halved twice by the two points of an E2M1 code.
        T::MXFP4 => block[0] = 117 + rng.below(8) as u8,
        // E4M3 of about 2^-4, without a sign.
        T::NVFP4 => block[..4]
            .iter_mut()
            .for_each(|d| *d = 0x10 + rng.below(16) as u8),
        T::F32 => block.copy_from_slice(&rng.floats(1, 0.1)[0].to_le_bytes()),
        T::F16 => block.copy_from_slice(&f16::from_f32(rng.floats(1, 0.1)[0]).to_le_bytes()),
        T::BF16 => block.copy_from_slice(&rng.floats(1, 0.1)[0].to_le_bytes()[2..]),
        _ => set_scales(ty, &mut block, scale, || 0.5 + rng.unit()),
    }
    block
}

/// The scale at which a random block of this type has values of about 0.1.
fn usual_scale(rng: &mut Rng, ty: T) -> f32 {
    let mut block = rng.bytes(ty.block_bytes());
    set_scales(ty, &mut block, 1.0, || 1.0);
    let values = decode(ty, &block);
    let power: f32 = values.iter().map(|x| x * x).sum::<f32>() / values.len() as f32;
    if power > 0.0 { 0.1 / power.sqrt() } else { 0.1 }
}

/// Rows of `blocks` blocks.
pub(crate) fn random_rows(rng: &mut Rng, ty: T, rows: usize, blocks: usize) -> FileBytes {
    let scale = usual_scale(rng, ty);
    FileBytes::new((0..rows * blocks).flat_map(|_| block(rng, ty, scale)))
}

/// The numbers of whole blocks; none when `ferrum-quant` refuses them, which fails every comparison.
pub(crate) fn decode(ty: T, bytes: &[u8]) -> Vec<f32> {
    let mut values = vec![0.0; bytes.len() / ty.block_bytes() * ty.block_len()];
    match dequantize(ty, bytes, &mut values) {
        Ok(()) => values,
        Err(_) => Vec::new(),
    }
}

struct Part {
    ty: T,
    rows: usize,
    bytes: FileBytes,
}

struct Gguf {
    shape: GemmShape,
    x: Vec<f32>,
    parts: Vec<Part>,
    ids: Vec<i32>,
}

impl Gguf {
    fn weights(&self) -> Vec<f32> {
        self.parts
            .iter()
            .flat_map(|part| decode(part.ty, part.bytes.get()))
            .collect()
    }
}

fn load<B: BackendQuantGguf>(io: &Io<'_, B>, data: &Gguf) -> Check<B::GgufWeight> {
    fn part(Part { ty, rows, bytes }: &Part) -> GgufRows<'_> {
        GgufRows::new(bytes.get(), *ty, *rows)
    }
    let cols = data.shape.k;
    Ok(match &data.parts[..] {
        [one] => {
            let shape = MatShape {
                rows: one.rows,
                cols,
            };
            io.device.load_quant(one.bytes.get(), one.ty, shape)?
        }
        parts => {
            let parts: Vec<_> = parts.iter().map(part).collect();
            io.device.load_quant_fused(&parts, cols)?
        }
    })
}

/// [`load`] from files in which other blocks lie between the rows.
fn load_strided<B: BackendQuantGguf>(io: &Io<'_, B>, data: &Gguf) -> Check<B::GgufWeight> {
    let cols = data.shape.k;
    let spread = |part: &Part| {
        let row_bytes = cols / part.ty.block_len() * part.ty.block_bytes();
        part.bytes.spread(row_bytes, 2 * part.ty.block_bytes())
    };
    let files: Vec<_> = data.parts.iter().map(spread).collect();
    let parts = data.parts.iter().zip(&files);
    let parts = parts.map(|(part, (bytes, stride))| GgufRows {
        row_stride: Some(*stride),
        ..GgufRows::new(bytes.get(), part.ty, part.rows)
    });
    let parts: Vec<_> = parts.collect();
    Ok(io.device.load_quant_fused(&parts, cols)?)
}

fn gemm_quant<B: BackendQuantGguf>(io: &mut Io<'_, B>, data: &Gguf) -> Check {
    let weight = load(io, data)?;
    product(io, data, &weight)
}

fn gemm_strided<B: BackendQuantGguf>(io: &mut Io<'_, B>, data: &Gguf) -> Check {
    let weight = load_strided(io, data)?;
    product(io, data, &weight)
}

fn product<B: BackendQuantGguf>(io: &mut Io<'_, B>, data: &Gguf, weight: &B::GgufWeight) -> Check {
    let size = data.shape.rows * data.shape.n;
    let x = io.input("x", &data.x)?;
    let mut out = io.output("out", size)?;
    B::gemm_quant(&mut io.ctx, &x, weight, &mut out, data.shape)?;
    io.take("out", &out, size)
}

fn gemm_formula(data: &Gguf) -> Vec<Vec<f64>> {
    let GemmShape { rows, n, k } = data.shape;
    vec![naive::gemm(&data.x, &data.weights(), rows, n, k)]
}

/// The rows of [`gemm_quant`] in ones, twos and more.
fn gemm_by_rows<B: BackendQuantGguf>(io: &mut Io<'_, B>, data: &Gguf) -> Check {
    let GemmShape { rows, n, k } = data.shape;
    let weight = load(io, data)?;
    for (start, len) in [(0, 1), (1, 1), (2, 2), (4, 3), (7, rows - 7)] {
        let x = io.input("x", &data.x[start * k..][..len * k])?;
        let mut out = io.output("out", len * n)?;
        let shape = GemmShape { rows: len, n, k };
        B::gemm_quant(&mut io.ctx, &x, &weight, &mut out, shape)?;
        io.take("out", &out, len * n)?;
    }
    Ok(())
}

fn lookup<B: BackendQuantGguf>(io: &mut Io<'_, B>, data: &Gguf) -> Check {
    let table = load(io, data)?;
    let shape = RowShape {
        rows: data.ids.len(),
        dim: data.shape.k,
    };
    let ids = io.indices("ids", &data.ids)?;
    let mut out = io.output_of::<B::Residual>("out", shape.rows * shape.dim)?;
    B::embedding_lookup_quant(&mut io.ctx, &table, &ids, &mut out, shape)?;
    io.take("out", &out, shape.rows * shape.dim)
}

fn lookup_formula(data: &Gguf) -> Vec<Vec<f64>> {
    let table = data.weights();
    let dim = data.shape.k;
    let row = |&id: &i32| {
        let start = usize::try_from(id).ok().map(|id| id * dim);
        let row = start.and_then(|start| table.get(start..start + dim));
        row.map_or(vec![0.0; dim], naive::wide)
    };
    vec![data.ids.iter().flat_map(row).collect()]
}

/// `(rows, n, blocks in a row)`.
const SHAPES: &[(usize, usize, usize)] = &[
    (0, 7, 1),
    (9, 1, 1),
    (1, 33, 3),
    (1, 130, 2),
    (2, 7, 5),
    (4, 64, 2),
    (5, 100, 1),
    (8, 16, 3),
    (17, 31, 2),
    (33, 65, 1),
    (70, 130, 2),
    (129, 260, 1),
    (257, 40, 2),
    (1, 515, 8),
];

fn make(rng: &mut Rng, ty: T, (rows, n, blocks): (usize, usize, usize), scale: f32) -> Gguf {
    // A row of a format without blocks is as long as one of an odd number of the others'.
    let blocks = if ty.is_quantized() {
        blocks
    } else {
        33 * blocks
    };
    let k = blocks * ty.block_len();
    let mut ids = rng.indices(9, n);
    let special = [n as i32 - 1, 0, -1, n as i32, i32::MAX, i32::MIN];
    ids.iter_mut()
        .skip(1)
        .zip(special)
        .for_each(|(id, special)| *id = special);
    Gguf {
        shape: GemmShape { rows, n, k },
        x: rng.acts(rows * k, scale),
        parts: vec![Part {
            ty,
            rows: n,
            bytes: random_rows(rng, ty, n, blocks),
        }],
        ids,
    }
}

/// Rows and types of the parts of a projection.
const FUSED: [(usize, T); 5] = [
    (33, T::Q4_K),
    (7, T::Q6_K),
    (16, T::Q8_0),
    (1, T::F16),
    (20, T::Q4_K),
];

/// A projection whose parts differ in type, as those of Q4_K_M files do.
fn make_fused(rng: &mut Rng, rows: usize, parts: &[(usize, T)]) -> Gguf {
    let k = 512;
    let part = |&(n, ty): &(usize, T)| {
        let bytes = random_rows(rng, ty, n, k / ty.block_len());
        Part { ty, rows: n, bytes }
    };
    let parts: Vec<Part> = parts.iter().map(part).collect();
    let n = parts.iter().map(|part| part.rows).sum();
    Gguf {
        shape: GemmShape { rows, n, k },
        x: rng.acts(rows * k, 1.0),
        parts,
        ids: vec![0, 32, 33, 39, 40, 55, 56, 57, 76, 77, -1],
    }
}

pub(crate) fn tolerance(ty: T) -> Tolerance {
    match ty {
        T::F32 => Tolerance::F32_SUMS,
        T::F16 | T::BF16 => Tolerance::HALF_STORAGE,
        _ => Tolerance::QUANTIZED,
    }
}

struct Gated {
    of: Gguf,
    activation: Activation,
}

fn gemm_quant_gated<B: BackendQuantGguf>(io: &mut Io<'_, B>, data: &Gated) -> Check {
    let Gguf { shape, x, .. } = &data.of;
    let weight = load(io, &data.of)?;
    let (size, x) = (shape.rows * shape.n, io.input("x", x)?);
    let mut room = io.device.alloc(size)?;
    let mut out = io.output("out", size / 2)?;
    let to = (&mut room, &mut out);
    B::gemm_quant_gated(&mut io.ctx, &x, &weight, data.activation, to, *shape)?;
    io.take("out", &out, size / 2)
}

fn gated_formula(data: &Gated) -> Vec<Vec<f64>> {
    let sums = gemm_formula(&data.of);
    vec![naive::gated(data.activation, &sums[0], data.of.shape.n)]
}

/// Rows, gates and runs of 256 inputs of products with gate and up. A block of a kernel on a GPU may make one row of gates or several, and
/// go around its ring of copies.
const GATED: [(usize, usize, usize); 9] = [
    (0, 16, 1),
    (1, 33, 1),
    (1, 272, 1),
    (1, 272, 9),
    (2, 32, 1),
    (5, 160, 18),
    (8, 272, 1),
    (8, 96, 2),
    (9, 40, 1),
];

fn gated_cases<B: BackendQuantGguf>(cases: &mut Cases<B>) {
    let op = "gemm_quant_gated";
    for (number, ty) in types().enumerate() {
        for (i, (rows, half, runs)) in GATED.into_iter().enumerate() {
            // Each type has each size once, with SiLU or the GELU that some kernels take with it.
            let activation = GATES[(number + i) % 2];
            let blocks = match ty.is_quantized() {
                true => runs * 256 / ty.block_len(),
                false => runs,
            };
            let data = move |rng: &mut Rng| Gated {
                of: make(rng, ty, (rows, 2 * half, blocks), 1.0),
                activation,
            };
            let text = format!("{activation:?}, {rows} rows, {half} gates, {blocks} blocks");
            let case = label(op, ty.name(), tolerance(ty).of_product(), text);
            cases.add(
                case,
                data,
                implementations!(gemm_quant_gated, gated_formula),
            );
        }
        let few = move |rng: &mut Rng| Gated {
            of: make(rng, ty, (3, 32, 1), 1.0),
            activation: Activation::Silu,
        };
        cases.rejects_short_buffers((op, ty.name()), few, both!(gemm_quant_gated));
    }
    for rows in [1, 9] {
        let data = move |rng: &mut Rng| Gated {
            of: make_fused(rng, rows, &[(33, T::Q4_K), (7, T::Q6_K), (40, T::Q8_0)]),
            activation: Activation::Silu,
        };
        let text = format!("{rows} rows, parts of several types");
        let case = label(op, "mixed", Tolerance::QUANTIZED.of_product(), text);
        cases.add(
            case,
            data,
            implementations!(gemm_quant_gated, gated_formula),
        );
    }
}

/// Bytes and sizes that disagree, at load.
fn wrong_bytes<B: BackendQuantGguf>(device: &B) -> Check {
    for ty in types() {
        let cols = ty.block_len() * 2;
        let needed = 3 * 2 * ty.block_bytes();
        for len in [0, needed - 1, needed + 1, needed + ty.block_bytes()] {
            match device.load_quant(&vec![0; len], ty, MatShape { rows: 3, cols }) {
                Err(Error::Shape { .. } | Error::Unsupported { .. }) => {}
                Err(error) => {
                    return wrong(format!(
                        "{len} bytes of {ty} as [3, {cols}] gave \"{error}\""
                    ));
                }
                Ok(_) => return wrong(format!("{len} bytes of {ty} as [3, {cols}] gave no error")),
            }
        }
        if ty.is_quantized() {
            let shape = MatShape {
                rows: 3,
                cols: cols + 1,
            };
            if device.load_quant(&vec![0; needed], ty, shape).is_ok() {
                return wrong(format!(
                    "rows of {} elements of {ty} gave no error",
                    cols + 1
                ));
            }
        }
    }
    Ok(())
}

/// A product of other sizes than the weight's.
fn wrong_product<B: BackendQuantGguf>(device: &B) -> Check {
    let mut io = Io::new(device, crate::io::Fault::None)?;
    let weight = device.load_quant(&[0; 34 * 3 * 2], T::Q8_0, MatShape { rows: 3, cols: 64 })?;
    let x = io.input("x", &[0.0; 1000])?;
    let mut out = io.output("out", 1000)?;
    for (n, k) in [(4, 64), (3, 96), (2, 64), (3, 32)] {
        let shape = GemmShape { rows: 2, n, k };
        match B::gemm_quant(&mut io.ctx, &x, &weight, &mut out, shape) {
            Err(Error::Shape { .. } | Error::InvalidArgument { .. }) => {}
            Err(error) => return Err(CaseError::Error(error)),
            Ok(()) => return wrong(format!("[3, 64] used as [{n}, {k}] gave no error")),
        }
    }
    Ok(())
}

/// Every case of [`BackendQuantGguf`].
pub(crate) fn cases<B: BackendQuantGguf>() -> Cases<B> {
    let mut cases = Cases::new();
    for ty in types() {
        let case = |text: String| label("gemm_quant", ty.name(), tolerance(ty), text);
        for &dims in SHAPES {
            let (rows, n, blocks) = dims;
            let text = format!("[{rows}, {blocks} blocks] × [{n}, {blocks} blocks]");
            let make = move |rng: &mut Rng| make(rng, ty, dims, 1.0);
            cases.add(case(text), make, implementations!(gemm_quant, gemm_formula));
        }
        for (text, scale) in [("large values", 1e4), ("tiny values", 1e-6), ("zeros", 0.0)] {
            let make = move |rng: &mut Rng| make(rng, ty, (3, 33, 2), scale);
            cases.add(
                case(text.into()),
                make,
                implementations!(gemm_quant, gemm_formula),
            );
        }
        let spiky = move |rng: &mut Rng| {
            let mut data = make(rng, ty, (4, 40, 2), 1.0);
            data.x.iter_mut().step_by(71).for_each(|x| *x *= 30.0);
            data
        };
        cases.add(
            case("outliers in x".into()),
            spiky,
            implementations!(gemm_quant, gemm_formula),
        );
        let many = move |rng: &mut Rng| make(rng, ty, (40, 37, 3), 1.0);
        let text = "rows alone and together";
        let id = ("gemm_quant", ty.name(), text);
        cases.same(id, many, gemm_quant::<B>, gemm_by_rows::<B>);
        if matches!(ty, T::Q4_K | T::Q6_K | T::Q8_0 | T::IQ4_NL) {
            let blocks = 768 / ty.block_len();
            let many = move |rng: &mut Rng| make(rng, ty, (340, 50, blocks), 1.0);
            let id = ("gemm_quant", ty.name(), "340 long rows alone and together");
            cases.same(id, many, gemm_quant::<B>, gemm_by_rows::<B>);
        }
        let some = move |rng: &mut Rng| make(rng, ty, (3, 45, 2), 1.0);
        let text = "a weight with others' blocks between its rows";
        let id = ("gemm_quant", ty.name(), text);
        cases.same(id, some, gemm_quant::<B>, gemm_strided::<B>);
        let few = move |rng: &mut Rng| make(rng, ty, (3, 7, 1), 1.0);
        cases.rejects_short_buffers(("gemm_quant", ty.name()), few, both!(gemm_quant));
    }
    for rows in [1, 3, 9] {
        let text = format!("{rows} rows, parts of several types");
        let case = label("gemm_quant", "mixed", Tolerance::QUANTIZED, text);
        cases.add(
            case,
            move |rng| make_fused(rng, rows, &FUSED),
            implementations!(gemm_quant, gemm_formula),
        );
    }
    gated_cases(&mut cases);
    let many = |rng: &mut Rng| make_fused(rng, 40, &FUSED);
    let id = ("gemm_quant", "mixed", "rows alone and together");
    cases.same(id, many, gemm_quant::<B>, gemm_by_rows::<B>);
    cases.check(
        ("load_quant", "-", "bytes of the wrong length"),
        wrong_bytes::<B>,
    );
    cases.check(
        ("gemm_quant", "Q8_0", "a weight of another shape"),
        wrong_product::<B>,
    );
    lookup_cases(&mut cases);
    cases
}

fn lookup_cases<B: BackendQuantGguf>(cases: &mut Cases<B>) {
    let op = "embedding_lookup_quant";
    for ty in types() {
        for (n, blocks) in [(1, 1), (10, 3)] {
            let text = format!("9 of [{n}, {blocks} blocks]");
            let case = label(op, ty.name(), Tolerance::NORM, text);
            let make = move |rng: &mut Rng| make(rng, ty, (0, n, blocks), 1.0);
            cases.add(case, make, implementations!(lookup, lookup_formula));
        }
        let few = move |rng: &mut Rng| make(rng, ty, (0, 10, 1), 1.0);
        cases.rejects_short_buffers((op, ty.name()), few, both!(lookup));
    }
    let case = label(op, "mixed", Tolerance::NORM, "parts of several types");
    cases.add(
        case,
        |rng| make_fused(rng, 0, &FUSED),
        implementations!(lookup, lookup_formula),
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Random blocks are what the suite takes them for.
    #[test]
    fn blocks_have_values_of_a_sensible_size() {
        for ty in types() {
            let mut rng = Rng::new(ty.name(), |x| x);
            let values = decode(ty, random_rows(&mut rng, ty, 4, 16).get());
            assert_eq!(values.len(), 4 * 16 * ty.block_len());
            let power = values.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>();
            let size = (power / values.len() as f64).sqrt();
            assert!((0.005..2.0).contains(&size), "{ty}: {size}");
            let distinct: std::collections::BTreeSet<_> =
                values.iter().map(|x| x.to_bits()).collect();
            assert!(
                distinct.len() > values.len() / 256,
                "{ty}: {}",
                distinct.len()
            );
        }
    }
}
