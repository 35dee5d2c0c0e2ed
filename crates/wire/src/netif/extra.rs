//! Extra infos: what travels with a packet beside its data, one in a slot.
//!
//! 8 bytes: type u8 at 0, flags u8 at 1, and six that depend on the type. On the tx ring the slot
//! has four more, which mean nothing.

use super::EXTRAS_MAX;
use crate::macros::enum_with_unknown;
use arrayvec::ArrayVec;
use core::num::NonZeroU16;
use thiserror::Error;

enum_with_unknown! {
    /// What an extra info is about (`XEN_NETIF_EXTRA_TYPE_*`).
    pub enum ExtraType(u8) {
        /// Never to be used.
        None = 0,
        /// The packet is to be segmented.
        Gso = 1,
        /// Adds to the multicast filter.
        MulticastAdd = 2,
        /// Takes from the multicast filter.
        MulticastDel = 3,
        /// The hash of the packet's flow.
        Hash = 4,
        /// Headroom for XDP; in Linux's copy of the header only.
        Xdp = 5,
    }
}

enum_with_unknown! {
    /// The part of the headers that a hash was made of: a bit number, not a mask
    /// (`_XEN_NETIF_CTRL_HASH_TYPE_*`).
    pub enum HashType(u8) {
        /// IPv4 addresses.
        Ipv4 = 0,
        /// IPv4 addresses and TCP ports.
        Ipv4Tcp = 1,
        /// IPv6 addresses.
        Ipv6 = 2,
        /// IPv6 addresses and TCP ports.
        Ipv6Tcp = 3,
    }
}

enum_with_unknown! {
    /// How a hash was made (`XEN_NETIF_CTRL_HASH_ALGORITHM_*`).
    pub enum HashAlgorithm(u8) {
        /// Not at all.
        None = 0,
        /// Toeplitz.
        Toeplitz = 1,
    }
}

/// The flag that says that another extra info follows.
const MORE: u8 = 1;

/// What a packet to be segmented consists of.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum GsoProtocol {
    /// TCP over IPv4 (`XEN_NETIF_GSO_TYPE_TCPV4`).
    TcpV4,
    /// TCP over IPv6 (`XEN_NETIF_GSO_TYPE_TCPV6`).
    TcpV6,
}

/// A request to segment.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Gso {
    /// What the packet is said to be. The headers may say otherwise.
    pub protocol: GsoProtocol,
    /// Payload bytes of each segment but the last. Whoever segments bounds the number of segments.
    pub segment_size: NonZeroU16,
}

/// The hash of a packet's flow. Only a hint: the peer computed it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct PacketHash {
    /// Of what.
    pub kind: HashType,
    /// How.
    pub algorithm: HashAlgorithm,
    /// The hash.
    pub value: u32,
}

/// A change of the multicast filter.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum MulticastChange {
    /// Let packets to this address pass.
    Add([u8; 6]),
    /// No longer.
    Del([u8; 6]),
}

/// Why an extra info makes the packet unusable.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Error)]
pub enum ExtraError {
    /// Type 0.
    #[error("extra info of type 0, which is never valid")]
    InvalidType,
    /// Segments of no bytes.
    #[error("segmentation into segments of 0 bytes")]
    GsoSizeZero,
    /// Neither TCP over IPv4 nor over IPv6.
    #[error("segmentation of unknown type {kind}")]
    GsoUnknownType {
        /// The type.
        kind: u8,
    },
}

/// An extra info as fetched.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RawExtra(pub [u8; RawExtra::SIZE]);

impl RawExtra {
    /// Bytes on the ring.
    pub const SIZE: usize = 8;

    /// The type.
    #[inline]
    pub fn kind(self) -> ExtraType {
        ExtraType::from_raw(self.0[0])
    }

    /// Whether another extra info follows.
    #[inline]
    pub fn has_more(self) -> bool {
        self.0[1] & MORE != 0
    }

    /// What it says.
    ///
    /// # Errors
    /// [`ExtraError`]. An unknown type is no error.
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
                // b4, b5: feature bits, of which none is defined.
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

/// An extra info, understood.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Extra {
    /// Segment the packet.
    Gso(Gso),
    /// Change the multicast filter.
    Multicast(MulticastChange),
    /// The flow's hash.
    Hash(PacketHash),
    /// Bytes left free before the packet.
    Xdp {
        /// That many.
        headroom: u16,
    },
    /// A type that we do not know, to be skipped.
    Unknown {
        /// The type, neither 0 nor one of the above.
        kind: u8,
        /// The six bytes.
        body: [u8; 6],
    },
}

impl Extra {
    /// The bytes for a slot; `more` says that another extra info follows. The inverse of
    /// [`RawExtra::parse`].
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

/// The extra infos of one packet. Of several of one type the last counts, except for changes of the
/// multicast filter, which all do.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Extras {
    /// Segment the packet.
    pub gso: Option<Gso>,
    /// The flow's hash.
    pub hash: Option<PacketHash>,
    /// XDP headroom.
    pub xdp_headroom: Option<u16>,
    /// Changes of the multicast filter.
    pub multicast: ArrayVec<MulticastChange, EXTRAS_MAX>,
    /// Extra infos of unknown type, which were skipped.
    pub skipped: u32,
}

impl Extras {
    /// Takes the `count`-th extra info of the packet, counted from 1.
    pub(super) fn take(&mut self, count: usize, raw: RawExtra) -> Result<(), ExtraFault> {
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

/// What is wrong with the extra infos of a packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum ExtraFault {
    /// More than [`EXTRAS_MAX`].
    TooMany,
    /// One of them is unusable.
    Bad(ExtraError),
}
