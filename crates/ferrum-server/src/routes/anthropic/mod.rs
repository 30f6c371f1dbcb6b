//! `/v1/messages` and `/v1/messages/count_tokens`: the next message of a conversation, as Anthropic's
//! clients ask for it.

mod conversation;

use crate::answers::{Answers, Next};
use crate::app::{App, fresh_id};
use crate::chat_output::{self, Block, Blocks, Change, ChatOutput, End, Kind};
use crate::conversation::ChatPrompt;
use crate::error::ApiError;
use crate::images;
use crate::models::Lease;
use crate::request::{self, Body};
use crate::response::{
    AnthropicBlock, AnthropicDelta, AnthropicEvent, AnthropicMessage, AnthropicMessageType,
    AnthropicRole, AnthropicStop, AnthropicStopReason, AnthropicUsage, InputTokens, ThinkingTokens,
};
use crate::sampling::{self, Wanted};
use crate::sse::{self, Chunks, EventText};
use axum::Json;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use ferrum_engine::engine::Usage;
use serde_json::{Map, Value};
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
    let left = job.wanted.place.time_left(&app.config);
    let images = std::mem::take(&mut job.prompt.images);
    let images = images::see(&lease, images, (job.wanted.place.priority(), left)).await?;
    let mut asked = job.wanted.request(prompt, &app.config);
    asked.images = images;
    let mut answers = Answers::begin(&lease, "messages", 1, [asked])?;
    let output = ChatOutput::new(&job.prompt, answers.count());
    let shape = Shape {
        id: fresh_id("msg_"),
        model: job.wanted.place.model.name.clone(),
    };
    if job.wanted.stream {
        let shape = MessageEvents {
            shape,
            output,
            blocks: Blocks::default(),
            prompt_tokens,
        };
        return Ok(sse::response(answers, shape));
    }
    let (blocks, usage) = chat_output::whole(&mut answers, output).await?;
    Ok(Json(shape.message(&blocks, &usage)).into_response())
}

/// Tokens of a conversation.
pub(crate) async fn count_tokens(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Json<InputTokens>, ApiError> {
    let (input_tokens, _) = app.read(request, read_count).await?;
    Ok(Json(InputTokens { input_tokens }))
}

pub(super) fn read_count(_: &App, lease: &Lease, body: &mut Body) -> Result<usize, ApiError> {
    body.part::<request::Standing>()?;
    let asked = conversation::read(body, lease)?;
    let tokens = asked.prompt(lease, None)?.tokens;
    Ok(tokens.len())
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
    fn message<'a>(&'a self, blocks: &'a Blocks, usage: &Usage) -> AnthropicMessage<'a> {
        AnthropicMessage {
            id: &self.id,
            r#type: AnthropicMessageType,
            role: AnthropicRole,
            model: &self.model,
            content: blocks.list().iter().map(whole_block).collect(),
            stop: stop(blocks.end()),
            usage: tokens(usage, blocks.reasoning_tokens()),
        }
    }
}

/// Tokens as Anthropic counts them: those from the cache apart.
fn tokens(usage: &Usage, thinking_tokens: usize) -> AnthropicUsage {
    AnthropicUsage {
        input_tokens: usage.prompt_tokens - usage.cached_tokens.min(usage.prompt_tokens),
        cache_creation_input_tokens: 0,
        cache_read_input_tokens: usage.cached_tokens,
        output_tokens: usage.completion_tokens,
        output_tokens_details: ThinkingTokens { thinking_tokens },
    }
}

/// Why an answer ended, and the stop string that it met.
fn stop(end: Option<&End>) -> AnthropicStop<'_> {
    let stop_reason = end.map(|end| match end {
        End::Stop(None) => AnthropicStopReason::EndTurn,
        End::Stop(Some(_)) => AnthropicStopReason::StopSequence,
        End::Length => AnthropicStopReason::MaxTokens,
        End::Calls => AnthropicStopReason::ToolUse,
    });
    let stop_sequence = match end {
        Some(End::Stop(Some(text))) => Some(text.as_str()),
        _ => None,
    };
    AnthropicStop {
        stop_reason,
        stop_sequence,
    }
}

fn whole_block(block: &Block) -> AnthropicBlock<'_> {
    block_of(block, &block.text, block.arguments())
}

/// A block with its text, or with its arguments.
fn block_of<'a>(block: &'a Block, text: &'a str, input: Value) -> AnthropicBlock<'a> {
    match &block.kind {
        Kind::Text => AnthropicBlock::Text { text },
        Kind::Reasoning => AnthropicBlock::Thinking {
            thinking: text,
            signature: "",
        },
        Kind::Call(name) => AnthropicBlock::ToolUse {
            id: format!("toolu_{}", block.tag),
            name,
            input,
        },
    }
}

struct MessageEvents {
    shape: Shape,
    output: ChatOutput,
    blocks: Blocks,
    prompt_tokens: usize,
}

fn event<'a>(index: usize, block: &'a Block, change: &'a Change) -> AnthropicEvent<'a> {
    match change {
        Change::Begins => AnthropicEvent::ContentBlockStart {
            index,
            content_block: block_of(block, "", Map::new().into()),
        },
        Change::Grows(text, _) => AnthropicEvent::ContentBlockDelta {
            index,
            delta: match &block.kind {
                Kind::Text => AnthropicDelta::TextDelta { text },
                Kind::Reasoning => AnthropicDelta::ThinkingDelta { thinking: text },
                Kind::Call(_) => AnthropicDelta::InputJsonDelta { partial_json: text },
            },
        },
        Change::Ends => AnthropicEvent::ContentBlockStop { index },
    }
}

impl Chunks for MessageEvents {
    const DONE: bool = false;

    fn begin(&mut self, out: &mut EventText) {
        // How much of it the cache has is known when the message ends.
        let usage = Usage {
            prompt_tokens: self.prompt_tokens,
            ..Usage::default()
        };
        let message = self.shape.message(&self.blocks, &usage);
        out.named(&AnthropicEvent::MessageStart { message });
        out.named(&AnthropicEvent::Ping);
    }

    fn chunks(&mut self, next: Next, out: &mut EventText) {
        match next {
            Next::TextChunk(piece) => {
                let part = self.output.part(piece);
                let tell = |index, block: &Block, change| out.named(&event(index, block, &change));
                self.blocks.add(part, tell);
            }
            Next::Done(usage) => {
                out.named(&AnthropicEvent::MessageDelta {
                    delta: stop(self.blocks.end()),
                    usage: tokens(&usage, self.blocks.reasoning_tokens()),
                });
                out.named(&AnthropicEvent::MessageStop);
            }
            Next::Prompt(..) | Next::Embedding(..) | Next::Failed(_) => {}
        }
    }

    fn failed(&mut self, error: &ApiError, out: &mut EventText) {
        let error = error.anthropic_detail();
        out.named(&AnthropicEvent::Error { error });
    }

    fn keep_alive(&mut self, out: &mut EventText) {
        out.named(&AnthropicEvent::Ping);
    }
}
