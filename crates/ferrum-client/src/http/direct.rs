//! Direct connections for URLs that somebody else chose, to public addresses only where that is asked for: what a server can
//! reach and its users cannot (itself, its network, a cloud's metadata) must not be fetched for them.
//!
//! A name is resolved once, and the connection goes to an address of that answer: whoever owns the name could give another answer
//! the second time (DNS rebinding).

use super::connect::{BoxError, Tcp, tcp_connector};
use super::{Url, unreachable};
use crate::{ClientError, Result};
use std::convert::Infallible;
use std::future::ready;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs};
use std::sync::Arc;
use std::thread;
use tokio::sync::{Semaphore, oneshot};
use tower::{ServiceExt, service_fn};

/// Most names that are looked up at a time. The system may take half a minute for one, and cannot be stopped.
const MAX_LOOKUPS: usize = 16;

/// The addresses that a client connects to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Addresses {
    /// Whatever a host's name resolves to.
    Any,
    /// Those of the public internet.
    Public,
}

/// Connects directly. It resolves names on threads of its own: those of the runtime may be few, and a name without an answer would
/// hold them up.
#[derive(Clone)]
pub(super) struct Direct {
    addresses: Addresses,
    places: Arc<Semaphore>,
}

impl Direct {
    pub(super) fn new(addresses: Addresses) -> Self {
        Self {
            addresses,
            places: Arc::new(Semaphore::new(MAX_LOOKUPS)),
        }
    }

    /// Connects to a host if it has an address of those that are allowed.
    pub(super) async fn dial(&self, url: &Url) -> Result<Tcp, BoxError> {
        let found = self.lookup(url).await;
        let mut found = found.map_err(|e| unreachable(url, &e))?;
        if self.addresses == Addresses::Public {
            found.retain(|address| is_public(address.ip()));
        }
        if found.is_empty() {
            let url = url.to_string();
            return Err(ClientError::NotPublic { url }.into());
        }
        // The connector tries several, and has no resolver but this answer.
        let checked = service_fn(move |_| ready(Ok::<_, Infallible>(found.clone().into_iter())));
        Ok(tcp_connector(checked).oneshot(url.uri().clone()).await?)
    }

    async fn lookup(&self, url: &Url) -> io::Result<Vec<SocketAddr>> {
        let (host, port) = (url.host().to_owned(), url.port());
        if let Ok(address) = host.parse::<IpAddr>() {
            return Ok(vec![(address, port).into()]);
        }
        let place = Arc::clone(&self.places).acquire_owned().await;
        let place = place.map_err(io::Error::other)?;
        let (tell, told) = oneshot::channel();
        let work = move || {
            let found = (host, port).to_socket_addrs();
            drop(place);
            // Nobody may wait any more.
            let _ = tell.send(found.map(Iterator::collect));
        };
        thread::Builder::new().name("lookup".into()).spawn(work)?;
        told.await.map_err(io::Error::other)?
    }
}

/// Whether an address belongs to the public internet: to none of the special-purpose blocks of IANA that are not globally
/// reachable (RFC 6890 and its registries), multicast included. IPv6 addresses that stand for IPv4 addresses are what those are.
fn is_public(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => is_public_v4(address),
        IpAddr::V6(address) => is_public_v6(address),
    }
}

fn is_public_v4(address: Ipv4Addr) -> bool {
    let special = match address.octets() {
        // This network, private, loopback.
        [0 | 10 | 127, ..] => true,
        // Shared by a provider's customers (100.64.0.0/10).
        [100, b, ..] => b & 0xc0 == 64,
        // Link-local, where clouds have their metadata.
        [169, 254, ..] => true,
        // Private (172.16.0.0/12).
        [172, b, ..] => b & 0xf0 == 16,
        // Protocol assignments, documentation, and what was 6to4's relay.
        [192, 0, 0 | 2, _] | [192, 88, 99, _] => true,
        [192, 168, ..] => true,
        // Benchmarks (198.18.0.0/15), documentation.
        [198, 18 | 19, ..] | [198, 51, 100, _] | [203, 0, 113, _] => true,
        // Multicast, reserved, broadcast.
        [224..=255, ..] => true,
        _ => false,
    };
    !special
}

fn is_public_v6(address: Ipv6Addr) -> bool {
    if let Some(address) = address.to_ipv4_mapped() {
        return is_public_v4(address);
    }
    let s = address.segments();
    let embedded = |high: u16, low: u16| {
        let ([a, b], [c, d]) = (high.to_be_bytes(), low.to_be_bytes());
        is_public_v4(Ipv4Addr::new(a, b, c, d))
    };
    match s {
        // NAT64: networks without IPv4 have their resolver make such addresses.
        [0x64, 0xff9b, 0, 0, 0, 0, high, low] => embedded(high, low),
        // Protocol assignments, with Teredo among them (2001::/23).
        [0x2001, b, ..] if b < 0x200 => false,
        // Documentation.
        [0x2001, 0xdb8, ..] => false,
        [0x3fff, b, ..] if b < 0x1000 => false,
        // 6to4.
        [0x2002, high, low, ..] => embedded(high, low),
        // All else that is global unicast: 2000::/3.
        [a, ..] => a & 0xe000 == 0x2000,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_addresses_of_the_public_internet_are_public() {
        for (text, public) in [
            ("1.1.1.1", true),
            ("8.8.8.8", true),
            ("100.63.255.255", true),
            ("100.128.0.0", true),
            ("172.15.255.255", true),
            ("172.32.0.0", true),
            ("192.0.1.0", true),
            ("192.167.255.255", true),
            ("198.17.255.255", true),
            ("198.20.0.0", true),
            ("223.255.255.255", true),
            ("0.0.0.0", false),
            ("0.1.2.3", false),
            ("10.0.0.1", false),
            ("100.64.0.0", false),
            ("100.127.255.255", false),
            ("127.0.0.1", false),
            ("127.255.255.255", false),
            ("169.254.169.254", false),
            ("172.16.0.0", false),
            ("172.31.255.255", false),
            ("192.0.0.8", false),
            ("192.0.2.1", false),
            ("192.88.99.1", false),
            ("192.168.1.1", false),
            ("198.18.0.0", false),
            ("198.19.255.255", false),
            ("198.51.100.1", false),
            ("203.0.113.1", false),
            ("224.0.0.1", false),
            ("239.255.255.255", false),
            ("240.0.0.1", false),
            ("255.255.255.255", false),
            ("2606:4700::1111", true),
            ("2001:200::1", true),
            ("2001:4860:4860::8888", true),
            ("3fff:1000::1", true),
            ("::ffff:8.8.8.8", true),
            ("64:ff9b::8.8.8.8", true),
            ("2002:808:808::1", true),
            ("::", false),
            ("::1", false),
            ("::8.8.8.8", false),
            ("::ffff:127.0.0.1", false),
            ("::ffff:10.0.0.1", false),
            ("64:ff9b::10.0.0.1", false),
            ("64:ff9b:1::8.8.8.8", false),
            ("100::1", false),
            ("2001::1", false),
            ("2001:1ff::1", false),
            ("2001:db8::1", false),
            ("2002:a00:1::1", false),
            ("2002:7f00:1::1", false),
            ("3fff::1", false),
            ("5f00::1", false),
            ("fc00::1", false),
            ("fdff::1", false),
            ("fe80::1", false),
            ("fec0::1", false),
            ("ff02::1", false),
        ] {
            assert_eq!(is_public(text.parse().unwrap()), public, "{text}");
        }
    }
}
