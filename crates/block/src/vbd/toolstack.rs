//! Store entries that a toolstack writes to create a disk.

use ringfence_wire::blkif::keys;
use ringfence_wire::xenbus::DeviceId;
use ringfence_xenbus::toolstack::DeviceEntries;
pub use ringfence_xenbus::toolstack::remove;
use ringfence_xenstore::{StoreClient, StoreError};

/// Configuration of a disk by its owner.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct VbdConfig {
    /// Set if the guest may not write.
    pub read_only: bool,
    /// Set if the medium is removable.
    pub removable: bool,
    /// Set if the guest may not discard.
    pub no_discard: bool,
}

/// Creates the two directories of a device, both sides in state Initialising.
///
/// # Errors
///
/// Returns the error of the store.
pub fn create(
    store: &mut StoreClient,
    device: &DeviceId,
    config: VbdConfig,
) -> Result<(), StoreError> {
    let number = |flag: bool| u8::from(flag).to_string();
    let front =
        [(keys::VIRTUAL_DEVICE, device.handle.to_string()), (keys::DEVICE_TYPE, "disk".to_owned())];
    let mode = if config.read_only { "r" } else { "w" };
    let back = [
        (keys::MODE, mode.to_owned()),
        (keys::REMOVABLE, number(config.removable)),
        (keys::DISCARD_ENABLE, number(!config.no_discard)),
    ];
    let entries = DeviceEntries { frontend: &front, backend: &back };
    ringfence_xenbus::toolstack::create(store, device, entries)
}
