//! The tensors of each kind of part of a layer, as [`DecoderSpec::tensors`] lists them.

use super::{
    DecoderTensor, HeadRows, ProductRows, Projection, TensorId, TensorPart, TensorRole, TensorShape,
};
use crate::spec::{
    DecoderSpec, GqaSpec, LayerForm, LinearAttentionSpec, MlaSpec, MlpSpec, MoeSpec, NormKind,
    PerLayerSpec, QkNormSpec, SharedExpertSpec, ShortConvSpec,
};
use ferrum_kernels::{ExpertShape, LinearAttentionRule, MatShape};

impl LayerForm {
    /// The norms before attention, behind it, before the feed-forward and behind it, where it has them.
    pub fn norm_roles(self) -> [Option<TensorRole>; 4] {
        let (attention, ffn) = (TensorRole::AttentionNorm, TensorRole::FeedForwardNorm);
        let behind = TensorRole::PostAttentionNorm;
        let behind_ffn = TensorRole::PostFeedForwardNorm;
        match self {
            Self::PreNorm => [Some(attention), None, Some(ffn), None],
            Self::PostNorm => [None, Some(behind), None, Some(behind_ffn)],
            Self::Sandwich => [attention, behind, ffn, behind_ffn].map(Some),
            Self::Parallel { shared_norm: true } => [Some(attention), None, None, None],
            Self::Parallel { shared_norm: false } => [
                Some(TensorRole::ParallelAttentionNorm),
                None,
                Some(TensorRole::ParallelFeedForwardNorm),
                None,
            ],
        }
    }
}

/// Tensors of one layer, or of none, as they are listed.
pub(super) struct List {
    layer: Option<usize>,
    pub(super) tensors: Vec<DecoderTensor>,
}

impl List {
    pub(super) fn new(layer: Option<usize>) -> Self {
        Self {
            layer,
            tensors: Vec::new(),
        }
    }

    pub(super) fn push(&mut self, role: TensorRole, part: TensorPart, shape: TensorShape) {
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
            by_head: None,
        });
    }

    /// A norm of the residual stream.
    pub(super) fn norm(&mut self, role: TensorRole, spec: &DecoderSpec) {
        self.vector(role, spec.hidden_size);
        if spec.norm == (NormKind::Layer { bias: true }) {
            let bias = TensorShape::Vector(spec.hidden_size);
            self.push(role, TensorPart::Bias, bias);
        }
    }

    pub(super) fn vector(&mut self, role: TensorRole, len: usize) {
        self.push(role, TensorPart::Weight, TensorShape::Vector(len));
    }

    pub(super) fn matrix(&mut self, role: TensorRole, (rows, cols): (usize, usize)) {
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

    pub(super) fn attention(&mut self, gqa: &GqaSpec, hidden: usize) {
        let first = self.tensors.len();
        let shape = gqa.qkv_shape(0);
        let out_dim = gqa.heads * gqa.value_dim;
        self.linear(TensorRole::Query, (shape.q_dim(), hidden), gqa.qkv_bias);
        if gqa.shared_kv.is_none() {
            self.linear(TensorRole::Key, (shape.k_dim(), hidden), gqa.qkv_bias);
        }
        if gqa.shared_kv.is_none() && !gqa.keys_are_values {
            self.linear(TensorRole::Value, (shape.v_dim(), hidden), gqa.qkv_bias);
        }
        if gqa.gate {
            self.linear(TensorRole::AttentionGate, (out_dim, hidden), gqa.qkv_bias);
        }
        self.linear(TensorRole::AttentionOutput, (hidden, out_dim), gqa.out_bias);
        for tensor in &mut self.tensors[first..] {
            tensor.unit = match tensor.id.role {
                TensorRole::Value | TensorRole::AttentionGate | TensorRole::AttentionOutput => {
                    gqa.value_dim
                }
                _ => gqa.head_dim,
            };
            let in_head = |first| {
                Some(HeadRows {
                    heads: gqa.heads,
                    first,
                    of: gqa.head_dim + gqa.value_dim,
                })
            };
            let queries = gqa.heads / gqa.kv_heads.max(1) * gqa.head_dim;
            let of_key_head = |first| {
                Some(HeadRows {
                    heads: gqa.kv_heads,
                    first,
                    of: queries + gqa.head_dim + gqa.value_dim,
                })
            };
            tensor.by_head = match (tensor.id.role, gqa.gate) {
                (TensorRole::Query, true) => in_head(0),
                (TensorRole::AttentionGate, true) => in_head(gqa.head_dim),
                (TensorRole::Query, false) => of_key_head(0),
                (TensorRole::Key, false) => of_key_head(queries),
                (TensorRole::Value, false) => of_key_head(queries + gqa.head_dim),
                _ => None,
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
                of: gqa.projected_dim(),
            };
        }
        if gqa.sinks {
            self.vector(TensorRole::AttentionSinks, gqa.heads);
        }
        let widths = match gqa.qk_norm {
            QkNormSpec::None | QkNormSpec::Unweighted => return,
            QkNormSpec::Heads | QkNormSpec::LayerHeads => [gqa.head_dim; 2],
            QkNormSpec::Projection | QkNormSpec::LayerEach => [shape.q_dim(), shape.k_dim()],
        };
        let first = self.tensors.len();
        let roles = [TensorRole::QueryNorm, TensorRole::KeyNorm];
        for (role, width) in roles.into_iter().zip(widths) {
            if role == TensorRole::QueryNorm || gqa.shared_kv.is_none() {
                self.vector(role, width);
            }
            if gqa.qk_norm == QkNormSpec::LayerHeads {
                self.push(role, TensorPart::Bias, TensorShape::Vector(width));
            }
        }
        let norms = self.tensors[first..].iter_mut();
        norms.for_each(|norm| norm.unit = gqa.head_dim);
    }

    /// What embeddings for each layer need outside of layers.
    pub(super) fn per_layer_tables(&mut self, spec: &PerLayerSpec, hidden: usize) {
        let width = spec.width();
        self.matrix(TensorRole::PerLayerEmbedding, (spec.vocab_size, width));
        self.matrix(TensorRole::PerLayerProjection, (width, hidden));
        self.vector(TensorRole::PerLayerProjectionNorm, spec.dim);
    }

    /// And in each.
    pub(super) fn per_layer(&mut self, spec: &PerLayerSpec, decoder: &DecoderSpec) {
        let hidden = decoder.hidden_size;
        self.matrix(TensorRole::PerLayerGate, (spec.dim, hidden));
        self.matrix(TensorRole::PerLayerOutput, (hidden, spec.dim));
        self.norm(TensorRole::PerLayerNorm, decoder);
    }

    pub(super) fn latent_attention(&mut self, mla: &MlaSpec, hidden: usize) {
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

    pub(super) fn short_conv(&mut self, conv: &ShortConvSpec, hidden: usize) {
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

    /// Linear attention, its projections in the order in which they are computed as one.
    pub(super) fn linear_attention(&mut self, linear: &LinearAttentionSpec, hidden: usize) {
        let LinearAttentionSpec {
            key_heads,
            value_heads,
            key_dim,
            value_dim,
            bias,
            ..
        } = *linear;
        let (keys, values) = (key_heads * key_dim, linear.values());
        let shared = value_heads / key_heads;
        let query = (TensorRole::LinearQuery, keys, key_dim);
        let key = (TensorRole::LinearKey, keys, key_dim);
        let value = (TensorRole::LinearValue, values, shared * value_dim);
        let gate = (TensorRole::LinearGate, values, shared * value_dim);
        let beta = (TensorRole::LinearBeta, value_heads, shared);
        let step = (TensorRole::LinearStep, value_heads, shared);
        // What files join. What those of the gated delta rule join by heads are other maps.
        let (joined, by_head): (&[&[_]], &[&[_]]) = match linear.rule {
            LinearAttentionRule::GatedDelta => (
                &[&[query, key, value], &[gate], &[beta], &[step]],
                &[&[query, key, value, gate], &[beta, step]],
            ),
            LinearAttentionRule::StateSpace => (&[&[gate, value, key, query, step]], &[]),
        };
        let begin = self.tensors.len();
        for maps in joined {
            let of = maps.iter().map(|map| map.1).sum();
            let mut rows = 0;
            for &(role, count, _) in *maps {
                let first = self.tensors.len();
                self.linear(role, (count, hidden), bias);
                let product = ProductRows { first: rows, of };
                let own = self.tensors[first..].iter_mut();
                own.for_each(|tensor| tensor.product = product);
                rows += count;
            }
        }
        for maps in by_head {
            let (of, mut first) = (maps.iter().map(|map| map.2).sum(), 0);
            for &(role, _, rows) in *maps {
                let own = self.tensors[begin..].iter_mut();
                own.filter(|tensor| tensor.id.role == role)
                    .for_each(|tensor| {
                        let heads = key_heads;
                        tensor.by_head = Some(HeadRows { heads, first, of });
                    });
                first += rows;
            }
        }
        let (channels, taps) = (linear.row_dim(), linear.kernel);
        let kernel = TensorShape::Kernel { channels, taps };
        self.push(TensorRole::LinearConv, TensorPart::Weight, kernel);
        if linear.conv_bias {
            let bias = TensorShape::Vector(channels);
            self.push(TensorRole::LinearConv, TensorPart::Bias, bias);
        }
        self.vector(TensorRole::LinearDecay, value_heads);
        self.vector(TensorRole::LinearStepBias, value_heads);
        if linear.rule == LinearAttentionRule::StateSpace {
            self.vector(TensorRole::LinearSkip, value_heads);
        }
        self.vector(TensorRole::LinearNorm, linear.norm_dim());
        self.linear(TensorRole::LinearOutput, (hidden, values), bias);
    }

    pub(super) fn mlp(&mut self, mlp: &MlpSpec, gated: bool, hidden: usize) {
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

    pub(super) fn experts(&mut self, moe: &MoeSpec, hidden: usize) {
        let (experts, inner) = (moe.experts, moe.intermediate);
        self.linear(TensorRole::Router, (experts, hidden), moe.bias);
        if moe.routing.correction {
            self.vector(TensorRole::ExpertCorrection, experts);
        }
        if moe.norms {
            for role in [
                TensorRole::RouterNorm,
                TensorRole::ExpertNorm,
                TensorRole::PostExpertNorm,
                TensorRole::PostSharedNorm,
            ] {
                self.vector(role, hidden);
            }
        }
        if moe.output_scale {
            self.vector(TensorRole::ExpertScale, experts);
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
            ..
        }) = moe.shared
        {
            for (i, role) in [TensorRole::SharedGate, TensorRole::SharedUp]
                .into_iter()
                .enumerate()
            {
                self.matrix(role, (inner, hidden));
                if let Some(tensor) = self.tensors.last_mut() {
                    tensor.product = ProductRows {
                        first: i * inner,
                        of: 2 * inner,
                    };
                }
            }
            self.matrix(TensorRole::SharedDown, (hidden, inner));
            if gated {
                self.matrix(TensorRole::SharedRouter, (1, hidden));
            }
        }
    }
}
