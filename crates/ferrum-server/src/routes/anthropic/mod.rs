//! `/v1/messages` and `/v1/messages/count_tokens`: the next message of a conversation, as Anthropic's
//! clients ask for it.

mod conversation;

use crate::error::ApiError;
use crate::generation::chat_output::{
    self, Block, BlockEvent, BlockKind, Blocks, ChatFinish, ChatOutput,
};
use crate::generation::generation_stream::{GenerationEvent, GenerationStream};
use crate::generation::options::{GenerationOptions, max_tokens, stop_strings};
use crate::http::app::App;
use crate::http::sse::{self, EventText, StreamEncoder};
use crate::ids::fresh_id;
use crate::models::Lease;
use crate::prompt::conversation::ChatPrompt;
use crate::prompt::images;
use crate::prompt::pending_prompt::PendingPrompt;
use crate::request::{self, Body};
use crate::response::{
    AnthropicBlock, AnthropicDelta, AnthropicEvent, AnthropicMessage, AnthropicMessageType,
    AnthropicRole, AnthropicStop, AnthropicStopReason, AnthropicUsage, InputTokens, ThinkingTokens,
};
use axum::Json;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use ferrum_engine::engine::Usage;
use serde_json::{Map, Value};
use std::sync::Arc;

#[derive(Debug)]
pub(super) struct Job {
    options: GenerationOptions,
    prompt: ChatPrompt,
}

/// The next message.
pub(crate) async fn messages(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response, ApiError> {
    let (mut job, lease) = app.read_chat(request, read).await?;
    let prompt = std::mem::take(&mut job.prompt.tokens);
    let prompt_tokens = prompt.len();
    let left = job.options.context.time_left(&app.config);
    let images = std::mem::take(&mut job.prompt.images);
    let images =
        images::embed_images(&lease, images, (job.options.context.priority(), left)).await?;
    let mut asked = job.options.request(prompt, &app.config);
    asked.images = images;
    let mut answers = GenerationStream::begin(&lease, "messages", 1, [asked])?;
    let output = ChatOutput::new(&job.prompt, answers.count());
    let shape = Shape {
        id: fresh_id("msg_"),
        model: job.options.context.model.name.clone(),
    };
    if job.options.stream {
        let shape = MessageEvents {
            shape,
            output,
            blocks: Blocks::default(),
            prompt_tokens,
        };
        return Ok(sse::response(answers, shape));
    }
    let (blocks, usage) = chat_output::collect_blocks(&mut answers, output).await?;
    Ok(Json(shape.message(&blocks, &usage)).into_response())
}

/// Tokens of a conversation.
pub(crate) async fn count_tokens(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Json<InputTokens>, ApiError> {
    let (input_tokens, _) = app.read_chat(request, read_count).await?;
    Ok(Json(InputTokens { input_tokens }))
}

fn read_count(_: &App, lease: &Lease, body: &mut Body) -> Result<PendingPrompt<usize>, ApiError> {
    body.part::<request::Standing>()?;
    let (conversation, asked) = conversation::read(body, lease)?;
    Ok(PendingPrompt::new(
        conversation,
        move |conversation, lease| {
            let tokens = asked.prompt(conversation, lease, None)?.tokens;
            Ok(tokens.len())
        },
    ))
}

fn read(app: &App, lease: &Lease, body: &mut Body) -> Result<PendingPrompt<Job>, ApiError> {
    let config = &app.config;
    let mut options = GenerationOptions::read_common(body, lease)?;
    let fields: request::Messaging = body.part()?;
    let Some(most) = fields.max_tokens else {
        return Err(ApiError::invalid("max_tokens", "it is missing"));
    };
    let most = max_tokens(&[("max_tokens", Some(most))], 1, config)?;
    options.generation.max_tokens = most.unwrap_or(config.max_tokens);
    let stops = fields.stop_sequences.unwrap_or_default().0;
    options.generation.stop = stop_strings("stop_sequences", stops)?;
    let (conversation, asked) = conversation::read(body, lease)?;
    Ok(PendingPrompt::new(
        conversation,
        move |conversation, lease| {
            options.context.set_waited(lease);
            let prompt = asked.prompt(conversation, lease, Some(&mut options))?;
            Ok(Job { options, prompt })
        },
    ))
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
            stop: stop(blocks.finish()),
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
fn stop(end: Option<&ChatFinish>) -> AnthropicStop<'_> {
    let stop_reason = end.map(|end| match end {
        ChatFinish::Stop(None) => AnthropicStopReason::EndTurn,
        ChatFinish::Stop(Some(_)) => AnthropicStopReason::StopSequence,
        ChatFinish::Length => AnthropicStopReason::MaxTokens,
        ChatFinish::Calls => AnthropicStopReason::ToolUse,
    });
    let stop_sequence = match end {
        Some(ChatFinish::Stop(Some(text))) => Some(text.as_str()),
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
        BlockKind::Text => AnthropicBlock::Text { text },
        BlockKind::Reasoning => AnthropicBlock::Thinking {
            thinking: text,
            signature: "",
        },
        BlockKind::Call(name) => AnthropicBlock::ToolUse {
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

fn block_event<'a>(index: usize, block: &'a Block, event: &'a BlockEvent) -> AnthropicEvent<'a> {
    match event {
        BlockEvent::Start => AnthropicEvent::ContentBlockStart {
            index,
            content_block: block_of(block, "", Map::new().into()),
        },
        BlockEvent::Delta(text, _) => AnthropicEvent::ContentBlockDelta {
            index,
            delta: match &block.kind {
                BlockKind::Text => AnthropicDelta::TextDelta { text },
                BlockKind::Reasoning => AnthropicDelta::ThinkingDelta { thinking: text },
                BlockKind::Call(_) => AnthropicDelta::InputJsonDelta { partial_json: text },
            },
        },
        BlockEvent::Stop => AnthropicEvent::ContentBlockStop { index },
    }
}

impl StreamEncoder for MessageEvents {
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

    fn encode(&mut self, event: GenerationEvent, out: &mut EventText) {
        match event {
            GenerationEvent::TextChunk(piece) => {
                let delta = self.output.push(piece);
                let emit =
                    |index, block: &Block, event| out.named(&block_event(index, block, &event));
                self.blocks.add(delta, emit);
            }
            GenerationEvent::Done(usage) => {
                out.named(&AnthropicEvent::MessageDelta {
                    delta: stop(self.blocks.finish()),
                    usage: tokens(&usage, self.blocks.reasoning_tokens()),
                });
                out.named(&AnthropicEvent::MessageStop);
            }
            GenerationEvent::PromptLogprobs(..)
            | GenerationEvent::Embedding(..)
            | GenerationEvent::Failed(_) => {}
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
