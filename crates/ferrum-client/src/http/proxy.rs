//! Which proxy to go through, by the variables that all programs read.

use super::Url;
use crate::Result;

/// A proxy for encrypted connections, which it passes on unread. Open ones go directly: they are for this
/// machine and its neighbours.
#[derive(Debug, Clone, Default)]
pub struct Proxy {
    url: Option<Url>,
    /// Hosts, and ends of hosts' names, that are reached directly.
    except: Vec<String>,
}

impl Proxy {
    /// By `HTTPS_PROXY` or `ALL_PROXY`, and `NO_PROXY`, in capitals or small letters.
    ///
    /// # Errors
    /// [`crate::ClientError::Url`] when the proxy's address is none that can be used: it is not `http://`,
    /// or holds a password.
    pub fn from_env(variable: impl Fn(&str) -> Option<String>) -> Result<Self> {
        let read = |name: &str| {
            let value = variable(name).or_else(|| variable(&name.to_ascii_lowercase()));
            value.filter(|value| !value.trim().is_empty())
        };
        let url = read("HTTPS_PROXY").or_else(|| read("ALL_PROXY"));
        let url = url.map(|text| match text.contains("://") {
            true => Url::parse(&text),
            false => Url::parse(&format!("http://{text}")),
        });
        let except = read("NO_PROXY").unwrap_or_default();
        let except = except
            .split(',')
            .map(|host| host.trim().trim_start_matches('.'));
        Ok(Self {
            url: url.transpose()?,
            except: except
                .filter(|host| !host.is_empty())
                .map(str::to_ascii_lowercase)
                .collect(),
        })
    }

    /// The proxy for an address, if it is not reached directly.
    pub(super) fn for_url(&self, url: &Url) -> Option<&Url> {
        let host = url.host().to_ascii_lowercase();
        let direct = |except: &String| {
            let before = host.strip_suffix(except.as_str());
            except == "*" || before.is_some_and(|b| b.is_empty() || b.ends_with('.'))
        };
        let proxied = url.is_tls() && !url.is_loopback() && !self.except.iter().any(direct);
        self.url.as_ref().filter(|_| proxied)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_say_what_goes_where() {
        let env = |name: &str| match name {
            "https_proxy" => Some("proxy.local:3128".to_owned()),
            "NO_PROXY" => Some(".corp.example, mirror".to_owned()),
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
            ("https://mirror/", false),
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
        assert!(Proxy::from_env(|_| Some("socks5://a".into())).is_err());
        assert!(Proxy::from_env(|_| Some("http://me:secret@a".into())).is_err());
    }
}
