//! `/v1/responses`: the next part of a conversation, as OpenAI's newer clients ask for it.

mod events;
mod input;
mod shape;

use crate::answers::Answers;
use crate::app::App;
use crate::conversation::{ChatPrompt, Conversation, ToolChoice, set_effort};
use crate::error::ApiError;
use crate::fields::Fields;
use crate::model::Model;
use crate::models::Lease;
use crate::sampling::{self, Wanted, is_false};
use crate::speech::{self, Speech};
use crate::sse;
use crate::structured::{self, Structured};
use axum::Json;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, Request, State};
use axum::response::{IntoResponse, Response};
use serde_json::{Map, Value, json};
use shape::Shape;
use std::sync::Arc;

/// The field that names the response to go on from.
const PREVIOUS: &str = "previous_response_id";

#[derive(Debug)]
pub(super) struct Job {
    wanted: Wanted,
    prompt: ChatPrompt,
    /// The fields that the response repeats.
    echo: Map<String, Value>,
    /// The conversation so far, if the response is to be kept.
    messages: Option<Vec<Value>>,
}

/// The route.
pub(crate) async fn create(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response, ApiError> {
    let fields = app.fields(request).await?;
    let model = asked_model(&app, &fields)?;
    let lease = app.lease(model.as_deref()).await?;
    let (mut job, lease) = app.parse(fields, lease, read).await?;
    let prompt = std::mem::take(&mut job.prompt.tokens);
    let asked = job.wanted.request(prompt, &app.config);
    let mut answers = Answers::begin(&lease, "input", 1, [asked])?;
    let speech = Speech::new(&job.prompt, answers.count());
    let stream = job.wanted.stream;
    let shape = Shape::new(&app, job.echo, job.messages);
    if stream {
        let shape = events::ResponseEvents::new(shape, speech);
        return Ok(sse::response(answers, shape));
    }
    let (blocks, usage) = speech::whole(&mut answers, speech).await?;
    Ok(Json(shape.ended(&blocks, &usage)).into_response())
}

/// The model that a request means: one that names none goes on with that of the response before.
fn asked_model(app: &App, fields: &Fields) -> Result<Option<String>, ApiError> {
    let asked = fields.peek_text("model")?;
    let previous = fields.peek_text(PREVIOUS)?.filter(|_| asked.is_none());
    let stored = previous.and_then(|id| app.responses.get(&id));
    Ok(asked.or_else(|| stored.map(|stored| stored.model().to_owned())))
}

/// A response that was kept.
pub(crate) async fn retrieve(
    State(app): State<Arc<App>>,
    path: Result<Path<String>, PathRejection>,
) -> Result<Json<Value>, ApiError> {
    let Path(id) = path?;
    let stored = app.responses.get(&id);
    let response = stored.and_then(|stored| stored.response());
    let response = response.ok_or_else(|| ApiError::not_kept("response", &id))?;
    Ok(Json(response))
}

/// Forgets a response.
pub(crate) async fn delete(
    State(app): State<Arc<App>>,
    path: Result<Path<String>, PathRejection>,
) -> Result<Json<Value>, ApiError> {
    let Path(id) = path?;
    match app.responses.remove(&id) {
        true => Ok(Json(
            json!({"id": id, "object": "response", "deleted": true}),
        )),
        false => Err(ApiError::not_kept("response", &id)),
    }
}

pub(super) fn read(app: &App, lease: &Lease, mut fields: Fields) -> Result<Job, ApiError> {
    let config = &app.config;
    let mut echo = Map::new();
    for field in ["metadata", "tools", "tool_choice", "user", "reasoning"] {
        echo.insert(field.into(), fields.peek(field));
    }
    let mut wanted = Wanted::one(&mut fields, lease)?;
    echo.insert("model".into(), wanted.place.model.name.as_str().into());
    let names = ["max_output_tokens"];
    let most = sampling::max_tokens(&mut fields, &names, 1, config)?;
    wanted.generation.max_tokens = most.unwrap_or(config.max_tokens);
    echo.insert("max_output_tokens".into(), json!(most));
    let sampling = &wanted.generation.sampling;
    echo.insert("temperature".into(), shape::short(sampling.temperature));
    echo.insert("top_p".into(), shape::short(sampling.top_p));
    read_harmless(&mut fields, wanted.stream)?;
    sampling::ignored(&mut fields)?;
    wanted.structured = read_text(&mut fields, &mut echo)?;
    let store = read_store(app, &mut fields)?;
    echo.insert("store".into(), store.into());
    let mut messages = read_previous(app, &mut fields, &mut echo)?;
    input::read(&mut fields, &mut messages)?;
    let mut extra = Map::new();
    read_reasoning(&mut fields, lease, &mut extra)?;
    let tools = input::read_tools(&mut fields)?;
    let choice = read_tool_choice(&mut fields, tools.as_ref())?;
    let parallel = fields.boolean("parallel_tool_calls")?.unwrap_or(true);
    echo.insert("parallel_tool_calls".into(), parallel.into());
    let instructions = fields.text("instructions")?;
    echo.insert("instructions".into(), json!(instructions));
    fields.finish()?;
    let kept = store.then(|| messages.clone());
    if let Some(text) = instructions {
        // Those of an earlier response are gone.
        messages.insert(0, json!({"role": "system", "content": text}));
    }
    let conversation = Conversation {
        messages: Value::Array(messages),
        tools,
        extra,
        prefill: String::new(),
    };
    Ok(Job {
        prompt: conversation.prompt(lease, &choice, parallel, Some(&mut wanted))?,
        wanted,
        echo,
        messages: kept,
    })
}

/// Fields that are accepted where they ask for what happens anyway.
fn read_harmless(fields: &mut Fields, stream: bool) -> Result<(), ApiError> {
    fields.harmless("background", is_false, "false")?;
    fields.harmless("truncation", |v| v == "disabled", "\"disabled\"")?;
    fields.harmless("top_logprobs", |v| v == 0, "0")?;
    // Reasoning comes in the clear, which serves what encrypted reasoning is asked for.
    let include = |v: &Value| {
        let mut list = v.as_array().into_iter().flatten();
        v.is_array() && list.all(|entry| entry == "reasoning.encrypted_content")
    };
    fields.harmless("include", include, "[\"reasoning.encrypted_content\"]")?;
    let Some(options) = fields.take("stream_options") else {
        return Ok(());
    };
    if !stream {
        let reason = "only for requests with \"stream\": true";
        return Err(ApiError::invalid("stream_options", reason));
    }
    let mut options = Fields::of(options, "stream_options")?;
    options.harmless("include_obfuscation", is_false, "false")?;
    options.finish()
}

/// Takes `text`: the form of the answer.
fn read_text(
    fields: &mut Fields,
    echo: &mut Map<String, Value>,
) -> Result<Option<Structured>, ApiError> {
    let Some(text) = fields.take("text") else {
        return Ok(None);
    };
    let mut text = Fields::of(text, "text")?;
    echo.insert("format".into(), text.peek("format"));
    let format = structured::text_format(&mut text)?;
    text.harmless("verbosity", |v| v == "medium", "\"medium\"")?;
    text.finish()?;
    Ok(format)
}

/// Whether the response is kept; it is, as with OpenAI, unless the request says otherwise.
fn read_store(app: &App, fields: &mut Fields) -> Result<bool, ApiError> {
    let asked = fields.boolean("store")?;
    match (asked, app.responses.is_on()) {
        (Some(true), false) => Err(ApiError::unsupported("store", "this server keeps nothing")),
        (Some(store), _) => Ok(store),
        (None, on) => Ok(on),
    }
}

/// The conversation that the request goes on with.
fn read_previous(
    app: &App,
    fields: &mut Fields,
    echo: &mut Map<String, Value>,
) -> Result<Vec<Value>, ApiError> {
    let id = fields.text(PREVIOUS)?;
    echo.insert(PREVIOUS.into(), json!(id));
    let Some(id) = id else {
        return Ok(Vec::new());
    };
    let stored = app.responses.get(&id);
    let messages = stored.and_then(|stored| stored.messages());
    messages.ok_or_else(|| {
        let reason = format!(
            "there is no response {id:?} here, or no longer; send the whole conversation as input"
        );
        ApiError::invalid(PREVIOUS, reason)
    })
}

/// Takes `reasoning`.
fn read_reasoning(
    fields: &mut Fields,
    model: &Model,
    extra: &mut Map<String, Value>,
) -> Result<(), ApiError> {
    let Some(reasoning) = fields.take("reasoning") else {
        return Ok(());
    };
    let mut reasoning = Fields::of(reasoning, "reasoning")?;
    if let Some(effort) = reasoning.text("effort")? {
        set_effort(model, extra, "reasoning.effort", &effort)?;
    }
    // "auto" is whatever there is, and there is none.
    reasoning.harmless("summary", |v| v == "auto", "\"auto\"")?;
    reasoning.finish()
}

fn read_tool_choice(fields: &mut Fields, tools: Option<&Value>) -> Result<ToolChoice, ApiError> {
    let choice = match fields.take("tool_choice") {
        None => return Ok(tools.map_or(ToolChoice::None, |_| ToolChoice::Auto)),
        Some(Value::String(word)) => ToolChoice::of_word(&word)?,
        Some(value) => {
            let mut choice = Fields::of(value, "tool_choice")?;
            choice.harmless("type", |v| v == "function", "\"function\"")?;
            let name = choice.text("name")?.unwrap_or_default();
            choice.finish()?;
            return ToolChoice::named("tool_choice.name", name, tools);
        }
    };
    match tools {
        // OpenAI's clients send "auto" without any, too.
        None if matches!(choice, ToolChoice::None | ToolChoice::Auto) => Ok(ToolChoice::None),
        None => Err(ApiError::invalid("tool_choice", "there are no tools")),
        Some(_) => Ok(choice),
    }
}
