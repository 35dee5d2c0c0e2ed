//! Marks of files below overlays.
//!
//! A write to a file damages each image above it. While a guest uses such an image, locks keep writers out (`file/lock.rs`).
//! Later the file looks like a disk again: a guest that starts with its old options, or that a toolstack reboots, would write
//! it. Whoever creates an overlay therefore names it in an extended attribute of the file below, and that file is opened for
//! writing only if the image is gone or is above another file by then.
//!
//! The attribute is a precaution against mistakes, not against the owner of the file, who can remove it. Some file systems
//! have no such attributes, and device nodes have none at all.

// #syscall daemon openat,fstat: the image above a file that an overlay was put on
// #syscall daemon pread64: its header
// #syscall daemon fgetxattr: the overlay that was put on a file

use std::ffi::OsStr;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags, XattrFlags};
use rustix::io::Errno;

use super::qcow2_header::{Header, HeaderError, path_of_name};

/// Name of the attribute. The value is the absolute path of the image.
const ATTRIBUTE: &str = "user.ringfence.overlay";

/// Maximum length in bytes of a path (`limits.h`).
const PATH_MAX: usize = 4096;

/// Names `overlay` as the image above the file at `below`, in place of an earlier one.
///
/// # Errors
///
/// Returns the system's error, for example of a file system without extended attributes.
pub(super) fn mark(below: &Path, overlay: &Path) -> io::Result<()> {
    let value = overlay.as_os_str().as_bytes();
    Ok(rustix::fs::setxattr(below, ATTRIBUTE, value, XattrFlags::empty())?)
}

/// Returns the path of the image that is above a file according to its mark.
pub(super) fn overlay_above(file: impl AsFd) -> Option<PathBuf> {
    let mut value = [0; PATH_MAX];
    let length = rustix::fs::fgetxattr(&file, ATTRIBUTE, &mut value[..]).ok()?;
    let overlay = PathBuf::from(OsStr::from_bytes(value.get(..length)?));
    (overlay.is_absolute() && is_above(&overlay, file)).then_some(overlay)
}

/// Returns `true` if the image `overlay` is above a file, or cannot be examined.
fn is_above(overlay: &Path, file: impl AsFd) -> bool {
    // O_NONBLOCK: opening a FIFO of that name must not block.
    let flags = OFlags::RDONLY | OFlags::NOCTTY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let image = match rustix::fs::open(overlay, flags, Mode::empty()) {
        Ok(image) => image,
        Err(error) => return !is_absent(error),
    };
    let header = match Header::read(image) {
        Ok(Ok(header)) => header,
        // Another file has the name by now.
        Ok(Err(HeaderError::Magic | HeaderError::Truncated { .. })) => return false,
        Ok(Err(_)) | Err(_) => return true,
    };
    let Some(backing) = header.backing else { return false };
    let Some(name) = path_of_name(&backing.name) else { return false };
    let path = overlay.parent().unwrap_or(Path::new("/")).join(name);
    let below = match rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()) {
        Ok(below) => below,
        Err(error) => return !is_absent(error),
    };
    match (rustix::fs::fstat(below), rustix::fs::fstat(file)) {
        (Ok(below), Ok(file)) => (below.st_dev, below.st_ino) == (file.st_dev, file.st_ino),
        _ => true,
    }
}

fn is_absent(error: Errno) -> bool {
    matches!(error, Errno::NOENT | Errno::NOTDIR)
}
