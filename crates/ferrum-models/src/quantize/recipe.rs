//! Which type each tensor of a file takes.
//!
//! A recipe is what users ask for (`q4_k_m`). Most tensors take its base type; those that suffer most
//! from rounding take more bits. The rules are those that users of llama.cpp expect, written as a
//! table; a row whose length the type cannot hold falls back to a type with shorter blocks.

use crate::families::GGUF_NAMES;
use crate::inventory::TensorRole;
use ferrum_types::GgufQuantType::{self as T, *};
use std::fmt;
use std::str::FromStr;

/// What a whole file is quantised to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Recipe {
    /// Name in lower case.
    pub name: &'static str,
    /// Type of most tensors.
    pub base: T,
    /// Value of `general.file_type`.
    pub file_type: u32,
}

const fn recipe(name: &'static str, base: T, file_type: u32) -> Recipe {
    Recipe {
        name,
        base,
        file_type,
    }
}

/// Every recipe. The numbers are llama.cpp's `llama_ftype`.
pub static RECIPES: &[Recipe] = &[
    recipe("f32", F32, 0),
    recipe("f16", F16, 1),
    recipe("bf16", BF16, 32),
    recipe("q8_0", Q8_0, 7),
    recipe("q6_k", Q6_K, 18),
    recipe("q5_k_m", Q5_K, 17),
    recipe("q5_k_s", Q5_K, 16),
    recipe("q5_1", Q5_1, 9),
    recipe("q5_0", Q5_0, 8),
    recipe("q4_k_m", Q4_K, 15),
    recipe("q4_k_s", Q4_K, 14),
    recipe("q4_1", Q4_1, 3),
    recipe("q4_0", Q4_0, 2),
    recipe("iq4_nl", IQ4_NL, 25),
    recipe("iq4_xs", IQ4_XS, 30),
    recipe("mxfp4", MXFP4, 38),
    recipe("mxfp4_moe", Q8_0, 38),
    recipe("q3_k_l", Q3_K, 13),
    recipe("q3_k_m", Q3_K, 12),
    recipe("q3_k_s", Q3_K, 11),
    recipe("q2_k", Q2_K, 10),
];

impl FromStr for Recipe {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        // What people write for the default mixture.
        let name = match text.to_ascii_lowercase().as_str() {
            "q3_k" => "q3_k_m".to_owned(),
            "q4_k" => "q4_k_m".to_owned(),
            "q5_k" => "q5_k_m".to_owned(),
            other => other.to_owned(),
        };
        let found = RECIPES.iter().find(|recipe| recipe.name == name);
        found.copied().ok_or_else(|| {
            let names: Vec<_> = RECIPES.iter().map(|recipe| recipe.name).collect();
            format!("expected one of {}", names.join(", "))
        })
    }
}

impl fmt::Display for Recipe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name)
    }
}

/// Properties of a model that the rules of a recipe use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct ModelProperties {
    /// Layers.
    pub(super) layers: usize,
    /// Query heads for each key head.
    pub(super) heads_per_kv: usize,
    /// Experts of a mixture; 0 for none.
    pub(super) experts: usize,
    /// Whether the output projection is a tensor of its own.
    pub(super) has_output: bool,
    /// Whether importance was given.
    pub(super) importance: bool,
}

/// What a tensor is for, as far as rules tell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    Output,
    /// Values, also in one matrix with queries and keys or compressed together with keys.
    Value,
    Key,
    AttnOut,
    Down,
    Other,
}

/// When a rule holds.
#[derive(Clone, Copy, Debug)]
enum When {
    Always,
    /// In the first layers, so many.
    First(usize),
    /// In the first layers, this part of them.
    FirstPart(usize),
    /// In that part of the first layers, without importance.
    FirstPartPlain(usize),
    /// In that part of the first layers, with importance.
    FirstPartImportant(usize),
    /// In the first eighth, the last eighth and each third layer between.
    Spread,
    /// With at least four query heads for each key head, when such a matrix is small.
    Grouped,
    /// In mixtures of eight experts, beside which attention is small.
    EightExperts,
    /// For the matrices of all experts in one tensor.
    Stacked,
}

use Role::{AttnOut, Down, Key, Other, Output, Value};
use When::{
    Always, EightExperts, First, FirstPart, FirstPartImportant, FirstPartPlain, Grouped, Spread,
    Stacked,
};

/// `(recipe, role, when, type)`: the first row that fits decides; `""` stands for every recipe of
/// blocks. Without such a row, the base type.
const RULES: &[(&str, Role, When, T)] = &[
    ("q8_0", Output, Always, Q8_0),
    ("mxfp4", Output, Always, Q8_0),
    ("mxfp4_moe", Output, Always, Q8_0),
    ("mxfp4_moe", Down, Stacked, MXFP4),
    ("mxfp4_moe", Other, Stacked, MXFP4),
    ("", Output, Always, Q6_K),
    ("", Value, EightExperts, Q8_0),
    ("", Key, EightExperts, Q8_0),
    ("q3_k_s", AttnOut, EightExperts, Q5_K),
    ("q3_k_m", AttnOut, EightExperts, Q5_K),
    ("q3_k_l", AttnOut, EightExperts, Q3_K),
    ("q4_k_s", AttnOut, EightExperts, Q5_K),
    ("q4_k_m", AttnOut, EightExperts, Q5_K),
    ("iq4_nl", AttnOut, EightExperts, Q5_K),
    ("iq4_xs", AttnOut, EightExperts, Q5_K),
    ("q2_k", AttnOut, EightExperts, Q5_K),
    ("q2_k", Value, Grouped, Q4_K),
    ("q2_k", Value, Always, Q3_K),
    ("q2_k", Down, Always, Q3_K),
    ("q2_k", AttnOut, Always, Q3_K),
    ("q3_k_m", Value, First(2), Q5_K),
    ("q3_k_m", Value, Always, Q4_K),
    ("q3_k_m", Down, FirstPart(16), Q5_K),
    ("q3_k_m", Down, Always, Q4_K),
    ("q3_k_m", AttnOut, Always, Q4_K),
    ("q3_k_l", Value, Always, Q5_K),
    ("q3_k_l", Down, Always, Q5_K),
    ("q3_k_l", AttnOut, Always, Q5_K),
    ("q4_k_s", Value, First(4), Q5_K),
    ("q4_k_s", Down, FirstPart(8), Q5_K),
    ("q4_k_m", Value, Spread, Q6_K),
    ("q4_k_m", Down, Spread, Q6_K),
    ("q5_k_m", Value, Spread, Q6_K),
    ("q5_k_m", Down, Spread, Q6_K),
    ("iq4_nl", Value, Grouped, Q5_K),
    ("iq4_xs", Value, Grouped, Q5_K),
    ("iq4_nl", Down, FirstPartPlain(8), Q5_K),
    ("iq4_xs", Down, FirstPartPlain(8), Q5_K),
    ("q4_0", Down, FirstPartImportant(8), Q4_1),
    ("q5_0", Down, FirstPartImportant(8), Q5_1),
];

/// What rows take whose length the wanted type cannot hold.
const FALLBACKS: &[(T, T)] = &[
    (Q2_K, Q4_0),
    (Q3_K, Q4_0),
    (IQ4_XS, IQ4_NL),
    (Q4_K, Q5_0),
    (Q5_K, Q5_1),
    (Q6_K, Q8_0),
];

/// Parts of names of matrices that stay as they are: they are small, and what they choose matters. GGUF
/// files of every architecture are quantised, so these are beside the routers of the inventory.
const KEPT: &[&str] = &[
    "_norm.weight",
    "position_embd",
    "token_types",
    "ssm_conv1d",
    "shortconv.conv",
    "attn_rel_b",
    "altup",
    "laurel",
    "per_layer_model_proj",
    "time_mix_",
];

/// The type of a tensor, and whether its row length forced another one than the recipe's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TensorQuantType {
    pub(super) ty: T,
    pub(super) fallback: bool,
}

/// The type of the tensor `name` under `recipe`; `None`: it keeps its own.
pub(super) fn tensor_type(
    recipe: &Recipe,
    model: &ModelProperties,
    name: &str,
    shape: &[usize],
) -> Option<TensorQuantType> {
    let row = *shape.last()?;
    let kept = !name.ends_with(".weight")
        || name.contains(GGUF_NAMES.router)
        || KEPT.iter().any(|part| name.contains(part));
    if shape.len() < 2 || kept {
        return None;
    }
    if !recipe.base.is_quantized() {
        return Some(TensorQuantType {
            ty: recipe.base,
            fallback: false,
        });
    }
    let role = role_of(model, name);
    let layer = layer_of(name);
    let rule = RULES.iter().find(|(of, part, when, _)| {
        (of.is_empty() || *of == recipe.name)
            && *part == role
            && holds(*when, model, layer, shape.len() > 2)
    });
    let mut ty = rule.map_or(recipe.base, |rule| rule.3);
    if role == Output && !row.is_multiple_of(recipe.base.block_len()) {
        ty = Q8_0;
    }
    // Eight heads share a value matrix in models of 70 billion weights, so it costs little.
    if role == Value && model.layers == 80 && model.heads_per_kv > 1 && matches!(ty, Q3_K | Q4_K) {
        ty = Q5_K;
    }
    let wanted = ty;
    if !row.is_multiple_of(ty.block_len()) {
        ty = FALLBACKS
            .iter()
            .find(|pair| pair.0 == ty)
            .map_or(F16, |pair| pair.1);
    }
    if !row.is_multiple_of(ty.block_len()) {
        ty = F16;
    }
    Some(TensorQuantType {
        ty,
        fallback: ty != wanted,
    })
}

/// Ends of names of matrices that architectures beyond the inventory join or compress.
const JOINED: &[(&str, Role)] = &[("attn_qkv", Value), ("attn_kv_b", Value)];

fn role_of(model: &ModelProperties, name: &str) -> Role {
    let whole = GGUF_NAMES.parse(name).map(|id| id.role);
    match whole {
        Some(TensorRole::Output) => return Output,
        // A table that also serves as the output projection is treated as one.
        Some(TensorRole::TokenEmbedding) if !model.has_output => return Output,
        _ => {}
    }
    // The words of the inventory, as they also end names of decoders beside encoders and the like.
    let parts = [
        (GGUF_NAMES.v, Value),
        (GGUF_NAMES.k, Key),
        (GGUF_NAMES.attn_out, AttnOut),
    ];
    let stem = name.strip_suffix(".weight").unwrap_or(name);
    let mut all = parts.iter().chain(JOINED);
    match all.find(|(part, _)| stem.ends_with(part)) {
        Some(found) => found.1,
        // Experts, shared ones too, have more at the end.
        None if name.contains(GGUF_NAMES.down) => Down,
        None => Other,
    }
}

/// The layer of a name; 0 outside layers.
fn layer_of(name: &str) -> usize {
    GGUF_NAMES.layer_part(name).map_or(0, |(layer, _)| layer)
}

fn holds(when: When, model: &ModelProperties, layer: usize, stacked: bool) -> bool {
    let layers = model.layers;
    match when {
        Always => true,
        First(n) => layer < n,
        FirstPart(n) => layer < layers / n,
        FirstPartPlain(n) => layer < layers / n && !model.importance,
        FirstPartImportant(n) => layer < layers / n && model.importance,
        Spread => {
            let eighth = layers / 8;
            layer < eighth || layer >= 7 * layers / 8 || (layer - eighth) % 3 == 2
        }
        Grouped => model.heads_per_kv >= 4,
        EightExperts => model.experts == 8,
        Stacked => stacked,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MODEL: ModelProperties = ModelProperties {
        layers: 32,
        heads_per_kv: 4,
        experts: 0,
        has_output: true,
        importance: false,
    };

    fn ty(recipe: &str, model: &ModelProperties, name: &str, shape: &[usize]) -> Option<T> {
        let recipe: Recipe = recipe.parse().unwrap_or_else(|e| panic!("{recipe}: {e}"));
        tensor_type(&recipe, model, name, shape).map(|choice| choice.ty)
    }

    #[test]
    fn mixtures_are_those_that_users_expect() {
        let wide = &[4096, 4096];
        let cases = [
            ("q4_k_m", "output.weight", Q6_K),
            ("q4_k_m", "token_embd.weight", Q4_K),
            ("q4_k_m", "blk.0.attn_q.weight", Q4_K),
            ("q4_k_m", "blk.0.attn_v.weight", Q6_K),
            ("q4_k_m", "blk.4.attn_v.weight", Q4_K),
            ("q4_k_m", "blk.6.ffn_down.weight", Q6_K),
            ("q4_k_m", "blk.28.ffn_down.weight", Q6_K),
            ("q4_k_m", "blk.27.ffn_down.weight", Q6_K),
            ("q4_k_m", "blk.26.ffn_down.weight", Q4_K),
            ("q4_k_s", "blk.3.attn_v.weight", Q5_K),
            ("q4_k_s", "blk.4.attn_v.weight", Q4_K),
            ("q4_k_s", "blk.3.ffn_down.weight", Q5_K),
            ("q5_k_m", "blk.31.attn_v.weight", Q6_K),
            ("q5_k_s", "blk.31.attn_v.weight", Q5_K),
            ("q3_k_m", "blk.1.attn_v.weight", Q5_K),
            ("q3_k_m", "blk.2.attn_v.weight", Q4_K),
            ("q3_k_m", "blk.1.ffn_down.weight", Q5_K),
            ("q3_k_m", "blk.9.attn_output.weight", Q4_K),
            ("q3_k_l", "blk.9.ffn_down.weight", Q5_K),
            ("q3_k_s", "blk.9.ffn_down.weight", Q3_K),
            ("q2_k", "blk.9.attn_v.weight", Q4_K),
            ("q2_k", "blk.9.ffn_down.weight", Q3_K),
            ("q2_k", "blk.9.ffn_up.weight", Q2_K),
            ("iq4_xs", "blk.3.ffn_down.weight", Q5_K),
            ("iq4_xs", "blk.4.ffn_down.weight", IQ4_XS),
            ("q4_k_m", "blk.6.attn_qkv.weight", Q6_K),
            ("q4_k_m", "blk.5.attn_qkv.weight", Q4_K),
            ("q3_k_m", "blk.1.attn_qkv.weight", Q5_K),
            ("mxfp4_moe", "blk.1.ffn_up.weight", Q8_0),
            ("q8_0", "output.weight", Q8_0),
            ("q4_0", "output.weight", Q6_K),
            ("q4_0", "blk.0.ffn_down.weight", Q4_0),
            ("f16", "output.weight", F16),
        ];
        for (recipe, name, expected) in cases {
            assert_eq!(
                ty(recipe, &MODEL, name, wide),
                Some(expected),
                "{recipe} {name}"
            );
        }
        let important = ModelProperties {
            importance: true,
            ..MODEL
        };
        assert_eq!(
            ty("q4_0", &important, "blk.3.ffn_down.weight", wide),
            Some(Q4_1)
        );
        assert_eq!(
            ty("iq4_xs", &important, "blk.3.ffn_down.weight", wide),
            Some(IQ4_XS)
        );
        let tied = ModelProperties {
            has_output: false,
            ..MODEL
        };
        assert_eq!(ty("q4_k_m", &tied, "token_embd.weight", wide), Some(Q6_K));
        let eight = ModelProperties {
            experts: 8,
            ..MODEL
        };
        assert_eq!(
            ty("q4_k_m", &eight, "blk.3.attn_k.weight", wide),
            Some(Q8_0)
        );
        for (recipe, expected) in [("q3_k_m", Q5_K), ("q3_k_l", Q3_K)] {
            let found = ty(recipe, &eight, "blk.3.attn_output.weight", wide);
            assert_eq!(found, Some(expected), "{recipe}");
        }
        for name in ["blk.3.ffn_down_exps.weight", "blk.3.ffn_up_exps.weight"] {
            let found = ty("mxfp4_moe", &eight, name, &[8, 4096, 4096]);
            assert_eq!(found, Some(MXFP4), "{name}");
        }
    }

    #[test]
    fn rows_that_do_not_fit_fall_back() {
        let cases = [
            ("q4_k_m", "blk.1.attn_q.weight", 96, Q5_0),
            ("q5_k_s", "blk.1.attn_q.weight", 96, Q5_1),
            ("q6_k", "blk.1.attn_q.weight", 96, Q8_0),
            ("q3_k_s", "blk.1.attn_q.weight", 96, Q4_0),
            ("q2_k", "blk.1.ffn_up.weight", 96, Q4_0),
            ("iq4_xs", "blk.1.attn_q.weight", 96, IQ4_NL),
            ("q4_0", "output.weight", 96, Q8_0),
            ("q4_k_m", "output.weight", 96, Q8_0),
            ("q4_k_m", "blk.1.attn_q.weight", 48, F16),
            ("q8_0", "output.weight", 48, F16),
        ];
        for (recipe, name, row, expected) in cases {
            assert_eq!(
                ty(recipe, &MODEL, name, &[8, row]),
                Some(expected),
                "{recipe} {row}"
            );
        }
    }

    #[test]
    fn small_tensors_stay() {
        for name in [
            "output_norm.weight",
            "blk.0.attn_q.bias",
            "blk.0.attn_norm.weight",
        ] {
            assert_eq!(ty("q4_0", &MODEL, name, &[4096]), None, "{name}");
        }
        assert_eq!(
            ty("q4_0", &MODEL, "blk.0.ffn_gate_inp.weight", &[8, 4096]),
            None
        );
        assert_eq!(
            ty("f16", &MODEL, "blk.0.attn_q_norm.weight", &[2, 64]),
            None
        );
    }

    #[test]
    fn names_are_read_in_any_case() {
        assert_eq!("Q4_K_M".parse::<Recipe>().map(|r| r.file_type), Ok(15));
        assert_eq!("q4_k".parse::<Recipe>().map(|r| r.name), Ok("q4_k_m"));
        assert!(
            "q7_0"
                .parse::<Recipe>()
                .is_err_and(|e| e.contains("q4_k_m"))
        );
    }
}
