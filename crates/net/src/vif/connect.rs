//! Errors of connecting a vif's backend.

use ringfence_frame::port::Fault;
use ringfence_xenbus::connect::Rejection;

/// Reasons for which only a vif's frontend is rejected.
#[derive(Debug, thiserror::Error)]
pub enum VifRejection {
    /// Request for the obsolete receive mode without copies.
    #[error("the frontend did not ask for rx-copy, the only receive mode there is")]
    NoRxCopy,
    /// Queue of a previous backend that cannot be taken over.
    #[error("the device cannot be taken over: {0}")]
    Adopt(#[source] Fault),
}

impl Rejection for VifRejection {
    fn rule(&self) -> &'static str {
        match self {
            VifRejection::NoRxCopy => "connect_no_rx_copy",
            VifRejection::Adopt(_) => "connect_not_adopted",
        }
    }
}

/// Errors of connecting a vif's backend.
pub(super) type ConnectError = ringfence_xenbus::connect::ConnectError<VifRejection>;
