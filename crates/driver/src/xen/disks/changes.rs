//! Changes of a disk that its guest uses: a snapshot, and another size.
//!
//! A snapshot is an overlay that the administrator's command has created. The daemon opens its chain, as it opens every
//! image, once no request is in flight ([`crate::replacement`]). Before the guest uses the overlay, its path is written to
//! `params`: a daemon that takes over opens the overlay, and repeats unanswered requests there. The configuration of the
//! guest is the toolstack's, and keeps the old path.

use std::path::PathBuf;
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, PoisonError};

use ringfence_block::storage::Disk;
use ringfence_block::storage::qcow2::BackingLocks;
use ringfence_platform::Platform;
use ringfence_wire::blkif::keys;
use ringfence_wire::xenbus::{self, DeviceId};
use ringfence_xenstore::{StoreAccess, StoreClient};

use super::keys::Source;
use super::opener::{self, OpenRequest};
use super::vbd::{Storage, XenVbd};
use crate::domain::Control;
use crate::ports::device_name;
use crate::replacement::{MakeDisk, Replacement, grow};
use crate::vbds::Vbd;
use crate::xen::domain::XenDomain;
use crate::xen::status::{DiskChange, DiskOrder};

/// Locks to take when the disk has given up its own.
type LocksToTake = Arc<Mutex<Option<BackingLocks>>>;

/// Change of a disk that has not ended.
pub(super) struct PendingChange {
    /// Sender of the disk's size in bytes, or of the reason for which it is as it was.
    answer: Sender<Result<u64, String>>,
    overlay: Option<PendingOverlay>,
}

/// Overlay that takes the place of a disk.
struct PendingOverlay {
    source: Source,
    locks: LocksToTake,
    /// Source of the disk, while the overlay's is in its place.
    before: Option<Source>,
}

impl<P: Platform> Control<P, XenDomain> {
    /// Begins the changes that administrators have ordered.
    pub(in crate::xen) fn serve_orders(&mut self) {
        self.backends.domain.orders.clear();
        let orders: Vec<_> = self.backends.domain.orders.drain().collect();
        for (order, answer) in orders {
            if let Err(why) = self.begin_change(order, &answer) {
                // A client that has gone needs no answer.
                let _ = answer.send(Err(why));
            }
        }
    }

    fn begin_change(
        &mut self,
        order: DiskOrder,
        answer: &Sender<Result<u64, String>>,
    ) -> Result<(), String> {
        let DiskOrder { domain, handle, change } = order;
        let is_it = |device: &DeviceId| device.frontend.0 == domain && device.handle == handle;
        let vbds = &mut self.backends.vbds.list;
        let (device, vbd) = vbds
            .iter_mut()
            .find(|(device, _)| is_it(device))
            .ok_or_else(|| format!("domain {domain} has no disk {handle}"))?;
        let mut pending = PendingChange { answer: answer.clone(), overlay: None };
        let make: MakeDisk = match change {
            DiskChange::Resize { bytes } => grow(bytes),
            DiskChange::Snapshot { path, any_folder } => {
                let (overlay, request, below) = plan(&vbd.own, path, any_folder)?;
                let locks = Arc::clone(&overlay.locks);
                pending.overlay = Some(overlay);
                Box::new(move |disk: &Arc<dyn Disk>| {
                    if disk.geometry().read_only {
                        return Err("the disk is read-only".to_owned());
                    }
                    let sector_size = Some(disk.geometry().sector_size);
                    let request = OpenRequest { sector_size, ..request };
                    let opened = opener::open_above(&request, &below);
                    let (disk, of_backing) = opened.map_err(|error| error.to_string())?;
                    *locks.lock().unwrap_or_else(PoisonError::into_inner) = Some(of_backing);
                    Ok(disk)
                })
            }
        };
        Replacement::begin(vbd, make)?;
        vbd.own.change = Some(pending);
        self.devices.mark(device);
        Ok(())
    }
}

/// Checks an overlay for a disk. Returns the overlay, the request that opens it, and the source below it.
fn plan(
    vbd: &XenVbd,
    path: PathBuf,
    any_folder: bool,
) -> Result<(PendingOverlay, OpenRequest, Source), String> {
    let below = vbd.keys.source.clone().map_err(|error| error.to_string())?;
    if !vbd.keys.is_in_params {
        return Err("its storage is named by a script of the toolstack, not by `target=`: a daemon that is started again would \
                    use that without the overlay"
            .to_owned());
    }
    let mut any_folder = any_folder;
    match &below {
        Source::Nbd(_) => {
            return Err("its storage is a server's, which alone makes snapshots of it".to_owned());
        }
        Source::Image { any_folder: any, .. } => any_folder |= any,
        Source::Path(_) | Source::Raw(_) => {}
    }
    let source = Source::Image { path, any_folder };
    if source.image_params().is_none() {
        return Err(format!("{source} has bytes that are no UTF-8, which xenstore cannot name"));
    }
    let request = vbd.request.clone().ok_or("its storage is not open")?;
    let request = OpenRequest { source: source.clone(), in_use: true, ..request };
    Ok((PendingOverlay { source, locks: LocksToTake::default(), before: None }, request, below))
}

/// Writes the source of an image to `params`, unless the toolstack has removed the device.
fn write_params(device: &DeviceId, source: &Source, store: &mut StoreClient) -> Result<(), String> {
    let params = match source {
        Source::Image { .. } => source.image_params().ok_or("its path is no UTF-8")?,
        Source::Raw(path) => format!("raw:{}", path.display()),
        other => other.to_string(),
    };
    let back = device.backend_path();
    let written =
        store.transaction(|t| match t.read_opt(&format!("{back}/{}", xenbus::STATE))? {
            Some(_) => t.write(&format!("{back}/{}", keys::PARAMS), &params),
            None => Ok(()),
        });
    written.map_err(|error| format!("xenstore: {error}"))
}

impl XenDomain {
    /// Names the overlay in the store, in place of the disk.
    pub(in crate::xen) fn commit_overlay(
        &self,
        device: &DeviceId,
        vbd: &mut Vbd<XenVbd>,
        store: &mut StoreClient,
    ) -> Result<(), String> {
        let overlay = vbd.own.change.as_mut().and_then(|change| change.overlay.as_mut());
        let Some(overlay) = overlay else { return Ok(()) };
        write_params(device, &overlay.source, store)?;
        let before = std::mem::replace(&mut vbd.own.keys.source, Ok(overlay.source.clone()));
        overlay.before = before.ok();
        vbd.own.request = self.disk_request(&vbd.own).ok();
        Ok(())
    }

    /// Answers the administrator when a disk was replaced, or was not. `old` is the disk before.
    pub(in crate::xen) fn end_change(
        &self,
        device: &DeviceId,
        vbd: &mut Vbd<XenVbd>,
        store: &mut StoreClient,
        old: Option<Arc<dyn Disk>>,
        outcome: Result<(), String>,
    ) {
        let Some(PendingChange { answer, overlay }) = vbd.own.change.take() else { return };
        let name = device_name(device);
        let outcome = match outcome {
            Ok(()) => {
                let geometry = vbd.backend.disk().map(|disk| disk.geometry());
                vbd.own.storage = geometry.map_or(Storage::Closed, Storage::Open);
                let bytes = geometry.map_or(0, |geometry| geometry.bytes);
                match &overlay {
                    Some(overlay) => {
                        tracing::info!(%name, overlay = %overlay.source, "a snapshot was made");
                        if let Err(why) = exchange_locks(&overlay.locks, old) {
                            tracing::error!(%name, %why, "the backing file is not locked");
                        }
                    }
                    None => tracing::info!(%name, bytes, "the disk has grown"),
                }
                Ok(bytes)
            }
            Err(why) => {
                if let Some(before) = overlay.and_then(|overlay| overlay.before) {
                    if let Err(error) = write_params(device, &before, store) {
                        tracing::error!(%name, %error, "the overlay is still named in `params`");
                    }
                    vbd.own.keys.source = Ok(before);
                    vbd.own.request = self.disk_request(&vbd.own).ok();
                }
                tracing::warn!(%name, %why, "the disk was not changed");
                Err(why)
            }
        };
        // A client that has gone needs no answer.
        let _ = answer.send(outcome);
    }
}

/// Locks the files below an overlay for reading, after the disk has given up its locks for writing.
fn exchange_locks(locks: &LocksToTake, old: Option<Arc<dyn Disk>>) -> Result<(), String> {
    if let Some(live) = old.as_ref().and_then(|old| old.live()) {
        live.become_backing().map_err(|error| error.to_string())?;
    }
    let locks = locks.lock().unwrap_or_else(PoisonError::into_inner).take();
    locks.map_or(Ok(()), |locks| locks.take().map_err(|error| error.to_string()))
}
