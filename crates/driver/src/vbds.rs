//! Vbds of a driver domain: handshakes, counters, teardown.
//!
//! ```text
//! opener thread ──┐ DeviceId                    ┌── store: states
//! ring threads  ──┴─────────> mailbox ─> control┤
//!                             `events`   thread └── VbdBackend: handshake, rings
//! ```
//!
//! Each ring has a thread of its own. The control thread never waits for a ring thread, and a ring
//! thread never waits for the control thread. A disk that hangs delays only its own guest: the requests of a removed
//! disk complete on a thread of [`Teardown`].

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use ringfence_block::blkback::{PersistentCounters, QueueCounters, named_persistent};
use ringfence_block::vbd::backend::VbdBackend;
use ringfence_hostnet::log::LineBudget;
use ringfence_memory::UringPool;
use ringfence_sys::descriptors::Disposal;
use ringfence_sys::mailbox::{MailSender, Mailbox, mailbox};
use ringfence_wire::xenbus::DeviceId;

use crate::replacement::Replacement;

/// Maximum number of disks in teardown at a time. A teardown lasts until its storage has completed all requests.
const TEARDOWNS_MAX: usize = 256;

/// Maximum number of operations that a disk's ring of io_uring has in flight.
const RING_DEPTH: u32 = 128;

/// Makes rings of io_uring for the disks of a process whose sandbox is not closed yet. A process that the kernel
/// refuses them has none.
pub(crate) fn rings(count: usize) -> UringPool {
    let rings = UringPool::new(count, RING_DEPTH);
    if let Some(error) = rings.refusal() {
        tracing::debug!("no io_uring here ({error}): threads serve disks");
    }
    rings
}

/// Counters of one ring, which its thread updates.
pub(crate) struct RingCounters {
    pub(crate) queue: Arc<QueueCounters>,
    pub(crate) persistent: Arc<PersistentCounters>,
}

/// One vbd: its handshake, the counters of its rings, and the domain's own part.
pub(crate) struct Vbd<S> {
    pub(crate) backend: VbdBackend,
    /// Reason for which the vbd is not served for now.
    pub(crate) problem: Option<String>,
    /// Counters of the rings in use.
    pub(crate) rings: Vec<RingCounters>,
    /// Budget for log lines that the guest causes by connecting and disconnecting.
    pub(crate) lines: LineBudget,
    /// Replacement of the disk that has begun.
    pub(crate) replacement: Option<Replacement>,
    pub(crate) own: S,
}

impl<S> Vbd<S> {
    /// Creates the record of a vbd that is not connected.
    pub(crate) fn new(backend: VbdBackend, own: S) -> Vbd<S> {
        let (problem, rings, lines) = (None, Vec::new(), LineBudget::new());
        Vbd { backend, problem, rings, lines, replacement: None, own }
    }
}

/// All vbds of a driver domain.
pub(crate) struct Vbds<S> {
    pub(crate) list: BTreeMap<DeviceId, Vbd<S>>,
    /// Devices for which another thread has an event. Several entries may name one device.
    pub(crate) events: Mailbox<DeviceId>,
    event_sender: MailSender<DeviceId>,
    pub(crate) teardown: Teardown,
    /// Sums of the counters of rings that were closed.
    pub(crate) retired: BTreeMap<&'static str, u64>,
    /// Sums of the rule violations of vbds that are gone.
    pub(crate) retired_rules: BTreeMap<&'static str, u64>,
}

impl<S> Vbds<S> {
    /// Creates an empty list.
    ///
    /// # Errors
    ///
    /// Returns the system's error.
    pub(crate) fn new() -> io::Result<Vbds<S>> {
        let (event_sender, events) = mailbox()?;
        Ok(Vbds {
            list: BTreeMap::new(),
            events,
            event_sender,
            teardown: Teardown::new(),
            retired: BTreeMap::new(),
            retired_rules: BTreeMap::new(),
        })
    }

    /// Returns a function for other threads, which makes a device due.
    pub(crate) fn notifier(&self, device: DeviceId) -> impl Fn() + Send + Sync + 'static {
        let events = self.event_sender.clone();
        move || {
            // The send fails only when the driver domain ends.
            let _ = events.send(device);
        }
    }

    /// Adds the counters of rings that were closed.
    pub(crate) fn retire_rings(&mut self, rings: &mut Vec<RingCounters>) {
        for (name, count) in rings.drain(..).flat_map(|ring| ring_counts(&ring)) {
            *self.retired.entry(name).or_default() += count;
        }
    }
}

/// Returns the counters of a ring by name.
pub(crate) fn ring_counts(ring: &RingCounters) -> Vec<(&'static str, u64)> {
    let mut all = ring.queue.named();
    all.extend(named_persistent(&ring.persistent));
    all
}

/// Returns the sums of the levels of a disk's rings by name.
pub(crate) fn ring_levels(rings: &[RingCounters]) -> BTreeMap<&'static str, u64> {
    let mut sums = BTreeMap::new();
    let most = |ring: &RingCounters| ("pages_mapped_most", ring.persistent.limit.get());
    let levels = rings.iter().flat_map(|ring| ring.queue.levels().into_iter().chain([most(ring)]));
    for (name, level) in levels {
        *sums.entry(name).or_default() += level;
    }
    sums
}

/// Removed disks that complete their requests, on threads of their own: a server or file system that does not
/// answer must not block other guests.
pub(crate) struct Teardown {
    threads: Disposal<LeavingDisk>,
    /// Token whose clones count the disks.
    leaving: Arc<()>,
}

struct LeavingDisk {
    backend: VbdBackend,
    _token: Arc<()>,
}

impl Teardown {
    fn new() -> Teardown {
        let end = |disk: LeavingDisk| drop(disk.backend);
        Teardown { threads: Disposal::new(TEARDOWNS_MAX, end), leaving: Arc::default() }
    }

    /// Hands over a disk that no guest uses any more.
    pub(crate) fn add(&self, backend: VbdBackend) {
        self.threads.add(LeavingDisk { backend, _token: Arc::clone(&self.leaving) });
    }

    /// Returns the number of disks that have not completed their requests.
    pub(crate) fn len(&self) -> usize {
        Arc::strong_count(&self.leaving) - 1
    }

    /// Waits until all disks have completed their requests. Returns `false` after `timeout`.
    pub(crate) fn wait_until_done(&self, timeout: Duration) -> bool {
        self.threads.wait_until_done(timeout)
    }
}
