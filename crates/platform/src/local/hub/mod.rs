//! The hub: what stands for the hypervisor and xenstored between local domains.
//!
//! It hands out domain numbers, passes arenas and event channels from the domain that made them to
//! the one they are for, and serves the store. It is one thread with one `epoll`; it never blocks
//! on a domain, and a domain that breaks the protocol loses its connection and nothing else.
//!
//! Quotas per domain ([`HubLimits`]) bound what the hub keeps: arena bytes, ports, connections.

mod broker;
pub(crate) mod client;
pub(crate) mod protocol;
mod server;

pub use broker::HubLimits;
pub use server::{Hub, HubHandle};
