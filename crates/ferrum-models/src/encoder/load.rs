//! From an encoder's tensors to weights on a device.

use super::config::EncoderModel;
use super::forward::{ClassifierWeights, EncoderLayerWeights, EncoderWeights, LayerNorm};
use crate::checkpoint::Checkpoint;
use crate::linear::MatrixLinear;
use crate::load::LoadProgress;
use crate::stored::{require, to_f32};
use crate::weights::WeightForm;
use ferrum_formats::{ModelSource, TensorSource};
use ferrum_kernels::{LlmBackend, MatShape};
use ferrum_types::{Error, Result};
use std::marker::PhantomData;
use std::sync::Arc;

/// Loads all weights of an encoder in the form `W`, with those of its classifier if it has one.
///
/// # Errors
/// [`Error::Model`] names the tensor that is missing or has the wrong shape or type; otherwise what the device says.
pub fn load_encoder<B: LlmBackend, W: WeightForm<B>>(
    device: &B,
    model: &EncoderModel,
    progress: LoadProgress<'_>,
) -> Result<EncoderWeights<B>> {
    let ModelSource::Hf(folder) = &model.source else {
        return Err(Error::invalid("load_encoder", "it is not a folder"));
    };
    let mut loader = Loader::<B, W> {
        device,
        tensors: &folder.tensors,
        checkpoint: Checkpoint::new(&model.source),
        prefix: model.prefix,
        done: 0,
        total: folder.tensors.total_bytes(),
        progress,
        form: PhantomData,
    };
    loader.all(model)
}

struct Loader<'a, 'p, B: LlmBackend, W: WeightForm<B>> {
    device: &'a B,
    tensors: &'a dyn TensorSource,
    checkpoint: Checkpoint<'a>,
    prefix: &'static str,
    done: u64,
    total: u64,
    progress: LoadProgress<'p>,
    form: PhantomData<W>,
}

impl<B: LlmBackend, W: WeightForm<B>> Loader<'_, '_, B, W> {
    fn all(&mut self, model: &EncoderModel) -> Result<EncoderWeights<B>> {
        let spec = &model.spec;
        let (hidden, inner) = (spec.hidden_size, spec.intermediate);
        let mut table = |name: &str, rows: usize| -> Result<_> {
            let name = format!("{}embeddings.{name}", self.prefix);
            let map = self.maps(&[&name], [rows, hidden], false)?;
            Ok(Box::new(map) as Box<_>)
        };
        let words = table("word_embeddings", spec.vocab_size)?;
        let positions = table("position_embeddings", spec.positions)?;
        let segments = table("token_type_embeddings", spec.segments)?;
        let norm = self.norm("embeddings.LayerNorm", hidden)?;
        let mut layers = Vec::with_capacity(spec.layers);
        for layer in 0..spec.layers {
            let name = |part: &str| format!("{}encoder.layer.{layer}.{part}", self.prefix);
            let qkv = ["query", "key", "value"].map(|part| name(&format!("attention.self.{part}")));
            let [out, up, down] = [
                "attention.output.dense",
                "intermediate.dense",
                "output.dense",
            ]
            .map(|part| [name(part)]);
            let norms = ["attention.output.LayerNorm", "output.LayerNorm"]
                .map(|part| format!("encoder.layer.{layer}.{part}"));
            layers.push(EncoderLayerWeights {
                qkv: Box::new(self.maps(&qkv, [hidden, hidden], true)?),
                out: Box::new(self.maps(&out, [hidden, hidden], true)?),
                attention_norm: self.norm(&norms[0], hidden)?,
                up: Box::new(self.maps(&up, [inner, hidden], true)?),
                down: Box::new(self.maps(&down, [hidden, inner], true)?),
                output_norm: self.norm(&norms[1], hidden)?,
            });
        }
        let classifier = match spec.labels {
            0 => None,
            labels => {
                let family = model.family;
                let body = if family.pooler_in_body {
                    self.prefix
                } else {
                    ""
                };
                let pooler = format!("{body}{}", family.pooler);
                Some(ClassifierWeights {
                    pooler: Box::new(self.maps(&[pooler], [hidden, hidden], true)?),
                    classifier: Box::new(self.maps(
                        &[family.classifier],
                        [labels, hidden],
                        true,
                    )?),
                })
            }
        };
        Ok(EncoderWeights {
            words,
            positions,
            segments,
            norm,
            layers,
            classifier,
        })
    }

    /// Maps of equal shape `[rows, cols]`, one below the other.
    fn maps(
        &mut self,
        names: &[impl AsRef<str>],
        [rows, cols]: [usize; 2],
        bias: bool,
    ) -> Result<MatrixLinear<B, W>> {
        let shape = MatShape { rows, cols };
        let parts = names
            .iter()
            .map(|name| self.checkpoint.matrix(name.as_ref(), shape));
        let parts = parts.collect::<Result<Vec<_>>>()?;
        let weight = Arc::new(W::load(self.device, &parts, cols)?);
        self.tensors.release();
        self.advance(parts.iter().map(|part| part.stored_bytes() as u64).sum());
        let mut values = Vec::new();
        for name in names.iter().filter(|_| bias) {
            values.extend(self.vector(&format!("{}.bias", name.as_ref()), rows)?);
        }
        let bias = bias.then(|| self.device.from_slice(&values)).transpose()?;
        let rows = rows * names.len();
        Ok(MatrixLinear {
            weight,
            bias,
            shape: MatShape { rows, cols },
        })
    }

    fn norm(&mut self, name: &str, dim: usize) -> Result<LayerNorm<B>> {
        let mut part = |part: &str| {
            let values = self.vector(&format!("{}{name}.{part}", self.prefix), dim)?;
            self.device.from_slice(&values)
        };
        Ok(LayerNorm {
            weight: part("weight")?,
            bias: part("bias")?,
        })
    }

    fn vector(&mut self, name: &str, len: usize) -> Result<Vec<f32>> {
        let view = require(self.tensors, name, &[len])?;
        let values = to_f32(self.tensors, &view)?;
        self.advance(view.bytes.len() as u64);
        Ok(values)
    }

    fn advance(&mut self, bytes: u64) {
        self.done += bytes;
        (self.progress)(self.done.min(self.total), self.total);
    }
}
