//! From an encoder's tensors to weights on a device.

use super::config::EncoderModel;
use super::forward::{ClassifierWeights, EncoderLayerWeights, EncoderWeights};
use crate::load::LoadProgress;
use crate::named::{Bias, LayerNorm, NamedLoader};
use crate::weights::WeightForm;
use ferrum_kernels::LlmBackend;
use ferrum_types::Result;

/// Loads all weights of an encoder in the form `W`, with those of its classifier if it has one.
///
/// # Errors
/// [`Error::Model`](ferrum_types::Error::Model) names the tensor that is missing or has the wrong shape or type; otherwise what the device says.
pub fn load_encoder<B: LlmBackend, W: WeightForm<B>>(
    device: &B,
    model: &EncoderModel,
    progress: LoadProgress<'_>,
) -> Result<EncoderWeights<B>> {
    let mut loader = Loader::<B, W> {
        named: NamedLoader::new(device, &model.source, progress)?,
        prefix: model.prefix,
    };
    loader.all(model)
}

struct Loader<'a, 'p, B: LlmBackend, W: WeightForm<B>> {
    named: NamedLoader<'a, 'p, B, W>,
    prefix: &'static str,
}

impl<B: LlmBackend, W: WeightForm<B>> Loader<'_, '_, B, W> {
    fn all(&mut self, model: &EncoderModel) -> Result<EncoderWeights<B>> {
        let spec = &model.spec;
        let (hidden, inner) = (spec.hidden_size, spec.intermediate);
        let mut table = |name: &str, rows: usize| -> Result<_> {
            let name = format!("{}embeddings.{name}", self.prefix);
            let map = self.named.maps(&[&name], [rows, hidden], Bias::None)?;
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
                qkv: Box::new(self.named.maps(&qkv, [hidden, hidden], Bias::Each)?),
                out: Box::new(self.named.maps(&out, [hidden, hidden], Bias::Each)?),
                attention_norm: self.norm(&norms[0], hidden)?,
                up: Box::new(self.named.maps(&up, [inner, hidden], Bias::Each)?),
                down: Box::new(self.named.maps(&down, [hidden, inner], Bias::Each)?),
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
                    pooler: Box::new(self.named.maps(&[pooler], [hidden, hidden], Bias::Each)?),
                    classifier: Box::new(self.named.maps(
                        &[family.classifier],
                        [labels, hidden],
                        Bias::Each,
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

    fn norm(&mut self, name: &str, dim: usize) -> Result<LayerNorm<B>> {
        self.named.norm(&format!("{}{name}", self.prefix), dim)
    }
}
