//! A disk that is somewhere else: an NBD server, over TCP or a Unix socket.
//!
//! # What holds when the server goes away
//!
//! A connection that breaks, or on which nothing is answered for too long, is made again, at once and
//! then less and less often. Whatever had no answer is asked again, in the order in which it was
//! asked first. Requests that grow too old meanwhile fail ([`NbdOptions::give_up`]): nothing hangs
//! for ever.
//!
//! A write that the server *did* acknowledge, but was not asked to make durable yet, may be gone with
//! the server; then a flush that the next server acknowledges would be a lie. So the client keeps
//! what was acknowledged and not flushed (`journal.rs`), and writes it again, before anything else, to
//! whoever answers next. What it keeps is bounded ([`NbdOptions::journal`]): it flushes by itself
//! before the bound is reached.
//!
//! Over several connections ([`NbdOptions::connections`]) there is no order in which to write again.
//! There (and where nothing is to be kept) a flush fails, once, if a connection broke since the writes that it should cover.
//!
//! What no client can prevent: a server that is cut off, but alive, may still carry out a write after
//! its successor did and overwrite what came later. Servers that can be replaced must fence each
//! other.

// #syscall driver,daemon ppoll: waiting for a server's greeting

mod address;
mod dial;
mod handed;
mod journal;
mod link;
mod queue;
mod tls;

use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use ringfence_sys::poll::wait_any;
use rustix::event::{PollFd, PollFlags};
use serde::{Deserialize, Serialize};

pub use address::{BadAddress, NbdAddress, TlsFiles};
pub use dial::Dialer;
pub use handed::{NbdConnector, NbdFacts};
pub use tls::TlsIdentity;

use crate::protocol::agree::Settled;
use crate::protocol::numbers::transmission;
use link::{Link, Place, Target};
use ringfence_block::storage::folders::Folders;
use ringfence_block::storage::{Discard, Disk, DiskQueue, Geometry};
use tls::TlsClient;

/// How a remote disk is used.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct NbdOptions {
    /// Nothing is written.
    pub read_only: bool,
    /// How long the first connection may take, and each later one.
    pub connect: Duration,
    /// How long a server may answer nothing while something is asked of it.
    pub stall: Duration,
    /// How old a request may become.
    pub give_up: Duration,
    /// Bytes of acknowledged writes that are kept until they are flushed; 0 to keep none, and let a
    /// flush fail instead.
    pub journal: usize,
    /// Queues, and so connections, if the server allows more than one.
    pub connections: u32,
}

impl Default for NbdOptions {
    fn default() -> Self {
        NbdOptions {
            read_only: false,
            connect: Duration::from_secs(10),
            stall: Duration::from_secs(30),
            give_up: Duration::from_secs(120),
            journal: 64 << 20,
            connections: 1,
        }
    }
}

/// What the queues of a disk tell each other about writes that are not durable.
#[derive(Default)]
struct Durability {
    /// Counts acknowledged writes.
    written: u64,
    /// Those that a flush has covered.
    flushed: u64,
    /// A connection broke, and some of them may be lost.
    suspect: bool,
}

/// What is the same for all queues of a disk.
struct Shared {
    target: Target,
    options: NbdOptions,
    settled: Settled,
    geometry: Geometry,
    durability: Mutex<Durability>,
    /// The connection by which the disk was found, for the first queue.
    first: Mutex<Option<Link>>,
}

/// A disk that is somewhere else.
pub struct NbdDisk {
    shared: Arc<Shared>,
}

impl NbdDisk {
    /// Connects to a server, and agrees with it on a disk.
    ///
    /// # Errors
    ///
    /// When there is no server, or it does not offer such a disk, or one that cannot be served.
    pub fn open(address: &NbdAddress, options: &NbdOptions) -> io::Result<NbdDisk> {
        NbdDisk::open_at(address, options, None)
    }

    /// As [`NbdDisk::open`], of a server whose Unix socket must lie below one of these folders. That holds
    /// for every connection, also when the server was started again.
    ///
    /// # Errors
    ///
    /// As [`NbdDisk::open`], and when the socket is somewhere else.
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
        let place = Place::resolve(address, folders)?;
        let target = Target { place, name: address.name().to_owned(), tls };
        let (link, settled) = agree(&target, options.connect)?;
        NbdDisk::new(target, options, settled, Some(link))
    }

    fn new(
        target: Target,
        options: &NbdOptions,
        settled: Settled,
        first: Option<Link>,
    ) -> io::Result<NbdDisk> {
        let geometry = geometry(&settled, options)?;
        let shared = Shared {
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

/// Connects to a server, and agrees with it.
fn agree(target: &Target, within: Duration) -> io::Result<(Link, Settled)> {
    let until = Instant::now() + within;
    let mut link = Link::connect(target)?;
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

/// What a disk is like that a server offers so.
fn geometry(settled: &Settled, options: &NbdOptions) -> io::Result<Geometry> {
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
    if bytes % u64::from(sector_size) != 0 {
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
