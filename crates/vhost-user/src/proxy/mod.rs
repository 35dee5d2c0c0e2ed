//! Proxy between a frontend and a foreign backend: the backend sees the pool of its device, and no other memory.
//!
//! Only control messages pass through. The proxy maps nothing; it reads the mark of a pool by its descriptor. Rings,
//! buffers and eventfds connect the driver and the backend directly.
//!
//! ```text
//!              ┌────────────── Relay ──────────────┐
//!  frontend <─>│ End ─ Message ─> Filter ─> End    │<─> backend
//!              │     <─ answer ── Filter <─        │
//!  channel  <──│ End <─────────────── Notices      │<─> channel of the backend
//!              └───────────────────────────────────┘
//! ```
//!
//! A [`Relay`] serves one frontend and one backend. Each [`End`](end::End) of a socket receives whole messages and sends
//! without waiting. The [`Filter`] decides on each message by the table below. One message is on its way at a time: the
//! next one of the frontend waits in its socket until the backend has answered, so nothing accumulates here.
//!
//! # Decisions
//!
//! | message | decision | reason |
//! |---|---|---|
//! | `GET_FEATURES` | answer: bit 33 is added, `LOG_ALL` removed | QEMU's `iommu_platform=on` needs bit 33 |
//! | `SET_FEATURES` | passes what was offered; `ACCESS_PLATFORM` is refused | addresses would be those of a vIOMMU |
//! | `GET_PROTOCOL_FEATURES`, `SET_...` | those of rows that pass, `REPLY_ACK` and `BACKEND_REQ`; the backend gets what it has | |
//! | `SET_MEM_TABLE` | passes with the pool alone; the proxy closes the other descriptors. Refused without a pool, or with two | |
//! | `ADD_MEM_REG`, `REM_MEM_REG` | pass for the pool; the proxy acknowledges them for other memory | |
//! | `SET_VRING_ADDR` | passes if the addresses lie in the pool, without a log | a guest without the module fails here |
//! | `SET_VRING_KICK`, `_CALL`, `_ERR` | pass with an eventfd; any other file is refused | memory is a file, too |
//! | `SET_BACKEND_REQ_FD` | the proxy keeps the socket; the backend gets one of the proxy's, if it wants one | the channel is filtered |
//! | `GET_INFLIGHT_FD`, `SET_...` | pass with a small file in memory, which is no memory of the guest | a log that the backend made |
//! | `GET_CONFIG`, `SET_CONFIG`, `SET_OWNER`, `RESET_OWNER`, `RESET_DEVICE`, `SET_VRING_NUM`, `_BASE`, `_ENABLE`, `_ENDIAN`, `GET_VRING_BASE`, `GET_QUEUE_NUM`, `GET_MAX_MEM_SLOTS`, `SEND_RARP`, `NET_SET_MTU`, `SET_STATUS`, `GET_STATUS` | pass without descriptors | numbers alone |
//! | `SET_LOG_BASE`, `SET_LOG_FD` | refused | all devices of a machine share that log |
//! | `IOTLB_MSG` | refused | without a vIOMMU there is none |
//! | `POSTCOPY_ADVISE`, `_LISTEN`, `_END` | refused | a `userfaultfd` reaches memory outside of the pool |
//! | `SET_DEVICE_STATE_FD`, `CHECK_DEVICE_STATE` | refused | any file could come |
//! | `GET_SHARED_OBJECT` | refused | an object belongs to another device |
//! | `GET_SHMEM_CONFIG` | refused | the machine would map memory of the backend |
//! | `GPU_SET_SOCKET` | refused | the socket carries memory of the display |
//! | `CREATE_CRYPTO_SESSION`, `CLOSE_...` | refused | keys of the guest |
//! | `VRING_KICK` | refused | belongs to a feature that is not offered |
//! | unknown numbers | refused | |
//!
//! On the channel of the backend:
//!
//! | message | decision | reason |
//! |---|---|---|
//! | `CONFIG_CHANGE_MSG` | acknowledged; the hypervisor gets a notice | a disk that was resized |
//! | `IOTLB_MSG`, `VRING_CALL`, `VRING_ERR`, `VRING_HOST_NOTIFIER_MSG`, `SHARED_OBJECT_ADD`, `_REMOVE`, `_LOOKUP`, `SHMEM_MAP`, `_UNMAP` | refused | files and mappings between machine and backend; features that are not offered |
//!
//! # Guarantees
//!
//! * No descriptor reaches the backend but those of the pool, eventfds, an in-flight log and its end of the channel. The
//!   frontend gets none but an in-flight log. A descriptor of a message that carries none is closed.
//! * A refused message, and every other broken rule ([`ProxyFault`]), ends both connections, with its name in the fault.
//! * Answers match requests. A backend that sends anything else than the answer is disconnected.
//! * A backend that floods its channel causes one notice in an interval of 100 ms, and its other requests are not read.
//! * A peer that is silent, sends half of a message or does not read delays its own device alone. Half of a message may
//!   stay for [`HALF_MAX`](end::HALF_MAX).

pub mod end;
mod fault;
mod filter;
#[cfg(any(test, feature = "test-utils"))]
#[doc(hidden)]
pub mod fuzzing;
pub(crate) mod notices;
mod pool;
mod relay;
pub(crate) mod table;
#[cfg(test)]
mod tests;

pub use fault::ProxyFault;
pub use filter::{Actions, Filter, NewChannel};
pub use pool::{PoolChoice, Withheld};
pub use relay::{Broken, Outcome, Party, Peers, Relay};
