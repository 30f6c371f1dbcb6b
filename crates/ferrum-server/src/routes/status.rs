//! What there is and how it does: health, readiness, figures, models.

use crate::app::App;
use crate::error::ApiError;
use crate::otlp::Exporter;
use axum::Json;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use ferrum_engine::Health;
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Whether the engine really makes steps; the one route that needs no key, so it tells little.
pub(crate) async fn health(State(app): State<Arc<App>>) -> Response {
    let (status, body) = match app.model.served.engine.health() {
        Health::Alive { since_step } => (
            StatusCode::OK,
            json!({"status": "ok", "seconds_since_step": since_step.as_secs_f64()}),
        ),
        Health::Stalled { waited } => (
            StatusCode::SERVICE_UNAVAILABLE,
            json!({"status": "stalled", "seconds_waited": waited.as_secs_f64()}),
        ),
        Health::Failed(_) => (StatusCode::SERVICE_UNAVAILABLE, json!({"status": "failed"})),
        Health::Stopped => (
            StatusCode::SERVICE_UNAVAILABLE,
            json!({"status": "stopped"}),
        ),
    };
    (status, Json(body)).into_response()
}

/// Whether a request would be taken.
pub(crate) async fn ready(State(app): State<Arc<App>>) -> Result<Json<Value>, ApiError> {
    if app.draining.load(Ordering::Acquire) {
        return Err(ApiError::unavailable("the server is shutting down"));
    }
    match app.model.served.engine.health() {
        Health::Alive { .. } => Ok(Json(json!({"status": "ready"}))),
        Health::Stalled { .. } => Err(ApiError::unavailable("the engine is stalled")),
        Health::Failed(reason) => {
            let message = format!("the engine has failed: {reason}");
            Err(ApiError::unavailable(message))
        }
        Health::Stopped => Err(ApiError::unavailable("the engine has stopped")),
    }
}

/// Figures for Prometheus.
pub(crate) async fn metrics(State(app): State<Arc<App>>) -> Response {
    let served = &app.model.served;
    let stats = served.engine.stats();
    let spans = app.exporter.as_ref().map(Exporter::fate);
    let page = app.metrics.render(&stats, &served.name, spans);
    let kind = "text/plain; version=0.0.4; charset=utf-8";
    ([(CONTENT_TYPE, kind)], page).into_response()
}

/// The model and its adapters.
fn descriptions(app: &App) -> Vec<Value> {
    let model = &app.model;
    let describe = |id: &str, created: u64| {
        json!({
            "id": id,
            "object": "model",
            "created": created,
            "owned_by": "ferrum",
            "max_model_len": model.served.context,
        })
    };
    let mut all = vec![describe(&model.served.name, model.created)];
    for (name, adapter) in model.adapters.list() {
        let mut one = describe(&name, adapter.created);
        one["parent"] = model.served.name.as_str().into();
        one["root"] = adapter.root.display().to_string().into();
        all.push(one);
    }
    all
}

/// All that a request can name.
pub(crate) async fn models(State(app): State<Arc<App>>) -> Json<Value> {
    Json(json!({"object": "list", "data": descriptions(&app)}))
}

/// A model by name.
pub(crate) async fn model(
    State(app): State<Arc<App>>,
    path: Result<Path<String>, PathRejection>,
) -> Result<Json<Value>, ApiError> {
    let Path(name) = path?;
    let mut all = descriptions(&app).into_iter();
    let found = all.find(|one| one["id"] == name);
    found.map(Json).ok_or_else(|| app.model.unknown(&name))
}
