//! Offload metadata of a frame: checksum state and segmentation request.
//!
//! A frame inside the host is rarely complete. Its transport checksum may be blank, and it may stand for
//! many packets of the wire. These types describe the missing work. They guarantee nothing: metadata of
//! an untrusted sender is valid only after [`accept`](crate::accept).

/// Bytes from the start of the TCP header to its checksum field (RFC 9293, 3.1).
pub const TCP_CHECKSUM_OFFSET: u16 = 16;
/// Bytes from the start of the UDP header to its checksum field (RFC 768).
pub const UDP_CHECKSUM_OFFSET: u16 = 6;

/// Position of a blank checksum: first summed byte and field.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ChecksumPlace {
    /// First summed byte, from the start of the frame (VLAN tags included).
    pub start: u16,
    /// Bytes from `start` to the 16-bit checksum field.
    pub offset: u16,
}

impl ChecksumPlace {
    /// Returns the offset of the checksum field from the start of the frame.
    #[must_use]
    pub fn field(self) -> usize {
        usize::from(self.start) + usize::from(self.offset)
    }

    /// Returns the offset of the first byte after the checksum field.
    #[must_use]
    pub fn field_end(self) -> usize {
        self.field() + 2
    }
}

/// State of a frame's transport checksum.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Checksum {
    /// Unknown state: the field holds the sender's value, right or wrong.
    #[default]
    None,
    /// Blank checksum. Its field holds the folded, uncomplemented sum of the pseudo header. To complete it,
    /// sum from `start` to the end of the frame and store the complement at `start + offset`. Units and
    /// origin are as in [`ChecksumPlace`].
    Partial {
        /// First summed byte of the frame.
        start: u16,
        /// Bytes from `start` to the checksum field.
        offset: u16,
    },
    /// Verified on the way, or never left memory: no receiver needs to verify again.
    Verified,
}

impl Checksum {
    /// Returns the position of a blank checksum, if it is blank.
    #[must_use]
    pub fn place(self) -> Option<ChecksumPlace> {
        match self {
            Self::Partial { start, offset } => Some(ChecksumPlace { start, offset }),
            Self::None | Self::Verified => None,
        }
    }
}

impl From<ChecksumPlace> for Checksum {
    fn from(place: ChecksumPlace) -> Self {
        Self::Partial { start: place.start, offset: place.offset }
    }
}

/// Segmentation kind of a super-packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GsoKind {
    /// TCP segments over IPv4.
    TcpV4,
    /// TCP segments over IPv6.
    TcpV6,
    /// UDP segmentation (USO): datagrams of equal length, each with its own header.
    Udp,
    /// UDP fragmentation (UFO, deprecated): one datagram as IP fragments.
    UdpFragment,
}

impl GsoKind {
    /// Returns `true` if the segments are TCP segments.
    #[must_use]
    pub fn is_tcp(self) -> bool {
        matches!(self, Self::TcpV4 | Self::TcpV6)
    }

    /// Returns the bytes from the transport header to its checksum field.
    #[must_use]
    pub fn checksum_offset(self) -> u16 {
        if self.is_tcp() { TCP_CHECKSUM_OFFSET } else { UDP_CHECKSUM_OFFSET }
    }
}

/// Segmentation request of a super-packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Gso {
    pub kind: GsoKind,
    /// TCP with CWR set. The flag belongs on the first segment only (RFC 3168, 6.1.2); hardware without
    /// ECN support repeats it.
    pub ecn: bool,
    /// Payload bytes of each segment except the last (the MSS). For [`GsoKind::UdpFragment`]: bytes of IP
    /// payload in each fragment, with the UDP header of the first one.
    pub size: u16,
}

/// Offload metadata that accompanies a frame's bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct OffloadMeta {
    /// State of the transport checksum.
    pub checksum: Checksum,
    /// Segmentation request, if the frame stands for several packets of the wire.
    pub gso: Option<Gso>,
}

impl OffloadMeta {
    /// Complete frame with an unknown checksum.
    pub const PLAIN: Self = Self { checksum: Checksum::None, gso: None };

    /// Returns `true` if a port without offloads can send the frame: no blank checksum, no segmentation.
    #[must_use]
    pub fn is_finished(&self) -> bool {
        self.gso.is_none() && self.checksum.place().is_none()
    }
}
