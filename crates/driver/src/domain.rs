//! Driver domains: what the control thread asks the command for which it runs.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Instant;

use ringfence_access::staging::StagingPool;
use ringfence_block::storage::Disk;
use ringfence_frame::port::Fault;
use ringfence_net::ctrl::record::CtrlRecord;
use ringfence_net::netback::QueueRecords;
use ringfence_platform::Platform;
use ringfence_switch::dataplane::{DataplaneHandle, PortId};
use ringfence_switch::forwarding::{Mac, PortPolicy};
use ringfence_sys::pressure::{PressureMonitor, Share};
use ringfence_wire::xenbus::DeviceId;
use ringfence_xenbus::end::Life;
use ringfence_xenstore::{StoreClient, StoreError};

use crate::devices::{Devices, Look};
use crate::vbds::{Vbd, Vbds};
use crate::vifs::{Vif, Vifs};
use crate::workers::EndedPorts;

/// Decision of [`DriverDomain::serve`] about the loop.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Flow {
    Continue,
    End,
}

/// State of a device's attachment or storage, before its handshake advances.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Readiness {
    /// The handshake advances.
    Ready,
    /// The handshake advances, and the device is tried again after a delay.
    Failed,
    /// The handshake must not advance. The device is tried again after a delay.
    Blocked,
}

/// Port that ended by itself and that belongs to no vif.
pub(crate) struct OtherPort {
    pub(crate) id: PortId,
    pub(crate) name: String,
    pub(crate) reason: Fault,
}

/// Control thread of a driver domain, with all that it owns.
pub(crate) struct Control<P: Platform, D: DriverDomain> {
    pub(crate) store: StoreClient,
    pub(crate) devices: Devices,
    pub(crate) backends: Backends<P, D>,
    /// Devices whose control rings may have requests.
    pub(crate) controls: BTreeSet<DeviceId>,
    /// Reports of memory pressure.
    pub(crate) pressure: PressureMonitor,
}

/// Backends of all devices, and the state that they share.
pub(crate) struct Backends<P: Platform, D: DriverDomain> {
    pub(crate) domain: D,
    pub(crate) platform: Arc<P>,
    pub(crate) ended: EndedPorts,
    pub(crate) vifs: Vifs<D::Vif>,
    pub(crate) vbds: Vbds<D::Vbd>,
    /// Share of its pages that each pool keeps.
    pub(crate) share: Share,
}

/// Driver domain of one command: its own sources of events, and its part of each device.
///
/// The methods run on the control thread and must not block.
pub(crate) trait DriverDomain: Sized {
    /// Set if the domain creates its devices itself. A device that is over stays until the domain removes it.
    const OWNS_DEVICES: bool;

    /// Errors that end the domain.
    type Error: From<io::Error> + From<StoreError>;
    /// Domain's part of a vif.
    type Vif;
    /// Domain's part of a vbd.
    type Vbd;

    /// Returns the files of the domain's own that the loop waits for.
    fn sources(&self) -> Vec<BorrowedFd<'_>>;

    /// Returns the time at which [`DriverDomain::serve`] has work without an event.
    fn deadline(&self) -> Option<Instant>;

    /// Serves the domain's own sources once.
    ///
    /// # Errors
    ///
    /// Returns the reason for which the domain ends early.
    fn serve<P: Platform>(control: &mut Control<P, Self>) -> Result<Flow, Self::Error>;

    /// Ends a round, after all devices were served. Returns `true` if store events may have been read meanwhile.
    fn finish_round<P: Platform>(control: &mut Control<P, Self>) -> bool {
        let _ = control;
        false
    }

    /// Brings the record of a device up to date before it is served.
    ///
    /// # Errors
    ///
    /// Returns the store's errors. The device is tried again after a delay.
    fn refresh<P: Platform>(
        backends: &mut Backends<P, Self>,
        device: &DeviceId,
        store: &mut StoreClient,
    ) -> Result<(), StoreError> {
        let _ = (backends, device, store);
        Ok(())
    }

    /// Attaches a vif to its dataplane, unless it is attached.
    ///
    /// # Errors
    ///
    /// Returns the reason for which the vif is not served. It is tried again after a delay.
    fn attach_vif<P: Platform>(
        backends: &mut Backends<P, Self>,
        device: &DeviceId,
        vif: &mut Vif<Self::Vif>,
    ) -> Result<(), String> {
        let _ = (backends, device, vif);
        Ok(())
    }

    /// Returns the dataplane of a vif. `None` if the vif is not attached.
    fn dataplane<'a>(&'a self, vif: &'a Self::Vif) -> Option<&'a DataplaneHandle>;

    /// Returns the policy of a vif's port.
    fn port_policy(&self, vif: &Self::Vif) -> PortPolicy;

    /// Returns `true` if a vif shares a switch with other vifs and may use only the Ethernet address `mac`.
    fn is_held_to(&self, vif: &Self::Vif, mac: Mac) -> bool;

    /// Handles a change of a vif's connection.
    fn vif_changed(&mut self, device: &DeviceId, vif: &mut Vif<Self::Vif>) {
        let _ = (device, vif);
    }

    /// Handles a vif whose frontend broke a rule of the handshake.
    fn vif_penalized(&mut self, device: &DeviceId, why: &str) {
        let _ = (device, why);
    }

    /// Handles a port of a vif that ended by itself.
    fn vif_port_gone(&mut self, device: &DeviceId, reason: &Fault) {
        let _ = (device, reason);
    }

    /// Handles a port that ended by itself and belongs to no frontend. Returns the device that is due then.
    fn other_port_gone<P: Platform>(
        backends: &mut Backends<P, Self>,
        port: &OtherPort,
    ) -> Option<DeviceId>;

    /// Removes the domain's resources of a vif that is gone.
    fn vif_removed(&mut self, device: &DeviceId, vif: Self::Vif) {
        let _ = (device, vif);
    }

    /// Returns the crash journals of a queue, if another process can take the device over.
    fn records(&mut self, device: &DeviceId, queue: u32) -> Option<QueueRecords> {
        let _ = (device, queue);
        None
    }

    /// Returns the crash journal of a control ring, if another process can take the device over.
    fn ctrl_record(&mut self, device: &DeviceId) -> Option<CtrlRecord> {
        let _ = device;
        None
    }

    /// Removes the crash journals of a device.
    fn remove_records(&mut self, device: &DeviceId) {
        let _ = device;
    }

    /// Sets the share of its pages that each pool of the domain's own keeps under memory pressure.
    fn set_share(&mut self, share: Share) {
        let _ = share;
    }

    /// Returns the pools in which the staged pages of a device count.
    fn staging_pools(&mut self, device: &DeviceId) -> Vec<Arc<StagingPool>> {
        let _ = device;
        Vec::new()
    }

    /// Opens the storage of a vbd, unless it is open.
    fn open_vbd<P: Platform>(
        backends: &mut Backends<P, Self>,
        device: &DeviceId,
        vbd: &mut Vbd<Self::Vbd>,
    ) -> Readiness {
        let _ = (backends, device, vbd);
        Readiness::Ready
    }

    /// Reports the state of a vbd's storage, after [`DriverDomain::open_vbd`].
    ///
    /// # Errors
    ///
    /// Returns the store's errors. The vbd is tried again after a delay.
    fn report_storage(
        &mut self,
        device: &DeviceId,
        vbd: &mut Vbd<Self::Vbd>,
        store: &mut StoreClient,
    ) -> Result<(), StoreError> {
        let _ = (device, vbd, store);
        Ok(())
    }

    /// Records that another disk takes the place of a vbd's, before the guest uses it.
    ///
    /// # Errors
    ///
    /// Returns a text for the user. The vbd keeps its disk then.
    fn commit_disk(
        &mut self,
        device: &DeviceId,
        vbd: &mut Vbd<Self::Vbd>,
        store: &mut StoreClient,
    ) -> Result<(), String> {
        let _ = (device, vbd, store);
        Ok(())
    }

    /// Handles the end of the replacement of a vbd's disk. After a failure the vbd has the disk `old`.
    fn disk_replaced(
        &mut self,
        device: &DeviceId,
        vbd: &mut Vbd<Self::Vbd>,
        store: &mut StoreClient,
        old: Option<Arc<dyn Disk>>,
        outcome: Result<(), String>,
    ) {
        let _ = (device, vbd, store, old, outcome);
    }

    /// Handles a change of a vbd's connection.
    fn vbd_changed(&mut self, device: &DeviceId, vbd: &mut Vbd<Self::Vbd>) {
        let _ = (device, vbd);
    }

    /// Handles a vbd that was closed because its frontend broke a rule or its storage failed.
    fn vbd_penalized(&mut self, device: &DeviceId, vbd: &Vbd<Self::Vbd>, why: &str) {
        let _ = (device, vbd, why);
    }
}

/// Returns the result of serving a device whose handshake is at `life`. `failed` says that it needs another try.
pub(crate) fn look_of<D: DriverDomain>(life: Life, failed: bool) -> Look {
    match life {
        Life::Over if !D::OWNS_DEVICES => Look::Over,
        Life::Alive if failed => Look::Again,
        Life::Alive | Life::Over => Look::Alive,
    }
}
