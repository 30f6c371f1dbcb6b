//! Traces: what happened to a request, as spans that OpenTelemetry knows.
//!
//! A request is one span, from its head to the last byte of its answer, with a span for each phase below
//! it: `queue`, `prefill` and, for each answer, `decode`. It belongs to the client's trace if there is a
//! `traceparent`. The span ends when whatever works on the request has let go of it, so an answer that is
//! streamed or given up needs no care of its own. Ended spans are handed to `otlp`, without waiting.

use crate::observability::otlp::Exporter;
use crate::observability::span::{Attribute, Span};
use axum::http::HeaderMap;
use ferrum_engine::engine::Usage;
use std::hash::{BuildHasher, RandomState};
use std::sync::{Mutex, PoisonError};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// Whose span a request belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Parent {
    trace: u128,
    span: u64,
    sampled: bool,
}

/// Reads a `traceparent`, as W3C's Trace Context has it.
fn parent(headers: &HeaderMap) -> Option<Parent> {
    let mut values = headers.get_all("traceparent").iter();
    let text = values.next()?.to_str().ok()?;
    // Two of them are as good as none.
    if values.next().is_some() {
        return None;
    }
    let hex = |part: &str, length: usize| {
        let fine = |b: u8| b.is_ascii_digit() || (b'a'..=b'f').contains(&b);
        let whole = part.len() == length && part.bytes().all(fine);
        whole.then(|| u128::from_str_radix(part, 16).ok())?
    };
    let mut parts = text.split('-');
    let version = hex(parts.next()?, 2)?;
    let trace = hex(parts.next()?, 32)?;
    let span = hex(parts.next()?, 16)?;
    let flags = hex(parts.next()?, 2)?;
    // Later versions may say more; this one does not, and 255 is no version.
    let fits = version != 255 && (version > 0 || parts.next().is_none());
    (fits && trace != 0 && span != 0).then_some(Parent {
        trace,
        span: span as u64,
        sampled: flags & 1 == 1,
    })
}

fn random() -> u64 {
    RandomState::new().hash_one("span").max(1)
}

/// What is known of a request when it ends.
#[derive(Debug, Default)]
struct Facts {
    attributes: Vec<(&'static str, Attribute)>,
    usage: Usage,
    failed: bool,
}

/// A request that is traced. Its span goes out with its [record](crate::observability::record).
#[derive(Debug)]
pub(crate) struct RequestTrace {
    exporter: Exporter,
    name: String,
    trace: u128,
    id: u64,
    parent: Option<u64>,
    started: Instant,
    /// The same moment, in nanoseconds since 1970.
    wall: u64,
    facts: Mutex<Facts>,
}

impl RequestTrace {
    /// A request that begins now; `None` when its client does not want it traced.
    pub(crate) fn begin(exporter: &Exporter, name: String, headers: &HeaderMap) -> Option<Self> {
        let parent = parent(headers);
        if parent.is_some_and(|parent| !parent.sampled) {
            return None;
        }
        let fresh = || u128::from(random()) << 64 | u128::from(random());
        let wall = SystemTime::now().duration_since(UNIX_EPOCH);
        let wall = wall.map_or(0, |time| time.as_nanos());
        Some(Self {
            exporter: exporter.clone(),
            name,
            trace: parent.map_or_else(fresh, |parent| parent.trace),
            id: random(),
            parent: parent.map(|parent| parent.span),
            started: Instant::now(),
            wall: u64::try_from(wall).unwrap_or(u64::MAX),
            facts: Mutex::default(),
        })
    }

    fn facts(&self, change: impl FnOnce(&mut Facts)) {
        change(&mut self.facts.lock().unwrap_or_else(PoisonError::into_inner));
    }

    pub(crate) fn note(&self, name: &'static str, value: Attribute) {
        self.facts(|facts| facts.attributes.push((name, value)));
    }

    /// The answer failed by a fault of the server.
    pub(crate) fn fail(&self) {
        self.facts(|facts| facts.failed = true);
    }

    /// Tokens of one of its prompts, with those of its answers.
    pub(crate) fn add_usage(&self, usage: &Usage) {
        self.facts(|facts| facts.usage += *usage);
    }

    fn nanos(&self, at: Instant) -> u64 {
        let since = at.saturating_duration_since(self.started).as_nanos();
        self.wall.saturating_add(u64::try_from(since).unwrap_or(0))
    }

    /// A phase of the request, which has ended.
    pub(crate) fn phase(
        &self,
        name: &str,
        from: Instant,
        to: Instant,
        attributes: Vec<(&'static str, Attribute)>,
    ) {
        self.exporter.send(Span {
            trace: self.trace,
            id: random(),
            parent: Some(self.id),
            name: name.to_owned(),
            is_request: false,
            start: self.nanos(from),
            end: self.nanos(to),
            attributes,
            failed: false,
        });
    }
}

impl Drop for RequestTrace {
    fn drop(&mut self) {
        let facts = self.facts.get_mut().unwrap_or_else(PoisonError::into_inner);
        let mut attributes = std::mem::take(&mut facts.attributes);
        let usage = facts.usage;
        if usage != Usage::default() {
            let count = |n: usize| Attribute::Number(i64::try_from(n).unwrap_or(i64::MAX));
            attributes.extend([
                ("gen_ai.usage.input_tokens", count(usage.prompt_tokens)),
                ("gen_ai.usage.output_tokens", count(usage.completion_tokens)),
                ("ferrum.usage.cached_tokens", count(usage.cached_tokens)),
            ]);
        }
        let failed = facts.failed;
        self.exporter.send(Span {
            trace: self.trace,
            id: self.id,
            parent: self.parent,
            name: std::mem::take(&mut self.name),
            is_request: true,
            start: self.wall,
            end: self.nanos(Instant::now()),
            attributes,
            failed,
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_parent_is_read_strictly() {
        let trace = "0af7651916cd43dd8448eb211c80319c";
        let cases = [
            (format!("00-{trace}-b7ad6b7169203331-01"), Some(true)),
            (format!("00-{trace}-b7ad6b7169203331-00"), Some(false)),
            (format!("cc-{trace}-b7ad6b7169203331-01-later"), Some(true)),
            (format!("00-{trace}-b7ad6b7169203331-01-more"), None),
            (format!("ff-{trace}-b7ad6b7169203331-01"), None),
            (format!("00-{trace}-0000000000000000-01"), None),
            (format!("00-{}-b7ad6b7169203331-01", "0".repeat(32)), None),
            (
                format!("00-{}-b7ad6b7169203331-01", trace.to_uppercase()),
                None,
            ),
            (format!("00-{trace}-b7ad6b716920333-01"), None),
            (format!("00-+{}-b7ad6b7169203331-01", &trace[1..]), None),
            ("00".into(), None),
            (String::new(), None),
        ];
        for (text, expected) in cases {
            let mut headers = HeaderMap::new();
            headers.insert("traceparent", text.parse().expect("a header"));
            let found = parent(&headers);
            assert_eq!(found.map(|parent| parent.sampled), expected, "{text}");
            if let Some(parent) = found {
                assert_eq!(format!("{:032x}", parent.trace), trace);
                assert_eq!(parent.span, 0xb7ad_6b71_6920_3331);
            }
            headers.append("traceparent", text.parse().expect("a header"));
            assert_eq!(parent(&headers), None, "twice");
        }
        assert_eq!(parent(&HeaderMap::new()), None);
    }
}
