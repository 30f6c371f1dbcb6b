//! Arguments of commands that make vectors and scores of texts: `embed` and `rerank`.

use super::device::{DeviceArgs, DtypeArgs};
use super::{HubArgs, WeightCacheArgs, whole};
use clap::{Args, ValueEnum};
use ferrum_models::Pooling;
use std::path::PathBuf;

/// How the vectors of tokens become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum PoolingArg {
    /// Their mean
    Mean,
    /// That of the first token
    Cls,
    /// That of the last token
    Last,
}

impl From<PoolingArg> for Pooling {
    fn from(arg: PoolingArg) -> Self {
        match arg {
            PoolingArg::Mean => Pooling::Mean,
            PoolingArg::Cls => Pooling::Cls,
            PoolingArg::Last => Pooling::Last,
        }
    }
}

#[derive(Debug, Args)]
pub(crate) struct EmbedArgs {
    /// Hugging Face folder, GGUF file, or ORG/NAME of a hub: BERT, RoBERTa and their kin, or a model that generates text
    #[arg(value_name = "MODEL")]
    pub(crate) model: PathBuf,

    /// Texts [default: each line of standard input]
    #[arg(value_name = "TEXT")]
    pub(crate) texts: Vec<String>,

    /// How the vectors of a text's tokens become one [default: what the model's files say, else mean, and
    /// last for decoders with causal attention]
    #[arg(long, value_name = "HOW")]
    pub(crate) pooling: Option<PoolingArg>,

    /// Which of the model's prompts is put before each text, such as query or document [default: the one that its files name, if
    /// any]
    #[arg(long, value_name = "NAME")]
    pub(crate) prompt: Option<String>,

    /// Numbers of each vector that are kept, for models that were trained for it [default: all]
    #[arg(long, value_name = "N", value_parser = whole::<u32>(1..=1 << 20))]
    pub(crate) dimensions: Option<u32>,

    /// Leave vectors at their own length; without it they have length 1
    #[arg(long)]
    pub(crate) no_normalize: bool,

    #[command(flatten)]
    pub(crate) device: DeviceArgs,

    #[command(flatten)]
    pub(crate) dtype: DtypeArgs,

    #[command(flatten)]
    pub(crate) weights: WeightCacheArgs,

    /// Print JSON: {"embeddings":[[…],…]}
    #[arg(long)]
    pub(crate) json: bool,

    #[command(flatten)]
    pub(crate) hub: HubArgs,
}

#[derive(Debug, Args)]
pub(crate) struct RerankArgs {
    /// Hugging Face folder, GGUF file, or ORG/NAME of a hub: BERT, RoBERTa and their kin, with a classifier of one label
    #[arg(value_name = "MODEL")]
    pub(crate) model: PathBuf,

    /// What documents are held against
    #[arg(value_name = "QUERY")]
    pub(crate) query: String,

    /// Documents [default: each line of standard input]
    #[arg(value_name = "DOCUMENT")]
    pub(crate) documents: Vec<String>,

    #[command(flatten)]
    pub(crate) device: DeviceArgs,

    #[command(flatten)]
    pub(crate) dtype: DtypeArgs,

    /// Print JSON, in the order of the documents: {"scores":[…]}
    #[arg(long)]
    pub(crate) json: bool,

    #[command(flatten)]
    pub(crate) hub: HubArgs,
}
