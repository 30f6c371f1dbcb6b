//! Linear attention with a short convolution before it.

use ferrum_kernels::{HeadOrder, LinearAttentionRule, LinearAttentionShape, StateShape};

/// Linear attention over a state that decays, as [`BackendState::linear_attention`] computes it.
///
/// The layer's input is projected to queries, keys, values, an output gate `z` and the gates of the state. Queries, keys
/// and values go through a causal convolution of each channel by itself and SiLU. What the state gives is normed and
/// multiplied with `silu(z)`: normed first by heads with the gated delta rule (Qwen3-Next), multiplied first and normed by
/// groups of heads with a state space (Mamba-2).
///
/// [`BackendState::linear_attention`]: ferrum_kernels::BackendState::linear_attention
#[derive(Clone, Debug, PartialEq)]
pub struct LinearAttentionSpec {
    /// How the state changes.
    pub rule: LinearAttentionRule,
    /// Heads of queries and of keys.
    pub key_heads: usize,
    /// Heads of values: a multiple of `key_heads`.
    pub value_heads: usize,
    /// Which key head a value head reads.
    pub order: HeadOrder,
    /// Elements of a query's or key's head.
    pub key_dim: usize,
    /// Elements of a value's head.
    pub value_dim: usize,
    /// Tokens that a sum of the convolution reaches over, its own included.
    pub kernel: usize,
    /// Whether the convolution has a bias.
    pub conv_bias: bool,
    /// Whether the projections have biases.
    pub bias: bool,
}

impl LinearAttentionSpec {
    /// Its shape over states of so many slots: the convolution's part comes first.
    pub(crate) fn shape(&self, slots: usize) -> LinearAttentionShape {
        let mut shape = LinearAttentionShape {
            rule: self.rule,
            key_heads: self.key_heads,
            value_heads: self.value_heads,
            order: self.order,
            key_dim: self.key_dim,
            value_dim: self.value_dim,
            states: StateShape { slots, elements: 0 },
            offset: 0,
        };
        shape.offset = self.conv_state();
        shape.states.elements = shape.offset + shape.state_len();
        shape
    }

    /// Of `total` numbers that value heads have in turns of key heads, equally many each: where number `at` is when those
    /// of a key head are together.
    pub(crate) fn grouped_place(&self, at: usize, total: usize) -> usize {
        let (keys, heads) = (self.key_heads, self.value_heads);
        let unit = (total / heads).max(1);
        let (head, rest) = (at / unit, at % unit);
        let from = head % keys * (heads / keys) + head / keys;
        from * unit + rest
    }

    /// Elements of a token's queries, keys and values.
    pub(crate) fn row_dim(&self) -> usize {
        self.shape(0).row_dim()
    }

    /// Elements of a token's values, of its output gate and of its output.
    pub(crate) fn values(&self) -> usize {
        self.value_heads * self.value_dim
    }

    /// Elements of all that the input is projected to.
    pub(crate) fn projected(&self) -> usize {
        self.row_dim() + self.values() + self.shape(0).gate_dim()
    }

    /// Elements of the convolution's last inputs.
    pub(crate) fn conv_state(&self) -> usize {
        let shape = 2 * self.key_heads * self.key_dim + self.values();
        self.kernel.saturating_sub(1) * shape
    }

    /// Rows of a token that are normed by themselves.
    pub(crate) fn norm_rows(&self) -> usize {
        match self.rule {
            LinearAttentionRule::GatedDelta => self.value_heads,
            LinearAttentionRule::StateSpace => self.key_heads,
        }
    }

    /// Elements of the norm's weight: with the gated delta rule it is the same for all heads.
    pub(crate) fn norm_dim(&self) -> usize {
        match self.rule {
            LinearAttentionRule::GatedDelta => self.value_dim,
            LinearAttentionRule::StateSpace => self.values(),
        }
    }

    pub(super) fn validate(&self) -> Result<(), String> {
        let (keys, values) = (self.key_heads, self.value_heads);
        if keys == 0 || values == 0 || !values.is_multiple_of(keys) {
            return Err(format!(
                "{values} value heads of linear attention over {keys} key heads: the first must be a multiple of the \
                 second"
            ));
        }
        let in_range = |dim: usize| (1..=1 << 12).contains(&dim);
        if values > 1 << 12 || !in_range(self.key_dim) || !in_range(self.value_dim) {
            return Err(format!(
                "{values} heads of linear attention with keys of {} and values of {} elements are out of range",
                self.key_dim, self.value_dim
            ));
        }
        if !(1..=1 << 8).contains(&self.kernel) {
            return Err(format!(
                "a convolution over {} tokens: expected 1 to 256",
                self.kernel
            ));
        }
        Ok(())
    }
}
