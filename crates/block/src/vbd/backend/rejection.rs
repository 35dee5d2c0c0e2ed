//! Reasons for which a disk's frontend is rejected.

use ringfence_xenbus::connect::{self, Rejection};

use crate::blkback::StartError;

/// Reasons for which only a disk's frontend is rejected.
#[derive(Debug, thiserror::Error)]
pub enum VbdRejection {
    /// Unknown request layout.
    #[error("the frontend's protocol is none that is known")]
    Protocol,
    /// Ring size that is larger than offered or no power of two.
    #[error("the frontend wants rings of {wanted} pages, {limit} were offered")]
    RingPages {
        /// Number of pages requested.
        wanted: u32,
        /// Number of pages offered.
        limit: u32,
    },
    /// Queues that cannot be started.
    #[error(transparent)]
    Start(StartError),
}

impl Rejection for VbdRejection {
    fn rule(&self) -> &'static str {
        match self {
            VbdRejection::Protocol => "connect_unknown_protocol",
            VbdRejection::RingPages { .. } => "connect_ring_size",
            VbdRejection::Start(StartError::Ring(_)) => "connect_ring_index",
            VbdRejection::Start(_) => "connect_not_served",
        }
    }
}

/// Errors of connecting a disk's backend.
pub(super) type ConnectError = connect::ConnectError<VbdRejection>;
