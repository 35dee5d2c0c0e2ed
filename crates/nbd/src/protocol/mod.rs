//! NBD protocol, fixed newstyle, as bytes: state machines without I/O that never block.
//!
//! The rules are those of NBD's `doc/proto.md`. Each side of the protocol is a state machine. The caller
//! feeds it received bytes in pieces of any length, and sends the bytes that it appends:
//!
//! * Server: [`offer::ServerHandshake`], then [`serve`]. Used by [`crate::export`].
//! * Client: [`agree::ClientHandshake`], then [`replies::Replies`]. Used by [`crate::client`].
//!
//! Neither side trusts the other. Lengths are bounded before they size an allocation, skipped bytes are
//! counted and not kept, and a rule violation ends the connection.

pub mod agree;
#[doc(hidden)]
#[cfg(any(test, feature = "test-utils"))]
pub mod fuzzing;
pub mod numbers;
pub mod offer;
pub mod replies;
pub mod serve;
mod words;

use std::io;

use ringfence_block::storage::failure::Failure;
use serde::{Deserialize, Serialize};

use numbers::{error, transmission};

/// Maximum length in bytes of the payload of one request or reply. It is the protocol's default without
/// block size information.
pub const PAYLOAD_MAX: u32 = 32 << 20;

/// Maximum length in bytes of an export name (`proto.md`, "Conventions").
pub const NAME_MAX: usize = 4096;

/// Properties of an export that a server offers.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Offer {
    /// Size of the disk in bytes.
    pub bytes: u64,
    /// Transmission flags ([`transmission`]).
    pub flags: u16,
    /// Unit of offsets and lengths in bytes that clients keep to.
    pub block_min: u32,
    /// Preferred unit of requests in bytes.
    pub block_preferred: u32,
    /// Maximum length of a payload in bytes.
    pub payload_max: u32,
}

impl Offer {
    /// Returns `true` if all of `flags` are offered.
    pub fn has(&self, flags: u16) -> bool {
        self.flags & flags == flags
    }

    /// Returns `true` if the export cannot be written.
    pub fn is_read_only(&self) -> bool {
        self.has(transmission::READ_ONLY)
    }
}

/// Returns the protocol's error number of an errno (`proto.md`, "Error values").
pub fn error_of(errno: i32) -> u32 {
    match Failure::of(errno) {
        Failure::NotPermitted => error::PERM,
        Failure::NoMemory => error::NOMEM,
        Failure::Invalid => error::INVAL,
        Failure::NoSpace => error::NOSPC,
        Failure::TooLong => error::OVERFLOW,
        Failure::Unsupported => error::NOTSUP,
        Failure::ShuttingDown => error::SHUTDOWN,
        Failure::Io => error::IO,
    }
}

/// Returns the errno of an error number; `EIO` for unknown ones.
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

/// Rule violations of the other side. Each ends the connection.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ProtocolError {
    /// Magic number that is wrong: the other side speaks another protocol.
    #[error("what answers there is no NBD server of the newstyle kind ({what}: {found:#x})")]
    Magic {
        /// Message with the magic number.
        what: &'static str,
        found: u64,
    },
    /// Server without the fixed newstyle handshake.
    #[error("the server does not speak the fixed newstyle handshake")]
    NotFixed,
    /// Unknown flag in the handshake.
    #[error("flags {flags:#x} in the handshake are not known")]
    Flags { flags: u32 },
    /// Length above the limit.
    #[error("{what} of {len} bytes, where {limit} are the limit")]
    TooLong {
        /// Message or field with the length.
        what: &'static str,
        /// Length in bytes.
        len: u64,
        /// Limit in bytes.
        limit: u64,
    },
    /// Length that the message cannot have.
    #[error("{what} has {len} bytes, which it cannot have")]
    Length {
        /// Message with the length.
        what: &'static str,
        /// Length in bytes.
        len: u64,
    },
    /// Number of messages above the limit.
    #[error("more than {limit} {what}")]
    TooMany {
        /// Type of the messages.
        what: &'static str,
        /// Maximum number of messages.
        limit: u32,
    },
    /// Bytes sent in the clear after the agreement to encrypt, which an attacker may have injected.
    #[error("the server sent {len} bytes in the clear behind its agreement to encrypt")]
    Injected {
        /// Number of bytes.
        len: u64,
    },
    /// Reply to an option that was not sent.
    #[error("an answer to option {found}, where {asked} was asked for")]
    Option {
        /// Option that was sent.
        asked: u32,
        /// Option that the reply names.
        found: u32,
    },
    /// Option refused by the server.
    #[error(
        "the server refuses {}: {}{}",
        words::option(*option), words::refusal(*error), escaped_suffix(message)
    )]
    Refused {
        option: u32,
        /// Error number of the server.
        error: u32,
        message: String,
    },
    /// Name of an export that the server does not have.
    #[error(
        "the server has no export {name:?}{}: `nbdinfo --list` shows those that it has",
        escaped_suffix(message)
    )]
    UnknownExport {
        /// Name that was asked for.
        name: String,
        /// Message of the server.
        message: String,
    },
    /// Server that refuses connections in the clear.
    #[error("the server requires TLS: use nbds:// (on a Unix socket nbds+unix://)")]
    RequiresTls,
    /// Server without TLS.
    #[error(
        "the server offers no TLS{}: use nbd:// only if its network is trusted",
        escaped_suffix(message)
    )]
    NoTls { message: String },
    /// Server that asked for a certificate and ended the connection, as it got none.
    #[error(
        "the server wants a client certificate: put client-cert.pem and client-key.pem beside ca-cert.pem \
         (?tls-certificates=DIRECTORY)"
    )]
    WantsCertificate,
    /// Server that ended the TLS handshake without a reason, or accepts none of the offered ciphers.
    #[error(
        "the server ended the TLS handshake: does it have pre-shared keys (PSK)? Those are not supported; it needs \
         a certificate"
    )]
    EndedHandshake,
    /// Agreement of the server without the size of the disk.
    #[error("the server agreed, but did not say how large the disk is")]
    NoExport,
    /// Block sizes that are no powers of two, or not in order.
    #[error("block sizes {min}, {preferred}, {max}: powers of two were expected, in this order")]
    BlockSizes {
        /// Minimum block size in bytes.
        min: u32,
        /// Preferred block size in bytes.
        preferred: u32,
        /// Maximum block size in bytes.
        max: u32,
    },
    /// Reply to a request that was not sent.
    #[error("an answer to a request that was not made ({cookie:#x})")]
    Cookie { cookie: u64 },
    /// Reply of a type that does not fit the request or was not negotiated.
    #[error("an answer of type {kind} to a request that it does not fit")]
    Kind { kind: u16 },
    /// Data outside the requested range, repeated or incomplete.
    #[error("{len} bytes at {offset} are not what was asked for")]
    Range {
        /// Offset on the disk in bytes.
        offset: u64,
        /// Length in bytes.
        len: u64,
    },
    /// Request that does not begin with the magic number.
    #[error("a request begins with {found:#x}")]
    RequestMagic { found: u32 },
}

/// Formats a message of the other side for a log, with control characters escaped.
fn escaped_suffix(message: &str) -> String {
    if message.is_empty() { String::new() } else { format!(": {}", message.escape_debug()) }
}

impl From<ProtocolError> for io::Error {
    fn from(error: ProtocolError) -> io::Error {
        io::Error::new(io::ErrorKind::InvalidData, error)
    }
}

/// Parser of integers in network byte order from the front of a slice.
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
