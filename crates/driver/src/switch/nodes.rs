//! Store nodes of guests: vifs and names. Address filter of a guest.

use ringfence_net::vif::toolstack::{self, VifConfig};
use ringfence_platform::DomId;
use ringfence_switch::forwarding::filter::AddressFilter;
use ringfence_wire::xenbus::DeviceId;
use ringfence_wire::xenstore::{NodeAccess, PermissionList};
use ringfence_xenstore::{StoreAccess, StoreClient, StoreError};

use super::addresses::Assigned;
use crate::switchboard::AttachRequest;

/// Store directory of the guests' names.
pub(super) const NAMES_ROOT: &str = "/ringfence/names";

/// Creates the directory of names, which every guest can read. Each name's node belongs to its guest.
pub(super) fn create_names(store: &mut StoreClient) -> Result<(), StoreError> {
    store.mkdir(NAMES_ROOT)?;
    store.set_perms(NAMES_ROOT, &PermissionList::owned_by(DomId(0), NodeAccess::Read))
}

/// Returns the filter that restricts a guest to its addresses.
pub(super) fn filter_of(assigned: &Assigned, request: &AttachRequest) -> AddressFilter {
    AddressFilter::new(assigned.mac, assigned.addresses.iter().map(|address| address.ip()))
        .forwarding(request.forwarding)
        .advertising(request.advertise)
}

/// Creates the store nodes of a vif and of its guest's name.
///
/// # Errors
///
/// Returns a text for the user of the launcher.
pub(super) fn create_vif(
    store: &mut StoreClient,
    device: &DeviceId,
    assigned: &Assigned,
    request: &AttachRequest,
) -> Result<(), String> {
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
    toolstack::create(store, device, config).map_err(|e| e.to_string())
}
