//! Arguments of commands about text and tokens: `tokenize`, `detokenize` and `template`.

use super::{HubArgs, ModelArgs, token_id};
use clap::Args;
use std::ffi::OsString;
use std::path::PathBuf;

#[derive(Debug, Args)]
pub(crate) struct TokenizeArgs {
    /// GGUF file (a vocabulary is enough), folder with tokenizer files, or ORG/NAME[:FILE] of a hub
    /// [default: the demo model]
    #[arg(value_name = "MODEL")]
    pub(crate) first: Option<OsString>,

    /// Text; - or nothing: standard input
    #[arg(value_name = "TEXT")]
    pub(crate) second: Option<OsString>,

    /// The same as MODEL: the only word is the text then
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
    #[command(flatten)]
    pub(crate) model: ModelArgs,

    /// Token ids, separated by commas
    #[arg(long, value_name = "IDS", value_delimiter = ',', required = true,
          value_parser = token_id)]
    pub(crate) tokens: Vec<u32>,

    /// Leave out special tokens
    #[arg(long)]
    pub(crate) skip_special: bool,

    #[command(flatten)]
    pub(crate) hub: HubArgs,
}

#[derive(Debug, Args)]
pub(crate) struct TemplateArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,

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
