//! The backend's end of the control ring.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use ringfence_access::staging::{StagedPage, StagingLedger, StagingLimits, StagingPool};
use ringfence_platform::{Access, Channel, CopyOps, GrantStatus, Grantee, Gref};
use ringfence_ring::{BackRing, NETIF_CTRL, RingPages};
use ringfence_wire::netif::ctrl::{
    CtrlMessage, CtrlRequest, CtrlStatus, GREF_LIST_MAX, GrefEntry, GrefList, HASH_MAPPING_PAGE_MAX,
};

use super::hash::{HashSetup, TABLE_MAX};
use super::record::{CtrlRecord, CtrlState};
use crate::netback::channel_fault;
use crate::rules::RuleCounters;
use ringfence_frame::commands::{PortCommand, PortReply};
use ringfence_frame::port::Fault;
use ringfence_frame::steer::Steering;

/// Messages answered in one turn. A list may take a millisecond of mapping; the next device is not
/// to wait for a ring full of them.
const TURN: u32 = 4;

/// How the control side reaches the ports of its device: has the port of that queue carry out an
/// order. `None` when it is not there.
pub type Orders<'a> = dyn FnMut(u16, PortCommand) -> Option<PortReply> + 'a;

/// The control ring of one device, whatever platform it is on.
pub trait ControlRing: Send {
    /// Readable when there are messages.
    fn wait_fd(&self) -> BorrowedFd<'_>;

    /// Answers some of the messages that wait; whether there may be more.
    ///
    /// # Errors
    ///
    /// A [`Fault`] costs the device: the ring's index is impossible, or its channel fails.
    fn serve(&mut self, ports: &mut Orders<'_>) -> Result<bool, Fault>;

    /// Has the ports carry out again what the process before had them do, of a ring that was
    /// [adopted](CtrlBackend::adopt).
    fn take_up(&mut self, ports: &mut Orders<'_>);

    /// Pages staged, over all queues.
    fn staged(&self) -> u32;

    /// Whether the guest was told that its pages can be staged.
    fn stages(&self) -> bool;
}

/// What is served, and its bounds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CtrlOptions {
    /// Queues of the guest.
    pub queues: u16,
    /// Bounds of staging; `None`: no page is staged, and the guest is told so.
    pub staging: Option<StagingLimits>,
}

/// The control ring of one device. Dropped, it lets go of every page it maps; those in the tables of
/// ports go with the ports.
pub struct CtrlBackend<G, C> {
    ring: BackRing<RingPages>,
    channel: C,
    /// The guest's pages: lists are copied through it, staged pages mapped.
    pages: G,
    ops: CopyOps,
    ledger: StagingLedger,
    hash: HashSetup,
    options: CtrlOptions,
    rules: Arc<RuleCounters>,
    record: Option<CtrlRecord>,
    /// Pages that an adopted device had staged, by queue, which are to be mapped again.
    left: Vec<Vec<(Gref, Access)>>,
}

impl<G: Grantee, C: Channel> CtrlBackend<G, C> {
    /// Takes up the control ring of a frontend that has just connected.
    pub fn new(
        ring: RingPages,
        channel: C,
        pages: G,
        options: CtrlOptions,
        rules: &Arc<RuleCounters>,
    ) -> Self {
        Self::of(BackRing::attach(ring, NETIF_CTRL), channel, pages, options, rules)
    }

    /// As [`CtrlBackend::new`], and keeps a record, begun anew.
    ///
    /// # Errors
    ///
    /// A [`Fault`] when the record is of no use.
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

    /// Takes over from a backend that kept `record` and is no more: what was staged and how packets
    /// are hashed is as that one told the frontend. [`ControlRing::take_up`] is to follow.
    ///
    /// # Errors
    ///
    /// A [`Fault`] when the shared indices are impossible, or the channel is of no use.
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
            // The frontend was told that it can, or that it cannot.
            let staging = state.staging.then(StagingLimits::default);
            control.options.staging = staging;
            control.ledger = ledger(control.options);
            control.left = state.staged;
            match HashSetup::from_bytes(options.queues, &state.hash) {
                Some(hash) => control.hash = hash,
                None => drop(rules.count("adopted_hash_unusable")),
            }
        } else {
            control.save();
        }
        control.tell()?;
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
            left: Vec::new(),
        }
    }

    /// Counts staged pages in these pools, too, and stages no more than they have room for.
    #[must_use]
    pub fn sharing(mut self, pools: Vec<Arc<StagingPool>>) -> Self {
        self.ledger.share(pools);
        self
    }

    fn tell(&self) -> Result<(), Fault> {
        self.channel.notify().map_err(channel_fault(&self.rules))
    }

    /// Records the state that holds once what was answered is published.
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

    fn stages(&self) -> bool {
        self.options.staging.is_some()
    }

    fn take_up(&mut self, ports: &mut Orders<'_>) {
        for (queue, pages) in (0..).zip(core::mem::take(&mut self.left)) {
            for list in pages.chunks(GREF_LIST_MAX as usize) {
                self.stage_again(queue, list, ports);
            }
        }
        if let Some(steering) = self.hash.steering().map(Arc::new) {
            self.hash_by(Some(&steering), ports);
        }
    }

    fn serve(&mut self, ports: &mut Orders<'_>) -> Result<bool, Fault> {
        self.channel.clear().map_err(channel_fault(&self.rules))?;
        let overflow = |rules: &RuleCounters, error| {
            rules.count("ctrl_producer_overflow");
            Fault::misbehaved(error)
        };
        let waiting = self.ring.unconsumed().map_err(|e| overflow(&self.rules, e))?;
        for _ in 0..waiting.min(TURN) {
            let request = CtrlRequest::from_bytes(self.ring.request(0).into_unchecked());
            self.ring.consume(1);
            let (status, data) = match request.parse() {
                Ok(message) => self.carry_out(message, ports),
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
            self.tell()?;
        }
        if waiting > TURN {
            return Ok(true);
        }
        self.ring.final_check().map_err(|e| overflow(&self.rules, e))
    }
}

impl<G: Grantee, C: Channel> CtrlBackend<G, C> {
    fn carry_out(&mut self, message: CtrlMessage, ports: &mut Orders<'_>) -> (CtrlStatus, u32) {
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

    fn hash_by(&self, steering: Option<&Arc<Steering>>, ports: &mut Orders<'_>) {
        for queue in 0..self.options.queues {
            // A port that is gone hashes nothing.
            let _ = ports(queue, PortCommand::Hash(steering.cloned()));
        }
    }

    /// Fetches the first bytes of a page, once.
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
        let judged = HashSetup::judge_key(bytes);
        if judged != CtrlStatus::Success || bytes == 0 {
            return if bytes == 0 { self.hash.set_key(&[]) } else { judged };
        }
        let mut key = vec![0; bytes.into()];
        match self.fetch(page, &mut key) {
            Ok(()) => self.hash.set_key(&key),
            Err(status) => status,
        }
    }

    fn set_entries(&mut self, page: Gref, entries: u16, first: u32) -> CtrlStatus {
        let judged = self.hash.judge_entries(entries, first);
        if judged != CtrlStatus::Success {
            return judged;
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

    /// The entries of a list, fetched once.
    fn entries(&mut self, list: GrefList) -> Result<Vec<GrefEntry>, CtrlStatus> {
        if self.options.staging.is_none() {
            return Err(CtrlStatus::NotSupported);
        }
        let mut bytes = vec![0; usize::from(list.entries) * GrefEntry::SIZE];
        self.fetch(list.page, &mut bytes)?;
        let entry = |b: &[u8]| GrefEntry::from_bytes(b.try_into().unwrap_or_default());
        Ok(bytes.chunks_exact(GrefEntry::SIZE).map(entry).collect())
    }

    /// All or nothing.
    fn add(&mut self, list: GrefList, ports: &mut Orders<'_>) -> CtrlStatus {
        let entries = match self.entries(list) {
            Ok(entries) => entries,
            Err(status) => return status,
        };
        let grefs: Vec<Gref> = entries.iter().map(|entry| entry.gref).collect();
        if let Err(refusal) = self.ledger.judge(list.queue, &grefs) {
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

    /// Hands pages to the port of a queue, and notes them.
    fn stage(&mut self, queue: u32, pages: Vec<StagedPage>, ports: &mut Orders<'_>) -> bool {
        let staged: Vec<_> = pages.iter().map(|page| (page.gref, page.access)).collect();
        // judge() has seen to it that there is such a queue.
        let place = u16::try_from(queue).unwrap_or(u16::MAX);
        // Otherwise they came back, or went with the port: they are dropped, and so unmapped.
        let done = matches!(ports(place, PortCommand::Stage(pages)), Some(PortReply::Staged));
        if done {
            self.ledger.note(queue, staged);
        }
        done
    }

    /// Stages what the process before had staged. Pages that cannot be mapped any more are left out:
    /// the frontend has taken them back, which it was not to do.
    fn stage_again(&mut self, queue: u32, list: &[(Gref, Access)], ports: &mut Orders<'_>) {
        let grefs: Vec<Gref> = list.iter().map(|(gref, _)| *gref).collect();
        if let Err(refusal) = self.ledger.judge(queue, &grefs) {
            self.rules.count(refusal.label());
            return;
        }
        let pages = list.iter().filter_map(|(gref, access)| self.map(*gref, *access));
        let pages = pages.collect();
        self.stage(queue, pages, ports);
    }

    /// Maps a page for itself, so that it can go by itself.
    fn map(&mut self, gref: Gref, access: Access) -> Option<StagedPage> {
        let mut mapped = Vec::with_capacity(1);
        self.pages.map(&[(gref, access)], &mut mapped);
        let Some(Ok(memory)) = mapped.pop() else {
            self.rules.count("staging_page_not_mapped");
            return None;
        };
        Some(StagedPage { gref, access, memory })
    }

    fn del(&mut self, list: GrefList, ports: &mut Orders<'_>) -> (CtrlStatus, u32) {
        let mut entries = match self.entries(list) {
            Ok(entries) => entries,
            Err(status) => return (status, 0),
        };
        let grefs: Vec<Gref> = entries.iter().map(|entry| entry.gref).collect();
        let staged = match self.ledger.strike(list.queue, &grefs) {
            Ok(staged) => staged,
            Err(refusal) => {
                self.rules.count(refusal.label());
                return (CtrlStatus::InvalidParameter, 0);
            }
        };
        let both = grefs.iter().zip(&staged);
        let leaving: Vec<_> = both.filter_map(|(gref, access)| Some((*gref, (*access)?))).collect();
        // The statuses are written first: if that cannot be done, nothing else is.
        for (entry, staged) in entries.iter_mut().zip(&staged) {
            let status =
                if staged.is_some() { CtrlStatus::Success } else { CtrlStatus::InvalidParameter };
            entry.status = u16::try_from(status.to_raw()).unwrap_or(u16::MAX);
        }
        if !self.write_back(list.page, &entries) {
            self.ledger.note(list.queue, leaving);
            return (CtrlStatus::InvalidParameter, 0);
        }
        if leaving.len() < grefs.len() {
            self.rules.count("staging_not_staged");
        }
        let count = u32::try_from(leaving.len()).unwrap_or(u32::MAX);
        let queue = u16::try_from(list.queue).unwrap_or(u16::MAX);
        // The pages in the reply are dropped, and so unmapped, before the response is written.
        let leaving = leaving.into_iter().map(|(gref, _)| gref).collect();
        drop(ports(queue, PortCommand::Unstage(leaving)));
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
