//! The linear attention of hybrid families, read from their configs.

use super::Family;
use crate::inventory::{TensorId, TensorRole};
use crate::spec::{AttentionSpec, DecoderSpec, LinearAttentionSpec};
use ferrum_formats::{Gguf, HfConfig, TensorSource};
use ferrum_kernels::{HeadOrder, LinearAttentionRule};
use ferrum_types::{Error, Result};

/// Which layers of a GGUF file have linear attention, and what it is like.
pub(super) struct Recurrent {
    pub(super) layers: Vec<bool>,
    pub(super) linear: LinearAttentionSpec,
}

/// Reads the keys `ARCH.ssm.*`. Layers with a convolution are recurrent; biases are there if their tensors are.
pub(super) fn from_gguf(
    family: &Family,
    gguf: &Gguf,
    layers: usize,
    rule: LinearAttentionRule,
) -> Result<Recurrent> {
    let arch = gguf.architecture()?;
    let size = |name: &str| -> Result<usize> {
        Ok(gguf.require_u32(&format!("{arch}.ssm.{name}"))? as usize)
    };
    let has = |id: TensorId| {
        let name = family.gguf_names.name(id);
        name.is_some_and(|name| gguf.get(&name).is_some())
    };
    let conv = |i| TensorId::in_layer(i, TensorRole::LinearConv);
    let all: Vec<_> = (0..layers).map(|i| has(conv(i))).collect();
    let first = all.iter().position(|&is_recurrent| is_recurrent);
    let has_bias = |role| first.is_some_and(|i| has(TensorId::in_layer(i, role).bias()));
    let (inner, value_heads) = (size("inner_size")?, size("time_step_rank")?);
    if value_heads == 0 || !inner.is_multiple_of(value_heads) {
        return Err(Error::Model(format!(
            "{}: field \"{arch}.ssm.inner_size\": found {inner}, expected a multiple of \"{arch}.ssm.time_step_rank\", \
             {value_heads}",
            gguf.path().display()
        )));
    }
    Ok(Recurrent {
        layers: all,
        linear: LinearAttentionSpec {
            rule,
            key_heads: size("group_count")?,
            value_heads,
            order: HeadOrder::Grouped,
            key_dim: size("state_size")?,
            value_dim: inner / value_heads,
            kernel: size("conv_kernel")?,
            conv_bias: has_bias(TensorRole::LinearConv),
            bias: has_bias(TensorRole::LinearOutput),
        },
    })
}

/// The layers that `layer_types` of a `config.json` calls recurrent, or, without that field, those for which `default`
/// holds.
pub(super) fn hf_layers(
    config: &HfConfig,
    layers: usize,
    default: impl Fn(usize) -> bool,
) -> Result<Vec<bool>> {
    let mut types = None;
    for key in ["layer_types", "layers_block_type"] {
        if types.is_none() {
            types = config.strs(key)?.map(|types| (key, types));
        }
    }
    let Some((key, types)) = types else {
        return Ok((0..layers).map(default).collect());
    };
    if types.len() != layers {
        let expected = format!("one entry for each of {layers} layers");
        return Err(config.field_error(key, expected).into());
    }
    let kinds = types.iter().map(|&kind| match kind {
        "linear_attention" | "mamba" => Ok(true),
        "full_attention" | "attention" => Ok(false),
        _ => {
            let expected = "full_attention or linear_attention for each layer";
            Err(config.field_error(key, expected).into())
        }
    });
    kinds.collect()
}

/// Gives linear attention to the layers for which `is_recurrent` holds.
pub(super) fn place(
    spec: &mut DecoderSpec,
    linear: &LinearAttentionSpec,
    is_recurrent: impl Fn(usize) -> bool,
) {
    for (i, layer) in spec.layers.iter_mut().enumerate() {
        if is_recurrent(i) {
            layer.attention = AttentionSpec::Linear(linear.clone());
        }
    }
}
