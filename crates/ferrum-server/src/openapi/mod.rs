//! `GET /openapi.json`: what all routes take and give, as an OpenAPI 3.1 document.
//!
//! Requests are described by the types that they are read as, answers by those that they are made of.

mod components;
mod operations;
#[cfg(test)]
mod tests;

use crate::http::app::App;
use crate::response::{AnthropicErrorBody, ErrorBody, HealthReport};
use axum::Json;
use axum::extract::State;
use components::Components;
use operations::{JSON, Operation};
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// The route.
pub(crate) async fn openapi(State(app): State<Arc<App>>) -> Json<Value> {
    Json(document(&app))
}

fn document(app: &App) -> Value {
    let mut components = Components::default();
    let mut paths = Map::new();
    for operation in operations::all(&mut components) {
        let path = paths
            .entry(operation.path)
            .or_insert_with(|| path_item(operation.path));
        path[operation.method] = written(&operation, app, &mut components);
    }
    let schemes = json!({
        "bearer": {"type": "http", "scheme": "bearer"},
        "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    });
    let security = match app.config.api_keys.is_empty() {
        true => json!([]),
        false => json!([{"bearer": []}, {"key": []}]),
    };
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "Ferrum",
            "version": env!("CARGO_PKG_VERSION"),
            "description": "A null is as good as an absent field. Fields that are not named here are not followed; the header \
                x-ferrum-ignored names them.",
        },
        "paths": paths,
        "components": {"securitySchemes": schemes, "schemas": components.schemas()},
        "security": security,
    })
}

/// What all methods of a path have: its parameters.
fn path_item(path: &str) -> Value {
    let names = path.split('/').filter_map(|part| {
        let name = part.strip_prefix('{')?;
        name.strip_suffix('}')
    });
    let parameter = |name| json!({"name": name, "in": "path", "required": true, "schema": {"type": "string", "minLength": 1}});
    let parameters: Vec<_> = names.map(parameter).collect();
    match parameters.is_empty() {
        true => json!({}),
        false => json!({"parameters": parameters}),
    }
}

fn written(operation: &Operation, app: &App, components: &mut Components) -> Value {
    let content: Map<_, _> = operation
        .answers
        .iter()
        .map(|(kind, schema)| {
            let content = match schema {
                Value::Null => json!({}),
                schema => json!({"schema": schema}),
            };
            ((*kind).to_owned(), content)
        })
        .collect();
    let mut responses = Map::new();
    let fine = json!({"description": "The answer.", "content": content});
    responses.insert("200".into(), fine);
    let open = operation.path == crate::paths::HEALTH;
    let locked = !open && !app.config.api_keys.is_empty();
    let errors = operation.errors.iter();
    let locks: &[u16] = if locked { &[401, 403] } else { &[] };
    let errors = errors.chain(locks);
    for status in errors {
        let schema = match (open, crate::paths::is_anthropic(operation.path)) {
            (true, _) => components.of::<HealthReport>(),
            (_, true) => components.of::<AnthropicErrorBody>(),
            _ => components.of::<ErrorBody<'_>>(),
        };
        let description = meaning(*status);
        let content = json!({JSON: {"schema": schema}});
        let response = json!({"description": description, "content": content});
        responses.insert(status.to_string(), response);
    }
    let mut written = json!({"summary": operation.summary, "responses": responses});
    if let Some(schema) = &operation.request {
        written["requestBody"] =
            json!({"required": true, "content": {operation.takes: {"schema": schema}}});
    }
    if open {
        written["security"] = json!([]);
    }
    written
}

/// What a status means, in words.
fn meaning(status: u16) -> &'static str {
    match status {
        400 => "A field is wrong, unknown or not supported, or the prompt does not fit.",
        401 => "There is no key, or a wrong one.",
        403 => "The key does not have this right.",
        404 => "There is no such thing.",
        408 => "The body did not come in time.",
        413 => "The body is too long.",
        415 => "The body is not of the type that the route takes.",
        429 => "The queue is full; `Retry-After` says when to come back.",
        503 => "The server is ending, its engine is not alive, or the model cannot be loaded.",
        504 => "The answer took too long.",
        _ => "An error.",
    }
}
