//! The naming schemes of the families' checkpoints and of GGUF files.

use crate::inventory::{
    ExpertNames, ExpertNormNames, FusedExperts, FusedNames, LinearAttentionNames, MlaNames,
    PerLayerNames, SharedNames, WeightNames,
};

/// Hugging Face names of Llama and those who followed it.
pub(crate) static HF_NAMES: WeightNames = HF;

const PER_LAYER: PerLayerNames = PerLayerNames {
    table: "model.embed_tokens_per_layer",
    projection: "model.per_layer_model_projection",
    projection_norm: "model.per_layer_projection_norm",
    gate: "per_layer_input_gate",
    out: "per_layer_projection",
    norm: "post_per_layer_input_norm",
};

const HF: WeightNames = WeightNames {
    embedding: "model.embed_tokens",
    // Follow from the config.
    rope_factors: None,
    rope_long_short: None,
    positions: None,
    per_layer: PER_LAYER,
    final_norm: "model.norm",
    lm_head: "lm_head",
    layer: "model.layers.{}",
    attn_norm: "input_layernorm",
    q: "self_attn.q_proj",
    k: "self_attn.k_proj",
    v: "self_attn.v_proj",
    q_norm: "self_attn.q_norm",
    k_norm: "self_attn.k_norm",
    sinks: "self_attn.sinks",
    mla: MlaNames {
        q_down: "self_attn.q_a_proj",
        q_down_norm: "self_attn.q_a_layernorm",
        q_up: "self_attn.q_b_proj",
        latent_down: "self_attn.kv_a_proj_with_mqa",
        latent_norm: "self_attn.kv_a_layernorm",
        up: "self_attn.kv_b_proj",
        absorbed: None,
    },
    linear: LinearAttentionNames {
        gate: "linear_attn.in_proj_z",
        beta: "linear_attn.in_proj_b",
        step: "linear_attn.in_proj_a",
        conv: "linear_attn.conv1d",
        decay: "linear_attn.A_log",
        log_decay: true,
        step_bias: "linear_attn.dt_bias",
        skip: "linear_attn.D",
        norm: "linear_attn.norm",
        out: "linear_attn.out_proj",
    },
    attn_out: "self_attn.o_proj",
    post_attn_norm: None,
    conv: "conv.conv",
    conv_out: "conv.out_proj",
    ffn_norm: "post_attention_layernorm",
    gate: "mlp.gate_proj",
    up: "mlp.up_proj",
    down: "mlp.down_proj",
    parallel_norms: None,
    post_ffn_norm: None,
    output_scale: "layer_scalar",
    router: "mlp.gate",
    experts: ExpertNames {
        gate: "mlp.experts.{}.gate_proj",
        up: "mlp.experts.{}.up_proj",
        down: "mlp.experts.{}.down_proj",
        joined: Some(FusedExperts {
            gate_up: "mlp.experts.gate_up_proj",
            down: "mlp.experts.down_proj",
            transposed: false,
            interleaved: false,
        }),
        correction: "mlp.gate.e_score_correction_bias",
        shared: SharedNames {
            gate: "mlp.shared_experts.gate_proj",
            up: "mlp.shared_experts.up_proj",
            down: "mlp.shared_experts.down_proj",
            router: "mlp.shared_expert_gate",
        },
        norms: None,
    },
    joined: FusedNames {
        conv_in: Some("conv.in_proj"),
        ..FusedNames::NONE
    },
    norm_offset: 0.0,
    transposed: false,
};

/// Hugging Face names of Llama and those who followed it in checkpoints of the layers alone, as models for embeddings are
/// saved (`AutoModel` of `transformers`).
pub(crate) static HF_BASE_NAMES: WeightNames = WeightNames {
    embedding: "embed_tokens",
    final_norm: "norm",
    layer: "layers.{}",
    ..HF
};

/// Hugging Face names of Mixtral.
pub(super) static MIXTRAL_NAMES: WeightNames = WeightNames {
    router: "block_sparse_moe.gate",
    experts: ExpertNames {
        gate: "block_sparse_moe.experts.{}.w1",
        up: "block_sparse_moe.experts.{}.w3",
        down: "block_sparse_moe.experts.{}.w2",
        joined: None,
        ..HF.experts
    },
    ..HF
};

/// Hugging Face names of Granite with experts.
pub(super) static GRANITE_MOE_NAMES: WeightNames = GRANITE_MOE;

const GRANITE_MOE: WeightNames = WeightNames {
    router: "block_sparse_moe.router.layer",
    experts: ExpertNames {
        joined: Some(FusedExperts {
            gate_up: "block_sparse_moe.input_linear.weight",
            down: "block_sparse_moe.output_linear.weight",
            transposed: false,
            interleaved: false,
        }),
        ..HF.experts
    },
    ..HF
};

/// Hugging Face names of Granite 4, whose dense feed-forward is called that of all tokens.
pub(super) static GRANITE_HYBRID_NAMES: WeightNames = WeightNames {
    linear: LinearAttentionNames {
        conv: "mamba.conv1d",
        decay: "mamba.A_log",
        step_bias: "mamba.dt_bias",
        skip: "mamba.D",
        norm: "mamba.norm",
        out: "mamba.out_proj",
        ..HF.linear
    },
    down: "shared_mlp.output_linear",
    experts: ExpertNames {
        shared: SharedNames {
            down: "shared_mlp.output_linear",
            ..HF.experts.shared
        },
        ..GRANITE_MOE.experts
    },
    joined: FusedNames {
        linear_in: Some("mamba.in_proj"),
        gate_up: Some("shared_mlp.input_linear"),
        shared_gate_up: Some("shared_mlp.input_linear"),
        ..FusedNames::NONE
    },
    ..GRANITE_MOE
};

/// Hugging Face names of GPT-OSS, whose matrices of experts have a row for each input.
pub(super) static GPT_OSS_NAMES: WeightNames = WeightNames {
    router: "mlp.router",
    experts: ExpertNames {
        joined: Some(FusedExperts {
            gate_up: "mlp.experts.gate_up_proj",
            down: "mlp.experts.down_proj",
            transposed: true,
            interleaved: true,
        }),
        ..HF.experts
    },
    ..HF
};

/// Hugging Face names of Llama 4, whose matrices of experts have a row for each input.
pub(super) static LLAMA4_NAMES: WeightNames = LLAMA4;

const LLAMA4: WeightNames = WeightNames {
    gate: "feed_forward.gate_proj",
    up: "feed_forward.up_proj",
    down: "feed_forward.down_proj",
    router: "feed_forward.router",
    experts: ExpertNames {
        gate: "feed_forward.experts.{}.gate_proj",
        up: "feed_forward.experts.{}.up_proj",
        down: "feed_forward.experts.{}.down_proj",
        joined: Some(FusedExperts {
            gate_up: "feed_forward.experts.gate_up_proj",
            down: "feed_forward.experts.down_proj",
            transposed: true,
            interleaved: false,
        }),
        shared: SharedNames {
            gate: "feed_forward.shared_expert.gate_proj",
            up: "feed_forward.shared_expert.up_proj",
            down: "feed_forward.shared_expert.down_proj",
            ..HF.experts.shared
        },
        ..HF.experts
    },
    ..HF
};

/// Those of Llama 4 inside of a model that also sees.
pub(super) static LLAMA4_NESTED_NAMES: WeightNames = WeightNames {
    embedding: "language_model.model.embed_tokens",
    final_norm: "language_model.model.norm",
    lm_head: "language_model.lm_head",
    layer: "language_model.model.layers.{}",
    ..LLAMA4
};

/// Hugging Face names of Qwen 2 with experts.
pub(super) static QWEN2_MOE_NAMES: WeightNames = QWEN2_MOE;

const QWEN2_MOE: WeightNames = WeightNames {
    experts: ExpertNames {
        shared: SharedNames {
            gate: "mlp.shared_expert.gate_proj",
            up: "mlp.shared_expert.up_proj",
            down: "mlp.shared_expert.down_proj",
            ..HF.experts.shared
        },
        ..HF.experts
    },
    ..HF
};

/// Hugging Face names of Qwen3-Next and Qwen 3.5, whose norms are stored less 1.
pub(super) static QWEN3_NEXT_NAMES: WeightNames = QWEN3_NEXT;

const QWEN3_NEXT: WeightNames = WeightNames {
    joined: FusedNames {
        query_gate: Some("self_attn.q_proj"),
        linear_qkv: Some("linear_attn.in_proj_qkv"),
        linear_heads: Some(("linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba")),
        ..FusedNames::NONE
    },
    norm_offset: 1.0,
    ..QWEN2_MOE
};

/// Names of the layer for multi-token prediction that these checkpoints have beside the model.
pub(super) static QWEN3_NEXT_MTP_NAMES: WeightNames = WeightNames {
    layer: "mtp.layers.{}",
    ..QWEN3_NEXT
};

/// Hugging Face names of Qwen 3.5 in checkpoints that have its image tower, too.
pub(super) static QWEN3_5_NAMES: WeightNames = WeightNames {
    embedding: "model.language_model.embed_tokens",
    final_norm: "model.language_model.norm",
    layer: "model.language_model.layers.{}",
    ..QWEN3_NEXT
};

/// Hugging Face names of Gemma 1, whose norms are stored less 1.
pub(super) static GEMMA_NAMES: WeightNames = GEMMA;

const GEMMA: WeightNames = WeightNames {
    norm_offset: 1.0,
    ..HF
};

/// Hugging Face names of Gemma 2 and 3.
pub(super) static GEMMA2_NAMES: WeightNames = GEMMA2;

const GEMMA2: WeightNames = WeightNames {
    post_attn_norm: Some("post_attention_layernorm"),
    ffn_norm: "pre_feedforward_layernorm",
    post_ffn_norm: Some("post_feedforward_layernorm"),
    ..GEMMA
};

/// Hugging Face names of Gemma 3 in checkpoints of the layers alone.
pub(super) static GEMMA3_BASE_NAMES: WeightNames = WeightNames {
    embedding: "embed_tokens",
    final_norm: "norm",
    layer: "layers.{}",
    ..GEMMA2
};

/// Hugging Face names of Gemma 3 in checkpoints that have its image tower, too.
pub(super) static GEMMA3_VISION_NAMES: WeightNames = WeightNames {
    embedding: "language_model.model.embed_tokens",
    final_norm: "language_model.model.norm",
    lm_head: "language_model.lm_head",
    layer: "language_model.model.layers.{}",
    ..GEMMA2
};

/// The same as `transformers` has them in memory.
pub(super) static GEMMA3_NESTED_NAMES: WeightNames = WeightNames {
    embedding: "model.language_model.embed_tokens",
    final_norm: "model.language_model.norm",
    layer: "model.language_model.layers.{}",
    ..GEMMA2
};

/// Hugging Face names of OLMo 2 and 3, which have no norm before a part.
pub(super) static OLMO2_NAMES: WeightNames = OLMO2;

const OLMO2: WeightNames = WeightNames {
    post_attn_norm: Some("post_attention_layernorm"),
    ffn_norm: "pre_feedforward_layernorm",
    post_ffn_norm: Some("post_feedforward_layernorm"),
    ..HF
};

/// Hugging Face names of Gemma 4, whose feed-forward is beside its experts.
pub(super) static GEMMA4_NAMES: WeightNames = GEMMA4;

const GEMMA4: WeightNames = WeightNames {
    router: "router.proj",
    experts: ExpertNames {
        joined: Some(FusedExperts {
            gate_up: "experts.gate_up_proj",
            down: "experts.down_proj",
            transposed: false,
            interleaved: false,
        }),
        shared: SharedNames {
            gate: "mlp.gate_proj",
            up: "mlp.up_proj",
            down: "mlp.down_proj",
            ..HF.experts.shared
        },
        norms: Some(ExpertNormNames {
            router: "router.scale",
            experts: "pre_feedforward_layernorm_2",
            post_experts: "post_feedforward_layernorm_2",
            post_shared: "post_feedforward_layernorm_1",
            scale: "router.per_expert_scale",
        }),
        ..HF.experts
    },
    ..OLMO2
};

/// Hugging Face names of Gemma 4 inside of a model that also sees or hears.
pub(super) static GEMMA4_NESTED_NAMES: WeightNames = WeightNames {
    embedding: "model.language_model.embed_tokens",
    per_layer: PerLayerNames {
        table: "model.language_model.embed_tokens_per_layer",
        projection: "model.language_model.per_layer_model_projection",
        projection_norm: "model.language_model.per_layer_projection_norm",
        ..PER_LAYER
    },
    final_norm: "model.language_model.norm",
    layer: "model.language_model.layers.{}",
    ..GEMMA4
};

/// Hugging Face names of Phi 3.
pub(super) static PHI3_NAMES: WeightNames = WeightNames {
    joined: FusedNames {
        qkv: Some("self_attn.qkv_proj"),
        gate_up: Some("mlp.gate_up_proj"),
        ..FusedNames::NONE
    },
    ..HF
};

/// Hugging Face names of GLM-4.
pub(super) static GLM4_NAMES: WeightNames = WeightNames {
    post_attn_norm: Some("post_self_attn_layernorm"),
    post_ffn_norm: Some("post_mlp_layernorm"),
    joined: FusedNames {
        gate_up: Some("mlp.gate_up_proj"),
        ..FusedNames::NONE
    },
    ..HF
};

/// Hugging Face names of StarCoder 2.
pub(super) static STARCODER2_NAMES: WeightNames = WeightNames {
    up: "mlp.c_fc",
    down: "mlp.c_proj",
    ..HF
};

/// Hugging Face names of Phi 1 and 2.
pub(super) static PHI_NAMES: WeightNames = WeightNames {
    final_norm: "model.final_layernorm",
    q_norm: "self_attn.q_layernorm",
    k_norm: "self_attn.k_layernorm",
    attn_out: "self_attn.dense",
    up: "mlp.fc1",
    down: "mlp.fc2",
    ..HF
};

/// Hugging Face names of GPT-2, whose matrices have a row for each input.
pub(super) static GPT2_NAMES: WeightNames = GPT2;

const GPT2: WeightNames = WeightNames {
    embedding: "transformer.wte",
    positions: Some("transformer.wpe"),
    final_norm: "transformer.ln_f",
    layer: "transformer.h.{}",
    attn_norm: "ln_1",
    attn_out: "attn.c_proj",
    ffn_norm: "ln_2",
    up: "mlp.c_fc",
    down: "mlp.c_proj",
    joined: FusedNames {
        qkv: Some("attn.c_attn"),
        ..FusedNames::NONE
    },
    transposed: true,
    ..HF
};

/// Those of GPT-2 as it was published.
pub(super) static GPT2_BASE_NAMES: WeightNames = WeightNames {
    embedding: "wte",
    positions: Some("wpe"),
    final_norm: "ln_f",
    layer: "h.{}",
    ..GPT2
};

/// Hugging Face names of Falcon.
pub(super) static FALCON_NAMES: WeightNames = WeightNames {
    embedding: "transformer.word_embeddings",
    final_norm: "transformer.ln_f",
    layer: "transformer.h.{}",
    parallel_norms: Some(("ln_attn", "ln_mlp")),
    attn_out: "self_attention.dense",
    up: "mlp.dense_h_to_4h",
    down: "mlp.dense_4h_to_h",
    joined: FusedNames {
        qkv_heads: Some("self_attention.query_key_value"),
        ..FusedNames::NONE
    },
    ..HF
};

/// Hugging Face names of LFM2.
pub(super) static LFM2_NAMES: WeightNames = WeightNames {
    final_norm: "model.embedding_norm",
    attn_norm: "operator_norm",
    q_norm: "self_attn.q_layernorm",
    k_norm: "self_attn.k_layernorm",
    attn_out: "self_attn.out_proj",
    ffn_norm: "ffn_norm",
    gate: "feed_forward.w1",
    up: "feed_forward.w3",
    down: "feed_forward.w2",
    ..HF
};

/// Names in GGUF files.
pub(crate) static GGUF_NAMES: WeightNames = GGUF;

const GGUF: WeightNames = WeightNames {
    embedding: "token_embd",
    rope_factors: Some("rope_freqs"),
    rope_long_short: Some(("rope_factors_long", "rope_factors_short")),
    positions: Some("position_embd"),
    per_layer: PerLayerNames {
        table: "per_layer_token_embd",
        projection: "per_layer_model_proj",
        projection_norm: "per_layer_proj_norm",
        gate: "inp_gate",
        out: "proj",
        norm: "post_norm",
    },
    final_norm: "output_norm",
    lm_head: "output",
    layer: "blk.{}",
    attn_norm: "attn_norm",
    q: "attn_q",
    k: "attn_k",
    v: "attn_v",
    q_norm: "attn_q_norm",
    k_norm: "attn_k_norm",
    sinks: "attn_sinks.weight",
    mla: MlaNames {
        q_down: "attn_q_a",
        q_down_norm: "attn_q_a_norm",
        q_up: "attn_q_b",
        latent_down: "attn_kv_a_mqa",
        latent_norm: "attn_kv_a_norm",
        up: "attn_kv_b",
        absorbed: Some(("attn_k_b", "attn_v_b")),
    },
    linear: LinearAttentionNames {
        gate: "attn_gate",
        beta: "ssm_beta",
        step: "ssm_alpha",
        conv: "ssm_conv1d",
        decay: "ssm_a",
        log_decay: false,
        step_bias: "ssm_dt.bias",
        skip: "ssm_d",
        norm: "ssm_norm",
        out: "ssm_out",
    },
    attn_out: "attn_output",
    post_attn_norm: Some("post_attention_norm"),
    conv: "shortconv.conv",
    conv_out: "shortconv.out_proj",
    ffn_norm: "ffn_norm",
    // Those of Falcon of 40 billion parameters, which alone has two.
    parallel_norms: Some(("attn_norm_2", "attn_norm")),
    gate: "ffn_gate",
    up: "ffn_up",
    down: "ffn_down",
    post_ffn_norm: Some("post_ffw_norm"),
    output_scale: "layer_output_scale.weight",
    router: "ffn_gate_inp",
    experts: ExpertNames {
        gate: "ffn_gate_exps",
        up: "ffn_up_exps",
        down: "ffn_down_exps",
        joined: None,
        correction: "exp_probs_b.bias",
        shared: SharedNames {
            gate: "ffn_gate_shexp",
            up: "ffn_up_shexp",
            down: "ffn_down_shexp",
            router: "ffn_gate_inp_shexp",
        },
        norms: None,
    },
    joined: FusedNames {
        qkv: Some("attn_qkv"),
        conv_in: Some("shortconv.in_proj"),
        linear_qkv: Some("attn_qkv"),
        linear_in: Some("ssm_in"),
        linear_heads: Some(("ssm_in", "ssm_ba")),
        ..FusedNames::NONE
    },
    norm_offset: 0.0,
    transposed: false,
};

/// Names in GGUF files of decoders whose gate and up are one tensor.
pub(super) static GGUF_GATE_UP_NAMES: WeightNames = WeightNames {
    joined: FusedNames {
        gate_up: Some("ffn_up"),
        ..GGUF.joined
    },
    ..GGUF
};

/// Names in GGUF files of decoders whose norm before the feed-forward is said to stand behind attention.
pub(super) static GGUF_POST_NORM_NAMES: WeightNames = WeightNames {
    post_attn_norm: None,
    ffn_norm: "post_attention_norm",
    ..GGUF
};

/// Names in GGUF files of Qwen3-Next and Qwen 3.5.
pub(super) static GGUF_QWEN3_NEXT_NAMES: WeightNames = WeightNames {
    post_attn_norm: None,
    ffn_norm: "post_attention_norm",
    joined: FusedNames {
        query_gate: Some("attn_q"),
        ..GGUF.joined
    },
    ..GGUF
};

/// Names in GGUF files of LFM2.
/// Names in GGUF files of Gemma 4.
pub(super) static GGUF_GEMMA4_NAMES: WeightNames = WeightNames {
    experts: ExpertNames {
        joined: Some(FusedExperts {
            gate_up: "ffn_gate_up_exps.weight",
            down: "ffn_down_exps.weight",
            transposed: false,
            interleaved: false,
        }),
        shared: SharedNames {
            gate: "ffn_gate",
            up: "ffn_up",
            down: "ffn_down",
            ..GGUF.experts.shared
        },
        norms: Some(ExpertNormNames {
            router: "ffn_gate_inp.scale",
            experts: "pre_ffw_norm_2",
            post_experts: "post_ffw_norm_2",
            post_shared: "post_ffw_norm_1",
            scale: "ffn_down_exps.scale",
        }),
        ..GGUF.experts
    },
    ..GGUF
};

/// Names in GGUF files of LFM2, whose last norm is named after the embedding.
pub(super) static GGUF_LFM2_NAMES: WeightNames = WeightNames {
    final_norm: "token_embd_norm",
    ..GGUF
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
