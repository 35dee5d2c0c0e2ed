//! The kernel's client of the protocol NBD: a block device whose content is at the other end of a socket.
//!
//! Only who may administrate the system may use it. The device is driven by `ioctl` and not by netlink,
//! since then it ends with the process that made it, whatever becomes of that.

// #syscall none: the node in /dev is made by the launcher, which no list confines

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::io::Errno;
use rustix::ioctl::{IntegerSetter, NoArg, ioctl, opcode};

/// Numbers in `linux/nbd.h`.
const SET_SOCK: u32 = opcode::none(0xAB, 0);
const SET_BLKSIZE: u32 = opcode::none(0xAB, 1);
const DO_IT: u32 = opcode::none(0xAB, 3);
const CLEAR_SOCK: u32 = opcode::none(0xAB, 4);
const SET_SIZE_BLOCKS: u32 = opcode::none(0xAB, 7);
const DISCONNECT: u32 = opcode::none(0xAB, 8);
const SET_TIMEOUT: u32 = opcode::none(0xAB, 9);
const SET_FLAGS: u32 = opcode::none(0xAB, 10);

/// Devices that are looked at: more than any kernel makes unasked.
const DEVICES: u32 = 256;

/// What the kernel has to know of an export.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NbdExport {
    /// Bytes of the disk.
    pub bytes: u64,
    /// 512 to the size of a page.
    pub block_size: u32,
    /// What was agreed on in the handshake (`NBD_FLAG_*`).
    pub flags: u16,
    /// How long a request may take until it fails.
    pub timeout: Duration,
}

/// A device that this process has taken.
#[derive(Debug)]
pub struct NbdDevice {
    file: File,
    path: PathBuf,
}

/// Calls an operation that takes a number.
fn set<const OPCODE: u32>(file: &File, value: usize) -> rustix::io::Result<()> {
    // SAFETY: the operations of `linux/nbd.h` that are called here take a number, not an address.
    unsafe { ioctl(file, IntegerSetter::<OPCODE>::new_usize(value)) }
}

/// Calls an operation that takes nothing.
fn call<const OPCODE: u32>(file: &File) -> rustix::io::Result<()> {
    // SAFETY: the operations of `linux/nbd.h` that are called here take no argument.
    unsafe { ioctl(file, NoArg::<OPCODE>::new()) }
}

impl NbdDevice {
    /// Whether this kernel has such devices at all.
    pub fn exist() -> bool {
        Path::new("/dev/nbd0").exists()
    }

    /// Takes the first device that nobody uses, for an export at the other end of `socket`, with which
    /// everything is agreed. [`NbdDevice::serve`] must be called by the same thread.
    ///
    /// # Errors
    ///
    /// The kernel's; `EBUSY` when all are in use.
    pub fn take(socket: BorrowedFd<'_>, export: &NbdExport) -> io::Result<NbdDevice> {
        for number in 0..DEVICES {
            let path = PathBuf::from(format!("/dev/nbd{number}"));
            if !path.exists() {
                break;
            }
            if is_taken(number) {
                continue;
            }
            let file = File::options().read(true).write(true).open(&path)?;
            let socket = usize::try_from(socket.as_raw_fd()).map_err(|_| Errno::BADF)?;
            match set::<SET_SOCK>(&file, socket) {
                Ok(()) => {}
                // Somebody was faster.
                Err(Errno::BUSY | Errno::INVAL) => continue,
                Err(error) => return Err(error.into()),
            }
            let device = NbdDevice { file, path };
            device.describe(export)?;
            return Ok(device);
        }
        Err(Errno::BUSY.into())
    }

    fn describe(&self, export: &NbdExport) -> io::Result<()> {
        let number = |value: u64| usize::try_from(value).map_err(|_| Errno::OVERFLOW);
        let blocks = export.bytes / u64::from(export.block_size.max(1));
        set::<SET_BLKSIZE>(&self.file, number(export.block_size.into())?)?;
        set::<SET_SIZE_BLOCKS>(&self.file, number(blocks)?)?;
        set::<SET_TIMEOUT>(&self.file, number(export.timeout.as_secs())?)?;
        Ok(set::<SET_FLAGS>(&self.file, export.flags.into())?)
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Another handle, to end it from another thread.
    ///
    /// # Errors
    ///
    /// When there are too many descriptors.
    pub fn ending(&self) -> io::Result<NbdEnding> {
        Ok(NbdEnding(self.file.try_clone()?))
    }

    /// Is the device: returns when it has ended.
    ///
    /// # Errors
    ///
    /// Why, unless it was told to.
    pub fn serve(&self) -> io::Result<()> {
        let served = call::<DO_IT>(&self.file);
        // Whoever opens it next finds it empty.
        let _ = call::<CLEAR_SOCK>(&self.file);
        Ok(served?)
    }
}

/// Ends a device.
#[derive(Debug)]
pub struct NbdEnding(File);

impl NbdEnding {
    /// Writes what is not written yet, and ends the device.
    ///
    /// # Errors
    ///
    /// When something could not be written; it is ended all the same.
    pub fn end(&self) -> io::Result<()> {
        let written = rustix::fs::fsync(self.0.as_fd());
        let _ = call::<DISCONNECT>(&self.0);
        Ok(written?)
    }
}

/// Whether somebody's process is this device.
fn is_taken(number: u32) -> bool {
    Path::new(&format!("/sys/block/nbd{number}/pid")).exists()
}

/// Whether the device can be read and written.
pub fn is_ready(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let of = |file: &str| std::fs::read_to_string(format!("/sys/block/{name}/{file}"));
    of("pid").is_ok() && of("size").is_ok_and(|size| size.trim() != "0")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_numbers_are_those_of_the_kernel() {
        assert_eq!([SET_SOCK, DO_IT, SET_FLAGS], [0xAB00, 0xAB03, 0xAB0A]);
    }

    #[test]
    fn without_devices_none_is_taken() {
        if NbdDevice::exist() {
            // With them this is a test of `cargo xtask vm linux nbd`.
            return;
        }
        let (socket, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        let timeout = Duration::from_secs(1);
        let export = NbdExport { bytes: 1 << 20, block_size: 512, flags: 1, timeout };
        let error = NbdDevice::take(socket.as_fd(), &export).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(Errno::BUSY.raw_os_error()));
    }
}
