//! Multi-token prediction (DeepSeek-AI, "DeepSeek-V3 technical report", 2024, section 2.2): the layer behind a model's last
//! one drafts the token after the next.
//!
//! `stream = eh_proj([enorm(embedding of token t + 1) | hnorm(hidden state at t)])`, then a layer as the model's last one,
//! then the norm of the shared head and the model's output projection. The hidden state is the model's behind its final
//! norm, as in `transformers` and vLLM; for further drafts it is the head's own after the norm of the shared head, as
//! in `transformers` and SGLang. Checkpoints repeat the model's embeddings and output projection there; they are not read.
//! Of several such layers the first is used for all drafts.
//!
//! Most checkpoints number the layer as one more of the model's. Those of Qwen3-Next and Qwen 3.5 have it beside the model
//! (`mtp.*`). A model with recurrent layers has one with attention there.

use super::{DraftFeatures, DraftHead, Kind, rms_norm};
use crate::batch::AuxHiddenPoint;
use crate::families;
use crate::inventory::{RankShard, Stage, TensorId, TensorRole, WeightNames, of_expert};
use crate::layer::{DraftInput, DraftJoin, Norm};
use crate::load::{load_embedding, load_layer};
use crate::model::Model;
use crate::named::{Bias, NamedLoader, WeightDtype};
use crate::runner::{BodyWeights, DecoderWeights, HeadWeights, SharedTables};
use crate::spec::{CacheSpec, DecoderSpec, LayerSpec, NormKind};
use crate::weights::WeightForm;
use ferrum_formats::{ModelSource, TensorSource};
use ferrum_kernels::LlmBackend;
use ferrum_types::{Error, Result};

/// The layer in its file, with the model's source.
pub(super) struct Mtp {
    /// The model's file, as that of a decoder which has this layer.
    model: Model,
    layer: MtpLayer,
}

/// Where the layer is in its file.
pub(crate) struct MtpLayer {
    /// A decoder which has this layer as its last: the layer alone, or the model with it.
    pub(crate) spec: DecoderSpec,
    /// How that decoder's weights are called.
    pub(crate) names: &'static WeightNames,
    pub(crate) parts: MtpNames,
}

/// Names of its tensors beside those of the layer, less `.weight`.
pub(crate) struct MtpNames {
    pub(crate) embedding_norm: String,
    pub(crate) hidden_norm: String,
    pub(crate) projection: String,
    /// The norm before the output projection.
    pub(crate) norm: String,
    /// Whether the layer is beside the model.
    beside: bool,
}

/// Keys of `config.json` that say how many such layers there are.
const COUNTS: [&str; 3] = [
    "num_nextn_predict_layers",
    "num_mtp_layers",
    "mtp_num_hidden_layers",
];

/// Reads the layer for multi-token prediction of a model.
///
/// # Errors
/// [`Error::Model`] for a model without one, naming the field or tensor that is missing, and for models that cannot have
/// drafts.
pub fn read_mtp(target: &Model) -> Result<DraftHead> {
    let path = match &target.source {
        ModelSource::Gguf(gguf) => gguf.path(),
        ModelSource::Hf(folder) => folder.config.path(),
    };
    let fail = |reason: &str| Err(Error::Model(format!("{}: {reason}", path.display())));
    let plain = target.spec.norm == NormKind::Rms
        && target.spec.per_layer.is_none()
        && target.spec.learned_positions.is_none();
    let parts = MtpNames::of(&target.source, &target.spec, target.names);
    let projection = format!("{}.weight", parts.projection);
    let (count, field) = count(target)?;
    // The configs of Qwen3-Next do not say that there is one.
    let count = count.unwrap_or(parts.beside.into());
    if count == 0 || !plain {
        return fail(&format!(
            "field \"{field}\": found {count} layers for multi-token prediction, expected at least 1\nhint: \
             --draft-model takes a smaller model or an EAGLE-3 head"
        ));
    }
    if target.tensors().get(&projection).is_none() {
        return fail(&format!(
            "tensor \"{projection}\" is missing, expected the layer for multi-token prediction that \"{field}\" speaks of\n\
             hint: some copies of a model are without it"
        ));
    }
    let Some(layer) = MtpLayer::of(&target.spec, target.names, parts) else {
        return fail(
            "all layers are recurrent, expected one with attention, as that for multi-token prediction is",
        );
    };
    let source = match &target.source {
        ModelSource::Gguf(gguf) => ModelSource::open(gguf.path())?,
        ModelSource::Hf(folder) => ModelSource::open(&folder.dir)?,
    };
    Ok(DraftHead {
        spec: DecoderSpec {
            layers: layer.spec.layers[layer.index()..].to_vec(),
            ..layer.spec.clone()
        },
        features: DraftFeatures {
            target: vec![AuxHiddenPoint::FinalNorm],
            own: AuxHiddenPoint::FinalNorm,
            tokens: None,
        },
        kind: Kind::Mtp(Box::new(Mtp {
            model: Model {
                source,
                family: target.family,
                spec: layer.spec.clone(),
                names: layer.names,
            },
            layer,
        })),
    })
}

/// How many layers of the file of a model predict further tokens, by what it says.
pub(crate) fn further_layers(model: &Model) -> usize {
    let stated = count(model).ok().and_then(|(count, _)| count);
    stated.unwrap_or(0)
}

/// How many such layers a model says it has, if it says that, and in which field.
fn count(target: &Model) -> Result<(Option<usize>, String)> {
    match &target.source {
        ModelSource::Gguf(gguf) => {
            let field = format!("{}.nextn_predict_layers", gguf.architecture()?);
            Ok((gguf.u32(&field)?.map(|count| count as usize), field))
        }
        ModelSource::Hf(folder) => {
            let config = folder.config.text_config()?;
            for key in COUNTS {
                if let Some(count) = config.usize(key)? {
                    return Ok((Some(count), key.into()));
                }
            }
            Ok((None, COUNTS[0].into()))
        }
    }
}

impl MtpLayer {
    /// The layer of a model's file, with parts of these names. It is as the model's last one with attention; `None`: none has
    /// any.
    pub(crate) fn of(
        model: &DecoderSpec,
        names: &'static WeightNames,
        parts: MtpNames,
    ) -> Option<Self> {
        let recurrent = |layer: &&LayerSpec| matches!(layer.cache(), CacheSpec::Recurrent { .. });
        let mut layers = model.layers.iter().rev();
        let layer = layers.find(|layer| !recurrent(layer))?.clone();
        let (before, names) = match parts.beside {
            true => (&[][..], families::mtp_names()),
            false => (&model.layers[..], names),
        };
        let spec = DecoderSpec {
            layers: [before, &[layer]].concat(),
            ..model.clone()
        };
        Some(Self { spec, names, parts })
    }

    /// Its number in its decoder.
    pub(crate) fn index(&self) -> usize {
        self.spec.layers.len() - 1
    }

    /// Whether a tensor belongs to it, or to another layer of its kind.
    pub(crate) fn owns(&self, tensor: &str) -> bool {
        let before = self.names.layer.split("{}").next().unwrap_or_default();
        let number = tensor
            .strip_prefix(before)
            .and_then(|rest| rest.split('.').next());
        let number = number.and_then(|number| number.parse().ok());
        self.parts.beside && tensor.starts_with(MTP)
            || number.is_some_and(|n: usize| n >= self.index())
    }
}

/// With what the names of a layer begin that is beside its model.
const MTP: &str = "mtp.";

impl MtpNames {
    /// Those of the layer of a model's file: behind the model's own, if none is beside them.
    pub(crate) fn of(source: &ModelSource, spec: &DecoderSpec, names: &WeightNames) -> Self {
        let layer = of_expert(names.layer, spec.layers.len());
        let name = |part: &str| format!("{layer}.{part}");
        let beside = |part: &str| format!("{MTP}{part}");
        match source {
            ModelSource::Hf(folder) if folder.tensors.get("mtp.fc.weight").is_some() => Self {
                embedding_norm: beside("pre_fc_norm_embedding"),
                hidden_norm: beside("pre_fc_norm_hidden"),
                projection: beside("fc"),
                norm: beside("norm"),
                beside: true,
            },
            ModelSource::Hf(_) => Self {
                embedding_norm: name("enorm"),
                hidden_norm: name("hnorm"),
                projection: name("eh_proj"),
                norm: name("shared_head.norm"),
                beside: false,
            },
            ModelSource::Gguf(_) => Self {
                embedding_norm: name("nextn.enorm"),
                hidden_norm: name("nextn.hnorm"),
                projection: name("nextn.eh_proj"),
                norm: name("nextn.shared_head_norm"),
                beside: false,
            },
        }
    }
}

impl Mtp {
    /// Its weights on a device.
    pub(super) fn load<B: LlmBackend, W: WeightForm<B>>(
        &self,
        device: &B,
        spec: &DecoderSpec,
        target: &Model,
        shared: SharedTables<B>,
    ) -> Result<DecoderWeights<B>> {
        let layer = load_layer::<B, W>(device, &self.model, self.layer.index())?;
        let none = &mut |_, _| ();
        let mut loader =
            NamedLoader::<B, W>::new(device, &self.model.source, WeightDtype::Stored, none)?;
        let (names, hidden) = (&self.layer.parts, spec.hidden_size);
        let projection =
            loader.load_linear(&[&names.projection], [hidden, 2 * hidden], Bias::None)?;
        let embedding = match shared.embedding {
            Some(table) => table,
            None => load_embedding::<B, W>(device, target)?,
        };
        let Some(lm_head) = shared.lm_head else {
            let reason = "the output projection of the target is not on the device";
            return Err(Error::invalid("draft head", reason));
        };
        let offset = target.names.norm_offset;
        let mut norm = |name: &str| rms_norm(&mut loader, name, (hidden, offset));
        Ok(DecoderWeights {
            body: BodyWeights {
                embedding: Some(embedding),
                positions: None,
                per_layer: None,
                draft: Some(DraftInput {
                    embedding_norm: norm(&names.embedding_norm)?,
                    hidden_norm: norm(&names.hidden_norm)?,
                    vocab_size: spec.vocab_size,
                    join: DraftJoin::Project(Box::new(projection)),
                }),
                layers: vec![layer],
                cut: RankShard::whole(spec),
                stage: Stage::whole(spec),
            },
            head: Some(HeadWeights {
                final_norm: self.final_norm(&mut norm)?,
                lm_head,
            }),
        })
    }

    /// The norm before the output projection. Some GGUF files leave it out where it is the model's.
    fn final_norm<B: LlmBackend>(
        &self,
        norm: &mut impl FnMut(&str) -> Result<Norm<B>>,
    ) -> Result<Norm<B>> {
        let own = format!("{}.weight", self.layer.parts.norm);
        let models = self
            .model
            .names
            .module(TensorId::global(TensorRole::FinalNorm));
        match (&self.model.source, models) {
            (ModelSource::Gguf(gguf), Some(models)) if gguf.get(&own).is_none() => norm(&models),
            _ => norm(&self.layer.parts.norm),
        }
    }
}
