//! The id of a request: the client's own where it is sane, else a fresh one. It stands in the answer's
//! header, in the log and in traces, so that all of them can be brought together.

use crate::ids::fresh_id;
use axum::http::header::{HeaderMap, HeaderName, HeaderValue};
use std::fmt;

/// The header that carries it, both ways.
pub(crate) const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// Longest id that is taken from a client.
const MAX_LENGTH: usize = 128;

/// Letters, digits and `-_.:` only, so it can be logged and sent as it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RequestId(String);

impl RequestId {
    /// As the client calls the request, if it says so once and in characters that are harmless anywhere.
    pub(crate) fn of(headers: &HeaderMap) -> Self {
        let mut values = headers.get_all(REQUEST_ID).iter();
        let first = values.next().and_then(|value| value.to_str().ok());
        let only = first.filter(|text| values.next().is_none() && is_sane(text));
        Self(only.map_or_else(|| fresh_id("req_"), str::to_owned))
    }

    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }

    /// As a header; `None` for characters that none has, which an id never holds.
    pub(crate) fn header(&self) -> Option<HeaderValue> {
        HeaderValue::from_str(&self.0).ok()
    }
}

impl fmt::Display for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

fn is_sane(text: &str) -> bool {
    let fine = |b: u8| b.is_ascii_alphanumeric() || b"-_.:".contains(&b);
    (1..=MAX_LENGTH).contains(&text.len()) && text.bytes().all(fine)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(values: &[&[u8]]) -> HeaderMap {
        let value = |bytes: &&[u8]| HeaderValue::from_bytes(bytes).expect("a header");
        let pairs = values.iter().map(|bytes| (REQUEST_ID, value(bytes)));
        pairs.collect()
    }

    #[test]
    fn sane_ids_are_kept_and_others_replaced() {
        let longest = "x".repeat(MAX_LENGTH);
        let longer = "x".repeat(MAX_LENGTH + 1);
        for id in ["a", "0af7-65:19_16.cd", &longest] {
            assert_eq!(RequestId::of(&headers(&[id.as_bytes()])).as_str(), id);
        }
        let refused: [&[&[u8]]; 8] = [
            &[],
            &[b""],
            &[longer.as_bytes()],
            &[b"a b"],
            &[b"a\"b"],
            &[b"a\tb"],
            &[b"caf\xe9"],
            &[b"one", b"two"],
        ];
        for values in refused {
            let id = RequestId::of(&headers(values));
            let hex = id.as_str().strip_prefix("req_").expect("a fresh id");
            assert!(hex.len() == 32 && hex.bytes().all(|b| b.is_ascii_hexdigit()));
            assert_eq!(
                id.header().as_ref().and_then(|value| value.to_str().ok()),
                Some(id.as_str())
            );
        }
        let none = HeaderMap::new();
        assert_ne!(RequestId::of(&none), RequestId::of(&none));
    }
}
