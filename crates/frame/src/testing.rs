//! In-memory port for tests, with a peer that the test controls.
//!
//! [`MemoryPort::pair`] makes both ends. The test sends frames with [`MemoryPeer::send`] and takes sent
//! frames with [`MemoryPeer::take`]. It can inject faults: an event without work, a protocol violation, or
//! a peer that goes away.

// #syscall none: for tests

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

use ringfence_memory::LentSlice;
use ringfence_offload::OffloadMeta;
use rustix::event::EventfdFlags;

use crate::batch::{Batch, FrameView};
use crate::commands::{PortCommand, PortReply};
use crate::counters::{DropReason, PortCounters};
use crate::port::{Fault, Port, PortCapabilities, Received, Transmitted};

/// Number of header bytes of a frame whose payload a [`MemoryPort`] lends.
const LENT_HEADER: usize = 80;

/// Protocol violation that the test injects.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the test says so")]
pub struct BrokenRule;

#[derive(Debug, Default)]
struct Shared {
    to_port: VecDeque<(Vec<u8>, OffloadMeta)>,
    from_port: VecDeque<(Vec<u8>, OffloadMeta)>,
    completed: u64,
    flushed: u64,
    receives: u64,
    wants_room: bool,
    misbehave: bool,
    /// MTU that the next `receive` sets.
    mtu: Option<u16>,
    gone: bool,
}

impl Shared {
    fn take(&mut self, link: &Link) -> Option<(Vec<u8>, OffloadMeta)> {
        let taken = self.from_port.pop_front();
        if taken.is_some() && self.wants_room {
            link.announce();
        }
        taken
    }
}

#[derive(Debug)]
struct Link {
    shared: Mutex<Shared>,
    changed: Condvar,
    event: OwnedFd,
}

impl Link {
    fn lock(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    fn announce(&self) {
        // Writes of 1 cannot overflow the counter of an eventfd.
        let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
    }
}

/// Port end of the pair.
#[derive(Debug)]
pub struct MemoryPort {
    link: Arc<Link>,
    capacity: usize,
    lends: bool,
    holds_up: bool,
    level: bool,
    is_drained: bool,
    /// Length in bytes to find room for before a frame is taken; `None` for that of the frame.
    asks_for: Option<usize>,
    capabilities: PortCapabilities,
    counters: Arc<PortCounters>,
    outstanding: u64,
}

/// Test end of the pair. Dropping it ends the port with [`Fault::Gone`].
#[derive(Debug)]
pub struct MemoryPeer {
    link: Arc<Link>,
    counters: Arc<PortCounters>,
}

impl MemoryPort {
    /// Makes both ends of a port that stores `capacity` frames for its peer.
    ///
    /// # Errors
    ///
    /// Returns the system's error if it cannot make an eventfd.
    pub fn pair(
        capacity: usize,
        capabilities: PortCapabilities,
    ) -> std::io::Result<(MemoryPort, MemoryPeer)> {
        let event = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let link = Arc::new(Link { shared: Mutex::default(), changed: Condvar::new(), event });
        let counters = Arc::new(PortCounters::default());
        let peer = MemoryPeer { link: Arc::clone(&link), counters: Arc::clone(&counters) };
        let port = MemoryPort {
            link,
            capacity,
            lends: false,
            holds_up: false,
            level: false,
            is_drained: false,
            asks_for: None,
            capabilities,
            counters,
            outstanding: 0,
        };
        Ok((port, peer))
    }

    /// Makes the port report its free room, so that senders see backpressure.
    #[must_use]
    pub fn with_backpressure(mut self) -> MemoryPort {
        self.holds_up = true;
        self
    }

    /// Makes the port leave the bytes after the first 80 of each frame in lent memory.
    #[must_use]
    pub fn lending(mut self) -> MemoryPort {
        self.lends = true;
        self
    }

    /// Makes the event stay set as long as frames wait, and the port report that none do, as a TAP interface does.
    #[must_use]
    pub fn level_triggered(mut self) -> MemoryPort {
        self.level = true;
        self
    }

    /// Makes the port find room for `longest` bytes before it takes a frame, as a TAP interface does, which does not
    /// know the length of a frame before it is read.
    #[must_use]
    pub fn of_unknown_lengths(mut self, longest: usize) -> MemoryPort {
        self.asks_for = Some(longest);
        self
    }

    fn append(&self, batch: &mut Batch, bytes: &[u8], meta: OffloadMeta) -> bool {
        let private = if self.lends { bytes.len().min(LENT_HEADER) } else { bytes.len() };
        let Some(offset) = batch.reserve(private) else { return false };
        let Ok(scratch) = batch.scratch_mut(offset..offset + private) else { return false };
        scratch.copy_from_slice(&bytes[..private]);
        if private == bytes.len() {
            return batch.push_contiguous(offset, private, meta).is_ok();
        }
        let lent = LentSlice::anonymous(bytes.len());
        let Ok(mut frame) = batch.frame(offset, private) else { return false };
        let copied = lent.copy_from(0, bytes).is_ok();
        let lent = frame.lent(lent, private, bytes.len() - private).is_ok();
        frame.finish(meta);
        copied && lent
    }
}

impl Port for MemoryPort {
    fn receive(&mut self, batch: &mut Batch, budget: usize) -> Result<Received, Fault> {
        let link = Arc::clone(&self.link);
        let mut shared = link.lock();
        shared.receives += 1;
        if shared.misbehave {
            return Err(Fault::misbehaved(BrokenRule));
        }
        let changed = shared.mtu.take().map(|mtu| self.capabilities.mtu = mtu).is_some();
        let mut frames = 0;
        while frames < budget && batch.frames_left() > 0 {
            let Some((bytes, _)) = shared.to_port.front() else { break };
            let asked = self.asks_for.unwrap_or(bytes.len());
            if bytes.len() > batch.scratch_left() || !batch.has_room_for(asked) {
                break;
            }
            let Some((bytes, meta)) = shared.to_port.pop_front() else { break };
            if self.append(batch, &bytes, meta) {
                frames += 1;
                self.counters.received(1, bytes.len() as u64);
            } else {
                self.counters.dropped(DropReason::Unreadable);
            }
        }
        if frames == 0 && shared.gone {
            return Err(Fault::Gone);
        }
        self.is_drained = self.level && shared.to_port.is_empty();
        self.outstanding += frames as u64;
        Ok(Received { frames, work: frames + usize::from(changed) })
    }

    fn is_drained(&self) -> bool {
        self.is_drained
    }

    fn complete(&mut self) -> Result<(), Fault> {
        self.link.lock().completed += core::mem::take(&mut self.outstanding);
        self.link.changed.notify_all();
        Ok(())
    }

    fn transmit(&mut self, batch: &Batch, frames: &[u32]) -> Result<Transmitted, Fault> {
        let mut shared = self.link.lock();
        let mut done = Transmitted::default();
        for frame in batch.select(frames) {
            if shared.from_port.len() < self.capacity {
                shared.from_port.push_back((copy_of(&frame), frame.meta()));
                self.counters.sent(1, frame.len() as u64);
                done.sent += 1;
            } else {
                self.counters.dropped(DropReason::PortFull);
                done.dropped += 1;
            }
        }
        Ok(done)
    }

    fn flush(&mut self) -> Result<(), Fault> {
        self.link.lock().flushed += 1;
        self.link.changed.notify_all();
        Ok(())
    }

    fn room(&mut self) -> Result<usize, Fault> {
        if !self.holds_up {
            return Ok(usize::MAX);
        }
        let mut shared = self.link.lock();
        let room = self.capacity.saturating_sub(shared.from_port.len());
        shared.wants_room = room == 0;
        Ok(room)
    }

    fn slots(&mut self) -> Result<usize, Fault> {
        if !self.holds_up {
            return Ok(usize::MAX);
        }
        Ok(self.capacity.saturating_sub(self.link.lock().from_port.len()))
    }

    fn await_slots(&mut self, _: usize) {
        self.link.lock().wants_room = true;
    }

    fn arm(&mut self) -> Result<bool, Fault> {
        let shared = self.link.lock();
        let room = shared.wants_room && shared.from_port.len() < self.capacity;
        Ok(room || !shared.to_port.is_empty() || shared.mtu.is_some())
    }

    fn wait_fds(&self) -> Vec<BorrowedFd<'_>> {
        vec![self.link.event.as_fd()]
    }

    fn clear_events(&mut self) -> Result<(), Fault> {
        if !self.level || self.link.lock().to_port.is_empty() {
            let _ = rustix::io::read(&self.link.event, &mut [0; 8]);
        }
        Ok(())
    }

    fn execute(&mut self, _queue: u16, command: PortCommand) -> PortReply {
        let PortCommand::SetMtu(mtu) = command else { return PortReply::Unsupported };
        self.capabilities.mtu = mtu;
        PortReply::MtuSet
    }

    fn capabilities(&self) -> PortCapabilities {
        self.capabilities
    }

    fn counters(&self) -> &Arc<PortCounters> {
        &self.counters
    }
}

/// Returns a copy of the frame's bytes.
pub fn copy_of(frame: &FrameView<'_>) -> Vec<u8> {
    let mut bytes = vec![0; frame.len()];
    frame.copy_to(&mut bytes);
    bytes
}

impl MemoryPeer {
    /// Sends a frame to the worker.
    pub fn send(&self, bytes: &[u8], meta: OffloadMeta) {
        self.link.lock().to_port.push_back((bytes.to_vec(), meta));
        self.link.announce();
    }

    /// Returns the next frame that the worker sent, if there is one.
    pub fn take(&self) -> Option<(Vec<u8>, OffloadMeta)> {
        self.link.lock().take(&self.link)
    }

    /// Waits up to `limit` for the next frame that the worker sends.
    pub fn take_within(&self, limit: Duration) -> Option<(Vec<u8>, OffloadMeta)> {
        let shared = self.link.lock();
        let empty = |shared: &mut Shared| shared.from_port.is_empty();
        let waited = self.link.changed.wait_timeout_while(shared, limit, empty);
        let (mut shared, _) = waited.unwrap_or_else(std::sync::PoisonError::into_inner);
        shared.take(&self.link)
    }

    /// Raises the port's event, with or without work.
    pub fn announce(&self) {
        self.link.announce();
    }

    /// Makes the next `receive` change the port's MTU, as a driver that starts does.
    pub fn set_mtu(&self, mtu: u16) {
        self.link.lock().mtu = Some(mtu);
        self.link.announce();
    }

    /// Makes the next `receive` fail with [`Fault::Misbehaved`].
    pub fn misbehave(&self) {
        self.link.lock().misbehave = true;
        self.link.announce();
    }

    /// Returns the number of frames whose delivery was completed.
    pub fn completed(&self) -> u64 {
        self.link.lock().completed
    }

    /// Returns the number of rounds that flushed this port.
    pub fn flushed(&self) -> u64 {
        self.link.lock().flushed
    }

    /// Returns the number of calls of [`Port::receive`].
    pub fn receives(&self) -> u64 {
        self.link.lock().receives
    }

    /// Returns the port's counters.
    pub fn counters(&self) -> &Arc<PortCounters> {
        &self.counters
    }
}

impl Drop for MemoryPeer {
    fn drop(&mut self) {
        self.link.lock().gone = true;
        self.link.announce();
    }
}

/// Returns bytes in the form of a frame: an Ethernet header and a payload that depends on `seed`.
#[allow(clippy::unwrap_used, reason = "the panic of a test is its report")]
pub fn frame(seed: u32, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(2_654_435_761).max(1);
    let noise = (0..len.max(14)).map(|_| {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        state.to_le_bytes()[1]
    });
    let mut bytes: Vec<u8> = noise.collect();
    bytes[..14].copy_from_slice(&[2, 0, 0, 0, 0, 9, 2, 0, 0, 0, 0, 1, 0x88, 0xB5]);
    bytes
}

/// Returns an Ethernet, IPv4 and UDP frame with `payload` bytes behind its headers of 42 bytes. Its blank
/// checksum field holds an arbitrary number.
#[allow(clippy::unwrap_used, reason = "the panic of a test is its report")]
pub fn udp_frame(payload: usize) -> Vec<u8> {
    let mut bytes = frame(77, 42 + payload);
    let udp_len = u16::try_from(8 + payload).unwrap().to_be_bytes();
    bytes[12..14].copy_from_slice(&[8, 0]);
    bytes[14..34].copy_from_slice(&ipv4_header(17, 8 + payload));
    bytes[34..42].copy_from_slice(&[0x30, 0x39, 0, 9, udp_len[0], udp_len[1], 0, 0]);
    bytes
}

/// Returns an IPv4 header from 10.0.0.1 to 10.0.0.2 for `payload` bytes of this protocol.
#[allow(clippy::unwrap_used, reason = "the panic of a test is its report")]
fn ipv4_header(protocol: u8, payload: usize) -> [u8; 20] {
    let len = u16::try_from(20 + payload).unwrap().to_be_bytes();
    let mut ip =
        [0x45, 0, len[0], len[1], 0, 1, 0, 0, 64, protocol, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2];
    let sum: u32 = ip.chunks(2).map(|pair| u32::from(pair[0]) * 256 + u32::from(pair[1])).sum();
    let sum = (sum & 0xFFFF) + (sum >> 16);
    let sum = !u16::try_from((sum & 0xFFFF) + (sum >> 16)).unwrap();
    ip[10..12].copy_from_slice(&sum.to_be_bytes());
    ip
}

/// Returns an Ethernet, IP and TCP frame with `payload` bytes behind its headers: 54 bytes over IPv4, 74
/// over IPv6. Its checksum field holds the sum of the pseudo-header, as in a super-packet.
#[allow(clippy::unwrap_used, reason = "the panic of a test is its report")]
pub fn tcp_frame(v6: bool, payload: usize) -> Vec<u8> {
    let ip = if v6 { 40 } else { 20 };
    let tcp = 14 + ip;
    let mut bytes = frame(78, tcp + 20 + payload);
    if v6 {
        let len = u16::try_from(20 + payload).unwrap().to_be_bytes();
        bytes[12..14].copy_from_slice(&[0x86, 0xDD]);
        bytes[14..22].copy_from_slice(&[0x60, 0, 0, 0, len[0], len[1], 6, 64]);
        bytes[22..54].fill(0);
        (bytes[22], bytes[37]) = (0xFD, 1);
        (bytes[38], bytes[53]) = (0xFD, 2);
    } else {
        bytes[12..14].copy_from_slice(&[8, 0]);
        bytes[14..34].copy_from_slice(&ipv4_header(6, 20 + payload));
    }
    bytes[tcp..tcp + 4].copy_from_slice(&[0x30, 0x39, 0, 80]);
    bytes[tcp + 12..tcp + 14].copy_from_slice(&[0x50, 0x18]);
    let total = u32::try_from(bytes.len()).unwrap();
    let headers = &mut bytes[..tcp + 20];
    let layers = ringfence_offload::Layers::parse(headers, total).unwrap();
    ringfence_offload::blank::reset_pseudo_header(headers, &layers).unwrap();
    bytes
}
