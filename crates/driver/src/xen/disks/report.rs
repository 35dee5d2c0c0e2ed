//! Rows of disks in the daemon's status.

use std::collections::BTreeMap;

use ringfence_block::blkback::engine_names;
use ringfence_wire::netif::keys::HOTPLUG_STATUS;
use ringfence_wire::xenbus::{DeviceId, XenbusState};
use ringfence_xenstore::{StoreAccess, StoreClient};

use super::keys::Source;
use super::vbd::{Storage, XenVbd};
use crate::ports::device_name;
use crate::vbds::{Vbd, Vbds, ring_counts, ring_levels};
use crate::xen::states::{counts, state_name, state_of};
use crate::xen::status::{DiskTotals, QueueStatus, VbdStatus};

/// Returns the sums over disks that were removed, and those of all disks. `adopted` disks were taken over.
pub(in crate::xen) fn disk_totals(adopted: u64, vbds: &Vbds<XenVbd>) -> DiskTotals {
    DiskTotals {
        adopted,
        gone: counts(vbds.retired.clone()),
        gone_rules: counts(vbds.retired_rules.clone()),
        finishing: vbds.teardown.len() as u64,
    }
}

/// Returns the status of a disk.
pub(in crate::xen) fn vbd_status(
    device: &DeviceId,
    vbd: &Vbd<XenVbd>,
    store: &mut StoreClient,
) -> VbdStatus {
    let (XenVbd { keys, settings, storage, .. }, backend) = (&vbd.own, &vbd.backend);
    let connection = backend.connection();
    let backend_state = state_of(store, &device.backend_path());
    let hotplug = store.read_opt(&format!("{}/{HOTPLUG_STATUS}", device.backend_path()));
    let rings = vbd.rings.iter().map(|ring| QueueStatus { counters: counts(ring_counts(ring)) });
    let geometry = match storage {
        Storage::Open(geometry) => Some(*geometry),
        _ => None,
    };
    let rules: BTreeMap<_, _> = backend.rules().all().into_iter().collect();
    let read_only = keys.read_only || geometry.is_some_and(|geometry| geometry.read_only);
    VbdStatus {
        name: device_name(device),
        domain: device.frontend.0,
        domain_name: keys.domain_name.clone(),
        handle: device.handle,
        vdev: keys.vdev.clone(),
        storage: keys.source.as_ref().ok().map(ToString::to_string),
        format: keys.source.as_ref().ok().and_then(Source::format).map(str::to_owned),
        bytes: geometry.map(|geometry| geometry.bytes),
        sector_size: geometry.map(|geometry| geometry.sector_size),
        read_only,
        backend_state: state_name(backend_state),
        frontend_state: state_name(state_of(store, &device.frontend_path())),
        hotplug_status: hotplug.ok().flatten().and_then(|text| String::from_utf8(text).ok()),
        connected: connection.is_some() && backend_state == Some(XenbusState::Connected),
        adopted: connection.is_some_and(|connection| connection.adopted),
        mode: settings.mode.name().to_owned(),
        persistent: connection.is_some_and(|connection| connection.persistent),
        ring_pages: connection.map(|connection| connection.ring_pages),
        protocol: connection.map(|connection| connection.abi.name().to_owned()),
        engine: engine_names(ring_levels(&vbd.rings)).map(str::to_owned),
        problem: vbd.problem.clone().or_else(|| backend.penalized().map(str::to_owned)),
        queues: rings.collect(),
        levels: counts(ring_levels(&vbd.rings)),
        rules: counts(rules),
    }
}
