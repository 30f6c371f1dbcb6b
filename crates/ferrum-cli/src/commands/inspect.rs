//! `ferrum inspect`: what a file holds, and what a run takes.

mod tasks;

use crate::args::InspectArgs;
use crate::failure::Outcome;
use crate::load_model;
use crate::process;
use crate::ui::{human_bytes, show, show_json};
use ferrum_engine::{BackendKind, BackendOptions, KvDtype, PlacedStage, Placement};
use ferrum_formats::tokenizer::Tokenizer;
use ferrum_formats::{ModelSource, QuantizationConfig, TensorSource};
use ferrum_kernels::{LinearAttentionRule, RopeStyle};
use ferrum_models::{
    AttentionSpec, DecoderSpec, FeedForwardSpec, GqaSpec, LayerForm, MemoryPlan, Model, ModelKind,
    QkNormSpec, RunnerConfig,
};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fmt::Write;

/// What a run touches for the first time and this command never does: the code of the kernels,
/// stacks of threads. Measured: 7.5 to 8.4 MB in 36 runs of three builds, and 9.0 MB once on another machine.
const FIRST_TOUCHED: u64 = 8 << 20;

pub(crate) fn inspect(args: &InspectArgs) -> Outcome {
    let model = match args.model.path() {
        Some(path) => {
            let mut source = load_model::source(path, &args.hub)?;
            if !args.asks_for_a_plan() {
                source = match tasks::inspect(source, args.json)? {
                    Some(source) => source,
                    None => return Ok(()),
                };
            }
            load_model::generator(source)?
        }
        None => load_model::model(None, &args.hub)?,
    };
    // A model without a usable tokenizer still runs on token ids, so this is a remark, not an error.
    let tokenizer = load_model::tokenizer_of(&model);
    let context = load_model::context_length(&model, args.cache.context, 0);
    let kv = load_model::kv_dtype(&model, &args.cache);
    // A run holds what this process holds by now, device drivers included, less the pages of the file.
    let options = BackendOptions::default();
    let layers = args.layers.as_ref();
    let placement = Placement::for_model(BackendKind::Auto, layers, &model, options)?;
    model.tensors().release();
    let config = placement.single(context);
    let mut plan = placement.memory_plan(&model, &config, kv);
    let stages = Stages {
        plans: placement.stage_plans(&model, &config, kv),
        placement: &placement,
    };
    let ranks = Ranks::plan(args, &model, &placement, (&config, kv))?;
    plan.program = process::memory().map_or(0, |memory| memory.resident) + FIRST_TOUCHED;
    if args.model.path().is_none() {
        // Weights inside the program cannot be given back once they are loaded.
        plan.program += model.tensors().total_bytes();
    }
    if args.json {
        let tokenizer = tokenizer.as_ref().ok();
        let mut json = as_json(&model, tokenizer, context, kv, &plan)?;
        json["memory_plan"]["stages"] = stages.json();
        if let Some(ranks) = &ranks {
            json["memory_plan"]["ranks"] = ranks.json();
        }
        return show_json(&json);
    }
    let mut text = describe_spec(&model);
    text += &describe_tensors(model.tensors());
    let unused = model.unused_tensors();
    if !unused.is_empty() {
        let names = load_model::first_names(&unused, 20);
        let _ = writeln!(text, "unused        {}: {names}", unused.len());
    }
    match &tokenizer {
        Ok(tokenizer) => text += &describe_tokenizer(tokenizer),
        Err(failure) => _ = writeln!(text, "tokenizer     none: {failure}"),
    }
    let template = has_template(&model, tokenizer.as_ref().ok())?;
    let _ = writeln!(
        text,
        "chat template {}",
        if template { "yes" } else { "no" }
    );
    let _ = writeln!(
        text,
        "\nmemory for a context of {context} tokens, KV cache in {kv}"
    );
    for (name, bytes) in [
        ("weights", plan.weights),
        ("KV per token", plan.kv_per_token),
        ("KV cache", plan.kv),
        ("states", plan.states),
        ("scratch", plan.scratch),
        ("program", plan.program),
        ("peak", plan.peak()),
    ] {
        if name == "states" && bytes == 0 {
            continue;
        }
        let _ = writeln!(text, "  {name:<12} {:>10}", human_bytes(bytes));
    }
    text += &stages.text();
    text += &ranks.map_or(String::new(), |ranks| ranks.text());
    show(&text)
}

/// What each of several ranks takes.
struct Ranks(Vec<MemoryPlan>);

impl Ranks {
    /// `None` where there is one.
    fn plan(
        args: &InspectArgs,
        model: &Model,
        placement: &Placement,
        (config, kv): (&RunnerConfig, KvDtype),
    ) -> Outcome<Option<Self>> {
        let ranks = usize::from(args.tensor_parallel);
        if ranks == 1 {
            return Ok(None);
        }
        let device = placement.last_device();
        let plans = device.rank_plans(model, config, (kv, ranks))?;
        Ok(Some(Self(plans)))
    }

    fn text(&self) -> String {
        let mut text = String::from("\non each rank\n");
        for (rank, plan) in self.0.iter().enumerate() {
            let _ = writeln!(
                text,
                "  rank {rank:<7} weights {}, KV cache {}, scratch {}",
                human_bytes(plan.weights),
                human_bytes(plan.kv),
                human_bytes(plan.scratch)
            );
        }
        text
    }

    fn json(&self) -> Value {
        let ranks = self.0.iter().enumerate().map(|(rank, plan)| {
            json!({
                "rank": rank,
                "weights_bytes": plan.weights,
                "kv_bytes": plan.kv,
                "scratch_bytes": plan.scratch,
            })
        });
        ranks.collect()
    }
}

/// What each stage of a run takes.
struct Stages<'a> {
    placement: &'a Placement,
    plans: Vec<MemoryPlan>,
}

impl Stages<'_> {
    fn each(&self) -> impl Iterator<Item = (&PlacedStage, &MemoryPlan)> {
        self.placement.stages().zip(&self.plans)
    }

    /// A line for each; nothing where there is one.
    fn text(&self) -> String {
        let mut text = String::new();
        if self.placement.is_whole() {
            return text;
        }
        text += "\nof that on each device\n";
        for (PlacedStage { device, stage }, plan) in self.each() {
            let info = device.info();
            let device = format!("{} {}", info.backend, info.ordinal);
            let _ = writeln!(
                text,
                "  {device:<12} layers {stage}: weights {}, KV cache {}, scratch {}",
                human_bytes(plan.weights),
                human_bytes(plan.kv),
                human_bytes(plan.scratch)
            );
        }
        text
    }

    fn json(&self) -> Value {
        let stages = self.each().map(|(PlacedStage { device, stage }, plan)| {
            let (info, layers) = (device.info(), stage.layers());
            json!({
                "backend": info.backend,
                "device": info.ordinal,
                "first_layer": layers.start,
                "last_layer": layers.end - 1,
                "weights_bytes": plan.weights,
                "kv_bytes": plan.kv,
                "scratch_bytes": plan.scratch,
            })
        });
        stages.collect()
    }
}

fn has_template(model: &Model, tokenizer: Option<&Tokenizer>) -> Outcome<bool> {
    match tokenizer {
        Some(tokenizer) => Ok(load_model::template_of(model, tokenizer)?.is_some()),
        None => Ok(false),
    }
}

fn format_name(source: &ModelSource) -> String {
    match source {
        ModelSource::Gguf(gguf) => format!("GGUF v{}", gguf.version()),
        ModelSource::Hf(_) => "Hugging Face folder".into(),
    }
}

/// Layers that are alike, as `(count, what they are)`, in order of first appearance.
fn layer_groups(spec: &DecoderSpec) -> Vec<(usize, String)> {
    let mut groups: Vec<(usize, String)> = Vec::new();
    for layer in &spec.layers {
        let (feed_forward, mlp_bias) = match &layer.feed_forward {
            FeedForwardSpec::GatedMlp(mlp) => {
                let (size, activation) = (mlp.intermediate, mlp.activation);
                (format!("gated MLP of {size} ({activation})"), mlp.bias)
            }
            FeedForwardSpec::Mlp(mlp) => {
                let (size, activation) = (mlp.intermediate, mlp.activation);
                (format!("MLP of {size} ({activation})"), mlp.bias)
            }
            FeedForwardSpec::Moe(moe) => {
                let (top_k, all, size) = (moe.top_k, moe.experts, moe.intermediate);
                let shared = moe.shared.map(|shared| shared.intermediate);
                let shared = shared.map_or(String::new(), |n| format!(" and a shared one of {n}"));
                (
                    format!("{top_k} of {all} experts of {size}{shared}"),
                    moe.bias,
                )
            }
        };
        let (attention, mut notes) = match &layer.attention {
            AttentionSpec::Gqa(gqa) => describe_gqa(gqa),
            AttentionSpec::Mla(mla) => (
                format!(
                    "{} heads of {} + {} over latent rows of {}",
                    mla.heads, mla.nope_dim, mla.rope_dim, mla.rank
                ),
                Vec::new(),
            ),
            AttentionSpec::ShortConv(conv) => (
                format!("short convolution over {} tokens", conv.kernel),
                Vec::new(),
            ),
            AttentionSpec::Linear(linear) => {
                let rule = match linear.rule {
                    LinearAttentionRule::GatedDelta => "gated delta rule",
                    LinearAttentionRule::StateSpace => "state space",
                };
                (
                    format!(
                        "{rule} of {} heads of {} x {} over {} of keys, convolution over {} tokens",
                        linear.value_heads,
                        linear.key_dim,
                        linear.value_dim,
                        linear.key_heads,
                        linear.kernel
                    ),
                    Vec::new(),
                )
            }
        };
        if mlp_bias {
            notes.push("MLP bias".to_owned());
        }
        notes.extend(match layer.form {
            LayerForm::PreNorm => None,
            LayerForm::PostNorm => Some("norms behind both".to_owned()),
            LayerForm::Sandwich => Some("norms before and behind both".to_owned()),
            LayerForm::Parallel { .. } => Some("in parallel".to_owned()),
        });
        let text = [vec![attention, feed_forward], notes].concat().join(", ");
        match groups.iter_mut().find(|(_, known)| *known == text) {
            Some(group) => group.0 += 1,
            None => groups.push((1, text)),
        }
    }
    groups
}

/// The heads of a layer, and what is said of them behind its feed-forward.
fn describe_gqa(gqa: &GqaSpec) -> (String, Vec<String>) {
    let heads = format!(
        "{} heads, {} kv heads of {}",
        gqa.heads, gqa.kv_heads, gqa.head_dim
    );
    let values = gqa.value_dim;
    let notes = [
        (values != gqa.head_dim).then(|| format!("values of {values}")),
        match gqa.qk_norm {
            QkNormSpec::None => None,
            QkNormSpec::Heads => Some("q/k norm".to_owned()),
            QkNormSpec::Unweighted => Some("q/k norm without weights".to_owned()),
            QkNormSpec::LayerHeads => Some("q/k layer norm".to_owned()),
            QkNormSpec::LayerEach => Some("q/k layer norm for each head".to_owned()),
            QkNormSpec::Projection => Some("q/k norm over all heads".to_owned()),
        },
        gqa.qkv_bias.then(|| "qkv bias".to_owned()),
        gqa.out_bias.then(|| "output bias".to_owned()),
        gqa.sinks.then(|| "sinks".to_owned()),
        gqa.shared_kv
            .map(|owner| format!("keys and values of layer {owner}")),
        gqa.keys_are_values.then(|| "values from keys".to_owned()),
        gqa.value_norm.then(|| "v norm".to_owned()),
        (!gqa.causal).then(|| "bidirectional".to_owned()),
        gqa.sliding_window.map(|window| match gqa.chunked {
            true => format!("chunks of {window}"),
            false => format!("window of {window}"),
        }),
        gqa.query_scale
            .map(|_| "temperature by position".to_owned()),
        gqa.softcap.map(|cap| format!("scores up to {cap}")),
        match gqa.rope {
            None => Some("no rope".to_owned()),
            Some(0) => None,
            Some(other) => Some(format!("rope {}", other + 1)),
        },
    ];
    (heads, notes.into_iter().flatten().collect())
}

/// How elements of a head pair up for rotation.
fn style_name(style: RopeStyle) -> &'static str {
    match style {
        RopeStyle::HalfSplit => "half-split",
        RopeStyle::Interleaved => "interleaved",
    }
}

fn describe_spec(model: &Model) -> String {
    let spec = &model.spec;
    let mut text = String::new();
    let file = model.tensors().path_hint().display();
    let _ = writeln!(
        text,
        "file          {file} ({})",
        format_name(&model.source)
    );
    let _ = writeln!(text, "architecture  {}", model.family.name);
    if let Some(scheme) = quantization(model) {
        let _ = writeln!(text, "quantisation  {scheme}");
    }
    let _ = writeln!(text, "parameters    {}", parameters(model));
    let _ = writeln!(text, "hidden size   {}", spec.hidden_size);
    let tied = match (model.has_head(), spec.tie_embeddings) {
        (false, _) => ", no output projection",
        (true, true) => ", tied embeddings",
        (true, false) => "",
    };
    let _ = writeln!(text, "vocabulary    {}{tied}", spec.vocab_size);
    let _ = writeln!(text, "context       {}", spec.context_length);
    for (count, group) in layer_groups(spec) {
        let _ = writeln!(text, "layers        {count} × {group}");
    }
    for (index, rope) in spec.ropes.iter().enumerate() {
        let name = match index {
            0 => "rope".to_owned(),
            other => format!("rope {}", other + 1),
        };
        let _ = writeln!(
            text,
            "{name:13} base {}, {} elements, {}, scaling {}",
            rope.theta,
            rope.rot_dim,
            style_name(rope.style),
            rope.scaling
        );
    }
    if let Some(rows) = spec.learned_positions {
        let _ = writeln!(text, "positions     {rows}, learned");
    }
    text
}

/// (tensors, bytes) of each dtype.
fn dtypes(tensors: &dyn TensorSource) -> BTreeMap<String, (usize, u64)> {
    let mut types = BTreeMap::new();
    for info in tensors.infos() {
        let entry: &mut (usize, u64) = types.entry(info.dtype.name().to_owned()).or_default();
        entry.0 += 1;
        entry.1 += info.byte_len as u64;
    }
    types
}

/// The scheme of a quantised Hugging Face checkpoint.
fn quantization(model: &Model) -> Option<&QuantizationConfig> {
    match &model.source {
        ModelSource::Gguf(_) => None,
        ModelSource::Hf(folder) => folder.quantization.as_ref(),
    }
}

/// Numbers in the file; where several share a word, those that the model's shape asks for.
fn parameters(model: &Model) -> u64 {
    if quantization(model).is_some() {
        return model.parameters();
    }
    numbers(model.tensors())
}

/// Numbers of all tensors.
fn numbers(tensors: &dyn TensorSource) -> u64 {
    tensors.infos().map(|info| info.elements() as u64).sum()
}

fn describe_tensors(tensors: &dyn TensorSource) -> String {
    let total = tensors.infos().count();
    let types = dtypes(tensors).into_iter();
    let types: Vec<_> = types
        .map(|(name, (n, bytes))| format!("{n} {name} ({})", human_bytes(bytes)))
        .collect();
    format!("tensors       {total}: {}\n", types.join(", "))
}

fn describe_tokenizer(tokenizer: &Tokenizer) -> String {
    let name = |id: Option<u32>| match id {
        Some(id) => format!("{id} {:?}", tokenizer.token_text(id).unwrap_or_default()),
        None => "none".into(),
    };
    let eos: Vec<_> = tokenizer
        .eos_ids()
        .iter()
        .map(|&id| name(Some(id)))
        .collect();
    format!(
        "tokenizer     {}, {} tokens, bos {}, eos {}\n",
        tokenizer.kind(),
        tokenizer.vocab_size(),
        name(tokenizer.bos()),
        if eos.is_empty() {
            "none".into()
        } else {
            eos.join(" ")
        }
    )
}

fn as_json(
    model: &Model,
    tokenizer: Option<&Tokenizer>,
    context: usize,
    kv: KvDtype,
    plan: &MemoryPlan,
) -> Outcome<Value> {
    let spec = &model.spec;
    let groups = layer_groups(spec);
    let layers: Vec<_> = groups
        .into_iter()
        .map(|(count, what)| json!({"count": count, "what": what}))
        .collect();
    let mut ropes = spec.ropes.iter().map(|rope| {
        json!({
            "theta": rope.theta,
            "rot_dim": rope.rot_dim,
            "style": style_name(rope.style),
            "scaling": rope.scaling.to_string(),
        })
    });
    let template = has_template(model, tokenizer)?;
    let tokenizer = tokenizer.map(|t| {
        json!({
            "kind": t.kind().to_string(),
            "vocab_size": t.vocab_size(),
            "bos": t.bos(),
            "eos": t.eos_ids(),
        })
    });
    Ok(json!({
        "file": model.tensors().path_hint().display().to_string(),
        "format": format_name(&model.source),
        "architecture": model.family.name,
        "kind": kind_name(ModelKind::Decoder),
        "quantization": quantization(model).map(QuantizationConfig::to_string),
        "parameters": parameters(model),
        "spec": {
            "vocab_size": spec.vocab_size,
            "hidden_size": spec.hidden_size,
            "context_length": spec.context_length,
            "layers": spec.layers.len(),
            "layer_groups": layers,
            "norm_eps": spec.norm_eps,
            "tie_embeddings": spec.tie_embeddings && model.has_head(),
            "output_projection": model.has_head(),
            "causal": spec.is_causal(),
            "rope": ropes.next(),
            "other_ropes": ropes.collect::<Vec<_>>(),
        },
        "tokenizer": tokenizer,
        "chat_template": template,
        "memory_plan": {
            "context": context,
            "kv_dtype": kv.to_string(),
            "weights_bytes": plan.weights,
            "kv_bytes_per_token": plan.kv_per_token,
            "kv_bytes": plan.kv,
            "state_bytes": plan.states,
            "scratch_bytes": plan.scratch,
            "program_bytes": plan.program,
            "peak_bytes": plan.peak(),
        },
        "tensors": tensors_json(model.tensors()),
        "unused_tensors": model.unused_tensors(),
    }))
}

/// What a model is, as a program reads it.
fn kind_name(kind: ModelKind) -> &'static str {
    match kind {
        ModelKind::Decoder => "decoder",
        ModelKind::DraftHead => "draft_head",
        ModelKind::Encoder => "encoder",
        ModelKind::Speech => "speech",
        ModelKind::Clip => "clip",
    }
}

fn tensors_json(tensors: &dyn TensorSource) -> Value {
    let tensors = tensors.infos().map(|t| {
        json!({
            "name": t.name, "shape": t.shape, "dtype": t.dtype.name(), "bytes": t.byte_len,
        })
    });
    tensors.collect()
}
