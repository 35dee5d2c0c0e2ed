//! Address filter of a switch port: limits a station to the addresses that were assigned to it.
//!
//! # Theory of operation
//!
//! [`AddressFilter::check`] reads the private copy of a frame's first bytes and passes the frame or
//! names the reason to drop it. The Ethernet source is not checked here: the switch compares it with
//! the port's fixed address ([`PortPolicy::mac`](super::PortPolicy::mac)).
//!
//! ```text
//! frame ─> fast path ── TCP or UDP, assigned source, no DHCP port ──────────────────> pass
//!              └──────> slow path ── ARP: sender ── IPv4, IPv6: source ── ND, ICMP, DHCP ─> pass, drop
//! ```
//!
//! The fast path compares bytes at fixed offsets and can only pass a frame. All other frames go to the slow
//! path, which parses the headers ([`Layers`]) and decides:
//!
//! * EtherTypes other than ARP, IPv4 and IPv6 are dropped, unless the station routes. The same rules hold
//!   behind VLAN tags (802.1Q, 802.1ad), up to
//!   [`MAX_VLAN_TAGS`](ringfence_offload::packet::MAX_VLAN_TAGS).
//! * ARP (RFC 826): the sender addresses are the port's. A probe without a sender address asks for an
//!   address of the port only (RFC 5227).
//! * IPv4, IPv6: the source address is the port's, unless the station routes. The unspecified address is
//!   for a DHCP client, for duplicate address detection, router solicitations and multicast listener reports.
//! * Neighbour discovery (RFC 4861): the source, the target of an advertisement and each link-layer
//!   address option are the port's. A message in a fragment is dropped (RFC 6980).
//! * Messages of routers (advertisements and redirects of ICMP and ICMPv6, renumbering) and of DHCP
//!   servers (RFC 2131, RFC 9915) are dropped, unless the station may advertise.
//!
//! # Protection against hidden headers
//!
//! A frame whose headers contradict themselves, or reach beyond the private copy or beyond the first
//! fragment (RFC 7112), is dropped. The port's owner cannot change the private copy after the check, so the
//! checked bytes are the bytes that are forwarded.

use core::net::IpAddr;

use ringfence_frame::batch::FrameView;
use ringfence_frame::counters::DropReason;
use ringfence_offload::Layers;
use ringfence_offload::packet::{Icmp, Ipv6, Network, Transport, Udp, ethertype, protocol};
use ringfence_sys::numbers::{bounded, usize_from};

use super::Mac;

/// Maximum number of IP addresses of one port.
pub const FILTER_ADDRESSES_MAX: usize = 16;

/// UDP ports of DHCP (RFC 2131, section 4.1).
const DHCP_SERVER: u16 = 67;
const DHCP_CLIENT: u16 = 68;
/// UDP ports of DHCPv6 (RFC 9915, section 7.2).
const DHCPV6_CLIENT: u16 = 546;
const DHCPV6_SERVER: u16 = 547;

/// ICMP message types (RFC 792, RFC 1256).
mod icmp {
    pub(super) const REDIRECT: u8 = 5;
    pub(super) const ROUTER_ADVERTISEMENT: u8 = 9;
}

/// ICMPv6 message types (RFC 4861, RFC 2710, RFC 3810, RFC 2894, RFC 3122, RFC 4286).
mod icmpv6 {
    pub(super) const LISTENER_REPORT: u8 = 131;
    pub(super) const LISTENER_DONE: u8 = 132;
    pub(super) const ROUTER_SOLICITATION: u8 = 133;
    pub(super) const ROUTER_ADVERTISEMENT: u8 = 134;
    pub(super) const NEIGHBOUR_SOLICITATION: u8 = 135;
    pub(super) const NEIGHBOUR_ADVERTISEMENT: u8 = 136;
    pub(super) const REDIRECT: u8 = 137;
    pub(super) const ROUTER_RENUMBERING: u8 = 138;
    pub(super) const INVERSE_SOLICITATION: u8 = 141;
    pub(super) const INVERSE_ADVERTISEMENT: u8 = 142;
    pub(super) const LISTENER_REPORT_V2: u8 = 143;
    pub(super) const MULTICAST_ROUTER_ADVERTISEMENT: u8 = 151;
    pub(super) const MULTICAST_ROUTER_TERMINATION: u8 = 153;
}

/// Link-layer address options of neighbour discovery (RFC 4861, section 4.6.1): source, target.
const LINK_LAYER_OPTIONS: [u8; 2] = [1, 2];

type Ipv4Bytes = [u8; 4];
type Ipv6Bytes = [u8; 16];
type Verdict = Result<(), DropReason>;

/// Filter by the addresses from which a port may send. See the [module](self).
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct AddressFilter {
    mac: Mac,
    v4: Vec<Ipv4Bytes>,
    /// Assigned addresses; the last is the link-local address that follows from `mac`.
    v6: Vec<Ipv6Bytes>,
    forwarding: bool,
    advertising: bool,
}

impl AddressFilter {
    /// Creates the filter of a station with this Ethernet address and the first [`FILTER_ADDRESSES_MAX`] of
    /// these IP addresses. The link-local address that follows from `mac` is assigned too.
    pub fn new(mac: Mac, addresses: impl IntoIterator<Item = IpAddr>) -> AddressFilter {
        let mut filter = AddressFilter {
            mac,
            v4: Vec::new(),
            v6: Vec::new(),
            forwarding: false,
            advertising: false,
        };
        for address in addresses.into_iter().take(FILTER_ADDRESSES_MAX) {
            match address {
                IpAddr::V4(ip) => filter.v4.push(ip.octets()),
                IpAddr::V6(ip) => filter.v6.push(ip.octets()),
            }
        }
        filter.v6.push(link_local(mac));
        filter
    }

    /// Passes packets from any IP source and of any EtherType if `forwarding` is set, for a station that
    /// routes. ARP, neighbour discovery and the messages of routers and DHCP servers are still checked.
    #[must_use]
    pub fn forwarding(self, forwarding: bool) -> AddressFilter {
        AddressFilter { forwarding, ..self }
    }

    /// Passes messages of routers and DHCP servers if `advertising` is set.
    #[must_use]
    pub fn advertising(self, advertising: bool) -> AddressFilter {
        AddressFilter { advertising, ..self }
    }

    /// Checks a frame of the port.
    ///
    /// # Errors
    ///
    /// Returns the reason for which the frame must be dropped.
    #[inline]
    pub fn check(&self, frame: &FrameView<'_>) -> Verdict {
        let header = frame.header();
        if self.fast_path_passes(header) { Ok(()) } else { self.slow_path(header, frame.len()) }
    }

    /// Fast path: returns `true` for TCP and UDP packets of the common form that break no rule. After
    /// `false` the slow path must decide.
    #[inline]
    pub(crate) fn fast_path_passes(&self, header: &[u8]) -> bool {
        let Some(h) = header.first_chunk::<38>() else { return false };
        match [h[12], h[13]] {
            [0x08, 0x00] => {
                let source = [h[26], h[27], h[28], h[29]];
                let fragment = u16::from_be_bytes([h[20], h[21]]) & 0x3fff != 0;
                h[14] == 0x45
                    && (self.v4.contains(&source) || self.forwarding)
                    && (h[23] == protocol::TCP
                        || h[23] == protocol::UDP && !fragment && is_plain_udp(&h[34..]))
            }
            [0x86, 0xdd] => {
                let Some(h) = header.first_chunk::<58>() else { return false };
                let Some(source) = h[22..].first_chunk::<16>() else { return false };
                h[14] >> 4 == 6
                    && (self.v6.contains(source) || self.forwarding)
                    && (h[20] == protocol::TCP || h[20] == protocol::UDP && is_plain_udp(&h[54..]))
            }
            _ => false,
        }
    }

    /// Slow path: parses and checks any frame of `len` bytes that begins with `header`.
    #[cold]
    pub(crate) fn slow_path(&self, header: &[u8], len: usize) -> Verdict {
        let len = bounded(len, u32::MAX);
        let layers = Layers::parse(header, len).map_err(|_| DropReason::BadHeaders)?;
        let packet = &header[usize::from(layers.network_offset()).min(header.len())..];
        match layers.network() {
            Network::Arp => self.check_arp(packet),
            Network::Ipv4(_) => {
                let source = field::<4>(packet, 12)?;
                self.check_v4(source, layers.transport(), header)
            }
            Network::Ipv6(ip) => {
                let source = field::<16>(packet, 8)?;
                self.check_v6(source, ip, &layers, header)
            }
            Network::Other(other) if self.forwarding && is_untagged_protocol(other) => Ok(()),
            Network::Other(_) => Err(DropReason::UnknownProtocol),
        }
    }

    fn check_arp(&self, packet: &[u8]) -> Verdict {
        const ETHERNET_IPV4: [u8; 6] = {
            let [high, low] = ethertype::IPV4.to_be_bytes();
            [0, 1, high, low, 6, 4]
        };
        let operation = field::<2>(packet, 6)?;
        let known = matches!(u16::from_be_bytes(operation), 1 | 2);
        if field::<6>(packet, 0)? != ETHERNET_IPV4 || !known {
            return Err(DropReason::BadHeaders);
        }
        let (sender, target) = (field::<4>(packet, 14)?, field::<4>(packet, 24)?);
        let claimed = if sender == [0; 4] { target } else { sender };
        if field::<6>(packet, 8)? != self.mac || !self.v4.contains(&claimed) {
            return Err(DropReason::SpoofedAddress);
        }
        Ok(())
    }

    fn check_v4(&self, source: Ipv4Bytes, transport: Transport, header: &[u8]) -> Verdict {
        let ports = match transport {
            Transport::Udp(udp) => Some(ports_of(udp, header)?),
            _ => None,
        };
        let asks_for_address = source == [0; 4] && ports == Some((DHCP_CLIENT, DHCP_SERVER));
        if !self.forwarding && !self.v4.contains(&source) && !asks_for_address {
            return Err(DropReason::SpoofedAddress);
        }
        match (transport, ports) {
            _ if self.advertising => Ok(()),
            (
                Transport::Icmp(Icmp { kind: icmp::REDIRECT | icmp::ROUTER_ADVERTISEMENT, .. }),
                _,
            ) => Err(DropReason::RouterMessage),
            (_, Some((DHCP_SERVER, _) | (_, DHCP_CLIENT))) => Err(DropReason::DhcpServer),
            _ => Ok(()),
        }
    }

    fn check_v6(&self, source: Ipv6Bytes, ip: Ipv6, layers: &Layers, header: &[u8]) -> Verdict {
        let message = match layers.transport() {
            Transport::Icmpv6(message) => Some(message),
            _ => None,
        };
        let unspecified = source == [0; 16];
        let may_lack_source = message.is_some_and(|message| {
            matches!(
                message.kind,
                icmpv6::ROUTER_SOLICITATION
                    | icmpv6::NEIGHBOUR_SOLICITATION
                    | icmpv6::LISTENER_REPORT
                    | icmpv6::LISTENER_DONE
                    | icmpv6::LISTENER_REPORT_V2
            )
        });
        let own = self.v6.contains(&source) || (unspecified && may_lack_source);
        if !own && !self.forwarding {
            return Err(DropReason::SpoofedAddress);
        }
        if let Some(message) = message {
            let source = SourceKind { own, unspecified };
            return self.check_icmpv6(message, source, ip, layers, header);
        }
        let Transport::Udp(udp) = layers.transport() else { return Ok(()) };
        match ports_of(udp, header)? {
            (DHCPV6_SERVER, _) | (_, DHCPV6_CLIENT) if !self.advertising => {
                Err(DropReason::DhcpServer)
            }
            _ => Ok(()),
        }
    }

    fn check_icmpv6(
        &self,
        message: Icmp,
        SourceKind { own, unspecified }: SourceKind,
        ip: Ipv6,
        layers: &Layers,
        header: &[u8],
    ) -> Verdict {
        let options = match message.kind {
            icmpv6::REDIRECT
            | icmpv6::ROUTER_ADVERTISEMENT
            | icmpv6::ROUTER_RENUMBERING
            | icmpv6::MULTICAST_ROUTER_ADVERTISEMENT..=icmpv6::MULTICAST_ROUTER_TERMINATION
                if !self.advertising =>
            {
                return Err(DropReason::RouterMessage);
            }
            icmpv6::INVERSE_SOLICITATION | icmpv6::INVERSE_ADVERTISEMENT => {
                return Err(DropReason::UnknownProtocol);
            }
            icmpv6::ROUTER_SOLICITATION => 8,
            icmpv6::ROUTER_ADVERTISEMENT => 16,
            icmpv6::NEIGHBOUR_SOLICITATION | icmpv6::NEIGHBOUR_ADVERTISEMENT => 24,
            icmpv6::REDIRECT => 40,
            _ => return Ok(()),
        };
        if ip.fragment.is_some() {
            return Err(DropReason::BadHeaders);
        }
        let end = usize_from(layers.network_end());
        let message_bytes = header.get(usize::from(message.offset)..end);
        let bytes = message_bytes.ok_or(DropReason::BadHeaders)?;
        let claims_target = message.kind == icmpv6::NEIGHBOUR_ADVERTISEMENT
            || message.kind == icmpv6::NEIGHBOUR_SOLICITATION && unspecified;
        if !own || claims_target && !self.v6.contains(&field::<16>(bytes, 8)?) {
            return Err(DropReason::SpoofedAddress);
        }
        let options = bytes.get(options..).ok_or(DropReason::BadHeaders)?;
        if message.kind == icmpv6::REDIRECT {
            // The link-layer address option of a redirect names another station on purpose.
            return Ok(());
        }
        self.check_options(options, unspecified)
    }

    /// Checks the options of a neighbour discovery message. Each link-layer address must be the port's; a
    /// message without a source must have none.
    fn check_options(&self, mut options: &[u8], unspecified: bool) -> Verdict {
        while let [kind, units, ..] = *options {
            let len = usize::from(units) * 8;
            let option = options.get(..len).filter(|option| !option.is_empty());
            let option = option.ok_or(DropReason::BadHeaders)?;
            if LINK_LAYER_OPTIONS.contains(&kind)
                && (unspecified || len != 8 || option[2..] != self.mac)
            {
                return Err(DropReason::SpoofedAddress);
            }
            options = &options[len..];
        }
        if options.is_empty() { Ok(()) } else { Err(DropReason::BadHeaders) }
    }
}

/// Facts about a packet's IPv6 source.
#[derive(Clone, Copy)]
struct SourceKind {
    /// Set if the port may send from the source.
    own: bool,
    /// Set if the source is `::`.
    unspecified: bool,
}

/// Returns `true` for an EtherType that is neither a VLAN tag nor an 802.3 length.
fn is_untagged_protocol(number: u16) -> bool {
    number >= 0x0600 && !matches!(number, ethertype::VLAN | ethertype::QINQ)
}

/// Returns the link-local address that follows from an Ethernet address (RFC 4291, appendix A).
fn link_local(mac: Mac) -> Ipv6Bytes {
    let [a, b, c, d, e, f] = mac;
    [0xfe, 0x80, 0, 0, 0, 0, 0, 0, a ^ 2, b, c, 0xff, 0xfe, d, e, f]
}

/// Copies a header field of `N` bytes.
fn field<const N: usize>(bytes: &[u8], at: usize) -> Result<[u8; N], DropReason> {
    bytes.get(at..).and_then(|rest| rest.first_chunk()).copied().ok_or(DropReason::BadHeaders)
}

/// Returns the source and destination port of a datagram.
fn ports_of(udp: Udp, header: &[u8]) -> Result<(u16, u16), DropReason> {
    let [a, b, c, d] = field(header, usize::from(udp.offset))?;
    Ok((u16::from_be_bytes([a, b]), u16::from_be_bytes([c, d])))
}

/// Returns `true` if neither port is one of DHCP or DHCPv6.
#[inline]
fn is_plain_udp(header: &[u8]) -> bool {
    let [a, b, c, d, ..] = *header else { return false };
    let dhcp = |port| matches!(port, DHCP_SERVER | DHCP_CLIENT | DHCPV6_CLIENT | DHCPV6_SERVER);
    !dhcp(u16::from_be_bytes([a, b])) && !dhcp(u16::from_be_bytes([c, d]))
}

#[cfg(test)]
mod tests;
