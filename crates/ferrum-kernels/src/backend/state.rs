//! Recurrent states: what layers keep of a sequence whatever its length (delta networks, Mamba, short convolutions).
//!
//! A layer has a row of f32 for each slot, and the batch says in which slot each sequence is
//! ([`DeviceBatch::state_slots`]). A step reads the state that the step before it left and writes its own. How a state
//! is used is the op's; that it can be copied is all that others know.

use super::*;
use ferrum_types::Result;

/// What linear attention reads, laid out as its [rule](LinearAttentionRule) says.
pub struct LinearAttention<'a, B: Backend> {
    /// Queries, keys and values: `[tokens, row_dim]`.
    pub x: &'a Act<B>,
    /// `[tokens, gate_dim]`.
    pub gates: &'a Act<B>,
    /// `[3, value_heads]`: the decay of a state (negative: `−exp(A_log)` of checkpoints), the bias of its step, and
    /// what of the value is added to the output.
    pub params: &'a B::Buffer<f32>,
}

/// Ops on recurrent states. The provided bodies go through host memory, so a step with them waits for the device and is
/// not captured; a backend overrides them for speed.
pub trait BackendState: Backend {
    /// Whether these ops are recorded as all others are, none of them going through the host. Where steps are
    /// [captured](BackendGraph::captures), those with states are so too then.
    fn records_states(&self) -> bool {
        false
    }

    /// Copies rows of states `(from, to)`, in order.
    ///
    /// Provided: through a row of its own.
    ///
    /// # Errors
    /// `InvalidArgument` for a row that is not there; then nothing is copied.
    fn copy_states(
        ctx: &mut Self::Context,
        states: &mut Self::Buffer<f32>,
        pairs: &[(usize, usize)],
        shape: StateShape,
    ) -> Result<()> {
        compose::copy_states::<Self>(ctx, states, pairs, shape)
    }

    /// The short convolution of linear attention and state-space layers: for token `t` of a sequence and channel `c`,
    /// `out[t, c] = bias[c] + Σ_i weight[c, i] · u[t - (kernel - 1) + i, c]`, where `u` are the sequence's inputs, and
    /// those before the first token of this step come from its state. Then the state holds the last `kernel - 1`
    /// inputs; that of a sequence without tokens stays.
    ///
    /// `x`, `out`: `[tokens, channels]`; `weight`: `[channels, kernel]`; `bias`: `[channels]`; `states`: as the shape says.
    /// No two sequences with tokens are in one slot, but for those whose rows and state are not read.
    fn causal_conv1d(
        ctx: &mut Self::Context,
        x: &Act<Self>,
        weight: (&Self::Buffer<f32>, Option<&Self::Buffer<f32>>),
        states: &mut Self::Buffer<f32>,
        batch: &DeviceBatch<Self>,
        out: &mut Act<Self>,
        shape: CausalConvShape,
    ) -> Result<()> {
        compose::causal_conv1d::<Self>(ctx, x, weight, states, batch, out, shape)
    }

    /// Linear attention with one state `S`, `[key_dim, value_dim]`, for each value head of a sequence. For each token
    /// in turn, with its query `q`, key `k` and value `v`, `Δ = ln(1 + exp(step + bias))` and `a = exp(decay · Δ)`:
    ///
    /// - gated delta rule: `S ← a·S + k ⊗ sigmoid(β)·(v − (a·S)ᵀ k)`, with `q` and `k` scaled as the
    ///   [rule](LinearAttentionRule) says;
    /// - state space: `S ← a·S + k ⊗ Δ·v`;
    ///
    /// and then `out = Sᵀ q + skip·v`. A token's result depends on those before it alone, not on chunks. The state of a
    /// sequence without tokens stays.
    ///
    /// `states`: as the shape says; `out`: `[tokens, value_heads · value_dim]`. No two sequences with tokens are in one
    /// slot, but for those whose rows and state are not read.
    fn linear_attention(
        ctx: &mut Self::Context,
        inputs: LinearAttention<'_, Self>,
        states: &mut Self::Buffer<f32>,
        batch: &DeviceBatch<Self>,
        out: &mut Act<Self>,
        shape: LinearAttentionShape,
    ) -> Result<()> {
        super::linear_attention::linear_attention::<Self>(ctx, inputs, states, batch, out, shape)
    }
}
