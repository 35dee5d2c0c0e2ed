#![forbid(unsafe_code)]
//! Xenstore: the server, and the client with which a domain uses a server.
//!
//! * [`StoreServer`]: the server as a state machine without I/O, with permissions, quotas ([`Limits`]),
//!   transactions and watches.
//! * [`StorePump`]: an event loop that serves sockets with a [`StoreServer`].
//! * [`StoreClient`]: a client over a socket or `/dev/xen/xenbus`. [`StoreAccess`] has the operations on
//!   nodes, which a [`Transaction`] has too. [`WatchEvent`] is what a watch delivers.
//!
//! On Xen the client connects to xenstored. On the local platform it connects to the [`StorePump`] in the
//! hub. Neither side trusts the other: for a frontend the server belongs to the backend's side, so the client
//! validates and limits everything that it receives.
//!
//! ```text
//!  StoreClient ──stream──> StorePump ──messages──> StoreServer
//!   client                  pump                    server ── output (unread messages)
//!                                                     ├── access (permissions) ── tree
//!                                                     ├── transaction
//!                                                     └── watch
//! ```
//!
//! ```
//! use ringfence_wire::grant::DomId;
//! use ringfence_xenstore::{Limits, StoreAccess, StoreClient, StorePump};
//! use std::os::unix::net::UnixStream;
//! use std::time::Duration;
//!
//! let (ours, theirs) = UnixStream::pair()?;
//! let mut pump = StorePump::new(Limits::default())?;
//! pump.attach(theirs.into(), DomId(0), true)?;
//! let server = std::thread::spawn(move || {
//!     while pump.take_closed().is_none() {
//!         pump.wait(Duration::from_secs(1)).unwrap();
//!     }
//! });
//!
//! let mut client = StoreClient::new(ours.into())?;
//! client.watch("/device", "token")?;
//! client.transaction(|t| {
//!     t.write("/device/ring-ref", "8")?;
//!     t.write("/device/state", "3")
//! })?;
//! assert_eq!(client.read_u32("/device/state")?, 3);
//! let event = client.wait_event(Duration::from_secs(60))?.unwrap();
//! assert_eq!((event.path.as_str(), event.token.as_str()), ("/device", "token"));
//! # drop(client);
//! # server.join().unwrap();
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod access;
mod client;
#[cfg(any(test, feature = "test-utils"))]
mod fuzz;
mod output;
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
pub use output::OutputQueue;
pub use pump::{CloseReason, Closed, StoreAttachError, StorePump};
pub use quota::{DEPTH_MAX, Limits, Refusals, StoreCounters};
pub use server::{ConnectionId, Leftovers, StoreServer, TooManyConnections};
