//! The tensors of a model as a GGUF file has them, whatever kind of file they come from.

use super::hf_model::HfModel;
use super::item::{Columns, From, Item, Part, number_type};
use super::recipe::ModelProperties;
use super::recurrent;
use crate::dense::DenseLayers;
use crate::draft_head::{MtpLayer, MtpNames};
use crate::families::GGUF_NAMES;
use crate::inventory::{
    DecoderTensor, RowRuns, TensorId, TensorLocation, TensorPart, TensorRole, TensorShape,
    of_expert,
};
use crate::rope::frequencies;
use crate::spec::{AttentionSpec, DecoderSpec, FeedForwardSpec, RopeScaling, RopeSpec};
use crate::stored::{require, to_f32};
use ferrum_formats::{Gguf, ModelSource, TensorDtype, TensorSource};
use ferrum_kernels::{ExpertShape, RopeStyle};
use ferrum_types::{Error, GgufQuantType, Result};
use std::collections::HashSet;

/// The output projection.
const OUTPUT: TensorId = TensorId {
    layer: None,
    role: TensorRole::Output,
    part: TensorPart::Weight,
};

/// The tensors of the source, those of layers in their order.
pub(super) fn items(source: &ModelSource) -> Result<Vec<Item>> {
    match source {
        ModelSource::Gguf(gguf) => gguf_items(gguf),
        ModelSource::Hf(folder) => {
            let model = HfModel::read(source, folder)?;
            let mut items = hf_items(&model)?;
            let dense = DenseLayers::of(source, model.spec.hidden_size)?;
            for matrix in dense.as_gguf().into_iter().flatten() {
                items.push(Item {
                    shape: matrix.shape.to_vec(),
                    ..Item::of_values(matrix.name.to_owned(), matrix.values.to_vec())
                });
            }
            Ok(items)
        }
    }
}

/// What the rules of a recipe ask of the model.
pub(super) fn model_properties(source: &ModelSource, items: &[Item]) -> Result<ModelProperties> {
    let mut properties = ModelProperties {
        has_output: items
            .iter()
            .any(|item| GGUF_NAMES.parse(&item.name) == Some(OUTPUT)),
        ..ModelProperties::default()
    };
    match source {
        ModelSource::Gguf(gguf) => {
            let arch = gguf.architecture()?;
            let first = |name: &str| -> Result<Option<u32>> {
                let list = gguf.u32_per_layer(&format!("{arch}.{name}"))?;
                Ok(list.and_then(|list| list.get(0)))
            };
            properties.layers = first("block_count")?.unwrap_or(0) as usize;
            properties.experts = first("expert_count")?.unwrap_or(0) as usize;
            let heads = first("attention.head_count")?.unwrap_or(1);
            let kv = first("attention.head_count_kv")?.unwrap_or(heads);
            properties.heads_per_kv = heads.checked_div(kv).unwrap_or(1) as usize;
        }
        ModelSource::Hf(folder) => {
            let spec = HfModel::read(source, folder)?.with_further_layers().spec;
            properties.layers = spec.layers.len();
            if let Some(AttentionSpec::Gqa(gqa)) = spec.layers.first().map(|l| &l.attention) {
                properties.heads_per_kv = gqa.heads.checked_div(gqa.kv_heads).unwrap_or(1);
            }
            if let Some(FeedForwardSpec::Moe(moe)) = spec.layers.first().map(|l| &l.feed_forward) {
                properties.experts = moe.experts;
            }
        }
    }
    Ok(properties)
}

fn gguf_items(gguf: &Gguf) -> Result<Vec<Item>> {
    let scaled = |name: &str| {
        let module = name.strip_suffix(".weight").unwrap_or(name);
        gguf.get(&format!("{module}.scale")).is_some()
    };
    let items = gguf.infos().map(|info| {
        let name = info.name.clone();
        if info.dtype == TensorDtype::Quant(GgufQuantType::NVFP4) && scaled(&name) {
            // The scale would stand beside weights of a type that is read without one.
            return Err(Error::Model(format!(
                "{}: tensor \"{name}\" is NVFP4 with a scale of its own, expected other types\n\
                 hint: quantize the model that this file was made of",
                gguf.path().display()
            )));
        }
        Ok(Item::of_tensor(name, info, 0))
    });
    items.collect()
}

fn hf_items(model: &HfModel<'_>) -> Result<Vec<Item>> {
    let spec = &model.spec;
    let mut items = Vec::new();
    for (role, factors) in spec.ropes.iter().flat_map(rope_factors) {
        if let Some(name) = model.gguf_names.name(TensorId::global(role)) {
            items.push(Item::of_values(name, factors));
        }
    }
    let of_mtp = |name: &str| model.mtp.as_ref().is_some_and(|mtp| mtp.owns(name));
    items.extend(tensor_items(model, &|name| !of_mtp(name))?);
    if let Some(mtp) = model.kept_mtp() {
        items.extend(mtp_items(model, mtp)?);
    }
    // Readers would take the embedding in its place without a word.
    let output = model.names.name(OUTPUT).unwrap_or_default();
    if !spec.tie_embeddings && model.folder.tensors.get(&output).is_none() {
        let path = model.folder.tensors.path_hint().display();
        return Err(Error::Model(format!(
            "{path}: no tensor \"{output}\", expected it as the config does not tie it to the \
             embedding\nhint: the checkpoint is incomplete, fetch it again"
        )));
    }
    Ok(items)
}

/// The layer for multi-token prediction: as one more block, with what is beside the layer by names of its own.
fn mtp_items(model: &HfModel<'_>, mtp: &MtpLayer) -> Result<Vec<Item>> {
    let MtpNames {
        embedding_norm,
        hidden_norm,
        projection,
        norm,
        ..
    } = &mtp.parts;
    let (tensors, offset) = (&model.folder.tensors, norm_offset(model));
    let layer = of_expert(mtp.names.layer, mtp.index());
    // Copies of the model's own tables may be there, too.
    let beside = ["embed_tokens", "shared_head.head"].map(|copy| format!("{layer}.{copy}"));
    let beside = beside
        .iter()
        .chain([embedding_norm, hidden_norm, projection, norm]);
    let beside: HashSet<_> = beside.map(|module| format!("{module}.weight")).collect();
    let with_layer = HfModel {
        spec: mtp.spec.clone(),
        names: mtp.names,
        mtp: None,
        ..*model
    };
    let prefix = format!("{layer}.");
    let mut items = tensor_items(&with_layer, &|name| {
        name.starts_with(&prefix) && !beside.contains(name)
    })?;
    let block = |index| of_expert(model.gguf_names.layer, index) + ".";
    let (from, to) = (block(mtp.index()), block(model.spec.layers.len()));
    items.retain_mut(|item| {
        let Some(part) = item.name.strip_prefix(&from) else {
            return false;
        };
        item.name = format!("{to}{part}");
        true
    });
    let norms = [
        (embedding_norm, "enorm"),
        (hidden_norm, "hnorm"),
        (norm, "shared_head_norm"),
    ];
    for (module, part) in norms {
        let view = tensors.require(&format!("{module}.weight"))?;
        let mut values = to_f32(tensors, &view)?;
        values.iter_mut().for_each(|value| *value += offset);
        items.push(Item::of_values(format!("{to}nextn.{part}.weight"), values));
    }
    let stored = format!("{projection}.weight");
    let stored = tensors.infos().find(|info| info.name == stored);
    items.extend(stored.map(|info| Item::of_tensor(format!("{to}nextn.eh_proj.weight"), info, 0)));
    Ok(items)
}

/// What the new file's norms are more than the folder's.
fn norm_offset(model: &HfModel<'_>) -> f32 {
    model.names.norm_offset - model.gguf_names.norm_offset
}

/// The tensors that `keep` has of a folder, and the stacks that the model has experts in.
fn tensor_items(model: &HfModel<'_>, keep: &dyn Fn(&str) -> bool) -> Result<Vec<Item>> {
    let (spec, mut items) = (&model.spec, Vec::new());
    let (stacks, biases) = (expert_items(model)?, bias_items(model)?);
    let mut stacked: HashSet<&str> = stacks.iter().flat_map(Item::sources).collect();
    stacked.extend(biases.iter().map(|(source, _)| source.as_str()));
    let mut used = HashSet::new();
    items.extend(recurrent::items(model, &mut used)?);
    items.extend(parted_items(model, &mut used)?);
    items.extend(head_items(model, &mut used)?);
    for info in model.folder.tensors.infos() {
        let is_used = stacked.contains(&*info.name) || used.contains(&info.name);
        if is_used || !keep(&info.name) {
            continue;
        }
        let names = model.gguf_names;
        let flipped = |item: Item, in_layer: bool| {
            let plain = number_type(info.dtype).is_some_and(|ty| !ty.is_quantized());
            match model.names.transposed && in_layer && info.shape.len() == 2 && plain {
                true => item.transposed(),
                false => item,
            }
        };
        if let Some(name) = model.names.fused_name_in(&info.name, names) {
            items.push(flipped(Item::of_tensor(name, info, 0), true));
            continue;
        }
        let id = model.names.parse(&info.name);
        let Some((id, name)) = id.and_then(|id| Some((id, names.name(id)?))) else {
            // Frequencies and masks that follow from the config; old checkpoints hold them.
            let buffers = [".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias"];
            if buffers.iter().any(|buffer| info.name.ends_with(buffer)) {
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
        if id == OUTPUT && spec.tie_embeddings {
            continue;
        }
        let offset = norm_offset(model);
        if id.role.has_norm_offset() && offset != 0.0 {
            let view = model.folder.tensors.require(&info.name)?;
            let mut values = to_f32(&model.folder.tensors, &view)?;
            values.iter_mut().for_each(|value| *value += offset);
            items.push(Item::of_values(name, values));
            continue;
        }
        let pairs = match (spec.rope_style(), model.rope) {
            (RopeStyle::HalfSplit, RopeStyle::Interleaved) => rotated_heads(spec, id),
            _ => 0,
        };
        let mut item = flipped(Item::of_tensor(name, info, pairs), id.layer.is_some());
        let is_kernel = id.role == TensorRole::ConvKernel && id.part == TensorPart::Weight;
        if is_kernel || id.role == TensorRole::SharedRouter {
            // The one input of each channel, and the one output, are not said.
            item.shape.retain(|&size| size != 1);
        }
        items.push(item);
    }
    items.extend(stacks);
    items.extend(biases.into_iter().map(|(_, item)| item));
    Ok(items)
}

/// Queries, keys and values that the folder joins by key heads, one kind after the other.
fn head_items(model: &HfModel<'_>, used: &mut HashSet<String>) -> Result<Vec<Item>> {
    let joined = (model.names.joined.qkv_heads, model.gguf_names.joined.qkv);
    let (Some(_), Some(stem)) = joined else {
        return Ok(Vec::new());
    };
    let mut items: Vec<Item> = Vec::new();
    for tensor in model.spec.tensors() {
        let TensorId { layer, role, part } = tensor.id;
        let kinds = [TensorRole::Query, TensorRole::Key, TensorRole::Value];
        let is_kind = kinds.contains(&role) && part == TensorPart::Weight;
        let (Some(layer), true) = (layer, is_kind) else {
            continue;
        };
        let rows = tensor.shape.dims()[0];
        let (name, runs) = match model.names.locations(&tensor).into_iter().next() {
            Some(TensorLocation::Rows { name, first, .. }) => (name, RowRuns::one(first, rows)),
            Some(TensorLocation::Runs { name, runs, .. }) => (name, runs),
            _ => continue,
        };
        let Some(view) = model.folder.tensors.get(&name) else {
            continue;
        };
        let places = (0..rows).map(|row| runs.row(row));
        let layer = of_expert(model.gguf_names.layer, layer);
        let new = format!("{layer}.{stem}.{}", part.suffix());
        let known = items.last_mut().filter(|item| item.name == new);
        if let Some(From::Rows {
            rows: Some(rows), ..
        }) = known.map(|item| &mut item.from)
        {
            rows.extend(places);
            continue;
        }
        used.insert(name.clone());
        items.push(Item {
            name: new,
            shape: view.shape.to_vec(),
            from: From::Rows {
                parts: vec![Part { name, first: 0 }],
                ty: number_type(view.dtype),
                pairs: 0,
                columns: None,
                rows: Some(places.collect()),
                cols: None,
            },
        });
    }
    Ok(items)
}

/// Gates and maps beside them that the folder joins, where the new file does not, and maps that it calls as others.
fn parted_items(model: &HfModel<'_>, used: &mut HashSet<String>) -> Result<Vec<Item>> {
    let tensors = &model.folder.tensors;
    let mut items = Vec::new();
    for tensor in model.spec.tensors() {
        let joined = match tensor.id.role {
            TensorRole::Gate | TensorRole::Up => model.gguf_names.joined.gate_up,
            TensorRole::SharedGate | TensorRole::SharedUp => model.gguf_names.joined.shared_gate_up,
            TensorRole::SharedDown => None,
            _ => continue,
        };
        let place = model.names.locations(&tensor).into_iter().next();
        let (name, first) = match (place, joined) {
            (Some(TensorLocation::Rows { name, first, .. }), None) => (name, first),
            (Some(TensorLocation::Whole(name)), None) => match model.names.parse(&name) {
                Some(other) if other != tensor.id => (name, 0),
                _ => continue,
            },
            _ => continue,
        };
        let (Some(view), Some(gguf)) = (tensors.get(&name), model.gguf_names.name(tensor.id))
        else {
            continue;
        };
        used.insert(name.clone());
        items.push(Item {
            name: gguf,
            shape: tensor.shape.dims(),
            from: From::Rows {
                ty: number_type(view.dtype),
                parts: vec![Part { name, first }],
                pairs: 0,
                columns: None,
                rows: None,
                cols: None,
            },
        });
    }
    Ok(items)
}

/// The biases of experts, each with the name of the tensor that has them.
fn bias_items(model: &HfModel<'_>) -> Result<Vec<(String, Item)>> {
    let mut items = Vec::new();
    for tensor in model.spec.tensors() {
        let TensorShape::Biases { experts, n } = tensor.shape else {
            continue;
        };
        let place = model.names.locations(&tensor).into_iter().next();
        let (Some(TensorLocation::Reordered { name, layout }), Some(gguf)) =
            (place, model.gguf_names.name(tensor.id))
        else {
            continue;
        };
        let tensors = &model.folder.tensors;
        let view = require(tensors, &name, &[experts, layout.width])?;
        let values = layout.biases(&to_f32(tensors, &view)?, n);
        let mut item = Item::of_values(gguf, values);
        item.shape = vec![experts, n];
        items.push((name, item));
    }
    Ok(items)
}

/// The experts of all layers, and the absorbed maps of heads, in stacks.
fn expert_items(model: &HfModel<'_>) -> Result<Vec<Item>> {
    let experts = model.spec.tensors();
    let items = experts.filter_map(|tensor| {
        let TensorShape::Stack(shape) = tensor.shape else {
            return None;
        };
        let item = expert_item(model, &tensor, shape);
        match fused_gate_up(model, &tensor) {
            None => Some(item),
            // The rows of up follow those of gate in both kinds of file.
            Some(name) if tensor.id.role == TensorRole::ExpertGate => Some(item.map(|item| Item {
                name,
                shape: vec![shape.experts, 2 * shape.n, shape.k],
                ..item
            })),
            Some(_) => None,
        }
    });
    items.collect()
}

/// The tensor of the new file that a stack is joined to another in, where the folder joins them as well.
fn fused_gate_up(model: &HfModel<'_>, tensor: &DecoderTensor) -> Option<String> {
    let TensorId { layer, role, .. } = tensor.id;
    let is_part = matches!(role, TensorRole::ExpertGate | TensorRole::ExpertUp);
    let (layer, joined) = (layer?, model.gguf_names.experts.joined.filter(|_| is_part)?);
    let place = model.names.locations(tensor).into_iter().next()?;
    match place {
        TensorLocation::Rows { name, .. } => model.folder.tensors.get(&name).map(drop)?,
        _ => return None,
    }
    let layer = of_expert(model.gguf_names.layer, layer);
    Some(format!("{layer}.{}", joined.gate_up))
}

/// One stack, of whatever the folder has.
fn expert_item(model: &HfModel<'_>, tensor: &DecoderTensor, shape: ExpertShape) -> Result<Item> {
    let tensors = &model.folder.tensors;
    let ExpertShape { experts, n, k } = shape;
    let mut places = model.names.locations(tensor).into_iter();
    let place = places.find(|place| match place {
        TensorLocation::Rows { name, .. }
        | TensorLocation::Runs { name, .. }
        | TensorLocation::Whole(name)
        | TensorLocation::Reordered { name, .. } => tensors.get(name).is_some(),
        TensorLocation::PerExpert(_) => true,
    });
    let name = model.gguf_names.name(tensor.id);
    let (Some(place), Some(name)) = (place, name) else {
        let path = tensors.path_hint().display();
        let reason = "is in no place that folders or GGUF files have for it";
        return Err(Error::Model(format!("{path}: {} {reason}", tensor.id)));
    };
    let part = |expert: usize| match &place {
        TensorLocation::Rows {
            name,
            first,
            height,
        } => Part {
            name: name.clone(),
            first: expert * height + first,
        },
        TensorLocation::Whole(name) | TensorLocation::Runs { name, .. } => Part {
            name: name.clone(),
            first: expert * n,
        },
        TensorLocation::Reordered { name, layout } => Part {
            name: name.clone(),
            first: match layout.transposed {
                true => expert * layout.height,
                false => expert * layout.height + layout.first,
            },
        },
        TensorLocation::PerExpert(pattern) => {
            Part::whole(&format!("{}.weight", of_expert(pattern, expert)))
        }
    };
    let columns = match &place {
        TensorLocation::Reordered { layout, .. } if layout.transposed => Some(Columns {
            width: layout.width,
            first: layout.first,
            step: layout.step,
        }),
        _ => None,
    };
    let expected = match &place {
        TensorLocation::Rows { height, .. } => vec![experts, *height, k],
        TensorLocation::Whole(_) | TensorLocation::Runs { .. } => vec![experts, n, k],
        // One matrix of all heads.
        TensorLocation::Reordered { name, layout } if name.ends_with(".weight") => {
            vec![experts * layout.height, layout.width]
        }
        TensorLocation::Reordered { layout, .. } => vec![experts, layout.height, layout.width],
        TensorLocation::PerExpert(_) => vec![n, k],
    };
    let parts: Vec<_> = (0..experts).map(part).collect();
    Ok(Item {
        name,
        shape: tensor.shape.dims(),
        from: From::Rows {
            ty: type_of_parts(model, &parts, &expected)?,
            parts,
            pairs: 0,
            columns,
            rows: None,
            cols: None,
        },
    })
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

/// Heads whose rows the tensor holds, if rotation touches it. A bias beside the spec follows its weight.
fn rotated_heads(spec: &DecoderSpec, id: TensorId) -> usize {
    let weight = TensorId {
        part: TensorPart::Weight,
        ..id
    };
    spec.tensor(weight).map_or(0, |tensor| tensor.rotated_heads)
}

/// What each frequency is divided by, where that is a tensor in GGUF files, or two.
fn rope_factors(rope: &RopeSpec) -> Vec<(TensorRole, Vec<f32>)> {
    match &rope.scaling {
        RopeScaling::Llama3 { .. } => {
            let plain = RopeSpec {
                scaling: RopeScaling::None,
                ..rope.clone()
            };
            let (plain, scaled) = (frequencies(&plain, 0), frequencies(rope, 0));
            let divisors = plain.iter().zip(&scaled).map(|(p, s)| p / s).collect();
            vec![(TensorRole::RopeFactors, divisors)]
        }
        RopeScaling::Factors(all) => vec![(TensorRole::RopeFactors, all.clone())],
        RopeScaling::LongRope { short, long, .. } => vec![
            (TensorRole::RopeLongFactors, long.clone()),
            (TensorRole::RopeShortFactors, short.clone()),
        ],
        _ => Vec::new(),
    }
}
