//! Disks under a driver of other authors: the crate virtio-driver, of which libblkio is made. It hands memory over region by
//! region: one file with its vrings, and one with the buffers.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::{Duration, Instant};

use ringfence_block::storage::testing::Random;
use ringfence_vhost_user::testing::memfd;
use virtio_driver::{
    VhostUser, VirtioBlkFeatureFlags, VirtioBlkQueue, VirtioBlkTransport, VirtioFeatureFlags,
};

use super::pool_proxy::{QEMU, foreign_disk, wait_for_status};
use crate::require;
use crate::support::disks::image_file;
use crate::support::needs::Need;
use crate::support::{Lab, MOMENT, Running};

/// Bytes of the buffers.
const BUFFERS: usize = 1 << 20;
/// Bytes of a request, and requests in flight.
const BLOCK: usize = 4096;
const DEPTH: usize = 32;
/// Offset of the buffers that are read into.
const READ_AT: usize = BUFFERS / 2;

/// Driver with one queue.
struct ForeignDriver {
    transport: Box<VirtioBlkTransport>,
    queue: VirtioBlkQueue<'static, usize>,
    /// Addresses of the buffers. The driver passes them on and touches no byte, so their content is in `file` alone.
    buffers: Vec<u8>,
    file: OwnedFd,
}

impl ForeignDriver {
    fn connect(lab: &Lab, socket: &str) -> io::Result<ForeignDriver> {
        let common = VirtioFeatureFlags::VERSION_1
            | VirtioFeatureFlags::RING_EVENT_IDX
            | VirtioFeatureFlags::RING_INDIRECT_DESC;
        let features = common.bits() | VirtioBlkFeatureFlags::FLUSH.bits();
        let path = lab.file(socket).display().to_string();
        let mut transport: Box<VirtioBlkTransport> = Box::new(VhostUser::new(&path, features)?);
        let (file, buffers) = (memfd(BUFFERS as u64)?, vec![0; BUFFERS]);
        transport.map_mem_region(buffers.as_ptr().addr(), BUFFERS, file.as_raw_fd(), 0)?;
        let mut queues = VirtioBlkQueue::setup_queues(&mut *transport, 1, 128)?;
        Ok(ForeignDriver { transport, queue: queues.remove(0), buffers, file })
    }

    /// Notifies the device, and waits for the completions of all requests.
    fn complete(&mut self, count: usize) {
        self.transport.get_submission_notifier(0).notify().unwrap();
        let (begun, mut done) = (Instant::now(), 0);
        while done < count {
            for completion in self.queue.completions() {
                assert_eq!(completion.ret, 0, "request {}", completion.context);
                done += 1;
            }
            assert!(begun.elapsed() < MOMENT, "{done} of {count} requests are complete");
            std::thread::sleep(Duration::from_micros(100));
        }
    }

    /// Writes and reads blocks of noise, several at a time, and returns what the first megabyte of the disk has then.
    fn exercise(&mut self) -> Vec<u8> {
        let (mut random, mut disk) = (Random::new(71), vec![0; BUFFERS]);
        for _ in 0..16 {
            let noise: Vec<u8> =
                (0..DEPTH * BLOCK / 8).flat_map(|_| random.next_u64().to_ne_bytes()).collect();
            rustix::io::pwrite(&self.file, &noise, 0).unwrap();
            let first = random.index(BUFFERS / BLOCK - DEPTH) * BLOCK;
            for at in (0..DEPTH * BLOCK).step_by(BLOCK) {
                let buffer = &self.buffers[at..at + BLOCK];
                self.queue.write((first + at) as u64, buffer, at).unwrap();
            }
            self.complete(DEPTH);
            disk[first..first + noise.len()].copy_from_slice(&noise);
            self.queue.flush(0).unwrap();
            self.complete(1);
            for at in (0..DEPTH * BLOCK).step_by(BLOCK) {
                let buffer = &mut self.buffers[READ_AT + at..READ_AT + at + BLOCK];
                self.queue.read((first + at) as u64, buffer, at).unwrap();
            }
            self.complete(DEPTH);
            let mut found = vec![0; noise.len()];
            rustix::io::pread(&self.file, &mut found, READ_AT as u64).unwrap();
            assert!(found == noise, "other bytes are read than were written");
        }
        disk
    }
}

/// Disk of Ringfence, or of qemu-storage-daemon, at the socket `backend`.
fn start(lab: &Lab, is_own: bool, options: &str) -> Box<dyn std::any::Any> {
    if !is_own {
        return Box::new(foreign_disk(lab, "backend"));
    }
    image_file(lab, 4);
    let words = ["vhost-user", "blk", "--socket", "backend", "--disk", "disk.img"];
    Box::new(lab.serve(&words, options))
}

/// Starts a command between the socket `backend` and a driver at the socket `s`.
fn between(lab: &Lab, command: &str, options: &str) -> Running {
    lab.serve(&[command, "--listen", "s", "--backend", "backend"], options)
}

#[test]
fn foreign_driver_stores_data_on_each_disk_by_trust_pool_and_shield() {
    require!(Need::Guests, QEMU);
    for (is_own, options, command) in [
        (true, "", None),
        (true, "--require-pool 2M --status-socket status", None),
        (true, "--require-pool 64M", Some("shield")),
        (false, "", None),
        (false, "", Some("shield")),
    ] {
        let lab = Lab::new();
        let _disk = start(&lab, is_own, options);
        let _between = command.map(|command| between(&lab, command, ""));
        let socket = if command.is_some() { "s" } else { "backend" };
        let mut driver = ForeignDriver::connect(&lab, socket).unwrap();
        let wanted = driver.exercise();
        if options.contains("status") {
            wait_for_status(&lab, "vhost-user: lent ");
        }
        let image = if is_own { "disk.img" } else { "backend.img" };
        let stored = std::fs::read(lab.file(image)).unwrap();
        assert!(stored[..BUFFERS] == wanted, "own {is_own}, {options:?}, {command:?}");
    }
}

#[test]
fn foreign_driver_with_more_memory_than_the_pool_or_with_vrings_outside_of_it_is_refused() {
    require!(Need::Guests);
    let lab = Lab::new();
    let _disk = start(&lab, true, "--require-pool 1M");
    // The file of the vrings comes in addition.
    assert!(ForeignDriver::connect(&lab, "backend").is_err());
    let _between = between(&lab, "pool-proxy", "--pool 1M");
    assert!(ForeignDriver::connect(&lab, "s").is_err());
}
