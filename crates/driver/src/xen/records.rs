//! Crash journals of rings ([`QueueRecords`], [`CtrlRecord`]): pages in files, which outlive the daemon.
//!
//! The files are in a directory that only the daemon's user can enter, on a file system in memory. Each
//! device has a file with two pages for each queue, and a file for its control ring. The daemon removes
//! them with the device. A reboot removes them too.

// #syscall daemon openat: records of queues
// #syscall daemon ftruncate,fallocate,fstat: records of queues
// #syscall daemon unlinkat: records of queues
// #syscall daemon unlink@x86_64: records of queues

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use ringfence_memory::{Mapping, OutOfRange, PAGE_SIZE, Protection};
use ringfence_net::ctrl::record::CtrlRecord;
use ringfence_net::netback::QueueRecords;
use ringfence_ring::RingPages;
use rustix::fs::{FallocateFlags, Mode, OFlags};

/// Bytes of one queue's records.
const QUEUE: u64 = 2 * PAGE_SIZE as u64;

/// Directory of the records.
#[derive(Debug)]
pub(super) struct Records {
    directory: PathBuf,
}

impl Records {
    /// Opens the directory `path`. Creates it if it does not exist.
    pub(super) fn open(path: &Path) -> io::Result<Records> {
        match rustix::fs::mkdir(path, Mode::RWXU) {
            Ok(()) | Err(rustix::io::Errno::EXIST) => {}
            Err(errno) => return Err(errno.into()),
        }
        Ok(Records { directory: path.to_owned() })
    }

    /// Maps the records of one queue of the device `name`. New records are empty.
    pub(super) fn of(&self, name: &str, queue: u32) -> io::Result<QueueRecords> {
        let file = self.file(name)?;
        let start = u64::from(queue) * QUEUE;
        // No file in this directory ever gets shorter, so an access to the mapping cannot fail later.
        if rustix::fs::fstat(&file)?.st_size.cast_unsigned() < start + QUEUE {
            rustix::fs::ftruncate(&file, start + QUEUE)?;
        }
        // A page without memory behind it would kill the daemon at the first write.
        rustix::fs::fallocate(&file, FallocateFlags::empty(), start, QUEUE)?;
        let pages = Mapping::new(&file, start, 2 * PAGE_SIZE, Protection::ReadWrite)?.lent();
        let record = |page: usize| {
            let page = pages.slice(page * PAGE_SIZE, PAGE_SIZE).map_err(out_of_range)?;
            RingPages::new(page, PAGE_SIZE).map_err(out_of_range)
        };
        Ok(QueueRecords { tx: record(0)?, rx: record(1)? })
    }

    /// Maps the record of the control ring of the device `name`. A new record is empty.
    pub(super) fn of_control(&self, name: &str) -> io::Result<CtrlRecord> {
        let file = self.file(&control_name(name))?;
        rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, CtrlRecord::BYTES as u64)?;
        let pages = Mapping::new(&file, 0, CtrlRecord::BYTES, Protection::ReadWrite)?.lent();
        CtrlRecord::new(pages).map_err(out_of_range)
    }

    /// Removes the records of a device.
    pub(super) fn remove(&self, name: &str) {
        for file in [name, &control_name(name)] {
            match std::fs::remove_file(self.directory.join(file)) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    tracing::warn!(%name, %error, "its records were not removed");
                }
                _ => {}
            }
        }
    }

    fn file(&self, name: &str) -> io::Result<OwnedFd> {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let path = self.directory.join(name);
        Ok(rustix::fs::open(&path, flags, Mode::RUSR | Mode::WUSR)?)
    }
}

/// Returns the file name of a device's control ring.
fn control_name(device: &str) -> String {
    format!("{device}.control")
}

fn out_of_range(error: OutOfRange) -> io::Error {
    io::Error::other(error)
}

#[cfg(test)]
mod tests {
    use ringfence_ring::RingMemory;

    use super::*;

    #[test]
    fn records_persist_between_openings_until_removed() {
        let outer = tempfile::tempdir().unwrap();
        let path = outer.path().join("records");
        let filled = |queue| {
            let records = Records::open(&path).unwrap();
            let of = records.of("vif1.0", queue).unwrap();
            let mut bytes = [0; 2];
            of.tx.fetch(100, &mut bytes[..1]);
            of.rx.fetch(100, &mut bytes[1..]);
            of.tx.put(100, &[1]);
            of.rx.put(100, &[2]);
            bytes
        };
        assert_eq!(filled(0), [0, 0]);
        assert_eq!(filled(0), [1, 2]);
        assert_eq!(filled(3), [0, 0]);
        assert_eq!(filled(0), [1, 2]);
        Records::open(&path).unwrap().remove("vif1.0");
        assert_eq!(filled(0), [0, 0]);
        Records::open(&path).unwrap().remove("vif2.0");
    }
}
