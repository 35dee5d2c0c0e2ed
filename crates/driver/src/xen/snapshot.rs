//! Status of the daemon at one moment.

use std::collections::BTreeMap;
use std::time::Duration;

use ringfence_net::vif::toolstack::mac_text;
use ringfence_platform::Platform;
use ringfence_switch::dataplane::{DataplaneStats, PortId, PortStats};
use ringfence_sys::poll::wait_readable;
use ringfence_wire::netif::keys::HOTPLUG_STATUS;
use ringfence_wire::xenbus::{DeviceId, XenbusState};
use ringfence_xenstore::{StoreAccess, StoreClient};

use super::bridge;
use super::disks::report::{disk_totals, vbd_status};
use super::domain::XenDomain;
use super::states::{counts, state_name, state_of};
use super::status::{
    Attachment, Counts, DaemonStatus, HostStatus, QUEUE_FULL, QueueStatus, Snapshot, VifStatus,
};
use super::vif::XenVif;
use crate::domain::{Backends, Control};
use crate::ports::device_name;
use crate::vifs::Vif;

impl<P: Platform> Control<P, XenDomain> {
    /// Answers requests for a snapshot. Returns `true` if there were any.
    pub(super) fn answer(&mut self) -> bool {
        let XenDomain { requests, status, .. } = &self.backends.domain;
        requests.clear();
        let waiting: Vec<_> = requests.drain().collect();
        let asked = !waiting.is_empty();
        if !asked && !wait_readable(status.fd(), Some(Duration::ZERO)).unwrap_or(false) {
            return false;
        }
        let snapshot = self.snapshot();
        for sender in waiting {
            // A thread whose time is over has dropped its receiver.
            let _ = sender.send(snapshot.clone());
        }
        self.backends.domain.status.answer(|| snapshot);
        true
    }

    /// Collects the state and the counters of the daemon and of its devices.
    fn snapshot(&mut self) -> Snapshot {
        let Backends { domain, platform, vifs, vbds, .. } = &self.backends;
        let switch = domain.switch.as_ref();
        let switch = switch.map(|dataplane| dataplane.stats().unwrap_or_default());
        let host_interface = domain.host_leg.as_ref().map(|leg| HostStatus {
            name: leg.name.clone(),
            counters: tap_counts(switch.as_ref(), Some(leg.port), &leg.name).unwrap_or_default(),
        });
        let daemon = DaemonStatus {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            platform: domain.setup.platform_name().to_owned(),
            domain: platform.domid().0,
            pid: std::process::id(),
            uptime_seconds: domain.began.elapsed().as_secs(),
            path: counts(platform.counters().values().named()),
            gone_ports: counts(vifs.retired_ports.counts()),
            gone_rules: counts(vifs.retired_rules.clone()),
            adopted: domain.adopted_vifs,
            disks: disk_totals(domain.adopted_disks, vbds),
            switch_addresses: switch.as_ref().map(|stats| stats.addresses as u64),
            host_interface,
        };
        let store = &mut self.store;
        let vifs = vifs.list.iter().map(|(device, vif)| {
            let stats = match &switch {
                Some(switch) => Some(switch.clone()),
                None => vif.own.dataplane().and_then(|dataplane| dataplane.stats()),
            };
            vif_status(device, vif, stats.as_ref(), store)
        });
        let vifs = vifs.collect();
        let disks = vbds.list.iter().map(|(device, vbd)| vbd_status(device, vbd, store)).collect();
        Snapshot { vifs, disks, daemon }
    }
}

fn port_of(stats: Option<&DataplaneStats>, port: Option<PortId>) -> Option<&PortStats> {
    stats?.ports.iter().find(|stats| Some(stats.id) == port)
}

fn port_counts(stats: Option<&DataplaneStats>, port: Option<PortId>) -> Option<Counts> {
    Some(counts(port_of(stats, port)?.counters.iter().copied()))
}

/// Returns the counters of a TAP's port, with the frames that the kernel dropped before the port could read them.
fn tap_counts(
    stats: Option<&DataplaneStats>,
    port: Option<PortId>,
    interface: &str,
) -> Option<Counts> {
    let mut counts = port_counts(stats, port)?;
    let dropped = bridge::queue_drops(interface).filter(|dropped| *dropped > 0);
    counts.extend(dropped.map(|dropped| (QUEUE_FULL.to_owned(), dropped)));
    Some(counts)
}

fn vif_status(
    device: &DeviceId,
    vif: &Vif<XenVif>,
    stats: Option<&DataplaneStats>,
    store: &mut StoreClient,
) -> VifStatus {
    let guest = vif.entry.port();
    let XenVif { keys, mtu, .. } = &vif.own;
    let attachment = match vif.own.tap() {
        Some(attachment) => Attachment::Tap {
            interface: attachment.tap.name.clone(),
            bridge: attachment.bridge.clone(),
        },
        None => Attachment::Switch,
    };
    let hotplug = store.read_opt(&format!("{}/{}", device.backend_path(), HOTPLUG_STATUS));
    let hotplug = hotplug.ok().flatten().and_then(|text| String::from_utf8(text).ok());
    let connection = vif.backend.connection();
    let backend_state = state_of(store, &device.backend_path());
    let queues = port_counts(stats, guest).map(|counters| QueueStatus { counters });
    let rules: BTreeMap<_, _> = vif.backend.rules().all().into_iter().collect();
    VifStatus {
        name: device_name(device),
        domain: device.frontend.0,
        domain_name: keys.domain_name.clone(),
        handle: device.handle,
        mac: keys.mac.map(mac_text),
        mtu: *mtu,
        attachment,
        backend_state: state_name(backend_state),
        frontend_state: state_name(state_of(store, &device.frontend_path())),
        hotplug_status: hotplug,
        connected: guest.is_some() && backend_state == Some(XenbusState::Connected),
        adopted: connection.is_some_and(|connection| connection.adopted),
        mode: vif.backend.mode().name().to_owned(),
        frontend_takes: connection.map(|connection| connection.features.peer.to_string()),
        backend_takes: connection.map(|connection| connection.features.own.to_string()),
        problem: vif.problem.clone().or_else(|| vif.backend.penalized().map(str::to_owned)),
        queue_count: connection.map_or(0, |connection| connection.queues),
        staged_pages: vif.backend.staged(),
        queues: queues.into_iter().collect(),
        levels: counts(vif.levels(port_of(stats, guest))),
        tap: vif.own.tap().and_then(|own| tap_counts(stats, own.port, &own.tap.name)),
        rules: counts(rules),
    }
}
