//! Rule violations of a vhost-user client, each of which ends its connection.

use ringfence_ring::split::backend::{DriverFault, TableFault};
use ringfence_ring::split::inflight::LogFault;
use ringfence_sys::descriptors::MessageError as ReceiveError;
use ringfence_wire::vhost_user::MessageError;
use ringfence_wire::virtio::feature;

use super::pool::PoolFault;

/// Reason for which a client is disconnected.
#[derive(Debug, thiserror::Error)]
pub enum ClientFault {
    /// Message that cannot be received.
    #[error("vhost-user: {0}")]
    Receive(#[from] ReceiveError),
    /// Message that cannot be parsed.
    #[error(transparent)]
    Message(#[from] MessageError),
    /// Message of which only a part came.
    #[error("vhost-user: {bytes} bytes of a message of {len}")]
    Partial {
        bytes: usize,
        /// Length of the message or of its header.
        len: usize,
    },
    /// Request that was not offered.
    #[error("vhost-user: request {request} was not offered")]
    Request { request: u32 },
    /// Features that were not offered.
    #[error("vhost-user: features {features:#x} were not offered{}", named(*features))]
    Features {
        /// Features beyond the offered ones.
        features: u64,
    },
    /// Addresses of a vIOMMU, which this backend would have to ask the frontend for.
    #[error(
        "vhost-user: the features have ACCESS_PLATFORM, so descriptors have addresses of a vIOMMU, which is not \
         supported: start the machine without one"
    )]
    Translated,
    #[error("vhost-user: protocol features {features:#x} were not offered")]
    ProtocolFeatures {
        /// Protocol features beyond the offered ones.
        features: u64,
    },
    /// Vring that the device does not have.
    #[error("vhost-user: vring {index} of {count}")]
    Vring { index: u32, count: usize },
    /// Request of a protocol feature that was not negotiated.
    #[error("vhost-user: a request of a protocol feature that was not negotiated")]
    Protocol,
    /// MTU that the device cannot carry.
    #[error("vhost-user: an MTU of {mtu} for a card whose longest packet has {max} bytes")]
    Mtu { mtu: u64, max: u16 },
    /// In-flight log that the device cannot use.
    #[error("vhost-user: an in-flight log of {len} bytes for {queues} queues of {queue_size}")]
    Log {
        queues: u16,
        queue_size: u16,
        /// Length of the log in bytes.
        len: u64,
    },
    #[error("vhost-user: the file of a log must be sealed against shrinking")]
    Unsealed,
    /// Written page that is not in the log.
    #[error("vhost-user: the log of written pages ends before {len} bytes at {address:#x}")]
    Unlogged {
        address: u64,
        /// Length in bytes.
        len: usize,
    },
    /// In-flight log that does not belong to its vring.
    #[error("vhost-user: {0}")]
    ForeignLog(#[from] LogFault),
    /// Client that asks for in-flight logs too fast.
    #[error("vhost-user: no file for an in-flight log is left at present")]
    NoLogFile,
    /// Chain that the driver made available while it was in flight.
    #[error("vhost-user: the driver made descriptor {head} available while it was in flight")]
    Repeated { head: u16 },
    /// Request of a disk without room for its status.
    #[error("vhost-user: a request of {readable} bytes to be read and {writable} to be written")]
    NoStatus { readable: u64, writable: u64 },
    /// Value that the vring cannot have.
    #[error("vhost-user: {value} for vring {index}")]
    Value { index: u32, value: u32 },
    #[error("vhost-user: {count} files where {needed} belong")]
    Files { count: usize, needed: usize },
    /// File that is no eventfd.
    #[error("vhost-user: a vring's file must be an eventfd")]
    NoEvent,
    /// File for requests to the hypervisor that is no stream socket.
    #[error("vhost-user: the file for requests of the backend must be a stream socket")]
    NoSocket,
    /// Memory beyond what the link's rule admits.
    #[error(transparent)]
    Pool(#[from] PoolFault),
    /// Memory region that does not lie in its file or in the address space.
    #[error("vhost-user: an invalid memory region of {len} bytes at {address:#x}")]
    Region {
        /// First address of the region.
        address: u64,
        /// Length in bytes.
        len: u64,
    },
    #[error("vhost-user: more than {limit} regions of memory")]
    Slots { limit: usize },
    #[error("vhost-user: no region of that length at {address:#x} can be removed")]
    NoRegion {
        /// First address of the region.
        address: u64,
    },
    /// Memory region that cannot be mapped.
    #[error("vhost-user: the guest's memory cannot be mapped: {source}")]
    Map { source: std::io::Error },
    /// Address outside of the guest's memory.
    #[error("vhost-user: {len} bytes at {address:#x} lie outside of the guest's memory")]
    Unmapped {
        address: u64,
        /// Length in bytes.
        len: usize,
    },
    /// Tables of a vring that cannot be used.
    #[error("vhost-user: {0}")]
    Tables(#[from] TableFault),
    /// Broken rule of the guest's driver.
    #[error("vhost-user: {0}")]
    Driver(#[from] DriverFault),
    #[error("vhost-user: {what}: {source}")]
    System { what: &'static str, source: rustix::io::Errno },
}

/// Returns the names of features, for a message.
fn named(features: u64) -> String {
    match &feature::names(features)[..] {
        [] => String::new(),
        names => format!(" ({})", names.join(", ")),
    }
}
