//! Frontends that leave, and return, without a state change.
//!
//! Linux' blkfront writes only state Closed when it is unbound from a device, and nothing when it is bound
//! again: it waits for a backend in state Connected. This side therefore stays connected when a frontend
//! left without state Closing. (A kernel that shuts down or executes another one writes Closing, and is
//! answered.)
//!
//! This side must not leave Connected even for a moment. A frontend that is bound again at once may have
//! read Connected before; from then on its xenbus thread is busy with the disk. If it sees a later
//! state too late, it closes the disk that it just created. A further state then makes Linux 6.1 stop at a
//! `BUG_ON`.
//!
//! GRUB writes only state Closed as well, before it hands over to a kernel, and waits without end for a backend that is
//! Closed. The two differ in a key: blkfront writes `feature-persistent` since Linux 3.8, whatever its value, and GRUB
//! never does. So a frontend without the key is answered.
//!
//! This side may also miss that the frontend left. It then serves rings that no frontend uses any more
//! ([`VbdBackend::is_replaced`]).

use ringfence_platform::Gref;
use ringfence_wire::blkif::keys;
use ringfence_wire::xenbus::XenbusState;
use ringfence_xenbus::end::is_about_a_key;
use ringfence_xenbus::steps::BackendView;
use ringfence_xenstore::{StoreAccess, StoreClient, StoreError};

use super::VbdBackend;

/// First page of a ring, and the key that names it. The frontend does not reuse the reference while the page
/// is mapped, so the reference distinguishes a frontend from its predecessor.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct FirstPage {
    /// Path of the store key.
    pub(super) key: String,
    /// Grant reference of the page.
    pub(super) gref: Gref,
}

impl VbdBackend {
    /// Returns `true` if the frontend, which is Closed, left without state Closing, and the device must stay connected
    /// for its return.
    pub(super) fn is_silent(
        &self,
        view: Option<BackendView>,
        store: &mut StoreClient,
    ) -> Result<bool, StoreError> {
        let stays = |view: BackendView| {
            view.own == XenbusState::Connected && view.online && !view.penalized
        };
        if !view.is_some_and(stays) {
            return Ok(false);
        }
        match store.read_opt(&self.end.front(keys::FEATURE_PERSISTENT)) {
            Ok(key) => Ok(key.is_some()),
            Err(error) if is_about_a_key(&error) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Returns `true` if the rings in service are not those of the ready frontend: it left and returned between
    /// two calls of [`VbdBackend::look`].
    pub(super) fn is_replaced(
        &self,
        view: Option<BackendView>,
        store: &mut StoreClient,
    ) -> Result<bool, StoreError> {
        let is_ready = |view: &BackendView| {
            let peer = matches!(view.peer, Some(XenbusState::Initialised | XenbusState::Connected));
            peer && view.attached && view.own == XenbusState::Connected && !view.penalized
        };
        let Some(first) = self.first_page.as_ref().filter(|_| view.as_ref().is_some_and(is_ready))
        else {
            return Ok(false);
        };
        match store.read_u32_opt(&first.key) {
            Ok(named) => Ok(named.is_some_and(|gref| gref != first.gref.0)),
            Err(error) if is_about_a_key(&error) => Ok(false),
            Err(error) => Err(error),
        }
    }
}
