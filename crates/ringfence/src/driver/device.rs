//! Store nodes and address filter of a guest's vif.

use ringfence_net::vif::backend::VifBackend;
use ringfence_net::vif::toolstack::{self, VifConfig};
use ringfence_switch::forwarding::filter::AddressFilter;
use ringfence_wire::xenstore::{NodeAccess, PermissionList};
use ringfence_xenstore::{StoreAccess, StoreClient};

use super::NAMES_ROOT;
use super::addresses::Assigned;
use ringfence_driver::ports::device_name;
use ringfence_driver::switchboard::AttachRequest;

/// Returns the filter that restricts a guest to its addresses.
pub(super) fn filter_of(assigned: &Assigned, request: &AttachRequest) -> AddressFilter {
    AddressFilter::new(assigned.mac, assigned.addresses.iter().map(|address| address.ip()))
        .forwarding(request.forwarding)
        .advertising(request.advertise)
}

/// Creates the store nodes of a device and of its name, and watches them.
pub(super) fn make_device(
    store: &mut StoreClient,
    backend: &VifBackend,
    assigned: &Assigned,
    request: &AttachRequest,
) -> Result<(), String> {
    let device = backend.device();
    if let Some(name) = &request.name {
        let path = format!("{NAMES_ROOT}/{name}");
        if store.read_opt(&path).map_err(|e| e.to_string())?.is_some() {
            return Err(format!(
                "the name `{name}` is taken on this switch; choose another --name"
            ));
        }
        let owner = PermissionList::owned_by(device.frontend, NodeAccess::Read);
        store
            .write(&path, "")
            .and_then(|()| store.set_perms(&path, &owner))
            .map_err(|e| e.to_string())?;
    }
    let config = VifConfig { mac: assigned.mac, mtu: request.mtu };
    toolstack::create(store, device, config).map_err(|e| e.to_string())?;
    let token = device_name(device);
    for path in backend.watch_paths() {
        store.watch(&path, &token).map_err(|e| e.to_string())?;
    }
    Ok(())
}
