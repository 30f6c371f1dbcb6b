//! One file for each group of routes.

mod adapters;
mod anthropic;
mod audio;
mod chat;
mod completions;
mod embeddings;
mod llama_cpp;
mod openai_messages;
mod responses;
mod scores;
mod slots;
mod status;
mod texts;
mod tokens;

use crate::http::app::App;
use crate::{openapi, page};
use axum::http::{Request, Uri};
use axum::routing::{MethodRouter, get, post};
use std::sync::Arc;

/// The one route that needs no key.
pub(crate) const HEALTH: &str = "/health";

/// Whether requests are taken.
pub(crate) const READY: &str = "/ready";

/// What is answered on connections beyond the limit, too. `/ping` is here in case it is a route.
pub(crate) const RESERVED: [&str; 3] = [HEALTH, READY, "/ping"];

/// Figures for Prometheus.
pub(crate) const METRICS: &str = "/metrics";

/// The chat page, which asks for a key itself.
pub(crate) const PAGE: &str = "/";

const LOAD_ADAPTER: &str = "/v1/load_lora_adapter";
const UNLOAD_ADAPTER: &str = "/v1/unload_lora_adapter";

/// What changes the server: where there are keys of administrators, it needs one.
pub(crate) const ADMINISTRATIVE: [&str; 2] = [LOAD_ADAPTER, UNLOAD_ADAPTER];

const MESSAGES: &str = "/v1/messages";
const COUNT_TOKENS: &str = "/v1/messages/count_tokens";

/// Whether errors at a path have Anthropic's shape: at its routes, and at what could be one below them.
pub(crate) fn is_anthropic(path: &str) -> bool {
    let below = path.strip_prefix(MESSAGES);
    below.is_some_and(|below| below.is_empty() || below.starts_with('/'))
}

/// Has a path with a slash at its end be the one without, as which routes have it.
pub(crate) fn trim_path<B>(request: &mut Request<B>) {
    let uri = request.uri();
    let trimmed = uri.path().trim_end_matches('/');
    if trimmed.is_empty() || trimmed.len() == uri.path().len() {
        return;
    }
    let path = match uri.query() {
        Some(query) => format!("{trimmed}?{query}").parse(),
        None => trimmed.parse(),
    };
    let mut parts = uri.clone().into_parts();
    parts.path_and_query = path.ok();
    if let Ok(uri) = Uri::from_parts(parts) {
        *request.uri_mut() = uri;
    }
}

/// Every route.
pub(crate) fn table() -> Vec<(&'static str, MethodRouter<Arc<App>>)> {
    let response = get(responses::retrieve).delete(responses::delete);
    vec![
        (HEALTH, get(status::health)),
        (PAGE, get(page::page)),
        (READY, get(status::ready)),
        ("/ping", get(status::ready).post(status::ready)),
        (METRICS, get(status::metrics)),
        ("/openapi.json", get(openapi::openapi)),
        ("/v1/models", get(status::models)),
        // The name of a model may have slashes.
        ("/v1/models/{*name}", get(status::model)),
        ("/tokenize", post(tokens::tokenize)),
        ("/detokenize", post(tokens::detokenize)),
        ("/v1/completions", post(completions::completions)),
        ("/v1/chat/completions", post(chat::chat)),
        ("/v1/embeddings", post(embeddings::embeddings)),
        ("/v1/responses", post(responses::create)),
        ("/v1/responses/input_tokens", post(responses::count)),
        ("/v1/responses/{id}", response),
        (
            "/v1/responses/{id}/input_items",
            get(responses::input_items),
        ),
        ("/v1/score", post(scores::score)),
        ("/score", post(scores::score)),
        ("/v1/audio/transcriptions", post(audio::transcriptions)),
        ("/v1/audio/translations", post(audio::translations)),
        ("/v1/rerank", post(scores::rerank)),
        ("/v2/rerank", post(scores::rerank)),
        ("/rerank", post(scores::rerank)),
        ("/pooling", post(embeddings::pooling)),
        ("/apply-template", post(tokens::apply_template)),
        ("/props", get(status::props)),
        ("/version", get(status::version)),
        ("/completion", post(llama_cpp::completion)),
        ("/infill", post(llama_cpp::infill)),
        ("/slots", get(slots::slots)),
        // For clients of llama.cpp and vLLM, and those whose base address lacks the version.
        ("/models", get(status::models)),
        ("/completions", post(completions::completions)),
        ("/chat/completions", post(chat::chat)),
        ("/embeddings", post(embeddings::embeddings)),
        ("/responses", post(responses::create)),
        (LOAD_ADAPTER, post(adapters::load)),
        (UNLOAD_ADAPTER, post(adapters::unload)),
        (MESSAGES, post(anthropic::messages)),
        (COUNT_TOKENS, post(anthropic::count_tokens)),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slashes_at_the_end_of_a_path_are_taken_off() {
        for (given, expected) in [
            ("/", "/"),
            ("//", "//"),
            ("/v1/models", "/v1/models"),
            ("/v1/models/", "/v1/models"),
            ("/v1/models//?a=/", "/v1/models?a=/"),
            ("http://host/v1/models/", "http://host/v1/models"),
        ] {
            let mut request = Request::builder().uri(given).body(()).unwrap();
            trim_path(&mut request);
            assert_eq!(request.uri(), expected, "{given}");
        }
    }

    #[test]
    fn errors_below_messages_are_anthropics() {
        assert!(is_anthropic(MESSAGES) && is_anthropic(COUNT_TOKENS));
        assert!(is_anthropic("/v1/messages/batches"));
        assert!(!is_anthropic("/v1/messages2") && !is_anthropic("/v1/models"));
    }
}
