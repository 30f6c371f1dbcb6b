//! The command line as types: help, checks and completions all come from here.
#![allow(
    rustdoc::bare_urls,
    rustdoc::broken_intra_doc_links,
    reason = "comments here are the help that people read, where brackets mean optional"
)]

mod bench_serve;
mod hub;
mod sampling;

pub(crate) use bench_serve::{BenchServeArgs, Lengths, StreamRoute};
pub(crate) use hub::{HubArgs, ListArgs, PullArgs, RmArgs};
pub(crate) use sampling::{SamplerArgs, SamplingArgs};

use clap::{Args, Parser, Subcommand, ValueEnum};
use ferrum_engine::{BackendKind, BackendOptions, KvDtype};
use ferrum_kernels::cpu::Isa;
use ferrum_models::quantize::{Recipe, Search};
use ferrum_server::{CallFormat, CorsOrigin, OtlpEndpoint};
use std::net::IpAddr;
use std::path::{Path, PathBuf};

/// Run language models on the hardware that is there.
#[derive(Debug, Parser)]
#[command(name = "ferrum", version, max_term_width = 100)]
#[command(about = "Run language models on the hardware that is there")]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Answer a prompt, or chat when there is none
    Run(RunArgs),
    /// Serve models over HTTP, with OpenAI's routes
    Serve(ServeArgs),
    /// Fetch a model from a hub, or what is new or missing of it
    Pull(PullArgs),
    /// List the models that are in the cache
    List(ListArgs),
    /// Remove a model from the cache
    Rm(RmArgs),
    /// Show what a model file holds and how much memory a run takes
    Inspect(InspectArgs),
    /// Print the logits of every position
    Logits(LogitsArgs),
    /// Make a smaller GGUF file of a model in floats
    Quantize(QuantizeArgs),
    /// Measure how well a model predicts a text
    Perplexity(PerplexityArgs),
    /// Turn text into token ids
    Tokenize(TokenizeArgs),
    /// Turn token ids into text
    Detokenize(DetokenizeArgs),
    /// Render messages with a chat template
    Template(TemplateArgs),
    /// Measure speed, beside what this machine could do
    Bench(BenchArgs),
    /// List the devices that can run models
    Devices(DevicesArgs),
    /// Check this machine's backends
    #[command(subcommand)]
    Verify(VerifyCommand),
}

/// A token id, for which spaces around it do not count.
fn token_id(text: &str) -> Result<u32, String> {
    let text = text.trim();
    text.parse()
        .map_err(|_| format!("found \"{text}\", expected a token id such as 42"))
}

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

/// Which device.
#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct DeviceArgs {
    /// Where to run: auto, cpu, vulkan, metal, cuda or reference
    #[arg(long, default_value_t = BackendKind::Auto)]
    pub(crate) backend: BackendKind,

    /// Number of the device, as in `ferrum devices`
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) device: usize,

    /// CPU threads [default: one for each physical core]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub(crate) threads: Option<u16>,

    /// Instructions of the CPU, such as avx2 [default: the fastest that it has]
    ///
    /// One of scalar, neon, neon-dotprod, avx2, avx-vnni, avx512, avx512-bf16; `ferrum devices` shows the
    /// fastest of this CPU. All give the same bits but the last, which rounds activations where weights are
    /// bf16.
    #[arg(long, value_name = "LEVEL")]
    pub(crate) isa: Option<Isa>,
}

impl DeviceArgs {
    pub(crate) fn options(&self) -> BackendOptions {
        BackendOptions {
            ordinal: self.device,
            threads: self.threads.map(usize::from),
            isa: self.isa,
        }
    }
}

/// Which KV cache.
#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct CacheArgs {
    /// Element of the KV cache: f32 or f16; on a CPU also bf16, fp8 (E4M3) or int8 (with scales)
    /// [default: f32 for f32 models, else f16]
    #[arg(long, value_name = "TYPE")]
    pub(crate) kv_dtype: Option<KvDtype>,

    /// Longest sequence in tokens [default: what is needed, up to the model's context]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1 << 24))]
    pub(crate) context: Option<u32>,
}

/// What runs beside the model's weights.
#[derive(Clone, Debug, Args)]
pub(crate) struct AdapterArgs {
    /// LoRA adapter for the model: a folder that PEFT wrote
    #[arg(long, value_name = "DIR")]
    pub(crate) lora: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    /// What to answer; read from a pipe when absent
    pub(crate) prompt: Option<String>,

    /// GGUF file, Hugging Face folder, or ORG/NAME[:FILE] of a hub [default: the demo model inside
    /// this program]
    #[arg(long, short, value_name = "MODEL")]
    pub(crate) model: Option<PathBuf>,

    #[command(flatten)]
    pub(crate) adapter: AdapterArgs,

    #[command(flatten)]
    pub(crate) device: DeviceArgs,

    #[command(flatten)]
    pub(crate) cache: CacheArgs,

    #[command(flatten)]
    pub(crate) sampling: SamplingArgs,

    #[command(flatten)]
    pub(crate) samplers: SamplerArgs,

    /// Most tokens to generate [default: until the model ends or the context is full]
    #[arg(long, short = 'n', value_name = "N", allow_negative_numbers = true)]
    pub(crate) max_tokens: Option<usize>,

    /// End the answer at this text; can be given several times
    #[arg(long, value_name = "TEXT")]
    pub(crate) stop: Vec<String>,

    /// System message
    #[arg(long, value_name = "TEXT")]
    pub(crate) system: Option<String>,

    /// Continue the prompt as it is, without a chat template
    #[arg(long, conflicts_with = "system")]
    pub(crate) raw: bool,

    #[command(flatten)]
    pub(crate) hub: HubArgs,
}

#[derive(Clone, Debug, Args)]
pub(crate) struct ServeArgs {
    /// TOML file with settings: each flag is a key of the same name, and flags go before the file
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,

    /// Print the settings that hold, as such a file, and end
    #[arg(long)]
    pub(crate) print_config: bool,

    /// GGUF file, Hugging Face folder, or ORG/NAME[:FILE] of a hub, maybe as NAME=MODEL; can be given several
    /// times: requests that name no model get the first [default: the demo model inside this program]
    #[arg(long, short, value_name = "MODEL", value_parser = named_model)]
    pub(crate) model: Vec<NamedModel>,

    /// What requests call the model, if there is one [default: the name of its file or folder]
    #[arg(long, value_name = "NAME")]
    pub(crate) served_model_name: Option<String>,

    /// Which models are loaded at the start: first, all or none; the others are when they are asked for
    #[arg(long, value_name = "WHICH", value_enum, default_value_t = Preload::First,
          hide_possible_values = true)]
    pub(crate) preload: Preload,

    /// Most models that are loaded at once; for another, the idle one that was used least recently is
    /// unloaded [default: all]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub(crate) max_loaded_models: Option<u16>,

    /// Unload a model that nobody has used for so long; the next request loads it again [default: never]
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    pub(crate) idle_unload: Option<u32>,

    /// Address to listen on; 0.0.0.0 lets other machines in
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1")]
    pub(crate) host: IpAddr,

    /// Port to listen on; 0 takes a free one
    #[arg(long, short, value_name = "N", default_value_t = 8000)]
    pub(crate) port: u16,

    /// Key that requests must bring; can be given several times. Others on this machine may see it in
    /// the list of processes: --api-key-file keeps it from them
    #[arg(long, value_name = "KEY")]
    pub(crate) api_key: Vec<String>,

    /// File with such keys, one a line
    #[arg(long, value_name = "FILE")]
    pub(crate) api_key_file: Option<PathBuf>,

    /// LoRA adapter of the first model, which requests choose as the model NAME; can be given several times
    #[arg(long, value_name = "NAME=DIR", value_parser = named_folder)]
    pub(crate) lora: Vec<(String, PathBuf)>,

    /// Folder from whose folders requests may load LoRA adapters [default: they may not]
    #[arg(long, value_name = "DIR")]
    pub(crate) lora_dir: Option<PathBuf>,

    /// How the model writes calls of tools: hermes, llama3, mistral or mistral-args [default: as its chat
    /// template says]
    #[arg(long, value_name = "FORMAT")]
    pub(crate) tool_call_parser: Option<CallFormat>,

    /// Site whose pages may ask this server, such as `https://chat.example.org`, or * for all; can be given
    /// several times [default: none]
    #[arg(long, value_name = "ORIGIN")]
    pub(crate) cors_origin: Vec<CorsOrigin>,

    /// PEM file with the certificate, then those that signed it: serve HTTPS; SIGHUP reads it anew
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    pub(crate) tls_cert: Option<PathBuf>,

    /// PEM file with the certificate's private key
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    pub(crate) tls_key: Option<PathBuf>,

    /// Collector that traces go to by OTLP over HTTP, such as `http://localhost:4318`; https works too [default: none]
    #[arg(long, value_name = "URL")]
    pub(crate) otlp_endpoint: Option<OtlpEndpoint>,

    #[command(flatten)]
    pub(crate) device: DeviceArgs,

    #[command(flatten)]
    pub(crate) cache: CacheArgs,

    /// Most sequences that are computed at once
    #[arg(long, value_name = "N", default_value_t = 16,
          value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub(crate) max_seqs: u16,

    /// Tokens that the KV cache holds over all sequences [default: full contexts for all of them, if
    /// that fits half of the memory that the weights leave]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1 << 30))]
    pub(crate) kv_tokens: Option<u32>,

    /// Smaller model of the same vocabulary that guesses tokens, which the model checks several at a time;
    /// answers stay the same
    #[arg(long, value_name = "MODEL")]
    pub(crate) draft_model: Option<PathBuf>,

    /// Most tokens that it guesses at a time
    #[arg(long, value_name = "N", default_value_t = 4, requires = "draft_model",
          value_parser = clap::value_parser!(u8).range(1..=64))]
    pub(crate) draft_tokens: u8,

    /// Most tokens to guess at a time from what a text already says; 0: none. Pays where answers quote
    #[arg(long, value_name = "N", default_value_t = 0,
          value_parser = clap::value_parser!(u8).range(0..=64))]
    pub(crate) lookup_tokens: u8,

    /// Most sequences that may wait for an engine, and requests for a model to be loaded; further requests
    /// get 429
    #[arg(long, value_name = "N", default_value_t = 256,
          value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    pub(crate) max_waiting: u32,

    /// Most that a request may say in max_tokens
    #[arg(long, value_name = "N", default_value_t = 1 << 20,
          value_parser = clap::value_parser!(u32).range(1..=1 << 24))]
    pub(crate) max_tokens: u32,

    /// Longest body of a request, in bytes
    #[arg(long, value_name = "N", default_value_t = 16 << 20,
          value_parser = clap::value_parser!(u32).range(1024..=1 << 30))]
    pub(crate) max_body: u32,

    /// Bytes of responses to keep for requests that go on from them, the oldest going first; 0: none
    #[arg(long, value_name = "N", default_value_t = 64 << 20,
          value_parser = clap::value_parser!(u32).range(0..=1 << 30))]
    pub(crate) max_stored: u32,

    /// Seconds that an answer may take, its time in the queue and the loading of its model included
    #[arg(long, value_name = "SECONDS", default_value_t = 600,
          value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    pub(crate) timeout: u32,

    /// Seconds that answers may go on after SIGTERM or Ctrl-C
    #[arg(long, value_name = "SECONDS", default_value_t = 30,
          value_parser = clap::value_parser!(u32).range(0..=1 << 20))]
    pub(crate) grace: u32,

    #[command(flatten)]
    pub(crate) hub: HubArgs,
}

#[derive(Debug, Args)]
pub(crate) struct InspectArgs {
    /// GGUF file, Hugging Face folder, or ORG/NAME[:FILE] of a hub [default: the demo model]
    pub(crate) model: Option<PathBuf>,

    #[command(flatten)]
    pub(crate) cache: CacheArgs,

    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,

    #[command(flatten)]
    pub(crate) hub: HubArgs,
}

#[derive(Debug, Args)]
#[group(id = "input", required = true, multiple = false, args = ["tokens", "prompt"])]
pub(crate) struct LogitsArgs {
    /// GGUF file, Hugging Face folder, or ORG/NAME[:FILE] of a hub [default: the demo model]
    #[arg(long, short, value_name = "MODEL")]
    pub(crate) model: Option<PathBuf>,

    /// Token ids, separated by commas
    #[arg(long, value_name = "IDS", value_delimiter = ',', value_parser = token_id,
          allow_negative_numbers = true)]
    pub(crate) tokens: Vec<u32>,

    /// Text instead of ids; special tokens are added
    #[arg(long, value_name = "TEXT")]
    pub(crate) prompt: Option<String>,

    #[command(flatten)]
    pub(crate) adapter: AdapterArgs,

    #[command(flatten)]
    pub(crate) device: DeviceArgs,

    /// Element of the KV cache; f32 rounds nothing
    #[arg(long, value_name = "TYPE", default_value_t = KvDtype::F32)]
    pub(crate) kv_dtype: KvDtype,

    /// Print JSON: {"tokens":[…],"logits":[[…],…]}
    #[arg(long)]
    pub(crate) json: bool,

    #[command(flatten)]
    pub(crate) hub: HubArgs,
}

/// What a person has to know to choose; bits are those of large models.
const TYPES: &str = "\
Types, with the bits that a weight takes:
  q8_0                        8.5        as good as the original
  q6_k                        6.6        hardly worse
  q5_k_m, q5_k_s, q5_1, q5_0  5.5 to 6
  q4_k_m, q4_k_s, q4_1, q4_0  4.5 to 5   q4_k_m is the usual choice
  iq4_nl, iq4_xs              4.5, 4.25  better than q4_0 at its size, or smaller
  mxfp4, mxfp4_moe            4.25       all matrices, or only those of experts (the rest: q8_0)
  q3_k_l, q3_k_m, q3_k_s      3.4 to 4.3 when memory is short
  q2_k                        2.6 to 3   the smallest
  f32, f16, bf16              32, 16     conversion only

Tensors that suffer most take more bits, by llama.cpp's rules (--dry-run shows the type of each);
_s, _m and _l say how many do. llama.cpp reads the new file too.

Examples:
  ferrum quantize Qwen3-0.6B/ qwen3-q4_k_m.gguf --type q4_k_m
  ferrum quantize model-bf16.gguf model-q3_k_m.gguf --type q3_k_m --imatrix imatrix.gguf
  ferrum quantize model-bf16.gguf model.gguf --type iq4_xs --dry-run";

#[derive(Debug, Args)]
#[command(after_long_help = TYPES)]
pub(crate) struct QuantizeArgs {
    /// Hugging Face folder, GGUF file or ORG/NAME[:FILE] of a hub, in f32, f16 or bf16
    #[arg(value_name = "SRC")]
    pub(crate) source: PathBuf,

    /// The GGUF file to write
    #[arg(value_name = "DST")]
    pub(crate) destination: PathBuf,

    /// What to write: q4_k_m is the usual choice; --help lists all
    #[arg(long = "type", short = 't', value_name = "TYPE")]
    pub(crate) recipe: Recipe,

    /// Importance of the columns, as `llama-imatrix` writes it (.dat or .gguf)
    #[arg(long, value_name = "FILE")]
    pub(crate) imatrix: Option<PathBuf>,

    /// How long scales are searched for: fast or thorough, which leaves slightly smaller errors
    #[arg(long, value_name = "HOW", default_value_t)]
    pub(crate) search: Search,

    /// Threads [default: one for each core]; the file does not depend on it
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub(crate) threads: Option<u16>,

    /// Write over a file that is there
    #[arg(long)]
    pub(crate) force: bool,

    /// Take a source that is quantised already, and lose quality twice
    #[arg(long)]
    pub(crate) requantize: bool,

    /// Only show which type each tensor would take
    #[arg(long)]
    pub(crate) dry_run: bool,

    /// Print JSON: what was written, tensor by tensor
    #[arg(long)]
    pub(crate) json: bool,

    #[command(flatten)]
    pub(crate) hub: HubArgs,
}

#[derive(Debug, Args)]
pub(crate) struct PerplexityArgs {
    /// Text file, UTF-8; - for standard input
    pub(crate) file: PathBuf,

    /// GGUF file, Hugging Face folder, or ORG/NAME[:FILE] of a hub [default: the demo model]
    #[arg(long, short, value_name = "MODEL")]
    pub(crate) model: Option<PathBuf>,

    #[command(flatten)]
    pub(crate) adapter: AdapterArgs,

    #[command(flatten)]
    pub(crate) device: DeviceArgs,

    #[command(flatten)]
    pub(crate) cache: CacheArgs,

    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,

    #[command(flatten)]
    pub(crate) hub: HubArgs,
}

#[derive(Debug, Args)]
pub(crate) struct TokenizeArgs {
    /// Text; - or nothing: standard input
    pub(crate) text: Option<String>,

    /// GGUF file (a vocabulary is enough), folder with tokenizer files, or ORG/NAME[:FILE] of a hub
    /// [default: the demo model]
    #[arg(long, short, value_name = "MODEL")]
    pub(crate) model: Option<PathBuf>,

    /// Add the tokens that begin and end a text for this model
    #[arg(long)]
    pub(crate) add_special: bool,

    /// Take special tokens written in the text as such, not as plain text
    #[arg(long)]
    pub(crate) parse_special: bool,

    /// Print JSON: {"tokens":[…]}
    #[arg(long)]
    pub(crate) json: bool,

    #[command(flatten)]
    pub(crate) hub: HubArgs,
}

#[derive(Debug, Args)]
pub(crate) struct DetokenizeArgs {
    /// GGUF file (a vocabulary is enough), folder with tokenizer files, or ORG/NAME[:FILE] of a hub
    /// [default: the demo model]
    #[arg(long, short, value_name = "MODEL")]
    pub(crate) model: Option<PathBuf>,

    /// Token ids, separated by commas
    #[arg(long, value_name = "IDS", value_delimiter = ',', required = true,
          value_parser = token_id, allow_negative_numbers = true)]
    pub(crate) tokens: Vec<u32>,

    /// Leave out special tokens
    #[arg(long)]
    pub(crate) skip_special: bool,

    #[command(flatten)]
    pub(crate) hub: HubArgs,
}

#[derive(Debug, Args)]
pub(crate) struct TemplateArgs {
    /// GGUF file, folder, .jinja file, or ORG/NAME[:FILE] of a hub [default: the demo model]
    #[arg(long, short, value_name = "MODEL")]
    pub(crate) model: Option<PathBuf>,

    /// JSON file with a list of messages ({"role": …, "content": …}); - for standard input
    #[arg(long, value_name = "FILE")]
    pub(crate) messages: PathBuf,

    /// JSON file with a list of tools, as in OpenAI's API
    #[arg(long, value_name = "FILE")]
    pub(crate) tools: Option<PathBuf>,

    /// Text of the token that begins a sequence, for a .jinja file, which does not say
    #[arg(long, value_name = "TEXT")]
    pub(crate) bos_token: Option<String>,

    /// Text of the token that ends a sequence, for a .jinja file, which does not say
    #[arg(long, value_name = "TEXT")]
    pub(crate) eos_token: Option<String>,

    /// Do not begin an answer at the end
    #[arg(long)]
    pub(crate) no_generation_prompt: bool,

    #[command(flatten)]
    pub(crate) hub: HubArgs,
}

#[derive(Debug, Subcommand)]
pub(crate) enum BenchCommand {
    /// Measure a server with OpenAI's routes, under load
    Serve(BenchServeArgs),
}

#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct BenchArgs {
    #[command(subcommand)]
    pub(crate) command: Option<BenchCommand>,

    /// GGUF file, Hugging Face folder, or ORG/NAME[:FILE] of a hub [default: the demo model]
    #[arg(long, short, value_name = "MODEL")]
    pub(crate) model: Option<PathBuf>,

    /// Tokens of the prompt
    #[arg(long, short, value_name = "N", default_value_t = 512,
          value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    pub(crate) prompt: u32,

    /// Tokens to generate
    #[arg(long = "gen", short, value_name = "N", default_value_t = 128,
          value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    pub(crate) gen_tokens: u32,

    /// Also decode this many sequences at once, such as 1,4,16
    #[arg(long, short, value_name = "N,…", value_delimiter = ',',
          value_parser = clap::value_parser!(u16).range(1..=256))]
    pub(crate) batch: Vec<u16>,

    /// Runs; medians are printed
    #[arg(long, short, value_name = "N", default_value_t = 3,
          value_parser = clap::value_parser!(u32).range(1..=100))]
    pub(crate) repeat: u32,

    /// Also measure each op, print which takes how long, and write a Chrome trace to FILE (open it in
    /// Perfetto or chrome://tracing)
    #[arg(long, value_name = "FILE")]
    pub(crate) profile: Option<PathBuf>,

    #[command(flatten)]
    pub(crate) device: DeviceArgs,

    /// Element of the KV cache [default: f32 for f32 models, else f16]
    #[arg(long, value_name = "TYPE")]
    pub(crate) kv_dtype: Option<KvDtype>,

    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,

    #[command(flatten)]
    pub(crate) hub: HubArgs,
}

#[derive(Debug, Args)]
pub(crate) struct DevicesArgs {
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum VerifyCommand {
    /// Run every op of a backend against its meaning
    Ops(VerifyOpsArgs),
}

#[derive(Debug, Args)]
pub(crate) struct VerifyOpsArgs {
    #[command(flatten)]
    pub(crate) device: DeviceArgs,

    /// Only ops whose name contains this
    #[arg(long, value_name = "TEXT", default_value = "")]
    pub(crate) filter: String,

    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }
}
