//! What a client's request can fail with.

use ringfence_wire::decimal::NumberError;
use ringfence_wire::xenstore::{
    EmitError, ErrorName, FramingError, MessageType, PathError, PermissionError, ReplyError,
};
use rustix::io::Errno;
use std::time::Duration;
use thiserror::Error;

/// Why a request failed.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
pub enum StoreError {
    /// The store answered with an error.
    #[error("the store refused {kind:?} of {path:?}: {error}")]
    Refused {
        /// What was asked for.
        kind: MessageType,
        /// Of which path; empty if the request has none.
        path: String,
        /// Its answer.
        error: ErrorName,
    },
    /// The path to ask for breaks a rule.
    #[error("{path:?} is no path: {error}")]
    Path {
        /// What was given.
        path: String,
        /// The rule.
        error: PathError,
    },
    /// The request does not fit into a message.
    #[error(transparent)]
    Request(#[from] EmitError),
    /// A value is not the number that it should be.
    #[error("the value of {path} is not usable: {error}")]
    Number {
        /// Of this node.
        path: String,
        /// The rule.
        error: NumberError,
    },
    /// A value should be text and is not UTF-8.
    #[error("the value of {path} is not text")]
    NotText {
        /// Of this node.
        path: String,
    },
    /// No answer in time. The connection stays usable, if the request had gone out as a whole.
    #[error("the store did not answer {kind:?} within {timeout:?}")]
    Timeout {
        /// What was asked for.
        kind: MessageType,
        /// How long was waited.
        timeout: Duration,
    },
    /// A transaction met a conflict each time.
    #[error("the transaction met a conflict {attempts} times in a row")]
    Conflicts {
        /// How often it was tried.
        attempts: u32,
    },
    /// A listing was changed each time while it was read.
    #[error("the children of {path} changed while they were listed, {attempts} times in a row")]
    ListingUnstable {
        /// Of this node.
        path: String,
        /// How often it was tried.
        attempts: u32,
    },
    /// A listing is longer than this client takes.
    #[error("the children of {path} take more than {limit} bytes to list")]
    ListingTooLong {
        /// Of this node.
        path: String,
        /// Most bytes taken.
        limit: usize,
    },
    /// This client has as many watches as it can.
    #[error("{limit} watches are set already")]
    TooManyWatches {
        /// Most watches.
        limit: usize,
    },
    /// The store closed the connection.
    #[error("the store closed the connection")]
    Closed,
    /// The descriptor failed.
    #[error("the connection to the store failed: {0}")]
    System(#[from] Errno),
    /// What came is no message.
    #[error("the store broke its protocol: {0}")]
    Framing(#[from] FramingError),
    /// A reply or event makes no sense.
    #[error("the store broke its protocol: {0}")]
    Reply(#[from] ReplyError),
    /// The permissions in a reply make no sense.
    #[error("the store broke its protocol: {0}")]
    Permissions(#[from] PermissionError),
    /// A reply to no request of ours.
    #[error("the store broke its protocol: it answered request {found}, which is not open")]
    UnexpectedReply {
        /// The id in the reply.
        found: u32,
    },
    /// The store opened a transaction with the number that stands for none.
    #[error("the store broke its protocol: it opened transaction 0, which stands for none")]
    NoTransaction,
    /// A request failed in a way that left the connection out of step; it is of no more use.
    #[error("the connection to the store is out of step after an earlier failure")]
    Broken,
}

impl StoreError {
    /// The store's own answer, if that is what this is.
    pub fn refusal(&self) -> Option<ErrorName> {
        match self {
            StoreError::Refused { error, .. } => Some(*error),
            _ => None,
        }
    }

    /// Whether the connection is of no more use.
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
