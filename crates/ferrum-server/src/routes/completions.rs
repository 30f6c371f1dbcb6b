//! `/v1/completions`: text or tokens go on.

use crate::config::ServerConfig;
use crate::error::ApiError;
use crate::generation::generation_stream::{GenerationEvent, GenerationStream, TextChunk};
use crate::generation::logprobs::prompt_entries;
use crate::generation::options::{GenerationOptions, max_tokens, token};
use crate::generation::structured::{self, Structured};
use crate::generation::usage::UsageSoFar;
use crate::http::app::App;
use crate::http::sse::{self, EventText, StreamEncoder};
use crate::ids::fresh_id;
use crate::ids::unix_time;
use crate::models::Lease;
use crate::models::model::Model;
use crate::prompt::fim::{self, FimParts};
use crate::request::{self, Body, Int, Prompts};
use crate::response::{
    TextChoice, TextCompletion, TextCompletionObject, TextFinishReason, TextLogprobs, Usage,
};
use axum::Json;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use ferrum_engine::sampler::Logprobs;
use ferrum_engine::{FinishReason, engine};
use ferrum_formats::tokenizer::EncodeOptions;
use ferrum_types::TokenId;
use std::sync::Arc;

/// Most tokens of an answer where the request gives no number, as OpenAI has it.
const DEFAULT_MAX_TOKENS: usize = 16;

/// A prompt in both its forms.
#[derive(Debug)]
pub(super) struct Prompt {
    pub(super) tokens: Vec<TokenId>,
    /// If it was given as text.
    text: Option<String>,
}

impl Prompt {
    fn truncate(&mut self, options: &GenerationOptions, model: &Model) {
        let answer = options.min_output_tokens();
        if options.truncation.apply(&mut self.tokens, model, answer) {
            self.text = None;
        }
    }
}

#[derive(Debug)]
pub(super) struct Job {
    options: GenerationOptions,
    prompts: Vec<Prompt>,
    echo: bool,
    logprobs: Option<usize>,
}

/// The route.
pub(crate) async fn completions(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response, ApiError> {
    let (job, lease) = app.read(request, read).await?;
    let asked = job.prompts.iter().map(|prompt| ferrum_engine::Request {
        logprobs: job.logprobs,
        // One list serves both.
        prompt_logprobs: job
            .logprobs
            .filter(|_| job.echo)
            .max(job.options.prompt_logprobs),
        continues_prompt: job.options.continues_prompt || goes_on(&lease, &prompt.tokens),
        ..job.options.request(prompt.tokens.clone(), &app.config)
    });
    let mut answers = GenerationStream::begin(&lease, "prompt", job.options.n, asked)?;
    let prompts = job.prompts.iter().map(|prompt| prompt.tokens.len());
    let usage = UsageSoFar::new(job.options.usage, prompts.collect(), job.options.n);
    let stream = job.options.stream;
    let mut text = Completion::new(&lease, job, answers.count());
    if stream {
        let shape = TextChunks { text, usage };
        return Ok(sse::response(answers, shape));
    }
    gather(&mut answers, &mut text).await
}

/// Whether there is text for an answer to go on with.
pub(super) fn goes_on(model: &Model, prompt: &[TokenId]) -> bool {
    let last = prompt.last();
    last.is_some_and(|&last| !model.served.tokenizer.is_special(last))
}

/// Waits for all answers.
async fn gather(
    answers: &mut GenerationStream,
    text: &mut Completion,
) -> Result<Response, ApiError> {
    let mut choices: Vec<Part> = (0..answers.count()).map(|_| Part::default()).collect();
    let mut usage = engine::Usage::default();
    while let Some(event) = answers.next().await {
        match event {
            GenerationEvent::Failed(error) => return Err(error),
            GenerationEvent::Done(total) => usage = total,
            event => {
                if let Some((index, part)) = text.part(event) {
                    choices[index].append(part);
                }
            }
        }
    }
    let choices = choices.into_iter().enumerate();
    let choices = choices.map(|(index, part)| TextChoice {
        prompt_logprobs: text.prompt_logprobs.map(|top| {
            let (_, logprobs) = &text.prompts[index / text.n];
            prompt_entries(&text.model, logprobs, top)
        }),
        ..text.choice(index, part)
    });
    let usage = Some(Some(Usage::of(&usage)));
    Ok(Json(text.answer(choices.collect(), usage)).into_response())
}

pub(super) fn read(app: &App, lease: &Lease, body: &mut Body) -> Result<Job, ApiError> {
    let config = &app.config;
    let mut options = GenerationOptions::read(body, lease, config)?;
    let fields: request::Completion = body.part()?;
    let most = max_tokens(&[("max_tokens", fields.max_tokens)], 0, config)?;
    options.generation.max_tokens = match (most, fields.max_tokens) {
        (Some(most), _) => most,
        (None, Some(_)) => config.max_tokens,
        (None, None) => DEFAULT_MAX_TOKENS,
    };
    if fields
        .best_of
        .and_then(Int::count)
        .is_some_and(|best| best != options.n)
    {
        let reason = "not supported; expected the value of n or no such field";
        return Err(ApiError::unsupported("best_of", reason));
    }
    if fields.store == Some(true) {
        body.ignore("store");
    }
    if let Some(Structured { grammar, param }) = &options.structured {
        options.grammar = Some(structured::compile(lease, param, grammar)?);
    }
    let suffix = fields.suffix.filter(|suffix| !suffix.is_empty());
    let mut prompts = match suffix {
        Some(suffix) => fill_in(lease, fields.prompt, &suffix, &mut options, config)?,
        None => read_prompts(lease, "prompt", fields.prompt, config.max_prompts)?,
    };
    for prompt in &mut prompts {
        prompt.truncate(&options, lease);
    }
    let answers = prompts.len().saturating_mul(options.n);
    if answers > config.max_choices {
        let most = config.max_choices;
        let reason = format!("found {answers} answers over all prompts, expected at most {most}");
        return Err(ApiError::invalid("n", reason));
    }
    Ok(Job {
        options,
        prompts,
        echo: fields.echo.unwrap_or(false),
        logprobs: fields.logprobs.and_then(Int::count),
    })
}

/// Prompts that are followed by a suffix: answers fill in what is between.
fn fill_in(
    model: &Model,
    prompts: Prompts,
    suffix: &str,
    options: &mut GenerationOptions,
    config: &ServerConfig,
) -> Result<Vec<Prompt>, ApiError> {
    let marks = fim::tokens(model, "suffix")?;
    let (found, most) = (prompts.list.len(), config.max_prompts);
    count_prompts("prompt", found, most)?;
    options.add_stop_tokens(&marks.ends);
    options.continues_prompt = true;
    let suffix = fim::suffix(model, "suffix", suffix)?;
    let read = prompts.list.into_iter().map(|prompt| {
        let (prefix, text) = match prompt {
            request::Prompt::Text(text) => (fim::prefix(model, "prompt", &text)?, Some(text)),
            request::Prompt::Tokens(tokens) => (read_tokens(model, tokens, "prompt")?.tokens, None),
        };
        let parts = FimParts {
            prefix,
            suffix: suffix.clone(),
            extra: Vec::new(),
        };
        let tokens = fim::prompt(model, marks, &parts, options.generation.max_tokens)?;
        Ok(Prompt { tokens, text })
    });
    read.collect()
}

/// Holds the number of prompts of a request against the most that there may be.
pub(super) fn count_prompts(param: &str, found: usize, most: usize) -> Result<(), ApiError> {
    if found == 0 || found > most {
        let reason = format!("found {found} prompts, expected 1 to {most}");
        return Err(ApiError::invalid(param, reason));
    }
    Ok(())
}

/// At most `most` prompts, as tokens.
pub(super) fn read_prompts(
    model: &Model,
    param: &str,
    prompts: Prompts,
    most: usize,
) -> Result<Vec<Prompt>, ApiError> {
    count_prompts(param, prompts.list.len(), most)?;
    let listed = prompts.listed;
    let read = prompts.list.into_iter().enumerate().map(|(i, prompt)| {
        let param = match listed {
            true => format!("{param}[{i}]"),
            false => param.to_owned(),
        };
        match prompt {
            request::Prompt::Text(text) => read_text(model, text, &param),
            request::Prompt::Tokens(tokens) => read_tokens(model, tokens, &param),
        }
    });
    read.collect()
}

pub(super) fn read_text(model: &Model, text: String, param: &str) -> Result<Prompt, ApiError> {
    let mut tokens = model.encode(param, &text, EncodeOptions::WRITTEN)?;
    // An empty text begins as any text does.
    tokens.extend(model.served.tokenizer.bos().filter(|_| tokens.is_empty()));
    if tokens.is_empty() {
        let reason = "found an empty text, and this model has no token to begin with";
        return Err(ApiError::invalid(param, reason));
    }
    Ok(Prompt {
        tokens,
        text: Some(text),
    })
}

pub(super) fn read_tokens(
    model: &Model,
    tokens: Vec<TokenId>,
    param: &str,
) -> Result<Prompt, ApiError> {
    if tokens.is_empty() {
        return Err(ApiError::invalid(param, "found no token"));
    }
    let wrong = tokens
        .iter()
        .position(|&token| token as usize >= model.served.vocab_size);
    if let Some(i) = wrong {
        token(model, &format!("{param}[{i}]"), tokens[i].into())?;
    }
    Ok(Prompt { tokens, text: None })
}

/// A part of a choice, or all of it.
#[derive(Default)]
struct Part {
    text: String,
    logprobs: TextLogprobs,
    finish: Option<TextFinishReason>,
}

impl Part {
    fn append(&mut self, other: Part) {
        self.text.push_str(&other.text);
        self.logprobs.append(other.logprobs);
        self.finish = other.finish.or(self.finish);
    }
}

/// What is known of the answers to a request while they come.
struct Completion {
    model: Arc<Model>,
    name: String,
    id: String,
    created: u64,
    n: usize,
    logprobs: Option<usize>,
    prompt_logprobs: Option<usize>,
    /// The prompts, with what was said of their tokens so far.
    prompts: Vec<(Prompt, Vec<Logprobs>)>,
    /// Whether they come before their answers.
    echo: bool,
    /// Whether an answer has begun.
    begun: Vec<bool>,
    /// Characters of each answer whose tokens have been listed.
    offsets: Vec<usize>,
}

impl Completion {
    fn new(lease: &Lease, job: Job, answers: usize) -> Self {
        let prompts = job.prompts.into_iter();
        Self {
            model: lease.model(),
            name: job.options.context.model.name,
            id: fresh_id("cmpl-"),
            created: unix_time(),
            n: job.options.n,
            logprobs: job.logprobs,
            prompt_logprobs: job.options.prompt_logprobs,
            prompts: prompts.map(|prompt| (prompt, Vec::new())).collect(),
            echo: job.echo,
            begun: vec![false; answers],
            offsets: vec![0; answers],
        }
    }

    /// What an event adds to which choice.
    fn part(&mut self, event: GenerationEvent) -> Option<(usize, Part)> {
        let piece = match event {
            GenerationEvent::PromptLogprobs(prompt, part) => {
                self.prompts[prompt].1.extend(part);
                return None;
            }
            GenerationEvent::TextChunk(piece) => piece,
            GenerationEvent::Embedding(..)
            | GenerationEvent::Done(_)
            | GenerationEvent::Failed(_) => return None,
        };
        let TextChunk {
            index,
            text,
            logprobs,
            finish,
            ..
        } = piece;
        let mut part = match std::mem::replace(&mut self.begun[index], true) {
            true => Part::default(),
            false => self.echo(index),
        };
        part.text.push_str(&text);
        if let (Some(logprobs), Some(top)) = (logprobs, self.logprobs) {
            let offset = &mut self.offsets[index];
            part.logprobs.push(&self.model, &logprobs, top, offset);
        }
        part.finish = finish.map(|reason| match reason {
            FinishReason::Length => TextFinishReason::Length,
            _ => TextFinishReason::Stop,
        });
        Some((index, part))
    }

    /// The prompt as the beginning of an answer.
    fn echo(&mut self, index: usize) -> Part {
        if !self.echo {
            return Part::default();
        }
        let (prompt, logprobs) = &self.prompts[index / self.n];
        let decode = || self.model.served.tokenizer.decode(&prompt.tokens, true);
        let mut part = Part {
            text: prompt.text.clone().unwrap_or_else(decode),
            ..Part::default()
        };
        if let Some(top) = self.logprobs {
            let offset = &mut self.offsets[index];
            if let Some(&first) = prompt.tokens.first() {
                part.logprobs.push_first(&self.model, first, offset);
            }
            for logprobs in logprobs {
                part.logprobs.push(&self.model, logprobs, top, offset);
            }
        }
        part
    }

    fn choice(&self, index: usize, part: Part) -> TextChoice {
        TextChoice {
            index,
            text: part.text,
            logprobs: self.logprobs.map(|_| part.logprobs),
            finish_reason: part.finish,
            prompt_logprobs: None,
        }
    }

    fn answer(&self, choices: Vec<TextChoice>, usage: Option<Option<Usage>>) -> TextCompletion<'_> {
        TextCompletion {
            id: &self.id,
            object: TextCompletionObject,
            created: self.created,
            model: &self.name,
            choices,
            usage,
        }
    }
}

struct TextChunks {
    text: Completion,
    usage: UsageSoFar,
}

impl StreamEncoder for TextChunks {
    const DONE: bool = true;

    fn encode(&mut self, event: GenerationEvent, out: &mut EventText) {
        if let GenerationEvent::Done(usage) = event {
            if self.usage.last() {
                let usage = Some(Some(Usage::of(&usage)));
                out.data(&self.text.answer(Vec::new(), usage));
            }
            return;
        }
        if let GenerationEvent::TextChunk(piece) = &event {
            self.usage.count(piece);
        }
        let Some((index, part)) = self.text.part(event) else {
            return;
        };
        if part.text.is_empty() && part.finish.is_none() && self.text.logprobs.is_none() {
            return;
        }
        let choice = self.text.choice(index, part);
        let usage = self.usage.of_chunk(index);
        out.data(&self.text.answer(vec![choice], usage));
    }
}
