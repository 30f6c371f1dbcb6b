//! `/v1/chat/completions`: the next message of a conversation.

use super::completions::usage_json;
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
use crate::sampling::{self, UsageSoFar, Wanted};
use crate::speech::{End, Part, Speech};
use crate::sse::{self, Chunks, Events};
use axum::Json;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use ferrum_engine::engine::Usage;
use serde_json::{Map, Value, json};
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
            speech: Speech::new(&job.prompt, answers),
        }
    }

    /// What a piece of an answer adds to it.
    fn part(&mut self, piece: Piece) -> Part {
        let part = self.speech.part(piece);
        self.reasoning_tokens += usize::from(part.is_reasoning);
        part
    }

    fn usage(&self, usage: &Usage) -> Value {
        let mut json = usage_json(usage);
        json["completion_tokens_details"] = json!({"reasoning_tokens": self.reasoning_tokens});
        json
    }

    fn envelope(&self, object: &str, choices: Vec<Value>) -> Value {
        json!({
            "id": self.id,
            "object": object,
            "created": self.created,
            "model": self.name,
            "choices": choices,
        })
    }
}

fn end_name(end: &End) -> &'static str {
    match end {
        End::Stop(_) => "stop",
        End::Length => "length",
        End::Calls => "tool_calls",
    }
}

/// A message in the making.
#[derive(Default)]
struct Message {
    content: String,
    reasoning: String,
    calls: Vec<(String, String)>,
    logprobs: Vec<Value>,
    finish: Option<&'static str>,
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
        self.finish = part.end.as_ref().map(end_name).or(self.finish);
    }

    fn json(self, format: CallFormat) -> Value {
        let silent = self.content.is_empty() && !self.calls.is_empty();
        let mut message = Map::new();
        message.insert("role".into(), "assistant".into());
        let content = (!silent).then_some(self.content);
        message.insert("content".into(), content.into());
        message.insert("refusal".into(), Value::Null);
        if !self.reasoning.is_empty() {
            message.insert("reasoning_content".into(), self.reasoning.into());
        }
        if !self.calls.is_empty() {
            let call = |(name, arguments)| {
                json!({
                    "id": format.call_id(),
                    "type": "function",
                    "function": {"name": name, "arguments": arguments},
                })
            };
            let calls: Vec<_> = self.calls.into_iter().map(call).collect();
            message.insert("tool_calls".into(), calls.into());
        }
        message.into()
    }
}

/// Waits for all answers.
async fn gather(answers: &mut Answers, chat: &mut Chat) -> Result<Response, ApiError> {
    let mut messages: Vec<Message> = (0..answers.count()).map(|_| Message::default()).collect();
    let mut usage = Usage::default();
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
    let choice = |(index, mut message): (usize, Message)| {
        let logprobs = std::mem::take(&mut message.logprobs);
        json!({
            "index": index,
            "logprobs": logprobs_json(chat.wants_logprobs, logprobs),
            "finish_reason": message.finish,
            "message": message.json(chat.format),
        })
    };
    let choices = messages.into_iter().enumerate().map(choice).collect();
    let mut whole = chat.envelope("chat.completion", choices);
    whole["usage"] = chat.usage(&usage);
    if let Some(top) = chat.prompt_logprobs {
        whole["prompt_logprobs"] = prompt_entries(&chat.model, &prompt, top);
    }
    Ok(Json(whole).into_response())
}

fn logprobs_json(wanted: bool, content: Vec<Value>) -> Value {
    match wanted {
        true => json!({"content": content, "refusal": null}),
        false => Value::Null,
    }
}

struct ChatChunks {
    chat: Chat,
    usage: UsageSoFar,
}

impl ChatChunks {
    fn chunk(&self, index: usize, delta: Value, logprobs: Vec<Value>) -> Value {
        let has_logprobs = self.chat.wants_logprobs && !logprobs.is_empty();
        let choice = json!({
            "index": index,
            "delta": delta,
            "logprobs": logprobs_json(has_logprobs, logprobs),
            "finish_reason": null,
        });
        let mut chunk = self.chat.envelope("chat.completion.chunk", vec![choice]);
        self.usage.mark(index, &mut chunk);
        chunk
    }
}

impl Chunks for ChatChunks {
    const EVENTS: Events = Events::Plain;

    fn chunks(&mut self, next: Next, out: &mut Vec<Value>) {
        let piece = match next {
            Next::Piece(piece) => piece,
            Next::Done(usage) if self.usage.last() => {
                let mut chunk = self.chat.envelope("chat.completion.chunk", Vec::new());
                chunk["usage"] = self.chat.usage(&usage);
                return out.push(chunk);
            }
            Next::Done(_) | Next::Prompt(..) | Next::Embedding(..) | Next::Failed(_) => return,
        };
        let index = piece.index;
        self.usage.count(&piece);
        let part = self.chat.part(piece);
        if part.first {
            let delta = json!({"role": "assistant", "content": ""});
            out.push(self.chunk(index, delta, Vec::new()));
        }
        let logprobs = part.logprobs;
        let logprobs = logprobs.map(|logprobs| chat_entry(&self.chat.model, &logprobs));
        let mut logprobs: Vec<_> = logprobs.into_iter().collect();
        for delta in part.deltas {
            let logprobs = std::mem::take(&mut logprobs);
            let delta = delta_json(delta, self.chat.format);
            out.push(self.chunk(index, delta, logprobs));
        }
        if !logprobs.is_empty() {
            // A token whose text is not certain yet.
            out.push(self.chunk(index, json!({"content": ""}), logprobs));
        }
        if let Some(end) = &part.end {
            let mut chunk = self.chunk(index, json!({}), Vec::new());
            chunk["choices"][0]["finish_reason"] = end_name(end).into();
            out.push(chunk);
        }
    }
}

fn delta_json(delta: Delta, format: CallFormat) -> Value {
    match delta {
        Delta::Content(text) => json!({"content": text}),
        Delta::Reasoning(text) => json!({"reasoning_content": text}),
        Delta::CallBegins(index, name) => json!({"tool_calls": [{
            "index": index,
            "id": format.call_id(),
            "type": "function",
            "function": {"name": name, "arguments": ""},
        }]}),
        Delta::CallArguments(index, text) => json!({"tool_calls": [{
            "index": index,
            "function": {"arguments": text},
        }]}),
    }
}
