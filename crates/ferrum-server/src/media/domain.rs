//! Hosts that images may be fetched from, as an operator lists them.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr};
use std::str::FromStr;

/// Longest name of a host.
const MAX_HOST: usize = 253;

/// Ports of an entry that names none: those of http and https.
const DEFAULT_PORTS: [u16; 2] = [80, 443];

/// An entry of the list: a host (`images.example.org`, `192.0.2.7`, `[::1]`), all subdomains of one (`*.example.org`) or all hosts
/// (`*`), with the usual ports, or with the one behind a colon.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MediaDomain {
    host: HostPattern,
    port: Option<u16>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum HostPattern {
    Any,
    /// Of this name, which is not among them.
    Subdomains(String),
    Name(String),
    Address(IpAddr),
}

impl MediaDomain {
    /// Whether images may be fetched from this port of this host (without the brackets of an IPv6 address).
    pub(super) fn allows(&self, host: &str, port: u16) -> bool {
        let ports = self.port.as_ref();
        ports
            .map_or(&DEFAULT_PORTS[..], std::slice::from_ref)
            .contains(&port)
            && self.host.matches(host)
    }

    /// Whether it names one host, rather than many of which nobody knows where they lead.
    pub(super) fn is_exact(&self) -> bool {
        matches!(self.host, HostPattern::Name(_) | HostPattern::Address(_))
    }
}

impl HostPattern {
    fn matches(&self, host: &str) -> bool {
        let address = host.parse::<IpAddr>().ok();
        match self {
            Self::Any => true,
            Self::Address(listed) => address == Some(*listed),
            Self::Name(name) => host.eq_ignore_ascii_case(name),
            Self::Subdomains(name) => {
                let host = host.to_ascii_lowercase();
                let below = host.strip_suffix(name.as_str());
                let below = below.and_then(|rest| rest.strip_suffix('.'));
                address.is_none() && below.is_some_and(|label| !label.is_empty())
            }
        }
    }
}

impl FromStr for MediaDomain {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || {
            format!(
                "found {text:?}, expected a host such as images.example.org, *.example.org or *, maybe with a port"
            )
        };
        let trimmed = text.trim();
        if let Ok(address) = trimmed.parse::<IpAddr>() {
            let host = HostPattern::Address(address);
            return Ok(Self { host, port: None });
        }
        let (host, port) = match trimmed.rsplit_once(':') {
            // The colon is one of an IPv6 address.
            Some(_) if trimmed.ends_with(']') => (trimmed, None),
            Some((host, port)) => {
                let port = port.parse::<u16>().ok().filter(|&port| port > 0);
                (host, Some(port.ok_or_else(wrong)?))
            }
            None => (trimmed, None),
        };
        let host = read_host(host).ok_or_else(wrong)?;
        Ok(Self { host, port })
    }
}

fn read_host(text: &str) -> Option<HostPattern> {
    if text == "*" {
        return Some(HostPattern::Any);
    }
    if let Some(address) = text.strip_prefix('[') {
        let address = address.strip_suffix(']')?.parse::<Ipv6Addr>().ok()?;
        return Some(HostPattern::Address(address.into()));
    }
    if let Some(name) = text.strip_prefix("*.") {
        // Addresses have no subdomains.
        let is_name = is_name(name) && name.parse::<IpAddr>().is_err();
        return is_name.then(|| HostPattern::Subdomains(name.to_ascii_lowercase()));
    }
    match text.parse() {
        Ok(address) => Some(HostPattern::Address(address)),
        Err(_) => is_name(text).then(|| HostPattern::Name(text.to_ascii_lowercase())),
    }
}

fn is_name(text: &str) -> bool {
    let is_label = |label: &str| {
        let known = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
        !label.is_empty() && label.chars().all(known)
    };
    text.len() <= MAX_HOST && text.split('.').all(is_label)
}

impl fmt::Display for MediaDomain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.host {
            HostPattern::Any => f.write_str("*")?,
            HostPattern::Subdomains(name) => write!(f, "*.{name}")?,
            HostPattern::Name(name) => f.write_str(name)?,
            HostPattern::Address(IpAddr::V6(address)) => write!(f, "[{address}]")?,
            HostPattern::Address(address) => write!(f, "{address}")?,
        }
        match self.port {
            Some(port) => write!(f, ":{port}"),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn domain(text: &str) -> MediaDomain {
        text.parse().unwrap_or_else(|e| panic!("{text}: {e}"))
    }

    #[test]
    fn entries_say_which_hosts_and_ports() {
        for (entry, host, port, allowed) in [
            ("example.org", "example.org", 443, true),
            ("example.org", "example.org", 80, true),
            ("Example.ORG", "EXAMPLE.org", 443, true),
            ("example.org", "example.org", 8080, false),
            ("example.org", "example.org.", 443, false),
            ("example.org", "a.example.org", 443, false),
            ("example.org", "example.org.evil.net", 443, false),
            ("example.org", "notexample.org", 443, false),
            ("example.org:8080", "example.org", 8080, true),
            ("example.org:8080", "example.org", 443, false),
            ("*.example.org", "a.example.org", 443, true),
            ("*.example.org", "A.b.Example.org", 80, true),
            ("*.example.org", "example.org", 443, false),
            ("*.example.org", ".example.org", 443, false),
            ("*.example.org", "notexample.org", 443, false),
            ("*.example.org", "a.example.org", 8080, false),
            ("*.example.org:8080", "a.example.org", 8080, true),
            ("*.0.1", "127.0.0.1", 80, false),
            ("*", "example.org", 443, true),
            ("*", "127.0.0.1", 80, true),
            ("*", "example.org", 8080, false),
            ("*:8080", "example.org", 8080, true),
            ("127.0.0.1", "127.0.0.1", 80, true),
            ("127.0.0.1", "127.1", 80, false),
            ("127.0.0.1:81", "127.0.0.1", 81, true),
            ("::1", "0:0:0:0:0:0:0:1", 80, true),
            ("[::1]", "::1", 80, true),
            ("[::1]:81", "::1", 81, true),
            ("[::1]:81", "::1", 80, false),
            ("::1", "::ffff:127.0.0.1", 80, false),
        ] {
            let found = domain(entry).allows(host, port);
            assert_eq!(found, allowed, "{entry}: {host}:{port}");
        }
    }

    #[test]
    fn entries_are_hosts() {
        for (text, printed, exact) in [
            (" example.org ", "example.org", true),
            ("Example.org:8080", "example.org:8080", true),
            ("localhost", "localhost", true),
            ("a_b.example.org", "a_b.example.org", true),
            ("10.0.0.1:80", "10.0.0.1:80", true),
            ("::1", "[::1]", true),
            ("[::1]:80", "[::1]:80", true),
            ("*.Example.org", "*.example.org", false),
            ("*", "*", false),
            ("*:443", "*:443", false),
        ] {
            let domain = domain(text);
            assert_eq!((&*domain.to_string(), domain.is_exact()), (printed, exact));
        }
        for text in [
            "",
            " ",
            ".",
            "a..b",
            ".a",
            "a.",
            "a b",
            "*a",
            "a.*",
            "*.*",
            "*.",
            "*.127.0.0.1",
            "https://a",
            "a/b",
            "a@b",
            "a:",
            "a:0",
            "a:65536",
            "a:x",
            "[::1",
            "[a]",
            "[::1]x",
            "ü.example",
            &"a".repeat(MAX_HOST + 1),
        ] {
            assert!(text.parse::<MediaDomain>().is_err(), "{text}");
        }
    }
}
