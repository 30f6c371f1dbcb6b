//! The weights of the parts that mix tokens.

use super::Loader;
use crate::experts::{ExpertSource, PerHeadLinear};
use crate::inventory::{Projection, TensorId, TensorRole};
use crate::layer::{
    GqaWeights, HeadLayerNorm, LinearAttentionWeights, MlaWeights, ShortConvWeights,
};
use crate::linear::Linear;
use crate::spec::{GqaSpec, LinearAttentionSpec, MlaSpec, QkNormSpec, ShortConvSpec};
use crate::weights::WeightForm;
use ferrum_kernels::{ExpertShape, GgufRows, LlmBackend};
use ferrum_types::{FloatElement, Result};
use std::ops::Range;

impl<B: LlmBackend, W: WeightForm<B>> Loader<'_, '_, B, W> {
    pub(super) fn gqa(&mut self, index: usize, gqa: &GqaSpec) -> Result<GqaWeights<B>> {
        let mut head_norm = |role| match gqa.qk_norm {
            QkNormSpec::None => Ok(None),
            QkNormSpec::Heads | QkNormSpec::Projection => {
                self.vector(TensorId::in_layer(index, role)).map(Some)
            }
            QkNormSpec::LayerHeads | QkNormSpec::LayerEach => Ok(None),
            QkNormSpec::Unweighted => {
                let ones = vec![1.0; gqa.head_dim];
                self.device.from_slice(&ones).map(Some)
            }
        };
        let q_norm = head_norm(TensorRole::QueryNorm)?;
        let k_norm = match gqa.shared_kv {
            None => head_norm(TensorRole::KeyNorm)?,
            Some(_) => None,
        };
        let v_norm = gqa.value_norm && gqa.shared_kv.is_none();
        let v_norm = v_norm.then(|| self.device.from_slice(&vec![1.0; gqa.value_dim]));
        let sinks = TensorId::in_layer(index, TensorRole::AttentionSinks);
        let sinks = gqa.sinks.then(|| self.vector(sinks)).transpose()?;
        Ok(GqaWeights {
            qkv: self.projection(index, Projection::Qkv)?,
            q_norm,
            k_norm,
            v_norm: v_norm.transpose()?,
            layer_norms: self.head_layer_norms(index, gqa)?,
            projection_norms: self.cut.projection_norms(index),
            sinks,
            gate: match gqa.gate {
                true => Some(self.projection(index, Projection::AttnGate)?),
                false => None,
            },
            out: self.projection(index, Projection::AttnOut)?,
        })
    }

    /// Layer norms of query and key heads, if they have such.
    fn head_layer_norms(
        &mut self,
        index: usize,
        gqa: &GqaSpec,
    ) -> Result<Option<[HeadLayerNorm<B>; 2]>> {
        if !gqa.has_layer_norms() {
            return Ok(None);
        }
        let each = gqa.qk_norm == QkNormSpec::LayerEach;
        let mut norm = |role| -> Result<HeadLayerNorm<B>> {
            let id = TensorId::in_layer(index, role);
            if !each {
                return Ok(HeadLayerNorm {
                    weight: self.vector(id)?,
                    bias: Some(self.vector(id.bias())?),
                    factors: None,
                });
            }
            let weights = self.values(&self.tensor(id)?)?;
            let weights: Vec<_> = weights.into_iter().map(B::Act::from_f32).collect();
            Ok(HeadLayerNorm {
                weight: self.device.from_slice(&vec![1.0; gqa.head_dim])?,
                bias: None,
                factors: Some(self.device.from_slice(&weights)?),
            })
        };
        Ok(Some([
            norm(TensorRole::QueryNorm)?,
            norm(TensorRole::KeyNorm)?,
        ]))
    }

    pub(super) fn mla(&mut self, index: usize, mla: &MlaSpec) -> Result<MlaWeights<B>> {
        let at = |role| TensorId::in_layer(index, role);
        let (q_down, q): (_, Box<dyn Linear<B>>) = match mla.q_rank {
            None => (None, self.projection(index, Projection::Qkv)?),
            Some(_) => {
                let down: Box<dyn Linear<B>> = Box::new(self.linear(&[at(TensorRole::QueryDown)])?);
                let norm = self.vector(at(TensorRole::QueryDownNorm))?;
                let up = self.linear(&[at(TensorRole::QueryUp)])?;
                (Some((down, norm)), Box::new(up))
            }
        };
        Ok(MlaWeights {
            q_down,
            q,
            latent: Box::new(self.linear(&[at(TensorRole::LatentDown)])?),
            latent_norm: self.vector(at(TensorRole::LatentNorm))?,
            keys: self.per_head_linear(at(TensorRole::KeyUp))?,
            values: self.per_head_linear(at(TensorRole::ValueUp))?,
            out: self.projection(index, Projection::AttnOut)?,
        })
    }

    /// This rank's heads of a stack of linear layers.
    fn per_head_linear(&mut self, id: TensorId) -> Result<Box<dyn PerHeadLinear<B>>> {
        let (source, tensor, shape) = self.experts(id)?;
        let held = self.cut.slice(&tensor).range;
        let part = ExpertShape {
            experts: held.len(),
            ..shape
        };
        let stack = match (self.cut.is_whole(), source) {
            (true, source) => self.load_stack(&source, shape)?,
            (false, ExpertSource::Each(all)) => {
                let all = all[held].to_vec();
                self.load_stack(&ExpertSource::Each(all), part)?
            }
            (false, ExpertSource::Stack(stack)) => {
                let stack = some_matrices(&stack, shape, held);
                self.load_stack(&ExpertSource::Stack(stack), part)?
            }
            (false, ExpertSource::Reordered(stack)) => {
                let own = stack.gather()?;
                let stack = some_matrices(&own.part(), shape, held);
                self.load_stack(&ExpertSource::Stack(stack), part)?
            }
        };
        Ok(W::per_head_linear(stack, part))
    }

    pub(super) fn short_conv(
        &mut self,
        index: usize,
        conv: &ShortConvSpec,
    ) -> Result<ShortConvWeights<B>> {
        let kernel = TensorId::in_layer(index, TensorRole::ConvKernel);
        let bias = conv.bias.then(|| self.vector(kernel.bias())).transpose()?;
        Ok(ShortConvWeights {
            input: self.projection(index, Projection::ConvIn)?,
            kernel: self.vector(kernel)?,
            bias,
            out: self.projection(index, Projection::ConvOut)?,
        })
    }

    pub(super) fn linear_attention(
        &mut self,
        index: usize,
        linear: &LinearAttentionSpec,
    ) -> Result<LinearAttentionWeights<B>> {
        let at = |role| TensorId::in_layer(index, role);
        let kernel = at(TensorRole::LinearConv);
        let bias = linear.conv_bias;
        let conv_bias = bias.then(|| self.vector(kernel.bias())).transpose()?;
        let mut params = Vec::with_capacity(3 * linear.value_heads);
        for role in [
            TensorRole::LinearDecay,
            TensorRole::LinearStepBias,
            TensorRole::LinearSkip,
        ] {
            match self.model.spec.tensor(at(role)) {
                Some(tensor) => params.extend(self.values(&tensor)?),
                None => params.resize(params.len() + linear.value_heads, 0.0),
            }
        }
        let norm = self.tensor(at(TensorRole::LinearNorm))?;
        let norm = self.values(&norm)?;
        let groups = norm.chunks((linear.values() / linear.norm_rows()).max(1));
        let groups = groups.map(|group| self.device.from_slice(group));
        Ok(LinearAttentionWeights {
            norms: groups.collect::<Result<_>>()?,
            input: self.projection(index, Projection::LinearIn)?,
            kernel: self.vector(kernel)?,
            conv_bias,
            params: self.device.from_slice(&params)?,
            out: self.projection(index, Projection::LinearOut)?,
        })
    }
}

/// Some of a stack's matrices.
fn some_matrices<'a>(stack: &GgufRows<'a>, shape: ExpertShape, held: Range<usize>) -> GgufRows<'a> {
    let each = stack.bytes.len() / shape.experts.max(1);
    let bytes = &stack.bytes[held.start * each..held.end * each];
    GgufRows::new(bytes, stack.ty, held.len() * shape.n)
}
