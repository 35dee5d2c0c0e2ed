//! The backend's side of the handshake.

mod described;
mod silence;
mod windows;

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use ringfence_platform::rules::RuleCounters;
use ringfence_platform::store::{StoreAccess, StoreClient, StoreError};
use ringfence_platform::xenbus::end::{BackendEnd, Life, STEPS_MAX, is_about_a_key};
use ringfence_platform::xenbus::steps::{BackendStep, backend_step};
use ringfence_platform::{
    Access, EventPort, GrantStatus, Grantee, Gref, Platform, PlatformError, WindowError,
};
use ringfence_ring::RingPages;
use ringfence_wire::blkif::{Abi, INFO_READ_ONLY, INFO_REMOVABLE, RING_ORDER_MAX, keys};
use ringfence_wire::decimal;
use ringfence_wire::xenbus::{DeviceId, XenbusState};

use self::silence::Silence;
use super::QUEUES_MAX;
use crate::blkback::{
    Agreement, Blkback, BlkbackOptions, Mode, OnEnd, QueueParts, StartError, rules_for,
};
use crate::storage::{Disk, Geometry};

/// Why a frontend that says it is ready cannot be connected. Costs that device.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// A key is missing or unusable.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The frontend's pages cannot be reached.
    #[error(transparent)]
    Arena(PlatformError),
    /// An event channel cannot be bound.
    #[error("event channel port {port} cannot be bound: {source}")]
    Channel {
        /// The port the frontend named.
        port: u32,
        /// Why not.
        source: PlatformError,
    },
    /// A layout of requests that nobody knows.
    #[error("the frontend's protocol is none that is known")]
    Protocol,
    /// More queues than were offered, or none.
    #[error("the frontend wants {wanted} queues, {limit} were offered")]
    Queues {
        /// Wanted.
        wanted: u32,
        /// Offered.
        limit: u32,
    },
    /// A larger ring than was offered, or no power of two.
    #[error("the frontend wants rings of {wanted} pages, {limit} were offered")]
    RingPages {
        /// Wanted.
        wanted: u32,
        /// Offered.
        limit: u32,
    },
    /// A ring cannot be mapped.
    #[error("page {page} of ring {queue}, reference {gref}, cannot be mapped: {status}")]
    Ring {
        /// Which queue.
        queue: u32,
        /// Which page of its ring.
        page: usize,
        /// Its reference.
        gref: Gref,
        /// Why not.
        status: GrantStatus,
    },
    /// A window that it named is of no use.
    #[error("the window of ring {queue} cannot be used: {source}")]
    Window {
        /// Which queue.
        queue: u32,
        /// Why not.
        source: WindowError,
    },
    /// The pages are no ring.
    #[error("the pages of a ring are unusable: {0}")]
    RingMemory(#[from] ringfence_memory::OutOfRange),
    /// It cannot be served.
    #[error(transparent)]
    Start(#[from] StartError),
}

impl ConnectError {
    /// A constant name, for counters.
    pub fn rule(&self) -> &'static str {
        match self {
            ConnectError::Store(StoreError::Number { .. }) => "connect_not_a_number",
            ConnectError::Store(_) => "connect_missing_key",
            ConnectError::Arena(PlatformError::BadArena { why, .. }) => why.kind(),
            ConnectError::Arena(_) => "connect_no_arena",
            ConnectError::Channel { .. } => "connect_bad_port",
            ConnectError::Protocol => "connect_unknown_protocol",
            ConnectError::Queues { .. } => "connect_too_many_queues",
            ConnectError::RingPages { .. } => "connect_ring_size",
            ConnectError::Ring { .. } => "connect_ring_grant",
            ConnectError::Window { source: WindowError::NoSuchWindow { .. }, .. } => {
                "connect_no_such_window"
            }
            ConnectError::Window { source: WindowError::TooLarge { .. }, .. } => {
                "connect_window_too_large"
            }
            ConnectError::Window { .. } => "connect_window",
            ConnectError::RingMemory(_) => "connect_ring_page",
            ConnectError::Start(StartError::Ring(_)) => "connect_ring_index",
            ConnectError::Start(_) => "connect_not_served",
        }
    }
}

/// How a device that is in use was connected.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Connection {
    /// The frontend's layout of requests.
    pub abi: Abi,
    /// Pages are kept mapped.
    pub persistent: bool,
    /// Pages are in windows of the frontend's.
    pub windows: bool,
    /// Queues.
    pub queues: u32,
    /// Pages of each ring.
    pub ring_pages: u32,
    /// Whether it was taken over from a backend before this one, without the frontend's noticing.
    pub adopted: bool,
}

/// One vbd, from the backend's side.
///
/// Its disk may be there from the beginning, or come later: without one the frontend is told that there
/// is a backend, and kept waiting.
pub struct VbdBackend {
    end: BackendEnd,
    options: BlkbackOptions,
    /// What holds from the next announcement on.
    next: BlkbackOptions,
    disk: Option<Arc<dyn Disk>>,
    /// This value wrote the keys that the frontend reads.
    announced: bool,
    served: Option<(Blkback, Connection)>,
    /// This value served it once: what it finds connected is not of a backend before it.
    has_served: bool,
    silence: Silence,
    /// It finishes what it began; until it did, no state changes.
    leaving: Option<Blkback>,
    fault: Arc<Mutex<Option<String>>>,
    wake: Arc<dyn Fn() + Send + Sync>,
}

impl VbdBackend {
    /// A backend for a device that a toolstack made, which serves `disk`. `wake` is called, on another
    /// thread, when a look is due because a queue ended; it must not block.
    pub fn new(
        device: DeviceId,
        options: BlkbackOptions,
        disk: Arc<dyn Disk>,
        wake: Arc<dyn Fn() + Send + Sync>,
    ) -> VbdBackend {
        let mut backend = VbdBackend::without_disk(device, options, wake);
        backend.disk = Some(disk);
        backend
    }

    /// The same, of which the disk is yet to come ([`VbdBackend::set_disk`]).
    pub fn without_disk(
        device: DeviceId,
        options: BlkbackOptions,
        wake: Arc<dyn Fn() + Send + Sync>,
    ) -> VbdBackend {
        VbdBackend {
            end: BackendEnd::new(device),
            options,
            next: options,
            disk: None,
            announced: false,
            served: None,
            has_served: false,
            silence: Silence::No,
            leaving: None,
            fault: Arc::default(),
            wake,
        }
    }

    /// What is served from the next connection on; `None`: a frontend is kept waiting. A look is due.
    pub fn set_disk(&mut self, disk: Option<Arc<dyn Disk>>) {
        self.disk = disk;
    }

    /// Decides anew, for the next time that the frontend starts over.
    pub fn reconfigure(&mut self, options: BlkbackOptions) {
        self.next = options;
    }

    /// Most pages that a ring keeps, from the next connection on. Nothing that the frontend is told.
    pub fn keep_pages(&mut self, pages: u16) {
        self.options.persistent.pages = pages;
        self.next.persistent.pages = pages;
    }

    /// The device.
    pub fn device(&self) -> &DeviceId {
        self.end.device()
    }

    /// What the guest did wrong, by rule.
    pub fn rules(&self) -> &Arc<RuleCounters> {
        self.end.rules()
    }

    /// How it is connected, while it is.
    pub fn connection(&self) -> Option<&Connection> {
        self.served.as_ref().map(|(_, connection)| connection)
    }

    /// What serves it, while it is connected.
    pub fn served(&self) -> Option<&Blkback> {
        self.served.as_ref().map(|(served, _)| served)
    }

    /// Why the device was closed, if this side did so.
    pub fn condemned(&self) -> Option<&str> {
        self.end.condemned()
    }

    /// The owner wants the device closed, which the next look does.
    pub fn condemn(&mut self, why: &str) {
        self.end.condemn(why.to_owned());
    }

    /// The paths to watch.
    pub fn watch_paths(&self) -> [String; 2] {
        self.end.watch_paths()
    }

    /// Looks at both states and does what is due. Call it when a watch fired, or when woken; calling it
    /// without need does no harm. It does not wait for what is in flight on the disk: a state that wants
    /// everything let go of is entered by the look after the last queue woke its owner.
    ///
    /// # Errors
    ///
    /// When the store fails; what the frontend does wrong is no error but costs it the device.
    pub fn look<P: Platform>(
        &mut self,
        platform: &P,
        store: &mut StoreClient,
    ) -> Result<Life, StoreError> {
        for _ in 0..STEPS_MAX {
            let fault = self.fault.lock().unwrap_or_else(PoisonError::into_inner).take();
            if let Some(why) = fault.filter(|_| self.served.is_some()) {
                self.end.condemn(why);
            }
            let view = self.end.view(store, self.served.is_some())?;
            let step = view.map(backend_step);
            match step {
                Some(BackendStep::Finish) if self.keeps_connected(view) => return Ok(Life::Alive),
                Some(BackendStep::Wait) => {
                    self.wait_for_driver(view, store)?;
                    return Ok(Life::Alive);
                }
                // In all other cases nothing is held any more of what was served before.
                _ if !self.is_released(step) => return Ok(Life::Alive),
                None => return Ok(Life::Over),
                Some(BackendStep::Announce) => {
                    self.end.forgive();
                    self.silence = Silence::No;
                    self.announce(platform, store)?;
                }
                Some(BackendStep::Connect) => {
                    let Some(disk) = self.disk.clone() else { return Ok(Life::Alive) };
                    let adopting = view.is_some_and(|view| view.own == XenbusState::Connected);
                    self.connect(&disk, adopting, platform, store)?;
                }
                Some(BackendStep::Close) => self.end.enter(store, XenbusState::Closing)?,
                Some(BackendStep::Finish) => {
                    let silent = view.is_some_and(|v| v.own == XenbusState::Connected);
                    if silent && self.condemned().is_none() {
                        self.silence = Silence::Since(Instant::now());
                    }
                    self.end.enter(store, XenbusState::Closed)?;
                }
                Some(BackendStep::Forget) => {
                    self.end.enter(store, XenbusState::Closed)?;
                    return Ok(Life::Over);
                }
            }
        }
        Ok(Life::Alive)
    }

    /// Whether nothing of the guest's is held any more; begins to let go of it if need be.
    fn is_released(&mut self, step: Option<BackendStep>) -> bool {
        if step != Some(BackendStep::Connect) {
            self.begin_to_leave();
        }
        if self.is_leaving() {
            return false;
        }
        self.fault.lock().unwrap_or_else(PoisonError::into_inner).take();
        true
    }

    /// Begins to let go of everything, without touching the store: for a domain that is gone.
    pub fn begin_to_leave(&mut self) {
        if let Some((served, _)) = self.served.take() {
            served.stop();
            self.leaving = Some(served);
        }
    }

    /// Whether it still finishes what it began for a frontend that is gone.
    pub fn is_leaving(&mut self) -> bool {
        self.leaving.take_if(|leaving| leaving.is_over());
        self.leaving.is_some()
    }

    /// Lets go of everything, without touching the store: for a domain that is gone. Waits for what is
    /// in flight.
    pub fn let_go(&mut self) {
        (self.served, self.leaving) = (None, None);
        self.fault.lock().unwrap_or_else(PoisonError::into_inner).take();
    }

    fn announce(
        &mut self,
        platform: &impl Platform,
        store: &mut StoreClient,
    ) -> Result<(), StoreError> {
        windows::settle(&mut self.next.mode, self.end.device(), platform);
        (self.announced, self.options) = (true, self.next);
        let windows = self.options.mode == Mode::Window;
        let mut entries = self.offers();
        // A disk that is yet to come is described when the frontend is connected to it.
        if let Some(disk) = &self.disk {
            let decided = described::Decided::of(disk.geometry(), &self.end, store)?;
            entries.extend(described::features(&decided.geometry, &self.options));
        }
        let end = &self.end;
        store.transaction(|t| {
            for (key, value) in &entries {
                t.write(&end.back(key), value)?;
            }
            let window = end.back(keys::FEATURE_RINGFENCE_WINDOW);
            if windows {
                t.write(&window, flag(true))?;
            } else if t.read_opt(&window)?.is_some() {
                t.rm(&window)?;
            }
            let state = XenbusState::InitWait.to_string();
            t.write(&end.back(ringfence_wire::xenbus::STATE), state)
        })
    }

    /// What is offered to the frontend, whatever the disk.
    fn offers(&self) -> Vec<(&'static str, String)> {
        let BlkbackOptions { mode, queues, ring_order, indirect_segments, .. } = self.options;
        let mut entries = vec![
            (keys::FEATURE_PERSISTENT, flag(keeps(mode))),
            (keys::MULTI_QUEUE_MAX_QUEUES, queues.clamp(1, QUEUES_MAX).to_string()),
            (keys::MAX_RING_PAGE_ORDER, ring_order.min(RING_ORDER_MAX).to_string()),
        ];
        // Where there are none the key must be absent.
        if indirect_segments > 0 {
            entries.push((keys::FEATURE_MAX_INDIRECT_SEGMENTS, indirect_segments.to_string()));
        }
        entries
    }

    fn connect<P: Platform>(
        &mut self,
        disk: &Arc<dyn Disk>,
        adopting: bool,
        platform: &P,
        store: &mut StoreClient,
    ) -> Result<(), StoreError> {
        let decided = described::Decided::of(disk.geometry(), &self.end, store)?;
        match self.open(adopting, (disk, &decided.geometry), platform, store) {
            Ok(served) => {
                (self.served, self.has_served) = (Some(served), true);
                self.silence = Silence::No;
                if adopting {
                    // The frontend is to notice nothing.
                    return Ok(());
                }
                self.publish(&decided, store)
            }
            Err(ConnectError::Store(error)) if !is_about_a_key(&error) => Err(error),
            Err(error) => {
                self.end.rules().count(error.rule());
                self.end.condemn(error.to_string());
                Ok(())
            }
        }
    }

    /// Says what the disk is like, and that it is there.
    fn publish(
        &self,
        decided: &described::Decided,
        store: &mut StoreClient,
    ) -> Result<(), StoreError> {
        let described::Decided { geometry, removable } = *decided;
        let info = if geometry.read_only { INFO_READ_ONLY } else { 0 }
            | if removable { INFO_REMOVABLE } else { 0 };
        let mut entries = described::features(&geometry, &self.options);
        entries.extend([
            (keys::SECTORS, (geometry.bytes / 512).to_string()),
            (keys::SECTOR_SIZE, geometry.sector_size.to_string()),
            (keys::PHYSICAL_SECTOR_SIZE, geometry.physical_sector_size.to_string()),
            (keys::INFO, info.to_string()),
            (ringfence_wire::xenbus::STATE, XenbusState::Connected.to_string()),
        ]);
        store.transaction(|t| {
            entries.iter().try_for_each(|(key, value)| t.write(&self.end.back(key), value))
        })
    }

    /// Reads the frontend's keys, once each, and maps and binds what they name.
    fn open<P: Platform>(
        &self,
        adopting: bool,
        (disk, geometry): (&Arc<dyn Disk>, &Geometry),
        platform: &P,
        store: &mut StoreClient,
    ) -> Result<(Blkback, Connection), ConnectError> {
        let end = &self.end;
        let abi = match store.read_opt(&end.front(keys::PROTOCOL))? {
            None => Abi::NATIVE,
            Some(name) => Abi::from_name(&name).ok_or(ConnectError::Protocol)?,
        };
        // What the frontend was told holds, whatever this process would tell it today.
        let told = adopting && !self.announced;
        let offered = match told {
            true => store.read_flag(&end.back(keys::FEATURE_PERSISTENT))?,
            false => keeps(self.options.mode),
        };
        let windows = match told {
            true => store.read_flag(&end.back(keys::FEATURE_RINGFENCE_WINDOW))?,
            false => self.options.mode == Mode::Window,
        };
        let persistent = offered && store.read_flag(&end.front(keys::FEATURE_PERSISTENT))?;
        let mut rules = rules_for(geometry, &self.options);
        let (mut most_queues, mut most_order) = (self.options.queues, self.options.ring_order);
        if told {
            rules.flush = store.read_flag(&end.back(keys::FEATURE_FLUSH_CACHE))?;
            rules.barrier = store.read_flag(&end.back(keys::FEATURE_BARRIER))?;
            rules.discard = store.read_flag(&end.back(keys::FEATURE_DISCARD))?;
            let key = end.back(keys::FEATURE_MAX_INDIRECT_SEGMENTS);
            let indirect = store.read_opt(&key)?.and_then(|text| decimal::parse_u16(&text).ok());
            rules.indirect_segments = indirect.unwrap_or(0);
            (most_queues, most_order) = (QUEUES_MAX, RING_ORDER_MAX);
        }
        let limit = most_queues.clamp(1, QUEUES_MAX);
        let wanted = store.read_u32_opt(&end.front(keys::MULTI_QUEUE_NUM_QUEUES))?;
        let queues = wanted.unwrap_or(1);
        if queues == 0 || queues > limit {
            return Err(ConnectError::Queues { wanted: queues, limit });
        }
        let ring_pages = self.ring_pages(most_order.min(RING_ORDER_MAX), store)?;
        let mut parts = Vec::with_capacity(queues as usize);
        for queue in 0..queues {
            // One that says one uses directories all the same; one that says nothing does not.
            let dir = wanted.filter(|n| *n > 1).map(|_| keys::queue_directory(queue));
            let place = (queue, dir.as_deref());
            let mut part = self.open_queue(platform, store, place, ring_pages)?;
            if windows {
                part.window = windows::open(end, place, platform, store)?;
            }
            parts.push(part);
        }
        let windows = parts.iter().any(|part| part.window.is_some());
        let agreement = Agreement { abi, persistent, rules };
        let (fault, wake) = (Arc::clone(&self.fault), Arc::clone(&self.wake));
        let on_end: OnEnd = Arc::new(move |why| {
            if let Some(why) = why {
                *fault.lock().unwrap_or_else(PoisonError::into_inner) = Some(why.to_string());
            }
            wake();
        });
        let with = (end.rules(), platform.counters());
        let options = (&self.options, &agreement);
        let served = Blkback::start(parts, disk, options, with, &on_end)?;
        let adopted = adopting && !self.has_served;
        let connection = Connection { abi, persistent, windows, queues, ring_pages, adopted };
        Ok((served, connection))
    }

    /// Pages of each ring.
    fn ring_pages(&self, most_order: u32, store: &mut StoreClient) -> Result<u32, ConnectError> {
        let limit = 1 << most_order;
        let order = store.read_u32_opt(&self.end.front(keys::RING_PAGE_ORDER))?;
        let wanted = match order {
            Some(order) => 1u32.checked_shl(order).unwrap_or(u32::MAX),
            None => store.read_u32_opt(&self.end.front(keys::NUM_RING_PAGES))?.unwrap_or(1),
        };
        if wanted > limit || !wanted.is_power_of_two() {
            return Err(ConnectError::RingPages { wanted, limit });
        }
        Ok(wanted)
    }

    fn open_queue<P: Platform>(
        &self,
        platform: &P,
        store: &mut StoreClient,
        (queue, dir): (u32, Option<&str>),
        ring_pages: u32,
    ) -> Result<QueueParts<P::Grantee, P::Channel>, ConnectError> {
        let key = |name: &str| match dir {
            Some(dir) => self.end.front(&format!("{dir}/{name}")),
            None => self.end.front(name),
        };
        let count = ring_pages as usize;
        // A missing reference must not be read as 0, which is the console's page.
        let alone = match count {
            1 => store.read_u32_opt(&key(keys::RING_REF))?,
            _ => None,
        };
        let mut grefs = Vec::with_capacity(count);
        match alone {
            Some(gref) => grefs.push(Gref(gref)),
            None => {
                for page in 0..count {
                    grefs.push(Gref(store.read_u32(&key(&keys::ring_ref(page)))?));
                }
            }
        }
        let port = store.read_u32(&key(keys::EVENT_CHANNEL))?;
        let peer = self.end.device().frontend;
        let mut pages = platform.grantee(peer).map_err(ConnectError::Arena)?;
        let wanted: Vec<_> = grefs.iter().map(|gref| (*gref, Access::ReadWrite)).collect();
        let mut mapped = Vec::with_capacity(count);
        pages.map(&wanted, &mut mapped);
        let mut ring = Vec::with_capacity(count);
        for (page, (gref, lent)) in grefs.into_iter().zip(mapped).enumerate() {
            let failed = |status| ConnectError::Ring { queue, page, gref, status };
            ring.push(lent.map_err(failed)?);
        }
        let bound = platform.bind_interdomain(peer, EventPort(port));
        let channel = bound.map_err(|source| ConnectError::Channel { port, source })?;
        let ring = RingPages::paged(ring)?;
        Ok(QueueParts { ring, ring_pages: count, channel, pages, window: None })
    }
}

/// Whether pages that are in no window are kept mapped.
fn keeps(mode: Mode) -> bool {
    matches!(mode, Mode::Persistent | Mode::Window)
}

fn flag(on: bool) -> String {
    u8::from(on).to_string()
}
