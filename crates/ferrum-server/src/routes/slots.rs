//! `/slots`: what a model is answering now, as llama.cpp has it.

use crate::error::ApiError;
use crate::http::app::App;
use crate::response::Slot;
use axum::Json;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use serde::Deserialize;
use std::sync::Arc;

#[derive(Debug, Default, Deserialize)]
pub(crate) struct SlotsQuery {
    /// Of which model; without it, the first.
    model: Option<String>,
    /// 503 where none is free; any value but 0.
    fail_on_no_slot: Option<String>,
}

/// The route. It loads no model.
pub(crate) async fn slots(
    State(app): State<Arc<App>>,
    query: Result<Query<SlotsQuery>, QueryRejection>,
) -> Result<Json<Vec<Slot>>, ApiError> {
    let Query(query) = query.map_err(|e| ApiError::malformed(e.body_text()))?;
    let slots = app.models.slots(query.model.as_deref())?;
    let fail = query.fail_on_no_slot.is_some_and(|value| value != "0");
    if fail && !slots.iter().any(|slot| !slot.is_processing) {
        return Err(ApiError::unavailable("no slot is free"));
    }
    Ok(Json(slots))
}
