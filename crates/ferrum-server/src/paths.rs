//! Paths of routes that other modules name, and normalisation of paths.

use axum::http::{Request, Uri};

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

pub(crate) const LOAD_ADAPTER: &str = "/v1/load_lora_adapter";
pub(crate) const UNLOAD_ADAPTER: &str = "/v1/unload_lora_adapter";

/// What changes the server: where there are keys of administrators, it needs one.
pub(crate) const ADMINISTRATIVE: [&str; 2] = [LOAD_ADAPTER, UNLOAD_ADAPTER];

pub(crate) const MESSAGES: &str = "/v1/messages";
pub(crate) const COUNT_TOKENS: &str = "/v1/messages/count_tokens";

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
