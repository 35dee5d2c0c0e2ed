//! Errors of the protocol, which are sent as names.

use core::fmt;

macro_rules! error_names {
    ($($(#[$doc:meta])* $variant:ident = $text:literal,)*) => {
        /// Error of a failed request. The payload of an `ERROR` reply is its name and a NUL.
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
        pub enum ErrorName {
            $($(#[$doc])* $variant,)*
        }

        impl ErrorName {
            pub const ALL: &'static [ErrorName] = &[$(ErrorName::$variant,)*];

            /// Returns the name on the wire, without the NUL.
            pub fn as_str(self) -> &'static str {
                match self { $(ErrorName::$variant => $text,)* }
            }

            /// Returns the error called `name` (without NUL), if the protocol has it.
            pub fn from_name(name: &[u8]) -> Option<ErrorName> {
                ErrorName::ALL.iter().copied().find(|error| error.as_str().as_bytes() == name)
            }
        }
    };
}

error_names! {
    /// The request is malformed.
    Invalid = "EINVAL",
    /// Node permissions deny the access.
    Access = "EACCES",
    /// Subject of the request already exists.
    Exists = "EEXIST",
    IsDirectory = "EISDIR",
    /// Unknown node, watch, transaction or domain.
    NotFound = "ENOENT",
    /// Server out of memory.
    NoMemory = "ENOMEM",
    /// Quota is used up.
    NoSpace = "ENOSPC",
    /// Storage of the server failed.
    Io = "EIO",
    /// The node has children.
    NotEmpty = "ENOTEMPTY",
    /// Request unknown to the server.
    NotImplemented = "ENOSYS",
    ReadOnly = "EROFS",
    /// Resource in use: retry later.
    Busy = "EBUSY",
    /// Transaction conflict: repeat the whole transaction.
    Again = "EAGAIN",
    /// Domain is already introduced.
    IsConnected = "EISCONN",
    /// Directory listing or value too large for a message.
    TooBig = "E2BIG",
    /// Request reserved for privileged domains.
    NotPermitted = "EPERM",
}

impl fmt::Display for ErrorName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl std::error::Error for ErrorName {}
