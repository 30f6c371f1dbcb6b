//! From an argument of `serve` to a running engine, whenever the server asks for it.

use crate::args::{HubArgs, ServeArgs, look_back};
use crate::commands::{embed, generation, images, transcribe};
use crate::failure::{Failure, Outcome};
use crate::load_model::Loaded;
use crate::{hub, load_model};
use ferrum_engine::engine::Clock;
use ferrum_engine::vision::{ImagePrompt, VisionTower};
use ferrum_engine::{
    CacheWriter, DraftHeadLoad, DraftRunner, Engine, EngineConfig, EngineOffload, KvDtype,
    KvOffload, MemoryShare, OffloadConfig, Placement, Runners, SamplingParams, StepRunner,
    TaskConfig, TaskEngine,
};
use ferrum_formats::ModelSource;
use ferrum_formats::tokenizer::Tokenizer;
use ferrum_models::encoder::read_encoder;
use ferrum_models::whisper::read_whisper;
use ferrum_models::{
    DenseLayers, DraftHead, EmbeddingPrompts, KvLayout, Model, ModelKind, RunnerConfig,
    StatedPooling, read_eagle3, read_mtp,
};
use ferrum_server::{
    LoadedModel, ModelEvent, ModelLoader, ServedEncoder, ServedModel, ServedTranscriber,
    ServedVision,
};
use ferrum_types::TokenId;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Tokens of a block of the KV cache.
const BLOCK_SIZE: usize = 32;

/// Rows of logits of a step, at least; those of a prompt whose log-probabilities are wanted.
const LOGIT_ROWS: usize = 64;

/// Tokens of the longest text of a model that computes each in one step; memory for a step grows with it.
const MAX_WHOLE_TEXT: usize = 8192;

/// What the demo model, which is no file, is called.
const DEMO_NAME: &str = "ferrum-demo";

/// The models of a server by name, and how to load them.
pub(super) struct Models {
    args: ServeArgs,
    /// Each with where it lies; `None` is the demo model.
    sources: Vec<(String, Option<PathBuf>)>,
    /// Models that may be loaded at once, which share the memory.
    places: u64,
    /// Whether words about models are news: at the start everybody waits for them.
    serving: AtomicBool,
    writing: Writing,
    /// Where all models' KV blocks go that the device has no room for.
    offload: Option<KvOffload>,
}

/// How long the end of a server may take to write what is in memory.
const LAST_BLOCKS: Duration = Duration::from_secs(15);

/// The store that the arguments mean.
fn offload(serve: &ServeArgs) -> Outcome<Option<KvOffload>> {
    let args = &serve.offload;
    let config = OffloadConfig {
        ram_bytes: args.kv_offload_ram.map_or(0, |size| size.0),
        dir: args.kv_offload_dir.clone(),
        dir_bytes: args.kv_offload_dir_limit.map(|size| size.0),
    };
    if config.ram_bytes == 0 && config.dir.is_none() {
        return Ok(None);
    }
    if serve.device.tensor_parallel > 1 {
        return Err(Failure::new(
            "keys and values of several ranks are not kept beside the device\nhint: --kv-offload-ram and --kv-offload-dir work without --tensor-parallel",
        ));
    }
    Ok(Some(KvOffload::open(&config)?))
}

impl Models {
    /// The models and adapters that the arguments name, checked for conflicts.
    pub(super) fn of(args: &ServeArgs) -> Outcome<Self> {
        let mut sources: Vec<(String, Option<PathBuf>)> = Vec::new();
        for model in args.models() {
            let name = model
                .name
                .clone()
                .unwrap_or_else(|| name(&model.source, &args.hub));
            if sources.iter().any(|(other, _)| *other == name) {
                return Err(Failure::new(format!(
                    "two models are called {name:?}\nhint: NAME=MODEL gives a name"
                )));
            }
            check_kind(&model.source)?;
            sources.push((name, Some(model.source.clone())));
        }
        if sources.len() > 1 {
            // What is about one model would be wrong about the others.
            for (flag, given) in [
                ("--served-model-name", args.served_model_name.is_some()),
                ("--draft-model", args.draft_model.is_some()),
                ("--draft-mtp", args.draft_mtp),
                ("--revision", args.hub.revision.is_some()),
                ("--layers", args.device.layers.is_some()),
                ("--gpu-layers", args.device.gpu_layers.is_some()),
                ("--tensor-parallel", args.device.tensor_parallel > 1),
            ] {
                if given {
                    let hint = match flag {
                        "--served-model-name" => "\nhint: NAME=MODEL gives a name",
                        _ => "",
                    };
                    return Err(Failure::new(format!(
                        "{flag} is about one model, and there are {}{hint}",
                        sources.len()
                    )));
                }
            }
        }
        let named = args.models().iter().any(|model| model.name.is_some());
        if named && args.served_model_name.is_some() {
            return Err(Failure::new(
                "--served-model-name gives a name to a model that has one",
            ));
        }
        if sources.is_empty() {
            sources.push((DEMO_NAME.into(), None));
        }
        if let (Some(name), Some((first, _))) = (&args.served_model_name, sources.first_mut()) {
            first.clone_from(name);
        }
        let count = sources.len();
        let places = args.max_loaded_models.map_or(count, usize::from).min(count);
        Ok(Self {
            args: args.clone(),
            sources,
            places: places as u64,
            serving: AtomicBool::new(false),
            writing: Writing::default(),
            offload: offload(args)?,
        })
    }

    pub(super) fn names(&self) -> Vec<String> {
        self.sources.iter().map(|(name, _)| name.clone()).collect()
    }

    /// Gives up what is not written of the cache of packed weights.
    pub(super) fn cancel_writing(&self) {
        self.writing.cancel();
    }

    /// Writes the KV blocks that are in memory to the disk, where there is a folder for them.
    pub(super) fn finish_offload(&self) {
        if let Some(offload) = &self.offload {
            offload.finish(LAST_BLOCKS);
        }
    }

    /// From here on, model events are reported.
    pub(super) fn serve(&self) {
        self.serving.store(true, Ordering::Release);
    }
}

/// Packed weights of all models that are still to be written to the cache.
#[derive(Default)]
struct Writing(Mutex<Vec<CacheWriter>>);

impl Writing {
    /// The runner of a loaded model, whose weights may still be written.
    fn runner_of(&self, loaded: Loaded) -> Box<dyn StepRunner> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(CacheWriter::is_writing);
        all.extend(loaded.kept);
        loaded.session.into_runner()
    }

    /// Gives up what is not written yet.
    fn cancel(&self) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.iter_mut().for_each(CacheWriter::cancel);
    }
}

impl ModelLoader for Models {
    fn load(&self, name: &str) -> Result<LoadedModel, String> {
        let source = self.sources.iter().find(|(known, _)| known == name);
        let (_, source) = source.ok_or_else(|| format!("there is no model {name:?}"))?;
        let source = source.as_deref();
        let loaded = start(self, source);
        loaded.map_err(|e| e.to_string())
    }

    fn on_event(&self, name: &str, event: ModelEvent<'_>) {
        let model = name;
        if !self.serving.load(Ordering::Acquire) {
            // What goes wrong ends the program, which says so.
            return tracing::debug!(model, ?event, "model event at the start");
        }
        match event {
            ModelEvent::Loading => tracing::info!(model, "loading model"),
            ModelEvent::Loaded(took) => {
                tracing::info!(model, seconds = took.as_secs_f64(), "model loaded");
            }
            ModelEvent::Failed(reason) => tracing::warn!(model, reason, "model not loaded"),
            ModelEvent::Unloaded => tracing::info!(model, "model unloaded"),
        }
    }
}

/// Refuses a model on this machine that no server has routes for, before somebody asks for it.
fn check_kind(path: &Path) -> Outcome<()> {
    // What cannot be opened, or is of a hub, is told of when it is loaded.
    if !path.exists() {
        return Ok(());
    }
    let Ok(source) = ModelSource::open(path) else {
        return Ok(());
    };
    match ModelKind::of(&source) {
        Some(ModelKind::Encoder | ModelKind::Speech) | None => Ok(()),
        Some(_) => Ok(ModelKind::Decoder.check(&source)?),
    }
}

/// What a model is called that was given no name.
fn name(source: &Path, hub: &HubArgs) -> String {
    // Whether it is there is found out when it is opened.
    let cached = || Some(hub::in_cache(source, hub).ok()??.name);
    if let Some(name) = hub::name(source).or_else(cached) {
        return name.to_string();
    }
    // `ferrum serve .` has a name, too.
    let path = source.canonicalize().unwrap_or_else(|_| source.to_owned());
    let name = match path.is_dir() {
        true => path.file_name(),
        false => path.file_stem(),
    };
    name.map_or(String::new(), |name| name.to_string_lossy().into_owned())
}

/// Loads the model and starts its engine.
fn start(models: &Models, source: Option<&Path>) -> Outcome<LoadedModel> {
    let Models {
        args,
        places,
        writing,
        offload,
        ..
    } = models;
    let places = *places;
    let opened = source
        .map(|path| load_model::source(path, &args.hub))
        .transpose()?;
    let model = match opened {
        Some(source) => match ModelKind::of(&source) {
            Some(ModelKind::Encoder) => return start_encoder(args, source),
            Some(ModelKind::Speech) => return start_speech(args, source),
            _ => load_model::generator(source)?,
        },
        None => load_model::model(None, &args.hub)?,
    };
    let tokenizer = Arc::new(load_model::tokenizer_of(&model)?);
    let template = load_model::template_of(&model, &tokenizer)?;
    let sampling = sampling(&model)?;
    let dense = DenseLayers::of(&model.source, model.spec.hidden_size)?;
    let (runners, context, vision) = load(args, &model, &tokenizer, (writing, places))?;
    let settings = EngineConfig {
        max_waiting: args.max_waiting as usize,
        step_time: args.step_time_ms.map(|ms| Duration::from_millis(ms.into())),
        stall_after: Duration::from_secs(args.stall_after.into()),
        stall_factor: args.stall_factor,
        state_checkpoint_interval: args.checkpoint_every as usize,
        offload: offload.clone().map(|store| EngineOffload {
            store,
            model: load_model::fingerprint(&model),
        }),
        ..EngineConfig::default()
    };
    let engine = Engine::start(runners, Some(Arc::clone(&tokenizer)), settings)?;
    let served = ServedModel {
        engine: engine.handle(),
        vision,
        template,
        call_format: args.tool_call_parser,
        open_schemas: args.open_schemas,
        context,
        vocab_size: model.spec.vocab_size,
        generates: model.generates(),
        pooling: StatedPooling::of(&model.source)?.or(model.usual_pooling()),
        embedding_size: dense.dimensions(model.spec.hidden_size),
        dense,
        prompts: EmbeddingPrompts::of(&model.source)?,
        stop_tokens: generation::stop_tokens(&model, &tokenizer),
        sampling,
        tokenizer,
    };
    Ok(LoadedModel::Decoder(engine, Box::new(served)))
}

/// The image tower of a model that has one, on the device of its last layers.
fn vision(
    args: &ServeArgs,
    model: &Model,
    placement: &Placement,
    tokenizer: &Tokenizer,
) -> Outcome<Option<ServedVision>> {
    let Some(tower) = images::tower_of(model)? else {
        return Ok(None);
    };
    let prompt = ImagePrompt::new(&tower.spec, tokenizer)?;
    let tower = VisionTower::load(placement.last_device(), &tower, &mut |_, _| ())?;
    let preprocessor = tower.preprocessor().clone();
    let engine = TaskEngine::start(tower, task_config(args))?;
    Ok(Some(ServedVision::new(engine, preprocessor, prompt)))
}

/// Loads the model, what drafts for it and its image tower; says its context, too.
fn load(
    args: &ServeArgs,
    model: &Model,
    tokenizer: &Tokenizer,
    (writing, places): (&Writing, u64),
) -> Outcome<(Runners, usize, Option<ServedVision>)> {
    let kv = load_model::kv_dtype(model, &args.cache);
    check_draft_flags(args, model)?;
    let device = load_model::placement(&args.device, model)?;
    let drafts = drafts(args, model)?;
    let mut draft = match &drafts {
        Drafts::Model(draft) => {
            let on = (&device, writing);
            Some(draft_runner(args, draft, on, tokenizer, places)?)
        }
        Drafts::None | Drafts::Head(_) => None,
    };
    // Before the cache, which takes of what is free.
    let vision = vision(args, model, &device, tokenizer)?;
    let mut sizes = sizes(args, model, &device, kv, places);
    if let Some(vision) = &vision {
        // A whole image, beside everybody who decodes.
        let least = sizes.max_seqs + vision.image_tokens();
        sizes.max_tokens = sizes.max_tokens.max(least);
    }
    let head = match &drafts {
        Drafts::Head(head) => Some(DraftHeadLoad {
            head,
            config: head_sizes(sizes),
        }),
        Drafts::None | Drafts::Model(_) => None,
    };
    let mut loaded = load_model::load_on(&device, &args.weights, model, (sizes, kv), head)?;
    if let (Drafts::Head(head), Some(runner)) = (&drafts, loaded.head.take()) {
        draft = Some(DraftRunner {
            runner,
            tokens: args.draft_tokens.into(),
            features: Some(head.features().clone()),
        });
    }
    let runners = Runners {
        model: writing.runner_of(loaded),
        draft,
    };
    Ok((runners, sizes.context.min(sizes.kv_tokens), vision))
}

/// Refuses what a model that generates no text has no use for.
fn check_encoder_flags(args: &ServeArgs) -> Outcome {
    let flags = [
        ("--draft-model", args.draft_model.is_some()),
        ("--draft-mtp", args.draft_mtp),
        ("--layers", args.device.layers.is_some()),
        ("--tensor-parallel", args.device.tensor_parallel > 1),
        ("--lora", !args.lora.is_empty()),
    ];
    match flags.into_iter().find(|(_, given)| *given) {
        Some((flag, _)) => Err(Failure::new(format!(
            "{flag} is for models that generate text, this one generates none"
        ))),
        None => Ok(()),
    }
}

/// Refuses drafts for a model that makes embeddings alone.
fn check_draft_flags(args: &ServeArgs, model: &Model) -> Outcome {
    let flags = [
        ("--draft-model", args.draft_model.is_some()),
        ("--draft-mtp", args.draft_mtp),
    ];
    match flags.into_iter().find(|(_, given)| *given) {
        Some((flag, _)) if !model.spec.is_causal() => Err(Failure::new(format!(
            "{flag} is for models that generate text, this one makes embeddings alone"
        ))),
        _ => Ok(()),
    }
}

/// Loads a model that writes what is said, and starts its engine.
fn start_speech(args: &ServeArgs, source: ModelSource) -> Outcome<LoadedModel> {
    check_encoder_flags(args)?;
    let mut model = read_whisper(source)?;
    model.dtype = args.dtype.into();
    let transcriber = transcribe::load(&model, &args.device.device, &mut |_, _| ())?;
    let languages = transcriber.languages().map(str::to_owned).collect();
    let engine = TaskEngine::start(transcriber, task_config(args))?;
    let served = ServedTranscriber {
        engine: engine.handle(),
        languages,
    };
    Ok(LoadedModel::Transcriber(engine, served))
}

fn task_config(args: &ServeArgs) -> TaskConfig {
    TaskConfig {
        max_waiting: args.max_waiting as usize,
        stall_after: Duration::from_secs(args.stall_after.into()),
        clock: Clock::system(),
    }
}

/// Loads a text encoder and starts its engine.
fn start_encoder(args: &ServeArgs, source: ModelSource) -> Outcome<LoadedModel> {
    check_encoder_flags(args)?;
    let mut model = read_encoder(source)?;
    model.dtype = args.dtype.into();
    let encoder = embed::load(&model, &args.device.device, &mut |_, _| ())?;
    let (tokenizer, pooling) = (Arc::clone(encoder.tokenizer()), encoder.pooling());
    let (embedding_size, labels) = (encoder.dimensions(), encoder.labels());
    let prompts = encoder.prompts().clone();
    let engine = TaskEngine::start(encoder, task_config(args))?;
    let served = ServedEncoder {
        engine: engine.handle(),
        tokenizer,
        pooling,
        prompts,
        embedding_size,
        labels,
    };
    Ok(LoadedModel::Encoder(engine, served))
}

/// What drafts for a model.
enum Drafts {
    None,
    /// A smaller model.
    Model(Box<Model>),
    /// A layer of its own for multi-token prediction, or an EAGLE-3 head.
    Head(Box<DraftHead>),
}

/// What the arguments have draft for a model.
fn drafts(args: &ServeArgs, model: &Model) -> Outcome<Drafts> {
    if args.draft_mtp {
        return Ok(Drafts::Head(Box::new(read_mtp(model)?)));
    }
    let Some(path) = &args.draft_model else {
        return Ok(Drafts::None);
    };
    // A revision is one of the other model.
    let hub = HubArgs {
        revision: None,
        ..args.hub.clone()
    };
    let source = load_model::source(path, &hub)?;
    Ok(match ModelKind::of(&source) {
        Some(ModelKind::DraftHead) => Drafts::Head(Box::new(read_eagle3(source, model)?)),
        _ => {
            let draft = load_model::generator(source)?;
            load_model::check_causal(&draft)?;
            Drafts::Model(Box::new(draft))
        }
    })
}

/// The sizes of a draft head's steps, for the same sequences as the model's.
fn head_sizes(sizes: RunnerConfig) -> RunnerConfig {
    RunnerConfig {
        max_logit_rows: sizes.max_seqs,
        kept_states: 0,
        ..sizes
    }
}

/// Loads the model that drafts onto the same device; where there are several, onto that which chooses tokens.
fn draft_runner(
    args: &ServeArgs,
    model: &Model,
    (device, writing): (&Placement, &Writing),
    tokenizer: &Tokenizer,
    places: u64,
) -> Outcome<DraftRunner> {
    let own = load_model::tokenizer_of(model)?;
    let size = u32::try_from(model.spec.vocab_size).unwrap_or(u32::MAX);
    let differs = |&id: &TokenId| own.token_bytes(id) != tokenizer.token_bytes(id);
    if let Some(id) = (0..size).find(differs) {
        let path = args
            .draft_model
            .as_deref()
            .unwrap_or(Path::new(""))
            .display();
        return Err(Failure::new(format!(
            "{path}: token {id} is another than the model's\nhint: a draft model needs the same vocabulary"
        )));
    }
    let kv = load_model::kv_dtype(model, &args.cache);
    let device = device.last_device().clone();
    let device = &Placement::on(device, model);
    let sizes = sizes(args, model, device, kv, places);
    let loaded = load_model::load_on(device, &args.weights, model, (sizes, kv), None)?;
    Ok(DraftRunner {
        runner: writing.runner_of(loaded),
        tokens: args.draft_tokens.into(),
        features: None,
    })
}

/// What holds where a request says nothing: the model's recommendation, else OpenAI's defaults.
fn sampling(model: &Model) -> Outcome<SamplingParams> {
    let recommended = generation::recommended_sampling(model)?;
    Ok(SamplingParams {
        temperature: recommended.temperature.unwrap_or(1.0),
        top_k: recommended.top_k.unwrap_or(0),
        top_p: recommended.top_p.unwrap_or(1.0),
        min_p: recommended.min_p.unwrap_or(0.0),
        repeat_penalty: recommended.repeat_penalty.unwrap_or(1.0),
        repeat_last_n: look_back(recommended.repeat_last_n.unwrap_or(-1)),
        ..SamplingParams::default()
    })
}

/// Sizes for many sequences. The KV pool holds a full context of each, or what fits the memory
/// that the weights leave of this model's share: sequences are seldom full, and one whose blocks run out
/// waits its turn.
fn sizes(
    args: &ServeArgs,
    model: &Model,
    device: &Placement,
    kv: KvDtype,
    places: u64,
) -> RunnerConfig {
    let context = load_model::context_length(model, args.cache.context, 0);
    let max_seqs = usize::from(args.max_seqs);
    let drafter = args.draft_model.is_some() || args.draft_mtp;
    let drafted = if drafter { args.draft_tokens } else { 0 };
    let drafts = usize::from(drafted.max(args.lookup_tokens));
    let step_tokens = device.step_tokens().max(max_seqs);
    // With bidirectional attention, a text is computed in one step.
    let (context, step_tokens) = match model.spec.is_causal() {
        true => (context, step_tokens),
        false => {
            let context = context.min(MAX_WHOLE_TEXT.max(step_tokens));
            (context, step_tokens.max(context))
        }
    };
    let config = RunnerConfig {
        context,
        max_seqs,
        // Long prompts come in chunks of it, between which others go on.
        max_tokens: step_tokens,
        // A row for the token that a step gives anyway, and one for each draft.
        max_logit_rows: LOGIT_ROWS.max(RunnerConfig::rows_with_drafts(max_seqs, drafts)),
        kv_tokens: context.saturating_mul(max_seqs),
        kept_states: args.ctx_checkpoints.into(),
        layout: LAYOUT,
        profile: false,
    };
    if let Some(tokens) = args.kv_tokens {
        let kv_tokens = tokens as usize;
        return RunnerConfig {
            kv_tokens,
            ..config
        };
    }
    let share = MemoryShare {
        gpu_memory_utilization: args.device.memory.gpu_memory_utilization,
        models_sharing: places,
    };
    let fits = device.kv_tokens(model, (&config, kv), share);
    RunnerConfig {
        kv_tokens: config.kv_tokens.min(fits.max(context)),
        ..config
    }
}

/// A block table for each window of the model.
const LAYOUT: KvLayout = KvLayout::Grouped {
    block_size: BLOCK_SIZE,
};

#[cfg(test)]
mod tests {
    use super::*;
    use ferrum_formats::Gguf;
    use ferrum_models::read_model;

    /// The demo model with one more integer in its file.
    fn with_key(key: &str, value: i32) -> Model {
        let entry = |key: &str, value: i32| {
            let mut entry = (key.len() as u64).to_le_bytes().to_vec();
            entry.extend(key.as_bytes());
            entry.extend(5u32.to_le_bytes());
            entry.extend(value.to_le_bytes());
            entry
        };
        let mut more = entry(key, value);
        // Tensors stay where they are aligned.
        let rest = 64 - more.len() - entry("", 0).len();
        more.extend(entry(&"x".repeat(rest), 0));
        let (head, tail) = crate::demo_model::DEMO.split_at(24);
        let (head, count) = head.split_at(16);
        let count = u64::from_le_bytes(count.try_into().unwrap()) + 2;
        let bytes = [head, &count.to_le_bytes(), &more, tail].concat();
        let gguf = Gguf::from_vec("demo", bytes).unwrap();
        read_model(ModelSource::Gguf(gguf)).unwrap()
    }

    #[test]
    fn a_file_may_say_how_far_its_penalty_looks_back() {
        for (found, expected) in [(-1, usize::MAX), (0, 0), (64, 64)] {
            let model = with_key("general.sampling.penalty_last_n", found);
            assert_eq!(sampling(&model).unwrap().repeat_last_n, expected);
        }
        let model = with_key("general.sampling.other", 1);
        assert_eq!(sampling(&model).unwrap().repeat_last_n, usize::MAX);
    }
}
