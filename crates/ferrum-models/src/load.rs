//! From the tensors of a model file to weights on a device.
//!
//! Each tensor's bytes go from the mapped file to the device once. Shapes are checked against the spec
//! before anything is allocated for them. A rank of a group loads its slices by the same functions; alone, a slice is
//! the whole.

mod attention;

use crate::experts::{ExpertSource, ExpertStack, ExpertStacks, ExpertSums};
use crate::input_gather::{GatherScratch, GatheredLinear, InputGather};
use crate::inventory::{
    DecoderTensor, Projection, RankShard, ShardAxis, Stage, TensorId, TensorRole, TensorShape,
};
use crate::layer::{
    AttentionWeights, ExpertNorms, FeedForwardWeights, LayerWeights, MlpWeights, MoeWeights, Norm,
    PerLayerTables, PerLayerWeights, SharedExpertWeights,
};
use crate::linear::{
    Embedding, Linear, LogitLinear, MatrixLinear, RowParallelLinear, VocabParallelEmbedding,
    VocabParallelLinear,
};
use crate::model::Model;
use crate::progress::LoadProgress;
use crate::rank_index::RankIndex;
use crate::runner::{BodyWeights, DecoderWeights, HeadWeights};
use crate::spec::{AttentionSpec, FeedForwardSpec, LayerSpec, MoeSpec, SharedExpertSpec};
use crate::weight_shard::{ExpertSlices, MatShard, Slice};
use crate::weights::{MatrixUse, Prepared, WeightForm, no_experts};
use ferrum_kernels::{ExpertShape, LlmBackend, MatShape, QuantWeights};
use ferrum_types::{Error, Result, SrcDtype, SumSplit};
use std::marker::PhantomData;
use std::sync::Arc;

/// Loads all weights of a model in the form `W`.
///
/// # Errors
/// [`Error::Model`] names the tensor that is missing or has the wrong shape or type;
/// [`Error::Unsupported`] for experts in a form without them; otherwise what the device says.
pub fn load_weights<B: LlmBackend, W: WeightForm<B>>(
    device: &B,
    model: &Model,
    progress: LoadProgress<'_>,
) -> Result<DecoderWeights<B>> {
    let whole = model.whole();
    load_rank_weights::<B, W>(device, model, &whole, progress)
}

/// Loads what a rank of a group holds of a model's weights in the form `W`. They run with
/// [`RankShard::rank_spec`], on a context that has [joined](ferrum_kernels::BackendCollective::join) the group.
///
/// Each rank reads its own slices of the file. A slice that begins or ends inside a block of its format is dequantised
/// to f32; [`Model::shard`] avoids that where it can.
///
/// # Errors
/// As [`load_weights`].
pub fn load_rank_weights<B: LlmBackend, W: WeightForm<B>>(
    device: &B,
    model: &Model,
    cut: &RankShard,
    progress: LoadProgress<'_>,
) -> Result<DecoderWeights<B>> {
    let whole = Stage::whole(&model.spec);
    load_part::<B, W>(device, model, (cut, &whole), progress)
}

/// Loads what a stage holds of a model's weights in the form `W`.
///
/// # Errors
/// As [`load_weights`], of the tensors of this stage alone.
pub fn load_stage_weights<B: LlmBackend, W: WeightForm<B>>(
    device: &B,
    model: &Model,
    stage: &Stage,
    progress: LoadProgress<'_>,
) -> Result<DecoderWeights<B>> {
    let whole = model.whole();
    load_part::<B, W>(device, model, (&whole, stage), progress)
}

/// Loads a rank's part of a stage.
fn load_part<B: LlmBackend, W: WeightForm<B>>(
    device: &B,
    model: &Model,
    (cut, stage): (&RankShard, &Stage),
    progress: LoadProgress<'_>,
) -> Result<DecoderWeights<B>> {
    if *cut.whole_spec() != model.spec {
        let reason = "the cut is that of another model";
        return Err(Error::invalid("load_weights", reason));
    }
    let rank_spec = cut.rank_spec();
    let Some(layers) = rank_spec.layers.get(stage.layers()) else {
        let reason = "the stage is that of another model";
        return Err(Error::invalid("load_weights", reason));
    };
    // Latent attention has a matrix for each head, by the same kernels.
    let has_experts = |layer: &LayerSpec| {
        matches!(layer.feed_forward, FeedForwardSpec::Moe(_))
            || matches!(layer.attention, AttentionSpec::Mla(_))
    };
    if !W::EXPERTS && layers.iter().any(has_experts) {
        return Err(no_experts::<B>());
    }
    let mut loader = Loader::<B, W>::new(device, model, cut);
    loader.progress = Some(progress);
    let tables = loader.tables(stage)?;
    let layers = stage.layers().zip(layers);
    let layers = layers
        .map(|(i, layer)| loader.layer(i, layer))
        .collect::<Result<Vec<_>>>()?;
    let head = match tables.head {
        Some(lm_head) => Some(HeadWeights {
            final_norm: loader.norm(TensorId::global(TensorRole::FinalNorm))?,
            lm_head,
        }),
        None => None,
    };
    model.tensors().release();
    if stage.is_last()
        && let Some(progress) = &mut loader.progress
    {
        progress(loader.total, loader.total);
    }
    Ok(DecoderWeights {
        body: BodyWeights {
            embedding: tables.embedding,
            positions: tables.positions,
            per_layer: tables.per_layer,
            draft: None,
            layers,
            cut: cut.clone(),
            stage: stage.clone(),
        },
        head,
    })
}

/// Loads one layer of a model in the form `W`.
///
/// # Errors
/// As [`load_weights`], of the tensors of this layer alone.
pub(crate) fn load_layer<B: LlmBackend, W: WeightForm<B>>(
    device: &B,
    model: &Model,
    index: usize,
) -> Result<LayerWeights<B>> {
    let Some(layer) = model.spec.layers.get(index) else {
        let reason = format!("the model has no layer {index}");
        return Err(Error::invalid("load_weights", reason));
    };
    let has_experts = matches!(layer.feed_forward, FeedForwardSpec::Moe(_))
        || matches!(layer.attention, AttentionSpec::Mla(_));
    if !W::EXPERTS && has_experts {
        return Err(no_experts::<B>());
    }
    let cut = model.whole();
    let mut loader = Loader::<B, W>::new(device, model, &cut);
    loader.layer(index, layer)
}

/// Loads the embedding table of a model in the form `W`.
///
/// # Errors
/// As [`load_weights`], of this table alone.
pub(crate) fn load_embedding<B: LlmBackend, W: WeightForm<B>>(
    device: &B,
    model: &Model,
) -> Result<Arc<dyn Embedding<B>>> {
    let cut = RankShard::whole(&model.spec);
    let (weight, shape) =
        Loader::<B, W>::new(device, model, &cut).table(TensorRole::TokenEmbedding)?;
    Ok(Arc::new(MatrixLinear::<B, W> {
        weight,
        bias: None,
        shape,
    }))
}

/// A stack in its file: what it is of, and its sizes.
type StoredStack<'a> = (ExpertSource<'a>, DecoderTensor, ExpertShape);

/// The matrices with a row for each token.
struct Tables<B: LlmBackend> {
    embedding: Option<Arc<dyn Embedding<B>>>,
    positions: Option<Box<dyn Embedding<B>>>,
    per_layer: Option<PerLayerTables<B>>,
    head: Option<Arc<dyn LogitLinear<B>>>,
}

struct Loader<'a, 'p, B: LlmBackend, W> {
    device: &'a B,
    model: &'a Model,
    cut: &'a RankShard,
    progress: Option<LoadProgress<'p>>,
    done: u64,
    total: u64,
    gather_scratch: Arc<GatherScratch<B>>,
    form: PhantomData<W>,
}

impl<'a, B: LlmBackend, W: WeightForm<B>> Loader<'a, '_, B, W> {
    /// A loader without progress reports.
    fn new(device: &'a B, model: &'a Model, cut: &'a RankShard) -> Self {
        Self {
            device,
            model,
            cut,
            progress: None,
            done: 0,
            total: model.tensors().total_bytes(),
            gather_scratch: Arc::new(GatherScratch::new(cut)),
            form: PhantomData,
        }
    }

    /// Those that a stage needs; of one that serves for both, the weight is shared.
    fn tables(&mut self, stage: &Stage) -> Result<Tables<B>> {
        let tied = self.model.spec.tie_embeddings;
        let table = match stage.is_first() || (stage.is_last() && tied) {
            true => Some(self.table(TensorRole::TokenEmbedding)?),
            false => None,
        };
        let positions = match stage.is_first() && self.model.spec.learned_positions.is_some() {
            true => Some(self.table(TensorRole::PositionEmbedding)?),
            false => None,
        };
        let per_layer = match self.model.spec.per_layer {
            Some(_) => Some(self.per_layer_tables()?),
            None => None,
        };
        let of = |(weight, shape): &(Arc<W::Matrix>, MatShape)| MatrixLinear::<B, W> {
            weight: Arc::clone(weight),
            bias: None,
            shape: *shape,
        };
        let head = match (stage.is_last(), table.as_ref().filter(|_| tied)) {
            (false, _) => None,
            (true, Some(table)) => Some(MatrixLinear {
                bias: self.bias(&[TensorId::global(TensorRole::Output)])?,
                ..of(table)
            }),
            (true, None) => Some(self.linear(&[TensorId::global(TensorRole::Output)])?),
        };
        let cut = self.cut;
        let embedding = table.as_ref().filter(|_| stage.is_first()).map(of);
        Ok(Tables {
            embedding: embedding.map(|table| -> Arc<dyn Embedding<B>> {
                match cut.is_whole() {
                    true => Arc::new(table),
                    false => Arc::new(VocabParallelEmbedding::new(table, cut)),
                }
            }),
            positions: positions
                .as_ref()
                .map(of)
                .map(|table| -> Box<dyn Embedding<B>> { Box::new(table) }),
            per_layer,
            head: head.map(|head| -> Arc<dyn LogitLinear<B>> {
                match cut.is_whole() {
                    true => Arc::new(head),
                    false => Arc::new(VocabParallelLinear::new(head, cut)),
                }
            }),
        })
    }

    fn per_layer_tables(&mut self) -> Result<PerLayerTables<B>> {
        let (weight, shape) = self.table(TensorRole::PerLayerEmbedding)?;
        let table = MatrixLinear::<B, W> {
            weight,
            bias: None,
            shape,
        };
        let projection = TensorId::global(TensorRole::PerLayerProjection);
        let norm = TensorId::global(TensorRole::PerLayerProjectionNorm);
        Ok(PerLayerTables {
            table: Box::new(table),
            projection: Box::new(self.linear(&[projection])?),
            norm: self.vector(norm)?,
        })
    }

    fn per_layer(&mut self, index: usize) -> Result<PerLayerWeights<B>> {
        let at = |role| TensorId::in_layer(index, role);
        Ok(PerLayerWeights {
            gate: Box::new(self.linear(&[at(TensorRole::PerLayerGate)])?),
            out: Box::new(self.linear(&[at(TensorRole::PerLayerOutput)])?),
            norm: self.norm(at(TensorRole::PerLayerNorm))?,
        })
    }

    fn layer(&mut self, index: usize, spec: &LayerSpec) -> Result<LayerWeights<B>> {
        let [before, behind, before_ffn, behind_ffn] = spec.form.norm_roles();
        let at = |role: Option<_>| role.map(|role| TensorId::in_layer(index, role));
        let mut norm = |role| at(role).map(|id| self.norm(id)).transpose();
        let attn_norm = norm(before)?;
        let post_attn_norm = norm(behind)?;
        let ffn_norm = norm(before_ffn)?;
        let post_ffn_norm = norm(behind_ffn)?;
        let per_layer = match self.model.spec.per_layer {
            Some(_) => Some(self.per_layer(index)?),
            None => None,
        };
        let output_scale = match spec.output_scale {
            true => self.number(TensorId::in_layer(index, TensorRole::OutputScale))?,
            false => None,
        };
        Ok(LayerWeights {
            attn_norm,
            post_attn_norm,
            ffn_norm,
            post_ffn_norm,
            per_layer,
            output_scale,
            attention: match &spec.attention {
                AttentionSpec::Gqa(gqa) => AttentionWeights::Gqa(self.gqa(index, gqa)?),
                AttentionSpec::Mla(mla) => AttentionWeights::Mla(self.mla(index, mla)?),
                AttentionSpec::ShortConv(conv) => {
                    AttentionWeights::ShortConv(self.short_conv(index, conv)?)
                }
                AttentionSpec::Linear(linear) => {
                    AttentionWeights::Linear(self.linear_attention(index, linear)?)
                }
            },
            feed_forward: match &spec.feed_forward {
                FeedForwardSpec::GatedMlp(_) | FeedForwardSpec::Mlp(_) => {
                    FeedForwardWeights::Mlp(self.mlp(index)?)
                }
                FeedForwardSpec::Moe(moe) => FeedForwardWeights::Moe(self.moe(index, moe)?),
            },
        })
    }

    fn mlp(&mut self, index: usize) -> Result<MlpWeights<B>> {
        Ok(MlpWeights {
            gate_up: self.projection(index, Projection::GateUp)?,
            down: self.projection(index, Projection::Down)?,
        })
    }

    fn moe(&mut self, index: usize, moe: &MoeSpec) -> Result<MoeWeights<B>> {
        let at = |role| TensorId::in_layer(index, role);
        let router = Box::new(self.linear(&[at(TensorRole::Router)])?);
        let shared = match moe.shared {
            Some(shared) => Some(self.shared_expert(index, shared)?),
            None => None,
        };
        let correction = moe.routing.correction;
        let correction = correction.then(|| self.vector(at(TensorRole::ExpertCorrection)));
        let correction = correction.transpose()?;
        // All are looked up before one is loaded.
        let roles = [
            TensorRole::ExpertGate,
            TensorRole::ExpertUp,
            TensorRole::ExpertDown,
        ];
        let [gate, up, down] = roles.map(|role| self.experts(at(role)));
        let [gate, up, down] = [gate?, up?, down?];
        let hidden = self.model.spec.hidden_size;
        let stacks = ExpertStacks {
            gate: self.expert_maps(&gate)?,
            up: self.expert_maps(&up)?,
            down: self.expert_maps(&down)?,
            correction,
            scale: match moe.output_scale {
                true => Some(self.vector(at(TensorRole::ExpertScale))?),
                false => None,
            },
            hidden,
        };
        let norms = match moe.norms {
            true => Some(self.expert_norms(index)?),
            false => None,
        };
        Ok(MoeWeights {
            router,
            experts: W::experts(stacks, moe, self.expert_sums(&down.1)),
            shared,
            norms,
        })
    }

    fn expert_norms(&mut self, index: usize) -> Result<ExpertNorms<B>> {
        let at = |role| TensorId::in_layer(index, role);
        let router = self.tensor(at(TensorRole::RouterNorm))?;
        let divisor = (self.model.spec.hidden_size as f32).sqrt();
        let mut weight = self.values(&router)?;
        weight.iter_mut().for_each(|value| *value /= divisor);
        Ok(ExpertNorms {
            router: Norm {
                weight: self.device.from_slice(&weight)?,
                bias: None,
            },
            experts: self.norm(at(TensorRole::ExpertNorm))?,
            post_experts: self.norm(at(TensorRole::PostExpertNorm))?,
            post_shared: self.norm(at(TensorRole::PostSharedNorm))?,
        })
    }

    /// The expert of all tokens. What ranks give of it is put together by itself, as it is computed by itself.
    fn shared_expert(
        &mut self,
        index: usize,
        spec: SharedExpertSpec,
    ) -> Result<SharedExpertWeights<B>> {
        let at = |role| TensorId::in_layer(index, role);
        let down = self.linear(&[at(TensorRole::SharedDown)])?;
        let down = self.row_parallel(at(TensorRole::SharedDown), down);
        let gate_up = [TensorRole::SharedGate, TensorRole::SharedUp].map(at);
        let gate: Option<Box<dyn LogitLinear<B>>> = match spec.gated {
            true => Some(Box::new(self.linear(&[at(TensorRole::SharedRouter)])?)),
            false => None,
        };
        Ok(SharedExpertWeights {
            mlp: MlpWeights {
                gate_up: Box::new(self.linear(&gate_up)?),
                down,
            },
            activation: spec.activation.function(),
            gate,
        })
    }

    /// This rank's part of a map of all experts.
    fn expert_maps(&mut self, stack: &StoredStack<'a>) -> Result<ExpertStack<B, W::Stack>> {
        let (bias, is_sum) = (
            stack.1.id.bias(),
            self.cut.axis(&stack.1) == ShardAxis::Columns,
        );
        let bias = match self.model.spec.tensor(bias) {
            None => None,
            // Of a sum over ranks, the first one adds it.
            Some(_) if is_sum && self.cut.rank() > 0 => None,
            Some(_) => Some(self.vector(bias)?),
        };
        let mut matrices = self.stack(stack)?;
        W::split_stack_sums(&mut matrices, self.cut.sum_split(&stack.1));
        Ok(ExpertStack { matrices, bias })
    }

    /// This rank's part of a stack.
    fn stack(&mut self, (source, tensor, shape): &StoredStack<'a>) -> Result<W::Stack> {
        if self.cut.is_whole() {
            return self.load_stack(source, *shape);
        }
        let (rows, cols) = (shape.n, shape.k);
        let at = MatShard::held(self.cut, tensor, MatShape { rows, cols });
        let part = ExpertSlices::new(source, *shape, &at)?;
        let MatShape { rows: n, cols: k } = at.shape();
        let experts = shape.experts;
        self.load_stack(&part.source(), ExpertShape { experts, n, k })
    }

    fn load_stack(&mut self, source: &ExpertSource<'_>, shape: ExpertShape) -> Result<W::Stack> {
        let stack = W::load_stack(self.device, source, shape)?;
        self.model.tensors().release();
        self.advance(source.stored_bytes());
        Ok(stack)
    }

    /// The maps that a layer computes as one product, of which it may lack some.
    fn projection(&mut self, index: usize, projection: Projection) -> Result<Box<dyn Linear<B>>> {
        let maps = projection.maps(&self.model.spec, index);
        let ids: Vec<_> = maps.iter().map(|tensor| tensor.id).collect();
        let part = self.linear(&ids)?;
        let summed = |map: &&DecoderTensor| map.shard_axis() == ShardAxis::Columns;
        Ok(match maps.iter().find(summed) {
            Some(map) => self.row_parallel(map.id, part),
            None => Box::new(part),
        })
    }

    /// A map whose inputs are dealt out.
    fn row_parallel(&self, id: TensorId, mut part: MatrixLinear<B, W>) -> Box<dyn Linear<B>> {
        if self.cut.is_whole() {
            return Box::new(part);
        }
        let (bias, place) = (part.bias.take(), RankIndex::of(self.cut));
        match self.gather(id) {
            Some(gather) => Box::new(GatheredLinear { part, bias, gather }),
            None => Box::new(RowParallelLinear { part, bias, place }),
        }
    }

    /// The exchanges around the product with a matrix over inputs of all ranks, if it is one.
    fn gather(&self, id: TensorId) -> Option<InputGather<B>> {
        let product = self.cut.gathered(id)?;
        Some(InputGather::new(product, self.cut, &self.gather_scratch))
    }

    fn expert_sums(&self, down: &DecoderTensor) -> ExpertSums<B> {
        match self.gather(down.id) {
            Some(gather) => ExpertSums::Gathered(gather),
            None if self.cut.is_whole() => ExpertSums::Whole,
            None => ExpertSums::Reduced(RankIndex::of(self.cut)),
        }
    }

    /// One product of maps with equally many inputs, with the biases of those that have one.
    fn linear(&mut self, ids: &[TensorId]) -> Result<MatrixLinear<B, W>> {
        let maps = ids.iter().map(|&id| self.matrix(id));
        let maps = maps.collect::<Result<Vec<_>>>()?;
        let rows = maps.iter().map(|(_, shape)| shape.rows).sum();
        let cols = maps.first().map_or(0, |(_, shape)| shape.cols);
        let bias = self.bias(ids)?;
        let mut weights = Vec::with_capacity(maps.len());
        for (&id, (slices, _)) in ids.iter().zip(&maps) {
            weights.extend(slices.iter().map(|slice| (id, slice.weights())));
        }
        let split = match ids {
            [id] => self.cut.sum_split(&self.tensor(*id)?),
            _ => SumSplit::WHOLE,
        };
        Ok(MatrixLinear::<B, W> {
            weight: self.load(&weights, (cols, split), MatrixUse::Products)?,
            bias,
            shape: MatShape { rows, cols },
        })
    }

    /// The biases of maps one behind the other, with zeros for maps that have none; `None` where none has one.
    fn bias(&mut self, ids: &[TensorId]) -> Result<Option<B::Buffer<f32>>> {
        let spec = &self.model.spec;
        let biases: Vec<_> = ids.iter().map(|id| spec.tensor(id.bias())).collect();
        if biases.iter().all(Option::is_none) {
            return Ok(None);
        }
        let mut values = Vec::new();
        for (bias, &id) in biases.iter().zip(ids) {
            match bias {
                Some(bias) => values.extend(self.values(bias)?),
                None => {
                    let rows = self.held(id)?.1.shape().rows;
                    values.resize(values.len() + rows, 0.0);
                }
            }
        }
        self.device.from_slice(&values).map(Some)
    }

    /// A table: rows are looked up, so it must be floats or ggml blocks.
    fn table(&mut self, role: TensorRole) -> Result<(Arc<W::Matrix>, MatShape)> {
        let id = TensorId::global(role);
        let (slices, shape) = self.matrix(id)?;
        let Some(weights) = slices.first().map(Slice::weights) else {
            return Err(not_of_the_spec(id));
        };
        if !matches!(weights, QuantWeights::Gguf(_)) {
            let path = self.model.tensors().path_hint().display();
            let name = self.model.names.stem(role).unwrap_or_default();
            let found = weights.label();
            return Err(Error::Model(format!(
                "{path}: layer \"{name}\" is quantised ({found}), expected an embedding table of floats"
            )));
        }
        let inputs = (shape.cols, SumSplit::WHOLE);
        let table = self.load(&[(id, weights)], inputs, MatrixUse::LookUps)?;
        Ok((table, shape))
    }

    /// A matrix with rows of so many numbers, over which sums are cut like this.
    fn load(
        &mut self,
        parts: &[(TensorId, QuantWeights<'_>)],
        (cols, split): (usize, SumSplit),
        for_use: MatrixUse,
    ) -> Result<Arc<W::Matrix>> {
        let prepared = parts.iter().map(|(id, weights)| {
            let keep = !id.role.widens_floats() || weights.as_dense().is_none();
            Prepared::new(weights, cols, (keep, SrcDtype::F32))
        });
        let prepared = prepared.collect::<Result<Vec<_>>>()?;
        let weights: Vec<_> = prepared.iter().map(Prepared::weights).collect();
        let mut matrix = W::load(self.device, &weights, cols, for_use)?;
        W::split_sums(&mut matrix, split);
        self.model.tensors().release();
        let stored = |(_, part): &(_, QuantWeights<'_>)| part.stored_bytes() as u64;
        self.advance(parts.iter().map(stored).sum());
        Ok(Arc::new(matrix))
    }

    /// A tensor that the model has by its spec.
    fn tensor(&self, id: TensorId) -> Result<DecoderTensor> {
        let tensor = self.model.spec.tensor(id);
        tensor.ok_or_else(|| not_of_the_spec(id))
    }

    /// This rank's part of a matrix, as slices one below the other.
    fn matrix(&self, id: TensorId) -> Result<(Vec<Slice<'a>>, MatShape)> {
        let (tensor, at) = self.held(id)?;
        let shape = tensor.matrix().ok_or_else(|| not_of_the_spec(id))?;
        let matrix = self.model.matrix(&tensor, shape)?;
        Ok((matrix.slices(&at)?, at.shape()))
    }

    /// What this rank holds of a matrix.
    fn held(&self, id: TensorId) -> Result<(DecoderTensor, MatShard)> {
        let tensor = self.tensor(id)?;
        let shape = tensor.matrix().ok_or_else(|| not_of_the_spec(id))?;
        Ok((tensor, MatShard::held(self.cut, &tensor, shape)))
    }

    /// All matrices of a stack, whole.
    fn experts(&self, id: TensorId) -> Result<StoredStack<'a>> {
        let tensor = self.tensor(id)?;
        match tensor.shape {
            TensorShape::Stack(shape) => Ok((self.model.experts(&tensor, shape)?, tensor, shape)),
            _ => Err(not_of_the_spec(id)),
        }
    }

    /// A norm of the residual stream.
    fn norm(&mut self, id: TensorId) -> Result<Norm<B>> {
        let has_bias = self.model.spec.tensor(id.bias()).is_some();
        Ok(Norm {
            weight: self.vector(id)?,
            bias: has_bias.then(|| self.vector(id.bias())).transpose()?,
        })
    }

    /// The only number of a vector.
    fn number(&mut self, id: TensorId) -> Result<Option<f32>> {
        let tensor = self.tensor(id)?;
        Ok(self.values(&tensor)?.first().copied())
    }

    /// A vector on the device, in f32.
    fn vector(&mut self, id: TensorId) -> Result<B::Buffer<f32>> {
        let tensor = self.tensor(id)?;
        let values = self.values(&tensor)?;
        self.device.from_slice(&values)
    }

    /// A vector on the host, in f32.
    fn values(&mut self, tensor: &DecoderTensor) -> Result<Vec<f32>> {
        let (mut values, bytes) = self.model.vector(tensor)?;
        self.advance(bytes);
        let (held, dims) = (self.cut.slice(tensor), tensor.shape.dims());
        match tensor.shape {
            TensorShape::Biases { n, .. } if held.dim == 1 => {
                let rows = values.chunks_exact(n.max(1));
                values = rows
                    .flat_map(|row| &row[held.range.clone()])
                    .copied()
                    .collect();
            }
            _ => {
                let row = dims[1..].iter().product::<usize>();
                values.truncate(held.range.end * row);
                values.drain(..held.range.start * row);
            }
        }
        Ok(values)
    }

    fn advance(&mut self, bytes: u64) {
        self.done += bytes;
        if let Some(progress) = &mut self.progress {
            progress(self.done, self.total);
        }
    }
}

/// The loader asks for what the inventory of the same spec lists, so this is a defect of one of them.
fn not_of_the_spec(id: TensorId) -> Error {
    Error::invalid("load_weights", format!("{id}: the spec has no such tensor"))
}
