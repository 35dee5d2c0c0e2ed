//! Xenbus conventions on top of the store: device states (Xen's `io/xenbus.h`) and device paths.
//!
//! A split device has two directories. Each end writes its own directory, reads the other one, and
//! publishes its state in the key [`STATE`]:
//!
//! ```text
//! /local/domain/F/device/vif/N          frontend's: backend, backend-id, state, ring refs, …
//! /local/domain/B/backend/vif/F/N       backend's: frontend, frontend-id, state, features, …
//! ```
//!
//! Values written by the other end are untrusted. Read each value once, parse it with
//! [`XenbusState::parse`] or [`decimal`], and keep the result.

use crate::decimal::{self, NumberError};
use crate::grant::DomId;
use crate::macros::enum_with_unknown;
use core::fmt;
use thiserror::Error;

/// Key of either end: its [`XenbusState`] as a decimal number.
pub const STATE: &str = "state";
/// Key in the frontend's directory: path of the backend's directory.
pub const BACKEND: &str = "backend";
/// Key in the frontend's directory: domain id of the backend.
pub const BACKEND_ID: &str = "backend-id";
/// Key in the backend's directory: path of the frontend's directory.
pub const FRONTEND: &str = "frontend";
/// Key in the backend's directory: domain id of the frontend.
pub const FRONTEND_ID: &str = "frontend-id";
/// Key in the backend's directory: `0` when the device is to be removed permanently.
pub const ONLINE: &str = "online";

enum_with_unknown! {
    /// State of one end of a device (`enum xenbus_state`). The peer may write any state at any time,
    /// skip states and repeat them.
    pub enum XenbusState(u32) {
        /// `XenbusStateUnknown`, also used for a missing key.
        Missing = 0,
        /// `XenbusStateInitialising`: created by the toolstack, or restarting.
        Initialising = 1,
        /// `XenbusStateInitWait`: the backend published its features and waits for the frontend.
        InitWait = 2,
        /// `XenbusStateInitialised`: rings and event channels are published.
        Initialised = 3,
        /// `XenbusStateConnected`: in operation.
        Connected = 4,
        /// `XenbusStateClosing`: this end wants to stop.
        Closing = 5,
        /// `XenbusStateClosed`: this end has released everything.
        Closed = 6,
        /// `XenbusStateReconfiguring`: this end wants to change settings.
        Reconfiguring = 7,
        /// `XenbusStateReconfigured`: this end has applied the change.
        Reconfigured = 8,
    }
}

impl XenbusState {
    /// Parses the value of the key [`STATE`].
    ///
    /// # Errors
    /// Returns the first rule of [`NumberError`] that the text breaks. A number without a defined state
    /// gives [`XenbusState::Unknown`] and is no error.
    pub fn parse(value: &[u8]) -> Result<XenbusState, NumberError> {
        decimal::parse_u32(value).map(XenbusState::from_raw)
    }
}

/// Writes the decimal number, as in the store.
impl fmt::Display for XenbusState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.to_raw().fmt(f)
    }
}

/// Device kinds, named by their directory in the store.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum DeviceKind {
    /// Network interface in the directory `vif`.
    Vif,
    /// Disk in the directory `vbd`.
    Vbd,
}

impl DeviceKind {
    /// Returns the name of the directory.
    pub fn as_str(self) -> &'static str {
        match self {
            DeviceKind::Vif => "vif",
            DeviceKind::Vbd => "vbd",
        }
    }

    fn from_name(name: &str) -> Option<DeviceKind> {
        [DeviceKind::Vif, DeviceKind::Vbd].into_iter().find(|kind| kind.as_str() == name)
    }
}

/// Reasons for which a path names no backend directory.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum DevicePathError {
    /// Path not of the form `/local/domain/B/backend/KIND/F/N`, optionally with more components.
    #[error("the path is not /local/domain/B/backend/KIND/F/N")]
    Form,
    /// Malformed number in the path.
    #[error("bad number in the path of a backend: {0}")]
    Number(#[from] NumberError),
}

/// Identity of one split device: its kind, its two domains and its handle.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct DeviceId {
    pub kind: DeviceKind,
    /// Domain that uses the device.
    pub frontend: DomId,
    /// Domain that serves the device.
    pub backend: DomId,
    /// Number of the device among those of its kind in the frontend.
    pub handle: u32,
}

impl DeviceId {
    /// Returns the path of the frontend's directory.
    pub fn frontend_path(&self) -> String {
        let DeviceId { kind, frontend, handle, .. } = self;
        format!("/local/domain/{frontend}/device/{}/{handle}", kind.as_str())
    }

    /// Returns the path of the backend's directory.
    pub fn backend_path(&self) -> String {
        let DeviceId { kind, frontend, backend, handle } = self;
        format!("/local/domain/{backend}/backend/{}/{frontend}/{handle}", kind.as_str())
    }

    /// Parses the path of a backend's directory, or of a node below it. A watch on [`backend_root`]
    /// reports such paths.
    ///
    /// # Errors
    /// Returns [`DevicePathError`] for any other path.
    pub fn parse_backend_path(path: &str) -> Result<DeviceId, DevicePathError> {
        let mut parts = path.split('/');
        let mut next = || parts.next().ok_or(DevicePathError::Form);
        let fixed = [next()?, next()?, next()?];
        let backend = next()?;
        let word = next()?;
        if (fixed, word) != (["", "local", "domain"], "backend") {
            return Err(DevicePathError::Form);
        }
        let kind = DeviceKind::from_name(next()?).ok_or(DevicePathError::Form)?;
        Ok(DeviceId {
            kind,
            frontend: DomId(decimal::parse_u16(next()?.as_bytes())?),
            backend: DomId(decimal::parse_u16(backend.as_bytes())?),
            handle: decimal::parse_u32(next()?.as_bytes())?,
        })
    }
}

/// Returns the directory of all devices of one kind that `backend` serves.
pub fn backend_root(backend: DomId, kind: DeviceKind) -> String {
    format!("/local/domain/{backend}/backend/{}", kind.as_str())
}

/// Returns the directory of all devices of one kind in `frontend`.
pub fn frontend_root(frontend: DomId, kind: DeviceKind) -> String {
    format!("/local/domain/{frontend}/device/{}", kind.as_str())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const VIF: DeviceId =
        DeviceId { kind: DeviceKind::Vif, frontend: DomId(7), backend: DomId(0), handle: 2 };

    #[test]
    fn every_state_number_round_trips() {
        for raw in (0..16).chain([u32::MAX]) {
            assert_eq!(XenbusState::from_raw(raw).to_raw(), raw);
        }
        assert_eq!(XenbusState::parse(b"4"), Ok(XenbusState::Connected));
        assert_eq!(XenbusState::parse(b"9"), Ok(XenbusState::Unknown(9)));
        assert_eq!(XenbusState::Connected.to_string(), "4");
    }

    #[test]
    fn non_decimal_state_is_rejected() {
        assert_eq!(XenbusState::parse(b""), Err(NumberError::Empty));
        assert!(XenbusState::parse(b"Connected").is_err());
        assert!(XenbusState::parse(b"4\n").is_err());
        assert!(XenbusState::parse(&[b'4'; 4096]).is_err());
    }

    #[test]
    fn device_paths_match_xenbus_layout() {
        assert_eq!(VIF.frontend_path(), "/local/domain/7/device/vif/2");
        assert_eq!(VIF.backend_path(), "/local/domain/0/backend/vif/7/2");
        assert_eq!(backend_root(DomId(0), DeviceKind::Vbd), "/local/domain/0/backend/vbd");
        assert_eq!(frontend_root(DomId(7), DeviceKind::Vif), "/local/domain/7/device/vif");
    }

    #[test]
    fn backend_path_with_or_without_child_node_parses() {
        let parse = DeviceId::parse_backend_path;
        assert_eq!(parse("/local/domain/0/backend/vif/7/2"), Ok(VIF));
        assert_eq!(parse("/local/domain/0/backend/vif/7/2/state"), Ok(VIF));
        for path in [
            "",
            "/",
            "/local/domain/0/backend/vif",
            "/local/domain/0/backend/vif/7",
            "/local/domain/0/device/vif/7/2",
            "/local/domain/0/backend/vkbd/7/2",
            "local/domain/0/backend/vif/7/2",
        ] {
            assert_eq!(parse(path), Err(DevicePathError::Form), "{path:?}");
        }
        let number = parse("/local/domain/0/backend/vif/x/2");
        assert_eq!(
            number,
            Err(DevicePathError::Number(NumberError::NotADigit { position: 0, byte: b'x' }))
        );
    }

    proptest! {
        #[test]
        fn backend_path_of_any_device_round_trips(frontend: u16, backend: u16, handle: u32) {
            let device = DeviceId {
                kind: DeviceKind::Vbd,
                frontend: DomId(frontend),
                backend: DomId(backend),
                handle,
            };
            prop_assert_eq!(DeviceId::parse_backend_path(&device.backend_path()), Ok(device));
        }

        #[test]
        fn parse_backend_path_of_any_text_does_not_panic(path: String) {
            let _ = DeviceId::parse_backend_path(&path);
        }
    }
}
