//! The inventory: every tensor of a decoder, with its role, its shape, its names and how it is cut.
//!
//! The loader, the memory plan, LoRA adapters, the quantiser and ranks that share a model need the same list of
//! tensors. It is written here once, in [`DecoderSpec::tensors`], from the spec
//! alone; what files call a tensor is asked of their [`WeightNames`](crate::WeightNames). This module
//! reads no file and knows no device.

mod cut;
mod names;
mod stage;

pub use cut::{CutAxis, CutBorders, CutUnit, RankCut, TensorSlice};
pub(crate) use names::of_expert;
pub use names::{
    ExpertNames, JoinedExperts, JoinedNames, MlaNames, SharedNames, StackLayout, TensorLocation,
    WeightNames,
};
pub use stage::Stage;

use crate::spec::{
    AttentionSpec, DecoderSpec, FeedForwardSpec, GqaSpec, LayerSpec, MlaSpec, MlpSpec, MoeSpec,
    NormKind, QkNormSpec, RopeScaling, SharedExpertSpec, ShortConvSpec,
};
use ferrum_kernels::{ExpertShape, MatShape};
use std::fmt;

/// What a tensor is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum TensorRole {
    /// Table of token embeddings.
    TokenEmbedding,
    /// What each rotary frequency is divided by. Follows from the config where that states the scaling,
    /// so it is no parameter.
    RopeDivisors,
    /// The same of a scaling that changes beyond a length, for sequences beyond it.
    RopeLongDivisors,
    /// And for those up to it.
    RopeShortDivisors,
    /// Table of learned positions.
    PositionEmbedding,
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
    /// Norm before the feed-forward.
    FeedForwardNorm,
    /// Gate projection.
    Gate,
    /// Up projection.
    Up,
    /// Down projection.
    Down,
    /// Norm behind the feed-forward.
    PostFeedForwardNorm,
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
    pub const ALL: [TensorRole; 42] = [
        Self::TokenEmbedding,
        Self::RopeDivisors,
        Self::RopeLongDivisors,
        Self::RopeShortDivisors,
        Self::PositionEmbedding,
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
        Self::AttentionOutput,
        Self::PostAttentionNorm,
        Self::ConvInputGate,
        Self::ConvOutputGate,
        Self::ConvInput,
        Self::ConvKernel,
        Self::ConvOutput,
        Self::FeedForwardNorm,
        Self::Gate,
        Self::Up,
        Self::Down,
        Self::PostFeedForwardNorm,
        Self::Router,
        Self::ExpertGate,
        Self::ExpertUp,
        Self::ExpertDown,
        Self::ExpertCorrection,
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
                | Self::RopeDivisors
                | Self::RopeLongDivisors
                | Self::RopeShortDivisors
                | Self::PositionEmbedding
                | Self::FinalNorm
                | Self::Output
        )
    }

    /// Whether it is a number for each element and no matrix.
    pub fn is_vector(self) -> bool {
        self.is_norm() || self.is_rope() || self.is_named_whole() || self == Self::ConvKernel
    }

    /// Whether files call it by a name of its own, without `.weight` or `.bias`.
    pub fn is_named_whole(self) -> bool {
        matches!(self, Self::AttentionSinks | Self::ExpertCorrection)
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
                | Self::PostFeedForwardNorm
                | Self::FinalNorm
        )
    }

    /// Whether it says how frequencies of rotation are scaled, which configs say otherwise.
    pub fn is_rope(self) -> bool {
        matches!(
            self,
            Self::RopeDivisors | Self::RopeLongDivisors | Self::RopeShortDivisors
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
            Self::RopeDivisors => "rope divisors",
            Self::RopeLongDivisors => "rope divisors of long sequences",
            Self::RopeShortDivisors => "rope divisors of short sequences",
            Self::PositionEmbedding => "position embedding",
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
            Self::AttentionOutput => "attention output projection",
            Self::PostAttentionNorm => "norm behind attention",
            Self::ConvInputGate => "projection to a short convolution's input gate",
            Self::ConvOutputGate => "projection to a short convolution's output gate",
            Self::ConvInput => "short convolution's input projection",
            Self::ConvKernel => "short convolution",
            Self::ConvOutput => "short convolution's output projection",
            Self::FeedForwardNorm => "feed-forward norm",
            Self::Gate => "gate projection",
            Self::Up => "up projection",
            Self::Down => "down projection",
            Self::PostFeedForwardNorm => "norm behind the feed-forward",
            Self::Router => "router",
            Self::ExpertGate => "gate projections of experts",
            Self::ExpertUp => "up projections of experts",
            Self::ExpertDown => "down projections of experts",
            Self::ExpertCorrection => "correction of the choice of experts",
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
    AttnOut,
    ConvIn,
    ConvOut,
    GateUp,
    Down,
}

impl Projection {
    pub(crate) const COUNT: usize = 6;

    pub(crate) const ALL: [Projection; Self::COUNT] = [
        Self::Qkv,
        Self::AttnOut,
        Self::ConvIn,
        Self::ConvOut,
        Self::GateUp,
        Self::Down,
    ];

    /// The maps that it joins, one below the other.
    pub(crate) fn roles(self) -> &'static [TensorRole] {
        match self {
            Self::Qkv => &[TensorRole::Query, TensorRole::Key, TensorRole::Value],
            Self::AttnOut => &[TensorRole::AttentionOutput],
            Self::ConvIn => &[
                TensorRole::ConvInputGate,
                TensorRole::ConvOutputGate,
                TensorRole::ConvInput,
            ],
            Self::ConvOut => &[TensorRole::ConvOutput],
            Self::GateUp => &[TensorRole::Gate, TensorRole::Up],
            Self::Down => &[TensorRole::Down],
        }
    }

    /// Those that a layer has: none where it has experts instead, no gate where it has none.
    pub(crate) fn maps(self, spec: &DecoderSpec, layer: usize) -> Vec<DecoderTensor> {
        let ids = self
            .roles()
            .iter()
            .map(|&role| TensorId::in_layer(layer, role));
        ids.filter_map(|id| spec.tensor(id)).collect()
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
    /// Elements along the axis of [`cut`](Self::cut) that stay together: those of a head, or 1. A norm of so many is
    /// the same for all heads.
    pub unit: usize,
    /// Where its rows are in the product that it is computed in.
    pub product: ProductRows,
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
            let (divisors, half) = (TensorRole::RopeDivisors, rope.rot_dim / 2);
            match rope.scaling {
                RopeScaling::Llama3 { .. } | RopeScaling::Divisors(_) => all.vector(divisors, half),
                RopeScaling::LongRope { .. } => {
                    all.vector(TensorRole::RopeLongDivisors, half);
                    all.vector(TensorRole::RopeShortDivisors, half);
                }
                _ => {}
            }
        }
        if let Some(rows) = self.learned_positions {
            all.matrix(TensorRole::PositionEmbedding, (rows, self.hidden_size));
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
    fn layer_tensors(&self, index: usize) -> Vec<DecoderTensor> {
        let mut all = List::new(Some(index));
        let Some(layer) = self.layers.get(index) else {
            return all.tensors;
        };
        let LayerSpec {
            attention,
            feed_forward,
            form,
        } = layer;
        let [before, behind, before_ffn, behind_ffn] = form.norms();
        let hidden = self.hidden_size;
        let norm = |all: &mut List, role, there: bool| {
            if there {
                all.norm(role, self);
            }
        };
        norm(&mut all, TensorRole::AttentionNorm, before);
        match attention {
            AttentionSpec::Gqa(gqa) => all.attention(gqa, hidden),
            AttentionSpec::Mla(mla) => all.latent_attention(mla, hidden),
            AttentionSpec::ShortConv(conv) => all.short_conv(conv, hidden),
        }
        norm(&mut all, TensorRole::PostAttentionNorm, behind);
        norm(&mut all, TensorRole::FeedForwardNorm, before_ffn);
        match feed_forward {
            FeedForwardSpec::GatedMlp(mlp) => all.mlp(mlp, true, hidden),
            FeedForwardSpec::Mlp(mlp) => all.mlp(mlp, false, hidden),
            FeedForwardSpec::Moe(moe) => all.experts(moe, hidden),
        }
        norm(&mut all, TensorRole::PostFeedForwardNorm, behind_ffn);
        all.tensors
    }
}

/// Tensors of one layer, or of none, as they are listed.
struct List {
    layer: Option<usize>,
    tensors: Vec<DecoderTensor>,
}

impl List {
    fn new(layer: Option<usize>) -> Self {
        Self {
            layer,
            tensors: Vec::new(),
        }
    }

    fn push(&mut self, role: TensorRole, part: TensorPart, shape: TensorShape) {
        self.tensors.push(DecoderTensor {
            id: TensorId {
                layer: self.layer,
                role,
                part,
            },
            shape,
            rotated_heads: 0,
            unit: 1,
            product: ProductRows {
                first: 0,
                of: shape.dims()[0],
            },
        });
    }

    /// A norm of the residual stream.
    fn norm(&mut self, role: TensorRole, spec: &DecoderSpec) {
        self.vector(role, spec.hidden_size);
        if spec.norm == (NormKind::Layer { bias: true }) {
            let bias = TensorShape::Vector(spec.hidden_size);
            self.push(role, TensorPart::Bias, bias);
        }
    }

    fn vector(&mut self, role: TensorRole, len: usize) {
        self.push(role, TensorPart::Weight, TensorShape::Vector(len));
    }

    fn matrix(&mut self, role: TensorRole, (rows, cols): (usize, usize)) {
        let shape = MatShape { rows, cols };
        self.push(role, TensorPart::Weight, TensorShape::Matrix(shape));
    }

    /// A linear map, with its bias if it has one.
    fn linear(&mut self, role: TensorRole, (rows, cols): (usize, usize), bias: bool) {
        self.matrix(role, (rows, cols));
        if bias {
            self.push(role, TensorPart::Bias, TensorShape::Vector(rows));
        }
    }

    fn attention(&mut self, gqa: &GqaSpec, hidden: usize) {
        let first = self.tensors.len();
        let shape = gqa.qkv_shape(0);
        let out_dim = gqa.heads * gqa.value_dim;
        self.linear(TensorRole::Query, (shape.q_dim(), hidden), gqa.qkv_bias);
        if gqa.shared_kv.is_none() {
            self.linear(TensorRole::Key, (shape.k_dim(), hidden), gqa.qkv_bias);
            self.linear(TensorRole::Value, (shape.v_dim(), hidden), gqa.qkv_bias);
        }
        self.linear(TensorRole::AttentionOutput, (hidden, out_dim), gqa.out_bias);
        for tensor in &mut self.tensors[first..] {
            tensor.unit = match tensor.id.role {
                TensorRole::Value | TensorRole::AttentionOutput => gqa.value_dim,
                _ => gqa.head_dim,
            };
            tensor.rotated_heads = match tensor.id.role {
                TensorRole::Query => gqa.heads,
                TensorRole::Key => gqa.kv_heads,
                _ => 0,
            };
            let rows = match tensor.id.role {
                TensorRole::Query => 0,
                TensorRole::Key => shape.q_dim(),
                TensorRole::Value => shape.q_dim() + shape.k_dim(),
                _ => continue,
            };
            tensor.product = ProductRows {
                first: rows,
                of: gqa.shared_kv.map_or(shape.row_dim(), |_| shape.q_dim()),
            };
        }
        if gqa.sinks {
            self.vector(TensorRole::AttentionSinks, gqa.heads);
        }
        let widths = match gqa.qk_norm {
            QkNormSpec::None => return,
            QkNormSpec::Heads => [gqa.head_dim; 2],
            QkNormSpec::Projection => [shape.q_dim(), shape.k_dim()],
        };
        let first = self.tensors.len();
        self.vector(TensorRole::QueryNorm, widths[0]);
        if gqa.shared_kv.is_none() {
            self.vector(TensorRole::KeyNorm, widths[1]);
        }
        let norms = self.tensors[first..].iter_mut();
        norms.for_each(|norm| norm.unit = gqa.head_dim);
    }

    fn latent_attention(&mut self, mla: &MlaSpec, hidden: usize) {
        let (heads, rank) = (mla.heads, mla.rank);
        let (nope, value) = (mla.nope_dim, mla.value_dim);
        let queries = heads * mla.query_dim();
        match mla.q_rank {
            None => self.matrix(TensorRole::Query, (queries, hidden)),
            Some(low) => {
                self.linear(TensorRole::QueryDown, (low, hidden), mla.bias);
                self.vector(TensorRole::QueryDownNorm, low);
                self.matrix(TensorRole::QueryUp, (queries, low));
            }
        }
        let latent = (mla.latent_dim(), hidden);
        self.linear(TensorRole::LatentDown, latent, mla.bias);
        self.vector(TensorRole::LatentNorm, rank);
        for (role, n, k, first) in [
            (TensorRole::KeyUp, rank, nope, 0),
            (TensorRole::ValueUp, value, rank, nope),
        ] {
            let experts = heads;
            let shape = TensorShape::Stack(ExpertShape { experts, n, k });
            self.push(role, TensorPart::Weight, shape);
            if let Some(tensor) = self.tensors.last_mut() {
                // Where a head's rows are in a map to keys and values.
                tensor.product = ProductRows {
                    first,
                    of: nope + value,
                };
            }
        }
        let out = (hidden, heads * value);
        self.linear(TensorRole::AttentionOutput, out, mla.bias);
        for tensor in &mut self.tensors {
            match tensor.id.role {
                TensorRole::Query | TensorRole::QueryUp => tensor.unit = mla.query_dim(),
                TensorRole::AttentionOutput => tensor.unit = value,
                _ => {}
            }
        }
    }

    fn short_conv(&mut self, conv: &ShortConvSpec, hidden: usize) {
        let ShortConvSpec {
            channels,
            kernel: taps,
            bias,
        } = *conv;
        for (i, &role) in Projection::ConvIn.roles().iter().enumerate() {
            let first = self.tensors.len();
            self.linear(role, (channels, hidden), bias);
            let product = ProductRows {
                first: i * channels,
                of: 3 * channels,
            };
            self.tensors[first..]
                .iter_mut()
                .for_each(|map| map.product = product);
        }
        let kernel = TensorShape::Kernel { channels, taps };
        self.push(TensorRole::ConvKernel, TensorPart::Weight, kernel);
        if bias {
            let bias = TensorShape::Vector(channels);
            self.push(TensorRole::ConvKernel, TensorPart::Bias, bias);
        }
        self.linear(TensorRole::ConvOutput, (hidden, channels), bias);
    }

    fn mlp(&mut self, mlp: &MlpSpec, gated: bool, hidden: usize) {
        let (first, inner) = (self.tensors.len(), mlp.intermediate);
        if gated {
            self.linear(TensorRole::Gate, (inner, hidden), mlp.bias);
        }
        self.linear(TensorRole::Up, (inner, hidden), mlp.bias);
        for tensor in &mut self.tensors[first..] {
            let is_second = gated && tensor.id.role == TensorRole::Up;
            tensor.product = ProductRows {
                first: usize::from(is_second) * inner,
                of: (1 + usize::from(gated)) * inner,
            };
        }
        self.linear(TensorRole::Down, (hidden, inner), mlp.bias);
    }

    fn experts(&mut self, moe: &MoeSpec, hidden: usize) {
        let (experts, inner) = (moe.experts, moe.intermediate);
        self.linear(TensorRole::Router, (experts, hidden), moe.bias);
        if moe.routing.correction {
            self.vector(TensorRole::ExpertCorrection, experts);
        }
        for (role, n, k) in [
            (TensorRole::ExpertGate, inner, hidden),
            (TensorRole::ExpertUp, inner, hidden),
            (TensorRole::ExpertDown, hidden, inner),
        ] {
            let shape = TensorShape::Stack(ExpertShape { experts, n, k });
            self.push(role, TensorPart::Weight, shape);
            if moe.bias {
                let bias = TensorShape::Biases { experts, n };
                self.push(role, TensorPart::Bias, bias);
            }
        }
        if let Some(SharedExpertSpec {
            intermediate: inner,
            gated,
        }) = moe.shared
        {
            self.matrix(TensorRole::SharedGate, (inner, hidden));
            self.matrix(TensorRole::SharedUp, (inner, hidden));
            self.matrix(TensorRole::SharedDown, (hidden, inner));
            if gated {
                self.matrix(TensorRole::SharedRouter, (1, hidden));
            }
        }
    }
}
