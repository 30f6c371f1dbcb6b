//! One decoder layer, composed from the two choices of its [`LayerSpec`].
//!
//! The residual stream is updated by the norm that follows it: a part leaves its output in
//! `scratch.delta`, and the next norm adds it (`fused_add_rms_norm`). So a layer starts with the
//! previous layer's output pending, and leaves its own pending.

use crate::experts::{Experts, MoeScratch, MoeWidths};
use crate::inventory::Projection;
use crate::linear::{Linear, LogitLinear};
use crate::lora::{Adapters, LoraScratch};
use crate::profile::Profiler;
use crate::rope::RopeTables;
use crate::spec::{
    Activation, AttentionSpec, DecoderSpec, FeedForwardSpec, GatedMlpSpec, GqaSpec, LayerSpec,
    ShortConvSpec,
};
use ferrum_kernels::{
    Act, AttnConfig, Backend, BackendKvDtype, CausalConvShape, DeviceBatch, GeluKind, HeadLayout,
    KvDtypeKind, KvLayer, LlmBackend, NormShape, PagedQkv, QkNorm, QkvShape, QkvTransform,
    Residual, Rope, RowShape, StateShape,
};
use ferrum_types::{Error, Result};

/// Weights of one layer.
pub(crate) struct LayerWeights<B: Backend> {
    pub(crate) attn_norm: B::Buffer<f32>,
    pub(crate) attention: AttentionWeights<B>,
    pub(crate) ffn_norm: B::Buffer<f32>,
    pub(crate) feed_forward: FeedForwardWeights<B>,
}

/// Weights of the part that mixes tokens, of the kind that the layer's spec says.
pub(crate) enum AttentionWeights<B: Backend> {
    Gqa(GqaWeights<B>),
    ShortConv(ShortConvWeights<B>),
}

/// Weights of a gated short convolution.
pub(crate) struct ShortConvWeights<B: Backend> {
    /// To `[b | c | x]`.
    pub(crate) input: Box<dyn Linear<B>>,
    /// `[channels, kernel]`.
    pub(crate) kernel: B::Buffer<f32>,
    pub(crate) bias: Option<B::Buffer<f32>>,
    pub(crate) out: Box<dyn Linear<B>>,
}

/// Weights of the part that looks at each token alone, of the kind that the layer's spec says.
pub(crate) enum FeedForwardWeights<B: Backend> {
    GatedMlp(GatedMlpWeights<B>),
    Moe(MoeWeights<B>),
}

/// Weights of grouped-query attention.
pub(crate) struct GqaWeights<B: Backend> {
    /// q, k and v as one projection, or q alone where the layer shares keys and values.
    pub(crate) qkv: Box<dyn Linear<B>>,
    pub(crate) q_norm: Option<B::Buffer<f32>>,
    pub(crate) k_norm: Option<B::Buffer<f32>>,
    pub(crate) out: Box<dyn Linear<B>>,
}

impl<B: Backend> GqaWeights<B> {
    /// What happens to queries and keys before attention.
    fn transform<'a>(&'a self, step: &StepState<'a, B>) -> QkvTransform<'a, B> {
        let head_norm = |weight| QkNorm {
            weight,
            eps: step.spec.norm_eps,
        };
        QkvTransform {
            q_norm: self.q_norm.as_ref().map(head_norm),
            k_norm: self.k_norm.as_ref().map(head_norm),
            rope: Some(Rope {
                cos: &step.rope.cos,
                sin: &step.rope.sin,
                rows: &step.batch.rope_rows,
                rot_dim: step.spec.rope.rot_dim,
                style: step.spec.rope.style,
            }),
        }
    }
}

/// Weights of a gated feed-forward.
pub(crate) struct GatedMlpWeights<B: Backend> {
    /// gate and up as one projection.
    pub(crate) gate_up: Box<dyn Linear<B>>,
    pub(crate) down: Box<dyn Linear<B>>,
}

/// Weights of a mixture of experts.
pub(crate) struct MoeWeights<B: Backend> {
    /// Gives a logit for each expert.
    pub(crate) router: Box<dyn LogitLinear<B>>,
    pub(crate) experts: Box<dyn Experts<B>>,
}

/// The recurrent states of a layer, a row for each slot.
pub(crate) struct LayerStates<B: Backend> {
    pub(crate) states: B::Buffer<f32>,
    pub(crate) shape: StateShape,
}

impl<B: Backend> LayerStates<B> {
    /// Zeros, in so many rows.
    pub(crate) fn alloc(device: &B, rows: usize, elements: usize) -> Result<Self> {
        let shape = StateShape {
            slots: rows,
            elements,
        };
        let states = device.alloc(shape.slots.saturating_mul(elements))?;
        Ok(Self { states, shape })
    }
}

/// Where a layer keeps what it has seen.
pub(crate) enum CacheMut<'a, B: BackendKvDtype<K>, K: KvDtypeKind> {
    Pool(&'a mut KvLayer<B, K>),
    State(&'a mut LayerStates<B>),
    None,
}

/// Activations of a step, reused by all layers. Rows are tokens.
pub(crate) struct Scratch<B: Backend> {
    /// `[tokens, hidden]`: the residual stream.
    pub(crate) residual: Residual<B>,
    /// `[tokens, hidden]`: input of a part.
    pub(crate) normed: Act<B>,
    /// `[tokens, hidden]`: output of a part, not yet in the residual.
    pub(crate) delta: Act<B>,
    /// `[tokens, q_dim + k_dim + v_dim]`.
    pub(crate) qkv: Act<B>,
    /// `[tokens, q_dim]`.
    pub(crate) q: Act<B>,
    /// `[tokens, heads · value_dim]`: attention's output.
    pub(crate) attn: Act<B>,
    /// `[tokens, 2·intermediate]`.
    pub(crate) gate_up: Act<B>,
    /// `[tokens, intermediate]`.
    pub(crate) gated: Act<B>,
    /// For layers with experts, if there are any.
    pub(crate) moe: Option<MoeScratch<B>>,
    /// For adapters, once there has been one.
    pub(crate) lora: Option<LoraScratch<B>>,
    pub(crate) profiler: Profiler<B>,
}

/// Elements per token of each scratch buffer but `moe` and `lora`, in the order of [`Scratch`]'s fields.
pub(crate) fn scratch_widths(spec: &DecoderSpec) -> [usize; 8] {
    let (mut q_dim, mut qkv_dim, mut out_dim, mut intermediate) = (0, 0, 0, 0);
    for layer in &spec.layers {
        if let FeedForwardSpec::GatedMlp(mlp) = &layer.feed_forward {
            intermediate = intermediate.max(mlp.intermediate);
        }
        let (shape, out) = match &layer.attention {
            AttentionSpec::Gqa(gqa) => (gqa.qkv_shape(0), gqa.heads * gqa.value_dim),
            AttentionSpec::ShortConv(conv) => (conv.parts(0), conv.channels),
        };
        q_dim = q_dim.max(shape.q_dim());
        out_dim = out_dim.max(out);
        qkv_dim = qkv_dim.max(shape.row_dim());
    }
    let hidden = spec.hidden_size;
    [
        hidden,
        hidden,
        hidden,
        qkv_dim,
        q_dim,
        out_dim,
        2 * intermediate,
        intermediate,
    ]
}

impl<B: Backend> Scratch<B> {
    pub(crate) fn alloc(
        device: &B,
        spec: &DecoderSpec,
        max_tokens: usize,
        profile: bool,
    ) -> Result<Self> {
        let [residual, normed, delta, qkv, q, attn, gate_up, gated] = scratch_widths(spec);
        let alloc = |width: usize| device.alloc::<B::Act>(max_tokens * width);
        Ok(Self {
            residual: device.alloc(max_tokens * residual)?,
            normed: alloc(normed)?,
            delta: alloc(delta)?,
            qkv: alloc(qkv)?,
            q: alloc(q)?,
            attn: alloc(attn)?,
            gate_up: alloc(gate_up)?,
            gated: alloc(gated)?,
            moe: MoeWidths::of(spec)
                .map(|widths| MoeScratch::alloc(device, widths, max_tokens))
                .transpose()?,
            lora: None,
            profiler: Profiler::new(device, profile)?,
        })
    }
}

impl<B: Backend> Scratch<B> {
    /// Adds what the last layer left pending, so that `residual` is the stream behind it.
    pub(crate) fn add_pending(
        &mut self,
        ctx: &mut B::Context,
        step: &StepState<'_, B>,
    ) -> Result<()> {
        let len = step.batch.shape.tokens * step.spec.hidden_size;
        let Self {
            residual,
            delta,
            profiler,
            ..
        } = self;
        profiler.measure(ctx, "residual", |ctx| {
            B::add_inplace(ctx, residual, delta, len)
        })
    }
}

/// What all layers of a step share.
pub(crate) struct StepState<'a, B: Backend> {
    pub(crate) spec: &'a DecoderSpec,
    pub(crate) batch: &'a DeviceBatch<B>,
    pub(crate) rope: &'a RopeTables<B>,
    pub(crate) adapters: &'a Adapters<B>,
}

impl GqaSpec {
    /// The fused projection of so many tokens.
    pub(crate) fn qkv_shape(&self, tokens: usize) -> QkvShape {
        QkvShape {
            tokens,
            heads: self.heads,
            kv_heads: self.kv_heads,
            head_dim: self.head_dim,
            value_dim: self.value_dim,
        }
    }
}

/// Runs layer number `index` of a stage. `scratch.residual` holds the stream before the previous layer's
/// feed-forward, whose output is pending in `scratch.delta` (nothing is pending at the first layer of a stage).
pub(crate) fn layer_forward<B: LlmBackend + BackendKvDtype<K>, K: KvDtypeKind>(
    ctx: &mut B::Context,
    index: usize,
    layer: (&LayerSpec, &LayerWeights<B>),
    cache: CacheMut<'_, B, K>,
    step: &StepState<'_, B>,
    scratch: &mut Scratch<B>,
) -> Result<()> {
    let (spec, weights) = layer;
    let rows = step.batch.shape.tokens;
    let norm = NormShape {
        rows,
        dim: step.spec.hidden_size,
        eps: step.spec.norm_eps,
    };
    let Scratch {
        residual,
        normed,
        delta,
        profiler,
        ..
    } = scratch;
    profiler.measure(ctx, "attn_norm", |ctx| match index {
        0 => B::rms_norm(ctx, residual, &weights.attn_norm, normed, norm),
        _ => B::fused_add_rms_norm(ctx, residual, delta, &weights.attn_norm, normed, norm),
    })?;
    match (&spec.attention, &weights.attention, cache) {
        (AttentionSpec::Gqa(gqa), AttentionWeights::Gqa(weights), CacheMut::Pool(kv)) => {
            gqa_forward(ctx, index, (gqa, weights), kv, step, scratch)?;
        }
        (
            AttentionSpec::ShortConv(conv),
            AttentionWeights::ShortConv(weights),
            CacheMut::State(states),
        ) => short_conv_forward(ctx, (conv, weights), states, step, scratch)?,
        _ => return Err(other_kind(index)),
    }
    let Scratch {
        residual,
        normed,
        delta,
        profiler,
        ..
    } = scratch;
    profiler.measure(ctx, "ffn_norm", |ctx| {
        B::fused_add_rms_norm(ctx, residual, delta, &weights.ffn_norm, normed, norm)
    })?;
    match (&spec.feed_forward, &weights.feed_forward) {
        (FeedForwardSpec::GatedMlp(mlp), FeedForwardWeights::GatedMlp(weights)) => {
            gated_mlp_forward(ctx, index, (mlp, weights), step, scratch)
        }
        (FeedForwardSpec::Moe(_), FeedForwardWeights::Moe(weights)) => {
            moe_forward(ctx, weights, rows, scratch)
        }
        _ => Err(other_kind(index)),
    }
}

/// Weights are loaded by the spec, so this is a runner made of two different models.
fn other_kind(index: usize) -> Error {
    let reason =
        format!("the weights of layer {index} of a stage are not of the kind that its spec says");
    Error::invalid("layer", reason)
}

impl ShortConvSpec {
    /// The projection to `[b | c | x]` of so many tokens, as parts of equal width.
    fn parts(&self, tokens: usize) -> QkvShape {
        QkvShape {
            tokens,
            heads: 1,
            kv_heads: 1,
            head_dim: self.channels,
            value_dim: self.channels,
        }
    }
}

/// `normed` → `delta` through a gated short convolution, whose last inputs are the state of each sequence.
fn short_conv_forward<B: LlmBackend>(
    ctx: &mut B::Context,
    (conv, weights): (&ShortConvSpec, &ShortConvWeights<B>),
    LayerStates { states, shape }: &mut LayerStates<B>,
    step: &StepState<'_, B>,
    scratch: &mut Scratch<B>,
) -> Result<()> {
    let rows = step.batch.shape.tokens;
    let Scratch {
        normed,
        delta,
        qkv,
        q,
        attn,
        profiler,
        ..
    } = scratch;
    // [tokens, hidden] → [tokens, b | c | x]
    profiler.measure(ctx, "conv_in", |ctx| {
        weights.input.forward(ctx, normed, qkv, rows)
    })?;
    let len = rows * conv.channels;
    let shape = CausalConvShape {
        channels: conv.channels,
        kernel: conv.kernel,
        states: *shape,
        offset: 0,
    };
    profiler.measure(ctx, "short_conv", |ctx| {
        B::split_qkv(ctx, qkv, q, attn, normed, conv.parts(rows))?;
        B::mul(ctx, q, normed, delta, len)?;
        let kernel = (&weights.kernel, weights.bias.as_ref());
        B::causal_conv1d(ctx, delta, kernel, states, step.batch, q, shape)?;
        B::mul(ctx, attn, q, normed, len)
    })?;
    // [tokens, channels] → [tokens, hidden]
    profiler.measure(ctx, "conv_out", |ctx| {
        weights.out.forward(ctx, normed, delta, rows)
    })
}

/// `normed` → `delta` through attention, writing this step's keys and values if they are the layer's own.
fn gqa_forward<B: BackendKvDtype<K>, K: KvDtypeKind>(
    ctx: &mut B::Context,
    index: usize,
    (gqa, weights): (&GqaSpec, &GqaWeights<B>),
    kv: &mut KvLayer<B, K>,
    step: &StepState<'_, B>,
    scratch: &mut Scratch<B>,
) -> Result<()> {
    let rows = step.batch.shape.tokens;
    let Scratch {
        normed,
        delta,
        qkv,
        q,
        attn,
        lora,
        profiler,
        ..
    } = scratch;
    let projected = match gqa.shared_kv {
        // [tokens, hidden] → [tokens, q_dim + k_dim + v_dim]
        None => &mut *qkv,
        // [tokens, hidden] → [tokens, q_dim]
        Some(_) => &mut *q,
    };
    profiler.measure(ctx, "qkv", |ctx| {
        weights.qkv.forward(ctx, normed, projected, rows)?;
        step.adapters
            .add(ctx, (index, Projection::Qkv), normed, projected, lora)
    })?;
    let shape = gqa.qkv_shape(rows);
    let transform = weights.transform(step);
    match gqa.shared_kv {
        None => profiler.measure(ctx, "rope_kv_append", |ctx| {
            let input = PagedQkv {
                qkv,
                transform,
                shape,
            };
            B::split_qkv_norm_rope_into_paged_cache::<K>(ctx, input, q, kv, step.batch)
        })?,
        Some(_) => profiler.measure(ctx, "rope", |ctx| {
            let QkvTransform { q_norm, rope, .. } = transform;
            B::qk_norm_rope(ctx, q, HeadLayout::TokenMajor, q_norm, rope, shape.q())
        })?,
    }
    let config = AttnConfig {
        heads: gqa.heads,
        kv_heads: gqa.kv_heads,
        head_dim: gqa.head_dim,
        value_dim: gqa.value_dim,
        scale: gqa.scale,
        causal: true,
        sliding_window: gqa.sliding_window,
        softcap: None,
    };
    // [tokens, heads, head_dim] → [tokens, heads, value_dim]
    profiler.measure(ctx, "attention", |ctx| {
        B::paged_attention::<K>(ctx, q, kv, None, step.batch, attn, &config)
    })?;
    // [tokens, heads · value_dim] → [tokens, hidden]
    profiler.measure(ctx, "attn_out", |ctx| {
        weights.out.forward(ctx, attn, delta, rows)?;
        step.adapters
            .add(ctx, (index, Projection::AttnOut), attn, delta, lora)
    })
}

/// `normed` → `delta` through experts.
fn moe_forward<B: Backend>(
    ctx: &mut B::Context,
    weights: &MoeWeights<B>,
    rows: usize,
    scratch: &mut Scratch<B>,
) -> Result<()> {
    let Scratch {
        normed,
        delta,
        moe,
        profiler,
        ..
    } = scratch;
    let Some(moe) = moe else {
        let reason = "the scratch of a model without experts".to_owned();
        return Err(Error::invalid("layer", reason));
    };
    // [tokens, hidden] → [tokens, experts]
    profiler.measure(ctx, "router", |ctx| {
        weights.router.logits(ctx, normed, &mut moe.logits, rows)
    })?;
    profiler.measure(ctx, "experts", |ctx| {
        weights.experts.forward(ctx, normed, moe, delta, rows)
    })
}

/// `normed` → `delta` through a gated feed-forward.
fn gated_mlp_forward<B: Backend>(
    ctx: &mut B::Context,
    index: usize,
    (mlp, weights): (&GatedMlpSpec, &GatedMlpWeights<B>),
    step: &StepState<'_, B>,
    scratch: &mut Scratch<B>,
) -> Result<()> {
    let rows = step.batch.shape.tokens;
    let shape = RowShape {
        rows,
        dim: mlp.intermediate,
    };
    let Scratch {
        normed,
        gate_up,
        gated,
        delta,
        lora,
        profiler,
        ..
    } = scratch;
    // [tokens, hidden] → [tokens, gate | up] → [tokens, intermediate] → [tokens, hidden]
    profiler.measure(ctx, "gate_up", |ctx| {
        weights.gate_up.forward(ctx, normed, gate_up, rows)?;
        step.adapters
            .add(ctx, (index, Projection::GateUp), normed, gate_up, lora)
    })?;
    profiler.measure(ctx, "activation", |ctx| match mlp.activation {
        Activation::Silu => B::fused_silu_mul_split(ctx, gate_up, gated, shape),
        Activation::Gelu => B::fused_gelu_mul_split(ctx, gate_up, gated, GeluKind::Exact, shape),
        Activation::GeluTanh => B::fused_gelu_mul_split(ctx, gate_up, gated, GeluKind::Tanh, shape),
    })?;
    profiler.measure(ctx, "down", |ctx| {
        weights.down.forward(ctx, gated, delta, rows)?;
        step.adapters
            .add(ctx, (index, Projection::Down), gated, delta, lora)
    })
}
