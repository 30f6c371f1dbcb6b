//! The command line as types: help, checks and completions all come from here.
#![allow(
    rustdoc::bare_urls,
    rustdoc::broken_intra_doc_links,
    reason = "comments here are the help that people read, where brackets mean optional"
)]

mod bench;
mod bench_serve;
mod classify;
mod device;
mod embed;
mod evaluate;
mod hub;
mod log;
mod model;
mod offload;
mod output;
mod program;
mod quantize;
mod run;
mod sampling;
mod serve;
mod tokenize;
mod transcribe;
mod weight_cache;

pub(crate) use bench::{BenchArgs, BenchCommand};
pub(crate) use bench_serve::{BenchServeArgs, Lengths, StreamRoute};
pub(crate) use classify::ClassifyArgs;
pub(crate) use device::{
    AdapterArgs, CacheArgs, DeviceArgs, DevicesArgs, DtypeArg, DtypeArgs, PlacementArgs,
    VerifyCommand, VerifyModelArgs, VerifyOpsArgs,
};
pub(crate) use embed::{EmbedArgs, RerankArgs};
pub(crate) use evaluate::{InspectArgs, LogitsArgs, PerplexityArgs};
pub(crate) use hub::{HubArgs, ListArgs, PullArgs, RmArgs};
pub(crate) use log::{LogArgs, LogFormat, LogLevel};
pub(crate) use model::ModelArgs;
pub(crate) use offload::OffloadArgs;
pub(crate) use output::OutputArgs;
pub(crate) use program::{CompletionsArgs, LicensesArgs, ManArgs};
pub(crate) use quantize::QuantizeArgs;
pub(crate) use run::RunArgs;
pub(crate) use sampling::{SamplerArgs, SamplingArgs, Seed, look_back};
pub(crate) use serve::{Preload, ServeArgs};
pub(crate) use tokenize::{DetokenizeArgs, TemplateArgs, TokenizeArgs};
pub(crate) use transcribe::{TranscribeArgs, TranscriptFormat};
pub(crate) use weight_cache::{CacheClearArgs, CacheCommand, CacheListArgs, WeightCacheArgs};

use clap::{CommandFactory, Parser, Subcommand};
use std::fmt::Display;
use std::ops::RangeInclusive;
use std::str::FromStr;

/// Run language models on the hardware that is there.
#[derive(Debug, Parser)]
#[command(name = "ferrum", version, max_term_width = 100)]
#[command(about = "Run language models on the hardware that is there")]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,

    #[command(flatten)]
    pub(crate) output: OutputArgs,

    #[command(flatten)]
    pub(crate) log: LogArgs,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Answer a prompt, or chat when there is none
    Run(RunArgs),
    /// Serve models over HTTP, with OpenAI's routes
    Serve(Box<ServeArgs>),
    /// Turn texts into vectors
    Embed(EmbedArgs),
    /// Score documents against a query, with a text encoder
    Rerank(RerankArgs),
    /// Write what is said in a recording, with Whisper
    Transcribe(TranscribeArgs),
    /// Score labels by how well they describe an image, with CLIP or SigLIP
    Classify(ClassifyArgs),
    /// Fetch a model from a hub, or what is new or missing of it
    Pull(PullArgs),
    /// List the models that are in the cache
    List(ListArgs),
    /// Remove a model from the cache
    Rm(RmArgs),
    /// List the packed weights that make the next start quick, or clear them
    #[command(subcommand)]
    Cache(CacheCommand),
    /// Show what a model file holds and how much memory a run takes
    Inspect(InspectArgs),
    /// Print the logits of every position
    Logits(LogitsArgs),
    /// Make a smaller GGUF file of a model in floats
    Quantize(QuantizeArgs),
    /// Measure how well a model predicts a text
    Perplexity(PerplexityArgs),
    /// Turn text into token ids
    Tokenize(TokenizeArgs),
    /// Turn token ids into text
    Detokenize(DetokenizeArgs),
    /// Render messages with a chat template
    Template(TemplateArgs),
    /// Measure speed, beside what this machine could do
    Bench(BenchArgs),
    /// List the devices that can run models
    Devices(DevicesArgs),
    /// Check this machine's backends
    #[command(subcommand)]
    Verify(VerifyCommand),
    /// Print a script that completes commands and flags in a shell
    Completions(CompletionsArgs),
    /// Write the manual pages
    Man(ManArgs),
    /// List the third-party code in this program with its licences
    Licenses(LicensesArgs),
}

impl Command {
    /// Where a model runs, for the commands that run one which generates text.
    pub(crate) fn placement(&self) -> Option<&PlacementArgs> {
        match self {
            Self::Run(args) => Some(&args.device),
            Self::Serve(args) => Some(&args.device),
            Self::Logits(args) => Some(&args.device),
            Self::Perplexity(args) => Some(&args.device),
            Self::Bench(args) if args.command.is_none() => Some(&args.device),
            _ => None,
        }
    }
}

/// A token id, for which spaces around it do not count.
fn token_id(text: &str) -> Result<u32, String> {
    let text = text.trim();
    text.parse()
        .map_err(|_| format!("found \"{text}\", expected a token id such as 42"))
}

/// A number of things, from 0 on.
fn count(text: &str) -> Result<usize, String> {
    let text = text.trim();
    text.parse()
        .map_err(|_| format!("found \"{text}\", expected a whole number, 0 or more"))
}

/// A whole number in a range.
fn whole<T>(
    range: RangeInclusive<T>,
) -> impl Fn(&str) -> Result<T, String> + Clone + Send + Sync + 'static
where
    T: FromStr + Display + PartialOrd + Clone + Send + Sync + 'static,
{
    move |text| {
        let text = text.trim();
        let value = text.parse().ok().filter(|value| range.contains(value));
        let (least, most) = (range.start(), range.end());
        value.ok_or_else(|| {
            format!("found \"{text}\", expected a whole number from {least} to {most}")
        })
    }
}

/// A number that may have decimals; what it may be is checked where it is used.
fn number(text: &str) -> Result<f32, String> {
    let text = text.trim();
    text.parse()
        .map_err(|_| format!("found \"{text}\", expected a number such as 0.7"))
}

/// The command line, as it is read and as help, completions and man pages show it.
pub(crate) fn command() -> clap::Command {
    numbers_may_be_negative(Cli::command())
}

/// A number after a flag is its value even if it is negative, so that the error of its parser says what is expected.
fn numbers_may_be_negative(command: clap::Command) -> clap::Command {
    command
        .mut_args(|arg| match arg.get_long() {
            Some(_) if arg.get_action().takes_values() && !arg.is_allow_hyphen_values_set() => {
                arg.allow_negative_numbers(true)
            }
            _ => arg,
        })
        .mut_subcommands(numbers_may_be_negative)
}

#[cfg(test)]
mod documents;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        command().debug_assert();
    }

    /// The flags of a command that take a number, with the words before them.
    fn numeric_flags(command: &clap::Command, words: &[String]) -> Vec<Vec<String>> {
        const NUMBERS: [&str; 7] = ["N", "X", "P", "MS", "SECONDS", "GIB", "N,…"];
        let path = |more: &str| [words, &[more.to_owned()]].concat();
        let is_number = |arg: &clap::Arg| {
            let names = arg.get_value_names().unwrap_or_default();
            names.iter().any(|name| NUMBERS.contains(&name.as_str()))
        };
        let own = command.get_arguments().filter(|arg| is_number(arg));
        let own = own.filter_map(|arg| Some(path(&format!("--{}", arg.get_long()?))));
        let below = command
            .get_subcommands()
            .flat_map(|command| numeric_flags(command, &path(command.get_name())));
        own.chain(below).collect()
    }

    #[test]
    fn what_is_no_number_gets_a_sentence() {
        let flags = numeric_flags(&command(), &["ferrum".to_owned()]);
        assert!(flags.len() > 60, "{flags:?}");
        for words in flags {
            let words = [words, vec!["many".to_owned()]].concat();
            let error = command().try_get_matches_from(&words).map(|_| ());
            let error = error.expect_err("no number").to_string();
            let expected = "found \"many\", expected ";
            assert!(error.contains(expected), "{words:?}: {error}");
        }
    }
}
