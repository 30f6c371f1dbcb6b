//! From a model file to a spec, and from its tensors to weights on a device.
//!
//! Each tensor's bytes go from the mapped file to the device once. Shapes are held against the spec
//! before anything is allocated for them.

use crate::experts::{ExpertSource, ExpertStacks};
use crate::families::{self, Family};
use crate::inventory::{DecoderTensor, Projection, TensorId, TensorRole, TensorShape, WeightNames};
use crate::layer::{FeedForwardWeights, GatedMlpWeights, GqaWeights, LayerWeights, MoeWeights};
use crate::linear::{Embedding, Linear, MatrixLinear};
use crate::runner::DecoderWeights;
use crate::spec::{AttentionSpec, DecoderSpec, FeedForwardSpec, GqaSpec, LayerSpec, MoeSpec};
use crate::stored::to_f32;
use crate::weights::{Prepared, WeightForm, no_experts};
use ferrum_formats::{ModelSource, TensorDtype, TensorSource};
use ferrum_kernels::{ExpertShape, LlmBackend, MatShape, QuantWeights};
use ferrum_types::{Dtype, Error, Result};
use std::marker::PhantomData;
use std::sync::Arc;

/// A model file that has been understood: what it is, and where its weights are.
pub struct Model {
    /// The opened file or folder.
    pub source: ModelSource,
    /// Its family.
    pub family: &'static Family,
    /// What the forward path needs to know of it.
    pub spec: DecoderSpec,
    pub(crate) names: &'static WeightNames,
}

/// Called as weights arrive, with bytes of the file done and in all.
pub type LoadProgress<'a> = &'a mut dyn FnMut(u64, u64);

/// Finds the family of an opened file and reads its spec.
///
/// # Errors
/// [`Error::Model`] for an unknown architecture (naming those that are known) or a bad field.
pub fn read_model(source: ModelSource) -> Result<Model> {
    let (family, spec, names) = families::read_spec(&source)?;
    spec.validate().map_err(|reason| {
        let path = match &source {
            ModelSource::Gguf(gguf) => gguf.path(),
            ModelSource::Hf(folder) => folder.config.path(),
        };
        Error::Model(format!("{}: {reason}", path.display()))
    })?;
    Ok(Model {
        source,
        family,
        spec,
        names,
    })
}

fn tensors_of(source: &ModelSource) -> &dyn TensorSource {
    match source {
        ModelSource::Gguf(gguf) => gguf,
        ModelSource::Hf(folder) => &folder.tensors,
    }
}

impl Model {
    /// The tensors of the file.
    pub fn tensors(&self) -> &dyn TensorSource {
        tensors_of(&self.source)
    }

    /// Whether quantised weights are worth keeping: expanded to f32, the weights would not stay in the
    /// caches of a processor. Below that, f32 costs no speed and rounds nothing.
    pub fn keeps_blocks(&self) -> bool {
        const CACHES: u64 = 64 << 20;
        4 * self.spec.parameters() > CACHES
    }

    /// Whether every matrix is stored in f32, so that a cache of less would be the only rounding.
    pub fn is_f32(&self) -> bool {
        self.tensors()
            .infos()
            .filter(|info| info.shape.len() > 1)
            .all(|info| info.dtype == TensorDtype::Plain(Dtype::F32))
    }

    /// Whether most weights are stored in bf16.
    pub fn is_bf16(&self) -> bool {
        let (mut bf16, mut all) = (0, 0);
        for info in self.tensors().infos() {
            let size = info.shape.iter().product::<usize>();
            all += size;
            if info.dtype == TensorDtype::Plain(Dtype::BF16) {
                bf16 += size;
            }
        }
        2 * bf16 > all
    }
}

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
    let has_experts = |layer: &LayerSpec| matches!(layer.feed_forward, FeedForwardSpec::Moe(_));
    if !W::EXPERTS && model.spec.layers.iter().any(has_experts) {
        return Err(no_experts::<B>());
    }
    let total = model.tensors().total_bytes();
    let mut loader = Loader::<B, W> {
        device,
        model,
        progress,
        done: 0,
        total,
        form: PhantomData,
    };
    let (weight, shape) = loader.table()?;
    let embedding = MatrixLinear::<B, W> {
        weight,
        bias: None,
        shape,
    };
    let lm_head: Box<dyn Linear<B>> = if model.spec.tie_embeddings {
        Box::new(MatrixLinear::<B, W> {
            weight: Arc::clone(&embedding.weight),
            bias: None,
            shape,
        })
    } else {
        loader.linear(&[TensorId::global(TensorRole::Output)])?
    };
    let layers = model.spec.layers.iter().enumerate();
    let layers = layers
        .map(|(i, layer)| loader.layer(i, layer))
        .collect::<Result<Vec<_>>>()?;
    let final_norm = loader.vector(TensorId::global(TensorRole::FinalNorm))?;
    model.tensors().release();
    let loader_total = loader.total;
    (loader.progress)(loader_total, loader_total);
    let embedding: Box<dyn Embedding<B>> = Box::new(embedding);
    Ok(DecoderWeights {
        embedding,
        layers,
        final_norm,
        lm_head,
    })
}

struct Loader<'a, 'p, B: LlmBackend, W> {
    device: &'a B,
    model: &'a Model,
    progress: LoadProgress<'p>,
    done: u64,
    total: u64,
    form: PhantomData<W>,
}

impl<'a, B: LlmBackend, W: WeightForm<B>> Loader<'a, '_, B, W> {
    fn layer(&mut self, index: usize, spec: &LayerSpec) -> Result<LayerWeights<B>> {
        let AttentionSpec::Gqa(gqa) = &spec.attention;
        Ok(LayerWeights {
            attn_norm: self.vector(TensorId::in_layer(index, TensorRole::AttentionNorm))?,
            attention: self.gqa(index, gqa)?,
            ffn_norm: self.vector(TensorId::in_layer(index, TensorRole::FeedForwardNorm))?,
            feed_forward: match &spec.feed_forward {
                FeedForwardSpec::GatedMlp(_) => {
                    FeedForwardWeights::GatedMlp(self.gated_mlp(index)?)
                }
                FeedForwardSpec::Moe(moe) => FeedForwardWeights::Moe(self.moe(index, moe)?),
            },
        })
    }

    fn gqa(&mut self, index: usize, gqa: &GqaSpec) -> Result<GqaWeights<B>> {
        let mut head_norm = |role| {
            let id = gqa.qk_norm.then(|| TensorId::in_layer(index, role));
            id.map(|id| self.vector(id)).transpose()
        };
        let q_norm = head_norm(TensorRole::QueryNorm)?;
        let k_norm = head_norm(TensorRole::KeyNorm)?;
        Ok(GqaWeights {
            qkv: self.projection(index, Projection::Qkv)?,
            q_norm,
            k_norm,
            out: self.projection(index, Projection::AttnOut)?,
        })
    }

    fn gated_mlp(&mut self, index: usize) -> Result<GatedMlpWeights<B>> {
        Ok(GatedMlpWeights {
            gate_up: self.projection(index, Projection::GateUp)?,
            down: self.projection(index, Projection::Down)?,
        })
    }

    fn moe(&mut self, index: usize, moe: &MoeSpec) -> Result<MoeWeights<B>> {
        let at = |role| TensorId::in_layer(index, role);
        let router = self.linear(&[at(TensorRole::Router)])?;
        // All are looked up before one is loaded.
        let roles = [
            TensorRole::ExpertGate,
            TensorRole::ExpertUp,
            TensorRole::ExpertDown,
        ];
        let [gate, up, down] = roles.map(|role| self.experts(at(role)));
        let [(gate, wide), (up, _), (down, narrow)] = [gate?, up?, down?];
        let stacks = ExpertStacks {
            gate: self.stack(&gate, wide)?,
            up: self.stack(&up, wide)?,
            down: self.stack(&down, narrow)?,
            hidden: self.model.spec.hidden_size,
        };
        Ok(MoeWeights {
            router,
            experts: W::experts(stacks, moe),
        })
    }

    fn stack(&mut self, source: &ExpertSource<'_>, shape: ExpertShape) -> Result<W::Stack> {
        let stack = W::load_stack(self.device, source, shape)?;
        self.model.tensors().release();
        self.advance(source.stored_bytes());
        Ok(stack)
    }

    /// The maps that a layer computes as one product.
    fn projection(&mut self, index: usize, projection: Projection) -> Result<Box<dyn Linear<B>>> {
        let roles = projection.roles().iter();
        let ids: Vec<_> = roles.map(|&role| TensorId::in_layer(index, role)).collect();
        self.linear(&ids)
    }

    /// One product of maps with equally many inputs, with the biases of those that have one.
    fn linear(&mut self, ids: &[TensorId]) -> Result<Box<dyn Linear<B>>> {
        let maps = ids.iter().map(|&id| self.matrix(id));
        let maps = maps.collect::<Result<Vec<_>>>()?;
        let rows = maps.iter().map(|(_, shape)| shape.rows).sum();
        let cols = maps.first().map_or(0, |(_, shape)| shape.cols);
        let biases: Vec<_> = ids
            .iter()
            .map(|id| self.model.spec.tensor(id.bias()))
            .collect();
        let bias = match biases.iter().any(Option::is_some) {
            true => {
                let mut values = Vec::with_capacity(rows);
                for (bias, (_, shape)) in biases.iter().zip(&maps) {
                    match bias {
                        Some(bias) => values.extend(self.values(bias)?),
                        None => values.resize(values.len() + shape.rows, 0.0),
                    }
                }
                Some(self.device.from_slice(&values)?)
            }
            false => None,
        };
        let weights: Vec<_> = maps.iter().map(|(weights, _)| *weights).collect();
        Ok(Box::new(MatrixLinear::<B, W> {
            weight: self.load(ids, &weights, cols)?,
            bias,
            shape: MatShape { rows, cols },
        }))
    }

    /// The embedding table: rows are looked up, so it must be floats or ggml blocks.
    fn table(&mut self) -> Result<(Arc<W::Matrix>, MatShape)> {
        let id = TensorId::global(TensorRole::TokenEmbedding);
        let (weights, shape) = self.matrix(id)?;
        if !matches!(weights, QuantWeights::Gguf(_)) {
            let path = self.model.tensors().path_hint().display();
            let (name, found) = (self.model.names.embedding, weights.label());
            return Err(Error::Model(format!(
                "{path}: layer \"{name}\" is quantised ({found}), expected an embedding table of floats"
            )));
        }
        Ok((self.load(&[id], &[weights], shape.cols)?, shape))
    }

    fn load(
        &mut self,
        ids: &[TensorId],
        weights: &[QuantWeights<'_>],
        cols: usize,
    ) -> Result<Arc<W::Matrix>> {
        let prepared = ids.iter().zip(weights).map(|(id, weights)| {
            let keep = !id.role.widens_floats() || weights.floats().is_none();
            Prepared::new(weights, cols, keep)
        });
        let prepared = prepared.collect::<Result<Vec<_>>>()?;
        let parts: Vec<_> = prepared.iter().map(Prepared::weights).collect();
        let matrix = W::load(self.device, &parts, cols)?;
        self.model.tensors().release();
        self.advance(weights.iter().map(|part| part.stored_bytes() as u64).sum());
        Ok(Arc::new(matrix))
    }

    /// A tensor that the model has by its spec.
    fn tensor(&self, id: TensorId) -> Result<DecoderTensor> {
        let tensor = self.model.spec.tensor(id);
        tensor.ok_or_else(|| not_of_the_spec(id))
    }

    fn matrix(&self, id: TensorId) -> Result<(QuantWeights<'a>, MatShape)> {
        let shape = self.tensor(id)?.matrix();
        let shape = shape.ok_or_else(|| not_of_the_spec(id))?;
        Ok((self.model.matrix(id, shape)?, shape))
    }

    fn experts(&self, id: TensorId) -> Result<(ExpertSource<'a>, ExpertShape)> {
        let tensor = self.tensor(id)?;
        match tensor.shape {
            TensorShape::Stack(shape) => Ok((self.model.experts(&tensor, shape)?, shape)),
            TensorShape::Vector(_) | TensorShape::Matrix(_) => Err(not_of_the_spec(id)),
        }
    }

    /// A vector on the device, in f32.
    fn vector(&mut self, id: TensorId) -> Result<B::Buffer<f32>> {
        let tensor = self.tensor(id)?;
        let values = self.values(&tensor)?;
        self.device.from_slice(&values)
    }

    /// A vector on the host, in f32.
    fn values(&mut self, tensor: &DecoderTensor) -> Result<Vec<f32>> {
        let view = self.model.vector(tensor)?;
        let values = to_f32(self.model.tensors(), &view)?;
        self.advance(view.bytes.len() as u64);
        Ok(values)
    }

    fn advance(&mut self, bytes: u64) {
        self.done += bytes;
        (self.progress)(self.done, self.total);
    }
}

/// The loader asks for what the inventory of the same spec lists, so this is a defect of one of them.
fn not_of_the_spec(id: TensorId) -> Error {
    Error::invalid("load_weights", format!("{id}: the spec has no such tensor"))
}
