//! Errors of a client's requests.

use ringfence_wire::decimal::NumberError;
use ringfence_wire::xenstore::{
    EmitError, ErrorName, FramingError, MessageType, PathError, PermissionError, ReplyError,
};
use rustix::io::Errno;
use std::time::Duration;
use thiserror::Error;

/// Reasons for which a request fails.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
pub enum StoreError {
    /// Error in the store's reply.
    #[error("the store refused {kind:?} of {path:?}: {error}")]
    Refused {
        kind: MessageType,
        /// Path in the request; empty if it has none.
        path: String,
        error: ErrorName,
    },
    /// Path that breaks a rule.
    #[error("{path:?} is no path: {error}")]
    Path { path: String, error: PathError },
    /// Request that does not fit into a message.
    #[error(transparent)]
    StoreRequest(#[from] EmitError),
    /// Value that is not the expected number.
    #[error("the value of {path} is not usable: {error}")]
    Number { path: String, error: NumberError },
    /// Value that is not UTF-8.
    #[error("the value of {path} is not text")]
    NotText { path: String },
    /// Missing reply. The connection stays usable if the whole request was sent, or nothing of it.
    #[error("the store did not answer {kind:?} within {timeout:?}")]
    Timeout { kind: MessageType, timeout: Duration },
    /// Conflict in every attempt of a transaction.
    #[error("the transaction met a conflict {attempts} times in a row")]
    Conflicts { attempts: u32 },
    /// Change of the children during every attempt to list them.
    #[error("the children of {path} changed while they were listed, {attempts} times in a row")]
    ListingUnstable { path: String, attempts: u32 },
    /// Listing that is longer than this client accepts.
    #[error("the children of {path} take more than {limit} bytes to list")]
    ListingTooLong {
        path: String,
        /// Limit in bytes.
        limit: usize,
    },
    /// Watch above the limit of this client.
    #[error("{limit} watches are set already")]
    TooManyWatches { limit: usize },
    /// End of the connection, closed by the store.
    #[error("the store closed the connection")]
    Closed,
    /// System error of the descriptor.
    #[error("the connection to the store failed: {0}")]
    System(#[from] Errno),
    /// Bytes that are no message.
    #[error("the store broke its protocol: {0}")]
    Framing(#[from] FramingError),
    /// Malformed reply or event.
    #[error("the store broke its protocol: {0}")]
    Reply(#[from] ReplyError),
    /// Malformed permissions in a reply.
    #[error("the store broke its protocol: {0}")]
    Permissions(#[from] PermissionError),
    /// Reply to no open request.
    #[error("the store broke its protocol: it answered request {found}, which is not open")]
    UnexpectedReply {
        /// Id in the reply.
        found: u32,
    },
    /// Transaction with id 0, which stands for no transaction.
    #[error("the store broke its protocol: it opened transaction 0, which stands for none")]
    NoTransaction,
    /// Connection that an earlier error broke.
    #[error("the connection to the store is out of step after an earlier failure")]
    Broken,
}

impl StoreError {
    /// Returns the error in the store's reply; `None` for every other error.
    pub fn refusal(&self) -> Option<ErrorName> {
        match self {
            StoreError::Refused { error, .. } => Some(*error),
            _ => None,
        }
    }

    /// Returns `true` for errors after which the connection is unusable.
    pub fn breaks(&self) -> bool {
        matches!(
            self,
            StoreError::Closed
                | StoreError::System(_)
                | StoreError::Framing(_)
                | StoreError::Reply(_)
                | StoreError::Permissions(_)
                | StoreError::UnexpectedReply { .. }
                | StoreError::NoTransaction
                | StoreError::Broken
        )
    }
}
