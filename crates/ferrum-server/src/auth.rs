//! API keys: who may ask.

use crate::error::ApiError;
use axum::http::HeaderMap;
use axum::http::header::AUTHORIZATION;
use std::hint::black_box;

/// Lets requests pass that bring one of `keys`, or all when there are none.
pub(crate) fn check(keys: &[String], headers: &HeaderMap) -> Result<(), ApiError> {
    if keys.is_empty() {
        return Ok(());
    }
    let bearer = headers.get(AUTHORIZATION).map(|value| value.as_bytes());
    let bearer = bearer.and_then(|value| {
        let (scheme, key) = value.split_at_checked("Bearer ".len())?;
        scheme.eq_ignore_ascii_case(b"Bearer ").then_some(key)
    });
    // Anthropic's clients send it so.
    let plain = headers.get("x-api-key").map(|value| value.as_bytes());
    let Some(found) = bearer.or(plain) else {
        return Err(ApiError::unauthorized(false));
    };
    // Every key is looked at, so that the time does not tell which one came close.
    let matches = keys.iter().filter(|key| same(key.as_bytes(), found));
    match matches.count() {
        0 => Err(ApiError::unauthorized(true)),
        _ => Ok(()),
    }
}

/// Whether both are equal, in a time that depends on the length of `found` alone.
fn same(key: &[u8], found: &[u8]) -> bool {
    let mut difference = u8::from(key.len() != found.len());
    for (i, byte) in found.iter().enumerate() {
        // An empty key never matches: keys are checked when the server starts.
        let other = key.get(i % key.len().max(1)).copied().unwrap_or(0);
        difference |= black_box(byte ^ other);
    }
    black_box(difference) == 0 && !key.is_empty()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_equal_keys_are_the_same() {
        let cases: [(&str, &str, bool); 7] = [
            ("secret", "secret", true),
            ("secret", "secreT", false),
            ("secret", "secre", false),
            ("secret", "secretsecret", false),
            ("secret", "", false),
            ("", "", false),
            ("", "x", false),
        ];
        for (key, found, expected) in cases {
            assert_eq!(same(key.as_bytes(), found.as_bytes()), expected, "{found}");
        }
    }

    #[test]
    fn a_key_comes_in_either_header() {
        let keys = ["one".to_owned(), "two".to_owned()];
        let with = |name: &'static str, value: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(name, value.parse().unwrap());
            headers
        };
        assert!(check(&keys, &with("authorization", "Bearer two")).is_ok());
        assert!(check(&keys, &with("authorization", "bearer one")).is_ok());
        assert!(check(&keys, &with("x-api-key", "one")).is_ok());
        assert!(check(&keys, &with("authorization", "Basic one")).is_err());
        assert!(check(&keys, &with("authorization", "Bearer three")).is_err());
        assert!(check(&keys, &HeaderMap::new()).is_err());
        assert!(check(&[], &HeaderMap::new()).is_ok());
    }
}
