//! Which proxy to go through, by the variables that all programs read.

use super::Url;
use crate::{ClientError, Result};
use hyper_util::client::proxy::matcher::Matcher;
use std::sync::Arc;

/// A proxy for encrypted connections, which it passes on unread. Open ones go directly: they are for this
/// machine and its neighbours.
#[derive(Debug, Clone, Default)]
pub struct Proxy {
    matcher: Option<Arc<Matcher>>,
}

impl Proxy {
    /// By `HTTPS_PROXY` or `ALL_PROXY`, and `NO_PROXY`, in capitals or small letters. `NO_PROXY` lists hosts,
    /// ends of hosts' names, IP addresses and networks (`10.0.0.0/8`), or is `*`.
    ///
    /// # Errors
    /// [`ClientError::Url`] when the proxy's address is none that can be used: it is not `http://`,
    /// or holds a password.
    pub fn from_env(variable: impl Fn(&str) -> Option<String>) -> Result<Self> {
        let read = |name: &str| {
            let value = variable(name).or_else(|| variable(&name.to_ascii_lowercase()));
            value.filter(|value| !value.trim().is_empty())
        };
        let Some(text) = read("HTTPS_PROXY").or_else(|| read("ALL_PROXY")) else {
            return Ok(Self::default());
        };
        // The matcher would go directly where it cannot use an address, so it is checked before.
        let url = match text.contains("://") {
            true => Url::parse(&text)?,
            false => Url::parse(&format!("http://{text}"))?,
        };
        if url.is_tls() {
            let (url, reason) = (url.to_string(), "expected a proxy with http://");
            return Err(ClientError::Url { url, reason });
        }
        let except = read("NO_PROXY").unwrap_or_default();
        // To the matcher, this means all names and no IP address.
        if except.split(',').any(|host| host.trim() == "*") {
            return Ok(Self::default());
        }
        let matcher = Matcher::builder().https(url.to_string()).no(except);
        Ok(Self {
            matcher: Some(Arc::new(matcher.build())),
        })
    }

    /// The proxy for an address, if it is not reached directly.
    pub(super) fn for_url(&self, url: &Url) -> Option<Url> {
        let matcher = self.matcher.as_ref().filter(|_| !url.is_loopback())?;
        let found = matcher.intercept(url.uri())?;
        Some(Url::from(found.uri().clone()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_say_what_goes_where() {
        let env = |name: &str| match name {
            "https_proxy" => Some("proxy.local:3128".to_owned()),
            "NO_PROXY" => Some(".corp.example, mirror,10.1.0.0/16, 192.0.2.7,fd00::1".to_owned()),
            _ => None,
        };
        let proxy = Proxy::from_env(env).unwrap();
        for (url, through) in [
            ("https://hub.example/", true),
            ("http://hub.example/", false),
            ("https://localhost/", false),
            ("https://a.corp.example/", false),
            ("https://corp.example/", false),
            ("https://notcorp.example/", true),
            ("https://MIRROR:8443/", false),
            ("https://127.0.0.2/", false),
            ("https://[::1]/", false),
            ("https://10.1.2.3/", false),
            ("https://10.2.2.3/", true),
            ("https://192.0.2.7/", false),
            ("https://[fd00::1]/", false),
            ("https://[fd00::2]/", true),
        ] {
            let found = proxy.for_url(&Url::parse(url).unwrap());
            assert_eq!(found.is_some(), through, "{url}");
            assert!(found.is_none_or(|proxy| proxy.port() == 3128));
        }
        let none = Proxy::from_env(|_| None).unwrap();
        assert!(
            none.for_url(&Url::parse("https://hub.example/").unwrap())
                .is_none()
        );
        let all_direct = Proxy::from_env(|name| match name {
            "ALL_PROXY" => Some("http://proxy.local".to_owned()),
            "no_proxy" => Some("mirror, *".to_owned()),
            _ => None,
        });
        for url in ["https://hub.example/", "https://10.0.0.1/"] {
            let url = Url::parse(url).unwrap();
            assert!(all_direct.as_ref().unwrap().for_url(&url).is_none());
        }
        for (proxy, words) in [
            ("socks5://a", "expected http:// or https://"),
            ("https://a", "expected a proxy with http://"),
            ("http://me:secret@a", "user names do not belong in it"),
            ("me:secret@a", "user names do not belong in it"),
        ] {
            let error = Proxy::from_env(|_| Some(proxy.into())).unwrap_err();
            let error = error.to_string();
            assert!(
                error.contains(words) && !error.contains("secret"),
                "{error}"
            );
        }
    }
}
