//! Addresses: `http` and `https` only, without user names.

use crate::{ClientError, Result};
use hyper::Uri;
use hyper::http::uri::Authority;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use std::fmt;
use std::net::IpAddr;

/// Longest address; signed ones of content networks have some thousand characters.
const MAX_URL: usize = 16 << 10;

/// An absolute address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Url {
    uri: Uri,
}

impl Url {
    /// Reads an address.
    ///
    /// # Errors
    /// [`ClientError::Url`] for another scheme than `http` and `https`, a missing host, and user names
    /// in it, which would end up in messages and logs.
    pub fn parse(text: &str) -> Result<Self> {
        let bad = |reason| {
            // What may be a password is not said again.
            let url = text.rsplit_once('@').map_or(text, |(_, rest)| rest);
            let url = url.to_owned();
            Err(ClientError::Url { url, reason })
        };
        if text.len() > MAX_URL {
            return bad("it is too long");
        }
        let Ok(uri) = text.parse::<Uri>() else {
            return bad("expected something like https://host/path");
        };
        if !matches!(uri.scheme_str(), Some("http" | "https")) {
            return bad("expected http:// or https://");
        }
        match uri.authority() {
            Some(authority) if authority.as_str().contains('@') => {
                bad("user names do not belong in it")
            }
            // The library takes any digits, and has no port if they are too large.
            Some(authority)
                if has_port(authority) && !matches!(authority.port_u16(), Some(1..)) =>
            {
                bad("expected a port of 1 to 65535")
            }
            Some(authority) if !authority.host().is_empty() => Ok(Self { uri }),
            _ => bad("there is no host in it"),
        }
    }

    /// The address that a `Location` header means here.
    ///
    /// # Errors
    /// [`ClientError::Url`] when it is none.
    pub fn join(&self, location: &str) -> Result<Self> {
        if let Some(rest) = location.strip_prefix("//") {
            return Self::parse(&format!("{}://{rest}", self.scheme()));
        }
        match location.starts_with('/') {
            true => Self::parse(&format!("{}{location}", self.origin())),
            false => Self::parse(location),
        }
    }

    /// Scheme, host and port: what a token was meant for.
    pub fn origin(&self) -> String {
        let host = self.uri.host().unwrap_or_default().to_ascii_lowercase();
        format!("{}://{host}:{}", self.scheme(), self.port())
    }

    fn scheme(&self) -> &str {
        self.uri.scheme_str().unwrap_or_default()
    }

    /// Whether the connection is encrypted.
    pub fn is_tls(&self) -> bool {
        self.scheme() == "https"
    }

    /// The host, without the brackets of an IPv6 address.
    pub fn host(&self) -> &str {
        let host = self.uri.host().unwrap_or_default();
        host.trim_start_matches('[').trim_end_matches(']')
    }

    /// The port.
    pub fn port(&self) -> u16 {
        let usual = if self.is_tls() { 443 } else { 80 };
        self.uri.port_u16().unwrap_or(usual)
    }

    /// The path, without a query.
    pub fn path(&self) -> &str {
        self.uri.path()
    }

    /// Whether it leads to this machine.
    pub fn is_loopback(&self) -> bool {
        let address = self.host().parse::<IpAddr>();
        address.map_or(self.host().eq_ignore_ascii_case("localhost"), |a| {
            a.is_loopback()
        })
    }

    pub(super) fn uri(&self) -> &Uri {
        &self.uri
    }
}

impl From<Uri> for Url {
    /// Of an address that was read by [`Url::parse`], or made of one.
    fn from(uri: Uri) -> Self {
        Self { uri }
    }
}

impl fmt::Display for Url {
    /// Without the query, which may hold a signature that opens a door.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let authority = self
            .uri
            .authority()
            .map_or("", |authority| authority.as_str());
        write!(f, "{}://{authority}{}", self.scheme(), self.uri.path())
    }
}

/// Everything but the unreserved characters of RFC 3986.
const RESERVED: &AsciiSet = &NON_ALPHANUMERIC
    .remove(b'-')
    .remove(b'_')
    .remove(b'.')
    .remove(b'~');
const RESERVED_IN_PATH: &AsciiSet = &RESERVED.remove(b'/');

/// A path, with everything in its segments but letters, digits and `-_.~` as `%XX`.
pub(crate) fn encode_path(path: &str) -> String {
    utf8_percent_encode(path, RESERVED_IN_PATH).to_string()
}

/// One segment of a path; a `/` in it is no end of it.
pub(crate) fn encode_segment(segment: &str) -> String {
    utf8_percent_encode(segment, RESERVED).to_string()
}

/// Whether there is something behind a host and a colon.
fn has_port(authority: &Authority) -> bool {
    let rest = authority.as_str().strip_prefix(authority.host());
    rest.is_some_and(|rest| rest.len() > 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn addresses_are_read_and_joined() {
        let url = Url::parse("https://Hub.example/a/b?sig=secret").unwrap();
        assert_eq!(url.origin(), "https://hub.example:443");
        assert_eq!(url.to_string(), "https://Hub.example/a/b");
        let join = |location: &str| url.join(location).map(|url| url.to_string());
        assert_eq!(join("/c").unwrap(), "https://hub.example:443/c");
        assert_eq!(join("http://other:81/c").unwrap(), "http://other:81/c");
        assert_eq!(join("//cdn/c").unwrap(), "https://cdn/c");
        let six = Url::parse("http://[::1]:8080").unwrap();
        assert_eq!(
            (six.host(), six.port(), six.is_loopback()),
            ("::1", 8080, true)
        );
        assert_eq!(Url::parse("http://a:65535").unwrap().port(), 65_535);
        assert_eq!(Url::parse("http://a:/").unwrap().port(), 80);
        assert!(Url::parse("http://localhost/x").unwrap().is_loopback());
        assert!(
            !Url::parse("http://127.0.0.1.example/")
                .unwrap()
                .is_loopback()
        );
    }

    #[test]
    fn other_addresses_are_refused() {
        let long = format!("http://a/{}", "b".repeat(MAX_URL));
        for text in [
            "",
            "a",
            "a/b",
            "/etc/passwd",
            "file:///etc/passwd",
            "ftp://a",
            "http://",
            "http:///a",
            "http://user:password@a/",
            "https://a b/",
            "http://a/\nHost: b",
            "javascript:x",
            "http://a:65536/",
            "https://[::1]:99999",
            "http://a:0/",
            &long,
        ] {
            let error = Url::parse(text).unwrap_err().to_string();
            assert!(
                !error.contains("password@") && error.contains("no usable address"),
                "{error}"
            );
        }
    }

    #[test]
    fn paths_are_encoded() {
        assert_eq!(encode_segment("refs/pr/1"), "refs%2Fpr%2F1");
        assert_eq!(encode_path("a b/ü?#%.gguf"), "a%20b/%C3%BC%3F%23%25.gguf");
    }

    proptest! {
        #[test]
        fn nothing_panics(text in ".{0,60}", location in ".{0,60}") {
            let _ = Url::parse(&text);
            let _ = Url::parse(&format!("http://a/{}", encode_path(&text))).unwrap();
            let _ = Url::parse("http://a/b").unwrap().join(&location);
        }
    }
}
