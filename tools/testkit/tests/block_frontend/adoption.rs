//! Adoption: a successor takes over the ring of a backend that crashed.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use ringfence_access::Mode;
use ringfence_block::blkback::BlkbackOptions;
use ringfence_block::storage::{Disk, DiskQueue, Done, Geometry, Op, Request};
use ringfence_block::vbd::backend::VbdBackend;
use ringfence_block::vbd::toolstack::VbdConfig;
use ringfence_platform::{Access, Platform};
use ringfence_testkit::block::frontend::whole;
use ringfence_testkit::block::{RawFront, Stage};
use ringfence_wire::blkif::{Abi, Operation, Status};
use ringfence_wire::xenbus::XenbusState;

use super::*;

/// Disk that completes only the requests that the test names, in the test's order.
#[derive(Clone)]
struct HeldDisk {
    inner: Arc<MemoryDisk>,
    waiting: Arc<Mutex<Vec<Request>>>,
    /// First byte and operation of each request, in the order of submission.
    begun: Arc<Mutex<Vec<(u64, Op)>>>,
    let_go: Arc<Mutex<Vec<u64>>>,
    event: Arc<OwnedFd>,
    life: Arc<Mutex<Life>>,
}

/// State of the thread that polls the disk.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Life {
    #[default]
    Alive,
    /// The thread must block at its next poll.
    Killed,
    /// The thread is blocked for the rest of the test.
    Dead,
}

impl HeldDisk {
    fn new() -> HeldDisk {
        let event = rustix::event::eventfd(0, rustix::event::EventfdFlags::NONBLOCK).unwrap();
        HeldDisk {
            inner: disk(512),
            waiting: Arc::default(),
            begun: Arc::default(),
            let_go: Arc::default(),
            event: Arc::new(event),
            life: Arc::default(),
        }
    }

    /// Blocks the thread that polls the disk, at its next poll. Waits until it is blocked.
    fn block_poller(&self) {
        *self.life.lock().unwrap() = Life::Killed;
        rustix::io::write(&*self.event, &1u64.to_ne_bytes()).unwrap();
        let begun = Instant::now();
        while *self.life.lock().unwrap() != Life::Dead {
            assert!(begun.elapsed() < Duration::from_secs(60), "no thread polls the disk");
            std::thread::yield_now();
        }
    }

    /// Waits until the disk holds `count` requests.
    fn wait_until_held(&self, count: usize) {
        let begun = Instant::now();
        while self.waiting.lock().unwrap().len() < count {
            assert!(begun.elapsed() < Duration::from_secs(60), "fewer requests than expected");
            std::thread::yield_now();
        }
    }

    /// Waits until `count` requests were submitted since the start.
    fn wait_until_begun(&self, count: usize) {
        let since = Instant::now();
        while self.begun.lock().unwrap().len() < count {
            assert!(since.elapsed() < Duration::from_secs(60), "fewer requests than expected");
            std::thread::yield_now();
        }
    }

    /// Completes the request that starts at byte `offset` of the disk.
    fn finish(&self, offset: u64) {
        self.let_go.lock().unwrap().push(offset);
        rustix::io::write(&*self.event, &1u64.to_ne_bytes()).unwrap();
    }
}

impl Disk for HeldDisk {
    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }
    fn queue(&self, depth: u32) -> io::Result<Box<dyn DiskQueue>> {
        Ok(Box::new(HeldQueue { disk: self.clone(), inner: self.inner.queue(depth)? }))
    }
}

struct HeldQueue {
    disk: HeldDisk,
    inner: Box<dyn DiskQueue>,
}

impl DiskQueue for HeldQueue {
    fn submit(&mut self, request: Request) {
        self.disk.begun.lock().unwrap().push((request.offset, request.op));
        self.disk.waiting.lock().unwrap().push(request);
    }
    fn kick(&mut self) {}
    fn reap(&mut self, done: &mut Vec<Done>) {
        if *self.disk.life.lock().unwrap() != Life::Alive {
            *self.disk.life.lock().unwrap() = Life::Dead;
            loop {
                std::thread::park();
            }
        }
        let _ = rustix::io::read(&*self.disk.event, &mut [0; 8]);
        let mut waiting = self.disk.waiting.lock().unwrap();
        for offset in self.disk.let_go.lock().unwrap().drain(..) {
            let at = waiting.iter().position(|request| request.offset == offset).unwrap();
            self.inner.submit(waiting.remove(at));
        }
        self.inner.kick();
        self.inner.reap(done);
    }
    fn wait_fd(&self) -> BorrowedFd<'_> {
        self.disk.event.as_fd()
    }
}

/// Connects a raw frontend, which sees every slot of the ring.
fn connect_front(stage: &mut Stage, disk: &HeldDisk) -> RawFront {
    let platform = stage.join(256);
    let options = options(Mode::Persistent);
    let disk = Arc::new(disk.clone());
    let vbd = stage.add_vbd(platform.domid(), disk, options, VbdConfig::default());
    let mut front = RawFront::new(stage, platform, vbd, Abi::X86_64, 1);
    front.connect(stage, true);
    front
}

/// Crashes the backend: its thread blocks, and no code stops it in an orderly way.
fn kill(stage: &mut Stage, vbd: usize, held: &HeldDisk) {
    held.block_poller();
    let disk: Arc<dyn Disk> = held.inner.clone();
    let device = *stage.vbds[vbd].device();
    let next = VbdBackend::new(device, BlkbackOptions::default(), disk, Arc::new(|| {}));
    std::mem::forget(std::mem::replace(&mut stage.vbds[vbd], next));
}

#[test]
fn requests_completed_out_of_order_leave_unfinished_ones_in_ring() {
    let mut stage = Stage::new();
    let held = HeldDisk::new();
    let mut front = connect_front(&mut stage, &held);
    let page = front.lend(Access::ReadWrite, 5);
    let slots: Vec<_> =
        (0..8).map(|id| front.direct(Operation::Write, id, id * 8, &[whole(&page)])).collect();
    front.post(&slots);
    held.wait_until_held(8);
    for id in [6, 3, 7] {
        held.finish(id * 4096);
        let answers = front.answers(1);
        assert_eq!((answers[0].id, answers[0].status), (id, Status::Okay));
    }
    // No other request was answered. The other five are in the slots behind the answers, each once.
    assert_eq!(front.rsp_prod(), 3);
    let mut left: Vec<Vec<u8>> = (3..8).map(|index| front.entry(index)).collect();
    left.sort();
    let mut expected: Vec<Vec<u8>> = [0, 1, 2, 4, 5].map(|id: usize| slots[id].to_vec()).into();
    expected.sort();
    assert_eq!(left, expected);
    let served = stage.vbds[front.vbd].served().unwrap();
    assert!(served.counters().next().unwrap().0.moved.get() >= 2);
    for id in [0, 5, 1, 4, 2] {
        held.finish(id * 4096);
        assert_eq!(front.answers(1)[0].id, id);
    }
}

#[test]
fn successor_of_crashed_backend_completes_unanswered_requests() {
    let mut stage = Stage::new();
    let held = HeldDisk::new();
    let mut front = connect_front(&mut stage, &held);
    let pages: Vec<_> = (0..8).map(|n| front.lend(Access::ReadWrite, 0x10 + n)).collect();
    let slots: Vec<_> = (0..)
        .zip(&pages)
        .map(|(id, page)| front.direct(Operation::Write, id, id * 8, &[whole(page)]))
        .collect();
    front.post(&slots);
    held.wait_until_held(8);
    for id in [2, 5] {
        held.finish(id * 4096);
        assert_eq!(front.answers(1)[0].id, id);
    }
    kill(&mut stage, front.vbd, &held);
    assert_eq!(stage.state(front.vbd), XenbusState::Connected);
    // The guest posts another request while no backend runs.
    let more = front.direct(Operation::Write, 8, 64, &[whole(&pages[0])]);
    front.write(&more);
    front.publish_as(front.produced);
    // The successor binds the frontend's channel again. On this platform the old end must be closed, which
    // the exit of a process does. Here the frontend allocates a new channel instead.
    front.channel = front.platform.alloc_unbound(ringfence_platform::DomId(0)).unwrap();
    let port = ringfence_platform::Channel::port(&front.channel).0.to_string();
    front.set(ringfence_wire::blkif::keys::EVENT_CHANNEL, &port);
    stage.look(front.vbd);
    let connection = stage.vbds[front.vbd].connection().unwrap();
    assert!(connection.adopted && connection.persistent);
    assert_eq!(stage.vbds[front.vbd].served().unwrap().adopted(), 7);
    let mut ids: Vec<u64> = front.answers(7).iter().map(|answer| answer.id).collect();
    ids.sort_unstable();
    assert_eq!(ids, [0, 1, 3, 4, 6, 7, 8]);
    assert_eq!(stage.state(front.vbd), XenbusState::Connected);
    let back = front.lend(Access::ReadWrite, 0);
    for (id, byte) in (0..9).zip([0x10, 0x11, 0x12, 0x13, 0x14, 0x15, 0x16, 0x17, 0x10]) {
        let read = front.direct(Operation::Read, 100 + id, id * 8, &[whole(&back)]);
        assert_eq!(front.ask(&read), Status::Okay);
        let found: [u8; 4] = back.memory().fetch(1000).unwrap().into_unchecked();
        assert_eq!(found, [byte; 4]);
    }
}

#[test]
fn overlapping_write_is_submitted_after_earlier_write_completed() {
    // Two writes of the same sectors, posted together. The backend submits the second one after the first
    // has completed, so after its acknowledgement no replay can undo it.
    let mut stage = Stage::new();
    let held = HeldDisk::new();
    let mut front = connect_front(&mut stage, &held);
    let old = front.lend(Access::ReadWrite, 1);
    let new = front.lend(Access::ReadWrite, 2);
    let slots = [
        front.direct(Operation::Write, 1, 0, &[whole(&old)]),
        front.direct(Operation::Write, 2, 0, &[whole(&new)]),
        front.direct(Operation::Write, 3, 800, &[whole(&new)]),
    ];
    front.post(&slots);
    held.wait_until_held(1);
    std::thread::sleep(Duration::from_millis(30));
    assert_eq!(held.waiting.lock().unwrap().len(), 1, "the second waits for the first");
    held.finish(0);
    assert_eq!(front.answers(1)[0].id, 1);
    held.wait_until_held(2);
    held.finish(0);
    held.finish(800 * 512);
    front.answers(2);
}

#[test]
fn barrier_runs_after_earlier_and_before_later_requests() {
    let mut stage = Stage::new();
    let held = HeldDisk::new();
    let mut front = connect_front(&mut stage, &held);
    let page = front.lend(Access::ReadWrite, 1);
    let write = |id, sector| {
        ringfence_wire::blkif::direct(
            Abi::X86_64,
            Operation::Write,
            ringfence_wire::blkif::RequestName { id, handle: 0 },
            sector,
            &[whole(&page)],
        )
        .unwrap()
    };
    let barrier = front.direct(Operation::Barrier, 3, 160, &[whole(&page)]);
    front.post(&[write(1, 80), write(2, 88), barrier, write(4, 240)]);
    held.wait_until_held(2);
    std::thread::sleep(Duration::from_millis(30));
    assert_eq!(held.begun.lock().unwrap().len(), 2, "the barrier waits");
    held.finish(88 * 512);
    held.finish(80 * 512);
    front.answers(2);
    // The backend then flushes, alone, and only after that writes with FUA.
    held.wait_until_held(1);
    assert_eq!(held.begun.lock().unwrap()[2..], [(0, Op::Flush)]);
    held.finish(0);
    held.wait_until_begun(4);
    assert_eq!(held.begun.lock().unwrap()[3..], [(160 * 512, Op::Write { fua: true })]);
    held.finish(160 * 512);
    assert_eq!(front.answers(1)[0].id, 3);
    held.wait_until_held(1);
    held.finish(240 * 512);
    assert_eq!(front.answers(1)[0].id, 4);
}

#[test]
fn device_closed_under_load_waits_for_disk_without_blocking_caller() {
    let mut stage = Stage::new();
    let held = HeldDisk::new();
    let mut front = connect_front(&mut stage, &held);
    let page = front.lend(Access::ReadWrite, 1);
    let slots: Vec<_> =
        (0..4).map(|id| front.direct(Operation::Read, id, id * 8, &[whole(&page)])).collect();
    front.post(&slots);
    held.wait_until_held(4);
    front.enter(XenbusState::Closing);
    let begun = Instant::now();
    stage.look(front.vbd);
    assert!(begun.elapsed() < Duration::from_secs(5), "the look waited for the disk");
    // The page is still mapped: the disk may still write to it.
    assert_eq!(stage.state(front.vbd), XenbusState::Connected, "no state says it is not");
    let values = stage.platform.counters().values();
    assert!(values.grant_maps > values.grant_unmaps);
    for id in 0..4 {
        held.finish(id * 4096);
    }
    stage.look_until(front.vbd, XenbusState::Closing);
    assert_eq!(front.take().len(), 4, "and answered");
    let values = stage.platform.counters().values();
    assert_eq!(values.grant_maps, values.grant_unmaps);
}
