//! The metadata of the new file: copied from a GGUF file, or said anew of a Hugging Face folder.

use super::hf_model::HfModel;
use super::recipe::Recipe;
use crate::dense::{DenseLayers, DenseMatrix};
use crate::pooling::StatedPooling;
use crate::spec::{
    AttentionSpec, ExpertRouting, FeedForwardSpec, GqaSpec, LinearAttentionSpec, MlaSpec, MoeSpec,
    NormKind, QkNormSpec, RopeScaling, RopeSpec,
};
use ferrum_formats::chat_template::ChatTemplate;
use ferrum_formats::gguf::{ArrayBuf, Value, Writer};
use ferrum_formats::tokenizer::GgufVocab;
use ferrum_formats::{Gguf, Imatrix, ModelSource};
use ferrum_kernels::{ExpertActivation, ExpertScore, LinearAttentionRule, RopeStyle};
use ferrum_types::{Error, Result};

/// Version of the block formats, `general.quantization_version`.
const QUANTIZATION_VERSION: u32 = 2;

/// Keys that say how a file was made, and so are said anew.
fn is_of_the_old_file(key: &str) -> bool {
    matches!(key, "general.file_type" | "general.quantization_version")
        || key.starts_with("split.")
        || key.starts_with("quantize.imatrix.")
}

/// Sets every key of the new file.
pub(super) fn write(
    out: &mut Writer,
    source: &ModelSource,
    recipe: &Recipe,
    imatrix: Option<(&Imatrix, usize)>,
) -> Result<()> {
    match source {
        ModelSource::Gguf(gguf) => copy(out, gguf)?,
        ModelSource::Hf(folder) => {
            let model = HfModel::read(source, folder)?.with_further_layers();
            general(out, &model)?;
            architecture(out, &model)?;
            rope(out, &model)?;
            windows(out, &model)?;
            if !model.spec.is_causal() {
                set(out, &model, "attention.causal", false)?;
            }
            pooling(out, &model, source)?;
            dense(out, &model, source)?;
            tokenizer(out, &model)?;
        }
    }
    out.set("general.quantization_version", QUANTIZATION_VERSION)?;
    out.set("general.file_type", recipe.file_type)?;
    if let Some((imatrix, used)) = imatrix {
        let file = imatrix.path.file_name().unwrap_or_default();
        out.set("quantize.imatrix.file", &*file.to_string_lossy())?;
        if let Some(dataset) = &imatrix.dataset {
            out.set("quantize.imatrix.dataset", &**dataset)?;
        }
        out.set("quantize.imatrix.entries_count", used as u32)?;
        if let Some(chunks) = imatrix.chunks {
            out.set("quantize.imatrix.chunks_count", chunks)?;
        }
    }
    Ok(())
}

fn copy(out: &mut Writer, gguf: &Gguf) -> Result<()> {
    for (key, value) in gguf.metadata() {
        if !is_of_the_old_file(key) {
            out.set(key, value)?;
        }
    }
    Ok(())
}

fn general(out: &mut Writer, model: &HfModel<'_>) -> Result<()> {
    out.set("general.architecture", model.arch)?;
    out.set("general.type", "model")?;
    let dir = &model.folder.dir;
    // `.` has no name of its own.
    let dir = dir.canonicalize().unwrap_or_else(|_| dir.clone());
    if let Some(name) = dir.file_name().and_then(|name| name.to_str()) {
        out.set("general.name", name)?;
    }
    Ok(())
}

/// Sets `ARCH.name`.
fn set<'v>(
    out: &mut Writer,
    model: &HfModel<'_>,
    name: &str,
    value: impl Into<Value<'v>>,
) -> Result<()> {
    Ok(out.set(&format!("{}.{name}", model.arch), value)?)
}

/// A size as the format has it. Specs are held below 2³⁰ when they are read.
fn size(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}

fn architecture(out: &mut Writer, model: &HfModel<'_>) -> Result<()> {
    let spec = &model.spec;
    let config = &model.folder.config.text_config()?;
    let heads = spec.layers.iter().find_map(|layer| match &layer.attention {
        AttentionSpec::ShortConv(_) | AttentionSpec::Linear(_) => None,
        heads => Some(heads),
    });
    let (Some(layer), Some(attention)) = (spec.layers.first(), heads) else {
        let reason = "no layer has heads, which GGUF files say the sizes of";
        return Err(Error::invalid("quantize", reason));
    };
    let heads = match attention {
        AttentionSpec::Gqa(gqa) => gqa.heads,
        AttentionSpec::Mla(mla) => mla.heads,
        AttentionSpec::ShortConv(_) | AttentionSpec::Linear(_) => 0,
    };
    let inner = match &layer.feed_forward {
        FeedForwardSpec::GatedMlp(mlp) | FeedForwardSpec::Mlp(mlp) => mlp.intermediate,
        // That of layers without experts, which is said though there are none.
        FeedForwardSpec::Moe(moe) => {
            let key = match model.arch {
                "llama4" => "intermediate_size_mlp",
                _ => "intermediate_size",
            };
            config.usize(key)?.unwrap_or(moe.intermediate)
        }
    };
    // As trained: readers scale it themselves.
    let context = config.usize("max_position_embeddings")?;
    let sizes = [
        ("block_count", spec.layers.len()),
        ("context_length", context.unwrap_or(spec.context_length)),
        ("embedding_length", spec.hidden_size),
        ("attention.head_count", heads),
    ];
    for (name, value) in sizes {
        set(out, model, name, size(value))?;
    }
    if model.kept_mtp().is_some() {
        set(out, model, "nextn_predict_layers", 1u32)?;
    }
    if model.arch == "falcon" {
        // Queries, keys and values one kind after the other, as llama.cpp has them.
        set(out, model, "tensor_data_layout", "jploski")?;
    }
    widths(out, model, inner)?;
    match attention {
        AttentionSpec::Gqa(gqa) => grouped_heads(out, model, gqa)?,
        AttentionSpec::Mla(mla) => latent_heads(out, model, mla)?,
        AttentionSpec::ShortConv(_) | AttentionSpec::Linear(_) => {}
    }
    let eps = match spec.norm {
        NormKind::Rms => "attention.layer_norm_rms_epsilon",
        NormKind::Layer { .. } => "attention.layer_norm_epsilon",
    };
    set(out, model, eps, spec.norm_eps)?;
    if matches!(model.arch, "llama" | "llama4") {
        set(out, model, "vocab_size", size(spec.vocab_size))?;
    }
    scales(out, model)?;
    experts(out, model)
}

/// The size of feed-forwards, or a list where layers have different ones.
fn widths(out: &mut Writer, model: &HfModel<'_>, first: usize) -> Result<()> {
    let layers = model.spec.layers.iter().map(|layer| &layer.feed_forward);
    let all = layers.map(|layer| match layer {
        FeedForwardSpec::GatedMlp(mlp) | FeedForwardSpec::Mlp(mlp) => mlp.intermediate,
        FeedForwardSpec::Moe(_) => first,
    });
    let name = "feed_forward_length";
    match all.clone().all(|found| found == first) {
        true => set(out, model, name, size(first)),
        false => {
            let all = all.map(|found| size(found).cast_signed());
            set(out, model, name, &ArrayBuf::from_numbers(all))
        }
    }
}

fn grouped_heads(out: &mut Writer, model: &HfModel<'_>, gqa: &GqaSpec) -> Result<()> {
    kv_heads(out, model, gqa.kv_heads)?;
    if model.arch == "gemma4" {
        return heads_by_window(out, model);
    }
    let hidden = model.spec.hidden_size;
    let usual = [gqa.head_dim, gqa.value_dim].map(|dim| dim * gqa.heads == hidden);
    if model.folder.config.has("head_dim") || usual != [true, true] {
        set(out, model, "attention.key_length", size(gqa.head_dim))?;
        set(out, model, "attention.value_length", size(gqa.value_dim))?;
    }
    check_layers(model, gqa)?;
    if states_all_scales(model) || gqa.scale != 1.0 / (gqa.head_dim as f32).sqrt() {
        set(out, model, "attention.scale", gqa.scale)?;
    }
    match gqa.softcap {
        Some(cap) => set(out, model, "attn_logit_softcapping", cap),
        None => Ok(()),
    }
}

/// Sizes of heads that layers with a window have otherwise than the others, and how many of the last layers share keys
/// and values.
fn heads_by_window(out: &mut Writer, model: &HfModel<'_>) -> Result<()> {
    let layers = model.spec.layers.iter().map(|layer| &layer.attention);
    let all: Vec<_> = layers
        .filter_map(|attention| match attention {
            AttentionSpec::Gqa(gqa) => Some(gqa),
            _ => None,
        })
        .collect();
    for (slides, suffix) in [(false, ""), (true, "_swa")] {
        let mut of_kind = all
            .iter()
            .filter(|gqa| gqa.sliding_window.is_some() == slides);
        let Some(first) = of_kind.next() else {
            continue;
        };
        if of_kind.any(|gqa| gqa.head_dim != first.head_dim) {
            return unsaid(model, "a size of heads for each layer", "one for each kind");
        }
        let rope = first.rope.and_then(|index| model.spec.ropes.get(index));
        let sizes = [
            ("attention.key_length", first.head_dim),
            ("attention.value_length", first.value_dim),
            (
                "rope.dimension_count",
                rope.map_or(first.head_dim, |rope| rope.rot_dim),
            ),
        ];
        for (name, value) in sizes {
            set(out, model, &format!("{name}{suffix}"), size(value))?;
        }
    }
    let shared = all.iter().filter(|gqa| gqa.shared_kv.is_some()).count();
    set(out, model, "attention.shared_kv_layers", size(shared))?;
    let own = model.spec.per_layer.as_ref().map_or(0, |own| own.dim);
    set(out, model, "embedding_length_per_layer_input", size(own))
}

/// Sizes of latent attention, whose maps are absorbed.
fn latent_heads(out: &mut Writer, model: &HfModel<'_>, mla: &MlaSpec) -> Result<()> {
    if model.spec.rope_style() != RopeStyle::Interleaved {
        return unsaid(model, "a rotation of halves", "one of pairs");
    }
    let sizes = [
        ("attention.head_count_kv", 1),
        ("attention.kv_lora_rank", mla.rank),
        ("attention.key_length", mla.latent_dim()),
        ("attention.value_length", mla.rank),
        ("attention.key_length_mla", mla.query_dim()),
        ("attention.value_length_mla", mla.value_dim),
    ];
    for (name, value) in sizes {
        set(out, model, name, size(value))?;
    }
    if let Some(rank) = mla.q_rank {
        set(out, model, "attention.q_lora_rank", size(rank))?;
    }
    // Scores have the square of YaRN's factor of its `mscale_all_dim`, of which files have a tenth.
    let rope = model.spec.ropes.get(mla.rope).map(|rope| &rope.scaling);
    if let Some(RopeScaling::Yarn { factor, .. }) = rope {
        let magnitude = (f64::from(mla.scale) * (mla.query_dim() as f64).sqrt()).sqrt();
        let multiplier = (magnitude - 1.0) / f64::from(*factor).ln();
        if multiplier.abs() > 1e-5 {
            let name = "rope.scaling.yarn_log_multiplier";
            set(out, model, name, multiplier as f32)?;
        }
    }
    Ok(())
}

/// Key and value heads, and the sizes of layers without.
fn kv_heads(out: &mut Writer, model: &HfModel<'_>, heads: usize) -> Result<()> {
    let layers = model.spec.layers.iter().map(|layer| &layer.attention);
    let name = "attention.head_count_kv";
    let all = layers.clone().map(|attention| {
        let heads = match attention {
            AttentionSpec::Gqa(gqa) => gqa.kv_heads,
            // Where readers know otherwise which layers are recurrent, all have this number.
            AttentionSpec::Linear(linear) => match linear.rule {
                LinearAttentionRule::GatedDelta => heads,
                LinearAttentionRule::StateSpace => 0,
            },
            AttentionSpec::Mla(_) | AttentionSpec::ShortConv(_) => 0,
        };
        // Lists are of signed numbers.
        size(heads).cast_signed()
    });
    match all.clone().all(|found| found == size(heads).cast_signed()) {
        true => set(out, model, name, size(heads))?,
        false => set(out, model, name, &ArrayBuf::from_numbers(all))?,
    }
    let mut layers = layers;
    let other = layers.find(|attention| {
        matches!(
            attention,
            AttentionSpec::ShortConv(_) | AttentionSpec::Linear(_)
        )
    });
    match other {
        Some(AttentionSpec::ShortConv(conv)) => {
            set(out, model, "shortconv.l_cache", size(conv.kernel))
        }
        Some(AttentionSpec::Linear(linear)) => recurrent(out, model, linear),
        _ => Ok(()),
    }
}

/// Sizes of linear attention, and which layers have it or whether the others rotate.
fn recurrent(out: &mut Writer, model: &HfModel<'_>, linear: &LinearAttentionSpec) -> Result<()> {
    let sizes = [
        ("ssm.conv_kernel", linear.kernel),
        ("ssm.inner_size", linear.values()),
        ("ssm.state_size", linear.key_dim),
        ("ssm.time_step_rank", linear.value_heads),
        ("ssm.group_count", linear.key_heads),
    ];
    for (name, value) in sizes {
        set(out, model, name, size(value))?;
    }
    let layers = model.spec.layers.iter().map(|layer| &layer.attention);
    match linear.rule {
        LinearAttentionRule::GatedDelta => {
            let all = layers.map(|attention| matches!(attention, AttentionSpec::Linear(_)));
            let all = ArrayBuf::from_numbers(all);
            set(out, model, "attention.recurrent_layers", &all)
        }
        LinearAttentionRule::StateSpace => {
            let mut heads = layers.filter_map(|attention| match attention {
                AttentionSpec::Gqa(gqa) => Some(gqa),
                _ => None,
            });
            let rotates = heads.any(|gqa| gqa.rope.is_some());
            set(out, model, "rope.scaling.finetuned", rotates)
        }
    }
}

fn unsaid(model: &HfModel<'_>, what: &str, expected: &str) -> Result<()> {
    let path = model.folder.config.path().display();
    Err(Error::Model(format!(
        "{path}: {what} has no spelling in GGUF files of architecture {}, expected {expected}",
        model.arch
    )))
}

/// How states become an embedding, where the folder is one of sentence-transformers.
fn pooling(out: &mut Writer, model: &HfModel<'_>, source: &ModelSource) -> Result<()> {
    match StatedPooling::of(source)? {
        StatedPooling::Nothing | StatedPooling::NotPooled(_) => Ok(()),
        StatedPooling::Known(pooling) => set(out, model, "pooling_type", pooling.gguf_number()),
        StatedPooling::Other(found) => unsaid(
            model,
            &format!("{found}, which sentence-transformers has behind this model,"),
            "pooling by mean, cls or lasttoken and nothing else",
        ),
    }
}

/// Sizes of the maps behind pooling, by the names that llama.cpp gives them.
fn dense(out: &mut Writer, model: &HfModel<'_>, source: &ModelSource) -> Result<()> {
    let dense = DenseLayers::of(source, model.spec.hidden_size)?;
    if dense == DenseLayers::default() {
        return Ok(());
    }
    let Some(matrices) = dense.as_gguf().filter(|_| model.arch == "gemma-embedding") else {
        return unsaid(
            model,
            "a module Dense, which sentence-transformers has behind this model,",
            "none, or in EmbeddingGemma two without biases and functions at most",
        );
    };
    for DenseMatrix { name, shape, .. } in matrices {
        let (stem, [outputs, inputs]) = (name.trim_end_matches(".weight"), shape);
        set(out, model, &format!("{stem}_feat_in"), size(inputs))?;
        set(out, model, &format!("{stem}_feat_out"), size(outputs))?;
    }
    Ok(())
}

/// Refuses layers that differ where readers take all to be alike, or know by the architecture how they differ.
fn check_layers(model: &HfModel<'_>, first: &GqaSpec) -> Result<()> {
    for (i, layer) in model.spec.layers.iter().enumerate() {
        let AttentionSpec::Gqa(gqa) = &layer.attention else {
            continue;
        };
        if (gqa.scale, gqa.softcap) != (first.scale, first.softcap) {
            return unsaid(model, "a factor on scores of its own in each layer", "one");
        }
        let rotates = match model.arch {
            "smollm3" => !(i + 1).is_multiple_of(4),
            "cohere2" => gqa.sliding_window.is_some(),
            "llama4" => continue,
            "gpt2" => false,
            // A key says it.
            "granitehybrid" => gqa.rope.is_some(),
            _ => true,
        };
        if gqa.rope.is_some() != rotates {
            let what = "the choice of layers without rotation";
            return unsaid(model, what, "every fourth");
        }
    }
    Ok(())
}

/// Whether files of this architecture state every scale, the usual ones too.
fn states_all_scales(model: &HfModel<'_>) -> bool {
    matches!(model.arch, "granite" | "granitemoe" | "granitehybrid")
}

/// Factors and bounds. Those on embeddings are said only where architectures do not imply them.
fn scales(out: &mut Writer, model: &HfModel<'_>) -> Result<()> {
    let scales = &model.spec.scales;
    if let Some(cap) = scales.logit_softcap {
        set(out, model, "final_logit_softcapping", cap)?;
    }
    let is_granite = states_all_scales(model);
    let values = match is_granite {
        // There, logits are divided by it.
        true => [scales.embedding, scales.residual, 1.0 / scales.logits],
        false => [1.0, scales.residual, scales.logits],
    };
    for (name, scale) in ["embedding_scale", "residual_scale", "logit_scale"]
        .iter()
        .zip(values)
    {
        // Readers of these ask for it, even where it is 1.
        let is_asked = matches!(model.arch, "command-r" | "cohere2") && *name == "logit_scale";
        if is_granite || is_asked || scale != 1.0 {
            set(out, model, name, scale)?;
        }
    }
    Ok(())
}

fn experts(out: &mut Writer, model: &HfModel<'_>) -> Result<()> {
    let Some(moe) = model.spec.experts() else {
        return Ok(());
    };
    let layers = model.spec.layers.iter().map(|layer| &layer.feed_forward);
    let dense = layers
        .clone()
        .take_while(|layer| !matches!(layer, FeedForwardSpec::Moe(_)))
        .count();
    if model.arch == "llama4" {
        set(out, model, "interleave_moe_layer_step", size(dense + 1))?;
    }
    let says_dense = matches!(model.arch, "glm4moe" | "deepseek2");
    let after = layers.skip(dense);
    let mixed = after.filter(|layer| !matches!(layer, FeedForwardSpec::Moe(_)));
    let interleaved = model.arch == "llama4" && is_interleaved(model, dense + 1);
    if !interleaved && (mixed.count() > 0 || dense > 0 && !says_dense) {
        return unsaid(
            model,
            "a model with experts in some layers",
            "experts in all",
        );
    }
    if says_dense {
        set(out, model, "leading_dense_block_count", size(dense))?;
    }
    routing(out, model, moe)?;
    set(out, model, "expert_count", size(moe.experts))?;
    set(out, model, "expert_used_count", size(moe.top_k))?;
    match model.arch {
        // The length of all feed-forwards.
        "llama" | "granitemoe" => Ok(()),
        _ => set(
            out,
            model,
            "expert_feed_forward_length",
            size(moe.intermediate),
        ),
    }
}

/// Whether each `step`th layer, and no other, has experts.
fn is_interleaved(model: &HfModel<'_>, step: usize) -> bool {
    let layers = model.spec.layers.iter().enumerate();
    let mut layers = layers.map(|(i, layer)| (i, &layer.feed_forward));
    layers
        .all(|(i, layer)| matches!(layer, FeedForwardSpec::Moe(_)) == (i + 1).is_multiple_of(step))
}

/// How experts are chosen, and those that all tokens go through.
fn routing(out: &mut Writer, model: &HfModel<'_>, moe: &MoeSpec) -> Result<()> {
    let grouped = matches!(model.arch, "glm4moe" | "deepseek2");
    let taken = match model.arch {
        // Readers take it for granted.
        "qwen2moe" => ExpertRouting::softmax(false),
        "llama4" => ExpertRouting {
            score: ExpertScore::Sigmoid,
            ..ExpertRouting::softmax(false)
        },
        _ => ExpertRouting::softmax(true),
    };
    // Files of GPT-OSS do not say it.
    let activation = match model.arch {
        "gpt-oss" => ExpertActivation::ClampedSwiglu {
            alpha: 1.702,
            limit: 7.0,
        },
        "gemma4" => ExpertActivation::GeluTanh,
        _ => ExpertActivation::Silu,
    };
    if moe.activation != activation {
        return unsaid(model, "another bound of experts", "a swiglu_limit of 7");
    }
    if !grouped && moe.routing != taken {
        let expected = format!("a softmax and norm_topk_prob = {}", taken.renormalize);
        return unsaid(model, "the routing of experts", &expected);
    }
    // Where that has norms of its own, it is the length of the feed-forward.
    let shared = if moe.norms {
        0
    } else {
        moe.shared_intermediate()
    };
    if !grouped {
        return match shared {
            0 => Ok(()),
            _ => set(
                out,
                model,
                "expert_shared_feed_forward_length",
                size(shared),
            ),
        };
    }
    let gating = match moe.routing.score {
        ExpertScore::Softmax => 1u32,
        ExpertScore::Sigmoid => 2,
    };
    set(out, model, "expert_gating_func", gating)?;
    set(out, model, "expert_weights_scale", moe.routing.scale)?;
    set(out, model, "expert_weights_norm", moe.routing.renormalize)?;
    let count = shared / moe.intermediate.max(1);
    set(out, model, "expert_shared_count", size(count))?;
    match moe.routing.groups {
        None => Ok(()),
        Some(groups) => {
            set(out, model, "expert_group_count", size(groups.groups))?;
            set(out, model, "expert_group_used_count", size(groups.top))
        }
    }
}

/// How many frequencies turn by each of a place's four numbers. In a text they are the same number, and files say it
/// nevertheless.
fn position_sections(model: &HfModel<'_>) -> Result<[i32; 4]> {
    let config = model.folder.config.text_config()?;
    let mut stated = None;
    for key in ["rope_parameters", "rope_scaling"] {
        let section = config.section(key)?;
        let sizes = section.map(|section| section.usizes("mrope_section"));
        stated = stated.or(sizes.transpose()?.flatten());
    }
    let stated = stated.unwrap_or_else(|| vec![11, 11, 10]);
    let mut sections = [0; 4];
    for (section, stated) in sections.iter_mut().zip(stated) {
        *section = i32::try_from(stated).unwrap_or(i32::MAX);
    }
    Ok(sections)
}

fn rope(out: &mut Writer, model: &HfModel<'_>) -> Result<()> {
    let Some(rope) = model.spec.ropes.first() else {
        return Ok(());
    };
    let heads = model.spec.layers.iter().map(|layer| &layer.attention);
    let whole = heads.clone().all(|attention| match attention {
        AttentionSpec::Gqa(gqa) => gqa.head_dim == rope.rot_dim,
        AttentionSpec::Mla(_) => false,
        AttentionSpec::ShortConv(_) | AttentionSpec::Linear(_) => true,
    });
    let stated = matches!(model.arch, "llama" | "llama4");
    if stated || !whole && model.arch != "gemma4" {
        set(out, model, "rope.dimension_count", size(rope.rot_dim))?;
    }
    set(out, model, "rope.freq_base", rope.theta)?;
    if matches!(model.arch, "qwen35" | "qwen35moe") {
        let sections = ArrayBuf::from_numbers(position_sections(model)?);
        set(out, model, "rope.dimension_sections", &sections)?;
    }
    let turns = |rope: &&RopeSpec| !matches!(rope.scaling, RopeScaling::Temperature { .. });
    if let Some(local) = model.spec.ropes.get(1).filter(turns) {
        set(out, model, "rope.freq_base_swa", local.theta)?;
    }
    let unsaid = |what: &str| {
        let path = model.folder.config.path().display();
        Err(Error::Model(format!(
            "{path}: RoPE {what} has no spelling in GGUF files, expected none, linear, yarn, llama3 or longrope"
        )))
    };
    match rope.scaling {
        RopeScaling::None => Ok(()),
        // Divisors are a tensor.
        RopeScaling::Llama3 { .. } | RopeScaling::Factors(_) => Ok(()),
        RopeScaling::LongRope {
            attention_factor,
            original_max_position,
            ..
        } => {
            let original = size(original_max_position);
            set(out, model, "rope.scaling.original_context_length", original)?;
            set(out, model, "rope.scaling.attn_factor", attention_factor)
        }
        RopeScaling::Dynamic { .. } => unsaid("scaling of type dynamic"),
        RopeScaling::Temperature { .. } => Ok(()),
        RopeScaling::Linear { factor } => {
            set(out, model, "rope.scaling.type", "linear")?;
            set(out, model, "rope.scaling.factor", factor)
        }
        RopeScaling::Yarn {
            truncate: false, ..
        } if model.arch != "gpt-oss" => unsaid("parameter truncate = false"),
        RopeScaling::Yarn {
            factor,
            attention_factor,
            beta_fast,
            beta_slow,
            original_max_position,
            ..
        } => {
            set(out, model, "rope.scaling.type", "yarn")?;
            set(out, model, "rope.scaling.factor", factor)?;
            let original = size(original_max_position);
            set(out, model, "rope.scaling.original_context_length", original)?;
            // What readers take when nothing is said.
            let magnitude = 1.0 + 0.1 * f64::from(factor).max(1.0).ln();
            if attention_factor != magnitude as f32 {
                set(
                    out,
                    model,
                    "rope.scaling.yarn_attn_factor",
                    attention_factor,
                )?;
            }
            set(out, model, "rope.scaling.yarn_beta_fast", beta_fast)?;
            set(out, model, "rope.scaling.yarn_beta_slow", beta_slow)
        }
    }
}

/// Chunks of Llama 4, of which files say nothing but that there are none.
fn chunks(out: &mut Writer, model: &HfModel<'_>) -> Result<()> {
    let layers = model.spec.layers.iter().enumerate();
    let gqas: Vec<_> = layers
        .filter_map(|(i, layer)| match &layer.attention {
            AttentionSpec::Gqa(gqa) => Some((i, gqa)),
            _ => None,
        })
        .collect();
    let norm = match model.spec.experts().map(|moe| moe.experts) {
        Some(128) => QkNormSpec::None,
        _ => QkNormSpec::Unweighted,
    };
    if gqas
        .iter()
        .all(|(_, gqa)| gqa.rope.is_some() && gqa.sliding_window.is_none() && gqa.qk_norm == norm)
    {
        return set(out, model, "attention.sliding_window", 0u32);
    }
    let usual = RopeScaling::Temperature {
        floor: 8192.0,
        scale: 0.1,
    };
    let fits = gqas.iter().all(|(i, gqa)| match (i + 1) % 4 {
        0 => {
            let factor = gqa
                .query_scale
                .and_then(|index| model.spec.ropes.get(index));
            gqa.rope.is_none()
                && gqa.sliding_window.is_none()
                && factor.is_some_and(|factor| factor.scaling == usual)
        }
        _ => gqa.rope.is_some() && gqa.sliding_window == Some(8192) && gqa.qk_norm == norm,
    });
    match fits {
        true => Ok(()),
        false => unsaid(
            model,
            "the choice of layers, or of chunks and factors",
            "chunks of 8192 tokens in three of four layers",
        ),
    }
}

fn windows(out: &mut Writer, model: &HfModel<'_>) -> Result<()> {
    if model.arch == "llama4" {
        return chunks(out, model);
    }
    let layers = model.spec.layers.iter().map(|layer| &layer.attention);
    let windows: Vec<_> = layers
        .filter_map(|attention| match attention {
            AttentionSpec::Gqa(gqa) => Some(gqa.sliding_window),
            AttentionSpec::Mla(_) | AttentionSpec::ShortConv(_) | AttentionSpec::Linear(_) => None,
        })
        .collect();
    let Some(window) = windows.iter().copied().flatten().next() else {
        return Ok(());
    };
    // Those that reach to both sides are said as all their tokens but the one that sees them.
    let window = match model.spec.is_causal() {
        true => window,
        // 0 would mean that there is none.
        false if window == 1 => return unsaid(model, "a window of one token", "a longer one"),
        false => 2 * (window - 1),
    };
    set(out, model, "attention.sliding_window", size(window))?;
    if windows.iter().any(Option::is_none) {
        let pattern = ArrayBuf::from_numbers(windows.iter().map(Option::is_some));
        set(out, model, "attention.sliding_window_pattern", &pattern)?;
    }
    Ok(())
}

fn tokenizer(out: &mut Writer, model: &HfModel<'_>) -> Result<()> {
    let dir = &model.folder.dir;
    let said = |e: String| Error::Model(e);
    let vocab = GgufVocab::from_hf_dir(dir, model.spec.vocab_size);
    let mut vocab = vocab.map_err(|e| said(e.to_string()))?;
    let template = ChatTemplate::from_hf_dir(dir).map_err(|e| said(e.to_string()))?;
    vocab.chat_template = template.and_then(|t| t.source(false).map(str::to_owned));
    Ok(vocab.write(out)?)
}
