//! Arguments about models of a hub.

use clap::Args;
use std::path::PathBuf;

/// Where models named `ORG/NAME` come from. What is not given comes from the variables that all programs
/// of the hub share.
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "Models of a hub")]
pub(crate) struct HubArgs {
    /// Folder of the cache [default: HF_HUB_CACHE, else hub in HF_HOME, else
    /// ~/.cache/huggingface/hub]
    #[arg(long, value_name = "DIR", hide_short_help = true)]
    pub(crate) cache_dir: Option<PathBuf>,

    /// Address of the hub [default: HF_ENDPOINT, else https://huggingface.co]
    #[arg(long, value_name = "URL", hide_short_help = true)]
    pub(crate) endpoint: Option<String>,

    /// Branch, tag or commit of the model [default: main]
    #[arg(long, value_name = "REV", hide_short_help = true)]
    pub(crate) revision: Option<String>,

    /// Take what is in the cache, and never use the network; also by HF_HUB_OFFLINE=1
    #[arg(long, hide_short_help = true)]
    pub(crate) offline: bool,

    /// File with the token for the hub [default: HF_TOKEN, else the file that `hf auth login` writes]
    #[arg(long, value_name = "FILE", hide_short_help = true)]
    pub(crate) token_file: Option<PathBuf>,
}

const EXAMPLES: &str = "\
Of a repository with safetensors, config, tokenizer, templates and weights are fetched; of one with GGUF \
files, one of them: FILE is its path or the end of its name, else Q4_K_M or Q8_0 is taken if there is just \
one such file, or the only file. The path goes to standard output.

Examples:
  ferrum pull Qwen/Qwen3-0.6B
  ferrum pull Qwen/Qwen3-0.6B-GGUF:Q8_0
  ferrum pull https://HOST/Qwen/Qwen3-0.6B/tree/main
  ferrum run Qwen/Qwen3-0.6B \"A question\"   # fetches what is not in the cache";

#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct PullArgs {
    /// ORG/NAME, or ORG/NAME:FILE for one file; the address of its page on a hub does as well
    #[arg(value_name = "MODEL")]
    pub(crate) model: String,

    #[command(flatten)]
    pub(crate) hub: HubArgs,
}

#[derive(Debug, Args)]
#[command(after_help = "What stands under MODEL is what other commands take: `ferrum run MODEL`.")]
pub(crate) struct ListArgs {
    /// Folder of the cache [default: HF_HUB_CACHE, else hub in HF_HOME, else
    /// ~/.cache/huggingface/hub]
    #[arg(long, value_name = "DIR")]
    pub(crate) cache_dir: Option<PathBuf>,

    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

const RM_EXAMPLES: &str = "\
Examples:
  ferrum rm Qwen/Qwen3-0.6B-GGUF:Q8_0
  ferrum rm Qwen/Qwen3-0.6B --yes";

#[derive(Debug, Args)]
#[command(after_help = RM_EXAMPLES)]
pub(crate) struct RmArgs {
    /// ORG/NAME for all of it, or ORG/NAME:FILE for one file
    #[arg(value_name = "MODEL")]
    pub(crate) model: String,

    /// Only this branch, tag or commit (its first 7 digits are enough)
    #[arg(long, value_name = "REV")]
    pub(crate) revision: Option<String>,

    /// Folder of the cache [default: HF_HUB_CACHE, else hub in HF_HOME, else
    /// ~/.cache/huggingface/hub]
    #[arg(long, value_name = "DIR")]
    pub(crate) cache_dir: Option<PathBuf>,

    /// Do not ask
    #[arg(long, short)]
    pub(crate) yes: bool,
}
