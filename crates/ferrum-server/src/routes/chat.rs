//! `/v1/chat/completions`: the next message of a conversation.

use super::messages;
use crate::answers::{Answers, Next, Piece};
use crate::app::{App, fresh_id};
use crate::conversation::{ChatPrompt, ToolChoice, set_effort};
use crate::error::ApiError;
use crate::logprobs::{chat_entry, prompt_entries};
use crate::model::{Model, unix_time};
use crate::models::Lease;
use crate::output::{CallFormat, Delta};
use crate::request::{self, Body, Int};
use crate::response::{
    Assistant, ChatChoice, ChatChunkChoice, ChatCompletion, ChatCompletionChunk,
    ChatCompletionChunkObject, ChatCompletionObject, ChatDelta, ChatFinishReason, ChatFunctionCall,
    ChatFunctionDelta, ChatLogprobs, ChatMessage, ChatToolCall, ChatToolCallDelta,
    CompletionTokensDetails, FunctionType, Null, TokenLogprobs, Usage,
};
use crate::sampling::{self, UsageSoFar, Wanted};
use crate::speech::{End, Part, Speech};
use crate::sse::{self, Chunks, EventText};
use axum::Json;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use ferrum_engine::engine;
use std::sync::Arc;

#[derive(Debug)]
pub(super) struct Job {
    wanted: Wanted,
    prompt: ChatPrompt,
    logprobs: Option<usize>,
}

/// The route.
pub(crate) async fn chat(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response, ApiError> {
    let (mut job, lease) = app.read(request, read).await?;
    let prompt = std::mem::take(&mut job.prompt.tokens);
    let usage = UsageSoFar::new(job.wanted.usage, vec![prompt.len()], job.wanted.n);
    let mut asked = job.wanted.request(prompt, &app.config);
    asked.logprobs = job.logprobs;
    let mut answers = Answers::begin(&lease, "messages", job.wanted.n, [asked])?;
    let mut chat = Chat::new(&lease, &job, answers.count());
    if job.wanted.stream {
        let shape = ChatChunks { chat, usage };
        return Ok(sse::response(answers, shape));
    }
    gather(&mut answers, &mut chat).await
}

pub(super) fn read(app: &App, lease: &Lease, body: &mut Body) -> Result<Job, ApiError> {
    let config = &app.config;
    let mut wanted = Wanted::read(body, lease, config)?;
    let fields: request::Chat = body.part()?;
    let names = [
        ("max_completion_tokens", fields.max_completion_tokens),
        ("max_tokens", fields.max_tokens),
    ];
    let most = sampling::max_tokens(&names, 1, config)?;
    wanted.generation.max_tokens = most.unwrap_or(config.max_tokens);
    let logprobs = logprobs(&fields)?;
    supported(&fields)?;
    let conversation = messages::read(body)?;
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
    let parallel = fields.parallel_tool_calls.unwrap_or(true);
    let choice = ToolChoice::of(fields.tool_choice, conversation.tools.as_ref())?;
    Ok(Job {
        prompt: conversation.prompt(lease, &choice, parallel, Some(&mut wanted))?,
        wanted,
        logprobs,
    })
}

/// Fields that would change the answer and cannot be followed.
fn supported(fields: &request::Chat) -> Result<(), ApiError> {
    if fields.functions.is_some() || fields.function_call.is_some() {
        let name = match fields.functions {
            Some(_) => "functions",
            None => "function_call",
        };
        return Err(ApiError::unsupported(name, "not supported; use tools"));
    }
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
    speech: Speech,
}

impl Chat {
    fn new(lease: &Lease, job: &Job, answers: usize) -> Self {
        Self {
            model: lease.model(),
            name: job.wanted.place.model.name.clone(),
            id: fresh_id("chatcmpl-"),
            created: unix_time(),
            wants_logprobs: job.logprobs.is_some(),
            prompt_logprobs: job.wanted.prompt_logprobs,
            reasoning_tokens: 0,
            format: job.prompt.looks.format,
            must_call: job.prompt.must_call,
            speech: Speech::new(&job.prompt, answers),
        }
    }

    /// What a piece of an answer adds to it.
    fn part(&mut self, piece: Piece) -> Part {
        let part = self.speech.part(piece);
        self.reasoning_tokens += usize::from(part.is_reasoning);
        part
    }

    fn usage(&self, usage: &engine::Usage) -> Usage {
        let reasoning_tokens = self.reasoning_tokens;
        Usage {
            completion_tokens_details: Some(CompletionTokensDetails { reasoning_tokens }),
            ..Usage::of(usage)
        }
    }
}

fn finish_reason(end: &End) -> ChatFinishReason {
    match end {
        End::Stop(_) => ChatFinishReason::Stop,
        End::Length => ChatFinishReason::Length,
        End::Calls => ChatFinishReason::ToolCalls,
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
    fn add(&mut self, part: Part, model: &Model) {
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
        let logprobs = part.logprobs.map(|logprobs| chat_entry(model, &logprobs));
        self.logprobs.extend(logprobs);
        self.finish = part.end.as_ref().map(finish_reason).or(self.finish);
    }

    fn choice(self, index: usize, chat: &Chat) -> ChatChoice {
        let silent = self.content.is_empty() && !self.calls.is_empty();
        let call = |(name, arguments)| ChatToolCall {
            id: chat.format.call_id(),
            r#type: FunctionType,
            function: ChatFunctionCall { name, arguments },
        };
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
                tool_calls: self.calls.into_iter().map(call).collect(),
            },
        }
    }
}

/// Waits for all answers.
async fn gather(answers: &mut Answers, chat: &mut Chat) -> Result<Response, ApiError> {
    let mut messages: Vec<Message> = (0..answers.count()).map(|_| Message::default()).collect();
    let mut usage = engine::Usage::default();
    let mut prompt = Vec::new();
    while let Some(next) = answers.next().await {
        match next {
            Next::Failed(error) => return Err(error),
            Next::Done(total) => usage = total,
            Next::Prompt(_, part) => prompt.extend(part),
            Next::Embedding(..) => {}
            Next::Piece(piece) => {
                let message = &mut messages[piece.index];
                message.add(chat.part(piece), &chat.model);
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
    fn tell(
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

impl Chunks for ChatChunks {
    const DONE: bool = true;

    fn chunks(&mut self, next: Next, out: &mut EventText) {
        let piece = match next {
            Next::Piece(piece) => piece,
            Next::Done(usage) if self.usage.last() => {
                let usage = self.chat.usage(&usage);
                return out.data(&self.chunk(Vec::new(), Some(Some(usage))));
            }
            Next::Done(_) | Next::Prompt(..) | Next::Embedding(..) | Next::Failed(_) => return,
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
            self.tell(index, (delta, Vec::new()), None, out);
        }
        let logprobs = part.logprobs;
        let logprobs = logprobs.map(|logprobs| chat_entry(&self.chat.model, &logprobs));
        let mut logprobs: Vec<_> = logprobs.into_iter().collect();
        for delta in part.deltas {
            let logprobs = std::mem::take(&mut logprobs);
            let delta = ChatDelta::of(delta, self.chat.format);
            self.tell(index, (delta, logprobs), None, out);
        }
        if !logprobs.is_empty() {
            // A token whose text is not certain yet.
            let delta = match self.chat.must_call {
                true => ChatDelta::default(),
                false => ChatDelta::content(String::new()),
            };
            self.tell(index, (delta, logprobs), None, out);
        }
        if let Some(end) = &part.end {
            let nothing = (ChatDelta::default(), Vec::new());
            self.tell(index, nothing, Some(finish_reason(end)), out);
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

    fn of(delta: Delta, format: CallFormat) -> Self {
        let call = match delta {
            Delta::Content(text) => return Self::content(text),
            Delta::Reasoning(text) => {
                return Self {
                    reasoning_content: Some(text),
                    ..Self::default()
                };
            }
            Delta::CallBegins(index, name) => ChatToolCallDelta {
                index,
                id: Some(format.call_id()),
                r#type: Some(FunctionType),
                function: ChatFunctionDelta {
                    name: Some(name),
                    arguments: String::new(),
                },
            },
            Delta::CallArguments(index, arguments) => ChatToolCallDelta {
                index,
                id: None,
                r#type: None,
                function: ChatFunctionDelta {
                    name: None,
                    arguments,
                },
            },
        };
        Self {
            tool_calls: Some([call]),
            ..Self::default()
        }
    }
}
