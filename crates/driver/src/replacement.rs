//! Replacement of a vbd's disk while its guest uses it: by an overlay above it (a snapshot), or by the same disk with another
//! size.
//!
//! ```text
//! control thread                                   thread of the replacement
//!   Replacement::begin: the rings pause
//!   (the last request is answered) ──────────────>   flushes the disk, makes the other one, reads from it
//!   DriverDomain::commit_disk  <──────────────────
//!   the rings continue on the other disk
//!   DriverDomain::disk_replaced
//! ```
//!
//! After the flush the old disk has every write that was acknowledged to the guest, and no other: a consistent point. If a
//! step fails, the rings continue on the old disk.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError, channel};

use ringfence_block::storage::file::{check_growth, grown};
use ringfence_block::storage::{Disk, Geometry, Op, Request};
use ringfence_block::vbd::backend::VbdBackend;
use ringfence_memory::Mapping;
use ringfence_platform::Platform;
use ringfence_sys::poll::wait_readable;
use ringfence_wire::xenbus::DeviceId;
use ringfence_xenstore::StoreClient;

use crate::domain::{Backends, DriverDomain};
use crate::vbds::Vbd;

/// Maker of the disk that replaces another one. It runs while no request is in flight, on a thread that may block.
pub(crate) type MakeDisk = Box<dyn FnOnce(&Arc<dyn Disk>) -> Result<Arc<dyn Disk>, String> + Send>;

/// Disk that was made, or the reason for which there is none.
type Made = Result<Arc<dyn Disk>, String>;

/// Replacement that has begun.
pub(crate) enum Replacement {
    /// Requests are still in flight.
    Draining(MakeDisk),
    /// A thread makes the other disk.
    Making(Receiver<Made>),
}

/// State of a replacement after a look at it.
enum Progress {
    Waits(Replacement),
    Over(Made),
}

impl Replacement {
    /// Begins to replace the disk of a vbd.
    ///
    /// # Errors
    ///
    /// Returns a text for the user if the disk cannot be replaced now.
    pub(crate) fn begin<S>(vbd: &mut Vbd<S>, make: MakeDisk) -> Result<(), String> {
        if vbd.replacement.is_some() {
            return Err("another change of this disk has not ended yet: try again later".to_owned());
        }
        if vbd.backend.disk().is_none() {
            return Err("its storage is not open".to_owned());
        }
        vbd.backend.begin_replacement();
        vbd.replacement = Some(Replacement::Draining(make));
        Ok(())
    }

    /// Advances the replacement. `wake` is called when there is more to do.
    fn advance(self, backend: &mut VbdBackend, wake: impl FnOnce() + Send + 'static) -> Progress {
        match self {
            Replacement::Draining(make) if backend.is_paused() => {
                let Some(old) = backend.disk().map(Arc::clone) else {
                    return Progress::Over(Err("its storage is not open any more".to_owned()));
                };
                let (sender, receiver) = channel();
                let work = move || {
                    // A device that was removed meanwhile has dropped the receiver.
                    let _ = sender.send(make_other(&old, make));
                    drop(old);
                    wake();
                };
                match std::thread::Builder::new().name("replace-disk".to_owned()).spawn(work) {
                    Ok(_) => Progress::Waits(Replacement::Making(receiver)),
                    Err(error) => Progress::Over(Err(error.to_string())),
                }
            }
            Replacement::Making(receiver) => match receiver.try_recv() {
                Ok(made) => Progress::Over(made),
                Err(TryRecvError::Empty) => Progress::Waits(Replacement::Making(receiver)),
                Err(TryRecvError::Disconnected) => {
                    Progress::Over(Err("the thread that made the disk ended".to_owned()))
                }
            },
            waits => Progress::Waits(waits),
        }
    }
}

/// Returns the maker of a disk on the same storage, which it enlarges to `wanted` bytes first. Without a size, the storage was
/// enlarged already.
pub(crate) fn grow(wanted: Option<u64>) -> MakeDisk {
    Box::new(move |old: &Arc<dyn Disk>| {
        let live = old.live().ok_or("only disks in files and on block devices are resized")?;
        let Geometry { bytes: before, sector_size, .. } = old.geometry();
        let text = |error: io::Error| error.to_string();
        if let Some(wanted) = wanted {
            check_growth(before, wanted, sector_size)?;
            live.enlarge(wanted).map_err(text)?;
        }
        let bytes = grown(before, live.storage_bytes().map_err(text)?, sector_size)?;
        live.resized(bytes).map_err(text)
    })
}

/// Flushes a disk that nobody uses and makes the one that replaces it.
fn make_other(old: &Arc<dyn Disk>, make: MakeDisk) -> Made {
    let text = |what: &str, error: io::Error| format!("{what}: {error}");
    execute(&**old, Op::Flush).map_err(|error| text("the disk was not flushed", error))?;
    let other = make(old)?;
    let (before, after) = (old.geometry(), other.geometry());
    if after.bytes < before.bytes || after.sector_size != before.sector_size {
        return Err(format!(
            "the disk has {} bytes in sectors of {}, and the other one {} in sectors of {}",
            before.bytes, before.sector_size, after.bytes, after.sector_size
        ));
    }
    if after.read_only != before.read_only {
        return Err("the other disk is read-only".to_owned());
    }
    execute(&*other, Op::Read).map_err(|error| text("the new disk cannot be read", error))?;
    Ok(other)
}

/// Flushes a disk, or reads its first sector.
fn execute(disk: &dyn Disk, op: Op) -> io::Result<()> {
    let sector = disk.geometry().sector_size as usize;
    let memory = Mapping::private(sector.next_multiple_of(4096))?.lent();
    let (len, memory) = match op {
        Op::Read => (sector as u64, Some(memory.slice(0, sector).map_err(io::Error::other)?)),
        _ => (0, None),
    };
    let segments = memory.into_iter().map(Into::into).collect();
    let (mut queue, mut done) = (disk.queue(1)?, vec![]);
    queue.submit(Request { token: 0, op, offset: 0, len, segments });
    queue.kick();
    loop {
        queue.reap(&mut done);
        if let Some(done) = done.pop() {
            return done.result.map_err(io::Error::from_raw_os_error);
        }
        wait_readable(queue.wait_fd(), None)?;
    }
}

impl<P: Platform, D: DriverDomain> Backends<P, D> {
    /// Advances the replacement of a vbd's disk, if one has begun.
    pub(crate) fn advance_replacement(
        &mut self,
        device: &DeviceId,
        vbd: &mut Vbd<D::Vbd>,
        store: &mut StoreClient,
    ) {
        let Some(replacement) = vbd.replacement.take() else { return };
        let wake = self.vbds.notifier(*device);
        let made = match replacement.advance(&mut vbd.backend, wake) {
            Progress::Waits(replacement) => {
                vbd.replacement = Some(replacement);
                return;
            }
            Progress::Over(made) => made,
        };
        let old = vbd.backend.disk().map(Arc::clone);
        let made = made.and_then(|disk| {
            // A process that takes over from here on uses the other disk.
            self.domain.commit_disk(device, vbd, store)?;
            Ok(disk)
        });
        let outcome = match made {
            Ok(disk) => {
                let replaced = vbd.backend.end_replacement(Some(disk));
                replaced.map_err(|error| format!("the new disk cannot be used: {error}"))
            }
            Err(why) => {
                // Without another disk there is no error: the device goes on, or is closed.
                let _ = vbd.backend.end_replacement(None);
                Err(why)
            }
        };
        self.domain.disk_replaced(device, vbd, store, old, outcome);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use ringfence_block::storage::DiskQueue;
    use ringfence_block::storage::file::{CacheMode, FileDisk, FileOptions};
    use ringfence_block::storage::memory::MemoryDisk;

    use super::*;

    /// Disk that notes what is done to it, and whose first operation may fail.
    struct Noted {
        disk: MemoryDisk,
        notes: Arc<Mutex<Vec<&'static str>>>,
        name: &'static str,
        is_broken: bool,
    }

    impl Disk for Noted {
        fn geometry(&self) -> Geometry {
            self.disk.geometry()
        }

        fn queue(&self, depth: u32) -> io::Result<Box<dyn DiskQueue>> {
            self.notes.lock().unwrap().push(self.name);
            match self.is_broken {
                true => Err(rustix::io::Errno::IO.into()),
                false => self.disk.queue(depth),
            }
        }
    }

    #[test]
    fn disk_is_flushed_before_another_is_made_and_that_is_read() {
        let notes: Arc<Mutex<Vec<&'static str>>> = Arc::default();
        let noted = |name, bytes, is_broken| -> Arc<dyn Disk> {
            let (disk, notes) = (MemoryDisk::new(bytes, 512).unwrap(), Arc::clone(&notes));
            Arc::new(Noted { disk, notes, name, is_broken })
        };
        let make = |disk: Arc<dyn Disk>| -> MakeDisk {
            let notes = Arc::clone(&notes);
            Box::new(move |_| {
                notes.lock().unwrap().push("make");
                Ok(disk)
            })
        };
        let old = noted("flush", 1 << 20, false);
        assert!(make_other(&old, make(noted("read", 2 << 20, false))).is_ok());
        assert_eq!(*notes.lock().unwrap(), ["flush", "make", "read"]);
        for (other, why) in [
            (noted("read", 1 << 19, false), "has 1048576 bytes"),
            (noted("read", 1 << 20, true), "cannot be read"),
            (Arc::new(MemoryDisk::new(1 << 20, 4096).unwrap()), "sectors"),
        ] {
            assert!(make_other(&old, make(other)).err().unwrap().contains(why), "{why}");
        }
        notes.lock().unwrap().clear();
        let broken = noted("flush", 1 << 20, true);
        let why = make_other(&broken, make(noted("read", 1 << 20, false))).err().unwrap();
        assert!(why.contains("not flushed"), "{why}");
        assert_eq!(*notes.lock().unwrap(), ["flush"], "nothing is made above it");
    }

    #[test]
    fn file_is_enlarged_to_whole_sectors_and_memory_is_not() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("disk");
        std::fs::write(&path, [0; 8192]).unwrap();
        let options = FileOptions { cache: CacheMode::WriteBack, ..FileOptions::default() };
        let disk: Arc<dyn Disk> = Arc::new(FileDisk::open(&path, &options).unwrap());
        assert!(grow(None)(&disk).err().unwrap().contains("enlarge that first"));
        assert!(grow(Some(8192))(&disk).err().unwrap().contains("only grows"));
        assert!(grow(Some(9000))(&disk).err().unwrap().contains("no multiple"));
        let larger = grow(Some(16384))(&disk).unwrap();
        assert_eq!((disk.geometry().bytes, larger.geometry().bytes), (8192, 16384));
        std::fs::File::options().write(true).open(&path).unwrap().set_len(16384 + 1000).unwrap();
        assert_eq!(grow(None)(&larger).unwrap().geometry().bytes, 16384 + 512);
        let memory: Arc<dyn Disk> = Arc::new(MemoryDisk::new(8192, 512).unwrap());
        assert!(grow(None)(&memory).is_err());
    }
}
