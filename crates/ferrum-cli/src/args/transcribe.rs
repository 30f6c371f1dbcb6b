//! Arguments of `transcribe`.

use super::HubArgs;
use super::device::{DeviceArgs, DtypeArgs};
use clap::{Args, ValueEnum};
use std::path::PathBuf;

/// What a transcript is printed as.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum TranscriptFormat {
    /// What is said
    Text,
    /// {"text":…,"segments":[…]}
    Json,
    /// SubRip subtitles
    Srt,
    /// WebVTT subtitles
    Vtt,
}

#[derive(Debug, Args)]
pub(crate) struct TranscribeArgs {
    /// Hugging Face folder, or ORG/NAME of a hub: Whisper
    #[arg(value_name = "MODEL")]
    pub(crate) model: PathBuf,

    /// WAV, MP3, FLAC or Ogg Vorbis
    #[arg(value_name = "FILE")]
    pub(crate) file: PathBuf,

    /// What is printed
    #[arg(long, value_name = "FORMAT", default_value = "text")]
    pub(crate) format: TranscriptFormat,

    /// Language that is spoken, as a code such as `en` [default: what the model hears]
    #[arg(long, value_name = "CODE")]
    pub(crate) language: Option<String>,

    /// Write English, whatever is spoken
    #[arg(long)]
    pub(crate) translate: bool,

    /// Leave the times out: each window of 30 seconds is one segment
    #[arg(long)]
    pub(crate) no_timestamps: bool,

    /// Text before the recording: names and how they are spelled, or what was said before
    #[arg(long, value_name = "TEXT")]
    pub(crate) prompt: Option<String>,

    /// Temperature of the first attempt at a window, from 0 (the likeliest tokens) to 1
    #[arg(long, value_name = "T", default_value_t = 0.0)]
    pub(crate) temperature: f32,

    /// Keep the first attempt, also where it repeats itself or is unlikely; otherwise windows are decoded again at
    /// higher temperatures, and dropped where nobody speaks
    #[arg(long)]
    pub(crate) no_fallback: bool,

    #[command(flatten)]
    pub(crate) device: DeviceArgs,

    #[command(flatten)]
    pub(crate) dtype: DtypeArgs,

    /// Print JSON: {"text":…,"segments":[{"start","end","text"},…]}
    #[arg(long, conflicts_with = "format")]
    pub(crate) json: bool,

    #[command(flatten)]
    pub(crate) hub: HubArgs,
}
