//! Mixtures of experts.

use super::Activation;
use ferrum_kernels::{ExpertActivation, ExpertGroups, ExpertScore, RouteShape};

/// A mixture of experts: the weighted sum of some gated feed-forwards, chosen for each token, and of one that every token
/// goes through where it has such.
#[derive(Clone, Debug, PartialEq)]
pub struct MoeSpec {
    /// Experts to choose from.
    pub experts: usize,
    /// Experts chosen for each token.
    pub top_k: usize,
    /// Elements between the projections of one expert.
    pub intermediate: usize,
    /// How a router's logits become a choice and weights.
    pub routing: ExpertRouting,
    /// Activation of gate and up.
    pub activation: ExpertActivation,
    /// Whether the router and the projections of experts have biases.
    pub bias: bool,
    /// Whether weights multiply what goes into experts instead of what comes out.
    pub input_scale: bool,
    /// The expert of all tokens.
    pub shared: Option<SharedExpertSpec>,
    /// Whether what an expert gives is multiplied with a number of its own.
    pub output_scale: bool,
    /// Whether the router and the experts read the stream through norms of their own, that of the router divided by √hidden, and what
    /// experts and the shared expert give is normed before it is added (Gemma 4).
    pub norms: bool,
}

/// How a router's logits become a choice of experts and their weights. See
/// [`route_topk`](ferrum_kernels::BackendMoeFused::route_topk).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExpertRouting {
    /// How logits become scores.
    pub score: ExpertScore,
    /// Groups of experts, where a token takes experts of the best groups alone.
    pub groups: Option<ExpertGroups>,
    /// Whether experts are chosen by their scores and a bias of each, which weights do not have.
    pub correction: bool,
    /// Whether the weights of the chosen are divided by their sum.
    pub renormalize: bool,
    /// Factor on the weights.
    pub scale: f32,
}

impl ExpertRouting {
    /// The largest probabilities of all experts.
    pub const fn softmax(renormalize: bool) -> Self {
        Self {
            score: ExpertScore::Softmax,
            groups: None,
            correction: false,
            renormalize,
            scale: 1.0,
        }
    }
}

/// A gated feed-forward beside experts. Several of one width are one of their widths together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SharedExpertSpec {
    /// Elements between the projections.
    pub intermediate: usize,
    /// Activation of the gate.
    pub activation: Activation,
    /// Whether what it gives is multiplied with the sigmoid of a logit of the token.
    pub gated: bool,
}

impl MoeSpec {
    /// The choice of experts for so many tokens.
    pub(crate) fn route(&self, tokens: usize) -> RouteShape {
        let ExpertRouting {
            score,
            groups,
            renormalize,
            scale,
            ..
        } = self.routing;
        RouteShape {
            score,
            groups,
            renormalize,
            scale,
            ..RouteShape::softmax(tokens, self.experts, self.top_k)
        }
    }

    /// Whether the shared expert's output is multiplied with a gate.
    pub(crate) fn has_shared_gate(&self) -> bool {
        self.shared.is_some_and(|shared| shared.gated)
    }

    /// Elements between the projections of the shared expert; 0 without one.
    pub(crate) fn shared_intermediate(&self) -> usize {
        self.shared.map_or(0, |shared| shared.intermediate)
    }

    pub(super) fn validate(&self) -> Result<(), String> {
        let (experts, top_k) = (self.experts, self.top_k);
        if !(1..=1 << 16).contains(&experts) {
            return Err(format!("{experts} experts: expected 1 to 65536"));
        }
        if !(1..=experts).contains(&top_k) {
            return Err(format!(
                "{top_k} experts for each token: expected 1 to {experts}"
            ));
        }
        if let Some(ExpertGroups { groups, top, .. }) = self.routing.groups {
            let most = ExpertGroups::MAX;
            let fits = (1..=most).contains(&groups)
                && (1..=groups).contains(&top)
                && experts.is_multiple_of(groups)
                && top_k <= top * (experts / groups);
            if !fits {
                return Err(format!(
                    "{top} of {groups} groups of {experts} experts: expected at most {most} of equal size of which \
                     those taken have {top_k} experts"
                ));
            }
        }
        let finite = |x: f32| x.is_finite() && x > 0.0;
        let bounds = match self.activation {
            ExpertActivation::Silu | ExpertActivation::GeluTanh => true,
            ExpertActivation::ClampedSwiglu { alpha, limit } => finite(alpha) && finite(limit),
        };
        if !finite(self.routing.scale) || !bounds {
            return Err("factors and bounds of experts: expected positive numbers".into());
        }
        if self.input_scale && self.output_scale {
            return Err("experts whose inputs and outputs are multiplied are not supported".into());
        }
        if self.norms && self.shared.is_none_or(|shared| shared.gated) {
            return Err(
                "norms of experts without a shared expert, or with a gated one, are not supported"
                    .into(),
            );
        }
        if self.shared.is_some() && !(1..=1 << 30).contains(&self.shared_intermediate()) {
            return Err(format!(
                "shared expert of size {} is out of range",
                self.shared_intermediate()
            ));
        }
        Ok(())
    }
}
