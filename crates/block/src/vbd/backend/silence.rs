//! Frontends that leave without a word, and come back without one.
//!
//! Linux' blkfront says nothing when it is unbound from a device but that it is closed, and nothing at
//! all when it is bound again: it waits for a backend that is connected, and takes no other. So this side
//! stays connected, to nobody, when a frontend left without having said that it was closing (a kernel that
//! ends, or starts another one, says so, and is answered).
//!
//! It must not close for a moment, either. A frontend that is bound again at once may have seen before that this
//! side was connected; from there on its thread for the store is busy with the disk. A state that it sees too
//! late makes it close the disk that it just made, and one that follows then makes Linux 6.1 stop at a
//! `BUG_ON`.
//!
//! Nor need this side have seen that it left: then it serves rings that nobody uses any more
//! ([`VbdBackend::is_replaced`]).

use ringfence_platform::Gref;
use ringfence_wire::xenbus::XenbusState;
use ringfence_xenbus::end::is_about_a_key;
use ringfence_xenbus::steps::{BackendStep, BackendView};
use ringfence_xenstore::{StoreAccess, StoreClient, StoreError};

use super::VbdBackend;

/// Whether a frontend left without a word, and the device stays as it is for when it is back.
pub(super) fn is_silent(view: BackendView, step: BackendStep) -> bool {
    step == BackendStep::Finish
        && view.own == XenbusState::Connected
        && view.online
        && !view.condemned
}

/// A ring's first page, and the key that names it. While it is mapped its reference is not given to
/// another page, so it tells a frontend from the one before it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct FirstPage {
    /// The path.
    pub(super) key: String,
    /// The reference.
    pub(super) gref: Gref,
}

impl VbdBackend {
    /// Whether the rings that are served are not those of the frontend that is ready: it left and came
    /// back between two looks.
    pub(super) fn is_replaced(
        &self,
        view: Option<BackendView>,
        store: &mut StoreClient,
    ) -> Result<bool, StoreError> {
        let is_ready = |view: &BackendView| {
            let peer = matches!(view.peer, Some(XenbusState::Initialised | XenbusState::Connected));
            peer && view.attached && view.own == XenbusState::Connected && !view.condemned
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
