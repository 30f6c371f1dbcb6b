//! `GET /v1/responses/ID/input_items`: what a response that was kept answers, as items.

use crate::app::App;
use crate::error::ApiError;
use axum::Json;
use axum::extract::rejection::{PathRejection, QueryRejection};
use axum::extract::{Path, Query, State};
use serde::Deserialize;
use serde_json::{Value, json};
use std::sync::Arc;

/// Items on a page, where nothing is said, and at most.
const PAGE: usize = 20;
const MAX_PAGE: usize = 100;

#[derive(Debug, Default, Deserialize)]
pub(crate) struct Wanted {
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
    wanted: Result<Query<Wanted>, QueryRejection>,
) -> Result<Json<Value>, ApiError> {
    let Path(id) = path?;
    let Query(wanted) = wanted.map_err(|e| ApiError::malformed(e.body_text()))?;
    let limit = wanted.limit.unwrap_or(PAGE);
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
    match wanted.order.as_deref() {
        None | Some("desc") => items.reverse(),
        Some("asc") => {}
        Some(other) => {
            let reason = format!("found {other:?}, expected \"asc\" or \"desc\"");
            return Err(ApiError::invalid("order", reason));
        }
    }
    let after = wanted.after.as_deref();
    let first = after.and_then(|after| items.iter().position(|item| item["id"] == after));
    let rest = items.split_off(first.map_or(0, |first| first + 1));
    let page: Vec<_> = rest.iter().take(limit).cloned().collect();
    let id = |item: Option<&Value>| item.map(|item| item["id"].clone());
    Ok(Json(json!({
        "object": "list",
        "first_id": id(page.first()),
        "last_id": id(page.last()),
        "has_more": rest.len() > page.len(),
        "data": page,
    })))
}

/// The items of which a message was made.
fn add_items(message: &Value, id: &str, out: &mut Vec<Value>) {
    let text = |field: &str| message[field].as_str().filter(|text| !text.is_empty());
    if message["role"] == "tool" {
        out.push(json!({
            "id": format!("fco_{id}"),
            "type": "function_call_output",
            "status": "completed",
            "call_id": message["tool_call_id"],
            "output": message["content"],
        }));
        return;
    }
    if let Some(text) = text("reasoning_content") {
        out.push(json!({
            "id": format!("rs_{id}"),
            "type": "reasoning",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": text}],
        }));
    }
    if let Some(text) = text("content") {
        let part = match message["role"] == "assistant" {
            true => json!({"type": "output_text", "text": text, "annotations": []}),
            false => json!({"type": "input_text", "text": text}),
        };
        out.push(json!({
            "id": format!("msg_{id}"),
            "type": "message",
            "status": "completed",
            "role": message["role"],
            "content": [part],
        }));
    }
    let calls = message["tool_calls"].as_array().into_iter().flatten();
    for (c, call) in calls.enumerate() {
        out.push(json!({
            "id": format!("fc_{id}_{c}"),
            "type": "function_call",
            "status": "completed",
            "call_id": call["id"],
            "name": call["function"]["name"],
            "arguments": call["function"]["arguments"].to_string(),
        }));
    }
}
