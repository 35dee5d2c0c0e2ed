//! One disk of the daemon: the toolstack's keys, its settings and its storage.

use ringfence_block::storage::Geometry;
use ringfence_block::vbd::backend::Connection;
use ringfence_wire::xenbus::DeviceId;
use ringfence_xenstore::{StoreAccess, StoreClient, StoreError};

use super::changes::PendingChange;
use super::keys::{NoSource, VbdKeys};
use super::opener::{OpenError, OpenRequest, Opening};
use crate::ports::device_name;
use crate::vbds::Vbd;
use crate::xen::config::DiskSettings;

/// Key in the backend's directory: `open`, or the reason for which the storage is not open.
const DISK_STATUS: &str = "disk-status";
/// Value of [`DISK_STATUS`] while the storage is open.
const OPEN: &str = "open";

/// Reasons for which a disk is not served for now.
#[derive(Debug, thiserror::Error)]
pub(super) enum VbdError {
    /// Both backends would answer the guest.
    #[error(
        "the kernel's xen-blkback is loaded, and serves disks: unload it (`rmmod xen-blkback`), or set \
         `serve = false` in [disks] of the configuration"
    )]
    KernelBackend,
    #[error("{limit} disks {of} are served already; see `limits` in the configuration")]
    TooMany { of: &'static str, limit: u16 },
    #[error(transparent)]
    Source(#[from] NoSource),
    #[error(transparent)]
    Open(#[from] OpenError),
}

/// State of a disk's storage.
pub(super) enum Storage {
    Closed,
    Opening(Opening),
    Open(Geometry),
}

/// Daemon's part of a disk.
pub(in crate::xen) struct XenVbd {
    pub(super) keys: VbdKeys,
    pub(super) settings: DiskSettings,
    /// Request that opened, or is to open, the storage.
    pub(super) request: Option<OpenRequest>,
    pub(super) storage: Storage,
    /// Reason for which the storage is not open.
    pub(super) cause: Option<VbdError>,
    /// Change of the disk that has not ended.
    pub(super) change: Option<PendingChange>,
    /// Value last written to [`DISK_STATUS`].
    reported: Option<String>,
}

impl XenVbd {
    /// Creates the record of a disk whose storage is closed.
    pub(super) fn new(keys: VbdKeys, settings: DiskSettings) -> XenVbd {
        let (request, storage, cause, reported) = (None, Storage::Closed, None, None);
        XenVbd { keys, settings, request, storage, cause, change: None, reported }
    }

    /// Reports the state of the storage in the log and to the toolstack.
    pub(in crate::xen) fn report_storage(
        device: &DeviceId,
        vbd: &mut Vbd<XenVbd>,
        store: &mut StoreClient,
    ) -> Result<(), StoreError> {
        let XenVbd { storage, cause, reported: last, .. } = &mut vbd.own;
        let problem = match (&cause, &*storage) {
            // The last problem stays valid while the storage is being opened again.
            (None, Storage::Opening(_)) => vbd.problem.clone(),
            (cause, _) => cause.as_ref().map(ToString::to_string),
        };
        if let Some(why) = problem.as_ref().filter(|_| problem != vbd.problem) {
            match &cause {
                Some(VbdError::Source(NoSource::Script | NoSource::NoMedium)) => {
                    tracing::info!(name = %device_name(device), %why, "it is not served yet");
                }
                _ => tracing::error!(name = %device_name(device), %why, "it is not served"),
            }
        }
        vbd.problem = problem;
        let reported = match (&vbd.problem, &*storage) {
            (Some(why), _) => why.clone(),
            (None, Storage::Open(_)) => OPEN.to_owned(),
            (None, _) => return Ok(()),
        };
        if last.as_ref() != Some(&reported) {
            let back = device.backend_path();
            let state = format!("{back}/{}", ringfence_wire::xenbus::STATE);
            store.transaction(|t| match t.read_opt(&state)? {
                Some(_) => t.write(&format!("{back}/{DISK_STATUS}"), &reported),
                // A write would create a directory again that the toolstack has removed.
                None => Ok(()),
            })?;
            *last = Some(reported);
        }
        Ok(())
    }

    /// Logs that a disk was connected, taken over or disconnected. Returns `true` if it was taken over.
    pub(in crate::xen) fn report_connection(device: &DeviceId, vbd: &mut Vbd<XenVbd>) -> bool {
        let now = vbd.backend.connection().copied();
        let unanswered = vbd.backend.served().map_or(0, |served| served.adopted());
        if let Some(unlogged) = vbd.lines.take() {
            report_change(device, now, unanswered, unlogged);
        }
        now.is_some_and(|connection| connection.adopted)
    }
}

/// Logs that a disk was connected, taken over or disconnected. `unlogged` is the number of such lines
/// that were dropped.
fn report_change(device: &DeviceId, now: Option<Connection>, unanswered: u32, unlogged: u64) {
    let name = device_name(device);
    match now {
        Some(connection) if connection.adopted => {
            tracing::info!(%name, unanswered, unlogged, "taken over");
        }
        Some(Connection { queues, ring_pages, persistent, .. }) => {
            tracing::info!(%name, queues, ring_pages, persistent, unlogged, "connected");
        }
        None => tracing::info!(%name, unlogged, "disconnected"),
    }
}
