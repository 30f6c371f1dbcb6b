//! From a model file to a spec, and from its tensors to weights on a device.
//!
//! Each tensor's bytes go from the mapped file to the device once. Shapes are held against the spec
//! before anything is allocated for them.

use crate::checkpoint::{Checkpoint, block_type};
use crate::experts::{ExpertSource, ExpertStacks};
use crate::families::{self, Family, WeightNames};
use crate::layer::{FeedForwardWeights, GatedMlpWeights, GqaWeights, LayerWeights, MoeWeights};
use crate::linear::{Embedding, Linear, MatrixLinear};
use crate::plan::parameters;
use crate::runner::DecoderWeights;
use crate::spec::{
    AttentionSpec, DecoderSpec, FeedForwardSpec, GatedMlpSpec, GqaSpec, LayerSpec, MoeSpec,
};
use crate::weights::{WeightForm, no_experts};
use ferrum_formats::{ModelSource, TensorDtype, TensorSource, TensorView};
use ferrum_kernels::{ExpertShape, LlmBackend, MatShape, QuantPart, QuantWeights};
use ferrum_types::{Dtype, Error, GgufQuantType, Result};
use std::collections::BTreeMap;
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
        4 * parameters(&self.spec) > CACHES
    }

    /// How the matrix `name` (less `.weight`) lies in the file.
    ///
    /// # Errors
    /// [`Error::Model`] names the tensor that is missing, or has another shape or type than expected.
    pub(crate) fn matrix(&self, name: &str, shape: MatShape) -> Result<QuantWeights<'_>> {
        Checkpoint::new(&self.source).matrix(name, shape)
    }

    /// Names (less `.weight`) and shapes of all matrices but the experts', the embedding first.
    pub(crate) fn matrices(&self) -> Vec<(String, MatShape)> {
        let (names, spec) = (self.names, &self.spec);
        let shape = |rows: usize, cols: usize| MatShape { rows, cols };
        let hidden = spec.hidden_size;
        let table = shape(spec.vocab_size, hidden);
        let mut all = vec![(names.embedding.to_owned(), table)];
        if !spec.tie_embeddings {
            all.push((names.lm_head.to_owned(), table));
        }
        for (i, layer) in spec.layers.iter().enumerate() {
            let AttentionSpec::Gqa(gqa) = &layer.attention;
            let (q_dim, kv_dim) = (gqa.heads * gqa.head_dim, gqa.kv_heads * gqa.head_dim);
            let mut parts = vec![
                (names.q, shape(q_dim, hidden)),
                (names.k, shape(kv_dim, hidden)),
                (names.v, shape(kv_dim, hidden)),
                (names.attn_out, shape(hidden, q_dim)),
            ];
            match &layer.feed_forward {
                FeedForwardSpec::GatedMlp(mlp) => parts.extend([
                    (names.gate, shape(mlp.intermediate, hidden)),
                    (names.up, shape(mlp.intermediate, hidden)),
                    (names.down, shape(hidden, mlp.intermediate)),
                ]),
                FeedForwardSpec::Moe(moe) => parts.push((names.router, shape(moe.experts, hidden))),
            }
            let named = parts.into_iter();
            all.extend(named.map(|(part, shape)| (names.in_layer(i, part), shape)));
        }
        all
    }

    /// The experts of layer `index` as they lie in the file.
    ///
    /// # Errors
    /// As [`matrix`](Self::matrix).
    pub(crate) fn experts(
        &self,
        index: usize,
        moe: &MoeSpec,
    ) -> Result<ExpertStacks<ExpertSource<'_>>> {
        let (stacks, hidden) = (&self.names.experts, self.spec.hidden_size);
        let shape = |n, k| ExpertShape {
            experts: moe.experts,
            n,
            k,
        };
        let (wide, narrow) = (
            shape(moe.intermediate, hidden),
            shape(hidden, moe.intermediate),
        );
        let joined = stacks.joined.map(|(gate_up, down)| {
            let name = |part| self.names.in_layer(index, part);
            (name(gate_up), name(down))
        });
        let joined = joined.filter(|(gate_up, _)| self.tensors().get(gate_up).is_some());
        let (gate, up, down) = match joined {
            Some((gate_up, down)) => (
                self.stack_part(&gate_up, (0, 2), wide)?,
                self.stack_part(&gate_up, (1, 2), wide)?,
                self.stack_part(&down, (0, 1), narrow)?,
            ),
            None => (
                self.stack(index, stacks.gate, wide)?,
                self.stack(index, stacks.up, wide)?,
                self.stack(index, stacks.down, narrow)?,
            ),
        };
        Ok(ExpertStacks {
            gate,
            up,
            down,
            hidden,
        })
    }

    /// The matrices called `part` of all experts in a layer: one tensor, or one for each expert.
    fn stack(&self, index: usize, part: &str, shape: ExpertShape) -> Result<ExpertSource<'_>> {
        let ExpertShape { experts, n, k } = shape;
        let name = self.names.in_layer(index, part);
        if part.contains("{}") {
            let name = |expert: usize| name.replace("{}", &expert.to_string());
            let matrix = MatShape { rows: n, cols: k };
            let all = (0..experts).map(|e| self.matrix(&name(e), matrix));
            return Ok(ExpertSource::Each(all.collect::<Result<_>>()?));
        }
        let whole = tensor(self.tensors(), &format!("{name}.weight"), &[experts, n, k])?;
        Ok(ExpertSource::Stack(QuantPart {
            bytes: whole.bytes,
            ty: float_type(self.tensors(), &whole)?,
            rows: experts * n,
        }))
    }

    /// Part `which` of `count` below each other in every matrix of the stack called `name`.
    fn stack_part(
        &self,
        name: &str,
        (which, count): (usize, usize),
        shape: ExpertShape,
    ) -> Result<ExpertSource<'_>> {
        let ExpertShape { experts, n, k } = shape;
        let whole = tensor(self.tensors(), name, &[experts, count * n, k])?;
        let ty = float_type(self.tensors(), &whole)?;
        // Checked with the tensor's shape: all parts are equally long.
        let size = whole.bytes.len() / (experts * count);
        let part = |bytes| QuantWeights::Gguf(QuantPart { bytes, ty, rows: n });
        let parts = whole.bytes.chunks_exact(size.max(1));
        let parts = parts.skip(which).step_by(count).map(part).collect();
        Ok(ExpertSource::Each(parts))
    }

    /// What of the weights is expanded to f32 by a device that computes as they are on those for
    /// which `native` holds, and `native_expert` of experts that are a matrix each; each scheme once,
    /// with the number of its matrices where not all are.
    pub fn expanded(
        &self,
        native: impl Fn(&QuantWeights<'_>) -> bool,
        native_expert: impl Fn(&QuantWeights<'_>) -> bool,
    ) -> Vec<String> {
        let mut found: BTreeMap<String, (usize, usize)> = BTreeMap::new();
        let mut count = |weights: &QuantWeights<'_>, native: bool| {
            if weights.floats().is_none() {
                let (expanded, all) = found.entry(weights.label()).or_default();
                *expanded += usize::from(!native);
                *all += 1;
            }
        };
        // A matrix that cannot be read is for the loader to report.
        for (name, shape) in self.matrices() {
            if let Ok(weights) = self.matrix(&name, shape) {
                count(&weights, native(&weights));
            }
        }
        for (i, layer) in self.spec.layers.iter().enumerate() {
            let FeedForwardSpec::Moe(moe) = &layer.feed_forward else {
                continue;
            };
            let Ok(stacks) = self.experts(i, moe) else {
                continue;
            };
            for source in [stacks.gate, stacks.up, stacks.down] {
                match source {
                    ExpertSource::Stack(part) => {
                        let weights = QuantWeights::Gguf(part);
                        count(&weights, native(&weights));
                    }
                    ExpertSource::Each(all) => {
                        let native = all.iter().all(&native_expert);
                        all.iter().for_each(|weights| count(weights, native));
                    }
                }
            }
        }
        let found = found.into_iter().filter(|(_, (expanded, _))| *expanded > 0);
        found
            .map(|(label, (expanded, all))| match expanded == all {
                true => label,
                false => format!("{label} ({expanded} of {all} matrices)"),
            })
            .collect()
    }

    /// Whether a matrix is stored as integers, which a device may multiply as such.
    pub fn has_integers(&self) -> bool {
        self.matrices().into_iter().any(|(name, shape)| {
            let weights = self.matrix(&name, shape);
            weights.is_ok_and(|w| w.floats().is_none() && !matches!(w, QuantWeights::Fp8(_)))
        })
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
    let spec = &model.spec;
    let (vocab, hidden) = (spec.vocab_size, spec.hidden_size);
    let table = MatShape {
        rows: vocab,
        cols: hidden,
    };
    let embedding = MatrixLinear::<B, W> {
        weight: loader.table(model.names.embedding, table)?,
        bias: None,
        shape: table,
    };
    let lm_head: Box<dyn Linear<B>> = if spec.tie_embeddings {
        Box::new(MatrixLinear::<B, W> {
            weight: Arc::clone(&embedding.weight),
            bias: None,
            shape: table,
        })
    } else {
        loader.linear(&[(model.names.lm_head, vocab)], hidden, false)?
    };
    let layers = spec.layers.iter().enumerate();
    let layers = layers
        .map(|(i, layer)| loader.layer(i, layer))
        .collect::<Result<Vec<_>>>()?;
    let final_norm = loader.vector(model.names.final_norm, hidden)?;
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

impl<B: LlmBackend, W: WeightForm<B>> Loader<'_, '_, B, W> {
    fn layer(&mut self, index: usize, spec: &LayerSpec) -> Result<LayerWeights<B>> {
        let names = self.model.names;
        let hidden = self.model.spec.hidden_size;
        let AttentionSpec::Gqa(gqa) = &spec.attention;
        Ok(LayerWeights {
            attn_norm: self.vector(&names.in_layer(index, names.attn_norm), hidden)?,
            attention: self.gqa(index, gqa)?,
            ffn_norm: self.vector(&names.in_layer(index, names.ffn_norm), hidden)?,
            feed_forward: match &spec.feed_forward {
                FeedForwardSpec::GatedMlp(mlp) => {
                    FeedForwardWeights::GatedMlp(self.gated_mlp(index, mlp)?)
                }
                FeedForwardSpec::Moe(moe) => FeedForwardWeights::Moe(self.moe(index, moe)?),
            },
        })
    }

    fn gqa(&mut self, index: usize, gqa: &GqaSpec) -> Result<GqaWeights<B>> {
        let names = self.model.names;
        let hidden = self.model.spec.hidden_size;
        let name = |part: &str| names.in_layer(index, part);
        let (q, k, v) = (name(names.q), name(names.k), name(names.v));
        let (q_dim, kv_dim) = (gqa.heads * gqa.head_dim, gqa.kv_heads * gqa.head_dim);
        let parts = [(&*q, q_dim), (&*k, kv_dim), (&*v, kv_dim)];
        let mut head_norm = |part: &str| -> Result<Option<B::Buffer<f32>>> {
            if !gqa.qk_norm {
                return Ok(None);
            }
            self.vector(&name(part), gqa.head_dim).map(Some)
        };
        let (q_norm, k_norm) = (head_norm(names.q_norm)?, head_norm(names.k_norm)?);
        Ok(GqaWeights {
            qkv: self.linear(&parts, hidden, gqa.qkv_bias)?,
            q_norm,
            k_norm,
            out: self.linear(&[(&name(names.attn_out), hidden)], q_dim, gqa.out_bias)?,
        })
    }

    fn gated_mlp(&mut self, index: usize, mlp: &GatedMlpSpec) -> Result<GatedMlpWeights<B>> {
        let names = self.model.names;
        let hidden = self.model.spec.hidden_size;
        let name = |part: &str| names.in_layer(index, part);
        let (gate, up) = (name(names.gate), name(names.up));
        let parts = [(&*gate, mlp.intermediate), (&*up, mlp.intermediate)];
        Ok(GatedMlpWeights {
            gate_up: self.linear(&parts, hidden, mlp.bias)?,
            down: self.linear(&[(&name(names.down), hidden)], mlp.intermediate, mlp.bias)?,
        })
    }

    fn moe(&mut self, index: usize, moe: &MoeSpec) -> Result<MoeWeights<B>> {
        let (names, hidden) = (self.model.names, self.model.spec.hidden_size);
        let router = names.in_layer(index, names.router);
        let shape = |n, k| ExpertShape {
            experts: moe.experts,
            n,
            k,
        };
        let (wide, narrow) = (
            shape(moe.intermediate, hidden),
            shape(hidden, moe.intermediate),
        );
        let router = self.router(&router, moe.experts)?;
        let stacks = self.model.experts(index, moe)?;
        let stacks = ExpertStacks {
            gate: self.stack(&stacks.gate, wide)?,
            up: self.stack(&stacks.up, wide)?,
            down: self.stack(&stacks.down, narrow)?,
            hidden,
        };
        Ok(MoeWeights {
            router,
            experts: W::experts(stacks, moe),
        })
    }

    /// Floats in f32: some levels round what they multiply by less, and a rounded score could choose
    /// other experts.
    fn router(&mut self, name: &str, experts: usize) -> Result<Box<dyn Linear<B>>> {
        let shape = MatShape {
            rows: experts,
            cols: self.model.spec.hidden_size,
        };
        let weights = self.model.matrix(name, shape)?;
        let weight = match weights.floats() {
            Some(_) => {
                let values = weights.expand("load_weights", shape.cols)?;
                let part = QuantPart {
                    bytes: bytemuck::cast_slice(&values),
                    ty: GgufQuantType::F32,
                    rows: shape.rows,
                };
                self.load(&[QuantWeights::Gguf(part)], shape.cols)?
            }
            None => self.load(&[weights], shape.cols)?,
        };
        Ok(Box::new(MatrixLinear::<B, W> {
            weight,
            bias: None,
            shape,
        }))
    }

    fn stack(&mut self, source: &ExpertSource<'_>, shape: ExpertShape) -> Result<W::Stack> {
        let stack = W::load_stack(self.device, source, shape)?;
        self.model.tensors().release();
        self.advance(source.stored_bytes());
        Ok(stack)
    }

    /// One projection from named parts `(name without suffix, rows)`, with the biases of all of them.
    fn linear(
        &mut self,
        parts: &[(&str, usize)],
        cols: usize,
        bias: bool,
    ) -> Result<Box<dyn Linear<B>>> {
        let rows = parts.iter().map(|part| part.1).sum();
        let bias = if bias {
            let mut values = Vec::with_capacity(rows);
            for (name, rows) in parts {
                values.extend(self.values(&format!("{name}.bias"), *rows)?);
            }
            Some(self.device.from_slice(&values)?)
        } else {
            None
        };
        let weight = self.weight(parts, cols)?;
        Ok(Box::new(MatrixLinear::<B, W> {
            weight,
            bias,
            shape: MatShape { rows, cols },
        }))
    }

    /// The weight of [`linear`](Self::linear).
    fn weight(&mut self, parts: &[(&str, usize)], cols: usize) -> Result<Arc<W::Matrix>> {
        let mut weights = Vec::with_capacity(parts.len());
        for &(name, rows) in parts {
            weights.push(self.model.matrix(name, MatShape { rows, cols })?);
        }
        self.load(&weights, cols)
    }

    /// The embedding table: rows are looked up, so it must be floats or ggml blocks.
    fn table(&mut self, name: &str, shape: MatShape) -> Result<Arc<W::Matrix>> {
        let weights = self.model.matrix(name, shape)?;
        if !matches!(weights, QuantWeights::Gguf(_)) {
            let path = self.model.tensors().path_hint().display();
            let found = weights.label();
            return Err(Error::Model(format!(
                "{path}: layer \"{name}\" is quantised ({found}), expected an embedding table of floats"
            )));
        }
        self.load(&[weights], shape.cols)
    }

    fn load(&mut self, weights: &[QuantWeights<'_>], cols: usize) -> Result<Arc<W::Matrix>> {
        let matrix = W::load(self.device, weights, cols)?;
        self.model.tensors().release();
        self.advance(weights.iter().map(|part| part.stored_bytes() as u64).sum());
        Ok(Arc::new(matrix))
    }

    /// A vector on the device, in f32. `name` is the whole name less `.weight`.
    fn vector(&mut self, name: &str, len: usize) -> Result<B::Buffer<f32>> {
        let values = self.values(&format!("{name}.weight"), len)?;
        self.device.from_slice(&values)
    }

    /// A vector on the host, in f32.
    fn values(&mut self, name: &str, len: usize) -> Result<Vec<f32>> {
        let tensors = self.model.tensors();
        let view = tensor(tensors, name, &[len])?;
        let values = to_f32(tensors, &view)?;
        self.advance(view.bytes.len() as u64);
        Ok(values)
    }

    fn advance(&mut self, bytes: u64) {
        self.done += bytes;
        (self.progress)(self.done, self.total);
    }
}

/// A tensor that must be there and have this shape.
fn tensor<'a>(
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
        .map_err(|e| wrong_tensor(tensors, view, &format!("cannot be expanded: {e}")))?;
    Ok(values)
}
