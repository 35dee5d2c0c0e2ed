//! Discovery of devices, and scheduling of the work for each.
//!
//! # How it works
//!
//! A toolstack creates a directory for each device below `backend/KIND` of this domain. One watch on
//! that tree reports directories and keys that change ([`Devices::discover`]). A domain that is its own
//! toolstack registers each device instead ([`Devices::register`]). A few more watches for each device report keys
//! in the frontend's directory, which the guest writes.
//!
//! ```text
//! watch event ──> handle_event ──> due ──┐
//! retry time  ───────────────────> due ──┼──> work ──> Served::look ──> Alive / Again / Over
//! mark        ───────────────────> due ──┘
//! ```
//!
//! A device that fails ([`Look::Again`], or an error of the store) is due again after [`AGAIN`].
//!
//! A watch event is only a hint. It marks the device that it names as *due*. An event that names no
//! device causes a scan of the whole tree. Each due device is then served once, however many events
//! there were. Neither the order nor the number of events matters, and a guest that writes its keys all
//! the time causes one call of [`Served::look`] a round.
//!
//! The directory of a device that is over may stay until the toolstack removes it. The closing state
//! that this side writes there fires the watch once more. Only a state other than `Closed` makes the
//! directory a device again.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use ringfence_platform::DomId;
use ringfence_wire::decimal;
use ringfence_wire::xenbus::{self, DeviceId, DeviceKind, XenbusState};
use ringfence_xenstore::{StoreAccess, StoreClient, StoreError, WatchEvent};

use ringfence_hostnet::log::LineBudget;

use crate::ports::device_name;

/// Time after which a failed device is tried again.
pub(crate) const AGAIN: Duration = Duration::from_secs(2);
/// Event of the store that reports domains which ended.
const RELEASE_EVENT: &str = "@releaseDomain";

/// Result of serving a device once.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Look {
    Alive,
    /// Device needs another try later.
    Again,
    /// Device is gone for good.
    Over,
}

/// Backends that a schedule serves.
pub(crate) trait Served {
    /// Returns the paths to watch for a device, besides its own directory.
    fn watch_paths(&self, device: &DeviceId) -> Vec<String>;

    /// Advances a device. The first call for a device registers it.
    ///
    /// # Errors
    ///
    /// Returns the store's errors. A guest's violation of the protocol is no error.
    fn look(&mut self, device: &DeviceId, store: &mut StoreClient) -> Result<Look, StoreError>;

    /// Removes everything that was created for a device that is over.
    fn forget(&mut self, device: &DeviceId);
}

/// Known devices, and those that are due.
pub(crate) struct Devices {
    own: DomId,
    /// Kinds whose trees are watched.
    kinds: BTreeSet<DeviceKind>,
    known: BTreeSet<DeviceId>,
    /// Devices that are over and whose directories still exist.
    over: BTreeSet<DeviceId>,
    due: BTreeSet<DeviceId>,
    again: BTreeMap<DeviceId, Instant>,
    /// Budgets for log lines about devices that failed: a guest decides who may read its keys.
    lines: BTreeMap<DeviceId, LineBudget>,
    /// Kinds whose trees are to be scanned.
    rescan: BTreeSet<DeviceKind>,
}

impl Devices {
    /// Creates the schedule of `own`, this domain. It has no device yet.
    pub(crate) fn new(own: DomId) -> Devices {
        Devices {
            own,
            kinds: BTreeSet::new(),
            known: BTreeSet::new(),
            over: BTreeSet::new(),
            due: BTreeSet::new(),
            again: BTreeMap::new(),
            lines: BTreeMap::new(),
            rescan: BTreeSet::new(),
        }
    }

    /// Watches for devices of a kind that the toolstack assigns to this domain.
    ///
    /// # Errors
    ///
    /// Returns the store's errors.
    pub(crate) fn discover(
        &mut self,
        store: &mut StoreClient,
        kind: DeviceKind,
    ) -> Result<(), StoreError> {
        store.watch(&xenbus::backend_root(self.own, kind), kind.as_str())?;
        self.kinds.insert(kind);
        // The first event of a watch may come later.
        self.rescan.insert(kind);
        Ok(())
    }

    /// Watches for domains that end. Each event makes all devices due.
    ///
    /// # Errors
    ///
    /// Returns the store's errors.
    pub(crate) fn watch_releases(&mut self, store: &mut StoreClient) -> Result<(), StoreError> {
        store.watch(RELEASE_EVENT, RELEASE_EVENT)
    }

    /// Adds a device that this domain created itself, and watches it. The device is due.
    ///
    /// # Errors
    ///
    /// Returns the store's errors.
    pub(crate) fn register(
        &mut self,
        device: &DeviceId,
        store: &mut StoreClient,
        served: &impl Served,
    ) -> Result<(), StoreError> {
        let name = device_name(device);
        for path in served.watch_paths(device).into_iter().chain([device.backend_path()]) {
            store.watch(&path, &name)?;
        }
        self.known.insert(*device);
        self.due.insert(*device);
        Ok(())
    }

    /// Removes a device that was registered.
    pub(crate) fn unregister(
        &mut self,
        device: &DeviceId,
        store: &mut StoreClient,
        served: &impl Served,
    ) {
        let name = device_name(device);
        for path in served.watch_paths(device).into_iter().chain([device.backend_path()]) {
            // Watches end with the store connection in any case.
            let _ = store.unwatch(&path, &name);
        }
        self.known.remove(device);
        self.due.remove(device);
        self.again.remove(device);
        self.lines.remove(device);
    }

    /// Marks the device that a watch event names, or requests a scan.
    pub(crate) fn handle_event(&mut self, event: &WatchEvent) {
        if event.token == RELEASE_EVENT {
            return self.mark_all();
        }
        let Some(kind) = self.kinds.iter().find(|kind| kind.as_str() == event.token) else {
            self.due.extend(self.known.iter().find(|device| device_name(device) == event.token));
            return;
        };
        match DeviceId::parse_backend_path(&event.path) {
            Ok(device) if device.kind == *kind && device.backend == self.own => {
                self.due.insert(device);
            }
            _ => {
                self.rescan.insert(*kind);
            }
        }
    }

    /// Marks a device as due.
    pub(crate) fn mark(&mut self, device: &DeviceId) {
        self.due.insert(*device);
    }

    /// Marks all known devices as due.
    pub(crate) fn mark_all(&mut self) {
        self.due.extend(&self.known);
    }

    /// Returns the time at which a device is to be tried again.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.again.values().min().copied()
    }

    /// Serves each device that is due. Returns `true` if there were any: a request to the store may have
    /// read events from its socket, which `poll` then does not report.
    ///
    /// # Errors
    ///
    /// Returns an error if the connection to the store failed. Errors of one device are logged, and the
    /// device is tried again.
    pub(crate) fn work(
        &mut self,
        store: &mut StoreClient,
        served: &mut impl Served,
    ) -> Result<bool, StoreError> {
        let mut worked = !self.rescan.is_empty();
        while let Some(kind) = self.rescan.pop_first() {
            self.scan(kind, store)?;
        }
        let now = Instant::now();
        self.due.extend(self.again.iter().filter(|(_, at)| **at <= now).map(|(device, _)| *device));
        while let Some(device) = self.due.pop_first() {
            self.look(device, store, served)?;
            worked = true;
        }
        Ok(worked)
    }

    /// Marks all devices in the tree of a kind, and all known ones, as due.
    fn scan(&mut self, kind: DeviceKind, store: &mut StoreClient) -> Result<(), StoreError> {
        let root = xenbus::backend_root(self.own, kind);
        let domains = listing(store, &root)?;
        for domain in domains {
            let Ok(frontend) = decimal::parse_u16(domain.as_bytes()) else { continue };
            let handles = listing(store, &format!("{root}/{domain}"))?;
            let handles = handles.iter().filter_map(|h| decimal::parse_u32(h.as_bytes()).ok());
            let (backend, frontend) = (self.own, DomId(frontend));
            let devices = handles.map(|handle| DeviceId { kind, frontend, backend, handle });
            self.due.extend(devices);
        }
        // A known device that is gone is detected when it is served.
        let earlier = self.known.iter().chain(&self.over);
        self.due.extend(earlier.filter(|device| device.kind == kind));
        Ok(())
    }

    /// Serves one device, and starts or ends its watches.
    fn look(
        &mut self,
        device: DeviceId,
        store: &mut StoreClient,
        served: &mut impl Served,
    ) -> Result<(), StoreError> {
        self.again.remove(&device);
        let known = self.known.contains(&device);
        let state = state_of(store, &device)?;
        if self.over.contains(&device) && state == Some(XenbusState::Closed) {
            return Ok(());
        }
        // A late request to close is answered and has no other effect.
        let late = self.over.remove(&device) && state == Some(XenbusState::Closing);
        let there = state.is_some();
        if !known && !there {
            return Ok(());
        }
        let name = device_name(&device);
        if !known {
            if !late {
                tracing::info!(%name, "found");
            }
            self.known.insert(device);
            for path in served.watch_paths(&device) {
                or_log(store.watch(&path, &name), "cannot be watched", self.log(&device))?;
            }
        }
        let look = served.look(&device, store);
        let mut remains = false;
        match or_log(look, "could not be looked at; it is tried again in 2 s", self.log(&device))? {
            Some(Look::Over) => remains = there,
            // A device whose directory is gone is over, even if nothing could be done for it.
            _ if !there => {}
            Some(Look::Alive) => return Ok(()),
            Some(Look::Again) | None => {
                self.again.insert(device, Instant::now() + AGAIN);
                return Ok(());
            }
        }
        served.forget(&device);
        if !late {
            tracing::info!(%name, "gone");
        }
        self.known.remove(&device);
        if remains {
            self.over.insert(device);
        }
        for path in served.watch_paths(&device) {
            or_log(store.unwatch(&path, &name), "is still watched", self.log(&device))?;
        }
        self.lines.remove(&device);
        Ok(())
    }

    fn log(&mut self, device: &DeviceId) -> DeviceLog<'_> {
        let lines = self.lines.entry(*device).or_default();
        DeviceLog { device: *device, lines }
    }
}

/// Returns the names in a directory. A directory that is missing or not readable has none.
fn listing(store: &mut StoreClient, directory: &str) -> Result<Vec<String>, StoreError> {
    match store.directory_opt(directory) {
        Ok(names) => Ok(names.unwrap_or_default()),
        Err(StoreError::Refused { .. }) => Ok(Vec::new()),
        Err(error) => Err(error),
    }
}

/// Returns the state in a device's directory, or `None` if there is no such directory.
fn state_of(store: &mut StoreClient, device: &DeviceId) -> Result<Option<XenbusState>, StoreError> {
    match store.read_opt(&format!("{}/{}", device.backend_path(), xenbus::STATE)) {
        Ok(state) => Ok(state.map(|s| XenbusState::parse(&s).unwrap_or(XenbusState::Missing))),
        Err(StoreError::Refused { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Log lines about one device that failed.
struct DeviceLog<'a> {
    device: DeviceId,
    lines: &'a mut LineBudget,
}

/// Returns the result, or logs the error and returns `None` if only this device is affected.
fn or_log<T>(
    outcome: Result<T, StoreError>,
    what: &'static str,
    log: DeviceLog<'_>,
) -> Result<Option<T>, StoreError> {
    match outcome {
        Ok(value) => Ok(Some(value)),
        Err(error) if error.breaks() => Err(error),
        Err(error) => {
            if let Some(unlogged) = log.lines.take() {
                tracing::warn!(name = %device_name(&log.device), %error, unlogged, "{what}");
            }
            Ok(None)
        }
    }
}

#[cfg(test)]
mod tests;
