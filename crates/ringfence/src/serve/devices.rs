//! Finding the devices of one kind, and looking at each when something about it changed.
//!
//! # Theory of operation
//!
//! A toolstack makes a directory for each device below `backend/KIND` of this domain. One watch there
//! tells of directories that come and go and of every key in them; a few more for each device tell
//! of keys in the frontend's directory, which the guest writes.
//!
//! What a watch says is taken as a hint only: the device is marked as *due*, or, where the event names
//! none, the whole tree is listed again. Then each device that is due is looked at once, however many
//! events there were. So neither their order nor their number means anything, and a guest that writes
//! its keys all the time costs one look a turn.
//!
//! A device that is over may leave its directory behind, until the toolstack removes it. What this side writes
//! there to say so fires the watch once more, and must not make it a device again: only another state
//! than the closed one does.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use ringfence_platform::DomId;
use ringfence_wire::decimal;
use ringfence_wire::xenbus::{self, DeviceId, DeviceKind, XenbusState};
use ringfence_xenstore::{StoreAccess, StoreClient, StoreError, WatchEvent};

use crate::log::LineBudget;
use crate::ports::device_name;

/// After how long a device is looked at again that could not be.
const AGAIN: Duration = Duration::from_secs(2);

/// What became of a device when it was looked at.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Look {
    /// It goes on.
    Alive,
    /// It goes on, and something is to be tried again in a while.
    Again,
    /// It is gone for good.
    Over,
}

/// What serves the devices of one kind.
pub(super) trait Served {
    /// The paths to watch for a device that was found, besides its own directory.
    fn watch_paths(&self, device: &DeviceId) -> Vec<String>;

    /// Does what is due for a device. The first look is how it gets to know of it.
    ///
    /// # Errors
    ///
    /// The store's. What a guest does wrong is no error.
    fn look(&mut self, device: &DeviceId, store: &mut StoreClient) -> Result<Look, StoreError>;

    /// The device is gone for good: so is to be whatever was made for it.
    fn forget(&mut self, device: &DeviceId);
}

/// The devices of one kind that there are.
pub(super) struct Devices {
    kind: DeviceKind,
    own: DomId,
    known: BTreeSet<DeviceId>,
    /// Those that are over, while the toolstack has not removed their directories.
    over: BTreeSet<DeviceId>,
    due: BTreeSet<DeviceId>,
    again: BTreeMap<DeviceId, Instant>,
    /// For lines about devices that cannot be looked at: a guest decides who may read its keys.
    lines: BTreeMap<DeviceId, LineBudget>,
    rescan: bool,
}

impl Devices {
    /// Begins to watch for devices that `own`, this domain, is to serve.
    ///
    /// # Errors
    ///
    /// The store's.
    pub(super) fn watch(
        store: &mut StoreClient,
        own: DomId,
        kind: DeviceKind,
    ) -> Result<Devices, StoreError> {
        store.watch(&xenbus::backend_root(own, kind), kind.as_str())?;
        Ok(Devices {
            kind,
            own,
            known: BTreeSet::new(),
            over: BTreeSet::new(),
            due: BTreeSet::new(),
            again: BTreeMap::new(),
            lines: BTreeMap::new(),
            // A watch fires once at once; this does not wait for that.
            rescan: true,
        })
    }

    /// A watch fired.
    pub(super) fn heed(&mut self, event: &WatchEvent) {
        if event.token != self.kind.as_str() {
            self.due.extend(self.known.iter().find(|device| device_name(device) == event.token));
            return;
        }
        match DeviceId::parse_backend_path(&event.path) {
            Ok(device) if device.kind == self.kind && device.backend == self.own => {
                self.due.insert(device);
            }
            _ => self.rescan = true,
        }
    }

    /// A device is to be looked at.
    pub(super) fn mark(&mut self, device: &DeviceId) {
        self.due.insert(*device);
    }

    /// All devices are to be looked at.
    pub(super) fn mark_all(&mut self) {
        self.due.extend(&self.known);
    }

    /// When something is to be tried again.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.again.values().min().copied()
    }

    /// Looks at each device that is due. True if there were any: what the store was asked may have
    /// brought events with it, of which no poll tells.
    ///
    /// # Errors
    ///
    /// When the connection to the store broke. What is wrong with one device is logged, and tried
    /// again.
    pub(super) fn work(
        &mut self,
        store: &mut StoreClient,
        served: &mut impl Served,
    ) -> Result<bool, StoreError> {
        let mut worked = core::mem::take(&mut self.rescan);
        if worked {
            self.scan(store)?;
        }
        let now = Instant::now();
        self.due.extend(self.again.iter().filter(|(_, at)| **at <= now).map(|(device, _)| *device));
        while let Some(device) = self.due.pop_first() {
            self.look(device, store, served)?;
            worked = true;
        }
        Ok(worked)
    }

    fn scan(&mut self, store: &mut StoreClient) -> Result<(), StoreError> {
        let root = xenbus::backend_root(self.own, self.kind);
        let domains = listing(store, &root)?;
        for domain in domains {
            let Ok(frontend) = decimal::parse_u16(domain.as_bytes()) else { continue };
            let handles = listing(store, &format!("{root}/{domain}"))?;
            let handles = handles.iter().filter_map(|h| decimal::parse_u32(h.as_bytes()).ok());
            let (kind, backend, frontend) = (self.kind, self.own, DomId(frontend));
            let devices = handles.map(|handle| DeviceId { kind, frontend, backend, handle });
            self.due.extend(devices);
        }
        // Those that are gone are seen to be when they are looked at.
        self.mark_all();
        self.due.extend(&self.over);
        Ok(())
    }

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
        // A toolstack that asks it to close, late, is answered, and that is all.
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
                or_log(store.watch(&path, &name), "cannot be watched", self.budget(&device))?;
            }
        }
        let look = served.look(&device, store);
        let mut remains = false;
        match or_log(look, "could not be looked at", self.budget(&device))? {
            Some(Look::Over) => remains = there,
            // It may be that nothing could be done for it; when its directory is gone, it is over.
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
            or_log(store.unwatch(&path, &name), "is still watched", self.budget(&device))?;
        }
        self.lines.remove(&device);
        Ok(())
    }

    fn budget(&mut self, device: &DeviceId) -> (DeviceId, &mut LineBudget) {
        (*device, self.lines.entry(*device).or_insert_with(LineBudget::new))
    }
}

/// The names in a directory; none where there is none, or none yet that this domain may look into.
fn listing(store: &mut StoreClient, directory: &str) -> Result<Vec<String>, StoreError> {
    match store.directory_opt(directory) {
        Ok(names) => Ok(names.unwrap_or_default()),
        Err(StoreError::Refused { .. }) => Ok(Vec::new()),
        Err(error) => Err(error),
    }
}

/// The state in a device's directory; `None` where there is no such directory.
fn state_of(store: &mut StoreClient, device: &DeviceId) -> Result<Option<XenbusState>, StoreError> {
    match store.read_opt(&format!("{}/{}", device.backend_path(), xenbus::STATE)) {
        Ok(state) => Ok(state.map(|s| XenbusState::parse(&s).unwrap_or(XenbusState::Missing))),
        Err(StoreError::Refused { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

/// What was done, or `None` and a line in the log where that failed for this device alone.
fn or_log<T>(
    outcome: Result<T, StoreError>,
    what: &'static str,
    (device, lines): (DeviceId, &mut LineBudget),
) -> Result<Option<T>, StoreError> {
    match outcome {
        Ok(value) => Ok(Some(value)),
        Err(error) if error.breaks() => Err(error),
        Err(error) => {
            if let Some(unlogged) = lines.take() {
                tracing::warn!(name = %device_name(&device), %error, unlogged, "{what}");
            }
            Ok(None)
        }
    }
}

#[cfg(test)]
mod tests;
