//! What checkpoints call their weights.

/// Names of a decoder's tensors in one kind of file. Names lack their `.weight` or `.bias`.
#[derive(Debug)]
pub struct WeightNames {
    /// Token embedding.
    pub embedding: &'static str,
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
    /// Attention's output projection.
    pub attn_out: &'static str,
    /// Norm before the feed-forward.
    pub ffn_norm: &'static str,
    /// Gate projection.
    pub gate: &'static str,
    /// Up projection.
    pub up: &'static str,
    /// Down projection.
    pub down: &'static str,
    /// Router of experts.
    pub router: &'static str,
    /// The experts.
    pub experts: ExpertNames,
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
    /// Stacks `(gate above up, down)`, whole names, that some files have instead.
    pub joined: Option<(&'static str, &'static str)>,
}

impl WeightNames {
    /// The full name of `part` in layer `index`.
    pub fn in_layer(&self, index: usize, part: &str) -> String {
        format!("{}.{part}", self.layer.replace("{}", &index.to_string()))
    }
}

/// Hugging Face names of Llama and those who followed it.
pub(super) static HF_NAMES: WeightNames = HF;

const HF: WeightNames = WeightNames {
    embedding: "model.embed_tokens",
    final_norm: "model.norm",
    lm_head: "lm_head",
    layer: "model.layers.{}",
    attn_norm: "input_layernorm",
    q: "self_attn.q_proj",
    k: "self_attn.k_proj",
    v: "self_attn.v_proj",
    q_norm: "self_attn.q_norm",
    k_norm: "self_attn.k_norm",
    attn_out: "self_attn.o_proj",
    ffn_norm: "post_attention_layernorm",
    gate: "mlp.gate_proj",
    up: "mlp.up_proj",
    down: "mlp.down_proj",
    router: "mlp.gate",
    experts: ExpertNames {
        gate: "mlp.experts.{}.gate_proj",
        up: "mlp.experts.{}.up_proj",
        down: "mlp.experts.{}.down_proj",
        joined: Some(("mlp.experts.gate_up_proj", "mlp.experts.down_proj")),
    },
};

/// Hugging Face names of Mixtral.
pub(super) static MIXTRAL_NAMES: WeightNames = WeightNames {
    router: "block_sparse_moe.gate",
    experts: ExpertNames {
        gate: "block_sparse_moe.experts.{}.w1",
        up: "block_sparse_moe.experts.{}.w3",
        down: "block_sparse_moe.experts.{}.w2",
        joined: None,
    },
    ..HF
};

/// Names in GGUF files.
pub(super) static GGUF_NAMES: WeightNames = WeightNames {
    embedding: "token_embd",
    final_norm: "output_norm",
    lm_head: "output",
    layer: "blk.{}",
    attn_norm: "attn_norm",
    q: "attn_q",
    k: "attn_k",
    v: "attn_v",
    q_norm: "attn_q_norm",
    k_norm: "attn_k_norm",
    attn_out: "attn_output",
    ffn_norm: "ffn_norm",
    gate: "ffn_gate",
    up: "ffn_up",
    down: "ffn_down",
    router: "ffn_gate_inp",
    experts: ExpertNames {
        gate: "ffn_gate_exps",
        up: "ffn_up_exps",
        down: "ffn_down_exps",
        joined: None,
    },
};
