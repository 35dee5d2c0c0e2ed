#![forbid(unsafe_code)]
#![expect(clippy::unwrap_used, reason = "a test: its panic is the report")]
//! Many flows, and hostile ones: what they hold is bounded, and others keep moving. The host is one
//! of memory, so that there can be more of them than a process has descriptors; the clock is the test's.

use std::collections::HashMap;
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::Duration;

use ringfence_frame::Batch;
use ringfence_offload::{Checksum, Layers, OffloadMeta};
use ringfence_uplink::emit::Ends;
use ringfence_uplink::host::scripted::{REFUSES, SILENT, ScriptedHost};
use ringfence_uplink::tcp::segment::{Header, Segment, SynOptions};
use ringfence_uplink::tcp::seq::Seq;
use ringfence_uplink::testing::Wire;
use ringfence_uplink::{Config, Uplink, UplinkCounters};

const GUEST: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 2);
const FAR: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 1);
const ECHO: u16 = 80;
const FIN: u8 = 1;
const SYN: u8 = 2;
const RST: u8 = 4;
const ACK: u8 = 16;

/// Where a flow is, for its guest.
#[derive(Clone, Copy, Default)]
struct Line {
    sent: u32,
    heard: u32,
    made: bool,
    ended: bool,
    reset: bool,
}

/// A guest that keeps its flows by their ports: its own, the other end's.
struct Guest {
    uplink: Uplink,
    counters: Arc<UplinkCounters>,
    wire: Wire,
    now: Duration,
    lines: HashMap<Port, Line>,
    batch: Batch,
}

type Port = (u16, u16, Ipv4Addr);

impl Guest {
    fn new(sockets: usize, half_open: usize) -> Guest {
        let counters = Arc::<UplinkCounters>::default();
        let mut config = Config { mtu: 1500, ..Config::default() };
        config.tcp.half_open_max = half_open;
        let host = ScriptedHost::new(sockets).unwrap();
        Guest {
            uplink: Uplink::new(config, Box::new(host), Arc::clone(&counters)),
            counters,
            wire: Wire::new(2),
            now: Duration::from_secs(1000),
            lines: HashMap::new(),
            batch: Batch::with_capacity(1, 1 << 16),
        }
    }

    fn send(&mut self, port: Port, flags: u8, payload: &[u8]) {
        let line = self.lines.entry(port).or_default();
        let (ours, theirs, far) = port;
        let ends = Ends {
            from_mac: [2, 0, 0, 0, 0, 2],
            to_mac: self.uplink.config().mac,
            from: GUEST.into(),
            to: far.into(),
        };
        let options = if flags & SYN != 0 { &SynOptions::write(1460, Some(0))[..] } else { &[] };
        let mut frame = vec![0; 34 + 20 + options.len() + payload.len()];
        let len = frame.len() - 34;
        ends.write(&mut frame, 6, len, 1).unwrap();
        let header = Header {
            ports: (ours, theirs),
            seq: Seq(line.sent),
            acknowledged: Seq(line.heard),
            flags,
            window: 60_000,
            urgent: 0,
        };
        let at = 34 + header.write(options, 0, &mut frame[34..]).unwrap();
        frame[at..].copy_from_slice(payload);
        line.sent += u32::try_from(payload.len()).unwrap();
        line.sent += u32::from(flags & (SYN | FIN) != 0);
        self.batch.clear();
        let offset = self.batch.reserve(frame.len()).unwrap();
        self.batch.scratch_mut(offset..offset + frame.len()).unwrap().copy_from_slice(&frame);
        let meta = OffloadMeta { checksum: Checksum::Verified, gso: None };
        let index = self.batch.push_contiguous(offset, frame.len(), meta).unwrap();
        self.uplink.input(&self.batch, &[index], self.now);
    }

    /// Turns until nothing comes any more; what has come is taken, and acknowledged.
    fn settle(&mut self) {
        loop {
            let events = self.uplink.poll_host(self.now).unwrap();
            self.uplink.run_timers(self.now);
            let more = self.uplink.output(&mut self.wire, self.now);
            let frames = std::mem::take(&mut self.wire.frames);
            if events == 0 && !more && frames.is_empty() {
                return;
            }
            for frame in frames {
                self.take(&frame);
            }
        }
    }

    fn take(&mut self, frame: &[u8]) {
        let layers = Layers::parse(frame, u32::try_from(frame.len()).unwrap()).unwrap();
        let segment = Segment::parse(frame[34..].first_chunk().unwrap(), layers.payload_len());
        let far = Ipv4Addr::from(<[u8; 4]>::try_from(&frame[26..30]).unwrap());
        let port = (segment.ports.1, segment.ports.0, far);
        let Some(line) = self.lines.get_mut(&port) else { return };
        if segment.has(RST) {
            line.reset = true;
            return;
        }
        if segment.has(SYN) {
            line.heard = segment.seq.0.wrapping_add(1);
            line.made = true;
            return self.send(port, ACK, &[]);
        }
        if segment.seq.0 != line.heard {
            return;
        }
        line.heard = line.heard.wrapping_add(segment.len);
        if segment.has(FIN) {
            line.heard = line.heard.wrapping_add(1);
            line.ended = true;
        }
        if segment.len > 0 || segment.has(FIN) {
            self.send(port, ACK, &[]);
        }
    }

    fn line(&self, port: Port) -> Line {
        self.lines.get(&port).copied().unwrap_or_default()
    }

    fn count(&self, is_so: fn(&Line) -> bool) -> usize {
        self.lines.values().filter(|line| is_so(line)).count()
    }

    /// Lets time pass, in steps.
    fn wait(&mut self, time: Duration) {
        let until = self.now + time;
        while self.now < until {
            self.now = (self.now + time / 16).min(until);
            self.settle();
        }
    }

    /// A round on a flow that stands: what is sent comes back.
    fn echo(&mut self, port: Port) -> bool {
        let before = self.line(port).heard;
        self.send(port, ACK, b"there and back");
        self.settle();
        self.line(port).heard == before.wrapping_add(14)
    }
}

#[test]
fn ten_thousand_conversations_at_once_all_move() {
    let mut guest = Guest::new(20_000, 4096);
    let ports: Vec<Port> = (10_000..20_000).map(|port| (port, ECHO, FAR)).collect();
    for ports in ports.chunks(500) {
        ports.iter().for_each(|&port| guest.send(port, SYN, &[]));
        guest.settle();
    }
    assert_eq!(guest.count(|line| line.made && !line.reset), 10_000);
    assert_eq!(guest.uplink.tcp_flows(), 10_000);
    for &port in &ports {
        guest.send(port, ACK, b"there and back");
    }
    guest.settle();
    let heard = |line: &Line| u64::from(line.sent) == 15;
    assert_eq!(guest.count(heard), 10_000);
    assert_eq!(guest.counters.tcp_bytes_out.get(), 140_000);
    assert_eq!(guest.counters.tcp_evicted.get(), 0);
}

#[test]
fn a_hundred_thousand_conversations_leave_nothing() {
    let mut guest = Guest::new(4000, 4096);
    for round in 0..50_u8 {
        let far = Ipv4Addr::new(198, 51, 100, round);
        let ports: Vec<Port> = (10_000..12_000).map(|port| (port, ECHO, far)).collect();
        ports.iter().for_each(|&port| guest.send(port, SYN, &[]));
        guest.settle();
        ports.iter().for_each(|&port| guest.send(port, ACK, b"x"));
        guest.settle();
        ports.iter().for_each(|&port| guest.send(port, FIN | ACK, &[]));
        guest.settle();
        let ended = ports.iter().filter(|port| guest.line(**port).ended).count();
        assert_eq!(ended, 2000, "round {round}");
        guest.wait(Duration::from_secs(10));
        assert_eq!(guest.uplink.tcp_flows(), 0, "round {round}");
        guest.lines.clear();
    }
    assert_eq!(guest.counters.tcp_closed.get(), 100_000);
    assert_eq!(guest.counters.tcp_bytes_out.get(), 100_000);
}

#[test]
fn a_flood_of_syns_is_bounded_and_others_keep_moving() {
    let mut guest = Guest::new(600, 512);
    let honest = (5000, ECHO, FAR);
    guest.send(honest, SYN, &[]);
    guest.settle();
    assert!(guest.echo(honest));
    for wave in 0..100_u32 {
        for port in 0..1000_u16 {
            let far = Ipv4Addr::from_bits(FAR.to_bits() + 256 + wave);
            guest.send((10_000 + port, SILENT, far), SYN, &[]);
        }
        guest.settle();
        assert!(guest.uplink.tcp_flows() <= 513, "{} conversations", guest.uplink.tcp_flows());
        assert!(guest.echo(honest), "the honest one stands still in wave {wave}");
        guest.lines.retain(|port, _| *port == honest);
    }
    assert!(guest.counters.tcp_evicted.get() > 90_000);
    // Those that are left are given up in time; the honest one is asked, answers, and lives on.
    guest.wait(Duration::from_secs(600));
    assert_eq!(guest.uplink.tcp_flows(), 1);
    assert!(guest.echo(honest));
}

#[test]
fn who_runs_out_of_descriptors_gives_up_the_longest_idle() {
    let mut guest = Guest::new(100, 4096);
    for port in 10_000..10_300 {
        guest.send((port, ECHO, FAR), SYN, &[]);
        guest.settle();
        assert!(guest.line((port, ECHO, FAR)).made, "{port}");
    }
    assert!(guest.uplink.tcp_flows() <= 100);
    assert_eq!(guest.count(|line| line.reset), 200, "the others were told");
    assert!(guest.echo((10_299, ECHO, FAR)));
}

#[test]
fn a_guest_that_has_gone_is_found_out_after_hours_and_not_before() {
    let mut guest = Guest::new(100, 64);
    let port = (10_000, ECHO, FAR);
    guest.send(port, SYN, &[]);
    guest.settle();
    assert!(guest.echo(port));
    // It says nothing more, for an hour: that is no reason to end.
    guest.lines.clear();
    guest.wait(Duration::from_secs(3600));
    assert_eq!(guest.uplink.tcp_flows(), 1);
    // Nobody answers the questions that come then.
    guest.wait(Duration::from_secs(3600));
    for _ in 0..20 {
        guest.wait(Duration::from_secs(120));
    }
    assert_eq!(guest.uplink.tcp_flows(), 0);
}

#[test]
fn a_connection_that_is_half_open_for_an_hour_is_given_up() {
    let mut guest = Guest::new(100, 64);
    guest.send((10_000, SILENT, FAR), SYN, &[]);
    guest.send((10_001, REFUSES, FAR), SYN, &[]);
    guest.settle();
    assert!(guest.line((10_001, REFUSES, FAR)).reset, "who is refused is told at once");
    assert_eq!(guest.uplink.tcp_flows(), 1);
    guest.wait(Duration::from_secs(3600));
    assert_eq!(guest.uplink.tcp_flows(), 0);
    assert!(!guest.line((10_000, SILENT, FAR)).made);
}

#[test]
fn a_reset_ends_every_state_and_frees_what_it_held() {
    // Before the answer, when made, with data under way, after our FIN, after both.
    for steps in 0..5 {
        let mut guest = Guest::new(4, 64);
        let port = (10_000, if steps == 0 { SILENT } else { ECHO }, FAR);
        guest.send(port, SYN, &[]);
        guest.settle();
        if steps > 1 {
            guest.send(port, ACK, b"under way");
        }
        if steps > 2 {
            guest.send(port, FIN | ACK, &[]);
        }
        if steps > 3 {
            guest.settle();
        }
        guest.send(port, RST | ACK, &[]);
        guest.settle();
        guest.wait(Duration::from_secs(10));
        assert_eq!(guest.uplink.tcp_flows(), 0, "after {steps} steps");
        // The same ports serve again at once.
        let again = (10_000, ECHO, FAR);
        guest.lines.clear();
        guest.lines.insert(again, Line { sent: 9_000_000, ..Line::default() });
        guest.send(again, SYN, &[]);
        guest.settle();
        assert!(guest.echo(again), "after {steps} steps");
    }
}
