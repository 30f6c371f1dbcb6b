//! EAGLE-3 (Li et al., "EAGLE-3: scaling up inference acceleration of large language models via training-time test",
//! 2025) in folders of the architecture `LlamaForCausalLMEagle3`.
//!
//! `fc` makes the stream of the target's residual streams behind three layers. The only layer, `midlayer`, is one of Llama
//! whose attention reads `[input_layernorm(embedding) | hidden_norm(stream)]`. Behind it stand a norm and an output
//! projection of `draft_vocab_size` tokens; token `i` of these is token `i + d2t[i]` of the target. For the draft after the
//! next, the stream behind the layer is that of the next position, without `fc`. A folder without `embed_tokens` has the
//! target's embeddings.
//!
//! The target's streams are those that go *into* layers 2, `n / 2` and `n - 3`. Configs may name others, in two ways: the
//! layers that they are *behind* in `eagle_config.eagle_aux_hidden_state_layer_ids` (SpecForge, SGLang), or those that
//! they go into in a field of this name outside of it (vLLM).

use super::{DraftFeatures, DraftHead, Kind, rms_norm};
use crate::batch::AuxHiddenPoint;
use crate::families;
use crate::inventory::{RankShard, Stage};
use crate::layer::{
    AttentionWeights, DraftInput, DraftJoin, FeedForwardWeights, GqaWeights, LayerWeights,
    MlpWeights,
};
use crate::linear::{Embedding, LogitLinear};
use crate::load::load_embedding;
use crate::model::Model;
use crate::named::{Bias, LinearPart, NamedLoader, WeightDtype};
use crate::runner::{BodyWeights, DecoderWeights, HeadWeights, SharedTables};
use crate::spec::{AttentionSpec, DecoderSpec, FeedForwardSpec, GqaSpec, MlpSpec, QkNormSpec};
use crate::stored::require;
use crate::weights::WeightForm;
use ferrum_formats::{HfConfig, HfFolder, ModelSource, TensorDtype, TensorSource};
use ferrum_kernels::LlmBackend;
use ferrum_types::{Dtype, Error, Result, TokenId};
use std::sync::Arc;

/// The field that names layers.
const LAYER_IDS: &str = "eagle_aux_hidden_state_layer_ids";

/// A head in its folder.
pub(super) struct Eagle3 {
    source: ModelSource,
    /// Numbers that `fc` reads for each token.
    width: usize,
    /// Tokens that may go in.
    vocab_size: usize,
    normed_stream: bool,
}

/// Reads an EAGLE-3 head for a target.
///
/// # Errors
/// [`Error::Model`] names the field or tensor that does not fit the target, what was found and what was expected.
pub fn read_eagle3(source: ModelSource, target: &Model) -> Result<DraftHead> {
    let ModelSource::Hf(folder) = &source else {
        let reason = "an EAGLE-3 head is read from a Hugging Face folder, found a GGUF file";
        return Err(Error::Model(reason.into()));
    };
    let config = &folder.config;
    let Some(llama) = families::named("llama") else {
        return Err(Error::invalid("draft head", "there is no family llama"));
    };
    let mut spec = (llama.from_hf)(config)?;
    let wrong = |field: &str, expected: String| Err(config.field_error(field, expected).into());
    if config.value("is_causal") == Some(&false.into()) {
        return wrong(
            "is_causal",
            "true: a head drafts one token after the other".into(),
        );
    }
    if spec.layers.len() != 1 {
        return wrong("num_hidden_layers", "1".into());
    }
    if spec.vocab_size != target.spec.vocab_size {
        let expected = format!("{}, the vocabulary of the target", target.spec.vocab_size);
        return wrong("vocab_size", expected);
    }
    let hidden = target.spec.hidden_size;
    if let Some(found) = config.usize("target_hidden_size")?
        && found != hidden
    {
        return wrong("target_hidden_size", format!("{hidden}, as the target has"));
    }
    let target_points = tap_points(config, target.spec.layers.len())?;
    let vocab_size = spec.vocab_size;
    let tokens = tokens(folder, vocab_size)?;
    spec.vocab_size = tokens.as_ref().map_or(vocab_size, |tokens| tokens.len());
    spec.family = "eagle3";
    spec.tie_embeddings = false;
    spec.validate()
        .map_err(|reason| Error::Model(format!("{}: {reason}", config.path().display())))?;
    let normed_stream = config.bool("norm_before_residual")?.unwrap_or(false);
    let width = target_points.len() * hidden;
    Ok(DraftHead {
        features: DraftFeatures {
            target: target_points,
            own: AuxHiddenPoint::Layer(0),
            tokens: tokens.map(Arc::from),
        },
        spec,
        kind: Kind::Eagle3(Box::new(Eagle3 {
            width,
            vocab_size,
            normed_stream,
            source,
        })),
    })
}

/// Behind which layers of a target with so many the head reads the stream.
fn tap_points(config: &HfConfig, layers: usize) -> Result<Vec<AuxHiddenPoint>> {
    let section = config.section("eagle_config")?;
    if let Some(section) = &section {
        if section.bool("use_aux_hidden_state")? == Some(false) {
            let expected = "true: heads that read one layer are EAGLE and EAGLE-2";
            return Err(section.field_error("use_aux_hidden_state", expected).into());
        }
        let behind = section.usizes(LAYER_IDS)?.unwrap_or_default();
        if let Some(points) = points(&behind, layers) {
            return Ok(points);
        }
        if !behind.is_empty() {
            let expected = format!("layers of the target, 0 to {}", layers - 1);
            return Err(section.field_error(LAYER_IDS, expected).into());
        }
    }
    let into = config.usizes(LAYER_IDS)?.unwrap_or_default();
    let (into, stated) = match into.is_empty() {
        true => (vec![2, layers / 2, layers.saturating_sub(3)], false),
        false => (into, true),
    };
    // What goes into a layer is behind the one before it.
    let behind: Vec<_> = into.iter().map(|&layer| layer.wrapping_sub(1)).collect();
    points(&behind, layers).ok_or_else(|| {
        let expected = match stated {
            true => format!("1 to {layers}, as the target has {layers} layers"),
            false => format!(
                "the layers to read: those by default need a target of at least 4 layers, this one has {layers}"
            ),
        };
        config.field_error(LAYER_IDS, expected).into()
    })
}

/// Behind these layers, if all of them are there and there are some.
fn points(behind: &[usize], layers: usize) -> Option<Vec<AuxHiddenPoint>> {
    let point = |&layer: &usize| (layer < layers).then_some(AuxHiddenPoint::Layer(layer as u32));
    let all: Option<Vec<_>> = behind.iter().map(point).collect();
    all.filter(|all| !all.is_empty())
}

/// The target's token for each of the head's; `None` where the vocabulary is the same.
fn tokens(folder: &HfFolder, vocab_size: usize) -> Result<Option<Vec<TokenId>>> {
    let config = &folder.config;
    let count = config.usize("draft_vocab_size")?.unwrap_or(vocab_size);
    if count == 0 || count > vocab_size {
        let expected = format!("1 to {vocab_size}, the vocabulary of the target");
        return Err(config.field_error("draft_vocab_size", expected).into());
    }
    let tensors = &folder.tensors;
    if count == vocab_size && tensors.get("d2t").is_none() {
        return Ok(None);
    }
    let view = require(tensors, "d2t", &[count])?;
    let fail = |reason: String| {
        let path = tensors.path_hint().display();
        Err(Error::Model(format!("{path}: tensor \"d2t\" {reason}")))
    };
    if view.dtype != TensorDtype::Plain(Dtype::I64) {
        let found = view.dtype.name();
        return fail(format!("has element type {found}, expected i64"));
    }
    let (offsets, _) = view.bytes.as_chunks::<8>();
    let mut tokens = Vec::with_capacity(count);
    for (index, offset) in offsets.iter().enumerate() {
        let offset = i64::from_le_bytes(*offset);
        let token = (index as i64).checked_add(offset);
        let token = token.and_then(|token| TokenId::try_from(token).ok());
        match token.filter(|&token| (token as usize) < vocab_size) {
            Some(token) => tokens.push(token),
            None => {
                return fail(format!(
                    "maps token {index} by {offset} outside of the vocabulary of {vocab_size}"
                ));
            }
        }
    }
    Ok(Some(tokens))
}

impl Eagle3 {
    /// Its weights on a device.
    pub(super) fn load<B: LlmBackend, W: WeightForm<B>>(
        &self,
        device: &B,
        spec: &DecoderSpec,
        target: &Model,
        shared: SharedTables<B>,
    ) -> Result<DecoderWeights<B>> {
        let hidden = spec.hidden_size;
        let none = &mut |_, _| ();
        let mut loader = NamedLoader::<B, W>::new(device, &self.source, WeightDtype::Stored, none)?;
        let fuse = loader.load_linear(&["fc"], [hidden, self.width], Bias::Some)?;
        let layer = layer(&mut loader, spec)?;
        let SharedTables { embedding, lm_head } = shared;
        let embedding = self.embedding(&mut loader, spec, (target, embedding))?;
        let lm_head = self.lm_head(&mut loader, spec, (target, lm_head))?;
        let mut norm = |name: &str| rms_norm(&mut loader, name, (hidden, 0.0));
        Ok(DecoderWeights {
            body: BodyWeights {
                embedding: Some(embedding),
                positions: None,
                per_layer: None,
                draft: Some(DraftInput {
                    embedding_norm: norm("midlayer.input_layernorm")?,
                    hidden_norm: norm("midlayer.hidden_norm")?,
                    vocab_size: self.vocab_size,
                    join: DraftJoin::Attend {
                        fuse: Box::new(fuse),
                        normed_stream: self.normed_stream,
                    },
                }),
                layers: vec![layer],
                cut: RankShard::whole(spec),
                stage: Stage::whole(spec),
            },
            head: Some(HeadWeights {
                final_norm: norm("norm")?,
                lm_head,
            }),
        })
    }

    fn has(&self, name: &str) -> bool {
        match &self.source {
            ModelSource::Hf(folder) => folder.tensors.get(name).is_some(),
            ModelSource::Gguf(_) => false,
        }
    }

    /// Its own table, or the target's.
    fn embedding<B: LlmBackend, W: WeightForm<B>>(
        &self,
        loader: &mut NamedLoader<'_, '_, B, W>,
        spec: &DecoderSpec,
        (target, shared): (&Model, Option<Arc<dyn Embedding<B>>>),
    ) -> Result<Arc<dyn Embedding<B>>> {
        let same_width = target.spec.hidden_size == spec.hidden_size;
        if self.has("embed_tokens.weight") || !same_width {
            let shape = [self.vocab_size, spec.hidden_size];
            return Ok(Arc::new(loader.load_table("embed_tokens", shape)?));
        }
        match shared {
            Some(table) => Ok(table),
            None => load_embedding::<B, W>(loader.device(), target),
        }
    }

    /// Its own output projection, or the target's where that has as many rows.
    fn lm_head<B: LlmBackend, W: WeightForm<B>>(
        &self,
        loader: &mut NamedLoader<'_, '_, B, W>,
        spec: &DecoderSpec,
        (target, shared): (&Model, Option<Arc<dyn LogitLinear<B>>>),
    ) -> Result<Arc<dyn LogitLinear<B>>> {
        let (rows, hidden) = (spec.vocab_size, spec.hidden_size);
        let fits = (rows, hidden) == (target.spec.vocab_size, target.spec.hidden_size);
        match shared.filter(|_| fits && !self.has("lm_head.weight")) {
            Some(shared) => Ok(shared),
            None => Ok(Arc::new(loader.load_linear(
                &["lm_head"],
                [rows, hidden],
                Bias::None,
            )?)),
        }
    }
}

/// The layer, whose norm before attention stands before it.
fn layer<B: LlmBackend, W: WeightForm<B>>(
    loader: &mut NamedLoader<'_, '_, B, W>,
    spec: &DecoderSpec,
) -> Result<LayerWeights<B>> {
    let (Some(AttentionSpec::Gqa(gqa)), Some(FeedForwardSpec::GatedMlp(mlp))) = (
        spec.layers.first().map(|layer| &layer.attention),
        spec.layers.first().map(|layer| &layer.feed_forward),
    ) else {
        let reason = "the layer of an EAGLE-3 head is not one of Llama";
        return Err(Error::invalid("draft head", reason));
    };
    Ok(LayerWeights {
        attn_norm: None,
        attention: AttentionWeights::Gqa(attention(loader, spec, gqa)?),
        post_attn_norm: None,
        ffn_norm: Some(rms_norm(
            loader,
            "midlayer.post_attention_layernorm",
            (spec.hidden_size, 0.0),
        )?),
        feed_forward: FeedForwardWeights::Mlp(feed_forward(loader, spec, mlp)?),
        post_ffn_norm: None,
        per_layer: None,
        output_scale: None,
    })
}

fn attention<B: LlmBackend, W: WeightForm<B>>(
    loader: &mut NamedLoader<'_, '_, B, W>,
    spec: &DecoderSpec,
    gqa: &GqaSpec,
) -> Result<GqaWeights<B>> {
    let (hidden, shape) = (spec.hidden_size, gqa.qkv_shape(0));
    debug_assert_eq!(gqa.qk_norm, QkNormSpec::None);
    let maps = [
        ("midlayer.self_attn.q_proj", shape.q_dim()),
        ("midlayer.self_attn.k_proj", shape.k_dim()),
        ("midlayer.self_attn.v_proj", shape.v_dim()),
    ]
    .map(|(name, rows)| LinearPart::whole(name, rows));
    let out = [hidden, gqa.heads * gqa.value_dim];
    Ok(GqaWeights {
        qkv: Box::new(loader.load_linear_parts(&maps, 2 * hidden, Bias::Some)?),
        q_norm: None,
        k_norm: None,
        layer_norms: None,
        v_norm: None,
        projection_norms: RankShard::whole(spec).projection_norms(0),
        sinks: None,
        gate: None,
        out: Box::new(loader.load_linear(&["midlayer.self_attn.o_proj"], out, Bias::Some)?),
    })
}

fn feed_forward<B: LlmBackend, W: WeightForm<B>>(
    loader: &mut NamedLoader<'_, '_, B, W>,
    spec: &DecoderSpec,
    mlp: &MlpSpec,
) -> Result<MlpWeights<B>> {
    let (hidden, inner) = (spec.hidden_size, mlp.intermediate);
    let gate_up = ["midlayer.mlp.gate_proj", "midlayer.mlp.up_proj"];
    Ok(MlpWeights {
        gate_up: Box::new(loader.load_linear(&gate_up, [inner, hidden], Bias::Some)?),
        down: Box::new(loader.load_linear(
            &["midlayer.mlp.down_proj"],
            [hidden, inner],
            Bias::Some,
        )?),
    })
}
