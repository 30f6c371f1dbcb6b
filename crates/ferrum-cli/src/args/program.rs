//! Arguments of `ferrum completions`, `ferrum man` and `ferrum licenses`.

use clap::Args;
use clap_complete::Shell;
use std::path::PathBuf;

const COMPLETIONS: &str = "\
Examples:
  ferrum completions bash > ~/.local/share/bash-completion/completions/ferrum
  ferrum completions zsh > \"${fpath[1]}/_ferrum\"
  ferrum completions fish > ~/.config/fish/completions/ferrum.fish
  ferrum completions powershell >> $PROFILE";

#[derive(Debug, Args)]
#[command(after_help = COMPLETIONS)]
pub(crate) struct CompletionsArgs {
    /// bash, elvish, fish, powershell or zsh
    #[arg(hide_possible_values = true)]
    pub(crate) shell: Shell,
}

const MAN: &str = "\
Examples:
  ferrum man ~/.local/share/man/man1
  ferrum man | man -l -";

#[derive(Debug, Args)]
#[command(after_help = MAN)]
pub(crate) struct ManArgs {
    /// Folder for a page of each command [default: the first page, on standard output]
    pub(crate) dir: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct LicensesArgs {
    /// Print the texts of the licences
    #[arg(long, conflicts_with = "json")]
    pub(crate) full: bool,

    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}
