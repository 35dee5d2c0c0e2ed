//! Services of a platform, as one domain sees them.

use std::sync::Arc;

use ringfence_sys::counters::Counters;
use ringfence_wire::grant::DomId;

use crate::error::PlatformError;
use crate::events::{Channel, EventPort};
use crate::grants::{Grantee, Granter};
use crate::window::{TranslationTable, WindowError, WindowName, WindowShape, WindowView};

/// Platform services as one domain sees them.
pub trait Platform: Send + Sync + 'static {
    /// Granting side of a pair of domains.
    type Granter: Granter;
    /// Accessing side of a pair of domains.
    type Grantee: Grantee;
    /// One end of an event channel.
    type Channel: Channel;

    /// Returns the number of this domain.
    fn domid(&self) -> DomId;

    /// Opens a new connection to the store.
    ///
    /// # Errors
    ///
    /// Fails if the store cannot be reached.
    fn store(&self) -> Result<ringfence_xenstore::StoreClient, PlatformError>;

    /// Returns a granter for pages of this domain that `peer` may access.
    ///
    /// # Errors
    ///
    /// Fails if a quota is used up or the system refuses.
    fn granter(&self, peer: DomId) -> Result<Self::Granter, PlatformError>;

    /// Returns a grantee for the pages that `granter` granted to this domain.
    ///
    /// # Errors
    ///
    /// Fails if `granter` granted nothing, or its memory breaks a rule.
    fn grantee(&self, granter: DomId) -> Result<Self::Grantee, PlatformError>;

    /// Allocates a channel that only `peer` may bind.
    ///
    /// # Errors
    ///
    /// Fails if a quota is used up or the system refuses.
    fn alloc_unbound(&self, peer: DomId) -> Result<Self::Channel, PlatformError>;

    /// Binds the channel that `peer` allocated for this domain as `port`. The new end is pending once.
    ///
    /// # Errors
    ///
    /// Fails if there is no such port, it is for another domain, or it is already bound.
    fn bind_interdomain(
        &self,
        peer: DomId,
        port: EventPort,
    ) -> Result<Self::Channel, PlatformError>;

    /// Creates a grant window for `grantee`: memory in which this domain alone issues and revokes
    /// grants. Some platforms can create windows only before their sandbox closes.
    ///
    /// # Errors
    ///
    /// Returns [`WindowError::NeedsPeer`] if the platform cannot revoke without the peer. Otherwise
    /// fails if a quota is used up or the system refuses.
    fn window(
        &self,
        _grantee: DomId,
        _shape: WindowShape,
    ) -> Result<Box<dyn TranslationTable>, WindowError> {
        Err(WindowError::NeedsPeer)
    }

    /// Opens a grant window that `granter` created for this domain, and maps all of it.
    ///
    /// # Errors
    ///
    /// Returns [`WindowError::NeedsPeer`] if the platform has no grant windows. Otherwise fails if there
    /// is no window of that name, it has more than `entries_max` entries, or it breaks a rule.
    fn open_window(
        &self,
        _granter: DomId,
        _name: impl Into<WindowName>,
        _entries_max: u32,
    ) -> Result<WindowView, WindowError> {
        Err(WindowError::NeedsPeer)
    }

    /// Returns `true` if this platform has grant windows.
    fn has_windows(&self) -> bool {
        false
    }

    /// Returns the counters of all operations of this platform.
    fn counters(&self) -> &Arc<Counters>;
}
