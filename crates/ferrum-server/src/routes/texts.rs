//! Encodes texts for the routes of embeddings and scores: with a decoder, whose engine reads them as prompts, or with a
//! text encoder.

use super::completions::{count_prompts, read_prompts};
use crate::error::ApiError;
use crate::generation::generation_stream::{GenerationEvent, GenerationStream};
use crate::generation::request_context::RequestContext;
use crate::generation::truncation::Truncation;
use crate::http::app::App;
use crate::models::served::ServedEncoder;
use crate::models::{AnyLease, Lease};
use crate::observability::metrics::EndedPrompt;
use crate::observability::record::RequestRecord;
use crate::request::{Body, Limit, Prompt, Prompts};
use ferrum_engine::engine::{Pooling, Usage};
use ferrum_engine::{
    EncoderInput, EncoderTask, EncoderTokenizer, EncoderWant, EngineError, GenerationParams,
};
use ferrum_types::TokenId;
use std::sync::Arc;
use std::time::Instant;
use tokio::time::timeout_at;

/// Texts that are with an engine at a time, so that one request does not fill its queue.
const AT_A_TIME: usize = 64;

/// Texts and tokens that are one task of an encoder: others have their turn behind it.
const TASK_TEXTS: usize = 256;
const TASK_TOKENS: usize = 4096;

/// Input of an embedding or score, with its field.
pub(super) enum Input {
    Texts(&'static str, Prompts),
    /// The tokens of a conversation.
    Messages(Vec<TokenId>),
}

/// Texts that become vectors.
#[derive(Debug)]
pub(super) struct Texts {
    pub(super) context: RequestContext,
    pooling: Pooling,
    tokens: Tokens,
}

/// Their tokens, with the model that they are for.
#[derive(Debug)]
enum Tokens {
    Decoder(Lease, Vec<Vec<TokenId>>),
    Encoder(EncoderLease, Vec<EncoderInput>),
}

pub(super) type EncoderLease = Lease<Arc<ServedEncoder>>;

impl Texts {
    pub(super) fn read(
        app: &App,
        lease: &AnyLease,
        body: &mut Body,
        truncation: Option<Limit>,
        inputs: impl IntoIterator<Item = Input>,
    ) -> Result<Self, ApiError> {
        let truncation = Truncation::of(truncation)?;
        let most = app.config.max_inputs;
        let (context, pooling, tokens) = match lease {
            AnyLease::Decoder(lease) => (
                RequestContext::read(body, lease)?,
                lease.served.pooling,
                Tokens::Decoder(lease.clone(), prompts(lease, inputs, truncation, most)?),
            ),
            AnyLease::Encoder(lease) => (
                RequestContext::read(body, lease)?,
                lease.pooling,
                Tokens::Encoder(
                    lease.clone(),
                    encoder_inputs(&lease.tokenizer, inputs, truncation, most)?,
                ),
            ),
            other @ AnyLease::Transcriber(_) => return Err(other.refusal()),
        };
        let Some(pooling) = pooling else {
            let reason = "its files ask for a pooling that is not known here";
            return Err(ApiError::unsupported("model", reason));
        };
        Ok(Self {
            context,
            pooling,
            tokens,
        })
    }

    /// How many there are.
    pub(super) fn count(&self) -> usize {
        match &self.tokens {
            Tokens::Decoder(_, texts) => texts.len(),
            Tokens::Encoder(_, texts) => texts.len(),
        }
    }

    /// Has the model read all texts, and gives `each` their states with their number. The tokens that it took.
    pub(super) async fn states(
        &self,
        app: &App,
        param: &str,
        mut each: impl FnMut(usize, Vec<f32>) -> Result<(), ApiError>,
    ) -> Result<usize, ApiError> {
        let (lease, texts) = match &self.tokens {
            Tokens::Decoder(lease, texts) => (lease, texts),
            Tokens::Encoder(lease, texts) => {
                let want = EncoderWant::Vectors(self.pooling);
                let context = &self.context;
                return compute(app, (lease, context), param, (texts, want), each).await;
            }
        };
        let mut tokens = 0;
        for (part, texts) in texts.chunks(AT_A_TIME).enumerate() {
            let asked = texts.iter().map(|text| ferrum_engine::Request {
                pooling: Some(self.pooling),
                ..self
                    .context
                    .request(text.clone(), GenerationParams::default(), &app.config)
            });
            let mut answers = GenerationStream::begin(lease, param, 1, asked)?;
            while let Some(event) = answers.next().await {
                match event {
                    GenerationEvent::Failed(error) => return Err(error),
                    GenerationEvent::Done(usage) => tokens += usage.prompt_tokens,
                    GenerationEvent::Embedding(index, states) => {
                        each(part * AT_A_TIME + index, lease.served.dense.apply(states))?
                    }
                    GenerationEvent::PromptLogprobs(..) | GenerationEvent::TextChunk(_) => {}
                }
            }
        }
        Ok(tokens)
    }
}

/// Texts for a decoder.
fn prompts(
    lease: &Lease,
    inputs: impl IntoIterator<Item = Input>,
    truncation: Truncation,
    most: usize,
) -> Result<Vec<Vec<TokenId>>, ApiError> {
    let mut tokens = Vec::new();
    for input in inputs {
        match input {
            Input::Texts(param, prompts) => {
                let texts = read_prompts(lease, param, prompts, most)?;
                tokens.extend(texts.into_iter().map(|text| text.tokens));
            }
            Input::Messages(read) => tokens.push(read),
        }
    }
    for text in &mut tokens {
        truncation.apply(text, lease, 0);
    }
    Ok(tokens)
}

/// Texts for an encoder.
fn encoder_inputs(
    tokenizer: &EncoderTokenizer,
    inputs: impl IntoIterator<Item = Input>,
    truncation: Truncation,
    most: usize,
) -> Result<Vec<EncoderInput>, ApiError> {
    let mut read = Vec::new();
    for input in inputs {
        let (param, prompts) = match input {
            Input::Texts(param, prompts) => (param, prompts),
            Input::Messages(tokens) => {
                let input = tokenizer.given(tokens, truncation.room(tokenizer));
                read.push(input.map_err(|e| ApiError::invalid("messages", reason(e)))?);
                continue;
            }
        };
        count_prompts(param, prompts.list.len(), most)?;
        let field = param;
        let listed = prompts.listed;
        for (i, prompt) in prompts.list.into_iter().enumerate() {
            let param = match listed {
                true => format!("{param}[{i}]"),
                false => param.to_owned(),
            };
            let room = truncation.room(tokenizer);
            let input = match prompt {
                Prompt::Text(text) => tokenizer.text(&text, room),
                Prompt::Tokens(tokens) => tokenizer.given(tokens, room),
            };
            let input = input.map_err(|e| ApiError::invalid(&param, reason(e)))?;
            read.push(fitting(input, field, (truncation, tokenizer))?);
        }
    }
    Ok(read)
}

/// What an error says beside the name of the function.
fn reason(error: ferrum_types::Error) -> String {
    match error {
        ferrum_types::Error::InvalidArgument { reason, .. } => reason,
        other => other.to_string(),
    }
}

/// An input of the field `param`, of which nothing was cut off that was not to be.
pub(super) fn fitting(
    input: EncoderInput,
    param: &str,
    (truncation, tokenizer): (Truncation, &EncoderTokenizer),
) -> Result<EncoderInput, ApiError> {
    match truncation == Truncation::Nothing && input.is_cut() {
        true => {
            let error = EngineError::ContextOverflow {
                requested: input.full_len(),
                capacity: tokenizer.max_tokens(),
            };
            Err(ApiError::from(error).of_prompt(param))
        }
        false => Ok(input),
    }
}

/// Computes inputs with an encoder, and calls `each` with the index and output of each. Returns the tokens computed.
pub(super) async fn compute(
    app: &App,
    (lease, context): (&EncoderLease, &RequestContext),
    param: &str,
    (inputs, want): (&[EncoderInput], EncoderWant),
    mut each: impl FnMut(usize, Vec<f32>) -> Result<(), ApiError>,
) -> Result<usize, ApiError> {
    let deadline = Instant::now() + context.time_left(&app.config);
    let record = RequestRecord::current();
    if let Some(record) = record.as_ref().filter(|record| record.log_prompts) {
        for input in inputs {
            let prompt = lease.tokenizer.decode(input);
            let (request_id, prompt) = (record.id.as_str(), prompt.as_str());
            tracing::info!(target: "prompts", parent: None, request_id, prompt, "prompt");
        }
    }
    let (mut rest, mut done, mut tokens) = (inputs, 0, 0);
    while !rest.is_empty() {
        let (task, behind) = rest.split_at(task_len(rest));
        rest = behind;
        let asked = EncoderTask {
            inputs: task.to_vec(),
            want,
        };
        let answer = timeout_at(
            deadline.into(),
            lease.engine.submit(asked, context.priority()),
        );
        let answer = answer.await.map_err(|_| ApiError::timeout())?;
        let answer = answer.map_err(|e| ApiError::from(e).of_prompt(param))?;
        lease.metrics().queued(answer.queued);
        if let Some(record) = &record {
            record.queued(answer.queued);
        }
        for (input, found) in task.iter().zip(answer.output) {
            let count = input.tokens().len();
            tokens += count;
            lease.metrics().prompt_ended(EndedPrompt {
                tokens: count,
                preemptions: 0,
                computed: Some(answer.computed),
                answers: None,
            });
            each(done, found)?;
            done += 1;
        }
    }
    if let Some(record) = &record {
        record.add_usage(&Usage {
            prompt_tokens: tokens,
            ..Usage::default()
        });
    }
    Ok(tokens)
}

/// How many of the next inputs are one task.
fn task_len(inputs: &[EncoderInput]) -> usize {
    let mut tokens = 0;
    let fits = inputs.iter().take_while(|input| {
        tokens += input.tokens().len();
        tokens <= TASK_TOKENS
    });
    fits.take(TASK_TEXTS).count().max(1)
}
