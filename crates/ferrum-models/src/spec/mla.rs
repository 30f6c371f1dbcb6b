//! Multi-head latent attention.

use super::RopeSpec;

/// Multi-head latent attention (DeepSeek-AI, 2024, "DeepSeek-V2"): a token has one compressed row for all heads, from
/// which each head's keys and values are linear maps, and one rotated part of keys that heads share.
///
/// The maps are absorbed: queries go through a head's map of keys, and sums of compressed rows through its map of values.
/// So nothing is ever expanded, and what is kept of a token is that row alone.
#[derive(Clone, Debug, PartialEq)]
pub struct MlaSpec {
    /// Query heads.
    pub heads: usize,
    /// Elements that queries are compressed to before heads are made of them, if they are.
    pub q_rank: Option<usize>,
    /// Elements of a compressed row.
    pub rank: usize,
    /// Elements of a head's queries and keys that are not rotated.
    pub nope_dim: usize,
    /// Rotated elements.
    pub rope_dim: usize,
    /// Elements of a value head.
    pub value_dim: usize,
    /// Factor on `q·k`.
    pub scale: f32,
    /// The rotation, of [`DecoderSpec::ropes`](super::DecoderSpec::ropes).
    pub rope: usize,
    /// Epsilon of the norms of compressed queries and rows.
    pub norm_eps: f32,
    /// Whether the maps from and to the residual stream have biases, but for that of queries which are not compressed.
    pub bias: bool,
}

impl MlaSpec {
    /// Elements of a query head.
    pub(crate) fn query_dim(&self) -> usize {
        self.nope_dim + self.rope_dim
    }

    /// Elements of what is kept of a token.
    pub(crate) fn latent_dim(&self) -> usize {
        self.rank + self.rope_dim
    }

    pub(super) fn validate(&self, ropes: &[RopeSpec]) -> Result<(), String> {
        let in_range = |dim: usize| (1..=1 << 14).contains(&dim);
        let dims = [self.rank, self.nope_dim, self.rope_dim, self.value_dim];
        if !(1..=1 << 15).contains(&self.heads)
            || !dims.into_iter().all(in_range)
            || !self.q_rank.is_none_or(|rank| (1..=1 << 20).contains(&rank))
        {
            return Err(format!(
                "{} heads of {} + {} elements over rows of {} with values of {} are out of range",
                self.heads, self.nope_dim, self.rope_dim, self.rank, self.value_dim
            ));
        }
        let rotated = ropes.get(self.rope).map(|rope| rope.rot_dim);
        if rotated != Some(self.rope_dim) || !self.rope_dim.is_multiple_of(2) {
            return Err(format!(
                "{} rotated elements: expected an even number, as its rotary embedding has",
                self.rope_dim
            ));
        }
        if !(self.scale.is_finite() && self.scale > 0.0) {
            return Err("the factor of scores: expected a positive number".into());
        }
        if !(self.norm_eps.is_finite() && self.norm_eps >= 0.0) {
            return Err("norm epsilon: expected a finite number of at least 0".into());
        }
        Ok(())
    }
}
