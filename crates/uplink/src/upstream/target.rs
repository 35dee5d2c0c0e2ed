//! Target of a connection through a proxy.

use core::fmt;
use core::net::{IpAddr, SocketAddr};

use ringfence_policy::HostName;

/// Host that a proxy is asked for.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum TargetHost {
    Name(HostName),
    Address(IpAddr),
}

/// Host and port that a proxy is asked for.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Target {
    pub host: TargetHost,
    pub port: u16,
}

impl fmt::Display for Target {
    /// Writes the target of a CONNECT request.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.host {
            TargetHost::Name(name) => write!(f, "{name}:{}", self.port),
            TargetHost::Address(ip) => SocketAddr::new(*ip, self.port).fmt(f),
        }
    }
}
