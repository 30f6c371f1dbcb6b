//! The `ferrum` command.
//!
//! A command reads its arguments, opens what it needs through `load_model.rs`, and writes data to stdout and
//! words to stderr. Whatever goes wrong is one sentence with a hint, and a non-zero exit code.

mod args;
mod commands;
mod config_file;
mod demo_model;
mod failure;
mod hub;
mod input;
mod load_model;
mod logging;
mod model_argument;
mod process;
mod ranks;
mod ui;
mod version;
mod weight_cache;

use failure::Failure;
use std::process::ExitCode;

/// Runs the command of the process's arguments; gives its exit code.
pub fn main() -> ExitCode {
    let outcome = config_file::command_line(std::env::args_os().collect());
    let outcome = outcome.and_then(|cli| match cli {
        None => Ok(()),
        Some(cli) => {
            logging::init(&cli);
            commands::dispatch(cli.command)
        }
    });
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        // A reader that has seen enough (`ferrum … | head`) is no error.
        Err(Failure::BrokenPipe) => ExitCode::SUCCESS,
        Err(failure) => {
            ui::error(&failure);
            ExitCode::FAILURE
        }
    }
}
