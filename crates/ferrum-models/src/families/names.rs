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

    /// The layer and the part of a name that [`in_layer`](Self::in_layer) gives.
    pub(crate) fn layer_part<'n>(&self, name: &'n str) -> Option<(usize, &'n str)> {
        let (prefix, _) = self.layer.split_once("{}")?;
        let (index, part) = name.strip_prefix(prefix)?.split_once('.')?;
        Some((index.parse().ok()?, part))
    }

    /// Every name outside layers, in the order of the fields.
    fn whole(&self) -> [&'static str; 3] {
        [self.embedding, self.final_norm, self.lm_head]
    }

    /// Every name within a layer, in the order of the fields.
    fn parts(&self) -> [&'static str; 12] {
        [
            self.attn_norm,
            self.q,
            self.k,
            self.v,
            self.q_norm,
            self.k_norm,
            self.attn_out,
            self.ffn_norm,
            self.gate,
            self.up,
            self.down,
            self.router,
        ]
    }
}

/// The GGUF name of a tensor that goes by the names `from`, both with their suffix; `None` for one that
/// no decoder here has, and for experts, which GGUF files hold in stacks.
pub(crate) fn gguf_name(from: &WeightNames, name: &str) -> Option<String> {
    let (stem, suffix) = name.rsplit_once('.')?;
    if !matches!(suffix, "weight" | "bias") {
        return None;
    }
    let counterpart = |from: &[&str], to: &[&'static str], part: &str| {
        let at = from.iter().position(|&known| known == part)?;
        to.get(at).copied()
    };
    let to = &GGUF_NAMES;
    if let Some(stem) = counterpart(&from.whole(), &to.whole(), stem) {
        return Some(format!("{stem}.{suffix}"));
    }
    let (index, part) = from.layer_part(stem)?;
    let part = counterpart(&from.parts(), &to.parts(), part)?;
    Some(format!("{}.{suffix}", to.in_layer(index, part)))
}

/// Hugging Face names of Llama and those who followed it.
pub(crate) static HF_NAMES: WeightNames = HF;

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
pub(crate) static GGUF_NAMES: WeightNames = WeightNames {
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
            assert_eq!(gguf_name(&HF_NAMES, name).as_deref(), expected, "{name}");
        }
    }
}
