//! `/v1/audio/transcriptions` and `/v1/audio/translations`: what is said in a recording, as OpenAI has it.

use crate::error::ApiError;
use crate::http::app::{App, note_ignored};
use crate::http::multipart::Form;
use crate::models::AnyLease;
use crate::observability::metrics::EndedPrompt;
use crate::observability::record::RequestRecord;
use crate::response::{
    Transcription, TranscriptionSegment, TranscriptionTask, VerboseTranscription,
};
use axum::Json;
use axum::extract::{Request, State};
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use ferrum_engine::engine::Usage;
use ferrum_engine::transcribe::{
    Fallback, TranscribeOptions, TranscribeTask, Transcript, srt, vtt,
};
use ferrum_media::audio::{AudioLimits, RATE, decode};
use std::sync::Arc;
use tokio::time::timeout;

/// Longest recording of a request: its samples and its spectrogram take 0.4 GiB.
const LIMITS: AudioLimits = AudioLimits { seconds: 3600 };

/// How a transcript is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Format {
    Json,
    Text,
    Srt,
    Vtt,
    Verbose,
}

impl Format {
    fn of(name: Option<&str>) -> Result<Self, ApiError> {
        Ok(match name {
            None | Some("json") => Self::Json,
            Some("text") => Self::Text,
            Some("srt") => Self::Srt,
            Some("vtt") => Self::Vtt,
            Some("verbose_json") => Self::Verbose,
            Some(other) => {
                let reason =
                    format!("found {other:?}, expected json, text, srt, vtt or verbose_json");
                return Err(ApiError::invalid("response_format", reason));
            }
        })
    }
}

/// `/v1/audio/transcriptions`.
pub(crate) async fn transcriptions(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response, ApiError> {
    answer(&app, request, false).await
}

/// `/v1/audio/translations`.
pub(crate) async fn translations(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response, ApiError> {
    answer(&app, request, true).await
}

async fn answer(app: &Arc<App>, request: Request, translate: bool) -> Result<Response, ApiError> {
    let (bytes, mut form, paid) = app.form(request).await?;
    let file = form.file()?;
    let model = form.text("model");
    let format = Format::of(form.text("response_format").as_deref())?;
    let options = options(&mut form, translate)?;
    let ignored = form.ignored();
    if let (true, Some(name)) = (app.config.strict, ignored.first()) {
        return Err(ApiError::unknown(name));
    }
    note_ignored(ignored);
    let lease = match app.lease_any(model.as_deref()).await?.by_kind() {
        AnyLease::Transcriber(lease) => lease,
        other => return Err(other.refusal()),
    };
    // A language that the model does not know is refused before it is asked.
    if let Some(code) = &options.language
        && !lease.languages.is_empty()
        && !lease
            .languages
            .iter()
            .any(|known| known.eq_ignore_ascii_case(code))
    {
        let known = lease.languages.join(", ");
        let reason = format!("found {code:?}, expected one of {known}");
        return Err(ApiError::invalid("language", reason));
    }
    let length = bytes.len();
    let heard = move || {
        let audio = decode(bytes[file].to_vec(), RATE, LIMITS);
        drop(paid);
        audio.map_err(|e| {
            let sentence = e.to_string();
            ApiError::invalid("file", sentence.lines().next().unwrap_or_default())
        })
    };
    let audio = app.read_long(length, heard).await?;
    if let Some(damage) = &audio.damage {
        tracing::warn!("a recording of {length} bytes: {damage}");
    }
    let seconds = audio.samples.len().div_ceil(RATE as usize);
    let task = TranscribeTask {
        samples: audio.samples,
        options,
    };
    let left = app.config.request_timeout.saturating_sub(lease.waited);
    let answer = timeout(left, lease.engine.submit(task, 0)).await;
    let answer = answer.map_err(|_| ApiError::timeout())??;
    lease.metrics().queued(answer.queued);
    lease.metrics().prompt_ended(EndedPrompt {
        tokens: seconds * 50,
        preemptions: 0,
        computed: Some(answer.computed),
        answers: None,
    });
    if let Some(record) = RequestRecord::current() {
        let tokens = answer.output.segments.iter();
        record.queued(answer.queued);
        record.add_usage(&Usage {
            completion_tokens: tokens.map(|part| part.tokens.len()).sum(),
            ..Usage::default()
        });
    }
    Ok(written(answer.output, format, translate))
}

/// What the fields ask for.
fn options(form: &mut Form, translate: bool) -> Result<TranscribeOptions, ApiError> {
    let off = |value: &Option<String>| value.as_deref().is_none_or(|word| word == "false");
    if !off(&form.text("stream")) {
        let reason = "transcripts come as a whole";
        return Err(ApiError::unsupported("stream", reason));
    }
    let mut temperature = 0.0;
    if let Some(text) = form.text("temperature") {
        let found = text.parse::<f32>().ok();
        temperature = found.filter(|t| (0.0..=1.0).contains(t)).ok_or_else(|| {
            let reason = format!("found {text:?}, expected a number from 0 to 1");
            ApiError::invalid("temperature", reason)
        })?;
    }
    for name in ["timestamp_granularities[]", "timestamp_granularities"] {
        if let Some(other) = form.list(name).iter().find(|one| *one != "segment") {
            let reason = format!("found {other:?}, expected segment");
            return Err(ApiError::unsupported(name, reason));
        }
    }
    Ok(TranscribeOptions {
        language: form.text("language"),
        translate,
        timestamps: true,
        prompt: form.text("prompt"),
        temperature,
        // As OpenAI has it: with 0 the temperature rises by itself where a text is not likely enough.
        fallback: (temperature == 0.0).then(Fallback::default),
    })
}

fn written(transcript: Transcript, format: Format, translate: bool) -> Response {
    let plain = |kind: &'static str, text: String| ([(CONTENT_TYPE, kind)], text).into_response();
    match format {
        Format::Json => Json(Transcription {
            text: transcript.text,
        })
        .into_response(),
        Format::Text => plain(
            "text/plain; charset=utf-8",
            format!("{}\n", transcript.text),
        ),
        Format::Srt => plain("text/plain; charset=utf-8", srt(&transcript)),
        Format::Vtt => plain("text/vtt; charset=utf-8", vtt(&transcript)),
        Format::Verbose => {
            let parts = transcript.segments.into_iter().enumerate();
            let parts = parts.map(|(id, part)| TranscriptionSegment {
                id,
                start: part.start,
                end: part.end,
                text: part.text,
                tokens: part.tokens,
                temperature: part.figures.temperature,
                avg_logprob: part.figures.average_logprob,
                compression_ratio: part.figures.compression_ratio,
                no_speech_prob: part.figures.no_speech,
            });
            Json(VerboseTranscription {
                task: match translate {
                    true => TranscriptionTask::Translate,
                    false => TranscriptionTask::Transcribe,
                },
                language: transcript.language,
                duration: transcript.duration,
                text: transcript.text,
                segments: parts.collect(),
            })
            .into_response()
        }
    }
}
