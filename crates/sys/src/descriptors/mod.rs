//! Descriptors that come from a peer, and sockets that take none.
//!
//! A peer can send any open file over a Unix socket. Closing the last reference may then block: a TCP
//! socket with `SO_LINGER` waits for its peer, a file of a user-space file system waits for its daemon.
//! Two rules keep that away from a thread that serves others:
//!
//! * A socket that takes no descriptors refuses them ([`ByteSocket`], [`refuse_descriptors`]): from
//!   Linux 6.16 on the sender gets `EPERM`. On an older kernel each read is preceded by a look
//!   (`MSG_PEEK`) that leaves the descriptors in the queue.
//! * A message that may have descriptors is looked at first, too ([`receive_message`]). The look makes
//!   duplicates, so that no reference that the kernel drops for this thread is the last one. A message
//!   with more descriptors than belong to it stays in the queue, and its socket is disposed of.
//!
//! ```text
//!  peer ──> socket queue ──look──> Descriptors ──checked──> the owner that uses them
//!                │                      │
//!                └── refused message    └── surplus or wrong kind
//!                         │                      │
//!                         └───────> dispose() <──┘     closed on a disposal thread
//! ```
//!
//! What is received is used only after its kind is known, by calls that ask no file system: `fcntl`
//! (the seals of a memfd), `getsockopt`, and [`identity`].

mod disposal;
mod message;
mod stream;

pub use disposal::{Descriptors, Disposal, dispose, dispose_socket};
pub use message::{MessageError, ReceivedMessage, receive_message, take_of_stream};
pub use stream::{ByteSocket, StreamReceived, refuse_descriptors};

use std::os::fd::AsFd;

use rustix::fs::{AtFlags, FileType, StatxFlags};
use rustix::io::Errno;

/// Device and inode of an open file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FileIdentity {
    device: (u32, u32),
    inode: u64,
}

/// Returns device and inode of `fd` as the kernel has them. It asks no file server, so it does not
/// block, whatever `fd` is.
///
/// # Errors
///
/// The system's.
// #syscall all statx 2+AT_EMPTY_PATH: which file a peer sent
pub fn identity(fd: impl AsFd) -> Result<FileIdentity, Errno> {
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    let found = rustix::fs::statx(fd, c"", flags, StatxFlags::TYPE | StatxFlags::INO)?;
    Ok(FileIdentity { device: (found.stx_dev_major, found.stx_dev_minor), inode: found.stx_ino })
}

/// Returns `true` if `fd` is the character device of that number. It asks no file server.
// #syscall all statx 2+AT_EMPTY_PATH: which device a peer sent
pub fn is_character_device(fd: impl AsFd, major: u32, minor: u32) -> bool {
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    rustix::fs::statx(fd, c"", flags, StatxFlags::TYPE).is_ok_and(|found| {
        FileType::from_raw_mode(found.stx_mode.into()) == FileType::CharacterDevice
            && (found.stx_rdev_major, found.stx_rdev_minor) == (major, minor)
    })
}

#[doc(hidden)]
#[cfg(any(test, feature = "test-utils"))]
pub mod testing;
#[cfg(test)]
mod tests;
