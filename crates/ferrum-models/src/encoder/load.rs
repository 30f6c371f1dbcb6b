//! From an encoder's tensors to weights on a device.

use super::config::{EncoderModel, EncoderNames, EncoderSpec, Positions, UpNames};
use super::forward::{ClassifierWeights, EncoderLayerWeights, EncoderWeights};
use crate::linear::Embedding;
use crate::named::{Bias, LayerNorm, LinearPart, NamedLoader};
use crate::progress::LoadProgress;
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
        named: NamedLoader::new(device, &model.source, model.dtype, progress)?,
        names: &model.names,
    };
    loader.all(&model.spec)
}

struct Loader<'a, 'p, B: LlmBackend, W: WeightForm<B>> {
    named: NamedLoader<'a, 'p, B, W>,
    names: &'a EncoderNames,
}

impl<B: LlmBackend, W: WeightForm<B>> Loader<'_, '_, B, W> {
    fn all(&mut self, spec: &EncoderSpec) -> Result<EncoderWeights<B>> {
        let names = self.names;
        let hidden = spec.hidden_size;
        let mut table = |name: &str, rows: usize| -> Result<Box<dyn Embedding<B>>> {
            let name = format!("{}{name}", names.prefix);
            Ok(Box::new(self.named.load_table(&name, [rows, hidden])?))
        };
        let [words, positions, segments] = names.parts.tables;
        let words = table(words, spec.vocab_size)?;
        let positions = match spec.positions {
            Positions::Learned { rows, .. } => Some(table(positions, rows)?),
            Positions::Rotary { .. } => None,
        };
        let segments = match spec.segments {
            0 => None,
            rows => Some(table(segments, rows)?),
        };
        let norm = format!("{}{}", names.prefix, names.parts.norm);
        let norm = self.norm(&norm, hidden)?;
        let layers = (0..spec.layers).map(|layer| self.layer(spec, layer));
        let layers = layers.collect::<Result<_>>()?;
        let final_norm = match names.parts.final_norm {
            None => None,
            Some(name) => Some(self.norm(&format!("{}{name}", names.prefix), hidden)?),
        };
        let classifier = match spec.labels {
            0 => None,
            labels => {
                let (pooler, shape) = (&names.pooler, [labels, hidden]);
                let pooler = self
                    .named
                    .load_linear(&[pooler], [hidden, hidden], Bias::Each)?;
                let classifier = self
                    .named
                    .load_linear(&[names.classifier], shape, Bias::Each)?;
                Some(ClassifierWeights {
                    pooler: Box::new(pooler),
                    classifier: Box::new(classifier),
                })
            }
        };
        Ok(EncoderWeights {
            words,
            positions,
            segments,
            norm,
            layers,
            final_norm,
            classifier,
        })
    }

    fn norm(&mut self, name: &str, dim: usize) -> Result<LayerNorm<B>> {
        // Those of models with norms before parts have biases if their config says so.
        match self.names.parts.final_norm {
            Some(_) => self.named.norm_with_some_bias(name, dim),
            None => self.named.norm(name, dim),
        }
    }

    fn layer(&mut self, spec: &EncoderSpec, layer: usize) -> Result<EncoderLayerWeights<B>> {
        let (hidden, inner) = (spec.hidden_size, spec.intermediate);
        let EncoderNames { prefix, parts, .. } = self.names;
        let name = |part: &str| format!("{prefix}{}{layer}.{part}", parts.layer);
        let qkv: Vec<_> = parts.qkv.iter().map(|part| name(part)).collect();
        let (out, down) = (name(parts.out), name(parts.down));
        let up = match parts.up {
            UpNames::Plain(up) | UpNames::GateUp(up) | UpNames::UpGate(up) => vec![name(up)],
            UpNames::Gated(gate, up) => vec![name(gate), name(up)],
        };
        let up: Vec<_> = match parts.up {
            UpNames::Plain(_) | UpNames::Gated(..) => {
                let whole = |name| LinearPart::whole(name, inner);
                up.iter().map(|name| whole(name)).collect()
            }
            UpNames::GateUp(_) => vec![LinearPart::whole(&up[0], 2 * inner)],
            UpNames::UpGate(_) => {
                let halves = [inner..2 * inner, 0..inner].into_iter();
                let half = |rows| LinearPart {
                    name: &up[0],
                    stored_rows: 2 * inner,
                    rows,
                };
                halves.map(half).collect()
            }
        };
        let [attention_norm, output_norm] = parts.norms.map(name);
        let attention_norm = match layer == 0 && spec.pre_norm {
            true => None,
            false => Some(self.norm(&attention_norm, hidden)?),
        };
        let output_norm = self.norm(&output_norm, hidden)?;
        let (named, bias) = (&mut self.named, parts.bias);
        let qkv_rows = 3 * hidden / qkv.len();
        Ok(EncoderLayerWeights {
            qkv: Box::new(named.load_linear(&qkv, [qkv_rows, hidden], bias)?),
            out: Box::new(named.load_linear(&[out], [hidden, hidden], bias)?),
            attention_norm,
            up: Box::new(named.load_linear_parts(&up, hidden, bias)?),
            down: Box::new(named.load_linear(&[down], [hidden, inner], bias)?),
            output_norm,
        })
    }
}
