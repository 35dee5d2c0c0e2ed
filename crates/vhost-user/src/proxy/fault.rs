//! Broken rules of a frontend or a backend, each of which ends both connections.

use ringfence_sys::descriptors::MessageError as ReceiveError;
use ringfence_wire::vhost_user::MessageError;

use crate::pool::{LENDING, size};

/// Reason for which a frontend and its backend are disconnected.
#[derive(Debug, thiserror::Error)]
pub enum ProxyFault {
    /// Message that cannot be received.
    #[error("{0}")]
    Receive(#[from] ReceiveError),
    /// Message that cannot be parsed.
    #[error(transparent)]
    Message(#[from] MessageError),
    /// Message whose rest did not come in time.
    #[error("{bytes} bytes of a message of {len}, and no more for {seconds} s")]
    Partial { bytes: usize, len: usize, seconds: u64 },
    /// Request that no proxy passes.
    #[error("{name} is refused: {why}")]
    Refused { name: &'static str, why: &'static str },
    #[error("request {number} is refused: it is unknown")]
    Unknown { number: u32 },
    /// Request of the backend, on its channel.
    #[error("request {number}{} of the backend is refused: its feature was not offered", named(*name))]
    Channel { number: u32, name: Option<&'static str> },
    #[error("{name} of {len} bytes")]
    Length { name: &'static str, len: usize },
    #[error("{name} belongs to a protocol feature that was not negotiated")]
    Protocol { name: &'static str },
    #[error("features {features:#x} were not offered")]
    Features {
        /// Features beyond the offered ones.
        features: u64,
    },
    #[error("protocol features {features:#x} were not offered")]
    ProtocolFeatures {
        /// Protocol features beyond the offered ones.
        features: u64,
    },
    /// Addresses of a vIOMMU.
    #[error(
        "the features have ACCESS_PLATFORM, so descriptors have addresses of a vIOMMU, which is not supported: \
         start the machine without one"
    )]
    Translated,
    #[error("{name} with {count} files in place of {needed}")]
    Files { name: &'static str, count: usize, needed: usize },
    #[error("{name} with a file that is no eventfd")]
    NoEvent { name: &'static str },
    #[error("SET_BACKEND_REQ_FD with a file that is no stream socket, or a second time")]
    NoSocket,
    /// File of an in-flight log that may be memory of the guest.
    #[error("{name} with a file that is no small file in memory, or memory of the guest")]
    NoLog { name: &'static str },
    /// Memory without a pool of the device.
    #[error("the hypervisor hands over {} of memory, and {pool} is not among it; {}", size(*bytes), LENDING)]
    NoPool {
        /// Bytes of the files.
        bytes: u64,
        /// The pool that is wanted.
        pool: String,
    },
    /// More than one file to which the choice applies.
    #[error(
        "the hypervisor hands over more than one file that is {pool}: begin each pool with the mark and a name, and \
         choose it by --pool NAME (docs/vhost-user.md)"
    )]
    Ambiguous {
        /// The pool that is wanted.
        pool: String,
    },
    #[error("more than {limit} regions of memory")]
    Regions { limit: usize },
    #[error("REM_MEM_REG of a region at {address:#x} that was not added")]
    NoRegion {
        /// First address of the region.
        address: u64,
    },
    /// Vring outside of the pool.
    #[error(
        "vring {index} has a table at {address:#x}, outside of the pool: load the module ringfence-lent-pool in the \
         machine before the driver"
    )]
    Vring { index: u32, address: u64 },
    #[error("SET_VRING_ADDR with a log, which was not offered")]
    Logged,
    /// Backend that cannot be completed by a proxy.
    #[error(
        "the backend has no protocol features (bit 30), which QEMU needs for iommu_platform=on"
    )]
    TooOld,
    /// Bytes of a peer that was not asked.
    #[error("an answer to no request")]
    Unsolicited,
    #[error("an answer to request {found} of {len} bytes, where one to {name} belongs")]
    Answer { found: u32, len: usize, name: &'static str },
    #[error("{what}: {source}")]
    System { what: &'static str, source: rustix::io::Errno },
}

fn named(name: Option<&'static str>) -> String {
    name.map_or(String::new(), |name| format!(" ({name})"))
}
