//! Upstream proxy: carries the guest's TCP connections to other hosts, on a network whose hosts reach others by a proxy alone.
//!
//! ```text
//! query a.org ──> egress policy ──> substitute address (shared by the engines)
//! SYN to it ────> egress policy ──> connection to the proxy ──> dialogue: CONNECT a.org:443 ──> SYN+ACK, or reset
//! ```
//!
//! The guest's SYN is answered once the proxy has accepted the connection. So the guest sends nothing before, and a refusal of
//! the proxy is a refused connection. A [`Dialogue`] is the client's side of HTTP ([`http`], RFC 9110, 9.3.6) or SOCKS version
//! 5 ([`socks`], RFC 1928, RFC 1929). It reads the proxy's answer, byte by byte and bounded, and no byte behind its end:
//! those are the server's.
//!
//! Without exception, no connection of the guest leads to the proxy itself: it could ask the proxy for what the policy denies.

pub mod dialogue;
pub mod fault;
#[cfg(any(test, feature = "test-utils"))]
pub mod fuzzing;
pub mod http;
pub mod settings;
pub mod socks;
pub mod step;
pub mod target;

use core::net::{IpAddr, SocketAddr};
use core::time::Duration;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ringfence_policy::HostName;
use ringfence_policy::substitutes::{NAMES_MAX, Substitutes};

use crate::access::Refusal;
pub use dialogue::Dialogue;
pub use fault::ProxyFault;
pub use settings::{Credentials, CredentialsError, ProxyKind, ProxySettings};
pub use step::Step;
pub use target::{Target, TargetHost};

/// Proxy of one guest, shared by its engines, with the substitute addresses of names.
#[derive(Debug)]
pub struct UpstreamProxy {
    settings: ProxySettings,
    substitutes: Mutex<Substitutes>,
}

impl UpstreamProxy {
    /// Creates the proxy of a guest that has addresses of these families, IPv4 first.
    pub fn new(settings: ProxySettings, families: [bool; 2]) -> Arc<UpstreamProxy> {
        let substitutes = Mutex::new(Substitutes::new(NAMES_MAX, families));
        Arc::new(UpstreamProxy { settings, substitutes })
    }

    /// Returns the table of substitute addresses.
    pub(crate) fn substitutes(&self) -> MutexGuard<'_, Substitutes> {
        self.substitutes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the proxy's address number `index`.
    pub(crate) fn address(&self, index: usize) -> Option<SocketAddr> {
        let ip = *self.settings.addresses.get(index)?;
        Some(SocketAddr::new(ip, self.settings.port))
    }

    /// Returns `true` if a connection of the host to this address leads to the proxy. `is_of_host` returns `true` for addresses of
    /// the host itself: a proxy on the host may listen at all of them.
    pub(crate) fn is_at(&self, to: SocketAddr, is_of_host: impl Fn(IpAddr) -> bool) -> bool {
        let is_same = |ip: &IpAddr| *ip == to.ip() || is_of_host(*ip) && is_of_host(to.ip());
        to.port() == self.settings.port && self.settings.addresses.iter().any(is_same)
    }

    /// Returns the destination of a connection to a substitute address, whose name the connection keeps.
    pub(crate) fn named(
        self: &Arc<Self>,
        to: SocketAddr,
        now: Duration,
    ) -> Result<Destination, Refusal> {
        let mut substitutes = self.substitutes();
        let name = substitutes.name(to.ip()).cloned().ok_or(Refusal::NoName)?;
        if to.port() == self.settings.port && name.as_str().eq_ignore_ascii_case(self.host()) {
            return Err(Refusal::Proxy);
        }
        substitutes.acquire(to.ip(), now);
        drop(substitutes);
        let lease = Some(Lease { proxy: Arc::clone(self), ip: to.ip() });
        let target = Target { host: TargetHost::Name(name), port: to.port() };
        Ok(Destination { proxy: Arc::clone(self), target, _lease: lease })
    }

    /// Returns the proxy's name without a final dot.
    fn host(&self) -> &str {
        self.settings.host.strip_suffix('.').unwrap_or(&self.settings.host)
    }

    /// Returns the destination of a connection to an address of another host.
    pub(crate) fn literal(self: &Arc<Self>, to: SocketAddr) -> Destination {
        let target = Target { host: TargetHost::Address(to.ip()), port: to.port() };
        Destination { proxy: Arc::clone(self), target, _lease: None }
    }
}

/// Use of a substitute address by one connection.
#[derive(Debug)]
struct Lease {
    proxy: Arc<UpstreamProxy>,
    ip: IpAddr,
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.proxy.substitutes().release(self.ip);
    }
}

/// Destination of a connection at the proxy. The substitute address of its name belongs to it.
#[derive(Debug)]
pub(crate) struct Destination {
    proxy: Arc<UpstreamProxy>,
    target: Target,
    _lease: Option<Lease>,
}

impl Destination {
    /// Returns the name of the destination, if it has one.
    pub(crate) fn name(&self) -> Option<&HostName> {
        match &self.target.host {
            TargetHost::Name(name) => Some(name),
            TargetHost::Address(_) => None,
        }
    }

    pub(crate) fn proxy(&self) -> &Arc<UpstreamProxy> {
        &self.proxy
    }

    /// Starts the dialogue with the proxy. Returns it with its first bytes.
    pub(crate) fn start(&self) -> (Dialogue, Vec<u8>) {
        Dialogue::start(&self.proxy.settings, &self.target)
    }
}

#[cfg(test)]
mod tests;
