#![forbid(unsafe_code)]
#![expect(clippy::unwrap_used, reason = "a test: its panic is the report")]
//! The state machine of TCP by scripts: segments in, segments out, a clock that the script moves on, and
//! real sockets on the host's side.
//!
//! A line of a script is what one side does, or what is expected of the uplink:
//!
//! * `guest FLAGS SEQ ACK [win=N] [len=N]`: a segment of the guest. Flags are letters (S F R P A); both
//!   numbers count from the two SYNs.
//! * `uplink FLAGS SEQ ACK [len=N]`: the next segment to the guest, P not looked at.
//! * `silence`: there is none.
//! * `host accept | send PLACE N | read N | shut | close | reset | eof | broken`: the other end.
//! * `time N`: milliseconds go by.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use ringfence_frame::Batch;
use ringfence_offload::{Checksum, Layers, OffloadMeta};
use ringfence_uplink::emit::Ends;
use ringfence_uplink::host::real::RealHost;
use ringfence_uplink::share::Handed;
use ringfence_uplink::tcp::segment::{Header, Segment, SynOptions};
use ringfence_uplink::tcp::seq::Seq;
use ringfence_uplink::testing::Wire;
use ringfence_uplink::{Config, Uplink, UplinkCounters};

const GUEST: [u8; 4] = [10, 0, 0, 2];
const ROUTER: [u8; 4] = [10, 0, 0, 1];
const GUEST_ISN: u32 = 0xffff_fff0;
const FLAGS: [(char, u8); 5] = [('F', 1), ('S', 2), ('R', 4), ('P', 8), ('A', 16)];

struct World {
    uplink: Uplink,
    wire: Wire,
    now: Duration,
    listener: TcpListener,
    /// The port that the guest calls, if it is another one.
    calls: Option<u16>,
    far: Option<TcpStream>,
    /// Our initial sequence number, once it was seen.
    isn: u32,
    /// Bytes sent by each side, for their contents.
    heard: Vec<u8>,
    /// By how many bits the guest's windows are shifted.
    scale: u8,
}

impl World {
    fn new() -> World {
        World::of(|_| {})
    }

    /// A world whose host is changed before it is used.
    fn of(change: impl FnOnce(&mut RealHost)) -> World {
        let counters = Arc::<UplinkCounters>::default();
        let mut config = Config { mtu: 1500, ..Config::default() };
        config.access.host_loopback.push(ROUTER.into());
        config.guest.mac = Some([2, 0, 0, 0, 0, 2]);
        let mut host = RealHost::new(Arc::clone(&counters)).unwrap();
        change(&mut host);
        World {
            uplink: Uplink::new(config, Box::new(host), counters),
            wire: Wire::new(4),
            now: Duration::from_secs(1000),
            listener: TcpListener::bind("127.0.0.1:0").unwrap(),
            calls: None,
            far: None,
            isn: 0,
            heard: Vec::new(),
            scale: 0,
        }
    }

    fn port(&self) -> u16 {
        self.calls.unwrap_or_else(|| self.listener.local_addr().unwrap().port())
    }

    /// Turns until nothing comes any more: the host's kernel may take a moment.
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
            ports: (4000, self.port()),
            seq: Seq(GUEST_ISN) + seq,
            acknowledged: Seq(self.isn) + ack,
            flags,
            window,
            urgent: 0,
        };
        let at = 34 + header.write(options, 0, &mut frame[34..]).unwrap();
        for (byte, place) in frame[at..].iter_mut().zip(seq..) {
            *byte = octet_at(place);
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
        let right = payload.iter().zip(seq..).all(|(&byte, place)| byte == octet_at(place));
        assert!(right, "{line}: the bytes are others");
    }

    fn host(&mut self, words: &[&str], line: &str) {
        match words {
            ["accept"] => {
                let far = self.listener.accept().unwrap().0;
                far.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
                self.far = Some(far);
            }
            ["send", from, n] => {
                let from: u32 = from.parse().unwrap();
                let bytes: Vec<u8> =
                    (from..from + n.parse::<u32>().unwrap()).map(octet_at).collect();
                self.far.as_mut().unwrap().write_all(&bytes).unwrap();
            }
            ["read", n] => {
                let mut bytes = vec![0; n.parse().unwrap()];
                self.far.as_mut().unwrap().read_exact(&mut bytes).unwrap();
                let from = u32::try_from(self.heard.len()).unwrap() + 1;
                assert!(bytes.iter().zip(from..).all(|(&o, place)| o == octet_at(place)), "{line}");
                self.heard.extend(bytes);
            }
            ["shut"] => self.far.as_ref().unwrap().shutdown(std::net::Shutdown::Write).unwrap(),
            ["close"] => self.far = None,
            ["reset"] => {
                let far = self.far.take().unwrap();
                rustix::net::sockopt::set_socket_linger(&far, Some(Duration::ZERO)).unwrap();
            }
            ["eof"] => assert_eq!(self.far.as_mut().unwrap().read(&mut [0]).unwrap(), 0, "{line}"),
            ["broken"] => {
                let error = self.far.as_mut().unwrap().read(&mut [0]).unwrap_err();
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

/// What stands at each place of either stream.
fn octet_at(place: u32) -> u8 {
    place.wrapping_mul(31).to_le_bytes()[0] ^ place.to_le_bytes()[1]
}

/// The guest's half of a connection that stands.
const MADE: &str = "
    guest S 0 0
    uplink SA 0 1
    guest A 1 1
    host accept
";

fn made(rest: &str) -> World {
    let mut world = World::new();
    world.run(MADE);
    world.run(rest);
    world
}

#[test]
fn a_connection_is_made_used_and_closed_by_the_guest_first() {
    let world = made(
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
    assert_eq!(world.uplink.tcp_flows(), 0);
}

#[test]
fn who_closes_first_can_be_asked_for_the_last_acknowledgement() {
    let mut world = made(
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
    world.run("time 3000\n silence");
    assert_eq!(world.uplink.tcp_flows(), 0);
}

#[test]
fn a_client_that_has_its_port_again_is_not_refused() {
    let mut world = World::new();
    let client = SocketAddr::from((ROUTER, world.port()));
    for _ in 0..2 {
        let far = TcpStream::connect(world.listener.local_addr().unwrap()).unwrap();
        let file = world.listener.accept().unwrap().0.into();
        let guest = SocketAddr::from((GUEST, 4000));
        world.uplink.take_over(Handed::Connection { file, client, guest }, world.now);
        world.far = Some(far);
        world.run(
            "uplink S 0 16
             guest SA 0 1
             uplink A 1 1
             host shut
             uplink FA 1 1
             guest FA 1 2
             uplink A 2 2
             host eof",
        );
        assert_eq!(world.uplink.tcp_flows(), 1, "it waits to be asked for its last words");
    }
}

#[test]
fn a_refused_connection_is_refused() {
    let mut world = World::new();
    // A port that was just given back, so nobody listens at it.
    let closed = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    world.calls = Some(closed);
    world.run("guest S 0 0\n uplink RA 0 1");
    assert_eq!(world.uplink.tcp_flows(), 0);
}

#[test]
fn a_segment_of_no_connection_is_reset() {
    let mut world = World::new();
    world.run("guest A 5 77\n uplink R 77 16\n guest R 5 0\n silence");
}

#[test]
fn what_comes_out_of_order_is_asked_for() {
    made(
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
fn a_request_is_acknowledged_with_its_answer() {
    made(
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
fn what_is_not_answered_soon_is_acknowledged_alone_and_the_next_at_once() {
    made(
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
fn a_full_segment_is_acknowledged_at_once() {
    made(
        "guest A 1 1 len=1460
         uplink A 1 1461
         guest A 1461 1 len=800
         silence
         guest A 2261 1 len=800
         uplink A 1 3061",
    );
}

#[test]
fn a_segment_that_comes_again_is_acknowledged_at_once() {
    made(
        "guest A 1 1 len=100
         silence
         guest A 1 1 len=100
         uplink A 1 101
         guest A 1 1 len=150
         uplink A 1 151",
    );
}

#[test]
fn what_waits_to_be_acknowledged_is_not_forgotten_when_something_is_missing() {
    made(
        "guest A 1 1 len=100
         silence
         guest A 201 1 len=100
         uplink A 1 101
         time 1
         silence",
    );
}

#[test]
fn a_fin_is_acknowledged_with_the_other_one() {
    let world = made(
        "guest FA 1 1 len=10
         silence
         host read 10
         host eof
         host close
         uplink FA 1 12
         guest A 12 2
         silence",
    );
    assert_eq!(world.uplink.tcp_flows(), 0);
}

#[test]
fn what_was_lost_is_peeked_again() {
    made(
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
fn three_acknowledgements_that_say_the_same_repeat_the_first_octets() {
    made(
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
fn a_window_that_is_shut_is_asked_for() {
    made(
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
fn only_a_reset_at_its_exact_place_is_believed() {
    let world = made(
        "guest R 500 0
         uplink A 1 1
         guest S 700 0
         uplink A 1 1
         guest R 1 0
         silence
         host broken",
    );
    assert_eq!(world.uplink.tcp_flows(), 0);
}

#[test]
fn a_reset_of_the_other_end_comes_behind_what_it_had_sent() {
    let world = made(
        "host send 1 20
         host reset
         uplink A 1 1 len=20
         uplink RA 21 1",
    );
    assert_eq!(world.uplink.tcp_flows(), 0);
}

#[test]
fn a_guest_that_is_silent_for_long_is_asked_and_then_given_up() {
    let mut world = made("time 3600000\n silence\n time 3601000\n uplink A 0 1");
    world.run("guest A 1 1\n time 7201000\n uplink A 0 1");
    for _ in 0..8 {
        world.run("time 75000\n uplink A 0 1");
    }
    world.run("time 75000\n uplink RA 1 1\n host broken");
    assert_eq!(world.uplink.tcp_flows(), 0);
}

#[test]
fn a_syn_that_is_not_answered_is_answered_again_and_then_forgotten() {
    let mut world = World::new();
    world.run("guest S 0 0\n uplink SA 0 1\n guest S 0 0\n uplink SA 0 1");
    for _ in 0..6 {
        world.run("time 70000");
        world.settle();
    }
    assert_eq!(world.uplink.tcp_flows(), 0);
}

/// Of a stream that ends: what comes, by a guest that acknowledges one frame at a time while others are
/// under way.
#[test]
fn a_stream_ends_for_a_guest_that_lags_behind_where_the_kernel_remembers_no_peeks() {
    const LEN: u32 = 2 << 20;
    let mut world = World::of(RealHost::forget_peeks);
    world.scale = 7;
    world.run(MADE);
    let mut far = world.far.take().unwrap();
    let writer = std::thread::spawn(move || {
        far.write_all(&(1..=LEN).map(octet_at).collect::<Vec<_>>()).unwrap();
        far.shutdown(std::net::Shutdown::Write).unwrap();
        far
    });
    let (mut came, mut tries) = (0, 0);
    let has_ended = loop {
        if world.wire.frames.is_empty() {
            world.settle();
            tries += 1;
            if tries > 500 {
                break false;
            }
            continue;
        }
        tries = 0;
        let frame = world.wire.frames.remove(0);
        let layers = Layers::parse(&frame, u32::try_from(frame.len()).unwrap()).unwrap();
        let segment = Segment::parse(frame[34..].first_chunk().unwrap(), layers.payload_len());
        let place = segment.seq.0.wrapping_sub(world.isn);
        assert_eq!(place, came + 1, "in order, and once");
        let payload = &frame[usize::from(layers.header_len())..];
        assert!(payload.iter().zip(place..).all(|(&byte, place)| byte == octet_at(place)));
        came += segment.len;
        if segment.has(1) {
            break true;
        }
        world.guest(16, 1, came + 1, 60_000, 0);
        world.uplink.output(&mut world.wire, world.now);
    };
    assert!(has_ended, "of {LEN} bytes {came} came, and then nothing");
    assert_eq!(came, LEN);
    drop(writer.join().unwrap());
}
