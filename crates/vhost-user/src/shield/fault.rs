//! Broken rules of a hypervisor, a driver or a backend, each of which ends a connection.

use ringfence_ring::split::QueueFault;

use crate::ClientFault;
use crate::pool::size;
use crate::proxy::ProxyFault;

/// Reason for which a shield disconnects a peer.
#[derive(Debug, thiserror::Error)]
pub enum ShieldFault {
    /// Broken rule of a hypervisor or a driver.
    #[error(transparent)]
    Client(#[from] ClientFault),
    /// Message that breaks a rule, or is refused.
    #[error("vhost-user: {0}")]
    Message(#[from] ProxyFault),
    /// Broken rule of the backend in a vring.
    #[error("vhost-user: vring {index}: {fault}")]
    Used { index: u32, fault: QueueFault },
    /// Chain that no pool of this size can hold.
    #[error(
        "vhost-user: vring {index}: a chain of {len} bytes, and the pool takes {limit}: use a larger --pool"
    )]
    TooLong { index: u32, len: u64, limit: usize },
    #[error("vhost-user: vring {index}: a chain without a byte")]
    Empty { index: u32 },
    /// Pool without room for the tables and the reserve of a vring.
    #[error("vhost-user: vring {index} does not fit into a pool of {}: use a larger --pool", size(*pool))]
    Crowded { index: u32, pool: u64 },
    #[error("vhost-user: no answer to {name} for {seconds} s")]
    Silent { name: &'static str, seconds: u64 },
    #[error("vhost-user: {name} failed with {value}")]
    Failed { name: &'static str, value: u64 },
    #[error("vhost-user: the connection ended")]
    Gone,
    /// Backend that cannot continue for the one before it.
    #[error("vhost-user: it has fewer features than the one before it: {features:#x} are missing")]
    Lacks { features: u64 },
    #[error("vhost-user: {what}: {source}")]
    System { what: &'static str, source: std::io::Error },
}
