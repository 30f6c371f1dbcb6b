//! Per-request record, written as one access-log event when dropped.
//!
//! The handler and the streamed answers share the record. The event is written when the last of them drops it, so
//! streamed and cancelled requests need no special case. It holds neither prompts nor answers. Text that clients choose
//! (the name of a model) is bounded and escaped; paths and names of fields are left out.

use crate::error::ApiError;
use crate::http::request_id::RequestId;
use crate::observability::span::Attribute;
use crate::observability::trace::RequestTrace;
use crate::paths;
use axum::http::{HeaderValue, Method, StatusCode};
use ferrum_engine::engine::Usage;
use std::future::Future;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// The logged status of a request whose client disconnected before the response, as in nginx.
const CLIENT_CLOSED_REQUEST: u16 = 499;

/// Most characters of a text that a client chose.
const MAX_TEXT: usize = 128;

tokio::task_local! {
    /// The request that a task works on: routes need not pass it on.
    static CURRENT: Arc<RequestRecord>;
}

/// What has become known so far.
#[derive(Debug, Default)]
struct Facts {
    status: Option<u16>,
    /// Why it was refused or failed, in a word.
    error: Option<&'static str>,
    model: Option<String>,
    usage: Usage,
    /// Why its answers ended, each reason once.
    finish: Vec<&'static str>,
    queued: Option<Duration>,
    first_token: Option<Duration>,
    cancelled: bool,
    /// Fields that are not followed.
    ignored: Vec<String>,
}

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct RequestRecord {
    pub(crate) id: RequestId,
    method: Method,
    /// The route that matched, never the path: paths are as many as clients invent.
    route: String,
    started: Instant,
    /// Whether prompts and answers may be logged.
    pub(crate) log_prompts: bool,
    trace: OnceLock<RequestTrace>,
    facts: Mutex<Facts>,
}

impl RequestRecord {
    /// A request that begins now.
    pub(crate) fn begin(id: RequestId, method: Method, route: String, log_prompts: bool) -> Self {
        Self {
            id,
            method,
            route,
            started: Instant::now(),
            log_prompts,
            trace: OnceLock::new(),
            facts: Mutex::default(),
        }
    }

    /// The request that this task works on.
    pub(crate) fn current() -> Option<Arc<Self>> {
        CURRENT.try_with(Arc::clone).ok()
    }

    /// Makes `work` a part of this request.
    pub(crate) async fn scope<T>(self: Arc<Self>, work: impl Future<Output = T>) -> T {
        CURRENT.scope(self, work).await
    }

    /// Has the request traced, if it is not yet.
    pub(crate) fn traced(&self, trace: RequestTrace) {
        trace.note("ferrum.request_id", Attribute::Text(self.id.to_string()));
        // A second trace would be of the same request.
        let _ = self.trace.set(trace);
    }

    pub(crate) fn trace(&self) -> Option<&RequestTrace> {
        self.trace.get()
    }

    fn facts(&self, change: impl FnOnce(&mut Facts)) {
        change(&mut self.facts.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// It asks for this model, which may not be there.
    pub(crate) fn asks_for(&self, model: &str) {
        let model = printable(model);
        self.facts(|facts| facts.model = Some(model));
    }

    /// Tokens of one of its prompts, with those of its answers.
    pub(crate) fn add_usage(&self, usage: &Usage) {
        self.facts(|facts| facts.usage += *usage);
        if let Some(trace) = self.trace() {
            trace.add_usage(usage);
        }
    }

    /// A prompt waited so long for its first step; of several, the first counts.
    pub(crate) fn queued(&self, wait: Duration) {
        self.facts(|facts| facts.queued = Some(facts.queued.map_or(wait, |other| other.min(wait))));
    }

    /// A token is there; the first counts.
    pub(crate) fn token(&self, at: Instant) {
        let since = at.saturating_duration_since(self.started);
        self.facts(|facts| _ = facts.first_token.get_or_insert(since));
    }

    /// One of its answers has ended.
    pub(crate) fn finished(&self, reason: &'static str) {
        self.facts(|facts| {
            if !facts.finish.contains(&reason) {
                facts.finish.push(reason);
            }
        });
    }

    /// These of its fields are not followed.
    pub(crate) fn ignored(&self, names: Vec<String>) {
        self.facts(|facts| facts.ignored = names);
    }

    /// The same for the client; `None` where all are.
    pub(crate) fn ignored_header(&self) -> Option<HeaderValue> {
        let mut names = String::new();
        self.facts(|facts| names = facts.ignored.join(", "));
        let names = Some(names).filter(|names| !names.is_empty());
        names.and_then(|names| HeaderValue::from_str(&names).ok())
    }

    /// The client disconnected before the end of the answer.
    pub(crate) fn cancelled(&self) {
        self.facts(|facts| facts.cancelled = true);
        if let Some(trace) = self.trace() {
            trace.note("ferrum.cancelled", Attribute::Truth(true));
        }
    }

    /// It failed or was refused.
    pub(crate) fn failed(&self, error: &ApiError) {
        self.facts(|facts| facts.error = Some(error.word()));
    }

    /// The head of its answer is there.
    pub(crate) fn answered(&self, status: StatusCode) {
        self.facts(|facts| facts.status = Some(status.as_u16()));
        if let Some(trace) = self.trace() {
            let code = Attribute::Number(status.as_u16().into());
            trace.note("http.response.status_code", code);
            if status.is_server_error() {
                trace.fail();
            }
        }
    }
}

impl Drop for RequestRecord {
    fn drop(&mut self) {
        let facts = self.facts.get_mut().unwrap_or_else(PoisonError::into_inner);
        let status = facts.status.unwrap_or(CLIENT_CLOSED_REQUEST);
        let cancelled = facts.cancelled || facts.status.is_none();
        let computed = facts.usage != Usage::default();
        let finish = Some(facts.finish.join(",")).filter(|reasons| !reasons.is_empty());
        let ignored = Some(facts.ignored.join(",")).filter(|names| !names.is_empty());
        // Monitoring polls these routes every few seconds: successes are logged at debug.
        let is_monitoring_route =
            [paths::HEALTH, paths::READY, paths::METRICS].contains(&&*self.route);
        // An event's level is a constant.
        macro_rules! log {
            ($level:ident) => {
                tracing::$level!(
                    target: "access",
                    parent: None,
                    request_id = self.id.as_str(),
                    method = self.method.as_str(),
                    route = self.route.as_str(),
                    status,
                    error = facts.error,
                    ignored = ignored.as_deref(),
                    model = facts.model.as_deref(),
                    prompt_tokens = computed.then_some(facts.usage.prompt_tokens),
                    cached_tokens = computed.then_some(facts.usage.cached_tokens),
                    completion_tokens = computed.then_some(facts.usage.completion_tokens),
                    finish_reason = finish.as_deref(),
                    queue_ms = facts.queued.map(millis),
                    first_token_ms = facts.first_token.map(millis),
                    total_ms = millis(self.started.elapsed()),
                    cancelled,
                    "request"
                )
            };
        }
        match status {
            500.. => log!(warn),
            ..400 if is_monitoring_route => log!(debug),
            _ => log!(info),
        }
    }
}

/// Milliseconds, to a tenth of one.
fn millis(time: Duration) -> f64 {
    (time.as_secs_f64() * 1e4).round() / 10.0
}

/// A client's text for one line of a log: bounded, with escapes for what a terminal would obey or hide.
fn printable(text: &str) -> String {
    let mut out = String::new();
    for c in text.chars().take(MAX_TEXT) {
        match c {
            // These are visible, and the log format quotes them.
            '"' | '\'' | '\\' => out.push(c),
            c => out.extend(c.escape_debug()),
        }
    }
    if text.chars().nth(MAX_TEXT).is_some() {
        out.push('…');
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_of_clients_cannot_leave_their_line() {
        let cases = [
            ("Qwen/Qwen3-0.6B:Q4_K_M", "Qwen/Qwen3-0.6B:Q4_K_M"),
            ("модель \"x\" \\", "модель \"x\" \\"),
            ("a\nb\r\tc\0", "a\\nb\\r\\tc\\0"),
            ("\u{1b}[31mred", "\\u{1b}[31mred"),
            ("\u{9b}31m\u{7f}", "\\u{9b}31m\\u{7f}"),
            ("abc\u{202e}cba\u{2028}", "abc\\u{202e}cba\\u{2028}"),
        ];
        for (text, expected) in cases {
            assert_eq!(printable(text), expected);
        }
        let long = "é".repeat(MAX_TEXT);
        assert_eq!(printable(&long), long);
        assert_eq!(printable(&format!("{long}é")), format!("{long}…"));
    }

    #[test]
    fn times_are_rounded() {
        assert_eq!(millis(Duration::from_micros(1_234_567)), 1234.6);
        assert_eq!(millis(Duration::ZERO), 0.0);
    }
}
