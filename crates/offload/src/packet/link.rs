//! Ethernet header and VLAN tags.

use super::error::{Layer, ParseError};
use super::view::View;

/// Numbers of the EtherType field.
pub mod ethertype {
    /// Internet Protocol, version 4.
    pub const IPV4: u16 = 0x0800;
    /// Address Resolution Protocol for IPv4.
    pub const ARP: u16 = 0x0806;
    /// 802.1Q customer VLAN tag.
    pub const VLAN: u16 = 0x8100;
    /// Internet Protocol, version 6.
    pub const IPV6: u16 = 0x86dd;
    /// 802.1ad service tag (the outer tag of QinQ).
    pub const QINQ: u16 = 0x88a8;
}

/// Maximum parsed VLAN tags; a frame with more is [`Network::Other`](super::Network::Other).
pub const MAX_VLAN_TAGS: u8 = 2;

/// Length of an untagged Ethernet header in bytes.
const ETHERNET_LEN: u16 = 14;
/// Length of one tag in bytes.
const TAG_LEN: u16 = 4;

/// Link layer: Ethernet with zero to two tags.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Link {
    /// Number of tags in front of `ethertype`: 0 to [`MAX_VLAN_TAGS`].
    pub vlan_tags: u8,
    /// EtherType after the tags, or an 802.3 length if below 0x0600.
    pub ethertype: u16,
}

impl Link {
    /// Returns the length of the link header, tags included, which is the network header's offset.
    #[must_use]
    pub fn network_offset(self) -> u16 {
        ETHERNET_LEN + TAG_LEN * u16::from(self.vlan_tags)
    }

    pub(super) fn parse(frame: &View<'_>) -> Result<Self, ParseError> {
        let ethernet = frame.array::<14>(Layer::Ethernet, 0)?;
        let mut link =
            Self { vlan_tags: 0, ethertype: u16::from_be_bytes([ethernet[12], ethernet[13]]) };
        while link.is_tag() && link.vlan_tags < MAX_VLAN_TAGS {
            let [_, _, high, low] = *frame.array::<4>(Layer::Vlan, link.network_offset())?;
            link.vlan_tags += 1;
            link.ethertype = u16::from_be_bytes([high, low]);
        }
        Ok(link)
    }

    fn is_tag(self) -> bool {
        matches!(self.ethertype, ethertype::VLAN | ethertype::QINQ)
    }
}
