//! TAP port: a Linux TAP interface as a [`Port`].
//!
//! # Theory of operation
//!
//! Each `read` of the TAP file returns one frame, and each `write` sends one. A virtio-net header of 12
//! bytes, little-endian, precedes the frame ([`ringfence_sys::tap`] configures this). The port validates
//! the offload metadata of every frame that it reads: programs in a namespace can inject frames through
//! packet sockets, and its kernel passes them on.
//!
//! A read goes directly into the batch's scratch memory, header first. The buffer is one byte longer than
//! the largest frame: the kernel truncates a longer frame silently, so a read that fills the buffer was
//! too long.
//!
//! A write gathers the frame from its memory, lent memory included. The kernel returns `EIO` while the
//! interface is down; the frame is dropped. It returns `EBADFD` after the interface was removed; the port
//! ends.

// #syscall frontend,card,uplink,daemon read,write: frames from and to a TAP

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use ringfence_memory::WriteList;
use ringfence_offload::vnet::{MODERN_LEN, VnetHeader};
use ringfence_offload::{Layers, OffloadMeta};
use ringfence_sys::counters::Counters;
use ringfence_sys::numbers::bounded;
use ringfence_sys::tap::{TapOffloads, VNET_HEADER_LEN};
use rustix::io::Errno;

use crate::batch::{Batch, FrameView, HEADER_MAX};
use crate::commands::{PortCommand, PortReply};
use crate::counters::{DropReason, PortCounters};
use crate::port::{
    ChecksumOffload, Fault, GsoOffload, Port, PortCapabilities, Received, Transmitted,
};

const _: () = assert!(VNET_HEADER_LEN == MODERN_LEN);

/// Length in bytes of the longest super-packet: the longest IP packet behind its link header.
const SUPER_PACKET_MAX: usize = 65_535 + crate::port::LINK_HEADER_MAX;

const CANNOT_WRITE: &str = "cannot write to the TAP interface";

/// TAP interface as a port.
#[derive(Debug)]
pub struct TapPort {
    file: OwnedFd,
    capabilities: PortCapabilities,
    /// Maximum length of a received frame in bytes.
    frame_max: usize,
    /// The last read found no frame.
    is_drained: bool,
    counters: Arc<PortCounters>,
    system: Arc<Counters>,
}

/// Result of one read or write.
enum TapOutcome {
    Done,
    Nothing,
    Dropped(DropReason),
}

impl TapPort {
    /// Makes a port of the interface behind `file`. The file must be non-blocking and use virtio-net headers
    /// of 12 bytes. `offloads` are the offloads that the kernel granted; they hold in both directions.
    /// `system` counts the system calls.
    pub fn new(file: OwnedFd, offloads: TapOffloads, mtu: u16, system: Arc<Counters>) -> TapPort {
        let capabilities = capabilities(offloads, mtu);
        let frame_max = frame_max(&capabilities);
        TapPort {
            file,
            capabilities,
            frame_max,
            is_drained: false,
            counters: Arc::default(),
            system,
        }
    }

    /// Reads one frame into the tail of the batch.
    fn receive_one(&mut self, batch: &mut Batch) -> Result<TapOutcome, Fault> {
        let room = VNET_HEADER_LEN + self.frame_max + 1;
        let Some(tail) = batch.scratch_tail_mut().get_mut(..room) else {
            return Ok(TapOutcome::Nothing);
        };
        self.system.syscalls.add(1);
        let n = match rustix::io::read(&self.file, &mut *tail) {
            Ok(n) => n,
            Err(errno) => {
                self.is_drained = errno == Errno::AGAIN;
                return self.read_failed(errno);
            }
        };
        let Some((header, frame)) = tail[..n].split_first_chunk_mut::<MODERN_LEN>() else {
            return Ok(TapOutcome::Dropped(DropReason::Runt));
        };
        if n == room {
            return Ok(TapOutcome::Dropped(DropReason::Oversize));
        }
        let len = frame.len();
        let headers = &mut frame[..len.min(HEADER_MAX)];
        let Some(meta) = accept(VnetHeader::from_modern(header), headers, len) else {
            return Ok(TapOutcome::Dropped(DropReason::BadOffload));
        };
        let pushed = batch
            .reserve(n)
            .and_then(|offset| batch.push_contiguous(offset + MODERN_LEN, len, meta).ok());
        if pushed.is_none() {
            return Ok(TapOutcome::Dropped(DropReason::Unreadable));
        }
        self.counters.received(1, len as u64);
        Ok(TapOutcome::Done)
    }

    fn read_failed(&self, errno: Errno) -> Result<TapOutcome, Fault> {
        match errno {
            Errno::AGAIN | Errno::INTR | Errno::IO => Ok(TapOutcome::Nothing),
            // The kernel has lost this frame; the next read can succeed.
            Errno::NOBUFS | Errno::NOMEM => Ok(TapOutcome::Dropped(DropReason::Unreadable)),
            // A read returns EFAULT while the interface is being removed: the buffer itself is valid.
            Errno::BADFD | Errno::NODEV | Errno::FAULT => Err(Fault::Gone),
            errno => Err(Fault::system("cannot read from the TAP interface", errno)),
        }
    }

    /// Writes one frame to the file.
    fn transmit_one(&mut self, frame: &FrameView<'_>) -> Result<TapOutcome, Fault> {
        // A receiver that segments needs the length of the headers. For the others it is a hint.
        let header_len = if frame.meta().gso.is_some() { header_len(frame) } else { 0 };
        let Ok(header) = VnetHeader::for_frame(frame.meta(), header_len) else {
            return Ok(TapOutcome::Dropped(DropReason::GsoUnsupported));
        };
        let header = header.to_modern();
        let mut list = WriteList::new();
        if list.push(&header).and_then(|()| frame.gather(&mut list)).is_err() {
            return Ok(TapOutcome::Dropped(DropReason::Unwritable));
        }
        self.system.syscalls.add(1);
        match list.write(&self.file) {
            Ok(_) => Ok(TapOutcome::Done),
            Err(error) => match Errno::from_io_error(&error) {
                Some(errno) => Ok(TapOutcome::Dropped(why_not_written(errno)?)),
                None => Err(Fault::system(CANNOT_WRITE, error)),
            },
        }
    }
}

/// Returns the egress capabilities of an interface with these offloads.
pub fn capabilities(offloads: TapOffloads, mtu: u16) -> PortCapabilities {
    let gso = GsoOffload {
        tcp_v4: offloads.contains(TapOffloads::TSO4),
        tcp_v6: offloads.contains(TapOffloads::TSO6),
        ecn: offloads.contains(TapOffloads::TSO_ECN),
        udp: offloads.contains(TapOffloads::USO4.union(TapOffloads::USO6)),
    };
    // The kernel accepts every consistent virtio-net header, with or without the offloads.
    PortCapabilities { checksum: ChecksumOffload::Any, gso, scatter_gather: true, mtu }
}

/// Returns the maximum length in bytes of a frame from an interface with these capabilities.
pub fn frame_max(capabilities: &PortCapabilities) -> usize {
    let gso = capabilities.gso;
    let whole = gso.tcp_v4 || gso.tcp_v6 || gso.udp;
    if whole { SUPER_PACKET_MAX } else { capabilities.frame_max() }
}

/// Validates the metadata of a received frame of `frame_len` bytes; `None` if it breaks a rule. `headers`
/// are the frame's first private bytes, up to [`HEADER_MAX`].
pub fn accept(header: VnetHeader, headers: &mut [u8], frame_len: usize) -> Option<OffloadMeta> {
    let offered = header.offered().ok()?;
    if offered.is_finished() {
        return Some(offered);
    }
    let frame_len = u32::try_from(frame_len).ok()?;
    let layers = Layers::parse(headers, frame_len);
    header.accept(headers, &layers).ok()
}

#[inline]
fn header_len(frame: &FrameView<'_>) -> u16 {
    let frame_len = bounded(frame.len(), u32::MAX);
    Layers::parse(frame.header(), frame_len).map_or(0, |layers| layers.header_len())
}

/// Returns the drop reason for an error of a write to a TAP file.
///
/// # Errors
///
/// Returns a [`Fault`] if later writes will fail too.
pub fn why_not_written(errno: Errno) -> Result<DropReason, Fault> {
    match errno {
        Errno::AGAIN | Errno::NOBUFS | Errno::NOMEM | Errno::INTR => Ok(DropReason::PortFull),
        Errno::IO | Errno::NETDOWN => Ok(DropReason::LinkDown),
        Errno::INVAL | Errno::MSGSIZE => Ok(DropReason::Refused),
        // Lent memory whose pages cannot be faulted in.
        Errno::FAULT => Ok(DropReason::Unwritable),
        Errno::BADFD | Errno::NODEV => Err(Fault::Gone),
        errno => Err(Fault::system(CANNOT_WRITE, errno)),
    }
}

impl Port for TapPort {
    fn receive(&mut self, batch: &mut Batch, budget: usize) -> Result<Received, Fault> {
        let mut received = Received::default();
        self.is_drained = false;
        // The length of a frame is unknown before it is read.
        while received.work < budget
            && batch.frames_left() > 0
            && batch.has_room_for(self.frame_max)
        {
            match self.receive_one(batch)? {
                TapOutcome::Nothing => break,
                TapOutcome::Done => received.frames += 1,
                TapOutcome::Dropped(reason) => self.counters.dropped(reason),
            }
            received.work += 1;
        }
        Ok(received)
    }

    fn is_drained(&self) -> bool {
        self.is_drained
    }

    fn complete(&mut self) -> Result<(), Fault> {
        Ok(())
    }

    fn transmit(&mut self, batch: &Batch, frames: &[u32]) -> Result<Transmitted, Fault> {
        let mut done = Transmitted::default();
        for frame in batch.select(frames) {
            match self.transmit_one(&frame)? {
                TapOutcome::Done | TapOutcome::Nothing => {
                    done.sent += 1;
                    self.counters.sent(1, frame.len() as u64);
                    self.counters.sent_with(frame.meta(), 1);
                }
                TapOutcome::Dropped(reason) => {
                    done.dropped += 1;
                    self.counters.dropped(reason);
                }
            }
        }
        Ok(done)
    }

    /// Returns false: waiting frames keep the file readable, so there is nothing to request.
    fn arm(&mut self) -> Result<bool, Fault> {
        Ok(false)
    }

    fn wait_fds(&self) -> Vec<BorrowedFd<'_>> {
        vec![self.file.as_fd()]
    }

    fn execute(&mut self, _queue: u16, command: PortCommand) -> PortReply {
        let PortCommand::SetMtu(mtu) = command else { return PortReply::Unsupported };
        self.capabilities.mtu = mtu;
        self.frame_max = frame_max(&self.capabilities);
        PortReply::MtuSet
    }

    fn capabilities(&self) -> PortCapabilities {
        self.capabilities
    }

    fn counters(&self) -> &Arc<PortCounters> {
        &self.counters
    }
}
