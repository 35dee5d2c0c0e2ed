//! Hostile block backends: a rule violation ends the connection, and no request is lost.

#![allow(clippy::unwrap_used, reason = "the panic of a test is its report")]

use std::sync::Arc;
use std::sync::mpsc::channel;

use ringfence_block::blkback::{BlkbackOptions, rules_for};
use ringfence_block::blkfront::{BlkfrontOptions, FrontDisk, Offer, RingSetup};
use ringfence_block::storage::{Discard, Disk, Geometry, Op, Request, Segment};
use ringfence_memory::LentSlice;
use ringfence_platform::local::{LocalChannel, LocalGranter, LocalPlatform};
use ringfence_platform::{Access, Channel, DomId, Grantee, Platform};
use ringfence_ring::sync::Ordering::{Acquire, Release};
use ringfence_sys::rules::RuleCounters;
use ringfence_testkit::block::Stage;
use ringfence_wire::blkif::{Abi, Response, Status};

const GEOMETRY: Geometry = Geometry {
    bytes: 1 << 20,
    sector_size: 512,
    physical_sector_size: 512,
    read_only: false,
    flush: true,
    discard: Some(Discard { granularity: 4096, alignment: 0, secure: false }),
    write_zeroes: false,
    extents: false,
    rotational: false,
};

/// Hostile end of a connection: the mapped ring page and the event channel.
struct Back {
    ring: LentSlice,
    channel: LocalChannel,
}

impl Back {
    /// Returns the id and the operation of the request in a slot.
    fn request(&self, slot: usize) -> (u64, u8) {
        let bytes: [u8; 112] = self.ring.fetch(64 + 112 * slot).unwrap().into_unchecked();
        (u64::from_le_bytes(bytes[8..16].try_into().unwrap()), bytes[0])
    }

    fn answer(&self, slot: usize, id: u64, operation: u8) {
        let response = Response { id, operation, status: Status::Okay }.to_bytes();
        let bytes = &response[..Abi::NATIVE.response_bytes()];
        self.ring.copy_from(64 + 112 * slot, bytes).unwrap();
    }

    fn publish(&self, index: u32) {
        self.ring.store_u32(8, index, Release).unwrap();
        let _ = self.channel.notify();
    }
}

type Front = FrontDisk<LocalGranter, LocalChannel>;

/// Connects a frontend's disk to a backend that acts only when the test calls it.
fn connect(stage: &Stage, guest: &LocalPlatform, disk: &Front, offer: &Offer) -> Back {
    let granter = guest.granter(DomId(0)).unwrap();
    let setup = RingSetup::new(granter, guest.alloc_unbound(DomId(0)).unwrap(), 1).unwrap();
    let (gref, port) = (setup.ring_refs()[0], setup.channel().port());
    assert!(disk.attach(vec![setup], offer).is_ok());
    let mut pages = stage.platform.grantee(guest.domid()).unwrap();
    let mut mapped = vec![];
    pages.map(&[(gref, Access::ReadWrite)], &mut mapped);
    let channel = stage.platform.bind_interdomain(guest.domid(), port).unwrap();
    Back { ring: mapped.remove(0).unwrap(), channel }
}

#[test]
fn unexpected_response_ends_connection_and_keeps_request() {
    let stage = Stage::new();
    let guest = stage.join(256);
    let rules = rules_for(&GEOMETRY, &BlkbackOptions::default());
    let offer = Offer { geometry: GEOMETRY, rules, handle: 0 };
    let (notify, broken) = channel();
    let counters: Arc<RuleCounters> = Arc::default();
    let on_broken = Arc::new(move || notify.send(()).unwrap());
    let options = BlkfrontOptions::default();
    let disk = Front::new(&offer, options, 1, Arc::clone(&counters), on_broken);
    let mut queue = disk.queue(4).unwrap();
    let segments = vec![Segment::from(LentSlice::anonymous(4096))];
    queue.submit(Request { token: 7, op: Op::Read, offset: 0, len: 4096, segments });
    queue.kick();
    let mut done = vec![];
    type Attack = fn(&Back);
    let attacks: [(&str, Attack); 5] = [
        ("front_response_foreign_id", |back| {
            let (id, operation) = back.request(0);
            back.answer(0, id ^ 1, operation);
            back.publish(1);
        }),
        ("front_response_foreign_id", |back| {
            // The same index with another generation, as in an earlier answered request.
            let (id, operation) = back.request(0);
            back.answer(0, id ^ (1 << 32), operation);
            back.publish(1);
        }),
        ("front_response_foreign_id", |back| {
            let (id, operation) = back.request(0);
            back.answer(0, id, operation ^ 1);
            back.publish(1);
        }),
        ("front_response_overflow", |back| back.publish(2)),
        ("front_response_overflow", |back| back.publish(u32::MAX)),
    ];
    for (rule, attack) in attacks {
        let back = connect(&stage, &guest, &disk, &offer);
        assert_eq!(back.ring.load_u32(0, Acquire), Ok(1), "the request is posted again");
        let before = counters.get(rule);
        attack(&back);
        queue.reap(&mut done);
        assert!(done.is_empty(), "{rule}: nothing was answered");
        assert_eq!(counters.get(rule), before + 1);
        assert!(broken.try_recv().is_ok(), "{rule}: the owner is not notified");
        assert!(!disk.is_attached());
        drop(back);
        disk.detach();
    }
    let back = connect(&stage, &guest, &disk, &offer);
    let (id, operation) = back.request(0);
    back.answer(0, id, operation);
    back.publish(1);
    queue.reap(&mut done);
    assert_eq!((done.len(), done[0].token, done[0].result), (1, 7, Ok(())));
}
