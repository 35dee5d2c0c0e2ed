//! Extra infos: metadata of a packet, one per slot.
//!
//! An extra info has 8 bytes: type u8 at 0, flags u8 at 1, and six that depend on the type. A tx ring
//! slot has four more bytes, which are ignored.

use super::EXTRAS_MAX;
use crate::macros::enum_with_unknown;
use arrayvec::ArrayVec;
use core::num::NonZeroU16;
use thiserror::Error;

enum_with_unknown! {
    /// Type of an extra info (`XEN_NETIF_EXTRA_TYPE_*`).
    pub enum ExtraType(u8) {
        /// Reserved type that is never valid.
        None = 0,
        /// Request to segment the packet.
        Gso = 1,
        /// Adds an address to the multicast filter.
        MulticastAdd = 2,
        /// Removes an address from the multicast filter.
        MulticastDel = 3,
        /// Hash of the packet's flow.
        Hash = 4,
        /// Headroom for XDP, defined in Linux's copy of the header only.
        Xdp = 5,
    }
}

enum_with_unknown! {
    /// Header fields that a hash covers (`_XEN_NETIF_CTRL_HASH_TYPE_*`): a bit number, not a mask.
    pub enum HashType(u8) {
        /// IPv4 addresses without ports.
        Ipv4 = 0,
        /// IPv4 addresses and TCP ports.
        Ipv4Tcp = 1,
        /// IPv6 addresses without ports.
        Ipv6 = 2,
        /// IPv6 addresses and TCP ports.
        Ipv6Tcp = 3,
    }
}

enum_with_unknown! {
    /// Hash algorithm (`XEN_NETIF_CTRL_HASH_ALGORITHM_*`).
    pub enum HashAlgorithm(u8) {
        None = 0,
        Toeplitz = 1,
    }
}

/// Flag: another extra info follows.
const MORE: u8 = 1;

/// Protocol of a packet that is to be segmented.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum GsoProtocol {
    /// TCP over IPv4 (`XEN_NETIF_GSO_TYPE_TCPV4`).
    TcpV4,
    /// TCP over IPv6 (`XEN_NETIF_GSO_TYPE_TCPV6`).
    TcpV6,
}

/// Request to segment a packet.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Gso {
    /// Claimed protocol of the packet. The headers may contradict it.
    pub protocol: GsoProtocol,
    /// Payload bytes of each segment except the last. The segmenting end bounds the number of segments.
    pub segment_size: NonZeroU16,
}

/// Hash of a packet's flow. The peer computed it, so it is only a hint.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct PacketHash {
    /// Header fields that the hash covers.
    pub kind: HashType,
    pub algorithm: HashAlgorithm,
    pub value: u32,
}

/// Request of a frontend about one group of its multicast filter.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum MulticastChange {
    /// Passes packets to this address.
    Add([u8; 6]),
    /// Stops passing packets to this address.
    Del([u8; 6]),
}

/// Reasons for which an extra info makes the packet unusable.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Error)]
pub enum ExtraError {
    /// Extra info of type 0.
    #[error("extra info of type 0, which is never valid")]
    InvalidType,
    /// Segment size of 0 bytes.
    #[error("segmentation into segments of 0 bytes")]
    GsoSizeZero,
    /// GSO type other than TCP over IPv4 or IPv6.
    #[error("segmentation of unknown type {kind}")]
    GsoUnknownType { kind: u8 },
}

/// Unvalidated extra info, as fetched.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RawExtra(pub [u8; RawExtra::SIZE]);

impl RawExtra {
    /// Bytes on the ring.
    pub const SIZE: usize = 8;

    /// Returns the type of the extra info.
    #[inline]
    pub fn kind(self) -> ExtraType {
        ExtraType::from_raw(self.0[0])
    }

    /// Returns `true` if another extra info follows.
    #[inline]
    pub fn has_more(self) -> bool {
        self.0[1] & MORE != 0
    }

    /// Validates the extra info.
    ///
    /// # Errors
    /// Returns [`ExtraError`]. An unknown type is no error.
    pub fn parse(self) -> Result<Extra, ExtraError> {
        let [kind, _, body @ ..] = self.0;
        let [b0, b1, b2, b3, b4, b5] = body;
        Ok(match self.kind() {
            ExtraType::None => return Err(ExtraError::InvalidType),
            ExtraType::Gso => {
                let size = u16::from_le_bytes([b0, b1]);
                let segment_size = NonZeroU16::new(size).ok_or(ExtraError::GsoSizeZero)?;
                let protocol = match b2 {
                    1 => GsoProtocol::TcpV4,
                    2 => GsoProtocol::TcpV6,
                    kind => return Err(ExtraError::GsoUnknownType { kind }),
                };
                // b4 and b5 hold feature bits; none is defined.
                Extra::Gso(Gso { protocol, segment_size })
            }
            ExtraType::MulticastAdd => Extra::Multicast(MulticastChange::Add(body)),
            ExtraType::MulticastDel => Extra::Multicast(MulticastChange::Del(body)),
            ExtraType::Hash => Extra::Hash(PacketHash {
                kind: HashType::from_raw(b0),
                algorithm: HashAlgorithm::from_raw(b1),
                value: u32::from_le_bytes([b2, b3, b4, b5]),
            }),
            ExtraType::Xdp => Extra::Xdp { headroom: u16::from_le_bytes([b0, b1]) },
            ExtraType::Unknown(_) => Extra::Unknown { kind, body },
        })
    }
}

/// Validated extra info of any type.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Extra {
    /// Request to segment the packet.
    Gso(Gso),
    Multicast(MulticastChange),
    Hash(PacketHash),
    /// Headroom before the packet for XDP.
    Xdp {
        /// Length of the headroom in bytes.
        headroom: u16,
    },
    /// Extra info of unknown type, which is skipped.
    Unknown {
        /// Type number, neither 0 nor a defined one.
        kind: u8,
        body: [u8; 6],
    },
}

impl Extra {
    /// Encodes the extra info for a slot; `more` announces another one. Inverse of [`RawExtra::parse`].
    pub fn emit(&self, more: bool) -> RawExtra {
        let (kind, body) = match *self {
            Extra::Gso(Gso { protocol, segment_size }) => {
                let [s0, s1] = segment_size.get().to_le_bytes();
                let protocol = match protocol {
                    GsoProtocol::TcpV4 => 1,
                    GsoProtocol::TcpV6 => 2,
                };
                (ExtraType::Gso, [s0, s1, protocol, 0, 0, 0])
            }
            Extra::Multicast(MulticastChange::Add(address)) => (ExtraType::MulticastAdd, address),
            Extra::Multicast(MulticastChange::Del(address)) => (ExtraType::MulticastDel, address),
            Extra::Hash(PacketHash { kind, algorithm, value }) => {
                let [v0, v1, v2, v3] = value.to_le_bytes();
                (ExtraType::Hash, [kind.to_raw(), algorithm.to_raw(), v0, v1, v2, v3])
            }
            Extra::Xdp { headroom } => {
                let [h0, h1] = headroom.to_le_bytes();
                (ExtraType::Xdp, [h0, h1, 0, 0, 0, 0])
            }
            Extra::Unknown { kind, body } => (ExtraType::from_raw(kind), body),
        };
        let [b0, b1, b2, b3, b4, b5] = body;
        RawExtra([kind.to_raw(), if more { MORE } else { 0 }, b0, b1, b2, b3, b4, b5])
    }
}

/// Extra infos of one packet. The last of each type counts; changes of the multicast filter all count.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Extras {
    /// Request to segment the packet.
    pub gso: Option<Gso>,
    pub hash: Option<PacketHash>,
    /// Headroom for XDP in bytes.
    pub xdp_headroom: Option<u16>,
    /// Changes of the multicast filter, in order.
    pub multicast: ArrayVec<MulticastChange, EXTRAS_MAX>,
    /// Number of skipped extra infos of unknown type.
    pub skipped: u32,
}

impl Extras {
    /// Adds the `count`-th extra info of the packet, counted from 1.
    pub(super) fn push(&mut self, count: usize, raw: RawExtra) -> Result<(), ExtraFault> {
        if count > EXTRAS_MAX {
            return Err(ExtraFault::TooMany);
        }
        match raw.parse().map_err(ExtraFault::Bad)? {
            Extra::Gso(gso) => self.gso = Some(gso),
            Extra::Hash(hash) => self.hash = Some(hash),
            Extra::Xdp { headroom } => self.xdp_headroom = Some(headroom),
            Extra::Multicast(change) => {
                self.multicast.try_push(change).map_err(|_| ExtraFault::TooMany)?;
            }
            Extra::Unknown { .. } => self.skipped += 1,
        }
        Ok(())
    }

    #[inline]
    pub(super) fn clear(&mut self) {
        self.gso = None;
        self.hash = None;
        self.xdp_headroom = None;
        self.multicast.clear();
        self.skipped = 0;
    }
}

/// Fault in the extra infos of a packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum ExtraFault {
    /// More extra infos than [`EXTRAS_MAX`].
    TooMany,
    /// First unusable extra info.
    Bad(ExtraError),
}
