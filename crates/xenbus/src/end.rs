//! Each side's states, as they are read and written.

use std::sync::Arc;

use ringfence_wire::xenbus::{self, DeviceId, XenbusState};
use ringfence_wire::xenstore::ErrorName;

use super::steps::{BackendView, FrontendView};
use ringfence_sys::rules::RuleCounters;
use ringfence_xenstore::{StoreAccess, StoreClient, StoreError};

/// Steps that one look may take: more than any handshake needs, so that a peer that changes its
/// state all the time holds nobody up.
pub const STEPS_MAX: usize = 8;

/// What became of a device in a look of its backend.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Life {
    /// It goes on.
    Alive,
    /// It is gone for good; forget it.
    Over,
}

/// Whether an error is about what a peer wrote, not about the store.
pub fn is_about_a_key(error: &StoreError) -> bool {
    matches!(
        error,
        StoreError::Refused { .. } | StoreError::Number { .. } | StoreError::NotText { .. }
    )
}

/// The backend's end of a device.
#[derive(Debug)]
pub struct BackendEnd {
    device: DeviceId,
    front: String,
    back: String,
    rules: Arc<RuleCounters>,
    penalized: Option<String>,
}

impl BackendEnd {
    /// The end of a device that a toolstack made.
    pub fn new(device: DeviceId) -> BackendEnd {
        let (front, back) = (device.frontend_path(), device.backend_path());
        BackendEnd { device, front, back, rules: Arc::default(), penalized: None }
    }

    /// The device.
    pub fn device(&self) -> &DeviceId {
        &self.device
    }

    /// The path of one of the frontend's keys.
    pub fn front(&self, key: &str) -> String {
        format!("{}/{key}", self.front)
    }

    /// The path of one of the backend's keys.
    pub fn back(&self, key: &str) -> String {
        format!("{}/{key}", self.back)
    }

    /// The paths to watch.
    pub fn watch_paths(&self) -> [String; 2] {
        [self.front(xenbus::STATE), self.back.clone()]
    }

    /// What the guest did wrong, by rule.
    pub fn rules(&self) -> &Arc<RuleCounters> {
        &self.rules
    }

    /// Why the device was closed, if this side did so.
    pub fn penalized(&self) -> Option<&str> {
        self.penalized.as_deref()
    }

    /// The guest broke a rule: the device is to be closed at the next look. A guest that comes back to
    /// be penalized again is logged ever more rarely.
    pub fn close_with_penalty(&mut self, why: String) {
        let times = self.rules.count("device_condemned") + 1;
        if times.is_power_of_two() {
            tracing::warn!(device = %self.back, %why, times, "device closed");
        }
        self.penalized.get_or_insert(why);
    }

    /// The frontend starts over.
    pub fn reset_penalty(&mut self) {
        self.penalized = None;
    }

    /// Both states; `None` where the device is gone.
    ///
    /// # Errors
    ///
    /// The store's, unless they are about what the frontend wrote.
    pub fn view(
        &self,
        store: &mut StoreClient,
        attached: bool,
    ) -> Result<Option<BackendView>, StoreError> {
        let own = match store.read_opt(&self.back(xenbus::STATE)) {
            Ok(Some(own)) => own,
            // Gone, or no longer ours, which is the same where the toolstack took it away.
            Ok(None) | Err(StoreError::Refused { .. }) => return Ok(None),
            Err(error) => return Err(error),
        };
        let peer = match store.read_opt(&self.front(xenbus::STATE)) {
            Ok(peer) => peer.map(|text| self.peer_state(&text)),
            // The frontend's own permissions keep us from reading it.
            Err(StoreError::Refused { .. }) => {
                self.rules.count("state_unreadable");
                Some(XenbusState::Missing)
            }
            Err(error) => return Err(error),
        };
        Ok(Some(BackendView {
            own: XenbusState::parse(&own).unwrap_or(XenbusState::Missing),
            peer,
            attached,
            online: store.read_flag(&self.back(xenbus::ONLINE)).unwrap_or(false),
            penalized: self.penalized.is_some(),
        }))
    }

    fn peer_state(&self, text: &[u8]) -> XenbusState {
        XenbusState::parse(text).unwrap_or_else(|_| {
            self.rules.count("state_not_a_number");
            XenbusState::Missing
        })
    }

    /// Sets our state, and says why if the device was penalized.
    ///
    /// # Errors
    ///
    /// The store's.
    pub fn enter(&self, store: &mut StoreClient, state: XenbusState) -> Result<(), StoreError> {
        if let Some(why) = &self.penalized {
            store.write(&self.back("error"), why)?;
        }
        store.write(&self.back(xenbus::STATE), state.to_string())
    }
}

/// The frontend's end of a device.
#[derive(Debug)]
pub struct FrontendEnd {
    device: DeviceId,
    front: String,
    back: String,
}

impl FrontendEnd {
    /// The end of a device that a toolstack made.
    pub fn new(device: DeviceId) -> FrontendEnd {
        FrontendEnd { device, front: device.frontend_path(), back: device.backend_path() }
    }

    /// The device.
    pub fn device(&self) -> &DeviceId {
        &self.device
    }

    /// The path of one of the frontend's keys.
    pub fn front(&self, key: &str) -> String {
        format!("{}/{key}", self.front)
    }

    /// The path of one of the backend's keys.
    pub fn back(&self, key: &str) -> String {
        format!("{}/{key}", self.back)
    }

    /// The path to watch.
    pub fn watch_path(&self) -> String {
        self.back(xenbus::STATE)
    }

    /// Both states. The rest of the view is what the caller has of the device.
    ///
    /// # Errors
    ///
    /// The store's.
    pub fn view(
        &self,
        store: &mut StoreClient,
        attached: bool,
    ) -> Result<FrontendView, StoreError> {
        let mut state = |path: String| {
            let text = if_ours(store.read_opt(&path))?.flatten();
            let parse = |text: Vec<u8>| XenbusState::parse(&text).unwrap_or(XenbusState::Missing);
            Ok::<_, StoreError>(text.map(parse))
        };
        let own = state(self.front(xenbus::STATE))?.unwrap_or(XenbusState::Missing);
        let peer = state(self.back(xenbus::STATE))?;
        Ok(FrontendView { own, peer, attached, was_up: false, broken: false })
    }

    /// Sets our state, if there is still a device to have one.
    ///
    /// # Errors
    ///
    /// The store's.
    pub fn enter(&self, store: &mut StoreClient, state: XenbusState) -> Result<(), StoreError> {
        if_ours(store.write(&self.front(xenbus::STATE), state.to_string())).map(|_| ())
    }
}

/// `None` where the store refuses. Directories of a device that was taken away are not ours any more:
/// what is not there is judged by what is above it.
fn if_ours<T>(outcome: Result<T, StoreError>) -> Result<Option<T>, StoreError> {
    match outcome {
        Ok(value) => Ok(Some(value)),
        Err(error) => match error.refusal() {
            Some(ErrorName::Access | ErrorName::NotFound) => Ok(None),
            _ => Err(error),
        },
    }
}
