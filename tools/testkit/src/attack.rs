//! Attacks: system calls that an attacker would try in a process under its control, one function each.
//! Tests call them inside a sandbox.
//!
//! Success is harmless: the calls use signal 0, a tracer that detaches at once, or memory private to the
//! caller. Each function returns the kernel's result.

// #syscall none: what a process that was taken over would try, for tests

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::ptr;

use rustix::net::{AddressFamily, SocketType, sockopt};
use rustix::process::Pid;

/// Argument of a system call, as wide as a register.
trait Word {
    fn word(self) -> libc::c_long;
}

macro_rules! word {
    ($($type:ty: $number:ident => $word:expr;)*) => {
        $(impl Word for $type {
            fn word(self) -> libc::c_long {
                let $number = self;
                $word
            }
        })*
    };
}

word! {
    i32: number => number.into();
    u32: number => number.into();
    i64: number => number;
    usize: number => number.cast_signed() as libc::c_long;
}

impl<T> Word for *const T {
    fn word(self) -> libc::c_long {
        self.expose_provenance().word()
    }
}

impl<T> Word for *mut T {
    fn word(self) -> libc::c_long {
        self.expose_provenance().word()
    }
}

/// Makes a system call directly, without a wrapper of the C library.
macro_rules! call {
    ($number:ident $(, $argument:expr)*) => {{
        // SAFETY: the callers in this file pass null, or addresses of memory that outlives the call and is
        // as large as they state. No call here frees, unmaps or replaces memory or descriptors that Rust
        // code relies on.
        let result = unsafe { libc::syscall(libc::$number $(, $argument.word())*) };
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
    }};
}

mod ring;

pub use ring::{
    RingLayout, RingMemory, enter_ring_with_flags, find_ring, io_uring, open_entry, plain_entry,
    register_with_ring, socket_entry,
};

/// Reads another process's memory at an unmapped address. `EFAULT` means that the kernel *allowed*
/// the access.
///
/// # Errors
///
/// Returns the kernel's error.
pub fn read_memory_of(pid: Pid) -> io::Result<()> {
    let mut byte = 0u8;
    let local = libc::iovec { iov_base: ptr::from_mut(&mut byte).cast(), iov_len: 1 };
    let remote = libc::iovec { iov_base: ptr::null_mut(), iov_len: 1 };
    call!(SYS_process_vm_readv, number(pid), &raw const local, 1, &raw const remote, 1, 0).map(drop)
}

/// Writes another process's memory, as [`read_memory_of`] reads it.
///
/// # Errors
///
/// Returns the kernel's error.
pub fn write_memory_of(pid: Pid) -> io::Result<()> {
    let mut byte = 0u8;
    let local = libc::iovec { iov_base: ptr::from_mut(&mut byte).cast(), iov_len: 1 };
    let remote = libc::iovec { iov_base: ptr::null_mut(), iov_len: 1 };
    call!(SYS_process_vm_writev, number(pid), &raw const local, 1, &raw const remote, 1, 0)
        .map(drop)
}

/// Attaches to another process as its tracer without stopping it, and detaches.
///
/// # Errors
///
/// Returns the kernel's error.
pub fn trace(pid: Pid) -> io::Result<()> {
    call!(SYS_ptrace, libc::PTRACE_SEIZE, number(pid), 0, 0)?;
    // Only a stopped tracee can be detached.
    call!(SYS_ptrace, libc::PTRACE_INTERRUPT, number(pid), 0, 0)?;
    let mut status = 0;
    let null = ptr::null_mut::<libc::rusage>();
    call!(SYS_wait4, number(pid), &raw mut status, libc::__WALL, null)?;
    call!(SYS_ptrace, libc::PTRACE_DETACH, number(pid), 0, 0).map(drop)
}

/// Checks if this process may signal another one; sends no signal.
///
/// # Errors
///
/// Returns the kernel's error.
pub fn may_kill(pid: i32) -> io::Result<()> {
    call!(SYS_kill, pid, 0).map(drop)
}

/// Checks if this process may signal a thread; sends no signal.
///
/// # Errors
///
/// Returns the kernel's error.
pub fn may_kill_thread(pid: Pid) -> io::Result<()> {
    call!(SYS_tgkill, number(pid), number(pid), 0).map(drop)
}

/// Opens a pidfd of another process.
///
/// # Errors
///
/// Returns the kernel's error.
pub fn open_process(pid: Pid) -> io::Result<OwnedFd> {
    call!(SYS_pidfd_open, number(pid), 0).map(own)
}

/// Duplicates a descriptor of the process of a pidfd.
///
/// # Errors
///
/// Returns the kernel's error.
pub fn take_descriptor(process: RawFd, wanted: i32) -> io::Result<OwnedFd> {
    call!(SYS_pidfd_getfd, process, wanted, 0).map(own)
}

/// Advises the kernel on the memory of the process of a pidfd.
///
/// # Errors
///
/// Returns the kernel's error.
pub fn advise_process(process: RawFd) -> io::Result<()> {
    let all = libc::iovec { iov_base: ptr::null_mut(), iov_len: 4096 };
    call!(SYS_process_madvise, process, &raw const all, 1, libc::MADV_COLD, 0).map(drop)
}

/// Opens a path with `openat`.
///
/// # Errors
///
/// Returns the kernel's error.
pub fn open(path: &CStr, flags: i32) -> io::Result<OwnedFd> {
    call!(SYS_openat, libc::AT_FDCWD, path.as_ptr(), flags, 0).map(own)
}

/// Opens a path with `open`.
///
/// # Errors
///
/// Returns the kernel's error.
#[cfg(target_arch = "x86_64")]
pub fn open_old(path: &CStr, flags: i32) -> io::Result<OwnedFd> {
    call!(SYS_open, path.as_ptr(), flags, 0).map(own)
}

/// Opens a path with `openat2`.
///
/// # Errors
///
/// Returns the kernel's error.
pub fn open_new(path: &CStr, flags: u32) -> io::Result<OwnedFd> {
    let how: [u64; 3] = [u64::from(flags), 0, 0];
    let size = size_of_val(&how);
    call!(SYS_openat2, libc::AT_FDCWD, path.as_ptr(), how.as_ptr(), size).map(own)
}

/// Executes a program in place of this one. Does not return on success.
///
/// # Errors
///
/// Returns the kernel's error.
pub fn execute(path: &CStr) -> io::Result<()> {
    let arguments = [path.as_ptr(), ptr::null()];
    let environment = [ptr::null::<libc::c_char>()];
    call!(SYS_execve, path.as_ptr(), arguments.as_ptr(), environment.as_ptr()).map(drop)
}

/// Forks a process that exits at once.
///
/// # Errors
///
/// Returns the kernel's error.
pub fn fork() -> io::Result<()> {
    let child = call!(SYS_clone, libc::SIGCHLD, 0, 0, 0, 0)?;
    if child == 0 {
        // SAFETY: ends this process, which shares no memory with its parent and runs nothing else.
        unsafe { libc::_exit(0) }
    }
    let null = ptr::null_mut::<libc::c_void>();
    call!(SYS_wait4, child, null, 0, null).map(drop)
}

/// Creates a socket of any family.
///
/// # Errors
///
/// Returns the kernel's error.
pub fn socket(family: i32, kind: i32) -> io::Result<OwnedFd> {
    call!(SYS_socket, family, kind, 0).map(own)
}

/// Creates a memfd.
///
/// # Errors
///
/// Returns the kernel's error.
pub fn memory_file() -> io::Result<OwnedFd> {
    call!(SYS_memfd_create, c"attack".as_ptr(), 0).map(own)
}

/// Creates a userfaultfd, with which a process can block a peer's copy in its middle.
///
/// # Errors
///
/// Returns the kernel's error.
pub fn userfaultfd() -> io::Result<OwnedFd> {
    call!(SYS_userfaultfd, libc::O_CLOEXEC).map(own)
}

/// Creates new namespaces for a child thread that ends with this call.
///
/// # Errors
///
/// Returns the kernel's error.
pub fn unshare(flags: i32) -> io::Result<()> {
    call!(SYS_unshare, flags).map(drop)
}

/// Mounts a `/proc` at `target`.
///
/// # Errors
///
/// Returns the kernel's error.
pub fn mount_proc(target: &CStr) -> io::Result<()> {
    let kind = c"proc".as_ptr();
    call!(SYS_mount, kind, target.as_ptr(), kind, 0, ptr::null::<libc::c_void>()).map(drop)
}

/// Opens a procfs with `fsopen`, the first of the newer mount calls.
///
/// # Errors
///
/// Returns the kernel's error.
pub fn open_file_system() -> io::Result<OwnedFd> {
    call!(SYS_fsopen, c"proc".as_ptr(), 0).map(own)
}

/// Makes this process dumpable, and so traceable, again.
///
/// # Errors
///
/// Returns the kernel's error.
pub fn become_dumpable() -> io::Result<()> {
    call!(SYS_prctl, libc::PR_SET_DUMPABLE, 1, 0, 0, 0).map(drop)
}

/// Opens a performance counter on this process.
///
/// # Errors
///
/// Returns the kernel's error.
pub fn performance_counter() -> io::Result<OwnedFd> {
    // struct perf_event_attr, version 0: type (1, software), size (64), config (0, CPU clock).
    let mut attributes = [0u32; 16];
    (attributes[0], attributes[1]) = (1, 64);
    call!(SYS_perf_event_open, attributes.as_ptr(), 0, -1, -1, 0).map(own)
}

/// Creates a BPF map.
///
/// # Errors
///
/// Returns the kernel's error.
pub fn bpf_map() -> io::Result<OwnedFd> {
    // union bpf_attr for BPF_MAP_CREATE: an array (2), key 4 bytes, value 4 bytes, one entry.
    let attributes: [u32; 4] = [2, 4, 4, 1];
    call!(SYS_bpf, 0, attributes.as_ptr(), size_of_val(&attributes)).map(own)
}

/// Duplicates the descriptors of this process that refer to files with seals, which are memfds.
pub fn sealed_files() -> Vec<OwnedFd> {
    /// Searched descriptors; more than any process of the project has.
    const SEARCHED: RawFd = 4096;
    let is_sealed = |fd: &RawFd| call!(SYS_fcntl, *fd, libc::F_GET_SEALS, 0).is_ok();
    // Collect all first: duplicates made during the search would be found too.
    let found: Vec<RawFd> = (0..SEARCHED).filter(is_sealed).collect();
    let handle = |fd: RawFd| call!(SYS_fcntl, fd, libc::F_DUPFD_CLOEXEC, 3).ok().map(own);
    found.into_iter().filter_map(handle).collect()
}

/// Duplicates the Unix sockets of this process, with their types (`SOCK_STREAM`, ...).
pub fn unix_sockets() -> Vec<(OwnedFd, SocketType)> {
    /// Searched descriptors; more than any process of the project has.
    const SEARCHED: RawFd = 4096;
    let kind = |fd: &RawFd| {
        // SAFETY: only these calls use the number, and they fail if it is no socket.
        let fd = unsafe { BorrowedFd::borrow_raw(*fd) };
        let is_unix = sockopt::socket_domain(fd).is_ok_and(|found| found == AddressFamily::UNIX);
        is_unix.then(|| sockopt::socket_type(fd).ok()).flatten()
    };
    let found: Vec<_> = (3..SEARCHED).filter_map(|fd| Some((fd, kind(&fd)?))).collect();
    let handle = |fd: RawFd| call!(SYS_fcntl, fd, libc::F_DUPFD_CLOEXEC, 3).ok().map(own);
    found.into_iter().filter_map(|(fd, kind)| Some((handle(fd)?, kind))).collect()
}

/// Sets a limit of this process to its current value, from an address whose low 32 bits are zero.
///
/// # Errors
///
/// Returns the kernel's error.
pub fn set_limit_from_high_address() -> io::Result<()> {
    const ADDRESS: usize = 1 << 32;
    const BYTES: usize = 4096;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let at = call!(SYS_mmap, ADDRESS, BYTES, protection, flags, -1, 0)?;
    let limit = libc::RLIMIT_CORE;
    let read = call!(SYS_prlimit64, 0, limit, 0, at);
    let set = read.and_then(|_| call!(SYS_prlimit64, 0, limit, at, 0));
    call!(SYS_munmap, at, BYTES)?;
    set.map(drop)
}

/// Duplicates the sockets of this process.
pub fn sockets() -> Vec<OwnedFd> {
    /// Searched descriptors; more than any process of the project has.
    const SEARCHED: RawFd = 4096;
    let is_socket = |fd: &RawFd| {
        let (mut kind, mut length) = (0_i32, 4_u32);
        let (kind, length) = (&raw mut kind, &raw mut length);
        call!(SYS_getsockopt, *fd, libc::SOL_SOCKET, libc::SO_TYPE, kind, length).is_ok()
    };
    let found: Vec<RawFd> = (0..SEARCHED).filter(is_socket).collect();
    let handle = |fd: RawFd| call!(SYS_fcntl, fd, libc::F_DUPFD_CLOEXEC, 3).ok().map(own);
    found.into_iter().filter_map(handle).collect()
}

/// Receives all messages that wait at a socket. Returns the descriptors of each.
pub fn messages(socket: BorrowedFd<'_>) -> Vec<Vec<OwnedFd>> {
    use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags};
    let mut all = Vec::new();
    loop {
        let mut bytes = [0; 256];
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        let mut into = [io::IoSliceMut::new(&mut bytes)];
        match rustix::net::recvmsg(socket, &mut into, &mut control, flags) {
            Ok(got) if got.bytes > 0 => {}
            _ => return all,
        }
        let rights = control.drain().filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(rights) => Some(rights),
            _ => None,
        });
        all.push(rights.flatten().collect());
    }
}

/// Returns `true` if a file is open only for reading.
///
/// # Errors
///
/// Returns the kernel's error.
pub fn is_read_only(file: BorrowedFd<'_>) -> io::Result<bool> {
    let flags = call!(SYS_fcntl, file.as_raw_fd(), libc::F_GETFL, 0)?;
    Ok(flags & i64::from(libc::O_ACCMODE) == i64::from(libc::O_RDONLY))
}

/// Adds `F_SEAL_FUTURE_WRITE` to a memfd, which would keep its owner from punching holes.
///
/// # Errors
///
/// Returns the kernel's error.
pub fn seal_future_writes(file: BorrowedFd<'_>) -> io::Result<()> {
    call!(SYS_fcntl, file.as_raw_fd(), libc::F_ADD_SEALS, libc::F_SEAL_FUTURE_WRITE).map(drop)
}

/// Truncates a file.
///
/// # Errors
///
/// Returns the kernel's error.
pub fn truncate(file: BorrowedFd<'_>) -> io::Result<()> {
    call!(SYS_ftruncate, file.as_raw_fd(), 0).map(drop)
}

/// Punches a hole into a file.
///
/// # Errors
///
/// Returns the kernel's error.
pub fn punch(file: BorrowedFd<'_>) -> io::Result<()> {
    let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    call!(SYS_fallocate, file.as_raw_fd(), mode, 0_i64, 4096_i64).map(drop)
}

/// Writes zero bytes to a file, which the kernel allows only if the file is open for writing.
///
/// # Errors
///
/// Returns the kernel's error.
pub fn write_nothing(file: BorrowedFd<'_>) -> io::Result<()> {
    let nothing = ptr::null::<libc::c_void>();
    call!(SYS_pwrite64, file.as_raw_fd(), nothing, 0_usize, 0_i64).map(drop)
}

/// Shared mapping of the start of a file. Only the kernel uses its address.
#[derive(Debug)]
pub struct Window {
    at: *mut libc::c_void,
    length: usize,
}

impl Window {
    /// Maps `length` bytes of a file.
    ///
    /// # Errors
    ///
    /// Returns the kernel's error; `EACCES` for a writable mapping of a file that is not writable.
    pub fn new(file: BorrowedFd<'_>, length: usize, writable: bool) -> io::Result<Window> {
        /// Free address that is a multiple of the size of a huge page, so that the mapping can contain one.
        const HINT: usize = 0x2000_0000_0000;
        Window::at(HINT, file, length, writable, 0)
    }

    /// Maps `length` bytes of a file from `offset`, at the address `hint` or another one.
    fn at(
        hint: usize,
        file: BorrowedFd<'_>,
        length: usize,
        writable: bool,
        offset: libc::off_t,
    ) -> io::Result<Window> {
        let hint = ptr::without_provenance_mut(hint);
        let write = if writable { libc::PROT_WRITE } else { 0 };
        let protection = libc::PROT_READ | write;
        // SAFETY: a new mapping at a mere hint replaces no memory. No reference to its bytes is created.
        let at = unsafe {
            libc::mmap(hint, length, protection, libc::MAP_SHARED, file.as_raw_fd(), offset)
        };
        if at == libc::MAP_FAILED {
            Err(io::Error::last_os_error())
        } else {
            Ok(Window { at, length })
        }
    }

    /// Reads a number that the kernel writes.
    fn number(&self, at: usize) -> u32 {
        assert!(at.is_multiple_of(4) && at + 4 <= self.length);
        // SAFETY: the aligned word lies in the mapping.
        unsafe { ptr::read_volatile(self.at.cast::<u8>().add(at).cast()) }
    }

    /// Writes words for the kernel, which reads them in the next system call.
    fn put<T: Copy>(&self, at: usize, words: &[T]) {
        let size = size_of::<T>();
        assert!(at.is_multiple_of(size) && at + size_of_val(words) <= self.length);
        for (i, word) in words.iter().enumerate() {
            // SAFETY: the aligned word lies in the mapping, which is writable.
            unsafe { ptr::write_volatile(self.at.cast::<u8>().add(at + i * size).cast(), *word) };
        }
    }

    /// Changes the protection of the mapping.
    ///
    /// # Errors
    ///
    /// Returns the kernel's error.
    pub fn protect(&self, protection: i32) -> io::Result<()> {
        // SAFETY: no reference to these bytes exists, so no Rust code depends on their protection.
        let result = unsafe { libc::mprotect(self.at, self.length, protection) };
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// Advises the kernel on the mapping.
    ///
    /// # Errors
    ///
    /// Returns the kernel's error.
    pub fn advise(&self, advice: i32) -> io::Result<()> {
        // SAFETY: no reference to these bytes exists, so no Rust code depends on their content.
        let result = unsafe { libc::madvise(self.at, self.length, advice) };
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        // SAFETY: this is exactly the mapping of `new`, and no reference to it exists.
        unsafe { libc::munmap(self.at, self.length) };
    }
}

fn number(pid: Pid) -> i32 {
    pid.as_raw_nonzero().get()
}

fn own(fd: libc::c_long) -> OwnedFd {
    let fd = RawFd::try_from(fd).expect("the kernel's descriptors are small");
    // SAFETY: the kernel has just returned this descriptor to a call for a new one, so it has no
    // other owner.
    unsafe { OwnedFd::from_raw_fd(fd) }
}
