//! Control thread of a driver domain: one loop for both commands.
//!
//! [`Control::run`] waits for all sources of events at once and serves each of them once a round:
//!
//! ```text
//! source                        effect
//! xenstore's watches      ────> the device that an event names is due (`devices`)
//! ports that ended        ────> the port is removed, its device is closed and due (`vifs`)
//! ring and opener threads ────> the device that they name is due (`vbds`)
//! control rings           ────> one round of requests; a device to close is due (`vifs`)
//! retry times             ────> the device that failed is due (`devices`)
//! memory pressure         ────> each pool of pages keeps a share of them (`sys::pressure`)
//! the domain's own        ────> DriverDomain::serve
//!                                   │
//!                                   ▼
//!            Devices::work ────> Backends::look: each due device advances its handshake once
//! ```
//!
//! A source of a round is bounded, so that no guest keeps the others from being served. No step waits for a guest,
//! a launcher or storage.
//!
//! [`DriverDomain`] has what only one of the two commands does. `run` creates its devices itself, for launchers
//! ([`switch`](crate::switch)); `serve` finds devices that a toolstack created, and takes over those of an
//! earlier daemon ([`xen`](crate::xen)). Everything else is the same for both:
//!
//! * A device that fails is tried again after [`AGAIN`](crate::devices::AGAIN).
//! * A port that ends by itself closes its device; the guest may connect again.
//! * A control ring that is not empty after one round is served again, after the others.
//! * Counters and rule violations of ports and devices that are gone are summed up.
//! * Storage of a removed disk completes its requests on a thread of its own.
//! * Of two vifs with one Ethernet address on a switch, the one that connected last has it.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Instant;

use ringfence_platform::Platform;
use ringfence_sys::pressure::{PressureMonitor, Share};
use ringfence_wire::netif::keys;
use ringfence_wire::xenbus::{self, DeviceId, DeviceKind};
use ringfence_xenstore::{StoreClient, StoreError};
use rustix::event::{PollFd, PollFlags};

use crate::devices::{Devices, Look, Served};
use crate::domain::{Backends, Control, DriverDomain, Flow};
use crate::vbds::Vbds;
use crate::vifs::{AfterControl, Vifs};
use crate::workers::EndedPorts;

/// Maximum number of store events that one round takes before it serves the devices that they name.
const EVENTS_PER_ROUND: usize = 256;

impl<P: Platform, D: DriverDomain> Control<P, D> {
    /// Creates the control thread of `domain`, which has no device yet.
    ///
    /// # Errors
    ///
    /// Returns the system's error.
    pub(crate) fn new(
        domain: D,
        platform: Arc<P>,
        store: StoreClient,
        ended: EndedPorts,
        pressure: PressureMonitor,
    ) -> io::Result<Control<P, D>> {
        let devices = Devices::new(platform.domid());
        let (vifs, vbds) = (Vifs::new(), Vbds::new()?);
        let backends = Backends { domain, platform, ended, vifs, vbds, share: Share::WHOLE };
        Ok(Control { store, devices, backends, controls: BTreeSet::new(), pressure })
    }

    /// Runs rounds until the domain ends.
    ///
    /// # Errors
    ///
    /// Returns an error if the connection to the store failed, and errors of the domain itself.
    pub(crate) fn run(&mut self) -> Result<(), D::Error> {
        let mut more = true;
        loop {
            let until = if more { Some(Instant::now()) } else { self.deadline() };
            self.wait(until)?;
            if D::serve(self)? == Flow::End {
                return Ok(());
            }
            more = self.run_round()?;
        }
    }

    /// Returns the next time at which the loop has work without an event.
    fn deadline(&self) -> Option<Instant> {
        let deadlines = [self.devices.deadline(), self.backends.domain.deadline()];
        deadlines.into_iter().flatten().min()
    }

    /// Blocks until something happens, or until `until`. Notes the control rings that have requests, and adapts the pools to
    /// memory pressure.
    ///
    /// # Errors
    ///
    /// Returns the system's error.
    pub(crate) fn wait(&mut self, until: Option<Instant>) -> io::Result<()> {
        let Backends { domain, ended, vifs, vbds, .. } = &self.backends;
        let mut sources = vec![self.store.fd(), ended.as_fd(), vbds.events.as_fd()];
        sources.extend(domain.sources());
        let first = sources.len();
        let (devices, controls): (Vec<_>, Vec<_>) = vifs.controls().unzip();
        sources.extend(controls);
        let readable = sources.into_iter().map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
        let (events, share) = self.pressure.wait(readable.collect(), until)?;
        let ready = devices.into_iter().zip(&events[first..]);
        let ready = ready.filter(|(_, events)| !events.is_empty()).map(|(device, _)| device);
        self.controls.extend(ready);
        if let Some(share) = share {
            self.backends.set_share(share);
        }
        Ok(())
    }

    /// Serves all sources of devices once. Returns `true` if more events may wait that were already read from the
    /// store's socket, so that `poll` does not report them.
    ///
    /// # Errors
    ///
    /// Returns an error if the connection to the store failed, and errors of the domain itself.
    pub(crate) fn run_round(&mut self) -> Result<bool, D::Error> {
        self.retire_ended_ports();
        let mut more = self.take_store_events()?;
        more |= self.serve_controls();
        self.backends.vbds.events.clear();
        self.backends.vbds.events.drain().for_each(|device| self.devices.mark(&device));
        more |= self.devices.work(&mut self.store, &mut self.backends)?;
        for device in self.backends.vifs.displaced.drain(..) {
            self.devices.mark(&device);
            more = true;
        }
        more |= D::finish_round(self);
        Ok(more)
    }

    fn retire_ended_ports(&mut self) {
        self.backends.ended.clear();
        while let Some(gone) = self.backends.ended.dequeue() {
            if let Some(device) = self.backends.retire_port(gone) {
                self.devices.mark(&device);
            }
        }
    }

    /// Marks the devices that store events name. Returns `true` if more events may wait.
    fn take_store_events(&mut self) -> Result<bool, StoreError> {
        for _ in 0..EVENTS_PER_ROUND {
            let Some(event) = self.store.next_event()? else { return Ok(false) };
            self.devices.handle_event(&event);
        }
        Ok(true)
    }

    /// Serves each control ring that may have requests, once. Returns `true` if some have more.
    fn serve_controls(&mut self) -> bool {
        let mut again = BTreeSet::new();
        for device in core::mem::take(&mut self.controls) {
            match self.backends.serve_control(&device) {
                AfterControl::Wait => {}
                AfterControl::Look => self.devices.mark(&device),
                AfterControl::Again => {
                    again.insert(device);
                }
            }
        }
        self.controls = again;
        !self.controls.is_empty()
    }
}

impl<P: Platform, D: DriverDomain> Backends<P, D> {
    /// Returns `true` if the device has a record.
    pub(crate) fn has(&self, device: &DeviceId) -> bool {
        match device.kind {
            DeviceKind::Vif => self.vifs.list.contains_key(device),
            DeviceKind::Vbd => self.vbds.list.contains_key(device),
        }
    }

    /// Sets the share of its pages that each pool keeps under memory pressure. Each device has the share of its own limit: how
    /// much one uses says nothing about the others.
    fn set_share(&mut self, share: Share) {
        tracing::info!(%share, "memory pressure: share of the pages that stay mapped");
        self.share = share;
        self.vbds.list.values_mut().for_each(|vbd| vbd.backend.set_share(share));
        self.domain.set_share(share);
    }

    /// Starts to close a device, for the reason `why`. The device is due then.
    pub(crate) fn close(&mut self, device: &DeviceId, why: &str) {
        match device.kind {
            DeviceKind::Vif => self.close_vif(device, why),
            DeviceKind::Vbd => self.close_vbd(device, why),
        }
    }
}

impl<P: Platform, D: DriverDomain> Served for Backends<P, D> {
    fn watch_paths(&self, device: &DeviceId) -> Vec<String> {
        let front = device.frontend_path();
        let keys: &[&str] = match device.kind {
            DeviceKind::Vif => &[xenbus::STATE, keys::REQUEST_MULTICAST_CONTROL],
            DeviceKind::Vbd => &[xenbus::STATE],
        };
        keys.iter().map(|key| format!("{front}/{key}")).collect()
    }

    fn look(&mut self, device: &DeviceId, store: &mut StoreClient) -> Result<Look, StoreError> {
        match device.kind {
            DeviceKind::Vif => self.look_at_vif(device, store),
            DeviceKind::Vbd => self.look_at_vbd(device, store),
        }
    }

    fn forget(&mut self, device: &DeviceId) {
        match device.kind {
            DeviceKind::Vif => self.forget_vif(device),
            DeviceKind::Vbd => self.forget_vbd(device),
        }
    }
}
