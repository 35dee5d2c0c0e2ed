//! Control ring of the backend, message by message, over real grants. `docs/staging-grants.md` has the
//! decisions that the interface leaves open; each has its test here.

#![allow(clippy::unwrap_used, reason = "the panic of a test is its report")]

use std::os::fd::AsFd;
use std::sync::Arc;

use ringfence_access::index::GREF_LIMIT;
use ringfence_access::staging::{StagingLimits, StagingTable};
use ringfence_frame::commands::{PortCommand, PortReply};
use ringfence_frame::port::Fault;
use ringfence_frame::steer::Steering;
use ringfence_memory::LentSlice;
use ringfence_net::commands::{VifCommand, VifReply};
use ringfence_net::ctrl::backend::{ControlRing, CtrlBackend, CtrlOptions};
use ringfence_net::ctrl::record::CtrlRecord;
use ringfence_net::rules::RuleCounters;
use ringfence_platform::local::hub::{Hub, HubHandle, HubLimits};
use ringfence_platform::local::{LocalChannel, LocalGrantee, LocalGranter, LocalPlatform};
use ringfence_platform::{Access, Channel, DomId, Granter, Gref, Lease, Platform};
use ringfence_ring::{FrontRing, NETIF_CTRL, RingPages};
use ringfence_wire::netif::ctrl::{
    CtrlMessage, CtrlRequest, CtrlResponse, CtrlStatus, CtrlType, GrefEntry, GrefList, HashTypes,
};

const OK: u32 = 0;
const NOT_SUPPORTED: u32 = 1;
const INVALID: u32 = 2;
const OVERFLOW: u32 = 3;

/// Ports of the device: tables of staged pages, and the hash configuration.
#[derive(Default)]
struct Ports {
    tables: [StagingTable; 2],
    steering: Option<Arc<Steering>>,
}

impl Ports {
    fn execute(&mut self, queue: u16, command: PortCommand) -> Option<PortReply> {
        let table = self.tables.get_mut(usize::from(queue))?;
        if let PortCommand::Hash(steering) = command {
            self.steering = steering;
            return Some(PortReply::Hashing);
        }
        Some(match VifCommand::of(command) {
            Some(VifCommand::Stage(pages)) => match table.add(pages) {
                Ok(()) => VifReply::Staged.into(),
                Err((pages, why)) => VifReply::NotStaged(pages, why).into(),
            },
            Some(VifCommand::Unstage(grefs)) => {
                let taken = grefs.into_iter().filter_map(|g| table.take(g));
                VifReply::Unstaged(taken.collect()).into()
            }
            Some(
                VifCommand::SendStaged(_)
                | VifCommand::Resize(_)
                | VifCommand::ReadLevels
                | VifCommand::ReadUnanswered,
            )
            | None => PortReply::Unsupported,
        })
    }
}

/// Backend, and a frontend that sends arbitrary messages.
struct Dialogue {
    hub: HubHandle,
    platform: LocalPlatform,
    _front_platform: LocalPlatform,
    granter: LocalGranter,
    ring_page: Lease,
    list: Lease,
    ring: FrontRing<RingPages>,
    channel: LocalChannel,
    backend: CtrlBackend<LocalGrantee, LocalChannel>,
    ports: Ports,
    rules: Arc<RuleCounters>,
    id: u16,
}

impl Drop for Dialogue {
    fn drop(&mut self) {
        self.hub.stop();
    }
}

impl Dialogue {
    fn new() -> Dialogue {
        Dialogue::with(Some(StagingLimits { per_queue: 64, per_guest: 96 }))
    }

    /// Makes a dialogue with two queues.
    fn with(staging: Option<StagingLimits>) -> Dialogue {
        let (thread, hub) = Hub::new(HubLimits::default()).unwrap();
        std::thread::spawn(move || thread.run().unwrap());
        let join = |wanted, privileged| {
            LocalPlatform::connect(hub.admit(wanted, privileged).unwrap().1).unwrap()
        };
        let platform = join(Some(DomId(0)), true);
        let front_platform = join(None, false);
        let mut granter = front_platform.granter(DomId(0)).unwrap();
        let ring_page = granter.lend(Access::ReadWrite).unwrap();
        let list = granter.lend(Access::ReadWrite).unwrap();
        ring_page.memory().zero(0, 4096).unwrap();
        let pages = RingPages::new(ring_page.memory().clone(), 4096).unwrap();
        let ring = FrontRing::init(pages, NETIF_CTRL);
        let channel = front_platform.alloc_unbound(DomId(0)).unwrap();
        let peer = front_platform.domid();
        let bound = platform.bind_interdomain(peer, channel.port()).unwrap();
        let mut grantee = platform.grantee(peer).unwrap();
        let mut mapped = Vec::new();
        use ringfence_platform::Grantee as _;
        grantee.map(&[(ring_page.gref(), Access::ReadWrite)], &mut mapped);
        let shared = RingPages::new(mapped.pop().unwrap().unwrap(), 4096).unwrap();
        let rules = Arc::new(RuleCounters::default());
        let options = CtrlOptions { queues: 2, staging };
        let backend = CtrlBackend::new(shared, bound, grantee, options, &rules);
        Dialogue {
            hub,
            platform,
            _front_platform: front_platform,
            granter,
            ring_page,
            list,
            ring,
            channel,
            backend,
            ports: Ports::default(),
            rules,
            id: 0,
        }
    }

    /// Replaces the backend by another one, as a process with the crash journal `record` does.
    fn succeed(&mut self, record: &LentSlice, adopting: bool) {
        let peer = self._front_platform.domid();
        let bound = self.platform.bind_interdomain(peer, self.channel.port());
        let mut grantee = self.platform.grantee(peer).unwrap();
        let mut mapped = Vec::new();
        use ringfence_platform::Grantee as _;
        grantee.map(&[(self.ring_page.gref(), Access::ReadWrite)], &mut mapped);
        let ring = RingPages::new(mapped.pop().unwrap().unwrap(), 4096).unwrap();
        let staging = Some(StagingLimits { per_queue: 64, per_guest: 96 });
        let options = CtrlOptions { queues: 2, staging };
        let record = CtrlRecord::new(record.clone()).unwrap();
        let make = if adopting { CtrlBackend::adopt } else { CtrlBackend::recorded };
        // A channel of the local platform can be bound once, so later backends use a new one.
        let channel = bound.unwrap_or_else(|_| {
            self.channel = self._front_platform.alloc_unbound(DomId(0)).unwrap();
            self.platform.bind_interdomain(peer, self.channel.port()).unwrap()
        });
        self.ports = Ports::default();
        self.backend = make(ring, record, channel, grantee, options, &self.rules).unwrap();
        let ports = &mut self.ports;
        self.backend.restore(&mut |queue, command| ports.execute(queue, command));
    }

    fn lend(&mut self, access: Access, count: usize) -> Vec<Lease> {
        (0..count).map(|_| self.granter.lend(access).unwrap()).collect()
    }

    fn serve(&mut self) -> Result<bool, Fault> {
        let ports = &mut self.ports;
        self.backend.serve(&mut |queue, command| ports.execute(queue, command))
    }

    fn post(&mut self, kind: u16, data: [u32; 3]) {
        self.id = self.id.wrapping_add(1);
        let request = CtrlRequest { id: self.id, kind: CtrlType::from_raw(kind), data };
        assert!(self.ring.request(&request.to_bytes()));
    }

    /// Sends a message; returns status and data of the response.
    fn call_raw(&mut self, kind: u16, data: [u32; 3]) -> (u32, u32) {
        self.post(kind, data);
        self.ring.publish();
        self.serve().unwrap();
        let response = self.answer().unwrap();
        assert_eq!((response.id, response.kind.to_raw()), (self.id, kind));
        (response.status.to_raw(), response.data)
    }

    fn answer(&mut self) -> Option<CtrlResponse> {
        (self.ring.unconsumed().unwrap() > 0).then(|| {
            // The whole slot: its unused end must not leak earlier content (XSA-216).
            let slot: [u8; 16] = self.ring.response(0).into_unchecked();
            self.ring.consume(1);
            assert_eq!(slot[12..], [0; 4]);
            CtrlResponse::from_bytes(*slot.first_chunk().unwrap())
        })
    }

    fn call(&mut self, message: CtrlMessage) -> (u32, u32) {
        let request = message.request(0);
        self.call_raw(request.kind.to_raw(), request.data)
    }

    fn write_list(&self, entries: &[GrefEntry]) {
        let bytes: Vec<u8> = entries.iter().flat_map(|entry| entry.to_bytes()).collect();
        self.list.memory().copy_from(0, &bytes).unwrap();
    }

    fn list(&self, queue: u32, entries: usize) -> GrefList {
        GrefList { queue, page: self.list.gref(), entries: u16::try_from(entries).unwrap() }
    }

    fn add(&mut self, queue: u32, entries: &[GrefEntry]) -> u32 {
        self.write_list(entries);
        let (status, data) =
            self.call(CtrlMessage::AddGrefMapping(self.list(queue, entries.len())));
        assert_eq!(data, 0);
        status
    }

    /// Removes pages; returns the status, the number of pages removed, and the status of each entry.
    fn del(&mut self, queue: u32, grefs: &[u32]) -> (u32, u32, Vec<u16>) {
        // The previous content of the status field is ignored.
        let entry = |gref: &u32| GrefEntry { gref: Gref(*gref), flags: 0xFFFE, status: 0xBEEF };
        self.write_list(&grefs.iter().map(entry).collect::<Vec<_>>());
        let (status, data) = self.call(CtrlMessage::DelGrefMapping(self.list(queue, grefs.len())));
        let mut bytes = vec![0; grefs.len() * GrefEntry::SIZE];
        self.list.memory().copy_to(0, &mut bytes).unwrap();
        let entry = |b: &[u8]| GrefEntry::from_bytes(b.try_into().unwrap()).status;
        (status, data, bytes.chunks_exact(GrefEntry::SIZE).map(entry).collect())
    }

    fn mapped(&self) -> u64 {
        let counts = self.platform.counters().values();
        counts.grant_maps - counts.grant_unmaps
    }
}

fn rw(leases: &[Lease]) -> Vec<GrefEntry> {
    leases.iter().map(|lease| GrefEntry::new(lease.gref(), false)).collect()
}

#[test]
fn message_of_each_type_gets_response() {
    let mut d = Dialogue::new();
    // The sequence of the header: flags are refused before an algorithm is set.
    assert_eq!(d.call(CtrlMessage::GetHashFlags), (NOT_SUPPORTED, 0));
    assert_eq!(d.call(CtrlMessage::SetHashFlags(HashTypes::ALL)), (NOT_SUPPORTED, 0));
    assert_eq!(d.call(CtrlMessage::SetHashAlgorithm(7)), (INVALID, 0));
    assert_eq!(d.call(CtrlMessage::SetHashAlgorithm(1)), (OK, 0));
    assert_eq!(d.call(CtrlMessage::GetHashFlags), (OK, 15));
    assert_eq!(d.call_raw(1, [7, 8, 9]), (OK, 15), "it uses none of these");
    assert_eq!(d.call(CtrlMessage::SetHashFlags(HashTypes::ALL)), (OK, 0));
    assert_eq!(d.call_raw(2, [16, 0, 0]), (INVALID, 0));
    assert_eq!(d.call(CtrlMessage::GetHashMappingSize), (OK, 1024));
    assert_eq!(d.call(CtrlMessage::SetHashMappingSize { entries: 1025 }), (INVALID, 0));
    assert_eq!(d.call(CtrlMessage::SetHashMappingSize { entries: 4 }), (OK, 0));
    let page = d.list.gref();
    d.list.memory().copy_from(0, &[1; 40]).unwrap();
    assert_eq!(d.call(CtrlMessage::SetHashKey { page, bytes: 40 }), (OK, 0));
    assert_eq!(d.call(CtrlMessage::SetHashKey { page, bytes: 41 }), (OVERFLOW, 0));
    assert_eq!(d.call(CtrlMessage::SetHashKey { page: Gref(4000), bytes: 40 }), (INVALID, 0));
    assert_eq!(d.call(CtrlMessage::SetHashKey { page: Gref(4000), bytes: 0 }), (OK, 0));
    d.list.memory().copy_from(0, &[1, 0, 0, 0, 0, 0, 0, 0]).unwrap();
    let set = |entries, first| CtrlMessage::SetHashMapping { page, entries, first };
    assert_eq!(d.call(set(2, 2)), (OK, 0));
    assert_eq!(d.call(set(2, 3)), (INVALID, 0), "as Linux's netback answers");
    d.list.memory().copy_from(0, &[2, 0, 0, 0]).unwrap();
    assert_eq!(d.call(set(1, 0)), (INVALID, 0), "there is no queue 2");
    let steering = d.ports.steering.clone().unwrap();
    assert_eq!([0, 1, 2, 3].map(|hash| steering.queue(hash)), [0, 0, 1, 0]);
    assert_eq!(d.call(CtrlMessage::SetHashAlgorithm(0)), (OK, 0));
    assert!(d.ports.steering.is_none());
    for kind in [0, 11, 0xFFFF] {
        assert_eq!(d.call_raw(kind, [1, 2, 3]), (NOT_SUPPORTED, 0));
    }
}

/// Checks a range beyond the hash mapping. It is refused by the sum of offset and length, also if that
/// overflows, before the page of the entries is read. The table is unchanged.
#[test]
fn xsa_270_hash_mapping_beyond_table_is_refused_before_page_is_read() {
    let mut d = Dialogue::new();
    assert_eq!(d.call(CtrlMessage::SetHashAlgorithm(1)), (OK, 0));
    assert_eq!(d.call(CtrlMessage::SetHashFlags(HashTypes::ALL)), (OK, 0));
    assert_eq!(d.call(CtrlMessage::SetHashMappingSize { entries: 4 }), (OK, 0));
    let page = d.list.gref();
    d.list.memory().copy_from(0, &[1, 0, 0, 0, 1, 0, 0, 0]).unwrap();
    let set = |page, entries, first| CtrlMessage::SetHashMapping { page, entries, first };
    let copies = |d: &Dialogue| d.platform.counters().values().grant_copies;
    let before = copies(&d);
    assert_eq!(d.call(set(page, 1, 3)), (OK, 0), "the last entry is one");
    assert_eq!(copies(&d), before + 1);
    for (entries, first) in [(1, 4), (2, 3), (5, 0), (1, u32::MAX), (1023, u32::MAX - 1022)] {
        let before = copies(&d);
        assert_eq!(d.call(set(page, entries, first)), (INVALID, 0), "{entries} from {first}");
        assert_eq!(copies(&d), before, "its page was read");
    }
    assert_eq!(d.call(set(Gref(4000), 1, 3)), (INVALID, 0));
    let steering = d.ports.steering.clone().unwrap();
    assert_eq!([0, 1, 2, 3].map(|hash| steering.queue(hash)), [0, 0, 0, 1]);
}

#[test]
fn mapping_size_is_constant_limit_of_queue() {
    let mut d = Dialogue::new();
    assert_eq!(d.call(CtrlMessage::GetGrefMappingSize(0)), (OK, 64));
    let pages = d.lend(Access::ReadWrite, 10);
    assert_eq!(d.add(0, &rw(&pages)), OK);
    assert_eq!(d.call(CtrlMessage::GetGrefMappingSize(0)), (OK, 64));
    assert_eq!(d.call(CtrlMessage::GetGrefMappingSize(2)), (INVALID, 0));
    assert_eq!(d.call(CtrlMessage::GetGrefMappingSize(u32::MAX)), (INVALID, 0));
}

#[test]
fn staging_messages_without_staging_are_not_supported() {
    let mut d = Dialogue::with(None);
    let pages = d.lend(Access::ReadWrite, 1);
    assert_eq!(d.call(CtrlMessage::GetGrefMappingSize(0)), (NOT_SUPPORTED, 0));
    assert_eq!(d.add(0, &rw(&pages)), NOT_SUPPORTED);
    assert_eq!(d.del(0, &[pages[0].gref().0]).0, NOT_SUPPORTED);
}

#[test]
fn add_with_one_invalid_page_stages_nothing() {
    let mut d = Dialogue::new();
    let before = d.mapped();
    let pages = d.lend(Access::ReadWrite, 3);
    let read_only = d.lend(Access::ReadOnly, 1);
    // The last entry was never granted, is reserved, is read-only, is not below the limit of references, or is
    // the largest number.
    for (bad, rule) in [
        (GrefEntry::new(Gref(900), false), "staging_page_not_mapped"),
        (GrefEntry::new(Gref(0), false), "staging_page_not_mapped"),
        (GrefEntry::new(read_only[0].gref(), false), "staging_page_not_mapped"),
        (GrefEntry::new(Gref(GREF_LIMIT), false), "staging_gref_too_large"),
    ] {
        let counted = d.rules.get(rule);
        let mut list = rw(&pages);
        list.push(bad);
        assert_eq!(d.add(0, &list), INVALID);
        assert_eq!(d.rules.get(rule), counted + 1);
        assert_eq!(d.mapped(), before, "{bad:?}: nothing stays mapped");
        assert!(d.ports.tables[0].is_empty());
    }
    let mut list = rw(&pages);
    list.push(GrefEntry::new(read_only[0].gref(), true));
    assert_eq!(d.add(0, &list), OK);
    assert_eq!(d.mapped(), before + 4);
    // Read-only pages are never written through the table; the others are.
    assert!(d.ports.tables[0].get(read_only[0].gref(), Access::ReadWrite).is_none());
    assert!(d.ports.tables[0].get(pages[0].gref(), Access::ReadWrite).is_some());
}

#[test]
fn page_staged_twice_for_queue_is_refused() {
    let mut d = Dialogue::new();
    let pages = d.lend(Access::ReadWrite, 2);
    let [a, b] = [0, 1].map(|i| GrefEntry::new(pages[i].gref(), false));
    assert_eq!(d.add(0, &[a, b, a]), INVALID, "twice in one list");
    assert!(d.ports.tables[0].is_empty());
    assert_eq!(d.add(0, &[a]), OK);
    assert_eq!(d.add(0, &[b, a]), INVALID, "there already");
    assert_eq!(d.ports.tables[0].len(), 1);
    assert_eq!(d.add(1, &[a]), OK, "another queue's table is another table");
    assert_eq!(d.rules.get("staging_gref_twice"), 2);
}

#[test]
fn list_beyond_limit_is_refused_whole() {
    let mut d = Dialogue::new();
    let pages = d.lend(Access::ReadWrite, 65);
    assert_eq!(d.add(0, &rw(&pages)), INVALID);
    assert_eq!(d.rules.get("staging_queue_full"), 1);
    assert_eq!(d.add(0, &rw(&pages[..64])), OK);
    assert_eq!(d.add(0, &rw(&pages[64..])), INVALID);
    assert_eq!(d.add(1, &rw(&pages[..33])), INVALID);
    assert_eq!(d.rules.get("staging_guest_full"), 1);
    assert_eq!(d.add(1, &rw(&pages[..32])), OK);
    assert_eq!(d.backend.staged(), 96);
    // After the removal of some pages there is room again.
    assert_eq!(d.del(0, &[pages[0].gref().0]).1, 1);
    assert_eq!(d.add(0, &rw(&pages[64..])), OK);
}

#[test]
fn removal_returns_status_of_each_entry() {
    let mut d = Dialogue::new();
    let before = d.mapped();
    let pages = d.lend(Access::ReadWrite, 3);
    let g = |i: usize| pages[i].gref().0;
    assert_eq!(d.add(0, &rw(&pages)), OK);
    // One present page, one unknown, one repeated, one beyond any table.
    let list = [g(0), 900, g(1), g(1), u32::MAX];
    assert_eq!(d.del(0, &list), (OK, 2, vec![0, 2, 0, 2, 2]));
    assert_eq!(d.mapped(), before + 1, "they are unmapped when the answer is read");
    assert_eq!(d.ports.tables[0].len(), 1);
    assert_eq!(d.del(0, &[g(0)]), (OK, 0, vec![2]), "a second time it is not there");
    assert_eq!(d.del(2, &[g(2)]).0, INVALID, "no such queue");
    assert_eq!(d.del(1, &[g(2)]), (OK, 0, vec![2]), "not of that queue");
    assert_eq!(d.rules.get("staging_not_staged"), 3);
    // The granter can revoke the pages at once.
    let mut pages = pages.into_iter();
    assert!(d.granter.take_back(pages.next().unwrap()).is_ok());
    assert!(d.granter.take_back(pages.next().unwrap()).is_ok());
    assert!(d.granter.take_back(pages.next().unwrap()).is_err(), "this one is in use");
}

#[test]
fn removal_with_read_only_list_changes_nothing() {
    let mut d = Dialogue::new();
    let pages = d.lend(Access::ReadWrite, 1);
    let read_only = d.lend(Access::ReadOnly, 1).pop().unwrap();
    assert_eq!(d.add(0, &rw(&pages)), OK);
    let entry = GrefEntry::new(pages[0].gref(), false);
    read_only.memory().copy_from(0, &entry.to_bytes()).unwrap();
    let list = GrefList { queue: 0, page: read_only.gref(), entries: 1 };
    assert_eq!(d.call(CtrlMessage::DelGrefMapping(list)), (INVALID, 0));
    assert_eq!(d.rules.get("ctrl_page_unwritable"), 1);
    assert_eq!(d.ports.tables[0].len(), 1);
    assert_eq!(d.del(0, &[pages[0].gref().0]).1, 1, "it is still known");
    // For an add, a readable page suffices.
    assert_eq!(d.call(CtrlMessage::AddGrefMapping(list)), (OK, 0));
}

#[test]
fn removed_page_in_use_is_unmapped_after_use() {
    let mut d = Dialogue::new();
    let page = d.lend(Access::ReadWrite, 1).pop().unwrap();
    assert_eq!(d.add(0, &[GrefEntry::new(page.gref(), false)]), OK);
    page.memory().copy_from(0, b"in use").unwrap();
    // An I/O holds the page, as a write to a disk or socket does.
    let held = d.ports.tables[0].get(page.gref(), Access::ReadOnly).unwrap().clone();
    assert_eq!(d.del(0, &[page.gref().0]).1, 1);
    assert!(d.ports.tables[0].is_empty(), "no new use finds it");
    let mut bytes = [0; 6];
    held.copy_to(0, &mut bytes).unwrap();
    assert_eq!(&bytes, b"in use", "the mapping is under it until it ends");
    let page = d.granter.take_back(page).unwrap_err().lease;
    drop(held);
    assert!(d.granter.take_back(page).is_ok());
}

#[test]
fn xsa_155_list_is_read_once() {
    let mut d = Dialogue::new();
    let pages = d.lend(Access::ReadWrite, 2);
    let changing = d.list.memory().clone();
    let (a, b) = (GrefEntry::new(pages[0].gref(), false), GrefEntry::new(Gref(900), false));
    let stop = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let stopped = Arc::clone(&stop);
    let flipper = std::thread::spawn(move || {
        while !stopped.load(std::sync::atomic::Ordering::Relaxed) {
            changing.copy_from(0, &b.to_bytes()).unwrap();
            changing.copy_from(0, &a.to_bytes()).unwrap();
        }
    });
    let before = d.mapped();
    for _ in 0..2000 {
        let list = d.list(0, 1);
        let (status, _) = d.call(CtrlMessage::AddGrefMapping(list));
        // The validated content is what was mapped.
        let staged = d.ports.tables[0].len();
        assert_eq!(staged, usize::from(status == OK));
        assert_eq!(d.ports.tables[0].get(a.gref, Access::ReadWrite).is_some(), status == OK);
        assert_eq!(d.mapped() - before, staged as u64);
        let (status, gone) = d.call(CtrlMessage::DelGrefMapping(list));
        assert_eq!(status, OK);
        assert_eq!(staged - d.ports.tables[0].len(), gone as usize);
        if gone == 0 && staged == 1 {
            // The list then contained the other page, so the table itself removes it.
            while !d.ports.tables[0].is_empty() {
                d.call(CtrlMessage::DelGrefMapping(list));
            }
        }
    }
    stop.store(true, std::sync::atomic::Ordering::Relaxed);
    flipper.join().unwrap();
}

#[test]
fn list_beyond_page_size_is_refused() {
    let mut d = Dialogue::new();
    let page = d.list.gref().0;
    for kind in [9, 10] {
        for entries in [0, 513, 65_535, 65_536 + 1, u32::MAX] {
            assert_eq!(d.call_raw(kind, [0, page, entries]), (INVALID, 0));
        }
    }
    assert_eq!(d.rules.get("ctrl_list_length"), 10);
}

#[test]
fn message_flood_is_served_in_bounded_rounds() {
    let mut d = Dialogue::new();
    for _ in 0..128 {
        d.post(4, [0; 3]);
    }
    d.ring.publish();
    assert!(d.serve().unwrap(), "there are more messages than one call serves");
    assert_eq!(d.ring.unconsumed().unwrap(), 4);
    let mut rounds = 1;
    while d.serve().unwrap() {
        rounds += 1;
    }
    assert_eq!(rounds, 31, "31 full rounds, and a last one");
    while d.answer().is_some() {}
}

/// Checks that unread responses do not block the backend: they are in the frontend's own page.
#[test]
fn unread_responses_do_not_block_ring() {
    let mut d = Dialogue::new();
    let mut posted = 0u32;
    for _ in 0..1000 {
        // Written by hand: a correct frontend posts only requests with room for the response.
        let offset = 64 + (posted % 128) as usize * 16;
        let request = CtrlMessage::GetHashMappingSize.request(1);
        d.ring_page.memory().copy_from(offset, &request.to_bytes()).unwrap();
        posted += 1;
        d.ring_page.memory().store_u32(0, posted, std::sync::atomic::Ordering::SeqCst).unwrap();
        d.serve().unwrap();
    }
    let rsp_prod = d.ring_page.memory().load_u32(8, std::sync::atomic::Ordering::SeqCst);
    assert_eq!(rsp_prod.unwrap(), 1000);
}

#[test]
fn xsa_39_invalid_producer_index_ends_device() {
    let mut d = Dialogue::new();
    d.ring_page.memory().store_u32(0, 129, std::sync::atomic::Ordering::SeqCst).unwrap();
    assert!(matches!(d.serve(), Err(Fault::Misbehaved(_))));
    assert_eq!(d.rules.get("ctrl_producer_overflow"), 1);
}

#[test]
fn waiting_frontend_is_notified() {
    let mut d = Dialogue::new();
    while d.channel.clear().unwrap() {}
    assert!(!d.ring.final_check().unwrap());
    d.post(4, [0; 3]);
    d.ring.publish();
    d.serve().unwrap();
    let mut fds = [rustix::event::PollFd::new(&d.channel, rustix::event::PollFlags::IN)];
    let ready = rustix::event::poll(&mut fds, Some(&rustix::time::Timespec::default()));
    assert_eq!(ready, Ok(1), "{:?}", d.channel.as_fd());
    assert!(matches!(d.answer(), Some(CtrlResponse { status: CtrlStatus::Success, .. })));
}

#[test]
fn unpublished_message_is_executed_again_after_takeover() {
    let mut d = Dialogue::new();
    let record = LentSlice::anonymous(CtrlRecord::BYTES);
    d.succeed(&record, false);
    let leases = d.lend(Access::ReadWrite, 8);
    assert_eq!(d.add(0, &rw(&leases[..2])), OK);
    assert_eq!(d.call(CtrlMessage::SetHashAlgorithm(1)), (OK, 0));
    assert_eq!(d.call(CtrlMessage::SetHashFlags(HashTypes::ALL)), (OK, 0));
    // Two messages: one adds, one removes. The responses and the ring's journal are then reset, as if the
    // process had crashed just before publication; the state was written already.
    let mut pages = [vec![0; 4096], vec![0; 4096]];
    let memories = [d.ring_page.memory().clone(), record.slice(0, 4096).unwrap()];
    d.write_list(&rw(&leases[2..6]));
    d.post(9, [1, d.list.gref().0, 4]);
    d.ring.publish();
    for (page, memory) in pages.iter_mut().zip(&memories) {
        memory.copy_to(0, page).unwrap();
    }
    d.serve().unwrap();
    assert_eq!((d.ports.tables[0].len(), d.ports.tables[1].len()), (2, 4));
    for (page, memory) in pages.iter().zip(&memories) {
        memory.copy_from(0, page).unwrap();
    }
    d.succeed(&record, true);
    assert_eq!((d.ports.tables[0].len(), d.ports.tables[1].len()), (2, 0), "as it was published");
    assert!(d.ports.steering.is_some(), "the hash stays configured");
    d.serve().unwrap();
    assert_eq!(d.answer().unwrap().status.to_raw(), OK, "not refused as being staged already");
    assert_eq!(d.ports.tables[1].len(), 4);
    assert_eq!(d.rules.all().len(), 0, "{:?}", d.rules.all());
    // Again, with the response published.
    d.succeed(&record, true);
    assert_eq!((d.ports.tables[0].len(), d.ports.tables[1].len()), (2, 4));
    let grefs: Vec<u32> = leases[2..6].iter().map(|lease| lease.gref().0).collect();
    assert_eq!(d.del(1, &grefs), (OK, 4, vec![0; 4]));
}

#[test]
fn revoked_page_is_skipped_on_takeover() {
    let mut d = Dialogue::new();
    let record = LentSlice::anonymous(CtrlRecord::BYTES);
    d.succeed(&record, false);
    let mut leases = d.lend(Access::ReadWrite, 3);
    assert_eq!(d.add(0, &rw(&leases)), OK);
    d.ports = Ports::default();
    let gref = leases.pop().map(|lease| {
        let gref = lease.gref().0;
        assert!(d.granter.take_back(lease).is_ok());
        gref
    });
    d.succeed(&record, true);
    assert_eq!(d.ports.tables[0].len(), 2);
    assert_eq!(d.rules.get("staging_page_not_mapped"), 1);
    assert_eq!(d.del(0, &[gref.unwrap()]), (OK, 0, vec![2]));
}
