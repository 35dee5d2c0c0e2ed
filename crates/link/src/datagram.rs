//! Datagram link: the network interface of a virtual machine, on a Unix datagram socket, one frame each.
//!
//! vfkit and libkrun (`krun_add_net_unixgram`) send frames so. The socket has no connections to accept: the link's
//! socket is bound to a path, and the client's first datagram tells its own address. Another process, which sees the
//! file system, connects the link's socket to it. From then on the kernel accepts datagrams of that client alone.
//!
//! ```text
//! client: "VFKT" ──> socket ──> (another process connects it)
//! client: frame  ──> socket ──> Batch          client <── socket <── FrameRing <── engine
//! ```
//!
//! Until then the link reads nothing, and frames for the guest are dropped, as without a cable. A client may begin with
//! the four bytes of [`MAGIC`] or with a frame.
//!
//! # Guarantees
//!
//! * One client is served. The kernel reports that it is gone to the next frame, and the link then ends.
//! * A client that does not read slows only its own guest, as on a [`stream`](super::stream).
//! * A datagram is copied whole or dropped. The client chooses no allocation.

// #syscall uplink recvfrom,sendto: frames on a datagram socket
// #syscall uplink getpeername: finding out that the socket of a virtual machine is connected

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use ringfence_frame::{Batch, DropReason, Fault, PortCapabilities, Received};
use ringfence_offload::vnet::MODERN_LEN;
use ringfence_platform::Counters;
use ringfence_sys::descriptors::refuse_descriptors;
use ringfence_uplink::emit::ETHERNET_LEN;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};

use super::clients::{ClientSlot, Clients};
use super::frame_ring::FrameShape;
use super::ring_link::{FrameQueue, RingLink, RingTransport, has_room, push};

/// First datagram of vfkit, and of libkrun in its place.
pub const MAGIC: [u8; 4] = *b"VFKT";

/// Link on a datagram socket of a virtual machine. See the [module](self).
pub type DatagramLink = RingLink<DatagramTransport>;

/// Datagram socket of a virtual machine.
#[derive(Debug)]
pub struct DatagramTransport {
    socket: ClientSlot,
    /// Set once the socket is connected.
    is_connected: bool,
    /// The client's queue is full, and the epoll reports when it has room.
    awaits_room: bool,
    /// Room for a datagram.
    buffer: Box<[u8]>,
    capabilities: PortCapabilities,
}

enum ReadDatagram {
    Frame,
    /// Datagram that is no frame.
    Dropped,
    Nothing,
}

impl DatagramLink {
    /// Creates a link for frames of at most `mtu` bytes behind the Ethernet header. System calls are counted in
    /// `system`.
    ///
    /// # Errors
    ///
    /// Returns an error if memory or descriptors are exhausted, or `shape` is invalid.
    pub fn new(
        socket: OwnedFd,
        mtu: u16,
        shape: FrameShape,
        system: Arc<Counters>,
    ) -> io::Result<DatagramLink> {
        // Fails on kernels before 6.16, which discard the descriptors of a datagram that is read.
        let _ = refuse_descriptors(&socket);
        let capabilities = PortCapabilities::plain(mtu);
        let transport = DatagramTransport {
            socket: ClientSlot::new(Clients::Connected(socket))?,
            is_connected: false,
            awaits_room: false,
            buffer: vec![0; capabilities.frame_max()].into(),
            capabilities,
        };
        RingLink::from_transport(transport, shape, Arc::default(), system)
    }
}

impl DatagramTransport {
    /// Returns `true` if the socket has a peer.
    fn check_connection(&mut self, queue: &FrameQueue) -> bool {
        if !self.is_connected
            && let Some(socket) = self.socket.client()
        {
            queue.system.syscalls.add(1);
            self.is_connected = rustix::net::getpeername(socket).is_ok();
        }
        self.is_connected
    }

    /// Moves the next datagram to the batch, which has room for the longest frame.
    fn take_frame(
        &mut self,
        queue: &mut FrameQueue,
        batch: &mut Batch,
    ) -> Result<ReadDatagram, Fault> {
        let Some(socket) = self.socket.client() else { return Err(Fault::Gone) };
        let frame_max = self.capabilities.frame_max();
        queue.system.syscalls.add(1);
        // The returned length is that of the datagram, which may be longer than the buffer.
        let flags = RecvFlags::DONTWAIT | RecvFlags::TRUNC;
        let len = match rustix::net::recv(socket, &mut self.buffer[..], flags) {
            Ok((_, len)) => len,
            Err(Errno::AGAIN | Errno::INTR) => return Ok(ReadDatagram::Nothing),
            // An error of an earlier frame to the client.
            Err(_) => return Err(Fault::Gone),
        };
        let reason = match self.buffer.get(..len) {
            Some(frame) if *frame == MAGIC => return Ok(ReadDatagram::Dropped),
            Some(frame) if frame.len() < ETHERNET_LEN => DropReason::Runt,
            Some(frame) if frame.len() <= frame_max => match push(batch, frame) {
                Some(()) => {
                    queue.received(batch, len);
                    return Ok(ReadDatagram::Frame);
                }
                None => DropReason::Unreadable,
            },
            _ => DropReason::Oversize,
        };
        queue.counters.dropped(reason);
        Ok(ReadDatagram::Dropped)
    }

    /// Sets whether the epoll reports room in the client's queue.
    fn await_room(&mut self, awaits: bool) -> Result<(), Fault> {
        let Some(socket) = self.socket.client().filter(|_| self.awaits_room != awaits) else {
            return Ok(());
        };
        self.socket.watch_for_room(socket.as_fd(), awaits)?;
        self.awaits_room = awaits;
        Ok(())
    }
}

impl RingTransport for DatagramTransport {
    fn receive(
        &mut self,
        queue: &mut FrameQueue,
        batch: &mut Batch,
        budget: usize,
    ) -> Result<Received, Fault> {
        let mut received = Received::default();
        // The first datagram stays for the process that connects the socket.
        if !self.check_connection(queue) {
            return Ok(received);
        }
        while received.work < budget && has_room(batch, self.capabilities.frame_max()) {
            match self.take_frame(queue, batch)? {
                ReadDatagram::Frame => received.frames += 1,
                ReadDatagram::Dropped => {}
                ReadDatagram::Nothing => break,
            }
            received.work += 1;
        }
        Ok(received)
    }

    fn send_waiting(&mut self, queue: &mut FrameQueue) -> Result<(), Fault> {
        if queue.frames.waiting() > 0 && !self.check_connection(queue) {
            queue.drop_waiting();
        }
        while let (Some(frame), Some(socket)) = (queue.frames.next_waiting(), self.socket.client())
        {
            let bytes = queue.frames.bytes(&frame).get(MODERN_LEN..).unwrap_or_default();
            queue.system.syscalls.add(1);
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            match rustix::net::send(socket, bytes, flags) {
                Ok(_) => queue.finish_sent(),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN | Errno::NOBUFS | Errno::NOMEM) => return self.await_room(true),
                // The frame is longer than the client's queue.
                Err(Errno::MSGSIZE) => queue.finish_dropped(DropReason::TooLong),
                Err(_) => return Err(Fault::Gone),
            }
        }
        self.await_room(false)
    }

    fn abandon(&mut self, queue: &mut FrameQueue) {
        queue.drop_waiting();
    }

    fn arm(&mut self) -> Result<bool, Fault> {
        Ok(false)
    }

    fn wait_fds(&self) -> Vec<BorrowedFd<'_>> {
        vec![self.socket.epoll()]
    }

    fn capabilities(&self) -> PortCapabilities {
        self.capabilities
    }

    fn is_full(&self) -> bool {
        self.awaits_room
    }
}

#[cfg(test)]
mod tests;
