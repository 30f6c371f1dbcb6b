//! What there is and how it does: health, readiness, figures, models.

use crate::app::App;
use crate::error::ApiError;
use crate::metrics;
use crate::models::{Known, SamplingDefaults, Status};
use crate::otlp::Exporter;
use crate::sampling::written;
use axum::Json;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::http::header::CONTENT_TYPE;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use ferrum_engine::Health;
use ferrum_formats::chat_template::strftime;
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

/// Whether the engines really make steps; the one route that needs no key, so it tells little: of an
/// engine that does not, whose it is. A model that is not loaded has nothing that could be ill.
pub(crate) async fn health(State(app): State<Arc<App>>) -> Response {
    let looks = looks(&app);
    let Some((name, worst)) = looks.first() else {
        return Json(json!({"status": "ok"})).into_response();
    };
    let mut body = match worst {
        // It answers, so nobody should restart it for that.
        Health::Degraded { failures } => {
            let failures = *failures;
            let body = json!({"status": "degraded", "nan_failures": failures, "model": *name});
            return Json(body).into_response();
        }
        // All of them, then; the one that stepped last counts.
        Health::Alive { .. } => {
            let steps = looks.iter().filter_map(|(_, health)| match health {
                Health::Alive { since_step } => Some(*since_step),
                _ => None,
            });
            let since = steps.min().unwrap_or_default().as_secs_f64();
            let body = json!({"status": "ok", "seconds_since_step": since});
            return Json(body).into_response();
        }
        Health::Stalled { waited } => {
            json!({"status": "stalled", "seconds_waited": waited.as_secs_f64()})
        }
        Health::Failed(_) => json!({"status": "failed"}),
        Health::Stopped => json!({"status": "stopped"}),
    };
    body["model"] = (*name).into();
    (StatusCode::SERVICE_UNAVAILABLE, Json(body)).into_response()
}

/// How all engines do, the worst first.
fn looks(app: &App) -> Vec<(&str, Health)> {
    let engines = app.models.engines().into_iter();
    let mut looks: Vec<_> = engines
        .map(|(name, engine)| (name, engine.health()))
        .collect();
    looks.sort_by_key(|(_, health)| match health {
        Health::Failed(_) => 0,
        Health::Stalled { .. } => 1,
        Health::Stopped => 2,
        Health::Degraded { .. } => 3,
        Health::Alive { .. } => 4,
    });
    looks
}

/// Whether a request would be taken. Models that are not loaded, be it because that failed, are no reason
/// against it: the next request for them tries.
pub(crate) async fn ready(State(app): State<Arc<App>>) -> Result<Json<Value>, ApiError> {
    if app.models.is_draining() {
        return Err(ApiError::unavailable("the server is shutting down"));
    }
    let (name, reason) = match looks(&app).into_iter().next() {
        None | Some((_, Health::Alive { .. } | Health::Degraded { .. })) => {
            return Ok(Json(json!({"status": "ready"})));
        }
        Some((name, Health::Stalled { .. })) => (name, "is stalled".to_owned()),
        Some((name, Health::Failed(reason))) => (name, format!("has failed: {reason}")),
        Some((name, Health::Stopped)) => (name, "has stopped".to_owned()),
    };
    let message = format!("the engine of {name:?} {reason}");
    Err(ApiError::unavailable(message))
}

/// Figures for Prometheus.
pub(crate) async fn metrics(State(app): State<Arc<App>>) -> Response {
    let spans = app.exporter.as_ref().map(Exporter::fate);
    let page = metrics::render(&app.models.figures(), &app.http, spans);
    let kind = "text/plain; version=0.0.4; charset=utf-8";
    ([(CONTENT_TYPE, kind)], page).into_response()
}

/// `/version`, as vLLM has it.
pub(crate) async fn version() -> Json<Value> {
    Json(json!({"version": env!("CARGO_PKG_VERSION")}))
}

/// `/props`, as llama.cpp has it: what its clients ask before they chat, of the first model.
pub(crate) async fn props(State(app): State<Arc<App>>) -> Result<Json<Value>, ApiError> {
    let lease = app.lease(None).await?;
    let served = &lease.served;
    let facts = lease.facts();
    let mut params = defaults_json(&facts.defaults);
    params["n_predict"] = (-1).into();
    Ok(Json(json!({
        "default_generation_settings": {"n_ctx": served.context, "params": params},
        "total_slots": served.engine.max_seqs(),
        "model_alias": lease.named.name,
        "chat_template": lease.template_source(),
        "modalities": {"vision": false, "audio": false},
        "build_info": concat!("ferrum-", env!("CARGO_PKG_VERSION")),
        "is_sleeping": false,
    })))
}

/// Where a model is in its life, in the form that llama.cpp's router has for it.
fn status_json(status: &Status) -> Value {
    let value = match status {
        Status::Unloaded => "unloaded",
        Status::Loading => "loading",
        Status::Loaded => "loaded",
        Status::Unloading => "unloading",
        Status::Failed(reason) => return json!({"value": "failed", "reason": reason}),
    };
    json!({"value": value})
}

/// The samplers that hold where a request names none.
fn defaults_json(defaults: &SamplingDefaults) -> Value {
    json!({
        "temperature": written(defaults.temperature),
        "top_p": written(defaults.top_p),
        "top_k": defaults.top_k,
        "min_p": written(defaults.min_p),
    })
}

/// The models, each with its adapters.
fn descriptions(app: &App) -> Vec<Value> {
    let adapters = app.models.adapters();
    let describe = |id: &str, created: u64, known: &Known, status: &Status| {
        let facts = known.facts();
        json!({
            "id": id,
            "object": "model",
            "created": created,
            "owned_by": "ferrum",
            "max_model_len": facts.map(|facts| facts.context),
            "status": status_json(status),
            "ferrum": {"defaults": facts.map(|facts| defaults_json(&facts.defaults))},
        })
    };
    let mut all = Vec::new();
    for (known, status) in app.models.list() {
        let created = app.models.created();
        all.push(describe(&known.name, created, known, &status));
        let of_model = adapters
            .iter()
            .filter(|(_, _, base)| base.name == known.name);
        for (name, adapter, _) in of_model {
            let mut one = describe(name, adapter.created, known, &status);
            one["parent"] = known.name.as_str().into();
            one["root"] = adapter.root.display().to_string().into();
            all.push(one);
        }
        let aliases = app.models.aliases();
        for (alias, _) in aliases.filter(|(_, base)| base.name == known.name) {
            let mut one = describe(alias, created, known, &status);
            one["root"] = known.name.as_str().into();
            all.push(one);
        }
    }
    all
}

/// Whether a request has Anthropic's headers, and so expects its shape.
fn is_anthropic(headers: &HeaderMap) -> bool {
    headers.contains_key("anthropic-version")
}

/// A model in Anthropic's shape.
fn anthropic_json(model: &Value) -> Value {
    let created = Duration::from_secs(model["created"].as_u64().unwrap_or_default());
    json!({
        "type": "model",
        "id": model["id"],
        "display_name": model["id"],
        "created_at": strftime(UNIX_EPOCH + created, "%Y-%m-%dT%H:%M:%SZ"),
        "max_input_tokens": model["max_model_len"],
    })
}

/// All that a request can name.
pub(crate) async fn models(State(app): State<Arc<App>>, headers: HeaderMap) -> Json<Value> {
    let all = descriptions(&app);
    if is_anthropic(&headers) {
        let all: Vec<_> = all.iter().map(anthropic_json).collect();
        let id = |model: Option<&Value>| model.map(|model| model["id"].clone());
        return Json(json!({
            "has_more": false,
            "first_id": id(all.first()),
            "last_id": id(all.last()),
            "data": all,
        }));
    }
    Json(json!({"object": "list", "data": all}))
}

/// A model by name.
pub(crate) async fn model(
    State(app): State<Arc<App>>,
    headers: HeaderMap,
    path: Result<Path<String>, PathRejection>,
) -> Result<Json<Value>, ApiError> {
    let Path(name) = path?;
    let mut all = descriptions(&app).into_iter();
    let found = all.find(|one| one["id"] == name);
    let found = found.ok_or_else(|| app.models.unknown(&name))?;
    Ok(Json(match is_anthropic(&headers) {
        true => anthropic_json(&found),
        false => found,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_have_the_digits_that_were_written() {
        let defaults = SamplingDefaults {
            temperature: 0.7,
            top_p: 0.95,
            top_k: 20,
            min_p: 0.0,
        };
        let shown = json!({"temperature": 0.7, "top_p": 0.95, "top_k": 20, "min_p": 0.0});
        assert_eq!(defaults_json(&defaults), shown);
    }
}
