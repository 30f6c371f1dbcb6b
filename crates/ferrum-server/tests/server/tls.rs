//! Encrypted connections, with certificates made for the test.

use super::{PATIENCE, Running};
use ferrum_server::{ServerConfig, Tls};
use rcgen::{CertifiedKey, KeyPair, generate_simple_self_signed};
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::CertificateDer;
use tokio_rustls::rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};

/// Writes a fresh certificate and its key, and gives the certificate.
fn write_pair(certificate: &Path, key: &Path) -> CertificateDer<'static> {
    let fresh = generate_simple_self_signed(vec!["localhost".into()]).unwrap();
    let CertifiedKey { cert, signing_key } = fresh;
    std::fs::write(certificate, cert.pem()).unwrap();
    std::fs::write(key, signing_key.serialize_pem()).unwrap();
    cert.der().clone()
}

/// What the server says to `GET /health`, if it is believed.
fn health(server: &Running, root: &CertificateDer<'static>) -> std::io::Result<String> {
    let mut roots = RootCertStore::empty();
    roots.add(root.clone()).unwrap();
    let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let name = "localhost".try_into().unwrap();
    let client = ClientConnection::new(Arc::new(config), name).unwrap();
    let socket = TcpStream::connect(server.address)?;
    socket.set_read_timeout(Some(PATIENCE))?;
    let mut stream = StreamOwned::new(client, socket);
    stream.write_all(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")?;
    let mut text = String::new();
    match stream.read_to_string(&mut text) {
        // The server may close without a last word.
        Err(e) if e.kind() != ErrorKind::UnexpectedEof => Err(e),
        _ => Ok(text),
    }
}

#[test]
fn connections_are_encrypted_and_certificates_are_renewed() {
    let folder = tempfile::tempdir().unwrap();
    let (certificate, key) = (
        folder.path().join("cert.pem"),
        folder.path().join("key.pem"),
    );
    let first = write_pair(&certificate, &key);
    let tls = Tls::load(certificate.clone(), key.clone()).unwrap();
    let server = Running::configured(ServerConfig {
        tls: Some(tls.clone()),
        read_timeout: Duration::from_millis(200),
        ..ServerConfig::default()
    });
    assert!(health(&server, &first).unwrap().starts_with("HTTP/1.1 200"));

    // Neither who speaks plainly nor who says nothing keeps a connection, or others from theirs.
    for said in [&b"GET /health HTTP/1.1\r\n\r\n"[..], b""] {
        let mut plain = TcpStream::connect(server.address).unwrap();
        plain.set_read_timeout(Some(PATIENCE)).unwrap();
        plain.write_all(said).unwrap();
        let mut answer = Vec::new();
        // It ends, whether by a close or by a reset.
        let _ = plain.read_to_end(&mut answer);
        assert!(!answer.starts_with(b"HTTP"), "{answer:?}");
    }

    let second = write_pair(&certificate, &key);
    assert!(health(&server, &second).is_err(), "not read yet");
    tls.reload().unwrap();
    assert!(
        health(&server, &second)
            .unwrap()
            .starts_with("HTTP/1.1 200")
    );
    assert!(health(&server, &first).is_err());

    std::fs::write(&key, "nothing").unwrap();
    assert!(tls.reload().is_err());
    assert!(health(&server, &second).is_ok(), "the one before stays");
}

#[test]
fn files_that_do_not_fit_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let (certificate, key) = (
        folder.path().join("cert.pem"),
        folder.path().join("key.pem"),
    );
    write_pair(&certificate, &key);
    let (empty, other) = (
        folder.path().join("empty.pem"),
        folder.path().join("other.pem"),
    );
    std::fs::write(&empty, "").unwrap();
    std::fs::write(&other, KeyPair::generate().unwrap().serialize_pem()).unwrap();
    let missing = folder.path().join("missing.pem");
    let cases = [
        (&missing, &key, "expected a certificate in PEM"),
        (&empty, &key, "there is no certificate in it"),
        (&key, &key, "there is no certificate in it"),
        (&certificate, &missing, "expected a private key in PEM"),
        (&certificate, &empty, "expected a private key in PEM"),
        (&certificate, &certificate, "expected a private key in PEM"),
        (&certificate, &other, "cannot be used together"),
    ];
    for (certificate, key, expected) in cases {
        let found = Tls::load(certificate.clone(), key.clone()).unwrap_err();
        assert!(found.to_string().contains(expected), "{found}");
    }
}
