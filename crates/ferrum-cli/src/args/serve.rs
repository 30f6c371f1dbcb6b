//! Arguments of `ferrum serve`.

use super::{CacheArgs, DtypeArgs, HubArgs, OffloadArgs, PlacementArgs, WeightCacheArgs, whole};
use clap::{Args, ValueEnum};
use ferrum_server::{CallFormat, CorsOrigin, MediaDomain, OtlpEndpoint};
use std::net::IpAddr;
use std::path::{Path, PathBuf};

/// A model to serve.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct NamedModel {
    /// What requests call it, if that was given.
    pub(crate) name: Option<String>,
    pub(crate) source: PathBuf,
}

/// A model, maybe with the name that requests have for it. A path that is there is no name.
fn named_model(text: &str) -> Result<NamedModel, String> {
    let (name, source) = match text.split_once('=') {
        Some(parts) if !Path::new(text).exists() => (Some(parts.0), parts.1),
        _ => (None, text),
    };
    if source.is_empty() || name == Some("") {
        return Err("expected MODEL or NAME=MODEL, such as small=qwen3-0.6b.gguf".into());
    }
    Ok(NamedModel {
        name: name.map(str::to_owned),
        source: source.into(),
    })
}

/// Models that are loaded when a server starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Preload {
    First,
    All,
    None,
}

/// A folder with the name that requests have for it.
fn named_folder(text: &str) -> Result<(String, PathBuf), String> {
    match text.split_once('=') {
        Some((name, dir)) if !name.is_empty() && !dir.is_empty() => Ok((name.into(), dir.into())),
        _ => Err("expected NAME=DIR, such as sql=adapters/sql".into()),
    }
}

/// A further name of a model.
fn alias(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, model)) if !name.is_empty() && !model.is_empty() => {
            Ok((name.into(), model.into()))
        }
        _ => Err("expected NAME=MODEL, such as gpt-4o=qwen3".into()),
    }
}

const EXAMPLES: &str = "\
Examples:
  ferrum serve                                  # the demo model, with a chat page
  ferrum serve model.gguf --port 8080
  ferrum serve Qwen/Qwen3-0.6B-GGUF:Q8_0 --context 8192 --max-seqs 8
  ferrum serve small=a.gguf large=DIR --max-loaded-models 1
  ferrum serve model.gguf --host 0.0.0.0 --api-key-file KEYS --tls-cert CERT --tls-key KEY
  ferrum serve model.gguf --print-config > ferrum.toml && ferrum serve --config ferrum.toml";

#[derive(Clone, Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct ServeArgs {
    /// TOML file with settings: each flag is a key of the same name, and flags go before the file
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,

    /// Print the settings that hold, as such a file, and end
    #[arg(long)]
    pub(crate) print_config: bool,

    /// GGUF files, Hugging Face folders, or ORG/NAME[:FILE] of a hub, each maybe as NAME=MODEL: requests that
    /// name no model get the first [default: the demo model inside this program]
    #[arg(value_name = "MODEL", value_parser = named_model)]
    positional_models: Vec<NamedModel>,

    /// The same as MODEL; can be given several times
    #[arg(long, short, value_name = "MODEL", value_parser = named_model,
          conflicts_with = "positional_models")]
    model: Vec<NamedModel>,

    /// What requests call the model, if there is one [default: the name of its file or folder]
    #[arg(long, value_name = "NAME")]
    pub(crate) served_model_name: Option<String>,

    /// Which models are loaded at the start: first, all or none; the others are when they are asked for
    #[arg(long, value_name = "WHICH", value_enum, default_value_t = Preload::First,
          hide_possible_values = true)]
    pub(crate) preload: Preload,

    /// Most models that are loaded at once; for another, the idle one that was used least recently is
    /// unloaded [default: all]
    #[arg(long, value_name = "N", value_parser = whole::<u16>(1..=1024))]
    pub(crate) max_loaded_models: Option<u16>,

    /// Unload a model that nobody has used for so long; the next request loads it again [default: never]
    #[arg(long, value_name = "SECONDS", value_parser = whole::<u32>(1..=1 << 20))]
    pub(crate) idle_unload: Option<u32>,

    /// Address to listen on; 0.0.0.0 lets other machines in
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1")]
    pub(crate) host: IpAddr,

    /// Port to listen on; 0 takes a free one
    #[arg(long, short, value_name = "N", default_value_t = 8000, value_parser = whole(0..=u16::MAX))]
    pub(crate) port: u16,

    /// Key that requests must bring; can be given several times. Others on this machine may see it in
    /// the list of processes: --api-key-file keeps it from them
    #[arg(long, value_name = "KEY")]
    pub(crate) api_key: Vec<String>,

    /// File with such keys, one a line; `KEY priority` is one whose requests may ask for a priority above 0
    #[arg(long, value_name = "FILE")]
    pub(crate) api_key_file: Option<PathBuf>,

    /// File with keys of administrators, one a line: only with them can adapters be loaded and unloaded
    #[arg(long, value_name = "FILE")]
    pub(crate) admin_key_file: Option<PathBuf>,

    /// LoRA adapter of the first model, which requests choose as the model NAME; can be given several times
    #[arg(long, value_name = "NAME=DIR", value_parser = named_folder)]
    pub(crate) lora: Vec<(String, PathBuf)>,

    /// Folder from whose folders requests may load LoRA adapters [default: they may not]
    #[arg(long, value_name = "DIR")]
    pub(crate) lora_dir: Option<PathBuf>,

    /// How the model writes calls of tools: hermes, qwen3-coder, llama3, pythonic, mistral, mistral-args,
    /// deepseek-v3, deepseek-v3.1, harmony, glm4, kimi-k2, granite or phi4 [default: as its chat template says]
    #[arg(long, value_name = "FORMAT")]
    pub(crate) tool_call_parser: Option<CallFormat>,

    /// Site whose pages may ask this server, such as `https://chat.example.org`, or * for all; can be given
    /// several times [default: none]
    #[arg(long, value_name = "ORIGIN")]
    pub(crate) cors_origin: Vec<CorsOrigin>,

    /// Host from which images that requests name by a URL are fetched: `images.example.org` (at ports 80 and 443),
    /// `localhost:8080`, `*.example.org` for all below it, or * for all that have public addresses. Several are separated by
    /// commas, or given one by one [default: none]
    #[arg(long, value_name = "HOST,…", value_delimiter = ',')]
    pub(crate) allowed_media_domains: Vec<MediaDomain>,

    /// Seconds that fetching the images of a request may take
    #[arg(long, value_name = "SECONDS", default_value_t = 10, value_parser = whole::<u32>(1..=600))]
    pub(crate) media_timeout: u32,

    /// PEM file with the certificate, then those that signed it: serve HTTPS; SIGHUP reads it anew
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    pub(crate) tls_cert: Option<PathBuf>,

    /// PEM file with the certificate's private key
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    pub(crate) tls_key: Option<PathBuf>,

    /// Collector that traces go to by OTLP over HTTP, such as `http://localhost:4318`; https works too [default: none]
    #[arg(long, value_name = "URL")]
    pub(crate) otlp_endpoint: Option<OtlpEndpoint>,

    /// Further name of a model, such as `gpt-4o=qwen3`; may be given more than once
    #[arg(long, value_name = "NAME=MODEL", value_parser = alias)]
    pub(crate) alias: Vec<(String, String)>,

    /// Answer requests for names that no model has with the first model
    #[arg(long)]
    pub(crate) any_model_name: bool,

    /// Refuse requests with fields that are not followed, rather than naming these in the header
    /// `x-ferrum-ignored`
    #[arg(long)]
    pub(crate) strict: bool,

    /// Let objects of JSON schemas have keys that their properties do not list, as the standard has it where a
    /// schema does not say
    #[arg(long)]
    pub(crate) open_schemas: bool,

    /// Log prompts and answers as well, at level info
    #[arg(long)]
    pub(crate) log_prompts: bool,

    #[command(flatten)]
    pub(crate) device: PlacementArgs,

    #[command(flatten)]
    pub(crate) dtype: DtypeArgs,

    #[command(flatten)]
    pub(crate) weights: WeightCacheArgs,

    #[command(flatten)]
    pub(crate) cache: CacheArgs,

    /// Most sequences that are computed at once
    #[arg(long, value_name = "N", default_value_t = 16,
          value_parser = whole::<u16>(1..=1024))]
    pub(crate) max_seqs: u16,

    /// Tokens that the KV cache holds over all sequences [default: full contexts for all of them, if
    /// that fits half of the memory that the weights leave; on CUDA, all that they leave of --gpu-memory-utilization]
    #[arg(long, value_name = "N", value_parser = whole::<u32>(1..=1 << 30))]
    pub(crate) kv_tokens: Option<u32>,

    /// Recurrent states that are kept for prompts which begin as earlier ones did, in models that have such
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = whole::<u16>(0..=4096))]
    pub(crate) ctx_checkpoints: u16,

    /// Tokens of a prompt from one such state to the next; one is kept at its end, too. 0: there alone
    #[arg(long, value_name = "TOKENS", default_value_t = 512, value_parser = whole::<u32>(0..=1 << 30))]
    pub(crate) checkpoint_every: u32,

    #[command(flatten)]
    pub(crate) offload: OffloadArgs,

    /// Smaller model of the same vocabulary, or the folder of an EAGLE-3 head, that drafts tokens, which the model
    /// checks several at a time; answers stay the same
    #[arg(long, value_name = "MODEL", group = "drafter")]
    pub(crate) draft_model: Option<PathBuf>,

    /// Draft tokens with the layer for multi-token prediction that the model itself has, as DeepSeek-V3, GLM-4.5 and
    /// Qwen 3.5 do; answers stay the same
    #[arg(long, group = "drafter")]
    pub(crate) draft_mtp: bool,

    /// Most tokens that either drafts at a time
    #[arg(long, value_name = "N", default_value_t = 4, requires = "drafter",
          value_parser = whole::<u8>(1..=64))]
    pub(crate) draft_tokens: u8,

    /// Most tokens to draft at a time from what a text already says; 0: none. Pays where answers quote
    #[arg(long, value_name = "N", default_value_t = 0,
          value_parser = whole::<u8>(0..=64))]
    pub(crate) lookup_tokens: u8,

    /// Most sequences that may wait for an engine, and requests for a model to be loaded; further requests
    /// get 429
    #[arg(long, value_name = "N", default_value_t = 256,
          value_parser = whole::<u32>(1..=1 << 20))]
    pub(crate) max_waiting: u32,

    /// Time that a step with tokens of prompts may take while others wait for their next token, in
    /// milliseconds; decides how many of them are in it [default: eight times a step without them, at least 100]
    #[arg(long, value_name = "MS", value_parser = whole::<u32>(1..=600_000))]
    pub(crate) step_time_ms: Option<u32>,

    /// Seconds that any step may take before the server says that it is stalled
    #[arg(long, value_name = "SECONDS", default_value_t = 60,
          value_parser = whole::<u32>(1..=86_400))]
    pub(crate) stall_after: u32,

    /// How many times as long as steps like it a step may take before that, where that is longer
    #[arg(long, value_name = "N", default_value_t = 20,
          value_parser = whole::<u32>(1..=10_000))]
    pub(crate) stall_factor: u32,

    /// Most that a request may say in max_tokens
    #[arg(long, value_name = "N", default_value_t = i32::MAX as u32,
          value_parser = whole::<u32>(1..=i32::MAX as u32))]
    pub(crate) max_tokens: u32,

    /// Longest body of a request, in bytes
    #[arg(long, value_name = "N", default_value_t = 16 << 20,
          value_parser = whole::<u32>(1024..=1 << 30))]
    pub(crate) max_body: u32,

    /// Bytes that the bodies of all requests together may take while they are read; further ones wait a moment and
    /// then get 503. Bodies up to 64 KiB do not count
    #[arg(long, value_name = "N", default_value_t = 256 << 20,
          value_parser = whole::<u64>(1024..=1 << 40))]
    pub(crate) max_body_total: u64,

    /// Most connections at a time; beyond them only /health and /ready are answered, and all else gets 503
    #[arg(long, value_name = "N", default_value_t = 1024,
          value_parser = whole::<u32>(1..=1 << 20))]
    pub(crate) max_connections: u32,

    /// Seconds that a connection may be without a request
    #[arg(long, value_name = "SECONDS", default_value_t = 75,
          value_parser = whole::<u32>(1..=1 << 20))]
    pub(crate) idle_timeout: u32,

    /// Seconds that a client may read nothing of its answer; then its request is cancelled
    #[arg(long, value_name = "SECONDS", default_value_t = 30,
          value_parser = whole::<u32>(1..=1 << 20))]
    pub(crate) write_timeout: u32,

    /// Bytes of responses to keep for requests that go on from them, the oldest going first; 0: none
    #[arg(long, value_name = "N", default_value_t = 64 << 20,
          value_parser = whole::<u32>(0..=1 << 30))]
    pub(crate) max_stored: u32,

    /// Seconds that an answer may take, its time in the queue and the loading of its model included
    #[arg(long, value_name = "SECONDS", default_value_t = 600,
          value_parser = whole::<u32>(1..=1 << 20))]
    pub(crate) timeout: u32,

    /// Seconds that answers may go on after SIGTERM or Ctrl-C
    #[arg(long, value_name = "SECONDS", default_value_t = 30,
          value_parser = whole::<u32>(0..=1 << 20))]
    pub(crate) grace: u32,

    /// Seconds after which the process ends in any case, with an error [default: 30 more than --grace]
    #[arg(long, value_name = "SECONDS", value_parser = whole::<u32>(1..=1 << 20))]
    pub(crate) shutdown_timeout: Option<u32>,

    #[command(flatten)]
    pub(crate) hub: HubArgs,
}

impl ServeArgs {
    /// The models that were given; none is the demo model.
    pub(crate) fn models(&self) -> &[NamedModel] {
        match self.positional_models.is_empty() {
            true => &self.model,
            false => &self.positional_models,
        }
    }
}
