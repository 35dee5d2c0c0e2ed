//! What a process that was taken over would try, one function a system call: for the tests that
//! play one inside its sandbox.
//!
//! Each is made in such a way that its success does no harm: signal 0, a tracer that lets go at
//! once, memory that is private to the caller. Each returns what the kernel says.

// #syscall none: what a process that was taken over would try, for tests

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::ptr;

use rustix::net::{AddressFamily, SocketType, sockopt};
use rustix::process::Pid;

/// An argument of a system call, as wide as the register that it is passed in.
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

/// Calls the kernel directly, so that no C library gets in between.
macro_rules! call {
    ($number:ident $(, $argument:expr)*) => {{
        // SAFETY: the callers in this file pass addresses of memory that lives through the call
        // and is as large as they say, or null; and no call here frees, unmaps or replaces memory
        // or descriptors that Rust code relies on.
        let result = unsafe { libc::syscall(libc::$number $(, $argument.word())*) };
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
    }};
}

/// Reads another process's memory at an address where nothing is mapped. `Err` of `EFAULT` means
/// that the kernel *allowed* the access.
///
/// # Errors
///
/// The kernel's.
pub fn read_memory_of(pid: Pid) -> io::Result<()> {
    let mut byte = 0u8;
    let local = libc::iovec { iov_base: ptr::from_mut(&mut byte).cast(), iov_len: 1 };
    let remote = libc::iovec { iov_base: ptr::null_mut(), iov_len: 1 };
    call!(SYS_process_vm_readv, number(pid), &raw const local, 1, &raw const remote, 1, 0).map(drop)
}

/// As [`read_memory_of`], writing.
///
/// # Errors
///
/// The kernel's.
pub fn write_memory_of(pid: Pid) -> io::Result<()> {
    let mut byte = 0u8;
    let local = libc::iovec { iov_base: ptr::from_mut(&mut byte).cast(), iov_len: 1 };
    let remote = libc::iovec { iov_base: ptr::null_mut(), iov_len: 1 };
    call!(SYS_process_vm_writev, number(pid), &raw const local, 1, &raw const remote, 1, 0)
        .map(drop)
}

/// Becomes the tracer of another process, without stopping it, and lets go of it.
///
/// # Errors
///
/// The kernel's.
pub fn trace(pid: Pid) -> io::Result<()> {
    call!(SYS_ptrace, libc::PTRACE_SEIZE, number(pid), 0, 0)?;
    // Only a stopped tracee can be detached.
    call!(SYS_ptrace, libc::PTRACE_INTERRUPT, number(pid), 0, 0)?;
    let mut status = 0;
    let null = ptr::null_mut::<libc::rusage>();
    call!(SYS_wait4, number(pid), &raw mut status, libc::__WALL, null)?;
    call!(SYS_ptrace, libc::PTRACE_DETACH, number(pid), 0, 0).map(drop)
}

/// Asks if a signal might be sent; sends none.
///
/// # Errors
///
/// The kernel's.
pub fn may_kill(pid: i32) -> io::Result<()> {
    call!(SYS_kill, pid, 0).map(drop)
}

/// Asks if a signal might be sent to a thread; sends none.
///
/// # Errors
///
/// The kernel's.
pub fn may_kill_thread(pid: Pid) -> io::Result<()> {
    call!(SYS_tgkill, number(pid), number(pid), 0).map(drop)
}

/// A handle on another process.
///
/// # Errors
///
/// The kernel's.
pub fn open_process(pid: Pid) -> io::Result<OwnedFd> {
    call!(SYS_pidfd_open, number(pid), 0).map(own)
}

/// Takes a descriptor out of the process that `process` is a handle on, if it is one.
///
/// # Errors
///
/// The kernel's.
pub fn take_descriptor(process: RawFd, wanted: i32) -> io::Result<OwnedFd> {
    call!(SYS_pidfd_getfd, process, wanted, 0).map(own)
}

/// Advises on the memory of the process that `process` is a handle on, if it is one.
///
/// # Errors
///
/// The kernel's.
pub fn advise_process(process: RawFd) -> io::Result<()> {
    let all = libc::iovec { iov_base: ptr::null_mut(), iov_len: 4096 };
    call!(SYS_process_madvise, process, &raw const all, 1, libc::MADV_COLD, 0).map(drop)
}

/// Opens a path.
///
/// # Errors
///
/// The kernel's.
pub fn open(path: &CStr, flags: i32) -> io::Result<OwnedFd> {
    call!(SYS_openat, libc::AT_FDCWD, path.as_ptr(), flags, 0).map(own)
}

/// Opens a path by the older call.
///
/// # Errors
///
/// The kernel's.
#[cfg(target_arch = "x86_64")]
pub fn open_old(path: &CStr, flags: i32) -> io::Result<OwnedFd> {
    call!(SYS_open, path.as_ptr(), flags, 0).map(own)
}

/// Opens a path by the newer call.
///
/// # Errors
///
/// The kernel's.
pub fn open_new(path: &CStr, flags: u32) -> io::Result<OwnedFd> {
    let how: [u64; 3] = [u64::from(flags), 0, 0];
    let size = size_of_val(&how);
    call!(SYS_openat2, libc::AT_FDCWD, path.as_ptr(), how.as_ptr(), size).map(own)
}

/// Runs a program in place of this one, which does not return if it works.
///
/// # Errors
///
/// The kernel's.
pub fn execute(path: &CStr) -> io::Result<()> {
    let arguments = [path.as_ptr(), ptr::null()];
    let environment = [ptr::null::<libc::c_char>()];
    call!(SYS_execve, path.as_ptr(), arguments.as_ptr(), environment.as_ptr()).map(drop)
}

/// Makes a process that ends at once.
///
/// # Errors
///
/// The kernel's.
pub fn fork() -> io::Result<()> {
    let child = call!(SYS_clone, libc::SIGCHLD, 0, 0, 0, 0)?;
    if child == 0 {
        // SAFETY: ends this process, which shares no memory with its parent, and runs nothing else.
        unsafe { libc::_exit(0) }
    }
    let null = ptr::null_mut::<libc::c_void>();
    call!(SYS_wait4, child, null, 0, null).map(drop)
}

/// A socket.
///
/// # Errors
///
/// The kernel's.
pub fn socket(family: i32, kind: i32) -> io::Result<OwnedFd> {
    call!(SYS_socket, family, kind, 0).map(own)
}

/// A file in memory.
///
/// # Errors
///
/// The kernel's.
pub fn memory_file() -> io::Result<OwnedFd> {
    call!(SYS_memfd_create, c"attack".as_ptr(), 0).map(own)
}

/// An io_uring, whose operations no filter of system calls sees.
///
/// # Errors
///
/// The kernel's.
pub fn io_uring() -> io::Result<OwnedFd> {
    // struct io_uring_params is 120 bytes; zeroes ask for nothing special.
    let mut parameters = [0u8; 120];
    call!(SYS_io_uring_setup, 1, parameters.as_mut_ptr()).map(own)
}

/// A handler of page faults, which can hold a peer's copy up in its middle.
///
/// # Errors
///
/// The kernel's.
pub fn userfaultfd() -> io::Result<OwnedFd> {
    call!(SYS_userfaultfd, libc::O_CLOEXEC).map(own)
}

/// New namespaces, for a child thread that ends with this call.
///
/// # Errors
///
/// The kernel's.
pub fn unshare(flags: i32) -> io::Result<()> {
    call!(SYS_unshare, flags).map(drop)
}

/// Mounts a `/proc`.
///
/// # Errors
///
/// The kernel's.
pub fn mount_proc(target: &CStr) -> io::Result<()> {
    let kind = c"proc".as_ptr();
    call!(SYS_mount, kind, target.as_ptr(), kind, 0, ptr::null::<libc::c_void>()).map(drop)
}

/// Mounts a `/proc` by the newer calls, as far as the first.
///
/// # Errors
///
/// The kernel's.
pub fn open_file_system() -> io::Result<OwnedFd> {
    call!(SYS_fsopen, c"proc".as_ptr(), 0).map(own)
}

/// Makes this process dumpable, and so traceable, again.
///
/// # Errors
///
/// The kernel's.
pub fn become_dumpable() -> io::Result<()> {
    call!(SYS_prctl, libc::PR_SET_DUMPABLE, 1, 0, 0, 0).map(drop)
}

/// A performance counter on this very process.
///
/// # Errors
///
/// The kernel's.
pub fn performance_counter() -> io::Result<OwnedFd> {
    // struct perf_event_attr, version 0: type (1, software), size (64), config (0, CPU clock).
    let mut attributes = [0u32; 16];
    (attributes[0], attributes[1]) = (1, 64);
    call!(SYS_perf_event_open, attributes.as_ptr(), 0, -1, -1, 0).map(own)
}

/// A BPF map.
///
/// # Errors
///
/// The kernel's.
pub fn bpf_map() -> io::Result<OwnedFd> {
    // union bpf_attr for BPF_MAP_CREATE: an array (2), key 4 bytes, value 4 bytes, one entry.
    let attributes: [u32; 4] = [2, 4, 4, 1];
    call!(SYS_bpf, 0, attributes.as_ptr(), size_of_val(&attributes)).map(own)
}

/// The descriptors of this process that are files with seals, and so in memory.
pub fn sealed_files() -> Vec<OwnedFd> {
    /// More than any of our processes has.
    const SEARCHED: RawFd = 4096;
    let is_sealed = |fd: &RawFd| call!(SYS_fcntl, *fd, libc::F_GET_SEALS, 0).is_ok();
    // All are found before the first second handle is made, which would be found as well.
    let found: Vec<RawFd> = (0..SEARCHED).filter(is_sealed).collect();
    let handle = |fd: RawFd| call!(SYS_fcntl, fd, libc::F_DUPFD_CLOEXEC, 3).ok().map(own);
    found.into_iter().filter_map(handle).collect()
}

/// Second handles of the Unix sockets of this process, with their types (`SOCK_STREAM`, ...).
pub fn unix_sockets() -> Vec<(OwnedFd, SocketType)> {
    /// More than any of our processes has.
    const SEARCHED: RawFd = 4096;
    let kind = |fd: &RawFd| {
        // SAFETY: the number is only used by these calls, which fail where it is no socket.
        let fd = unsafe { BorrowedFd::borrow_raw(*fd) };
        let is_unix = sockopt::socket_domain(fd).is_ok_and(|found| found == AddressFamily::UNIX);
        is_unix.then(|| sockopt::socket_type(fd).ok()).flatten()
    };
    let found: Vec<_> = (3..SEARCHED).filter_map(|fd| Some((fd, kind(&fd)?))).collect();
    let handle = |fd: RawFd| call!(SYS_fcntl, fd, libc::F_DUPFD_CLOEXEC, 3).ok().map(own);
    found.into_iter().filter_map(|(fd, kind)| Some((handle(fd)?, kind))).collect()
}

/// Sets a limit of this process, to what it is, by a structure whose address is zero in its low 32 bits.
///
/// # Errors
///
/// The kernel's.
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

/// Returns second handles of the sockets that this process has open.
pub fn sockets() -> Vec<OwnedFd> {
    /// More than any of our processes has.
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

/// Takes all messages that wait at a socket, and returns the descriptors of each.
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

/// Whether a file was opened for reading alone.
///
/// # Errors
///
/// The kernel's.
pub fn is_read_only(file: BorrowedFd<'_>) -> io::Result<bool> {
    let flags = call!(SYS_fcntl, file.as_raw_fd(), libc::F_GETFL, 0)?;
    Ok(flags & i64::from(libc::O_ACCMODE) == i64::from(libc::O_RDONLY))
}

/// Adds a seal to a file in memory: one that keeps its owner from taking pages back.
///
/// # Errors
///
/// The kernel's.
pub fn seal_future_writes(file: BorrowedFd<'_>) -> io::Result<()> {
    call!(SYS_fcntl, file.as_raw_fd(), libc::F_ADD_SEALS, libc::F_SEAL_FUTURE_WRITE).map(drop)
}

/// Cuts a file short.
///
/// # Errors
///
/// The kernel's.
pub fn truncate(file: BorrowedFd<'_>) -> io::Result<()> {
    call!(SYS_ftruncate, file.as_raw_fd(), 0).map(drop)
}

/// Punches a hole into the file.
///
/// # Errors
///
/// The kernel's.
pub fn punch(file: BorrowedFd<'_>) -> io::Result<()> {
    let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    call!(SYS_fallocate, file.as_raw_fd(), mode, 0_i64, 4096_i64).map(drop)
}

/// Writes nothing to a file, which the kernel allows only where it was opened for that.
///
/// # Errors
///
/// The kernel's.
pub fn write_nothing(file: BorrowedFd<'_>) -> io::Result<()> {
    let nothing = ptr::null::<libc::c_void>();
    call!(SYS_pwrite64, file.as_raw_fd(), nothing, 0_usize, 0_i64).map(drop)
}

/// A shared mapping of the start of a file, only ever handed to the kernel.
#[derive(Debug)]
pub struct Window {
    at: *mut libc::c_void,
    length: usize,
}

impl Window {
    /// Maps `length` bytes.
    ///
    /// # Errors
    ///
    /// The kernel's: `EACCES` for a writable one of a file that is not.
    pub fn new(file: BorrowedFd<'_>, length: usize, writable: bool) -> io::Result<Window> {
        /// A multiple of the size of a huge page, where nothing else is: else there could not be
        /// one in the window.
        const HINT: usize = 0x2000_0000_0000;
        let hint = ptr::without_provenance_mut(HINT);
        let write = if writable { libc::PROT_WRITE } else { 0 };
        let protection = libc::PROT_READ | write;
        // SAFETY: a fresh mapping, at an address that is a mere hint, replaces no memory; no
        // reference to its bytes is ever made.
        let at =
            unsafe { libc::mmap(hint, length, protection, libc::MAP_SHARED, file.as_raw_fd(), 0) };
        if at == libc::MAP_FAILED {
            Err(io::Error::last_os_error())
        } else {
            Ok(Window { at, length })
        }
    }

    /// Asks for more rights to the mapping.
    ///
    /// # Errors
    ///
    /// The kernel's.
    pub fn protect(&self, protection: i32) -> io::Result<()> {
        // SAFETY: no reference to these bytes exists, so that what may be done to them, by whom,
        // concerns nobody else.
        let result = unsafe { libc::mprotect(self.at, self.length, protection) };
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// Gives the kernel advice on the mapping, of a kind that keeps its content.
    ///
    /// # Errors
    ///
    /// The kernel's.
    pub fn advise(&self, advice: i32) -> io::Result<()> {
        // SAFETY: no reference to these bytes exists; whatever advice does to their content is
        // seen by nobody in this process.
        let result = unsafe { libc::madvise(self.at, self.length, advice) };
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        // SAFETY: this is exactly the mapping that `new` made; nothing refers to it any more.
        unsafe { libc::munmap(self.at, self.length) };
    }
}

fn number(pid: Pid) -> i32 {
    pid.as_raw_nonzero().get()
}

fn own(fd: libc::c_long) -> OwnedFd {
    let fd = RawFd::try_from(fd).expect("the kernel's descriptors are small");
    // SAFETY: the kernel has just returned this descriptor to the call that asked for a new one,
    // so nobody else owns it.
    unsafe { OwnedFd::from_raw_fd(fd) }
}
