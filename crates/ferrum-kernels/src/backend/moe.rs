//! Mixture of experts: routing, per-expert matrices in one launch, weighted sums.
//!
//! A *pair* is one (token, chosen expert); pair `p` belongs to token `p / top_k`. Everything that
//! depends on the routing stays on the device: no op reads counts on the host.

use super::*;
use ferrum_types::{Result, SrcDtype};

/// Typed buffers of one routing.
pub struct MoeRouting<B: Backend> {
    /// `[pairs]`: chosen expert, best first within a token.
    pub expert_ids: B::Buffer<i32>,
    /// `[pairs]`: weight of the pair.
    pub weights: B::Buffer<f32>,
    /// `[pairs]`: pairs sorted by expert, in pair order within an expert.
    pub sorted_pairs: B::Buffer<i32>,
    /// `[experts]`: number of pairs of each expert ("tokens per expert").
    pub tokens_per_expert: B::Buffer<i32>,
    /// `[experts + 1]`: first index in `sorted_pairs` of each expert.
    pub offsets: B::Buffer<i32>,
}

impl<B: Backend> MoeRouting<B> {
    /// Buffers for at most `max_tokens` tokens.
    pub fn alloc(device: &B, max_tokens: usize, experts: usize, top_k: usize) -> Result<Self> {
        let pairs = check::elements("alloc", &[max_tokens, top_k])?;
        Ok(Self {
            expert_ids: device.alloc(pairs)?,
            weights: device.alloc(pairs)?,
            sorted_pairs: device.alloc(pairs)?,
            tokens_per_expert: device.alloc(experts)?,
            offsets: device.alloc(experts.saturating_add(1))?,
        })
    }
}

/// One linear projection of all experts.
pub struct ExpertProjection<'a, B: BackendMoeFused> {
    /// The matrices.
    pub matrices: &'a B::Experts,
    /// `[experts, n]`: what is added to the products, if there is something.
    pub bias: Option<&'a B::Buffer<f32>>,
}

impl<B: BackendMoeFused> Clone for ExpertProjection<'_, B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B: BackendMoeFused> Copy for ExpertProjection<'_, B> {}

impl<'a, B: BackendMoeFused> ExpertProjection<'a, B> {
    /// A projection without biases.
    pub fn new(matrices: &'a B::Experts) -> Self {
        Self {
            matrices,
            bias: None,
        }
    }
}

/// Mixture-of-experts kernels.
pub trait BackendMoeFused: Backend {
    /// A stack of expert matrices, dense or quantised.
    type Experts: Send + Sync;

    /// Loads a dense stack `[experts, n, k]`.
    ///
    /// # Errors
    /// As [`load_expert_parts`](Self::load_expert_parts).
    fn load_experts(
        &self,
        bytes: &[u8],
        dtype: SrcDtype,
        shape: ExpertShape,
    ) -> Result<Self::Experts> {
        let op = "load_experts";
        let ExpertShape { experts, n, k } = shape;
        check::expert_stack(op, shape)?;
        let part = |bytes, rows| WeightPart::new(bytes, dtype, rows);
        let rows = check::elements(op, &[experts, n])?;
        check::check_weight_parts(op, &[part(bytes, rows)], k)?;
        let each = bytes.chunks_exact(bytes.len() / experts);
        let parts: Vec<_> = each.map(|bytes| part(bytes, n)).collect();
        self.load_expert_parts(&parts, k)
    }

    /// Loads a dense stack of one matrix `[n, k]` for each expert, which lie apart in their file.
    ///
    /// # Errors
    /// `Shape` when bytes and sizes disagree; `InvalidArgument` for no expert, an empty matrix, or
    /// matrices of different sizes.
    fn load_expert_parts(&self, parts: &[WeightPart<'_>], k: usize) -> Result<Self::Experts>;

    /// The `top_k` experts of each token with the largest scores (the lowest index of equals; NaN comes last), best
    /// first, into `routing.expert_ids` and `routing.weights`.
    ///
    /// `logits` is `[tokens, experts]`. Experts are ranked by their score and `bias[experts]`; where there are
    /// [groups](RouteShape::groups), those of the best groups alone. The weight of one is its score without the bias,
    /// divided by the sum over the chosen if weights are renormalised (of sigmoids, by that and 10⁻²⁰), times the
    /// scale.
    fn route_topk(
        ctx: &mut Self::Context,
        logits: &Logits<Self>,
        bias: Option<&Self::Buffer<f32>>,
        routing: &mut MoeRouting<Self>,
        shape: RouteShape,
    ) -> Result<()>;

    /// Stable bucket sort of pairs by expert: fills `sorted_pairs`, `tokens_per_expert` and `offsets`.
    fn compute_ids_tpe(
        ctx: &mut Self::Context,
        routing: &mut MoeRouting<Self>,
        shape: RouteShape,
    ) -> Result<()>;

    /// [`route_topk`](Self::route_topk), then [`compute_ids_tpe`](Self::compute_ids_tpe).
    fn route_pairs(
        ctx: &mut Self::Context,
        logits: &Logits<Self>,
        bias: Option<&Self::Buffer<f32>>,
        routing: &mut MoeRouting<Self>,
        shape: RouteShape,
    ) -> Result<()> {
        Self::route_topk(ctx, logits, bias, routing, shape)?;
        Self::compute_ids_tpe(ctx, routing, shape)
    }

    /// `out[pair, n] = input · expert(pair)ᵀ + bias(pair)`, all experts in one launch whose grid follows the
    /// device-side counts.
    fn moe_gemm(
        ctx: &mut Self::Context,
        x: &Act<Self>,
        input: ExpertInput,
        experts: ExpertProjection<'_, Self>,
        routing: &MoeRouting<Self>,
        out: &mut Act<Self>,
        shape: MoeShape,
    ) -> Result<()>;

    /// `out[pair, n] = activation(x · gateᵀ + bias, x · upᵀ + bias)`; `x` is `[tokens, k]`. `gate_up` is
    /// `[gate, up]`, both of `shape.experts`.
    fn moe_gate_up(
        ctx: &mut Self::Context,
        x: &Act<Self>,
        gate_up: [ExpertProjection<'_, Self>; 2],
        activation: ExpertActivation,
        routing: &MoeRouting<Self>,
        out: &mut Act<Self>,
        shape: MoeShape,
    ) -> Result<()>;

    /// `out[token, :] = Σ weights[pair] · x[pair, :]` over the token's pairs, in pair order; with `out.1`, that is
    /// added to what was there. `dim` is the row length.
    fn moe_weighted_sum(
        ctx: &mut Self::Context,
        x: &Act<Self>,
        routing: &MoeRouting<Self>,
        out: (&mut Act<Self>, bool),
        shape: RouteShape,
        dim: usize,
    ) -> Result<()>;

    /// [`moe_gemm`](Self::moe_gemm) of each pair's own row and [`moe_weighted_sum`](Self::moe_weighted_sum) of the products in one:
    /// `out[token, n] = Σ weights[pair] · (x[pair] · expert(pair)ᵀ + bias(pair))` over the token's pairs, in an order that depends on
    /// the token alone. The first of `routings` says which pairs an expert has, the second (which may be the same) what they weigh;
    /// `pairs` is room for `[pairs, n]`.
    ///
    /// Where sums over inputs are [cut](Self::split_expert_sums), the sum over experts is made for each part, and then their tree.
    fn moe_down(
        ctx: &mut Self::Context,
        x: &Act<Self>,
        experts: ExpertProjection<'_, Self>,
        routings: (&MoeRouting<Self>, &MoeRouting<Self>),
        pairs: &mut Act<Self>,
        out: (&mut Act<Self>, bool),
        shape: MoeShape,
    ) -> Result<()> {
        compose::moe_down::<Self>(ctx, x, experts, routings, pairs, out, shape)
    }

    /// [`Backend::split_sums`] of every expert's matrix, for [`moe_down`](Self::moe_down).
    fn split_expert_sums(_experts: &mut Self::Experts, _split: SumSplit) {}

    /// `weights[pair] *= factors[expert of the pair]`: `factors` is `[experts]`.
    fn moe_scale_weights(
        ctx: &mut Self::Context,
        routing: &mut MoeRouting<Self>,
        factors: &Self::Buffer<f32>,
        shape: RouteShape,
    ) -> Result<()>;

    /// `residual[token, :] += ` the sum of [`moe_weighted_sum`](Self::moe_weighted_sum).
    fn moe_weighted_sum_residual(
        ctx: &mut Self::Context,
        x: &Act<Self>,
        routing: &MoeRouting<Self>,
        residual: &mut Residual<Self>,
        shape: RouteShape,
        dim: usize,
    ) -> Result<()>;

    /// [`moe_weighted_sum_residual`](Self::moe_weighted_sum_residual), then
    /// `out = rms_norm(residual)` with `norm = (weight, shape)`; the shape's `rows` are the tokens.
    fn moe_weighted_sum_residual_norm(
        ctx: &mut Self::Context,
        x: &Act<Self>,
        routing: &MoeRouting<Self>,
        residual: &mut Residual<Self>,
        norm: (&Self::Buffer<f32>, NormShape),
        out: &mut Act<Self>,
        shape: RouteShape,
    ) -> Result<()>;
}
