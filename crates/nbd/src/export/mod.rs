//! NBD server on a Unix socket: exports a disk to local programs.
//!
//! ```text
//! clients ── Connection (parse, limits) ──> Server loop ──> one DiskQueue ──> disk
//! ```
//!
//! One thread serves all clients of a disk through one disk queue. The loop starts requests that arrived
//! together, and answers requests that completed together. A flush of any client therefore covers the
//! completed writes of all clients (`CAN_MULTI_CONN`).
//!
//! Clients may read and write any bytes (`unaligned.rs`). The export announces a minimum block size of 1, or 4096
//! for a disk with such sectors, and 4096 or more as the preferred one. It serves clients that ignore both.
//!
//! Clients are not trusted. The number and size of requests in flight are bounded per client and in total. A
//! client that does not read its replies is not read from. A client that exceeds the handshake timeout or
//! violates the protocol is disconnected. None of that delays other clients.

// #syscall frontend,daemon eventfd2,write: the export is told to end
// #syscall frontend,daemon ioctl 1=0x5421: FIONBIO: O_NONBLOCK, as the standard library sets it

mod buffers;
mod connection;
mod server;
mod status;
mod unaligned;

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

/// Name under which an NBD server offers a disk, and its limits.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ExportOptions {
    /// Name of the export; the empty name selects it as well.
    pub name: String,
    pub description: String,
    /// Maximum number of clients at the same time. Others learn it in the handshake and are refused.
    pub clients_max: usize,
    /// Maximum number of requests in flight at the disk.
    pub depth: u32,
    /// Maximum duration of a client's handshake.
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

/// Returns the properties of the export of a disk.
fn offer(geometry: &Geometry) -> Offer {
    let Geometry { bytes, sector_size, physical_sector_size, .. } = *geometry;
    // The server writes zeros itself if the disk cannot. With one disk queue, any flush covers the writes
    // of all clients.
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
    // libnbd refuses requests that are no multiples of the minimum before it sends them. Sectors of 512 bytes
    // are what programs without any idea of sectors work on; others were chosen on purpose.
    let block_min = if sector_size <= 512 { 1 } else { sector_size };
    Offer { bytes, flags, block_min, block_preferred, payload_max: PAYLOAD_MAX }
}

/// Running export of a disk. Dropping it closes all connections.
pub struct Export {
    stop: WakeFd,
    thread: Option<JoinHandle<()>>,
}

impl Export {
    /// Serves `disk` to the clients of `listener`, on a thread of its own.
    ///
    /// # Errors
    ///
    /// Returns the system's error if there is no memory, descriptor or thread.
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
        let of_disk = (Arc::clone(disk), queue);
        let mut server = Server::new(listener.into(), &stop, of_disk, geometry, export, options)?;
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
