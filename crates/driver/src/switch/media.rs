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
use ringfence_nbd::client::{Dialer, NbdDisk, NbdFacts};
use ringfence_sandbox::channel::expect_fds;
use ringfence_sys::descriptors::Descriptors;

use crate::switchboard::{DiskRequest, Medium};

/// Storage of a disk, and the toolstack's keys that describe it.
pub(super) struct OpenedMedium {
    pub(super) mode: Mode,
    pub(super) disk: Arc<dyn Disk>,
    pub(super) config: VbdConfig,
    /// Source of connections of a disk on an NBD server.
    pub(super) dialer: Option<Arc<Dialer>>,
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
    match &request.medium {
        Medium::File { facts, options } => {
            let [file] = expect_fds(fds).map_err(|e| text(&e))?;
            let disk = Arc::new(open_file(file, *facts, options)?);
            let (read_only, no_discard) = (facts.read_only, !options.discard);
            let config = VbdConfig { read_only, no_discard, ..VbdConfig::default() };
            Ok(OpenedMedium { mode, disk, config, dialer: None })
        }
        Medium::Image { chain, options } => {
            let disk = QcowDisk::handed(chain, fds.into_vec(), options).map_err(|e| text(&e))?;
            let read_only = options.read_only;
            let config =
                VbdConfig { read_only, no_discard: !options.discard, ..VbdConfig::default() };
            Ok(OpenedMedium { mode, disk: Arc::new(disk), config, dialer: None })
        }
        Medium::Nbd(facts) => {
            let (disk, dialer) = open_remote(facts, fds, wake)?;
            let read_only = facts.is_read_only();
            let config = VbdConfig { read_only, no_discard: false, ..VbdConfig::default() };
            Ok(OpenedMedium { mode, disk: Arc::new(disk), config, dialer: Some(dialer) })
        }
    }
}

fn open_file(file: OwnedFd, facts: FileFacts, options: &FileOptions) -> Result<FileDisk, String> {
    // io_uring would execute operations that the seccomp filter does not see, so it is not allowed
    // here. Use a thread pool.
    let options = FileOptions { engine: Engine::Threads, ..options.clone() };
    FileDisk::new(OpenFile { file, facts }, &options).map_err(|e| text(&e))
}

fn open_remote(
    facts: &NbdFacts,
    fds: Descriptors,
    wake: Arc<dyn Fn() + Send + Sync>,
) -> Result<(NbdDisk, Arc<Dialer>), String> {
    let first = match fds.is_empty() {
        true => None,
        false => Some(expect_fds::<1>(fds).map_err(|e| text(&e))?).map(|[fd]| fd),
    };
    let dialer = Arc::new(Dialer::new(wake).map_err(|e| text(&e))?);
    let disk = NbdDisk::handed(facts, first, &dialer).map_err(|e| text(&e))?;
    Ok((disk, dialer))
}
