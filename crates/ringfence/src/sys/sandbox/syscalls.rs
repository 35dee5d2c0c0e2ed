//! The system calls that a frontend, an uplink or a driver domain may make: an allow list.
//!
//! Each row of [`LIST`] says what needs the call, and the arguments it may have. All else fails
//! with `EPERM`; no call kills, so that a library which probes for a newer call finds it missing
//! and goes on with an older one. `clone3` fails with `ENOSYS`, which is what makes the C library
//! fall back to `clone`: its flags are in a register, where a filter can see them.
//!
//! Not on the list on purpose, and tried by the tests: `ptrace`, `process_vm_*`, `pidfd_*`,
//! `process_madvise`, `open*` and every other call that takes a path, `execve*`, `socket`,
//! `memfd_create`, `io_uring_setup`, `io_uring_register`, `userfaultfd`, `bpf`, `kill`, `prctl`,
//! `mount` and its kin, `unshare`, `setns`, `mremap`, `vmsplice`.
//!
//! `io_uring_enter` is not on it either: a ring runs operations behind the filter's back, among them
//! those that are denied here. Whoever needs a ring one day makes it before the list is in force,
//! restricts it to the operations it is for (`IORING_REGISTER_RESTRICTIONS`), and adds the call.

use std::collections::BTreeMap;

use seccompiler::{
    SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
    TargetArch,
};

use crate::sys::spawn::DomainKind;

/// A row of the list: one call, allowed when all of its conditions hold. A call may have several
/// rows.
#[derive(Clone, Copy, Debug)]
pub struct Allowed {
    /// The call's number on this architecture.
    pub number: libc::c_long,
    /// Who may make it.
    pub who: Who,
    /// What its arguments must be.
    pub when: &'static [Argument],
    /// What needs it.
    pub why: &'static str,
}

/// Who may make a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Who {
    /// Every domain.
    Both,
    /// The driver domain, which holds the hub.
    Driver,
    /// The uplink of a guest, which has sockets of the host's network.
    Uplink,
    /// `ringfence serve` and `ringfence attach`, which open devices as they need them.
    Daemon,
}

/// A process that the list is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Confined {
    /// A domain of `ringfence run`.
    Domain(DomainKind),
    /// `ringfence serve` or `ringfence attach`.
    Daemon,
}

impl Confined {
    /// Whether a row is for it.
    fn is_among(self, who: Who) -> bool {
        match who {
            Who::Both => true,
            Who::Driver => self == Confined::Domain(DomainKind::Driver),
            Who::Uplink => self == Confined::Domain(DomainKind::Uplink),
            Who::Daemon => self == Confined::Daemon,
        }
    }
}

/// A condition on an argument.
#[derive(Clone, Copy, Debug)]
pub struct Argument {
    /// Which, from 0.
    pub index: u8,
    /// What its low 32 bits must be.
    pub test: Test,
}

/// What an argument's low 32 bits must be.
#[derive(Clone, Copy, Debug)]
pub enum Test {
    /// This number.
    Is(u32),
    /// This number after masking.
    Masked {
        /// The bits looked at.
        mask: u32,
        /// What they must be.
        is: u32,
    },
    /// This process's id.
    OwnPid,
}

/// Why the list could not be put in force.
#[derive(Debug, thiserror::Error)]
pub enum FilterError {
    /// The list does not translate into a filter, or the kernel does not take it.
    #[error("{0}")]
    Filter(#[from] seccompiler::Error),
    /// A row of the list is malformed, or this processor is not supported.
    #[error("{0}")]
    Backend(#[from] seccompiler::BackendError),
}

/// `linux/fs.h`.
const BLKDISCARD: i32 = 0x1277;
const BLKSECDISCARD: i32 = 0x127D;
const BLKSSZGET: i32 = 0x1268;
const BLKPBSZGET: i32 = 0x127B;
const BLKGETSIZE64: i32 = 0x8008_1272_u32.cast_signed();
/// `ioctls.h`.
const FIONREAD: i32 = 0x541B;

const fn always(number: libc::c_long, why: &'static str) -> Allowed {
    Allowed { number, who: Who::Both, when: &[], why }
}

const fn when(number: libc::c_long, when: &'static [Argument], why: &'static str) -> Allowed {
    Allowed { number, who: Who::Both, when, why }
}

const fn driver(number: libc::c_long, when: &'static [Argument], why: &'static str) -> Allowed {
    Allowed { number, who: Who::Driver, when, why }
}

const fn uplink(number: libc::c_long, when: &'static [Argument], why: &'static str) -> Allowed {
    Allowed { number, who: Who::Uplink, when, why }
}

const fn daemon(number: libc::c_long, when: &'static [Argument], why: &'static str) -> Allowed {
    Allowed { number, who: Who::Daemon, when, why }
}

const fn is(index: u8, value: i32) -> Argument {
    Argument { index, test: Test::Is(value.cast_unsigned()) }
}

const fn masked(index: u8, mask: i32, value: i32) -> Argument {
    Argument { index, test: Test::Masked { mask: mask.cast_unsigned(), is: value.cast_unsigned() } }
}

/// The second argument of `socket(2)`, whatever its flags.
const fn socket_type(value: i32) -> Argument {
    masked(1, 0xf, value)
}

const fn has(index: u8, bits: i32) -> Argument {
    masked(index, bits, bits)
}

const fn lacks(index: u8, bits: i32) -> Argument {
    masked(index, bits, 0)
}

/// What a new thread has, and a new process or namespace has not.
const THREAD: i32 = libc::CLONE_VM | libc::CLONE_THREAD | libc::CLONE_SIGHAND;
const NAMESPACES: i32 = libc::CLONE_NEWUSER
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWNS
    | libc::CLONE_NEWNET
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWUTS
    | libc::CLONE_NEWCGROUP;

/// The list.
pub const LIST: &[Allowed] = &[
    // Bytes.
    always(libc::SYS_read, "frames from a TAP; eventfds and timers"),
    always(libc::SYS_write, "frames to a TAP; the log on standard error"),
    always(libc::SYS_readv, "frames in several parts"),
    always(libc::SYS_writev, "frames in several parts"),
    always(libc::SYS_pread64, "grant copies"),
    always(libc::SYS_pwrite64, "grant copies"),
    always(libc::SYS_preadv, "grant copies"),
    always(libc::SYS_pwritev, "grant copies"),
    always(libc::SYS_preadv2, "grant copies"),
    always(libc::SYS_pwritev2, "grant copies"),
    // Sockets that were handed in, or made as pairs. None is ever made from a family and bound.
    always(libc::SYS_recvmsg, "hub, store: messages with descriptors"),
    always(libc::SYS_sendmsg, "hub, store: messages with descriptors"),
    always(libc::SYS_recvfrom, "event channels, store"),
    always(libc::SYS_sendto, "event channels, store"),
    always(libc::SYS_shutdown, "telling a peer that there is no more"),
    when(libc::SYS_getsockopt, &[is(1, libc::SOL_SOCKET)], "type and credentials of a peer"),
    when(
        libc::SYS_setsockopt,
        &[is(1, libc::SOL_SOCKET), is(2, libc::SO_SNDBUF)],
        "bounding what a peer can make the kernel hold",
    ),
    when(
        libc::SYS_setsockopt,
        &[is(1, libc::SOL_SOCKET), is(2, libc::SO_RCVBUF)],
        "bounding what a peer can make the kernel hold",
    ),
    always(libc::SYS_accept4, "who connects: domains, users of a disk, askers of the status"),
    driver(libc::SYS_socketpair, &[is(0, libc::AF_UNIX)], "event channels, store connections"),
    // Waiting.
    always(libc::SYS_ppoll, "waiting"),
    always(libc::SYS_epoll_create1, "waiting for many"),
    always(libc::SYS_epoll_ctl, "waiting for many"),
    always(libc::SYS_epoll_pwait, "waiting for many"),
    always(libc::SYS_epoll_pwait2, "waiting for many"),
    always(libc::SYS_eventfd2, "waking a thread of one's own"),
    always(libc::SYS_timerfd_create, "waking later"),
    always(libc::SYS_timerfd_settime, "waking later"),
    always(libc::SYS_timerfd_gettime, "waking later"),
    always(libc::SYS_nanosleep, "waiting"),
    always(libc::SYS_clock_nanosleep, "waiting"),
    always(libc::SYS_restart_syscall, "the kernel goes on with a wait after SIGSTOP and SIGCONT"),
    always(libc::SYS_futex, "locks, joining threads"),
    always(libc::SYS_sched_yield, "polling threads let others run"),
    // Memory. Nothing becomes executable; nothing becomes a huge page, through which a page could
    // be kept that was taken back (MADV_COLLAPSE, MADV_HUGEPAGE).
    when(libc::SYS_mmap, &[lacks(2, libc::PROT_EXEC)], "mapping arenas; the allocator; stacks"),
    when(libc::SYS_mprotect, &[lacks(2, libc::PROT_EXEC)], "guard pages; the allocator"),
    always(libc::SYS_munmap, "unmapping arenas; the allocator"),
    always(libc::SYS_brk, "the allocator"),
    when(libc::SYS_madvise, &[is(2, libc::MADV_NORMAL)], "undoing other advice"),
    when(libc::SYS_madvise, &[is(2, libc::MADV_DONTNEED)], "the allocator; stacks of old threads"),
    when(libc::SYS_madvise, &[is(2, libc::MADV_FREE)], "the allocator"),
    when(libc::SYS_madvise, &[is(2, libc::MADV_NOHUGEPAGE)], "arenas are kept in small pages"),
    when(libc::SYS_madvise, &[is(2, libc::MADV_DONTDUMP)], "lent memory stays out of core files"),
    when(libc::SYS_madvise, &[is(2, libc::MADV_POPULATE_READ)], "touching pages ahead of use"),
    when(libc::SYS_madvise, &[is(2, libc::MADV_POPULATE_WRITE)], "touching pages ahead of use"),
    // Files that were handed in.
    always(libc::SYS_close, "done with a descriptor"),
    always(libc::SYS_fstat, "an arena's exact size"),
    always(libc::SYS_fstatfs, "that an arena is on tmpfs"),
    when(libc::SYS_newfstatat, &[has(3, libc::AT_EMPTY_PATH)], "fstat, as newer C libraries do it"),
    when(libc::SYS_statx, &[has(2, libc::AT_EMPTY_PATH)], "fstat, as the standard library does it"),
    always(
        libc::SYS_fallocate,
        "revoking: punching pages out of one's own arena; giving up ranges of a disk",
    ),
    driver(libc::SYS_fdatasync, &[], "a guest flushes its disk"),
    driver(libc::SYS_ioctl, &[is(1, BLKDISCARD)], "giving up ranges of a block device"),
    driver(libc::SYS_ioctl, &[is(1, BLKSECDISCARD)], "the same, for certain"),
    when(libc::SYS_fcntl, &[is(1, libc::F_GETFD)], "descriptor flags"),
    when(libc::SYS_fcntl, &[is(1, libc::F_SETFD)], "descriptor flags"),
    when(libc::SYS_fcntl, &[is(1, libc::F_GETFL)], "whether an arena is open for writing"),
    when(libc::SYS_fcntl, &[is(1, libc::F_SETFL)], "O_NONBLOCK"),
    when(libc::SYS_fcntl, &[is(1, libc::F_DUPFD_CLOEXEC)], "a second handle"),
    when(libc::SYS_fcntl, &[is(1, libc::F_GET_SEALS)], "an arena's exact seals"),
    when(libc::SYS_ioctl, &[is(1, FIONBIO)], "O_NONBLOCK, as the standard library sets it"),
    // Threads.
    when(
        libc::SYS_clone,
        &[has(0, THREAD), lacks(0, NAMESPACES)],
        "threads; processes are not to be had",
    ),
    always(libc::SYS_clone3, "reaches the second filter, which answers ENOSYS"),
    always(libc::SYS_set_robust_list, "start of a thread"),
    always(libc::SYS_rseq, "start of a thread"),
    always(libc::SYS_sigaltstack, "start and end of a thread: stack overflow is reported"),
    always(libc::SYS_sched_getaffinity, "start of a thread: the C library looks at its stack"),
    always(libc::SYS_gettid, "locks; abort"),
    always(libc::SYS_getpid, "abort"),
    when(libc::SYS_tgkill, &[Argument { index: 0, test: Test::OwnPid }], "abort"),
    always(libc::SYS_rt_sigaction, "abort; stack overflow"),
    always(libc::SYS_rt_sigprocmask, "start of a thread; abort"),
    always(libc::SYS_rt_sigreturn, "return from a signal handler"),
    always(libc::SYS_exit, "end of a thread"),
    always(libc::SYS_exit_group, "end of the process"),
    // Asking the kernel.
    always(libc::SYS_clock_gettime, "time, where the vDSO does not know it; CPU time used"),
    always(libc::SYS_clock_getres, "timers"),
    always(libc::SYS_getrandom, "hash tables; domain keys"),
    always(libc::SYS_getrusage, "CPU time and faults, for the figures"),
    when(libc::SYS_prlimit64, &[is(0, 0), is(2, 0)], "reading a limit (of its own, setting none)"),
    // What an uplink needs: sockets of IPv4 and IPv6, and of nothing else. Where they lead is the
    // uplink's own business; a raw one would need a capability.
    uplink(libc::SYS_socket, &[is(0, libc::AF_INET), socket_type(libc::SOCK_STREAM)], "TCP"),
    uplink(libc::SYS_socket, &[is(0, libc::AF_INET6), socket_type(libc::SOCK_STREAM)], "TCP"),
    uplink(libc::SYS_socket, &[is(0, libc::AF_INET), socket_type(libc::SOCK_DGRAM)], "UDP, echo"),
    uplink(libc::SYS_socket, &[is(0, libc::AF_INET6), socket_type(libc::SOCK_DGRAM)], "UDP, echo"),
    uplink(libc::SYS_connect, &[], "conversations that the guest begins"),
    uplink(libc::SYS_bind, &[], "the port of a guest's, where it is free"),
    uplink(libc::SYS_getsockname, &[], "which port it became"),
    uplink(libc::SYS_getpeername, &[], "who is at the other end"),
    uplink(libc::SYS_recvmmsg, &[], "datagrams, many at a time"),
    uplink(libc::SYS_sendmmsg, &[], "datagrams, many at a time"),
    uplink(libc::SYS_splice, &[], "dropping what the guest acknowledged"),
    uplink(libc::SYS_setsockopt, &[is(1, libc::IPPROTO_TCP)], "options of TCP"),
    uplink(libc::SYS_setsockopt, &[is(1, libc::IPPROTO_UDP)], "segmentation of datagrams"),
    uplink(
        libc::SYS_setsockopt,
        &[is(1, libc::IPPROTO_IP)],
        "errors, hops, and who a datagram is for",
    ),
    uplink(libc::SYS_setsockopt, &[is(1, libc::IPPROTO_IPV6)], "the same of IPv6"),
    uplink(libc::SYS_setsockopt, &[is(1, libc::IPPROTO_ICMPV6)], "which messages are heard"),
    uplink(libc::SYS_setsockopt, &[is(1, libc::SOL_SOCKET), is(2, libc::SO_LINGER)], "resets"),
    uplink(libc::SYS_setsockopt, &[is(1, libc::SOL_SOCKET), is(2, libc::SO_PEEK_OFF)], "peeking"),
    uplink(
        libc::SYS_setsockopt,
        &[is(1, libc::SOL_SOCKET), is(2, libc::SO_RCVLOWAT)],
        "few wake-ups",
    ),
    uplink(
        libc::SYS_setsockopt,
        &[is(1, libc::SOL_SOCKET), is(2, libc::SO_KEEPALIVE)],
        "dead peers",
    ),
    uplink(
        libc::SYS_setsockopt,
        &[is(1, libc::SOL_SOCKET), is(2, libc::SO_OOBINLINE)],
        "urgent data",
    ),
    uplink(libc::SYS_setsockopt, &[is(1, libc::SOL_SOCKET), is(2, libc::SO_REUSEADDR)], "ports"),
    uplink(libc::SYS_getsockopt, &[is(1, libc::IPPROTO_TCP)], "state of a connection"),
    uplink(libc::SYS_getsockopt, &[is(1, libc::IPPROTO_IP)], "options in force"),
    uplink(libc::SYS_getsockopt, &[is(1, libc::IPPROTO_IPV6)], "options in force"),
    uplink(libc::SYS_ioctl, &[is(1, SIOCOUTQ)], "room in a socket"),
    uplink(libc::SYS_ioctl, &[is(1, SIOCOUTQNSD)], "room in a socket"),
    uplink(libc::SYS_ioctl, &[is(1, SIOCATMARK)], "the mark of urgent data"),
    uplink(libc::SYS_ioctl, &[is(1, FIONREAD)], "what waits in a socket"),
    uplink(libc::SYS_ioctl, &[is(1, NET_SET_BACKEND)], "taking its queues away from vhost-net"),
    uplink(libc::SYS_ioctl, &[is(1, GET_VRING_BASE)], "how far it has come"),
    // What a daemon needs as devices come and go. Which files, the system's access rights say, and
    // the capabilities that it has not.
    daemon(libc::SYS_openat, &[], "devices of Xen, TAPs, records, /sys, the configuration"),
    #[cfg(target_arch = "x86_64")]
    daemon(libc::SYS_open, &[], "the same, by a library that knows the older call"),
    daemon(libc::SYS_newfstatat, &[lacks(3, libc::AT_EMPTY_PATH)], "whether a file is there"),
    daemon(libc::SYS_statx, &[lacks(2, libc::AT_EMPTY_PATH)], "whether a file is there"),
    daemon(libc::SYS_lseek, &[], "reading a file whole"),
    daemon(libc::SYS_ftruncate, &[], "records of queues"),
    daemon(libc::SYS_unlinkat, &[], "records of queues; sockets"),
    #[cfg(target_arch = "x86_64")]
    daemon(libc::SYS_unlink, &[], "records of queues; sockets"),
    // Each limit of time has two numbers: of before and after 2038.
    daemon(libc::SYS_setsockopt, &[is(1, libc::SOL_SOCKET), is(2, 20)], "a client that is slow"),
    daemon(libc::SYS_setsockopt, &[is(1, libc::SOL_SOCKET), is(2, 21)], "a client that is slow"),
    daemon(libc::SYS_setsockopt, &[is(1, libc::SOL_SOCKET), is(2, 66)], "a client that is slow"),
    daemon(libc::SYS_setsockopt, &[is(1, libc::SOL_SOCKET), is(2, 67)], "a client that is slow"),
    // Disks of guests: files, devices, and servers.
    daemon(libc::SYS_flock, &[], "that nobody else has a disk"),
    daemon(libc::SYS_readlinkat, &[], "where a disk is, when all links are followed"),
    #[cfg(target_arch = "x86_64")]
    daemon(libc::SYS_readlink, &[], "where a disk is, when all links are followed"),
    daemon(libc::SYS_fdatasync, &[], "a guest flushes its disk"),
    daemon(libc::SYS_ioctl, &[is(1, BLKGETSIZE64)], "how large a block device is"),
    daemon(libc::SYS_ioctl, &[is(1, BLKSSZGET)], "how large its sectors are"),
    daemon(libc::SYS_ioctl, &[is(1, BLKPBSZGET)], "how large those of its medium are"),
    daemon(libc::SYS_ioctl, &[is(1, BLKDISCARD)], "giving up ranges of a block device"),
    daemon(libc::SYS_ioctl, &[is(1, BLKSECDISCARD)], "the same, for certain"),
    daemon(libc::SYS_socket, &[is(0, libc::AF_UNIX)], "a disk's server"),
    daemon(
        libc::SYS_socket,
        &[is(0, libc::AF_INET)],
        "a disk's server, and finding it by its name",
    ),
    daemon(
        libc::SYS_socket,
        &[is(0, libc::AF_INET6)],
        "a disk's server, and finding it by its name",
    ),
    daemon(libc::SYS_connect, &[], "a disk's server, and finding it by its name"),
    daemon(libc::SYS_sendmmsg, &[], "finding a server by its name"),
    daemon(libc::SYS_getsockname, &[], "finding a server by its name"),
    daemon(libc::SYS_uname, &[], "finding a server by its name"),
    daemon(libc::SYS_ioctl, &[is(1, FIONREAD)], "finding a server by its name"),
    daemon(
        libc::SYS_setsockopt,
        &[is(1, libc::IPPROTO_TCP), is(2, libc::TCP_NODELAY)],
        "a disk's server: requests are not held back",
    ),
    daemon(
        libc::SYS_setsockopt,
        &[is(1, libc::SOL_SOCKET), is(2, libc::SO_KEEPALIVE)],
        "a disk's server: noticing that it is gone",
    ),
    daemon(libc::SYS_socket, &[is(0, libc::AF_NETLINK)], "interfaces of the host"),
    daemon(libc::SYS_bind, &[], "interfaces of the host"),
    daemon(libc::SYS_ioctl, &[is(1, 0x8933)], "SIOCGIFINDEX: the number of an interface"),
    daemon(libc::SYS_ioctl, &[is(1, 0x0018_4700)], "gntdev: mapping"),
    daemon(libc::SYS_ioctl, &[is(1, 0x0010_4701)], "gntdev: unmapping"),
    daemon(libc::SYS_ioctl, &[is(1, 0x0010_4707)], "gntdev, gntalloc: notice of unmapping"),
    daemon(libc::SYS_ioctl, &[is(1, 0x0010_4708)], "gntdev: copying"),
    daemon(libc::SYS_ioctl, &[is(1, 0x0018_4705)], "gntalloc: lending"),
    daemon(libc::SYS_ioctl, &[is(1, 0x0010_4706)], "gntalloc: taking back"),
    daemon(libc::SYS_ioctl, &[is(1, 0x0008_4501)], "evtchn: binding"),
    daemon(libc::SYS_ioctl, &[is(1, 0x0004_4502)], "evtchn: allocating"),
    daemon(libc::SYS_ioctl, &[is(1, 0x0004_4503)], "evtchn: unbinding"),
    daemon(libc::SYS_ioctl, &[is(1, 0x0004_4504)], "evtchn: notifying"),
    daemon(libc::SYS_ioctl, &[is(1, 0x0000_4505)], "evtchn: after an overflow"),
    daemon(libc::SYS_ioctl, &[is(1, 0x4004_54ca)], "TUNSETIFF: a TAP"),
    daemon(libc::SYS_ioctl, &[is(1, 0x4004_54cb)], "TUNSETPERSIST: that it outlives the daemon"),
    daemon(libc::SYS_ioctl, &[is(1, 0x4004_54d0)], "TUNSETOFFLOAD: what is left to the reader"),
    daemon(libc::SYS_ioctl, &[is(1, 0x4004_54d4)], "TUNSETSNDBUF: that nothing is held back"),
    daemon(libc::SYS_ioctl, &[is(1, 0x4004_54d8)], "TUNSETVNETHDRSZ: headers of 12 bytes"),
    daemon(libc::SYS_ioctl, &[is(1, 0x4004_54dc)], "TUNSETVNETLE: little-endian ones"),
    #[cfg(target_arch = "x86_64")]
    always(libc::SYS_poll, "waiting"),
    #[cfg(target_arch = "x86_64")]
    always(libc::SYS_epoll_wait, "waiting for many"),
];

/// `ioctl-types.h`.
const FIONBIO: i32 = 0x5421;
/// `linux/sockios.h`.
const SIOCOUTQ: i32 = 0x5411;
const NET_SET_BACKEND: i32 = ringfence_wire::vhost::ioctl::NET_SET_BACKEND.cast_signed();
const GET_VRING_BASE: i32 = ringfence_wire::vhost::ioctl::GET_VRING_BASE.cast_signed();
const SIOCOUTQNSD: i32 = 0x894B;
const SIOCATMARK: i32 = 0x8905;

/// Puts the list in force for all threads of this process.
///
/// # Errors
///
/// [`FilterError`]; nothing is in force then, or only the answer for `clone3`.
pub fn enforce(whom: Confined) -> Result<(), FilterError> {
    let arch = TargetArch::try_from(std::env::consts::ARCH)?;
    // The strictest answer of all filters counts, so this one's stands over the list's.
    let no_clone3 = SeccompFilter::new(
        BTreeMap::from([(libc::SYS_clone3, Vec::new())]),
        SeccompAction::Allow,
        SeccompAction::Errno(libc::ENOSYS.cast_unsigned()),
        arch,
    )?;
    let list = SeccompFilter::new(
        rules(whom)?,
        SeccompAction::Errno(libc::EPERM.cast_unsigned()),
        SeccompAction::Allow,
        arch,
    )?;
    // Both are translated before either is in force: afterwards too little is allowed.
    let programs: [seccompiler::BpfProgram; 2] = [no_clone3.try_into()?, list.try_into()?];
    // The first needs no more than a call of its own, which it allows; TSYNC orders the rest.
    for program in &programs {
        seccompiler::apply_filter_all_threads(program)?;
    }
    Ok(())
}

/// The list as `seccompiler` has it: an empty vector means "whatever the arguments".
fn rules(whom: Confined) -> Result<BTreeMap<i64, Vec<SeccompRule>>, FilterError> {
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> = BTreeMap::new();
    for row in LIST {
        if !whom.is_among(row.who) {
            continue;
        }
        let of_call = rules.entry(row.number).or_default();
        if !row.when.is_empty() {
            let conditions = row.when.iter().map(condition).collect::<Result<Vec<_>, _>>()?;
            of_call.push(SeccompRule::new(conditions)?);
        }
    }
    Ok(rules)
}

fn condition(argument: &Argument) -> Result<SeccompCondition, seccompiler::BackendError> {
    let (operator, value) = match argument.test {
        Test::Is(value) => (SeccompCmpOp::Eq, value),
        Test::Masked { mask, is } => (SeccompCmpOp::MaskedEq(mask.into()), is),
        Test::OwnPid => (SeccompCmpOp::Eq, std::process::id()),
    };
    SeccompCondition::new(argument.index, SeccompCmpArgLen::Dword, operator, value.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_has_a_reason_and_no_call_is_both_free_and_conditional() {
        for row in LIST {
            assert!(!row.why.is_empty());
            // Rows for others have nothing to do with it.
            let of_call =
                |r: &&Allowed| r.number == row.number && (r.who == row.who || r.who == Who::Both);
            let free = LIST.iter().filter(of_call).filter(|r| r.when.is_empty()).count();
            let all = LIST.iter().filter(of_call).count();
            assert!(free == 0 || all == 1, "call {} has a row that does nothing", row.number);
        }
    }

    #[test]
    fn the_list_translates_for_all() {
        let domain = Confined::Domain;
        let domains = [DomainKind::Driver, DomainKind::Frontend, DomainKind::Uplink].map(domain);
        for whom in domains.into_iter().chain([Confined::Daemon]) {
            let rules = rules(whom).unwrap();
            let flushes = matches!(whom, Confined::Domain(DomainKind::Driver) | Confined::Daemon);
            assert_eq!(rules.contains_key(&libc::SYS_fdatasync), flushes);
            assert_eq!(rules.contains_key(&libc::SYS_openat), whom == Confined::Daemon);
            // To hosts for a guest; to the servers of disks.
            let connects = matches!(whom, Confined::Domain(DomainKind::Uplink) | Confined::Daemon);
            assert_eq!(rules.contains_key(&libc::SYS_connect), connects);
            let filter = SeccompFilter::new(
                rules,
                SeccompAction::Errno(1),
                SeccompAction::Allow,
                TargetArch::try_from(std::env::consts::ARCH).unwrap(),
            );
            let program: seccompiler::BpfProgram = filter.unwrap().try_into().unwrap();
            // The kernel takes 4096 instructions.
            assert!(program.len() < 1000, "{}", program.len());
        }
    }
}
