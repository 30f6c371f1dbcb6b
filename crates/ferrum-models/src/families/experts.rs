//! The experts of families that have some, read from their configs.

use super::names::GGUF_NAMES;
use crate::inventory::{TensorId, TensorRole};
use crate::spec::{
    Activation, DecoderSpec, ExpertRouting, FeedForwardSpec, MoeSpec, SharedExpertSpec,
};
use ferrum_formats::{Gguf, HfConfig, TensorSource};
use ferrum_kernels::{ExpertActivation, ExpertGroups, ExpertScore, GroupScore};
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

/// Reads the experts of a `config.json` in the words of Qwen or DeepSeek: a softmax over all of them, without a shared
/// one.
pub(super) fn from_hf(config: &HfConfig, defaults: &HfExperts) -> Result<MoeSpec> {
    let mut experts = None;
    for key in ["num_experts", "num_local_experts", "n_routed_experts"] {
        experts = match experts {
            Some(found) => Some(found),
            None => config.usize(key)?,
        };
    }
    let renormalize = config.bool("norm_topk_prob")?;
    Ok(MoeSpec {
        experts: experts.unwrap_or(defaults.experts),
        top_k: config
            .usize("num_experts_per_tok")?
            .unwrap_or(defaults.top_k),
        intermediate: config
            .usize("moe_intermediate_size")?
            .unwrap_or(defaults.intermediate),
        routing: ExpertRouting::softmax(renormalize.unwrap_or(defaults.renormalize)),
        activation: ExpertActivation::Silu,
        bias: false,
        input_scale: false,
        shared: None,
        output_scale: false,
        norms: false,
    })
}

/// What DeepSeek says beside it, as do those who followed it.
pub(super) struct Grouped {
    /// `routed_scaling_factor`.
    pub(super) scale: f64,
    /// `n_group` and `topk_group`.
    pub(super) groups: (usize, usize),
    /// `n_shared_experts`.
    pub(super) shared: usize,
}

/// Adds to `moe` the factor, the shared experts and, if they are `used`, the groups that a `config.json` states.
pub(super) fn grouped_from_hf(
    config: &HfConfig,
    moe: &mut MoeSpec,
    defaults: &Grouped,
    used: Option<GroupScore>,
) -> Result<()> {
    let scale = config.f64("routed_scaling_factor")?;
    moe.routing.scale = scale.unwrap_or(defaults.scale) as f32;
    let groups = config.usize("n_group")?.unwrap_or(defaults.groups.0);
    let top = config.usize("topk_group")?.unwrap_or(defaults.groups.1);
    // One group, or all of them, leave every expert to choose from.
    moe.routing.groups = used
        .filter(|_| groups > 1 && top != groups)
        .map(|score| ExpertGroups { groups, top, score });
    let shared = config.usize("n_shared_experts")?.unwrap_or(defaults.shared);
    moe.shared = shared_of(shared, moe.intermediate);
    Ok(())
}

/// So many shared experts of one width.
fn shared_of(count: usize, each: usize) -> Option<SharedExpertSpec> {
    (count > 0).then(|| SharedExpertSpec {
        intermediate: count.saturating_mul(each),
        activation: Activation::Silu,
        gated: false,
    })
}

/// Whether a layer has experts by `decoder_sparse_step` and `mlp_only_layers`, in the words of Qwen.
pub(super) fn sparse_layers(config: &HfConfig, moe: &MoeSpec) -> Result<impl Fn(usize) -> bool> {
    let dense = config.usizes("mlp_only_layers")?.unwrap_or_default();
    let step = config.usize("decoder_sparse_step")?.unwrap_or(1);
    if step == 0 {
        return Err(config
            .field_error("decoder_sparse_step", "at least 1")
            .into());
    }
    let experts = moe.experts;
    Ok(move |i: usize| experts > 0 && (i + 1).is_multiple_of(step) && !dense.contains(&i))
}

/// Reads the experts of GGUF metadata. What it does not say of their routing is as in `defaults`. `None` for a model
/// without.
pub(super) fn from_gguf(gguf: &Gguf, defaults: ExpertRouting) -> Result<Option<MoeSpec>> {
    let arch = gguf.architecture()?;
    let key = |name: &str| format!("{arch}.{name}");
    let size = |name: &str| Ok::<_, Error>(gguf.u32(&key(name))?.map(|n| n as usize));
    let experts = size("expert_count")?.unwrap_or(0);
    if experts == 0 {
        return Ok(None);
    }
    let intermediate = match size("expert_feed_forward_length")? {
        Some(intermediate) => intermediate,
        None => gguf.require_u32(&key("feed_forward_length"))? as usize,
    };
    let score = match gguf.u32(&key("expert_gating_func"))? {
        Some(1) => ExpertScore::Softmax,
        Some(2) => ExpertScore::Sigmoid,
        // The softmax over the chosen alone is that over all, renormalised.
        Some(3) => ExpertScore::Softmax,
        _ => defaults.score,
    };
    let renormalize = gguf.bool(&key("expert_weights_norm"))?;
    let scale = gguf.f32(&key("expert_weights_scale"))?;
    let groups = size("expert_group_count")?.zip(size("expert_group_used_count")?);
    let has = |role| in_some_layer(gguf, role).is_some();
    let stated = match size("expert_shared_feed_forward_length")? {
        Some(length) => shared_of(1, length),
        None => shared_of(size("expert_shared_count")?.unwrap_or(0), intermediate),
    };
    // A file may have the tensors and say nothing of their width.
    let shared = shared_width(gguf).and_then(|width| stated.or(shared_of(1, width)));
    Ok(Some(MoeSpec {
        experts,
        top_k: gguf.require_u32(&key("expert_used_count"))? as usize,
        intermediate,
        routing: ExpertRouting {
            score,
            groups: groups
                .filter(|&(groups, top)| groups > 1 && top != groups)
                .map(|(groups, top)| ExpertGroups {
                    groups,
                    top,
                    score: match score {
                        ExpertScore::Softmax => GroupScore::Best,
                        ExpertScore::Sigmoid => GroupScore::BestTwo,
                    },
                }),
            correction: has(TensorRole::ExpertCorrection),
            renormalize: renormalize.unwrap_or(defaults.renormalize),
            // Some files have 0 for none.
            scale: scale
                .filter(|&scale| scale != 0.0)
                .unwrap_or(defaults.scale),
        },
        activation: ExpertActivation::Silu,
        bias: in_some_layer(gguf, TensorRole::ExpertDown).is_some_and(|id| {
            GGUF_NAMES
                .name(id.bias())
                .is_some_and(|n| gguf.get(&n).is_some())
        }),
        input_scale: false,
        output_scale: false,
        norms: false,
        shared: shared.map(|shared| SharedExpertSpec {
            gated: has(TensorRole::SharedRouter),
            ..shared
        }),
    }))
}

/// The width of the shared expert by the shape of its down projection, `[hidden, width]`; `None` without one.
fn shared_width(gguf: &Gguf) -> Option<usize> {
    let name = GGUF_NAMES.name(in_some_layer(gguf, TensorRole::SharedDown)?)?;
    gguf.get(&name)?.shape.last().copied()
}

/// The first layer's tensor of this role, if some layer has one.
fn in_some_layer(gguf: &Gguf, role: TensorRole) -> Option<TensorId> {
    let names = gguf.infos().map(|info| GGUF_NAMES.parse(&info.name));
    let ids = names.flatten();
    ids.filter(|id| id.role == role).min_by_key(|id| id.layer)
}

/// Puts experts beside the feed-forward of each layer, in branches with norms of their own (Gemma 4).
pub(super) fn place_beside(spec: &mut DecoderSpec, moe: &MoeSpec) {
    for layer in &mut spec.layers {
        if let FeedForwardSpec::GatedMlp(mlp) = &layer.feed_forward {
            let shared = SharedExpertSpec {
                intermediate: mlp.intermediate,
                activation: mlp.activation,
                gated: false,
            };
            layer.feed_forward = FeedForwardSpec::Moe(MoeSpec {
                activation: ExpertActivation::GeluTanh,
                shared: Some(shared),
                output_scale: true,
                norms: true,
                ..moe.clone()
            });
        }
    }
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
pub(super) fn place_gguf(
    gguf: &Gguf,
    spec: &mut DecoderSpec,
    defaults: ExpertRouting,
) -> Result<()> {
    match from_gguf(gguf, defaults)? {
        Some(moe) => place(spec, &moe, |i| {
            let router = GGUF_NAMES.name(TensorId::in_layer(i, TensorRole::Router));
            router.is_some_and(|name| gguf.get(&name).is_some())
        }),
        None => Ok(()),
    }
}
