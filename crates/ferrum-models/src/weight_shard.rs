//! A rank's slice of a stored weight, in the format of its file.
//!
//! A slice of a format that is stored row by row is a view of the file, its columns too; everything else is copied once,
//! matrix by matrix, while it is loaded. Formats are cut between their packing units. Groups and blocks that share a scale may be cut
//! inside: the slice then has smaller groups, of which several have the same scale, so it stands for exactly the
//! same numbers. A slice that begins or ends inside a packing unit (columns inside a ggml block) is dequantised
//! to f32; outputs of GPTQ that are packed together become codes of four bits. [`borders`] says where neither is needed.

use crate::experts::ExpertSource;
use crate::inventory::{DecoderTensor, RankShard, ShardAxis};
use ferrum_kernels::{
    AwqWeights, ExpertShape, Fp8Weights, GgufRows, GptqWeights, MatShape, PackQuantizedWeights,
    PackedZeros, QuantWeights,
};
use ferrum_quant::gptq::{pack_codes, pack_zeros};
use ferrum_types::{Error, GgufQuantType, Result};
use std::borrow::Cow;
use std::ops::Range;

mod boundaries;

pub(crate) use boundaries::{SplitPoints, borders, input_unit, lcm};
use boundaries::{gcd, gptq_unit, named_groups, numbers, per_word};

const OP: &str = "slice_weight";

/// What a rank holds of a matrix: rows and columns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct MatShard {
    pub(crate) rows: Range<usize>,
    pub(crate) cols: Range<usize>,
}

impl MatShard {
    /// What a rank holds of a matrix of this shape, or of each such matrix of a stack.
    pub(crate) fn held(cut: &RankShard, tensor: &DecoderTensor, shape: MatShape) -> Self {
        let (rows, cols, part) = (0..shape.rows, 0..shape.cols, cut.slice(tensor).range);
        match cut.axis(tensor) {
            ShardAxis::Columns => Self { rows, cols: part },
            ShardAxis::Rows | ShardAxis::Vocabulary => Self { rows: part, cols },
            ShardAxis::Matrices | ShardAxis::Replicated => Self { rows, cols },
        }
    }

    /// Whether a weight with rows of `cols` numbers has such a slice in its own format.
    pub(crate) fn keeps_format(&self, weights: &QuantWeights<'_>, cols: usize) -> bool {
        aligned(weights, cols, self) == *self
    }

    pub(crate) fn shape(&self) -> MatShape {
        MatShape {
            rows: self.rows.len(),
            cols: self.cols.len(),
        }
    }
}

/// A slice of a stored weight.
pub(crate) enum Slice<'a> {
    /// All of it, or rows as they lie, with what others hold of them in between.
    View(QuantWeights<'a>),
    /// The same scheme with smaller sizes; its tensors are these, in the order of the struct's fields.
    Copied(QuantWeights<'a>, [Cow<'a, [u8]>; 4]),
    /// Rows that were put together: bytes, type and rows.
    Rows(Vec<u8>, GgufQuantType, usize),
    /// Dequantised: numbers and rows.
    Values(Vec<f32>, usize),
}

impl<'a> Slice<'a> {
    /// The slice `at` of a weight of this shape that is stored with a row for each input.
    ///
    /// # Errors
    /// For a weight that is not floats.
    pub(crate) fn transposed(
        weights: &QuantWeights<'a>,
        shape: MatShape,
        at: &MatShard,
    ) -> Result<Self> {
        let (Some(_), QuantWeights::Gguf(part)) = (weights.as_dense(), weights) else {
            let found = weights.label();
            let reason = format!("found {found} with a row for each input, expected floats");
            return Err(Error::invalid(OP, reason));
        };
        let size = part.ty.block_bytes();
        let mut bytes = Vec::with_capacity(at.rows.len() * at.cols.len() * size);
        for row in at.rows.clone() {
            for col in at.cols.clone() {
                let first = (col * shape.rows + row) * size;
                bytes.extend_from_slice(&part.bytes[first..first + size]);
            }
        }
        Ok(Self::Rows(bytes, part.ty, at.rows.len()))
    }

    /// The slice `at` of a weight with rows of `cols` numbers.
    ///
    /// # Errors
    /// What is wrong with the weight's sizes, when it has to be dequantised.
    pub(crate) fn new(weights: &QuantWeights<'a>, cols: usize, at: &MatShard) -> Result<Self> {
        let whole = MatShard {
            rows: 0..weights.rows(),
            cols: 0..cols,
        };
        if *at == whole {
            return Ok(Self::View(*weights));
        }
        let hull = aligned(weights, cols, at);
        if hull == *at {
            return cut(weights, cols, at);
        }
        // The smallest slice around it that can be cut, less what is too much.
        let around = cut(weights, cols, &hull)?;
        let width = hull.cols.len();
        let values = around.weights().dequantize(OP, width)?;
        let first = at.cols.start - hull.cols.start;
        let rows = values.chunks_exact(width);
        let rows = rows
            .skip(at.rows.start - hull.rows.start)
            .take(at.rows.len());
        let values = rows.flat_map(|row| &row[first..][..at.cols.len()]);
        Ok(Self::Values(values.copied().collect(), at.rows.len()))
    }

    /// The slice as a weight of its own.
    pub(crate) fn weights(&self) -> QuantWeights<'_> {
        let (form, [a, b, c, d]) = match self {
            Self::View(weights) => return *weights,
            Self::Rows(bytes, ty, rows) => {
                return QuantWeights::Gguf(GgufRows::new(bytes, *ty, *rows));
            }
            Self::Values(values, rows) => {
                return QuantWeights::Gguf(GgufRows::new(
                    bytemuck::cast_slice(values),
                    GgufQuantType::F32,
                    *rows,
                ));
            }
            Self::Copied(form, tensors) => (*form, tensors),
        };
        match form {
            QuantWeights::Gguf(form) => QuantWeights::Gguf(form),
            QuantWeights::Gptq(form) => QuantWeights::Gptq(GptqWeights {
                qweight: a,
                qzeros: b,
                scales: c,
                g_idx: form.g_idx.map(|_| &**d),
                ..form
            }),
            QuantWeights::Awq(form) => QuantWeights::Awq(AwqWeights {
                qweight: a,
                qzeros: b,
                scales: c,
                ..form
            }),
            QuantWeights::PackQuantized(form) => {
                QuantWeights::PackQuantized(PackQuantizedWeights {
                    codes: a,
                    scales: b,
                    zeros: match form.zeros {
                        PackedZeros::None => PackedZeros::None,
                        PackedZeros::Words(_) => PackedZeros::Words(c),
                        PackedZeros::Bytes(_) => PackedZeros::Bytes(c),
                    },
                    g_idx: form.g_idx.map(|_| &**d),
                    ..form
                })
            }
            QuantWeights::Fp8(form) => QuantWeights::Fp8(Fp8Weights {
                codes: a,
                scales: b,
                ..form
            }),
        }
    }
}

/// Slices of the matrices of a layer's experts.
pub(crate) enum ExpertSlices<'a> {
    /// One stack, gathered: bytes, type and rows of all experts.
    Stack(Vec<u8>, GgufQuantType, usize),
    /// A matrix for each expert.
    Each(Vec<Slice<'a>>),
}

impl<'a> ExpertSlices<'a> {
    /// The slice `at` of each expert's matrix.
    ///
    /// # Errors
    /// Those of [`Slice::new`].
    pub(crate) fn new(
        source: &ExpertSource<'a>,
        shape: ExpertShape,
        at: &MatShard,
    ) -> Result<Self> {
        let part = match source {
            ExpertSource::Each(all) => {
                let all = all.iter().map(|one| Slice::new(one, shape.k, at));
                return Ok(Self::Each(all.collect::<Result<_>>()?));
            }
            ExpertSource::Stack(part) => part,
            ExpertSource::Reordered(stack) => {
                let own = stack.gather()?;
                return Self::of_stack(&own.part(), shape, at);
            }
        };
        Self::of_stack(part, shape, at)
    }

    /// The slice `at` of each matrix of a stack.
    fn of_stack(part: &GgufRows<'_>, shape: ExpertShape, at: &MatShard) -> Result<Self> {
        let each = part.bytes.len() / shape.experts.max(1);
        let (mut bytes, mut ty) = (Vec::new(), part.ty);
        for expert in part.bytes.chunks_exact(each.max(1)) {
            let one = QuantWeights::Gguf(GgufRows::new(expert, part.ty, shape.n));
            let slice = Slice::new(&one, shape.k, at)?;
            if let QuantWeights::Gguf(part) = slice.weights() {
                let row_bytes = part.ty.bytes_for(at.cols.len()).unwrap_or(0);
                (0..part.rows).for_each(|row| bytes.extend_from_slice(part.row(row, row_bytes)));
                ty = part.ty;
            }
        }
        Ok(Self::Stack(bytes, ty, shape.experts * at.rows.len()))
    }

    /// The slices as experts of their own.
    pub(crate) fn source(&self) -> ExpertSource<'_> {
        match self {
            Self::Stack(bytes, ty, rows) => ExpertSource::Stack(GgufRows::new(bytes, *ty, *rows)),
            Self::Each(all) => ExpertSource::Each(all.iter().map(Slice::weights).collect()),
        }
    }
}

/// The smallest slice around `at` that can be cut without being dequantised.
fn aligned(weights: &QuantWeights<'_>, cols: usize, at: &MatShard) -> MatShard {
    let (row, col) = borders(weights, cols);
    let hull = |range: &Range<usize>, unit: usize, size: usize| {
        range.start / unit * unit..range.end.next_multiple_of(unit).min(size)
    };
    MatShard {
        rows: hull(&at.rows, row.units.max(1), weights.rows()),
        cols: hull(&at.cols, col.units.max(1), cols),
    }
}

/// A slice between packing units.
fn cut<'a>(weights: &QuantWeights<'a>, cols: usize, at: &MatShard) -> Result<Slice<'a>> {
    match weights {
        QuantWeights::Gguf(part) => cut_blocks(part, cols, at),
        QuantWeights::Gptq(layer) => cut_gptq(layer, at),
        QuantWeights::Awq(layer) => Ok(cut_awq(layer, at)),
        QuantWeights::PackQuantized(layer) => Ok(cut_packed(layer, at)),
        QuantWeights::Fp8(layer) => Ok(cut_fp8(layer, at)),
    }
}

fn cut_blocks<'a>(part: &GgufRows<'a>, cols: usize, at: &MatShard) -> Result<Slice<'a>> {
    let bytes = |count: usize| {
        part.ty.bytes_for(count).ok_or_else(|| {
            let ty = part.ty;
            Error::invalid(OP, format!("{count} elements of {ty} are no whole blocks"))
        })
    };
    let stride = part.row_stride.unwrap_or(bytes(cols)?);
    let inside = bytes(at.cols.start)?..bytes(at.cols.end)?;
    // From the first byte of the first row to the last one of the last row.
    let bytes = match at.rows.clone().last() {
        None => &[][..],
        Some(last) => {
            &part.bytes[at.rows.start * stride + inside.start..last * stride + inside.end]
        }
    };
    Ok(Slice::View(QuantWeights::Gguf(GgufRows {
        bytes,
        ty: part.ty,
        rows: at.rows.len(),
        row_stride: (inside.len() != stride).then_some(stride),
        factor: part.factor,
    })))
}

fn cut_gptq<'a>(layer: &GptqWeights<'a>, at: &MatShard) -> Result<Slice<'a>> {
    let n = layer.out_features;
    let (codes, words) = gptq_unit(layer.bits);
    if [at.rows.start, at.rows.end]
        .iter()
        .any(|row| !row.is_multiple_of(codes))
    {
        return cut_widened(layer, at);
    }
    let packed = |count: usize| count / codes * words;
    let groups = Groups::new(
        layer.group_size,
        layer.in_features,
        &at.cols,
        layer.g_idx,
        false,
    );
    let (rows, inputs) = (at.rows.clone(), packed(at.cols.start)..packed(at.cols.end));
    let zeros: Vec<_> = (packed(rows.start)..packed(rows.end)).collect();
    let outputs: Vec<_> = rows.clone().collect();
    let tensors = [
        window(
            layer.qweight,
            4 * n,
            &inputs,
            &(4 * rows.start..4 * rows.end),
        ),
        pick(layer.qzeros, (packed(n), 4), &groups.old, &zeros),
        pick(layer.scales, (n, 2), &groups.old, &outputs),
        Cow::Owned(groups.g_idx.clone().unwrap_or_default()),
    ];
    let form = GptqWeights {
        in_features: at.cols.len(),
        out_features: rows.len(),
        group_size: groups.size,
        g_idx: groups.g_idx.map(|_| &[][..]),
        ..*layer
    };
    Ok(copied(QuantWeights::Gptq(form), tensors))
}

/// A slice that begins or ends inside a packing unit of outputs, in codes of four bits. Codes and zero points are moved so that the middle
/// of the codes, which devices subtract first, is the same number: so products have the same bits.
fn cut_widened<'a>(layer: &GptqWeights<'a>, at: &MatShard) -> Result<Slice<'a>> {
    const BITS: u32 = 4;
    let (unit, _) = gptq_unit(layer.bits);
    let (first, end) = (
        at.rows.start / unit * unit,
        at.rows.end.next_multiple_of(unit),
    );
    let around = MatShard {
        rows: first..end,
        cols: at.cols.clone(),
    };
    let around = cut_gptq(layer, &around)?;
    let QuantWeights::Gptq(part) = around.weights() else {
        return Err(Error::invalid(OP, "the slice has another format"));
    };
    let fail = |e: ferrum_quant::QuantError| Error::invalid(OP, e.to_string());
    let (n, k) = (part.out_features, part.in_features);
    let groups = part.scales.len() / (2 * n).max(1);
    let (mut codes, mut zeros) = (vec![0; n * k], vec![0; n * groups]);
    part.codes(&mut codes).map_err(fail)?;
    part.zeros(&mut zeros).map_err(fail)?;
    let rows = at.rows.start - first..at.rows.end - first;
    let outputs: Vec<_> = rows.clone().collect();
    let middle = |bits: u32| 1u8 << (bits - 1);
    let moved = |code: &u8| code + (middle(BITS) - middle(part.bits));
    let codes: Vec<_> = codes[rows.start * k..rows.end * k]
        .iter()
        .map(moved)
        .collect();
    let zeros = zeros.chunks_exact(n).flat_map(|group| &group[rows.clone()]);
    let zeros: Vec<_> = zeros.map(moved).collect();
    let all: Vec<_> = (0..groups).collect();
    let tensors = [
        Cow::Owned(pack_codes(BITS, &codes, k, rows.len()).map_err(fail)?),
        Cow::Owned(pack_zeros(BITS, part.zero_points, &zeros, rows.len()).map_err(fail)?),
        Cow::Owned(pick(part.scales, (n, 2), &all, &outputs).into_owned()),
        Cow::Owned(part.g_idx.unwrap_or_default().to_vec()),
    ];
    let form = GptqWeights {
        bits: BITS,
        in_features: k,
        out_features: rows.len(),
        group_size: part.group_size,
        g_idx: part.g_idx.map(|_| &[][..]),
        ..*layer
    };
    Ok(copied(QuantWeights::Gptq(form), tensors))
}

fn cut_awq<'a>(layer: &AwqWeights<'a>, at: &MatShard) -> Slice<'a> {
    let (n, rows) = (layer.out_features, at.rows.clone());
    let groups = Groups::new(layer.group_size, layer.in_features, &at.cols, None, true);
    let words: Vec<_> = (rows.start / 8..rows.end / 8).collect();
    let outputs: Vec<_> = rows.clone().collect();
    let tensors = [
        window(
            layer.qweight,
            n / 8 * 4,
            &at.cols,
            &(rows.start / 2..rows.end / 2),
        ),
        pick(layer.qzeros, (n / 8, 4), &groups.old, &words),
        pick(layer.scales, (n, 2), &groups.old, &outputs),
        none(),
    ];
    let form = AwqWeights {
        in_features: at.cols.len(),
        out_features: rows.len(),
        group_size: groups.size,
        ..*layer
    };
    copied(QuantWeights::Awq(form), tensors)
}

fn cut_packed<'a>(layer: &PackQuantizedWeights<'a>, at: &MatShard) -> Slice<'a> {
    let each = per_word(layer);
    let words = |count: usize| count.div_ceil(each);
    let rows: Vec<_> = at.rows.clone().collect();
    let groups = Groups::new(
        layer.group_size,
        layer.in_features,
        &at.cols,
        layer.g_idx,
        false,
    );
    let all = layer.groups();
    let zeros = match layer.zeros {
        PackedZeros::None => none(),
        PackedZeros::Bytes(bytes) => pick(bytes, (all, 1), &rows, &groups.old),
        PackedZeros::Words(bytes) => {
            let rows: Vec<_> = (at.rows.start / each..words(at.rows.end)).collect();
            pick(bytes, (all, 4), &rows, &groups.old)
        }
    };
    let inside = 4 * (at.cols.start / each)..4 * words(at.cols.end);
    let width = 4 * words(layer.in_features);
    let tensors = [
        window(layer.codes, width, &at.rows, &inside),
        pick(
            layer.scales,
            (all, layer.scale_dtype.size()),
            &rows,
            &groups.old,
        ),
        zeros,
        Cow::Owned(groups.g_idx.clone().unwrap_or_default()),
    ];
    let form = PackQuantizedWeights {
        in_features: at.cols.len(),
        out_features: at.rows.len(),
        group_size: groups.size,
        g_idx: groups.g_idx.map(|_| &[][..]),
        ..*layer
    };
    copied(QuantWeights::PackQuantized(form), tensors)
}

fn cut_fp8<'a>(layer: &Fp8Weights<'a>, at: &MatShard) -> Slice<'a> {
    let [height, width] = layer.block;
    let rows = Groups::new(height, layer.out_features, &at.rows, None, false);
    let cols = Groups::new(width, layer.in_features, &at.cols, None, false);
    let form = Fp8Weights {
        in_features: at.cols.len(),
        out_features: at.rows.len(),
        block: [rows.size, cols.size],
        ..*layer
    };
    let size = (layer.scales_of_row(), layer.scale_dtype.size());
    let tensors = [
        window(layer.codes, layer.in_features, &at.rows, &at.cols),
        pick(layer.scales, size, &rows.old, &cols.old),
        none(),
        none(),
    ];
    copied(QuantWeights::Fp8(form), tensors)
}

/// The groups of a slice of features.
struct Groups {
    /// Features in a group.
    size: usize,
    /// For each group of the slice, the group of the whole that it is, or is a part of.
    old: Vec<usize>,
    /// i32 `[features]`: the group of each feature, of layers that name it.
    g_idx: Option<Vec<u8>>,
}

impl Groups {
    /// Groups of `size` features out of `all`, or those that `g_idx` names. With `whole`, no group may be shorter.
    fn new(
        size: usize,
        all: usize,
        features: &Range<usize>,
        g_idx: Option<&[u8]>,
        whole: bool,
    ) -> Self {
        let (size, len) = (size.max(1), features.len());
        let g_idx = named_groups(g_idx, size);
        if *features == (0..all) {
            return Self {
                size,
                old: (0..all.div_ceil(size)).collect(),
                g_idx: g_idx.map(<[u8]>::to_vec),
            };
        }
        if let Some(bytes) = g_idx {
            return Self::named(&bytes[4 * features.start..4 * features.end]);
        }
        let of = |feature: usize| feature / size;
        let finer = match (of(features.start) == of(features.end.max(1) - 1), whole) {
            (true, _) => len.max(1),
            (false, false) => gcd(features.start, size),
            (false, true) => gcd(gcd(features.start, size), len),
        };
        let firsts = (0..len.div_ceil(finer)).map(|group| features.start + group * finer);
        Self {
            size: finer,
            old: firsts.map(of).collect(),
            g_idx: None,
        }
    }

    /// The groups that some features name, numbered anew: only those that are used are kept.
    fn named(bytes: &[u8]) -> Self {
        let groups: Vec<usize> = numbers(bytes).collect();
        let mut old = groups.clone();
        old.sort_unstable();
        old.dedup();
        let place = |group: &usize| old.binary_search(group).unwrap_or(0) as u32;
        let g_idx = groups.iter().flat_map(|group| place(group).to_le_bytes());
        let g_idx = g_idx.collect();
        // The number of groups follows from their size, which has no other meaning here. It may come out larger
        // than is used; the rest is never named.
        let size = (groups.len() / old.len().max(1)).max(1);
        let count = groups.len().div_ceil(size);
        let last = old.last().copied().unwrap_or(0);
        old.resize(count.max(old.len()), last);
        Self {
            size,
            old,
            g_idx: Some(g_idx),
        }
    }
}

fn copied<'a>(form: QuantWeights<'a>, tensors: [Cow<'a, [u8]>; 4]) -> Slice<'a> {
    Slice::Copied(form, tensors)
}

fn none<'a>() -> Cow<'a, [u8]> {
    Cow::Borrowed(&[])
}

/// Bytes `cols` of the rows `rows`, each `width` bytes long: a view where rows are taken whole.
fn window<'a>(
    bytes: &'a [u8],
    width: usize,
    rows: &Range<usize>,
    cols: &Range<usize>,
) -> Cow<'a, [u8]> {
    let all = &bytes[rows.start * width..rows.end * width];
    if *cols == (0..width) {
        return Cow::Borrowed(all);
    }
    let inside = all.chunks_exact(width.max(1)).map(|row| &row[cols.clone()]);
    let inside: Vec<_> = inside.collect();
    Cow::Owned(inside.concat())
}

/// Elements `cols` of the rows `rows`, each of `count` elements of `size` bytes.
fn pick<'a>(
    bytes: &'a [u8],
    (count, size): (usize, usize),
    rows: &[usize],
    cols: &[usize],
) -> Cow<'a, [u8]> {
    let mut out = Vec::with_capacity(rows.len() * cols.len() * size);
    for row in rows {
        let row = &bytes[row * count * size..][..count * size];
        for col in cols {
            out.extend_from_slice(&row[col * size..][..size]);
        }
    }
    Cow::Owned(out)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test may panic")]
mod tests {
    use super::*;
    use crate::inventory::TensorShape;
    use crate::model::{Model, read_model};
    use crate::stored::Stored;
    use ferrum_formats::ModelSource;
    use std::path::Path;

    /// All numbers of a slice.
    fn window_of(values: &[f32], cols: usize, at: &MatShard) -> Vec<f32> {
        let rows = values
            .chunks_exact(cols)
            .skip(at.rows.start)
            .take(at.rows.len());
        rows.flat_map(|row| row[at.cols.clone()].to_vec()).collect()
    }

    /// Slices that ranks get, and some at odd places.
    fn slices(rows: usize, cols: usize) -> Vec<MatShard> {
        let parts = |n: usize| {
            let thirds = [0..n / 3, n / 3..2 * n / 3, 2 * n / 3..n];
            let odd = [1..n, 0..n - 1, 3..n.saturating_sub(5), n / 2..n / 2 + 1];
            let units = [0..n / 32 * 32 / 2, n / 2 / 32 * 32..n, 8..24, 0..n];
            let all = thirds.into_iter().chain(odd).chain(units);
            all.filter(move |part| !part.is_empty() && part.end <= n)
        };
        let of_rows = parts(rows).map(|rows| MatShard {
            rows,
            cols: 0..cols,
        });
        let of_cols = parts(cols).map(|cols| MatShard {
            rows: 0..rows,
            cols,
        });
        let both = parts(rows).zip(parts(cols).collect::<Vec<_>>().into_iter().rev());
        let both = both.map(|(rows, cols)| MatShard { rows, cols });
        of_rows.chain(of_cols).chain(both).collect()
    }

    fn same(a: &[f32], b: &[f32]) -> bool {
        let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        bits(a) == bits(b)
    }

    fn check(model: &Model, name: &str) -> usize {
        let mut checked = 0;
        for tensor in model.spec.tensors() {
            let Some(shape) = tensor.shape.matrix() else {
                continue;
            };
            let (rows, cols) = (shape.rows, shape.cols);
            match model.stored(&tensor).unwrap() {
                Stored::Vector => {}
                Stored::Matrix(matrix) => {
                    let all = MatShard {
                        rows: 0..rows,
                        cols: 0..cols,
                    };
                    let dequantize = |at: &MatShard| -> (usize, Vec<f32>) {
                        let slices = matrix.slices(at).unwrap();
                        let found = slices.iter().map(Slice::weights);
                        let cols = at.cols.len();
                        let values = found
                            .clone()
                            .flat_map(|w| w.dequantize("test", cols).unwrap());
                        (found.map(|w| w.rows()).sum(), values.collect())
                    };
                    let (_, whole) = dequantize(&all);
                    for at in slices(rows, cols) {
                        let (rows, found) = dequantize(&at);
                        assert_eq!(rows, at.rows.len(), "{name}: {}: {at:?}", tensor.id);
                        let expected = window_of(&whole, cols, &at);
                        assert!(same(&found, &expected), "{name}: {}: {at:?}", tensor.id);
                        checked += 1;
                    }
                }
                Stored::Experts(source) => {
                    let TensorShape::Stack(stack) = tensor.shape else {
                        continue;
                    };
                    for at in slices(rows, cols) {
                        let slices = ExpertSlices::new(&source, stack, &at).unwrap();
                        let found = values(&slices.source(), at.cols.len());
                        let whole = values(&source, cols);
                        let experts = whole.chunks_exact(rows * cols);
                        let expected = experts.flat_map(|one| window_of(one, cols, &at));
                        let expected: Vec<_> = expected.collect();
                        assert!(same(&found, &expected), "{name}: {}: {at:?}", tensor.id);
                        checked += 1;
                    }
                }
            }
        }
        checked
    }

    fn values(source: &ExpertSource<'_>, cols: usize) -> Vec<f32> {
        let mut all = Vec::new();
        source.each(|one| all.extend(one.dequantize("test", cols).unwrap()));
        all
    }

    /// A slice stands for exactly the numbers of the whole, in every format.
    #[test]
    fn slices_have_the_numbers_of_the_whole() {
        let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/models");
        for name in [
            "llama-awq",
            "llama-gptq2",
            "llama-gptq3",
            "llama-gptq4-odd",
            "llama-gptq4-order",
            "llama-gptq4-v2",
            "llama-gptq8",
            "llama-packed4",
            "llama-packed4-order",
            "llama-packed8",
            "llama-fp8-block",
            "llama-fp8-channel",
            "llama-fp8-odd",
            "llama-fp8-tensor",
            "llama-quantized/model-q8_0.gguf",
            "llama-quantized/model-q4_0.gguf",
            "qwen2",
            "qwen35",
            "qwen3-next",
            "mixtral",
            "mixtral/model.gguf",
            "qwen3-moe-gptq4-order",
            "qwen3-moe-quantized/model-q4_0.gguf",
            "qwen3-moe-fp8",
        ] {
            let source = ModelSource::open(fixtures.join(name)).unwrap();
            let model = read_model(source).unwrap();
            assert!(check(&model, name) > 100, "{name}");
        }
    }

    #[test]
    fn borders_are_those_of_formats() {
        let part = |ty| QuantWeights::Gguf(GgufRows::new(&[], ty, 64));
        let cols = |ty| borders(&part(ty), 512).1;
        let of = |units, groups| SplitPoints { units, groups };
        assert_eq!(cols(GgufQuantType::F16), of(1, 1));
        assert_eq!(cols(GgufQuantType::Q4_0), of(32, 32));
        assert_eq!(cols(GgufQuantType::Q4_K), of(256, 256));
        assert_eq!(of(8, 24).and(of(32, 32)), of(32, 96));
    }
}
