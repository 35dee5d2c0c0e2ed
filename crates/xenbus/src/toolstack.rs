//! What a toolstack writes to make a device, and how it takes it away.

use ringfence_wire::grant::DomId;
use ringfence_wire::xenbus::{self, DeviceId, XenbusState};
use ringfence_wire::xenstore::{ErrorName, NodeAccess, Permission, PermissionList};

use ringfence_xenstore::{StoreAccess, StoreClient, StoreError};

/// A key and its value.
pub type Entry<'a> = (&'a str, String);

/// A directory that `owner` writes and `reader` reads, and nobody else sees.
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

/// Makes the two directories of a device, both sides in state Initialising, with what is particular to
/// its kind: in the frontend's directory `front`, in the backend's `back`.
///
/// # Errors
///
/// The store's.
pub fn create(
    store: &mut StoreClient,
    device: &DeviceId,
    (front_entries, back_entries): (&[Entry<'_>], &[Entry<'_>]),
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
        for (dir, entries) in [(&front, front_entries), (&back, back_entries)] {
            for (key, value) in entries {
                put(dir, key, value)?;
            }
        }
        let initialising = XenbusState::Initialising.to_string();
        put(&front, xenbus::STATE, &initialising)?;
        put(&back, xenbus::STATE, &initialising)
    })
}

/// Removes both directories, and the one that held the backends of this frontend if it is empty now:
/// it would outlive the domain. What is gone already is no error.
///
/// # Errors
///
/// The store's.
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
