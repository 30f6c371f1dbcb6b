//! Arguments about the cache of packed weights.

use super::whole;
use clap::{Args, Subcommand};
use std::path::PathBuf;

/// Whether and where packed weights are kept between starts.
#[derive(Clone, Debug, Default, Args)]
pub(crate) struct WeightCacheArgs {
    /// Pack the weights at every start: neither use nor write the cache of packed weights
    #[arg(long, hide_short_help = true)]
    pub(crate) no_weight_cache: bool,

    /// Folder of packed weights [default: ferrum/packed in XDG_CACHE_HOME, else in ~/.cache]
    #[arg(long, value_name = "DIR", hide_short_help = true)]
    pub(crate) weight_cache_dir: Option<PathBuf>,

    /// Most GiB of packed weights; those used least recently go first [default: a fifth of the disk's free
    /// space, at most 32]
    #[arg(long, value_name = "GIB", hide_short_help = true,
          value_parser = whole::<u32>(1..=1 << 20))]
    pub(crate) weight_cache_size: Option<u32>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum CacheCommand {
    /// List the packed weights, the most recently used first
    List(CacheListArgs),
    /// Remove the packed weights of a model, or all
    Clear(CacheClearArgs),
}

#[derive(Debug, Args)]
pub(crate) struct CacheListArgs {
    /// Folder of packed weights [default: ferrum/packed in XDG_CACHE_HOME, else in ~/.cache]
    #[arg(long, value_name = "DIR")]
    pub(crate) weight_cache_dir: Option<PathBuf>,

    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct CacheClearArgs {
    /// GGUF file, Hugging Face folder, or ORG/NAME[:FILE] of a hub [default: all models]
    pub(crate) model: Option<PathBuf>,

    /// Folder of packed weights [default: ferrum/packed in XDG_CACHE_HOME, else in ~/.cache]
    #[arg(long, value_name = "DIR")]
    pub(crate) weight_cache_dir: Option<PathBuf>,

    /// Folder of the hub's cache [default: HF_HUB_CACHE, else hub in HF_HOME, else
    /// ~/.cache/huggingface/hub]
    #[arg(long, value_name = "DIR")]
    pub(crate) cache_dir: Option<PathBuf>,
}
