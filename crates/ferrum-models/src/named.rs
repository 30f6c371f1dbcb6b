//! Tensors by their names in a Hugging Face folder, for models whose parts are not those of a decoder's inventory.

use crate::checkpoint::Checkpoint;
use crate::linear::MatrixLinear;
use crate::progress::LoadProgress;
use crate::stored::{require, to_f32};
use crate::weight_shard::{MatShard, Slice};
use crate::weights::{Dequantized, MatrixUse, Prepared, WeightForm};
use ferrum_formats::{HfFolder, ModelSource, TensorSource};
use ferrum_kernels::{GgufRows, LlmBackend, MatShape, QuantWeights};
use ferrum_types::{Error, GgufQuantType, Result};
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;

/// A layer norm's weight and bias, `[hidden]`.
pub(crate) struct LayerNorm<B: LlmBackend> {
    pub(crate) weight: B::Buffer<f32>,
    pub(crate) bias: B::Buffer<f32>,
}

/// In what type the matrices of an encoder are kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WeightDtype {
    /// As its file has them.
    #[default]
    Stored,
    /// Those of f32 rounded to bf16, which processors with products of bf16 compute about twice as fast. Vectors have a
    /// cosine of about 0.9999 with those of f32.
    Bf16,
}

/// What linear layers have beside their matrix.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Bias {
    /// Nothing.
    None,
    /// A bias each.
    Each,
    /// A bias each, times this.
    Times(f32),
    /// A bias where the file has one, and zeros where it has none.
    Some,
}

/// Some rows of a linear layer that is stored under `name`, less `.weight` and `.bias`.
pub(crate) struct LinearPart<'n> {
    pub(crate) name: &'n str,
    pub(crate) stored_rows: usize,
    pub(crate) rows: Range<usize>,
}

impl<'n> LinearPart<'n> {
    /// All of a layer of so many outputs.
    pub(crate) fn whole(name: &'n str, rows: usize) -> Self {
        Self {
            name,
            stored_rows: rows,
            rows: 0..rows,
        }
    }
}

/// Loads tensors by name onto a device.
pub(crate) struct NamedLoader<'a, 'p, B: LlmBackend, W: WeightForm<B>> {
    device: &'a B,
    tensors: &'a dyn TensorSource,
    checkpoint: Checkpoint<'a>,
    dtype: WeightDtype,
    done: u64,
    total: u64,
    progress: LoadProgress<'p>,
    form: PhantomData<W>,
}

/// The folder of a model that is read from folders only.
pub(crate) fn folder(source: &ModelSource) -> Result<&HfFolder> {
    match source {
        ModelSource::Hf(folder) => Ok(folder),
        ModelSource::Gguf(gguf) => {
            let path = gguf.path().display();
            Err(Error::Model(format!(
                "{path}: models of this kind are read from Hugging Face folders, found a GGUF file"
            )))
        }
    }
}

impl<'a, 'p, B: LlmBackend, W: WeightForm<B>> NamedLoader<'a, 'p, B, W> {
    pub(crate) fn new(
        device: &'a B,
        source: &'a ModelSource,
        dtype: WeightDtype,
        progress: LoadProgress<'p>,
    ) -> Result<Self> {
        let tensors = source.tensors();
        Ok(Self {
            device,
            tensors,
            checkpoint: Checkpoint::new(source),
            dtype,
            done: 0,
            total: tensors.total_bytes(),
            progress,
            form: PhantomData,
        })
    }

    /// Loads what comes next onto another device.
    pub(crate) fn load_onto(&mut self, device: &'a B) {
        self.device = device;
    }

    /// The device that is loaded onto.
    pub(crate) fn device(&self) -> &'a B {
        self.device
    }

    /// Loads linear layers of equal shape `[rows, cols]` as one, one below the other.
    pub(crate) fn load_linear(
        &mut self,
        names: &[impl AsRef<str>],
        [rows, cols]: [usize; 2],
        bias: Bias,
    ) -> Result<MatrixLinear<B, W>> {
        let whole = |name| LinearPart::whole(name, rows);
        let parts: Vec<_> = names.iter().map(|name| whole(name.as_ref())).collect();
        self.load_linear_parts(&parts, cols, bias)
    }

    /// Loads linear layers of `cols` inputs as one, one below the other.
    pub(crate) fn load_linear_parts(
        &mut self,
        from: &[LinearPart<'_>],
        cols: usize,
        bias: Bias,
    ) -> Result<MatrixLinear<B, W>> {
        self.load_parts(from, cols, bias, MatrixUse::Products)
    }

    /// Loads the table `name`, whose rows are looked up, of shape `[rows, cols]`.
    pub(crate) fn load_table(
        &mut self,
        name: &str,
        [rows, cols]: [usize; 2],
    ) -> Result<MatrixLinear<B, W>> {
        let whole = [LinearPart::whole(name, rows)];
        self.load_parts(&whole, cols, Bias::None, MatrixUse::LookUps)
    }

    fn load_parts(
        &mut self,
        from: &[LinearPart<'_>],
        cols: usize,
        bias: Bias,
        for_use: MatrixUse,
    ) -> Result<MatrixLinear<B, W>> {
        let slices = from.iter().map(|part| {
            let stored = part.stored_rows;
            let weights = self
                .checkpoint
                .matrix(part.name, MatShape { rows: stored, cols })?;
            let at = MatShard {
                rows: part.rows.clone(),
                cols: 0..cols,
            };
            Slice::new(&weights, cols, &at)
        });
        let slices = slices.collect::<Result<Vec<_>>>()?;
        let parts: Vec<_> = slices.iter().map(Slice::weights).collect();
        let kept = parts.iter().map(|part| match self.dtype {
            WeightDtype::Stored => Ok(Prepared::Kept(*part)),
            WeightDtype::Bf16 => Prepared::rounded(part, cols),
        });
        let kept = kept.collect::<Result<Vec<_>>>()?;
        let kept: Vec<_> = kept.iter().map(Prepared::weights).collect();
        let weight = Arc::new(W::load(self.device, &kept, cols, for_use)?);
        self.tensors.release();
        self.advance(parts.iter().map(|part| part.stored_bytes() as u64).sum());
        let bias_name = |name: &str| format!("{name}.bias");
        let has = |name: &str| self.tensors.get(&bias_name(name)).is_some();
        let any = match bias {
            Bias::None => false,
            Bias::Each | Bias::Times(_) => true,
            Bias::Some => from.iter().any(|part| has(part.name)),
        };
        let mut values = Vec::new();
        for part in from.iter().filter(|_| any) {
            let (name, rows) = (bias_name(part.name), part.rows.clone());
            match bias == Bias::Some && self.tensors.get(&name).is_none() {
                true => values.resize(values.len() + rows.len(), 0.0),
                false => values.extend_from_slice(&self.vector(&name, &[part.stored_rows])?[rows]),
            }
        }
        if let Bias::Times(factor) = bias {
            values.iter_mut().for_each(|value| *value *= factor);
        }
        let bias = any.then(|| self.device.from_slice(&values)).transpose()?;
        let rows = from.iter().map(|part| part.rows.len()).sum();
        Ok(MatrixLinear {
            weight,
            bias,
            shape: MatShape { rows, cols },
        })
    }

    /// The norm `name`.
    pub(crate) fn norm(&mut self, name: &str, dim: usize) -> Result<LayerNorm<B>> {
        self.norm_times(name, dim, 1.0)
    }

    /// The norm `name`, with zeros for a bias where the file has none.
    pub(crate) fn norm_with_some_bias(&mut self, name: &str, dim: usize) -> Result<LayerNorm<B>> {
        if self.tensors.get(&format!("{name}.bias")).is_some() {
            return self.norm(name, dim);
        }
        let weight = self.vector(&format!("{name}.weight"), &[dim])?;
        Ok(LayerNorm {
            weight: self.device.from_slice(&weight)?,
            bias: self.device.from_slice(&vec![0.0; dim])?,
        })
    }

    /// A norm whose result is that of `name`, times a factor.
    pub(crate) fn norm_times(
        &mut self,
        name: &str,
        dim: usize,
        factor: f32,
    ) -> Result<LayerNorm<B>> {
        let mut part = |part: &str| {
            let mut values = self.vector(&format!("{name}.{part}"), &[dim])?;
            values.iter_mut().for_each(|value| *value *= factor);
            self.device.from_slice(&values)
        };
        Ok(LayerNorm {
            weight: part("weight")?,
            bias: part("bias")?,
        })
    }

    /// All numbers of a tensor, which has to have this shape.
    pub(crate) fn vector(&mut self, name: &str, shape: &[usize]) -> Result<Vec<f32>> {
        let view = require(self.tensors, name, shape)?;
        let values = to_f32(self.tensors, &view)?;
        self.advance(view.bytes.len() as u64);
        Ok(values)
    }

    /// A tensor of one number, whatever its rank.
    pub(crate) fn number(&mut self, name: &str) -> Result<f32> {
        let shape = self.tensors.require(name)?.shape.len();
        let values = self.vector(name, &[1, 1, 1, 1][..shape.min(4)])?;
        Ok(values.first().copied().unwrap_or(0.0))
    }

    /// A matrix of numbers that were put in order here, in f32.
    pub(crate) fn matrix(
        &self,
        values: &[f32],
        MatShape { rows, cols }: MatShape,
        for_use: MatrixUse,
    ) -> Result<B::Weight> {
        let raw: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        let part = QuantWeights::Gguf(GgufRows::new(&raw, GgufQuantType::F32, rows));
        Dequantized::load(self.device, &[part], cols, for_use)
    }

    fn advance(&mut self, bytes: u64) {
        self.done += bytes;
        (self.progress)(self.done.min(self.total), self.total);
    }
}
