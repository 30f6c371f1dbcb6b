//! Sending spans to a collector: OTLP over HTTP, as JSON, in batches, on a task of its own.
//!
//! Nothing waits for a collector. Spans wait for it in a queue with an end; what does not fit, and what a
//! collector does not take, is dropped and counted. Written out by hand, as the format is one object, and
//! OpenTelemetry's crates bring another client and global state.

use crate::observability::span::{Attribute, Span};
use axum::http::Uri;
use ferrum_client::http::header::{CONTENT_TYPE, HeaderValue};
use ferrum_client::http::{Client, Method, Proxy, Request, Timeouts, Url};
use prometheus_client::metrics::counter::Counter;
use serde_json::{Value, json};
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc::{self, Receiver, Sender};
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout, timeout_at};

/// Most spans that wait.
const QUEUE: usize = 4096;

/// Most spans of a batch.
const BATCH: usize = 512;

/// How long a span may wait for others to go with it.
const LINGER: Duration = Duration::from_secs(1);

/// How long a collector may take for a batch.
const PATIENCE: Duration = Duration::from_secs(10);

/// The port of collectors, where an unencrypted URL names none.
const PORT: u16 = 4318;

/// Where a collector takes spans: `http://HOST:PORT` or `https://HOST`, to which `/v1/traces` is added.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OtlpEndpoint {
    url: Url,
}

impl FromStr for OtlpEndpoint {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        // `Url::parse` names what a URL must not contain; errors do not repeat a password.
        Url::parse(text).map_err(|e| e.to_string())?;
        let wrong = || format!("found {text:?}, expected a URL such as http://localhost:{PORT}");
        let uri: Uri = text.parse().map_err(|_| wrong())?;
        let (scheme, authority) = (uri.scheme_str(), uri.authority());
        let (Some(scheme), Some(authority), None) = (scheme, authority, uri.query()) else {
            return Err(wrong());
        };
        let port = match (scheme, authority.port()) {
            ("http", None) => format!(":{PORT}"),
            _ => String::new(),
        };
        let path = uri.path().trim_end_matches('/');
        let url = Url::parse(&format!("{scheme}://{authority}{port}{path}/v1/traces"));
        Ok(Self {
            url: url.map_err(|e| e.to_string())?,
        })
    }
}

impl fmt::Display for OtlpEndpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.url.fmt(f)
    }
}

/// What became of spans.
#[derive(Debug, Default)]
pub(crate) struct ExportCounts {
    pub(crate) exported: Counter,
    pub(crate) dropped: Counter,
}

/// Takes spans, and never waits.
#[derive(Clone, Debug)]
pub(crate) struct Exporter {
    queue: Sender<Span>,
    counts: Arc<ExportCounts>,
}

impl Exporter {
    /// An exporter, and what sends its spans when it is run.
    pub(crate) fn new(endpoint: OtlpEndpoint) -> (Self, BatchExporter) {
        let (queue, spans) = mpsc::channel(QUEUE);
        let counts = Arc::new(ExportCounts::default());
        let batch_exporter = BatchExporter {
            endpoint,
            client: Client::new(Timeouts::default(), Proxy::default()),
            spans,
            counts: Arc::clone(&counts),
        };
        (Self { queue, counts }, batch_exporter)
    }

    pub(crate) fn send(&self, span: Span) {
        if self.queue.try_send(span).is_err() {
            self.counts.dropped.inc();
        }
    }

    pub(crate) fn counts(&self) -> &ExportCounts {
        &self.counts
    }
}

/// The other end of an [`Exporter`].
pub(crate) struct BatchExporter {
    endpoint: OtlpEndpoint,
    client: Client,
    spans: Receiver<Span>,
    counts: Arc<ExportCounts>,
}

impl BatchExporter {
    /// Sends spans until `stop` comes, then those that still wait.
    pub(crate) async fn run(mut self, mut stop: oneshot::Receiver<()>) {
        let mut batch = Vec::with_capacity(BATCH);
        loop {
            tokio::select! {
                _ = &mut stop => break,
                count = self.spans.recv_many(&mut batch, BATCH) => if count == 0 { break },
            }
            let until = Instant::now() + LINGER;
            while batch.len() < BATCH {
                let room = BATCH - batch.len();
                let more = timeout_at(until, self.spans.recv_many(&mut batch, room));
                tokio::select! {
                    _ = &mut stop => return self.end(batch).await,
                    more = more => if !more.is_ok_and(|count| count > 0) { break },
                }
            }
            self.ship(&mut batch).await;
        }
        self.end(batch).await;
    }

    /// Sends the last batches; the caller limits the time.
    async fn end(mut self, mut batch: Vec<Span>) {
        self.spans.close();
        loop {
            let room = BATCH - batch.len();
            if room > 0 && self.spans.recv_many(&mut batch, room).await > 0 {
                continue;
            }
            if batch.is_empty() {
                return;
            }
            self.ship(&mut batch).await;
        }
    }

    /// Sends a batch, once: a collector that is away does not make spans pile up.
    async fn ship(&self, batch: &mut Vec<Span>) {
        if batch.is_empty() {
            return;
        }
        let count = batch.len() as u64;
        let body = document(batch).to_string();
        batch.clear();
        let mut request = Request::new(Method::POST, self.endpoint.url.clone());
        let json = HeaderValue::from_static("application/json");
        request.headers.insert(CONTENT_TYPE, json);
        request.body = body.into();
        let counts = match timeout(PATIENCE, self.client.send(&request)).await {
            Ok(Ok(answer)) if answer.status.is_success() => &self.counts.exported,
            _ => &self.counts.dropped,
        };
        counts.inc_by(count);
    }
}

/// Spans as the body of `POST /v1/traces`.
fn document(spans: &[Span]) -> Value {
    let name = attribute("service.name", &Attribute::Text("ferrum".into()));
    let version = env!("CARGO_PKG_VERSION");
    let version_attribute = attribute("service.version", &Attribute::Text(version.into()));
    json!({"resourceSpans": [{
        "resource": {"attributes": [name, version_attribute]},
        "scopeSpans": [{
            "scope": {"name": "ferrum-server", "version": version},
            "spans": spans.iter().map(span).collect::<Vec<_>>(),
        }],
    }]})
}

fn span(span: &Span) -> Value {
    let attributes = span.attributes.iter();
    let attributes = attributes.map(|(name, value)| attribute(name, value));
    json!({
        "traceId": format!("{:032x}", span.trace),
        "spanId": format!("{:016x}", span.id),
        "parentSpanId": span.parent.map_or(String::new(), |id| format!("{id:016x}")),
        "name": span.name,
        // Internal and server, as OTLP numbers them.
        "kind": if span.is_request { 2 } else { 1 },
        "startTimeUnixNano": span.start.to_string(),
        "endTimeUnixNano": span.end.to_string(),
        "attributes": attributes.collect::<Vec<_>>(),
        "status": if span.failed { json!({"code": 2}) } else { json!({}) },
    })
}

fn attribute(name: &str, value: &Attribute) -> Value {
    let value = match value {
        Attribute::Text(text) => json!({"stringValue": text}),
        // 64 bits are text in this format.
        Attribute::Number(number) => json!({"intValue": number.to_string()}),
        Attribute::Truth(truth) => json!({"boolValue": truth}),
    };
    json!({"key": name, "value": value})
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_are_urls() {
        let cases = [
            ("http://localhost:4318", "http://localhost:4318/v1/traces"),
            ("http://localhost", "http://localhost:4318/v1/traces"),
            (
                "http://10.0.0.1:80/otlp/",
                "http://10.0.0.1:80/otlp/v1/traces",
            ),
            ("http://[::1]:4318", "http://[::1]:4318/v1/traces"),
            ("http://[::1]", "http://[::1]:4318/v1/traces"),
            ("https://a.example", "https://a.example/v1/traces"),
            (
                "https://a.example:4318/x",
                "https://a.example:4318/x/v1/traces",
            ),
        ];
        for (text, expected) in cases {
            let found: OtlpEndpoint = text.parse().unwrap_or_else(|e| panic!("{e}"));
            assert_eq!(found.to_string(), expected);
        }
        for text in [
            "",
            "localhost:4318",
            "ftp://a",
            "http://",
            "http://u:p@a",
            "http://a?b",
            "/v1",
        ] {
            assert!(text.parse::<OtlpEndpoint>().is_err(), "{text}");
        }
    }

    fn example() -> Span {
        Span {
            trace: 1,
            id: 2,
            parent: None,
            name: "decode".into(),
            is_request: false,
            start: 5,
            end: 6,
            attributes: vec![("a", Attribute::Number(7)), ("b", Attribute::Truth(true))],
            failed: true,
        }
    }

    #[test]
    fn a_queue_without_a_reader_has_an_end() {
        let endpoint = "http://localhost".parse().unwrap_or_else(|e| panic!("{e}"));
        let (exporter, batch_exporter) = Exporter::new(endpoint);
        for _ in 0..QUEUE + 10 {
            exporter.send(example());
        }
        assert_eq!(exporter.counts().dropped.get(), 10);
        assert_eq!(batch_exporter.spans.len(), QUEUE);
    }

    #[test]
    fn spans_have_otlps_form() {
        let document = document(&[example()]);
        let span = &document["resourceSpans"][0]["scopeSpans"][0]["spans"][0];
        assert_eq!(span["traceId"], "00000000000000000000000000000001");
        assert_eq!(span["spanId"], "0000000000000002");
        assert_eq!(span["endTimeUnixNano"], "6");
        assert_eq!(
            span["attributes"][0],
            json!({"key": "a", "value": {"intValue": "7"}})
        );
        assert_eq!(span["status"]["code"], 2);
    }
}
