//! Arguments of commands that look into a model: `inspect`, `logits` and `perplexity`.

use super::{
    AdapterArgs, CacheArgs, HubArgs, ModelArgs, PlacementArgs, WeightCacheArgs, token_id, whole,
};
use clap::Args;
use ferrum_engine::{KvDtype, StageList};
use std::ffi::OsString;
use std::path::PathBuf;

#[derive(Debug, Args)]
pub(crate) struct InspectArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,

    #[command(flatten)]
    pub(crate) cache: CacheArgs,

    /// Plan a run with this placement, such as cpu:0-13,vulkan:14-27, and say what each device needs
    #[arg(long, value_name = "BACKEND:FIRST-LAST,…")]
    pub(crate) layers: Option<StageList>,

    /// Show what each of N ranks that compute each layer together holds
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = whole::<u16>(1..=1024), conflicts_with = "layers")]
    pub(crate) tensor_parallel: u16,

    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,

    #[command(flatten)]
    pub(crate) hub: HubArgs,
}

impl InspectArgs {
    /// Whether a flag says how a run is to be planned.
    pub(crate) fn asks_for_a_plan(&self) -> bool {
        let cache = &self.cache;
        self.layers.is_some()
            || self.tensor_parallel > 1
            || cache.context.is_some()
            || cache.kv_dtype.is_some()
    }
}

#[derive(Debug, Args)]
#[group(id = "input", required = true, multiple = false, args = ["tokens", "prompt"])]
pub(crate) struct LogitsArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,

    /// Token ids, separated by commas
    #[arg(long, value_name = "IDS", value_delimiter = ',', value_parser = token_id)]
    pub(crate) tokens: Vec<u32>,

    /// Text instead of ids; special tokens are added
    #[arg(long, value_name = "TEXT")]
    pub(crate) prompt: Option<String>,

    #[command(flatten)]
    pub(crate) adapter: AdapterArgs,

    #[command(flatten)]
    pub(crate) device: PlacementArgs,

    #[command(flatten)]
    pub(crate) weights: WeightCacheArgs,

    /// Element of the KV cache; f32 rounds nothing
    #[arg(long, value_name = "TYPE", default_value_t = KvDtype::F32)]
    pub(crate) kv_dtype: KvDtype,

    /// Print JSON: {"tokens":[…],"logits":[[…],…]}
    #[arg(long)]
    pub(crate) json: bool,

    #[command(flatten)]
    pub(crate) hub: HubArgs,
}

#[derive(Debug, Args)]
pub(crate) struct PerplexityArgs {
    /// GGUF file, Hugging Face folder, or ORG/NAME[:FILE] of a hub [default: the demo model inside
    /// this program]
    #[arg(value_name = "MODEL")]
    pub(crate) first: Option<OsString>,

    /// Text file, UTF-8; - for standard input. Alone, it is the only word
    #[arg(value_name = "FILE")]
    pub(crate) second: Option<OsString>,

    /// The same as MODEL
    #[arg(long, short, value_name = "MODEL")]
    pub(crate) model: Option<PathBuf>,

    #[command(flatten)]
    pub(crate) adapter: AdapterArgs,

    #[command(flatten)]
    pub(crate) device: PlacementArgs,

    #[command(flatten)]
    pub(crate) weights: WeightCacheArgs,

    #[command(flatten)]
    pub(crate) cache: CacheArgs,

    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,

    #[command(flatten)]
    pub(crate) hub: HubArgs,
}
