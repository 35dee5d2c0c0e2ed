//! Frontends that leave without a word, and come back without one.
//!
//! Linux' blkfront says nothing when it is unbound from a device but that it is closed, and nothing at
//! all when it is bound again: it waits for a backend that is connected, and takes no other. One that
//! left without having said that it was closing (a kernel that ends, or starts another one, says so)
//! therefore finds the device connected, a moment later, with all that it is to know of the disk.
//!
//! It may also come back at once, while this side is still connected to the one that left. From there on
//! it answers to nothing but its disk: its thread for the store reads the table of partitions. So
//! whatever is the case here then, it is connected:
//!
//! * this side has not seen it leave: it serves rings that nobody uses ([`VbdBackend::is_replaced`]);
//! * this side has seen it leave, and lets go: it is connected when that is done;
//! * this side has closed already, too late for it to see: it is connected all the same
//!   ([`Silence::step`]).

use std::time::{Duration, Instant};

use ringfence_platform::Gref;
use ringfence_platform::store::{StoreAccess, StoreClient, StoreError};
use ringfence_platform::xenbus::end::is_about_a_key;
use ringfence_platform::xenbus::steps::{BackendStep, BackendView};
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

impl Silence {
    /// The step that is due: `step`, unless the frontend is back that left in silence, and has not seen
    /// that this side closed.
    pub(super) fn step(self, view: BackendView, step: BackendStep) -> BackendStep {
        let is_back = matches!(view.peer, Some(XenbusState::Initialised | XenbusState::Connected));
        let closed = view.own == XenbusState::Closed && view.online && !view.attached;
        match step {
            BackendStep::Wait if self != Silence::No && is_back && closed && !view.condemned => {
                BackendStep::Connect
            }
            step => step,
        }
    }
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

    /// Whether a look is due in a second or two, without a watch that fires.
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
