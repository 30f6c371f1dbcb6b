//! [`Transcriber`]: sound to text, with the tokenizer and the log-mel front end around a [`SpeechModel`].
//!
//! Long recordings are read window by window. Where the next window begins is what the timestamps of the text say (the
//! algorithm of the paper: Radford et al., 2022, section 3.8). Tokens are chosen greedily, and again at higher temperatures
//! where that failed ([`Fallback`]). Without a fallback the results are those of `generate` in `transformers` without
//! conditions on earlier text.

mod fallback;
mod format;
mod rules;
mod special;
mod windows;

pub use fallback::{Fallback, WindowFigures};
pub use format::{srt, vtt};

use crate::device::DeviceJob;
use crate::{BackendDispatch, TaskModel};
use fallback::{Attempt, compression_ratio, probability};
use ferrum_formats::tokenizer::{EncodeOptions, Tokenizer};
use ferrum_kernels::{BackendKvDtype, KvF32, LlmBackend};
use ferrum_media::audio::{HOP, LogMelExtractor, LogMelSpectrogram, RATE};
use ferrum_models::whisper::{SpeechModel, WhisperModel, WhisperRunner, load_whisper};
use ferrum_models::{LoadProgress, WeightForm};
use ferrum_types::{Error, Result, TokenId};
use rules::Rules;
use special::SpeechTokens;
use std::ops::ControlFlow;
use windows::{TimedTokens, split, whole};

/// Options of a transcription.
#[derive(Clone, Debug, PartialEq)]
pub struct TranscribeOptions {
    /// Its language by its code (`en`); `None`: the model says.
    pub language: Option<String>,
    /// Whether the text is to be English whatever is spoken.
    pub translate: bool,
    /// Whether the text has times; without them each window is one segment.
    pub timestamps: bool,
    /// A text before the first window: names and spellings, or the end of an earlier part. Its last tokens count, as many as
    /// half of a text may have.
    pub prompt: Option<String>,
    /// The temperature of the first attempt, from 0 (greedy) to 1.
    pub temperature: f32,
    /// When a window is decoded again at a higher temperature, or dropped; `None`: never.
    pub fallback: Option<Fallback>,
}

impl Default for TranscribeOptions {
    fn default() -> Self {
        Self {
            language: None,
            translate: false,
            timestamps: true,
            prompt: None,
            temperature: 0.0,
            fallback: Some(Fallback::default()),
        }
    }
}

/// A recording and the options of its transcription.
#[derive(Clone, Debug)]
pub struct TranscribeTask {
    /// Samples at [`RATE`] per second.
    pub samples: Vec<f32>,
    /// The options.
    pub options: TranscribeOptions,
}

/// A part of a text, with when it is spoken.
#[derive(Clone, Debug, PartialEq)]
pub struct SpeechSegment {
    /// Seconds from the beginning.
    pub start: f64,
    /// Seconds from the beginning.
    pub end: f64,
    /// What is said.
    pub text: String,
    /// The tokens that the model wrote, timestamps included.
    pub tokens: Vec<TokenId>,
    /// Figures of the window that it is a part of.
    pub figures: WindowFigures,
}

/// What is said in a recording.
#[derive(Clone, Debug, PartialEq)]
pub struct Transcript {
    /// All of it.
    pub text: String,
    /// The code of its language; `None` for a model that knows one language.
    pub language: Option<String>,
    /// Seconds of the recording.
    pub duration: f64,
    /// Its parts.
    pub segments: Vec<SpeechSegment>,
}

/// A Whisper model on a device, and what is around it.
pub struct Transcriber {
    inner: Box<dyn SpeechModel>,
    tokenizer: Tokenizer,
    tokens: SpeechTokens,
    mel: LogMelExtractor,
}

impl Transcriber {
    /// Loads a model onto a device.
    ///
    /// # Errors
    /// Those of [`load_whisper`]; `Model` for a tokenizer without the tokens that begin and end a text.
    pub fn load(
        device: &BackendDispatch,
        model: &WhisperModel,
        tokenizer: Tokenizer,
        progress: LoadProgress<'_>,
    ) -> Result<Self> {
        let tokens = SpeechTokens::read(model, &tokenizer)?;
        let load = Load { model, progress };
        let inner = device.with_kv::<KvF32, _>(false, load)?;
        Ok(Self {
            mel: LogMelExtractor::new(model.spec.mels),
            inner,
            tokenizer,
            tokens,
        })
    }

    /// Name of the backend.
    pub fn backend(&self) -> &'static str {
        self.inner.backend()
    }

    /// Codes of the languages that it knows; none for a model of one language.
    pub fn languages(&self) -> impl Iterator<Item = &str> {
        self.tokens.languages.iter().map(|(code, _)| code.as_str())
    }

    /// Writes what is said. Between windows it calls `step`, and ends early where that says so.
    ///
    /// # Errors
    /// `InvalidArgument` for a language that the model does not know, and a translation by one that knows one only;
    /// what the device says.
    pub fn transcribe(
        &mut self,
        samples: &[f32],
        options: &TranscribeOptions,
        step: &mut dyn FnMut() -> ControlFlow<()>,
    ) -> Result<Transcript> {
        let frames = self.inner.spec().frames();
        let window = frames * HOP;
        // A short recording is silent up to the end of the window, as the model has learned it.
        let (mel, content) = match samples.len() <= window {
            true => {
                let mut padded = samples.to_vec();
                padded.resize(window, 0.0);
                (self.mel.compute(&padded), samples.len().div_ceil(HOP))
            }
            false => {
                let mel = self.mel.compute(samples);
                let content = mel.frames;
                (mel, content)
            }
        };
        let (mut segments, mut seek, mut begin) = (Vec::new(), 0, None);
        while seek < content {
            let window = cut(&mel, seek, frames);
            self.inner.encode(&window)?;
            let begin = match &begin {
                Some(begin) => begin,
                None => begin.insert(self.begin(options)?),
            };
            let (tokens, figures) = self.decode(begin, options, seek as u64)?;
            let left = (content - seek).min(frames);
            let silent = options
                .fallback
                .is_some_and(|fallback| fallback.is_silence(&figures));
            let (parts, moved) = match options.timestamps {
                _ if silent => (Vec::new(), left),
                true => split(&tokens, self.tokens.first_timestamp(), left),
                false => (vec![whole(&tokens, left)], left),
            };
            segments.extend(
                parts
                    .into_iter()
                    .map(|part| self.segment(seek, part, figures)),
            );
            seek += moved;
            if step().is_break() {
                break;
            }
        }
        let text: String = segments.iter().map(|part| part.text.as_str()).collect();
        let language = begin.and_then(|begin: Begin| {
            let id = begin.tokens.get(begin.start + 1)?;
            let mut known = self.tokens.languages.iter();
            known
                .find(|(_, known)| known == id)
                .map(|(code, _)| code.clone())
        });
        Ok(Transcript {
            text: text.trim().to_owned(),
            language,
            duration: samples.len() as f64 / f64::from(RATE),
            segments,
        })
    }

    /// The tokens that begin each text. Without a language option, the language is detected in the window that was read
    /// last.
    fn begin(&mut self, options: &TranscribeOptions) -> Result<Begin> {
        let sot = self.inner.spec().start;
        let mut begin = self.prompt(options.prompt.as_deref())?;
        let start = begin.len();
        begin.push(sot);
        if self.tokens.languages.is_empty() {
            if options.translate || options.language.as_deref().is_some_and(|code| code != "en") {
                let reason = "the model knows English only";
                return Err(Error::invalid("transcribe", reason));
            }
        } else {
            begin.push(match &options.language {
                Some(code) => self.tokens.language(code)?,
                None => self.tokens.likeliest(&self.inner.decode(&[sot], 0)?),
            });
            begin.push(self.tokens.task(options.translate)?);
        }
        if !options.timestamps {
            begin.push(self.tokens.no_timestamps);
        }
        Ok(Begin {
            tokens: begin,
            start,
        })
    }

    /// The token that begins a prompt and the last tokens of the prompt that fit; none without a prompt.
    fn prompt(&self, prompt: Option<&str>) -> Result<Vec<TokenId>> {
        let text = prompt.map(str::trim).filter(|text| !text.is_empty());
        let Some(text) = text else {
            return Ok(Vec::new());
        };
        let previous = self.tokens.previous.ok_or_else(|| {
            let reason = "prompt: the model has no token that begins one (<|startofprev|>)";
            Error::invalid("transcribe", reason)
        })?;
        // Texts begin with a space, and control tokens in a prompt are text.
        let options = EncodeOptions {
            add_special: false,
            parse_special: false,
        };
        let ids = self.tokenizer.encode(&format!(" {text}"), options);
        let ids = ids.map_err(|e| Error::invalid("transcribe", format!("prompt: {e}")))?;
        let most = (self.inner.spec().tokens / 2).saturating_sub(1);
        let last = &ids[ids.len().saturating_sub(most)..];
        Ok([&[previous], last].concat())
    }

    /// The text of the window that was read last, and its figures: the first attempt that needs no other.
    fn decode(
        &mut self,
        begin: &Begin,
        options: &TranscribeOptions,
        seed: u64,
    ) -> Result<(Vec<TokenId>, WindowFigures)> {
        let mut temperature = options.temperature;
        loop {
            let found = self.write(begin, options.timestamps, Attempt::new(temperature, seed))?;
            let figures = WindowFigures {
                temperature,
                ..found.1
            };
            let next = options
                .fallback
                .and_then(|fallback| fallback.next(&figures));
            match next {
                Some(higher) => temperature = higher,
                None => return Ok((found.0, figures)),
            }
        }
    }

    /// The text of the window that was read last, by one attempt.
    fn write(
        &mut self,
        begin: &Begin,
        timestamps: bool,
        mut attempt: Attempt,
    ) -> Result<(Vec<TokenId>, WindowFigures)> {
        let most = self.inner.spec().tokens;
        let rules = Rules {
            tokens: &self.tokens,
            timestamps,
        };
        let mut figures = WindowFigures::default();
        // Whether anybody speaks is what follows the token that begins a text.
        let (before, behind) = begin.tokens.split_at(begin.start + 1);
        let mut logits = self.inner.decode(before, 0)?;
        if let Some(token) = self.tokens.no_speech {
            figures.no_speech = probability(&logits, token);
        }
        let (mut written, mut position) = (Vec::new(), before.len());
        let mut new = behind.to_vec();
        while position + new.len() < most {
            if !new.is_empty() {
                logits = self.inner.decode(&new, position)?;
                position += new.len();
            }
            rules.apply(&written, &mut logits);
            let token = attempt.choose(&logits)?;
            if token == self.tokens.eot {
                break;
            }
            written.push(token);
            new = vec![token];
        }
        figures.average_logprob = attempt.average_logprob();
        figures.compression_ratio = compression_ratio(&self.text_of(&written));
        Ok((written, figures))
    }

    /// What tokens say, without timestamps.
    fn text_of(&self, tokens: &[TokenId]) -> String {
        let is_text = |token: &&TokenId| **token < self.tokens.eot;
        let spoken: Vec<_> = tokens.iter().filter(is_text).copied().collect();
        self.tokenizer.decode(&spoken, true)
    }

    fn segment(&self, seek: usize, part: TimedTokens, figures: WindowFigures) -> SpeechSegment {
        let offset = seek as f64 / 100.0;
        SpeechSegment {
            start: offset + part.start as f64 / 50.0,
            end: offset + part.end as f64 / 50.0,
            text: self.text_of(&part.tokens),
            tokens: part.tokens,
            figures,
        }
    }
}

/// What each text begins with.
struct Begin {
    tokens: Vec<TokenId>,
    /// Where the token is that begins a text; a prompt is before it.
    start: usize,
}

/// `frames` of a spectrogram from `seek` on; zeros beyond its end.
fn cut(mel: &LogMelSpectrogram, seek: usize, frames: usize) -> Vec<f32> {
    let mut window = Vec::with_capacity(mel.values.len().min(frames * 128));
    for row in mel.values.chunks_exact(mel.frames.max(1)) {
        let part = &row[seek.min(row.len())..row.len().min(seek + frames)];
        window.extend_from_slice(part);
        window.resize(window.len() + frames - part.len(), 0.0);
    }
    window
}

impl TaskModel for Transcriber {
    type Task = TranscribeTask;
    type Output = Transcript;

    fn backend(&self) -> &'static str {
        self.inner.backend()
    }

    /// States of the encoder.
    fn tokens(task: &TranscribeTask) -> usize {
        task.samples.len() / (2 * HOP)
    }

    fn joins(&self, _first: &TranscribeTask, _next: &TranscribeTask, _tokens: usize) -> bool {
        false
    }

    fn run(
        &mut self,
        tasks: &[TranscribeTask],
        step: &mut dyn FnMut() -> ControlFlow<()>,
    ) -> Result<Vec<Transcript>> {
        let tasks = tasks.iter();
        tasks
            .map(|task| self.transcribe(&task.samples, &task.options, step))
            .collect()
    }
}

/// Loads a model on whichever device.
struct Load<'a, 'p> {
    model: &'a WhisperModel,
    progress: LoadProgress<'p>,
}

impl DeviceJob<KvF32> for Load<'_, '_> {
    type Output = Box<dyn SpeechModel>;

    fn run<B: LlmBackend + BackendKvDtype<KvF32>, W: WeightForm<B>>(
        self,
        (loading, running): (&B, &B),
    ) -> Result<Self::Output> {
        let Self { model, progress } = self;
        let weights = load_whisper::<B, W>(loading, model, progress)?;
        let runner = WhisperRunner::new(running, model.spec.clone(), weights)?;
        Ok(Box::new(runner))
    }
}
