//! `ferrum serve`: a model over HTTP.

use super::run;
use crate::args::{HubArgs, ServeArgs};
use crate::failure::{Failure, Outcome};
use crate::{hub, open, ui};
use ferrum_engine::engine::Pooling;
use ferrum_engine::{
    BackendDispatch, DraftRunner, Engine, EngineConfig, KvDtype, Runners, SamplingParams,
};
use ferrum_formats::tokenizer::Tokenizer;
use ferrum_formats::{HfConfig, ModelSource};
use ferrum_models::{KvLayout, Model, RunnerConfig};
use ferrum_server::{ServedModel, Server, ServerConfig, Tls, stop_signal};
use ferrum_types::TokenId;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;

/// Tokens of a block of the KV cache.
const BLOCK_SIZE: usize = 32;

/// Most tokens of a step: long prompts come in chunks of it, between which others go on.
const STEP_TOKENS: usize = 512;

/// Rows of logits of a step, at least; those of a prompt whose log-probabilities are wanted.
const LOGIT_ROWS: usize = 64;

/// Threads for what takes a while beside the engine, such as encoding long texts.
const BLOCKING_THREADS: usize = 4;

/// What the demo model, which is no file, is called.
const DEMO_NAME: &str = "ferrum-demo";

pub(crate) fn serve(args: &ServeArgs) -> Outcome {
    let config = config(args)?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .max_blocking_threads(BLOCKING_THREADS)
        .enable_all()
        .build()?;
    // The port first: a model that takes minutes to load is not loaded in vain.
    let address = SocketAddr::new(args.host, args.port);
    let listener = runtime.block_on(TcpListener::bind(address));
    let listener =
        listener.map_err(|e| Failure::new(format!("cannot listen on {address}: {e}")))?;
    let (engine, model) = start(args)?;
    let tls = config.tls.clone();
    let server = Server::new(model, config);
    for (name, dir) in &args.lora {
        let loaded = runtime.block_on(server.load_adapter(name, dir));
        loaded.map_err(|e| Failure::new(format!("--lora {name}={}: {e}", dir.display())))?;
    }
    let url = listener.local_addr()?;
    runtime.block_on(async {
        let stop = stop_signal()?;
        let scheme = if tls.is_some() { "https" } else { "http" };
        if let Some(tls) = tls {
            reload_on_hangup(tls)?;
        }
        ui::say(&format!("serving on {scheme}://{url}/v1"));
        server.serve(listener, stop).await;
        Outcome::Ok(())
    })?;
    // What did not end within the grace is cut off.
    runtime.shutdown_background();
    engine.shutdown();
    Ok(())
}

/// Reads the certificate anew at each SIGHUP, which is what renews it without an end.
fn reload_on_hangup(tls: Tls) -> Outcome {
    #[cfg(unix)]
    {
        use tokio::signal::unix::{SignalKind, signal};
        let mut hangups = signal(SignalKind::hangup())?;
        tokio::spawn(async move {
            while hangups.recv().await.is_some() {
                match tls.reload() {
                    Ok(()) => ui::say("the certificate was read anew"),
                    Err(e) => ui::say(&format!("error: {e}\nnote: the one before stays")),
                }
            }
        });
    }
    #[cfg(not(unix))]
    drop(tls);
    Ok(())
}

fn tls(args: &ServeArgs) -> Outcome<Option<Tls>> {
    let (Some(certificate), Some(key)) = (&args.tls_cert, &args.tls_key) else {
        return Ok(None);
    };
    let tls = Tls::load(certificate.clone(), key.clone());
    tls.map(Some).map_err(|e| Failure::new(e.to_string()))
}

fn config(args: &ServeArgs) -> Outcome<ServerConfig> {
    let mut api_keys = args.api_key.clone();
    if let Some(path) = &args.api_key_file {
        let text = open::read_json_text(path)?;
        let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
        let before = api_keys.len();
        api_keys.extend(lines.map(str::to_owned));
        if api_keys.len() == before {
            // Serving everybody is not what somebody wants who names a file of keys.
            let message = format!("{}: there is no key in it", path.display());
            return Err(Failure::new(message));
        }
    }
    if api_keys.iter().any(|key| key.is_empty()) {
        return Err(Failure::new("an API key is empty"));
    }
    if api_keys.is_empty() && !args.host.is_loopback() {
        ui::say(
            "note: whoever reaches this address can use it\nhint: --api-key-file asks for keys",
        );
    }
    let seconds = |n: u32| Duration::from_secs(n.into());
    Ok(ServerConfig {
        api_keys,
        cors_origins: args.cors_origin.clone(),
        tls: tls(args)?,
        otlp: args.otlp_endpoint.clone(),
        max_body_bytes: args.max_body as usize,
        max_tokens: args.max_tokens as usize,
        request_timeout: seconds(args.timeout),
        grace: seconds(args.grace),
        lookup_tokens: args.lookup_tokens.into(),
        lora_dir: args.lora_dir.clone(),
        // As many as are asked for here, and then some.
        max_adapters: ServerConfig::default().max_adapters.max(args.lora.len()),
        ..ServerConfig::default()
    })
}

/// Loads the model and starts its engine.
fn start(args: &ServeArgs) -> Outcome<(Engine, ServedModel)> {
    let model = open::model(args.model.as_deref(), &args.hub)?;
    let tokenizer = Arc::new(open::tokenizer_of(&model)?);
    let template = open::template_of(&model, &tokenizer)?;
    let sampling = sampling(&model)?;
    let kv = open::kv_dtype(&model, &args.cache);
    let device = open::open_device(&model, &args.device)?;
    let draft = args.draft_model.as_deref();
    let draft = draft
        .map(|path| draft_runner(args, path, &device, &tokenizer))
        .transpose()?;
    let sizes = sizes(args, &model, &device, kv);
    let context = sizes.context.min(sizes.kv_tokens);
    let session = open::load_on(&device, &model, sizes, kv)?;
    let settings = EngineConfig {
        max_waiting: args.max_waiting as usize,
        ..EngineConfig::default()
    };
    let runners = Runners {
        model: session.into_runner(),
        draft,
    };
    let engine = Engine::start(runners, Some(Arc::clone(&tokenizer)), settings)?;
    let served = ServedModel {
        name: name(args),
        engine: engine.handle(),
        template,
        call_format: args.tool_call_parser,
        context,
        vocab_size: model.spec.vocab_size,
        pooling: pooling(&model)?,
        hidden_size: model.spec.hidden_size,
        stop_tokens: run::stop_tokens(&model, &tokenizer),
        sampling,
        tokenizer,
    };
    Ok((engine, served))
}

/// Loads the model that guesses onto the same device.
fn draft_runner(
    args: &ServeArgs,
    path: &Path,
    device: &BackendDispatch,
    tokenizer: &Tokenizer,
) -> Outcome<DraftRunner> {
    // A revision is one of the other model.
    let hub = HubArgs {
        revision: None,
        ..args.hub.clone()
    };
    let model = open::model(Some(path), &hub)?;
    let own = open::tokenizer_of(&model)?;
    let size = u32::try_from(model.spec.vocab_size).unwrap_or(u32::MAX);
    let differs = |&id: &TokenId| own.token_bytes(id) != tokenizer.token_bytes(id);
    if let Some(id) = (0..size).find(differs) {
        let path = path.display();
        return Err(Failure::new(format!(
            "{path}: token {id} is another than the model's\nhint: a draft model needs the same vocabulary"
        )));
    }
    let kv = open::kv_dtype(&model, &args.cache);
    let sizes = sizes(args, &model, device, kv);
    let session = open::load_on(device, &model, sizes, kv)?;
    Ok(DraftRunner {
        runner: session.into_runner(),
        tokens: args.draft_tokens.into(),
    })
}

fn name(args: &ServeArgs) -> String {
    let file = args.model.as_ref().map(|path| {
        if let Some(name) = hub::name(path) {
            return name.to_string();
        }
        // `ferrum serve --model .` has a name, too.
        let path = path.canonicalize().unwrap_or_else(|_| path.clone());
        let name = match path.is_dir() {
            true => path.file_name(),
            false => path.file_stem(),
        };
        name.map_or(String::new(), |name| name.to_string_lossy().into_owned())
    });
    let named = args.served_model_name.clone().or(file);
    named.unwrap_or_else(|| DEMO_NAME.into())
}

/// What holds where a request says nothing: the model's recommendation, else OpenAI's defaults.
fn sampling(model: &Model) -> Outcome<SamplingParams> {
    let advice = run::advice(model)?;
    Ok(SamplingParams {
        temperature: advice.temperature.unwrap_or(1.0),
        top_k: advice.top_k.unwrap_or(0),
        top_p: advice.top_p.unwrap_or(1.0),
        min_p: advice.min_p.unwrap_or(0.0),
        repeat_penalty: advice.repeat_penalty.unwrap_or(1.0),
        ..SamplingParams::default()
    })
}

/// How the model's files say that the states of a text become its embedding; by the last token where they
/// say nothing. `None` for ways that are not known here.
fn pooling(model: &Model) -> Outcome<Option<Pooling>> {
    let folder = match &model.source {
        ModelSource::Gguf(gguf) => {
            let key = format!("{}.pooling_type", gguf.architecture()?);
            return Ok(match gguf.u32(&key)? {
                None | Some(3) => Some(Pooling::Last),
                Some(1) => Some(Pooling::Mean),
                Some(_) => None,
            });
        }
        ModelSource::Hf(folder) => &folder.dir,
    };
    // As the package sentence-transformers has it.
    let path = folder.join("1_Pooling/config.json");
    if !path.exists() {
        return Ok(Some(Pooling::Last));
    }
    if folder.join("2_Dense").exists() {
        return Ok(None);
    }
    let config = HfConfig::open(path)?;
    let mut modes = Vec::new();
    for mode in config.keys().filter(|key| key.starts_with("pooling_mode_")) {
        if config.bool(mode)? == Some(true) {
            modes.push(mode);
        }
    }
    Ok(match modes[..] {
        ["pooling_mode_mean_tokens"] => Some(Pooling::Mean),
        ["pooling_mode_lasttoken"] => Some(Pooling::Last),
        _ => None,
    })
}

/// Sizes for many sequences. The KV pool holds a full context of each, or what fits half of the memory
/// that the weights leave: sequences are seldom full, and one whose blocks run out waits its turn.
fn sizes(args: &ServeArgs, model: &Model, device: &BackendDispatch, kv: KvDtype) -> RunnerConfig {
    let context = open::context(model, args.cache.context, 0);
    let max_seqs = usize::from(args.max_seqs);
    let model_guesses = args.draft_model.as_ref().map_or(0, |_| args.draft_tokens);
    let guesses = usize::from(model_guesses.max(args.lookup_tokens));
    let config = RunnerConfig {
        context,
        max_seqs,
        max_tokens: STEP_TOKENS.max(max_seqs),
        // A row for the token that a step gives anyway, and one for each guess.
        max_logit_rows: LOGIT_ROWS.max(max_seqs * (1 + guesses)),
        kv_tokens: context.saturating_mul(max_seqs),
        layout: KvLayout::Paged {
            block_size: BLOCK_SIZE,
        },
        profile: false,
    };
    if let Some(tokens) = args.kv_tokens {
        let kv_tokens = tokens as usize;
        return RunnerConfig {
            kv_tokens,
            ..config
        };
    }
    let plan = open::plan(model, &config, kv);
    let Some(memory) = device.info().memory_bytes else {
        return config;
    };
    let left = memory.saturating_sub(plan.weights.saturating_add(plan.scratch)) / 2;
    let fits = usize::try_from(left / plan.kv_per_token.max(1)).unwrap_or(usize::MAX);
    RunnerConfig {
        kv_tokens: config.kv_tokens.min(fits.max(context)),
        ..config
    }
}
