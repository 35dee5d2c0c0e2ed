//! Offload keys of a vif: the offloads that each end accepts, and the capabilities that follow.
//!
//! # Theory of operation
//!
//! Each end writes the offloads that it *accepts* into its own directory before it connects. The other end
//! reads each key once per connection. So a connection has two independent sets ([`VifFeatures`]): the
//! peer's keys limit this end's packets, and this end's keys limit the peer's packets:
//!
//! * without `feature-sg`, a packet is one slot, at most a page long;
//! * without `feature-gso-*`, no packet has a segmentation request;
//! * with `feature-no-csum-offload`, or without `feature-ipv6-csum-offload`, no checksum is blank.
//!
//! A packet that violates the keys is refused, and counted under the name of the rule. Egress processing
//! ([`ringfence_switch::egress`]) segments and checksums frames that the peer does not accept.

use core::fmt;
use core::str::FromStr;

use ringfence_memory::PAGE_SIZE;
use ringfence_offload::{Gso, GsoKind};
use ringfence_wire::netif::{extra, keys};
use ringfence_xenstore::{StoreAccess, StoreClient, StoreError};

use ringfence_frame::port::{ChecksumOffload, GsoOffload, LINK_HEADER_MAX, PortCapabilities};

/// Offloads that one end of a vif accepts.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct OffloadKeys {
    /// Frames of several slots (`feature-sg`).
    pub scatter_gather: bool,
    /// Super-packets of TCP over IPv4 (`feature-gso-tcpv4`).
    pub gso_tcp_v4: bool,
    /// Super-packets of TCP over IPv6 (`feature-gso-tcpv6`).
    pub gso_tcp_v6: bool,
    /// Blank checksums over IPv4 (`feature-no-csum-offload` is 0).
    pub checksum_ipv4: bool,
    /// Blank checksums over IPv6 (`feature-ipv6-csum-offload`).
    pub checksum_ipv6: bool,
}

/// Word that is not the name of an offload.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("`{0}` is no offload: give `all`, `none`, or some of {names}, with commas", names = OffloadKeys::ALL)]
pub struct UnknownOffload(pub String);

impl OffloadKeys {
    /// All offloads.
    pub const ALL: OffloadKeys = OffloadKeys {
        scatter_gather: true,
        gso_tcp_v4: true,
        gso_tcp_v6: true,
        checksum_ipv4: true,
        checksum_ipv6: true,
    };

    /// No offloads: frames of one slot with complete checksums.
    pub const NONE: OffloadKeys = OffloadKeys {
        scatter_gather: false,
        gso_tcp_v4: false,
        gso_tcp_v6: false,
        checksum_ipv4: false,
        checksum_ipv6: false,
    };

    fn named(self) -> [(&'static str, bool); 5] {
        [
            ("sg", self.scatter_gather),
            ("tso4", self.gso_tcp_v4),
            ("tso6", self.gso_tcp_v6),
            ("csum4", self.checksum_ipv4),
            ("csum6", self.checksum_ipv6),
        ]
    }

    /// Returns the keys for a directory of the store, and their values.
    pub(crate) fn entries(self) -> [(&'static str, &'static str); 5] {
        let digit = |on| if on { "1" } else { "0" };
        [
            (keys::FEATURE_SG, digit(self.scatter_gather)),
            (keys::FEATURE_GSO_TCPV4, digit(self.gso_tcp_v4)),
            (keys::FEATURE_GSO_TCPV6, digit(self.gso_tcp_v6)),
            (keys::FEATURE_NO_CSUM_OFFLOAD, digit(!self.checksum_ipv4)),
            (keys::FEATURE_IPV6_CSUM_OFFLOAD, digit(self.checksum_ipv6)),
        ]
    }

    /// Reads the keys in `directory`, each once.
    pub(crate) fn read(store: &mut StoreClient, directory: &str) -> Result<Self, StoreError> {
        let mut flag = |name: &str| store.read_flag(&format!("{directory}/{name}"));
        Ok(OffloadKeys {
            scatter_gather: flag(keys::FEATURE_SG)?,
            gso_tcp_v4: flag(keys::FEATURE_GSO_TCPV4)?,
            gso_tcp_v6: flag(keys::FEATURE_GSO_TCPV6)?,
            checksum_ipv4: !flag(keys::FEATURE_NO_CSUM_OFFLOAD)?,
            checksum_ipv6: flag(keys::FEATURE_IPV6_CSUM_OFFLOAD)?,
        })
    }

    /// Returns true if super-packets of this protocol are accepted.
    pub(crate) fn takes(self, protocol: extra::GsoProtocol) -> bool {
        match protocol {
            extra::GsoProtocol::TcpV4 => self.gso_tcp_v4,
            extra::GsoProtocol::TcpV6 => self.gso_tcp_v6,
        }
    }
}

impl fmt::Display for OffloadKeys {
    /// Writes the names with commas, or `none`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let on = self.named().into_iter().filter(|(_, on)| *on);
        let names: Vec<_> = on.map(|(name, _)| name).collect();
        f.write_str(if names.is_empty() { "none" } else { "" })?;
        f.write_str(&names.join(","))
    }
}

impl FromStr for OffloadKeys {
    type Err = UnknownOffload;

    fn from_str(text: &str) -> Result<Self, UnknownOffload> {
        let mut keys = OffloadKeys::NONE;
        for name in text.split(',').map(str::trim) {
            match name {
                "all" => keys = OffloadKeys::ALL,
                "none" => {}
                "sg" => keys.scatter_gather = true,
                "tso4" => keys.gso_tcp_v4 = true,
                "tso6" => keys.gso_tcp_v6 = true,
                "csum4" => keys.checksum_ipv4 = true,
                "csum6" => keys.checksum_ipv6 = true,
                other => return Err(UnknownOffload(other.to_owned())),
            }
        }
        Ok(keys)
    }
}

/// Negotiated offloads of a vif.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct VifFeatures {
    /// Offloads that the peer accepts: limits of this end's packets.
    pub peer: OffloadKeys,
    /// Offloads that this end accepts: limits of the peer's packets.
    pub own: OffloadKeys,
    /// Maximum number of bytes behind the Ethernet header.
    pub mtu: u16,
}

/// Maximum number of bytes behind the Ethernet header of a frame in one slot.
const MTU_OF_ONE_SLOT: u16 = 4078;
const _: () = assert!(MTU_OF_ONE_SLOT as usize + LINK_HEADER_MAX == PAGE_SIZE);

impl VifFeatures {
    pub(crate) fn capabilities(self) -> PortCapabilities {
        let OffloadKeys { scatter_gather, gso_tcp_v4, gso_tcp_v6, .. } = self.peer;
        let OffloadKeys { checksum_ipv4: ipv4, checksum_ipv6: ipv6, .. } = self.peer;
        PortCapabilities {
            checksum: ChecksumOffload::Netif { ipv4, ipv6 },
            // The request does not contain CWR; the segmenter reads it from the header.
            gso: GsoOffload { tcp_v4: gso_tcp_v4, tcp_v6: gso_tcp_v6, ecn: true, udp: false },
            scatter_gather,
            mtu: if scatter_gather { self.mtu } else { self.mtu.min(MTU_OF_ONE_SLOT) },
        }
    }
}

/// Converts netif's segmentation request to metadata. CWR is only in the header.
pub(crate) fn gso_from_extra(request: extra::Gso) -> Gso {
    let kind = match request.protocol {
        extra::GsoProtocol::TcpV4 => GsoKind::TcpV4,
        extra::GsoProtocol::TcpV6 => GsoKind::TcpV6,
    };
    Gso { kind, ecn: false, size: request.segment_size.get() }
}

/// Returns the extra info for a segmentation request. The result is `None` for kinds that netif cannot
/// express, which no vif's [`capabilities`](VifFeatures::capabilities) include.
pub(crate) fn extra_from_gso(gso: Gso) -> Option<extra::Extra> {
    let protocol = match gso.kind {
        GsoKind::TcpV4 => extra::GsoProtocol::TcpV4,
        GsoKind::TcpV6 => extra::GsoProtocol::TcpV6,
        GsoKind::Udp | GsoKind::UdpFragment => return None,
    };
    let segment_size = core::num::NonZeroU16::new(gso.size)?;
    Some(extra::Extra::Gso(extra::Gso { protocol, segment_size }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn displayed_names_parse_to_same_keys() {
        for bits in 0u8..32 {
            let bit = |n: u8| bits >> n & 1 == 1;
            let keys = OffloadKeys {
                scatter_gather: bit(0),
                gso_tcp_v4: bit(1),
                gso_tcp_v6: bit(2),
                checksum_ipv4: bit(3),
                checksum_ipv6: bit(4),
            };
            assert_eq!(keys.to_string().parse(), Ok(keys));
        }
        assert_eq!("all".parse(), Ok(OffloadKeys::ALL));
        let unknown = "sg,lro".parse::<OffloadKeys>().map_err(|error| error.to_string());
        let why = "`lro` is no offload: give `all`, `none`, or some of sg,tso4,tso6,csum4,csum6, with commas";
        assert_eq!(unknown, Err(why.to_owned()));
    }
}
