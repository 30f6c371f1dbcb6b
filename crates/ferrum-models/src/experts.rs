//! Experts of a feed-forward: where a file has them, their stacks on a device, and a step through them.
//!
//! Only forms of weights with expert kernels ([`Moe`](crate::Moe)) make [`Experts`]; the forward path sees those
//! alone, so it is the same code on backends that have no such kernels. How stacks are loaded in a form is no matter of
//! this module.

use crate::expert_relayout::ReorderedExperts;
use crate::input_gather::InputGather;
use crate::rank_index::RankIndex;
use crate::spec::{DecoderSpec, FeedForwardSpec, MoeSpec};
use ferrum_kernels::{
    Act, Backend, BackendCollective, BackendGraph, BackendMoeFused, ExpertInput, ExpertProjection,
    ExpertScore, ExpertShape, GgufRows, Logits, MoeRouting, MoeShape, QuantWeights, ReduceOp,
    RouteShape, RowShape,
};
use ferrum_types::{Error, Result};

/// The experts of one layer.
pub trait Experts<B: Backend>: Send + Sync {
    /// `out[tokens, hidden]` = the weighted sum of what the chosen experts make of `x` (the same shape); the router's
    /// logits are in `scratch`. What a shared expert gave is added: it is in `out`, or where it has a gate in
    /// `scratch` with the gate's logits.
    fn forward(
        &self,
        ctx: &mut B::Context,
        x: &Act<B>,
        scratch: &mut MoeScratch<B>,
        out: &mut Act<B>,
        tokens: usize,
    ) -> Result<()>;
}

/// The matrices `[n, k]` of a layer's experts, as they lie in a file.
pub enum ExpertSource<'a> {
    /// One tensor `[experts, n, k]`, as `experts · n` rows.
    Stack(GgufRows<'a>),
    /// A matrix, or a part of a tensor, for each expert.
    Each(Vec<QuantWeights<'a>>),
    /// One tensor that has them in another order.
    Reordered(ReorderedExperts<'a>),
}

impl ExpertSource<'_> {
    /// Calls `f` with each tensor, or part of one; of a stack that is put together, with one of its format without bytes.
    pub(crate) fn each(&self, mut f: impl FnMut(QuantWeights<'_>)) {
        match self {
            ExpertSource::Stack(part) => f(QuantWeights::Gguf(*part)),
            ExpertSource::Each(all) => all.iter().for_each(|one| f(*one)),
            ExpertSource::Reordered(stack) => f(stack.format()),
        }
    }

    /// Bytes in the file.
    pub(crate) fn stored_bytes(&self) -> u64 {
        match self {
            ExpertSource::Stack(part) => part.bytes.len() as u64,
            ExpertSource::Each(all) => all.iter().map(|one| one.stored_bytes() as u64).sum(),
            ExpertSource::Reordered(stack) => stack.bytes(),
        }
    }
}

/// The projections of a layer's experts, whose stacks are `T`.
pub struct ExpertStacks<B: Backend, T> {
    /// `[experts, intermediate, hidden]`.
    pub gate: ExpertStack<B, T>,
    /// `[experts, intermediate, hidden]`.
    pub up: ExpertStack<B, T>,
    /// `[experts, hidden, intermediate]`.
    pub down: ExpertStack<B, T>,
    /// `[experts]`: what is added to scores where experts are chosen.
    pub correction: Option<B::Buffer<f32>>,
    /// `[experts]`: what the output of each is multiplied with.
    pub scale: Option<B::Buffer<f32>>,
    /// Elements of the residual stream.
    pub hidden: usize,
}

/// One projection of all experts.
pub struct ExpertStack<B: Backend, T> {
    /// The matrices.
    pub matrices: T,
    /// `[experts, outputs]`.
    pub bias: Option<B::Buffer<f32>>,
}

impl<B: BackendMoeFused> ExpertStack<B, B::Experts> {
    fn projection(&self) -> ExpertProjection<'_, B> {
        ExpertProjection {
            matrices: &self.matrices,
            bias: self.bias.as_ref(),
        }
    }
}

/// [`Experts`] by the kernels of a backend.
pub(crate) struct StackedExperts<B: BackendMoeFused> {
    pub(crate) stacks: ExpertStacks<B, B::Experts>,
    pub(crate) spec: MoeSpec,
    pub(crate) sums: ExpertSums<B>,
}

/// How ranks share the projection of experts that follows the activation.
pub enum ExpertSums<B: Backend> {
    /// There is one rank.
    Whole,
    /// Each rank has some of the elements before it: what ranks make of them is summed.
    Reduced(RankIndex),
    /// Each makes some of its outputs.
    Gathered(InputGather<B>),
}

impl<B: BackendMoeFused + BackendCollective + BackendGraph> Experts<B> for StackedExperts<B> {
    fn forward(
        &self,
        ctx: &mut B::Context,
        x: &Act<B>,
        scratch: &mut MoeScratch<B>,
        out: &mut Act<B>,
        tokens: usize,
    ) -> Result<()> {
        let Self { stacks, spec, .. } = self;
        let route = spec.route(tokens);
        let shape = |n, k| self.shape((tokens, spec.top_k), (n, k));
        let (hidden, inner) = (stacks.hidden, spec.intermediate);
        if spec.input_scale {
            return self.forward_scaled(ctx, x, scratch, out, tokens);
        }
        let MoeScratch {
            logits,
            routing,
            gated,
            pairs,
            shared,
            branch,
            ..
        } = scratch;
        if let Some(shared) = shared.as_mut().filter(|_| spec.has_shared_gate()) {
            shared.gate(ctx, out, tokens, hidden)?;
        }
        B::route_pairs(ctx, logits, stacks.correction.as_ref(), routing, route)?;
        // [tokens, hidden] → [pairs, intermediate] → [pairs, hidden] → [tokens, hidden]
        let gate_up = [stacks.gate.projection(), stacks.up.projection()];
        let wide = shape(inner, hidden);
        B::moe_gate_up(ctx, x, gate_up, spec.activation, routing, gated, wide)?;
        if let Some(factors) = &stacks.scale {
            B::moe_scale_weights(ctx, routing, factors, route)?;
        }
        // What a branch of its own gave is added behind a norm.
        let out = (out, spec.shared.is_some() && !spec.norms);
        let routing = (&*routing, &*routing);
        self.down(ctx, gated, routing, (pairs, branch), out, tokens)
    }
}

impl<B: BackendMoeFused + BackendCollective + BackendGraph> StackedExperts<B> {
    /// Maps `[n, k]` of so many experts for each of so many rows.
    fn shape(&self, (tokens, top_k): (usize, usize), (n, k): (usize, usize)) -> MoeShape {
        let experts = self.spec.experts;
        MoeShape {
            tokens,
            top_k,
            experts: ExpertShape { experts, n, k },
        }
    }

    /// `[pairs, intermediate]` → `[tokens, hidden]`: the weighted sums of what experts make of it, over all ranks; with `add`, added to
    /// what was there.
    fn down(
        &self,
        ctx: &mut B::Context,
        gated: &Act<B>,
        routing: (&MoeRouting<B>, &MoeRouting<B>),
        (pairs, branch): (&mut Act<B>, &mut Act<B>),
        (out, add): (&mut Act<B>, bool),
        tokens: usize,
    ) -> Result<()> {
        let Self { stacks, spec, .. } = self;
        let shape = |size| self.shape((tokens, spec.top_k), size);
        let own = shape((stacks.hidden, spec.intermediate));
        let maps = stacks.down.projection();
        let len = tokens * stacks.hidden;
        let all = match add {
            true => &mut *branch,
            false => &mut *out,
        };
        match &self.sums {
            ExpertSums::Whole => {
                return B::moe_down(ctx, gated, maps, routing, pairs, (out, add), own);
            }
            ExpertSums::Reduced(place) => {
                place.check::<B>(ctx)?;
                B::moe_down(ctx, gated, maps, routing, pairs, (&mut *all, false), own)?;
                B::all_reduce(ctx, all, len, ReduceOp::Sum)?;
            }
            ExpertSums::Gathered(gather) => {
                let part = shape((gather.own_outputs(), gather.in_features()));
                let gated = (gated, tokens * spec.top_k);
                gather.forward(ctx, gated, (all, tokens), |ctx, gated, out| {
                    B::moe_down(ctx, gated, maps, routing, pairs, (out, false), part)
                })?;
            }
        }
        match add {
            true => B::add_inplace(ctx, out, branch, len),
            false => Ok(()),
        }
    }

    /// The same where weights multiply what goes into experts: each pair is a row of its own, with one expert, and the
    /// rows of a token are summed as they are.
    fn forward_scaled(
        &self,
        ctx: &mut B::Context,
        x: &Act<B>,
        scratch: &mut MoeScratch<B>,
        out: &mut Act<B>,
        tokens: usize,
    ) -> Result<()> {
        let Self { stacks, spec, .. } = self;
        let MoeScratch {
            logits,
            routing,
            gated,
            pairs,
            scaled,
            branch,
            ..
        } = scratch;
        let scaled = ScaledScratch::of(scaled, spec)?;
        let (hidden, inner) = (stacks.hidden, spec.intermediate);
        let rows = tokens * spec.top_k;
        let route = spec.route(tokens);
        B::route_topk(ctx, logits, stacks.correction.as_ref(), routing, route)?;
        let single = RouteShape::softmax(rows, spec.experts, 1);
        B::compute_ids_tpe(ctx, routing, single)?;
        // [tokens, hidden] → [pairs, hidden] → [pairs, intermediate] → [pairs, hidden] → [tokens, hidden]
        let dim = hidden;
        B::gather_rows(ctx, x, &scaled.tokens, pairs, RowShape { rows, dim })?;
        let inputs = (&mut scaled.rows, false);
        B::moe_weighted_sum(ctx, pairs, routing, inputs, single, hidden)?;
        let gate_up = [stacks.gate.projection(), stacks.up.projection()];
        let wide = self.shape((rows, 1), (inner, hidden));
        let input = &scaled.rows;
        B::moe_gate_up(ctx, input, gate_up, spec.activation, routing, gated, wide)?;
        let out = (out, spec.shared.is_some());
        let routing = (&*routing, &scaled.each);
        self.down(ctx, gated, routing, (pairs, branch), out, tokens)
    }
}

/// What experts need for a moment whose inputs are multiplied.
pub(crate) struct ScaledScratch<B: Backend> {
    top_k: usize,
    /// `[pairs, hidden]`: what goes into them.
    rows: Act<B>,
    /// Weights of 1.
    each: MoeRouting<B>,
    /// `[pairs]`: the token of each.
    tokens: B::Buffer<i32>,
}

impl<B: Backend> ScaledScratch<B> {
    /// That of experts of this spec.
    fn of<'s>(scratch: &'s mut Option<Self>, spec: &MoeSpec) -> Result<&'s mut Self> {
        let own = scratch.as_mut().filter(|own| own.top_k == spec.top_k);
        own.ok_or_else(|| Error::invalid("experts", "the scratch of a model with other experts"))
    }

    fn alloc(device: &B, widths: MoeWidths, max_tokens: usize) -> Result<Self> {
        let (top_k, pairs) = (widths.top_k, max_tokens * widths.top_k);
        let tokens: Vec<_> = (0..pairs).map(|pair| (pair / top_k) as i32).collect();
        Ok(Self {
            top_k,
            rows: device.alloc(max_tokens * widths.scaled)?,
            each: MoeRouting {
                weights: device.from_slice(&vec![1.0; pairs])?,
                ..MoeRouting::alloc(device, max_tokens, widths.experts, top_k)?
            },
            tokens: device.from_slice(&tokens)?,
        })
    }
}

/// What a shared expert with a gate needs for a moment.
pub(crate) struct SharedScratch<B: Backend> {
    /// `[tokens]`: of the gate.
    pub(crate) logits: Logits<B>,
    /// `[tokens, hidden]`: what the expert gave.
    pub(crate) output: Act<B>,
    /// That of one expert, whose weight is its score.
    routing: MoeRouting<B>,
}

impl<B: BackendMoeFused> SharedScratch<B> {
    /// `out = sigmoid(logits) · output`.
    fn gate(
        &mut self,
        ctx: &mut B::Context,
        out: &mut Act<B>,
        tokens: usize,
        hidden: usize,
    ) -> Result<()> {
        let one = RouteShape {
            score: ExpertScore::Sigmoid,
            ..RouteShape::softmax(tokens, 1, 1)
        };
        let Self {
            logits,
            output,
            routing,
        } = self;
        B::route_topk(ctx, logits, None, routing, one)?;
        B::moe_weighted_sum(ctx, output, routing, (out, false), one, hidden)
    }
}

/// A linear layer for each head: a head's own vector of each token is multiplied with the head's matrix.
pub trait PerHeadLinear<B: Backend>: Send + Sync {
    /// Brings the heads of so many tokens in the order in which their matrices are read. The routing says of each vector
    /// which head it is of.
    fn sort(&self, ctx: &mut B::Context, heads: &mut MoeRouting<B>, tokens: usize) -> Result<()>;

    /// `out[tokens, heads, n] = x[tokens, heads, k] · matrix(head)ᵀ`.
    fn forward(
        &self,
        ctx: &mut B::Context,
        x: &Act<B>,
        heads: &MoeRouting<B>,
        out: &mut Act<B>,
        tokens: usize,
    ) -> Result<()>;
}

/// [`PerHeadLinear`] by the kernels for experts: each token goes to all of them.
pub(crate) struct StackedHeads<T> {
    pub(crate) stack: T,
    pub(crate) shape: ExpertShape,
}

impl<B: BackendMoeFused> PerHeadLinear<B> for StackedHeads<B::Experts> {
    fn sort(&self, ctx: &mut B::Context, heads: &mut MoeRouting<B>, tokens: usize) -> Result<()> {
        let count = self.shape.experts;
        B::compute_ids_tpe(ctx, heads, RouteShape::softmax(tokens, count, count))
    }

    fn forward(
        &self,
        ctx: &mut B::Context,
        x: &Act<B>,
        heads: &MoeRouting<B>,
        out: &mut Act<B>,
        tokens: usize,
    ) -> Result<()> {
        let shape = MoeShape {
            tokens,
            top_k: self.shape.experts,
            experts: self.shape,
        };
        let maps = ExpertProjection::new(&self.stack);
        B::moe_gemm(ctx, x, ExpertInput::PerPair, maps, heads, out, shape)
    }
}

/// What a step through experts needs for a moment, reused by all layers.
pub struct MoeScratch<B: Backend> {
    /// `[tokens, experts]`.
    pub(crate) logits: Logits<B>,
    routing: MoeRouting<B>,
    /// `[pairs, intermediate]`.
    gated: Act<B>,
    /// `[pairs, hidden]`: what each expert gave.
    pairs: Act<B>,
    /// For shared experts with a gate.
    pub(crate) shared: Option<SharedScratch<B>>,
    /// `[tokens, hidden]`: what a shared expert in a branch of its own gave, or, where its output is added, what a rank's experts give.
    pub(crate) branch: Act<B>,
    /// For experts whose inputs are multiplied.
    scaled: Option<ScaledScratch<B>>,
}

/// Largest sizes among the layers with experts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct MoeWidths {
    experts: usize,
    top_k: usize,
    /// Elements of a token's pairs between the projections.
    gated: usize,
    /// Elements of a token's pairs.
    pairs: usize,
    /// Elements of the output of a shared expert with a gate.
    shared: usize,
    /// Elements of a token's pairs where their inputs are multiplied.
    scaled: usize,
    /// Elements of the output of a shared expert in a branch of its own, or of what is added to one's.
    branch: usize,
}

impl MoeWidths {
    /// `None` for a model without experts.
    pub(crate) fn of(spec: &DecoderSpec) -> Option<Self> {
        let mut widths: Option<Self> = None;
        for layer in &spec.layers {
            if let FeedForwardSpec::Moe(moe) = &layer.feed_forward {
                let all = widths.get_or_insert_default();
                all.experts = all.experts.max(moe.experts);
                all.top_k = all.top_k.max(moe.top_k);
                all.gated = all.gated.max(moe.top_k * moe.intermediate);
                all.pairs = all.pairs.max(moe.top_k * spec.hidden_size);
                if moe.norms || moe.shared.is_some() {
                    all.branch = spec.hidden_size;
                }
                if moe.input_scale {
                    all.scaled = all.scaled.max(moe.top_k * spec.hidden_size);
                }
                if moe.has_shared_gate() {
                    all.shared = spec.hidden_size;
                }
            }
        }
        widths
    }

    /// Elements that a token takes in [`MoeScratch`].
    pub(crate) fn elements(self) -> usize {
        let shared = self.shared + 4 * usize::from(self.shared > 0);
        let scaled = self.scaled + 7 * self.top_k * usize::from(self.scaled > 0);
        self.experts + 3 * self.top_k + self.gated + self.pairs + shared + scaled + self.branch
    }

    /// Elements of a token that a backend may hold beside them: its pairs' inputs packed, their products with gate and
    /// up, and those with down or four sums of them.
    pub(crate) fn packed(self) -> usize {
        let hidden = self.pairs / self.top_k.max(1);
        self.pairs.max(4 * hidden) + 2 * self.gated
    }
}

impl<B: Backend> MoeScratch<B> {
    pub(crate) fn alloc(device: &B, widths: MoeWidths, max_tokens: usize) -> Result<Self> {
        let alloc = |width: usize| device.alloc::<B::Act>(max_tokens * width);
        Ok(Self {
            logits: device.alloc(max_tokens * widths.experts)?,
            routing: MoeRouting::alloc(device, max_tokens, widths.experts, widths.top_k)?,
            gated: alloc(widths.gated)?,
            pairs: alloc(widths.pairs)?,
            branch: alloc(widths.branch)?,
            scaled: match widths.scaled {
                0 => None,
                _ => Some(ScaledScratch::alloc(device, widths, max_tokens)?),
            },
            shared: match widths.shared {
                0 => None,
                hidden => Some(SharedScratch {
                    logits: device.alloc(max_tokens)?,
                    output: alloc(hidden)?,
                    routing: MoeRouting::alloc(device, max_tokens, 1, 1)?,
                }),
            },
        })
    }
}
