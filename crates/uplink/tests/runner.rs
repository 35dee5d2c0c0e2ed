#![forbid(unsafe_code)]
#![expect(clippy::unwrap_used, reason = "a test: its panic is the report")]
//! Runner on a link of which each look is a system call, as a TAP: one end of a pair of sockets.

use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ringfence_frame::{Batch, Fault, Port, PortCapabilities, PortCounters, Received, Transmitted};
use ringfence_offload::OffloadMeta;
use ringfence_sys::clock::Clock;
use ringfence_sys::counters::Counter;
use ringfence_uplink::host::real::RealHost;
use ringfence_uplink::link::{Committed, GuestLink, Slots};
use ringfence_uplink::runner::{Runner, RunnerEnd};
use ringfence_uplink::share::Share;
use ringfence_uplink::team::{self, Member};
use ringfence_uplink::{Config, Uplink, UplinkCounters};
use rustix::io::Errno;

const GUEST_MAC: [u8; 6] = [2, 0, 0, 0, 0, 2];
const GUEST: [u8; 4] = [10, 0, 0, 2];
const GATEWAY: [u8; 4] = [10, 0, 0, 1];
const WITHIN: Duration = Duration::from_secs(60);

/// Link whose frames are datagrams.
struct SocketLink {
    socket: UnixDatagram,
    buffers: Vec<Vec<u8>>,
    counters: Arc<PortCounters>,
    /// Reads that found no frame.
    empty_reads: Arc<Counter>,
    is_polled_by_calls: bool,
}

impl Port for SocketLink {
    fn receive(&mut self, batch: &mut Batch, budget: usize) -> Result<Received, Fault> {
        let mut received = Received::default();
        let mut frame = [0; 2000];
        while received.work < budget {
            let Ok(len) = self.socket.recv(&mut frame) else {
                self.empty_reads.add(1);
                break;
            };
            if len == 0 {
                return Err(Fault::Gone);
            }
            let offset = batch.reserve(len).unwrap();
            batch.scratch_mut(offset..offset + len).unwrap().copy_from_slice(&frame[..len]);
            batch.push_contiguous(offset, len, OffloadMeta::PLAIN).unwrap();
            received.work += 1;
            received.frames += 1;
        }
        Ok(received)
    }

    fn complete(&mut self) -> Result<(), Fault> {
        Ok(())
    }

    fn transmit(&mut self, _: &Batch, _: &[u32]) -> Result<Transmitted, Fault> {
        Ok(Transmitted::default())
    }

    fn arm(&mut self) -> Result<bool, Fault> {
        Ok(false)
    }

    fn wait_fds(&self) -> Vec<BorrowedFd<'_>> {
        vec![self.socket.as_fd()]
    }

    fn capabilities(&self) -> PortCapabilities {
        PortCapabilities::plain(1500)
    }

    fn counters(&self) -> &Arc<PortCounters> {
        &self.counters
    }
}

impl GuestLink for SocketLink {
    fn capabilities(&self) -> PortCapabilities {
        PortCapabilities::plain(1500)
    }

    fn reserve<'a>(&'a mut self, count: usize, len: usize, slots: &mut Slots<'a>) {
        self.buffers = vec![vec![0; len]; count.min(1)];
        slots.extend(self.buffers.iter_mut().map(Vec::as_mut_slice));
    }

    fn commit(&mut self, frames: &[Committed]) {
        for (buffer, frame) in self.buffers.iter().zip(frames) {
            self.socket.send(&buffer[..frame.len]).unwrap();
        }
    }

    fn is_polled_by_calls(&self) -> bool {
        self.is_polled_by_calls
    }
}

/// Returns an engine with the link of a socket, and the guest's end of it.
fn parts(is_polled_by_calls: bool, share: Share) -> (Uplink, SocketLink, UnixDatagram) {
    let (socket, guest) = UnixDatagram::pair().unwrap();
    socket.set_nonblocking(true).unwrap();
    guest.set_read_timeout(Some(WITHIN)).unwrap();
    let counters = Arc::<UplinkCounters>::default();
    let host = RealHost::new(Arc::clone(&counters)).unwrap();
    let mut config = Config { mtu: 1500, share, ..Config::default() };
    config.guest.own = vec![GATEWAY.into()];
    let uplink = Uplink::new(config, Box::new(host), counters);
    let link = SocketLink {
        socket,
        buffers: Vec::new(),
        counters: Arc::default(),
        empty_reads: Arc::default(),
        is_polled_by_calls,
    };
    (uplink, link, guest)
}

/// Sends an ARP request for the gateway.
fn send_request(guest: &UnixDatagram) {
    let mut frame = vec![0xFF; 6];
    frame.extend(GUEST_MAC);
    frame.extend([8, 6, 0, 1, 8, 0, 6, 4, 0, 1]);
    frame.extend(GUEST_MAC);
    frame.extend(GUEST);
    frame.extend([0; 6]);
    frame.extend(GATEWAY);
    guest.send(&frame).unwrap();
}

/// Running runner, and the guest's end of its link.
struct Running {
    guest: UnixDatagram,
    counters: Arc<UplinkCounters>,
    empty_reads: Arc<Counter>,
    stop: Option<UnixStream>,
    thread: JoinHandle<RunnerEnd>,
}

impl Running {
    fn start(is_polled_by_calls: bool, share: Share, member: Option<Member>) -> Running {
        Running::spinning(is_polled_by_calls, share, member, Duration::ZERO)
    }

    /// Starts a runner that busy-polls for at most `spin`.
    fn spinning(
        is_polled_by_calls: bool,
        share: Share,
        member: Option<Member>,
        spin: Duration,
    ) -> Running {
        let (uplink, link, guest) = parts(is_polled_by_calls, share);
        let (counters, empty_reads) =
            (Arc::clone(uplink.counters()), Arc::clone(&link.empty_reads));
        let (stop, stopped) = UnixStream::pair().unwrap();
        let thread = std::thread::spawn(move || {
            let mut runner = Runner::new(uplink, link, Clock::default(), spin);
            if let Some(member) = member {
                runner = runner.with_others(member);
            }
            runner.run(stopped)
        });
        Running { guest, counters, empty_reads, stop: Some(stop), thread }
    }

    /// Sends an ARP request, and waits for the answer.
    fn exchange(&self) {
        send_request(&self.guest);
        let mut answer = [0; 100];
        let len = self.guest.recv(&mut answer).unwrap();
        assert_eq!((len, answer[21]), (42, 2), "an ARP reply");
    }

    fn end(mut self) -> u64 {
        self.stop.take();
        assert!(matches!(self.thread.join().unwrap(), RunnerEnd::Stopped));
        self.empty_reads.get()
    }
}

#[test]
fn frames_that_come_one_by_one_are_read_mostly_without_a_read_that_finds_nothing() {
    const FRAMES: u64 = 200;
    let runner = Running::start(true, Share::default(), None);
    for _ in 0..FRAMES {
        runner.exchange();
    }
    assert_eq!(runner.counters.arp_answers.get(), FRAMES);
    // A frame that comes before the look doubles the budget; the read that finds nothing sets it to one again.
    let empty = runner.end();
    assert!(empty <= FRAMES / 2 + 2, "{empty} reads found nothing");
    // A link that needs no calls is read until it is empty.
    let runner = Running::start(false, Share::default(), None);
    for _ in 0..FRAMES {
        runner.exchange();
    }
    assert!(runner.end() >= FRAMES);
}

#[test]
fn runner_that_spins_looks_at_sockets_at_intervals() {
    for is_polled_by_calls in [true, false] {
        let spin = Duration::from_secs(1);
        let runner = Running::spinning(is_polled_by_calls, Share::default(), None, spin);
        // Each sleep that ends soon doubles the time of the spin.
        for _ in 0..40 {
            runner.exchange();
            std::thread::sleep(Duration::from_millis(1));
        }
        let (began, before) = (Instant::now(), runner.counters.syscalls.get());
        for _ in 0..40 {
            runner.exchange();
            std::thread::sleep(Duration::from_millis(1));
        }
        let (took, calls) = (began.elapsed(), runner.counters.syscalls.get() - before);
        // At most one look in 4 µs, and some around each frame. A slow computer makes fewer.
        let most = took.as_micros() / 4 + 40 * 40;
        assert!(u128::from(calls) <= most, "{calls} calls in {took:?}");
        runner.end();
    }
}

#[test]
fn burst_of_frames_is_read_completely() {
    let runner = Running::start(true, Share::default(), None);
    for _ in 0..20 {
        runner.exchange();
    }
    let mut sent = 0;
    let junk = [0xEE; 60];
    runner.guest.set_nonblocking(true).unwrap();
    while sent < 5000 {
        match runner.guest.send(&junk) {
            Ok(_) => sent += 1,
            Err(error) => {
                assert_eq!(Errno::from_io_error(&error), Some(Errno::AGAIN));
                std::thread::yield_now();
            }
        }
    }
    runner.guest.set_nonblocking(false).unwrap();
    runner.exchange();
    assert_eq!(runner.counters.frames_in.get(), 5000 + 21);
    runner.end();
}

#[test]
fn runner_that_sleeps_takes_what_another_one_hands_over() {
    for is_polled_by_calls in [true, false] {
        let forwards = Arc::default();
        let runners: Vec<Running> = team::team(2)
            .unwrap()
            .into_iter()
            .enumerate()
            .map(|(index, member)| {
                let share = Share::new(index, 2, Arc::clone(&forwards));
                Running::start(is_polled_by_calls, share, Some(member))
            })
            .collect();
        // A segment without a connection visits both engines, and the second one refuses it.
        let mut frame = vec![0x52, 0x46, 0, 0, 0, 1];
        frame.extend(GUEST_MAC);
        frame.extend([8, 0, 0x45, 0, 0, 40, 0, 1, 0x40, 0, 64, 6, 0, 0]);
        frame.extend(GUEST);
        frame.extend([198, 51, 100, 1]);
        frame.extend([0x30, 0x39, 0, 80, 0, 0, 0, 1, 0, 0, 0, 2, 0x50, 0x10, 1, 0, 0, 0, 0, 0]);
        let sum = |bytes: &[u8], start: u32| {
            let words = bytes.chunks(2).map(|word| u32::from(word[0]) << 8 | u32::from(word[1]));
            let sum = words.sum::<u32>() + start;
            let sum = (sum & 0xFFFF) + (sum >> 16);
            (!u16::try_from((sum & 0xFFFF) + (sum >> 16)).unwrap()).to_be_bytes()
        };
        let checksum = sum(&frame[14..34], 0);
        frame[24..26].copy_from_slice(&checksum);
        // Pseudo-header: addresses, protocol and length.
        let addresses = frame[26..34].to_vec();
        let checksum = sum(&[&addresses[..], &frame[34..]].concat(), 6 + 20);
        frame[50..52].copy_from_slice(&checksum);
        for (first, second) in [(0, 1), (1, 0)] {
            for _ in 0..50 {
                runners[first].guest.send(&frame).unwrap();
                let mut answer = [0; 100];
                let len = runners[second].guest.recv(&mut answer).unwrap();
                assert!(len >= 54 && answer[47] & 4 != 0, "a reset");
            }
        }
        for runner in runners {
            runner.end();
        }
    }
}

#[test]
fn drain_carries_the_frames_that_wait_in_the_link() {
    // A datagram socket holds about ten.
    const FRAMES: u64 = 8;
    for is_polled_by_calls in [true, false] {
        let (uplink, link, guest) = parts(is_polled_by_calls, Share::default());
        let counters = Arc::clone(uplink.counters());
        for _ in 0..FRAMES {
            send_request(&guest);
        }
        let mut runner = Runner::new(uplink, link, Clock::default(), Duration::ZERO);
        runner.drain().unwrap();
        assert_eq!(counters.arp_answers.get(), FRAMES);
    }
}
