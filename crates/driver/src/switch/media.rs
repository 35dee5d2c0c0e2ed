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
