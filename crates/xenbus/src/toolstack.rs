//! Toolstack's part of a device: creation and removal of its two directories in the store.

use ringfence_wire::grant::DomId;
use ringfence_wire::xenbus::{self, DeviceId, XenbusState};
use ringfence_wire::xenstore::{ErrorName, NodeAccess, Permission, PermissionList};

use ringfence_xenstore::{StoreAccess, StoreClient, StoreError};

/// Key of a directory and its value.
pub type Entry<'a> = (&'a str, String);

/// Keys of a device's kind, for the two directories of a new device.
#[derive(Clone, Copy)]
pub struct DeviceEntries<'a> {
    pub frontend: &'a [Entry<'a>],
    pub backend: &'a [Entry<'a>],
}

/// Returns permissions for a directory that `owner` writes, `reader` reads, and no other domain sees.
fn shared(owner: DomId, reader: DomId) -> PermissionList {
    let mut list = PermissionList::owned_by(owner, NodeAccess::None);
    let entries = [
        Permission { domain: owner, access: NodeAccess::None },
        Permission { domain: reader, access: NodeAccess::Read },
    ];
    if let Ok(both) = PermissionList::new(&entries) {
        list = both;
    }
    list
}

/// Creates the two directories of a device, both ends in state Initialising.
///
/// # Errors
///
/// Returns errors of the store.
pub fn create(
    store: &mut StoreClient,
    device: &DeviceId,
    entries: DeviceEntries<'_>,
) -> Result<(), StoreError> {
    let (front, back) = (device.frontend_path(), device.backend_path());
    store.transaction(|t| {
        for (dir, owner, reader) in
            [(&front, device.frontend, device.backend), (&back, device.backend, device.frontend)]
        {
            t.mkdir(dir)?;
            t.set_perms(dir, &shared(owner, reader))?;
        }
        let mut put = |dir: &str, key: &str, value: &str| t.write(&format!("{dir}/{key}"), value);
        put(&front, xenbus::BACKEND, &back)?;
        put(&front, xenbus::BACKEND_ID, &device.backend.to_string())?;
        put(&back, xenbus::FRONTEND, &front)?;
        put(&back, xenbus::FRONTEND_ID, &device.frontend.to_string())?;
        put(&back, xenbus::ONLINE, "1")?;
        for (dir, entries) in [(&front, entries.frontend), (&back, entries.backend)] {
            for (key, value) in entries {
                put(dir, key, value)?;
            }
        }
        let initialising = XenbusState::Initialising.to_string();
        put(&front, xenbus::STATE, &initialising)?;
        put(&back, xenbus::STATE, &initialising)
    })
}

/// Removes both directories. The parent of the backend's directory is removed too if it is empty,
/// because it would outlive the domain. A directory that is already missing is no error.
///
/// # Errors
///
/// Returns errors of the store.
pub fn remove(store: &mut StoreClient, device: &DeviceId) -> Result<(), StoreError> {
    let (front, back) = (device.frontend_path(), device.backend_path());
    store.transaction(|t| {
        for path in [&front, &back] {
            match t.rm(path) {
                Err(error) if error.refusal() == Some(ErrorName::NotFound) => {}
                other => other?,
            }
        }
        let Some((above, _)) = back.rsplit_once('/') else { return Ok(()) };
        if t.directory_opt(above)?.is_some_and(|left| left.is_empty()) {
            t.rm(above)?;
        }
        Ok(())
    })
}
