//! What a toolstack writes to make a vif, and how it takes it away.

use ringfence_wire::netif::keys;
use ringfence_wire::xenbus::DeviceId;
pub use ringfence_xenbus::toolstack::remove;
use ringfence_xenstore::{StoreClient, StoreError};

/// A vif as its owner wants it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct VifConfig {
    /// Ethernet address of the guest's end.
    pub mac: [u8; 6],
    /// Bytes behind the Ethernet header.
    pub mtu: u16,
}

/// An Ethernet address as text, `aa:bb:cc:dd:ee:ff`.
pub fn mac_text(mac: [u8; 6]) -> String {
    mac.map(|byte| format!("{byte:02x}")).join(":")
}

/// Makes the two directories of a device, both sides in state Initialising.
///
/// # Errors
///
/// The store's.
pub fn create(
    store: &mut StoreClient,
    device: &DeviceId,
    config: VifConfig,
) -> Result<(), StoreError> {
    let named = [(keys::HANDLE, device.handle.to_string()), (keys::MAC, mac_text(config.mac))];
    let [handle, mac] = named.clone();
    let front = [handle, mac, (keys::MTU, config.mtu.to_string())];
    ringfence_xenbus::toolstack::create(store, device, (&front, &named))
}
