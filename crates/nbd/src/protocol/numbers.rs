//! The numbers of the protocol (`doc/proto.md`).

/// What a server says first: "NBDMAGIC".
pub const GREETING: u64 = 0x4E42_444D_4147_4943;
/// What says that the handshake is of the newstyle kind, and begins each option: "IHAVEOPT".
pub const OPTION: u64 = 0x4948_4156_454F_5054;
/// Begins the answer to an option.
pub const OPTION_REPLY: u64 = 0x0003_E889_0455_65A9;
/// Begins a request.
pub const REQUEST: u32 = 0x2560_9513;
/// Begins a simple reply.
pub const SIMPLE_REPLY: u32 = 0x6744_6698;
/// Begins a chunk of a structured reply.
pub const STRUCTURED_REPLY: u32 = 0x668E_33EF;

/// Bits that both sides exchange first.
pub mod handshake {
    /// Options can be refused, and more than one tried.
    pub const FIXED_NEWSTYLE: u16 = 1;
    /// No 124 zeros at the end of the oldest of the options.
    pub const NO_ZEROES: u16 = 2;
}

/// Options of the handshake.
pub mod option {
    /// Choose an export, the old way.
    pub const EXPORT_NAME: u32 = 1;
    /// Give up.
    pub const ABORT: u32 = 2;
    /// Which exports are there?
    pub const LIST: u32 = 3;
    /// Encrypt from here on.
    pub const STARTTLS: u32 = 5;
    /// What is this export like?
    pub const INFO: u32 = 6;
    /// Choose an export.
    pub const GO: u32 = 7;
    /// Answer in chunks.
    pub const STRUCTURED_REPLY: u32 = 8;
    /// Which contexts of metadata are there?
    pub const LIST_META_CONTEXT: u32 = 9;
    /// Choose contexts of metadata.
    pub const SET_META_CONTEXT: u32 = 10;
}

/// Answers to options.
pub mod reply {
    /// Agreed.
    pub const ACK: u32 = 1;
    /// An export.
    pub const SERVER: u32 = 2;
    /// A piece of information.
    pub const INFO: u32 = 3;
    /// A context of metadata.
    pub const META_CONTEXT: u32 = 4;
    /// The bit of all errors.
    pub const ERROR: u32 = 1 << 31;
    /// Not known.
    pub const UNSUPPORTED: u32 = ERROR + 1;
    /// Not allowed.
    pub const POLICY: u32 = ERROR + 2;
    /// Malformed.
    pub const INVALID: u32 = ERROR + 3;
    /// No such export.
    pub const UNKNOWN: u32 = ERROR + 6;
    /// Too long to be read.
    pub const TOO_BIG: u32 = ERROR + 9;
}

/// Kinds of information about an export.
pub mod info {
    /// Size and flags.
    pub const EXPORT: u16 = 0;
    /// Its name.
    pub const NAME: u16 = 1;
    /// What it is, for people.
    pub const DESCRIPTION: u16 = 2;
    /// Block sizes.
    pub const BLOCK_SIZE: u16 = 3;
}

/// What a server can do.
pub mod transmission {
    /// Always there.
    pub const HAS_FLAGS: u16 = 1;
    /// Nothing may be written.
    pub const READ_ONLY: u16 = 1 << 1;
    /// Flushes.
    pub const SEND_FLUSH: u16 = 1 << 2;
    /// Writes that are durable when they are done.
    pub const SEND_FUA: u16 = 1 << 3;
    /// Seeking costs time.
    pub const ROTATIONAL: u16 = 1 << 4;
    /// Ranges can be given up.
    pub const SEND_TRIM: u16 = 1 << 5;
    /// Ranges can be zeroed.
    pub const SEND_WRITE_ZEROES: u16 = 1 << 6;
    /// A read can be asked for in one piece.
    pub const SEND_DF: u16 = 1 << 7;
    /// A flush through one connection covers what was done through all.
    pub const CAN_MULTI_CONN: u16 = 1 << 8;
}

/// Requests.
pub mod command {
    /// Read.
    pub const READ: u16 = 0;
    /// Write.
    pub const WRITE: u16 = 1;
    /// Good-bye.
    pub const DISCONNECT: u16 = 2;
    /// Make durable what was written.
    pub const FLUSH: u16 = 3;
    /// Give up a range.
    pub const TRIM: u16 = 4;
    /// Zero a range.
    pub const WRITE_ZEROES: u16 = 6;
    /// Which ranges hold data?
    pub const BLOCK_STATUS: u16 = 7;
}

/// Bits of a request.
pub mod command_flag {
    /// Durable when it is done.
    pub const FUA: u16 = 1;
    /// Zeros must be allocated.
    pub const NO_HOLE: u16 = 1 << 1;
    /// In one piece.
    pub const DF: u16 = 1 << 2;
    /// One extent only.
    pub const REQ_ONE: u16 = 1 << 3;
}

/// Kinds of chunks.
pub mod chunk {
    /// Nothing but the end.
    pub const NONE: u16 = 0;
    /// Data.
    pub const OFFSET_DATA: u16 = 1;
    /// Zeros.
    pub const OFFSET_HOLE: u16 = 2;
    /// Extents.
    pub const BLOCK_STATUS: u16 = 5;
    /// The bit of all errors.
    pub const ERROR_BIT: u16 = 1 << 15;
    /// An error.
    pub const ERROR: u16 = ERROR_BIT + 1;
    /// An error at an offset.
    pub const ERROR_OFFSET: u16 = ERROR_BIT + 2;
    /// The bit (of the flags) of the last chunk.
    pub const DONE: u16 = 1;
}

/// Errors.
pub mod error {
    /// `EPERM`.
    pub const PERM: u32 = 1;
    /// `EIO`.
    pub const IO: u32 = 5;
    /// `ENOMEM`.
    pub const NOMEM: u32 = 12;
    /// `EINVAL`.
    pub const INVAL: u32 = 22;
    /// `ENOSPC`.
    pub const NOSPC: u32 = 28;
    /// `EOVERFLOW`.
    pub const OVERFLOW: u32 = 75;
    /// `ENOTSUP`.
    pub const NOTSUP: u32 = 95;
    /// `ESHUTDOWN`.
    pub const SHUTDOWN: u32 = 108;
}

/// The context that says which ranges hold data.
pub const BASE_ALLOCATION: &str = "base:allocation";
