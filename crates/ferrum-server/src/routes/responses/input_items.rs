//! `GET /v1/responses/ID/input_items`: what a response that was kept answers, as items.

use crate::error::ApiError;
use crate::http::app::App;
use crate::response::{
    EmptyList, ListObject, ResponseItem, ResponseItemList, ResponsePart, ResponseStatus,
};
use axum::Json;
use axum::extract::rejection::{PathRejection, QueryRejection};
use axum::extract::{Path, Query, State};
use axum::response::{IntoResponse, Response};
use serde::Deserialize;
use serde_json::Value;
use std::sync::Arc;

/// Items on a page, where nothing is said, and at most.
const PAGE: usize = 20;
const MAX_PAGE: usize = 100;

#[derive(Debug, Default, Deserialize)]
pub(crate) struct InputItemsQuery {
    limit: Option<usize>,
    /// `asc`, or `desc`: the newest first.
    order: Option<String>,
    /// The item after which the page begins.
    after: Option<String>,
}

/// The route.
pub(crate) async fn input_items(
    State(app): State<Arc<App>>,
    path: Result<Path<String>, PathRejection>,
    query: Result<Query<InputItemsQuery>, QueryRejection>,
) -> Result<Response, ApiError> {
    let Path(id) = path?;
    let Query(query) = query.map_err(|e| ApiError::malformed(e.body_text()))?;
    let limit = query.limit.unwrap_or(PAGE);
    if !(1..=MAX_PAGE).contains(&limit) {
        let reason = format!("found {limit}, expected an integer from 1 to {MAX_PAGE}");
        return Err(ApiError::invalid("limit", reason));
    }
    let stored = app.responses.get(&id);
    let messages = stored.and_then(|stored| stored.messages());
    let mut messages = messages.ok_or_else(|| ApiError::not_kept("response", &id))?;
    // The last is the answer.
    messages.pop();
    let mut items = Vec::new();
    for (i, message) in messages.iter().enumerate() {
        add_items(message, &format!("{id}_{i}"), &mut items);
    }
    match query.order.as_deref() {
        None | Some("desc") => items.reverse(),
        Some("asc") => {}
        Some(other) => {
            let reason = format!("found {other:?}, expected \"asc\" or \"desc\"");
            return Err(ApiError::invalid("order", reason));
        }
    }
    let after = query.after.as_deref();
    let first = after.and_then(|after| items.iter().position(|item| item.id() == after));
    let rest = &items[first.map_or(0, |first| first + 1)..];
    let page = &rest[..limit.min(rest.len())];
    Ok(Json(ResponseItemList {
        object: ListObject,
        first_id: page.first().map(ResponseItem::id),
        last_id: page.last().map(ResponseItem::id),
        has_more: rest.len() > page.len(),
        data: page,
    })
    .into_response())
}

/// The items of which a message was made.
fn add_items<'a>(message: &'a Value, id: &str, out: &mut Vec<ResponseItem<'a>>) {
    let text = |value: &'a Value| value.as_str().unwrap_or_default();
    let said = |field: &str| Some(text(&message[field])).filter(|text| !text.is_empty());
    let status = ResponseStatus::Completed;
    let role = text(&message["role"]);
    if role == "tool" {
        out.push(ResponseItem::FunctionCallOutput {
            id: format!("fco_{id}"),
            status,
            call_id: text(&message["tool_call_id"]),
            output: text(&message["content"]),
        });
        return;
    }
    if let Some(text) = said("reasoning_content") {
        out.push(ResponseItem::Reasoning {
            id: format!("rs_{id}"),
            status: None,
            summary: EmptyList,
            content: vec![ResponsePart::ReasoningText { text }],
        });
    }
    if let Some(parts) = message["content"].as_array() {
        let content = parts.iter().map(|part| match part["text"].as_str() {
            Some(text) => ResponsePart::InputText { text },
            None => ResponsePart::InputImage {
                image_url: text(&part["data"]),
                detail: "auto",
            },
        });
        out.push(ResponseItem::Message {
            id: format!("msg_{id}"),
            status,
            role,
            content: content.collect(),
        });
    }
    if let Some(text) = said("content") {
        let part = match role {
            "assistant" => ResponsePart::OutputText {
                text,
                annotations: EmptyList,
                logprobs: None,
            },
            _ => ResponsePart::InputText { text },
        };
        out.push(ResponseItem::Message {
            id: format!("msg_{id}"),
            status,
            role,
            content: vec![part],
        });
    }
    let calls = message["tool_calls"].as_array().into_iter().flatten();
    for (c, call) in calls.enumerate() {
        let function = &call["function"];
        out.push(ResponseItem::FunctionCall {
            id: format!("fc_{id}_{c}"),
            status,
            call_id: text(&call["id"]).into(),
            name: text(&function["name"]),
            arguments: function["arguments"].to_string().into(),
            namespace: None,
        });
    }
}
