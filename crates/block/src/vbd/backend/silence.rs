//! Frontends that leave without a word, and come back without one.

use std::time::{Duration, Instant};

use ringfence_platform::store::{StoreClient, StoreError};
use ringfence_platform::xenbus::steps::BackendView;
use ringfence_wire::xenbus::XenbusState;

use super::VbdBackend;

/// From when a frontend left without a word until it is waited for again; see
/// [`VbdBackend::waits_for_driver`].
const WAITS_AFTER: Duration = Duration::from_secs(1);

/// Whether a frontend left without a word; see [`VbdBackend::waits_for_driver`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Silence {
    /// There is one, or it took its leave.
    No,
    /// It did, then.
    Since(Instant),
    /// The device is connected for it when it comes back.
    Kept,
}

impl VbdBackend {
    /// Whether a look is due in a second or two, without a watch that fires.
    ///
    /// Linux' blkfront says nothing when it is unbound from a device but that it is closed, and nothing at
    /// all when it is bound again: it waits for a backend that is connected, and takes no other. One that
    /// left without having said that it was closing (a kernel that ends, or starts another one, says so)
    /// therefore finds the device connected, a moment later, with all that it is to know of the disk.
    pub fn waits_for_driver(&self) -> bool {
        matches!(self.silence, Silence::Since(_))
    }

    /// Whether this side stays connected, to nobody.
    pub(super) fn keeps_connected(&self, view: Option<BackendView>) -> bool {
        let connected = view.is_some_and(|view| view.own == XenbusState::Connected);
        connected && self.silence == Silence::Kept && self.condemned().is_none()
    }

    pub(super) fn wait_for_driver(
        &mut self,
        view: Option<BackendView>,
        store: &mut StoreClient,
    ) -> Result<(), StoreError> {
        let Silence::Since(left) = self.silence else { return Ok(()) };
        let gone = |view: BackendView| {
            let closed = Some(XenbusState::Closed);
            view.own == XenbusState::Closed && view.peer == closed && view.online
        };
        if !view.is_some_and(gone) {
            self.silence = Silence::No;
            return Ok(());
        }
        // Whoever waits for this side to be closed has seen it by then.
        let Some(disk) = self.disk.as_ref().filter(|_| left.elapsed() >= WAITS_AFTER) else {
            return Ok(());
        };
        let decided = self.decided(disk.geometry(), store)?;
        self.silence = Silence::Kept;
        self.publish(&decided, store)
    }
}
