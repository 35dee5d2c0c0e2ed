//! One vif of the daemon: the toolstack's keys, its settings and its attachment.
//!
//! A vif is attached either to the daemon's switch, or to a TAP of the host. In the second case a
//! dataplane with two ports connects both, and a port that is full slows the other one down
//! (backpressure).

use ringfence_net::vif::controls::VifPolicy;
use ringfence_switch::dataplane::{DataplaneHandle, PortId};
use ringfence_sys::tap::Tap;
use std::time::Duration;

use super::config::DeviceSettings;
use super::vif_keys::VifKeys;

/// Attachment of a vif.
pub(super) enum Attached {
    Switch(DataplaneHandle),
    Tap(TapAttachment),
}

/// TAP of the host, and the dataplane between the TAP and the guest.
pub(super) struct TapAttachment {
    pub(super) dataplane: DataplaneHandle,
    pub(super) tap: Tap,
    pub(super) port: Option<PortId>,
    pub(super) bridge: Option<String>,
}

impl Attached {
    pub(super) fn dataplane(&self) -> &DataplaneHandle {
        match self {
            Attached::Switch(dataplane) | Attached::Tap(TapAttachment { dataplane, .. }) => {
                dataplane
            }
        }
    }
}

/// Daemon's part of a vif.
pub(super) struct XenVif {
    pub(super) keys: VifKeys,
    pub(super) settings: DeviceSettings,
    /// Maximum length of a frame without its Ethernet header, in bytes.
    pub(super) mtu: u16,
    pub(super) attached: Option<Attached>,
}

impl XenVif {
    /// Returns the attachment to a TAP.
    pub(super) fn tap(&self) -> Option<&TapAttachment> {
        match &self.attached {
            Some(Attached::Tap(attachment)) => Some(attachment),
            _ => None,
        }
    }

    /// Returns the dataplane of the vif's port.
    pub(super) fn dataplane(&self) -> Option<&DataplaneHandle> {
        self.attached.as_ref().map(Attached::dataplane)
    }

    /// Returns the port of the TAP.
    pub(super) fn tap_port(&self) -> Option<PortId> {
        self.tap()?.port
    }
}

/// Returns the policy of a vif's backend.
pub(super) fn policy_of(settings: &DeviceSettings) -> VifPolicy {
    VifPolicy {
        multicast_control: settings.multicast_control,
        stall: Duration::from_secs(settings.stall_seconds.into()),
    }
}
