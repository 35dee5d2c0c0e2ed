//! The frontend's end of a disk: a [`Disk`] like any other, whose storage is a backend.
//!
//! # Theory of operation
//!
//! There is a *lane* for each ring. Whoever has I/O to do takes a [`DiskQueue`] from the disk, which uses
//! one of the lanes, alone or with others. Requests are cut into pieces of what the backend takes at a
//! time, carried in pages that are lent to it, and answered when the last piece is. There is no thread:
//! posting is done by whoever kicks, and answers are found by whoever reaps, for itself and for the
//! others of its lane.
//!
//! **Pages.** With persistent grants the pages stay lent and are used last in, first out; the bytes are
//! copied between them and the requester's memory, and the backend finds them mapped. Else each is lent
//! for its request, in the way it needs, and taken back. That the backend does not keep them mapped is
//! no reason not to keep them lent. They are given back when told ([`FrontDisk::release_pages`]). Where
//! frontend and backend agree on windows, pages are those of the ring's window, which the frontend issues
//! and takes back alone, and of which it keeps fewer when told ([`FrontDisk::resize_windows`]).
//!
//! **The backend goes and comes back.** What was posted and not answered is kept, and posted on the next
//! connection in the order in which it was before; whoever asked notices nothing but the time. Nothing is
//! answered twice: a request is forgotten when its answer is taken. If no backend is to be waited for any
//! longer, the owner says so ([`FrontDisk::give_up`]), and what waits fails.
//!
//! **Durability.** A write that must survive a loss of power is a write and a flush behind it; a flush
//! is one of the backend's, or a barrier if that is all it has.
//!
//! **Distrust.** Answers to what was not asked, or in impossible numbers, end the connection. What a
//! backend writes into pages is the content of the disk, and as trustworthy as the disk.

// #syscall frontend epoll_create1,epoll_ctl,ppoll: the frontend of a disk waits

mod bytes;
mod completions;
mod handle;
mod lane;
mod pool;
mod windows;

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

pub use ringfence_access::window::SourceLevels;
use ringfence_platform::{Access, Channel, Granter, Gref, Lease, LendError, WindowHandle};
use ringfence_ring::{FrontRing, RingLayout, RingPages};
use ringfence_sys::rules::RuleCounters;
use ringfence_wire::blkif::{Abi, Rules, SEGMENTS_DIRECT, SEGMENTS_MAX};
use rustix::event::epoll;

use crate::storage::{Disk, DiskQueue, Geometry};
use completions::Completions;
use handle::Handle;
use lane::{Connection, FlushBy, Lane, Terms};
use pool::Pool;
pub(crate) use windows::{Window, WindowStock};

/// What the owner of a frontend decides about it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BlkfrontOptions {
    /// Most queues used.
    pub queues: u32,
    /// Highest order of a ring used.
    pub ring_order: u32,
    /// Pages stay lent from one request to the next.
    pub persistent: bool,
    /// Most pages lent at a time, by all queues together, beside the rings.
    pub pages: usize,
    /// Most segments of a request, if the backend takes as many.
    pub segments: u16,
    /// Pages of the window of each ring, if the backend opens them; 0: none.
    pub window: u32,
}

impl Default for BlkfrontOptions {
    fn default() -> BlkfrontOptions {
        BlkfrontOptions {
            queues: 1,
            ring_order: 0,
            persistent: true,
            // What a backend keeps mapped of a ring.
            pages: 1056,
            segments: SEGMENTS_MAX,
            window: 0,
        }
    }
}

/// The memory and the channel of a ring, before the backend knows of them.
pub struct RingSetup<G, C> {
    granter: G,
    ring: FrontRing<RingPages>,
    pages: Vec<Lease>,
    channel: C,
    window: Option<Window>,
}

impl<G: Granter, C: Channel> RingSetup<G, C> {
    /// Lends an empty ring of `pages` pages.
    ///
    /// # Errors
    ///
    /// [`LendError`]; what was lent before is taken back.
    pub fn new(mut granter: G, channel: C, pages: usize) -> Result<RingSetup<G, C>, LendError> {
        let mut leases: Vec<Lease> = Vec::with_capacity(pages);
        let mut lend = || {
            for _ in 0..pages {
                leases.push(granter.lend(Access::ReadWrite)?);
            }
            for lease in &leases {
                let zeroed = lease.memory().zero(0, lease.memory().len());
                zeroed.map_err(|_| LendError::NoPage { limit: 0 })?;
            }
            let abi = Abi::NATIVE;
            let (request, response) = (abi.request_bytes(), abi.response_bytes());
            let layout = RingLayout::new(pages * 4096, request, response, abi.alignment());
            let memory = leases.iter().map(|lease| lease.memory().clone()).collect();
            let memory = RingPages::paged(memory).ok();
            layout.zip(memory).ok_or(LendError::NoPage { limit: 0 })
        };
        match lend() {
            Ok((layout, memory)) => {
                let ring = FrontRing::init(memory, layout);
                Ok(RingSetup { granter, ring, pages: leases, channel, window: None })
            }
            Err(error) => {
                for lease in leases {
                    // The peer was not told of it.
                    let _ = granter.take_back(lease);
                }
                Err(error)
            }
        }
    }

    /// The same, with a window for the pages of its requests.
    #[must_use]
    pub(crate) fn with_window(self, window: Option<Window>) -> RingSetup<G, C> {
        RingSetup { window, ..self }
    }

    /// The name of its window.
    pub(crate) fn window(&self) -> Option<WindowHandle> {
        self.window.as_ref().and_then(Window::handle)
    }

    /// References of the ring's pages, in order.
    pub fn ring_refs(&self) -> Vec<Gref> {
        self.pages.iter().map(Lease::gref).collect()
    }

    /// The channel.
    pub fn channel(&self) -> &C {
        &self.channel
    }

    /// Takes the ring back, unused; what the peer holds on to comes back.
    pub fn give_up(self) -> Vec<Lease> {
        let RingSetup { granter, ring, pages, channel, window } = self;
        drop((ring, channel, window));
        Pool::new(granter, false, 0).close(pages)
    }
}

/// What a backend says of its disk and of itself.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Offer {
    /// The disk.
    pub geometry: Geometry,
    /// What it takes: `rules.flush`, `rules.barrier`, `rules.discard`, `rules.indirect_segments`.
    pub rules: Rules,
    /// The number of the disk in requests.
    pub handle: u16,
}

/// Why a connection cannot be used.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum AttachError {
    /// Not the disk that was there before.
    #[error(
        "the backend came back with a disk of {found} bytes in sectors of {found_sector}, before it were {bytes} in sectors of {sector}"
    )]
    OtherDisk {
        /// Bytes now.
        found: u64,
        /// Bytes of a sector now.
        found_sector: u32,
        /// Bytes before.
        bytes: u64,
        /// Bytes of a sector before.
        sector: u32,
    },
    /// Fewer rings than before: some requests would have none.
    #[error("the backend came back with {found} queues, before it had {lanes}")]
    FewerQueues {
        /// Queues now.
        found: usize,
        /// Queues before.
        lanes: usize,
    },
}

/// A lane as it is shared: with its lock.
type SharedLane<G, C> = Arc<Mutex<Lane<G, C>>>;

/// A disk that a backend serves. See the [module](self).
pub struct FrontDisk<G, C> {
    geometry: Geometry,
    options: BlkfrontOptions,
    lanes: Vec<SharedLane<G, C>>,
    watchers: Mutex<Watchers>,
    rules: Arc<RuleCounters>,
    on_broken: Arc<Notice>,
}

/// Whom to tell of a connection that is of no more use.
struct Notice(Mutex<OnBroken>);

/// Called by whoever does I/O, under a lock: it must not block, nor touch the disk.
pub type OnBroken = Arc<dyn Fn() + Send + Sync>;

impl Notice {
    fn give(&self) {
        let told = Arc::clone(&lock(&self.0));
        told();
    }
}

/// Which handle waits where, for connections to be watched by.
#[derive(Default)]
struct Watchers {
    next: usize,
    /// For each handle: its lane and what it waits with.
    handles: Vec<(usize, std::sync::Weak<handle::Waiting>)>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<G: Granter + 'static, C: Channel + 'static> FrontDisk<G, C> {
    /// A disk with a lane for each of `lanes` rings, not connected. `on_broken` is called when a
    /// connection is of no more use.
    pub fn new(
        offer: &Offer,
        options: BlkfrontOptions,
        lanes: usize,
        rules: Arc<RuleCounters>,
        on_broken: OnBroken,
    ) -> FrontDisk<G, C> {
        let lane = |_| Arc::new(Mutex::new(Lane::new(Arc::clone(&rules))));
        FrontDisk {
            // The zeros are written by this side.
            geometry: Geometry { write_zeroes: !offer.geometry.read_only, ..offer.geometry },
            options,
            lanes: (0..lanes.max(1)).map(lane).collect(),
            watchers: Mutex::default(),
            rules,
            on_broken: Arc::new(Notice(Mutex::new(on_broken))),
        }
    }

    /// Has somebody else told of connections that are of no more use.
    pub fn set_on_broken(&self, on_broken: OnBroken) {
        *lock(&self.on_broken.0) = on_broken;
    }

    /// Takes up a connection: a ring for each lane, in order. What waits is posted.
    ///
    /// # Errors
    ///
    /// [`AttachError`], and the rings.
    pub fn attach(
        &self,
        rings: Vec<RingSetup<G, C>>,
        offer: &Offer,
    ) -> Result<(), (AttachError, Vec<RingSetup<G, C>>)> {
        let Geometry { bytes: found, sector_size: found_sector, .. } = offer.geometry;
        let Geometry { bytes, sector_size: sector, .. } = self.geometry;
        if found < bytes || found_sector != sector {
            let error = AttachError::OtherDisk { found, found_sector, bytes, sector };
            return Err((error, rings));
        }
        let lanes = self.lanes.len();
        if rings.len() < lanes {
            return Err((AttachError::FewerQueues { found: rings.len(), lanes }, rings));
        }
        let indirect = offer.rules.indirect_segments.min(self.options.segments);
        let terms = Terms {
            handle: offer.handle,
            segments: SEGMENTS_DIRECT.max(indirect.into()),
            flush: match offer.rules {
                Rules { flush: true, .. } => FlushBy::Operation,
                Rules { barrier: true, .. } => FlushBy::Barrier,
                _ => FlushBy::Nothing,
            },
            discard: offer.rules.discard,
        };
        let limit = (self.options.pages / lanes).max(1);
        let watchers = lock(&self.watchers);
        for (number, (lane, setup)) in self.lanes.iter().zip(rings).enumerate() {
            let RingSetup { granter, ring, pages, channel, window } = setup;
            let pool = Pool::new(granter, self.options.persistent, limit).with_window(window);
            for (_, waiting) in watchers.handles.iter().filter(|(at, _)| *at == number) {
                if let Some(waiting) = waiting.upgrade() {
                    waiting.watch(&channel);
                }
            }
            let mut lane = lock(lane);
            let connection = Connection { ring, ring_pages: pages, channel, pool, terms };
            if lane.connect(connection).is_err() {
                lane.break_off();
                self.on_broken.give();
            }
            lane.owners().for_each(|owner| owner.wake.wake());
        }
        Ok(())
    }

    /// Gives the connection up. What was not answered waits for the next one; pages that the backend
    /// holds on to, and that cannot be taken by force, come back.
    pub fn detach(&self) -> Vec<Lease> {
        self.lanes.iter().flat_map(|lane| lock(lane).disconnect()).collect()
    }

    /// No backend will come: what waits fails, and so does what is asked for before there is one.
    pub fn give_up(&self) {
        for lane in &self.lanes {
            let mut lane = lock(lane);
            lane.give_up();
            lane.owners().for_each(|owner| owner.wake.wake());
        }
    }

    /// Takes back the pages that no request uses.
    pub fn release_pages(&self) {
        self.lanes.iter().for_each(|lane| lock(lane).release_pages());
    }

    /// Windows keep at most so many pages each from now on. What is too much and free goes back to the
    /// system at once, the rest when it is not in use any more.
    pub fn resize_windows(&self, most: u32) {
        self.lanes.iter().for_each(|lane| lock(lane).resize_window(most));
    }

    /// What is in the windows of all rings; `None` where there are none.
    pub fn window_levels(&self) -> Option<SourceLevels> {
        let levels = self.lanes.iter().filter_map(|lane| lock(lane).window_levels());
        levels.reduce(|mut sum, levels| {
            sum.add(levels);
            sum
        })
    }

    /// Pages lent now, beside the rings.
    pub fn lent_pages(&self) -> usize {
        self.lanes.iter().map(|lane| lock(lane).lent()).sum()
    }

    /// Whether there is a connection.
    pub fn is_attached(&self) -> bool {
        self.lanes.iter().all(|lane| lock(lane).connection().is_some())
    }

    /// Lanes there are.
    pub fn lanes(&self) -> usize {
        self.lanes.len()
    }

    /// What the backend did wrong, by rule.
    pub fn rules(&self) -> &Arc<RuleCounters> {
        &self.rules
    }
}

impl<G: Granter + 'static, C: Channel + 'static> Disk for FrontDisk<G, C> {
    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn queue(&self, _depth: u32) -> io::Result<Box<dyn DiskQueue>> {
        let completions = Arc::new(Completions::new()?);
        let waiting = Arc::new(handle::Waiting::new(epoll::create(epoll::CreateFlags::CLOEXEC)?));
        waiting.watch(&completions.wake);
        let mut watchers = lock(&self.watchers);
        let number = watchers.next % self.lanes.len();
        watchers.next = watchers.next.wrapping_add(1);
        watchers.handles.retain(|(_, waiting)| waiting.strong_count() > 0);
        watchers.handles.push((number, Arc::downgrade(&waiting)));
        let lane = Arc::clone(&self.lanes[number]);
        let mut locked = lock(&lane);
        if let Some(connection) = locked.connection() {
            waiting.watch(&connection.channel);
        }
        let owner = locked.enter(Arc::clone(&completions));
        drop(locked);
        let on_broken = Arc::clone(&self.on_broken);
        Ok(Box::new(Handle::new(lane, self.geometry, owner, completions, waiting, on_broken)))
    }
}
