//! Toolstack side of a vif: creates and removes the device in the store.

use ringfence_wire::netif::keys;
use ringfence_wire::xenbus::DeviceId;
use ringfence_xenbus::toolstack::DeviceEntries;
pub use ringfence_xenbus::toolstack::remove;
use ringfence_xenstore::{StoreClient, StoreError};

/// Address and MTU that a toolstack writes to the store for a new vif.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct VifConfig {
    /// Ethernet address of the guest's end.
    pub mac: [u8; 6],
    /// Maximum number of bytes behind the Ethernet header.
    pub mtu: u16,
}

/// Formats an Ethernet address as `aa:bb:cc:dd:ee:ff`.
pub fn mac_text(mac: [u8; 6]) -> String {
    mac.map(|byte| format!("{byte:02x}")).join(":")
}

/// Creates both directories of a device, with both sides in state Initialising.
///
/// # Errors
///
/// Returns the store's error.
pub fn create(
    store: &mut StoreClient,
    device: &DeviceId,
    config: VifConfig,
) -> Result<(), StoreError> {
    let named = [(keys::HANDLE, device.handle.to_string()), (keys::MAC, mac_text(config.mac))];
    let [handle, mac] = named.clone();
    let front = [handle, mac, (keys::MTU, config.mtu.to_string())];
    let entries = DeviceEntries { frontend: &front, backend: &named };
    ringfence_xenbus::toolstack::create(store, device, entries)
}
