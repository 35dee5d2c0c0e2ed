//! Reasons for which a file cannot serve as a disk, with advice on the options of `run` and of a Xen guest's disk.

use std::io;
use std::path::{Path, PathBuf};

use super::super::signature::Format;

/// Advice on options that declare a disk raw: of `ringfence run --disk` and of a Xen guest's configuration.
const RAW_HINT: &str = "--disk FILE,format=raw; for a Xen guest target=raw:FILE";

/// Options that declare a disk an image.
const QCOW2_OPTIONS: &str = "--disk FILE,format=qcow2; for a Xen guest target=qcow2:FILE";

/// Advice on options for disks that are not written.
const READ_ONLY_HINT: &str = "--disk FILE,ro; for a Xen guest mode `r`";

/// Reasons for which a file cannot serve as a disk.
#[derive(Debug, thiserror::Error)]
pub enum OpenFileError {
    /// System call that failed.
    #[error("{what} {}: {source}", path.display())]
    System { what: &'static str, path: PathBuf, source: io::Error },
    /// File that is neither regular nor a block device.
    #[error("{} is neither a file nor a block device: a disk is one of these", path.display())]
    Kind { path: PathBuf },
    /// File of size 0.
    #[error(
        "{} has {bytes} bytes, which is no sector: give it a size (truncate -s 1G {})",
        path.display(), path.display()
    )]
    Empty { path: PathBuf, bytes: u64 },
    /// File whose size is no multiple of the sector size.
    #[error(
        "{} has {bytes} bytes, which is no multiple of its sectors of {sector_size}: the last bytes would be \
         missing from the disk. Pad it (truncate -s {} {})",
        path.display(), bytes.next_multiple_of(u64::from(*sector_size)), path.display()
    )]
    Odd {
        path: PathBuf,
        bytes: u64,
        /// Sector size in bytes.
        sector_size: u32,
    },
    /// File with the signature of an image format that is not raw.
    #[error(
        "{} is {format}, and would be destroyed as the raw disk that is served: {}convert it \
         (qemu-img convert -O raw), or, if these bytes are a guest's own on a raw disk, say so ({RAW_HINT})",
        path.display(), image_hint(*format)
    )]
    NotRaw { path: PathBuf, format: Format },
    /// Sector size that is invalid, or smaller than that of the device.
    #[error("sectors of {wanted} bytes cannot be had of {}: {why}", path.display())]
    Sector {
        path: PathBuf,
        /// Requested sector size in bytes.
        wanted: u32,
        why: String,
    },
    /// File that can be read only.
    #[error("{} cannot be written: {source}. If the disk is read alone, say so ({READ_ONLY_HINT})", path.display())]
    NotWritable { path: PathBuf, source: io::Error },
    /// File that an image is above, whose content a write would change.
    #[error(
        "{} is below {}, and writing it would damage that overlay: serve the overlay ({QCOW2_OPTIONS}), or remove it to go \
         back to what is below it, or read {} alone ({READ_ONLY_HINT})",
        path.display(), overlay.display(), path.display()
    )]
    BelowOverlay { path: PathBuf, overlay: PathBuf },
    /// File that another process has locked.
    #[error("{} is in use {holder}: stop that one first, or open both read-only", path.display())]
    InUse { path: PathBuf, holder: LockHolder },
}

/// Holder of a lock that contradicts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LockHolder {
    /// Process that serves the file as a disk, by `flock`.
    Disk,
    /// I/O of a process that ended.
    Ended,
    /// Program with QEMU's locks, and the permission in question.
    Qemu(&'static str),
}

impl std::fmt::Display for LockHolder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            LockHolder::Disk => f.write_str("as a disk by another process (it holds a lock)"),
            LockHolder::Ended => f.write_str("by the last requests of a process that ended"),
            LockHolder::Qemu(permission) => {
                write!(f, "by QEMU or one of its tools (which hold a \"{permission}\" lock)")
            }
        }
    }
}

/// Returns the advice to serve a file of a format as an image.
fn image_hint(format: Format) -> String {
    match format {
        Format::Qcow => format!("serve it as an image ({QCOW2_OPTIONS}), "),
        _ => String::new(),
    }
}

pub(super) fn system<E: Into<io::Error>>(
    what: &'static str,
    path: &Path,
) -> impl FnOnce(E) -> OpenFileError {
    let path = path.to_owned();
    move |error| OpenFileError::System { what, path, source: error.into() }
}
