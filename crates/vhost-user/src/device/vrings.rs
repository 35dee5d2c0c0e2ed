//! Vrings of a device, as the hypervisor sets them up.

// #syscall uplink,disk,card,shield epoll_ctl: waiting for kicks of a virtual machine

use std::os::fd::{BorrowedFd, OwnedFd};

use ringfence_ring::split::QueueFeatures;
use ringfence_ring::split::backend::{BackendQueue, QueueTables};
use ringfence_sys::descriptors::{Descriptors, dispose, identity};
use ringfence_sys::event_signal::EventSignal;
use ringfence_sys::numbers::usize_from;
use ringfence_wire::vhost_user::{
    LOG_ALL, LOG_USED, MemoryRegion, PROTOCOL_FEATURES, Request, VringAddress, VringFile,
    VringState,
};
use ringfence_wire::virtio::feature;
use rustix::event::epoll;

use super::{Device, RequestAnswer};
use crate::ClientFault;
use crate::dirty::DirtyLog;
use crate::memory::{GuestMemory, only};

/// First number of the vrings' kicks among the events of the epoll.
const KICKS: u64 = 8;

/// Vring as the hypervisor has set it up.
#[derive(Debug, Default)]
pub struct Vring {
    size: u32,
    /// Next available index of a vring that does not run.
    base: u16,
    address: Option<VringAddress>,
    kick: Option<OwnedFd>,
    call: Option<OwnedFd>,
    is_enabled: bool,
    /// The vring has stopped because a region with its tables was removed.
    awaits_memory: bool,
    /// Present while the vring runs.
    pub queue: Option<BackendQueue>,
}

impl Device {
    /// Carries out a request that is about one vring.
    pub(super) fn set_vring(
        &mut self,
        request: Request,
        files: Descriptors,
        epoll: BorrowedFd<'_>,
    ) -> Result<(), ClientFault> {
        match request {
            Request::SetVringSize(VringState { index, value }) => {
                QueueTables::lengths(value)?;
                self.stopped(index)?.size = value;
            }
            Request::SetVringBase(VringState { index, value }) => {
                let base = u16::try_from(value).map_err(|_| ClientFault::Value { index, value })?;
                self.stopped(index)?.base = base;
            }
            Request::SetVringAddress(address) => self.set_address(address)?,
            Request::SetVringKick(file) => self.set_kick(file, files, epoll)?,
            Request::SetVringCall(file) => {
                let call = self.event(file, files)?;
                self.vring(file.index)?.call = call;
                self.interrupt(file.index);
            }
            // Errors end the connection.
            Request::SetVringError(file) => drop(self.event(file, files)?),
            Request::SetVringEnable(VringState { index, value }) => {
                self.vring(index)?.is_enabled = value != 0;
                self.run_all()?;
            }
            _ => {}
        }
        Ok(())
    }

    fn vring(&mut self, index: u32) -> Result<&mut Vring, ClientFault> {
        let count = self.vrings.len();
        self.vrings.get_mut(usize_from(index)).ok_or(ClientFault::Vring { index, count })
    }

    /// Interrupts the driver of a vring with a log: an earlier backend may have died before it did.
    fn interrupt(&self, index: u32) {
        let vring = self.vrings.get(usize_from(index));
        let call =
            vring.filter(|vring| vring.queue.is_some()).and_then(|vring| vring.call.as_ref());
        if let (Some(call), Some(_)) = (call, &self.log) {
            // A write would block if the client has filled the counter.
            let _ = self.signal.signal(call);
        }
    }

    /// Takes the addresses of a vring's tables.
    fn set_address(&mut self, address: VringAddress) -> Result<(), ClientFault> {
        let known = if self.offer.features & LOG_ALL != 0 { LOG_USED } else { 0 };
        let vring = self.vring(address.index)?;
        if address.flags & !known != 0 {
            let VringAddress { index, flags: value, .. } = address;
            return Err(ClientFault::Value { index, value });
        }
        (vring.address, vring.awaits_memory) = (Some(address), false);
        self.move_all()
    }

    /// Returns a vring that must not run.
    fn stopped(&mut self, index: u32) -> Result<&mut Vring, ClientFault> {
        let vring = self.vring(index)?;
        match vring.queue {
            None => Ok(vring),
            Some(_) => Err(ClientFault::Value { index, value: 0 }),
        }
    }

    /// Returns the eventfd that came with a request.
    fn event(&self, file: VringFile, files: Descriptors) -> Result<Option<OwnedFd>, ClientFault> {
        if !file.has_file {
            return Ok(None);
        }
        let event = only(files)?;
        // A file of another kind could block in a write, or when it is closed.
        if identity(&event).is_ok_and(|found| found == self.of_eventfds) {
            return Ok(Some(event));
        }
        dispose(event);
        Err(ClientFault::NoEvent)
    }

    fn set_kick(
        &mut self,
        file: VringFile,
        files: Descriptors,
        epoll: BorrowedFd<'_>,
    ) -> Result<(), ClientFault> {
        // A vring that is to be polled has no eventfd.
        let kick = self.event(file, files)?.ok_or(ClientFault::Files { count: 0, needed: 1 })?;
        let number = KICKS + u64::from(file.index);
        let vring = self.vring(file.index)?;
        vring.remove_kick(epoll);
        // Each kick is an edge, so the counter is never read.
        let events = epoll::EventFlags::IN | epoll::EventFlags::ET;
        epoll::add(epoll, &kick, epoll::EventData::new_u64(number), events)
            .map_err(|source| ClientFault::System { what: "waiting for kicks", source })?;
        vring.kick = Some(kick);
        self.run_all()
    }

    /// Stops a vring. Returns its next available index.
    pub(super) fn stop(
        &mut self,
        state: VringState,
        epoll: BorrowedFd<'_>,
    ) -> Result<RequestAnswer, ClientFault> {
        let vring = self.vring(state.index)?;
        vring.pause();
        vring.remove_kick(epoll);
        Ok(RequestAnswer::State(VringState { index: state.index, value: vring.base.into() }))
    }

    /// Lets each vring run that can, and stops each that must not.
    pub(super) fn run_all(&mut self) -> Result<(), ClientFault> {
        let negotiates = self.has(PROTOCOL_FEATURES);
        let features = QueueFeatures {
            indirect: self.has(feature::INDIRECT),
            event_idx: self.has(feature::EVENT_IDX),
            in_order: false,
        };
        let mut started = Vec::new();
        for (index, vring) in (0_u32..).zip(&mut self.vrings) {
            let may_run = vring.kick.is_some() && (vring.is_enabled || !negotiates);
            let Some(address) = vring.address.filter(|_| may_run && vring.size > 0) else {
                vring.pause();
                continue;
            };
            if vring.queue.is_none() {
                let found = tables(&self.memory, address, vring.size, features.event_idx);
                let tables = match found {
                    Err(_) if vring.awaits_memory => continue,
                    found => found?,
                };
                vring.awaits_memory = false;
                let mut queue = match &self.log {
                    None => BackendQueue::new(tables, features, vring.base),
                    Some(log) => {
                        let log = log.of_vring(index, vring.size)?;
                        BackendQueue::with_log(tables, features, vring.base, log)?
                    }
                };
                queue.suppress();
                vring.queue = Some(queue);
                started.push(index);
            }
        }
        started.into_iter().for_each(|index| self.interrupt(index));
        Ok(())
    }

    /// Stops each vring whose tables are in no region any more.
    pub(super) fn stop_without_memory(&mut self) {
        let event_idx = self.has(feature::EVENT_IDX);
        for vring in &mut self.vrings {
            let Some(address) = vring.address.filter(|_| vring.queue.is_some()) else { continue };
            if tables(&self.memory, address, vring.size, event_idx).is_err() {
                vring.pause();
                vring.awaits_memory = true;
            }
        }
    }

    /// Returns the numbers of the vrings that run and have a table in a region.
    pub(crate) fn vrings_in(&self, region: &MemoryRegion) -> Vec<usize> {
        let &MemoryRegion { user, len, .. } = region;
        let lies_there = |table: u64| table.checked_sub(user).is_some_and(|offset| offset < len);
        let runs_there = |vring: &Vring| {
            let address = vring.address.filter(|_| vring.queue.is_some());
            address.is_some_and(|VringAddress { descriptors, available, used, .. }| {
                [descriptors, available, used].into_iter().any(lies_there)
            })
        };
        let vrings = self.vrings.iter().enumerate();
        vrings.filter(|(_, vring)| runs_there(vring)).map(|(number, _)| number).collect()
    }

    /// Finds the tables of vrings that run in the memory of now.
    pub(super) fn move_all(&mut self) -> Result<(), ClientFault> {
        let event_idx = self.has(feature::EVENT_IDX);
        for vring in &mut self.vrings {
            if let (Some(queue), Some(address)) = (&mut vring.queue, vring.address) {
                queue.move_to(tables(&self.memory, address, vring.size, event_idx)?);
            }
        }
        self.run_all()
    }
}

impl Vring {
    /// Stops the vring, and keeps its place.
    fn pause(&mut self) {
        if let Some(queue) = self.queue.take() {
            self.base = queue.next_available();
        }
    }

    pub(super) fn remove_kick(&mut self, epoll: BorrowedFd<'_>) {
        if let Some(kick) = self.kick.take() {
            // The hypervisor holds the file as well, so closing it does not suffice.
            let removed = epoll::delete(epoll, &kick);
            debug_assert!(removed.is_ok(), "it was added");
        }
    }

    /// Marks the used ring in a log, if the hypervisor wants that.
    ///
    /// # Errors
    ///
    /// Returns [`ClientFault::Unlogged`].
    pub fn mark_used(&self, dirty: &DirtyLog) -> Result<(), ClientFault> {
        match self.address.filter(|address| dirty.is_on() && address.flags & LOG_USED != 0) {
            // The event index is behind the entries.
            Some(address) => dirty.mark(address.log, QueueTables::lengths(self.size)?[2] + 2),
            None => Ok(()),
        }
    }

    /// Publishes returned chains. Interrupts the driver if it wants that; returns `true` then.
    pub fn publish(&mut self, signal: &EventSignal) -> bool {
        let Some(queue) = &mut self.queue else { return false };
        if !queue.publish() {
            return false;
        }
        let Some(call) = &self.call else { return false };
        // A write would block if the client has filled the counter.
        let _ = signal.signal(call);
        true
    }
}

fn tables(
    memory: &GuestMemory,
    address: VringAddress,
    size: u32,
    event_idx: bool,
) -> Result<QueueTables, ClientFault> {
    let VringAddress { descriptors, available, used, .. } = address;
    let [descriptors, available, used] =
        [memory.at_user(descriptors)?, memory.at_user(available)?, memory.at_user(used)?];
    Ok(QueueTables::new(size, event_idx, [&descriptors, &available, &used])?)
}
