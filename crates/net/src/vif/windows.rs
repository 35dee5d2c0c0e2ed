//! Grant windows of a vif's rings, opened by the backend on connection.

use ringfence_platform::{DomId, Platform, WindowError, WindowHandle, WindowName, WindowRound};
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
    let mut window = |ring, key, references| {
        let Some(handle) = store.read_u32_opt(&format!("{directory}/{key}"))? else {
            return Ok(None);
        };
        let (ring, handle) = (RingName::Named(ring), WindowHandle(handle));
        let references = store.read_u32_opt(&format!("{directory}/{references}"))?;
        let view = open_window(platform, frontend, ring, WindowName { handle, references })?;
        let round = WindowRound::new(view).map_err(|_| ConnectError::Window {
            ring,
            source: WindowError::NoSuchWindow { granter: frontend, handle },
        })?;
        Ok::<_, ConnectError>(Some(round))
    };
    let tx = window("tx", keys::RINGFENCE_TX_WINDOW, keys::RINGFENCE_TX_WINDOW_REFERENCES)?;
    let rx = window("rx", keys::RINGFENCE_RX_WINDOW, keys::RINGFENCE_RX_WINDOW_REFERENCES)?;
    Ok(QueueWindows { tx, rx })
}
