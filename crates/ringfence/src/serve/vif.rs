//! One vif of the daemon: its handshake and its attachment.
//!
//! A vif that is attached to a TAP follows it and its guest. The kernel segments the frames from the TAP that the
//! guest does not take whole, so that a guest with few buffers receives them. Both ports have the MTU of the TAP,
//! which an administrator may change.

use ringfence_frame::commands::PortCommand;
use ringfence_net::vif::backend::VifBackend;
use ringfence_switch::dataplane::{DataplaneHandle, PortId};
use ringfence_switch::forwarding::Mac;
use ringfence_sys::tap::Tap;
use ringfence_wire::xenbus::DeviceId;

use super::bridge;
use super::config::DeviceSettings;
use super::vif_keys::VifKeys;
use ringfence_driver::ports::{PortEntry, device_name};
use ringfence_hostnet::log::LineBudget;

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

/// One vif, its handshake and its attachment.
pub(super) struct Vif {
    pub(super) keys: VifKeys,
    pub(super) settings: DeviceSettings,
    pub(super) mtu: u16,
    pub(super) backend: VifBackend,
    pub(super) problem: Option<String>,
    pub(super) entry: PortEntry,
    pub(super) attached: Option<Attached>,
    /// Budget for log lines that the guest causes by connecting and disconnecting.
    pub(super) lines: LineBudget,
}

impl Vif {
    /// Returns `true` if the vif is on the switch and may use only the address `mac`.
    pub(super) fn is_held_to(&self, mac: Mac) -> bool {
        let on_switch = matches!(self.attached, Some(Attached::Switch(_)));
        on_switch && self.settings.check_source && self.keys.mac == Some(mac)
    }

    /// Makes the kernel segment the frames from the TAP that the connected guest does not take whole.
    pub(super) fn limit_tap(&mut self) {
        let Some(Attached::Tap(attached)) = &mut self.attached else { return };
        let Some(connection) = self.backend.connection() else { return };
        let wanted = bridge::offloads_for(connection.features.peer);
        if let Err(error) = attached.tap.limit_offloads(wanted) {
            tracing::warn!(name = %attached.tap.name, %error, "its offloads stay");
        }
    }

    /// Takes over the MTU of the TAP, for both ports and for later connections.
    pub(super) fn follow_mtu(&mut self, device: &DeviceId) {
        let now = self.tap().and_then(|(name, _)| bridge::mtu_of(name));
        let Some(mtu) = now.filter(|now| *now != self.mtu) else { return };
        self.mtu = mtu;
        self.backend.set_mtu(mtu);
        let (guest, tap) = self.ports();
        for port in [guest, tap].into_iter().flatten() {
            // A port that is gone is made again with the new value.
            let set = PortCommand::SetMtu(mtu);
            drop(self.dataplane().and_then(|workers| workers.execute(port, 0, set)));
        }
        tracing::info!(name = %device_name(device), mtu, "its interface has another MTU now");
    }

    /// Returns the names of the TAP and of its bridge.
    pub(super) fn tap(&self) -> Option<(&str, Option<&str>)> {
        match &self.attached {
            Some(Attached::Tap(attached)) => Some((&attached.tap.name, attached.bridge.as_deref())),
            _ => None,
        }
    }

    /// Returns the dataplane of the vif's port.
    pub(super) fn dataplane(&self) -> Option<&DataplaneHandle> {
        self.attached.as_ref().map(Attached::dataplane)
    }

    /// Returns the ports of the guest and of the TAP.
    pub(super) fn ports(&self) -> (Option<PortId>, Option<PortId>) {
        let tap = match &self.attached {
            Some(Attached::Tap(attached)) => attached.port,
            _ => None,
        };
        (self.entry.port(), tap)
    }
}
