//! From the tensors of an image tower and its projection to weights on a device.

use super::config::{VisionModel, VisionSpec};
use crate::clip::{layers, map, stem};
use crate::linear::{Embedding, Linear};
use crate::named::{LayerNorm, NamedLoader, WeightDtype};
use crate::pre_norm::PreNormLayer;
use crate::progress::LoadProgress;
use crate::weights::{MatrixUse, WeightForm};
use ferrum_kernels::LlmBackend;
use ferrum_types::Result;

/// Weights of an image tower on a device.
pub struct VisionWeights<B: LlmBackend> {
    /// The convolution over patches, as a product.
    pub(super) stem: Box<dyn Linear<B>>,
    pub(super) positions: Box<dyn Embedding<B>>,
    pub(super) layers: Vec<PreNormLayer<B>>,
    pub(super) norm: LayerNorm<B>,
    /// `[tower's hidden]`: of the norm before the projection, which files hold less 1.
    pub(super) projection_norm: B::Buffer<f32>,
    pub(super) projection: Box<dyn Linear<B>>,
}

/// Loads all weights of an image tower in the form `W`.
///
/// # Errors
/// [`Error::Model`](ferrum_types::Error::Model) names the tensor that is missing or has the wrong shape or type; otherwise
/// what the device says.
pub fn load_vision<B: LlmBackend, W: WeightForm<B>>(
    device: &B,
    model: &VisionModel,
    progress: LoadProgress<'_>,
) -> Result<VisionWeights<B>> {
    let VisionSpec { image, hidden, .. } = &model.spec;
    let (tower, projector) = (model.tower, model.projector);
    let width = image.stack.hidden;
    let loader =
        &mut NamedLoader::<B, W>::new(device, &model.source, WeightDtype::Stored, progress)?;
    let places = format!("{tower}.embeddings.position_embedding.weight");
    let places = loader.vector(&places, &[image.grid() * image.grid(), width])?;
    let mut norm = loader.vector(&format!("{projector}.mm_soft_emb_norm.weight"), &[width])?;
    norm.iter_mut().for_each(|weight| *weight += 1.0);
    let projection = format!("{projector}.mm_input_projection_weight");
    let projection = transposed(&loader.vector(&projection, &[width, *hidden])?, *hidden);
    Ok(VisionWeights {
        stem: stem(loader, image, tower, true)?,
        positions: Box::new(map(loader, &places, None, width, MatrixUse::LookUps)?),
        layers: layers(loader, &image.stack, tower)?,
        norm: loader.norm(&format!("{tower}.post_layernorm"), width)?,
        projection_norm: device.from_slice(&norm)?,
        projection: Box::new(map(loader, &projection, None, width, MatrixUse::Products)?),
    })
}

/// `[rows, cols]` → `[cols, rows]`.
fn transposed(values: &[f32], cols: usize) -> Vec<f32> {
    let columns = 0..cols;
    columns
        .flat_map(|column| values.iter().skip(column).step_by(cols))
        .copied()
        .collect()
}
