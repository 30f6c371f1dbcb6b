//! `/v1/chat/completions`: the next message of a conversation.

use super::completions::usage_json;
use super::messages;
use crate::answers::{Answers, Next};
use crate::app::{App, fresh_id};
use crate::conversation::{ChatPrompt, ToolChoice};
use crate::error::ApiError;
use crate::fields::Fields;
use crate::logprobs::chat_entry;
use crate::model::{Model, unix_time};
use crate::models::Lease;
use crate::output::{CallFormat, Delta};
use crate::sampling::{self, Wanted};
use crate::speech::{End, Part, Speech};
use crate::sse::{self, Chunks, Events};
use axum::Json;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use ferrum_engine::engine::{MAX_LOGPROBS, Usage};
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
    let mut asked = job.wanted.request(prompt, &app.config);
    asked.logprobs = job.logprobs;
    let mut answers = Answers::begin(&lease, "messages", job.wanted.n, [asked])?;
    let mut chat = Chat::new(&lease, &job, answers.count());
    if job.wanted.stream {
        let shape = ChatChunks {
            chat,
            include_usage: job.wanted.include_usage,
        };
        return Ok(sse::response(answers, shape));
    }
    gather(&mut answers, &mut chat).await
}

pub(super) fn read(app: &App, lease: &Lease, mut fields: Fields) -> Result<Job, ApiError> {
    let config = &app.config;
    let mut wanted = Wanted::read(&mut fields, lease, config)?;
    let names = ["max_completion_tokens", "max_tokens"];
    let most = sampling::max_tokens(&mut fields, &names, 1, config)?;
    wanted.generation.max_tokens = most.unwrap_or(config.max_tokens);
    let logprobs = read_logprobs(&mut fields)?;
    let text_only = |v: &Value| *v == json!(["text"]);
    fields.harmless("modalities", text_only, "[\"text\"]")?;
    let conversation = messages::read(&mut fields)?;
    let conversation =
        conversation.ok_or_else(|| ApiError::invalid("messages", "it is missing"))?;
    let parallel = fields.boolean("parallel_tool_calls")?.unwrap_or(true);
    let choice = read_tool_choice(&mut fields, conversation.tools.as_ref())?;
    fields.finish()?;
    Ok(Job {
        prompt: conversation.prompt(lease, &choice, parallel, Some(&mut wanted))?,
        wanted,
        logprobs,
    })
}

fn read_logprobs(fields: &mut Fields) -> Result<Option<usize>, ApiError> {
    let wanted = fields.boolean("logprobs")?.unwrap_or(false);
    let top = fields.count("top_logprobs", 0..=MAX_LOGPROBS)?;
    if top.is_some() && !wanted {
        let reason = "only for requests with \"logprobs\": true";
        return Err(ApiError::invalid("top_logprobs", reason));
    }
    Ok(wanted.then_some(top.unwrap_or(0)))
}

fn read_tool_choice(fields: &mut Fields, tools: Option<&Value>) -> Result<ToolChoice, ApiError> {
    let value = fields.take("tool_choice");
    let choice = match &value {
        None if tools.is_none() => return Ok(ToolChoice::None),
        None => return Ok(ToolChoice::Auto),
        Some(Value::String(word)) => ToolChoice::of_word(word)?,
        Some(value) => {
            let mut choice = Fields::of(value.clone(), "tool_choice")?;
            choice.harmless("type", |v| v == "function", "\"function\"")?;
            let mut function = Fields::of(choice.need("function")?, "tool_choice.function")?;
            choice.finish()?;
            let name = function.text("name")?.unwrap_or_default();
            function.finish()?;
            ToolChoice::named("tool_choice.function.name", name, tools)?
        }
    };
    match tools {
        None if choice != ToolChoice::None => {
            Err(ApiError::invalid("tool_choice", "there are no tools"))
        }
        _ => Ok(choice),
    }
}

/// What is known of the answers to a request while they come.
struct Chat {
    model: Arc<Model>,
    name: String,
    id: String,
    created: u64,
    wants_logprobs: bool,
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
            format: job.prompt.looks.format,
            speech: Speech::new(&job.prompt, answers),
        }
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
    while let Some(next) = answers.next().await {
        match next {
            Next::Failed(error) => return Err(error),
            Next::Done(total) => usage = total,
            Next::Prompt(..) | Next::Embedding(..) => {}
            Next::Piece(piece) => {
                let message = &mut messages[piece.index];
                message.add(chat.speech.part(piece), &chat.model);
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
    whole["usage"] = usage_json(&usage);
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
    include_usage: bool,
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
        if self.include_usage {
            chunk["usage"] = Value::Null;
        }
        chunk
    }
}

impl Chunks for ChatChunks {
    const EVENTS: Events = Events::Plain;

    fn chunks(&mut self, next: Next, out: &mut Vec<Value>) {
        let piece = match next {
            Next::Piece(piece) => piece,
            Next::Done(usage) if self.include_usage => {
                let mut chunk = self.chat.envelope("chat.completion.chunk", Vec::new());
                chunk["usage"] = usage_json(&usage);
                return out.push(chunk);
            }
            Next::Done(_) | Next::Prompt(..) | Next::Embedding(..) | Next::Failed(_) => return,
        };
        let index = piece.index;
        let part = self.chat.speech.part(piece);
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
