//! The uplink as a port of the data plane: patched to a vif, or plugged into a switch.
//!
//! What is sent to the port comes from guests ([`Port::transmit`]: payload goes from where it lies,
//! lent memory included, straight into sockets). What is received from it is read from sockets
//! straight into the batch.

use core::time::Duration;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use ringfence_frame::batch::Room;
use ringfence_frame::{
    Batch, ChecksumOffload, Fault, GsoOffload, Port, PortCapabilities, PortCounters, Received,
    Transmitted,
};
use ringfence_sys::clock::Clock;

use crate::engine::Uplink;
use crate::link::{Committed, GuestSide, Slots};

/// An [`Uplink`] as a [`Port`].
pub struct UplinkPort {
    uplink: Uplink,
    clock: Clock,
    /// What the port at the other end takes.
    guest: PortCapabilities,
    counters: Arc<PortCounters>,
    /// There is more that only waits for its turn.
    more: bool,
}

impl UplinkPort {
    /// A port of `uplink` for guests behind a port that can take what `guest` says.
    pub fn new(uplink: Uplink, guest: PortCapabilities, clock: Clock) -> UplinkPort {
        UplinkPort { uplink, clock, guest, counters: Arc::default(), more: false }
    }

    /// The engine.
    pub fn uplink(&self) -> &Uplink {
        &self.uplink
    }
}

impl Port for UplinkPort {
    fn receive(&mut self, batch: &mut Batch, budget: usize) -> Result<Received, Fault> {
        let now = self.clock.now();
        let events = self
            .uplink
            .poll_host(now)
            .map_err(|errno| Fault::system("cannot wait for the uplink's sockets", errno))?;
        self.uplink.run_timers(now);
        let before = batch.len();
        let mut link =
            BatchLink { batch, guest: self.guest, budget, counters: &self.counters, slot_len: 0 };
        self.more = self.uplink.output(&mut link, now);
        let frames = batch.len() - before;
        Ok(Received { frames, work: frames + events })
    }

    fn complete(&mut self) -> Result<(), Fault> {
        Ok(())
    }

    fn transmit(&mut self, batch: &Batch, frames: &[u32]) -> Result<Transmitted, Fault> {
        self.uplink.input(batch, frames, self.clock.now());
        self.more = true;
        let octets = batch.select(frames).map(|frame| frame.len() as u64).sum();
        self.counters.sent(frames.len() as u64, octets);
        Ok(Transmitted { sent: frames.len(), dropped: 0 })
    }

    fn arm(&mut self) -> Result<bool, Fault> {
        let due = self.uplink.deadline().is_some_and(|deadline| deadline <= self.clock.now());
        Ok(self.more || due)
    }

    fn deadline(&self) -> Option<Duration> {
        self.uplink.deadline()
    }

    fn wait_fds(&self) -> Vec<BorrowedFd<'_>> {
        vec![self.uplink.wait_fd()]
    }

    fn capabilities(&self) -> PortCapabilities {
        PortCapabilities {
            checksum: ChecksumOffload::Any,
            gso: GsoOffload { tcp_v4: true, tcp_v6: true, ecn: true, udp: true },
            scatter_gather: true,
            mtu: self.uplink.config().mtu,
        }
    }

    fn counters(&self) -> &Arc<PortCounters> {
        &self.counters
    }
}

/// A batch as link: frames are put into its scratch memory.
struct BatchLink<'a> {
    batch: &'a mut Batch,
    guest: PortCapabilities,
    /// Frames that may still be added.
    budget: usize,
    counters: &'a PortCounters,
    /// Octets of each buffer of the last reservation.
    slot_len: usize,
}

impl GuestSide for BatchLink<'_> {
    fn capabilities(&self) -> PortCapabilities {
        self.guest
    }

    fn reserve<'a>(&'a mut self, count: usize, len: usize, slots: &mut Slots<'a>) {
        if len == 0 || !self.batch.has_room_for(len) {
            return;
        }
        // What a second frame would need of a bounded room is known when the first one is in.
        let at_once = if self.batch.room() == Room::UNBOUNDED { count } else { 1 };
        let count = at_once.min(self.budget).min(self.batch.frames_left());
        let buffers = self.batch.scratch_tail_mut().chunks_exact_mut(len);
        slots.extend(buffers.take(count.min(slots.remaining_capacity())));
        self.slot_len = len;
    }

    fn commit(&mut self, frames: &[Committed]) {
        for (place, frame) in frames.iter().enumerate() {
            // Behind the last one nothing was filled.
            let is_last = place + 1 == frames.len();
            let taken = if is_last { frame.len } else { self.slot_len };
            let pushed = self
                .batch
                .reserve(taken)
                .and_then(|offset| self.batch.push_contiguous(offset, frame.len, frame.meta).ok());
            if pushed.is_some() {
                self.budget = self.budget.saturating_sub(1);
                self.counters.received(1, frame.len as u64);
            }
        }
    }
}
