//! The five offload keys of a vif: what an end says it takes, and what follows for both.
//!
//! # Theory of operation
//!
//! Each end writes what it *takes* into its own directory, before the other looks. A key is read once
//! per connection and holds as long as that lasts. So there are two sets ([`VifFeatures`]): what the
//! peer takes bounds what this end sends, and what this end said bounds what the peer may send. They
//! need not agree, and each key means something alone:
//!
//! * without `feature-sg` a packet is one slot, so nothing longer than a page goes that way;
//! * without `feature-gso-*` no packet carries a segmentation order;
//! * with `feature-no-csum-offload`, or without `feature-ipv6-csum-offload`, no checksum is blank.
//!
//! What is sent against them is refused by rule name. What the peer does not take is finished before
//! it leaves ([`ringfence_switch::egress`]).

use core::fmt;
use core::str::FromStr;

use ringfence_memory::PAGE_SIZE;
use ringfence_offload::{Gso, GsoKind};
use ringfence_wire::netif::{extra, keys};
use ringfence_xenstore::{StoreAccess, StoreClient, StoreError};

use ringfence_frame::port::{ChecksumOffload, GsoOffload, LINK_HEADER_MAX, PortCapabilities};

/// What one end of a vif takes.
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

/// A name that is none of an offload.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("`{0}` is no offload: give `all`, `none`, or some of {names}, with commas", names = OffloadKeys::ALL)]
pub struct UnknownOffload(pub String);

impl OffloadKeys {
    /// Everything.
    pub const ALL: OffloadKeys = OffloadKeys {
        scatter_gather: true,
        gso_tcp_v4: true,
        gso_tcp_v6: true,
        checksum_ipv4: true,
        checksum_ipv6: true,
    };

    /// Finished frames of one slot.
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

    /// The keys of a directory of the store, and their values.
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

    /// What the keys in `directory` say, each read once.
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

    /// Whether super-packets of that protocol are taken.
    pub(crate) fn takes(self, protocol: extra::GsoProtocol) -> bool {
        match protocol {
            extra::GsoProtocol::TcpV4 => self.gso_tcp_v4,
            extra::GsoProtocol::TcpV6 => self.gso_tcp_v6,
        }
    }
}

impl fmt::Display for OffloadKeys {
    /// The names, with commas; `none` when there are none.
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

/// What was negotiated for a vif, as far as the data path needs it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct VifFeatures {
    /// What the peer takes: what may be sent to it.
    pub peer: OffloadKeys,
    /// What this end said it takes: what the peer may send.
    pub own: OffloadKeys,
    /// Bytes behind the Ethernet header.
    pub mtu: u16,
}

/// Bytes behind the Ethernet header of a frame that fits one slot.
const MTU_OF_ONE_SLOT: u16 = 4078;
const _: () = assert!(MTU_OF_ONE_SLOT as usize + LINK_HEADER_MAX == PAGE_SIZE);

impl VifFeatures {
    pub(crate) fn capabilities(self) -> PortCapabilities {
        let OffloadKeys { scatter_gather, gso_tcp_v4, gso_tcp_v6, .. } = self.peer;
        let OffloadKeys { checksum_ipv4: ipv4, checksum_ipv6: ipv6, .. } = self.peer;
        PortCapabilities {
            checksum: ChecksumOffload::Netif { ipv4, ipv6 },
            // The order does not tell CWR; whoever segments finds it in the header.
            gso: GsoOffload { tcp_v4: gso_tcp_v4, tcp_v6: gso_tcp_v6, ecn: true, udp: false },
            scatter_gather,
            mtu: if scatter_gather { self.mtu } else { self.mtu.min(MTU_OF_ONE_SLOT) },
        }
    }
}

/// An order as the metadata has it, but for CWR, which the header tells.
pub(crate) fn order_of(order: extra::Gso) -> Gso {
    let kind = match order.protocol {
        extra::GsoProtocol::TcpV4 => GsoKind::TcpV4,
        extra::GsoProtocol::TcpV6 => GsoKind::TcpV6,
    };
    Gso { kind, ecn: false, size: order.segment_size.get() }
}

/// The extra info for an order; none for what netif cannot say, and what no vif's
/// [`capabilities`](VifFeatures::capabilities) take.
pub(crate) fn extra_of(gso: Gso) -> Option<extra::Extra> {
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
    fn names_read_back() {
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
