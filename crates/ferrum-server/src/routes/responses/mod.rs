//! `/v1/responses`: the next part of a conversation, as OpenAI's newer clients ask for it.

mod events;
mod input;
mod input_items;
mod shape;

pub(crate) use input_items::input_items;

use crate::error::ApiError;
use crate::generation::chat_output::{self, ChatOutput};
use crate::generation::generation_stream::GenerationStream;
use crate::generation::options::{GenerationOptions, max_tokens};
use crate::generation::sampler_settings::written;
use crate::generation::structured;
use crate::generation::usage::only_for_streams;
use crate::http::app::App;
use crate::http::sse;
use crate::models::Lease;
use crate::prompt::conversation::{ChatPrompt, Conversation, ToolChoice, set_effort};
use crate::prompt::images;
use crate::prompt::pending_prompt::PendingPrompt;
use crate::request::{self, Body, Int};
use crate::response::{DeletedResponse, InputTokensObject, ResponseObject, ResponseTokens};
use axum::Json;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, Request, State};
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use serde_json::{Map, Value, json};
use shape::{Echo, Shape};
use std::sync::Arc;

/// The field that names the response to go on from.
const PREVIOUS: &str = "previous_response_id";

/// What `include` names to have log-probabilities.
const LOGPROBS: &str = "message.output_text.logprobs";

#[derive(Debug)]
pub(super) struct Job {
    options: GenerationOptions,
    prompt: ChatPrompt,
    /// The fields that the response repeats.
    echo: Echo,
    /// Whether log-probabilities of its text are wanted.
    wants_logprobs: bool,
    /// The conversation so far, if the response is to be kept.
    messages: Option<Vec<Value>>,
}

/// The route.
pub(crate) async fn create(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response, ApiError> {
    let body = app.fields(request).await?;
    let model = asked_model(&app, &body)?;
    let lease = app.lease(model.as_deref()).await?;
    let (mut job, lease) = app.parse_chat(body, lease, read).await?;
    let prompt = std::mem::take(&mut job.prompt.tokens);
    let left = job.options.context.time_left(&app.config);
    let images = std::mem::take(&mut job.prompt.images);
    let images =
        images::embed_images(&lease, images, (job.options.context.priority(), left)).await?;
    let mut asked = job.options.request(prompt, &app.config);
    asked.images = images;
    asked.logprobs = job.wants_logprobs.then_some(job.echo.top_logprobs);
    let mut answers = GenerationStream::begin(&lease, "input", 1, [asked])?;
    let output = ChatOutput::new(&job.prompt, answers.count());
    let stream = job.options.stream;
    let shape = Shape::new(&app, lease.model(), job.echo, job.messages);
    if stream {
        let shape = events::ResponseEvents::new(shape, output);
        return Ok(sse::response(answers, shape));
    }
    let (blocks, usage) = chat_output::collect_blocks(&mut answers, output).await?;
    let response = shape.ended(&blocks, &usage);
    shape.keep(&response, &blocks);
    Ok(Json(response).into_response())
}

/// The model that a request means: one that names none goes on with that of the response before.
fn asked_model(app: &App, body: &Body) -> Result<Option<String>, ApiError> {
    let asked = body.text("model")?;
    let previous = body.text(PREVIOUS)?.filter(|_| asked.is_none());
    let stored = previous.and_then(|id| app.responses.get(&id));
    Ok(asked.or_else(|| stored.map(|stored| stored.model().to_owned())))
}

/// A response that was kept.
pub(crate) async fn retrieve(
    State(app): State<Arc<App>>,
    path: Result<Path<String>, PathRejection>,
) -> Result<Response, ApiError> {
    let Path(id) = path?;
    let stored = app.responses.get(&id);
    let stored = stored.ok_or_else(|| ApiError::not_kept("response", &id))?;
    let kind = [(CONTENT_TYPE, "application/json")];
    Ok((kind, stored.response().to_owned()).into_response())
}

/// Tokens that a request would have.
pub(crate) async fn count(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Json<ResponseTokens>, ApiError> {
    let (job, _) = app.read_chat(request, read).await?;
    Ok(Json(ResponseTokens {
        object: InputTokensObject,
        input_tokens: job.prompt.tokens.len(),
    }))
}

/// Forgets a response.
pub(crate) async fn delete(
    State(app): State<Arc<App>>,
    path: Result<Path<String>, PathRejection>,
) -> Result<Response, ApiError> {
    let Path(id) = path?;
    if !app.responses.remove(&id) {
        return Err(ApiError::not_kept("response", &id));
    }
    Ok(Json(DeletedResponse {
        id: &id,
        object: ResponseObject,
        deleted: true,
    })
    .into_response())
}

fn read(app: &App, lease: &Lease, body: &mut Body) -> Result<PendingPrompt<Job>, ApiError> {
    let config = &app.config;
    let said = |body: &Body, field: &str, default: Value| match body.value(field) {
        Value::Null => default,
        value => value,
    };
    let mut options = GenerationOptions::read_common(body, lease)?;
    let fields: request::ResponsesRequest = body.part()?;
    let most = [("max_output_tokens", fields.max_output_tokens)];
    let most = max_tokens(&most, 1, config)?;
    options.generation.max_tokens = most.unwrap_or(config.max_tokens);
    supported(body, &fields, options.stream)?;
    let (wants_logprobs, top_logprobs) = read_logprobs(body, &fields);
    let mut shown_format = json!({"type": "text"});
    if let Some(format) = fields.text.and_then(|text| text.format) {
        shown_format = body.value("text")["format"].take();
        options.structured = structured::read_format(format, "text.format", true, lease)?;
    }
    let store = read_store(app, fields.store)?;
    let previous = fields.previous_response_id;
    let mut messages = read_previous(app, previous.as_deref())?;
    let Some(input) = fields.input else {
        return Err(ApiError::invalid("input", "it is missing"));
    };
    input::read(app, body, input, &mut messages)?;
    let mut extra = Map::new();
    if let Some(effort) = fields.reasoning.and_then(|reasoning| reasoning.effort)
        && !set_effort(lease, &mut extra, &effort)
    {
        body.ignore("reasoning.effort");
    }
    let (tools, namespaces) = input::read_tools(body, fields.tools.unwrap_or_default().0)?;
    let choice = ToolChoice::of(fields.tool_choice, tools.as_ref())?;
    let parallel = fields.parallel_tool_calls.unwrap_or(true);
    let conversation = Conversation {
        messages: Value::Array(messages),
        tools,
        extra,
        prefill: String::new(),
        parse_special: false,
    };
    let sampling = &options.generation.sampling;
    let echo = Echo {
        instructions: fields.instructions,
        max_output_tokens: most,
        metadata: said(body, "metadata", json!({})),
        model: options.context.model.name.clone(),
        parallel_tool_calls: parallel,
        previous_response_id: previous,
        reasoning: said(body, "reasoning", json!({"effort": null, "summary": null})),
        store,
        temperature: written(sampling.temperature),
        format: shown_format,
        tool_choice: said(body, "tool_choice", json!("auto")),
        tools: said(body, "tools", json!([])),
        top_logprobs,
        top_p: written(sampling.top_p),
        user: body.value("user"),
        namespaces,
    };
    Ok(PendingPrompt::new(
        conversation,
        move |mut conversation, lease| {
            options.context.set_waited(lease);
            let kept = conversation.messages.as_array().filter(|_| store).cloned();
            // Those of an earlier response are gone.
            if let Some(text) = &echo.instructions {
                conversation.instruct(text);
            }
            Ok(Job {
                prompt: conversation.prompt(lease, &choice, parallel, Some(&mut options))?,
                options,
                echo,
                wants_logprobs,
                messages: kept,
            })
        },
    ))
}

/// Refuses fields that would change the answer and cannot be followed, and notes hints that are not.
fn supported(
    body: &mut Body,
    fields: &request::ResponsesRequest,
    stream: bool,
) -> Result<(), ApiError> {
    let refused = |name: &str, reason: &str| Err(ApiError::unsupported(name, reason));
    if fields.background == Some(true) {
        return refused(
            "background",
            "not supported; expected false or no such field",
        );
    }
    if fields.conversation.is_some() {
        let reason = "this server keeps no conversations; use previous_response_id";
        return refused("conversation", reason);
    }
    if fields.prompt.is_some() {
        return refused(
            "prompt",
            "this server keeps no prompts; send the text as input",
        );
    }
    if fields.stream_options.is_some() {
        only_for_streams(stream)?;
    }
    // Reasoning comes in the clear, which serves what encrypted reasoning is asked for.
    let known = ["reasoning.encrypted_content", LOGPROBS];
    let mut include = fields.include.iter().flat_map(|list| &list.0);
    if include.any(|entry| !known.contains(&entry.as_str())) {
        body.ignore("include");
    }
    if fields.max_tool_calls.is_some() {
        // Calls are the client's to make.
        body.ignore("max_tool_calls");
    }
    if fields
        .truncation
        .as_deref()
        .is_some_and(|how| how != "disabled")
    {
        body.ignore("truncation");
    }
    let verbosity = fields
        .text
        .as_ref()
        .and_then(|text| text.verbosity.as_deref());
    if verbosity.is_some_and(|verbosity| verbosity != "medium") {
        body.ignore("text.verbosity");
    }
    Ok(())
}

/// Whether log-probabilities of the text are wanted, and how many rivals of each token.
fn read_logprobs(body: &mut Body, fields: &request::ResponsesRequest) -> (bool, usize) {
    let mut include = fields.include.iter().flat_map(|list| &list.0);
    let wanted = include.any(|entry| entry == LOGPROBS);
    let top = fields.top_logprobs.and_then(Int::count).unwrap_or(0);
    if top > 0 && !wanted {
        body.ignore("top_logprobs");
    }
    (wanted, if wanted { top } else { 0 })
}

/// Whether the response is kept; it is, as with OpenAI, unless the request says otherwise.
fn read_store(app: &App, asked: Option<bool>) -> Result<bool, ApiError> {
    match (asked, app.responses.is_on()) {
        (Some(true), false) => Err(ApiError::unsupported("store", "this server keeps nothing")),
        (Some(store), _) => Ok(store),
        (None, on) => Ok(on),
    }
}

/// The conversation that the request goes on with.
fn read_previous(app: &App, id: Option<&str>) -> Result<Vec<Value>, ApiError> {
    let Some(id) = id else {
        return Ok(Vec::new());
    };
    let stored = app.responses.get(id);
    let messages = stored.and_then(|stored| stored.messages());
    messages.ok_or_else(|| {
        let reason = format!(
            "there is no response {id:?} here, or no longer; send the whole conversation as input"
        );
        ApiError::invalid(PREVIOUS, reason)
    })
}
