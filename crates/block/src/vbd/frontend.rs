//! Frontend side of the vbd handshake.
//!
//! [`VbdFrontend::look`] reads both xenbus states and takes the steps that are due: it lends rings, reads the
//! backend's announcement, attaches the [`FrontDisk`], and reconnects after a fault.

use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use ringfence_access::window::{SourcePolicy, WindowStock};
use ringfence_platform::{
    Channel, Lease, LendError, Platform, PlatformError, WindowShape, take_back,
};
use ringfence_sys::rules::RuleCounters;
use ringfence_wire::blkif::{Abi, INFO_READ_ONLY, RING_ORDER_MAX, Rules, SEGMENTS_MAX, keys};
use ringfence_wire::decimal;
use ringfence_wire::xenbus::{DeviceId, STATE, XenbusState};
use ringfence_xenbus::end::{FrontendEnd, STEPS_MAX};
use ringfence_xenbus::steps::{FrontendStep, frontend_step};
use ringfence_xenstore::{StoreAccess, StoreClient, StoreError};

use super::QUEUES_MAX;
use crate::blkfront::{AttachError, BlkfrontOptions, FrontDisk, Offer, OnBroken, RingSetup};
use crate::storage::{Discard, Geometry};

/// Reasons for which a frontend cannot connect.
#[derive(Debug, thiserror::Error)]
pub enum FrontendError {
    /// Failure of the store, or unusable keys of the backend.
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Platform(#[from] PlatformError),
    /// Pages that cannot be lent.
    #[error("the pages of a ring cannot be lent: {0}")]
    Lend(#[from] LendError),
    /// Disk with an invalid sector size, or no whole number of sectors.
    #[error(
        "the backend's disk of {sectors} sectors in units of {sector_size} bytes makes no sense"
    )]
    Geometry {
        /// Size in units of 512 bytes.
        sectors: u64,
        /// Sector size in bytes.
        sector_size: u32,
    },
    /// Connection that does not fit the existing disk.
    #[error(transparent)]
    Attach(#[from] AttachError),
}

/// Disk of a frontend on platform `P`.
pub type PlatformDisk<P> = FrontDisk<<P as Platform>::Granter, <P as Platform>::Channel>;

/// Rings announced to the backend.
type Setups<P> = Vec<RingSetup<<P as Platform>::Granter, <P as Platform>::Channel>>;

/// Frontend of one vbd: the handshake with the backend, and the disk while the two are connected.
pub struct VbdFrontend<P: Platform> {
    end: FrontendEnd,
    options: BlkfrontOptions,
    rules: Arc<RuleCounters>,
    wake: Arc<dyn Fn() + Send + Sync>,
    /// Rings that the backend has not connected yet.
    setups: Option<Setups<P>>,
    disk: Option<Arc<PlatformDisk<P>>>,
    connected: bool,
    broken: bool,
    was_up: bool,
    /// One message for each connection that broke a rule.
    faults: (Sender<()>, Receiver<()>),
    granter: P::Granter,
    /// Grant windows, if configured and supported by the platform.
    windows: Option<WindowStock>,
    said_without: bool,
    /// Pages that the backend holds after a revoke.
    stuck: Vec<Lease>,
}

impl<P: Platform> VbdFrontend<P> {
    /// Creates a frontend for a device of a toolstack. Reserves memory to lend, which some platforms can do
    /// only before the sandbox closes. `wake` is called on another thread when the connection broke a rule and
    /// [`VbdFrontend::look`] is due; it must not block.
    ///
    /// # Errors
    ///
    /// Returns the error of the platform.
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
            let shape =
                WindowShape { writable: options.window, read_only: 0, entries: options.window };
            let policy = SourcePolicy { revocation: options.revocation, ..SourcePolicy::default() };
            match WindowStock::new(platform, device.backend, queues, shape, policy) {
                Ok(stock) => front.windows = Some(stock),
                Err(error) => front.say_without_windows(&error),
            }
        }
        Ok(front)
    }

    /// Sets the backend's directory, where [`ringfence_xenbus::end::backend_path`] found it in another place than that of
    /// a kernel's backend.
    #[must_use]
    pub fn with_backend(self, directory: String) -> VbdFrontend<P> {
        VbdFrontend { end: self.end.with_backend(directory), ..self }
    }

    fn say_without_windows(&mut self, why: &dyn core::fmt::Display) {
        if !core::mem::replace(&mut self.said_without, true) {
            let device = self.end.device().frontend_path();
            tracing::warn!(%device, "pages of requests are not in windows: {why}");
        }
    }

    /// Returns the files of the windows, for a sandbox that closes or refuses all others. The caller calls it
    /// before the first [`VbdFrontend::look`].
    pub fn descriptors(&self) -> Vec<RawFd> {
        self.windows.as_ref().map(WindowStock::descriptors).unwrap_or_default()
    }

    /// Takes over the disk of an earlier frontend whose backend moved. Waiting requests are posted on the next
    /// connection.
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

    /// Returns the store path to watch.
    pub fn watch_path(&self) -> String {
        self.end.watch_path()
    }

    /// Returns the counters of rules that the backend broke.
    pub fn rules(&self) -> &Arc<RuleCounters> {
        &self.rules
    }

    /// Returns the disk, from the first connection on. It persists over reconnects.
    pub fn disk(&self) -> Option<&Arc<PlatformDisk<P>>> {
        self.disk.as_ref()
    }

    /// Returns `true` if the backend serves the disk now.
    pub fn is_up(&self) -> bool {
        self.connected && !self.broken
    }

    /// Reads both states and takes the steps that are due.
    ///
    /// # Errors
    ///
    /// Returns the error of the store or the platform.
    pub fn look(&mut self, platform: &P, store: &mut StoreClient) -> Result<(), FrontendError> {
        for _ in 0..STEPS_MAX {
            let attached = self.setups.is_some() || self.connected;
            self.broken |= self.faults.1.try_recv().is_ok() && attached;
            let mut view = self.end.view(store, attached)?;
            self.was_up |= attached && view.peer == Some(XenbusState::Connected);
            (view.was_up, view.broken) = (self.was_up, self.broken);
            match frontend_step(view) {
                FrontendStep::Wait => return self.follow_size(store),
                FrontendStep::Connect => self.connect(platform, store)?,
                FrontendStep::Complete => self.complete(store)?,
                FrontendStep::Restart => {
                    self.release();
                    self.end.enter(store, XenbusState::Initialising)?;
                }
                FrontendStep::Finish => {
                    self.release();
                    self.end.enter(store, XenbusState::Closed)?;
                }
            }
        }
        Ok(())
    }

    /// Reads the size of a connected disk again: a backend writes it and its state when the disk has grown.
    fn follow_size(&self, store: &mut StoreClient) -> Result<(), FrontendError> {
        let Some(disk) = self.disk.as_ref().filter(|_| self.is_up()) else { return Ok(()) };
        let number = |text: &[u8]| decimal::parse_up_to(text, u64::MAX / 512);
        let read = store.read_parsed(&self.end.back(keys::SECTORS), number);
        match read {
            Ok(sectors) if disk.grow(sectors * 512) => {
                tracing::info!(bytes = sectors * 512, "the disk has grown");
            }
            Ok(_) => {}
            // The backend removes its keys when it goes, which its state reports.
            Err(error) if ringfence_xenbus::end::is_about_a_key(&error) => {}
            Err(error) => return Err(error.into()),
        }
        Ok(())
    }

    /// Announces that this frontend leaves, and releases everything.
    ///
    /// # Errors
    ///
    /// Returns the error of the store.
    pub fn close(&mut self, store: &mut StoreClient) -> Result<(), StoreError> {
        self.end.enter(store, XenbusState::Closing)?;
        self.release();
        self.end.enter(store, XenbusState::Closed)
    }

    fn release(&mut self) {
        let mut left = core::mem::take(&mut self.stuck);
        if core::mem::take(&mut self.connected)
            && let Some(disk) = &self.disk
        {
            left.extend(disk.detach());
        }
        left.extend(self.setups.take().into_iter().flatten().flat_map(RingSetup::give_up));
        // A slow backend may have released its pages since the last call.
        self.stuck = take_back(&mut self.granter, left);
        (self.broken, self.was_up) = (false, false);
        // Messages of the old connection.
        while self.faults.1.try_recv().is_ok() {}
    }

    /// Returns the number of queues and the ring order, from the backend's offer and the options.
    fn shape(&self, store: &mut StoreClient) -> Result<(u32, u32), StoreError> {
        let offered = store.read_u32_opt(&self.end.back(keys::MULTI_QUEUE_MAX_QUEUES))?;
        let queues = offered.unwrap_or(1).min(self.options.queues).clamp(1, QUEUES_MAX);
        // An existing disk keeps its number of lanes.
        let lanes = self.disk.as_ref().and_then(|disk| u32::try_from(disk.lanes()).ok());
        let order = store.read_u32_opt(&self.end.back(keys::MAX_RING_PAGE_ORDER))?;
        let order = order.unwrap_or(0).min(self.options.ring_order).min(RING_ORDER_MAX);
        Ok((lanes.map_or(queues, |lanes| queues.min(lanes)), order))
    }

    /// Lends `queues` rings of order `order`, with grant windows if the backend opens them.
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
            (keys::RINGFENCE_NO_SPACE.to_owned(), "1".to_owned()),
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
                let key = |name| format!("{dir}{name}");
                entries.push((key(keys::RINGFENCE_WINDOW), window.handle.0.to_string()));
                if let Some(references) = window.references {
                    let key = key(keys::RINGFENCE_WINDOW_REFERENCES);
                    entries.push((key, references.to_string()));
                }
            }
            let port = setup.channel().port().0;
            entries.push((format!("{dir}{}", keys::EVENT_CHANNEL), port.to_string()));
        }
        self.setups = Some(setups);
        let end = &self.end;
        store.transaction(|t| {
            // An earlier connection may have had another number of queues or pages.
            let tops = [keys::RING_PAGE_ORDER, keys::MULTI_QUEUE_NUM_QUEUES].map(str::to_owned);
            let queues = (0..queues).map(|queue| keys::queue_directory(queue) + "/");
            let windows = [String::new()].into_iter().chain(queues);
            let windows = windows.flat_map(|dir| {
                [keys::RINGFENCE_WINDOW, keys::RINGFENCE_WINDOW_REFERENCES]
                    .map(|name| format!("{dir}{name}"))
            });
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

    /// Reads the backend's announcement and attaches the disk.
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

    /// Reads the backend's announcement, each key once.
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
        let extents = store.read_flag(&back(keys::FEATURE_RINGFENCE_EXTENTS))?;
        let write_zeroes = store.read_flag(&back(keys::FEATURE_RINGFENCE_WRITE_ZEROES))?;
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
            extents,
            rotational: false,
        };
        let rules = Rules {
            sectors,
            sector_size,
            read_only,
            flush,
            barrier,
            discard: discards,
            extents,
            write_zeroes,
            indirect_segments: u16::try_from(indirect).unwrap_or(SEGMENTS_MAX),
        };
        // An extended device number does not fit into the field, which backends ignore.
        let handle = u16::try_from(self.end.device().handle).unwrap_or(0);
        Ok(Offer { geometry, rules, handle })
    }
}
