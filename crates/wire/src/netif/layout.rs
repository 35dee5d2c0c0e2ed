//! Requests and responses of the tx and rx rings, as bytes and as values.

use crate::grant::Gref;
use crate::macros::enum_with_unknown;

enum_with_unknown! {
    /// Result of a request (`NETIF_RSP_*`). On rx, 0 and above is a length instead.
    pub enum Status(i16) {
        Dropped = -2,
        /// Packet that broke a rule, or whose pages could not be used.
        Error = -1,
        Okay = 0,
        /// Response to an extra info's slot; its id has no meaning.
        Null = 1,
    }
}

macro_rules! flag_set {
    ($(#[$type_doc:meta])* $name:ident { $($(#[$doc:meta])* $flag:ident = $bit:literal;)* }) => {
        $(#[$type_doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
        pub struct $name(pub u16);

        impl $name {
            /// Set without any flag.
            pub const NONE: $name = $name(0);
            $($(#[$doc])* pub const $flag: $name = $name($bit);)*

            /// Returns `true` if all flags of `wanted` are set.
            #[inline]
            pub fn contains(self, wanted: $name) -> bool {
                self.0 & wanted.0 == wanted.0
            }

            /// Returns these flags, plus those of `other` if `condition` holds.
            #[inline]
            #[must_use]
            pub fn with_if(self, condition: bool, other: $name) -> $name {
                if condition { $name(self.0 | other.0) } else { self }
            }

            /// Returns `true` if no flag but `DATA_VALIDATED` is set: the slot is a whole packet whose
            /// checksum needs no work.
            #[inline]
            pub fn is_plain(self) -> bool {
                self.0 & !$name::DATA_VALIDATED.0 == 0
            }

            /// Returns the checksum state that the first slot of a chain carries.
            #[inline]
            pub fn checksum(self) -> Checksum {
                Checksum {
                    blank: self.contains($name::CHECKSUM_BLANK),
                    validated: self.contains($name::DATA_VALIDATED),
                }
            }
        }

        impl From<Checksum> for $name {
            fn from(checksum: Checksum) -> $name {
                $name::NONE
                    .with_if(checksum.blank, $name::CHECKSUM_BLANK)
                    .with_if(checksum.validated, $name::DATA_VALIDATED)
            }
        }
    };
}

flag_set! {
    /// Flags of a tx request (`NETTXF_*`). Bits 0 and 1 have the opposite meaning on rx. Undefined bits
    /// are ignored.
    TxFlags {
        /// The protocol checksum is blank: the receiver must fill it in.
        CHECKSUM_BLANK = 0x1;
        /// The data was checked against the protocol checksum.
        DATA_VALIDATED = 0x2;
        /// The packet continues in the next request.
        MORE_DATA = 0x4;
        /// An extra info follows. Valid only in the first slot of a chain.
        EXTRA_INFO = 0x8;
    }
}

flag_set! {
    /// Flags of an rx response (`NETRXF_*`). Bits 0 and 1 have the opposite meaning on tx. Undefined bits
    /// are ignored.
    RxFlags {
        /// The data was checked against the protocol checksum.
        DATA_VALIDATED = 0x1;
        /// The protocol checksum is blank: the receiver must fill it in.
        CHECKSUM_BLANK = 0x2;
        /// The packet continues in the next response.
        MORE_DATA = 0x4;
        /// An extra info follows. Valid only in the first slot of a chain.
        EXTRA_INFO = 0x8;
        /// The slot is a GSO prefix: deprecated, never sent.
        GSO_PREFIX = 0x10;
    }
}

/// State of a packet's TCP or UDP checksum, the same for both directions.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Checksum {
    /// The field holds the sum of the pseudo header only: fill in the rest, or pass this flag on.
    pub blank: bool,
    /// The data is known to be good.
    pub validated: bool,
}

/// Tx request of 12 bytes: a fragment of a packet for the backend.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TxRequest {
    /// Page that holds the fragment.
    pub gref: Gref,
    pub offset: u16,
    pub flags: TxFlags,
    /// Id that the response echoes.
    pub id: u16,
    /// Length of the **whole packet** in the first slot of a chain, else of this fragment.
    pub size: u16,
}

impl TxRequest {
    /// Bytes on the ring.
    pub const SIZE: usize = 12;

    /// Decodes the request in a slot.
    #[inline]
    pub fn from_bytes(bytes: [u8; Self::SIZE]) -> TxRequest {
        let [g0, g1, g2, g3, o0, o1, f0, f1, i0, i1, s0, s1] = bytes;
        TxRequest {
            gref: Gref(u32::from_le_bytes([g0, g1, g2, g3])),
            offset: u16::from_le_bytes([o0, o1]),
            flags: TxFlags(u16::from_le_bytes([f0, f1])),
            id: u16::from_le_bytes([i0, i1]),
            size: u16::from_le_bytes([s0, s1]),
        }
    }

    /// Encodes the request for a slot.
    #[inline]
    pub fn to_bytes(self) -> [u8; Self::SIZE] {
        let [g0, g1, g2, g3] = self.gref.0.to_le_bytes();
        let [o0, o1] = self.offset.to_le_bytes();
        let [f0, f1] = self.flags.0.to_le_bytes();
        let [i0, i1] = self.id.to_le_bytes();
        let [s0, s1] = self.size.to_le_bytes();
        [g0, g1, g2, g3, o0, o1, f0, f1, i0, i1, s0, s1]
    }
}

/// Tx response of 4 bytes, at the head of a 12-byte slot: the backend has finished the slot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TxResponse {
    /// Id of the request; meaningless if the status is [`Status::Null`].
    pub id: u16,
    pub status: Status,
}

impl TxResponse {
    /// Bytes on the ring.
    pub const SIZE: usize = 4;

    /// Decodes the response in a slot.
    #[inline]
    pub fn from_bytes(bytes: [u8; Self::SIZE]) -> TxResponse {
        let [i0, i1, s0, s1] = bytes;
        TxResponse {
            id: u16::from_le_bytes([i0, i1]),
            status: Status::from_raw(i16::from_le_bytes([s0, s1])),
        }
    }

    /// Encodes the response for a slot.
    #[inline]
    pub fn to_bytes(self) -> [u8; Self::SIZE] {
        let [i0, i1] = self.id.to_le_bytes();
        let [s0, s1] = self.status.to_raw().to_le_bytes();
        [i0, i1, s0, s1]
    }
}

/// Rx request of 8 bytes: an empty page for the backend to fill.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RxRequest {
    /// Id that the response echoes.
    pub id: u16,
    pub gref: Gref,
}

impl RxRequest {
    /// Bytes on the ring.
    pub const SIZE: usize = 8;

    /// Decodes the request in a slot. Bytes 2 and 3 are padding.
    #[inline]
    pub fn from_bytes(bytes: [u8; Self::SIZE]) -> RxRequest {
        let [i0, i1, _, _, g0, g1, g2, g3] = bytes;
        RxRequest {
            id: u16::from_le_bytes([i0, i1]),
            gref: Gref(u32::from_le_bytes([g0, g1, g2, g3])),
        }
    }

    /// Encodes the request for a slot with zero padding.
    #[inline]
    pub fn to_bytes(self) -> [u8; Self::SIZE] {
        let [i0, i1] = self.id.to_le_bytes();
        let [g0, g1, g2, g3] = self.gref.0.to_le_bytes();
        [i0, i1, 0, 0, g0, g1, g2, g3]
    }
}

/// Rx response of 8 bytes: a fragment that the backend placed in a page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RxResponse {
    pub id: u16,
    /// Offset of the fragment in the page.
    pub offset: u16,
    pub flags: RxFlags,
    /// Length of this fragment in bytes, or a [`Status`] if negative.
    pub status: i16,
}

impl RxResponse {
    /// Bytes on the ring.
    pub const SIZE: usize = 8;

    /// Creates the response to a request that failed.
    pub fn failed(id: u16, status: Status) -> RxResponse {
        RxResponse { id, offset: 0, flags: RxFlags::NONE, status: status.to_raw() }
    }

    /// Returns the length, or the status of a failed request.
    #[inline]
    pub fn size(self) -> Result<u16, Status> {
        u16::try_from(self.status).map_err(|_| Status::from_raw(self.status))
    }

    /// Decodes the response in a slot.
    #[inline]
    pub fn from_bytes(bytes: [u8; Self::SIZE]) -> RxResponse {
        let [i0, i1, o0, o1, f0, f1, s0, s1] = bytes;
        RxResponse {
            id: u16::from_le_bytes([i0, i1]),
            offset: u16::from_le_bytes([o0, o1]),
            flags: RxFlags(u16::from_le_bytes([f0, f1])),
            status: i16::from_le_bytes([s0, s1]),
        }
    }

    /// Encodes the response for a slot.
    #[inline]
    pub fn to_bytes(self) -> [u8; Self::SIZE] {
        let [i0, i1] = self.id.to_le_bytes();
        let [o0, o1] = self.offset.to_le_bytes();
        let [f0, f1] = self.flags.0.to_le_bytes();
        let [s0, s1] = self.status.to_le_bytes();
        [i0, i1, o0, o1, f0, f1, s0, s1]
    }
}
