//! TCP through an uplink whose host has a bad way to the outside: one that loses packets, brings them twice,
//! late and in another order, and changes its MTU. What arrives is what was sent, by its hash.
//!
//! Guest and host are one network namespace, the outside is another. `10.9.0.3`, which leads to the uplink,
//! stands for the server outside.

#![allow(clippy::unwrap_used, reason = "a test's panic is its report")]

mod support;

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use ringfence_frame::tap::TapPort;
use ringfence_frame::{Batch, Port};
use ringfence_offload::OffloadMeta;
use ringfence_platform::Counters;
use ringfence_sys::clock::Clock;
use ringfence_sys::namespaces::{self, Fresh};
use ringfence_sys::tap::{Tap, TapOffloads};
use ringfence_uplink::host::real::RealHost;
use ringfence_uplink::link::tap::TapLink;
use ringfence_uplink::link::vhost_net::frames::FrameShape;
use ringfence_uplink::runner::{Ended, Runner};
use ringfence_uplink::{Access, Config, Uplink, UplinkCounters};
use sha2::{Digest, Sha256};

use support::{in_namespaces, ip};

/// How long anything may take, on a machine that does other things as well.
const LIMIT: Duration = Duration::from_secs(120);

/// What becomes of frames, in hundredths of them.
#[derive(Clone, Copy)]
struct Weather {
    lost: u64,
    twice: u64,
    /// Later than those behind them.
    late: u64,
    /// What each takes.
    delay: Duration,
}

const STORM: Weather = Weather { lost: 5, twice: 3, late: 5, delay: Duration::from_millis(1) };

/// Frames under way in one direction.
struct Line {
    weather: Weather,
    /// When each arrives.
    frames: Vec<(Duration, Vec<u8>, OffloadMeta)>,
    seed: u64,
    lost: u64,
}

impl Line {
    fn new(weather: Weather, seed: u64) -> Line {
        Line { weather, frames: Vec::new(), seed, lost: 0 }
    }

    /// The next of numbers that look like chance: xorshift.
    fn draw(&mut self) -> u64 {
        self.seed ^= self.seed << 13;
        self.seed ^= self.seed >> 7;
        self.seed ^= self.seed << 17;
        self.seed
    }

    fn put(&mut self, now: Duration, bytes: &[u8], meta: OffloadMeta) {
        let Weather { lost, twice, late, delay } = self.weather;
        if self.draw() % 100 < lost {
            self.lost += 1;
            return;
        }
        let copies = if self.draw() % 100 < twice { 2 } else { 1 };
        for _ in 0..copies {
            let more = if self.draw() % 100 < late { 3 * delay } else { Duration::ZERO };
            self.frames.push((now + delay + more, bytes.to_vec(), meta));
        }
    }

    /// The first one that has arrived.
    fn next(&mut self, now: Duration) -> Option<(Vec<u8>, OffloadMeta)> {
        let at = self.frames.iter().position(|(due, ..)| *due <= now)?;
        let (_, bytes, meta) = self.frames.remove(at);
        Some((bytes, meta))
    }
}

/// Carries frames between two interfaces, through bad weather, until `stop` is closed.
fn carry(mut ends: [TapPort; 2], weather: Weather, stop: &UnixStream) -> u64 {
    let clock = Clock::default();
    let mut lines = [Line::new(weather, 0x5eed_0001), Line::new(weather, 0x5eed_0002)];
    let mut batch = Batch::default();
    stop.set_nonblocking(true).unwrap();
    while (&*stop).read(&mut [0]).is_err() {
        let now = clock.now();
        for (from, line) in ends.iter_mut().zip(&mut lines) {
            batch.clear();
            from.receive(&mut batch, 64).unwrap();
            for frame in batch.iter() {
                let mut bytes = vec![0; frame.len()];
                frame.copy_to(&mut bytes);
                line.put(now, &bytes, frame.meta());
            }
        }
        for (to, line) in ends.iter_mut().rev().zip(&mut lines) {
            while let Some((bytes, meta)) = line.next(now) {
                batch.clear();
                let offset = batch.reserve(bytes.len()).unwrap();
                batch.scratch_mut(offset..offset + bytes.len()).unwrap().copy_from_slice(&bytes);
                let index = batch.push_contiguous(offset, bytes.len(), meta).unwrap();
                to.transmit(&batch, &[index]).unwrap();
            }
        }
        std::thread::sleep(Duration::from_micros(200));
    }
    lines.iter().map(|line| line.lost).sum()
}

/// A TAP of an Ethernet's packets, and an address.
fn interface(name: &str, address: &str) -> TapPort {
    let mut tap = Tap::create(name).unwrap();
    tap.limit_offloads(TapOffloads::default()).unwrap();
    ip(&format!("address add {address}/24 dev {name}"));
    ip(&format!("link set {name} up"));
    TapPort::new(tap.fd, tap.offloads, 1500, Arc::new(Counters::default()))
}

/// A server's socket, and the interface by which it is reached, in a network namespace of their own.
fn outside() -> (TcpListener, TapPort) {
    let made = std::thread::spawn(|| {
        namespaces::unshare(Fresh::MountNetIpcUts).unwrap();
        let interface = interface("out0", OUTSIDE);
        (TcpListener::bind((OUTSIDE, PORT)).unwrap(), interface)
    });
    made.join().unwrap()
}

const HOST: &str = "10.8.0.1";
const OUTSIDE: &str = "10.8.0.2";
/// Of name servers: for those alone an address of the guest's can stand for one of others.
const PORT: u16 = 53;

/// An uplink and bad weather between its host and the outside, until this is dropped.
struct Running {
    stop: Option<(UnixStream, UnixStream)>,
    uplink: Option<JoinHandle<Ended>>,
    weather: Option<JoinHandle<u64>>,
}

impl Running {
    fn start(weather: Weather, mtu: u16) -> (Running, TcpListener) {
        ip("link set lo up");
        let (server, out) = outside();
        let wan = interface("wan0", HOST);
        let tap = Tap::create("rf0").unwrap();
        ip("address add 10.9.0.1/24 dev rf0");
        ip(&format!("link set rf0 mtu {mtu} up"));
        ip("neighbour add 10.9.0.3 lladdr 52:46:00:00:00:01 dev rf0");
        let resolvers = vec![([10, 9, 0, 3].into(), OUTSIDE.parse().unwrap())];
        let access = Access { resolvers, ..Access::default() };
        let config = Config { mtu, access, ..Config::default() };
        let counters = Arc::<UplinkCounters>::default();
        let host = RealHost::new(Arc::clone(&counters)).unwrap();
        let uplink = Uplink::new(config, Box::new(host), counters);
        let system = Arc::new(Counters::default());
        let link = TapLink::new(tap.fd, tap.offloads, mtu, FrameShape::default(), system).unwrap();
        let runner = Runner::new(uplink, link, Clock::default(), Duration::ZERO);
        let (one, ended_one) = UnixStream::pair().unwrap();
        let (other, ended_other) = UnixStream::pair().unwrap();
        let running = Running {
            stop: Some((one, other)),
            uplink: Some(std::thread::spawn(move || runner.run(ended_one))),
            weather: Some(std::thread::spawn(move || carry([wan, out], weather, &ended_other))),
        };
        (running, server)
    }

    /// Ends it; how many frames were lost.
    fn end(mut self) -> u64 {
        drop(self.stop.take());
        let ended = self.uplink.take().unwrap().join().unwrap();
        assert!(matches!(ended, Ended::Stopped), "{ended}");
        self.weather.take().unwrap().join().unwrap()
    }
}

/// Bytes that differ from stream to stream.
fn noise(len: usize, seed: u64) -> Vec<u8> {
    let mut line = Line::new(STORM, seed);
    (0..len).map(|_| line.draw().to_le_bytes()[3]).collect()
}

/// Sends all of `bytes` and the end, while it hears the other end's; the hash of those.
fn exchange(stream: &TcpStream, bytes: &[u8]) -> Vec<u8> {
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    stream.set_write_timeout(Some(LIMIT)).unwrap();
    std::thread::scope(|scope| {
        let heard = scope.spawn(|| {
            let (mut digest, mut buffer) = (Sha256::new(), vec![0; 1 << 16]);
            loop {
                match (&*stream).read(&mut buffer).unwrap() {
                    0 => return digest.finalize().to_vec(),
                    n => digest.update(&buffer[..n]),
                }
            }
        });
        (&*stream).write_all(bytes).unwrap();
        stream.shutdown(Shutdown::Write).unwrap();
        heard.join().unwrap()
    })
}

/// As many connections at a time, each with `len` bytes both ways.
fn exchange_by(server: TcpListener, streams: u64, len: usize) {
    let to = SocketAddr::from(([10, 9, 0, 3], PORT));
    let serving = std::thread::spawn(move || {
        let one = |seed| {
            let (stream, _) = server.accept().unwrap();
            std::thread::spawn(move || exchange(&stream, &noise(len, 1000 + seed)))
        };
        let threads: Vec<_> = (0..streams).map(one).collect();
        let mut heard: Vec<_> = threads.into_iter().map(|one| one.join().unwrap()).collect();
        heard.sort();
        heard
    });
    let client = |seed| {
        std::thread::spawn(move || {
            exchange(&TcpStream::connect_timeout(&to, LIMIT).unwrap(), &noise(len, 1 + seed))
        })
    };
    let clients: Vec<_> = (0..streams).map(client).collect();
    let mut heard: Vec<_> = clients.into_iter().map(|one| one.join().unwrap()).collect();
    heard.sort();
    let hashes = |base: u64| {
        let hash = |seed| Sha256::digest(noise(len, base + seed)).to_vec();
        let mut all: Vec<_> = (0..streams).map(hash).collect();
        all.sort();
        all
    };
    assert!(heard == hashes(1000), "what the guest heard is not what was sent");
    assert!(serving.join().unwrap() == hashes(1), "what the server heard is not what was sent");
}

#[test]
fn tcp_arrives_undamaged_where_frames_are_lost_late_and_twice() {
    in_namespaces("tcp_arrives_undamaged_where_frames_are_lost_late_and_twice", || {
        let (running, server) = Running::start(STORM, 65520);
        exchange_by(server, 4, 1_000_000);
        assert!(running.end() > 100, "the weather was fine");
    });
}

#[test]
fn tcp_arrives_undamaged_while_the_mtu_changes() {
    in_namespaces("tcp_arrives_undamaged_while_the_mtu_changes", || {
        let (running, server) = Running::start(Weather { lost: 1, ..STORM }, 1500);
        let (done, is_done) = std::sync::mpsc::channel::<()>();
        let changing = std::thread::spawn(move || {
            let mut changes = 0;
            for mtu in [600, 1500, 1400, 1000, 1500].into_iter().cycle() {
                let wait = is_done.recv_timeout(Duration::from_millis(30));
                if wait != Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
                    break;
                }
                for interface in ["wan0", "rf0"] {
                    ip(&format!("link set {interface} mtu {mtu}"));
                }
                changes += 1;
            }
            changes
        });
        exchange_by(server, 3, 1_000_000);
        drop(done);
        assert!(changing.join().unwrap() > 3, "it was over before anything changed");
        running.end();
    });
}
