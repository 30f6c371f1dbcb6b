//! The sizes and settings that travel with an op, as structs with names instead of positional numbers.

use std::ops::Range;

/// A row-major matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MatShape {
    /// Rows; for a weight: output features.
    pub rows: usize,
    /// Columns; for a weight: input features.
    pub cols: usize,
}

impl MatShape {
    /// Number of elements, `None` on overflow.
    #[inline]
    pub fn elements(self) -> Option<usize> {
        self.rows.checked_mul(self.cols)
    }
}

/// `out[rows, n] = x[rows, k] · weight[n, k]ᵀ`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GemmShape {
    /// Rows of the input: tokens.
    pub rows: usize,
    /// Output features.
    pub n: usize,
    /// Input features.
    pub k: usize,
}

/// Rows of equal length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowShape {
    /// Number of rows.
    pub rows: usize,
    /// Elements of a row.
    pub dim: usize,
}

/// Rows normalised one by one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NormShape {
    /// Number of rows.
    pub rows: usize,
    /// Elements of a row.
    pub dim: usize,
    /// Added to the mean square (or variance) before the root.
    pub eps: f32,
}

/// Which GELU: exact (`erf`) or the tanh approximation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GeluKind {
    /// `x/2 · (1 + erf(x/√2))`.
    Exact,
    /// `x/2 · (1 + tanh(√(2/π) · (x + 0.044715 x³)))`.
    Tanh,
}

/// A function of one number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// `x`.
    Identity,
    /// GELU of either kind.
    Gelu(GeluKind),
    /// `x · sigmoid(x)`.
    Silu,
    /// `tanh(x)`.
    Tanh,
    /// `1 / (1 + exp(-x))`.
    Sigmoid,
}

/// Vectors of `head_dim` elements, one for each token and head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadsShape {
    /// Tokens.
    pub tokens: usize,
    /// Heads.
    pub heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
}

impl HeadsShape {
    /// Number of elements.
    #[inline]
    pub fn len(self) -> usize {
        self.tokens * self.heads * self.head_dim
    }

    /// Whether there is nothing in it.
    #[inline]
    pub fn is_empty(self) -> bool {
        self.len() == 0
    }
}

/// Which of tokens and heads is outermost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeadLayout {
    /// `[tokens, heads, head_dim]`.
    TokenMajor,
    /// `[heads, tokens, head_dim]`.
    HeadMajor,
}

/// A fused projection: each row is `[q (heads·head_dim) | k (kv_heads·head_dim) | v (kv_heads·value_dim)]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QkvShape {
    /// Tokens.
    pub tokens: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Elements of a query or key head.
    pub head_dim: usize,
    /// Elements of a value head.
    pub value_dim: usize,
}

impl QkvShape {
    /// Elements of the q part of a row.
    #[inline]
    pub fn q_dim(self) -> usize {
        self.heads * self.head_dim
    }

    /// Elements of the k part of a row.
    #[inline]
    pub fn k_dim(self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// Elements of the v part of a row.
    #[inline]
    pub fn v_dim(self) -> usize {
        self.kv_heads * self.value_dim
    }

    /// Elements of a row.
    #[inline]
    pub fn row_dim(self) -> usize {
        self.q_dim() + self.k_dim() + self.v_dim()
    }

    /// The q part as heads.
    #[inline]
    pub fn q(self) -> HeadsShape {
        HeadsShape {
            tokens: self.tokens,
            heads: self.heads,
            head_dim: self.head_dim,
        }
    }

    /// The k part as heads.
    #[inline]
    pub fn k(self) -> HeadsShape {
        HeadsShape {
            tokens: self.tokens,
            heads: self.kv_heads,
            head_dim: self.head_dim,
        }
    }

    /// The v part as heads.
    #[inline]
    pub fn v(self) -> HeadsShape {
        HeadsShape {
            head_dim: self.value_dim,
            ..self.k()
        }
    }
}

/// How the rotated elements of a head pair up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopeStyle {
    /// Element `i` with `i + rot_dim/2` (Hugging Face, NeoX).
    HalfSplit,
    /// Element `2i` with `2i + 1` (the RoPE paper, llama GGUF files).
    Interleaved,
}

/// Where tokens lie in a contiguous head-major cache `[kv_heads, capacity, head_dim]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheSpan {
    /// Tokens that the cache can hold for each head.
    pub capacity: usize,
    /// Index of the first token written.
    pub offset: usize,
}

/// What kind of attention, whatever the batch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttnConfig {
    /// Query heads; a multiple of `kv_heads`.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Elements of a query or key head.
    pub head_dim: usize,
    /// Elements of a value head, and of a head of the result.
    pub value_dim: usize,
    /// Factor on `q·k` (usually `1/√head_dim`).
    pub scale: f32,
    /// Whether a query sees only keys at its own index and before.
    pub causal: bool,
    /// A query at index `i` sees keys `j` with `|i - j| < window`, so the window reaches both ways where
    /// attention is not causal (an encoder that counts the keys on each side has one more here); `None`:
    /// all.
    pub sliding_window: Option<usize>,
    /// Whether windows lie side by side instead: a query at index `i` sees keys of its own window alone, which begins at
    /// the last multiple of their length up to `i`.
    pub chunked: bool,
    /// `cap · tanh(score / cap)` on the scaled score, before masking.
    pub softcap: Option<f32>,
}

impl AttnConfig {
    /// The keys that the query at key index `at` sees, of `kv_len` keys.
    #[inline(always)]
    pub fn visible(&self, at: usize, kv_len: usize) -> Range<usize> {
        let after = at.saturating_add(1);
        let (start, end) = match self.sliding_window {
            None => (0, kv_len),
            Some(window) if self.chunked => {
                // A window of no keys is none.
                let start = at.checked_rem(window).map_or(after, |into| at - into);
                (start, start.saturating_add(window))
            }
            Some(window) => (after.saturating_sub(window), at.saturating_add(window)),
        };
        let end = if self.causal { after } else { end };
        let end = end.min(kv_len);
        start.min(end)..end
    }
}

/// Sizes of one contiguous attention call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlashShape {
    /// Query tokens.
    pub q_len: usize,
    /// Keys to look at.
    pub kv_len: usize,
    /// Tokens from one kv head to the next in `k` and `v` (the cache's capacity).
    pub kv_seq_stride: usize,
    /// Key index of the first query token.
    pub pos_offset: usize,
}

/// Sizes of multi-head latent attention in its absorbed form (DeepSeek-V2, section 2.1).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MlaShape {
    /// Query tokens.
    pub q_len: usize,
    /// Latent rows in the cache.
    pub kv_len: usize,
    /// Query heads.
    pub heads: usize,
    /// Elements of the compressed part (`kv_lora_rank`); also of the output.
    pub rank: usize,
    /// Elements of the shared rotated part.
    pub rope_dim: usize,
    /// Key index of the first query token.
    pub pos_offset: usize,
    /// Factor on `q·k`.
    pub scale: f32,
    /// Whether a query sees only keys at its own index and before.
    pub causal: bool,
}

impl MlaShape {
    /// Elements of a query, and of a key.
    #[inline]
    pub fn key_dim(&self) -> usize {
        self.rank + self.rope_dim
    }

    /// The same attention as one with heads, all of which share one kv head.
    #[inline]
    pub fn config(&self) -> AttnConfig {
        AttnConfig {
            heads: self.heads,
            kv_heads: 1,
            head_dim: self.key_dim(),
            value_dim: self.rank,
            scale: self.scale,
            causal: self.causal,
            sliding_window: None,
            chunked: false,
            softcap: None,
        }
    }
}

/// Shape of a copy of columns of rows to columns of other rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyColumnsShape {
    /// Rows.
    pub rows: usize,
    /// Columns that are copied.
    pub len: usize,
    /// The first of them in a row of the source.
    pub src_first: usize,
    /// Elements of a row of the source.
    pub src_width: usize,
    /// The first of them in a row of the destination.
    pub dst_first: usize,
    /// Elements of a row of the destination.
    pub dst_width: usize,
}

/// One-dimensional convolution over time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Conv1dShape {
    /// Input channels.
    pub c_in: usize,
    /// Output channels.
    pub c_out: usize,
    /// Input length.
    pub len: usize,
    /// Taps.
    pub kernel: usize,
    /// Steps between outputs.
    pub stride: usize,
    /// Zeros on each side.
    pub padding: usize,
    /// Channel groups; divides `c_in` and `c_out`.
    pub groups: usize,
}

impl Conv1dShape {
    /// Output length.
    #[inline]
    pub fn out_len(self) -> usize {
        (self.len + 2 * self.padding + 1)
            .saturating_sub(self.kernel)
            .div_ceil(self.stride)
    }
}

/// An image cut into square patches, each projected to a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PatchShape {
    /// Image channels.
    pub channels: usize,
    /// Image height; a multiple of `patch`.
    pub height: usize,
    /// Image width; a multiple of `patch`.
    pub width: usize,
    /// Side of a patch, also the stride.
    pub patch: usize,
    /// Elements of an output row.
    pub out: usize,
}

/// A stack of equal matrices, one for each expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertShape {
    /// Experts.
    pub experts: usize,
    /// Output features of one expert.
    pub n: usize,
    /// Input features of one expert.
    pub k: usize,
}

/// How the logit of an expert becomes its score.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpertScore {
    /// Its probability among all experts.
    Softmax,
    /// `1 / (1 + e^-logit)`, of each expert by itself.
    Sigmoid,
}

/// What the score of a group of experts is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GroupScore {
    /// Its best expert.
    Best,
    /// The sum of its best two.
    BestTwo,
}

/// Group-limited routing: a token selects the top groups, then experts within them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertGroups {
    /// Number of groups, all of one size: at most [`MAX`](Self::MAX).
    pub groups: usize,
    /// Groups that a token selects.
    pub top: usize,
    /// How groups are ranked.
    pub score: GroupScore,
}

impl ExpertGroups {
    /// The most groups that there may be.
    pub const MAX: usize = 64;
}

/// Activation that combines a pair's products with the gate and up matrices of its expert.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ExpertActivation {
    /// `silu(gate) · up`.
    Silu,
    /// `gelu(gate) · up`, in the tanh form (Gemma 4).
    GeluTanh,
    /// `g · sigmoid(alpha · g) · (u + 1)` with `g = min(gate, limit)` and `u` as `up` within `±limit` (GPT-OSS).
    ClampedSwiglu {
        /// Factor inside the sigmoid.
        alpha: f32,
        /// Bound.
        limit: f32,
    },
}

/// How tokens choose experts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RouteShape {
    /// Tokens.
    pub tokens: usize,
    /// Experts.
    pub experts: usize,
    /// Experts chosen for each token.
    pub top_k: usize,
    /// How logits become scores.
    pub score: ExpertScore,
    /// Groups of experts, where a token takes experts of the best groups alone.
    pub groups: Option<ExpertGroups>,
    /// Whether the chosen weights are divided by their sum.
    pub renormalize: bool,
    /// Factor on the weights, after renormalising.
    pub scale: f32,
}

impl RouteShape {
    /// A choice of all experts by their probabilities, which are the weights.
    #[inline]
    pub const fn softmax(tokens: usize, experts: usize, top_k: usize) -> Self {
        Self {
            tokens,
            experts,
            top_k,
            score: ExpertScore::Softmax,
            groups: None,
            renormalize: false,
            scale: 1.0,
        }
    }

    /// Whether ranking by logits equals ranking by scores: there is no bias and no group sum. Scores of different logits
    /// may round to equal ones.
    #[inline]
    pub fn ranks_logits(&self, has_bias: bool) -> bool {
        !has_bias && self.groups.is_none_or(|g| g.score == GroupScore::Best)
    }

    /// Number of pairs.
    #[inline]
    pub fn pairs(&self) -> usize {
        self.tokens * self.top_k
    }
}

/// What the rows of an expert matrix's input are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpertInput {
    /// `[tokens, k]`: all pairs of a token read its row.
    PerToken,
    /// `[pairs, k]`: each pair has its own row.
    PerPair,
}

/// Sizes of a per-expert matrix product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MoeShape {
    /// Tokens.
    pub tokens: usize,
    /// Experts chosen for each token.
    pub top_k: usize,
    /// Experts and the size of their matrices.
    pub experts: ExpertShape,
}

impl MoeShape {
    /// Number of pairs.
    #[inline]
    pub fn pairs(&self) -> usize {
        self.tokens * self.top_k
    }
}

/// Sizes of a step that the host knows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BatchShape {
    /// Tokens in the step.
    pub tokens: usize,
    /// Sequences in the step; some may have no token.
    pub seqs: usize,
    /// Row length of the block tables.
    pub table_stride: usize,
    /// Most query tokens of a sequence.
    pub max_query_len: usize,
    /// At least the longest `kv_len` (rounded up where a graph is to serve several lengths).
    pub max_kv_len: usize,
}

/// The states of one layer, `[slots, elements]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateShape {
    /// Rows.
    pub slots: usize,
    /// Elements of a row.
    pub elements: usize,
}

/// A causal convolution of each channel by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CausalConvShape {
    /// Channels.
    pub channels: usize,
    /// Taps, the current input's included: at least 1.
    pub kernel: usize,
    /// The states.
    pub states: StateShape,
    /// First element of the convolution's part of a state.
    pub offset: usize,
}

impl CausalConvShape {
    /// Elements of its part of a state: the inputs before the next one, `[kernel - 1, channels]`, oldest first.
    #[inline]
    pub fn state_len(self) -> usize {
        self.kernel.saturating_sub(1) * self.channels
    }
}

/// How linear attention changes its state, and how its inputs are laid out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinearAttentionRule {
    /// The gated delta rule (Yang et al., 2024, "Gated Delta Networks"): `S ← S + k ⊗ sigmoid(β)·(v − Sᵀ k)` after the
    /// state `S` has decayed. Rows are `[queries | keys | values]`, gates `[β | step]`. Queries and keys are scaled to
    /// length 1, queries then by `1 / √key_dim`.
    GatedDelta,
    /// The state space of Mamba-2 (Dao and Gu, 2024, "Transformers are SSMs"): `S ← S + k ⊗ Δ·v` after the state has
    /// decayed. Rows are `[values | keys | queries]` (`x`, `B` and `C` there), gates `[step]`.
    StateSpace,
}

/// Which key head a value head reads. Equally many read each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeadOrder {
    /// The value heads of a key head follow each other.
    Grouped,
    /// They are a number of key heads apart: value head `h` reads key head `h % key_heads`, as in GGUF files.
    Interleaved,
}

/// Linear attention over states that decay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinearAttentionShape {
    /// The rule.
    pub rule: LinearAttentionRule,
    /// Heads of queries and of keys.
    pub key_heads: usize,
    /// Heads of values: a multiple of `key_heads`.
    pub value_heads: usize,
    /// Which of the first a value head reads.
    pub order: HeadOrder,
    /// Elements of a query's or key's head.
    pub key_dim: usize,
    /// Elements of a value's head.
    pub value_dim: usize,
    /// The states.
    pub states: StateShape,
    /// First element of its part of a state.
    pub offset: usize,
}

impl LinearAttentionShape {
    /// Elements of a token's queries, and as many of its keys.
    #[inline]
    pub fn key_width(self) -> usize {
        self.key_heads * self.key_dim
    }

    /// Elements of a token's values, and of its output.
    #[inline]
    pub fn value_width(self) -> usize {
        self.value_heads * self.value_dim
    }

    /// Elements of a row of inputs.
    #[inline]
    pub fn row_dim(self) -> usize {
        2 * self.key_width() + self.value_width()
    }

    /// Elements of a row of gates.
    #[inline]
    pub fn gate_dim(self) -> usize {
        match self.rule {
            LinearAttentionRule::GatedDelta => 2 * self.value_heads,
            LinearAttentionRule::StateSpace => self.value_heads,
        }
    }

    /// Elements of its part of a state, `[value_heads, key_dim, value_dim]`.
    #[inline]
    pub fn state_len(self) -> usize {
        self.value_width() * self.key_dim
    }

    /// First elements of the query, the key and the value of a value head in a row.
    #[inline]
    pub fn qkv_offsets(self, head: usize) -> [usize; 3] {
        let key_head = match self.order {
            HeadOrder::Grouped => head / (self.value_heads / self.key_heads),
            HeadOrder::Interleaved => head % self.key_heads,
        };
        let of_key = key_head * self.key_dim;
        let (keys, value) = (self.key_width(), head * self.value_dim);
        match self.rule {
            LinearAttentionRule::GatedDelta => [of_key, keys + of_key, 2 * keys + value],
            LinearAttentionRule::StateSpace => {
                let values = self.value_width();
                [values + keys + of_key, values + of_key, value]
            }
        }
    }
}

/// Memory that weights and KV can use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceMemory {
    /// Free bytes, reclaimable caches included.
    pub free: u64,
    /// All bytes, used ones included.
    pub total: u64,
}
