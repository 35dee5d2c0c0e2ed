//! Grant windows of a disk's rings on the backend side, opened at connection.

use ringfence_platform::{Platform, WindowError, WindowHandle, WindowView};
use ringfence_wire::blkif::keys;
use ringfence_wire::xenbus::DeviceId;
use ringfence_xenbus::end::BackendEnd;
use ringfence_xenstore::{StoreAccess, StoreClient};

use super::ConnectError;
use crate::blkback::Mode;

/// Maximum number of entries of a ring's window: more than this project's frontends request, and few
/// enough to check periodically.
const ENTRIES_MAX: u32 = 4096;

/// Falls back to mode `persistent`, with a warning, if the platform has no grant windows.
pub(super) fn settle(mode: &mut Mode, device: &DeviceId, platform: &impl Platform) {
    if *mode == Mode::Window && !platform.has_windows() {
        *mode = Mode::Persistent;
        let device = device.backend_path();
        tracing::warn!(%device, instead = %mode, "no windows: {}", WindowError::NeedsPeer);
    }
}

/// Opens the grant window that the frontend names for a ring, if any.
pub(super) fn open(
    end: &BackendEnd,
    (queue, dir): (u32, Option<&str>),
    platform: &impl Platform,
    store: &mut StoreClient,
) -> Result<Option<WindowView>, ConnectError> {
    let key = match dir {
        Some(dir) => end.front(&format!("{dir}/{}", keys::RINGFENCE_WINDOW)),
        None => end.front(keys::RINGFENCE_WINDOW),
    };
    let Some(handle) = store.read_u32_opt(&key)? else { return Ok(None) };
    let opened = platform.open_window(end.device().frontend, WindowHandle(handle), ENTRIES_MAX);
    let view = opened.map_err(|source| ConnectError::Window { queue, source })?;
    // Each ring has its own window, and the earlier backend of the window is gone.
    Ok(Some(view.taking_over()))
}
