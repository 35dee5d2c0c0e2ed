//! Store keys of a vbd. Feature keys are `0` or `1`.
//!
//! A frontend with one queue keeps the ring and event keys at the top of its directory. With several
//! queues they are in [`queue_directory`]; only [`RING_PAGE_ORDER`] stays at the top.
//!
//! Each key's comment begins with its writer: the backend, the frontend, or the toolstack.

/// Backend: accepts the operation [`Operation::Barrier`](super::Operation::Barrier).
pub const FEATURE_BARRIER: &str = "feature-barrier";
/// Backend: accepts the operation [`Operation::Flush`](super::Operation::Flush).
pub const FEATURE_FLUSH_CACHE: &str = "feature-flush-cache";
/// Backend: accepts the operation [`Operation::Discard`](super::Operation::Discard).
pub const FEATURE_DISCARD: &str = "feature-discard";
/// Toolstack, for the backend: `0` disables the offer of discard. Absent: 1.
pub const DISCARD_ENABLE: &str = "discard-enable";
/// Backend: discard unit in bytes. Absent: the sector size.
pub const DISCARD_GRANULARITY: &str = "discard-granularity";
/// Backend: offset in bytes of the first discard unit. Absent: 0.
pub const DISCARD_ALIGNMENT: &str = "discard-alignment";
/// Backend: supports a discard that makes the content unreadable. Absent: no.
pub const DISCARD_SECURE: &str = "discard-secure";
/// Either end: keeps the same pages mapped, or granted. Absent: no.
pub const FEATURE_PERSISTENT: &str = "feature-persistent";
/// Backend, Ringfence only: `1` if it opens the grant windows of rings ([`RINGFENCE_WINDOW`]). Absent: no.
pub const FEATURE_RINGFENCE_WINDOW: &str = "feature-ringfence-window";
/// Backend, Ringfence only: accepts the operation [`Operation::Extents`](super::Operation::Extents). Absent: no.
pub const FEATURE_RINGFENCE_EXTENTS: &str = "feature-ringfence-extents";
/// Backend, Ringfence only: accepts the operation [`Operation::WriteZeroes`](super::Operation::WriteZeroes).
/// Absent: no.
pub const FEATURE_RINGFENCE_WRITE_ZEROES: &str = "feature-ringfence-write-zeroes";
/// Backend: maximum segments of an indirect request. Must be absent if indirect is not offered.
pub const FEATURE_MAX_INDIRECT_SEGMENTS: &str = "feature-max-indirect-segments";
/// Backend: maximum ring order. Absent: 0.
pub const MAX_RING_PAGE_ORDER: &str = "max-ring-page-order";
/// Backend: maximum ring pages, an older form of [`MAX_RING_PAGE_ORDER`].
pub const MAX_RING_PAGES: &str = "max-ring-pages";
/// Backend: maximum number of queues. Absent: 1.
pub const MULTI_QUEUE_MAX_QUEUES: &str = "multi-queue-max-queues";
/// Backend: disk size in units of 512 bytes.
pub const SECTORS: &str = "sectors";
/// Backend: sector size in bytes; positions and lengths are multiples of it.
pub const SECTOR_SIZE: &str = "sector-size";
/// Backend: physical sector size in bytes. Absent: the sector size.
pub const PHYSICAL_SECTOR_SIZE: &str = "physical-sector-size";
/// Backend: `INFO_*` bits that describe the medium.
pub const INFO: &str = "info";
/// Toolstack, for the backend: `r` or `w`.
pub const MODE: &str = "mode";
/// Toolstack, for the backend: location of the disk's content.
pub const PARAMS: &str = "params";
/// Toolstack, for the backend: `phy`, `file` …
pub const TYPE: &str = "type";
/// Toolstack, for the backend: `1` for a removable medium.
pub const REMOVABLE: &str = "removable";

/// Frontend: gref of a single-page ring.
pub const RING_REF: &str = "ring-ref";
/// Frontend: order of the ring. Absent: 0.
pub const RING_PAGE_ORDER: &str = "ring-page-order";
/// Frontend: pages of the ring, an older form of [`RING_PAGE_ORDER`].
pub const NUM_RING_PAGES: &str = "num-ring-pages";
/// Frontend: event channel of the ring.
pub const EVENT_CHANNEL: &str = "event-channel";
/// Frontend, Ringfence only, per queue: grant window of the request pages. Absent: none.
pub const RINGFENCE_WINDOW: &str = "ringfence-window";
/// Frontend, Ringfence only, per queue: number of references of [`RINGFENCE_WINDOW`], reserved ones included. Xen needs
/// it to open the window. Absent: the platform finds the number.
pub const RINGFENCE_WINDOW_REFERENCES: &str = "ringfence-window-references";
/// Frontend, Ringfence only: `1` if it knows the status [`Status::NoSpace`](super::Status::NoSpace). Absent: no.
pub const RINGFENCE_NO_SPACE: &str = "ringfence-no-space";
/// Frontend: layout of requests. Absent: the layout of the frontend's own architecture.
pub const PROTOCOL: &str = "protocol";
/// Frontend: number of queues used. Absent: 1.
pub const MULTI_QUEUE_NUM_QUEUES: &str = "multi-queue-num-queues";
/// Toolstack, for the frontend: disk number in the guest.
pub const VIRTUAL_DEVICE: &str = "virtual-device";
/// Toolstack, for the frontend: `disk` or `cdrom`.
pub const DEVICE_TYPE: &str = "device-type";
/// Toolstack, for the frontend: `0` if the guest does not trust the backend. Absent: 1.
pub const TRUSTED: &str = "trusted";

/// Names the frontend's key for one page of a multi-page ring.
pub fn ring_ref(page: usize) -> String {
    format!("ring-ref{page}")
}

/// Names the directory of a queue below the frontend's, used with several queues.
pub fn queue_directory(queue: u32) -> String {
    format!("queue-{queue}")
}
