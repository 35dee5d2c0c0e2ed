//! The backend's end of the control ring.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use ringfence_grants::staging::{StagedPage, StagingLedger, StagingLimits};
use ringfence_platform::{Access, Channel, CopyOps, GrantStatus, Grantee, Gref};
use ringfence_ring::{BackRing, NETIF_CTRL, RingPages};
use ringfence_wire::netif::ctrl::{
    CtrlMessage, CtrlRequest, CtrlStatus, GrefEntry, GrefList, HASH_MAPPING_PAGE_MAX,
};

use super::hash::{HashSetup, TABLE_MAX};
use crate::netback::channel_fault;
use crate::orders::{PortOrder, PortReply};
use crate::port::Fault;
use crate::rules::RuleCounters;

/// Messages answered in one turn. A list may take a millisecond of mapping; the next device is not
/// to wait for a ring full of them.
const TURN: u32 = 4;

/// How the control side reaches the ports of its device: has the port of that queue carry out an
/// order. `None` when it is not there.
pub type Orders<'a> = dyn FnMut(u16, PortOrder) -> Option<PortReply> + 'a;

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

    /// Pages staged, over all queues.
    fn staged(&self) -> u32;
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
}

impl<G: Grantee, C: Channel> CtrlBackend<G, C> {
    /// Takes up a control ring where its shared indices say.
    pub fn new(
        ring: RingPages,
        channel: C,
        pages: G,
        options: CtrlOptions,
        rules: &Arc<RuleCounters>,
    ) -> Self {
        let limits = options.staging.unwrap_or(StagingLimits { per_queue: 0, per_guest: 0 });
        CtrlBackend {
            ring: BackRing::attach(ring, NETIF_CTRL),
            channel,
            pages,
            ops: CopyOps::new(),
            ledger: StagingLedger::new(options.queues.into(), limits),
            hash: HashSetup::new(options.queues),
            options,
            rules: Arc::clone(rules),
        }
    }
}

impl<G: Grantee, C: Channel> ControlRing for CtrlBackend<G, C> {
    fn wait_fd(&self) -> BorrowedFd<'_> {
        self.channel.as_fd()
    }

    fn staged(&self) -> u32 {
        self.ledger.staged()
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
        if self.ring.publish() {
            self.channel.notify().map_err(channel_fault(&self.rules))?;
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
                for queue in 0..self.options.queues {
                    // A port that is gone hashes nothing.
                    let _ = ports(queue, PortOrder::Hash(steering.clone()));
                }
            }
        } else {
            self.rules.count("ctrl_hash_refused");
        }
        (answer, 0)
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
        let Some(pages) = self.map(&entries) else { return CtrlStatus::InvalidParameter };
        // judge() has seen to it that there is such a queue.
        let queue = u16::try_from(list.queue).unwrap_or(u16::MAX);
        match ports(queue, PortOrder::Stage(pages)) {
            Some(PortReply::Staged) => {
                self.ledger.note(list.queue, &grefs);
                CtrlStatus::Success
            }
            // The pages came back, or went with the port: they are dropped, and so unmapped.
            _ => CtrlStatus::InvalidParameter,
        }
    }

    /// Maps every page of a list, each for itself, so that each can go by itself.
    fn map(&mut self, entries: &[GrefEntry]) -> Option<Vec<StagedPage>> {
        let mut mapped = Vec::with_capacity(1);
        let mut pages = Vec::with_capacity(entries.len());
        for entry in entries {
            let access = if entry.is_read_only() { Access::ReadOnly } else { Access::ReadWrite };
            self.pages.map(&[(entry.gref, access)], &mut mapped);
            let Some(Ok(memory)) = mapped.pop() else {
                self.rules.count("staging_page_not_mapped");
                return None;
            };
            pages.push(StagedPage { gref: entry.gref, access, memory });
        }
        Some(pages)
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
        let leaving: Vec<Gref> =
            grefs.iter().zip(&staged).filter(|(_, staged)| **staged).map(|(g, _)| *g).collect();
        // The statuses are written first: if that cannot be done, nothing else is.
        for (entry, staged) in entries.iter_mut().zip(&staged) {
            let status = if *staged { CtrlStatus::Success } else { CtrlStatus::InvalidParameter };
            entry.status = u16::try_from(status.to_raw()).unwrap_or(u16::MAX);
        }
        if !self.write_back(list.page, &entries) {
            self.ledger.note(list.queue, &leaving);
            return (CtrlStatus::InvalidParameter, 0);
        }
        if leaving.len() < grefs.len() {
            self.rules.count("staging_not_staged");
        }
        let count = u32::try_from(leaving.len()).unwrap_or(u32::MAX);
        let queue = u16::try_from(list.queue).unwrap_or(u16::MAX);
        // The pages in the reply are dropped, and so unmapped, before the response is written.
        drop(ports(queue, PortOrder::Unstage(leaving)));
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
