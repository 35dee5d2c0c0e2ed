#![forbid(unsafe_code)]
//! The store: the xenstore server, and the client that every domain talks to one with.
//!
//! The client speaks to a server over whatever descriptor it is given: on Xen to xenstored over
//! `/dev/xen/xenbus`, with processes alone to the [`StoreServer`] in the hub, over a socket. Neither
//! side trusts the other: a client bounds everything that the server says, because for a frontend
//! the server belongs to the backend's side.
//!
//! ```text
//!  StoreClient ──stream──> StorePump ──messages──> StoreServer
//!   client                  pump                    server ── outbox (what was not read yet)
//!                                                     ├── access (permissions) ── tree
//!                                                     ├── transaction
//!                                                     └── watch
//! ```

mod access;
mod client;
#[cfg(any(test, feature = "test-utils"))]
mod fuzz;
mod outbox;
mod path;
mod pump;
mod quota;
mod server;
mod transaction;
mod transport;
mod tree;
mod watch;

#[cfg(test)]
mod tests;

pub use client::{StoreAccess, StoreClient, StoreError, Transaction, WatchEvent};
#[doc(hidden)]
#[cfg(any(test, feature = "test-utils"))]
pub use fuzz::fuzz_store_session;
pub use outbox::Outbox;
pub use pump::{AttachError, CloseReason, Closed, StorePump};
pub use quota::{DEPTH_MAX, Limits, Refusals, StoreCounters};
pub use server::{ConnectionId, Leftovers, StoreServer, TooManyConnections};
