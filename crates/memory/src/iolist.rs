//! Scatter-gather lists over private and lent memory, for the kernel to read from or write to.
//!
//! The kernel copies; it tolerates races on user memory. What it does with bytes that change while
//! it reads them is its own concern, as with any program's buffers.

use core::marker::PhantomData;
use core::mem::MaybeUninit;
use std::io;
use std::os::fd::{AsFd, AsRawFd};

use crate::lent::{LentSlice, OutOfRange};

/// Entries that one list holds: two headers, and 64 packets that were joined, in two pieces each.
pub const LIST_MAX: usize = 130;

/// The first `used` entries are initialised. The others are not: most lists are short, and clearing
/// them would cost as much as a short copy.
struct Vecs {
    vecs: [MaybeUninit<libc::iovec>; LIST_MAX],
    used: usize,
    bytes: usize,
}

impl Vecs {
    fn new() -> Vecs {
        Vecs { vecs: [const { MaybeUninit::uninit() }; LIST_MAX], used: 0, bytes: 0 }
    }

    fn push(&mut self, base: *mut u8, len: usize) -> bool {
        if len == 0 {
            return true;
        }
        let Some(slot) = self.vecs.get_mut(self.used) else {
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

    /// The only entry, if it is the only one: the kernel takes a single range much faster than a
    /// list of one.
    fn single(&self) -> Option<libc::iovec> {
        if self.used != 1 {
            return None;
        }
        // SAFETY: the first `used` entries are initialised.
        Some(unsafe { self.vecs[0].assume_init() })
    }

    fn count(&self) -> libc::c_int {
        libc::c_int::try_from(self.used).unwrap_or(0)
    }
}

/// The list is full.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("more than {LIST_MAX} segments in one scatter-gather list")]
pub struct ListFull;

/// Why a segment was not added.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum PushError {
    /// No room in the list.
    #[error(transparent)]
    Full(#[from] ListFull),
    /// The range does not lie inside the lent slice, or is read-only.
    #[error(transparent)]
    Range(#[from] OutOfRange),
}

/// Bytes for the kernel to take: `writev`.
pub struct WriteList<'a> {
    vecs: Vecs,
    life: PhantomData<&'a [u8]>,
}

impl Default for WriteList<'_> {
    fn default() -> Self {
        Self::new()
    }
}

impl<'a> WriteList<'a> {
    /// An empty list.
    pub fn new() -> WriteList<'a> {
        WriteList { vecs: Vecs::new(), life: PhantomData }
    }

    /// Adds private bytes.
    ///
    /// # Errors
    ///
    /// [`ListFull`] beyond [`LIST_MAX`] segments.
    pub fn push(&mut self, private: &'a [u8]) -> Result<(), ListFull> {
        if self.vecs.push(private.as_ptr().cast_mut(), private.len()) {
            Ok(())
        } else {
            Err(ListFull)
        }
    }

    /// Adds lent bytes.
    ///
    /// # Errors
    ///
    /// [`PushError`] beyond [`LIST_MAX`] segments or outside the slice.
    pub fn push_lent(
        &mut self,
        lent: &'a LentSlice,
        offset: usize,
        len: usize,
    ) -> Result<(), PushError> {
        let start = lent.at(offset, len)?;
        if self.vecs.push(start.as_ptr(), len) { Ok(()) } else { Err(ListFull.into()) }
    }

    /// Bytes in the list.
    pub fn bytes(&self) -> usize {
        self.vecs.bytes
    }

    // #syscall all writev: frames in several parts, from lent pages
    /// One `writev`.
    ///
    /// # Errors
    ///
    /// The kernel's.
    pub fn write(&self, fd: impl AsFd) -> io::Result<usize> {
        // SAFETY: every entry is a readable range that outlives `self`: private ones are borrowed
        // for 'a, lent ones are kept mapped by a slice borrowed for 'a.
        let n =
            unsafe { libc::writev(fd.as_fd().as_raw_fd(), self.vecs.as_ptr(), self.vecs.count()) };
        usize::try_from(n).map_err(|_| io::Error::last_os_error())
    }

    // #syscall all sendto,sendmsg: what goes from lent pages into a socket
    /// One `sendmsg` to a connected socket, with `flags` (`MSG_…`) beside `MSG_NOSIGNAL`.
    ///
    /// # Errors
    ///
    /// The kernel's.
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
                message.msg_iovlen = usize::try_from(self.vecs.count()).unwrap_or(0);
                // SAFETY: as for `write`; the kernel only reads the header and the list.
                unsafe { libc::sendmsg(socket, &raw const message, flags) }
            }
        };
        usize::try_from(n).map_err(|_| io::Error::last_os_error())
    }

    // #syscall driver,frontend,daemon pwrite64,pwritev: grant copies; from lent pages to a disk
    /// One `pwritev` at `offset` of the file; `pwrite` where one range is the whole list.
    ///
    /// # Errors
    ///
    /// The kernel's.
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

/// Room for the kernel to fill: `readv`.
pub struct ReadList<'a> {
    vecs: Vecs,
    life: PhantomData<&'a mut [u8]>,
}

impl Default for ReadList<'_> {
    fn default() -> Self {
        Self::new()
    }
}

impl<'a> ReadList<'a> {
    /// An empty list.
    pub fn new() -> ReadList<'a> {
        ReadList { vecs: Vecs::new(), life: PhantomData }
    }

    /// Adds private room.
    ///
    /// # Errors
    ///
    /// [`ListFull`] beyond [`LIST_MAX`] segments.
    pub fn push(&mut self, private: &'a mut [u8]) -> Result<(), ListFull> {
        if self.vecs.push(private.as_mut_ptr(), private.len()) { Ok(()) } else { Err(ListFull) }
    }

    /// Adds lent room.
    ///
    /// # Errors
    ///
    /// [`PushError`] beyond [`LIST_MAX`] segments, outside the slice, or when it is read-only.
    pub fn push_lent(
        &mut self,
        lent: &'a LentSlice,
        offset: usize,
        len: usize,
    ) -> Result<(), PushError> {
        let start = lent.at_mut(offset, len)?;
        if self.vecs.push(start.as_ptr(), len) { Ok(()) } else { Err(ListFull.into()) }
    }

    /// Bytes of room in the list.
    pub fn bytes(&self) -> usize {
        self.vecs.bytes
    }

    // #syscall all readv: frames in several parts, into lent pages
    /// One `readv`.
    ///
    /// # Errors
    ///
    /// The kernel's.
    pub fn read(&mut self, fd: impl AsFd) -> io::Result<usize> {
        // SAFETY: every entry is a writable range: private ones are borrowed exclusively for 'a,
        // lent ones are kept mapped by a slice borrowed for 'a and hold no Rust references.
        let n =
            unsafe { libc::readv(fd.as_fd().as_raw_fd(), self.vecs.as_ptr(), self.vecs.count()) };
        usize::try_from(n).map_err(|_| io::Error::last_os_error())
    }

    // #syscall driver,frontend,daemon pread64,preadv: grant copies; from a disk to lent pages
    /// One `preadv` at `offset` of the file; `pread` where one range is the whole list.
    ///
    /// # Errors
    ///
    /// The kernel's.
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
    fn gathers_private_and_lent_bytes_and_scatters_them_back() {
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
    fn a_full_list_refuses() {
        let byte = [0u8; 1];
        let mut out = WriteList::new();
        for _ in 0..LIST_MAX {
            out.push(&byte).unwrap();
        }
        assert_eq!(out.push(&byte), Err(ListFull));
        assert_eq!(out.push(&[]), Ok(()), "an empty segment takes no entry");
    }
}
