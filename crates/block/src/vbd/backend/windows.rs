//! Grant windows of a disk's rings on the backend side, opened at connection.

use ringfence_access::Mode;
use ringfence_platform::{Platform, WindowError, WindowHandle, WindowName, WindowView};
use ringfence_wire::blkif::keys;
use ringfence_wire::xenbus::DeviceId;
use ringfence_xenbus::connect::{RingName, open_window};
use ringfence_xenbus::end::BackendEnd;
use ringfence_xenstore::{StoreAccess, StoreClient};

use super::queue_keys::QueueKeys;
use super::rejection::ConnectError;

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
    queue: &QueueKeys,
    platform: &impl Platform,
    store: &mut StoreClient,
) -> Result<Option<WindowView>, ConnectError> {
    let Some(handle) = store.read_u32_opt(&queue.path(end, keys::RINGFENCE_WINDOW))? else {
        return Ok(None);
    };
    let references = store.read_u32_opt(&queue.path(end, keys::RINGFENCE_WINDOW_REFERENCES))?;
    let name = WindowName { handle: WindowHandle(handle), references };
    open_window(platform, end.device().frontend, RingName::OfQueue(queue.queue), name).map(Some)
}
