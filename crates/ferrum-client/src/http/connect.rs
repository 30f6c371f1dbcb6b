//! From an address to a connection: TCP, a tunnel through a proxy, TLS.

use super::direct::Direct;
use super::{Bytes, Method, Proxy, Url, header, unreachable};
use crate::{ClientError, Result};
use ferrum_formats::Shown;
use http_body_util::Empty;
use hyper::client::conn::http1;
use hyper::ext::ReasonPhrase;
use hyper::{Response, Uri};
use hyper_rustls::{ConfigBuilderExt, HttpsConnector, MaybeHttpsStream};
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::client::legacy::connect::dns::GaiResolver;
use hyper_util::rt::TokioIo;
use std::error::Error;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpStream;
use tokio_rustls::rustls::{ClientConfig, crypto};
use tower::util::BoxCloneSyncService;
use tower::{ServiceExt, service_fn};

pub(super) type BoxError = Box<dyn Error + Send + Sync>;
pub(super) type Tcp = TokioIo<TcpStream>;

/// Opens connections for the pool.
pub(super) type Connector = BoxCloneSyncService<Uri, MaybeHttpsStream<Tcp>, BoxError>;

/// The way to a server.
#[derive(Clone)]
pub(super) enum Route {
    /// Through the proxy where that says so, else directly.
    Proxy(Proxy),
    /// Directly, maybe to public addresses only.
    Direct(Direct),
}

/// A connector that takes no longer than `limit`. Its errors are those of the libraries, `Elapsed` when time
/// is up, and [`ClientError`] where a proxy is to blame, which the caller does not know of.
pub(super) fn connector(tls: ClientConfig, route: Route, limit: Duration) -> Connector {
    let tcp = tcp_connector(GaiResolver::new());
    let dial = service_fn(move |to| dial(tcp.clone(), route.clone(), to));
    let https = HttpsConnector::from((dial, tls));
    BoxCloneSyncService::new(service_fn(move |to| {
        // The pool may finish a connection in the background, so the limit is here and not with the request.
        let connected = tokio::time::timeout(limit, https.clone().oneshot(to));
        async { connected.await? }
    }))
}

/// Opens TCP connections to what `resolver` answers.
pub(super) fn tcp_connector<R>(resolver: R) -> HttpConnector<R> {
    let mut tcp = HttpConnector::new_with_resolver(resolver);
    // Addresses of TLS are welcome, too: the layer around it encrypts.
    tcp.enforce_http(false);
    // Requests are written whole; waiting for more would only cost time.
    tcp.set_nodelay(true);
    tcp
}

/// Connects to a server, or through a proxy to it.
async fn dial(tcp: HttpConnector, route: Route, to: Uri) -> Result<Tcp, BoxError> {
    let url = Url::from(to);
    let proxy = match route {
        Route::Proxy(proxy) => proxy.for_url(&url),
        Route::Direct(direct) => return direct.dial(&url).await,
    };
    let Some(proxy) = proxy else {
        return Ok(tcp.oneshot(url.uri().clone()).await?);
    };
    let stream = tcp.oneshot(proxy.uri().clone()).await;
    let stream = stream.map_err(|e| unreachable(&proxy, &e))?;
    Ok(tunnel(stream, &url, &proxy).await?)
}

/// Asks a proxy to pass everything on.
async fn tunnel(stream: Tcp, url: &Url, proxy: &Url) -> Result<Tcp> {
    let failed = |e: hyper::Error| unreachable(proxy, &e);
    let (mut sender, connection) = http1::handshake(stream).await.map_err(failed)?;
    // It ends with the tunnel's request, and tells it what goes wrong.
    drop(tokio::spawn(connection.with_upgrades()));
    let host = url.uri().host().unwrap_or_default();
    let target = format!("{host}:{}", url.port());
    let request = hyper::Request::builder()
        .method(Method::CONNECT)
        .uri(&target)
        .header(header::HOST, &target)
        .body(Empty::<Bytes>::new());
    let request = request.map_err(|e| unreachable(url, &e))?;
    let answer = sender.send_request(request).await.map_err(failed)?;
    let refused = |reason| ClientError::Protocol {
        url: proxy.to_string(),
        reason,
    };
    if !answer.status().is_success() {
        let line = status_line(&answer);
        return Err(refused(format!(
            "the proxy opens no tunnel: {}",
            Shown(line.trim_end())
        )));
    }
    let tunnel = hyper::upgrade::on(answer).await.map_err(failed)?;
    match tunnel.downcast::<Tcp>() {
        Ok(parts) if parts.read_buf.is_empty() => Ok(parts.io),
        // In TLS, the client speaks first.
        _ => Err(refused("the proxy sends more than its answer".into())),
    }
}

fn status_line<T>(answer: &Response<T>) -> String {
    let status = answer.status();
    // Only a reason that differs from the usual one is kept.
    let reason = match answer.extensions().get::<ReasonPhrase>() {
        Some(reason) => String::from_utf8_lossy(reason.as_bytes()),
        None => status.canonical_reason().unwrap_or_default().into(),
    };
    format!("{:?} {} {reason}", answer.version(), status.as_u16())
}

/// The system's certificates, or those that browsers trust where it has none, as in small containers.
pub(super) fn tls() -> ClientConfig {
    // The provider is named: no process-wide default has to be installed.
    let provider = Arc::new(crypto::ring::default_provider());
    let config = || {
        ClientConfig::builder_with_provider(Arc::clone(&provider))
            .with_safe_default_protocol_versions()
            .expect("ring has the default versions of TLS")
    };
    let config = config()
        .with_native_roots()
        .unwrap_or_else(|_| config().with_webpki_roots());
    let mut config = config.with_no_client_auth();
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    config
}
