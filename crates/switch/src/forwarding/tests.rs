use std::collections::HashMap;

use proptest::prelude::*;
use ringfence_offload::OffloadMeta;

use super::table::{CAPACITY, GUARANTEED};
use super::*;

const BROADCAST: Mac = [0xff; 6];

fn mac(n: u32) -> Mac {
    let [a, b, c, d] = n.to_be_bytes();
    [2, 0, a, b, c, d]
}

fn push(batch: &mut Batch, dst: Mac, src: Mac) {
    let mut frame = [0u8; 60];
    frame[..6].copy_from_slice(&dst);
    frame[6..12].copy_from_slice(&src);
    let offset = batch.reserve(60).unwrap();
    batch.scratch_mut(offset..offset + 60).unwrap().copy_from_slice(&frame);
    batch.push_contiguous(offset, 60, OffloadMeta::PLAIN).unwrap();
}

/// A switch with a batch, a plan and one set of counters, so that a test is a script.
struct Bench {
    switch: Switch,
    batch: Batch,
    plan: Plan,
    counters: PortCounters,
    now: Duration,
}

impl Bench {
    fn new(ports: u16) -> Bench {
        let mut bench = Bench {
            switch: Switch::new(),
            batch: Batch::with_capacity(64, 64 * 60),
            plan: Plan::new(),
            counters: PortCounters::default(),
            now: Duration::ZERO,
        };
        for port in 0..ports {
            bench.attach(port, PortPolicy::default()).unwrap();
        }
        bench
    }

    fn attach(&mut self, port: u16, policy: PortPolicy) -> Result<(), AttachError> {
        self.switch.attach(PortIndex(port), policy)
    }

    /// Sends one frame and returns the ports it went to, ascending.
    fn send(&mut self, port: u16, dst: Mac, src: Mac) -> Vec<u16> {
        self.send_all(port, &[(dst, src)]);
        let mut ports: Vec<u16> = self.plan.ports().iter().map(|port| port.0).collect();
        ports.sort_unstable();
        ports
    }

    fn send_all(&mut self, port: u16, frames: &[(Mac, Mac)]) {
        self.batch.clear();
        self.plan.clear();
        frames.iter().for_each(|&(dst, src)| push(&mut self.batch, dst, src));
        let port = PortIndex(port);
        self.switch.route(port, &self.batch, self.now, &self.counters, &mut self.plan);
        self.switch.table.check_invariants();
    }

    fn drops(&self, reason: DropReason) -> u64 {
        self.counters.drops(reason)
    }
}

#[test]
fn unknown_is_flooded_known_goes_to_one_port() {
    let mut bench = Bench::new(4);
    assert_eq!(bench.send(0, mac(2), mac(1)), [1, 2, 3]);
    assert_eq!(bench.send(2, mac(1), mac(2)), [0]);
    assert_eq!(bench.send(0, mac(2), mac(1)), [2]);
    assert_eq!(bench.send(0, BROADCAST, mac(1)), [1, 2, 3]);
    assert_eq!(bench.send(3, [0x33, 0x33, 0, 0, 0, 1], mac(3)), [0, 1, 2]);
}

#[test]
fn a_frame_never_goes_back_where_it_came_from() {
    let mut bench = Bench::new(2);
    bench.send(0, BROADCAST, mac(1));
    bench.send(0, BROADCAST, mac(2));
    assert_eq!(bench.send(0, mac(2), mac(1)), [0; 0]);
    assert_eq!(bench.drops(DropReason::SamePort), 1);
}

#[test]
fn a_batch_is_grouped_by_destination_in_order() {
    let mut bench = Bench::new(3);
    bench.send(1, BROADCAST, mac(1));
    bench.send(2, BROADCAST, mac(2));
    let (to1, to2, all) = ((mac(1), mac(9)), (mac(2), mac(9)), (BROADCAST, mac(9)));
    bench.send_all(0, &[to2, to1, to2, all, to1]);
    assert_eq!(bench.plan.ports(), [PortIndex(2), PortIndex(1)]);
    assert_eq!(bench.plan.frames(PortIndex(1)), [1, 3, 4]);
    assert_eq!(bench.plan.frames(PortIndex(2)), [0, 2, 3]);
}

#[test]
fn a_source_that_is_a_group_or_zero_is_dropped() {
    let mut bench = Bench::new(2);
    assert_eq!(bench.send(0, mac(1), BROADCAST), [0; 0]);
    assert_eq!(bench.send(0, mac(1), [0; 6]), [0; 0]);
    assert_eq!(bench.drops(DropReason::BadSource), 2);
    assert_eq!(bench.switch.addresses(), 0);
}

#[test]
fn runts_and_bridge_protocols_go_nowhere() {
    let mut bench = Bench::new(2);
    assert_eq!(bench.send(0, [0x01, 0x80, 0xc2, 0, 0, 0x0e], mac(1)), [0; 0]);
    assert_eq!(bench.drops(DropReason::LinkLocal), 1);
    assert_eq!(bench.send(0, [0x01, 0x80, 0xc2, 0, 0, 0x10], mac(1)), [1]);
    bench.batch.clear();
    bench.batch.reserve(13).unwrap();
    bench.batch.push_contiguous(0, 13, OffloadMeta::PLAIN).unwrap();
    bench.plan.clear();
    let (now, port) = (bench.now, PortIndex(0));
    bench.switch.route(port, &bench.batch, now, &bench.counters, &mut bench.plan);
    assert_eq!(bench.drops(DropReason::Runt), 1);
    assert_eq!(bench.plan.ports(), []);
}

#[test]
fn a_station_that_moves_is_found_at_its_new_port() {
    let mut bench = Bench::new(3);
    bench.send(0, BROADCAST, mac(1));
    bench.send(1, BROADCAST, mac(1));
    assert_eq!(bench.send(2, mac(1), mac(2)), [1]);
    // Also within one batch: the destination is learned at the source's own port on the way.
    bench.send_all(2, &[(mac(1), mac(2)), (BROADCAST, mac(1)), (mac(1), mac(2))]);
    assert_eq!(bench.plan.frames(PortIndex(1)), [0, 1]);
    assert_eq!(bench.drops(DropReason::SamePort), 1);
}

#[test]
fn addresses_age_only_while_they_are_silent() {
    let mut bench = Bench::new(3);
    bench.send(0, BROADCAST, mac(1));
    bench.now = Duration::from_secs(AGEING_SECONDS);
    assert_eq!(bench.send(1, mac(1), mac(2)), [0]);
    bench.now += Duration::from_secs(1);
    assert_eq!(bench.send(1, mac(1), mac(2)), [0, 2]);
    bench.now += Duration::from_secs(AGEING_SECONDS - 1);
    assert_eq!(bench.send(0, mac(2), mac(3)), [1]);
    assert_eq!(bench.switch.addresses(), 2, "1 was forgotten");
}

#[test]
fn a_fixed_address_is_enforced_and_cannot_be_taken() {
    let mut bench = Bench::new(1);
    bench.send(0, BROADCAST, mac(7));
    let fixed = PortPolicy { mac: Some(mac(7)), ..PortPolicy::default() };
    bench.attach(1, fixed.clone()).unwrap();
    assert_eq!(bench.attach(2, fixed), Err(AttachError::MacTaken(mac(7))));
    bench.attach(2, PortPolicy::default()).unwrap();
    assert_eq!(bench.send(2, mac(7), mac(2)), [1], "known before it ever spoke");
    assert_eq!(bench.send(0, BROADCAST, mac(7)), [0; 0], "learned before it was fixed");
    assert_eq!(bench.send(1, mac(2), mac(8)), [0; 0]);
    assert_eq!(bench.drops(DropReason::SpoofedSource), 2);
    assert_eq!(bench.send(1, mac(2), mac(7)), [2]);
    bench.now = Duration::from_secs(10 * AGEING_SECONDS);
    assert_eq!(bench.send(2, mac(7), mac(2)), [1], "does not age");
    bench.switch.detach(PortIndex(1));
    assert_eq!(bench.send(0, mac(2), mac(7)), [2], "free again");
}

#[test]
fn fixed_addresses_must_be_of_one_station_and_indices_free() {
    let mut bench = Bench::new(1);
    for bad in [BROADCAST, [0; 6], [1, 0, 0, 0, 0, 1]] {
        let policy = PortPolicy { mac: Some(bad), ..PortPolicy::default() };
        assert_eq!(bench.attach(1, policy), Err(AttachError::BadMac(bad)));
    }
    let taken = AttachError::BadIndex(PortIndex(0));
    assert_eq!(bench.attach(0, PortPolicy::default()), Err(taken));
    assert!(bench.attach(256, PortPolicy::default()).is_err());
    assert!(bench.attach(255, PortPolicy::default()).is_ok());
}

#[test]
fn a_port_that_invents_addresses_evicts_only_its_own() {
    let mut bench = Bench::new(3);
    for n in 0..32 {
        bench.send(1, BROADCAST, mac(n));
    }
    for n in 1000..9000 {
        bench.send(0, BROADCAST, mac(n));
    }
    assert_eq!(bench.switch.addresses(), 64);
    for n in 0..32 {
        assert_eq!(bench.send(2, mac(n), mac(99)), [1]);
    }
    assert_eq!(bench.send(2, mac(8999), mac(99)), [0], "the newest is known");
    assert_eq!(bench.send(2, mac(1000), mac(99)), [0, 1], "the oldest is not");
}

#[test]
fn every_port_gets_its_guaranteed_share_whatever_others_asked_for() {
    let mut bench = Bench::new(0);
    let greedy = PortPolicy { addresses: u16::MAX, ..PortPolicy::default() };
    bench.attach(0, greedy.clone()).unwrap();
    assert_eq!(bench.switch.table.share(PortIndex(0)), CAPACITY / 2 + GUARANTEED);
    bench.attach(1, greedy).unwrap();
    bench.attach(2, PortPolicy { addresses: 3, ..PortPolicy::default() }).unwrap();
    assert_eq!(bench.switch.table.share(PortIndex(1)), GUARANTEED);
    assert_eq!(bench.switch.table.share(PortIndex(2)), 3);
    bench.switch.detach(PortIndex(0));
    bench.attach(0, PortPolicy::default()).unwrap();
    assert_eq!(bench.switch.table.share(PortIndex(0)), 32);
    bench.switch.table.check_invariants();
}

#[test]
fn a_cable_carries_frames_to_its_other_end() {
    let (mut batch, mut plan) = (Batch::with_capacity(4, 4096), Plan::new());
    let counters = PortCounters::default();
    let mut patch = Patch::new();
    patch.attach(PortIndex(4), PortPolicy::default()).unwrap();
    push(&mut batch, BROADCAST, mac(1));
    patch.route(PortIndex(4), &batch, &counters, &mut plan);
    assert_eq!(counters.drops(DropReason::NoDestination), 1);
    patch.attach(PortIndex(7), PortPolicy::default()).unwrap();
    assert_eq!(
        patch.attach(PortIndex(8), PortPolicy::default()),
        Err(AttachError::Full { limit: 2 })
    );
    patch.route(PortIndex(4), &batch, &counters, &mut plan);
    assert_eq!((plan.ports(), plan.frames(PortIndex(7))), (&[PortIndex(7)][..], &[0][..]));
    plan.clear();
    patch.route(PortIndex(7), &batch, &counters, &mut plan);
    assert_eq!(plan.ports(), [PortIndex(4)]);
    patch.detach(PortIndex(4));
    patch.attach(PortIndex(8), PortPolicy::default()).unwrap();
}

/// What is done to the switch and to the oracle.
#[derive(Clone, Debug)]
enum Op {
    Attach(u16, Option<u32>),
    Detach(u16),
    Send(u16, Vec<(u32, u32)>),
    Wait(u64),
}

const PORTS: u16 = 5;

fn op() -> impl Strategy<Value = Op> {
    let port = 0..PORTS;
    let frames = prop::collection::vec((0u32..8, 0u32..8), 1..6);
    prop_oneof![
        2 => (port.clone(), prop::option::weighted(0.3, 1u32..7)).prop_map(|(p, m)| Op::Attach(p, m)),
        1 => port.clone().prop_map(Op::Detach),
        8 => (port, frames).prop_map(|(p, frames)| Op::Send(p, frames)),
        1 => (0u64..400).prop_map(Op::Wait),
    ]
}

/// The rules in their simplest form, without shares: the scripts know fewer addresses than the
/// smallest of them.
#[derive(Default)]
struct Oracle {
    ports: HashMap<u16, Option<Mac>>,
    known: HashMap<Mac, (u16, u64)>,
    now: u64,
}

impl Oracle {
    fn owner(&self, mac: &Mac) -> Option<u16> {
        self.ports.iter().find(|(_, fixed)| **fixed == Some(*mac)).map(|(port, _)| *port)
    }

    fn send(&mut self, port: u16, dst: Mac, src: Mac) -> Vec<u16> {
        let Some(fixed) = self.ports.get(&port) else { return vec![] };
        let spoofed = match self.owner(&src) {
            Some(owner) => owner != port,
            None => fixed.is_some(),
        };
        if spoofed || !is_station(&src) {
            return vec![];
        }
        self.known.insert(src, (port, self.now));
        let learned = self.known.get(&dst).filter(|(_, seen)| self.now - seen <= AGEING_SECONDS);
        let target = self.owner(&dst).or(learned.map(|(port, _)| *port));
        let mut ports: Vec<u16> = match target {
            Some(target) => vec![target],
            None => self.ports.keys().copied().collect(),
        };
        ports.retain(|to| *to != port);
        ports.sort_unstable();
        ports
    }
}

/// 0 is the broadcast address, the others are stations.
fn address(n: u32) -> Mac {
    if n == 0 { BROADCAST } else { mac(n) }
}

proptest! {
    #[test]
    fn the_switch_does_what_the_oracle_says(ops in prop::collection::vec(op(), 1..80)) {
        let mut bench = Bench::new(0);
        let mut oracle = Oracle::default();
        for op in ops {
            match op {
                Op::Attach(port, fixed) => {
                    let fixed = fixed.map(mac);
                    let policy = PortPolicy { mac: fixed, ..PortPolicy::default() };
                    let taken = fixed.is_some_and(|mac| oracle.owner(&mac).is_some());
                    let possible = !oracle.ports.contains_key(&port) && !taken;
                    prop_assert_eq!(bench.attach(port, policy).is_ok(), possible);
                    if possible {
                        oracle.ports.insert(port, fixed);
                        fixed.map(|mac| oracle.known.remove(&mac));
                    }
                }
                Op::Detach(port) => {
                    bench.switch.detach(PortIndex(port));
                    oracle.ports.remove(&port);
                    oracle.known.retain(|_, (at, _)| *at != port);
                }
                Op::Wait(seconds) => {
                    oracle.now += seconds;
                    bench.now += Duration::from_secs(seconds);
                }
                Op::Send(port, frames) => {
                    let frames: Vec<_> =
                        frames.into_iter().map(|(d, s)| (address(d), address(s))).collect();
                    bench.send_all(port, &frames);
                    for (index, (dst, src)) in (0..).zip(frames) {
                        let got: Vec<u16> = (0..PORTS)
                            .filter(|p| bench.plan.frames(PortIndex(*p)).contains(&index))
                            .collect();
                        prop_assert_eq!(got, oracle.send(port, dst, src));
                    }
                }
            }
        }
    }
}

/// Frames of two stations on a fabric: an ARP reply with this sender address, from port 0 to port 1.
fn arp_over(mut fabric: Fabric, sender: [u8; 4]) -> (usize, PortCounters) {
    let filter = AddressFilter::new(mac(1), [core::net::IpAddr::from([10, 0, 0, 1])]);
    let policy = |n, filter| PortPolicy { mac: Some(mac(n)), filter, ..PortPolicy::default() };
    fabric.attach(PortIndex(0), policy(1, Some(Arc::new(filter)))).unwrap();
    fabric.attach(PortIndex(1), policy(2, None)).unwrap();
    let mut batch = Batch::with_capacity(1, 64);
    let frame = [&mac(2)[..], &mac(1), &[8, 6, 0, 1, 8, 0, 6, 4, 0, 2], &mac(1), &sender].concat();
    let frame = [&frame[..], &mac(2), &[10, 0, 0, 2]].concat();
    let offset = batch.reserve(frame.len()).unwrap();
    batch.scratch_mut(offset..offset + frame.len()).unwrap().copy_from_slice(&frame);
    batch.push_contiguous(offset, frame.len(), OffloadMeta::PLAIN).unwrap();
    let (counters, mut plan) = (PortCounters::default(), Plan::new());
    fabric.route(PortIndex(0), &batch, Duration::ZERO, &counters, &mut plan);
    let sent = plan.frames(PortIndex(1)).len();
    // The next port at this place starts without a filter.
    fabric.detach(PortIndex(0));
    fabric.attach(PortIndex(0), policy(1, None)).unwrap();
    plan.clear();
    fabric.route(PortIndex(0), &batch, Duration::ZERO, &counters, &mut plan);
    assert_eq!(plan.frames(PortIndex(1)), [0]);
    (sent, counters)
}

#[test]
fn frame_that_the_address_filter_refuses_is_dropped_and_counted() {
    for fabric in [|| Fabric::Switch(Switch::new()), || Fabric::Patch(Patch::new())] {
        let (sent, counters) = arp_over(fabric(), [10, 0, 0, 1]);
        assert_eq!((sent, counters.drops_total()), (1, 0));
        let (sent, counters) = arp_over(fabric(), [10, 0, 0, 2]);
        assert_eq!((sent, counters.drops(DropReason::SpoofedAddress)), (0, 1));
    }
}
