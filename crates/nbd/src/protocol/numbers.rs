//! Constants of the NBD protocol (`doc/proto.md`).

/// First magic number of a server: "NBDMAGIC".
pub const GREETING: u64 = 0x4E42_444D_4147_4943;
/// Magic number of the newstyle handshake and of each option: "IHAVEOPT".
pub const OPTION: u64 = 0x4948_4156_454F_5054;
/// Magic number of the reply to an option.
pub const OPTION_REPLY: u64 = 0x0003_E889_0455_65A9;
/// Magic number of a request.
pub const REQUEST: u32 = 0x2560_9513;
/// Magic number of a simple reply.
pub const SIMPLE_REPLY: u32 = 0x6744_6698;
/// Magic number of a structured reply chunk.
pub const STRUCTURED_REPLY: u32 = 0x668E_33EF;

/// Handshake flags of both sides.
pub mod handshake {
    /// Fixed newstyle: options can be refused, and several tried.
    pub const FIXED_NEWSTYLE: u16 = 1;
    /// The reply to `EXPORT_NAME` omits its 124 zeros.
    pub const NO_ZEROES: u16 = 2;
}

/// Options of the handshake.
pub mod option {
    /// Selects an export without a refusal reply.
    pub const EXPORT_NAME: u32 = 1;
    /// Ends the handshake without an export.
    pub const ABORT: u32 = 2;
    /// Requests the list of exports.
    pub const LIST: u32 = 3;
    /// Requests TLS for the rest of the connection.
    pub const STARTTLS: u32 = 5;
    /// Requests information about an export.
    pub const INFO: u32 = 6;
    /// Selects an export, with a refusal reply.
    pub const GO: u32 = 7;
    /// Enables structured replies to reads.
    pub const STRUCTURED_REPLY: u32 = 8;
    /// Requests the list of metadata contexts.
    pub const LIST_META_CONTEXT: u32 = 9;
    /// Selects metadata contexts for queries.
    pub const SET_META_CONTEXT: u32 = 10;
}

/// Reply types of options.
pub mod reply {
    /// Acceptance; the last reply to the option.
    pub const ACK: u32 = 1;
    /// Entry of the export list.
    pub const SERVER: u32 = 2;
    /// Information about an export.
    pub const INFO: u32 = 3;
    /// Entry of the list of metadata contexts.
    pub const META_CONTEXT: u32 = 4;
    /// Flag of all error types.
    pub const ERROR: u32 = 1 << 31;
    /// Option unknown to the server.
    pub const UNSUPPORTED: u32 = ERROR + 1;
    /// Option that the server does not allow.
    pub const POLICY: u32 = ERROR + 2;
    /// Option data that is malformed.
    pub const INVALID: u32 = ERROR + 3;
    /// Option that the server's platform does not allow.
    pub const PLATFORM: u32 = ERROR + 4;
    /// Server that accepts this option over TLS alone.
    pub const TLS_REQUIRED: u32 = ERROR + 5;
    /// Export name unknown to the server.
    pub const UNKNOWN: u32 = ERROR + 6;
    /// Server that shuts down.
    pub const SHUTDOWN: u32 = ERROR + 7;
    /// Server that requires clients which ask for its block sizes.
    pub const BLOCK_SIZE_REQUIRED: u32 = ERROR + 8;
    /// Option data beyond the server's limit.
    pub const TOO_BIG: u32 = ERROR + 9;
    /// Server that requires extended headers.
    pub const EXTENDED_HEADERS_REQUIRED: u32 = ERROR + 10;
}

/// Information types of an export.
pub mod info {
    /// Size and transmission flags.
    pub const EXPORT: u16 = 0;
    /// Name of the export.
    pub const NAME: u16 = 1;
    /// Description of the export for users.
    pub const DESCRIPTION: u16 = 2;
    /// Block sizes: minimum, preferred, maximum payload.
    pub const BLOCK_SIZE: u16 = 3;
}

/// Transmission flags of an export.
pub mod transmission {
    /// The flags are valid; always set.
    pub const HAS_FLAGS: u16 = 1;
    /// The export cannot be written.
    pub const READ_ONLY: u16 = 1 << 1;
    /// Flush requests are supported.
    pub const SEND_FLUSH: u16 = 1 << 2;
    /// The FUA flag is supported.
    pub const SEND_FUA: u16 = 1 << 3;
    /// Seeking on the medium takes time.
    pub const ROTATIONAL: u16 = 1 << 4;
    /// Trim requests are supported.
    pub const SEND_TRIM: u16 = 1 << 5;
    /// Write-zeroes requests are supported.
    pub const SEND_WRITE_ZEROES: u16 = 1 << 6;
    /// The DF flag of reads is supported.
    pub const SEND_DF: u16 = 1 << 7;
    /// A flush on one connection covers the writes completed on all.
    pub const CAN_MULTI_CONN: u16 = 1 << 8;
}

/// Types of client requests.
pub mod command {
    /// Read of a range.
    pub const READ: u16 = 0;
    /// Write of a range, with payload.
    pub const WRITE: u16 = 1;
    /// End of the connection, without a reply.
    pub const DISCONNECT: u16 = 2;
    /// Flush of completed writes.
    pub const FLUSH: u16 = 3;
    /// Discard of a range.
    pub const TRIM: u16 = 4;
    /// Zeroing of a range.
    pub const WRITE_ZEROES: u16 = 6;
    /// Query of the allocation of a range.
    pub const BLOCK_STATUS: u16 = 7;
}

/// Flags of a request.
pub mod command_flag {
    /// The write is durable when it completes.
    pub const FUA: u16 = 1;
    /// The zeroed range must stay allocated.
    pub const NO_HOLE: u16 = 1 << 1;
    /// The reply must be a single chunk.
    pub const DF: u16 = 1 << 2;
    /// The reply has one extent only.
    pub const REQ_ONE: u16 = 1 << 3;
}

/// Flags of an extent in the context [`BASE_ALLOCATION`].
pub mod state {
    /// The range is not allocated.
    pub const HOLE: u32 = 1;
    /// The range reads as zeros.
    pub const ZERO: u32 = 2;
}

/// Chunk types of structured replies.
pub mod chunk {
    /// End of the reply, without content.
    pub const NONE: u16 = 0;
    /// Data at an offset.
    pub const OFFSET_DATA: u16 = 1;
    /// Zeros at an offset.
    pub const OFFSET_HOLE: u16 = 2;
    /// Extents of a block status query.
    pub const BLOCK_STATUS: u16 = 5;
    /// Flag of all error types.
    pub const ERROR_BIT: u16 = 1 << 15;
    /// Error of the whole request.
    pub const ERROR: u16 = ERROR_BIT + 1;
    /// Error at an offset.
    pub const ERROR_OFFSET: u16 = ERROR_BIT + 2;
    /// Chunk flag: last chunk of the reply.
    pub const DONE: u16 = 1;
}

/// Error numbers of replies.
pub mod error {
    /// Error number of `EPERM`.
    pub const PERM: u32 = 1;
    /// Error number of `EIO`.
    pub const IO: u32 = 5;
    /// Error number of `ENOMEM`.
    pub const NOMEM: u32 = 12;
    /// Error number of `EINVAL`.
    pub const INVAL: u32 = 22;
    /// Error number of `ENOSPC`.
    pub const NOSPC: u32 = 28;
    /// Error number of `EOVERFLOW`.
    pub const OVERFLOW: u32 = 75;
    /// Error number of `ENOTSUP`.
    pub const NOTSUP: u32 = 95;
    /// Error number of `ESHUTDOWN`.
    pub const SHUTDOWN: u32 = 108;
}

/// Metadata context of allocated ranges.
pub const BASE_ALLOCATION: &str = "base:allocation";
