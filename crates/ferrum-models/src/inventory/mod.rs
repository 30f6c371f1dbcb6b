//! The inventory: every tensor of a decoder, with its role, its shape, its names and how it is cut.
//!
//! The loader, the memory plan, LoRA adapters, the quantiser and ranks that share a model need the same list of
//! tensors. It is written here once, in [`DecoderSpec::tensors`], from the spec
//! alone; what files call a tensor is asked of their [`WeightNames`](crate::WeightNames). This module
//! reads no file and knows no device.

mod gather;
mod list;
mod names;
mod shard;
mod stage;
mod sum_split;

pub use gather::{GatheredProduct, InputBoundaries};
pub(crate) use names::of_expert;
pub use names::{
    ExpertNames, ExpertNormNames, FusedExperts, FusedNames, LinearAttentionNames, MlaNames,
    PerLayerNames, RowRuns, SharedNames, StackLayout, TensorLocation, WeightNames,
};
pub(crate) use shard::ProjectionNorm;
pub use shard::{RankShard, ShardAxis, ShardBoundaries, ShardUnit, TensorSlice};
pub use stage::Stage;

use crate::spec::{AttentionSpec, DecoderSpec, FeedForwardSpec, LayerSpec, RopeScaling};
use ferrum_kernels::{ExpertShape, MatShape};
use list::List;
use std::fmt;

/// What a tensor is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum TensorRole {
    /// Table of token embeddings.
    TokenEmbedding,
    /// What each rotary frequency is divided by. Follows from the config where that states the scaling,
    /// so it is no parameter.
    RopeFactors,
    /// The same of a scaling that changes beyond a length, for sequences beyond it.
    RopeLongFactors,
    /// And for those up to it.
    RopeShortFactors,
    /// Table of learned positions.
    PositionEmbedding,
    /// Table of embeddings that layers have of their own.
    PerLayerEmbedding,
    /// Projection of embeddings to these.
    PerLayerProjection,
    /// Norm behind that.
    PerLayerProjectionNorm,
    /// Norm before attention.
    AttentionNorm,
    /// Query projection.
    Query,
    /// Key projection.
    Key,
    /// Value projection.
    Value,
    /// Norm of each query head, or of all.
    QueryNorm,
    /// Norm of each key head, or of all.
    KeyNorm,
    /// Scores that take a share of attention and give nothing.
    AttentionSinks,
    /// Compression of queries.
    QueryDown,
    /// Norm of compressed queries.
    QueryDownNorm,
    /// Projection from compressed queries.
    QueryUp,
    /// Compression of keys and values, with the rotated part of keys.
    LatentDown,
    /// Norm of compressed keys and values.
    LatentNorm,
    /// From the queries of each head to what compressed rows are multiplied with.
    KeyUp,
    /// From compressed rows to the values of each head.
    ValueUp,
    /// Projection to what attention's output is multiplied with, before the sigmoid.
    AttentionGate,
    /// Attention's output projection.
    AttentionOutput,
    /// Norm behind attention.
    PostAttentionNorm,
    /// Projection to what a short convolution's input is multiplied with.
    ConvInputGate,
    /// Projection to what its output is multiplied with.
    ConvOutputGate,
    /// Projection to its input.
    ConvInput,
    /// Taps of a short convolution.
    ConvKernel,
    /// A short convolution's output projection.
    ConvOutput,
    /// Query projection of linear attention (`C` of a state space).
    LinearQuery,
    /// Key projection of linear attention (`B` of a state space).
    LinearKey,
    /// Value projection of linear attention (`x` of a state space).
    LinearValue,
    /// Projection to what its output is multiplied with, before SiLU.
    LinearGate,
    /// Projection to the share of a value that goes into the state, before the sigmoid.
    LinearBeta,
    /// Projection to the step that the state decays by.
    LinearStep,
    /// Taps of the convolution before linear attention.
    LinearConv,
    /// What a state decays with in a step of 1: a negative number of each head.
    LinearDecay,
    /// What is added to the step.
    LinearStepBias,
    /// What of a value is added to the output.
    LinearSkip,
    /// Norm of linear attention's output.
    LinearNorm,
    /// Linear attention's output projection.
    LinearOutput,
    /// Norm before the feed-forward.
    FeedForwardNorm,
    /// Norm before attention, beside a feed-forward with a norm of its own.
    ParallelAttentionNorm,
    /// Norm before the feed-forward, beside attention with a norm of its own.
    ParallelFeedForwardNorm,
    /// Gate projection.
    Gate,
    /// Up projection.
    Up,
    /// Down projection.
    Down,
    /// Norm behind the feed-forward.
    PostFeedForwardNorm,
    /// Gate of the layer's own embeddings.
    PerLayerGate,
    /// Projection of these to the stream.
    PerLayerOutput,
    /// Norm behind that.
    PerLayerNorm,
    /// What the stream behind the layer is multiplied with.
    OutputScale,
    /// Router of a mixture of experts.
    Router,
    /// Gate projections of all experts.
    ExpertGate,
    /// Up projections of all experts.
    ExpertUp,
    /// Down projections of all experts.
    ExpertDown,
    /// What is added to the scores of experts where these are chosen.
    ExpertCorrection,
    /// Norm before the router, of experts with norms of their own.
    RouterNorm,
    /// Norm before the experts, likewise.
    ExpertNorm,
    /// Norm behind the experts.
    PostExpertNorm,
    /// Norm behind the shared expert beside them.
    PostSharedNorm,
    /// What the output of each expert is multiplied with.
    ExpertScale,
    /// Gate projection of a shared expert.
    SharedGate,
    /// Its up projection.
    SharedUp,
    /// Its down projection.
    SharedDown,
    /// The logit by whose sigmoid its output is multiplied.
    SharedRouter,
    /// Norm after the last layer.
    FinalNorm,
    /// Output projection, where it is not the embedding table.
    Output,
}

impl TensorRole {
    /// Every role.
    pub const ALL: [TensorRole; 69] = [
        Self::TokenEmbedding,
        Self::RopeFactors,
        Self::RopeLongFactors,
        Self::RopeShortFactors,
        Self::PositionEmbedding,
        Self::PerLayerEmbedding,
        Self::PerLayerProjection,
        Self::PerLayerProjectionNorm,
        Self::AttentionNorm,
        Self::Query,
        Self::Key,
        Self::Value,
        Self::QueryNorm,
        Self::KeyNorm,
        Self::AttentionSinks,
        Self::QueryDown,
        Self::QueryDownNorm,
        Self::QueryUp,
        Self::LatentDown,
        Self::LatentNorm,
        Self::KeyUp,
        Self::ValueUp,
        Self::AttentionGate,
        Self::AttentionOutput,
        Self::PostAttentionNorm,
        Self::ConvInputGate,
        Self::ConvOutputGate,
        Self::ConvInput,
        Self::ConvKernel,
        Self::ConvOutput,
        Self::LinearQuery,
        Self::LinearKey,
        Self::LinearValue,
        Self::LinearGate,
        Self::LinearBeta,
        Self::LinearStep,
        Self::LinearConv,
        Self::LinearDecay,
        Self::LinearStepBias,
        Self::LinearSkip,
        Self::LinearNorm,
        Self::LinearOutput,
        Self::FeedForwardNorm,
        Self::ParallelAttentionNorm,
        Self::ParallelFeedForwardNorm,
        Self::Gate,
        Self::Up,
        Self::Down,
        Self::PostFeedForwardNorm,
        Self::PerLayerGate,
        Self::PerLayerOutput,
        Self::PerLayerNorm,
        Self::OutputScale,
        Self::Router,
        Self::ExpertGate,
        Self::ExpertUp,
        Self::ExpertDown,
        Self::ExpertCorrection,
        Self::RouterNorm,
        Self::ExpertNorm,
        Self::PostExpertNorm,
        Self::PostSharedNorm,
        Self::ExpertScale,
        Self::SharedGate,
        Self::SharedUp,
        Self::SharedDown,
        Self::SharedRouter,
        Self::FinalNorm,
        Self::Output,
    ];

    /// Whether a decoder has one of it in each layer.
    pub fn is_in_layer(self) -> bool {
        !matches!(
            self,
            Self::TokenEmbedding
                | Self::RopeFactors
                | Self::RopeLongFactors
                | Self::RopeShortFactors
                | Self::PositionEmbedding
                | Self::PerLayerEmbedding
                | Self::PerLayerProjection
                | Self::PerLayerProjectionNorm
                | Self::FinalNorm
                | Self::Output
        )
    }

    /// Whether it is a number for each element and no matrix.
    pub fn is_vector(self) -> bool {
        self.is_norm() || self.is_rope() || self.is_named_whole() || self.is_conv()
    }

    /// Whether it is the taps of a convolution.
    pub fn is_conv(self) -> bool {
        matches!(self, Self::ConvKernel | Self::LinearConv)
    }

    /// Whether files call it by a name of its own, without `.weight` or `.bias`.
    pub fn is_named_whole(self) -> bool {
        matches!(
            self,
            Self::AttentionSinks
                | Self::ExpertCorrection
                | Self::RouterNorm
                | Self::ExpertScale
                | Self::OutputScale
                | Self::LinearDecay
                | Self::LinearStepBias
                | Self::LinearSkip
        )
    }

    /// Whether it is the weight of a norm.
    pub fn is_norm(self) -> bool {
        matches!(
            self,
            Self::AttentionNorm
                | Self::QueryNorm
                | Self::KeyNorm
                | Self::QueryDownNorm
                | Self::LatentNorm
                | Self::PostAttentionNorm
                | Self::FeedForwardNorm
                | Self::ParallelAttentionNorm
                | Self::ParallelFeedForwardNorm
                | Self::PostFeedForwardNorm
                | Self::RouterNorm
                | Self::ExpertNorm
                | Self::PostExpertNorm
                | Self::PostSharedNorm
                | Self::LinearNorm
                | Self::PerLayerProjectionNorm
                | Self::PerLayerNorm
                | Self::FinalNorm
        )
    }

    /// Whether it is a norm that files of families with such norms hold less
    /// [`norm_offset`](WeightNames::norm_offset).
    pub fn has_norm_offset(self) -> bool {
        self.is_norm() && self != Self::LinearNorm
    }

    /// Whether it is numbers of linear attention's heads, or the norm of what these give.
    pub(crate) fn is_of_linear_heads(self) -> bool {
        matches!(
            self,
            Self::LinearDecay | Self::LinearStepBias | Self::LinearSkip | Self::LinearNorm
        )
    }

    /// Whether it says how frequencies of rotation are scaled, which configs say otherwise.
    pub fn is_rope(self) -> bool {
        matches!(
            self,
            Self::RopeFactors | Self::RopeLongFactors | Self::RopeShortFactors
        )
    }

    /// Whether it is a stack of matrices, one for each expert.
    pub fn is_expert(self) -> bool {
        matches!(self, Self::ExpertGate | Self::ExpertUp | Self::ExpertDown)
    }

    /// The product that computes it, if adapters can add to that.
    pub(crate) fn projection(self) -> Option<Projection> {
        let mut all = Projection::ALL.into_iter();
        all.find(|projection| projection.roles().contains(&self))
    }
}

impl fmt::Display for TensorRole {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::TokenEmbedding => "token embedding",
            Self::RopeFactors => "rope factors",
            Self::RopeLongFactors => "rope factors of long sequences",
            Self::RopeShortFactors => "rope factors of short sequences",
            Self::PositionEmbedding => "position embedding",
            Self::PerLayerEmbedding => "embeddings for each layer",
            Self::PerLayerProjection => "projection to embeddings for each layer",
            Self::PerLayerProjectionNorm => "norm of projected embeddings for each layer",
            Self::AttentionNorm => "attention norm",
            Self::Query => "query projection",
            Self::Key => "key projection",
            Self::Value => "value projection",
            Self::QueryNorm => "query norm",
            Self::KeyNorm => "key norm",
            Self::AttentionSinks => "attention sinks",
            Self::QueryDown => "compression of queries",
            Self::QueryDownNorm => "norm of compressed queries",
            Self::QueryUp => "projection of compressed queries",
            Self::LatentDown => "compression of keys and values",
            Self::LatentNorm => "norm of compressed keys and values",
            Self::KeyUp => "key maps of heads",
            Self::ValueUp => "value maps of heads",
            Self::AttentionGate => "attention gate projection",
            Self::AttentionOutput => "attention output projection",
            Self::PostAttentionNorm => "norm behind attention",
            Self::ConvInputGate => "projection to a short convolution's input gate",
            Self::ConvOutputGate => "projection to a short convolution's output gate",
            Self::ConvInput => "short convolution's input projection",
            Self::ConvKernel => "short convolution",
            Self::ConvOutput => "short convolution's output projection",
            Self::LinearQuery => "query projection of linear attention",
            Self::LinearKey => "key projection of linear attention",
            Self::LinearValue => "value projection of linear attention",
            Self::LinearGate => "output gate projection of linear attention",
            Self::LinearBeta => "update gate projection of linear attention",
            Self::LinearStep => "step projection of linear attention",
            Self::LinearConv => "convolution of linear attention",
            Self::LinearDecay => "decay of linear attention",
            Self::LinearStepBias => "step bias of linear attention",
            Self::LinearSkip => "skip of linear attention",
            Self::LinearNorm => "norm of linear attention",
            Self::LinearOutput => "output projection of linear attention",
            Self::FeedForwardNorm => "feed-forward norm",
            Self::ParallelAttentionNorm => "attention norm beside the feed-forward's",
            Self::ParallelFeedForwardNorm => "feed-forward norm beside attention's",
            Self::Gate => "gate projection",
            Self::Up => "up projection",
            Self::Down => "down projection",
            Self::PostFeedForwardNorm => "norm behind the feed-forward",
            Self::PerLayerGate => "gate of the layer's own embeddings",
            Self::PerLayerOutput => "projection of the layer's own embeddings",
            Self::PerLayerNorm => "norm behind the layer's own embeddings",
            Self::OutputScale => "factor on the layer's output",
            Self::Router => "router",
            Self::ExpertGate => "gate projections of experts",
            Self::ExpertUp => "up projections of experts",
            Self::ExpertDown => "down projections of experts",
            Self::ExpertCorrection => "correction of the choice of experts",
            Self::RouterNorm => "norm before the router",
            Self::ExpertNorm => "norm before the experts",
            Self::PostExpertNorm => "norm behind the experts",
            Self::PostSharedNorm => "norm behind the shared expert",
            Self::ExpertScale => "factors of experts",
            Self::SharedGate => "shared expert's gate projection",
            Self::SharedUp => "shared expert's up projection",
            Self::SharedDown => "shared expert's down projection",
            Self::SharedRouter => "shared expert's router",
            Self::FinalNorm => "final norm",
            Self::Output => "output projection",
        })
    }
}

/// The linear maps of a layer that a runner computes as one product each, and to which adapters can add.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Projection {
    Qkv,
    AttnGate,
    AttnOut,
    ConvIn,
    ConvOut,
    LinearIn,
    LinearOut,
    GateUp,
    Down,
}

impl Projection {
    pub(crate) const COUNT: usize = 9;

    /// The most maps that one joins.
    pub(crate) const MAPS: usize = 6;

    pub(crate) const ALL: [Projection; Self::COUNT] = [
        Self::Qkv,
        Self::AttnGate,
        Self::AttnOut,
        Self::ConvIn,
        Self::ConvOut,
        Self::LinearIn,
        Self::LinearOut,
        Self::GateUp,
        Self::Down,
    ];

    /// The maps that it joins.
    pub(crate) fn roles(self) -> &'static [TensorRole] {
        match self {
            Self::Qkv => &[TensorRole::Query, TensorRole::Key, TensorRole::Value],
            Self::AttnGate => &[TensorRole::AttentionGate],
            Self::AttnOut => &[TensorRole::AttentionOutput],
            Self::ConvIn => &[
                TensorRole::ConvInputGate,
                TensorRole::ConvOutputGate,
                TensorRole::ConvInput,
            ],
            Self::ConvOut => &[TensorRole::ConvOutput],
            Self::LinearIn => &[
                TensorRole::LinearQuery,
                TensorRole::LinearKey,
                TensorRole::LinearValue,
                TensorRole::LinearGate,
                TensorRole::LinearBeta,
                TensorRole::LinearStep,
            ],
            Self::LinearOut => &[TensorRole::LinearOutput],
            Self::GateUp => &[TensorRole::Gate, TensorRole::Up],
            Self::Down => &[TensorRole::Down],
        }
    }

    /// Those that a layer has, one below the other: none where it has experts instead, no gate where it has none.
    pub(crate) fn maps(self, spec: &DecoderSpec, layer: usize) -> Vec<DecoderTensor> {
        let all = spec.layer_tensors(layer).into_iter();
        all.filter(|tensor| tensor.id.part == TensorPart::Weight)
            .filter(|tensor| self.roles().contains(&tensor.id.role))
            .collect()
    }
}

/// Which of a linear map's two tensors one is. Norms and tables are weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum TensorPart {
    /// What is multiplied with.
    Weight,
    /// What is added.
    Bias,
}

impl TensorPart {
    /// The end of its name, in every scheme.
    pub fn suffix(self) -> &'static str {
        match self {
            Self::Weight => "weight",
            Self::Bias => "bias",
        }
    }
}

/// Which tensor of a decoder.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TensorId {
    /// Its layer; `None` outside layers.
    pub layer: Option<usize>,
    /// What it is for.
    pub role: TensorRole,
    /// Weight or bias.
    pub part: TensorPart,
}

impl TensorId {
    /// A weight outside layers.
    pub fn global(role: TensorRole) -> Self {
        Self {
            layer: None,
            role,
            part: TensorPart::Weight,
        }
    }

    /// A weight of layer `layer`.
    pub fn in_layer(layer: usize, role: TensorRole) -> Self {
        Self {
            layer: Some(layer),
            role,
            part: TensorPart::Weight,
        }
    }

    /// The bias of the same map.
    pub fn bias(self) -> Self {
        Self {
            part: TensorPart::Bias,
            ..self
        }
    }
}

impl fmt::Display for TensorId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(layer) = self.layer {
            write!(f, "layer {layer}, ")?;
        }
        if self.part == TensorPart::Bias {
            f.write_str("bias of the ")?;
        }
        write!(f, "{}", self.role)
    }
}

/// Sizes of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TensorShape {
    /// So many elements.
    Vector(usize),
    /// Rows are output features.
    Matrix(MatShape),
    /// A matrix for each expert.
    Stack(ExpertShape),
    /// So many elements for each expert.
    Biases {
        /// Experts.
        experts: usize,
        /// Elements of each.
        n: usize,
    },
    /// Taps of a convolution of each channel by itself.
    Kernel {
        /// Channels.
        channels: usize,
        /// Taps of each.
        taps: usize,
    },
}

impl TensorShape {
    /// Sizes, outermost first.
    pub fn dims(&self) -> Vec<usize> {
        match *self {
            Self::Vector(len) => vec![len],
            Self::Matrix(MatShape { rows, cols }) => vec![rows, cols],
            Self::Stack(ExpertShape { experts, n, k }) => vec![experts, n, k],
            Self::Biases { experts, n } => vec![experts, n],
            // One input channel for each output.
            Self::Kernel { channels, taps } => vec![channels, 1, taps],
        }
    }

    /// Rows and columns of a matrix, or of each matrix of a stack; `None` for a vector.
    pub(crate) fn matrix(&self) -> Option<MatShape> {
        match *self {
            Self::Vector(_) | Self::Biases { .. } | Self::Kernel { .. } => None,
            Self::Matrix(shape) => Some(shape),
            Self::Stack(ExpertShape { n, k, .. }) => Some(MatShape { rows: n, cols: k }),
        }
    }

    /// Product of all sizes. Sizes of valid specs keep it inside 64 bits.
    pub fn elements(&self) -> u64 {
        let sizes = self.dims().into_iter().map(|size| size as u64);
        sizes.fold(1, u64::saturating_mul)
    }
}

/// A tensor of a decoder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DecoderTensor {
    /// Which one.
    pub id: TensorId,
    /// Its sizes.
    pub shape: TensorShape,
    /// Heads whose rows rotation pairs up, which is why some files hold them in another order; 0 where
    /// it does not touch them.
    pub rotated_heads: usize,
    /// Elements along the axis of [`shard_axis`](Self::shard_axis) that stay together: those of a head, or 1. A norm of so many is
    /// the same for all heads.
    pub unit: usize,
    /// Where its rows are in the product that it is computed in.
    pub product: ProductRows,
    /// Where they are in a tensor that has all that belongs to a head together, in files with such tensors.
    pub by_head: Option<HeadRows>,
}

/// Where the rows of a map are in a tensor that has a block of rows for each head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadRows {
    /// Heads.
    pub heads: usize,
    /// The first row in a block.
    pub first: usize,
    /// Rows of a block.
    pub of: usize,
}

/// Where the rows of a map are among those of the product that joins it with others. Some files store the product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProductRows {
    /// The first row.
    pub first: usize,
    /// Rows of the product.
    pub of: usize,
}

impl DecoderTensor {
    /// Whether training changes it. The others follow from the config.
    pub fn is_parameter(&self) -> bool {
        !self.id.role.is_rope()
    }

    /// What an adapter calls the map for a model whose checkpoints have these names; `None` where it
    /// cannot add to it.
    pub fn lora_module(&self, names: &WeightNames) -> Option<String> {
        self.id.role.projection()?;
        match self.id.part {
            TensorPart::Weight => names.module(self.id),
            TensorPart::Bias => None,
        }
    }

    /// Rows and columns of a matrix; `None` for vectors and stacks.
    pub(crate) fn matrix(&self) -> Option<MatShape> {
        match self.shape {
            TensorShape::Matrix(shape) => Some(shape),
            TensorShape::Vector(_)
            | TensorShape::Stack(_)
            | TensorShape::Biases { .. }
            | TensorShape::Kernel { .. } => None,
        }
    }
}

impl DecoderSpec {
    /// Every tensor, in the order of the forward path.
    pub fn tensors(&self) -> impl Iterator<Item = DecoderTensor> {
        let layers = 0..self.layers.len();
        let layers = layers.flat_map(|layer| self.layer_tensors(layer));
        self.first_tensors()
            .into_iter()
            .chain(layers)
            .chain(self.last_tensors())
    }

    /// The tensor called `id`; `None` where this decoder has no such.
    pub fn tensor(&self, id: TensorId) -> Option<DecoderTensor> {
        let all = match id.layer {
            Some(layer) => self.layer_tensors(layer),
            None => [self.first_tensors(), self.last_tensors()].concat(),
        };
        all.into_iter().find(|tensor| tensor.id == id)
    }

    /// Parameters, however a file holds them.
    pub fn parameters(&self) -> u64 {
        let all = self.tensors().filter(DecoderTensor::is_parameter);
        all.fold(0, |sum, tensor| sum.saturating_add(tensor.shape.elements()))
    }

    /// What comes before the layers.
    fn first_tensors(&self) -> Vec<DecoderTensor> {
        let mut all = List::new(None);
        let table = (self.vocab_size, self.hidden_size);
        all.matrix(TensorRole::TokenEmbedding, table);
        for rope in &self.ropes {
            let (factors, half) = (TensorRole::RopeFactors, rope.rot_dim / 2);
            match rope.scaling {
                RopeScaling::Llama3 { .. } | RopeScaling::Factors(_) => all.vector(factors, half),
                RopeScaling::LongRope { .. } => {
                    all.vector(TensorRole::RopeLongFactors, half);
                    all.vector(TensorRole::RopeShortFactors, half);
                }
                _ => {}
            }
        }
        if let Some(rows) = self.learned_positions {
            all.matrix(TensorRole::PositionEmbedding, (rows, self.hidden_size));
        }
        if let Some(per_layer) = &self.per_layer {
            all.per_layer_tables(per_layer, self.hidden_size);
        }
        all.tensors
    }

    /// What comes after the layers.
    fn last_tensors(&self) -> Vec<DecoderTensor> {
        let mut all = List::new(None);
        all.norm(TensorRole::FinalNorm, self);
        let vocab = self.vocab_size;
        if !self.tie_embeddings {
            all.matrix(TensorRole::Output, (vocab, self.hidden_size));
        }
        if self.output_bias {
            let bias = TensorShape::Vector(vocab);
            all.push(TensorRole::Output, TensorPart::Bias, bias);
        }
        all.tensors
    }

    /// The tensors of one layer; none for a layer that is not there.
    pub(crate) fn layer_tensors(&self, index: usize) -> Vec<DecoderTensor> {
        let mut all = List::new(Some(index));
        let Some(layer) = self.layers.get(index) else {
            return all.tensors;
        };
        let LayerSpec {
            attention,
            feed_forward,
            form,
            output_scale,
        } = layer;
        let [before, behind, before_ffn, behind_ffn] = form.norm_roles();
        let hidden = self.hidden_size;
        let norm = |all: &mut List, role: Option<TensorRole>| {
            if let Some(role) = role {
                all.norm(role, self);
            }
        };
        norm(&mut all, before);
        match attention {
            AttentionSpec::Gqa(gqa) => all.attention(gqa, hidden),
            AttentionSpec::Mla(mla) => all.latent_attention(mla, hidden),
            AttentionSpec::ShortConv(conv) => all.short_conv(conv, hidden),
            AttentionSpec::Linear(linear) => all.linear_attention(linear, hidden),
        }
        norm(&mut all, behind);
        norm(&mut all, before_ffn);
        match feed_forward {
            FeedForwardSpec::GatedMlp(mlp) => all.mlp(mlp, true, hidden),
            FeedForwardSpec::Mlp(mlp) => all.mlp(mlp, false, hidden),
            FeedForwardSpec::Moe(moe) => all.experts(moe, hidden),
        }
        norm(&mut all, behind_ffn);
        if let Some(per_layer) = &self.per_layer {
            all.per_layer(per_layer, self);
        }
        if *output_scale {
            all.vector(TensorRole::OutputScale, 1);
        }
        all.tensors
    }
}
