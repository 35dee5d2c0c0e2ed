//! Offload metadata that travels with a frame.
//!
//! A frame inside the host is rarely finished: its transport checksum may be blank, and it may
//! stand for many packets of the wire. These types say what is missing. They carry no bytes and no
//! promise: metadata from an untrusted sender becomes trustworthy by [`accept`](crate::accept).

/// Octets from the start of the TCP header to its checksum field (RFC 9293, 3.1).
pub const TCP_CHECKSUM_OFFSET: u16 = 16;
/// Octets from the start of the UDP header to its checksum field (RFC 768).
pub const UDP_CHECKSUM_OFFSET: u16 = 6;

/// Where a blank checksum begins and where it is to be stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ChecksumPlace {
    /// First octet that is summed, counted from the start of the frame (VLAN tags included).
    pub start: u16,
    /// Octets from `start` to the 16-bit checksum field.
    pub offset: u16,
}

impl ChecksumPlace {
    /// Position of the checksum field, counted from the start of the frame.
    #[must_use]
    pub fn field(self) -> usize {
        usize::from(self.start) + usize::from(self.offset)
    }

    /// Position of the first octet after the checksum field.
    #[must_use]
    pub fn field_end(self) -> usize {
        self.field() + 2
    }
}

/// What is known about a frame's transport checksum.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Checksum {
    /// Nothing is known: the field holds what the sender put there, right or wrong.
    #[default]
    None,
    /// The checksum is blank. Its field holds the folded sum of the pseudo header (not
    /// complemented); whoever finishes it sums from `start` to the end of the frame and stores the
    /// complement at `start + offset`. Units and origin as in [`ChecksumPlace`].
    Partial {
        /// First octet that is summed.
        start: u16,
        /// Octets from `start` to the checksum field.
        offset: u16,
    },
    /// Somebody on the way has checked it, or it never left memory: no need to check again.
    Verified,
}

impl Checksum {
    /// The place of a blank checksum, if it is blank.
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

/// How a super-packet is to be split.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GsoKind {
    /// TCP segments over IPv4.
    TcpV4,
    /// TCP segments over IPv6.
    TcpV6,
    /// UDP segmentation (USO): datagrams of equal size, each with a header of its own.
    Udp,
    /// UDP fragmentation (UFO, deprecated): one datagram, cut into IP fragments.
    UdpFragment,
}

impl GsoKind {
    /// Whether the segments are TCP segments.
    #[must_use]
    pub fn is_tcp(self) -> bool {
        matches!(self, Self::TcpV4 | Self::TcpV6)
    }

    /// Octets from the transport header to its checksum field.
    #[must_use]
    pub fn checksum_offset(self) -> u16 {
        if self.is_tcp() { TCP_CHECKSUM_OFFSET } else { UDP_CHECKSUM_OFFSET }
    }
}

/// A super-packet's segmentation order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Gso {
    /// How to split.
    pub kind: GsoKind,
    /// TCP with CWR set: the flag belongs on the first segment only (RFC 3168, 6.1.2), which
    /// hardware without ECN support gets wrong.
    pub ecn: bool,
    /// Payload octets of each segment but the last (the MSS). For [`GsoKind::UdpFragment`]: octets
    /// of IP payload in each fragment, the UDP header of the first one counted.
    pub size: u16,
}

/// All that travels with a frame beside its bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct OffloadMeta {
    /// What is known about the transport checksum.
    pub checksum: Checksum,
    /// Segmentation order, if the frame stands for more than one packet of the wire.
    pub gso: Option<Gso>,
}

impl OffloadMeta {
    /// An ordinary, finished frame of which nothing is known.
    pub const PLAIN: Self = Self { checksum: Checksum::None, gso: None };

    /// Whether the frame can leave by a port that can do nothing: no blank checksum, no splitting.
    #[must_use]
    pub fn is_finished(&self) -> bool {
        self.gso.is_none() && self.checksum.place().is_none()
    }
}
