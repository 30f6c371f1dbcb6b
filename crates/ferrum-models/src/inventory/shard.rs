//! How a decoder is cut for ranks that compute it together.
//!
//! The cut is that of Megatron-LM (Shoeybi et al., 2019, "Megatron-LM: Training Multi-Billion Parameter Language
//! Models Using Model Parallelism"): a product that widens keeps some of its outputs, the product after it takes the
//! inputs that come of those, and the sum over ranks is the whole. Five things are dealt out: query heads, key and
//! value heads, the channels of a convolution, the elements between the projections of a feed-forward (of every expert
//! alike), and the rows of the vocabulary. What all ranks need is replicated.
//!
//! Parts need not be equal. Heads are dealt out whole. Where there are fewer key and value heads than ranks, some
//! ranks hold the same one, and share the query heads that read it. Where a weight cannot be cut between inputs, the inputs are
//! [gathered](GatheredProduct) instead.

use super::gather::{GatheredProduct, InputBoundaries, gathered};
use super::sum_split::{GroupShards, finer, split_as};
use super::{DecoderTensor, TensorId, TensorPart, TensorRole, TensorShape};
use crate::spec::{AttentionSpec, DecoderSpec, FeedForwardSpec, GqaSpec};
use ferrum_types::SumSplit;
use std::collections::BTreeMap;
use std::ops::Range;

/// Along what a tensor is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShardAxis {
    /// Not at all: every rank holds it. A bias that is added to a sum over ranks is added once.
    Replicated,
    /// Output features: rows of a matrix or of each matrix of a stack, elements of a bias or of a norm, channels.
    Rows,
    /// Input features: columns of a matrix, whose products are summed over ranks.
    Columns,
    /// Whole matrices of a stack.
    Matrices,
    /// Tokens: rows of a table.
    Vocabulary,
}

/// What is dealt out among ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ShardUnit {
    /// Query heads.
    Heads,
    /// Key and value heads.
    KvHeads,
    /// Channels of a convolution.
    Channels,
    /// Elements between the projections of a feed-forward.
    Intermediate,
    /// Those of a shared expert.
    SharedIntermediate,
    /// Tokens of the vocabulary.
    Tokens,
}

impl TensorId {
    /// Along what such a tensor is cut, if it is not the same for all heads.
    fn axis(self) -> ShardAxis {
        match (self.role, self.part) {
            (TensorRole::TokenEmbedding | TensorRole::Output, _) => ShardAxis::Vocabulary,
            (
                TensorRole::Query
                | TensorRole::Key
                | TensorRole::Value
                | TensorRole::QueryNorm
                | TensorRole::KeyNorm
                | TensorRole::AttentionGate
                | TensorRole::ConvInputGate
                | TensorRole::ConvOutputGate
                | TensorRole::ConvInput
                | TensorRole::ConvKernel
                | TensorRole::QueryUp
                | TensorRole::AttentionSinks
                | TensorRole::Gate
                | TensorRole::Up
                | TensorRole::ExpertGate
                | TensorRole::ExpertUp
                | TensorRole::SharedGate
                | TensorRole::SharedUp,
                _,
            ) => ShardAxis::Rows,
            (TensorRole::KeyUp | TensorRole::ValueUp, _) => ShardAxis::Matrices,
            (
                TensorRole::AttentionOutput
                | TensorRole::ConvOutput
                | TensorRole::Down
                | TensorRole::ExpertDown
                | TensorRole::SharedDown,
                TensorPart::Weight,
            ) => ShardAxis::Columns,
            (
                TensorRole::AttentionOutput
                | TensorRole::ConvOutput
                | TensorRole::Down
                | TensorRole::ExpertDown
                | TensorRole::SharedDown,
                TensorPart::Bias,
            ) => ShardAxis::Replicated,
            (
                TensorRole::RopeFactors
                | TensorRole::RopeLongFactors
                | TensorRole::RopeShortFactors
                | TensorRole::AttentionNorm
                | TensorRole::PostAttentionNorm
                | TensorRole::FeedForwardNorm
                | TensorRole::ParallelAttentionNorm
                | TensorRole::ParallelFeedForwardNorm
                | TensorRole::PostFeedForwardNorm
                | TensorRole::OutputScale
                // Narrow, or looked up.
                | TensorRole::PerLayerEmbedding
                | TensorRole::PerLayerProjection
                | TensorRole::PerLayerProjectionNorm
                | TensorRole::PerLayerGate
                | TensorRole::PerLayerOutput
                | TensorRole::PerLayerNorm
                // What all heads share.
                | TensorRole::QueryDown
                | TensorRole::QueryDownNorm
                | TensorRole::LatentDown
                | TensorRole::LatentNorm
                // Every rank has the whole state.
                | TensorRole::LinearQuery
                | TensorRole::LinearKey
                | TensorRole::LinearValue
                | TensorRole::LinearGate
                | TensorRole::LinearBeta
                | TensorRole::LinearStep
                | TensorRole::LinearConv
                | TensorRole::LinearDecay
                | TensorRole::LinearStepBias
                | TensorRole::LinearSkip
                | TensorRole::LinearNorm
                | TensorRole::LinearOutput
                // A row for each position, and small.
                | TensorRole::PositionEmbedding
                // Small, and every rank has to choose the same experts.
                | TensorRole::Router
                | TensorRole::ExpertCorrection
                | TensorRole::RouterNorm
                | TensorRole::ExpertNorm
                | TensorRole::PostExpertNorm
                | TensorRole::PostSharedNorm
                | TensorRole::ExpertScale
                | TensorRole::SharedRouter
                | TensorRole::FinalNorm,
                _,
            ) => ShardAxis::Replicated,
        }
    }

    /// What the dimension along [`axis`](Self::axis) is made of.
    fn unit(self) -> Option<ShardUnit> {
        Some(match self.role {
            TensorRole::TokenEmbedding | TensorRole::Output => ShardUnit::Tokens,
            TensorRole::Query
            | TensorRole::QueryNorm
            | TensorRole::QueryUp
            | TensorRole::KeyUp
            | TensorRole::ValueUp
            | TensorRole::AttentionSinks
            | TensorRole::AttentionGate
            | TensorRole::AttentionOutput => ShardUnit::Heads,
            TensorRole::Key | TensorRole::KeyNorm | TensorRole::Value => ShardUnit::KvHeads,
            TensorRole::ConvInputGate
            | TensorRole::ConvOutputGate
            | TensorRole::ConvInput
            | TensorRole::ConvKernel
            | TensorRole::ConvOutput => ShardUnit::Channels,
            TensorRole::Gate
            | TensorRole::Up
            | TensorRole::Down
            | TensorRole::ExpertGate
            | TensorRole::ExpertUp
            | TensorRole::ExpertDown => ShardUnit::Intermediate,
            TensorRole::SharedGate | TensorRole::SharedUp | TensorRole::SharedDown => {
                ShardUnit::SharedIntermediate
            }
            TensorRole::RopeFactors
            | TensorRole::RopeLongFactors
            | TensorRole::RopeShortFactors
            | TensorRole::PositionEmbedding
            | TensorRole::AttentionNorm
            | TensorRole::QueryDown
            | TensorRole::QueryDownNorm
            | TensorRole::LatentDown
            | TensorRole::LatentNorm
            | TensorRole::LinearQuery
            | TensorRole::LinearKey
            | TensorRole::LinearValue
            | TensorRole::LinearGate
            | TensorRole::LinearBeta
            | TensorRole::LinearStep
            | TensorRole::LinearConv
            | TensorRole::LinearDecay
            | TensorRole::LinearStepBias
            | TensorRole::LinearSkip
            | TensorRole::LinearNorm
            | TensorRole::LinearOutput
            | TensorRole::PostAttentionNorm
            | TensorRole::FeedForwardNorm
            | TensorRole::ParallelAttentionNorm
            | TensorRole::ParallelFeedForwardNorm
            | TensorRole::PostFeedForwardNorm
            | TensorRole::OutputScale
            | TensorRole::PerLayerEmbedding
            | TensorRole::PerLayerProjection
            | TensorRole::PerLayerProjectionNorm
            | TensorRole::PerLayerGate
            | TensorRole::PerLayerOutput
            | TensorRole::PerLayerNorm
            | TensorRole::Router
            | TensorRole::ExpertCorrection
            | TensorRole::RouterNorm
            | TensorRole::ExpertNorm
            | TensorRole::PostExpertNorm
            | TensorRole::PostSharedNorm
            | TensorRole::ExpertScale
            | TensorRole::SharedRouter
            | TensorRole::FinalNorm => return None,
        })
    }
}

/// What a rank holds of a tensor: all of it but for one dimension.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSlice {
    /// The dimension that is cut, counted from the outermost.
    pub dim: usize,
    /// What of it is held.
    pub range: Range<usize>,
}

/// Where the formats of a model's weights are cut without being dequantised: sizes of which borders are multiples, best
/// first. The first that gives every rank something counts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ShardBoundaries {
    /// For rows of the vocabulary.
    pub tokens: Vec<usize>,
    /// For the channels of each layer's convolution.
    pub channels: Vec<Vec<usize>>,
    /// For the elements between the projections of each layer's feed-forward.
    pub intermediate: Vec<Vec<usize>>,
    /// For those of each layer's shared expert.
    pub shared: Vec<Vec<usize>>,
    /// For the matrices whose products are summed over ranks, of which a device computes as they are.
    pub inputs: BTreeMap<TensorId, InputBoundaries>,
}

/// What one rank of a group holds of a decoder.
#[derive(Clone, Debug, PartialEq)]
pub struct RankShard {
    rank: usize,
    spec: DecoderSpec,
    /// Rows of the vocabulary of every rank.
    tokens: Vec<Range<usize>>,
    layers: Vec<LayerShard>,
    /// Products over inputs of all ranks.
    gathered: BTreeMap<TensorId, GatheredProduct>,
    /// What this one's ranks in groups of two and of four would hold, where they are several.
    finer: [GroupShards; 2],
}

/// What a rank holds of a layer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct LayerShard {
    heads: Range<usize>,
    kv_heads: Range<usize>,
    /// Whether no rank before it holds the same key and value heads.
    owns_kv_heads: bool,
    channels: Range<usize>,
    intermediate: Range<usize>,
    /// Of the shared expert.
    shared: Range<usize>,
}

impl LayerShard {
    /// What of the dimension along which a tensor of the layer is cut; `None` for one that is not.
    pub(super) fn range(&self, tensor: &DecoderTensor) -> Option<Range<usize>> {
        let units = match tensor.shard_unit()? {
            ShardUnit::Tokens => return None,
            ShardUnit::Heads => &self.heads,
            ShardUnit::KvHeads => &self.kv_heads,
            ShardUnit::Channels => &self.channels,
            ShardUnit::Intermediate => &self.intermediate,
            ShardUnit::SharedIntermediate => &self.shared,
        };
        Some(of_units(units.clone(), tensor))
    }
}

/// The elements of some units of a tensor.
fn of_units(units: Range<usize>, tensor: &DecoderTensor) -> Range<usize> {
    let unit = tensor.unit.max(1);
    units.start * unit..units.end * unit
}

/// A norm over all heads of a token.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ProjectionNorm {
    /// Elements of all heads.
    pub(crate) dim: usize,
    /// Whether this rank's part counts: of ranks that hold the same heads, the first one's does.
    pub(crate) counts: bool,
    /// How this rank's sums of squares are cut.
    pub(crate) sums: SumSplit,
}

impl RankShard {
    /// The cut of a rank that is alone: everything.
    pub fn whole(spec: &DecoderSpec) -> Self {
        let layers = spec.layers.iter().map(|layer| {
            let mut cut = LayerShard {
                owns_kv_heads: true,
                intermediate: 0..intermediate(&layer.feed_forward),
                shared: 0..shared_intermediate(&layer.feed_forward),
                ..LayerShard::default()
            };
            match &layer.attention {
                AttentionSpec::Gqa(gqa) => {
                    (cut.heads, cut.kv_heads) = (0..gqa.heads, 0..gqa.kv_heads);
                }
                AttentionSpec::Mla(mla) => cut.heads = 0..mla.heads,
                AttentionSpec::ShortConv(conv) => cut.channels = 0..conv.channels,
                AttentionSpec::Linear(_) => {}
            }
            cut
        });
        let tokens = 0..spec.vocab_size;
        Self {
            rank: 0,
            spec: spec.clone(),
            tokens: std::iter::once(tokens).collect(),
            layers: layers.collect(),
            gathered: BTreeMap::new(),
            finer: Default::default(),
        }
    }

    /// [`whole`](Self::whole), whose sums are cut as those of groups of ranks would be.
    pub fn whole_with_splits(spec: &DecoderSpec, borders: &ShardBoundaries) -> Self {
        Self {
            finer: finer(spec, borders, (0, 1)),
            ..Self::whole(spec)
        }
    }

    /// What rank `rank` of `ranks` holds of a decoder whose formats have these borders.
    ///
    /// # Errors
    /// Which layer has how many heads, elements or tokens, where that is fewer than ranks.
    pub fn new(
        spec: &DecoderSpec,
        borders: &ShardBoundaries,
        (rank, ranks): (usize, usize),
    ) -> Result<Self, String> {
        if rank >= ranks {
            return Err(format!("rank {rank} of {ranks} does not exist"));
        }
        let tokens = split_evenly(spec.vocab_size, &borders.tokens, ranks).ok_or_else(|| {
            let found = spec.vocab_size;
            format!(
                "found a vocabulary of {found} tokens, expected at least {ranks} for as many ranks"
            )
        })?;
        let mut gathered = gathered(spec, borders, ranks);
        if !gathered.is_empty() {
            let alone = Self::whole_with_splits(spec, borders);
            for (id, product) in &mut gathered {
                let split = spec.tensor(*id).map(|tensor| alone.sum_split(&tensor));
                product.sums = split.unwrap_or_default();
            }
        }
        Ok(Self {
            rank,
            spec: spec.clone(),
            tokens,
            layers: layer_shards(spec, borders, (rank, ranks))?,
            gathered,
            finer: finer(spec, borders, (rank, ranks)),
        })
    }

    /// The same parts with no inputs gathered: all products over inputs that are cut are summed over ranks.
    pub(crate) fn without_gathers(mut self) -> Self {
        self.gathered.clear();
        self
    }

    /// This rank, from 0.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Ranks of the group.
    pub fn ranks(&self) -> usize {
        self.tokens.len()
    }

    /// Whether there is one rank, which holds everything.
    pub fn is_whole(&self) -> bool {
        self.ranks() == 1
    }

    /// The decoder that is cut.
    pub fn whole_spec(&self) -> &DecoderSpec {
        &self.spec
    }

    /// The rows of the vocabulary that this rank holds.
    pub fn tokens(&self) -> Range<usize> {
        self.tokens[self.rank].clone()
    }

    /// How many rows of the vocabulary each rank holds.
    pub fn token_counts(&self) -> Vec<usize> {
        self.tokens.iter().map(Range::len).collect()
    }

    /// The decoder as this rank computes it: fewer heads and a narrower feed-forward, and the whole vocabulary,
    /// whose rows are put together again by its weights.
    pub fn rank_spec(&self) -> DecoderSpec {
        let mut spec = self.spec.clone();
        for (layer, cut) in spec.layers.iter_mut().zip(&self.layers) {
            match &mut layer.attention {
                AttentionSpec::Gqa(gqa) => {
                    gqa.heads = cut.heads.len();
                    gqa.kv_heads = cut.kv_heads.len();
                }
                AttentionSpec::Mla(mla) => mla.heads = cut.heads.len(),
                AttentionSpec::ShortConv(conv) => conv.channels = cut.channels.len(),
                AttentionSpec::Linear(_) => {}
            }
            match &mut layer.feed_forward {
                FeedForwardSpec::GatedMlp(mlp) | FeedForwardSpec::Mlp(mlp) => {
                    mlp.intermediate = cut.intermediate.len();
                }
                FeedForwardSpec::Moe(moe) => {
                    moe.intermediate = cut.intermediate.len();
                    if let Some(shared) = &mut moe.shared {
                        shared.intermediate = cut.shared.len();
                    }
                }
            }
        }
        spec
    }

    /// The norms over all query heads and over all key heads of a layer.
    pub(crate) fn projection_norms(&self, layer: usize) -> [ProjectionNorm; 2] {
        let spec = self.spec.layers.get(layer);
        let (Some(AttentionSpec::Gqa(gqa)), Some(cut)) =
            (spec.map(|spec| &spec.attention), self.layers.get(layer))
        else {
            return [ProjectionNorm::default(); 2];
        };
        let shape = gqa.qkv_shape(0);
        let split = |unit: usize, of: fn(&LayerShard) -> (Range<usize>, bool)| {
            self.split_of(layer, |shard| {
                let (heads, counts) = of(shard);
                (heads.start * unit..heads.end * unit, counts)
            })
        };
        [
            ProjectionNorm {
                dim: shape.q_dim(),
                counts: true,
                sums: split(gqa.head_dim, |shard| (shard.heads.clone(), true)),
            },
            ProjectionNorm {
                dim: shape.k_dim(),
                counts: cut.owns_kv_heads,
                sums: split(gqa.head_dim, |shard| {
                    (shard.kv_heads.clone(), shard.owns_kv_heads)
                }),
            },
        ]
    }

    /// The product with a matrix over inputs of all ranks, if it is one.
    pub fn gathered(&self, id: TensorId) -> Option<&GatheredProduct> {
        self.gathered.get(&id)
    }

    /// Elements of a token that products over inputs of all ranks need for a moment: inputs, and outputs of this rank.
    pub(crate) fn gathered_widths(&self) -> [usize; 2] {
        let mut most = [0; 2];
        for (id, product) in &self.gathered {
            let layer = id.layer.and_then(|layer| self.spec.layers.get(layer));
            let each = match layer.map(|layer| &layer.feed_forward) {
                Some(FeedForwardSpec::Moe(moe)) if id.role.is_expert() => moe.top_k,
                _ => 1,
            };
            let inputs = each * product.inputs.iter().sum::<usize>();
            most[0] = most[0].max(inputs);
            most[1] = most[1].max(product.outputs_of(self.rank).len());
        }
        most
    }

    /// How products with a tensor are cut, so that groups of up to four ranks make the same partial sums.
    pub(crate) fn sum_split(&self, tensor: &DecoderTensor) -> SumSplit {
        if let Some(product) = self.gathered(tensor.id) {
            return product.sums;
        }
        match (tensor.shard_axis(), tensor.id.layer) {
            (ShardAxis::Columns, Some(layer)) => self.split_of(layer, |shard| {
                (shard.range(tensor).unwrap_or_default(), true)
            }),
            _ => SumSplit::WHOLE,
        }
    }

    /// How sums over what `of` says that ranks hold of a layer, and whether it counts, are cut.
    fn split_of(&self, layer: usize, of: impl Fn(&LayerShard) -> (Range<usize>, bool)) -> SumSplit {
        let Some((own, _)) = self.layers.get(layer).map(&of) else {
            return SumSplit::WHOLE;
        };
        let parts = |group: &GroupShards| -> Vec<_> {
            let shards = group.iter().filter_map(|layers| layers.get(layer));
            shards.map(&of).collect()
        };
        split_as(&own, self.finer.each_ref().map(parts))
    }

    /// Along what a tensor is cut for this group.
    pub fn axis(&self, tensor: &DecoderTensor) -> ShardAxis {
        match self.gathered_outputs(tensor) {
            Some(_) => ShardAxis::Rows,
            None => tensor.shard_axis(),
        }
    }

    /// The outputs of this rank in a product over inputs of all ranks. Biases of experts are added to them, others to the outputs of
    /// all ranks.
    fn gathered_outputs(&self, tensor: &DecoderTensor) -> Option<Range<usize>> {
        let id = TensorId {
            part: TensorPart::Weight,
            ..tensor.id
        };
        let is_cut = match tensor.id.part {
            TensorPart::Weight => true,
            TensorPart::Bias => matches!(tensor.shape, TensorShape::Biases { .. }),
        };
        let product = self.gathered(id).filter(|_| is_cut)?;
        Some(product.outputs_of(self.rank))
    }

    /// What this rank holds of a tensor of the decoder.
    pub fn slice(&self, tensor: &DecoderTensor) -> TensorSlice {
        let dims = tensor.shape.dims();
        let dim = match (self.axis(tensor), tensor.shape) {
            (ShardAxis::Columns, _) => dims.len() - 1,
            (ShardAxis::Rows, TensorShape::Stack(_) | TensorShape::Biases { .. }) => 1,
            (
                ShardAxis::Replicated
                | ShardAxis::Rows
                | ShardAxis::Matrices
                | ShardAxis::Vocabulary,
                _,
            ) => 0,
        };
        let layer = tensor.id.layer.and_then(|index| self.layers.get(index));
        let outputs = self.gathered_outputs(tensor);
        let range = outputs.or_else(|| match (tensor.shard_unit(), layer) {
            (Some(ShardUnit::Tokens), _) => Some(of_units(self.tokens(), tensor)),
            (_, Some(layer)) => layer.range(tensor),
            (_, None) => None,
        });
        TensorSlice {
            dim,
            range: range.unwrap_or(0..dims[dim]),
        }
    }
}

impl DecoderTensor {
    /// Along what it is cut.
    pub fn shard_axis(&self) -> ShardAxis {
        let is_norm = matches!(self.id.role, TensorRole::QueryNorm | TensorRole::KeyNorm);
        match is_norm && self.shape.dims() == [self.unit] {
            // The same for all heads.
            true => ShardAxis::Replicated,
            false => self.id.axis(),
        }
    }

    /// What its cut dimension is made of; `None` for a tensor that is replicated.
    pub fn shard_unit(&self) -> Option<ShardUnit> {
        match self.shard_axis() {
            ShardAxis::Replicated => None,
            _ => self.id.unit(),
        }
    }
}

/// What a rank holds of each layer.
pub(super) fn layer_shards(
    spec: &DecoderSpec,
    borders: &ShardBoundaries,
    (rank, ranks): (usize, usize),
) -> Result<Vec<LayerShard>, String> {
    let layers = spec.layers.iter().enumerate().map(|(index, layer)| {
        let of_layer = |all: &[Vec<usize>]| all.get(index).cloned().unwrap_or_default();
        let own_range = |what: &str, count: usize, borders: &[Vec<usize>]| {
            let parts = split_evenly(count, &of_layer(borders), ranks).ok_or_else(|| {
                format!(
                    "found {what} of {count} elements, expected at least {ranks} for as many ranks"
                )
            });
            parts.map(|parts| parts[rank].clone())
        };
        let own = || -> Result<LayerShard, String> {
            let mut shard = match &layer.attention {
                AttentionSpec::Gqa(gqa) => heads(gqa, (rank, ranks))?,
                AttentionSpec::Mla(mla) => LayerShard {
                    heads: own_range("attention", mla.heads, &[])?,
                    ..LayerShard::default()
                },
                AttentionSpec::ShortConv(conv) => LayerShard {
                    channels: own_range("a convolution", conv.channels, &borders.channels)?,
                    ..LayerShard::default()
                },
                AttentionSpec::Linear(_) => LayerShard::default(),
            };
            let inner = intermediate(&layer.feed_forward);
            shard.intermediate = own_range("a feed-forward", inner, &borders.intermediate)?;
            let shared = shared_intermediate(&layer.feed_forward);
            if shared > 0 {
                shard.shared = own_range("a shared expert", shared, &borders.shared)?;
            }
            Ok(shard)
        };
        own().map_err(|reason| format!("layer {index}: {reason}"))
    });
    layers.collect()
}

fn intermediate(feed_forward: &FeedForwardSpec) -> usize {
    match feed_forward {
        FeedForwardSpec::GatedMlp(mlp) | FeedForwardSpec::Mlp(mlp) => mlp.intermediate,
        FeedForwardSpec::Moe(moe) => moe.intermediate,
    }
}

fn shared_intermediate(feed_forward: &FeedForwardSpec) -> usize {
    match feed_forward {
        FeedForwardSpec::GatedMlp(_) | FeedForwardSpec::Mlp(_) => 0,
        FeedForwardSpec::Moe(moe) => moe.shared_intermediate(),
    }
}

/// Parts of `total` that differ by at most one unit, at multiples of the first of `units` (or of 1) that gives every
/// rank something; `None` when there are fewer elements than ranks. Groups of a power of two have the parts of two ranks, each
/// split in turn.
pub(super) fn split_evenly(
    total: usize,
    units: &[usize],
    ranks: usize,
) -> Option<Vec<Range<usize>>> {
    if ranks > 2 && ranks.is_power_of_two() {
        let halves = split_evenly(total, units, 2)?.into_iter().map(|half| {
            let parts = split_evenly(half.len(), units, ranks / 2)?.into_iter();
            Some(parts.map(move |part| half.start + part.start..half.start + part.end))
        });
        let halves: Option<Vec<_>> = halves.collect();
        if let Some(halves) = halves {
            return Some(halves.into_iter().flatten().collect());
        }
    }
    let enough = |unit: &usize| *unit > 0 && total.div_ceil(*unit) >= ranks;
    let unit = units.iter().copied().chain([1]).find(enough)?;
    let count = total.div_ceil(unit);
    let border = |rank: usize| (count * rank / ranks * unit).min(total);
    Some((0..ranks).map(|r| border(r)..border(r + 1)).collect())
}

/// What a rank holds of a layer's attention: query heads, and key and value heads.
fn heads(gqa: &GqaSpec, (rank, ranks): (usize, usize)) -> Result<LayerShard, String> {
    let (heads, kv_heads) = (gqa.heads, gqa.kv_heads);
    let of_each = heads / kv_heads.max(1);
    let fail = || {
        format!(
            "found {heads} query heads over {kv_heads} kv heads, expected at least {ranks} query heads for \
             as many ranks"
        )
    };
    // Every rank says so, whatever it would get.
    if ranks > heads {
        return Err(fail());
    }
    if let Some(parts) = split_evenly(kv_heads, &[], ranks) {
        let kv = parts[rank].clone();
        return Ok(LayerShard {
            heads: kv.start * of_each..kv.end * of_each,
            kv_heads: kv,
            owns_kv_heads: true,
            ..LayerShard::default()
        });
    }
    // The ranks are dealt out over the kv heads, and the query heads of each over its ranks. The first heads have the more ranks, as
    // the last ranks have the more heads where there are enough: so two ranks of four hold what one of two does.
    let border = |head: usize| (ranks * head).div_ceil(kv_heads.max(1));
    let owners: Vec<_> = (0..kv_heads)
        .map(|head| border(head)..border(head + 1))
        .collect();
    let find = owners.iter().position(|owners| owners.contains(&rank));
    let (kv, owners) = find.map(|kv| (kv, &owners[kv])).ok_or_else(fail)?;
    let shares = split_evenly(of_each, &[], owners.len()).ok_or_else(fail)?;
    let share = &shares[rank - owners.start];
    let first = kv * of_each;
    Ok(LayerShard {
        heads: first + share.start..first + share.end,
        kv_heads: kv..kv + 1,
        owns_kv_heads: rank == owners.start,
        ..LayerShard::default()
    })
}
