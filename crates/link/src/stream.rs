//! Stream link: the network interface of a virtual machine, on a Unix stream socket.
//!
//! QEMU (`-netdev stream`), libkrun and libvirt connect to the socket. Frames have a length in front
//! ([`ringfence_wire::frame_stream`]). They carry no offloads: checksums are complete, and no frame is longer than the
//! MTU, which may be as large as a super-packet.
//!
//! ```text
//! socket -> FrameReader -> Batch          socket <- FrameRing <- engine
//! listening socket: the next client, after the last one has gone
//! ```
//!
//! One client is connected at a time. Others are accepted and closed at once. Without a client the link is down:
//! frames for the guest are dropped, as without a cable. Flows survive, so a client that connects again finds its
//! connections.
//!
//! # Guarantees
//!
//! * The client chooses no allocation. A length that no frame has ends its connection, because the start of the next
//!   frame is unknown. With a listening socket the next client is served.
//! * A client that does not read slows only its own guest: committed frames wait in the [`FrameRing`], then the engine
//!   gets no rooms until the socket has room.
//! * A frame that was sent in part is finished before the next one, or never: the next client begins with a whole one.

// #syscall uplink recvfrom,sendmsg: frames on a stream socket
// #syscall uplink epoll_ctl: waiting for room

use std::io::{self, IoSlice};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use arrayvec::ArrayVec;
use ringfence_frame::{Batch, DropReason, Fault, PortCapabilities, Received};
use ringfence_offload::vnet::MODERN_LEN;
use ringfence_platform::Counters;
use ringfence_uplink::emit::ETHERNET_LEN;
use ringfence_wire::frame_stream::{self, FRAME_MAX, FrameReader, PREFIX_LEN};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendFlags};

use super::clients::{ClientSlot, Clients};
use super::frame_ring::{FrameRing, FrameShape};
use super::ring_link::{FrameQueue, RingLink, RingTransport, has_room, push};

/// Maximum of frames in one system call.
const FRAMES_PER_SEND: usize = 16;
/// Maximum of reads in one round.
const READS_PER_ROUND: usize = 8;

/// Link on a stream socket of a virtual machine. See the [module](self).
pub type StreamLink = RingLink<StreamTransport>;

/// Stream socket of a virtual machine.
#[derive(Debug)]
pub struct StreamTransport {
    clients: ClientSlot,
    /// The socket had no room, and the epoll reports when it has.
    awaits_room: bool,
    reader: FrameReader,
    /// Bytes of the first waiting frame that were sent, its length included.
    sent: usize,
    capabilities: PortCapabilities,
}

enum Read {
    Some,
    Nothing,
    Gone,
}

/// Result of taking a frame from the reader.
enum ReadFrame {
    Frame,
    Dropped,
    /// No whole frame is there.
    Nothing,
}

impl StreamLink {
    /// Creates a link for frames of at most `mtu` bytes behind the Ethernet header. System calls are counted in
    /// `system`.
    ///
    /// # Errors
    ///
    /// Returns an error if memory or descriptors are exhausted, or `shape` is invalid.
    pub fn new(
        clients: Clients,
        mtu: u16,
        shape: FrameShape,
        system: Arc<Counters>,
    ) -> io::Result<StreamLink> {
        let transport = StreamTransport {
            clients: ClientSlot::new(clients)?,
            awaits_room: false,
            reader: FrameReader::new(),
            sent: 0,
            capabilities: PortCapabilities::plain(mtu),
        };
        RingLink::from_transport(transport, shape, Arc::default(), system)
    }

    /// Returns `true` while a client is connected.
    pub fn is_connected(&self) -> bool {
        self.transport.clients.client().is_some()
    }
}

impl StreamTransport {
    /// Forgets the client and its unfinished frames. The link ends if no other client can come.
    fn disconnect(&mut self, queue: &mut FrameQueue) -> Result<(), Fault> {
        self.forget(queue);
        self.clients.disconnect()
    }

    fn forget(&mut self, queue: &mut FrameQueue) {
        self.reader.clear();
        self.drop_waiting(queue);
        self.awaits_room = false;
    }

    /// Ends the connection of a client that breaks the rules.
    fn refuse(
        &mut self,
        queue: &mut FrameQueue,
        error: frame_stream::FrameTooLong,
    ) -> Result<(), Fault> {
        queue.counters.dropped(DropReason::BadRequest);
        self.forget(queue);
        self.clients.refuse(error)
    }

    /// Reads bytes of the client.
    fn read(&mut self, queue: &mut FrameQueue) -> Result<Read, Fault> {
        let Some(client) = self.clients.client() else { return Ok(Read::Nothing) };
        queue.system.syscalls.add(1);
        match rustix::net::recv(client, self.reader.spare(), RecvFlags::DONTWAIT) {
            Ok((_, 0)) => self.disconnect(queue).map(|()| Read::Gone),
            Ok((_, len)) => {
                self.reader.commit(len);
                Ok(Read::Some)
            }
            Err(Errno::AGAIN | Errno::INTR) => Ok(Read::Nothing),
            Err(_) => self.disconnect(queue).map(|()| Read::Gone),
        }
    }

    /// Moves the next whole frame to the batch, which has room for it.
    fn take_frame(
        &mut self,
        queue: &mut FrameQueue,
        batch: &mut Batch,
    ) -> Result<ReadFrame, Fault> {
        let frame_max = self.capabilities.frame_max();
        let frame = match self.reader.next() {
            Ok(None) => return Ok(ReadFrame::Nothing),
            Ok(Some(frame)) => frame,
            Err(error) => return self.refuse(queue, error).map(|()| ReadFrame::Nothing),
        };
        let reason = match frame.len() {
            0..ETHERNET_LEN => DropReason::Runt,
            len if len > frame_max => DropReason::Oversize,
            len => match push(batch, frame) {
                Some(()) => {
                    queue.received(batch, len);
                    return Ok(ReadFrame::Frame);
                }
                None => DropReason::Unreadable,
            },
        };
        queue.counters.dropped(reason);
        Ok(ReadFrame::Dropped)
    }

    /// Drops the frames that wait.
    fn drop_waiting(&mut self, queue: &mut FrameQueue) {
        queue.drop_waiting();
        self.sent = 0;
    }

    /// Accounts for bytes that were sent.
    fn finish(&mut self, queue: &mut FrameQueue, bytes: usize) {
        self.sent += bytes;
        while let Some(frame) = queue.frames.next_waiting() {
            let len = PREFIX_LEN + frame.frame_len();
            if self.sent < len {
                return;
            }
            self.sent -= len;
            queue.finish_sent();
        }
    }

    /// Sets whether the epoll reports room in the socket.
    fn await_room(&mut self, awaits: bool) -> Result<(), Fault> {
        let Some(client) = self.clients.client().filter(|_| self.awaits_room != awaits) else {
            return Ok(());
        };
        self.clients.watch_for_room(client.as_fd(), awaits)?;
        self.awaits_room = awaits;
        Ok(())
    }
}

/// Sends the next frames, without the first `skipped` bytes. Returns the number of bytes that were sent.
fn send(client: &OwnedFd, frames: &FrameRing, skipped: usize) -> Result<usize, Errno> {
    let mut prefixes = ArrayVec::<[u8; PREFIX_LEN], FRAMES_PER_SEND>::new();
    for frame in frames.all_waiting().take(FRAMES_PER_SEND) {
        // The rooms of the ring are no longer than the longest frame, rounded up.
        prefixes.push(frame_stream::prefix(frame.frame_len()).ok_or(Errno::MSGSIZE)?);
    }
    let mut pieces = ArrayVec::<IoSlice<'_>, { 2 * FRAMES_PER_SEND }>::new();
    for (prefix, frame) in prefixes.iter().zip(frames.all_waiting()) {
        pieces.push(IoSlice::new(prefix));
        pieces.push(IoSlice::new(frames.bytes(&frame).get(MODERN_LEN..).unwrap_or_default()));
    }
    let mut pieces = &mut pieces[..];
    IoSlice::advance_slices(&mut pieces, skipped);
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    rustix::net::sendmsg(client, pieces, &mut SendAncillaryBuffer::default(), flags)
}

impl RingTransport for StreamTransport {
    fn receive(
        &mut self,
        queue: &mut FrameQueue,
        batch: &mut Batch,
        budget: usize,
    ) -> Result<Received, Fault> {
        let mut received = Received::default();
        if self.clients.client().is_none() {
            received.work += usize::from(self.clients.accept(&queue.system)?);
        }
        let mut reads = 0;
        while received.work < budget
            && batch.scratch_left() >= FRAME_MAX
            && has_room(batch, self.capabilities.frame_max())
        {
            match self.take_frame(queue, batch)? {
                ReadFrame::Frame => received.frames += 1,
                ReadFrame::Dropped => {}
                ReadFrame::Nothing if reads == READS_PER_ROUND => break,
                ReadFrame::Nothing => {
                    reads += 1;
                    match self.read(queue)? {
                        Read::Some => continue,
                        Read::Nothing => break,
                        Read::Gone => {}
                    }
                }
            }
            received.work += 1;
        }
        Ok(received)
    }

    fn send_waiting(&mut self, queue: &mut FrameQueue) -> Result<(), Fault> {
        while queue.frames.waiting() > 0 {
            let Some(client) = self.clients.client() else {
                self.drop_waiting(queue);
                break;
            };
            queue.system.syscalls.add(1);
            match send(client, &queue.frames, self.sent) {
                Ok(bytes) => self.finish(queue, bytes),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN | Errno::NOBUFS | Errno::NOMEM) => return self.await_room(true),
                // The client has closed its end. `read` learns it as well, behind its last frames.
                Err(_) => {
                    self.drop_waiting(queue);
                    break;
                }
            }
        }
        self.await_room(false)
    }

    fn abandon(&mut self, queue: &mut FrameQueue) {
        queue.frames.withdraw();
        self.sent = 0;
    }

    /// Returns true if a whole frame waits in the reader: the socket does not report it again.
    fn arm(&mut self) -> Result<bool, Fault> {
        // A client that misbehaves is found by `receive`.
        Ok(self.reader.has_next().unwrap_or(true))
    }

    fn wait_fds(&self) -> Vec<BorrowedFd<'_>> {
        vec![self.clients.epoll()]
    }

    /// Refuses a client beyond the first one, which would keep the epoll readable.
    fn clear_events(&mut self, queue: &FrameQueue) -> Result<(), Fault> {
        if self.clients.client().is_some() {
            self.clients.accept(&queue.system)?;
        }
        Ok(())
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
