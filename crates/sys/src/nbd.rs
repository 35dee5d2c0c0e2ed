//! Kernel NBD client: a block device whose contents are at the other end of a socket.
//!
//! Only a process with `CAP_SYS_ADMIN` may use it. The device is driven by `ioctl`, not by netlink, so the
//! kernel ends it when the serving process exits for any reason.

// #syscall none: the node in /dev is made by the launcher, which no list confines

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::io::Errno;
use rustix::ioctl::{IntegerSetter, NoArg, ioctl, opcode};

/// Numbers of the ioctls in `linux/nbd.h`.
const SET_SOCK: u32 = opcode::none(0xAB, 0);
const SET_BLKSIZE: u32 = opcode::none(0xAB, 1);
const DO_IT: u32 = opcode::none(0xAB, 3);
const CLEAR_SOCK: u32 = opcode::none(0xAB, 4);
const SET_SIZE_BLOCKS: u32 = opcode::none(0xAB, 7);
const DISCONNECT: u32 = opcode::none(0xAB, 8);
const SET_TIMEOUT: u32 = opcode::none(0xAB, 9);
const SET_FLAGS: u32 = opcode::none(0xAB, 10);

/// Maximum number of devices that are searched, more than a kernel creates by default.
const DEVICES: u32 = 256;

/// Description of an export for the kernel.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NbdExport {
    /// Size of the disk in bytes.
    pub bytes: u64,
    /// Block size in bytes: 512 to the size of a page.
    pub block_size: u32,
    /// Transmission flags of the handshake (`NBD_FLAG_*`).
    pub flags: u16,
    /// Time limit of a request; the kernel counts whole seconds.
    pub timeout: Duration,
}

/// NBD device that this process occupies.
#[derive(Debug)]
pub struct NbdDevice {
    file: File,
    path: PathBuf,
}

/// Calls an operation with a number as its argument.
fn set<const OPCODE: u32>(file: &File, value: usize) -> rustix::io::Result<()> {
    // SAFETY: the operations of `linux/nbd.h` that are called here take a number, not an address.
    unsafe { ioctl(file, IntegerSetter::<OPCODE>::new_usize(value)) }
}

/// Calls an operation without an argument.
fn call<const OPCODE: u32>(file: &File) -> rustix::io::Result<()> {
    // SAFETY: the operations of `linux/nbd.h` that are called here take no argument.
    unsafe { ioctl(file, NoArg::<OPCODE>::new()) }
}

impl NbdDevice {
    /// Returns `true` if this kernel has NBD devices.
    pub fn exist() -> bool {
        Path::new("/dev/nbd0").exists()
    }

    /// Returns the paths of all device nodes.
    pub fn paths() -> Vec<PathBuf> {
        let paths = (0..DEVICES).map(path_of);
        paths.take_while(|path| path.exists()).collect()
    }

    /// Occupies the first free device for an export at the other end of `socket`, on which the handshake is
    /// complete. The same thread must call [`NbdDevice::serve`].
    ///
    /// # Errors
    ///
    /// Returns the kernel's error, `EBUSY` if no device is free.
    pub fn take(socket: BorrowedFd<'_>, export: &NbdExport) -> io::Result<NbdDevice> {
        for number in 0..DEVICES {
            let path = path_of(number);
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
                // Another process occupied the device first.
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

    /// Returns the path of the device node.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns a handle that ends the device from another thread.
    ///
    /// # Errors
    ///
    /// Returns the kernel's error if it refuses another descriptor.
    pub fn ending(&self) -> io::Result<NbdEnding> {
        Ok(NbdEnding(self.file.try_clone()?))
    }

    /// Serves the device. Blocks until the device has ended.
    ///
    /// # Errors
    ///
    /// Returns the kernel's error if the device ended for another reason than [`NbdEnding::end`].
    pub fn serve(&self) -> io::Result<()> {
        let served = call::<DO_IT>(&self.file);
        // The device is empty for the next process that opens it.
        let _ = call::<CLEAR_SOCK>(&self.file);
        Ok(served?)
    }
}

/// Handle that ends a device.
#[derive(Debug)]
pub struct NbdEnding(File);

impl NbdEnding {
    /// Flushes pending writes to the export, and ends the device.
    ///
    /// # Errors
    ///
    /// Returns the error of the flush. The device is ended in any case.
    pub fn end(&self) -> io::Result<()> {
        let written = rustix::fs::fsync(self.0.as_fd());
        let _ = call::<DISCONNECT>(&self.0);
        Ok(written?)
    }
}

/// Returns `true` if a process serves the device.
fn is_taken(number: u32) -> bool {
    Path::new(&format!("/sys/block/nbd{number}/pid")).exists()
}

/// Returns `true` if the device is served and has a size, so that it can be read and written.
pub fn is_ready(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let of = |file: &str| std::fs::read_to_string(format!("/sys/block/{name}/{file}"));
    of("pid").is_ok() && of("size").is_ok_and(|size| size.trim() != "0")
}

fn path_of(number: u32) -> PathBuf {
    PathBuf::from(format!("/dev/nbd{number}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operation_numbers_are_those_of_the_kernel() {
        assert_eq!([SET_SOCK, DO_IT, SET_FLAGS], [0xAB00, 0xAB03, 0xAB0A]);
    }

    #[test]
    fn take_without_devices_returns_busy() {
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
