//! What files call the tensors of the inventory.
//!
//! A naming scheme is one [`WeightNames`] table; families say which is theirs. Everything that needs a
//! name, or the tensor behind a name, asks here. What files of a scheme hold otherwise than a decoder computes with it
//! (norms less 1, matrices the other way round) stands here, too.

use super::{DecoderTensor, HeadRows, TensorId, TensorPart, TensorRole, TensorShape};
use ferrum_kernels::ExpertShape;
use std::ops::Range;

/// Names of a decoder's tensors in one kind of file. Names lack their `.weight` or `.bias`.
#[derive(Debug)]
pub struct WeightNames {
    /// Token embedding.
    pub embedding: &'static str,
    /// Factors that divide rotary frequencies, in files that hold them.
    pub rope_factors: Option<&'static str>,
    /// Those for sequences beyond the length where they change, and up to it.
    pub rope_long_short: Option<(&'static str, &'static str)>,
    /// Learned positions.
    pub positions: Option<&'static str>,
    /// Embeddings that layers have of their own.
    pub per_layer: PerLayerNames,
    /// Norm after the last layer.
    pub final_norm: &'static str,
    /// Output projection.
    pub lm_head: &'static str,
    /// Prefix of layer `{}`.
    pub layer: &'static str,
    /// Norm before attention.
    pub attn_norm: &'static str,
    /// Query projection.
    pub q: &'static str,
    /// Key projection.
    pub k: &'static str,
    /// Value projection.
    pub v: &'static str,
    /// Norm of query heads.
    pub q_norm: &'static str,
    /// Norm of key heads.
    pub k_norm: &'static str,
    /// Scores of attention that give nothing, a whole name.
    pub sinks: &'static str,
    /// The maps of latent attention.
    pub mla: MlaNames,
    /// What belongs to linear attention.
    pub linear: LinearAttentionNames,
    /// Attention's output projection.
    pub attn_out: &'static str,
    /// Norm behind attention, in files that hold it.
    pub post_attn_norm: Option<&'static str>,
    /// Taps of a short convolution.
    pub conv: &'static str,
    /// Its output projection.
    pub conv_out: &'static str,
    /// Norm before the feed-forward.
    pub ffn_norm: &'static str,
    /// Gate projection.
    pub gate: &'static str,
    /// Up projection.
    pub up: &'static str,
    /// Down projection.
    pub down: &'static str,
    /// Norms before attention and before the feed-forward where both run at once, each with its own.
    pub parallel_norms: Option<(&'static str, &'static str)>,
    /// Norm behind the feed-forward, in files that hold it.
    pub post_ffn_norm: Option<&'static str>,
    /// Factor on the stream behind the layer, a whole name.
    pub output_scale: &'static str,
    /// Router of experts.
    pub router: &'static str,
    /// The experts.
    pub experts: ExpertNames,
    /// Maps that some files hold joined.
    pub joined: FusedNames,
    /// What a norm's weight is more than the number in the file.
    pub norm_offset: f32,
    /// Whether matrices of layers are stored with a row for each input.
    pub transposed: bool,
}

/// Names of maps that are one below the other in one tensor, in files that hold them so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FusedNames {
    /// Query, key and value.
    pub qkv: Option<&'static str>,
    /// Query, key and value, by key heads.
    pub qkv_heads: Option<&'static str>,
    /// Input gate, output gate and input of a short convolution.
    pub conv_in: Option<&'static str>,
    /// Query and gate of attention, by heads.
    pub query_gate: Option<&'static str>,
    /// Query, key and value of linear attention.
    pub linear_qkv: Option<&'static str>,
    /// All projections of a state space: output gate, value, key, query and step.
    pub linear_in: Option<&'static str>,
    /// Those of the gated delta rule by key heads: query, key, value and output gate; and update gate and step.
    pub linear_heads: Option<(&'static str, &'static str)>,
    /// Gate and up.
    pub gate_up: Option<&'static str>,
    /// Those of a shared expert.
    pub shared_gate_up: Option<&'static str>,
}

impl FusedNames {
    /// None.
    pub const NONE: Self = Self {
        qkv: None,
        qkv_heads: None,
        conv_in: None,
        query_gate: None,
        linear_qkv: None,
        linear_in: None,
        linear_heads: None,
        gate_up: None,
        shared_gate_up: None,
    };
}

/// Names of what belongs to linear attention.
#[derive(Debug)]
pub struct LinearAttentionNames {
    /// Projection to the output gate.
    pub gate: &'static str,
    /// Projection to the update gate.
    pub beta: &'static str,
    /// Projection to the step.
    pub step: &'static str,
    /// Taps of the convolution.
    pub conv: &'static str,
    /// The decay of each head, a whole name.
    pub decay: &'static str,
    /// Whether files have the logarithm of its opposite.
    pub log_decay: bool,
    /// What is added to the step, a whole name.
    pub step_bias: &'static str,
    /// The skip of each head, a whole name.
    pub skip: &'static str,
    /// Norm of the output.
    pub norm: &'static str,
    /// Output projection.
    pub out: &'static str,
}

/// Runs of rows, equally long and equally far from each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowRuns {
    /// The first row of the first.
    pub first: usize,
    /// Rows of each.
    pub len: usize,
    /// From the first row of one to that of the next.
    pub step: usize,
    /// How many there are.
    pub count: usize,
}

impl RowRuns {
    /// Rows that follow each other.
    pub fn one(first: usize, len: usize) -> Self {
        let (step, count) = (len, 1);
        Self {
            first,
            len,
            step,
            count,
        }
    }

    /// Where one of their rows is.
    pub fn row(&self, row: usize) -> usize {
        let len = self.len.max(1);
        self.first + row / len * self.step + row % len
    }

    /// Where some of their rows are, in runs.
    pub fn places(&self, rows: Range<usize>) -> Vec<Range<usize>> {
        let len = self.len.max(1);
        let runs = rows.start / len..rows.end.div_ceil(len);
        let part = |run: usize| {
            let (start, end) = (rows.start.max(run * len), rows.end.min((run + 1) * len));
            let first = self.row(start);
            first..first + (end - start)
        };
        runs.map(part).collect()
    }
}

/// Names of embeddings that layers have of their own.
#[derive(Debug)]
pub struct PerLayerNames {
    /// The table, a whole name but for its suffix.
    pub table: &'static str,
    /// Projection of embeddings to the same width, likewise.
    pub projection: &'static str,
    /// Norm behind that, likewise.
    pub projection_norm: &'static str,
    /// Gate in a layer.
    pub gate: &'static str,
    /// Projection to the stream.
    pub out: &'static str,
    /// Norm behind that.
    pub norm: &'static str,
}

/// Names of the maps of latent attention.
#[derive(Debug)]
pub struct MlaNames {
    /// Compression of queries.
    pub q_down: &'static str,
    /// Its norm.
    pub q_down_norm: &'static str,
    /// Projection from compressed queries.
    pub q_up: &'static str,
    /// Compression of keys and values.
    pub latent_down: &'static str,
    /// Its norm.
    pub latent_norm: &'static str,
    /// From compressed rows to the keys and values of all heads, those of each together.
    pub up: &'static str,
    /// The stacks `(keys, values)` of absorbed maps, in files that hold them.
    pub absorbed: Option<(&'static str, &'static str)>,
}

/// Stacks of experts that join gate and up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FusedExperts {
    /// The whole name of gate above up, `[experts, 2 · intermediate, hidden]`.
    pub gate_up: &'static str,
    /// The whole name of `[experts, hidden, intermediate]`.
    pub down: &'static str,
    /// Whether there is a row for each input instead.
    pub transposed: bool,
    /// Whether outputs of gate and up take turns.
    pub interleaved: bool,
}

/// How the matrices of a stack lie in a tensor of `[matrices, height, width]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StackLayout {
    /// Rows for each matrix.
    pub height: usize,
    /// Numbers of a row.
    pub width: usize,
    /// The row of the first output, or its column in a transposed one.
    pub first: usize,
    /// Rows, or columns, from an output to the next.
    pub step: usize,
    /// Whether there is a row for each input.
    pub transposed: bool,
}

/// Names of an expert that all tokens go through.
#[derive(Debug)]
pub struct SharedNames {
    /// Gate projection.
    pub gate: &'static str,
    /// Up projection.
    pub up: &'static str,
    /// Down projection.
    pub down: &'static str,
    /// The logit by whose sigmoid its output is multiplied.
    pub router: &'static str,
}

/// Names of the norms of experts beside a feed-forward, and of their factors.
#[derive(Clone, Copy, Debug)]
pub struct ExpertNormNames {
    /// Before the router, a whole name.
    pub router: &'static str,
    /// Before the experts.
    pub experts: &'static str,
    /// Behind the experts.
    pub post_experts: &'static str,
    /// Behind the feed-forward beside them.
    pub post_shared: &'static str,
    /// The factor of each expert, a whole name.
    pub scale: &'static str,
}

/// Names of a layer's experts.
#[derive(Debug)]
pub struct ExpertNames {
    /// Gate projection: a stack, or that of expert `{}`.
    pub gate: &'static str,
    /// Up projection.
    pub up: &'static str,
    /// Down projection.
    pub down: &'static str,
    /// What some files have instead.
    pub joined: Option<FusedExperts>,
    /// What is added to the scores of experts, a whole name.
    pub correction: &'static str,
    /// The expert of all tokens.
    pub shared: SharedNames,
    /// Their norms, in files that hold such.
    pub norms: Option<ExpertNormNames>,
}

/// Where a file holds a tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TensorLocation {
    /// In one of the same shape.
    Whole(String),
    /// A matrix for each expert. The name lacks its `.weight`, as a quantised matrix is several tensors,
    /// and has `{}` for the expert's number.
    PerExpert(String),
    /// In a tensor that has the matrices of a stack, or its biases, in another order.
    Reordered {
        /// The whole name.
        name: String,
        /// The order.
        layout: StackLayout,
    },
    /// In the tensor `name` of `height` rows, or in each matrix of the stack, `[experts, height, inputs]`, those from
    /// `first` on.
    Rows {
        /// The whole name.
        name: String,
        /// The first row.
        first: usize,
        /// Rows of the tensor, or of a matrix of the stack.
        height: usize,
    },
    /// In the tensor `name` of `height` rows, those of these runs.
    Runs {
        /// The whole name.
        name: String,
        /// Which rows.
        runs: RowRuns,
        /// Rows of the tensor.
        height: usize,
    },
}

/// The matrix of expert `expert` among those that a [`TensorLocation::PerExpert`] names.
pub(crate) fn of_expert(pattern: &str, expert: usize) -> String {
    pattern.replace("{}", &expert.to_string())
}

impl WeightNames {
    /// What a role is called: all of the name outside layers, else what follows the layer's prefix.
    pub fn stem(&self, role: TensorRole) -> Option<&'static str> {
        Some(match role {
            TensorRole::TokenEmbedding => self.embedding,
            TensorRole::RopeFactors => return self.rope_factors,
            TensorRole::RopeLongFactors => return self.rope_long_short.map(|(long, _)| long),
            TensorRole::RopeShortFactors => return self.rope_long_short.map(|(_, short)| short),
            TensorRole::PositionEmbedding => return self.positions,
            TensorRole::PerLayerEmbedding => self.per_layer.table,
            TensorRole::PerLayerProjection => self.per_layer.projection,
            TensorRole::PerLayerProjectionNorm => self.per_layer.projection_norm,
            TensorRole::PerLayerGate => self.per_layer.gate,
            TensorRole::PerLayerOutput => self.per_layer.out,
            TensorRole::PerLayerNorm => self.per_layer.norm,
            TensorRole::AttentionNorm => self.attn_norm,
            TensorRole::Query => self.q,
            TensorRole::Key => self.k,
            TensorRole::Value => self.v,
            TensorRole::QueryNorm => self.q_norm,
            TensorRole::KeyNorm => self.k_norm,
            TensorRole::AttentionSinks => self.sinks,
            TensorRole::QueryDown => self.mla.q_down,
            TensorRole::QueryDownNorm => self.mla.q_down_norm,
            TensorRole::QueryUp => self.mla.q_up,
            TensorRole::LatentDown => self.mla.latent_down,
            TensorRole::LatentNorm => self.mla.latent_norm,
            TensorRole::KeyUp => return self.mla.absorbed.map(|(keys, _)| keys),
            TensorRole::ValueUp => return self.mla.absorbed.map(|(_, values)| values),
            // Always joined.
            TensorRole::AttentionGate
            | TensorRole::LinearQuery
            | TensorRole::LinearKey
            | TensorRole::LinearValue => return None,
            TensorRole::LinearGate => self.linear.gate,
            TensorRole::LinearBeta => self.linear.beta,
            TensorRole::LinearStep => self.linear.step,
            TensorRole::LinearConv => self.linear.conv,
            TensorRole::LinearDecay => self.linear.decay,
            TensorRole::LinearStepBias => self.linear.step_bias,
            TensorRole::LinearSkip => self.linear.skip,
            TensorRole::LinearNorm => self.linear.norm,
            TensorRole::LinearOutput => self.linear.out,
            TensorRole::AttentionOutput => self.attn_out,
            TensorRole::PostAttentionNorm => return self.post_attn_norm,
            // Always joined.
            TensorRole::ConvInputGate | TensorRole::ConvOutputGate | TensorRole::ConvInput => {
                return None;
            }
            TensorRole::ConvKernel => self.conv,
            TensorRole::ConvOutput => self.conv_out,
            TensorRole::FeedForwardNorm => self.ffn_norm,
            TensorRole::ParallelAttentionNorm => {
                return self.parallel_norms.map(|(first, _)| first);
            }
            TensorRole::ParallelFeedForwardNorm => {
                return self.parallel_norms.map(|(_, second)| second);
            }
            TensorRole::Gate => self.gate,
            TensorRole::Up => self.up,
            TensorRole::Down => self.down,
            TensorRole::PostFeedForwardNorm => return self.post_ffn_norm,
            TensorRole::OutputScale => self.output_scale,
            TensorRole::Router => self.router,
            TensorRole::ExpertGate => self.experts.gate,
            TensorRole::ExpertUp => self.experts.up,
            TensorRole::ExpertDown => self.experts.down,
            TensorRole::ExpertCorrection => self.experts.correction,
            TensorRole::RouterNorm => return self.experts.norms.map(|norms| norms.router),
            TensorRole::ExpertNorm => return self.experts.norms.map(|norms| norms.experts),
            TensorRole::PostExpertNorm => {
                return self.experts.norms.map(|norms| norms.post_experts);
            }
            TensorRole::PostSharedNorm => return self.experts.norms.map(|norms| norms.post_shared),
            TensorRole::ExpertScale => return self.experts.norms.map(|norms| norms.scale),
            TensorRole::SharedGate => self.experts.shared.gate,
            TensorRole::SharedUp => self.experts.shared.up,
            TensorRole::SharedDown => self.experts.shared.down,
            TensorRole::SharedRouter => self.experts.shared.router,
            TensorRole::FinalNorm => self.final_norm,
            TensorRole::Output => self.lm_head,
        })
    }

    /// The name of a tensor less `.weight` or `.bias`, if it has one of these; `None` where such files do not hold it.
    pub fn module(&self, id: TensorId) -> Option<String> {
        let stem = self.stem(id.role)?;
        Some(match id.layer {
            Some(layer) => format!("{}.{stem}", of_expert(self.layer, layer)),
            None => stem.to_owned(),
        })
    }

    /// The whole name of a tensor. `None` where such files do not hold it, or hold it as several: see
    /// [`locations`](Self::locations).
    pub fn name(&self, id: TensorId) -> Option<String> {
        let stem = self.stem(id.role)?;
        let module = self.module(id).filter(|_| !stem.contains("{}"))?;
        if id.role.is_named_whole() {
            return (id.part == TensorPart::Weight).then_some(module);
        }
        Some(format!("{module}.{}", id.part.suffix()))
    }

    /// Where files may hold a tensor: the first place whose tensors are there counts. Empty where they do
    /// not hold it.
    pub fn locations(&self, tensor: &DecoderTensor) -> Vec<TensorLocation> {
        let mut all = self.joined(tensor);
        all.extend(match self.name(tensor.id) {
            Some(name) => Some(TensorLocation::Whole(name)),
            None => self.module(tensor.id).map(TensorLocation::PerExpert),
        });
        all
    }

    /// The places in tensors that join several.
    fn joined(&self, tensor: &DecoderTensor) -> Vec<TensorLocation> {
        let Some(layer) = tensor.id.layer else {
            return Vec::new();
        };
        let (part, suffix) = (tensor.product, tensor.id.part.suffix());
        let whole = |stem: &str| format!("{}.{stem}", of_expert(self.layer, layer));
        match tensor.id.role {
            TensorRole::ExpertGate | TensorRole::ExpertUp | TensorRole::ExpertDown => {
                self.fused_experts(tensor, whole).into_iter().collect()
            }
            TensorRole::KeyUp | TensorRole::ValueUp => {
                let (is_key, dims) = (tensor.id.role == TensorRole::KeyUp, tensor.shape.dims());
                vec![TensorLocation::Reordered {
                    name: whole(&format!("{}.{suffix}", self.mla.up)),
                    layout: StackLayout {
                        height: part.of,
                        width: if is_key { dims[1] } else { dims[2] },
                        // Keys come first, so their map is turned in place.
                        first: if is_key { 0 } else { part.first },
                        step: 1,
                        transposed: is_key,
                    },
                }]
            }
            _ => {
                let places = self.fused_rows(tensor).into_iter();
                let place = |(stem, runs, height): (&str, RowRuns, usize)| {
                    let name = whole(&format!("{stem}.{suffix}"));
                    match runs {
                        RowRuns {
                            first, count: 1, ..
                        } => TensorLocation::Rows {
                            name,
                            first,
                            height,
                        },
                        runs => TensorLocation::Runs { name, runs, height },
                    }
                };
                places.map(place).collect()
            }
        }
    }

    /// The modules of a layer that have the rows of a map among others, with these rows and how many there are.
    pub(crate) fn fused_rows(&self, tensor: &DecoderTensor) -> Vec<(&'static str, RowRuns, usize)> {
        let (joined, rows) = (&self.joined, tensor.shape.dims()[0]);
        let together = RowRuns::one(tensor.product.first, rows);
        let together = |stem: Option<&'static str>| Some((stem?, together, tensor.product.of));
        let by_head = |stem: Option<&'static str>| {
            let HeadRows { heads, first, of } = tensor.by_head?;
            let runs = RowRuns {
                first,
                len: rows / heads.max(1),
                step: of,
                count: heads,
            };
            Some((stem?, runs, heads * of))
        };
        let has_heads = tensor.by_head.is_some();
        let places = match tensor.id.role {
            TensorRole::AttentionGate => [by_head(joined.query_gate), None],
            TensorRole::Query => {
                let heads = joined.query_gate.or(joined.qkv_heads);
                [by_head(heads), together(joined.qkv)]
            }
            TensorRole::Key | TensorRole::Value => {
                [by_head(joined.qkv_heads), together(joined.qkv)]
            }
            TensorRole::ConvInputGate | TensorRole::ConvOutputGate | TensorRole::ConvInput => {
                [together(joined.conv_in), None]
            }
            TensorRole::LinearQuery | TensorRole::LinearKey | TensorRole::LinearValue
                if has_heads =>
            {
                let heads = joined.linear_heads.map(|(first, _)| first);
                [by_head(heads), together(joined.linear_qkv)]
            }
            TensorRole::LinearGate if has_heads => {
                [by_head(joined.linear_heads.map(|(first, _)| first)), None]
            }
            TensorRole::LinearBeta | TensorRole::LinearStep if has_heads => {
                [by_head(joined.linear_heads.map(|(_, second)| second)), None]
            }
            TensorRole::LinearQuery
            | TensorRole::LinearKey
            | TensorRole::LinearValue
            | TensorRole::LinearGate
            | TensorRole::LinearStep => [together(joined.linear_in), None],
            TensorRole::Gate | TensorRole::Up => [together(joined.gate_up), None],
            TensorRole::SharedGate | TensorRole::SharedUp => {
                [together(joined.shared_gate_up), None]
            }
            _ => [None, None],
        };
        places.into_iter().flatten().collect()
    }

    /// The place of experts' matrices, or their biases, where gate and up are joined.
    fn fused_experts(
        &self,
        tensor: &DecoderTensor,
        whole: impl Fn(&str) -> String,
    ) -> Option<TensorLocation> {
        let joined = self.experts.joined?;
        let (n, inputs) = match tensor.shape {
            TensorShape::Stack(ExpertShape { n, k, .. }) => (n, Some(k)),
            TensorShape::Biases { n, .. } => (n, None),
            _ => return None,
        };
        let (stem, place, of) = match tensor.id.role {
            TensorRole::ExpertGate => (joined.gate_up, 0, 2),
            TensorRole::ExpertUp => (joined.gate_up, 1, 2),
            _ => (joined.down, 0, 1),
        };
        let (first, step) = match joined.interleaved {
            true => (place, of),
            false => (place * n, 1),
        };
        let Some(k) = inputs else {
            return Some(TensorLocation::Reordered {
                name: whole(&format!("{stem}_bias")),
                layout: StackLayout {
                    height: 1,
                    width: of * n,
                    first,
                    step,
                    transposed: true,
                },
            });
        };
        if !joined.transposed && step == 1 {
            return Some(TensorLocation::Rows {
                name: whole(stem),
                first,
                height: of * n,
            });
        }
        let (height, width) = match joined.transposed {
            true => (k, of * n),
            false => (of * n, k),
        };
        Some(TensorLocation::Reordered {
            name: whole(stem),
            layout: StackLayout {
                height,
                width,
                first,
                step,
                transposed: joined.transposed,
            },
        })
    }

    /// The name that the tensor `name` of this scheme, which joins maps, has in the scheme `other`; `None` for a tensor
    /// that joins none.
    pub(crate) fn fused_name_in(&self, name: &str, other: &Self) -> Option<String> {
        let (module, suffix) = name.rsplit_once('.')?;
        let (layer, stem) = self.layer_part(module)?;
        let pairs = [
            (self.joined.qkv, other.joined.qkv),
            (self.joined.conv_in, other.joined.conv_in),
            (self.joined.query_gate, other.joined.query_gate),
            (self.joined.linear_qkv, other.joined.linear_qkv),
            (self.joined.linear_in, other.joined.linear_in),
            (
                self.joined.linear_heads.map(|(_, second)| second),
                other.joined.linear_heads.map(|(_, second)| second),
            ),
            (self.joined.gate_up, other.joined.gate_up),
        ];
        let found = pairs.into_iter().find(|(own, _)| *own == Some(stem))?.1?;
        Some(format!(
            "{}.{found}.{suffix}",
            of_expert(other.layer, layer)
        ))
    }

    /// The tensor that a whole name is of; `None` for one that no decoder here has, and for an expert's
    /// own matrix. Of two that no layer has both of, and files call the same, the first.
    pub fn parse(&self, name: &str) -> Option<TensorId> {
        if let Some((layer, part)) = self.layer_part(name)
            && let Some(role) = self.role_in_layer(part).filter(|r| r.is_named_whole())
        {
            return Some(TensorId::in_layer(layer, role));
        }
        let (stem, suffix) = name.rsplit_once('.')?;
        let parts = [TensorPart::Weight, TensorPart::Bias];
        let part = parts.into_iter().find(|part| part.suffix() == suffix)?;
        let mut global = TensorRole::ALL.into_iter().filter(|r| !r.is_in_layer());
        if let Some(role) = global.find(|&role| self.stem(role) == Some(stem)) {
            let layer = None;
            return Some(TensorId { layer, role, part });
        }
        let (layer, stem) = self.layer_part(stem)?;
        let (layer, role) = (Some(layer), self.role_in_layer(stem)?);
        Some(TensorId { layer, role, part })
    }

    /// The layer of a name, and what follows its prefix.
    pub(crate) fn layer_part<'n>(&self, name: &'n str) -> Option<(usize, &'n str)> {
        let (prefix, _) = self.layer.split_once("{}")?;
        let (index, part) = name.strip_prefix(prefix)?.split_once('.')?;
        Some((index.parse().ok()?, part))
    }

    /// [`layer_part`](Self::layer_part) of a name that leaves out what wraps the decoder: checkpoints and
    /// adapters of a model without its output projection begin with `layers.`.
    pub(crate) fn unwrapped_layer_part<'n>(&self, name: &'n str) -> Option<(usize, &'n str)> {
        let (_, bare) = self.layer.split_once('.')?;
        let (prefix, _) = bare.split_once("{}")?;
        let (index, part) = name.strip_prefix(prefix)?.split_once('.')?;
        Some((index.parse().ok()?, part))
    }

    /// What a name is of that [`layer_part`](Self::layer_part) gives.
    pub(crate) fn role_in_layer(&self, part: &str) -> Option<TensorRole> {
        let mut all = TensorRole::ALL.into_iter().filter(|r| r.is_in_layer());
        all.find(|&role| self.stem(role) == Some(part))
    }
}
