//! Size of an open file, and its growth while a guest uses it as a disk.

// #syscall daemon fstat: how large a disk is now
// #syscall daemon ftruncate: a disk that an administrator enlarges

use std::io;
use std::os::fd::OwnedFd;

use ringfence_sys::blkdev;

use super::facts::FileKind;

/// Returns the size in bytes of an open file or block device.
///
/// # Errors
///
/// Returns the system's error.
pub fn measure(file: &OwnedFd, kind: FileKind) -> io::Result<u64> {
    match kind {
        FileKind::Regular => Ok(rustix::fs::fstat(file)?.st_size.max(0).cast_unsigned()),
        FileKind::BlockDevice => blkdev::size(file),
    }
}

/// Checks the size that a disk in use shall get.
///
/// # Errors
///
/// Returns a text for the user.
pub fn check_growth(before: u64, wanted: u64, sector_size: u32) -> Result<(), String> {
    if wanted <= before {
        return Err(format!(
            "the disk has {before} bytes, and a disk in use only grows: {wanted} bytes are no more"
        ));
    }
    match wanted.is_multiple_of(sector_size.into()) {
        true => Ok(()),
        false => Err(format!(
            "{wanted} bytes are no multiple of the disk's sectors of {sector_size} bytes"
        )),
    }
}

/// Returns the size that a disk in use gets, of which the storage has `found` bytes now.
///
/// # Errors
///
/// Returns a text for the user if the storage has not grown by a sector.
pub fn grown(before: u64, found: u64, sector_size: u32) -> Result<u64, String> {
    let whole = found - found % u64::from(sector_size);
    match whole {
        whole if whole > before => Ok(whole),
        whole if whole == before => Err(format!(
            "the disk has all of the {before} bytes of its storage: enlarge that first, or name a size"
        )),
        whole => Err(format!(
            "the disk has {before} bytes and its storage only {whole}: a disk in use only grows"
        )),
    }
}

/// Enlarges an open file. A smaller size changes nothing.
///
/// # Errors
///
/// Returns the system's error, and an error for a block device.
pub fn enlarge(file: &OwnedFd, kind: FileKind, bytes: u64) -> io::Result<()> {
    if kind == FileKind::BlockDevice {
        return Err(io::Error::other(
            "a block device is enlarged by its own tools, for example lvextend: do that, then leave out the size",
        ));
    }
    if bytes > measure(file, kind)? {
        rustix::fs::ftruncate(file, bytes)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn disk_in_use_takes_larger_sizes_of_whole_sectors_alone() {
        assert_eq!(check_growth(8192, 8192 + 512, 512), Ok(()));
        for (wanted, sector_size, why) in
            [(8192, 512, "only grows"), (0, 512, "only grows"), (8192 + 512, 4096, "no multiple")]
        {
            assert!(check_growth(8192, wanted, sector_size).unwrap_err().contains(why));
        }
        assert_eq!(grown(8192, 8192 + 4096 + 511, 512), Ok(8192 + 4096));
        for (found, why) in [(8192, "enlarge that first"), (8700, "enlarge"), (4096, "only 4096")] {
            assert!(grown(8192, found, 4096).unwrap_err().contains(why), "{found}");
        }
    }

    #[test]
    fn file_grows_and_never_shrinks() {
        let file: OwnedFd = tempfile::tempfile().unwrap().into();
        enlarge(&file, FileKind::Regular, 8192).unwrap();
        enlarge(&file, FileKind::Regular, 4096).unwrap();
        assert_eq!(measure(&file, FileKind::Regular).unwrap(), 8192);
        assert!(enlarge(&file, FileKind::BlockDevice, 1 << 20).is_err());
    }
}
