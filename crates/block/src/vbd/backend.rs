//! The backend's side of the handshake.

mod described;
mod open;
mod silence;
mod windows;

use std::sync::{Arc, Mutex, PoisonError};

use ringfence_platform::{GrantStatus, Gref, Platform, PlatformError, WindowError};
use ringfence_sys::rules::RuleCounters;
use ringfence_wire::blkif::{Abi, INFO_READ_ONLY, INFO_REMOVABLE, RING_ORDER_MAX, keys};
use ringfence_wire::xenbus::{DeviceId, XenbusState};
use ringfence_xenbus::end::{BackendEnd, Life, STEPS_MAX, is_about_a_key};
use ringfence_xenbus::steps::{BackendStep, backend_step};
use ringfence_xenstore::{StoreAccess, StoreClient, StoreError};

use self::silence::{FirstPage, is_silent};
use super::QUEUES_MAX;
use crate::blkback::{Blkback, BlkbackOptions, Mode, StartError};
use crate::storage::Disk;

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
            ConnectError::Arena(PlatformError::BadArena { kind, .. }) => kind,
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
    /// Of the rings that are served, the first one's first page.
    first_page: Option<FirstPage>,
    /// This value served it once: what it finds connected is not of a backend before it.
    has_served: bool,
    /// The frontend left without a word, and this side stays connected until it is back.
    is_kept: bool,
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
            first_page: None,
            has_served: false,
            is_kept: false,
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
            if self.is_replaced(view, store)? {
                // The look after its last queue ended connects the one that came.
                self.begin_to_leave();
                return Ok(Life::Alive);
            }
            let step = view.map(backend_step);
            match step {
                Some(BackendStep::Wait) => return Ok(Life::Alive),
                // In all other cases nothing is held any more of what was served before.
                _ if !self.is_released(step) => return Ok(Life::Alive),
                None => return Ok(Life::Over),
                Some(BackendStep::Announce) => {
                    self.end.forgive();
                    self.is_kept = false;
                    self.announce(platform, store)?;
                }
                Some(BackendStep::Connect) => {
                    let Some(disk) = self.disk.clone() else { return Ok(Life::Alive) };
                    let adopting = view.is_some_and(|view| view.own == XenbusState::Connected);
                    self.connect(&disk, adopting, platform, store)?;
                }
                Some(BackendStep::Close) => self.end.enter(store, XenbusState::Closing)?,
                Some(step @ BackendStep::Finish) if view.is_some_and(|v| is_silent(v, step)) => {
                    self.is_kept = true;
                    return Ok(Life::Alive);
                }
                Some(BackendStep::Finish) => self.end.enter(store, XenbusState::Closed)?,
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
            Ok((served, connection, first_page)) => {
                (self.served, self.has_served) = (Some((served, connection)), true);
                self.first_page = Some(first_page);
                let was_kept = core::mem::take(&mut self.is_kept);
                if adopting && !was_kept {
                    // The frontend is to notice nothing.
                    return Ok(());
                }
                // What the disk was like when nobody was there may have changed.
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
}

/// Whether pages that are in no window are kept mapped.
fn keeps(mode: Mode) -> bool {
    matches!(mode, Mode::Persistent | Mode::Window)
}

fn flag(on: bool) -> String {
    u8::from(on).to_string()
}
