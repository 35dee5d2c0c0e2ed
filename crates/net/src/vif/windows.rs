//! Grant windows of a vif's rings, opened by the backend on connection.

use ringfence_platform::{DomId, Platform, WindowError, WindowHandle, WindowRound};
use ringfence_wire::netif::keys;
use ringfence_xenbus::connect::{RingName, open_window};
use ringfence_xenstore::{StoreAccess, StoreClient};

use super::connect::ConnectError;
use crate::netback::QueueWindows;

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
        let ring = RingName::Named(ring);
        let view = open_window(platform, frontend, ring, handle)?;
        let round = WindowRound::new(view).map_err(|_| {
            let handle = WindowHandle(handle);
            ConnectError::Window {
                ring,
                source: WindowError::NoSuchWindow { granter: frontend, handle },
            }
        })?;
        Ok::<_, ConnectError>(Some(round))
    };
    let tx = window("tx", keys::RINGFENCE_TX_WINDOW)?;
    let rx = window("rx", keys::RINGFENCE_RX_WINDOW)?;
    Ok(QueueWindows { tx, rx })
}
