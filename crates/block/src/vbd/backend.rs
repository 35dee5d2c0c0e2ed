//! Backend side of the vbd handshake.
//!
//! [`VbdBackend::look`] reads both xenbus states and takes the steps that are due: it announces features,
//! opens the rings (`open`), and closes the device. A frontend that breaks a rule loses its device with a
//! penalty. `silence` handles frontends that leave without a state change. The disk of a connected frontend is replaced
//! between [`VbdBackend::begin_replacement`] and [`VbdBackend::end_replacement`].

mod described;
mod open;
mod queue_keys;
mod rejection;
mod silence;
mod windows;

use std::sync::{Arc, Mutex, PoisonError};

use ringfence_access::Mode;
use ringfence_platform::Platform;
use ringfence_sys::pressure::Share;
use ringfence_sys::rules::RuleCounters;
use ringfence_wire::blkif::{Abi, INFO_READ_ONLY, INFO_REMOVABLE, RING_ORDER_MAX, keys};
use ringfence_wire::xenbus::{DeviceId, XenbusState};
use ringfence_xenbus::end::{BackendEnd, Failed, Life, STEPS_MAX};
use ringfence_xenbus::steps::{BackendStep, backend_step};
use ringfence_xenstore::{StoreAccess, StoreClient, StoreError};

use self::described::flag;
pub use self::rejection::VbdRejection;
use self::silence::FirstPage;
use super::QUEUES_MAX;
use crate::blkback::{Blkback, BlkbackOptions, Pause};
use crate::storage::Disk;

/// Properties of a connected device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Connection {
    /// Request layout of the frontend.
    pub abi: Abi,
    /// Set if pages are kept mapped.
    pub persistent: bool,
    /// Set if rings have grant windows.
    pub windows: bool,
    pub queues: u32,
    pub ring_pages: u32,
    /// Set if the device was taken over from an earlier backend without a state change.
    pub adopted: bool,
}

/// Replacement of a disk that has begun.
struct Replacing {
    /// Pause of the queues, if the device was connected.
    pause: Option<Pause>,
}

/// Backend of one vbd.
///
/// The disk may be set at creation or later. Without a disk the frontend sees a backend in InitWait, and
/// waits.
pub struct VbdBackend {
    end: BackendEnd,
    options: BlkbackOptions,
    /// Options that apply from the next announcement on.
    next: BlkbackOptions,
    disk: Option<Arc<dyn Disk>>,
    /// Set if this value wrote the keys that the frontend reads.
    announced: bool,
    served: Option<(Blkback, Connection)>,
    /// First page of the first ring in service.
    first_page: Option<FirstPage>,
    /// Set once this value served the device: a connection found later is its own.
    has_served: bool,
    /// Set if the frontend left without a state change and this side stays connected.
    is_kept: bool,
    /// Queues that finish their requests. No state changes until they ended.
    leaving: Option<Blkback>,
    /// Share of their pages that the queues keep mapped.
    share: Share,
    /// Replacement of the disk that has begun. Meanwhile no frontend is connected.
    replacing: Option<Replacing>,
    /// The disk of the connected frontend has another size than was announced.
    is_resized: bool,
    fault: Arc<Mutex<Option<String>>>,
    wake: Arc<dyn Fn() + Send + Sync>,
}

impl VbdBackend {
    /// Creates a backend for a device of a toolstack, which serves `disk`. `wake` is called on another
    /// thread when a queue ended and [`VbdBackend::look`] is due; it must not block.
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

    /// Creates a backend whose disk is set later ([`VbdBackend::set_disk`]).
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
            share: Share::WHOLE,
            replacing: None,
            is_resized: false,
            fault: Arc::default(),
            wake,
        }
    }

    /// Returns the disk that is served.
    pub fn disk(&self) -> Option<&Arc<dyn Disk>> {
        self.disk.as_ref()
    }

    /// Begins to replace the disk: pauses the queues. `wake` is called when [`VbdBackend::is_paused`] may be `true`.
    /// The caller ends the replacement with [`VbdBackend::end_replacement`].
    pub fn begin_replacement(&mut self) {
        let pause = self.served.as_ref().map(|(served, _)| served.pause(Arc::clone(&self.wake)));
        self.replacing = Some(Replacing { pause });
    }

    /// Returns `true` once no request of the guest is in flight, after [`VbdBackend::begin_replacement`].
    pub fn is_paused(&mut self) -> bool {
        let is_leaving = self.is_leaving();
        let Some(Replacing { pause }) = &self.replacing else { return false };
        !is_leaving && pause.as_ref().is_none_or(Pause::is_complete)
    }

    /// Ends a replacement: continues on `disk`, or on the old disk if there is no other or its queues cannot be opened. The
    /// next [`VbdBackend::look`] announces another size to the frontend.
    ///
    /// # Errors
    ///
    /// Returns the error for which the old disk stays. If that cannot be used either, the device is closed.
    pub fn end_replacement(&mut self, disk: Option<Arc<dyn Disk>>) -> std::io::Result<()> {
        let Some(Replacing { pause }) = self.replacing.take() else { return Ok(()) };
        // A frontend that left during the pause takes the disk with its next connection.
        let served = self.served.as_ref().filter(|_| pause.is_some()).map(|(served, _)| served);
        let resumed: Option<std::io::Result<bool>> = disk.map(|disk| {
            served.map_or(Ok(()), |served| served.resume(&*disk))?;
            let before = self.disk.replace(Arc::clone(&disk));
            Ok(before.is_some_and(|before| before.geometry().bytes != disk.geometry().bytes))
        });
        if let Some(Ok(is_resized)) = resumed {
            self.is_resized |= is_resized && served.is_some();
            return Ok(());
        }
        if let (Some(served), Some(disk)) = (served, &self.disk)
            && let Err(error) = served.resume(&**disk)
        {
            self.end.close_with_penalty(format!("the disk could not be used again: {error}"));
        }
        resumed.map_or(Ok(()), |resumed| resumed.map(|_| ()))
    }

    /// Announces the size of the disk to a connected frontend: Linux reads it when the state is written again.
    fn announce_size(&mut self, store: &mut StoreClient) -> Result<(), StoreError> {
        if let (true, Some(disk), Some(_)) = (self.is_resized, &self.disk, &self.served) {
            let (end, sectors) = (&self.end, disk.geometry().bytes / 512);
            let state = end.back(ringfence_wire::xenbus::STATE);
            store.transaction(|t| {
                if t.read_opt(&state)?.is_none() {
                    // A write would create a directory again that the toolstack has removed.
                    return Ok(());
                }
                t.write(&end.back(keys::SECTORS), sectors.to_string())?;
                t.write(&state, XenbusState::Connected.to_string())
            })?;
        }
        self.is_resized = false;
        Ok(())
    }

    /// Sets the disk of the next connection; `None` makes a frontend wait. [`VbdBackend::look`] is due after it.
    pub fn set_disk(&mut self, disk: Option<Arc<dyn Disk>>) {
        self.disk = disk;
    }

    /// Sets the options of the next announcement.
    pub fn reconfigure(&mut self, options: BlkbackOptions) {
        self.next = options;
    }

    /// Sets the maximum number of persistent pages of a ring, from the next connection on. The frontend does
    /// not notice.
    pub fn keep_pages(&mut self, pages: u16) {
        self.options.persistent.pages = pages;
        self.next.persistent.pages = pages;
    }

    /// Sets the share of their pages that the queues keep mapped under memory pressure, now and after later connections. The
    /// frontend does not notice.
    pub fn set_share(&mut self, share: Share) {
        if share == self.share {
            return;
        }
        self.share = share;
        if let Some((served, _)) = &self.served {
            served.set_share(share);
        }
    }

    /// Returns the identity of the device.
    pub fn device(&self) -> &DeviceId {
        self.end.device()
    }

    /// Returns the counters of rules that the guest broke.
    pub fn rules(&self) -> &Arc<RuleCounters> {
        self.end.rules()
    }

    /// Returns the properties of the connection, while the device is connected.
    pub fn connection(&self) -> Option<&Connection> {
        self.served.as_ref().map(|(_, connection)| connection)
    }

    /// Returns the queues, while the device is connected.
    pub fn served(&self) -> Option<&Blkback> {
        self.served.as_ref().map(|(served, _)| served)
    }

    /// Returns the reason for which this side closed the device with a penalty, if it did.
    pub fn penalized(&self) -> Option<&str> {
        self.end.penalized()
    }

    /// Records a reason to close the device; the next [`VbdBackend::look`] closes it.
    pub fn close_with_penalty(&mut self, why: &str) {
        self.end.close_with_penalty(why.to_owned());
    }

    /// Returns the store paths to watch.
    pub fn watch_paths(&self) -> [String; 2] {
        self.end.watch_paths()
    }

    /// Reads both states and takes the steps that are due. The caller calls it when a watch fired or after
    /// `wake`; extra calls are harmless. It does not wait for disk I/O in flight: a state that requires all
    /// pages to be released is entered by the call after the last queue ended.
    ///
    /// # Errors
    ///
    /// Returns the error of the store. A rule that the frontend breaks is no error; it closes the device.
    pub fn look<P: Platform>(
        &mut self,
        platform: &P,
        store: &mut StoreClient,
    ) -> Result<Life, StoreError> {
        for _ in 0..STEPS_MAX {
            let fault = self.fault.lock().unwrap_or_else(PoisonError::into_inner).take();
            if let Some(why) = fault.filter(|_| self.served.is_some()) {
                self.end.close_with_penalty(why);
            }
            let view = self.end.view(store, self.served.is_some())?;
            if self.is_replaced(view, store)? {
                // The call after the last queue ended connects the new frontend.
                self.begin_to_leave();
                return Ok(Life::Alive);
            }
            let step = view.map(backend_step);
            match step {
                Some(BackendStep::Wait) => {
                    self.announce_size(store)?;
                    return Ok(Life::Alive);
                }
                // All other steps require that the old connection is released.
                _ if !self.is_released(step) => return Ok(Life::Alive),
                None => return Ok(Life::Over),
                Some(BackendStep::Announce) => {
                    self.end.reset_penalty();
                    self.is_kept = false;
                    self.announce(platform, store)?;
                }
                // `end_replacement` decides which disk it gets.
                Some(BackendStep::Connect) if self.replacing.is_some() => return Ok(Life::Alive),
                Some(BackendStep::Connect) => {
                    let Some(disk) = self.disk.clone() else { return Ok(Life::Alive) };
                    let adopting = view.is_some_and(|view| view.own == XenbusState::Connected);
                    self.connect(&disk, adopting, platform, store)?;
                    if self.end.awaits_windows() {
                        return Ok(Life::Alive);
                    }
                }
                Some(BackendStep::Close) => self.end.enter(store, XenbusState::Closing)?,
                Some(BackendStep::Finish) if self.is_silent(view, store)? => {
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

    /// Returns `true` if nothing of the old connection is held; otherwise begins to release it.
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

    /// Begins to release everything without access to the store, for a domain that is gone.
    pub fn begin_to_leave(&mut self) {
        if let Some((served, _)) = self.served.take() {
            served.stop();
            self.leaving = Some(served);
        }
    }

    /// Returns `true` while queues finish their requests for a frontend that is gone.
    pub fn is_leaving(&mut self) -> bool {
        self.leaving.take_if(|leaving| leaving.is_over());
        self.leaving.is_some()
    }

    /// Releases everything without access to the store, for a domain that is gone. Waits for requests in
    /// flight.
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
        // Without a disk, `publish` writes its features when the frontend connects.
        if let Some(disk) = &self.disk {
            let announced = described::AnnouncedDisk::of(disk.geometry(), &self.end, store)?;
            entries.extend(described::features(&announced.geometry, &self.options));
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

    /// Returns the features offered to the frontend that do not depend on the disk.
    fn offers(&self) -> Vec<(&'static str, String)> {
        let BlkbackOptions { mode, queues, ring_order, indirect_segments, .. } = self.options;
        let mut entries = vec![
            (keys::FEATURE_PERSISTENT, flag(keeps(mode))),
            (keys::MULTI_QUEUE_MAX_QUEUES, queues.clamp(1, QUEUES_MAX).to_string()),
            (keys::MAX_RING_PAGE_ORDER, ring_order.min(RING_ORDER_MAX).to_string()),
        ];
        // Without indirect requests the key must be absent.
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
        let announced = described::AnnouncedDisk::of(disk.geometry(), &self.end, store)?;
        match self.open(adopting, disk, &announced.geometry, platform, store) {
            Ok((served, connection, first_page)) => {
                if !self.share.is_whole() {
                    served.set_share(self.share);
                }
                (self.served, self.has_served) = (Some((served, connection)), true);
                self.first_page = Some(first_page);
                self.end.connected();
                let was_kept = core::mem::take(&mut self.is_kept);
                if adopting && !was_kept {
                    // A takeover is invisible to the frontend.
                    return Ok(());
                }
                // The disk may have changed since its last announcement.
                self.publish(&announced, store)
            }
            Err(error) => match self.end.failed(adopting, &error) {
                Failed::Reject => self.end.reject(error),
                Failed::Announce => self.announce(platform, store),
                Failed::Wait => Ok(()),
            },
        }
    }

    /// Writes the properties of the disk and state Connected.
    fn publish(
        &self,
        announced: &described::AnnouncedDisk,
        store: &mut StoreClient,
    ) -> Result<(), StoreError> {
        let described::AnnouncedDisk { geometry, removable } = *announced;
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

/// Returns `true` if the mode keeps pages outside grant windows mapped.
fn keeps(mode: Mode) -> bool {
    matches!(mode, Mode::Persistent | Mode::Window)
}
