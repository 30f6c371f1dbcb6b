//! `/v1/chat/completions`: the next message of a conversation.

use super::openai_messages;
use crate::error::ApiError;
use crate::generation::chat_output::{ChatFinish, ChatOutput, ChatOutputDelta};
use crate::generation::generation_stream::{GenerationEvent, GenerationStream, TextChunk};
use crate::generation::logprobs::{chat_entry, prompt_entries};
use crate::generation::options::{GenerationOptions, max_tokens};
use crate::generation::usage::UsageSoFar;
use crate::http::app::App;
use crate::http::sse::{self, EventText, StreamEncoder};
use crate::ids::fresh_id;
use crate::ids::unix_time;
use crate::models::Lease;
use crate::models::model::Model;
use crate::output::{CallFormat, Delta};
use crate::prompt::conversation::{ChatPrompt, ToolChoice, set_effort};
use crate::prompt::images;
use crate::prompt::pending_prompt::PendingPrompt;
use crate::request::{self, Body, FunctionChoice, Int};
use crate::response::{
    Assistant, ChatChoice, ChatChunkChoice, ChatCompletion, ChatCompletionChunk,
    ChatCompletionChunkObject, ChatCompletionObject, ChatDelta, ChatFinishReason, ChatFunctionCall,
    ChatFunctionDelta, ChatLogprobs, ChatMessage, ChatToolCall, ChatToolCallDelta,
    CompletionTokensDetails, FunctionType, Null, TokenLogprobs, Usage,
};
use axum::Json;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use ferrum_engine::engine;
use std::sync::Arc;

#[derive(Debug)]
pub(super) struct Job {
    options: GenerationOptions,
    prompt: ChatPrompt,
    logprobs: Option<usize>,
    /// Whether calls are told in OpenAI's older form.
    functions: bool,
}

/// The route.
pub(crate) async fn chat(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response, ApiError> {
    let (mut job, lease) = app.read_chat(request, read).await?;
    let prompt = std::mem::take(&mut job.prompt.tokens);
    let left = job.options.context.time_left(&app.config);
    let images = std::mem::take(&mut job.prompt.images);
    let images =
        images::embed_images(&lease, images, (job.options.context.priority(), left)).await?;
    let usage = UsageSoFar::new(job.options.usage, vec![prompt.len()], job.options.n);
    let mut asked = job.options.request(prompt, &app.config);
    asked.logprobs = job.logprobs;
    asked.images = images;
    let mut answers = GenerationStream::begin(&lease, "messages", job.options.n, [asked])?;
    let mut chat = Chat::new(&lease, &job, answers.count());
    if job.options.stream {
        let shape = ChatChunks { chat, usage };
        return Ok(sse::response(answers, shape));
    }
    gather(&mut answers, &mut chat).await
}

fn read(app: &App, lease: &Lease, body: &mut Body) -> Result<PendingPrompt<Job>, ApiError> {
    let config = &app.config;
    let mut options = GenerationOptions::read(body, lease, config)?;
    let fields: request::Chat = body.part()?;
    let names = [
        ("max_completion_tokens", fields.max_completion_tokens),
        ("max_tokens", fields.max_tokens),
    ];
    let most = max_tokens(&names, 1, config)?;
    options.generation.max_tokens = most.unwrap_or(config.max_tokens);
    let logprobs = logprobs(&fields)?;
    supported(&fields)?;
    let conversation = openai_messages::read(body)?;
    let mut conversation =
        conversation.ok_or_else(|| ApiError::invalid("messages", "it is missing"))?;
    let efforts = [
        ("reasoning_effort", fields.reasoning_effort),
        (
            "reasoning.effort",
            fields.reasoning.and_then(|reasoning| reasoning.effort),
        ),
    ];
    for (name, effort) in efforts {
        if let Some(effort) = effort
            && !set_effort(lease, &mut conversation.extra, &effort)
        {
            body.ignore(name);
        }
    }
    if fields.store == Some(true) {
        body.ignore("store");
    }
    if fields.continue_final_message == Some(true) {
        conversation.prefill = conversation.take_last()?;
    }
    let functions = fields.functions.filter(|list| !list.0.is_empty());
    let is_older = functions.is_some();
    if let Some(functions) = functions {
        if conversation.tools.is_some() {
            let reason = "there are tools, too; expected one of them";
            return Err(ApiError::invalid("functions", reason));
        }
        let functions = functions.0.into_iter().map(openai_messages::function_json);
        conversation.tools = Some(functions.collect());
    }
    let parallel = !is_older && fields.parallel_tool_calls.unwrap_or(true);
    let tools = conversation.tools.as_ref();
    let choice = match fields.function_call {
        Some(FunctionChoice::Function(_)) if !is_older => {
            return Err(ApiError::invalid("function_call", "there are no functions"));
        }
        Some(FunctionChoice::Function(function)) => {
            ToolChoice::named("function_call.name", function.name.0, tools)?
        }
        Some(FunctionChoice::Word(word)) if is_older => {
            ToolChoice::of(Some(request::ToolChoice::Word(word)), tools)?
        }
        _ => ToolChoice::of(fields.tool_choice, tools)?,
    };
    Ok(PendingPrompt::new(
        conversation,
        move |conversation, lease| {
            options.context.set_waited(lease);
            Ok(Job {
                functions: is_older,
                prompt: conversation.prompt(lease, &choice, parallel, Some(&mut options))?,
                options,
                logprobs,
            })
        },
    ))
}

/// Fields that would change the answer and cannot be followed.
fn supported(fields: &request::Chat) -> Result<(), ApiError> {
    let modalities = fields.modalities.iter().flat_map(|list| &list.0);
    if let Some(other) = modalities.clone().find(|kind| *kind != "text") {
        let reason = format!("found {other:?}, not supported; expected [\"text\"]");
        return Err(ApiError::unsupported("modalities", reason));
    }
    if fields.add_generation_prompt == Some(false) && fields.continue_final_message != Some(true) {
        let reason = "not supported; expected true, or \"continue_final_message\": true beside it";
        return Err(ApiError::unsupported("add_generation_prompt", reason));
    }
    Ok(())
}

fn logprobs(fields: &request::Chat) -> Result<Option<usize>, ApiError> {
    let wanted = fields.logprobs.unwrap_or(false);
    let top = fields.top_logprobs.and_then(Int::count);
    if top.is_some_and(|top| top > 0) && !wanted {
        let reason = "only for requests with \"logprobs\": true";
        return Err(ApiError::invalid("top_logprobs", reason));
    }
    Ok(wanted.then_some(top.unwrap_or(0)))
}

/// What is known of the answers to a request while they come.
struct Chat {
    model: Arc<Model>,
    name: String,
    id: String,
    created: u64,
    wants_logprobs: bool,
    prompt_logprobs: Option<usize>,
    reasoning_tokens: usize,
    format: CallFormat,
    must_call: bool,
    /// Whether calls are told in OpenAI's older form.
    functions: bool,
    output: ChatOutput,
}

impl Chat {
    fn new(lease: &Lease, job: &Job, answers: usize) -> Self {
        Self {
            model: lease.model(),
            name: job.options.context.model.name.clone(),
            id: fresh_id("chatcmpl-"),
            created: unix_time(),
            wants_logprobs: job.logprobs.is_some(),
            prompt_logprobs: job.options.prompt_logprobs,
            reasoning_tokens: 0,
            format: job.prompt.output_format.format,
            must_call: job.prompt.must_call,
            functions: job.functions,
            output: ChatOutput::new(&job.prompt, answers),
        }
    }

    /// What a piece of an answer adds to it.
    fn part(&mut self, piece: TextChunk) -> ChatOutputDelta {
        let part = self.output.push(piece);
        self.reasoning_tokens += usize::from(part.is_reasoning);
        part
    }

    fn finish_reason(&self, finish: &ChatFinish) -> ChatFinishReason {
        match finish {
            ChatFinish::Stop(_) => ChatFinishReason::Stop,
            ChatFinish::Length => ChatFinishReason::Length,
            ChatFinish::Calls if self.functions => ChatFinishReason::FunctionCall,
            ChatFinish::Calls => ChatFinishReason::ToolCalls,
        }
    }

    fn usage(&self, usage: &engine::Usage) -> Usage {
        let reasoning_tokens = self.reasoning_tokens;
        Usage {
            completion_tokens_details: Some(CompletionTokensDetails { reasoning_tokens }),
            ..Usage::of(usage)
        }
    }
}

/// A message in the making.
#[derive(Default)]
struct Message {
    content: String,
    reasoning: String,
    calls: Vec<(String, String)>,
    logprobs: Vec<TokenLogprobs>,
    finish: Option<ChatFinishReason>,
}

impl Message {
    fn add(&mut self, part: ChatOutputDelta, chat: &Chat) {
        for delta in part.deltas {
            match delta {
                Delta::Content(text) => self.content.push_str(&text),
                Delta::Reasoning(text) => self.reasoning.push_str(&text),
                Delta::CallBegins(_, name) => self.calls.push((name, String::new())),
                Delta::CallArguments(_, text) => {
                    if let Some((_, arguments)) = self.calls.last_mut() {
                        arguments.push_str(&text);
                    }
                }
            }
        }
        let logprobs = part.logprobs;
        let logprobs = logprobs.map(|logprobs| chat_entry(&chat.model, &logprobs));
        self.logprobs.extend(logprobs);
        let finish = part
            .finish
            .as_ref()
            .map(|finish| chat.finish_reason(finish));
        self.finish = finish.or(self.finish);
    }

    fn choice(self, index: usize, chat: &Chat) -> ChatChoice {
        let silent = self.content.is_empty() && !self.calls.is_empty();
        let function = |(name, arguments)| ChatFunctionCall { name, arguments };
        let call = |function| ChatToolCall {
            id: chat.format.call_id(),
            r#type: FunctionType,
            function,
        };
        let mut calls = self.calls.into_iter().map(function);
        let function_call = if chat.functions { calls.next() } else { None };
        ChatChoice {
            index,
            logprobs: chat.wants_logprobs.then(|| listed(self.logprobs)),
            // An answer that is whole has one.
            finish_reason: self.finish.unwrap_or(ChatFinishReason::Stop),
            message: ChatMessage {
                role: Assistant,
                content: (!silent).then_some(self.content),
                refusal: Null,
                reasoning_content: Some(self.reasoning).filter(|text| !text.is_empty()),
                function_call,
                tool_calls: calls.map(call).collect(),
            },
        }
    }
}

/// Waits for all answers.
async fn gather(answers: &mut GenerationStream, chat: &mut Chat) -> Result<Response, ApiError> {
    let mut messages: Vec<Message> = (0..answers.count()).map(|_| Message::default()).collect();
    let mut usage = engine::Usage::default();
    let mut prompt = Vec::new();
    while let Some(event) = answers.next().await {
        match event {
            GenerationEvent::Failed(error) => return Err(error),
            GenerationEvent::Done(total) => usage = total,
            GenerationEvent::PromptLogprobs(_, part) => prompt.extend(part),
            GenerationEvent::Embedding(..) => {}
            GenerationEvent::TextChunk(piece) => {
                let message = &mut messages[piece.index];
                message.add(chat.part(piece), chat);
            }
        }
    }
    let messages = messages.into_iter().enumerate();
    let prompt_logprobs = chat.prompt_logprobs;
    Ok(Json(ChatCompletion {
        id: &chat.id,
        object: ChatCompletionObject,
        created: chat.created,
        model: &chat.name,
        choices: messages
            .map(|(index, message)| message.choice(index, chat))
            .collect(),
        usage: chat.usage(&usage),
        prompt_logprobs: prompt_logprobs.map(|top| prompt_entries(&chat.model, &prompt, top)),
    })
    .into_response())
}

fn listed(content: Vec<TokenLogprobs>) -> ChatLogprobs {
    ChatLogprobs {
        content,
        refusal: Null,
    }
}

struct ChatChunks {
    chat: Chat,
    usage: UsageSoFar,
}

impl ChatChunks {
    fn chunk(
        &self,
        choices: Vec<ChatChunkChoice>,
        usage: Option<Option<Usage>>,
    ) -> ChatCompletionChunk<'_> {
        ChatCompletionChunk {
            id: &self.chat.id,
            object: ChatCompletionChunkObject,
            created: self.chat.created,
            model: &self.chat.name,
            choices,
            usage,
        }
    }

    /// Writes what is new of an answer.
    fn emit(
        &self,
        index: usize,
        (delta, logprobs): (ChatDelta, Vec<TokenLogprobs>),
        finish_reason: Option<ChatFinishReason>,
        out: &mut EventText,
    ) {
        let choice = ChatChunkChoice {
            index,
            delta,
            logprobs: (self.chat.wants_logprobs && !logprobs.is_empty()).then(|| listed(logprobs)),
            finish_reason,
        };
        out.data(&self.chunk(vec![choice], self.usage.of_chunk(index)));
    }
}

impl StreamEncoder for ChatChunks {
    const DONE: bool = true;

    fn encode(&mut self, event: GenerationEvent, out: &mut EventText) {
        let piece = match event {
            GenerationEvent::TextChunk(piece) => piece,
            GenerationEvent::Done(usage) if self.usage.last() => {
                let usage = self.chat.usage(&usage);
                return out.data(&self.chunk(Vec::new(), Some(Some(usage))));
            }
            GenerationEvent::Done(_)
            | GenerationEvent::PromptLogprobs(..)
            | GenerationEvent::Embedding(..)
            | GenerationEvent::Failed(_) => return,
        };
        let index = piece.index;
        self.usage.count(&piece);
        let part = self.chat.part(piece);
        if part.first {
            let delta = ChatDelta {
                role: Some(Assistant),
                content: Some((!self.chat.must_call).then(String::new)),
                ..ChatDelta::default()
            };
            self.emit(index, (delta, Vec::new()), None, out);
        }
        let logprobs = part.logprobs;
        let logprobs = logprobs.map(|logprobs| chat_entry(&self.chat.model, &logprobs));
        let mut logprobs: Vec<_> = logprobs.into_iter().collect();
        for delta in part.deltas {
            let logprobs = std::mem::take(&mut logprobs);
            let delta = ChatDelta::of(delta, &self.chat);
            self.emit(index, (delta, logprobs), None, out);
        }
        if !logprobs.is_empty() {
            // A token whose text is not certain yet.
            let delta = match self.chat.must_call {
                true => ChatDelta::default(),
                false => ChatDelta::content(String::new()),
            };
            self.emit(index, (delta, logprobs), None, out);
        }
        if let Some(finish) = &part.finish {
            let nothing = (ChatDelta::default(), Vec::new());
            self.emit(index, nothing, Some(self.chat.finish_reason(finish)), out);
        }
    }
}

impl ChatDelta {
    fn content(text: String) -> Self {
        Self {
            content: Some(Some(text)),
            ..Self::default()
        }
    }

    fn of(delta: Delta, chat: &Chat) -> Self {
        let (index, begins, function) = match delta {
            Delta::Content(text) => return Self::content(text),
            Delta::Reasoning(text) => {
                return Self {
                    reasoning_content: Some(text),
                    ..Self::default()
                };
            }
            Delta::CallBegins(index, name) => {
                let function = ChatFunctionDelta {
                    name: Some(name),
                    arguments: String::new(),
                };
                (index, true, function)
            }
            Delta::CallArguments(index, arguments) => {
                let function = ChatFunctionDelta {
                    name: None,
                    arguments,
                };
                (index, false, function)
            }
        };
        if chat.functions {
            return Self {
                function_call: Some(function),
                ..Self::default()
            };
        }
        let call = ChatToolCallDelta {
            index,
            id: begins.then(|| chat.format.call_id()),
            r#type: begins.then_some(FunctionType),
            function,
        };
        Self {
            tool_calls: Some([call]),
            ..Self::default()
        }
    }
}
