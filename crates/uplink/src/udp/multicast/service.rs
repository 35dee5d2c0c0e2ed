//! Services that use multicast: their groups, ports and hop limits.

use core::fmt;
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use core::str::FromStr;

use serde::{Deserialize, Serialize};

/// Service by which hosts of one link find each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Service {
    /// Multicast DNS (RFC 6762): names under `.local`, printers, media players.
    Mdns,
    /// Simple Service Discovery Protocol of UPnP: routers, media servers.
    Ssdp,
}

/// Group of a service, and the interface on which it is joined.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    pub service: Service,
    pub address: IpAddr,
    /// Name of the host's interface.
    pub interface: String,
}

/// Text that names no service.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("there is no multicast service `{0}`: choose of mdns and ssdp, separated by a comma")]
pub struct ServiceError(String);

const MDNS_GROUPS: [IpAddr; 2] = [
    IpAddr::V4(Ipv4Addr::new(224, 0, 0, 251)),
    IpAddr::V6(Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 0xfb)),
];
const SSDP_GROUPS: [IpAddr; 3] = [
    IpAddr::V4(Ipv4Addr::new(239, 255, 255, 250)),
    IpAddr::V6(Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 0xc)),
    IpAddr::V6(Ipv6Addr::new(0xff05, 0, 0, 0, 0, 0, 0, 0xc)),
];

impl Service {
    pub const ALL: [Service; 2] = [Service::Mdns, Service::Ssdp];

    /// Returns the name in options.
    pub fn name(self) -> &'static str {
        match self {
            Service::Mdns => "mdns",
            Service::Ssdp => "ssdp",
        }
    }

    /// Returns the port of all members of the groups.
    pub fn port(self) -> u16 {
        match self {
            Service::Mdns => 5353,
            Service::Ssdp => 1900,
        }
    }

    /// Returns the hop limit of datagrams to the groups (RFC 6762, section 11; UPnP Device Architecture, 1.1.2).
    pub fn hops(self) -> u8 {
        match self {
            Service::Mdns => 255,
            Service::Ssdp => 2,
        }
    }

    /// Returns the addresses of the groups.
    pub fn groups(self) -> &'static [IpAddr] {
        match self {
            Service::Mdns => &MDNS_GROUPS,
            Service::Ssdp => &SSDP_GROUPS,
        }
    }

    /// Returns `true` for the payload of a question, which may be answered to its sender alone.
    pub(super) fn asks(self, bytes: &[u8]) -> bool {
        match self {
            // The bit QR of the header is that of a response.
            Service::Mdns => bytes.get(2).is_some_and(|flags| flags & 0x80 == 0),
            Service::Ssdp => bytes.starts_with(b"M-SEARCH "),
        }
    }

    /// Returns `true` if an answer to a question may have this source port.
    pub(super) fn answers_from(self, port: u16) -> bool {
        match self {
            // RFC 6762, section 6: a response from another port is ignored.
            Service::Mdns => port == self.port(),
            Service::Ssdp => true,
        }
    }
}

impl FromStr for Service {
    type Err = ServiceError;

    fn from_str(text: &str) -> Result<Service, ServiceError> {
        let found = Service::ALL.into_iter().find(|service| service.name() == text);
        found.ok_or_else(|| ServiceError(text.to_owned()))
    }
}

impl fmt::Display for Service {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
