//! TCP through an uplink whose host reaches the outside by an impaired network, which loses, duplicates, delays
//! and reorders packets, and changes its MTU, and through one whose link to the guest loses frames. Hashes show that all
//! data arrives unchanged.
//!
//! Guest and host are one network namespace, the outside is another. `10.9.0.3`, which leads to the uplink,
//! stands for the server outside.

#![allow(clippy::unwrap_used, reason = "a test's panic is its report")]

mod support;

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use ringfence_frame::tap::TapPort;
use ringfence_frame::{Batch, Fault, Port, PortCapabilities, PortCounters, Received, Transmitted};
use ringfence_link::frame_ring::FrameShape;
use ringfence_link::tap::TapLink;
use ringfence_offload::OffloadMeta;
use ringfence_platform::Counters;
use ringfence_sys::clock::Clock;
use ringfence_sys::namespaces::{self, Fresh};
use ringfence_sys::tap::{Tap, TapOffloads};
use ringfence_uplink::host::real::RealHost;
use ringfence_uplink::link::{Committed, GuestLink, Slots};
use ringfence_uplink::runner::{Runner, RunnerEnd};
use ringfence_uplink::{Access, Config, Uplink, UplinkCounters};

use sha2::{Digest, Sha256};

use support::{in_namespaces, ip};

/// Bound of every wait, long enough for a busy machine.
const LIMIT: Duration = Duration::from_secs(120);

/// Impairment of a network, in percent of its frames.
#[derive(Clone, Copy)]
struct Impairment {
    lost: u64,
    twice: u64,
    /// Percentage delayed so that later frames overtake.
    late: u64,
    /// Delay of every frame.
    delay: Duration,
}

const IMPAIRED: Impairment =
    Impairment { lost: 5, twice: 3, late: 5, delay: Duration::from_millis(1) };

/// Frames in flight in one direction.
struct LossyLine {
    impairment: Impairment,
    /// Arrival time, bytes and metadata of each frame.
    frames: Vec<(Duration, Vec<u8>, OffloadMeta)>,
    seed: u64,
    lost: u64,
}

impl LossyLine {
    fn new(impairment: Impairment, seed: u64) -> LossyLine {
        LossyLine { impairment, frames: Vec::new(), seed, lost: 0 }
    }

    /// Returns the next pseudo-random number (xorshift).
    fn draw(&mut self) -> u64 {
        self.seed ^= self.seed << 13;
        self.seed ^= self.seed >> 7;
        self.seed ^= self.seed << 17;
        self.seed
    }

    fn put(&mut self, now: Duration, bytes: &[u8], meta: OffloadMeta) {
        let Impairment { lost, twice, late, delay } = self.impairment;
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

    /// Removes the first frame whose arrival time has come.
    fn next(&mut self, now: Duration) -> Option<(Vec<u8>, OffloadMeta)> {
        let at = self.frames.iter().position(|(due, ..)| *due <= now)?;
        let (_, bytes, meta) = self.frames.remove(at);
        Some((bytes, meta))
    }
}

/// Carries frames between two interfaces over impaired lines until `stop` is closed. Returns the number lost.
fn carry(mut ends: [TapPort; 2], impairment: Impairment, stop: &UnixStream) -> u64 {
    let clock = Clock::default();
    let mut lines =
        [LossyLine::new(impairment, 0x5eed_0001), LossyLine::new(impairment, 0x5eed_0002)];
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

/// Creates a TAP interface without offloads, with an address.
fn interface(name: &str, address: &str) -> TapPort {
    let mut tap = Tap::create(name).unwrap();
    tap.limit_offloads(TapOffloads::default()).unwrap();
    ip(&format!("address add {address}/24 dev {name}"));
    ip(&format!("link set {name} up"));
    TapPort::new(tap.fd, tap.offloads, 1500, Arc::new(Counters::default()))
}

/// Creates a server socket and the interface that leads to it, in a network namespace of their own.
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
/// Port of name servers: the only one at which a stand-in address is reachable.
const PORT: u16 = 53;

/// Uplink and impaired network between its host and the outside, which run until this is dropped.
struct Running {
    stop: Option<(UnixStream, UnixStream)>,
    uplink: Option<JoinHandle<RunnerEnd>>,
    impairment: Option<JoinHandle<u64>>,
}

impl Running {
    fn start(impairment: Impairment, mtu: u16) -> (Running, TcpListener) {
        let (running, server, _) = Running::with_link(impairment, mtu, |link| link);
        (running, server)
    }

    /// Starts an uplink whose link to the guest is that of `wrap`. Returns its counters, too.
    fn with_link<L: Port + GuestLink + Send + 'static>(
        impairment: Impairment,
        mtu: u16,
        wrap: impl FnOnce(TapLink) -> L,
    ) -> (Running, TcpListener, Arc<UplinkCounters>) {
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
        let uplink = Uplink::new(config, Box::new(host), Arc::clone(&counters));
        let system = Arc::new(Counters::default());
        let link = TapLink::new(tap.fd, tap.offloads, mtu, FrameShape::default(), system).unwrap();
        let runner = Runner::new(uplink, wrap(link), Clock::default(), Duration::ZERO);
        let (one, ended_one) = UnixStream::pair().unwrap();
        let (other, ended_other) = UnixStream::pair().unwrap();
        let running = Running {
            stop: Some((one, other)),
            uplink: Some(std::thread::spawn(move || runner.run(ended_one))),
            impairment: Some(std::thread::spawn(move || {
                carry([wan, out], impairment, &ended_other)
            })),
        };
        (running, server, counters)
    }

    /// Stops both threads. Returns the number of frames lost.
    fn end(mut self) -> u64 {
        drop(self.stop.take());
        let ended = self.uplink.take().unwrap().join().unwrap();
        assert!(matches!(ended, RunnerEnd::Stopped), "{ended}");
        self.impairment.take().unwrap().join().unwrap()
    }
}

/// Link to the guest that loses the last frames of some commits, in bursts.
struct LossyLink {
    link: TapLink,
    seed: LossyLine,
}

impl GuestLink for LossyLink {
    fn capabilities(&self) -> PortCapabilities {
        GuestLink::capabilities(&self.link)
    }

    fn reserve<'a>(&'a mut self, count: usize, len: usize, slots: &mut Slots<'a>) {
        self.link.reserve(count, len, slots);
    }

    fn commit(&mut self, frames: &[Committed]) {
        let lost = if self.seed.draw() % 100 < 10 { frames.len().div_ceil(2) } else { 0 };
        self.seed.lost += lost as u64;
        self.link.commit(&frames[..frames.len() - lost]);
    }

    fn is_polled_by_calls(&self) -> bool {
        self.link.is_polled_by_calls()
    }

    fn flush(&mut self) {
        GuestLink::flush(&mut self.link);
    }
}

impl Port for LossyLink {
    fn receive(&mut self, batch: &mut Batch, budget: usize) -> Result<Received, Fault> {
        self.link.receive(batch, budget)
    }

    fn complete(&mut self) -> Result<(), Fault> {
        self.link.complete()
    }

    fn transmit(&mut self, batch: &Batch, frames: &[u32]) -> Result<Transmitted, Fault> {
        self.link.transmit(batch, frames)
    }

    fn flush(&mut self) -> Result<(), Fault> {
        Port::flush(&mut self.link)
    }

    fn arm(&mut self) -> Result<bool, Fault> {
        self.link.arm()
    }

    fn wait_fds(&self) -> Vec<BorrowedFd<'_>> {
        self.link.wait_fds()
    }

    fn capabilities(&self) -> PortCapabilities {
        Port::capabilities(&self.link)
    }

    fn counters(&self) -> &Arc<PortCounters> {
        self.link.counters()
    }
}

/// Generates bytes that differ from seed to seed.
fn noise(len: usize, seed: u64) -> Vec<u8> {
    let mut line = LossyLine::new(IMPAIRED, seed);
    (0..len).map(|_| line.draw().to_le_bytes()[3]).collect()
}

/// Sends `bytes` and the end of the stream while it receives. Returns the hash of the received bytes.
fn exchange(stream: &TcpStream, bytes: &[u8]) -> Vec<u8> {
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    stream.set_write_timeout(Some(LIMIT)).unwrap();
    std::thread::scope(|scope| {
        let received = scope.spawn(|| {
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
        received.join().unwrap()
    })
}

/// Opens `streams` connections at a time and exchanges `len` bytes in both directions on each.
fn exchange_by(server: TcpListener, streams: u64, len: usize) {
    let to = SocketAddr::from(([10, 9, 0, 3], PORT));
    let serving = std::thread::spawn(move || {
        let one = |seed| {
            let (stream, _) = server.accept().unwrap();
            std::thread::spawn(move || exchange(&stream, &noise(len, 1000 + seed)))
        };
        let threads: Vec<_> = (0..streams).map(one).collect();
        let mut received: Vec<_> = threads.into_iter().map(|one| one.join().unwrap()).collect();
        received.sort();
        received
    });
    let client = |seed| {
        std::thread::spawn(move || {
            exchange(&TcpStream::connect_timeout(&to, LIMIT).unwrap(), &noise(len, 1 + seed))
        })
    };
    let clients: Vec<_> = (0..streams).map(client).collect();
    let mut received: Vec<_> = clients.into_iter().map(|one| one.join().unwrap()).collect();
    received.sort();
    let hashes = |base: u64| {
        let hash = |seed| Sha256::digest(noise(len, base + seed)).to_vec();
        let mut all: Vec<_> = (0..streams).map(hash).collect();
        all.sort();
        all
    };
    assert!(received == hashes(1000), "data to the guest was changed");
    assert!(serving.join().unwrap() == hashes(1), "data to the server was changed");
}

#[test]
fn tcp_over_lossy_network_arrives_unchanged() {
    in_namespaces("tcp_over_lossy_network_arrives_unchanged", || {
        let (running, server) = Running::start(IMPAIRED, 65520);
        exchange_by(server, 4, 1_000_000);
        assert!(running.end() > 100, "no frames were lost");
    });
}

#[test]
fn tcp_arrives_unchanged_while_mtu_changes() {
    in_namespaces("tcp_arrives_unchanged_while_mtu_changes", || {
        let (running, server) = Running::start(Impairment { lost: 1, ..IMPAIRED }, 1500);
        let (done, is_done) = std::sync::mpsc::channel::<()>();
        let changes = Arc::<AtomicUsize>::default();
        let counted = Arc::clone(&changes);
        let changing = std::thread::spawn(move || {
            for mtu in [600, 1500, 1400, 1000, 1500].into_iter().cycle() {
                let wait = is_done.recv_timeout(Duration::from_millis(30));
                if wait != Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
                    break;
                }
                for interface in ["wan0", "rf0"] {
                    ip(&format!("link set {interface} mtu {mtu}"));
                }
                counted.fetch_add(1, Ordering::Relaxed);
            }
        });
        // A busy machine changes it less often while one transfer lasts.
        while changes.load(Ordering::Relaxed) < 4 {
            exchange_by(server.try_clone().unwrap(), 3, 1_000_000);
        }
        drop(done);
        changing.join().unwrap();
        running.end();
    });
}

/// The uplink offers no SACK. A lost frame is found by duplicate acknowledgements, the next one of the same burst a round
/// trip later (RFC 6582); a timeout is for the end of the data only.
#[test]
fn frames_lost_on_the_link_to_the_guest_are_sent_again_mostly_without_a_timeout() {
    let name = "frames_lost_on_the_link_to_the_guest_are_sent_again_mostly_without_a_timeout";
    in_namespaces(name, || {
        let unimpaired = Impairment { lost: 0, twice: 0, late: 0, delay: Duration::ZERO };
        let wrap = |link| LossyLink { link, seed: LossyLine::new(unimpaired, 0x5eed_0003) };
        let (running, server, counters) = Running::with_link(unimpaired, 1500, wrap);
        exchange_by(server, 4, 6_000_000);
        running.end();
        let (again, timeouts) = (counters.tcp_retransmitted.get(), counters.tcp_timeouts.get());
        println!("{again} segments were sent again, {timeouts} timeouts");
        assert!(again > 10, "too little was lost: {again}");
        assert!(timeouts * 2 < again, "{timeouts} timeouts for {again} retransmissions");
    });
}
