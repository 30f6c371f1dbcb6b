//! `/`: the chat page.

use crate::http::app::App;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::Response;
use std::sync::Arc;

/// The chat page, as a browser asks for it.
pub(crate) async fn page(State(app): State<Arc<App>>, headers: HeaderMap) -> Response {
    app.page.answer(&headers)
}
