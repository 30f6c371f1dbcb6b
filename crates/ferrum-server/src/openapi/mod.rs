//! `GET /openapi.json`: what all routes take and give, as an OpenAPI 3.1 document.
//!
//! Written out beside the routes and not derived from them, because requests are taken apart by hand. So
//! that it cannot drift, a test has every route read a request with all fields, notes which fields it
//! takes with which ranges, and holds that against this document.

mod answers;
mod requests;
mod schema;
#[cfg(test)]
mod tests;

use crate::app::App;
use axum::Json;
use axum::extract::State;
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// The route.
pub(crate) async fn openapi(State(app): State<Arc<App>>) -> Json<Value> {
    Json(document(&app))
}

/// A route with one method.
struct Operation {
    path: &'static str,
    method: &'static str,
    summary: &'static str,
    request: Option<Value>,
    /// Type and schema of each form of the answer; null for no schema.
    answers: Vec<(&'static str, Value)>,
    /// Statuses of errors beside those that any route may have.
    errors: &'static [u16],
}

const JSON: &str = "application/json";
const EVENTS: &str = "text/event-stream";

/// Statuses of routes that read a body.
const BODY: &[u16] = &[400, 404, 408, 413, 415];
/// Statuses of routes that ask the engine.
const ENGINE: &[u16] = &[400, 404, 408, 413, 415, 429, 503, 504];

fn document(app: &App) -> Value {
    let mut paths = Map::new();
    for operation in operations(app) {
        let path = paths
            .entry(operation.path)
            .or_insert_with(|| path_item(operation.path));
        path[operation.method] = written(&operation, app);
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
            "description": "A null is as good as an absent field. Fields that are not named here are refused.",
        },
        "paths": paths,
        "components": {"securitySchemes": schemes, "schemas": answers::errors()},
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

fn written(operation: &Operation, app: &App) -> Value {
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
    let open = operation.path == crate::routes::HEALTH;
    let locked = !open && !app.config.api_keys.is_empty();
    let errors = operation.errors.iter().chain(locked.then_some(&401));
    for status in errors {
        let schema = match (open, crate::routes::is_anthropic(operation.path)) {
            (true, _) => answers::health(),
            (_, true) => json!({"$ref": "#/components/schemas/AnthropicError"}),
            _ => json!({"$ref": "#/components/schemas/Error"}),
        };
        let description = answers::meaning(*status);
        let content = json!({JSON: {"schema": schema}});
        let response = json!({"description": description, "content": content});
        responses.insert(status.to_string(), response);
    }
    let mut written = json!({"summary": operation.summary, "responses": responses});
    if let Some(schema) = &operation.request {
        written["requestBody"] = json!({"required": true, "content": {JSON: {"schema": schema}}});
    }
    if open {
        written["security"] = json!([]);
    }
    written
}

fn operations(app: &App) -> Vec<Operation> {
    let get = |path, summary, answer: (&'static str, Value), errors| Operation {
        path,
        method: "get",
        summary,
        request: None,
        answers: vec![answer],
        errors,
    };
    let post = |path, summary, request, answer, errors| Operation {
        path,
        method: "post",
        summary,
        request: Some(request),
        answers: vec![(JSON, answer)],
        errors,
    };
    let stream = |mut operation: Operation| {
        // OpenAPI 3.1 has no words for a stream of values.
        operation.answers.push((EVENTS, Value::Null));
        operation
    };
    let response = || answers::response();
    vec![
        get(
            crate::routes::HEALTH,
            "Whether the engine's steps end.",
            (JSON, answers::health()),
            &[503],
        ),
        get(
            "/ready",
            "Whether requests are taken.",
            (JSON, answers::ready()),
            &[503],
        ),
        get(
            "/metrics",
            "Figures for Prometheus.",
            ("text/plain", json!({"type": "string"})),
            &[],
        ),
        get(
            "/openapi.json",
            "This document.",
            (JSON, json!({"type": "object"})),
            &[],
        ),
        get(
            "/v1/models",
            "The models that are served.",
            (JSON, answers::models()),
            &[],
        ),
        get(
            "/v1/models/{name}",
            "A model.",
            (JSON, answers::model()),
            &[404],
        ),
        post(
            "/tokenize",
            "Tokens of a text or a conversation.",
            requests::tokenize(app),
            answers::tokens(),
            BODY,
        ),
        post(
            "/detokenize",
            "Text of tokens.",
            requests::detokenize(app),
            answers::text(),
            BODY,
        ),
        stream(post(
            "/v1/completions",
            "Goes on with texts.",
            requests::completions(app),
            answers::completion(),
            ENGINE,
        )),
        stream(post(
            "/v1/chat/completions",
            "The next message of a conversation.",
            requests::chat(app),
            answers::chat(),
            ENGINE,
        )),
        post(
            "/v1/embeddings",
            "Vectors of texts.",
            requests::embeddings(app),
            answers::embeddings(),
            ENGINE,
        ),
        stream(post(
            "/v1/responses",
            "The next part of a conversation.",
            requests::responses(app),
            response(),
            ENGINE,
        )),
        get(
            "/v1/responses/{id}",
            "A response that was kept.",
            (JSON, response()),
            &[404],
        ),
        Operation {
            method: "delete",
            ..get(
                "/v1/responses/{id}",
                "Forgets a response.",
                (JSON, answers::deleted()),
                &[404],
            )
        },
        stream(post(
            "/v1/messages",
            "The next message, as Anthropic has it.",
            requests::messages(app),
            answers::message(),
            ENGINE,
        )),
        post(
            "/v1/messages/count_tokens",
            "Tokens of a conversation.",
            requests::count_tokens(app),
            answers::count(),
            BODY,
        ),
    ]
}
