//! Which pages of other sites may ask this server; by default none.
//!
//! A page sends its key itself, so nothing is allowed that browsers add on their own (credentials), and any
//! header may be sent. A browser asks before it sends (the preflight), without the key: that question is
//! answered before keys are checked.

use crate::http::request_id::REQUEST_ID;
use axum::http::header::{HeaderValue, RETRY_AFTER};
use axum::http::{Method, Uri};
use std::fmt;
use std::str::FromStr;
use std::time::Duration;
use tower_http::cors::{AllowHeaders, AllowOrigin, Any, CorsLayer};

/// How long a browser may cache the answer to a preflight.
const MAX_AGE: Duration = Duration::from_secs(600);

/// A site, as browsers write it: `https://chat.example.org`. `*` is all of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CorsOrigin(HeaderValue);

impl FromStr for CorsOrigin {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong =
            || format!("found {text:?}, expected * or a site such as https://chat.example.org");
        let text = text.to_ascii_lowercase();
        if text != "*" {
            let (scheme, host) = text.split_once("://").ok_or_else(wrong)?;
            let is_host = |c: char| c.is_ascii_alphanumeric() || "-.:[]".contains(c);
            if scheme.is_empty() || host.is_empty() || !host.chars().all(is_host) {
                return Err(wrong());
            }
            text.parse::<Uri>().map_err(|_| wrong())?;
        }
        let value = HeaderValue::try_from(text.clone()).map_err(|_| wrong())?;
        Ok(Self(value))
    }
}

impl fmt::Display for CorsOrigin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0.to_str().unwrap_or_default())
    }
}

/// What answers browsers for these sites; `None` where no site is allowed.
pub(crate) fn layer(origins: &[CorsOrigin]) -> Option<CorsLayer> {
    if origins.is_empty() {
        return None;
    }
    let allowed = match origins.iter().any(|origin| origin.0 == "*") {
        true => AllowOrigin::from(Any),
        false => AllowOrigin::list(origins.iter().map(|origin| origin.0.clone())),
    };
    let layer = CorsLayer::new()
        .allow_origin(allowed)
        .allow_methods([Method::GET, Method::POST, Method::DELETE])
        .allow_headers(AllowHeaders::mirror_request())
        .expose_headers([RETRY_AFTER, REQUEST_ID])
        .max_age(MAX_AGE);
    Some(layer)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sites_are_written_as_browsers_do() {
        for text in [
            "*",
            "https://a.example",
            "http://localhost:3000",
            "http://[::1]:80",
            "app://x",
        ] {
            let origin: CorsOrigin = text.parse().unwrap_or_else(|e| panic!("{text}: {e}"));
            assert_eq!(origin.to_string(), text);
        }
        let upper: CorsOrigin = "HTTPS://A.example"
            .parse()
            .unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(upper.to_string(), "https://a.example");
        for text in [
            "",
            "null",
            "a.example",
            "https://",
            "https://a/",
            "https://a/b",
            "https://u@a",
            "https://a b",
            "https://*.a",
            "https://a?b",
        ] {
            assert!(text.parse::<CorsOrigin>().is_err(), "{text}");
        }
    }
}
