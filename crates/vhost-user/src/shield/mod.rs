//! Shield between a machine and a foreign backend: the backend sees a pool of the shield, and no memory of the machine.
//!
//! Guest, hypervisor and backend are unmodified. Towards the hypervisor the shield is the backend, and alone maps the
//! machine's memory. Towards the backend it is the frontend, with memory of its own.
//!
//! ```text
//!              ┌────────────────────────── Shield ──────────────────────────┐
//!  hypervisor  │ End ── Device: memory, vrings, in-flight log               │
//!  driver  <──>│ BackendQueue ── ShadowQueue ── DriverQueue in the pool     │<──> backend
//!              │                 copies in, copies out   Connection         │
//!              └────────────────────────────────────────────────────────────┘
//! ```
//!
//! A [`Shield`] serves one hypervisor at a time, on one thread, in rounds. Each connection to a backend has a fresh
//! [`ShieldPool`]: a sealed memfd that holds vrings and buffers. A backend that comes later finds nothing in it that an
//! earlier one left, and an earlier one sees nothing that a later one gets.
//!
//! # A request
//!
//! 1. The shield fetches a chain of the driver's once, and looks its addresses up ([`BackendQueue`]).
//! 2. It takes a block of the pool, copies the readable bytes there, and fills the room for the writable ones with zeros.
//! 3. It makes a chain of at most four descriptors available to the backend: the first readable segment and the last
//!    writable one stay descriptors of their own if they are short (headers and states of requests), and the bytes
//!    between are joined.
//! 4. The used element of the backend is checked against private state ([`DriverQueue`]): its id is in flight, and is used
//!    once; its length is clamped to the writable bytes. As many bytes are copied back, and always the last
//!    64, where a disk puts its status.
//! 5. The driver's chain is returned with the clamped length.
//!
//! Without room in the pool or in the backend's vring the chain waits, and the vring takes no further one. Each vring has a
//! reserve, so receive buffers that fill the pool do not stop the other direction.
//!
//! # Messages
//!
//! | message | decision |
//! |---|---|
//! | `GET_FEATURES`, `SET_FEATURES` | features of the kind of device pass; those of vrings are the shield's own. Not offered: packed rings, order, reset of one vring |
//! | `GET_PROTOCOL_FEATURES`, `SET_...` | `MQ`, `CONFIG`, `RARP`, `MTU` of the backend; `REPLY_ACK`, `BACKEND_REQ`, `INFLIGHT`, `LOG_SHMFD` are the shield's own |
//! | `SET_MEM_TABLE`, `ADD_MEM_REG`, `REM_MEM_REG`, `GET_MAX_MEM_SLOTS`, `SET_VRING_*`, `GET_VRING_BASE`, `SET_OWNER`, `RESET_OWNER`, `SET_BACKEND_REQ_FD` | the shield's own; a vring that starts or stops does so at the backend |
//! | `GET_INFLIGHT_FD`, `SET_INFLIGHT_FD` | the shield keeps the log |
//! | `GET_QUEUE_NUM` | the backend's number |
//! | `GET_CONFIG`, `SET_CONFIG`, `SEND_RARP`, `NET_SET_MTU` | pass |
//! | `CONFIG_CHANGE_MSG` of the backend | is acknowledged, and told to the hypervisor; other requests of a backend are refused |
//! | `SET_LOG_BASE` | the shield marks the pages that it writes ([`DirtyLog`]): requests' room and used rings |
//! | all others | refused by their names |
//!
//! The backend gets `GET_FEATURES`, `GET_PROTOCOL_FEATURES`, `GET_QUEUE_NUM`, `SET_OWNER`, `SET_BACKEND_REQ_FD` with a socket
//! of the shield's, features, one `SET_MEM_TABLE` with the pool, and the messages of vrings. The shield waits for its answers, at most [`ANSWER_MAX`].
//!
//! # Migration
//!
//! A hypervisor copies the memory of a machine that runs, and copies each page anew that the shield has marked since. It
//! stops the vrings at the end, and continues them at another shield with its own backend. The log of chains in flight
//! stays behind. So a vring with such a log stops once the backend has used all that it has; what it does not have yet is
//! available again.
//!
//! # Guarantees
//!
//! * The backend gets descriptors of its pool, and of eventfds and a socket of the shield, and no others. Addresses in the
//!   pool say nothing about the address space of the shield.
//! * The machine's memory is written only where a driver's chain, fetched and validated, is writable.
//! * A hypervisor, a driver or a backend that breaks a rule ([`ShieldFault`]) loses its connection. With
//!   [`ShieldOptions::reconnect`] the end of the backend alone, by any reason, costs the driver nothing but time: the next
//!   backend gets the chains in flight once more, in their order.
//! * A backend that floods its channel causes one notice in an interval of 100 ms, and its other requests are not read.
//! * While both ends are busy, a request costs no allocation and no system call. Nobody's eventfd can block the shield.

mod arena;
mod connection;
mod device;
mod fault;
#[cfg(any(test, feature = "test-utils"))]
#[doc(hidden)]
pub mod fuzzing;
mod pool;
mod shadow;
#[cfg(test)]
mod tests;
mod totals;

#[cfg(doc)]
use crate::dirty::DirtyLog;
pub use connection::ANSWER_MAX;
pub use device::{BackendFiles, Broken, Outcome, Shield, ShieldOptions};
pub use fault::ShieldFault;
pub use pool::{POOL_MIN, ShieldPool};
#[cfg(doc)]
use ringfence_ring::split::{DriverQueue, backend::BackendQueue};
pub use totals::ShieldTotals;
