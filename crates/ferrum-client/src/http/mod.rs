//! An HTTP/1.1 client that trusts no server.
//!
//! One request, one answer, read piece by piece. Redirects are not followed here: what may follow one,
//! such as a token, depends on what is asked for. Every wait has an end, and so has everything that is
//! kept in memory.

mod connect;
mod direct;
mod proxy;
mod redirect;
mod sse;
#[cfg(test)]
mod tests;
mod url;

pub use direct::Addresses;
pub use hyper::body::Bytes;
pub use hyper::header;
pub use hyper::{HeaderMap, Method, StatusCode};
pub use proxy::Proxy;
pub use redirect::send_with_redirects;
pub use sse::Events;
pub use url::Url;
pub(crate) use url::{encode_path, encode_segment};

use crate::{ClientError, Result};
use connect::{Connector, Route};
use direct::Direct;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper_util::client::legacy::{self, connect::capture_connection};
use hyper_util::rt::{TokioExecutor, TokioTimer};
use std::error::Error;
use std::io;
use std::time::Duration;
use tokio::time::error::Elapsed;
use tokio_rustls::rustls::ClientConfig;

/// Most connections to one server that wait for another request; each does so for 90 s at most.
const MAX_IDLE: usize = 1024;

/// Longest body that is read only to keep its connection.
const MAX_DRAINED: usize = 64 << 10;

/// How long a server may take.
#[derive(Debug, Clone, Copy)]
pub struct Timeouts {
    /// Until there is a connection, encrypted where it has to be.
    pub connect: Duration,
    /// From the request until the head of its response.
    pub response: Duration,
    /// Between two chunks of a body.
    pub read: Duration,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self {
            connect: Duration::from_secs(20),
            response: Duration::from_secs(60),
            read: Duration::from_secs(60),
        }
    }
}

/// A client. It keeps connections for the next request, so it is made once.
pub struct Client {
    pool: legacy::Client<Connector, Full<Bytes>>,
    timeouts: Timeouts,
}

/// A request.
#[derive(Debug, Clone)]
pub struct Request {
    /// `GET`, `HEAD`, `POST`, …
    pub method: Method,
    /// Target URL.
    pub url: Url,
    /// Headers beside `Host`, `User-Agent` and `Content-Length`.
    pub headers: HeaderMap,
    /// The body; may be empty.
    pub body: Bytes,
}

impl Request {
    /// A request without headers and body.
    pub fn new(method: Method, url: Url) -> Self {
        Self {
            method,
            url,
            headers: HeaderMap::new(),
            body: Bytes::new(),
        }
    }
}

impl Client {
    /// A client with these bounds, which goes through `proxy` where that says so.
    pub fn new(timeouts: Timeouts, proxy: Proxy) -> Self {
        Self::with_tls(connect::tls(), timeouts, Route::Proxy(proxy))
    }

    /// A client with these bounds for hosts that others choose: it connects to these addresses only, directly, as a proxy would
    /// resolve names by itself.
    pub fn direct(timeouts: Timeouts, addresses: Addresses) -> Self {
        let route = Route::Direct(Direct::new(addresses));
        Self::with_tls(connect::tls(), timeouts, route)
    }

    fn with_tls(tls: ClientConfig, timeouts: Timeouts, route: Route) -> Self {
        let connector = connect::connector(tls, route, timeouts.connect);
        let pool = legacy::Client::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .pool_max_idle_per_host(MAX_IDLE)
            .build(connector);
        Self { pool, timeouts }
    }

    /// Sends a request and reads the head of the answer, whatever its status.
    ///
    /// # Errors
    /// [`ClientError::Unreachable`], [`ClientError::Timeout`], [`ClientError::NotPublic`] where only
    /// [public addresses](Addresses::Public) are connected to, and [`ClientError::Protocol`] for certificates that are not
    /// trusted and proxies that open no tunnel.
    pub async fn send(&self, request: &Request) -> Result<Response> {
        let mut answer = self.attempt(request).await?;
        // The pool repeats what was not sent. What was, on a connection that the server closed just then, can
        // be asked again only if it changes nothing. Once is enough: the pool drops connections that it sees
        // closed.
        let broken = answer.as_ref().is_err_and(|e| !e.is_connect());
        if broken && request.method.is_idempotent() {
            answer = self.attempt(request).await?;
        }
        let answer = answer.map_err(|e| self.failed(&request.url, &e))?;
        let (parts, body) = answer.into_parts();
        Ok(Response {
            status: parts.status,
            headers: parts.headers,
            body,
            url: request.url.clone(),
            read_timeout: self.timeouts.read,
        })
    }

    async fn attempt(
        &self,
        request: &Request,
    ) -> Result<Result<hyper::Response<Incoming>, legacy::Error>> {
        let mut message = hyper::Request::new(Full::new(request.body.clone()));
        *message.method_mut() = request.method.clone();
        *message.uri_mut() = request.url.uri().clone();
        *message.headers_mut() = request.headers.clone();
        let agent = concat!("ferrum/", env!("CARGO_PKG_VERSION"));
        let agent = header::HeaderValue::from_static(agent);
        message.headers_mut().insert(header::USER_AGENT, agent);
        let mut connected = capture_connection(&mut message);
        let mut answer = self.pool.request(message);
        // Connecting has a limit of its own; the time for an answer begins after it.
        tokio::select! {
            answer = &mut answer => return Ok(answer),
            _ = connected.wait_for_connection_metadata() => {}
        }
        let what = "waiting for an answer";
        within(self.timeouts.response, &request.url, what, answer).await
    }

    fn failed(&self, url: &Url, e: &legacy::Error) -> ClientError {
        // The pool's own words only say at which step it was.
        let cause = e.source().unwrap_or(e);
        if let Some(e) = cause.downcast_ref::<ClientError>() {
            return e.clone();
        }
        if cause.is::<Elapsed>() {
            return timeout(self.timeouts.connect, url, "connecting");
        }
        // A certificate is no better at the next attempt.
        if is_invalid_data(cause) {
            return ClientError::Protocol {
                url: url.to_string(),
                reason: format!("{cause}\nhint: SSL_CERT_FILE names further certificates to trust"),
            };
        }
        unreachable(url, cause)
    }
}

/// Whether it is an error of TLS, which comes as a system's error within a system's error.
fn is_invalid_data(e: &(dyn Error + 'static)) -> bool {
    e.downcast_ref::<io::Error>().is_some_and(|e| {
        e.kind() == io::ErrorKind::InvalidData || e.get_ref().is_some_and(|e| is_invalid_data(e))
    })
}

/// An answer whose body is still to be read.
pub struct Response {
    /// The status.
    pub status: StatusCode,
    /// The headers.
    pub headers: HeaderMap,
    body: Incoming,
    url: Url,
    read_timeout: Duration,
}

impl Response {
    /// What was asked.
    pub fn url(&self) -> &Url {
        &self.url
    }

    /// A header's text, if it is there and is text.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name)?.to_str().ok()
    }

    /// A header's number, if it is there and is one.
    pub fn number(&self, name: &str) -> Option<u64> {
        self.header(name)?.trim().parse().ok()
    }

    /// The next piece of the body; `None` at its end.
    ///
    /// # Errors
    /// [`ClientError::Unreachable`] when it ends too early, [`ClientError::Timeout`] when nothing comes.
    pub async fn chunk(&mut self) -> Result<Option<Bytes>> {
        loop {
            let frame = self.body.frame();
            let frame = within(self.read_timeout, &self.url, "reading an answer", frame).await?;
            let Some(frame) = frame else {
                return Ok(None);
            };
            // Trailers are of no use here.
            if let Ok(data) = frame.map_err(|e| unreachable(&self.url, &e))?.into_data() {
                return Ok(Some(data));
            }
        }
    }

    /// The whole body, of at most `limit` bytes.
    ///
    /// # Errors
    /// As [`Self::chunk`], and [`ClientError::Protocol`] when it is longer.
    pub async fn bytes(mut self, limit: usize) -> Result<Vec<u8>> {
        let mut body = Vec::new();
        while let Some(chunk) = self.chunk().await? {
            if chunk.len() > limit - body.len() {
                return Err(ClientError::Protocol {
                    url: self.url.to_string(),
                    reason: format!("the answer is longer than {limit} bytes"),
                });
            }
            body.extend_from_slice(&chunk);
        }
        Ok(body)
    }

    /// Reads a short body to its end, so that the connection can be used again.
    async fn drain(self) {
        // Of a long or broken one, the connection goes instead.
        drop(self.bytes(MAX_DRAINED).await);
    }
}

async fn within<T>(
    limit: Duration,
    url: &Url,
    what: &'static str,
    future: impl Future<Output = T>,
) -> Result<T> {
    let result = tokio::time::timeout(limit, future).await;
    result.map_err(|_| timeout(limit, url, what))
}

fn timeout(limit: Duration, url: &Url, what: &'static str) -> ClientError {
    ClientError::Timeout {
        url: url.to_string(),
        what,
        seconds: limit.as_secs(),
    }
}

/// An error with its causes, which say what it is.
fn unreachable(url: &Url, e: &dyn Error) -> ClientError {
    let mut reason = e.to_string();
    let mut cause = e.source();
    while let Some(e) = cause {
        reason = format!("{reason}: {e}");
        cause = e.source();
    }
    ClientError::Unreachable {
        url: url.to_string(),
        reason,
    }
}
