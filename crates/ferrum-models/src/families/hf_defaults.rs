//! What configs leave out.

use crate::spec::NormKind;

/// What `transformers` takes for keys that a `config.json` leaves out, and what it calls them.
pub(super) struct HfDefaults {
    /// `num_key_value_heads`; `None`: as many as query heads.
    pub(super) kv_heads: Option<usize>,
    /// `vocab_size`; `None`: it has to be stated.
    pub(super) vocab_size: Option<usize>,
    /// `head_dim`; `None`: `hidden_size / num_attention_heads`.
    pub(super) head_dim: Option<usize>,
    /// `max_position_embeddings`.
    pub(super) max_position: usize,
    /// The key of the norms' epsilon, and its value.
    pub(super) eps: (&'static str, f32),
    /// The key of the feed-forward's function, and its value.
    pub(super) activation: (&'static str, &'static str),
    /// `tie_word_embeddings`.
    pub(super) tied: bool,
    /// Base of rotary frequencies.
    pub(super) theta: f64,
    /// The share of a head that is rotated; `None`: whole heads, whatever the file says.
    pub(super) rotary_share: Option<f64>,
    /// What norms of the residual stream are.
    pub(super) norm: NormKind,
}

impl HfDefaults {
    /// Those of Llama.
    pub(super) const LLAMA: Self = Self {
        kv_heads: None,
        vocab_size: None,
        head_dim: None,
        max_position: 2048,
        eps: ("rms_norm_eps", 1e-6),
        activation: ("hidden_act", "silu"),
        tied: false,
        theta: 10_000.0,
        rotary_share: None,
        norm: NormKind::Rms,
    };
}
