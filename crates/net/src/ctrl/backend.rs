//! Backend of the control ring: executes a guest's messages about staging and hashing.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use ringfence_access::staging::{StagedPage, StagingLedger, StagingLimits, StagingPool};
use ringfence_platform::{Access, Channel, CopyOps, GrantStatus, Grantee, Gref};
use ringfence_ring::{BackRing, NETIF_CTRL, RingPages};
use ringfence_wire::netif::ctrl::{
    CtrlMessage, CtrlRequest, CtrlStatus, GREF_LIST_MAX, GrefEntry, GrefList, HASH_MAPPING_PAGE_MAX,
};
use ringfence_wire::numbers::bounded;

use super::hash::{HashSetup, TABLE_MAX};
use super::record::{CtrlRecord, CtrlState};
use crate::commands::{VifCommand, VifReply};
use crate::queues::channel_fault;
use crate::rules::RuleCounters;
use ringfence_frame::commands::{PortCommand, PortReply};
use ringfence_frame::port::Fault;
use ringfence_frame::steer::Steering;

/// Maximum number of messages answered in one call. A list may take a millisecond of mapping, and other
/// devices wait meanwhile.
const MESSAGES_MAX: u32 = 4;

/// Function that executes a command on the port of a queue; `None` if there is no port.
pub type PortCommands<'a> = dyn FnMut(u16, PortCommand) -> Option<PortReply> + 'a;

/// Control ring of one device, on any platform.
pub trait ControlRing: Send {
    /// Returns the file that is readable when there are messages.
    fn wait_fd(&self) -> BorrowedFd<'_>;

    /// Answers some of the waiting messages. Returns `true` if there may be more.
    ///
    /// # Errors
    ///
    /// Returns a [`Fault`] that ends the device if the ring's index is invalid or the channel fails.
    fn serve(&mut self, ports: &mut PortCommands<'_>) -> Result<bool, Fault>;

    /// Restores the state of an [adopted](CtrlBackend::adopt) ring in the ports.
    fn restore(&mut self, ports: &mut PortCommands<'_>);

    /// Returns the number of staged pages of all queues.
    fn staged(&self) -> u32;

    /// Returns true if staging was offered to the guest.
    fn offers_staging(&self) -> bool;
}

/// Queues and limits of a control ring.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CtrlOptions {
    /// Number of the guest's queues.
    pub queues: u16,
    /// Limits of staging; `None` refuses staging.
    pub staging: Option<StagingLimits>,
}

/// Control ring of one device. Dropping it unmaps its pages; the staged pages are unmapped with the ports.
pub struct CtrlBackend<G, C> {
    ring: BackRing<RingPages>,
    channel: C,
    /// Access to the guest's pages: lists are copied, staged pages are mapped.
    pages: G,
    ops: CopyOps,
    ledger: StagingLedger,
    hash: HashSetup,
    options: CtrlOptions,
    rules: Arc<RuleCounters>,
    record: Option<CtrlRecord>,
    /// Staged pages of an adopted device, by queue, that are not yet mapped again.
    staged_before: Vec<Vec<(Gref, Access)>>,
}

impl<G: Grantee, C: Channel> CtrlBackend<G, C> {
    /// Makes the control ring of a frontend that has just connected.
    pub fn new(
        ring: RingPages,
        channel: C,
        pages: G,
        options: CtrlOptions,
        rules: &Arc<RuleCounters>,
    ) -> Self {
        Self::of(BackRing::attach(ring, NETIF_CTRL), channel, pages, options, rules)
    }

    /// Makes a control ring, as [`CtrlBackend::new`] does, with a crash journal that is cleared first.
    ///
    /// # Errors
    ///
    /// Returns a [`Fault`] if the crash journal is unusable.
    pub fn recorded(
        ring: RingPages,
        record: CtrlRecord,
        channel: C,
        pages: G,
        options: CtrlOptions,
        rules: &Arc<RuleCounters>,
    ) -> Result<Self, Fault> {
        record.clear();
        let ring = BackRing::attach_recorded(ring, ring_of(&record)?, NETIF_CTRL);
        let mut control = Self::of(ring, channel, pages, options, rules);
        control.record = Some(record);
        control.save();
        Ok(control)
    }

    /// Takes over from a backend that kept the crash journal `record`. Staged pages and hash configuration are
    /// those that the previous backend confirmed. [`ControlRing::restore`] must follow.
    ///
    /// # Errors
    ///
    /// Returns a [`Fault`] if the shared indices are invalid, or the channel fails.
    pub fn adopt(
        ring: RingPages,
        record: CtrlRecord,
        channel: C,
        pages: G,
        options: CtrlOptions,
        rules: &Arc<RuleCounters>,
    ) -> Result<Self, Fault> {
        let ring = BackRing::resume(ring, ring_of(&record)?, NETIF_CTRL).map_err(|why| {
            rules.count("adopted_ring_index");
            Fault::misbehaved(why)
        })?;
        let state = record.load(ring.consumed_index());
        let mut control = Self::of(ring, channel, pages, options, rules);
        control.record = Some(record);
        if let Some(state) = state {
            // The frontend keeps the offer that it has read.
            let staging = state.staging.then(StagingLimits::default);
            control.options.staging = staging;
            control.ledger = ledger(control.options);
            control.staged_before = state.staged;
            match HashSetup::from_bytes(options.queues, &state.hash) {
                Some(hash) => control.hash = hash,
                None => drop(rules.count("adopted_hash_unusable")),
            }
        } else {
            control.save();
        }
        control.notify()?;
        Ok(control)
    }

    fn of(
        ring: BackRing<RingPages>,
        channel: C,
        pages: G,
        options: CtrlOptions,
        rules: &Arc<RuleCounters>,
    ) -> Self {
        CtrlBackend {
            ring,
            channel,
            pages,
            ops: CopyOps::new(),
            ledger: ledger(options),
            hash: HashSetup::new(options.queues),
            options,
            rules: Arc::clone(rules),
            record: None,
            staged_before: Vec::new(),
        }
    }

    /// Counts staged pages in `pools` too, and stages no more than these permit.
    #[must_use]
    pub fn sharing(mut self, pools: Vec<Arc<StagingPool>>) -> Self {
        self.ledger.share(pools);
        self
    }

    fn notify(&self) -> Result<(), Fault> {
        self.channel.notify().map_err(channel_fault(&self.rules))
    }

    /// Writes the state after the published responses to the crash journal.
    fn save(&self) {
        let Some(record) = &self.record else { return };
        let state = CtrlState {
            staging: self.options.staging.is_some(),
            staged: self.ledger.all().map(Iterator::collect).collect(),
            hash: self.hash.to_bytes(),
        };
        if !record.save(self.ring.consumed_index(), &state) {
            self.rules.count("ctrl_not_recorded");
        }
    }
}

fn ledger(options: CtrlOptions) -> StagingLedger {
    let limits = options.staging.unwrap_or(StagingLimits { per_queue: 0, per_guest: 0 });
    StagingLedger::new(options.queues.into(), limits)
}

fn ring_of(record: &CtrlRecord) -> Result<RingPages, Fault> {
    record.ring().map_err(|e| Fault::system("the record of a control ring", io::Error::other(e)))
}

impl<G: Grantee, C: Channel> ControlRing for CtrlBackend<G, C> {
    fn wait_fd(&self) -> BorrowedFd<'_> {
        self.channel.as_fd()
    }

    fn staged(&self) -> u32 {
        self.ledger.staged()
    }

    fn offers_staging(&self) -> bool {
        self.options.staging.is_some()
    }

    fn restore(&mut self, ports: &mut PortCommands<'_>) {
        for (queue, pages) in (0..).zip(core::mem::take(&mut self.staged_before)) {
            for list in pages.chunks(GREF_LIST_MAX as usize) {
                self.restage(queue, list, ports);
            }
        }
        if let Some(steering) = self.hash.steering().map(Arc::new) {
            self.hash_by(Some(&steering), ports);
        }
    }

    fn serve(&mut self, ports: &mut PortCommands<'_>) -> Result<bool, Fault> {
        self.channel.clear().map_err(channel_fault(&self.rules))?;
        let overflow = |rules: &RuleCounters, error| {
            rules.count("ctrl_producer_overflow");
            Fault::misbehaved(error)
        };
        let waiting = self.ring.unconsumed().map_err(|e| overflow(&self.rules, e))?;
        for _ in 0..waiting.min(MESSAGES_MAX) {
            let request = CtrlRequest::from_bytes(self.ring.request(0).into_unchecked());
            self.ring.consume(1);
            let (status, data) = match request.parse() {
                Ok(message) => self.execute(message, ports),
                Err(refusal) => {
                    self.rules.count(refusal.label());
                    (refusal.status(), 0)
                }
            };
            let answered = self.ring.respond(&request.answer(status, data).to_bytes());
            debug_assert!(answered, "the request was consumed just now");
        }
        if waiting > 0 {
            self.save();
        }
        if self.ring.publish() {
            self.notify()?;
        }
        if waiting > MESSAGES_MAX {
            return Ok(true);
        }
        self.ring.final_check().map_err(|e| overflow(&self.rules, e))
    }
}

impl<G: Grantee, C: Channel> CtrlBackend<G, C> {
    fn execute(&mut self, message: CtrlMessage, ports: &mut PortCommands<'_>) -> (CtrlStatus, u32) {
        let before = self.hash.steering().is_some();
        let answer = match message {
            CtrlMessage::GetGrefMappingSize(queue) => return self.mapping_size(queue),
            CtrlMessage::AddGrefMapping(list) => return (self.add(list, ports), 0),
            CtrlMessage::DelGrefMapping(list) => return self.del(list, ports),
            CtrlMessage::GetHashFlags => {
                return match self.hash.types() {
                    Ok(types) => (CtrlStatus::Success, types.mask()),
                    Err(status) => (status, 0),
                };
            }
            CtrlMessage::GetHashMappingSize => return (CtrlStatus::Success, TABLE_MAX),
            CtrlMessage::SetHashFlags(types) => self.hash.set_types(types),
            CtrlMessage::SetHashAlgorithm(algorithm) => self.hash.set_algorithm(algorithm),
            CtrlMessage::SetHashMappingSize { entries } => self.hash.set_table_size(entries),
            CtrlMessage::SetHashKey { page, bytes } => self.set_key(page, bytes),
            CtrlMessage::SetHashMapping { page, entries, first } => {
                self.set_entries(page, entries, first)
            }
        };
        if answer == CtrlStatus::Success {
            let steering = self.hash.steering().map(Arc::new);
            if before || steering.is_some() {
                self.hash_by(steering.as_ref(), ports);
            }
        } else {
            self.rules.count("ctrl_hash_refused");
        }
        (answer, 0)
    }

    fn hash_by(&self, steering: Option<&Arc<Steering>>, ports: &mut PortCommands<'_>) {
        for queue in 0..self.options.queues {
            // A missing port has nothing to hash.
            let _ = ports(queue, PortCommand::Hash(steering.cloned()));
        }
    }

    /// Copies the first bytes of a page, once.
    fn fetch(&mut self, page: Gref, into: &mut [u8]) -> Result<(), CtrlStatus> {
        let mut list = self.ops.begin();
        let added = list.read(page, 0, into);
        self.pages.copy(list);
        let status = self.ops.statuses().first().copied();
        match (added, status) {
            (Ok(_), Some(GrantStatus::Okay)) => Ok(()),
            _ => {
                self.rules.count("ctrl_page_unreadable");
                Err(CtrlStatus::InvalidParameter)
            }
        }
    }

    fn set_key(&mut self, page: Gref, bytes: u16) -> CtrlStatus {
        let validated = HashSetup::validate_key(bytes);
        if validated != CtrlStatus::Success || bytes == 0 {
            return if bytes == 0 { self.hash.set_key(&[]) } else { validated };
        }
        let mut key = vec![0; bytes.into()];
        match self.fetch(page, &mut key) {
            Ok(()) => self.hash.set_key(&key),
            Err(status) => status,
        }
    }

    fn set_entries(&mut self, page: Gref, entries: u16, first: u32) -> CtrlStatus {
        let validated = self.hash.validate_entries(entries, first);
        if validated != CtrlStatus::Success {
            return validated;
        }
        debug_assert!(u32::from(entries) <= HASH_MAPPING_PAGE_MAX, "the parser bounds it");
        let mut bytes = vec![0; usize::from(entries) * 4];
        if let Err(status) = self.fetch(page, &mut bytes) {
            return status;
        }
        let word = |b: &[u8]| u32::from_le_bytes(b.try_into().unwrap_or_default());
        let entries: Vec<u32> = bytes.chunks_exact(4).map(word).collect();
        self.hash.set_entries(&entries, first)
    }

    fn mapping_size(&self, queue: u32) -> (CtrlStatus, u32) {
        if self.options.staging.is_none() {
            return (CtrlStatus::NotSupported, 0);
        }
        match self.ledger.limit(queue) {
            Ok(entries) => (CtrlStatus::Success, entries),
            Err(refusal) => {
                self.rules.count(refusal.label());
                (CtrlStatus::InvalidParameter, 0)
            }
        }
    }

    /// Copies the entries of a list, once.
    fn entries(&mut self, list: GrefList) -> Result<Vec<GrefEntry>, CtrlStatus> {
        if self.options.staging.is_none() {
            return Err(CtrlStatus::NotSupported);
        }
        let mut bytes = vec![0; usize::from(list.entries) * GrefEntry::SIZE];
        self.fetch(list.page, &mut bytes)?;
        let entry = |b: &[u8]| GrefEntry::from_bytes(b.try_into().unwrap_or_default());
        Ok(bytes.chunks_exact(GrefEntry::SIZE).map(entry).collect())
    }

    /// Stages all pages of a list, or none.
    fn add(&mut self, list: GrefList, ports: &mut PortCommands<'_>) -> CtrlStatus {
        let entries = match self.entries(list) {
            Ok(entries) => entries,
            Err(status) => return status,
        };
        let grefs: Vec<Gref> = entries.iter().map(|entry| entry.gref).collect();
        if let Err(refusal) = self.ledger.validate(list.queue, &grefs) {
            self.rules.count(refusal.label());
            return CtrlStatus::InvalidParameter;
        }
        let mut pages = Vec::with_capacity(entries.len());
        for entry in entries {
            let access = if entry.is_read_only() { Access::ReadOnly } else { Access::ReadWrite };
            match self.map(entry.gref, access) {
                Some(page) => pages.push(page),
                None => return CtrlStatus::InvalidParameter,
            }
        }
        if self.stage(list.queue, pages, ports) {
            CtrlStatus::Success
        } else {
            CtrlStatus::InvalidParameter
        }
    }

    /// Adds pages to the staging table of a queue's port, and records them.
    fn stage(&mut self, queue: u32, pages: Vec<StagedPage>, ports: &mut PortCommands<'_>) -> bool {
        let staged: Vec<_> = pages.iter().map(|page| (page.gref, page.access)).collect();
        // `validate` has checked the queue number.
        let place = bounded(queue, u16::MAX);
        // After a refusal, the returned pages are dropped and so unmapped.
        let done = matches!(
            ports(place, VifCommand::Stage(pages).into()).and_then(VifReply::of),
            Some(VifReply::Staged)
        );
        if done {
            self.ledger.record(queue, staged);
        }
        done
    }

    /// Stages the pages that the previous process had staged. Pages that can no longer be mapped are skipped:
    /// the frontend has revoked them against the rules.
    fn restage(&mut self, queue: u32, list: &[(Gref, Access)], ports: &mut PortCommands<'_>) {
        let grefs: Vec<Gref> = list.iter().map(|(gref, _)| *gref).collect();
        if let Err(refusal) = self.ledger.validate(queue, &grefs) {
            self.rules.count(refusal.label());
            return;
        }
        let pages = list.iter().filter_map(|(gref, access)| self.map(*gref, *access));
        let pages = pages.collect();
        self.stage(queue, pages, ports);
    }

    /// Maps a single page, so that it can be unmapped alone.
    fn map(&mut self, gref: Gref, access: Access) -> Option<StagedPage> {
        let mut mapped = Vec::with_capacity(1);
        self.pages.map(&[(gref, access)], &mut mapped);
        let Some(Ok(memory)) = mapped.pop() else {
            self.rules.count("staging_page_not_mapped");
            return None;
        };
        Some(StagedPage { gref, access, memory })
    }

    fn del(&mut self, list: GrefList, ports: &mut PortCommands<'_>) -> (CtrlStatus, u32) {
        let mut entries = match self.entries(list) {
            Ok(entries) => entries,
            Err(status) => return (status, 0),
        };
        let grefs: Vec<Gref> = entries.iter().map(|entry| entry.gref).collect();
        let staged = match self.ledger.remove_all(list.queue, &grefs) {
            Ok(staged) => staged,
            Err(refusal) => {
                self.rules.count(refusal.label());
                return (CtrlStatus::InvalidParameter, 0);
            }
        };
        let both = grefs.iter().zip(&staged);
        let leaving: Vec<_> = both.filter_map(|(gref, access)| Some((*gref, (*access)?))).collect();
        // Write the statuses first: if that fails, nothing else changes.
        for (entry, staged) in entries.iter_mut().zip(&staged) {
            let status =
                if staged.is_some() { CtrlStatus::Success } else { CtrlStatus::InvalidParameter };
            entry.status = bounded(status.to_raw(), u16::MAX);
        }
        if !self.write_back(list.page, &entries) {
            self.ledger.record(list.queue, leaving);
            return (CtrlStatus::InvalidParameter, 0);
        }
        if leaving.len() < grefs.len() {
            self.rules.count("staging_not_staged");
        }
        let count = bounded(leaving.len(), u32::MAX);
        let queue = bounded(list.queue, u16::MAX);
        // The pages in the reply are dropped, and so unmapped, before the response is written.
        let leaving = leaving.into_iter().map(|(gref, _)| gref).collect();
        drop(ports(queue, VifCommand::Unstage(leaving).into()));
        (CtrlStatus::Success, count)
    }

    fn write_back(&mut self, page: Gref, entries: &[GrefEntry]) -> bool {
        let bytes: Vec<u8> = entries.iter().flat_map(|entry| entry.to_bytes()).collect();
        let mut list = self.ops.begin();
        let added = list.write(page, 0, &bytes);
        self.pages.copy(list);
        let written = added.is_ok() && self.ops.statuses().first() == Some(&GrantStatus::Okay);
        if !written {
            self.rules.count("ctrl_page_unwritable");
        }
        written
    }
}
