//! From an address to a stream of bytes: TCP, a tunnel through a proxy, TLS.

use super::{Proxy, Url, unreachable};
use crate::{ClientError, Result};
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::pki_types::ServerName;
use tokio_rustls::rustls::{ClientConfig, RootCertStore, crypto};

/// Longest answer of a proxy before the tunnel is open.
const MAX_PROXY_HEAD: usize = 16 << 10;

/// An open connection.
pub(super) enum Stream {
    Plain(TcpStream),
    Tls(Box<TlsStream<TcpStream>>),
}

impl Stream {
    pub(super) async fn open(url: &Url, proxy: &Proxy, tls: &TlsConnector) -> Result<Self> {
        let through = proxy.for_url(url);
        let first = through.unwrap_or(url);
        let failed = |e: io::Error| unreachable(first, &e);
        let tcp = TcpStream::connect((first.host(), first.port()))
            .await
            .map_err(failed)?;
        // Requests are written whole; waiting for more would only cost time.
        tcp.set_nodelay(true).map_err(failed)?;
        let tcp = match through {
            Some(proxy) => tunnel(tcp, url, proxy).await?,
            None => tcp,
        };
        if !url.is_tls() {
            return Ok(Stream::Plain(tcp));
        }
        let name = ServerName::try_from(url.host().to_owned()).map_err(|e| unreachable(url, &e))?;
        let stream = tls
            .connect(name, tcp)
            .await
            .map_err(|e| untrusted(url, &e))?;
        Ok(Stream::Tls(Box::new(stream)))
    }
}

/// What a handshake ends with. A certificate is no better at the next attempt.
fn untrusted(url: &Url, e: &io::Error) -> ClientError {
    if e.kind() != io::ErrorKind::InvalidData {
        return unreachable(url, e);
    }
    ClientError::Protocol {
        url: url.to_string(),
        reason: format!("{e}\nhint: SSL_CERT_FILE names further certificates to trust"),
    }
}

/// Asks a proxy to pass everything on.
async fn tunnel(mut tcp: TcpStream, url: &Url, proxy: &Url) -> Result<TcpStream> {
    let failed = |e: io::Error| unreachable(proxy, &e);
    let target = match url.host().contains(':') {
        true => format!("[{}]:{}", url.host(), url.port()),
        false => format!("{}:{}", url.host(), url.port()),
    };
    let head = format!("CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n");
    tcp.write_all(head.as_bytes()).await.map_err(failed)?;
    let mut answer = Vec::new();
    // Byte by byte: what follows the head belongs to the tunnel.
    while !answer.ends_with(b"\r\n\r\n") && answer.len() < MAX_PROXY_HEAD {
        answer.push(tcp.read_u8().await.map_err(failed)?);
    }
    let line = String::from_utf8_lossy(&answer);
    let line = line.lines().next().unwrap_or_default();
    if line
        .split(' ')
        .nth(1)
        .is_some_and(|status| status.starts_with('2'))
    {
        return Ok(tcp);
    }
    Err(ClientError::Protocol {
        url: proxy.to_string(),
        reason: format!("the proxy opens no tunnel: {}", ferrum_formats::Shown(line)),
    })
}

/// The system's certificates, or those that browsers trust where it has none, as in small containers.
pub(super) fn tls() -> TlsConnector {
    let mut roots = RootCertStore::empty();
    let native = rustls_native_certs::load_native_certs();
    roots.add_parsable_certificates(native.certs);
    if roots.is_empty() {
        roots.extend(webpki_roots::TLS_SERVER_ROOTS.iter().cloned());
    }
    // Named, not the process's default: nobody has to install one first.
    let provider = Arc::new(crypto::ring::default_provider());
    let config =
        ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    let mut config = config
        .expect("ring has the default versions of TLS")
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    TlsConnector::from(Arc::new(config))
}

impl AsyncRead for Stream {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Stream::Plain(stream) => Pin::new(stream).poll_read(cx, buf),
            Stream::Tls(stream) => Pin::new(stream).poll_read(cx, buf),
        }
    }
}

impl AsyncWrite for Stream {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Stream::Plain(stream) => Pin::new(stream).poll_write(cx, buf),
            Stream::Tls(stream) => Pin::new(stream).poll_write(cx, buf),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Stream::Plain(stream) => Pin::new(stream).poll_flush(cx),
            Stream::Tls(stream) => Pin::new(stream).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Stream::Plain(stream) => Pin::new(stream).poll_shutdown(cx),
            Stream::Tls(stream) => Pin::new(stream).poll_shutdown(cx),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};

    /// Asks a proxy that gives this answer, and reads what comes through the tunnel.
    fn through(answer: &'static str) -> Result<(String, String)> {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let proxy = Url::parse(&format!("http://{}", listener.local_addr().unwrap())).unwrap();
        let asked = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut asked = vec![0; 1024];
            let read = stream.read(&mut asked).unwrap();
            stream.write_all(answer.as_bytes()).unwrap();
            String::from_utf8(asked[..read].to_vec()).unwrap()
        });
        let url = Url::parse("https://[2001:db8::1]/x").unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(async {
            let tcp = TcpStream::connect((proxy.host(), proxy.port()))
                .await
                .unwrap();
            let mut tcp = tunnel(tcp, &url, &proxy).await?;
            let mut text = String::new();
            tcp.read_to_string(&mut text).await.unwrap();
            Ok((asked.join().unwrap(), text))
        })
    }

    #[test]
    fn a_tunnel_begins_after_the_answer_of_the_proxy() {
        let (asked, text) = through("HTTP/1.1 200 OK\r\nX: y\r\n\r\nhello").unwrap();
        assert!(
            asked.starts_with("CONNECT [2001:db8::1]:443 HTTP/1.1\r\n"),
            "{asked}"
        );
        assert_eq!(text, "hello");
        for (answer, words) in [
            (
                "HTTP/1.1 407 Who are you?\r\n\r\n",
                "no tunnel: HTTP/1.1 407 Who are you?",
            ),
            ("HTTP/1.1 200", "end of file"),
        ] {
            let error = through(answer).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        }
    }
}
