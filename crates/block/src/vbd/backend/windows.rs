//! The windows of a disk's rings, from the backend's side: opened when it connects.

use ringfence_platform::{Platform, WindowError, WindowHandle, WindowView};
use ringfence_wire::blkif::keys;
use ringfence_wire::xenbus::DeviceId;
use ringfence_xenbus::end::BackendEnd;
use ringfence_xenstore::{StoreAccess, StoreClient};

use super::ConnectError;
use crate::blkback::Mode;

/// Entries that the window of a ring may have: more than a frontend of ours asks for, few enough to be
/// looked after.
const ENTRIES_MAX: u32 = 4096;

/// Where the platform has no windows another mode takes their place, which is said once.
pub(super) fn settle(mode: &mut Mode, device: &DeviceId, platform: &impl Platform) {
    if *mode == Mode::Window && !platform.has_windows() {
        *mode = Mode::Persistent;
        let device = device.backend_path();
        tracing::warn!(%device, instead = %mode, "no windows: {}", WindowError::NeedsPeer);
    }
}

/// Opens the window that the frontend names for a ring, if it does.
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
    // Each ring has a window of its own, and what a backend before this one used is used no more.
    Ok(Some(view.taking_over()))
}
