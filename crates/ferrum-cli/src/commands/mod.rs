//! One file for each command.

mod bench;
mod cache;
mod chat;
mod classify;
mod completions;
mod devices;
mod embed;
mod generation;
mod hub;
mod images;
mod inspect;
mod licenses;
mod logits;
mod perplexity;
mod quantize;
mod run;
mod serve;
mod template;
mod tokenize;
mod transcribe;
mod verify;

use crate::args::{CacheCommand, Command, VerifyCommand};
use crate::failure::Outcome;
use crate::ranks::{self, Role};

/// Runs a command, or what rank 0 says where this process is another rank.
pub(crate) fn dispatch(command: Command) -> Outcome {
    if ranks::begin(command.placement())? == Role::Follow {
        return ranks::follow(command.placement());
    }
    let outcome = run_command(command);
    ranks::end(&outcome);
    outcome
}

fn run_command(command: Command) -> Outcome {
    match command {
        Command::Run(args) => run::run(args),
        Command::Serve(args) => serve::serve(&args),
        Command::Embed(args) => embed::embed(&args),
        Command::Rerank(args) => embed::rerank(&args),
        Command::Transcribe(args) => transcribe::transcribe(&args),
        Command::Classify(args) => classify::classify(&args),
        Command::Pull(args) => hub::pull(&args),
        Command::List(args) => hub::list(&args),
        Command::Rm(args) => hub::rm(&args),
        Command::Cache(CacheCommand::List(args)) => cache::list(&args),
        Command::Cache(CacheCommand::Clear(args)) => cache::clear(&args),
        Command::Inspect(args) => inspect::inspect(&args),
        Command::Logits(args) => logits::logits(args),
        Command::Quantize(args) => quantize::quantize(&args),
        Command::Perplexity(args) => perplexity::perplexity(&args),
        Command::Tokenize(args) => tokenize::tokenize(&args),
        Command::Detokenize(args) => tokenize::detokenize(&args),
        Command::Template(args) => template::template(&args),
        Command::Bench(args) => bench::bench(&args),
        Command::Devices(args) => devices::devices(&args),
        Command::Verify(VerifyCommand::Ops(args)) => verify::ops(&args),
        Command::Verify(VerifyCommand::Model(args)) => verify::model(&args),
        Command::Completions(args) => completions::completions(&args),
        Command::Man(args) => completions::man(&args),
        Command::Licenses(args) => licenses::licenses(&args),
    }
}
