//! Disks of guests on files and connections that launchers opened.
//!
//! The driver domain's sandbox has no file system and no `/sys`. The launcher therefore opens and
//! locks the file, reads its properties, and passes both. For a disk on an NBD server the launcher
//! connects, and connects again after a loss. The driver domain alone uses the connection.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use ringfence_access::Mode;
use ringfence_block::storage::Disk;
use ringfence_block::storage::file::{Engine, FileDisk, OpenFile};
use ringfence_block::storage::qcow2::QcowDisk;
use ringfence_block::vbd::toolstack::VbdConfig;
use ringfence_memory::UringPool;
use ringfence_nbd::client::{Dialer, NbdDisk};
use ringfence_sys::descriptors::Descriptors;

use crate::replacement::MakeDisk;
use crate::switchboard::{DiskRequest, Medium};

/// Source of connections of a disk on an NBD server. Other disks have none.
pub(crate) type ConnectionSource = Option<Arc<Dialer>>;

/// Storage of a disk, and the toolstack's keys that describe it.
pub(super) struct OpenedMedium {
    pub(super) mode: Mode,
    pub(super) disk: Arc<dyn Disk>,
    pub(super) config: VbdConfig,
    pub(super) dialer: ConnectionSource,
}

/// Refusal of a message with more descriptors than its medium has.
const SURPLUS: &str = "there are too many descriptors";

fn text(error: &dyn std::fmt::Display) -> String {
    error.to_string()
}

/// Opens the storage that a launcher requests. `wake` is called when the disk needs a connection; `rings` serve files.
///
/// # Errors
///
/// Returns a text for the user of the launcher.
pub(super) fn open(
    request: &DiskRequest,
    fds: Descriptors,
    wake: Arc<dyn Fn() + Send + Sync>,
    rings: &Arc<UringPool>,
) -> Result<OpenedMedium, String> {
    let mode = Mode::for_disk(&request.mode).map_err(|e| text(&e))?;
    let (disk, dialer) = open_storage(&request.medium, fds.into_vec(), wake, rings)?;
    let (read_only, no_discard) = match &request.medium {
        Medium::File { facts, options } => (facts.read_only, !options.discard),
        Medium::Image { options, .. } => (options.read_only, !options.discard),
        Medium::Nbd(facts) => (facts.is_read_only(), false),
    };
    let config = VbdConfig { read_only, no_discard, ..VbdConfig::default() };
    Ok(OpenedMedium { mode, disk, config, dialer })
}

/// Opens storage on a file, the files of an image or a connection, which an NBD server may lack at first. `wake` is called when it needs a
/// connection from the returned dialer; `rings` serve a file.
///
/// # Errors
///
/// Returns a text for the user of the launcher.
pub(crate) fn open_storage(
    medium: &Medium,
    files: Vec<OwnedFd>,
    wake: Arc<dyn Fn() + Send + Sync>,
    rings: &Arc<UringPool>,
) -> Result<(Arc<dyn Disk>, ConnectionSource), String> {
    match medium {
        Medium::File { facts, options } => {
            check_engine(options.engine, rings)?;
            let mut files = files.into_iter();
            let (file, mark) = (files.next().ok_or("the file is missing")?, files.next());
            if files.next().is_some() {
                return Err(SURPLUS.to_owned());
            }
            let opened = OpenFile { file, facts: *facts, mark };
            let disk = FileDisk::new(opened, options).map_err(|e| text(&e))?;
            Ok((Arc::new(disk.with_rings(Arc::clone(rings))), None))
        }
        Medium::Image { chain, options } => {
            let disk = QcowDisk::handed(chain, files, options).map_err(|e| text(&e))?;
            Ok((Arc::new(disk), None))
        }
        Medium::Nbd(facts) => {
            let dialer = Arc::new(Dialer::new(wake).map_err(|e| text(&e))?);
            let stream = at_most_one(files)?;
            let disk = NbdDisk::handed(facts, stream, &dialer).map_err(|e| text(&e))?;
            Ok((Arc::new(disk), Some(dialer)))
        }
    }
}

/// Returns the maker of a disk on the same storage with another size.
pub(crate) fn resized(bytes: u64) -> MakeDisk {
    Box::new(move |old: &Arc<dyn Disk>| {
        let live = old.live().ok_or("only disks in files and on block devices are resized")?;
        live.resized(bytes).map_err(|error| text(&error))
    })
}

/// Refuses a disk that must have io_uring in a process without a free ring.
fn check_engine(engine: Engine, rings: &UringPool) -> Result<(), String> {
    if engine != Engine::IoUring || rings.left() > 0 {
        return Ok(());
    }
    let none_left = "no ring is left, or the switch began without a disk in a file";
    let why = rings.refusal().map_or_else(|| none_left.to_owned(), |error| text(error));
    Err(format!("engine=io_uring: {why}; engine=auto uses threads in this case"))
}

fn at_most_one(mut files: Vec<OwnedFd>) -> Result<Option<OwnedFd>, String> {
    let file = files.pop();
    if files.is_empty() { Ok(file) } else { Err(SURPLUS.to_owned()) }
}

#[cfg(test)]
mod tests {
    use ringfence_block::storage::QueueEngine;
    use ringfence_block::storage::file::FileOptions;

    use super::*;

    #[test]
    fn disk_that_must_have_io_uring_is_refused_without_a_free_ring() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("disk");
        std::fs::write(&path, [7; 4096]).unwrap();
        let open = |engine, rings: &Arc<UringPool>| {
            // Several at a time.
            let options = FileOptions { engine, read_only: true, ..FileOptions::default() };
            let OpenFile { file, facts, mark } = OpenFile::open(&path, &options).unwrap();
            let files = [file].into_iter().chain(mark).collect();
            open_storage(&Medium::File { facts, options }, files, Arc::new(|| {}), rings)
        };
        let rings = Arc::new(UringPool::new(0, 1));
        let why = open(Engine::IoUring, &rings).err().unwrap();
        assert!(why.starts_with("engine=io_uring: no ring is left"), "{why}");
        assert!(why.contains("engine=auto uses threads"), "{why}");
        for engine in [Engine::Auto, Engine::Threads] {
            let (disk, _) = open(engine, &rings).unwrap();
            let queue = disk.queue(1).unwrap();
            assert_eq!(queue.engine(), Some(QueueEngine::Threads), "{engine}");
        }
        let rings = Arc::new(UringPool::new(1, 4));
        if rings.refusal().is_some() {
            assert!(open(Engine::IoUring, &rings).is_err());
            return;
        }
        let (disk, _) = open(Engine::IoUring, &rings).unwrap();
        let first = disk.queue(1).unwrap();
        assert_eq!(first.engine(), Some(QueueEngine::IoUring));
        assert!(disk.queue(1).is_err(), "no other engine is used in its place");
        assert!(open(Engine::IoUring, &rings).is_err(), "all rings are in use");
        drop(first);
        assert!(disk.queue(1).is_ok(), "the ring is free again");
    }
}
