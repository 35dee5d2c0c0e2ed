//! NBD client: disk on a server, over TCP or a Unix socket.
//!
//! # Reconnect
//!
//! Each connection looks the host's name up anew and tries all addresses (`host.rs`). A connection that breaks, or has no reply for too long, is opened again with growing delays.
//! Unanswered requests are sent again in their original order. Requests older than
//! [`NbdOptions::give_up`] fail, so no request waits without end.
//!
//! # Durability
//!
//! A write that the server acknowledged but that was not flushed may be lost with the server. A flush
//! acknowledged by the next server would then be wrong. The client therefore keeps such writes in a
//! journal (`journal.rs`) and sends them again, before anything else, after a reconnect. The journal
//! is bounded ([`NbdOptions::journal`]): the client flushes on its own before it is full.
//!
//! With several connections ([`NbdOptions::connections`]) the writes have no common order to repeat. Then,
//! and without a journal, a flush fails once if a connection broke since the writes that it covers.
//!
//! # Limits
//!
//! A server that is cut off but still runs may execute an old write after its successor executed a newer
//! one. No client can prevent that: replaceable servers must fence each other.

// #syscall driver,disk,daemon ppoll: waiting for a server's greeting

mod address;
mod dial;
mod handed;
mod host;
mod journal;
mod link;
mod queue;
mod shared;
mod tls;

use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use ringfence_sys::poll::wait_any;
use rustix::event::{PollFd, PollFlags};

pub use address::{BadAddress, NbdAddress, TlsFiles};
pub use dial::Dialer;
pub use handed::{NbdConnector, NbdFacts};
pub use shared::NbdOptions;
pub use tls::TlsIdentity;

use crate::protocol::agree::Negotiated;
use crate::protocol::numbers::transmission;
use link::{Endpoint, NbdLink, NbdTarget};
use ringfence_block::storage::folders::Folders;
use ringfence_block::storage::{Discard, Disk, DiskQueue, Geometry};
use shared::SharedDisk;
use tls::TlsClient;

/// Disk whose requests an NBD server executes ([`NbdDisk::open`]).
pub struct NbdDisk {
    shared: Arc<SharedDisk>,
}

impl NbdDisk {
    /// Connects to a server and negotiates an export.
    ///
    /// # Errors
    ///
    /// Returns an error if no server answers, or it has no usable export of that name.
    pub fn open(address: &NbdAddress, options: &NbdOptions) -> io::Result<NbdDisk> {
        NbdDisk::open_at(address, options, None)
    }

    /// Opens a disk as [`NbdDisk::open`] does, on a server whose Unix socket lies below one of `folders`. The rule
    /// also applies to later connections.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`NbdDisk::open`], and `PermissionDenied` for a socket elsewhere.
    pub fn open_below(
        address: &NbdAddress,
        options: &NbdOptions,
        folders: &Folders,
    ) -> io::Result<NbdDisk> {
        NbdDisk::open_at(address, options, Some(folders))
    }

    fn open_at(
        address: &NbdAddress,
        options: &NbdOptions,
        folders: Option<&Folders>,
    ) -> io::Result<NbdDisk> {
        let identity =
            address.tls().map(|files| TlsIdentity::read(&files.directory, &files.hostname));
        let tls = identity.transpose()?.as_ref().map(TlsClient::new).transpose()?;
        let endpoint = Endpoint::of(address, folders);
        let target = NbdTarget { endpoint, name: address.name().to_owned(), tls };
        let (link, settled) = connect_and_negotiate(&target, options.connect)?;
        NbdDisk::new(target, options, settled, Some(link))
    }

    fn new(
        target: NbdTarget,
        options: &NbdOptions,
        settled: Negotiated,
        first: Option<NbdLink>,
    ) -> io::Result<NbdDisk> {
        let geometry = geometry(&settled, options)?;
        let shared = SharedDisk {
            target,
            options: options.clone(),
            settled,
            geometry,
            durability: Mutex::default(),
            first: Mutex::new(first),
        };
        Ok(NbdDisk { shared: Arc::new(shared) })
    }
}

/// Connects to a server and performs the handshake within a time limit.
fn connect_and_negotiate(
    target: &NbdTarget,
    within: Duration,
) -> io::Result<(NbdLink, Negotiated)> {
    let until = Instant::now() + within;
    let mut link = NbdLink::over(target.endpoint.connect(until)?, false, target)?;
    loop {
        if let Some(settled) = link.drive(|_| {})? {
            return Ok((link, settled));
        }
        if until <= Instant::now() {
            return Err(io::Error::new(io::ErrorKind::TimedOut, "the NBD server says nothing"));
        }
        let mut flags = PollFlags::IN;
        flags.set(PollFlags::OUT, link.wants_to_write());
        wait_any(&mut [PollFd::new(link.stream(), flags)], Some(until))?;
    }
}

/// Converts the properties of an export to those of a disk, or refuses unusable ones.
fn geometry(settled: &Negotiated, options: &NbdOptions) -> io::Result<Geometry> {
    let offer = &settled.offer;
    let sector_size = match offer.block_min {
        ..=512 => 512,
        513..=4096 => 4096,
        larger => {
            return Err(io::Error::new(
                io::ErrorKind::Unsupported,
                format!("the server wants blocks of {larger} bytes: a disk has 4096 at most"),
            ));
        }
    };
    let bytes = offer.bytes;
    if bytes == 0 {
        return Err(io::Error::new(io::ErrorKind::Unsupported, "the server's disk is empty"));
    }
    if !bytes.is_multiple_of(u64::from(sector_size)) {
        return Err(io::Error::new(
            io::ErrorKind::Unsupported,
            format!(
                "the server's disk has {bytes} bytes, which is no multiple of its sectors of \
                 {sector_size}: the last bytes would be missing. Pad what it exports (truncate -s {})",
                bytes.next_multiple_of(u64::from(sector_size))
            ),
        ));
    }
    let read_only = options.read_only || offer.is_read_only();
    let can = |flag| offer.has(flag) && !read_only;
    let discard = can(transmission::SEND_TRIM).then_some(Discard {
        granularity: offer.block_preferred,
        alignment: 0,
        secure: false,
    });
    Ok(Geometry {
        bytes,
        sector_size,
        physical_sector_size: offer.block_preferred.clamp(sector_size, 1 << 20),
        read_only,
        flush: true,
        discard,
        write_zeroes: can(transmission::SEND_WRITE_ZEROES),
        extents: settled.block_status,
        rotational: offer.has(transmission::ROTATIONAL),
    })
}

impl Disk for NbdDisk {
    fn geometry(&self) -> Geometry {
        self.shared.geometry
    }

    fn queue(&self, _depth: u32) -> io::Result<Box<dyn DiskQueue>> {
        let first = self.shared.first.lock().unwrap_or_else(PoisonError::into_inner).take();
        Ok(Box::new(queue::NbdQueue::new(Arc::clone(&self.shared), first)?))
    }

    fn queues_max(&self) -> u32 {
        if self.shared.settled.offer.has(transmission::CAN_MULTI_CONN) {
            self.shared.options.connections.max(1)
        } else {
            1
        }
    }
}

#[cfg(test)]
mod tests;
