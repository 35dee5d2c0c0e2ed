//! Requests and responses of both rings, as bytes and as values.

use crate::grant::Gref;
use crate::macros::enum_with_unknown;

enum_with_unknown! {
    /// How a request ended (`NETIF_RSP_*`). On rx, 0 and above is a size instead.
    pub enum Status(i16) {
        /// The packet was dropped.
        Dropped = -2,
        /// The packet broke a rule, or its pages could not be used.
        Error = -1,
        /// Done.
        Okay = 0,
        /// The slot held an extra info: nothing to say, and the id means nothing.
        Null = 1,
    }
}

macro_rules! flag_set {
    ($(#[$type_doc:meta])* $name:ident { $($(#[$doc:meta])* $flag:ident = $bit:literal;)* }) => {
        $(#[$type_doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
        pub struct $name(pub u16);

        impl $name {
            /// No flag.
            pub const NONE: $name = $name(0);
            $($(#[$doc])* pub const $flag: $name = $name($bit);)*

            /// Whether all flags of `wanted` are set.
            #[inline]
            pub fn contains(self, wanted: $name) -> bool {
                self.0 & wanted.0 == wanted.0
            }

            /// These flags, and those of `other` where `condition` holds.
            #[inline]
            #[must_use]
            pub fn with_if(self, condition: bool, other: $name) -> $name {
                if condition { $name(self.0 | other.0) } else { self }
            }

            /// What the first slot of a chain says of the checksum.
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
    /// Flags of a tx request (`NETTXF_*`). Bits 0 and 1 mean the reverse of what they mean on rx.
    /// Bits that are not defined are ignored.
    TxFlags {
        /// The protocol checksum is still to be filled in.
        CHECKSUM_BLANK = 0x1;
        /// The data was checked against the protocol checksum.
        DATA_VALIDATED = 0x2;
        /// The packet goes on in the next request.
        MORE_DATA = 0x4;
        /// An extra info follows. Means something in the first slot of a chain only.
        EXTRA_INFO = 0x8;
    }
}

flag_set! {
    /// Flags of an rx response (`NETRXF_*`). Bits 0 and 1 mean the reverse of what they mean on tx.
    /// Bits that are not defined are ignored.
    RxFlags {
        /// The data was checked against the protocol checksum.
        DATA_VALIDATED = 0x1;
        /// The protocol checksum is still to be filled in.
        CHECKSUM_BLANK = 0x2;
        /// The packet goes on in the next response.
        MORE_DATA = 0x4;
        /// An extra info follows. Means something in the first slot of a chain only.
        EXTRA_INFO = 0x8;
        /// The slot is an old form of GSO information; deprecated, never to be sent.
        GSO_PREFIX = 0x10;
    }
}

/// What travels with a packet about its TCP or UDP checksum, the same for both directions.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Checksum {
    /// The field holds the sum of the pseudo header only: fill in the rest, or pass this on.
    pub blank: bool,
    /// The data is known to be good.
    pub validated: bool,
}

/// A tx request: a fragment of a packet for the backend. 12 bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TxRequest {
    /// Page with the fragment.
    pub gref: Gref,
    /// Where in the page it starts.
    pub offset: u16,
    /// Flags.
    pub flags: TxFlags,
    /// Comes back in the response.
    pub id: u16,
    /// In the first slot of a chain the bytes of the **whole packet**, else of this fragment.
    pub size: u16,
}

impl TxRequest {
    /// Bytes on the ring.
    pub const SIZE: usize = 12;

    /// The request in a slot.
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

    /// The bytes for a slot.
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

/// A tx response: the backend is done with a slot. 4 bytes, at the head of a 12-byte slot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TxResponse {
    /// Of the request; nothing meaningful when the status is [`Status::Null`].
    pub id: u16,
    /// How it ended.
    pub status: Status,
}

impl TxResponse {
    /// Bytes on the ring.
    pub const SIZE: usize = 4;

    /// The response in a slot.
    #[inline]
    pub fn from_bytes(bytes: [u8; Self::SIZE]) -> TxResponse {
        let [i0, i1, s0, s1] = bytes;
        TxResponse {
            id: u16::from_le_bytes([i0, i1]),
            status: Status::from_raw(i16::from_le_bytes([s0, s1])),
        }
    }

    /// The bytes for a slot.
    #[inline]
    pub fn to_bytes(self) -> [u8; Self::SIZE] {
        let [i0, i1] = self.id.to_le_bytes();
        let [s0, s1] = self.status.to_raw().to_le_bytes();
        [i0, i1, s0, s1]
    }
}

/// An rx request: an empty page for the backend to fill. 8 bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RxRequest {
    /// Comes back in the response.
    pub id: u16,
    /// The page.
    pub gref: Gref,
}

impl RxRequest {
    /// Bytes on the ring.
    pub const SIZE: usize = 8;

    /// The request in a slot. Bytes 2 and 3 are padding.
    #[inline]
    pub fn from_bytes(bytes: [u8; Self::SIZE]) -> RxRequest {
        let [i0, i1, _, _, g0, g1, g2, g3] = bytes;
        RxRequest {
            id: u16::from_le_bytes([i0, i1]),
            gref: Gref(u32::from_le_bytes([g0, g1, g2, g3])),
        }
    }

    /// The bytes for a slot, padding zero.
    #[inline]
    pub fn to_bytes(self) -> [u8; Self::SIZE] {
        let [i0, i1] = self.id.to_le_bytes();
        let [g0, g1, g2, g3] = self.gref.0.to_le_bytes();
        [i0, i1, 0, 0, g0, g1, g2, g3]
    }
}

/// An rx response: what the backend put into a page. 8 bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RxResponse {
    /// Of the request.
    pub id: u16,
    /// Where in the page the fragment starts.
    pub offset: u16,
    /// Flags.
    pub flags: RxFlags,
    /// Bytes of this fragment, or below 0 a [`Status`].
    pub status: i16,
}

impl RxResponse {
    /// Bytes on the ring.
    pub const SIZE: usize = 8;

    /// A response that says that a request came to nothing.
    pub fn failed(id: u16, status: Status) -> RxResponse {
        RxResponse { id, offset: 0, flags: RxFlags::NONE, status: status.to_raw() }
    }

    /// The size, or the status of a request that failed.
    #[inline]
    pub fn size(self) -> Result<u16, Status> {
        u16::try_from(self.status).map_err(|_| Status::from_raw(self.status))
    }

    /// The response in a slot.
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

    /// The bytes for a slot.
    #[inline]
    pub fn to_bytes(self) -> [u8; Self::SIZE] {
        let [i0, i1] = self.id.to_le_bytes();
        let [o0, o1] = self.offset.to_le_bytes();
        let [f0, f1] = self.flags.0.to_le_bytes();
        let [s0, s1] = self.status.to_le_bytes();
        [i0, i1, o0, o1, f0, f1, s0, s1]
    }
}
