//! The backend's end of a disk.
//!
//! # Theory of operation
//!
//! Each ring has a thread, which owns everything it needs: the ring, the way to the guest's pages, a
//! queue to the disk. It goes rounds: takes the requests there are, judges each after one copy (the
//! descriptors of an indirect one likewise), reaches the pages they name, hands them to the disk in one
//! go, and answers what is done. When there is nothing to do it polls for as long as experience says
//! that it pays, and then sleeps until the channel, the disk or the owner has something to say.
//!
//! # Order, latency, and what a crash leaves
//!
//! Requests go to the disk as they come and are answered as they are done, so that a slow one costs
//! nobody else anything. Three rules keep that safe:
//!
//! * **What is not answered is in the ring.** A daemon that is killed leaves behind requests that it
//!   took; its successor must find each of them, once. Answering in the order of the ring would see to
//!   that, at the price that everything waits for the slowest: at a depth of 32 on a disk whose latency
//!   varies, most requests would wait for another. Instead the oldest unanswered request moves into the
//!   slot that an answer vacates ([`ringfence_ring::AnyOrderRing`]), which costs a copy of 112 bytes,
//!   and only where an answer is out of order.
//! * **A replay does not undo what was acknowledged.** A write is not begun while an earlier one in the
//!   same ring touches the same sectors. So when a write is answered, no unanswered write in front of it
//!   could put older bytes in its place when it is done once more. (Guests do not issue such writes:
//!   the check is a look at a short list.)
//! * **A flush covers what was answered before it was posted**, which is all a guest may count on;
//!   a barrier waits until it is alone, and holds up all behind it. Neither moves across the other,
//!   since no request behind a barrier is taken off the ring before it is answered.
//!
//! What a killed daemon's kernel still carries out of its I/O is the storage's to fence off.
//!
//! # Pages
//!
//! | [`Mode`] | per request | what the disk works on |
//! |---|---|---|
//! | `map` | a map, an unmap | the guest's pages |
//! | `persistent` | a look-up ([`ringfence_access::persistent`]) | the guest's pages |
//! | `window` | an index ([`ringfence_platform::window`]) | the guest's pages |
//! | `copy` | a copy element a segment | private memory |
//!
//! In all but the last the guest can change bytes while the disk works on them. A request lets go of its
//! pages before it is answered, for then the guest takes them back.
//!
//! # What a guest can do to others
//!
//! A request that breaks a rule is answered and counted by its rule. A ring that cannot be right, or a
//! channel that closes, ends the queue: the owner is told, and closes that device. Requests in flight
//! are waited for before anything is unmapped.

mod bounce;
mod counters;
mod job;
mod pages;
mod penalty;
mod queue;
mod worker;

use core::fmt;
use core::str::FromStr;
use core::time::Duration;
use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;

pub use counters::{QueueCounters, named_persistent};
pub use ringfence_access::persistent::{PersistentCounters, PersistentLimits};
use ringfence_platform::{Channel, Counters, Grantee, WindowView};
use ringfence_ring::{AnyOrderRing, ProducerOverflow, RingLayout, RingPages};
use ringfence_sys::mailbox::{MailSender, mailbox};
use ringfence_sys::pace::Spin;
use ringfence_sys::rules::RuleCounters;
use ringfence_wire::blkif::{Abi, Rules, SEGMENTS_MAX};
pub use worker::QueueFault;

use crate::storage::{Disk, Geometry};
use pages::Pages;
use queue::{Queue, Terms};
use worker::{Worker, WorkerCommand};

/// How a guest's pages are reached.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Mode {
    /// Each page is mapped for its request and unmapped behind it.
    Map,
    /// The platform copies; nothing is mapped.
    Copy,
    /// Pages stay mapped, if the frontend uses the same ones again; else as [`Mode::Map`].
    Persistent,
    /// Pages of the frontend's windows are looked up; others are as in [`Mode::Persistent`].
    Window,
}

impl Mode {
    /// All of them.
    pub const ALL: [Mode; 4] = [Mode::Map, Mode::Copy, Mode::Persistent, Mode::Window];

    /// The name used on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Mode::Map => "map",
            Mode::Copy => "copy",
            Mode::Persistent => "persistent",
            Mode::Window => "window",
        }
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A word that names no mode.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("`{0}` is no mode; there are map, copy, persistent and window")]
pub struct UnknownMode(String);

impl FromStr for Mode {
    type Err = UnknownMode;

    fn from_str(word: &str) -> Result<Mode, UnknownMode> {
        let found = Mode::ALL.into_iter().find(|mode| mode.name() == word);
        found.ok_or_else(|| UnknownMode(word.chars().take(32).collect()))
    }
}

/// What the owner of a backend decides about it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BlkbackOptions {
    /// How pages are reached.
    pub mode: Mode,
    /// What is kept of them in [`Mode::Persistent`].
    pub persistent: PersistentLimits,
    /// Most queues offered.
    pub queues: u32,
    /// Highest order of a ring offered.
    pub ring_order: u32,
    /// Most segments of an indirect request offered; 0 for none.
    pub indirect_segments: u16,
    /// The longest time to go on polling after the last work.
    pub spin_max: Duration,
    /// The longest time to wait for a disk when a device is closed.
    pub drain_limit: Duration,
}

impl Default for BlkbackOptions {
    fn default() -> BlkbackOptions {
        let processors = std::thread::available_parallelism().map_or(1, |n| n.get());
        BlkbackOptions {
            mode: Mode::Persistent,
            persistent: PersistentLimits::default(),
            queues: u32::try_from(processors).unwrap_or(1).clamp(1, 4),
            ring_order: ringfence_wire::blkif::RING_ORDER_MAX,
            indirect_segments: SEGMENTS_MAX,
            // Polling on the only processor keeps the peer from doing what is polled for.
            spin_max: if processors == 1 { Duration::ZERO } else { Duration::from_micros(50) },
            drain_limit: Duration::from_secs(30),
        }
    }
}

/// What a queue is made of.
pub struct QueueParts<G, C> {
    /// The mapped ring.
    pub ring: RingPages,
    /// Pages of the ring.
    pub ring_pages: usize,
    /// The channel.
    pub channel: C,
    /// The guest's pages.
    pub pages: G,
    /// The window that the guest made for this ring.
    pub window: Option<WindowView>,
}

/// How both ends agreed to talk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Agreement {
    /// The frontend's layout of requests.
    pub abi: Abi,
    /// Pages are kept mapped.
    pub persistent: bool,
    /// What requests are judged by.
    pub rules: Rules,
}

/// Why a device cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The frontend's ring cannot be right.
    #[error(transparent)]
    Ring(#[from] ProducerOverflow),
    /// A ring of so many pages holds no entry.
    #[error("a ring of {0} pages cannot be used")]
    RingSize(usize),
    /// The system refused.
    #[error("{what}: {source}")]
    System {
        /// What was attempted.
        what: &'static str,
        /// Why not.
        source: io::Error,
    },
}

/// Told, on a queue's thread, that the queue ended and holds nothing any more: why, if it was not asked
/// to. It must not block.
pub type OnEnd = Arc<dyn Fn(Option<&QueueFault>) + Send + Sync>;

struct Running {
    thread: Option<JoinHandle<()>>,
    /// The thread has another one while it holds anything.
    holds: Arc<()>,
    commands: MailSender<WorkerCommand>,
    counters: Arc<QueueCounters>,
    persistent: Arc<PersistentCounters>,
}

/// A device that is served: a thread for each ring. Dropping it stops them, waits for what is in flight,
/// and unmaps all that is mapped.
pub struct Blkback {
    queues: Vec<Running>,
    adopted: u32,
}

/// What requests are judged by, on a disk like that.
pub fn rules_for(geometry: &Geometry, options: &BlkbackOptions) -> Rules {
    Rules {
        sectors: geometry.bytes / 512,
        sector_size: geometry.sector_size,
        read_only: geometry.read_only,
        flush: geometry.flush,
        barrier: !geometry.read_only,
        discard: geometry.discard.is_some() && !geometry.read_only,
        indirect_segments: options.indirect_segments,
    }
}

impl Blkback {
    /// Serves the rings of `parts` from `disk`. What the guest does wrong is counted in `rules`, system
    /// calls and wake-ups in `system`.
    ///
    /// # Errors
    ///
    /// [`StartError`]; queues that were started are stopped.
    pub fn start<G, C>(
        parts: Vec<QueueParts<G, C>>,
        disk: &Arc<dyn Disk>,
        (options, agreement): (&BlkbackOptions, &Agreement),
        (rules, system): (&Arc<RuleCounters>, &Arc<Counters>),
        on_end: &OnEnd,
    ) -> Result<Blkback, StartError>
    where
        G: Grantee + 'static,
        C: Channel + 'static,
    {
        let mut back = Blkback { queues: Vec::with_capacity(parts.len()), adopted: 0 };
        let skips_flush = !disk.geometry().flush;
        let terms = Terms { abi: agreement.abi, rules: agreement.rules, skips_flush };
        for QueueParts { ring, ring_pages, channel, pages, window } in parts {
            let abi = agreement.abi;
            let bytes = ring_pages * ringfence_memory::PAGE_SIZE;
            let layout =
                RingLayout::new(bytes, abi.request_bytes(), abi.response_bytes(), abi.alignment());
            let layout = layout.ok_or(StartError::RingSize(ring_pages))?;
            let (ring, attached) = AnyOrderRing::attach(ring, layout, abi.response_bytes())?;
            back.adopted += attached.unanswered + u32::from(attached.finished);
            let queue = disk.queue(layout.count());
            let queue = queue.map_err(|source| StartError::System { what: "a disk", source })?;
            // One that took over from another is bound by what that one told.
            let mode = if window.is_some() { Mode::Window } else { options.mode };
            let may_keep = matches!(mode, Mode::Persistent | Mode::Window);
            let keeps = (agreement.persistent && may_keep).then_some(options.persistent);
            let pages = Pages::new(pages, mode, keeps, window);
            let counters = Arc::new(QueueCounters::default());
            let persistent = Arc::clone(pages.persistent());
            let both = (Arc::clone(rules), Arc::clone(&counters));
            let queue = Queue::new(ring, terms, pages, queue, both);
            let failed = |what| move |source: io::Error| StartError::System { what, source };
            let (commands, mailbox) = mailbox().map_err(failed("an event file"))?;
            let worker = Worker {
                queue,
                channel,
                commands: mailbox,
                spin: Spin::new(options.spin_max),
                counters: Arc::clone(&counters),
                system: Arc::clone(system),
                drain_limit: options.drain_limit,
            };
            let holds = Arc::new(());
            let ending = Ending { on_end: Arc::clone(on_end), rules: Arc::clone(rules) };
            let thread = spawn(worker, Arc::clone(&holds), ending);
            let thread = Some(thread.map_err(failed("a thread"))?);
            back.queues.push(Running { thread, holds, commands, counters, persistent });
        }
        Ok(back)
    }

    /// Requests that were found in the rings, taken over from a backend before this one or posted
    /// before this one began.
    pub fn adopted(&self) -> u32 {
        self.adopted
    }

    /// Lets go of all pages that are kept and not in use: memory is short.
    pub fn shrink(&self) {
        self.command(WorkerCommand::Shrink);
    }

    fn command(&self, command: WorkerCommand) {
        for queue in &self.queues {
            // A worker that ended needs no command.
            let _ = queue.commands.send(command);
        }
    }

    /// Tells all queues to end, and does not wait until they did ([`Blkback::is_over`]).
    pub fn stop(&self) {
        self.command(WorkerCommand::Stop);
    }

    /// Whether every queue ended: nothing is in flight, and nothing of the guest's is mapped.
    pub fn is_over(&self) -> bool {
        self.queues.iter().all(|queue| Arc::strong_count(&queue.holds) == 1)
    }

    /// The counters of each queue.
    pub fn counters(
        &self,
    ) -> impl Iterator<Item = (&Arc<QueueCounters>, &Arc<PersistentCounters>)> {
        self.queues.iter().map(|queue| (&queue.counters, &queue.persistent))
    }

    /// Whether every queue is served.
    pub fn is_alive(&self) -> bool {
        let alive = |queue: &Running| queue.thread.as_ref().is_some_and(|t| !t.is_finished());
        self.queues.iter().all(alive)
    }
}

/// What is done when a queue ends.
struct Ending {
    on_end: OnEnd,
    rules: Arc<RuleCounters>,
}

fn spawn<G: Grantee + 'static, C: Channel + 'static>(
    worker: Worker<G, RingPages, C>,
    holds: Arc<()>,
    Ending { on_end, rules }: Ending,
) -> io::Result<JoinHandle<()>> {
    std::thread::Builder::new().name("blkback".into()).spawn(move || {
        // It consumes itself: whatever it holds is dropped in there.
        let run = std::panic::AssertUnwindSafe(|| worker.run());
        let ended = std::panic::catch_unwind(run).unwrap_or(Err(QueueFault::Panicked));
        if let Err(fault) = &ended {
            rules.count(fault.rule());
        }
        drop(holds);
        on_end(ended.as_ref().err());
    })
}

impl Drop for Blkback {
    fn drop(&mut self) {
        // All at once, then one after the other.
        self.stop();
        for queue in &mut self.queues {
            if let Some(thread) = queue.thread.take() {
                // It catches its own panics.
                let _ = thread.join();
            }
        }
    }
}
