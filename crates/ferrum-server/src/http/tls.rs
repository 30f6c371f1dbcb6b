//! Encrypted connections: a certificate and its key from PEM files, which can be read anew while serving.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::{self, PemObject};
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::{self, ServerConfig};

/// Why a certificate cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file cannot be read, or there is nothing of the kind in it.
    #[error("{path}: expected a {wanted} in PEM: {source}")]
    Pem {
        /// Which file.
        path: PathBuf,
        /// What was looked for.
        wanted: &'static str,
        /// What was found.
        source: pem::Error,
    },
    /// There is no certificate in a file.
    #[error("{path}: there is no certificate in it")]
    NoCertificate {
        /// Which file.
        path: PathBuf,
    },
    /// Both were read, but they do not fit.
    #[error("{certificate} and {key} cannot be used together: {source}")]
    Unusable {
        /// File of the certificate.
        certificate: PathBuf,
        /// File of the key.
        key: PathBuf,
        /// What is wrong.
        source: rustls::Error,
    },
}

struct Files {
    certificate: PathBuf,
    key: PathBuf,
    current: RwLock<Arc<ServerConfig>>,
}

/// A certificate with its key. Clones are the same: what one reads anew, all have.
#[derive(Clone)]
pub struct Tls(Arc<Files>);

impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Tls").field(&self.0.certificate).finish()
    }
}

impl Tls {
    /// Reads a certificate (with those that signed it after it) and its private key.
    ///
    /// # Errors
    /// See [`TlsError`].
    pub fn load(certificate: PathBuf, key: PathBuf) -> Result<Self, TlsError> {
        let current = RwLock::new(read(&certificate, &key)?);
        Ok(Self(Arc::new(Files {
            certificate,
            key,
            current,
        })))
    }

    /// Reads the files anew, for connections to come. If that fails, what was there stays.
    ///
    /// # Errors
    /// See [`TlsError`].
    pub fn reload(&self) -> Result<(), TlsError> {
        let fresh = read(&self.0.certificate, &self.0.key)?;
        let current = self.0.current.write();
        *current.unwrap_or_else(PoisonError::into_inner) = fresh;
        Ok(())
    }

    pub(crate) fn acceptor(&self) -> TlsAcceptor {
        let current = self.0.current.read();
        let current = Arc::clone(&current.unwrap_or_else(PoisonError::into_inner));
        current.into()
    }
}

fn read(certificate: &Path, key: &Path) -> Result<Arc<ServerConfig>, TlsError> {
    let unusable = |source| TlsError::Unusable {
        certificate: certificate.to_owned(),
        key: key.to_owned(),
        source,
    };
    let wrong = |path: &Path, wanted| {
        let path = path.to_owned();
        move |source| TlsError::Pem {
            path,
            wanted,
            source,
        }
    };
    let chain = CertificateDer::pem_file_iter(certificate)
        .and_then(Iterator::collect::<Result<Vec<_>, _>>)
        .map_err(wrong(certificate, "certificate"))?;
    if chain.is_empty() {
        let path = certificate.to_owned();
        return Err(TlsError::NoCertificate { path });
    }
    let secret = PrivateKeyDer::from_pem_file(key).map_err(wrong(key, "private key"))?;
    let mut config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .and_then(|builder| {
            builder
                .with_no_client_auth()
                .with_single_cert(chain, secret)
        })
        .map_err(unusable)?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(Arc::new(config))
}
