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

/// Switch with a batch, a plan, counters and a clock, so a test can be a script.
struct Fixture {
    switch: Switch,
    batch: Batch,
    plan: Plan,
    counters: PortCounters,
    now: Duration,
}

impl Fixture {
    fn new(ports: u16) -> Fixture {
        let mut fixture = Fixture {
            switch: Switch::new(),
            batch: Batch::with_capacity(64, 64 * 60),
            plan: Plan::new(),
            counters: PortCounters::default(),
            now: Duration::ZERO,
        };
        for port in 0..ports {
            fixture.attach(port, PortPolicy::default()).unwrap();
        }
        fixture
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
fn frame_to_unknown_address_is_flooded_and_to_known_goes_to_one_port() {
    let mut fixture = Fixture::new(4);
    assert_eq!(fixture.send(0, mac(2), mac(1)), [1, 2, 3]);
    assert_eq!(fixture.send(2, mac(1), mac(2)), [0]);
    assert_eq!(fixture.send(0, mac(2), mac(1)), [2]);
    assert_eq!(fixture.send(0, BROADCAST, mac(1)), [1, 2, 3]);
    assert_eq!(fixture.send(3, [0x33, 0x33, 0, 0, 0, 1], mac(3)), [0, 1, 2]);
}

#[test]
fn frame_to_address_behind_ingress_port_is_dropped() {
    let mut fixture = Fixture::new(2);
    fixture.send(0, BROADCAST, mac(1));
    fixture.send(0, BROADCAST, mac(2));
    assert_eq!(fixture.send(0, mac(2), mac(1)), [0; 0]);
    assert_eq!(fixture.drops(DropReason::SamePort), 1);
}

#[test]
fn plan_of_batch_lists_frames_by_port_in_order() {
    let mut fixture = Fixture::new(3);
    fixture.send(1, BROADCAST, mac(1));
    fixture.send(2, BROADCAST, mac(2));
    let (to1, to2, all) = ((mac(1), mac(9)), (mac(2), mac(9)), (BROADCAST, mac(9)));
    fixture.send_all(0, &[to2, to1, to2, all, to1]);
    assert_eq!(fixture.plan.ports(), [PortIndex(2), PortIndex(1)]);
    assert_eq!(fixture.plan.frames(PortIndex(1)), [1, 3, 4]);
    assert_eq!(fixture.plan.frames(PortIndex(2)), [0, 2, 3]);
}

#[test]
fn frame_with_group_or_zero_source_is_dropped() {
    let mut fixture = Fixture::new(2);
    assert_eq!(fixture.send(0, mac(1), BROADCAST), [0; 0]);
    assert_eq!(fixture.send(0, mac(1), [0; 6]), [0; 0]);
    assert_eq!(fixture.drops(DropReason::BadSource), 2);
    assert_eq!(fixture.switch.addresses(), 0);
}

#[test]
fn runt_and_frame_to_bridge_protocol_are_dropped() {
    let mut fixture = Fixture::new(2);
    assert_eq!(fixture.send(0, [0x01, 0x80, 0xc2, 0, 0, 0x0e], mac(1)), [0; 0]);
    assert_eq!(fixture.drops(DropReason::LinkLocal), 1);
    assert_eq!(fixture.send(0, [0x01, 0x80, 0xc2, 0, 0, 0x10], mac(1)), [1]);
    fixture.batch.clear();
    fixture.batch.reserve(13).unwrap();
    fixture.batch.push_contiguous(0, 13, OffloadMeta::PLAIN).unwrap();
    fixture.plan.clear();
    let (now, port) = (fixture.now, PortIndex(0));
    fixture.switch.route(port, &fixture.batch, now, &fixture.counters, &mut fixture.plan);
    assert_eq!(fixture.drops(DropReason::Runt), 1);
    assert_eq!(fixture.plan.ports(), []);
}

#[test]
fn frame_to_moved_station_goes_to_its_new_port() {
    let mut fixture = Fixture::new(3);
    fixture.send(0, BROADCAST, mac(1));
    fixture.send(1, BROADCAST, mac(1));
    assert_eq!(fixture.send(2, mac(1), mac(2)), [1]);
    // The same within one batch: the second frame moves the destination to the ingress port.
    fixture.send_all(2, &[(mac(1), mac(2)), (BROADCAST, mac(1)), (mac(1), mac(2))]);
    assert_eq!(fixture.plan.frames(PortIndex(1)), [0, 1]);
    assert_eq!(fixture.drops(DropReason::SamePort), 1);
}

#[test]
fn address_without_traffic_expires_after_ageing_time() {
    let mut fixture = Fixture::new(3);
    fixture.send(0, BROADCAST, mac(1));
    fixture.now = Duration::from_secs(AGEING_SECONDS);
    assert_eq!(fixture.send(1, mac(1), mac(2)), [0]);
    fixture.now += Duration::from_secs(1);
    assert_eq!(fixture.send(1, mac(1), mac(2)), [0, 2]);
    fixture.now += Duration::from_secs(AGEING_SECONDS - 1);
    assert_eq!(fixture.send(0, mac(2), mac(3)), [1]);
    assert_eq!(fixture.switch.addresses(), 2, "the entry of mac(1) has expired");
}

#[test]
fn fixed_address_is_enforced_and_refused_to_other_ports() {
    let mut fixture = Fixture::new(1);
    fixture.send(0, BROADCAST, mac(7));
    let fixed = PortPolicy { mac: Some(mac(7)), ..PortPolicy::default() };
    fixture.attach(1, fixed.clone()).unwrap();
    assert_eq!(fixture.attach(2, fixed), Err(AttachError::MacTaken(mac(7))));
    fixture.attach(2, PortPolicy::default()).unwrap();
    assert_eq!(
        fixture.send(2, mac(7), mac(2)),
        [1],
        "a fixed address is known without a frame from it"
    );
    assert_eq!(
        fixture.send(0, BROADCAST, mac(7)),
        [0; 0],
        "the port learned the address before it was fixed"
    );
    assert_eq!(fixture.send(1, mac(2), mac(8)), [0; 0]);
    assert_eq!(fixture.drops(DropReason::SpoofedSource), 2);
    assert_eq!(fixture.send(1, mac(2), mac(7)), [2]);
    fixture.now = Duration::from_secs(10 * AGEING_SECONDS);
    assert_eq!(fixture.send(2, mac(7), mac(2)), [1], "a fixed address does not age");
    fixture.switch.detach(PortIndex(1));
    assert_eq!(fixture.send(0, mac(2), mac(7)), [2], "a detached port frees its address");
}

#[test]
fn attach_with_group_address_or_used_index_is_refused() {
    let mut fixture = Fixture::new(1);
    for bad in [BROADCAST, [0; 6], [1, 0, 0, 0, 0, 1]] {
        let policy = PortPolicy { mac: Some(bad), ..PortPolicy::default() };
        assert_eq!(fixture.attach(1, policy), Err(AttachError::BadMac(bad)));
    }
    let taken = AttachError::BadIndex(PortIndex(0));
    assert_eq!(fixture.attach(0, PortPolicy::default()), Err(taken));
    assert!(fixture.attach(256, PortPolicy::default()).is_err());
    assert!(fixture.attach(255, PortPolicy::default()).is_ok());
}

#[test]
fn port_with_many_addresses_evicts_only_its_own() {
    let mut fixture = Fixture::new(3);
    for n in 0..32 {
        fixture.send(1, BROADCAST, mac(n));
    }
    for n in 1000..9000 {
        fixture.send(0, BROADCAST, mac(n));
    }
    assert_eq!(fixture.switch.addresses(), 64);
    for n in 0..32 {
        assert_eq!(fixture.send(2, mac(n), mac(99)), [1]);
    }
    assert_eq!(fixture.send(2, mac(8999), mac(99)), [0], "the newest address is known");
    assert_eq!(fixture.send(2, mac(1000), mac(99)), [0, 1], "the oldest address is not");
}

#[test]
fn port_gets_guaranteed_share_after_greedy_ports() {
    let mut fixture = Fixture::new(0);
    let greedy = PortPolicy { addresses: u16::MAX, ..PortPolicy::default() };
    fixture.attach(0, greedy.clone()).unwrap();
    assert_eq!(fixture.switch.table.share(PortIndex(0)), CAPACITY / 2 + GUARANTEED);
    fixture.attach(1, greedy).unwrap();
    fixture.attach(2, PortPolicy { addresses: 3, ..PortPolicy::default() }).unwrap();
    assert_eq!(fixture.switch.table.share(PortIndex(1)), GUARANTEED);
    assert_eq!(fixture.switch.table.share(PortIndex(2)), 3);
    fixture.switch.detach(PortIndex(0));
    fixture.attach(0, PortPolicy::default()).unwrap();
    assert_eq!(fixture.switch.table.share(PortIndex(0)), 32);
    fixture.switch.table.check_invariants();
}

#[test]
fn patch_forwards_frames_to_other_end() {
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

/// Operation on the switch and on the oracle.
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

/// Model of the forwarding rules without shares: the operations use fewer addresses than the smallest share.
#[derive(Default)]
struct Oracle {
    ports: HashMap<u16, Option<Mac>>,
    known: HashMap<Mac, (u16, u64)>,
    now: u64,
}

impl Oracle {
    /// Returns the port that has `mac` as its fixed address.
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

/// Returns the broadcast address for 0, and a station for other numbers.
fn address(n: u32) -> Mac {
    if n == 0 { BROADCAST } else { mac(n) }
}

proptest! {
    #[test]
    fn switch_under_random_operations_matches_oracle(ops in prop::collection::vec(op(), 1..80)) {
        let mut fixture = Fixture::new(0);
        let mut oracle = Oracle::default();
        for op in ops {
            match op {
                Op::Attach(port, fixed) => {
                    let fixed = fixed.map(mac);
                    let policy = PortPolicy { mac: fixed, ..PortPolicy::default() };
                    let taken = fixed.is_some_and(|mac| oracle.owner(&mac).is_some());
                    let possible = !oracle.ports.contains_key(&port) && !taken;
                    prop_assert_eq!(fixture.attach(port, policy).is_ok(), possible);
                    if possible {
                        oracle.ports.insert(port, fixed);
                        fixed.map(|mac| oracle.known.remove(&mac));
                    }
                }
                Op::Detach(port) => {
                    fixture.switch.detach(PortIndex(port));
                    oracle.ports.remove(&port);
                    oracle.known.retain(|_, (at, _)| *at != port);
                }
                Op::Wait(seconds) => {
                    oracle.now += seconds;
                    fixture.now += Duration::from_secs(seconds);
                }
                Op::Send(port, frames) => {
                    let frames: Vec<_> =
                        frames.into_iter().map(|(d, s)| (address(d), address(s))).collect();
                    fixture.send_all(port, &frames);
                    for (index, (dst, src)) in (0..).zip(frames) {
                        let got: Vec<u16> = (0..PORTS)
                            .filter(|p| fixture.plan.frames(PortIndex(*p)).contains(&index))
                            .collect();
                        prop_assert_eq!(got, oracle.send(port, dst, src));
                    }
                }
            }
        }
    }
}

/// Sends an ARP reply with this sender address from port 0, which has an address filter, to port 1. Returns
/// the number of forwarded frames and the counters of port 0.
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
    // A new port with the same index has no filter.
    fabric.detach(PortIndex(0));
    fabric.attach(PortIndex(0), policy(1, None)).unwrap();
    plan.clear();
    fabric.route(PortIndex(0), &batch, Duration::ZERO, &counters, &mut plan);
    assert_eq!(plan.frames(PortIndex(1)), [0]);
    (sent, counters)
}

#[test]
fn frame_refused_by_address_filter_is_dropped_and_counted() {
    for fabric in [|| Fabric::Switch(Switch::new()), || Fabric::Patch(Patch::new())] {
        let (sent, counters) = arp_over(fabric(), [10, 0, 0, 1]);
        assert_eq!((sent, counters.drops_total()), (1, 0));
        let (sent, counters) = arp_over(fabric(), [10, 0, 0, 2]);
        assert_eq!((sent, counters.drops(DropReason::SpoofedAddress)), (0, 1));
    }
}
