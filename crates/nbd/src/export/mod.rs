//! A disk for ordinary programs: an NBD server on a Unix socket.
//!
//! One thread serves all clients of a disk, through one queue of it. So every request is in sight
//! of one loop, which starts what came in together, and answers what was done together; and a flush
//! that any client asks for covers what was done for all (`CAN_MULTI_CONN`).
//!
//! Clients are not trusted. What they may have in flight is bounded in number and in bytes, for each
//! and for all; a client that does not take its answers is not read from; one that does not finish
//! the handshake in time, or breaks the protocol, is cut off. None of it holds up the others.

// #syscall frontend eventfd2,write: the export is told to end
// #syscall frontend ioctl 1=0x5421: FIONBIO: O_NONBLOCK, as the standard library sets it

mod buffers;
mod connection;
mod server;

use std::io;
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use ringfence_sys::mailbox::WakeFd;

use crate::protocol as nbd;
use crate::protocol::numbers::transmission;
use crate::protocol::{Offer, PAYLOAD_MAX};
use ringfence_block::storage::{Disk, Geometry};
use server::Server;

/// How a disk is served.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ExportOptions {
    /// The name by which clients may ask for it. No name stands for it too.
    pub name: String,
    /// What it is, for people.
    pub description: String,
    /// Clients at the same time.
    pub clients_max: usize,
    /// Requests at the disk at the same time.
    pub depth: u32,
    /// How long a client may take to say what it wants.
    pub handshake: Duration,
}

impl Default for ExportOptions {
    fn default() -> Self {
        ExportOptions {
            name: String::new(),
            description: String::new(),
            clients_max: 32,
            depth: 256,
            handshake: Duration::from_secs(10),
        }
    }
}

/// What is offered of a disk.
fn offer(geometry: &Geometry) -> Offer {
    let Geometry { bytes, sector_size, physical_sector_size, .. } = *geometry;
    // Zeros are written where they cannot be asked for; and with one queue for all, any flush is
    // everybody's.
    let mut flags = transmission::HAS_FLAGS
        | transmission::SEND_FLUSH
        | transmission::SEND_FUA
        | transmission::SEND_WRITE_ZEROES
        | transmission::SEND_DF
        | transmission::CAN_MULTI_CONN;
    if geometry.read_only {
        flags |= transmission::READ_ONLY;
    }
    if geometry.rotational {
        flags |= transmission::ROTATIONAL;
    }
    if geometry.discard.is_some() {
        flags |= transmission::SEND_TRIM;
    }
    let block_preferred = physical_sector_size.max(4096).next_power_of_two().min(1 << 20);
    Offer { bytes, flags, block_min: sector_size, block_preferred, payload_max: PAYLOAD_MAX }
}

/// A disk that is being served. Dropping it ends every connection.
pub struct Export {
    stop: WakeFd,
    thread: Option<JoinHandle<()>>,
}

impl Export {
    /// Serves `disk` to whoever connects to `listener`, from a thread of its own.
    ///
    /// # Errors
    ///
    /// When the system has no room for it.
    pub fn start(
        listener: UnixListener,
        disk: &Arc<dyn Disk>,
        options: ExportOptions,
    ) -> io::Result<Export> {
        let stop = WakeFd::new()?;
        listener.set_nonblocking(true)?;
        let queue = disk.queue(options.depth)?;
        let geometry = disk.geometry();
        let offer = offer(&geometry);
        let ExportOptions { name, description, .. } = options.clone();
        let export = nbd::offer::Export { name, description, offer };
        let mut server = Server::new(listener.into(), &stop, queue, geometry, export, options)?;
        let thread =
            std::thread::Builder::new().name("nbd export".to_owned()).spawn(move || {
                if let Err(error) = server.run() {
                    tracing::error!("the disk is not served any more: {error}");
                }
            })?;
        Ok(Export { stop, thread: Some(thread) })
    }
}

impl Drop for Export {
    fn drop(&mut self) {
        self.stop.wake();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests;
