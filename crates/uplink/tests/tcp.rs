#![forbid(unsafe_code)]
#![expect(clippy::unwrap_used, reason = "a test: its panic is the report")]
//! Scripted tests of the TCP state machine: segments of a guest, a simulated clock, and real sockets on the
//! host's side.
//!
//! Each line of a script is an action of one side, or an expectation of the uplink:
//!
//! * `guest FLAGS SEQ ACK [win=N] [len=N]`: the guest sends a segment. Flags are letters (S F R P A); both
//!   numbers count from the SYNs.
//! * `uplink FLAGS SEQ ACK [len=N]`: the next segment to the guest; P is ignored.
//! * `silence`: no segment to the guest.
//! * `host accept | send OFFSET N | read N | shut | close | reset | eof | broken`: the other end acts.
//! * `time N`: the clock advances by N milliseconds.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use ringfence_frame::Batch;
use ringfence_offload::{Checksum, Layers, OffloadMeta};
use ringfence_policy::{Action, Policy, PolicySource, RuleSource};
use ringfence_uplink::emit::Ends;
use ringfence_uplink::host::real::RealHost;
use ringfence_uplink::share::Handoff;
use ringfence_uplink::tcp::segment::{Header, Ports, Segment, SynOptions};
use ringfence_uplink::tcp::seq::Seq;
use ringfence_uplink::testing::Wire;
use ringfence_uplink::{Config, Uplink, UplinkCounters};

const GUEST: [u8; 4] = [10, 0, 0, 2];
const ROUTER: [u8; 4] = [10, 0, 0, 1];
const GUEST_ISN: u32 = 0xffff_fff0;
const FLAGS: [(char, u8); 5] = [('F', 1), ('S', 2), ('R', 4), ('P', 8), ('A', 16)];

struct Fixture {
    uplink: Uplink,
    wire: Wire,
    now: Duration,
    listener: TcpListener,
    /// Port that the guest connects to, unless it is the listener's.
    calls: Option<u16>,
    remote: Option<TcpStream>,
    /// Initial sequence number of the uplink, once seen.
    isn: u32,
    /// Bytes that each side has received, for comparison.
    heard: Vec<u8>,
    /// Window scale of the guest, in bits.
    scale: u8,
}

impl Fixture {
    fn new() -> Fixture {
        Fixture::of(|_| {})
    }

    /// Creates a fixture and applies `change` to its host.
    fn of(change: impl FnOnce(&mut RealHost)) -> Fixture {
        let counters = Arc::<UplinkCounters>::default();
        let mut config = Config { mtu: 1500, ..Config::default() };
        config.access.host_loopback.push(ROUTER.into());
        config.guest.mac = Some([2, 0, 0, 0, 0, 2]);
        let mut host = RealHost::new(Arc::clone(&counters)).unwrap();
        change(&mut host);
        Fixture {
            uplink: Uplink::new(config, Box::new(host), counters),
            wire: Wire::new(4),
            now: Duration::from_secs(1000),
            listener: TcpListener::bind("127.0.0.1:0").unwrap(),
            calls: None,
            remote: None,
            isn: 0,
            heard: Vec::new(),
            scale: 0,
        }
    }

    fn port(&self) -> u16 {
        self.calls.unwrap_or_else(|| self.listener.local_addr().unwrap().port())
    }

    /// Runs rounds until frames arrive; the host's kernel may take a moment.
    fn settle(&mut self) {
        for _ in 0..20 {
            let before = self.wire.frames.len();
            self.uplink.poll_host(self.now).unwrap();
            self.uplink.run_timers(self.now);
            while self.uplink.output(&mut self.wire, self.now) {}
            if self.wire.frames.len() > before {
                return;
            }
            std::thread::sleep(Duration::from_micros(300));
        }
    }

    fn guest(&mut self, flags: u8, seq: u32, ack: u32, window: u16, len: usize) {
        let ends = Ends {
            from_mac: [2, 0, 0, 0, 0, 2],
            to_mac: self.uplink.config().mac,
            from: GUEST.into(),
            to: ROUTER.into(),
        };
        let options =
            if flags & 2 != 0 { &SynOptions::write(1460, Some(self.scale))[..] } else { &[] };
        let mut frame = vec![0; 34 + 20 + options.len() + len];
        ends.write(&mut frame, 6, 20 + options.len() + len, 1).unwrap();
        let header = Header {
            ports: Ports { from: 4000, to: self.port() },
            seq: Seq(GUEST_ISN) + seq,
            acknowledged: Seq(self.isn) + ack,
            flags,
            window,
            urgent: 0,
        };
        let at = 34 + header.write(options, 0, &mut frame[34..]).unwrap();
        for (byte, offset) in frame[at..].iter_mut().zip(seq..) {
            *byte = byte_at(offset);
        }
        let mut batch = Batch::with_capacity(1, 1 << 16);
        let offset = batch.reserve(frame.len()).unwrap();
        batch.scratch_mut(offset..offset + frame.len()).unwrap().copy_from_slice(&frame);
        let meta = OffloadMeta { checksum: Checksum::Verified, gso: None };
        let index = batch.push_contiguous(offset, frame.len(), meta).unwrap();
        self.uplink.input(&batch, &[index], self.now);
    }

    fn expect(&mut self, flags: u8, seq: u32, ack: u32, len: u32, line: &str) {
        if self.wire.frames.is_empty() {
            self.settle();
        }
        assert!(!self.wire.frames.is_empty(), "{line}: nothing came");
        let frame = self.wire.frames.remove(0);
        let layers = Layers::parse(&frame, u32::try_from(frame.len()).unwrap()).unwrap();
        let segment = Segment::parse(frame[34..].first_chunk().unwrap(), layers.payload_len());
        if segment.has(2) {
            self.isn = segment.seq.0;
        }
        let of_no_connection = flags & 4 != 0 && self.isn == 0;
        let base = if of_no_connection { 0 } else { self.isn };
        let found = (
            segment.flags & !8,
            segment.seq.0.wrapping_sub(base),
            segment.acknowledged.0.wrapping_sub(GUEST_ISN),
            segment.len,
        );
        assert_eq!(found, (flags & !8, seq, ack, len), "{line}");
        let payload = &frame[usize::from(layers.header_len())..];
        let right = payload.iter().zip(seq..).all(|(&byte, offset)| byte == byte_at(offset));
        assert!(right, "{line}: the bytes are others");
    }

    fn host(&mut self, words: &[&str], line: &str) {
        match words {
            ["accept"] => {
                let remote = self.listener.accept().unwrap().0;
                remote.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
                self.remote = Some(remote);
            }
            ["send", from, n] => {
                let from: u32 = from.parse().unwrap();
                let bytes: Vec<u8> =
                    (from..from + n.parse::<u32>().unwrap()).map(byte_at).collect();
                self.remote.as_mut().unwrap().write_all(&bytes).unwrap();
            }
            ["read", n] => {
                let mut bytes = vec![0; n.parse().unwrap()];
                self.remote.as_mut().unwrap().read_exact(&mut bytes).unwrap();
                let from = u32::try_from(self.heard.len()).unwrap() + 1;
                assert!(
                    bytes.iter().zip(from..).all(|(&o, offset)| o == byte_at(offset)),
                    "{line}"
                );
                self.heard.extend(bytes);
            }
            ["shut"] => self.remote.as_ref().unwrap().shutdown(std::net::Shutdown::Write).unwrap(),
            ["close"] => self.remote = None,
            ["reset"] => {
                let remote = self.remote.take().unwrap();
                rustix::net::sockopt::set_socket_linger(&remote, Some(Duration::ZERO)).unwrap();
            }
            ["eof"] => {
                assert_eq!(self.remote.as_mut().unwrap().read(&mut [0]).unwrap(), 0, "{line}")
            }
            ["broken"] => {
                let error = self.remote.as_mut().unwrap().read(&mut [0]).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::ConnectionReset, "{line}");
            }
            _ => panic!("{line}"),
        }
    }

    fn run(&mut self, script: &str) {
        for line in script.lines().map(str::trim).filter(|line| !line.is_empty()) {
            let words: Vec<&str> = line.split_whitespace().collect();
            match words[..] {
                ["guest" | "uplink", flags, seq, ack, ..] => {
                    let option = |name: &str| {
                        words.iter().find_map(|word| word.strip_prefix(name)?.parse::<u32>().ok())
                    };
                    let flags = flags.chars().fold(0, |all, letter| {
                        all | FLAGS.iter().find(|(known, _)| *known == letter).unwrap().1
                    });
                    let (seq, ack) = (seq.parse().unwrap(), ack.parse().unwrap());
                    let len = option("len=").unwrap_or(0);
                    if words[0] == "guest" {
                        let window = option("win=").map_or(60_000, |win| win.try_into().unwrap());
                        self.guest(flags, seq, ack, window, len.try_into().unwrap());
                    } else {
                        self.expect(flags, seq, ack, len, line);
                    }
                }
                ["silence"] => {
                    self.settle();
                    assert_eq!(self.wire.frames.len(), 0, "{line}");
                }
                ["time", ms] => self.now += Duration::from_millis(ms.parse().unwrap()),
                ["host", ref words @ ..] => self.host(words, line),
                _ => panic!("{line}"),
            }
        }
    }
}

/// Returns the expected byte at an offset of either stream.
fn byte_at(offset: u32) -> u8 {
    offset.wrapping_mul(31).to_le_bytes()[0] ^ offset.to_le_bytes()[1]
}

/// Script that establishes a connection from the guest.
const ESTABLISHED: &str = "
    guest S 0 0
    uplink SA 0 1
    guest A 1 1
    host accept
";

fn established(rest: &str) -> Fixture {
    let mut fixture = Fixture::new();
    fixture.run(ESTABLISHED);
    fixture.run(rest);
    fixture
}

#[test]
fn guest_closing_first_ends_connection() {
    let fixture = established(
        "guest PA 1 1 len=100
         host read 100
         host send 1 300
         uplink A 1 101 len=300
         guest FA 101 301
         host eof
         time 1
         uplink A 301 102
         host close
         uplink FA 301 102
         guest A 102 302
         silence",
    );
    assert_eq!(fixture.uplink.tcp_flows(), 0);
}

#[test]
fn repeated_fin_in_time_wait_is_acknowledged() {
    let mut fixture = established(
        "host shut
         uplink FA 1 1
         guest A 1 2
         guest A 1 2 len=10
         uplink A 2 11
         host read 10
         guest FA 11 2
         uplink A 2 12
         host eof
         time 500
         guest FA 11 2
         uplink A 2 12",
    );
    fixture.run("time 3000\n silence");
    assert_eq!(fixture.uplink.tcp_flows(), 0);
}

#[test]
fn client_port_reused_in_time_wait_is_accepted() {
    let mut fixture = Fixture::new();
    let client = SocketAddr::from((ROUTER, fixture.port()));
    for _ in 0..2 {
        let remote = TcpStream::connect(fixture.listener.local_addr().unwrap()).unwrap();
        let file = fixture.listener.accept().unwrap().0.into();
        let guest = SocketAddr::from((GUEST, 4000));
        fixture.uplink.accept_handoff(Handoff::Connection { file, client, guest }, fixture.now);
        fixture.remote = Some(remote);
        fixture.run(
            "uplink S 0 16
             guest SA 0 1
             uplink A 1 1
             host shut
             uplink FA 1 1
             guest FA 1 2
             uplink A 2 2
             host eof",
        );
        assert_eq!(fixture.uplink.tcp_flows(), 1, "the connection is in TIME-WAIT");
    }
}

#[test]
fn window_of_syn_stays_in_force_without_a_call() {
    let mut fixture = Fixture::new();
    let client = SocketAddr::from((ROUTER, fixture.port()));
    let _remote = TcpStream::connect(fixture.listener.local_addr().unwrap()).unwrap();
    let file = fixture.listener.accept().unwrap().0.into();
    let guest = SocketAddr::from((GUEST, 4000));
    fixture.uplink.accept_handoff(Handoff::Connection { file, client, guest }, fixture.now);
    fixture.run("uplink S 0 16");
    let before = fixture.uplink.counters().syscalls.get();
    fixture.run("guest SA 0 1");
    fixture.uplink.output(&mut fixture.wire, fixture.now);
    assert_eq!(fixture.uplink.counters().syscalls.get(), before);
    let window =
        fixture.wire.frames[0][34..].first_chunk().map(|header| Segment::parse(header, 0).window);
    assert!(window.unwrap() > 0, "the window of the SYN, scaled");
    fixture.run("uplink A 1 1");
}

#[test]
fn end_that_came_with_data_needs_no_further_peek() {
    let mut fixture = established("host send 1 100\nhost shut");
    fixture.uplink.poll_host(fixture.now).unwrap();
    let before = fixture.uplink.counters().syscalls.get();
    while fixture.uplink.output(&mut fixture.wire, fixture.now) {}
    assert_eq!(fixture.uplink.counters().syscalls.get() - before, 1, "the peek");
    fixture.run(
        "uplink A 1 1 len=100
         uplink FA 101 1",
    );
}

#[test]
fn refused_host_connection_resets_guest() {
    let mut fixture = Fixture::new();
    // No process listens on this port. One that was just released may be another test's by now.
    fixture.calls = Some(1);
    fixture.run("guest S 0 0\n uplink RA 0 1");
    assert_eq!(fixture.uplink.tcp_flows(), 0);
}

/// Returns a policy that allows this and nothing else.
fn only(rule: &str) -> Policy {
    let (text, origin) = (rule.to_owned(), String::new());
    let rules = vec![RuleSource { action: Action::Allow, text, origin }];
    Policy::new(PolicySource { rules, ..PolicySource::default() }).unwrap()
}

#[test]
fn open_connection_ends_at_both_ends_when_new_policy_denies_it() {
    let mut fixture = established("");
    fixture.uplink.set_policy(only("10.0.0.0/24"), None, fixture.now);
    fixture.run(
        "silence
         guest PA 1 1 len=100
         host read 100
         time 50
         uplink A 1 101",
    );
    fixture.uplink.set_policy(only("10.0.1.0/24"), None, fixture.now);
    fixture.run(
        "uplink RA 1 101
         host broken
         silence",
    );
    assert_eq!(fixture.uplink.tcp_flows(), 0);
}

#[test]
fn segment_without_connection_is_reset() {
    let mut fixture = Fixture::new();
    fixture.run("guest A 5 77\n uplink R 77 16\n guest R 5 0\n silence");
}

#[test]
fn segment_out_of_order_causes_duplicate_ack() {
    established(
        "guest PA 101 1 len=100
         uplink A 1 1
         guest PA 201 1 len=100
         uplink A 1 1
         guest PA 1 1 len=100
         time 1
         uplink A 1 101
         guest PA 1 1 len=200
         uplink A 1 201
         host read 200",
    );
}

#[test]
fn answer_carries_delayed_ack() {
    established(
        "guest PA 1 1 len=100
         silence
         host read 100
         host send 1 10
         uplink A 1 101 len=10
         guest PA 101 11 len=100
         silence
         host read 100
         host send 11 10
         uplink A 11 201 len=10
         time 5
         silence",
    );
}

#[test]
fn expired_delayed_ack_disables_delay() {
    established(
        "guest PA 1 1 len=100
         silence
         time 1
         uplink A 1 101
         guest PA 101 1 len=100
         uplink A 1 201
         host send 1 10
         uplink A 1 201 len=10
         guest PA 201 11 len=100
         silence
         time 1
         uplink A 11 301",
    );
}

#[test]
fn full_segment_is_acknowledged_at_once() {
    established(
        "guest A 1 1 len=1460
         uplink A 1 1461
         guest A 1461 1 len=800
         silence
         guest A 2261 1 len=800
         uplink A 1 3061",
    );
}

#[test]
fn repeated_segment_is_acknowledged_at_once() {
    established(
        "guest A 1 1 len=100
         silence
         guest A 1 1 len=100
         uplink A 1 101
         guest A 1 1 len=150
         uplink A 1 151",
    );
}

#[test]
fn duplicate_ack_covers_data_with_delayed_ack() {
    established(
        "guest A 1 1 len=100
         silence
         guest A 201 1 len=100
         uplink A 1 101
         time 1
         silence",
    );
}

#[test]
fn fin_carries_delayed_ack_of_fin() {
    let fixture = established(
        "guest FA 1 1 len=10
         silence
         host read 10
         host eof
         host close
         uplink FA 1 12
         guest A 12 2
         silence",
    );
    assert_eq!(fixture.uplink.tcp_flows(), 0);
}

#[test]
fn lost_segment_is_retransmitted_after_timeout() {
    established(
        "host send 1 3000
         uplink A 1 1 len=3000
         time 1100
         uplink A 1 1 len=3000
         time 2100
         uplink A 1 1 len=3000
         guest A 1 3001
         host send 3001 10
         uplink A 3001 1 len=10
         guest A 1 3011
         silence",
    );
}

#[test]
fn three_duplicate_acks_retransmit_first_segment() {
    established(
        "host send 1 3000
         uplink A 1 1 len=3000
         guest A 1 1461
         guest A 1 1461
         guest A 1 1461
         silence
         guest A 1 1461
         uplink A 1461 1 len=1540
         guest A 1 3001
         silence",
    );
}

#[test]
fn closed_window_is_probed() {
    established(
        "guest A 1 1 win=0
         host send 1 100
         silence
         time 1100
         uplink A 0 1
         guest A 1 1 win=0
         silence
         time 2100
         uplink A 0 1
         guest A 1 1 win=50
         uplink A 1 1 len=50
         guest A 1 51 win=5000
         uplink A 51 1 len=50",
    );
}

#[test]
fn reset_beside_expected_sequence_is_challenged() {
    let fixture = established(
        "guest R 500 0
         uplink A 1 1
         guest S 700 0
         uplink A 1 1
         guest R 1 0
         silence
         host broken",
    );
    assert_eq!(fixture.uplink.tcp_flows(), 0);
}

#[test]
fn reset_from_host_follows_pending_data() {
    let fixture = established(
        "host send 1 20
         host reset
         uplink A 1 1 len=20
         uplink RA 21 1",
    );
    assert_eq!(fixture.uplink.tcp_flows(), 0);
}

#[test]
fn silent_guest_is_probed_and_then_reset() {
    let mut fixture = established("time 3600000\n silence\n time 3601000\n uplink A 0 1");
    fixture.run("guest A 1 1\n time 7201000\n uplink A 0 1");
    for _ in 0..8 {
        fixture.run("time 75000\n uplink A 0 1");
    }
    fixture.run("time 75000\n uplink RA 1 1\n host broken");
    assert_eq!(fixture.uplink.tcp_flows(), 0);
}

#[test]
fn half_closed_guest_is_probed_and_forgotten_as_the_hosts_kernel_does() {
    let fixture = established(
        "guest FA 1 1
         host eof
         time 1
         uplink A 1 2
         time 59000
         silence
         time 3000
         uplink A 0 2
         guest A 2 1
         time 62000
         uplink A 0 2
         guest R 2 0
         silence
         host eof",
    );
    assert_eq!(fixture.uplink.tcp_flows(), 0);
}

#[test]
fn unanswered_syn_ack_is_repeated_and_expires() {
    let mut fixture = Fixture::new();
    fixture.run("guest S 0 0\n uplink SA 0 1\n guest S 0 0\n uplink SA 0 1");
    for _ in 0..6 {
        fixture.run("time 70000");
        fixture.settle();
    }
    assert_eq!(fixture.uplink.tcp_flows(), 0);
}

/// Script for a stream that ends: the segments to a guest that acknowledges one frame at a time while others
/// are in flight.
#[test]
fn stream_ends_for_lagging_guest_without_peek_offset() {
    const LEN: u32 = 2 << 20;
    let mut fixture = Fixture::of(RealHost::disable_peek_offset);
    fixture.scale = 7;
    fixture.run(ESTABLISHED);
    let mut remote = fixture.remote.take().unwrap();
    let writer = std::thread::spawn(move || {
        remote.write_all(&(1..=LEN).map(byte_at).collect::<Vec<_>>()).unwrap();
        remote.shutdown(std::net::Shutdown::Write).unwrap();
        remote
    });
    let (mut came, mut tries) = (0, 0);
    let has_ended = loop {
        if fixture.wire.frames.is_empty() {
            fixture.settle();
            tries += 1;
            if tries > 500 {
                break false;
            }
            continue;
        }
        tries = 0;
        let frame = fixture.wire.frames.remove(0);
        let layers = Layers::parse(&frame, u32::try_from(frame.len()).unwrap()).unwrap();
        let segment = Segment::parse(frame[34..].first_chunk().unwrap(), layers.payload_len());
        let offset = segment.seq.0.wrapping_sub(fixture.isn);
        assert_eq!(offset, came + 1, "in order, and once");
        let payload = &frame[usize::from(layers.header_len())..];
        assert!(payload.iter().zip(offset..).all(|(&byte, offset)| byte == byte_at(offset)));
        came += segment.len;
        if segment.has(1) {
            break true;
        }
        fixture.guest(16, 1, came + 1, 60_000, 0);
        fixture.uplink.output(&mut fixture.wire, fixture.now);
    };
    assert!(has_ended, "of {LEN} bytes {came} came, and then nothing");
    assert_eq!(came, LEN);
    drop(writer.join().unwrap());
}
