//! Disks that complete requests which they do not have.

use std::io;
use std::os::fd::BorrowedFd;

use ringfence_access::Mode;
use ringfence_block::storage::testing::Driver;
use ringfence_block::storage::{Disk, DiskQueue, Done, Geometry, Op, Request};
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

/// Disk on which a write to sector `n` fails with the error number `n`.
struct FailingDisk(Arc<MemoryDisk>);

impl Disk for FailingDisk {
    fn geometry(&self) -> Geometry {
        self.0.geometry()
    }
    fn queue(&self, depth: u32) -> io::Result<Box<dyn DiskQueue>> {
        Ok(Box::new(FailingQueue { inner: self.0.queue(depth)?, failed: vec![] }))
    }
}

struct FailingQueue {
    inner: Box<dyn DiskQueue>,
    failed: Vec<Done>,
}

impl DiskQueue for FailingQueue {
    fn submit(&mut self, request: Request) {
        match request.op {
            Op::Write { .. } if request.offset > 0 => {
                let errno = i32::try_from(request.offset / 512).unwrap();
                self.failed.push(request.done(Err(errno)));
            }
            _ => self.inner.submit(request),
        }
    }
    fn kick(&mut self) {
        self.inner.kick();
    }
    fn reap(&mut self, done: &mut Vec<Done>) {
        done.append(&mut self.failed);
        self.inner.reap(done);
    }
    fn wait_fd(&self) -> BorrowedFd<'_> {
        self.inner.wait_fd()
    }
}

#[test]
fn full_quota_is_no_space_for_frontend_that_knows_the_status() {
    let failing = || Arc::new(FailingDisk(disk(512)));
    let mut stage = Stage::new();
    let (back, front) = (BlkbackOptions::default(), BlkfrontOptions::default());
    let guest = Guest::join(&mut stage, failing(), back, front);
    let platform = stage.join(4096);
    let vbd = stage.add_vbd(platform.domid(), failing(), options(Mode::Map), VbdConfig::default());
    let mut other = RawFront::new(&stage, platform, vbd, Abi::X86_64, 1);
    other.connect(&mut stage, true);
    let page = other.lend(Access::ReadWrite, 1);
    let mut driver = Driver::new(guest.disk().queue(4).unwrap());
    for (errno, expected) in [
        (libc::ENOSPC, libc::ENOSPC),
        (libc::EDQUOT, libc::ENOSPC),
        (libc::EFBIG, libc::ENOSPC),
        (libc::EROFS, libc::EIO),
        (libc::ESTALE, libc::EIO),
        (libc::EOPNOTSUPP, libc::EIO),
    ] {
        let sector = u64::try_from(errno).unwrap();
        assert_eq!(driver.write(sector * 512, &[1; 512]), Err(expected), "errno {errno}");
        let slot = other.direct(Operation::Write, 1, sector, &[whole(&page)]);
        assert_eq!(other.ask(&slot), Status::Error, "errno {errno}");
    }
}
