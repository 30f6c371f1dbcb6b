//! The experts of families that have some, read from their configs.

use super::names::GGUF_NAMES;
use crate::inventory::{TensorId, TensorRole};
use crate::spec::{Activation, DecoderSpec, ExpertRouting, FeedForwardSpec, MoeSpec};
use ferrum_formats::{Gguf, HfConfig, TensorSource};
use ferrum_types::{Error, Result};

/// What `transformers` takes for keys that a `config.json` leaves out.
pub(super) struct HfExperts {
    /// `num_experts`.
    pub(super) experts: usize,
    /// `num_experts_per_tok`.
    pub(super) top_k: usize,
    /// `moe_intermediate_size`.
    pub(super) intermediate: usize,
    /// `norm_topk_prob`.
    pub(super) renormalize: bool,
}

/// Reads the experts of a `config.json` in the words of Qwen.
pub(super) fn from_hf(config: &HfConfig, defaults: &HfExperts) -> Result<MoeSpec> {
    let experts = match config.usize("num_experts")? {
        Some(experts) => Some(experts),
        None => config.usize("num_local_experts")?,
    };
    let renormalize = config.bool("norm_topk_prob")?;
    Ok(MoeSpec {
        experts: experts.unwrap_or(defaults.experts),
        top_k: config
            .usize("num_experts_per_tok")?
            .unwrap_or(defaults.top_k),
        intermediate: config
            .usize("moe_intermediate_size")?
            .unwrap_or(defaults.intermediate),
        routing: ExpertRouting::Softmax {
            renormalize: renormalize.unwrap_or(defaults.renormalize),
        },
    })
}

/// Reads the experts of GGUF metadata, whose weights are renormalised unless `expert_weights_norm`
/// says otherwise. `None` for a model without.
pub(super) fn from_gguf(gguf: &Gguf) -> Result<Option<MoeSpec>> {
    let arch = gguf.architecture()?;
    let key = |name: &str| format!("{arch}.{name}");
    let experts = gguf.u32(&key("expert_count"))?.unwrap_or(0) as usize;
    if experts == 0 {
        return Ok(None);
    }
    let renormalize = gguf.bool(&key("expert_weights_norm"))?.unwrap_or(true);
    let intermediate = match gguf.u32(&key("expert_feed_forward_length"))? {
        Some(intermediate) => intermediate,
        None => gguf.require_u32(&key("feed_forward_length"))?,
    };
    Ok(Some(MoeSpec {
        experts,
        top_k: gguf.require_u32(&key("expert_used_count"))? as usize,
        intermediate: intermediate as usize,
        routing: ExpertRouting::Softmax { renormalize },
    }))
}

/// Gives experts to the layers for which `has` holds.
///
/// # Errors
/// [`Error::Model`] when their activation would not be SiLU, the only one that experts have.
pub(super) fn place(
    spec: &mut DecoderSpec,
    moe: &MoeSpec,
    mut has: impl FnMut(usize) -> bool,
) -> Result<()> {
    for (i, layer) in spec.layers.iter_mut().enumerate() {
        if !has(i) {
            continue;
        }
        if let FeedForwardSpec::GatedMlp(mlp) = &layer.feed_forward
            && mlp.activation != Activation::Silu
        {
            let found = mlp.activation;
            return Err(Error::Model(format!(
                "layer {i}: experts with the activation {found} are not supported, expected silu"
            )));
        }
        layer.feed_forward = FeedForwardSpec::Moe(moe.clone());
    }
    Ok(())
}

/// [`place`] in the layers of a GGUF file that have a router.
pub(super) fn place_gguf(gguf: &Gguf, spec: &mut DecoderSpec) -> Result<()> {
    match from_gguf(gguf)? {
        Some(moe) => place(spec, &moe, |i| {
            let router = GGUF_NAMES.name(TensorId::in_layer(i, TensorRole::Router));
            router.is_some_and(|name| gguf.get(&name).is_some())
        }),
        None => Ok(()),
    }
}
