//! Recurrent states: what layers keep of a sequence whatever its length (delta networks, Mamba, short convolutions).
//!
//! A layer has a row of f32 for each slot, and the batch says in which slot each sequence is
//! ([`DeviceBatch::state_slots`]). A step reads the state that the step before it left and writes its own. How a state
//! is used is the op's; that it can be copied is all that others know.

use super::*;
use ferrum_types::Result;

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
    /// No two sequences with tokens are in one slot, but for those whose rows and state nobody looks at.
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
}
