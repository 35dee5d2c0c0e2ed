//! Errors of connecting a vif's backend, and the mapping of a ring page.

use ringfence_platform::{Access, GrantStatus, Grantee, Gref, PlatformError, WindowError};
use ringfence_ring::RingPages;
use ringfence_xenstore::StoreError;

use ringfence_frame::port::Fault;

/// Why a frontend that says it is ready cannot be connected. Costs that device.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// A key is missing or unusable.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The frontend's pages cannot be reached.
    #[error(transparent)]
    Arena(PlatformError),
    /// An event channel cannot be bound.
    #[error("event channel port {port} cannot be bound: {source}")]
    Channel {
        /// The port the frontend named.
        port: u32,
        /// Why not.
        source: PlatformError,
    },
    /// The frontend wants a mode that is dead.
    #[error("the frontend did not ask for rx-copy, the only receive mode there is")]
    NoRxCopy,
    /// More queues than were offered.
    #[error("the frontend wants {wanted} queues, {limit} were offered")]
    Queues {
        /// PortPolicy.
        wanted: u32,
        /// Offered.
        limit: u32,
    },
    /// A ring cannot be mapped.
    #[error("the {ring} ring, reference {gref}, cannot be mapped: {status}")]
    Ring {
        /// Which.
        ring: &'static str,
        /// Its reference.
        gref: Gref,
        /// Why not.
        status: GrantStatus,
    },
    /// A ring page is no ring.
    #[error("the ring page is unusable: {0}")]
    RingPage(#[from] ringfence_memory::OutOfRange),
    /// A window that it named is of no use.
    #[error("the window of the {ring} ring cannot be used: {source}")]
    Window {
        /// Whose.
        ring: &'static str,
        /// Why not.
        source: WindowError,
    },
    /// A queue that a backend before this one served cannot be taken over.
    #[error("the device cannot be taken over: {0}")]
    Adopt(#[source] Fault),
}

impl ConnectError {
    /// A constant name, for counters.
    pub fn rule(&self) -> &'static str {
        match self {
            ConnectError::Store(StoreError::Number { .. }) => "connect_not_a_number",
            ConnectError::Store(_) => "connect_missing_key",
            ConnectError::Arena(PlatformError::BadArena { why, .. }) => why.kind(),
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
