//! Groups of multicast that an uplink joins, as its configuration and its orders name them.

use std::fmt;
use std::net::IpAddr;

use ringfence_uplink::udp::multicast::service::{Group, Service};
use serde::{Deserialize, Serialize};

/// Service, group, and name of the interface of one socket.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct JoinedGroup {
    pub service: Service,
    pub address: IpAddr,
    pub interface: String,
}

impl JoinedGroup {
    pub(super) fn group(&self) -> Group {
        let JoinedGroup { service, address, interface } = self.clone();
        Group { service, address, interface }
    }
}

impl fmt::Display for JoinedGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "--multicast {}: {} on {}", self.service, self.address, self.interface)
    }
}

/// Groups in the uplink's configuration.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MulticastConfig {
    /// Services that the options name.
    pub services: Vec<Service>,
    /// Groups that were joined. Their sockets follow those of forwarded ports.
    pub joined: Vec<JoinedGroup>,
}

impl MulticastConfig {
    /// Returns `true` if there is no link for the services of the options.
    pub fn joins_nothing(&self) -> bool {
        self.joined.is_empty() && !self.services.is_empty()
    }
}
