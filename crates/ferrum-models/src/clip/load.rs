//! From a CLIP or SigLIP model's tensors to weights on a device.

use super::config::{ClipKind, ClipModel, ClipSpec, ImageSpec};
use crate::linear::{Embedding, Linear, MatrixLinear};
use crate::named::{Bias, LayerNorm, NamedLoader};
use crate::pre_norm::{PreNormLayer, PreNormMlp, PreNormNames, PreNormSpec};
use crate::progress::LoadProgress;
use crate::weights::{Dequantized, MatrixUse, WeightForm};
use ferrum_kernels::{LlmBackend, MatShape};
use ferrum_types::Result;
use std::sync::Arc;

pub(crate) const NAMES: PreNormNames = PreNormNames {
    attention_norm: "layer_norm1",
    qkv: ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    out: "self_attn.out_proj",
    mlp: ["layer_norm2", "mlp.fc1", "mlp.fc2"],
};

/// SigLIP's head: attention of a learned query over the states, and a feed-forward.
pub(super) struct ProbeHead<B: LlmBackend> {
    /// `[hidden]`: what the query's map makes of the probe.
    pub(super) query: Vec<f32>,
    pub(super) k: Box<dyn Linear<B>>,
    pub(super) v: Box<dyn Linear<B>>,
    pub(super) out: Box<dyn Linear<B>>,
    pub(super) mlp: PreNormMlp<B>,
}

/// How the states of a picture become its vector.
pub(super) enum ImageHead<B: LlmBackend> {
    /// CLIP: that of the class token, projected. There is a norm before the layers.
    Class {
        first_norm: LayerNorm<B>,
        projection: Box<dyn Linear<B>>,
    },
    /// SigLIP.
    Probe(ProbeHead<B>),
}

/// Weights of a CLIP or SigLIP model on a device.
pub struct ClipWeights<B: LlmBackend> {
    /// The convolution over patches, as a product.
    pub(super) stem: Box<dyn Linear<B>>,
    /// With the class token's embedding on the first row.
    pub(super) image_positions: Box<dyn Embedding<B>>,
    pub(super) image: Vec<PreNormLayer<B>>,
    pub(super) image_norm: LayerNorm<B>,
    pub(super) image_head: ImageHead<B>,
    pub(super) words: Box<dyn Embedding<B>>,
    pub(super) text_positions: Box<dyn Embedding<B>>,
    pub(super) text: Vec<PreNormLayer<B>>,
    pub(super) text_norm: LayerNorm<B>,
    pub(super) text_head: Box<dyn Linear<B>>,
    /// The logarithm of what cosines are multiplied by.
    pub(super) logit_scale: f32,
    pub(super) logit_bias: f32,
}

/// Loads all weights of a CLIP or SigLIP model in the form `W`.
///
/// # Errors
/// [`Error::Model`](ferrum_types::Error::Model) names the tensor that is missing or has the wrong shape or type; otherwise
/// what the device says.
pub fn load_clip<B: LlmBackend, W: WeightForm<B>>(
    device: &B,
    model: &ClipModel,
    progress: LoadProgress<'_>,
) -> Result<ClipWeights<B>> {
    let spec = &model.spec;
    let clip = spec.kind == ClipKind::Clip;
    let loader = &mut NamedLoader::<B, W>::new(device, &model.source, model.dtype, progress)?;
    let text_hidden = spec.text.stack.hidden;
    let table = |loader: &mut NamedLoader<'_, '_, B, W>, name: &str, rows| {
        let name = format!("text_model.embeddings.{name}");
        loader.load_table(&name, [rows, text_hidden])
    };
    let (head, bias) = match clip {
        true => ("text_projection", Bias::None),
        false => ("text_model.head", Bias::Each),
    };
    Ok(ClipWeights {
        stem: stem(loader, &spec.image, "vision_model", !clip)?,
        image_positions: image_positions(loader, spec)?,
        image: layers(loader, &spec.image.stack, "vision_model")?,
        image_norm: loader.norm("vision_model.post_layernorm", spec.image.stack.hidden)?,
        image_head: image_head(loader, spec)?,
        words: Box::new(table(loader, "token_embedding", spec.text.vocab_size)?),
        text_positions: Box::new(table(loader, "position_embedding", spec.text.positions)?),
        text: layers(loader, &spec.text.stack, "text_model")?,
        text_norm: loader.norm("text_model.final_layer_norm", text_hidden)?,
        text_head: Box::new(loader.load_linear(&[head], [spec.dimensions, text_hidden], bias)?),
        logit_scale: loader.number("logit_scale")?,
        logit_bias: match clip {
            true => 0.0,
            false => loader.number("logit_bias")?,
        },
    })
}

/// The layers of a tower.
pub(crate) fn layers<B: LlmBackend, W: WeightForm<B>>(
    loader: &mut NamedLoader<'_, '_, B, W>,
    spec: &PreNormSpec,
    tower: &str,
) -> Result<Vec<PreNormLayer<B>>> {
    let names = (0..spec.layers).map(|i| format!("{tower}.encoder.layers.{i}"));
    names
        .map(|name| PreNormLayer::load(loader, spec, &NAMES, &name))
        .collect()
}

/// A map of numbers that were put in order here.
pub(crate) fn map<B: LlmBackend, W: WeightForm<B>>(
    loader: &NamedLoader<'_, '_, B, W>,
    values: &[f32],
    bias: Option<&[f32]>,
    cols: usize,
    for_use: MatrixUse,
) -> Result<MatrixLinear<B, Dequantized>> {
    let shape = MatShape {
        rows: values.len() / cols,
        cols,
    };
    let device = loader.device();
    Ok(MatrixLinear {
        weight: Arc::new(loader.matrix(values, shape, for_use)?),
        bias: bias.map(|bias| device.from_slice(bias)).transpose()?,
        shape,
    })
}

/// The convolution over patches, as a product.
pub(crate) fn stem<B: LlmBackend, W: WeightForm<B>>(
    loader: &mut NamedLoader<'_, '_, B, W>,
    ImageSpec { stack, patch, .. }: &ImageSpec,
    tower: &str,
    has_bias: bool,
) -> Result<Box<dyn Linear<B>>> {
    let name = format!("{tower}.embeddings.patch_embedding");
    let shape = [stack.hidden, 3, *patch, *patch];
    let weight = loader.vector(&format!("{name}.weight"), &shape)?;
    let bias = match has_bias {
        true => Some(loader.vector(&format!("{name}.bias"), &[stack.hidden])?),
        false => None,
    };
    let stem = map(
        loader,
        &weight,
        bias.as_deref(),
        3 * patch * patch,
        MatrixUse::Products,
    )?;
    Ok(Box::new(stem))
}

fn image_positions<B: LlmBackend, W: WeightForm<B>>(
    loader: &mut NamedLoader<'_, '_, B, W>,
    spec: &ClipSpec,
) -> Result<Box<dyn Embedding<B>>> {
    let hidden = spec.image.stack.hidden;
    let name = "vision_model.embeddings.position_embedding.weight";
    let mut values = loader.vector(name, &[spec.image_tokens(), hidden])?;
    if spec.kind == ClipKind::Clip {
        let class = loader.vector("vision_model.embeddings.class_embedding", &[hidden])?;
        for (place, class) in values.iter_mut().zip(class) {
            *place += class;
        }
    }
    let table = map(loader, &values, None, hidden, MatrixUse::LookUps)?;
    Ok(Box::new(table))
}

fn image_head<B: LlmBackend, W: WeightForm<B>>(
    loader: &mut NamedLoader<'_, '_, B, W>,
    spec: &ClipSpec,
) -> Result<ImageHead<B>> {
    let stack = &spec.image.stack;
    let hidden = stack.hidden;
    if spec.kind == ClipKind::Clip {
        let shape = [spec.dimensions, hidden];
        return Ok(ImageHead::Class {
            // The name is misspelt in every checkpoint.
            first_norm: loader.norm("vision_model.pre_layrnorm", hidden)?,
            projection: Box::new(loader.load_linear(&["visual_projection"], shape, Bias::None)?),
        });
    }
    let name = |part: &str| format!("vision_model.head.{part}");
    let probe = loader.vector(&name("probe"), &[1, 1, hidden])?;
    let weights = loader.vector(&name("attention.in_proj_weight"), &[3 * hidden, hidden])?;
    let biases = loader.vector(&name("attention.in_proj_bias"), &[3 * hidden])?;
    let mut weights = weights.chunks_exact(hidden * hidden);
    let mut biases = biases.chunks_exact(hidden);
    let mut part = || (weights.next().unwrap_or(&[]), biases.next().unwrap_or(&[]));
    let (q, q_bias) = part();
    let (k, k_bias) = part();
    let (v, v_bias) = part();
    let query = q.chunks_exact(hidden).zip(q_bias).map(|(row, &bias)| {
        let products = row
            .iter()
            .zip(&probe)
            .map(|(a, b)| f64::from(*a) * f64::from(*b));
        (products.sum::<f64>() + f64::from(bias)) as f32
    });
    let query = query.collect();
    let mlp = ["layernorm", "mlp.fc1", "mlp.fc2"].map(name);
    Ok(ImageHead::Probe(ProbeHead {
        query,
        k: Box::new(map(loader, k, Some(k_bias), hidden, MatrixUse::Products)?),
        v: Box::new(map(loader, v, Some(v_bias), hidden, MatrixUse::Products)?),
        out: Box::new(loader.load_linear(
            &[name("attention.out_proj")],
            [hidden, hidden],
            Bias::Each,
        )?),
        mlp: PreNormMlp::load(loader, stack, mlp)?,
    }))
}
