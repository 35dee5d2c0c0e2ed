//! Connection of a backend to a frontend: the rings, channels and grant windows that the frontend's keys
//! name, and the errors.
//!
//! The functions map and bind one resource each. Their errors are a [`ConnectError`], which a kind of
//! device extends by its own reasons ([`Rejection`]). [`BackendEnd::reject`](crate::end::BackendEnd::reject)
//! closes the device for such an error.

use core::fmt;

use ringfence_memory::OutOfRange;
use ringfence_platform::{
    Access, DomId, EventPort, GrantStatus, Grantee, Gref, Platform, PlatformError, WindowError,
    WindowName, WindowView,
};
use ringfence_ring::RingPages;
use ringfence_xenstore::StoreError;

/// Maximum number of entries of a ring's grant window: more than a ring has slots, and few enough to
/// check periodically.
pub const WINDOW_ENTRIES_MAX: u32 = 4096;

/// Prefix of a ring's keys, as messages about it name the ring.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RingName {
    /// Ring with a name of its own.
    Named(&'static str),
    /// Only ring of a queue.
    OfQueue(u32),
}

impl fmt::Display for RingName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RingName::Named(name) => write!(f, "the {name} ring"),
            RingName::OfQueue(queue) => write!(f, "ring {queue}"),
        }
    }
}

/// Reasons of one kind of device to reject a frontend.
pub trait Rejection: core::error::Error {
    /// Returns a constant name of the reason, for counters.
    fn rule(&self) -> &'static str;
}

/// Reasons for which a backend cannot connect to a ready frontend. Each closes that device.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError<R> {
    /// Store key that is missing or unusable.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// Memory of the frontend that cannot be accessed.
    #[error(transparent)]
    Arena(PlatformError),
    /// Event channel that cannot be bound.
    #[error("event channel port {port} cannot be bound: {source}")]
    Channel {
        /// Port number in the frontend's key.
        port: u32,
        source: PlatformError,
    },
    /// Number of queues that is 0 or larger than offered.
    #[error("the frontend wants {wanted} queues, {limit} were offered")]
    Queues {
        /// Number of queues requested.
        wanted: u32,
        /// Number of queues offered.
        limit: u32,
    },
    /// Ring page that cannot be mapped.
    #[error("page {page} of {ring}, reference {gref}, cannot be mapped: {status}")]
    Ring {
        ring: RingName,
        /// Number of the page in its ring.
        page: usize,
        /// Grant reference of the page.
        gref: Gref,
        status: GrantStatus,
    },
    /// Ring pages of unusable size.
    #[error("the pages of a ring are unusable: {0}")]
    RingMemory(#[from] OutOfRange),
    /// Grant window that cannot be opened.
    #[error("the window of {ring} cannot be used: {source}")]
    Window { ring: RingName, source: WindowError },
    /// Reason that only this kind of device has.
    #[error(transparent)]
    Device(R),
}

impl<R: Rejection> ConnectError<R> {
    /// Returns `true` if a key of the frontend names a grant window that does not exist.
    pub fn is_missing_window(&self) -> bool {
        matches!(self, ConnectError::Window { source: WindowError::NoSuchWindow { .. }, .. })
    }

    /// Returns a constant name of the error, for counters.
    pub fn rule(&self) -> &'static str {
        match self {
            ConnectError::Store(StoreError::Number { .. }) => "connect_not_a_number",
            ConnectError::Store(_) => "connect_missing_key",
            ConnectError::Arena(PlatformError::BadArena { kind, .. }) => kind,
            ConnectError::Arena(_) => "connect_no_arena",
            ConnectError::Channel { .. } => "connect_bad_port",
            ConnectError::Queues { .. } => "connect_too_many_queues",
            ConnectError::Ring { .. } => "connect_ring_grant",
            ConnectError::RingMemory(_) => "connect_ring_page",
            ConnectError::Window { source: WindowError::NoSuchWindow { .. }, .. } => {
                "connect_no_such_window"
            }
            ConnectError::Window { source: WindowError::TooLarge { .. }, .. } => {
                "connect_window_too_large"
            }
            ConnectError::Window { source: WindowError::TooMany { .. }, .. } => {
                "connect_windows_too_many"
            }
            ConnectError::Window { .. } => "connect_window",
            ConnectError::Device(rejection) => rejection.rule(),
        }
    }
}

/// Maps the pages of a ring.
///
/// # Errors
///
/// Returns [`ConnectError::Ring`] for the first page that cannot be mapped.
pub fn map_ring<R>(
    pages: &mut impl Grantee,
    ring: RingName,
    grefs: &[Gref],
) -> Result<RingPages, ConnectError<R>> {
    let wanted: Vec<_> = grefs.iter().map(|gref| (*gref, Access::ReadWrite)).collect();
    let mut mapped = Vec::with_capacity(grefs.len());
    pages.map(&wanted, &mut mapped);
    let mut lent = Vec::with_capacity(grefs.len());
    for (page, (gref, mapped)) in grefs.iter().copied().zip(mapped).enumerate() {
        lent.push(mapped.map_err(|status| ConnectError::Ring { ring, page, gref, status })?);
    }
    Ok(RingPages::paged(lent)?)
}

/// Binds the event channel whose port the frontend published.
///
/// # Errors
///
/// Returns [`ConnectError::Channel`] if the platform refuses it.
pub fn bind_channel<P: Platform, R>(
    platform: &P,
    frontend: DomId,
    port: u32,
) -> Result<P::Channel, ConnectError<R>> {
    let bound = platform.bind_interdomain(frontend, EventPort(port));
    bound.map_err(|source| ConnectError::Channel { port, source })
}

/// Opens the grant window of a ring by the name that the frontend published. Uses by a previous backend
/// end: each ring has its own window, and that backend is gone.
///
/// # Errors
///
/// Returns [`ConnectError::Window`] if the platform cannot open it.
pub fn open_window<R>(
    platform: &impl Platform,
    frontend: DomId,
    ring: RingName,
    name: WindowName,
) -> Result<WindowView, ConnectError<R>> {
    let opened = platform.open_window(frontend, name, WINDOW_ENTRIES_MAX);
    let view = opened.map_err(|source| ConnectError::Window { ring, source })?;
    Ok(view.taking_over())
}
