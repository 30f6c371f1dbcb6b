//! `ferrum serve`: models over HTTP.

mod announce;
mod models;

use crate::args::{Preload, ServeArgs};
use crate::failure::{Failure, Outcome};
use crate::input;
use announce::{Start, announce};
use ferrum_engine::StageList;
use ferrum_server::{ApiKey, Server, ServerConfig, Tls, stop_signal};
use models::Models;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tracing::level_filters::LevelFilter;

/// Open files that are not connections of clients within the limit: those beyond it, models, what the system needs.
#[cfg(target_os = "linux")]
const OTHER_FILES: u32 = 256;

/// Threads for what takes a while beside the engine, such as encoding long texts.
const BLOCKING_THREADS: usize = 4;

pub(crate) fn serve(args: &ServeArgs) -> Outcome {
    let models = Arc::new(Models::of(args)?);
    let config = config(args, &models.names())?;
    let first = first_models(args, models.names())?;
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
    let (tls, keys) = (config.tls.clone(), config.api_keys.len());
    let server = Server::new(models.names(), Arc::clone(&models) as _, config);
    for name in &first {
        let loaded = runtime.block_on(server.load(name));
        loaded.map_err(|e| match models.names().len() {
            1 => Failure::new(e),
            _ => Failure::new(format!("{name}: {e}")),
        })?;
    }
    for (name, dir) in &args.lora {
        let loaded = runtime.block_on(server.load_adapter(name, dir));
        loaded.map_err(|e| Failure::new(format!("--lora {name}={}: {e}", dir.display())))?;
    }
    let address = listener.local_addr()?;
    let outcome = runtime.block_on(async {
        let stop = stop_signal()?;
        let start = Start {
            address,
            tls: tls.is_some(),
            models: server.models(),
            layers: args.device.layers.as_ref().map(StageList::to_string),
            keys,
            level: LevelFilter::current(),
        };
        reload_on_hangup(tls)?;
        announce(&start);
        models.serve();
        let ended = server.serve(listener, stop).await;
        ended.map_err(|e| Failure::new(e.to_string()))
    });
    models.cancel_writing();
    models.finish_offload();
    // What did not end within the grace is cut off.
    runtime.shutdown_background();
    outcome
}

/// The models that are loaded before anybody asks.
fn first_models(args: &ServeArgs, mut names: Vec<String>) -> Outcome<Vec<String>> {
    let keep = match args.preload {
        Preload::None => 0,
        Preload::First => 1,
        Preload::All => names.len(),
    };
    names.truncate(keep);
    let most = args.max_loaded_models.map_or(usize::MAX, usize::from);
    if keep > most {
        return Err(Failure::new(format!(
            "--preload all loads {keep} models, and --max-loaded-models allows {most}"
        )));
    }
    Ok(names)
}

/// Reads the certificate anew at each SIGHUP, which is what renews it without an end. Without a certificate the
/// signal, which a terminal sends that is closed, is no reason to end either.
fn reload_on_hangup(tls: Option<Tls>) -> Outcome {
    #[cfg(unix)]
    {
        use tokio::signal::unix::{SignalKind, signal};
        let mut hangups = signal(SignalKind::hangup())?;
        tokio::spawn(async move {
            while hangups.recv().await.is_some() {
                let Some(tls) = &tls else {
                    tracing::info!("hangup: there is no certificate to read anew");
                    continue;
                };
                match tls.reload() {
                    Ok(()) => tracing::info!("certificate read anew"),
                    Err(e) => {
                        let reason = e.to_string();
                        tracing::error!(reason, "certificate not read, the one before stays");
                    }
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

/// The aliases, each of a model that is served, and none of them a model's name.
fn aliases(args: &ServeArgs, names: &[String]) -> Outcome<Vec<(String, String)>> {
    for (alias, model) in &args.alias {
        if !names.contains(model) {
            let served = names.join(", ");
            let message =
                format!("--alias {alias}={model}: there is no model {model:?}, only {served}");
            return Err(Failure::new(message));
        }
        if names.contains(alias) {
            let message = format!("--alias {alias}={model}: a model is called {alias:?} already");
            return Err(Failure::new(message));
        }
    }
    Ok(args.alias.clone())
}

/// The keys of a file: a line each.
fn keys_of(path: &Path) -> Outcome<Vec<ApiKey>> {
    let text = input::read_json_text(path)?;
    let lines = text.lines().enumerate();
    let lines = lines.filter(|(_, line)| !line.trim().is_empty());
    let keys = lines.map(|(i, line)| {
        let wrong = |e| Failure::new(format!("{}, line {}: {e}", path.display(), i + 1));
        line.parse::<ApiKey>().map_err(wrong)
    });
    let keys = keys.collect::<Outcome<Vec<_>>>()?;
    if keys.is_empty() {
        // A file of keys without keys must not open the server to everybody.
        let message = format!("{}: there is no key in it", path.display());
        return Err(Failure::new(message));
    }
    Ok(keys)
}

/// As many connections as are asked for, or as the process can have.
fn max_connections(asked: u32) -> usize {
    #[cfg(target_os = "linux")]
    {
        // Without a file left, not even health could be asked.
        let most = open_files().map(|files| files.saturating_sub(OTHER_FILES).max(1));
        if let Some(most) = most.filter(|&most| most < asked) {
            tracing::debug!(
                asked,
                connections = most,
                "fewer connections: the process may have no more open files (ulimit -n)"
            );
            return most as usize;
        }
    }
    asked as usize
}

/// Most files that the process may have open, where the system says.
#[cfg(target_os = "linux")]
fn open_files() -> Option<u32> {
    let limits = std::fs::read_to_string("/proc/self/limits").ok()?;
    let mut lines = limits.lines();
    let line = lines.find_map(|line| line.strip_prefix("Max open files"))?;
    line.split_whitespace().next()?.parse().ok()
}

fn config(args: &ServeArgs, names: &[String]) -> Outcome<ServerConfig> {
    let typed = args.api_key.iter().map(String::as_str);
    let mut api_keys: Vec<ApiKey> = typed.map(ApiKey::from).collect();
    if let Some(path) = &args.api_key_file {
        api_keys.extend(keys_of(path)?);
    }
    if api_keys.iter().any(|key| key.key.is_empty()) {
        return Err(Failure::new("an API key is empty"));
    }
    let admin_keys = args.admin_key_file.as_deref().map(keys_of).transpose()?;
    let admin_keys = admin_keys.unwrap_or_default().into_iter();
    let seconds = |n: u32| Duration::from_secs(n.into());
    Ok(ServerConfig {
        api_keys,
        admin_keys: admin_keys.map(|key| key.key).collect(),
        cors_origins: args.cors_origin.clone(),
        allowed_media_domains: args.allowed_media_domains.clone(),
        media_timeout: seconds(args.media_timeout),
        tls: tls(args)?,
        otlp: args.otlp_endpoint.clone(),
        aliases: aliases(args, names)?,
        any_model_name: args.any_model_name,
        strict: args.strict,
        log_prompts: args.log_prompts,
        max_body_bytes: args.max_body as usize,
        // What does not fit here does not fit into memory either.
        max_bodies_bytes: usize::try_from(args.max_body_total).unwrap_or(usize::MAX),
        max_connections: max_connections(args.max_connections),
        idle_timeout: seconds(args.idle_timeout),
        write_timeout: seconds(args.write_timeout),
        shutdown_timeout: args.shutdown_timeout.map(seconds),
        max_stored_bytes: args.max_stored as usize,
        max_tokens: args.max_tokens as usize,
        request_timeout: seconds(args.timeout),
        grace: seconds(args.grace),
        lookup_tokens: args.lookup_tokens.into(),
        lora_dir: args.lora_dir.clone(),
        // As many as are asked for here, and then some.
        max_adapters: ServerConfig::default().max_adapters.max(args.lora.len()),
        max_loaded_models: args.max_loaded_models.map(usize::from),
        max_waiting: args.max_waiting as usize,
        idle_unload: args.idle_unload.map(seconds),
        ..ServerConfig::default()
    })
}
