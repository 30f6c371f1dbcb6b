//! The model of a command: the first word, or `--model`.

use clap::Args;
use std::path::{Path, PathBuf};

/// The model of a command that has no other words.
#[derive(Clone, Debug, Args)]
pub(crate) struct ModelArgs {
    /// GGUF file, Hugging Face folder, or ORG/NAME[:FILE] of a hub [default: the demo model inside
    /// this program]
    #[arg(id = "positional_model", value_name = "MODEL")]
    positional: Option<PathBuf>,

    /// The same as MODEL
    #[arg(long, short, value_name = "MODEL", conflicts_with = "positional_model")]
    model: Option<PathBuf>,
}

impl ModelArgs {
    /// What was given; `None` is the demo model.
    pub(crate) fn path(&self) -> Option<&Path> {
        self.positional.as_deref().or(self.model.as_deref())
    }
}
