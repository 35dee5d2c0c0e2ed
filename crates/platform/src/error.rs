//! Errors of a platform.

use std::io;

use ringfence_wire::grant::DomId;

/// Errors of setting up grants, channels or store connections.
#[derive(Debug, thiserror::Error)]
pub enum PlatformError {
    /// Failed system call.
    #[error("{what}: {source}")]
    System {
        /// Operation, as a noun phrase with a participle.
        what: &'static str,
        source: io::Error,
    },
    /// The hub refused a request.
    #[error("the hub refused to {what}: {source}")]
    Refused {
        /// Request, as a verb with its object.
        what: &'static str,
        /// Reason that the hub gave: [`Refusal`](crate::local::Refusal).
        source: BoxedError,
    },
    /// Lent memory breaks a rule.
    #[error("what domain {peer} lent cannot be used: {source}")]
    BadArena {
        peer: DomId,
        /// Name of the rule, for counters.
        kind: &'static str,
        /// Rule that is broken: [`ArenaFault`](crate::local::ArenaFault).
        source: BoxedError,
    },
    /// Lost connection to the hub or the store.
    #[error("the connection to the {0} was lost")]
    Disconnected(&'static str),
    /// Missing or inaccessible device of the hypervisor.
    #[error(transparent)]
    Device(BoxedError),
    #[error(transparent)]
    Store(#[from] ringfence_xenstore::StoreError),
}

/// Cause of an error, of a type that only the implementation of the platform knows.
pub type BoxedError = Box<dyn std::error::Error + Send + Sync>;

impl PlatformError {
    pub(crate) fn system(what: &'static str, source: impl Into<io::Error>) -> PlatformError {
        PlatformError::System { what, source: source.into() }
    }
}
