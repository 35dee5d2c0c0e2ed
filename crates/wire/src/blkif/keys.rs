//! Names of the keys of a vbd in the store. Feature keys are `0` or `1`.
//!
//! With one queue the ring and event keys are at the top of the frontend's directory; with several they
//! are in [`queue_directory`], and only [`RING_PAGE_ORDER`] stays above.

/// Backend: takes [`Operation::Barrier`](super::Operation::Barrier).
pub const FEATURE_BARRIER: &str = "feature-barrier";
/// Backend: takes [`Operation::Flush`](super::Operation::Flush).
pub const FEATURE_FLUSH_CACHE: &str = "feature-flush-cache";
/// Backend: takes [`Operation::Discard`](super::Operation::Discard).
pub const FEATURE_DISCARD: &str = "feature-discard";
/// Backend, by the toolstack: `0` keeps discard from being offered. Absent: 1.
pub const DISCARD_ENABLE: &str = "discard-enable";
/// Backend: bytes of the unit that is discarded. Absent: the sector size.
pub const DISCARD_GRANULARITY: &str = "discard-granularity";
/// Backend: offset in bytes of the first such unit. Absent: 0.
pub const DISCARD_ALIGNMENT: &str = "discard-alignment";
/// Backend: a discard can make the content unreadable. Absent: no.
pub const DISCARD_SECURE: &str = "discard-secure";
/// Either end: keeps mapped, or goes on granting, the same pages. Absent: no.
pub const FEATURE_PERSISTENT: &str = "feature-persistent";
/// Backend, our own: `1` if it opens the windows of rings ([`RINGFENCE_WINDOW`]). Absent: it does not.
pub const FEATURE_RINGFENCE_WINDOW: &str = "feature-ringfence-window";
/// Backend: most segments of an indirect request. Must be absent if there are none.
pub const FEATURE_MAX_INDIRECT_SEGMENTS: &str = "feature-max-indirect-segments";
/// Backend: highest order of the ring. Absent: 0.
pub const MAX_RING_PAGE_ORDER: &str = "max-ring-page-order";
/// Backend: most pages of the ring, an older form of [`MAX_RING_PAGE_ORDER`].
pub const MAX_RING_PAGES: &str = "max-ring-pages";
/// Backend: most queues. Absent: 1.
pub const MULTI_QUEUE_MAX_QUEUES: &str = "multi-queue-max-queues";
/// Backend: size of the disk in units of 512 bytes.
pub const SECTORS: &str = "sectors";
/// Backend: bytes that lengths and positions are multiples of.
pub const SECTOR_SIZE: &str = "sector-size";
/// Backend: bytes that the medium reads or writes at once. Absent: the sector size.
pub const PHYSICAL_SECTOR_SIZE: &str = "physical-sector-size";
/// Backend: bits of what the disk is.
pub const INFO: &str = "info";
/// Backend, by the toolstack: `r` or `w`.
pub const MODE: &str = "mode";
/// Backend, by the toolstack: where the disk's content is.
pub const PARAMS: &str = "params";
/// Backend, by the toolstack: `phy`, `file` …
pub const TYPE: &str = "type";
/// Backend, by the toolstack: `1` for a medium that can be taken out.
pub const REMOVABLE: &str = "removable";

/// Frontend: gref of the ring's only page.
pub const RING_REF: &str = "ring-ref";
/// Frontend: the order of the ring. Absent: 0.
pub const RING_PAGE_ORDER: &str = "ring-page-order";
/// Frontend: pages of the ring, an older form of [`RING_PAGE_ORDER`].
pub const NUM_RING_PAGES: &str = "num-ring-pages";
/// Frontend: the event channel.
pub const EVENT_CHANNEL: &str = "event-channel";
/// Frontend, our own, for each queue: the window in which pages of its requests are. Absent: it has none.
pub const RINGFENCE_WINDOW: &str = "ringfence-window";
/// Frontend: the layout of requests. Absent: that of the frontend's own architecture.
pub const PROTOCOL: &str = "protocol";
/// Frontend: queues used. Absent: 1.
pub const MULTI_QUEUE_NUM_QUEUES: &str = "multi-queue-num-queues";
/// Frontend, by the toolstack: number of the disk as the guest knows it.
pub const VIRTUAL_DEVICE: &str = "virtual-device";
/// Frontend, by the toolstack: `disk` or `cdrom`.
pub const DEVICE_TYPE: &str = "device-type";
/// Frontend, by the toolstack: `0` if the backend is not to be trusted. Absent: 1.
pub const TRUSTED: &str = "trusted";

/// Frontend: gref of a page of a ring that has several.
pub fn ring_ref(page: usize) -> String {
    format!("ring-ref{page}")
}

/// The directory of a queue, below the frontend's, when there are several.
pub fn queue_directory(queue: u32) -> String {
    format!("queue-{queue}")
}
