//! Field offsets of each request layout, and the response.

use crate::macros::enum_with_unknown;

enum_with_unknown! {
    /// Result of a request (`BLKIF_RSP_*`).
    pub enum Status(i16) {
        /// Ringfence only: no space is left on the storage. Sent to frontends with the key
        /// [`RINGFENCE_NO_SPACE`](super::keys::RINGFENCE_NO_SPACE) alone.
        NoSpace = -28,
        /// Operation unknown, or not offered for this disk.
        NotSupported = -2,
        Error = -1,
        Okay = 0,
    }
}

/// Private copy of a request slot in either layout. Bytes behind the shorter layout are zero.
pub type Slot = [u8; 112];

/// Request layout of a frontend, from the key `protocol`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Abi {
    /// `x86_64-abi`, identical to `arm-abi`: 64-bit numbers are aligned to 8 bytes.
    X86_64,
    /// `x86_32-abi`: 64-bit numbers are aligned to 4 bytes.
    X86_32,
}

impl Abi {
    /// Both layouts, for tests and tables.
    pub const ALL: [Abi; 2] = [Abi::X86_64, Abi::X86_32];

    /// Layout of this machine's architecture.
    pub const NATIVE: Abi = Abi::X86_64;

    /// Returns the layout with the given protocol name.
    pub fn from_name(name: &[u8]) -> Option<Abi> {
        match name {
            b"x86_64-abi" | b"arm-abi" => Some(Abi::X86_64),
            b"x86_32-abi" => Some(Abi::X86_32),
            _ => None,
        }
    }

    /// Returns the protocol name of the layout.
    pub fn name(self) -> &'static str {
        match self {
            Abi::X86_64 => "x86_64-abi",
            Abi::X86_32 => "x86_32-abi",
        }
    }

    /// Returns the bytes of a request.
    pub const fn request_bytes(self) -> usize {
        match self {
            Abi::X86_64 => 112,
            Abi::X86_32 => 108,
        }
    }

    /// Returns the bytes of a response, padding included.
    pub const fn response_bytes(self) -> usize {
        match self {
            Abi::X86_64 => 16,
            Abi::X86_32 => 12,
        }
    }

    /// Returns the alignment of ring entries in bytes.
    pub const fn alignment(self) -> usize {
        match self {
            Abi::X86_64 => 8,
            Abi::X86_32 => 4,
        }
    }

    pub(super) const fn id(self) -> usize {
        match self {
            Abi::X86_64 => 8,
            Abi::X86_32 => 4,
        }
    }

    pub(super) const fn sector(self) -> usize {
        self.id() + 8
    }

    /// Returns the offset of the segments, of the count of a discard or a query of extents, and of an indirect
    /// request's handle.
    pub(super) const fn tail(self) -> usize {
        self.sector() + 8
    }

    pub(super) const fn indirect_grefs(self) -> usize {
        self.tail() + 4
    }

    pub(super) const fn extents_gref(self) -> usize {
        self.tail() + 8
    }
}

/// Status that answers a blkif request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Response {
    pub id: u64,
    /// Operation of the request, as [`BlkRequest::operation`](super::BlkRequest::operation) gives it.
    pub operation: u8,
    pub status: Status,
}

impl Response {
    /// Bytes of the longer layout's response.
    pub const MAX: usize = 16;

    /// Parses the response in a slot. Both layouts have the same fields at the same offsets and differ
    /// only in the padding behind them.
    pub fn from_bytes(bytes: [u8; Self::MAX]) -> Response {
        let [i0, i1, i2, i3, i4, i5, i6, i7, operation, _, s0, s1, ..] = bytes;
        Response {
            id: u64::from_le_bytes([i0, i1, i2, i3, i4, i5, i6, i7]),
            operation,
            status: Status::from_raw(i16::from_le_bytes([s0, s1])),
        }
    }

    /// Encodes the response for a slot; the first [`Abi::response_bytes`] bytes are the response. Padding
    /// is zero, because the guest can read it (XSA-216).
    pub fn to_bytes(self) -> [u8; Self::MAX] {
        let [i0, i1, i2, i3, i4, i5, i6, i7] = self.id.to_le_bytes();
        let [s0, s1] = self.status.to_raw().to_le_bytes();
        [i0, i1, i2, i3, i4, i5, i6, i7, self.operation, 0, s0, s1, 0, 0, 0, 0]
    }
}
