#![forbid(unsafe_code)]
#![expect(clippy::unwrap_used, reason = "a test: its panic is the report")]
//! Peers with small receive windows: a guest that keeps to its window sends each byte once, whatever the socket refuses.
//! The guest is a script, the clock is simulated, the sockets are real.

use std::io::Read;
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use ringfence_frame::Batch;
use ringfence_offload::{Checksum, Layers, OffloadMeta};
use ringfence_uplink::emit::Ends;
use ringfence_uplink::host::real::RealHost;
use ringfence_uplink::tcp::segment::{Header, Ports, Segment, SynOptions};
use ringfence_uplink::tcp::seq::Seq;
use ringfence_uplink::testing::Wire;
use ringfence_uplink::{Config, Uplink, UplinkCounters};

const GUEST: [u8; 4] = [10, 0, 0, 2];
const ROUTER: [u8; 4] = [10, 0, 0, 1];
const FIN: u8 = 1;
const SYN: u8 = 2;
const ACK: u8 = 16;
/// Window scale of the uplink.
const SCALE: u8 = 8;
/// Number of rounds without progress after which a test gives up.
const PATIENCE: u32 = 20_000;

/// Guest with one connection. Sequence numbers count from its SYN.
struct Guest {
    uplink: Uplink,
    counters: Arc<UplinkCounters>,
    wire: Wire,
    now: Duration,
    port: u16,
    /// Next sequence number of the uplink.
    heard: u32,
    acked: u32,
    edge: u32,
    sent: u32,
    /// Number of acknowledgements in a row that changed nothing.
    duplicates: u32,
}

impl Guest {
    /// Connects to a peer with a small receive buffer. Returns its end of the connection, too.
    fn new(change: impl FnOnce(&mut Config)) -> (Guest, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        rustix::net::sockopt::set_socket_recv_buffer_size(&listener, 4096).unwrap();
        let counters = Arc::<UplinkCounters>::default();
        let mut config = Config::default();
        config.access.host_loopback.push(ROUTER.into());
        change(&mut config);
        let host = Box::new(RealHost::new(Arc::clone(&counters)).unwrap());
        let mut guest = Guest {
            uplink: Uplink::new(config, host, Arc::clone(&counters)),
            counters,
            wire: Wire::new(4),
            now: Duration::from_secs(1000),
            port: listener.local_addr().unwrap().port(),
            heard: 0,
            acked: 0,
            edge: 0,
            sent: 0,
            duplicates: 0,
        };
        guest.send(SYN, 0);
        guest.until(|guest| guest.acked == 1);
        guest.send(ACK, 0);
        (guest, listener.accept().unwrap().0)
    }

    fn send(&mut self, flags: u8, len: u32) {
        let len = usize::try_from(len).unwrap();
        let ends = Ends {
            from_mac: [2, 0, 0, 0, 0, 2],
            to_mac: self.uplink.config().mac,
            from: GUEST.into(),
            to: ROUTER.into(),
        };
        let options = if flags & SYN != 0 { &SynOptions::write(1460, Some(0))[..] } else { &[] };
        let mut frame = vec![0; 34 + 20 + options.len() + len];
        ends.write(&mut frame, 6, 20 + options.len() + len, 1).unwrap();
        let header = Header {
            ports: Ports { from: 4000, to: self.port },
            seq: Seq(self.sent),
            acknowledged: Seq(self.heard),
            flags,
            window: 60_000,
            urgent: 0,
        };
        let at = 34 + header.write(options, 0, &mut frame[34..]).unwrap();
        for (byte, offset) in frame[at..].iter_mut().zip(self.sent..) {
            *byte = byte_at(offset);
        }
        self.sent += u32::try_from(len).unwrap() + u32::from(flags & (SYN | FIN) != 0);
        let mut batch = Batch::with_capacity(1, 1 << 16);
        let offset = batch.reserve(frame.len()).unwrap();
        batch.scratch_mut(offset..offset + frame.len()).unwrap().copy_from_slice(&frame);
        let meta = OffloadMeta { checksum: Checksum::Verified, gso: None };
        let index = batch.push_contiguous(offset, frame.len(), meta).unwrap();
        self.uplink.input(&batch, &[index], self.now);
    }

    /// Runs a round, and reads what comes.
    fn round(&mut self) {
        self.uplink.poll_host(self.now).unwrap();
        self.uplink.run_timers(self.now);
        while self.uplink.output(&mut self.wire, self.now) {}
        for frame in std::mem::take(&mut self.wire.frames) {
            let layers = Layers::parse(&frame, u32::try_from(frame.len()).unwrap()).unwrap();
            let segment = Segment::parse(frame[34..].first_chunk().unwrap(), layers.payload_len());
            let scale = if segment.has(SYN) { 0 } else { SCALE };
            let edge = segment.acknowledged.0 + (u32::from(segment.window) << scale);
            let is_duplicate = segment.acknowledged.0 == self.acked && edge <= self.edge;
            self.duplicates = if is_duplicate { self.duplicates + 1 } else { 0 };
            self.heard = segment.end().0;
            self.acked = self.acked.max(segment.acknowledged.0);
            self.edge = self.edge.max(edge);
            let held = self.held();
            assert!(held <= self.uplink.config().tcp.backlog_max as u64, "{held} bytes are kept");
        }
    }

    /// Returns the number of bytes that wait for room in the socket.
    fn held(&self) -> u64 {
        self.counters.tcp_backlog_in.get() - self.counters.tcp_backlog_out.get()
    }

    /// Runs rounds until something holds.
    fn until(&mut self, holds: impl Fn(&Guest) -> bool) {
        let mut idle = 0;
        let mut before = 0;
        while !holds(self) {
            self.round();
            idle = if self.acked == before { idle + 1 } else { 0 };
            before = self.acked;
            assert!(idle < PATIENCE, "sent {}, acknowledged {}", self.sent, self.acked);
            std::thread::sleep(Duration::from_micros(100));
        }
    }

    /// Sends up to `end`, as far as the window permits. After three duplicate acknowledgements it sends again what was not
    /// acknowledged.
    fn fill(&mut self, end: u32) {
        if self.duplicates >= 3 && self.acked < self.sent {
            self.sent = self.acked;
            self.duplicates = 0;
        }
        while self.sent < end.min(self.edge) {
            let len = (end.min(self.edge) - self.sent).min(30_000);
            self.send(ACK, len);
        }
    }

    /// Sends until the window is used up, while the peer does not read.
    fn use_up_window(&mut self) {
        while self.sent < self.edge {
            self.fill(self.edge);
            (0..20).for_each(|_| self.round());
        }
    }

    /// Sends up to `end`.
    fn send_all(&mut self, end: u32) {
        let mut idle = 0;
        while self.acked < end {
            let before = self.acked;
            self.fill(end);
            self.round();
            idle = if self.acked == before { idle + 1 } else { 0 };
            assert!(idle < PATIENCE, "sent {}, acknowledged {}", self.sent, self.acked);
            if idle > 0 {
                std::thread::sleep(Duration::from_micros(100));
            }
        }
    }
}

fn byte_at(offset: u32) -> u8 {
    offset.wrapping_mul(31).to_le_bytes()[0] ^ offset.to_le_bytes()[1]
}

/// Reads a stream to its end on a thread, and returns the number of bytes. Checks each.
fn reader(mut peer: TcpStream) -> JoinHandle<u32> {
    std::thread::spawn(move || {
        let mut bytes = vec![0; 1 << 16];
        let mut at = 1;
        loop {
            let n = peer.read(&mut bytes).unwrap();
            if n == 0 {
                return at - 1;
            }
            let is_right =
                bytes[..n].iter().zip(at..).all(|(byte, offset)| *byte == byte_at(offset));
            assert!(is_right, "behind {at}");
            at += u32::try_from(n).unwrap();
        }
    })
}

#[test]
fn refused_payload_waits_for_room_and_is_sent_once() {
    let (mut guest, peer) = Guest::new(|_| {});
    guest.use_up_window();
    assert!(guest.held() > 0, "the socket has taken the whole window");
    assert_eq!(guest.acked, guest.sent);
    let peer = reader(peer);
    let end = guest.sent + 1_000_000;
    guest.send_all(end);
    guest.until(|guest| guest.held() == 0);
    guest.send(FIN | ACK, 0);
    guest.until(|guest| guest.acked == end + 1);
    assert_eq!(peer.join().unwrap(), end - 1);
}

#[test]
fn fin_behind_refused_payload_is_acknowledged_after_it() {
    let (mut guest, peer) = Guest::new(|_| {});
    guest.use_up_window();
    guest.send(FIN | ACK, 0);
    let fin = guest.sent;
    for _ in 0..20 {
        guest.round();
    }
    assert!(guest.held() > 0);
    assert_eq!(guest.acked, fin - 1);
    let peer = reader(peer);
    guest.until(|guest| guest.acked == fin);
    assert_eq!((guest.held(), peer.join().unwrap()), (0, fin - 2));
}

#[test]
fn payload_beyond_the_limit_of_the_backlog_is_asked_for_once_there_is_room() {
    let (mut guest, peer) = Guest::new(|config| config.tcp.backlog_max = 10_000);
    guest.use_up_window();
    assert_eq!(guest.held(), 10_000);
    assert!(guest.acked < guest.sent);
    let peer = reader(peer);
    let end = guest.sent + 1_000_000;
    guest.send_all(end);
    guest.send(FIN | ACK, 0);
    guest.until(|guest| guest.acked == end + 1);
    assert_eq!(peer.join().unwrap(), end - 1);
}

#[test]
fn connection_that_ends_leaves_no_backlog() {
    const RST: u8 = 4;
    let (mut guest, peer) = Guest::new(|_| {});
    guest.use_up_window();
    assert!(guest.held() > 0);
    guest.send(RST, 0);
    guest.round();
    assert_eq!((guest.held(), guest.uplink.tcp_flows()), (0, 0));
    drop(peer);
}

#[test]
fn fin_after_that_of_the_server_closes_the_socket_without_a_shutdown() {
    let (mut guest, mut peer) = Guest::new(|_| ());
    let open = guest.heard;
    peer.shutdown(std::net::Shutdown::Write).unwrap();
    guest.until(|guest| guest.heard == open.wrapping_add(1));
    let before = guest.counters.syscalls.get();
    guest.send(FIN | ACK, 0);
    assert_eq!(guest.counters.syscalls.get(), before);
    guest.round();
    assert_eq!(peer.read(&mut [0]).unwrap(), 0);
}
