//! The protocol of network block devices, newstyle, as bytes: no I/O, nothing that blocks.
//!
//! The rules are those of NBD's `doc/proto.md`. Each side of the protocol is a machine that is fed
//! what came in, in pieces of any length, and says what is to be sent:
//!
//! * [`offer::ServerHandshake`] and [`serve`]: for whoever has a disk ([`crate::export`]).
//! * [`agree::ClientHandshake`] and [`replies::Replies`]: for whoever wants one
//!   ([`crate::client`]).
//!
//! Both take it that the other side is hostile: lengths are bounded before they size anything, what
//! is skipped is counted and not kept, and what breaks a rule that matters ends the connection.

pub mod agree;
#[doc(hidden)]
#[cfg(any(test, feature = "test-utils"))]
pub mod fuzzing;
pub mod numbers;
pub mod offer;
pub mod replies;
pub mod serve;

use std::io;

use serde::{Deserialize, Serialize};

use numbers::{error, transmission};

/// Bytes of the longest payload of one request or reply, either way, unless the other side asks for
/// less. What clients take for granted when nobody says anything.
pub const PAYLOAD_MAX: u32 = 32 << 20;

/// Bytes of the longest name of an export (`proto.md`, "Conventions").
pub const NAME_MAX: usize = 4096;

/// What a server offers, and a client agreed to.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Offer {
    /// Bytes of the disk.
    pub bytes: u64,
    /// What the server can do ([`transmission`]).
    pub flags: u16,
    /// Requests are multiples of this many bytes.
    pub block_min: u32,
    /// Requests of multiples of this are the best.
    pub block_preferred: u32,
    /// Bytes of the longest payload.
    pub payload_max: u32,
}

impl Offer {
    /// Whether all of `flags` are offered.
    pub fn has(&self, flags: u16) -> bool {
        self.flags & flags == flags
    }

    /// Whether nothing may be written.
    pub fn is_read_only(&self) -> bool {
        self.has(transmission::READ_ONLY)
    }
}

/// The number by which the protocol knows an errno (`proto.md`, "Error values").
pub fn error_of(errno: i32) -> u32 {
    match errno {
        libc::EPERM | libc::EROFS => error::PERM,
        libc::ENOMEM => error::NOMEM,
        libc::EINVAL => error::INVAL,
        libc::ENOSPC => error::NOSPC,
        libc::EOVERFLOW => error::OVERFLOW,
        libc::EOPNOTSUPP => error::NOTSUP,
        libc::ESHUTDOWN => error::SHUTDOWN,
        _ => error::IO,
    }
}

/// The errno of an error that the protocol knows; `EIO` for others.
pub fn errno_of(number: u32) -> i32 {
    match number {
        error::PERM => libc::EPERM,
        error::NOMEM => libc::ENOMEM,
        error::INVAL => libc::EINVAL,
        error::NOSPC => libc::ENOSPC,
        error::OVERFLOW => libc::EOVERFLOW,
        error::NOTSUP => libc::EOPNOTSUPP,
        error::SHUTDOWN => libc::ESHUTDOWN,
        _ => libc::EIO,
    }
}

/// A rule that the other side broke. The connection is of no more use.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ProtocolError {
    /// It speaks something else.
    #[error("what answers there is no NBD server of the newstyle kind ({what}: {found:#x})")]
    Magic {
        /// Where.
        what: &'static str,
        /// What came instead.
        found: u64,
    },
    /// It does not speak the fixed newstyle.
    #[error("the server does not speak the fixed newstyle handshake")]
    NotFixed,
    /// An unknown bit in what must be understood.
    #[error("flags {flags:#x} in the handshake are not known")]
    Flags {
        /// All of them.
        flags: u32,
    },
    /// A length over the limit.
    #[error("{what} of {len} bytes, where {limit} are the limit")]
    TooLong {
        /// Of what.
        what: &'static str,
        /// The length.
        len: u64,
        /// The limit.
        limit: u64,
    },
    /// A length that the message cannot have.
    #[error("{what} has {len} bytes, which it cannot have")]
    Length {
        /// Of what.
        what: &'static str,
        /// The length.
        len: u64,
    },
    /// More of something than is useful.
    #[error("more than {limit} {what}")]
    TooMany {
        /// Of what.
        what: &'static str,
        /// The limit.
        limit: u32,
    },
    /// Bytes that were sent before the channel was encrypted, to be taken for such that came after.
    #[error("the server sent {len} bytes in the clear behind its agreement to encrypt")]
    Injected {
        /// How many.
        len: u64,
    },
    /// An answer to another question.
    #[error("an answer to option {found}, where {asked} was asked for")]
    Option {
        /// What was asked.
        asked: u32,
        /// What was answered.
        found: u32,
    },
    /// The server refused.
    #[error("the server refuses option {option} with error {error:#x}{}", told(message))]
    Refused {
        /// What was asked.
        option: u32,
        /// Its error.
        error: u32,
        /// What it says.
        message: String,
    },
    /// The server agreed without saying how large the disk is.
    #[error("the server agreed, but did not say how large the disk is")]
    NoExport,
    /// Block sizes that make no sense.
    #[error("block sizes {min}, {preferred}, {max}: powers of two were expected, in this order")]
    BlockSizes {
        /// Minimum.
        min: u32,
        /// Preferred.
        preferred: u32,
        /// Maximum.
        max: u32,
    },
    /// An answer to no request.
    #[error("an answer to a request that was not made ({cookie:#x})")]
    Cookie {
        /// What it names.
        cookie: u64,
    },
    /// An answer of a kind that does not fit the request, or was not agreed on.
    #[error("an answer of type {kind} to a request that it does not fit")]
    Kind {
        /// Its type.
        kind: u16,
    },
    /// Data outside what was asked for, or twice, or not all of it.
    #[error("{len} bytes at {offset} are not what was asked for")]
    Range {
        /// Where.
        offset: u64,
        /// How much.
        len: u64,
    },
    /// The data behind a request does not begin with the magic number.
    #[error("a request begins with {found:#x}")]
    RequestMagic {
        /// What came instead.
        found: u32,
    },
}

/// What the other side says, for people; nothing that a terminal would obey.
fn told(message: &str) -> String {
    if message.is_empty() { String::new() } else { format!(": {}", message.escape_debug()) }
}

impl From<ProtocolError> for io::Error {
    fn from(error: ProtocolError) -> io::Error {
        io::Error::new(io::ErrorKind::InvalidData, error)
    }
}

/// Reads numbers off the front of a slice, in network byte order.
struct Bytes<'a>(&'a [u8]);

impl<'a> Bytes<'a> {
    fn take(&mut self, len: usize) -> Option<&'a [u8]> {
        let (head, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(head)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (head, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*head)
    }

    fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_be_bytes)
    }

    fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_be_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_be_bytes)
    }
}

#[cfg(test)]
mod tests;
