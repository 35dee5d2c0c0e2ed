//! Where the fields are, by architecture, and the response.

use crate::macros::enum_with_unknown;

enum_with_unknown! {
    /// How a request ended (`BLKIF_RSP_*`).
    pub enum Status(i16) {
        /// There is no such operation, here or on this disk.
        NotSupported = -2,
        /// It failed.
        Error = -1,
        /// All of it was done.
        Okay = 0,
    }
}

/// A slot as it was copied out of the ring: a request of either layout, zeros behind the shorter one.
pub type Slot = [u8; 112];

/// How a frontend lays out its requests: by the key `protocol`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Abi {
    /// `x86_64-abi`, and `arm-abi`, which is the same: 64-bit numbers are aligned to 8.
    X86_64,
    /// `x86_32-abi`: 64-bit numbers are aligned to 4.
    X86_32,
}

impl Abi {
    /// Both.
    pub const ALL: [Abi; 2] = [Abi::X86_64, Abi::X86_32];

    /// The layout that is native here.
    pub const NATIVE: Abi = Abi::X86_64;

    /// The layout of that name.
    pub fn from_name(name: &[u8]) -> Option<Abi> {
        match name {
            b"x86_64-abi" | b"arm-abi" => Some(Abi::X86_64),
            b"x86_32-abi" => Some(Abi::X86_32),
            _ => None,
        }
    }

    /// The name of the layout.
    pub fn name(self) -> &'static str {
        match self {
            Abi::X86_64 => "x86_64-abi",
            Abi::X86_32 => "x86_32-abi",
        }
    }

    /// Bytes of a request.
    pub const fn request_bytes(self) -> usize {
        match self {
            Abi::X86_64 => 112,
            Abi::X86_32 => 108,
        }
    }

    /// Bytes of a response, its holes included.
    pub const fn response_bytes(self) -> usize {
        match self {
            Abi::X86_64 => 16,
            Abi::X86_32 => 12,
        }
    }

    /// What entries of the ring are aligned to.
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

    /// Segments, the count of a discard, and the handle of an indirect request begin here.
    pub(super) const fn tail(self) -> usize {
        self.sector() + 8
    }

    pub(super) const fn indirect_grefs(self) -> usize {
        self.tail() + 4
    }
}

/// The answer to a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Response {
    /// Of the request.
    pub id: u64,
    /// The operation of the request, as it stood in its first byte.
    pub operation: u8,
    /// How it ended.
    pub status: Status,
}

impl Response {
    /// Most bytes of a response.
    pub const MAX: usize = 16;

    /// The response in a slot. Both layouts have the same fields at the same places; they differ in
    /// what is behind them.
    pub fn from_bytes(bytes: [u8; Self::MAX]) -> Response {
        let [i0, i1, i2, i3, i4, i5, i6, i7, operation, _, s0, s1, ..] = bytes;
        Response {
            id: u64::from_le_bytes([i0, i1, i2, i3, i4, i5, i6, i7]),
            operation,
            status: Status::from_raw(i16::from_le_bytes([s0, s1])),
        }
    }

    /// The bytes for a slot, of which the first [`Abi::response_bytes`] are the response. The holes are
    /// zero: they are the guest's to see (XSA-216).
    pub fn to_bytes(self) -> [u8; Self::MAX] {
        let [i0, i1, i2, i3, i4, i5, i6, i7] = self.id.to_le_bytes();
        let [s0, s1] = self.status.to_raw().to_le_bytes();
        [i0, i1, i2, i3, i4, i5, i6, i7, self.operation, 0, s0, s1, 0, 0, 0, 0]
    }
}
