//! Errors of connecting a vif's backend, and the mapping of a ring page.

use ringfence_platform::{Access, GrantStatus, Grantee, Gref, PlatformError, WindowError};
use ringfence_ring::RingPages;
use ringfence_xenstore::StoreError;

use ringfence_frame::port::Fault;

/// Reasons for which the backend cannot connect to a frontend. Each ends the device.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// Key that is missing or unusable.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// Granter whose pages are not accessible.
    #[error(transparent)]
    Arena(PlatformError),
    /// Event channel that cannot be bound.
    #[error("event channel port {port} cannot be bound: {source}")]
    Channel {
        /// Port number in the frontend's key.
        port: u32,
        /// Error of the platform.
        source: PlatformError,
    },
    /// Request for the obsolete receive mode without copies.
    #[error("the frontend did not ask for rx-copy, the only receive mode there is")]
    NoRxCopy,
    /// Number of queues above the offer, or zero.
    #[error("the frontend wants {wanted} queues, {limit} were offered")]
    Queues {
        /// Requested number of queues.
        wanted: u32,
        /// Offered number of queues.
        limit: u32,
    },
    /// Ring that cannot be mapped.
    #[error("the {ring} ring, reference {gref}, cannot be mapped: {status}")]
    Ring {
        /// Name of the ring.
        ring: &'static str,
        /// Reference of the ring's page.
        gref: Gref,
        /// Status of the map operation.
        status: GrantStatus,
    },
    /// Ring page of a wrong size.
    #[error("the ring page is unusable: {0}")]
    RingPage(#[from] ringfence_memory::OutOfRange),
    /// Grant window that cannot be used.
    #[error("the window of the {ring} ring cannot be used: {source}")]
    Window {
        /// Name of the ring.
        ring: &'static str,
        /// Error of the grant window.
        source: WindowError,
    },
    /// Queue of a previous backend that cannot be taken over.
    #[error("the device cannot be taken over: {0}")]
    Adopt(#[source] Fault),
}

impl ConnectError {
    /// Returns the rule name for the counters.
    pub fn rule(&self) -> &'static str {
        match self {
            ConnectError::Store(StoreError::Number { .. }) => "connect_not_a_number",
            ConnectError::Store(_) => "connect_missing_key",
            ConnectError::Arena(PlatformError::BadArena { kind, .. }) => kind,
            ConnectError::Arena(_) => "connect_no_arena",
            ConnectError::Channel { .. } => "connect_bad_port",
            ConnectError::NoRxCopy => "connect_no_rx_copy",
            ConnectError::Queues { .. } => "connect_too_many_queues",
            ConnectError::Ring { .. } => "connect_ring_grant",
            ConnectError::RingPage(_) => "connect_ring_page",
            ConnectError::Window { source: WindowError::NoSuchWindow { .. }, .. } => {
                "connect_no_such_window"
            }
            ConnectError::Window { source: WindowError::TooLarge { .. }, .. } => {
                "connect_window_too_large"
            }
            ConnectError::Window { .. } => "connect_window",
            ConnectError::Adopt(_) => "connect_not_adopted",
        }
    }
}

/// Maps the page of a ring.
pub(super) fn map_ring(
    pages: &mut impl Grantee,
    ring: &'static str,
    gref: Gref,
) -> Result<RingPages, ConnectError> {
    let mut mapped = Vec::with_capacity(1);
    pages.map(&[(gref, Access::ReadWrite)], &mut mapped);
    let page = mapped.pop().unwrap_or(Err(GrantStatus::GeneralError));
    let page = page.map_err(|status| ConnectError::Ring { ring, gref, status })?;
    let bytes = page.len();
    Ok(RingPages::new(page, bytes)?)
}
