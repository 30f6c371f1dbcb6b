//! What the tensors of encoders are called: in `transformers`, in checkpoints as their authors published them, and in GGUF files.

use super::config::{PartNames, UpNames};
use crate::named::Bias;

const TABLES: [&str; 3] = [
    "embeddings.word_embeddings",
    "embeddings.position_embeddings",
    "embeddings.token_type_embeddings",
];

/// BERT and RoBERTa.
pub(super) static BERT: PartNames = PartNames {
    tables: TABLES,
    norm: "embeddings.LayerNorm",
    layer: "encoder.layer.",
    qkv: &[
        "attention.self.query",
        "attention.self.key",
        "attention.self.value",
    ],
    out: "attention.output.dense",
    up: UpNames::Plain("intermediate.dense"),
    down: "output.dense",
    norms: ["attention.output.LayerNorm", "output.LayerNorm"],
    final_norm: None,
    bias: Bias::Each,
};

/// DistilBERT.
pub(super) static DISTILBERT: PartNames = PartNames {
    tables: TABLES,
    norm: "embeddings.LayerNorm",
    layer: "transformer.layer.",
    qkv: &["attention.q_lin", "attention.k_lin", "attention.v_lin"],
    out: "attention.out_lin",
    up: UpNames::Plain("ffn.lin1"),
    down: "ffn.lin2",
    norms: ["sa_layer_norm", "output_layer_norm"],
    final_norm: None,
    bias: Bias::Each,
};

/// Nomic's and GTE, as `transformers` has them.
pub(super) static ROTARY: PartNames = PartNames {
    tables: TABLES,
    norm: "embeddings.LayerNorm",
    layer: "layers.",
    qkv: &["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    out: "self_attn.o_proj",
    up: UpNames::Gated("mlp.gate_proj", "mlp.up_proj"),
    down: "mlp.down_proj",
    norms: ["post_attention_layernorm", "post_mlp_layernorm"],
    final_norm: None,
    bias: Bias::Some,
};

/// Nomic's, as published.
pub(super) static NOMIC_BERT_PUBLISHED: PartNames = PartNames {
    tables: TABLES,
    norm: "emb_ln",
    layer: "encoder.layers.",
    qkv: &["attn.Wqkv"],
    out: "attn.out_proj",
    up: UpNames::Gated("mlp.fc12", "mlp.fc11"),
    down: "mlp.fc2",
    norms: ["norm1", "norm2"],
    final_norm: None,
    bias: Bias::Some,
};

/// GTE, as published.
pub(super) static GTE_PUBLISHED: PartNames = PartNames {
    tables: TABLES,
    norm: "embeddings.LayerNorm",
    layer: "encoder.layer.",
    qkv: &["attention.qkv_proj"],
    out: "attention.o_proj",
    up: UpNames::UpGate("mlp.up_gate_proj"),
    down: "mlp.down_proj",
    norms: ["attn_ln", "mlp_ln"],
    final_norm: None,
    bias: Bias::Some,
};

/// ModernBERT.
pub(super) static MODERN_BERT: PartNames = PartNames {
    tables: ["embeddings.tok_embeddings", "", ""],
    norm: "embeddings.norm",
    layer: "layers.",
    qkv: &["attn.Wqkv"],
    out: "attn.Wo",
    up: UpNames::GateUp("mlp.Wi"),
    down: "mlp.Wo",
    norms: ["attn_norm", "mlp_norm"],
    final_norm: Some("final_norm"),
    bias: Bias::Some,
};

/// BERT and RoBERTa in GGUF files.
pub(super) static GGUF_BERT: PartNames = PartNames {
    tables: ["token_embd", "position_embd", "token_types"],
    norm: "token_embd_norm",
    layer: "blk.",
    qkv: &["attn_q", "attn_k", "attn_v"],
    out: "attn_output",
    up: UpNames::Plain("ffn_up"),
    down: "ffn_down",
    norms: ["attn_output_norm", "layer_output_norm"],
    final_norm: None,
    bias: Bias::Each,
};

/// Nomic's in GGUF files.
pub(super) static GGUF_NOMIC_BERT: PartNames = PartNames {
    tables: ["token_embd", "position_embd", "token_types"],
    norm: "token_embd_norm",
    layer: "blk.",
    qkv: &["attn_qkv"],
    out: "attn_output",
    up: UpNames::Gated("ffn_gate", "ffn_up"),
    down: "ffn_down",
    norms: ["attn_output_norm", "layer_output_norm"],
    final_norm: None,
    bias: Bias::Some,
};
