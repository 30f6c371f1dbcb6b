//! Linear maps behind pooling, which make a text's embedding of its pooled states: modules `Dense` of sentence-transformers,
//! as EmbeddingGemma has them.
//!
//! There is one vector of each text, so that they are computed on the host.

use crate::pooling::modules_of;
use crate::stored::{require, to_f32};
use ferrum_formats::{HfConfig, ModelSource, Safetensors, Shown, TensorSource};
use ferrum_types::{Error, Result};
use std::path::Path;

/// Tensors of maps in GGUF files, in their order: those of sentence-transformers' modules 2 and 3 (llama.cpp).
pub(crate) const GGUF_NAMES: [&str; 2] = ["dense_2.weight", "dense_3.weight"];

/// The file that a module's folder has its numbers in.
const WEIGHTS: &str = "model.safetensors";

const ACTIVATION: &str = "activation_function";

/// Most numbers of an embedding.
const MAX_FEATURES: usize = 1 << 20;

/// Maps that are applied to a pooled vector, one after the other; mostly none.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct DenseLayers(Vec<DenseLayer>);

#[derive(Clone, Debug, PartialEq)]
struct DenseLayer {
    /// `[outputs, inputs]`.
    weight: Vec<f32>,
    /// `[outputs]`, or nothing.
    bias: Vec<f32>,
    inputs: usize,
    activation: DenseActivation,
}

/// The matrix of a map as a GGUF file has it.
pub(crate) struct DenseMatrix<'a> {
    pub(crate) name: &'static str,
    /// `[outputs, inputs]`.
    pub(crate) shape: [usize; 2],
    pub(crate) values: &'a [f32],
}

/// Function on the result of a map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DenseActivation {
    Identity,
    Tanh,
    Relu,
}

impl DenseActivation {
    /// That of a module; `None` for one that is not known here.
    fn of(config: &HfConfig) -> Result<Option<Self>> {
        // The name of a Python class, with its modules.
        let class = config.str(ACTIVATION)?.unwrap_or("Tanh");
        Ok(match class.rsplit('.').next() {
            Some("Identity") => Some(Self::Identity),
            Some("Tanh") => Some(Self::Tanh),
            Some("ReLU") => Some(Self::Relu),
            _ => None,
        })
    }
}

/// What a module's folder asks for that is not known here; `None`: it can be read.
pub(crate) fn unknown_in(folder: &Path) -> Result<Option<String>> {
    let config = HfConfig::open(folder.join("config.json"))?;
    for field in ["module_input_name", "module_output_name"] {
        let name = config.str(field)?.unwrap_or("sentence_embedding");
        if name != "sentence_embedding" {
            return Ok(Some(format!("{field} {}", Shown(name))));
        }
    }
    if config.bool("use_residual")? == Some(true) {
        return Ok(Some("use_residual".into()));
    }
    if DenseActivation::of(&config)?.is_none() {
        let name = config.str(ACTIVATION)?.unwrap_or_default();
        return Ok(Some(format!("{ACTIVATION} {}", Shown(name))));
    }
    let missing = !folder.join(WEIGHTS).exists();
    Ok(missing.then(|| format!("no {WEIGHTS}")))
}

impl DenseLayers {
    /// Those that a model's files have, for pooled vectors of `hidden_size` numbers.
    ///
    /// # Errors
    /// [`Error::Model`] for files that cannot be read, and sizes that do not fit together.
    pub fn of(source: &ModelSource, hidden_size: usize) -> Result<Self> {
        let mut layers = Vec::new();
        let mut inputs = hidden_size;
        match source {
            ModelSource::Gguf(gguf) => {
                for name in GGUF_NAMES {
                    let Some(view) = gguf.get(name) else {
                        continue;
                    };
                    let [outputs, found] = view.shape[..] else {
                        return Err(of_wrong_size(gguf.path(), name, inputs));
                    };
                    if found != inputs || !(1..=MAX_FEATURES).contains(&outputs) {
                        return Err(of_wrong_size(gguf.path(), name, inputs));
                    }
                    let bias = name.replace(".weight", ".bias");
                    layers.push(DenseLayer {
                        weight: to_f32(gguf, &view)?,
                        bias: match gguf.get(&bias) {
                            Some(_) => to_f32(gguf, &require(gguf, &bias, &[outputs])?)?,
                            None => Vec::new(),
                        },
                        inputs,
                        activation: DenseActivation::Identity,
                    });
                    inputs = outputs;
                }
            }
            ModelSource::Hf(folder) => {
                for module in modules_of(&folder.dir)?.dense {
                    let layer = DenseLayer::open(&module, inputs)?;
                    inputs = layer.outputs();
                    layers.push(layer);
                }
            }
        }
        Ok(Self(layers))
    }

    /// Numbers of an embedding, where pooled vectors have `hidden_size`.
    pub fn dimensions(&self, hidden_size: usize) -> usize {
        self.0.last().map_or(hidden_size, DenseLayer::outputs)
    }

    /// The matrices in a GGUF file; `None` where it cannot have them.
    pub(crate) fn as_gguf(&self) -> Option<Vec<DenseMatrix<'_>>> {
        let plain = |layer: &DenseLayer| {
            layer.bias.is_empty() && layer.activation == DenseActivation::Identity
        };
        if self.0.len() > GGUF_NAMES.len() || !self.0.iter().all(plain) {
            return None;
        }
        let matrices = GGUF_NAMES.iter().zip(&self.0);
        let matrices = matrices.map(|(&name, layer)| DenseMatrix {
            name,
            shape: [layer.outputs(), layer.inputs],
            values: &layer.weight,
        });
        Some(matrices.collect())
    }

    /// The embedding of a text with this pooled vector.
    ///
    /// # Panics
    /// When the vector has another length than the one given to [`of`](Self::of).
    pub fn apply(&self, vector: Vec<f32>) -> Vec<f32> {
        self.0.iter().fold(vector, |x, layer| layer.apply(&x))
    }
}

impl DenseLayer {
    /// Reads a module's folder.
    fn open(folder: &Path, inputs: usize) -> Result<Self> {
        let config = HfConfig::open(folder.join("config.json"))?;
        let found = config.require_usize("in_features")?;
        if found != inputs {
            let expected = format!("{inputs}, the numbers of what it is applied to");
            return Err(config.field_error("in_features", expected).into());
        }
        let outputs = config.require_usize("out_features")?;
        if !(1..=MAX_FEATURES).contains(&outputs) {
            let expected = format!("1 to {MAX_FEATURES}");
            return Err(config.field_error("out_features", expected).into());
        }
        let Some(activation) = DenseActivation::of(&config)? else {
            let expected = "torch's Identity, Tanh or ReLU";
            return Err(config.field_error(ACTIVATION, expected).into());
        };
        let tensors = Safetensors::open(folder.join(WEIGHTS))?;
        let read = |name: &str, shape: &[usize]| {
            let view = require(&tensors, name, shape)?;
            to_f32(&tensors, &view)
        };
        Ok(Self {
            weight: read("linear.weight", &[outputs, inputs])?,
            bias: match config.bool("bias")? {
                Some(false) => Vec::new(),
                _ => read("linear.bias", &[outputs])?,
            },
            inputs,
            activation,
        })
    }

    fn outputs(&self) -> usize {
        self.weight.len() / self.inputs
    }

    fn apply(&self, x: &[f32]) -> Vec<f32> {
        assert_eq!(x.len(), self.inputs, "numbers of a pooled vector");
        let biases = self.bias.iter().copied().chain(std::iter::repeat(0.0));
        let rows = self.weight.chunks_exact(self.inputs).zip(biases);
        let outputs = rows.map(|(row, bias)| dot(row, x) + bias);
        match self.activation {
            DenseActivation::Identity => outputs.collect(),
            DenseActivation::Tanh => outputs.map(f32::tanh).collect(),
            DenseActivation::Relu => outputs.map(|x| x.max(0.0)).collect(),
        }
    }
}

/// Sixteen sums side by side, so that they are vectors of the processor.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let (a, a_rest) = a.as_chunks::<16>();
    let (b, b_rest) = b.as_chunks::<16>();
    let mut sums = [0f32; 16];
    for (a, b) in a.iter().zip(b) {
        for (sum, (a, b)) in sums.iter_mut().zip(a.iter().zip(b)) {
            *sum += a * b;
        }
    }
    let rest: f32 = a_rest.iter().zip(b_rest).map(|(a, b)| a * b).sum();
    sums.iter().sum::<f32>() + rest
}

fn of_wrong_size(path: &Path, name: &str, inputs: usize) -> Error {
    Error::Model(format!(
        "{}: tensor \"{name}\": expected a matrix of {inputs} columns, the numbers of what it is applied to, and 1 to {MAX_FEATURES} rows",
        path.display()
    ))
}
