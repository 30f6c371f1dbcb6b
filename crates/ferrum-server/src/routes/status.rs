//! What there is and how it does: health, readiness, figures, models.

use crate::error::ApiError;
use crate::generation::sampler_settings::written;
use crate::http::app::App;
use crate::models::info::SamplingDefaults;
use crate::models::{ModelEntry, Status};
use crate::observability::prometheus;
use crate::response::{
    AnthropicModel, AnthropicModelList, DefaultParams, DefaultSamplers, DefaultSettings,
    HealthReport, HealthStatus, ListObject, Modalities, ModelCard, ModelExtras, ModelList,
    ModelObject, ModelState, ModelStatus, Props, Readiness, Ready, Version,
};
use axum::Json;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::http::header::CONTENT_TYPE;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use ferrum_engine::Health;
use ferrum_formats::chat_template::strftime;
use ferrum_types::TokenId;
use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

/// Whether the engines really make steps; the one route that needs no key, so it tells little: of an
/// engine that does not, whose it is. A model that is not loaded has nothing that could be ill.
pub(crate) async fn health(State(app): State<Arc<App>>) -> Response {
    let report = report(&app);
    let status = match report.status {
        // A degraded engine still answers, so a supervisor should not restart the server.
        HealthStatus::Ok | HealthStatus::Degraded => StatusCode::OK,
        _ => StatusCode::SERVICE_UNAVAILABLE,
    };
    (status, Json(report)).into_response()
}

fn report(app: &App) -> HealthReport {
    let engines_by_health = engines_by_health(app);
    let Some((name, worst)) = engines_by_health.first() else {
        return HealthReport::default();
    };
    let ill = |status| HealthReport {
        status,
        model: Some((*name).to_owned()),
        ..HealthReport::default()
    };
    match worst {
        // All of them, then; the one that stepped last counts.
        Health::Alive { .. } => {
            let steps = engines_by_health
                .iter()
                .filter_map(|(_, health)| match health {
                    Health::Alive { since_step } => Some(*since_step),
                    _ => None,
                });
            let since = steps.min().unwrap_or_default();
            HealthReport {
                seconds_since_step: Some(since.as_secs_f64()),
                ..HealthReport::default()
            }
        }
        Health::Degraded { failures } => HealthReport {
            nan_failures: Some(u64::from(*failures)),
            ..ill(HealthStatus::Degraded)
        },
        Health::Stalled { waited } => HealthReport {
            seconds_waited: Some(waited.as_secs_f64()),
            ..ill(HealthStatus::Stalled)
        },
        Health::Failed(_) => ill(HealthStatus::Failed),
        Health::Stopped => ill(HealthStatus::Stopped),
    }
}

/// The health of all engines, worst first.
fn engines_by_health(app: &App) -> Vec<(&str, Health)> {
    let engines = app.models.engines().into_iter();
    let mut engines_by_health: Vec<_> = engines
        .map(|(name, engine)| (name, engine.health()))
        .collect();
    engines_by_health.sort_by_key(|(_, health)| match health {
        Health::Failed(_) => 0,
        Health::Stalled { .. } => 1,
        Health::Stopped => 2,
        Health::Degraded { .. } => 3,
        Health::Alive { .. } => 4,
    });
    engines_by_health
}

/// Whether a request would be taken. Models that are not loaded, be it because that failed, are no reason
/// against it: the next request for them tries.
pub(crate) async fn ready(State(app): State<Arc<App>>) -> Result<Json<Readiness>, ApiError> {
    if app.models.is_draining() {
        return Err(ApiError::unavailable("the server is shutting down"));
    }
    let (name, reason) = match engines_by_health(&app).into_iter().next() {
        None | Some((_, Health::Alive { .. } | Health::Degraded { .. })) => {
            return Ok(Json(Readiness { status: Ready }));
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
    match prometheus::render(&app.metrics) {
        Ok(page) => ([(CONTENT_TYPE, prometheus::CONTENT_TYPE)], page).into_response(),
        Err(error) => ApiError::internal(error.to_string()).into_response(),
    }
}

/// `/version`, as vLLM has it.
pub(crate) async fn version() -> Json<Version> {
    let version = env!("CARGO_PKG_VERSION");
    Json(Version { version })
}

/// `/props`, as llama.cpp has it: what its clients ask before they chat, of the first model.
pub(crate) async fn props(State(app): State<Arc<App>>) -> Result<Response, ApiError> {
    let lease = app.lease(None).await?;
    let served = &lease.served;
    let tokenizer = &served.tokenizer;
    let text = |token: Option<TokenId>| {
        let bytes = token.map(|token| lease.token_bytes(token));
        String::from_utf8_lossy(&bytes.unwrap_or_default()).into_owned()
    };
    let params = DefaultParams {
        samplers: (&lease.sampling_defaults()).into(),
        n_predict: -1,
    };
    Ok(Json(Props {
        default_generation_settings: DefaultSettings {
            n_ctx: served.context,
            params,
        },
        total_slots: served.engine.max_seqs(),
        model_alias: &lease.requested.name,
        chat_template: lease.template_source(),
        bos_token: text(tokenizer.bos()),
        eos_token: text(tokenizer.eos_ids().first().copied()),
        modalities: Modalities {
            vision: served.vision.is_some(),
            audio: false,
        },
        build_info: concat!("ferrum-", env!("CARGO_PKG_VERSION")),
        is_sleeping: false,
    })
    .into_response())
}

impl From<&Status> for ModelStatus {
    fn from(status: &Status) -> Self {
        let (value, reason) = match status {
            Status::Unloaded => (ModelState::Unloaded, None),
            Status::Loading => (ModelState::Loading, None),
            Status::Loaded => (ModelState::Loaded, None),
            Status::Unloading => (ModelState::Unloading, None),
            Status::Failed(reason) => (ModelState::Failed, Some(reason.clone())),
        };
        Self { value, reason }
    }
}

impl From<&SamplingDefaults> for DefaultSamplers {
    fn from(defaults: &SamplingDefaults) -> Self {
        Self {
            temperature: written(defaults.temperature),
            top_p: written(defaults.top_p),
            top_k: defaults.top_k,
            min_p: written(defaults.min_p),
        }
    }
}

/// The models, each with its adapters.
fn descriptions(app: &App) -> Vec<ModelCard> {
    let adapters = app.models.adapters();
    let describe = |id: &str, created: u64, entry: &ModelEntry, status: &Status| {
        let info = entry.info();
        ModelCard {
            id: id.to_owned(),
            object: ModelObject,
            created,
            owned_by: "ferrum",
            max_model_len: info.and_then(|info| info.context),
            status: status.into(),
            ferrum: ModelExtras {
                kind: info.map(|info| info.kind.word()),
                defaults: info.and_then(|info| Some(info.defaults.as_ref()?.into())),
            },
            parent: None,
            root: None,
        }
    };
    let mut all = Vec::new();
    for (entry, status) in app.models.list() {
        let created = app.models.created();
        all.push(describe(&entry.name, created, entry, &status));
        let of_model = adapters
            .iter()
            .filter(|(_, _, base)| base.name == entry.name);
        for (name, adapter, _) in of_model {
            all.push(ModelCard {
                parent: Some(entry.name.clone()),
                root: Some(adapter.root.display().to_string()),
                ..describe(name, adapter.created, entry, &status)
            });
        }
        let aliases = app.models.aliases();
        for (alias, _) in aliases.filter(|(_, base)| base.name == entry.name) {
            all.push(ModelCard {
                root: Some(entry.name.clone()),
                ..describe(alias, created, entry, &status)
            });
        }
    }
    all
}

/// Whether a request has Anthropic's headers, and so expects its shape.
fn is_anthropic(headers: &HeaderMap) -> bool {
    headers.contains_key("anthropic-version")
}

impl From<ModelCard> for AnthropicModel {
    fn from(card: ModelCard) -> Self {
        let created = UNIX_EPOCH + Duration::from_secs(card.created);
        Self {
            r#type: ModelObject,
            display_name: card.id.clone(),
            id: card.id,
            created_at: strftime(created, "%Y-%m-%dT%H:%M:%SZ"),
            max_input_tokens: card.max_model_len,
        }
    }
}

/// All that a request can name.
pub(crate) async fn models(State(app): State<Arc<App>>, headers: HeaderMap) -> Response {
    let all = descriptions(&app);
    if is_anthropic(&headers) {
        let data: Vec<AnthropicModel> = all.into_iter().map(Into::into).collect();
        let id = |model: Option<&AnthropicModel>| model.map(|model| model.id.clone());
        return Json(AnthropicModelList {
            has_more: false,
            first_id: id(data.first()),
            last_id: id(data.last()),
            data,
        })
        .into_response();
    }
    Json(ModelList {
        object: ListObject,
        data: all,
    })
    .into_response()
}

/// A model by name.
pub(crate) async fn model(
    State(app): State<Arc<App>>,
    headers: HeaderMap,
    path: Result<Path<String>, PathRejection>,
) -> Result<Response, ApiError> {
    let Path(name) = path?;
    let mut all = descriptions(&app).into_iter();
    let found = all.find(|one| one.id == name);
    let found = found.ok_or_else(|| app.models.unknown(&name))?;
    Ok(match is_anthropic(&headers) {
        true => Json(AnthropicModel::from(found)).into_response(),
        false => Json(found).into_response(),
    })
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
        let shown = DefaultSamplers {
            temperature: 0.7,
            top_p: 0.95,
            top_k: 20,
            min_p: 0.0,
        };
        assert_eq!(DefaultSamplers::from(&defaults), shown);
    }
}
