//! Both ends of a device in the store: paths, states, and the backend's penalty.
//!
//! A peer owns its directory and can write anything there, or revoke the permission to read it. Such
//! a value counts as state [`XenbusState::Missing`] and as a rule violation; only errors of the store
//! itself are returned.

use std::sync::Arc;

use ringfence_sys::rules::RuleCounters;
use ringfence_wire::xenbus::{self, DeviceId, XenbusState};
use ringfence_wire::xenstore::ErrorName;
use ringfence_xenstore::{StoreAccess, StoreClient, StoreError};

use super::connect::{ConnectError, Rejection};
use super::steps::{BackendView, FrontendView};

/// Maximum steps per look. No handshake needs as many, so a peer that changes its state all the time
/// does not delay other devices.
pub const STEPS_MAX: usize = 8;

/// Result of a backend's look at its device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Life {
    /// The device still exists.
    Alive,
    /// The device was removed; the caller forgets it.
    Over,
}

/// Returns `true` if an error comes from a value that the peer wrote, not from the store.
pub fn is_about_a_key(error: &StoreError) -> bool {
    matches!(
        error,
        StoreError::Refused { .. } | StoreError::Number { .. } | StoreError::NotText { .. }
    )
}

/// Backend's end of a device.
#[derive(Debug)]
pub struct BackendEnd {
    device: DeviceId,
    front: String,
    back: String,
    rules: Arc<RuleCounters>,
    penalty: Option<String>,
    /// Set while the frontend's keys may name windows that ended with an earlier backend.
    awaits_windows: bool,
}

/// Next step of a backend after a failed connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Failed {
    /// The device closes with a penalty.
    Reject,
    /// The features are announced again, so that the frontend makes new windows.
    Announce,
    /// The frontend has not made new windows yet.
    Wait,
}

impl BackendEnd {
    /// Creates the end of a device that a toolstack created.
    pub fn new(device: DeviceId) -> BackendEnd {
        let (front, back) = (device.frontend_path(), device.backend_path());
        BackendEnd {
            device,
            front,
            back,
            rules: Arc::default(),
            penalty: None,
            awaits_windows: false,
        }
    }

    /// Returns the id of the device.
    pub fn device(&self) -> &DeviceId {
        &self.device
    }

    /// Returns the directory of the frontend.
    pub fn front_path(&self) -> &str {
        &self.front
    }

    /// Returns the directory of the backend.
    pub fn back_path(&self) -> &str {
        &self.back
    }

    /// Returns the path of a key of the frontend.
    pub fn front(&self, key: &str) -> String {
        format!("{}/{key}", self.front)
    }

    /// Returns the path of a key of the backend.
    pub fn back(&self, key: &str) -> String {
        format!("{}/{key}", self.back)
    }

    /// Returns the paths that the backend watches.
    pub fn watch_paths(&self) -> [String; 2] {
        [self.front(xenbus::STATE), self.back.clone()]
    }

    /// Returns the counters of the guest's rule violations, by rule.
    pub fn rules(&self) -> &Arc<RuleCounters> {
        &self.rules
    }

    /// Returns the reason for which this end closed the device, if it did.
    pub fn penalized(&self) -> Option<&str> {
        self.penalty.as_deref()
    }

    /// Records a rule violation of the guest. The next look closes the device. The log line of a guest
    /// that reconnects and violates a rule again appears at powers of two only.
    pub fn close_with_penalty(&mut self, why: String) {
        let times = self.rules.count("device_condemned") + 1;
        if times.is_power_of_two() {
            tracing::warn!(device = %self.back, %why, times, "device closed");
        }
        self.penalty.get_or_insert(why);
    }

    /// Closes the device with a penalty for an error that the frontend caused.
    ///
    /// # Errors
    ///
    /// Returns the error of the store, if `error` is one of the store itself.
    pub fn reject<R: Rejection>(&mut self, error: ConnectError<R>) -> Result<(), StoreError> {
        match error {
            ConnectError::Store(error) if !is_about_a_key(&error) => Err(error),
            error => {
                self.rules.count(error.rule());
                self.close_with_penalty(error.to_string());
                Ok(())
            }
        }
    }

    /// Returns the step after a connection that failed with `error`; `adopting` says that the device was connected
    /// by an earlier backend.
    ///
    /// On Xen, grant windows end with the process that registered them, so a successor finds the frontend's keys
    /// without their windows. This is no fault of the frontend: the device is announced again, and until the
    /// frontend has followed, its old keys are no reason for a penalty.
    pub fn failed<R: Rejection>(&mut self, adopting: bool, error: &ConnectError<R>) -> Failed {
        if !error.is_missing_window() || !(adopting || self.awaits_windows) {
            return Failed::Reject;
        }
        self.rules.count("window_ended_with_backend");
        match core::mem::replace(&mut self.awaits_windows, true) {
            true => Failed::Wait,
            false => Failed::Announce,
        }
    }

    /// Returns `true` while the frontend has still to make new windows.
    pub fn awaits_windows(&self) -> bool {
        self.awaits_windows
    }

    /// Records that the device is connected.
    pub fn connected(&mut self) {
        self.awaits_windows = false;
    }

    /// Clears the penalty, because the frontend restarts the handshake.
    pub fn reset_penalty(&mut self) {
        self.penalty = None;
    }

    /// Reads both states. Returns `None` if the device was removed.
    ///
    /// # Errors
    ///
    /// Returns errors of the store, but not those that a value of the frontend causes.
    pub fn view(
        &self,
        store: &mut StoreClient,
        attached: bool,
    ) -> Result<Option<BackendView>, StoreError> {
        let own = match store.read_opt(&self.back(xenbus::STATE)) {
            Ok(Some(own)) => own,
            // The toolstack removed the directory, or its permissions.
            Ok(None) | Err(StoreError::Refused { .. }) => return Ok(None),
            Err(error) => return Err(error),
        };
        let peer = match store.read_opt(&self.front(xenbus::STATE)) {
            Ok(peer) => peer.map(|text| self.peer_state(&text)),
            // The frontend changed the permissions of its key.
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
            penalized: self.penalty.is_some(),
        }))
    }

    fn peer_state(&self, text: &[u8]) -> XenbusState {
        XenbusState::parse(text).unwrap_or_else(|_| {
            self.rules.count("state_not_a_number");
            XenbusState::Missing
        })
    }

    /// Writes this end's state, and the reason if the device was closed for a rule violation.
    ///
    /// # Errors
    ///
    /// Returns errors of the store.
    pub fn enter(&self, store: &mut StoreClient, state: XenbusState) -> Result<(), StoreError> {
        if let Some(why) = &self.penalty {
            store.write(&self.back("error"), why)?;
        }
        store.write(&self.back(xenbus::STATE), state.to_string())
    }
}

/// Returns the backend's directory that the frontend's key `backend` names.
///
/// A backend of another kind than the kernel's has its directory elsewhere than [`DeviceId::backend_path`]: QEMU's are
/// below `backend/qnic` and `backend/qdisk`. A path outside of the backend domain's own directory counts as a missing
/// key.
///
/// # Errors
///
/// Returns errors of the store.
pub fn backend_path(store: &mut impl StoreAccess, device: &DeviceId) -> Result<String, StoreError> {
    let named = store.read_opt(&format!("{}/{}", device.frontend_path(), xenbus::BACKEND))?;
    let named = named.and_then(|text| String::from_utf8(text).ok());
    let own = format!("/local/domain/{}/backend/", device.backend);
    Ok(named.filter(|path| path.starts_with(&own)).unwrap_or_else(|| device.backend_path()))
}

/// Frontend's end of a device.
#[derive(Debug)]
pub struct FrontendEnd {
    device: DeviceId,
    front: String,
    back: String,
}

impl FrontendEnd {
    /// Creates the end of a device that a toolstack created.
    pub fn new(device: DeviceId) -> FrontendEnd {
        FrontendEnd { device, front: device.frontend_path(), back: device.backend_path() }
    }

    /// Sets the backend's directory, as [`backend_path`] found it.
    #[must_use]
    pub fn with_backend(self, back: String) -> FrontendEnd {
        FrontendEnd { back, ..self }
    }

    /// Returns the id of the device.
    pub fn device(&self) -> &DeviceId {
        &self.device
    }

    /// Returns the directory of the frontend.
    pub fn front_path(&self) -> &str {
        &self.front
    }

    /// Returns the directory of the backend.
    pub fn back_path(&self) -> &str {
        &self.back
    }

    /// Returns the path of a key of the frontend.
    pub fn front(&self, key: &str) -> String {
        format!("{}/{key}", self.front)
    }

    /// Returns the path of a key of the backend.
    pub fn back(&self, key: &str) -> String {
        format!("{}/{key}", self.back)
    }

    /// Returns the path that the frontend watches.
    pub fn watch_path(&self) -> String {
        self.back(xenbus::STATE)
    }

    /// Reads both states. The caller fills in the rest of the view.
    ///
    /// # Errors
    ///
    /// Returns errors of the store.
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

    /// Writes this end's state. Does nothing if the device was removed.
    ///
    /// # Errors
    ///
    /// Returns errors of the store.
    pub fn enter(&self, store: &mut StoreClient, state: XenbusState) -> Result<(), StoreError> {
        if_ours(store.write(&self.front(xenbus::STATE), state.to_string())).map(|_| ())
    }
}

/// Converts a refusal of the store to `None`. The directories of a removed device belong to another
/// domain, and the permissions of a missing node are those of its parent.
fn if_ours<T>(outcome: Result<T, StoreError>) -> Result<Option<T>, StoreError> {
    match outcome {
        Ok(value) => Ok(Some(value)),
        Err(error) => match error.refusal() {
            Some(ErrorName::Access | ErrorName::NotFound) => Ok(None),
            _ => Err(error),
        },
    }
}
