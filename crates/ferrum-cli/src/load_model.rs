//! From a path, the name of a hub's model, or nothing (the demo model) to what a command needs.

use crate::args::{AdapterArgs, CacheArgs, HubArgs, PlacementArgs, WeightCacheArgs};
use crate::demo_model::{DEMO, demo};
use crate::failure::{Failure, Outcome};
use crate::ui::{self, Progress};
use crate::weight_cache;
use crate::{hub, input, ranks};
use ferrum_engine::{
    CacheWriter, DraftHeadLoad, KvDtype, LoadedParts, MemoryShare, Placement, Session, StepRunner,
};
use ferrum_formats::chat_template::ChatTemplate;
use ferrum_formats::hub::DownloadScope;
use ferrum_formats::kv_blocks::KvBlockKey;
use ferrum_formats::tokenizer::Tokenizer;
use ferrum_formats::{Gguf, LoraFolder, ModelSource, Shown};
use ferrum_models::{Model, ModelKind, RunnerConfig, read_model};
use ferrum_types::TokenId;
use std::collections::BTreeSet;
use std::path::Path;

/// Longest context that is allocated by default.
const DEFAULT_CONTEXT: usize = 4096;

/// The model at `path` or of that name, understood but not loaded.
pub(crate) fn model(path: Option<&Path>, hub: &HubArgs) -> Outcome<Model> {
    let source = match path {
        Some(path) => source(path, hub)?,
        None => ModelSource::Gguf(demo()?),
    };
    generator(source)
}

/// Refuses a model with bidirectional attention, which makes embeddings alone.
pub(crate) fn check_causal(model: &Model) -> Outcome {
    match model.spec.is_causal() {
        true => Ok(()),
        false => Err(Failure::new(format!(
            "the model ({}) makes embeddings alone: its attention is bidirectional, so that it cannot generate\nhint: ferrum embed and ferrum serve run it",
            model.family.name
        ))),
    }
}

/// A model that is to generate text or give logits, with a note on stderr if it has no output projection.
pub(crate) fn generator(source: ModelSource) -> Outcome<Model> {
    let model = read_model(source)?;
    if !model.has_head() {
        ui::say_once(
            "note: the checkpoint has no lm_head.weight: its embeddings are valid, generated text and logits are not",
        );
    }
    Ok(model)
}

/// A fingerprint of the model's files, which changes when a file does.
pub(crate) fn fingerprint(model: &Model) -> String {
    match model.source.identities() {
        Some(files) => serde_json::to_string(&files).unwrap_or_default(),
        None => format!("demo {:?}", KvBlockKey::root(DEMO, b"")),
    }
}

/// The files at `path` or of that name.
pub(crate) fn source(path: &Path, hub: &HubArgs) -> Outcome<ModelSource> {
    Ok(ModelSource::open(hub::locate(
        path,
        hub,
        DownloadScope::Model,
    )?)?)
}

/// As [`source`], of a model of one kind.
pub(crate) fn source_of(kind: ModelKind, path: &Path, hub: &HubArgs) -> Outcome<ModelSource> {
    let source = source(path, hub)?;
    kind.check(&source)?;
    Ok(source)
}

/// The tokenizer of an open model.
pub(crate) fn tokenizer_of(model: &Model) -> Outcome<Tokenizer> {
    let tokenizer = match &model.source {
        ModelSource::Gguf(gguf) => Tokenizer::from_gguf(gguf)?,
        ModelSource::Hf(folder) => Tokenizer::from_hf_dir(&folder.dir)?,
    };
    for warning in tokenizer.warnings() {
        ui::say_once(&format!("warning: {warning}"));
    }
    Ok(tokenizer)
}

/// The chat template of an open model, if it has one.
pub(crate) fn template_of(model: &Model, tokenizer: &Tokenizer) -> Outcome<Option<ChatTemplate>> {
    Ok(match &model.source {
        ModelSource::Gguf(gguf) => ChatTemplate::from_gguf(gguf, tokenizer)?,
        ModelSource::Hf(folder) => ChatTemplate::from_hf_dir(&folder.dir)?,
    })
}

/// A tokenizer from a model, a vocabulary-only GGUF file or a folder with tokenizer files.
pub(crate) fn tokenizer(path: Option<&Path>, hub: &HubArgs) -> Outcome<Tokenizer> {
    let path = path
        .map(|path| hub::locate(path, hub, DownloadScope::Tokenizer))
        .transpose()?;
    Ok(match path.as_deref() {
        None => Tokenizer::from_gguf(&demo()?)?,
        Some(path) if path.is_dir() => Tokenizer::from_hf_dir(path)?,
        // What stands beside the file belongs to it.
        Some(path)
            if path
                .file_name()
                .is_some_and(|name| name == "tokenizer.json") =>
        {
            let beside = path.parent().filter(|dir| !dir.as_os_str().is_empty());
            Tokenizer::from_hf_dir(beside.unwrap_or(Path::new(".")))?
        }
        Some(path) => Tokenizer::from_gguf(&Gguf::open(path)?)?,
    })
}

/// A chat template from a model, a folder with tokenizer files or a `.jinja` file.
/// `special` is what a bare `.jinja` file has no other source for: names and texts of tokens.
pub(crate) fn template(
    path: Option<&Path>,
    hub: &HubArgs,
    special: impl IntoIterator<Item = (&'static str, String)>,
) -> Outcome<ChatTemplate> {
    let of_gguf = |gguf: &Gguf| -> Outcome<Option<ChatTemplate>> {
        Ok(ChatTemplate::from_gguf(gguf, &Tokenizer::from_gguf(gguf)?)?)
    };
    let path = path
        .map(|path| hub::locate(path, hub, DownloadScope::Tokenizer))
        .transpose()?;
    let path = path.as_deref();
    let found = match path {
        None => of_gguf(&demo()?)?,
        Some(path) if path.is_dir() => ChatTemplate::from_hf_dir(path)?,
        Some(path)
            if path
                .extension()
                .is_some_and(|e| e == "jinja" || e == "jinja2") =>
        {
            let source = input::read_json_text(path)?;
            let template = ChatTemplate::from_source(&source, special);
            Some(template.map_err(|e| Failure::new(format!("{}: {e}", path.display())))?)
        }
        Some(path) => of_gguf(&Gguf::open(path)?)?,
    };
    found.ok_or_else(|| {
        let name = path.map_or("the demo model".into(), |p| p.display().to_string());
        Failure::new(format!(
            "{name} has no chat template\nhint: give a .jinja file as MODEL"
        ))
    })
}

/// The context length to allocate: the requested one, else enough for `tokens`, within the model's.
pub(crate) fn context_length(model: &Model, asked: Option<u32>, tokens: usize) -> usize {
    match asked {
        Some(n) => checked_context_length(model, n as usize),
        None => model.spec.context_length.min(tokens.max(DEFAULT_CONTEXT)),
    }
}

/// A context length of `tokens`, with a note on stderr if it exceeds the model's.
pub(crate) fn checked_context_length(model: &Model, tokens: usize) -> usize {
    let most = model.spec.context_length;
    if tokens > most {
        ui::say(&format!(
            "note: {tokens} tokens of context, and the model was made for {most}"
        ));
    }
    tokens
}

/// The element of the KV cache: what was asked for, else what fits the model.
pub(crate) fn kv_dtype(model: &Model, cache: &CacheArgs) -> KvDtype {
    cache.kv_dtype.unwrap_or_else(|| KvDtype::for_model(model))
}

/// Opens the devices for a model.
pub(crate) fn placement(args: &PlacementArgs, model: &Model) -> Outcome<Placement> {
    if let Some(placement) = ranks::place(args, model)? {
        return Ok(placement);
    }
    let (kind, options) = (args.device.backend, args.device.options());
    Ok(match args.gpu_layers {
        Some(layers) => {
            let share = MemoryShare::alone(args.memory.gpu_memory_utilization);
            Placement::with_gpu_layers(layers, kind, model, share, options)?
        }
        None => Placement::for_model(kind, args.layers.as_ref(), model, options)?,
    })
}

/// A model on a device.
pub(crate) struct Loaded {
    pub(crate) session: Session,
    /// A runner of its draft head, where one was loaded.
    pub(crate) head: Option<Box<dyn StepRunner>>,
    /// What the cache of packed weights did for it, where there is one.
    pub(crate) kept: Option<CacheWriter>,
}

impl Loaded {
    /// Writes what is not written yet of the packed weights, if they are to be kept.
    pub(crate) fn finish(self) {
        if let Some(kept) = self.kept {
            weight_cache::finish(kept);
        }
    }
}

/// Opens the devices and loads the model onto them, with a progress bar on a terminal.
pub(crate) fn load(
    model: &Model,
    (device, weights): (&PlacementArgs, &WeightCacheArgs),
    kv: KvDtype,
    sizes: impl FnOnce(&Placement) -> RunnerConfig,
) -> Outcome<(Loaded, Placement)> {
    let placement = placement(device, model)?;
    let sizes = (sizes(&placement), kv);
    let loaded = load_on(&placement, weights, model, sizes, None)?;
    Ok((loaded, placement))
}

/// [`load`], with an adapter beside the weights.
pub(crate) fn load_adapted(
    model: &Model,
    (device, weights): (&PlacementArgs, &WeightCacheArgs),
    adapter: &AdapterArgs,
    config: RunnerConfig,
    kv: KvDtype,
) -> Outcome<(Loaded, Placement)> {
    load_sized(model, (device, weights), adapter, kv, |_| config)
}

/// [`load_adapted`], with sizes that depend on what the devices have room for.
pub(crate) fn load_sized(
    model: &Model,
    (device, weights): (&PlacementArgs, &WeightCacheArgs),
    adapter: &AdapterArgs,
    kv: KvDtype,
    sizes: impl FnOnce(&Placement) -> RunnerConfig,
) -> Outcome<(Loaded, Placement)> {
    // A wrong folder fails before a large model is loaded.
    let folder = adapter.lora.as_ref().map(LoraFolder::open).transpose()?;
    let placement = placement(device, model)?;
    let sizes = (sizes(&placement), kv);
    let mut loaded = load_on(&placement, weights, model, sizes, None)?;
    if let Some(folder) = &folder {
        loaded.session.use_adapter(folder)?;
    }
    Ok((loaded, placement))
}

/// Says which tensors of the file the model does without: a bias or a norm that is left out changes every answer.
fn warn_of_unused(model: &Model) {
    let unused = model.unused_tensors();
    if !unused.is_empty() {
        ui::say_once(&format!(
            "warning: {} does not use {} of the tensors in {}, so answers may be wrong: {}",
            model.family.name,
            unused.len(),
            model.tensors().path_hint().display(),
            first_names(&unused, 3)
        ));
    }
}

/// At most `most` names, and how many there are beside them.
pub(crate) fn first_names(names: &[&str], most: usize) -> String {
    let shown = names.iter().take(most);
    let shown: Vec<_> = shown.map(|name| Shown(name).to_string()).collect();
    match names.len().saturating_sub(most) {
        0 => shown.join(", "),
        more => format!("{} and {more} more", shown.join(", ")),
    }
}

/// Loads the model onto open devices, and its draft head if there is one, with a progress bar on a terminal.
pub(crate) fn load_on(
    placement: &Placement,
    weights: &WeightCacheArgs,
    model: &Model,
    sizes: (RunnerConfig, KvDtype),
    head: Option<DraftHeadLoad<'_>>,
) -> Outcome<Loaded> {
    if !placement.is_whole() {
        ui::detail(&format!("note: the layers are on {placement}"));
    }
    warn_of_unused(model);
    let dequantized = placement.dequantized_types(model);
    if !dequantized.is_empty() {
        let to = placement
            .dequantized_dtypes(model)
            .map(|dtype| dtype.to_string());
        let to: Vec<_> = to.collect::<BTreeSet<_>>().into_iter().collect();
        let (types, to) = (dequantized.join(", "), to.join(" or "));
        let note = format!("note: {types} weights are dequantised to {to} at load");
        // Where the weights fit the processor's caches anyway, that costs nothing worth a line.
        match model.keeps_blocks() {
            true => ui::say_once(&note),
            false => ui::detail(&note),
        }
    }
    let cache = weight_cache::of(weights);
    let prepared = placement.prepare(model, sizes, cache.as_ref());
    if let Some(shortage) = prepared.memory_shortage() {
        weight_cache::tell_shortage(shortage);
    }
    let mut bar = Progress::bytes("loading");
    let LoadedParts {
        session,
        draft_head: head,
        kept,
    } = prepared.load(head, &mut |done, total| bar.set(done, total))?;
    if let Some(kept) = &kept {
        weight_cache::tell(kept);
    }
    Ok(Loaded {
        session,
        head,
        kept,
    })
}

/// Checks token ids from the command line against the vocabulary.
pub(crate) fn check_tokens(tokens: &[TokenId], vocab: usize) -> Outcome {
    match tokens.iter().find(|&&t| t as usize >= vocab) {
        Some(bad) => {
            let message = format!("token {bad} is outside the vocabulary of {vocab} tokens");
            Err(Failure::new(message))
        }
        None => Ok(()),
    }
}
