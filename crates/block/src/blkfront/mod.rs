//! Frontend of a disk (blkfront): a [`Disk`] whose storage is a backend in another domain.
//!
//! # Theory of operation
//!
//! Each ring is a *lane*. A user takes a [`DiskQueue`] from the disk, which uses one lane, alone or with
//! others. Requests are cut into pieces of the size that the backend accepts, carried in pages lent to it,
//! and completed with the last piece. There is no thread: `kick` posts requests, and `reap` polls the ring
//! for all handles of the lane.
//!
//! **Pages.** With persistent grants, pages stay lent and are reused last in, first out; data is copied
//! between them and the requester's memory. Otherwise each page is lent for one request and revoked
//! after it. Pages stay lent even if the backend does not keep them mapped.
//! [`FrontDisk::release_pages`] revokes the idle ones. If frontend and backend agree on grant windows,
//! pages come from the ring's window, which the frontend fills and revokes alone;
//! [`FrontDisk::set_share`] bounds its pages.
//!
//! **Reconnect.** Unanswered requests are kept when the backend disconnects, and posted on the next
//! connection in their order. The requester notices only the delay. No request is completed twice. If no
//! backend will follow, the owner calls [`FrontDisk::give_up`], and the waiting requests fail.
//!
//! **Durability.** A write with FUA becomes a write followed by a flush. A flush becomes a flush request,
//! or a barrier if the backend has only that.
//!
//! **Trust.** A response to no request, or an impossible number of responses, ends the connection. Data
//! that the backend writes into pages is as trustworthy as the disk.

// #syscall frontend,daemon epoll_create1,epoll_ctl,ppoll: the frontend of a disk waits

mod broken;
mod bytes;
mod completions;
mod handle;
mod lane;
mod pool;

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

pub use ringfence_access::window::SourceLevels;
use ringfence_access::window::{Revocation, RingWindow};
use ringfence_platform::{Access, Channel, Granter, Gref, Lease, LendError, WindowName};
use ringfence_ring::{FrontRing, RingLayout, RingPages};
use ringfence_sys::pressure::Share;
use ringfence_sys::rules::RuleCounters;
use ringfence_wire::blkif::{Abi, Rules, SEGMENTS_DIRECT, SEGMENTS_MAX};
use rustix::event::epoll;

use crate::storage::{Disk, DiskQueue, Geometry};
use completions::Completions;
use handle::Handle;
use lane::{FlushBy, Lane, LaneConnection, LaneTerms};
use pool::LentPool;

/// Queues, pages and segments that blkfront uses at most, and its grant windows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BlkfrontOptions {
    /// Maximum number of queues used.
    pub queues: u32,
    /// Maximum ring page order used.
    pub ring_order: u32,
    /// Pages stay lent between requests.
    pub persistent: bool,
    /// Maximum number of pages lent at a time by all queues, without the ring pages.
    pub pages: usize,
    /// Maximum number of segments of a request, if the backend accepts as many.
    pub segments: u16,
    /// Pages of the grant window of each ring, if the backend opens windows; 0 for none.
    pub window: u32,
    /// Time at which the content of revoked pages of these windows leaves the backend's reach.
    pub revocation: Revocation,
}

impl Default for BlkfrontOptions {
    fn default() -> BlkfrontOptions {
        BlkfrontOptions {
            queues: 1,
            ring_order: 0,
            persistent: true,
            // Number of pages that a backend keeps mapped for a ring.
            pages: 1056,
            segments: SEGMENTS_MAX,
            window: 0,
            revocation: Revocation::Plain,
        }
    }
}

/// Memory and event channel of a ring that is not yet announced to the backend.
pub struct RingSetup<G, C> {
    granter: G,
    ring: FrontRing<RingPages>,
    pages: Vec<Lease>,
    channel: C,
    window: Option<RingWindow>,
}

impl<G: Granter, C: Channel> RingSetup<G, C> {
    /// Lends the pages of an empty ring.
    ///
    /// # Errors
    ///
    /// Returns [`LendError`]; pages lent before are revoked.
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
                    // The peer never learned the reference.
                    let _ = granter.take_back(lease);
                }
                Err(error)
            }
        }
    }

    /// Adds a grant window for the pages of requests.
    #[must_use]
    pub(crate) fn with_window(self, window: Option<RingWindow>) -> RingSetup<G, C> {
        RingSetup { window, ..self }
    }

    /// Returns the name of the grant window.
    pub(crate) fn window(&self) -> Option<WindowName> {
        self.window.as_ref().and_then(RingWindow::name)
    }

    /// Returns the grant references of the ring's pages, in order.
    pub fn ring_refs(&self) -> Vec<Gref> {
        self.pages.iter().map(Lease::gref).collect()
    }

    /// Returns the event channel.
    pub fn channel(&self) -> &C {
        &self.channel
    }

    /// Revokes the unused ring. Returns the pages that the peer holds.
    pub fn give_up(self) -> Vec<Lease> {
        let RingSetup { granter, ring, pages, channel, window } = self;
        drop((ring, channel, window));
        LentPool::new(granter, false, 0).close(pages)
    }
}

/// Disk and features that a backend announces.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Offer {
    pub geometry: Geometry,
    /// Features: `rules.flush`, `rules.barrier`, `rules.discard`, `rules.extents`, `rules.write_zeroes`,
    /// `rules.indirect_segments`.
    pub rules: Rules,
    /// Device number in requests.
    pub handle: u16,
}

/// Reasons for which a connection cannot be used.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum AttachError {
    /// Disk is smaller than before or has another sector size.
    #[error(
        "the backend came back with a disk of {found} bytes in sectors of {found_sector}, before it were {bytes} in sectors of {sector}"
    )]
    OtherDisk {
        /// Size in bytes now.
        found: u64,
        /// Sector size in bytes now.
        found_sector: u32,
        /// Size in bytes before.
        bytes: u64,
        /// Sector size in bytes before.
        sector: u32,
    },
    /// Fewer rings than lanes: some requests would have no ring.
    #[error("the backend came back with {found} queues, before it had {lanes}")]
    FewerQueues {
        /// Number of queues now.
        found: usize,
        /// Number of queues before.
        lanes: usize,
    },
}

/// Lane shared by its handles.
type SharedLane<G, C> = Arc<Mutex<Lane<G, C>>>;

/// Disk served by a backend. See the [module](self).
pub struct FrontDisk<G, C> {
    /// Properties of the disk, without its size.
    geometry: Geometry,
    size: Arc<CurrentSize>,
    options: BlkfrontOptions,
    lanes: Vec<SharedLane<G, C>>,
    /// Share of their pages that the pools of the lanes keep.
    share: Mutex<Share>,
    watchers: Mutex<Watchers>,
    rules: Arc<RuleCounters>,
    on_broken: Arc<BrokenCallback>,
}

/// Size of a disk in bytes, which grows while it is in use.
struct CurrentSize(Mutex<u64>);

/// Geometry of a disk as one of its users knows it.
struct KnownGeometry {
    geometry: Geometry,
    current: Arc<CurrentSize>,
}

impl CurrentSize {
    fn of(self: Arc<Self>, geometry: Geometry) -> KnownGeometry {
        KnownGeometry { geometry: Geometry { bytes: self.get(), ..geometry }, current: self }
    }

    fn get(&self) -> u64 {
        *lock(&self.0)
    }

    /// Accepts a larger size. Returns `false` for every other one.
    fn grow(&self, bytes: u64) -> bool {
        let mut size = lock(&self.0);
        let is_larger = bytes > *size;
        *size = bytes.max(*size);
        is_larger
    }
}

/// Callback for connections that broke a rule.
struct BrokenCallback(Mutex<OnBroken>);

/// Callback of a broken connection. It runs on the thread that does I/O, under a lock: it must not block
/// or use the disk.
pub type OnBroken = Arc<dyn Fn() + Send + Sync>;

impl BrokenCallback {
    fn call(&self) {
        let told = Arc::clone(&lock(&self.0));
        told();
    }
}

/// Handles and the lanes they use, for the channels of new connections.
#[derive(Default)]
struct Watchers {
    next: usize,
    /// Lane number and epoll file of each handle.
    handles: Vec<(usize, std::sync::Weak<handle::Waiting>)>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<G: Granter + 'static, C: Channel + 'static> FrontDisk<G, C> {
    /// Creates a disk with `lanes` lanes that is not connected. `on_broken` is called when a connection broke
    /// a rule.
    pub fn new(
        offer: &Offer,
        options: BlkfrontOptions,
        lanes: usize,
        rules: Arc<RuleCounters>,
        on_broken: OnBroken,
    ) -> FrontDisk<G, C> {
        let lane = |_| Arc::new(Mutex::new(Lane::new(Arc::clone(&rules))));
        FrontDisk {
            // Where the backend cannot, this side writes the zeros.
            geometry: Geometry { write_zeroes: !offer.geometry.read_only, ..offer.geometry },
            size: Arc::new(CurrentSize(Mutex::new(offer.geometry.bytes))),
            options,
            lanes: (0..lanes.max(1)).map(lane).collect(),
            share: Mutex::default(),
            watchers: Mutex::default(),
            rules,
            on_broken: Arc::new(BrokenCallback(Mutex::new(on_broken))),
        }
    }

    /// Replaces the callback for broken connections.
    pub fn set_on_broken(&self, on_broken: OnBroken) {
        *lock(&self.on_broken.0) = on_broken;
    }

    /// Installs a connection with one ring for each lane, in order, and posts waiting requests.
    ///
    /// # Errors
    ///
    /// Returns [`AttachError`] and the rings.
    pub fn attach(
        &self,
        rings: Vec<RingSetup<G, C>>,
        offer: &Offer,
    ) -> Result<(), (AttachError, Vec<RingSetup<G, C>>)> {
        let Geometry { bytes: found, sector_size: found_sector, .. } = offer.geometry;
        let Geometry { bytes, sector_size: sector, .. } = self.geometry();
        if found < bytes || found_sector != sector {
            let error = AttachError::OtherDisk { found, found_sector, bytes, sector };
            return Err((error, rings));
        }
        let lanes = self.lanes.len();
        if rings.len() < lanes {
            return Err((AttachError::FewerQueues { found: rings.len(), lanes }, rings));
        }
        let indirect = offer.rules.indirect_segments.min(self.options.segments);
        let terms = LaneTerms {
            handle: offer.handle,
            segments: SEGMENTS_DIRECT.max(indirect.into()),
            flush: match offer.rules {
                Rules { flush: true, .. } => FlushBy::Operation,
                Rules { barrier: true, .. } => FlushBy::Barrier,
                _ => FlushBy::Nothing,
            },
            discard: offer.rules.discard,
            extents: offer.rules.extents,
            write_zeroes: offer.rules.write_zeroes,
        };
        let limit = (self.options.pages / lanes).max(1);
        let watchers = lock(&self.watchers);
        for (number, (lane, setup)) in self.lanes.iter().zip(rings).enumerate() {
            let RingSetup { granter, ring, pages, channel, window } = setup;
            let mut pool = LentPool::new(granter, self.options.persistent, limit)
                .with_window(window, self.options.window);
            pool.set_share(*lock(&self.share));
            for (_, waiting) in watchers.handles.iter().filter(|(at, _)| *at == number) {
                if let Some(waiting) = waiting.upgrade() {
                    waiting.watch(&channel);
                }
            }
            let mut lane = lock(lane);
            let connection = LaneConnection { ring, ring_pages: pages, channel, pool, terms };
            if lane.connect(connection).is_err() {
                lane.break_off();
                self.on_broken.call();
            }
            lane.owners().for_each(|owner| owner.wake.wake());
        }
        self.size.grow(found);
        Ok(())
    }

    /// Accepts a larger size that the backend announces while it is connected. Returns `true` if the disk is larger than
    /// before; a size that is smaller, or no multiple of its sectors, changes nothing.
    pub fn grow(&self, bytes: u64) -> bool {
        bytes.is_multiple_of(self.geometry.sector_size.into()) && self.size.grow(bytes)
    }

    /// Ends the connection. Unanswered requests wait for the next one. Returns the pages that the backend
    /// holds and that cannot be revoked by force.
    pub fn detach(&self) -> Vec<Lease> {
        self.lanes.iter().flat_map(|lane| lock(lane).disconnect()).collect()
    }

    /// Fails all waiting requests, and those submitted before the next connection.
    pub fn give_up(&self) {
        for lane in &self.lanes {
            let mut lane = lock(lane);
            lane.give_up();
            lane.owners().for_each(|owner| owner.wake.wake());
        }
    }

    /// Revokes the pages that no request uses.
    pub fn release_pages(&self) {
        self.lanes.iter().for_each(|lane| lock(lane).release_pages());
    }

    /// Sets the share of their pages that the pools of all lanes keep under memory pressure, grant windows and lent pages alike.
    /// Surplus idle pages are freed at once, others after their use.
    pub fn set_share(&self, share: Share) {
        *lock(&self.share) = share;
        self.lanes.iter().for_each(|lane| lock(lane).set_share(share));
    }

    /// Returns the fill levels of all windows together, or `None` without windows.
    pub fn window_levels(&self) -> Option<SourceLevels> {
        let levels = self.lanes.iter().filter_map(|lane| lock(lane).window_levels());
        levels.reduce(|mut sum, levels| {
            sum.add(levels);
            sum
        })
    }

    /// Returns the number of pages lent by ordinary grants, without the ring pages.
    pub fn lent_pages(&self) -> usize {
        self.lanes.iter().map(|lane| lock(lane).lent()).sum()
    }

    /// Returns `true` if all lanes are connected.
    pub fn is_attached(&self) -> bool {
        self.lanes.iter().all(|lane| lock(lane).connection().is_some())
    }

    /// Returns the number of lanes.
    pub fn lanes(&self) -> usize {
        self.lanes.len()
    }

    /// Returns the counters of rules that the backend broke.
    pub fn rules(&self) -> &Arc<RuleCounters> {
        &self.rules
    }
}

impl<G: Granter + 'static, C: Channel + 'static> Disk for FrontDisk<G, C> {
    fn geometry(&self) -> Geometry {
        Geometry { bytes: self.size.get(), ..self.geometry }
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
        let owner = locked.register(Arc::clone(&completions));
        drop(locked);
        let on_broken = Arc::clone(&self.on_broken);
        let geometry = Arc::clone(&self.size).of(self.geometry);
        Ok(Box::new(Handle::new(lane, geometry, owner, completions, waiting, on_broken)))
    }
}
