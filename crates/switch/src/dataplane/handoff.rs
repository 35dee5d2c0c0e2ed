//! Handoff: passes frames from one worker of a dataplane to another.
//!
//! # Theory of operation
//!
//! A multi-queue port is split: part `n` belongs to worker `n` alone, so no ring is ever used by two
//! threads. When a worker knows the egress port of a frame, it selects the *part* of that port:
//!
//! * the part of its own worker, if the ingress port has as many parts or more. The sender chose the
//!   queue by the frame's flow, so each flow arrives by one queue, in order. No other thread takes part;
//!   this is the case for guests with equally many queues.
//! * the part that the flow's hash selects, if the ingress port has fewer parts, or if the receiver
//!   configured hashing over its control ring. Without the hash, all frames of a guest with one queue
//!   would use one queue of the receiver.
//!
//! If that part is another worker's, the frame is copied, once, into a *handoff batch* for that worker.
//! That worker transmits the frames as those of its own ports, egress processing included. So no worker
//! refers to pages that another worker's guest lent.
//!
//! ```text
//! worker A                              worker B
//!   divert: copy into the open batch
//!   flush ───────── inbound ──────────> drain_mailbox, dequeue, transmit
//!   drain_mailbox <── returned ──────── return_batch
//!   announce ────── announcements ────> drain_mailbox
//! ```
//!
//! Each worker has a mailbox. Its lock is held for a few queue operations, a few times a round. An event
//! is sent only to a worker that sleeps. Handoff batches are work like a port's: in
//! [`Fairness`](super::fairness) each other worker counts as one port.
//!
//! # Limits
//!
//! * A worker has a fixed number of handoff batches for each other worker and gets them back empty. While
//!   too few are free, a sender whose frames go to one port alone is slowed (backpressure). Frames of
//!   other senders are dropped and counted.
//! * Each worker has a forwarding database of its own and announces learned addresses to the others
//!   ([`Announcement`]). Announcements beyond [`ANNOUNCEMENTS_MAX`] are lost; then frames to that address
//!   are flooded, as if the address were new.

// #syscall driver,frontend,card,daemon write: another worker is woken

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ringfence_frame::batch::{Batch, FRAMES_DEFAULT};
use ringfence_frame::counters::{DropReason, PortCounters};
use ringfence_frame::port::{ChecksumOffload, GsoOffload, PortCapabilities};
use ringfence_frame::steer::{SecretSpread, Steering};

use super::fairness::TimeAccount;
use super::handle::PortId;
use crate::forwarding::table::CAPACITY;
use crate::forwarding::{Mac, PortIndex};

/// Maximum number of handoff batches from one worker to another.
pub(super) const BATCHES_MAX: usize = 16;

/// Maximum number of handoff batches of one worker, for all others together: 10 MiB of frames.
const BATCHES_PER_WORKER: usize = 32;

/// Size of a handoff batch in bytes: four frames of the maximum size.
const BATCH_BYTES: usize = 5 << 16;

/// Number of slots, each of a page or part of one, that fit a handoff batch for any mix of frame sizes.
const BATCH_SLOTS: usize = 60;

/// Capabilities of a handoff batch: it holds any frame unchanged.
pub(super) const BATCH_CAPABILITIES: PortCapabilities = PortCapabilities {
    checksum: ChecksumOffload::Any,
    gso: GsoOffload { tcp_v4: true, tcp_v6: true, ecn: true, udp: true },
    scatter_gather: true,
    mtu: u16::MAX,
};

/// Maximum number of announcements in a mailbox: one for each address that can be learned.
const ANNOUNCEMENTS_MAX: usize = CAPACITY;

/// Maximum number of announcements that a worker reads in one round.
const ANNOUNCEMENTS_PER_ROUND: usize = 64;

/// Mark of a frame that is not in the open handoff batch.
const NOT_COPIED: u32 = u32::MAX;

/// Announcement of a learned address: the address, and the port behind which it is.
pub(super) type Announcement = (Mac, PortIndex);

/// Frames on their way to another worker.
pub(super) struct HandoffBatch {
    pub(super) batch: Batch,
    /// Egress ports, each with the index of a frame for it.
    pub(super) targets: Vec<(PortIndex, u32)>,
    pub(super) sender: usize,
    receiver: usize,
}

/// Mailbox of a worker, written by the other workers.
pub(super) struct WorkerMailbox {
    wake: Arc<OwnedFd>,
    state: Mutex<MailboxState>,
}

#[derive(Default)]
struct MailboxState {
    inbound: Vec<HandoffBatch>,
    /// Empty handoff batches that other workers returned to this one.
    returned: Vec<HandoffBatch>,
    announcements: VecDeque<Announcement>,
    /// Set if the worker sleeps and must be woken for inbound batches.
    asleep: bool,
    /// Set if the sleeping worker must also be woken for returned batches.
    wants_returned: bool,
}

impl WorkerMailbox {
    /// Creates an empty mailbox. `wake` is the eventfd that wakes the worker.
    pub(super) fn new(wake: Arc<OwnedFd>) -> WorkerMailbox {
        WorkerMailbox { wake, state: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, MailboxState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wake(&self) {
        // The write fails only if the counter would overflow; the eventfd is readable then.
        let _ = rustix::io::write(&*self.wake, &1u64.to_ne_bytes());
    }
}

/// Record of a port that every worker has, also a worker without a part of it.
struct Registration {
    id: PortId,
    parts: usize,
    /// Hash configuration of the guest.
    steering: Option<Arc<Steering>>,
}

/// Handoff batches for one other worker.
struct Outbound {
    free: Vec<HandoffBatch>,
    /// Number of handoff batches allocated so far.
    allocated: usize,
    open: Option<HandoffBatch>,
    /// Index in the open handoff batch, for each frame of the worker's batch, or [`NOT_COPIED`].
    copies: Vec<u32>,
}

/// Handoff batches received from one other worker.
#[derive(Default)]
pub(super) struct Inbound {
    batches: VecDeque<HandoffBatch>,
    pub(super) account: TimeAccount,
}

/// Connection of one worker to the other workers.
pub(super) struct PeerWorkers {
    index: usize,
    mailboxes: Arc<[WorkerMailbox]>,
    /// Ports of all workers, by port index.
    registered: Vec<Option<Registration>>,
    spread: SecretSpread,
    outbound: Vec<Outbound>,
    /// Maximum number of handoff batches for each other worker.
    batches_max: usize,
    pub(super) inbound: Vec<Inbound>,
    /// Counters in which *sent* frames were handed to other workers and *received* ones came from them.
    pub(super) counters: Arc<PortCounters>,
    /// Set if a sender waits for a free handoff batch.
    pub(super) sender_waits: bool,
}

/// Worker that transmits the frames from one port to another.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Receiver {
    Worker(usize),
    ByFlow,
}

impl PeerWorkers {
    /// Creates the connection of worker `index`.
    pub(super) fn new(index: usize, mailboxes: &Arc<[WorkerMailbox]>) -> PeerWorkers {
        let outbound =
            || Outbound { free: Vec::new(), allocated: 0, open: None, copies: Vec::new() };
        PeerWorkers {
            index,
            mailboxes: Arc::clone(mailboxes),
            registered: Vec::new(),
            spread: SecretSpread::new(),
            outbound: mailboxes.iter().map(|_| outbound()).collect(),
            batches_max: (BATCHES_PER_WORKER / mailboxes.len().max(2).saturating_sub(1))
                .clamp(2, BATCHES_MAX),
            inbound: mailboxes.iter().map(|_| Inbound::default()).collect(),
            counters: Arc::default(),
            sender_waits: false,
        }
    }

    /// Returns `true` if a frame was handed between workers, or was dropped instead.
    pub(super) fn is_used(&self) -> bool {
        let PortCounters { rx_frames, tx_frames, .. } = &*self.counters;
        rx_frames.get() > 0 || tx_frames.get() > 0 || self.counters.drops_total() > 0
    }

    /// Returns `true` if a port has that index.
    pub(super) fn has_port(&self, index: usize) -> bool {
        self.registered.get(index).is_some_and(Option::is_some)
    }

    /// Returns the index of a port.
    pub(super) fn index_of(&self, id: PortId) -> Option<usize> {
        self.registered.iter().position(|port| port.as_ref().is_some_and(|port| port.id == id))
    }

    /// Registers a port with its number of parts, at least 1.
    pub(super) fn register(&mut self, index: usize, id: PortId, parts: usize) {
        if self.registered.len() <= index {
            self.registered.resize_with(index + 1, || None);
        }
        self.registered[index] = Some(Registration { id, parts: parts.max(1), steering: None });
    }

    /// Removes the registration of a port.
    pub(super) fn unregister(&mut self, index: usize) {
        if let Some(port) = self.registered.get_mut(index) {
            *port = None;
        }
    }

    /// Returns the number of parts of the port at `index`; 1 if there is no such port.
    pub(super) fn parts(&self, index: usize) -> usize {
        self.registered.get(index).and_then(Option::as_ref).map_or(1, |port| port.parts)
    }

    /// Sets the hash configuration by which a guest selects the queues of its frames.
    pub(super) fn set_steering(&mut self, id: PortId, steering: Option<Arc<Steering>>) {
        if let Some(port) = self.registered.iter_mut().flatten().find(|port| port.id == id) {
            port.steering = steering;
        }
    }

    /// Returns the worker that transmits frames from the port at index `source` to `port`.
    fn receiver(&self, source: usize, port: PortIndex) -> Receiver {
        let Some(Some(known)) = self.registered.get(usize::from(port.0)) else {
            return Receiver::Worker(self.index);
        };
        match known.parts {
            1 => Receiver::Worker(0),
            parts if known.steering.is_none() && self.parts(source) >= parts => {
                Receiver::Worker(self.index % parts)
            }
            _ => Receiver::ByFlow,
        }
    }

    /// Returns the worker of a frame's flow.
    pub(super) fn worker_of_flow(&self, port: PortIndex, batch: &Batch, frame: u32) -> usize {
        let Some(Some(known)) = self.registered.get(usize::from(port.0)) else { return self.index };
        let (header, len) = batch.get(frame).map_or((&[][..], 0), |f| (f.header(), f.len()));
        match &known.steering {
            Some(steering) => {
                let hash = steering.hash(header, len);
                // Frames without a flow go to the first part.
                hash.map_or(0, |hash| usize::from(steering.queue(hash.value)) % known.parts)
            }
            None => self.spread.queue(header, len, known.parts),
        }
    }

    /// Copies those of `frames` that other workers transmit into handoff batches, and removes them from
    /// `frames`. The frames were received from the port at index `source` and go to `port`.
    pub(super) fn divert(
        &mut self,
        source: usize,
        port: PortIndex,
        batch: &Batch,
        frames: &mut Vec<u32>,
    ) {
        match self.receiver(source, port) {
            Receiver::Worker(worker) if worker == self.index => {}
            Receiver::Worker(worker) => {
                frames.drain(..).for_each(|frame| self.enqueue(worker, port, batch, frame));
            }
            Receiver::ByFlow => frames.retain(|&frame| {
                let worker = self.worker_of_flow(port, batch, frame);
                if worker != self.index {
                    self.enqueue(worker, port, batch, frame);
                }
                worker == self.index
            }),
        }
    }

    /// Returns the number of slots, each of a page, that fit the free handoff batches for frames from the
    /// port at index `source` to `port`. If several workers may transmit them, the lowest number counts.
    /// Returns `None` if no other worker transmits them.
    pub(super) fn free_slots(&self, source: usize, port: PortIndex) -> Option<usize> {
        let workers = match self.receiver(source, port) {
            Receiver::Worker(worker) => worker..worker + 1,
            Receiver::ByFlow => 0..self.parts(usize::from(port.0)),
        };
        let others = workers.filter(|worker| *worker != self.index);
        others.map(|worker| self.free_batches(worker) * BATCH_SLOTS).min()
    }

    /// Returns the number of free handoff batches for that worker.
    pub(super) fn free_batches(&self, worker: usize) -> usize {
        self.outbound
            .get(worker)
            .map_or(0, |o| o.free.len() + self.batches_max.saturating_sub(o.allocated))
    }

    /// Enqueues a frame for `port` in the open handoff batch of that worker. A frame for several ports is
    /// copied once. Without room the frame is dropped and counted.
    fn enqueue(&mut self, worker: usize, port: PortIndex, batch: &Batch, frame: u32) {
        let Some(view) = batch.get(frame) else { return };
        let at = frame as usize;
        let len = view.len();
        if self.outbound[worker].copies.get(at).is_none_or(|copy| *copy == NOT_COPIED) {
            if !self.open_batch(worker, len) {
                return self.counters.dropped(DropReason::HandoffFull);
            }
            let outbound = &mut self.outbound[worker];
            let Some(open) = &mut outbound.open else { return };
            let copied = open.batch.reserve(len.next_multiple_of(64)).and_then(|offset| {
                view.copy_to(open.batch.scratch_mut(offset..offset + len).ok()?);
                open.batch.push_contiguous(offset, len, view.meta()).ok()
            });
            let Some(copy) = copied else { return self.counters.dropped(DropReason::HandoffFull) };
            if outbound.copies.len() <= at {
                outbound.copies.resize(at + 1, NOT_COPIED);
            }
            outbound.copies[at] = copy;
        }
        let outbound = &mut self.outbound[worker];
        if let (Some(open), Some(&copy)) = (&mut outbound.open, outbound.copies.get(at)) {
            open.targets.push((port, copy));
            self.counters.sent(1, len as u64);
        }
    }

    /// Opens a handoff batch with room for a frame of `len` bytes, unless one is open. Sends an open batch
    /// without that room first. Returns `false` if no batch is free.
    fn open_batch(&mut self, worker: usize, len: usize) -> bool {
        let fits = |open: &HandoffBatch| {
            open.batch.frames_left() > 0 && len.next_multiple_of(64) <= open.batch.scratch_left()
        };
        if self.outbound[worker].open.as_ref().is_some_and(|open| !fits(open)) {
            self.send(worker);
        }
        let outbound = &mut self.outbound[worker];
        if outbound.open.is_none() {
            outbound.open = outbound.free.pop();
        }
        if outbound.open.is_none() && outbound.allocated < self.batches_max {
            outbound.allocated += 1;
            let batch = Batch::with_capacity(FRAMES_DEFAULT, BATCH_BYTES);
            let (sender, receiver) = (self.index, worker);
            outbound.open = Some(HandoffBatch { batch, targets: Vec::new(), sender, receiver });
        }
        outbound.open.is_some()
    }

    /// Sends all open handoff batches. Returns the number of workers that were woken.
    pub(super) fn flush(&mut self) -> u64 {
        (0..self.outbound.len()).map(|worker| u64::from(self.send(worker))).sum()
    }

    /// Sends the open handoff batch for that worker. Returns `true` if the worker was woken.
    fn send(&mut self, worker: usize) -> bool {
        let outbound = &mut self.outbound[worker];
        let Some(open) = outbound.open.take() else { return false };
        outbound.copies.clear();
        let mailbox = &self.mailboxes[worker];
        let mut state = mailbox.lock();
        state.inbound.push(open);
        let wake = core::mem::take(&mut state.asleep);
        drop(state);
        if wake {
            mailbox.wake();
        }
        wake
    }

    /// Sends announcements to all other workers; those that a mailbox has no room for are lost.
    pub(super) fn announce(&self, announcements: impl Iterator<Item = Announcement> + Clone) {
        if announcements.clone().next().is_none() {
            return;
        }
        for (worker, mailbox) in self.mailboxes.iter().enumerate() {
            if worker != self.index {
                let mut state = mailbox.lock();
                let room = ANNOUNCEMENTS_MAX.saturating_sub(state.announcements.len());
                state.announcements.extend(announcements.clone().take(room));
            }
        }
    }

    /// Moves all handoff batches out of this worker's mailbox, and calls `apply` with up to
    /// [`ANNOUNCEMENTS_PER_ROUND`] announcements.
    pub(super) fn drain_mailbox(&mut self, mut apply: impl FnMut(Announcement)) {
        let mut state = self.mailboxes[self.index].lock();
        for handoff in state.returned.drain(..) {
            self.outbound[handoff.receiver].free.push(handoff);
        }
        for handoff in state.inbound.drain(..) {
            self.inbound[handoff.sender].batches.push_back(handoff);
        }
        let count = state.announcements.len().min(ANNOUNCEMENTS_PER_ROUND);
        state.announcements.drain(..count).for_each(&mut apply);
    }

    /// Returns `true` if there is a handoff batch from that worker.
    pub(super) fn has_inbound(&self, worker: usize) -> bool {
        self.inbound.get(worker).is_some_and(|inbound| !inbound.batches.is_empty())
    }

    /// Dequeues the oldest handoff batch from that worker.
    pub(super) fn dequeue(&mut self, worker: usize) -> Option<HandoffBatch> {
        let handoff = self.inbound.get_mut(worker)?.batches.pop_front()?;
        let bytes = handoff.batch.iter().map(|frame| frame.len() as u64).sum();
        self.counters.received(handoff.batch.len() as u64, bytes);
        Some(handoff)
    }

    /// Empties a handoff batch whose frames were transmitted, and returns it to its sender.
    pub(super) fn return_batch(&self, mut handoff: HandoffBatch) {
        handoff.batch.clear();
        handoff.targets.clear();
        let Some(mailbox) = self.mailboxes.get(handoff.sender) else { return };
        let mut state = mailbox.lock();
        state.returned.push(handoff);
        let wake = state.asleep && core::mem::take(&mut state.wants_returned);
        state.asleep &= !wake;
        drop(state);
        if wake {
            mailbox.wake();
        }
    }

    /// Marks this worker as asleep, so senders wake it. Returns `false`, and sets no mark, if there is work
    /// for it already.
    pub(super) fn prepare_sleep(&mut self) -> bool {
        if self.inbound.iter().any(|inbound| !inbound.batches.is_empty()) {
            return false;
        }
        let mut state = self.mailboxes[self.index].lock();
        let due = !state.inbound.is_empty()
            || !state.announcements.is_empty()
            || (self.sender_waits && !state.returned.is_empty());
        state.asleep = !due;
        state.wants_returned = self.sender_waits;
        !due
    }

    /// Clears the mark of [`PeerWorkers::prepare_sleep`] after the sleep.
    pub(super) fn end_sleep(&self) {
        self.mailboxes[self.index].lock().asleep = false;
    }
}
