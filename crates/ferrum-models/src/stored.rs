//! The tensors of the inventory as a model's file holds them.

use crate::checkpoint::{Checkpoint, block_type, nvfp4_factors};
use crate::expert_relayout::ReorderedExperts;
use crate::experts::ExpertSource;
use crate::inventory::{
    DecoderTensor, InputBoundaries, RankShard, RowRuns, ShardAxis, ShardBoundaries, ShardUnit,
    StackLayout, TensorId, TensorLocation, TensorPart, TensorRole, TensorShape, of_expert,
};
use crate::model::Model;
use crate::weight_shard::{ExpertSlices, MatShard, Slice, SplitPoints, borders, input_unit, lcm};
use crate::weights::WeightPolicy;
use ferrum_formats::{TensorSource, TensorView};
use ferrum_kernels::{ExpertShape, GgufRows, MatShape, QuantWeights};
use ferrum_types::{Error, GgufQuantType, Result, SrcDtype};
use std::collections::BTreeMap;

/// The first tensor of a matrix in checkpoints that hold it as several.
const QUANTISED: [&str; 2] = ["qweight", "weight_packed"];

/// What follows the name of a tensor whose numbers are stored as blocks of MXFP4: in those of blocks and of their scales.
const MXFP4: [&str; 2] = ["_blocks", "_scales"];

/// A tensor in its file.
pub(crate) enum Stored<'a> {
    /// Numbers that are always loaded in f32.
    Vector,
    /// A matrix.
    Matrix(StoredMatrix<'a>),
    /// The matrices of all experts.
    Experts(ExpertSource<'a>),
}

impl Stored<'_> {
    /// Where a matrix, or every matrix of a stack, with rows of `cols` numbers can be cut whose products ranks sum; `None` if the device
    /// does not compute on it as it is.
    fn input_boundaries(&self, policy: WeightPolicy, cols: usize) -> Option<InputBoundaries> {
        let mut at = (Some(1), SplitPoints::default());
        let mut join = |weights: &QuantWeights<'_>| {
            let unit = input_unit(weights, cols);
            at.0 = at.0.zip(unit).map(|(a, b)| lcm(a, b));
            at.1 = at.1.and(borders(weights, cols).0);
        };
        let kept = match self {
            Self::Vector => false,
            Self::Matrix(matrix) => {
                join(&matrix.weights);
                policy.keeps(&matrix.weights)
            }
            Self::Experts(source) => {
                source.each(|weights| join(&weights));
                policy.keeps_experts(source)
            }
        };
        let (inputs, rows) = at;
        kept.then_some(InputBoundaries {
            inputs,
            outputs: vec![rows.even_groups(), rows.groups, rows.units],
        })
    }
}

/// A matrix in its file: rows of a tensor, of which it may be all.
#[derive(Clone, Copy)]
pub(crate) struct StoredMatrix<'a> {
    /// The tensor.
    pub(crate) weights: QuantWeights<'a>,
    /// Its sizes, with a row for each output.
    shape: MatShape,
    /// The rows of it that are the matrix.
    runs: RowRuns,
    /// Whether the file has a row for each input instead.
    transposed: bool,
}

impl<'a> StoredMatrix<'a> {
    /// The places of a part of the matrix in the tensor.
    fn places(&self, at: &MatShard) -> impl Iterator<Item = MatShard> {
        let cols = at.cols.clone();
        let rows = self.runs.places(at.rows.clone()).into_iter();
        rows.map(move |rows| MatShard {
            rows,
            cols: cols.clone(),
        })
    }

    /// A part of the matrix, as slices one below the other.
    ///
    /// # Errors
    /// Those of [`Slice::new`].
    pub(crate) fn slices(&self, at: &MatShard) -> Result<Vec<Slice<'a>>> {
        let slice = |place| match self.transposed {
            true => Slice::transposed(&self.weights, self.shape, &place),
            false => Slice::new(&self.weights, self.shape.cols, &place),
        };
        self.places(at).map(slice).collect()
    }

    /// Whether the part has the format of the file.
    pub(crate) fn keeps_format(&self, at: &MatShard) -> bool {
        let mut places = self.places(at);
        self.transposed || places.all(|place| place.keeps_format(&self.weights, self.shape.cols))
    }

    /// Bytes of it in the file.
    pub(crate) fn stored_bytes(&self) -> u64 {
        let all = self.weights.stored_bytes() as u64;
        all.saturating_mul((self.runs.count * self.runs.len) as u64) / self.shape.rows.max(1) as u64
    }

    /// Where its rows and columns can be cut.
    fn borders(&self) -> (SplitPoints, SplitPoints) {
        borders(&self.weights, self.shape.cols)
    }
}

impl Model {
    /// How a tensor lies in the file. Of a vector, nothing is looked up.
    ///
    /// # Errors
    /// [`Error::Model`] names the tensor that is missing, or has another shape or type than expected.
    pub(crate) fn stored(&self, tensor: &DecoderTensor) -> Result<Stored<'_>> {
        match tensor.shape {
            TensorShape::Vector(_) | TensorShape::Biases { .. } | TensorShape::Kernel { .. } => {
                Ok(Stored::Vector)
            }
            TensorShape::Matrix(shape) => self.matrix(tensor, shape).map(Stored::Matrix),
            TensorShape::Stack(shape) => self.experts(tensor, shape).map(Stored::Experts),
        }
    }

    /// How a matrix lies in the file.
    ///
    /// # Errors
    /// As [`stored`](Self::stored).
    pub(crate) fn matrix(
        &self,
        tensor: &DecoderTensor,
        shape: MatShape,
    ) -> Result<StoredMatrix<'_>> {
        let (module, runs, whole) = match self.location(tensor)? {
            TensorLocation::Rows {
                name,
                first,
                height,
            } => (name, RowRuns::one(first, shape.rows), height),
            TensorLocation::Runs { name, runs, height } => (name, runs, height),
            TensorLocation::Whole(name)
            | TensorLocation::PerExpert(name)
            | TensorLocation::Reordered { name, .. } => {
                (name, RowRuns::one(0, shape.rows), shape.rows)
            }
        };
        let module = module.strip_suffix(".weight").unwrap_or(&module);
        let shape = MatShape {
            rows: whole,
            ..shape
        };
        let transposed = self.names.transposed && tensor.id.layer.is_some();
        let in_file = match transposed {
            true => MatShape {
                rows: shape.cols,
                cols: shape.rows,
            },
            false => shape,
        };
        Ok(StoredMatrix {
            weights: self.matrix_called(module, in_file)?,
            shape,
            runs,
            transposed,
        })
    }

    /// The matrix `module` (less `.weight`).
    fn matrix_called(&self, module: &str, shape: MatShape) -> Result<QuantWeights<'_>> {
        Checkpoint::new(&self.source).matrix(module, shape)
    }

    /// The matrices of all experts as they lie in the file.
    ///
    /// # Errors
    /// As [`stored`](Self::stored).
    pub(crate) fn experts(
        &self,
        tensor: &DecoderTensor,
        shape: ExpertShape,
    ) -> Result<ExpertSource<'_>> {
        let ExpertShape { experts, n, k } = shape;
        match self.location(tensor)? {
            // No stack is in one.
            TensorLocation::Runs { .. } => Err(self.unnamed(tensor.id)),
            TensorLocation::PerExpert(pattern) => {
                let matrix = MatShape { rows: n, cols: k };
                let all = 0..experts;
                let all = all.map(|e| self.matrix_called(&of_expert(&pattern, e), matrix));
                Ok(ExpertSource::Each(all.collect::<Result<_>>()?))
            }
            TensorLocation::Whole(name) => {
                let whole = require(self.tensors(), &name, &[experts, n, k])?;
                let ty = float_type(self.tensors(), &whole)?;
                let Some(factors) = self.expert_factors(&name, ty, experts)? else {
                    let stack = GgufRows::new(whole.bytes, ty, experts * n);
                    return Ok(ExpertSource::Stack(stack));
                };
                let each = whole.bytes.len() / experts;
                let all = factors.into_iter().enumerate().map(|(expert, factor)| {
                    let bytes = &whole.bytes[expert * each..][..each];
                    let rows = GgufRows::new(bytes, ty, n);
                    QuantWeights::Gguf(GgufRows { factor, ..rows })
                });
                Ok(ExpertSource::Each(all.collect()))
            }
            TensorLocation::Reordered { name, layout } => {
                let stack = self.gathered(&name, layout, shape)?;
                Ok(ExpertSource::Reordered(stack))
            }
            TensorLocation::Rows {
                name,
                first,
                height,
            } => {
                let whole = require(self.tensors(), &name, &[experts, height, k])?;
                let ty = float_type(self.tensors(), &whole)?;
                // Checked with the tensor's shape: all matrices, and all rows, are equally long.
                let each = whole.bytes.len() / experts;
                let row = each / height;
                let factors = self.expert_factors(&name, ty, experts)?;
                let all = (0..experts).map(|expert| {
                    let bytes = &whole.bytes[expert * each + first * row..][..n * row];
                    let factor = factors.as_ref().map_or(1.0, |factors| factors[expert]);
                    let rows = GgufRows::new(bytes, ty, n);
                    QuantWeights::Gguf(GgufRows { factor, ..rows })
                });
                Ok(ExpertSource::Each(all.collect()))
            }
        }
    }

    /// What the matrices of the stack `name` are multiplied with, where it is of NVFP4 and the file says so; not what the
    /// model multiplies outputs of experts with by itself.
    fn expert_factors(
        &self,
        name: &str,
        ty: GgufQuantType,
        experts: usize,
    ) -> Result<Option<Vec<f32>>> {
        let module = name.strip_suffix(".weight").unwrap_or(name);
        let name = format!("{module}.scale");
        let of_model = self.names.stem(TensorRole::ExpertScale);
        if ty != GgufQuantType::NVFP4 || of_model.is_some_and(|scale| name.ends_with(scale)) {
            return Ok(None);
        }
        let Some(view) = self.tensors().get(&name) else {
            return Ok(None);
        };
        nvfp4_factors(self.tensors(), &view, experts).map(Some)
    }

    /// A stack that its file has in another order: as blocks of MXFP4, as a stack of floats, or as one matrix of all.
    fn gathered(
        &self,
        name: &str,
        layout: StackLayout,
        shape: ExpertShape,
    ) -> Result<ReorderedExperts<'_>> {
        let (tensors, experts) = (self.tensors(), shape.experts);
        let [blocks, scales] = MXFP4.map(|suffix| format!("{name}{suffix}"));
        if tensors.get(&blocks).is_some() {
            let in_row = shape.k / 32;
            let blocks = require(tensors, &blocks, &[experts, layout.width, in_row, 16])?;
            let scales = require(tensors, &scales, &[experts, layout.width, in_row])?;
            return ReorderedExperts::of_mxfp4((blocks.bytes, scales.bytes), layout, shape);
        }
        let rows = experts * layout.height;
        let weights = match name.strip_suffix(".weight") {
            Some(module) => {
                let cols = layout.width;
                self.matrix_called(module, MatShape { rows, cols })?
            }
            None => {
                let whole = require(tensors, name, &[experts, layout.height, layout.width])?;
                let ty = float_type(tensors, &whole)?;
                QuantWeights::Gguf(GgufRows::new(whole.bytes, ty, rows))
            }
        };
        Ok(ReorderedExperts::of_rows(weights, layout, shape))
    }

    /// The place that the file uses of those that its naming scheme knows: the last one where none is
    /// there, so that the error names what is usual.
    fn location(&self, tensor: &DecoderTensor) -> Result<TensorLocation> {
        let places = self.names.locations(tensor);
        let there = |place: &TensorLocation| match place {
            TensorLocation::Rows { name, .. }
            | TensorLocation::Runs { name, .. }
            | TensorLocation::Reordered { name, .. } => {
                let module = name.strip_suffix(".weight").unwrap_or(name);
                let quantised = QUANTISED.map(|suffix| format!("{module}.{suffix}"));
                let blocks = MXFP4.map(|suffix| format!("{name}{suffix}"));
                let mut names = quantised.iter().chain(&blocks).chain([name]);
                names.any(|name| self.tensors().get(name).is_some())
            }
            TensorLocation::Whole(_) | TensorLocation::PerExpert(_) => true,
        };
        // Where there is one place only, the error names it.
        let only = places.len() == 1;
        let found = places.into_iter().find(|place| only || there(place));
        found.ok_or_else(|| self.unnamed(tensor.id))
    }

    /// All elements of a vector, and their bytes in the file.
    ///
    /// # Errors
    /// As [`stored`](Self::stored).
    pub(crate) fn vector(&self, tensor: &DecoderTensor) -> Result<(Vec<f32>, u64)> {
        let dims = tensor.shape.dims();
        let location = self.location(tensor)?;
        if let (TensorLocation::Reordered { name, layout }, TensorShape::Biases { experts, n }) =
            (&location, tensor.shape)
        {
            let view = require(self.tensors(), name, &[experts, layout.width])?;
            let all = to_f32(self.tensors(), &view)?;
            let bytes = (view.bytes.len() * n / layout.width.max(1)) as u64;
            return Ok((layout.biases(&all, n), bytes));
        }
        let len = dims[0];
        let (name, runs, whole) = match location {
            TensorLocation::Rows {
                name,
                first,
                height,
            } => (name, RowRuns::one(first, len), vec![height]),
            TensorLocation::Runs { name, runs, height } => (name, runs, vec![height]),
            TensorLocation::Whole(name)
            | TensorLocation::PerExpert(name)
            | TensorLocation::Reordered { name, .. } => (name, RowRuns::one(0, len), dims),
        };
        let view = match tensor.shape {
            // GGUF files leave the one input of each channel out.
            TensorShape::Kernel { channels, taps } => {
                let view = self.tensors().require(&name)?;
                match view.shape == [channels, taps] {
                    true => view,
                    false => require(self.tensors(), &name, &whole)?,
                }
            }
            // GGUF files have those of a state space as columns, and its norm with a row for each group.
            TensorShape::Vector(len) if tensor.id.role.is_of_linear_heads() => {
                let view = self.tensors().require(&name)?;
                match view.shape.iter().product::<usize>() == len {
                    true => view,
                    false => require(self.tensors(), &name, &whole)?,
                }
            }
            // Norms with weights of each head's own may have a row for each.
            TensorShape::Vector(len) if len > tensor.unit && tensor.id.role.is_norm() => {
                let view = self.tensors().require(&name)?;
                match view.shape == [len / tensor.unit.max(1), tensor.unit] {
                    true => view,
                    false => require(self.tensors(), &name, &whole)?,
                }
            }
            _ => require(self.tensors(), &name, &whole)?,
        };
        let mut values = to_f32(self.tensors(), &view)?;
        let bytes = view.bytes.len() / values.len().max(1);
        if let TensorShape::Vector(len) = tensor.shape {
            let places = runs.places(0..len).into_iter();
            values = places.flat_map(|rows| values[rows].to_vec()).collect();
        }
        if tensor.id.role.has_norm_offset() && tensor.id.part == TensorPart::Weight {
            let offset = self.names.norm_offset;
            values.iter_mut().for_each(|value| *value += offset);
        }
        if tensor.id.role == TensorRole::LinearDecay && self.names.linear.log_decay {
            values.iter_mut().for_each(|value| *value = -value.exp());
        }
        let bytes = (bytes * values.len()) as u64;
        Ok((values, bytes))
    }

    /// What rank `rank` of `ranks` holds of the model, on devices that keep weights as `policy` says. Parts end where the formats of the
    /// weights can be cut, as far as there are enough such places. Elsewhere ranks [gather](crate::GatheredProduct) the inputs of a product
    /// with such a weight, and the loader dequantises what is left.
    ///
    /// # Errors
    /// [`Error::Model`] says which layer has fewer heads or elements than there are ranks.
    pub fn shard(&self, policy: WeightPolicy, (rank, ranks): (usize, usize)) -> Result<RankShard> {
        let borders = ShardBoundaries {
            inputs: self.input_boundaries(policy),
            ..self.shard_boundaries()
        };
        RankShard::new(&self.spec, &borders, (rank, ranks)).map_err(|reason| {
            let path = self.tensors().path_hint().display();
            Error::Model(format!("{path}: {reason}"))
        })
    }

    /// The matrices that a device with this policy computes on as they are, and of which it dequantises the slice of a
    /// rank to f32: the slice ends inside a block, or has groups that the device does not take. Reads those slices.
    pub fn dequantized_slices(&self, policy: WeightPolicy, cut: &RankShard) -> Vec<TensorId> {
        let is_dequantized = |tensor: &DecoderTensor| -> Result<bool> {
            Ok(match (self.stored(tensor)?, tensor.shape) {
                (Stored::Matrix(weights), TensorShape::Matrix(shape)) => {
                    let slices = weights.slices(&MatShard::held(cut, tensor, shape))?;
                    let dequantized = |slice: &Slice<'_>| {
                        matches!(slice, Slice::Values(..)) || !policy.keeps(&slice.weights())
                    };
                    policy.keeps(&weights.weights) && slices.iter().any(dequantized)
                }
                (Stored::Experts(source), TensorShape::Stack(shape)) => {
                    let (rows, cols) = (shape.n, shape.k);
                    let at = MatShard::held(cut, tensor, MatShape { rows, cols });
                    let mut kept = true;
                    source.each(|weights| kept &= at.keeps_format(&weights, cols));
                    let slices = ExpertSlices::new(&source, shape, &at)?;
                    let kept = kept && policy.keeps_experts(&slices.source());
                    policy.keeps_experts(&source) && !kept
                }
                _ => false,
            })
        };
        let all = self.spec.tensors();
        // A matrix that cannot be read is for the loader to report.
        let all = all.filter(|tensor| is_dequantized(tensor).unwrap_or(false));
        all.map(|tensor| tensor.id).collect()
    }

    /// What one device holds, whose sums are cut as those of ranks would be.
    pub(crate) fn whole(&self) -> RankShard {
        RankShard::whole_with_splits(&self.spec, &self.shard_boundaries())
    }

    /// Where matrices can be cut whose products ranks sum, of those that a device with this policy computes on as they are.
    fn input_boundaries(&self, policy: WeightPolicy) -> BTreeMap<TensorId, InputBoundaries> {
        let tensors = self.spec.tensors();
        let summed = tensors.filter(|tensor| tensor.shard_axis() == ShardAxis::Columns);
        let at = |tensor: DecoderTensor| {
            let cols = tensor.shape.matrix()?.cols;
            // A matrix that cannot be read is for the loader to report.
            let stored = self.stored(&tensor).ok()?;
            Some((tensor.id, stored.input_boundaries(policy, cols)?))
        };
        summed.filter_map(at).collect()
    }

    /// Where all tensors can be cut of which the same is dealt out: between groups and pairs of inputs, else between packing
    /// units.
    fn shard_boundaries(&self) -> ShardBoundaries {
        let mut all: BTreeMap<(Option<usize>, ShardUnit), SplitPoints> = BTreeMap::new();
        for tensor in self.spec.tensors() {
            let Some(unit) = tensor.shard_unit() else {
                continue;
            };
            let cols = tensor.shape.dims().last().copied().unwrap_or(0);
            let of_unit = all.entry((tensor.id.layer, unit)).or_default();
            let mut join = |(rows, columns): (SplitPoints, SplitPoints)| {
                *of_unit = of_unit.and(match tensor.shard_axis() {
                    ShardAxis::Columns => columns,
                    _ => rows,
                });
            };
            // A matrix that cannot be read is for the loader to report.
            match self.stored(&tensor) {
                Ok(Stored::Matrix(matrix)) => join(matrix.borders()),
                Ok(Stored::Experts(source)) => source.each(|weights| join(borders(&weights, cols))),
                Ok(Stored::Vector) | Err(_) => {}
            }
        }
        let of = |layer, unit| {
            let points = all.get(&(layer, unit)).copied().unwrap_or_default();
            vec![points.even_groups(), points.units]
        };
        let in_layers = |unit| {
            (0..self.spec.layers.len())
                .map(|layer| of(Some(layer), unit))
                .collect()
        };
        ShardBoundaries {
            tokens: of(None, ShardUnit::Tokens),
            channels: in_layers(ShardUnit::Channels),
            intermediate: in_layers(ShardUnit::Intermediate),
            shared: in_layers(ShardUnit::SharedIntermediate),
            inputs: BTreeMap::new(),
        }
    }

    fn unnamed(&self, id: TensorId) -> Error {
        let path = self.tensors().path_hint().display();
        Error::Model(format!(
            "{path}: {id}: files of this kind hold no such tensor"
        ))
    }

    /// The quantised types that a device with this policy dequantises: each scheme once, with the number
    /// of its matrices where not all are.
    pub fn dequantized_types(&self, policy: WeightPolicy) -> Vec<String> {
        let mut found: BTreeMap<String, (usize, usize)> = BTreeMap::new();
        let mut count = |weights: &QuantWeights<'_>, kept: bool| {
            if weights.as_dense().is_none() {
                let (dequantized, all) = found.entry(weights.label()).or_default();
                *dequantized += usize::from(!kept);
                *all += 1;
            }
        };
        for tensor in self.spec.tensors() {
            // A matrix that cannot be read is for the loader to report.
            match self.stored(&tensor) {
                Ok(Stored::Matrix(StoredMatrix { weights, .. })) => {
                    count(&weights, policy.keeps(&weights));
                }
                Ok(Stored::Experts(source)) => {
                    let kept = policy.keeps_experts(&source);
                    source.each(|weights| count(&weights, kept));
                }
                Ok(Stored::Vector) | Err(_) => {}
            }
        }
        let found = found
            .into_iter()
            .filter(|(_, (dequantized, _))| *dequantized > 0);
        found
            .map(|(label, (dequantized, all))| match dequantized == all {
                true => label,
                false => format!("{label} ({dequantized} of {all} matrices)"),
            })
            .collect()
    }

    /// Whether a matrix outside experts is stored as integers, which a device may multiply as such.
    pub fn has_integers(&self) -> bool {
        self.spec.tensors().any(|tensor| {
            let Ok(Stored::Matrix(StoredMatrix { weights, .. })) = self.stored(&tensor) else {
                return false;
            };
            weights.as_dense().is_none() && !matches!(weights, QuantWeights::Fp8(_))
        })
    }

    /// Whether a matrix is stored in bf16, by which a device may multiply activations that it rounds to bf16.
    pub fn has_bf16(&self) -> bool {
        let is_bf16 = |weights: &QuantWeights<'_>| {
            let part = weights.as_dense();
            part.is_some_and(|part| part.dtype == SrcDtype::BF16)
        };
        self.spec
            .tensors()
            .any(|tensor| match self.stored(&tensor) {
                Ok(Stored::Matrix(StoredMatrix { weights, .. })) => is_bf16(&weights),
                Ok(Stored::Experts(source)) => {
                    let mut found = false;
                    source.each(|weights| found |= is_bf16(&weights));
                    found
                }
                Ok(Stored::Vector) | Err(_) => false,
            })
    }
}

impl TensorRole {
    /// Whether floats are loaded in f32 whatever the file has. Of a router: some levels of a processor
    /// round what they multiply by less, and a rounded score could choose other experts.
    pub(crate) fn widens_floats(self) -> bool {
        matches!(self, Self::Router | Self::SharedRouter)
    }
}

impl StackLayout {
    /// Of each row, `n` biases.
    pub(crate) fn biases(&self, all: &[f32], n: usize) -> Vec<f32> {
        let of_row = |row: &[f32]| {
            let values = row.iter().skip(self.first).step_by(self.step.max(1));
            values.take(n).copied().collect::<Vec<_>>()
        };
        let rows = all.chunks_exact(self.width.max(1));
        rows.flat_map(of_row).collect()
    }
}

/// A tensor that must be there and have this shape.
pub(crate) fn require<'a>(
    tensors: &'a dyn TensorSource,
    name: &str,
    shape: &[usize],
) -> Result<TensorView<'a>> {
    let view = tensors.require(name)?;
    if view.shape != shape {
        return Err(Error::Model(format!(
            "{}: tensor \"{name}\" has shape {:?}, expected {shape:?} from the model's config",
            tensors.path_hint().display(),
            view.shape
        )));
    }
    Ok(view)
}

fn wrong_tensor(tensors: &dyn TensorSource, view: &TensorView<'_>, reason: &str) -> Error {
    let path = tensors.path_hint().display();
    Error::Model(format!("{path}: tensor \"{}\" {reason}", view.name))
}

/// The type of a tensor that must be floats or ggml blocks.
fn float_type(tensors: &dyn TensorSource, view: &TensorView<'_>) -> Result<GgufQuantType> {
    block_type(view).ok_or_else(|| {
        let found = view.dtype.name();
        let reason = format!("has element type {found}, expected a float type");
        wrong_tensor(tensors, view, &reason)
    })
}

/// All elements in f32.
pub(crate) fn to_f32(tensors: &dyn TensorSource, view: &TensorView<'_>) -> Result<Vec<f32>> {
    let ty = float_type(tensors, view)?;
    let mut values = vec![0f32; view.elements()];
    ferrum_quant::dequantize(ty, view.bytes, &mut values)
        .map_err(|e| wrong_tensor(tensors, view, &format!("cannot be dequantised: {e}")))?;
    Ok(values)
}
