//! Backend of a disk (blkback): serves the rings of an untrusted frontend from a [`Disk`].
//!
//! # Theory of operation
//!
//! ```text
//! frontend ── ring ──> worker thread ── Request ──> DiskQueue ──> storage
//!          <─ event ──   (one a ring)  <── Done ───
//!                           │ pages of the guest: copy, map, persistent, window
//! ```
//!
//! Each ring has a worker thread, which owns the ring, the access to the guest's pages and a queue of the
//! disk. It serves the ring in rounds. A round consumes the available requests and validates a private
//! copy of each (and of the descriptors of an indirect request). It makes their pages accessible, submits
//! them to the disk together, and answers completed requests. Without work the worker polls for a time
//! that adapts to the load. Then it sleeps until the channel, the disk or a command wakes it.
//!
//! # Ordering, latency and crashes
//!
//! Requests are submitted as they arrive and answered as they complete; a slow request delays no other.
//! Three rules make that safe:
//!
//! * **Unanswered requests stay in the ring.** After a crash of the backend, its successor must find each
//!   unanswered request exactly once. Answers in ring order would guarantee that, but every request would
//!   then wait for the slowest. Instead the oldest unanswered request is moved into the slot that an
//!   out-of-order answer frees ([`ringfence_ring::AnyOrderRing`]). That costs a copy of at most 112 bytes.
//! * **A repeated write does not undo an acknowledged one.** A write does not start while an earlier write
//!   in the same ring touches the same sectors. When a write is answered, no earlier unanswered write
//!   can therefore overwrite it when it is repeated. Guests rarely issue overlapping writes; the check
//!   walks a short list.
//! * **A flush covers the writes answered before it was posted**, which is all that a guest may rely on.
//!   A barrier waits until it is alone, and delays all requests after it: none is consumed from the ring
//!   before the barrier is answered. So no request moves across a barrier.
//!
//! After a crash the kernel may still complete I/O of the old process. The storage must fence it off
//! (see [`crate::storage::file`]).
//!
//! # Page access
//!
//! A request holds its pages from the start of its I/O until just before its answer: the guest revokes them after the
//! answer. [`ringfence_access::request_access`] says for each mode what happens at both times, and when a page is
//! mapped and unmapped. In all modes but `copy` the disk works on the guest's pages themselves, and the guest can change
//! bytes meanwhile.
//!
//! # Replacement of the disk
//!
//! [`Blkback::pause`] makes each worker answer what it has consumed, and close its queue of the disk. Requests that arrive
//! meanwhile stay in the ring. Once all have done so, no request is in flight: the content of the disk is that of one
//! moment. [`Blkback::resume`] continues on another disk, which may be larger. The frontend notices only the delay.
//!
//! # Misbehaving guests
//!
//! A request that breaks a rule is answered with an error and counted by rule. An invalid producer index or
//! a closed channel ends the queue; the owner is notified and closes that device. Requests in flight are
//! waited for before any page is unmapped. `penalty` bounds the processor time that a guest can take from
//! others.

mod counters;
mod fault;
mod job;
mod pages;
mod pause;
mod penalty;
mod queue;
mod worker;

use core::time::Duration;
use std::io;
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;

pub use counters::{CurrentEngine, QueueCounters, engine_names, named_persistent};
pub use fault::QueueFault;
pub use ringfence_access::persistent::{PersistentCounters, PersistentLimits};
use ringfence_access::{Mode, RequestAccess};
use ringfence_platform::{Channel, Counters, Grantee, WindowView};
use ringfence_ring::{AnyOrderRing, ProducerOverflow, RingLayout, RingPages};
use ringfence_sys::mailbox::{MailSender, mailbox};
use ringfence_sys::numbers::bounded;
use ringfence_sys::pace::Spin;
use ringfence_sys::pressure::Share;
use ringfence_sys::rules::RuleCounters;
use ringfence_wire::blkif::{Abi, Rules, SEGMENTS_MAX};

use crate::storage::{Disk, Geometry};
use pause::PauseToken;
use queue::{BlkbackQueue, DiskSize, QueueTerms};
use worker::{Worker, WorkerCommand};

/// Number of pages that memory pressure leaves to a queue. A request of 64 pages and those of its descriptors stay mapped.
const KEPT_LEAST: u32 = 66;

/// Access mode, offered features and limits of one disk's backend.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BlkbackOptions {
    /// Mode of access to the guest's pages.
    pub mode: Mode,
    /// Limits of persistent pages in [`Mode::Persistent`] and [`Mode::Window`].
    pub persistent: PersistentLimits,
    /// Maximum number of queues offered to the frontend.
    pub queues: u32,
    /// Maximum ring page order offered to the frontend.
    pub ring_order: u32,
    /// Maximum number of segments of an indirect request; 0 offers no indirect requests.
    pub indirect_segments: u16,
    /// Maximum time to poll after the last work.
    pub spin_max: Duration,
    /// Maximum time to wait for the disk when a device is closed.
    pub drain_limit: Duration,
}

impl Default for BlkbackOptions {
    fn default() -> BlkbackOptions {
        let processors = std::thread::available_parallelism().map_or(1, |n| n.get());
        BlkbackOptions {
            mode: Mode::Persistent,
            persistent: PersistentLimits::default(),
            queues: bounded(processors.clamp(1, 4), 4u32),
            ring_order: ringfence_wire::blkif::RING_ORDER_MAX,
            indirect_segments: SEGMENTS_MAX,
            // On a single processor polling would keep the peer from producing work.
            spin_max: if processors == 1 { Duration::ZERO } else { Duration::from_micros(50) },
            drain_limit: Duration::from_secs(30),
        }
    }
}

/// Parts of one queue, as the handshake opened them.
pub struct QueueParts<G, C> {
    /// Mapped memory of the ring.
    pub ring: RingPages,
    pub ring_pages: usize,
    pub channel: C,
    /// Access to the guest's pages.
    pub pages: G,
    /// Grant window that the guest made for this ring.
    pub window: Option<WindowView>,
}

/// Properties negotiated with the frontend.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Agreement {
    /// Request layout of the frontend.
    pub abi: Abi,
    /// Pages are kept mapped.
    pub persistent: bool,
    /// Rules by which requests are validated.
    pub rules: Rules,
    /// The frontend knows the status of a full storage.
    pub no_space: bool,
}

/// Reasons for which a device cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// Producer index of a ring is invalid.
    #[error(transparent)]
    Ring(#[from] ProducerOverflow),
    /// Ring of this many pages holds no entry.
    #[error("a ring of {0} pages cannot be used")]
    RingSize(usize),
    /// System call that failed.
    #[error("{what}: {source}")]
    System { what: &'static str, source: io::Error },
}

/// Callback on the thread of a queue that ended and holds no page any more. The argument is the reason,
/// or `None` after a stop command. The callback must not block.
pub type OnEnd = Arc<dyn Fn(Option<&QueueFault>) + Send + Sync>;

/// Recipients of the reports of a device's queues.
#[derive(Clone)]
pub struct QueueReports {
    /// Counters of the rules that the guest broke.
    pub rules: Arc<RuleCounters>,
    /// Counters of system calls and wake-ups.
    pub system: Arc<Counters>,
    /// Callback for the end of each queue.
    pub on_end: OnEnd,
}

struct Running {
    thread: Option<JoinHandle<()>>,
    /// Cloned by the thread, which drops its clone when the queue has ended.
    in_use: Arc<()>,
    commands: MailSender<WorkerCommand>,
    counters: Arc<QueueCounters>,
    persistent: Arc<PersistentCounters>,
    /// Maximum number of requests in flight.
    depth: u32,
}

/// Pause of a device, until its queues are resumed.
pub struct Pause(Weak<PauseToken>);

impl Pause {
    /// Returns `true` if no queue of the device has a request in flight or a queue of the disk.
    pub fn is_complete(&self) -> bool {
        self.0.strong_count() == 0
    }
}

/// Device in service: one worker thread for each ring. Dropping it stops the workers, waits for requests
/// in flight, and unmaps all pages.
pub struct Blkback {
    queues: Vec<Running>,
    /// Maximum number of pages that a queue keeps mapped without memory pressure.
    kept_most: u16,
    adopted: u32,
}

/// Returns the rules by which requests to a disk of this geometry are validated.
pub fn rules_for(geometry: &Geometry, options: &BlkbackOptions) -> Rules {
    Rules {
        sectors: geometry.bytes / 512,
        sector_size: geometry.sector_size,
        read_only: geometry.read_only,
        flush: geometry.flush,
        barrier: !geometry.read_only,
        discard: geometry.discard.is_some() && !geometry.read_only,
        extents: geometry.extents,
        write_zeroes: geometry.write_zeroes && !geometry.read_only,
        indirect_segments: options.indirect_segments,
    }
}

impl Blkback {
    /// Serves the rings of `parts` from `disk`.
    ///
    /// # Errors
    ///
    /// Returns [`StartError`]; queues that were started are stopped.
    pub fn start<G, C>(
        parts: Vec<QueueParts<G, C>>,
        disk: &Arc<dyn Disk>,
        options: &BlkbackOptions,
        agreement: &Agreement,
        reports: &QueueReports,
    ) -> Result<Blkback, StartError>
    where
        G: Grantee + 'static,
        C: Channel + 'static,
    {
        let (queues, kept_most) = (Vec::with_capacity(parts.len()), options.persistent.pages);
        let mut back = Blkback { queues, kept_most, adopted: 0 };
        let skips_flush = !disk.geometry().flush;
        let terms = QueueTerms {
            abi: agreement.abi,
            rules: agreement.rules,
            skips_flush,
            no_space: agreement.no_space,
        };
        for QueueParts { ring, ring_pages, channel, pages, window } in parts {
            let abi = agreement.abi;
            let bytes = ring_pages * ringfence_memory::PAGE_SIZE;
            let layout =
                RingLayout::new(bytes, abi.request_bytes(), abi.response_bytes(), abi.alignment());
            let layout = layout.ok_or(StartError::RingSize(ring_pages))?;
            let (ring, attached) = AnyOrderRing::attach(ring, layout, abi.response_bytes())?;
            back.adopted += attached.unanswered + u32::from(attached.finished);
            let depth = layout.count();
            let queue = disk.queue(depth);
            let queue = queue.map_err(|source| StartError::System { what: "a disk", source })?;
            // After a takeover the frontend may use a window that this process would not offer.
            let mode = if window.is_some() { Mode::Window } else { options.mode };
            let may_keep = matches!(mode, Mode::Persistent | Mode::Window);
            let keeps = (agreement.persistent && may_keep).then_some(options.persistent);
            let pages = RequestAccess::new(pages, mode, keeps).with_window(window);
            let counters = Arc::new(QueueCounters::of(queue.engine()));
            let persistent = Arc::clone(pages.persistent());
            let (counted, totals) = (Arc::clone(&reports.rules), Arc::clone(&counters));
            let queue = BlkbackQueue::new(ring, terms, pages, queue, counted, totals);
            let failed = |what| move |source: io::Error| StartError::System { what, source };
            let (commands, mailbox) = mailbox().map_err(failed("an event file"))?;
            let worker = Worker {
                queue,
                channel,
                commands: mailbox,
                spin: Spin::new(options.spin_max),
                counters: Arc::clone(&counters),
                system: Arc::clone(&reports.system),
                drain_limit: options.drain_limit,
                pausing: None,
            };
            let in_use = Arc::new(());
            let thread = spawn(worker, Arc::clone(&in_use), reports.clone());
            let thread = Some(thread.map_err(failed("a thread"))?);
            back.queues.push(Running { thread, in_use, commands, counters, persistent, depth });
        }
        Ok(back)
    }

    /// Returns the number of requests found in the rings at start: left by an earlier backend, or posted
    /// before this one started.
    pub fn adopted(&self) -> u32 {
        self.adopted
    }

    /// Sets the share of their pages that the queues keep mapped under memory pressure.
    pub fn set_share(&self, share: Share) {
        let pages = bounded(share.of(self.kept_most.into(), KEPT_LEAST), u16::MAX);
        self.command(|| WorkerCommand::Keep(pages));
    }

    fn command(&self, command: impl Fn() -> WorkerCommand) {
        for queue in &self.queues {
            // A worker that ended needs no command.
            let _ = queue.commands.send(command());
        }
    }

    /// Stops all queues without waiting for them; see [`Blkback::is_over`].
    pub fn stop(&self) {
        self.command(|| WorkerCommand::Stop);
    }

    /// Begins to pause all queues: they answer the requests that they have consumed, and consume no others. `paused` is
    /// called when the pause is complete, on another thread; it must not block.
    pub fn pause(&self, paused: Arc<dyn Fn() + Send + Sync>) -> Pause {
        let token = Arc::new(PauseToken(paused));
        self.command(|| WorkerCommand::Pause(Arc::clone(&token)));
        Pause(Arc::downgrade(&token))
    }

    /// Continues all queues after a complete [`Blkback::pause`], on `disk`, whose sectors have the same size and which is
    /// no smaller.
    ///
    /// # Errors
    ///
    /// Returns the disk's error. All queues stay paused then.
    pub fn resume(&self, disk: &dyn Disk) -> io::Result<()> {
        let geometry = disk.geometry();
        let size = DiskSize { sectors: geometry.bytes / 512, skips_flush: !geometry.flush };
        let queues: io::Result<Vec<_>> =
            self.queues.iter().map(|queue| disk.queue(queue.depth)).collect();
        for (queue, of_disk) in self.queues.iter().zip(queues?) {
            // A worker that ended needs no queue.
            let _ = queue.commands.send(WorkerCommand::Resume(of_disk, size));
        }
        Ok(())
    }

    /// Returns `true` if every queue ended: nothing is in flight and no page of the guest is mapped.
    pub fn is_over(&self) -> bool {
        self.queues.iter().all(|queue| Arc::strong_count(&queue.in_use) == 1)
    }

    /// Iterates over the counters of each queue.
    pub fn counters(
        &self,
    ) -> impl Iterator<Item = (&Arc<QueueCounters>, &Arc<PersistentCounters>)> {
        self.queues.iter().map(|queue| (&queue.counters, &queue.persistent))
    }

    /// Returns `true` if the thread of every queue runs.
    pub fn is_alive(&self) -> bool {
        let alive = |queue: &Running| queue.thread.as_ref().is_some_and(|t| !t.is_finished());
        self.queues.iter().all(alive)
    }
}

fn spawn<G: Grantee + 'static, C: Channel + 'static>(
    worker: Worker<G, RingPages, C>,
    in_use: Arc<()>,
    QueueReports { rules, on_end, .. }: QueueReports,
) -> io::Result<JoinHandle<()>> {
    std::thread::Builder::new().name("blkback".into()).spawn(move || {
        // `run` consumes the worker: all that it holds is dropped inside.
        let run = std::panic::AssertUnwindSafe(|| worker.run());
        let ended = std::panic::catch_unwind(run).unwrap_or(Err(QueueFault::Panicked));
        if let Err(fault) = &ended {
            rules.count(fault.rule());
        }
        drop(in_use);
        on_end(ended.as_ref().err());
    })
}

impl Drop for Blkback {
    fn drop(&mut self) {
        // All workers stop at the same time; then each is joined.
        self.stop();
        for queue in &mut self.queues {
            if let Some(thread) = queue.thread.take() {
                // The thread catches its panics.
                let _ = thread.join();
            }
        }
    }
}
