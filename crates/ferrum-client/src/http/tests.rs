//! The client against servers and proxies that misbehave.

use super::*;
use rcgen::{CertifiedKey, generate_simple_self_signed};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::{RootCertStore, ServerConfig, ServerConnection, StreamOwned};

const HELLO: &str = "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello";

/// A server that does this with each connection, counted from 0. Its threads end with the test program.
fn server(serve: impl Fn(usize, TcpStream) + Send + Sync + 'static) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let serve = Arc::new(serve);
    std::thread::spawn(move || {
        for (n, stream) in listener.incoming().flatten().enumerate() {
            let serve = Arc::clone(&serve);
            std::thread::spawn(move || serve(n, stream));
        }
    });
    address
}

/// The head of the next request, or nothing at the end of the connection.
fn read_head(stream: impl Read) -> String {
    let mut head = String::new();
    let mut stream = BufReader::with_capacity(1, stream);
    while !head.ends_with("\r\n\r\n") && stream.read_line(&mut head).is_ok_and(|read| read > 0) {}
    head
}

fn patient() -> Timeouts {
    let limit = Duration::from_secs(30);
    Timeouts {
        connect: limit,
        response: limit,
        read: limit,
    }
}

fn request(method: Method, url: &str) -> Request {
    Request::new(method, Url::parse(url).unwrap())
}

fn block_on<T>(future: impl Future<Output = T>) -> T {
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    runtime.enable_all().build().unwrap().block_on(future)
}

/// The whole answer.
async fn ask(client: &Client, request: Request) -> Result<String> {
    let body = client.send(&request).await?.bytes(1000).await?;
    Ok(String::from_utf8(body).unwrap())
}

fn get(client: &Client, url: &str) -> Result<String> {
    block_on(ask(client, request(Method::GET, url)))
}

/// A server's configuration with a certificate for `hub.example` and `127.0.0.1`, and the certificate.
fn certified() -> (Arc<ServerConfig>, CertificateDer<'static>) {
    let names = vec!["hub.example".into(), "127.0.0.1".into()];
    let CertifiedKey { cert, signing_key } = generate_simple_self_signed(names).unwrap();
    let key = PrivateKeyDer::Pkcs8(signing_key.serialize_der().into());
    let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![cert.der().clone()], key)
        .unwrap();
    (Arc::new(config), cert.der().clone())
}

/// A client that trusts one certificate.
fn trusting(root: CertificateDer<'static>, proxy: Proxy) -> Client {
    let mut roots = RootCertStore::empty();
    roots.add(root).unwrap();
    let tls = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    Client::with_tls(tls, patient(), Route::Proxy(proxy))
}

fn serve_tls(config: &Arc<ServerConfig>, stream: TcpStream) -> String {
    let connection = ServerConnection::new(Arc::clone(config)).unwrap();
    let mut stream = StreamOwned::new(connection, stream);
    let head = read_head(&mut stream);
    if !head.is_empty() {
        stream.write_all(HELLO.as_bytes()).unwrap();
    }
    head
}

fn through(proxy: SocketAddr) -> Proxy {
    Proxy::from_env(|name| (name == "HTTPS_PROXY").then(|| format!("http://{proxy}"))).unwrap()
}

#[test]
fn connections_are_used_again() {
    let opened = Arc::new(Mutex::new(0));
    let count = Arc::clone(&opened);
    let address = server(move |_, mut stream| {
        *count.lock().unwrap() += 1;
        while !read_head(&stream).is_empty() {
            stream.write_all(HELLO.as_bytes()).unwrap();
        }
    });
    let client = Client::new(patient(), Proxy::default());
    block_on(async {
        for _ in 0..20 {
            let request = request(Method::GET, &format!("http://{address}/"));
            assert_eq!(ask(&client, request).await.unwrap(), "hello");
        }
    });
    assert_eq!(*opened.lock().unwrap(), 1);
}

#[test]
fn what_can_be_asked_twice_is_asked_again_on_a_closed_connection() {
    for (method, again) in [(Method::GET, true), (Method::POST, false)] {
        let heads = Arc::new(Mutex::new(Vec::new()));
        let seen = Arc::clone(&heads);
        // The first connection takes a second request and ends without an answer.
        let address = server(move |n, mut stream| {
            for asked in 0.. {
                let head = read_head(&stream);
                if head.is_empty() {
                    return;
                }
                seen.lock().unwrap().push(head);
                if n == 0 && asked == 1 {
                    return;
                }
                stream.write_all(HELLO.as_bytes()).unwrap();
            }
        });
        let client = Client::new(patient(), Proxy::default());
        let url = format!("http://{address}/");
        let (first, second) = block_on(async {
            let first = ask(&client, request(Method::GET, &url)).await;
            (first, ask(&client, request(method.clone(), &url)).await)
        });
        assert_eq!(first.unwrap(), "hello");
        assert_eq!(heads.lock().unwrap().len(), if again { 3 } else { 2 });
        match second {
            Ok(text) => assert!(again && text == "hello"),
            Err(ClientError::Unreachable { .. }) => assert!(!again),
            Err(e) => panic!("{e}"),
        }
    }
}

#[test]
fn a_server_that_closes_every_connection_is_left() {
    let heads = Arc::new(Mutex::new(0));
    let seen = Arc::clone(&heads);
    let address = server(move |_, stream| {
        read_head(&stream);
        *seen.lock().unwrap() += 1;
    });
    let client = Client::new(patient(), Proxy::default());
    let error = get(&client, &format!("http://{address}/x")).unwrap_err();
    assert!(error.is_transient(), "{error}");
    assert!(error.to_string().contains(&format!("http://{address}/x: ")));
    assert_eq!(*heads.lock().unwrap(), 2);
}

#[test]
fn an_unreachable_server_is_named_with_the_cause() {
    // Bound and not listened to.
    let free = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = free.local_addr().unwrap();
    drop(free);
    let client = Client::new(patient(), Proxy::default());
    for scheme in ["http", "https"] {
        let error = get(&client, &format!("{scheme}://{address}/x")).unwrap_err();
        let text = error.to_string();
        assert!(matches!(error, ClientError::Unreachable { .. }), "{text}");
        assert!(
            text.starts_with(&format!("{scheme}://{address}/x: ")),
            "{text}"
        );
        assert!(text.contains("os error"), "{text}");
    }
    let client = Client::new(patient(), through(address));
    let text = get(&client, "https://hub.example/")
        .unwrap_err()
        .to_string();
    assert!(text.starts_with(&format!("http://{address}/: ")), "{text}");
    assert!(text.contains("os error"), "{text}");
}

#[test]
fn private_addresses_are_connected_to_where_that_is_asked_for() {
    let opened = Arc::new(Mutex::new(0));
    let count = Arc::clone(&opened);
    let address = server(move |_, mut stream| {
        *count.lock().unwrap() += 1;
        read_head(&stream);
        stream.write_all(HELLO.as_bytes()).unwrap();
    });
    let client = Client::direct(patient(), Addresses::Public);
    let port = address.port();
    // Addresses, other ways to write them, and names.
    for origin in [
        "http://127.0.0.1",
        "https://127.0.0.1",
        "http://[::1]",
        "http://[::ffff:7f00:1]",
        "http://127.1",
        "http://localhost",
        "https://localhost",
    ] {
        let error = get(&client, &format!("{origin}:{port}/")).unwrap_err();
        assert!(matches!(error, ClientError::NotPublic { .. }), "{error}");
        assert!(!error.is_transient());
    }
    assert_eq!(*opened.lock().unwrap(), 0);
    let client = Client::direct(patient(), Addresses::Any);
    for host in ["127.0.0.1", "localhost"] {
        assert_eq!(
            get(&client, &format!("http://{host}:{port}/")).unwrap(),
            "hello"
        );
    }
    assert_eq!(*opened.lock().unwrap(), 2);
}

#[test]
fn every_wait_ends() {
    let short = Duration::from_millis(200);
    // It listens until the client leaves.
    let silent = server(|_, mut stream| drop(std::io::copy(&mut stream, &mut std::io::sink())));
    let stalled = server(|_, mut stream| {
        read_head(&stream);
        stream
            .write_all(&HELLO.as_bytes()[..HELLO.len() - 1])
            .unwrap();
        let _ = stream.read(&mut [0]);
    });
    let expect = |timeouts, proxy, url: &str, what: &str| {
        let client = Client::new(timeouts, proxy);
        let error = get(&client, url).unwrap_err();
        let text = error.to_string();
        assert!(matches!(error, ClientError::Timeout { .. }), "{text}");
        assert!(text.starts_with(url) && text.contains(what), "{text}");
    };
    let mut timeouts = patient();
    timeouts.connect = short;
    let url = format!("https://{silent}/x");
    expect(timeouts, Proxy::default(), &url, "while connecting");
    let url = "https://hub.example/x";
    expect(timeouts, through(silent), url, "while connecting");
    let mut timeouts = patient();
    timeouts.response = short;
    let url = format!("http://{silent}/x");
    expect(timeouts, Proxy::default(), &url, "waiting for an answer");
    let mut timeouts = patient();
    timeouts.read = short;
    let url = format!("http://{stalled}/x");
    expect(timeouts, Proxy::default(), &url, "reading an answer");
}

#[test]
fn bodies_are_bounded() {
    let address = server(|_, mut stream| {
        read_head(&stream);
        stream.write_all(HELLO.as_bytes()).unwrap();
    });
    let client = Client::new(patient(), Proxy::default());
    for (limit, fits) in [(5, true), (4, false), (0, false)] {
        let read = block_on(async {
            let request = request(Method::GET, &format!("http://{address}/"));
            client.send(&request).await?.bytes(limit).await
        });
        match read {
            Ok(body) => assert!(fits && body == b"hello"),
            Err(ClientError::Protocol { .. }) => assert!(!fits),
            Err(e) => panic!("{e}"),
        }
    }
}

#[test]
fn certificates_are_checked() {
    let (config, certificate) = certified();
    let opened = Arc::new(Mutex::new(0));
    let count = Arc::clone(&opened);
    let address = server(move |_, stream| {
        *count.lock().unwrap() += 1;
        serve_tls(&config, stream);
    });
    let url = format!("https://{address}/");
    let client = trusting(certificate, Proxy::default());
    assert_eq!(get(&client, &url).unwrap(), "hello");
    // Without a trusted issuer, or for another host.
    let strangers = Client::new(patient(), Proxy::default());
    let elsewhere = format!("https://localhost:{}/", address.port());
    for (client, url) in [(&strangers, &url), (&client, &elsewhere)] {
        let error = get(client, url).unwrap_err();
        let text = error.to_string();
        assert!(matches!(error, ClientError::Protocol { .. }), "{text}");
        assert!(
            text.starts_with(url.as_str()) && text.contains("certificate"),
            "{text}"
        );
        assert!(text.contains("\nhint: SSL_CERT_FILE"), "{text}");
        assert!(!error.is_transient());
    }
    assert_eq!(*opened.lock().unwrap(), 3, "nothing is tried again");
}

#[test]
fn a_tunnel_leads_to_the_server() {
    let (config, certificate) = certified();
    for version in ["HTTP/1.1", "HTTP/1.0"] {
        let heads = Arc::new(Mutex::new(Vec::new()));
        let (seen, config) = (Arc::clone(&heads), Arc::clone(&config));
        let proxy = server(move |_, mut stream| {
            let asked = read_head(&stream);
            write!(
                stream,
                "{version} 200 Connection established\r\nX: y\r\n\r\n"
            )
            .unwrap();
            let inside = serve_tls(&config, stream);
            *seen.lock().unwrap() = vec![asked, inside];
        });
        let client = trusting(certificate.clone(), through(proxy));
        assert_eq!(get(&client, "https://hub.example/x?y").unwrap(), "hello");
        drop(client);
        // The server's thread writes them down after the answer.
        while heads.lock().unwrap().is_empty() {
            std::thread::sleep(Duration::from_millis(1));
        }
        let heads = heads.lock().unwrap();
        let connect = "CONNECT hub.example:443 HTTP/1.1\r\nhost: hub.example:443\r\n";
        assert!(heads[0].starts_with(connect), "{heads:?}");
        assert!(heads[1].starts_with("GET /x?y HTTP/1.1\r\n"), "{heads:?}");
        assert!(heads[1].contains("host: hub.example\r\n"), "{heads:?}");
    }
}

#[test]
fn a_proxy_that_opens_no_tunnel_is_named() {
    for (answer, words) in [
        (
            "HTTP/1.1 407 Who are you?\r\nContent-Length: 0\r\n\r\n",
            "no tunnel: HTTP/1.1 407 Who are you?",
        ),
        // A body that never comes is not waited for.
        (
            "HTTP/1.0 403 Forbidden\r\nContent-Length: 9\r\n\r\n",
            "no tunnel: HTTP/1.0 403 Forbidden",
        ),
        (
            "HTTP/1.1 502 a\tb\r\n\r\n",
            "no tunnel: HTTP/1.1 502 a\\u{9}b",
        ),
        // A reason outside ASCII is dropped.
        (
            "HTTP/1.1 502 a\u{9b}31mb\r\n\r\n",
            "no tunnel: HTTP/1.1 502",
        ),
        ("HTTP/1.1 200 OK\r\n\r\nhello", "more than its answer"),
        ("HTTP/1.1 200", "connection closed"),
        ("\u{1b}[31m\r\n\r\n", "invalid HTTP version"),
    ] {
        let heads = Arc::new(Mutex::new(String::new()));
        let seen = Arc::clone(&heads);
        let proxy = server(move |_, mut stream| {
            *seen.lock().unwrap() = read_head(&stream);
            stream.write_all(answer.as_bytes()).unwrap();
            if answer.contains("Length: 9") {
                let _ = stream.read(&mut [0]);
            }
        });
        let client = Client::new(patient(), through(proxy));
        let error = get(&client, "https://[2001:db8::1]/x").unwrap_err();
        let text = error.to_string();
        assert!(text.starts_with(&format!("http://{proxy}/: ")), "{text}");
        assert!(text.contains(words), "{text}");
        assert!(!text.contains(char::is_control), "{text:?}");
        assert!(
            heads
                .lock()
                .unwrap()
                .starts_with("CONNECT [2001:db8::1]:443 HTTP/1.1\r\n")
        );
    }
}
