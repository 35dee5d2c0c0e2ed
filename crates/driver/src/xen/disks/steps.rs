//! Disks of the daemon: their records, and the opening of their storage.

use std::path::Path;
use std::sync::Arc;

use ringfence_block::vbd::backend::VbdBackend;
use ringfence_platform::Platform;
use ringfence_wire::xenbus::DeviceId;
use ringfence_xenstore::{StoreClient, StoreError};

use super::keys::{NoSource, Source, VbdKeys};
use super::opener::{OpenError, OpenRequest, Opening};
use super::vbd::{Storage, VbdError, XenVbd};
use crate::domain::{Backends, Readiness};
use crate::vbds::Vbd;
use crate::xen::config::{Config, DiskSettings};
use crate::xen::domain::XenDomain;
use crate::xen::staging::KEPT_PAGES_MAX;

/// Directory that exists while the kernel's own backend is loaded.
const KERNEL_BACKEND: &str = "/sys/bus/xen-backend/drivers/vbd";

impl<P: Platform> Backends<P, XenDomain> {
    /// Applies a new configuration to all disks. Connected guests keep most of the negotiated settings.
    pub(in crate::xen) fn reconfigure_vbds(&mut self) {
        for vbd in self.vbds.list.values_mut() {
            vbd.own.settings = settings_of(&self.domain.config, &vbd.own.keys);
            vbd.backend.reconfigure(vbd.own.settings.options());
        }
    }

    /// Reads the keys of a disk again unless it is connected: a toolstack may have created it again with other keys.
    pub(in crate::xen) fn refresh_vbd(
        &mut self,
        device: &DeviceId,
        store: &mut StoreClient,
    ) -> Result<(), StoreError> {
        let known = self.vbds.list.get(device);
        if known.is_some_and(|vbd| vbd.backend.connection().is_some()) {
            return Ok(());
        }
        let mut keys = VbdKeys::read(store, device)?;
        let Some(vbd) = self.vbds.list.get_mut(device) else {
            let vbd = self.new_vbd(device, keys);
            self.vbds.list.insert(*device, vbd);
            return Ok(());
        };
        // A sector size that this daemon wrote itself is no reason to open the storage again.
        keys.fixed_sector_size = keys.fixed_sector_size.and(vbd.own.keys.fixed_sector_size);
        if vbd.own.keys != keys {
            vbd.own.settings = settings_of(&self.domain.config, &keys);
            vbd.backend.reconfigure(vbd.own.settings.options());
            vbd.own.keys = keys;
        }
        Ok(())
    }

    /// Creates the record of a disk that has not been served yet.
    fn new_vbd(&self, device: &DeviceId, keys: VbdKeys) -> Vbd<XenVbd> {
        let settings = settings_of(&self.domain.config, &keys);
        let ring = Arc::new(self.vbds.notifier(*device));
        let backend = VbdBackend::without_disk(*device, settings.options(), ring);
        Vbd::new(backend, XenVbd::new(keys, settings))
    }

    /// Opens the storage of a disk unless it is open, and limits the pages that the disk keeps mapped.
    pub(in crate::xen) fn open_vbd(&self, device: &DeviceId, vbd: &mut Vbd<XenVbd>) -> Readiness {
        vbd.own.cause = self.open(device, vbd).err();
        let readiness = match &vbd.own.cause {
            // A source becomes known with a change of the toolstack's keys, which a watch reports.
            None | Some(VbdError::Source(_)) => Readiness::Ready,
            // Only one of two backends may answer.
            Some(VbdError::KernelBackend) => Readiness::Blocked,
            Some(_) => Readiness::Failed,
        };
        if vbd.backend.connection().is_none() && readiness != Readiness::Blocked {
            let kept: u32 = self.vbds.list.values().map(kept_pages).sum();
            let DiskSettings { max_queues, persistent_pages, .. } = vbd.own.settings;
            let left = KEPT_PAGES_MAX.saturating_sub(kept) / max_queues.max(1);
            let most = u16::try_from(left).unwrap_or(u16::MAX);
            vbd.backend.keep_pages(persistent_pages.min(most));
        }
        readiness
    }

    /// Opens the storage if it is neither open nor being opened, and collects the result.
    fn open(&self, device: &DeviceId, vbd: &mut Vbd<XenVbd>) -> Result<(), VbdError> {
        if vbd.backend.connection().is_some() {
            return Ok(());
        }
        if Path::new(KERNEL_BACKEND).exists() {
            return Err(VbdError::KernelBackend);
        }
        self.check_disk_limits(device)?;
        let request = self.domain.disk_request(&vbd.own);
        if vbd.own.request.as_ref() != request.as_ref().ok() {
            // Other storage or other options. The storage stays locked until the last user drops it.
            vbd.backend.set_disk(None);
            vbd.own.storage = Storage::Closed;
            vbd.own.request = request.as_ref().ok().cloned();
        }
        let request = request?;
        if let Storage::Closed = vbd.own.storage {
            let opening = Opening::begin(
                request,
                Arc::clone(&self.domain.rings),
                self.vbds.notifier(*device),
            );
            vbd.own.storage = Storage::Opening(opening.map_err(OpenError::from)?);
        }
        let Storage::Opening(opening) = &vbd.own.storage else { return Ok(()) };
        match opening.poll() {
            None => Ok(()),
            Some(Ok(disk)) => {
                vbd.own.storage = Storage::Open(disk.geometry());
                vbd.backend.set_disk(Some(disk));
                Ok(())
            }
            Some(Err(error)) => {
                vbd.own.storage = Storage::Closed;
                Err(error.into())
            }
        }
    }

    /// Checks the limits on served disks.
    fn check_disk_limits(&self, device: &DeviceId) -> Result<(), VbdError> {
        let open = |vbd: &Vbd<XenVbd>| !matches!(vbd.own.storage, Storage::Closed);
        let served = self.vbds.list.iter().filter(|(_, vbd)| open(vbd)).map(|(of, _)| of);
        let of_domain = served.clone().filter(|other| other.frontend == device.frontend).count();
        let limits = &self.domain.config.limits;
        for (count, limit, of) in [
            (served.count(), limits.disks, "of all domains"),
            (of_domain, limits.disks_per_domain, "of this domain"),
        ] {
            if count >= usize::from(limit) {
                return Err(VbdError::TooMany { of, limit });
            }
        }
        Ok(())
    }
}

impl XenDomain {
    /// Builds the request that opens a disk's storage.
    pub(super) fn disk_request(&self, vbd: &XenVbd) -> Result<OpenRequest, NoSource> {
        let XenVbd { keys, settings, .. } = vbd;
        let disks = &self.config.disks;
        Ok(OpenRequest {
            source: keys.source.clone()?,
            read_only: keys.read_only,
            discard: keys.discard,
            direct_io_safe: keys.direct_io_safe,
            cache: settings.cache,
            bounce: settings.bounce,
            engine: settings.engine,
            sector_size: keys.fixed_sector_size.or(settings.sector_size),
            paths: disks.paths.clone(),
            nbd: disks.nbd,
            in_use: keys.fixed_sector_size.is_some(),
        })
    }
}

/// Returns the maximum number of pages that the disk's rings keep mapped.
fn kept_pages(vbd: &Vbd<XenVbd>) -> u32 {
    let rings = vbd.backend.connection().map_or(0, |connection| connection.queues);
    rings * u32::from(vbd.own.settings.persistent_pages)
}

/// Returns the settings of a disk, with those limits that its storage needs.
fn settings_of(config: &Config, keys: &VbdKeys) -> DiskSettings {
    let mut settings = config.disk(keys.domain_name.as_deref(), keys.vdev.as_deref());
    // The order of writes on a server's disk is known only within one connection.
    if let Ok(Source::Nbd(_)) = keys.source {
        settings.max_queues = 1;
    }
    settings
}
