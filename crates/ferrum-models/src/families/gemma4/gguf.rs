//! Gemma 4 in the words of GGUF files.

use super::super::{common, experts};
use super::{FAMILY, add_per_layer, finish};
use crate::inventory::{TensorId, TensorRole};
use crate::spec::{Activation, DecoderSpec, ExpertRouting, RopeScaling, RopeSpec};
use ferrum_formats::{Gguf, TensorSource};
use ferrum_kernels::RopeStyle;
use ferrum_types::{Error, Result};

/// Reads the metadata.
pub(super) fn read(gguf: &Gguf) -> Result<DecoderSpec> {
    let mut spec = common::from_gguf(&FAMILY, gguf)?;
    let size = |name: &str| -> Result<Option<usize>> {
        Ok(gguf.u32(&format!("gemma4.{name}"))?.map(|n| n as usize))
    };
    let dim = size("embedding_length_per_layer_input")?.unwrap_or(0);
    let rows = spec.vocab_size;
    add_per_layer(&mut spec, dim, rows);
    common::each_mlp(&mut spec, |mlp| mlp.activation = Activation::GeluTanh);
    if let Some(moe) = experts::from_gguf(gguf, ExpertRouting::softmax(true))? {
        experts::place_beside(&mut spec, &moe);
    }
    let (keys, values) = (
        size("attention.key_length_swa")?,
        size("attention.value_length_swa")?,
    );
    common::each_gqa(&mut spec, |i, gqa| {
        if gqa.sliding_window.is_some() {
            gqa.head_dim = keys.unwrap_or(gqa.head_dim);
            gqa.value_dim = values.unwrap_or(gqa.value_dim);
        }
        let value = FAMILY
            .gguf_names
            .name(TensorId::in_layer(i, TensorRole::Value));
        gqa.keys_are_values = value.is_some_and(|name| gguf.get(&name).is_none());
    });
    let rot_dim = size("rope.dimension_count_swa")?;
    let theta = common::gguf_f32(gguf, "rope.freq_base_swa")?;
    let local = RopeSpec {
        rot_dim: rot_dim.unwrap_or_else(|| common::head_dim_of(&mut spec, true)),
        theta: theta.unwrap_or(10_000.0),
        style: RopeStyle::HalfSplit,
        scaling: RopeScaling::None,
    };
    spec.ropes.push(local);
    common::ropes_by_window(&mut spec);
    let shared = size("attention.shared_kv_layers")?.unwrap_or(0);
    common::share_last(&mut spec, shared).map_err(|expected| {
        let path = gguf.path().display();
        Error::Model(format!(
            "{path}: field \"gemma4.attention.shared_kv_layers\": found {shared}, expected {expected}"
        ))
    })?;
    finish(&mut spec);
    Ok(spec)
}
