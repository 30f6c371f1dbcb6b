//! Flags of the log, which all commands have.

use clap::{Args, ValueEnum};

/// How the log is written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum LogFormat {
    /// A line for people.
    #[default]
    Text,
    /// A JSON object a line.
    Json,
}

/// The least that is worth a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum LogLevel {
    Error,
    Warn,
    Info,
    Debug,
    Trace,
}

/// What is logged on stderr, and how.
#[derive(Clone, Copy, Debug, Args)]
#[command(next_help_heading = "Output")]
pub(crate) struct LogArgs {
    /// What is logged on stderr: error, warn, info, debug or trace [default: info for serve, else warn]
    #[arg(long, global = true, value_name = "LEVEL", hide_possible_values = true)]
    pub(crate) log_level: Option<LogLevel>,

    /// Lines of the log: text or json
    #[arg(
        long,
        global = true,
        value_name = "FORMAT",
        default_value = "text",
        hide_possible_values = true
    )]
    pub(crate) log_format: LogFormat,
}
