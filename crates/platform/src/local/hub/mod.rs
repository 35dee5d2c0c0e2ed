//! Hub of local domains: takes the roles of the hypervisor and of xenstored.
//!
//! The hub assigns domain numbers, passes arenas and event channels from the domain that created them to
//! their peer, and serves the store. It is one thread with one `epoll`. It never blocks on a domain. A
//! domain that breaks the protocol loses its connection; no other domain is affected.
//!
//! Quotas for each domain ([`HubLimits`]) bound the hub's resources: arena bytes, ports, connections.

mod broker;
pub(crate) mod client;
pub(crate) mod protocol;
mod server;

pub use broker::HubLimits;
pub use server::{Hub, HubHandle};
