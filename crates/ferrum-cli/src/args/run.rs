//! Arguments of `ferrum run`.

use super::{
    AdapterArgs, CacheArgs, HubArgs, PlacementArgs, SamplerArgs, SamplingArgs, WeightCacheArgs,
    count,
};
use clap::Args;
use std::ffi::OsString;
use std::path::PathBuf;

const EXAMPLES: &str = "\
One word alone is a model if there is such a path, or if it reads ORG/NAME[:FILE] or https://HOST/ORG/NAME; \
anything else is a prompt for the demo model. Standard input is read to its end unless it is a terminal.

Examples:
  ferrum run                                    # chat with the demo model
  ferrum run \"Tell me a story about a fox.\"
  ferrum run model.gguf                         # chat
  ferrum run model.gguf \"A question\"
  ferrum run Qwen/Qwen3-0.6B-GGUF:Q8_0 \"A question\"   # fetched from a hub if it is not here
  ferrum run model.gguf \"Summarise this text.\" < text.txt
  ferrum run model.gguf --session talk.kv \"A question\"   # the next one goes on from there
  ferrum run model.gguf --temperature 0 --max-tokens 50 - < prompt.txt";

#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct RunArgs {
    /// GGUF file, Hugging Face folder, or ORG/NAME[:FILE] of a hub [default: the demo model inside
    /// this program]
    #[arg(value_name = "MODEL")]
    pub(crate) first: Option<OsString>,

    /// What to answer; text from a pipe follows it, and - is that text alone [default: a chat]
    #[arg(value_name = "PROMPT")]
    pub(crate) second: Option<OsString>,

    /// The same as MODEL: the only word is the prompt then
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

    #[command(flatten)]
    pub(crate) sampling: SamplingArgs,

    /// Most tokens to generate [default: until the model ends or the context is full]
    #[arg(long, short = 'n', value_name = "N", value_parser = count)]
    pub(crate) max_tokens: Option<usize>,

    /// End the answer at this text; can be given several times
    #[arg(long, value_name = "TEXT")]
    pub(crate) stop: Vec<String>,

    /// System message
    #[arg(long, value_name = "TEXT")]
    pub(crate) system: Option<String>,

    /// PNG or JPEG file that the question is about, for models that see; can be given several times
    #[arg(long, value_name = "FILE", conflicts_with_all = ["raw", "session"])]
    pub(crate) image: Vec<PathBuf>,

    /// Continue the prompt as it is, without a chat template
    #[arg(long, conflicts_with = "system")]
    pub(crate) raw: bool,

    /// File that keeps the conversation with its keys and values: the next run with it goes on from there, and computes
    /// only what is new
    #[arg(long, value_name = "FILE", conflicts_with = "lora")]
    pub(crate) session: Option<PathBuf>,

    #[command(flatten)]
    pub(crate) samplers: SamplerArgs,

    #[command(flatten)]
    pub(crate) hub: HubArgs,
}
