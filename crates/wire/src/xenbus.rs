//! The xenbus conventions on top of the store: the device states (Xen's `io/xenbus.h`) and where a
//! device lives.
//!
//! A split device has two directories. Each end writes only its own, reads the other's, and tells
//! where it stands by the key [`STATE`]:
//!
//! ```text
//! /local/domain/F/device/vif/N          frontend's: backend, backend-id, state, ring refs, …
//! /local/domain/B/backend/vif/F/N       backend's: frontend, frontend-id, state, features, …
//! ```
//!
//! What the other end wrote is untrusted: parse it with [`XenbusState::parse`] and
//! [`decimal`], once, and keep the value.

use crate::decimal::{self, NumberError};
use crate::grant::DomId;
use crate::macros::enum_with_unknown;
use core::fmt;
use thiserror::Error;

/// Key, either end: its [`XenbusState`] as a decimal number.
pub const STATE: &str = "state";
/// Key in the frontend's directory: path of the backend's.
pub const BACKEND: &str = "backend";
/// Key in the frontend's directory: the backend's domain id.
pub const BACKEND_ID: &str = "backend-id";
/// Key in the backend's directory: path of the frontend's.
pub const FRONTEND: &str = "frontend";
/// Key in the backend's directory: the frontend's domain id.
pub const FRONTEND_ID: &str = "frontend-id";
/// Key in the backend's directory: `0` once the device is to go away for good.
pub const ONLINE: &str = "online";

enum_with_unknown! {
    /// Where one end of a device stands (`enum xenbus_state`). The peer may write any of them at
    /// any time, skip some, and repeat others.
    pub enum XenbusState(u32) {
        /// `XenbusStateUnknown`: also what a missing key stands for.
        Missing = 0,
        /// `XenbusStateInitialising`: made by the toolstack, or about to start again.
        Initialising = 1,
        /// `XenbusStateInitWait`: the backend published its features and waits for the frontend.
        InitWait = 2,
        /// `XenbusStateInitialised`: rings and event channels are published.
        Initialised = 3,
        /// `XenbusStateConnected`: in operation.
        Connected = 4,
        /// `XenbusStateClosing`: asks to stop.
        Closing = 5,
        /// `XenbusStateClosed`: has let go of everything.
        Closed = 6,
        /// `XenbusStateReconfiguring`: asks for a change of settings.
        Reconfiguring = 7,
        /// `XenbusStateReconfigured`: has taken the change.
        Reconfigured = 8,
    }
}

impl XenbusState {
    /// The state in the value of the key [`STATE`].
    ///
    /// # Errors
    /// The first rule of [`NumberError`] that the text breaks. A number beyond the defined states
    /// is no error but [`XenbusState::Unknown`].
    pub fn parse(value: &[u8]) -> Result<XenbusState, NumberError> {
        decimal::parse_u32(value).map(XenbusState::from_raw)
    }
}

/// The decimal number, as it is written into the store.
impl fmt::Display for XenbusState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.to_raw().fmt(f)
    }
}

/// Kinds of devices, by their directory in the store.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum DeviceKind {
    /// `vif`: a network interface.
    Vif,
    /// `vbd`: a disk.
    Vbd,
}

impl DeviceKind {
    /// The name of the directory.
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

/// Why a path is not that of a device's backend directory.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum DevicePathError {
    /// Not of the form `/local/domain/B/backend/KIND/F/N`, perhaps with more below.
    #[error("the path is not /local/domain/B/backend/KIND/F/N")]
    Form,
    /// One of the three numbers is none.
    #[error("bad number in the path of a backend: {0}")]
    Number(#[from] NumberError),
}

/// One split device: which, and between whom.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct DeviceId {
    /// What it is.
    pub kind: DeviceKind,
    /// The domain that is served.
    pub frontend: DomId,
    /// The domain that serves.
    pub backend: DomId,
    /// Tells the devices of one kind in a frontend apart.
    pub handle: u32,
}

impl DeviceId {
    /// The frontend's directory.
    pub fn frontend_path(&self) -> String {
        let DeviceId { kind, frontend, handle, .. } = self;
        format!("/local/domain/{frontend}/device/{}/{handle}", kind.as_str())
    }

    /// The backend's directory.
    pub fn backend_path(&self) -> String {
        let DeviceId { kind, frontend, backend, handle } = self;
        format!("/local/domain/{backend}/backend/{}/{frontend}/{handle}", kind.as_str())
    }

    /// The device whose backend directory `path` is or lies in: a watch on
    /// [`backend_root`] reports such paths.
    ///
    /// # Errors
    /// [`DevicePathError`].
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

/// The directory in which `backend` finds all devices of one kind that it serves.
pub fn backend_root(backend: DomId, kind: DeviceKind) -> String {
    format!("/local/domain/{backend}/backend/{}", kind.as_str())
}

/// The directory in which `frontend` finds all its devices of one kind.
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
    fn states_are_total_both_ways() {
        for raw in (0..16).chain([u32::MAX]) {
            assert_eq!(XenbusState::from_raw(raw).to_raw(), raw);
        }
        assert_eq!(XenbusState::parse(b"4"), Ok(XenbusState::Connected));
        assert_eq!(XenbusState::parse(b"9"), Ok(XenbusState::Unknown(9)));
        assert_eq!(XenbusState::Connected.to_string(), "4");
    }

    #[test]
    fn states_that_are_no_numbers_are_refused() {
        assert_eq!(XenbusState::parse(b""), Err(NumberError::Empty));
        assert!(XenbusState::parse(b"Connected").is_err());
        assert!(XenbusState::parse(b"4\n").is_err());
        assert!(XenbusState::parse(&[b'4'; 4096]).is_err());
    }

    #[test]
    fn device_directories() {
        assert_eq!(VIF.frontend_path(), "/local/domain/7/device/vif/2");
        assert_eq!(VIF.backend_path(), "/local/domain/0/backend/vif/7/2");
        assert_eq!(backend_root(DomId(0), DeviceKind::Vbd), "/local/domain/0/backend/vbd");
        assert_eq!(frontend_root(DomId(7), DeviceKind::Vif), "/local/domain/7/device/vif");
    }

    #[test]
    fn backend_paths_and_what_lies_below_them() {
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
        fn every_device_comes_back(frontend: u16, backend: u16, handle: u32) {
            let device = DeviceId {
                kind: DeviceKind::Vbd,
                frontend: DomId(frontend),
                backend: DomId(backend),
                handle,
            };
            prop_assert_eq!(DeviceId::parse_backend_path(&device.backend_path()), Ok(device));
        }

        #[test]
        fn any_path_is_refused_or_parsed(path: String) {
            let _ = DeviceId::parse_backend_path(&path);
        }
    }
}
