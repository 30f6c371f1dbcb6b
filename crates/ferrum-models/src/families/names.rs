//! The naming schemes of the families' checkpoints and of GGUF files.

use crate::inventory::{ExpertNames, WeightNames};

/// Hugging Face names of Llama and those who followed it.
pub(crate) static HF_NAMES: WeightNames = HF;

const HF: WeightNames = WeightNames {
    embedding: "model.embed_tokens",
    // Follow from the config.
    rope_divisors: None,
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
    conv_in: "conv.in_proj",
    conv: "conv.conv",
    conv_out: "conv.out_proj",
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
pub(crate) static GGUF_NAMES: WeightNames = WeightNames {
    embedding: "token_embd",
    rope_divisors: Some("rope_freqs"),
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
    conv_in: "shortconv.in_proj",
    conv: "shortconv.conv",
    conv_out: "shortconv.out_proj",
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_one_kind_of_file_become_those_of_the_other() {
        let cases = [
            ("model.embed_tokens.weight", Some("token_embd.weight")),
            ("lm_head.weight", Some("output.weight")),
            (
                "model.layers.17.self_attn.q_proj.bias",
                Some("blk.17.attn_q.bias"),
            ),
            (
                "model.layers.0.mlp.down_proj.weight",
                Some("blk.0.ffn_down.weight"),
            ),
            (
                "model.layers.0.mlp.gate.weight",
                Some("blk.0.ffn_gate_inp.weight"),
            ),
            ("model.layers.0.mlp.experts.3.up_proj.weight", None),
            ("model.layers.0.self_attn.rotary_emb.inv_freq", None),
            ("model.layers.x.mlp.down_proj.weight", None),
            ("vision.layers.0.mlp.down_proj.weight", None),
            ("weight", None),
        ];
        for (name, expected) in cases {
            let found = HF_NAMES.parse(name).and_then(|id| GGUF_NAMES.name(id));
            assert_eq!(found.as_deref(), expected, "{name}");
        }
    }
}
