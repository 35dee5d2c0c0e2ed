use std::collections::VecDeque;
use std::io::{Read as _, Write as _};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use proptest::prelude::*;
use ringfence_memory::{DeviceAccess, DeviceRange};
use ringfence_ring::split::inflight::InflightLog;
use ringfence_sys::poll::wait_any;
use ringfence_vhost_user::device::LOG_FILE_MAX;
use ringfence_vhost_user::testing::{FrontShape, Frontend, log_file, memfd, state, words};
use ringfence_wire::vhost_user::number;
use ringfence_wire::virtio::flag;
use ringfence_wire::virtio_blk::{HEADER_BYTES, RequestHeader, RequestKind};
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd};

use super::testing::{FEATURES, FrontDisk, config as read_config, shape};
use super::*;
use crate::storage::Request;
use crate::storage::memory::MemoryDisk;
use crate::storage::testing::workload::Workload;

const MIB: u64 = 1 << 20;

/// Disk in a thread of its own.
struct Served {
    thread: JoinHandle<(VhostUserDisk, Result<(), Fault>)>,
    stop: Arc<AtomicBool>,
    rounds: Arc<AtomicUsize>,
    /// Disk that is to replace the one that is served.
    resized: Arc<Mutex<Option<Arc<dyn Disk>>>>,
}

impl Served {
    fn stop(self) -> (VhostUserDisk, Result<(), Fault>) {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().unwrap()
    }

    /// Waits until a round that begins after this call has ended.
    fn wait_for_round(&self) {
        let (before, begun) = (self.rounds.load(Ordering::SeqCst), std::time::Instant::now());
        while self.rounds.load(Ordering::SeqCst) < before + 2 {
            assert!(begun.elapsed() < Duration::from_secs(60), "the disk does no round");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Waits for the end of the disk with its client. Returns the number of refused clients and the fault's text.
    fn refused(self) -> (u64, String) {
        let begun = std::time::Instant::now();
        while !self.thread.is_finished() {
            assert!(begun.elapsed() < Duration::from_secs(60), "the client is served");
            std::thread::sleep(Duration::from_millis(1));
        }
        let (disk, ended) = self.thread.join().unwrap();
        let Err(Fault::Misbehaved(fault)) = ended else { panic!("{ended:?}") };
        (disk.reporter.count(), fault.to_string())
    }
}

/// Serves a disk to one client.
fn serve(storage: &dyn Disk) -> (Served, UnixStream) {
    let (own, socket) = UnixStream::pair().unwrap();
    own.set_nonblocking(true).unwrap();
    let clients = Clients::Connected(own.into());
    let mut disk = VhostUserDisk::new(clients, storage, DiskOptions::default()).unwrap();
    (0..4).for_each(|_| disk.add_log_file(log_file(LOG_FILE_MAX).unwrap()));
    let stop = Arc::new(AtomicBool::new(false));
    let stopped = Arc::clone(&stop);
    let rounds = Arc::<AtomicUsize>::default();
    let counted = Arc::clone(&rounds);
    let resized = Arc::<Mutex<Option<Arc<dyn Disk>>>>::default();
    let next = Arc::clone(&resized);
    let thread = std::thread::spawn(move || {
        let served = loop {
            next.lock().unwrap().take().into_iter().for_each(|next| disk.resize(next));
            let round = disk.round();
            counted.fetch_add(1, Ordering::SeqCst);
            match round {
                Ok(true) => continue,
                Ok(false) => {}
                Err(fault) => break Err(fault),
            }
            if stopped.load(Ordering::Relaxed) {
                break Ok(());
            }
            if !disk.arm() {
                let fds = disk.wait_fds();
                let mut files: Vec<_> =
                    fds.iter().map(|fd| PollFd::from_borrowed_fd(*fd, PollFlags::IN)).collect();
                let until = std::time::Instant::now() + Duration::from_millis(2);
                wait_any(&mut files, Some(until)).unwrap();
            }
            if let Err(fault) = disk.clear_events() {
                break Err(fault);
            }
        };
        (disk, served)
    });
    (Served { thread, stop, rounds, resized }, socket)
}

fn front(vrings: u16, socket: UnixStream) -> Frontend {
    let mut front = Frontend::new(shape(vrings)).unwrap();
    front.attach(socket).unwrap();
    front
}

/// Storage whose writes wait until they are released, in the order of their submission.
#[derive(Clone)]
struct HeldDisk {
    inner: Arc<MemoryDisk>,
    state: Arc<Mutex<HeldState>>,
}

#[derive(Default)]
struct HeldState {
    is_open: bool,
    /// Offset of a request that waits for no release.
    passes: Option<u64>,
    /// Operations and offsets of all requests that arrived.
    seen: Vec<(Op, u64)>,
}

impl HeldDisk {
    fn new() -> HeldDisk {
        let inner = Arc::new(MemoryDisk::new(4 * MIB, 512).unwrap());
        HeldDisk { inner, state: Arc::default() }
    }

    /// Answers the request at this offset while all others are held.
    fn pass(&self, offset: u64) {
        self.state.lock().unwrap().passes = Some(offset);
    }

    fn set_open(&self, is_open: bool) {
        self.state.lock().unwrap().is_open = is_open;
    }

    fn seen(&self) -> Vec<(Op, u64)> {
        self.state.lock().unwrap().seen.clone()
    }

    /// Waits until so many requests arrived.
    fn wait_for(&self, count: usize) {
        let begun = std::time::Instant::now();
        while self.seen().len() < count {
            assert!(begun.elapsed() < Duration::from_secs(60), "{:?}", self.seen());
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Disk for HeldDisk {
    fn geometry(&self) -> Geometry {
        Geometry { flush: true, ..self.inner.geometry() }
    }

    fn queue(&self, depth: u32) -> io::Result<Box<dyn DiskQueue>> {
        let inner = self.inner.queue(depth)?;
        Ok(Box::new(HeldQueue { inner, state: Arc::clone(&self.state), held: VecDeque::new() }))
    }
}

struct HeldQueue {
    inner: Box<dyn DiskQueue>,
    state: Arc<Mutex<HeldState>>,
    held: VecDeque<Request>,
}

impl DiskQueue for HeldQueue {
    fn submit(&mut self, request: Request) {
        self.state.lock().unwrap().seen.push((request.op, request.offset));
        self.held.push_back(request);
    }

    fn kick(&mut self) {}

    fn reap(&mut self, done: &mut Vec<Done>) {
        let state = self.state.lock().unwrap();
        let is_released = |held: &Request| state.is_open || state.passes == Some(held.offset);
        let (released, held): (VecDeque<_>, VecDeque<_>) =
            self.held.drain(..).partition(is_released);
        self.held = held;
        released.into_iter().for_each(|request| self.inner.submit(request));
        drop(state);
        self.inner.reap(done);
    }

    fn wait_fd(&self) -> BorrowedFd<'_> {
        self.inner.wait_fd()
    }
}

/// Places of a request in the buffers of a frontend.
const DATA: usize = 4096;
const STATUS: usize = 512;

/// Makes a request available whose data has `len` bytes, in buffer `number` of 64 KiB.
fn push(front: &mut Frontend, number: usize, header: RequestHeader, len: usize) {
    let at = front.buffers_at() + number * (64 << 10);
    front.memory.copy_from(at, &header.to_bytes()).unwrap();
    front.memory.copy_from(at + STATUS, &[0xff]).unwrap();
    let access = match header.kind {
        RequestKind::Read | RequestKind::Identity => DeviceAccess::Write,
        _ => DeviceAccess::Read,
    };
    let mut ranges = vec![front.range(at, HEADER_BYTES, DeviceAccess::Read)];
    ranges.extend((len > 0).then(|| front.range(at + DATA, len, access)));
    ranges.push(front.range(at + STATUS, 1, DeviceAccess::Write));
    push_ranges(front, number, &ranges);
}

fn push_ranges(front: &mut Frontend, number: usize, ranges: &[DeviceRange]) {
    front.vrings[0].driver.push(ranges, u32::try_from(number).unwrap()).unwrap();
    front.kick(0);
}

/// Waits for the next answer: the number of its buffer, its status, and the written bytes.
fn answer(front: &mut Frontend) -> (usize, u8, u32) {
    let begun = std::time::Instant::now();
    loop {
        if let Some(used) = front.vrings[0].driver.pop().unwrap() {
            let number = used.token as usize;
            let mut status = [0];
            let at = front.buffers_at() + number * (64 << 10) + STATUS;
            front.memory.copy_to(at, &mut status).unwrap();
            return (number, status[0], used.len);
        }
        assert!(begun.elapsed() < Duration::from_secs(60), "no answer");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn header(kind: RequestKind, sector: u64) -> RequestHeader {
    RequestHeader { kind, sector }
}

#[test]
fn disk_of_a_machine_stores_what_its_driver_writes_on_all_vrings() {
    let storage = MemoryDisk::new(4 * MIB, 512).unwrap();
    let (served, socket) = serve(&storage);
    let disk = FrontDisk::new(front(2, socket)).unwrap();
    Workload::new(3).exercise(&disk, 300);
    Workload { span: MIB, ..Workload::new(4) }.start(&disk);
    served.stop().1.unwrap();
}

#[test]
fn configuration_space_and_features_say_what_the_storage_has() {
    let storage = MemoryDisk::new(4 * MIB, 4096).unwrap();
    let (served, socket) = serve(&storage);
    let front = front(1, socket);
    front.negotiate().unwrap();
    let found = read_config(&front).unwrap();
    assert_eq!(found, config(&storage.geometry()).to_bytes());
    assert_eq!((found[..8].to_vec(), found[20..24].to_vec()), (words(&[8192]), vec![0, 16, 0, 0]));
    served.stop().1.unwrap();
    let all = storage.geometry();
    let offered = |geometry: Geometry| offer(&geometry).features;
    let read_only = offered(Geometry { read_only: true, ..all });
    assert_eq!(read_only & (blk::RO | blk::DISCARD | blk::WRITE_ZEROES), blk::RO);
    assert_eq!(offered(Geometry { discard: None, ..all }) & (blk::DISCARD | blk::RO), 0);
    assert_eq!(offered(Geometry { flush: true, ..all }) & blk::FLUSH, blk::FLUSH);
}

#[test]
fn request_that_breaks_a_rule_is_answered_with_an_error_and_counted() {
    let storage = MemoryDisk::new(MIB, 4096).unwrap();
    let (served, socket) = serve(&storage);
    let mut front = front(1, socket);
    front.set_up().unwrap();
    let last = MIB / 512 - 8;
    let ranged = |sector: u64, sectors: u32, flags: u32| {
        [&sector.to_le_bytes()[..], &sectors.to_le_bytes(), &flags.to_le_bytes()].concat()
    };
    let data = front.buffers_at() + DATA;
    let mut expected = std::collections::BTreeMap::<_, u64>::new();
    use RequestKind::{Discard, Flush, Identity, Read, Unknown, Write, WriteZeroes};
    for (kind, sector, len, range, status, rule) in [
        (Read, last, 4096, None, 0, None),
        (Read, last + 8, 4096, None, 1, Some("blk_beyond_end")),
        (Write, u64::MAX / 512, 4096, None, 1, Some("blk_beyond_end")),
        (Write, u64::MAX, 4096, None, 1, Some("blk_beyond_end")),
        (Read, 0, 512, None, 1, Some("blk_alignment")),
        (Read, 1, 4096, None, 1, Some("blk_alignment")),
        (Write, 0, 0, None, 1, Some("blk_alignment")),
        (Flush, 0, 0, None, 0, None),
        (Identity, 0, 20, None, 0, None),
        (Unknown(99), 0, 0, None, 2, Some("blk_unknown_request")),
        (Discard, 0, 16, Some(ranged(0, 8, 0)), 0, None),
        (Discard, 0, 16, Some(ranged(0, 8, 1)), 2, Some("blk_range_flags")),
        (WriteZeroes, 0, 16, Some(ranged(8, 8, 1)), 0, None),
        (WriteZeroes, 0, 16, Some(ranged(8, 8, 2)), 2, Some("blk_range_flags")),
        (WriteZeroes, 0, 16, Some(ranged(last, 16, 0)), 1, Some("blk_beyond_end")),
        (WriteZeroes, 0, 16, Some(ranged(0, u32::MAX, 0)), 1, Some("blk_too_long")),
        (WriteZeroes, 0, 15, Some(ranged(0, 8, 0)), 1, Some("blk_range_count")),
        (Discard, 0, 32, Some(ranged(0, 8, 0)), 1, Some("blk_range_count")),
    ] {
        front.memory.copy_from(data, &range.unwrap_or_default()).unwrap();
        push(&mut front, 0, header(kind, sector), len);
        let found = answer(&mut front);
        assert_eq!(found.1, status, "{kind:?} {sector} {len}");
        let fills = matches!(kind, Read | Identity) && status == 0;
        assert_eq!(found.2 as usize, if fills { len + 1 } else { 1 }, "{kind:?} {sector} {len}");
        rule.into_iter().for_each(|rule| *expected.entry(rule).or_default() += 1);
    }
    let (disk, _) = served.stop();
    assert_eq!(disk.rules().all(), expected);
}

#[test]
fn header_range_and_status_in_parts_are_found() {
    let storage = MemoryDisk::new(MIB, 512).unwrap();
    let (served, socket) = serve(&storage);
    let mut front = front(1, socket);
    front.set_up().unwrap();
    let at = front.buffers_at();
    // The header in two parts, the second with the data. The status is the last byte of what is read.
    let bytes = [&header(RequestKind::Write, 1).to_bytes()[..], &[7; 512]].concat();
    front.memory.copy_from(at, &bytes).unwrap();
    let ranges = [
        front.range(at, 5, DeviceAccess::Read),
        front.range(at + 5, bytes.len() - 5, DeviceAccess::Read),
        front.range(at + 2048, 1, DeviceAccess::Write),
    ];
    push_ranges(&mut front, 0, &ranges);
    assert_eq!(answer(&mut front).2, 1);
    front.memory.copy_from(at, &header(RequestKind::Read, 1).to_bytes()).unwrap();
    let ranges =
        [front.range(at, 16, DeviceAccess::Read), front.range(at + DATA, 513, DeviceAccess::Write)];
    push_ranges(&mut front, 0, &ranges);
    assert_eq!(answer(&mut front).2, 513);
    let mut read = [0; 513];
    front.memory.copy_to(at + DATA, &mut read).unwrap();
    assert_eq!((&read[..512], read[512]), (&[7; 512][..], 0));
    served.stop().1.unwrap();
}

/// Serves a frontend that does `attack` after its set-up. Returns the number of refused clients and the fault's text.
fn attacked(attack: impl FnOnce(&mut Frontend)) -> (u64, String) {
    let storage = MemoryDisk::new(MIB, 512).unwrap();
    let (served, socket) = serve(&storage);
    let mut front = front(1, socket);
    front.set_up().unwrap();
    attack(&mut front);
    served.refused()
}

/// Writes descriptors into the table, and makes the first one available.
fn write_chain(front: &mut Frontend, links: &[(u64, u32, u16, u16)]) {
    let layout = ringfence_wire::virtio::SplitLayout::new(64).unwrap();
    let start = front.tables_at(0);
    for (n, &(address, len, flags, next)) in links.iter().enumerate() {
        let link = Descriptor { address, len, flags, next };
        front.memory.copy_from(start + n * 16, &link.to_bytes()).unwrap();
    }
    front.memory.copy_from(start + layout.avail_entry(0), &[0, 0]).unwrap();
    front.memory.copy_from(start + layout.avail_idx(), &1_u16.to_le_bytes()).unwrap();
    rustix::io::write(&front.vrings[0].kick, &1_u64.to_ne_bytes()).unwrap();
}

#[test]
fn chain_that_cannot_be_answered_ends_the_connection_and_is_counted() {
    let (next, write) = (flag::NEXT, flag::WRITE);
    // Each descriptor: an offset from the memory's start, its length, flags and next one.
    type Links = Vec<(u64, u32, u16, u16)>;
    let cases: [(Links, &str); 9] = [
        (vec![(0, 16, next, 0)], "more than 64 descriptors"),
        (vec![(0, 16, next, 1), (16, 4, next, 0)], "more than 64 descriptors"),
        (vec![(0, 16, next, 64)], "descriptor 64 of a table of 64"),
        (vec![(0, 16, 0, 0)], "16 bytes to be read and 0 to be written"),
        (vec![(0, 15, next, 1), (16, 1, write, 0)], "15 bytes to be read"),
        (vec![(0, 1, next | write, 1), (16, 16, 0, 0)], "one to be written"),
        (vec![(1 << 40, 16, next, 1), (16, 1, write, 0)], "outside of the guest's memory"),
        (vec![(0, 16, next, 1), (0, u32::MAX, write, 0)], "outside of the guest's memory"),
        (vec![(0, 16, flag::INDIRECT | next, 1)], "an invalid indirect table"),
    ];
    for (links, text) in cases {
        let (refused, fault) = attacked(|front| {
            let base = front.base() + front.buffers_at() as u64;
            let links: Vec<_> =
                links.iter().map(|&(at, len, flags, to)| (base + at, len, flags, to)).collect();
            write_chain(front, &links);
        });
        assert!(fault.contains(text), "{text}: {fault}");
        assert_eq!(refused, 1, "{text}");
    }
}

#[test]
fn descriptor_made_available_again_while_in_flight_ends_the_connection() {
    let storage = HeldDisk::new();
    let (served, socket) = serve(&storage);
    let mut front = front(1, socket);
    front.set_up().unwrap();
    push(&mut front, 0, header(RequestKind::Write, 0), 512);
    storage.wait_for(1);
    let layout = ringfence_wire::virtio::SplitLayout::new(64).unwrap();
    let start = front.tables_at(0);
    let head = front.memory.fetch::<2>(start + layout.avail_entry(0)).unwrap().into_unchecked();
    front.memory.copy_from(start + layout.avail_entry(1), &head).unwrap();
    front.memory.copy_from(start + layout.avail_idx(), &2_u16.to_le_bytes()).unwrap();
    rustix::io::write(&front.vrings[0].kick, &1_u64.to_ne_bytes()).unwrap();
    served.wait_for_round();
    storage.set_open(true);
    let (refused, fault) = served.refused();
    assert!(fault.contains("while it was in flight"), "{fault}");
    assert_eq!(refused, 1);
    // The request in progress was answered before the end.
    assert_eq!(answer(&mut front), (0, 0, 1));
}

#[test]
fn requests_in_flight_at_the_death_of_a_backend_are_served_once_more_in_their_order() {
    let storage = HeldDisk::new();
    let (served, socket) = serve(&storage);
    let mut front = front(1, socket);
    front.set_up().unwrap();
    for (number, sector) in [(0, 40), (1, 8), (2, 24)] {
        push(&mut front, number, header(RequestKind::Write, sector), 512);
    }
    storage.wait_for(3);
    // The backend dies: nothing is answered.
    drop(served.stop());
    let (next, socket) = serve(&storage);
    storage.set_open(true);
    front.attach(socket).unwrap();
    push(&mut front, 3, header(RequestKind::Write, 16), 512);
    front.set_up().unwrap();
    let answered: Vec<_> = (0..4).map(|_| answer(&mut front).0).collect();
    assert_eq!(answered, [0, 1, 2, 3]);
    let offsets: Vec<_> = storage.seen().iter().map(|(_, offset)| offset / 512).collect();
    assert_eq!(offsets, [40, 8, 24, 40, 8, 24, 16]);
    next.stop().1.unwrap();
    // A third one finds nothing in flight.
    let (third, socket) = serve(&storage);
    front.attach(socket).unwrap();
    front.set_up().unwrap();
    push(&mut front, 0, header(RequestKind::Read, 0), 512);
    assert_eq!(answer(&mut front), (0, 0, 513));
    assert_eq!(storage.seen().len(), 8);
    third.stop().1.unwrap();
}

#[test]
fn requests_around_an_answered_one_are_served_once_more_and_it_is_not() {
    let storage = HeldDisk::new();
    storage.pass(8 * 512);
    let (served, socket) = serve(&storage);
    let mut front = front(1, socket);
    front.set_up().unwrap();
    for (number, sector) in [(0, 40), (1, 8), (2, 24)] {
        push(&mut front, number, header(RequestKind::Write, sector), 512);
    }
    assert_eq!(answer(&mut front).0, 1);
    storage.wait_for(3);
    drop(served.stop());
    // By the used index alone, the first request is the one that was answered.
    let (next, socket) = serve(&storage);
    storage.set_open(true);
    front.attach(socket).unwrap();
    front.set_up().unwrap();
    assert_eq!([answer(&mut front).0, answer(&mut front).0], [0, 2]);
    let offsets: Vec<_> = storage.seen().iter().map(|(_, offset)| offset / 512).collect();
    assert_eq!(offsets, [40, 8, 24, 40, 24]);
    next.stop().1.unwrap();
}

#[test]
fn write_over_one_in_progress_waits_so_that_its_repetition_cannot_undo_it() {
    let storage = HeldDisk::new();
    let (served, socket) = serve(&storage);
    let mut front = front(1, socket);
    front.set_up().unwrap();
    push(&mut front, 0, header(RequestKind::Write, 0), 1024);
    push(&mut front, 1, header(RequestKind::Write, 1), 512);
    push(&mut front, 2, header(RequestKind::Read, 1), 512);
    storage.wait_for(1);
    served.wait_for_round();
    assert_eq!(storage.seen().len(), 1, "the second write waits, and those behind it");
    storage.set_open(true);
    let answered: Vec<_> = (0..3).map(|_| answer(&mut front).0).collect();
    assert_eq!(answered[0], 0);
    served.stop().1.unwrap();
}

#[test]
fn vring_stops_once_its_requests_are_answered() {
    let storage = HeldDisk::new();
    let (served, socket) = serve(&storage);
    let mut front = front(1, socket);
    front.set_up().unwrap();
    push(&mut front, 0, header(RequestKind::Write, 0), 512);
    storage.wait_for(1);
    front.send(number::GET_VRING_BASE, &state(0, 0), &[]).unwrap();
    served.wait_for_round();
    assert!(front.vrings[0].driver.pop().unwrap().is_none());
    storage.set_open(true);
    // The answer to the next question comes behind that of the vring.
    let (stopped, _) = front.ask(number::GET_FEATURES, &[]).unwrap();
    assert_eq!(stopped, state(0, 1));
    assert_eq!(answer(&mut front), (0, 0, 1));
    served.stop().1.unwrap();
}

/// Frontend that has passed a socket for requests of the device. Returns the hypervisor's end of that.
fn front_with_requests(socket: UnixStream) -> (Frontend, UnixStream) {
    let protocol = super::testing::PROTOCOL | protocol_feature::BACKEND_REQ;
    let mut front = Frontend::new(FrontShape { protocol, ..shape(1) }).unwrap();
    front.attach(socket).unwrap();
    front.set_up().unwrap();
    let (near, far) = UnixStream::pair().unwrap();
    front.order(number::SET_BACKEND_REQ_FD, &[], &[far.as_fd()]).unwrap();
    near.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    (front, near)
}

#[test]
fn disk_that_grows_tells_its_hypervisor_once_requests_in_progress_have_ended() {
    let storage = HeldDisk::new();
    let (served, socket) = serve(&storage);
    let (mut front, mut requests) = front_with_requests(socket);
    let after = 8 * MIB;
    assert_eq!(read_config(&front).unwrap(), config(&storage.geometry()).to_bytes());
    push(&mut front, 0, header(RequestKind::Write, 0), 512);
    storage.wait_for(1);
    let grown = Arc::new(MemoryDisk::new(after, 512).unwrap());
    *served.resized.lock().unwrap() = Some(Arc::clone(&grown) as Arc<dyn Disk>);
    served.wait_for_round();
    push(&mut front, 1, header(RequestKind::Write, 8192), 512);
    served.wait_for_round();
    assert_eq!(storage.seen().len(), 1);
    storage.set_open(true);
    assert_eq!(answer(&mut front), (0, 0, 1));
    let mut told = [0; 12];
    requests.read_exact(&mut told).unwrap();
    assert_eq!(told, [2_u32, 1, 0].map(u32::to_ne_bytes).concat()[..]);
    assert_eq!(read_config(&front).unwrap(), config(&grown.geometry()).to_bytes());
    // The sector lies beyond the first disk.
    assert_eq!(answer(&mut front), (1, 0, 1));
    let (mut disk, ended) = served.stop();
    ended.unwrap();
    assert_eq!(disk.take_resized().unwrap().unwrap(), after);
}

#[test]
fn hypervisor_that_does_not_read_requests_is_refused_when_the_disk_grows() {
    let storage = MemoryDisk::new(4 * MIB, 512).unwrap();
    let (served, socket) = serve(&storage);
    let (mut front, requests) = front_with_requests(socket);
    push(&mut front, 0, header(RequestKind::Read, 0), 512);
    assert_eq!(answer(&mut front).1, 0);
    // Another end of the hypervisor's own, whose queue is full.
    let (near, far) = UnixStream::pair().unwrap();
    far.set_nonblocking(true).unwrap();
    while (&far).write(&[0; 4096]).is_ok() {}
    front.order(number::SET_BACKEND_REQ_FD, &[], &[far.as_fd()]).unwrap();
    *served.resized.lock().unwrap() = Some(Arc::new(MemoryDisk::new(8 * MIB, 512).unwrap()));
    let (refused, fault) = served.refused();
    assert_eq!(refused, 1);
    assert!(fault.contains("telling a change"), "{fault}");
    drop((near, requests));
}

#[test]
fn driver_without_flushes_gets_durable_writes() {
    for (features, fua) in [(FEATURES, false), (FEATURES & !blk::FLUSH, true)] {
        let storage = HeldDisk::new();
        storage.set_open(true);
        let (served, socket) = serve(&storage);
        let mut front = Frontend::new(FrontShape { features, ..shape(1) }).unwrap();
        front.attach(socket).unwrap();
        front.set_up().unwrap();
        push(&mut front, 0, header(RequestKind::Write, 0), 512);
        assert_eq!(answer(&mut front).1, 0);
        assert_eq!(storage.seen(), [(Op::Write { fua }, 0)]);
        served.stop().1.unwrap();
    }
}

#[test]
fn log_that_does_not_fit_is_refused() {
    let area = |len: u64, offset: u64, queues: u16, size: u16| {
        [words(&[len, offset]), [queues, size].map(u16::to_ne_bytes).concat()].concat()
    };
    let bytes = InflightLog::bytes(64) as u64;
    for (file, described, text) in [
        (bytes, area(bytes - 1, 0, 1, 64), "an in-flight log of"),
        (bytes, area(bytes, 0, 0, 64), "an in-flight log of"),
        (bytes, area(bytes, 0, QUEUES + 1, 64), "an in-flight log of"),
        (bytes, area(u64::MAX, 0, QUEUES, 32_768), "an in-flight log of"),
        (bytes, area(bytes, 0, 1, 0), "an in-flight log of"),
        (bytes - 1, area(bytes, 0, 1, 64), "an invalid memory region"),
        (bytes, area(bytes, 1, 1, 64), "an invalid memory region"),
        (bytes, area(bytes, u64::MAX, 1, 64), "an invalid memory region"),
        (LOG_FILE_MAX + 1, area(bytes, 0, 1, 64), "an invalid memory region"),
    ] {
        let storage = MemoryDisk::new(MIB, 512).unwrap();
        let (served, socket) = serve(&storage);
        let front = front(1, socket);
        front.negotiate().unwrap();
        let file = log_file(file).unwrap();
        front.send(number::SET_INFLIGHT_FD, &described, &[file.as_fd()]).unwrap();
        let (refused, fault) = served.refused();
        assert!(fault.contains(text) && refused == 1, "{text}: {fault}");
    }
    let storage = MemoryDisk::new(MIB, 512).unwrap();
    let (served, socket) = serve(&storage);
    let front = front(1, socket);
    front.negotiate().unwrap();
    let unsealed = memfd(bytes).unwrap();
    let described = area(bytes, 0, 1, 64);
    front.send(number::SET_INFLIGHT_FD, &described, &[unsealed.as_fd()]).unwrap();
    let (refused, fault) = served.refused();
    assert!(fault.contains("sealed against shrinking") && refused == 1, "{fault}");
}

#[test]
fn request_of_a_protocol_feature_that_was_not_negotiated_is_refused() {
    let part = [[0, 8, 0].map(u32::to_ne_bytes).concat(), vec![0; 8]].concat();
    for (number, payload) in
        [(number::GET_CONFIG, part), (number::GET_INFLIGHT_FD, vec![0; 24]), (25, vec![0; 24])]
    {
        let storage = MemoryDisk::new(MIB, 512).unwrap();
        let (served, socket) = serve(&storage);
        front(1, socket).send(number, &payload, &[]).unwrap();
        let (refused, fault) = served.refused();
        assert!(fault.contains("not") && refused == 1, "{fault}");
    }
}

#[test]
fn client_that_asks_for_too_many_logs_is_refused() {
    let storage = MemoryDisk::new(MIB, 512).unwrap();
    let (served, socket) = serve(&storage);
    let front = front(1, socket);
    front.negotiate().unwrap();
    let wanted = [words(&[0, 0]), [1_u16, 64].map(u16::to_ne_bytes).concat()].concat();
    for _ in 0..4 {
        front.ask(number::GET_INFLIGHT_FD, &wanted).unwrap();
    }
    front.send(number::GET_INFLIGHT_FD, &wanted, &[]).unwrap();
    assert_eq!(served.refused().0, 1);
}

#[test]
fn full_blocking_eventfd_of_a_client_blocks_no_disk() {
    let storage = MemoryDisk::new(MIB, 512).unwrap();
    let (served, socket) = serve(&storage);
    let mut front = front(1, socket);
    let full = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    rustix::io::write(&full, &(u64::MAX - 1).to_ne_bytes()).unwrap();
    front.vrings[0].call = full;
    front.set_up().unwrap();
    for _ in 0..20 {
        front.vrings[0].driver.arm(1).unwrap();
        push(&mut front, 0, header(RequestKind::Read, 0), 512);
        assert_eq!(answer(&mut front).1, 0);
    }
    served.stop().1.unwrap();
}

#[test]
fn memory_beyond_the_required_pool_is_refused() {
    let (own, socket) = UnixStream::pair().unwrap();
    own.set_nonblocking(true).unwrap();
    let storage = MemoryDisk::new(MIB, 512).unwrap();
    let options = DiskOptions { pool: PoolRule::AtMost(4096), ..DiskOptions::default() };
    let mut disk = VhostUserDisk::new(Clients::Connected(own.into()), &storage, options).unwrap();
    let front = front(1, socket);
    let table = words(&[1, front.base(), front.memory.len() as u64, front.base(), 0]);
    front.send(number::SET_MEM_TABLE, &table, &[front.file.as_fd()]).unwrap();
    let Err(Fault::Misbehaved(fault)) = disk.round() else { panic!("it is accepted") };
    assert!(fault.to_string().contains("--require-pool"), "{fault}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]

    #[test]
    fn arbitrary_messages_virtqueues_and_logs_stay_in_the_memory_of_the_machine(
        data in proptest::collection::vec(any::<u8>(), 0..1200),
    ) {
        fuzzing::vhost_user_disk(&data);
    }
}
