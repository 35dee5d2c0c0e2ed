//! Grant windows of a vif's rings, opened by the backend on connection.

use ringfence_platform::{DomId, Platform, WindowError, WindowHandle, WindowRound};
use ringfence_wire::netif::keys;
use ringfence_xenstore::{StoreAccess, StoreClient};

use super::connect::ConnectError;
use crate::netback::QueueWindows;

/// Maximum number of entries of a ring's grant window: more than a ring has slots.
pub const WINDOW_ENTRIES_MAX: u32 = 4096;

/// Opens the grant windows in the keys of `directory`; a ring without a key has none.
pub(super) fn open<P: Platform>(
    directory: &str,
    frontend: DomId,
    platform: &P,
    store: &mut StoreClient,
) -> Result<QueueWindows, ConnectError> {
    let mut window = |ring, key| {
        let Some(handle) = store.read_u32_opt(&format!("{directory}/{key}"))? else {
            return Ok(None);
        };
        let refused = |source| ConnectError::Window { ring, source };
        let view = platform
            .open_window(frontend, WindowHandle(handle), WINDOW_ENTRIES_MAX)
            .map_err(refused)?;
        let round = WindowRound::new(view).map_err(|_| {
            refused(WindowError::NoSuchWindow { granter: frontend, handle: WindowHandle(handle) })
        })?;
        // Each ring has its own grant window. Uses of a previous backend are ended.
        Ok::<_, ConnectError>(Some(round.taking_over()))
    };
    let tx = window("tx", keys::RINGFENCE_TX_WINDOW)?;
    let rx = window("rx", keys::RINGFENCE_RX_WINDOW)?;
    Ok(QueueWindows { tx, rx })
}
