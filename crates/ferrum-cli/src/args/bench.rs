//! Arguments of `ferrum bench`.

use super::{BenchServeArgs, HubArgs, ModelArgs, PlacementArgs, WeightCacheArgs, whole};
use clap::{Args, Subcommand};
use ferrum_engine::KvDtype;
use std::path::PathBuf;

#[derive(Debug, Subcommand)]
pub(crate) enum BenchCommand {
    /// Measure a server with OpenAI's routes, under load
    Serve(BenchServeArgs),
}

const EXAMPLES: &str = "\
Examples:
  ferrum bench model.gguf
  ferrum bench model.gguf --prompt 2048 --gen 256 --batch 4,16
  ferrum bench model.gguf --profile trace.json
  ferrum bench serve --url http://127.0.0.1:8000    # a running server, under load";

#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true, after_help = EXAMPLES)]
pub(crate) struct BenchArgs {
    #[command(subcommand)]
    pub(crate) command: Option<BenchCommand>,

    #[command(flatten)]
    pub(crate) model: ModelArgs,

    /// Tokens of the prompt
    #[arg(long, short, value_name = "N", default_value_t = 512,
          value_parser = whole::<u32>(1..=1 << 20))]
    pub(crate) prompt: u32,

    /// Tokens to generate
    #[arg(long = "gen", short, value_name = "N", default_value_t = 128,
          value_parser = whole::<u32>(1..=1 << 20))]
    pub(crate) gen_tokens: u32,

    /// Also decode this many sequences at once, such as 1,4,16
    #[arg(long, short, value_name = "N,…", value_delimiter = ',',
          value_parser = whole::<u16>(1..=256))]
    pub(crate) batch: Vec<u16>,

    /// Runs; medians are printed
    #[arg(long, short, value_name = "N", default_value_t = 3,
          value_parser = whole::<u32>(1..=100))]
    pub(crate) repeat: u32,

    /// Also measure each op, print which takes how long, and write a Chrome trace to FILE (open it in
    /// Perfetto or chrome://tracing)
    #[arg(long, value_name = "FILE")]
    pub(crate) profile: Option<PathBuf>,

    #[command(flatten)]
    pub(crate) device: PlacementArgs,

    #[command(flatten)]
    pub(crate) weights: WeightCacheArgs,

    /// Element of the KV cache [default: f32 for f32 models, else f16]
    #[arg(long, value_name = "TYPE")]
    pub(crate) kv_dtype: Option<KvDtype>,

    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,

    #[command(flatten)]
    pub(crate) hub: HubArgs,
}
