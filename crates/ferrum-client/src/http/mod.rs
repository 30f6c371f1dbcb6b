//! An HTTP/1.1 client that trusts no server.
//!
//! One request, one answer, read piece by piece. Redirects are not followed here: what may follow one,
//! such as a token, depends on what is asked for. Every wait has an end, and so has everything that is
//! kept in memory.

mod connect;
mod proxy;
mod redirect;
mod sse;
mod url;

pub use hyper::body::Bytes;
pub use hyper::header;
pub use hyper::{HeaderMap, Method, StatusCode};
pub use proxy::Proxy;
pub use redirect::send_with_redirects;
pub use sse::Events;
pub use url::Url;
pub(crate) use url::{encode_path, encode_segment};

use crate::{ClientError, Result};
use connect::Stream;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use tokio_rustls::TlsConnector;

/// Most connections that wait for another request.
const MAX_IDLE: usize = 1024;

/// Longest body that is read only to keep its connection.
const MAX_DRAINED: usize = 64 << 10;

/// How long a server may take.
#[derive(Debug, Clone, Copy)]
pub struct Timeouts {
    /// Until there is a connection, encrypted where it has to be.
    pub connect: Duration,
    /// From the request until the head of its answer.
    pub answer: Duration,
    /// Between two pieces of a body.
    pub stall: Duration,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self {
            connect: Duration::from_secs(20),
            answer: Duration::from_secs(60),
            stall: Duration::from_secs(60),
        }
    }
}

/// A client. It keeps connections for the next request, so it is made once.
pub struct Client {
    tls: TlsConnector,
    proxy: Proxy,
    timeouts: Timeouts,
    idle: Mutex<Vec<Idle>>,
}

/// A connection that waits, and where it leads.
struct Idle {
    origin: String,
    sender: SendRequest<Full<Bytes>>,
}

/// What to ask.
#[derive(Debug, Clone)]
pub struct Request {
    /// `GET`, `HEAD`, `POST`, …
    pub method: Method,
    /// Whom.
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
        Self {
            tls: connect::tls(),
            proxy,
            timeouts,
            idle: Mutex::new(Vec::new()),
        }
    }

    /// Sends a request and reads the head of the answer, whatever its status.
    ///
    /// # Errors
    /// [`ClientError::Unreachable`] and [`ClientError::Timeout`].
    pub async fn send<'c>(&'c self, request: &Request) -> Result<Response<'c>> {
        let origin = request.url.origin();
        while let Some(mut sender) = self.take_idle(&origin) {
            if sender.ready().await.is_err() {
                continue;
            }
            match self.send_on(sender, request).await {
                // It may have been closed just now; what can be asked twice is asked again.
                Err(ClientError::Unreachable { .. }) if request.method.is_idempotent() => {}
                answer => return answer,
            }
        }
        let connected = self.connect(&request.url);
        let sender = within(self.timeouts.connect, &request.url, "connecting", connected).await??;
        self.send_on(sender, request).await
    }

    async fn connect(&self, url: &Url) -> Result<SendRequest<Full<Bytes>>> {
        let stream = Stream::open(url, &self.proxy, &self.tls).await?;
        let (sender, connection) = http1::handshake(TokioIo::new(stream))
            .await
            .map_err(|e| unreachable(url, &e))?;
        // It ends with the last half of it that is held: the sender, or the body of an answer. What goes
        // wrong is told to them.
        drop(tokio::spawn(connection));
        Ok(sender)
    }

    async fn send_on<'c>(
        &'c self,
        mut sender: SendRequest<Full<Bytes>>,
        request: &Request,
    ) -> Result<Response<'c>> {
        let url = &request.url;
        let mut message = hyper::Request::new(Full::new(request.body.clone()));
        *message.method_mut() = request.method.clone();
        *message.uri_mut() = url.path_and_query()?;
        *message.headers_mut() = request.headers.clone();
        let headers = message.headers_mut();
        headers.insert(header::HOST, url.host_header()?);
        let agent = concat!("ferrum/", env!("CARGO_PKG_VERSION"));
        headers.insert(header::USER_AGENT, header::HeaderValue::from_static(agent));
        let answer = within(
            self.timeouts.answer,
            url,
            "waiting for an answer",
            sender.send_request(message),
        );
        let answer = answer.await?.map_err(|e| unreachable(url, &e))?;
        let (parts, body) = answer.into_parts();
        Ok(Response {
            status: parts.status,
            headers: parts.headers,
            body,
            url: url.clone(),
            client: self,
            sender: Some(sender),
        })
    }

    fn take_idle(&self, origin: &str) -> Option<SendRequest<Full<Bytes>>> {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        let at = idle.iter().rposition(|idle| idle.origin == origin)?;
        Some(idle.swap_remove(at).sender)
    }

    fn keep(&self, origin: String, sender: SendRequest<Full<Bytes>>) {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        idle.retain(|idle| !idle.sender.is_closed());
        if idle.len() < MAX_IDLE && !sender.is_closed() {
            idle.push(Idle { origin, sender });
        }
    }
}

/// An answer whose body is still to be read.
pub struct Response<'c> {
    /// The status.
    pub status: StatusCode,
    /// The headers.
    pub headers: HeaderMap,
    body: Incoming,
    url: Url,
    client: &'c Client,
    sender: Option<SendRequest<Full<Bytes>>>,
}

impl Response<'_> {
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
            let stall = self.client.timeouts.stall;
            let frame = within(stall, &self.url, "reading an answer", self.body.frame()).await?;
            match frame {
                Some(frame) => {
                    // Trailers are of no use here.
                    if let Ok(data) = frame.map_err(|e| unreachable(&self.url, &e))?.into_data() {
                        return Ok(Some(data));
                    }
                }
                None => {
                    if let Some(sender) = self.sender.take() {
                        self.client.keep(self.url.origin(), sender);
                    }
                    return Ok(None);
                }
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
    let timeout = tokio::time::timeout(limit, future).await;
    timeout.map_err(|_| ClientError::Timeout {
        url: url.to_string(),
        what,
        seconds: limit.as_secs(),
    })
}

/// An error with its causes, which say what it is.
fn unreachable(url: &Url, e: &dyn std::error::Error) -> ClientError {
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
