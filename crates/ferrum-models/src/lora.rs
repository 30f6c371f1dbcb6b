//! LoRA adapters beside the weights of a runner, chosen for each sequence.
//!
//! Which maps there are, their shapes and their names come from the inventory. An adapter names them as
//! checkpoints of the family do, or as its GGUF files do, where rows of a head may be ordered otherwise.
//!
//! A fused projection has one pair of matrices too: `down` is stacked, and `up` has the parts' matrices
//! on its diagonal. So adapters know nothing of how a layer splits its rows, and work on any backend and
//! any form of weights.
//!
//! In a group, a rank holds of a pair what it holds of the map: outputs of `up`, or inputs of `down`, whose products
//! are summed over ranks before `up`.
//!
//! A step cuts its rows into runs of one adapter each. What a run adds is computed by the same products
//! as everything else, row by row, so on a device with [equal bits](ferrum_kernels::BatchInvariance) a sequence's do not depend on the
//! adapters of others.

use crate::batch::StepBatch;
use crate::families::{self, GGUF_NAMES, HF_NAMES};
use crate::inventory::{
    DecoderTensor, Projection, RankShard, RowRuns, Stage, TensorPart, TensorRole, WeightNames,
};
use crate::layer::widths::scratch_widths;
use crate::linear::{Linear, MatrixLinear, RowParallelLinear};
use crate::rank_index::RankIndex;
use crate::rope::{halved_row, paired_row};
use crate::runner::Graphs;
use crate::spec::{AttentionSpec, DecoderSpec, LinearAttentionSpec};
use crate::stored::to_f32;
use crate::weight_shard::MatShard;
use crate::weights::Dequantized;
use ferrum_formats::{LoraFolder, LoraPair};
use ferrum_kernels::{
    Act, Backend, GemmShape, HeadOrder, LlmBackend, MatShape, RopeStyle, WeightPart,
};
use ferrum_types::{AdapterId, Error, Result, SrcDtype};
use std::any::Any;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

/// A map to which a pair of matrices adds.
#[derive(Clone, Copy, Debug)]
struct Target {
    layer: usize,
    role: TensorRole,
    projection: Projection,
    /// Which of the maps that the projection joins.
    part: usize,
    /// How the adapter pairs up the rows of a head that rotate together.
    style: RopeStyle,
    /// Which of the pair's outputs are the map's: it may be one for several maps.
    rows: RowRuns,
    /// Whether the adapter has the value heads of a key head together.
    is_grouped: bool,
}

/// What an adapter adds to one projection.
struct Delta<B: Backend> {
    /// `[rank, cols]`; in a group, the sum over ranks where their inputs are cut.
    down: Box<dyn Linear<B>>,
    /// `[rows, rank]`, scaled.
    up: B::Weight,
    rows: usize,
    rank: usize,
    cols: usize,
}

/// An adapter on a device: for each layer of a stage what it adds to each [`Projection`].
struct Adapter<B: Backend> {
    layers: Vec<[Option<Delta<B>>; Projection::COUNT]>,
}

/// An adapter that is on the devices of a runner's stages and has no runner yet.
pub struct LoadedAdapter<B: Backend> {
    /// For the last stage.
    own: Adapter<B>,
    /// For those before it, each of its own type.
    pub(crate) earlier: Vec<AdapterPart>,
}

/// A [`LoadedAdapter`] of a stage on another backend.
pub(crate) type AdapterPart = Box<dyn Any + Send>;

/// Loads adapters for a runner on any thread, while the runner makes steps.
#[derive(Clone)]
pub struct AdapterLoader<B: Backend> {
    pub(crate) device: B,
    /// What the runner holds of the decoder; adapters are made for the whole.
    pub(crate) cut: RankShard,
    /// The layers of the stage that it loads for.
    pub(crate) stage: Stage,
    /// Those of the stages before it.
    pub(crate) earlier: Vec<Arc<dyn PartLoader>>,
}

/// Loads adapters for a stage on whatever backend.
pub(crate) trait PartLoader: Send + Sync {
    /// As [`AdapterLoader::load`].
    fn load_part(&self, folder: &LoraFolder) -> Result<AdapterPart>;
}

impl<B: LlmBackend> PartLoader for AdapterLoader<B> {
    fn load_part(&self, folder: &LoraFolder) -> Result<AdapterPart> {
        Ok(Box::new(self.load(folder)?))
    }
}

impl<B: LlmBackend> AdapterLoader<B> {
    /// Reads an adapter, holds it against the model, and writes it to the device.
    ///
    /// # Errors
    /// [`Error::Model`] names the module that does not fit the model; what the device says.
    pub fn load(&self, folder: &LoraFolder) -> Result<LoadedAdapter<B>> {
        let earlier = self.earlier.iter().map(|stage| stage.load_part(folder));
        let earlier = earlier.collect::<Result<_>>()?;
        let own = Adapter::load(&self.device, (&self.cut, &self.stage), folder)?;
        folder.tensors().release();
        Ok(LoadedAdapter { own, earlier })
    }
}

/// A pair of matrices, and how it stands for a map.
type Placed<'a> = (LoraPair<'a>, Target);

/// The pairs of one projection, in the order of its maps.
type Parts<'a> = [Option<Placed<'a>>; Projection::MAPS];

impl<B: LlmBackend> Adapter<B> {
    fn load(device: &B, (cut, stage): (&RankShard, &Stage), folder: &LoraFolder) -> Result<Self> {
        // Their numbers are computed on in f32, which can be cut anywhere.
        let cut = &cut.clone().without_gathers();
        let spec = cut.whole_spec();
        check_architecture(spec, folder)?;
        let mut found: Vec<[Parts<'_>; Projection::COUNT]> =
            vec![Default::default(); spec.layers.len()];
        for pair in folder.pairs() {
            for target in place(spec, folder, &pair)? {
                let place = &mut found[target.layer][target.projection as usize][target.part];
                if place.is_some() {
                    let reason = format!("is a second one for the {}", target.role);
                    return Err(wrong_module(folder, pair.module, &reason));
                }
                *place = Some((pair, target));
            }
        }
        let mut layers = Vec::with_capacity(stage.layers().len());
        for (layer, parts) in stage.layers().zip(&found[stage.layers()]) {
            let mut deltas = [const { None }; Projection::COUNT];
            for at in Projection::ALL {
                let pairs = &parts[at as usize];
                if pairs.iter().any(Option::is_some) {
                    let maps = at.maps(spec, layer);
                    deltas[at as usize] = Some(fuse(device, folder, pairs, (&maps, cut))?);
                }
            }
            layers.push(deltas);
        }
        Ok(Self { layers })
    }
}

impl<B: Backend> Adapter<B> {
    /// The largest rank of a projection.
    fn rank(&self) -> usize {
        let deltas = self.layers.iter().flatten().flatten();
        deltas.map(|delta| delta.rank).max().unwrap_or(0)
    }
}

/// Holds the architecture that a GGUF adapter names against the model's, as rows are ordered by it.
fn check_architecture(spec: &DecoderSpec, folder: &LoraFolder) -> Result<()> {
    let family = families::named(spec.family);
    let (Some(family), Some(found)) = (family, folder.gguf_architecture()) else {
        return Ok(());
    };
    let form = family.gguf_form.map(|form| form.architecture);
    let mut known = family.gguf_architectures.iter().chain(&form);
    if known.any(|&name| name == found) {
        return Ok(());
    }
    let (path, expected) = (folder.path().display(), form.unwrap_or(family.name));
    Err(Error::Model(format!(
        "{path}: field \"general.architecture\": found \"{}\", expected \"{expected}\"\nhint: the adapter \
         is for another model",
        found.escape_debug()
    )))
}

fn wrong_module(folder: &LoraFolder, module: &str, reason: &str) -> Error {
    let (path, module) = (folder.path().display(), module.escape_debug());
    Error::Model(format!("{path}: module \"{module}\" {reason}"))
}

/// A module that an adapter names, in whichever naming scheme.
struct Module<'n> {
    names: &'static WeightNames,
    layer: usize,
    /// What follows the layer's prefix.
    part: &'n str,
    /// How files of this scheme pair up the rows of a head that rotate together.
    style: RopeStyle,
    /// Whether it is that of the family's checkpoints.
    is_hf: bool,
}

/// Reads the name of a module: that of the family's checkpoints, with or without what wraps the decoder in
/// them, or that of its GGUF files.
fn module<'n>(spec: &DecoderSpec, name: &'n str) -> Option<Module<'n>> {
    let family = families::named(spec.family);
    let hf = family.map_or(&HF_NAMES, |family| family.hf_names);
    let gguf_style = family
        .and_then(|family| family.gguf_form)
        .map(|form| form.rope);
    let module = |(names, style, is_hf), (layer, part)| Module {
        names,
        layer,
        part,
        style,
        is_hf,
    };
    let in_hf = hf
        .layer_part(name)
        .or_else(|| hf.unwrapped_layer_part(name));
    if let Some(found) = in_hf {
        let style = family.map_or(RopeStyle::HalfSplit, |family| family.hf_rope);
        return Some(module((hf, style, true), found));
    }
    let gguf = family.map_or(&GGUF_NAMES, |family| family.gguf_names);
    let found = gguf.layer_part(name)?;
    Some(module(
        (gguf, gguf_style.unwrap_or(spec.rope_style()), false),
        found,
    ))
}

/// To which maps a pair belongs: one, or those that a checkpoint holds as one. Its shape fits there.
fn place(spec: &DecoderSpec, folder: &LoraFolder, pair: &LoraPair<'_>) -> Result<Vec<Target>> {
    let fail = |reason: String| Err(wrong_module(folder, pair.module, &reason));
    let Some(module) = module(spec, pair.module) else {
        return fail("cannot be adapted, expected the linear maps of layers only".into());
    };
    let layers = spec.layers.len();
    if module.layer >= layers {
        let index = module.layer;
        return fail(format!(
            "is of layer {index}, and the model has {layers} layers"
        ));
    }
    let tensors = spec.layer_tensors(module.layer).into_iter();
    let maps: Vec<_> = tensors
        .filter(|tensor| tensor.id.part == TensorPart::Weight)
        .filter_map(|tensor| Some((tensor, tensor.id.role.projection()?, tensor.matrix()?)))
        .collect();
    let in_module = |tensor: &DecoderTensor, shape: MatShape| {
        let places = module.names.fused_rows(tensor).into_iter();
        let mut places = places.filter(|(stem, ..)| *stem == module.part);
        let joined = places.next().map(|(_, runs, rows)| (runs, rows));
        let own = module.names.stem(tensor.id.role) == Some(module.part);
        joined.or(own.then(|| (RowRuns::one(0, shape.rows), shape.rows)))
    };
    let mut targets = Vec::new();
    for (tensor, projection, shape) in &maps {
        let Some((runs, rows)) = in_module(tensor, *shape) else {
            continue;
        };
        let found = (pair.up.shape.first(), pair.down.shape.get(1));
        if found != (Some(&rows), Some(&shape.cols)) {
            return fail(format!(
                "has {} outputs of {} inputs in this adapter, and {rows} of {} in the model\nhint: the \
                 adapter is for another model{}",
                found.0.copied().unwrap_or(0),
                found.1.copied().unwrap_or(0),
                shape.cols,
                folder
                    .base_model()
                    .map_or(String::new(), |base| format!(" ({})", base.escape_debug())),
            ));
        }
        let parts = projection.maps(spec, module.layer).into_iter();
        let mut parts = parts.map(|part| part.id.role);
        targets.push(Target {
            layer: module.layer,
            role: tensor.id.role,
            projection: *projection,
            part: parts.position(|role| role == tensor.id.role).unwrap_or(0),
            style: module.style,
            rows: runs,
            is_grouped: module.is_hf,
        });
    }
    if targets.is_empty() {
        return fail(match module.names.role_in_layer(module.part) {
            Some(role) if role.projection().is_some() => {
                "does not exist in this layer, which has other maps".into()
            }
            _ => {
                let known = Projection::ALL.iter().flat_map(|at| at.roles());
                let known: Vec<_> = known.filter_map(|&role| module.names.stem(role)).collect();
                format!("cannot be adapted, expected one of {}", known.join(", "))
            }
        });
    }
    Ok(targets)
}

/// One pair of matrices for what a rank holds of a projection.
fn fuse<B: LlmBackend>(
    device: &B,
    folder: &LoraFolder,
    pairs: &Parts<'_>,
    (maps_of, cut): (&[DecoderTensor], &RankShard),
) -> Result<Delta<B>> {
    let style = cut.whole_spec().rope_style();
    let maps: Vec<_> = maps_of
        .iter()
        .filter_map(|map| {
            let shape = map.matrix()?;
            let in_turns = heads_in_turns(cut.whole_spec(), map);
            let held = MatShard::held(cut, map, shape);
            Some((shape, held, (map.rotated_heads, in_turns)))
        })
        .collect();
    let rows = maps.iter().map(|(_, held, _)| held.rows.len()).sum();
    let cols = maps.first().map_or(0, |(_, held, _)| held.cols.len());
    let ranks = pairs.iter().flatten().map(|(pair, ..)| pair.down.shape[0]);
    let rank = ranks.sum::<usize>();
    let mut down = Vec::with_capacity(rank * cols);
    let mut up = vec![0f32; rows * rank];
    let (mut first_row, mut first_rank) = (0, 0);
    for (pair, (shape, held, (heads, in_turns))) in pairs.iter().zip(&maps) {
        if let Some((pair, target)) = pair {
            let own = pair.down.shape[0];
            let is_output = target.role == TensorRole::LinearOutput;
            let in_turns = in_turns.filter(|_| target.is_grouped);
            let (of_rows, of_cols) = match is_output {
                true => (None, in_turns),
                false => (in_turns, None),
            };
            let values = to_f32(folder.tensors(), &pair.down)?;
            for row in values.chunks_exact(shape.cols) {
                let place = |col| of_cols.map_or(col, |l| l.grouped_place(col, shape.cols));
                down.extend(held.cols.clone().map(|col| row[place(col)]));
            }
            let values = to_f32(folder.tensors(), &pair.up)?;
            for (to, row) in held.rows.clone().enumerate() {
                let row = of_rows.map_or(row, |l| l.grouped_place(row, shape.rows));
                let from = match (target.style, style) {
                    (RopeStyle::HalfSplit, RopeStyle::Interleaved) => {
                        paired_row(row, shape.rows, *heads)
                    }
                    (RopeStyle::Interleaved, RopeStyle::HalfSplit) => {
                        halved_row(row, shape.rows, *heads)
                    }
                    _ => row,
                };
                let from = &values[target.rows.row(from) * own..][..own];
                let to = &mut up[(first_row + to) * rank + first_rank..][..own];
                for (to, from) in to.iter_mut().zip(from) {
                    *to = pair.scale * from;
                }
            }
            first_rank += own;
        }
        first_row += held.rows.len();
    }
    let load = |values: &[f32], rows, cols| {
        let part = WeightPart::new(bytemuck::cast_slice(values), SrcDtype::F32, rows);
        device.from_weight_parts(&[part], cols)
    };
    let mut down = load(&down, rank, cols)?;
    if let [map] = maps_of {
        B::split_sums(&mut down, cut.sum_split(map));
    }
    let part = MatrixLinear::<B, Dequantized> {
        weight: Arc::new(down),
        bias: None,
        shape: MatShape { rows: rank, cols },
    };
    let summed = maps
        .iter()
        .any(|(shape, held, _)| held.cols.len() < shape.cols);
    let (bias, place) = (None, RankIndex::of(cut));
    Ok(Delta {
        down: match summed {
            true => Box::new(RowParallelLinear { part, bias, place }),
            false => Box::new(part),
        },
        up: load(&up, rows, rank)?,
        rows,
        rank,
        cols,
    })
}

/// The linear attention of a map's value heads, if the model has these in turns of key heads.
fn heads_in_turns<'s>(
    spec: &'s DecoderSpec,
    map: &DecoderTensor,
) -> Option<&'s LinearAttentionSpec> {
    let of_values = matches!(
        map.id.role,
        TensorRole::LinearValue
            | TensorRole::LinearGate
            | TensorRole::LinearBeta
            | TensorRole::LinearStep
            | TensorRole::LinearOutput
    );
    match &spec.layers.get(map.id.layer?)?.attention {
        AttentionSpec::Linear(linear) if of_values => {
            Some(linear).filter(|linear| linear.order == HeadOrder::Interleaved)
        }
        _ => None,
    }
}

/// Consecutive rows of a step that want the same adapter.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Run {
    adapter: AdapterId,
    rows: Range<usize>,
}

/// Activations of runs. Rows are tokens.
pub(crate) struct LoraScratch<B: Backend> {
    /// `[tokens, inputs]`: a run's rows of the input, where they do not come first.
    input: Act<B>,
    /// `[tokens, rank]`.
    low: Act<B>,
    /// `[tokens, outputs]`: what the adapter adds.
    delta: Act<B>,
    /// `[tokens, outputs]`: a run's rows of the output, where they do not come first.
    output: Act<B>,
    rank: usize,
}

/// The adapters of a runner, and which rows of the current step want which.
pub(crate) struct Adapters<B: Backend> {
    loaded: BTreeMap<AdapterId, Adapter<B>>,
    runs: Vec<Run>,
}

impl<B: Backend> Adapters<B> {
    pub(crate) fn new() -> Self {
        Self {
            loaded: BTreeMap::new(),
            runs: Vec::new(),
        }
    }

    /// Takes an adapter, and sees to it that `scratch` is large enough for steps with it. What was captured over memory that is
    /// replaced is forgotten.
    pub(crate) fn insert(
        &mut self,
        (device, graphs): (&B, &mut Graphs),
        spec: &DecoderSpec,
        max_tokens: usize,
        (id, LoadedAdapter { own, .. }): (AdapterId, LoadedAdapter<B>),
        scratch: &mut Option<LoraScratch<B>>,
    ) -> Result<()> {
        let rank = own.rank();
        // It may add nothing to the layers of a stage.
        if rank > 0 && scratch.as_ref().is_none_or(|scratch| scratch.rank < rank) {
            graphs.reset_later();
            let widest = scratch_widths(spec).into_iter().max().unwrap_or(0);
            let alloc = |width| device.alloc::<B::Act>(max_tokens * width);
            *scratch = Some(LoraScratch {
                input: alloc(widest)?,
                low: alloc(rank)?,
                delta: alloc(widest)?,
                output: alloc(widest)?,
                rank,
            });
        }
        if self.loaded.insert(id, own).is_some() {
            graphs.reset_later();
        }
        Ok(())
    }

    /// Whether there was one of that name.
    pub(crate) fn unload(&mut self, id: AdapterId) -> bool {
        self.loaded.remove(&id).is_some()
    }

    /// The first adapter of a batch that is not there.
    pub(crate) fn missing(&self, batch: &StepBatch) -> Option<AdapterId> {
        let mut wanted = batch.adapters.iter().flatten();
        wanted.find(|id| !self.loaded.contains_key(id)).copied()
    }

    /// Cuts a batch into runs; where it is filled up to so many rows, whose adapter is that of all others, they are one.
    pub(crate) fn plan(&mut self, batch: &StepBatch, filled: Option<usize>) {
        self.runs.clear();
        for (seq, adapter) in batch.adapters.iter().enumerate() {
            let (Some(adapter), rows) = (*adapter, batch.rows(seq)) else {
                continue;
            };
            match self.runs.last_mut() {
                Some(run) if run.adapter == adapter && run.rows.end == rows.start => {
                    run.rows.end = rows.end;
                }
                _ if rows.is_empty() => {}
                _ => self.runs.push(Run { adapter, rows }),
            }
        }
        if let (Some(rows), Some(run)) = (filled, self.runs.last_mut()) {
            run.rows.end = rows;
        }
    }

    /// Whether some row of the step has something added to projection `at` of layer `layer`.
    pub(crate) fn adds_to(&self, place: (usize, Projection)) -> bool {
        self.runs.iter().any(|run| self.delta(run, place).is_some())
    }

    /// What a run's adapter has for a projection.
    fn delta(&self, run: &Run, (layer, at): (usize, Projection)) -> Option<&Delta<B>> {
        let deltas = self.loaded.get(&run.adapter)?.layers.get(layer)?;
        deltas[at as usize].as_ref()
    }

    /// Adds what the step's adapters add to projection `at` of layer `layer`, whose input is `x`:
    /// `out[rows, :] += up · (down · x[rows, :])`.
    pub(crate) fn add(
        &self,
        ctx: &mut B::Context,
        place: (usize, Projection),
        x: &Act<B>,
        out: &mut Act<B>,
        scratch: &mut Option<LoraScratch<B>>,
    ) -> Result<()> {
        for run in &self.runs {
            let (Some(delta), Some(scratch)) = (self.delta(run, place), scratch.as_mut()) else {
                continue;
            };
            delta.add(ctx, &run.rows, x, out, scratch)?;
        }
        Ok(())
    }
}

impl<B: Backend> Delta<B> {
    fn add(
        &self,
        ctx: &mut B::Context,
        run: &Range<usize>,
        x: &Act<B>,
        out: &mut Act<B>,
        scratch: &mut LoraScratch<B>,
    ) -> Result<()> {
        let (first, rows) = (run.start, run.len());
        let LoraScratch {
            input,
            low,
            delta,
            output,
            ..
        } = scratch;
        // Ops begin at the first row of a buffer.
        let x = match first {
            0 => x,
            _ => {
                let cols = self.cols;
                B::copy_slice(ctx, x, first * cols, input, 0, rows * cols)?;
                &*input
            }
        };
        let shape = GemmShape {
            rows,
            n: self.rows,
            k: self.rank,
        };
        // [rows, cols] → [rows, rank] → [rows, outputs]
        self.down.forward(ctx, x, low, rows)?;
        B::gemm(ctx, low, &self.up, delta, shape)?;
        let len = rows * self.rows;
        if first == 0 {
            return B::add_inplace(ctx, out, delta, len);
        }
        B::copy_slice(ctx, out, first * self.rows, output, 0, len)?;
        B::add_inplace(ctx, output, delta, len)?;
        B::copy_slice(ctx, output, 0, out, first * self.rows, len)
    }
}
