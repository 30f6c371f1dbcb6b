//! One file for each group of routes.

mod adapters;
mod chat;
mod completions;
mod messages;
mod status;
mod tokens;

use crate::app::App;
use crate::page;
use axum::Router;
use axum::routing::{get, post};
use std::sync::Arc;

/// The one route that needs no key.
pub(crate) const HEALTH: &str = "/health";

/// The chat page, which asks for a key itself.
pub(crate) const PAGE: &str = "/";

/// Every route.
pub(crate) fn all() -> Router<Arc<App>> {
    Router::new()
        .route(HEALTH, get(status::health))
        .route(PAGE, get(page::page))
        .route("/ready", get(status::ready))
        .route("/metrics", get(status::metrics))
        .route("/v1/models", get(status::models))
        // The name of a model may have slashes.
        .route("/v1/models/{*name}", get(status::model))
        .route("/tokenize", post(tokens::tokenize))
        .route("/detokenize", post(tokens::detokenize))
        .route("/v1/completions", post(completions::completions))
        .route("/v1/chat/completions", post(chat::chat))
        .route("/v1/load_lora_adapter", post(adapters::load))
        .route("/v1/unload_lora_adapter", post(adapters::unload))
}
