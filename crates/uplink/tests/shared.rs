#![forbid(unsafe_code)]
#![expect(clippy::unwrap_used, reason = "a test: its panic is the report")]
//! Flows of one guest that are spread over several engines, with frames that reach any of them. The hosts are scripted;
//! the test stands for the runners and carries what the engines hand over.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::Duration;

use ringfence_frame::Batch;
use ringfence_offload::{Checksum, Layers, OffloadMeta};
use ringfence_uplink::emit::Ends;
use ringfence_uplink::host::scripted::ScriptedHost;
use ringfence_uplink::share::Share;
use ringfence_uplink::tcp::segment::{Header, Ports, Segment, SynOptions};
use ringfence_uplink::tcp::seq::Seq;
use ringfence_uplink::testing::Wire;
use ringfence_uplink::{Config, Uplink};

const GUEST: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 2);
const GUEST_V6: IpAddr = IpAddr::V6(std::net::Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 2));
const FAR: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 1);
const ECHO: u16 = 80;
const ENGINES: usize = 4;
const NOW: Duration = Duration::from_secs(1000);

const FIN: u8 = 1;
const SYN: u8 = 2;
const RST: u8 = 4;
const ACK: u8 = 16;

/// Engines of one guest, and the frames that each has sent.
struct Engines {
    engines: Vec<Uplink>,
    wires: Vec<Wire>,
    batch: Batch,
}

/// Segment that an engine has sent to the guest.
#[derive(Debug)]
struct Sent {
    engine: usize,
    flags: u8,
    seq: u32,
    payload: Vec<u8>,
}

impl Engines {
    fn new() -> Engines {
        let forwards = Arc::default();
        let engine = |index| {
            let mut config = Config { mtu: 1500, ..Config::default() };
            config.guest.learns = true;
            config.share = Share::new(index, ENGINES, Arc::clone(&forwards));
            let host = ScriptedHost::new(1000).unwrap();
            Uplink::new(config, Box::new(host), Arc::default())
        };
        Engines {
            engines: (0..ENGINES).map(engine).collect(),
            wires: (0..ENGINES).map(|_| Wire::new(4)).collect(),
            batch: Batch::with_capacity(1, 1 << 16),
        }
    }

    /// Passes a frame to an engine, as the kernel does by the queue of that engine.
    fn input(&mut self, engine: usize, frame: &[u8]) {
        self.batch.clear();
        let offset = self.batch.reserve(frame.len()).unwrap();
        self.batch.scratch_mut(offset..offset + frame.len()).unwrap().copy_from_slice(frame);
        let meta = OffloadMeta { checksum: Checksum::Verified, gso: None };
        let index = self.batch.push_contiguous(offset, frame.len(), meta).unwrap();
        self.engines[engine].input(&self.batch, &[index], NOW);
    }

    fn segment(&mut self, engine: usize, port: u16, flags: u8, at: (u32, u32), payload: &[u8]) {
        let ends = self.ends(GUEST.into(), FAR.into());
        let options = if flags & SYN != 0 { &SynOptions::write(1460, Some(0))[..] } else { &[] };
        let mut frame = vec![0; 34 + 20 + options.len() + payload.len()];
        let len = frame.len() - 34;
        ends.write(&mut frame, 6, len, 1).unwrap();
        let header = Header {
            ports: Ports { from: port, to: ECHO },
            seq: Seq(at.0),
            acknowledged: Seq(at.1),
            flags,
            window: 60_000,
            urgent: 0,
        };
        let at = 34 + header.write(options, 0, &mut frame[34..]).unwrap();
        frame[at..].copy_from_slice(payload);
        self.input(engine, &frame);
    }

    fn datagram(&mut self, engine: usize, from: IpAddr, port: u16, to: IpAddr) {
        let ends = self.ends(from, to);
        let mut frame = vec![0; ends.header_len()];
        ends.write(&mut frame, 17, 9, 1).unwrap();
        for field in [port, ECHO, 9, 0] {
            frame.extend_from_slice(&field.to_be_bytes());
        }
        frame.push(b'x');
        self.input(engine, &frame);
    }

    fn ends(&self, from: IpAddr, to: IpAddr) -> Ends {
        Ends { from_mac: [2, 0, 0, 0, 0, 2], to_mac: self.engines[0].config().mac, from, to }
    }

    /// Runs rounds until nothing is left to do. Returns the segments that the engines sent.
    fn settle(&mut self) -> Vec<Sent> {
        let mut sent = Vec::new();
        loop {
            let mut is_idle = true;
            let mut handoffs = Vec::new();
            for (index, (engine, wire)) in self.engines.iter_mut().zip(&mut self.wires).enumerate()
            {
                let events = engine.poll_host(NOW).unwrap();
                let more = engine.output(wire, NOW);
                let frames = std::mem::take(&mut wire.frames);
                handoffs.extend(engine.take_handoffs());
                is_idle &= events == 0 && !more && frames.is_empty();
                sent.extend(frames.iter().filter_map(|frame| read(index, frame)));
            }
            is_idle &= handoffs.is_empty();
            for (index, handoff) in handoffs {
                self.engines[index].accept_handoff(handoff, NOW);
            }
            if is_idle {
                return sent;
            }
        }
    }

    fn handed_over(&self) -> u64 {
        self.engines.iter().map(|engine| engine.counters().handed_over.get()).sum()
    }

    fn tcp_flows(&self) -> Vec<usize> {
        self.engines.iter().map(Uplink::tcp_flows).collect()
    }

    /// Opens a connection whose frames reach one engine. Returns the next sequence number of the other end.
    fn open(&mut self, engine: usize, port: u16) -> u32 {
        self.segment(engine, port, SYN, (0, 0), &[]);
        let answer = self.settle();
        let [Sent { flags, seq, .. }] = &answer[..] else { panic!("{answer:?}") };
        assert_eq!(*flags, SYN | ACK);
        let heard = seq.wrapping_add(1);
        self.segment(engine, port, ACK, (1, heard), &[]);
        self.settle();
        heard
    }
}

fn read(engine: usize, frame: &[u8]) -> Option<Sent> {
    let layers = Layers::parse(frame, u32::try_from(frame.len()).unwrap()).unwrap();
    let header = frame.get(34..)?.first_chunk()?;
    let segment = Segment::parse(header, layers.payload_len());
    let payload = frame[frame.len() - usize::try_from(segment.len).unwrap()..].to_vec();
    (frame[23] == 6).then_some(Sent { engine, flags: segment.flags, seq: segment.seq.0, payload })
}

#[test]
fn connection_stays_on_the_engine_that_its_syn_reached_without_a_handover() {
    let mut engines = Engines::new();
    for port in 4000..4000 + 10 * u16::try_from(ENGINES).unwrap() {
        let engine = usize::from(port) % ENGINES;
        let heard = engines.open(engine, port);
        engines.segment(engine, port, ACK, (1, heard), b"there and back");
        let sent = engines.settle();
        let echo = sent.iter().find(|sent| !sent.payload.is_empty()).unwrap();
        assert_eq!((echo.engine, &echo.payload[..]), (engine, &b"there and back"[..]));
    }
    assert_eq!(engines.tcp_flows(), [10; ENGINES]);
    // The first packet of each engine but the first one tells the first engine the guest's address.
    assert!(engines.handed_over() < u64::try_from(ENGINES).unwrap(), "{}", engines.handed_over());
}

#[test]
fn segment_that_reaches_any_other_engine_is_carried_in_order_by_its_own() {
    for owner in 0..ENGINES {
        let mut engines = Engines::new();
        let heard = engines.open(owner, 4000);
        let (mut next, mut sent) = (1, Vec::new());
        for round in 0..2 * ENGINES {
            engines.segment(round % ENGINES, 4000, ACK, (next, heard), b"abcd");
            next += 4;
            sent.extend(engines.settle());
        }
        let echoed: Vec<u8> = sent.iter().flat_map(|sent| sent.payload.clone()).collect();
        assert!(sent.iter().all(|sent| sent.engine == owner && sent.flags & RST == 0), "{sent:?}");
        assert_eq!(echoed, b"abcd".repeat(2 * ENGINES), "{sent:?}");
        assert_eq!(engines.tcp_flows().iter().sum::<usize>(), 1);
        // A reset ends it from any engine, too.
        engines.segment((owner + 1) % ENGINES, 4000, RST | ACK, (next, heard), &[]);
        engines.settle();
        assert_eq!(engines.tcp_flows(), [0; ENGINES]);
    }
}

#[test]
fn segment_without_a_connection_is_refused_once_after_each_engine_has_seen_it() {
    let mut engines = Engines::new();
    for (engine, port) in (0..ENGINES).zip(5000..) {
        let before = engines.handed_over();
        engines.segment(engine, port, FIN | ACK, (7, 9), &[]);
        let sent = engines.settle();
        assert!(matches!(&sent[..], [one] if one.flags & RST != 0), "{sent:?}");
        let learned = u64::from(engine != 0);
        // The guest's address is told once for each engine that learns it.
        let handed = engines.handed_over() - before;
        let others = u64::try_from(ENGINES - 1).unwrap();
        assert!((others..=others + others + learned).contains(&handed), "{handed}");
    }
    let stray = |engine: &Uplink| engine.counters().tcp_stray.get();
    assert_eq!(engines.engines.iter().map(stray).sum::<u64>(), ENGINES as u64);
}

#[test]
fn all_peers_of_a_udp_port_are_served_by_one_engine() {
    let mut engines = Engines::new();
    for port in 6000..6040 {
        let before: Vec<usize> = engines.engines.iter().map(Uplink::udp_flows).collect();
        for peer in 0..8_u8 {
            let to = Ipv4Addr::new(198, 51, 100, peer);
            engines.datagram(usize::from(peer) % ENGINES, GUEST.into(), port, to.into());
        }
        engines.settle();
        let grown = engines.engines.iter().map(Uplink::udp_flows).zip(before);
        let mut grown: Vec<usize> = grown.map(|(now, before)| now - before).collect();
        grown.sort_unstable();
        assert_eq!(grown, [0, 0, 0, 8], "port {port}");
    }
    // Ports are spread.
    let counts: Vec<usize> = engines.engines.iter().map(Uplink::udp_flows).collect();
    assert!(counts.iter().all(|count| *count >= 8), "{counts:?}");
}

#[test]
fn address_that_any_engine_learns_is_known_to_the_first() {
    let mut engines = Engines::new();
    let to: IpAddr = "2001:db8::1".parse().unwrap();
    let mac = [2, 0, 0, 0, 0, 2];
    engines.datagram(ENGINES - 1, GUEST_V6, 6000, to);
    engines.settle();
    let first = &engines.engines[0].config().guest;
    assert_eq!((first.mac, first.seen.map(IpAddr::V6)), (Some(mac), Some(GUEST_V6)));
}
