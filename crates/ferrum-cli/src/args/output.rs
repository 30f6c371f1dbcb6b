//! Flags that all commands have: how much is said, and in which colours.

use crate::ui::Verbosity;
use clap::{Args, ColorChoice};

/// How a command speaks.
#[derive(Clone, Copy, Debug, Args)]
#[command(next_help_heading = "Output")]
pub(crate) struct OutputArgs {
    /// Print only errors
    #[arg(long, short, global = true, conflicts_with = "verbose")]
    quiet: bool,

    /// Print details
    #[arg(long, short, global = true)]
    verbose: bool,

    /// Colours: auto, always or never; auto shows them on a terminal unless NO_COLOR is set
    #[arg(
        long,
        global = true,
        value_name = "WHEN",
        default_value = "auto",
        hide_possible_values = true
    )]
    pub(crate) color: ColorChoice,
}

impl OutputArgs {
    pub(crate) fn verbosity(self) -> Verbosity {
        match (self.quiet, self.verbose) {
            (true, _) => Verbosity::Quiet,
            (_, true) => Verbosity::Verbose,
            _ => Verbosity::Normal,
        }
    }
}
