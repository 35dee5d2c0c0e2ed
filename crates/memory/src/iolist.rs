//! Scatter-gather lists over private and lent memory, for the kernel to read from or write to.
//!
//! The kernel copies and tolerates races on user memory. Bytes that change during the copy arrive old or new,
//! as with any program's buffers.

use core::marker::PhantomData;
use core::mem::MaybeUninit;
use std::io;
use std::os::fd::{AsFd, AsRawFd};

use crate::lent::{LentSlice, OutOfRange};

/// Maximum entries of a list: two headers, and 64 joined packets of two pieces each.
pub const LIST_MAX: usize = 130;

/// Array of kernel ranges. Only the first `used` entries are initialised: most lists are short, and clearing
/// all entries would cost as much as a short copy.
struct IoVecs {
    vecs: [MaybeUninit<libc::iovec>; LIST_MAX],
    used: u16,
    bytes: usize,
}

const _: () = assert!(LIST_MAX <= u16::MAX as usize);

impl IoVecs {
    fn new() -> IoVecs {
        IoVecs { vecs: [const { MaybeUninit::uninit() }; LIST_MAX], used: 0, bytes: 0 }
    }

    fn push(&mut self, base: *mut u8, len: usize) -> bool {
        if len == 0 {
            return true;
        }
        let Some(slot) = self.vecs.get_mut(usize::from(self.used)) else {
            return false;
        };
        slot.write(libc::iovec { iov_base: base.cast(), iov_len: len });
        self.used += 1;
        self.bytes += len;
        true
    }

    fn as_ptr(&self) -> *const libc::iovec {
        self.vecs.as_ptr().cast()
    }

    /// Returns the entry of a list with exactly one: the kernel takes a single range much faster than a list of
    /// one.
    fn single(&self) -> Option<libc::iovec> {
        if self.used != 1 {
            return None;
        }
        // SAFETY: the first `used` entries are initialised.
        Some(unsafe { self.vecs[0].assume_init() })
    }

    fn count(&self) -> libc::c_int {
        self.used.into()
    }
}

/// Error: the list has no free entry.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("more than {LIST_MAX} segments in one scatter-gather list")]
pub struct ListFull;

/// Reasons for which a segment cannot be added.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum PushError {
    /// List without a free entry.
    #[error(transparent)]
    Full(#[from] ListFull),
    /// Range outside the lent slice, or a read-only slice.
    #[error(transparent)]
    Range(#[from] OutOfRange),
}

/// Scatter-gather list of bytes that the kernel reads (`writev`).
pub struct WriteList<'a> {
    vecs: IoVecs,
    life: PhantomData<&'a [u8]>,
}

impl Default for WriteList<'_> {
    fn default() -> Self {
        Self::new()
    }
}

impl<'a> WriteList<'a> {
    /// Creates an empty list.
    pub fn new() -> WriteList<'a> {
        WriteList { vecs: IoVecs::new(), life: PhantomData }
    }

    /// Adds private bytes to the list.
    ///
    /// # Errors
    ///
    /// Returns [`ListFull`] beyond [`LIST_MAX`] segments.
    pub fn push(&mut self, private: &'a [u8]) -> Result<(), ListFull> {
        if self.vecs.push(private.as_ptr().cast_mut(), private.len()) {
            Ok(())
        } else {
            Err(ListFull)
        }
    }

    /// Adds lent bytes to the list.
    ///
    /// # Errors
    ///
    /// Returns [`PushError`] beyond [`LIST_MAX`] segments or outside the slice.
    pub fn push_lent(
        &mut self,
        lent: &'a LentSlice,
        offset: usize,
        len: usize,
    ) -> Result<(), PushError> {
        let start = lent.at(offset, len)?;
        if self.vecs.push(start.as_ptr(), len) { Ok(()) } else { Err(ListFull.into()) }
    }

    /// Returns the total bytes of the list.
    pub fn bytes(&self) -> usize {
        self.vecs.bytes
    }

    // #syscall all writev: frames in several parts, from lent pages
    /// Writes the list with one `writev`.
    ///
    /// # Errors
    ///
    /// Returns the kernel's error.
    pub fn write(&self, fd: impl AsFd) -> io::Result<usize> {
        // SAFETY: every entry is a readable range that outlives `self`: private ones are borrowed
        // for 'a, lent ones are kept mapped by a slice borrowed for 'a.
        let n =
            unsafe { libc::writev(fd.as_fd().as_raw_fd(), self.vecs.as_ptr(), self.vecs.count()) };
        usize::try_from(n).map_err(|_| io::Error::last_os_error())
    }

    // #syscall all sendto,sendmsg: what goes from lent pages into a socket
    /// Sends the list to a connected socket with one `sendmsg`, with `flags` (`MSG_…`) and `MSG_NOSIGNAL`.
    ///
    /// # Errors
    ///
    /// Returns the kernel's error.
    pub fn send(&self, socket: impl AsFd, flags: i32) -> io::Result<usize> {
        let socket = socket.as_fd().as_raw_fd();
        let flags = flags | libc::MSG_NOSIGNAL;
        let n = match self.vecs.single() {
            // SAFETY: as for `write`.
            Some(one) => unsafe { libc::send(socket, one.iov_base, one.iov_len, flags) },
            None => {
                // SAFETY: a message header of zeros is one without address and control data.
                let mut message: libc::msghdr = unsafe { core::mem::zeroed() };
                message.msg_iov = self.vecs.as_ptr().cast_mut();
                message.msg_iovlen = self.vecs.used.into();
                // SAFETY: as for `write`; the kernel only reads the header and the list.
                unsafe { libc::sendmsg(socket, &raw const message, flags) }
            }
        };
        usize::try_from(n).map_err(|_| io::Error::last_os_error())
    }

    // #syscall driver,frontend,card,disk,daemon pwrite64,pwritev: grant copies; from lent pages to a disk
    /// Writes the list at `offset` of the file with one `pwritev`, or one `pwrite` for a single range.
    ///
    /// # Errors
    ///
    /// Returns the kernel's error.
    pub fn write_at(&self, fd: impl AsFd, offset: u64) -> io::Result<usize> {
        let offset = i64::try_from(offset).map_err(|_| io::ErrorKind::InvalidInput)?;
        let fd = fd.as_fd().as_raw_fd();
        let n = match self.vecs.single() {
            // SAFETY: as for `write`.
            Some(one) => unsafe { libc::pwrite(fd, one.iov_base, one.iov_len, offset) },
            // SAFETY: as for `write`.
            None => unsafe { libc::pwritev(fd, self.vecs.as_ptr(), self.vecs.count(), offset) },
        };
        usize::try_from(n).map_err(|_| io::Error::last_os_error())
    }
}

/// Scatter-gather list of buffers that the kernel fills (`readv`).
pub struct ReadList<'a> {
    vecs: IoVecs,
    life: PhantomData<&'a mut [u8]>,
}

impl Default for ReadList<'_> {
    fn default() -> Self {
        Self::new()
    }
}

impl<'a> ReadList<'a> {
    /// Creates an empty list.
    pub fn new() -> ReadList<'a> {
        ReadList { vecs: IoVecs::new(), life: PhantomData }
    }

    /// Adds a private buffer to the list.
    ///
    /// # Errors
    ///
    /// Returns [`ListFull`] beyond [`LIST_MAX`] segments.
    pub fn push(&mut self, private: &'a mut [u8]) -> Result<(), ListFull> {
        if self.vecs.push(private.as_mut_ptr(), private.len()) { Ok(()) } else { Err(ListFull) }
    }

    /// Adds a lent buffer to the list.
    ///
    /// # Errors
    ///
    /// Returns [`PushError`] beyond [`LIST_MAX`] segments, outside the slice, or for a read-only slice.
    pub fn push_lent(
        &mut self,
        lent: &'a LentSlice,
        offset: usize,
        len: usize,
    ) -> Result<(), PushError> {
        let start = lent.at_mut(offset, len)?;
        if self.vecs.push(start.as_ptr(), len) { Ok(()) } else { Err(ListFull.into()) }
    }

    /// Returns the total bytes of all buffers.
    pub fn bytes(&self) -> usize {
        self.vecs.bytes
    }

    // #syscall all readv: frames in several parts, into lent pages
    /// Fills the list with one `readv`.
    ///
    /// # Errors
    ///
    /// Returns the kernel's error.
    pub fn read(&mut self, fd: impl AsFd) -> io::Result<usize> {
        // SAFETY: every entry is a writable range. Private ones are borrowed exclusively for 'a. Lent ones are
        // kept mapped by a slice borrowed for 'a, and no Rust reference points into them.
        let n =
            unsafe { libc::readv(fd.as_fd().as_raw_fd(), self.vecs.as_ptr(), self.vecs.count()) };
        usize::try_from(n).map_err(|_| io::Error::last_os_error())
    }

    // #syscall driver,frontend,card,disk,daemon pread64,preadv: grant copies; from a disk to lent pages
    /// Fills the list from `offset` of the file with one `preadv`, or one `pread` for a single range.
    ///
    /// # Errors
    ///
    /// Returns the kernel's error.
    pub fn read_at(&mut self, fd: impl AsFd, offset: u64) -> io::Result<usize> {
        let offset = i64::try_from(offset).map_err(|_| io::ErrorKind::InvalidInput)?;
        let fd = fd.as_fd().as_raw_fd();
        let n = match self.vecs.single() {
            // SAFETY: as for `read`.
            Some(one) => unsafe { libc::pread(fd, one.iov_base, one.iov_len, offset) },
            // SAFETY: as for `read`.
            None => unsafe { libc::preadv(fd, self.vecs.as_ptr(), self.vecs.count(), offset) },
        };
        usize::try_from(n).map_err(|_| io::Error::last_os_error())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "miri has no files in memory")]
    fn private_and_lent_segments_round_trip_through_file() {
        let fd = rustix::fs::memfd_create("t", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let lent = LentSlice::anonymous(4096);
        lent.copy_from(8, b"world").unwrap();
        let mut out = WriteList::new();
        out.push(b"hello ").unwrap();
        out.push_lent(&lent, 8, 5).unwrap();
        assert_eq!(out.write_at(&fd, 3).unwrap(), 11);
        let back = LentSlice::anonymous(64);
        let mut head = [0u8; 6];
        let mut list = ReadList::new();
        list.push(&mut head).unwrap();
        list.push_lent(&back, 0, 5).unwrap();
        assert_eq!(list.read_at(&fd, 3).unwrap(), 11);
        assert_eq!(&head, b"hello ");
        assert_eq!(back.fetch::<5>(0).unwrap().into_unchecked(), *b"world");
    }

    #[test]
    fn push_into_full_list_is_refused() {
        let byte = [0u8; 1];
        let mut out = WriteList::new();
        for _ in 0..LIST_MAX {
            out.push(&byte).unwrap();
        }
        assert_eq!(out.push(&byte), Err(ListFull));
        assert_eq!(out.push(&[]), Ok(()), "an empty segment takes no entry");
    }
}
