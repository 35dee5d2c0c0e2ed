//! Vifs of the daemon: their records, and their attachment to the switch or to TAPs.
//!
//! Mode, offloads and the address filter of a vif are chosen when the vif is found, and
//! again when its guest starts over.
//!
//! A vif that is attached to a TAP follows it and its guest. The kernel segments the frames from the TAP that the
//! guest does not take whole, so that a guest with few buffers receives them. Both ports have the MTU of the TAP,
//! which an administrator may change.

use std::io;
use std::sync::Arc;

use ringfence_frame::commands::PortCommand;
use ringfence_frame::port::Port;
use ringfence_frame::tap::TapPort;
use ringfence_net::vif::backend::{BackendOptions, VifBackend};
use ringfence_platform::Platform;
use ringfence_switch::dataplane::AddPortError;
use ringfence_switch::forwarding::{Fabric, Patch, PortPolicy};
use ringfence_wire::netif::keys;
use ringfence_wire::xenbus::DeviceId;
use ringfence_xenstore::{StoreClient, StoreError};

use super::bridge::{self, BridgeError};
use super::config::Attach;
use super::domain::XenDomain;
use super::vif::{Attached, TapAttachment, XenVif, policy_of};
use super::vif_keys::VifKeys;
use crate::domain::{Backends, OtherPort};
use crate::ports::device_name;
use crate::vifs::Vif;
use crate::workers::worker_count;

/// Reasons for which a vif is not served for now.
#[derive(Debug, thiserror::Error)]
pub(super) enum VifError {
    #[error(transparent)]
    Bridge(#[from] BridgeError),
    #[error("{limit} devices {of} are served already; see `limits` in the configuration")]
    TooMany {
        /// Set that has reached its limit.
        of: &'static str,
        /// Number of devices that may be served.
        limit: u16,
    },
    /// Source check needs an address, and the toolstack wrote none.
    #[error(
        "the toolstack wrote no usable `mac` for it, to which it could be held: give it one, or set \
         `check-source = false` for it in the configuration"
    )]
    NoMac,
    #[error(transparent)]
    System(#[from] io::Error),
    #[error(transparent)]
    Port(#[from] AddPortError),
}

impl XenDomain {
    /// Creates the record of a vif from the toolstack's keys.
    fn new_vif(&self, device: &DeviceId, keys: VifKeys) -> Vif<XenVif> {
        let settings = self.config.device(keys.domain_name.as_deref(), keys.mac);
        let bridge = self.bridge_of(&keys);
        // A TAP of an earlier daemon keeps the MTU that an administrator gave it.
        let has_tap = self.config.network.attach == Attach::Bridge;
        let earlier = has_tap.then(|| bridge::mtu_of(&device_name(device))).flatten();
        let mtu = earlier.or(keys.mtu).or_else(|| bridge::mtu_of(bridge?));
        let mtu = mtu.unwrap_or(keys::MTU_DEFAULT);
        let backend = VifBackend::new(*device, BackendOptions { mode: settings.mode, mtu })
            .with_offloads(settings.offloads)
            .with_queues(settings.max_queues)
            .with_policy(policy_of(&settings))
            .waiting_for_hotplug(keys.script.is_some());
        Vif::new(backend, XenVif { keys, settings, mtu, attached: None })
    }

    /// Returns the bridge that the daemon connects a vif to.
    fn bridge_of<'a>(&'a self, keys: &'a VifKeys) -> Option<&'a str> {
        match self.config.network.attach {
            Attach::Switch => None,
            Attach::Bridge if keys.has_other_script() => None,
            Attach::Bridge => keys.bridge.as_deref().or(self.config.network.bridge.as_deref()),
        }
    }

    /// Removes the records and the TAP of a vif that is gone.
    pub(super) fn remove_vif(&self, device: &DeviceId, vif: XenVif) {
        let name = device_name(device);
        // The records may also come from an earlier daemon whose connection was not taken over.
        self.records.remove(&name);
        if let Some(Attached::Tap(attachment)) = vif.attached {
            if let Some(port) = attachment.port {
                drop(attachment.dataplane.remove_port(port));
            }
            match attachment.tap.keep(false) {
                Ok(()) => self.made.forget(&name),
                Err(error) => tracing::warn!(%name, %error, "its interface stays"),
            }
        }
    }

    /// Follows a change of a vif's connection.
    pub(super) fn follow_connection(&mut self, device: &DeviceId, vif: &mut Vif<XenVif>) {
        limit_tap(vif);
        let what = match vif.backend.connection() {
            Some(connection) if connection.adopted => {
                self.adopted_vifs += 1;
                "taken over"
            }
            Some(_) => "connected",
            None => "disconnected",
        };
        if let Some(unlogged) = vif.lines.take() {
            tracing::info!(name = %device_name(device), unlogged, "{what}");
        }
    }
}

impl<P: Platform> Backends<P, XenDomain> {
    /// Reads the keys of a vif again unless it is connected: a toolstack may have created it again with other keys.
    pub(super) fn refresh_vif(
        &mut self,
        device: &DeviceId,
        store: &mut StoreClient,
    ) -> Result<(), StoreError> {
        let known = self.vifs.list.get(device);
        if known.is_some_and(|vif| vif.backend.connection().is_some()) {
            return Ok(());
        }
        // The record stays if the keys cannot be read, because the TAP is removed with it.
        let keys = VifKeys::read(store, device)?;
        if self.vifs.list.get(device).is_some_and(|vif| vif.own.keys == keys) {
            return Ok(());
        }
        self.forget_vif(device);
        let vif = self.domain.new_vif(device, keys);
        self.vifs.list.insert(*device, vif);
        Ok(())
    }

    /// Applies a new configuration to all vifs.
    pub(super) fn reconfigure_vifs(&mut self) {
        for vif in self.vifs.list.values_mut() {
            let keys = &vif.own.keys;
            let settings = self.domain.config.device(keys.domain_name.as_deref(), keys.mac);
            let options = BackendOptions { mode: settings.mode, mtu: vif.own.mtu };
            let policy = policy_of(&settings);
            vif.backend.reconfigure(options, settings.offloads, policy, settings.max_queues);
            vif.own.settings = settings;
        }
    }

    /// Checks the limits on served vifs.
    fn check_vif_limits(&self, device: &DeviceId) -> Result<(), VifError> {
        let limits = &self.domain.config.limits;
        let served = self.vifs.list.iter().filter(|(_, vif)| vif.own.attached.is_some());
        let served = served.map(|(of, _)| of);
        let of_domain = served.clone().filter(|other| other.frontend == device.frontend).count();
        for (count, limit, of) in [
            (served.count(), limits.devices, "of all domains"),
            (of_domain, limits.devices_per_domain, "of this domain"),
        ] {
            if count >= usize::from(limit) {
                return Err(VifError::TooMany { of, limit });
            }
        }
        Ok(())
    }

    /// Attaches the vif to the switch or to a TAP, unless it is attached.
    pub(super) fn attach_vif(
        &self,
        device: &DeviceId,
        vif: &mut Vif<XenVif>,
    ) -> Result<(), VifError> {
        if vif.own.attached.is_none() {
            self.check_vif_limits(device)?;
            if vif.own.settings.check_source && vif.own.keys.mac.is_none() {
                return Err(VifError::NoMac);
            }
        }
        if let Some(switch) = &self.domain.switch {
            vif.own.attached = Some(Attached::Switch(switch.clone()));
            return Ok(());
        }
        if vif.own.tap_port().is_some() {
            return Ok(());
        }
        vif.own.attached = Some(Attached::Tap(self.make_tap(device, &vif.own)?));
        limit_tap(vif);
        Ok(())
    }

    /// Creates the TAP of a vif, or opens the persistent one, and adds it to the vif's dataplane.
    fn make_tap(&self, device: &DeviceId, vif: &XenVif) -> Result<TapAttachment, VifError> {
        let name = device_name(device);
        let counters = self.platform.counters();
        let bridge = self.domain.bridge_of(&vif.keys).map(str::to_owned);
        // One queue of the TAP and one thread for each queue that the guest may have.
        let queues = worker_count(vif.settings.max_queues);
        let mut taps = bridge::make_tap(&name, bridge.as_deref(), vif.mtu, queues)?;
        self.domain.made.register(&name);
        // The guest's port stays in its dataplane when only the TAP has to be created again.
        let dataplane = match vif.dataplane() {
            Some(dataplane) => dataplane.clone(),
            None => self.ended.start_workers(queues, || Fabric::Patch(Patch::new()), counters)?,
        };
        let tap =
            taps.first().ok_or(io::ErrorKind::NotFound).map_err(io::Error::from)?.try_clone()?;
        let ports = taps.drain(..).map(|tap| {
            let port = TapPort::new(tap.fd, tap.offloads, vif.mtu, Arc::clone(counters));
            Box::new(port) as Box<dyn Port>
        });
        // Otherwise each frame of a guest without segmentation offload is a write.
        let policy = PortPolicy { join_in_patch: true, ..PortPolicy::default() };
        let port = dataplane.add_queues(ports.collect(), policy, &tap_port_name(&name))?;
        Ok(TapAttachment { dataplane, tap, port: Some(port), bridge })
    }

    /// Handles the port of a TAP, or of the host's leg, that ended by itself. Returns the vif of the TAP.
    pub(super) fn retire_tap(&mut self, port: &OtherPort) -> Option<DeviceId> {
        let OtherPort { id, name, reason } = port;
        for (device, vif) in &mut self.vifs.list {
            let of_guest = device_name(device);
            if *name != tap_port_name(&of_guest) {
                continue;
            }
            if let Some(Attached::Tap(attachment)) = &mut vif.own.attached
                && attachment.port.take_if(|port| port == id).is_some()
            {
                tracing::warn!(name = %of_guest, %reason, "its interface is of no more use");
                return Some(*device);
            }
        }
        if self.domain.host_leg.take_if(|leg| leg.is(port)).is_some() {
            tracing::error!(%name, %reason, "the host has no leg on the switch any more");
        }
        None
    }

    /// Gives each vif the MTU that its TAP has now. An administrator may change that at any time.
    pub(super) fn follow_mtus(&mut self) {
        self.vifs.list.iter_mut().for_each(|(device, vif)| follow_mtu(device, vif));
    }
}

/// Makes the kernel segment the frames from the TAP that the connected guest does not take whole.
fn limit_tap(vif: &mut Vif<XenVif>) {
    let Some(Attached::Tap(attachment)) = &mut vif.own.attached else { return };
    let Some(connection) = vif.backend.connection() else { return };
    let wanted = bridge::offloads_for(connection.features.peer);
    if let Err(error) = attachment.tap.limit_offloads(wanted) {
        tracing::warn!(name = %attachment.tap.name, %error, "its offloads stay");
    }
}

/// Takes over the MTU of the TAP, for both ports and for later connections.
fn follow_mtu(device: &DeviceId, vif: &mut Vif<XenVif>) {
    let now = vif.own.tap().and_then(|attachment| bridge::mtu_of(&attachment.tap.name));
    let Some(mtu) = now.filter(|now| *now != vif.own.mtu) else { return };
    vif.own.mtu = mtu;
    vif.backend.set_mtu(mtu);
    for port in [vif.entry.port(), vif.own.tap_port()].into_iter().flatten() {
        // A port that is gone is made again with the new value.
        let set = PortCommand::SetMtu(mtu);
        drop(vif.own.dataplane().and_then(|workers| workers.execute(port, 0, set)));
    }
    tracing::info!(name = %device_name(device), mtu, "its interface has another MTU now");
}

/// Returns the name of the TAP's port in the dataplane.
fn tap_port_name(vif: &str) -> String {
    format!("{vif} tap")
}
