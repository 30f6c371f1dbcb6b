//! The tensors of a model as a GGUF file has them, whatever kind of file they come from.

use super::recipe::Shape;
use crate::families::{self, GGUF_NAMES, WeightNames, gguf_name};
use crate::rope::frequencies;
use crate::spec::{AttentionSpec, DecoderSpec, FeedForwardSpec, RopeScaling, RopeSpec};
use ferrum_formats::{Gguf, HfFolder, ModelSource, TensorDtype, TensorSource};
use ferrum_types::{Dtype, Error, GgufQuantType, Result};
use std::collections::HashSet;

/// A tensor of the new file.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Item {
    /// GGUF name.
    pub(super) name: String,
    /// Outermost dimension first.
    pub(super) shape: Vec<usize>,
    pub(super) from: From,
}

/// Where its numbers come from.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum From {
    /// Rows of tensors of the source.
    Rows {
        /// As many rows of each, one after the other: experts become a stack.
        parts: Vec<Part>,
        /// The type of all, if that is a type of numbers that can be quantised.
        ty: Option<GgufQuantType>,
        /// Heads whose rows go from halves to pairs; 0: rows keep their order.
        pairs: usize,
    },
    /// Computed.
    Values(Vec<f32>),
}

/// Rows of a tensor of the source.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Part {
    /// Name of the tensor.
    pub(super) name: String,
    /// The first row.
    pub(super) first: usize,
}

impl Part {
    fn whole(name: &str) -> Self {
        Part {
            name: name.to_owned(),
            first: 0,
        }
    }
}

/// What a Hugging Face model is in the terms of GGUF.
pub(super) struct HfModel<'m> {
    pub(super) folder: &'m HfFolder,
    pub(super) spec: DecoderSpec,
    pub(super) names: &'static WeightNames,
    /// `general.architecture`.
    pub(super) arch: &'static str,
}

/// `(family, architecture, whether q and k rows are reordered)`: Mistral and Mixtral go by Llama's
/// name, and Llama's files have the two numbers that rotate together side by side.
const ARCHITECTURES: &[(&str, &str, bool)] = &[
    ("llama", "llama", true),
    ("mistral", "llama", true),
    ("mixtral", "llama", true),
    ("qwen2", "qwen2", false),
    ("qwen3", "qwen3", false),
    ("qwen3moe", "qwen3moe", false),
];

/// The tensors of the source, those of layers in their order.
pub(super) fn items(source: &ModelSource) -> Result<Vec<Item>> {
    match source {
        ModelSource::Gguf(gguf) => Ok(gguf_items(gguf)),
        ModelSource::Hf(folder) => hf_items(&hf_model(source, folder)?),
    }
}

/// What the rules of a recipe ask of the model.
pub(super) fn shape_of(source: &ModelSource, items: &[Item]) -> Result<Shape> {
    let mut shape = Shape {
        has_output: items.iter().any(|item| item.name == "output.weight"),
        ..Shape::default()
    };
    match source {
        ModelSource::Gguf(gguf) => {
            let arch = gguf.architecture()?;
            let first = |name: &str| -> Result<Option<u32>> {
                let list = gguf.u32_per_layer(&format!("{arch}.{name}"))?;
                Ok(list.and_then(|list| list.get(0)))
            };
            shape.layers = first("block_count")?.unwrap_or(0) as usize;
            shape.experts = first("expert_count")?.unwrap_or(0) as usize;
            let heads = first("attention.head_count")?.unwrap_or(1);
            let kv = first("attention.head_count_kv")?.unwrap_or(heads);
            shape.heads_per_kv = heads.checked_div(kv).unwrap_or(1) as usize;
        }
        ModelSource::Hf(folder) => {
            let spec = hf_model(source, folder)?.spec;
            shape.layers = spec.layers.len();
            if let Some(AttentionSpec::Gqa(gqa)) = spec.layers.first().map(|l| &l.attention) {
                shape.heads_per_kv = gqa.heads.checked_div(gqa.kv_heads).unwrap_or(1);
            }
            if let Some(FeedForwardSpec::Moe(moe)) = spec.layers.first().map(|l| &l.feed_forward) {
                shape.experts = moe.experts;
            }
        }
    }
    Ok(shape)
}

/// Reads the spec of a folder and finds its architecture.
pub(super) fn hf_model<'m>(source: &ModelSource, folder: &'m HfFolder) -> Result<HfModel<'m>> {
    let path = folder.config.path().display();
    if folder.quantization.is_some() {
        return Err(Error::Model(format!(
            "{path}: the weights are quantised already, expected floats\nhint: take the unquantised \
             checkpoint"
        )));
    }
    let (family, spec, names) = families::read_spec(source)?;
    spec.validate()
        .map_err(|reason| Error::Model(format!("{path}: {reason}")))?;
    let row = ARCHITECTURES.iter().find(|row| row.0 == family.name);
    let Some(&(_, arch, _)) = row else {
        let known: Vec<_> = ARCHITECTURES.iter().map(|row| row.0).collect();
        return Err(Error::Model(format!(
            "{path}: the family {} cannot be converted, expected one of {}\nhint: make a float GGUF \
             file of it with llama.cpp's convert_hf_to_gguf.py and quantise that",
            family.name,
            known.join(", ")
        )));
    };
    Ok(HfModel {
        folder,
        spec,
        names,
        arch,
    })
}

fn gguf_items(gguf: &Gguf) -> Vec<Item> {
    let infos = gguf.infos();
    infos
        .map(|info| Item {
            name: info.name.clone(),
            shape: info.shape.clone(),
            from: From::Rows {
                parts: vec![Part::whole(&info.name)],
                ty: number_type(info.dtype),
                pairs: 0,
            },
        })
        .collect()
}

fn hf_items(model: &HfModel<'_>) -> Result<Vec<Item>> {
    let spec = &model.spec;
    let pairs = ARCHITECTURES
        .iter()
        .any(|row| row.0 == spec.family && row.2);
    let mut items = Vec::new();
    if let Some(divisors) = rope_divisors(&spec.rope) {
        items.push(Item {
            name: "rope_freqs.weight".into(),
            shape: vec![divisors.len()],
            from: From::Values(divisors),
        });
    }
    let stacks = expert_items(model)?;
    let stacked: HashSet<&str> = stacks.iter().flat_map(Item::sources).collect();
    for info in model.folder.tensors.infos() {
        if stacked.contains(&*info.name) {
            continue;
        }
        let Some(name) = gguf_name(model.names, &info.name) else {
            // Frequencies that follow from the config; old checkpoints hold them.
            if info.name.ends_with(".rotary_emb.inv_freq") {
                continue;
            }
            let path = model.folder.tensors.path_hint().display();
            return Err(Error::Model(format!(
                "{path}: tensor \"{}\" has no name in GGUF files of architecture {}, expected the \
                 weights of a text model\nhint: take the folder of the text model alone",
                info.name.escape_debug(),
                model.arch
            )));
        };
        if name == "output.weight" && spec.tie_embeddings {
            continue;
        }
        let heads = if pairs { heads_of(spec, &name) } else { 0 };
        items.push(Item {
            name,
            shape: info.shape.clone(),
            from: From::Rows {
                parts: vec![Part::whole(&info.name)],
                ty: number_type(info.dtype),
                pairs: heads,
            },
        });
    }
    // Readers would take the embedding in its place without a word.
    if !spec.tie_embeddings && !items.iter().any(|item| item.name == "output.weight") {
        let path = model.folder.tensors.path_hint().display();
        return Err(Error::Model(format!(
            "{path}: no tensor \"lm_head.weight\", expected it as the config does not tie it to the \
             embedding\nhint: the checkpoint is incomplete, fetch it again"
        )));
    }
    items.extend(stacks);
    Ok(items)
}

impl Item {
    /// The tensors that its rows come from.
    fn sources(&self) -> impl Iterator<Item = &str> {
        let parts = match &self.from {
            From::Rows { parts, .. } => parts.as_slice(),
            From::Values(_) => &[],
        };
        parts.iter().map(|part| &*part.name)
    }
}

/// The experts of all layers in stacks.
fn expert_items(model: &HfModel<'_>) -> Result<Vec<Item>> {
    let (tensors, names) = (&model.folder.tensors, &model.names.experts);
    let mut items = Vec::new();
    for (i, layer) in model.spec.layers.iter().enumerate() {
        let FeedForwardSpec::Moe(moe) = &layer.feed_forward else {
            continue;
        };
        let joined = names.joined.filter(|(gate_up, _)| {
            let name = model.names.in_layer(i, gate_up);
            tensors.get(&name).is_some()
        });
        let (hidden, inner) = (model.spec.hidden_size, moe.intermediate);
        let to = &GGUF_NAMES.experts;
        let kinds = [
            (
                to.gate,
                names.gate,
                joined.map(|j| (j.0, 2 * inner, 0)),
                [inner, hidden],
            ),
            (
                to.up,
                names.up,
                joined.map(|j| (j.0, 2 * inner, inner)),
                [inner, hidden],
            ),
            (
                to.down,
                names.down,
                joined.map(|j| (j.1, hidden, 0)),
                [hidden, inner],
            ),
        ];
        for (to, each, joined, [rows, cols]) in kinds {
            let part = |expert: usize| match joined {
                Some((name, height, first)) => Part {
                    name: model.names.in_layer(i, name),
                    first: expert * height + first,
                },
                None => {
                    let each = each.replace("{}", &expert.to_string());
                    Part::whole(&format!("{}.weight", model.names.in_layer(i, &each)))
                }
            };
            let expected = match joined {
                Some((_, height, _)) => vec![moe.experts, height, cols],
                None => vec![rows, cols],
            };
            let parts: Vec<_> = (0..moe.experts).map(part).collect();
            items.push(Item {
                name: format!("{}.weight", GGUF_NAMES.in_layer(i, to)),
                shape: vec![moe.experts, rows, cols],
                from: From::Rows {
                    ty: type_of_parts(model, &parts, &expected)?,
                    parts,
                    pairs: 0,
                },
            });
        }
    }
    Ok(items)
}

/// The type of tensors that become one, which all have this shape.
fn type_of_parts(
    model: &HfModel<'_>,
    parts: &[Part],
    expected: &[usize],
) -> Result<Option<GgufQuantType>> {
    let tensors = &model.folder.tensors;
    let mut ty = None;
    for (i, part) in parts.iter().enumerate() {
        let view = tensors.require(&part.name)?;
        let found = number_type(view.dtype);
        if view.shape != expected || (i > 0 && found != ty) {
            return Err(Error::Model(format!(
                "{}: tensor \"{}\" has type {} and shape {:?}, expected that of the other experts and \
                 {expected:?}",
                tensors.path_hint().display(),
                part.name.escape_debug(),
                view.dtype,
                view.shape,
            )));
        }
        ty = found;
    }
    Ok(ty)
}

/// Heads whose rows the tensor holds, if rotation touches it.
fn heads_of(spec: &DecoderSpec, name: &str) -> usize {
    let Some(AttentionSpec::Gqa(gqa)) = spec.layers.first().map(|layer| &layer.attention) else {
        return 0;
    };
    match name {
        _ if name.contains(".attn_q.") => gqa.heads,
        _ if name.contains(".attn_k.") => gqa.kv_heads,
        _ => 0,
    }
}

/// What each frequency is divided by, where that is a tensor in GGUF files.
fn rope_divisors(rope: &RopeSpec) -> Option<Vec<f32>> {
    if !matches!(rope.scaling, RopeScaling::Llama3 { .. }) {
        return None;
    }
    let plain = RopeSpec {
        scaling: RopeScaling::None,
        ..rope.clone()
    };
    let (plain, scaled) = (frequencies(&plain, 0), frequencies(rope, 0));
    Some(plain.iter().zip(&scaled).map(|(p, s)| p / s).collect())
}

fn number_type(dtype: TensorDtype) -> Option<GgufQuantType> {
    match dtype {
        TensorDtype::Plain(Dtype::F32) => Some(GgufQuantType::F32),
        TensorDtype::Plain(Dtype::F16) => Some(GgufQuantType::F16),
        TensorDtype::Plain(Dtype::BF16) => Some(GgufQuantType::BF16),
        TensorDtype::Plain(Dtype::F64) => Some(GgufQuantType::F64),
        TensorDtype::Quant(ty) => Some(ty),
        _ => None,
    }
}
