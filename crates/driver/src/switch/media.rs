//! Disks of guests on files and connections that launchers opened.
//!
//! The driver domain's sandbox has no file system and no `/sys`. The launcher therefore opens and
//! locks the file, reads its properties, and passes both. For a disk on an NBD server the launcher
//! connects, and connects again after a loss. The driver domain alone uses the connection.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use ringfence_access::Mode;
use ringfence_block::storage::Disk;
use ringfence_block::storage::file::{Engine, FileDisk, FileFacts, FileOptions, OpenFile};
use ringfence_block::storage::qcow2::QcowDisk;
use ringfence_block::vbd::toolstack::VbdConfig;
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

fn text(error: &dyn std::fmt::Display) -> String {
    error.to_string()
}

/// Opens the storage that a launcher requests. `wake` is called when the disk needs a connection.
///
/// # Errors
///
/// Returns a text for the user of the launcher.
pub(super) fn open(
    request: &DiskRequest,
    fds: Descriptors,
    wake: Arc<dyn Fn() + Send + Sync>,
) -> Result<OpenedMedium, String> {
    let mode = Mode::for_disk(&request.mode).map_err(|e| text(&e))?;
    let (disk, dialer) = open_storage(&request.medium, fds.into_vec(), wake)?;
    let (read_only, no_discard) = match &request.medium {
        Medium::File { facts, options } => (facts.read_only, !options.discard),
        Medium::Image { options, .. } => (options.read_only, !options.discard),
        Medium::Nbd(facts) => (facts.is_read_only(), false),
    };
    let config = VbdConfig { read_only, no_discard, ..VbdConfig::default() };
    Ok(OpenedMedium { mode, disk, config, dialer })
}

/// Opens storage on a file, the files of an image or a connection, which an NBD server may lack at first. `wake` is called when it needs a
/// connection from the returned dialer.
///
/// # Errors
///
/// Returns a text for the user of the launcher.
pub(crate) fn open_storage(
    medium: &Medium,
    files: Vec<OwnedFd>,
    wake: Arc<dyn Fn() + Send + Sync>,
) -> Result<(Arc<dyn Disk>, ConnectionSource), String> {
    match medium {
        Medium::File { facts, options } => {
            let file = at_most_one(files)?.ok_or("the file is missing")?;
            Ok((Arc::new(open_file(file, *facts, options)?), None))
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

fn at_most_one(mut files: Vec<OwnedFd>) -> Result<Option<OwnedFd>, String> {
    let file = files.pop();
    if files.is_empty() { Ok(file) } else { Err("there are too many descriptors".to_owned()) }
}

fn open_file(file: OwnedFd, facts: FileFacts, options: &FileOptions) -> Result<FileDisk, String> {
    // io_uring would execute operations that the seccomp filter does not see, so it is not allowed
    // here. Use a thread pool.
    let options = FileOptions { engine: Engine::Threads, ..options.clone() };
    FileDisk::new(OpenFile { file, facts }, &options).map_err(|e| text(&e))
}
