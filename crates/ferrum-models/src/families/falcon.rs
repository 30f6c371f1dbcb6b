//! Falcon: joined projections of queries, keys and values, and usually attention and feed-forward in parallel, behind
//! one layer norm or, where there are several key heads, one each.

use super::common::{self, HfDefaults, HfSizes};
use super::{Family, GgufForm, names};
use crate::inventory::{TensorId, TensorRole};
use crate::spec::{Activation, DecoderSpec, LayerForm, NormKind};
use ferrum_formats::{Gguf, HfConfig, TensorSource};
use ferrum_kernels::RopeStyle;
use ferrum_types::Result;

pub(super) static FAMILY: Family = Family {
    name: "falcon",
    title: "Falcon, Falcon 2",
    hf_architectures: &["FalconForCausalLM"],
    hf_model_types: &["falcon"],
    hf_names: &names::FALCON_NAMES,
    hf_base_names: None,
    hf_rope: RopeStyle::HalfSplit,
    gguf_names: &names::GGUF_NAMES,
    gguf_architectures: &["falcon"],
    gguf_form: Some(GgufForm {
        architecture: "falcon",
        rope: RopeStyle::HalfSplit,
    }),
    from_hf,
    from_gguf,
};

fn from_hf(config: &HfConfig) -> Result<DecoderSpec> {
    if config.bool("alibi")?.unwrap_or(false) {
        let expected = "false: Falcons without rotary positions are not supported";
        return Err(config.field_error("alibi", expected).into());
    }
    let heads = config.require_usize("num_attention_heads")?;
    let grouped = config.bool("new_decoder_architecture")?.unwrap_or(false);
    let one = config.bool("multi_query")?.unwrap_or(true);
    let hidden_size = config.require_usize("hidden_size")?;
    let sizes = HfSizes {
        hidden_size,
        heads,
        kv_heads: match (grouped, one) {
            (true, _) => config.usize("num_kv_heads")?.unwrap_or(heads),
            (false, true) => 1,
            (false, false) => heads,
        },
        intermediate: config.usize("ffn_hidden_size")?.unwrap_or(4 * hidden_size),
        layers: common::hf_layer_count(config, "num_hidden_layers")?,
    };
    let defaults = HfDefaults {
        eps: ("layer_norm_epsilon", 1e-5),
        activation: ("activation", "gelu"),
        tied: true,
        norm: NormKind::Layer { bias: true },
        ..HfDefaults::LLAMA
    };
    let mut spec = common::of_sizes("falcon", config, &sizes, &defaults)?;
    let bias = config.bool("bias")?.unwrap_or(false);
    common::attention_biases(&mut spec, bias);
    common::each_mlp(&mut spec, |mlp| mlp.bias = bias);
    common::without_gates(&mut spec);
    let norms = config.usize("num_ln_in_parallel_attn")?;
    let shared_norm = !grouped || norms.is_some_and(|norms| norms != 2);
    if grouped || config.bool("parallel_attn")?.unwrap_or(true) {
        common::set_form(&mut spec, LayerForm::Parallel { shared_norm });
    }
    Ok(spec)
}

fn from_gguf(gguf: &Gguf) -> Result<DecoderSpec> {
    let mut spec = common::from_gguf(&FAMILY, gguf)?;
    spec.norm = NormKind::Layer { bias: true };
    common::each_mlp(&mut spec, |mlp| mlp.activation = Activation::Gelu);
    common::without_gates(&mut spec);
    let own = TensorId::in_layer(0, TensorRole::ParallelAttentionNorm);
    let own = FAMILY.gguf_names.name(own);
    let shared_norm = own.is_none_or(|name| gguf.get(&name).is_none());
    common::set_form(&mut spec, LayerForm::Parallel { shared_norm });
    Ok(spec)
}
