//! `/completion` and `/infill`: llama.cpp's own routes, for clients that know no others, such as editors.

use super::completions::{self, count_prompts};
use crate::config::ServerConfig;
use crate::error::ApiError;
use crate::generation::generation_stream::{GenerationEvent, GenerationStream, TextChunk, Timings};
use crate::generation::logprobs::native_entry;
use crate::generation::options::{GenerationOptions, check_range, max_tokens, stop_strings};
use crate::generation::sampler_settings::sampler_settings;
use crate::generation::structured::{self, Structured};
use crate::http::app::App;
use crate::http::sse::{self, EventText, StreamEncoder};
use crate::models::Lease;
use crate::models::model::Model;
use crate::prompt::fim::{self, FimParts};
use crate::request::{
    Body, Content, Infill, Int, LlamaCppCompletion, LlamaCppOptions, LlamaCppPrompt, PromptPart,
    StructuredOutputFields,
};
use crate::response::{
    GenerationSettings, LlamaCppAnswer, LlamaCppChunk, LlamaCppTimings, StopType,
    TokenProbabilities,
};
use axum::Json;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use ferrum_engine::{Dry, FinishReason, SamplingParams, Xtc};
use ferrum_formats::tokenizer::EncodeOptions;
use ferrum_types::TokenId;
use serde::Serialize;
use serde_json::{Map, Value};
use std::sync::Arc;
use std::time::Duration;

type Result<T> = std::result::Result<T, ApiError>;

#[derive(Debug)]
struct Job {
    options: GenerationOptions,
    prompts: Vec<Vec<TokenId>>,
    shown: Shown,
    time_limit: Option<Duration>,
}

/// What a request wants to be told beside the text.
#[derive(Debug)]
struct Shown {
    /// As it was asked for; -1 for as many as fit.
    n_predict: i64,
    n_probs: Option<usize>,
    tokens: bool,
    timings: bool,
    /// Paths of fields; `None`: all.
    fields: Option<Vec<String>>,
}

/// Goes on with a prompt or several.
pub(crate) async fn completion(State(app): State<Arc<App>>, request: Request) -> Result<Response> {
    let (job, lease) = app.read(request, read_completion).await?;
    answer(&app, job, &lease).await
}

/// Fills in what belongs between a prefix and a suffix.
pub(crate) async fn infill(State(app): State<Arc<App>>, request: Request) -> Result<Response> {
    let (job, lease) = app.read(request, read_infill).await?;
    answer(&app, job, &lease).await
}

async fn answer(app: &App, job: Job, lease: &Lease) -> Result<Response> {
    let asked = job.prompts.iter().map(|prompt| ferrum_engine::Request {
        logprobs: job.shown.n_probs,
        continues_prompt: job.options.continues_prompt || completions::goes_on(lease, prompt),
        ..job.options.request(prompt.clone(), &app.config)
    });
    let mut answers = GenerationStream::begin(lease, "prompt", job.options.n, asked)?;
    answers.limit_time(job.time_limit);
    let stream = job.options.stream;
    let mut shape = LlamaCpp::new(lease, job, answers.count());
    if stream {
        return Ok(sse::response(answers, shape));
    }
    let mut ended: Vec<_> = (0..answers.count()).map(|_| None).collect();
    while let Some(event) = answers.next().await {
        match event {
            GenerationEvent::Failed(error) => return Err(error),
            GenerationEvent::TextChunk(piece) => {
                let index = piece.index;
                ended[index] = shape.take(piece).or(ended[index].take());
            }
            GenerationEvent::PromptLogprobs(..)
            | GenerationEvent::Embedding(..)
            | GenerationEvent::Done(_) => {}
        }
    }
    let untold = std::mem::take(&mut shape.answers).into_iter().zip(ended);
    let whole = untold.enumerate().filter_map(|(index, (untold, ended))| {
        let whole = shape.whole(index, untold, ended?);
        Some(shape.selected(whole))
    });
    let mut whole: Vec<_> = whole.collect();
    // One answer stands for itself.
    Ok(match (whole.pop(), whole.is_empty()) {
        (Some(only), true) => Json(only).into_response(),
        (last, _) => {
            whole.extend(last);
            Json(whole).into_response()
        }
    })
}

fn read_completion(app: &App, lease: &Lease, body: &mut Body) -> Result<Job> {
    let mut job = read(app, lease, body)?;
    let LlamaCppCompletion { prompt } = body.part()?;
    count_prompts("prompt", prompt.list.len(), app.config.max_prompts)?;
    let listed = prompt.listed;
    let prompts = prompt.list.into_iter().enumerate().map(|(i, prompt)| {
        let param = match listed {
            true => format!("prompt[{i}]"),
            false => "prompt".to_owned(),
        };
        read_prompt(lease, prompt, &param)
    });
    job.prompts = prompts.collect::<Result<_>>()?;
    let answer = job.options.min_output_tokens();
    for prompt in &mut job.prompts {
        job.options.truncation.apply(prompt, lease, answer);
    }
    let (answers, most) = (job.prompts.len() * job.options.n, app.config.max_choices);
    if answers > most {
        let reason = format!("found {answers} answers over all prompts, expected at most {most}");
        return Err(ApiError::invalid("n_cmpl", reason));
    }
    Ok(job)
}

fn read_infill(app: &App, lease: &Lease, body: &mut Body) -> Result<Job> {
    let marks = fim::tokens(lease, "/infill")?;
    let mut job = read(app, lease, body)?;
    let fields: Infill = body.part()?;
    let before = fields.input_prefix.unwrap_or_default() + &fields.prompt.unwrap_or_default();
    let after = fields.input_suffix.unwrap_or_default();
    let files = fields.input_extra.unwrap_or_default().0;
    let parts = FimParts {
        prefix: fim::prefix(lease, "input_prefix", &before)?,
        suffix: fim::suffix(lease, "input_suffix", &after)?,
        extra: fim::repository(lease, marks, &files, "input_extra")?,
    };
    let mut prompt = fim::prompt(lease, marks, &parts, job.options.generation.max_tokens)?;
    let answer = job.options.min_output_tokens();
    job.options.truncation.apply(&mut prompt, lease, answer);
    job.prompts = vec![prompt];
    job.options.add_stop_tokens(&marks.ends);
    job.options.continues_prompt = true;
    Ok(job)
}

/// What both routes have, without the prompts.
fn read(app: &App, lease: &Lease, body: &mut Body) -> Result<Job> {
    let config = &app.config;
    let mut options = GenerationOptions::read_common(body, lease)?;
    let fields: LlamaCppOptions = body.part()?;
    options.generation.max_tokens = n_predict(&fields, config)?;
    if let Some(n) = fields.n_cmpl {
        options.n = check_range("n_cmpl", n.0, 1..=config.max_choices)?;
    }
    options.generation.stop = stop_strings("stop", fields.stop.unwrap_or_default().0)?;
    options.structured = structured::read(body.part::<StructuredOutputFields>()?, lease)?;
    if let Some(Structured { grammar, param }) = &options.structured {
        options.grammar = Some(structured::compile(lease, param, grammar)?);
    }
    if let Some(samplers) = &fields.samplers {
        keep_samplers(samplers, &mut options.generation.sampling, body);
    }
    let limit = fields.t_max_predict_ms.filter(|limit| limit.0 > 0);
    if limit.is_some() && options.n > 1 {
        body.ignore("t_max_predict_ms");
    }
    Ok(Job {
        prompts: Vec::new(),
        shown: Shown {
            n_predict: fields.n_predict.map_or(-1, |most| most.0),
            n_probs: fields.n_probs.and_then(Int::count).filter(|&n| n > 0),
            tokens: fields.return_tokens.unwrap_or(false),
            timings: fields.timings_per_token.unwrap_or(false),
            fields: fields.response_fields.map(|fields| fields.0),
        },
        time_limit: limit.map(|limit| Duration::from_millis(limit.0.unsigned_abs())),
        options,
    })
}

fn n_predict(fields: &LlamaCppOptions, config: &ServerConfig) -> Result<usize> {
    let most = max_tokens(&[("n_predict", fields.n_predict)], 0, config)?;
    Ok(most.unwrap_or(config.max_tokens))
}

/// A prompt of texts and tokens. What begins with a text begins as any text does.
fn read_prompt(model: &Model, prompt: LlamaCppPrompt, param: &str) -> Result<Vec<TokenId>> {
    let mut tokens = Vec::new();
    for (i, part) in prompt.0.into_iter().enumerate() {
        match part {
            PromptPart::Tokens(ids) => {
                tokens.extend(completions::read_tokens(model, ids, param)?.tokens);
            }
            PromptPart::Text(text) if i == 0 => {
                tokens.extend(completions::read_text(model, text, param)?.tokens);
            }
            PromptPart::Text(text) => {
                tokens.extend(model.encode(param, &text, EncodeOptions::PROMPT)?);
            }
        }
    }
    match tokens.is_empty() {
        true => Err(ApiError::invalid(param, "found no token")),
        false => Ok(tokens),
    }
}

/// What turns a sampler off.
type TurnOff = fn(&mut SamplingParams);

/// The samplers that a request can name, in the order in which they act.
const SAMPLERS: [(&str, TurnOff); 8] = [
    ("penalties", |sampling| {
        (sampling.repeat_penalty, sampling.presence_penalty) = (1.0, 0.0);
        sampling.frequency_penalty = 0.0;
    }),
    ("dry", |sampling| sampling.dry = Dry::default()),
    ("temperature", |sampling| sampling.temperature = 1.0),
    ("top_k", |sampling| sampling.top_k = 0),
    ("top_p", |sampling| sampling.top_p = 1.0),
    ("min_p", |sampling| sampling.min_p = 0.0),
    ("typ_p", |sampling| sampling.typical_p = 1.0),
    ("xtc", |sampling| sampling.xtc = Xtc::default()),
];

/// Turns off the samplers that a list does not name. Reports as ignored: another order than ours, unknown samplers, and
/// letters instead of names.
fn keep_samplers(samplers: &Content<String>, sampling: &mut SamplingParams, body: &mut Body) {
    let Content::Parts(names) = samplers else {
        return body.ignore("samplers");
    };
    let mut kept = [false; SAMPLERS.len()];
    let mut last = 0;
    for (i, name) in names.iter().enumerate() {
        let name = match name.as_str() {
            "typical_p" | "typical" => "typ_p",
            name => name,
        };
        match SAMPLERS.iter().position(|(known, _)| *known == name) {
            Some(at) => {
                kept[at] = true;
                if at < last {
                    body.ignore("samplers");
                }
                last = last.max(at);
            }
            None => body.ignore(format!("samplers[{i}]")),
        }
    }
    for ((_, turn_off), kept) in SAMPLERS.iter().zip(kept) {
        if !kept {
            turn_off(sampling);
        }
    }
}

/// Output of a choice that no chunk has contained yet.
#[derive(Debug, Default)]
struct Untold {
    text: String,
    tokens: Vec<TokenId>,
    probs: Vec<TokenProbabilities>,
    has_new_line: bool,
}

/// How an answer ended.
#[derive(Debug)]
struct Ended {
    reason: FinishReason,
    stop: Option<String>,
    timings: Timings,
}

/// The shape of answers.
struct LlamaCpp {
    model: Arc<Model>,
    name: String,
    n: usize,
    prompts: Vec<Vec<TokenId>>,
    shown: Shown,
    max_tokens: usize,
    settings: GenerationSettings,
    stream: bool,
    answers: Vec<Untold>,
}

impl LlamaCpp {
    fn new(lease: &Lease, job: Job, answers: usize) -> Self {
        Self {
            model: lease.model(),
            settings: settings(lease, &job),
            name: job.options.context.model.name,
            n: job.options.n,
            prompts: job.prompts,
            shown: job.shown,
            max_tokens: job.options.generation.max_tokens,
            stream: job.options.stream,
            answers: (0..answers).map(|_| Untold::default()).collect(),
        }
    }

    /// Takes note of a piece of an answer. `Some` if it is the last.
    fn take(&mut self, mut piece: TextChunk) -> Option<Ended> {
        let stop = piece.stop_string();
        let answer = &mut self.answers[piece.index];
        answer.has_new_line |= piece.text.contains('\n');
        answer.text.push_str(&piece.text);
        // Those of the token that ended it are those of no text.
        if let Some(token) = piece.token {
            answer.tokens.push(token);
            if let Some(logprobs) = piece.logprobs.filter(|_| self.shown.n_probs.is_some()) {
                answer.probs.push(native_entry(&self.model, &logprobs));
            }
        }
        piece.finish.map(|reason| Ended {
            reason,
            timings: piece.timings,
            stop,
        })
    }

    /// A chunk with the output that no chunk has contained yet.
    fn chunk(&mut self, index: usize, timings: &Timings) -> LlamaCppChunk {
        let answer = &mut self.answers[index];
        let probs = std::mem::take(&mut answer.probs);
        LlamaCppChunk {
            index,
            content: std::mem::take(&mut answer.text),
            tokens: std::mem::take(&mut answer.tokens),
            stop: false,
            id_slot: -1,
            tokens_predicted: timings.tokens,
            tokens_evaluated: timings.prompt_tokens,
            completion_probabilities: self.shown.n_probs.map(|_| probs),
            timings: self.shown.timings.then(|| timings.into()),
        }
    }

    /// A finished choice, with the output that no chunk has contained.
    fn whole(&self, index: usize, untold: Untold, ended: Ended) -> LlamaCppAnswer<'_> {
        let timings = &ended.timings;
        let limit = ended.reason == FinishReason::Length;
        let stop_type = match (&ended.stop, limit) {
            (_, true) => StopType::Limit,
            (Some(_), false) => StopType::Word,
            (None, false) => StopType::Eos,
        };
        let tokens = match self.shown.tokens && !self.stream {
            true => untold.tokens,
            false => Vec::new(),
        };
        let prompt = &self.prompts[index / self.n];
        let full = prompt.len() + timings.tokens >= self.model.served.context;
        let shows_probs = self.shown.n_probs.is_some() && !self.stream;
        LlamaCppAnswer {
            index,
            content: untold.text,
            tokens,
            id_slot: -1,
            stop: true,
            model: &self.name,
            tokens_predicted: timings.tokens,
            tokens_evaluated: timings.prompt_tokens,
            generation_settings: &self.settings,
            prompt: self.model.served.tokenizer.decode(prompt, false),
            has_new_line: untold.has_new_line,
            truncated: limit && full && timings.tokens < self.max_tokens,
            stop_type,
            tokens_cached: timings.cached_tokens,
            timings: timings.into(),
            stopping_word: ended.stop.unwrap_or_default(),
            completion_probabilities: shows_probs.then_some(untold.probs),
        }
    }

    /// What is asked for of an answer.
    fn selected<'a>(&self, whole: LlamaCppAnswer<'a>) -> Selected<'a> {
        match &self.shown.fields {
            // What is serialised here is an object.
            Some(fields) => {
                let whole = serde_json::to_value(whole).unwrap_or_default();
                Selected::Fields(select(&whole, fields))
            }
            None => Selected::All(whole),
        }
    }
}

/// A choice as the route returns it.
#[derive(Serialize)]
#[serde(untagged)]
enum Selected<'a> {
    All(LlamaCppAnswer<'a>),
    Fields(Map<String, Value>),
}

impl StreamEncoder for LlamaCpp {
    const DONE: bool = false;

    fn encode(&mut self, event: GenerationEvent, out: &mut EventText) {
        let GenerationEvent::TextChunk(piece) = event else {
            return;
        };
        let (index, timings) = (piece.index, piece.timings);
        let ended = self.take(piece);
        let answer = &self.answers[index];
        // Tokens without text wait for what they are a part of.
        let told = answer.text.is_empty() && (ended.is_none() || answer.tokens.is_empty());
        if !told {
            out.data(&self.chunk(index, &timings));
        }
        if let Some(ended) = ended {
            let untold = std::mem::take(&mut self.answers[index]);
            out.data(&self.selected(self.whole(index, untold, ended)));
        }
    }
}

/// The settings of a request, as they hold.
fn settings(model: &Model, job: &Job) -> GenerationSettings {
    let generation = &job.options.generation;
    GenerationSettings {
        samplers: sampler_settings(&generation.sampling),
        n_ctx: model.served.context,
        n_predict: job.shown.n_predict,
        max_tokens: job.shown.n_predict,
        seed: job.options.seed().map_or(-1, i128::from),
        stop: generation.stop.clone(),
        ignore_eos: job.options.ignores_eos(),
        stream: job.options.stream,
        n_probs: job.shown.n_probs.unwrap_or(0),
        timings_per_token: job.shown.timings,
        order: SAMPLERS.iter().map(|(name, _)| *name).collect(),
    }
}

impl From<&Timings> for LlamaCppTimings {
    fn from(timings: &Timings) -> Self {
        let computed = timings.prompt_tokens.saturating_sub(timings.cached_tokens);
        let ms = |time: Duration| time.as_secs_f64() * 1e3;
        // Nothing took no time; there is no infinity in JSON.
        let ratio = |a: f64, b: f64| if b > 0.0 { a / b } else { 0.0 };
        let per_token = |n: usize, time| ratio(ms(time), n as f64);
        let per_second = |n: usize, time: Duration| ratio(n as f64, time.as_secs_f64());
        Self {
            cache_n: timings.cached_tokens,
            prompt_n: computed,
            prompt_ms: ms(timings.prefill),
            prompt_per_token_ms: per_token(computed, timings.prefill),
            prompt_per_second: per_second(computed, timings.prefill),
            predicted_n: timings.tokens,
            predicted_ms: ms(timings.decode),
            predicted_per_token_ms: per_token(timings.tokens, timings.decode),
            predicted_per_second: per_second(timings.tokens, timings.decode),
        }
    }
}

/// Those fields of an answer that are asked for, each under its whole path. What is not there is left out.
fn select(whole: &Value, fields: &[String]) -> Map<String, Value> {
    let found = fields.iter().filter_map(|path| {
        let value = path
            .split('/')
            .try_fold(whole, |value, name| value.get(name))?;
        Some((path.clone(), value.clone()))
    });
    found.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn fields_are_found_by_their_paths() {
        let whole = json!({"content": "a", "timings": {"prompt_n": 3, "prompt_ms": 1.0}});
        let select = |fields: &[&str]| {
            let fields: Vec<_> = fields.iter().map(|field| (*field).to_owned()).collect();
            Value::Object(select(&whole, &fields))
        };
        let some = select(&["content", "timings/prompt_n", "timings/x", "no/thing"]);
        assert_eq!(some, json!({"content": "a", "timings/prompt_n": 3}));
        assert_eq!(select(&[""]), json!({}));
    }

    #[test]
    fn times_are_told_with_their_rates() {
        let timings = Timings {
            prompt_tokens: 12,
            cached_tokens: 2,
            prefill: Duration::from_millis(20),
            tokens: 4,
            decode: Duration::from_millis(8),
        };
        let told = LlamaCppTimings::from(&timings);
        assert_eq!((told.cache_n, told.prompt_n), (2, 10));
        assert_eq!(told.prompt_per_second.round(), 500.0);
        assert_eq!(told.predicted_per_token_ms.round(), 2.0);
        let nothing = LlamaCppTimings::from(&Timings::default());
        assert_eq!(nothing, LlamaCppTimings::default());
    }
}
