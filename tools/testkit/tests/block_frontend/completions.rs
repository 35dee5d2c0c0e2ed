//! Disks that complete requests which they do not have.

use std::io;
use std::os::fd::BorrowedFd;

use ringfence_access::Mode;
use ringfence_block::storage::{Disk, DiskQueue, Done, Geometry, Request};
use ringfence_platform::Access;
use ringfence_testkit::block::frontend::whole;
use ringfence_wire::blkif::{Operation, Status};
use ringfence_wire::xenbus::XenbusState;

use super::*;

/// Disk that completes each request a second time.
struct RepeatingDisk(Arc<MemoryDisk>);

impl Disk for RepeatingDisk {
    fn geometry(&self) -> Geometry {
        self.0.geometry()
    }
    fn queue(&self, depth: u32) -> io::Result<Box<dyn DiskQueue>> {
        Ok(Box::new(RepeatingQueue(self.0.queue(depth)?)))
    }
}

struct RepeatingQueue(Box<dyn DiskQueue>);

impl DiskQueue for RepeatingQueue {
    fn submit(&mut self, request: Request) {
        self.0.submit(request);
    }
    fn kick(&mut self) {
        self.0.kick();
    }
    fn reap(&mut self, done: &mut Vec<Done>) {
        let before = done.len();
        self.0.reap(done);
        let again = |done: &Done| Done { token: done.token, result: Ok(()), segments: vec![] };
        let repeated: Vec<Done> = done[before..].iter().map(again).collect();
        done.extend(repeated);
    }
    fn wait_fd(&self) -> BorrowedFd<'_> {
        self.0.wait_fd()
    }
}

#[test]
fn completion_without_request_closes_that_device_only() {
    let mut stage = Stage::new();
    let guest = other_guest(&mut stage);
    let platform = stage.join(4096);
    let disk = Arc::new(RepeatingDisk(disk(512)));
    let vbd = stage.add_vbd(platform.domid(), disk, options(Mode::Map), VbdConfig::default());
    let mut front = RawFront::new(&stage, platform, vbd, Abi::X86_64, 1);
    front.connect(&mut stage, true);
    let page = front.lend(Access::ReadWrite, 1);
    let slot = front.direct(Operation::Read, 1, 0, &[whole(&page)]);
    assert_eq!(front.ask(&slot), Status::Okay, "the request itself is answered once");
    let why = stage.wait_for_penalty_close(vbd);
    assert!(why.contains("which it did not have"), "{why}");
    assert_eq!(stage.rules(vbd).get("blk_unknown_completion"), 1);
    assert_eq!(stage.state(vbd), XenbusState::Closing);
    check_other_guest_works(&stage, &guest);
}
