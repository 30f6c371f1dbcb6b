//! `ferrum transcribe`.

use crate::args::{DeviceArgs, TranscribeArgs, TranscriptFormat};
use crate::failure::{Failure, Outcome};
use crate::input;
use crate::load_model;
use crate::ui::{self, Progress, show};
use ferrum_engine::transcribe::{Fallback, TranscribeOptions, Transcriber, Transcript, srt, vtt};
use ferrum_engine::{BackendDispatch, BackendKind};
use ferrum_formats::ModelSource;
use ferrum_formats::tokenizer::Tokenizer;
use ferrum_media::audio::{AudioLimits, RATE, decode};
use ferrum_models::whisper::{WhisperModel, read_whisper};
use ferrum_models::{LoadProgress, ModelKind};
use serde_json::json;
use std::ops::ControlFlow;

/// Bytes of the longest file.
const MAX_FILE: u64 = 4 << 30;

pub(crate) fn transcribe(args: &TranscribeArgs) -> Outcome {
    if !(0.0..=1.0).contains(&args.temperature) {
        let found = args.temperature;
        let reason = format!("temperature: found {found}, expected a number from 0 to 1");
        return Err(Failure::new(reason));
    }
    // The file first: it is read sooner than a model is loaded.
    let bytes = input::read_bytes(&args.file, MAX_FILE)?;
    let audio = decode(bytes, RATE, AudioLimits::default());
    let fail = |e| Failure::new(format!("{}: {e}", args.file.display()));
    let audio = audio.map_err(fail)?;
    if let Some(damage) = &audio.damage {
        ui::say(&format!("warning: {}: {damage}", args.file.display()));
    }
    let mut transcriber = open(args)?;
    let options = TranscribeOptions {
        language: args.language.clone(),
        translate: args.translate,
        timestamps: !args.no_timestamps,
        prompt: args.prompt.clone(),
        temperature: args.temperature,
        fallback: (!args.no_fallback).then(Fallback::default),
    };
    let go_on = &mut || ControlFlow::Continue(());
    let transcript = transcriber.transcribe(&audio.samples, &options, go_on)?;
    let format = if args.json {
        TranscriptFormat::Json
    } else {
        args.format
    };
    show(&match format {
        TranscriptFormat::Text => format!("{}\n", transcript.text),
        TranscriptFormat::Json => format!("{}\n", as_json(&transcript)),
        TranscriptFormat::Srt => srt(&transcript),
        TranscriptFormat::Vtt => vtt(&transcript),
    })
}

fn as_json(transcript: &Transcript) -> serde_json::Value {
    let segments = transcript.segments.iter().map(|segment| {
        json!({
            "start": segment.start,
            "end": segment.end,
            "text": segment.text,
            "tokens": segment.tokens,
            "temperature": segment.figures.temperature,
            "avg_logprob": segment.figures.average_logprob,
            "compression_ratio": segment.figures.compression_ratio,
            "no_speech_prob": segment.figures.no_speech,
        })
    });
    json!({
        "text": transcript.text,
        "language": transcript.language,
        "duration": transcript.duration,
        "segments": segments.collect::<Vec<_>>(),
    })
}

fn open(args: &TranscribeArgs) -> Outcome<Transcriber> {
    let mut model = read_whisper(load_model::source_of(
        ModelKind::Speech,
        &args.model,
        &args.hub,
    )?)?;
    model.dtype = args.dtype.into();
    let mut bar = Progress::bytes("loading");
    load(&model, &args.device, &mut |done, total| {
        bar.set(done, total)
    })
}

/// Loads a model with its tokenizer.
pub(crate) fn load(
    model: &WhisperModel,
    device: &DeviceArgs,
    progress: LoadProgress<'_>,
) -> Outcome<Transcriber> {
    let ModelSource::Hf(folder) = &model.source else {
        return Err(Failure::new("speech models are read from folders"));
    };
    let tokenizer = Tokenizer::from_hf_dir(&folder.dir)?;
    // Tokens come one by one, each read back by the host: a GPU is used only if named.
    let kind = match device.backend {
        BackendKind::Auto => BackendKind::Cpu,
        kind => kind,
    };
    let device = BackendDispatch::from_kind(kind, device.options())?;
    Ok(Transcriber::load(&device, model, tokenizer, progress)?)
}
