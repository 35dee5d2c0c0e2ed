use core::net::SocketAddr;
use std::sync::mpsc::{Receiver, sync_channel};

use ringfence_offload::Checksum;
use ringfence_offload::packet::protocol;
use ringfence_policy::{Action, Policy, PolicySource};

use super::*;
use crate::config::Config;
use crate::egress::{Answer, AskLimits, Note, PolicyInForce};
use crate::emit::Ends;
use crate::host::scripted::ScriptedHost;
use crate::share::Handoff;
use crate::testing::Wire;
use crate::{Uplink, UplinkCounters};

const NOW: Duration = Duration::from_secs(1000);
const SECOND: Duration = Duration::from_secs(1);
const LIMITS: AskLimits = AskLimits { within: Duration::from_secs(30), at_a_time: 4 };
const UNKNOWN: [u8; 4] = [203, 0, 113, 9];

/// Engine whose policy allows nothing and asks.
struct Fixture {
    uplink: Uplink,
    egress: Arc<Egress>,
    wire: Wire,
    _notes: Receiver<Option<Note>>,
}

impl Fixture {
    fn new() -> Fixture {
        let (queue, notes) = sync_channel(1000);
        let source = PolicySource { default: Some(Action::Deny), ..PolicySource::default() };
        let policy = Policy::new(source).unwrap();
        let egress = Arc::new(Egress::with_questions(policy, Some(queue), false, Some(LIMITS)));
        let policy = PolicyInForce::new(Some(Arc::clone(&egress)));
        let config = Config { mtu: 1500, policy, ..Config::default() };
        let host = ScriptedHost::new(64).unwrap();
        let uplink = Uplink::new(config, Box::new(host), Arc::<UplinkCounters>::default());
        Fixture { uplink, egress, wire: Wire::new(4), _notes: notes }
    }

    /// Sends a datagram of the guest.
    fn send(&mut self, to: SocketAddr, payload: &[u8], id: u16) {
        let (from, to_mac) = ([10, 0, 0, 2].into(), self.uplink.config().mac);
        let ends = Ends { from_mac: [2, 0, 0, 0, 0, 2], to_mac, from, to: to.ip() };
        let length = 8 + payload.len();
        let mut bytes = vec![0; ends.header_len()];
        for field in [4000, to.port(), u16::try_from(length).unwrap(), 0] {
            bytes.extend_from_slice(&field.to_be_bytes());
        }
        bytes.extend_from_slice(payload);
        ends.write(&mut bytes, protocol::UDP, length, id).unwrap();
        let meta = OffloadMeta { checksum: Checksum::Verified, gso: None };
        self.uplink
            .accept_handoff(Handoff::Frame { bytes, meta, visited: Default::default() }, NOW);
        while self.uplink.output(&mut self.wire, NOW) {}
    }

    fn run(&mut self, now: Duration) {
        self.uplink.run_timers(now);
        while self.uplink.output(&mut self.wire, now) {}
    }
}

#[test]
fn datagram_waits_for_the_answer_and_goes_on_or_is_refused() {
    let to = (UNKNOWN, 9).into();
    for (answer, is_allowed) in
        [(Some(Answer::Once), true), (Some(Answer::Deny), false), (None, false)]
    {
        let mut fixture = Fixture::new();
        for id in 0..3 {
            fixture.send(to, b"same", id);
        }
        fixture.send(to, b"other", 3);
        assert_eq!((fixture.uplink.udp_flows(), fixture.egress.questions()), (0, 1));
        assert!(fixture.wire.frames.is_empty(), "neither sent nor refused");
        assert_eq!(fixture.uplink.deadline(), Some(NOW + LIMITS.within));
        let now = match answer {
            Some(answer) => {
                assert!(fixture.uplink.answer_question(1, answer, NOW + SECOND));
                NOW + SECOND
            }
            None => NOW + LIMITS.within,
        };
        fixture.run(now);
        assert_eq!(fixture.uplink.udp_flows(), usize::from(is_allowed), "{answer:?}");
        // Two datagrams have waited: a repetition is none.
        let refusals = if is_allowed { 0 } else { 2 };
        assert_eq!(fixture.wire.frames.len(), refusals, "{answer:?}");
        assert!(!fixture.uplink.answer_question(1, Answer::Run, now), "a second answer");
    }
}

#[test]
fn flood_of_datagrams_keeps_a_bounded_number_of_them() {
    let mut fixture = Fixture::new();
    for number in 0..1000_u16 {
        for port in 1..=4 {
            fixture.send((UNKNOWN, port).into(), &number.to_be_bytes(), number);
        }
    }
    let lost = fixture.uplink.counters().egress_packets_unheld.get();
    assert_eq!(lost, 4000 - PACKETS_MAX as u64);
    assert_eq!(fixture.egress.questions(), 4);
    fixture.run(NOW + LIMITS.within);
    assert_eq!(fixture.uplink.deadline(), None);
    // All memory is given back.
    assert!(fixture.egress.hold(crate::egress::FIRST_BYTES_HELD_MAX));
}
