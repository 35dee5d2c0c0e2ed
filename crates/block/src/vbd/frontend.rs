//! The frontend's side of the handshake.

use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use ringfence_platform::{Channel, Lease, LendError, Platform, PlatformError, take_back};
use ringfence_sys::rules::RuleCounters;
use ringfence_wire::blkif::{Abi, INFO_READ_ONLY, RING_ORDER_MAX, Rules, SEGMENTS_MAX, keys};
use ringfence_wire::decimal;
use ringfence_wire::xenbus::{DeviceId, STATE, XenbusState};
use ringfence_xenbus::end::{FrontendEnd, STEPS_MAX};
use ringfence_xenbus::steps::{FrontendStep, frontend_step};
use ringfence_xenstore::{StoreAccess, StoreClient, StoreError};

use super::QUEUES_MAX;
use crate::blkfront::{
    AttachError, BlkfrontOptions, FrontDisk, Offer, OnBroken, RingSetup, WindowStock,
};
use crate::storage::{Discard, Geometry};

/// Why a frontend could not connect.
#[derive(Debug, thiserror::Error)]
pub enum FrontendError {
    /// The store failed, or the backend's keys are unusable.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The platform refused.
    #[error(transparent)]
    Platform(#[from] PlatformError),
    /// No pages to lend.
    #[error("the pages of a ring cannot be lent: {0}")]
    Lend(#[from] LendError),
    /// A disk that makes no sense.
    #[error(
        "the backend's disk of {sectors} sectors in units of {sector_size} bytes makes no sense"
    )]
    Geometry {
        /// Of 512 bytes.
        sectors: u64,
        /// Of a sector.
        sector_size: u32,
    },
    /// Not the disk that was there before.
    #[error(transparent)]
    Attach(#[from] AttachError),
}

/// The disk of a frontend on the platform `P`.
pub type PlatformDisk<P> = FrontDisk<<P as Platform>::Granter, <P as Platform>::Channel>;

/// Rings that the backend was told of.
type Setups<P> = Vec<RingSetup<<P as Platform>::Granter, <P as Platform>::Channel>>;

/// One vbd, from the frontend's side.
pub struct VbdFrontend<P: Platform> {
    end: FrontendEnd,
    options: BlkfrontOptions,
    rules: Arc<RuleCounters>,
    wake: Arc<dyn Fn() + Send + Sync>,
    /// Rings that the backend has yet to take up.
    setups: Option<Setups<P>>,
    disk: Option<Arc<PlatformDisk<P>>>,
    connected: bool,
    broken: bool,
    was_up: bool,
    /// One for each connection that was found to be of no more use.
    faults: (Sender<()>, Receiver<()>),
    granter: P::Granter,
    /// The windows, where they are wanted and the platform has them.
    windows: Option<WindowStock>,
    said_without: bool,
    /// Pages that the backend would not let go of.
    stuck: Vec<Lease>,
}

impl<P: Platform> VbdFrontend<P> {
    /// A frontend for a device that a toolstack made. Sets memory aside for lending, which some
    /// platforms can do only before their sandbox closes. `wake` is called, on another thread, when a
    /// look is due because the connection is of no more use; it must not block.
    ///
    /// # Errors
    ///
    /// When the platform refuses.
    pub fn new(
        platform: &P,
        device: DeviceId,
        options: BlkfrontOptions,
        wake: Arc<dyn Fn() + Send + Sync>,
    ) -> Result<VbdFrontend<P>, PlatformError> {
        let mut front = VbdFrontend {
            end: FrontendEnd::new(device),
            options,
            rules: Arc::default(),
            wake,
            setups: None,
            disk: None,
            connected: false,
            broken: false,
            was_up: false,
            faults: channel(),
            granter: platform.granter(device.backend)?,
            windows: None,
            said_without: false,
            stuck: Vec::new(),
        };
        if options.window > 0 {
            let queues = options.queues.clamp(1, QUEUES_MAX);
            match WindowStock::new(platform, device.backend, queues, options.window) {
                Ok(stock) => front.windows = Some(stock),
                Err(error) => front.say_without_windows(&error),
            }
        }
        Ok(front)
    }

    fn say_without_windows(&mut self, why: &dyn core::fmt::Display) {
        if !core::mem::replace(&mut self.said_without, true) {
            let device = self.end.device().frontend_path();
            tracing::warn!(%device, "pages of requests are not in windows: {why}");
        }
    }

    /// The files of the windows, for a sandbox that closes or refuses all others. Call it before the
    /// first look.
    pub fn descriptors(&self) -> Vec<RawFd> {
        self.windows.as_ref().map(WindowStock::descriptors).unwrap_or_default()
    }

    /// Goes on with a disk of an earlier frontend, whose backend is no more and comes back elsewhere:
    /// what waits in it is posted there.
    #[must_use]
    pub fn resuming(mut self, disk: Arc<PlatformDisk<P>>) -> VbdFrontend<P> {
        self.rules = Arc::clone(disk.rules());
        disk.set_on_broken(self.on_broken());
        self.disk = Some(disk);
        self
    }

    fn on_broken(&self) -> OnBroken {
        let (faults, wake) = (self.faults.0.clone(), Arc::clone(&self.wake));
        Arc::new(move || {
            let _ = faults.send(());
            wake();
        })
    }

    /// The path to watch.
    pub fn watch_path(&self) -> String {
        self.end.watch_path()
    }

    /// What the backend did wrong, by rule.
    pub fn rules(&self) -> &Arc<RuleCounters> {
        &self.rules
    }

    /// The disk, from the first connection on. It stays the same when the backend goes and comes back.
    pub fn disk(&self) -> Option<&Arc<PlatformDisk<P>>> {
        self.disk.as_ref()
    }

    /// Whether the backend serves the disk now.
    pub fn is_up(&self) -> bool {
        self.connected && !self.broken
    }

    /// Looks at both states and does what is due.
    ///
    /// # Errors
    ///
    /// When the store fails or this side cannot do its part.
    pub fn look(&mut self, platform: &P, store: &mut StoreClient) -> Result<(), FrontendError> {
        for _ in 0..STEPS_MAX {
            let attached = self.setups.is_some() || self.connected;
            self.broken |= self.faults.1.try_recv().is_ok() && attached;
            let mut view = self.end.view(store, attached)?;
            self.was_up |= attached && view.peer == Some(XenbusState::Connected);
            (view.was_up, view.broken) = (self.was_up, self.broken);
            match frontend_step(view) {
                FrontendStep::Wait => return Ok(()),
                FrontendStep::Connect => self.connect(platform, store)?,
                FrontendStep::Complete => self.complete(store)?,
                FrontendStep::Restart => {
                    self.let_go();
                    self.end.enter(store, XenbusState::Initialising)?;
                }
                FrontendStep::Finish => {
                    self.let_go();
                    self.end.enter(store, XenbusState::Closed)?;
                }
            }
        }
        Ok(())
    }

    /// Says that this frontend leaves, and lets go of everything.
    ///
    /// # Errors
    ///
    /// The store's.
    pub fn close(&mut self, store: &mut StoreClient) -> Result<(), StoreError> {
        self.end.enter(store, XenbusState::Closing)?;
        self.let_go();
        self.end.enter(store, XenbusState::Closed)
    }

    fn let_go(&mut self) {
        let mut left = core::mem::take(&mut self.stuck);
        if core::mem::take(&mut self.connected)
            && let Some(disk) = &self.disk
        {
            left.extend(disk.detach());
        }
        left.extend(self.setups.take().into_iter().flatten().flat_map(RingSetup::give_up));
        // A backend that is slow to let go has had time since the last look.
        self.stuck = take_back(&mut self.granter, left);
        (self.broken, self.was_up) = (false, false);
        // Of the connection that was.
        while self.faults.1.try_recv().is_ok() {}
    }

    /// How many queues and pages a ring, of what the backend offers.
    fn shape(&self, store: &mut StoreClient) -> Result<(u32, u32), StoreError> {
        let offered = store.read_u32_opt(&self.end.back(keys::MULTI_QUEUE_MAX_QUEUES))?;
        let queues = offered.unwrap_or(1).min(self.options.queues).clamp(1, QUEUES_MAX);
        // A disk keeps the queues it has.
        let lanes = self.disk.as_ref().and_then(|disk| u32::try_from(disk.lanes()).ok());
        let order = store.read_u32_opt(&self.end.back(keys::MAX_RING_PAGE_ORDER))?;
        let order = order.unwrap_or(0).min(self.options.ring_order).min(RING_ORDER_MAX);
        Ok((lanes.map_or(queues, |lanes| queues.min(lanes)), order))
    }

    /// Lends so many rings of that order, with windows if the backend opens them.
    fn lend_rings(
        &mut self,
        platform: &P,
        queues: u32,
        order: u32,
        windows: bool,
    ) -> Result<Setups<P>, FrontendError> {
        let backend = self.end.device().backend;
        let mut setups = Vec::with_capacity(queues as usize);
        for _ in 0..queues {
            let setup = platform
                .granter(backend)
                .and_then(|granter| Ok((granter, platform.alloc_unbound(backend)?)));
            let setup = setup
                .map_err(FrontendError::from)
                .and_then(|(granter, channel)| Ok(RingSetup::new(granter, channel, 1 << order)?));
            match setup {
                Ok(setup) => {
                    let stock = self.windows.as_mut().filter(|_| windows);
                    setups.push(setup.with_window(stock.and_then(WindowStock::take)));
                }
                Err(error) => {
                    self.stuck.extend(setups.into_iter().flat_map(RingSetup::give_up));
                    return Err(error);
                }
            }
        }
        Ok(setups)
    }

    fn connect(&mut self, platform: &P, store: &mut StoreClient) -> Result<(), FrontendError> {
        let (queues, order) = self.shape(store)?;
        let windows = store.read_flag(&self.end.back(keys::FEATURE_RINGFENCE_WINDOW))?;
        if self.windows.is_some() && !windows {
            self.say_without_windows(&"the backend does not open them");
        }
        let setups = self.lend_rings(platform, queues, order, windows)?;
        let mut entries = vec![
            (keys::PROTOCOL.to_owned(), Abi::NATIVE.name().to_owned()),
            (keys::FEATURE_PERSISTENT.to_owned(), u8::from(self.options.persistent).to_string()),
        ];
        if order > 0 {
            entries.push((keys::RING_PAGE_ORDER.to_owned(), order.to_string()));
        }
        if queues > 1 {
            entries.push((keys::MULTI_QUEUE_NUM_QUEUES.to_owned(), queues.to_string()));
        }
        for (number, setup) in (0..).zip(&setups) {
            let dir = if queues > 1 { keys::queue_directory(number) + "/" } else { String::new() };
            let grefs = setup.ring_refs();
            for (page, gref) in grefs.iter().enumerate() {
                let name = match grefs.len() {
                    1 => keys::RING_REF.to_owned(),
                    _ => keys::ring_ref(page),
                };
                entries.push((format!("{dir}{name}"), gref.to_string()));
            }
            if let Some(window) = setup.window() {
                entries.push((format!("{dir}{}", keys::RINGFENCE_WINDOW), window.0.to_string()));
            }
            let port = setup.channel().port().0;
            entries.push((format!("{dir}{}", keys::EVENT_CHANNEL), port.to_string()));
        }
        self.setups = Some(setups);
        let end = &self.end;
        store.transaction(|t| {
            // An earlier connection may have been of another shape.
            let tops = [keys::RING_PAGE_ORDER, keys::MULTI_QUEUE_NUM_QUEUES].map(str::to_owned);
            let queues = (0..queues).map(|queue| keys::queue_directory(queue) + "/");
            let windows = [String::new()].into_iter().chain(queues);
            let windows = windows.map(|dir| dir + keys::RINGFENCE_WINDOW);
            for stale in tops.into_iter().chain(windows) {
                if t.read_opt(&end.front(&stale))?.is_some() {
                    t.rm(&end.front(&stale))?;
                }
            }
            for (key, value) in &entries {
                t.write(&end.front(key), value)?;
            }
            t.write(&end.front(STATE), XenbusState::Initialised.to_string())
        })?;
        Ok(())
    }

    /// Reads what the backend says of the disk, and takes it into use.
    fn complete(&mut self, store: &mut StoreClient) -> Result<(), FrontendError> {
        let offer = self.offer(store)?;
        let Some(setups) = self.setups.take() else { return Ok(()) };
        let disk = match &self.disk {
            Some(disk) => Arc::clone(disk),
            None => {
                let (options, rules) = (self.options, Arc::clone(&self.rules));
                let lanes = setups.len();
                Arc::new(FrontDisk::new(&offer, options, lanes, rules, self.on_broken()))
            }
        };
        match disk.attach(setups, &offer) {
            Ok(()) => {
                (self.disk, self.connected) = (Some(disk), true);
                self.end.enter(store, XenbusState::Connected)?;
                Ok(())
            }
            Err((error, setups)) => {
                self.setups = Some(setups);
                self.broken = true;
                Err(error.into())
            }
        }
    }

    /// What the backend says, each key read once.
    fn offer(&self, store: &mut StoreClient) -> Result<Offer, FrontendError> {
        let back = |key| self.end.back(key);
        let number = |text: &[u8]| decimal::parse_up_to(text, u64::MAX / 512);
        let sectors = store.read_parsed(&back(keys::SECTORS), number)?;
        let sector_size = store.read_u32_opt(&back(keys::SECTOR_SIZE))?.unwrap_or(512);
        let bytes = sectors * 512;
        if !matches!(sector_size, 512 | 4096) || !bytes.is_multiple_of(sector_size.into()) {
            return Err(FrontendError::Geometry { sectors, sector_size });
        }
        let physical = store.read_u32_opt(&back(keys::PHYSICAL_SECTOR_SIZE))?;
        let info = store.read_u32_opt(&back(keys::INFO))?.unwrap_or(0);
        let read_only = info & INFO_READ_ONLY != 0;
        let flush = store.read_flag(&back(keys::FEATURE_FLUSH_CACHE))?;
        let barrier = store.read_flag(&back(keys::FEATURE_BARRIER))?;
        let discards = store.read_flag(&back(keys::FEATURE_DISCARD))? && !read_only;
        let mut discard = None;
        if discards {
            let granularity = store.read_u32_opt(&back(keys::DISCARD_GRANULARITY))?;
            discard = Some(Discard {
                granularity: granularity.filter(|n| *n > 0).unwrap_or(sector_size),
                alignment: store.read_u32_opt(&back(keys::DISCARD_ALIGNMENT))?.unwrap_or(0),
                secure: store.read_flag(&back(keys::DISCARD_SECURE))?,
            });
        }
        let indirect = store.read_u32_opt(&back(keys::FEATURE_MAX_INDIRECT_SEGMENTS))?;
        let indirect = indirect.unwrap_or(0).min(SEGMENTS_MAX.into());
        let geometry = Geometry {
            bytes,
            sector_size,
            physical_sector_size: physical.unwrap_or(sector_size),
            read_only,
            flush: flush || barrier,
            discard,
            write_zeroes: !read_only,
            rotational: false,
        };
        let rules = Rules {
            sectors,
            sector_size,
            read_only,
            flush,
            barrier,
            discard: discards,
            indirect_segments: u16::try_from(indirect).unwrap_or(SEGMENTS_MAX),
        };
        let handle = u16::try_from(self.end.device().handle).unwrap_or(0);
        Ok(Offer { geometry, rules, handle })
    }
}
