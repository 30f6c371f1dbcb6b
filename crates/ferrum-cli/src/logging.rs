//! The log on stderr: what is worth a line, and how lines are written.
//!
//! Crates below emit `tracing` events and know nothing of this. Words for people, which `ui` says, are no
//! events: with `--log-format json` a server says nothing but JSON once it serves.

use crate::args::{Cli, Command, LogArgs, LogFormat, LogLevel};
use crate::ui::{self, Verbosity};
use std::sync::OnceLock;
use tracing_subscriber::filter::LevelFilter;

static FORMAT: OnceLock<LogFormat> = OnceLock::new();

/// Whether stderr is for programs.
pub(crate) fn is_json() -> bool {
    FORMAT.get() == Some(&LogFormat::Json)
}

/// Begins to log, as the arguments say.
pub(crate) fn init(cli: &Cli) {
    let (level, format) = (level(cli), cli.log.log_format);
    FORMAT.get_or_init(|| format);
    let builder = tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_max_level(level)
        .with_ansi(false)
        // It would be told on stderr, which is what is gone then.
        .log_internal_errors(false);
    // There is no log yet, so neither fails.
    let _ = match format {
        LogFormat::Text => builder.try_init(),
        LogFormat::Json => builder
            .json()
            .flatten_event(true)
            .with_span_list(false)
            .try_init(),
    };
}

/// The level of the log: as `--log-level` says, else as much as is said otherwise.
fn level(cli: &Cli) -> LevelFilter {
    let LogArgs { log_level, .. } = cli.log;
    let serves = matches!(cli.command, Command::Serve(_));
    match log_level {
        Some(LogLevel::Error) => LevelFilter::ERROR,
        Some(LogLevel::Warn) => LevelFilter::WARN,
        Some(LogLevel::Info) => LevelFilter::INFO,
        Some(LogLevel::Debug) => LevelFilter::DEBUG,
        Some(LogLevel::Trace) => LevelFilter::TRACE,
        None => match (ui::verbosity(), serves) {
            (Verbosity::Quiet, _) => LevelFilter::ERROR,
            (_, false) => LevelFilter::WARN,
            (_, true) => LevelFilter::INFO,
        },
    }
}
