//! `/v1/messages` and `/v1/messages/count_tokens`: the next message of a conversation, as Anthropic's
//! clients ask for it.

mod conversation;

use crate::answers::{Answers, Next};
use crate::app::{App, fresh_id};
use crate::conversation::ChatPrompt;
use crate::error::ApiError;
use crate::models::Lease;
use crate::request::{self, Body};
use crate::sampling::{self, Wanted};
use crate::speech::{self, Block, Blocks, Change, End, Kind, Speech};
use crate::sse::{self, Chunks, Events};
use axum::Json;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use ferrum_engine::engine::Usage;
use serde_json::{Value, json};
use std::sync::Arc;

#[derive(Debug)]
pub(super) struct Job {
    wanted: Wanted,
    prompt: ChatPrompt,
}

/// The next message.
pub(crate) async fn messages(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response, ApiError> {
    let (mut job, lease) = app.read(request, read).await?;
    let prompt = std::mem::take(&mut job.prompt.tokens);
    let prompt_tokens = prompt.len();
    let asked = job.wanted.request(prompt, &app.config);
    let mut answers = Answers::begin(&lease, "messages", 1, [asked])?;
    let speech = Speech::new(&job.prompt, answers.count());
    let shape = Shape {
        id: fresh_id("msg_"),
        model: job.wanted.place.model.name.clone(),
    };
    if job.wanted.stream {
        let shape = MessageEvents {
            shape,
            speech,
            blocks: Blocks::default(),
            prompt_tokens,
        };
        return Ok(sse::response(answers, shape));
    }
    let (blocks, usage) = speech::whole(&mut answers, speech).await?;
    Ok(Json(shape.message(&blocks, &usage)).into_response())
}

/// Tokens of a conversation.
pub(crate) async fn count_tokens(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Json<Value>, ApiError> {
    let (count, _) = app.read(request, read_count).await?;
    Ok(count)
}

pub(super) fn read_count(_: &App, lease: &Lease, body: &mut Body) -> Result<Json<Value>, ApiError> {
    body.part::<request::Standing>()?;
    let asked = conversation::read(body, lease)?;
    let tokens = asked.prompt(lease, None)?.tokens;
    Ok(Json(json!({"input_tokens": tokens.len()})))
}

pub(super) fn read(app: &App, lease: &Lease, body: &mut Body) -> Result<Job, ApiError> {
    let config = &app.config;
    let mut wanted = Wanted::one(body, lease)?;
    let fields: request::Messaging = body.part()?;
    let Some(most) = fields.max_tokens else {
        return Err(ApiError::invalid("max_tokens", "it is missing"));
    };
    let most = sampling::max_tokens(&[("max_tokens", Some(most))], 1, config)?;
    wanted.generation.max_tokens = most.unwrap_or(config.max_tokens);
    let stops = fields.stop_sequences.unwrap_or_default().0;
    wanted.generation.stop = sampling::stop_strings("stop_sequences", stops)?;
    let asked = conversation::read(body, lease)?;
    let prompt = asked.prompt(lease, Some(&mut wanted))?;
    Ok(Job { wanted, prompt })
}

/// What all forms of a message have.
struct Shape {
    id: String,
    model: String,
}

impl Shape {
    fn message(&self, blocks: &Blocks, usage: &Usage) -> Value {
        let content: Vec<_> = blocks.list().iter().map(whole_block).collect();
        let (reason, sequence) = stop_reason(blocks.end());
        json!({
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": sequence,
            "usage": usage_json(usage, blocks.reasoning_tokens()),
        })
    }
}

/// Tokens as Anthropic counts them: those from the cache apart.
fn usage_json(usage: &Usage, thinking_tokens: usize) -> Value {
    json!({
        "input_tokens": usage.prompt_tokens - usage.cached_tokens.min(usage.prompt_tokens),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": thinking_tokens},
    })
}

/// Why an answer ended, and the stop string that it met.
fn stop_reason(end: Option<&End>) -> (Value, Value) {
    match end {
        None => (Value::Null, Value::Null),
        Some(End::Stop(None)) => ("end_turn".into(), Value::Null),
        Some(End::Stop(Some(text))) => ("stop_sequence".into(), text.as_str().into()),
        Some(End::Length) => ("max_tokens".into(), Value::Null),
        Some(End::Calls) => ("tool_use".into(), Value::Null),
    }
}

/// A block before it has any text.
fn empty_block(block: &Block) -> Value {
    match &block.kind {
        Kind::Text => json!({"type": "text", "text": ""}),
        // A signature lets Anthropic trust what comes back; nothing depends on it here.
        Kind::Reasoning => json!({"type": "thinking", "thinking": "", "signature": ""}),
        Kind::Call(name) => {
            let id = format!("toolu_{}", block.tag);
            json!({"type": "tool_use", "id": id, "name": name, "input": {}})
        }
    }
}

fn whole_block(block: &Block) -> Value {
    let mut whole = empty_block(block);
    match &block.kind {
        Kind::Text => whole["text"] = block.text.as_str().into(),
        Kind::Reasoning => whole["thinking"] = block.text.as_str().into(),
        Kind::Call(_) => whole["input"] = block.arguments(),
    }
    whole
}

struct MessageEvents {
    shape: Shape,
    speech: Speech,
    blocks: Blocks,
    prompt_tokens: usize,
}

fn ping() -> Value {
    json!({"type": "ping"})
}

fn event(index: usize, block: &Block, change: Change) -> Value {
    match change {
        Change::Begins => json!({
            "type": "content_block_start",
            "index": index,
            "content_block": empty_block(block),
        }),
        Change::Grows(text) => {
            let delta = match &block.kind {
                Kind::Text => json!({"type": "text_delta", "text": text}),
                Kind::Reasoning => json!({"type": "thinking_delta", "thinking": text}),
                Kind::Call(_) => json!({"type": "input_json_delta", "partial_json": text}),
            };
            json!({"type": "content_block_delta", "index": index, "delta": delta})
        }
        Change::Ends => json!({"type": "content_block_stop", "index": index}),
    }
}

impl Chunks for MessageEvents {
    const EVENTS: Events = Events::Named;

    fn begin(&mut self, out: &mut Vec<Value>) {
        // How much of it the cache has is known when the message ends.
        let usage = Usage {
            prompt_tokens: self.prompt_tokens,
            ..Usage::default()
        };
        let message = self.shape.message(&self.blocks, &usage);
        out.push(json!({"type": "message_start", "message": message}));
        out.push(ping());
    }

    fn chunks(&mut self, next: Next, out: &mut Vec<Value>) {
        match next {
            Next::Piece(piece) => {
                let part = self.speech.part(piece);
                let tell = |index, block: &Block, change| out.push(event(index, block, change));
                self.blocks.add(part, tell);
            }
            Next::Done(usage) => {
                let (reason, sequence) = stop_reason(self.blocks.end());
                out.push(json!({
                    "type": "message_delta",
                    "delta": {"stop_reason": reason, "stop_sequence": sequence},
                    "usage": usage_json(&usage, self.blocks.reasoning_tokens()),
                }));
                out.push(json!({"type": "message_stop"}));
            }
            Next::Prompt(..) | Next::Embedding(..) | Next::Failed(_) => {}
        }
    }

    fn failed(&mut self, error: &ApiError, out: &mut Vec<Value>) {
        out.push(error.anthropic_body());
    }

    fn keep_alive(&mut self) -> Option<Value> {
        Some(ping())
    }
}
