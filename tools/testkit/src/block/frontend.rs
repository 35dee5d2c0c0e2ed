//! Adversary frontend of a disk: a test writes its ring, pages, keys and channel word by word.

use std::time::{Duration, Instant};

use ringfence_memory::LentSlice;
use ringfence_platform::local::{LocalChannel, LocalGranter, LocalPlatform};
use ringfence_platform::{Access, Channel, Granter, Gref, Lease, Platform};
use ringfence_ring::RingLayout;
use ringfence_ring::sync::Ordering::{Acquire, Release};
use ringfence_wire::blkif::{
    Abi, Direction, Operation, RequestName, Response, SegmentRange, Slot, Status, direct, discard,
    indirect, indirect_descriptors, keys,
};
use ringfence_wire::xenbus::{DeviceId, STATE, XenbusState};
use ringfence_xenstore::{StoreAccess, StoreClient};

use super::stage::Stage;

/// Time between two looks at a ring.
const PAUSE: Duration = Duration::from_micros(20);
/// Maximum time for a response.
const PATIENCE: Duration = Duration::from_secs(60);

const REQ_PROD: usize = 0;
const RSP_PROD: usize = 8;
const RSP_EVENT: usize = 12;

/// Frontend with one ring, every word of which can be set.
pub struct RawFront {
    pub platform: LocalPlatform,
    pub store: StoreClient,
    /// Granter of the ring and of data pages.
    pub granter: LocalGranter,
    /// Local end of the event channel.
    pub channel: LocalChannel,
    pub abi: Abi,
    pub ring: Vec<Lease>,
    /// Free-running index of the next request to write.
    pub produced: u32,
    /// Free-running index of the next response to read.
    pub consumed: u32,
    /// Index of the vbd in the stage's list.
    pub vbd: usize,
    device: DeviceId,
    layout: RingLayout,
}

impl RawFront {
    /// Creates a frontend on `platform` for `vbd`, with a ring of `pages` pages; not connected.
    pub fn new(
        stage: &Stage,
        platform: LocalPlatform,
        vbd: usize,
        abi: Abi,
        pages: usize,
    ) -> RawFront {
        let device = *stage.vbds[vbd].device();
        let mut granter = platform.granter(device.backend).unwrap();
        let ring: Vec<Lease> =
            (0..pages).map(|_| granter.lend(Access::ReadWrite).unwrap()).collect();
        for page in &ring {
            page.memory().zero(0, 4096).unwrap();
        }
        ring[0].memory().store_u32(4, 1, Release).unwrap();
        ring[0].memory().store_u32(RSP_EVENT, 1, Release).unwrap();
        let layout = RingLayout::new(
            pages * 4096,
            abi.request_bytes(),
            abi.response_bytes(),
            abi.alignment(),
        );
        RawFront {
            store: platform.store().unwrap(),
            channel: platform.alloc_unbound(device.backend).unwrap(),
            granter,
            platform,
            abi,
            ring,
            produced: 0,
            consumed: 0,
            vbd,
            device,
            layout: layout.unwrap(),
        }
    }

    /// Writes a key of the frontend.
    pub fn set(&mut self, key: &str, value: &str) {
        let path = format!("{}/{key}", self.device.frontend_path());
        self.store.write(&path, value).unwrap();
    }

    /// Removes a key of the frontend.
    pub fn remove(&mut self, key: &str) {
        let path = format!("{}/{key}", self.device.frontend_path());
        self.store.rm(&path).unwrap();
    }

    /// Writes the frontend's state.
    pub fn enter(&mut self, state: XenbusState) {
        self.set(STATE, &state.to_string());
    }

    /// Writes the keys of a correct frontend, with persistent grants if `persistent`.
    pub fn write_keys(&mut self, persistent: bool) {
        let pages = self.ring.len();
        let refs: Vec<Gref> = self.ring.iter().map(Lease::gref).collect();
        if pages == 1 {
            self.set(keys::RING_REF, &refs[0].to_string());
        } else {
            self.set(keys::RING_PAGE_ORDER, &pages.ilog2().to_string());
            for (page, gref) in refs.iter().enumerate() {
                self.set(&keys::ring_ref(page), &gref.to_string());
            }
        }
        let port = self.channel.port().0.to_string();
        self.set(keys::EVENT_CHANNEL, &port);
        self.set(keys::PROTOCOL, self.abi.name());
        self.set(keys::FEATURE_PERSISTENT, if persistent { "1" } else { "0" });
    }

    /// Connects as a correct frontend does.
    pub fn connect(&mut self, stage: &mut Stage, persistent: bool) {
        stage.look(self.vbd);
        self.write_keys(persistent);
        self.enter(XenbusState::Initialised);
        stage.look(self.vbd);
        assert_eq!(stage.state(self.vbd), XenbusState::Connected);
        self.enter(XenbusState::Connected);
        stage.look(self.vbd);
    }

    /// Grants a page filled with `byte`.
    pub fn lend(&mut self, access: Access, byte: u8) -> Lease {
        let page = self.granter.lend(access).unwrap();
        page.memory().copy_from(0, &[byte; 4096]).unwrap();
        page
    }

    fn header(&self) -> &LentSlice {
        self.ring[0].memory()
    }

    /// Sets the request producer index and notifies the backend.
    pub fn publish_as(&self, index: u32) {
        self.header().store_u32(REQ_PROD, index, Release).unwrap();
        let _ = self.channel.notify();
    }

    /// Writes bytes at an offset of the ring, across its pages.
    pub fn put(&self, offset: usize, bytes: &[u8]) {
        for (at, byte) in (offset..).zip(bytes) {
            self.ring[at / 4096].memory().copy_from(at % 4096, &[*byte]).unwrap();
        }
    }

    /// Writes a request without publishing it.
    pub fn write(&mut self, slot: &Slot) {
        let offset = self.layout.offset(self.produced);
        self.put(offset, &slot[..self.abi.request_bytes()]);
        self.produced = self.produced.wrapping_add(1);
    }

    /// Writes requests and publishes them.
    pub fn post(&mut self, slots: &[Slot]) {
        slots.iter().for_each(|slot| self.write(slot));
        self.publish_as(self.produced);
    }

    /// Returns the response producer index.
    pub fn rsp_prod(&self) -> u32 {
        self.header().load_u32(RSP_PROD, Acquire).unwrap()
    }

    /// Returns the bytes of the ring entry with that index.
    pub fn entry(&self, index: u32) -> Vec<u8> {
        let offset = self.layout.offset(index);
        let byte = |at: usize| {
            let page = self.ring[at / 4096].memory();
            page.fetch::<1>(at % 4096).unwrap().into_unchecked()[0]
        };
        (offset..offset + self.layout.entry_bytes()).map(byte).collect()
    }

    /// Takes all published responses.
    pub fn take(&mut self) -> Vec<Response> {
        let count = self.rsp_prod().wrapping_sub(self.consumed);
        assert!(count <= self.layout.count(), "more answers than slots");
        let answers = (0..count).map(|n| {
            let mut bytes = [0; Response::MAX];
            let len = self.abi.response_bytes();
            bytes[..len].copy_from_slice(&self.entry(self.consumed.wrapping_add(n))[..len]);
            Response::from_bytes(bytes)
        });
        let answers = answers.collect();
        self.consumed = self.consumed.wrapping_add(count);
        answers
    }

    /// Waits for `count` responses.
    pub fn answers(&mut self, count: usize) -> Vec<Response> {
        let begun = Instant::now();
        let mut answers = vec![];
        while answers.len() < count {
            assert!(begun.elapsed() < PATIENCE, "{} of {count} answers", answers.len());
            answers.extend(self.take());
            // A thread that yields keeps the backend from a processor for time slices, beside a load.
            std::thread::sleep(PAUSE);
        }
        assert_eq!(answers.len(), count, "more answers than requests");
        answers
    }

    /// Posts one request and waits for its response.
    pub fn ask(&mut self, slot: &Slot) -> Status {
        self.post(core::slice::from_ref(slot));
        let answers = self.answers(1);
        assert_eq!(answers[0].id, id_of(self.abi, slot));
        // The response to an indirect request names the inner operation.
        assert_eq!(answers[0].operation, if slot[0] == 6 { slot[1] } else { slot[0] });
        answers[0].status
    }

    /// Builds a request with its segments in the slot.
    pub fn direct(
        &self,
        operation: Operation,
        id: u64,
        sector: u64,
        segments: &[SegmentRange],
    ) -> Slot {
        direct(self.abi, operation, RequestName { id, handle: 0 }, sector, segments).unwrap()
    }

    /// Builds a discard request.
    pub fn discard(&self, id: u64, sector: u64, sectors: u64) -> Slot {
        discard(self.abi, RequestName { id, handle: 0 }, sector, sectors, false)
    }

    /// Builds a request with `count` segments described in indirect pages.
    pub fn indirect(
        &self,
        direction: Direction,
        id: u64,
        sector: u64,
        count: u16,
        pages: &[Gref],
    ) -> Slot {
        indirect(self.abi, direction, RequestName { id, handle: 0 }, sector, count, pages).unwrap()
    }
}

/// Returns the id of a request.
pub fn id_of(abi: Abi, slot: &Slot) -> u64 {
    let at = if abi == Abi::X86_64 { 8 } else { 4 };
    u64::from_le_bytes(slot[at..at + 8].try_into().unwrap())
}

/// Returns the segment that covers a whole page.
pub fn whole(page: &Lease) -> SegmentRange {
    SegmentRange::new(page.gref(), 0, 7).unwrap()
}

/// Writes segment descriptors into an indirect page.
pub fn describe(page: &Lease, segments: &[SegmentRange]) {
    let bytes: Vec<u8> = indirect_descriptors(segments).flatten().collect();
    page.memory().copy_from(0, &bytes).unwrap();
}
