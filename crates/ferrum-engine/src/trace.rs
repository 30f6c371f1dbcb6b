//! Traces of a model's computation of a prompt, layer by layer, and the differences of two traces, to find out why a model
//! seems wrong.
//!
//! A trace is made by a runner with a stage for each layer, as hidden states can be read where a stage ends. It can be
//! stored, also by other programs, as a safetensors file: `tokens` `[n]` (I64), `logits` `[n, vocab]` and
//! `hidden` `[layers, n, hidden]` (F32), the residual stream after each of the first layers.

use crate::{BackendDispatch, KvDtype, Placement};
use ferrum_models::{LoadProgress, Model, RunnerConfig};
use ferrum_types::{Error, Result, TokenId};
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use std::path::Path;

/// Largest file of a stored trace.
const MAX_FILE: u64 = 4 << 30;

/// What a model computes of a prompt.
#[derive(Clone, Debug, PartialEq)]
pub struct Trace {
    /// The prompt.
    pub tokens: Vec<TokenId>,
    /// The residual stream after the layers for which it is known: each a layer and `[tokens, hidden]`.
    pub layers: Vec<(usize, Vec<f32>)>,
    /// `[tokens, vocab]`.
    pub logits: Vec<f32>,
}

impl Trace {
    /// Computes a prompt on a device, in one step, with a cache in f32.
    ///
    /// # Errors
    /// `InvalidArgument` for a prompt without tokens, or with tokens outside the vocabulary; what loading and the device
    /// say.
    pub fn compute(
        model: &Model,
        device: BackendDispatch,
        tokens: &[TokenId],
        progress: LoadProgress<'_>,
    ) -> Result<Self> {
        let placement = Placement::by_layer(device, model)?;
        let layers: Vec<_> = placement
            .stages()
            .map(|placed| placed.stage.layers().end - 1)
            .collect();
        let config = RunnerConfig {
            max_tokens: tokens.len().max(1),
            max_logit_rows: tokens.len().max(1),
            ..RunnerConfig::single(tokens.len().max(1))
        };
        let mut session = placement.load(model, config, KvDtype::F32, progress)?;
        let mut trace = Self {
            tokens: tokens.to_vec(),
            layers: Vec::with_capacity(layers.len()),
            logits: Vec::new(),
        };
        session.trace(tokens, &layers, &mut |output| {
            trace.logits = output.logits().to_vec();
            let each = output.aux_hidden().len() / layers.len().max(1);
            let parts = output.aux_hidden().chunks_exact(each.max(1));
            trace.layers = layers
                .iter()
                .copied()
                .zip(parts.map(<[f32]>::to_vec))
                .collect();
            Ok(())
        })?;
        Ok(trace)
    }

    /// Reads a stored trace.
    ///
    /// # Errors
    /// [`Error::Model`] names the file, and the tensor that is missing or has another shape or type than expected.
    pub fn read(path: &Path) -> Result<Self> {
        let fail = |reason: String| Error::Model(format!("{}: {reason}", path.display()));
        let size = std::fs::metadata(path)
            .map_err(|e| fail(e.to_string()))?
            .len();
        if size > MAX_FILE {
            return Err(fail(format!(
                "found {size} bytes, expected at most {MAX_FILE}"
            )));
        }
        let bytes = std::fs::read(path).map_err(|e| fail(e.to_string()))?;
        let file = SafeTensors::deserialize(&bytes).map_err(|e| fail(e.to_string()))?;
        let tensor = |name: &str, dtype, dims: usize| {
            let found = file.tensor(name);
            let found = found.map_err(|_| fail(format!("there is no tensor \"{name}\"")))?;
            if found.dtype() != dtype || found.shape().len() != dims {
                return Err(fail(format!(
                    "tensor \"{name}\": found {:?} {:?}, expected {dtype:?} with {dims} dimensions",
                    found.dtype(),
                    found.shape()
                )));
            }
            Ok(found)
        };
        let ids = tensor("tokens", Dtype::I64, 1)?;
        let ids = ids.data().as_chunks::<8>().0.iter();
        let ids = ids.map(|b| TokenId::try_from(i64::from_le_bytes(*b)));
        let tokens: Vec<_> = ids
            .collect::<std::result::Result<_, _>>()
            .map_err(|_| fail("tensor \"tokens\": found a negative number".into()))?;
        let logits = tensor("logits", Dtype::F32, 2)?;
        let of_prompt = |what: &str, found: usize| match found == tokens.len() {
            true => Ok(()),
            false => Err(fail(format!(
                "tensor \"{what}\": found {found} rows, expected one for each of {} tokens",
                tokens.len()
            ))),
        };
        of_prompt("logits", logits.shape()[0])?;
        let mut layers = Vec::new();
        if file.names().contains(&"hidden") {
            let hidden = tensor("hidden", Dtype::F32, 3)?;
            of_prompt("hidden", hidden.shape()[1])?;
            let each = hidden.shape()[1] * hidden.shape()[2];
            let values = floats(hidden.data());
            let parts = values.chunks_exact(each.max(1)).map(<[f32]>::to_vec);
            layers = parts.enumerate().collect();
        }
        Ok(Self {
            logits: floats(logits.data()),
            tokens,
            layers,
        })
    }

    /// Stores the trace, with the layers from the first on of which all are known.
    ///
    /// # Errors
    /// [`Error::Model`] names the file that cannot be written.
    pub fn write(&self, path: &Path) -> Result<()> {
        let fail = |reason: String| Error::Model(format!("{}: {reason}", path.display()));
        let tokens: Vec<u8> = self
            .tokens
            .iter()
            .flat_map(|&token| i64::from(token).to_le_bytes())
            .collect();
        let rows = self.tokens.len();
        let first = self.layers.iter().enumerate();
        let first = first.take_while(|(place, (layer, _))| place == layer);
        let streams: Vec<_> = first.map(|(_, (_, stream))| &stream[..]).collect();
        let width = streams
            .first()
            .map_or(0, |stream| stream.len() / rows.max(1));
        let hidden = streams.concat();
        let shapes = [
            vec![rows],
            vec![rows, self.logits.len() / rows.max(1)],
            vec![streams.len(), rows, width],
        ];
        let [of_tokens, of_logits, of_hidden] = shapes;
        let view = |dtype, shape, bytes| {
            TensorView::new(dtype, shape, bytes).map_err(|e| fail(e.to_string()))
        };
        let mut tensors = vec![
            ("tokens", view(Dtype::I64, of_tokens, &tokens)?),
            (
                "logits",
                view(Dtype::F32, of_logits, bytemuck::cast_slice(&self.logits))?,
            ),
        ];
        if !streams.is_empty() {
            let bytes = bytemuck::cast_slice(&hidden);
            tensors.push(("hidden", view(Dtype::F32, of_hidden, bytes)?));
        }
        safetensors::serialize_to_file(tensors, None, path).map_err(|e| fail(e.to_string()))
    }

    /// How far this computation is from `expected`, layer by layer where both are known.
    ///
    /// # Errors
    /// `InvalidArgument` when they are of different prompts or models.
    pub fn compare(&self, expected: &Self, tolerance: f64) -> Result<Comparison> {
        let fail = |reason: &str| Error::invalid("compare", reason.to_owned());
        let sizes = |what: &str, found: usize, expected: usize| {
            let positions = self.tokens.len().max(1);
            let (found, expected) = (found / positions, expected / positions);
            fail(&format!(
                "found {what} of {found}, expected {expected} as in what it is compared with"
            ))
        };
        if self.tokens != expected.tokens {
            return Err(fail("the computations are of different prompts"));
        }
        if self.logits.len() != expected.logits.len() {
            return Err(sizes(
                "a vocabulary",
                self.logits.len(),
                expected.logits.len(),
            ));
        }
        let mut layers = Vec::new();
        for (layer, stream) in &self.layers {
            let Some((_, other)) = expected.layers.iter().find(|(other, _)| other == layer) else {
                continue;
            };
            if stream.len() != other.len() {
                return Err(sizes("hidden states", stream.len(), other.len()));
            }
            let difference = Difference::of(stream, other);
            layers.push(LayerDifference {
                layer: *layer,
                difference,
            });
        }
        let vocab = self.logits.len() / self.tokens.len().max(1);
        let rows = self.logits.chunks_exact(vocab.max(1));
        let rows = rows.zip(expected.logits.chunks_exact(vocab.max(1)));
        let (mut kl, mut same) = (0f64, 0);
        for (found, wanted) in rows {
            kl += divergence(wanted, found);
            same += usize::from(best(found) == best(wanted));
        }
        let count = self.tokens.len().max(1) as f64;
        let is_far = |layer: &&LayerDifference| {
            !layer.difference.relative.is_finite() || layer.difference.relative > tolerance
        };
        Ok(Comparison {
            first_diverging: layers.iter().find(is_far).map(|layer| layer.layer),
            layers,
            logits: Difference::of(&self.logits, &expected.logits),
            kl: kl / count,
            top1: same as f64 / count,
            tolerance,
        })
    }
}

/// How far two computations are apart.
#[derive(Clone, Debug, PartialEq)]
pub struct Comparison {
    /// The layers that both have.
    pub layers: Vec<LayerDifference>,
    /// That of all logits.
    pub logits: Difference,
    /// The Kullback-Leibler divergence of the next token's probabilities from the expected ones, in nats: mean over
    /// positions.
    pub kl: f64,
    /// The share of positions with the same best token.
    pub top1: f64,
    /// What a layer's relative difference may be.
    pub tolerance: f64,
    /// The first layer beyond that.
    pub first_diverging: Option<usize>,
}

impl Comparison {
    /// Whether no layer diverges, nor the logits.
    pub fn agrees(&self) -> bool {
        self.first_diverging.is_none() && self.logits.relative <= self.tolerance
    }
}

/// The difference of a layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LayerDifference {
    /// The layer, from 0.
    pub layer: usize,
    /// Difference of the residual stream after it.
    pub difference: Difference,
}

/// How far numbers are from expected ones.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Difference {
    /// The largest difference of two numbers.
    pub max: f64,
    /// The length of all differences, as a part of that of the expected numbers: the root of NMSE.
    pub relative: f64,
}

impl Difference {
    fn of(found: &[f32], expected: &[f32]) -> Self {
        let (mut max, mut error, mut norm) = (0f64, 0f64, 0f64);
        for (&found, &expected) in found.iter().zip(expected) {
            let difference = f64::from(found) - f64::from(expected);
            // A NaN stays.
            if difference.is_nan() || difference.abs() > max {
                max = difference.abs();
            }
            error += difference * difference;
            norm += f64::from(expected) * f64::from(expected);
        }
        let relative = match (error, norm) {
            (0.0, _) => 0.0,
            (_, 0.0) => f64::INFINITY,
            _ => (error / norm).sqrt(),
        };
        Self { max, relative }
    }
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    let numbers = bytes.as_chunks::<4>().0.iter();
    numbers.map(|b| f32::from_le_bytes(*b)).collect()
}

fn best(row: &[f32]) -> Option<usize> {
    let all = row.iter().enumerate();
    // The first of equals.
    let best = all.max_by(|(i, a), (j, b)| a.total_cmp(b).then(j.cmp(i)));
    best.map(|(id, _)| id)
}

/// The Kullback-Leibler divergence of the probabilities by `found` from those by `expected`, in nats.
fn divergence(expected: &[f32], found: &[f32]) -> f64 {
    let log_sum = |row: &[f32]| {
        let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = row.iter().map(|&x| f64::from(x - max).exp()).sum();
        f64::from(max) + sum.ln()
    };
    let (of_expected, of_found) = (log_sum(expected), log_sum(found));
    let terms = expected.iter().zip(found).map(|(&p, &q)| {
        let (p, q) = (f64::from(p) - of_expected, f64::from(q) - of_found);
        match p == f64::NEG_INFINITY {
            true => 0.0,
            false => p.exp() * (p - q),
        }
    });
    // Rounding may leave less than 0 of nothing; a NaN stays.
    let sum: f64 = terms.sum();
    if sum < 0.0 { 0.0 } else { sum }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trace(layers: &[f32], logits: &[f32]) -> Trace {
        Trace {
            tokens: vec![1, 2],
            layers: layers.iter().map(|&x| vec![x, 2.0]).enumerate().collect(),
            logits: logits.to_vec(),
        }
    }

    #[test]
    fn the_first_layer_that_is_far_away_is_told() {
        let expected = trace(&[1.0, 1.0, 1.0], &[0.0, 1.0, 0.5, 0.0]);
        let same = expected.compare(&expected, 1e-3).unwrap();
        assert!(same.agrees());
        assert_eq!((same.kl, same.top1, same.logits.max), (0.0, 1.0, 0.0));
        let found = trace(&[1.0, 1.0001, 1.5], &[0.0, 1.0, 0.0, 0.5]);
        let comparison = found.compare(&expected, 1e-3).unwrap();
        assert_eq!(comparison.first_diverging, Some(2));
        assert!(!comparison.agrees());
        assert_eq!(comparison.top1, 0.5);
        assert!(comparison.kl > 0.0);
        let broken = trace(&[f32::NAN, 1.0, 1.0], &[0.0, 1.0, 0.5, 0.0]);
        let comparison = broken.compare(&expected, 1e-3).unwrap();
        assert_eq!(comparison.first_diverging, Some(0));
        let broken = trace(&[1.0, 1.0, 1.0], &[f32::NAN, 1.0, 0.5, 0.0]);
        let comparison = broken.compare(&expected, 1e-3).unwrap();
        assert!(!comparison.agrees() && comparison.kl.is_nan());
        let mut other = expected.clone();
        other.tokens[0] = 7;
        assert!(other.compare(&expected, 1e-3).is_err());
    }

    #[test]
    fn what_is_stored_is_read_back() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("activations.safetensors");
        let stored = trace(&[1.0, -3.0], &[0.0, 1.0, 0.5, 0.0]);
        stored.write(&path).unwrap();
        assert_eq!(Trace::read(&path).unwrap(), stored);
        std::fs::write(&path, b"nothing").unwrap();
        let message = Trace::read(&path).unwrap_err().to_string();
        assert!(message.contains("activations.safetensors"), "{message}");
    }
}
