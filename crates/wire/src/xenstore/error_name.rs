//! The errors of the protocol, which travel as names.

use core::fmt;

macro_rules! error_names {
    ($($(#[$doc:meta])* $variant:ident = $text:literal,)*) => {
        /// Why a request failed: the payload of an `ERROR` reply is this name and a NUL.
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
        pub enum ErrorName {
            $($(#[$doc])* $variant,)*
        }

        impl ErrorName {
            /// All of them.
            pub const ALL: &'static [ErrorName] = &[$(ErrorName::$variant,)*];

            /// The name on the wire, without the NUL.
            pub fn as_str(self) -> &'static str {
                match self { $(ErrorName::$variant => $text,)* }
            }

            /// The error called `name` (without NUL), if the protocol has it.
            pub fn from_name(name: &[u8]) -> Option<ErrorName> {
                ErrorName::ALL.iter().copied().find(|error| error.as_str().as_bytes() == name)
            }
        }
    };
}

error_names! {
    /// The request is malformed.
    Invalid = "EINVAL",
    /// The permissions of the node do not allow it.
    Access = "EACCES",
    /// It is there already.
    Exists = "EEXIST",
    /// It is a directory.
    IsDirectory = "EISDIR",
    /// There is no such node, watch, transaction or domain.
    NotFound = "ENOENT",
    /// The server is out of memory.
    NoMemory = "ENOMEM",
    /// A quota is used up.
    NoSpace = "ENOSPC",
    /// The server's storage failed.
    Io = "EIO",
    /// The node has children.
    NotEmpty = "ENOTEMPTY",
    /// No such request.
    NotImplemented = "ENOSYS",
    /// Nothing may be written.
    ReadOnly = "EROFS",
    /// Try it later: something is in the way.
    Busy = "EBUSY",
    /// The transaction met a conflict: do all of it again.
    Again = "EAGAIN",
    /// The domain is introduced already.
    IsConnected = "EISCONN",
    /// More than fits (a directory listing, a value).
    TooBig = "E2BIG",
    /// Only a privileged domain may do that.
    NotPermitted = "EPERM",
}

impl fmt::Display for ErrorName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl std::error::Error for ErrorName {}
